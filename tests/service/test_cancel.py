"""A caller who leaves frees his work, over both protocols and at every stage, and nobody else notices."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import grpc
import pytest
from loads import LONG_TEXT, metric, steady_load, wait_until
from servers import (
    ANY_SIZE,
    EMBED_METHOD,
    OWN_CONNECTION,
    Embed,
    Server,
    Socket,
    connections_to_each_frontend,
    http_head,
    http_message,
    start_server,
)

from embedserve.v1 import embedding_pb2 as pb

FREED_WITHIN_S = 2.0  # a busy machine's; what is wanted is a tenth of a second
QUERY = "how many of those who ask will stay until they are answered"
MOST_AT_ONCE = 50  # of a flood that fell behind
BULK = [LONG_TEXT] * 400  # half a minute of work or so, so that most of it waits


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server("--frontends", "2", "--request-timeout-s", "25") as started:
        yield started


@pytest.fixture
def embed(server: Server) -> Iterator[Embed]:
    with grpc.insecure_channel(server.grpc_target, options=ANY_SIZE + OWN_CONNECTION) as channel:
        yield Embed(channel)


def queued(server: Server) -> float:
    return metric(server, "embedserve_queued_tokens")


def bulk_message() -> bytes:
    return http_message(json.dumps({"input": BULK}).encode())


def leave_by_http(server: Server, embed: Embed) -> Callable[[], object]:
    return Socket(server).send(bulk_message()).reset


def leave_by_http_with_another_request_behind(server: Server, embed: Embed) -> Callable[[], object]:
    return Socket(server).send(bulk_message(), http_message(b'{"input": "behind"}')).reset


def leave_by_grpc_cancel(server: Server, embed: Embed) -> Callable[[], object]:
    return embed.start(texts=BULK).cancel


def leave_by_stream_cancel(server: Server, embed: Embed) -> Callable[[], object]:
    channel = grpc.insecure_channel(server.grpc_target, options=ANY_SIZE + OWN_CONNECTION)
    message = pb.EmbedRequest(texts=BULK).SerializeToString()
    return channel.stream_stream("/embedserve.v1.Embedding/EmbedStream")(iter([message])).cancel


@pytest.mark.parametrize(
    "start",
    [leave_by_http, leave_by_http_with_another_request_behind, leave_by_grpc_cancel, leave_by_stream_cancel],
)
def test_queued_work_of_a_caller_who_leaves_is_freed(server: Server, embed: Embed, start: Callable) -> None:
    cancelled = metric(server, "embedserve_cancelled_total")
    with steady_load(server, callers=1) as load:
        leave = start(server, embed)
        wait_until(lambda: queued(server) > 10_000, 20)
        leave()
        took_s = wait_until(lambda: queued(server) < 10_000, FREED_WITHIN_S)
        print(f"freed within {took_s * 1000:.0f} ms, one scrape included")
        assert metric(server, "embedserve_cancelled_total") == cancelled + 1
    assert set(load.answers) == {"http good", "grpc good"}


def test_grpc_deadline_frees_what_waits(server: Server, embed: Embed) -> None:
    with (
        steady_load(server, callers=1) as load,
        grpc.insecure_channel(server.grpc_target, options=ANY_SIZE + OWN_CONNECTION) as channel,
    ):
        future = channel.unary_unary(EMBED_METHOD).future(pb.EmbedRequest(texts=BULK).SerializeToString(), timeout=3)
        wait_until(lambda: queued(server) > 10_000, 20)
        assert future.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # waits for it
        wait_until(lambda: queued(server) < 10_000, FREED_WITHIN_S)
    assert set(load.answers) == {"http good", "grpc good"}


def test_caller_who_leaves_while_he_is_tokenized_never_reaches_the_queue(server: Server) -> None:
    """4 MB of text, in slices on a worker: the rest of the slices is not tokenized."""
    cancelled = metric(server, "embedserve_cancelled_total")
    body = json.dumps({"input": [LONG_TEXT * 10] * 400, "truncate": "right"}).encode()
    socket = Socket(server).send(http_message(body))
    time.sleep(0.1)
    socket.reset()
    wait_until(lambda: metric(server, "embedserve_cancelled_total") == cancelled + 1, 5)
    for _ in range(20):
        assert queued(server) == 0
        time.sleep(0.02)


def test_caller_who_leaves_while_he_is_tokenized_frees_the_worker(server: Server) -> None:
    """10 MB would keep it for ten seconds, and everyone whose texts are long waits for the same worker."""
    given_up = metric(server, "embedserve_requests_total", 'code="499"')
    body = http_message(json.dumps({"input": [LONG_TEXT * 5] * 2000, "truncate": "right"}).encode())
    with steady_load(server, callers=1) as load, connections_to_each_frontend(server) as leaving, ExitStack() as stack:
        for connection in leaving:
            connection.send(body)
        others = [stack.enter_context(Socket(server)) for _ in range(4)]  # of both frontends, most likely
        time.sleep(0.3)
        for connection in leaving:
            connection.reset()
        left = time.monotonic()
        for other in others:
            other.send(http_message(json.dumps({"input": [LONG_TEXT * 25] * 5, "truncate": "right"}).encode()))
        assert {other.read_reply().status for other in others} == {200}
        print(f"the others' long texts were answered {time.monotonic() - left:.2f} s after")
        assert time.monotonic() - left < 5
    assert set(load.answers) == {"http good", "grpc good"}
    assert metric(server, "embedserve_requests_total", 'code="499"') == given_up + 2


def test_caller_who_leaves_while_sending_is_counted(server: Server) -> None:
    cancelled = metric(server, "embedserve_cancelled_total")
    Socket(server).send(http_head("Content-Length: 1000"), b'{"input": "x').reset()
    wait_until(lambda: metric(server, "embedserve_cancelled_total") == cancelled + 1, 5)


def test_request_timeout_frees_what_waits() -> None:
    with start_server("--request-timeout-s", "1") as server, Socket(server) as socket:
        socket.send(bulk_message())
        reply = socket.read_reply()
        assert reply.status == 504
        assert b"--request-timeout-s" in reply.body
        wait_until(lambda: queued(server) == 0, FREED_WITHIN_S)


def test_flood_of_cancels_moves_nobody_else(server: Server) -> None:
    flood_of_cancels(server, seconds=3, http_a_second=300, grpc_a_second=300)


@pytest.mark.faults
def test_100_000_cancels_in_a_minute_move_nobody_else(server: Server) -> None:
    assert flood_of_cancels(server, seconds=60, http_a_second=1_750, grpc_a_second=50) >= 100_000


def flood_of_cancels(server: Server, *, seconds: int, http_a_second: int, grpc_a_second: int) -> float:
    """Requests whose caller leaves 20 ms or so after he sent them, beside a steady load; how many the server saw."""
    before, requests_before = metric(server, "embedserve_cancelled_total"), given_up(server)
    memory = resident_bytes(server)
    message = pb.EmbedRequest(texts=[QUERY]).SerializeToString()
    body = http_message(json.dumps({"input": QUERY}).encode())
    with grpc.insecure_channel(server.grpc_target, options=ANY_SIZE + OWN_CONNECTION) as channel:
        method = channel.unary_unary(EMBED_METHOD)
        floods = [
            Flood(http_a_second, lambda: Socket(server).send(body).reset),
            Flood(grpc_a_second, lambda: method.future(message).cancel),
        ]
        with steady_load(server, callers=1) as load:
            started = time.monotonic()
            while (passed := time.monotonic() - started) < seconds:
                for flood in floods:
                    flood.tend(passed)
                time.sleep(0.005)
            for flood in floods:
                flood.end()
            wait_until(lambda: queued(server) == 0, 10)
        assert Embed(channel)(texts=["the next request"]).count == 1
    assert set(load.answers) == {"http good", "grpc good"}
    sent = sum(flood.sent for flood in floods)
    counted = metric(server, "embedserve_cancelled_total") - before
    grown = [now - before for now, before in zip(resident_bytes(server), memory, strict=True)]
    print(f"{sent} cancels in {seconds} s, {counted:.0f} of them reached the server")
    print(f"the load's {load.good} answers took {load.slowest_s * 1000:.0f} ms at most")
    print(f"the server's processes grew by {[size >> 20 for size in grown]} MiB")
    assert counted <= sent  # one that was cancelled before it was sent never came
    assert counted == given_up(server) - requests_before
    assert metric(server, "embedserve_saturation") == 0  # no frontend waits for anything
    assert max(grown) < 100 << 20
    return counted


class Flood:
    """So many requests a second, each given up after HELD_S. `begin` sends one and returns how to give it up."""

    HELD_S = 0.02

    def __init__(self, a_second: int, begin: Callable[[], Callable[[], object]]) -> None:
        self._a_second = a_second
        self._begin = begin
        self._open: deque[tuple[float, Callable[[], object]]] = deque()
        self.sent = 0

    def tend(self, passed: float) -> None:
        """Give up what is due, begin what is due, `passed` seconds after the start."""
        while self._open and self._open[0][0] < passed - self.HELD_S:
            self._open.popleft()[1]()
        for _ in range(min(int(passed * self._a_second) - self.sent, MOST_AT_ONCE)):
            self._open.append((passed, self._begin()))
            self.sent += 1

    def end(self) -> None:
        while self._open:
            self._open.popleft()[1]()


def given_up(server: Server) -> float:
    codes = ('code="499"', 'code="CANCELLED"')
    return sum(metric(server, "embedserve_requests_total", code) for code in codes)


def resident_bytes(server: Server) -> list[int]:
    return [child.memory_info().rss for child in server.children("embedserve: ")]
