"""Every error a client can meet, drawn as one tree by what the caller can do about it.
Knows statuses and trailing metadata, and must not know which call or transport raised them.

EmbedError
├── BadRequest          ValueError       change the request: INVALID_ARGUMENT, or refused before it was sent
├── RequestTooLarge     ValueError       send less at once: RESOURCE_EXHAUSTED without pushback
├── ModelNotFound       LookupError      NOT_FOUND
├── SpaceMismatch       ValueError       the server's vectors do not compare with yours: FAILED_PRECONDITION
├── Overloaded                           try again after `retry_after_s`: RESOURCE_EXHAUSTED with pushback
├── RequestTimeout      TimeoutError     DEADLINE_EXCEEDED
├── Unavailable         ConnectionError  nobody answers at the target: UNAVAILABLE
└── ServerError                          a fault of the server: INTERNAL, UNKNOWN, or a reply that makes no sense
Any other status raises EmbedError itself.
"""

from __future__ import annotations

import grpc

CODE_KEY = "embedserve-code"
PARAM_KEY = "embedserve-param"
PUSHBACK_KEY = "grpc-retry-pushback-ms"


class EmbedError(Exception):
    """What went wrong, in a sentence that says what came, what is allowed and what to change.

    `code` is the server's word for it, as "context_length_exceeded"; `param` names the field, as "texts[3]"; both are
    None where nobody gave one. `grpc_status` is None when the request was never sent.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        grpc_status: grpc.StatusCode | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.grpc_status = grpc_status


class BadRequest(EmbedError, ValueError):
    """The request is wrong and will be wrong again. The message says what is allowed."""


class RequestTooLarge(EmbedError, ValueError):
    """The request is more than the server ever takes at once. The message says how much that is."""


class ModelNotFound(EmbedError, LookupError):
    """The server does not serve a model of this name."""


class SpaceMismatch(EmbedError, ValueError):
    """The server's vectors are of another space than `expect_space`."""


class Overloaded(EmbedError):
    """The server has no room now. It expects to have some after `retry_after_s` seconds."""

    def __init__(
        self, message: str, *, retry_after_s: float, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message, code=code, param=param, grpc_status=grpc.StatusCode.RESOURCE_EXHAUSTED)
        self.retry_after_s = retry_after_s


class RequestTimeout(EmbedError, TimeoutError):
    """No reply within the time allowed, the client's or the server's."""


class Unavailable(EmbedError, ConnectionError):
    """The connection could not be made, was lost, or the server is not ready."""


class ServerError(EmbedError):
    """The server failed, or what it sent is not a reply."""


CLASSES: dict[grpc.StatusCode, type[EmbedError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: RequestTooLarge,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.FAILED_PRECONDITION: SpaceMismatch,
    grpc.StatusCode.DEADLINE_EXCEEDED: RequestTimeout,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.INTERNAL: ServerError,
    grpc.StatusCode.UNKNOWN: ServerError,
}


def error_from_call(call: grpc.RpcError) -> EmbedError:
    """The error to raise for a call that ended with anything but OK."""
    assert isinstance(call, grpc.Call)  # what a call raises is both
    status = call.code()
    details = call.details() or ""
    told = {key: value for key, value in call.trailing_metadata() or () if isinstance(value, str)}
    code = told.get(CODE_KEY)
    param = told.get(PARAM_KEY)
    pushback_ms = told.get(PUSHBACK_KEY, "")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and pushback_ms.isdecimal():  # a negative one means: do not retry
        return Overloaded(details, retry_after_s=int(pushback_ms) / 1000, code=code, param=param)
    return CLASSES.get(status, EmbedError)(details, code=code, param=param, grpc_status=status)
