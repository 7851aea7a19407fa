"""Messages there and back, and what their decoder makes of bytes that none of our processes would send.

Knows no sockets. msgspec alone writes the malformed headers, so that no code of ours vouches for itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from embedserve.messages import (
    TOKEN_DTYPE,
    Alive,
    Control,
    Drain,
    EngineAddress,
    EngineLost,
    Failed,
    FrontendLost,
    Lane,
    MalformedMessage,
    Ready,
    Refusal,
    ReplyHeader,
    ReplyPart,
    RequestHeader,
    RequestItem,
    Serving,
    UseEngine,
    decode_control,
    decode_reply,
    decode_requests,
    encode_control,
    encode_reply,
    encode_requests,
)
from embedserve.model.card import ModelCard
from embedserve_kernels.output_layout import OutputDtype

seconds = st.floats(0, 1e9)
milliseconds = st.floats(0, 1e6)
names = st.text(max_size=20)
ids = st.integers(0, 2**62)


def item_of(lengths: Sequence[int], **changes: Any) -> RequestItem:
    item = RequestItem(7, Lane.BULK, len(lengths), sum(lengths), 384, OutputDtype.FLOAT32, True, 1.5)
    return msgspec.structs.replace(item, **changes)


def header_of(*items: RequestItem, cancels: Sequence[int] = ()) -> RequestHeader:
    return RequestHeader("frontend.0.1", 3, 4096, list(items), list(cancels))


def frames_of(header: object, lengths: Sequence[int], token_ids: Sequence[int] | None = None) -> list[bytes]:
    ids = range(sum(lengths)) if token_ids is None else token_ids
    return [msgspec.msgpack.encode(header), np.array(lengths, "<i4").tobytes(), np.array(ids, "<i4").tobytes()]


@st.composite
def flushes(draw: st.DrawFn) -> tuple[RequestHeader, list[np.ndarray], list[np.ndarray]]:
    """A header, and the lengths and token ids of each of its requests."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), max_size=5))
    items = [
        RequestItem(
            id=draw(ids),
            lane=draw(st.sampled_from(Lane)),
            rows=len(own),
            tokens=sum(own),
            dims=draw(st.integers(1, 4096)),
            dtype=draw(st.sampled_from(OutputDtype)),
            normalize=draw(st.booleans()),
            enqueued_at=draw(seconds),
        )
        for own in lengths
    ]
    header = RequestHeader(draw(names), draw(ids), draw(ids), items, draw(st.lists(ids, max_size=5)))
    token_ids = [random.integers(0, 2**31, sum(own)).astype(TOKEN_DTYPE) for own in lengths]
    return header, [np.array(own, TOKEN_DTYPE) for own in lengths], token_ids


reply_headers = st.builds(
    ReplyHeader,
    incarnation=ids,
    sent_at=seconds,
    forward_ms=milliseconds,
    pack_ms=milliseconds,
    parts=st.lists(
        st.builds(
            ReplyPart,
            id=ids,
            first_row=ids,
            rows=ids,
            offset=ids,
            scale_offset=st.integers(-1, 2**40),
            queue_ms=milliseconds,
            nonfinite_rows=st.lists(ids, max_size=3),
        ),
        max_size=4,
    ),
    refusals=st.lists(st.builds(Refusal, id=ids, message=st.text(max_size=40), overloaded=st.booleans()), max_size=4),
)


# Requests


@given(flush=flushes())
def test_flush_comes_back_as_it_was_sent(flush: tuple[RequestHeader, list[np.ndarray], list[np.ndarray]]) -> None:
    header, lengths, token_ids = flush
    decoded, all_lengths, all_token_ids = decode_requests([bytes(frame) for frame in encode_requests(*swap(flush))])
    assert decoded == header
    empty = np.empty(0, TOKEN_DTYPE)
    np.testing.assert_array_equal(all_lengths, np.concatenate([empty, *lengths]))
    np.testing.assert_array_equal(all_token_ids, np.concatenate([empty, *token_ids]))
    assert all_lengths.dtype == all_token_ids.dtype == np.dtype("<i4")


def swap(flush: tuple[RequestHeader, list[np.ndarray], list[np.ndarray]]) -> tuple[Any, Any, Any]:
    header, lengths, token_ids = flush
    return header, token_ids, lengths


def test_flush_of_cancels_alone_has_empty_arrays() -> None:
    header, lengths, token_ids = decode_requests(encode_requests(header_of(cancels=[1, 2]), [], []))
    assert (header.cancels, len(lengths), len(token_ids)) == ([1, 2], 0, 0)


def test_arrays_of_other_integer_types_are_sent_as_int32() -> None:
    frames = encode_requests(header_of(item_of([2, 1])), [np.array([9, 8, 7])], [np.array([2, 1], np.uint8)])
    _, lengths, token_ids = decode_requests(frames)
    assert (lengths.tolist(), token_ids.tolist()) == ([2, 1], [9, 8, 7])


def test_arrays_with_gaps_are_sent_end_to_end() -> None:
    strided = np.arange(10, dtype=TOKEN_DTYPE)[::2]
    _, _, token_ids = decode_requests(encode_requests(header_of(item_of([5])), [strided], [np.array([5])]))
    assert token_ids.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda raw: zmq.Frame(raw).buffer])
def test_decoded_arrays_are_views_of_the_frames(wrap: Callable[[bytes], Any]) -> None:
    frames = [wrap(frame) for frame in frames_of(header_of(item_of([2, 3])), [2, 3])]
    _, lengths, token_ids = decode_requests(frames)
    assert np.shares_memory(lengths, np.frombuffer(frames[1], np.uint8))
    assert np.shares_memory(token_ids, np.frombuffer(frames[2], np.uint8))


def test_array_of_a_request_alone_in_its_flush_is_not_copied_to_be_sent() -> None:
    token_ids, lengths = np.arange(5, dtype=TOKEN_DTYPE), np.array([5], TOKEN_DTYPE)
    frames = encode_requests(header_of(item_of([5])), [token_ids], [lengths])
    assert frames[1] is lengths
    assert frames[2] is token_ids


# Requests that none of our processes would send


def assert_malformed(frames: Sequence[Any]) -> None:
    with pytest.raises(MalformedMessage) as raised:
        decode_requests(frames)
    assert str(raised.value)


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5])
def test_wrong_number_of_frames_is_malformed(count: int) -> None:
    frames = [*frames_of(header_of(item_of([1])), [1]), b"", b""]
    assert_malformed(frames[:count])


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("extra", [1, 2, 3])
def test_array_that_is_not_whole_integers_is_malformed(index: int, extra: int) -> None:
    frames = frames_of(header_of(item_of([1])), [1])
    frames[index] += b"\0" * extra
    assert_malformed(frames)


@pytest.mark.parametrize("lengths", [[-1, 4], [4, -1], [0, 3], [3, 0], [-(2**31), 3]])
def test_length_below_one_is_malformed_though_the_sum_is_right(lengths: list[int]) -> None:
    total = sum(lengths)
    assert_malformed(frames_of(header_of(item_of(lengths, tokens=total)), lengths, range(max(0, total))))


@pytest.mark.parametrize("rows", [0, -1, 1, 3, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_rows_that_did_not_come_are_malformed(rows: int) -> None:
    assert_malformed(frames_of(header_of(item_of([2, 3], rows=rows)), [2, 3]))


@pytest.mark.parametrize("tokens", [0, -1, 4, 6, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_tokens_that_did_not_come_are_malformed(tokens: int) -> None:
    assert_malformed(frames_of(header_of(item_of([2, 3], tokens=tokens)), [2, 3]))


@pytest.mark.parametrize("rows", [[2**63 - 1, 2**63 - 1, 4], [2**62, 2**62, 2**62, 2**62 + 2], [2**63, 2**63, 2]])
def test_rows_whose_sum_wraps_around_are_malformed(rows: list[int]) -> None:
    """Each sum is 2 modulo 2**64; two rows of one token each have come."""
    items = [item_of([1], rows=count, tokens=int(index < 2)) for index, count in enumerate(rows)]
    assert_malformed(frames_of(header_of(*items), [1, 1]))


@pytest.mark.parametrize("tokens", [[3, 2], [6, -1], [-1, 6], [0, 5], [2**63 + 2, -(2**63) + 3], [2**64 - 1, 6]])
def test_tokens_of_one_request_counted_to_another_are_malformed(tokens: list[int]) -> None:
    items = [item_of([1], tokens=count) for count in tokens]
    assert_malformed(frames_of(header_of(*items), [2, 3]))


@pytest.mark.parametrize("arrays", [([1], None), ([], [1]), ([1], [])])
def test_arrays_without_their_request_or_each_other_are_malformed(arrays: tuple[list[int], list[int] | None]) -> None:
    assert_malformed(frames_of(header_of(), *arrays))


@pytest.mark.parametrize("items", [[item_of([1])], [item_of([1]), item_of([1])]])
def test_request_without_its_arrays_is_malformed(items: list[RequestItem]) -> None:
    assert_malformed(frames_of(header_of(*items), []))


@pytest.mark.parametrize(
    "header",
    [
        None,
        [],
        {},
        "frontend",
        ["frontend"],
        ["frontend", 1],
        [7, 1, 0, [], []],
        ["frontend", "1", 0, [], []],
        ["frontend", 1, 0.5, [], []],
        ["frontend", 1, 0, [1], []],
        ["frontend", 1, 0, [[1]], []],
        ["frontend", 1, 0, {}, []],
        ["frontend", 1, 0, [], ["1"]],
        ["frontend", 1, 0, [], None],
        ["frontend", 1, 0, [[7, 9, 1, 1, 8, 1, True, 0.0]], []],  # there is no lane 9
        ["frontend", 1, 0, [[7, 1, 1, 1, 8, 9, True, 0.0]], []],  # there is no dtype 9
        ["frontend", 1, 0, [[7, 1, 1, 1, 8, 1, 1, 0.0]], []],  # normalize is no integer
    ],
)
def test_header_of_another_shape_is_malformed(header: object) -> None:
    assert_malformed(frames_of(header, [1]))


@pytest.mark.parametrize("announced", [b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdb\xff\xff\xff\xff"])
def test_header_that_announces_more_than_came_is_malformed(announced: bytes) -> None:
    assert_malformed([b"\x95\xa1f\x01\x00" + announced, b"", b""])


def test_header_nested_without_end_is_malformed() -> None:
    assert_malformed([b"\x96\xa1f\x01\x00\x90\x90" + b"\x91" * 100_000 + b"\xc0", b"", b""])


def check_consistent(frames: Sequence[bytes]) -> None:
    """Whatever the decoder lets through can be sliced by; the rest is MalformedMessage and no other error."""
    try:
        header, lengths, token_ids = decode_requests(frames)
    except MalformedMessage:
        return
    row = token = 0
    for item in header.requests:
        own = lengths[row : row + item.rows]
        assert len(own) == item.rows >= 1
        assert own.min() >= 1
        assert int(own.sum()) == item.tokens
        row, token = row + item.rows, token + item.tokens
    assert (row, token) == (len(lengths), len(token_ids))


def mutations(message: bytes) -> st.SearchStrategy[bytes]:
    cuts = st.integers(0, len(message))

    def overwrite(at: int, byte: int) -> bytes:
        return message[:at] + bytes([byte]) + message[at + 1 :]

    return st.one_of(
        st.just(message),
        st.builds(overwrite, cuts, st.integers(0, 255)),
        st.builds(lambda at: message[:at], cuts),
        st.builds(lambda at, more: message[:at] + more + message[at:], cuts, st.binary(max_size=8)),
        st.builds(lambda first, end: message[:first] + message[end:], cuts, cuts),
    )


@given(frames=st.lists(st.binary(max_size=60), max_size=4))
def test_random_bytes_are_malformed_or_consistent(frames: list[bytes]) -> None:
    check_consistent(frames)
    for frame in frames:
        check_reply(frame)


@given(data=st.data(), flush=flushes())
@settings(max_examples=300)
def test_mutated_flush_is_malformed_or_consistent(data: st.DataObject, flush: tuple[Any, Any, Any]) -> None:
    frames = [data.draw(mutations(bytes(frame))) for frame in encode_requests(*swap(flush))]
    check_consistent(data.draw(st.one_of(st.just(frames), st.permutations(frames))))


# Replies


@given(header=reply_headers)
def test_reply_header_comes_back_as_it_was_sent(header: ReplyHeader) -> None:
    assert decode_reply(encode_reply(header)) == header


def check_reply(frame: bytes) -> None:
    try:
        header = decode_reply(frame)
    except MalformedMessage:
        return
    assert isinstance(header, ReplyHeader)
    assert all(isinstance(part, ReplyPart) for part in header.parts)


@given(data=st.data(), header=reply_headers)
@settings(max_examples=300)
def test_mutated_reply_header_is_malformed_or_a_header(data: st.DataObject, header: ReplyHeader) -> None:
    check_reply(data.draw(mutations(encode_reply(header))))


@pytest.mark.parametrize("frame", [b"", b"\xc0", b"\x90", b"\x93\xa1f\x01", b"\xff" * 20, b"\x91" * 100_000])
def test_frame_that_is_no_reply_header_is_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_reply(frame)


# The control channel

cards = st.builds(
    ModelCard,
    **dict.fromkeys(
        ["name", "tokenizer_file", "architecture", "pooling", "dtype", "device", "space_id", "numerics_id"], names
    ),
    **dict.fromkeys(["dims", "max_input_tokens", "vocab_size"], st.integers(1, 2**31)),
    normalized=st.booleans(),
    prompts=st.dictionaries(names, names, max_size=3),
    default_prompt_name=st.none() | names,
    matryoshka_dims=st.lists(st.integers(1, 4096), max_size=3).map(tuple),
)
engines = st.builds(
    EngineAddress,
    incarnation=st.integers(1, 1000),
    requests=names,
    replies=names,
    card=cards,
    tokens_per_s=st.floats(0, 1e9),
)
controls: st.SearchStrategy[Control] = st.one_of(
    st.builds(Ready, engines),
    st.builds(Alive, seconds),
    st.just(Serving()),
    st.builds(Failed, st.text()),
    st.builds(UseEngine, engines),
    st.builds(EngineLost, st.integers(1, 1000)),
    st.builds(FrontendLost, names),
    st.just(Drain()),
)


@given(message=controls)
def test_control_message_comes_back_as_it_was_sent(message: Control) -> None:
    decoded = decode_control(encode_control(message))
    assert type(decoded) is type(message)
    assert decoded == message


@given(messages=st.lists(controls, max_size=4))
def test_control_messages_are_one_line_each(messages: list[Control]) -> None:
    lines = b"".join(map(encode_control, messages)).split(b"\n")
    assert lines.pop() == b""
    assert [decode_control(line) for line in lines] == messages


def test_times_of_a_message_are_kept_to_the_last_bit() -> None:
    header = ReplyHeader(1, sent_at=math.nextafter(1e6, 2e6), forward_ms=0.1 + 0.2)
    assert decode_reply(encode_reply(header)) == header
