"""LayerNorm of a sum: what ends both halves of a BERT layer.

Knows rows of hidden states, not which layer they come from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def layer_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """LayerNorm(x + residual) over the last axis; x is overwritten with the sum.

    x and residual [total_tokens, hidden] of one dtype, which the result has too; weight and bias [hidden] in
    float32. Mean and variance are taken in float32.
    """
    assert x.shape == residual.shape, (x.shape, residual.shape)
    assert x.dtype == residual.dtype, (x.dtype, residual.dtype)
    assert weight.dtype == bias.dtype == torch.float32, (weight.dtype, bias.dtype)
    return F.layer_norm(x.add_(residual), weight.shape, weight, bias, eps)
