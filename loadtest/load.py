"""What load to send and where: the settings of one run, checked before anything is sent.
Knows no sockets; everything here is plain data."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from pathlib import Path

OPENAI_PATH = "/v1/embeddings"
METRICS_PATH = "/metrics"
QUERY_RATE = 20.0  # a second, under bulk: each is seen alone, and a run of ten seconds has a p99

Workload = Literal["short", "chunks", "mixed", "bulk"]  # which texts, and how many a request: see workloads.py
WORKLOADS: tuple[Workload, ...] = get_args(Workload)


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
    workload: Workload = "short"
    texts_per_request: int | None = None  # None: as many as the workload has
    words: int | Literal["longest"] | None = None  # of each text; longest: cut by the server to all that it takes
    texts_file: Path | None = None  # one text a line; without it, words drawn from a built-in list
    encoding: Literal["float", "base64"] = "float"  # of an HTTP reply
    model: str | None = None  # None: over HTTP, the first that GET /v1/models names; over gRPC, unset
    max_input_tokens: int | None = None  # of the model; None: the server is asked, where the texts depend on it
    channels: int = 4  # gRPC connections in all that the calls are spread over
    seed: int = 0
    processes: int = 1  # that send; the settings above are for all of them together
    server_pid: int | None = None  # of the process whose tree's CPU time is read
    metrics: str | None = None  # http://HOST:PORT whose /metrics are read too; None: over HTTP, the url's
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

    @property
    def metrics_target(self) -> Target | None:
        address = self.metrics or self.url
        return None if address is None else replace(http_target(address), path=METRICS_PATH)

    @property
    def depends_on_limit(self) -> bool:
        """Whether the texts are made to what the model takes."""
        if self.texts_file is not None:
            return False
        return self.words == "longest" or (self.words is None and self.workload == "mixed")


class ServedModel(NamedTuple):
    """What the requests have to say and to keep to."""

    name: str | None  # None: requests name none
    max_input_tokens: int | None  # None: nothing depends on it


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


def queries_under_bulk(load: Load, bulk_connections: int) -> dict[str, Load]:
    """Two classes of senders at once: single short texts at a rate, beside connections that always have bulk in flight.

    What `load` says of the texts of a request is for bulk.
    """
    rate = QUERY_RATE if load.rate is None else load.rate
    return {
        "queries": replace(load, workload="short", rate=rate, texts_per_request=None, words=None),
        "bulk": replace(load, workload="bulk", rate=None, connections=bulk_connections),
    }


def check(load: Load) -> None:
    """Raises LoadError on settings that no run can have, and on a target that is not this machine."""
    if (load.url is None) == (load.grpc is None):
        raise LoadError("Give one target: --url http://HOST:PORT or --grpc HOST:PORT.")
    if not load.allow_remote:
        require_loopback(load.target)
        if load.metrics_target is not None:
            require_loopback(load.metrics_target)
    for name in (
        *("duration_s", "timeout_s", "max_requests", "texts_per_request", "words", "max_input_tokens"),
        *("channels", "processes"),
    ):
        value = getattr(load, name)
        if isinstance(value, int | float) and value <= 0:
            raise LoadError(f"{name} is {value}; it must be above 0.")
    if load.workload not in WORKLOADS:
        raise LoadError(f"The workload {load.workload!r} is none of {', '.join(WORKLOADS)}.")
    if load.warmup_s < 0:
        raise LoadError(f"warmup_s is {load.warmup_s}; it must be 0 or more.")
    if load.rate is not None and load.rate <= 0:
        raise LoadError(f"rate is {load.rate}; it must be above 0 requests a second.")
    if load.texts_file is not None and not (load.texts_file.is_file() and load.texts_file.stat().st_size):
        raise LoadError(f"{load.texts_file} is not a file with texts in it, one a line.")
    if load.texts_file is not None and load.words is not None:
        raise LoadError(f"The texts are those of {load.texts_file} as they are; leave --words out.")
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
