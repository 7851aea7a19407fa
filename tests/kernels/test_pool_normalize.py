"""pool_normalize against numpy in float64, one row at a time, over ragged batches and mixed output specs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embedserve_kernels.output_layout import NUMPY_DTYPES, OutputDtype, OutputLayout, lay_out, row_bytes
from embedserve_kernels.pool_normalize import pool_normalize

HIDDEN = 40
POISON = 0xA5
POOLINGS = ["mean", "cls", "lasttoken"]

part_specs = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, HIDDEN), st.sampled_from(OutputDtype), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(parts=part_specs, pooling=st.sampled_from(POOLINGS), seed=st.integers(0, 2**32 - 1), shuffled=st.booleans())
def test_every_row_is_where_its_table_says_and_no_other_byte_is_touched(parts, pooling, seed, shuffled):
    random = np.random.default_rng(seed)
    layout = lay_out(*map(list, zip(*parts, strict=True)))
    order = random.permutation(len(layout.table)) if shuffled else np.arange(len(layout.table))
    lengths = random.integers(1, 9, len(order))
    hidden = random.standard_normal((lengths.sum(), HIDDEN), dtype=np.float32)

    out, written = run(hidden, lengths, pooling, layout, order)

    pooled = np.stack([pool_one(tokens, pooling) for tokens in np.split(hidden, np.cumsum(lengths)[:-1])])
    in_place = np.empty_like(pooled)
    in_place[order] = pooled
    must_be_written = np.zeros(layout.total_bytes, dtype=bool)
    for i, values in enumerate(in_place):
        check_row(out, layout, i, values, must_be_written)
    np.testing.assert_array_equal(written, must_be_written)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pooled_rows_have_norm_one_in_float32(pooling, dtype):
    lengths = np.arange(1, 60)
    hidden = torch.randn(lengths.sum(), 384, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    layout = lay_out([len(lengths)], [384], [OutputDtype.FLOAT32], [True])
    out, _ = run(hidden.float().numpy(), lengths, pooling, layout)
    rows = out[: len(lengths) * 384 * 4].view("<f4").reshape(-1, 384)
    np.testing.assert_allclose(np.linalg.norm(rows.astype(np.float64), axis=1), 1, rtol=0, atol=1e-6)


def test_mean_of_bfloat16_tokens_is_summed_in_float32():
    hidden = torch.full((1000, 8), 1.0078125, dtype=torch.bfloat16)  # a running sum in bfloat16 would stop at 256
    layout = lay_out([1], [8], [OutputDtype.FLOAT32], [False])
    out = torch.empty(layout.total_bytes, dtype=torch.uint8)
    pool_normalize(hidden, torch.tensor([0, 1000]), "mean", layout.table, out)
    np.testing.assert_allclose(out.numpy()[:32].view("<f4"), 1.0078125, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", OutputDtype)
def test_row_with_nan_or_infinity_has_status_one_and_its_neighbours_zero(bad, normalize, dtype):
    hidden = np.ones((5, HIDDEN), dtype=np.float32)
    hidden[3, 7] = bad
    layout = lay_out([3], [HIDDEN], [dtype], [normalize])
    out, _ = run(hidden, np.array([2, 2, 1]), "mean", layout)
    assert out[layout.table.status_offset].tolist() == [0, 1, 0]


def test_infinity_beyond_the_cut_dimensions_does_not_fail_the_row():
    hidden = np.ones((1, HIDDEN), dtype=np.float32)
    hidden[0, 9] = np.inf
    layout = lay_out([1], [8], [OutputDtype.FLOAT32], [True])
    out, _ = run(hidden, np.array([1]), "cls", layout)
    assert out[layout.table.status_offset].tolist() == [0]


def test_norm_that_overflows_float32_has_status_one():
    hidden = np.full((1, HIDDEN), 1e30, dtype=np.float32)
    layout = lay_out([1], [HIDDEN], [OutputDtype.FLOAT32], [True])
    out, _ = run(hidden, np.array([1]), "cls", layout)
    assert out[layout.table.status_offset].tolist() == [1]


def test_float16_overflow_has_status_one():
    hidden = np.full((2, HIDDEN), 1.0, dtype=np.float32)
    hidden[1] = 70000.0
    layout = lay_out([2], [HIDDEN], [OutputDtype.FLOAT16], [False])
    out, _ = run(hidden, np.array([1, 1]), "cls", layout)
    assert out[layout.table.status_offset].tolist() == [0, 1]


def test_int8_of_a_zero_row_is_zeros_with_scale_zero():
    layout = lay_out([1], [HIDDEN], [OutputDtype.INT8], [True])
    out, _ = run(np.zeros((3, HIDDEN), dtype=np.float32), np.array([3]), "mean", layout)
    scale_at = int(layout.table.scale_offset[0])
    assert not out[:HIDDEN].any()
    assert out[scale_at : scale_at + 4].view("<f4")[0] == 0
    assert out[layout.table.status_offset].tolist() == [0]


def test_int8_rounds_half_to_even_and_keeps_the_sign():
    row = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127], dtype=np.float32)  # scale is exactly 1
    layout = lay_out([1], [8], [OutputDtype.INT8], [False])
    out, _ = run(row[None], np.array([1]), "cls", layout)
    assert out[:8].view(np.int8).tolist() == [127, 0, 2, 2, 0, -2, -2, -127]


def test_int8_of_the_smallest_floats_stays_within_127():
    layout = lay_out([1], [8], [OutputDtype.INT8], [False])
    out, _ = run(np.full((1, 8), 3e-43, dtype=np.float32), np.array([1]), "cls", layout)
    assert (np.abs(out[:8].view(np.int8).astype(int)) <= 127).all()
    assert (out[:8].view(np.int8) > 0).all()


def run(
    hidden: np.ndarray, lengths: np.ndarray, pooling: str, layout: OutputLayout, order: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """-> the bytes, and which of them were written: two runs over different poison agree only there."""
    table = layout.table if order is None else layout.table.take(order)
    cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    outs = []
    for poison in (POISON, POISON ^ 0xFF):
        out = torch.full((layout.total_bytes,), poison, dtype=torch.uint8)
        pool_normalize(torch.from_numpy(hidden), cu_seqlens, pooling, table, out)
        outs.append(out.numpy())
    return outs[0], outs[0] == outs[1]


def pool_one(tokens: np.ndarray, pooling: str) -> np.ndarray:
    tokens = tokens.astype(np.float64)
    return {"mean": tokens.mean(axis=0), "cls": tokens[0], "lasttoken": tokens[-1]}[pooling]


def check_row(out: np.ndarray, layout: OutputLayout, i: int, pooled: np.ndarray, must_be_written: np.ndarray) -> None:
    table = layout.table
    dtype, dims = OutputDtype(int(table.dtype[i])), int(table.dims[i])
    values = pooled[:dims]
    if table.normalize[i]:
        values = values / np.linalg.norm(values)
    start = int(table.byte_offset[i])
    end = start + row_bytes(dims, dtype)
    row = out[start:end].view(NUMPY_DTYPES[dtype])
    must_be_written[start:end] = True
    assert out[table.status_offset[i]] == 0
    must_be_written[table.status_offset[i]] = True
    if dtype in (OutputDtype.FLOAT32, OutputDtype.FLOAT16):
        tolerance = 1e-5 if dtype == OutputDtype.FLOAT32 else 2e-3
        np.testing.assert_allclose(row, values, rtol=tolerance, atol=tolerance)
    elif dtype == OutputDtype.INT8:
        scale_at = int(table.scale_offset[i])
        must_be_written[scale_at : scale_at + 4] = True
        scale = out[scale_at : scale_at + 4].view("<f4")[0]
        np.testing.assert_allclose(scale, np.abs(values).max() / 127, rtol=1e-5)
        np.testing.assert_allclose(row * scale, values, rtol=0, atol=scale * 0.501)
    else:
        # a sum that rounds to the other side of zero may differ from float64's sign
        certain = np.abs(values) > 1e-6
        bits = np.unpackbits(row.astype(np.int16).astype(np.uint8) ^ (0x80 if dtype == OutputDtype.BINARY else 0))
        np.testing.assert_array_equal(bits[:dims][certain], (values > 0)[certain])
        assert not bits[dims:].any()
