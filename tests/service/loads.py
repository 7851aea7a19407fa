"""A steady load over both protocols that checks every vector, beside whatever a test does to the server.

Knows texts, their clean vectors and the ways a request may end; not what the test does.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle

import grpc
import httpx
import numpy as np
from servers import ANY_SIZE, OWN_CONNECTION, Embed, Server, grpc_vectors, http_vectors

TEXTS = [f"the {word} of the {other}" for word in ("colour", "price", "weight") for other in ("house", "sea", "law")]
LONG_TEXT = "every one of these words is a token of its own and there are many of them " * 14  # 239 tokens or so
LEAST_COSINE = 0.9999  # to what the same server gave in peace; batches differ by rounding


@dataclass
class Load:
    """`answers` counts how requests ended: "http 200", "grpc OK", "http 503", "http ConnectError", ..."""

    clean: np.ndarray
    answers: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def send(self, name: str, one: Callable[[str], np.ndarray]) -> None:
        for index in cycle(range(len(TEXTS))):
            if self.stop.is_set():
                return
            started = time.monotonic()
            try:
                vector = one(TEXTS[index])
            except Refused as refused:
                self.answers[f"{name} {refused}"] += 1
                time.sleep(0.02)  # as a client does that was refused
            else:
                self.answers[f"{name} good"] += 1
                if float(vector @ self.clean[index]) < LEAST_COSINE:
                    self.wrong.append(f"{name}: {TEXTS[index]}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)

    @property
    def good(self) -> int:
        return self.answers["http good"] + self.answers["grpc good"]


class Refused(Exception):
    """How a request failed, in a word or two."""


@contextmanager
def steady_load(server: Server, callers: int = 2) -> Iterator[Load]:
    """So many callers of each protocol, one request at a time each. Every vector that they get must be right."""
    load = Load(clean_vectors(server))
    sending = [(name, one) for name, one in (("http", over_http), ("grpc", over_grpc)) for _ in range(callers)]
    threads = [threading.Thread(target=_send, args=(load, name, one, server)) for name, one in sending]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a caller was never answered"
    assert load.wrong == []
    assert load.good, load.answers


def clean_vectors(server: Server) -> np.ndarray:
    with over_http(server) as one:
        return np.stack([one(text) for text in TEXTS])


def _send(load: Load, name: str, over: Callable, server: Server) -> None:
    with over(server) as one:
        load.send(name, one)


@contextmanager
def over_http(server: Server) -> Iterator[Callable[[str], np.ndarray]]:
    with httpx.Client(base_url=server.http_url, timeout=60) as client:

        def one(text: str) -> np.ndarray:
            try:
                reply = client.post("/v1/embeddings", json={"input": text, "encoding_format": "base64"})
            except httpx.TransportError as error:
                raise Refused(type(error).__name__) from error
            if reply.status_code != 200:
                raise Refused(str(reply.status_code))
            return http_vectors(reply)[0]

        yield one


@contextmanager
def over_grpc(server: Server) -> Iterator[Callable[[str], np.ndarray]]:
    with grpc.insecure_channel(server.grpc_target, options=ANY_SIZE + OWN_CONNECTION) as channel:
        embed = Embed(channel)

        def one(text: str) -> np.ndarray:
            try:
                return grpc_vectors(embed(texts=[text]))[0]
            except grpc.RpcError as error:
                raise Refused(error.code().name) from error

        yield one


def metric(server: Server, name: str, label: str = "") -> float:
    """The sum of a metric's series, over all processes; only those with this label, as `code="429"`."""
    lines = httpx.get(server.http_url + "/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.split("[{ ]", line)[0] == name and label in line)


def wait_until(condition: Callable[[], bool], within_s: float) -> float:
    """How long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, "it never came to be"
        time.sleep(0.005)
    return time.monotonic() - started
