"""The engine process: a pipeline between two sockets; says READY; its main thread then waits for control and death.

`python -m embedserve.engine.core SPEC`, started by the supervisor. Knows nothing of HTTP or gRPC.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import NoReturn

from embedserve import metrics
from embedserve.engine.credit import ReplyCredit
from embedserve.engine.ipc_loop import IpcLoop
from embedserve.engine.output_loop import OutputLoop
from embedserve.engine.pipeline import Pipeline
from embedserve.errors import StartError
from embedserve.logs import stop_logging
from embedserve.messages import Alive, EngineAddress, Failed, FrontendLost, Ready
from embedserve.process import ChildSpec, ControlChannel, enter_child, settle_memory, wait_readable

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005  # the loops hand the GIL over sooner than Python's 5 ms
ALIVE_EVERY_S = 0.25


def main() -> None:
    spec, control = enter_child("engine")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    EngineProcess(spec, control).run()


class EngineProcess:
    def __init__(self, spec: ChildSpec, control: ControlChannel) -> None:
        self._spec = spec
        self._control = control
        self._events_fd = os.eventfd(0, os.EFD_CLOEXEC)  # written when the model is loaded and when a thread ends
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)  # ends IpcLoop
        self._pipeline = Pipeline(spec.config, lambda: os.eventfd_write(self._events_fd, 1))
        self._loops: list[IpcLoop | OutputLoop] = []

    def run(self) -> None:
        self._pipeline.load()
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
        pipeline = self._pipeline
        assert pipeline.runner is not None
        spec, card = self._spec, pipeline.runner.card
        address = EngineAddress(
            incarnation=spec.number,
            requests=f"ipc://{spec.run_dir}/e{spec.number}.req",
            replies=f"ipc://{spec.run_dir}/e{spec.number}.rep",
            card=card,
            tokens_per_s=pipeline.tokens_per_ms * 1000,
        )
        credit = ReplyCredit()
        ipc_loop = IpcLoop(
            address.requests,
            incarnation=spec.number,
            vocab_size=card.vocab_size,
            waiting_room=pipeline.waiting_room,
            outbox=pipeline.outbox,
            credit=credit,
            stop_fd=self._stop_fd,
        )
        output_loop = OutputLoop(address.replies, incarnation=spec.number, outbox=pipeline.outbox, credit=credit)
        pipeline.start("IpcLoop", ipc_loop.run)
        pipeline.start("OutputLoop", output_loop.run)
        self._loops = [ipc_loop, output_loop]
        pipeline.start_forwards()
        settle_memory()
        self._control.send(Ready(address))

    def _check_threads(self) -> None:
        """Any of them ending is the end of the process: its waiting callers are better told at once."""
        for name, error in self._pipeline.ended:
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
                metrics.CANCELLED.inc(self._pipeline.waiting_room.cancel_frontend(message.frontend))

    def _longest_busy_s(self) -> float:
        """0 while every loop waits for work."""
        since = [loop.busy_since for loop in (*self._pipeline.loops, *self._loops)]
        return max((time.monotonic() - moment for moment in since if moment is not None), default=0.0)

    def _stop(self) -> NoReturn:
        """Every loop ends after what it is doing; one that does not is left behind."""
        self._pipeline.close()
        os.eventfd_write(self._stop_fd, 1)
        self._pipeline.join()
        self._exit(0)

    def _exit(self, status: int) -> NoReturn:
        """Without waiting for threads that may sit in C code; the log is flushed."""
        stop_logging()
        os._exit(status)


if __name__ == "__main__":
    main()
