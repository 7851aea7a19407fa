"""OpenAI's own client, unmodified, against the server.
Knows that client and, as the oracle, sentence-transformers; must not know what is on the wire.
"""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest
from servers import assert_alike

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import Reference, Server

MODEL, DIMS = "all-MiniLM-L6-v2", 384
TEXTS = ["The quick brown fox jumps over the lazy dog.", "", "  a text with blanks around ", "北京天安门 🙂"]


@pytest.fixture(scope="module")
def settings(server: Server) -> dict[str, Any]:
    return {"base_url": f"{server.http_url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}


@pytest.fixture(scope="module")
def client(settings: dict[str, Any]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(**settings) as client:
        yield client


def vectors_of(response: openai.types.CreateEmbeddingResponse) -> np.ndarray:
    """float32 [inputs, dims]"""
    assert response.object == "list"
    assert [item.index for item in response.data] == list(range(len(response.data)))
    assert {item.object for item in response.data} == {"embedding"}
    return np.array([item.embedding for item in response.data], np.float32)


def test_list_of_texts_has_the_vectors_of_sentence_transformers(client: openai.OpenAI, reference: Reference) -> None:
    assert_alike(vectors_of(client.embeddings.create(input=TEXTS, model=MODEL)), reference(TEXTS))


def test_single_text_has_its_vector(client: openai.OpenAI, reference: Reference) -> None:
    assert_alike(vectors_of(client.embeddings.create(input=TEXTS[0], model=MODEL)), reference(TEXTS[:1]))


def test_base64_and_float_are_the_same_numbers(client: openai.OpenAI) -> None:
    by_default = client.embeddings.create(input=TEXTS, model=MODEL)  # which asks for base64
    as_floats = client.embeddings.create(input=TEXTS, model=MODEL, encoding_format="float")
    assert all(isinstance(value, float) for item in as_floats.data for value in item.embedding)
    np.testing.assert_array_equal(vectors_of(by_default).view(np.uint32), vectors_of(as_floats).view(np.uint32))


def test_base64_asked_for_is_little_endian_float32(client: openai.OpenAI) -> None:
    encoded = client.embeddings.create(input="x", model=MODEL, encoding_format="base64").data[0].embedding
    floats = client.embeddings.create(input="x", model=MODEL, encoding_format="float")
    assert isinstance(encoded, str)  # whoever asks for it decodes it
    decoded = np.frombuffer(base64.b64decode(encoded), "<f4")
    np.testing.assert_array_equal(decoded, vectors_of(floats)[0])


@pytest.mark.parametrize("dimensions", [1, 100, 128, DIMS])
def test_fewer_dimensions_are_the_whole_vector_cut_and_normalised(client: openai.OpenAI, dimensions: int) -> None:
    whole = vectors_of(client.embeddings.create(input=TEXTS, model=MODEL))
    cut = vectors_of(client.embeddings.create(input=TEXTS, model=MODEL, dimensions=dimensions))
    expected = whole[:, :dimensions] / np.linalg.norm(whole[:, :dimensions], axis=1, keepdims=True)
    np.testing.assert_allclose(cut, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(cut.astype(np.float64), axis=1), 1, rtol=0, atol=1e-6)


def test_usage_counts_the_tokens_of_all_inputs(client: openai.OpenAI) -> None:
    response = client.embeddings.create(input=["hello world", "", "hello"], model=MODEL)
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (4 + 2 + 3, 4 + 2 + 3)
    assert response.model == MODEL


def test_fields_beyond_openais_go_in_and_come_out(client: openai.OpenAI) -> None:
    long = "word " * 1000
    response = client.embeddings.create(
        input=["short", long], model=MODEL, user="someone", extra_body={"truncate": "right", "lane": "bulk"}
    )
    assert response.model_extra is not None
    assert response.model_extra["truncated"] == [1]
    assert response.model_extra["space_id"]


def test_served_model_is_listed_and_retrieved(client: openai.OpenAI) -> None:
    (listed,) = client.models.list().data
    assert (listed.id, listed.object, listed.owned_by) == (MODEL, "model", "embedserve")
    assert listed.created > 1_700_000_000
    assert client.models.retrieve(MODEL) == listed
    assert listed.model_extra is not None
    assert (listed.model_extra["dimensions"], listed.model_extra["max_input_tokens"]) == (DIMS, 256)


@pytest.mark.parametrize(
    ("request_", "param", "code"),
    [
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["x", "word " * 1000]}, "input[1]", "context_length_exceeded"),
        ({"input": [[100257, 9906]]}, "input", "token_ids_refused"),
        ({"input": "x", "dimensions": DIMS + 1}, "dimensions", "invalid_value"),
        ({"input": "x", "encoding_format": "float16"}, "encoding_format", "invalid_value"),
    ],
    ids=["no input", "too long", "token ids", "dimensions", "format"],
)
def test_mistake_raises_bad_request(client: openai.OpenAI, request_: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model=MODEL, **request_)
    error = raised.value
    assert (error.status_code, error.type, error.param, error.code) == (400, "invalid_request_error", param, code)
    assert isinstance(error.body, dict)
    assert error.body["message"] in error.message


def test_unknown_model_raises_not_found(client: openai.OpenAI) -> None:
    for call in (
        lambda: client.embeddings.create(input="x", model="text-embedding-3-small"),
        lambda: client.models.retrieve("text-embedding-3-small"),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            call()
        assert (raised.value.status_code, raised.value.param, raised.value.code) == (404, "model", "model_not_found")
        assert "text-embedding-3-small" in raised.value.message


def test_other_endpoints_of_openai_raise_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    assert raised.value.code == "unknown_url"


def test_body_too_large_raises_and_the_client_serves_on(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        client.embeddings.create(input="x" * 40_000_000, model=MODEL)
    assert (raised.value.status_code, raised.value.code) == (413, "body_too_large")
    assert client.embeddings.create(input="x", model=MODEL).usage.total_tokens == 3


def test_async_client_gets_what_the_sync_client_gets(client: openai.OpenAI, settings: dict[str, Any]) -> None:
    async def ask() -> tuple[list[openai.types.CreateEmbeddingResponse], list[str]]:
        async with openai.AsyncOpenAI(**settings) as asynchronous:
            with pytest.raises(openai.BadRequestError):
                await asynchronous.embeddings.create(input=[], model=MODEL)
            with pytest.raises(openai.NotFoundError):
                await asynchronous.models.retrieve("nothing")
            calls = [asynchronous.embeddings.create(input=text, model=MODEL) for text in TEXTS]
            calls += [asynchronous.embeddings.create(input=TEXTS, model=MODEL, encoding_format="float")]
            return await asyncio.gather(*calls), [model.id async for model in asynchronous.models.list()]

    responses, names = asyncio.run(ask())
    assert names == [MODEL]
    expected = vectors_of(client.embeddings.create(input=TEXTS, model=MODEL))
    assert_alike(np.concatenate([vectors_of(each) for each in responses[:-1]]), expected)
    assert_alike(vectors_of(responses[-1]), expected)
