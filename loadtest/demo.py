"""Start a server, embed a few texts over HTTP and over gRPC, compare them, stop it: what `make demo` runs.
Knows the server by its command line and its addresses alone; exits 0 only if all of it worked.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import openai

from embedserve_client import EmbedClient, EmbedError, EmbedResult
from loadtest.load import LoadError
from loadtest.server import HOST, EmbedserveProcess, Server, embedserve_process, stop

if TYPE_CHECKING:
    from collections.abc import Iterator

QUERY = "How do I get my money back?"
DOCUMENTS = [
    "Refunds are paid to the card that you used, within five days.",
    "You can return anything within thirty days of delivery.",
    "The office is closed on public holidays.",
    "Whales are mammals, and they breathe air.",
]
POLL_S = 0.5  # a dot each
SAME = 0.9999  # cosine of one text's two vectors: they come from batches of their own


class DemoError(Exception):
    """Something did not work; the message says what."""


FAILURES = (DemoError, EmbedError, openai.OpenAIError)  # of a server that was ready


def main() -> int:
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = HOST  # no proxy reaches a server on this machine
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exit that stops the server too
    try:
        with running_server() as server:
            texts = [QUERY, *DOCUMENTS]
            over_http = embed_over_http(server.url, texts)
            over_grpc = embed_over_grpc(server.grpc, texts)
            print_similarities(over_http, over_grpc.vectors)
            print_times(over_grpc)
    except (LoadError, *FAILURES) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


@contextmanager
def running_server() -> Iterator[Server]:
    """A server on free ports, ready. Raises LoadError when it does not come to be, DemoError when it does not end well.

    Whatever happens in the body, it is gone afterwards.
    """
    with embedserve_process(()) as started:
        server = wait_until_ready(started)
        try:
            yield server
            stop_server(started)
        except FAILURES:
            print(f"\n\nThe server's log ends so:\n{started.log_end()}", file=sys.stderr)
            raise


def wait_until_ready(started: EmbedserveProcess) -> Server:
    start_s = time.monotonic()
    print("Starting the server on the bundled model, all-MiniLM-L6-v2 ", end="", flush=True)
    while (server := started.server_if_ready()) is None:
        print(".", end="", flush=True)
        time.sleep(POLL_S)
    print(f" ready after {time.monotonic() - start_s:.1f} s")
    print(f"  HTTP {server.url}   gRPC {server.grpc}")
    return server


def embed_over_http(url: str, texts: list[str]) -> np.ndarray:
    """[texts, dims] float32, through OpenAI's own client."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none needed") as client:
        model = client.models.list().data[0].id
        started = time.monotonic()
        reply = client.embeddings.create(model=model, input=texts)
        took_ms = (time.monotonic() - started) * 1000
    vectors = np.array([row.embedding for row in reply.data], dtype=np.float32)
    print(
        f"\nPOST /v1/embeddings, by the openai client: {shape_of(vectors)}, {reply.usage.total_tokens} tokens, ", end=""
    )
    print(f"{took_ms:.1f} ms there and back")
    return vectors


def embed_over_grpc(target: str, texts: list[str]) -> EmbedResult:
    with EmbedClient(target) as client:
        client.embed(texts)  # makes the connection
        started = time.monotonic()
        result = client.embed_full(texts)
        took_ms = (time.monotonic() - started) * 1000
    print(f"gRPC Embed, by embedserve_client: {shape_of(result.vectors)}, {sum(result.token_counts)} tokens, ", end="")
    print(f"{took_ms:.1f} ms there and back")
    return result


def shape_of(vectors: np.ndarray) -> str:
    return f"{vectors.shape[0]} vectors of {vectors.shape[1]}"


def print_similarities(over_http: np.ndarray, over_grpc: np.ndarray) -> None:
    """Raises DemoError when the two protocols' vectors differ by more than rounding."""
    print(f'\nSimilarity to "{QUERY}"\n   HTTP   gRPC')
    for document, by_http, by_grpc in zip(DOCUMENTS, over_http[1:], over_grpc[1:], strict=True):
        print(f"  {cosine(over_http[0], by_http):5.3f}  {cosine(over_grpc[0], by_grpc):5.3f}  {document}")
    worst = min(cosine(by_http, by_grpc) for by_http, by_grpc in zip(over_http, over_grpc, strict=True))
    print(f"The same text's vectors over HTTP and gRPC: cosine at least {worst:.6f}")
    if not worst >= SAME:
        raise DemoError(f"HTTP and gRPC gave different vectors for the same text: cosine {worst:.6f}, not {SAME}")


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def print_times(result: EmbedResult) -> None:
    print("\nWhere the server's time went, in ms")
    for field in fields(result.times):
        print(f"  {field.name.removesuffix('_ms'):9}{getattr(result.times, field.name):8.2f}")


def stop_server(started: EmbedserveProcess) -> None:
    start_s = time.monotonic()
    status = stop(started.process)
    took_s = time.monotonic() - start_s
    if status != 0:
        raise DemoError(f"the server ended with status {status} {took_s:.1f} s after SIGTERM, not with 0")
    print(f"\nStopped the server with SIGTERM: status 0 after {took_s:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
