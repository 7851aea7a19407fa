"""The texts of a run and the requests that carry them, encoded before the first is sent.
Knows the two wire formats, never a socket or a clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from embedserve.v1 import embedding_pb2

if TYPE_CHECKING:
    from loadtest.load import Load, ServedModel, Target

MAX_DISTINCT_REQUESTS = 8192  # then they repeat
MAX_DISTINCT_TEXTS = 65_536
MAX_DISTINCT_WORDS = 1 << 22  # 25 MB
MAX_REQUEST_WORDS = 1 << 16  # of a request of the longest texts: a fraction of what a server lets wait

SHORT_WORDS = (4, 20)  # search queries and single sentences
CHUNK_WORDS = (100, 190)  # what retrieval cuts documents into; a word is a token, and 1 in 100 is two
MIXED_MEDIAN_WORDS, MIXED_SIGMA = 50, 1.2  # log-normal: a tenth has 11 words or fewer, a tenth 230 or more
MIXED_LEAST_WORDS, MIXED_MOST_OF_LIMIT = 2, 0.95  # the rest is for special tokens and words of several tokens
TEXTS_PER_REQUEST = {"short": (1, 1), "chunks": (1, 1), "mixed": (1, 32), "bulk": (64, 256)}  # at least, at most


class Request(NamedTuple):
    message: bytes  # a whole HTTP request, or a gRPC message
    texts: int


def encode_requests(load: Load, model: ServedModel, process: int) -> list[Request]:
    """What one sending process sends, in order and then again."""
    rng = np.random.default_rng([load.seed, process])
    texts = read_texts(load.texts_file, rng) if load.texts_file else random_texts(draw_lengths(load, model, rng), rng)
    return [Request(encode(batch, load, model.name), len(batch)) for batch in draw_batches(load, texts, rng)]


def draw_lengths(load: Load, model: ServedModel, rng: np.random.Generator) -> np.ndarray:
    """Words of each distinct text of a run."""
    if load.words is not None:
        words = model.max_input_tokens if load.words == "longest" else load.words
        assert words is not None
        lengths = np.full(MAX_DISTINCT_TEXTS, words)
    elif load.workload == "mixed":
        assert model.max_input_tokens is not None
        drawn = rng.lognormal(np.log(MIXED_MEDIAN_WORDS), MIXED_SIGMA, MAX_DISTINCT_TEXTS).astype(int)
        lengths = np.clip(drawn, MIXED_LEAST_WORDS, int(MIXED_MOST_OF_LIMIT * model.max_input_tokens))
    else:
        least, most = SHORT_WORDS if load.workload == "short" else CHUNK_WORDS
        lengths = rng.integers(least, most + 1, size=MAX_DISTINCT_TEXTS)
    return lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), MAX_DISTINCT_WORDS, side="right")))]


def draw_batches(load: Load, texts: list[str], rng: np.random.Generator) -> list[list[str]]:
    """The texts of each request; in all about as many as `texts`, and one request at least."""
    counts = draw_counts(load, texts, rng)
    total = len(texts) if load.texts_file is None else MAX_DISTINCT_TEXTS  # a short file repeats, in other company
    counts = counts[: max(1, int(np.searchsorted(np.cumsum(counts), total, side="right")))]
    drawn = rng.integers(len(texts), size=int(counts.sum())).tolist()
    ends = np.cumsum(counts).tolist()
    return [
        [texts[index] for index in drawn[end - count : end]] for end, count in zip(ends, counts.tolist(), strict=True)
    ]


def draw_counts(load: Load, texts: list[str], rng: np.random.Generator) -> np.ndarray:
    """Texts of each request: as many as `load` says, or a workload's own, twice as many being half as likely."""
    if load.texts_per_request is not None:
        return np.full(MAX_DISTINCT_REQUESTS, load.texts_per_request)
    least, most = TEXTS_PER_REQUEST[load.workload]
    counts = np.exp(rng.uniform(np.log(least), np.log(most + 1), MAX_DISTINCT_REQUESTS)).astype(int)
    if load.words is not None:
        counts = np.minimum(counts, max(1, MAX_REQUEST_WORDS // len(texts[0].split())))
    return counts


def short_texts(count: int, rng: np.random.Generator) -> list[str]:
    """Search queries and single sentences: 4-20 words, every length as likely as another."""
    least, most = SHORT_WORDS
    return random_texts(rng.integers(least, most + 1, size=count), rng)


def random_texts(lengths: np.ndarray, rng: np.random.Generator) -> list[str]:
    """A text of each of these numbers of words."""
    words = [WORDS[index] for index in rng.integers(len(WORDS), size=int(lengths.sum()))]
    ends = np.cumsum(lengths).tolist()
    return [" ".join(words[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True)]


def read_texts(path: Path, rng: np.random.Generator) -> list[str]:
    """The file's lines that are not blank, at most MAX_DISTINCT_TEXTS of them, drawn at random."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = rng.permutation(len(lines))[:MAX_DISTINCT_TEXTS]
    return [lines[index] for index in chosen]


def encode(texts: list[str], load: Load, model: str | None) -> bytes:
    cut = load.words == "longest"  # by the server, to its limit
    if load.protocol == "grpc":
        return grpc_message(texts, model, cut)
    return http_request(texts, model, load.encoding, cut, load.target)


def grpc_message(texts: list[str], model: str | None, cut: bool) -> bytes:
    truncate = embedding_pb2.TRUNCATE_RIGHT if cut else embedding_pb2.TRUNCATE_UNSPECIFIED
    return embedding_pb2.EmbedRequest(texts=texts, model=model or "", truncate=truncate).SerializeToString()


def http_request(texts: list[str], model: str | None, encoding: str, cut: bool, target: Target) -> bytes:
    fields = {"model": model, "input": texts if len(texts) > 1 else texts[0], "encoding_format": encoding}
    if cut:
        fields["truncate"] = "right"
    body = json.dumps(fields, ensure_ascii=False).encode()
    head = (
        f"POST {target.path} HTTP/1.1\r\nHost: {target.authority}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


WORDS = Path(__file__).with_name("words.txt").read_text(encoding="ascii").split()
