"""The frontend's line to the engine: one message a flush, replies resolved to futures, admission by tokens and bytes.

Lives on the event loop; owns both sockets. Knows nothing of HTTP, gRPC, texts or models.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import zmq

from embedserve import metrics
from embedserve.engine.credit import REPLY_CREDIT_BYTES
from embedserve.errors import EmbedserveError, EngineUnavailable, Overloaded, RequestTooLarge, ServerError
from embedserve.frontend.gate import Gate
from embedserve.messages import (
    EngineAddress,
    Lane,
    Refusal,
    ReplyHeader,
    ReplyPart,
    RequestHeader,
    RequestItem,
    decode_reply,
    encode_requests,
)
from embedserve_kernels.output_layout import OutputDtype, row_bytes

log = logging.getLogger(__name__)

REPLIES_PER_TURN = 16  # then other callbacks of the loop get theirs
GUESSED_BYTES_PER_S = 1_000_000  # until it is measured, which a gate that fills does within a second


@dataclass(slots=True)
class EngineRequest:
    """What a request is to the engine: ids and an output spec."""

    token_ids: np.ndarray  # int32 [tokens]
    lengths: np.ndarray  # int32 [rows]
    lane: Lane
    dims: int
    dtype: OutputDtype
    normalize: bool

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def reply_bytes(self) -> int:
        scale_bytes = 4 if self.dtype is OutputDtype.INT8 else 0
        return self.rows * (row_bytes(self.dims, self.dtype) + scale_bytes)


@dataclass(slots=True)
class EngineReply:
    """All rows of a request; the buffers are views of the received frames unless it came in several."""

    vectors: memoryview
    scales: memoryview
    nonfinite_rows: list[int]
    queue_ms: float
    forward_ms: float
    pack_ms: float
    reply_ms: float


@dataclass(eq=False, slots=True)
class _Pending:
    id: int
    request: EngineRequest
    future: asyncio.Future[EngineReply]
    sent_at: float
    rows_missing: int
    tokens_missing: int
    vectors: bytearray | None = None  # only when the rows come in several parts
    scales: bytearray | None = None
    nonfinite_rows: list[int] = field(default_factory=list)
    first_launch_ms: float = math.inf  # after it was sent; of its batches, which may run side by side
    last_end_ms: float = 0.0


class EngineClient:
    """One per frontend. Beyond `max_tokens` or `max_reply_bytes` in flight, `embed` refuses at once."""

    def __init__(self, name: str, *, max_tokens: int, max_reply_bytes: int = REPLY_CREDIT_BYTES // 2) -> None:
        self._name = name
        self._tokens = Gate(max_tokens, guess_per_s=1.0)  # an engine says its own
        self._reply_bytes = Gate(max_reply_bytes, guess_per_s=GUESSED_BYTES_PER_S)
        self._pending: dict[int, _Pending] = {}
        self._next_id = 0
        self._outgoing: list[_Pending] = []
        self._cancels: list[int] = []
        self._flush_scheduled = False
        self._received_bytes = 0
        self._acknowledged_bytes = 0
        self._alive_at = time.monotonic()
        self._busy_s = 0.0
        self._address: EngineAddress | None = None
        self._connected = False
        self._requests: zmq.Socket[bytes] | None = None
        self._replies: zmq.Socket[bytes] | None = None
        self._welcomed = asyncio.Event()

    async def connect(self, address: EngineAddress) -> None:
        """Use this engine from now on; returns when it answers."""
        self.disconnect()
        self._address = address
        self._tokens.per_s = address.tokens_per_s
        self._received_bytes = self._acknowledged_bytes = 0
        self.heard_alive(0.0)
        self._welcomed.clear()
        self._requests = self._socket(address.requests)
        self._replies = self._socket(address.replies)
        asyncio.get_running_loop().add_reader(self._replies.FD, self._read_replies)
        self._replies.send(b"hello", zmq.NOBLOCK)
        self._read_replies()  # its descriptor is edge-triggered: look again after every send
        await self._welcomed.wait()

    def disconnect(self, reason: str = "the engine ended before it answered; send the request again") -> None:
        """The engine is lost: everyone who waits on it is told."""
        self._connected = False
        if self._replies is not None and self._requests is not None:
            asyncio.get_running_loop().remove_reader(self._replies.FD)
            self._replies.close(linger=0)
            self._requests.close(linger=0)
        self._requests = self._replies = None
        self._outgoing.clear()
        self._cancels.clear()
        for pending in list(self._pending.values()):
            self._finish(pending, EngineUnavailable(reason))

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def incarnation(self) -> int:
        return self._address.incarnation if self._address else 0

    def heard_alive(self, busy_s: float) -> None:
        """The engine's word, a few times a second, of how long its busiest loop has been at one thing."""
        self._alive_at = time.monotonic()
        self._busy_s = busy_s

    def stuck_for(self) -> float:
        """Seconds since the engine last spoke, or in which one of its loops did not get on: whichever is longer."""
        return max(time.monotonic() - self._alive_at, self._busy_s)

    @contextmanager
    def reserved(self, tokens: int) -> Iterator[None]:
        """Room for a request of about so many tokens while it is tokenized: what can't be queued isn't tokenized first.

        Raises Overloaded or EngineUnavailable. A guess must not refuse for ever what might fit: it counts up to half
        of what this frontend queues.
        """
        tokens = min(tokens, max(1, self._tokens.limit // 2))
        self._check_room(tokens)
        self._tokens.enter(tokens, time.monotonic())
        try:
            yield
        finally:
            self._tokens.leave(tokens, time.monotonic(), answered=False)

    async def embed(self, request: EngineRequest) -> EngineReply:
        """Raises Overloaded, RequestTooLarge, EngineUnavailable or ServerError. Cancelling it frees its rows."""
        tokens = len(request.token_ids)
        self._admit(tokens, request.reply_bytes)
        self._next_id += 1
        pending = _Pending(
            self._next_id, request, asyncio.get_running_loop().create_future(), time.monotonic(), request.rows, tokens
        )
        self._pending[pending.id] = pending
        self._outgoing.append(pending)
        self._schedule_flush()
        try:
            return await pending.future
        finally:
            if self._pending.pop(pending.id, None) is not None:  # the caller left
                self._release(pending, answered=False)
                self._cancels.append(pending.id)
                self._schedule_flush()

    def _admit(self, tokens: int, reply_bytes: int) -> None:
        if tokens > self._tokens.limit:
            raise RequestTooLarge(
                f"the request has {tokens} tokens; this server queues {self._tokens.limit} per frontend. "
                "Send fewer inputs a request, or raise --max-queued-tokens."
            )
        if reply_bytes > self._reply_bytes.limit:
            raise RequestTooLarge(
                f"the reply would have {reply_bytes} bytes; this server holds {self._reply_bytes.limit} per frontend. "
                "Send fewer inputs a request."
            )
        self._check_room(tokens)
        now = time.monotonic()
        if not self._reply_bytes.has_room(reply_bytes):
            held, limit = self._reply_bytes.held, self._reply_bytes.limit
            reason = f"replies of {held} bytes are due, {reply_bytes} came, and {limit} fit"
            raise _overloaded(reason, self._reply_bytes.retry_after_s(reply_bytes, now))
        self._tokens.enter(tokens, now)
        self._reply_bytes.enter(reply_bytes, now)

    def _check_room(self, tokens: int) -> None:
        if not self._connected:
            raise EngineUnavailable("the engine is not ready; try again shortly")
        if not self._tokens.has_room(tokens):
            reason = f"{self._tokens.held} tokens are in flight, {tokens} came, and {self._tokens.limit} fit"
            raise _overloaded(reason, self._tokens.retry_after_s(tokens, time.monotonic()))

    def _show_saturation(self) -> None:
        """Once a message, not once a request."""
        metrics.SATURATION.set(max(self._tokens.fullness, self._reply_bytes.fullness))

    def _release(self, pending: _Pending, *, answered: bool) -> None:
        now = time.monotonic()
        self._tokens.leave(pending.tokens_missing, now, answered=answered)
        self._reply_bytes.leave(pending.request.reply_bytes, now, answered=answered)

    def _finish(self, pending: _Pending, outcome: EngineReply | Exception) -> None:
        del self._pending[pending.id]
        self._release(pending, answered=isinstance(outcome, EngineReply))
        if pending.future.done():
            return
        if isinstance(outcome, EngineReply):
            pending.future.set_result(outcome)
        else:
            pending.future.set_exception(outcome)

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._name.encode())
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        return socket

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Everything of this turn of the loop in one message."""
        self._flush_scheduled = False
        self._show_saturation()
        if self._requests is None or self._address is None:
            return
        outgoing, self._outgoing = self._outgoing, []
        cancels, self._cancels = self._cancels, []
        outgoing = [pending for pending in outgoing if pending.id in self._pending]
        header = RequestHeader(
            self._name,
            self._address.incarnation,
            self._received_bytes,
            [_item(pending) for pending in outgoing],
            cancels,
        )
        self._acknowledged_bytes = self._received_bytes
        frames = encode_requests(
            header,
            [pending.request.token_ids for pending in outgoing],
            [pending.request.lengths for pending in outgoing],
        )
        self._requests.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def _read_replies(self) -> None:
        socket = self._replies
        if socket is None:
            return
        for _ in range(REPLIES_PER_TURN):
            events: int = socket.getsockopt(zmq.EVENTS)  # type: ignore[assignment]  # bytes or int, by option
            if not events & zmq.POLLIN:
                return
            header = decode_reply(socket.recv(zmq.NOBLOCK))
            payload = memoryview(b"")
            if socket.RCVMORE:
                payload = memoryview(socket.recv(zmq.NOBLOCK, copy=False).buffer)
            self._receive(header, payload)
        asyncio.get_running_loop().call_soon(self._read_replies)

    def _receive(self, header: ReplyHeader, payload: memoryview) -> None:
        if self._address is None or header.incarnation != self._address.incarnation:
            return
        self._connected = True  # the first message is the welcome
        self._welcomed.set()
        now = time.monotonic()
        self._received_bytes += payload.nbytes
        reply_ms = (now - header.sent_at) * 1000
        for part in header.parts:
            pending = self._pending.get(part.id)
            if pending is not None:
                self._fill(pending, part, header, payload, reply_ms)
        for refusal in header.refusals:
            pending = self._pending.get(refusal.id)
            if pending is not None:
                self._finish(pending, self._refusal_error(pending, refusal))
                self._cancels.append(refusal.id)  # other parts of it may still wait
                self._schedule_flush()
        self._show_saturation()
        if self._received_bytes - self._acknowledged_bytes > self._reply_bytes.limit // 4:
            self._schedule_flush()

    def _refusal_error(self, pending: _Pending, refusal: Refusal) -> EmbedserveError:
        if not refusal.overloaded:
            return ServerError(refusal.message)
        retry_after_s = self._tokens.retry_after_s(pending.tokens_missing, time.monotonic())
        return Overloaded(refusal.message, retry_after_s=retry_after_s)

    def _fill(
        self, pending: _Pending, part: ReplyPart, header: ReplyHeader, payload: memoryview, reply_ms: float
    ) -> None:
        request = pending.request
        stride = row_bytes(request.dims, request.dtype)
        vectors = payload[part.offset : part.offset + part.rows * stride]
        scales = payload[:0]
        if part.scale_offset >= 0:
            scales = payload[part.scale_offset : part.scale_offset + part.rows * 4]
        pending.nonfinite_rows += part.nonfinite_rows
        pending.first_launch_ms = min(pending.first_launch_ms, part.queue_ms)
        pending.last_end_ms = max(pending.last_end_ms, part.queue_ms + header.forward_ms)
        pending.rows_missing -= part.rows
        tokens = len(request.token_ids)
        if part.rows < request.rows:
            tokens = int(request.lengths[part.first_row : part.first_row + part.rows].sum())
            vectors, scales = _gather(pending, part, stride, vectors, scales)
        self._tokens.leave(tokens, time.monotonic(), answered=True)
        pending.tokens_missing -= tokens
        if pending.rows_missing == 0:
            self._finish(
                pending,
                EngineReply(
                    vectors,
                    scales,
                    pending.nonfinite_rows,
                    queue_ms=pending.first_launch_ms,
                    forward_ms=pending.last_end_ms - pending.first_launch_ms,
                    pack_ms=header.pack_ms,
                    reply_ms=reply_ms,
                ),
            )


def _overloaded(reason: str, retry_after_s: float) -> Overloaded:
    message = f"{reason} into one frontend of this server. Try again in {retry_after_s:.2f} s."
    return Overloaded(message, retry_after_s=retry_after_s)


def _item(pending: _Pending) -> RequestItem:
    request = pending.request
    return RequestItem(
        pending.id,
        request.lane,
        request.rows,
        len(request.token_ids),
        request.dims,
        request.dtype,
        request.normalize,
        pending.sent_at,
    )


def _gather(
    pending: _Pending, part: ReplyPart, stride: int, vectors: memoryview, scales: memoryview
) -> tuple[memoryview, memoryview]:
    """Rows of a request that spans batches, copied to their place; the whole so far."""
    if pending.vectors is None or pending.scales is None:
        pending.vectors = bytearray(pending.request.rows * stride)
        pending.scales = bytearray(pending.request.rows * 4 if len(scales) else 0)
    pending.vectors[part.first_row * stride : (part.first_row + part.rows) * stride] = vectors
    if len(scales):
        pending.scales[part.first_row * 4 : (part.first_row + part.rows) * 4] = scales
    return memoryview(pending.vectors), memoryview(pending.scales)
