"""Texts to token ids: micro-batched per turn of the event loop, long texts on a thread beside it.

Knows the model's tokenizer.json and its limit; nothing of requests, protocols or the engine.
"""

from __future__ import annotations

import asyncio
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import tokenizers

# Up to here the loop tokenizes by itself: cheaper than two thread switches, and too short to hold up anyone.
INLINE_CHARS = 4_000
# A text above this has a worker of its own, so that short ones do not queue behind it.
LONG_CHARS = 100_000


@dataclass(slots=True)
class Encoded:
    """Token ids of several inputs, special tokens included."""

    ids: np.ndarray  # int32 [total tokens], inputs end to end
    lengths: np.ndarray  # int32 [inputs]


class Tokenizer:
    """`encode` may be awaited by many requests at once; each turn's short texts go through one call.

    Truncation and padding, which some folders bake in, are switched off at load and never set again:
    they are mutable state of the shared object.
    """

    def __init__(self, file: str) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(file)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.prefix, self.suffix = self._special_tokens()
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long")
        self._waiting: list[tuple[list[str], asyncio.Future[Encoded]]] = []
        self._turn_running = False

    async def encode(self, texts: list[str]) -> Encoded:
        """Raises nothing for any str: the protocols let only valid Unicode in."""
        loop = asyncio.get_running_loop()
        if sum(map(len, texts)) > LONG_CHARS:
            return await loop.run_in_executor(self._long, self._encode, texts)
        future: asyncio.Future[Encoded] = loop.create_future()
        self._waiting.append((texts, future))
        if not self._turn_running:
            self._turn_running = True
            loop.call_soon(self._start_turn)
        return await future

    def cut(self, ids: np.ndarray, limit: int, side: str) -> np.ndarray:
        """One input cut to `limit` tokens, its special tokens kept; `side` ("left" | "right") is where tokens go."""
        prefix, suffix = len(self.prefix), len(self.suffix)
        body = ids[prefix : len(ids) - suffix]
        keep = max(0, limit - prefix - suffix)
        body = body[:keep] if side == "right" else body[len(body) - keep :]
        return np.concatenate([ids[:prefix], body, ids[len(ids) - suffix :]])

    def add_special_tokens(self, ids: list[int]) -> list[int]:
        """Special tokens where they are missing, never twice."""
        if ids[: len(self.prefix)] != self.prefix:
            ids = self.prefix + ids
        if self.suffix and (len(ids) < len(self.prefix) + len(self.suffix) or ids[-len(self.suffix) :] != self.suffix):
            ids = ids + self.suffix
        return ids

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts before and after a text, read off one."""
        encoding = self._tokenizer.encode_batch_fast(["a"])[0]
        ids, special = encoding.ids, encoding.special_tokens_mask
        if 0 not in special:
            return [], []
        first = special.index(0)
        last = len(special) - special[::-1].index(0)
        return ids[:first], ids[last:]

    def _start_turn(self) -> None:
        """Encode all that wait: on the loop when that is quick, else on the worker; later ones wait a turn."""
        turn, self._waiting = self._waiting, []
        texts = [text for texts, _ in turn for text in texts]
        if sum(map(len, texts)) <= INLINE_CHARS:
            self._end_turn(turn, self._encode(texts))
            return
        encoding = asyncio.get_running_loop().run_in_executor(self._short, self._encode, texts)
        encoding.add_done_callback(lambda done: self._end_turn(turn, done.result()))

    def _end_turn(self, turn: list[tuple[list[str], asyncio.Future[Encoded]]], encoded: Encoded) -> None:
        row = token = 0
        for texts, future in turn:
            lengths = encoded.lengths[row : row + len(texts)]
            tokens = int(lengths.sum())
            if not future.done():  # its caller may have left
                future.set_result(Encoded(encoded.ids[token : token + tokens], lengths))
            row += len(texts)
            token += tokens
        self._turn_running = bool(self._waiting)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._start_turn)

    def _encode(self, texts: list[str]) -> Encoded:
        # encode_batch_fast alone releases the GIL for the whole of its work, so it is used even for one text.
        ids = array("i")
        lengths = np.empty(len(texts), np.int32)
        for index, encoding in enumerate(self._tokenizer.encode_batch_fast(texts)):
            start = len(ids)
            ids.extend(encoding.ids)
            lengths[index] = len(ids) - start
        return Encoded(np.frombuffer(ids, np.int32) if ids else np.empty(0, np.int32), lengths)
