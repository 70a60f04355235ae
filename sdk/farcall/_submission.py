"""Submits as bytes: what goes into one request, and how much of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from farcall._blobs import BlobRef
from farcall_common.errors import ProtocolError

__all__ = ["Prepared", "TaskOptions", "check_answer", "chunks", "encode_payload", "encode_submit"]

#: A request holds at most this many tasks, and about this many bytes of payload (the API takes 4 MiB).
MAX_TASKS: Final = 1000
MAX_BYTES: Final = 7 * 512 * 1024
#: Beside its payload a task takes its id in quotes and a comma or two.
_OVERHEAD_BYTES: Final = 64

_encoder: Final = msgspec.json.Encoder()


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """What holds for every task of a submit.

    :param idempotent: whether the task may be started again when its endpoint vanished. A task that may not ends
        as lost then.
    :param max_attempts: how often the task is started at most.
    :param walltime_s: after how many seconds an attempt is stopped; None = never.
    """

    idempotent: bool = True
    max_attempts: int = 3
    walltime_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError("max_attempts must be at least 1")
        if self.walltime_s is not None and not 0 < self.walltime_s < float("inf"):
            raise ValueError("walltime_s must be a positive number of seconds")


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A task that is ready to be sent: ``payload`` is JSON already (see :func:`encode_payload`)."""

    task_id: str
    function_id: str
    payload: bytes


def encode_payload(payload: bytes | BlobRef) -> bytes:
    """A payload, or the reference to an uploaded one, as JSON."""
    return _encoder.encode(payload.to_json() if isinstance(payload, BlobRef) else payload.decode())


def size_bytes(payload: bytes) -> int:
    """What a task adds to a request."""
    return len(payload) + _OVERHEAD_BYTES


def chunks(tasks: Iterable[Prepared]) -> Iterator[list[Prepared]]:
    """Cut tasks into pieces that fit a request each."""
    chunk: list[Prepared] = []
    room = MAX_BYTES
    for task in tasks:
        size = size_bytes(task.payload)
        if chunk and (size > room or len(chunk) == MAX_TASKS):
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
    for task in tasks:
        function_id = task.function_id
        if function_id not in ids:
            ids[function_id], payloads[function_id] = [], []
        ids[function_id].append(task.task_id)
        payloads[function_id].append(msgspec.Raw(task.payload))
    body: dict[str, Any] = {
        "task_group_id": task_group_id,
        "idempotent": options.idempotent,
        "max_attempts": options.max_attempts,
        "tasks": payloads,
        "task_ids": ids,
    }
    if options.walltime_s is not None:
        body["walltime_s"] = options.walltime_s
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
