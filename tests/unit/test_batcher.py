"""The batcher with plain lists: what a batch holds, and in which order.

Knows neither threads nor clocks: time is counted in tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedserve.engine.batcher import Batch, Batcher, Request, auto_lane
from embedserve.messages import Lane
from embedserve_kernels.output_layout import OutputDtype

QUERY, BULK = Lane.QUERY, Lane.BULK


def make_request(id: int, lengths: Sequence[int], *, lane: Lane = QUERY, frontend: str = "a") -> Request:
    """Token ids count up from 1000 * id, so that a slice of them tells which request and where."""
    return Request(
        frontend=frontend,
        id=id,
        lane=lane,
        lengths=np.array(lengths, np.int32),
        token_ids=1000 * id + np.arange(sum(lengths), dtype=np.int32),
        dims=8,
        dtype=OutputDtype.FLOAT32,
        normalize=True,
        enqueued_at=float(id),
    )


def batcher_with(*requests: Request) -> Batcher:
    batcher = Batcher()
    for request in requests:
        batcher.add(request)
    return batcher


def rows_of(batch: Batch | None) -> list[tuple[int, int, int]]:
    """(request id, first row, rows) of each part."""
    assert batch is not None
    return [(part.request.id, part.first_row, part.rows) for part in batch.parts]


def take_all(batcher: Batcher, budget: int, lane: Lane = QUERY) -> list[list[tuple[int, int, int]]]:
    batches = []
    while (batch := batcher.next_batch(lane, budget)) is not None:
        batches.append(rows_of(batch))
    return batches


# Which lane


@pytest.mark.parametrize(
    ("rows", "tokens", "lane"),
    [(1, 1, QUERY), (8, 512, QUERY), (9, 9, BULK), (1, 513, BULK), (8, 513, BULK), (9, 513, BULK)],
)
def test_small_requests_are_queries_and_all_others_bulk(rows: int, tokens: int, lane: Lane) -> None:
    assert auto_lane(rows, tokens) is lane


# One batch


def test_nothing_waiting_is_no_batch() -> None:
    assert Batcher().next_batch(QUERY, 10) is None


def test_batch_says_how_much_it_holds() -> None:
    batch = batcher_with(make_request(1, [2, 3]), make_request(2, [4])).next_batch(QUERY, 100)
    assert batch is not None
    assert (batch.tokens, batch.rows) == (9, 3)


def test_batch_is_filled_to_the_last_token() -> None:
    batch = batcher_with(make_request(1, [5, 5]), make_request(2, [5, 5])).next_batch(QUERY, 20)
    assert batch is not None
    assert (batch.tokens, rows_of(batch)) == (20, [(1, 0, 2), (2, 0, 2)])


def test_oldest_goes_first_within_a_lane() -> None:
    batcher = batcher_with(*(make_request(id, [4]) for id in (3, 1, 2)))
    assert take_all(batcher, 4) == [[(3, 0, 1)], [(1, 0, 1)], [(2, 0, 1)]]


@pytest.mark.parametrize("lane", Lane)
def test_oldest_is_never_skipped_for_a_smaller_one(lane: Lane) -> None:
    batcher = batcher_with(*(make_request(id, [tokens], lane=lane) for id, tokens in enumerate([6, 6, 1])))
    assert take_all(batcher, 10, lane) == [[(0, 0, 1)], [(1, 0, 1), (2, 0, 1)]]


def test_request_larger_than_the_budget_is_taken_in_row_ranges() -> None:
    batcher = batcher_with(make_request(1, [3, 3, 3, 3, 3]))
    assert take_all(batcher, 7) == [[(1, 0, 2)], [(1, 2, 2)], [(1, 4, 1)]]


def test_row_range_shares_its_batch_with_the_next_request() -> None:
    batcher = batcher_with(make_request(1, [3, 3, 3]), make_request(2, [1, 1]))
    assert take_all(batcher, 7) == [[(1, 0, 2)], [(1, 2, 1), (2, 0, 2)]]


@pytest.mark.parametrize("lane", Lane)
def test_input_larger_than_the_budget_goes_alone(lane: Lane) -> None:
    batcher = batcher_with(make_request(1, [2], lane=lane), make_request(2, [50, 2], lane=lane))
    batches = [batcher.next_batch(lane, 10) for _ in range(3)]
    assert [rows_of(batch) for batch in batches] == [[(1, 0, 1)], [(2, 0, 1)], [(2, 1, 1)]]
    assert [batch.tokens for batch in batches if batch] == [2, 50, 2]


def test_input_of_exactly_the_budget_goes_alone() -> None:
    batcher = batcher_with(make_request(1, [10]), make_request(2, [1]))
    assert take_all(batcher, 10) == [[(1, 0, 1)], [(2, 0, 1)]]


def test_budget_of_one_takes_one_input_at_a_time() -> None:
    batcher = batcher_with(make_request(1, [1, 4]), make_request(2, [1]))
    assert take_all(batcher, 1) == [[(1, 0, 1)], [(1, 1, 1)], [(2, 0, 1)]]


def test_parts_are_ordered_by_frontend_then_request() -> None:
    batcher = batcher_with(
        make_request(9, [1], frontend="b"),
        make_request(2, [1], frontend="a"),
        make_request(10, [1], frontend="b"),
        make_request(3, [1], frontend="a"),
        make_request(1, [1], frontend="b"),
    )
    batch = batcher.next_batch(QUERY, 100)
    assert batch is not None
    assert [(part.request.frontend, part.request.id) for part in batch.parts] == [
        ("a", 2),
        ("a", 3),
        ("b", 1),
        ("b", 9),
        ("b", 10),
    ]


def test_part_slices_exactly_its_rows() -> None:
    request = make_request(1, [2, 3, 1, 4])
    batcher = batcher_with(request)
    first, second = batcher.next_batch(QUERY, 5), batcher.next_batch(QUERY, 5)
    assert first is not None
    assert second is not None
    assert [part.lengths.tolist() for batch in (first, second) for part in batch.parts] == [[2, 3], [1, 4]]
    assert first.parts[0].token_ids.tolist() == [1000, 1001, 1002, 1003, 1004]
    assert second.parts[0].token_ids.tolist() == [1005, 1006, 1007, 1008, 1009]
    assert np.shares_memory(second.parts[0].token_ids, request.token_ids)  # a view: nothing is copied under the lock


def test_lanes_are_batched_apart() -> None:
    batcher = batcher_with(make_request(1, [1] * 100, lane=BULK), make_request(2, [8]), make_request(3, [2], lane=BULK))
    assert rows_of(batcher.next_batch(QUERY, 500)) == [(2, 0, 1)]
    assert batcher.next_batch(QUERY, 500) is None
    assert rows_of(batcher.next_batch(BULK, 500)) == [(1, 0, 100), (3, 0, 1)]


# Cancelling


def test_cancelled_request_is_not_batched() -> None:
    batcher = batcher_with(make_request(1, [1]), make_request(2, [1]))
    cancelled = batcher.cancel("a", 1)
    assert cancelled is not None
    assert cancelled.id == 1
    assert take_all(batcher, 10) == [[(2, 0, 1)]]


def test_cancel_between_row_ranges_drops_the_rest() -> None:
    batcher = batcher_with(make_request(1, [4, 4, 4]), make_request(2, [1]))
    assert rows_of(batcher.next_batch(QUERY, 8)) == [(1, 0, 2)]
    assert batcher.cancel("a", 1) is not None
    assert batcher.waiting_tokens(QUERY) == 1
    assert take_all(batcher, 8) == [[(2, 0, 1)]]


def test_cancel_after_the_last_row_range_finds_nothing() -> None:
    batcher = batcher_with(make_request(1, [4, 4]))
    take_all(batcher, 4)
    assert batcher.cancel("a", 1) is None


def test_cancel_twice_or_of_an_unknown_request_finds_nothing() -> None:
    batcher = batcher_with(make_request(1, [1]))
    assert batcher.cancel("a", 2) is None
    assert batcher.cancel("b", 1) is None
    assert batcher.cancel("a", 1) is not None
    assert batcher.cancel("a", 1) is None


def test_cancel_leaves_parts_already_taken_as_they_are() -> None:
    batcher = batcher_with(make_request(1, [2, 2, 2]))
    batch = batcher.next_batch(QUERY, 4)
    batcher.cancel("a", 1)
    assert batch is not None
    assert batch.parts[0].lengths.tolist() == [2, 2]
    assert batch.parts[0].token_ids.tolist() == [1000, 1001, 1002, 1003]


def test_cancel_frontend_takes_out_all_of_it_in_both_lanes_and_nothing_else() -> None:
    batcher = batcher_with(
        make_request(1, [1], frontend="gone"),
        make_request(1, [2], frontend="stays"),
        make_request(2, [3], frontend="gone", lane=BULK),
        make_request(2, [4], frontend="stays", lane=BULK),
    )
    assert batcher.cancel_frontend("gone") == 2
    assert batcher.cancel_frontend("gone") == 0
    assert (batcher.waiting_tokens(QUERY), batcher.waiting_tokens(BULK), len(batcher)) == (2, 4, 2)
    assert [take_all(batcher, 100, lane) for lane in (QUERY, BULK)] == [[[(1, 0, 1)]], [[(2, 0, 1)]]]


def test_same_id_of_two_frontends_is_two_requests() -> None:
    batcher = batcher_with(make_request(1, [1], frontend="a"), make_request(1, [1], frontend="b"))
    batcher.cancel("a", 1)
    batch = batcher.next_batch(QUERY, 10)
    assert batch is not None
    assert [part.request.frontend for part in batch.parts] == ["b"]


# Counters


def test_waiting_tokens_follow_adds_takes_and_cancels() -> None:
    batcher = batcher_with(make_request(1, [5, 5]), make_request(2, [7], lane=BULK))
    assert (batcher.waiting_tokens(QUERY), batcher.waiting_tokens(BULK), len(batcher)) == (10, 7, 2)
    batcher.cancel("a", 2)
    batcher.next_batch(QUERY, 5)
    assert (batcher.waiting_tokens(QUERY), batcher.waiting_tokens(BULK), len(batcher)) == (5, 0, 1)
    batcher.next_batch(QUERY, 5)
    assert (batcher.waiting_tokens(QUERY), batcher.waiting_tokens(BULK), len(batcher)) == (0, 0, 0)


def test_oldest_enqueued_is_that_of_the_next_request_to_go() -> None:
    batcher = batcher_with(make_request(1, [4, 4]), make_request(2, [1]), make_request(3, [1], lane=BULK))
    assert (batcher.oldest_enqueued_at(QUERY), batcher.oldest_enqueued_at(BULK)) == (1.0, 3.0)
    batcher.next_batch(QUERY, 5)
    assert batcher.oldest_enqueued_at(QUERY) == 1.0  # its second row still waits
    take_all(batcher, 100)
    assert batcher.oldest_enqueued_at(QUERY) is None


# Any sequence of adds, cancels and batches


@dataclass
class Model:
    """What must be true of a batcher, kept in the plainest way: rows in lists, sums by adding up."""

    batcher: Batcher = field(default_factory=Batcher)
    waiting: dict[tuple[str, int], deque[int]] = field(default_factory=dict)  # rows not yet taken, oldest request first
    requests: dict[tuple[str, int], Request] = field(default_factory=dict)
    cancelled: set[tuple[str, int]] = field(default_factory=set)
    taken: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    next_id: int = 1

    def add(self, frontend: str, lane: Lane, lengths: list[int]) -> None:
        request = make_request(self.next_id, lengths, lane=lane, frontend=frontend)
        key = (frontend, self.next_id)
        self.next_id += 1
        self.batcher.add(request)
        self.requests[key] = request
        self.waiting[key] = deque(range(len(lengths)))

    def cancel(self, choice: int) -> None:
        keys = list(self.requests)
        key = keys[choice % len(keys)] if keys else ("a", 0)
        assert (self.batcher.cancel(*key) is not None) == (self.waiting.pop(key, None) is not None)
        self.cancelled.add(key)

    def cancel_frontend(self, frontend: str) -> None:
        keys = [key for key in self.waiting if key[0] == frontend]
        assert self.batcher.cancel_frontend(frontend) == len(keys)
        for key in keys:
            del self.waiting[key]
        self.cancelled.update(keys)

    def take(self, lane: Lane, budget: int) -> Batch | None:
        batch = self.batcher.next_batch(lane, budget)
        assert (batch is None) == (lane not in {self.requests[key].lane for key in self.waiting})
        if batch is None:
            return None
        assert batch.tokens == sum(part.tokens for part in batch.parts)
        assert batch.tokens <= budget or batch.rows == 1
        keys = [(part.request.frontend, part.request.id) for part in batch.parts]
        assert keys == sorted(set(keys)), "a request has one part in a batch, and they are in order"
        for key, part in zip(keys, batch.parts, strict=True):
            assert part.request.lane is lane
            assert key not in self.cancelled
            rows = [self.waiting[key].popleft() for _ in range(part.rows)]
            assert rows == list(range(part.first_row, part.first_row + part.rows))
            self.taken.update((*key, row) for row in rows)
            ends = np.cumsum([0, *part.request.lengths])
            assert part.lengths.tolist() == part.request.lengths[rows].tolist()
            first, end = int(ends[part.first_row]), int(ends[part.first_row + part.rows])
            assert part.token_ids.tolist() == list(range(1000 * key[1] + first, 1000 * key[1] + end))
            assert part.tokens == end - first
        self._check_oldest_first(batch)
        self.waiting = {key: rows for key, rows in self.waiting.items() if rows}
        return batch

    def _check_oldest_first(self, batch: Batch) -> None:
        """A request is in the batch only if every older one of its lane has no row left."""
        in_batch = {(part.request.frontend, part.request.id) for part in batch.parts}
        for lane in Lane:
            queue = [key for key in self.waiting if self.requests[key].lane is lane]
            taken = [key for key in queue if key in in_batch]
            assert taken == queue[: len(taken)]
            assert not any(self.waiting[key] for key in taken[:-1])

    def check_counters(self) -> None:
        for lane in Lane:
            left = [
                sum(int(self.requests[key].lengths[row]) for row in rows)
                for key, rows in self.waiting.items()
                if self.requests[key].lane is lane
            ]
            assert self.batcher.waiting_tokens(lane) == sum(left)
        assert len(self.batcher) == len(self.waiting)


frontends = st.sampled_from("abc")
lengths = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 90)), min_size=1, max_size=12)
budgets = st.integers(1, 40)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), frontends, st.sampled_from(Lane), lengths),
        st.tuples(st.just("take"), st.sampled_from(Lane), budgets),
        st.tuples(st.just("cancel"), st.integers(0, 50)),
        st.tuples(st.just("cancel_frontend"), frontends),
    ),
    max_size=60,
)


@given(steps=steps)
@settings(max_examples=300)
def test_nothing_is_lost_or_taken_twice_whatever_comes_and_goes(steps: list[tuple]) -> None:
    model = Model()
    for step, *arguments in steps:
        getattr(model, step)(*arguments)
        model.check_counters()
    for lane in Lane:
        while model.take(lane, 25):
            model.check_counters()
    assert not model.waiting
    assert set(model.taken.values()) <= {1}
    for key, request in model.requests.items():
        rows = sum((*key, row) in model.taken for row in range(request.rows))
        assert rows == request.rows or key in model.cancelled
