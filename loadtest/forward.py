"""Measure the forward alone, in process: packed texts through the Runner against sentence-transformers' padded ones.
Must not know of sockets or servers. Tokenizing is outside every figure; pooling, normalising and the copy are inside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from embedserve.model.runner import Runner, load_runner
from embedserve_kernels.output_layout import OutputDtype, lay_out

SHORTEST_WORDS, LONGEST_WORDS = 4, 20
TEXTS_A_ROUND = 256
SINGLE_TEXTS_A_ROUND = 64
SEED = 1

RunBatch = Callable[[list[np.ndarray]], object]  # token ids of each text -> whatever the system makes of them


@dataclass(frozen=True)
class Figure:
    """Medians over rounds; latency is of one batch, the median over all of a run's."""

    system: str
    threads: int
    batch: int
    texts_per_s: float
    tokens_per_s: float
    batch_median_ms: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    runner = load_runner(options.model, dtype=options.dtype, device="cpu")
    systems: dict[str, RunBatch] = {f"embedserve {runner.card.dtype}": runner_batches(runner)}
    folder = str(Path(runner.card.tokenizer_file).parent)
    for dtype in () if options.alone else ("float32", "bfloat16"):
        systems[f"sentence-transformers {dtype}"] = sentence_transformers_batches(folder, dtype)
    texts = random_texts(runner.card.tokenizer_file)
    print(
        f"{runner.card.name}, texts of {SHORTEST_WORDS}-{LONGEST_WORDS} words, {mean_tokens(texts):.1f} tokens each, "
        f"{options.rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    print(f"{'threads':>7} {'batch':>5}  {'system':<31} {'texts/s':>8} {'tokens/s':>9} {'batch ms':>9} {'ratio':>6}")
    figures: list[Figure] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for batch in options.batches:
            measured = measure(systems, texts, threads, batch, options.rounds)
            figures += measured
            for figure in measured:
                print(
                    f"{threads:>7} {batch:>5}  {figure.system:<31} {figure.texts_per_s:>8.0f} "
                    f"{figure.tokens_per_s:>9.0f} {figure.batch_median_ms:>9.2f} "
                    f"{measured[0].texts_per_s / figure.texts_per_s:>6.2f}",
                    flush=True,
                )
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.forward", description=__doc__)
    parser.add_argument("model", nargs="?", help="a folder; without one, the bundled model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--alone", action="store_true", help="leave sentence-transformers out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(arguments)


def measure(
    systems: dict[str, RunBatch], texts: list[np.ndarray], threads: int, batch: int, rounds: int
) -> list[Figure]:
    """Rounds of the same texts, the systems taking turns within each."""
    used = texts[:SINGLE_TEXTS_A_ROUND] if batch == 1 else texts
    batches = [used[first : first + batch] for first in range(0, len(used), batch)]
    round_s: dict[str, list[float]] = {system: [] for system in systems}
    batch_s: dict[str, list[float]] = {system: [] for system in systems}
    for run in systems.values():
        run(batches[0])
    for _ in range(rounds):
        for system, run in systems.items():
            times = [time_call(run, ids) for ids in batches]
            round_s[system].append(sum(times))
            batch_s[system] += times
    tokens = sum(map(len, used))
    return [
        Figure(
            system,
            threads,
            batch,
            texts_per_s=len(used) / statistics.median(round_s[system]),
            tokens_per_s=tokens / statistics.median(round_s[system]),
            batch_median_ms=1e3 * statistics.median(batch_s[system]),
        )
        for system in systems
    ]


def time_call(run: RunBatch, ids: list[np.ndarray]) -> float:
    start = time.perf_counter()
    run(ids)
    return time.perf_counter() - start


def runner_batches(runner: Runner) -> RunBatch:
    dims = runner.card.dims

    def run(ids: list[np.ndarray]) -> np.ndarray:
        layout = lay_out([len(ids)], [dims], [OutputDtype.FLOAT32], [True])
        out = np.empty(layout.total_bytes, dtype=np.uint8)
        lengths = np.array([len(text) for text in ids], dtype=np.int32)
        runner.launch(np.concatenate(ids), lengths, layout.table, out).wait()
        return out

    return run


def sentence_transformers_batches(folder: str, dtype: str) -> RunBatch:
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": dtype}, local_files_only=True)

    def run(ids: list[np.ndarray]) -> torch.Tensor:
        lengths = np.array([len(text) for text in ids])
        mask = np.arange(lengths.max()) < lengths[:, None]
        padded = np.zeros(mask.shape, dtype=np.int64)
        padded[mask] = np.concatenate(ids)
        features = {"input_ids": torch.from_numpy(padded), "attention_mask": torch.from_numpy(mask.astype(np.int64))}
        with torch.inference_mode():
            embedding: torch.Tensor = model(features)["sentence_embedding"]
        return embedding

    return run


def random_texts(tokenizer_file: str) -> list[np.ndarray]:
    """Token ids of TEXTS_A_ROUND texts of whole words, their lengths spread evenly."""
    tokenizer = Tokenizer.from_file(tokenizer_file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2)
    random = np.random.default_rng(SEED)
    texts = [
        " ".join(random.choice(words, random.integers(SHORTEST_WORDS, LONGEST_WORDS + 1))) for _ in range(TEXTS_A_ROUND)
    ]
    return [np.array(encoded.ids, dtype=np.int32) for encoded in tokenizer.encode_batch_fast(texts)]


def mean_tokens(texts: list[np.ndarray]) -> float:
    return statistics.fmean(map(len, texts))


if __name__ == "__main__":
    raise SystemExit(main())
