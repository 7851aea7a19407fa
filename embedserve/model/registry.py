"""Which architectures are served, by the name in a folder's config.json.

Knows names; torch comes in only when one is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from embedserve_kernels.varlen_attention import EqualLengths


class PackedConfig(Protocol):
    """Read from config.json by the class method `from_json`, which raises StartError for what it does not know."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden(self) -> int: ...


class PackedModel(Protocol):
    """A forward pass over sequences packed end to end, in pieces: `between` is called between them."""

    @property
    def config(self) -> PackedConfig: ...
    @property
    def attention_kernels(self) -> str: ...
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        groups: list[EqualLengths],
        between: Callable[[], None] | None = None,
    ) -> torch.Tensor: ...


class Architecture(NamedTuple):
    """The two classes of a model. `model` has `tensor_shapes`, `prefix` and `ignored_prefixes` for whoever loads it."""

    config: Any
    model: Any

    def read_config(self, config: Mapping[str, Any]) -> PackedConfig:
        read: PackedConfig = self.config.from_json(config)
        return read

    def build(self, config: PackedConfig, take: Callable[[str], torch.Tensor]) -> PackedModel:
        """take: gives each tensor once, by its name."""
        built: PackedModel = self.model(config, take)
        return built


_CLASSES = {
    "BertModel": ("encoder", "BertConfig", "BertEncoder"),
    "Qwen3ForCausalLM": ("decoder", "Qwen3Config", "Qwen3Decoder"),
    "Qwen3Model": ("decoder", "Qwen3Config", "Qwen3Decoder"),
}
SUPPORTED_ARCHITECTURES = tuple(_CLASSES)


def architecture(name: str) -> Architecture:
    """name: one of SUPPORTED_ARCHITECTURES."""
    module, config, model = _CLASSES[name]
    imported = import_module(f"embedserve.model.{module}")
    return Architecture(getattr(imported, config), getattr(imported, model))
