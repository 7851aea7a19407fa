"""EngineLoop on its thread with a runner that writes numbers: batch sizes, row ranges, leases, and how it ends.

Knows nothing of sockets or tensors. Where speed matters, the clock is the runner's.
"""

from __future__ import annotations

import select
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from embedserve.engine import engine_loop
from embedserve.engine.batcher import Request, WaitingRoom
from embedserve.engine.buffers import BufferPool
from embedserve.engine.engine_loop import SPEED_MIN_TOKENS, EngineLoop
from embedserve.engine.outbox import FinishedBatch, Outbox
from embedserve.engine.preemption import Preemption
from embedserve.messages import Lane
from embedserve_kernels.output_layout import NUMPY_DTYPES, OutputDtype, RowTable, row_bytes

DIMS = 4
TIMEOUT_S = 20  # of what should happen at once
MAX_BATCH_MS = 25.0


class DeviceLost(Exception):
    """What a runner raises when its device is gone."""


@dataclass
class FakeRunner:
    """Writes each row's first token id into all of its dimensions. Time passes only here, by `tokens_per_ms`."""

    tokens_per_ms: float = 100.0
    now: float = 1000.0
    forwards: int = 1
    launches: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # token ids and lengths of each
    entered_by: list[str] = field(default_factory=list)  # names of threads
    rows_begun: int = 0
    lost: bool = False
    in_the_midst: Callable[[], object] = lambda: None  # what happens during the first row of a forward

    def enter_thread(self) -> None:
        self.entered_by.append(threading.current_thread().name)

    def launch(
        self,
        token_ids: np.ndarray,
        lengths: np.ndarray,
        table: RowTable,
        out: np.ndarray,
        between: Callable[[], None],
    ) -> None:
        if self.lost:
            raise DeviceLost
        self.launches.append((token_ids.copy(), lengths.copy()))
        for row, first in enumerate(token_ids[np.cumsum(lengths) - lengths]):
            dtype = OutputDtype(table.dtype[row])
            nbytes = row_bytes(int(table.dims[row]), dtype)
            out[table.byte_offset[row] : table.byte_offset[row] + nbytes].view(NUMPY_DTYPES[dtype])[:] = first
            self.rows_begun += 1
            self.in_the_midst()
            between()
        out[table.status_offset] = 0
        self.now += len(token_ids) / self.tokens_per_ms / 1000

    @property
    def batch_tokens(self) -> list[int]:
        return [len(token_ids) for token_ids, _ in self.launches]


@dataclass
class Engine:
    """EngineLoops, one unless said otherwise, and what they stand between."""

    loops: list[EngineLoop]
    room: WaitingRoom
    outbox: Outbox
    runner: FakeRunner
    pool: BufferPool
    threads: list[threading.Thread] = field(default_factory=list)
    errors: list[DeviceLost] = field(default_factory=list)

    @property
    def loop(self) -> EngineLoop:
        return self.loops[0]

    def start(self) -> None:
        for loop in self.loops:
            self.threads.append(threading.Thread(target=self._run, args=[loop], name="an engine's thread"))
            self.threads[-1].start()

    def _run(self, loop: EngineLoop) -> None:
        try:
            loop.run()
        except DeviceLost as error:
            self.errors.append(error)

    def add(self, *requests: Request) -> None:
        assert self.room.add(requests) == []

    def next_batches(self) -> list[FinishedBatch]:
        assert select.select([self.outbox.wake_fd], [], [], TIMEOUT_S)[0]
        batches, refused = self.outbox.take()
        assert refused == []
        return list(batches)

    def next_batch(self) -> FinishedBatch:
        (finished,) = self.next_batches()
        return finished

    def join(self) -> None:
        for thread in self.threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(*, max_batch_tokens: int = 4096, buffers: int = 3, loops: int = 1) -> Engine:
        runner = FakeRunner(forwards=loops)
        monkeypatch.setattr(engine_loop, "time", SimpleNamespace(monotonic=lambda: runner.now))
        engine = Engine([], WaitingRoom(10**9), Outbox(limit=loops), runner, BufferPool(buffers, 1 << 16, poison=True))
        preemption = Preemption(loops)
        for _ in range(loops):
            engine.loops.append(
                EngineLoop(
                    runner,
                    Lane.BULK,
                    buffers=engine.pool,
                    waiting_room=engine.room,
                    outbox=engine.outbox,
                    preemption=preemption,
                    max_batch_tokens=max_batch_tokens,
                    max_batch_ms=MAX_BATCH_MS,
                )
            )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.room.close()
        engine.outbox.close()
        engine.join()


@pytest.fixture
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine()


def make_request(
    id: int,
    lengths: list[int],
    *,
    lane: Lane = Lane.BULK,
    frontend: str = "a",
    dtype: OutputDtype = OutputDtype.FLOAT32,
) -> Request:
    """Token ids count up from 10_000 * id."""
    token_ids = 10_000 * id + np.arange(sum(lengths), dtype=np.int32)
    return Request(frontend, id, lane, np.array(lengths, np.int32), token_ids, DIMS, dtype, True, 0.0)


def rows_of(finished: FinishedBatch) -> list[tuple[int, int, list[float]]]:
    """(request id, first row, value of each row) of each part, read from the buffer by the layout."""
    rows = []
    for part, offset in zip(finished.batch.parts, finished.layout.part_offset, strict=True):
        dtype = part.request.dtype
        nbytes = part.rows * row_bytes(part.request.dims, dtype)
        values = finished.buffer[offset : offset + nbytes].view(NUMPY_DTYPES[dtype]).reshape(part.rows, -1)
        assert (values == values[:, :1]).all()
        rows.append((part.request.id, part.first_row, values[:, 0].tolist()))
    return rows


# What it launches


def test_runner_is_entered_once_by_the_thread_that_launches(engine: Engine) -> None:
    engine.start()
    for id in range(3):
        engine.add(make_request(id, [1]))
        engine.next_batch()
    assert engine.runner.entered_by == ["an engine's thread"]


def test_batch_holds_its_requests_end_to_end_in_the_order_of_its_parts(engine: Engine) -> None:
    engine.add(
        make_request(2, [3, 1], frontend="b"),
        make_request(3, [2], frontend="a", dtype=OutputDtype.FLOAT16),
        make_request(1, [1, 2], frontend="b"),
    )
    engine.start()
    finished = engine.next_batch()
    ((token_ids, lengths),) = engine.runner.launches
    assert lengths.tolist() == [2, 1, 2, 3, 1]
    assert token_ids.tolist() == [30_000, 30_001, 10_000, 10_001, 10_002, 20_000, 20_001, 20_002, 20_003]
    assert rows_of(finished) == [(3, 0, [30_000]), (1, 0, [10_000, 10_001]), (2, 0, [20_000, 20_003])]


def test_runner_writes_into_the_buffer_that_goes_to_the_outbox(engine: Engine) -> None:
    engine.add(make_request(1, [1, 1]))
    engine.start()
    finished = engine.next_batch()
    assert len(finished.buffer) == finished.layout.total_bytes
    assert engine.pool.free == 2  # one lease: what was written is what is sent
    assert finished.buffer[finished.layout.status_offset :].tolist() == [0, 0]


def test_large_request_is_taken_in_row_ranges_over_several_batches(engine: Engine) -> None:
    engine.runner.tokens_per_ms = 1000.0
    engine.add(make_request(1, [1000] * 10))
    engine.start()
    assert [rows_of(engine.next_batch()) for _ in range(3)] == [
        [(1, 0, [10_000, 11_000, 12_000, 13_000])],
        [(1, 4, [14_000, 15_000, 16_000, 17_000])],
        [(1, 8, [18_000, 19_000])],
    ]
    assert engine.runner.batch_tokens == [4000, 4000, 2000]


def test_input_larger_than_the_budget_is_launched_alone(engine: Engine) -> None:
    engine.add(make_request(1, [6000, 1]))
    engine.start()
    assert [rows_of(engine.next_batch()) for _ in range(2)] == [[(1, 0, [10_000])], [(1, 1, [16_000])]]


def test_loops_side_by_side_launch_every_row_once(make_engine: MakeEngine) -> None:
    engine = make_engine(loops=3, max_batch_tokens=300)
    engine.start()
    engine.add(*(make_request(id, [50] * 20) for id in range(1, 11)))
    rows: Counter[tuple[int, float]] = Counter()
    while rows.total() < 200:
        for finished in engine.next_batches():
            rows.update((id, value) for id, _, values in rows_of(finished) for value in values)
    assert rows == Counter((id, 10_000 * id + 50 * row) for id in range(1, 11) for row in range(20))
    assert len(engine.runner.entered_by) == 3


# The budget


def launch_ones(engine: Engine, batches: int) -> list[int]:
    """Tokens of the next so many batches; inputs of one token wait, more than any budget takes."""
    before = len(engine.runner.launches)
    engine.add(make_request(1000 + before, [1] * 4096 * (batches + 2)))
    if not engine.threads:
        engine.start()
    for _ in range(batches):
        engine.next_batch()
    return engine.runner.batch_tokens[before : before + batches]


def test_first_batch_is_as_large_as_allowed(engine: Engine) -> None:
    assert engine.loop.budget() == 4096
    assert launch_ones(engine, 1) == [4096]


def test_budget_is_what_the_device_does_in_max_batch_ms(engine: Engine) -> None:
    assert launch_ones(engine, 4) == pytest.approx([4096, 2500, 2500, 2500], abs=1)


def test_budget_of_a_fast_device_stays_within_max_batch_tokens(engine: Engine) -> None:
    engine.runner.tokens_per_ms = 10_000
    assert launch_ones(engine, 3) == [4096, 4096, 4096]


def test_budget_of_a_slow_device_stays_worth_a_launch(engine: Engine) -> None:
    engine.runner.tokens_per_ms = 1
    assert launch_ones(engine, 3) == [4096, SPEED_MIN_TOKENS, SPEED_MIN_TOKENS]


@pytest.mark.parametrize("tokens_per_ms", [0.1, 10_000])
def test_budget_never_exceeds_max_batch_tokens_even_if_that_is_small(
    make_engine: MakeEngine, tokens_per_ms: float
) -> None:
    engine = make_engine(max_batch_tokens=100)
    engine.runner.tokens_per_ms = tokens_per_ms
    engine.add(make_request(1, [300]))  # goes alone, and is long enough to be measured
    assert launch_ones(engine, 3) == [300, 100, 100]


def test_budget_follows_the_device_by_and_by_as_it_slows_down(engine: Engine) -> None:
    launch_ones(engine, 3)
    engine.runner.tokens_per_ms = 50
    tokens = launch_ones(engine, 60)
    assert tokens == sorted(tokens, reverse=True)
    assert len(set(tokens)) > 20
    assert tokens[-1] == pytest.approx(1250, rel=0.02)


def test_small_batches_do_not_count_as_the_devices_speed(engine: Engine) -> None:
    engine.start()
    engine.runner.tokens_per_ms = 0.01
    for id in range(5):
        engine.add(make_request(id, [1] * (SPEED_MIN_TOKENS - 1)))
        engine.next_batch()
    assert engine.loop.budget() == 4096


# Leases and what is in flight


def test_lease_returns_while_the_loop_waits_for_its_next_batch(make_engine: MakeEngine) -> None:
    engine = make_engine(buffers=1)
    engine.start()
    for id in range(1, 6):
        engine.add(make_request(id, [2]))
        finished = engine.next_batch()
        assert rows_of(finished) == [(id, 0, [10_000 * id])]
        del finished
        wait_until(lambda: engine.pool.free == 1)


def wait_until(condition: Callable[[], bool]) -> None:
    """For the loop to leave `put`, which wakes nobody."""
    pause = threading.Event()
    for _ in range(TIMEOUT_S * 1000):
        if condition():
            return
        pause.wait(0.001)
    pytest.fail("a lease was kept")


def test_loop_runs_ahead_of_the_outbox_by_one_batch_and_no_more(engine: Engine) -> None:
    engine.add(make_request(1, [4096] * 20))
    engine.start()
    for taken in range(20):
        assert len(engine.runner.launches) <= taken + 2  # one waits in the outbox, one to get in
        engine.next_batch()


# What nobody waits for any more


def test_forward_that_nobody_waits_for_ends_in_its_midst(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=5, buffers=1)
    engine.runner.in_the_midst = lambda: engine.room.cancel("a", [1])
    engine.add(make_request(1, [2, 3]), make_request(2, [5]))
    engine.start()
    assert rows_of(engine.next_batch()) == [(2, 0, [20_000])]
    assert engine.runner.batch_tokens == [5, 5]
    assert engine.runner.rows_begun == 2  # one of each
    wait_until(lambda: engine.pool.free == 1)


def test_forward_that_somebody_waits_for_goes_on(engine: Engine) -> None:
    engine.runner.in_the_midst = lambda: engine.room.cancel("a", [1])
    engine.add(make_request(1, [2]), make_request(2, [5]))
    engine.start()
    assert (2, 0, [20_000]) in rows_of(engine.next_batch())


# How it ends


def test_closing_the_room_ends_a_loop_that_waits(engine: Engine) -> None:
    engine.start()
    engine.add(make_request(1, [1]))
    engine.next_batch()
    engine.room.close()
    engine.join()
    assert engine.errors == []


def test_closing_ends_a_loop_though_work_waits(engine: Engine) -> None:
    engine.add(make_request(1, [4096] * 20))
    engine.start()
    engine.next_batch()
    engine.room.close()
    engine.outbox.close()  # the loop may wait to get in
    engine.join()
    assert len(engine.runner.launches) <= 3


def test_closing_ends_every_loop(make_engine: MakeEngine) -> None:
    engine = make_engine(loops=4)
    engine.start()
    engine.room.close()
    engine.join()


def test_error_of_the_runner_ends_the_loop(engine: Engine) -> None:
    engine.runner.lost = True
    engine.add(make_request(1, [1]))
    engine.start()
    engine.join()
    assert [type(error) for error in engine.errors] == [DeviceLost]
