"""What happened to each request, as arrays that merge exactly: no buckets, nothing rounded.
Knows no protocol but the numbers of its codes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

# A code is 0 for an answer, else the HTTP status or the gRPC code, or one of these.
OK = 0
CONNECTION_FAILED = -1
TIMED_OUT = -2
MALFORMED_ANSWER = -3


@dataclass(frozen=True)
class Samples:
    """One entry a request; times are time.monotonic(), which all processes of a machine share."""

    due_s: np.ndarray  # float64; when it should have been sent
    sent_s: np.ndarray  # float64
    done_s: np.ndarray  # float64
    code: np.ndarray  # int16
    texts: np.ndarray  # int32; how many it carried
    messages: dict[int, str]  # the first that came with each code

    def __len__(self) -> int:
        return len(self.code)

    def due_from(self, start_s: float) -> Samples:
        chosen = self.due_s >= start_s
        return Samples(
            self.due_s[chosen],
            self.sent_s[chosen],
            self.done_s[chosen],
            self.code[chosen],
            self.texts[chosen],
            self.messages,
        )


@dataclass
class Recorder:
    """Where the coroutines of one process note their requests."""

    _due_s: array[float] = field(default_factory=lambda: array("d"))
    _sent_s: array[float] = field(default_factory=lambda: array("d"))
    _done_s: array[float] = field(default_factory=lambda: array("d"))
    _code: array[int] = field(default_factory=lambda: array("h"))
    _texts: array[int] = field(default_factory=lambda: array("i"))
    _messages: dict[int, str] = field(default_factory=dict)

    def add(self, due_s: float, sent_s: float, done_s: float, code: int, message: str, texts: int) -> None:
        self._due_s.append(due_s)
        self._sent_s.append(sent_s)
        self._done_s.append(done_s)
        self._code.append(code)
        self._texts.append(texts)
        if code != OK:
            self._messages.setdefault(code, message)

    def samples(self) -> Samples:
        return Samples(
            np.array(self._due_s, dtype=np.float64),
            np.array(self._sent_s, dtype=np.float64),
            np.array(self._done_s, dtype=np.float64),
            np.array(self._code, dtype=np.int16),
            np.array(self._texts, dtype=np.int32),
            self._messages,
        )


def merge(parts: list[Samples]) -> Samples:
    """All requests of all parts; for a code that several met, the message of the first."""
    messages: dict[int, str] = {}
    for part in reversed(parts):
        messages.update(part.messages)
    return Samples(
        np.concatenate([part.due_s for part in parts]),
        np.concatenate([part.sent_s for part in parts]),
        np.concatenate([part.done_s for part in parts]),
        np.concatenate([part.code for part in parts]),
        np.concatenate([part.texts for part in parts]),
        messages,
    )


def percentile(values: np.ndarray, percent: float) -> float:
    """The nearest rank: a value that occurred, of which at least `percent` are not above. NaN when there are none."""
    if len(values) == 0:
        return float("nan")
    return float(np.percentile(values, percent, method="inverted_cdf"))
