"""The gates of a frontend: what fits, how fast they empty, and when a caller who was refused may come back.

Knows gates alone; the clock is a number.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from embedserve.frontend.gate import MAX_RETRY_S, MIN_RETRY_S, Gate
from embedserve.frontend.unread import UnreadReplies


def drained(gate: Gate, *, began: float, per_s: int, seconds: float) -> float:
    """Keep the gate as full as it is while so much is answered a second; the time after it."""
    for tick in range(int(seconds * 10)):
        now = began + (tick + 1) / 10
        gate.leave(per_s // 10, now, answered=True)
        gate.enter(per_s // 10, now)
    return began + seconds


def test_gate_lets_in_what_fits_and_no_more() -> None:
    gate = Gate(100, guess_per_s=10)
    gate.enter(60, 0.0)
    assert gate.has_room(40)
    assert not gate.has_room(41)
    gate.leave(60, 1.0, answered=False)
    assert gate.held == 0


def test_wait_is_told_by_the_guess_until_the_rate_is_measured_and_then_by_that() -> None:
    gate = Gate(1000, guess_per_s=1000)
    gate.enter(1000, 0.0)
    assert gate.retry_after_s(200, 0.0) == pytest.approx(0.2)
    now = drained(gate, began=0.0, per_s=100, seconds=2)
    assert gate.per_s == pytest.approx(100, rel=0.2)
    assert gate.retry_after_s(200, now) == pytest.approx(2, rel=0.2)


def test_light_load_says_nothing_of_how_slow_the_server_is() -> None:
    gate = Gate(1000, guess_per_s=1000)
    for second in range(20):
        gate.enter(10, float(second))
        gate.leave(10, second + 0.6, answered=True)
    assert gate.per_s == 1000


def test_callers_who_left_are_not_taken_for_answers() -> None:
    gate = Gate(1000, guess_per_s=1000)
    gate.enter(1000, 0.0)
    for tick in range(20):
        gate.leave(100, tick / 10, answered=False)
        gate.enter(100, tick / 10)
    assert gate.retry_after_s(100, 2.0) == MAX_RETRY_S  # nothing was answered at all


def test_slow_model_that_answers_every_few_seconds_is_measured_too() -> None:
    gate = Gate(1000, guess_per_s=1000)
    gate.enter(1000, 0.0)
    for number in range(1, 4):
        gate.leave(100, 5.0 * number, answered=True)
        gate.enter(100, 5.0 * number)
    assert gate.per_s == pytest.approx(20)


def test_callers_refused_together_are_told_to_come_one_after_another() -> None:
    gate = Gate(1000, guess_per_s=100)
    gate.enter(1000, 0.0)
    told = [gate.retry_after_s(100, 0.0) for _ in range(20)]
    assert told[:10] == pytest.approx([1.0 * turn for turn in range(1, 11)])
    assert told[10:] == pytest.approx([10.0] * 10)  # by then all is answered that is held now
    assert gate.retry_after_s(100, 60.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("per_s", "told"), [(1e9, MIN_RETRY_S), (1.0, MAX_RETRY_S)])
def test_wait_has_bounds(per_s: float, told: float) -> None:
    gate = Gate(1000, guess_per_s=per_s)
    gate.enter(1000, 0.0)
    assert gate.retry_after_s(1000, 0.0) == told


def test_unread_replies_beyond_the_bound_drop_those_that_waited_longest() -> None:
    unread, dropped = UnreadReplies(100), []
    with ExitStack() as waiting:
        for name, nbytes in (("first", 40), ("second", 40), ("third", 20), ("fourth", 50)):
            waiting.enter_context(unread.waiting(nbytes, lambda name=name: dropped.append(name)))
        assert dropped == ["first", "second"]
    with unread.waiting(100, lambda: dropped.append("fifth")), unread.waiting(200, lambda: dropped.append("huge")):
        assert dropped == ["first", "second", "fifth"]
