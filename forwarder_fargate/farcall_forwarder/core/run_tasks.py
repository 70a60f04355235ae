"""RunTasks messages: built from leased tasks, with the dispatch events that are recorded before they are sent."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from farcall_common.fairness import PAYS_FOR
from farcall_common.store.codec import pack
from farcall_common.store.model import BlobRef, FunctionBody, LeasedTask, TaskEvent
from farcall_common.wire import BlobLocation, FunctionSpec, Reporter, RunTasks, TaskSpec, TaskState

#: Functions in one message, and their bytes, far below what an envelope may have.
_MAX_BODIES: Final = 1000
_MAX_BODIES_BYTES: Final = 16 * 1024 * 1024


def locate(ref: BlobRef, urls: Mapping[str, str]) -> BlobLocation:
    """A blob as messages describe it, with a pre-signed GET if there is one."""
    return BlobLocation(blob_key=ref.blob_key, size_bytes=ref.size_bytes, sha256=ref.sha256, url=urls.get(ref.blob_key))


def with_payload(leased: LeasedTask, payloads: Mapping[str, bytes]) -> LeasedTask:
    """A task with the payload that was not in the queue."""
    return msgspec.structs.replace(
        leased, task=msgspec.structs.replace(leased.task, payload=payloads[leased.task.task_id])
    )


def dispatches(tasks: Sequence[LeasedTask], *, spool_id: str, at: float) -> list[TaskEvent]:
    """Dispatch events, with the spool, of tasks that may not run twice. They are recorded before the tasks are sent."""
    return [
        TaskEvent(
            task_id=leased.task.task_id,
            state=TaskState.WAITING_FOR_NODES,
            reporter=Reporter.FORWARDER,
            at=dt.datetime.fromtimestamp(at, dt.UTC),
            attempt=leased.attempt,
            detail={"spool_id": spool_id},
        )
        for leased in tasks
        if not leased.task.options.idempotent
    ]


def orders(
    tasks: Sequence[LeasedTask],
    *,
    new_functions: Sequence[tuple[str, FunctionBody]],
    urls: Mapping[str, str],
    limit_bytes: int,
    data_only: bool = False,
) -> Iterator[tuple[RunTasks, tuple[bytes, ...]]]:
    """The messages, with their frames, that send these tasks.

    :param new_functions: hashes and functions to send. They travel with the first message, those of many ahead in
        messages without tasks.
    :param urls: pre-signed GETs by blob key.
    :param data_only: the endpoint runs certain functions only.
    :param limit_bytes: of user bytes in one message, except that a single task always fits.
    """
    functions: list[FunctionSpec] = []
    frames: list[bytes] = []
    size_bytes = 0
    for function_hash, function in new_functions:
        if functions and (size_bytes + len(function.body) > _MAX_BODIES_BYTES or len(functions) == _MAX_BODIES):
            yield RunTasks(tasks=(), functions=tuple(functions)), tuple(frames)
            functions, frames, size_bytes = [], [], 0
        functions.append(
            FunctionSpec(
                function_hash=function_hash, name=function.name, body=len(frames), signature=function.signature
            )
        )
        frames.append(function.body)
        size_bytes += len(function.body)
    specs: list[TaskSpec] = []
    for leased in tasks:
        resources, callees = leased.task.options.resource_specification, leased.task.options.callees
        payload_bytes = len(leased.task.payload or b"") + (len(repr(resources)) if resources else 0)
        if callees:
            payload_bytes += len(pack(callees))
        if specs and size_bytes + payload_bytes > limit_bytes:
            yield RunTasks(tasks=tuple(specs), functions=tuple(functions)), tuple(frames)
            specs, functions, frames, size_bytes = [], [], [], 0
        specs.append(_spec(leased, frame=len(frames), urls=urls, data_only=data_only))
        if leased.task.payload is not None:
            frames.append(leased.task.payload)
        size_bytes += payload_bytes
    if specs:
        yield RunTasks(tasks=tuple(specs), functions=tuple(functions)), tuple(frames)


def _spec(leased: LeasedTask, *, frame: int, urls: Mapping[str, str], data_only: bool) -> TaskSpec:
    task = leased.task
    ref = task.payload_ref
    return TaskSpec(
        task_id=task.task_id,
        attempt=leased.attempt,
        function_id=task.function_id,
        function_hash=task.function_hash,
        options=task.options,
        payload=None if task.payload is None else frame,
        payload_blob=locate(ref, urls) if ref else None,
        traceparent=task.traceparent or "",
        submitter=task.owner_id,
        data_only=data_only,
        payer="" if task.quota_key is None or PAYS_FOR in task.quota_key else task.quota_key,
    )
