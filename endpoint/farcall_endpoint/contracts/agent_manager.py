"""The messages between an agent and its managers. Internal: both ends are always of the same package version.

A message is a MessagePack header and a list of bodies, which are user bytes, never decoded here; a ``Body`` in
a header is the index of one. On the socket small bodies travel joined in one frame, behind a frame with their lengths,
because a frame costs more than the bytes in it; with a large one among them, each travels in its own, uncopied.
Messages between two machines are numbered, from 1 in either direction: a connection that broke and was
restored may have lost some, and a side that sees a gap regards the other as lost. 0 is no number.
Instants are epoch seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from farcall_common import environments as environments_of_tasks
from farcall_common import graphs as graphs_of_tasks
from farcall_common import task_options
from farcall_common.environments import Environment
from farcall_common.graphs import StageState
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.contracts import output as output_of_tasks
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.host.shared_memory import Frame, copy_of

Body = int
N = TypeVar("N", int, float)

FIRST_WINDOW_BYTES: Final = 4 * 2**20
"""``window_bytes`` of :class:`ResultsTaken`, until the agent sends another number."""
_MAX_JOINED_BYTES: Final = 16 * 1024


class _Part(msgspec.Struct, frozen=True, array_like=True, gc=False):  # thousands, and never part of a cycle
    pass


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# -- agent to manager --------------------------------------------------------------------------------------------------


class Limits(_Part, frozen=True):
    """Limits of an endpoint for each attempt; None is no limit. ``output_bytes`` of each stream, and ``kept_bytes`` of
    it for a while after the end. ``in_image``: the node itself is the container, so that no other is started."""

    walltime_s: float | None = None
    memory_bytes: int | None = None
    output_bytes: int | None = None
    kept_bytes: int | None = None
    in_image: bool = False

    def applied_to(self, options: TaskOptions) -> TaskOptions:
        """The options of a task, or of a stage, within these limits."""
        return msgspec.structs.replace(
            options,
            walltime_s=_least(options.walltime_s, self.walltime_s),
            memory_bytes=_least(options.memory_bytes, self.memory_bytes),
            max_output_bytes=_least(options.max_output_bytes, self.output_bytes),
            output_bytes=options.output_bytes
            if self.kept_bytes is None
            else min(options.output_bytes, self.kept_bytes),
            environment=None if self.in_image else options.environment,
            container=None if self.in_image else options.container,
            callees=tuple(msgspec.structs.replace(each, environment=None) for each in options.callees)
            if self.in_image and options.callees
            else options.callees,
        )


class OrderTarget(_Part, frozen=True):
    """The latency that a task is to hold, in seconds from its arrival at the endpoint, and the percentile of the tasks
    of its latency class that are to do so. ``name``: of that class. ``waited_s``: since the arrival. ``expected_s``:
    how long one takes on an idle system, if that is known. ``weight``, ``delta``: of its function, if the owner has set
    them for the policies ``static`` and ``threshold``. ``max_slowdown``: the latency as a multiple of ``expected_s``,
    if it was given so. ``max_weight``: most weight of all classes of the task's payer together; None for the owner."""

    name: str
    latency_s: float
    percentile: float
    waited_s: float = 0.0
    expected_s: float | None = None
    weight: float | None = None
    max_slowdown: float | None = None
    delta: int | None = None
    max_weight: float | None = None


class TaskOrder(_Part, frozen=True):
    """One attempt to run. ``options`` are the task's, within the endpoint's limits. ``submitter``: who submitted it,
    empty for the owner of the endpoint. Each submitter has workers and a working directory. ``data_only``: its
    arguments must be data. ``retry``: how many runs before this one raised and were retried. ``restricted``: it calls
    no functions but its callees. ``files_dir``: the directory of its files; empty if it has none. ``target``: None for
    batch work. ``payer``: the creator of a service account, whose turns and budgets these are; empty: the submitter."""

    task_id: str
    attempt: int
    function_hash: str
    payload: Body
    options: TaskOptions = TaskOptions()
    traceparent: str = ""
    submitter: str = ""
    data_only: bool = False
    retry: int = 0
    restricted: bool = False
    files_dir: str = ""
    target: OrderTarget | None = None
    payer: str = ""

    @property
    def share_of(self) -> str:
        """The identity as which it counts where submitters take turns or have budgets; empty for the owner."""
        return self.payer or self.submitter


class FileContent(_Part, frozen=True):
    """The content of a file, of which nodes keep copies, for each submitter apart (empty: the endpoint's owner)."""

    submitter: str
    sha256: str
    size_bytes: int


class BlocksWanted(_Part, frozen=True):
    """Parts of blocks of a submitter (empty: the endpoint's owner) in the memory of a node: name, start and end of
    each. Or those ``below`` a prefix, to be deleted."""

    submitter: str
    parts: tuple[tuple[str, int, int], ...] = ()
    below: str = ""

    @property
    def size_bytes(self) -> int:
        """Total size of all parts."""
        return sum(end - start for _, start, end in self.parts)


class NodeFile(_Part, frozen=True):
    """A file that a task reads from its node's copy: its ``place`` in the directory of the task's files, behind ``r/``
    (see :func:`farcall_common.file_arguments.place_of`)."""

    place: str
    sha256: str
    size_bytes: int


class RunTasks(_Message, frozen=True):
    """Run these, in order. ``functions`` are the bodies (hash, body) that this manager has not seen; before them it
    forgets all others when ``forget`` is set, so that neither side grows for ever. ``limits``: of the endpoint, for the
    options that calls of these tasks have of their own, as stages of a graph or while a task runs; always the same.
    ``files``: by task, those that it reads from copies of the node."""

    tasks: tuple[TaskOrder, ...]
    functions: tuple[tuple[str, Body], ...] = ()
    forget: bool = False
    limits: Limits | None = None
    files: dict[str, tuple[NodeFile, ...]] = {}


class CancelTasks(_Message, frozen=True):
    """Stop these, running or not. Each is still answered by a Finished, or by the result that won the race."""

    task_ids: tuple[str, ...]


class ReturnTasks(_Message, frozen=True):
    """Return those of the named tasks that still wait for a worker: another node has free slots. The manager answers
    with ``returned`` of a Progress. Tasks that have begun, or are about to begin, stay."""

    task_ids: tuple[str, ...]


class WantedOutput(_Part, frozen=True):
    """A task of this manager whose output is requested from these offsets. ``start`` is the agent's number of the
    attempt."""

    task_id: str
    start: int
    stdout_from: int
    stderr_from: int


class ReadOutput(_Message, frozen=True):
    """Read output of running tasks, up to ``max_bytes`` of each stream. Answered by an OutputRead."""

    request_id: str
    tasks: tuple[WantedOutput, ...]
    max_bytes: int


class Stop(_Message, frozen=True):
    """End all workers and the manager itself. What runs gets ``grace_s`` seconds to finish, what waits is dropped."""

    grace_s: float


class ResultsTaken(_Message, frozen=True):
    """The agent has freed ``size_bytes`` of results in its memory. From now on at most ``window_bytes``, and the rest
    of a result that goes beyond, may be in transit to the agent."""

    size_bytes: int
    window_bytes: int


class Prewarm(_Message, frozen=True):
    """Keep ``count`` workers of an environment warm until further notice; 0: as many as tasks need. ``retry``: if the
    environment has failed, try it now, not after the pause."""

    environment: Environment
    count: int
    retry: bool = False


class PrewarmRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the owner, in a file of the endpoint: keep ``count`` workers of an environment warm, with busy ones.

    :param node: host name of the only node for the workers; empty: all nodes.
    :param requested_at: epoch second.
    """

    environment: Environment
    count: int
    node: str = ""
    requested_at: float = 0.0


class Ping(_Message, frozen=True):
    """Heartbeat of the agent. A manager without messages for too long stops."""


class Used(_Part, frozen=True):
    """Use of a task or a call, with the calls that it has made: seconds that they had places by the clock of their
    managers, all together; how many ``calls`` have had one; and how many ``places`` they have now."""

    run_s: float = 0.0
    calls: int = 0
    places: int = 0

    def after(self, seconds: float) -> Used:
        """The use after some more seconds, if nothing has changed."""
        return Used(self.run_s + self.places * max(0.0, seconds), self.calls, self.places)


class Started(_Part, frozen=True):
    """A task is running for long enough to be reported."""

    task_id: str
    at: float


class Died(_Part, frozen=True):
    """The worker that ran a task is gone. The agent decides whether the task may be started again. ``used``: of a task
    that has made calls, and of a call of another manager; None if that is not known."""

    task_id: str
    reason: str
    stdout_tail: str = ""
    stderr_tail: str = ""
    printed: Printed | None = None
    output: bytes = b""
    used: Used | None = None


class TakeCalls(_Message, frozen=True):
    """Hand over calls of graphs and of running tasks that wait here for an environment, for the manager ``to``: at most
    ``count``, of which so many as are ``idle`` start at once. Answered by CallsTaken."""

    to: str
    key: str
    count: int
    idle: int


class RefuseCalls(_Message, frozen=True):
    """No present manager can ever run calls of this environment that wait here."""

    key: str
    reason: str


class GivenCall(_Part, frozen=True):
    """A call of a graph, or of a running task, that another manager runs. ``call``: details of its order, which only
    managers read. ``inputs``: number of bodies after its payload. ``depth``: number of tasks that wait for it.
    ``callees``: index of a list in the message; -1: the call calls no named functions. ``number``: the agent's number,
    unique while the agent lives."""

    order: TaskOrder
    call: bytes
    inputs: int = 0
    depth: int = 0
    callees: int = -1
    number: int = 0


class RunCalls(_Message, frozen=True):
    """Run these calls of another manager, ``home``. ``functions``, ``forget`` and ``limits`` as in RunTasks, but by
    home: what is known of its functions. ``callees``: lists of hashes."""

    home: str
    calls: tuple[GivenCall, ...]
    functions: tuple[tuple[str, Body], ...] = ()
    forget: bool = False
    callees: tuple[tuple[str, ...], ...] = ()
    limits: Limits | None = None


class CallEnd(_Part, frozen=True):
    """Result of a call. ``parts``: number of bodies of its value or exception, from ``first`` on; the tails of its
    output (``printed``) are in the next body. ``pid``, ``node``: of its worker. ``used``: usage with the calls that it
    has made."""

    number: int
    task_id: str
    state: TaskState
    error: dict[str, Any] | None = None
    first: Body = 0
    parts: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    is_retried: bool = False
    printed: Printed | None = None
    pid: int = 0
    node: str = ""
    used: Used = Used()


class CallNews(_Message, frozen=True):
    """News of calls that another manager runs, on their way to the agent, and from there to their home. By the agent's
    numbers, those that have ``started``, and whose worker ``died``. ``returned``: the ids of calls that have not
    started and come back. ``used``: the ids of calls that make calls, with what they have used up to now; each call at
    most every quarter of a second."""

    ended: tuple[CallEnd, ...] = ()
    died: tuple[tuple[int, Died], ...] = ()
    started: tuple[tuple[int, Started], ...] = ()
    returned: tuple[str, ...] = ()
    used: tuple[tuple[int, str, Used], ...] = ()


class ManagerGone(_Message, frozen=True):
    """A manager is gone with which this one has exchanged calls: its functions can be forgotten."""

    manager_id: str


class ValkeyAddress(_Part, frozen=True):
    """A Valkey server on the agent's machine."""

    port: int
    password: str


class ValkeyAnswered(_Message, frozen=True):
    """The answer to a ValkeyRequested: the server of that submitter, or an ``error``, an ErrorRecord in its JSON
    form."""

    submitter: str
    address: ValkeyAddress | None = None
    error: dict[str, Any] | None = None


class FilesKey(_Message, frozen=True):
    """The key by which managers of this agent know one another when they copy files, or blocks."""

    key: bytes


class FileCopy(_Part, frozen=True):
    """Source of a copy for a manager: another manager's address (``host:port``); empty: the endpoint's copy in the
    directory of a task that waits for it; None: there is no source."""

    content: FileContent
    source: str | None


class CopyFiles(_Message, frozen=True):
    """Get these copies, which the manager has requested. The manager answers each in a FilesReported."""

    copies: tuple[FileCopy, ...]


FromAgent = (
    RunTasks
    | CancelTasks
    | ReturnTasks
    | ReadOutput
    | Stop
    | ResultsTaken
    | Prewarm
    | Ping
    | TakeCalls
    | RefuseCalls
    | RunCalls
    | CallNews
    | ManagerGone
    | ValkeyAnswered
    | FilesKey
    | CopyFiles
)

# -- manager to agent --------------------------------------------------------------------------------------------------


class Capacity(_Part, frozen=True):
    """Resources of a node for all its workers. ``accelerators`` are names as their vendors' tools give them."""

    cores: int
    memory_bytes: int
    accelerators: tuple[str, ...] = ()


class Registered(_Message, frozen=True):
    """First message of a manager: its slots, as part of a block. ``software`` must equal the agent's own. ``ends_at``:
    end of the block's time, if known. ``isolation`` of submitters, on this node; ``refusal``: why it refuses tasks
    of submitters other than the owner, with the missing features. ``environments``: the technologies that work on the
    node, and why other requested ones do not. ``image``: if the node is itself a container (a Kubernetes pod), the key
    of the only environment that it serves. ``files_address``: address at which other managers get copies of files
    (``host:port``); empty if the node keeps none. ``has_blocks``: tasks of other nodes read blocks in its memory.
    ``latency_workers``: maximum workers for tasks with a latency target, beyond its slots."""

    manager_id: str
    software: str
    slots: int
    pid: int
    hostname: str
    block_id: str = ""
    capacity: Capacity | None = None
    ends_at: float | None = None
    isolation: str = ""
    refusal: str = ""
    environments: dict[str, str] = {}
    image: str = ""
    files_address: str = ""
    has_blocks: bool = False
    latency_workers: int = 0


class EnvironmentStatus(_Part, frozen=True):
    """An environment on a node.

    ``warm``: its idle workers, ``parked``: those of them that have no slot, ``busy``: those with a task, ``starting``:
    those that start. ``forkable``: it has a template. ``text``: what happens ("apptainer is converting the image"),
    since the epoch second ``since``. ``problem``: why it cannot be started, in the runner's own words; ``retry_at``:
    when it may be tried again after it has failed, in epoch seconds. ``start_s``: how long a start takes, as seen last.
    """

    key: str
    label: str
    type: str
    warm: int = 0
    busy: int = 0
    starting: int = 0
    forkable: bool = False
    text: str = ""
    since: float = 0.0
    problem: str = ""
    start_s: float | None = None
    parked: int = 0
    retry_at: float | None = None


class Finished(_Part, frozen=True):
    """The result of an attempt. ``error`` is an ErrorRecord in its JSON form; with it, ``result`` is the pickled
    exception, for an engine of the same user. ``is_retried``: the task's options retry this error. ``output`` has the
    tails of what it ``printed``. ``start_s``: how long the start of its worker took, if it had to wait for that."""

    task_id: str
    state: TaskState
    result: Body | None = None
    error: dict[str, Any] | None = None
    started_at: float | None = None
    ended_at: float | None = None
    details: dict[str, Any] | None = None
    printed: Printed | None = None
    output: Body | None = None
    is_retried: bool = False
    start_s: float = 0.0


class RunningOutput(_Part, frozen=True):
    """Bytes of the streams of a running task, and where they begin. ``wanted`` is what they answer.
    ``is_running``: False if the task does not run (any more); then there are none. ``is_kept``: False if its submitter
    or the endpoint wants none to be read."""

    wanted: WantedOutput
    is_running: bool = False
    is_kept: bool = True
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_at: int = 0
    stderr_at: int = 0


class OutputRead(_Message, frozen=True):
    """The answer to a ReadOutput."""

    request_id: str
    max_bytes: int
    tasks: tuple[RunningOutput, ...]


class GraphProgress(_Part, frozen=True):
    """How the stages of a task are now, and the calls that it has made while it runs: at most
    :data:`farcall_common.graphs.MAX_STATES`. ``used``: up to now, in case that the manager is lost."""

    task_id: str
    stages: tuple[StageState, ...]
    used: Used = Used()


class ReportedProgress(_Part, frozen=True):
    """How far a task is, as its function says; see :class:`farcall_common.progress.Progress`."""

    task_id: str
    done: int | float
    total: int | float | None
    text: str
    at: float


class WeightOfClass(_Part, frozen=True):
    """A latency class on a node, and its weight. ``problem``: what its target needs that cannot be held as things are
    (see :mod:`farcall_endpoint.qos.controller`); empty if it can."""

    name: str
    weight: float
    problem: str = ""


class CpuSharesStatus(_Part, frozen=True):
    """The latency classes of a node. ``actuator``: what gives them their shares of the CPUs; ``problem``: what does not
    work of that. ``pressure``: the part of the time in which some process waited for a CPU, 0 to 1."""

    classes: tuple[WeightOfClass, ...] = ()
    actuator: str = ""
    problem: str = ""
    pressure: float = 0.0


class Progress(_Message, frozen=True):
    """News since the last Progress, and the state of the manager. ``problem``: why it cannot run tasks.
    ``environments``: all that the node knows; None: unchanged since the last Progress. ``graphs``: those that run and
    have changed, each at most every quarter of a second. ``waiting_calls``: by the key of their environment, how many
    calls other managers may take over; None: unchanged. ``progress``: of tasks that say how far they are, each at most
    once a second. ``cpu_shares``: of latency classes; None: unchanged. ``returned``: tasks that have not begun, and are
    not here any more."""

    finished: tuple[Finished, ...] = ()
    died: tuple[Died, ...] = ()
    started: tuple[Started, ...] = ()
    workers: int = 0
    idle_workers: int = 0
    problem: str = ""
    environments: tuple[EnvironmentStatus, ...] | None = None
    graphs: tuple[GraphProgress, ...] = ()
    waiting_calls: tuple[tuple[str, int], ...] | None = None
    progress: tuple[ReportedProgress, ...] = ()
    cpu_shares: CpuSharesStatus | None = None
    returned: tuple[str, ...] = ()


class CallsTaken(_Message, frozen=True):
    """The answer to a TakeCalls: at most ``asked`` calls. ``waiting``: how many others another manager may take over.
    The rest as in RunCalls, for which the agent passes this on."""

    to: str
    key: str
    asked: int
    calls: tuple[GivenCall, ...] = ()
    functions: tuple[tuple[str, Body], ...] = ()
    forget: bool = False
    callees: tuple[tuple[str, ...], ...] = ()
    waiting: int = 0


class CallsDropped(_Message, frozen=True):
    """Calls that other managers run are not needed any more."""

    task_ids: tuple[str, ...]


class ValkeyRequested(_Message, frozen=True):
    """Tasks of a submitter ask for its Valkey; empty: the endpoint's owner. Answered by a ValkeyAnswered."""

    submitter: str


class WaitingForFiles(_Part, frozen=True):
    """A task that waits for copies of a number of ``contents`` with ``total_bytes``. ``left`` of them, with
    ``left_bytes``, are not there yet."""

    task_id: str
    contents: int
    total_bytes: int
    left: int
    left_bytes: int


class FilesReported(_Message, frozen=True):
    """Changes among the copies of files on a node.

    ``wanted``: contents that tasks wait for; the agent answers each in a CopyFiles. ``dropped``: contents that no task
    waits for any more. ``have``: new copies. ``failed``: contents that the node could not get from the agent's source,
    and whether the source could be reached. ``gone``: copies that were removed to make room. ``waiting``: some of the
    tasks that wait for copies. ``copies``: number of copies that are here or on their way, with ``copies_bytes`` of the
    node's budget. ``missed``: number of tasks that read the endpoint's copies instead since the last report;
    ``problem``: the last reason.
    """

    wanted: tuple[FileContent, ...] = ()
    dropped: tuple[FileContent, ...] = ()
    have: tuple[FileContent, ...] = ()
    failed: tuple[tuple[FileContent, bool], ...] = ()
    gone: tuple[FileContent, ...] = ()
    waiting: tuple[WaitingForFiles, ...] = ()
    copies: int = 0
    copies_bytes: int = 0
    missed: int = 0
    problem: str = ""


class Ending(_Message, frozen=True):
    """The manager is about to end the worker of a task of another submitter than the owner. If the manager is lost
    before it reports the result, this task is the likely cause."""

    task_id: str


class Leaving(_Message, frozen=True):
    """Last message of a manager: all of its workers have ended. Unfinished tasks return to the agent.
    ``failed``: it could not start workers, so no task has been started."""

    reason: str
    failed: bool = False


FromManager = (
    Registered
    | Progress
    | OutputRead
    | CallsTaken
    | CallNews
    | CallsDropped
    | ValkeyRequested
    | FilesReported
    | Ending
    | Leaving
)

_encoder: Final = msgspec.msgpack.Encoder()
_from_agent: Final[msgspec.msgpack.Decoder[FromAgent]] = msgspec.msgpack.Decoder(FromAgent)
_from_manager: Final[msgspec.msgpack.Decoder[FromManager]] = msgspec.msgpack.Decoder(FromManager)
_lengths: Final[msgspec.msgpack.Decoder[list[int]]] = msgspec.msgpack.Decoder(list[int])
_NUMBER_BYTES: Final = 4


def encode(message: FromAgent | FromManager, bodies: Sequence[Frame] = (), *, number: int = 0) -> list[Frame]:
    """The frames of a message."""
    header = number.to_bytes(_NUMBER_BYTES, "big") + _encoder.encode(message)
    if not bodies:
        return [header]
    lengths = [len(body) for body in bodies]
    if max(lengths) > _MAX_JOINED_BYTES:
        return [header, b"", *bodies]
    return [header, _encoder.encode(lengths), b"".join([copy_of(body) for body in bodies])]


def decode_from_agent(frames: Sequence[Frame]) -> tuple[FromAgent, list[Frame]]:
    """Read a message of the agent: header and bodies.

    :raises msgspec.DecodeError: if it is none.
    """
    return _from_agent.decode(memoryview(copy_of(frames[0]))[_NUMBER_BYTES:]), _bodies(frames)


def decode_from_manager(frames: Sequence[Frame]) -> tuple[FromManager, list[Frame]]:
    """Read a message of a manager: header and bodies. Those of calls, which are passed on, are not read.

    :raises ValueError: if it is none (msgspec.DecodeError is one), or names bodies that it does not have.
    """
    try:
        bodies = _bodies(frames)
        message = _from_manager.decode(memoryview(copy_of(frames[0]))[_NUMBER_BYTES:])
        if type(message) is not CallNews and type(message) is not CallsTaken:
            bodies = [copy_of(body) for body in bodies]
    except (IndexError, TypeError) as error:
        raise ValueError(f"frames are missing: {error}") from error
    except OSError as error:
        raise ValueError(f"frames cannot be read: {error}") from error
    if type(message) is Progress and message.finished:
        _check_bodies(message.finished, len(bodies))
    elif type(message) is CallNews:
        for end in message.ended:
            if not 0 <= end.first <= end.first + end.parts <= len(bodies) - (end.printed is not None):
                raise ValueError(f"there are no bodies {end.first} and {end.parts - 1} behind it")
    return message, bodies


def _check_bodies(finished: Sequence[Finished], count: int) -> None:
    for each in finished:
        if each.result is not None and not 0 <= each.result < count:
            raise ValueError(f"there is no body {each.result}")
        if each.output is not None and not 0 <= each.output < count:
            raise ValueError(f"there is no body {each.output}")


def number_of(frames: Sequence[Frame]) -> int:
    """The number of a message; 0 if it has none."""
    return int.from_bytes(copy_of(frames[0])[:_NUMBER_BYTES], "big")


def _bodies(frames: Sequence[Frame]) -> list[Frame]:
    if len(frames) < 2:
        return []
    if len(frames[1]) == 0:
        return list(frames[2:])
    joined = bytes(copy_of(frames[2]))
    bodies: list[Frame] = []
    start = 0
    for length in _lengths.decode(copy_of(frames[1])):
        bodies.append(joined[start : start + length])
        start += length
    return bodies


def _least(one: N | None, other: N | None) -> N | None:
    """The smaller of two limits, where None is none."""
    return one if other is None else other if one is None else min(one, other)


def software_fingerprint() -> str:
    """Hash of the message definitions, so that an agent detects a manager of another version."""
    files = (
        __file__,
        task_options.__file__,
        graphs_of_tasks.__file__,
        environments_of_tasks.__file__,
        output_of_tasks.__file__,
        Path(__file__).with_name("manager_worker.py"),  # between managers
    )
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]
