"""The texts of a run and the requests that carry them, encoded before the first is sent.
Knows the two wire formats, never a socket or a clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embedserve.v1 import embedding_pb2

if TYPE_CHECKING:
    from loadtest.load import Load, Target

MAX_DISTINCT_REQUESTS = 8192  # then they repeat
MAX_DISTINCT_TEXTS = 65_536


def encode_requests(load: Load, model: str | None, process: int) -> list[bytes]:
    """What one sending process sends, in order and then again: whole HTTP requests, or gRPC messages."""
    rng = np.random.default_rng([load.seed, process])
    texts = read_texts(load.texts_file, rng) if load.texts_file else short_texts(MAX_DISTINCT_TEXTS, rng)
    count = max(1, min(MAX_DISTINCT_REQUESTS, MAX_DISTINCT_TEXTS // load.texts_per_request))
    drawn = rng.integers(len(texts), size=(count, load.texts_per_request))
    batches = [[texts[index] for index in row] for row in drawn]
    if load.protocol == "grpc":
        return [grpc_message(batch, model) for batch in batches]
    return [http_request(batch, model, load.encoding, load.target) for batch in batches]


def short_texts(count: int, rng: np.random.Generator) -> list[str]:
    """Search queries and single sentences: 4-20 words, every length as likely as another."""
    lengths = rng.integers(4, 21, size=count)
    words = [WORDS[index] for index in rng.integers(len(WORDS), size=int(lengths.sum()))]
    ends = np.cumsum(lengths).tolist()
    return [" ".join(words[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)]


def read_texts(path: Path, rng: np.random.Generator) -> list[str]:
    """The file's lines that are not blank, at most MAX_DISTINCT_TEXTS of them, drawn at random."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = rng.permutation(len(lines))[:MAX_DISTINCT_TEXTS]
    return [lines[index] for index in chosen]


def grpc_message(texts: list[str], model: str | None) -> bytes:
    return embedding_pb2.EmbedRequest(texts=texts, model=model or "").SerializeToString()


def http_request(texts: list[str], model: str | None, encoding: str, target: Target) -> bytes:
    fields = {"model": model, "input": texts if len(texts) > 1 else texts[0], "encoding_format": encoding}
    body = json.dumps(fields, ensure_ascii=False).encode()
    head = (
        f"POST {target.path} HTTP/1.1\r\nHost: {target.authority}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


WORDS = Path(__file__).with_name("words.txt").read_text(encoding="ascii").split()
