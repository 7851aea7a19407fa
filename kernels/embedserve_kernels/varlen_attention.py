"""Self-attention over sequences packed end to end, each attending within itself.

Knows lengths and heads; neither layers, weights nor what the tokens are.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from embedserve_kernels.cpp_library import cpp_library
from embedserve_kernels.long_attention import PIECE_QUERIES, long_attention

if TYPE_CHECKING:
    from collections.abc import Callable

_CPP_DTYPES = (torch.float32, torch.bfloat16)
_CPP_HEAD_DIM = 256
_FLOAT32_LENGTH = 512
CPP_BODIES = {"fastest": 0, "portable": 1, "avx2": 2, "avx512": 3}  # as in cpp/varlen_attention.cpp


class EqualLengths(NamedTuple):
    """Consecutive sequences of one length: a plain view [rows, length, ...] of the packed tokens, nothing padded."""

    start: int  # first token
    rows: int
    length: int


def group_equal_lengths(lengths: np.ndarray) -> list[EqualLengths]:
    """Once per batch. lengths [sequences] in the order they are packed: ascending, each at least 1."""
    assert lengths[0] >= 1, lengths[0]
    assert (lengths[1:] >= lengths[:-1]).all(), "sort the sequences by length"
    distinct, rows = np.unique(lengths, return_counts=True)
    tokens = rows * distinct
    starts = np.cumsum(tokens) - tokens
    return [EqualLengths(*group) for group in zip(starts.tolist(), rows.tolist(), distinct.tolist(), strict=True)]


def varlen_attention(
    qkv: torch.Tensor,
    heads: int,
    groups: list[EqualLengths],
    *,
    kv_heads: int | None = None,
    causal: bool = False,
    between: Callable[[], None] | None = None,
) -> torch.Tensor:
    """qkv [total_tokens, (heads + 2 * kv_heads) * head_dim] -> [total_tokens, heads * head_dim].

    A token's queries, keys and values lie in this order, heads within each. Without kv_heads there are as many as
    heads; with fewer, each is shared by heads / kv_heads consecutive ones (https://arxiv.org/abs/2305.13245). Causal:
    a token attends to itself and those before it in its sequence. Scaled by head_dim ** -0.5. Softmax and sums are in
    float32. Tokens behind the last sequence belong to none and become zero. `between` is called between the pieces of
    long sequences, where a CPU's torch body runs them.
    """
    head_dim = _head_dim(qkv, heads, kv_heads or heads)
    assert len(qkv) >= _end(groups), (len(qkv), groups[-1])
    if qkv.device.type == "cpu" and qkv.is_contiguous() and attention_kernels(qkv.dtype, head_dim) == "cpp":
        return varlen_attention_cpp(qkv, heads, groups, kv_heads=kv_heads, causal=causal)
    return varlen_attention_reference(qkv, heads, groups, kv_heads=kv_heads, causal=causal, between=between)


def attention_kernels(dtype: torch.dtype, head_dim: int) -> str:
    """The body that a CPU runs in this dtype, "cpp" or "torch". The first call may compile.

    Measured on one core, 12 heads of 32: with AVX-512 the C++ body takes 0.2 of torch's time at lengths of 6 to 24 and
    0.3 to 0.4 at 40 to 8192; with AVX2, both held to it, 0.3 at 6 to 24 and 0.8 at 256 and 512. AMX is not measured.
    """
    # The C++ body takes one thread, for forwards side by side; torch shares a lone forward's work among several.
    suits = dtype in _CPP_DTYPES and head_dim % 8 == 0 and head_dim <= _CPP_HEAD_DIM and torch.get_num_threads() == 1
    if suits and not (dtype == torch.bfloat16 and _has_amx()) and _cpp_function() is not None:
        return "cpp"
    return "torch"


def varlen_attention_cpp(
    qkv: torch.Tensor,
    heads: int,
    groups: list[EqualLengths],
    body: str = "fastest",
    *,
    kv_heads: int | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """On the calling thread alone. Raises NotImplementedError where this machine lacks the body."""
    kv_heads = kv_heads or heads
    head_dim = _head_dim(qkv, heads, kv_heads)
    total_tokens = len(qkv)
    assert qkv.device.type == "cpu", qkv.device
    assert qkv.is_contiguous(), qkv.stride()
    assert qkv.dtype in _CPP_DTYPES, qkv.dtype
    assert total_tokens >= _end(groups), (total_tokens, groups[-1])
    out = qkv.new_empty(total_tokens, heads * head_dim)
    table = array("q", chain.from_iterable(groups))
    attend = _cpp_function()
    assert attend is not None
    failed = attend(
        qkv.data_ptr(),
        out.data_ptr(),
        qkv.dtype == torch.bfloat16,
        total_tokens,
        table.buffer_info()[0],
        len(groups),
        heads,
        kv_heads,
        head_dim,
        causal,
        CPP_BODIES[body],
    )
    if failed == 1:
        raise NotImplementedError(f"this machine does not run {body}")
    if failed:
        raise MemoryError(f"attention over {groups[-1].length} tokens")
    return out


def varlen_attention_reference(
    qkv: torch.Tensor,
    heads: int,
    groups: list[EqualLengths],
    *,
    kv_heads: int | None = None,
    causal: bool = False,
    between: Callable[[], None] | None = None,
) -> torch.Tensor:
    """With `between`, sequences of more than PIECE_QUERIES tokens go in pieces."""
    kv_heads = kv_heads or heads
    head_dim = _head_dim(qkv, heads, kv_heads)
    out = qkv.new_empty(len(qkv), heads * head_dim)
    out[_end(groups) :] = 0
    for group in groups:
        part = slice(group.start, group.start + group.rows * group.length)
        packed = qkv[part].to(_torch_dtype(qkv, group.length)).view(group.rows, group.length, -1, head_dim)
        # each [rows, its heads, length, head_dim]
        q, k, v = torch.split(packed.transpose(1, 2), [heads, kv_heads, kv_heads], dim=1)
        if between is not None and qkv.device.type == "cpu" and group.length > PIECE_QUERIES:
            attended = out[part].view(group.rows, group.length, heads, -1).transpose(1, 2)
            for row in range(group.rows):
                long_attention(q[row], k[row], v[row], attended[row], causal=causal, between=between)
            continue
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads != heads)
        out[part].view(group.rows, group.length, heads, -1).copy_(attended.transpose(1, 2))
    return out


def _head_dim(qkv: torch.Tensor, heads: int, kv_heads: int) -> int:
    assert heads % kv_heads == 0, (heads, kv_heads)
    assert qkv.shape[1] % (heads + 2 * kv_heads) == 0, (qkv.shape, heads, kv_heads)
    return int(qkv.shape[1]) // (heads + 2 * kv_heads)


def _end(groups: list[EqualLengths]) -> int:
    start, rows, length = groups[-1]
    return start + rows * length


@functools.cache
def _cpp_function() -> Callable[..., int] | None:
    library = cpp_library("varlen_attention")
    if library is None:
        return None
    function = library.varlen_attention
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, integer, integer, pointer, *[integer] * 6]
    function.restype = ctypes.c_int32
    return function


@functools.cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def _torch_dtype(qkv: torch.Tensor, length: int) -> torch.dtype:
    """The fastest to compute in, both conversions included. Measured on AVX512-BF16 without AMX, float32 takes 0.65
    of bfloat16's time at lengths of 6 to 26 and 0.9 at 64 to 256. Longer ones stay as they are: a copy in float32 is
    twice the size."""
    if qkv.device.type == "cpu" and not _has_amx() and length <= _FLOAT32_LENGTH:
        return torch.float32
    return qkv.dtype
