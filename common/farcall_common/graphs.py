"""Graphs: calls that get the values of other calls, as one task.

A graph is the payload of a task: its stages, and the packed arguments of each. The functions are the task's
``callees`` (:class:`farcall_common.task_options.Callee`); a stage names one by its place there. Between a submitter and
an endpoint nothing opens a graph: its payload is text, as other payloads are.

::

    payload = "gr" + newline + Base64 of zlib of (length of the head in 4 bytes + head in MessagePack + bodies)
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import DeserializationError, PayloadTooLarge
from farcall_common.limits import MAX_PAYLOAD_BYTES, MIB
from farcall_common.retries import EARLIER_RUN_S
from farcall_common.task_options import Callee, TaskOptions

PREFIX: Final = b"gr\n"
COLLECT: Final = -1
"""In place of a function: the value is the list of the stage's inputs."""
MAX_STAGES: Final = 100_000
MAX_CALLS: Final = 1_000_000
"""Limit for the calls of a running graph, with those of all its maps."""
MAX_INPUTS: Final = 1_000_000
"""Limit for the inputs of all stages together."""
MAX_READS: Final = 10_000_000
"""Limit for the inputs of all calls of a running graph together. A list counts once for each element."""
MAX_OPENED_BYTES: Final = 8 * MAX_PAYLOAD_BYTES
"""Limit for a graph before compression."""
MAX_DEPTH: Final = 1000
"""Limit for the lists, tuples and dictionaries that are nested around an input."""
_SMALL_BYTES: Final = 16 * 1024
_LENGTH: Final = struct.Struct("<I")

_Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)]


class Input(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Input of a call: the place in its arguments that gets the value of another stage.

    :param stage: number of the stage.
    :param path: the place in the arguments: a position or a name; then positions or keys inside lists, tuples and
        dictionaries.
    :param each: one call for each element of the value, instead of one with the whole value.
    """

    stage: _Index
    path: Annotated[tuple[int | str, ...], msgspec.Meta(max_length=MAX_DEPTH)]
    each: bool = False


class Stage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call, or one for each element of its inputs.

    :param function: its place among the task's callees; :data:`COLLECT`: none.
    :param name: for people: the function's name, or the one that the submitter gave.
    :param inputs: the values that it gets. A stage with inputs of which one or more are ``each`` makes as many calls
        as the shortest of those has elements, and its value is the list of their results.
    :param needs: with how many of its inputs it starts, counted by call; 0: with all. Those that are missing then are
        left out of lists, and None elsewhere.
    :param options: those of its calls, all of them, if some differ from the task's; None: the task's. They have an
        environment only if the stage names one, and no callees.
    """

    function: Annotated[int, msgspec.Meta(ge=COLLECT)]
    name: str = ""
    inputs: tuple[Input, ...] = ()
    needs: Annotated[int, msgspec.Meta(ge=0)] = 0
    options: TaskOptions | None = None

    @property
    def is_map(self) -> bool:
        """Whether it makes a call for each element."""
        return any(each.each for each in self.inputs)

    def environment(self, callees: Sequence[Callee]) -> Environment | None:
        """Environment of a stage's calls: the stage's own, else its function's. The environment of the task does not
        matter. None: the environment of the endpoint."""
        if self.options is not None and self.options.environment is not None:
            return self.options.environment
        return callees[self.function].environment


class Graph(msgspec.Struct, frozen=True):
    """A graph as it travels. Stages are in an order in which inputs come first: no cycle can be written.

    :param calls: by stage, the packed call (:meth:`farcall_common.payload.Serializer.pack_call`), with None where
        inputs go.
    :param output: the stage whose value is the result.
    :param spread: whether calls go to as many workers as there are, even where one could make them one after the other.
    """

    stages: tuple[Stage, ...]
    calls: tuple[bytes | memoryview, ...]
    output: int
    spread: bool = False


class _Head(msgspec.Struct, frozen=True, array_like=True):
    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1, max_length=MAX_STAGES)]
    sizes: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_STAGES)]
    output: _Index
    spread: bool = False


MAX_HEAD_BYTES: Final = 8 * MIB
"""Limit for the stages without their calls. In memory they take 30 times as many bytes."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Head).decode


def is_graph(payload: bytes | memoryview) -> bool:
    """Whether a payload is a graph; no other starts so."""
    return bytes(payload[: len(PREFIX)]) == PREFIX


def pack_graph(graph: Graph) -> bytes:
    """The payload of a graph.

    :raises PayloadTooLarge: if its stages, without the arguments of their calls, are more than can be read.
    """
    head = _encode(_Head(graph.stages, tuple(map(len, graph.calls)), graph.output, graph.spread))
    if len(head) > MAX_HEAD_BYTES:
        raise PayloadTooLarge(
            f"the graph's {len(graph.stages):,} stages take {len(head) / MIB:.1f} MiB without their arguments; the "
            f"limit is {MAX_HEAD_BYTES // MIB} MiB",
            hint="Give options to the executor instead of each stage, or submit several graphs.",
        )
    return PREFIX + base64.b64encode(_compressed(b"".join((_LENGTH.pack(len(head)), head, *graph.calls))))


def _compressed(opened: bytes) -> bytes:
    if len(opened) > _SMALL_BYTES:
        return zlib.compress(opened, 1)
    # With tables for large contents, making these takes a hundred times as long as compressing a chain.
    compressor = zlib.compressobj(1, zlib.DEFLATED, 12, 5)
    return compressor.compress(opened) + compressor.flush()


def unpack_graph(payload: bytes | memoryview, *, callees: int) -> Graph:
    """The graph in a payload, which may be hostile. Runs no code of it.

    :param callees: how many the task has.
    :raises DeserializationError: if it is none, or contradicts itself; in a sentence.
    """
    try:
        opener = zlib.decompressobj()
        opened = opener.decompress(base64.b64decode(payload[len(PREFIX) :], validate=True), MAX_OPENED_BYTES)
        if not opener.eof:
            raise ValueError("it is truncated or larger than a graph may be")
        length = _LENGTH.unpack_from(opened)[0]
        if length > MAX_HEAD_BYTES:
            raise ValueError(f"its stages take {length} bytes, more than {MAX_HEAD_BYTES}")
        start = _LENGTH.size + length
        head = _decode(opened[_LENGTH.size : start])
    except (binascii.Error, zlib.error, struct.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DeserializationError(f"The graph cannot be read: {error}.") from error
    calls: list[bytes | memoryview] = []
    view = memoryview(opened)
    for size in head.sizes:
        calls.append(view[start : start + size])
        start += size
    graph = Graph(head.stages, tuple(calls), head.output, head.spread)
    if start != len(opened) or any(size < 0 for size in head.sizes):
        raise DeserializationError("The graph cannot be read: its calls have other lengths than it says.")
    if problem := problem_of(graph, callees=callees):
        raise DeserializationError(f"The graph is invalid: {problem}.")
    return graph


def problem_of(graph: Graph, *, callees: int) -> str:
    """Why a graph cannot run; empty if it can."""
    if len(graph.stages) != len(graph.calls):
        return f"{len(graph.stages)} stages, and {len(graph.calls)} calls"
    if not 0 <= graph.output < len(graph.stages):
        return f"its result is stage {graph.output}, which it does not have"
    if (inputs := sum(len(stage.inputs) for stage in graph.stages)) > MAX_INPUTS:
        return f"its stages have {inputs:,} inputs; the limit is {MAX_INPUTS:,}"
    for number, stage in enumerate(graph.stages):
        if stage.function >= callees:
            return f"stage {number} calls function {stage.function} of {callees}"
        for each in stage.inputs:
            if each.stage >= number:
                return f"stage {number} needs stage {each.stage}, which does not come before it"
            if not each.path:
                return f"an input of stage {number} has no place"
        if stage.function == COLLECT and stage.is_map:
            return f"stage {number} collects elements"
    return ""


class StageState(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a stage is, for people: in the details of a result, and while the graph runs.

    :param state: ``waiting``, ``running``, ``done``, ``failed``, ``cancelled`` or ``skipped`` (its value was not
        needed).
    :param calls: how many it makes, as far as that is known; ``ended`` and ``failed`` of them.
    :param retries: starts beyond the first, of all its calls together.
    :param started_at: epoch second of the first start; ``ended_at`` of the last end.
    :param run_s: seconds in its function, of all calls together.
    :param value_bytes: size of its value.
    :param workers: process ids of workers that made the calls, the first few.
    :param node: host names of the nodes where it ran, the first few.
    :param error: the record of the first call that failed for good.
    """

    number: int
    name: str
    state: str
    calls: int = 1
    ended: int = 0
    failed: int = 0
    retries: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    run_s: float = 0.0
    value_bytes: int = 0
    workers: tuple[int, ...] = ()
    node: str = ""
    error: dict[str, Any] | None = None


STAGES: Final = "stages"
"""In the details of a result: the states of the stages, as :class:`StageState` in JSON."""
STAGE_CALLS: Final = "stage_calls"
"""In the details of a result: how many calls of all stages ran, with the calls that these made in turn. Without it, the
ended calls of ``stages`` count."""
STAGE_RUN_S: Final = "stage_run_s"
"""In the details of a result: seconds for which these calls, stopped ones too, and the task's own function had places.
Without it, the seconds of ``stages`` count."""
VALUES: Final = "values"
"""In the details of a failed graph's result: small values of ended stages, in Base64 by the number of the stage."""
DETAILS: Final = frozenset({STAGES, STAGE_CALLS, STAGE_RUN_S, VALUES})
"""Keys about a graph in the details of a result."""
DETAILS_OF_USAGE: Final = frozenset({EARLIER_RUN_S, STAGE_CALLS, STAGE_RUN_S})
"""Details that change what a task has used."""

STATES: Final = frozenset({"waiting", "running", "done", "failed", "cancelled", "skipped"})
"""States of a stage."""

MAX_STATES: Final = 1000
"""Limit for stages in a report. From a larger graph it has those with an error, then running ones, then the first."""
