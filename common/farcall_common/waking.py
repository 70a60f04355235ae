"""Wake-up notices: log lines for users while a forwarder that was scaled to zero starts. No I/O and no clock.

An endpoint writes them to its log, a client shows them to its user.
"""

from __future__ import annotations

from typing import Final

#: A start takes about a minute. After this time something is wrong with the deployment.
_LATE_S: Final = 120.0


class WakeNotices:
    """One line for each step of a wake-up, and None for what was reported before. ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._is_late = False

    def on_waking(self, *, now: float) -> str | None:
        """The API reports that the forwarder is starting."""
        if self._since is None:
            self._since, self._is_late = now, False
            return (
                "The forwarder slept while the deployment was idle and is being woken, which takes about a minute. "
                "Tasks are kept meanwhile."
            )
        if self._is_late or now - self._since < _LATE_S:
            return None
        self._is_late = True
        return (
            f"The forwarder was started {now - self._since:.0f} s ago and is not reachable. Tasks are kept, and run "
            "once it is. The operator of the deployment sees its state with `farcall cloud status`."
        )

    def on_awake(self, *, now: float) -> str | None:
        """A forwarder is reachable."""
        if self._since is None:
            return None
        took_s, self._since = now - self._since, None
        return f"The forwarder is awake, after {took_s:.0f} s."
