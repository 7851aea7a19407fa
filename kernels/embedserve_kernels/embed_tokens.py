"""A BERT's first step: word + position + type embeddings, then LayerNorm.

Knows token ids and their positions, not where sequences begin.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812


def embed_tokens(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    words: torch.Tensor,
    positions_and_type: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """-> [total_tokens, hidden] in `words`' dtype; the sum and the LayerNorm are taken in float32.

    token_ids and positions [total_tokens], int32 or int64; words [vocab, hidden]; positions_and_type
    [max_positions, hidden] float32, the type's row already added, since an embedding model has one type;
    weight and bias [hidden] float32. An id outside its table is IndexError on a CPU.
    """
    assert token_ids.shape == positions.shape, (token_ids.shape, positions.shape)
    assert positions_and_type.dtype == weight.dtype == bias.dtype == torch.float32
    # bfloat16 + float32 is float32
    x = F.embedding(positions, positions_and_type).add_(F.embedding(token_ids, words))
    return F.layer_norm(x, weight.shape, weight, bias, eps).to(words.dtype)
