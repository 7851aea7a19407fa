"""`python -m loadtest.forward`: packed texts through our forward beside sentence-transformers' padded ones, in one run.
Orders the measurements and prints them; how a forward is timed, and on which texts, is bare.py's.

Tokenizing is outside every figure; pooling, normalising and the copy are inside. Ours runs as the engine runs it, each
configuration in a process of its own; sentence-transformers as it does in its users' processes, with all the threads.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from embedserve.errors import StartError
from embedserve.model.folder import read_folder
from loadtest import report
from loadtest.bare import BareSpeed, Question, bare_forward, model_folder, short_batches, speed, time_batches
from loadtest.load import LoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


@dataclass(frozen=True)
class System:
    library: str
    ask: Callable[[Question], BareSpeed]


@dataclass(frozen=True)
class Figure:
    """Medians over rounds. `ratio`: the first system's texts/s to this one's, within each round."""

    system: str
    forwards: int  # side by side; a single text goes alone
    batch: int
    texts_per_s: float
    tokens_per_s: float
    batch_median_ms: float
    ratio: float


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 when the model cannot be loaded."""
    options = parse_arguments(arguments)
    try:
        figures = measure(options)
    except (LoadError, StartError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.json is not None:
        report.write_json(options.json, {"settings": vars(options), "figures": [asdict(figure) for figure in figures]})
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.forward", description=__doc__)
    parser.add_argument("model", nargs="?", help="a folder; without one, the bundled model")
    parser.add_argument("--dtype", default="auto", help="of ours")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128], metavar="TEXTS")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each system, in all")
    parser.add_argument(
        "--forwards",
        type=int,
        nargs="+",
        default=[None],
        metavar="N",
        help="of ours, side by side; several are compared; without it, as many as the engine would run",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--duration-s", type=float, default=1.0, help="of one measurement")
    parser.add_argument("--alone", action="store_true", help="leave sentence-transformers out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> list[Figure]:
    """Load everything once; then, for each size of batch, rounds in which the systems take turns. Prints as it goes."""
    folder = model_folder(options.model)
    tokenizer_file = str(read_folder(folder).tokenizer_file)
    figures: list[Figure] = []
    with ExitStack() as stack:
        systems = [
            System(
                "embedserve",
                stack.enter_context(bare_forward(options.model, options.dtype, options.threads, forwards)),
            )
            for forwards in options.forwards
        ]
        for dtype in () if options.alone else ("float32", "bfloat16"):
            model = sentence_transformers(folder, tokenizer_file, dtype, options.threads)
            systems.append(System("sentence-transformers", model))
        print_heading(folder.name if options.model else "the bundled model", options)
        for batch in options.batches:
            question = Question(batch, options.duration_s)
            rounds = [[system.ask(question) for system in systems] for _ in range(options.rounds)]
            tokens = tokens_per_text(tokenizer_file, batch)
            for index, system in enumerate(systems):
                figures.append(figure_of(system.library, batch, tokens, rounds, index))
                print_row(figures[-1])
    return figures


def sentence_transformers(
    folder: Path, tokenizer_file: str, dtype: str, threads: int
) -> Callable[[Question], BareSpeed]:
    """In this process; all that are made here share its threads."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype}, local_files_only=True)

    def forward(token_ids: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        mask = np.arange(lengths.max()) < lengths[:, None]
        padded = np.zeros(mask.shape, np.int64)
        padded[mask] = token_ids
        features = {"input_ids": torch.from_numpy(padded), "attention_mask": torch.from_numpy(mask.astype(np.int64))}
        with torch.inference_mode():
            embedding: torch.Tensor = model(features)["sentence_embedding"]
        return embedding

    def ask(question: Question) -> BareSpeed:
        batches = short_batches(tokenizer_file, question.rows)
        times_s = time_batches(forward, batches, time.monotonic(), question.duration_s)
        return speed(question.rows, [times_s], dtype, forwards=1)

    return ask


def tokens_per_text(tokenizer_file: str, batch: int) -> float:
    return float(np.concatenate([lengths for _, lengths in short_batches(tokenizer_file, batch)]).mean())


def figure_of(library: str, batch: int, tokens: float, rounds: Sequence[Sequence[BareSpeed]], index: int) -> Figure:
    """Of the system that is `index` in each round; `tokens`: of a text, on average."""
    taken = [speeds[index] for speeds in rounds]
    texts_per_s = median(each.texts_per_s for each in taken)
    return Figure(
        system=f"{library} {taken[0].dtype}",
        forwards=taken[0].forwards,
        batch=batch,
        texts_per_s=texts_per_s,
        tokens_per_s=texts_per_s * tokens,
        batch_median_ms=median(each.p50_ms for each in taken),
        ratio=median(speeds[0].texts_per_s / speeds[index].texts_per_s for speeds in rounds),
    )


def print_heading(model: str, options: argparse.Namespace) -> None:
    print(
        f"{model}, texts of 4-20 words, {options.threads} threads, {options.rounds} rounds, "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; a single text goes alone"
    )
    print(f"{'forwards':>8} {'batch':>5}  {'system':<30} {'texts/s':>8} {'tokens/s':>9} {'batch ms':>9} {'ratio':>6}")


def print_row(figure: Figure) -> None:
    print(
        f"{figure.forwards:>8} {figure.batch:>5}  {figure.system:<30} {figure.texts_per_s:>8.0f} "
        f"{figure.tokens_per_s:>9.0f} {figure.batch_median_ms:>9.2f} {figure.ratio:>6.2f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
