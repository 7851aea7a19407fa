"""What crosses process borders, and its encoding: requests and replies over ZeroMQ, and the control channel.

Pure: no sockets. A message to the engine is [header, lengths, token ids]; a message back is [header, payload].
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Any

import msgspec
import numpy as np

from embedserve.model.card import ModelCard
from embedserve_kernels.output_layout import OutputDtype

TOKEN_DTYPE = np.dtype("<i4")

# A buffer of a ZeroMQ frame, or anything else that can stand for one.
Buffer = bytes | bytearray | memoryview


class Lane(IntEnum):
    QUERY = 1
    BULK = 2


# No message of ours comes near it, and no sum of such numbers overflows.
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class RequestItem(msgspec.Struct, array_like=True, frozen=True):
    """One request of a flush; its rows are the next `rows` lengths, its ids the next `tokens` token ids."""

    id: int
    lane: Lane
    rows: Count
    tokens: Count
    dims: Count
    dtype: OutputDtype
    normalize: bool
    enqueued_at: float  # CLOCK_MONOTONIC, seconds; one clock for all processes of a machine


class RequestHeader(msgspec.Struct, array_like=True, frozen=True):
    """A flush: new requests, ids to cancel, and how many payload bytes this frontend has received so far."""

    frontend: str
    incarnation: int
    received_bytes: int
    requests: list[RequestItem] = []
    cancels: list[int] = []


class ReplyPart(msgspec.Struct, array_like=True, frozen=True):
    """Consecutive rows of one request in this message's payload. Offsets are bytes into it."""

    id: int
    first_row: int
    rows: int
    offset: int
    scale_offset: int  # -1 without scales
    queue_ms: float
    nonfinite_rows: list[int] = []  # rows of the request that came out NaN or infinite


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """A request that the engine did not run; `overloaded` when it may be sent again later."""

    id: int
    message: str
    overloaded: bool


class ReplyHeader(msgspec.Struct, array_like=True, frozen=True):
    """Without parts and refusals it is the answer to a frontend's greeting."""

    incarnation: int
    sent_at: float  # CLOCK_MONOTONIC, seconds
    forward_ms: float = 0.0
    pack_ms: float = 0.0
    parts: list[ReplyPart] = []
    refusals: list[Refusal] = []


class EngineAddress(msgspec.Struct, frozen=True):
    """Where one incarnation of the engine listens, and what it serves."""

    incarnation: int
    requests: str  # ipc://…
    replies: str
    card: ModelCard
    tokens_per_s: float  # of one forward, as its warm-up measured it


# The control channel between the supervisor and its children: one JSON object a line.


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """From an engine: a forward has succeeded."""

    engine: EngineAddress


class Alive(msgspec.Struct, tag="alive", frozen=True):
    """From an engine, again and again, and on to every frontend: how long one of its loops has been at one thing."""

    busy_s: float


class Serving(msgspec.Struct, tag="serving", frozen=True):
    """From a frontend: both ports accept."""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """From a child that cannot start; the message is for the operator."""

    message: str


class UseEngine(msgspec.Struct, tag="use_engine", frozen=True):
    """To a frontend: send to this engine from now on."""

    engine: EngineAddress


class EngineLost(msgspec.Struct, tag="engine_lost", frozen=True):
    """To a frontend: that incarnation is dead; nothing more will come from it."""

    incarnation: int


class FrontendLost(msgspec.Struct, tag="frontend_lost", frozen=True):
    """To an engine: free whatever this frontend had waiting."""

    frontend: str


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """To a frontend: stop accepting, finish what is in flight, exit."""


Control = Ready | Alive | Serving | Failed | UseEngine | EngineLost | FrontendLost | Drain

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(RequestHeader)
_reply_decoder = msgspec.msgpack.Decoder(ReplyHeader)
_control_encoder = msgspec.json.Encoder()
_control_decoder: msgspec.json.Decoder[Control] = msgspec.json.Decoder(Control)


class MalformedMessage(Exception):
    """A message that none of our processes would send."""


def encode_requests(header: RequestHeader, token_ids: Sequence[np.ndarray], lengths: Sequence[np.ndarray]) -> list[Any]:
    """Frames of one flush: the requests' arrays end to end, each copied once into the flat buffer."""
    return [_encoder.encode(header), _flat(lengths), _flat(token_ids)]


def decode_requests(frames: Sequence[Buffer]) -> tuple[RequestHeader, np.ndarray, np.ndarray]:
    """Header, lengths [rows], token ids [tokens]; the arrays are views of the frames. Raises MalformedMessage."""
    if len(frames) != 3:
        raise MalformedMessage(f"{len(frames)} frames came; a flush has 3")
    try:
        header = _request_decoder.decode(frames[0])
        lengths, token_ids = (np.frombuffer(frame, TOKEN_DTYPE) for frame in frames[1:])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error
    _check_lengths(header.requests, lengths, len(token_ids))
    return header, lengths, token_ids


def encode_reply(header: ReplyHeader) -> bytes:
    return _encoder.encode(header)


def decode_reply(frame: Buffer) -> ReplyHeader:
    """Raises MalformedMessage."""
    try:
        return _reply_decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error


def encode_control(message: Control) -> bytes:
    return _control_encoder.encode(message) + b"\n"


def decode_control(line: bytes) -> Control:
    return _control_decoder.decode(line)


def _check_lengths(requests: list[RequestItem], lengths: np.ndarray, total_tokens: int) -> None:
    """Every request's rows and tokens are those that came, so that slicing by them cannot go astray."""
    if len(lengths) and int(lengths.min()) < 1:
        raise MalformedMessage("an input without tokens")
    row_ends = np.cumsum([item.rows for item in requests], dtype=np.int64)
    token_ends = np.cumsum([item.tokens for item in requests], dtype=np.int64)
    announced = (int(row_ends[-1]), int(token_ends[-1])) if requests else (0, 0)
    if announced != (len(lengths), total_tokens):
        raise MalformedMessage(f"{announced} rows and tokens announced, {(len(lengths), total_tokens)} came")
    if requests and not np.array_equal(np.cumsum(lengths, dtype=np.int64)[row_ends - 1], token_ends):
        raise MalformedMessage("the lengths of a request do not add up to its tokens")


def _flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0], TOKEN_DTYPE)
    return np.concatenate([*arrays, np.empty(0, TOKEN_DTYPE)]).astype(TOKEN_DTYPE, copy=False)
