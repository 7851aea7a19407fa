"""The methods of embedserve.v1.Embedding: message bytes in, message bytes out, and what a stream has in flight.

Handlers take raw bytes and parse inside: the generated servicer would answer UNKNOWN to a message it cannot decode.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from embedserve import metrics
from embedserve.errors import EmbedserveError, EngineUnavailable, Overloaded, ServerError, shortened
from embedserve.frontend.grpc_messages import (
    embed_call,
    embed_response,
    model_response,
    parse,
    retry_ms,
    stream_error,
    tokenize_call,
    tokenize_response,
)
from embedserve.frontend.service import Hold, Service
from embedserve.v1 import embedding_pb2 as pb

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 64  # requests of one stream, read and not yet answered; what is beyond waits on the client's side

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[bytes, bytes]


class Handlers:
    """`stopping` is done when the server takes nothing new; streams then end by themselves."""

    def __init__(self, service: Service, stopping: asyncio.Future[None]) -> None:
        self._service = service
        self._stopping = stopping

    async def embed(self, body: bytes, context: Context) -> bytes:
        with counted() as outcome, self._admitted(context) as hold:
            hold(len(body))
            request = parse(pb.EmbedRequest, body)
            result = await self._service.embed(embed_call(request), hold)
            outcome.lane = result.lane.name.lower()
            reply: bytes = pb.EmbedResponse(**embed_response(request, result, self._service)).SerializeToString()
            return reply
        return await abort(context, outcome.error)

    async def embed_stream(self, _: object, context: Context) -> None:
        await _Stream(self._service, context).run(self._stopping)

    async def tokenize(self, body: bytes, context: Context) -> bytes:
        with counted() as outcome, self._admitted(context) as hold:
            hold(len(body))
            request = parse(pb.TokenizeRequest, body)
            encoded = await self._service.tokenize(
                tokenize_call(request),
                add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
                with_offsets=request.with_offsets,
            )
            reply: bytes = (await tokenize_response(encoded)).SerializeToString()
            return reply
        return await abort(context, outcome.error)

    @contextmanager
    def _admitted(self, context: Context) -> Iterator[Hold]:
        """The first gate. What a reply holds of it is let go when the client has read the reply, or left."""
        with ExitStack() as held:
            yield held.enter_context(self._service.admit_bytes())
            kept = held.pop_all()
            context.add_done_callback(lambda _: kept.close())  # type: ignore[arg-type]  # it takes any callable

    async def get_model(self, body: bytes, context: Context) -> bytes:
        with counted() as outcome:
            request = parse(pb.GetModelRequest, body)
            self._service.check_model(request.model)
            reply: bytes = model_response(self._service).SerializeToString()
            return reply
        return await abort(context, outcome.error)


class _Stream:
    """One EmbedStream call. A task for each request in flight; replies are written as they come, one at a time.

    It reads on only while there is room: then gRPC's flow control holds the client back. A request takes room until
    its reply is written, so a client that does not read soon cannot write either, and nobody else waits for it.
    """

    def __init__(self, service: Service, context: Context) -> None:
        self._service = service
        self._context = context
        self._max_bytes = service.config.max_body_bytes  # of requests and replies held; at most one request beyond it
        self._bytes = 0
        self._answering: set[asyncio.Task[None]] = set()
        self._answered = asyncio.Event()
        self._writing = asyncio.Lock()

    async def run(self, stopping: asyncio.Future[None]) -> None:
        reading = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            half_closed = reading.done() and reading.result()
            reading.cancel()
            if self._answering:
                await asyncio.wait(self._answering)
        finally:
            # The client left, unless they are done. None may live on: the call's memory goes when this returns.
            await _cancel(reading, *self._answering)
        if not half_closed:
            await abort(
                self._context,
                EngineUnavailable("the server is shutting down; send what this stream did not answer on a new one"),
            )

    async def _read(self) -> bool:
        """Returns True when the client has sent all that it has to send."""
        while isinstance(body := await self._context.read(), bytes):  # else it is EOF
            self._bytes += len(body)
            task = asyncio.ensure_future(self._answer(body))
            self._answering.add(task)
            task.add_done_callback(self._finished)
            while len(self._answering) >= MAX_IN_FLIGHT or self._bytes > self._max_bytes:
                self._answered.clear()
                await self._answered.wait()
        return True

    async def _answer(self, body: bytes) -> None:
        with self._service.admit_bytes() as hold:
            reply = await self._reply(body, hold)
            self._bytes += len(reply)
            with suppress(grpc.aio.BaseError):  # the connection is lost, and this call is about to be cancelled
                async with self._writing:
                    await self._context.write(reply)
        self._bytes -= len(body) + len(reply)

    async def _reply(self, body: bytes, hold: Hold) -> bytes:
        request_id = ""
        with counted() as outcome:
            request = parse(pb.EmbedRequest, body)  # before the gate, so that a refusal says which request it is
            request_id = request.request_id
            hold(len(body))
            result = await self._service.embed(embed_call(request), hold)
            outcome.lane = result.lane.name.lower()
            response = embed_response(request, result, self._service)
            reply: bytes = pb.EmbedStreamResponse(request_id=request_id, response=response).SerializeToString()
            return reply
        failed: bytes = pb.EmbedStreamResponse(
            request_id=request_id, error=stream_error(outcome.error)
        ).SerializeToString()
        return failed

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._answering.discard(task)
        self._answered.set()


@dataclass(slots=True)
class Outcome:
    """What the metrics say of a request; `error` is set when it failed."""

    code: str = "INTERNAL"
    lane: str = "none"
    error: EmbedserveError = field(init=False)


@contextmanager
def counted() -> Iterator[Outcome]:
    """Counts the request that is handled in the block. Whatever error it raises is swallowed and left in `error`."""
    started, outcome = time.monotonic(), Outcome()
    try:
        yield outcome
        outcome.code = "OK"
    except EmbedserveError as error:
        outcome.code, outcome.error = error.grpc_code, error
    except asyncio.CancelledError:
        outcome.code = "CANCELLED"
        metrics.CANCELLED.inc()
        raise
    except Exception as error:  # the outermost frame of a request: grpc would answer UNKNOWN with the bare exception
        log.error("a call failed", exc_info=error)
        outcome.error = ServerError("the server failed to handle this request; its log says why")
    finally:
        metrics.REQUESTS.labels("grpc", outcome.code).inc()
        metrics.REQUEST_SECONDS.labels("grpc", outcome.lane).observe(time.monotonic() - started)


async def abort(context: Context, error: EmbedserveError) -> NoReturn:
    """End the call with the error's status; its code and field travel as trailing metadata, and when to try again."""
    trailing: list[tuple[str, str]] = []
    if error.code:
        trailing.append(("embedserve-code", error.code))
    if error.param:
        trailing.append(("embedserve-param", error.param))
    if isinstance(error, Overloaded):
        trailing.append(("grpc-retry-pushback-ms", str(retry_ms(error))))
    await context.abort(grpc.StatusCode[error.grpc_code], shortened(error.message), tuple(trailing))
    raise AssertionError("abort returned")


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
