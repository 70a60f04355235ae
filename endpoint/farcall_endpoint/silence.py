"""Has the other side been silent for too long? The same question on both ends of a heartbeat. No I/O, no clock.

Silence counts only while somebody listened. A process that was stopped (SIGSTOP), or whose machine was suspended, finds
on waking that everybody was last heard long ago; it must not give them all up for that, but listen for a moment first.
"""

from __future__ import annotations

from typing import Final

_SECOND_CHANCE_S: Final = 5.0


class Silence:
    """The silence of one peer. Instants are monotonic seconds.

    :param limit_s: a peer that says nothing for so long is given up; None never gives up.
    """

    def __init__(self, *, limit_s: float | None, now: float) -> None:
        self._limit_s = limit_s
        self._heard_at = now

    @property
    def deadline(self) -> float | None:
        """When to ask :meth:`is_over_limit`, if nothing is heard before; whoever asks later was not listening."""
        return None if self._limit_s is None else self._heard_at + self._limit_s

    def heard(self, *, now: float) -> None:
        """The peer has said something."""
        self._heard_at = now

    def is_over_limit(self, *, now: float) -> bool:
        """Whether to give the peer up. Ask after all that has come in was taken in."""
        if self._limit_s is None:
            return False
        chance_s = min(_SECOND_CHANCE_S, self._limit_s)
        late_s = now - self._heard_at - self._limit_s
        if late_s >= chance_s:  # asleep at the deadline
            self._heard_at = now - self._limit_s + chance_s
            return False
        return late_s >= 0
