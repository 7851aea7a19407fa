"""Leases of output buffers: what keeps one alive, what ends it, and what a late reader of an ended one sees.

Knows nothing of sockets; a zmq.Frame stands here only for something in C that holds a buffer.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from embedserve.engine.buffers import POISON, BufferPool


class Counted:
    """A pool and how often it allocated outside its ring."""

    def __init__(self, count: int, buffer_bytes: int, *, poison: bool = False) -> None:
        self.outside = 0
        self.pool = BufferPool(count, buffer_bytes, poison=poison, outside=self._count)

    def _count(self) -> None:
        self.outside += 1


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def bytes_at(address: int, count: int) -> bytes:
    """Memory of the ring, read without a lease. The ring keeps it allocated."""
    return ctypes.string_at(address, count)


@pytest.mark.parametrize("nbytes", [1, 99, 100, 101, 1000])
def test_lease_has_the_bytes_asked_for_and_can_be_written(nbytes: int) -> None:
    buffer = BufferPool(1, 100).lease(nbytes)
    assert (buffer.dtype, buffer.shape) == (np.uint8, (nbytes,))
    buffer[:] = 7
    assert buffer.tobytes() == b"\x07" * nbytes


def test_lease_leaves_the_ring_and_returns_when_its_array_is_gone() -> None:
    pool = BufferPool(2, 100)
    buffer = pool.lease(50)
    assert pool.free == 1
    del buffer
    assert pool.free == 2


def test_returned_buffer_is_leased_again() -> None:
    pool = BufferPool(1, 100)
    addresses = {address_of(pool.lease(100)) for _ in range(5)}
    assert len(addresses) == 1


@pytest.mark.parametrize(
    "hold",
    [
        lambda buffer: buffer[10:20],
        lambda buffer: buffer[10:90][5:][::2],
        lambda buffer: buffer[:64].view("<f4").reshape(4, 4)[1:],
        lambda buffer: memoryview(buffer)[10:20],
        lambda buffer: memoryview(buffer[10:20]).cast("B"),
        lambda buffer: np.frombuffer(memoryview(buffer), np.uint8),
        lambda buffer: zmq.Frame(buffer[10:20], copy=False),
    ],
    ids=["slice", "slice of a slice", "typed view", "memoryview", "memoryview of a slice", "frombuffer", "frame"],
)
def test_any_view_keeps_the_lease(hold: Callable[[np.ndarray], Any]) -> None:
    pool = BufferPool(1, 100)
    view = hold(pool.lease(100))
    assert pool.free == 0
    assert address_of(pool.lease(100)) != address_of(np.asarray(memoryview(view)))
    del view
    wait_for_free(pool, 1)


def wait_for_free(pool: BufferPool, count: int) -> None:
    """A frame's memory is released in a thread of pyzmq's own."""
    pause = threading.Event()
    for _ in range(5000):
        if pool.free == count:
            return
        pause.wait(0.001)
    pytest.fail(f"{pool.free} of {count} buffers came back")


@pytest.mark.parametrize("copy", [np.copy, bytes], ids=["array", "bytes"])
def test_copy_does_not_keep_the_lease(copy: Callable[[np.ndarray], object]) -> None:
    pool = BufferPool(1, 100)
    copied = copy(pool.lease(100))
    assert pool.free == 1
    del copied


def test_lease_from_an_empty_ring_is_allocated_outside_and_counted() -> None:
    counted = Counted(2, 100)
    leases = [counted.pool.lease(100) for _ in range(5)]
    assert (counted.pool.free, counted.outside) == (0, 3)
    assert len({address_of(lease) for lease in leases}) == 5
    leases.clear()
    assert counted.pool.free == 2  # those from outside do not enlarge the ring


def test_lease_larger_than_a_buffer_is_allocated_outside_and_leaves_the_ring_alone() -> None:
    counted = Counted(2, 100)
    large = counted.pool.lease(101)
    assert (len(large), counted.pool.free, counted.outside) == (101, 2, 1)
    del large
    assert counted.pool.free == 2


def test_lease_of_exactly_a_buffer_is_of_the_ring() -> None:
    counted = Counted(1, 100)
    lease = counted.pool.lease(100)
    assert (counted.pool.free, counted.outside) == (0, 0)
    del lease


def test_pool_without_a_ring_allocates_every_lease_outside() -> None:
    counted = Counted(0, 100)
    for _ in range(3):
        counted.pool.lease(10)
    assert (counted.pool.free, counted.outside) == (0, 3)


def test_poison_overwrites_the_whole_buffer_when_it_returns() -> None:
    pool = BufferPool(1, 100, poison=True)
    buffer = pool.lease(60)
    buffer[:] = 1
    address = address_of(buffer)
    assert bytes_at(address, 60) == b"\x01" * 60
    del buffer
    assert bytes_at(address, 100) == bytes([POISON]) * 100


def test_poison_waits_for_the_last_view() -> None:
    pool = BufferPool(1, 100, poison=True)
    buffer = pool.lease(100)
    buffer[:] = 1
    view = buffer[40:60]
    del buffer
    assert view.tobytes() == b"\x01" * 20
    address = address_of(view)
    del view
    assert bytes_at(address, 20) == bytes([POISON]) * 20


def test_poisoned_floats_are_nan() -> None:
    pool = BufferPool(1, 64, poison=True)
    pool.lease(64)
    assert np.isnan(pool.lease(64).view("<f4")).all()
    assert np.isnan(pool.lease(64).view("<f2")).all()


def test_returned_buffer_is_left_as_it_is_without_poison() -> None:
    pool = BufferPool(1, 100)
    buffer = pool.lease(100)
    buffer[:] = 1
    del buffer
    assert pool.lease(100).tobytes() == b"\x01" * 100


@given(steps=st.lists(st.one_of(st.integers(1, 120), st.just(None)), max_size=60), count=st.integers(0, 4))
def test_two_leases_never_share_a_byte(steps: list[int | None], count: int) -> None:
    """A number leases so many bytes; None ends the oldest lease."""
    counted = Counted(count, 100, poison=True)
    leases: deque[np.ndarray] = deque()
    plan: deque[tuple[int, bool]] = deque()  # of each lease: the byte it is full of, and whether it is of the ring
    outside = 0
    for mark, step in enumerate(steps):
        if step is not None:
            from_ring = step <= 100 and sum(of_ring for _, of_ring in plan) < count
            outside += not from_ring
            plan.append((mark, from_ring))
            leases.append(counted.pool.lease(step))
            leases[-1][:] = mark
        elif leases:
            plan.popleft()
            leases.popleft()
        assert (counted.pool.free, counted.outside) == (count - sum(of_ring for _, of_ring in plan), outside)
        assert [set(leases[index].tolist()) for index in range(len(leases))] == [{mark} for mark, _ in plan]


def test_leases_taken_and_ended_in_many_threads_all_come_back() -> None:
    counted = Counted(3, 256, poison=True)

    def lease_and_check(mark: int) -> None:
        for _ in range(300):
            buffer = counted.pool.lease(256)
            buffer[:] = mark
            assert buffer.min() == buffer.max() == mark

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lease_and_check, range(6)))
    assert counted.pool.free == 3


def test_lease_ended_in_another_thread_comes_back() -> None:
    pool = BufferPool(1, 100)
    held = [pool.lease(100)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.free == 1
