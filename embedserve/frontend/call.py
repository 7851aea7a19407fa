"""A request and its answer as the service knows them, whatever protocol they come and go by.

Plain data: knows neither protocols nor how an answer is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embedserve.errors import EmbedserveError
from embedserve.messages import Lane
from embedserve.model.card import ModelCard
from embedserve_kernels.output_layout import NUMPY_DTYPES, OutputDtype, row_width


@dataclass(slots=True)
class EmbedCall:
    """One request, whatever it came by. Exactly one of texts and token_ids; `field` is its name in the protocol."""

    field: str
    texts: list[str] | None = None
    token_ids: Sequence[Sequence[int]] | None = None
    model: str | None = None
    input_type: str | None = None  # "query" | "document"
    prompt_name: str | None = None
    instruction: str | None = None
    dimensions: int | None = None
    dtype: OutputDtype = OutputDtype.FLOAT32
    normalize: bool | None = None
    truncate: str | None = None  # "none" | "left" | "right"
    lane: Lane | None = None
    per_input_errors: bool = False
    expect_space: str | None = None

    @property
    def count(self) -> int:
        return len(self.texts if self.texts is not None else self.token_ids or ())


@dataclass(slots=True)
class Times:
    """Milliseconds by stage. Over several batches, queue ends as the first begins and forward as the last ends."""

    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    forward_ms: float = 0.0
    pack_ms: float = 0.0
    reply_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(slots=True)
class EmbedResult:
    """Row-major vectors: [count, dims], or [count, dims / 8 rounded up] for the binary forms.

    Rows of inputs that have an error are zero.
    """

    vectors: memoryview | bytes
    scales: memoryview | bytes  # float32 [count]; int8 only
    count: int
    dims: int
    dtype: OutputDtype
    token_counts: np.ndarray  # int32 [count]
    tokens: int  # of all inputs
    truncated: list[int]
    errors: dict[int, EmbedserveError]  # by input; empty unless per_input_errors
    lane: Lane
    times: Times
    card: ModelCard  # of the model that made them

    def rows(self) -> np.ndarray:
        """The vectors as numpy, without a copy."""
        flat = np.frombuffer(self.vectors, NUMPY_DTYPES[self.dtype])
        return flat.reshape(self.count, row_width(self.dims, self.dtype))
