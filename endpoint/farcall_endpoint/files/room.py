"""Shares of the cache: which tasks hold copies, who gives way where there is no room, and who is next. No I/O.

Max-min fairness in bytes. The *level* of a task is what the tasks of its payer before it hold. Tasks without a worker
give way to a task with a lower level, those with the highest level first. Of payers that hold nothing, the one that has
waited longest is first. While a task waits for room, payers that hold an equal share or more begin no task with a
higher level. So a payer with one task waits for the end of tasks that run, and not for those that wait for a worker.

A task that needs more than an equal share could hold up all others for as long as the longest task runs. So only in its
*turn* others wait that hold less. After a turn without success others have nine times as long; the next turn is twice
as long. Instants are epoch seconds.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

_TURN_S: Final = 60.0
_PAUSE: Final = 9
_HOLD_S: Final = 60.0
"""Time for which a task without a worker keeps room that a payer without any room needs; the task's node may never
come. The time doubles each time that the task gives way."""
_TRY_S: Final = 5.0
"""Time for which other payers wait until a task has its room. The limit exists because a storage may never answer."""
_RETRY_S: Final = 60.0
"""Longest time that a payer waits for room before its transfer is tried again."""

_Key = tuple[int, int, int]
"""Level, claim, number of the place: the lowest one is first."""


class Lack(NamedTuple):
    """Decision about a transfer that has no room.

    :param give_way: tasks that lose their copies, in this order.
    :param tries_again: whether the transfer is tried again in a moment; else its tasks give way, too, and wait.
    """

    give_way: Collection[str]
    tries_again: bool


@dataclasses.dataclass(slots=True, eq=False)
class _Place:
    """A task with a directory. ``contents``: what its copies take, by SHA-256. ``since``: when it began to hold them
    without a worker. ``is_fixed``: it has a worker, or had one."""

    task_id: str
    submitter: str
    payer: str
    number: int
    since: float
    contents: dict[str, int] = dataclasses.field(default_factory=dict)
    is_moving: bool = True
    is_fixed: bool = False


@dataclasses.dataclass(slots=True)
class _Payer:
    """A payer with tasks. ``claim``: a number that is lower the longer it has held nothing. ``held``: how many tasks
    have each content. ``moving``: how many tasks are staged, at most ``window`` if that is not None. ``is_waiting``:
    whether tasks wait for that.

    ``short``: the task that has no room; ``short_number``, ``level``: of this task; ``is_trying``: whether others gave
    way for it. ``tries_until``: so long others wait for it. ``waits_until``: when it is tried again. ``turn_of``: the
    task that has the turn, or had the last one.
    """

    claim: int
    places: dict[str, _Place] = dataclasses.field(default_factory=dict)
    held: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    held_bytes: int = 0
    moving: int = 0
    window: int | None = None
    is_waiting: bool = False
    short: str = ""
    level: int = 0
    short_number: int = 0
    is_trying: bool = False
    tries_until: float = 0.0
    waits_until: float = 0.0
    turn_of: str = ""
    turn_at: float = 0.0
    turn_ends_at: float = 0.0
    next_turn_at: float = 0.0
    turn_s: float = _TURN_S

    @property
    def is_here(self) -> bool:
        """Whether it has any task."""
        return bool(self.places or self.is_waiting)


class Room:
    """The places of all tasks with directories."""

    def __init__(self) -> None:
        self._payers: dict[str, _Payer] = {}
        self._places: dict[str, _Place] = {}
        self._removing: dict[str, int] = {}  # bytes, by task
        self._numbers = itertools.count(1)
        self._times: collections.Counter[str] = collections.Counter()  # that a task gave way
        self._equal_bytes = 0  # an equal share, when there was no room last

    # -- places --------------------------------------------------------------------------------------------------------

    def came(self, payer: str, now: float) -> None:
        """A task of a payer waits to be staged."""
        share = self._payers.get(payer)
        if share is None:
            share = self._new(payer, now)
        elif not (share.places or share.is_waiting):  # it is here for its turns only
            share.claim = next(self._numbers)
        share.is_waiting = True

    def _new(self, payer: str, now: float) -> _Payer:
        gone = [name for name, each in self._payers.items() if not each.is_here and now >= each.next_turn_at]
        for name in gone:
            del self._payers[name]
        share = self._payers[payer] = _Payer(next(self._numbers))
        return share

    def begin(self, task_id: str, number: int, submitter: str, payer: str, now: float) -> None:
        """A task begins to be staged; ``number``: its own, lower for those that came before."""
        self._add(_Place(task_id, submitter, payer, number, now))
        share = self._payers[payer]
        if share.short == task_id:
            share.tries_until = now + _TRY_S

    def _add(self, place: _Place) -> None:
        share = self._payers.get(place.payer) or self._new(place.payer, place.since)
        self._places[place.task_id] = share.places[place.task_id] = place
        share.moving += place.is_moving

    def add(self, task_id: str, sha256: str, size_bytes: int) -> None:
        """Record that a task has a copy of ``size_bytes``."""
        place = self._places[task_id]
        if sha256 not in place.contents:
            share = self._payers[place.payer]
            place.contents[sha256] = size_bytes
            share.held[place.submitter, sha256] += 1
            if share.held[place.submitter, sha256] == 1:
                share.held_bytes += size_bytes

    def staged(self, task_id: str, now: float) -> None:
        """A task has all of its files."""
        place = self._places[task_id]
        share = self._payers[place.payer]
        self._stop(place)
        place.since = now
        if share.window is not None:
            share.window += 1
        if share.short == task_id:
            share.short, share.is_trying, share.tries_until = "", False, 0.0
        if share.turn_of == task_id and now < share.turn_ends_at:
            share.turn_ends_at, share.turn_s = now, _TURN_S
            share.next_turn_at = now + (now - share.turn_at)

    def started(self, task_id: str) -> None:
        """A task has a worker."""
        if (place := self._places.get(task_id)) is not None:
            place.is_fixed = True

    def waits(self, task_id: str, now: float) -> None:
        """A task that had a worker waits for one."""
        if (place := self._places.get(task_id)) is not None:
            place.is_fixed, place.since = False, now

    def store(self, task_id: str, submitter: str, payer: str, now: float) -> bool:
        """A task has run, and what it has written is stored. Whether it had copies: it needs none any more."""
        place = self._places.get(task_id)
        if place is None:
            self._add(_Place(task_id, submitter, payer, 0, now, is_moving=False, is_fixed=True))
            return False
        had_copies = bool(place.contents)
        self._clear(place, keeps_claim=False)
        return had_copies

    def leave(self, task_id: str, *, gives_way: bool) -> str | None:
        """A task has no place any more: its submitter, or None if it had none. :meth:`removed` follows.

        :param gives_way: whether it waits for another one.
        """
        place = self._places.pop(task_id, None)
        if place is None:
            return None
        share = self._payers[place.payer]
        del share.places[task_id]
        if share.short == task_id:
            share.is_trying, share.tries_until = False, 0.0
        self._stop(place)
        self._removing[task_id] = sum(place.contents.values())
        self._clear(place, keeps_claim=gives_way)
        return place.submitter

    def removed(self, task_id: str) -> None:
        """The directory of a task is gone."""
        self._removing.pop(task_id, None)

    def end(self, task_id: str, payer: str = "") -> None:
        """A task has ended; ``payer``, if it was not staged."""
        del self._times[task_id]
        share = self._payers.get(payer)
        if share is not None and share.short == task_id:
            share.short, share.is_trying, share.tries_until, share.waits_until = "", False, 0.0, 0.0
            share.turn_ends_at = 0.0

    def number_of(self, task_id: str) -> int:
        """The number of a task with a place."""
        return self._places[task_id].number

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    def _stop(self, place: _Place) -> None:
        self._payers[place.payer].moving -= place.is_moving
        place.is_moving = False

    def _clear(self, place: _Place, *, keeps_claim: bool) -> None:
        share = self._payers[place.payer]
        for sha256, size_bytes in place.contents.items():
            share.held[place.submitter, sha256] -= 1
            if not share.held[place.submitter, sha256]:
                del share.held[place.submitter, sha256]
                share.held_bytes -= size_bytes
        if place.contents and not share.held and not keeps_claim:
            share.claim = next(self._numbers)
        place.contents.clear()

    # -- who is next ---------------------------------------------------------------------------------------------------

    def in_order(self, payers: Iterable[str], now: float) -> list[str]:
        """Return the payers, of those with waiting tasks, that may begin a task now, the first one first."""
        short = [(share.level, share.claim, name) for name, share in self._payers.items() if share.short]
        if not short:
            return list(payers)
        turns = [each for each in short if now < self._payers[each[2]].turn_ends_at]
        first, first_turn = min(short), min(turns, default=None)
        first_try = min([each for each in short if now < self._payers[each[2]].tries_until], default=None)
        found = []
        for payer in payers:
            share = self._payers[payer]
            key = share.held_bytes, share.claim, payer
            if share.is_trying or now < share.waits_until:
                continue
            is_behind = payer != first[2] and key > first
            average_bytes = share.held_bytes // max(1, len(share.places))
            if is_behind and (share.moving or share.held_bytes + average_bytes > self._equal_bytes):
                continue
            if is_behind and share.window is None:
                share.window = 1
            if first_turn is not None and payer != first_turn[2] and key > first_turn:
                continue
            if first_try is not None and payer != first_try[2] and key > first_try and share.window is not None:
                continue
            found.append(key)
        found.sort()
        for number, (_, _, payer) in enumerate(found):
            if self._payers[payer].short:  # the others wait for what becomes of it
                return [payer for _, _, payer in found[: number + 1]]
        return [payer for _, _, payer in found]

    def may_begin(self, payer: str) -> bool:
        """Whether one more task of a payer may be staged at present. A payer with a task that has no room stages one
        task at a time."""
        share = self._payers[payer]
        if share.short:
            return not share.moving
        return share.window is None or share.moving < share.window

    def all_began(self, payer: str) -> None:
        """No task of a payer waits to be staged."""
        share = self._payers[payer]
        share.is_waiting, share.window = False, None

    def room_came(self) -> None:
        """There may be room: payers need not wait any longer to try it."""
        for share in self._payers.values():
            share.waits_until = 0.0

    def next_deadline(self, now: float) -> float | None:
        """When a payer may begin that may not now."""
        instants = [
            at
            for each in self._payers.values()
            if each.short
            for at in (each.waits_until, each.turn_ends_at, each.tries_until)
        ]
        return min([at for at in instants if at > now], default=None)

    # -- no room -------------------------------------------------------------------------------------------------------

    def lacks(
        self,
        task_ids: Collection[str],
        missing_bytes: int,
        *,
        budget_bytes: int,
        drafts: Mapping[str, int],
        now: float,
    ) -> Lack | None:
        """Decide about tasks of a payer that wait for a file without room; None if no other task has room.

        :param missing_bytes: missing room of all their files of known size.
        :param budget_bytes: room of all tasks; 0: unknown.
        :param drafts: room of files in transit, by a task that waits for them.
        """
        others = [each for name, each in self._places.items() if name not in task_ids]
        if not self._removing and not any(e.is_fixed or e.contents or e.task_id in drafts for e in others):
            return None
        claimant = min([self._places[each] for each in task_ids], key=lambda each: each.number)
        share = self._payers[claimant.payer]
        share.window = max(1, share.moving // 2)
        if share.short and share.short != claimant.task_id and share.short_number < claimant.number:
            return Lack((), tries_again=False)  # another one is before it
        ranked: list[tuple[_Key, int, _Place]] = []
        for payer in self._payers.values():
            for place, level, size_bytes in _levels(payer, drafts):
                ranked.append(((level, payer.claim, place.number), size_bytes, place))
                if place is claimant:
                    share.level = level
        ranked.sort(key=lambda each: each[0], reverse=True)
        own = share.level, share.claim, claimant.number
        present = sum(each.is_here for each in self._payers.values())
        all_bytes = budget_bytes or sum([size_bytes for _, size_bytes, _ in ranked])
        self._equal_bytes = all_bytes // present
        claimed_bytes = sum(claimant.contents.values()) + missing_bytes
        is_equal = share.level + claimed_bytes <= self._equal_bytes
        share.short, share.short_number = claimant.task_id, claimant.number
        has_turn = not is_equal and self._has_turn(share, now)

        def gives_way(key: _Key, size_bytes: int, place: _Place) -> bool:
            if place.is_fixed or not (place.contents or place.is_moving):
                return False
            if key > own:
                return has_turn or place.payer == claimant.payer or key[0] + size_bytes > self._equal_bytes
            hold_s = _HOLD_S * 2 ** self._times[place.task_id]
            return not share.level and place.payer != claimant.payer and now >= place.since + hold_s

        needed_bytes = missing_bytes - sum(self._removing.values())
        chosen: list[tuple[_Key, _Place]] = []
        for key, size_bytes, place in ranked:
            if gives_way(key, size_bytes, place):
                if needed_bytes > 0 and (place.contents or place.task_id in drafts):
                    needed_bytes -= size_bytes
                elif not (place.is_moving and place.payer != claimant.payer and key > own):
                    continue  # others that move would take what is given
                chosen.append((key, place))
        share.is_trying = needed_bytes <= 0
        share.tries_until = now + _TRY_S if share.is_trying else 0.0
        if not share.is_trying:
            share.waits_until = now + _RETRY_S
            if not (is_equal or has_turn):
                chosen = []
            chosen = [each for each in chosen if each[1].task_id not in task_ids]
        for key, place in chosen:
            self._times[place.task_id] += bool(place.contents)
            loser = self._payers[place.payer]
            if loser.window is None:
                loser.window = max(1, loser.moving // 2)
            if key < own:  # it has had its time
                loser.claim = next(self._numbers)
        return Lack([place.task_id for _, place in chosen], share.is_trying)

    def _has_turn(self, share: _Payer, now: float) -> bool:
        """Whether a payer has its turn, which begins if it may."""
        if now >= share.turn_ends_at and now >= share.next_turn_at:
            share.turn_at, share.turn_ends_at = now, now + share.turn_s
            share.next_turn_at = share.turn_ends_at + _PAUSE * share.turn_s
            share.turn_s *= 2
        share.turn_of = share.short
        return now < share.turn_ends_at


def _levels(share: _Payer, drafts: Mapping[str, int]) -> Iterator[tuple[_Place, int, int]]:
    """The places of a payer, each with its level and with what it adds to that."""
    seen: set[tuple[str, str]] = set()
    level = 0
    for place in sorted(share.places.values(), key=lambda each: (not each.is_fixed, each.number)):
        added = drafts.get(place.task_id, 0)
        for sha256, size_bytes in place.contents.items():
            if (place.submitter, sha256) not in seen:
                seen.add((place.submitter, sha256))
                added += size_bytes
        yield place, level, added
        level += added
