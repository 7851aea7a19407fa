"""A model that the packed forward does not serve, run by sentence-transformers' own modules: padded, and slower.

Knows token ids and rows, as every runner; the folder's modules are sentence-transformers' business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import sentence_transformers
import torch
from torch.nn.utils.rnn import pad_sequence

from embedserve.errors import StartError
from embedserve.model.loader import space_of_files
from embedserve.model.runner import make_card
from embedserve_kernels.pool_normalize import pool_normalize

if TYPE_CHECKING:
    from collections.abc import Callable

    from embedserve.model.card import ModelCard
    from embedserve.model.folder import ModelFolder
    from embedserve_kernels.output_layout import RowTable

MAX_PADDED_TOKENS = 4096  # of one call of the modules
MAX_ROWS = 64


def load_sentence_transformers(
    folder: ModelFolder, name: str, dtype: torch.dtype, device: torch.device
) -> SentenceTransformersRunner:
    """Raises StartError for what its modules cannot be given as token ids, and for weights that cannot be read."""
    if folder.lower_case:
        raise StartError(
            f"{folder.path / 'sentence_bert_config.json'}: do_lower_case is true; supported: false, "
            "with the lower-casing in tokenizer.json, where uncased models have it."
        )
    space_id = space_of_files(folder)
    try:
        model = sentence_transformers.SentenceTransformer(
            str(folder.root), device=str(device), local_files_only=True, trust_remote_code=False
        ).to(dtype)
    except Exception as error:  # whatever the folder's files make its libraries raise
        reason = str(error).strip().split("\n")[0]
        raise StartError(f"sentence-transformers cannot load {folder.root}: {reason}") from error
    limit = model.max_seq_length or folder.max_input_tokens
    if limit is None:
        raise StartError(f"{folder.path} names no limit of an input's tokens; set max_seq_length.")
    modules = list(model.children())
    tokenizer: Any = model.tokenizer
    runner = SentenceTransformersRunner(
        modules[:-1] if folder.normalized else modules,  # the last one's work is done with the cut, behind it
        pad_id=tokenizer.pad_token_id or 0,
        token_types="token_type_ids" in tokenizer.model_input_names,
    )
    runner.card = make_card(
        folder,
        name,
        dims=runner.forward([torch.zeros(1, dtype=torch.int64)]).shape[1],
        max_input_tokens=int(limit),
        vocab_size=int(folder.config.get("vocab_size") or len(tokenizer)),
        dtype=dtype,
        device=device,
        space_id=space_id,
        kernels=f"sentence-transformers-{sentence_transformers.__version__}",
    )
    return runner


class SentenceTransformersRunner:
    """As `model.runner.Runner`. One forward at a time, on all threads."""

    card: ModelCard
    forwards = 1

    def __init__(self, modules: list[torch.nn.Module], *, pad_id: int, token_types: bool) -> None:
        self._modules = modules
        self._pad_id = pad_id
        self._token_types = token_types
        self._threads = torch.get_num_threads()

    def launch(
        self,
        token_ids: np.ndarray,
        lengths: np.ndarray,
        table: RowTable,
        out: np.ndarray,
        between: Callable[[], None] | None = None,
    ) -> None:
        sequences = torch.split(torch.from_numpy(token_ids.astype(np.int64)), lengths.tolist())
        order = np.argsort(lengths, kind="stable")
        for rows in _sub_batches(order, lengths):
            vectors = self.forward([sequences[row] for row in rows])
            one_token_each = torch.arange(len(rows) + 1)
            pool_normalize(vectors, one_token_each, "cls", table.take(rows), torch.from_numpy(out))
            if between is not None:
                between()

    def forward(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        """[tokens] int64 each -> [rows, dims], by the folder's modules."""
        ids = pad_sequence(list(sequences), batch_first=True, padding_value=self._pad_id)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        mask = (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).long()
        features: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if self._token_types:
            features["token_type_ids"] = torch.zeros_like(ids)
        with torch.inference_mode():
            for module in self._modules:
                features = module(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors

    def enter_thread(self) -> None:
        torch.set_num_threads(self._threads)
        torch.get_num_threads()  # before any operation: the thread keeps its number, whatever another sets later


def _sub_batches(order: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Rows, shortest first, in parts whose padded size is bounded; a longer one goes alone."""
    batches: list[np.ndarray] = []
    first = 0
    for end in range(1, len(order) + 1):
        padded = (end + 1 - first) * int(lengths[order[min(end, len(order) - 1)]])
        if end == len(order) or end - first == MAX_ROWS or padded > MAX_PADDED_TOKENS:
            batches.append(order[first:end])
            first = end
    return batches
