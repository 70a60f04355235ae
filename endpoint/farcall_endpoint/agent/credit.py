"""How many tasks the cloud may send: enough that its distance is not felt, and no more than others would miss."""

from __future__ import annotations

from farcall_endpoint.prefetch import PrefetchPolicy


class Credit:
    """Of one session at a time.

    :param window: tasks to hold here for each slot, so that the way to the cloud is hidden; at most ``limit`` together,
        but never less than two for each slot.
    """

    def __init__(self, window: PrefetchPolicy, *, limit: int) -> None:
        self._window = window
        self._limit = limit
        self._given = 0
        self._held = 0

    def restart(self) -> None:
        """A session has begun: nothing is given yet."""
        self._given = 0

    def used(self, count: int) -> None:
        """So many tasks came, or that much credit was not given after all."""
        self._given -= count
        self._held += count

    def grant(self, *, slots: int, held: int) -> int:
        """Credit to give now, with so many slots and unfinished tasks here. Small change waits until it is worth a
        message, unless the cloud has none left. It has less than none when tasks came from the reserve."""
        window = min(slots * (2 + self._window.depth), max(self._limit, 2 * slots))
        due = window - held - self._given
        ended, self._held = max(0, self._held - held), held
        if self._given < 0:  # the reserve is used: what ended gives it back, also while the window shrinks
            due = max(due, min(ended, -self._given))
        if due < max(1, window // 4) and not (due > 0 and self._given <= 0):
            return 0
        self._given += due
        return due
