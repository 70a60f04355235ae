"""The processes of a node as its manager sees them: what its workers use, and what a dead one has left behind."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from typing import Final

from farcall_endpoint import guardian
from farcall_endpoint.guardian import children_of, line_of, read_processes

__all__ = ["Orphans", "memory_of_trees"]

_logger = logging.getLogger(__name__)

_PERIOD_S: Final = 0.2
"""At most so often all processes are looked at. What was killed is dead a little later, and to be collected then."""


def memory_of_trees(roots: Iterable[int]) -> dict[int, int]:
    """Resident bytes of processes, each with all that descend from it; 0 for one that does not exist."""
    processes = read_processes()
    totals = dict.fromkeys(roots, 0)
    for pid, process in processes.items():
        for ancestor in line_of(pid, processes):
            if ancestor in totals:
                totals[ancestor] += process.resident_bytes
    return totals


class Orphans:
    """Adopts what workers leave behind when they die, ends it, and collects it. One per process.

    A program that became a manager (``exec`` of a shell) may have children of that earlier life, and their orphans
    would look like those of workers: such a manager adopts none.
    """

    def __init__(self) -> None:
        #: When to call :meth:`end`, in monotonic seconds; None if there is no reason to.
        self.due_at: float | None = None
        self._looked_at = 0.0
        self._adopts = False
        if children_of(os.getpid(), read_processes()):
            _logger.warning("this process has children from before its start; what workers leave behind is not adopted")
            return
        try:
            guardian.adopt_orphans()
        except OSError as error:
            _logger.warning("what workers leave behind cannot be ended: %s", error)
        else:
            self._adopts = True

    def expect(self, *, now: float) -> None:
        """A worker has died."""
        self.due_at = max(now, self._looked_at + _PERIOD_S)

    def end(self, *, known: Collection[int], now: float) -> None:
        """End and collect all children that are not ``known``."""
        self._looked_at = now
        strangers = self._strangers(known)
        guardian.end(strangers)
        for pid in strangers:
            os.waitpid(pid, os.WNOHANG)
        self.due_at = now + _PERIOD_S if strangers else None

    def _strangers(self, known: Collection[int]) -> set[int]:
        return children_of(os.getpid(), read_processes()).difference(known) if self._adopts else set()
