"""Attention of one long sequence on a CPU in pieces of some ten milliseconds, between which something else may happen.

Knows one sequence at a time; which sequences are long enough for it is for varlen_attention to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

# Measured on two cores, two heads of 128 over 16,384 tokens: pieces of 1024 queries take as long as one call for all,
# those of 512 take 1.3 times as long.
PIECE_QUERIES = 1024
PIECE_KEYS = 4096


def long_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, causal: bool, between: Callable[[], None]
) -> None:
    """q [heads, length, head_dim]; k and v [kv_heads, length, head_dim], each shared by heads / kv_heads consecutive
    ones of q; out as q, written. `between` is called after each piece. Softmax and sums are in float32.

    A piece's softmax is over its own keys; the logarithm of its sum weighs it against the others
    (https://arxiv.org/abs/2112.05682).
    """
    heads, length, _ = q.shape
    shared_by = heads // len(k)
    for head in range(len(k)):
        heads_of_it = slice(head * shared_by, (head + 1) * shared_by)
        keys, values = (each[head].expand(shared_by, -1, -1) for each in (k, v))
        for begin in range(0, length, PIECE_QUERIES):
            some = slice(begin, min(begin + PIECE_QUERIES, length))
            queries = q[heads_of_it, some]
            first, *others = _parts(some, length, causal)
            attended, log_sum = _attend(queries, keys[:, first], values[:, first], causal)
            between()
            for part in others:
                new, new_log_sum = _attend(queries, keys[:, part], values[:, part], False)
                attended.lerp_(new, torch.sigmoid(new_log_sum - log_sum).unsqueeze(-1))
                log_sum = torch.logaddexp(log_sum, new_log_sum)
                between()
            out[heads_of_it, some] = attended


def _parts(queries: slice, length: int, causal: bool) -> Iterator[slice]:
    """The keys that these queries attend to. If causal, the first part is the queries' own, where each query sees only
    those up to its own."""
    if causal:
        yield queries
    end = queries.start if causal else length
    for begin in range(0, end, PIECE_KEYS):
        yield slice(begin, min(begin + PIECE_KEYS, end))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """-> [heads, queries, head_dim] and the logarithm of softmax's sums [heads, queries], both float32."""
    attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), 0.0, causal
    )
    return attended[0].float(), log_sum[0].float()
