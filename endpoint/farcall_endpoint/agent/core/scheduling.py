"""Scheduling policies: they place tasks on managers.

A policy is a pure class: it reads the loads of managers, tasks and what is known of their environments, and returns
pairs of task and manager. A policy of the user's own is named in the configuration (``scheduling:
"package.module:Class"``, see :func:`load_policy`).
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import itertools
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from farcall_common.errors import ConfigurationError, did_you_mean
from farcall_endpoint.agent.core.loads import (
    MOST_OVERTAKEN,
    NO_ENVIRONMENTS,
    EnvironmentDemand,
    ManagerLoad,
    Placed,
    place_each,
)
from farcall_endpoint.agent.core.tasks import Task
from farcall_endpoint.agent.core.warming import WarmingAwarePolicy

_logger = logging.getLogger(__name__)


_Choice = Callable[[Sequence[ManagerLoad]], ManagerLoad]


class SchedulingPolicy(Protocol):
    """Places tasks on managers."""

    def place(
        self,
        tasks: Iterable[Task],
        managers: Sequence[ManagerLoad],
        *,
        depth: int,
        now: float,
        environments: Mapping[str, EnvironmentDemand] = NO_ENVIRONMENTS,
    ) -> Placed:
        """Pairs of task and manager id, in the order of ``tasks``. ``free`` of the loads is counted down in place. A
        task overtakes another only if that one cannot run anywhere now.

        :param depth: tasks that may wait behind each running one. As many as a single worker would be given, a manager
            with that many free slots is given in a row: they share a message, and all of them start at once.
        :param now: in epoch seconds.
        :param environments: by key, those with tasks; empty while there are none but the endpoint's own Python.
        """


class ChoicePolicy:
    """Each task goes to the manager that is chosen among those with a free slot, else among those with room.

    :param choose: returns one of the managers that it gets; at least one.
    :param by_files: see :func:`~farcall_endpoint.agent.core.loads.place_each`.
    """

    def __init__(self, choose: _Choice, *, by_files: bool = False) -> None:
        self._choose = choose
        self._by_files = by_files

    def place(
        self,
        tasks: Iterable[Task],
        managers: Sequence[ManagerLoad],
        *,
        depth: int,
        now: float,
        environments: Mapping[str, EnvironmentDemand] = NO_ENVIRONMENTS,  # noqa: ARG002 - not looked at
    ) -> Placed:
        return place_each(tasks, managers, depth, now, self._choose, by_files=self._by_files)


def round_robin() -> ChoicePolicy:
    """Managers take turns."""
    turns = itertools.count(1)
    return ChoicePolicy(lambda candidates: candidates[next(turns) % len(candidates)])


def bin_packing() -> ChoicePolicy:
    """A manager is filled before the next gets a task, so that idle blocks can be given back."""
    return ChoicePolicy(lambda candidates: min(candidates, key=lambda each: each.free))


class OwnPolicy:
    """A policy of the user's own. It gets copies of the loads, and lists instead of iterators. When it raises or
    returns what cannot be, that is logged once, and the turn is the default policy's.

    :param own: has a method ``place`` as :class:`SchedulingPolicy`; its result alone counts.
    :param default: takes its place.
    """

    def __init__(self, own: SchedulingPolicy, default: SchedulingPolicy, *, name: str) -> None:
        self._own = own
        self._default = default
        self._name = name
        #: What went wrong first; empty if nothing has.
        self.problem = ""

    def place(
        self,
        tasks: Iterable[Task],
        managers: Sequence[ManagerLoad],
        *,
        depth: int,
        now: float,
        environments: Mapping[str, EnvironmentDemand] = NO_ENVIRONMENTS,
    ) -> Placed:
        """Place tasks by the user's policy. If it fails or breaks a rule, the default policy takes over."""
        room = sum(max(0, manager.room(depth)) for manager in managers)
        given = list(itertools.islice(tasks, room + MOST_OVERTAKEN)) if room else []
        if not given:
            return []
        try:
            placed = self._own.place(
                list(given), [_copy(each) for each in managers], depth=depth, now=now, environments=dict(environments)
            )
            placed = list(_checked(placed, given, managers, depth=depth, now=now))
        except Exception as error:  # noqa: BLE001 - it is the user's code
            if not self.problem:
                self.problem = f"{type(error).__name__}: {error}"
                _logger.error("scheduling policy %s: %s; its turn is the default policy's", self._name, self.problem)
            return self._default.place(given, managers, depth=depth, now=now, environments=environments)
        by_id = {each.manager_id: each for each in managers}
        for task, manager_id in placed:
            by_id[manager_id].count_down(task)
        return placed


def _copy(load: ManagerLoad) -> ManagerLoad:
    here = {key: copy.copy(each) for key, each in load.environments.items()}
    return dataclasses.replace(load, environments=here, contents=dict(load.contents))


def _checked(
    placed: Iterable[Any], tasks: Sequence[Task], managers: Sequence[ManagerLoad], *, depth: int, now: float
) -> Iterator[tuple[Task, str]]:
    """The pairs of a policy.

    :raises ValueError: for one that cannot be.
    """
    waiting = set(tasks)
    by_id = {each.manager_id: each for each in managers}
    room = {each.manager_id: each.room(depth) for each in managers}
    for task, manager_id in placed:
        if task not in waiting:
            raise ValueError("it placed a task twice, or one that it was not given")
        if manager_id not in by_id:
            raise ValueError(f"there is no manager {manager_id!r}")
        if not by_id[manager_id].takes(task, now=now):
            raise ValueError(f"manager {manager_id} cannot run task {task.task_id}")
        if room[manager_id] <= 0:
            raise ValueError(f"manager {manager_id} has no room for task {task.task_id}")
        waiting.discard(task)
        room[manager_id] -= 1
        yield task, manager_id


DEFAULT_POLICY: Final = "warming-aware"
POLICIES: Final[Mapping[str, Callable[[random.Random], SchedulingPolicy]]] = {
    DEFAULT_POLICY: WarmingAwarePolicy,
    "random": lambda rng: ChoicePolicy(rng.choice, by_files=True),
    "round-robin": lambda _: round_robin(),
    "bin-packing": lambda _: bin_packing(),
}


def load_policy(spec: str, rng: random.Random) -> SchedulingPolicy:
    """A policy by its name, or one of the user's own: ``package.module:Class``. The class is called with ``rng``.

    :raises ConfigurationError: if there is none, or it has not the methods of one.
    """
    if spec in POLICIES:
        return POLICIES[spec](rng)
    module_name, colon, class_name = spec.partition(":")
    if not colon:
        raise ConfigurationError(
            f"scheduling: there is no policy {spec!r}.",
            hint=did_you_mean(spec, POLICIES) or f"Use {', '.join(POLICIES)}, or package.module:Class.",
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigurationError(
            f"scheduling: {module_name} cannot be imported: {type(error).__name__}: {error}.",
            hint="Install it where the endpoint is installed.",
        ) from error
    if not callable(made := getattr(module, class_name, None)):
        raise ConfigurationError(f"scheduling: {module_name} has no class {class_name!r}.")
    try:
        own = made(rng)
        inspect.signature(own.place).bind([], [], depth=0, now=0.0, environments={})
    except Exception as error:
        raise ConfigurationError(
            f"scheduling: cannot use {spec} as a policy: {type(error).__name__}: {error}.",
            hint="Write a class with __init__(rng) and place(tasks, managers, *, depth, now, environments).",
        ) from error
    return OwnPolicy(own, WarmingAwarePolicy(rng), name=spec)
