"""Memoization: a repeated call gets the result of the earlier one and is not queued (funcX, HPDC 2020).

Only successes are memoized, and only those of the caller's own tasks at the same endpoint: a result is what an endpoint
reported, and the caller trusts the endpoint of the call, not others. Two calls are equal when the bytes of function and
payload are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from farcall_common.store import Stores
from farcall_common.store.model import Function, Task

#: Key in a function's metadata: its results are memoized.
MEMOIZE: Final = "memoize"


def is_memoized(function: Function, wanted: bool | None) -> bool:
    """Whether a call is memoized: as the call says, else as the function says."""
    return function.metadata.get(MEMOIZE) is True if wanted is None else wanted


class Memo:
    """Finds results of earlier calls."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    def marked(self, task: Task) -> Task:
        """The task with its key.

        The endpoint is part of it, and the environment, whatever its name. So are the serialisation strategies of the
        result: another form of the result is another result; and the functions that the task calls.
        """
        payload = task.payload_ref.sha256 if task.payload_ref else hashlib.sha256(task.payload or b"").hexdigest()
        options = task.options
        environment = [f"environment {options.environment.key}"] if options.environment else []
        callees = [f"callee {c.function_hash} {c.environment.key if c.environment else ''}" for c in options.callees]
        parts = [task.endpoint_id, task.function_hash, payload, *environment, *callees, *options.result_serializers]
        return msgspec.structs.replace(task, memo_key=hashlib.sha256("\n".join(parts).encode()).hexdigest())

    def recall(self, owner_id: str, tasks: Sequence[Task]) -> Mapping[str, Task]:
        """Return the task that produced the memoized result, by the id of each new task that has one."""
        keys = list(dict.fromkeys(task.memo_key for task in tasks if task.memo_key is not None))
        found = self._stores.tasks.find_memoized(owner_id, keys) if keys else {}
        usable = {key: task for key, task in found.items() if self._has_result(task)}
        return {task.task_id: usable[task.memo_key] for task in tasks if task.memo_key in usable}

    def _has_result(self, task: Task) -> bool:
        """Whether the result can still be read: blobs of results expire."""
        return task.result_ref is None or self._stores.blobs.size_bytes(task.result_ref.blob_key) is not None
