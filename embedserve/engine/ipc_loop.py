"""IpcLoop: owns the request socket; decodes, checks, and adds to or cancels from the waiting room.

It never waits on the engine, so that a flood of cancels delays nothing and no cancel queues behind work.
"""

from __future__ import annotations

import logging
import time
from itertools import accumulate, pairwise

import numpy as np
import zmq

from embedserve import metrics
from embedserve.engine.batcher import Request, WaitingRoom
from embedserve.engine.credit import ReplyCredit
from embedserve.engine.outbox import Outbox, Refused
from embedserve.messages import MalformedMessage, RequestHeader, decode_requests

log = logging.getLogger(__name__)


class IpcLoop:
    """`stop_fd` becomes readable when the loop should end."""

    def __init__(
        self,
        address: str,
        *,
        incarnation: int,
        vocab_size: int,
        waiting_room: WaitingRoom,
        outbox: Outbox,
        credit: ReplyCredit,
        stop_fd: int,
    ) -> None:
        self._address = address
        self._incarnation = incarnation
        self._vocab_size = vocab_size
        self._waiting_room = waiting_room
        self._outbox = outbox
        self._credit = credit
        self._stop_fd = stop_fd
        self.busy_since: float | None = None  # CLOCK_MONOTONIC, seconds; read by whoever watches for a stuck loop

    def run(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        with socket:
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.bind(self._address)
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self._stop_fd, zmq.POLLIN)
            busy = metrics.THREAD_BUSY.labels("IpcLoop")
            while self._stop_fd not in dict(poller.poll()):  # the only place that blocks
                self.busy_since = woken = time.monotonic()
                self._drain(socket)
                self.busy_since = None
                busy.inc(time.monotonic() - woken)

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                sender, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._receive(sender.bytes.decode("ascii", "replace"), [frame.buffer for frame in frames])

    def _receive(self, sender: str, frames: list[memoryview]) -> None:
        try:
            header, lengths, token_ids = decode_requests(frames)
        except MalformedMessage as error:
            log.error("frontend %s sent a malformed message: %s", sender, error)
            return
        if header.incarnation != self._incarnation or header.frontend != sender:
            return  # meant for an engine that is no more
        self._credit.received(sender, header.received_bytes)
        if header.cancels:
            self._waiting_room.cancel(sender, header.cancels)
        if header.requests:
            self._add(_requests(header, lengths, token_ids), token_ids)

    def _add(self, requests: list[Request], token_ids: np.ndarray) -> None:
        if not self._in_vocabulary(token_ids):
            message = f"token ids outside the vocabulary of {self._vocab_size} reached the engine"
            bad = [request for request in requests if not self._in_vocabulary(request.token_ids)]
            self._outbox.post([Refused(request, message, overloaded=False) for request in bad])
            requests = [request for request in requests if request not in bad]
        full = self._waiting_room.add(requests)
        if full:
            message = "the engine's queue is full; send again later"
            self._outbox.post([Refused(request, message, overloaded=True) for request in full])

    def _in_vocabulary(self, token_ids: np.ndarray) -> bool:
        return int(token_ids.min()) >= 0 and int(token_ids.max()) < self._vocab_size


def _requests(header: RequestHeader, lengths: np.ndarray, token_ids: np.ndarray) -> list[Request]:
    """The flush's requests; their arrays are views of its frames."""
    rows = accumulate((item.rows for item in header.requests), initial=0)
    tokens = accumulate((item.tokens for item in header.requests), initial=0)
    return [
        Request(
            frontend=header.frontend,
            id=item.id,
            lane=item.lane,
            lengths=lengths[first_row:end_row],
            token_ids=token_ids[first_token:end_token],
            dims=item.dims,
            dtype=item.dtype,
            normalize=item.normalize,
            enqueued_at=item.enqueued_at,
        )
        for item, (first_row, end_row), (first_token, end_token) in zip(
            header.requests, pairwise(rows), pairwise(tokens), strict=True
        )
    ]
