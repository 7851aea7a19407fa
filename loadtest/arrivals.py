"""When the requests of an open loop are due, and the alarm that wakes a coroutine at such a time.
Knows nothing of what is sent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from types import TracebackType


def poisson_arrivals(
    rate: float, start_s: float, end_s: float, max_count: int, rng: np.random.Generator
) -> list[float]:
    """Times in [start_s, end_s) of a Poisson process of `rate` a second; the first `max_count` of them."""
    expected = rate * (end_s - start_s)
    enough = min(max_count, int(expected + 10 * expected**0.5) + 10)  # ten standard deviations more than expected
    times = start_s + np.cumsum(rng.exponential(1 / rate, size=enough))
    return times[times < end_s].tolist()  # type: ignore[no-any-return]


class Alarm:
    """A Linux timer file: it wakes a coroutine within tens of microseconds of a time.monotonic().

    The timers of asyncio and of uvloop count whole milliseconds, which is as long as the latency being measured.
    """

    def __init__(self) -> None:
        self._fd = _checked(_libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        self._loop = asyncio.get_running_loop()
        self._ring: asyncio.Future[None] | None = None
        self._loop.add_reader(self._fd, self._on_ring)

    def __enter__(self) -> Alarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    async def wait_until(self, when_s: float) -> None:
        """Returns at `when_s`, or, when that has passed, after whatever else is ready in this loop has run."""
        self._ring = self._loop.create_future()
        seconds = int(when_s)
        setting = _TimerSetting(_Timespec(0, 0), _Timespec(seconds, max(1, int((when_s - seconds) * 1e9))))
        _checked(_libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(setting), None))
        await self._ring

    def _on_ring(self) -> None:
        os.read(self._fd, 8)
        if self._ring is not None and not self._ring.done():
            self._ring.set_result(None)


# os.timerfd_create came with Python 3.13; these are the same two calls.
_libc = ctypes.CDLL(None, use_errno=True)
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _TimerSetting(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
