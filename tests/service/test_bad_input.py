"""Mistaken and hostile requests over both protocols: each is refused for what is wrong with it, and the next is served.
Knows both protocols and, as the oracle, sentence-transformers; of the server's code only the list of its fields.
"""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import httpx
import msgspec
import numpy as np
import pytest
from sentence_transformers.util import quantize_embeddings
from servers import (
    ANY_SIZE,
    OWN_CONNECTION,
    Embed,
    Failure,
    Reply,
    Server,
    Socket,
    assert_alike,
    failure_of,
    grpc_vectors,
    http_head,
    http_message,
    http_vectors,
    start_server,
)

from embedserve.frontend.openai import EmbeddingsRequest
from embedserve.v1 import embedding_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import Reference

MODEL, DIMS, MAX_TOKENS, VOCABULARY = "all-MiniLM-L6-v2", 384, 256, 30_522
CLS, SEP = 101, 102
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world")  # one token each
GOOD_TEXT = "a good request"
GOOD_BODY = json.dumps({"input": GOOD_TEXT}).encode()

# What a code comes with. The type is OpenAI's "invalid_request_error" for each of them.
STATUSES = {
    "invalid_value": (400, grpc.StatusCode.INVALID_ARGUMENT),
    "invalid_json": (400, None),
    "invalid_token_id": (400, grpc.StatusCode.INVALID_ARGUMENT),
    "token_ids_refused": (400, None),
    "context_length_exceeded": (400, grpc.StatusCode.INVALID_ARGUMENT),
    "model_not_found": (404, grpc.StatusCode.NOT_FOUND),
    "unknown_url": (404, None),
    "method_not_allowed": (405, None),
    "space_mismatch": (412, grpc.StatusCode.FAILED_PRECONDITION),
    "body_too_large": (413, None),
    "request_too_large": (413, grpc.StatusCode.RESOURCE_EXHAUSTED),
}


@pytest.fixture(autouse=True)
def next_good_request_is_served(connections: list[Socket], embed: Embed, good_vector: np.ndarray) -> Iterator[None]:
    """By each frontend over HTTP, and over gRPC, whatever a test has sent."""
    yield
    for connection in connections:
        assert_alike(http_vectors(connection.send(http_message(GOOD_BODY)).read_reply()), good_vector)
    assert_alike(grpc_vectors(embed(texts=[GOOD_TEXT])), good_vector)


@pytest.fixture(scope="module")
def good_vector(reference: Reference) -> np.ndarray:
    return reference([GOOD_TEXT])


def assert_refused(reply: httpx.Response | Reply, code: str, param: str | None, says: tuple[str, ...] = ()) -> None:
    """The status of that code, and OpenAI's error body."""
    if isinstance(reply, httpx.Response):
        reply = Reply(reply.status_code, dict(reply.headers), reply.content)
    error = json.loads(reply.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (reply.status, error["type"], error["param"], error["code"]) == (
        STATUSES[code][0],
        "invalid_request_error",
        param,
        code,
    ), error
    assert reply.headers["content-type"] == "application/json"
    assert error["message"]
    assert [word for word in says if word not in error["message"]] == [], error["message"]


def assert_failed(failure: Failure, code: str, param: str | None, says: tuple[str, ...] = ()) -> None:
    """The status of that code, both in trailing metadata, and no sign that the call may be sent again."""
    assert (failure.status, failure.code, failure.param, failure.pushback_ms) == (STATUSES[code][1], code, param, None)
    assert failure.message
    assert [word for word in says if word not in failure.message] == [], failure.message


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/embeddings", json=fields)


def words(count: int, start: int = 0) -> list[str]:
    return [WORDS[i % len(WORDS)] for i in range(start, start + count)]


def text_of(tokens: int) -> str:
    """A text of so many tokens, [CLS] and [SEP] included."""
    return " ".join(words(tokens - 2))


def ids(*inputs: list[int]) -> list[pb.TokenIds]:
    return [pb.TokenIds(ids=each) for each in inputs]


# What both protocols refuse


class Case(NamedTuple):
    code: str
    param: str | None  # of HTTP; gRPC calls inputs "texts" or "token_ids"
    http: dict[str, Any]
    grpc: dict[str, Any]
    says: tuple[str, ...] = ()


TOO_LONG = ("257", "256", 'truncate="right"', "--auto-truncate")
BOTH = {
    "no inputs": Case("invalid_value", "input", {"input": []}, {"texts": []}, ("at least one",)),
    "one input too many": Case(
        "invalid_value", "input", {"input": ["x"] * 2049}, {"texts": ["x"] * 2049}, ("2049", "2048", "--max-inputs")
    ),
    "unknown model": Case(
        "model_not_found",
        "model",
        {"input": "x", "model": "text-embedding-3-small"},
        {"texts": ["x"], "model": "text-embedding-3-small"},
        ("text-embedding-3-small", MODEL),
    ),
    "model name in capitals": Case(
        "model_not_found",
        "model",
        {"input": "x", "model": MODEL.upper()},
        {"texts": ["x"], "model": MODEL.upper()},
        (MODEL,),
    ),
    "another vector space": Case(
        "space_mismatch",
        "expect_space",
        {"input": "x", "expect_space": "0123"},
        {"texts": ["x"], "expect_space": "0123"},
        ("0123",),
    ),
    "no such prompt": Case(
        "invalid_value",
        "prompt_name",
        {"input": "x", "prompt_name": "summary"},
        {"texts": ["x"], "prompt_name": "summary"},
        ("summary",),
    ),
    "empty prompt name": Case(
        "invalid_value", "prompt_name", {"input": "x", "prompt_name": ""}, {"texts": ["x"], "prompt_name": ""}
    ),
    "instruction to a model without": Case(
        "invalid_value",
        "instruction",
        {"input": "x", "instruction": "find it"},
        {"texts": ["x"], "instruction": "find it"},
    ),
    "prompt name and input type": Case(
        "invalid_value",
        "prompt_name",
        {"input": "x", "prompt_name": "query", "input_type": "query"},
        {"texts": ["x"], "prompt_name": "query", "input_type": pb.INPUT_TYPE_QUERY},
        ("not both",),
    ),
    "prompt name and instruction": Case(
        "invalid_value",
        "instruction",
        {"input": "x", "prompt_name": "query", "instruction": "find it"},
        {"texts": ["x"], "prompt_name": "query", "instruction": "find it"},
        ("not both",),
    ),
    "one token too many": Case(
        "context_length_exceeded",
        "input[1]",
        {"input": ["x", text_of(MAX_TOKENS + 1)]},
        {"texts": ["x", text_of(MAX_TOKENS + 1)]},
        TOO_LONG,
    ),
    "one token too many and no truncation": Case(
        "context_length_exceeded",
        "input[0]",
        {"input": text_of(MAX_TOKENS + 1), "truncate": "none"},
        {"texts": [text_of(MAX_TOKENS + 1)], "truncate": pb.TRUNCATE_NONE},
        TOO_LONG,
    ),
    "one token id too many": Case(
        "context_length_exceeded",
        "input[0]",
        {"input": [1996] * (MAX_TOKENS - 1), "token_encoding": "model"},
        {"token_ids": ids([1996] * (MAX_TOKENS - 1))},
        TOO_LONG,
    ),
    "first id beyond the vocabulary": Case(
        "invalid_token_id",
        "input[1]",
        {"input": [[1996], [1996, VOCABULARY]], "token_encoding": "model"},
        {"token_ids": ids([1996], [1996, VOCABULARY])},
        (str(VOCABULARY), str(VOCABULARY - 1)),
    ),
    "largest id there is": Case(
        "invalid_token_id",
        "input[0]",
        {"input": [2**32 - 1], "token_encoding": "model"},
        {"token_ids": ids([2**32 - 1])},
        (str(2**32 - 1), str(VOCABULARY - 1)),
    ),
    **{
        f"{dimensions} dimensions": Case(
            "invalid_value",
            "dimensions",
            {"input": "x", "dimensions": dimensions},
            {"texts": ["x"], "dimensions": dimensions},
            (str(dimensions), f"1 to {DIMS}"),
        )
        for dimensions in (0, -1, DIMS + 1, 2**31 - 1, -(2**31))
    },
}


@pytest.mark.parametrize("case", BOTH.values(), ids=BOTH)
def test_http_refuses(http: httpx.Client, case: Case) -> None:
    assert_refused(post(http, **case.http), case.code, case.param, case.says)


@pytest.mark.parametrize("case", BOTH.values(), ids=BOTH)
def test_grpc_refuses(embed: Embed, case: Case) -> None:
    inputs = "texts" if "texts" in case.grpc else "token_ids"
    param = case.param and case.param.replace("input[", f"{inputs}[")
    assert_failed(embed.failure(**case.grpc), case.code, inputs if param == "input" else param, case.says)


# HTTP: fields and inputs of the wrong type

ACCEPTED_TYPES: dict[str, tuple[type, ...]] = {
    "input": (str, list),
    "model": (str,),
    "encoding_format": (str,),
    "dimensions": (int,),
    "user": (str,),
    "input_type": (str,),
    "prompt_name": (str,),
    "instruction": (str,),
    "truncate": (str,),
    "normalize": (bool,),
    "lane": (str,),
    "token_encoding": (str,),
    "expect_space": (str,),
}
VALUES: tuple[Any, ...] = (7, 7.5, True, False, "text", [], [7], {}, {"a": 7})
WRONG_TYPES = [
    (field, value) for field, types in ACCEPTED_TYPES.items() for value in VALUES if type(value) not in types
]
CHOICES = {
    "encoding_format": ("float", "base64"),
    "input_type": ("query", "document"),
    "truncate": ("none", "left", "right"),
    "lane": ("auto", "query", "bulk"),
    "token_encoding": ("model",),
}


def test_every_field_of_the_http_request_is_tried_here() -> None:
    assert set(ACCEPTED_TYPES) == {field.name for field in msgspec.structs.fields(EmbeddingsRequest)}


@pytest.mark.parametrize(("field", "value"), WRONG_TYPES, ids=json.dumps)
def test_field_of_a_wrong_type_is_refused_by_its_name(http: httpx.Client, field: str, value: Any) -> None:
    assert_refused(post(http, **{"input": "x", field: value}), "invalid_value", field, (field,))


@pytest.mark.parametrize("value", ["", "text", "FLOAT", "None", "base64 "])
@pytest.mark.parametrize("field", CHOICES)
def test_unknown_choice_is_refused_with_those_that_there_are(http: httpx.Client, field: str, value: str) -> None:
    quoted = tuple(f'"{choice}"' for choice in CHOICES[field])
    assert_refused(post(http, **{"input": "x", field: value}), "invalid_value", field, quoted)


@pytest.mark.parametrize("body", [b"{}", b'{"inputs": "x"}', b'{"Input": "x"}', b'{"input": null}'])
def test_input_must_be_there(http: httpx.Client, body: bytes) -> None:
    assert_refused(http.post("/v1/embeddings", content=body), "invalid_value", "input")


ODD_INPUTS: list[tuple[list[Any], int]] = [
    (["a", [1, 2]], 1),
    ([[1, 2], "a"], 1),
    (["a", 1], 1),
    ([1, "a"], 1),
    (["a", "b", None], 2),
    ([1, 2, None], 2),
    (["a", True], 1),
    ([1, True], 1),
    ([1, 2.0], 1),
    ([[1], [1, "a"]], 1),
    ([[1], [1, None]], 1),
    ([[1], [True]], 1),
    ([[1], [1.0]], 1),
    ([[1], [[1]]], 1),
    ([[1], None], 1),
    ([None], 0),
    ([None, None], 0),
    ([{}], 0),
    ([{"text": "a"}, {"text": "b"}], 0),
    ([True, False], 0),
    ([1.5, 2.5], 0),
    ([["a"], ["b"]], 0),
    ([[["a"]]], 0),
    ([[[1]]], 0),
    ([[{}]], 0),
]


@pytest.mark.parametrize(("inputs", "odd"), ODD_INPUTS, ids=json.dumps)
@pytest.mark.parametrize("token_encoding", [None, "model"])
def test_odd_element_of_input_is_named(
    http: httpx.Client, inputs: list[Any], odd: int, token_encoding: str | None
) -> None:
    reply = post(http, input=inputs, token_encoding=token_encoding)
    assert_refused(reply, "invalid_value", f"input[{odd}]", (str(odd),))


@pytest.mark.parametrize("inputs", [[101, 7592, 102], [[100257, 9906, 1917]], [[1], [2]], [[]]], ids=json.dumps)
def test_token_ids_on_http_are_refused_with_the_client_setting_to_change(http: httpx.Client, inputs: list[Any]) -> None:
    says = ("check_embedding_ctx_length=False", '"token_encoding": "model"', "--token-ids model")
    assert_refused(post(http, input=inputs), "token_ids_refused", "input", says)


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31, 2**63 - 1, 2**63, 2**64, 10**100])
def test_token_id_of_any_size_outside_the_vocabulary_is_refused(http: httpx.Client, bad: int) -> None:
    reply = post(http, input=[[1996], [1996, bad]], token_encoding="model")
    assert_refused(reply, "invalid_token_id", "input[1]", (str(VOCABULARY - 1),))


@pytest.mark.parametrize("digits", [400, 5000, 1_000_000])
@pytest.mark.parametrize("field", ["dimensions", "input"])
def test_number_of_many_digits_is_refused_without_repeating_it(http: httpx.Client, field: str, digits: int) -> None:
    number = "9" * digits
    fields = {"input": '"x"', "token_encoding": '"model"', field: f"[{number}]" if field == "input" else number}
    body = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
    reply = http.post("/v1/embeddings", content=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == ("input[0]" if field == "input" else "dimensions")
    assert len(error["message"]) < 1000


@pytest.mark.parametrize("value", ["128", 128.5, 128.0, True], ids=json.dumps)
def test_dimensions_must_be_a_whole_number(http: httpx.Client, value: Any) -> None:
    assert_refused(post(http, input="x", dimensions=value), "invalid_value", "dimensions")


# HTTP: bodies that are no JSON

DEEP = 100_000
UNREADABLE = {
    "nothing": b"",
    "blanks": b" \r\n\t",
    "a form": b"input=x",
    "single quotes": b"{'input': 'x'}",
    "trailing comma": b'{"input": "x",}',
    "a comment": b'// hello\n{"input": "x"}',
    "end of text in a string": b'{"input": "x',
    "end of text in the object": b'{"input": "x"',
    "two documents": GOOD_BODY * 2,
    "something after the document": GOOD_BODY + b"x",
    "NaN": b'{"input": "x", "dimensions": NaN}',
    "control character in a string": b'{"input": "a\x00b"}',
    "invalid UTF-8": b'{"input": "\xff"}',
    "cut UTF-8": '{"input": "é"}'.encode()[:-3] + b'"}',
    "overlong UTF-8": b'{"input": "\xc0\xaf"}',
    "a surrogate in UTF-8": b'{"input": "\xed\xa0\x80"}',
    "Latin-1": '{"input": "é"}'.encode("latin-1"),
    "UTF-16": '{"input": "x"}'.encode("utf-16"),
    "UTF-16 without a mark": '{"input": "x"}'.encode("utf-16-le"),
    "UTF-32": '{"input": "x"}'.encode("utf-32"),
    "high surrogate alone": rb'{"input": "\ud800"}',
    "low surrogate alone": rb'{"input": "\udc00"}',
    "high surrogate before a letter": rb'{"input": "\ud800a"}',
    "two high surrogates": rb'{"input": "\ud800\ud800"}',
    "surrogate in the second input": rb'{"input": ["a", "\ud800"]}',
    "surrogate in another field": rb'{"input": "x", "user": "\ud800"}',
    "cut escape": rb'{"input": "\u00"}',
    "gzip": bytes.fromhex("1f8b08000000000002ff"),
    "random bytes": random.Random(1).randbytes(10_000),
    "arrays of arrays": b'{"input": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "arrays of arrays in an unknown field": b'{"input": "x", "a": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "objects of objects": b'{"a": ' * DEEP + b"1" + b"}" * DEEP,
    "objects of objects, unended": b'{"input": "x", "a": ' * DEEP,
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
def test_body_that_is_no_json_is_refused(http: httpx.Client, body: bytes) -> None:
    assert_refused(http.post("/v1/embeddings", content=body), "invalid_json", None, ("JSON",))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "byte-order mark"])
def test_lone_surrogate_is_named(http: httpx.Client, mark: bytes) -> None:
    reply = http.post("/v1/embeddings", content=mark + rb'{"input": "\ud800"}')
    assert_refused(reply, "invalid_json", None, ("surrogate",))


@pytest.mark.parametrize("body", [b"null", b"7", b'"x"', b"true", b'["x"]', b"[" * DEEP])
def test_body_that_is_no_object_is_refused(http: httpx.Client, body: bytes) -> None:
    assert_refused(http.post("/v1/embeddings", content=body), "invalid_value", None, ("object",))


def test_deeply_nested_value_of_a_known_field_is_refused(http: httpx.Client) -> None:
    body = b'{"input": "x", "dimensions": ' + b"[" * DEEP + b"]" * DEEP + b"}"
    assert_refused(http.post("/v1/embeddings", content=body), "invalid_value", "dimensions")


# HTTP: what looks wrong and is served

UNUSUAL = {
    "byte-order mark": b"\xef\xbb\xbf" + GOOD_BODY,
    "blanks around": b"\r\n\t " + GOOD_BODY + b" \n",
    "unknown fields": json.dumps({"input": GOOD_TEXT, "a": {"b": [1, None]}, "Model": 7, "": 1}).encode(),
    "unknown field of 10,000 digits": b'{"a": ' + b"9" * 10_000 + b", " + GOOD_BODY[1:],
    "null in every other field": json.dumps(dict.fromkeys(ACCEPTED_TYPES) | {"input": GOOD_TEXT}).encode(),
    "escapes": b'{"input": "' + "".join(f"\\u{ord(c):04x}" for c in GOOD_TEXT).encode() + b'"}',
    "field twice": b'{"input": "another text", ' + GOOD_BODY[1:],
    "empty model and space": json.dumps({"input": GOOD_TEXT, "model": "", "expect_space": ""}).encode(),
}


@pytest.mark.parametrize("body", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_body_is_served(http: httpx.Client, body: bytes, good_vector: np.ndarray) -> None:
    assert_alike(http_vectors(http.post("/v1/embeddings", content=body)), good_vector)


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_content_type_is_not_looked_at(http: httpx.Client, content_type: str, good_vector: np.ndarray) -> None:
    reply = http.post("/v1/embeddings", content=GOOD_BODY, headers={"content-type": content_type})
    assert_alike(http_vectors(reply), good_vector)


@pytest.mark.parametrize("query", ["?a=1&a=2", "?input=x&dimensions=7", "?%ff", "?"])
def test_query_of_the_address_is_ignored(http: httpx.Client, query: str, good_vector: np.ndarray) -> None:
    assert_alike(http_vectors(http.post(f"/v1/embeddings{query}", content=GOOD_BODY)), good_vector)


# HTTP: addresses and methods


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/embedding", "/V1/embeddings", "/v1//embeddings", "/v1/%00%ff", "/admin"]
)
def test_unknown_address_is_refused_with_the_right_one(http: httpx.Client, method: str, path: str) -> None:
    reply = http.request(method, path, content=GOOD_BODY)
    assert_refused(reply, "unknown_url", None, (method, "POST /v1/embeddings"))


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/embeddings", {"POST"}),
        ("PUT", "/v1/embeddings", {"POST"}),
        ("DELETE", "/v1/embeddings", {"POST"}),
        ("OPTIONS", "/v1/embeddings", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("DELETE", f"/v1/models/{MODEL}", {"GET", "HEAD"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("POST", "/ready", {"GET", "HEAD"}),
        ("POST", "/metrics", {"GET", "HEAD"}),
    ],
)
def test_wrong_method_is_refused_with_the_right_ones(
    http: httpx.Client, method: str, path: str, allowed: set[str]
) -> None:
    reply = http.request(method, path)
    assert_refused(reply, "method_not_allowed", None, (method, path))
    assert set(reply.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize(("path", "status"), [("/v1/embeddings", 405), ("/v1/nothing", 404), ("/health", 200)])
def test_head_has_the_status_and_no_body(server: Server, path: str, status: int) -> None:
    with Socket(server) as connection:
        connection.send(http_message(b"", "Connection: close", method="HEAD", path=path))
        head, _, body = connection.read_to_end().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert body == b""


def test_slash_at_the_end_is_another_path(http: httpx.Client) -> None:
    """Not a redirect, whose target would be whatever the Host header says."""
    assert http.post("/v1/embeddings/", content=GOOD_BODY, headers={"host": "elsewhere"}).status_code == 404


@pytest.mark.parametrize("name", ["text-embedding-3-small", "", "%00%ff", "a/b", "x" * 10_000])
def test_unknown_model_has_no_card(http: httpx.Client, name: str) -> None:
    assert_refused(http.get(f"/v1/models/{name}"), "model_not_found", "model", ("/v1/models",))


# HTTP: sizes, pieces and connections

TOO_LARGE = b'{"input": "' + b"x" * 40_000_000 + b'"}'
LIMIT_SAYS = ("32000000", "--max-body-mb")


def test_body_of_40_mb_is_refused_to_a_client_that_sends_it_whole(server: Server) -> None:
    with Socket(server) as connection:
        reply = connection.send(http_message(TOO_LARGE)).read_reply()
        assert_refused(reply, "body_too_large", None, LIMIT_SAYS)
        assert reply.headers["connection"] == "close"
        assert connection.read_to_end() == b""


def test_body_of_40_mb_is_refused_before_it_has_come(server: Server) -> None:
    message = http_message(TOO_LARGE)
    with Socket(server) as connection:
        reply = connection.send(message[:100_000]).read_reply()
        assert_refused(reply, "body_too_large", None, LIMIT_SAYS)
        connection.send(message[100_000:])  # as who does not read before all is sent
        assert connection.read_to_end() == b""


def test_body_of_40_mb_is_refused_to_a_client_that_waits_to_be_asked(server: Server) -> None:
    with Socket(server) as connection:
        head = http_head("Expect: 100-continue", f"Content-Length: {len(TOO_LARGE)}")
        assert_refused(connection.send(head).read_reply(), "body_too_large", None, LIMIT_SAYS)


@pytest.mark.parametrize("size", [2**32, 2**63, 2**64 - 1])
def test_body_said_to_be_endless_is_refused(server: Server, size: int) -> None:
    with Socket(server) as connection:
        assert_refused(connection.send(http_head(f"Content-Length: {size}")).read_reply(), "body_too_large", None)


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def test_chunks_of_40_mb_are_refused(server: Server) -> None:
    pieces = [TOO_LARGE[start : start + 1_000_000] for start in range(0, len(TOO_LARGE), 1_000_000)]
    with Socket(server) as connection:
        reply = connection.send(http_head("Transfer-Encoding: chunked"), chunked(*pieces)).read_reply()
        assert_refused(reply, "body_too_large", None, LIMIT_SAYS)
        assert connection.read_to_end() == b""


def test_openai_clients_read_the_refusal_of_40_mb(http: httpx.Client) -> None:
    assert_refused(http.post("/v1/embeddings", content=TOO_LARGE), "body_too_large", None, LIMIT_SAYS)


def test_large_body_to_an_unknown_address_leaves_the_connection_usable(server: Server, good_vector: np.ndarray) -> None:
    with Socket(server) as connection:
        connection.send(http_message(TOO_LARGE, path="/v1/nothing"), http_message(GOOD_BODY))
        assert_refused(connection.read_reply(), "unknown_url", None)
        assert_alike(http_vectors(connection.read_reply()), good_vector)


def test_body_in_chunks_of_one_byte_is_served(server: Server, reference: Reference) -> None:
    text = "北京 🙂 é"
    body = json.dumps({"input": text}, ensure_ascii=False).encode()
    with Socket(server) as connection:
        connection.send(http_head("Transfer-Encoding: chunked"), chunked(*(bytes([byte]) for byte in body)))
        assert_alike(http_vectors(connection.read_reply()), reference([text]))


def test_chunk_extensions_and_trailers_are_ignored(server: Server, good_vector: np.ndarray) -> None:
    with Socket(server) as connection:
        body = b"%x;name=value\r\n%b\r\n0\r\nTrailer: value\r\n\r\n" % (len(GOOD_BODY), GOOD_BODY)
        connection.send(http_head("Transfer-Encoding: chunked"), body)
        assert_alike(http_vectors(connection.read_reply()), good_vector)


def test_client_that_waits_to_be_asked_is_asked(server: Server, good_vector: np.ndarray) -> None:
    with Socket(server) as connection:
        connection.send(http_head("Expect: 100-continue", f"Content-Length: {len(GOOD_BODY)}"))
        assert connection.read_reply().status == 100
        assert_alike(http_vectors(connection.send(GOOD_BODY).read_reply()), good_vector)


def test_body_that_ends_early_is_not_answered(server: Server) -> None:
    with Socket(server) as connection:
        connection.send(http_head("Content-Length: 1000"), GOOD_BODY).end_sending()
        assert connection.read_to_end() == b""


def test_chunks_that_end_early_are_not_answered(server: Server) -> None:
    with Socket(server) as connection:
        connection.send(http_head("Transfer-Encoding: chunked"), chunked(GOOD_BODY)[:-5]).end_sending()
        assert connection.read_to_end() == b""


@pytest.mark.parametrize("sent", [b"", b"PO", http_head(), http_head("Content-Length: 1000"), http_message(GOOD_BODY)])
def test_connection_reset_at_any_point_harms_nobody(server: Server, sent: bytes) -> None:
    Socket(server).send(sent).reset()


def test_requests_in_one_packet_are_answered_in_order_errors_included(
    server: Server, reference: Reference, good_vector: np.ndarray
) -> None:
    other = http_message(json.dumps({"input": "another text"}).encode())
    with Socket(server) as connection:
        bad = http_message(b'{"input":')
        connection.send(http_message(GOOD_BODY) + bad + http_message(b"", path="/v1/nothing") + other)
        assert_alike(http_vectors(connection.read_reply()), good_vector)
        assert_refused(connection.read_reply(), "invalid_json", None)
        assert_refused(connection.read_reply(), "unknown_url", None)
        assert_alike(http_vectors(connection.read_reply()), reference(["another text"]))


def test_connection_serves_on_after_an_error(server: Server, good_vector: np.ndarray) -> None:
    with Socket(server) as connection:
        for _ in range(3):
            assert_refused(connection.send(http_message(b"{")).read_reply(), "invalid_json", None)
            assert_alike(http_vectors(connection.send(http_message(GOOD_BODY)).read_reply()), good_vector)


def test_http_1_0_is_served_and_closed(server: Server, good_vector: np.ndarray) -> None:
    with Socket(server) as connection:
        connection.send(http_message(GOOD_BODY).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        assert_alike(http_vectors(connection.read_reply()), good_vector)
        assert connection.read_to_end() == b""


MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown method": http_message(b"", method="EMBED"),
    "length that is no number": http_head("Content-Length: many"),
    "negative length": http_head("Content-Length: -1"),
    "length beyond 64 bits": http_head(f"Content-Length: {2**64}"),
    "two lengths": http_head("Content-Length: 23", "Content-Length: 24") + GOOD_BODY,
    "length and chunks": http_message(chunked(GOOD_BODY), "Transfer-Encoding: chunked"),
    "chunk size that is no number": http_head("Transfer-Encoding: chunked") + b"many\r\n",
    "chunk size beyond 64 bits": http_head("Transfer-Encoding: chunked") + b"f" * 17 + b"\r\n",
    "unknown transfer encoding": http_head("Transfer-Encoding: gzip") + GOOD_BODY,
    "blank before a colon": http_head("Content-Length : 0"),
    "address that is no ASCII": b"POST /v1/\xff HTTP/1.1\r\nHost: test\r\n\r\n",
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_http_is_refused_and_the_connection_closed(server: Server, sent: bytes) -> None:
    with Socket(server) as connection:
        assert connection.send(sent).read_reply().status == 400
        assert connection.read_to_end() == b""


def test_huge_headers_harm_nobody(server: Server, good_vector: np.ndarray) -> None:
    with Socket(server) as connection:
        one, many = f"X: {'y' * 1_000_000}", [f"X-{number}: y" for number in range(20_000)]
        for headers in ([one], many):
            reply = connection.send(http_message(GOOD_BODY, *headers)).read_reply()
            assert_alike(http_vectors(reply), good_vector)


def test_requests_that_do_not_come_leave_room_for_those_that_do(server: Server, good_vector: np.ndarray) -> None:
    """Each says that 32 MB follow, and together they would fill what a frontend holds many times over."""
    with ExitStack() as opened:
        for head in [http_head("Content-Length: 32000000"), http_head("Transfer-Encoding: chunked")] * 40:
            opened.enter_context(Socket(server)).send(head)
        late = [opened.enter_context(Socket(server)) for _ in range(16)]
        for connection in late:
            reply = connection.send(http_head("Transfer-Encoding: chunked"), chunked(GOOD_BODY)).read_reply()
            assert_alike(http_vectors(reply), good_vector)


# gRPC: messages

ENUMS = ("input_type", "output_dtype", "truncate", "lane", "on_error")
NO_MESSAGES = {
    "end of message in a field": b"\x0a\x05ab",
    "field number 0": b"\x00\x00",
    "unknown wire type": b"\x0f\x00",
    "endless varint": b"\x18" + b"\xff" * 20,
    "group that does not end": b"\x9b\x06",
    "100,000 groups in each other": b"\x9b\x06" * DEEP + b"\x9c\x06" * DEEP,
    "invalid UTF-8 in a text": b"\x0a\x02\xff\xfe",
    "a surrogate in a text": b"\x0a\x03\xed\xa0\x80",
    "invalid UTF-8 in the model": b"\x0a\x01x\x6a\x01\xff",
    "invalid UTF-8 in the request id": b"\x0a\x01x\x62\x01\xff",
    "JSON": GOOD_BODY,
    "all bytes": bytes(range(256)),
}


@pytest.mark.parametrize("message", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_bytes_that_are_no_message_are_refused(embed: Embed, message: bytes) -> None:
    assert_failed(embed.failure(message), "invalid_value", None, ("EmbedRequest",))


def test_random_bytes_are_always_the_callers_mistake(embed: Embed) -> None:
    chance = random.Random(1)
    for _ in range(200):
        failure = embed.failure(chance.randbytes(chance.randrange(1, 100)))
        assert failure.status is grpc.StatusCode.INVALID_ARGUMENT, failure


@pytest.mark.parametrize("cut", range(1, 12))
def test_cut_message_is_refused(embed: Embed, cut: int) -> None:
    message = pb.EmbedRequest(texts=["x" * 20]).SerializeToString()
    assert_failed(embed.failure(message[:-cut]), "invalid_value", None, ("EmbedRequest",))


@pytest.mark.parametrize("value", [99, -1, 2**31 - 1])
@pytest.mark.parametrize("field", ENUMS)
def test_unknown_value_of_an_enum_is_refused(embed: Embed, field: str, value: int) -> None:
    assert_failed(embed.failure(texts=["x"], **{field: value}), "invalid_value", field, (field, str(value)))


def test_texts_and_token_ids_together_are_refused(embed: Embed) -> None:
    failure = embed.failure(texts=["x"], token_ids=ids([1996]))
    assert_failed(failure, "invalid_value", "token_ids", ("not both",))


def test_unknown_fields_of_a_message_are_ignored(embed: Embed, good_vector: np.ndarray) -> None:
    message = pb.EmbedRequest(texts=[GOOD_TEXT]).SerializeToString()
    assert_alike(grpc_vectors(embed.reply_to(b"\x82\x7d\x05hello" + message + b"\x88\x7d\x07")), good_vector)


def test_message_of_40_mb_is_too_large_and_not_to_be_sent_again(embed: Embed) -> None:
    failure = embed.failure(texts=[TOO_LARGE.decode()])
    assert failure.status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.pushback_ms is None
    assert "larger than max" in failure.message


def test_message_that_unpacks_to_40_mb_is_too_large(embed: Embed) -> None:
    message = pb.EmbedRequest(texts=[TOO_LARGE.decode()]).SerializeToString()
    with pytest.raises(grpc.RpcError) as raised:
        embed.reply_to(message, compression=grpc.Compression.Gzip)
    assert failure_of(raised.value).status is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_compressed_message_is_served(embed: Embed, good_vector: np.ndarray) -> None:
    message = pb.EmbedRequest(texts=[GOOD_TEXT]).SerializeToString()
    assert_alike(grpc_vectors(embed.reply_to(message, compression=grpc.Compression.Gzip)), good_vector)


@pytest.mark.parametrize("method", ["/embedserve.v1.Embedding/Nothing", "/embedserve.v2.Embedding/Embed", "/a/b"])
def test_method_that_does_not_exist_is_unimplemented(channel: grpc.Channel, method: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(method)(b"", timeout=30)
    assert failure_of(raised.value).status is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    "name", ["x" * 100_000, "é" * 100_000, "\n\0\x7f", "北京"], ids=["long", "é", "control", "CJK"]
)
@pytest.mark.parametrize(("field", "code"), [("model", "model_not_found"), ("expect_space", "space_mismatch")])
def test_any_name_can_be_refused(embed: Embed, http: httpx.Client, field: str, code: str, name: str) -> None:
    assert_failed(embed.failure(texts=["x"], **{field: name}), code, field)
    reply = post(http, input="x", **{field: name})
    assert_refused(reply, code, field)
    assert len(reply.content) < 2000


def test_wrong_protocol_on_a_port_is_an_error_and_harms_nobody(server: Server) -> None:
    with grpc.insecure_channel(server.http_url.removeprefix("http://"), options=OWN_CONNECTION) as channel:
        failure = Embed(channel).failure(texts=["x"])
        assert failure.status is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(httpx.TransportError):
        httpx.post(f"http://{server.grpc_target}/v1/embeddings", content=GOOD_BODY)


def test_caller_who_leaves_harms_nobody(embed: Embed) -> None:
    for _ in range(20):
        assert embed.start(texts=[text_of(MAX_TOKENS)] * 8).cancel()


# Texts that are unusual, and the vectors that sentence-transformers gives them

STRANGE_TEXTS = {
    "empty": "",
    "blank": " ",
    "line feed": "\n",
    "blanks": " \t\r\n ",
    "leading blanks": "  \n a text",
    "trailing blanks": "a text \n ",
    "blanks between": "a   text\n\n\nof\tblanks",
    "NUL": "\0",
    "NUL between": "a te\0xt",
    "control characters": "a\x01 text\x7f",
    "word joiners": "a\u200btext\ufeff\u2060",
    "right to left": "\u202e\u05d0\u05d1\u05d2 \u200f نص",
    "decomposed": "cafe\u0301",
    "composed": "caf\u00e9",
    "emoji of parts": "👩\u200d👩\u200d👧 🏳️\u200d🌈",
    "CJK": "北京天安门",
    "last code point": "\U0010ffff",
    "replacement character": "\ufffd",
    "private use": "\ue000",
    "dotted capital I": "İstanbul",
    "long word": "x" * 5_000,
    "many dots": "." * 100,
    "special tokens": "a [SEP] b [CLS] c [MASK]",
    "padding": "[PAD][PAD] a text [PAD]",
    "unknown token": "[UNK]",
    "special tokens of others": "</s> <|endoftext|> <s> <pad>",
}


@pytest.fixture(scope="module")
def strange_vectors(reference: Reference) -> dict[str, np.ndarray]:
    return dict(zip(STRANGE_TEXTS, reference(list(STRANGE_TEXTS.values())), strict=True))


@pytest.mark.parametrize("name", STRANGE_TEXTS)
def test_strange_text_has_the_vector_of_sentence_transformers(
    http: httpx.Client, embed: Embed, strange_vectors: dict[str, np.ndarray], name: str
) -> None:
    text, expected = STRANGE_TEXTS[name], strange_vectors[name][None]
    assert_alike(http_vectors(post(http, input=text)), expected)
    assert_alike(grpc_vectors(embed(texts=[text])), expected)


def test_strange_texts_keep_their_vectors_in_one_request(
    http: httpx.Client, embed: Embed, strange_vectors: dict[str, np.ndarray]
) -> None:
    texts, expected = list(STRANGE_TEXTS.values()), np.stack(list(strange_vectors.values()))
    assert_alike(http_vectors(post(http, input=texts)), expected)
    assert_alike(grpc_vectors(embed(texts=texts)), expected)


def test_2048_inputs_are_answered_whole_and_in_order(http: httpx.Client, embed: Embed, reference: Reference) -> None:
    distinct = [f"{first} {second}" for first in WORDS[:8] for second in WORDS[:8]]
    order = [(i * 37 + i // 64) % 64 for i in range(2048)]
    texts, expected = [distinct[i] for i in order], reference(distinct)[order]
    assert_alike(http_vectors(post(http, input=texts, encoding_format="base64")), expected)
    assert_alike(grpc_vectors(embed(texts=texts)), expected)


# Lengths, and truncation


def test_input_of_exactly_the_maximum_is_served(http: httpx.Client, embed: Embed, reference: Reference) -> None:
    text = text_of(MAX_TOKENS)
    reply = post(http, input=text)
    assert_alike(http_vectors(reply), reference([text]))
    assert reply.json()["usage"] == {"prompt_tokens": MAX_TOKENS, "total_tokens": MAX_TOKENS}
    assert "truncated" not in reply.json()
    answered = embed(texts=[text])
    assert_alike(grpc_vectors(answered), reference([text]))
    assert (list(answered.token_counts), list(answered.truncated)) == ([MAX_TOKENS], [])


@pytest.mark.parametrize("side", ["right", "left"])
def test_truncated_input_has_the_vector_of_what_is_left_of_it(
    http: httpx.Client, embed: Embed, reference: Reference, side: str
) -> None:
    long, kept = words(400), MAX_TOKENS - 2
    left = long[:kept] if side == "right" else long[-kept:]
    texts, expected = ["short", " ".join(long), "brief"], reference(["short", " ".join(left), "brief"])
    reply = post(http, input=texts, truncate=side)
    assert_alike(http_vectors(reply), expected)
    assert reply.json()["truncated"] == [1]
    assert reply.json()["usage"]["total_tokens"] == MAX_TOKENS + 6
    answered = embed(texts=texts, truncate=pb.Truncate.Value(f"TRUNCATE_{side.upper()}"))
    assert_alike(grpc_vectors(answered), expected)
    assert (list(answered.truncated), list(answered.token_counts)) == ([1], [3, MAX_TOKENS, 3])


def test_right_truncation_is_that_of_sentence_transformers(
    http: httpx.Client, embed: Embed, reference: Reference
) -> None:
    texts = [" ".join(words(count)) for count in (MAX_TOKENS - 1, 300, 2000)]  # which it cuts by itself
    assert_alike(http_vectors(post(http, input=texts, truncate="right")), reference(texts))
    assert_alike(grpc_vectors(embed(texts=texts, truncate=pb.TRUNCATE_RIGHT)), reference(texts))


def test_texts_that_differ_only_where_they_are_cut_are_both_flagged(http: httpx.Client) -> None:
    beginning = " ".join(words(MAX_TOKENS))
    reply = post(http, input=[f"{beginning} here", f"{beginning} there"], truncate="right")
    assert reply.json()["truncated"] == [0, 1]


def test_text_of_a_megabyte_is_refused_with_its_length(http: httpx.Client) -> None:
    text = "word " * 200_000
    says = ("200002", "256")
    assert_refused(post(http, input=text), "context_length_exceeded", "input[0]", says)


def test_token_ids_are_cut_too(embed: Embed, reference: Reference) -> None:
    hello = 7592
    cut = embed(token_ids=ids([hello] * 300), truncate=pb.TRUNCATE_RIGHT)
    assert list(cut.truncated) == [0]
    assert_alike(grpc_vectors(cut), reference([" ".join(["hello"] * (MAX_TOKENS - 2))]))


@pytest.mark.parametrize(
    "token_ids", [[7592, 2088], [CLS, 7592, 2088, SEP], [CLS, 7592, 2088], [7592, 2088, SEP]], ids=json.dumps
)
def test_special_tokens_are_added_where_they_are_missing(
    http: httpx.Client, embed: Embed, reference: Reference, token_ids: list[int]
) -> None:
    expected = reference(["hello world"])
    reply = post(http, input=token_ids, token_encoding="model")
    assert_alike(http_vectors(reply), expected)
    assert reply.json()["usage"]["total_tokens"] == 4
    assert_alike(grpc_vectors(embed(token_ids=ids(token_ids))), expected)


def test_no_token_ids_are_an_empty_text(http: httpx.Client, embed: Embed, reference: Reference) -> None:
    assert_alike(http_vectors(post(http, input=[[]], token_encoding="model")), reference([""]))
    assert_alike(grpc_vectors(embed(token_ids=ids([]))), reference([""]))


# gRPC: one bad input among good ones

DTYPES = {
    name: pb.OutputDtype.Value(f"OUTPUT_DTYPE_{name.upper()}")
    for name in ("float32", "float16", "int8", "binary", "ubinary")
}
NUMPY_DTYPES = {"float32": "<f4", "float16": "<f2", "int8": "i1", "binary": "i1", "ubinary": "u1"}


def rows_of(reply: pb.EmbedResponse, dtype: str) -> np.ndarray:
    """[count, dims], or [count, dims / 8] of the binary forms, as the protocol says."""
    width = -(-reply.dims // 8) if dtype in ("binary", "ubinary") else reply.dims
    assert reply.output_dtype == DTYPES[dtype]
    return np.frombuffer(reply.vectors, NUMPY_DTYPES[dtype]).reshape(reply.count, width)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_input_is_listed_and_its_row_is_zero(embed: Embed, dtype: str) -> None:
    good = embed(texts=["first", "last"], output_dtype=DTYPES[dtype])
    bad = text_of(MAX_TOKENS + 1)
    reply = embed(texts=["first", bad, bad, "last"], output_dtype=DTYPES[dtype], on_error=pb.ON_ERROR_PER_INPUT)
    assert [(error.index, error.code) for error in reply.errors] == [
        (1, "context_length_exceeded"),
        (2, "context_length_exceeded"),
    ]
    assert all("257" in error.message and f"input {error.index}" in error.message for error in reply.errors)
    assert list(reply.token_counts) == [3, 0, 0, 3]
    rows = rows_of(reply, dtype)
    assert not rows[1:3].any()
    np.testing.assert_array_equal(rows[[0, 3]], rows_of(good, dtype))
    scales = np.frombuffer(reply.scales, "<f4")
    assert len(scales) == (4 if dtype == "int8" else 0)
    assert not scales[1:3].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_request_of_bad_inputs_only_has_zero_rows_only(embed: Embed, dtype: str) -> None:
    reply = embed(token_ids=ids([VOCABULARY], [-1 % 2**32]), output_dtype=DTYPES[dtype], on_error=pb.ON_ERROR_PER_INPUT)
    assert [(error.index, error.code) for error in reply.errors] == [(0, "invalid_token_id"), (1, "invalid_token_id")]
    assert (reply.count, reply.dims, list(reply.token_counts)) == (2, DIMS, [0, 0])
    assert not rows_of(reply, dtype).any()
    assert len(reply.scales) == (8 if dtype == "int8" else 0)


def test_bad_inputs_of_each_kind_are_listed_beside_a_cut_one(embed: Embed, reference: Reference) -> None:
    reply = embed(
        token_ids=ids([7592, 2088], [VOCABULARY], [7592] * 300, []),
        truncate=pb.TRUNCATE_RIGHT,
        on_error=pb.ON_ERROR_PER_INPUT,
    )
    assert [(error.index, error.code) for error in reply.errors] == [(1, "invalid_token_id")]
    assert (list(reply.truncated), list(reply.token_counts)) == ([2], [4, 0, MAX_TOKENS, 2])
    expected = reference(["hello world", " ".join(["hello"] * (MAX_TOKENS - 2)), ""])
    assert_alike(grpc_vectors(reply)[[0, 2, 3]], expected)


def test_mistake_in_the_request_itself_fails_it_whole(embed: Embed) -> None:
    failure = embed.failure(texts=["x"], dimensions=0, on_error=pb.ON_ERROR_PER_INPUT)
    assert_failed(failure, "invalid_value", "dimensions")


# Outputs, computed again from the float32 reply

SENTENCES = ["a", "the quick brown fox", GOOD_TEXT, "北京天安门", text_of(100), text_of(MAX_TOKENS), ""]


@pytest.fixture(scope="module", params=[None, DIMS, 256, 64, 12, 8, 1])
def dimensions(request: pytest.FixtureRequest) -> int | None:
    return request.param


@pytest.fixture(scope="module")
def float32(embed: Embed, dimensions: int | None) -> np.ndarray:
    return grpc_vectors(embed(texts=SENTENCES, dimensions=dimensions))


def outputs(embed: Embed, dimensions: int | None, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows and scales."""
    reply = embed(texts=SENTENCES, dimensions=dimensions, output_dtype=DTYPES[dtype])
    assert (reply.count, reply.dims) == (len(SENTENCES), dimensions or DIMS)
    return rows_of(reply, dtype), np.frombuffer(reply.scales, "<f4")


def test_cut_vector_is_the_whole_one_cut_and_normalised(
    embed: Embed, http: httpx.Client, float32: np.ndarray, dimensions: int | None
) -> None:
    cut = grpc_vectors(embed(texts=SENTENCES))[:, : dimensions or DIMS]
    np.testing.assert_allclose(float32, cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(float32.astype(np.float64), axis=1), 1, rtol=0, atol=1e-6)
    reply = post(http, input=SENTENCES, dimensions=dimensions)
    np.testing.assert_allclose(http_vectors(reply), float32, rtol=0, atol=1e-6)


def test_float16_is_float32_rounded(embed: Embed, float32: np.ndarray, dimensions: int | None) -> None:
    rows, _ = outputs(embed, dimensions, "float16")
    np.testing.assert_allclose(rows.astype(np.float32), float32, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(rows.astype(np.float64), axis=1), 1, rtol=0, atol=1e-3)


def test_int8_is_float32_over_the_scale_of_its_row(embed: Embed, float32: np.ndarray, dimensions: int | None) -> None:
    rows, scales = outputs(embed, dimensions, "int8")
    np.testing.assert_allclose(scales, np.abs(float32).max(axis=1) / 127, rtol=1e-6)
    assert (np.abs(rows.astype(np.int32)).max(axis=1) == 127).all()
    error = np.abs(rows * scales[:, None] - float32)
    assert (error <= 0.501 * scales[:, None]).all()


@pytest.mark.parametrize("dtype", ["binary", "ubinary"])
def test_binary_forms_are_the_signs_packed(
    embed: Embed, float32: np.ndarray, dimensions: int | None, dtype: str
) -> None:
    rows, _ = outputs(embed, dimensions, dtype)
    packed = np.packbits(float32 > 0, axis=1)
    expected = packed if dtype == "ubinary" else (packed.astype(np.int16) - 128).astype(np.int8)
    np.testing.assert_array_equal(rows, expected)
    if float32.shape[1] % 8 == 0:  # sentence-transformers has no other
        np.testing.assert_array_equal(rows, quantize_embeddings(float32, dtype))


def test_rows_left_unnormalised_point_the_same_way(embed: Embed, http: httpx.Client, reference: Reference) -> None:
    rows = grpc_vectors(embed(texts=SENTENCES, normalize=False))
    assert_alike(rows, reference(SENTENCES))
    assert (np.abs(np.linalg.norm(rows, axis=1) - 1) > 0.01).all()
    np.testing.assert_allclose(http_vectors(post(http, input=SENTENCES, normalize=False)), rows, rtol=1e-5, atol=1e-6)


# What is echoed, and to whom


@pytest.mark.parametrize(
    "request_id", ["", "7", "a b\n\0", "ключ-é-北京", "x" * 100_000], ids=["none", "7", "odd", "é", "long"]
)
def test_request_id_is_echoed(embed: Embed, request_id: str) -> None:
    assert embed(texts=["x"], request_id=request_id).request_id == request_id


def test_requests_of_one_id_in_flight_are_each_answered_to_their_caller(
    server: Server, embed: Embed, reference: Reference
) -> None:
    texts = [f"{first} {second}" for first in WORDS for second in WORDS[:3]]
    with grpc.insecure_channel(server.grpc_target, options=ANY_SIZE + OWN_CONNECTION) as other:
        callers = [embed, Embed(other)]
        calls = [callers[i % 2].start(texts=[text], request_id="same") for i, text in enumerate(texts)]
        replies = [pb.EmbedResponse.FromString(call.result()) for call in calls]
    assert {reply.request_id for reply in replies} == {"same"}
    assert_alike(np.concatenate([grpc_vectors(reply) for reply in replies]), reference(texts))


def test_right_space_and_model_are_served_and_named(embed: Embed, http: httpx.Client) -> None:
    plain = embed(texts=["x"])
    assert plain.space_id
    assert plain.numerics_id
    reply = embed(texts=["x"], expect_space=plain.space_id, model=MODEL)
    assert (reply.model, reply.space_id, reply.numerics_id) == (MODEL, plain.space_id, plain.numerics_id)
    body = post(http, input="x", expect_space=plain.space_id, model=MODEL).json()
    assert (body["model"], body["space_id"], body["numerics_id"]) == (MODEL, plain.space_id, plain.numerics_id)
    assert body["object"] == "list"
    assert body["data"][0]["object"] == "embedding"


def test_stages_of_a_request_are_timed(embed: Embed, http: httpx.Client) -> None:
    times = embed(texts=[text_of(MAX_TOKENS)]).times  # one batch; of several it would report the sums
    stages = (times.tokenize_ms, times.queue_ms, times.forward_ms, times.pack_ms, times.reply_ms)
    assert min(stages) >= 0
    assert times.forward_ms > 0
    assert 0 < max(stages) <= times.total_ms
    told = dict(part.split(";dur=") for part in post(http, input="x").headers["server-timing"].split(", "))
    assert list(told) == ["tokenize", "queue", "forward", "pack", "reply", "total"]
    assert 0 < float(told["forward"]) <= float(told["total"])


# A server with limits of its own


@pytest.fixture(scope="module")
def limited() -> Iterator[Server]:
    flags = (
        *("--token-ids", "model", "--auto-truncate", "--max-batch-tokens", "64", "--max-queued-tokens", "3000"),
        *("--max-inputs", "100", "--max-body-mb", "0.1", "--served-model-name", "small", "tiny"),
    )
    with start_server(*flags) as started:
        yield started


@pytest.fixture(scope="module")
def limited_http(limited: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=limited.http_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def limited_embed(limited: Server) -> Iterator[Embed]:
    with grpc.insecure_channel(limited.grpc_target, options=ANY_SIZE + OWN_CONNECTION) as channel:
        yield Embed(channel)


def test_token_ids_are_taken_where_the_server_says_whose_they_are(
    limited_http: httpx.Client, reference: Reference
) -> None:
    expected = reference(["hello world", "hello"])
    assert_alike(http_vectors(post(limited_http, input=[[7592, 2088], [7592]])), expected)
    assert_alike(http_vectors(post(limited_http, input=[7592, 2088])), expected[:1])
    reply = post(limited_http, input=[[100_257, 9906, 1917]])
    assert_refused(reply, "invalid_token_id", "input[0]", ("100257", str(VOCABULARY - 1)))


def test_auto_truncate_cuts_and_says_so_unless_the_request_forbids_it(
    limited_http: httpx.Client, limited_embed: Embed, reference: Reference
) -> None:
    text = text_of(MAX_TOKENS + 50)
    reply = post(limited_http, input=["x", text])
    assert_alike(http_vectors(reply), reference(["x", text]))
    assert reply.json()["truncated"] == [1]
    assert list(limited_embed(texts=["x", text]).truncated) == [1]
    reply = post(limited_http, input=["x", text], truncate="none")
    assert_refused(reply, "context_length_exceeded", "input[1]")
    failure = limited_embed.failure(texts=["x", text], truncate=pb.TRUNCATE_NONE)
    assert_failed(failure, "context_length_exceeded", "texts[1]")


def test_inputs_larger_than_a_batch_are_served_alone(
    limited_http: httpx.Client, limited_embed: Embed, reference: Reference
) -> None:
    texts = [text_of(count) for count in (MAX_TOKENS, 3, 65, 64, 10, 200, 3, 3)]
    assert_alike(http_vectors(post(limited_http, input=texts)), reference(texts))
    assert_alike(grpc_vectors(limited_embed(texts=texts)), reference(texts))


def test_request_that_never_fits_the_queue_is_refused_for_good(
    limited_http: httpx.Client, limited_embed: Embed, good_vector: np.ndarray
) -> None:
    texts = [text_of(31)] * 100
    says = ("3100", "3000", "--max-queued-tokens")
    assert_refused(post(limited_http, input=texts), "request_too_large", None, says)
    assert_failed(limited_embed.failure(texts=texts), "request_too_large", None, says)
    assert_alike(http_vectors(post(limited_http, input=GOOD_TEXT)), good_vector)
    assert len(http_vectors(post(limited_http, input=[text_of(30)] * 100))) == 100  # exactly what fits


def test_limits_are_those_of_the_flags(limited_http: httpx.Client, limited_embed: Embed) -> None:
    says = ("101", "100", "--max-inputs")
    assert_refused(post(limited_http, input=["x"] * 101), "invalid_value", "input", says)
    assert_failed(limited_embed.failure(texts=["x"] * 101), "invalid_value", "texts", says)
    empty = b'{"input": ""}'
    body = empty.replace(b'""', b'"' + b"x" * (100_000 - len(empty)) + b'"')
    assert limited_http.post("/v1/embeddings", content=body).status_code == 200  # exactly what is allowed
    reply = limited_http.post("/v1/embeddings", content=body + b" ")
    assert_refused(reply, "body_too_large", None, ("100001", "100000"))
    failure = limited_embed.failure(texts=["x" * 200_000])
    assert (failure.status, failure.pushback_ms) == (grpc.StatusCode.RESOURCE_EXHAUSTED, None)


def test_names_are_those_of_the_flag_and_no_other(limited_http: httpx.Client, limited_embed: Embed) -> None:
    for name in ("small", "tiny"):
        assert post(limited_http, input="x", model=name).json()["model"] == name
        assert limited_embed(texts=["x"], model=name).model == name
    assert post(limited_http, input="x").json()["model"] == "small"
    assert_refused(post(limited_http, input="x", model=MODEL), "model_not_found", "model", ("small", "tiny"))
    assert [model["id"] for model in limited_http.get("/v1/models").json()["data"]] == ["small", "tiny"]
