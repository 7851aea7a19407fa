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
from typing import TYPE_CHECKING, NoReturn

from loadtest import cpu
from loadtest.load import LoadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.05
SHOWN_LOG_LINES = 40
READY_LINE = re.compile(r" is ready: .* at (http://\S+) and grpc (\S+)\n")


@dataclass(frozen=True)
class Server:
    url: str  # http://HOST:PORT
    grpc: str  # HOST:PORT; empty for one without gRPC
    pid: int  # of the first process of its tree


@contextmanager
def embedserve_server(arguments: Sequence[str]) -> Iterator[Server]:
    """`embedserve serve` with these arguments, from ready before the body until stopped after it.

    Raises LoadError, with the end of its log, when it does not come to be ready.
    """
    with embedserve_process(arguments) as started:
        while (server := started.server_if_ready()) is None:
            time.sleep(POLL_S)
        yield server


@contextmanager
def embedserve_process(arguments: Sequence[str]) -> Iterator[EmbedserveProcess]:
    """`embedserve serve` on free ports of HOST, not yet ready. Whatever happens in the body, it is gone afterwards."""
    command = [sys.executable, "-m", "embedserve", "serve", "--host", HOST, "--http-port", "0", "--grpc-port", "0"]
    with tempfile.TemporaryDirectory(prefix="embedserve-loadtest-") as folder:
        log_file = Path(folder) / "server.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [*command, *arguments],
                env={name: value for name, value in os.environ.items() if not name.startswith("EMBEDSERVE_")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a group of its own: a Ctrl-C reaches it through us, once
            )
        try:
            yield EmbedserveProcess(process, log_file, time.monotonic() + START_TIMEOUT_S)
        finally:
            stop(process)


@dataclass(frozen=True)
class EmbedserveProcess:
    process: subprocess.Popen[bytes]
    log_file: Path
    ready_by_s: float

    def server_if_ready(self) -> Server | None:
        """Raises LoadError, with the end of the log, when it never will be."""
        if addresses := find_addresses(self.log_file.read_text(encoding="utf-8", errors="replace")):
            return Server(*addresses, self.process.pid)
        if self.process.poll() is not None:
            self._fail(f"ended with status {self.process.returncode} before it was ready")
        if time.monotonic() > self.ready_by_s:
            self._fail(f"was not ready within {START_TIMEOUT_S:.0f} s")
        return None

    def log_end(self) -> str:
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-SHOWN_LOG_LINES:])

    def _fail(self, what: str) -> NoReturn:
        raise LoadError(f"embedserve {what}. Its log ends so:\n{self.log_end()}")


def find_addresses(log: str) -> tuple[str, str] | None:
    """(http://HOST:PORT, HOST:PORT of gRPC), once the line that says ready is whole."""
    found = READY_LINE.search(log)
    return (found[1], found[2]) if found else None


def stop(process: subprocess.Popen[bytes]) -> int:
    """Ask a process that leads a group to end, and see that the group does; its status, -9 if it had to be killed."""
    resume(process.pid)  # a stopped process does not see SIGTERM
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    finally:  # at a second Ctrl-C too
        with suppress(ProcessLookupError):  # what outlived it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode


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
