"""What happens to queries and keys before attention: RMSNorm of each head, then rotary positions.

Knows heads and positions; neither values nor where sequences begin.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_CPU_BLOCK_TOKENS = 256  # what is float32 in between stays in the cache


class Rotations(NamedTuple):
    """Of each token's position: float32 [total_tokens, head_dim / 2] each. One for all layers of a forward."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotations(positions: torch.Tensor, head_dim: int, theta: float) -> Rotations:
    """positions [total_tokens]. Pair i of d / 2 turns by position / theta^(2i/d): https://arxiv.org/abs/2104.09864."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float().unsqueeze(1) / theta**exponents
    return Rotations(angles.cos(), angles.sin())


def qk_norm_rope(qkv: torch.Tensor, weight: torch.Tensor, turns: Rotations, eps: float) -> torch.Tensor:
    """qkv [total_tokens, (heads + 2 * kv_heads) * head_dim], changed in place and returned: its queries and keys.

    weight [heads + kv_heads, head_dim] float32, each head's own. A head's dimension i is paired with i + head_dim / 2,
    as Hugging Face's checkpoints are laid out. All arithmetic is in float32, cast once.
    """
    heads, head_dim = weight.shape
    assert turns.cos.shape == turns.sin.shape == (len(qkv), head_dim // 2), (turns.cos.shape, qkv.shape)
    assert weight.dtype == turns.cos.dtype == torch.float32, (weight.dtype, turns.cos.dtype)
    block = _CPU_BLOCK_TOKENS if qkv.device.type == "cpu" else len(qkv)
    queries_and_keys = qkv[:, : heads * head_dim].view(len(qkv), heads, head_dim)
    by_token = queries_and_keys, turns.cos.unsqueeze(1), turns.sin.unsqueeze(1)
    for part, cos, sin in zip(*(torch.split(each, block) for each in by_token), strict=True):
        x = part.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        first, second = x.mul_(norm.square_().div_(head_dim).add_(eps).rsqrt_()).mul_(weight).chunk(2, dim=-1)
        part[..., : head_dim // 2] = (first * cos).sub_(second * sin)
        part[..., head_dim // 2 :] = (second * cos).add_(first * sin)
    return qkv
