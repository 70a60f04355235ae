"""Drain: a forwarder redirects its peers and flushes its results before it ends."""

from __future__ import annotations

from farcall_forwarder.core.policy import Instant, Policy


class Drain:
    """Redirects peers in waves, so that they do not all reconnect at once, and decides when the drain is over."""

    def __init__(self, policy: Policy, *, now: Instant) -> None:
        self._policy = policy
        self._began_at = self._last_wave_at = now.mono
        self._redirected = 0

    def wave(self, staying: int, now: Instant) -> int:
        """Number of peers to redirect now, of those that were not redirected yet."""
        permitted = int((now.mono - self._began_at) * self._policy.redirects_per_s) + 1
        size = max(0, min(staying, permitted - self._redirected))
        if size:
            self._redirected += size
            self._last_wave_at = now.mono
        return size

    def is_over(self, *, staying: int, agents: int, is_flushed: bool, now: Instant) -> bool:
        """Whether nothing is left to wait for: all peers were redirected, agents have left or had time for their
        messages under way, and the database has all results. Or whether the time is up."""
        has_waited = not agents or now.mono >= self._last_wave_at + self._policy.drain_grace_s
        return (not staying and has_waited and is_flushed) or now.mono >= self._began_at + self._policy.drain_s
