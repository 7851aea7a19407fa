"""What load to send and where: the settings of one run, checked before anything is sent.
Knows no sockets; everything here is plain data."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from pathlib import Path

OPENAI_PATH = "/v1/embeddings"


class LoadError(Exception):
    """The load cannot be sent as asked. The message says what to change."""


@dataclass(frozen=True)
class Load:
    """One run against one server: give `url` or `grpc`. Without `rate` it is a closed loop.

    In a closed loop each connection sends its next request when the last is answered. In an open loop requests are
    due at random times (Poisson, `rate` a second in all), and each waits, from then on, for one of `connections`.
    """

    url: str | None = None  # http://HOST:PORT, or with the path of an OpenAI-compatible route
    grpc: str | None = None  # HOST:PORT
    connections: int = 32  # over gRPC: calls in flight
    rate: float | None = None  # requests a second
    duration_s: float = 10.0
    warmup_s: float = 2.0  # sent before that, not counted
    timeout_s: float = 30.0  # of one request, from when it is sent
    max_requests: int = 1_000_000  # in the warm-up, and again in the measured time
    texts_per_request: int = 1
    texts_file: Path | None = None  # one text a line; without it, 4-20 words drawn from a built-in list
    encoding: Literal["float", "base64"] = "float"  # of an HTTP reply
    model: str | None = None  # None: over HTTP, the first that GET /v1/models names; over gRPC, unset
    channels: int = 4  # gRPC connections in all that the calls are spread over
    seed: int = 0
    processes: int = 1  # that send; the settings above are for all of them together
    server_pid: int | None = None  # of the process whose tree's CPU time is read
    allow_remote: bool = False

    @property
    def protocol(self) -> Literal["http", "grpc"]:
        return "http" if self.url is not None else "grpc"

    @property
    def target(self) -> Target:
        if self.url is not None:
            return http_target(self.url)
        assert self.grpc is not None
        return grpc_target(self.grpc)


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    path: str = ""

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"http://{self.authority}{self.path}" if self.path else self.authority


def check(load: Load) -> None:
    """Raises LoadError on settings that no run can have, and on a target that is not this machine."""
    if (load.url is None) == (load.grpc is None):
        raise LoadError("Give one target: --url http://HOST:PORT or --grpc HOST:PORT.")
    if not load.allow_remote:
        require_loopback(load.target)
    for name in ("duration_s", "timeout_s", "max_requests", "texts_per_request", "channels", "processes"):
        if getattr(load, name) <= 0:
            raise LoadError(f"{name} is {getattr(load, name)}; it must be above 0.")
    if load.warmup_s < 0:
        raise LoadError(f"warmup_s is {load.warmup_s}; it must be 0 or more.")
    if load.rate is not None and load.rate <= 0:
        raise LoadError(f"rate is {load.rate}; it must be above 0 requests a second.")
    if load.texts_file is not None and not (load.texts_file.is_file() and load.texts_file.stat().st_size):
        raise LoadError(f"{load.texts_file} is not a file with texts in it, one a line.")
    if load.connections < load.processes:
        raise LoadError(f"{load.processes} processes cannot share {load.connections} connections; each needs one.")


def http_target(url: str) -> Target:
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise LoadError(f"The target {url} is not http://HOST:PORT; https is not supported.")
    host, port = host_and_port(url, parts.netloc, default_port=80)
    path = parts.path if parts.path not in ("", "/") else OPENAI_PATH
    return Target(host, port, path)


def grpc_target(address: str) -> Target:
    host, port = host_and_port(address, address, default_port=None)
    return Target(host, port)


def host_and_port(given: str, netloc: str, default_port: int | None) -> tuple[str, int]:
    parts = urlsplit(f"//{netloc}")
    try:
        port = parts.port if parts.port is not None else default_port
    except ValueError:
        port = None
    if parts.netloc != netloc or not parts.hostname or port is None:
        raise LoadError(f"The target {given} does not name a host and a port, as 127.0.0.1:8080 does.")
    return parts.hostname, port


def require_loopback(target: Target) -> None:
    if not is_loopback(target.host):
        raise LoadError(
            f"{target.host} is not this machine's loopback address. Send the load from the machine that serves, "
            "to 127.0.0.1, or say --allow-remote if that server is yours to load."
        )


def is_loopback(host: str) -> bool:
    """By the address itself; of names only localhost, so that nothing is looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
