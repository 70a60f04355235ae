"""Result sharing: publishes recorded results to other forwarders, where their owners' clients may be connected. It is a
hint, like every push: clients find missed results by asking the API."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from farcall_common.store.model import TaskResult
from farcall_forwarder.core.actions import ShareResults


class ShareBuffer:
    """Recorded results that are not shared yet. They collect while one share is under way, and the oldest are dropped
    when there are too many. The buffer stays empty while there is no other forwarder."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._groups: deque[tuple[float, Sequence[TaskResult]]] = deque()
        self._size = 0
        self._is_sharing = False
        self._has_others = False

    def on_announced(self, *, others: int) -> None:
        """Take over the number of other forwarders."""
        self._has_others = others > 0

    def add(self, results: Iterable[TaskResult], *, recorded_at: float) -> None:
        """Add results that were recorded at an epoch second."""
        group = tuple(results)
        if not group or not self._has_others:
            return
        self._groups.append((recorded_at, group))
        self._size += len(group)
        while self._size > self._limit and len(self._groups) > 1:
            _, dropped = self._groups.popleft()
            self._size -= len(dropped)

    def next_share(self, *, url_ttl_s: int) -> ShareResults | None:
        """A step with all waiting results, unless a share is under way."""
        if self._is_sharing or not self._groups:
            return None
        groups, self._groups, self._size = tuple(self._groups), deque(), 0
        self._is_sharing = True
        return ShareResults(groups, url_ttl_s)

    def on_shared(self) -> None:
        """The share under way is over, with or without success."""
        self._is_sharing = False
