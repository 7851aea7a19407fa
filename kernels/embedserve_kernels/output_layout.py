"""What a row of output is in bytes, and where each row of a batch goes in its one output buffer.

numpy only: the engine writes by this layout, and whoever reads vectors back reads by it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

PART_ALIGNMENT = 16  # bytes; every part, and so every float32, starts aligned


class OutputDtype(IntEnum):
    """How one row leaves the engine. The numbers are those of the wire (`embedding.proto`)."""

    FLOAT32 = 1
    FLOAT16 = 2
    INT8 = 3  # symmetric per row: v is approximately int8 * scale, scale = max|v| / 127
    BINARY = 4  # UBINARY minus 128, as int8 (sentence-transformers' "binary")
    UBINARY = 5  # bit = v > 0, most significant bit first (numpy.packbits)


NUMPY_DTYPES: dict[OutputDtype, np.dtype[np.generic]] = {
    OutputDtype.FLOAT32: np.dtype("<f4"),
    OutputDtype.FLOAT16: np.dtype("<f2"),
    OutputDtype.INT8: np.dtype("i1"),
    OutputDtype.BINARY: np.dtype("i1"),
    OutputDtype.UBINARY: np.dtype("u1"),
}


def row_width(dims: int, dtype: OutputDtype) -> int:
    """Values in one row as the client sees it: dims, or dims / 8 rounded up for the binary forms."""
    return (dims + 7) // 8 if dtype in (OutputDtype.BINARY, OutputDtype.UBINARY) else dims


def row_bytes(dims: int, dtype: OutputDtype) -> int:
    """Bytes of one row, without the scale of int8."""
    return row_width(dims, dtype) * NUMPY_DTYPES[dtype].itemsize


@dataclass(frozen=True)
class RowTable:
    """Where and how each row of a batch is written; all arrays are [rows].

    Offsets are bytes from the start of the output buffer. `scale_offset` is -1 where there is no scale.
    The status byte is 0 for a finite row and 1 for one with NaN or infinity in it.
    """

    byte_offset: np.ndarray  # int64
    scale_offset: np.ndarray  # int64
    status_offset: np.ndarray  # int64
    dims: np.ndarray  # int32
    dtype: np.ndarray  # uint8, OutputDtype
    normalize: np.ndarray  # bool

    def __len__(self) -> int:
        return len(self.byte_offset)

    def take(self, order: np.ndarray) -> RowTable:
        """The same rows in another order."""
        return RowTable(
            self.byte_offset[order],
            self.scale_offset[order],
            self.status_offset[order],
            self.dims[order],
            self.dtype[order],
            self.normalize[order],
        )


@dataclass(frozen=True)
class OutputLayout:
    """One buffer for a batch: the parts end to end (rows, then scales), then one status byte a row.

    A part is one request's consecutive rows, which all have the same dims, dtype and normalise flag.
    """

    table: RowTable
    part_offset: list[int]  # of each part's first row
    part_scale_offset: list[int]  # of each part's first scale, -1 without
    part_end: list[int]  # where the next part may begin (aligned)
    status_offset: int
    total_bytes: int


def lay_out(rows: list[int], dims: list[int], dtypes: list[OutputDtype], normalize: list[bool]) -> OutputLayout:
    """Place parts of `rows[i]` rows each, in order. One pass over parts in Python, none over rows."""
    offsets: list[int] = []
    scale_offsets: list[int] = []
    ends: list[int] = []
    strides: list[int] = []
    end = 0
    for part_rows, part_dims, dtype in zip(rows, dims, dtypes, strict=True):
        stride = row_bytes(part_dims, dtype)
        offsets.append(end)
        strides.append(stride)
        end += part_rows * stride
        if dtype == OutputDtype.INT8:
            end = _aligned(end)
            scale_offsets.append(end)
            end += part_rows * 4
        else:
            scale_offsets.append(-1)
        end = _aligned(end)
        ends.append(end)

    counts = np.asarray(rows, dtype=np.int64)
    total_rows = int(counts.sum())
    row_in_part = np.arange(total_rows) - np.repeat(np.cumsum(counts) - counts, counts)
    scale_start = np.repeat(np.asarray(scale_offsets, dtype=np.int64), counts)
    table = RowTable(
        byte_offset=np.repeat(np.asarray(offsets, dtype=np.int64), counts)
        + row_in_part * np.repeat(np.asarray(strides, dtype=np.int64), counts),
        scale_offset=np.where(scale_start < 0, -1, scale_start + 4 * row_in_part),
        status_offset=end + np.arange(total_rows),
        dims=np.repeat(np.asarray(dims, dtype=np.int32), counts),
        dtype=np.repeat(np.asarray(dtypes, dtype=np.uint8), counts),
        normalize=np.repeat(np.asarray(normalize, dtype=bool), counts),
    )
    return OutputLayout(table, offsets, scale_offsets, ends, end, end + total_rows)


def _aligned(offset: int) -> int:
    return -(-offset // PART_ALIGNMENT) * PART_ALIGNMENT
