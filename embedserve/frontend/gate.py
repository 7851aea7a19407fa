"""A bound on what is in flight, and how long until there is room when it is full.

Pure: the clock is given. Knows nothing of what it counts: tokens, bytes of bodies, bytes of replies.
"""

from __future__ import annotations

WINDOW_S = 0.5  # over which the rate is measured
MIN_RETRY_S, MAX_RETRY_S = 0.05, 30.0


class Gate:
    """`held` of at most `limit`. It empties at `per_s`, which is a guess until it was measured.

    Only a gate that is half full or more shows how fast the server can be; of one with little in it, the rate says no
    more than how little was asked for, and counts only where it is above what was known.
    """

    def __init__(self, limit: int, *, guess_per_s: float) -> None:
        self.limit = limit
        self.held = 0
        self.per_s = guess_per_s
        self._turn_at = 0.0  # when the caller who was refused last may come back
        self._begin_window(0.0)

    @property
    def fullness(self) -> float:
        return self.held / self.limit

    def has_room(self, amount: int) -> bool:
        return self.held + amount <= self.limit

    def enter(self, amount: int, now: float) -> None:
        if not self.held:
            self._begin_window(now)
        self.held += amount

    def leave(self, amount: int, now: float, *, answered: bool) -> None:
        """What leaves unanswered (a caller who left, a refusal) makes room and says nothing of the server's speed."""
        pressed = self._pressed and self.fullness >= 0.5
        self.held -= amount
        self._answered += amount if answered else 0
        if (elapsed_s := now - self._began) >= WINDOW_S:
            per_s = self._answered / elapsed_s
            self.per_s = max(1.0, per_s) if pressed else max(self.per_s, per_s)
            self._begin_window(now)

    def retry_after_s(self, amount: int, now: float) -> float:
        """Until there is room for `amount`, after those who were refused before: each is told a time of his own.

        At most the time in which all that is held now is answered, for those refused before may never come.
        """
        per_s = self.per_s
        if self._pressed and now - self._began > WINDOW_S:  # nothing has left for a while: slower than it was
            per_s = min(per_s, max(1.0, self._answered / (now - self._began)))
        self._turn_at = min(max(self._turn_at, now) + amount / per_s, now + self.held / per_s)
        missing_s = (self.held + amount - self.limit) / per_s
        return min(MAX_RETRY_S, max(MIN_RETRY_S, missing_s, self._turn_at - now))

    def _begin_window(self, now: float) -> None:
        self._began, self._answered, self._pressed = now, 0, self.fullness >= 0.5
