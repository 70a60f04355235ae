"""Fake usage, in memory."""

from __future__ import annotations

import collections
import datetime as dt
import math
from collections.abc import Collection, Mapping, Sequence

from farcall_common.graphs import STAGE_CALLS, STAGE_RUN_S
from farcall_common.retries import EARLIER_RUN_S
from farcall_common.store.model import Endpoint, Task, Usage, UsageBy
from farcall_common.wire.states import TaskState
from farcall_common.worker_share import WorkerShare
from tests.support.stores.reach import Reach, moment

_KEYS = ("day", "owner_id", "endpoint_id", "function_id", "account")
_FIELD_OF = {UsageBy.IDENTITY: "owner_id", UsageBy.FUNCTION: "function_id", UsageBy.ENDPOINT: "endpoint_id"}


class FakeUsage(Reach):
    """:class:`~farcall_common.store.ports.UsageSums` in memory; a part of FakeDatabase."""

    def __init__(self) -> None:
        super().__init__()
        self._endpoints: dict[str, Endpoint] = {}
        self._sums: list[Usage] = []
        self._parts: list[list[Usage]] = []

    def read_usage(
        self,
        by: Collection[UsageBy],
        *,
        since: dt.date,
        until: dt.date,
        owner_ids: Collection[str] | None = None,
        endpoint_id: str | None = None,
        endpoint_owner_ids: Collection[str] | None = None,
        after: int = 0,
        limit: int = 1000,
    ) -> Sequence[Usage]:
        names = [_FIELD_OF.get(each, each.value) for each in UsageBy if each in by]
        with self._call():
            found = [
                each
                for each in [*self._sums, *(usage for part in self._parts for usage in part)]
                if each.day is not None
                and since <= each.day < until
                and (owner_ids is None or each.owner_id in owner_ids)
                and endpoint_id in (None, each.endpoint_id)
                and (endpoint_owner_ids is None or self._owner_of(each.endpoint_id) in endpoint_owner_ids)
            ]
        return _summed(found, names)[after : after + limit]

    def fold_usage(self, *, limit: int) -> int:
        with self._call():
            rows = [usage for part in self._parts for usage in part]
            taken, left = rows[:limit], rows[limit:]
            self._sums = _summed([*self._sums, *taken], _KEYS)
            self._parts = [left] if left else []
            return len(taken)

    def purge_usage(self, *, before: dt.date, limit: int) -> int:
        with self._call():
            old = sorted(
                (each for each in self._sums if each.day and each.day < before), key=lambda each: str(each.day)
            )
            gone = old[:limit]
            self._sums = [each for each in self._sums if each not in gone]
            return len(gone)

    def _owner_of(self, endpoint_id: str | None) -> str | None:
        endpoint = self._endpoints.get(endpoint_id or "")
        return endpoint.owner_id if endpoint else None

    def _count(self, tasks: Sequence[Task], running_since: Mapping[str, dt.datetime]) -> None:
        """Add ended tasks, of one batch of results."""
        parts = []
        for task in tasks:
            endpoint = self._endpoints.get(task.endpoint_id)
            share = endpoint.worker_share if endpoint else WorkerShare()
            wall_s, nodes = _wall_s(task, running_since.get(task.task_id)), _nodes(task)
            parts.append(
                Usage(
                    1,
                    int(task.state not in (TaskState.SUCCESS, TaskState.CANCELLED)),
                    wall_s,
                    wall_s * (share.cores if nodes is None else nodes * share.node_cores),
                    wall_s * (share.gpus if nodes is None else nodes * share.node_gpus),
                    moment(task.finished_at).astimezone(dt.UTC).date(),
                    task.owner_id,
                    task.endpoint_id,
                    task.function_id,
                    share.account,
                    stages=task.details.get(STAGE_CALLS, 0),
                )
            )
        self._parts.append(_summed(parts, _KEYS))


def _wall_s(task: Task, running_since: dt.datetime | None) -> float:
    if STAGE_RUN_S in task.details:
        wall_s = float(task.details[STAGE_RUN_S])
    elif "started_at" in task.timings and "ended_at" in task.timings:
        wall_s = task.timings["ended_at"] - task.timings["started_at"]
    elif running_since is not None and task.state is not TaskState.LOST:
        wall_s = (moment(task.finished_at) - running_since).total_seconds()
    else:
        wall_s = 0.0
    wall_s += float(task.details.get(EARLIER_RUN_S, 0.0))
    most_s = (moment(task.finished_at) - moment(task.submitted_at)).total_seconds()
    return max(0.0, min(wall_s, most_s * (1 + int(task.details.get(STAGE_CALLS, 0)))))


def _nodes(task: Task) -> int | None:
    options = task.options
    if options.num_nodes is None and options.num_ranks is not None and options.ranks_per_node is not None:
        return math.ceil(options.num_ranks / options.ranks_per_node)
    return options.num_nodes


def _summed(found: Sequence[Usage], names: Sequence[str]) -> list[Usage]:
    groups: dict[tuple[object, ...], list[Usage]] = collections.defaultdict(list)
    for each in found:
        groups[tuple(getattr(each, name) for name in names)].append(each)
    return [
        Usage(
            sum(each.tasks for each in group),
            sum(each.failed for each in group),
            sum(each.wall_s for each in group),
            sum(each.core_s for each in group),
            sum(each.gpu_s for each in group),
            stages=sum(each.stages for each in group),
            **{name: getattr(group[0], name) for name in names},
        )
        for _, group in sorted(groups.items(), key=lambda item: tuple(map(str, item[0])))
    ]
