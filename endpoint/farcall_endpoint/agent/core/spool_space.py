"""Spool space: whether the spool can be written; if not, when to retry, and the problem to report meanwhile.

Two steps, so that the second is rare. Below its reserve of free space the agent requests no more tasks, and the room
that is left is for the results of those it has. When a commit fails all the same, none of the turn's actions is
performed: nothing is started, acknowledged or reported, and events wait in memory until a commit succeeds. Instants are
epoch seconds.
"""

from __future__ import annotations

from typing import Final

from farcall_common.backoff import Backoff

_FIRST_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 5.0


class SpoolSpace:
    """One per spool."""

    def __init__(self) -> None:
        self._retry_at: float | None = None
        self._backoff = Backoff(first_s=_FIRST_RETRY_S, most_s=_MAX_RETRY_S)
        self._unwritable = ""
        self._scarce = ""

    @property
    def problem(self) -> str:
        """Why no more tasks are requested; empty when there is room."""
        return self._unwritable or self._scarce

    @property
    def retry_at(self) -> float | None:
        """When to retry; None when the last commit succeeded."""
        return self._retry_at

    def failed(self, reason: str, *, now: float) -> None:
        """Nothing could be written."""
        self._retry_at = now + self._backoff.next_s()
        self._unwritable = f"{reason} Until there is room, nothing is started or reported, and nothing is lost."

    def retry(self, *, now: float) -> None:
        """Retry now."""
        if self._retry_at is not None:
            self._retry_at = now

    def written(self) -> None:
        """A commit succeeded."""
        self._retry_at, self._unwritable = None, ""
        self._backoff.reset()

    def measured(self, room: tuple[int, int] | None) -> None:
        """``room``: free bytes, and how many of them are the reserve; None if unknown."""
        self._scarce = ""
        if room is not None and room[0] < room[1]:
            free_mib, reserve_mib = (round(size_bytes / 2**20) for size_bytes in room)
            self._scarce = (
                f"The endpoint's file system is nearly full: {free_mib} MiB are free, and no more tasks are taken on "
                f"below {reserve_mib} MiB."
            )
