"""embedserve.Engine: the vectors of sentence-transformers in one's own process, from any thread, until it is closed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from checkpoints import edit_json, save_tiny_bert, sentences
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantize_embeddings
from servers import assert_alike

from embedserve import Engine
from embedserve.errors import EngineUnavailable, InputTooLong, InvalidInput, InvalidTokenId, NonfiniteOutput, StartError
from embedserve.metrics import BATCH_INPUTS, OUTPUT_BUFFERS_OUTSIDE_RING, QUEUED_TOKENS
from embedserve.model.runner import PackedRunner

if TYPE_CHECKING:
    from servers import Reference

    from embedserve_kernels.output_layout import RowTable

LONG_TEXT = "every one of these words is a token of its own " * 20


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_bert(tmp_path_factory.mktemp("in-process"))
    edit_json(folder / "config_sentence_transformers.json", prompts={"query": "the question ", "topic": "about "})
    return folder


@dataclass
class Held:
    """Forward passes stop before they begin, until `go`."""

    entered: threading.Event
    go: threading.Event


def hold_launches(monkeypatch: pytest.MonkeyPatch, *, then_raise: BaseException | None = None) -> Held:
    held = Held(threading.Event(), threading.Event())
    launch = PackedRunner.launch

    def hold(*args: Any) -> None:
        held.entered.set()
        assert held.go.wait(20)
        if then_raise is not None:
            raise then_raise
        launch(*args)

    monkeypatch.setattr(PackedRunner, "launch", hold)
    return held


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not come about within 20 s")


def test_vectors_are_those_of_sentence_transformers(engine: Engine, reference: Reference) -> None:
    vectors = engine.embed(sentences())
    assert vectors.shape == (len(sentences()), engine.model.dims)
    assert vectors.flags.writeable
    assert_alike(vectors, reference(sentences()))


def test_token_ids_dimensions_and_dtypes(engine: Engine, reference: Reference) -> None:
    expected = reference(["hello world"])
    assert_alike(engine.embed([[7592, 2088]]), expected)
    cut = engine.embed(["hello world"], dimensions=64)
    assert_alike(cut, expected[:, :64])
    np.testing.assert_allclose(np.linalg.norm(cut, axis=1), 1, atol=1e-6)
    full = engine.embed_full(["hello world"], dtype="int8")
    assert_alike(full.vectors * full.scales[:, None], expected)
    own = engine.embed(["hello world"])  # a value near zero may have the other sign in bfloat16
    assert engine.embed(["hello world"], dtype="ubinary").tolist() == np.packbits(own > 0, axis=1).tolist()


@pytest.mark.parametrize("dtype", ["float16", "int8", "binary", "ubinary"])
def test_other_dtypes_are_what_sentence_transformers_makes_of_the_vectors(engine: Engine, dtype: str) -> None:
    texts = sentences()[:30]
    result = engine.embed_full(texts, dtype=dtype)
    own = engine.embed(texts)
    assert result.vectors.flags.writeable
    assert result.vectors.dtype == {"binary": "int8", "ubinary": "uint8"}.get(dtype, dtype)
    if dtype == "int8":
        np.testing.assert_allclose(result.vectors * result.scales[:, None], own, atol=1e-3)
    elif dtype == "float16":
        np.testing.assert_allclose(result.vectors, own, atol=1e-3)
        assert result.scales is None
    else:
        expected = quantize_embeddings(own, precision=dtype)
        differing = np.unpackbits((result.vectors ^ expected).view(np.uint8)).sum()
        assert differing <= 0.001 * own.size  # a value near zero may have another sign in another batch


def test_prompts_are_those_of_the_folder(tiny_bert: Path) -> None:
    reference = SentenceTransformer(str(tiny_bert), device="cpu", local_files_only=True)
    texts = sentences()[:20]
    with Engine(tiny_bert, dtype="float32") as engine:
        for options, prompt in (
            ({"input_type": "query"}, "the question "),
            ({"prompt_name": "topic"}, "about "),
            ({}, ""),
        ):
            assert_alike(engine.embed(texts, **options), reference.encode(texts, prompt=prompt))
        with pytest.raises(InvalidInput, match="this model has 'query', 'topic'"):
            engine.embed(texts, prompt_name="none")


def test_rows_of_several_batches_come_back_in_order_and_stay_as_they_were(tiny_bert: Path) -> None:
    texts = sentences()[:200]
    reference = SentenceTransformer(str(tiny_bert), device="cpu", local_files_only=True).encode(texts)
    with Engine(tiny_bert, dtype="float32", max_batch_tokens=300) as engine:
        batches, _ = batches_and_inputs()
        vectors = engine.embed(texts)
        assert batches_and_inputs()[0] - batches > 3
        outside = OUTPUT_BUFFERS_OUTSIDE_RING._value.get()
        kept = [engine.embed(texts[index : index + 1]) for index in range(20)]  # more than there are buffers
        assert OUTPUT_BUFFERS_OUTSIDE_RING._value.get() == outside
        assert_alike(vectors, reference)
        assert_alike(np.concatenate(kept), reference[:20])


def test_vector_with_nan_in_it_is_an_error(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tiny_bert) as engine:
        launch = PackedRunner.launch

        def spoil(
            self: PackedRunner, token_ids: np.ndarray, lengths: np.ndarray, table: RowTable, out: np.ndarray, *rest: Any
        ) -> None:
            launch(self, token_ids, lengths, table, out, *rest)
            out[table.status_offset[1]] = 1

        monkeypatch.setattr(PackedRunner, "launch", spoil)
        with pytest.raises(NonfiniteOutput, match="the vector of input 1"):
            engine.embed(["a", "b", "c"])


def test_threads_share_batches_and_each_gets_its_own(engine: Engine, reference: Reference) -> None:
    texts = sentences()[:160]
    batches, inputs = batches_and_inputs()
    engine.embed([LONG_TEXT[:900]] * 64)  # so that others wait meanwhile
    with ThreadPoolExecutor(16) as pool:
        vectors = np.concatenate(list(pool.map(lambda text: engine.embed([text]), texts)))
    assert_alike(vectors, reference(texts))
    more_batches, more_inputs = batches_and_inputs()
    assert more_inputs - inputs == len(texts) + 64
    assert more_batches - batches < more_inputs - inputs - 64


def batches_and_inputs() -> tuple[float, float]:
    values = {sample.name: sample.value for metric in BATCH_INPUTS.collect() for sample in metric.samples}
    return values["embedserve_batch_inputs_count"], values["embedserve_batch_inputs_sum"]


def test_request_of_more_tokens_than_the_queue_holds_waits_for_room(reference: Reference) -> None:
    texts = sentences()[:100]
    with Engine(max_queued_tokens=200, max_batch_tokens=256) as engine, ThreadPoolExecutor(4) as pool:
        for vectors in pool.map(engine.embed, [texts] * 4):  # each is more than 200 tokens, and spans batches
            assert_alike(vectors, reference(texts))


def test_bad_inputs_are_errors_that_name_them(engine: Engine) -> None:
    for inputs, kind, message in (
        ([], InvalidInput, "empty"),
        ("a lone text", InvalidInput, r"as \[text\]"),
        (["good", "bad \ud800"], InvalidInput, "input 1 has a lone surrogate"),
        (["good", 7], InvalidInput, "input 1 is a"),
        ([LONG_TEXT * 10], InputTooLong, "input 0 has"),
        ([[5], [99_999_999]], InvalidTokenId, "input 1 has the token id"),
    ):
        with pytest.raises(kind, match=message):
            engine.embed(inputs)
    with pytest.raises(InvalidInput, match="dimensions is 0"):
        engine.embed(["a"], dimensions=0)
    result = engine.embed_full(["good", LONG_TEXT * 10], on_error="per_input")
    assert [(failure.index, failure.code) for failure in result.failures] == [(1, "context_length_exceeded")]
    assert not result.vectors[1].any()
    assert len(engine.embed(["the next one"])) == 1


def test_closing_tells_whoever_waits_and_whoever_comes_later() -> None:
    engine = Engine()
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            engine.embed([LONG_TEXT] * 2000)
        except EngineUnavailable as error:
            failures.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    engine.close()
    for thread in threads:
        thread.join(20)
    assert len(failures) == 3
    with pytest.raises(EngineUnavailable, match="closed"):
        engine.embed(["too late"])
    engine.close()


def test_thread_that_dies_is_told_to_all_who_wait_and_to_whoever_comes_later(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(tiny_bert, max_queued_tokens=100) as engine, ThreadPoolExecutor(4) as pool:
        held = hold_launches(monkeypatch, then_raise=MemoryError("of the test"))
        waiting = [pool.submit(engine.embed, [sentences()[0]] * 30) for _ in range(4)]  # three of them for room
        held.entered.wait(20)
        held.go.set()
        for future in waiting:
            with pytest.raises(EngineUnavailable, match="of the test") as raised:
                future.result(20)
            assert isinstance(raised.value.__cause__, MemoryError)
        with pytest.raises(EngineUnavailable, match="make another"):
            engine.embed(["too late"])


def test_rows_that_cannot_be_handed_out_are_told_to_who_waits(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("of the test")

    monkeypatch.setattr("embedserve.in_process.reply_part", fail)
    with Engine(tiny_bert) as engine, pytest.raises(EngineUnavailable, match="of the test"):
        engine.embed(["a"])


def test_caller_who_is_interrupted_frees_his_rows(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(tiny_bert, forwards=1, threads=1) as engine:
        held = hold_launches(monkeypatch)

        def interrupt() -> None:
            held.entered.wait(20)
            main = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat")
            wait_until(lambda: main.read_text().rpartition(") ")[2][0] == "S")  # a signal just before it waits is lost
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            engine.embed(sentences() * 20)  # one batch runs, the others wait
        wait_until(lambda: QUEUED_TOKENS.labels("bulk")._value.get() == 0)
        held.go.set()
        assert engine.embed(["the next one"]).shape == (1, 48)


def test_engine_that_nobody_refers_to_frees_its_model_its_threads_and_its_descriptors(tiny_bert: Path) -> None:
    Engine(tiny_bert).close()  # what the first one opens for the process stays
    gc.collect()
    threads, files = set(threading.enumerate()), os.listdir("/proc/self/fd")
    engine = Engine(tiny_bert)
    runner = weakref.ref(engine._core._pipeline.runner)
    engine.embed(["a"])
    del engine
    wait_until(lambda: set(threading.enumerate()) <= threads)
    gc.collect()
    assert runner() is None
    assert len(os.listdir("/proc/self/fd")) <= len(files)


def test_closing_frees_the_model_while_the_engine_is_still_referred_to(tiny_bert: Path) -> None:
    engine = Engine(tiny_bert)
    runner = weakref.ref(engine._core._pipeline.runner)
    engine.close()
    gc.collect()
    assert runner() is None
    assert engine.model.dims == 48


def test_process_keeps_its_number_of_threads_for_torch(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    other = before + 1
    torch.set_num_threads(other)
    try:
        with Engine(tiny_bert, threads=1) as engine, ThreadPoolExecutor(1) as pool:
            assert (torch.get_num_threads(), pool.submit(torch.get_num_threads).result()) == (other, other)
            seen: list[int] = []
            launch = PackedRunner.launch
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    PackedRunner, "launch", lambda *args: (seen.append(torch.get_num_threads()), launch(*args))
                )
                engine.embed(["a query"])
                engine.embed(["bulk"] * 9)
            assert seen == [1, 1]
    finally:
        torch.set_num_threads(before)


def test_child_of_a_fork_is_told_and_the_parent_is_not_disturbed(tiny_bert: Path) -> None:
    script = f"""
import os, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of the fork
from embedserve import Engine
engine = Engine({str(tiny_bert)!r})
if (child := os.fork()) == 0:
    try:
        engine.embed(["a"])
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    engine.close()
    del engine
    raise SystemExit
print(os.waitpid(child, 0)[1], engine.embed(["a"]).shape)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "EngineUnavailable an engine does not survive a fork; make one in each process\n0 (1, 48)\n"


def test_model_that_is_not_there_is_an_error() -> None:
    with pytest.raises(StartError, match="no folder /nowhere"):
        Engine("/nowhere")


def test_process_ends_without_a_close_and_without_a_word() -> None:
    script = "from embedserve import Engine; print(Engine().embed(['a']).shape)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(1, 384)\n", "")


def test_without_the_servers_packages_the_error_says_what_to_install() -> None:
    script = """
import sys
sys.modules["zmq"] = None
try:
    from embedserve import Engine
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "pip install 'embedserve[server]'" in done.stdout, done.stderr
