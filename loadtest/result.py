"""The numbers of one run, from its samples and the CPU time that was used meanwhile.
Arithmetic only: what to count, and by what to divide."""

from __future__ import annotations

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

import numpy as np

from loadtest.samples import CONNECTION_FAILED, MALFORMED_ANSWER, OK, TIMED_OUT, Samples, percentile

if TYPE_CHECKING:
    from loadtest.cpu import ProcessUse
    from loadtest.load import Load

CLIENT_CODES = {CONNECTION_FAILED: "connection failed", TIMED_OUT: "timed out", MALFORMED_ANSWER: "malformed answer"}


@dataclass(frozen=True)
class LoadResult:
    """Requests due in the measured time are counted, each once: `requests` = `ok` + all of `errors`.

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
    server: tuple[ProcessUse, ...]  # empty without a server_pid
    latencies_ms: np.ndarray = field(repr=False)  # [ok], in the order in which they were due

    @property
    def client_us_per_request(self) -> float:
        return self.us_per_request(sum(process.cpu_s for process in self.client))

    @property
    def client_busy(self) -> float:
        """Of one core, by the busiest sending process. Above 0.8 it is the generator that is measured."""
        return max(process.cpu_s for process in self.client) / self.window_s

    @property
    def server_us_per_request(self) -> float:
        """CPU time of the whole tree. NaN without a server_pid."""
        return self.us_per_request(sum(process.cpu_s for process in self.server)) if self.server else float("nan")

    def us_per_request(self, cpu_s: float) -> float:
        return cpu_s * 1e6 / self.cpu_requests if self.cpu_requests else float("nan")


def summarise(
    load: Load,
    model: str | None,
    samples: Samples,
    window: tuple[float, float],
    client: tuple[ProcessUse, ...],
    server: tuple[ProcessUse, ...],
) -> LoadResult:
    """`window` is the measured time, as time.monotonic() of its ends; the CPU time is of that time too."""
    start_s, end_s = window
    done = samples.due_from(start_s)
    succeeded = done.code == OK
    latencies_ms = (done.done_s - done.due_s)[succeeded] * 1e3
    in_window = (samples.done_s >= start_s) & (samples.done_s < end_s)
    requests_per_s = np.count_nonzero(in_window & (samples.code == OK)) / (end_s - start_s)
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
        requests_per_s=requests_per_s,
        texts_per_s=requests_per_s * load.texts_per_request,
        p50_ms=percentile(latencies_ms, 50),
        p90_ms=percentile(latencies_ms, 90),
        p99_ms=percentile(latencies_ms, 99),
        max_ms=percentile(latencies_ms, 100),
        sent_late_p99_ms=percentile((done.sent_s - done.due_s) * 1e3, 99),
        cpu_requests=int(np.count_nonzero(in_window & (samples.code != CONNECTION_FAILED))),
        client=client,
        server=server,
        latencies_ms=latencies_ms,
    )


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
