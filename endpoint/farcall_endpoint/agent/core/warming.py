"""Warming-aware scheduling: tasks go where their environment is warm, and as few workers are started as are worth it.

As in the paper (HPDC 2020, section 6), a manager with an idle worker of a task's environment comes first, the one
with the most of them before others; then one that can fork a worker; then one with free slots, where a worker must be
started. What the paper leaves open is how many to start: another one while the work of an environment that is here
would keep those that it has busy for longer than a start takes, within its share of the slots. Of an environment
whose tasks have never been seen to run, one worker is started at first, and twice as many after each
``_DOUBLING_S`` without any; on a node that prepares it, only one until that is done.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from farcall_endpoint.agent.core.loads import (
    MOST_OVERTAKEN,
    NO_ENVIRONMENTS,
    EnvironmentDemand,
    EnvironmentLoad,
    ManagerLoad,
    Placed,
    place_each,
)
from farcall_endpoint.agent.core.tasks import Task

_START_S: Final = 2.0
"""Start time to expect of a worker in an environment until a manager has reported it."""
_OWN_START_S: Final = 0.3
"""Start time to expect of a worker in the endpoint's own Python."""
_FORK_S: Final = 0.02
_UNFAIR: Final = 2.0
"""An environment gives a worker's slot to another one whose wait is at least this many times as long."""
_DOUBLING_S: Final = 15.0
_NOTHING: Final = EnvironmentLoad()


class WarmingAwarePolicy:
    """Place tasks at managers where their environment is warm; without environments, at a random manager."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def place(
        self,
        tasks: Iterable[Task],
        managers: Sequence[ManagerLoad],
        *,
        depth: int,
        now: float,
        environments: Mapping[str, EnvironmentDemand] = NO_ENVIRONMENTS,
    ) -> Placed:
        if not environments:
            return place_each(tasks, managers, depth, now, self._rng.choice, by_files=True)
        return _Plan(managers, environments, now, self._rng).place(tasks)


@dataclasses.dataclass(slots=True)
class _Seats:
    """An environment at a manager: its workers, the workers that have a slot, and its tasks there, planned ones
    included."""

    load: EnvironmentLoad
    workers: int
    ready: int
    sent: int

    @property
    def is_prepared_first(self) -> bool:
        """Whether a task there waits until the node has prepared it: others would only hold slots until then."""
        return self.load.preparing and not self.load.ready and self.sent > 0


@dataclasses.dataclass(slots=True)
class _Node:
    """A manager. ``places``: slots on which no task runs or waits for a worker. ``spare``: those without a worker."""

    manager: ManagerLoad
    places: int
    spare: int


@dataclasses.dataclass(slots=True)
class _Need:
    """An environment with waiting tasks. ``places``: where they may go, in this order; ``cold``: there a worker is
    started, ``behind``: there they wait for another task."""

    key: str
    demand: EnvironmentDemand
    start_s: float
    workers: int
    share: float = 0.0
    left: int = 0
    seats: list[tuple[_Node, _Seats]] = dataclasses.field(default_factory=list)
    places: list[tuple[ManagerLoad, bool, bool]] = dataclasses.field(default_factory=list)

    def wait_s(self, workers: int) -> float:
        """Return the time for which ``workers`` workers have work, as far as that is known."""
        tasks = self.demand.waiting + self.demand.sent
        run_s = self.start_s if self.demand.run_s is None else self.demand.run_s
        return tasks * run_s / workers if workers > 0 else math.inf

    def target(self, start_s: float, *, now: float) -> int:
        """Return the number of workers that are worth a start of ``start_s``."""
        tasks = self.demand.waiting + self.demand.sent
        if self.demand.run_s is None:
            doubled = int(max(0.0, now - self.demand.since) / _DOUBLING_S)
            wanted = 1 << min(doubled, 16)
        else:
            wanted = math.ceil(tasks * self.demand.run_s / max(start_s, 1e-3))
        return max(1, min(wanted, tasks))


def _taken(place: tuple[_Node, _Seats]) -> int:
    """How much a node has to do for its workers of an environment."""
    node, seats = place
    return seats.sent + node.manager.ahead - seats.ready - seats.load.parked


def _is_as_good(place: tuple[_Node, _Seats], planned: tuple[_Node, _Seats] | None, *, is_cold: bool) -> bool:
    """Whether a node has a place like the one that was planned: with an idle worker, or where one must be started."""
    node, seats = place
    if planned is None or node.places <= 0 or node is planned[0]:
        return False
    if not is_cold:
        return seats.workers > seats.sent
    is_alike = seats.load.forkable == planned[1].load.forkable and node.spare > 0
    return is_alike and seats.workers <= seats.sent and not seats.is_prepared_first


class _Plan:
    """One turn: first how many tasks of each environment go where, then which."""

    def __init__(
        self,
        managers: Sequence[ManagerLoad],
        environments: Mapping[str, EnvironmentDemand],
        now: float,
        rng: random.Random,
    ) -> None:
        self._now = now
        self._rng = rng
        self._nodes: list[_Node] = []
        self._needs: dict[str, _Need] = {}
        for key, demand in environments.items():
            start_s = _OWN_START_S if demand.environment is None else _START_S
            self._needs[key] = _Need(key, demand, start_s, 0, left=demand.waiting)
        self._read_loads(managers)
        self._share_slots()
        self._use_warm()
        self._start_workers()
        self._queue_behind()

    def _read_loads(self, managers: Sequence[ManagerLoad]) -> None:
        """What each environment has at each manager that can run it."""
        known_start_s: dict[str, float] = {}
        failing: dict[str, list[tuple[_Node, EnvironmentLoad]]] = {}
        for manager in managers:
            here = manager.environments
            workers_of: dict[str, int] = {}
            starting = sent = running = parked = awaited = 0
            for key, each in here.items():
                count = workers_of[key] = each.workers
                starting += each.starting
                if key:
                    sent += each.sent - each.waiting
                    parked += each.parked
                    if each.is_awaited:
                        awaited += count
                    else:
                        running += min(each.sent, count)
            workers = sum(workers_of.values()) - workers_of.get("", 0) - parked - awaited
            capacity = manager.slots + starting
            own_sent = max(0, manager.slots - manager.free - sent)
            own_workers = max(0, capacity - workers) if "" not in here else max(workers_of[""], min(1, own_sent))
            running += min(own_sent, max(own_workers, 1))
            node = _Node(manager, max(0, capacity - running), capacity - workers)
            self._nodes.append(node)
            for key, need in self._needs.items():
                load = here.get(key, _NOTHING)
                if manager.image == key and key:
                    seats = _Seats(load, capacity, capacity, load.sent)
                elif manager.refusal(need.demand.environment):
                    continue
                elif key:
                    seats = _Seats(load, workers_of.get(key, 0), load.ready - load.parked, load.sent)
                else:
                    seats = _Seats(load, own_workers, own_workers, own_sent)
                if load.problem:
                    failing.setdefault(key, []).append((node, load))
                    continue
                need.seats.append((node, seats))
                need.workers += seats.workers
                if load.start_s is not None and not load.forkable:
                    known_start_s[key] = max(known_start_s.get(key, 0.0), load.start_s)
        for key, start_s in known_start_s.items():
            self._needs[key].start_s = start_s
        for key, nodes in failing.items():
            if not self._needs[key].seats:  # the manager answers with its problem, or tries again when that is due
                self._needs[key].seats = [(node, _Seats(load, 0, 0, load.sent)) for node, load in nodes]

    def _share_slots(self) -> None:
        """The slots that each environment should have: in proportion to its work."""
        slots = sum(node.manager.slots for node in self._nodes)
        work = {
            key: (need.demand.waiting + need.demand.sent) * (1.0 if need.demand.run_s is None else need.demand.run_s)
            for key, need in self._needs.items()
        }
        total = sum(work.values()) or 1.0
        for key, need in self._needs.items():
            need.share = slots * work[key] / total

    def _use_warm(self) -> None:
        """Idle workers of an environment get its tasks; the manager with the most of them comes first."""
        given = self._make_room()
        for need in self._needs.values():
            if not need.left:
                continue
            usable = sum(max(0, seats.workers - seats.sent) for _, seats in need.seats) - given.get(need.key, 0)
            for node, seats in sorted(need.seats, key=_taken):
                count = min(seats.workers - seats.sent, node.places, need.left, usable)
                if count > 0:
                    need.places += [(node.manager, False, False)] * count
                    seats.sent += count
                    node.places -= count
                    need.left -= count
                    usable -= count

    def _make_room(self) -> dict[str, int]:
        """How many of its idle workers an environment leaves to others: those wait far longer for a worker than its
        own tasks, and have no other place. So two that alternate do not take a slot from each other all the time."""
        waiting = [need for need in self._needs.values() if need.left and need.seats]
        idle = {need.key: sum(max(0, seats.workers - seats.sent) for _, seats in need.seats) for need in waiting}
        places = sum(node.places for node in self._nodes)
        unclaimed = places - sum(min(idle[need.key], need.left) for need in waiting)
        given: dict[str, int] = {}
        for poor in sorted(waiting, key=lambda each: -each.wait_s(each.workers)):
            if poor.workers >= poor.target(poor.start_s, now=self._now):
                continue
            if unclaimed > 0:
                unclaimed -= 1
                continue
            rich = [each for each in waiting if idle[each.key] > given.get(each.key, 0) and each.workers > 1]
            if not rich:
                break
            giver = min(rich, key=lambda each: each.wait_s(each.workers - 1))
            left = giver.workers - given.get(giver.key, 0) - 1
            if poor.wait_s(poor.workers) > _UNFAIR * (giver.wait_s(left) + poor.start_s):
                given[giver.key] = given.get(giver.key, 0) + 1
        return given

    def _start_workers(self) -> None:
        """Workers are started on other places: of the environment first that has the least of its share."""
        lacking = [need for need in self._needs.values() if need.left and need.seats]
        while lacking:
            need = min(lacking, key=lambda each: each.workers / max(each.share, 1e-9))
            found = self._best_place(need)
            if found is None:
                lacking.remove(need)
                continue
            node, seats = found
            node.places -= 1
            node.spare -= 1
            seats.sent += 1
            seats.workers += 1
            need.workers += 1
            need.left -= 1
            need.places.append((node.manager, True, False))
            if not need.left:
                lacking.remove(need)

    def _best_place(self, need: _Need) -> tuple[_Node, _Seats] | None:
        """Return the manager that should start a worker of an environment; None if no manager should."""
        open_ = [each for each in need.seats if each[0].places > 0 and not each[1].is_prepared_first]
        forking = [each for each in open_ if each[1].load.forkable]
        if forking and need.workers < need.target(_FORK_S, now=self._now):
            open_ = forking
        elif need.workers >= need.target(need.start_s, now=self._now):
            return None
        return max(open_, key=lambda each: (each[0].spare > 0, each[0].places, self._rng.random()), default=None)

    def _queue_behind(self) -> None:
        """Queue short tasks behind running tasks of their own environment: never behind others, never for a start."""
        for need in self._needs.values():
            depth = need.demand.depth
            if not (need.left and depth):
                continue
            for node, seats in sorted(need.seats, key=lambda each: each[1].sent - each[1].ready * (1 + depth)):
                quick = max(0, seats.ready - node.manager.long.get(need.key, 0))
                count = min(seats.ready + quick * depth - seats.sent, need.left)
                for _ in range(count):
                    need.places.append((node.manager, False, True))
                need.left -= max(0, count)

    def _apart(self, need: _Need, task: Task, planned: ManagerLoad) -> ManagerLoad:
        """Another manager that is warm for a graph, if graphs can use all free slots of the one that was planned."""
        if planned.free > planned.ahead:
            return planned
        others = [
            node.manager
            for node, seats in need.seats
            if seats.ready > 0
            and node.manager.free > node.manager.ahead
            and node.manager.lasts(task.walltime_s, now=self._now)
            and not node.manager.lacks(task)
        ]
        return max(others, key=lambda each: each.free - each.ahead, default=planned)

    def _nearest(self, need: _Need, index: int, task: Task) -> int:
        """The index of a place that is as good as this one, on a node that lacks the fewest bytes of a task's files. It
        may be there only now, in exchange for this one."""
        planned, is_cold, is_behind = need.places[index]
        best, least = index, planned.lacking_bytes(task)
        seen = {planned.manager_id}
        for other in range(index - 1, max(-1, index - MOST_OVERTAKEN), -1):
            manager = need.places[other][0]
            if not least or need.places[other][1:] != (is_cold, is_behind):
                break
            if manager.manager_id not in seen and manager.lasts(task.walltime_s, now=self._now):
                seen.add(manager.manager_id)
                if (lacks := manager.lacking_bytes(task)) < least:
                    best, least = other, lacks
        if not least or is_behind:
            return best
        here = next((each for each in need.seats if each[0].manager is planned), None)
        found: tuple[_Node, _Seats] | None = None
        for each in need.seats if here is not None else ():
            if not (_is_as_good(each, here, is_cold=is_cold) and each[0].manager.lasts(task.walltime_s, now=self._now)):
                continue
            if (lacks := each[0].manager.lacking_bytes(task)) < least:
                found, least = each, lacks
        if here is None or found is None:
            return best
        for (node, seats), change in ((here, 1), (found, -1)):
            node.places += change
            seats.sent -= change
            if is_cold:
                node.spare += change
                seats.workers -= change
        need.places[index] = found[0].manager, is_cold, is_behind
        return index

    def place(self, tasks: Iterable[Task]) -> Placed:
        """Give the tasks the places of their environments, in order."""
        placed: Placed = []
        for need in self._needs.values():
            need.places.reverse()
        open_ = sum(len(need.places) for need in self._needs.values())
        overtaken = 0
        if not open_:
            return placed
        for task in tasks:
            found = self._needs.get(task.environment_key)
            manager = None if found is None else self._take(found, task)
            if manager is None:
                overtaken += 1
                if overtaken > MOST_OVERTAKEN:
                    break
                continue
            manager.count_down(task)
            placed.append((task, manager.manager_id))
            open_ -= 1
            if not open_:
                break
        return placed

    def _take(self, need: _Need, task: Task) -> ManagerLoad | None:
        """The next place where a task can run, of a graph one with few slots that others can use; None if there is
        none."""
        indexes: Iterable[int] = range(len(need.places) - 1, -1, -1)
        if task.graph is not None:
            indexes = sorted(indexes, key=lambda each: need.places[each][0].ahead - need.places[each][0].free)
        for index in indexes:
            manager, is_cold, is_behind = need.places[index]
            if (is_behind and not task.is_idempotent) or not manager.lasts(task.walltime_s, now=self._now):
                continue
            if task.graph is not None:
                if manager.lacks(task):
                    continue
                manager = self._apart(need, task, manager)
            elif task.contents:
                index = self._nearest(need, index, task)
                manager = need.places[index][0]
            del need.places[index]
            if is_cold and need.key:
                manager.environments.setdefault(need.key, EnvironmentLoad()).cold += 1
            return manager
        return None
