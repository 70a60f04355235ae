"""Submit requests: batches of calls, their JSON, and the sizes that one request may have."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

import msgspec

from farcall._api import INLINE_BYTES, BlobRef, Blobs
from farcall._arguments import as_id
from farcall._functions import (
    DEFAULT_SERIALIZER,
    FunctionHandle,
    PackedCall,
    Requirements,
    checked_call,
    pack_call,
    sorted_kwargs,
)
from farcall._future import Origin
from farcall._sealing import SealMode
from farcall._task_output import OnOutput
from farcall._tracing import traceparent
from farcall_common.errors import InvalidRequest
from farcall_common.limits import (
    MAX_CALLEES_PER_SUBMIT,
    MAX_REQUEST_BYTES,
    MAX_SOURCE_FILES,
    MAX_SOURCES,
    TASKS_PER_SUBMIT,
)
from farcall_common.payload import Serializer, is_text
from farcall_common.task_options import TaskOptions
from farcall_common.wire import new_id, new_task_id

#: Limit of the payloads of one request; the rest is for ids, options and JSON syntax.
MAX_BYTES: Final = MAX_REQUEST_BYTES * 7 // 8
#: Size of a task's id in a request, with quotes and commas.
_OVERHEAD_BYTES: Final = 64

_encoder: Final = msgspec.json.Encoder()


@dataclasses.dataclass(frozen=True)
class SubmitContext:
    """Endpoint, group and options of calls. One request may contain all calls with equal contexts."""

    endpoint_id: str | None
    task_group_id: str
    options: TaskOptions
    #: Whether futures raise the function's own exception (see :attr:`Executor.raise_original`).
    raise_original: bool = False
    #: Whether calls are sealed; None: as the client says.
    sealed: SealMode | None = None
    #: Called with what the tasks print; the requests do not depend on it.
    on_output: OnOutput | None = dataclasses.field(default=None, compare=False)
    #: Functions that the tasks call on their endpoint (see :attr:`Executor.callees`).
    callees: Sequence[FunctionHandle] = ()
    #: The same as they were given.
    callees_given: Sequence[object] = dataclasses.field(default=(), compare=False)

    #: Where the results of these calls come from: one object for all of them.
    origin: Origin | None = dataclasses.field(default=None, init=False, compare=False)

    def __post_init__(self) -> None:
        if self.endpoint_id is not None:
            origin = Origin((self.endpoint_id,), self.options.result_serializers, sealed=False)
            object.__setattr__(self, "origin", origin)


class TaskToSubmit(Protocol):
    """A task of a submit: ``payload`` is JSON (see :func:`encode_payload`), ``traceparent`` the span of the call."""

    @property
    def task_id(self) -> str: ...
    @property
    def function_id(self) -> str: ...
    @property
    def payload(self) -> bytes: ...
    @property
    def traceparent(self) -> str | None: ...


class PreparedTask(msgspec.Struct, frozen=True, gc=False):
    """A task of a batch, ready to be sent (see :class:`TaskToSubmit`)."""

    task_id: str
    function_id: str
    payload: bytes
    traceparent: str | None = None


def encode_payload(payload: bytes | BlobRef) -> bytes:
    """A payload, or the reference to an uploaded one, as JSON."""
    if isinstance(payload, BlobRef):
        return _encoder.encode(payload.to_json())
    return _encoder.encode(payload.decode() if is_text(payload) else {"base64": payload})  # msgspec encodes the bytes


def request_bytes(payload: bytes) -> int:
    """Size of a task in a request. AWS Lambda gets the request as text inside JSON, where quotes and backslashes take
    two bytes, and has room for half as many bytes again as a request may have."""
    nested = len(payload) + payload.count(b'"') + payload.count(b"\\")
    return max(len(payload), 2 * nested // 3) + _OVERHEAD_BYTES


def most_tasks(callees: int) -> int:
    """How many tasks fit one request that calls so many functions."""
    return min(TASKS_PER_SUBMIT, MAX_CALLEES_PER_SUBMIT // max(1, callees))


def chunks(tasks: Iterable[PreparedTask], *, callees: int = 0) -> Iterator[list[PreparedTask]]:
    """Split tasks into lists that fit one request each. ``callees``: how many functions each may call."""
    most = most_tasks(callees)
    chunk: list[PreparedTask] = []
    room = MAX_BYTES
    for task in tasks:
        size = request_bytes(task.payload)
        if chunk and (size > room or len(chunk) == most):
            yield chunk
            chunk, room = [], MAX_BYTES
        chunk.append(task)
        room -= size
    if chunk:
        yield chunk


def encode_submit(
    tasks: Sequence[TaskToSubmit], *, task_group_id: str, options: TaskOptions
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


class Batch:
    """Calls of registered functions, to be submitted by :meth:`Client.batch_run`."""

    def __init__(
        self,
        *,
        task_group_id: str | None = None,
        options: Any,
        serializer: Serializer = DEFAULT_SERIALIZER,
        reference_of: Callable[[str | uuid.UUID], str] = as_id,
        endpoint_id: Callable[[str], str] | None = None,
        make_task_id: Callable[[], str] = new_task_id,
    ) -> None:
        self._endpoint_id = endpoint_id
        self._make_task_id = make_task_id
        self._reference_of = reference_of
        self._task_group_id = task_group_id or new_id()
        self._options: TaskOptions = options  # Any above: other checkers than mypy do not know msgspec's metaclass
        self._serializer = serializer
        self._calls: list[tuple[str, str, PackedCall]] = []
        self._spans: dict[str, str] = {}
        self._sealed: dict[tuple[str, str], bytes] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} calls, task group {self.task_group_id}>"

    @property
    def task_group_id(self) -> str:
        """The group of the tasks.

        :raises ValueError: when set to something that is not a UUID.
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
    def requirements(self) -> list[tuple[str, Requirements]]:
        """The requirements of arguments that not every endpoint reads, with the ids of their functions."""
        return [(function_id, call.requirements) for _, function_id, call in self._calls if call.requirements]

    def add(
        self, function_id: str | uuid.UUID, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> str:
        """Add a call and return the id that its task will have.

        :param function_id: an id, ``<id>@<version>``, or an alias of yours, which is looked up now.

        :raises TypeError: if ``args`` is not a tuple or a list, or ``kwargs`` not a dictionary with str keys.
        :raises SerializationError: if an argument cannot be sent; the message names it.
        :raises PayloadTooLarge: if the arguments take more than 10 MiB.
        :raises EndpointUnknown, ConfigurationError: for a file of an endpoint that is not known by this name.
        """
        values, named = checked_call(args, kwargs)
        task_id, function_id = self._make_task_id(), self._reference_of(function_id)
        if self._options.memoize:
            named = sorted_kwargs(named)
        packed = pack_call(
            values, named, function_name=function_id, serializer=self._serializer, endpoint_id=self._endpoint_id
        )
        self._calls.append((task_id, function_id, packed))
        if span := traceparent():
            self._spans[task_id] = span
        return task_id

    def prepare(self) -> dict[str, Any]:
        """The batch as the body of one submit, with every payload inline, for programs that send it themselves. Its
        calls are not sealed."""
        tasks: dict[str, list[str]] = {}
        ids: dict[str, list[str]] = {}
        for task_id, function_id, call in self._calls:
            tasks.setdefault(function_id, []).append(call.payload.decode())
            ids.setdefault(function_id, []).append(task_id)
        return {"task_group_id": self.task_group_id, **options_of(self).to_json(), "tasks": tasks, "task_ids": ids}

    def prepared(
        self, blobs: Blobs, seal: Callable[[bytes, str, str], bytes], *, endpoint_id: str, parallel: int
    ) -> Iterator[PreparedTask]:
        """The calls ready to be sent to an endpoint, large payloads uploaded (``parallel`` at a time). If the batch is
        run again, they are the same bytes: sealed again, the API would take them for other tasks with the same ids.

        :param seal: returns the payload of a function id and a task id as it is sent.
        """
        payloads: dict[str, bytes] = {}
        for task_id, function_id, call in self._calls:
            if (endpoint_id, task_id) not in self._sealed:
                self._sealed[endpoint_id, task_id] = seal(call.payload, function_id, task_id)
            payloads[task_id] = self._sealed[endpoint_id, task_id]
        large = {task_id: payload for task_id, payload in payloads.items() if len(payload) > INLINE_BYTES}
        with ThreadPoolExecutor(parallel, thread_name_prefix="farcall-upload") as pool:
            refs = dict(zip(large, pool.map(blobs.upload, large.values()), strict=True))
        for task_id, function_id, _ in self._calls:
            encoded = encode_payload(refs.get(task_id, payloads[task_id]))
            yield PreparedTask(task_id, function_id, encoded, self._spans.get(task_id))


def options_of(batch: Batch) -> TaskOptions:
    """The options of the tasks of a batch.

    :raises InvalidRequest: if they read too many files of other endpoints together.
    """
    found = dict.fromkeys(source for _, requirements in batch.requirements for source in requirements.sources)
    files = dict.fromkeys(file for _, requirements in batch.requirements for file in requirements.source_files)
    options: TaskOptions = batch._options
    if len(found) > MAX_SOURCES or len(files) > MAX_SOURCE_FILES:
        raise InvalidRequest(
            f"The batch has {len(files):,} files of {len(found)} other endpoints; {MAX_SOURCE_FILES:,} of "
            f"{MAX_SOURCES} endpoints are possible.",
            hint="Make several batches.",
        )
    return msgspec.structs.replace(options, sources=tuple(found), source_files=tuple(files)) if found else options
