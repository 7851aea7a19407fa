"""embedserve.Engine: the vectors of sentence-transformers in one's own process, from any thread, until it is closed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest
from checkpoints import sentences
from servers import assert_alike

from embedserve import Engine
from embedserve.errors import EngineUnavailable, InputTooLong, InvalidInput, InvalidTokenId, StartError
from embedserve.metrics import BATCH_INPUTS

if TYPE_CHECKING:
    from servers import Reference

LONG_TEXT = "every one of these words is a token of its own " * 20


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


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
    assert_alike(full.rows() * np.frombuffer(full.scales, np.float32)[:, None], expected)
    own = engine.embed(["hello world"])  # a value near zero may have the other sign in bfloat16
    assert engine.embed(["hello world"], dtype="ubinary").tolist() == np.packbits(own > 0, axis=1).tolist()


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
    assert list(result.errors) == [1]
    assert not result.rows()[1].any()
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


def test_thread_that_dies_is_told_to_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()

    def lost(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("embedserve.model.runner.Runner.launch", lost)
    with pytest.raises(EngineUnavailable):
        engine.embed(["a"])
    engine.close()


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
