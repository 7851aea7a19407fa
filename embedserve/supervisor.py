"""The supervisor: reserves the ports, starts engine and frontends, watches, restarts and drains them.

Owns the control channels. Imports nothing heavy and sees no request.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from embedserve import __version__
from embedserve.config import Config, available_cores
from embedserve.errors import StartError
from embedserve.logs import start_logging
from embedserve.messages import (
    Alive,
    Control,
    Drain,
    EngineAddress,
    EngineLost,
    Failed,
    FrontendLost,
    Ready,
    Serving,
    UseEngine,
    decode_control,
    encode_control,
)
from embedserve.process import ChildSpec, spawn

log = logging.getLogger(__name__)

ENGINE_MODULE = "embedserve.engine.core"
FRONTEND_MODULE = "embedserve.frontend.main"
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 10.0
STEADY_S = 60.0  # a child that lived so long starts with the first backoff again
CONTROL_LINE_BYTES = 1 << 20
MAX_SOCKET_DIRECTORY_CHARS = 80  # a socket's path must stay under 108 bytes
KILL_AFTER_S = 5.0  # beyond --drain-s


def serve(config: Config) -> int:
    """Run the server until SIGTERM or SIGINT; returns the exit status. Raises StartError when it cannot start."""
    start_logging(config.log_format, "supervisor")
    reservations = [reserve_port(config.host, config.http_port), reserve_port(config.host, config.grpc_port)]
    host, http_port, *_ = reservations[0].getsockname()
    grpc_port = reservations[1].getsockname()[1]
    run_dir = _private_directory()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = run_dir + "/metrics"
    Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]).mkdir()
    try:
        return asyncio.run(Supervisor(config, run_dir, host, http_port, grpc_port).run())
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
        for sock in reservations:
            sock.close()


def reserve_port(host: str, port: int) -> socket.socket:
    """Hold a port that nobody else listens on, in a way that lets our frontends bind it too. Raises StartError.

    Bound without SO_REUSEPORT, so that a port in use is an error; afterwards it is switched on, for the frontends.
    SO_REUSEADDR tolerates connections of a past server; afterwards it is off, so that no other takes the port
    while we load.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise StartError(f"--host {host}: {error}.") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        hint = " Is another server on it?" if error.errno == errno.EADDRINUSE else ""
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}.{hint}") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return sock


def _private_directory() -> str:
    """A new directory that only we may enter, with a path short enough for the sockets in it."""
    directory = tempfile.mkdtemp(prefix="embedserve-")
    if len(directory) <= MAX_SOCKET_DIRECTORY_CHARS:
        return directory
    os.rmdir(directory)
    return tempfile.mkdtemp(prefix="embedserve-", dir="/tmp")


@dataclass
class Child:
    """One slot: the engine, or a frontend by its index. A slot outlives the processes that fill it."""

    module: str
    number: int
    name: str = ""
    process: subprocess.Popen[bytes] | None = None
    writer: asyncio.StreamWriter | None = None
    backoff_s: float = FIRST_BACKOFF_S
    serving: bool = False


class Supervisor:
    def __init__(self, config: Config, run_dir: str, host: str, http_port: int, grpc_port: int) -> None:
        from embedserve import metrics  # only now is PROMETHEUS_MULTIPROC_DIR set

        self._metrics = metrics
        self._config = config
        self._run_dir = run_dir
        self._host = host
        self._http_port = http_port
        self._grpc_port = grpc_port
        self._engine = Child(ENGINE_MODULE, 0)
        self._frontends = [Child(FRONTEND_MODULE, index) for index in range(config.frontend_count)]
        self._generation = 0  # of frontends, so that no two ever share a name
        self._address: EngineAddress | None = None
        self._announced = False
        self._stopping = asyncio.Event()
        self._failure: str | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        slots = [asyncio.create_task(self._keep(child)) for child in (self._engine, *self._frontends)]
        for slot in slots:
            slot.add_done_callback(self._slot_ended)
        await self._stopping.wait()
        await self._stop(slots)
        if self._failure is not None:
            raise StartError(self._failure)
        return 0

    async def _keep(self, child: Child) -> None:
        """Start a child, follow it to its end, and start it again, until the server stops."""
        while not self._stopping.is_set():
            started = time.monotonic()
            reader = await self._start(child)
            with suppress(ConnectionError):  # a child that dies with a message unread resets the channel
                async for line in reader:
                    self._hear(child, decode_control(line))
            self._lost(child)  # its channel is closed: it is ending, and those who wait on it need not wait for that
            assert child.process is not None
            status = await asyncio.to_thread(child.process.wait)
            if self._stopping.is_set():
                return
            if not self._announced:
                self._fail(f"{child.name} ended with status {status} before the server was ready; its log is above")
                return
            child.backoff_s = FIRST_BACKOFF_S if time.monotonic() - started > STEADY_S else child.backoff_s
            log.error("%s ended with status %s; starting another in %.1f s", child.name, status, child.backoff_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), child.backoff_s)
            child.backoff_s = min(MAX_BACKOFF_S, 2 * child.backoff_s)

    def _slot_ended(self, slot: asyncio.Task[None]) -> None:
        """A slot ends with the server. Should it fail, the server is stopped rather than left without a part."""
        if not slot.cancelled() and (error := slot.exception()) is not None:
            log.critical("the supervisor failed", exc_info=error)
            self._fail(f"the supervisor failed: {error!r}")

    async def _start(self, child: Child) -> asyncio.StreamReader:
        if child is self._engine:
            child.number += 1
            child.name = f"engine.{child.number}"
            env = engine_environment(self._config.threads or available_cores())
        else:
            self._generation += 1
            child.name = f"frontend.{child.number}.{self._generation}"
            env = _frontend_env()
        spec = ChildSpec(
            name=child.name,
            number=child.number,
            config=self._config,
            run_dir=self._run_dir,
            parent_pid=os.getpid(),
            control_fd=-1,
            host=self._host,
            http_port=self._http_port,
            grpc_port=self._grpc_port,
        )
        child.process, sock = spawn(child.module, spec, env)
        reader, child.writer = await asyncio.open_connection(sock=sock, limit=CONTROL_LINE_BYTES)
        if child is not self._engine and self._address is not None:
            self._tell(child, UseEngine(self._address))
        return reader

    def _hear(self, child: Child, message: Control) -> None:
        match message:
            case Ready(address):
                self._address = address
                for frontend in self._frontends:
                    self._tell(frontend, UseEngine(address))
            case Alive():
                for frontend in self._frontends:
                    if frontend.writer is not None and not frontend.writer.transport.get_write_buffer_size():
                        self._tell(frontend, message)  # else it does not read, and would only find old news
            case Serving():
                child.serving = True
                settled = self._announced or self._stopping.is_set()
                if not settled and all(frontend.serving for frontend in self._frontends):
                    self._announce()
            case Failed(text):
                self._fail(text) if not self._announced else log.error("%s: %s", child.name, text)

    def _lost(self, child: Child) -> None:
        """Tell the others what they must know of a child that ended, and let its gauges go."""
        assert child.process is not None
        self._metrics.forget_process(child.process.pid)
        if child.writer is not None:
            child.writer.close()
            child.writer = None
        child.serving = False
        if child is self._engine:
            self._address = None
            if not self._stopping.is_set():
                self._metrics.ENGINE_RESTARTS.inc()
            for frontend in self._frontends:
                self._tell(frontend, EngineLost(child.number))
        else:
            self._tell(self._engine, FrontendLost(child.name))

    def _announce(self) -> None:
        assert self._address is not None
        self._announced = True
        card = self._address.card
        host = f"[{self._host}]" if ":" in self._host else self._host
        line = (
            f"embedserve {__version__} is ready: {card.name}, {card.dims} dimensions, {card.dtype} on {card.device}, "
            f"at http://{host}:{self._http_port} and grpc {host}:{self._grpc_port}"
        )
        try:
            print(line, flush=True)
        except OSError:  # nobody reads our standard output
            log.info(line)

    def _fail(self, message: str) -> None:
        self._failure = self._failure or message
        self._stopping.set()

    def _tell(self, child: Child, message: Control) -> None:
        if child.writer is not None and not child.writer.is_closing():
            child.writer.write(encode_control(message))

    async def _stop(self, slots: list[asyncio.Task[None]]) -> None:
        """Frontends finish what is in flight, then the engine goes; whoever takes longer than --drain-s is killed."""
        for frontend in self._frontends:
            self._tell(frontend, Drain())
        await asyncio.wait(slots[1:], timeout=self._config.drain_s + KILL_AFTER_S)
        if self._engine.writer is not None:
            self._engine.writer.close()  # the engine's sign to go
        await asyncio.wait(slots, timeout=KILL_AFTER_S)
        for child in (self._engine, *self._frontends):
            if child.process is not None and child.process.poll() is None:
                log.warning("%s did not end by itself; killing it", child.name)
                child.process.kill()
        for slot in slots:
            slot.cancel()


def engine_environment(threads: int) -> dict[str, str]:
    """Read by OpenMP when a process starts, so it must be in the environment before exec.

    A passive wait: workers that spin between operations would take the cores that the frontends need.
    """
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
        "MALLOC_TOP_PAD_": str(16 << 20),
        "TOKENIZERS_PARALLELISM": "false",
    }


def _frontend_env() -> dict[str, str]:
    """One core each, and no second thread pool: the tokenizer works in the thread that calls it."""
    return os.environ | {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


if sys.platform != "linux":
    raise ImportError("the embedserve server runs on Linux; the client (embedserve_client) runs anywhere")
