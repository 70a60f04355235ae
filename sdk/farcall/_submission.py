"""Submits as bytes: what goes into one request, and how much of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from farcall._blobs import BlobRef
from farcall_common.errors import ProtocolError
from farcall_common.limits import MAX_REQUEST_BYTES, TASKS_PER_SUBMIT
from farcall_common.payload import is_text
from farcall_common.task_options import TaskOptions

#: About so many bytes of payload go into one request: ids, options and what JSON adds need room too.
MAX_BYTES: Final = MAX_REQUEST_BYTES * 7 // 8
#: Beside its payload a task takes its id in quotes and a comma or two.
_OVERHEAD_BYTES: Final = 64

_encoder: Final = msgspec.json.Encoder()


class Prepared(msgspec.Struct, frozen=True, gc=False):
    """A task that is ready to be sent: ``payload`` is JSON already (see :func:`encode_payload`), ``traceparent`` the
    span above it, if there is one."""

    task_id: str
    function_id: str
    payload: bytes
    traceparent: str | None = None


def encode_payload(payload: bytes | BlobRef) -> bytes:
    """A payload, or the reference to an uploaded one, as JSON."""
    if isinstance(payload, BlobRef):
        return _encoder.encode(payload.to_json())
    return _encoder.encode(payload.decode() if is_text(payload) else {"base64": payload})  # msgspec writes it as that


def size_bytes(payload: bytes) -> int:
    """What a task adds to a request."""
    return len(payload) + _OVERHEAD_BYTES


def chunks(tasks: Iterable[Prepared]) -> Iterator[list[Prepared]]:
    """Cut tasks into pieces that fit a request each."""
    chunk: list[Prepared] = []
    room = MAX_BYTES
    for task in tasks:
        size = size_bytes(task.payload)
        if chunk and (size > room or len(chunk) == TASKS_PER_SUBMIT):
            yield chunk
            chunk, room = [], MAX_BYTES
        chunk.append(task)
        room -= size
    if chunk:
        yield chunk


def encode_submit(
    tasks: Sequence[Prepared], *, task_group_id: str, options: TaskOptions
) -> tuple[bytes, dict[str, list[str]]]:
    """The body of a submit, and the task ids by function as the answer will repeat them."""
    payloads: dict[str, list[msgspec.Raw]] = {}
    ids: dict[str, list[str]] = {}
    spans: dict[str, list[str | None]] = {}
    for task in tasks:
        function_id = task.function_id
        if function_id not in ids:
            ids[function_id], payloads[function_id], spans[function_id] = [], [], []
        ids[function_id].append(task.task_id)
        payloads[function_id].append(msgspec.Raw(task.payload))
        spans[function_id].append(task.traceparent)
    body = {"task_group_id": task_group_id, **options.to_json(), "tasks": payloads, "task_ids": ids}
    if any(task.traceparent for task in tasks):
        body["traceparents"] = spans
    return _encoder.encode(body), ids


def check_answer(answer: Any, ids: dict[str, list[str]]) -> None:
    """Make sure that the API took the tasks by the ids that we gave them.

    :raises ProtocolError: if it did not: then it is another service, and results would never be found.
    """
    if not isinstance(answer, dict) or answer.get("tasks") != ids:
        raise ProtocolError(
            "the API answered a submit with other task ids than were sent",
            hint="Is api_url the address of Farcall's API?",
        )
