"""Limits of AWS that a deployment meets first: sizes at Lambda and API Gateway, the gateway's time and its throttle."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

#: Bytes of an event, and of an answer, of a function that is called and waited for.
MAX_EVENT_BYTES = 6_291_456
MAX_ANSWER_BYTES = 6_291_556
#: Bytes of a request to API Gateway, and the seconds that it waits for a function.
MAX_GATEWAY_BYTES = 10 * 2**20
GATEWAY_S = 29.0


def answer_too_large(size_bytes: int) -> bytes:
    """What Lambda answers instead of an answer of so many bytes."""
    message = (
        f"Response payload size ({size_bytes} bytes) exceeded maximum allowed payload size ({MAX_ANSWER_BYTES} bytes)."
    )
    return json.dumps({"errorType": "Function.ResponseSizeTooLarge", "errorMessage": message}).encode()


class TokenBucket:
    """Requests per second in the long run, and at once after a pause. ``clock`` is monotonic, in seconds."""

    def __init__(self, rate_per_s: float, burst: int, *, clock: Callable[[], float]) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._at = clock()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Whether one more request is within the limit."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate_per_s)
            self._at = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True
