"""The server's own account of a run: what its /metrics counted between two scrapes.
Knows embedserve's metrics by name; a server without them has no account to give, which is no error."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.load import Target

TIMEOUT_S = 10.0
PREFIX = "embedserve_"
Labels = tuple[tuple[str, str], ...]  # (name, value), by name
Grown = dict[tuple[str, Labels], float]  # what each series grew by between two scrapes


@dataclass(frozen=True)
class Scrape:
    at_s: float  # time.monotonic()
    values: dict[tuple[str, Labels], float]


@dataclass(frozen=True)
class Spread:
    """Of what a histogram counted. Its percentiles are interpolated in its buckets; NaN when it counted nothing."""

    count: int
    total: float
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class ServerMetrics:
    """Of the time between two scrapes, for all that was sent to the server in it."""

    seconds: float
    batch_tokens: Spread  # of each forward
    batch_inputs: Spread
    starved: float  # of the time, the share in which the device was idle while work waited
    busy: dict[str, float]  # by thread, the share in which it did not wait
    stage_ms: dict[str, dict[str, float]]  # by lane and stage, the mean over the requests answered

    @property
    def forwards_per_s(self) -> float:
        return self.batch_tokens.count / self.seconds


def read(target: Target | None) -> Scrape | None:
    """None when there is no target, no answer, or nothing of embedserve's in it."""
    if target is None:
        return None
    connection = HTTPConnection(target.host, target.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", target.path)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
        return parse(text, time.monotonic()) if response.status == 200 else None
    except (OSError, HTTPException, ValueError):  # ValueError: what came is not Prometheus's format
        return None
    finally:
        connection.close()


def parse(text: str, at_s: float) -> Scrape | None:
    families = text_string_to_metric_families(text)
    values = {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in families
        if family.name.startswith(PREFIX)
        for sample in family.samples
    }
    return Scrape(at_s, values) if values else None


def between(before: Scrape | None, after: Scrape | None) -> ServerMetrics | None:
    """None when a scrape is missing, or when the server began anew meanwhile, so that its counts fell."""
    if before is None or after is None:
        return None
    seconds = after.at_s - before.at_s
    grown = {key: value - before.values.get(key, 0.0) for key, value in after.values.items()}
    if any(growth < 0 for (name, _), growth in grown.items() if name.endswith(("_count", "_total"))):
        return None
    seconds_of = {dict(labels)["thread"]: growth for labels, growth in of(grown, "thread_busy_seconds_total")}
    return ServerMetrics(
        seconds=seconds,
        batch_tokens=spread(grown, "batch_tokens"),
        batch_inputs=spread(grown, "batch_inputs"),
        starved=sum(growth for _, growth in of(grown, "engine_starved_seconds_total")) / seconds,
        busy={thread: busy_s / seconds for thread, busy_s in seconds_of.items()},
        stage_ms=stage_means(grown),
    )


def of(grown: Grown, name: str) -> list[tuple[Labels, float]]:
    return [(labels, growth) for (its_name, labels), growth in grown.items() if its_name == PREFIX + name]


def spread(grown: Grown, name: str) -> Spread:
    """Of a histogram without labels but its buckets'."""
    count = sum(growth for _, growth in of(grown, name + "_count"))
    total = sum(growth for _, growth in of(grown, name + "_sum"))
    at_most = sorted((float(dict(labels)["le"]), growth) for labels, growth in of(grown, name + "_bucket"))
    p50, p90, p99 = (percentile(at_most, percent) for percent in (50, 90, 99))
    return Spread(int(count), total, total / count if count else math.nan, p50, p90, p99)


def percentile(at_most: Sequence[tuple[float, float]], percent: float) -> float:
    """Of a histogram's (upper bound, how many are not above it), by bound, as Prometheus's histogram_quantile has it:
    as if the values of a bucket were spread evenly in it; above the last finite bound, that bound."""
    rank = percent / 100 * (at_most[-1][1] if at_most else 0)
    low, below = 0.0, 0.0
    for bound, count in at_most:
        if count >= rank > 0:
            return low if bound == math.inf else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return math.nan


def stage_means(grown: Grown) -> dict[str, dict[str, float]]:
    """Milliseconds, by lane and stage; a stage through which no request came is left out."""
    sums = dict(of(grown, "stage_seconds_sum"))
    means: dict[str, dict[str, float]] = defaultdict(dict)
    for labels, count in of(grown, "stage_seconds_count"):
        if count:
            means[dict(labels)["lane"]][dict(labels)["stage"]] = sums[labels] / count * 1e3
    return dict(means)
