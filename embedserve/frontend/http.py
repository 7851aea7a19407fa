"""The HTTP edge: OpenAI's /v1/embeddings and /v1/models, /health, /ready, /metrics. Translates; decides nothing.

The hot endpoint is a plain ASGI callable behind a Starlette route: msgspec decodes, orjson encodes.
"""

from __future__ import annotations

import asyncio
import binascii
import re
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from embedserve import metrics
from embedserve.errors import (
    BodyTooLarge,
    EmbedserveError,
    InvalidInput,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    RouteNotFound,
    ServerError,
    TokenIdsRefused,
)
from embedserve.frontend.service import EmbedCall, EmbedResult, Service, shortened
from embedserve.messages import Lane
from embedserve_kernels.output_layout import OutputDtype

UTF8_BOM = b"\xef\xbb\xbf"
MAX_DISCARDED_BYTES = 256_000_000  # of a body that is too large, so that its sender gets to read the answer


class EmbeddingsRequest(msgspec.Struct):
    """OpenAI's fields and ours; unknown ones are ignored, null is absent."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    input_type: Literal["query", "document"] | None = None
    prompt_name: str | None = None
    instruction: str | None = None
    truncate: Literal["none", "left", "right"] | None = None
    normalize: bool | None = None
    lane: Literal["auto", "query", "bulk"] | None = None
    token_encoding: Literal["model"] | None = None
    expect_space: str | None = None


LANES = {None: None, "auto": None, "query": Lane.QUERY, "bulk": Lane.BULK}
_decode = msgspec.json.Decoder(EmbeddingsRequest).decode


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

    return Starlette(
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


class _Embeddings:
    """POST /v1/embeddings. A caller that disconnects frees its work."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        status, lane = 500, "none"
        limit = self._service.config.max_body_bytes
        try:
            _check_announced_bytes(scope, limit)
            with self._service.admit_bytes() as hold:
                request = decode_request(await _read_body(receive, limit, hold))
                result = await self._until_disconnect(embed_call(request, self._service), receive)
                body = embeddings_body(request, result, self._service)
            status, lane = 200, result.lane.name.lower()
            await _send(send, status, body, _timing_header(result))
        except _Disconnected:
            status = 499  # nobody is left to answer; the code is nginx's for it
        except EmbedserveError as error:
            status = error.http_status
            await _send_error(error, receive, send)
        finally:
            metrics.REQUESTS.labels("http", str(status)).inc()
            metrics.REQUEST_SECONDS.labels("http", lane).observe(time.monotonic() - started)

    async def _until_disconnect(self, call: EmbedCall, receive: Receive) -> EmbedResult:
        embedding = asyncio.ensure_future(self._service.embed(call))
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


class _Disconnected(Exception):
    pass


def decode_request(body: bytes) -> EmbeddingsRequest:
    """Raises InvalidInput with what is wrong and where."""
    body = body.removeprefix(UTF8_BOM)
    try:
        return _decode(body)
    except RecursionError:
        raise InvalidInput("the JSON is nested too deeply.", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"the body is not valid JSON in UTF-8: {_syntax_error(body, error)}.", code="invalid_json"
        ) from error


def embed_call(request: EmbeddingsRequest, service: Service) -> EmbedCall:
    """The service's form of a request. Raises InvalidInput, TokenIdsRefused."""
    texts, token_ids = _inputs(request.input)
    if token_ids is not None and request.token_encoding is None and service.config.token_ids == "refuse":
        raise TokenIdsRefused(
            "input has token ids, and this server does not know of which tokenizer. Send texts: in LangChain's "
            "OpenAIEmbeddings set check_embedding_ctx_length=False. If they are this model's own ids, send "
            '"token_encoding": "model", or start the server with --token-ids model.',
            param="input",
        )
    return EmbedCall(
        field="input",
        texts=texts,
        token_ids=token_ids,
        model=request.model,
        input_type=request.input_type,
        prompt_name=request.prompt_name,
        instruction=request.instruction,
        dimensions=request.dimensions,
        dtype=OutputDtype.FLOAT32,
        normalize=request.normalize,
        truncate=request.truncate,
        lane=LANES[request.lane],
        expect_space=request.expect_space,
    )


def embeddings_body(request: EmbeddingsRequest, result: EmbedResult, service: Service) -> bytes:
    rows = result.rows()
    if request.encoding_format == "base64":
        vectors = [binascii.b2a_base64(row, newline=False).decode("ascii") for row in rows]
    else:
        vectors = list(rows)
    tokens = int(result.token_counts.sum())
    body: dict[str, Any] = {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)],
        "model": request.model or service.served_names[0],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "space_id": service.card.space_id,
        "numerics_id": service.card.numerics_id,
    }
    if result.truncated:
        body["truncated"] = result.truncated
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def error_body(error: EmbedserveError) -> dict[str, Any]:
    message = shortened(error.message)
    return {"error": {"message": message, "type": error.type, "param": error.param, "code": error.code}}


def _inputs(value: str | list[Any]) -> tuple[list[str] | None, list[list[int]] | None]:
    """Texts or token ids of OpenAI's four forms: text, texts, ids, lists of ids. Raises InvalidInput."""
    if isinstance(value, str):
        return [value], None
    kinds = set(map(type, value))
    if kinds <= {str}:
        return value, None  # an empty list too, which the service refuses
    if kinds == {int}:
        return None, [value]
    if kinds == {list}:
        for index, ids in enumerate(value):
            if set(map(type, ids)) - {int}:
                raise InvalidInput(
                    f"input {index} is a list with something else than token ids in it.", param=f"input[{index}]"
                )
        return None, value
    first = type(value[0])
    index = next((i for i, item in enumerate(value) if type(item) is not first), 0)
    raise InvalidInput(
        f"input[{index}] is {_json_type(value[index])}; input must be a string, a list of strings, "
        "a list of token ids or a list of such lists, all of one kind.",
        param=f"input[{index}]",
    )


def _json_type(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", type(None): "null"}
    return names.get(type(value), "an object")


def _wrong_field(message: str) -> InvalidInput:
    """msgspec says "Expected `int | null`, got `str` - at `$.dimensions`"; the path becomes param."""
    what, _, path = message.partition(" - at `$.")
    param = path.rstrip("`") or None
    if missing := re.search(r"missing required field `(\w+)`", what):
        param = missing[1]
    if param in _CHOICES and what.startswith("Invalid enum value"):
        what += f"; it must be one of {_CHOICES[param]}"
    return InvalidInput(f"{param}: {what}." if param else f"{what}.", param=param)


_CHOICES = {
    item.name: ", ".join(f'"{choice}"' for choice in choices.__args__)
    for item in msgspec.structs.fields(EmbeddingsRequest)
    for choices in getattr(item.type, "__args__", ())
    if getattr(choices, "__origin__", None) is Literal
}


def _syntax_error(body: bytes, error: Exception) -> str:
    """orjson's account of what is wrong, which names lone surrogates and bad UTF-8 where msgspec's does not."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as precise:
        return str(precise)
    return str(error)


def _check_announced_bytes(scope: Scope, limit: int) -> None:
    """Raises BodyTooLarge."""
    size = next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
    if size > limit:
        raise _too_large(size, limit)


async def _read_body(receive: Receive, limit: int, hold: Callable[[int], None]) -> bytes:
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


async def _send(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send(_response_start(status, body, *headers))
    await send({"type": "http.response.body", "body": body})


def _response_start(status: int, body: bytes, *headers: tuple[bytes, bytes]) -> Message:
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return {"type": "http.response.start", "status": status, "headers": fixed + list(headers)}


async def _send_error(error: EmbedserveError, receive: Receive, send: Send) -> None:
    body = orjson.dumps(error_body(error))
    headers = _retry_header(error)
    if not isinstance(error, BodyTooLarge):
        await _send(send, error.http_status, body, *headers)
        return
    # Its sender is still sending: answer, then read on for a while, or the connection's reset would eat the answer.
    await send(_response_start(error.http_status, body, *headers, (b"connection", b"close")))
    await send({"type": "http.response.body", "body": body, "more_body": True})
    discarded = 0
    while discarded < MAX_DISCARDED_BYTES:
        message = await receive()
        discarded += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            break
    await send({"type": "http.response.body", "body": b""})


def _retry_header(error: EmbedserveError) -> list[tuple[bytes, bytes]]:
    """Whole seconds, rounded up, as RFC 9110 has it."""
    return [(b"retry-after", str(int(-(-error.retry_after_s // 1))).encode())] if isinstance(error, Overloaded) else []


def _timing_header(result: EmbedResult) -> tuple[bytes, bytes]:
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
