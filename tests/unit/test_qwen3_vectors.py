"""A tiny random Qwen3 with the real tokenizer, against sentence-transformers in float32, however its files lie."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from checkpoints import edit_json, long_texts, save_tiny_qwen3, sentences
from safetensors.torch import load_file, save_file
from vectors import BATCHES, LEAST_COSINE, Reference, embed

from embedserve.errors import StartError
from embedserve.frontend.call import EmbedCall
from embedserve.frontend.inputs import Inputs
from embedserve.model.runner import Runner, load_runner
from loadtest.qwen3 import END_OF_TEXT, QUERY_PROMPT

if TYPE_CHECKING:
    from collections.abc import Callable

END = 151_643
TEXTS = [
    "a",
    "...",
    "\n",
    "漢字とかな",
    "naïve 🙂",
    *sentences()[:66],
    *long_texts(),
    " ".join(sentences()[:60]),
    *sentences()[70:74],
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-qwen3"))


@pytest.fixture(scope="module")
def reference(saved: Path) -> Reference:
    reference = Reference(str(saved), TEXTS)
    lengths = [len(ids) for ids in reference.ids]
    assert (len(TEXTS), min(lengths), max(lengths)) == (100, 1, 512)  # the longest is cut
    assert all(ids[-1] == END for ids in reference.ids[:-1])
    return reference


@pytest.fixture(scope="module", params=list(LEAST_COSINE))
def runner(request: pytest.FixtureRequest, saved: Path) -> Runner:
    return load_runner(str(saved), dtype=request.param)


@pytest.mark.parametrize("batches", list(BATCHES.values()), ids=list(BATCHES))
def test_qwen3_gives_the_vectors_of_sentence_transformers(
    runner: Runner, reference: Reference, batches: Callable[[list[int]], list[list[int]]]
) -> None:
    reference.check(runner, batches([len(ids) for ids in reference.ids]))


@pytest.mark.parametrize("rows", [2, 3, 8, 17, 64])
def test_equal_lengths_stay_causal(runner: Runner, saved: Path, rows: int) -> None:
    """Where no padding hides it, a forward that lost its mask gives the same wrong vectors to a whole batch."""
    numbered = [f"{index % 10} and then {index // 10} of them" for index in range(rows)]
    reference = Reference(str(saved), numbered)
    assert len({len(ids) for ids in reference.ids[:-1]}) == 1
    reference.check(runner, [list(range(rows))])


def test_instruction_is_part_of_the_text(runner: Runner, saved: Path) -> None:
    reference = Reference(str(saved), TEXTS[:40], prompt=QUERY_PROMPT)
    reference.check(runner, BATCHES["among strangers"]([len(ids) for ids in reference.ids]))


@pytest.mark.parametrize("dims", [32, 48])
def test_matryoshka_cut_is_normalised_again(runner: Runner, reference: Reference, dims: int) -> None:
    reference.check_cut(runner, [list(range(60))], dims)
    norms = np.linalg.norm(embed(runner, reference.ids[:60], dims), axis=1)
    np.testing.assert_allclose(norms, 1, atol=1e-6)


def encoded(runner: Runner, **fields: object) -> list[list[int]]:
    """Token ids of each input, as a frontend sends them to the engine."""
    inputs = Inputs(runner.card, max_tokens=runner.card.max_input_tokens, auto_truncate=False)
    prepared = asyncio.run(inputs.prepare(EmbedCall("input", **fields)))  # type: ignore[arg-type]
    ends = np.cumsum(prepared.encoded.lengths)
    return [part.tolist() for part in np.split(prepared.encoded.ids, ends[:-1])]


def test_end_token_is_appended_once_whatever_the_client_sends(runner: Runner) -> None:
    expected = [[1944, END], [1944, 1549, END]]
    assert encoded(runner, texts=["test", "test again"]) == expected
    assert encoded(runner, token_ids=[[1944], [1944, 1549]]) == expected
    assert encoded(runner, token_ids=expected) == expected
    assert encoded(runner, texts=["test" + END_OF_TEXT, "test again" + 2 * END_OF_TEXT]) == expected
    assert encoded(runner, texts=["", END_OF_TEXT]) == [[END], [END]]
    assert encoded(runner, texts=[f"test{END_OF_TEXT} again"]) == [[1944, END, 1549, END]]  # within it, it stays


def test_text_and_its_ids_are_one_vector(runner: Runner) -> None:
    batches = [encoded(runner, texts=["test again"]), encoded(runner, token_ids=[[1944, 1549]])]
    vectors = [embed(runner, [np.array(ids, np.int32) for ids in batch]) for batch in batches]
    np.testing.assert_array_equal(*vectors)


def test_instruction_takes_the_place_of_the_folders_own(runner: Runner) -> None:
    own = encoded(runner, texts=["test"], input_type="query")
    assert own == encoded(runner, texts=[QUERY_PROMPT + "test"])
    assert encoded(runner, texts=["test"], instruction="Find it") == encoded(
        runner, texts=["Instruct: Find it\nQuery:test"]
    )
    assert encoded(runner, texts=["test"], input_type="document") == [[1944, END]]


# How the files may be laid out


def vectors_of(folder: Path) -> np.ndarray:
    return embed(load_runner(str(folder), dtype="float32"), [np.array([5, 6, 7, END]), np.array([8, 9, END])])


def test_rope_theta_is_read_in_every_spelling(saved: Path, folder: Path) -> None:
    expected = vectors_of(saved)
    edit_json(folder / "config.json", rope_parameters=..., rope_theta=1_000_000)
    np.testing.assert_array_equal(vectors_of(folder), expected)
    edit_json(folder / "config.json", rope_scaling=None)
    np.testing.assert_array_equal(vectors_of(folder), expected)
    edit_json(folder / "config.json", rope_theta=...)
    default = vectors_of(folder)
    assert not np.allclose(default, expected, atol=1e-3)
    edit_json(folder / "config.json", rope_theta=10_000)
    np.testing.assert_array_equal(vectors_of(folder), default)


def test_prefix_and_shards_change_neither_vectors_nor_space(saved: Path, folder: Path) -> None:
    plain = load_runner(str(saved), dtype="float32").card
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()} | {"lm_head.weight": torch.zeros(3, 64)}
    shards = {f"shard-{index}.safetensors": list(prefixed)[index::3] for index in range(3)}
    for file, names in shards.items():
        save_file({name: prefixed[name].contiguous() for name in names}, folder / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    card = load_runner(str(folder), dtype="float32").card
    assert card.space_id == plain.space_id
    assert card == replace(plain, architecture="Qwen3ForCausalLM", tokenizer_file=card.tokenizer_file)
    np.testing.assert_array_equal(vectors_of(folder), vectors_of(saved))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "the type of RoPE is 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "the type of RoPE is 'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "RoPE differs among full_attention"),
        ({"is_causal": False}, "is_causal is False"),
        ({"head_dim": 31}, "head_dim is 31"),
        ({"head_dim": ...}, "config.json makes it"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"rms_norm_eps": ...}, "config.json has no 'rms_norm_eps'"),
        ({"intermediate_size": 101}, "config.json makes it"),
    ],
)
def test_what_the_forward_would_get_wrong_is_refused(folder: Path, changes: dict[str, object], named: str) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(StartError, match=named):
        load_runner(str(folder), backend="native")


def test_missing_and_extra_tensors_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("layers.1.self_attn.k_norm.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(StartError, match=r"lack layers\.1\.self_attn\.k_norm\.weight"):
        load_runner(str(folder))
    save_file(tensors | {"layers.2.self_attn.k_norm.weight": norm}, folder / "model.safetensors")
    with pytest.raises(StartError, match=r"a tensor layers\.2\.self_attn\.k_norm\.weight that a Qwen3Model does not"):
        load_runner(str(folder))


# Weights that mean nothing


def test_dummy_weights_need_no_file_and_are_another_space(saved: Path, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    runner = load_runner(str(folder), load_format="dummy", dtype="float32")
    assert runner.card.space_id.startswith("dummy-")
    vectors = embed(runner, [np.array([5, 6, END]), np.array([7, END])])
    assert np.isfinite(vectors).all()
    assert vectors[0] @ vectors[1] < 0.99
    again = embed(load_runner(str(folder), load_format="dummy", dtype="float32"), [np.array([5, 6, END])])
    np.testing.assert_allclose(again[0], vectors[0], atol=1e-5)
