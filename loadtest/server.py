"""embedserve itself as a child process, and how to keep a server that is not being measured from running.
Knows commands and signals; nothing of what is sent to a server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest import cpu
from loadtest.load import LoadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0
SHOWN_LOG_LINES = 20

# In the line that the server prints when it is ready: http://127.0.0.1:8080 and grpc://127.0.0.1:50051, in any words.
HTTP_ADDRESS = re.compile(r"http://[\w.\[\]:-]+:\d+")
GRPC_ADDRESS = re.compile(r"grpc(?:://|:? +(?:at |on )?)([\w.\[\]:-]+:\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Server:
    url: str  # http://HOST:PORT
    grpc: str  # HOST:PORT; empty for one without gRPC
    pid: int  # of the first process of its tree


@contextmanager
def embedserve_server(arguments: Sequence[str]) -> Iterator[Server]:
    """`embedserve serve` with these arguments, on free ports, from ready before the body until stopped after it.

    Raises LoadError, with the end of its log, when it does not come to be ready.
    """
    command = [sys.executable, "-m", "embedserve", "serve", "--http-port", "0", "--grpc-port", "0", *arguments]
    with tempfile.TemporaryDirectory(prefix="embedserve-loadtest-") as folder:
        log_file = Path(folder) / "server.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield wait_until_ready(process, log_file)
        finally:
            stop(process)


def wait_until_ready(process: subprocess.Popen[bytes], log_file: Path) -> Server:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (addresses := find_addresses(log_file.read_text(encoding="utf-8", errors="replace"))) is None:
        if process.poll() is not None:
            raise LoadError(f"The server ended with status {process.returncode} before it was ready:\n{tail(log_file)}")
        if time.monotonic() > deadline_s:
            raise LoadError(f"The server was not ready within {START_TIMEOUT_S:.0f} s:\n{tail(log_file)}")
        time.sleep(0.05)
    url, grpc = addresses
    return Server(url, grpc, process.pid)


def find_addresses(log: str) -> tuple[str, str] | None:
    """(http://HOST:PORT, HOST:PORT of gRPC) from the first whole line that has both."""
    for line in log.splitlines(keepends=True):
        http, grpc = HTTP_ADDRESS.search(line), GRPC_ADDRESS.search(line)
        if http and grpc and line.endswith("\n"):
            return http[0], grpc[1]
    return None


def stop(process: subprocess.Popen[bytes]) -> None:
    resume(process.pid)  # a stopped process does not see SIGTERM
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):  # what outlived it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def awake(pid: int) -> Iterator[None]:
    """The server runs in the body, and is paused after it, at no cost but its memory."""
    resume(pid)
    try:
        yield
    finally:
        pause(pid)


def pause(pid: int) -> None:
    """SIGSTOP to the whole tree, parents first, so that none sees its children silent."""
    signal_all(cpu.process_tree(pid), signal.SIGSTOP)


def resume(pid: int) -> None:
    """SIGCONT to the whole tree, children first."""
    signal_all(cpu.process_tree(pid)[::-1], signal.SIGCONT)


def signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def tail(log_file: Path) -> str:
    lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-SHOWN_LOG_LINES:])
