"""Managers of an agent: their loads, tasks and environments; and the queue of tasks that wait for them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from farcall_common.environments import Environment
from farcall_common.fairness import FairQueue
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core.graphs import GraphNeeds
from farcall_endpoint.agent.core.loads import (
    MOST_OVERTAKEN,
    EnvironmentDemand,
    EnvironmentLoad,
    Lifetime,
    ManagerLoad,
    Placed,
    place_latency,
)
from farcall_endpoint.agent.core.scheduling import SchedulingPolicy
from farcall_endpoint.agent.core.tasks import Stage, Task
from farcall_endpoint.contracts.agent_manager import CpuSharesStatus, EnvironmentStatus
from farcall_endpoint.qos.controller import NEEDS_CPU

_NO_NODE: Final[Mapping[str, str]] = {}
_MOST_AWAITING: Final = 8
"""Tasks of one payer for each manager that use no slot there while their environments are prepared."""
_MOST_PASSED_OVER: Final = 50
"""Tasks with a target that no manager takes now; those behind them are not looked at in this turn."""


@dataclasses.dataclass(slots=True)
class ManagerEntry:
    """A manager. ``load`` counts the workers that are there, ``slots`` those that there should be; ``outstanding`` are
    its tasks in the order in which it got them. ``node``: its host name. ``environments``: as reported last. ``ahead``:
    what graphs among the tasks add to that of the load. ``guests``: slots for calls of other managers' tasks.
    ``has_waiting_calls``: whether calls of its own tasks wait there.
    ``awaiting``: tasks that use no slot while the node prepares their environments, each with its payer."""

    slots: int
    load: ManagerLoad
    outstanding: dict[str, Task] = dataclasses.field(default_factory=dict)
    workers: int = 0
    idle_workers: int = 0
    node: str = ""
    environments: tuple[EnvironmentStatus, ...] = ()
    ahead: dict[str, int] = dataclasses.field(default_factory=dict)
    guests: int = 0
    has_waiting_calls: bool = False
    awaiting: dict[str, str] = dataclasses.field(default_factory=dict)

    def in_order(self) -> list[Task]:
        """Its tasks: first those that can run, with a target and without, each in the order in which they came."""
        targets = [task for task in self.outstanding.values() if task.is_latency]
        others = [task for task in self.outstanding.values() if not task.is_latency]
        most = self.load.latency_slots
        return [*targets[:most], *others[: self.slots], *targets[most:], *others[self.slots :]]

    def running(self) -> Iterator[Task]:
        """Its tasks without a target that the manager has reported as running: they are among the oldest ones."""
        oldest = itertools.islice(self.outstanding.values(), 2 * self.load.slots)
        return (task for task in oldest if task.state is TaskState.RUNNING and not task.is_latency)

    def most_running(self) -> int:
        """How many of its tasks can run."""
        targets = sum(task.is_latency for task in self.outstanding.values())
        return min(targets, self.load.latency_slots) + min(len(self.outstanding) - targets, self.slots)


class Managers:
    """All managers of an agent.

    :param default_key: of the environment of tasks that name none; empty: the endpoint's own Python. Its load is kept
        under the empty key, so that one environment for all tasks costs no more than none.
    """

    def __init__(self, default_key: str = "") -> None:
        self._default_key = default_key
        self._members: dict[str, ManagerEntry] = {}
        self._problems: dict[str, str] = {}
        self._draining: frozenset[str] = frozenset()
        #: Tasks that managers have, by the key of their environment; none of those that name no environment.
        self.sent: dict[str, int] = {}
        #: Whether a manager has other workers than those for tasks that name no environment, or had.
        self.has_environments = False
        #: Tasks that use no slot while environments are prepared, by payer.
        self._awaiting: collections.Counter[str] = collections.Counter()
        #: Sums over all managers.
        self.slots = self.workers = self.idle_workers = self.outstanding = 0

    def __len__(self) -> int:
        return len(self._members)

    @property
    def loads(self) -> Sequence[ManagerLoad]:
        """The input of a policy, which counts them down; :meth:`assign` does not."""
        if self._draining:
            return [member.load for name, member in self._members.items() if name not in self._draining]
        return [member.load for member in self._members.values()]

    def drain(self, manager_ids: Collection[str]) -> None:
        """These get no task from now on; all others do."""
        self._draining = frozenset(manager_ids)

    def busy(self, unfinished: int) -> Collection[str]:
        """The ids of managers that have tasks. While tasks wait, also those whose first worker is starting.

        :param unfinished: tasks that wait or run.
        """
        is_waiting = unfinished > self.outstanding
        return [
            manager_id
            for manager_id, member in self._members.items()
            if member.outstanding or member.guests or (is_waiting and not member.workers)
        ]

    @property
    def problem(self) -> str:
        """The problem of one of them; empty if none has one."""
        return next(iter(self._problems.values()), "")

    @property
    def members(self) -> Mapping[str, ManagerEntry]:
        """All of them, by id."""
        return self._members

    def add(
        self,
        manager_id: str,
        *,
        slots: int,
        lifetime: Lifetime | None,
        node: str = "",
        types: Mapping[str, str] = _NO_NODE,
        image: str = "",
        latency_slots: int = 0,
    ) -> None:
        """A manager has registered; its workers are not ready yet. ``types``, ``image``, ``latency_slots``: see
        :class:`ManagerLoad`."""
        load = ManagerLoad(manager_id, 0, 0, lifetime, types, image)
        load.latency_slots = load.latency_free = latency_slots
        self._members[manager_id] = ManagerEntry(slots, load, node=node)
        self.slots += slots
        self.has_environments = self.has_environments or bool(image)

    def remove(self, manager_id: str) -> ManagerEntry | None:
        """A manager is lost; its last entry."""
        self.note(manager_id, workers=0, idle_workers=0, problem="")
        member = self._members.pop(manager_id, None)
        if member is not None:
            self.slots -= member.slots
            self.outstanding -= len(member.outstanding)
            self._awaiting -= collections.Counter(member.awaiting.values())
            for key, load in member.load.environments.items():
                self._count_sent(key, -load.sent)
        return member

    def note(self, manager_id: str, *, workers: int, idle_workers: int, problem: str) -> None:
        """The numbers that a manager reports. It gets tasks for present workers only."""
        member = self._members.get(manager_id)
        if member is None:
            return
        load = member.load
        load.free += workers - load.slots
        load.slots = workers
        self.workers += workers - member.workers
        self.idle_workers += idle_workers - member.idle_workers
        member.workers, member.idle_workers = workers, idle_workers
        if problem:
            self._problems[manager_id] = problem
        else:
            self._problems.pop(manager_id, None)

    def note_cpus(self, manager_id: str, status: CpuSharesStatus) -> None:
        """How busy the CPUs of a node are, and which latency classes would need more of them."""
        if (member := self._members.get(manager_id)) is not None:
            member.load.pressure = status.pressure
            member.load.late = {each.name for each in status.classes if each.problem == NEEDS_CPU}

    def note_long_tasks(self) -> None:
        """Find the tasks that managers have reported as running, where no slot is free: short ones end before."""
        for member in self._members.values():
            load = member.load
            load.long = {}
            if load.free <= 0:
                load.long = collections.Counter(task.environment_key for task in member.running())

    def behind_long_tasks(self) -> dict[str, list[str]]:
        """Tasks that have not begun, by manager, on nodes where tasks that managers have reported as running have all
        places; as many as other nodes have free places."""
        places = sum(max(0, load.free) for load in self.loads)
        found: dict[str, list[str]] = {}
        for manager_id, member in self._members.items():
            if places <= 0:
                break
            if member.load.free >= 0:
                continue
            if sum(1 for _ in member.running()) >= member.load.slots:
                waiting = (
                    task.spec.task_id
                    for task in member.outstanding.values()
                    if task.state is not TaskState.RUNNING and not task.is_latency and task.may_be_returned
                )
                found[manager_id] = list(itertools.islice(waiting, places))
                places -= len(found[manager_id])
        return {manager_id: ids for manager_id, ids in found.items() if ids}

    def note_environments(self, manager_id: str, environments: tuple[EnvironmentStatus, ...]) -> None:
        """The environments of a node, as its manager reports them."""
        member = self._members.get(manager_id)
        if member is None:
            return
        member.environments = environments
        member.load.problem = ""
        here = member.load.environments
        reported = {"" if each.key == self._default_key else each.key: each for each in environments}
        for key in here.keys() - reported.keys():
            load = here[key] = EnvironmentLoad(sent=here[key].sent, cold=here[key].cold)
            if not load.sent:
                del here[key]
        for key, status in reported.items():
            load = here.setdefault(key, EnvironmentLoad())
            load.ready, load.starting = status.warm + status.busy, status.starting
            load.parked, load.preparing, load.prepared = status.parked, bool(status.text), not status.text
            load.forkable, load.problem, load.start_s = status.forkable, status.problem, status.start_s
            if not key:
                load.problem = member.load.problem = "" if load.ready or load.starting else status.problem
            if load.ready + load.starting >= load.cold:
                load.cold = 0
            self.has_environments = self.has_environments or bool(key)
        if member.awaiting or any(load.is_awaited for load in here.values()):
            self._give_slots_back(member)

    def _give_slots_back(self, member: ManagerEntry) -> None:
        """Tasks use slots again whose environment is prepared now; those whose environment is prepared do not."""
        load = member.load
        self._awaiting -= collections.Counter(member.awaiting.values())
        load.free -= len(member.awaiting)
        member.awaiting.clear()
        for each in load.environments.values():
            each.waiting = 0
        for task in member.outstanding.values():
            self._await(member, task)

    def _await(self, member: ManagerEntry, task: Task) -> None:
        """A task uses no slot if the node prepares its environment."""
        here = member.load.environments.get(task.environment_key) if task.environment_key else None
        if here is not None and here.is_awaited and not task.is_latency:
            member.awaiting[task.spec.task_id] = task.share_of
            self._awaiting[task.share_of] += 1
            here.waiting += 1
            member.load.free += 1

    def holds(self, task: Task) -> bool:
        """Whether a task stays here for now: enough tasks of its payer await environments, and its own environment is
        prepared nowhere either. So none can fill managers with tasks of any number of environments."""
        key = task.environment_key
        if not key or self._awaiting[task.share_of] < _MOST_AWAITING * len(self._members):
            return False
        found = (member.load.environments.get(key) for member in self._members.values())
        return not any(load is not None and load.prepared for load in found)

    @property
    def may_hold(self) -> bool:
        """Whether :meth:`holds` can be true of any task."""
        return self._awaiting.total() >= _MOST_AWAITING * len(self._members) > 0

    def refusal(self, environment: Environment) -> str:
        """Why no present manager can ever run tasks of an environment; empty if one can, or there is none."""
        refusals = [member.load.refusal(environment) for member in self._members.values()]
        return min(refusals, default="")

    def refusal_of(self, graph: GraphNeeds) -> str:
        """Why no present manager can ever run all stages of a graph; empty if one can, or there is none."""
        refusals = [member.load.refusal_of(graph) for member in self._members.values()]
        return min(refusals, default="")

    def refusal_apart(self, graph: GraphNeeds) -> str:
        """Why the present managers together can never run all stages of a graph, each at the one that it is sent to or
        taken over by; empty if they can, or there is none."""
        if not self._members or any(member.load.image for member in self._members.values()):
            return self.refusal_of(graph)
        refusals = (self.refusal(each) for each in graph.environments if each is not None)
        return next(filter(None, refusals), "")

    def _count_sent(self, key: str, change: int) -> None:
        if left := self.sent.get(key, 0) + change:
            self.sent[key] = left
        else:
            self.sent.pop(key, None)

    def assign(self, manager_id: str, task: Task) -> None:
        """A manager gets a task for which its load was counted down."""
        member = self._members[manager_id]
        member.outstanding[task.spec.task_id] = task
        self.outstanding += 1
        if task.is_latency:
            return
        if task.graph is not None and (ahead := member.load.ahead_of(task)):
            member.ahead[task.spec.task_id] = ahead
        if task.environment_key:
            key = task.environment_key
            member.load.environments.setdefault(key, EnvironmentLoad()).sent += 1
            self._count_sent(key, 1)
            self.has_environments = True
            self._await(member, task)

    def note_calls(self, manager_id: str, *, waiting: bool) -> None:
        """Whether calls of tasks or graphs wait at their manager."""
        if (member := self._members.get(manager_id)) is not None:
            member.has_waiting_calls = waiting
            member.load.has_calls = waiting or member.guests > 0

    def lend(self, manager_id: str, key: str, calls: int) -> None:
        """Add to the calls that a manager runs for other managers' tasks in an environment; subtract if negative."""
        member = self._members.get(manager_id)
        if member is None or not calls:
            return
        member.guests += calls
        member.load.free -= calls
        member.load.has_calls = member.has_waiting_calls or member.guests > 0
        if key:
            member.load.environments.setdefault(key, EnvironmentLoad()).sent += calls
            self._count_sent(key, calls)
            self.has_environments = True

    def release(self, manager_id: str, task_id: str) -> Task | None:
        """A manager does not have a task any more; None if it did not have it."""
        member = self._members.get(manager_id)
        task = member.outstanding.pop(task_id, None) if member is not None else None
        if member is not None and task is not None:
            if task.contents:
                member.load.remove_contents(task.contents)
            self.outstanding -= 1
            if task.is_latency:
                member.load.latency_free += 1
                return task
            if (payer := member.awaiting.pop(task_id, None)) is None:
                member.load.free += 1
            else:
                self._awaiting -= collections.Counter((payer,))
                member.load.environments[task.environment_key].waiting -= 1
            if member.ahead:
                member.load.ahead -= member.ahead.pop(task_id, 0)
            if task.environment_key:
                key = task.environment_key
                load = member.load.environments[key]
                load.sent -= 1
                if load.cold > load.sent:
                    load.cold = load.sent
                self._count_sent(key, -1)
        return task


class TaskQueue:
    """A queue, fair between submitters and oldest first for each of them. Tasks that finished while they waited are
    skipped, and removed at the front. Those with a target wait in a queue of their own, which comes first.

    :param weights: by submitter, as :class:`FairQueue` takes them.
    """

    def __init__(self, weights: Mapping[str, int] | None = None) -> None:
        self._tasks: FairQueue[Task] = FairQueue(weights)
        self._latency: FairQueue[Task] = FairQueue(weights)
        #: Those that wait for another environment than the endpoint's default, by its key.
        self.waiting: dict[str, set[Task]] = {}

    def __len__(self) -> int:
        """How many wait, and perhaps some that finished meanwhile."""
        return len(self._tasks) + len(self._latency)

    def __bool__(self) -> bool:
        """Whether any task waits."""
        if len(self._latency):
            return True
        for task in self._following([]):
            self._tasks.undo(*task)
            return True
        return False

    def add(self, task: Task) -> None:
        """Put a task behind the others of its submitter."""
        (self._tasks if task.target is None else self._latency).add(task.share_of, task)
        if task.environment_key:
            self.waiting.setdefault(task.environment_key, set()).add(task)

    def put_back(self, tasks: Sequence[Task]) -> None:
        """Put tasks before the others, in their order."""
        for task in reversed(tasks):
            (self._tasks if task.target is None else self._latency).put_back(task.share_of, task)
            if task.environment_key:
                self.waiting.setdefault(task.environment_key, set()).add(task)

    def left(self, task: Task) -> None:
        """A task of an environment does not wait any more."""
        waiting = self.waiting.get(task.environment_key)
        if waiting is not None:
            waiting.discard(task)
            if not waiting:
                del self.waiting[task.environment_key]

    def take_out(self, task: Task) -> None:
        """Take out a task that waits, and not for a manager any more."""
        for queue in (self._latency, self._tasks):
            if task in queue.of(task.share_of):
                queue.remove(task.share_of, task)
                break
        if task.environment_key:
            self.left(task)

    @property
    def others(self) -> int:
        """How many wait for the endpoint's default, as :meth:`__len__` counts."""
        return max(0, len(self) - sum(map(len, self.waiting.values())))

    def done(self, task: Task) -> None:
        """A manager does not have a task any more that it got from here."""
        (self._latency if task.is_latency else self._tasks).done(task.share_of)
        task.is_latency = False

    def place_latency(self, managers: Sequence[ManagerLoad], *, depth: int, now: float) -> Placed:
        """Take out tasks with a target, each with its manager. Where no manager has workers for such tasks, they go
        before the others of their submitters.

        :param depth: tasks that may wait at a manager for each of its workers for them.
        """
        placed: Placed = []
        waiting = self._latency
        if managers and not any(manager.latency_slots for manager in managers):
            for task in reversed(waiting.clear()):
                if task.stage is Stage.QUEUED:
                    self._tasks.put_back(task.share_of, task)
            return placed
        left: list[tuple[str, Task, int]] = []
        while len(left) < _MOST_PASSED_OVER and (found := waiting.take()) is not None:
            submitter, task, _ = found
            if task.stage is not Stage.QUEUED:
                waiting.done(submitter)
            elif (manager := place_latency(task, managers, depth, now)) is None:
                left.append(found)
                if not any(each.latency_free + each.latency_slots * depth > 0 for each in managers):
                    break
            else:
                task.is_latency = True
                if task.environment_key:
                    self.left(task)
                placed.append((task, manager.manager_id))
        for found in reversed(left):
            waiting.undo(*found)
        return placed

    def place(
        self,
        policy: SchedulingPolicy,
        managers: Sequence[ManagerLoad],
        *,
        depth: int,
        now: float,
        environments: Mapping[str, EnvironmentDemand],
        holds: Callable[[Task], bool] | None = None,
    ) -> Placed:
        """Take out tasks for which the policy has managers, each with its manager, in the order in which they leave.
        Others that they overtake keep their places.

        :param holds: whether a task stays for now; None: none does.
        """
        seen: list[tuple[str, Task, int]] = []
        following: Iterable[Task] = (task for _, task, _ in self._following(seen))
        if holds is not None:
            following = itertools.filterfalse(holds, itertools.islice(following, MOST_OVERTAKEN))
        placed = policy.place(following, managers, depth=depth, now=now, environments=environments)
        if len(placed) < len(seen):
            leaving = {task for task, _ in placed}
            for found in reversed(seen):
                if found[1] not in leaving:
                    self._tasks.undo(*found)
        placed = [*placed, *self._squeeze_in(managers, now=now)]
        if self.waiting:
            for task, _ in placed:
                if task.environment_key:
                    self.left(task)
        return placed

    def _squeeze_in(self, managers: Sequence[ManagerLoad], *, now: float) -> Iterator[tuple[Task, str]]:
        """Place tasks of submitters that have no task at any manager, although all managers are full. A manager takes
        turns between submitters, so these tasks need not wait until all tasks there have run. A manager is overfull
        if its tasks turn out longer than expected, or wait for calls."""
        full = [manager for manager in managers if manager.free < 0 or (manager.has_calls and manager.free <= 0)]
        while full and (found := self._tasks.take(new_submitters_only=True)) is not None:
            task = found[1]
            lasting = [
                manager
                for manager in full
                if manager.takes(task, now=now) and _has(manager, task) and (task.is_idempotent or manager.has_calls)
            ]
            if task.stage is not Stage.QUEUED:
                self._tasks.done(found[0])
            elif not lasting:
                self._tasks.undo(*found)
                return
            else:
                manager = max(lasting, key=lambda each: each.free)
                manager.count_down(task)
                yield task, manager.manager_id

    def waits(self, key: str, holds: Callable[[Task], bool] | None) -> int:
        """How many tasks wait for an environment, and do not stay for now."""
        waiting = self.waiting.get(key, ())
        return len(waiting) if holds is None else sum(not holds(task) for task in waiting)

    def clear(self) -> list[Task]:
        """Take out all that wait."""
        self.waiting.clear()
        return [task for task in (*self._latency.clear(), *self._tasks.clear()) if task.stage is Stage.QUEUED]

    def _following(self, seen: list[tuple[str, Task, int]]) -> Iterator[tuple[str, Task, int]]:
        """Take tasks one after the other, and note them down."""
        while (found := self._tasks.take()) is not None:
            if found[1].stage is Stage.QUEUED:
                seen.append(found)
                yield found
            else:
                self._tasks.done(found[0])


def _has(manager: ManagerLoad, task: Task) -> bool:
    """Whether a manager has workers for a task, so that it need not wait for a start behind others."""
    if not task.environment_key or manager.image:
        return True
    here = manager.environments.get(task.environment_key)
    return here is not None and here.ready > here.parked
