"""What every engine has, in a process of its own or not: waiting room, forwards, outbox, their threads and their death.

Knows neither sockets nor processes: who adds requests, and who takes what is finished, is not its concern.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from embedserve import __version__, metrics
from embedserve.config import Config, available_cores
from embedserve.engine.batcher import Batcher, WaitingRoom
from embedserve.engine.buffers import BufferPool
from embedserve.engine.engine_loop import EngineLoop
from embedserve.engine.outbox import Outbox
from embedserve.engine.preemption import Preemption
from embedserve.messages import Lane
from embedserve.process import NamedThread, naming_threads
from embedserve_kernels.output_layout import OutputDtype, row_bytes

if TYPE_CHECKING:
    from embedserve.model.runner import Runner

log = logging.getLogger(__name__)

MAX_RING_BUFFER_BYTES = 64 * 1024 * 1024
STOP_WITHIN_S = 2.0
SPARE_BUFFERS = 2  # in the ring beyond those in flight: being sent while the next is written


class Pipeline:
    """`load`, then `start_forwards` once there is a runner.

    `changed` is called when the model is loaded and when a thread has ended, on the thread that it happened to.
    """

    outbox: Outbox  # there when `runner` is, as is
    tokens_per_ms: float  # of one forward, as its warm-up measured it

    def __init__(self, config: Config, changed: Callable[[], None]) -> None:
        self._config = config
        self._changed = changed
        self._threads: list[NamedThread] = []
        self.waiting_room = WaitingRoom(config.queued_tokens_limit, observe=_observe_queue)
        self.loops: list[EngineLoop] = []
        self.runner: Runner | None = None  # the model, when it is loaded
        self.ended: list[tuple[str, BaseException | None]] = []  # threads, and what ended them

    def load(self) -> None:
        """Returns at once. A thread that ends with StartError could not."""
        self.start("EngineLoop", self._load_and_run)

    def start_forwards(self) -> None:
        """All but the first, which loaded the model."""
        assert self.runner is not None
        for _ in range(1, self.runner.forwards):
            self.start("forward", self._make_engine_loop(self.runner, Lane.QUERY).run)
        for _ in range(self.runner.forwards):
            self.start("bulk", self._make_engine_loop(self.runner, Lane.BULK).run)

    def start(self, name: str, run: Callable[[], None]) -> None:
        thread = NamedThread(name, run, self._thread_ended)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Every forward ends after the batch that it is at."""
        self.waiting_room.close()
        if self.runner is not None:
            self.outbox.close()

    def join(self) -> None:
        """Wait for all threads, once each has been told to end; one that does not is left behind. The model goes."""
        deadline = time.monotonic() + STOP_WITHIN_S
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads.clear()
        self.loops.clear()
        self.runner = None

    def _load_and_run(self) -> None:
        """On EngineLoop, because loading runs parallel operations: libgomp keeps a pool for each thread that does."""
        with naming_threads("forward"):
            runner = self._load()
        rows = max(1, self._config.batch_tokens_limit // 2)  # an input has at least its special tokens
        buffer_bytes = min(rows * (row_bytes(runner.card.dims, OutputDtype.FLOAT32) + 1), MAX_RING_BUFFER_BYTES)
        self._buffers = BufferPool(
            len(Lane) * runner.forwards + SPARE_BUFFERS, buffer_bytes, outside=metrics.OUTPUT_BUFFERS_OUTSIDE_RING.inc
        )
        self.outbox = Outbox(limit=len(Lane) * runner.forwards)
        self._preemption = Preemption(runner.forwards)
        engine_loop = self._make_engine_loop(runner, Lane.QUERY)
        self.runner = runner
        self._changed()
        engine_loop.run()

    def _load(self) -> Runner:
        # torch: in no other process, and there first on this thread
        from embedserve.model.runner import load_runner, warm_up

        config = self._config
        started = time.monotonic()
        runner = load_runner(
            config.model,
            revision=config.revision,
            backend=config.backend,
            dtype=config.dtype,
            device=config.device,
            threads=config.threads or available_cores(),
            forwards=config.forwards,
            load_format=config.load_format,
        )
        if config.load_format == "dummy":
            log.warning("the weights are random (--load-format dummy): vectors mean nothing")
        self.tokens_per_ms = warm_up(runner)  # proves the model, and starts every worker of the thread pool
        card = runner.card
        log.info(
            "%s loaded in %.1f s: %s on %s, %d forwards side by side",
            card.name,
            time.monotonic() - started,
            card.dtype,
            card.device,
            runner.forwards,
        )
        labels = (__version__, card.name, card.dtype, card.device, card.space_id, card.numerics_id)
        metrics.BUILD_INFO.labels(*labels).set(1)
        return runner

    def _make_engine_loop(self, runner: Runner, lane: Lane) -> EngineLoop:
        loop = EngineLoop(
            runner,
            lane,
            buffers=self._buffers,
            waiting_room=self.waiting_room,
            outbox=self.outbox,
            preemption=self._preemption,
            max_batch_tokens=self._config.batch_tokens_limit,
            max_batch_ms=self._config.batch_ms_limit,
            tokens_per_ms=self.tokens_per_ms,
        )
        self.loops.append(loop)
        return loop

    def _thread_ended(self, name: str, error: BaseException | None) -> None:
        self.ended.append((name, error))
        self._changed()


def _observe_queue(batcher: Batcher) -> None:
    for lane, queued_tokens, oldest_enqueued in _queue_gauges:
        queued_tokens.set(batcher.waiting_tokens(lane))
        oldest = batcher.oldest_enqueued_at(lane)
        oldest_enqueued.set(0 if oldest is None else oldest + _MONOTONIC_TO_UNIX_S)


_queue_gauges = [
    (lane, metrics.QUEUED_TOKENS.labels(lane.name.lower()), metrics.OLDEST_ENQUEUED.labels(lane.name.lower()))
    for lane in Lane
]
_MONOTONIC_TO_UNIX_S = time.time() - time.monotonic()
