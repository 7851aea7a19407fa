"""Where rows, scales and status bytes of a batch go: disjoint, aligned, in order, and nothing beyond the end.

Knows numpy alone. Positions are counted here byte by byte, in the plainest way.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve_kernels.output_layout import (
    NUMPY_DTYPES,
    PART_ALIGNMENT,
    OutputDtype,
    OutputLayout,
    RowTable,
    lay_out,
    row_bytes,
    row_width,
)

PART_MEMBERS = ("rows", "dims", "dtypes", "normalize")
Part = tuple[int, int, OutputDtype, bool]  # rows, dims, dtype, normalize

parts_of_a_batch = st.lists(
    st.tuples(
        st.integers(1, 9),
        st.one_of(st.integers(1, 40), st.sampled_from([384, 1024, 4096])),
        st.sampled_from(OutputDtype),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def lay_out_parts(parts: list[Part]) -> OutputLayout:
    return lay_out(**dict(zip(PART_MEMBERS, map(list, zip(*parts, strict=True)), strict=True)))


@pytest.mark.parametrize(
    ("dims", "dtype", "width", "nbytes"),
    [
        (384, OutputDtype.FLOAT32, 384, 1536),
        (384, OutputDtype.FLOAT16, 384, 768),
        (384, OutputDtype.INT8, 384, 384),
        (384, OutputDtype.BINARY, 48, 48),
        (384, OutputDtype.UBINARY, 48, 48),
        (1, OutputDtype.UBINARY, 1, 1),
        (8, OutputDtype.BINARY, 1, 1),
        (9, OutputDtype.BINARY, 2, 2),
        (3, OutputDtype.FLOAT32, 3, 12),
    ],
)
def test_row_has_as_many_values_and_bytes_as_its_dtype_says(
    dims: int, dtype: OutputDtype, width: int, nbytes: int
) -> None:
    assert (row_width(dims, dtype), row_bytes(dims, dtype)) == (width, nbytes)


@given(dims=st.integers(1, 300), ubinary=st.sampled_from([OutputDtype.BINARY, OutputDtype.UBINARY]))
def test_row_of_bits_is_as_wide_as_packbits_makes_it(dims: int, ubinary: OutputDtype) -> None:
    assert row_width(dims, ubinary) == len(np.packbits(np.ones(dims, np.uint8)))


@given(parts=parts_of_a_batch)
def test_no_two_things_share_a_byte_and_none_is_past_the_end(parts: list[Part]) -> None:
    layout = lay_out_parts(parts)
    owners = np.zeros(layout.total_bytes, np.int64)
    table = layout.table
    for row in range(len(table)):
        dtype = OutputDtype(table.dtype[row])
        owners[table.byte_offset[row] : table.byte_offset[row] + row_bytes(int(table.dims[row]), dtype)] += 1
        if table.scale_offset[row] >= 0:
            owners[table.scale_offset[row] : table.scale_offset[row] + 4] += 1
        owners[table.status_offset[row]] += 1
    assert owners.max() == 1
    announced = sum(
        rows * (row_bytes(dims, dtype) + (4 if dtype is OutputDtype.INT8 else 0) + 1) for rows, dims, dtype, _ in parts
    )
    assert owners.sum() == announced  # nothing was written past the end, where a slice would have cut it off


@given(parts=parts_of_a_batch)
def test_parts_follow_each_other_aligned_and_with_little_between(parts: list[Part]) -> None:
    layout = lay_out_parts(parts)
    assert layout.part_offset == [0, *layout.part_end[:-1]]
    assert all(offset % PART_ALIGNMENT == 0 for offset in [*layout.part_offset, *layout.part_end])
    for (rows, dims, dtype, _), offset, scale_offset, end in zip(
        parts, layout.part_offset, layout.part_scale_offset, layout.part_end, strict=True
    ):
        rows_end = offset + rows * row_bytes(dims, dtype)
        if dtype is OutputDtype.INT8:
            assert scale_offset % PART_ALIGNMENT == 0
            assert 0 <= scale_offset - rows_end < PART_ALIGNMENT
            rows_end = scale_offset + 4 * rows
        else:
            assert scale_offset == -1
        assert 0 <= end - rows_end < PART_ALIGNMENT


@given(parts=parts_of_a_batch)
def test_status_bytes_are_the_last_and_one_a_row(parts: list[Part]) -> None:
    layout = lay_out_parts(parts)
    rows = sum(rows for rows, *_ in parts)
    assert layout.status_offset == layout.part_end[-1]
    assert layout.total_bytes == layout.status_offset + rows
    assert layout.table.status_offset.tolist() == list(range(layout.status_offset, layout.total_bytes))


@given(parts=parts_of_a_batch)
def test_rows_of_a_part_are_end_to_end_and_carry_its_spec(parts: list[Part]) -> None:
    layout = lay_out_parts(parts)
    table = layout.table
    assert len(table) == sum(rows for rows, *_ in parts)
    row = 0
    for index, (rows, dims, dtype, normalize) in enumerate(parts):
        for row_in_part in range(rows):
            assert table.byte_offset[row] == layout.part_offset[index] + row_in_part * row_bytes(dims, dtype)
            scale = layout.part_scale_offset[index] + 4 * row_in_part if dtype is OutputDtype.INT8 else -1
            assert table.scale_offset[row] == scale
            assert (table.dims[row], table.dtype[row], table.normalize[row]) == (dims, dtype, normalize)
            row += 1


@given(parts=parts_of_a_batch)
def test_every_row_of_a_part_can_be_viewed_as_its_dtype(parts: list[Part]) -> None:
    layout = lay_out_parts(parts)
    buffer = np.zeros(layout.total_bytes, np.uint8)
    for (rows, dims, dtype, _), offset in zip(parts, layout.part_offset, strict=True):
        values = buffer[offset : offset + rows * row_bytes(dims, dtype)].view(NUMPY_DTYPES[dtype])
        assert values.reshape(rows, -1).shape == (rows, row_width(dims, dtype))
        assert offset % values.itemsize == 0


@given(parts=parts_of_a_batch, seed=st.integers(0, 2**32))
def test_rows_taken_in_another_order_are_the_same_rows(parts: list[Part], seed: int) -> None:
    table = lay_out_parts(parts).table
    order = np.random.default_rng(seed).permutation(len(table))
    taken = table.take(order)
    assert isinstance(taken, RowTable)
    for name in RowTable.__dataclass_fields__:
        before, after = getattr(table, name), getattr(taken, name)
        assert after.dtype == before.dtype
        np.testing.assert_array_equal(after, before[order])


def test_table_has_the_types_that_kernels_read() -> None:
    table = lay_out([2], [8], [OutputDtype.INT8], [True]).table
    offsets = (table.byte_offset, table.scale_offset, table.status_offset)
    assert {array.dtype for array in offsets} == {np.dtype(np.int64)}
    assert (table.dims.dtype, table.dtype.dtype, table.normalize.dtype) == (np.int32, np.uint8, bool)


def test_parts_of_unequal_number_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        lay_out([1, 1], [8], [OutputDtype.FLOAT32], [True])
