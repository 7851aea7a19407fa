"""One sending process: its share of the load, prepared, then sent between times that all processes share.
Reports what happened to each request and judges nothing."""

from __future__ import annotations

import asyncio
import gc
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from loadtest import loops
from loadtest.arrivals import poisson_arrivals
from loadtest.http_client import HttpClient
from loadtest.samples import Recorder, Samples
from loadtest.workloads import encode_requests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from loadtest.load import Load, ServedModel
    from loadtest.workloads import Request


def generate(load: Load, process: int, model: ServedModel, pipe: Connection[Samples | None, loops.Window]) -> None:
    """Send None when ready, receive a Window, send the load, send the Samples. `load` is this process's share."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    requests = encode_requests(load, model, process)
    gc.freeze()
    pipe.send(None)
    window = pipe.recv()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        pipe.send(runner.run(send(load, process, requests, window)))


def share(load: Load, process: int) -> Load:
    """The part of `load` that one of its processes sends; the parts add up to the whole."""

    def part(total: int) -> int:
        return total // load.processes + (process < total % load.processes)

    return replace(
        load,
        connections=part(load.connections),
        rate=None if load.rate is None else load.rate / load.processes,  # Poisson processes add up to one
        max_requests=part(load.max_requests),
        channels=max(1, part(load.channels)),
    )


async def send(load: Load, process: int, requests: Sequence[Request], window: loops.Window) -> Samples:
    recorder = Recorder()
    clients = open_clients(load)
    if load.rate is None:
        await loops.closed_loop(clients, requests, window, load.max_requests, recorder)
    else:
        rng = np.random.default_rng([load.seed, process, 1])
        warmup = poisson_arrivals(load.rate, window.start_s, window.warm_s, load.max_requests, rng)
        measured = poisson_arrivals(load.rate, window.warm_s, window.end_s, load.max_requests, rng)
        await loops.open_loop(clients, requests, window, warmup + measured, recorder)
    for client in clients:
        await client.close()
    return recorder.samples()


def open_clients(load: Load) -> list[loops.Client]:
    if load.protocol == "http":
        return [HttpClient(load.target) for _ in range(load.connections)]
    from loadtest.grpc_client import GrpcClient, open_channels  # grpc takes as long to import as all the rest

    channels = open_channels(load.target, min(load.channels, load.connections))
    return [GrpcClient(channels[index % len(channels)]) for index in range(load.connections)]


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
