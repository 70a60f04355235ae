"""Stages as values of a program: in place of arguments, and in the target that is submitted. ``import farcall`` loads
this module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NoReturn, Protocol, TypeVar, overload

T = TypeVar("T")

Path = tuple[int | str, ...]

#: For those who submit a graph or a stage as a function.
SUBMIT_HINT: Final = "A graph is submitted with what it is to return: executor.submit(graph, stage)."

_MAX_DEPTH: Final = 50
_IMMUTABLE: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_LARGEST: Final = 2**63


class StagesByNumber(Protocol):
    """A graph."""

    def __len__(self) -> int: ...

    def name_of(self, number: int, /) -> str:
        """The name of a stage."""


class StageHandle(Generic[T]):
    """A stage of a graph, in place of its value: an argument of later stages, and what is submitted in the end.

    It may be an argument, or anywhere inside lists, tuples and dictionaries of arguments.
    """

    __slots__ = ("graph", "number")

    farcall_hint_if_called: ClassVar[str] = SUBMIT_HINT

    def __init__(self, graph: StagesByNumber, number: int) -> None:
        self.graph: StagesByNumber = graph
        self.number: int = number

    @property
    def name(self) -> str:
        """The name of the stage: that of its function, if it got none."""
        return self.graph.name_of(self.number)

    def __repr__(self) -> str:
        return f"<stage {self.number} ({self.name}) of a graph of {len(self.graph)}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"stage {self.number} ({self.name}) has no value before the graph runs: pass it as an argument of "
            "graph.call, or inside lists, tuples and dictionaries of arguments, before the call that gets it"
        )

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"stage {self.number} ({self.name}) is neither true nor false before the graph runs: compare it with None, "
            "or decide in a function of the graph"
        )

    if not TYPE_CHECKING:  # checkers would take it for a sequence

        def __iter__(self) -> NoReturn:
            self.__getitem__(0)

        def __getitem__(self, at: object) -> NoReturn:
            raise TypeError(
                f"stage {self.number} ({self.name}) has no elements before the graph runs: graph.map(f, stage) makes a "
                "call for each of them, graph.call(operator.getitem, stage, 0) gets one"
            )


class StageList(Sequence[StageHandle[T]]):
    """The stages that :meth:`Graph.map` made, as a list. As an argument it is the list of their values."""

    __slots__ = ("_handles",)

    farcall_hint_if_called: ClassVar[str] = SUBMIT_HINT

    def __init__(self, handles: Iterable[StageHandle[T]]) -> None:
        self._handles: tuple[StageHandle[T], ...] = tuple(handles)

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


class ArgumentScan:
    """Finds the stages among the arguments of a call."""

    def __init__(self, graph: StagesByNumber, name: str) -> None:
        self.graph = graph
        self._name = name
        self.inputs: list[tuple[int, Path, bool]] = []
        """Number of the stage, place in the arguments, and whether each element is a call: never, here."""
        self.is_constant = True
        """Whether nothing in the arguments can be changed."""

    @property
    def where(self) -> str:
        """The stage to come, in words."""
        return f"stage {len(self.graph)} ({self._name})"

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with None in the places of stages.

        :raises TypeError: for a stage where no value can be put.
        :raises ValueError: for a stage of another graph.
        """
        taken = tuple(
            [value if type(value) in _IMMUTABLE else self._take(value, (at,)) for at, value in enumerate(args)]
        )
        return taken, {name: self._take(value, (name,)) for name, value in kwargs.items()} if kwargs else kwargs

    def number_of(self, handle: StageHandle[Any]) -> int:
        """The number of a stage.

        :raises ValueError: if it is a stage of another graph.
        """
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


def form_of(target: object, graph: StagesByNumber, leaves: list[int], depth: int = 0) -> Callable[[Any], Any]:
    """Collects the stages in a target, and returns what puts their values, as a list, into its form."""
    if isinstance(target, StageHandle):
        if target.graph is not graph:
            raise ValueError(f"graph: the target, stage {target.number} ({target.name}), is a stage of another graph")
        at = len(leaves)
        leaves.append(target.number)
        return lambda values: values[at]
    if depth < _MAX_DEPTH:
        if type(target) is dict:
            named = {key: form_of(each, graph, leaves, depth + 1) for key, each in target.items()}
            return lambda values: {key: form(values) for key, form in named.items()}
        if type(target) in (list, tuple, StageList):
            forms = [form_of(each, graph, leaves, depth + 1) for each in target]  # type: ignore[attr-defined]
            if type(target) is tuple:
                return lambda values: tuple(form(values) for form in forms)
            return lambda values: [form(values) for form in forms]
    raise TypeError(
        f"graph: the target: expected a stage, or a list, tuple or dictionary of stages, got {type(target).__name__}"
    )
