"""What operators and their tools see: probes, metrics, standard gRPC services, and which process does what.
Knows the protocols, Prometheus's text format and /proc; must not know the server's modules.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from servers import (
    OWN_CONNECTION,
    Embed,
    Server,
    Socket,
    connections_to_each_frontend,
    failure_of,
    grpc_vectors,
    http_message,
    http_vectors,
    ports_connected_to,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

SERVICE = "embedserve.v1.Embedding"
LANES, STAGES = ("query", "bulk"), ("tokenize", "queue", "forward", "pack", "reply")
Sample = tuple[str, frozenset[tuple[str, str]]]


# Probes


def test_server_is_alive_and_ready(connections: list[Socket]) -> None:
    for connection in connections:
        for path, status in (("/health", "alive"), ("/ready", "ready")):
            reply = connection.send(http_message(b"", method="GET", path=path)).read_reply()
            assert (reply.status, json.loads(reply.body)) == (200, {"status": status})


def test_health_service_says_serving(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=30)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


def test_health_of_an_unknown_service_is_not_found(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=30)
    assert failure_of(raised.value).status is grpc.StatusCode.NOT_FOUND


def test_reflection_tells_services_and_their_methods(channel: grpc.Channel) -> None:
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    listed, described = stub.ServerReflectionInfo(iter(asked), timeout=30)
    services = {service.name for service in listed.list_services_response.service}
    assert services == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    (serialized,) = described.file_descriptor_response.file_descriptor_proto
    file = FileDescriptorProto.FromString(serialized)
    methods = {method.name for service in file.service for method in service.method}
    assert (file.package, methods) == ("embedserve.v1", {"Embed", "EmbedStream", "Tokenize", "GetModel"})


# Metrics


def scrape(connection: Socket) -> dict[Sample, float]:
    reply = connection.send(http_message(b"", method="GET", path="/metrics")).read_reply()
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(reply.body.decode()))
    assert all(family.documentation and family.type != "unknown" for family in families)
    samples = [
        (sample.name, frozenset(sample.labels.items()), sample.value)
        for family in families
        for sample in family.samples
    ]
    assert len({sample[:2] for sample in samples}) == len(samples)
    return {(name, labels): value for name, labels, value in samples}


def series(name: str, **labels: str) -> Sample:
    return f"embedserve_{name}", frozenset(labels.items())


def test_all_metrics_are_there(connections: list[Socket], embed: Embed, http: httpx.Client) -> None:
    for lane in LANES:
        http.post("/v1/embeddings", json={"input": "x", "lane": lane})
    embed(texts=["x"])
    samples = scrape(connections[0])
    expected = [
        series("requests_total", protocol="http", code="200"),
        series("requests_total", protocol="grpc", code="OK"),
        *(series("request_seconds_count", protocol="http", lane=lane) for lane in LANES),
        series("request_seconds_count", protocol="grpc", lane="query"),
        series("inputs_total"),
        series("tokens_total"),
        *(series("stage_seconds_count", stage=stage, lane=lane) for stage in STAGES for lane in LANES),
        *(series("stage_seconds_bucket", stage="queue", lane="query", le=le) for le in ("0.0005", "60.0", "+Inf")),
        *(series("queued_tokens", lane=lane) for lane in LANES),
        *(series("oldest_enqueued_timestamp_seconds", lane=lane) for lane in LANES),
        series("batch_tokens_sum"),
        series("batch_inputs_sum"),
        *(series("thread_busy_seconds_total", thread=thread) for thread in ("IpcLoop", "EngineLoop", "OutputLoop")),
        series("engine_starved_seconds_total"),
        series("saturation"),
        series("cancelled_total"),
        series("truncated_total"),
        series("engine_restarts_total"),
    ]
    assert [sample for sample in expected if sample not in samples] == []
    (build_info,) = [(labels, value) for (name, labels), value in samples.items() if name == "embedserve_build_info"]
    assert build_info[1] == 1
    assert dict(build_info[0]).keys() == {"version", "model", "dtype", "device", "space_id", "numerics_id"}
    assert dict(build_info[0])["model"] == "all-MiniLM-L6-v2"


def test_nothing_waits_in_an_idle_server(connections: list[Socket]) -> None:
    samples = scrape(connections[0])
    for lane in LANES:
        assert samples[series("queued_tokens", lane=lane)] == 0
        assert samples[series("oldest_enqueued_timestamp_seconds", lane=lane)] == 0
    assert samples[series("saturation")] == 0


def test_one_scrape_counts_all_that_both_frontends_answered(server: Server, connections: list[Socket]) -> None:
    before = scrape(connections[0])
    tokens = 0
    with connections_to_each_frontend(server) as others:
        for connection, times in zip(others + connections, (3, 5, 7, 11), strict=True):
            for _ in range(times):
                reply = connection.send(http_message(b'{"input": ["a", "few", "words more"]}')).read_reply()
                tokens += json.loads(reply.body)["usage"]["total_tokens"]
            assert connection.send(http_message(b'{"input": []}')).read_reply().status == 400
            assert connection.send(http_message(b'{"input": "x", "model": "y"}')).read_reply().status == 404
            # A request is counted after its answer is written, and before the connection's next one is read.
            connection.send(http_message(b"", method="GET", path="/health")).read_reply()
    long = "word " * 1000
    for number in range(8):
        with grpc.insecure_channel(server.grpc_target, options=OWN_CONNECTION) as channel:
            embed = Embed(channel)
            tokens += sum(embed(texts=["a", long], truncate=3, lane=2).token_counts)
            assert embed.failure(texts=["a", long]).status is grpc.StatusCode.INVALID_ARGUMENT
            if number % 2:
                tokens += sum(embed(texts=["a", long], on_error=2).token_counts)
    after = scrape(connections[1])

    def grown(name: str, **labels: str) -> float:
        sample = series(name, **labels)
        return after.get(sample, 0) - before.get(sample, 0)

    assert grown("requests_total", protocol="http", code="200") == 26
    assert grown("requests_total", protocol="http", code="400") == 4
    assert grown("requests_total", protocol="http", code="404") == 4
    assert grown("requests_total", protocol="grpc", code="OK") == 12
    assert grown("requests_total", protocol="grpc", code="INVALID_ARGUMENT") == 8
    assert grown("request_seconds_count", protocol="http", lane="query") == 26
    assert grown("request_seconds_count", protocol="http", lane="none") == 8
    assert grown("request_seconds_count", protocol="grpc", lane="bulk") == 8
    assert grown("request_seconds_count", protocol="grpc", lane="query") == 4
    assert grown("request_seconds_count", protocol="grpc", lane="none") == 8
    assert grown("inputs_total") == grown("batch_inputs_sum") == 3 * 26 + 2 * 8 + 4
    assert grown("tokens_total") == grown("batch_tokens_sum") == tokens
    assert grown("truncated_total") == 8
    assert grown("cancelled_total") == grown("engine_restarts_total") == 0
    for stage in STAGES:
        assert grown("stage_seconds_count", stage=stage, lane="query") == 26 + 4
        assert grown("stage_seconds_count", stage=stage, lane="bulk") == 8


def test_both_frontends_scrape_the_same_counts(connections: list[Socket]) -> None:
    first, second = (
        {sample: value for sample, value in scrape(connection).items() if "requests_total" in sample[0]}
        for connection in connections
    )
    assert first == second
    assert first


# Processes


def test_both_frontends_get_connections_of_both_protocols(server: Server) -> None:
    """The kernel deals them out by chance: that one gets none of 32 happens once in 2 billion runs."""
    frontends = server.children("embedserve: frontend")
    assert len(frontends) == 2
    body = http_message(json.dumps({"input": "x"}).encode())
    vectors: list[np.ndarray] = []
    sockets = [Socket(server) for _ in range(32)]
    channels = [grpc.insecure_channel(server.grpc_target, options=OWN_CONNECTION) for _ in range(32)]
    try:
        vectors += [http_vectors(each.send(body).read_reply()) for each in sockets]
        vectors += [grpc_vectors(Embed(each)(texts=["x"])) for each in channels]
        ours = {each.port for each in sockets}
        grpc_port = int(server.grpc_target.rpartition(":")[2])
        for frontend in frontends:
            assert ports_connected_to(frontend) & ours
            local = Counter(item.laddr.port for item in frontend.net_connections("tcp") if item.raddr)
            assert local[grpc_port] > 0
    finally:
        for each in (*sockets, *channels):
            each.close()
    np.testing.assert_allclose(np.concatenate(vectors), np.repeat(vectors[0], 64, axis=0), atol=1e-6)


def mapped_files(pid: int) -> Iterable[str]:
    return {line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line}


def test_only_the_engine_has_torch(server: Server) -> None:
    (engine,) = server.children("embedserve: engine")
    assert any("libtorch" in file for file in mapped_files(engine.pid))
    for pid in (server.pid, *(frontend.pid for frontend in server.children("embedserve: frontend"))):
        loaded = [file for file in mapped_files(pid) if any(name in file for name in ("torch", "gomp", "safetensors"))]
        assert loaded == []


def test_supervisor_loads_nothing_of_what_serves(server: Server) -> None:
    names = ("grpc", "zmq", "uvloop", "tokenizers", "torch")
    assert [file for file in mapped_files(server.pid) if any(f"/{name}" in file for name in names)] == []
