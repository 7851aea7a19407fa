"""One virtual client over gRPC: unary Embed calls, one at a time, over a channel that it shares with others.
Takes messages already serialised and parses none of their replies."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from embedserve.v1 import embedding_pb2
from loadtest.load import LoadError
from loadtest.samples import OK

if TYPE_CHECKING:
    from loadtest.load import Target

EMBED = "/embedserve.v1.Embedding/Embed"
GET_MODEL = "/embedserve.v1.Embedding/GetModel"
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # or all channels would share one connection
    ("grpc.enable_http_proxy", 0),
)


class GrpcClient:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._embed: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EMBED)
        self.message = ""  # of the last request that failed

    async def request(self, request: bytes, timeout_s: float) -> tuple[int, float]:
        """The code and the time.monotonic() at which the reply came. Raises nothing."""
        try:
            await self._embed(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            self.message = error.details() or ""
            return error.code().value[0], monotonic()
        return OK, monotonic()

    async def close(self) -> None:
        await self._channel.close()


def open_channels(target: Target, count: int) -> list[grpc.aio.Channel]:
    return [grpc.aio.insecure_channel(target.authority, options=CHANNEL_OPTIONS) for _ in range(count)]


def max_input_tokens(target: Target, model: str | None) -> int | None:
    """As GetModel tells it; None when the server has no such method."""
    with grpc.insecure_channel(target.authority, options=CHANNEL_OPTIONS) as channel:
        get_model: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(GET_MODEL)
        try:
            reply = get_model(embedding_pb2.GetModelRequest(model=model or "").SerializeToString(), timeout=10)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise LoadError(f"GetModel on {target}: {error.details()} Is the server ready?") from error
        return embedding_pb2.GetModelResponse.FromString(reply).max_input_tokens or None
