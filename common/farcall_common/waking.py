"""What people are told while a forwarder that slept gets up. No I/O and no clock: it is told what happened, and when.

An endpoint writes it to its log, a client shows it to whoever waits.
"""

from __future__ import annotations

from typing import Final

#: It takes about a minute. After so long something is wrong with the deployment.
_LATE_S: Final = 120.0


class Waking:
    """Has one line for each turn of a wake-up, and none for what was said already. ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._is_late = False

    def asleep(self, *, now: float) -> str | None:
        """The API says that the forwarder is being woken."""
        if self._since is None:
            self._since, self._is_late = now, False
            return (
                "The forwarder slept while nobody used the deployment and is being woken, which takes about a minute. "
                "Tasks are kept meanwhile."
            )
        if self._is_late or now - self._since < _LATE_S:
            return None
        self._is_late = True
        return (
            f"The forwarder was told to wake up {now - self._since:.0f} s ago and is not there. Tasks are kept and run "
            "once it is. Whoever runs the deployment sees with `farcall cloud status` what it does."
        )

    def awake(self, *, now: float) -> str | None:
        """There is a forwarder."""
        if self._since is None:
            return None
        took_s, self._since = now - self._since, None
        return f"The forwarder is awake, after {took_s:.0f} s."
