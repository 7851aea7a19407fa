"""EngineLoop: takes a batch of its lane from the waiting room, runs its forward pass, hands it to the outbox.

It touches no socket and no per-request protocol object. On a CPU several of them run side by side, some for queries
and as many for bulk. A query that comes is launched at once, in the midst of a bulk forward of whatever length: that
one steps aside when it has done the piece that it is at (preemption.py), and until then has a lower priority.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from embedserve import metrics
from embedserve.engine.batcher import Batch, WaitingRoom
from embedserve.engine.buffers import BufferPool
from embedserve.engine.outbox import FinishedBatch, Outbox
from embedserve.engine.preemption import Preemption, Turn
from embedserve.messages import Lane
from embedserve_kernels.output_layout import lay_out

if TYPE_CHECKING:
    from embedserve.model.runner import Runner

# Linux weighs a thread of this niceness 526 to 1024 against one of niceness 0: a third of a core that both want.
BULK_NICENESS = 3
SPEED_SMOOTHING = 0.1  # weight of the newest batch in the measured speed
SPEED_MIN_TOKENS = 256  # smaller batches say little of the device's speed


class _Cancelled(Exception):
    pass


class EngineLoop:
    """One forward at a time, of one lane. Runner, pool, waiting room and outbox are shared with the other loops."""

    def __init__(
        self,
        runner: Runner,
        lane: Lane,
        *,
        buffers: BufferPool,
        waiting_room: WaitingRoom,
        outbox: Outbox,
        preemption: Preemption,
        max_batch_tokens: int,
        max_batch_ms: float,
        tokens_per_ms: float | None = None,
    ) -> None:
        """tokens_per_ms: the device's speed, where it is known already."""
        self._runner = runner
        self._lane = lane
        self._buffers = buffers
        self._waiting_room = waiting_room
        self._outbox = outbox
        self._turn = Turn(preemption, lane)
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_ms = max_batch_ms
        self._tokens_per_ms = tokens_per_ms
        self.entered = threading.Event()  # its thread is set up
        self.busy_since: float | None = None  # CLOCK_MONOTONIC, seconds; read by whoever watches for a stuck loop

    def run(self) -> None:
        if self._lane is Lane.BULK:  # before the thread's own workers start, which inherit it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BULK_NICENESS)
        self._runner.enter_thread()
        self.entered.set()
        self._busy = metrics.THREAD_BUSY.labels(threading.current_thread().name)
        self._idle_since = time.monotonic()
        while self._step():
            pass

    def budget(self) -> int:
        """Tokens of the next batch: what the device does in --max-batch-ms, --max-batch-tokens at most."""
        if self._tokens_per_ms is None:
            return self._max_batch_tokens
        return min(self._max_batch_tokens, max(SPEED_MIN_TOKENS, int(self._tokens_per_ms * self._max_batch_ms)))

    def run_forward(self, batch: Batch) -> FinishedBatch:
        """Raises _Cancelled between two pieces, once nobody waits for any of it."""
        launched_at = time.monotonic()
        parts = batch.parts
        layout = lay_out(
            [part.rows for part in parts],
            [part.request.dims for part in parts],
            [part.request.dtype for part in parts],
            [part.request.normalize for part in parts],
        )
        buffer = self._buffers.lease(layout.total_bytes)
        self._runner.launch(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            layout.table,
            buffer,
            partial(self._between_pieces, batch),
        )
        return FinishedBatch(batch, layout, buffer, launched_at, time.monotonic())

    def _step(self) -> bool:
        """One batch, in a call of its own: no name may keep a buffer's lease while the next batch is waited for."""
        # blocks until work waits; None when closed
        batch = self._waiting_room.take(self._lane, self.budget(), self._runner.forwards)
        if batch is None:
            return False
        self.busy_since = time.monotonic()
        finished = None
        with suppress(_Cancelled), self._turn:
            finished = self.run_forward(batch)
        if finished is not None:
            self._measure(finished)
            self._outbox.put(finished)  # blocks while OutputLoop has not taken those before
        self.busy_since = None
        return True

    def _between_pieces(self, batch: Batch) -> None:
        self.busy_since = time.monotonic()  # a forward of minutes is not stuck
        if batch.cancelled:
            raise _Cancelled
        self._turn.step_aside()

    def _measure(self, finished: FinishedBatch) -> None:
        now = finished.ended_at
        waiting_since = min(part.request.enqueued_at for part in finished.batch.parts)
        starved_s = max(0.0, finished.launched_at - max(self._idle_since, waiting_since))
        metrics.ENGINE_STARVED.inc(starved_s / self._runner.forwards)
        self._busy.inc(now - finished.launched_at)
        metrics.BATCH_TOKENS.observe(finished.batch.tokens)
        metrics.BATCH_INPUTS.observe(len(finished.layout.table))
        self._idle_since = now
        if finished.batch.tokens >= SPEED_MIN_TOKENS:
            speed = finished.batch.tokens / ((now - finished.launched_at) * 1000)
            past = self._tokens_per_ms
            self._tokens_per_ms = speed if past is None else past + SPEED_SMOOTHING * (speed - past)
