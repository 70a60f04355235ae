"""Remembered results: a call that was made before is answered before anything is queued (funcX, HPDC 2020).

Only successes are remembered, and only those of the caller's own tasks: what somebody else's endpoint returned is not
known to be true, however public the function is. Two calls are the same when the bytes of function and payload are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from farcall_common.store import Stores
from farcall_common.store.model import Function, Task

#: Where a function's metadata says that its results are remembered.
MEMOIZE: Final = "memoize"


def is_memoized(function: Function, wanted: bool | None) -> bool:
    """Whether a call is to be remembered, and may be answered from memory: what the call says, else the function."""
    return function.metadata.get(MEMOIZE) is True if wanted is None else wanted


class Memo:
    """Finds results of earlier calls."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    def marked(self, task: Task) -> Task:
        """The task with its key.

        What the caller wants its result serialised with is part of it: another form of the result is another result.
        """
        payload = task.payload_ref.sha256 if task.payload_ref else hashlib.sha256(task.payload or b"").hexdigest()
        options = task.options
        environment = [f"container {options.container}"] if options.container else []
        parts = [task.function_hash, payload, *environment, *options.result_serializers]
        return msgspec.structs.replace(task, memo_key=hashlib.sha256("\n".join(parts).encode()).hexdigest())

    def recall(self, owner_id: str, tasks: Sequence[Task]) -> Mapping[str, Task]:
        """For each of the owner's new tasks whose result is remembered, by task id: the task that it came from."""
        keys = list(dict.fromkeys(task.memo_key for task in tasks if task.memo_key is not None))
        found = self._stores.tasks.find_memoized(owner_id, keys) if keys else {}
        there = {key: task for key, task in found.items() if self._is_there(task)}
        return {task.task_id: there[task.memo_key] for task in tasks if task.memo_key in there}

    def _is_there(self, task: Task) -> bool:
        """A result in the blob store is gone when its time is over."""
        return task.result_ref is None or self._stores.blobs.size_bytes(task.result_ref.blob_key) is not None
