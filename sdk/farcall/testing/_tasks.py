"""Tasks of the fake cloud: their records and lists, the endpoint that runs them, and JSON answers."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import httpx
import msgspec

from farcall_common.errors import (
    EndpointUnknown,
    ErrorRecord,
    FarcallError,
    Forbidden,
    InvalidRequest,
    NotFound,
    TaskGroupUnknown,
)
from farcall_common.http_errors import status_of
from farcall_common.qos import QoS
from farcall_common.wire import Reporter, TaskState

Json = dict[str, Any]

_UNSET: Final = (
    "display_name",
    "description",
    "hostname",
    "local_user",
    "ip_address",
    "endpoint_version",
    "sdk_version",
)


@dataclasses.dataclass
class Task:
    task_id: str
    task_group_id: str
    endpoint_id: str
    function_id: str
    payload: bytes
    state: TaskState = TaskState.RECEIVED
    attempt: int = 0
    result: bytes | None = None
    error: ErrorRecord | None = None
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    events: list[Json] = dataclasses.field(default_factory=list)
    details: Json = dataclasses.field(default_factory=dict)
    memo_key: tuple[str, bytes, tuple[str, ...]] | None = None
    function_version: int = 1
    result_serializers: Sequence[str] = ()
    retry_of: str | None = None
    retries: int = 0
    retry_on: Sequence[str] = ()
    retries_used: int = 0
    discarded: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    #: Of a graph that runs, in the form of the API.
    stages: Sequence[Json] = ()
    #: How far it is, in the form of the API.
    progress: Json | None = None
    #: Which of its files move, in the form of the API.
    staging: Json | None = None
    #: References of the functions that it may call.
    callees: Sequence[str] = ()
    qos: QoS | None = None

    def ended(self) -> bool:
        return self.state.is_terminal

    def summary(self) -> Json:
        """What every answer about the task has."""
        return {
            "task_id": self.task_id,
            "status": str(self.state),
            "task_group_id": self.task_group_id,
            "endpoint_id": self.endpoint_id,
            "function_id": self.function_id,
            "function_version": self.function_version,
            "attempt": self.attempt,
        }

    def output(self, wanted: Json) -> Json:
        """An answer about the output, from the bytes on that are wanted."""
        reason = "NOT_STARTED" if not self.attempt else None
        answer: Json = {"status": str(self.state), "attempt": self.attempt, "complete": self.ended(), "reason": reason}
        answer["source"] = "endpoint" if self.attempt else "none"
        for stream, data in (("stdout", self.stdout), ("stderr", self.stderr)):
            first = int(wanted.get(f"{stream}_from", 0))
            begin = max(0, len(data) + first) if first < 0 else first
            answer[stream] = {"from": begin, "next": len(data), "text": data[begin:].decode(errors="replace")}
        return answer

    def move(self, state: TaskState, reporter: Reporter, **detail: object) -> None:
        self.state = state
        event = {
            "state": str(state),
            "reporter": str(reporter),
            "at": time.time(),
            "attempt": self.attempt,
            "detail": detail,
        }
        self.events.append(event)


def read_json(content: bytes) -> Json:
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("not a JSON object")
    return body


def refusal(error: FarcallError) -> httpx.Response:
    status = status_of(type(error))
    body = error.record.to_json() | {
        "status": "Failed",
        "http_status_code": status,
        "reason": error.record.message,
        "error_args": [],
    }
    return httpx.Response(status, content=msgspec.json.encode(body))


class Listings:
    """Lists tasks in the order of their submission, and has the routes for that.

    :param owner_id: the owner of all of them.
    :param name_of: the name of a function or an endpoint by its id, None if it does not exist.
    """

    def __init__(self, tasks: dict[str, Task], *, owner_id: str, name_of: Callable[[str], str | None]) -> None:
        self._tasks = tasks
        self._name_of = name_of
        self._owner_id = owner_id

    @property
    def routes(self) -> Sequence[tuple[str, str, Callable[..., Any]]]:
        """Method, pattern of the path, and handler."""
        return (
            ("GET", "/v3/tasks", self._list_tasks),
            ("GET", "/v3/ids", self._find_ids),
            ("GET", "/v3/groups", self._list_groups),
            ("GET", "/v2/taskgroup/([^/]+)", self._get_group),
            ("GET", "/v3/audit", self._list_audit),
            ("GET", "/v3/usage", self._list_usage),
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
                    **task.summary(),
                    "submitted_at": task.timings["submitted_at"],
                    "finished_at": task.events[-1]["at"] if task.state.is_terminal else None,
                    "function_name": self._name_of(task.function_id),
                    "endpoint_name": self._name_of(task.endpoint_id),
                    "timings": task.timings,
                    **({"error": task.error.to_json()} if task.error else {}),
                }
                for task in tasks[:limit]
            ]
        }

    def _find_ids(self, query: Json) -> Json:
        digits = query["beginning"].replace("-", "")
        ids = {task.task_id if query["kind"] == "task" else task.task_group_id for task in self._tasks.values()}
        return {"ids": sorted((each for each in ids if each.replace("-", "").startswith(digits)), reverse=True)}

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

    def _list_usage(self, query: Json) -> Json:
        """A core and no accelerator for each task, and no account."""
        if query.get("of") == "all":
            raise Forbidden("only administrators see the usage of all tasks")
        names = query["by"].split(",")
        sums: dict[tuple[str, ...], Json] = {}
        for task in filter(Task.ended, self._tasks.values()):
            keys = {
                "day": dt.datetime.fromtimestamp(task.events[-1]["at"], dt.UTC).date().isoformat(),
                "identity": self._owner_id,
                "endpoint": task.endpoint_id,
                "function": task.function_id,
                "account": "",
            }
            is_wanted = query.get("since", "") <= keys["day"] < query.get("until", "9999")
            if not is_wanted or query.get("endpoint_id") not in (None, task.endpoint_id):
                continue
            chosen = {
                name if name in ("day", "account") else f"{name}_id": keys[name] for name in keys if name in names
            }
            none = {"tasks": 0, "failed": 0, "wall_s": 0.0, "core_s": 0.0, "gpu_s": 0.0, "stages": 0}
            entry = sums.setdefault(tuple(chosen.values()), chosen | none)
            wall_s = task.timings.get("ended_at", 0.0) - task.timings.get("started_at", 0.0)
            entry["tasks"] += 1
            entry["failed"] += task.state not in (TaskState.SUCCESS, TaskState.CANCELLED)
            entry["wall_s"] += wall_s
            entry["core_s"] += wall_s
            entry["stages"] += sum(stage.get("ended", 0) for stage in task.details.get("stages", ()))
        first, limit = int(query.get("after", 0)), int(query.get("limit", 1000))
        page = [entry for _, entry in sorted(sums.items())][first : first + limit]
        return {"usage": page, **({"next": first + limit} if len(page) == limit else {})}

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


class Endpoint:
    """State of the endpoint, and its routes.

    :param tasks: all of them run on it.
    :param others: returns names and ids of other endpoints, which have files and run nothing.
    """

    def __init__(
        self, tasks: Mapping[str, Task], *, owner_id: str, others: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        self.endpoint_id: Final = str(uuid.uuid4())
        self.runtime: Json = {}
        self.is_online = False
        self.is_owned = True
        self._tasks = tasks
        self._owner_id = owner_id
        self._others = others
        self._is_deleted = False
        #: Public keys of its agent, and when they were added.
        self.keys: dict[str, float] = {}

    @property
    def routes(self) -> Sequence[tuple[str, str, Callable[..., Any]]]:
        """Method, pattern of the path, and handler."""
        return (
            ("GET", "/v2/endpoints", self._list),
            ("GET", "/v2/endpoints/([^/]+)", self._get),
            ("DELETE", "/v2/endpoints/([^/]+)", self._delete),
            ("GET", "/v2/endpoints/([^/]+)/status", self._get_status),
            ("GET", "/v3/endpoints/([^/]+)/allowed_functions", self._get_allowed_functions),
            ("GET", "/v3/endpoints/([^/]+)/keys", self._list_keys),
            ("DELETE", "/v3/endpoints/([^/]+)/keys", self._revoke_key),
        )

    def check(self, endpoint_id: str) -> None:
        """:raises EndpointUnknown: unless this is the endpoint."""
        if endpoint_id != self.endpoint_id or self._is_deleted:
            raise EndpointUnknown(f"there is no endpoint {endpoint_id}")

    def status(self) -> Json:
        """Whether it is online, and its numbers of workers and tasks."""
        waiting = sum(not task.state.is_terminal for task in self._tasks.values())
        workers = int(self.is_online)
        details = {"managers": workers, "total_workers": workers, "idle_workers": int(self.is_online and not waiting)}
        details |= {"pending_tasks": waiting, "outstanding_tasks": waiting}
        if not self.is_online:
            return {"status": "offline", "details": details}
        details |= {"blocks": 1, "pending_blocks": 0}
        return {"status": "online", "details": details, "reported_at": time.time(), "age_s": 0.0}

    def _list(self, query: Json) -> list[Json]:
        shown = {"uuid": self.endpoint_id, "name": "fake", "owned": self.is_owned, "status": self.status()["status"]}
        listed = [] if self._is_deleted else [shown]
        if query.get("role") == "any":  # those that are not the user's: without a name, the own one is meant
            other = {"owned": False, "status": "online"}
            listed += [{"uuid": id_, "name": name, **other} for name, id_ in self._others().items()]
        return [{"display_name": None, "owner": self._owner_id, **each} for each in listed]

    def _delete(self, _: Json, endpoint_id: str) -> Json:
        self.check(endpoint_id)
        self._is_deleted = True
        return {"result": 302}

    def _get(self, _: Json, endpoint_id: str) -> Json:
        self.check(endpoint_id)
        shown = {
            "uuid": endpoint_id,
            "name": "fake",
            "multi_user": False,
            "public": False,
            "owned": self.is_owned,
            "endpoint_config": "",
            "user_config_template": "",
            "user_config_schema": {},
            "subscription_uuid": None,
        }
        return shown | dict.fromkeys(_UNSET) | ({"runtime": self.runtime} if self.runtime else {})

    def _get_status(self, _: Json, endpoint_id: str) -> Json:
        self.check(endpoint_id)
        return self.status()

    def _list_keys(self, _: Json, endpoint_id: str) -> Json:
        self.check(endpoint_id)
        keys = [{"public_key": key, "added_at": added_at} for key, added_at in self.keys.items()]
        return {"endpoint_id": endpoint_id, "keys": keys}

    def _revoke_key(self, query: Json, endpoint_id: str) -> Json:
        self.check(endpoint_id)
        if self.keys.pop(query["public_key"], None) is None:
            raise NotFound(f"endpoint {endpoint_id} has no such key")
        return {"result": 302}

    def _get_allowed_functions(self, _: Json, endpoint_id: str) -> Json:
        self.check(endpoint_id)
        return {"endpoint_id": endpoint_id, "restricted": False, "functions": []}
