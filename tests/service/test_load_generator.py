"""The load generator against a server that runs: its classes of senders, and what it reads from the server's metrics.
Figures are not judged: how fast the server is depends on the machine.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loadtest.__main__ import main
from loadtest.run import Load, run_load

if TYPE_CHECKING:
    from servers import Server

MINILM_TOKENS = 256


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_queries_and_bulk_at_once_are_told_apart_by_the_generator_and_by_the_server(
    server: Server, tmp_path: Path, protocol: str
) -> None:
    target = ["--url", server.http_url] if protocol == "http" else ["--grpc", server.grpc_target]
    bulk = ["--texts-per-request", "32", "--words", "20", "--bulk-connections", "2"]
    times = ["--duration-s", "1.5", "--warmup-s", "0.5", "--rate", "20"]
    where = ["--metrics", server.http_url, "--json", str(tmp_path / "json")]
    assert main(["run", *target, "--workload", "queries-under-bulk", *bulk, *times, *where]) == 0
    written = json.loads((tmp_path / "json").read_text())
    assert set(written) == {"queries", "bulk"}
    for name, texts_per_request in (("queries", 1), ("bulk", 32)):
        result = written[name]
        assert result["ok"] == result["requests"] > 0
        assert result["texts_per_s"] == pytest.approx(texts_per_request * result["requests_per_s"])
        assert 0 < result["p50_ms"] <= result["p99_ms"]
    metrics = written["queries"]["metrics"]
    assert metrics == written["bulk"]["metrics"]
    assert set(metrics["stage_ms"]) == {"query", "bulk"}  # the lanes that the server put them in
    assert metrics["batch_inputs"]["total"] > 32
    assert metrics["batch_tokens"]["mean"] > metrics["batch_inputs"]["mean"] >= 1
    assert any(share > 0 for thread, share in metrics["busy"].items() if thread.startswith("EngineLoop"))


def test_the_longest_texts_are_as_long_as_the_model_takes(server: Server) -> None:
    longest = Load(url=server.http_url, workload="bulk", words="longest", texts_per_request=9)
    result = run_load(replace(longest, connections=1, warmup_s=0, max_requests=2))
    assert (result.ok, result.requests) == (2, 2)
    assert result.metrics is not None
    assert result.metrics.batch_inputs.total == 2 * 9
    assert result.metrics.batch_tokens.total == 2 * 9 * MINILM_TOKENS


def test_mixed_texts_are_all_within_the_models_limit(server: Server) -> None:
    result = run_load(Load(url=server.http_url, workload="mixed", connections=2, warmup_s=0, duration_s=1))
    assert result.ok == result.requests > 0
    assert result.texts_per_s > result.requests_per_s
