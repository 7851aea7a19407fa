"""The results of one run, one a class of senders, as a table to read and as JSON to keep.
Prints what result.py worked out; works out nothing itself."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from loadtest.workloads import TEXTS_PER_REQUEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from loadtest.cpu import ProcessUse
    from loadtest.load import Load
    from loadtest.result import LoadResult
    from loadtest.scrape import ServerMetrics, Spread

MESSAGE_WIDTH = 100
SHOWN_US = 0.5  # of CPU time a request; a thread that used less is left out of the table


def as_text(results: Mapping[str, LoadResult]) -> str:
    """Each class, then what they share: the server."""
    parts = []
    for name, result in results.items():
        title = f"{name}: " if len(results) > 1 else ""
        parts.append("\n".join((title + describe(result.load, result), "", *lines(result))))
    shared = next(iter(results.values()))
    if shared.metrics is not None:
        parts.append("\n".join(metrics_lines(shared.metrics)))
    if shared.server:
        parts.append("\n".join(server_table(shared)))
    return "\n\n".join(parts)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def as_json(result: LoadResult) -> dict[str, Any]:
    """All but the latencies themselves; CPU time is in microseconds a request."""
    left_out = {"load", "client", "server", "metrics", "latencies_ms"}
    numbers = {field.name: getattr(result, field.name) for field in fields(result) if field.name not in left_out}
    return {
        "load": asdict(result.load),
        **none_for_nan(numbers),
        "client_us_per_request": none_if_nan(result.client_us_per_request),
        "client_busy": none_if_nan(result.client_busy),
        "server_us_per_request": none_if_nan(result.server_us_per_request),
        "server": [process_json(process, result) for process in result.server],
        "metrics": None if result.metrics is None else none_for_nan(asdict(result.metrics)),
        "cpus": os.cpu_count(),
    }


def lines(result: LoadResult) -> Iterator[str]:
    yield f"  {result.requests_per_s:.1f} requests/s   {result.texts_per_s:.1f} texts/s"
    if result.ok:
        yield (
            f"  latency ms   p50 {result.p50_ms:.2f}   p90 {result.p90_ms:.2f}   p99 {result.p99_ms:.2f}   "
            f"max {result.max_ms:.2f}"
        )
    yield f"  {result.requests} requests: {result.ok} ok, {result.requests - result.ok} failed"
    for code, count in result.errors.items():
        yield f"    {count} x {code}: {one_line(result.messages[code])}"
    if result.load.rate is not None:
        yield f"  sent after they were due: p99 {result.sent_late_p99_ms:.2f} ms"
    yield (
        f"  client CPU {result.client_us_per_request:.0f} us a request, "
        f"its busiest process {result.client_busy:.0%} of a core"
    )
    if result.client_busy > 0.8:
        yield "  The generator itself is at its limit: these are its numbers, not the server's. Add --processes."


def describe(load: Load, result: LoadResult) -> str:
    loop = "closed loop" if load.rate is None else f"open loop at {load.rate:g} requests/s"
    encoding = f", {load.encoding} replies" if load.protocol == "http" else ""
    return (
        f"{load.protocol} {load.target}, {loop}, {load.connections} connections, {describe_texts(load)}"
        f"{encoding}, {result.window_s:.1f} s after {load.warmup_s:g} s of warm-up"
    )


def describe_texts(load: Load) -> str:
    least, most = TEXTS_PER_REQUEST[load.workload] if load.texts_per_request is None else (load.texts_per_request,) * 2
    count = f"{least}-{most}" if least < most else str(least)
    kind = load.workload if load.texts_file is None else load.texts_file.name
    if load.words is not None:
        kind += ", as long as the model takes" if load.words == "longest" else f", of {load.words} words"
    return f"{count} text{'s' if most > 1 else ''} a request ({kind})"


def metrics_lines(metrics: ServerMetrics) -> Iterator[str]:
    yield f"  by the server's metrics, {metrics.seconds:.1f} s: {metrics.forwards_per_s:.1f} forwards/s"
    yield f"  tokens of a forward   {describe_spread(metrics.batch_tokens)}"
    yield f"  inputs of a forward   {describe_spread(metrics.batch_inputs)}"
    yield f"  starved {metrics.starved:.1%} of the time: the device was idle while work waited"
    busy = (f"{thread} {share:.0%}" for thread, share in sorted(metrics.busy.items(), key=lambda item: -item[1]))
    yield f"  busy: {', '.join(busy)}"
    if metrics.stage_ms:
        stages = list(dict.fromkeys(stage for means in metrics.stage_ms.values() for stage in means))
        rows = [
            [lane, *(f"{means[stage]:.2f}" if stage in means else "" for stage in stages)]
            for lane, means in metrics.stage_ms.items()
        ]
        yield ""
        yield from (f"  {line}" for line in table(("mean ms of a request, lane", *stages), rows).splitlines())


def describe_spread(spread: Spread) -> str:
    return f"mean {spread.mean:.1f}   p50 {spread.p50:.0f}   p90 {spread.p90:.0f}   p99 {spread.p99:.0f}"


def server_table(result: LoadResult) -> Iterator[str]:
    yield f"  {'server CPU: process, thread (how many)':<64}{'us a request':>13}{'switches':>10}"
    for process in result.server:
        if result.server_us(process.cpu_s) < SHOWN_US:
            continue
        yield f"  {process.title:<64}{result.server_us(process.cpu_s):>13.0f}"
        for thread in process.threads:
            if result.server_us(thread.cpu_s) < SHOWN_US:
                continue
            name = f"{thread.name} ({thread.count})"
            switches = thread.switches / result.server_requests
            yield f"    {name:<62}{result.server_us(thread.cpu_s):>13.0f}{switches:>10.2f}"
    yield f"  {'all':<64}{result.server_us_per_request:>13.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        rest = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  ".join((f"{cells[0]:<{widths[0]}}", *rest)).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def process_json(process: ProcessUse, result: LoadResult) -> dict[str, Any]:
    threads = [
        {
            "name": thread.name,
            "count": thread.count,
            "us_per_request": none_if_nan(result.server_us(thread.cpu_s)),
            "switches": thread.switches,
        }
        for thread in process.threads
    ]
    us_per_request = none_if_nan(result.server_us(process.cpu_s))
    return {"pid": process.pid, "title": process.title, "us_per_request": us_per_request, "threads": threads}


def none_for_nan(numbers: dict[str, Any]) -> dict[str, Any]:
    return {
        name: none_for_nan(value) if isinstance(value, dict) else none_if_nan(value) for name, value in numbers.items()
    }


def none_if_nan(value: object) -> object:
    """JSON has no NaN."""
    return None if value != value else value


def one_line(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= MESSAGE_WIDTH else text[: MESSAGE_WIDTH - 1] + "…"
