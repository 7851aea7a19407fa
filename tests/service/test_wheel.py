"""The wheel, installed where nothing else of this repository is: the client alone, and the whole server.
Knows pip and virtual environments; needs no network, for dependencies come from the environment of the tests.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Protocol

    class Server(Protocol):
        http_url: str
        grpc_target: str


ROOT = Path(__file__).parents[2]
SITE_PACKAGES = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
READY_LINE = re.compile(r" and grpc (\S+)\n")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

CLIENT_SCRIPT = """
import sys
from embedserve_client import BadRequest, EmbedClient

with EmbedClient(sys.argv[1]) as client:
    result = client.embed_full(["one text", "another"])
    assert result.vectors.shape == (2, result.dims), result.vectors.shape
    assert result.times.total_ms > 0
    int8 = client.embed_full(["one text"], dtype="int8")
    assert abs(int8.vectors * int8.scales[:, None] - result.vectors[:1]).max() < 0.01
    try:
        client.embed(["fine", "long " * 10_000])
    except BadRequest as error:
        assert (error.code, error.param) == ("context_length_exceeded", "texts[1]"), (error.code, error.param)
    else:
        raise AssertionError("an input of 10,000 words was taken")
assert "torch" not in sys.modules
print("embedded", len(result.vectors))
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def client_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the wheel and what it requires without extras, and nothing else."""
    return make_venv(tmp_path_factory.mktemp("client") / "venv", wheel, extra="")


@pytest.fixture(scope="session")
def server_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the wheel and what it requires with [server], and nothing else."""
    return make_venv(tmp_path_factory.mktemp("server") / "venv", wheel, extra="server")


def test_wheel_has_the_three_packages_and_nothing_else(wheel: Path) -> None:
    packages = [ROOT / "embedserve", ROOT / "kernels/embedserve_kernels", ROOT / "clients/embedserve_client"]
    files = [(path, package.parent) for package in packages for path in package.rglob("*") if path.is_file()]
    sources = {str(path.relative_to(base)) for path, base in files if path.parent.name != "__pycache__"}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == sources
    assert {f"{package.name}/py.typed" for package in packages} <= names


def test_wheel_carries_its_licence_and_its_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        (entry_points,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        assert "embedserve = embedserve.cli:main" in archive.read(entry_points).decode()


def test_client_installs_without_the_server(client_venv: Path, tmp_path: Path) -> None:
    for module in ("embedserve", "embedserve_client", "embedserve_kernels"):
        said = run(client_venv / "bin/python", "-c", f"import {module}; print({module}.__file__)", cwd=tmp_path)
        assert Path(said.strip()).is_relative_to(client_venv)
    absent = "import importlib.util as i; print([n for n in ('torch', 'zmq', 'msgspec') if i.find_spec(n)])"
    assert run(client_venv / "bin/python", "-c", absent, cwd=tmp_path).strip() == "[]"


def test_client_from_the_wheel_embeds(client_venv: Path, server: Server, tmp_path: Path) -> None:
    said = run(client_venv / "bin/python", "-W", "error", "-c", CLIENT_SCRIPT, server.grpc_target, cwd=tmp_path)
    assert said.strip() == "embedded 2"


def test_server_from_the_wheel_serves(server_venv: Path, tmp_path: Path) -> None:
    with serving(server_venv, tmp_path) as grpc_target:
        said = run(server_venv / "bin/python", "-c", CLIENT_SCRIPT, grpc_target, cwd=tmp_path)
    assert said.strip() == "embedded 2"


@contextmanager
def serving(venv: Path, folder: Path) -> Iterator[str]:
    """The gRPC address of a server that runs from `venv` in `folder`. It must stop cleanly."""
    command = [str(venv / "bin/embedserve"), "serve", "--http-port", "0", "--grpc-port", "0"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    try:
        assert process.stdout is not None
        ready_line = process.stdout.readline().decode()
        found = READY_LINE.search(ready_line)
        assert found, f"not ready: {ready_line!r}\n{(folder / 'server.log').read_text()}"
        yield found[1]
        process.terminate()
        assert process.wait(60) == 0, (folder / "server.log").read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def make_venv(venv: Path, wheel: Path, extra: str) -> Path:
    """As `pip install WHEEL[extra]` in a new environment would, with the versions that this environment has."""
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    for name in distributions_required(wheel, extra):
        link_distribution(name, venv / SITE_PACKAGES)
    pip_install = (sys.executable, "-m", "pip", "--python", venv / "bin/python", "install")
    run(*pip_install, "--disable-pip-version-check", "--no-index", "--no-deps", wheel)
    return venv


def distributions_required(wheel: Path, extra: str) -> set[str]:
    """What the wheel requires, and what that requires in turn."""
    (metadata,) = importlib.metadata.distributions(path=[str(wheel)])
    unread = [(line, extra) for line in metadata.requires or ()]
    read: set[tuple[str, str]] = set()
    while unread:
        line, of_extra = unread.pop()
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        for wanted in {(canonicalize_name(requirement.name), name) for name in ("", *requirement.extras)} - read:
            read.add(wanted)
            unread += [(deeper, wanted[1]) for deeper in importlib.metadata.requires(wanted[0]) or ()]
    return {name for name, _ in read}


def link_distribution(name: str, site_packages: Path) -> None:
    for file in set(importlib.metadata.files(name) or ()):
        if ".." not in file.parts:  # scripts lie outside
            (site_packages / file).parent.mkdir(parents=True, exist_ok=True)
            (site_packages / file).symlink_to(str(file.locate()))


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout
