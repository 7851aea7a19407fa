"""Preemption on real threads and the real clock: who steps aside for whom, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from embedserve.engine.preemption import ASIDE_SHARE, WINDOW_S, Preemption, Turn
from embedserve.messages import Lane

MOST_ASIDE_S = ASIDE_SHARE * WINDOW_S
AT_ONCE_S = 0.1


def timed(run: Callable[[], object]) -> float:
    started = time.monotonic()
    run()
    return time.monotonic() - started


def test_bulk_with_cores_to_itself_runs_on() -> None:
    with Turn(Preemption(1), Lane.BULK) as bulk:
        assert timed(bulk.step_aside) < AT_ONCE_S


def test_query_waits_for_nobody() -> None:
    preemption = Preemption(1)
    with Turn(preemption, Lane.BULK), Turn(preemption, Lane.QUERY), Turn(preemption, Lane.QUERY) as query:
        assert timed(query.step_aside) < AT_ONCE_S


def test_bulk_steps_aside_until_the_query_is_done() -> None:
    preemption = Preemption(1)
    with Turn(preemption, Lane.BULK) as bulk:
        query = Turn(preemption, Lane.QUERY).__enter__()
        timer = threading.Timer(0.15, query.__exit__)
        timer.start()
        assert 0.1 < timed(bulk.step_aside) < MOST_ASIDE_S - 0.05
        timer.join()


def test_bulk_does_not_begin_while_a_query_runs() -> None:
    preemption = Preemption(1)
    with Turn(preemption, Lane.QUERY):
        assert timed(Turn(preemption, Lane.BULK).__enter__) > MOST_ASIDE_S - 0.05


@pytest.mark.parametrize(("queries", "aside"), [(0, 0), (1, 1), (2, 2)])
def test_only_as_many_step_aside_as_there_are_queries(queries: int, aside: int) -> None:
    preemption, stepped = Preemption(2), []

    def run(bulk: Turn) -> None:
        taken_s = timed(bulk.step_aside)
        stepped.append(taken_s > MOST_ASIDE_S - 0.05)

    bulks = [Turn(preemption, Lane.BULK).__enter__() for _ in range(2)]
    for _ in range(queries):
        Turn(preemption, Lane.QUERY).__enter__()
    threads = [threading.Thread(target=run, args=(bulk,)) for bulk in bulks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(stepped) == aside


def test_bulk_runs_for_its_share_however_long_queries_do() -> None:
    """Pieces of 10 ms beside a query that never ends: the first time aside is as long as it gets, then it is earned."""
    preemption, ran_s, started = Preemption(1), 0.0, time.monotonic()
    with Turn(preemption, Lane.BULK) as bulk, Turn(preemption, Lane.QUERY):
        while (passed := time.monotonic() - started) < 2:
            ran_s += timed(lambda: time.sleep(0.01))
            bulk.step_aside()
    expected_s = (1 - ASIDE_SHARE) * (passed - MOST_ASIDE_S)
    assert ran_s == pytest.approx(expected_s, rel=0.2)
