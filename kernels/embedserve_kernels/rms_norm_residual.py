"""RMSNorm of a sum: what begins both halves of a decoder layer.

Knows rows of hidden states, not which layer they come from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


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
    return F.rms_norm(residual, weight.shape, weight, eps).to(dtype)
