"""Task lists, groups and the audit log of the fake cloud."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from farcall.testing._shapes import Task
from farcall_common.errors import TaskGroupUnknown

Json = dict[str, Any]


class Listings:
    """Lists tasks in the order of their submission, and has the routes for that.

    :param owner_id: the owner of all of them.
    """

    def __init__(self, tasks: dict[str, Task], *, owner_id: str) -> None:
        self._tasks = tasks
        self._owner_id = owner_id

    @property
    def routes(self) -> Sequence[tuple[str, str, Callable[..., Any]]]:
        """Method, pattern of the path, and handler."""
        return (
            ("GET", "/v3/tasks", self._list_tasks),
            ("GET", "/v3/groups", self._list_groups),
            ("GET", "/v2/taskgroup/([^/]+)", self._get_group),
            ("GET", "/v3/audit", self._list_audit),
        )

    def _list_tasks(self, query: Json) -> Json:
        state, limit, last = query.get("state"), int(query.get("limit", 100)), query.get("before")
        since, until = float(query.get("since", 0)), float(query.get("until", "inf"))
        tasks = [
            task
            for task in reversed(self._tasks.values())
            if state in (None, str(task.state))
            and not task.discarded
            and query.get("endpoint_id") in (None, task.endpoint_id)
            and since <= task.timings["submitted_at"] < until
        ]
        if last is not None:
            tasks = tasks[[task.task_id for task in tasks].index(last.partition(":")[2]) + 1 :]
        more = {"next": f"0:{tasks[limit - 1].task_id}"} if len(tasks) >= limit else {}
        return more | {
            "tasks": [
                {
                    "task_id": task.task_id,
                    "status": str(task.state),
                    "task_group_id": task.task_group_id,
                    "endpoint_id": task.endpoint_id,
                    "function_id": task.function_id,
                    "function_version": task.function_version,
                    "attempt": task.attempt,
                    "submitted_at": task.timings["submitted_at"],
                    "finished_at": task.events[-1]["at"] if task.state.is_terminal else None,
                    **({"error": task.error.to_json()} if task.error else {}),
                }
                for task in tasks[:limit]
            ]
        }

    def _list_groups(self, query: Json) -> Json:
        limit, members = int(query.get("limit", 100)), collections.defaultdict[str, list[Task]](list)
        for task in self._tasks.values():
            members[task.task_group_id].append(task)
        ids = list(reversed(members))
        page = (ids[ids.index(query["before"]) + 1 :] if "before" in query else ids)[:limit]
        groups = [
            {
                "task_group_id": group_id,
                "created_at": members[group_id][0].timings["submitted_at"],
                "tasks": len(members[group_id]),
                "states": collections.Counter(str(task.state) for task in members[group_id]),
            }
            for group_id in page
        ]
        return {"groups": groups, "next": page[-1] if len(page) == limit else None}

    def _get_group(self, _: Json, task_group_id: str) -> Json:
        tasks = [task for task in self._tasks.values() if task.task_group_id == task_group_id]
        if not tasks:
            raise TaskGroupUnknown(f"there is no task group {task_group_id}")
        entries = [{"id": task.task_id, "created_at": str(task.timings["submitted_at"])} for task in tasks]
        return {"taskgroup_id": task_group_id, "create_websockets_queue": False, "tasks": entries}

    def _list_audit(self, query: Json) -> Json:
        since, until = float(query.get("since", 0)), float(query.get("until", "inf"))
        entries = [
            {
                "at": task.timings["submitted_at"],
                "identity_id": self._owner_id,
                "action": "task.retry" if task.retry_of else "tasks.submit",
                "object_id": task.retry_of or task.endpoint_id,
                "owner_id": self._owner_id,
                "detail": {"task_group_id": task.task_group_id, "tasks": 1},
            }
            for task in self._tasks.values()
            if since <= task.timings["submitted_at"] < until
        ]
        return {"entries": entries}
