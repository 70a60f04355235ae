"""Replicas: which manager has which copy of a file, and who copies it from which other one. No I/O, no clock.

As in TaskVine, a file travels from node to node: the first that needs it reads the endpoint's copy, the next ones read
from nodes that have it, and each becomes a source. A source serves few readers at a time instead of one node serving
all. A node passes on what it has while the rest still comes: so those that want a file at the same time form a tree,
and the last has it soon after the first. Who was let down once reads from complete copies only, so there is no circle.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from farcall_endpoint.contracts.agent_manager import FileContent

ENDPOINT: Final = ""
"""In place of a manager's id: the endpoint's own copy, which all nodes can read."""
MOST_READERS: Final = 2
"""Maximum number of managers that read from one source at the same time."""
MOST_READS: Final = 4
"""Maximum number of copies that a manager reads or waits for at the same time. Nodes that want the same files then get
them in the same order, and the work of a decision does not grow with the number of files."""
_MOST_FAILURES: Final = 2
"""Number of managers to try as the source of a copy. After that, the endpoint's own copy is the source."""


class CopyOrder(NamedTuple):
    """Order to a manager: read a copy from another manager or from :data:`ENDPOINT`; None: no source is left."""

    manager_id: str
    content: FileContent
    source: str | None


@dataclasses.dataclass(slots=True)
class _Wish:
    """A manager waits for a copy. ``failed``: sources that could not give it."""

    failed: set[str] = dataclasses.field(default_factory=set)


class Replicas:
    """The copies of all managers. ``orders``: what has been decided; their taker clears them."""

    def __init__(self) -> None:
        self.orders: list[CopyOrder] = []
        self._managers: set[str] = set()
        self._holders: dict[FileContent, dict[str, None]] = {}
        self._wishes: dict[FileContent, dict[str, _Wish]] = {}
        self._reads: dict[FileContent, dict[str, str]] = {}  # that are on their way: the source of each reader
        self._readers_of: collections.Counter[str] = collections.Counter()  # by source
        self._wishes_of: collections.Counter[str] = collections.Counter()  # by reader
        self._later: dict[str, dict[FileContent, None]] = {}  # by reader: what becomes a wish when it has fewer
        self._has_room: dict[str, None] = {}  # readers with fewer wishes than they may have
        self._waiting: dict[str, dict[FileContent, None]] = {}  # by source: until it has less to do
        self._unreachable: set[tuple[str, str]] = set()  # reader and source

    def joined(self, manager_id: str) -> None:
        """A manager has registered."""
        self._managers.add(manager_id)

    def lost(self, manager_id: str) -> None:
        """A manager is gone with its copies. Those who read from it report that themselves."""
        self._managers.discard(manager_id)
        self._later.pop(manager_id, None)
        self._unreachable = {pair for pair in self._unreachable if manager_id not in pair}
        for content in [content for content, holders in self._holders.items() if manager_id in holders]:
            self._forget(self._holders, content, manager_id)
        for content in [content for content, wishes in self._wishes.items() if manager_id in wishes]:
            self._end_wish(manager_id, content)
        for content in [content for content, reads in self._reads.items() if manager_id in reads]:
            self._read_ended(manager_id, content)
        for content in self._waiting.pop(manager_id, ()):
            self._serve(content)
        self._begin()

    def wanted(self, manager_id: str, contents: Iterable[FileContent]) -> None:
        """Tasks of a manager wait for copies."""
        if manager_id not in self._managers:
            return
        later = self._later.setdefault(manager_id, {})
        for content in contents:
            self._forget(self._holders, content, manager_id)
            if manager_id not in self._wishes.get(content, ()):
                later[content] = None
        self._begin(manager_id)

    def dropped(self, manager_id: str, contents: Iterable[FileContent]) -> None:
        """A manager does not want copies any more, whether they are on their way or not."""
        for content in contents:
            self._later.get(manager_id, {}).pop(content, None)
            self._end_wish(manager_id, content)
            self._read_ended(manager_id, content)
        self._begin(manager_id)

    def have(self, manager_id: str, contents: Iterable[FileContent]) -> None:
        """Copies are complete: the manager is a source of them."""
        for content in contents:
            if manager_id in self._managers:
                self._holders.setdefault(content, {})[manager_id] = None
            self._end_wish(manager_id, content)
            self._read_ended(manager_id, content)
        self._begin(manager_id)

    def gone(self, manager_id: str, contents: Iterable[FileContent]) -> None:
        """A manager has removed copies to make room."""
        for content in contents:
            self._forget(self._holders, content, manager_id)
            self._serve(content)
        self._begin()

    def failed(self, manager_id: str, content: FileContent, *, reached: bool) -> None:
        """A manager could not get a copy from the source that was named.

        :param reached: whether there was a connection; if not, this manager does not use the source any more.
        """
        source = self._reads.get(content, {}).get(manager_id)
        if source is None:
            return
        wish = self._wishes.get(content, {}).get(manager_id)
        if wish is not None:
            wish.failed.add(source)
        if not reached and source != ENDPOINT:
            self._unreachable.add((manager_id, source))
        self._read_ended(manager_id, content)
        self._begin()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _forget(self, table: dict[FileContent, dict[str, Any]], content: FileContent, manager_id: str) -> None:
        if (entries := table.get(content)) is not None and manager_id in entries:
            del entries[manager_id]
            if not entries:
                del table[content]

    def _end_wish(self, manager_id: str, content: FileContent) -> None:
        if manager_id in self._wishes.get(content, ()):
            self._forget(self._wishes, content, manager_id)
            self._wishes_of[manager_id] -= 1
            if not self._wishes_of[manager_id]:
                del self._wishes_of[manager_id]

    def _begin(self, manager_id: str = "") -> None:
        """Let managers wish for as much as they may at a time: this one, and those whose wish has ended unfulfilled."""
        self._has_room[manager_id] = None
        while self._has_room:
            manager_id, _ = self._has_room.popitem()
            later = self._later.get(manager_id, {})
            while later and self._wishes_of[manager_id] < MOST_READS:
                content = next(iter(later))
                del later[content]
                self._wishes.setdefault(content, {})[manager_id] = _Wish()
                self._wishes_of[manager_id] += 1
                self._try(manager_id, content)
            if not later:
                self._later.pop(manager_id, None)

    def _read_ended(self, manager_id: str, content: FileContent) -> None:
        """A copy is not on its way any more: others may begin."""
        source = self._reads.get(content, {}).get(manager_id)
        if source is not None:
            self._forget(self._reads, content, manager_id)
            self._readers_of[source] -= 1
            if not self._readers_of[source]:
                del self._readers_of[source]
        self._serve(content)
        waiting = {} if source is None else self._waiting.get(source, {})
        while waiting and source is not None and self._readers_of[source] < MOST_READERS:
            first = next(iter(waiting))
            del waiting[first]
            self._serve(first)
        if not waiting and source is not None:
            self._waiting.pop(source, None)

    def _serve(self, content: FileContent) -> None:
        """Let those begin that wait for a copy and have a source."""
        for manager_id in list(self._wishes.get(content, ())):
            self._try(manager_id, content)

    def _try(self, manager_id: str, content: FileContent) -> None:
        wish = self._wishes[content][manager_id]
        if manager_id in self._reads.get(content, ()):
            return
        complete, partial = self._sources(manager_id, content, wish)
        if free := [each for each in complete if self._readers_of[each] < MOST_READERS]:
            self._start(manager_id, content, min(free, key=lambda each: self._readers_of[each]))
        elif free := [each for each in partial if self._readers_of[each] < MOST_READERS]:
            self._start(manager_id, content, free[0])  # the tree is as flat as it can be
        elif complete or partial:
            for each in (*complete, *partial):
                self._waiting.setdefault(each, {})[content] = None
        elif self._must_wait(manager_id, content, wish):
            pass
        elif ENDPOINT not in wish.failed:
            self._start(manager_id, content, ENDPOINT)
        else:
            self._end_wish(manager_id, content)
            self._has_room[manager_id] = None
            self.orders.append(CopyOrder(manager_id, content, None))

    def _start(self, manager_id: str, content: FileContent, source: str) -> None:
        self._reads.setdefault(content, {})[manager_id] = source
        self._readers_of[source] += 1
        self.orders.append(CopyOrder(manager_id, content, source))

    def _sources(self, manager_id: str, content: FileContent, wish: _Wish) -> tuple[list[str], list[str]]:
        """The managers from which one can get a copy, whether they have time for it or not: those that have all of it,
        and those that get it now."""
        if len(wish.failed) >= _MOST_FAILURES:
            return [], []
        coming = () if wish.failed else self._reads.get(content, ())
        complete, partial = (
            [each for each in managers if self._may_read(manager_id, each, wish)]
            for managers in (self._holders.get(content, ()), coming)
        )
        return complete, partial

    def _may_read(self, manager_id: str, source: str, wish: _Wish) -> bool:
        return source != manager_id and source not in wish.failed and (manager_id, source) not in self._unreachable

    def _must_wait(self, manager_id: str, content: FileContent, wish: _Wish) -> bool:
        """Whether others get a copy, and become sources: so that the endpoint's is read once, or by few at a time."""
        reads = self._reads.get(content, {})
        if sum(source == ENDPOINT for source in reads.values()) >= MOST_READERS:
            return True
        return len(wish.failed) < _MOST_FAILURES and any(self._may_read(manager_id, each, wish) for each in reads)
