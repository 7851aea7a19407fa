"""The Python client of an embedserve server: texts or token ids in, numpy arrays out.

Importing it imports grpc, protobuf and numpy, and must not import anything of the server's.
"""

from embedserve_client.client import EmbedClient
from embedserve_client.errors import (
    BadRequest,
    EmbedError,
    ModelNotFound,
    Overloaded,
    RequestTimeout,
    RequestTooLarge,
    ServerError,
    SpaceMismatch,
    Unavailable,
)
from embedserve_client.request import EmbedOptions, Inputs
from embedserve_client.result import EmbedResult, InputFailure, StageTimes

__all__ = [
    "BadRequest",
    "EmbedClient",
    "EmbedError",
    "EmbedOptions",
    "EmbedResult",
    "InputFailure",
    "Inputs",
    "ModelNotFound",
    "Overloaded",
    "RequestTimeout",
    "RequestTooLarge",
    "ServerError",
    "SpaceMismatch",
    "StageTimes",
    "Unavailable",
]
