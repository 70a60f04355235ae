"""Graph building: calls that get the values of other calls, written down before any of them runs.

Nothing is sent and nothing is packed here: :mod:`farcall_common.graph_packing` does that when a graph is submitted.
This module loads nothing: ``import farcall`` loads it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar, Unpack, overload

from farcall_common.chains import Chain, is_decorated, name_of
from farcall_common.graph_handles import SUBMIT_HINT, ArgumentScan, Path, StageHandle, StageList, form_of

if TYPE_CHECKING:
    from farcall_common.task_options import StageOptionsDict

T = TypeVar("T")

When = int | Literal["all", "any"]

#: As :data:`farcall_common.graphs.MAX_STAGES`.
MAX_STAGES: Final = 100_000
_NO_OPTIONS: Final[Mapping[str, Any]] = {}
#: What stages have in place of the option ``container``.
_REGISTERED: Final = (
    "A registered environment is named by container where the function is registered, or for the whole graph: "
    "executor.options(container=...)."
)
#: Targets of a graph that are remembered.
_PLANS: Final = 4


class Stage:
    """A call of a graph as it was written.

    :param function: None: the value is the list of the inputs.
    :param args, kwargs: with None in the places of inputs.
    :param inputs: number of the stage, place in the arguments, and whether each element of its value is a call.
    :param needs: as in :class:`farcall_common.graphs.Stage`.
    :param options: as keyword arguments; empty: those of the task.
    :param is_constant: whether the arguments cannot change until the graph is submitted again.
    """

    __slots__ = ("args", "function", "inputs", "is_constant", "kwargs", "name", "needs", "options", "packed")

    def __init__(
        self,
        function: Callable[..., Any] | None,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: tuple[tuple[int, Path, bool], ...],
        needs: int,
        options: Mapping[str, Any],
        is_constant: bool,
    ) -> None:
        self.function = function
        self.name = name
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.needs = needs
        self.options = options
        self.is_constant = is_constant
        #: What :mod:`farcall_common.graph_packing` made of constant arguments, and for which packer.
        self.packed: tuple[object, bytes, Any] | None = None


class Plan:
    """Plan of a target: the stages that it needs, in order.

    :param numbers: numbers of the stages in the graph.
    :param output: index in ``stages`` of the stage that has the result.
    :param rebuild: converts the result to the form of the target, if they differ.
    """

    __slots__ = ("functions", "inputs", "is_constant", "numbers", "output", "payloads", "rebuild", "stages")

    def __init__(
        self,
        numbers: Sequence[int],
        stages: Sequence[Stage],
        inputs: Sequence[tuple[tuple[int, Path, bool], ...]],
        output: int,
    ) -> None:
        self.numbers: Sequence[int] = numbers
        self.stages: Sequence[Stage] = stages
        self.inputs: Sequence[tuple[tuple[int, Path, bool], ...]] = inputs
        self.output: int = output
        self.rebuild: Callable[[Any], Any] | None = None
        #: Each function once, in the order of their first stages.
        self.functions = list(
            {id(each.function): each.function for each in stages if each.function is not None}.values()
        )
        #: Whether no argument can have changed when it is submitted again.
        self.is_constant: bool = all(each.is_constant for each in stages)
        #: Payloads of former submits, for :mod:`farcall_common.graph_packing`.
        self.payloads: list[tuple[Any, Any]] = []

    def with_form(self, rebuild: Callable[[Any], Any]) -> Plan:
        """The same plan for a target of another form."""
        made = copy.copy(self)
        made.rebuild = rebuild
        return made

    @property
    def pruned_numbers(self) -> Sequence[int] | None:
        """The numbers, if the target does not need all stages up to the last one; else they are the places."""
        count = len(self.numbers) - (self.numbers[-1] == MAX_STAGES)
        return None if self.numbers[count - 1] == count - 1 else self.numbers

    def where(self, at: int) -> str:
        """A stage in words."""
        if self.numbers[at] == MAX_STAGES:
            return "the list of results"
        return f"stage {self.numbers[at]} ({self.stages[at].name})"


class GraphCalls:
    """Adds calls to a graph, with options."""

    _graph: Graph

    def __init__(self, *, name: str = "", needs: When = "all", options: Mapping[str, Any] = _NO_OPTIONS) -> None:
        self._name: str = name
        self._needs: When = needs
        self._options: Mapping[str, Any] = options
        #: Options of decorated functions together with these, by the function's identity.
        self._own: dict[int, tuple[Callable[..., Any], Mapping[str, Any]]] = {}

    def options(
        self, *, name: str | None = None, needs: When | None = None, **options: Unpack[StageOptionsDict]
    ) -> GraphView:
        """The graph with other options for calls: ``graph.options(walltime_s=60, needs=2).call(fit, a, b, c)``.

        What is not given is as it is here; at first, as the executor has it that the graph is submitted to. A decorated
        function has its own options, which come first.

        :param name: of the stage, for people; else that of the function.
        :param needs: with how many of its inputs the call starts: "all", "any" (one), or a number. Those that are
            missing then are left out of lists, and are None elsewhere.
        :param options: ``idempotent``, ``max_attempts``, ``walltime_s``, ``memory_bytes``, ``max_output_bytes``,
            ``retries``, ``retry_on``, ``retry_delay_s``, ``environment``, ``requirements``.
        :raises TypeError: for an option that stages do not have.
        :raises ValueError: for a value that an option cannot have.
        """
        _check_options(options)
        return GraphView(
            self._graph,
            name=self._name if name is None else _checked_name(name),
            needs=self._needs if needs is None else needs,
            options={**self._options, **options},
        )

    def call(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> StageHandle[T]:
        """Add a call, and return what stands for its value in the arguments of later ones.

        Stages may be arguments, or anywhere in lists, tuples and dictionaries of them. Of a :func:`chain`, each
        function is a stage.

        :raises TypeError: for what cannot be called, and for a stage in a place where no value can be put.
        :raises ValueError: for a stage of another graph, and with more than 100,000 stages.
        """
        first, *rest = function.functions if isinstance(function, Chain) else (function,)
        handle: StageHandle[Any] = self._add(first, args, kwargs, needs=self._needs)
        for each in rest:
            handle = self._add(each, (handle,), {}, needs="all")
        return handle

    @overload
    def map(
        self, function: Callable[..., T], first: StageHandle[Any], /, *iterables: Iterable[Any] | StageHandle[Any]
    ) -> StageHandle[list[T]]: ...

    @overload
    def map(self, function: Callable[..., T], first: Iterable[Any], /, *iterables: Iterable[Any]) -> StageList[T]: ...

    @overload
    def map(
        self, function: Callable[..., T], /, *iterables: Iterable[Any] | StageHandle[Any]
    ) -> StageList[T] | StageHandle[list[T]]: ...

    def map(
        self, function: Callable[..., T], /, *iterables: Iterable[Any] | StageHandle[Any]
    ) -> StageList[T] | StageHandle[list[T]]:
        """Add a call for each element, as the built-in ``map``.

        Iterables give a stage for each element, and these as a list. If one of the arguments is a stage, so is the
        answer: how many calls it makes is known when the graph runs, its value is the list of their results, and all
        arguments have to be stages.

        :raises TypeError, ValueError: as :meth:`call`.
        """
        if not iterables:
            raise TypeError("graph.map: expected iterables or stages after the function")
        if self._needs != "all":
            raise ValueError("graph.map: needs is an option of graph.call: each call of a map has all of its arguments")
        if not any(isinstance(each, StageHandle) for each in iterables):
            rows = zip(*iterables)  # noqa: B905 - the shortest ends it, as everywhere else
            return StageList(self.call(function, *row) for row in rows)
        first, *rest = function.functions if isinstance(function, Chain) else (function,)
        handle = self._add_map(first, [self._as_stage(each) for each in iterables])
        for each in rest:
            handle = self._add_map(each, [handle])
        return handle

    def _as_stage(self, iterable: Iterable[Any] | StageHandle[Any]) -> StageHandle[Any]:
        """A stage with the elements of an argument of a map, of which another is a stage."""
        if isinstance(iterable, StageHandle):
            return iterable
        if isinstance(iterable, StageList):
            scan = ArgumentScan(self._graph, "collect")
            return self._graph._append(_collecting(map(scan.number_of, iterable)))
        raise TypeError(
            f"graph.map: expected only stages, got {type(iterable).__name__}: the lengths of stages are known when the "
            "graph runs. Let a stage return it, too"
        )

    def _add(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, needs: When
    ) -> StageHandle[Any]:
        name, options = self._described(function)
        scan = ArgumentScan(self._graph, name)
        args, kwargs = scan.arguments(args, kwargs)
        has_elements = any(self._graph.has_elements(number) for number, _, _ in scan.inputs)
        wanted = _checked_needs(needs, len(scan.inputs), where=scan.where, is_least=has_elements)
        stage = Stage(function, name, args, kwargs, tuple(scan.inputs), wanted, options, scan.is_constant)
        return self._graph._append(stage)

    def _add_map(self, function: Callable[..., Any], handles: Sequence[StageHandle[Any]]) -> StageHandle[Any]:
        name, options = self._described(function)
        scan = ArgumentScan(self._graph, name)
        inputs = tuple((scan.number_of(handle), (at,), True) for at, handle in enumerate(handles))
        return self._graph._append(Stage(function, name, (None,) * len(handles), {}, inputs, 0, options, True))

    def _described(self, function: Any) -> tuple[str, Mapping[str, Any]]:
        """Name and options of a stage with a function."""
        if not callable(function):
            number = len(self._graph)
            raise TypeError(f"stage {number}: expected a function, got {type(function).__name__}")
        name = self._name or name_of(function)
        if not is_decorated(function):
            return name, self._options
        known = self._own.get(id(function))
        if known is None:
            given: Mapping[str, Any] = function.task_options
            own = {option: value for option, value in given.items() if option != "callees"}  # the task has those
            _check_options(own, subject=f"stage {len(self._graph)} ({name}): ")
            known = self._own[id(function)] = function, {**self._options, **own} if own else self._options
        return name, known[1]


class GraphView(GraphCalls):
    """A graph with other options for the calls to come; :meth:`Graph.options` makes it."""

    def __init__(self, graph: Graph, *, name: str, needs: When, options: Mapping[str, Any]) -> None:
        super().__init__(name=name, needs=needs, options=options)
        self._graph = graph


class Graph(GraphCalls):
    """Calls that get the values of other calls: one task, whose stages run where its endpoint has room.

    ::

        graph = Graph()
        text = graph.call(read, "corpus.txt")
        counts = graph.map(count_words, graph.call(split, text, 8))
        future = executor.submit(graph, graph.call(merge, counts))

    Adding calls sends nothing. Stages that a target does not need are not sent with it; a graph may be submitted again,
    with the same target or another one, also after more calls were added. Arguments are read when it is submitted. May
    be used from any thread.

    :param spread: whether calls go to as many workers as there are, even where one could make them one after the other.
    """

    farcall_hint_if_called: ClassVar[str] = SUBMIT_HINT

    def __init__(self, *, spread: bool = False) -> None:
        super().__init__()
        self.spread: bool = spread
        self._stages: list[Stage] = []
        self._lock = threading.Lock()
        self._plans: dict[int | tuple[int, ...], Plan] = {}

    @property
    def _graph(self) -> Graph:  # type: ignore[override]
        return self

    def __len__(self) -> int:
        return len(self._stages)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Graph of {len(self)} stages>"

    # -- what is submitted ---------------------------------------------------------------------------------------------

    def _plan(self, target: object) -> Plan:
        leaves: list[int] = []
        form = form_of(target, self, leaves)
        if not leaves:
            raise ValueError("graph: the target names no stage, so that nothing would run")
        is_stage = isinstance(target, StageHandle)
        is_flat = isinstance(target, list | StageList) and all(isinstance(each, StageHandle) for each in target)
        key = leaves[0] if is_stage else tuple(leaves)
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                while len(self._plans) >= _PLANS:
                    self._plans.pop(next(iter(self._plans)))
                plan = self._plans[key] = self._pruned(leaves, collect=not is_stage)
        return plan if is_stage or is_flat else plan.with_form(form)

    def _pruned(self, roots: Sequence[int], *, collect: bool) -> Plan:
        """The stages that some of them need; their inputs come before them."""
        stages = self._stages
        needed, waiting = {*roots}, [*roots]
        while waiting:
            for number, _, _ in stages[waiting.pop()].inputs:
                if number not in needed:
                    needed.add(number)
                    waiting.append(number)
        numbers = sorted(needed)
        place = {number: at for at, number in enumerate(numbers)}
        chosen = [stages[number] for number in numbers]
        inputs = [tuple((place[number], path, each) for number, path, each in stage.inputs) for stage in chosen]
        if collect:
            if len(chosen) >= MAX_STAGES:
                raise ValueError(f"graph: with the list of its results it has more than {MAX_STAGES:,} stages")
            chosen.append(_collecting(roots))
            numbers.append(MAX_STAGES)  # no stage of the graph
            inputs.append(tuple((place[number], (at,), False) for at, number in enumerate(roots)))
        return Plan(numbers, chosen, inputs, len(chosen) - 1 if collect else place[roots[0]])

    def _append(self, stage: Stage) -> StageHandle[Any]:
        with self._lock:
            number = len(self._stages)
            if number >= MAX_STAGES:
                raise ValueError(
                    f"graph: {stage.name} would be stage {number}; a graph has at most {MAX_STAGES:,} stages"
                )
            self._stages.append(stage)
        return StageHandle(self, number)

    def name_of(self, number: int) -> str:
        """The name of a stage."""
        return self._stages[number].name

    def has_elements(self, number: int) -> bool:
        """Whether only the run of a stage shows how many elements its value has."""
        return any(each for _, _, each in self._stages[number].inputs)


def plan_of(graph: Graph, target: object) -> Plan:
    """Return the plan of a target: a stage, or a list, tuple or dictionary of stages, which may be nested.

    :raises TypeError: for anything else.
    :raises ValueError: for a stage of another graph, and for an empty list.
    """
    return graph._plan(target)


def _collecting(numbers: Iterable[int]) -> Stage:
    """A stage whose value is the list of the values of others."""
    inputs = tuple((number, (at,), False) for at, number in enumerate(numbers))
    return Stage(None, "collect", (), {}, inputs, 0, _NO_OPTIONS, True)


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"graph.options: name: expected a text, got {type(name).__name__}")
    return name


def _checked_needs(needs: When, inputs: int, *, where: str, is_least: bool) -> int:
    """How many inputs a call needs; 0: all.

    :param is_least: whether it may have more than ``inputs``, which turns out when the graph runs.
    """
    if needs == "all":
        return 0
    count = 1 if needs == "any" else needs
    if type(count) is not int:
        raise TypeError(f'{where}: needs is {needs!r}; it is "all", "any" or a number')
    if count < 1:
        raise ValueError(f"{where}: needs is {count}, and has to be at least 1")
    if count > inputs and not is_least:
        raise ValueError(f"{where}: it needs {count} inputs, and has {inputs}")
    return count


def _check_options(options: Mapping[str, Any], *, subject: str = "") -> None:
    """:raises TypeError: for an option that a stage does not have."""
    if not options:
        return
    from farcall_common.task_options import (
        StageOptionsDict,
        TaskOptions,
        unknown_option,
    )  # here: msgspec takes long to load

    known = StageOptionsDict.__optional_keys__
    if unknown := sorted(options.keys() - known):
        message = unknown_option(unknown[0], {*known, "name", "needs"}, what="stages")
        raise TypeError(f"{subject}{message}" + (f" {_REGISTERED}" if unknown[0] == "container" else ""))
    if isinstance(environment := options.get("environment"), str):
        raise TypeError(f"{subject}environment: expected a dict, got {type(environment).__name__}. {_REGISTERED}")
    try:
        TaskOptions.of(**options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{subject}{error}") from None
