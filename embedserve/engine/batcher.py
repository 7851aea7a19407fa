"""The waiting room: requests come in by lane, and a batch is cut at the moment the lane's thread asks for one.

`Batcher` is pure: no torch, socket, lock or clock. `WaitingRoom` is that batcher under one lock and one condition.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np

from embedserve.messages import Lane
from embedserve_kernels.output_layout import OutputDtype

QUERY_MAX_INPUTS = 8
QUERY_MAX_TOKENS = 512
MIN_SHARE_TOKENS = 200  # smaller batches cost more a token than sharing them gains


def auto_lane(rows: int, tokens: int) -> Lane:
    """The lane of a request that names none."""
    return Lane.QUERY if rows <= QUERY_MAX_INPUTS and tokens <= QUERY_MAX_TOKENS else Lane.BULK


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One client request as the engine sees it. Rows before `next_row` have been taken into batches.

    Nobody waits for a `cancelled` one: those of its rows that are in a batch may be left out.
    """

    frontend: str
    id: int
    lane: Lane
    lengths: np.ndarray  # [rows] tokens of each input
    token_ids: np.ndarray  # [tokens] inputs end to end
    dims: int
    dtype: OutputDtype
    normalize: bool
    enqueued_at: float
    next_row: int = 0
    cancelled: bool = False
    token_ends: np.ndarray = field(init=False)  # [rows + 1] where each input begins in token_ids, and the end

    def __post_init__(self) -> None:
        self.token_ends = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=self.token_ends[1:])

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def waiting_tokens(self) -> int:
        return int(self.token_ends[-1] - self.token_ends[self.next_row])

    def rows_within(self, budget: int) -> int:
        """How many of the waiting rows, taken in order, stay within `budget` tokens."""
        limit = self.token_ends[self.next_row] + budget
        return int(np.searchsorted(self.token_ends, limit, side="right")) - 1 - self.next_row


@dataclass(slots=True)
class Part:
    """Consecutive rows of one request, taken into one batch."""

    request: Request
    first_row: int
    rows: int
    tokens: int

    @property
    def lengths(self) -> np.ndarray:
        return self.request.lengths[self.first_row : self.first_row + self.rows]

    @property
    def token_ids(self) -> np.ndarray:
        ends = self.request.token_ends
        return self.request.token_ids[ends[self.first_row] : ends[self.first_row + self.rows]]


@dataclass(slots=True)
class Batch:
    """Parts ordered by frontend, then request."""

    parts: list[Part]
    tokens: int

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def cancelled(self) -> bool:
        """Nobody waits for any of it."""
        return all(part.request.cancelled for part in self.parts)


class Batcher:
    """Two lanes, each batched by itself, oldest first.

    A request larger than the budget is taken in row ranges over several batches; an input larger than it goes alone.
    """

    def __init__(self) -> None:
        self._lanes: dict[Lane, OrderedDict[tuple[str, int], Request]] = {lane: OrderedDict() for lane in Lane}
        self._waiting_tokens = dict.fromkeys(Lane, 0)

    def add(self, request: Request) -> None:
        key = (request.frontend, request.id)
        assert all(key not in lane for lane in self._lanes.values()), f"request {key} is already waiting"
        self._lanes[request.lane][key] = request
        self._waiting_tokens[request.lane] += request.waiting_tokens

    def cancel(self, frontend: str, id: int) -> Request | None:
        """Take a request out. None when it does not wait (any more): unknown, answered, or in a batch whole."""
        for lane, waiting in self._lanes.items():
            request = waiting.pop((frontend, id), None)
            if request is not None:
                self._waiting_tokens[lane] -= request.waiting_tokens
                return request
        return None

    def cancel_frontend(self, frontend: str) -> int:
        """Take out everything of one frontend; how many requests that was."""
        keys = [key for waiting in self._lanes.values() for key in waiting if key[0] == frontend]
        for key in keys:
            self.cancel(*key)
        return len(keys)

    def waiting_tokens(self, lane: Lane) -> int:
        return self._waiting_tokens[lane]

    def oldest_enqueued_at(self, lane: Lane) -> float | None:
        return next((request.enqueued_at for request in self._lanes[lane].values()), None)

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._lanes.values())

    def next_batch(self, lane: Lane, budget: int) -> Batch | None:
        """At most `budget` tokens (more only for one input that is larger by itself), or None when nothing waits."""
        parts: list[Part] = []
        room = budget
        waiting = self._lanes[lane]
        while waiting and room > 0:
            key, request = next(iter(waiting.items()))
            rows = request.rows_within(room)
            if rows == 0:
                if parts:
                    break
                rows = 1  # larger than the whole budget: alone
            part = Part(request, request.next_row, rows, 0)
            part.tokens = int(request.token_ends[part.first_row + rows] - request.token_ends[part.first_row])
            request.next_row += rows
            parts.append(part)
            room -= part.tokens
            self._waiting_tokens[lane] -= part.tokens
            if request.next_row == request.rows:
                del waiting[key]
        if not parts:
            return None
        parts.sort(key=lambda part: (part.request.frontend, part.request.id))
        return Batch(parts, budget - room)


class WaitingRoom:
    """The one structure between IpcLoop, which adds and cancels, and the engine's loops, which take a lane each.

    Under the lock only references move. `observe` is called under it after every change: gauges are never stale.
    """

    def __init__(self, max_tokens: int, *, observe: Callable[[Batcher], None] = lambda batcher: None) -> None:
        self._batcher = Batcher()
        self._max_tokens = max_tokens
        self._observe = observe
        self._lock = threading.Lock()
        self._gone: set[str] = set()  # frontends; of theirs some messages may still be read
        # those with rows in a batch, for as long as anyone works on it
        self._taken: WeakValueDictionary[tuple[str, int], Request] = WeakValueDictionary()
        self._filled = {lane: threading.Condition(self._lock) for lane in Lane}
        self._closed = False

    def add(self, requests: Iterable[Request]) -> list[Request]:
        """Let requests in, oldest first; returns those for which there is no room. Never blocks on the engine."""
        refused: list[Request] = []
        with self._lock:
            for request in requests:
                if request.frontend in self._gone:
                    continue
                waiting = sum(self._batcher.waiting_tokens(lane) for lane in Lane)
                if waiting and waiting + request.waiting_tokens > self._max_tokens:
                    refused.append(request)
                else:
                    self._batcher.add(request)
                    self._filled[request.lane].notify()
            self._observe(self._batcher)
        return refused

    def cancel(self, frontend: str, ids: Iterable[int]) -> int:
        """How many of these requests still waited; they are gone now. What is in a batch of them is marked."""
        with self._lock:
            freed = 0
            for id in ids:
                freed += self._batcher.cancel(frontend, id) is not None
                taken = self._taken.get((frontend, id))
                if taken is not None:
                    taken.cancelled = True
            self._observe(self._batcher)
        return freed

    def cancel_frontend(self, frontend: str) -> int:
        """Free what a frontend that is gone had waiting, now and later; how many requests that was. What is in a batch
        of theirs is marked."""
        with self._lock:
            self._gone.add(frontend)
            for request in list(self._taken.values()):
                request.cancelled |= request.frontend == frontend
            freed = self._batcher.cancel_frontend(frontend)
            self._observe(self._batcher)
        return freed

    def take(self, lane: Lane, budget: int, takers: int = 1) -> Batch | None:
        """Block until work of this lane waits, then cut a batch of at most `budget` tokens. None when the room is
        closed.

        `takers` is how many threads take from the lane. Each leaves the others their share of what waits, so that a
        lone request runs on all of them, and a batch waits for whoever is done next while the last answers are still
        on their way.
        """
        with self._lock:
            while not self._closed:
                waiting = self._batcher.waiting_tokens(lane)
                share = max(MIN_SHARE_TOKENS, -(-waiting // takers))
                batch = self._batcher.next_batch(lane, min(budget, share))
                if batch is not None:
                    self._taken.update({(part.request.frontend, part.request.id): part.request for part in batch.parts})
                    self._observe(self._batcher)
                    if self._batcher.waiting_tokens(lane):
                        self._filled[lane].notify()  # there is work left for another that takes
                    return batch
                self._filled[lane].wait()
        return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for filled in self._filled.values():
                filled.notify_all()
