"""Qwen3 over packed sequences, driven by its config.json: a decoder without a KV cache, for nothing is generated.

Knows token ids, positions and hidden states; neither rows, pooling nor where the weights came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from embedserve.errors import NotNative, StartError
from embedserve_kernels.linear import LinearWeight, linear, prepare_linear
from embedserve_kernels.qk_norm_rope import Rotations, qk_norm_rope, rotations
from embedserve_kernels.rms_norm_residual import rms_norm_residual
from embedserve_kernels.silu_mul import silu_mul
from embedserve_kernels.varlen_attention import EqualLengths, attention_kernels, varlen_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# What transformers takes where a Qwen3's config names none; the published ones name both, and 1e6 for theta.
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_HEAD_DIM = 128
CPU_SLICE_TOKENS = 256  # of each thread; half a layer of the 0.6B shape takes them 20 ms on AVX512-BF16
_SUPPORTED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "is_causal": True}


@dataclass(frozen=True)
class Qwen3Config:
    """What of config.json the forward depends on."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """Raises NotNative for a variant of Qwen3 that the forward below would get wrong."""
        for key, supported in _SUPPORTED.items():
            if config.get(key, supported) != supported:
                raise NotNative(f"config.json: {key} is {config[key]!r}; supported: {supported!r}.")
        kinds = set(config.get("layer_types") or ()) - {"full_attention"}
        if kinds:
            raise NotNative(f"config.json: layer_types has {', '.join(sorted(kinds))}; supported: full_attention.")
        try:
            heads = int(config["num_attention_heads"])
            qwen3 = cls(
                vocab_size=int(config["vocab_size"]),
                hidden=int(config["hidden_size"]),
                intermediate=int(config["intermediate_size"]),
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config["num_key_value_heads"]),
                head_dim=int(config.get("head_dim") or _DEFAULT_HEAD_DIM),
                rope_theta=_rope_theta(config),
                rms_norm_eps=float(config["rms_norm_eps"]),
            )
        except KeyError as error:
            raise StartError(f"config.json has no {error}; a Qwen3's config names it.") from None
        if qwen3.head_dim % 2:
            raise StartError(f"config.json: head_dim is {qwen3.head_dim}; it must be even, for RoPE turns halves.")
        if heads % qwen3.kv_heads:
            raise StartError(
                f"config.json: num_key_value_heads {qwen3.kv_heads} does not divide num_attention_heads {heads}."
            )
        return qwen3


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Newer configs keep it in rope_parameters, older ones beside rope_scaling, which wins, as in transformers."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise NotNative(f"config.json: RoPE differs among {', '.join(rope)}; supported: one for all layers.")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise NotNative(f"config.json: the type of RoPE is {kind!r}; supported: default.")
    return float(rope.get("rope_theta") or config.get("rope_theta") or _DEFAULT_ROPE_THETA)


@dataclass(frozen=True)
class _Layer:
    input_norm: torch.Tensor  # [hidden] float32
    qkv: LinearWeight  # [(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values
    qk_norm: torch.Tensor  # [heads + kv_heads, head_dim] float32
    attention_output: LinearWeight
    post_attention_norm: torch.Tensor
    gate_up: LinearWeight  # [2 * intermediate, hidden]
    down: LinearWeight


class Qwen3Decoder:
    """https://arxiv.org/abs/2505.09388; the tensors' names are those of transformers' Qwen3Model."""

    prefix = "model."  # of the tensors' names in a checkpoint with a language model's head
    ignored_prefixes = ("lm_head.",)

    def __init__(self, config: Qwen3Config, take: Callable[[str], torch.Tensor]) -> None:
        """take: gives each tensor of `tensor_shapes` once, in the dtype and on the device of the forward."""
        self.config = config
        self._words = take("embed_tokens.weight")
        self._layers = [_layer(config, take, f"layers.{i}") for i in range(config.layers)]
        self._norm = take("norm.weight").float()

    @property
    def attention_kernels(self) -> str:
        """Which body of it runs here, "cpp" or "torch"."""
        return attention_kernels(self._words.dtype, self.config.head_dim)

    @staticmethod
    def tensor_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
        """Every tensor that the forward needs, by its name without `prefix`."""
        hidden, head_dim = config.hidden, config.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (config.vocab_size, hidden),
            "norm.weight": (hidden,),
        }
        of_a_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "self_attn.q_proj": (config.heads * head_dim, hidden),
            "self_attn.k_proj": (config.kv_heads * head_dim, hidden),
            "self_attn.v_proj": (config.kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, config.heads * head_dim),
            "mlp.gate_proj": (config.intermediate, hidden),
            "mlp.up_proj": (config.intermediate, hidden),
            "mlp.down_proj": (hidden, config.intermediate),
        }
        for i in range(config.layers):
            shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in of_a_layer.items()}
        return shapes

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        groups: list[EqualLengths],
        between: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """token_ids and positions [total_tokens] -> the last hidden states [total_tokens, hidden], in float32.

        What the layers add up is in float32; products and attention are in the weights' dtype. `between` is called
        between the pieces of it, each of some ten milliseconds on a CPU.
        """
        config = self.config
        turns = rotations(positions, config.head_dim, config.rope_theta)
        residual = F.embedding(token_ids, self._words).float()
        added = None  # to the residual by the half layer before
        for layer in self._layers:
            qkv = _by_slices(partial(self._qkv, layer, added, residual, turns), residual, between)
            context = varlen_attention(
                qkv, config.heads, groups, kv_heads=config.kv_heads, causal=True, between=between
            )
            added = _by_slices(partial(self._behind_attention, layer, context, residual), residual, between)
        return rms_norm_residual(added, residual, self._norm, config.rms_norm_eps, torch.float32)

    def _qkv(
        self, layer: _Layer, added: torch.Tensor | None, residual: torch.Tensor, turns: Rotations, rows: slice
    ) -> torch.Tensor:
        eps = self.config.rms_norm_eps
        added = None if added is None else added[rows]
        qkv = linear(rms_norm_residual(added, residual[rows], layer.input_norm, eps, self._words.dtype), layer.qkv)
        return qk_norm_rope(qkv, layer.qk_norm, Rotations(turns.cos[rows], turns.sin[rows]), eps)

    def _behind_attention(
        self, layer: _Layer, context: torch.Tensor, residual: torch.Tensor, rows: slice
    ) -> torch.Tensor:
        added = linear(context[rows], layer.attention_output)
        eps, dtype = self.config.rms_norm_eps, self._words.dtype
        gate_up = linear(rms_norm_residual(added, residual[rows], layer.post_attention_norm, eps, dtype), layer.gate_up)
        return linear(silu_mul(gate_up), layer.down)


def _by_slices(
    run: Callable[[slice], torch.Tensor], tokens: torch.Tensor, between: Callable[[], None] | None
) -> torch.Tensor:
    """`run` of all rows of `tokens`, so many at a time; the results one below the other. What is wide lives shortly."""
    total = len(tokens)
    size = CPU_SLICE_TOKENS * torch.get_num_threads() if tokens.device.type == "cpu" else total
    out = None
    for start in range(0, total, size):
        rows = slice(start, min(start + size, total))
        part = run(rows)
        if between is not None:
            between()
        if size >= total:
            return part
        if out is None:
            out = part.new_empty(total, part.shape[1])
        out[rows] = part
    assert out is not None, "no tokens"
    return out


def _layer(config: Qwen3Config, take: Callable[[str], torch.Tensor], prefix: str) -> _Layer:
    def joined(*names: str) -> LinearWeight:
        return prepare_linear(torch.cat([take(f"{prefix}.{name}.weight") for name in names]))

    q_norm, k_norm = (take(f"{prefix}.self_attn.{part}_norm.weight").float() for part in "qk")
    return _Layer(
        input_norm=take(f"{prefix}.input_layernorm.weight").float(),
        qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=torch.cat([q_norm.expand(config.heads, -1), k_norm.expand(config.kv_heads, -1)]),
        attention_output=joined("self_attn.o_proj"),
        post_attention_norm=take(f"{prefix}.post_attention_layernorm.weight").float(),
        gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
        down=joined("mlp.down_proj"),
    )
