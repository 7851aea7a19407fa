"""Queries before bulk on the same cores: a bulk forward steps aside between its pieces while queries need them.

Knows lanes and time; neither batches nor what a forward is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from embedserve.messages import Lane

# However busy queries keep the cores, bulk gets a fifth of them over any second: it stands aside for no more than this
# share of the time, and for the rest its niceness (engine_loop.py) gives it a third of what both lanes want.
ASIDE_SHARE = 0.4
WINDOW_S = 1.0


class Preemption:
    """Shared by the loops of an engine whose cores run `forwards` at a time: how many run, by lane."""

    def __init__(self, forwards: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._forwards = forwards
        self._changed = threading.Condition()
        self._running = dict.fromkeys(Lane, 0)
        self.clock = clock

    def count(self, lane: Lane, change: int) -> None:
        with self._changed:
            self._running[lane] += change
            self._changed.notify_all()

    def crowded(self) -> bool:
        return sum(self._running.values()) > self._forwards

    def leave_until_there_is_room(self, lane: Lane, within_s: float) -> None:
        """One that runs does not, until there is room for it, or its time aside is over."""
        with self._changed:
            self._running[lane] -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: sum(self._running.values()) < self._forwards, within_s)
            self._running[lane] += 1


class Turn:
    """One loop's. A context manager around each forward; `step_aside` is for between its pieces, on its thread."""

    def __init__(self, preemption: Preemption, lane: Lane) -> None:
        self._preemption = preemption
        self._lane = lane
        self._may_be_aside_s = ASIDE_SHARE * WINDOW_S
        self._since = preemption.clock()

    def __enter__(self) -> Turn:
        self._preemption.count(self._lane, 1)
        self.step_aside()
        return self

    def __exit__(self, *_: object) -> None:
        self._preemption.count(self._lane, -1)

    def step_aside(self) -> None:
        """Returns at once for a query, and while there is a core for everyone."""
        if self._lane is Lane.QUERY:
            return
        now = self._preemption.clock()
        earned_s = (now - self._since) * ASIDE_SHARE / (1 - ASIDE_SHARE)
        self._may_be_aside_s = min(self._may_be_aside_s + earned_s, ASIDE_SHARE * WINDOW_S)
        self._since = now
        if self._preemption.crowded():
            self._preemption.leave_until_there_is_room(self._lane, self._may_be_aside_s)
            self._since = self._preemption.clock()
            self._may_be_aside_s -= self._since - now
