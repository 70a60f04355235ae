"""Classes that arrived by value, and the state that each has now.

A class keeps one identity in a process, so that ``isinstance`` stays true, whatever its state was when it was sent.
Its version says which state that was. A function that was read earlier brings its state back before it runs again
(:func:`restore`). A program's own classes never change when a value is read.

Without cloudpickle: workers whose tasks have no classes import only this.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from farcall_common.payload.snapshot import Snapshot

VERSION: Final = "farcall_version"
"""Key of the version of a state; absent for the first one."""
MEMBERS: Final = "farcall_members"
"""Key of the attributes of an enum's members, by the name of the member."""


class State(NamedTuple):
    """State of a class: its attributes, and what else there is to know of it under the keys above."""

    cls: type
    attributes: Mapping[str, Any]
    more: Mapping[str, Any]


class Sent(NamedTuple):
    """Snapshot of one of the program's own classes when it was sent, and a number that is larger for later ones."""

    order: int
    snapshot: Snapshot


class _Reading(threading.local):
    """State of reading in this thread. ``states``: those found so far, if a caller collects them. ``keeps``: as
    :func:`keeping` has it."""

    states: list[State] | None = None
    keeps: bool = False


_reading: Final = _Reading()
#: For each class: its state now; None until it has one.
_states: Final[weakref.WeakKeyDictionary[type, tuple[str, Sequence[str]] | None]] = weakref.WeakKeyDictionary()
#: The program's own classes. A worker forgets after each task: tasks may make many.
sent: Final[dict[type, Sent]] = {}


def add(cls: Any) -> None:
    """Remember a class that was made by a reader."""
    _states[cls] = None


def has_arrived(cls: Any) -> bool:
    """Whether a reader made this class: it is not one of the program's own."""
    return isinstance(cls, type) and cls in _states


def version_of(cls: type) -> str:
    """The version of the state that a class arrived with; empty for the first one."""
    state = _states.get(cls)
    return "" if state is None else state[0]


def set_state(state: State) -> None:
    """Give a class the state that was read for it, unless the class is the program's own."""
    if state.cls not in _states or (_reading.keeps and _states[state.cls] is not None):
        return
    if _reading.states is not None:
        _reading.states.append(state)
    _apply(state)


@contextlib.contextmanager
def collected() -> Iterator[list[State]]:
    """Collect the states of classes that this thread reads."""
    before, _reading.states = _reading.states, []
    try:
        yield _reading.states
    finally:
        _reading.states = before


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Leave classes as they are in this thread, unless they are new."""
    before, _reading.keeps = _reading.keeps, True
    try:
        yield
    finally:
        _reading.keeps = before


def restore(states: Iterable[State]) -> None:
    """Give classes these states again, where they have others now."""
    for state in states:
        if version_of(state.cls) != state.more.get(VERSION, ""):
            _apply(state)


def _apply(state: State) -> None:
    cls, attributes, more = state
    version = more.get(VERSION, "")
    now = _states.get(cls)
    if now is not None and now[0] != version:
        for name in now[1]:
            if name not in attributes:
                with contextlib.suppress(AttributeError, TypeError):  # of the class, which may forbid it
                    delattr(cls, name)
    _states[cls] = (version, tuple(attributes))
    for name, value in attributes.items():
        if name == "_abc_impl":
            for each in value:
                cls.register(each)  # type: ignore[attr-defined]  # of an abstract class
        else:
            setattr(cls, name, value)
    if "__firstlineno__" in attributes:  # Python 3.13 deletes it with each attribute that is set
        setattr(cls, "__firstlineno__", attributes["__firstlineno__"])  # noqa: B010
    members = more.get(MEMBERS)
    if members:
        for name, own in members.items():
            vars(cls.__members__[name]).update(own)  # type: ignore[attr-defined]  # of an enum
