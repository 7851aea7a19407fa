"""Vectors of a runner, and of sentence-transformers in float32 on the same folder, for tests that compare them.

Knows nothing of the server.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from embedserve_kernels.output_layout import OutputDtype, lay_out

if TYPE_CHECKING:
    from embedserve.model.runner import Runner

LEAST_COSINE = {"float32": 0.99999, "bfloat16": 0.9995}


class Reference:
    """Texts of one model: their token ids, cut as sentence-transformers cuts them, and its vectors in float32."""

    def __init__(self, folder: str, texts: list[str], prompt: str = "") -> None:
        model = SentenceTransformer(folder, device="cpu", local_files_only=True)
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        tokenizer.no_padding()
        tokenizer.enable_truncation(model.max_seq_length)
        self.ids = [
            np.array(encoded.ids, dtype=np.int32)
            for encoded in tokenizer.encode_batch_fast([prompt + text for text in texts])
        ]
        self.vectors = model.encode(texts, prompt=prompt or None, batch_size=16)
        self.dims = self.vectors.shape[1]
        # one token and no [CLS] or [SEP] around it: shorter than any text is
        self.ids.append(np.array([tokenizer.token_to_id("the")], dtype=np.int32))
        self.vectors = np.concatenate([self.vectors, one_token_vector(model, int(self.ids[-1][0]))])

    def check(self, runner: Runner, batches: list[list[int]]) -> None:
        self.check_cut(runner, batches, self.dims)

    def check_cut(self, runner: Runner, batches: list[list[int]], dims: int) -> None:
        """Of the first `dims` dimensions, normalised again where the model's are."""
        for batch in batches:
            vectors = embed(runner, [self.ids[i] for i in batch], dims)
            expected = self.vectors[batch][:, :dims]
            cosine = (
                (vectors * expected).sum(axis=1) / np.linalg.norm(vectors, axis=1) / np.linalg.norm(expected, axis=1)
            )
            worst = int(cosine.argmin())
            assert cosine[worst] >= LEAST_COSINE[runner.card.dtype], (batch[worst], len(self.ids[batch[worst]]))


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


def embed(runner: Runner, ids: list[np.ndarray], dims: int | None = None) -> np.ndarray:
    """-> float32 [rows, dims] of sequences of token ids."""
    return launch(runner, np.concatenate(ids), np.array([len(i) for i in ids], dtype=np.int32), dims)


def launch(runner: Runner, token_ids: np.ndarray, lengths: np.ndarray, dims: int | None = None) -> np.ndarray:
    rows, dims = len(lengths), dims or runner.card.dims
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


BATCHES = {
    "alone": lambda lengths: [[i] for i in range(len(lengths))],
    "among equals": among_equals,
    "among strangers": among_strangers,
    "all at once": lambda lengths: [list(range(len(lengths)))],
}
