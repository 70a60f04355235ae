"""Environments of an agent's tasks: what is known of them, how long their tasks run, and what is reported of them.

Pure. Instants are epoch seconds.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from farcall_common.durations import retry_of
from farcall_common.environments import Environment
from farcall_endpoint.agent.core.loads import EnvironmentDemand
from farcall_endpoint.agent.core.managers import ManagerEntry, Managers, TaskQueue
from farcall_endpoint.contracts.agent_manager import EnvironmentStatus
from farcall_endpoint.contracts.prefetch import PrefetchPolicy

MOST_REPORTED: Final = 20
"""Environments of nodes in a report to the cloud, and in the endpoint's status."""
_MOST_FAILED: Final = 5
"""Failed environments among those reported. The limit is low because a submitter can name any number of them."""
_MOST_KNOWN: Final = 100
_REGISTRY_IMAGES: Final = ("docker", "podman", "podman-hpc", "shifter")
_NO_POD: Final = "it waits for a pod of its image"
_USER_OF_URL: Final = re.compile(r"://[^/@]+@")


@dataclasses.dataclass(slots=True)
class _Seen:
    """``running_since``: since when a worker has had tasks without one that finished."""

    environment: Environment
    durations: PrefetchPolicy
    since: float | None = None
    running_since: float | None = None


class EnvironmentsSeen:
    """The environments of tasks that came lately, and the durations of their tasks.

    :param horizon_s, limit: of :class:`PrefetchPolicy`, for each environment.
    :param default: the environment of tasks that name none, which the managers know.
    """

    def __init__(self, *, horizon_s: float, limit: int, default: Environment | None = None) -> None:
        self._horizon_s = horizon_s
        self._limit = limit
        self._seen: dict[str, _Seen] = {}
        self.default = default
        self._default_key = "" if default is None else default.key
        self._latest = default
        self._latest_key = ""

    def __bool__(self) -> bool:
        return bool(self._seen)

    def add(self, environment: Environment) -> str:
        """A task in an environment has come; of many, those without tasks for longest are forgotten.

        :return: its key, empty for the default environment.
        """
        if environment == self._latest:  # each task has a copy, and to compare is quicker than to compute a key
            return self._latest_key
        key = environment.key
        if key == self._default_key:
            return ""
        self._latest, self._latest_key = environment, key
        seen = self._seen.pop(key, None)
        if seen is None:
            seen = _Seen(environment, PrefetchPolicy(horizon_s=self._horizon_s, limit=self._limit))
        elif environment.name:
            seen.environment = environment
        self._seen[key] = seen
        if len(self._seen) > _MOST_KNOWN:
            idle = next((each for each, other in self._seen.items() if other.since is None), None)
            if idle is not None and idle != key:
                del self._seen[idle]
        return key

    def known(self) -> list[Environment]:
        """All that are known, the latest first."""
        found = [seen.environment for seen in reversed(self._seen.values())]
        default = [] if self.default is None else [self.default]
        return [*default, *(each for each in found if each not in default)]

    def get(self, key: str) -> Environment | None:
        """An environment by its key."""
        seen = self._seen.get(key)
        return None if seen is None else seen.environment

    @property
    def by_key(self) -> dict[str, Environment | None]:
        """All that are known, by key; the default has the empty one."""
        return {"": self.default, **{key: seen.environment for key, seen in self._seen.items()}}

    def without_pod(self, key: str) -> EnvironmentStatus | None:
        """The state of an environment whose tasks wait for a first pod of its image."""
        seen = self._seen.get(key)
        if seen is None:
            return None
        environment = seen.environment
        return EnvironmentStatus(key, environment.label, environment.type, text=_NO_POD, since=seen.since or 0.0)

    def finished(self, key: str, durations_s: Sequence[float], *, now: float) -> None:
        """Record the run times of finished tasks of an environment."""
        seen = self._seen.get(key)
        if seen is not None:
            seen.durations.observe_all(durations_s)
            if seen.running_since is not None:
                seen.running_since = now

    def demand(
        self, queue: TaskQueue, managers: Managers, *, own: PrefetchPolicy, now: float
    ) -> dict[str, EnvironmentDemand]:
        """The tasks by environment; empty while no task and no worker has another than the endpoint's default.

        :param own: knows the durations of the others.
        """
        if not (queue.waiting or managers.has_environments):
            return {}
        demands: dict[str, EnvironmentDemand] = {}
        holds = managers.holds if managers.may_hold else None
        sent = 0
        for key, seen in self._seen.items():
            waits, has = queue.waits(key, holds), managers.sent.get(key, 0)
            if not (waits or has):
                seen.since = seen.running_since = None
                continue
            sent += has
            seen.since = now if seen.since is None else seen.since
            self._note_running(key, seen, managers, has=has, now=now)
            demands[key] = EnvironmentDemand(
                seen.environment, waits, has, seen.since, _run_s(seen, now), seen.durations.depth
            )
        others = queue.others, managers.outstanding - sent
        if any(others):
            demands[""] = EnvironmentDemand(self.default, *others, run_s=own.mean_s, depth=own.depth)
        return demands

    def _note_running(self, key: str, seen: _Seen, managers: Managers, *, has: int, now: float) -> None:
        is_running = has > 0 and any(
            load.sent and (load.ready or member.load.image)
            for member in managers.members.values()
            if (load := member.load.environments.get(key)) is not None
        )
        if not is_running:
            seen.running_since = None
        elif seen.running_since is None:
            seen.running_since = now


def _run_s(seen: _Seen, now: float) -> float | None:
    """How long a task runs: the mean, or at least as long as no worker has finished one."""
    if seen.running_since is None:
        return seen.durations.mean_s
    return max(seen.durations.mean_s or 0.0, now - seen.running_since)


def image_of(environment: Environment) -> str:
    """The image of a pod that runs the tasks of an environment; empty if that is no image from a registry."""
    if environment.type not in _REGISTRY_IMAGES or environment.location.startswith(("/", ".")):
        return ""
    return environment.location.removeprefix("docker://")


def in_pods(types: Mapping[str, str]) -> dict[str, str]:
    """The technologies of a manager that is a pod itself: images run in pods of their own, not in containers in it."""
    return {**types, **dict.fromkeys(_REGISTRY_IMAGES, "on Kubernetes, only images from a registry run")}


class ProblemsLogged:
    """Problems of environments on nodes, for the endpoint's log: each one once, and when it is over."""

    def __init__(self) -> None:
        self._problems: dict[str, dict[str, str]] = {}

    def changes(self, manager_id: str, statuses: Iterable[EnvironmentStatus] | None) -> list[tuple[int, str]]:
        """Return log levels and lines about new problems of a manager's environments.

        :param statuses: states of all environments that its node knows; None: unchanged.
        """
        if statuses is None:
            return []
        former = self._problems.pop(manager_id, {})
        lines: list[tuple[int, str]] = []
        problems: dict[str, str] = {}
        for status in statuses:
            if status.problem:
                problem = problems[status.key] = " ".join(without_secrets(status.problem).split())
                if problem != former.get(status.key):
                    lines.append((logging.WARNING, f"{problem} (logs/environment-{status.key}.log)"))
            elif status.key in former:
                works = "can be started again" if status.warm + status.busy else "is tried again"
                lines.append((logging.INFO, f"The environment {without_secrets(status.label)} {works}"))
        if problems:
            self._problems[manager_id] = problems
        return lines

    def forget(self, manager_id: str) -> None:
        """A manager has ended."""
        self._problems.pop(manager_id, None)


# -- reports -----------------------------------------------------------------------------------------------------------


def report_environments(
    members: Collection[ManagerEntry], seen: EnvironmentsSeen, *, without_pod: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """The environments of all nodes for a report: the newest of those that have failed, then those that start, then
    those with the most workers.

    :param without_pod: keys of those whose tasks wait for a first pod of their image.
    """
    rows = [(_interest(status), member.node, status) for member in members for status in _statuses(member, seen)]
    rows += [(_interest(status), "", status) for status in map(seen.without_pod, without_pod) if status is not None]
    rows.sort(key=lambda row: (*row[0], row[2].label, row[1]))
    failed = [row for row in rows if row[0][0] == 0]
    rows = [*failed[:_MOST_FAILED], *rows[len(failed) :]]
    return [_row(node, status) for _, node, status in rows[:MOST_REPORTED]]


def _statuses(member: ManagerEntry, seen: EnvironmentsSeen) -> Iterator[EnvironmentStatus]:
    """The environments of a node, as its manager reported them. In a pod, the workers run in the pod's image."""
    yield from member.environments
    environment = seen.get(member.load.image) if member.load.image else None
    if environment is not None:
        yield EnvironmentStatus(
            environment.key,
            environment.label,
            environment.type,
            warm=member.idle_workers,
            busy=member.workers - member.idle_workers,
            starting=max(0, member.slots - member.workers),
        )


def _interest(status: EnvironmentStatus) -> tuple[int, float]:
    workers = status.warm + status.busy
    if status.problem and not workers:
        return 0, -status.since
    return (1 if status.problem or status.starting or status.text else 2 if workers else 3), -workers


def _row(node: str, status: EnvironmentStatus) -> dict[str, Any]:
    return {
        "key": status.key,
        "label": without_secrets(status.label),
        "type": status.type,
        "node": node,
        "warm": status.warm,
        "busy": status.busy,
        "starting": status.starting,
        "forkable": status.forkable,
        "text": without_secrets(status.text),
        "since": status.since,
        "problem": without_secrets(status.problem),
        **({} if status.retry_at is None else {"retry_at": status.retry_at}),
    }


def waiting_reasons(
    queue: TaskQueue, managers: Managers, seen: EnvironmentsSeen, *, now: float, without_pod: Collection[str] = ()
) -> Iterator[dict[str, object]]:
    """Why tasks of environments wait, one sentence for each environment. ``without_pod``: see
    :func:`report_environments`."""
    waiting = [(seen.get(key), len(tasks)) for key, tasks in queue.waiting.items()]
    for environment, count in [(seen.default, queue.others), *waiting]:
        if environment is None or not count:
            continue
        key, label = environment.key, without_secrets(environment.label)
        why = "waits for a pod of its image" if key in without_pod else _why(key, label, managers, seen, now)
        yield {"environment": label, "waiting_tasks": count, "why": why}


def _why(key: str, label: str, managers: Managers, seen: EnvironmentsSeen, now: float) -> str:
    here = [(member.node, each) for member in managers.members.values() for each in _statuses(member, seen)]
    of_it = [(node, status) for node, status in here if status.key == key]
    for node, status in of_it:
        if status.text or (status.starting and not status.warm + status.busy):
            what = without_secrets(status.text) or "a worker starts"
            if status.text and status.since:  # without a text it is when the environment was prepared
                what = f"{what}, {now - status.since:.0f} s so far"
            return f"waits for environment {label} to start on node {node}: {what}"
    for node, status in of_it:
        if status.problem:
            retry = retry_of(status.retry_at, now=now)
            return f"environment {label} cannot be started on node {node}: {without_secrets(status.problem)}{retry}"
    if not len(managers):
        return "waits for a node"
    if any(status.busy + status.warm for _, status in of_it):
        return f"waits for a worker of environment {label}: all of them are busy"
    return f"waits for a free slot to start environment {label}"


def without_secrets(text: str) -> str:
    """A text without the user and password of a URL."""
    return _USER_OF_URL.sub("://", text) if "@" in text else text


def without_credentials(environment: Environment) -> Environment:
    """An environment without the user and password of a URL, for logs."""
    location = without_secrets(environment.location)
    requirements = tuple(map(without_secrets, environment.requirements))
    if (location, requirements) == (environment.location, environment.requirements):
        return environment
    return Environment(
        type=environment.type,
        location=location,
        requirements=requirements,
        preload=environment.preload,
        name=environment.name,
    )
