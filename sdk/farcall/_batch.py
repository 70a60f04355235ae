"""Calls that are submitted together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from farcall._blobs import INLINE_BYTES, Blobs
from farcall._calls import pack_call
from farcall._submission import Prepared, TaskOptions, encode_payload
from farcall_common.wire import new_id, new_task_id

__all__ = ["Batch"]


class Batch:
    """Calls of registered functions, to be submitted by :meth:`Client.batch_run`."""

    def __init__(self, *, task_group_id: str | None = None, options: TaskOptions) -> None:
        self.task_group_id = task_group_id or new_id()
        self.options = options
        self._calls: list[tuple[str, str, bytes]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} calls, task group {self.task_group_id}>"

    @property
    def task_ids(self) -> list[str]:
        """The ids of the tasks, in the order in which the calls were added."""
        return [task_id for task_id, _, _ in self._calls]

    def add(self, function_id: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> str:
        """Add a call and return the id that its task will have.

        :raises SerializationError: if an argument cannot be sent; it says which.
        :raises PayloadTooLarge: if the arguments take more than 10 MiB.
        """
        task_id = new_task_id()
        payload = pack_call(tuple(args), kwargs or {}, function_name=function_id)
        self._calls.append((task_id, function_id, payload))
        return task_id

    def prepared(self, blobs: Blobs, *, parallel: int) -> Iterator[Prepared]:
        """The calls ready to be sent, big payloads uploaded (``parallel`` at a time)."""
        big = {task_id: payload for task_id, _, payload in self._calls if len(payload) > INLINE_BYTES}
        with ThreadPoolExecutor(parallel, thread_name_prefix="farcall-upload") as pool:
            refs = dict(zip(big, pool.map(blobs.upload, big.values()), strict=True))
        for task_id, function_id, payload in self._calls:
            yield Prepared(task_id, function_id, encode_payload(refs.get(task_id, payload)))
