"""The gRPC edge: embedserve.v1.Embedding, standard health and reflection. Translates; decides nothing.

Handlers take raw bytes and parse inside: the generated servicer would answer UNKNOWN to a message it cannot decode.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from embedserve import metrics
from embedserve.errors import EmbedserveError, InvalidInput, Overloaded, ServerError, shortened
from embedserve.frontend.call import EmbedCall, EmbedResult
from embedserve.frontend.service import Service
from embedserve.messages import Lane
from embedserve.v1 import embedding_pb2 as pb
from embedserve_kernels.output_layout import OutputDtype

log = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Embedding"].full_name
FLUSH_S = 0.5
MESSAGE_OVERHEAD_BYTES = 64 * 1024  # of field tags around a body of --max-body-mb

INPUT_TYPES = {0: None, 1: "query", 2: "document"}
TRUNCATES = {0: None, 1: "none", 2: "left", 3: "right"}
LANES = {0: None, 1: Lane.QUERY, 2: Lane.BULK}
ON_ERRORS = {0: False, 1: False, 2: True}
OUTPUT_DTYPES = {0: OutputDtype.FLOAT32, **{int(dtype): dtype for dtype in OutputDtype}}

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[bytes, bytes]
M = TypeVar("M", bound=Message)
T = TypeVar("T")


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
            ]
        )
        self._health = health.aio.HealthServicer()
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            "Embed": grpc.unary_unary_rpc_method_handler(_Handlers(service).embed)
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
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
        """Accept nothing new; what is in flight has `grace_s` seconds.

        The last replies may still lie in the transport when gRPC says that it has stopped, and a process that ends
        then resets their connections.
        """
        await self._server.stop(grace_s)
        await asyncio.sleep(FLUSH_S)


class _Handlers:
    """The methods of embedserve.v1.Embedding: message bytes in, message bytes out."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embed(self, body: bytes, context: Context) -> bytes:
        started = time.monotonic()
        code, lane = "INTERNAL", "none"
        try:
            with self._service.admit_bytes() as hold:
                hold(len(body))
                request = parse(pb.EmbedRequest, body)
                result = await self._service.embed(embed_call(request))
                reply: bytes = embed_response(request, result, self._service).SerializeToString()
            code, lane = "OK", result.lane.name.lower()
            return reply
        except EmbedserveError as error:
            code = error.grpc_code
            await abort(context, error)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except Exception as error:  # the outermost frame of a call: grpc would answer UNKNOWN with the bare exception
            log.error("a call failed", exc_info=error)
            await abort(context, ServerError("the server failed to handle this request; its log says why"))
        finally:
            metrics.REQUESTS.labels("grpc", code).inc()
            metrics.REQUEST_SECONDS.labels("grpc", lane).observe(time.monotonic() - started)


def parse(kind: type[M], body: bytes) -> M:
    """Raises InvalidInput where the bytes are no such message (invalid UTF-8 included)."""
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise InvalidInput(
            f"the message is not a valid {kind.DESCRIPTOR.full_name} (truncated, or a string that is not UTF-8)."
        ) from error


async def abort(context: Context, error: EmbedserveError) -> NoReturn:
    """End the call with the error's status; its code and field travel as trailing metadata, and when to try again."""
    trailing: list[tuple[str, str]] = []
    if error.code:
        trailing.append(("embedserve-code", error.code))
    if error.param:
        trailing.append(("embedserve-param", error.param))
    if isinstance(error, Overloaded):
        trailing.append(("grpc-retry-pushback-ms", str(int(error.retry_after_s * 1000))))
    await context.abort(grpc.StatusCode[error.grpc_code], shortened(error.message), tuple(trailing))
    raise AssertionError("abort returned")


def embed_call(request: pb.EmbedRequest) -> EmbedCall:
    """The service's form of a request. Raises InvalidInput."""
    if request.texts and request.token_ids:
        raise InvalidInput("set texts or token_ids, not both.", param="token_ids")
    token_ids = [inputs.ids for inputs in request.token_ids] if request.token_ids else None
    return EmbedCall(
        field="texts" if token_ids is None else "token_ids",
        texts=list(request.texts) if token_ids is None else None,
        token_ids=token_ids,
        model=request.model,
        input_type=_enum("input_type", request.input_type, INPUT_TYPES),
        prompt_name=request.prompt_name if request.HasField("prompt_name") else None,
        instruction=request.instruction if request.HasField("instruction") else None,
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        dtype=_enum("output_dtype", request.output_dtype, OUTPUT_DTYPES),
        normalize=request.normalize if request.HasField("normalize") else None,
        truncate=_enum("truncate", request.truncate, TRUNCATES),
        lane=_enum("lane", request.lane, LANES),
        per_input_errors=_enum("on_error", request.on_error, ON_ERRORS),
        expect_space=request.expect_space,
    )


def embed_response(request: pb.EmbedRequest, result: EmbedResult, service: Service) -> pb.EmbedResponse:
    card, times = result.card, result.times
    return pb.EmbedResponse(
        vectors=bytes(result.vectors),
        count=result.count,
        dims=result.dims,
        output_dtype=int(result.dtype),  # type: ignore[arg-type]  # the numbers are the wire's
        scales=bytes(result.scales),
        token_counts=result.token_counts.tolist(),
        truncated=result.truncated,
        errors=[
            pb.InputError(index=index, code=error.code or "", message=error.message)
            for index, error in sorted(result.errors.items())
        ],
        model=request.model or service.served_names[0],
        space_id=card.space_id,
        numerics_id=card.numerics_id,
        request_id=request.request_id,
        times=pb.StageTimes(
            tokenize_ms=times.tokenize_ms,
            queue_ms=times.queue_ms,
            forward_ms=times.forward_ms,
            pack_ms=times.pack_ms,
            reply_ms=times.reply_ms,
            total_ms=times.total_ms,
        ),
    )


def _enum(name: str, value: int, known: dict[int, T]) -> T:
    if value not in known:
        raise InvalidInput(f"{name} is {value}; it must be one of {', '.join(map(str, known))}.", param=name)
    return known[value]
