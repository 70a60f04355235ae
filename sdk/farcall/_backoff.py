"""How long to wait before trying again."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

__all__ = ["Backoff"]

_MAX_DOUBLINGS = 30


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Exponential back-off with full jitter.

    M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015. The wait before attempt n is uniform
    between nothing and ``first_s * 2**n``, capped at ``cap_s``: clients that failed together do not come back together.
    """

    first_s: float = 0.1
    cap_s: float = 10.0

    def delay_s(self, attempt: int, *, draw: Callable[[], float] = random.random) -> float:
        """Seconds to wait after ``attempt`` failures (from 0). ``draw`` gives numbers in [0, 1)."""
        return draw() * min(self.cap_s, self.first_s * 2.0 ** min(attempt, _MAX_DOUBLINGS))
