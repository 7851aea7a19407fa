"""What the rest of the server knows of a loaded model; plain data that every process can hold.

Knows nothing of torch, sockets or requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelCard:
    """One served model. Limits are in tokens, special tokens and prompt included."""

    name: str  # the default served name: the hub id, or the folder's name
    tokenizer_file: str  # path of tokenizer.json
    architecture: str
    dims: int
    max_input_tokens: int
    vocab_size: int
    pooling: str  # "mean" | "cls" | "lasttoken"
    normalized: bool  # whether the folder ends in a Normalize module
    dtype: str  # of the weights and the forward: "float32" | "bfloat16" | "float16"
    device: str
    space_id: str  # weights, tokenizer, pooling, prompts: vectors of one space are comparable
    numerics_id: str  # dtype, device, kernels, version: a difference is rounding
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    matryoshka_dims: tuple[int, ...] = ()
