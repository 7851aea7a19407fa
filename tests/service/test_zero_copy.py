"""From the buffer that a forward wrote to the frontend's socket and into a reply: who copies, what is reused, and when.

The real OutputLoop, Outbox, BufferPool and ReplyCredit, with peers over real sockets; a pattern stands for the forward.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from embedserve.engine.batcher import Batch, Part, Request
from embedserve.engine.buffers import BufferPool
from embedserve.engine.credit import ReplyCredit
from embedserve.engine.outbox import FinishedBatch, Outbox
from embedserve.engine.output_loop import OutputLoop
from embedserve.errors import Overloaded, ServerError
from embedserve.frontend.engine_client import EngineClient, EngineReply, EngineRequest
from embedserve.messages import (
    EngineAddress,
    Lane,
    Refusal,
    ReplyHeader,
    ReplyPart,
    RequestHeader,
    decode_reply,
    decode_requests,
    encode_reply,
)
from embedserve.model.card import ModelCard
from embedserve_kernels.output_layout import OutputDtype, lay_out

ROWS = 64
INCARNATION = 5
TIMEOUT_S = 30  # of what should happen soon
KIB = 1024


def dims_for(frame_bytes: int) -> int:
    """Of float32 rows, so that ROWS of them are so many bytes."""
    assert frame_bytes % (4 * ROWS) == 0
    return frame_bytes // (4 * ROWS)


def frames_beyond_kernel(frame_bytes: int) -> int:
    """So many that the last are still in this process: more than both ends' socket buffers and a peer's queue hold."""
    buffered = sum(int(Path(f"/proc/sys/net/core/{name}").read_text()) for name in ("wmem_default", "rmem_default"))
    return 4 + (2 * buffered) // frame_bytes


# The engine's side


def pattern(number: int, nbytes: int) -> np.ndarray:
    """uint8 [nbytes] that differ from those of every other number at every 4 bytes, and are never the pool's poison."""
    words = np.arange(nbytes // 4, dtype="<u4") % 60_000 + np.uint32(number * 65_536)
    return words.view(np.uint8)


@dataclass
class Output:
    """An OutputLoop at work, with a ring of buffers."""

    address: str
    outbox: Outbox
    credit: ReplyCredit
    pool: BufferPool
    outside: list[int]  # an entry for each lease from outside the ring

    def send(self, number: int, frontends: dict[str, int], *, dims: int) -> np.ndarray:
        """A batch of `frontends[name]` rows for each, full of the number's pattern. Returns the leased buffer."""
        requests = [make_request(name, number, rows, dims) for name, rows in sorted(frontends.items())]
        parts = [Part(request, 0, request.rows, request.rows) for request in requests]
        counts = [part.rows for part in parts]
        layout = lay_out(counts, [dims] * len(parts), [OutputDtype.FLOAT32] * len(parts), [True] * len(parts))
        buffer = self.pool.lease(layout.total_bytes)
        for part, offset in zip(parts, layout.part_offset, strict=True):
            nbytes = part.rows * dims * 4
            buffer[offset : offset + nbytes] = pattern(number, nbytes)
        buffer[layout.status_offset :] = 0
        now = time.monotonic()
        self.outbox.put(FinishedBatch(Batch(parts, sum(counts)), layout, buffer, now, now))
        return buffer


def make_request(frontend: str, id: int, rows: int, dims: int) -> Request:
    ones = np.ones(rows, np.int32)
    return Request(frontend, id, Lane.BULK, ones, ones, dims, OutputDtype.FLOAT32, True, time.monotonic())


@pytest.fixture
def run_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="embedserve-") as path:  # shorter than pytest's, for a socket's name
        yield path


@contextmanager
def running_output(
    run_dir: str, *, buffers: int, buffer_bytes: int, credit: ReplyCredit | None = None
) -> Iterator[Output]:
    outside: list[int] = []
    output = Output(
        address=f"ipc://{run_dir}/rep",
        outbox=Outbox(limit=1),
        credit=credit or ReplyCredit(),
        pool=BufferPool(buffers, buffer_bytes, poison=True, outside=lambda: outside.append(1)),
        outside=outside,
    )
    loop = OutputLoop(output.address, incarnation=INCARNATION, outbox=output.outbox, credit=output.credit)
    thread = threading.Thread(target=loop.run, name="OutputLoop")
    thread.start()
    try:
        yield output
    finally:
        output.outbox.close()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """For what pyzmq's own thread does, which wakes nobody."""
    pause, deadline = threading.Event(), time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        pause.wait(0.001)


def wait_for_leases(pool: BufferPool, count: int) -> None:
    wait_until(lambda: pool.free == count, "leases that did not come back")


# The frontend's side


class Peer:
    """The reply socket of a frontend. It reads so many replies ahead of `receive`; with 0, all it can."""

    def __init__(self, address: str, name: str, *, receive_ahead: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.setsockopt(zmq.RCVHWM, receive_ahead)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_S * 1000)
        self._socket.connect(address)
        self._socket.send(b"hello")
        welcome, payload = self.receive()
        assert (welcome.incarnation, welcome.parts, welcome.refusals) == (INCARNATION, [], [])
        assert payload is None

    def receive(self) -> tuple[ReplyHeader, np.ndarray | None]:
        """The header, and the payload as uint8 when there is one."""
        header, *payloads = self._socket.recv_multipart(copy=False)
        assert len(payloads) <= 1
        return decode_reply(header.buffer), np.frombuffer(payloads[0].buffer, np.uint8) if payloads else None

    def receive_number(self, number: int, *, dims: int, rows: int = ROWS) -> None:
        """The next reply is that batch's, to the last bit."""
        header, payload = self.receive()
        assert [(part.id, part.first_row, part.rows, part.offset) for part in header.parts] == [(number, 0, rows, 0)]
        assert header.parts[0].nonfinite_rows == []
        assert payload is not None
        np.testing.assert_array_equal(payload[: rows * dims * 4], pattern(number, rows * dims * 4))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


# One copy at most


@pytest.mark.parametrize("frame_kib", [64, 65, 96, 256])
def test_frame_is_the_leased_buffer_itself_until_the_socket_takes_it(run_dir: str, frame_kib: int) -> None:
    """What is written into the buffer long after it was sent is what the peer reads."""
    frame_bytes = frame_kib * KIB
    dims, before, marked = dims_for(frame_bytes), frames_beyond_kernel(frame_bytes), 4
    with (
        running_output(run_dir, buffers=before + marked, buffer_bytes=2 * frame_bytes) as output,
        Peer(output.address, "stalled", receive_ahead=1) as stalled,
        Peer(output.address, "witness") as witness,
    ):
        buffers = []
        for number in range(before + marked):
            buffers.append(output.send(number, {"stalled": ROWS, "witness": 1}, dims=dims))
            witness.receive_number(number, dims=dims, rows=1)  # so its own frame, sent before, is sent
        for number in range(before, before + marked):
            rows = buffers[number][:frame_bytes].reshape(ROWS, -1)
            rows[:, :8] = 200 + number % 50
        assert output.pool.free == 0
        buffers.clear()

        for number in range(before):
            stalled.receive_number(number, dims=dims)
        for number in range(before, before + marked):
            _, payload = stalled.receive()
            assert payload is not None
            rows = payload[:frame_bytes].reshape(ROWS, -1)
            assert (rows[:, :8] == 200 + number % 50).all()
            np.testing.assert_array_equal(rows[:, 8:], pattern(number, frame_bytes).reshape(ROWS, -1)[:, 8:])
        assert output.outside == []
        del payload, rows
        wait_for_leases(output.pool, before + marked)


@pytest.mark.parametrize(("frame_kib", "shared"), [(63, False), (64, True), (65, True)])
def test_frame_of_64_kib_or_more_shares_the_buffers_memory(
    run_dir: str, frame_kib: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []  # first byte of the payload that a frame was made of, and of the frame

    def record(payload: np.ndarray, *, copy: bool) -> zmq.Frame:
        frame = zmq.Frame(payload, copy=copy)
        seen.append((first_byte(payload), first_byte(frame.buffer)))
        return frame

    monkeypatch.setattr("embedserve.engine.output_loop.zmq", SimpleNamespace(**vars(zmq) | {"Frame": record}))
    dims = dims_for(frame_kib * KIB)
    with (
        running_output(run_dir, buffers=1, buffer_bytes=128 * KIB) as output,
        Peer(output.address, "peer") as peer,
    ):
        buffer = output.send(1, {"peer": ROWS}, dims=dims)
        peer.receive_number(1, dims=dims)
        assert [(payload == frame) for payload, frame in seen] == [shared]
        assert seen[0][0] == first_byte(buffer)


def first_byte(memory: np.ndarray | memoryview) -> int:
    """Its address."""
    return np.asarray(memory).__array_interface__["data"][0]


def test_frame_under_64_kib_is_copied_at_once_and_ends_its_lease(run_dir: str) -> None:
    dims, count = dims_for(63 * KIB), frames_beyond_kernel(63 * KIB)
    with (
        running_output(run_dir, buffers=2, buffer_bytes=128 * KIB) as output,
        Peer(output.address, "stalled", receive_ahead=1) as stalled,
    ):
        for number in range(count):
            output.send(number, {"stalled": ROWS}, dims=dims)
            wait_for_leases(output.pool, 2)  # though the peer reads nothing
        assert output.outside == []
        for number in range(count):
            stalled.receive_number(number, dims=dims)


def test_frames_that_wait_for_a_stalled_peer_take_no_memory_beside_their_buffers(run_dir: str) -> None:
    frame_bytes, count = 1024 * KIB, 64
    dims = dims_for(frame_bytes)
    with (
        running_output(run_dir, buffers=count, buffer_bytes=frame_bytes + KIB) as output,
        Peer(output.address, "stalled", receive_ahead=1) as stalled,
    ):
        leases = [output.pool.lease(frame_bytes) for _ in range(count)]
        for lease in leases:
            lease[:] = 1  # from now on the ring is resident
        leases.clear()
        del lease
        tracemalloc.start()
        resident, traced = resident_bytes(), tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for number in range(count):
            output.send(number, {"stalled": ROWS}, dims=dims)
        grown, traced_peak = resident_bytes() - resident, tracemalloc.get_traced_memory()[1] - traced
        tracemalloc.stop()
        assert output.outside == []
        assert output.pool.free <= 8  # the kernel and the peer's queue of one took the rest
        assert grown < 16 * frame_bytes  # what the peer, in this process too, read ahead; not a copy of each
        assert traced_peak < 8 * frame_bytes  # the patterns of the frame being written
        for number in range(count):
            stalled.receive_number(number, dims=dims)
        wait_for_leases(output.pool, count)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Reuse


@dataclass
class Pace:
    """Lets a writer run so far ahead of a reader, and holds the reader back, by counting instead of by sleeping."""

    written: int = 0
    read: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_written(self, least: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.written >= least, TIMEOUT_S)

    def wait_read(self, least: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.read >= least, TIMEOUT_S)

    def wrote(self) -> None:
        with self.changed:
            self.written += 1
            self.changed.notify_all()

    def has_read(self) -> None:
        with self.changed:
            self.read += 1
            self.changed.notify_all()


# How far the reader stays behind and how far the writer may run ahead, for a stretch of frames each.
STRETCHES = [(0, 1), (0, 3), (2, 4), (20, 25), (60, 64), (1, 2)]
STRETCH = 50


def stretch(number: int) -> tuple[int, int]:
    return STRETCHES[number // STRETCH % len(STRETCHES)]


@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("frame_kib", [63, 64, 65])
def test_no_frame_to_a_slow_reader_is_overwritten_by_the_ones_after_it(
    run_dir: str, frame_kib: int, buffers: int
) -> None:
    count, dims = 2000, dims_for(frame_kib * KIB)
    pace, greeted = Pace(), threading.Event()

    def read() -> None:
        with Peer(output.address, "slow", receive_ahead=1) as slow:
            greeted.set()
            for number in range(count):
                behind, _ = stretch(number)
                pace.wait_written(min(number + behind, count, number // STRETCH * STRETCH + STRETCH))
                slow.receive_number(number, dims=dims)
                pace.has_read()

    with running_output(run_dir, buffers=buffers, buffer_bytes=66 * KIB) as output, ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read)
        assert greeted.wait(TIMEOUT_S)
        for number in range(count):
            _, ahead = stretch(number)
            pace.wait_read(number - ahead)
            output.send(number, {"slow": ROWS}, dims=dims)
            pace.wrote()
        reading.result(TIMEOUT_S)
        wait_for_leases(output.pool, buffers)
        if frame_kib >= 64:
            assert 100 < len(output.outside) < count - 100  # both kinds of lease were at work


# A frontend that dies


@pytest.mark.parametrize("reads", [3, 1_000_000], ids=["stalled", "reading"])
def test_killed_frontend_gives_its_leases_back_and_harms_no_other(
    run_dir: str, reads: int, caplog: pytest.LogCaptureFixture
) -> None:
    dims, before_kill, buffers = dims_for(64 * KIB), 60, 4
    caplog.set_level(logging.WARNING, "embedserve.engine.output_loop")
    with (
        running_output(run_dir, buffers=buffers, buffer_bytes=160 * KIB) as output,
        Peer(output.address, "lives") as lives,
        reply_peer(output.address, "dies", reads) as dies,
    ):
        number = -1

        def send_next() -> None:
            nonlocal number
            number += 1
            output.send(number, {"dies": ROWS, "lives": ROWS}, dims=dims)
            lives.receive_number(number, dims=dims)

        for _ in range(before_kill):
            send_next()
        if reads < before_kill:
            assert dies.stdout.readline() == b"stalled\n"
            assert output.pool.free == 0  # all buffers are on their way to the one that reads no more
        dies.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + TIMEOUT_S
        while not caplog.records:
            assert time.monotonic() < deadline, "the peer's death went unnoticed"
            send_next()
        for _ in range(20):
            send_next()

        assert {record.getMessage() for record in caplog.records} == {"frontend dies is gone; its replies are dropped"}
        wait_for_leases(output.pool, buffers)


@contextmanager
def reply_peer(address: str, name: str, replies: int) -> Iterator[subprocess.Popen[bytes]]:
    script = Path(__file__).with_name("reply_peer.py")
    with subprocess.Popen([sys.executable, script, address, name, str(replies)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"reading\n"
            yield process
        finally:
            process.kill()


def test_output_loop_survives_a_batch_for_a_frontend_that_never_greeted(
    run_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    dims = dims_for(64 * KIB)
    with (
        running_output(run_dir, buffers=2, buffer_bytes=160 * KIB) as output,
        Peer(output.address, "known") as known,
    ):
        output.send(1, {"a stranger": ROWS, "known": ROWS}, dims=dims)
        known.receive_number(1, dims=dims)
        wait_for_leases(output.pool, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "frontend a stranger is gone; its replies are dropped"
    ]


# Credit


def test_frontend_that_never_acknowledges_is_refused_beyond_its_bytes_and_no_other_is(run_dir: str) -> None:
    frame_bytes, allowed, count = 64 * KIB, 5, 40
    dims = dims_for(frame_bytes)
    credit = ReplyCredit(allowed * frame_bytes)
    with (
        running_output(run_dir, buffers=2, buffer_bytes=160 * KIB, credit=credit) as output,
        Peer(output.address, "silent") as silent,
        Peer(output.address, "steady") as steady,
    ):
        for number in range(count):
            output.send(number, {"silent": ROWS, "steady": ROWS}, dims=dims)
            steady.receive_number(number, dims=dims)
            credit.received("steady", (number + 1) * frame_bytes)
        for number in range(allowed):
            silent.receive_number(number, dims=dims)
        for number in range(allowed, count):
            assert_refused(silent, number)

        credit.received("silent", 2 * frame_bytes)
        for number in range(count, count + 3):
            output.send(number, {"silent": ROWS}, dims=dims)
        silent.receive_number(count, dims=dims)
        silent.receive_number(count + 1, dims=dims)
        assert_refused(silent, count + 2)
        wait_for_leases(output.pool, 2)


def assert_refused(peer: Peer, number: int) -> None:
    header, payload = peer.receive()
    assert payload is None
    assert header.parts == []
    assert [(refusal.id, refusal.overloaded) for refusal in header.refusals] == [(number, True)]
    assert "slowly" in header.refusals[0].message


def test_credit_is_what_was_sent_and_not_yet_received() -> None:
    credit = ReplyCredit(100)
    credit.sent("a", 60)
    assert credit.allows("a", 40)
    assert not credit.allows("a", 41)
    credit.received("a", 10)
    assert credit.allows("a", 50)
    assert not credit.allows("a", 51)
    assert credit.allows("b", 100)
    assert not credit.allows("b", 101)


# Into the reply


class FakeEngine:
    """The two sockets of an engine, owned by one thread on which every method runs."""

    def __init__(self, run_dir: str) -> None:
        self.address = EngineAddress(
            incarnation=INCARNATION,
            requests=f"ipc://{run_dir}/req",
            replies=f"ipc://{run_dir}/rep",
            card=ModelCard("m", "", "bert", 384, 512, 1000, "mean", True, "float32", "cpu", "s", "n"),
            tokens_per_s=10_000.0,
        )
        self._context = zmq.Context()
        self._requests, self._replies = (self._context.socket(zmq.ROUTER) for _ in range(2))
        for socket, address in ((self._requests, self.address.requests), (self._replies, self.address.replies)):
            socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_S * 1000)
            socket.bind(address)

    def welcome(self) -> None:
        self._name, greeting = self._replies.recv_multipart()
        assert greeting == b"hello"
        self.reply([])

    def next_flush(self) -> tuple[RequestHeader, np.ndarray, np.ndarray]:
        sender, *frames = self._requests.recv_multipart()
        header, lengths, token_ids = decode_requests(frames)
        assert header.frontend.encode() == sender == self._name
        return header, lengths, token_ids

    def reply(
        self,
        parts: list[ReplyPart],
        payload: bytes = b"",
        *,
        refusals: tuple[Refusal, ...] = (),
        incarnation: int = INCARNATION,
    ) -> None:
        header = ReplyHeader(incarnation, time.monotonic(), 2.0, 0.5, parts=parts, refusals=list(refusals))
        self._replies.send_multipart([self._name, encode_reply(header), *([payload] if payload else [])])

    def close(self) -> None:
        self._context.destroy(linger=0)


def with_engine(run_dir: str, test: Callable[[EngineClient, Callable[..., Awaitable[Any]], FakeEngine], Any]) -> None:
    """Run `test(client, on, engine)`, where `await on(engine.method, …)` runs the method on the engine's thread."""

    async def run() -> None:
        with ThreadPoolExecutor(1) as thread:

            def on(step: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
                return asyncio.get_running_loop().run_in_executor(thread, step, *arguments)

            engine = await on(FakeEngine, run_dir)
            client = EngineClient("frontend.0.1", max_tokens=10_000)
            try:
                await asyncio.gather(client.connect(engine.address), on(engine.welcome))
                await test(client, on, engine)
            finally:
                client.disconnect()
                await on(engine.close)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def rows_request(rows: int, *, dims: int = 384, dtype: OutputDtype = OutputDtype.FLOAT32) -> EngineRequest:
    return EngineRequest(np.arange(rows, dtype=np.int32), np.ones(rows, np.int32), Lane.BULK, dims, dtype, True)


def reply_part(id: int, first_row: int, rows: int, offset: int = 0, **changes: Any) -> ReplyPart:
    return msgspec.structs.replace(ReplyPart(id, first_row, rows, offset, -1, 1.0), **changes)


def test_requests_that_share_a_frame_are_answered_with_views_of_it(run_dir: str) -> None:
    async def test(client: EngineClient, on: Callable[..., Awaitable[Any]], engine: FakeEngine) -> None:
        nbytes = ROWS * 384 * 4
        replies = asyncio.gather(*(client.embed(rows_request(ROWS)) for _ in range(3)))
        header, lengths, token_ids = await on(engine.next_flush)
        assert [(item.id, item.rows) for item in header.requests] == [(1, ROWS), (2, ROWS), (3, ROWS)]
        assert lengths.tolist() == [1] * 3 * ROWS
        assert token_ids.tolist() == list(range(ROWS)) * 3
        payload = pattern(7, 3 * nbytes).tobytes()
        await on(engine.reply, [reply_part(id, 0, ROWS, (id - 1) * nbytes) for id in (1, 2, 3)], payload)

        first, second, third = await replies
        assert [reply.vectors.nbytes for reply in (first, second, third)] == [nbytes] * 3
        assert b"".join(reply.vectors for reply in (first, second, third)) == payload
        assert first_byte(second.vectors) - first_byte(first.vectors) == nbytes
        assert first_byte(third.vectors) - first_byte(second.vectors) == nbytes
        assert {type(reply.vectors.obj) for reply in (first, second, third)} == {zmq.Frame}
        assert (first.forward_ms, first.pack_ms, first.queue_ms) == (2.0, 0.5, 1.0)
        assert len(first.scales) == 0

    with_engine(run_dir, test)


def test_reply_outlives_the_frames_of_the_replies_after_it(run_dir: str) -> None:
    async def test(client: EngineClient, on: Callable[..., Awaitable[Any]], engine: FakeEngine) -> None:
        nbytes = ROWS * 384 * 4
        kept = []
        for number in range(1, 30):
            reply = asyncio.ensure_future(client.embed(rows_request(ROWS)))
            await on(engine.next_flush)
            await on(engine.reply, [reply_part(number, 0, ROWS)], pattern(number, nbytes).tobytes())
            kept.append(await reply)
        for number, reply in enumerate(kept, 1):
            np.testing.assert_array_equal(np.frombuffer(reply.vectors, np.uint8), pattern(number, nbytes))

    with_engine(run_dir, test)


def test_scales_of_a_single_part_are_a_view_too(run_dir: str) -> None:
    async def test(client: EngineClient, on: Callable[..., Awaitable[Any]], engine: FakeEngine) -> None:
        reply = asyncio.ensure_future(client.embed(rows_request(4, dims=32, dtype=OutputDtype.INT8)))
        await on(engine.next_flush)
        payload = pattern(1, 4 * 32 + 4 * 4).tobytes()
        await on(engine.reply, [reply_part(1, 0, 4, scale_offset=128)], payload)
        answer: EngineReply = await reply
        assert (bytes(answer.vectors), bytes(answer.scales)) == (payload[:128], payload[128:])
        assert first_byte(answer.scales) - first_byte(answer.vectors) == 128

    with_engine(run_dir, test)


@pytest.mark.parametrize("dtype", [OutputDtype.FLOAT32, OutputDtype.INT8])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_only_a_request_that_spans_batches_is_copied(run_dir: str, dtype: OutputDtype, order: list[int]) -> None:
    async def test(client: EngineClient, on: Callable[..., Awaitable[Any]], engine: FakeEngine) -> None:
        dims, stride = 32, 32 * (4 if dtype is OutputDtype.FLOAT32 else 1)
        spanning = asyncio.ensure_future(client.embed(rows_request(10, dims=dims, dtype=dtype)))
        single = asyncio.ensure_future(client.embed(rows_request(1, dims=dims, dtype=OutputDtype.UBINARY)))
        await on(engine.next_flush)
        vectors, scales = pattern(1, 10 * stride).tobytes(), pattern(2, 10 * 4).tobytes()
        ranges = [(0, 3), (3, 4), (7, 3)]
        for index in order:
            first, rows = ranges[index]
            assert not spanning.done()
            payload = b"-" * 16 + vectors[first * stride : (first + rows) * stride]
            changes: dict[str, Any] = {"nonfinite_rows": [first]}
            if dtype is OutputDtype.INT8:
                changes["scale_offset"] = len(payload)
                payload += scales[first * 4 : (first + rows) * 4]
            await on(engine.reply, [reply_part(1, first, rows, 16, **changes)], payload)
        await on(engine.reply, [reply_part(2, 0, 1)], b"1234")

        answer: EngineReply = await spanning
        assert answer.vectors.obj.__class__ is bytearray
        assert bytes(answer.vectors) == vectors
        assert bytes(answer.scales) == (scales if dtype is OutputDtype.INT8 else b"")
        assert sorted(answer.nonfinite_rows) == [0, 3, 7]
        assert (answer.queue_ms, answer.forward_ms) == (1.0, 2.0)  # the three ran side by side
        assert type((await single).vectors.obj) is zmq.Frame

    with_engine(run_dir, test)


def test_received_bytes_are_acknowledged_with_the_next_flush(run_dir: str) -> None:
    async def test(client: EngineClient, on: Callable[..., Awaitable[Any]], engine: FakeEngine) -> None:
        received = 0
        for id in range(1, 4):
            reply = asyncio.ensure_future(client.embed(rows_request(id, dims=4)))
            header, *_ = await on(engine.next_flush)
            assert header.received_bytes == received
            await on(engine.reply, [reply_part(id, 0, id)], bytes(16 * id + 16))
            await reply
            received += 16 * id + 16  # padding too: it is what the engine counted

    with_engine(run_dir, test)


def test_reply_of_another_incarnation_is_discarded(run_dir: str) -> None:
    async def test(client: EngineClient, on: Callable[..., Awaitable[Any]], engine: FakeEngine) -> None:
        reply = asyncio.ensure_future(client.embed(rows_request(1, dims=4)))
        await on(engine.next_flush)
        await on(lambda: engine.reply([reply_part(1, 0, 1)], b"of another one..", incarnation=INCARNATION + 1))
        await on(engine.reply, [reply_part(1, 0, 1)], b"of the right one")
        assert bytes((await reply).vectors) == b"of the right one"

    with_engine(run_dir, test)


def test_refusals_of_the_engine_are_the_callers_errors(run_dir: str) -> None:
    async def test(client: EngineClient, on: Callable[..., Awaitable[Any]], engine: FakeEngine) -> None:
        replies = [asyncio.ensure_future(client.embed(rows_request(1))) for _ in range(2)]
        await on(engine.next_flush)
        refusals = (Refusal(1, "too slow", True), Refusal(2, "no such id", False), Refusal(9, "of nobody", True))
        await on(lambda: engine.reply([], refusals=refusals))
        with pytest.raises(Overloaded, match="too slow"):
            await replies[0]
        with pytest.raises(ServerError, match="no such id"):
            await replies[1]

    with_engine(run_dir, test)
