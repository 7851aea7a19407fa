"""The one service that HTTP and gRPC call: check, admit, apply the prompt, tokenize, await the engine, shape.

Knows the served model's card; nothing of HTTP, gRPC, JSON or protobuf.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from embedserve import metrics
from embedserve.config import Config
from embedserve.engine.batcher import auto_lane
from embedserve.errors import (
    EmbedserveError,
    EngineUnavailable,
    InputTooLong,
    InvalidInput,
    InvalidTokenId,
    ModelNotFound,
    NonfiniteOutput,
    Overloaded,
    RequestTimeout,
    SpaceMismatch,
)
from embedserve.frontend.engine_client import EngineClient, EngineReply, EngineRequest
from embedserve.frontend.tokenizer import Encoded, Tokenizer
from embedserve.messages import Lane
from embedserve.model.card import ModelCard
from embedserve_kernels.output_layout import NUMPY_DTYPES, OutputDtype, row_bytes, row_width

# Names under which folders keep the prompt of each input type; sentence-transformers looks for the same.
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}
MIN_BYTES_IN_FLIGHT = 256_000_000
MAX_MESSAGE_CHARS = 500  # of an error, at up to 12 bytes each: gRPC clients take 8 KiB of metadata


@dataclass(slots=True)
class EmbedCall:
    """One request, whatever it came by. Exactly one of texts and token_ids; `field` is its name in the protocol."""

    field: str
    texts: list[str] | None = None
    token_ids: Sequence[Sequence[int]] | None = None
    model: str | None = None
    input_type: str | None = None  # "query" | "document"
    prompt_name: str | None = None
    instruction: str | None = None
    dimensions: int | None = None
    dtype: OutputDtype = OutputDtype.FLOAT32
    normalize: bool | None = None
    truncate: str | None = None  # "none" | "left" | "right"
    lane: Lane | None = None
    per_input_errors: bool = False
    expect_space: str | None = None

    @property
    def count(self) -> int:
        return len(self.texts if self.texts is not None else self.token_ids or ())


@dataclass(slots=True)
class Times:
    """Milliseconds by stage. Over several batches, queue ends as the first begins and forward as the last ends."""

    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    forward_ms: float = 0.0
    pack_ms: float = 0.0
    reply_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(slots=True)
class EmbedResult:
    """Row-major vectors: [count, dims], or [count, dims / 8 rounded up] for the binary forms.

    Rows of inputs that have an error are zero.
    """

    vectors: memoryview | bytes
    scales: memoryview | bytes  # float32 [count]; int8 only
    count: int
    dims: int
    dtype: OutputDtype
    token_counts: np.ndarray  # int32 [count]
    tokens: int  # of all inputs
    truncated: list[int]
    errors: dict[int, EmbedserveError]  # by input; empty unless per_input_errors
    lane: Lane
    times: Times

    def rows(self) -> np.ndarray:
        """The vectors as numpy, without a copy."""
        flat = np.frombuffer(self.vectors, NUMPY_DTYPES[self.dtype])
        return flat.reshape(self.count, row_width(self.dims, self.dtype))


@dataclass(slots=True)
class _Prepared:
    """Checked inputs: those without an error, end to end, and which they were."""

    encoded: Encoded
    indexes: list[int] | None  # of the good inputs; None when all are good
    token_counts: np.ndarray
    truncated: list[int] = field(default_factory=list)
    errors: dict[int, EmbedserveError] = field(default_factory=dict)


class Service:
    """`engine` may come and go; `use` says what it serves."""

    def __init__(self, config: Config, engine: EngineClient) -> None:
        self.config = config
        self.engine = engine
        self.draining = False
        self._bytes_in_flight = 0
        self._max_bytes_in_flight = max(MIN_BYTES_IN_FLIGHT, 4 * config.max_body_bytes)
        self._card: ModelCard | None = None
        self._tokenizer: Tokenizer | None = None

    def use(self, card: ModelCard) -> None:
        """Serve this model. Called again when an engine was restarted; the folder may have changed under it."""
        if card != self._card:
            self._tokenizer = Tokenizer(card.tokenizer_file)
        self._card = card

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
    def admit_bytes(self) -> Iterator[Callable[[int], None]]:
        """The first gate, before decoding. Yields what counts bytes as they come, which raises Overloaded.

        Not those that are only announced: callers who never send them would shut out everyone else.
        """
        held = 0

        def hold(nbytes: int) -> None:
            nonlocal held
            if self._bytes_in_flight + nbytes > self._max_bytes_in_flight:
                raise Overloaded(
                    f"requests of {self._bytes_in_flight} bytes are in flight; this frontend holds "
                    f"{self._max_bytes_in_flight}. Try again shortly.",
                    retry_after_s=1.0,
                )
            self._bytes_in_flight += nbytes
            held += nbytes

        try:
            yield hold
        finally:
            self._bytes_in_flight -= held

    async def embed(self, call: EmbedCall) -> EmbedResult:
        """Raises a class of errors.py; cancelling the call frees its work."""
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                return await self._embed(call)
        except TimeoutError as error:
            raise RequestTimeout(
                f"not answered within {self.config.request_timeout_s:g} s (--request-timeout-s)"
            ) from error
        except asyncio.CancelledError:
            metrics.CANCELLED.inc()
            raise

    async def _embed(self, call: EmbedCall) -> EmbedResult:
        started = time.monotonic()
        dims = self._check(call)
        prepared = await self._prepare(call)
        tokenized = time.monotonic()
        encoded = prepared.encoded
        lane = call.lane or auto_lane(len(encoded.lengths), len(encoded.ids))
        normalize = self.card.normalized if call.normalize is None else call.normalize
        times = Times(tokenize_ms=(tokenized - started) * 1000)
        if len(encoded.lengths):
            request = EngineRequest(encoded.ids, encoded.lengths, lane, dims, call.dtype, normalize)
            reply = await self.engine.embed(request)
        else:
            reply = EngineReply(memoryview(b""), memoryview(b""), [], 0.0, 0.0, 0.0, 0.0)
        result = _shape(call, dims, lane, prepared, reply, times)
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

    async def _prepare(self, call: EmbedCall) -> _Prepared:
        """Token ids of every good input, within the model's limit, and an error for every bad one."""
        assert self._tokenizer is not None
        prompt = self._prompt(call)
        errors: dict[int, EmbedserveError] = {}
        if call.texts is not None:
            encoded = await self._tokenizer.encode([prompt + text for text in call.texts] if prompt else call.texts)
        else:
            encoded = self._take_token_ids(call, errors)
        if len(encoded.ids) == 0 or int(encoded.lengths.min()) == 0 or int(encoded.ids.max()) >= self.card.vocab_size:
            self._find_impossible(call, encoded, errors)
        prepared = _Prepared(encoded, None, encoded.lengths, errors=errors)
        limit = self.max_input_tokens
        too_long = np.flatnonzero(encoded.lengths > limit)
        if len(too_long) or errors:
            self._cut_or_refuse(call, prepared, too_long.tolist(), limit)
        if prepared.errors and not call.per_input_errors:
            raise prepared.errors[min(prepared.errors)]
        return prepared

    def _take_token_ids(self, call: EmbedCall, errors: dict[int, EmbedserveError]) -> Encoded:
        assert self._tokenizer is not None
        assert call.token_ids is not None
        inputs: list[np.ndarray] = []
        for index, ids in enumerate(call.token_ids):
            try:
                taken = np.array(ids, np.int64)
            except OverflowError:
                taken = np.array([-1])  # as far outside the vocabulary as can be
            if len(taken) and not 0 <= taken.min() <= taken.max() < self.card.vocab_size:
                bad = next(id for id in ids if not 0 <= id < self.card.vocab_size)
                errors[index] = self._outside_vocabulary(call, index, bad)
                taken = taken[:0]
            inputs.append(self._tokenizer.add_special_tokens(taken.astype(np.int32)))
        return Encoded(np.concatenate(inputs), np.fromiter(map(len, inputs), np.int32, len(inputs)))

    def _outside_vocabulary(self, call: EmbedCall, index: int, id: int) -> InvalidTokenId:
        return InvalidTokenId(
            f"input {index} has the token id {id}; the vocabulary is 0 to {self.card.vocab_size - 1}.",
            param=f"{call.field}[{index}]",
        )

    def _find_impossible(self, call: EmbedCall, encoded: Encoded, errors: dict[int, EmbedserveError]) -> None:
        """What only an odd tokenizer makes of a text: no token at all, or ids that the model has no embedding for."""
        for index in np.flatnonzero(encoded.lengths == 0).tolist():
            no_tokens = InvalidInput(
                f"input {index} has no tokens; this model's tokenizer adds none of its own, so send some text.",
                param=f"{call.field}[{index}]",
            )
            errors.setdefault(index, no_tokens)
        for place in np.flatnonzero(encoded.ids >= self.card.vocab_size).tolist():
            index = int(np.searchsorted(np.cumsum(encoded.lengths), place, side="right"))
            errors.setdefault(index, self._outside_vocabulary(call, index, int(encoded.ids[place])))

    def _cut_or_refuse(self, call: EmbedCall, prepared: _Prepared, too_long: list[int], limit: int) -> None:
        """The slow path: rebuild the inputs, without those that have an error."""
        assert self._tokenizer is not None
        side = call.truncate or ("right" if self.config.auto_truncate else "none")
        encoded = prepared.encoded
        inputs = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
        for index in too_long:
            if side == "none":
                prepared.errors[index] = InputTooLong(
                    f"input {index} has {len(inputs[index])} tokens; this model takes {limit}. "
                    'Send truncate="right" or "left", or start the server with --auto-truncate.',
                    param=f"{call.field}[{index}]",
                )
            else:
                inputs[index] = self._tokenizer.cut(inputs[index], limit, side)
                prepared.truncated.append(index)
        prepared.indexes = [index for index in range(len(inputs)) if index not in prepared.errors]
        prepared.token_counts = np.fromiter(map(len, inputs), np.int32, len(inputs))
        prepared.token_counts[list(prepared.errors)] = 0
        good = [inputs[index] for index in prepared.indexes]
        prepared.encoded = Encoded(
            np.concatenate([*good, np.empty(0, np.int32)]), prepared.token_counts[prepared.indexes]
        )

    def _prompt(self, call: EmbedCall) -> str:
        """What goes before each text. Token ids carry their prompt already, so a request must not name one for them."""
        named = [name for name in ("input_type", "prompt_name", "instruction") if getattr(call, name) is not None]
        if len(named) > 1:
            raise InvalidInput(f"send one of {' and '.join(named)}, not both.", param=named[-1])
        if call.token_ids is None:
            return self._named_prompt(call)
        if named and self._named_prompt(call):
            raise InvalidInput(
                f"{named[0]} applies to texts; send token ids with their prompt already in.", param=named[0]
            )
        return ""

    def _named_prompt(self, call: EmbedCall) -> str:
        prompts = self.card.prompts
        if call.instruction is not None:
            return self._instruction_prompt(call.instruction)
        if call.prompt_name is not None:
            if call.prompt_name not in prompts:
                raise InvalidInput(
                    f"prompt_name is {call.prompt_name!r}; "
                    f"this model has {', '.join(map(repr, prompts)) or 'no prompts'}.",
                    param="prompt_name",
                )
            return prompts[call.prompt_name]
        if call.input_type is not None:
            return next((prompts[name] for name in PROMPT_NAMES[call.input_type] if name in prompts), "")
        return prompts.get(self.card.default_prompt_name or "", "")

    def _instruction_prompt(self, instruction: str) -> str:
        """The folder's query prompt with the caller's instruction: `Instruct: …\\nQuery:` (Qwen3-Embedding's card)."""
        query_prompt = self.card.prompts.get("query", "")
        head, separator, tail = query_prompt.partition("\n")
        if not head.startswith("Instruct:") or not separator:
            raise InvalidInput(
                "this model's folder defines no instruction prompt; send input_type or prompt_name, "
                "or put the instruction into the text.",
                param="instruction",
            )
        return f"Instruct: {instruction}\n{tail}"


def shortened(message: str) -> str:
    """An error's message without the middle of what it repeats of the request."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    end = MAX_MESSAGE_CHARS // 2
    return f"{message[: MAX_MESSAGE_CHARS - end - 3]} … {message[-end:]}"


def _shape(
    call: EmbedCall, dims: int, lane: Lane, prepared: _Prepared, reply: EngineReply, times: Times
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
