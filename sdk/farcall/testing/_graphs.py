"""Graphs in the fake cloud: one call after the other, in the order of the stages."""

from __future__ import annotations

import base64
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.errors import ErrorRecord, FarcallError, Fault
from farcall_common.graphs import COLLECT, STAGE_CALLS, STAGE_RUN_S, STAGES, VALUES, Graph, Stage, StageState
from farcall_common.objects.references import resolved
from farcall_common.payload import Serializer

_MAX_VALUE_BYTES: Final = 4 * 1024

#: Describes an exception of a stage.
Describe = Callable[[BaseException], ErrorRecord]


class GraphFailed(Exception):
    """A stage that the result needs has failed: its error, with the number and name of the stage."""

    def __init__(self, record: ErrorRecord) -> None:
        super().__init__(record.message)
        self.record = record


class ValueGone(Exception):
    """The value of a reference cannot be read: its error."""

    def __init__(self, record: ErrorRecord) -> None:
        super().__init__(record.message)
        self.record = record


def with_values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments with the values of references to objects.

    :raises ValueGone: if one cannot be read.
    """
    try:
        return resolved(args, kwargs)
    except FarcallError as error:
        raise ValueGone(error.record) from error


class GraphRun:
    """A graph that runs here.

    :param functions: the task's callees.
    :param serializer: reads the arguments.
    """

    def __init__(
        self, graph: Graph, functions: Sequence[Callable[..., Any]], serializer: Serializer, describe: Describe
    ) -> None:
        self._graph = graph
        self._functions = functions
        self._serializer = serializer
        self._describe = describe
        self._values: dict[int, Any] = {}
        self._states = [StageState(at, stage.name, "waiting") for at, stage in enumerate(graph.stages)]

    def __contains__(self, number: int) -> bool:
        return number in self._values

    def run(self) -> Any:
        """The value of the output stage.

        :raises GraphFailed: if it has none.
        """
        first: ErrorRecord | None = None
        for number, stage in enumerate(self._graph.stages):
            if not self._can_run(stage):
                missing = self._too_few(stage)
                self._states[number] = msgspec.structs.replace(
                    self._states[number],
                    state="failed" if missing else "cancelled",
                    failed=int(bool(missing)),
                    error=missing.to_json() if missing else None,
                )
                first = first or (missing and _at(f"stage {number} ({stage.name})", missing))
                continue
            started_at = time.time()
            done: list[Any] = []
            error: ErrorRecord | None = None
            calls = 1
            try:
                rows = self._rows(stage, number)
                calls = len(rows)
                for args, kwargs in rows:
                    done.append(self._call(stage, args, kwargs))
            except BaseException as raised:  # noqa: BLE001 - user code may raise anything; it is reported
                error = self._describe(raised)
                element = f", element {len(done)}" if stage.is_map else ""
                first = first or _at(f"stage {number} ({stage.name}){element}", error)
            else:
                self._values[number] = done if stage.is_map else done[0]
            ended_at = time.time()
            self._states[number] = StageState(
                number,
                stage.name,
                "failed" if error else "done",
                calls=calls,
                ended=len(done) + bool(error),
                failed=int(bool(error)),
                started_at=started_at,
                ended_at=ended_at,
                run_s=ended_at - started_at,
                workers=(os.getpid(),),
                error=error.to_json() if error else None,
            )
        if self._graph.output not in self._values:
            assert first is not None
            raise GraphFailed(first)
        return self._values[self._graph.output]

    def details(self, *, failed: bool) -> dict[str, Any]:
        """Return the details of the task about its stages."""
        found: dict[str, Any] = {
            STAGES: msgspec.to_builtins(self._states),
            STAGE_CALLS: sum(each.ended for each in self._states),
            STAGE_RUN_S: sum(each.run_s for each in self._states),
        }
        if failed:
            pieces = {number: self._serializer.edge_pieces(value) for number, value in self._values.items()}
            values = {str(number): b"".join(each) for number, each in pieces.items()}
            small = {number: text for number, text in values.items() if len(text) <= _MAX_VALUE_BYTES}
            found[VALUES] = {number: base64.b64encode(text).decode() for number, text in small.items()}
        return found

    def _can_run(self, stage: Stage) -> bool:
        if stage.needs:
            return self._count(stage) >= stage.needs
        return all(each.stage in self._values for each in stage.inputs)

    def _count(self, stage: Stage) -> int:
        """How many inputs a call has, where those of a map count one by one."""
        stages = self._graph.stages
        there = [each.stage for each in stage.inputs if each.stage in self._values]
        return sum(len(self._values[at]) if stages[at].is_map and not stage.is_map else 1 for at in there)

    def _too_few(self, stage: Stage) -> ErrorRecord | None:
        """The error of a stage whose inputs are all there, and fewer than it needs; None if one of them is lost."""
        if not all(each.stage in self._values for each in stage.inputs):
            return None
        message = f"The stage needs {stage.needs} inputs, and has {self._count(stage)}."
        return ErrorRecord("TOO_FEW_INPUTS", message, fault=Fault.CALLER)

    def _rows(self, stage: Stage, number: int) -> list[tuple[list[Any], dict[str, Any]]]:
        """The arguments of each call of a stage."""
        if stage.function == COLLECT:
            return [([self._values[each.stage] for each in stage.inputs], {})]
        if not stage.is_map:
            return [self._arguments(stage, number, {})]
        elements = {at: list(self._values[each.stage]) for at, each in enumerate(stage.inputs) if each.each}
        count = min(map(len, elements.values()))
        return [self._arguments(stage, number, {at: elements[at][i] for at in elements}) for i in range(count)]

    def _arguments(self, stage: Stage, number: int, elements: Mapping[int, Any]) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = self._serializer.unpack_call(bytes(self._graph.calls[number]))
        root: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        missing: set[tuple[int | str, ...]] = set()
        for at, each in enumerate(stage.inputs):
            if each.stage not in self._values:
                missing.add(each.path)
                continue
            value = elements[at] if at in elements else self._values[each.stage]
            _put(root, each.path, value)
        for path in sorted(missing, reverse=True, key=lambda path: [*map(str, path[:-1]), str(path[-1]).zfill(9)]):
            _leave_out(root, path)
        return [root[at] for at in range(len(args))], {name: root[name] for name in kwargs}

    def _call(self, stage: Stage, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if stage.function == COLLECT:
            return args
        positions, names = with_values(args, kwargs)
        return self._functions[stage.function](*positions, **names)


def _at(where: str, error: ErrorRecord) -> ErrorRecord:
    """The error of a graph, with the stage that it comes from."""
    return dataclasses.replace(error, message=f"{where}: {error.message}")


def _put(root: Any, path: Sequence[int | str], value: Any) -> None:
    """Put a value into nested lists, tuples and dictionaries; tuples are written again."""
    above, last = root, path[-1]
    for at, key in enumerate(path[:-1]):
        if type(above[key]) is tuple:
            inner = list(above[key])
            _put(inner, path[at + 1 :], value)
            above[key] = tuple(inner)
            return
        above = above[key]
    above[last] = value


def _leave_out(root: Any, path: Sequence[int | str]) -> None:
    """Take a missing input out of the list that it is in."""
    above = root
    for key in path[:-1]:
        above = above[key]
    if isinstance(above, list) and len(path) > 1:
        del above[path[-1]]  # type: ignore[arg-type]
