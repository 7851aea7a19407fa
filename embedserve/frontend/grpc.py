"""The gRPC edge: embedserve.v1.Embedding, standard health and reflection. Starts and stops it.

Knows ports and servers; what a method answers is in grpc_handlers.py.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from embedserve.frontend.grpc_handlers import Handlers
from embedserve.frontend.service import Service
from embedserve.v1 import embedding_pb2 as pb

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Embedding"].full_name
FLUSH_S = 0.5
KEEPALIVE_MS = 30_000
MESSAGE_OVERHEAD_BYTES = 64 * 1024  # of field tags around a body of --max-body-mb

if TYPE_CHECKING:
    HealthContext = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class GrpcServer:
    """One frontend's gRPC server. The port is shared with the other frontends (SO_REUSEPORT)."""

    def __init__(self, service: Service) -> None:
        self._service = service
        limit = service.config.max_body_bytes + MESSAGE_OVERHEAD_BYTES
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 1),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),  # a client that vanished holds its calls no longer
            ]
        )
        self._stopping = asyncio.get_running_loop().create_future()
        self._health = _Health(self._stopping)
        handlers = Handlers(service, self._stopping)
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Embed": grpc.unary_unary_rpc_method_handler(handlers.embed),
            "EmbedStream": grpc.stream_stream_rpc_method_handler(handlers.embed_stream),
            "Tokenize": grpc.unary_unary_rpc_method_handler(handlers.tokenize),
            "GetModel": grpc.unary_unary_rpc_method_handler(handlers.get_model),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, methods),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self, host: str, port: int) -> None:
        bound = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        assert bound == port, f"asked for port {port}, got {bound}"
        await self._server.start()

    async def show_health(self, serving: bool) -> None:
        """What standard health checks answer, for the server as a whole and for the service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Accept nothing new, on streams neither; what is in flight has `grace_s` seconds.

        The last replies may still lie in the transport when gRPC says that it has stopped, and a process that ends
        then resets their connections.
        """
        self._stopping.set_result(None)
        await self._server.stop(grace_s)
        await asyncio.sleep(FLUSH_S)


def _is_of_our_making(record: logging.LogRecord) -> bool:
    """grpc logs a traceback for each client that left before its reply was sent, which is no error."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_of_our_making)


class _Health(health.aio.HealthServicer):
    """The standard one, whose watches end when the server stops: they last as long as their channels otherwise."""

    def __init__(self, stopping: asyncio.Future[None]) -> None:
        super().__init__()
        self._stopping = stopping

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: HealthContext) -> None:  # noqa: N802
        watching = asyncio.ensure_future(super().Watch(request, context))
        try:
            await asyncio.wait((watching, self._stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
