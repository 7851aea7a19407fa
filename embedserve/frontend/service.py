"""The one service that HTTP and gRPC call: check, admit, apply the prompt, tokenize, await the engine, shape.

Knows the served model's card; nothing of HTTP, gRPC, JSON or protobuf.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from embedserve import metrics
from embedserve.config import Config
from embedserve.engine.batcher import auto_lane
from embedserve.errors import (
    EmbedserveError,
    EngineUnavailable,
    InvalidInput,
    ModelNotFound,
    NonfiniteOutput,
    Overloaded,
    RequestTimeout,
    SpaceMismatch,
)
from embedserve.frontend.call import EmbedCall, EmbedResult, Times
from embedserve.frontend.engine_client import GUESSED_BYTES_PER_S, EngineClient, EngineReply, EngineRequest
from embedserve.frontend.gate import Gate
from embedserve.frontend.inputs import Inputs, Prepared
from embedserve.frontend.tokenizer import Encoded
from embedserve.frontend.unread import UnreadReplies
from embedserve.messages import Lane
from embedserve.model.card import ModelCard
from embedserve_kernels.output_layout import OutputDtype, row_bytes

MIN_BYTES_IN_FLIGHT = 256_000_000
CHARS_A_TOKEN = 4  # of English; where a text has more tokens than that, the exact count is checked after

T = TypeVar("T")


Hold = Callable[[int], None]  # counts bytes against the first gate; raises Overloaded


class Service:
    """`engine` may come and go; `use` says what it serves."""

    def __init__(self, config: Config, engine: EngineClient) -> None:
        self.config = config
        self.engine = engine
        self.draining = False
        max_bytes = max(MIN_BYTES_IN_FLIGHT, 4 * config.max_body_bytes)
        self._bytes = Gate(max_bytes, guess_per_s=GUESSED_BYTES_PER_S)
        self.unread = UnreadReplies(max_bytes)
        self._card: ModelCard | None = None
        self._inputs: Inputs | None = None

    def use(self, card: ModelCard) -> None:
        """Serve this model. Called again when an engine was restarted; the folder may have changed under it."""
        if card != self._card:
            self._card = card
            self._inputs = Inputs(card, max_tokens=self.max_input_tokens, auto_truncate=self.config.auto_truncate)

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise EngineUnavailable("the model is still loading; try again shortly")
        return self._card

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.config.served_model_name or (self.card.name,)

    @property
    def max_input_tokens(self) -> int:
        return min(self.config.max_input_tokens or self.card.max_input_tokens, self.card.max_input_tokens)

    def not_ready(self) -> str | None:
        """Why work should not be sent here, or None. Green under overload; red when nothing moves."""
        if self.draining:
            return "the server is shutting down"
        if not self.engine.connected:
            return "the engine is not ready"
        stuck_s = self.engine.stuck_for()
        if stuck_s > self.config.stuck_after_s:
            return f"the engine has not moved for {stuck_s:.0f} s"
        return None

    @contextmanager
    def admit_bytes(self) -> Iterator[Hold]:
        """The first gate, before decoding. Yields what counts bytes as they come, which raises Overloaded.

        Of the body, not those that are only announced: callers who never send them would shut out everyone else. The
        vectors of the reply count too, from before they are made until the block ends.
        """
        held = 0

        def hold(nbytes: int) -> None:
            nonlocal held
            now = time.monotonic()
            if not self._bytes.has_room(nbytes):
                retry_after_s = self._bytes.retry_after_s(nbytes, now)
                raise Overloaded(
                    f"requests and replies of {self._bytes.held} bytes are in flight, {nbytes} came; this frontend "
                    f"holds {self._bytes.limit}. Try again in {retry_after_s:.2f} s.",
                    retry_after_s=retry_after_s,
                )
            self._bytes.enter(nbytes, now)
            held += nbytes

        answered = False
        try:
            yield hold
            answered = True
        finally:
            self._bytes.leave(held, time.monotonic(), answered=answered)

    async def embed(self, call: EmbedCall, hold: Hold) -> EmbedResult:
        """Raises a class of errors.py; cancelling the call frees its work. `hold` is that of its `admit_bytes`."""
        return await self._in_time(self._embed(call, hold))

    async def tokenize(self, call: EmbedCall, *, add_special_tokens: bool, with_offsets: bool) -> Encoded:
        """What `embed` would run of these texts, whole however long they are. Raises a class of errors.py."""
        self._check(call)
        assert self._inputs is not None  # where there is a card
        with self.engine.reserved(_guess_tokens(call)):
            return await self._in_time(
                self._inputs.tokenize(call, add_special_tokens=add_special_tokens, with_offsets=with_offsets)
            )

    async def _in_time(self, answer: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                return await answer
        except TimeoutError as error:
            raise RequestTimeout(
                f"not answered within {self.config.request_timeout_s:g} s (--request-timeout-s)"
            ) from error

    async def _embed(self, call: EmbedCall, hold: Hold) -> EmbedResult:
        started = time.monotonic()
        card = self.card
        dims = self._check(call)
        inputs = self._inputs
        assert inputs is not None  # where there is a card, and _check asked for it
        with self.engine.reserved(_guess_tokens(call)):
            prepared = await inputs.prepare(call)
        if self._inputs is not inputs:
            raise EngineUnavailable("the model was replaced meanwhile; send the request again")
        tokenized = time.monotonic()
        encoded = prepared.encoded
        lane = call.lane or auto_lane(len(encoded.lengths), len(encoded.ids))
        normalize = card.normalized if call.normalize is None else call.normalize
        times = Times(tokenize_ms=(tokenized - started) * 1000)
        if len(encoded.lengths):
            request = EngineRequest(encoded.ids, encoded.lengths, lane, dims, call.dtype, normalize)
            hold(request.reply_bytes)
            reply = await self.engine.embed(request)
        else:
            reply = EngineReply(memoryview(b""), memoryview(b""), [], 0.0, 0.0, 0.0, 0.0)
        result = _shape(call, card, dims, lane, prepared, reply, times)
        times.total_ms = (time.monotonic() - started) * 1000
        _observe(result)
        return result

    def _check(self, call: EmbedCall) -> int:
        """Everything that needs no token; returns the dimensions of the reply."""
        card = self.card
        self.check_model(call.model)
        if call.expect_space and call.expect_space != card.space_id:
            raise SpaceMismatch(
                f"expect_space is {call.expect_space!r}; this server's vectors are of space {card.space_id!r}. "
                "Vectors of different spaces cannot be compared.",
                param="expect_space",
            )
        if not call.count:
            raise InvalidInput(f"{call.field} is empty; send at least one input.", param=call.field)
        if call.count > self.config.max_inputs:
            raise InvalidInput(
                f"{call.field} has {call.count} inputs; this server takes {self.config.max_inputs} a request. "
                "Split the request, or raise --max-inputs.",
                param=call.field,
            )
        if call.dimensions is None:
            return card.dims
        if not 1 <= call.dimensions <= card.dims:
            raise InvalidInput(
                f"dimensions is {call.dimensions}; {self.served_names[0]} gives 1 to {card.dims}.", param="dimensions"
            )
        return call.dimensions

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound."""
        if name and name not in self.served_names:
            raise ModelNotFound(
                f"the model {name!r} is not served here; this server has {', '.join(map(repr, self.served_names))}.",
                param="model",
            )


def _guess_tokens(call: EmbedCall) -> int:
    """What a request will take of the queue, told by its size."""
    if call.texts is None:
        return sum(map(len, call.token_ids or ()))
    return sum(map(len, call.texts)) // CHARS_A_TOKEN + len(call.texts)


def _shape(
    call: EmbedCall, card: ModelCard, dims: int, lane: Lane, prepared: Prepared, reply: EngineReply, times: Times
) -> EmbedResult:
    errors = prepared.errors
    vectors: memoryview | bytes = reply.vectors
    scales: memoryview | bytes = reply.scales
    for row in reply.nonfinite_rows:
        index = prepared.indexes[row] if prepared.indexes is not None else row
        error = NonfiniteOutput(
            f"the vector of input {index} has NaN or infinity in it; float16 overflows in some models: "
            "use --dtype bfloat16 or float32, or a wider output dtype.",
            param=f"{call.field}[{index}]",
        )
        if not call.per_input_errors:
            raise error
        errors[index] = error
    if errors:
        indexes = prepared.indexes if prepared.indexes is not None else list(range(call.count))
        vectors = _spread(vectors, row_bytes(dims, call.dtype), indexes, call.count, errors)
        scales = _spread(scales, 4, indexes, call.count, errors) if call.dtype is OutputDtype.INT8 else scales
    times.queue_ms, times.forward_ms = reply.queue_ms, reply.forward_ms
    times.pack_ms, times.reply_ms = reply.pack_ms, reply.reply_ms
    return EmbedResult(
        vectors,
        scales,
        call.count,
        dims,
        call.dtype,
        prepared.token_counts,
        len(prepared.encoded.ids),
        prepared.truncated,
        errors,
        lane,
        times,
        card,
    )


def _spread(
    rows: memoryview | bytes, stride: int, indexes: list[int], count: int, errors: dict[int, EmbedserveError]
) -> bytes:
    """Rows at their inputs' places, zero where an input has an error."""
    spread = np.zeros((count, stride), np.uint8)
    if indexes:
        spread[indexes] = np.frombuffer(rows, np.uint8).reshape(len(indexes), stride)
    spread[list(errors)] = 0
    return spread.tobytes()


_stage_seconds = {
    (stage, lane): metrics.STAGE_SECONDS.labels(stage, lane.name.lower()) for stage in metrics.STAGES for lane in Lane
}


def _observe(result: EmbedResult) -> None:
    times, lane = result.times, result.lane
    _stage_seconds["tokenize", lane].observe(times.tokenize_ms / 1000)
    _stage_seconds["queue", lane].observe(times.queue_ms / 1000)
    _stage_seconds["forward", lane].observe(times.forward_ms / 1000)
    _stage_seconds["pack", lane].observe(times.pack_ms / 1000)
    _stage_seconds["reply", lane].observe(times.reply_ms / 1000)
    metrics.INPUTS.inc(result.count - len(result.errors))
    metrics.TOKENS.inc(result.tokens)
    if result.truncated:
        metrics.TRUNCATED.inc(len(result.truncated))
