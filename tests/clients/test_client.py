"""EmbedClient against a server in this process that answers as it is told and keeps what it was asked.
Knows the protocol, and must not know the real server.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedserve.v1 import embedding_pb2 as pb
from embedserve.v1.embedding_pb2_grpc import EmbeddingServicer, add_EmbeddingServicer_to_server
from embedserve_client import (
    BadRequest,
    EmbedClient,
    EmbedError,
    InputFailure,
    ModelNotFound,
    Overloaded,
    RequestTimeout,
    RequestTooLarge,
    ServerError,
    SpaceMismatch,
    StageTimes,
    Unavailable,
)
from embedserve_client.request import build_request
from embedserve_client.result import read_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Answer = Callable[[pb.EmbedRequest, grpc.ServicerContext], pb.EmbedResponse]


def rows_of(texts: int, dims: int) -> np.ndarray:
    return np.arange(texts * dims, dtype=np.float32).reshape(texts, dims)


def answer_with_rows(request: pb.EmbedRequest, _context: grpc.ServicerContext) -> pb.EmbedResponse:
    count = len(request.texts) or len(request.token_ids)
    return pb.EmbedResponse(vectors=rows_of(count, 4).tobytes(), count=count, dims=4)


def answer_with_status(status: grpc.StatusCode, details: str, *trailing: tuple[str, str]) -> Answer:
    def answer(_request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        context.set_trailing_metadata(trailing)
        context.abort(status, details)

    return answer


class StubServer(EmbeddingServicer):
    """`answer` makes each reply; `requests` keeps what came, in order."""

    def __init__(self) -> None:
        self.answer: Answer = answer_with_rows
        self.requests: list[pb.EmbedRequest] = []
        self.target = ""

    def Embed(self, request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:  # noqa: N802
        self.requests.append(request)
        return self.answer(request, context)


@pytest.fixture
def server() -> Iterator[StubServer]:
    stub = StubServer()
    with ThreadPoolExecutor(4) as pool:
        grpc_server = grpc.server(pool, options=[("grpc.max_receive_message_length", 8 << 20)])
        add_EmbeddingServicer_to_server(stub, grpc_server)
        stub.target = f"127.0.0.1:{grpc_server.add_insecure_port('127.0.0.1:0')}"
        grpc_server.start()
        yield stub
        grpc_server.stop(grace=None).wait()


@pytest.fixture
def client(server: StubServer) -> Iterator[EmbedClient]:
    with EmbedClient(server.target, timeout_s=20) as client:
        yield client


def test_texts_come_back_as_one_row_each_in_order(client: EmbedClient, server: StubServer) -> None:
    vectors = client.embed(["a", "ä", "日本", ""])
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, rows_of(4, 4))
    assert list(server.requests[0].texts) == ["a", "ä", "日本", ""]


def test_vectors_are_a_view_of_the_reply(client: EmbedClient) -> None:
    vectors = client.embed(["a", "b"])
    assert not vectors.flags.owndata
    assert not vectors.flags.writeable
    assert vectors.copy().flags.writeable


def test_token_ids_are_sent_as_they_are(client: EmbedClient, server: StubServer) -> None:
    assert client.embed([[101, 7592, 102], [], [2**32 - 1]]).shape == (3, 4)
    assert [list(one.ids) for one in server.requests[0].token_ids] == [[101, 7592, 102], [], [2**32 - 1]]
    assert not server.requests[0].texts


def test_inputs_may_be_a_generator_or_arrays(client: EmbedClient, server: StubServer) -> None:
    client.embed(text for text in ["a", "b"])  # type: ignore[arg-type]
    client.embed(np.array(["a", "b"]))  # type: ignore[arg-type]
    client.embed(np.array([[1, 2], [3, 4]]))  # type: ignore[arg-type]
    client.embed(ids for ids in [[1, 2], [3, 4]])  # type: ignore[arg-type]
    assert [list(request.texts) for request in server.requests[:2]] == [["a", "b"]] * 2
    assert [[list(one.ids) for one in request.token_ids] for request in server.requests[2:]] == [[[1, 2], [3, 4]]] * 2


def test_options_left_out_leave_the_choice_to_the_server(client: EmbedClient, server: StubServer) -> None:
    client.embed(["a"])
    expected = pb.EmbedRequest(texts=["a"], output_dtype=pb.OUTPUT_DTYPE_FLOAT32, on_error=pb.ON_ERROR_FAIL)
    assert server.requests == [expected]


def test_every_option_reaches_its_field(client: EmbedClient, server: StubServer) -> None:
    client.embed_full(
        ["a"],
        input_type="query",
        prompt_name="p",
        instruction="i",
        dimensions=4,
        dtype="float32",
        normalize=False,
        truncate="left",
        lane="bulk",
        on_error="per_input",
        model="m",
        request_id="r",
        expect_space="s",
    )
    assert server.requests == [
        pb.EmbedRequest(
            texts=["a"],
            input_type=pb.INPUT_TYPE_QUERY,
            prompt_name="p",
            instruction="i",
            dimensions=4,
            output_dtype=pb.OUTPUT_DTYPE_FLOAT32,
            normalize=False,
            truncate=pb.TRUNCATE_LEFT,
            lane=pb.LANE_BULK,
            on_error=pb.ON_ERROR_PER_INPUT,
            model="m",
            request_id="r",
            expect_space="s",
        )
    ]
    assert server.requests[0].HasField("normalize")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_float_replies_keep_their_numpy_dtype(client: EmbedClient, server: StubServer, dtype: type) -> None:
    sent: np.ndarray = np.random.default_rng(0).standard_normal((3, 8)).astype(dtype)
    number = pb.OUTPUT_DTYPE_FLOAT32 if dtype is np.float32 else pb.OUTPUT_DTYPE_FLOAT16
    server.answer = lambda *_: pb.EmbedResponse(vectors=sent.tobytes(), count=3, dims=8, output_dtype=number)
    received = client.embed(["a", "b", "c"])
    assert received.dtype == dtype
    np.testing.assert_array_equal(received, sent)


def test_int8_reply_has_raw_values_and_a_scale_a_row(client: EmbedClient, server: StubServer) -> None:
    vectors = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    scales = np.abs(vectors).max(axis=1) / np.float32(127)
    raw = np.rint(vectors / scales[:, None]).astype(np.int8)
    server.answer = lambda *_: pb.EmbedResponse(
        vectors=raw.tobytes(), scales=scales.tobytes(), count=3, dims=8, output_dtype=pb.OUTPUT_DTYPE_INT8
    )
    result = client.embed_full(["a", "b", "c"], dtype="int8")
    assert server.requests[0].output_dtype == pb.OUTPUT_DTYPE_INT8
    assert result.vectors.dtype == np.int8
    assert result.scales is not None
    np.testing.assert_array_equal(result.vectors, raw)
    np.testing.assert_allclose(result.vectors * result.scales[:, None], vectors, atol=scales.max() / 2 * 1.001)
    np.testing.assert_array_equal(client.embed(["a", "b", "c"], dtype="int8"), raw)


@pytest.mark.parametrize("signed", [False, True], ids=["ubinary", "binary"])
def test_binary_replies_have_eight_dimensions_a_byte(client: EmbedClient, server: StubServer, signed: bool) -> None:
    bits = np.random.default_rng(0).standard_normal((3, 24)) > 0
    packed = np.packbits(bits, axis=1)
    sent: np.ndarray = (packed.astype(np.int16) - 128).astype(np.int8) if signed else packed
    number = pb.OUTPUT_DTYPE_BINARY if signed else pb.OUTPUT_DTYPE_UBINARY
    server.answer = lambda *_: pb.EmbedResponse(vectors=sent.tobytes(), count=3, dims=24, output_dtype=number)
    result = client.embed_full(["a", "b", "c"], dtype="binary" if signed else "ubinary")
    assert result.vectors.dtype == sent.dtype
    assert result.dims == 24
    assert result.scales is None
    np.testing.assert_array_equal(result.vectors, sent)


def test_embed_full_says_all_that_the_reply_says(client: EmbedClient, server: StubServer) -> None:
    server.answer = lambda *_: pb.EmbedResponse(
        vectors=rows_of(2, 4).tobytes(),
        count=2,
        dims=4,
        output_dtype=pb.OUTPUT_DTYPE_FLOAT32,
        token_counts=[5, 0],
        truncated=[0],
        errors=[pb.InputError(index=1, code="context_length_exceeded", message="too long")],
        model="m",
        space_id="s",
        numerics_id="n",
        request_id="r",
        times=pb.StageTimes(tokenize_ms=1, queue_ms=2, forward_ms=3, pack_ms=4, reply_ms=5, total_ms=15),
    )
    result = client.embed_full(["a", "b"], on_error="per_input")
    assert result.token_counts == [5, 0]
    assert result.truncated == [0]
    assert result.failures == [InputFailure(1, "context_length_exceeded", "too long")]
    assert (result.model, result.space_id, result.numerics_id, result.request_id) == ("m", "s", "n", "r")
    assert result.times == StageTimes(tokenize_ms=1, queue_ms=2, forward_ms=3, pack_ms=4, reply_ms=5, total_ms=15)


def test_reply_larger_than_grpc_takes_by_default_arrives_whole(client: EmbedClient, server: StubServer) -> None:
    sent = np.random.default_rng(0).standard_normal((2_048, 1_024)).astype(np.float32)  # 8 MiB
    server.answer = lambda *_: pb.EmbedResponse(vectors=sent.tobytes(), count=2_048, dims=1_024)
    np.testing.assert_array_equal(client.embed(["a"] * 2_048), sent)


def test_request_larger_than_the_server_takes_is_refused_by_the_server(client: EmbedClient, server: StubServer) -> None:
    with pytest.raises(RequestTooLarge, match="larger than max") as caught:
        client.embed(["x" * (9 << 20)])
    assert caught.value.grpc_status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.requests == []


@pytest.mark.parametrize(
    ("status", "expected", "also"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, BadRequest, ValueError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, RequestTooLarge, ValueError),
        (grpc.StatusCode.NOT_FOUND, ModelNotFound, LookupError),
        (grpc.StatusCode.FAILED_PRECONDITION, SpaceMismatch, ValueError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, RequestTimeout, TimeoutError),
        (grpc.StatusCode.UNAVAILABLE, Unavailable, ConnectionError),
        (grpc.StatusCode.INTERNAL, ServerError, EmbedError),
        (grpc.StatusCode.UNKNOWN, ServerError, EmbedError),
        (grpc.StatusCode.UNAUTHENTICATED, EmbedError, EmbedError),
    ],
)
def test_status_becomes_a_typed_error_with_the_servers_words(
    client: EmbedClient, server: StubServer, status: grpc.StatusCode, expected: type, also: type
) -> None:
    server.answer = answer_with_status(
        status, "what to change", ("embedserve-code", "some_code"), ("embedserve-param", "texts[3]")
    )
    with pytest.raises(EmbedError, match=r"^what to change$") as caught:
        client.embed(["a"])
    assert type(caught.value) is expected
    assert isinstance(caught.value, also)
    assert caught.value.message == "what to change"
    assert (caught.value.code, caught.value.param, caught.value.grpc_status) == ("some_code", "texts[3]", status)
    assert isinstance(caught.value.__cause__, grpc.RpcError)


def test_pushback_makes_it_overload_and_says_when_to_try_again(client: EmbedClient, server: StubServer) -> None:
    server.answer = answer_with_status(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "no room",
        ("embedserve-code", "overloaded"),
        ("grpc-retry-pushback-ms", "1500"),
    )
    with pytest.raises(Overloaded, match="no room") as caught:
        client.embed(["a"])
    assert caught.value.retry_after_s == 1.5
    assert caught.value.code == "overloaded"
    assert len(server.requests) == 1  # it is the caller's to try again


@pytest.mark.parametrize("pushback", ["-1", "soon"])
def test_pushback_that_forbids_a_retry_is_not_overload(client: EmbedClient, server: StubServer, pushback: str) -> None:
    server.answer = answer_with_status(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "too much", ("grpc-retry-pushback-ms", pushback)
    )
    with pytest.raises(RequestTooLarge):
        client.embed(["a"])


def test_error_without_metadata_has_no_code_and_no_param(client: EmbedClient, server: StubServer) -> None:
    server.answer = answer_with_status(grpc.StatusCode.INVALID_ARGUMENT, "no")
    with pytest.raises(BadRequest) as caught:
        client.embed(["a"])
    assert (caught.value.code, caught.value.param) == (None, None)


def test_time_allowed_is_kept(server: StubServer) -> None:
    def answer_after_the_caller_left(_request: pb.EmbedRequest, context: grpc.ServicerContext) -> pb.EmbedResponse:
        left = threading.Event()
        if context.add_callback(left.set):
            left.wait(20)
        return pb.EmbedResponse()

    server.answer = answer_after_the_caller_left
    with EmbedClient(server.target, timeout_s=0.2) as client, pytest.raises(RequestTimeout):
        client.embed(["a"])


def test_nobody_at_the_target_is_unavailable() -> None:
    with contextlib.closing(socket.socket()) as reserved:  # bound and not listening: refuses
        reserved.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{reserved.getsockname()[1]}"
        with EmbedClient(target, timeout_s=20) as client, pytest.raises(Unavailable):
            client.embed(["a"])


def test_closed_client_refuses_calls(server: StubServer) -> None:
    with EmbedClient(server.target) as client:
        client.embed(["a"])
    with pytest.raises(ValueError, match="closed"):
        client.embed(["a"])


def test_one_client_serves_many_threads(client: EmbedClient) -> None:
    with ThreadPoolExecutor(8) as pool:
        shapes = list(pool.map(lambda count: client.embed(["a"] * count).shape, range(1, 65)))
    assert shapes == [(count, 4) for count in range(1, 65)]


@pytest.mark.parametrize(
    ("inputs", "index", "why"),
    [
        (["a", "b", "caf\ud83d"], 2, r"lone surrogate \(U\+D83D at character 3\)"),
        (["\udcff"] * 3, 0, "lone surrogate"),
        (["a", 3], 1, "int"),
        (["a", None], 1, "NoneType"),
        (["a", [1, 2]], 1, "either texts or lists of token ids"),
        ([[1, 2], "a"], 1, "either texts or lists of token ids"),
        ([[1], [1, -2]], 1, "token ids"),
        ([[1], [2**32]], 1, "token ids"),
        ([[1], [1.5]], 1, "token ids"),
        ([1, 2, 3], 0, "token ids"),
        ([None], 0, "token ids"),
        ([b"bytes"], 0, "token ids"),
        (["a", b"bytes"], 1, "bytes"),
    ],
)
def test_input_that_cannot_be_sent_is_named(
    client: EmbedClient, server: StubServer, inputs: Any, index: int, why: str
) -> None:
    with pytest.raises(BadRequest, match=f"^input {index} .*{why}") as caught:
        client.embed(inputs)
    assert isinstance(caught.value, ValueError)
    field = "texts" if isinstance(inputs[0], str) else "token_ids"
    assert (caught.value.param, caught.value.code) == (f"{field}[{index}]", "invalid_value")
    assert caught.value.grpc_status is None
    assert server.requests == []


def test_one_bare_text_is_refused_rather_than_split_into_characters(client: EmbedClient) -> None:
    with pytest.raises(BadRequest, match=r"send a list of texts"):
        client.embed("hello")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"dtype": "float64"}, "dtype"),
        ({"input_type": "passage"}, "input_type"),
        ({"truncate": "middle"}, "truncate"),
        ({"lane": "fast"}, "lane"),
        ({"on_error": "ignore"}, "on_error"),
        ({"instruction": "caf\ud83d"}, "instruction"),
        ({"dimensions": 2**40}, "dimensions"),
        ({"dimensions": "64"}, "dimensions"),
        ({"model": 7}, "model"),
    ],
)
def test_option_that_cannot_be_sent_is_named(client: EmbedClient, options: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest, match=f"^{param} is ") as caught:
        client.embed_full(["a"], **options)
    assert caught.value.param == param


def test_unknown_option_is_a_type_error(client: EmbedClient) -> None:
    with pytest.raises(TypeError, match="dimension"):
        client.embed(["a"], dimension=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "reply",
    [
        pb.EmbedResponse(vectors=b"\0" * 15, count=1, dims=4),
        pb.EmbedResponse(vectors=b"\0" * 16, count=2, dims=4),
        pb.EmbedResponse(vectors=b"\0" * 4, count=1, dims=4, output_dtype=pb.OUTPUT_DTYPE_INT8),
        pb.EmbedResponse(vectors=b"\0" * 16, count=1, dims=4, output_dtype=99),  # type: ignore[arg-type]
    ],
    ids=["torn row", "missing row", "missing scale", "unknown dtype"],
)
def test_reply_that_contradicts_itself_is_an_error(
    client: EmbedClient, server: StubServer, reply: pb.EmbedResponse
) -> None:
    server.answer = lambda *_: reply
    with pytest.raises(ServerError, match="the reply has"):
        client.embed(["a"])


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_any_text_survives_the_message(texts: list[str]) -> None:
    sent = build_request(texts).SerializeToString()
    assert list(pb.EmbedRequest.FromString(sent).texts) == texts


@given(st.lists(st.text(st.characters()), min_size=1))
def test_any_str_is_either_sent_or_named(texts: list[str]) -> None:
    faulty = [index for index, text in enumerate(texts) if any("\ud800" <= char <= "\udfff" for char in text)]
    if faulty:
        with pytest.raises(BadRequest, match=f"^input {faulty[0]} "):
            build_request(texts)
    else:
        build_request(texts)


@given(count=st.integers(0, 5), dims=st.integers(1, 40))
def test_reply_of_no_rows_still_has_two_axes(count: int, dims: int) -> None:
    reply = pb.EmbedResponse(vectors=rows_of(count, dims).tobytes(), count=count, dims=dims)
    assert read_reply(reply).vectors.shape == (count, dims)
