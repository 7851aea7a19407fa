"""The blocking client: one channel to one server, one call at a time for each caller.
Carries messages and raises errors; must not know how a request is written or how a reply is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import grpc

from embedserve.v1.embedding_pb2_grpc import EmbeddingStub
from embedserve_client.errors import error_from_call
from embedserve_client.request import build_request
from embedserve_client.result import EmbedResult, read_reply

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    import numpy as np

    from embedserve_client.request import EmbedOptions, Inputs, OnError

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # a reply of 2,048 x 4,096 float32 has 32 MiB; grpc's default is 4
    ("grpc.max_send_message_length", -1),  # how large a request may be is the server's to say
)


class EmbedClient:
    """A client of the server at `target`, as "127.0.0.1:50051". Safe to share between threads; a context manager.

    The connection is made by the first call, without TLS unless `credentials` are given.
    `timeout_s` bounds each call, its wait for the connection included; None waits for ever.
    """

    def __init__(
        self, target: str, *, timeout_s: float | None = 60.0, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self.timeout_s = timeout_s
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
        self._stub = EmbeddingStub(self._channel)

    def embed(self, inputs: Inputs, **options: Unpack[EmbedOptions]) -> np.ndarray:
        """The vectors of a list of texts, or of a list of lists of the model's token ids: [inputs, dims], in order.

        Options, each None (the server's or the model's own default) unless given:

        - `input_type` "query" or "document", or `prompt_name`, or `instruction`: what to put before each text.
        - `dimensions`: only so many values of each vector, normalised again.
        - `dtype` "float32" (the default), "float16", "int8", "binary" or "ubinary". The array has the numpy dtype of
          that name. int8 has one scale a row, for which there is `embed_full`; the binary forms have 8 dimensions in
          one int8 ("binary") or uint8 ("ubinary"), which `numpy.unpackbits` reads.
        - `normalize`: whether rows have length 1.
        - `truncate` "none", "left" or "right": what happens to an input longer than the model takes.
        - `lane` "auto", "query" or "bulk": which queue to wait in.
        - `model`, `request_id`, `expect_space`: as in the protocol (embedding.proto).

        The array is a read-only view of the reply's bytes; `.copy()` makes one to write to.
        Raises an EmbedError (embedserve_client.errors) when any input fails.
        """
        return self.embed_full(inputs, **options).vectors

    def embed_full(self, inputs: Inputs, *, on_error: OnError = "fail", **options: Unpack[EmbedOptions]) -> EmbedResult:
        """As `embed`, with all that the reply says: scales, token counts, what was cut, identity, times.

        With `on_error` "per_input", a bad input does not fail the others: its row is zero and `failures` says why.
        """
        request = build_request(inputs, on_error=on_error, **options)
        try:
            reply = self._stub.Embed(request, timeout=self.timeout_s)
        except grpc.RpcError as error:
            raise error_from_call(error) from error
        return read_reply(reply)

    def close(self) -> None:
        """Close the connection. Calls in flight end with an error; later ones raise ValueError."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
