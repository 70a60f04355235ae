"""Graph packing: the payload of a graph as it was built, for submitters with and without a cloud.

Constant arguments are packed once, and the payload of a graph with nothing else is made once: submitting it again costs
a look at its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from farcall_common.errors import PayloadTooLarge
from farcall_common.graph_builder import Plan, Stage
from farcall_common.graphs import COLLECT, MAX_OPENED_BYTES, Graph, Input, pack_graph
from farcall_common.graphs import Stage as PackedStage
from farcall_common.limits import MAX_PAYLOAD_BYTES
from farcall_common.task_options import MAX_CALLEES, TaskOptions

#: Payloads that a graph remembers for each target.
_REMEMBERED: Final = 4
#: Arguments of all stages, before they are compressed.
_MOST_CALL_BYTES: Final = MAX_OPENED_BYTES // 2


class PackedPlan(NamedTuple):
    """The payload of a graph. ``requirements``: what the packer found of its stages, each once."""

    payload: bytes
    requirements: Sequence[Any]


#: The packed arguments of a stage, and what a reader must know to read them; None: nothing.
PackCall = Callable[[Stage, int], tuple[bytes, Any]]


def check_callees(plan: Plan, callees: Sequence[object]) -> None:
    """:raises ValueError: if a graph calls too many functions."""
    if len(callees) > MAX_CALLEES:
        raise ValueError(
            f"graph: {plan.where(plan.output)} needs {len(callees):,} different functions; a task calls at most "
            f"{MAX_CALLEES:,}. Pass what differs as arguments"
        )


def task_options(plan: Plan, options: TaskOptions) -> TaskOptions:
    """The options of the task that a graph is, of those that it was submitted with: it has no latency target. A task of
    which a stage may not run twice may not, either: between the submitter and the endpoint, the options of stages are
    not seen."""
    if options.qos is not None:
        options = msgspec.structs.replace(options, qos=None)
    if options.idempotent and any(not stage.options.get("idempotent", True) for stage in plan.stages if stage.options):
        return msgspec.structs.replace(options, idempotent=False)
    return options


def pack_plan(
    plan: Plan,
    *,
    callees: Mapping[int, int],
    identity: tuple[object, ...],
    options: TaskOptions,
    packer: object,
    pack_call: PackCall,
    spread: bool,
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> PackedPlan:
    """The payload of a graph.

    :param callees: places of its functions among the task's callees, by their identity.
    :param identity: what these places depend on: for equal ones they are equal.
    :param options: those that it was submitted with.
    :param packer: what ``pack_call`` depends on: for the same one, constant arguments are packed once.
    :param max_bytes: how large it may be.
    :raises SerializationError: if an argument cannot be sent.
    :raises PayloadTooLarge: if it is too large.
    """
    key = identity, options, packer, spread
    if plan.is_constant:
        for known, found in [*plan.payloads]:
            if known[2] is packer and known == key:
                packed: PackedPlan = found
                return packed
    own: dict[int, TaskOptions] = {}
    others: TaskOptions | None = None  # of the stages that have none of their own
    if task_options(plan, options) is not options:  # these may run twice, and the task may not
        others = stage_options(msgspec.structs.replace(options, walltime_s=None), {})
    calls: list[bytes] = []
    stages: list[PackedStage] = []
    requirements: dict[Any, None] = {}
    for at, (stage, inputs) in enumerate(zip(plan.stages, plan.inputs, strict=True)):
        known_call = stage.packed
        if known_call is not None and known_call[0] is packer:
            _, call, required = known_call
        else:
            call, required = pack_call(stage, at)
            if stage.is_constant:
                stage.packed = packer, call, required
        calls.append(call)
        if required is not None:
            requirements[required] = None
        chosen = others if stage.function is not None else None
        if stage.options:
            if id(stage.options) not in own:
                own[id(stage.options)] = stage_options(options, stage.options)
            chosen = own[id(stage.options)]
        place = COLLECT if stage.function is None else callees[id(stage.function)]
        found_inputs = tuple([Input(number, path, each) for number, path, each in inputs])
        stages.append(PackedStage(place, stage.name, found_inputs, stage.needs, chosen))
    graph = Graph(tuple(stages), tuple(calls), plan.output, spread)
    payload = pack_graph(graph)
    if len(payload) > max_bytes:
        raise _too_large(plan, calls, "the graph", len(payload), max_bytes)
    if (call_bytes := sum(map(len, calls))) > _MOST_CALL_BYTES:
        raise _too_large(plan, calls, "the graph before compression", call_bytes, _MOST_CALL_BYTES)
    packed = PackedPlan(payload, tuple(requirements))
    if plan.is_constant:
        plan.payloads[:] = [*plan.payloads[-_REMEMBERED + 1 :], (key, packed)]
    return packed


def stage_options(task: TaskOptions, own: Mapping[str, Any]) -> TaskOptions:
    """The options of the calls of a stage: all that it has, with those of the task where it has none of its own; but an
    environment only if it names one, and none of the result."""
    bare = msgspec.structs.replace(
        task, callees=(), memoize=None, result_serializers=(), container=None, environment=None, qos=None
    )
    return bare.changed(**own)


def _too_large(plan: Plan, calls: Sequence[bytes], what: str, size_bytes: int, most_bytes: int) -> PayloadTooLarge:
    largest = max(range(len(calls)), key=lambda at: len(calls[at]))
    return PayloadTooLarge(
        f"{what} takes {size_bytes / 2**20:.1f} MiB; the limit is {most_bytes / 2**20:.1f} MiB. "
        f"The arguments of {plan.where(largest)} take most: {len(calls[largest]) / 2**20:.1f} MiB",
        hint="Let a stage read or make large data, instead of sending it.",
    )
