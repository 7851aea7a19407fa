"""The numbers of one run, from its samples and the CPU time that was used meanwhile.
Arithmetic only: what to count, and by what to divide."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING

import numpy as np

from loadtest.samples import CONNECTION_FAILED, MALFORMED_ANSWER, OK, TIMED_OUT, Samples, percentile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadtest.cpu import ProcessUse
    from loadtest.load import Load
    from loadtest.scrape import ServerMetrics

CLIENT_CODES = {CONNECTION_FAILED: "connection failed", TIMED_OUT: "timed out", MALFORMED_ANSWER: "malformed answer"}


@dataclass(frozen=True)
class LoadResult:
    """Of one class of senders. Requests due in the measured time are counted, each once: `requests` = `ok` + `errors`.

    Rates are of replies that came within the measured time, so that a queue still growing is no throughput.
    Latencies are of the requests that succeeded, from when each was due.
    """

    load: Load
    model: str | None
    window_s: float
    requests: int
    ok: int
    errors: dict[str, int]  # by HTTP status or gRPC code, the most frequent first
    messages: dict[str, str]  # the first that came with each
    requests_per_s: float
    texts_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    sent_late_p99_ms: float  # after it was due: for want of a free connection, or of this generator's time
    cpu_requests: int  # answered, well or not, while CPU time was read
    client: tuple[ProcessUse, ...]
    server: tuple[ProcessUse, ...]  # for all classes; empty without a server_pid
    server_requests: int  # as cpu_requests, of all classes
    metrics: ServerMetrics | None  # for all classes; None when the server has none of embedserve's
    latencies_ms: np.ndarray = field(repr=False)  # [ok], in the order in which they were due

    @property
    def client_us_per_request(self) -> float:
        return us_each(sum(process.cpu_s for process in self.client), self.cpu_requests)

    @property
    def client_busy(self) -> float:
        """Of one core, by the busiest sending process. Above 0.8 it is the generator that is measured."""
        return max(process.cpu_s for process in self.client) / self.window_s

    @property
    def server_us_per_request(self) -> float:
        """CPU time of the whole tree. NaN without a server_pid."""
        return self.server_us(sum(process.cpu_s for process in self.server)) if self.server else float("nan")

    def server_us(self, cpu_s: float) -> float:
        """This CPU time of the server, a request."""
        return us_each(cpu_s, self.server_requests)


def summarise(
    load: Load,
    model: str | None,
    samples: Samples,
    window: tuple[float, float],
    client: tuple[ProcessUse, ...],
    server: tuple[ProcessUse, ...],
) -> LoadResult:
    """Of a class that has the server for itself; `together` is for several.

    `window` is the measured time, as time.monotonic() of its ends; the CPU time is of that time too.
    """
    start_s, end_s = window
    done = samples.due_from(start_s)
    succeeded = done.code == OK
    latencies_ms = (done.done_s - done.due_s)[succeeded] * 1e3
    in_window = (samples.done_s >= start_s) & (samples.done_s < end_s)
    answered = in_window & (samples.code == OK)
    cpu_requests = int(np.count_nonzero(in_window & (samples.code != CONNECTION_FAILED)))
    codes, counts = np.unique(done.code[~succeeded], return_counts=True)
    by_count = sorted(zip(codes.tolist(), counts.tolist(), strict=True), key=lambda pair: -pair[1])
    return LoadResult(
        load=load,
        model=model,
        window_s=end_s - start_s,
        requests=len(done),
        ok=len(latencies_ms),
        errors={code_name(load, code): count for code, count in by_count},
        messages={code_name(load, code): samples.messages[code] for code, _ in by_count},
        requests_per_s=np.count_nonzero(answered) / (end_s - start_s),
        texts_per_s=int(samples.texts[answered].sum()) / (end_s - start_s),
        p50_ms=percentile(latencies_ms, 50),
        p90_ms=percentile(latencies_ms, 90),
        p99_ms=percentile(latencies_ms, 99),
        max_ms=percentile(latencies_ms, 100),
        sent_late_p99_ms=percentile((done.sent_s - done.due_s) * 1e3, 99),
        cpu_requests=cpu_requests,
        client=client,
        server=server,
        server_requests=cpu_requests,
        metrics=None,
        latencies_ms=latencies_ms,
    )


def together(results: Mapping[str, LoadResult], metrics: ServerMetrics | None) -> dict[str, LoadResult]:
    """Of classes that one server had at the same time: what it used and what it tells is for all of them."""
    requests = sum(result.cpu_requests for result in results.values())
    return {name: replace(result, server_requests=requests, metrics=metrics) for name, result in results.items()}


def us_each(cpu_s: float, requests: int) -> float:
    return cpu_s * 1e6 / requests if requests else float("nan")


def code_name(load: Load, code: int) -> str:
    if code in CLIENT_CODES:
        return CLIENT_CODES[code]
    if load.protocol == "grpc":
        import grpc  # takes as long to import as all the rest

        return next(status.name for status in grpc.StatusCode if status.value[0] == code)
    try:
        return f"{code} {HTTPStatus(code).phrase}"
    except ValueError:
        return str(code)
