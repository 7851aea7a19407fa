"""varlen_attention, each body of it, against torch's own attention in float64, one sequence at a time."""

import threading
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from embedserve_kernels.cpp_library import cpp_library
from embedserve_kernels.long_attention import PIECE_KEYS, PIECE_QUERIES
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


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1), (16, 8)])
@pytest.mark.parametrize("lengths", [[1], [5] * 4, [600], EDGES], ids=str)
def test_keys_are_shared_and_later_tokens_unseen(lengths, heads, kv_heads, causal, dtype):
    for attend in (varlen_attention, varlen_attention_reference):
        check(attend, lengths, heads, 16, dtype, seed=10, kv_heads=kv_heads, causal=causal)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[2, PIECE_QUERIES, PIECE_QUERIES + 1], [2500] * 2, [PIECE_KEYS + 1030]], ids=str)
def test_long_sequences_in_pieces_are_as_in_one(lengths, causal, dtype):
    pieces = []
    attend = partial(varlen_attention_reference, between=lambda: pieces.append(None))
    check(attend, lengths, 4, 32, dtype, seed=11, kv_heads=2, causal=causal)
    long = [length for length in lengths if length > PIECE_QUERIES]
    assert len(pieces) >= 2 * 2 * len(long)  # of both key heads, at least two of queries


@pytest.mark.parametrize("body", BODIES)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=10),
    kv_heads=st.integers(1, 3),
    sharing=st.integers(1, 4),
    head_dim=st.sampled_from([8, 24, 32, 128]),
    causal=st.booleans(),
    dtype=st.sampled_from(CPP_DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_cpp_body_shares_keys_and_sees_no_later_token(body, lengths, kv_heads, sharing, head_dim, causal, dtype, seed):
    check(in_cpp(body), lengths, kv_heads * sharing, head_dim, dtype, seed, kv_heads=kv_heads, causal=causal)


@pytest.mark.parametrize("dtype", CPP_DTYPES, ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_cpp_body_is_causal_at_the_edges(body, dtype):
    check(in_cpp(body), [*EDGES, 511, 512, 513], 4, 32, dtype, seed=11, kv_heads=2, causal=True)
    for length in EDGES:
        check(in_cpp(body), [length], 2, 32, dtype, seed=length, kv_heads=1, causal=True)


@pytest.mark.parametrize("attend", [varlen_attention_reference, *BODIES], ids=str)
def test_a_later_token_changes_nothing_before_it(attend):
    attend = attend if callable(attend) else in_cpp(attend)
    lengths = [20, 20, 40]  # two of one length: a batch of equals must stay causal
    qkv, groups = random_qkv(lengths, 4, 32, torch.float32, seed=12, kv_heads=2)
    before = attend(qkv, 4, groups, kv_heads=2, causal=True)
    qkv[[19, 39, 79]] = 1e4
    after = attend(qkv, 4, groups, kv_heads=2, causal=True)
    changed = (after != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [19, 39, 79]


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
    return lambda qkv, heads, groups, **kind: varlen_attention_cpp(qkv, heads, groups, body, **kind)


def random_qkv(lengths, heads, head_dim, dtype, seed, kv_heads=None):
    lengths = sorted(lengths)
    width = (heads + 2 * (kv_heads or heads)) * head_dim
    qkv = torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return qkv, group_equal_lengths(np.array(lengths))


def check(
    attend,
    lengths: list[int],
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    seed: int,
    kv_heads: int | None = None,
    causal: bool = False,
) -> None:
    """Three tokens that belong to no sequence lie behind the others."""
    qkv, groups = random_qkv(lengths, heads, head_dim, dtype, seed, kv_heads)
    tail = torch.full((3, qkv.shape[1]), torch.nan, dtype=dtype)
    attended = attend(torch.cat([qkv, tail]), heads, groups, kv_heads=kv_heads, causal=causal)
    assert attended.dtype == dtype
    assert (attended[len(qkv) :] == 0).all()
    sequences = qkv.double().split(sorted(lengths))
    expected = torch.cat([attend_one(tokens, heads, kv_heads or heads, causal) for tokens in sequences])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(attended[: len(qkv)].double(), expected, rtol=tolerance, atol=tolerance)


def attend_one(qkv: torch.Tensor, heads: int, kv_heads: int, causal: bool) -> torch.Tensor:
    """[length, (heads + 2 * kv_heads) * head_dim] -> [length, heads * head_dim]"""
    q, k, v = qkv.view(len(qkv), heads + 2 * kv_heads, -1).transpose(0, 1).split([heads, kv_heads, kv_heads])
    shared = [head * kv_heads // heads for head in range(heads)]
    scores = q @ k[shared].transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    return (F.softmax(scores, dim=-1) @ v[shared]).transpose(0, 1).reshape(len(qkv), -1)
