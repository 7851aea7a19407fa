"""Every error a caller can meet, drawn as one tree; each class carries its HTTP status and its gRPC code.

EmbedserveError
├── BadRequest                    400  INVALID_ARGUMENT
│   ├── InvalidInput                   (a value: out of range, wrong type, undecodable)
│   ├── InputTooLong                   code context_length_exceeded
│   ├── InvalidTokenId                 code invalid_token_id
│   └── TokenIdsRefused                code token_ids_refused
├── BodyTimeout                   408  DEADLINE_EXCEEDED
├── BodyTooLarge                  413  RESOURCE_EXHAUSTED (no pushback: do not retry)
├── NonfiniteOutput               422  INTERNAL
├── ModelNotFound                 404  NOT_FOUND
├── RouteNotFound                 404  UNIMPLEMENTED
├── MethodNotAllowed              405  UNIMPLEMENTED
├── SpaceMismatch                 412  FAILED_PRECONDITION
├── RequestTooLarge               413  RESOURCE_EXHAUSTED (could never fit the queue: do not retry)
├── Overloaded                    429  RESOURCE_EXHAUSTED, with pushback
├── RequestTimeout                504  DEADLINE_EXCEEDED
├── EngineUnavailable             503  UNAVAILABLE
├── ServerError                   500  INTERNAL
└── StartError                         (the command line: one line on stderr, exit status 2)
    └── NotNative                      (a whole model that the packed forward does not serve)
Knows no protocol library: the gRPC code is its name.
"""

from __future__ import annotations

MAX_MESSAGE_CHARS = 500  # of an error, at up to 12 bytes each: gRPC clients take 8 KiB of metadata


class EmbedserveError(Exception):
    """`message` says what came, what is allowed and what to change; `param` names the field, as "input[3]"."""

    http_status = 500
    grpc_code = "INTERNAL"
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class BadRequest(EmbedserveError):
    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    type = "invalid_request_error"


class InvalidInput(BadRequest):
    code = "invalid_value"


class InputTooLong(BadRequest):
    code = "context_length_exceeded"


class InvalidTokenId(BadRequest):
    code = "invalid_token_id"


class TokenIdsRefused(BadRequest):
    code = "token_ids_refused"


class BodyTimeout(BadRequest):
    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    code = "body_timeout"


class BodyTooLarge(BadRequest):
    http_status = 413
    grpc_code = "RESOURCE_EXHAUSTED"
    code = "body_too_large"


class RequestTooLarge(BadRequest):
    http_status = 413
    grpc_code = "RESOURCE_EXHAUSTED"
    code = "request_too_large"


class NonfiniteOutput(EmbedserveError):
    http_status = 422
    grpc_code = "INTERNAL"
    type = "invalid_request_error"
    code = "nonfinite_output"


class ModelNotFound(BadRequest):
    http_status = 404
    grpc_code = "NOT_FOUND"
    code = "model_not_found"


class RouteNotFound(BadRequest):
    http_status = 404
    grpc_code = "UNIMPLEMENTED"
    code = "unknown_url"


class MethodNotAllowed(BadRequest):
    http_status = 405
    grpc_code = "UNIMPLEMENTED"
    code = "method_not_allowed"


class SpaceMismatch(BadRequest):
    http_status = 412
    grpc_code = "FAILED_PRECONDITION"
    code = "space_mismatch"


class Overloaded(EmbedserveError):
    """`retry_after_s` is the server's estimate of when there will be room."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    type = "overloaded_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeout(EmbedserveError):
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    type = "timeout_error"
    code = "request_timeout"


class EngineUnavailable(EmbedserveError):
    http_status = 503
    grpc_code = "UNAVAILABLE"
    code = "engine_unavailable"


class ServerError(EmbedserveError):
    code = "internal_error"


class StartError(EmbedserveError):
    """The server cannot start as it was asked to."""


class NotNative(StartError):
    """The packed forward does not serve this model, and sentence-transformers may; `message` says why."""


def shortened(message: str) -> str:
    """An error's message without the middle of what it repeats of the request."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    end = MAX_MESSAGE_CHARS // 2
    return f"{message[: MAX_MESSAGE_CHARS - end - 3]} … {message[-end:]}"
