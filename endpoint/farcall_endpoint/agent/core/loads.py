"""Loads of managers and the demand of environments, which scheduling policies read; and the plainest placement.

Instants are epoch seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from farcall_common.environments import Environment
from farcall_endpoint.agent.core.graphs import GraphNeeds
from farcall_endpoint.agent.core.tasks import Task
from farcall_endpoint.contracts.agent_manager import FileContent

MOST_OVERTAKEN: Final = 1000
"""So that a long queue is not read to its end in every turn."""
_UNKNOWN_TYPE: Final = "the endpoint's nodes do not have it"
_OTHER_IMAGE: Final = "the node runs another image"


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetime:
    """When a manager's block is over, in epoch seconds.

    :param drain_s: so much of it is kept free of tasks of unknown length.
    :param limit_s: what any task may run at most, whatever its own limit; None is no limit.
    """

    ends_at: float
    drain_s: float = 0.0
    limit_s: float | None = None

    def fits(self, walltime_s: float | None, *, now: float) -> bool:
        """Whether a task with such a limit can end before the block does."""
        known = [limit for limit in (walltime_s, self.limit_s) if limit is not None]
        left_s = self.ends_at - now
        return left_s >= min(known) if known else left_s > self.drain_s


@dataclasses.dataclass(slots=True, eq=False)
class EnvironmentLoad:
    """An environment at a manager.

    ``ready``: its workers there, idle or busy, and ``starting``: those that start, as the manager reported last.
    ``parked``: those of the idle ones that have no slot; they get the next that is free, without a start.
    ``preparing``: whether the node prepares it, or will. ``prepared``: whether it has done so. ``sent``: tasks that it
    has from the agent. ``cold``: those of them that were sent to have a worker started. ``waiting``: those of them that
    use no slot, as the node prepares it. ``forkable``, ``problem`` and ``start_s`` (seconds; None if not known) are the
    manager's, too.
    """

    ready: int = 0
    starting: int = 0
    forkable: bool = False
    problem: str = ""
    start_s: float | None = None
    sent: int = 0
    cold: int = 0
    parked: int = 0
    preparing: bool = False
    prepared: bool = False
    waiting: int = 0

    @property
    def is_awaited(self) -> bool:
        """Whether tasks there use no slot, since the node prepares it, and it has no worker."""
        return self.preparing and not (self.ready or self.starting)

    @property
    def workers(self) -> int:
        """Its workers there, with those that the tasks sent there make the manager start."""
        return max(self.ready + self.starting, min(max(self.cold, 1), self.sent))


@dataclasses.dataclass(slots=True, eq=False)
class ManagerLoad:
    """A manager as a policy sees it.

    ``slots``: its workers, of any environment. ``free``: slots without a task; below 0 by as many tasks as wait behind
    others; tasks whose environment is prepared use none. ``lifetime``: None if there is no limit, or it is unknown.
    ``types``: the technologies that it was asked for, each with why it does not work there, empty if it does.
    ``image``: the key of the only environment that it runs, empty if it is no such node. ``environments``: by key,
    those that it knows or has tasks of; that of tasks that name none, whose key is empty, may be missing. ``problem``:
    why those cannot run here now, empty if they can. ``ahead``: slots that graphs here can use beyond one for each,
    which count as ``free``. ``contents``: of files, which its node has, or gets for tasks that are here; each with the
    number of reasons. ``latency_slots``: workers for tasks with a target, beyond ``slots``, and ``latency_free``: those
    without a task; below 0 by as many as wait there. ``pressure``: the part of the time in which some process of the
    node waits for a CPU. ``late``: the latency classes that would need more of them. ``long``: tasks here that run
    for long, by the key of their environment; nothing should wait behind them. ``has_calls``: whether calls of tasks or
    graphs wait here, or some of other managers' run here: their places take turns, however long the tasks run.
    """

    manager_id: str
    slots: int
    free: int
    lifetime: Lifetime | None = None
    types: Mapping[str, str] = dataclasses.field(default_factory=dict)
    image: str = ""
    environments: dict[str, EnvironmentLoad] = dataclasses.field(default_factory=dict)
    problem: str = ""
    ahead: int = 0
    contents: dict[FileContent, int] = dataclasses.field(default_factory=dict)
    latency_slots: int = 0
    latency_free: int = 0
    pressure: float = 0.0
    late: Collection[str] = ()
    long: Mapping[str, int] = dataclasses.field(default_factory=dict)
    has_calls: bool = False

    def room(self, depth: int) -> int:
        """Count the tasks that it takes, if so many may wait behind each running one that is not long."""
        return self.free + max(0, self.slots - sum(self.long.values())) * depth

    def lasts(self, walltime_s: float | None, *, now: float) -> bool:
        """Whether a task with such a limit can end here."""
        return self.lifetime is None or self.lifetime.fits(walltime_s, now=now)

    def refusal(self, environment: Environment | None) -> str:
        """Why it can never run tasks of an environment (None: the endpoint's own Python); empty if it can."""
        if self.image:
            return "" if environment is not None and environment.key == self.image else _OTHER_IMAGE
        return "" if environment is None else self.types.get(environment.type, _UNKNOWN_TYPE)

    def takes(self, task: Task, *, now: float) -> bool:
        """Whether a task can run, and end, here. While its environment has a problem, it cannot."""
        key = task.environment_key
        if (key or self.image or self.problem) and not self._runs(key, task.environment):
            return False
        if self.lacks(task):
            return False
        return self.lifetime is None or self.lifetime.fits(task.walltime_s, now=now)

    def refusal_of(self, graph: GraphNeeds) -> str:
        """Why it can never run all stages of a graph; empty if it can."""
        return next(filter(None, map(self.refusal, graph.environments)), "")

    def lacks(self, task: Task) -> bool:
        """Whether it cannot run all stages of a graph that another manager can run as a whole."""
        return task.graph is not None and not task.is_apart and bool(self.refusal_of(task.graph))

    def ahead_of(self, task: Task) -> int:
        """The slots that a task can use here beyond one: a graph those of its widest layer."""
        return 0 if task.graph is None else max(0, min(task.graph.width, self.slots) - 1)

    def count_down(self, task: Task) -> None:
        """A task is placed here."""
        self.free -= 1
        self.ahead += self.ahead_of(task)
        if task.contents:
            self.add_contents(task.contents)

    def lacking_bytes(self, task: Task) -> int:
        """What its node must copy for a task."""
        return sum([each.size_bytes for each in task.contents if each not in self.contents])

    def add_contents(self, contents: Iterable[FileContent]) -> None:
        """Its node has these, or gets them: one more reason for each."""
        for each in contents:
            self.contents[each] = self.contents.get(each, 0) + 1

    def remove_contents(self, contents: Iterable[FileContent]) -> None:
        """One reason less for each."""
        for each in contents:
            if (left := self.contents.get(each, 0) - 1) > 0:
                self.contents[each] = left
            else:
                self.contents.pop(each, None)

    def _runs(self, key: str, environment: Environment | None) -> bool:
        if self.image:
            return key == self.image
        if not key:
            return not self.problem
        here = self.environments.get(key)
        return not self.refusal(environment) and (here is None or not here.problem)


@dataclasses.dataclass(frozen=True, slots=True)
class EnvironmentDemand:
    """The tasks of an environment.

    :param environment: of tasks that name none, the endpoint's default; None: its own Python.
    :param waiting: that wait here.
    :param sent: that managers have.
    :param since: epoch second since when there are such tasks.
    :param run_s: how long one runs: what was seen, or at least so long; None before anything was.
    :param depth: of its tasks, how many may wait behind each running one.
    """

    environment: Environment | None
    waiting: int
    sent: int = 0
    since: float = 0.0
    run_s: float | None = None
    depth: int = 0


NO_ENVIRONMENTS: Final[Mapping[str, EnvironmentDemand]] = types.MappingProxyType({})
Placed = list[tuple[Task, str]]
_Choice = Callable[[Sequence[ManagerLoad]], ManagerLoad]


def place_each(
    tasks: Iterable[Task],
    managers: Sequence[ManagerLoad],
    depth: int,
    now: float,
    choose: _Choice,
    *,
    by_files: bool = False,
) -> Placed:
    """Place each task on a manager that is chosen among those with a free slot that no graph can use, else among those
    with a free slot, else among those with room.

    :param by_files: whether a task with files is placed on one of those that lack the fewest bytes of them.
    """
    placed: Placed = []
    candidates = [manager for manager in managers if manager.free > manager.ahead]
    is_shared = False  # whether a slot may be one that a graph can use
    behind = 0  # tasks that may wait behind each running one: none while a slot is free
    hopeless: set[tuple[object, ...]] = set()  # limits and environments that no candidate takes
    manager: ManagerLoad | None = None
    run = overtaken = 0
    for task in tasks:
        if not candidates and not is_shared:
            is_shared = True
            candidates = [manager for manager in managers if manager.free > 0]
            hopeless.clear()
        if not candidates and not behind:
            behind = depth
            candidates = [manager for manager in managers if manager.room(depth) > 0]
            hopeless.clear()
        # One that may not run twice never waits behind another: should the manager die, it would be lost without ever
        # having been started.
        if not candidates or overtaken > MOST_OVERTAKEN or (behind and not task.is_idempotent):
            break
        if is_shared and not task.is_idempotent:
            overtaken += 1
            continue
        has_files = by_files and bool(task.contents)
        if manager is None or not run or has_files or not manager.takes(task, now=now):
            graph = task.graph
            needs = (task.walltime_s, task.environment_key, () if graph is None else graph.environments[1:])
            pick = functools.partial(_nearest, task=task, choose=choose) if has_files else choose
            manager = None if needs in hopeless else _choose(candidates, task, now, pick)
            if manager is None:
                hopeless.add(needs)
                overtaken += 1
                continue
            run = 1 if behind or has_files else min(1 + depth, manager.free)
        run -= 1
        manager.free -= 1
        if task.graph is not None:
            manager.ahead += manager.ahead_of(task)
        if task.contents:
            manager.add_contents(task.contents)
        placed.append((task, manager.manager_id))
        if manager.room(behind) <= (0 if is_shared else manager.ahead):
            candidates.remove(manager)
            run = 0
    return placed


def place_latency(task: Task, managers: Iterable[ManagerLoad], depth: int, now: float) -> ManagerLoad | None:
    """The manager for a task with a target: one with free workers for such tasks, whose node has CPU enough for its
    class; of those the one with most, then the one whose CPUs are less busy; None if there is none now. So a class
    moves away from a node with busy neighbours while there is room elsewhere.

    :param depth: tasks that may wait there for each of these workers.
    """
    behind = depth if task.is_idempotent else 0
    candidates = [
        manager
        for manager in managers
        if manager.latency_free + manager.latency_slots * behind > 0 and manager.takes(task, now=now)
    ]
    name = "" if task.target is None else task.target.name
    best = max(
        candidates,
        key=lambda each: (each.latency_free > 0, name not in each.late, each.latency_free, -each.pressure),
        default=None,
    )
    if best is not None:
        best.latency_free -= 1
        if task.contents:
            best.add_contents(task.contents)
    return best


def _nearest(candidates: Sequence[ManagerLoad], *, task: Task, choose: _Choice) -> ManagerLoad:
    """One of those that lack the fewest bytes of a task's files."""
    lacking = [each.lacking_bytes(task) for each in candidates]
    least = min(lacking)
    return choose([each for each, lacks in zip(candidates, lacking, strict=True) if lacks == least])


def _choose(candidates: Sequence[ManagerLoad], task: Task, now: float, choose: _Choice) -> ManagerLoad | None:
    """A manager that takes the task; most do, so one is tried before all are looked at."""
    manager = candidates[0] if len(candidates) == 1 else choose(candidates)
    if manager.takes(task, now=now):
        return manager
    taking = [manager for manager in candidates if manager.takes(task, now=now)]
    return choose(taking) if taking else None
