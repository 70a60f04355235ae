"""What this forwarder tells the others: ends whose owners' clients may wait there. A hint, like every push; what does
not get through, clients find by asking the API."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from farcall_common.store.model import TaskResult
from farcall_forwarder.core.actions import ShareEnds

__all__ = ["ShareBuffer"]


class ShareBuffer:
    """Recorded ends that others have not been told of: collected while one telling is under way, the oldest dropped
    when there are too many. Nothing is kept while no other forwarder lives."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._groups: deque[tuple[float, Sequence[TaskResult]]] = deque()
        self._size = 0
        self._is_sharing = False
        self._has_company = False

    def meet(self, *, others: int) -> None:
        """So many other forwarders live."""
        self._has_company = others > 0

    def add(self, ends: Iterable[TaskResult], *, recorded_at: float) -> None:
        """Ends were recorded, at epoch seconds."""
        group = tuple(ends)
        if not group or not self._has_company:
            return
        self._groups.append((recorded_at, group))
        self._size += len(group)
        while self._size > self._limit and len(self._groups) > 1:
            _, dropped = self._groups.popleft()
            self._size -= len(dropped)

    def next_share(self, *, url_ttl_s: int) -> ShareEnds | None:
        """All that waits, unless a telling is under way."""
        if self._is_sharing or not self._groups:
            return None
        groups, self._groups, self._size = tuple(self._groups), deque(), 0
        self._is_sharing = True
        return ShareEnds(groups, url_ttl_s)

    def shared(self) -> None:
        """The telling under way is over, well or not."""
        self._is_sharing = False
