"""Processes that die under load: who waited is told at once, another takes over, and every vector stays right."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loads import LONG_TEXT, metric, steady_load, wait_until
from servers import (
    ANY_SIZE,
    OWN_CONNECTION,
    Embed,
    Server,
    Socket,
    connections_to_each_frontend,
    failure_of,
    http_head,
    http_message,
    http_vectors,
    ports_connected_to,
    start_server,
)

TOLD_WITHIN_S = 1.0
BACK_WITHIN_S = 40.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server("--frontends", "2") as started:
        yield started


def is_ready(server: Server) -> bool:
    try:
        return httpx.get(server.http_url + "/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def health(server: Server) -> int:
    with grpc.insecure_channel(server.grpc_target, options=OWN_CONNECTION) as channel:
        return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGABRT], ids=["kill -9, as for want of memory", "abort"])
def test_dead_engine_is_told_at_once_and_replaced(server: Server, how: signal.Signals) -> None:
    restarts = metric(server, "embedserve_engine_restarts_total")
    (engine,) = server.children("embedserve: engine")
    with (
        steady_load(server) as load,
        grpc.insecure_channel(server.grpc_target, options=ANY_SIZE + OWN_CONNECTION) as channel,
    ):
        waiting = [Embed(channel).start(texts=[LONG_TEXT] * 100) for _ in range(4)]  # seconds of work
        wait_until(lambda: metric(server, "embedserve_queued_tokens") > 10_000, 20)
        os.kill(engine.pid, how)
        killed = time.monotonic()
        for call in waiting:
            failure = failure_of(call.exception(timeout=30))
            assert failure.status is grpc.StatusCode.UNAVAILABLE, failure
        told_s = time.monotonic() - killed
        assert not is_ready(server)
        wait_until(lambda: health(server) == health_pb2.HealthCheckResponse.NOT_SERVING, 3)
        back_s = wait_until(lambda: is_ready(server), BACK_WITHIN_S)
        good = load.good
        wait_until(lambda: load.good > good + 50, 20)
    print(f"told within {told_s * 1000:.0f} ms, ready again after {back_s:.1f} s")
    assert told_s < TOLD_WITHIN_S
    assert set(load.answers) <= {"http good", "grpc good", "http 503", "grpc UNAVAILABLE"}
    assert load.answers["http 503"]
    assert load.answers["grpc UNAVAILABLE"]
    assert metric(server, "embedserve_engine_restarts_total") == restarts + 1
    wait_until(lambda: health(server) == health_pb2.HealthCheckResponse.SERVING, 5)


def test_engine_that_dies_again_and_again_is_restarted_ever_later(server: Server) -> None:
    log_before = server.stderr.read_text()
    for _ in range(3):
        (engine,) = wait_for_engine(server)
        engine.kill()
        wait_until(lambda pid=engine.pid: all(child.pid != pid for child in server.children("embedserve: engine")), 5)
    wait_until(lambda: is_ready(server), BACK_WITHIN_S)
    log = server.stderr.read_text()[len(log_before) :]
    delays = [float(line.split("another in ")[1].split()[0]) for line in log.splitlines() if "starting another" in line]
    assert len(delays) == 3
    assert delays == sorted(delays)
    assert delays[2] >= 2 * delays[0]


def wait_for_engine(server: Server) -> list:
    wait_until(lambda: bool(server.children("embedserve: engine")), 20)
    return server.children("embedserve: engine")


def test_dead_frontend_frees_its_rows_and_moves_few(server: Server) -> None:
    """Only those who were connected to it notice, each with the one request that he had in flight."""
    wait_until(lambda: is_ready(server), BACK_WITHIN_S)
    with grpc.insecure_channel(server.grpc_target, options=ANY_SIZE + OWN_CONNECTION) as channel:
        frontend = frontend_behind(server, channel)
        with steady_load(server) as load:
            call = Embed(channel).start(texts=[LONG_TEXT] * 400)
            wait_until(lambda: metric(server, "embedserve_queued_tokens") > 20_000, 20)
            frontend.kill()
            freed_s = wait_until(lambda: engine_has_nothing_waiting(server), 5)
            assert failure_of(call.exception(timeout=30)).status is grpc.StatusCode.UNAVAILABLE
            wait_until(lambda: len(server.children("embedserve: frontend")) == 2, 20)
            good = load.good
            wait_until(lambda: load.good > good + 50, 20)
    print(f"its rows were freed within {freed_s * 1000:.0f} ms")
    failed = {how: count for how, count in load.answers.items() if not how.endswith("good")}
    assert set(failed) <= {"grpc UNAVAILABLE", *(f"http {way}" for way in CONNECTION_LOST)}
    assert sum(failed.values()) <= 20, failed


def test_stopped_frontend_holds_up_only_its_own_callers(server: Server) -> None:
    """And what it had in flight is answered when it goes on."""
    wait_until(lambda: is_ready(server), BACK_WITHIN_S)
    victim, _ = server.children("embedserve: frontend")
    with connections_to_each_frontend(server) as (stopped, running):
        stopped.send(http_message(json.dumps({"input": [LONG_TEXT] * 200}).encode()))
        time.sleep(0.5)
        victim.suspend()
        try:
            for _ in range(50):
                assert len(http_vectors(running.send(http_message(b'{"input": "x"}')).read_reply())) == 1
        finally:
            victim.resume()
        assert len(http_vectors(stopped.read_reply())) == 200
    wait_until(lambda: metric(server, "embedserve_queued_tokens") == 0, 5)


def test_what_cannot_be_finished_within_drain_s_is_told_so() -> None:
    texts = [LONG_TEXT] * 1000  # of both callers many seconds of work, and within the share of one frontend
    with start_server("--frontends", "2", "--drain-s", "1") as server, ExitStack() as stack:
        uploading, deaf, waiting = (stack.enter_context(Socket(server)) for _ in range(3))
        channel = stack.enter_context(grpc.insecure_channel(server.grpc_target, options=ANY_SIZE + OWN_CONNECTION))
        uploading.send(http_head("Content-Length: 100"), b"{")  # and never the rest
        deaf.send(http_message(json.dumps({"input": ["a"] * 1000}).encode()))  # and never reads
        wait_until(lambda: metric(server, "embedserve_inputs_total") >= 1000, 20)
        waiting.send(http_message(json.dumps({"input": texts}).encode()))
        over_grpc = Embed(channel).start(texts=texts)
        wait_until(lambda: metric(server, "embedserve_queued_tokens") > 300_000, 20)  # both of them
        os.kill(server.pid, signal.SIGTERM)
        asked = time.monotonic()
        reply, failure = waiting.read_reply(), failure_of(over_grpc.exception(timeout=30))
        told_s = time.monotonic() - asked
        assert server.wait(timeout=30) == 0
        ended_s = time.monotonic() - asked
        assert "killing it" not in server.stderr.read_text()
    print(f"told within {told_s:.2f} s, ended within {ended_s:.2f} s")
    assert (reply.status, failure.status) == (503, grpc.StatusCode.UNAVAILABLE)
    assert b"shutting down" in reply.body
    assert "shutting down" in failure.message
    assert 0.9 < told_s < 1 + TOLD_WITHIN_S
    assert ended_s < 1 + 5


CONNECTION_LOST = ("ReadError", "RemoteProtocolError", "ConnectError", "WriteError")


def frontend_behind(server: Server, channel: grpc.Channel) -> psutil.Process:
    """The frontend that this new channel is connected to."""
    frontends = server.children("embedserve: frontend")
    before = {frontend: ports_connected_to(frontend) for frontend in frontends}
    Embed(channel)(texts=["a"])
    (behind,) = (frontend for frontend in frontends if ports_connected_to(frontend) - before[frontend])
    return behind


def engine_has_nothing_waiting(server: Server) -> bool:
    try:
        return metric(server, "embedserve_queued_tokens") < 10_000
    except httpx.TransportError:  # this scrape was the dead frontend's
        return False
