"""Weights from safetensors files into a built model, and the identity of the space its vectors are in.

Knows files and tensors; neither batches nor which device is best.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from embedserve.errors import StartError
from embedserve.model.registry import SUPPORTED_ARCHITECTURES, PackedModel, architecture

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from embedserve.model.folder import ModelFolder

_SPACE_ID_DIGITS = 16
_READ_BYTES = 1 << 20
_DUMMY_DEVIATION = 0.02


def load_weights(folder: ModelFolder, *, dtype: torch.dtype, device: torch.device) -> tuple[PackedModel, str]:
    """-> the model, its weights in `dtype` on `device`, and the space_id.

    One tensor at a time is read, converted and laid out. Raises StartError naming the file that is missing or
    damaged, or the tensor that is missing, extra or of another shape than config.json says.
    """
    kind = architecture(folder.architecture)
    config = kind.read_config(folder.config)
    shapes = kind.model.tensor_shapes(config)
    stored = _stored_tensors(folder.path, kind.model.prefix, kind.model.ignored_prefixes)
    for name, tensor in stored.items():
        if name not in shapes:
            raise StartError(
                f"{tensor.file} has a tensor {tensor.name} that a {folder.architecture} does not; is it one?"
            )
        if tensor.shape != shapes[name]:
            raise StartError(
                f"{tensor.file}: {tensor.name} is {list(tensor.shape)}; config.json makes it {list(shapes[name])}."
            )
    missing = sorted(shapes.keys() - stored.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StartError(f"the weights in {folder.path} lack {missing[0]}{more}.")

    digests: dict[str, bytes] = {}

    def take(name: str) -> torch.Tensor:
        tensor = _read_tensor(stored[name])
        if not tensor.is_floating_point():
            raise StartError(
                f"{stored[name].file}: {name} is {tensor.dtype}; supported: floating point, not quantized."
            )
        digests[name] = _digest(name, tensor)
        # a copy in any case: what safetensors gives is a view of the file
        return tensor.to(device=device, dtype=dtype, copy=True)

    model = kind.build(config, take)
    assert digests.keys() == shapes.keys(), shapes.keys() - digests.keys()
    return model, _space_id(folder, digests)


def space_of_files(folder: ModelFolder) -> str:
    """The space_id of a folder that another library loads; the same as `load_weights` gives where both can.

    Raises StartError for weights that are not in safetensors.
    """
    prefix, ignored_prefixes = "", ()
    if folder.architecture in SUPPORTED_ARCHITECTURES:
        kind = architecture(folder.architecture)
        prefix, ignored_prefixes = kind.model.prefix, kind.model.ignored_prefixes
    kinds = [module.kind for module in folder.modules if module.kind != "Dropout"]
    digests: dict[str, bytes] = {}
    if kinds[2:] not in ([], ["Normalize"]):  # others' order decides a vector too
        digests[""] = ", ".join(kinds).encode()
    for module in folder.modules:
        if module.kind not in ("Transformer", "Dense", "LayerNorm"):
            continue
        of_transformer = module.kind == "Transformer"
        place = "" if of_transformer else f"{module.path.name}/"
        tensors = _stored_tensors(module.path, *((prefix, ignored_prefixes) if of_transformer else ("", ())))
        digests |= {place + name: _digest(place + name, _read_tensor(stored)) for name, stored in tensors.items()}
        if not of_transformer:
            digests[place] = hashlib.sha256((module.path / "config.json").read_bytes()).digest()
    return _space_id(folder, digests)


def tensor_names(path: Path) -> list[str]:
    """As the folder's safetensors files have them."""
    return [tensor.name for tensor in _stored_tensors(path, "", ()).values()]


def dummy_weights(folder: ModelFolder, *, dtype: torch.dtype, device: torch.device) -> tuple[PackedModel, str]:
    """A model of the folder's shape with random weights made on the device, for speed: its vectors mean nothing."""
    kind = architecture(folder.architecture)
    config = kind.read_config(folder.config)
    shapes = kind.model.tensor_shapes(config)
    deviation = float(folder.config.get("initializer_range") or _DUMMY_DEVIATION)
    generator = torch.Generator(device).manual_seed(0)

    def take(name: str) -> torch.Tensor:
        tensor = torch.empty(shapes[name], dtype=dtype, device=device)
        if tensor.dim() > 1:
            return tensor.normal_(0.0, deviation, generator=generator)
        return tensor.fill_(0.0 if name.endswith("bias") else 1.0)

    identity = hashlib.sha256(json.dumps(dict(folder.config), sort_keys=True).encode())
    _identify_text_side(identity, folder)
    return kind.build(config, take), f"dummy-{identity.hexdigest()[:_SPACE_ID_DIGITS]}"


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


class _Stored(NamedTuple):
    """Where a tensor is, and what the file's header says of it."""

    file: Path
    name: str
    shape: tuple[int, ...]


def _stored_tensors(path: Path, prefix: str, ignored_prefixes: tuple[str, ...]) -> dict[str, _Stored]:
    """By the tensor's name without the prefix that it has in some checkpoints."""
    index_file = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    elif index_file.is_file():
        files = [path / shard for shard in _shards(index_file)]
    else:
        raise StartError(
            f"{path} has neither model.safetensors nor {index_file.name}; only safetensors is read. To "
            "convert pickled weights, load the model with SentenceTransformer(...) and save it to another folder."
        )
    found: dict[str, _Stored] = {}
    for file in files:
        for tensor in _header(file):
            name = tensor.name.removeprefix(prefix)
            if name.startswith(ignored_prefixes):
                continue
            if name in found:
                raise StartError(f"{file}: {tensor.name} is also in {found[name].file} as {found[name].name}.")
            found[name] = tensor
    return found


def _shards(index_file: Path) -> list[str]:
    try:
        weight_map: Mapping[str, str] = json.loads(index_file.read_bytes())["weight_map"]
        return sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartError(f"{index_file} cannot be read: {error!r}") from error


def _header(file: Path) -> list[_Stored]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return [_Stored(file, name, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise StartError(f"{file} cannot be read: {error}. Fetch it again.") from error


def _read_tensor(stored: _Stored) -> torch.Tensor:
    file, name, _ = stored
    try:
        with safe_open(file, framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise StartError(f"{file}: {name} cannot be read: {error}. Fetch it again.") from error
    return tensor


def _digest(name: str, tensor: torch.Tensor) -> bytes:
    """Of what a file has under this name."""
    digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def _space_id(folder: ModelFolder, digests: Mapping[str, bytes]) -> str:
    identity = hashlib.sha256(b"".join(digests[name] for name in sorted(digests)))
    _identify_text_side(identity, folder)
    return identity.hexdigest()[:_SPACE_ID_DIGITS]


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
