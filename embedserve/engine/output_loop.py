"""OutputLoop: sends each frontend its part of a finished batch as one zero-copy frame.

Owns the reply socket; numpy only. Knows nothing of the model.
"""

from __future__ import annotations

import logging
import time
from itertools import groupby

import numpy as np
import zmq
from zmq.utils import garbage

from embedserve import metrics
from embedserve.engine.credit import ReplyCredit
from embedserve.engine.outbox import FinishedBatch, Outbox, Refused
from embedserve.messages import Refusal, ReplyHeader, ReplyPart, encode_reply
from embedserve.process import naming_threads

log = logging.getLogger(__name__)


class OutputLoop:
    """Ends when the outbox is closed."""

    def __init__(self, address: str, *, incarnation: int, outbox: Outbox, credit: ReplyCredit) -> None:
        self._address = address
        self._incarnation = incarnation
        self._outbox = outbox
        self._credit = credit
        self.busy_since: float | None = None  # CLOCK_MONOTONIC, seconds; read by whoever watches for a stuck loop

    def run(self) -> None:
        if not garbage.gc.is_alive():
            with naming_threads("zmq-release"):
                garbage.gc.start()  # pyzmq's thread that lets go of frames once sent; else it would be named as we are
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        with self._socket:
            self._socket.setsockopt(zmq.SNDHWM, 0)  # it counts messages; the bound is credit in bytes
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # without it, replies to a lost frontend vanish unseen
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(self._address)
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._outbox.wake_fd, zmq.POLLIN)
            busy = metrics.THREAD_BUSY.labels("OutputLoop")
            while not self._outbox.closed:
                poller.poll()  # the only place that blocks
                self.busy_since = woken = time.monotonic()
                self._welcome_frontends()
                batches, refused = self._outbox.take()
                while batches:
                    self._send_batch(batches.popleft())  # and forget it: its buffer's lease ends when it is sent
                self._send_refusals(refused)
                self.busy_since = None
                busy.inc(time.monotonic() - woken)

    def _welcome_frontends(self) -> None:
        """A frontend greets on its reply socket and sends no work before it is answered: it is routable by then."""
        while True:
            try:
                frontend, *_ = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._send(frontend.decode("ascii", "replace"))

    def _send_batch(self, finished: FinishedBatch) -> None:
        taken_at = time.monotonic()
        bad_rows = nonfinite_rows(finished)
        parts = enumerate(finished.batch.parts)
        for frontend, numbered in groupby(parts, key=lambda pair: pair[1].request.frontend):
            indexes = [index for index, _ in numbered]
            start = finished.layout.part_offset[indexes[0]]
            payload = finished.buffer[start : finished.layout.part_end[indexes[-1]]]
            if not self._credit.allows(frontend, payload.nbytes):
                requests = [finished.batch.parts[index].request for index in indexes]
                message = "the frontend reads its replies too slowly; send again later"
                self._send_refusals([Refused(request, message, overloaded=True) for request in requests])
                continue
            reply_parts = [reply_part(finished, index, start, bad_rows.get(index, [])) for index in indexes]
            self._send(
                frontend,
                payload,
                forward_ms=(finished.ended_at - finished.launched_at) * 1000,
                pack_ms=(time.monotonic() - taken_at) * 1000,
                parts=reply_parts,
            )

    def _send_refusals(self, refused: list[Refused]) -> None:
        refused = sorted(refused, key=lambda item: item.request.frontend)
        for frontend, items in groupby(refused, key=lambda item: item.request.frontend):
            refusals = [Refusal(item.request.id, item.message, item.overloaded) for item in items]
            self._send(frontend, refusals=refusals)

    def _send(
        self,
        frontend: str,
        payload: np.ndarray | None = None,
        *,
        forward_ms: float = 0.0,
        pack_ms: float = 0.0,
        parts: list[ReplyPart] | None = None,
        refusals: list[Refusal] | None = None,
    ) -> None:
        header = ReplyHeader(self._incarnation, time.monotonic(), forward_ms, pack_ms, parts or [], refusals or [])
        frames: list[bytes | zmq.Frame] = [frontend.encode(), encode_reply(header)]
        if payload is not None:
            frames.append(zmq.Frame(payload, copy=payload.nbytes < zmq.COPY_THRESHOLD))
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            log.warning("frontend %s is gone; its replies are dropped", frontend)
            return
        if payload is not None:
            self._credit.sent(frontend, payload.nbytes)


def nonfinite_rows(finished: FinishedBatch) -> dict[int, list[int]]:
    """Part index -> rows of its request whose status byte is set; nearly always empty."""
    status = finished.buffer[finished.layout.status_offset :]
    if not status.any():
        return {}
    ends = np.cumsum([part.rows for part in finished.batch.parts])
    bad: dict[int, list[int]] = {}
    for row in np.flatnonzero(status):
        index = int(np.searchsorted(ends, row, side="right"))
        part = finished.batch.parts[index]
        bad.setdefault(index, []).append(int(row - ends[index]) + part.rows + part.first_row)
    return bad


def reply_part(finished: FinishedBatch, index: int, start: int, bad_rows: list[int]) -> ReplyPart:
    """start: of the payload in the batch's buffer, from which the part's offsets count."""
    part = finished.batch.parts[index]
    scale_offset = finished.layout.part_scale_offset[index]
    return ReplyPart(
        id=part.request.id,
        first_row=part.first_row,
        rows=part.rows,
        offset=finished.layout.part_offset[index] - start,
        scale_offset=scale_offset - start if scale_offset >= 0 else -1,
        queue_ms=(finished.launched_at - part.request.enqueued_at) * 1000,
        nonfinite_rows=bad_rows,
    )
