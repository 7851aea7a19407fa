"""The waiting room between threads: who sleeps, who is woken, who is turned away.

Knows nothing of sockets or the engine. A condition that reports its sleeper stands in for the clock.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from embedserve.engine import batcher
from embedserve.engine.batcher import Batch, Batcher, Request, WaitingRoom
from embedserve.messages import Lane
from embedserve_kernels.output_layout import OutputDtype

TIMEOUT_S = 20  # of what should happen at once


class WatchedCondition(threading.Condition):
    """`sleeping` is set under the lock: whoever takes the lock after that finds the sleeper asleep."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__(lock)
        self.sleeping = threading.Event()
        self.timeouts: list[float | None] = []  # of each wait: as many as the sleeper went to sleep
        self.wake_ups = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.append(timeout)
        self.sleeping.set()
        return super().wait(timeout)

    def notify(self, n: int = 1) -> None:
        self.wake_ups += 1
        super().notify(n)


class Room(WaitingRoom):
    condition: WatchedCondition


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    return make_room(monkeypatch, max_tokens=100)


def make_room(monkeypatch: pytest.MonkeyPatch, *, max_tokens: int) -> Room:
    conditions: list[WatchedCondition] = []

    def condition(lock: threading.Lock) -> WatchedCondition:
        conditions.append(WatchedCondition(lock))
        return conditions[-1]

    monkeypatch.setattr(batcher, "threading", SimpleNamespace(Lock=threading.Lock, Condition=condition))
    room = Room(max_tokens)
    room.condition = conditions[list(Lane).index(Lane.QUERY)]
    return room


def asleep(room: Room, budget: int = 50) -> Future[Batch | None]:
    """A `take` on another thread that has found nothing and sleeps."""
    room.condition.sleeping.clear()
    taken: Future[Batch | None] = Future()
    threading.Thread(target=lambda: taken.set_result(room.take(Lane.QUERY, budget)), daemon=True).start()
    assert room.condition.sleeping.wait(TIMEOUT_S)
    assert not taken.done()
    return taken


def make_request(id: int, lengths: list[int], *, lane: Lane = Lane.QUERY, frontend: str = "a") -> Request:
    tokens = np.zeros(sum(lengths), np.int32)
    return Request(frontend, id, lane, np.array(lengths, np.int32), tokens, 8, OutputDtype.FLOAT32, True, float(id))


def ids_of(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [part.request.id for part in batch.parts]


def test_take_returns_at_once_what_waits(room: Room) -> None:
    room.add([make_request(1, [5]), make_request(2, [5])])
    assert ids_of(room.take(Lane.QUERY, 50)) == [1, 2]
    assert room.condition.timeouts == []


def test_take_sleeps_until_a_request_is_added(room: Room) -> None:
    taken = asleep(room)
    room.add([make_request(1, [5])])
    assert ids_of(taken.result(TIMEOUT_S)) == [1]


def test_take_never_polls(room: Room) -> None:
    taken = asleep(room)
    room.add([make_request(1, [5])])
    taken.result(TIMEOUT_S)
    assert room.condition.timeouts == [None]  # one sleep, and no clock in it


def test_batch_is_cut_when_it_is_taken_and_not_before(room: Room) -> None:
    room.add([make_request(1, [10])])
    room.add([make_request(2, [40])])
    assert ids_of(room.take(Lane.QUERY, 50)) == [1, 2]
    room.cancel("a", [1])
    room.add([make_request(3, [1])])
    assert ids_of(room.take(Lane.QUERY, 50)) == [3]


def test_bulk_does_not_wake_the_one_who_waits_for_queries(room: Room) -> None:
    taken = asleep(room)
    room.add([make_request(1, [5], lane=Lane.BULK)])
    assert room.condition.wake_ups == 0
    assert ids_of(room.take(Lane.BULK, 50)) == [1]
    room.add([make_request(2, [5])])
    assert ids_of(taken.result(TIMEOUT_S)) == [2]


def test_close_wakes_the_sleeper_with_none(room: Room) -> None:
    taken = asleep(room)
    room.close()
    assert taken.result(TIMEOUT_S) is None


def test_close_wakes_every_sleeper(room: Room) -> None:
    taken = [asleep(room) for _ in range(3)]
    room.close()
    assert [future.result(TIMEOUT_S) for future in taken] == [None] * 3


def test_one_add_wakes_as_many_sleepers_as_it_has_batches_for(room: Room) -> None:
    taken = [asleep(room, budget=30) for _ in range(3)]
    room.add([make_request(1, [30] * 3)])
    batches = [future.result(TIMEOUT_S) for future in taken]
    assert sorted(part.first_row for batch in batches if batch for part in batch.parts) == [0, 1, 2]


def test_closed_room_gives_nothing_though_work_waits(room: Room) -> None:
    room.add([make_request(1, [5])])
    room.close()
    assert room.take(Lane.QUERY, 50) is None
    assert room.take(Lane.QUERY, 50) is None


def test_request_is_refused_when_the_room_is_full(room: Room) -> None:
    assert room.add([make_request(1, [60])]) == []
    second, third, fourth = make_request(2, [41]), make_request(3, [40]), make_request(4, [1])
    assert room.add([second, third, fourth]) == [second, fourth]  # 60 + 40 is exactly full
    assert ids_of(room.take(Lane.QUERY, 1000)) == [1, 3]


def test_room_counts_both_lanes(room: Room) -> None:
    room.add([make_request(1, [60], lane=Lane.BULK)])
    refused = make_request(2, [41])
    assert room.add([refused]) == [refused]


def test_request_larger_than_the_room_is_let_in_when_nothing_else_waits(room: Room) -> None:
    large, other = make_request(1, [50] * 4), make_request(2, [1])
    assert room.add([large]) == []
    assert room.add([other]) == [other]
    assert ids_of(room.take(Lane.QUERY, 1000)) == [1]
    again = make_request(3, [50] * 4)
    assert room.add([other, again]) == [again]


def test_room_frees_by_what_is_taken_row_by_row(room: Room) -> None:
    room.add([make_request(1, [50, 50])])
    room.take(Lane.QUERY, 50)
    assert room.add([make_request(2, [50])]) == []
    refused = make_request(3, [1])
    assert room.add([refused]) == [refused]


def test_room_frees_by_what_is_cancelled(room: Room) -> None:
    room.add([make_request(1, [100])])
    assert room.cancel("a", [1]) == 1
    assert room.add([make_request(2, [100])]) == []


def test_cancel_counts_only_what_still_waited(room: Room) -> None:
    room.add([make_request(id, [10]) for id in range(4)])
    room.take(Lane.QUERY, 20)  # 0 and 1
    assert room.cancel("b", [2, 3]) == 0
    assert room.cancel("a", [0, 1, 2, 99]) == 1
    assert room.cancel_frontend("a") == 1
    assert room.cancel_frontend("a") == 0


def test_what_is_in_a_batch_is_marked_when_it_is_cancelled(room: Room) -> None:
    room.add([make_request(1, [5]), make_request(2, [5])])
    batch = room.take(Lane.QUERY, 50)
    assert batch is not None
    room.cancel("a", [1])
    assert [part.request.cancelled for part in batch.parts] == [True, False]
    assert not batch.cancelled
    room.cancel("b", [2])
    assert not batch.cancelled
    room.cancel_frontend("a")
    assert batch.cancelled


def test_what_is_in_a_batch_is_marked_when_the_rest_of_it_still_waited(room: Room) -> None:
    room.add([make_request(1, [5, 5])])
    batch = room.take(Lane.QUERY, 5)
    assert batch is not None
    assert room.cancel("a", [1]) == 1
    assert batch.cancelled


def test_what_a_lost_frontend_had_sent_is_not_let_in_any_more(room: Room) -> None:
    room.cancel_frontend("a")
    assert room.add([make_request(1, [10]), make_request(2, [10], frontend="b")]) == []
    assert ids_of(room.take(Lane.QUERY, 100)) == [2]


def test_flood_of_cancels_does_not_wake_the_sleeper(room: Room) -> None:
    taken = asleep(room)
    for id in range(2000):
        assert room.cancel("a", [id, id + 1, id + 2]) == 0
        assert room.cancel_frontend("b") == 0
    assert room.condition.wake_ups == 0
    room.add([make_request(1, [5])])
    assert ids_of(taken.result(TIMEOUT_S)) == [1]
    assert len(room.condition.timeouts) == 1


def test_sleeper_that_finds_the_request_cancelled_sleeps_on(room: Room) -> None:
    """Add and cancel follow each other so closely that the sleeper may wake to an empty room."""
    taken = asleep(room)
    for id in range(200):
        room.add([make_request(id, [5])])
        if room.cancel("a", [id]) == 0:
            assert ids_of(taken.result(TIMEOUT_S)) == [id]
            taken = asleep(room)
    room.add([make_request(1000, [5])])
    assert ids_of(taken.result(TIMEOUT_S)) == [1000]


def test_every_change_is_observed_under_the_lock() -> None:
    seen: list[tuple[int, int]] = []

    def observe(batcher: Batcher) -> None:
        seen.append((batcher.waiting_tokens(Lane.QUERY), batcher.waiting_tokens(Lane.BULK)))

    room = WaitingRoom(100, observe=observe)
    room.add([make_request(1, [10, 10]), make_request(2, [5] * 6, lane=Lane.BULK)])
    room.take(Lane.QUERY, 15)
    room.cancel("a", [1])
    room.cancel_frontend("a")
    assert seen == [(20, 30), (10, 30), (0, 30), (0, 0)]


def test_nothing_is_lost_or_taken_twice_between_three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    room = make_room(monkeypatch, max_tokens=10**9)
    requests = [make_request(id, [1 + id % 7] * (1 + id % 5)) for id in range(3000)]
    rows: Counter[int] = Counter()
    added = threading.Semaphore(0)

    def add() -> None:
        for first in range(0, len(requests), 3):
            assert room.add(requests[first : first + 3]) == []
            added.release()

    def cancel() -> int:
        cancelled = 0
        for first in range(0, len(requests), 3):
            assert added.acquire(timeout=TIMEOUT_S)
            cancelled += room.cancel("a", [first, first + 1])
        return cancelled

    def take() -> None:
        while batch := room.take(Lane.QUERY, 40):
            rows.update({part.request.id: part.rows for part in batch.parts})

    with ThreadPoolExecutor(3) as pool:
        taking, adding, cancelling = pool.submit(take), pool.submit(add), pool.submit(cancel)
        try:
            adding.result(TIMEOUT_S)
            cancelled = cancelling.result(TIMEOUT_S)
            room.condition.sleeping.clear()
            room.add([make_request(-1, [1])])  # if the taker slept already, it wakes and sleeps again
            assert room.condition.sleeping.wait(TIMEOUT_S)
        finally:
            room.close()
        taking.result(TIMEOUT_S)

    del rows[-1]
    assert all(0 < taken <= requests[id].rows for id, taken in rows.items())
    whole = {id for id, taken in rows.items() if taken == requests[id].rows}
    assert whole >= set(range(2, 3000, 3)), "requests that nobody cancelled are taken whole"
    assert len(whole) + cancelled == len(requests)
