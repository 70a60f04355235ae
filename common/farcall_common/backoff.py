"""Exponential back-off: waits between attempts. No I/O, no clock; random numbers are injected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

#: Far beyond any limit in use; without it, the power would overflow in an outage of hours.
_MAX_POWER: Final = 64


class Backoff:
    """The waits of one sequence of attempts: ``first_s``, then ``factor`` times as long each, ``most_s`` at most.

    With ``jitter``, which gives numbers in [0, 1), each wait is uniform between nothing and that ("full jitter":
    M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015), so that peers that failed together do
    not retry together. Not for several threads at once.
    """

    __slots__ = ("_factor", "_jitter", "_most_s", "_next_s", "failures", "first_s")

    def __init__(
        self, *, first_s: float, most_s: float, factor: float = 2.0, jitter: Callable[[], float] | None = None
    ) -> None:
        self.first_s = first_s
        self._most_s = most_s
        self._factor = factor
        self._jitter = jitter
        self.failures = 0
        """How often :meth:`next_s` was called since the start or the last reset, which may begin at more."""
        self._next_s = min(first_s, most_s)

    def next_s(self) -> float:
        """How long to wait after one more failure."""
        wait_s = self._next_s
        self.failures += 1
        self._next_s = min(wait_s * self._factor, self._most_s)
        return wait_s if self._jitter is None else wait_s * self._jitter()

    def reset(self, *, failures: int = 0) -> None:
        """Begin again with the first wait, or as after so many ``failures``."""
        self.failures = failures
        self._next_s = min(self.first_s * self._factor ** min(failures, _MAX_POWER), self._most_s)
