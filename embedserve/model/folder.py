"""Read what a sentence-transformers folder says of its model, and refuse what no backend would get right.

The standard library only: knows neither torch nor the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from embedserve.errors import NotNative, StartError
from embedserve.model.registry import SUPPORTED_ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SUPPORTED_POOLING = ("mean", "cls", "lasttoken")
SUPPORTED_MODULES = ("Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize")  # no text but token ids
_NATIVE_MODULES = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])

# The spelling of sentence-transformers before 6; since then one key, "pooling_mode".
_OLD_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_CUSTOM_CODE = "code of the model's own, which this server does not run. Serve a model that needs none."


@dataclass(frozen=True)
class Module:
    kind: str  # its class, without the package; one of SUPPORTED_MODULES
    path: Path  # of its config.json and weights


@dataclass(frozen=True)
class ModelFolder:
    """What the JSON files say. `config` is config.json as it stands; the architecture reads it."""

    root: Path  # of modules.json
    modules: tuple[Module, ...]  # in their order; the first is the Transformer
    path: Path  # of config.json, the weights and tokenizer.json
    architecture: str
    config: Mapping[str, Any]
    tokenizer_file: Path
    pooling: str  # its modes, joined by " + "
    normalized: bool  # the last module is Normalize
    max_input_tokens: int | None  # special tokens included; None where the folder names no limit
    lower_case: bool  # sentence-transformers is told to lower-case the texts
    truncate_dim: int | None  # of each vector, the first values that are kept
    prompts: dict[str, str]
    default_prompt_name: str | None
    similarity: str
    matryoshka_dims: tuple[int, ...]


def read_folder(path: Path) -> ModelFolder:
    """Raises StartError, naming the file, for a folder that is not whole or a model that no backend serves."""
    sentence_config = _read_json(path / "config_sentence_transformers.json", optional=True)
    kind = sentence_config.get("model_type") or "SentenceTransformer"
    if kind != "SentenceTransformer":
        raise StartError(
            f"{path / 'config_sentence_transformers.json'}: model_type is {kind!r}; supported: SentenceTransformer, "
            "one vector a text."
        )
    modules = _modules(path)
    transformer = modules[0].path
    config = _config(transformer)
    tokenizer_file = transformer / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise StartError(
            f"{path} has no tokenizer.json; only fast tokenizers are read. "
            "Load the folder with transformers' AutoTokenizer and save it again."
        )
    prompts = {name: prompt for name, prompt in (sentence_config.get("prompts") or {}).items() if prompt is not None}
    default_prompt_name = sentence_config.get("default_prompt_name")
    if default_prompt_name is not None and default_prompt_name not in prompts:
        raise StartError(
            f"{path / 'config_sentence_transformers.json'}: default_prompt_name is {default_prompt_name!r}, "
            f"and the prompts are {sorted(prompts)}. Name one of them, or null."
        )
    transformer_config = _transformer_config(transformer)
    return ModelFolder(
        root=path,
        modules=modules,
        path=transformer,
        architecture=" + ".join(config.get("architectures") or ()) or "none",
        config=config,
        tokenizer_file=tokenizer_file,
        pooling=" + ".join(next(_pooling(module) for module in modules if module.kind == "Pooling")),
        normalized=_normalizes(modules[-1]),
        max_input_tokens=_max_input_tokens(transformer, transformer_config, config),
        lower_case=bool(transformer_config.get("do_lower_case")),
        truncate_dim=sentence_config.get("truncate_dim"),
        prompts=prompts,
        default_prompt_name=default_prompt_name,
        similarity=sentence_config.get("similarity_fn_name") or "cosine",
        matryoshka_dims=tuple(sorted(config.get("matryoshka_dimensions") or ())),
    )


def check_native(folder: ModelFolder) -> None:
    """Raises NotNative, naming the setting, for a model that the packed forward would get wrong."""
    kinds = [module.kind for module in folder.modules]
    if folder.architecture not in SUPPORTED_ARCHITECTURES:
        raise NotNative(
            f"{folder.path / 'config.json'}: architectures is {folder.architecture}; "
            f"supported natively: {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    if kinds not in _NATIVE_MODULES:
        raise NotNative(
            f"{folder.root / 'modules.json'} has the modules {', '.join(kinds)}; supported natively: "
            "Transformer, Pooling and, last, Normalize."
        )
    if folder.pooling not in SUPPORTED_POOLING:
        raise NotNative(
            f"{folder.modules[1].path / 'config.json'}: the pooling is {folder.pooling}; "
            f"supported natively: one of {', '.join(SUPPORTED_POOLING)}."
        )
    if folder.lower_case:
        raise NotNative(
            f"{folder.path / 'sentence_bert_config.json'}: do_lower_case is true; supported natively: false, "
            "with the lower-casing in tokenizer.json, where uncased models have it."
        )


def _modules(path: Path) -> tuple[Module, ...]:
    if not path.is_dir():
        raise StartError(f"no model folder {path}.")
    file = path / "modules.json"
    try:
        entries = [(str(entry["type"]), path / entry["path"]) for entry in _read_json_list(file)]
    except (KeyError, TypeError) as error:
        raise StartError(f'{file} cannot be read: a module has no "type" or "path" that is a text.') from error
    for name, _ in entries:
        if not name.startswith("sentence_transformers."):
            raise StartError(f"{file} names {name}, {_CUSTOM_CODE}")
    modules = tuple(Module(name.rsplit(".", 1)[-1], module_path) for name, module_path in entries)
    kinds = [module.kind for module in modules]
    once = kinds[:1] == ["Transformer"] and kinds.count("Transformer") == kinds.count("Pooling") == 1
    if not once or not set(kinds) <= set(SUPPORTED_MODULES):
        raise StartError(
            f"{file} has the modules {', '.join(kinds) or '(none)'}; supported: Transformer, Pooling and any of "
            f"{', '.join(SUPPORTED_MODULES[2:])}."
        )
    for module in modules:
        if module.kind == "Dense":
            _check_activation(module.path / "config.json")
    return modules


def _check_activation(file: Path) -> None:
    """sentence-transformers reads any that is not torch's as tanh, with a warning."""
    name = _read_json(file).get("activation_function", "torch.")
    if not name.startswith("torch."):
        raise StartError(f"{file}: activation_function is {name}, {_CUSTOM_CODE}")


def _normalizes(module: Module) -> bool:
    """Sentence embeddings are all that a Normalize before version 6 could do; it has no settings."""
    if module.kind != "Normalize":
        return False
    settings = _read_json(module.path / "config.json", optional=True)
    return bool(settings.get("module_input_name", "sentence_embedding") == "sentence_embedding")


def _config(transformer: Path) -> dict[str, Any]:
    """config.json, of a model whose code and weights are the libraries' and the folder's own."""
    if (transformer / "adapter_config.json").is_file():
        raise StartError(
            f"{transformer} is an adapter to another model's weights; merge them (PEFT's merge_and_unload), "
            "save the whole, and serve that."
        )
    file = transformer / "config.json"
    config = _read_json(file)
    if config.get("auto_map"):
        raise StartError(f"{file}: auto_map names {', '.join(map(str, config['auto_map'].values()))}, {_CUSTOM_CODE}")
    if config.get("quantization_config"):
        raise StartError(f"{file} has a quantization_config; supported: floating point weights, not quantized.")
    return config


def _pooling(module: Module) -> list[str]:
    """The modes of a Pooling module, in either spelling."""
    file = module.path / "config.json"
    config = _read_json(file)
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _OLD_POOLING_KEYS.items() if config.get(key)]
    if isinstance(modes, str):
        modes = [modes]
    unknown = [mode for mode in modes if mode not in _OLD_POOLING_KEYS.values()]
    if not modes or unknown:
        raise StartError(
            f"{file}: the pooling is {' + '.join(modes) or '(none)'}; "
            f"supported: one or more of {', '.join(_OLD_POOLING_KEYS.values())}."
        )
    if not config.get("include_prompt", True):
        raise StartError(f"{file}: include_prompt is false; supported: true, pooling over the prompt's tokens too.")
    return list(modes)


def _transformer_config(transformer: Path) -> dict[str, Any]:
    """sentence_bert_config.json, of a Transformer that gives the last hidden states of a text."""
    file = transformer / "sentence_bert_config.json"
    config = _read_json(file, optional=True)
    task = config.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise StartError(f"{file}: transformer_task is {task!r}; supported: feature-extraction.")
    text = (config.get("modality_config") or {}).get("text", {"method_output_name": "last_hidden_state"})
    if text.get("method_output_name") != "last_hidden_state":
        raise StartError(
            f"{file}: a text's method_output_name is {text.get('method_output_name')!r}; supported: last_hidden_state."
        )
    return config


def _max_input_tokens(
    transformer: Path, transformer_config: Mapping[str, Any], config: Mapping[str, Any]
) -> int | None:
    """sentence-transformers before 6 keeps the limit in a file of its own, since then in the tokenizer's."""
    limit = transformer_config.get("max_seq_length")
    if limit is None:
        limit = _read_json(transformer / "tokenizer_config.json", optional=True).get("model_max_length")
    limits = [int(each) for each in (limit, config.get("max_position_embeddings")) if each is not None]
    return min(limits, default=None)


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
