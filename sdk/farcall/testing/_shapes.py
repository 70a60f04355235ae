"""Task records and JSON answers of the fake cloud."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from farcall_common.errors import ErrorRecord, FarcallError, InvalidRequest, TaskUnknown
from farcall_common.http_errors import status_of
from farcall_common.wire import Reporter, TaskState

Json = dict[str, Any]


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
    memo_key: tuple[str, bytes] | None = None
    function_version: int = 1
    result_serializers: Sequence[str] = ()
    retry_of: str | None = None
    discarded: bool = False

    def ended(self) -> bool:
        return self.state.is_terminal

    def move(self, state: TaskState, reporter: Reporter) -> None:
        self.state = state
        event = {
            "state": str(state),
            "reporter": str(reporter),
            "at": time.time(),
            "attempt": self.attempt,
            "detail": {},
        }
        self.events.append(event)


def unknown_task(task_id: str) -> Json:
    error = TaskUnknown(f"there is no task {task_id}").record
    return {"task_id": task_id, "status": "failed", "reason": error.message, "details": {}, "error": error.to_json()}


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
