"""What every child process does first: die with its parent, take a title, start its log, open its control channel.

Knows the supervisor's side of that hand-over too (spawn), and nothing of what the children do.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

import msgspec
import setproctitle

from embedserve.config import Config
from embedserve.logs import start_logging
from embedserve.messages import Control, decode_control, encode_control

PR_SET_PDEATHSIG = 1
GC_THRESHOLD = 10_000  # allocations between two collections of the youngest generation


class ChildSpec(msgspec.Struct, frozen=True):
    """What a child is told at birth. `number` is the engine's incarnation or the frontend's index."""

    name: str  # unique among all children ever: "engine.1", "frontend.0.2"
    number: int
    config: Config
    run_dir: str  # private (0700); holds the sockets
    parent_pid: int
    control_fd: int
    host: str  # an address, resolved
    http_port: int
    grpc_port: int


def spawn(
    module: str, spec: ChildSpec, env: dict[str, str], *, stderr: IO[str] | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m module` as a child; returns it and our end of its control channel.

    Must be called on the main thread: a child dies with the *thread* that started it.
    """
    assert threading.current_thread() is threading.main_thread()
    ours, theirs = socket.socketpair()
    with theirs:
        spec = msgspec.structs.replace(spec, control_fd=theirs.fileno())
        command = [sys.executable, "-m", module, msgspec.json.encode(spec).decode()]
        process = subprocess.Popen(
            command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stderr=stderr
        )
    return process, ours


def enter_child(role: str) -> tuple[ChildSpec, ControlChannel]:
    """Called first in a child's main(); exits when the parent is already gone."""
    spec = msgspec.json.decode(sys.argv[1], type=ChildSpec)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != spec.parent_pid:
        sys.exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they may reach the whole group; the supervisor alone answers them
    _report_crashes()
    setproctitle.setproctitle(f"embedserve: {role} {spec.number}")
    start_logging(spec.config.log_format, spec.name)
    return spec, ControlChannel(socket.socket(fileno=spec.control_fd))


def _report_crashes() -> None:
    """A crash (SIGSEGV, SIGABRT, …) leaves every thread's stack in the log, and no core file unless asked for.

    Writing out gigabytes holds up the end of the process, and with it the news to those who wait on it. A limit of 1 is
    what stops core handlers that are programs too (core(5)); `prlimit --core=unlimited --pid` raises it again.
    """
    faulthandler.enable()
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (1 if most else 0, most))


def settle_memory() -> None:
    """Called once all is loaded: what is there stays, so the garbage collector need not walk it ever again.

    Requests leave few cycles behind; collecting every 700 allocations cost a frontend 4% of its time. What loading
    freed goes back to the system.
    """
    gc.collect()
    with suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


class ControlChannel:
    """A child's end of its line to the supervisor: one JSON object a line, both ways. Its end of file means: exit."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._received = b""

    def send(self, message: Control) -> None:
        with suppress(ConnectionError):  # the supervisor is gone, as the next receive will say
            self.socket.sendall(encode_control(message))

    def receive(self) -> list[Control] | None:
        """Read once (the socket is readable) and return the whole messages so far; None at the end of file."""
        try:
            chunk = self.socket.recv(1 << 16)
        except ConnectionError:
            chunk = b""
        if not chunk:
            return None
        *lines, self._received = (self._received + chunk).split(b"\n")
        return [decode_control(line) for line in lines]


@contextmanager
def naming_threads(name: str) -> Iterator[None]:
    """Threads that libraries start in this block are called so: a thread inherits the name of the one it comes from."""
    own = threading.current_thread().name
    setproctitle.setthreadtitle(name)
    try:
        yield
    finally:
        setproctitle.setthreadtitle(own)


class NamedThread(threading.Thread):
    """A daemon thread whose OS name is its name; `ended` is called with its exception, or None, however it ends."""

    def __init__(self, name: str, run: Callable[[], None], ended: Callable[[str, BaseException | None], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._body = run
        self._ended = ended

    def run(self) -> None:
        setproctitle.setthreadtitle(self.name)
        try:
            self._body()
        except BaseException as error:  # the outermost frame of a thread: whatever ended it is reported
            self._ended(self.name, error)
        else:
            self._ended(self.name, None)


def wait_readable(*sources: Any, every_s: float) -> Iterator[Any]:
    """Yield each source (a socket or descriptor) whenever it is readable, and None when none was for `every_s`."""
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = selector.select(every_s)
            for key, _ in ready:
                yield key.fileobj
            if not ready:
                yield None
