"""Stages of a graph that runs or has ended: states, errors, and the values that are kept of one that failed."""

from __future__ import annotations

import base64
import binascii
import bisect
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, overload

from farcall._details import BY_SERVICE, unsigned_of
from farcall._display import local_time, table
from farcall_common.errors import DeserializationError, ErrorRecord, NotFound, TaskFailed, TaskPending
from farcall_common.graph_builder import Graph
from farcall_common.graph_handles import StageHandle
from farcall_common.plain_text import plain

#: Reads the value of a stage: of its buffer, and of what it is, in words.
LoadValue = Callable[[bytes, str], Any]

_ENDED: Final = frozenset({"done", "failed", "cancelled", "skipped"})
_COLUMNS: Final = ("stage", "name", "state", "calls", "seconds", "workers", "error")


@dataclasses.dataclass(frozen=True)
class StageInfo:
    """A stage at the time of the request.

    :param state: ``waiting``, ``running``, ``done``, ``failed``, ``cancelled`` or ``skipped`` (its value was not
        needed).
    :param calls: how many it makes, as far as that is known; ``ended`` and ``failed`` of them.
    :param retries: starts beyond the first, of all calls together.
    :param started_at: epoch seconds of the first start, by the clock of its node; ``ended_at`` of the last end.
    :param run_s: seconds in its function, of all calls together.
    :param value_bytes: size of its value.
    :param workers: process ids of workers that made the calls, the first few; ``node``: where it ran.
    :param error: of the first call that failed for good.
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
    error: TaskFailed | None = None
    _value: Callable[[], Any] | None = dataclasses.field(default=None, repr=False, compare=False)

    def result(self) -> Any:
        """The value of the stage, if the task failed and the value has at most 4 KiB; the first 64 KiB of a task.

        :raises TaskFailed: if the stage failed.
        :raises TaskPending: if it has not ended.
        :raises NotFound: if its value was not kept.
        :raises DeserializationError, ResultRefused: if it cannot be read here, or may not.
        """
        what = f"stage {self.number} ({self.name})"
        if self._value is not None:
            return self._value()
        if self.error is not None:
            raise self.error
        if self.state not in _ENDED:
            raise TaskPending(f"{what} is {self.state}", hint="Try again later, or wait for the task.")
        if self.state != "done":
            raise NotFound(f"{what} has no value: it was {self.state}", hint="")
        raise NotFound(
            f"the value of {what} was not kept",
            hint="Values of up to 4 KiB are kept when a graph fails. Submit a list of stages to get their values.",
        )

    def _row(self) -> tuple[str, ...]:
        """Cells of a table, under :data:`_COLUMNS`."""
        calls = "1" if self.calls == 1 and self.ended <= 1 else f"{self.ended} of {self.calls}"
        more = "".join(
            f", {count} {what}" for count, what in ((self.failed, "failed"), (self.retries, "retries")) if count
        )
        error = self.error.record.message.partition("\n")[0] if self.error else ""
        seconds = f"{self.run_s:.3f}" if self.ended else ""
        cells = str(self.number), self.name, self.state, calls + more, seconds, " ".join(map(str, self.workers)), error
        return tuple(" ".join(plain(cell).split()) for cell in cells)


class Stages(Sequence[StageInfo]):
    """The stages of a task, in order; none for a task that is no graph. ``print`` shows a table, and ``stages[stage]``
    is what became of a stage of the graph that was submitted.

    Of a graph with more than 1,000 stages these are the ones that failed, those that run, and then the first.

    :param numbers: in the submitted graph, in order, where its target did not need all of its stages.
    :param graph: that was submitted; None if that was another program.
    :param by_service: whether the service says how they are: those of a sealed call that its endpoint has not sealed.
    """

    def __init__(
        self,
        stages: Iterable[StageInfo] = (),
        *,
        numbers: Sequence[int] | None = None,
        graph: weakref.ref[Graph] | None = None,
        by_service: bool = False,
    ) -> None:
        self._stages = tuple(stages)
        self.by_service: bool = by_service
        self._numbers = numbers
        self._graph = graph

    def __len__(self) -> int:
        return len(self._stages)

    @overload
    def __getitem__(self, at: int | StageHandle[Any]) -> StageInfo: ...

    @overload
    def __getitem__(self, at: slice) -> Stages: ...

    def __getitem__(self, at: int | slice | StageHandle[Any]) -> StageInfo | Stages:
        """:raises IndexError: for a stage that the task does not have, or that is not among these.
        :raises ValueError: for a stage of another graph.
        """
        if isinstance(at, StageHandle):
            return self._of(at)
        if isinstance(at, slice):
            return Stages(self._stages[at], numbers=self._numbers, graph=self._graph, by_service=self.by_service)
        return self._stages[at]

    def _of(self, handle: StageHandle[Any]) -> StageInfo:
        number = handle.number
        if self._graph is not None and self._graph() is not handle.graph:
            raise ValueError(f"stage {number} ({handle.name}) is a stage of another graph")
        if self._numbers is not None:
            place = bisect.bisect_left(self._numbers, number)
            number = place if self._numbers[place : place + 1] == [number] else -1
        found = bisect.bisect_left(self._stages, number, key=lambda each: each.number)
        if self._stages[found : found + 1] and self._stages[found].number == number:
            return self._stages[found]
        raise IndexError(f"stage {handle.number} ({handle.name}) is not among the {len(self)} stages of the task")

    def __eq__(self, other: object) -> bool:
        return self._stages == other._stages if isinstance(other, Stages) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._stages)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The table: a heading, and a row for each stage."""
        return [_COLUMNS, *(each._row() for each in self._stages)]

    def __str__(self) -> str:
        if not self._stages:
            return "(no stages)"
        rows = self.rows
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join([*(line.rstrip() for line in lines), *([f"({BY_SERVICE})"] if self.by_service else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        shown = [
            {**dict(zip(_COLUMNS, each._row(), strict=True)), "started": local_time(each.started_at)}
            for each in self._stages
        ]
        return table(shown) + (f"<p>{BY_SERVICE}</p>" if self.by_service else "")


def stages_of(
    details: Mapping[str, Any],
    load: LoadValue,
    *,
    numbers: Sequence[int] | None = None,
    graph: weakref.ref[Graph] | None = None,
) -> Stages:
    """The stages in the details of a task, which its endpoint wrote; none if they cannot be read.

    :param load: reads values.
    :param numbers, graph: as of :class:`Stages`.
    """
    found = details.get("stages")
    if not found:
        return Stages()
    # Here: msgspec takes as long to load as all the rest.
    import msgspec

    from farcall_common.graphs import StageState
    from farcall_common.payload import task_error

    try:
        states = sorted(msgspec.convert(found, list[StageState]), key=lambda each: each.number)
        errors = [ErrorRecord.from_json(each.error) if each.error else None for each in states]
    except (msgspec.ValidationError, TypeError, ValueError, KeyError):
        return Stages()
    values = details.get("values")
    kept: Mapping[str, Any] = values if isinstance(values, Mapping) else {}

    def info(state: StageState, record: ErrorRecord | None) -> StageInfo:
        fields = msgspec.structs.asdict(state)
        error = task_error(record, expected=TaskFailed) if record else None
        fields["error"] = error if isinstance(error, TaskFailed) else None
        text = kept.get(str(state.number))
        if isinstance(text, str):
            what = f"the value of stage {state.number} ({state.name})"
            fields["_value"] = lambda: load(_decoded(text, what), what)
        return StageInfo(**fields)

    infos = (info(state, record) for state, record in zip(states, errors, strict=True))
    return Stages(infos, numbers=numbers, graph=graph, by_service="stages" in unsigned_of(details))


def _decoded(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DeserializationError(f"{what} cannot be read: {error}") from error
