"""The engine process: builds the three loops, says READY; its main thread then waits for control and death.

`python -m embedserve.engine.core SPEC`, started by the supervisor. Knows nothing of HTTP or gRPC.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from embedserve import __version__, metrics
from embedserve.config import available_cores
from embedserve.engine.batcher import Batcher, WaitingRoom
from embedserve.engine.buffers import BufferPool
from embedserve.engine.credit import ReplyCredit
from embedserve.engine.engine_loop import EngineLoop
from embedserve.engine.ipc_loop import IpcLoop
from embedserve.engine.outbox import Outbox
from embedserve.engine.output_loop import OutputLoop
from embedserve.errors import StartError
from embedserve.logs import stop_logging
from embedserve.messages import Alive, EngineAddress, Failed, FrontendLost, Lane, Ready
from embedserve.process import (
    ChildSpec,
    ControlChannel,
    NamedThread,
    enter_child,
    naming_threads,
    settle_memory,
    wait_readable,
)
from embedserve_kernels.output_layout import OutputDtype, row_bytes

if TYPE_CHECKING:
    from embedserve.model.runner import Runner

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005  # the three loops hand the GIL over sooner than Python's 5 ms
MAX_RING_BUFFER_BYTES = 64 * 1024 * 1024
ALIVE_EVERY_S = 0.25
STOP_WITHIN_S = 2.0
SPARE_BUFFERS = 2  # in the ring beyond those in flight: being sent while the next is written


def main() -> None:
    spec, control = enter_child("engine")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    Engine(spec, control).run()


class Engine:
    def __init__(self, spec: ChildSpec, control: ControlChannel) -> None:
        self._spec = spec
        self._control = control
        config = spec.config
        self._max_batch_tokens = config.batch_tokens_limit
        self._waiting_room = WaitingRoom(config.queued_tokens_limit, observe=_observe_queue)
        self._credit = ReplyCredit()
        self._events_fd = os.eventfd(0, os.EFD_CLOEXEC)  # written when the model is loaded and when a thread ends
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)  # ends IpcLoop
        self._loops: list[IpcLoop | EngineLoop | OutputLoop] = []
        self._threads: list[NamedThread] = []
        self._ended: list[tuple[str, BaseException | None]] = []
        self._runner: Runner | None = None

    def run(self) -> None:
        self._start("EngineLoop", self._load_and_run)
        for source in wait_readable(self._control.socket, self._events_fd, every_s=ALIVE_EVERY_S):
            if source is self._control.socket:
                self._obey()
            elif source == self._events_fd:
                os.eventfd_read(self._events_fd)
                self._check_threads()
                self._serve()
            elif self._loops:
                self._control.send(Alive(self._longest_busy_s()))

    def _serve(self) -> None:
        """The model is loaded: open the sockets and say so. Called once."""
        assert self._runner is not None
        spec, card = self._spec, self._runner.card
        address = EngineAddress(
            incarnation=spec.number,
            requests=f"ipc://{spec.run_dir}/e{spec.number}.req",
            replies=f"ipc://{spec.run_dir}/e{spec.number}.rep",
            card=card,
            tokens_per_s=self._tokens_per_ms * 1000,
        )
        ipc_loop = IpcLoop(
            address.requests,
            incarnation=spec.number,
            vocab_size=card.vocab_size,
            waiting_room=self._waiting_room,
            outbox=self._outbox,
            credit=self._credit,
            stop_fd=self._stop_fd,
        )
        output_loop = OutputLoop(address.replies, incarnation=spec.number, outbox=self._outbox, credit=self._credit)
        self._start("IpcLoop", ipc_loop.run)
        self._start("OutputLoop", output_loop.run)
        self._loops += [ipc_loop, output_loop]
        for _ in range(1, self._runner.forwards):
            self._start("forward", self._make_engine_loop(self._runner, Lane.QUERY).run)
        for _ in range(self._runner.forwards):
            self._start("bulk", self._make_engine_loop(self._runner, Lane.BULK).run)
        settle_memory()
        self._control.send(Ready(address))

    def _load_and_run(self) -> None:
        """On EngineLoop, because loading runs parallel operations: libgomp keeps a pool for each thread that does."""
        with naming_threads("forward"):
            runner = self._load()
        rows = max(1, self._max_batch_tokens // 2)  # an input has at least its special tokens
        buffer_bytes = min(rows * (row_bytes(runner.card.dims, OutputDtype.FLOAT32) + 1), MAX_RING_BUFFER_BYTES)
        self._buffers = BufferPool(
            len(Lane) * runner.forwards + SPARE_BUFFERS, buffer_bytes, outside=metrics.OUTPUT_BUFFERS_OUTSIDE_RING.inc
        )
        self._outbox = Outbox(limit=len(Lane) * runner.forwards)
        engine_loop = self._make_engine_loop(runner, Lane.QUERY)
        self._runner = runner
        os.eventfd_write(self._events_fd, 1)
        engine_loop.run()

    def _load(self) -> Runner:
        from embedserve.model.runner import (
            load_runner,
            warm_up,
        )  # torch: only in this process, and first on this thread

        config = self._spec.config
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
        self._tokens_per_ms = warm_up(runner)  # proves the model, and starts every worker of the thread pool
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
            waiting_room=self._waiting_room,
            outbox=self._outbox,
            max_batch_tokens=self._max_batch_tokens,
            max_batch_ms=self._spec.config.batch_ms_limit,
            tokens_per_ms=self._tokens_per_ms,
        )
        self._loops.append(loop)
        return loop

    def _start(self, name: str, run: Callable[[], None]) -> None:
        thread = NamedThread(name, run, self._thread_ended)
        self._threads.append(thread)
        thread.start()

    def _thread_ended(self, name: str, error: BaseException | None) -> None:
        self._ended.append((name, error))
        os.eventfd_write(self._events_fd, 1)

    def _check_threads(self) -> None:
        """Any of them ending is the end of the process: its waiting callers are better told at once."""
        for name, error in self._ended:
            if isinstance(error, StartError):
                self._control.send(Failed(str(error)))
            else:
                log.critical("thread %s ended; so does the engine", name, exc_info=error)
            self._exit(1)

    def _obey(self) -> None:
        messages = self._control.receive()
        if messages is None:  # the supervisor is gone, or wants us to go
            self._stop()
        for message in messages or []:
            if isinstance(message, FrontendLost):
                metrics.CANCELLED.inc(self._waiting_room.cancel_frontend(message.frontend))

    def _longest_busy_s(self) -> float:
        """0 while every loop waits for work."""
        since = [loop.busy_since for loop in self._loops]
        return max((time.monotonic() - moment for moment in since if moment is not None), default=0.0)

    def _stop(self) -> NoReturn:
        """Every loop ends after what it is doing; one that does not is left behind."""
        self._waiting_room.close()
        if self._runner is not None:
            self._outbox.close()
        os.eventfd_write(self._stop_fd, 1)
        deadline = time.monotonic() + STOP_WITHIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._exit(0)

    def _exit(self, status: int) -> NoReturn:
        """Without waiting for threads that may sit in C code; the log is flushed."""
        stop_logging()
        os._exit(status)


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

if __name__ == "__main__":
    main()
