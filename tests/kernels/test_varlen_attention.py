"""varlen_attention, each body of it, against torch's own attention in float64, one sequence at a time."""

import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from embedserve_kernels.cpp_library import cpp_library
from embedserve_kernels.varlen_attention import (
    CPP_BODIES,
    attention_kernels,
    group_equal_lengths,
    varlen_attention,
    varlen_attention_cpp,
    varlen_attention_reference,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
CPP_DTYPES = [torch.float32, torch.bfloat16]
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65]


def runs(body: str) -> bool:
    if cpp_library("varlen_attention") is None:
        return False
    try:
        varlen_attention_cpp(torch.zeros(1, 24), 1, group_equal_lengths(np.array([1])), body)
    except NotImplementedError:
        return False
    return True


BODIES = [
    pytest.param(body, marks=pytest.mark.skipif(not runs(body), reason="no compiler, or not on this machine"))
    for body in CPP_BODIES
]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([8, 12, 32]),
    dtype=st.sampled_from(CPP_DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_sequence_attends_within_itself(lengths, heads, head_dim, dtype, seed):
    check(varlen_attention, lengths, heads, head_dim, dtype, seed)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    "lengths",
    [[1], [1, 1, 1], [64] * 5, [256], [1, 2, 3, 5, 8, 13, 256], [15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]],
    ids=str,
)
def test_lengths_at_the_edges(lengths, dtype):
    check(varlen_attention, lengths, 3, 32, dtype, seed=7)
    check(varlen_attention_reference, lengths, 3, 32, dtype, seed=7)


@pytest.mark.parametrize("body", BODIES)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=10),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([8, 16, 24, 32, 64]),
    dtype=st.sampled_from(CPP_DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_cpp_body_attends_within_each_sequence(body, lengths, heads, head_dim, dtype, seed):
    check(in_cpp(body), lengths, heads, head_dim, dtype, seed)


@pytest.mark.parametrize("dtype", CPP_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("body", BODIES)
def test_cpp_body_at_the_edges(body, head_dim, dtype):
    check(in_cpp(body), EDGES, 2, head_dim, dtype, seed=7)
    check(in_cpp(body), [511, 512, 513], 1, head_dim, dtype, seed=8)
    for length in EDGES:
        check(in_cpp(body), [length], 1, head_dim, dtype, seed=length)


@pytest.mark.parametrize("body", BODIES)
def test_cpp_body_takes_the_longest_sequences(body):
    check(in_cpp(body), [2047, 2049], 1, 8, torch.float32, seed=9)


@pytest.mark.parametrize("dtype", CPP_DTYPES, ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_cpp_body_rounds_as_torch_does(body, dtype):
    # so bfloat16 results differ by one step at most, and rarely
    qkv, groups = random_qkv(EDGES, 4, 32, dtype, seed=1)
    ours, reference = varlen_attention_cpp(qkv, 4, groups, body), varlen_attention_reference(qkv, 4, groups)
    assert torch.isclose(ours, reference, rtol=1e-5, atol=1e-6).double().mean() > 0.98
    torch.testing.assert_close(ours, reference, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", CPP_DTYPES, ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_cpp_body_writes_every_row_and_zeros_the_tail(body, dtype, monkeypatch):
    poisoned = torch.full((3 + 20 + 5 + 1, 2 * 40), torch.nan, dtype=dtype)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size: poisoned[: size[0]])
    qkv, groups = random_qkv([3, 20], 2, 40, dtype, seed=2)
    qkv = torch.cat([qkv, torch.full((5, 240), torch.nan, dtype=dtype)])
    out = varlen_attention_cpp(qkv, 2, groups, body)
    assert out.data_ptr() == poisoned.data_ptr()
    assert out[:23].isfinite().all()
    assert (out[23:] == 0).all()
    assert poisoned[28:].isnan().all()  # nothing behind it was touched


@pytest.mark.parametrize("part", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("payload", [0x7FC00001, 0x7FFFFFFF, -1, 0x7F810001], ids=hex)
@pytest.mark.parametrize("dtype", CPP_DTYPES, ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_a_nan_stays_in_its_sequence_and_shows_there(body, dtype, payload, part):
    lengths = [2, 5, 17, 17, 40]
    qkv, groups = random_qkv(lengths, 2, 32, dtype, seed=3)
    clean = varlen_attention_cpp(qkv, 2, groups, body)
    nan = torch.tensor(payload, dtype=torch.int32).view(torch.float32)
    if dtype == torch.bfloat16:
        nan = torch.tensor(payload >> 16, dtype=torch.int16).view(torch.bfloat16)
    row = 2 + 5 + 16  # the last of the first sequence of 17
    qkv[row, part * 64 + 5] = nan
    out = varlen_attention_cpp(qkv, 2, groups, body)
    expected = clean.clone()
    if part == 0:
        expected[row, :32] = torch.nan
    elif part == 1:
        expected[7:24, :32] = torch.nan
    else:
        expected[7:24, 5] = torch.nan
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", CPP_DTYPES, ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_scores_of_any_size(body, dtype):
    for factor in (1e2, 1e4, 1e9, 1e15):
        qkv, groups = random_qkv([1, 7, 40], 2, 32, dtype, seed=4)
        qkv[:, :128] *= factor  # the largest score takes everything
        out, reference = varlen_attention_cpp(qkv, 2, groups, body), varlen_attention_reference(qkv, 2, groups)
        assert out.isfinite().all()
        torch.testing.assert_close(out, reference, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("body", BODIES)
def test_a_score_of_minus_infinity_weighs_nothing(body):
    qkv, groups = random_qkv([20], 1, 8, torch.float32, seed=5)
    qkv[:, 0] = 1.0
    qkv[[0, 7, 19], 8] = -torch.inf
    seen = [row for row in range(20) if row not in (0, 7, 19)]
    out = varlen_attention_cpp(qkv, 1, groups, body)
    q, k, v = qkv[:, :8], qkv[seen, 8:16], qkv[seen, 16:]
    torch.testing.assert_close(out, F.softmax(q @ k.T / 8**0.5, dim=-1) @ v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("body", BODIES)
def test_weights_are_exact_to_a_millionth(body):
    # two keys: the first token's output is the second's weight, e**-x / (1 + e**-x)
    scores = torch.linspace(0, 80, 4001)
    qkv = torch.zeros(2 * len(scores), 24)
    qkv[0::2, 0] = 8**0.5
    qkv[1::2, 8] = -scores
    qkv[1::2, 16] = 1.0
    weights = varlen_attention_cpp(qkv, 1, group_equal_lengths(np.full(len(scores), 2)), body)[0::2, 0]
    expected = torch.sigmoid(-scores.double())
    assert ((weights.double() - expected).abs() / expected).max() < 1e-6 + 80 * 2**-23  # the score's own rounding
    near = scores < 4
    assert ((weights.double() - expected).abs() / expected)[near].max() < 1e-6


def test_two_threads_at_once():
    work = [random_qkv(lengths, 4, 32, torch.float32, seed=6) for lengths in ([3, 9, 40] * 5, [300], [1] * 50)]
    expected = [varlen_attention_reference(qkv, 4, groups) for qkv, groups in work]
    failures = []

    def attend_often() -> None:
        torch.set_num_threads(1)
        for _ in range(50):
            for (qkv, groups), reference in zip(work, expected, strict=True):
                if not torch.allclose(varlen_attention(qkv, 4, groups), reference, rtol=1e-5, atol=1e-5):
                    failures.append(groups)

    threads = [threading.Thread(target=attend_often) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(not runs("fastest"), reason="no compiler")
def test_cpp_body_is_for_one_thread_and_the_dtypes_it_has():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert attention_kernels(torch.float32, 32) == "torch"
        torch.set_num_threads(1)
        assert attention_kernels(torch.float32, 32) == "cpp"
        assert attention_kernels(torch.float16, 32) == "torch"
        assert attention_kernels(torch.float32, 12) == "torch"
    finally:
        torch.set_num_threads(threads)


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


def in_cpp(body):
    return lambda qkv, heads, groups: varlen_attention_cpp(qkv, heads, groups, body)


def random_qkv(lengths, heads, head_dim, dtype, seed):
    lengths = sorted(lengths)
    qkv = torch.randn(sum(lengths), 3 * heads * head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return qkv, group_equal_lengths(np.array(lengths))


def check(attend, lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype, seed: int) -> None:
    qkv, groups = random_qkv(lengths, heads, head_dim, dtype, seed)
    attended = attend(qkv, heads, groups)
    assert attended.dtype == dtype
    expected = torch.cat([attend_one(tokens, heads) for tokens in qkv.double().split(sorted(lengths))])
    torch.testing.assert_close(attended.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def attend_one(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """[length, 3 * hidden] -> [length, hidden]"""
    q, k, v = qkv.view(len(qkv), 3, heads, -1).permute(1, 2, 0, 3)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return (F.softmax(scores, dim=-1) @ v).transpose(0, 1).reshape(len(qkv), -1)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", [[1], [5] * 4, [1, 2, 16, 17, 63, 65, 65]], ids=str)
def test_causal_attention_sees_no_later_token_and_shares_keys(lengths, heads, kv_heads, dtype):
    head_dim, tail = 16, 3
    generator = torch.Generator().manual_seed(11)
    qkv = torch.randn(sum(lengths) + tail, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
    qkv[sum(lengths) :] = torch.nan
    out = varlen_attention(qkv, heads, group_equal_lengths(np.array(lengths)), kv_heads=kv_heads, causal=True)
    assert (out[sum(lengths) :] == 0).all()
    start = 0
    for length in lengths:
        part = qkv[start : start + length].double().view(length, -1, head_dim)
        q, k, v = part.split([heads, kv_heads, kv_heads], dim=1)
        for head in range(heads):
            shared = head * kv_heads // heads
            scores = q[:, head] @ k[:, shared].T / head_dim**0.5
            later = torch.ones(length, length).triu(1).bool()
            expected = scores.masked_fill(later, -torch.inf).softmax(dim=1) @ v[:, shared]
            actual = out[start : start + length, head * head_dim : (head + 1) * head_dim].double()
            torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        start += length
