"""Prewarming: workers of an environment that the endpoint's owner wants warm, spread over the managers.

``farcall-endpoint prewarm`` writes a :class:`PrewarmRequest` into the endpoint's directory; the agent reads it within a
second, and again when it starts. Pure; the number of workers is for the endpoint as a whole.

Where pods have images, managers are not asked: an image gets as many pods as bring these workers
(:class:`farcall_endpoint.agent.core.blocks.SimpleScaling`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

from farcall_common.environments import Environment
from farcall_endpoint.agent.core.environments import image_of, without_secrets
from farcall_endpoint.agent.core.managers import ManagerEntry, Managers
from farcall_endpoint.contracts.agent_manager import PrewarmRequest

MOST_REQUESTS: Final = 100


def spread(request: PrewarmRequest, managers: Mapping[str, ManagerEntry]) -> dict[str, int]:
    """Return workers by manager: as evenly as the slots allow, over the managers that can run the environment. A node
    where it has a problem gets none, unless there is no other."""
    able = {
        manager_id: member
        for manager_id, member in managers.items()
        if request.node in ("", member.node) and not member.load.refusal(request.environment) and not member.load.image
    }
    key = request.environment.key
    healthy = {
        manager_id: member
        for manager_id, member in able.items()
        if not any(status.key == key and status.problem for status in member.environments)
    }
    room = {manager_id: member.slots for manager_id, member in (healthy or able).items()}
    counts = dict.fromkeys(room, 0)
    left = request.count
    while left and (open_ := [each for each in room if counts[each] < room[each]]):
        share = max(1, left // len(open_))
        for manager_id in open_[: left if share == 1 else None]:
            more = min(share, room[manager_id] - counts[manager_id], left)
            counts[manager_id] += more
            left -= more
    return {manager_id: count for manager_id, count in counts.items() if count}


@dataclasses.dataclass(frozen=True)
class Change:
    """Order to a manager: keep ``count`` workers of an environment warm. ``retry``: also if it has just failed."""

    manager_id: str
    environment: Environment
    count: int
    retry: bool = False


class Prewarming:
    """Which manager was asked for what. A request ends with its last entry, or one with the count 0.

    :param image_check: where pods have images: why the owner (its second argument: empty) may not have one there; empty
        if that is allowed. None elsewhere.
    """

    def __init__(self, *, image_check: Callable[[Environment, str], str] | None = None) -> None:
        self._image_check = image_check
        self._requests: dict[str, PrewarmRequest] = {}
        self._asked: dict[tuple[str, str], Change] = {}
        self.is_due = False
        self._renewed: set[str] = set()
        #: By manager and environment, when a request was made (again): since when it was in its state. A problem of
        #: that time is no answer. The clocks of the nodes are not compared with this one.
        self._since: dict[tuple[str, str], float] = {}

    def request(self, requests: Sequence[PrewarmRequest]) -> None:
        """These are wanted from now on, and no others."""
        former = self._requests
        self._requests = {each.environment.key: each for each in requests[:MOST_REQUESTS] if each.count}
        self._renewed |= {key for key, each in self._requests.items() if former.get(key) != each}
        self.is_due = True

    def environment(self, key: str) -> Environment | None:
        """The environment of a request."""
        request = self._requests.get(key)
        return None if request is None else request.environment

    def images(self) -> dict[str, int]:
        """The workers that images are to have in pods, by the keys of their environments."""
        return {
            key: request.count
            for key, request in self._requests.items()
            if self._is_in_pods(request) and not self._pod_refusal(request)
        }

    def managers_changed(self) -> None:
        """A manager has come, has gone, or has a problem."""
        self.is_due = self.is_due or bool(self._requests)

    def changes(self, managers: Managers) -> Iterator[Change]:
        """Return the numbers of warm workers to request from managers now."""
        if not self.is_due:
            return
        self.is_due = False
        present = managers.members
        self._asked = {each: asked for each, asked in self._asked.items() if each[0] in present}
        self._since = {each: since for each, since in self._since.items() if each[0] in present}
        wanted: dict[tuple[str, str], Change] = {}
        of_managers = {key: each for key, each in self._requests.items() if not self._is_in_pods(each)}
        for key, request in of_managers.items():
            for manager_id, count in spread(request, present).items():
                wanted[manager_id, key] = Change(manager_id, request.environment, count)
        for key in self._renewed & of_managers.keys():
            for manager_id, member in present.items():
                for status in member.environments:
                    if status.key == key:
                        self._since[manager_id, key] = status.since
                asked = wanted.get((manager_id, key)) or Change(manager_id, of_managers[key].environment, 0)
                yield dataclasses.replace(asked, retry=True)
                if asked.count:
                    self._asked[manager_id, key] = asked
        self._renewed.clear()
        for each, asked in list(self._asked.items()):
            if each not in wanted:
                del self._asked[each]
                yield dataclasses.replace(asked, count=0)
        for each, change in wanted.items():
            if self._asked.get(each) != change:
                self._asked[each] = change
                yield change

    def describe(self, managers: Managers, *, problem: str = "") -> list[dict[str, object]]:
        """Return the requests and their progress for the status.

        :param problem: reason why there are no nodes, if so.
        """
        return [
            self._pod_row(request, managers, problem) if self._is_in_pods(request) else self._row(request, managers)
            for request in self._requests.values()
        ]

    def _is_in_pods(self, request: PrewarmRequest) -> bool:
        return self._image_check is not None and bool(image_of(request.environment))

    def _pod_refusal(self, request: PrewarmRequest) -> str:
        if request.node:
            return "Kubernetes chooses the nodes of pods: leave --node out"
        return self._image_check(request.environment, "") if self._image_check is not None else ""

    def _pod_row(self, request: PrewarmRequest, managers: Managers, problem: str) -> dict[str, object]:
        pods = [each for each in managers.members.values() if each.load.image == request.environment.key]
        refusal, warm = self._pod_refusal(request), sum(each.workers for each in pods)
        waits = "" if warm >= request.count else "it waits for pods of its image; max_blocks limits all pods together"
        if waits and problem:
            waits = f"it waits for pods of its image: {problem}"
        starting = sum(max(0, each.slots - each.workers) for each in pods)
        return _described(request, 0 if refusal else request.count, warm, starting, refusal or waits, bool(refusal))

    def _row(self, request: PrewarmRequest, managers: Managers) -> dict[str, object]:
        key = request.environment.key
        by_id = {each: member for each, member in managers.members.items() if request.node in ("", member.node)}
        members = list(by_id.values())
        placed = sum(spread(request, managers.members).values())
        here = [status for each in members for status in each.environments if status.key == key]
        failed = [
            f"it cannot be started on node {member.node}: {status.problem}"
            for manager_id, member in by_id.items()
            for status in member.environments
            if status.key == key and status.problem and status.since != self._since.get((manager_id, key))
        ]
        warm = sum(each.warm + each.busy for each in here)
        others = 0
        if warm < placed:
            rest = [each for each in self._requests.values() if each is not request]
            others = sum(_taken(each, managers.members) for each in rest)
        why, is_final = _why(request, members, placed, others=others)
        if failed and not is_final and key not in self._renewed:
            why, is_final = failed[0], True
        return _described(request, placed, warm, sum(each.starting for each in here), why, is_final)


def _taken(request: PrewarmRequest, managers: Mapping[str, ManagerEntry]) -> int:
    """The slots that the workers of a request have or get: none where they cannot be started."""
    key = request.environment.key
    return sum(
        count
        for manager_id, count in spread(request, managers).items()
        if not any(status.key == key and status.problem for status in managers[manager_id].environments)
    )


def _described(
    request: PrewarmRequest, placed: int, warm: int, starting: int, why: str, is_final: bool
) -> dict[str, object]:
    return {
        "environment": without_secrets(request.environment.label),
        "key": request.environment.key,
        "wanted": request.count,
        "placed": placed,
        "warm": warm,
        "starting": starting,
        "node": request.node,
        "requested_at": request.requested_at,
        "why": without_secrets(why),
        "failed": is_final,
    }


def _why(request: PrewarmRequest, members: Collection[ManagerEntry], placed: int, *, others: int) -> tuple[str, bool]:
    """Explain why a request is not fulfilled, and whether that is final; empty if there is nothing to explain.

    :param others: workers that other requests have or get, if some of this request's workers are missing.
    """
    if not members:
        return (f"there is no node {request.node}", True) if request.node else ("there is no node yet", False)
    refusals = [each.load.refusal(request.environment) for each in members]
    if all(refusals):
        return f"no node can run it: {refusals[0]}", True
    key = request.environment.key
    here = [(each.node, status) for each in members for status in each.environments if status.key == key]
    for node, status in here:
        if status.text:
            return f"node {node}: {status.text}", False
    slots = sum(each.slots for each in members)
    if placed + others > slots and others:
        return f"there are {slots} slots, and other requests want {others} workers: `--count 0` ends one", False
    return (f"the nodes have slots for {placed} of them" if placed < request.count else ""), False
