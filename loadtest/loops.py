"""The two ways to send: a closed loop that waits for replies, and an open loop that keeps to its times.
Knows clients only by what they do, so any protocol runs in either."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from loadtest.arrivals import Alarm
from loadtest.samples import OK, TIMED_OUT, Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadtest.workloads import Request

RETRY_PAUSE_S = 0.02  # after an error that came at once, so that a server that is down is not asked in a tight loop


class Client(Protocol):
    message: str  # of the last request that failed

    async def request(self, request: bytes, timeout_s: float) -> tuple[int, float]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class Window:
    """time.monotonic() of each: warm-up from `start_s`, measured from `warm_s`, nothing new sent from `end_s`."""

    start_s: float
    warm_s: float
    end_s: float
    timeout_s: float

    @property
    def give_up_s(self) -> float:
        """When the last reply is no longer waited for."""
        return self.end_s + self.timeout_s


async def closed_loop(
    clients: Sequence[Client], requests: Sequence[Request], window: Window, max_requests: int, recorder: Recorder
) -> None:
    """Every client sends, waits, sends again; at most `max_requests` in the warm-up and as many measured."""
    endless = itertools.cycle(requests)
    warmup, measured = itertools.repeat(None, max_requests), itertools.repeat(None, max_requests)

    async def keep_busy(client: Client) -> None:
        await send_until(window.warm_s, warmup, client)
        await asyncio.sleep(window.warm_s - monotonic())
        await send_until(window.end_s, measured, client)

    async def send_until(end_s: float, permits: Iterator[None], client: Client) -> None:
        while (sent_s := monotonic()) < end_s and next(permits, True) is None:
            message, texts = next(endless)
            code, done_s = await client.request(message, window.timeout_s)
            recorder.add(sent_s, sent_s, done_s, code, client.message, texts)
            if code != OK and done_s - sent_s < RETRY_PAUSE_S:
                await asyncio.sleep(RETRY_PAUSE_S)

    await asyncio.sleep(window.start_s - monotonic())
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(keep_busy(client))


async def open_loop(
    clients: Sequence[Client],
    requests: Sequence[Request],
    window: Window,
    due_times: Sequence[float],
    recorder: Recorder,
) -> None:
    """Every request is due at its time, whether or not the server kept up: what waits, waits on the clock.

    A request that was not sent when the window's last replies are given up counts as timed out.
    """
    endless = itertools.cycle(requests)
    backlog: asyncio.Queue[float | None] = asyncio.Queue()

    async def take_from_backlog(client: Client) -> None:
        while (due_s := await backlog.get()) is not None:
            sent_s = monotonic()
            timeout_s = min(window.timeout_s, window.give_up_s - sent_s)
            if timeout_s <= 0:
                recorder.add(due_s, sent_s, sent_s, TIMED_OUT, "not sent: no connection came free in time", texts=0)
                continue
            message, texts = next(endless)
            code, done_s = await client.request(message, timeout_s)
            recorder.add(due_s, sent_s, done_s, code, client.message, texts)

    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(take_from_backlog(client))
        with Alarm() as alarm:
            for due_s in due_times:
                await alarm.wait_until(due_s)
                backlog.put_nowait(due_s)
        for _ in clients:
            backlog.put_nowait(None)
