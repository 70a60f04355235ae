"""cgroups of a manager's slots: one for each, made when something weighs or limits slots.

Workers join when they have run for a moment: to join takes the kernel up to 30 ms, in which no process of the machine
can fork. So workers that end at once, such as one-shot ones, join none, and a thread does it for the others, all
together.
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
    """The groups of slots, by their numbers; ``groups`` is empty before :meth:`make`, and where none can be made.

    :param slots: how many.
    :param cgroups: of this process; this object closes them.
    :param period_s: of the thread.
    """

    def __init__(self, slots: int, cgroups: Cgroups, *, period_s: float = _PERIOD_S) -> None:
        self._slots = slots
        self._cgroups = cgroups
        self._period_s = period_s
        self.groups: Sequence[Group] = ()
        self._waiting: dict[int, tuple[int, float]] = {}  # slot and time, by process
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._join_all, name="farcall-cgroups", daemon=True)

    def make(self) -> Sequence[Group]:
        """Make the groups, which all workers join from now on, also those that run already."""
        if not self.groups and self._cgroups.works:
            with contextlib.suppress(OSError):
                self.groups = [self._cgroups.create(f"slot-{number}") for number in range(self._slots)]
                self._thread.start()
        return self.groups

    @property
    def directories(self) -> tuple[Path, ...]:
        """What must be removed when this process cannot do it any more."""
        return self._cgroups.directories

    def add(self, pid: int, slot: int) -> None:
        """A worker has started; it joins with all its descendants, unless it has ended by then."""
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
