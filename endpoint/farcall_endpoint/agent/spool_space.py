"""Whether the spool takes what the agent decides; if not, when to try again and what to say meanwhile. No I/O.

Two steps, so that the second is seldom reached. Below its reserve of free space the agent asks for no more tasks, and
the room that is left goes to the ends of those it has. When a commit fails all the same, nothing that was decided
happens: nothing is started, acknowledged or reported, and what comes in stays in memory until a commit works. Instants
are monotonic seconds.
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
        """Why the cloud is asked for no more tasks; empty when there is room."""
        return self._unwritable or self._scarce

    @property
    def retry_at(self) -> float | None:
        """When to try again to write; None when the last attempt worked."""
        return self._retry_at

    def failed(self, reason: str, *, now: float) -> None:
        """Nothing could be written."""
        self._retry_at = now + self._backoff.next_s()
        self._unwritable = f"{reason} Until there is room, nothing is started or reported, and nothing is lost."

    def written(self) -> None:
        """A commit worked."""
        self._retry_at, self._unwritable = None, ""
        self._backoff.reset()

    def measured(self, room: tuple[int, int] | None) -> None:
        """So many bytes are free, and so many of them are the reserve."""
        self._scarce = ""
        if room is not None and room[0] < room[1]:
            free_mib, reserve_mib = (round(size_bytes / 2**20) for size_bytes in room)
            self._scarce = (
                f"The endpoint's file system is nearly full: {free_mib} MiB are free, and no more tasks are taken on "
                f"below {reserve_mib} MiB."
            )
