"""One run of a load, or of several together, against one server: `run_load(Load(url=...))` gives its numbers.
Starts the sending processes, keeps the time, reads CPU use and metrics; sends no load itself."""

from __future__ import annotations

import json
import multiprocessing
import time
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Any, NamedTuple

from loadtest import cpu, scrape
from loadtest.generator import generate, share
from loadtest.load import Load, LoadError, ServedModel, Target, check
from loadtest.loops import Window
from loadtest.result import LoadResult, summarise, together
from loadtest.samples import Samples, merge

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

__all__ = ["Load", "LoadError", "LoadResult", "run_load", "run_together"]

PREPARE_TIMEOUT_S = 120.0
START_DELAY_S = 0.05  # for the word to start to reach every process
SCRAPE_LEAD_S = 0.25  # before the measured time, so that no request in it shares a core with the scrape
LAST_WORDS_S = 30.0  # after the last reply is given up, for the samples to be handed over


class Sender(NamedTuple):
    """A sending process, the class it sends, and this end of the pipe to it."""

    of: str
    process: SpawnProcess
    pipe: Connection[Window, Samples | None]


def run_load(load: Load) -> LoadResult:
    """Send `load`, wait for its replies, return the numbers.

    It starts processes by `multiprocessing`, so a script calls it under `if __name__ == "__main__"`. Raises
    LoadError for settings that cannot be run, a target that is not this machine's, or a sender that died.
    """
    return run_together({"": load})[""]


def run_together(loads: Mapping[str, Load]) -> dict[str, LoadResult]:
    """As `run_load`, for several classes of senders at once, each with its name and processes of its own.

    They are sent to one server and in the same time.
    """
    assert len({(load.warmup_s, load.duration_s, load.timeout_s) for load in loads.values()}) == 1, loads
    assert len({(load.server_pid, load.metrics_target) for load in loads.values()}) == 1, loads
    for load in loads.values():
        check(load)
    any_load = next(iter(loads.values()))
    if any_load.server_pid is not None and not cpu.snapshot(any_load.server_pid):
        raise LoadError(f"There is no process {any_load.server_pid}; server_pid names the server's first process.")
    models = {name: served_model(load) for name, load in loads.items()}

    with senders(loads, models) as sending:
        window = start(any_load, sending)
        sleep_until(window.warm_s - SCRAPE_LEAD_S)
        scraped = scrape.read(any_load.metrics_target)
        sleep_until(window.warm_s)
        before = snapshots(any_load, sending)
        wait_for_results(sending, window.end_s)
        ended_s = min(time.monotonic(), window.end_s)
        after = snapshots(any_load, sending)
        metrics = scrape.between(scraped, scrape.read(any_load.metrics_target))
        samples = collect(sending, window.give_up_s + LAST_WORDS_S)
    client, server = (cpu.use_between(*pair) for pair in zip(before, after, strict=True))
    pids = {name: [sender.process.pid for sender in sending if sender.of == name] for name in loads}
    results = {
        name: summarise(
            load,
            models[name].name,
            samples[name],
            (window.warm_s, ended_s),
            tuple(use for use in client if use.pid in pids[name]),
            server,
        )
        for name, load in loads.items()
    }
    return together(results, metrics)


def served_model(load: Load) -> ServedModel:
    """What the requests must know of the model; the server is asked for what `load` does not say."""
    name, limit = load.model, load.max_input_tokens
    needs_limit = load.depends_on_limit and limit is None
    if load.protocol == "http" and (name is None or needs_limit):
        listed = listed_model(load.target, name)
        name = str(listed["id"])
        limit = limit or listed.get("max_input_tokens") or listed.get("max_model_len")  # embedserve's; vLLM's
    elif needs_limit:
        from loadtest.grpc_client import max_input_tokens  # grpc takes as long to import as all the rest

        limit = max_input_tokens(load.target, name)
    if load.depends_on_limit and limit is None:
        raise LoadError(f"{load.target} does not tell how many tokens its model takes; say it: --max-input-tokens N.")
    return ServedModel(name, limit)


def listed_model(target: Target, name: str | None) -> dict[str, Any]:
    """The entry of OpenAI's list, at /v1/models, for that name; without one, the first."""
    connection = HTTPConnection(target.host, target.port, timeout=10)
    try:
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        models: list[dict[str, Any]] = json.load(response)["data"]
        return next(model for model in models if name in (None, model["id"]))
    except (OSError, HTTPException) as error:
        raise LoadError(f"{target.authority} does not answer: {error}. Is the server ready?") from error
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        wanted = "no model; say which with --model" if name is None else f"no model {name}"
        raise LoadError(f"GET /v1/models on {target.authority} names {wanted}.") from error
    finally:
        connection.close()


@contextmanager
def senders(loads: Mapping[str, Load], models: Mapping[str, ServedModel]) -> Iterator[list[Sender]]:
    """The sending processes; none outlives the body."""
    context = multiprocessing.get_context("spawn")
    sending: list[Sender] = []
    try:
        for name, load in loads.items():
            for index in range(load.processes):
                ours, theirs = context.Pipe()
                arguments = (share(load, index), index, models[name], theirs)
                process = context.Process(target=generate, args=arguments, daemon=True)
                process.start()
                theirs.close()  # so that the pipe ends when the process does
                sending.append(Sender(name, process, ours))
        yield sending
    finally:
        for sender in sending:
            sender.process.terminate()
            sender.process.join()
            sender.pipe.close()


def start(load: Load, sending: Sequence[Sender]) -> Window:
    """Once every process has its requests ready, tell them all the same times."""
    prepared_by_s = time.monotonic() + PREPARE_TIMEOUT_S
    for sender in sending:
        receive(sender, prepared_by_s)
    start_s = time.monotonic() + max(START_DELAY_S, SCRAPE_LEAD_S - load.warmup_s)
    warm_s = start_s + load.warmup_s
    window = Window(start_s, warm_s, warm_s + load.duration_s, load.timeout_s)
    for sender in sending:
        sender.pipe.send(window)
    return window


def collect(sending: Sequence[Sender], until_s: float) -> dict[str, Samples]:
    """Of each class, what all its processes sent."""
    parts: dict[str, list[Samples]] = {}
    for sender in sending:
        samples = receive(sender, until_s)
        assert samples is not None
        parts.setdefault(sender.of, []).append(samples)
    return {name: merge(of_class) for name, of_class in parts.items()}


def receive(sender: Sender, until_s: float) -> Samples | None:
    try:
        if not sender.pipe.poll(max(0.0, until_s - time.monotonic())):
            raise LoadError("A sending process is stuck: it has nothing to say long after it should be done.")
        return sender.pipe.recv()
    except EOFError:
        sender.process.join()
        raise LoadError(f"A sending process ended with status {sender.process.exitcode}; see above.") from None


def wait_for_results(sending: Sequence[Sender], until_s: float) -> None:
    """Return at `until_s`, or before when max_requests let every process finish early."""
    for sender in sending:
        sender.pipe.poll(max(0.0, until_s - time.monotonic()))


def snapshots(load: Load, sending: Sequence[Sender]) -> tuple[cpu.Snapshot, cpu.Snapshot]:
    """CPU time so far: of the sending processes, and of the server."""
    server = {} if load.server_pid is None else cpu.snapshot(load.server_pid)
    pids = [sender.process.pid for sender in sending]
    client = {pid: process for pid in pids if pid is not None and (process := cpu.read_process(pid)) is not None}
    return client, server


def sleep_until(when_s: float) -> None:
    time.sleep(max(0.0, when_s - time.monotonic()))
