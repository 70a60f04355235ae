"""Graph building: calls that get the values of other calls, written down before any of them runs.

Nothing is sent and nothing is packed here: :mod:`farcall_common.graph_packing` does that when a graph is submitted.
This module loads nothing: ``import farcall`` loads it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NoReturn, ParamSpec, TypeVar, Unpack, overload

if TYPE_CHECKING:
    from farcall_common.task_options import StageOptionsDict

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")

Path = tuple[int | str, ...]
When = int | Literal["all", "any"]

#: As :data:`farcall_common.graphs.MAX_STAGES`.
MAX_STAGES: Final = 100_000
_MAX_DEPTH: Final = 50
_IMMUTABLE: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_NO_OPTIONS: Final[Mapping[str, Any]] = {}
_LARGEST: Final = 2**63
#: Targets of a graph that are remembered.
_PLANS: Final = 4


class StageHandle(Generic[T]):
    """A stage of a graph, in place of its value: an argument of later stages, and what is submitted in the end.

    It may be an argument, or anywhere inside lists, tuples and dictionaries of arguments.
    """

    __slots__ = ("graph", "number")

    def __init__(self, graph: Graph, number: int) -> None:
        self.graph = graph
        self.number = number

    @property
    def name(self) -> str:
        """The name of the stage: that of its function, if it got none."""
        return self.graph._stages[self.number].name

    def __repr__(self) -> str:
        return f"<stage {self.number} ({self.name}) of a graph of {len(self.graph)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"stage {self.number} ({self.name}) has no value before the graph runs: pass it as an argument of "
            "graph.call, or inside lists, tuples and dictionaries of arguments, before the call that gets it"
        )

    if not TYPE_CHECKING:  # checkers would take it for an iterable

        def __iter__(self) -> NoReturn:
            raise TypeError(
                f"stage {self.number} ({self.name}) has no elements before the graph runs: graph.map(f, stage) makes a "
                "call for each of them"
            )


class StageList(Sequence[StageHandle[T]]):
    """The stages that :meth:`Graph.map` made, as a list. As an argument it is the list of their values."""

    __slots__ = ("_handles",)

    def __init__(self, handles: Iterable[StageHandle[T]]) -> None:
        self._handles = tuple(handles)

    def __len__(self) -> int:
        return len(self._handles)

    @overload
    def __getitem__(self, at: int) -> StageHandle[T]: ...

    @overload
    def __getitem__(self, at: slice) -> StageList[T]: ...

    def __getitem__(self, at: int | slice) -> StageHandle[T] | StageList[T]:
        return StageList(self._handles[at]) if isinstance(at, slice) else self._handles[at]

    def __iter__(self) -> Iterator[StageHandle[T]]:
        return iter(self._handles)

    def __repr__(self) -> str:
        shown = f": {self._handles[0]!r} ..." if self._handles else ""
        return f"<{len(self)} stages{shown}>"


class Chain(Generic[P, T]):
    """Functions of which each gets what the one before returned, as :func:`chain` makes them. Calling it calls them."""

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        flat: list[Callable[..., Any]] = []
        for function in functions:
            if isinstance(function, Chain):
                flat += function.functions
            elif callable(function):
                flat.append(function)
            else:
                raise TypeError(f"chain: expected functions, got {type(function).__name__}")
        if not flat:
            raise TypeError("chain: there is no function to call")
        self.functions: tuple[Callable[..., Any], ...] = tuple(flat)
        self.__name__ = " | ".join(map(name_of, self.functions))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        first, *rest = self.functions
        value = first(*args, **kwargs)
        for function in rest:
            value = function(value)
        found: T = value
        return found

    def __repr__(self) -> str:
        return f"chain({', '.join(map(name_of, self.functions))})"


@overload
def chain(f: Callable[P, T], /) -> Chain[P, T]: ...


@overload
def chain(f: Callable[P, A], g: Callable[[A], T], /) -> Chain[P, T]: ...


@overload
def chain(f: Callable[P, A], g: Callable[[A], B], h: Callable[[B], T], /) -> Chain[P, T]: ...


@overload
def chain(f: Callable[P, A], g: Callable[[A], B], h: Callable[[B], C], i: Callable[[C], T], /) -> Chain[P, T]: ...


@overload
def chain(
    f: Callable[P, A], g: Callable[[A], B], h: Callable[[B], C], i: Callable[[C], D], j: Callable[[D], T], /
) -> Chain[P, T]: ...


@overload
def chain(*functions: Callable[..., Any]) -> Chain[..., Any]: ...


def chain(*functions: Callable[..., Any]) -> Chain[..., Any]:
    """Functions as one, of which each gets what the one before returned: ``chain(load, resize)(path)`` is
    ``resize(load(path))``.

    Submitted to an executor, it is one task, whose functions run side by side with those of other tasks. A graph takes
    it as a function, too.

    :raises TypeError: for anything that cannot be called.
    """
    return Chain(functions)


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
    """What has to run for a target: the stages that it needs, in order.

    :param numbers: of the stages in the graph.
    :param output: which of the stages has the result; the place in ``stages``.
    :param rebuild: makes the target's form out of the result, if that is another.
    """

    __slots__ = ("functions", "inputs", "numbers", "output", "payloads", "rebuild", "stages")

    def __init__(
        self,
        numbers: Sequence[int],
        stages: Sequence[Stage],
        inputs: Sequence[tuple[tuple[int, Path, bool], ...]],
        output: int,
    ) -> None:
        self.numbers = numbers
        self.stages = stages
        self.inputs = inputs
        self.output = output
        self.rebuild: Callable[[Any], Any] | None = None
        #: Each function once, in the order of their first stages.
        self.functions = list(
            {id(each.function): each.function for each in stages if each.function is not None}.values()
        )
        #: Payloads of former submits, for :mod:`farcall_common.graph_packing`.
        self.payloads: list[tuple[Any, Any]] = []

    def with_form(self, rebuild: Callable[[Any], Any]) -> Plan:
        """The same plan for a target of another form."""
        made = copy.copy(self)
        made.rebuild = rebuild
        return made

    def where(self, at: int) -> str:
        """A stage in words."""
        return f"stage {self.numbers[at]} ({self.stages[at].name})"


class _Calls:
    """Adds calls to a graph, with options."""

    _graph: Graph

    def __init__(self, *, name: str = "", needs: When = "all", options: Mapping[str, Any] = _NO_OPTIONS) -> None:
        self._name = name
        self._needs = needs
        self._options = options
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
            scan = _Scan(self._graph, "collect")
            return self._graph._append(_collecting(map(scan.number_of, iterable)))
        raise TypeError(
            f"graph.map: a {type(iterable).__name__} beside a stage, whose length is not known before the graph runs; "
            "let a stage return it, too"
        )

    def _add(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, needs: When
    ) -> StageHandle[Any]:
        name, options = self._described(function)
        scan = _Scan(self._graph, name)
        args, kwargs = scan.arguments(args, kwargs)
        wanted = _checked_needs(needs, len(scan.inputs), scan)
        stage = Stage(function, name, args, kwargs, tuple(scan.inputs), wanted, options, scan.is_constant)
        return self._graph._append(stage)

    def _add_map(self, function: Callable[..., Any], handles: Sequence[StageHandle[Any]]) -> StageHandle[Any]:
        name, options = self._described(function)
        scan = _Scan(self._graph, name)
        inputs = tuple((scan.number_of(handle), (at,), True) for at, handle in enumerate(handles))
        return self._graph._append(Stage(function, name, (None,) * len(handles), {}, inputs, 0, options, True))

    def _described(self, function: Any) -> tuple[str, Mapping[str, Any]]:
        """Name and options of a stage with a function."""
        if not callable(function):
            number = len(self._graph)
            raise TypeError(f"stage {number}: a {type(function).__name__} cannot be called; pass the function itself")
        name = self._name or name_of(function)
        if not is_decorated(function):
            return name, self._options
        known = self._own.get(id(function))
        if known is None:
            own: Mapping[str, Any] = getattr(function, "task_options", _NO_OPTIONS)
            _check_options(own, subject=f"stage {len(self._graph)} ({name}): ")
            known = self._own[id(function)] = function, {**self._options, **own} if own else self._options
        return name, known[1]


class GraphView(_Calls):
    """A graph with other options for the calls to come; :meth:`Graph.options` makes it."""

    def __init__(self, graph: Graph, *, name: str, needs: When, options: Mapping[str, Any]) -> None:
        super().__init__(name=name, needs=needs, options=options)
        self._graph = graph


class Graph(_Calls):
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

    def __init__(self, *, spread: bool = False) -> None:
        super().__init__()
        self.spread = spread
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

    def plan(self, target: object) -> Plan:
        """What has to run for a target: a stage, or a list, tuple or dictionary of them, which may be nested.

        :raises TypeError: for anything else.
        :raises ValueError: for a stage of another graph, and for an empty list.
        """
        leaves: list[int] = []
        form = _form_of(target, self, leaves, 0)
        if not leaves:
            raise ValueError("graph: the target names no stage, so that nothing would run")
        is_stage = isinstance(target, StageHandle)
        is_flat = isinstance(target, list | StageList) and len(target) == len(leaves)
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
            numbers.append(len(stages))
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

    def _has_elements(self, number: int) -> bool:
        """Whether the value of a stage has as many elements as turns out when it runs."""
        return any(each for _, _, each in self._stages[number].inputs)


def _collecting(numbers: Iterable[int]) -> Stage:
    """A stage whose value is the list of the values of others."""
    inputs = tuple((number, (at,), False) for at, number in enumerate(numbers))
    return Stage(None, "collect", (), {}, inputs, 0, _NO_OPTIONS, True)


class _Scan:
    """Finds the stages among the arguments of a call."""

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph = graph
        self._name = name
        self.inputs: list[tuple[int, Path, bool]] = []
        self.is_constant = True

    @property
    def where(self) -> str:
        return f"stage {len(self.graph)} ({self._name})"

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        taken = tuple(
            [value if type(value) in _IMMUTABLE else self._take(value, (at,)) for at, value in enumerate(args)]
        )
        return taken, {name: self._take(value, (name,)) for name, value in kwargs.items()} if kwargs else kwargs

    def number_of(self, handle: StageHandle[Any]) -> int:
        if handle.graph is not self.graph:
            raise ValueError(f"{self.where}: stage {handle.number} ({handle.name}) is a stage of another graph")
        return handle.number

    def _take(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        if kind is StageHandle:
            self.inputs.append((self.number_of(value), path, False))
            return None
        if kind is StageList:
            return [self._take(each, (*path, at)) for at, each in enumerate(value)]
        if len(path) < _MAX_DEPTH:
            if kind is list or kind is tuple:
                before, was_constant = len(self.inputs), self.is_constant
                self.is_constant = True
                taken = [
                    each if type(each) in _IMMUTABLE else self._take(each, (*path, at)) for at, each in enumerate(value)
                ]
                if len(self.inputs) == before:  # no stage is in it: it is the caller's
                    self.is_constant = self.is_constant and was_constant and kind is tuple
                    return value
                self.is_constant = self.is_constant and was_constant
                return taken if kind is list else tuple(taken)
            if kind is dict:
                before = len(self.inputs)
                items = {key: self._take_item(key, each, path) for key, each in value.items()}
                if len(self.inputs) == before:
                    self.is_constant = False
                    return value
                return items
            if kind in (set, frozenset) and any(isinstance(each, StageHandle) for each in value):
                raise TypeError(f"{self.where}: a stage is in a {kind.__name__}, which has no places; use a list")
        self.is_constant = False
        return value

    def _take_item(self, key: object, value: Any, path: Path) -> Any:
        before = len(self.inputs)
        known = type(key) is str or (type(key) is int and -_LARGEST <= key < _LARGEST)
        taken = self._take(value, (*path, key if known else ""))  # type: ignore[arg-type]
        if not known and len(self.inputs) > before:
            raise TypeError(
                f"{self.where}: a stage is in a dictionary under the key {key!r}; such keys have to be texts or "
                "integers of 64 bits"
            )
        return taken


def is_decorated(function: object) -> bool:
    """Whether a function has options of its own: the SDK's decorator makes those."""
    return bool(getattr(type(function), "farcall_decorated", False))


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function; of one without a name (a partial, an instance), that of its class."""
    given = is_decorated(function) and getattr(function, "registered_name", None)
    name = given or getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"graph.options: name: expected a text, got {type(name).__name__}")
    return name


def _checked_needs(needs: When, inputs: int, scan: _Scan) -> int:
    """How many inputs a call needs; 0: all."""
    if needs == "all":
        return 0
    count = 1 if needs == "any" else needs
    if type(count) is not int:
        raise TypeError(f'{scan.where}: needs is {needs!r}; it is "all", "any" or a number')
    if count < 1:
        raise ValueError(f"{scan.where}: needs is {count}, and has to be at least 1")
    if count > inputs and not any(scan.graph._has_elements(number) for number, _, _ in scan.inputs):
        raise ValueError(f"{scan.where}: it needs {count} inputs, and has {inputs}")
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
        raise TypeError(f"{subject}{message}")
    try:
        TaskOptions.of(**options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{subject}{error}") from None


def _form_of(target: object, graph: Graph, leaves: list[int], depth: int) -> Callable[[Any], Any]:
    """Collects the stages in a target, and returns what puts their values, as a list, into its form."""
    if isinstance(target, StageHandle):
        if target.graph is not graph:
            raise ValueError(f"graph: the target, stage {target.number} ({target.name}), is a stage of another graph")
        at = len(leaves)
        leaves.append(target.number)
        return lambda values: values[at]
    if depth < _MAX_DEPTH:
        if type(target) is dict:
            named = {key: _form_of(each, graph, leaves, depth + 1) for key, each in target.items()}
            return lambda values: {key: form(values) for key, form in named.items()}
        if type(target) in (list, tuple, StageList):
            forms = [_form_of(each, graph, leaves, depth + 1) for each in target]  # type: ignore[attr-defined]
            if type(target) is tuple:
                return lambda values: tuple(form(values) for form in forms)
            return lambda values: [form(values) for form in forms]
    raise TypeError(
        f"graph: the target has a {type(target).__name__}; expected a stage, or a list, tuple or dictionary of stages"
    )
