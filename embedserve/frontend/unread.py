"""Large replies that their clients have not read yet: how many bytes they may be together, and who is dropped beyond.

Knows nothing of connections: whoever holds a reply says how to drop it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class UnreadReplies:
    """When more than `max_bytes` wait, those that have waited longest are dropped: a client that does not read loses
    only what is its own. The newest reply always stays, however large.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._waiting: dict[object, tuple[int, Callable[[], None]]] = {}  # oldest first

    @contextmanager
    def waiting(self, nbytes: int, drop: Callable[[], None]) -> Iterator[None]:
        """While the block writes a reply and waits until it is read. `drop` ends its connection, and so the wait."""
        key = object()
        self._waiting[key] = nbytes, drop
        self._bytes += nbytes
        while self._bytes > self._max_bytes and len(self._waiting) > 1:
            log.warning("replies of %d bytes were not read; the one that waited longest is dropped", self._bytes)
            self._take(next(iter(self._waiting)))()
        try:
            yield
        finally:
            if key in self._waiting:
                self._take(key)

    def _take(self, key: object) -> Callable[[], None]:
        nbytes, drop = self._waiting.pop(key)
        self._bytes -= nbytes
        return drop
