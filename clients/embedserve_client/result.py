"""Read a reply message: its bytes as numpy arrays, without a copy for each row.
Pure: knows the protocol's messages, and must not know channels or how the request was made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embedserve.v1 import embedding_pb2 as pb
from embedserve_client.errors import ServerError
from embedserve_kernels.output_layout import NUMPY_DTYPES, OutputDtype, row_bytes, row_width


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds in each stage of the server. Over several batches, queue ends as the first begins and
    forward as the last ends."""

    tokenize_ms: float
    queue_ms: float
    forward_ms: float
    pack_ms: float
    reply_ms: float
    total_ms: float


@dataclass(frozen=True)
class InputFailure:
    """Why one input of a request sent with `on_error="per_input"` has a row of zeros."""

    index: int
    code: str
    message: str


@dataclass(frozen=True)
class EmbedResult:
    """The answer to one request. Arrays are read-only views of the reply's bytes.

    `vectors` is [inputs, dims], or [inputs, dims / 8 rounded up] for the binary forms. Only an int8 reply has
    `scales`, [inputs] float32: a vector is approximately `vectors * scales[:, None]`.
    """

    vectors: np.ndarray
    scales: np.ndarray | None
    dims: int
    token_counts: list[int]  # of each input, prompt and special tokens included
    truncated: list[int]  # indexes of the inputs that were cut
    failures: list[InputFailure]
    model: str
    space_id: str  # vectors of one space are comparable
    numerics_id: str  # a difference means other rounding
    request_id: str
    times: StageTimes


def read_reply(reply: pb.EmbedResponse) -> EmbedResult:
    """Raises ServerError when the reply's bytes are not what its counts say."""
    dtype = _dtype(reply.output_dtype)
    return EmbedResult(
        vectors=_vectors(reply.vectors, reply.count, reply.dims, dtype),
        scales=_scales(reply.scales, reply.count) if dtype is OutputDtype.INT8 else None,
        dims=reply.dims,
        token_counts=list(reply.token_counts),
        truncated=list(reply.truncated),
        failures=[InputFailure(error.index, error.code, error.message) for error in reply.errors],
        model=reply.model,
        space_id=reply.space_id,
        numerics_id=reply.numerics_id,
        request_id=reply.request_id,
        times=StageTimes(
            tokenize_ms=reply.times.tokenize_ms,
            queue_ms=reply.times.queue_ms,
            forward_ms=reply.times.forward_ms,
            pack_ms=reply.times.pack_ms,
            reply_ms=reply.times.reply_ms,
            total_ms=reply.times.total_ms,
        ),
    )


def _dtype(number: int) -> OutputDtype:
    try:
        return OutputDtype(number or pb.OUTPUT_DTYPE_FLOAT32)
    except ValueError as error:
        raise ServerError(f"the reply has output_dtype {number}, which this client does not know; update it") from error


def _vectors(rows: bytes, count: int, dims: int, dtype: OutputDtype) -> np.ndarray:
    expected = count * row_bytes(dims, dtype)
    if len(rows) != expected:
        raise ServerError(f"the reply has {len(rows)} bytes of vectors; {count} x {dims} {dtype.name} has {expected}")
    return np.frombuffer(rows, NUMPY_DTYPES[dtype]).reshape(count, row_width(dims, dtype))


def _scales(scales: bytes, count: int) -> np.ndarray:
    if len(scales) != 4 * count:
        raise ServerError(f"the reply has {len(scales)} bytes of scales; {count} rows have {4 * count}")
    return np.frombuffer(scales, "<f4")
