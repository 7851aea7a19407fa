"""The engine in the caller's process: the server's own service and pipeline, without sockets between them.

Knows threads and one event loop, which it starts; no protocol but the client's way of asking. It is a guest: no signal
handlers, no environment, no settings of the interpreter or of torch but on its own threads.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import numpy as np
import torch

from embedserve.config import Config
from embedserve.engine.batcher import Request, WaitingRoom
from embedserve.engine.outbox import FinishedBatch
from embedserve.engine.output_loop import nonfinite_rows, reply_part
from embedserve.engine.pipeline import Pipeline
from embedserve.errors import EngineUnavailable, InvalidInput
from embedserve.frontend.engine_client import EngineClient, EngineReply, EngineRequest
from embedserve.frontend.grpc_messages import embed_call
from embedserve.frontend.service import Service
from embedserve.messages import EngineAddress, ReplyHeader
from embedserve_client.errors import BadRequest
from embedserve_client.request import EmbedOptions, Inputs, OnError, build_request
from embedserve_client.result import EmbedResult, InputFailure, StageTimes
from embedserve_kernels.output_layout import OutputDtype

if TYPE_CHECKING:
    from types import TracebackType

    from embedserve.frontend import call
    from embedserve.model.card import ModelCard

log = logging.getLogger(__name__)
T = TypeVar("T")

NEVER_S = 1e9  # an hour of a batch job is no reason to fail it
ENTER_WITHIN_S = 10.0


class Engine:
    """A model in this process, for notebooks, tests and batch jobs. A context manager; any number of threads may call.

    Texts of callers at once share batches. Where a server would refuse for want of room, a caller waits. An engine that
    is neither closed nor referred to any more closes itself. It does not survive a fork: make one in each process.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
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
        """model: a folder, a hub id, or None for the bundled one; the others as `embedserve serve --help` has them.

        Returns when the model is loaded. Raises StartError when it cannot be.
        """
        config = Config(
            model=None if model is None else os.fspath(model),
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
        threads_before = torch.get_num_threads()
        try:
            self._core = _Core(config)
        finally:
            torch.set_num_threads(threads_before)  # each forward's thread has set its own, and that of threads to come
        self.model: ModelCard = self._core.card
        weakref.finalize(self, self._core.abandon).atexit = False

    def embed(self, inputs: Inputs, **options: Unpack[EmbedOptions]) -> np.ndarray:
        """A list of texts, or of lists of token ids -> their vectors, [inputs, dims], in the order given.

        Options as of `embedserve_client.EmbedClient.embed`. The array is the caller's own. Raises a class of
        embedserve.errors for the first input or option that cannot be, EngineUnavailable once it is closed.
        """
        return self.embed_full(inputs, **options).vectors

    def embed_full(self, inputs: Inputs, *, on_error: OnError = "fail", **options: Unpack[EmbedOptions]) -> EmbedResult:
        """As `embed`, with all else that is known: scales (int8), token counts, what was cut, failures, times."""
        try:
            asked = embed_call(build_request(inputs, on_error=on_error, **options))
        except BadRequest as error:
            raise InvalidInput(error.message, param=error.param) from error
        result = self._core.wait_for(self._core.service.embed(asked, hold=lambda nbytes: None))
        return _client_result(result, asked.model or self.model.name, options.get("request_id") or "")

    def close(self) -> None:
        """Whoever still waits is told; the model's memory is freed. Once is enough, more does not hurt."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Core:
    """All of an engine that its threads refer to: not the Engine itself, which may be collected while they run."""

    def __init__(self, config: Config) -> None:
        self._pid = os.getpid()
        self._ending = threading.Lock()
        self._ended = ""  # why, once it has
        self._cause: BaseException | None = None
        self._loaded = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._pipeline = Pipeline(config, self._pipeline_changed)
        try:
            self._pipeline.load()
            self._loaded.wait()
            if self._pipeline.runner is None:
                raise self._pipeline.ended[0][1] or AssertionError("loading ended without a model")
        except BaseException:  # Ctrl-C too: then the model is dropped as soon as it is loaded
            self._end("the engine was not loaded")
            self._loop.close()
            raise
        self.card = self._pipeline.runner.card
        self._client = _Client(config, self._pipeline.waiting_room)
        self.service = Service(config, self._client)
        self._client.serve(self.card, self._pipeline.tokens_per_ms * 1000)
        self._pipeline.start("service", self._run_service)
        _open.add(self)
        try:
            self.service.use(self.card)
            self._pipeline.start("OutputLoop", self._deliver)
            self._pipeline.start_forwards()
            for loop in self._pipeline.loops:
                loop.entered.wait(ENTER_WITHIN_S)
        except BaseException:
            self.close()
            raise

    def wait_for(self, answer: Coroutine[Any, Any, T]) -> T:
        if self._pid != os.getpid():
            answer.close()
            raise EngineUnavailable("an engine does not survive a fork; make one in each process")
        with self._ending:
            if self._ended:
                answer.close()
                raise self._unavailable()
            future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        try:
            return future.result()
        except EngineUnavailable as error:
            raise (self._unavailable() if self._ended else error) from self._cause
        finally:
            future.cancel()  # where Ctrl-C ended the wait

    def close(self) -> None:
        if self._pid == os.getpid():  # in a fork's child there is nothing to end, and the sockets are the parent's too
            self._end("the engine is closed")
            self._pipeline.join()

    def abandon(self) -> None:
        """The garbage collector calls it, on any thread and perhaps within a lock: it takes none itself."""
        if self._pid == os.getpid():
            with suppress(RuntimeError):  # the loop is closed: so is all
                self._loop.call_soon_threadsafe(self._end, "the engine was collected")

    def _end(self, why: str, cause: BaseException | None = None) -> None:
        """Every caller is told why, and every thread ends after what it is doing. Called again it does nothing."""
        with self._ending:
            if self._ended:
                return
            self._ended, self._cause = why, cause
        self._pipeline.close()
        with suppress(RuntimeError):  # it never ran
            self._loop.call_soon_threadsafe(self._stop_service)

    def _unavailable(self) -> EngineUnavailable:
        error = EngineUnavailable(self._ended)
        error.__cause__ = self._cause
        return error

    def _pipeline_changed(self) -> None:
        """On the thread that loaded the model, or that ended: then its callers would wait for ever."""
        self._loaded.set()
        if self._pipeline.runner is not None and self._pipeline.ended:
            self._died(*self._pipeline.ended[-1])

    def _died(self, name: str, cause: BaseException | None) -> None:
        if not self._ended:
            log.critical("thread %s ended; so does the engine", name, exc_info=cause)
            self._end(f"the engine ended, for its thread {name} died ({cause!r}); make another Engine", cause)

    def _run_service(self) -> None:
        """What fails outside of a call would leave someone waiting."""
        self._loop.set_exception_handler(lambda _, context: self._died("service", context.get("exception")))
        self._loop.run_forever()
        self._loop.close()

    def _stop_service(self) -> None:
        """On the loop: everyone who waits is told, and then it stops."""
        self._client.disconnect()
        waiting = asyncio.all_tasks(self._loop)
        asyncio.gather(*waiting, return_exceptions=True).add_done_callback(lambda _: self._loop.stop())

    def _deliver(self) -> None:
        """OutputLoop's work without a socket: each batch's parts to those who wait for them, on their loop."""
        outbox = self._pipeline.outbox
        poller = select.poll()
        poller.register(outbox.wake_fd, select.POLLIN)
        while not outbox.closed:
            poller.poll()  # the only place that blocks
            batches, _ = outbox.take()
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                while batches:
                    self._loop.call_soon_threadsafe(self._client.receive, batches.popleft())


class _Client(EngineClient):
    """A frontend's side of the engine, whose messages are calls. All of it happens on the event loop."""

    def __init__(self, config: Config, waiting_room: WaitingRoom) -> None:
        super().__init__("in process", max_tokens=config.queued_tokens_limit)
        self._waiting_room = waiting_room
        self._door = asyncio.Lock()
        self._someone_left = asyncio.Event()

    def serve(self, card: ModelCard, tokens_per_s: float) -> None:
        self._address = EngineAddress(0, "", "", card, tokens_per_s)
        self._connected = True

    def disconnect(self, reason: str = "the engine ended before it answered; send the request again") -> None:
        super().disconnect(reason)
        self._address = None  # a batch that still comes does not connect it again

    @contextmanager
    def reserved(self, tokens: int) -> Iterator[None]:
        """Nobody is refused, so nothing is kept free."""
        yield

    async def embed(self, request: EngineRequest) -> EngineReply:
        """As the server's, but waits for room: in the order of arrival, and alone if it is larger than the queue."""
        async with self._door:
            while self._tokens.held and not self._tokens.has_room(len(request.token_ids)):
                self._someone_left.clear()
                await self._someone_left.wait()
        try:
            return await super().embed(request)
        finally:
            self._someone_left.set()

    def _admit(self, tokens: int, reply_bytes: int) -> None:
        """In the same turn of the loop in which the door let it in."""
        if not self._connected:
            raise EngineUnavailable("the engine is closed")
        self._tokens.enter(tokens, time.monotonic())
        self._reply_bytes.enter(reply_bytes, time.monotonic())

    def receive(self, finished: FinishedBatch) -> None:
        indexes = range(len(finished.batch.parts))
        bad_rows = nonfinite_rows(finished)
        parts = [reply_part(finished, index, 0, bad_rows.get(index, [])) for index in indexes]
        forward_ms = (finished.ended_at - finished.launched_at) * 1000
        header = ReplyHeader(0, time.monotonic(), forward_ms, 0.0, parts, [])
        self._receive(header, finished.buffer.data)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._acknowledged_bytes = self._received_bytes
        outgoing, self._outgoing = self._outgoing, []
        cancels, self._cancels = self._cancels, []
        if cancels:
            self._waiting_room.cancel(self._name, cancels)
        refused = self._waiting_room.add(
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
            for pending in outgoing
            if pending.id in self._pending
        )
        assert not refused, "the door lets no more in than the waiting room holds"


def _client_result(result: call.EmbedResult, model: str, request_id: str) -> EmbedResult:
    """What a client of a server gets. Only the arrays are the caller's own: a view would hold a whole batch's buffer,
    which is one of few, for as long as he keeps a vector."""
    scales = np.frombuffer(result.scales, np.float32).copy() if result.dtype is OutputDtype.INT8 else None
    return EmbedResult(
        vectors=result.rows() if _is_its_own(result.vectors) else result.rows().copy(),
        scales=scales,
        dims=result.dims,
        token_counts=result.token_counts.tolist(),
        truncated=result.truncated,
        failures=[
            InputFailure(index, error.code or "", error.message) for index, error in sorted(result.errors.items())
        ],
        model=model,
        space_id=result.card.space_id,
        numerics_id=result.card.numerics_id,
        request_id=request_id,
        times=StageTimes(**asdict(result.times)),
    )


def _is_its_own(rows: memoryview | bytes) -> bool:
    """Those that came in several batches have been gathered already."""
    return isinstance(rows, memoryview) and isinstance(rows.obj, bytearray)


_open: weakref.WeakSet[_Core] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread in the midst of a forward, when the interpreter goes, would take the process down with a crash."""
    for core in list(_open):
        core.close()
