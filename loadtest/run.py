"""One run of a load against one server: `run_load(Load(url=...))` gives its numbers.
Starts the sending processes, keeps the time, reads CPU use; sends nothing itself."""

from __future__ import annotations

import json
import multiprocessing
import time
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, NamedTuple

from loadtest import cpu
from loadtest.generator import generate, share
from loadtest.load import Load, LoadError, Target, check
from loadtest.loops import Window
from loadtest.result import LoadResult, summarise
from loadtest.samples import Samples, merge

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

__all__ = ["Load", "LoadError", "LoadResult", "run_load"]

PREPARE_TIMEOUT_S = 120.0
START_DELAY_S = 0.05  # for the word to start to reach every process
LAST_WORDS_S = 30.0  # after the last reply is given up, for the samples to be handed over


class Sender(NamedTuple):
    """A sending process and this end of the pipe to it."""

    process: SpawnProcess
    pipe: Connection[Window, Samples | None]


def run_load(load: Load) -> LoadResult:
    """Send `load`, wait for its replies, return the numbers.

    It starts processes by `multiprocessing`, so a script calls it under `if __name__ == "__main__"`. Raises
    LoadError for settings that cannot be run, a target that is not this machine's, or a sender that died.
    """
    check(load)
    if load.server_pid is not None and not cpu.snapshot(load.server_pid):
        raise LoadError(f"There is no process {load.server_pid}; server_pid names the server's first process.")
    model = load.model
    if model is None and load.protocol == "http":
        model = first_model(load.target)

    with senders(load, model) as sending:
        window = start(load, sending)
        sleep_until(window.warm_s)
        before = snapshots(load, sending)
        wait_for_results(sending, window.end_s)
        ended_s = min(time.monotonic(), window.end_s)
        after = snapshots(load, sending)
        samples = merge([collect(sender, window.give_up_s + LAST_WORDS_S) for sender in sending])
    client, server = (cpu.use_between(*pair) for pair in zip(before, after, strict=True))
    return summarise(load, model, samples, (window.warm_s, ended_s), client, server)


def first_model(target: Target) -> str:
    """What the server calls its model: OpenAI's list, at /v1/models."""
    connection = HTTPConnection(target.host, target.port, timeout=10)
    try:
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        return str(json.load(response)["data"][0]["id"])
    except (OSError, HTTPException) as error:
        raise LoadError(f"{target.authority} does not answer: {error}. Is the server ready?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise LoadError(f"GET /v1/models on {target.authority} names no model; say which with --model.") from error
    finally:
        connection.close()


@contextmanager
def senders(load: Load, model: str | None) -> Iterator[list[Sender]]:
    """The sending processes; none outlives the body."""
    context = multiprocessing.get_context("spawn")
    sending: list[Sender] = []
    try:
        for index in range(load.processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=generate, args=(share(load, index), index, model, theirs), daemon=True)
            process.start()
            theirs.close()  # so that the pipe ends when the process does
            sending.append(Sender(process, ours))
        yield sending
    finally:
        for sender in sending:
            sender.process.terminate()
            sender.process.join()
            sender.pipe.close()


def start(load: Load, sending: list[Sender]) -> Window:
    """Once every process has its requests ready, tell them all the same times."""
    prepared_by_s = time.monotonic() + PREPARE_TIMEOUT_S
    for sender in sending:
        receive(sender, prepared_by_s)
    start_s = time.monotonic() + START_DELAY_S
    warm_s = start_s + load.warmup_s
    window = Window(start_s, warm_s, warm_s + load.duration_s, load.timeout_s)
    for sender in sending:
        sender.pipe.send(window)
    return window


def collect(sender: Sender, until_s: float) -> Samples:
    samples = receive(sender, until_s)
    assert samples is not None
    return samples


def receive(sender: Sender, until_s: float) -> Samples | None:
    try:
        if not sender.pipe.poll(max(0.0, until_s - time.monotonic())):
            raise LoadError("A sending process is stuck: it has nothing to say long after it should be done.")
        return sender.pipe.recv()
    except EOFError:
        sender.process.join()
        raise LoadError(f"A sending process ended with status {sender.process.exitcode}; see above.") from None


def wait_for_results(sending: list[Sender], until_s: float) -> None:
    """Return at `until_s`, or before when max_requests let every process finish early."""
    for sender in sending:
        sender.pipe.poll(max(0.0, until_s - time.monotonic()))


def snapshots(load: Load, sending: list[Sender]) -> tuple[cpu.Snapshot, cpu.Snapshot]:
    """CPU time so far: of the sending processes, and of the server."""
    server = {} if load.server_pid is None else cpu.snapshot(load.server_pid)
    pids = [sender.process.pid for sender in sending]
    client = {pid: process for pid in pids if pid is not None and (process := cpu.read_process(pid)) is not None}
    return client, server


def sleep_until(when_s: float) -> None:
    time.sleep(max(0.0, when_s - time.monotonic()))
