"""Durations in words, for people: two digits at most."""

from __future__ import annotations

from typing import Final

_UNITS: Final = (("days", 86_400), ("hours", 3600), ("minutes", 60))


def span(seconds: float) -> str:
    """A duration: ``5 s``, ``4 minutes``. A negative one, of clocks that differ, is none."""
    seconds = max(0.0, seconds)
    for unit, unit_s in _UNITS:
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def ago(seconds: float) -> str:
    """How long ago something was: ``5 s ago``, or ``now`` within the last second."""
    return "now" if seconds < 1 else f"{span(seconds)} ago"


def retry_of(retry_at: float | None, *, now: float) -> str:
    """Text to append to the problem of a failed environment: when the next attempt starts. Empty if the environment
    has not failed. Instants are epoch seconds."""
    if retry_at is None:
        return ""
    return f" (tried again in {span(retry_at - now)})" if retry_at > now else " (tried again with the next task)"
