"""The outbox: finished batches and refusals on their way to OutputLoop, bounded by the forwards that fill it.

Knows neither tensors nor sockets; its wake-up is a file descriptor, for OutputLoop waits on its socket too.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np

from embedserve.engine.batcher import Batch, Request
from embedserve_kernels.output_layout import OutputLayout


@dataclass(slots=True)
class FinishedBatch:
    batch: Batch
    layout: OutputLayout
    buffer: np.ndarray  # uint8 [layout.total_bytes], on lease
    launched_at: float  # CLOCK_MONOTONIC, seconds
    ended_at: float


@dataclass(slots=True)
class Refused:
    """A request that will not run. Overloaded: it may be sent again later."""

    request: Request
    message: str
    overloaded: bool


class Outbox:
    """`put` blocks while `limit` batches wait (EngineLoop calls it); `post` never does (IpcLoop calls it)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._batches: deque[FinishedBatch] = deque()
        self._refused: list[Refused] = []
        self._taken = threading.Condition()
        self._closed = False
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.wake_fd).atexit = False  # when no thread is left that may write to it

    def put(self, finished: FinishedBatch) -> None:
        with self._taken:
            self._taken.wait_for(lambda: len(self._batches) < self._limit or self._closed)
            self._batches.append(finished)
        os.eventfd_write(self.wake_fd, 1)

    def post(self, refused: list[Refused]) -> None:
        with self._taken:
            self._refused += refused
        os.eventfd_write(self.wake_fd, 1)

    def take(self) -> tuple[deque[FinishedBatch], list[Refused]]:
        """Everything that waits; never blocks. Clears the wake-up first, so that nothing put meanwhile is missed."""
        try:
            os.eventfd_read(self.wake_fd)
        except BlockingIOError:
            return deque(), []
        with self._taken:
            batches, self._batches = self._batches, deque()
            refused, self._refused = self._refused, []
            self._taken.notify_all()
        return batches, refused

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._taken:
            self._closed = True
            self._taken.notify_all()
        os.eventfd_write(self.wake_fd, 1)
