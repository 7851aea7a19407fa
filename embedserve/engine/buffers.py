"""Output buffers on lease: a ring of reused memory that comes back by itself when nothing refers to it any more.

Knows nothing of what is in a buffer or of who reads it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

POISON = 0xFF  # four of them are a float32 NaN


class BufferPool:
    """`lease` never waits: when the ring is empty, or the buffer asked for is larger, it allocates outside it.

    A buffer handed to ZeroMQ is released in pyzmq's own thread, so the ring is a deque (whose ends are atomic).
    `poison` overwrites what comes back, so that a reader of a returned buffer reads NaN.
    """

    def __init__(
        self, count: int, buffer_bytes: int, *, poison: bool = False, outside: Callable[[], None] = lambda: None
    ) -> None:
        self._buffer_bytes = buffer_bytes
        self._free: deque[bytearray] = deque(bytearray(buffer_bytes) for _ in range(count))
        self._poison = poison
        self._outside = outside

    @property
    def free(self) -> int:
        """Buffers in the ring right now."""
        return len(self._free)

    def lease(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes]; the lease ends when this array and every view of it are gone."""
        try:
            storage = self._free.popleft() if nbytes <= self._buffer_bytes else None
        except IndexError:
            storage = None
        if storage is None:
            self._outside()
            return np.empty(nbytes, np.uint8)
        # Views of an array over foreign memory keep that array alive, so its end is the lease's end.
        buffer = np.frombuffer(storage, np.uint8, nbytes)
        weakref.finalize(buffer, self._give_back, storage).atexit = False
        return buffer

    def _give_back(self, storage: bytearray) -> None:
        if self._poison:
            storage[:] = bytes([POISON]) * len(storage)
        self._free.append(storage)
