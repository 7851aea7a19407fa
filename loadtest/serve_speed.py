"""`python -m loadtest.serve_speed`: how fast the server is, beside its own bare forward and beside a peer, in one run.
Orders the measurements and compares their medians; loads and servers are made elsewhere.

All that is compared is measured in turn, A B A B, because a shared machine drifts by more than the differences
looked for: each ratio is taken within a round, and what is reported is its median over the rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import socket
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from loadtest import peers, report
from loadtest.bare import BareSpeed, Question, bare_forward, model_folder
from loadtest.run import Load, LoadError, LoadResult, run_load
from loadtest.server import Server, awake, embedserve_server, pause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

HTTP_CONNECTIONS = (1, 32, 128)
GRPC_CALLS = 32
BARE_ROWS = (1, 32)  # of a batch: what is in flight with as many connections
P50_FACTOR, P50_EXTRA_MS = 1.5, 1.0  # what serving may add to the latency of a single text


@dataclass(frozen=True)
class Measurement:
    """One line of the report, taken once a round."""

    name: str
    take: Callable[[], BareSpeed | LoadResult]


Round = dict[str, BareSpeed | LoadResult]


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 when a measurement could not be taken or requests failed."""
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the servers are stopped
    try:
        rounds = measure(options)
    except (LoadError, peers.PeerError) as error:
        print(error, file=sys.stderr)
        return 1
    print(as_text(rounds, options.peer))
    if options.json is not None:
        report.write_json(options.json, as_json(rounds, options))
    failed = sum(reading.requests - reading.ok for readings in rounds for reading in loads(readings))
    if failed:
        print(f"{failed} requests failed; the JSON says how.", file=sys.stderr)
    return 1 if failed else 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.serve_speed",
        description="Measure embedserve beside its bare forward and beside a peer, in turn.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", help="a local folder; without it, the bundled model")
    parser.add_argument("--dtype", default="auto", help="of the bare forward and of embedserve")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of either's forward")
    parser.add_argument("--rounds", type=int, default=3, help="of all measurements")
    parser.add_argument("--duration-s", type=float, default=4.0, help="of one measurement")
    parser.add_argument("--warmup-s", type=float, default=1.0, help="before each, not counted")
    parser.add_argument("--encoding", choices=("float", "base64"), default="float", help="of vectors over HTTP")
    parser.add_argument("--peer", choices=sorted(peers.PEERS), help="another server, on the same model and texts")
    parser.add_argument("--peer-dir", type=Path, metavar="DIR", help="where `loadtest.peers install` put it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's numbers there too")
    options = parser.parse_args(arguments)
    if options.peer is not None and options.peer_dir is None:
        parser.error("--peer needs --peer-dir")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def measure(options: argparse.Namespace) -> list[Round]:
    """Start everything once, then take all measurements, round after round; what is not measured sleeps."""
    with ExitStack() as stack:
        bare = stack.enter_context(bare_forward(options.model, options.dtype, options.threads))
        servers = {"": start_embedserve(stack, options)}
        if options.peer is not None:
            servers[f"{options.peer} "] = start_peer(stack, options)
        measurements = list(plan(bare, servers, options))
        rounds = []
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
            rounds.append({measurement.name: measurement.take() for measurement in measurements})
        return rounds


def start_embedserve(stack: ExitStack, options: argparse.Namespace) -> Server:
    model = [] if options.model is None else [options.model]
    server = stack.enter_context(
        embedserve_server([*model, "--dtype", options.dtype, "--threads", str(options.threads)])
    )
    pause(server.pid)
    return server


def start_peer(stack: ExitStack, options: argparse.Namespace) -> Server:
    running = stack.enter_context(
        peers.peer_server(options.peer, options.peer_dir, model_folder(options.model), free_port())
    )
    pause(running.pid)
    return Server(running.base_url, "", running.pid)


def plan(
    bare: Callable[[Question], BareSpeed], servers: Mapping[str, Server], options: argparse.Namespace
) -> Iterator[Measurement]:
    """One round, in order: what is compared follows each other. `servers` by what to write before their names."""
    for connections in HTTP_CONNECTIONS:
        if connections in BARE_ROWS:
            yield bare_measurement(bare, connections, options.duration_s)
        for prefix, server in servers.items():
            load = Load(url=server.url, connections=connections, encoding=options.encoding)
            yield load_measurement(prefix + http_name(connections), load, server, options)
            if server.grpc and connections == GRPC_CALLS:
                yield load_measurement(GRPC_NAME, Load(grpc=server.grpc, connections=GRPC_CALLS), server, options)


def bare_measurement(bare: Callable[[Question], BareSpeed], rows: int, duration_s: float) -> Measurement:
    return Measurement(bare_name(rows), lambda: bare(Question(rows, duration_s)))


def load_measurement(name: str, load: Load, server: Server, options: argparse.Namespace) -> Measurement:
    timed = replace(load, duration_s=options.duration_s, warmup_s=options.warmup_s, server_pid=server.pid)

    def take() -> LoadResult:
        with awake(server.pid):
            result = run_load(timed)
        if result.ok == 0:
            raise LoadError(f"{name}: no request succeeded: {result.errors} {result.messages}")
        return result

    return Measurement(name, take)


def bare_name(rows: int) -> str:
    return "bare forward, 1 text" if rows == 1 else f"bare forward, {rows} texts"


def http_name(connections: int) -> str:
    return f"HTTP, {connections} connection{'s' if connections > 1 else ''}"


GRPC_NAME = f"gRPC, {GRPC_CALLS} calls in flight"


def as_text(rounds: Sequence[Round], peer: str | None) -> str:
    header = ("", "texts/s", "lowest", "highest", "p50 ms", "p99 ms", "CPU us/request")
    rows = [row(name, [readings[name] for readings in rounds]) for name in rounds[0]]
    ratios = [(name, f"{value:.2f}") for name, value in compare(rounds, peer).items()]
    return "\n".join(
        (
            f"Medians over rounds ({len(rounds)}), all measured in turn; what was not measured was paused (SIGSTOP).",
            "One text of 4-20 words a request; the bare forward gets the same texts, already tokenized.",
            "",
            report.table(header, rows),
            "",
            report.table(("median over the rounds", ""), ratios),
        )
    )


def row(name: str, readings: Sequence[BareSpeed | LoadResult]) -> list[str]:
    rates = [reading.texts_per_s for reading in readings]
    cpu_us = [reading.server_us_per_request for reading in readings if isinstance(reading, LoadResult)]
    return [
        name,
        f"{median(rates):.0f}",
        f"{min(rates):.0f}",
        f"{max(rates):.0f}",
        f"{median(reading.p50_ms for reading in readings):.2f}",
        f"{median(reading.p99_ms for reading in readings):.2f}",
        f"{median(cpu_us):.0f}" if cpu_us else "",
    ]


def compare(rounds: Sequence[Round], peer: str | None) -> dict[str, float]:
    """Each ratio within a round, its median over the rounds."""

    def rate_ratio(name: str, other: str) -> float:
        return median(readings[name].texts_per_s / readings[other].texts_per_s for readings in rounds)

    served, bare = http_name(32), bare_name(32)
    ratios = {f"{served} / {bare}": rate_ratio(served, bare), f"{GRPC_NAME} / {bare}": rate_ratio(GRPC_NAME, bare)}
    if peer is not None:
        for name in map(http_name, HTTP_CONNECTIONS):
            ratios[f"{name}: embedserve / {peer}"] = rate_ratio(name, f"{peer} {name}")
    ratios[f"p50 of 1 connection / ({P50_FACTOR:g} x bare + {P50_EXTRA_MS:g} ms); 1 or less is wanted"] = median(
        readings[http_name(1)].p50_ms / (P50_FACTOR * readings[bare_name(1)].p50_ms + P50_EXTRA_MS)
        for readings in rounds
    )
    return ratios


def as_json(rounds: Sequence[Round], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "settings": vars(options),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()},
        "ratios": compare(rounds, options.peer),
        "rounds": [{name: reading_json(reading) for name, reading in readings.items()} for readings in rounds],
    }


def reading_json(reading: BareSpeed | LoadResult) -> Mapping[str, Any]:
    return report.as_json(reading) if isinstance(reading, LoadResult) else asdict(reading)


def loads(readings: Round) -> list[LoadResult]:
    return [reading for reading in readings.values() if isinstance(reading, LoadResult)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
