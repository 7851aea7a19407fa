"""The HTTP edge: OpenAI's /v1/embeddings and /v1/models, /health, /ready, /metrics. Translates; decides nothing.

The hot endpoint is a plain ASGI callable behind a Starlette route: msgspec decodes, orjson encodes.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from embedserve import metrics
from embedserve.errors import (
    BodyTimeout,
    BodyTooLarge,
    EmbedserveError,
    InvalidInput,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    RouteNotFound,
    ServerError,
)
from embedserve.frontend.call import EmbedCall, EmbedResult
from embedserve.frontend.openai import (
    ROWS_A_SLICE,
    EmbeddingsRequest,
    decode_request,
    embed_call,
    embeddings_body,
    error_body,
)
from embedserve.frontend.service import Hold, Service
from embedserve.messages import Lane

# Of a body that is too large, so that its sender gets to read the answer.
MAX_DISCARDED_BYTES = 256_000_000
DISCARD_FOR_S = 10.0
# A smaller one fits the buffers of its connection, whose next request is not read before it is gone.
LARGE_REPLY_BYTES = 64 * 1024
TRANSPORT = "transport"  # of its connection, in a request's state; the server puts it there

Header = tuple[bytes, bytes]


def make_app(service: Service) -> Starlette:
    started_at = int(time.time())

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [_model(name, started_at, service) for name in service.served_names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in service.served_names:
            raise ModelNotFound(f"the model {name!r} is not served here; GET /v1/models lists what is.", param="model")
        return _json(_model(name, started_at, service))

    async def health(request: Request) -> Response:
        return _json({"status": "alive"})

    async def ready(request: Request) -> Response:
        reason = service.not_ready()
        return _json({"status": "ready"}) if reason is None else _json({"status": "not ready", "reason": reason}, 503)

    def scrape(request: Request) -> Response:  # not async: it reads files, so Starlette runs it on a thread
        return PlainTextResponse(metrics.scrape(), media_type="text/plain; version=0.0.4")

    app = Starlette(
        routes=[
            Route("/v1/embeddings", _Embeddings(service), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", scrape),
        ],
        exception_handlers={
            HTTPException: _http_exception,
            EmbedserveError: _embedserve_error,
            500: _unexpected_error,
        },
    )
    app.router.redirect_slashes = False  # a redirect would carry whatever the Host header says
    return app


class _Embeddings:
    """POST /v1/embeddings. A caller that disconnects frees its work."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._encoding = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        status, lane = 500, "none"
        try:
            _check_announced_bytes(scope, self._service.config.max_body_bytes)
            reply, result_lane, timing = await self._answer(receive)
            status, lane = 200, result_lane.name.lower()
            await self._send(scope, receive, send, reply, timing)
        except _Disconnected:
            status = 499  # nobody is left to answer; the code is nginx's for it
            metrics.CANCELLED.inc()
        except EmbedserveError as error:
            status = error.http_status
            await _send_error(error, receive, send)
        finally:
            metrics.REQUESTS.labels("http", str(status)).inc()
            metrics.REQUEST_SECONDS.labels("http", lane).observe(time.monotonic() - started)

    async def _answer(self, receive: Receive) -> tuple[bytes, Lane, Header]:
        """The reply's body, its lane and its times; of the vectors nothing is left."""
        with self._service.admit_bytes() as hold:
            body = await self._read_body(receive, hold)
            request = decode_request(body, self._service.card.dims)
            result = await self._until_disconnect(embed_call(request, self._service), hold, receive)
            return await self._encode(request, result), result.lane, _timing_header(result)

    async def _read_body(self, receive: Receive, hold: Hold) -> bytes:
        config = self._service.config
        try:
            async with asyncio.timeout(config.request_timeout_s):
                return await _read_body(receive, config.max_body_bytes, hold)
        except TimeoutError as error:
            raise BodyTimeout(f"the body did not come within {config.request_timeout_s:g} s.") from error

    async def _until_disconnect(self, call: EmbedCall, hold: Hold, receive: Receive) -> EmbedResult:
        embedding = asyncio.ensure_future(self._service.embed(call, hold))
        # After the body, receive() returns once: when the connection is lost or the response is complete.
        watching = asyncio.ensure_future(receive())
        watching.add_done_callback(lambda _: embedding.cancel())
        try:
            return await embedding
        except asyncio.CancelledError:
            if watching.done() and not watching.cancelled():
                raise _Disconnected from None
            embedding.cancel()
            raise
        finally:
            watching.cancel()

    async def _encode(self, request: EmbeddingsRequest, result: EmbedResult) -> bytes:
        """A large reply in slices, between which other requests of this loop get their turn.

        One large reply at a time, for its text is several times as long as its vectors.
        """
        pieces = embeddings_body(request, result, self._service)
        if result.count <= ROWS_A_SLICE:
            return b"".join(pieces)
        encoded = []
        async with self._encoding:
            for piece in pieces:
                encoded.append(piece)
                await asyncio.sleep(0)
            return b"".join(encoded)

    async def _send(self, scope: Scope, receive: Receive, send: Send, body: bytes, *headers: Header) -> None:
        if len(body) <= LARGE_REPLY_BYTES:
            await _send(send, 200, body, *headers)
            return
        transport: asyncio.Transport = scope["state"][TRANSPORT]
        with self._service.unread.waiting(len(body), transport.abort):
            await send(_response_start(200, body, *headers))
            await send({"type": "http.response.body", "body": body, "more_body": True})
            while transport.is_closing():  # uvicorn writes to it until it hears that the connection is lost
                if (await receive())["type"] == "http.disconnect":
                    break
            await send({"type": "http.response.body", "body": b""})  # waits until most of it has been read


class _Disconnected(Exception):
    pass


def _check_announced_bytes(scope: Scope, limit: int) -> None:
    """Raises BodyTooLarge."""
    size = next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
    if size > limit:
        raise _too_large(size, limit)


async def _read_body(receive: Receive, limit: int, hold: Hold) -> bytes:
    """Raises BodyTooLarge before more than `limit` bytes are held, and what `hold` raises of each chunk."""
    message = await receive()
    chunks = [_chunk(message, 0, limit)]
    hold(len(chunks[0]))
    size = len(chunks[0])
    while message.get("more_body"):
        message = await receive()
        chunks.append(_chunk(message, size, limit))
        hold(len(chunks[-1]))
        size += len(chunks[-1])
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _chunk(message: Message, size: int, limit: int) -> bytes:
    if message["type"] == "http.disconnect":
        raise _Disconnected
    chunk: bytes = message.get("body", b"")
    if size + len(chunk) > limit:
        raise _too_large(size + len(chunk), limit)
    return chunk


def _too_large(size: int, limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body has {size} bytes or more; this server takes {limit}. "
        "Send fewer inputs a request, or raise --max-body-mb."
    )


async def _send(send: Send, status: int, body: bytes, *headers: Header) -> None:
    await send(_response_start(status, body, *headers))
    await send({"type": "http.response.body", "body": body})


def _response_start(status: int, body: bytes, *headers: Header) -> Message:
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return {"type": "http.response.start", "status": status, "headers": fixed + list(headers)}


async def _send_error(error: EmbedserveError, receive: Receive, send: Send) -> None:
    body = orjson.dumps(error_body(error))
    headers = _retry_headers(error)
    if not isinstance(error, BodyTooLarge):
        await _send(send, error.http_status, body, *headers)
        return
    # Its sender is still sending: answer, then read on for a while, or the connection's reset would eat the answer.
    await send(_response_start(error.http_status, body, *headers, (b"connection", b"close")))
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_FOR_S):
            await _discard_body(receive)
    await send({"type": "http.response.body", "body": b""})


async def _discard_body(receive: Receive) -> None:
    discarded = 0
    while discarded < MAX_DISCARDED_BYTES:
        message = await receive()
        discarded += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            return


def _retry_headers(error: EmbedserveError) -> list[Header]:
    """Whole seconds, rounded up, as RFC 9110 has it; and milliseconds, which OpenAI's clients read first."""
    if not isinstance(error, Overloaded):
        return []
    seconds, milliseconds = math.ceil(error.retry_after_s), math.ceil(error.retry_after_s * 1000)
    return [(b"retry-after", str(seconds).encode()), (b"retry-after-ms", str(milliseconds).encode())]


def _timing_header(result: EmbedResult) -> Header:
    """Server-Timing, as browsers and load tools read it; milliseconds."""
    times = result.times
    value = (
        f"tokenize;dur={times.tokenize_ms:.2f}, queue;dur={times.queue_ms:.2f}, forward;dur={times.forward_ms:.2f}, "
        f"pack;dur={times.pack_ms:.2f}, reply;dur={times.reply_ms:.2f}, total;dur={times.total_ms:.2f}"
    )
    return b"server-timing", value.encode()


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _model(name: str, created: int, service: Service) -> dict[str, Any]:
    card = service.card
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "embedserve",
        "dimensions": card.dims,
        "max_input_tokens": service.max_input_tokens,
        "space_id": card.space_id,
        "numerics_id": card.numerics_id,
    }


async def _http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        mine: EmbedserveError = MethodNotAllowed(f"{request.method} is not allowed on {path}.")
    elif error.status_code == 404:
        mine = RouteNotFound(f"there is no {request.method} {path} here; the embeddings are at POST /v1/embeddings.")
    else:
        mine = InvalidInput(error.detail)
    return Response(orjson.dumps(error_body(mine)), error.status_code, error.headers, "application/json")


async def _embedserve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EmbedserveError)
    return _json(error_body(error), error.http_status)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    """Ours to fix; uvicorn logs the traceback."""
    return _json(error_body(ServerError("the server failed to handle this request; its log says why")), 500)
