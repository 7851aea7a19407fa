"""BERT over packed sequences, driven by its config.json.

Knows token ids, positions and hidden states; neither rows, pooling nor where the weights came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from embedserve.errors import NotNative, StartError
from embedserve_kernels.embed_tokens import embed_tokens
from embedserve_kernels.layer_norm_residual import layer_norm_residual
from embedserve_kernels.linear import Activation, LinearWeight, linear, prepare_linear
from embedserve_kernels.varlen_attention import EqualLengths, attention_kernels, varlen_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True)
class BertConfig:
    """What of config.json the forward depends on."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    positions: int
    token_types: int
    layer_norm_eps: float
    activation: Activation

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> BertConfig:
        """Raises NotNative for a variant of BERT that the forward below would get wrong."""
        activation = config.get("hidden_act", "gelu")
        if activation not in _ACTIVATIONS:
            raise NotNative(f"config.json: hidden_act is {activation!r}; supported: {', '.join(_ACTIVATIONS)}.")
        positions = config.get("position_embedding_type") or "absolute"
        if positions != "absolute":
            raise NotNative(f"config.json: position_embedding_type is {positions!r}; supported: absolute.")
        for key in ("is_decoder", "add_cross_attention"):
            if config.get(key):
                raise NotNative(f"config.json: {key} is true; supported: false, an encoder.")
        try:
            bert = cls(
                vocab_size=int(config["vocab_size"]),
                hidden=int(config["hidden_size"]),
                intermediate=int(config["intermediate_size"]),
                layers=int(config["num_hidden_layers"]),
                heads=int(config["num_attention_heads"]),
                positions=int(config["max_position_embeddings"]),
                token_types=int(config["type_vocab_size"]),
                layer_norm_eps=float(config["layer_norm_eps"]),
                activation=_ACTIVATIONS[activation],
            )
        except KeyError as error:
            raise StartError(f"config.json has no {error}; a BERT's config names it.") from None
        if bert.hidden % bert.heads:
            raise StartError(
                f"config.json: num_attention_heads {bert.heads} does not divide hidden_size {bert.hidden}."
            )
        return bert


@dataclass(frozen=True)
class _LayerNorm:
    weight: torch.Tensor  # [hidden] float32
    bias: torch.Tensor


@dataclass(frozen=True)
class _Layer:
    qkv: LinearWeight  # [3 * hidden, hidden]: queries, keys, values
    attention_output: LinearWeight
    attention_norm: _LayerNorm
    intermediate: LinearWeight
    output: LinearWeight
    output_norm: _LayerNorm


class BertEncoder:
    """Devlin et al., https://arxiv.org/abs/1810.04805; the tensors' names are those of transformers' BertModel."""

    prefix = "bert."  # of the tensors' names in a checkpoint with a head for some task
    # what a checkpoint may hold and an embedding never reads
    ignored_prefixes = ("pooler.", "embeddings.position_ids")

    def __init__(self, config: BertConfig, take: Callable[[str], torch.Tensor]) -> None:
        """take: gives each tensor of `tensor_shapes` once, in the dtype and on the device of the forward."""
        self.config = config
        self._words = take("embeddings.word_embeddings.weight")
        # one token type in an embedding model's input, so its row is added to every position's once
        self._positions_and_type = (
            take("embeddings.position_embeddings.weight").float()
            + take("embeddings.token_type_embeddings.weight")[0].float()
        )
        self._embedding_norm = _layer_norm(take, "embeddings.LayerNorm")
        self._layers = [_layer(take, f"encoder.layer.{i}") for i in range(config.layers)]

    @property
    def attention_kernels(self) -> str:
        """Which body of it runs here, "cpp" or "torch"."""
        return attention_kernels(self._words.dtype, self.config.hidden // self.config.heads)

    @staticmethod
    def tensor_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor that the forward needs, by its name without `prefix`."""
        hidden = config.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
            "embeddings.position_embeddings.weight": (config.positions, hidden),
            "embeddings.token_type_embeddings.weight": (config.token_types, hidden),
            "embeddings.LayerNorm.weight": (hidden,),
            "embeddings.LayerNorm.bias": (hidden,),
        }
        linears = {
            "attention.self.query": (hidden, hidden),
            "attention.self.key": (hidden, hidden),
            "attention.self.value": (hidden, hidden),
            "attention.output.dense": (hidden, hidden),
            "intermediate.dense": (config.intermediate, hidden),
            "output.dense": (hidden, config.intermediate),
        }
        for i in range(config.layers):
            for name, shape in linears.items():
                shapes[f"encoder.layer.{i}.{name}.weight"] = shape
                shapes[f"encoder.layer.{i}.{name}.bias"] = shape[:1]
            for name in ("attention.output.LayerNorm", "output.LayerNorm"):
                shapes[f"encoder.layer.{i}.{name}.weight"] = (hidden,)
                shapes[f"encoder.layer.{i}.{name}.bias"] = (hidden,)
        return shapes

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        groups: list[EqualLengths],
        between: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """token_ids and positions [total_tokens] -> the last hidden states [total_tokens, hidden]. `between` is called
        after each layer.
        """
        eps = self.config.layer_norm_eps
        norm = self._embedding_norm
        hidden = embed_tokens(token_ids, positions, self._words, self._positions_and_type, norm.weight, norm.bias, eps)
        for layer in self._layers:
            context = varlen_attention(linear(hidden, layer.qkv), self.config.heads, groups)
            norm = layer.attention_norm
            hidden = layer_norm_residual(linear(context, layer.attention_output), hidden, norm.weight, norm.bias, eps)
            inner = linear(hidden, layer.intermediate, self.config.activation)
            norm = layer.output_norm
            hidden = layer_norm_residual(linear(inner, layer.output), hidden, norm.weight, norm.bias, eps)
            if between is not None:
                between()
        return hidden


def _layer(take: Callable[[str], torch.Tensor], prefix: str) -> _Layer:
    qkv = [f"{prefix}.attention.self.{part}" for part in ("query", "key", "value")]
    return _Layer(
        qkv=prepare_linear(
            torch.cat([take(f"{name}.weight") for name in qkv]), torch.cat([take(f"{name}.bias") for name in qkv])
        ),
        attention_output=_linear(take, f"{prefix}.attention.output.dense"),
        attention_norm=_layer_norm(take, f"{prefix}.attention.output.LayerNorm"),
        intermediate=_linear(take, f"{prefix}.intermediate.dense"),
        output=_linear(take, f"{prefix}.output.dense"),
        output_norm=_layer_norm(take, f"{prefix}.output.LayerNorm"),
    )


def _linear(take: Callable[[str], torch.Tensor], name: str) -> LinearWeight:
    return prepare_linear(take(f"{name}.weight"), take(f"{name}.bias"))


def _layer_norm(take: Callable[[str], torch.Tensor], name: str) -> _LayerNorm:
    return _LayerNorm(take(f"{name}.weight").float(), take(f"{name}.bias").float())
