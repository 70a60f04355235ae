"""cgroups of a manager's slots: one for each, which its workers join when they have run for a moment.

To join takes the kernel up to 30 ms, in which no process of the machine can fork. So workers that end at once, such as
one-shot ones, join none, and a thread does it for the others, all together.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from farcall_endpoint.environments.cgroups import Cgroups, Group
from farcall_endpoint.process_reaper import tree

_PERIOD_S: Final = 1.0
"""A worker joins when it has run for so long, and a moment later at most."""


class SlotGroups:
    """The groups of slots, by their numbers. Where none can be made, nothing happens.

    ``groups``: empty where there are none. What limits or weighs slots writes there; nothing does so yet.

    :param slots: how many.
    :param cgroups: of this process; this object closes them.
    :param period_s: of the thread.
    """

    def __init__(self, slots: int, cgroups: Cgroups, *, period_s: float = _PERIOD_S) -> None:
        self._cgroups = cgroups
        self._period_s = period_s
        self.groups: Sequence[Group] = ()
        if cgroups.works:
            with contextlib.suppress(OSError):
                self.groups = [cgroups.create(f"slot-{number}") for number in range(slots)]
        self._waiting: dict[int, tuple[int, float]] = {}  # slot and time, by process
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._join_all, name="farcall-cgroups", daemon=True)
        if self.groups:
            self._thread.start()

    @property
    def directories(self) -> tuple[Path, ...]:
        """What must be removed when this process cannot do it any more."""
        return self._cgroups.directories

    def add(self, pid: int, slot: int) -> None:
        """A worker has started; it joins with all its descendants, unless it has ended by then."""
        if self.groups:
            with self._lock:
                self._waiting[pid] = slot, time.monotonic()

    def remove(self, pid: int) -> None:
        """A worker has ended, and is about to be reaped."""
        with self._lock:
            self._waiting.pop(pid, None)

    def close(self) -> None:
        """Remove the groups; all workers have ended."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._cgroups.close()

    def _join_all(self) -> None:
        while not self._is_over.wait(self._period_s):
            limit = time.monotonic() - self._period_s
            with self._lock:
                due = [(pid, slot) for pid, (slot, since) in self._waiting.items() if since <= limit]
                for pid, _ in due:
                    del self._waiting[pid]
            for pid, slot in due:
                for each in (pid, *tree(pid)):
                    with contextlib.suppress(OSError):  # it has ended, or a limit of the group forbids it
                        self.groups[slot].join(each)
