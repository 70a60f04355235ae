"""How a forwarder empties itself before it ends."""

from __future__ import annotations

from farcall_forwarder.core.policy import Instant, Policy

__all__ = ["Drain"]


class Drain:
    """Sends peers away in waves, so that they do not all reconnect at once, and knows when that is over."""

    def __init__(self, policy: Policy, *, now: Instant) -> None:
        self._policy = policy
        self._began_at = self._last_wave_at = now.mono
        self._told = 0

    def wave(self, staying: int, now: Instant) -> int:
        """How many of the peers that have not been told to move yet are to be told now."""
        permitted = int((now.mono - self._began_at) * self._policy.moves_per_s) + 1
        size = max(0, min(staying, permitted - self._told))
        if size:
            self._told += size
            self._last_wave_at = now.mono
        return size

    def is_over(self, *, staying: int, agents: int, is_flushed: bool, now: Instant) -> bool:
        """Whether nothing is left to wait for: everybody was told, agents have left or had time for what they had on
        the way, and the database has all ends. Or whether the time is up."""
        has_waited = not agents or now.mono >= self._last_wave_at + self._policy.drain_grace_s
        return (not staying and has_waited and is_flushed) or now.mono >= self._began_at + self._policy.drain_s
