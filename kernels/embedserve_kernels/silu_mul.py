"""SwiGLU's middle: the gate's SiLU times the up projection.

Knows rows, not the matrices before and behind.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[total_tokens, 2 * intermediate], gate then up -> silu(gate) * up [total_tokens, intermediate], same dtype.

    Shazeer, https://arxiv.org/abs/2002.05202.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
