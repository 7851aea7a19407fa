"""`python -m loadtest.lanes`: what queries wait while the server is full of bulk, beside the bound they are held to.
Orders the measurements and prints them; the server runs in a process of its own, with the settings it is shipped with.

Each round measures queries alone, bulk alone, and both. Queries are single short texts at random times, their latency
from when each was due; bulk comes from connections that send again when they are answered, so that some always waits.
What ran of bulk is read from the server's metrics, forward by forward: a request of it may outlast a measurement.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from embedserve.config import Config
from loadtest import report
from loadtest.load import QUERY_RATE, Load, LoadError
from loadtest.run import run_load, run_together, served_model
from loadtest.server import embedserve_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.result import LoadResult
    from loadtest.scrape import ServerMetrics
    from loadtest.server import Server

BUNDLED_BOUND_MS = 60.0
QUERY_SHARE = 0.1  # of what one connection gets alone: the rate of a model that is too slow for QUERY_RATE
PROBE_S = 3.0
TIMEOUT_S = Config().request_timeout_s + 10  # the server gives up first, and says so
LONGEST_TOKENS_IN_FLIGHT = 1 << 16
MOST_CONNECTIONS, LEAST_CONNECTIONS = 4, 2  # of bulk: one request runs, one waits


@dataclass(frozen=True)
class Round:
    queries_alone: LoadResult
    bulk_alone: LoadResult
    queries: LoadResult  # under bulk
    bulk: LoadResult  # beside the queries


@dataclass(frozen=True)
class Figures:
    """Of a round, or medians over rounds."""

    queries: float  # answered, under bulk: what its percentiles are of
    alone_p50_ms: float
    alone_p90_ms: float
    alone_p99_ms: float
    p50_ms: float  # of queries under bulk, as all that follow
    p90_ms: float
    p99_ms: float
    own_forward_ms: float  # of a query alone, on average
    alone_bulk_texts_per_s: float
    bulk_texts_per_s: float
    bulk_share: float  # of the tokens


def main(arguments: Sequence[str] | None = None) -> int:
    """0, whether or not the bound is met; 1 when a measurement could not be taken."""
    options = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the server is stopped
    try:
        with embedserve_server(server_arguments(options)) as server:
            queries, bulk = loads(server, options)
            rounds = [
                take_round(queries, bulk, f"{number + 1} of {options.rounds}") for number in range(options.rounds)
            ]
        figures = medians([figures_of(each) for each in rounds])
    except LoadError as error:
        print(error, file=sys.stderr)
        return 1
    bound_ms = BUNDLED_BOUND_MS if options.model is None else figures.alone_p99_ms + Config().batch_ms_limit
    print(as_text(queries, bulk, rounds, figures, bound_ms))
    if options.json is not None:
        report.write_json(options.json, as_json(rounds, figures, bound_ms, options))
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lanes",
        description="Query latency under saturating bulk, at the shipped settings.",
        epilog=f"The bound on the p99 of queries under bulk is {BUNDLED_BOUND_MS:g} ms for the bundled model, and for "
        "any other their p99 without bulk plus one --max-batch-ms.",
    )
    parser.add_argument("--model", help="a local folder or a hub id; without it, the bundled model")
    parser.add_argument("--load-format", choices=("auto", "dummy"), help="as of `embedserve serve`")
    parser.add_argument("--protocol", choices=("http", "grpc"), default="http")
    parser.add_argument(
        "--bulk",
        choices=("chunks", "longest"),
        help="its texts: of 100-190 words, 64-256 a request, or the longest that the model takes; if not given, chunks "
        "for the bundled model, the longest for another",
    )
    parser.add_argument("--bulk-connections", type=int, help=f"at most {MOST_CONNECTIONS}, if not given")
    parser.add_argument(
        "--rate",
        type=float,
        help=f"queries a second; if not given {QUERY_RATE:g}, or {QUERY_SHARE:g} of what one connection gets alone "
        "where that is less",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duration-s", type=float, default=15.0, help="of one measurement")
    parser.add_argument("--warmup-s", type=float, default=3.0, help="before each, not counted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's numbers there too")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def server_arguments(options: argparse.Namespace) -> list[str]:
    arguments = [] if options.model is None else [options.model]
    return arguments if options.load_format is None else [*arguments, "--load-format", options.load_format]


def loads(server: Server, options: argparse.Namespace) -> tuple[Load, Load]:
    """Queries, then bulk."""
    limit = served_model(Load(url=server.url, words="longest")).max_input_tokens
    assert limit is not None
    base = Load(
        url=server.url if options.protocol == "http" else None,
        grpc=server.grpc if options.protocol == "grpc" else None,
        metrics=server.url,
        max_input_tokens=limit,
        duration_s=options.duration_s,
        warmup_s=options.warmup_s,
        timeout_s=TIMEOUT_S,
    )
    bulk = replace(base, workload="bulk", connections=MOST_CONNECTIONS)
    if (options.bulk or ("chunks" if options.model is None else "longest")) == "longest":
        bulk = longest_bulk(bulk, limit)
    if options.bulk_connections is not None:
        bulk = replace(bulk, connections=options.bulk_connections)
    return replace(base, rate=options.rate or query_rate(base)), bulk


def longest_bulk(bulk: Load, limit: int) -> Load:
    """Inputs of `limit` tokens, few enough in flight for each request to be answered before its time is up."""
    connections = max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, LONGEST_TOKENS_IN_FLIGHT // limit))
    texts = max(1, LONGEST_TOKENS_IN_FLIGHT // (connections * limit))
    return replace(bulk, words="longest", connections=connections, texts_per_request=texts)


def query_rate(base: Load) -> float:
    """Low enough for most queries to find no other: what is looked for is what bulk does to them."""
    print("queries alone, one at a time", file=sys.stderr)
    alone = run_load(replace(base, connections=1, duration_s=PROBE_S))
    if alone.ok == 0:
        raise LoadError(f"No query was answered: {alone.errors} {alone.messages}")
    return min(QUERY_RATE, QUERY_SHARE * alone.requests_per_s)


def take_round(queries: Load, bulk: Load, number: str) -> Round:
    print(f"round {number}: queries alone", file=sys.stderr)
    queries_alone = run_load(queries)
    print(f"round {number}: bulk alone", file=sys.stderr)
    bulk_alone = run_load(bulk)
    print(f"round {number}: both", file=sys.stderr)
    both = run_together({"queries": queries, "bulk": bulk})
    return Round(queries_alone, bulk_alone, both["queries"], both["bulk"])


def figures_of(taken: Round) -> Figures:
    """Raises LoadError when no query was answered, or the server did not tell what it ran."""
    alone, under = taken.queries_alone, taken.queries
    if alone.ok == 0 or under.ok == 0:
        raise LoadError(f"No query was answered: {alone.errors or under.errors} {alone.messages or under.messages}")
    ran_alone, ran_bulk, ran = metrics_of(alone), metrics_of(taken.bulk_alone), metrics_of(under)
    tokens_per_query = ran_alone.batch_tokens.total / ran_alone.batch_inputs.total
    tokens_per_s = ran.batch_tokens.total / ran.seconds
    return Figures(
        queries=under.ok,
        alone_p50_ms=alone.p50_ms,
        alone_p90_ms=alone.p90_ms,
        alone_p99_ms=alone.p99_ms,
        p50_ms=under.p50_ms,
        p90_ms=under.p90_ms,
        p99_ms=under.p99_ms,
        own_forward_ms=ran_alone.stage_ms["query"]["forward"],
        alone_bulk_texts_per_s=ran_bulk.batch_inputs.total / ran_bulk.seconds,
        bulk_texts_per_s=max(0.0, ran.batch_inputs.total / ran.seconds - under.texts_per_s),
        bulk_share=max(0.0, 1 - under.texts_per_s * tokens_per_query / tokens_per_s),
    )


def metrics_of(result: LoadResult) -> ServerMetrics:
    if result.metrics is None:
        raise LoadError("The server's /metrics could not be read, or it began anew in the midst of a measurement.")
    return result.metrics


def medians(figures: Sequence[Figures]) -> Figures:
    return Figures(*(median(getattr(each, field.name) for each in figures) for field in fields(Figures)))


def as_text(queries: Load, bulk: Load, rounds: Sequence[Round], figures: Figures, bound_ms: float) -> str:
    header = ("", "p50 ms", "p90 ms", "p99 ms", "bulk texts/s", "bulk's share of the tokens")
    alone = (figures.alone_p50_ms, figures.alone_p90_ms, figures.alone_p99_ms)
    under = (figures.p50_ms, figures.p90_ms, figures.p99_ms)
    rows = [
        ["queries alone", *(f"{latency:.1f}" for latency in alone), "", ""],
        ["bulk alone", "", "", "", f"{figures.alone_bulk_texts_per_s:.1f}", ""],
        [
            "queries under bulk",
            *(f"{latency:.1f}" for latency in under),
            f"{figures.bulk_texts_per_s:.1f}",
            f"{figures.bulk_share:.0%}",
        ],
    ]
    failed = sum(result.requests - result.ok for each in rounds for result in vars(each).values())
    verdict = "met" if figures.p99_ms <= bound_ms else "not met"
    return "\n".join(
        (
            f"{rounds[0].queries.model or 'embedserve'}, shipped settings, {queries.protocol}, {os.cpu_count()} cores. "
            f"Medians over rounds ({len(rounds)}) of {queries.duration_s:g} s, {figures.queries:g} queries in each.",
            f"queries: {report.describe_texts(queries)}, {queries.rate:.3g}/s",
            f"bulk: {report.describe_texts(bulk)}, {bulk.connections} connections",
            "",
            report.table(header, rows),
            "",
            f"The forward of a query alone: {figures.own_forward_ms:.1f} ms; --max-batch-ms: "
            f"{Config().batch_ms_limit:g}; requests that failed: {failed}.",
            f"p99 of queries under bulk: {figures.p99_ms:.1f} ms; the bound is {bound_ms:.1f} ms: {verdict}.",
        )
    )


def as_json(rounds: Sequence[Round], figures: Figures, bound_ms: float, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "settings": vars(options),
        "figures": asdict(figures),
        "bound_ms": bound_ms,
        "met": figures.p99_ms <= bound_ms,
        "rounds": [{name: report.as_json(result) for name, result in vars(each).items()} for each in rounds],
    }


if __name__ == "__main__":
    sys.exit(main())
