"""API Gateway's limits, for the local API: the throttle of the stage, and the time that it waits for the function."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Final

from farcall_common.errors import LimitExceeded, Unavailable
from farcall_lambdas.settings import positive_number

#: The stage's throttle of the profile ``facility``.
_RATE_PER_S: Final = 1000.0
_BURST: Final = 2000
#: Seconds that API Gateway waits for a function.
_TIMEOUT_S: Final = 29.0


@dataclasses.dataclass
class LocalGateway:
    """The throttle of all requests together, with a token or without: ``rate_per_s`` in the long run, and ``burst`` at
    once after a pause. A request is answered within ``timeout_s`` seconds. ``clock`` is monotonic."""

    rate_per_s: float = _RATE_PER_S
    burst: int = _BURST
    timeout_s: float = _TIMEOUT_S
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._tokens = float(self.burst)
        self._at = self.clock()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LocalGateway:
        """Read ``FARCALL_THROTTLE_RATE_PER_S`` (1,000) and ``FARCALL_THROTTLE_BURST`` (2,000).

        :raises ConfigurationError: for a value that is not a positive number.
        """
        return cls(
            rate_per_s=positive_number(environ, "FARCALL_THROTTLE_RATE_PER_S", _RATE_PER_S),
            burst=positive_number(environ, "FARCALL_THROTTLE_BURST", _BURST),
        )

    def admit(self) -> None:
        """Take one request. Call it from one thread.

        :raises LimitExceeded: if the rate is exceeded.
        """
        now = self.clock()
        self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate_per_s)
        self._at = now
        if self._tokens < 1:
            raise LimitExceeded("Too Many Requests")
        self._tokens -= 1

    def timed_out(self) -> Unavailable:
        """The error of a request that took too long."""
        return Unavailable("Endpoint request timed out")
