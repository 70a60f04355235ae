"""Calls that are submitted together."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from farcall._blobs import INLINE_BYTES, Blobs
from farcall._calls import DEFAULT_SERIALIZER, checked_call, in_order, pack_call
from farcall._ids import as_id
from farcall._needs import Needs, needs_of
from farcall._submission import Prepared, encode_payload
from farcall._tracing import current_traceparent
from farcall_common.payload import Serializer
from farcall_common.task_options import TaskOptions
from farcall_common.wire import new_id, new_task_id


class Batch:
    """Calls of registered functions, to be submitted by :meth:`Client.batch_run`."""

    def __init__(
        self,
        *,
        task_group_id: str | None = None,
        options: Any,
        serializer: Serializer = DEFAULT_SERIALIZER,
        reference_of: Callable[[str | uuid.UUID], str] = as_id,
    ) -> None:
        self._reference_of = reference_of
        self._task_group_id = task_group_id or new_id()
        self._options: TaskOptions = options  # checkers other than mypy do not know what msgspec makes
        self._serializer = serializer
        self._calls: list[tuple[str, str, bytes]] = []
        self._spans: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} calls, task group {self.task_group_id}>"

    @property
    def task_group_id(self) -> str:
        """The group under which the tasks are filed.

        :raises ValueError: on setting it to what is not a UUID.
        """
        return self._task_group_id

    @task_group_id.setter
    def task_group_id(self, value: str | uuid.UUID) -> None:
        self._task_group_id = as_id(value)

    @property
    def task_ids(self) -> list[str]:
        """The ids of the tasks, in the order in which the calls were added."""
        return [task_id for task_id, _, _ in self._calls]

    @property
    def needs(self) -> list[tuple[str, Needs]]:
        """What the arguments ask of their reader, where they do, with the functions that they are for."""
        found = ((function_id, needs_of(payload)) for _, function_id, payload in self._calls)
        return [(function_id, needs) for function_id, needs in found if needs is not None]

    def add(
        self, function_id: str | uuid.UUID, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> str:
        """Add a call and return the id that its task will have.

        :param function_id: an id, ``<id>@<version>``, or an alias of yours, which is looked up now.

        :raises TypeError: if ``args`` is not a tuple or a list, or ``kwargs`` not a dictionary with texts as keys.
        :raises SerializationError: if an argument cannot be sent; it says which.
        :raises PayloadTooLarge: if the arguments take more than 10 MiB.
        """
        values, named = checked_call(args, kwargs)
        task_id, function_id = new_task_id(), self._reference_of(function_id)
        if self._options.memoize:
            named = in_order(named)
        payload = pack_call(values, named, function_name=function_id, serializer=self._serializer)
        self._calls.append((task_id, function_id, payload))
        if span := current_traceparent():
            self._spans[task_id] = span
        return task_id

    def prepare(self) -> dict[str, Any]:
        """The batch as the body of one submit, with every payload inline: for whoever sends it by other means."""
        tasks: dict[str, list[str]] = {}
        ids: dict[str, list[str]] = {}
        for task_id, function_id, payload in self._calls:
            tasks.setdefault(function_id, []).append(payload.decode())
            ids.setdefault(function_id, []).append(task_id)
        return {"task_group_id": self.task_group_id, **self._options.to_json(), "tasks": tasks, "task_ids": ids}

    def prepared(self, blobs: Blobs, *, parallel: int) -> Iterator[Prepared]:
        """The calls ready to be sent, big payloads uploaded (``parallel`` at a time)."""
        big = {task_id: payload for task_id, _, payload in self._calls if len(payload) > INLINE_BYTES}
        with ThreadPoolExecutor(parallel, thread_name_prefix="farcall-upload") as pool:
            refs = dict(zip(big, pool.map(blobs.upload, big.values()), strict=True))
        for task_id, function_id, payload in self._calls:
            encoded = encode_payload(refs.get(task_id, payload))
            yield Prepared(task_id, function_id, encoded, self._spans.get(task_id))
