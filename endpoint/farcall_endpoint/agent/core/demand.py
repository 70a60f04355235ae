"""Demand: the tasks that blocks should be enough for, by what the nodes can run; and how many slots are missing. Pure.

Most nodes run all tasks: then tasks and slots are two numbers. But a node has no slot for tasks of an environment that
it does not offer, or that failed there, however many of its slots are free. Tasks that wait for the first worker of an
environment, which starts somewhere, do not count: another block would have to start one, too.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from farcall_common.environments import Environment
from farcall_endpoint.agent.core.managers import ManagerEntry, Managers, TaskQueue

_ROUNDING: Final = 1e-6


@dataclasses.dataclass(frozen=True)
class NodeLoad:
    """A manager's node. Keys are those of :attr:`Demand.limited`, and an empty one for all other tasks.

    ``tasks``: that it has, by key. ``unable``: the keys of tasks that it cannot run. ``warm``: whether it has workers
    of an environment with waiting tasks.
    """

    slots: int = 0
    tasks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unable: frozenset[str] = frozenset()
    warm: bool = False


@dataclasses.dataclass(frozen=True)
class Demand:
    """Tasks that wait or run, without those that wait for a first worker to start.

    :param busy: ids of managers that have tasks, or start their first worker or an environment that tasks wait for.
    :param images: the tasks by the key of their environment, where a block runs the image of one; empty: the
        endpoint's own. None where it runs all.
    :param limited: of ``tasks``, those of environments that some node cannot run, by key.
    :param prewarmed: workers that images are to have also without tasks, by the key of their environment.
    :param nodes: by manager. One that is missing runs all tasks.
    """

    tasks: int
    busy: Collection[str]
    images: Mapping[str, int] | None = None
    limited: Mapping[str, int] = dataclasses.field(default_factory=dict)
    prewarmed: Mapping[str, int] = dataclasses.field(default_factory=dict)
    nodes: Mapping[str, NodeLoad] = dataclasses.field(default_factory=dict)


def demand_of(
    unfinished: int, queue: TaskQueue, managers: Managers, environments: Mapping[str, Environment | None]
) -> Demand:
    """What blocks should be enough for.

    :param unfinished: tasks that wait or run.
    :param environments: by the key that the queue has for them; that of the empty key is the endpoint's default, None:
        its own Python.
    """
    members = managers.members
    waiting = {key: len(queue.waiting.get(key, ())) if key else queue.others for key in environments}
    starting = {key: _starting(key, members) for key, count in waiting.items() if count}
    unable = {
        key: _unable(key, environment, members)
        for key, environment in environments.items()
        if waiting[key] or key in managers.sent
    }
    limited = {
        key: managers.sent.get(key, 0) + (0 if starting.get(key) else waiting[key])
        for key, nodes in unable.items()
        if nodes and key
    }
    nodes = {
        manager_id: NodeLoad(
            member.slots,
            _tasks(member, limited),
            frozenset(key for key, nodes in unable.items() if manager_id in nodes),
            any(count and _has_worker(member, key) for key, count in waiting.items()),
        )
        for manager_id, member in members.items()
    }
    busy = {*managers.busy(unfinished), *(manager_id for started in starting.values() for manager_id in started)}
    uncounted = sum(waiting[key] for key, started in starting.items() if started)
    return Demand(max(0, unfinished - uncounted), busy, limited=limited, nodes=nodes)


def missing_slots(
    tasks: int, limited: Mapping[str, int], nodes: Iterable[NodeLoad], *, parallelism: float = 1.0
) -> float:
    """Return the number of missing slots if each task needs ``parallelism`` of a slot; below 0 if slots are left over.

    A task at a node counts there as far as its slots go; other tasks count where they can run (a maximum flow).
    """
    nodes = list(nodes)
    if not any(node.unable for node in nodes):
        return tasks * parallelism - sum(node.slots for node in nodes)
    left = {key: count * parallelism for key, count in limited.items()}
    left[""] = max(0, tasks - sum(limited.values())) * parallelism
    room: dict[frozenset[str], float] = collections.defaultdict(float)  # by what cannot run there
    for node in nodes:
        free = float(node.slots)
        for key, count in node.tasks.items():
            here = min(free, count * parallelism, left.get(key, 0.0))
            if here > 0:
                free -= here
                left[key] -= here
        room[node.unable] += free
    _place(left, room)
    missing = sum(left.values())
    return missing if missing > _ROUNDING else -sum(room.values())


def _place(left: dict[str, float], room: dict[frozenset[str], float]) -> None:
    """Place as much as possible of what is left where there is room: along augmenting paths (L. R. Ford and D. R.
    Fulkerson, 1956), the shortest ones first."""
    placed: dict[tuple[str, frozenset[str]], float] = collections.defaultdict(float)
    while path := _path(left, room, placed):
        takes = list(path)
        gives = [(key, group) for (key, _), (_, group) in zip(path[1:], path, strict=False)]
        amount = min(left[path[0][0]], room[path[-1][1]], *(placed[each] for each in gives))
        for each in takes:
            placed[each] += amount
        for each in gives:
            placed[each] -= amount
        left[path[0][0]] -= amount
        room[path[-1][1]] -= amount


def _path(
    left: Mapping[str, float], room: Mapping[frozenset[str], float], placed: Mapping[tuple[str, frozenset[str]], float]
) -> list[tuple[str, frozenset[str]]]:
    """Steps that place a part of what is left: the first key goes to the first group, where the second key makes room
    and goes to the second group, and so on to a group with room. Empty if there are none."""
    paths = collections.deque(
        (key, list[tuple[str, frozenset[str]]]()) for key, rest in left.items() if rest > _ROUNDING
    )
    reached: set[frozenset[str]] = set()
    while paths:
        key, path = paths.popleft()
        for group in room:
            if group in reached or key in group:
                continue
            reached.add(group)
            longer = [*path, (key, group)]
            if room[group] > _ROUNDING:
                return longer
            paths.extend((other, longer) for (other, at), count in placed.items() if at == group and count > _ROUNDING)
    return []


def _starting(key: str, members: Mapping[str, ManagerEntry]) -> list[str]:
    """Return the managers where an environment is starting; empty if any manager has a ready worker of it."""
    here = [
        (manager_id, load)
        for manager_id, member in members.items()
        if (load := member.load.environments.get(key)) is not None
    ]
    if any(load.ready for _, load in here):
        return []
    return [manager_id for manager_id, load in here if load.starting or load.preparing]


def _unable(key: str, environment: Environment | None, members: Mapping[str, ManagerEntry]) -> set[str]:
    """Return the managers that cannot run an environment. Managers where it failed are left out if no other is left:
    they report the problem or try again when that is due, and another block would not help."""
    refusing = {manager_id for manager_id, member in members.items() if member.load.refusal(environment)}
    failing = {
        manager_id
        for manager_id, member in members.items()
        if (load := member.load.environments.get(key)) is not None and load.problem
    }
    return refusing if len(refusing | failing) == len(members) else refusing | failing


def _tasks(member: ManagerEntry, limited: Mapping[str, int]) -> dict[str, int]:
    tasks = {key: load.sent for key, load in member.load.environments.items() if key in limited}
    return {**tasks, "": len(member.outstanding) - sum(tasks.values())}


def _has_worker(member: ManagerEntry, key: str) -> bool:
    load = member.load.environments.get(key)
    return load is not None and load.ready > 0
