"""The C++ bodies of the operations, compiled on first use with this machine's compiler and kept for the next process.

Knows compilers, files and locks; not what the functions compute. Importing it does nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import stat
import subprocess
import sys
import threading
from pathlib import Path

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "cpp"
_FLAGS = ["-std=c++17", "-O3", "-march=x86-64", "-fPIC", "-shared"]  # newer instructions are chosen at run time
_COMPILE_TIMEOUT_S = 120
_lock = threading.Lock()
_libraries: dict[str, ctypes.CDLL | None] = {}


class _Unavailable(Exception):
    """Why there is no library; the torch bodies serve."""


def cpp_library(name: str) -> ctypes.CDLL | None:
    """cpp/NAME.cpp, compiled and loaded; None where that cannot be. Asks once a process, and logs once why not.

    ctypes releases the GIL while a function of it runs.
    """
    with _lock:
        if name not in _libraries:
            try:
                _libraries[name] = _load(name)
            except (_Unavailable, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
                logger.info("%s runs in torch, at a third of the speed or less: no C++ body here (%s)", name, error)
                _libraries[name] = None
        return _libraries[name]


def _load(name: str) -> ctypes.CDLL:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise _Unavailable(f"this is {sys.platform} on {platform.machine()}, not linux on x86_64")
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    cache = _private_cache()
    version = _run([*compiler, "--version"])
    built_from = hashlib.sha256("\0".join([*compiler, version, *_FLAGS]).encode())
    for path in sorted(_FOLDER.iterdir()):
        built_from.update(path.name.encode() + b"\0" + path.read_bytes())
    library = cache / f"{name}-{built_from.hexdigest()[:24]}.so"
    if not library.exists():
        _compile(compiler, _FOLDER / f"{name}.cpp", library)
    return ctypes.CDLL(str(library))


def _private_cache() -> Path:
    """What lies in it runs in this process, so nobody else may write there."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base.absolute() / "embedserve" / "kernels"
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    for path, forbidden in ((folder.parent, 0o022), (folder, 0o077)):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise _Unavailable(f"{path} belongs to another user, or is a link")
        if status.st_mode & forbidden:
            raise _Unavailable(f"others may use {path}; chmod go-rwx it")
    return folder


def _compile(compiler: list[str], source: Path, library: Path) -> None:
    """The file appears whole or not at all; of several processes one compiles, and the others wait for it."""
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by closing, or by dying
        if library.exists():
            return
        built = library.with_suffix(".part")  # a leftover of one that was killed is overwritten
        _run([*compiler, *_FLAGS, str(source), "-o", str(built)])
        with built.open("rb") as file:
            os.fsync(file.fileno())
        built.rename(library)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_TIMEOUT_S)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise _Unavailable(f"{command[0]} ended with {done.returncode}: {lines[0]}")
    return done.stdout
