"""Texts to token ids: micro-batched per turn of the event loop, long texts on a thread beside it.

Knows the model's tokenizer.json and its limit; nothing of requests, protocols or the engine.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import numpy as np
import tokenizers

from embedserve.errors import ServerError, StartError

log = logging.getLogger(__name__)

# Up to here the loop tokenizes by itself: cheaper than two thread switches, and too short to hold up anyone.
INLINE_CHARS = 4_000
# A request above this has a worker of its own, so that short ones do not queue behind it; and no call of either worker
# has more, unless a single text has: a tenth of a second, after which callers who left are skipped.
LONG_CHARS = 100_000


@dataclass(slots=True)
class Encoded:
    """Token ids of several inputs, special tokens included."""

    ids: np.ndarray  # int32 [total tokens], inputs end to end
    lengths: np.ndarray  # int32 [inputs]
    offsets: np.ndarray | None = (
        None  # int32 [total tokens, 2]: first character of its text, and the one after its last
    )


class Tokenizer:
    """`encode` may be awaited by many requests at once; each turn's short texts go through one call.

    Truncation and padding, which some folders bake in, are switched off at load and never set again: they are mutable
    state of the shared object. `end_once`: a text whose own end is spelled like the special tokens after it ("…
    <|endoftext|>", as some clients write by hand) keeps them once. Raises StartError when the file is damaged.
    """

    def __init__(self, file: str, *, end_once: bool = False) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(file)
        except Exception as error:  # tokenizers raises nothing narrower
            raise StartError(f"{file} cannot be read: {error}.") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.prefix, self.suffix = self._special_tokens()
        self._end = self.suffix.tolist() if end_once else []
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._waiting: deque[tuple[list[str], asyncio.Future[Encoded]]] = deque()
        self._turns: asyncio.Task[None] | None = None

    async def encode(self, texts: list[str]) -> Encoded:
        """Takes any valid Unicode, which is all that the protocols let in. Raises ServerError should it fail."""
        loop = asyncio.get_running_loop()
        if sum(map(len, texts)) > LONG_CHARS:
            return await self._encode_sliced(texts)
        future: asyncio.Future[Encoded] = loop.create_future()
        self._waiting.append((texts, future))
        if self._turns is None or self._turns.done():
            self._turns = loop.create_task(self._run_turns())
        return await future

    async def tokenize(self, texts: list[str], *, add_special_tokens: bool, with_offsets: bool) -> Encoded:
        """For those who want to see the tokens, special ones or not: never in one call with what waits to be embedded.

        Offsets of special tokens are 0, 0. Raises ServerError should it fail.
        """
        if sum(map(len, texts)) > LONG_CHARS:
            return await self._encode_sliced(texts, add_special_tokens, with_offsets)
        return await self._encode_in(texts, self._short, add_special_tokens, with_offsets)

    def cut(self, ids: np.ndarray, limit: int, side: str) -> np.ndarray:
        """One input cut to `limit` tokens, its special tokens kept; `side` ("left" | "right") is where tokens go."""
        prefix, suffix = len(self.prefix), len(self.suffix)
        body = ids[prefix : len(ids) - suffix]
        keep = max(0, limit - prefix - suffix)
        body = body[:keep] if side == "right" else body[len(body) - keep :]
        return np.concatenate([ids[:prefix], body, ids[len(ids) - suffix :]])

    def add_special_tokens(self, ids: np.ndarray) -> np.ndarray:
        """int32 [tokens] with the special tokens where they are missing, never twice."""
        if not np.array_equal(ids[: len(self.prefix)], self.prefix):
            ids = np.concatenate([self.prefix, ids])
        body = ids[len(self.prefix) :]
        if not np.array_equal(body[max(0, len(body) - len(self.suffix)) :], self.suffix):
            ids = np.concatenate([ids, self.suffix])
        return ids

    def _special_tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """What the post-processor puts before and after a text, read off one."""
        encoding = self._tokenizer.encode_batch_fast(["a"])[0]
        ids, special = np.array(encoding.ids, np.int32), encoding.special_tokens_mask
        if 0 not in special:
            return ids[:0], ids[:0]
        first = special.index(0)
        last = len(special) - special[::-1].index(0)
        return ids[:first], ids[last:]

    async def _run_turns(self) -> None:
        """Encode all that wait, turn after turn: on the loop when that is quick, else on the worker."""
        while turn := self._next_turn():
            try:
                _deliver(await self._encode_in([text for texts, _ in turn for text in texts], self._short), turn)
            except ServerError:
                await self._encode_apart(turn)

    def _next_turn(self) -> list[tuple[list[str], asyncio.Future[Encoded]]]:
        """Callers in the order they came, without those who left, up to about LONG_CHARS."""
        turn: list[tuple[list[str], asyncio.Future[Encoded]]] = []
        chars = 0
        while self._waiting and chars <= LONG_CHARS:
            texts, future = self._waiting.popleft()
            if not future.done():
                turn.append((texts, future))
                chars += sum(map(len, texts))
        return turn

    async def _encode_apart(self, turn: list[tuple[list[str], asyncio.Future[Encoded]]]) -> None:
        """After one text failed its whole turn: each caller alone, so that only his fails."""
        for texts, future in turn:
            if future.done():
                continue
            try:
                encoded = await self._encode_in(texts, self._short)
            except ServerError as error:
                if not future.done():
                    future.set_exception(error)
            else:
                _deliver(encoded, [(texts, future)])

    async def _encode_sliced(
        self, texts: list[str], add_special_tokens: bool = True, with_offsets: bool = False
    ) -> Encoded:
        """On the worker for long requests, a slice at a time, so that others of its kind get their turns in between.

        Should the caller leave, a slice that waits for the worker is taken back and no other follows. The one that
        runs cannot be stopped, which is why a single text, however long, holds only this worker.
        """
        slices = [await self._encode_in(some, self._long, add_special_tokens, with_offsets) for some in _slices(texts)]
        offsets = [encoded.offsets for encoded in slices if encoded.offsets is not None]
        return Encoded(
            np.concatenate([encoded.ids for encoded in slices]),
            np.concatenate([encoded.lengths for encoded in slices]),
            np.concatenate(offsets) if with_offsets else None,
        )

    async def _encode_in(
        self,
        texts: list[str],
        worker: ThreadPoolExecutor,
        add_special_tokens: bool = True,
        with_offsets: bool = False,
    ) -> Encoded:
        """Here when that is quick, else on the worker. Raises ServerError for whatever the tokenizer raises."""
        try:
            if sum(map(len, texts)) <= INLINE_CHARS:
                return self._encode(texts, add_special_tokens, with_offsets)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(worker, self._encode, texts, add_special_tokens, with_offsets)
        except asyncio.CancelledError:
            raise
        except (
            BaseException
        ) as error:  # tokenizers raises nothing narrower than Exception, and a panic in Rust not even it
            log.error("the tokenizer failed on one of %d texts", len(texts), exc_info=error)
            raise ServerError("the tokenizer failed; the server's log says why") from error

    def _encode(self, texts: list[str], add_special_tokens: bool, with_offsets: bool) -> Encoded:
        # encode_batch_fast alone releases the GIL for the whole of its work, so it is used even for one text; but it
        # keeps no offsets.
        encode = self._tokenizer.encode_batch if with_offsets else self._tokenizer.encode_batch_fast
        ids, offsets = array("i"), array("i")
        lengths = np.empty(len(texts), np.int32)
        for index, encoding in enumerate(encode(texts, add_special_tokens=add_special_tokens)):
            own = self._with_one_end(encoding.ids) if add_special_tokens else encoding.ids
            ids.extend(own)
            lengths[index] = len(own)
            if with_offsets:  # token by token, for `encoding.offsets` makes them all in one go, with the GIL held
                offsets.extend(chain.from_iterable(encoding.token_to_chars(i) or (0, 0) for i in range(len(own))))
        return Encoded(_as_numpy(ids), lengths, _as_numpy(offsets).reshape(-1, 2) if with_offsets else None)

    def _with_one_end(self, ids: list[int]) -> list[int]:
        end = self._end
        while end and ids[-2 * len(end) :] == end + end:
            ids = ids[: -len(end)]
        return ids


def _slices(texts: list[str]) -> Iterator[list[str]]:
    """Of LONG_CHARS each, or one text that is longer."""
    start = chars = 0
    for index, text in enumerate(texts):
        if index > start and chars + len(text) > LONG_CHARS:
            yield texts[start:index]
            start, chars = index, 0
        chars += len(text)
    yield texts[start:]


def _as_numpy(values: array[int]) -> np.ndarray:
    return np.frombuffer(values, np.int32) if values else np.empty(0, np.int32)


def _deliver(encoded: Encoded, turn: list[tuple[list[str], asyncio.Future[Encoded]]]) -> None:
    """To each caller its part."""
    ends = np.cumsum(encoded.lengths).tolist()
    row = token = 0
    for texts, future in turn:
        end_row = row + len(texts)
        end_token = ends[end_row - 1] if texts else token
        if not future.done():
            future.set_result(Encoded(encoded.ids[token:end_token], encoded.lengths[row:end_row]))
        row, token = end_row, end_token
