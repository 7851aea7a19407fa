"""How many reply bytes each frontend has been sent and has not yet said it received.

Shared by two threads without a lock: OutputLoop alone writes what was sent, IpcLoop what was received. The numbers of
a frontend that is gone stay (its name never comes again): a few bytes.
"""

from __future__ import annotations

REPLY_CREDIT_BYTES = 256 * 1024 * 1024  # a frontend admits less than this, so only one that stopped reading reaches it


class ReplyCredit:
    def __init__(self, limit_bytes: int = REPLY_CREDIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}

    def allows(self, frontend: str, nbytes: int) -> bool:
        return self._sent.get(frontend, 0) - self._received.get(frontend, 0) + nbytes <= self._limit_bytes

    def sent(self, frontend: str, nbytes: int) -> None:
        self._sent[frontend] = self._sent.get(frontend, 0) + nbytes

    def received(self, frontend: str, total_bytes: int) -> None:
        self._received[frontend] = total_bytes
