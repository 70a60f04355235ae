"""Submits as bytes: what goes into one request, and how much of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall._blobs import BlobRef
from farcall_common.errors import ProtocolError
from farcall_common.limits import MAX_REQUEST_BYTES, TASKS_PER_SUBMIT
from farcall_common.payload import is_text

__all__ = ["Prepared", "TaskOptions", "check_answer", "chunks", "encode_payload", "encode_submit"]

#: About so many bytes of payload go into one request: ids, options and what JSON adds need room too.
MAX_BYTES: Final = MAX_REQUEST_BYTES * 7 // 8
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
    :param resource_specification: what a task asks of the endpoint (``memory_bytes``, ``num_nodes`` and the like).
    :param user_endpoint_config: values for the endpoint's own template; most endpoints take none.
    :param result_serializers: strategies that the worker tries in turn on a result; none = its own choice.
    :param container: id or name of a container of yours to run in; the API refuses an endpoint that cannot.
    :param memoize: whether the API may answer with the result of an equal call, and remembers this one's; None = as
        the function was registered.
    :param keep_output: whether the end of what a task prints is kept when it succeeds, too.
    """

    idempotent: bool = True
    max_attempts: int = 3
    walltime_s: float | None = None
    resource_specification: Mapping[str, Any] | None = None
    user_endpoint_config: Mapping[str, Any] | None = None
    result_serializers: tuple[str, ...] = ()
    memoize: bool | None = None
    container: str | None = None
    keep_output: bool = False

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError("max_attempts must be at least 1")
        if self.walltime_s is not None and not 0 < self.walltime_s < float("inf"):
            raise ValueError("walltime_s must be a positive number of seconds")
        for name in ("resource_specification", "user_endpoint_config"):
            # A copy: what the caller changes afterwards is for calls to come, when it is set again.
            object.__setattr__(self, name, _json_object(getattr(self, name), name))

    def to_json(self) -> dict[str, Any]:
        """The part of a submit that they are; what is not set is left out."""
        asked = dict(self.resource_specification or {}) | ({"keep_output": True} if self.keep_output else {})
        optional = {
            "walltime_s": self.walltime_s,
            "resource_specification": asked,
            "user_endpoint_config": self.user_endpoint_config,
            "result_serializers": self.result_serializers,
            "container": self.container,
        }
        body: dict[str, Any] = {"idempotent": self.idempotent, "max_attempts": self.max_attempts}
        if self.memoize is not None:
            body["memoize"] = self.memoize
        return body | {name: value for name, value in optional.items() if value}


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


def _json_object(value: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    """A copy of a JSON object.

    :raises TypeError: if it is none.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, and this is a {type(value).__name__}")
    try:
        copied: dict[str, Any] = msgspec.json.decode(_encoder.encode(dict(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be JSON: {error}") from error
    return copied
