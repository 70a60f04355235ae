"""Stages of a graph that runs: what each of them waits for, and what has become of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from farcall_common.graphs import COLLECT, Input, Stage, StageState
from farcall_endpoint.host.shared_memory import Frame

WAITING: Final = 0
STARTED: Final = 1
"""The manager has the call, or the call waits for its retry."""
DONE: Final = 2
FAILED: Final = 3
DROPPED: Final = 4
"""The call will not run, or its value is not needed: an input is missing for good, or no call will read the value."""

_NO_UNITS: Final[list[int]] = []
"""List that all stages without units share. It stays empty."""
_MAX_WORKERS: Final = 8
"""Maximum number of workers, and of nodes, shown for a stage."""
MAX_NAME_CHARACTERS: Final = 200
"""Maximum length of a stage's name as it is shown."""
PROGRESS_PERIOD_S: Final = 0.25
"""Shortest time between two reports of the progress of a task's stages."""
_MAX_TEXT_CHARACTERS: Final = 4000
_MAX_BRIEF_CHARACTERS: Final = 200
_BRIEF: Final = ("code", "message", "fault", "exception_type")
_SHOWN: Final = (*_BRIEF, "hint", "retryable", "traceback", "attempt", "retries_used", "reasons")


class Failure(NamedTuple):
    """A call that failed for good, and its record."""

    stage: int
    element: int
    record: dict[str, Any]


class Edge(NamedTuple):
    """A dependency: the stage ``reader`` reads the value of another stage as its input ``number``."""

    reader: RunningStage
    number: int
    each: bool


class Runs:
    """The runs of calls, of all attempts: epoch seconds of the first start and the last end, seconds together, and
    process ids and nodes of the first few workers. ``retries``: starts beyond the first of each call; ``value_bytes``:
    of their values."""

    __slots__ = ("ended_at", "nodes", "retries", "run_s", "started_at", "value_bytes", "workers")

    def __init__(self) -> None:
        self.retries = 0
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.run_s = 0.0
        self.value_bytes = 0
        self.workers: tuple[int, ...] = ()
        self.nodes: tuple[str, ...] = ()

    def note_start(self, at: float) -> None:
        """Record that a call has been running since ``at``, in epoch seconds."""
        self.started_at = at if self.started_at is None else min(self.started_at, at)

    def note_run(self, started_at: float | None, ended_at: float | None, pid: int, node: str = "") -> None:
        """Record that a call ran between two instants, in epoch seconds.

        :param node: node of the manager that ran the call; empty: the manager of the graph.
        """
        if pid and node not in self.nodes and len(self.nodes) < _MAX_WORKERS:
            self.nodes = (*self.nodes, node)
        if started_at is not None and ended_at is not None:
            self.note_start(started_at)
            self.ended_at = ended_at if self.ended_at is None else max(self.ended_at, ended_at)
            self.run_s += ended_at - started_at
        if pid and pid not in self.workers and len(self.workers) < _MAX_WORKERS:
            self.workers = (*self.workers, pid)


class RunningStage(Runs):
    """State of a stage while its graph runs.

    A call that waits counts units: a unit is an input, or one element of an input where ``needs`` counts elements.

    ``size``: number of calls, -1 for a map that waits for the number of elements. ``calls``: state of each call.
    ``parts``: parts of the value; None until their number is known. ``uses``: for each part, the number of unfinished
    calls that read it; ``held``: the same number for the whole value, until its parts are known. ``got`` and ``lost``:
    units by call, of inputs that a map reads by element; ``whole_got`` and ``whole_lost`` count all other units.
    """

    __slots__ = (
        "by_element",
        "calls",
        "cause",
        "done",
        "each_total",
        "ended",
        "failed",
        "got",
        "held",
        "is_list",
        "is_map",
        "is_over",
        "is_skipped",
        "is_spread",
        "lost",
        "needs",
        "number",
        "parts",
        "pending",
        "readers",
        "running",
        "size",
        "sources",
        "spec",
        "taken",
        "unsized",
        "uses",
        "whole_got",
        "whole_lost",
        "whole_orders",
        "whole_total",
    )

    def __init__(self, number: int, spec: Stage) -> None:
        super().__init__()
        self.number = number
        self.spec = spec
        self.needs = spec.needs
        self.is_map = spec.is_map
        self.by_element = spec.needs > 0 and not self.is_map
        self.readers: list[Edge] = []
        self.sources: list[tuple[RunningStage, Input]] = []
        self.size = -1 if self.is_map else 1
        self.calls = bytearray(0 if self.is_map else 1)
        self.running = self.ended = self.done = self.failed = 0
        self.held = 0
        self.parts: list[Frame | None] | None = None
        self.is_list = self.is_map
        self.uses: list[int] = _NO_UNITS
        self.pending = 0  # inputs that a map reads by element, and whose elements are not counted
        self.unsized = 0  # inputs whose units are not counted
        self.each_total = 0
        self.whole_total = self.whole_got = self.whole_lost = 0
        self.got: list[int] = _NO_UNITS
        self.lost: list[int] = _NO_UNITS
        #: By call, if it needs not all: parts of each input.
        self.taken: dict[int, list[Sequence[int] | None]] | None = {} if spec.needs else None
        self.whole_orders: dict[int, Any] | None = {} if self.is_map else None
        self.is_over = False
        self.is_skipped = False
        self.is_spread = False  # whether the elements of its value go to calls one by one, though it is no map
        self.cause: Failure | None = None

    @property
    def collects(self) -> bool:
        """Whether its value is the list of its inputs."""
        return self.spec.function == COLLECT

    def has_part(self, number: int) -> bool:
        """Whether a part of its value is there."""
        return self.calls[number if self.is_map else 0] == DONE

    def has_value_for(self, spec: Input, element: int) -> bool:
        """Whether the part that a call reads is there; of a whole value, all parts."""
        if self.parts is None:
            return False
        return self.has_part(element) if spec.each else not self.is_map or self.done == self.size

    def is_lost(self, number: int) -> bool:
        """Whether a part of its value, whose number is known, will never be there."""
        return self.calls[number if self.is_map else 0] > DONE

    def state(self, *, node: str, end: str, is_brief: bool = False) -> StageState:
        """For people.

        :param end: the state of a stage that is not over, if the graph is; else empty.
        :param is_brief: whether its error is shown without the traceback.
        """
        if self.is_over:
            if self.failed:
                state = "failed"
            elif self.done == self.size:
                state = "done"
            else:
                state = "skipped" if self.is_skipped or self.cause is None else "cancelled"
        elif end:
            state = "failed" if self.failed else end
        else:
            # Calls that wait for a worker, or were made ahead, do not run.
            state = "running" if self.ended or (self.running and self.started_at is not None) else "waiting"
        failure = self.cause
        return StageState(
            number=self.number,
            name=self.spec.name[:MAX_NAME_CHARACTERS],
            state=state,
            calls=max(0, self.size),
            ended=self.done + self.failed,
            failed=self.failed,
            retries=self.retries,
            started_at=self.started_at,
            ended_at=self.ended_at,
            run_s=self.run_s,
            value_bytes=self.value_bytes,
            workers=self.workers,
            node=", ".join(dict.fromkeys(each or node for each in self.nodes)),
            error=shown_error(failure.record, is_brief=is_brief)
            if failure is not None and failure.stage == self.number
            else None,
        )


def shown_error(record: Mapping[str, Any], *, is_brief: bool = False) -> dict[str, Any]:
    """The part of an error record that is shown with a stage: there may be many, and the exception is in one only."""
    most = _MAX_BRIEF_CHARACTERS if is_brief else _MAX_TEXT_CHARACTERS
    names = _BRIEF if is_brief else _SHOWN
    shown: dict[str, Any] = {}
    for name in names:
        value = record.get(name)
        if isinstance(value, str):
            value = value[-most:] if name == "traceback" else value[:most]
        if value is not None:
            shown[name] = value
    return shown
