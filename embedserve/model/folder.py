"""Read what a sentence-transformers folder says of its model, and refuse what this server would get wrong.

The standard library only: knows neither torch nor the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from embedserve.errors import StartError
from embedserve.model.registry import SUPPORTED_ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SUPPORTED_POOLING = ("mean", "cls", "lasttoken")

# The spelling of sentence-transformers before 6; since then one key, "pooling_mode".
_OLD_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SUPPORTED_MODULES = "Transformer, Pooling and, last, Normalize"


@dataclass(frozen=True)
class ModelFolder:
    """What the JSON files say. `config` is config.json as it stands; the architecture reads it."""

    path: Path  # of config.json, the weights and tokenizer.json
    architecture: str  # one of registry.SUPPORTED_ARCHITECTURES
    config: Mapping[str, Any]
    tokenizer_file: Path
    pooling: str  # one of SUPPORTED_POOLING
    normalized: bool
    max_input_tokens: int  # special tokens included
    prompts: dict[str, str]
    default_prompt_name: str | None
    similarity: str
    matryoshka_dims: tuple[int, ...]


def read_folder(path: Path) -> ModelFolder:
    """Raises StartError, naming the file, for a folder that is not whole or a model that is not supported."""
    modules = _module_paths(path)
    transformer = modules["Transformer"]
    config = _read_json(transformer / "config.json")
    architecture = _architecture(config, transformer / "config.json")
    tokenizer_file = transformer / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise StartError(
            f"{path} has no tokenizer.json; only fast tokenizers are read. "
            "Load the folder with transformers' AutoTokenizer and save it again."
        )
    sentence_config = _read_json(path / "config_sentence_transformers.json", optional=True)
    prompts = {name: prompt for name, prompt in (sentence_config.get("prompts") or {}).items() if prompt is not None}
    default_prompt_name = sentence_config.get("default_prompt_name")
    if default_prompt_name is not None and default_prompt_name not in prompts:
        raise StartError(
            f"{path / 'config_sentence_transformers.json'}: default_prompt_name is {default_prompt_name!r}, "
            f"and the prompts are {sorted(prompts)}. Name one of them, or null."
        )
    return ModelFolder(
        path=transformer,
        architecture=architecture,
        config=config,
        tokenizer_file=tokenizer_file,
        pooling=_pooling(modules["Pooling"] / "config.json"),
        normalized="Normalize" in modules,
        max_input_tokens=_max_input_tokens(transformer, config),
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        similarity=sentence_config.get("similarity_fn_name") or "cosine",
        matryoshka_dims=tuple(sorted(config.get("matryoshka_dimensions") or ())),
    )


def _module_paths(path: Path) -> dict[str, Path]:
    """Each module's class, without the package it was in, and its folder."""
    if not path.is_dir():
        raise StartError(f"no model folder {path}.")
    entries = _read_json_list(path / "modules.json")
    modules = {entry["type"].rsplit(".", 1)[-1]: path / entry["path"] for entry in entries}
    if list(modules) not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        names = ", ".join(entry["type"].rsplit(".", 1)[-1] for entry in entries)
        raise StartError(
            f"{path / 'modules.json'} has the modules {names or '(none)'}; supported are {_SUPPORTED_MODULES}."
        )
    return modules


def _architecture(config: Mapping[str, Any], file: Path) -> str:
    named = config.get("architectures") or []
    if len(named) != 1 or named[0] not in SUPPORTED_ARCHITECTURES:
        raise StartError(
            f"{file}: architectures is {named}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}. Serve another model."
        )
    return str(named[0])


def _pooling(file: Path) -> str:
    config = _read_json(file)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_POOLING_KEYS.items() if config.get(key)]
    if isinstance(modes, str):
        modes = [modes]
    if len(modes) != 1 or modes[0] not in SUPPORTED_POOLING:
        raise StartError(
            f"{file}: the pooling is {' + '.join(modes) or '(none)'}; supported: one of {', '.join(SUPPORTED_POOLING)}."
        )
    if not config.get("include_prompt", True):
        raise StartError(f"{file}: include_prompt is false; supported: true, pooling over the prompt's tokens too.")
    return str(modes[0])


def _max_input_tokens(transformer: Path, config: Mapping[str, Any]) -> int:
    """sentence-transformers before 6 keeps the limit in a file of its own, since then in the tokenizer's."""
    sentence_config = _read_json(transformer / "sentence_bert_config.json", optional=True)
    task = sentence_config.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise StartError(
            f"{transformer / 'sentence_bert_config.json'}: transformer_task is {task!r}; supported: feature-extraction."
        )
    if sentence_config.get("do_lower_case"):
        raise StartError(
            f"{transformer / 'sentence_bert_config.json'}: do_lower_case is true; supported: false, "
            "with the lower-casing in tokenizer.json, where uncased models have it."
        )
    limit = sentence_config.get("max_seq_length")
    if limit is None:
        limit = _read_json(transformer / "tokenizer_config.json", optional=True).get("model_max_length")
    positions = config.get("max_position_embeddings")
    if positions is None:
        raise StartError(f"{transformer / 'config.json'} has no max_position_embeddings; a model's config names it.")
    return int(positions) if limit is None else min(int(limit), int(positions))


def _read_json(file: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not file.exists():
        return {}
    content = _parse(file)
    if not isinstance(content, dict):
        raise StartError(f"{file} holds a JSON {type(content).__name__}; expected an object.")
    return content


def _read_json_list(file: Path) -> list[dict[str, Any]]:
    content = _parse(file)
    if not isinstance(content, list):
        raise StartError(f"{file} holds a JSON {type(content).__name__}; expected an array.")
    return content


def _parse(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        raise StartError(f"no {file}; a model is a folder that sentence-transformers has saved.") from None
    except (OSError, ValueError) as error:
        raise StartError(f"{file} cannot be read: {error}") from error
