"""The shape of Qwen3-Embedding-0.6B with random weights: that it serves over both protocols, in what memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
import pytest
from servers import ANY_SIZE, Embed, assert_alike, grpc_vectors, http_vectors, start_server

from embedserve.model.decoder import Qwen3Config, Qwen3Decoder
from embedserve.model.folder import read_folder
from loadtest.qwen3 import write_folder

pytestmark = pytest.mark.large

WEIGHTS_FACTOR = 1.2
BYTES_A_WEIGHT = 2  # bfloat16
REQUESTS = [["a"], ["how much is it"] * 64, ["some sixty words of which this is one " * 8] * 16, ["word " * 2000]]


def test_0_6b_serves_within_its_memory(tmp_path: Path) -> None:
    write_folder(tmp_path / "q06", "0.6b")
    config = Qwen3Config.from_json(read_folder(tmp_path / "q06").config)
    weights = BYTES_A_WEIGHT * sum(map(prod, Qwen3Decoder.tensor_shapes(config).values()))
    bound = WEIGHTS_FACTOR * weights + anonymous_bytes_of_importing_torch()
    with (
        watching_engines() as peak,
        start_server(str(tmp_path / "q06"), "--load-format", "dummy", "--dtype", "bfloat16") as server,
        grpc.insecure_channel(server.grpc_target, options=ANY_SIZE) as channel,
    ):
        print(f"ready; the engine had {peak[0] / 2**20:.0f} MiB at most")
        for texts in REQUESTS:
            reply = httpx.post(server.http_url + "/v1/embeddings", json={"input": texts}, timeout=60)
            vectors = http_vectors(reply)
            assert vectors.shape == (len(texts), 1024)
            np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
            assert_alike(grpc_vectors(Embed(channel)(texts=texts)), vectors)
            print(f"{len(texts)} texts; {peak[0] / 2**20:.0f} MiB; the bound is {bound / 2**20:.0f} MiB")
    assert weights < peak[0] <= bound


def anonymous_bytes_of_importing_torch() -> int:
    program = "import torch; print(open('/proc/self/status').read())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return anonymous_bytes(told)


@contextmanager
def watching_engines() -> Iterator[list[int]]:
    """The most anonymous memory, in bytes, that any engine below this process had so far, read 100 times a second."""
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            for process in psutil.Process().children(recursive=True):
                try:
                    if process.cmdline()[:1] and process.cmdline()[0].startswith("embedserve: engine"):
                        peak[0] = max(peak[0], anonymous_bytes(Path(f"/proc/{process.pid}/status").read_text()))
                except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                    continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def anonymous_bytes(status: str) -> int:
    """Of a /proc/PID/status; 0 for a process that has ended."""
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")), 0)
