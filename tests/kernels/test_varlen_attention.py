"""varlen_attention against torch's own attention in float64, one sequence at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from embedserve_kernels.varlen_attention import group_equal_lengths, varlen_attention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([8, 12, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_sequence_attends_within_itself(lengths, heads, head_dim, dtype, seed):
    check(lengths, heads, head_dim, dtype, seed)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "lengths",
    [[1], [1, 1, 1], [64] * 5, [256], [1, 2, 3, 5, 8, 13, 256], [15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]],
    ids=str,
)
def test_lengths_at_the_edges(lengths, dtype):
    check(lengths, 3, 32, dtype, seed=7)


def test_a_sequence_of_one_token_gets_its_own_value():
    qkv = torch.randn(6, 3 * 16, generator=torch.Generator().manual_seed(0))
    groups = group_equal_lengths(np.array([1, 2, 3]))
    torch.testing.assert_close(varlen_attention(qkv, 2, groups)[0], qkv[0, 32:])


def test_what_shares_the_batch_changes_nothing_but_rounding():
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(20, 3 * 64, generator=generator)
    strangers = torch.full((12 + 22, 3 * 64), 1e4)  # a leak between sequences would show
    alone = varlen_attention(qkv, 2, group_equal_lengths(np.array([20])))
    packed = torch.cat([strangers[:12], qkv, strangers[12:]])
    groups = group_equal_lengths(np.array([3, 9, 20, 22]))
    torch.testing.assert_close(varlen_attention(packed, 2, groups)[12:32], alone, rtol=1e-5, atol=1e-5)


def check(lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> None:
    lengths = sorted(lengths)
    qkv = torch.randn(sum(lengths), 3 * heads * head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    groups = group_equal_lengths(np.array(lengths))
    attended = varlen_attention(qkv, heads, groups)
    assert attended.dtype == dtype
    expected = torch.cat([attend_one(tokens, heads) for tokens in qkv.double().split(lengths)])
    torch.testing.assert_close(attended.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def attend_one(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """[length, 3 * hidden] -> [length, hidden]"""
    q, k, v = qkv.view(len(qkv), 3, heads, -1).permute(1, 2, 0, 3)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return (F.softmax(scores, dim=-1) @ v).transpose(0, 1).reshape(len(qkv), -1)
