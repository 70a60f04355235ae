"""Calls of graphs and running tasks that other managers than their own run. Pure: no I/O, no clock.

The tasks stay at their manager, the *home* of their calls, which says how many of these wait. While other managers have
idle slots, and no task of the queue comes first, the agent asks a home for calls and passes them on; their outcomes go
back the same way. It knows which call is where; nothing of that is in the spool: calls are a part of their task.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final, cast

import msgspec

from farcall_common.environments import Environment
from farcall_common.event_log import UserBytes
from farcall_endpoint.agent.core.actions import CallMessage, PassOn
from farcall_endpoint.agent.core.events import CallsHandedOver, CallsHeard, CallsNotNeeded, Event
from farcall_endpoint.agent.core.loads import ManagerLoad
from farcall_endpoint.agent.core.managers import ManagerEntry, Managers
from farcall_endpoint.contracts.agent_manager import (
    CallEnd,
    CallNews,
    CallsDropped,
    CallsTaken,
    CancelTasks,
    Died,
    ManagerGone,
    RefuseCalls,
    RunCalls,
    Started,
    TakeCalls,
    Used,
)
from farcall_endpoint.host.shared_memory import Bytes, Frame

_MOST_AT_ONCE: Final = 256
"""Calls in one message."""
_NOTHING: Final = UserBytes()
_Part = tuple[list[CallEnd], list[tuple[int, Died]], list[tuple[int, Started]], list[tuple[int, str, Used]]]
_FORGOTTEN: Final = "it has not been named for so long that the endpoint does not know it any more"


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """A request to a home for calls, for which slots of another manager are kept free."""

    home: str
    key: str
    count: int


@dataclasses.dataclass(slots=True)
class _Placed:
    """A call at another manager. ``home``: empty if its outcome is not wanted any more."""

    home: str
    task_id: str
    other: str
    key: str
    is_idempotent: bool


class CallsElsewhere:
    """All calls at other managers than their home.

    :param managers: whose loads count these calls like tasks.
    """

    def __init__(self, managers: Managers) -> None:
        self._managers = managers
        #: By home and the key of their environment, how many more could leave.
        self.waiting: dict[str, dict[str, int]] = {}
        self._asked: dict[str, _Request] = {}  # by the manager that is to run them
        self._placed: dict[int, _Placed] = {}
        self._numbers: dict[tuple[str, str], int] = {}  # by home and id
        self._next_number = itertools.count(1)
        self._met: dict[str, set[str]] = {}  # by manager, those that have functions of it, or from which it has some
        #: To send, in this order; its taker clears it.
        self.messages: list[PassOn] = []

    def note(self, home: str, waiting: Iterable[tuple[str, int]]) -> None:
        """A home has reported the calls that may leave."""
        counts = {key: count for key, count in waiting if count > 0}
        self._managers.note_calls(home, waiting=bool(counts))
        if counts:
            self.waiting[home] = counts
        else:
            self.waiting.pop(home, None)

    # -- requests ------------------------------------------------------------------------------------------------------

    def ask(self, find: Callable[[str], Environment | None], *, depth: int, now: float) -> None:
        """Ask homes for calls, for managers with room.

        :param find: returns an environment by its key.
        :param depth: how many calls may wait behind each running one.
        """
        self._refuse(find)
        for load in self._managers.loads:
            if load.manager_id in self._asked:
                continue
            own = self.waiting.get(load.manager_id, {})
            for home, key in [(home, key) for home, counts in self.waiting.items() for key in counts]:
                if key in own or not self._runs(load, home, key, find, now):
                    continue
                is_only_elsewhere = bool(self._managers.members[home].load.refusal(find(key)))
                idle, room = self._room(load, depth, is_only_elsewhere=is_only_elsewhere)
                if room <= 0 or (idle <= 0 and 2 * room < load.slots * depth):
                    continue
                count = min(room, _MOST_AT_ONCE)
                self._asked[load.manager_id] = _Request(home, key, count)
                self._managers.lend(load.manager_id, key, count)
                self._send(home, TakeCalls(load.manager_id, key, count, max(0, idle)))
                self.waiting[home] = self.waiting.pop(home)  # homes take turns
                break

    def _room(self, load: ManagerLoad, depth: int, *, is_only_elsewhere: bool) -> tuple[int, int]:
        """The idle slots of a manager, and how many calls it takes.

        :param is_only_elsewhere: of calls that cannot run at home: they take turns with the tasks there, which may
            never leave a slot idle.
        """
        member = self._managers.members[load.manager_id]
        if is_only_elsewhere and (most := load.slots - member.guests) > load.free:
            return most, most
        if not load.ahead:
            return load.free, load.room(depth)
        idle = min(load.free, member.idle_workers)  # its own graphs may need the rest
        return idle, idle

    def _runs(
        self, load: ManagerLoad, home: str, key: str, find: Callable[[str], Environment | None], now: float
    ) -> bool:
        """Whether a manager can run calls of another one in an environment."""
        member = self._managers.members.get(home)
        if member is None or home == load.manager_id or load.image != member.load.image:
            return False
        if not load.lasts(None, now=now):
            return False
        if load.image:
            return True
        if not key:
            return not load.problem
        environment, here = find(key), load.environments.get(key)
        return environment is not None and not load.refusal(environment) and (here is None or not here.problem)

    def _refuse(self, find: Callable[[str], Environment | None]) -> None:
        """Tell homes of environments that no present manager can ever run."""
        for home, counts in list(self.waiting.items()):
            for key in [key for key in counts if key]:
                environment = find(key)
                reason = _FORGOTTEN if environment is None else self._managers.refusal(environment)
                if reason:
                    self._send(home, RefuseCalls(key, reason))
                    del counts[key]
            if not counts:
                del self.waiting[home]

    def taken(self, home: str, taken: CallsTaken, bodies: UserBytes) -> None:
        """A home hands over calls."""
        other = taken.to
        asked = self._asked.get(other)
        if asked is None or asked.home != home:  # that manager is gone
            if taken.calls:
                self._send(home, CallNews(returned=tuple(each.order.task_id for each in taken.calls)))
            return
        del self._asked[other]
        self._managers.lend(other, asked.key, len(taken.calls) - asked.count)
        counts = self.waiting.get(home, {})
        self.note(home, {**counts, taken.key: taken.waiting}.items())
        if not taken.calls:
            return
        calls = []
        for each in taken.calls:
            number, order = next(self._next_number), each.order
            self._placed[number] = _Placed(home, order.task_id, other, asked.key, order.options.idempotent)
            self._numbers[home, order.task_id] = number
            calls.append(msgspec.structs.replace(each, number=number))
        self._met.setdefault(home, set()).add(other)
        self._met.setdefault(other, set()).add(home)
        message = RunCalls(home, tuple(calls), taken.functions, taken.forget, taken.callees)
        self._send(other, message, bodies)

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def heard(self, other: str, news: CallNews, bodies: UserBytes) -> None:
        """News of calls from the manager that runs them: each home gets its part."""
        parts: dict[str, _Part] = collections.defaultdict(lambda: ([], [], [], []))
        for end in news.ended:
            if (over := self._over(other, end.number)) is not None:
                parts[over.home][0].append(end)
        for number, death in news.died:
            if (over := self._over(other, number)) is not None:
                parts[over.home][1].append((number, death))
        for number, start in news.started:
            if (placed := self._placed.get(number)) is not None and placed.other == other:
                parts[placed.home][2].append((number, start))
        for number, task_id, used in news.used:
            if (placed := self._placed.get(number)) is not None and placed.other == other:
                parts[placed.home][3].append((number, task_id, used))
        for home, (ended, died, started, uses) in parts.items():
            if home:
                part = CallNews(tuple(ended), tuple(died), tuple(started), used=tuple(uses))
                self._send(home, part, bodies if ended else _NOTHING)

    def dropped(self, home: str, task_ids: Iterable[str]) -> None:
        """A home does not need calls any more."""
        by_other: dict[str, list[str]] = {}
        for task_id in task_ids:
            if (number := self._numbers.pop((home, task_id), None)) is not None:
                placed = self._placed[number]
                placed.home = ""
                by_other.setdefault(placed.other, []).append(task_id)
        for other, ids in by_other.items():
            self._send(other, CancelTasks(tuple(ids)))

    def lost(self, manager: ManagerEntry, *, reason: str, suspects: int, unstarted: bool) -> None:
        """A manager is gone: calls of it elsewhere are not needed, and calls that it had go back.

        :param suspects: how many of those can have been running; as for tasks (:meth:`HeldTasks.reconsider`).
        """
        manager_id = manager.load.manager_id
        self.waiting.pop(manager_id, None)
        self._asked.pop(manager_id, None)
        for other, asked in list(self._asked.items()):
            if asked.home == manager_id:
                del self._asked[other]
                self._managers.lend(other, asked.key, -asked.count)
        self.dropped(manager_id, [task_id for home, task_id in self._numbers if home == manager_id])
        died: dict[str, list[tuple[int, Died]]] = {}
        returned: dict[str, list[str]] = {}
        mine = [(number, each) for number, each in self._placed.items() if each.other == manager_id]
        for index, (number, placed) in enumerate(mine):
            del self._placed[number]
            if not placed.home:
                continue
            self._numbers.pop((placed.home, placed.task_id), None)
            if unstarted or (placed.is_idempotent and index >= suspects):
                returned.setdefault(placed.home, []).append(placed.task_id)
            else:
                died.setdefault(placed.home, []).append((number, Died(placed.task_id, reason)))
        for home in {**died, **returned}:
            news = CallNews(died=tuple(died.get(home, ())), returned=tuple(returned.get(home, ())))
            self._send(home, news)
        for each in sorted(self._met.pop(manager_id, ())):
            self._met[each].discard(manager_id)
            self._send(each, ManagerGone(manager_id))

    def _over(self, other: str, number: int) -> _Placed | None:
        """A call has ended at a manager."""
        placed = self._placed.get(number)
        if placed is None or placed.other != other:
            return None
        del self._placed[number]
        self._managers.lend(other, placed.key, -1)
        if placed.home:
            self._numbers.pop((placed.home, placed.task_id), None)
        return placed

    def _send(self, manager_id: str, message: CallMessage, bodies: UserBytes = _NOTHING) -> None:
        self.messages.append(PassOn(manager_id, message, bodies))


def about_calls(manager_id: str, message: CallsTaken | CallNews | CallsDropped, bodies: Sequence[Frame]) -> Event:
    """The event of a manager's message about calls. Its bodies only pass through, and may be in files."""
    passing = UserBytes(cast("Sequence[Bytes]", bodies))
    match message:
        case CallsTaken():
            return CallsHandedOver(manager_id, message, passing)
        case CallNews():
            return CallsHeard(manager_id, message, passing)
        case CallsDropped(task_ids=task_ids):
            return CallsNotNeeded(manager_id, task_ids)


def run_times(news: CallNews) -> Sequence[float]:
    """How long calls ran."""
    return [
        end.ended_at - end.started_at for end in news.ended if end.started_at is not None and end.ended_at is not None
    ]
