"""Dead children that nobody waits for.

A worker adopts the orphans of what its tasks start (:func:`farcall_endpoint.guardian.adopt_orphans`), so it must
collect them when they die. It cannot tell them from a task's own children, whose exit codes belong to whoever started
them. But those are asked for soon: who has been dead for a minute, and was not collected by anybody, never will be.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from farcall_endpoint.guardian import children_of, read_processes

_PERIOD_S: Final = 60.0


class Strays:
    """Call :meth:`collect` now and then; it is cheap."""

    def __init__(self) -> None:
        self._look_at = 0.0
        self._dead: set[int] = set()

    def collect(self, *, now: float) -> None:
        """Collect children that were dead a minute ago and still wait. ``now`` is in seconds of any clock."""
        if now < self._look_at:
            return
        self._look_at = now + _PERIOD_S
        dead = _dead_children()
        for pid in dead & self._dead:
            with contextlib.suppress(ChildProcessError):  # somebody asked after all
                os.waitpid(pid, os.WNOHANG)
        self._dead = dead - self._dead


def _dead_children() -> set[int]:
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:  # there are no children at all
        return set()
    processes = read_processes()
    return {pid for pid in children_of(os.getpid(), processes) if processes[pid].is_zombie}
