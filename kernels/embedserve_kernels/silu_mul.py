"""SiLU(gate) * up: what stands between the linears of a SwiGLU.

Knows one matrix; neither its weights nor the sequences in the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

_CPU_BLOCK_TOKENS = 256  # what is float32 in between stays in the cache


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [total_tokens, 2 * intermediate], the gates first -> [total_tokens, intermediate] in its dtype.

    In float32, cast once. Shazeer, https://arxiv.org/abs/2002.05202.
    """
    assert gate_up.dim() == 2, gate_up.shape
    assert gate_up.shape[1] % 2 == 0, gate_up.shape
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    block = _CPU_BLOCK_TOKENS if gate_up.device.type == "cpu" else max(1, len(gate_up))
    for some, there in zip(torch.split(gate_up, block), torch.split(out, block), strict=True):
        gate, up = some.chunk(2, dim=1)
        there.copy_(F.silu(gate.float()).mul_(up))
    return out
