"""The protobuf messages of embedserve.v1 to and from the service's own form.

Knows the wire's enums and fields; nothing of calls, streams or sockets.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from embedserve import __version__
from embedserve.errors import EmbedserveError, InvalidInput, Overloaded, shortened
from embedserve.frontend.call import EmbedCall, EmbedResult
from embedserve.frontend.service import Service
from embedserve.frontend.tokenizer import Encoded
from embedserve.messages import Lane
from embedserve.v1 import embedding_pb2 as pb
from embedserve_kernels.output_layout import OutputDtype

TOKENS_A_SLICE = 16_384  # of a tokenized text, put into its message in well under a millisecond

INPUT_TYPES = {0: None, 1: "query", 2: "document"}
TRUNCATES = {0: None, 1: "none", 2: "left", 3: "right"}
LANES = {0: None, 1: Lane.QUERY, 2: Lane.BULK}
ON_ERRORS = {0: False, 1: False, 2: True}
OUTPUT_DTYPES = {0: OutputDtype.FLOAT32, **{int(dtype): dtype for dtype in OutputDtype}}

M = TypeVar("M", bound=Message)
T = TypeVar("T")


def parse(kind: type[M], body: bytes) -> M:
    """Raises InvalidInput where the bytes are no such message (invalid UTF-8 included)."""
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise InvalidInput(
            f"the message is not a valid {kind.DESCRIPTOR.full_name} (truncated, or a string that is not UTF-8)."
        ) from error


def embed_call(request: pb.EmbedRequest) -> EmbedCall:
    """The service's form of a request. Raises InvalidInput."""
    if request.texts and request.token_ids:
        raise InvalidInput("set texts or token_ids, not both.", param="token_ids")
    token_ids = [inputs.ids for inputs in request.token_ids] if request.token_ids else None
    return EmbedCall(
        field="texts" if token_ids is None else "token_ids",
        texts=list(request.texts) if token_ids is None else None,
        token_ids=token_ids,
        model=request.model,
        input_type=_enum("input_type", request.input_type, INPUT_TYPES),
        prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        instruction=request.instruction if request.HasField("instruction") else None,
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        dtype=_enum("output_dtype", request.output_dtype, OUTPUT_DTYPES),
        normalize=request.normalize if request.HasField("normalize") else None,
        truncate=_enum("truncate", request.truncate, TRUNCATES),
        lane=_enum("lane", request.lane, LANES),
        per_input_errors=_enum("on_error", request.on_error, ON_ERRORS),
        expect_space=request.expect_space,
    )


def embed_response(request: pb.EmbedRequest, result: EmbedResult, service: Service) -> dict[str, Any]:
    """The fields of an EmbedResponse: a message made of them, alone or inside another, copies the vectors once."""
    card, times = result.card, result.times
    return {
        "vectors": bytes(result.vectors),
        "count": result.count,
        "dims": result.dims,
        "output_dtype": int(result.dtype),  # the numbers are the wire's
        "scales": bytes(result.scales),
        "token_counts": result.token_counts.tolist(),
        "truncated": result.truncated,
        "errors": [
            pb.InputError(index=index, code=error.code or "", message=error.message)
            for index, error in sorted(result.errors.items())
        ],
        "model": request.model or service.served_names[0],
        "space_id": card.space_id,
        "numerics_id": card.numerics_id,
        "request_id": request.request_id,
        "times": pb.StageTimes(
            tokenize_ms=times.tokenize_ms,
            queue_ms=times.queue_ms,
            forward_ms=times.forward_ms,
            pack_ms=times.pack_ms,
            reply_ms=times.reply_ms,
            total_ms=times.total_ms,
        ),
    }


def stream_error(error: EmbedserveError) -> pb.StreamError:
    return pb.StreamError(
        grpc_code=grpc.StatusCode[error.grpc_code].value[0],
        code=error.code or "",
        message=shortened(error.message),
        param=error.param or "",
        retry_after_ms=retry_ms(error) if isinstance(error, Overloaded) else None,
    )


def retry_ms(error: Overloaded) -> int:
    return int(error.retry_after_s * 1000)


def tokenize_call(request: pb.TokenizeRequest) -> EmbedCall:
    """The request to embed whose tokens are asked for. Raises InvalidInput."""
    return EmbedCall(
        field="texts",
        texts=list(request.texts),
        model=request.model,
        input_type=_enum("input_type", request.input_type, INPUT_TYPES),
        prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        instruction=request.instruction if request.HasField("instruction") else None,
    )


async def tokenize_response(encoded: Encoded) -> pb.TokenizeResponse:
    """Built in slices, between which other requests of this loop get their turn."""
    response = pb.TokenizeResponse()
    start = since_turn = 0
    for length in encoded.lengths.tolist():
        text = response.texts.add()
        for first in range(start, start + length, TOKENS_A_SLICE):
            tokens = slice(first, min(first + TOKENS_A_SLICE, start + length))
            text.ids.extend(encoded.ids[tokens].tolist())
            if encoded.offsets is not None:
                text.starts.extend(encoded.offsets[tokens, 0].tolist())
                text.ends.extend(encoded.offsets[tokens, 1].tolist())
            since_turn += tokens.stop - tokens.start
            if since_turn >= TOKENS_A_SLICE:
                since_turn = 0
                await asyncio.sleep(0)
        start += length
    return response


def model_response(service: Service) -> pb.GetModelResponse:
    card, config = service.card, service.config
    return pb.GetModelResponse(
        name=card.name,
        served_names=service.served_names,
        dims=card.dims,
        max_input_tokens=service.max_input_tokens,
        pooling=card.pooling,
        normalized=card.normalized,
        prompts=card.prompts,
        default_prompt_name=card.default_prompt_name or "",
        similarity=card.similarity,
        dtype=card.dtype,
        device=card.device,
        output_dtypes=[int(dtype) for dtype in OutputDtype],  # type: ignore[misc]  # the numbers are the wire's
        matryoshka_dims=card.matryoshka_dims,
        vocab_size=card.vocab_size,
        space_id=card.space_id,
        numerics_id=card.numerics_id,
        limits=pb.Limits(
            max_inputs=config.max_inputs,
            max_body_bytes=config.max_body_bytes,
            max_queued_tokens=config.queued_tokens_share,
            max_batch_tokens=config.batch_tokens_limit,
            request_timeout_s=config.request_timeout_s,
        ),
        frontends=config.frontend_count,
        server_version=__version__,
    )


def _enum(name: str, value: int, known: dict[int, T]) -> T:
    if value not in known:
        raise InvalidInput(f"{name} is {value}; it must be one of {', '.join(map(str, known))}.", param=name)
    return known[value]
