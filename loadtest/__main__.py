"""`python -m loadtest run`: the command line of the load generator.
Turns arguments into a Load, or several, and results into text; measures nothing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from loadtest import report
from loadtest.load import QUERY_RATE, WORKLOADS, Load, LoadError, queries_under_bulk
from loadtest.run import run_together

if TYPE_CHECKING:
    from collections.abc import Sequence

QUERIES_UNDER_BULK = "queries-under-bulk"
BULK_CONNECTIONS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 when no request of a class succeeded; 2 when the load cannot be sent as asked."""
    options = vars(parse_arguments(arguments))
    json_file: Path | None = options.pop("json")
    del options["command"]
    try:
        results = run_together(classes(options))
    except LoadError as error:
        print(error, file=sys.stderr)
        return 2
    print(report.as_text(results))
    if json_file is not None:
        content = {name: report.as_json(result) for name, result in results.items()}
        report.write_json(json_file, content if len(content) > 1 else next(iter(content.values())))
    if any(result.ok == 0 for result in results.values()):
        print("No request succeeded" + (" of one class." if len(results) > 1 else "."), file=sys.stderr)
        return 1
    return 0


def classes(options: dict[str, Any]) -> dict[str, Load]:
    """What is sent at once, by name."""
    bulk_connections = options.pop("bulk_connections")
    if options["workload"] == QUERIES_UNDER_BULK:
        return queries_under_bulk(Load(**{**options, "workload": "bulk"}), bulk_connections)
    return {options["workload"]: Load(**options)}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description="Load an embedding server, measure it.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run", help="one run against one server", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    target = run.add_mutually_exclusive_group(required=True)
    target.add_argument("--url", metavar="http://HOST:PORT", help="the OpenAI-compatible endpoint")
    target.add_argument("--grpc", metavar="HOST:PORT", help="the gRPC endpoint")
    add_sending(run)
    add_texts(run)
    run.add_argument(
        "--metrics", metavar="http://HOST:PORT", help="of a server whose /metrics are read; if not given, the --url's"
    )
    run.add_argument("--server-pid", type=int, metavar="PID", help="read the CPU time of this process and its children")
    run.add_argument("--allow-remote", action="store_true", help="send to a machine other than this one")
    run.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return parser.parse_args(arguments)


def add_sending(run: argparse.ArgumentParser) -> None:
    run.add_argument("--connections", type=int, default=Load.connections, help="requests in flight, at most")
    run.add_argument("--rate", type=float, help="requests a second, at random times whether or not replies came")
    run.add_argument("--duration-s", type=float, default=Load.duration_s, help="measured time")
    run.add_argument("--warmup-s", type=float, default=Load.warmup_s, help="sent before, not counted")
    run.add_argument("--timeout-s", type=float, default=Load.timeout_s, help="of one request")
    run.add_argument("--max-requests", type=int, default=Load.max_requests, help="measured; and as many for warm-up")
    run.add_argument("--processes", type=int, default=Load.processes, help="that send, together, all of this")
    run.add_argument("--channels", type=int, default=Load.channels, help="connections that gRPC calls are spread over")
    run.add_argument("--seed", type=int, default=Load.seed, help="of the texts and the arrival times")


def add_texts(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--workload",
        choices=(*WORKLOADS, QUERIES_UNDER_BULK),
        default=Load.workload,
        help="which texts, and how many a request: 1 of 4-20 words; 1 of 100-190; 1-32 of a few words to the model's "
        f"limit; 64-256 of 100-190; or short at a rate ({QUERY_RATE:g}, if not given) beside connections of bulk",
    )
    run.add_argument("--bulk-connections", type=int, default=BULK_CONNECTIONS, help=f"of {QUERIES_UNDER_BULK}")
    run.add_argument("--texts-per-request", type=int, help="instead of the workload's; beside queries, of bulk")
    run.add_argument(
        "--words",
        type=words,
        metavar="N|longest",
        help="of each text, instead of the workload's; longest is all that the model takes; beside queries, of bulk",
    )
    run.add_argument(
        "--texts", dest="texts_file", type=Path, metavar="FILE", help="one a line, instead of random words"
    )
    run.add_argument("--encoding", choices=("float", "base64"), default=Load.encoding, help="of vectors over HTTP")
    run.add_argument("--model", help="its name; over HTTP, if not given, the first that /v1/models lists")
    run.add_argument("--max-input-tokens", type=int, help="of the model, where the server does not tell it")


def words(argument: str) -> int | Literal["longest"]:
    return "longest" if argument == "longest" else int(argument)


if __name__ == "__main__":
    sys.exit(main())
