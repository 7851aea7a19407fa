"""OpenAI's embeddings on the wire: the request's JSON to a call of the service, its result and its errors to JSON.

Pure: bytes in, bytes out. Knows neither ASGI nor connections.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
import orjson

from embedserve.errors import EmbedserveError, InvalidInput, TokenIdsRefused, shortened
from embedserve.frontend.call import EmbedCall, EmbedResult
from embedserve.frontend.service import Service
from embedserve.messages import Lane
from embedserve_kernels.output_layout import OutputDtype

UTF8_BOM = b"\xef\xbb\xbf"
ROWS_A_SLICE = 64  # of a reply, encoded without a pause: 2 ms for 1,024 floats each


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


def decode_request(body: bytes, dims: int) -> EmbeddingsRequest:
    """Raises InvalidInput with what is wrong and where; `dims` is what the model gives."""
    body = body.removeprefix(UTF8_BOM)
    try:
        return _decode(body)
    except RecursionError:
        raise InvalidInput("the JSON is nested too deeply.", code="invalid_json") from None
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), dims) from error
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


def embeddings_body(request: EmbeddingsRequest, result: EmbedResult, service: Service) -> Iterator[bytes]:
    """The reply in pieces of a few rows each, so that a caller may do other things in between."""
    rows = result.rows()
    yield b'{"object":"list","data":['
    for start in range(0, result.count, ROWS_A_SLICE):
        vectors: Iterable[Any] = rows[start : start + ROWS_A_SLICE]
        if request.encoding_format == "base64":
            vectors = (binascii.b2a_base64(row, newline=False).decode("ascii") for row in vectors)
        slice_of_data = [
            {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors, start)
        ]
        encoded = orjson.dumps(slice_of_data, option=orjson.OPT_SERIALIZE_NUMPY)
        yield (b"," if start else b"") + encoded[1:-1]
    rest: dict[str, Any] = {
        "model": request.model or service.served_names[0],
        "usage": {"prompt_tokens": result.tokens, "total_tokens": result.tokens},
        "space_id": result.card.space_id,
        "numerics_id": result.card.numerics_id,
    }
    if result.truncated:
        rest["truncated"] = result.truncated
    yield b"]," + orjson.dumps(rest)[1:]


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


def _wrong_field(message: str, dims: int) -> InvalidInput:
    """msgspec says "Expected `int | null`, got `str` - at `$.dimensions`"; the path becomes param."""
    what, _, path = message.partition(" - at `$.")
    param = path.rstrip("`") or None
    if missing := re.search(r"missing required field `(\w+)`", what):
        param = missing[1]
    if param in _CHOICES and what.startswith("Invalid enum value"):
        what += f"; it must be one of {_CHOICES[param]}"
    if param == "dimensions":
        what += f"; it must be an integer from 1 to {dims}"
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
