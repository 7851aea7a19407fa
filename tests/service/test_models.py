"""Servers of other models than the bundled one, over both protocols, against sentence-transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from checkpoints import long_texts, save_tiny_qwen3, save_tiny_roberta, sentences
from sentence_transformers import SentenceTransformer
from servers import ANY_SIZE, Embed, Server, assert_alike, grpc_vectors, http_vectors, start_server

from embedserve.v1 import embedding_pb2 as pb
from loadtest.qwen3 import QUERY_PROMPT

TEXTS = sentences()[:60] + long_texts()[:6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def qwen3(folder: Path) -> Iterator[Server]:
    with start_server(str(folder), "--dtype", "float32") as server:
        yield server


@pytest.mark.parametrize(
    ("http_fields", "grpc_fields", "prompt"),
    [
        ({}, {}, ""),
        ({"input_type": "query"}, {"input_type": pb.INPUT_TYPE_QUERY}, QUERY_PROMPT),
        ({"instruction": "Find it"}, {"instruction": "Find it"}, "Instruct: Find it\nQuery:"),
    ],
    ids=["document", "query", "instruction"],
)
def test_qwen3_over_both_protocols(
    qwen3: Server, folder: Path, http_fields: dict[str, str], grpc_fields: dict[str, object], prompt: str
) -> None:
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, prompt=prompt or None)
    reply = httpx.post(qwen3.http_url + "/v1/embeddings", json={"input": TEXTS, **http_fields}, timeout=60)
    assert_alike(http_vectors(reply), expected)
    with grpc.insecure_channel(qwen3.grpc_target, options=ANY_SIZE) as channel:
        reply = Embed(channel)(texts=TEXTS, **grpc_fields)
        assert_alike(grpc_vectors(reply), expected)
        cut = grpc_vectors(Embed(channel)(texts=TEXTS[:9], dimensions=32, **grpc_fields))
        assert_alike(cut, expected[:9, :32])
        np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)


def test_model_without_a_packed_forward_is_served_and_the_log_says_how(tmp_path: Path) -> None:
    folder = save_tiny_roberta(tmp_path, dense=True)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS[:60])
    with start_server(str(folder)) as server:
        reply = httpx.post(server.http_url + "/v1/embeddings", json={"input": TEXTS[:60]}, timeout=60)
        assert_alike(http_vectors(reply), expected)
        assert "RobertaModel" in server.stderr.read_text()


def test_shape_alone_is_served_with_dummy_weights(folder: Path, tmp_path: Path) -> None:
    for file in folder.rglob("*.json"):
        copy = tmp_path / "shape" / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    with start_server(str(tmp_path / "shape"), "--load-format", "dummy") as server:
        reply = httpx.post(server.http_url + "/v1/embeddings", json={"input": ["a", "b"]}, timeout=60)
        assert np.isfinite(http_vectors(reply)).all()
        assert "vectors mean nothing" in server.stderr.read_text()
