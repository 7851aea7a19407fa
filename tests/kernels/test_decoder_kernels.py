"""The decoder's small operations against transformers' own modules, in float32 and bfloat16."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from embedserve_kernels.qk_norm_rope import Rotations, qk_norm_rope, rotations
from embedserve_kernels.rms_norm_residual import rms_norm_residual
from embedserve_kernels.silu_mul import silu_mul

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 1), (3, 7), (17, 64), (5, 1000)])
def test_rms_norm_of_the_sum_and_the_sum_itself(dtype: torch.dtype, tokens: int, hidden: int) -> None:
    norm = Qwen3RMSNorm(hidden, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    residual, x = torch.randn(tokens, hidden) * 10, torch.randn(tokens, hidden).to(dtype)
    total = residual + x.float()
    normed = rms_norm_residual(x, residual, norm.weight.detach(), 1e-6, dtype)
    assert normed.dtype == dtype
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(normed.float(), norm(total).detach(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rms_norm_without_anything_to_add_leaves_the_residual_as_it_is() -> None:
    residual = torch.randn(3, 8)
    before = residual.clone()
    rms_norm_residual(None, residual, torch.ones(8), 1e-6, torch.bfloat16)
    torch.testing.assert_close(residual, before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 2), (4, 2, 32), (6, 3, 10), (16, 8, 128)])
def test_qk_norm_rope_is_that_of_transformers(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    positions = torch.tensor([0, 1, 2, 0, 511, 32_000, 7])
    qkv = torch.randn(len(positions), (heads + 2 * kv_heads) * head_dim).to(dtype)
    q_norm, k_norm = Qwen3RMSNorm(head_dim), Qwen3RMSNorm(head_dim)
    for norm in (q_norm, k_norm):
        torch.nn.init.normal_(norm.weight, 1.0)
    theta = {"rope_type": "default", "rope_theta": 1e6}
    rope = Qwen3RotaryEmbedding(Qwen3Config(head_dim=head_dim, rope_parameters=theta))
    q, k, v = qkv.view(len(positions), -1, head_dim).float().split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = rope(q, positions[None])
    q, k = apply_rotary_pos_emb(q_norm(q)[None], k_norm(k)[None], cos, sin, unsqueeze_dim=2)
    weight = torch.cat([q_norm.weight.expand(heads, -1), k_norm.weight.expand(kv_heads, -1)]).detach()
    result = qk_norm_rope(qkv, weight, rotations(positions, head_dim, 1e6), 1e-6).view(len(positions), -1, head_dim)
    expected = torch.cat([q[0], k[0], v], dim=1).detach()
    tolerance = max(TOLERANCE[dtype], 2e-3 if head_dim == 128 else 0.0)  # angles of position 32,000 in float32
    torch.testing.assert_close(result.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [255, 256, 257, 600])
def test_tokens_beyond_a_block_are_turned_by_their_own_positions(tokens: int) -> None:
    qkv, weight, turns = torch.randn(tokens, 4 * 8), torch.randn(2, 8), rotations(torch.arange(tokens), 8, 1e4)
    alone = torch.cat(
        [
            qk_norm_rope(row[None].clone(), weight, Rotations(cos[None], sin[None]), 1e-6)
            for row, cos, sin in zip(qkv, *turns, strict=True)
        ]
    )
    torch.testing.assert_close(qk_norm_rope(qkv, weight, turns, 1e-6), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 256, 257, 600])
def test_silu_mul_takes_the_gate_first(dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned = torch.full((tokens, 33), torch.nan, dtype=dtype)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size: poisoned)
    gate_up = torch.randn(tokens, 66).to(dtype)
    result = silu_mul(gate_up)
    assert result.data_ptr() == poisoned.data_ptr()
    gate, up = gate_up.double().chunk(2, dim=1)
    expected = (gate * torch.sigmoid(gate) * up).to(dtype)
    # rounded once, so that bfloat16's result is the nearest value or, where float32 decides, the next
    torch.testing.assert_close(result, expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
