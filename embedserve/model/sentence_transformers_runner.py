"""A model that the packed forward does not serve, run by sentence-transformers' own modules: padded, and slower.

Knows token ids and rows, as every runner; the folder's modules are sentence-transformers' business.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import sentence_transformers
import torch
import transformers
from tokenizers import Tokenizer
from transformers.utils import logging as transformers_logging

from embedserve.errors import StartError
from embedserve.model.loader import space_of_files, tensor_names
from embedserve.model.runner import make_card, sort_by_length
from embedserve_kernels.pool_normalize import pool_normalize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sentence_transformers import SentenceTransformer

    from embedserve.model.card import ModelCard
    from embedserve.model.folder import ModelFolder
    from embedserve_kernels.output_layout import RowTable

MAX_PADDED_TOKENS = 4096  # of one call of the modules
MAX_INPUT_TOKENS = 1 << 20  # tokenizers without a limit name one of 10^30
# What their two ways to tokenize are compared on: case, accents, scripts, numbers, spaces within.
TOKENIZER_PROBES = ("How much?", "ÉCOLE Größe naïve", "北京 مرحبا 😀", "a\tb\nc  d", "<s> [SEP] 3.14159, don't", "")
_FEATURES = {"input_ids", "attention_mask", "token_type_ids"}
# These modules put an embedding at each position; padding comes to the right, so positions begin at the table's first.
_POSITION_TABLES = {"position_embeddings", "embed_positions", "wpe"}
# They change with the longest sequence that is run: a vector would depend on what shares its batch.
_CHANGING_ROPE = {"dynamic", "longrope"}


def load_sentence_transformers(
    folder: ModelFolder, name: str, dtype: torch.dtype, device: torch.device
) -> SentenceTransformersRunner:
    """Raises StartError for what its modules cannot be given as token ids, and for weights that cannot be read."""
    space_id = space_of_files(folder)
    with _quiet_transformers():
        try:
            model = sentence_transformers.SentenceTransformer(
                str(folder.root),
                device=str(device),
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"dtype": dtype},
            )
        except Exception as error:  # whatever the folder's files make its libraries raise
            raise StartError(f"sentence-transformers cannot load {folder.root}: {_first_line(error)}") from error
        transformer: Any = model[0]
        _check_weights(transformer.auto_model, folder)
    modules = list(model.eval().children())
    for module in modules[1:]:
        module.float()  # pooling and what follows it, as the packed forward has them
    runner = SentenceTransformersRunner(
        modules[:-1] if folder.normalized else modules,  # the last one's work is done with the cut, behind it
        pad_id=model.tokenizer.pad_token_id or 0,
        token_types=_check_tokenizer(model, folder),
    )
    _check_rope(model, folder)
    runner.card = make_card(
        folder,
        name,
        dims=runner.forward(np.zeros(1, np.int32), np.ones(1, np.int32)).shape[1],
        max_input_tokens=_max_input_tokens(model, folder),
        vocab_size=transformer.auto_model.get_input_embeddings().weight.shape[0],
        dtype=dtype,
        device=device,
        space_id=space_id,
        kernels=f"sentence-transformers-{sentence_transformers.__version__}/transformers-{transformers.__version__}",
    )
    return runner


class SentenceTransformersRunner:
    """As `model.runner.Runner`; a forward uses every thread. Running changes no module, so the lanes share them."""

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
        batch = sort_by_length(token_ids, lengths, table)
        with torch.inference_mode():
            for rows in _sub_batches(batch.lengths):
                tokens = slice(int(batch.cu_seqlens[rows.start]), int(batch.cu_seqlens[rows.stop]))
                vectors = self.forward(batch.token_ids[tokens], batch.lengths[rows])
                one_token_each = torch.arange(len(vectors) + 1)
                pool_normalize(vectors, one_token_each, "cls", table.take(batch.order[rows]), torch.from_numpy(out))
                if between is not None:
                    between()

    def forward(self, token_ids: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        """[total_tokens] and [rows] -> [rows, dims], by the folder's modules."""
        mask = np.arange(int(lengths.max())) < lengths[:, np.newaxis]  # [rows, longest]
        padded = np.full(mask.shape, self._pad_id, np.int64)
        padded[mask] = token_ids
        features: dict[str, Any] = {
            "input_ids": torch.from_numpy(padded),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        }
        if self._token_types:
            features["token_type_ids"] = torch.zeros_like(features["input_ids"])
        with torch.inference_mode():
            features = self._modules[0](features)
            features["token_embeddings"] = features["token_embeddings"].float()
            for module in self._modules[1:]:
                features = module(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors

    def enter_thread(self) -> None:
        torch.set_num_threads(self._threads)
        torch.get_num_threads()  # before any operation: the thread keeps its number, whatever another sets later


def _sub_batches(lengths: np.ndarray) -> Iterator[slice]:
    """lengths: ascending. Rows whose padded size is bounded and of which none is padded to more than its double; a
    longer one goes alone."""
    end = len(lengths)
    while end:
        longest = int(lengths[end - 1])
        first = max(end - max(1, MAX_PADDED_TOKENS // longest), int(np.searchsorted(lengths, longest / 2)))
        yield slice(first, end)
        end = first


def _check_weights(model: Any, folder: ModelFolder) -> None:
    """model: a transformers.PreTrainedModel. transformers fills what the files lack with random numbers, and goes on.

    Names as the model has them are proof enough; where some differ (tied weights, renamed ones) it is asked what it
    missed, which loads them once more.
    """
    prefix = model.base_model_prefix + "."
    stored = {name.removeprefix(prefix) for name in tensor_names(folder.path)}
    expected = {name.removeprefix(prefix) for name in model.state_dict()}
    if all(name in stored or name.startswith("pooler.") for name in expected):
        return
    _, told = type(model).from_pretrained(
        folder.path, config=model.config, local_files_only=True, output_loading_info=True
    )
    missing = sorted(name for name in told["missing_keys"] if not name.removeprefix(prefix).startswith("pooler."))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StartError(f"the weights in {folder.path} lack {missing[0]}{more}.")


def _check_tokenizer(model: SentenceTransformer, folder: ModelFolder) -> bool:
    """The frontends tokenize by tokenizer.json, sentence-transformers by what it makes of the folder's settings too.

    -> whether the modules want token types, which are all zero. Raises StartError when token ids are not all that
    they want, or are others.
    """
    try:
        tokenizer = Tokenizer.from_file(str(folder.tokenizer_file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise StartError(f"{folder.tokenizer_file} cannot be read: {_first_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tensors: dict[str, Any] = {}
    for probe in TOKENIZER_PROBES:
        features = model.preprocess([probe])
        tensors = {name: value for name, value in features.items() if isinstance(value, torch.Tensor)}
        if features.get("modality", "text") != "text" or not tensors.keys() <= _FEATURES:
            raise StartError(
                f"{folder.root}: sentence-transformers makes {', '.join(sorted(tensors))} of a "
                f"{features.get('modality', 'text')}; supported: a text's token ids, without a chat template."
            )
        ours = tokenizer.encode_batch_fast([probe])[0].ids
        theirs = tensors["input_ids"][tensors["attention_mask"].bool()].tolist()
        if theirs != ours[: len(theirs)] or (len(theirs) < len(ours) and len(theirs) < (model.max_seq_length or 0)):
            raise StartError(
                f"{folder.tokenizer_file} makes {ours} of {probe!r}, and sentence-transformers {theirs}. "
                "Load the folder with SentenceTransformer(...) and save it again, so that tokenizer.json says all."
            )
        if tensors.get("token_type_ids", torch.zeros(1)).any():
            raise StartError(f"{folder.tokenizer_file} gives token types other than 0; supported: 0.")
    return "token_type_ids" in tensors


def _check_rope(model: SentenceTransformer, folder: ModelFolder) -> None:
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        changing = _CHANGING_ROPE & (set(types.values()) if isinstance(types, dict) else {types})
        if changing:
            raise StartError(
                f"{folder.path / 'config.json'}: the rope type is {changing.pop()}, with which a vector depends on "
                "what shares its batch; supported: those that do not change with the length."
            )


def _max_input_tokens(model: SentenceTransformer, folder: ModelFolder) -> int:
    """What sentence-transformers cuts at, or fewer where the model has no more positions."""
    limits = [MAX_INPUT_TOKENS, model.max_seq_length or MAX_INPUT_TOKENS]
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _POSITION_TABLES and isinstance(module, torch.nn.Embedding):
            behind_padding = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - behind_padding - getattr(module, "offset", 0))
    if min(limits) == MAX_INPUT_TOKENS:
        raise StartError(
            f"{folder.path} names no limit of an input's tokens; set max_seq_length in its sentence_bert_config.json."
        )
    return int(min(limits))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().split("\n")), "") or type(error).__name__


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """It writes progress bars and tables to stderr past the log; what matters of them is checked here."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
