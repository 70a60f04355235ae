"""Liveness of a peer that sends heartbeats, as both sides of a connection check it. No I/O, no clock.

Only time in which this process ran counts. A process that was stopped (SIGSTOP), or whose machine was suspended, finds
on waking that every peer was last heard long ago; it must listen for a moment before it gives them up.
"""

from __future__ import annotations

from typing import Final

_GRACE_S: Final = 5.0


class LivenessTimer:
    """Measures for how long one peer has been silent. Instants are monotonic seconds.

    :param limit_s: after so many seconds without a message the peer counts as lost; None: never.
    """

    def __init__(self, *, limit_s: float | None, now: float) -> None:
        self._limit_s = limit_s
        self._heard_at = now

    @property
    def deadline(self) -> float | None:
        """When to call :meth:`is_expired`, if no message arrives before; a later call means that this process slept."""
        return None if self._limit_s is None else self._heard_at + self._limit_s

    def heard(self, *, now: float) -> None:
        """A message of the peer has arrived."""
        self._heard_at = now

    def is_expired(self, *, now: float) -> bool:
        """Whether the peer is lost. Call it after all messages that have arrived were read."""
        if self._limit_s is None:
            return False
        grace_s = min(_GRACE_S, self._limit_s)
        late_s = now - self._heard_at - self._limit_s
        if late_s >= grace_s:  # this process slept at the deadline
            self._heard_at = now - self._limit_s + grace_s
            return False
        return late_s >= 0
