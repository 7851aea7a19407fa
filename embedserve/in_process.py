"""The engine in the caller's process: the server's own service and loops, without sockets between them.

Knows threads and one event loop, which it starts; no protocol but the client's way of asking.
"""

from __future__ import annotations

import asyncio
import atexit
import select
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from embedserve.config import Config, available_cores
from embedserve.engine.batcher import Request, WaitingRoom
from embedserve.engine.buffers import BufferPool
from embedserve.engine.engine_loop import EngineLoop
from embedserve.engine.outbox import FinishedBatch, Outbox
from embedserve.engine.output_loop import nonfinite_rows, reply_part
from embedserve.errors import EngineUnavailable, InvalidInput
from embedserve.frontend.call import EmbedResult
from embedserve.frontend.engine_client import EngineClient, EngineReply, EngineRequest
from embedserve.frontend.grpc_messages import embed_call
from embedserve.frontend.service import Service
from embedserve.messages import EngineAddress, Lane, ReplyHeader
from embedserve.process import NamedThread, naming_threads
from embedserve_client.errors import BadRequest
from embedserve_client.request import EmbedOptions, Inputs, OnError, build_request

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np

    from embedserve.model.card import ModelCard
    from embedserve.model.runner import Runner

T = TypeVar("T")

NEVER_S = 1e9  # an hour of a batch job is no reason to fail it
STOP_WITHIN_S = 5.0


class Engine:
    """A model in this process, for notebooks, tests and batch jobs. A context manager; any number of threads may call.

    Raises StartError when the model cannot be served. Texts of callers at once share batches. Where a server would
    refuse for want of room, a caller waits.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        revision: str | None = None,
        backend: str = "auto",
        dtype: str = "auto",
        device: str = "auto",
        load_format: str = "auto",
        threads: int | None = None,
        forwards: int | None = None,
        max_batch_tokens: int | None = None,
        max_batch_ms: float | None = None,
        max_queued_tokens: int | None = None,
        max_input_tokens: int | None = None,
        auto_truncate: bool = False,
    ) -> None:
        """model: a folder, a hub id, or None for the bundled one; the others as `embedserve serve --help` has them."""
        self._config = Config(
            model=model,
            revision=revision,
            backend=backend,
            dtype=dtype,
            device=device,
            load_format=load_format,
            threads=threads,
            forwards=forwards,
            max_batch_tokens=max_batch_tokens,
            max_batch_ms=max_batch_ms,
            max_queued_tokens=max_queued_tokens,
            max_input_tokens=max_input_tokens,
            auto_truncate=auto_truncate,
            frontends=1,
            max_inputs=1 << 31,
            request_timeout_s=NEVER_S,
        )
        self._closing = threading.Lock()
        self._closed = False
        self._waiting_room = WaitingRoom(1 << 62)  # callers wait before it
        self._loaded: Future[tuple[Runner, float]] = Future()
        self._threads: list[NamedThread] = []
        self._start("EngineLoop", self._load_and_run)
        runner, tokens_per_ms = self._loaded.result()
        self.model: ModelCard = runner.card
        self._loop = asyncio.new_event_loop()
        self._client = _Client(self._config, self._waiting_room)
        self._service = Service(self._config, self._client)
        self._service.use(runner.card)
        self._client.serve(runner.card, tokens_per_ms)
        self._start("OutputLoop", self._deliver)
        for lane, number in ((Lane.QUERY, runner.forwards - 1), (Lane.BULK, runner.forwards)):
            for _ in range(number):
                self._start("forward" if lane is Lane.QUERY else "bulk", self._engine_loop(runner, lane).run)
        self._start("service", self._run_service)
        atexit.register(self.close)

    def embed(self, inputs: Inputs, **options: Unpack[EmbedOptions]) -> np.ndarray:
        """Texts, or token ids, [N] -> their vectors [N, dims], in the order given.

        Options as of `embedserve_client.EmbedClient.embed`. The array is the caller's own. Raises a class of
        embedserve.errors for the first input or option that cannot be, EngineUnavailable once it is closed.
        """
        return self.embed_full(inputs, **options).rows().copy()  # a view would keep a whole batch's buffer

    def embed_full(self, inputs: Inputs, *, on_error: OnError = "fail", **options: Unpack[EmbedOptions]) -> EmbedResult:
        """As `embed`, with all else that is known: scales (int8), token counts, what was cut, errors, times."""
        try:
            call = embed_call(build_request(inputs, on_error=on_error, **options))
        except BadRequest as error:
            raise InvalidInput(error.message, param=error.param) from error
        return self._wait_for(self._service.embed(call, hold=lambda nbytes: None))

    def close(self) -> None:
        """Whoever still waits is told; the model's memory is freed. Once is enough, more does not hurt."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._waiting_room.close()
        self._outbox.close()
        self._loop.call_soon_threadsafe(self._end)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(STOP_WITHIN_S)
        self._threads.clear()  # they refer to the model

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _wait_for(self, answer: Coroutine[Any, Any, T]) -> T:
        with self._closing:
            if self._closed:
                answer.close()
                raise EngineUnavailable("the engine is closed")
            future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # where Ctrl-C ended the wait

    def _load_and_run(self) -> None:
        """On the thread that will launch, because torch's workers belong to the thread that started them."""
        try:
            from embedserve.model.runner import load_runner, warm_up

            config = self._config
            with naming_threads("forward"):
                runner = load_runner(
                    config.model,
                    revision=config.revision,
                    backend=config.backend,
                    dtype=config.dtype,
                    device=config.device,
                    threads=config.threads or available_cores(),
                    forwards=config.forwards,
                    load_format=config.load_format,
                )
                self._tokens_per_ms = warm_up(runner)
        except BaseException as error:  # the outermost frame of loading: __init__ raises it
            self._loaded.set_exception(error)
            return
        self._buffers = BufferPool(0, 0)  # results are handed out, so nothing comes back soon
        self._outbox = Outbox(limit=len(Lane) * runner.forwards)
        self._loaded.set_result((runner, self._tokens_per_ms))
        self._engine_loop(runner, Lane.QUERY).run()

    def _engine_loop(self, runner: Runner, lane: Lane) -> EngineLoop:
        return EngineLoop(
            runner,
            lane,
            buffers=self._buffers,
            waiting_room=self._waiting_room,
            outbox=self._outbox,
            max_batch_tokens=self._config.batch_tokens_limit,
            max_batch_ms=self._config.batch_ms_limit,
            tokens_per_ms=self._tokens_per_ms,
        )

    def _run_service(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _deliver(self) -> None:
        """OutputLoop's work without a socket: each batch's parts to those who wait for them, on their loop."""
        poller = select.poll()
        poller.register(self._outbox.wake_fd, select.POLLIN)
        while not self._outbox.closed:
            poller.poll()  # the only place that blocks
            batches, _ = self._outbox.take()
            while batches:
                self._loop.call_soon_threadsafe(self._client.receive, batches.popleft())

    def _end(self) -> None:
        """On the loop: everyone who waits is told, and then it stops."""
        self._client.disconnect()
        waiting = asyncio.all_tasks(self._loop)
        asyncio.gather(*waiting, return_exceptions=True).add_done_callback(lambda _: self._loop.stop())

    def _start(self, name: str, run: Any) -> None:
        thread = NamedThread(name, run, self._thread_ended)
        self._threads.append(thread)
        thread.start()

    def _thread_ended(self, name: str, error: BaseException | None) -> None:
        """One that ends by itself takes the others with it: its callers would wait for ever."""
        if self._loaded.done() and self._loaded.exception() is None and not self._closed:
            threading.Thread(target=self.close, name="closing", daemon=True).start()


class _Client(EngineClient):
    """A frontend's side of the engine, whose messages are calls. All of it happens on the event loop."""

    def __init__(self, config: Config, waiting_room: WaitingRoom) -> None:
        super().__init__("in process", max_tokens=config.queued_tokens_limit)
        self._waiting_room = waiting_room
        self._room = asyncio.Condition()

    def serve(self, card: ModelCard, tokens_per_ms: float) -> None:
        self._address = EngineAddress(0, "", "", card, tokens_per_ms * 1000)
        self._connected = True

    @contextmanager
    def reserved(self, tokens: int) -> Iterator[None]:
        """Nobody is refused, so nothing is kept free."""
        yield

    async def embed(self, request: EngineRequest) -> EngineReply:
        """As the server's, but waits for room: alone, a request of any size is let in."""
        async with self._room:
            await self._room.wait_for(lambda: not self._tokens.held or self._tokens.has_room(len(request.token_ids)))
            answer = asyncio.ensure_future(super().embed(request))
            await asyncio.sleep(0)  # it has counted its tokens when this returns
        try:
            return await answer
        finally:
            answer.cancel()
            async with self._room:
                self._room.notify_all()

    def receive(self, finished: FinishedBatch) -> None:
        indexes = range(len(finished.batch.parts))
        bad_rows = nonfinite_rows(finished)
        parts = [reply_part(finished, index, 0, bad_rows.get(index, [])) for index in indexes]
        forward_ms = (finished.ended_at - finished.launched_at) * 1000
        header = ReplyHeader(0, time.monotonic(), forward_ms, 0.0, parts, [])
        self._receive(header, finished.buffer.data)

    def _admit(self, tokens: int, reply_bytes: int) -> None:
        if not self._connected:
            raise EngineUnavailable("the engine is closed")
        self._tokens.enter(tokens, time.monotonic())
        self._reply_bytes.enter(reply_bytes, time.monotonic())

    def _flush(self) -> None:
        self._flush_scheduled = False
        outgoing, self._outgoing = self._outgoing, []
        cancels, self._cancels = self._cancels, []
        if cancels:
            self._waiting_room.cancel(self._name, cancels)
        requests = (pending for pending in outgoing if pending.id in self._pending)
        self._waiting_room.add(
            Request(
                frontend=self._name,
                id=pending.id,
                lane=pending.request.lane,
                lengths=pending.request.lengths,
                token_ids=pending.request.token_ids,
                dims=pending.request.dims,
                dtype=pending.request.dtype,
                normalize=pending.request.normalize,
                enqueued_at=pending.sent_at,
            )
            for pending in requests
        )
