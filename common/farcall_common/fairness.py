"""Fair share: whose task is next, where several submitters share an endpoint.

Max-min fairness, as in the fair schedulers of Hadoop and Spark: next comes the submitter with the fewest tasks that are
taken and have not ended, in proportion to its weight. Of several such, those come first that had nothing taken when
they came, in that order, then the one whose last turn is longest ago. So a submitter that has nothing there never waits
behind another one's backlog. ``lua/prelude.lua`` of the queue computes the same.

In the queue of the cloud a submitter's tasks with a latency target are in a lane of their own, as if they were those of
another submitter, which has :data:`LANE` behind its name. A limit is for both lanes together.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Collection, Iterator, KeysView, Mapping
from typing import Final, Generic, TypeVar

_Item = TypeVar("_Item")

#: What the lane of tasks with a latency target has behind the name of their submitter. No id of an identity has it.
LANE: Final = "!"

#: In the name of a service account at an endpoint of its creator: behind the id of the creator, whose quotas it uses,
#: and before its own, by which it has turns and limits.
PAYS_FOR: Final = "/"

#: The heap is built again when it is larger than this, and larger than four entries for each submitter.
_MOST_STALE: Final = 64

#: Later than all turns of submitters that had nothing taken when they came.
_SERVED: Final = 2**31

#: The level of submitters that have as many taken as they may have.
_PARKED: Final = 2**62


class FairQueue(Generic[_Item]):
    """Waiting items of several submitters, first in, first out for each of them. Every call takes a time that does not
    depend on how many items wait, except :meth:`remove`, and grows with the logarithm of the number of submitters.

    :param weights: how many items a submitter may have taken for each one of another; 1 for those not named.
    """

    def __init__(self, weights: Mapping[str, int] | None = None) -> None:
        self._weights: Mapping[str, int] = weights or {}
        self._waiting: dict[str, collections.deque[_Item]] = {}
        #: For each submitter with waiting items, when it had its last turn, or when it came with nothing taken.
        self._turns: dict[str, int] = {}
        #: For each submitter with taken items, when it had its last turn.
        self._last_turns: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._limits: Mapping[str, int] = {}
        #: Level, turn, submitter. An entry is stale if one of them has changed since. Not kept for a single submitter.
        self._heap: list[tuple[int, int, str]] = []
        self._next_turn = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def submitters(self) -> int:
        """How many submitters have waiting items."""
        return len(self._waiting)

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Change the weights; what is taken counts by the new ones."""
        self._weights = weights
        self._rebuild()

    def set_limits(self, limits: Mapping[str, int]) -> None:
        """Change how many items of a submitter may be taken at a time, in both lanes together; a submitter that has as
        many is passed over."""
        self._limits = limits
        self._rebuild()

    def limit_reached(self, submitter: str) -> int:
        """The limit of a submitter with waiting items that has as many taken, else 0."""
        is_reached = submitter in self._turns and self._is_full(submitter)
        return self._limits[identity_of(submitter)] if is_reached else 0

    def waiting(self) -> KeysView[str]:
        """The submitters with waiting items, in no order."""
        return self._waiting.keys()

    def in_turn(self) -> list[str]:
        """The same, the next one first."""
        return sorted(self._turns, key=lambda each: (self._level(each), self._turns[each]))

    def of(self, submitter: str) -> collections.deque[_Item]:
        """The waiting items of a submitter, oldest first."""
        return self._waiting.get(submitter) or collections.deque()

    def items(self) -> Iterator[_Item]:
        """All that wait, submitter by submitter."""
        return itertools.chain.from_iterable(self._waiting.values())

    def add(self, submitter: str, item: _Item) -> None:
        """Put an item behind the submitter's others."""
        waiting = self._waiting.get(submitter)
        (self._enter(submitter) if waiting is None else waiting).append(item)
        self._length += 1

    def add_several(self, submitter: str, items: Collection[_Item]) -> None:
        """The same for several items."""
        waiting = self._waiting.get(submitter)
        (self._enter(submitter) if waiting is None else waiting).extend(items)
        self._length += len(items)

    def put_back(self, submitter: str, item: _Item) -> None:
        """Put an item before the submitter's others."""
        self._enter(submitter).appendleft(item)
        self._length += 1

    def remove(self, submitter: str, item: _Item) -> None:
        """Take out an item that does not count as taken.

        :raises ValueError: if it does not wait.
        """
        self.of(submitter).remove(item)
        self._length -= 1
        self._leave_if_empty(submitter)

    def clear(self) -> list[_Item]:
        """Take out all that wait; it does not count as taken."""
        items = list(self.items())
        self._waiting.clear()
        self._turns.clear()
        self._heap.clear()
        self._length = 0
        return items

    def take(self, *, new_submitters_only: bool = False, submitter: str | None = None) -> tuple[str, _Item, int] | None:
        """Take the next item; it counts until :meth:`done`. None if nothing waits.

        :param new_submitters_only: only of a submitter that has fewer items taken than its weight.
        :param submitter: only of this one, whether or not it is its turn.
        :return: its submitter, the item, and the turn, for :meth:`undo`.
        """
        is_next = submitter is None
        if submitter is not None:
            if submitter not in self._turns:
                return None
            turn = self._turns[submitter]
        elif len(self._turns) == 1:
            ((submitter, turn),) = self._turns.items()
            if self._limits and self._level(submitter) == _PARKED:
                return None
        elif (head := self._head()) is not None:
            _, turn, submitter = head
        else:
            return None
        taken = self._taken.get(submitter, 0)
        if new_submitters_only and taken >= self._weights.get(submitter, 1):
            return None
        waiting = self._waiting[submitter]
        item = waiting.popleft()
        self._length -= 1
        self._taken[submitter] = taken + 1
        self._next_turn += 1
        last = self._last_turns[submitter] = _SERVED + self._next_turn
        if waiting:
            self._turns[submitter] = last
            if not is_next:
                self._push(submitter)
            elif len(self._turns) > 1:
                heapq.heapreplace(self._heap, (self._level(submitter), last, submitter))
        else:
            self._leave_if_empty(submitter)
        self._push_other_lane(submitter)
        return submitter, item, turn

    def take_several(self, submitter: str, count: int) -> list[_Item]:
        """Take ``count`` waiting items of a submitter: the same as ``count`` calls of :meth:`take` for it."""
        waiting = self._waiting[submitter]
        items = [waiting.popleft() for _ in range(count)]
        self._length -= count
        self._taken[submitter] = self._taken.get(submitter, 0) + count
        self._next_turn += count
        last = self._last_turns[submitter] = _SERVED + self._next_turn
        if waiting:
            self._turns[submitter] = last
            self._push(submitter)
        else:
            self._leave_if_empty(submitter)
        self._push_other_lane(submitter)
        return items

    def undo(self, submitter: str, item: _Item, turn: int) -> None:
        """Undo a :meth:`take`. Undo several in reverse order."""
        self.put_back(submitter, item)
        self._turns[submitter] = self._last_turns[submitter] = turn
        self.done(submitter)

    def hold(self, submitter: str) -> None:
        """Count an item as taken that did not wait."""
        self._taken[submitter] = self._taken.get(submitter, 0) + 1
        self._push(submitter)
        self._push_other_lane(submitter)

    def done(self, submitter: str) -> None:
        """An item that was taken has ended, or waits again."""
        left = self._taken[submitter] - 1
        if left:
            self._taken[submitter] = left
        else:
            del self._taken[submitter]
            self._last_turns.pop(submitter, None)
        if len(self._turns) > 1:
            self._push(submitter)
            self._push_other_lane(submitter)

    def _level(self, submitter: str) -> int:
        if self._limits and self._is_full(submitter):
            return _PARKED
        return self._taken.get(submitter, 0) // self._weights.get(submitter, 1)

    def _is_full(self, submitter: str) -> bool:
        """Whether a submitter has as many items taken as it may have."""
        limit = self._limits.get(identity_of(submitter))
        if limit is None:
            return False
        return self._taken.get(submitter, 0) + self._taken.get(_other_lane(submitter), 0) >= limit

    def _enter(self, submitter: str) -> collections.deque[_Item]:
        waiting = self._waiting.get(submitter)
        if waiting is None:
            waiting = self._waiting[submitter] = collections.deque()
            last = self._last_turns.get(submitter)
            if last is None:
                last = self._next_turn = self._next_turn + 1
            self._turns[submitter] = last
            if len(self._turns) == 2:
                self._rebuild()
            else:
                self._push(submitter)
        return waiting

    def _leave_if_empty(self, submitter: str) -> None:
        if not self._waiting[submitter]:
            del self._waiting[submitter], self._turns[submitter]

    def _push(self, submitter: str) -> None:
        turn = self._turns.get(submitter)
        if turn is None or len(self._turns) == 1:  # a single submitter needs no heap
            return
        if len(self._heap) >= max(_MOST_STALE, 4 * len(self._turns)):
            self._rebuild()
        else:
            heapq.heappush(self._heap, (self._level(submitter), turn, submitter))

    def _push_other_lane(self, submitter: str) -> None:
        if self._limits:
            self._push(_other_lane(submitter))

    def _rebuild(self) -> None:
        self._heap = [(self._level(each), at, each) for each, at in self._turns.items()]
        heapq.heapify(self._heap)

    def _head(self) -> tuple[int, int, str] | None:
        """The entry of the submitter that is next; stale ones before it are dropped."""
        heap = self._heap
        while heap:
            level, turn, submitter = heap[0]
            if level == _PARKED == self._level(submitter):
                return None
            if self._turns.get(submitter) == turn and level == self._level(submitter):
                return heap[0]
            heapq.heappop(heap)
        return None


def payer_of(submitter: str) -> str:
    """Identity whose quotas the tasks of a submitter use, by the submitter's name in a queue."""
    return submitter.removesuffix(LANE).partition(PAYS_FOR)[0]


def identity_of(submitter: str) -> str:
    """Identity by which a submitter has weight and limits, by the submitter's name in a queue."""
    return submitter.removesuffix(LANE).rpartition(PAYS_FOR)[2]


def _other_lane(submitter: str) -> str:
    return submitter.removesuffix(LANE) if submitter.endswith(LANE) else submitter + LANE
