"""RMSNorm of a sum: what begins both halves of a decoder layer.

Knows rows of hidden states, not which layer they come from.
"""

from __future__ import annotations

import torch


def rms_norm_residual(
    x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """RMSNorm(residual + x) over the last axis, in `dtype`; residual becomes the sum. No x adds nothing.

    residual [total_tokens, hidden] in float32, so that what many layers add is rounded once; x of its shape, in any
    float dtype; weight [hidden] in float32. Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
    """
    assert residual.dtype == weight.dtype == torch.float32, (residual.dtype, weight.dtype)
    if x is not None:
        assert x.shape == residual.shape, (x.shape, residual.shape)
        residual.add_(x)
    assert weight.shape == residual.shape[-1:], (weight.shape, residual.shape)
    # the squares are summed in one pass, without the copies of them that torch's own rms_norm makes on a CPU
    norm = torch.linalg.vector_norm(residual, dim=-1, keepdim=True)
    normed: torch.Tensor = residual * norm.square_().div_(len(weight)).add_(eps).rsqrt_()
    return normed.mul_(weight).to(dtype)
