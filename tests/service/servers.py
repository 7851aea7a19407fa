"""A server as a real process, and plain ways to talk to it: bytes over a socket, messages over a channel.
Knows the command line and both protocols, and must not know how the server is made.
"""

from __future__ import annotations

import base64
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import grpc
import httpx
import numpy as np
import psutil

from embedserve.v1 import embedding_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Reference = Callable[[list[str]], np.ndarray]

READY_WITHIN_S = 60
STOPPED_WITHIN_S = 60
READY_LINE = re.compile(r"(http://\S+) and grpc (\S+)\n")
EMBED_METHOD = "/embedserve.v1.Embedding/Embed"
ANY_SIZE = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)  # not the one that other channels of this process have
LEAST_COSINE = 0.9995  # to sentence-transformers in float32; the default dtype here may be bfloat16


@dataclass(frozen=True)
class Server:
    http_url: str
    grpc_target: str
    process: subprocess.Popen[str]
    stderr: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def http_address(self) -> tuple[str, int]:
        url = httpx.URL(self.http_url)
        assert url.port is not None
        return url.host, url.port

    def children(self, title: str) -> list[psutil.Process]:
        """Its processes whose title begins so: "embedserve: frontend", "embedserve: engine"."""
        return [child for child in psutil.Process(self.pid).children() if _title(child).startswith(title)]

    def wait(self, timeout: float) -> int:
        """The exit status, when it has ended."""
        return self.process.wait(timeout)


def _title(process: psutil.Process) -> str:
    """Empty for one that is no more."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie is none either
        return ""


@contextmanager
def start_server(*flags: str) -> Iterator[Server]:
    """`python -m embedserve serve` on free ports, in a process of its own: up when the block begins, gone when it ends.

    It must come up within a minute. Unless the block has ended it, it must exit with status 0 on SIGTERM and have no
    traceback in its log.
    """
    command = [sys.executable, "-m", "embedserve", "serve", "--http-port", "0", "--grpc-port", "0", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EMBEDSERVE_")}
    with tempfile.TemporaryDirectory(prefix="embedserve-test-") as folder:
        stderr = Path(folder, "server.log")
        with stderr.open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        try:
            yield Server(*read_addresses(process, stderr), process, stderr)
            if process.poll() is None:
                process.terminate()
                assert process.wait(STOPPED_WITHIN_S) == 0, stderr.read_text()
                assert "Traceback" not in stderr.read_text(), stderr.read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def read_addresses(process: subprocess.Popen[str], stderr: Path) -> tuple[str, str]:
    """The HTTP address and the gRPC address of the line that says that the server is ready."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], READY_WITHIN_S)
    line = process.stdout.readline() if readable else ""
    found = READY_LINE.search(line)
    assert found, f"not ready after {READY_WITHIN_S} s, or ended: {line!r}\n{stderr.read_text()}"
    return found[1], found[2]


@dataclass(frozen=True)
class Reply:
    """One HTTP response, as read from a socket."""

    status: int
    headers: dict[str, str]
    body: bytes


class Socket:
    """A TCP connection to the HTTP port, for what an HTTP library would not send. A context manager."""

    def __init__(self, server: Server) -> None:
        self._socket = socket.create_connection(server.http_address, timeout=30)
        self._file: IO[bytes] = self._socket.makefile("rb")

    @property
    def port(self) -> int:
        """Ours, by which the other end can be found."""
        return int(self._socket.getsockname()[1])

    def send(self, *pieces: bytes) -> Socket:
        for piece in pieces:
            self._socket.sendall(piece)
        return self

    def send_while_taken(self, message: bytes, seconds: float) -> int:
        """Again and again for so long, without reading; how many bytes the other end took."""
        deadline, sent, left = time.monotonic() + seconds, 0, b""
        self._socket.setblocking(False)
        while time.monotonic() < deadline:
            left = left or message
            try:
                taken = self._socket.send(left)
            except BlockingIOError:
                time.sleep(0.01)
            else:
                sent, left = sent + taken, left[taken:]
        return sent

    def end_sending(self) -> Socket:
        self._socket.shutdown(socket.SHUT_WR)
        return self

    def reset(self) -> None:
        """Close as a process that is killed closes: the other end reads "connection reset"."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close()

    def read_reply(self) -> Reply:
        status_line = self._file.readline()
        assert status_line.startswith(b"HTTP/1.1 "), status_line
        headers = {}
        while (line := self._file.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return Reply(int(status_line.split()[1]), headers, self._file.read(int(headers.get("content-length", 0))))

    def read_to_end(self) -> bytes:
        """What comes until the server closes."""
        return self._file.read()

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def http_message(body: bytes, *headers: str, method: str = "POST", path: str = "/v1/embeddings") -> bytes:
    """A request with its Content-Length."""
    lines = [f"{method} {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def http_head(*headers: str) -> bytes:
    """The head of a POST to the embeddings, with just these headers."""
    return "\r\n".join(["POST /v1/embeddings HTTP/1.1", "Host: test", *headers, "", ""]).encode()


def http_vectors(reply: httpx.Response | Reply) -> np.ndarray:
    """float32 [inputs, dims], from either encoding, in the order of their index. The reply must be a good one."""
    content = reply.content if isinstance(reply, httpx.Response) else reply.body
    status = reply.status_code if isinstance(reply, httpx.Response) else reply.status
    assert status == 200, content
    items = httpx.Response(200, content=content).json()["data"]
    assert [item["index"] for item in items] == list(range(len(items)))
    return np.array([_vector(item["embedding"]) for item in items], np.float32)


def _vector(embedding: str | list[float]) -> np.ndarray:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
    return np.array(embedding, np.float32)


@dataclass(frozen=True)
class Failure:
    """How a gRPC call failed; `code` and `param` are its trailing metadata."""

    status: grpc.StatusCode
    message: str
    code: str | None
    param: str | None
    pushback_ms: str | None


class Embed:
    """The Embed method over a channel: a message, the fields of one, or any bytes at all."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._call = channel.unary_unary(EMBED_METHOD)

    def __call__(self, **fields: Any) -> pb.EmbedResponse:
        """Raises grpc.RpcError."""
        return self.reply_to(pb.EmbedRequest(**fields).SerializeToString())

    def reply_to(self, message: bytes, **options: Any) -> pb.EmbedResponse:
        return pb.EmbedResponse.FromString(self._call(message, timeout=60, **options))

    def start(self, **fields: Any) -> Any:
        """The call's future; its result is the reply's bytes."""
        return self._call.future(pb.EmbedRequest(**fields).SerializeToString(), timeout=60)

    def failure(self, message: bytes | None = None, **fields: Any) -> Failure:
        """How the server refuses this message, or the message of these fields."""
        try:
            reply = self.reply_to(pb.EmbedRequest(**fields).SerializeToString() if message is None else message)
        except grpc.RpcError as error:
            return failure_of(error)
        raise AssertionError(f"answered, with {reply.count} rows")


def failure_of(error: grpc.RpcError) -> Failure:
    assert isinstance(error, grpc.Call)
    told = dict(error.trailing_metadata() or ())
    return Failure(
        error.code(),
        error.details() or "",
        told.get("embedserve-code"),
        told.get("embedserve-param"),
        told.get("grpc-retry-pushback-ms"),
    )


def grpc_vectors(reply: pb.EmbedResponse) -> np.ndarray:
    """float32 [count, dims] of a reply of that dtype."""
    assert reply.output_dtype == pb.OUTPUT_DTYPE_FLOAT32
    return np.frombuffer(reply.vectors, "<f4").reshape(reply.count, reply.dims)


def assert_alike(vectors: np.ndarray, expected: np.ndarray) -> None:
    """Row by row the same direction, to what the model's dtype allows."""
    assert vectors.shape == expected.shape
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = (vectors * expected).sum(axis=1) / lengths
    assert cosines.min() >= LEAST_COSINE, (int(cosines.argmin()), float(cosines.min()))


@contextmanager
def connections_to_each_frontend(server: Server) -> Iterator[list[Socket]]:
    """One HTTP connection to each frontend. The kernel deals them out by chance, so many are opened."""
    frontends = server.children("embedserve: frontend")
    with ExitStack() as opened:
        sockets = [opened.enter_context(Socket(server)) for _ in range(32)]
        for each in sockets:
            each.send(http_message(b"", method="GET", path="/health"))
            assert each.read_reply().status == 200  # so it has been accepted
        ports = [ports_connected_to(frontend) for frontend in frontends]
        yield [next(each for each in sockets if each.port in theirs) for theirs in ports]


def ports_connected_to(process: psutil.Process) -> set[int]:
    return {connection.raddr.port for connection in process.net_connections("tcp") if connection.raddr}
