"""Answers of the API as typed structs. An answer that does not fit was cut or replaced on its way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import msgspec

Json = dict[str, Any]


class Registered(msgspec.Struct, gc=False):
    """A function that was registered."""

    function_uuid: str


class FunctionFound(msgspec.Struct, gc=False):
    """A function, with the reference under which its calls are submitted."""

    reference: str


class ContainerId(msgspec.Struct, gc=False):
    """A container that was registered."""

    container_id: str


class ContainerFound(msgspec.Struct, gc=False):
    """A container."""

    container: Json


class BuildStatus(msgspec.Struct, gc=False):
    """How far the build of a container is."""

    status: str


class Ids(msgspec.Struct, gc=False):
    """Ids that begin with some digits."""

    ids: list[str]


class Submitted(msgspec.Struct, gc=False):
    """Tasks that were taken. ``results`` are those of memoized tasks, ``results_left_out`` the number of the others."""

    tasks: dict[str, list[str]]
    request_id: str = ""
    results: dict[str, Json] | None = None
    results_left_out: int | None = None
    warnings: list[Any] | None = None


class Statuses(msgspec.Struct, gc=False):
    """Tasks by id, without those that did not fit the answer, and those that the caller does not have."""

    results: dict[str, Json]
    unknown: list[str] | None = None


class Cancelled(msgspec.Struct, gc=False):
    """Tasks by id, after a cancellation."""

    results: dict[str, Json]


class Stream(msgspec.Struct, gc=False):
    """Text of a stream, and the bytes from and to which it reaches."""

    text: str
    begin: int = msgspec.field(name="from")
    next: int


class Output(msgspec.Struct, gc=False):
    """Output of a task. The streams of a sealed one are empty."""

    status: str
    attempt: int | None = None
    stdout: Stream | None = None
    stderr: Stream | None = None
    sealed: str | None = None


class Outputs(msgspec.Struct, gc=False):
    """Output of tasks by id."""

    results: dict[str, Output]


class Runtime(msgspec.Struct, gc=False):
    """The report of an endpoint about its Python."""

    python_version: str | None = None
    serializers: list[str] | None = None


class EndpointAnswer(msgspec.Struct, gc=False):
    """An endpoint, as far as the client needs it."""

    runtime: Runtime | None = None


class Forwarder(msgspec.Struct, gc=False):
    """The address of a forwarder, and its public key in Z85."""

    address: str
    server_key: str


class StreamGrant(msgspec.Struct, gc=False):
    """Forwarders to try in order, and the ticket to present."""

    forwarders: list[Forwarder]
    ticket: str
    heartbeat_s: float


class BlobGrant(msgspec.Struct, gc=False):
    """A pre-signed address for an upload, with the headers that it takes."""

    blob_key: str
    upload_url: str
    headers: dict[str, str]


@functools.cache
def as_struct(struct: type[msgspec.Struct]) -> Callable[[Json], object]:
    """A check that an answer has the fields of a struct; it may have others."""
    return functools.partial(msgspec.convert, type=struct)


@functools.cache
def with_list(field: str) -> type[msgspec.Struct]:
    """The struct of an answer that is a list of objects in a field."""
    return msgspec.defstruct(f"ListOf_{field}", [(field, list[Json])])
