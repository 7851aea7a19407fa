"""The frontend process: one event loop with both protocol servers, told by the supervisor which engine to use.

`python -m embedserve.frontend.main SPEC`, started by the supervisor. No torch, no transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Coroutine, Iterator

import uvicorn
import uvloop

from embedserve.frontend.engine_client import EngineClient
from embedserve.frontend.grpc import GrpcServer
from embedserve.frontend.http import make_app
from embedserve.frontend.service import Service
from embedserve.messages import Control, Drain, EngineLost, Serving, UseEngine
from embedserve.process import ChildSpec, ControlChannel, enter_child, settle_memory

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005  # tokenizer and gRPC threads hand the GIL back sooner than Python's 5 ms
HEALTH_INTERVAL_S = 1.0
LISTEN_BACKLOG = 2048
KEEP_ALIVE_S = 75


def main() -> None:
    spec, control = enter_child("frontend")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(_run(spec, control))


async def _run(spec: ChildSpec, control: ControlChannel) -> None:
    await Frontend(spec, control).run()  # made on the running loop, to which grpc.aio binds itself


class Frontend:
    def __init__(self, spec: ChildSpec, control: ControlChannel) -> None:
        self._spec = spec
        self._control = control
        self._engine = EngineClient(spec.name, max_tokens=spec.config.queued_tokens_share)
        self._service = Service(spec.config, self._engine)
        self._grpc = GrpcServer(self._service)
        self._http = _HttpServer(self._service, spec.config.drain_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving = False
        self._drained = asyncio.Event()

    async def run(self) -> None:
        asyncio.get_running_loop().add_reader(self._control.socket, self._read_control)
        self._spawn(self._watch_health())
        await self._drained.wait()

    def _read_control(self) -> None:
        messages = self._control.receive()
        if messages is None:
            os._exit(0)  # the supervisor is gone: nobody restarts or counts us any more
        for message in messages:
            self._obey(message)

    def _obey(self, message: Control) -> None:
        match message:
            case UseEngine(engine):
                self._service.use(engine.card)
                self._spawn(self._connect(message))
            case EngineLost(incarnation):
                if self._engine.incarnation == incarnation:
                    self._engine.disconnect()
            case Drain():
                self._spawn(self._drain())

    async def _connect(self, message: UseEngine) -> None:
        await self._engine.connect(message.engine)
        if not self._serving:
            self._serving = True
            config = self._spec.config
            await self._grpc.start(config.host, self._spec.grpc_port)
            await self._grpc.show_health(self._service.not_ready() is None)
            self._spawn(self._http.serve([_listen(config.host, self._spec.http_port)]))
            await self._http.accepting.wait()
            settle_memory()
            self._control.send(Serving())

    async def _watch_health(self) -> None:
        while True:
            await self._grpc.show_health(self._service.not_ready() is None)
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _drain(self) -> None:
        self._service.draining = True
        await self._grpc.show_health(False)
        self._http.should_exit = True
        await asyncio.gather(self._http.finished.wait(), self._grpc.stop(self._spec.config.drain_s))
        self._drained.set()

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that fails takes the process with it; the supervisor starts another."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("the frontend failed", exc_info=task.exception())
            asyncio.get_running_loop().stop()


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling (the supervisor's) and with events for its two ends."""

    def __init__(self, service: Service, drain_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, int(drain_s)),
            )
        )
        self.accepting = asyncio.Event()
        self.finished = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            self.finished.set()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket beside those of the other frontends; the supervisor has reserved the port for us."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    sock.listen(LISTEN_BACKLOG)
    sock.setblocking(False)
    return sock


if __name__ == "__main__":
    main()
