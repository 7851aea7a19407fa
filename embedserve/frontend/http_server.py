"""uvicorn as a frontend runs it: on our loop and our sockets, without its signals, with our errors.

Knows the app only as something to serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator
from typing import Any

import orjson
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from embedserve.errors import InvalidInput
from embedserve.frontend.http import TRANSPORT, make_app
from embedserve.frontend.openai import error_body
from embedserve.frontend.service import Service

LISTEN_BACKLOG = 2048
UNREAD_S = 60.0  # a client that takes nothing of its reply for so long is cut off
MAX_PIPELINED = 64  # requests that wait behind another on their connection; what is beyond is not read yet
KEEP_ALIVE_S = 75


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling (the supervisor's) and with events for its two ends."""

    def __init__(self, service: Service, grace_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, math.ceil(grace_s)),
            )
        )
        self.accepting = asyncio.Event()
        self._finished = asyncio.Event()

    async def stop(self) -> None:
        """Accept nothing new; returns when what is in flight is answered, or its time is over."""
        self.should_exit = True
        await self._finished.wait()

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
            self._finished.set()


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with an end to waiting for who does not read, and our error body for what is not HTTP at all."""

    _giving_up: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.flow = _Flow(self)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][TRANSPORT] = self.transport

    def pause_writing(self) -> None:
        """The reply is larger than what lies buffered on both sides."""
        super().pause_writing()
        self._giving_up = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_giving_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_giving_up()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            # uvicorn tells the request that came last; on a pipelining connection another one is being answered.
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _stop_giving_up(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def send_400_response(self, msg: str) -> None:
        error = InvalidInput(f"{msg.rstrip('.')}: the bytes on this connection are not an HTTP/1.1 request.")
        body = orjson.dumps(error_body(error))
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()


class _Flow(FlowControl):
    """uvicorn reads no further while requests wait behind another, and so does not see that their client left; but
    it does read further, however many wait, as soon as that one has its body. Here their number decides.
    """

    def __init__(self, protocol: _Protocol) -> None:
        super().__init__(protocol.transport)
        self._protocol = protocol

    def pause_reading(self) -> None:
        if self._many_wait() or len(self._protocol.cycle.body) > HIGH_WATER_LIMIT:
            super().pause_reading()

    def resume_reading(self) -> None:
        if not self._many_wait():
            super().resume_reading()

    def _many_wait(self) -> bool:
        return len(self._protocol.pipeline) >= MAX_PIPELINED


def listen(host: str, port: int) -> socket.socket:
    """A listening socket beside those of the other frontends; the supervisor has reserved the port for us."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    sock.listen(LISTEN_BACKLOG)
    sock.setblocking(False)
    return sock
