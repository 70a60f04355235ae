"""Messages between forwarder, agents and clients: one frozen struct each. PROTOCOL.md is their normative text.

Orders are imperative (``RunTasks``), reports are facts (``TasksAccepted``). A message is the header of an
:class:`Envelope`; user bytes travel behind it, each in a frame of its own, and the header refers to them by index
(a ``Frame``). Instants are epoch seconds of the sender's clock. New fields must have a default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from farcall_common.limits import MAX_URL_CHARACTERS
from farcall_common.task_options import TaskOptions
from farcall_common.wire.states import TaskState

#: Index of a user frame within the envelope: 0 is the first frame behind the header.
Frame = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Weight = Annotated[int, msgspec.Meta(ge=1, le=1000)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
#: Within the range of the database's integers, and of JSON readers.
Generation = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Position = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
#: Of what forwarders keep until a request for a file is answered.
Id = Annotated[str, msgspec.Meta(max_length=64)]
FilePath = Annotated[str, msgspec.Meta(max_length=MAX_URL_CHARACTERS)]
MAX_VERSION_CHARACTERS: Final = 100
FileVersion = Annotated[str, msgspec.Meta(max_length=MAX_VERSION_CHARACTERS)]


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Base class of structures within messages. They hold data only, so that the garbage collector may skip them."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """Base class of all messages; the kind on the wire is the class name."""


# -- pieces ------------------------------------------------------------------------------------------------------------


class TaskRef(Part, frozen=True):
    """One attempt of one task."""

    task_id: str
    attempt: Count


class HeldTask(Part, frozen=True):
    """A task that the agent's spool holds. ``finished``: its result is spooled and will be sent."""

    task_id: str
    attempt: Count
    finished: bool = False


class Capabilities(Part, frozen=True):
    """Versions and serializers of an endpoint, compared with a submit before tasks are queued.
    ``signed_functions``: it runs only functions with a signature that it accepts. ``containers``: technologies of
    environments that it runs; none: a task with an environment is not sent."""

    python_version: str = ""
    software_version: str = ""
    platform: str = ""
    hostname: str = ""
    serializers: tuple[str, ...] = ()
    packages: dict[str, str] = {}
    signed_functions: bool = False
    containers: tuple[str, ...] = ()


class EndpointReport(Part, frozen=True):
    """Numbers that an agent reports with its heartbeat. ``blocks`` are those that it has requested and that have not
    ended, ``pending_blocks`` those of them without a manager yet. ``detail`` may have a ``problem``, a text,
    ``environments`` and ``graphs``, lists of maps (see PROTOCOL.md)."""

    managers: Count = 0
    total_workers: Count = 0
    idle_workers: Count = 0
    pending_tasks: Count = 0
    outstanding_tasks: Count = 0
    detail: dict[str, Any] = {}
    blocks: Count = 0
    pending_blocks: Count = 0


class BlobLocation(Part, frozen=True):
    """User bytes in the blob store: key, length, SHA-256 in hex, and (if there is one) a pre-signed GET."""

    blob_key: str
    size_bytes: Count
    sha256: str
    url: str | None = None


class FunctionSpec(Part, frozen=True):
    """A function body, sent once per session and known by its hash (SHA-256 of the body, in hex) from then on.
    ``signature``: an SSH signature of name and hash; empty if there is none."""

    function_hash: str
    name: str
    body: Frame
    signature: str = ""


class TaskSpec(Part, frozen=True):
    """One attempt to run. Exactly one of ``payload`` and ``payload_blob`` is set.
    ``traceparent`` is W3C's, of the function's parent span; empty if there is none. ``submitter`` is the
    identity that submitted the task; empty: the owner of the endpoint. ``payer``, if that is another one, is the
    identity as which the endpoint counts it where submitters take turns: the creator of a service account.
    ``data_only``: the endpoint runs certain functions only, so the arguments must be data, which runs no code when it
    is read."""

    task_id: str
    attempt: Count
    function_id: str
    function_hash: str
    options: TaskOptions
    payload: Frame | None = None
    payload_blob: BlobLocation | None = None
    traceparent: str = ""
    submitter: str = ""
    data_only: bool = False
    payer: str = ""


class TaskTransition(Part, frozen=True):
    """A task has reached a state."""

    task_id: str
    attempt: Count
    state: TaskState
    at: Seconds
    detail: dict[str, Any] = {}


class ResultSpec(Part, frozen=True):
    """The result of one attempt. SUCCESS has ``result`` or ``result_blob``; any other state has ``error``.

    ``error`` is an ErrorRecord in its JSON form. ``started_at`` and ``ended_at`` are the worker's clock, around user
    code alone. ``exhausted``: it failed because the last permitted attempt, too, killed its worker or manager.
    """

    task_id: str
    attempt: Count
    state: TaskState
    result: Frame | None = None
    result_blob: BlobLocation | None = None
    error: dict[str, Any] | None = None
    started_at: Seconds | None = None
    ended_at: Seconds | None = None
    details: dict[str, Any] = {}
    exhausted: bool = False


class OutputWanted(Part, frozen=True):
    """A task whose output is requested, and where to begin in each stream: behind the bytes that the reader has, or if
    negative so many bytes before the present end."""

    task_id: str
    stdout_from: Position = 0
    stderr_from: Position = 0


class OutputText(Part, frozen=True):
    """A part of one stream of an attempt: its bytes from ``start`` to before ``next``, as text. ``start`` is more than
    what was requested if the bytes before it are not there any more."""

    start: Offset = 0
    next: Offset = 0
    text: str = ""


class OutputPiece(Part, frozen=True):
    """Output of one attempt of a task. ``complete``: the task has ended, and nothing follows. ``reason``: why there is
    no output, NOT_STARTED or NOT_KEPT. ``sealed``: of a sealed call, the texts, which are left out then."""

    task_id: str
    attempt: Count = 0
    stdout: OutputText = OutputText()
    stderr: OutputText = OutputText()
    complete: bool = False
    reason: str = ""
    sealed: str = ""


class StreamResult(Part, frozen=True):
    """The recorded result of a task, as pushed to a client. ``timings`` are epoch seconds by step."""

    task_id: str
    task_group_id: str
    state: TaskState
    attempt: Count = 0
    result: Frame | None = None
    result_blob: BlobLocation | None = None
    error: dict[str, Any] | None = None
    finished_at: Seconds | None = None
    timings: dict[str, float] = {}
    details: dict[str, Any] = {}


# -- agent to forwarder ------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of an agent: its identity, its tasks and its abilities. ``PROTOCOL.md`` explains each field."""

    endpoint_id: str
    ticket: str
    instance_id: str
    spool_id: str
    protocol_versions: tuple[int, ...]
    heartbeat_s: Seconds
    spool_generation: Generation = 0
    held: tuple[HeldTask, ...] = ()
    capabilities: Capabilities = Capabilities()
    reserve: Count = 0
    weights: Annotated[dict[str, Weight], msgspec.Meta(max_length=1000)] = {}


class Credit(Message, frozen=True):
    """The agent can take this many additional tasks."""

    tasks: Annotated[int, msgspec.Meta(ge=1)]


class TasksAccepted(Message, frozen=True):
    """These tasks are in the agent's spool: the agent is responsible for them from now on."""

    tasks: tuple[TaskRef, ...]


class TaskTransitions(Message, frozen=True):
    """Tasks have changed state within the endpoint."""

    transitions: tuple[TaskTransition, ...]


class TaskResults(Message, frozen=True):
    """Tasks have ended. Repeated after a reconnect until ResultsRecorded names them."""

    results: tuple[ResultSpec, ...]


class BlobRequest(Message, frozen=True):
    """Requests an upload for a result that is too big to travel inline."""

    task_id: str
    attempt: Count
    size_bytes: Count
    sha256: str


class BlobPull(Message, frozen=True):
    """Requests a piece of a task's payload from an agent that cannot reach the blob store. All bytes before
    ``offset_bytes`` have arrived; at the end of the blob the message ends the transfer, and has no answer."""

    task_id: str
    attempt: Count
    offset_bytes: Count


class BlobPush(Message, frozen=True):
    """A piece of a result from an agent that cannot reach the blob store. The first reserves memory."""

    task_id: str
    attempt: Count
    size_bytes: Count
    sha256: str
    offset_bytes: Count = 0
    piece: Frame | None = None


class TaskOutput(Message, frozen=True):
    """Answers an OutputRequest, or a part of it: each task once, in any order and in any number of messages."""

    request_id: str
    pieces: tuple[OutputPiece, ...]


class FilePull(Message, frozen=True):
    """Requests a piece of a file of another endpoint, which a task of this agent names as a source; answered by
    FilePiece. ``max_bytes`` 0: only what there is. ``path`` is absolute."""

    request_id: Id
    task_id: Id
    endpoint_id: Id
    path: FilePath
    offset_bytes: Offset = 0
    max_bytes: Count = 0


class FilesTaken(Message, frozen=True):
    """The pieces of these requests are not needed any more, or will not be: the forwarder deletes them."""

    request_ids: Annotated[tuple[Id, ...], msgspec.Meta(max_length=1000)]


class FileRead(Message, frozen=True):
    """Answers FileWanted: the file has ``size_bytes`` and a ``version``, and a piece of ``piece_bytes`` from the offset
    is in the blob store (see BlobRequest and BlobPush, with the id of the request in place of a task's). Or the
    ``reason`` why not: NOT_FOUND, NOT_PERMITTED, NOT_A_FILE, NOT_READ or SWITCHED_OFF."""

    request_id: Id
    size_bytes: Offset = 0
    version: FileVersion = ""
    piece_bytes: Count = 0
    sha256: str = ""
    reason: str = ""


# -- forwarder to agent ------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The session is open. ``forget`` names held tasks that have ended or belong to another endpoint. A piece of a
    relayed blob has at most ``relay_piece_bytes``; 0: this forwarder relays none. A piece of a file of another endpoint
    has at most ``file_piece_bytes``; 0: this forwarder knows no FilePull."""

    session_id: str
    forwarder_id: str
    protocol_version: int
    heartbeat_s: Seconds
    forget: tuple[TaskRef, ...] = ()
    relay_piece_bytes: Count = 0
    file_piece_bytes: Count = 0


class RunTasks(Message, frozen=True):
    """Run these tasks, at most as many as the credit. Bodies of functions that are new to this session are included;
    those of many are sent ahead, in messages without tasks."""

    tasks: tuple[TaskSpec, ...]
    functions: tuple[FunctionSpec, ...] = ()


class CancelTasks(Message, frozen=True):
    """Stop these tasks, running or not. Each still ends with a result: CANCELLED, or another one that was earlier."""

    task_ids: tuple[str, ...]


class ResultsRecorded(Message, frozen=True):
    """The database has these results: the agent may forget the tasks."""

    tasks: tuple[TaskRef, ...]


class BlobGrant(Message, frozen=True):
    """A pre-signed PUT for a result; ``error`` instead when the blob may not be stored."""

    task_id: str
    attempt: Count
    blob_key: str = ""
    upload_url: str = ""
    headers: dict[str, str] = {}
    error: dict[str, Any] | None = None


class BlobPiece(Message, frozen=True):
    """A piece of a payload, or the ``error``."""

    task_id: str
    attempt: Count
    offset_bytes: Count
    piece: Frame | None = None
    error: dict[str, Any] | None = None


class BlobTaken(Message, frozen=True):
    """The forwarder has a result up to ``offset_bytes`` and waits for the rest; with ``blob_key``, the blob store has
    all of it. Or the ``error``."""

    task_id: str
    attempt: Count
    offset_bytes: Count
    blob_key: str = ""
    error: dict[str, Any] | None = None


class OutputRequest(Message, frozen=True):
    """Requests output of tasks, running or not: at most ``max_bytes`` of each stream of each task."""

    request_id: str
    tasks: tuple[OutputWanted, ...]
    max_bytes: Annotated[int, msgspec.Meta(ge=1)]


class FileWanted(Message, frozen=True):
    """Requests a piece of a file of this endpoint, for a task of ``submitter`` elsewhere; answered by FileRead.
    ``payer``, if that is another one, is the identity as which it counts."""

    request_id: Id
    submitter: str
    path: FilePath
    offset_bytes: Offset = 0
    max_bytes: Count = 0
    payer: str = ""


class FilePiece(Message, frozen=True):
    """Answers FilePull: the file has ``size_bytes`` and a ``version``, and ``url`` is a pre-signed GET for a piece of
    ``piece_bytes`` (see also BlobPull, with the id of the request in place of a task's). Or the ``reason`` why not."""

    request_id: Id
    size_bytes: Offset = 0
    version: FileVersion = ""
    piece_bytes: Count = 0
    sha256: str = ""
    url: str = ""
    reason: str = ""


class Redirect(Message, frozen=True):
    """Finish messages under way, then connect again after ``retry_after_s``, to any forwarder."""

    reason: str
    retry_after_s: Seconds = 0.0


# -- both directions, refusal ------------------------------------------------------------------------------------------


class Heartbeat(Message, frozen=True):
    """Sent when nothing else was sent for a heartbeat period. An agent adds its numbers; it sends one at once when its
    ``spool_generation`` has risen, and when its numbers have changed."""

    at: Seconds
    report: EndpointReport | None = None
    spool_generation: Generation | None = None


class Goodbye(Message, frozen=True):
    """An orderly end of the session by an agent or a client."""

    reason: str = ""


class Refused(Message, frozen=True):
    """The forwarder does not serve this peer; ``error`` is an ErrorRecord in its JSON form."""

    error: dict[str, Any]


# -- client stream -----------------------------------------------------------------------------------------------------


class OpenStream(Message, frozen=True):
    """First message of a client that subscribes to results in these task groups. ``cursor`` resumes a stream."""

    ticket: str
    protocol_versions: tuple[int, ...]
    heartbeat_s: Seconds
    task_group_ids: tuple[str, ...] = ()
    cursor: str | None = None


class Subscribe(Message, frozen=True):
    """Adds task groups to an open stream."""

    task_group_ids: tuple[str, ...]


class StreamOpened(Message, frozen=True):
    """The stream is open. Unless ``resumed``, results may have been missed since the cursor: the API has them."""

    session_id: str
    protocol_version: int
    heartbeat_s: Seconds
    cursor: str
    resumed: bool = False


class ResultsReady(Message, frozen=True):
    """Recorded results. A hint: the API has the record. ``cursor`` is the position after the last of them."""

    cursor: str
    results: tuple[StreamResult, ...]


@dataclasses.dataclass(frozen=True)
class Envelope:
    """A message and the user bytes that travel with it."""

    message: Message
    frames: tuple[bytes, ...] = ()


def frame_indexes(message: Message) -> Sequence[int]:
    """Every frame index that a message refers to."""
    match message:
        case RunTasks(tasks=tasks, functions=functions):
            payloads = [task.payload for task in tasks if task.payload is not None]
            return payloads + [function.body for function in functions]
        case TaskResults(results=results):
            return [result.result for result in results if result.result is not None]
        case BlobPush(piece=int(piece)) | BlobPiece(piece=int(piece)):
            return (piece,)
        case ResultsReady(results=ready):
            return [result.result for result in ready if result.result is not None]
        case _:
            return ()
