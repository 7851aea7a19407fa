"""Pooling, MRL cut, L2 normalising and the cast, straight into a batch's output bytes.

Knows packed hidden states and where each row goes; neither the model nor whose row it is.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from embedserve_kernels.output_layout import OutputDtype, RowTable, row_bytes

Pooling = Literal["mean", "cls", "lasttoken"]

_NORM_FLOOR = 1e-12  # as torch.nn.functional.normalize: a zero row stays zero
_INT8_MAX = 127.0


def pool_normalize(
    hidden: torch.Tensor, cu_seqlens: torch.Tensor, pooling: Pooling, table: RowTable, out: torch.Tensor
) -> None:
    """Write row i, pooled from tokens cu_seqlens[i] to cu_seqlens[i + 1], where and how `table` says.

    hidden [total_tokens, hidden] in any float dtype; cu_seqlens [rows + 1] int64, every sequence at least one token;
    out [bytes] uint8, contiguous, on hidden's device. All arithmetic is in float32, cast once. The status byte is 1
    for a row that has NaN or infinity in what leaves, float16's overflow included. Matryoshka cut:
    https://arxiv.org/abs/2205.13147, cut first, then normalised.
    """
    assert hidden.dim() == 2, hidden.shape
    assert cu_seqlens.dtype == torch.int64, cu_seqlens.dtype
    assert cu_seqlens.shape == (len(table) + 1,), (cu_seqlens.shape, len(table))
    assert out.dtype == torch.uint8, out.dtype
    assert out.is_contiguous()
    pooled = pool(hidden, cu_seqlens, pooling)
    for rows in _groups(table):
        values = pooled[:, : int(table.dims[rows[0]])]
        if not np.array_equal(rows, np.arange(len(table))):
            values = values.index_select(0, _to_device(rows, values))
        dtype = OutputDtype(int(table.dtype[rows[0]]))
        _write_group(values, dtype, bool(table.normalize[rows[0]]), table.take(rows), out)


def pool(hidden: torch.Tensor, cu_seqlens: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """[total_tokens, hidden] -> [rows, hidden] in float32. Last and first tokens are taken by index."""
    if pooling == "cls":
        return hidden.index_select(0, cu_seqlens[:-1]).float()
    if pooling == "lasttoken":
        return hidden.index_select(0, cu_seqlens[1:] - 1).float()
    assert pooling == "mean", pooling
    # A bag is a mean over given rows of a table, summed in the table's dtype: float32. The fastest of torch's
    # segmented means on a CPU, by a factor of ten over segment_reduce.
    every_token = torch.arange(len(hidden), device=hidden.device)
    return F.embedding_bag(every_token, hidden.float(), cu_seqlens, mode="mean", include_last_offset=True)


def _groups(table: RowTable) -> list[np.ndarray]:
    """Row numbers of each distinct (dims, dtype, normalise), in order of their place in the output."""
    key = (table.dims.astype(np.int64) << 9) | (table.dtype.astype(np.int64) << 1) | table.normalize
    if (key == key[0]).all():
        return [np.argsort(table.byte_offset, kind="stable")]
    order = np.lexsort((table.byte_offset, key))
    return np.split(order, np.flatnonzero(np.diff(key[order])) + 1)


def _write_group(values: torch.Tensor, dtype: OutputDtype, normalize: bool, table: RowTable, out: torch.Tensor) -> None:
    """values [rows, dims] float32 -> their bytes, scales and status. All rows have this dtype and flag."""
    dims = values.shape[1]
    if normalize:
        norm = torch.linalg.vector_norm(values, dim=1, keepdim=True)
        values = values / norm.clamp_min(_NORM_FLOOR)
        nonfinite = _has_nonfinite(norm)  # an infinite norm would hide as a row of zeros
    else:
        nonfinite = _has_nonfinite(values)

    if dtype == OutputDtype.FLOAT32:
        encoded = values.contiguous()
    elif dtype == OutputDtype.FLOAT16:
        encoded = values.to(torch.float16)
        nonfinite = nonfinite | _has_nonfinite(encoded)
    elif dtype == OutputDtype.INT8:
        encoded, scale = _to_int8(values)
        _write(scale.view(torch.uint8), table.scale_offset, out)
    else:
        encoded = _pack_bits(values)
        if dtype == OutputDtype.BINARY:
            encoded = encoded ^ 0x80  # minus 128, as the int8 that holds it
    as_bytes = encoded.view(torch.uint8)
    assert as_bytes.shape[1] == row_bytes(dims, dtype), (as_bytes.shape, dims, dtype)
    _write(as_bytes, table.byte_offset, out)
    _write(nonfinite.view(torch.uint8), table.status_offset, out)


def _has_nonfinite(values: torch.Tensor) -> torch.Tensor:
    """[rows, n] -> bool [rows, 1]. NaN and infinity times zero are NaN, and NaN stays in a sum: three operations."""
    return (values * 0).sum(dim=1, keepdim=True) != 0


def _to_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> int8 [rows, dims] and float32 scales [rows, 1]: scale = max|v| / 127, rounded half to even."""
    scale = values.abs().amax(dim=1, keepdim=True) / _INT8_MAX
    # a zero row divides by one; a scale among the smallest floats is coarse, so the quotient may pass 127
    quotient = values / torch.where(scale == 0, 1.0, scale)
    return quotient.round().clamp(-_INT8_MAX, _INT8_MAX).to(torch.int8), scale


def _pack_bits(values: torch.Tensor) -> torch.Tensor:
    """-> uint8 [rows, ceil(dims / 8)], bit = v > 0, most significant first, as numpy.packbits."""
    rows, dims = values.shape
    bits = F.pad((values > 0).view(torch.uint8), (0, -dims % 8)).view(rows, -1, 8)
    place = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=values.device)
    return (bits * place).sum(dim=2, dtype=torch.uint8)


def _write(rows: torch.Tensor, offsets: np.ndarray, out: torch.Tensor) -> None:
    """rows [n, width] uint8 to out[offsets[i] : offsets[i] + width]: one slice where they lie end to end."""
    count, width = rows.shape
    start = int(offsets[0])
    if np.array_equal(offsets, start + width * np.arange(count)):
        out[start : start + count * width].view(count, width).copy_(rows)
        return
    first = _to_device(offsets, out)
    out.index_put_((first.unsqueeze(1) + torch.arange(width, device=out.device),), rows)


def _to_device(indices: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """int64 numpy -> tensor beside `like`; through pinned memory, so that a GPU's stream is not waited for."""
    tensor = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
    if like.device.type == "cuda":
        return tensor.pin_memory().to(like.device, non_blocking=True)
    return tensor
