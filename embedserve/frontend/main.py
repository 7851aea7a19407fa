"""The frontend process: one event loop with both protocol servers, told by the supervisor which engine to use.

`python -m embedserve.frontend.main SPEC`, started by the supervisor. No torch, no transformers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Coroutine
from typing import NoReturn

import uvloop

from embedserve.errors import StartError
from embedserve.frontend.engine_client import EngineClient
from embedserve.frontend.grpc import GrpcServer
from embedserve.frontend.http_server import HttpServer, listen
from embedserve.frontend.service import Service
from embedserve.logs import stop_logging
from embedserve.messages import Alive, Control, Drain, EngineLost, Failed, Serving, UseEngine
from embedserve.process import ChildSpec, ControlChannel, enter_child, settle_memory

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005  # tokenizer and gRPC threads hand the GIL back sooner than Python's 5 ms
HEALTH_INTERVAL_S = 1.0
ANSWER_S = 1.0  # beyond --drain-s, to tell those who were not answered by then


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
        self._http = HttpServer(self._service, spec.config.drain_s + ANSWER_S)
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False  # to open the ports
        self._serving = False  # both are open
        self._drained = asyncio.Event()

    async def run(self) -> None:
        asyncio.get_running_loop().add_reader(self._control.socket, self._read_control)
        self._spawn(self._watch_health())
        await self._drained.wait()

    def _read_control(self) -> None:
        messages = self._control.receive()
        if messages is None:
            self._exit(0)  # the supervisor is gone: nobody restarts or counts us any more
        try:
            for message in messages:
                self._obey(message)
        except Exception as error:  # the outermost frame of this callback: a frontend that cannot do as told is no use
            if not isinstance(error, StartError):
                log.critical("the frontend failed", exc_info=error)
            self._control.send(Failed(str(error)))
            self._exit(1)

    def _obey(self, message: Control) -> None:
        match message:
            case UseEngine(engine):
                self._service.use(engine.card)
                self._spawn(self._connect(message))
            case Alive(busy_s):
                self._engine.heard_alive(busy_s)
            case EngineLost(incarnation):
                if self._engine.incarnation == incarnation:
                    self._engine.disconnect()
                    self._spawn(self._show_health())
            case Drain():
                self._spawn(self._drain())

    async def _connect(self, message: UseEngine) -> None:
        await self._engine.connect(message.engine)
        await self._show_health()
        if not self._started:
            self._started = True
            await self._grpc.start(self._spec.host, self._spec.grpc_port)
            self._spawn(self._http.serve([listen(self._spec.host, self._spec.http_port)]))
            await self._http.accepting.wait()
            self._serving = True
            settle_memory()
            self._control.send(Serving())

    async def _watch_health(self) -> None:
        while True:
            await self._show_health()
            await asyncio.sleep(HEALTH_INTERVAL_S)

    async def _show_health(self) -> None:
        await self._grpc.show_health(self._service.not_ready() is None)

    async def _drain(self) -> None:
        self._service.draining = True
        if self._serving:
            await self._grpc.show_health(False)
            # Then whoever still waits is told, while the servers wait a little longer.
            asyncio.get_running_loop().call_later(
                self._spec.config.drain_s, self._engine.disconnect, "the server is shutting down"
            )
            await asyncio.gather(self._http.stop(), self._grpc.stop(self._spec.config.drain_s + ANSWER_S))
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
            self._exit(1)

    def _exit(self, status: int) -> NoReturn:
        stop_logging()
        os._exit(status)


if __name__ == "__main__":
    main()
