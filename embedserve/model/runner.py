"""A loaded model: packed token ids in, the bytes of a batch's rows out.

Knows tensors, rows and devices; neither requests nor sockets. Load on one of the threads that will launch.
"""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from embedserve import __version__
from embedserve.config import available_cores
from embedserve.errors import NotNative, StartError
from embedserve.model.card import ModelCard
from embedserve.model.folder import check_native, read_folder
from embedserve.model.hub import find_model
from embedserve.model.loader import dummy_weights, load_weights
from embedserve_kernels.output_layout import OutputDtype, lay_out
from embedserve_kernels.pool_normalize import Pooling, pool_normalize
from embedserve_kernels.varlen_attention import group_equal_lengths

if TYPE_CHECKING:
    from collections.abc import Callable

    from embedserve.model.folder import ModelFolder
    from embedserve.model.registry import PackedModel
    from embedserve_kernels.output_layout import RowTable

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16"}
WARM_TOKENS = 512
WARM_WITHIN_S = 5.0
SMALL_HIDDEN = 512
MAX_AUTO_FORWARDS = 8  # each holds the GIL for a part of its time


class Runner(Protocol):
    """Call `launch` on any threads, of which `forwards` at a time keep the cores busy, and each of which called
    `enter_thread` first."""

    card: ModelCard
    forwards: int

    def launch(
        self,
        token_ids: np.ndarray,
        lengths: np.ndarray,
        table: RowTable,
        out: np.ndarray,
        between: Callable[[], None] | None = None,
    ) -> None:
        """token_ids [total_tokens] int32, sequences end to end, special tokens already in; lengths [rows] int32,
        each at least 1 and at most the card's limit; table: where each row goes in `out` [bytes] uint8.

        Every byte that `table` names is written when this returns, and no other. `between` is called between the
        pieces of the forward; it may take its time.
        """

    def enter_thread(self) -> None:
        """How many threads an operation may use is a setting of the thread that calls it."""


def load_runner(
    model: str | None,
    *,
    revision: str | None = None,
    backend: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    forwards: int | None = None,
    load_format: str = "auto",
) -> Runner:
    """model: a local folder, a hub id such as "org/name", or None for the bundled model.

    revision: of a hub id. backend: auto, native, sentence-transformers; auto takes the latter for what the former does
    not serve, and logs why. dtype: auto, float32, bfloat16, float16. device: auto, cpu. threads: of a CPU, for all
    forward passes together, None takes every core; forwards: how many will run side by side, None chooses.
    load_format: auto reads the weights, dummy makes random ones of their shapes. Raises StartError, one line that says
    what to change.
    """
    torch_device = _choose_device(device)
    torch_dtype = _choose_dtype(dtype)
    path, name = find_model(model, revision)
    folder = read_folder(path)
    threads = threads or available_cores()
    if backend != "sentence-transformers":
        try:
            return _load_packed(folder, name, torch_dtype, torch_device, threads, forwards, load_format)
        except NotNative as error:
            if load_format == "dummy":
                raise
            if backend == "native":
                raise NotNative(f"{error} Serve another model, or take --backend auto.") from error
            log.warning("%s It is served by sentence-transformers, padded and slower.", error)
    elif load_format == "dummy":
        raise StartError("--load-format dummy is for --backend native; sentence-transformers reads its weights itself.")
    from embedserve.model.sentence_transformers_runner import load_sentence_transformers

    torch.set_num_threads(threads)
    return load_sentence_transformers(folder, name, torch_dtype, torch_device)


def _load_packed(
    folder: ModelFolder,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
    forwards: int | None,
    load_format: str,
) -> Runner:
    check_native(folder)
    if folder.max_input_tokens is None:
        raise StartError(f"{folder.path / 'config.json'} has no max_position_embeddings; a model's config names it.")
    forwards = _choose_forwards(forwards, threads, int(folder.config.get("hidden_size", 0)))
    torch.set_num_threads(max(1, threads // forwards))  # before the weights: their layout is chosen for it
    with torch.inference_mode():
        load = dummy_weights if load_format == "dummy" else load_weights
        packed, space_id = load(folder, dtype=dtype, device=device)
    card = make_card(
        folder,
        name,
        dims=packed.config.hidden,
        max_input_tokens=folder.max_input_tokens,
        vocab_size=packed.config.vocab_size,
        dtype=dtype,
        device=device,
        space_id=space_id,
        kernels=packed.attention_kernels,
    )
    return PackedRunner(card, packed, forwards)


def make_card(
    folder: ModelFolder,
    name: str,
    *,
    dims: int,
    max_input_tokens: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device,
    space_id: str,
    kernels: str,
) -> ModelCard:
    """kernels: what else, beside dtype, device and versions, decides how sums are rounded."""
    dtype_name = str(dtype).removeprefix("torch.")
    return ModelCard(
        name=name,
        tokenizer_file=str(folder.tokenizer_file),
        architecture=folder.architecture,
        dims=min(dims, folder.truncate_dim or dims),
        max_input_tokens=max_input_tokens,
        vocab_size=vocab_size,
        pooling=folder.pooling,
        normalized=folder.normalized,
        dtype=dtype_name,
        device=device.type,
        space_id=space_id,
        numerics_id=_numerics_id(dtype_name, device, kernels),
        prompts=folder.prompts,
        default_prompt_name=folder.default_prompt_name,
        similarity=folder.similarity,
        matryoshka_dims=folder.matryoshka_dims,
    )


def warm_up(runner: Runner) -> float:
    """Run the totals up to WARM_TOKENS that a batch may be rounded to, so that few requests pay for their kernels: the
    smallest first, as far as WARM_WITHIN_S goes. -> tokens per ms of the largest that ran."""
    started = time.monotonic()
    for total in sorted({round_up_tokens(total) for total in range(1, WARM_TOKENS + 1)}):
        _run_zeros(runner, total)
        if time.monotonic() - started > WARM_WITHIN_S:
            break
    again = time.monotonic()
    _run_zeros(runner, total)
    return total / ((time.monotonic() - again) * 1000)


def _run_zeros(runner: Runner, total: int) -> None:
    rows = -(-total // runner.card.max_input_tokens)
    lengths = np.full(rows, total // rows, np.int32)
    layout = lay_out([rows], [runner.card.dims], [OutputDtype.FLOAT32], [True])
    token_ids = np.zeros(int(lengths.sum()), np.int32)
    runner.launch(token_ids, lengths, layout.table, np.empty(layout.total_bytes, np.uint8))


class PackedRunner:
    """A model of ours, over sequences end to end, none padded.

    torch's parallel operations keep a pool of workers for each thread that calls them.
    """

    def __init__(self, card: ModelCard, model: PackedModel, forwards: int) -> None:
        self.card = card
        self.forwards = forwards
        self._threads = torch.get_num_threads()  # of one forward
        self._model = model

    def launch(
        self,
        token_ids: np.ndarray,
        lengths: np.ndarray,
        table: RowTable,
        out: np.ndarray,
        between: Callable[[], None] | None = None,
    ) -> None:
        batch = sort_by_length(token_ids, lengths, table)
        tail = (0, round_up_tokens(len(token_ids)) - len(token_ids))
        padded_ids, positions = (torch.from_numpy(np.pad(each, tail)) for each in (batch.token_ids, batch.positions))
        pooling: Pooling = self.card.pooling  # type: ignore[assignment]  # read_folder allows no other
        with torch.inference_mode():
            hidden = self._model.forward(padded_ids, positions, group_equal_lengths(batch.lengths), between)
            ends = torch.from_numpy(batch.cu_seqlens)
            pool_normalize(hidden[: len(token_ids)], ends, pooling, table.take(batch.order), torch.from_numpy(out))

    def enter_thread(self) -> None:
        torch.set_num_threads(self._threads)
        torch.get_num_threads()  # before any operation: the thread keeps its number, whatever another sets later


class SortedBatch(NamedTuple):
    """Sequences end to end, the shortest first, so that those of one length are a plain view for attention."""

    order: np.ndarray  # [rows] which row of the batch each was
    lengths: np.ndarray  # [rows]
    cu_seqlens: np.ndarray  # [rows + 1] int64, where each begins, and the end
    token_ids: np.ndarray  # [total_tokens]
    positions: np.ndarray  # [total_tokens] each token's in its sequence


def sort_by_length(token_ids: np.ndarray, lengths: np.ndarray, table: RowTable) -> SortedBatch:
    """What `launch` takes."""
    assert len(lengths) == len(table) > 0, (len(lengths), len(table))
    assert int(lengths.sum()) == len(token_ids), (int(lengths.sum()), len(token_ids))
    order = np.argsort(lengths, kind="stable")
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    sorted_lengths = lengths[order]
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(sorted_lengths, out=cu_seqlens[1:])
    positions = np.arange(len(token_ids)) - np.repeat(cu_seqlens[:-1], sorted_lengths)
    sorted_ids = token_ids[np.repeat(starts[order], sorted_lengths) + positions]
    return SortedBatch(order, sorted_lengths, cu_seqlens, sorted_ids, positions)


def round_up_tokens(total: int) -> int:
    """The packed total that a CPU's forward really runs: a few tokens more, that belong to no sequence.

    oneDNN compiles a matrix product for each total anew (2 ms on each linear's first call, by measurement) and keeps
    about a thousand; every total apart would overflow that. Steps of 8 below 256 tokens, then of 3 to 6 percent.
    """
    step = 1 << max(3, total.bit_length() - 5)
    return -(-total // step) * step


def _choose_device(device: str) -> torch.device:
    if device not in ("auto", "cpu"):
        raise StartError(f"device {device!r}; allowed: auto, cpu.")
    return torch.device("cpu")


def _choose_dtype(dtype: str) -> torch.dtype:
    """auto: bfloat16 where the hardware multiplies it, else float32; float16 overflows in some models."""
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if dtype != "auto":
        raise StartError(f"dtype {dtype!r}; allowed: auto, {', '.join(_DTYPES)}.")
    return torch.bfloat16 if _cpu_flags() & _BFLOAT16_FLAGS else torch.float32


def _choose_forwards(forwards: int | None, threads: int, hidden: int) -> int:
    """A small model's operations are too short to share: on two cores, two forwards of one thread each did twice the
    texts of one forward of two threads (hidden 384; `python -m loadtest.forward --forwards 1 2`)."""
    if forwards is not None:
        return min(forwards, threads)
    if hidden > SMALL_HIDDEN:
        return 1
    threads_each = -(-threads // MAX_AUTO_FORWARDS)
    return threads // threads_each


def _cpu_flags() -> frozenset[str]:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(flags[1].split()) if flags else frozenset()


def _numerics_id(dtype: str, device: torch.device, kernels: str) -> str:
    """Readable: what must be the same for two servers' vectors to be the same to the last bit."""
    machine = "-".join([torch.backends.cpu.get_cpu_capability().lower(), *sorted(_cpu_flags() & _BFLOAT16_FLAGS)])
    return f"{dtype}/{device.type}/{machine}/{kernels}/torch-{torch.__version__}/embedserve-{__version__}"
