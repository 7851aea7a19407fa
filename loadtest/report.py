"""The result of one run as a table to read and as JSON to keep.
Prints what result.py worked out; works out nothing itself."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from loadtest.cpu import ProcessUse
    from loadtest.load import Load
    from loadtest.result import LoadResult

MESSAGE_WIDTH = 100
SHOWN_US = 0.5  # of CPU time a request; a thread that used less is left out of the table


def as_text(result: LoadResult) -> str:
    return "\n".join(lines(result))


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def as_json(result: LoadResult) -> dict[str, Any]:
    """All but the latencies themselves; CPU time is in microseconds a request."""
    left_out = {"load", "client", "server", "latencies_ms"}
    numbers = {field.name: getattr(result, field.name) for field in fields(result) if field.name not in left_out}
    return {
        "load": asdict(result.load),
        **{name: none_if_nan(number) for name, number in numbers.items()},
        "client_us_per_request": none_if_nan(result.client_us_per_request),
        "client_busy": none_if_nan(result.client_busy),
        "server_us_per_request": none_if_nan(result.server_us_per_request),
        "server": [process_json(process, result) for process in result.server],
        "cpus": os.cpu_count(),
    }


def lines(result: LoadResult) -> Iterator[str]:
    load = result.load
    yield describe(load, result)
    yield ""
    yield f"  {result.requests_per_s:.1f} requests/s   {result.texts_per_s:.1f} texts/s"
    if result.ok:
        yield (
            f"  latency ms   p50 {result.p50_ms:.2f}   p90 {result.p90_ms:.2f}   p99 {result.p99_ms:.2f}   "
            f"max {result.max_ms:.2f}"
        )
    yield f"  {result.requests} requests: {result.ok} ok, {result.requests - result.ok} failed"
    for code, count in result.errors.items():
        yield f"    {count} x {code}: {one_line(result.messages[code])}"
    if load.rate is not None:
        yield f"  sent after they were due: p99 {result.sent_late_p99_ms:.2f} ms"
    yield (
        f"  client CPU {result.client_us_per_request:.0f} us a request, "
        f"its busiest process {result.client_busy:.0%} of a core"
    )
    if result.client_busy > 0.8:
        yield "  The generator itself is at its limit: these are its numbers, not the server's. Add --processes."
    if result.server:
        yield ""
        yield from server_table(result)


def describe(load: Load, result: LoadResult) -> str:
    loop = "closed loop" if load.rate is None else f"open loop at {load.rate:g} requests/s"
    texts = "1 text" if load.texts_per_request == 1 else f"{load.texts_per_request} texts"
    encoding = f", {load.encoding} replies" if load.protocol == "http" else ""
    return (
        f"{load.protocol} {load.target}, {loop}, {load.connections} connections, {texts} a request{encoding}, "
        f"{result.window_s:.1f} s after {load.warmup_s:g} s of warm-up"
    )


def server_table(result: LoadResult) -> Iterator[str]:
    yield f"  {'server CPU: process, thread (how many)':<64}{'us a request':>13}{'switches':>10}"
    for process in result.server:
        if result.us_per_request(process.cpu_s) < SHOWN_US:
            continue
        yield f"  {process.title:<64}{result.us_per_request(process.cpu_s):>13.0f}"
        for thread in process.threads:
            if result.us_per_request(thread.cpu_s) < SHOWN_US:
                continue
            name = f"{thread.name} ({thread.count})"
            switches = thread.switches / result.cpu_requests
            yield f"    {name:<62}{result.us_per_request(thread.cpu_s):>13.0f}{switches:>10.2f}"
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
            "us_per_request": none_if_nan(result.us_per_request(thread.cpu_s)),
            "switches": thread.switches,
        }
        for thread in process.threads
    ]
    us_per_request = none_if_nan(result.us_per_request(process.cpu_s))
    return {"pid": process.pid, "title": process.title, "us_per_request": us_per_request, "threads": threads}


def none_if_nan(value: object) -> object:
    """JSON has no NaN."""
    return None if value != value else value


def one_line(message: str) -> str:
    text = " ".join(message.split())
    return text if len(text) <= MESSAGE_WIDTH else text[: MESSAGE_WIDTH - 1] + "…"
