"""Self-attention over sequences packed end to end, each attending within itself.

Knows lengths and heads; neither layers, weights nor what the tokens are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

PAD_FRACTION = 0.25


@dataclass(frozen=True)
class AttentionGroup:
    """Consecutive sequences that one call of torch's attention takes as [rows, heads, length, head_dim].

    Where all have `length` tokens they are a plain view, and the three tensors are None.
    """

    start: int  # first token, of the packed batch
    end: int
    rows: int
    length: int
    gather: torch.Tensor | None  # [rows * length] int64: packed token of each padded place, any where it is padding
    scatter: torch.Tensor | None  # [end - start] int64: padded place of each packed token
    mask: torch.Tensor | None  # [rows, 1, 1, length]: 0 on a token, -inf on padding


@dataclass(frozen=True)
class AttentionPlan:
    """The index maps of a batch, made once and used by every layer."""

    groups: list[AttentionGroup]
    total_tokens: int


def plan_attention(lengths: np.ndarray, *, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    """lengths [sequences] in the order they are packed: ascending, at least 1."""
    lengths = np.asarray(lengths, dtype=np.int64)
    assert lengths[0] >= 1, lengths[0]
    assert (lengths[1:] >= lengths[:-1]).all(), "sort the sequences by length"
    starts = np.cumsum(lengths) - lengths
    groups = [
        _plan_group(int(starts[first]), lengths[first:end], dtype, device) for first, end in _cut_into_groups(lengths)
    ]
    return AttentionPlan(groups, int(lengths.sum()))


def varlen_attention(qkv: torch.Tensor, heads: int, plan: AttentionPlan) -> torch.Tensor:
    """qkv [total_tokens, 3 * hidden] (queries, keys, values; heads within each) -> [total_tokens, hidden].

    Not causal, scaled by head_dim ** -0.5. Softmax and sums are in float32.
    """
    total_tokens, width = qkv.shape
    assert total_tokens == plan.total_tokens, (total_tokens, plan.total_tokens)
    hidden = width // 3
    if len(plan.groups) == 1 and plan.groups[0].scatter is None:
        return _attend(qkv, heads, plan.groups[0])
    out = qkv.new_empty(total_tokens, hidden)
    for group in plan.groups:
        part = out[group.start : group.end]
        if group.gather is None or group.scatter is None:
            part.copy_(_attend(qkv[group.start : group.end], heads, group))
        else:
            padded = _attend(qkv.index_select(0, group.gather), heads, group)
            torch.index_select(padded, 0, group.scatter, out=part)
    return out


def _attend(qkv: torch.Tensor, heads: int, group: AttentionGroup) -> torch.Tensor:
    """[rows * length, 3 * hidden] -> [rows * length, hidden]"""
    hidden = qkv.shape[1] // 3
    q, k, v = qkv.view(group.rows, group.length, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4).unbind(0)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
    return attended.transpose(1, 2).reshape(group.rows * group.length, hidden)


def _cut_into_groups(lengths: np.ndarray) -> list[tuple[int, int]]:
    """(first, end) of runs of sequences, none shorter than its run's longest by more than PAD_FRACTION."""
    cuts = [0]
    while cuts[-1] < len(lengths):
        longest = int(lengths[cuts[-1]] / (1 - PAD_FRACTION))
        cuts.append(int(np.searchsorted(lengths, longest, side="right")))
    return list(pairwise(cuts))


def _plan_group(start: int, lengths: np.ndarray, dtype: torch.dtype, device: torch.device) -> AttentionGroup:
    rows, length = len(lengths), int(lengths.max())
    end = start + int(lengths.sum())
    if end - start == rows * length:
        return AttentionGroup(start, end, rows, length, None, None, None)
    place = np.arange(length)
    is_token = place < lengths[:, None]  # [rows, length]
    first = start + np.cumsum(lengths) - lengths
    gather = np.where(is_token, first[:, None] + place, start).ravel()
    scatter = np.flatnonzero(is_token)
    padding = torch.from_numpy(~is_token).to(device)
    mask = torch.zeros(rows, 1, 1, length, dtype=dtype, device=device)
    mask.masked_fill_(padding[:, None, None], float("-inf"))
    return AttentionGroup(
        start, end, rows, length, torch.from_numpy(gather).to(device), torch.from_numpy(scatter).to(device), mask
    )
