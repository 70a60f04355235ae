"""Payloads of an engine's tasks: calls, and graphs with their functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from farcall_common import file_arguments
from farcall_common.errors import SerializationError
from farcall_common.graph_builder import Plan, Stage
from farcall_common.graph_packing import check_callees, pack_plan
from farcall_common.graphs import MAX_OPENED_BYTES
from farcall_common.payload.functions import Function, FunctionTable
from farcall_common.payload.native import dump_call
from farcall_common.staged_files import FileUse, pack_files, uses
from farcall_common.task_options import AttemptOptionsDict, Callee, TaskOptions, unknown_option


def pack_payload(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """The payload of a call, with the list of its files if it has some.

    :raises SerializationError: if an argument cannot be pickled.
    :raises InvalidRequest: for too many files.
    """
    if not file_arguments.in_use():
        return dump_call(args, kwargs)
    payload, files = pack_call(args, kwargs)
    return pack_files(files, payload)


def pack_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[bytes, tuple[FileUse, ...]]:
    """The arguments of a call, and the files among them.

    :raises SerializationError: if one of them cannot be pickled.
    """
    if not file_arguments.in_use():
        return dump_call(args, kwargs), ()
    with file_arguments.collecting() as found:
        payload = dump_call(args, file_arguments.with_outputs(kwargs))
    return payload, uses(found)


class EngineGraph(NamedTuple):
    """A graph as an engine takes it. ``function``: that of the target, or of the first stage if that is several."""

    payload: bytes
    functions: tuple[Function, ...]
    function: Function

    @property
    def callees(self) -> tuple[Callee, ...]:
        """Its functions as an option of the task."""
        return tuple(Callee("", each.hash) for each in self.functions)


def pack_for_engine(plan: Plan, table: FunctionTable, options: TaskOptions, *, spread: bool) -> EngineGraph:
    """A target of a graph as a task.

    :param options: those of the task.
    :raises TypeError: for an option that an engine does not know.
    :raises SerializationError: if a function or an argument cannot travel.
    :raises PayloadTooLarge: if the arguments together are too large for one task.
    :raises InvalidRequest: for too many files.
    """
    known = AttemptOptionsDict.__optional_keys__
    for at, stage in enumerate(plan.stages):
        if stage.options and (unknown := stage.options.keys() - known):
            message = unknown_option(sorted(unknown)[0], known, what="stages in an engine")
            raise TypeError(f"{plan.where(at)}: {message}")
    by_identity = {id(each): table.get(each, is_stage=True) for each in plan.functions}
    by_hash = {each.hash: each for each in by_identity.values()}
    places = {function_hash: at for at, function_hash in enumerate(by_hash)}
    check_callees(plan, [*by_hash])

    def pack(stage: Stage, at: int) -> tuple[bytes, Any]:
        try:
            payload, found = pack_call(stage.args, stage.kwargs)
            return payload, found or None
        except SerializationError as error:
            raise SerializationError(f"{plan.where(at)}: {error.record.message}", hint=error.hint) from error

    packed = pack_plan(
        plan,
        callees={key: places[function.hash] for key, function in by_identity.items()},
        identity=tuple(each.hash for each in by_identity.values()),
        options=options,
        packer=dump_call,
        pack_call=pack,
        spread=spread,
        max_bytes=MAX_OPENED_BYTES,
    )
    functions = tuple(by_hash.values())
    last = plan.stages[plan.output].function
    found = tuple(dict.fromkeys(use for each in packed.requirements for use in each))
    payload = pack_files(found, packed.payload) if found else packed.payload
    return EngineGraph(payload, functions, functions[0] if last is None else by_identity[id(last)])
