"""Inputs of a call: values of other calls, read where they lie and put into its arguments.

They are read with every strategy for data, whatever the endpoint allows for what submitters send, and where arguments
must be data, too: a worker of the same task has written them, from values that functions returned. Where submitters may
not send code, these are functions that the endpoint permits, and no submitter can choose the bytes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from farcall_common.errors import DeserializationError
from farcall_common.payload import Piece
from farcall_endpoint.contracts.manager_worker import CallOrder, InputOrder
from farcall_endpoint.host.shared_memory import Bytes, FrameList

_MISSING: Final = object()
Load = Callable[[Piece], Any]
"""Reads the value in a buffer."""


class Recalled(BaseException):
    """The manager has taken a call back that waited for its inputs."""


class Inputs(NamedTuple):
    """The inputs of an order, in the body of its packet from ``start`` on; those that other workers send are the
    answer of ``arrived``, which waits for them."""

    call: CallOrder
    body: Bytes | FrameList
    start: int
    arrived: Callable[[], Sequence[Bytes]] | None = None

    def read(self, load: Load) -> list[Any]:
        """Their values, in the order of the stage; one that is missing has a mark, for :func:`bound` and
        :func:`collected`.

        :raises DeserializationError: if one cannot be read here; says which.
        :raises Recalled: while it waits.
        """
        values: list[Any] = []
        at = self.start
        for order in self.call.inputs:
            if order.missing or order.awaited:
                values.append(_MISSING)
                continue
            parts: list[Any] = []
            for number, size in enumerate(order.parts):
                try:
                    parts.append(load(self.body[at : at + size]))
                except DeserializationError as error:
                    raise _unreadable(order, number, error) from error
                at += size
            values.append(parts if order.is_list else parts[0])
        if self.arrived is not None:  # last: as little as possible is left to do then
            awaited = [number for number, order in enumerate(self.call.inputs) if order.awaited]
            for number, buffer in zip(awaited, self.arrived(), strict=True):
                try:
                    values[number] = load(buffer)
                except DeserializationError as error:
                    raise _unreadable(self.call.inputs[number], 0, error) from error
        return values


def collected(values: Sequence[Any]) -> list[Any]:
    """The values, without those that are missing."""
    return [value for value in values if value is not _MISSING]


def bound(
    args: Sequence[Any], kwargs: Mapping[str, Any], orders: Sequence[InputOrder], values: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with values in their places. The containers on the way are copied; a value that is missing leaves its
    list, and is None elsewhere.

    :raises DeserializationError: if the arguments do not have one of the places.
    """
    if all(len(order.path) == 1 for order in orders):  # as most are
        return _placed(list(args), dict(kwargs), orders, values)
    positions: dict[Any, Any] = {}
    names: dict[Any, Any] = {}
    for order, value in zip(orders, values, strict=True):
        path = order.path
        tree = positions if isinstance(path[0], int) else names
        for key in path[:-1]:
            tree = tree.setdefault(key, {})
            if not isinstance(tree, dict):
                raise _no_place(order)
        if path[-1] in tree:
            raise _no_place(order)
        tree[path[-1]] = _Leaf(order, value)
    # A tuple, so that what is missing among positional arguments does not move the others.
    return list(_filled(tuple(args), positions)), _filled(dict(kwargs), names)


def _placed(
    args: list[Any], kwargs: dict[str, Any], orders: Sequence[InputOrder], values: Sequence[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The same for values that are arguments themselves."""
    taken: set[int | str] = set()
    for order, value in zip(orders, values, strict=True):
        [key] = order.path
        container: Any = kwargs
        if type(key) is int:
            container = args
            there = 0 <= key < len(args)
        else:
            there = key in kwargs
        if not there or key in taken:
            raise _no_place(order)
        taken.add(key)
        container[key] = None if value is _MISSING else value
    return args, kwargs


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    order: InputOrder
    value: Any


def _filled(container: Any, tree: Mapping[Any, Any]) -> Any:
    """A copy of a container, with the leaves of a tree in their places."""
    is_sequence = isinstance(container, list | tuple)
    items: Any = list(container) if is_sequence else copy.copy(container)
    left_out: list[int] = []
    for key, below in tree.items():
        if not (type(key) is int and 0 <= key < len(items) if is_sequence else _has_name(items, key)):
            raise _no_place(_first_leaf(below).order)
        if not isinstance(below, _Leaf):
            items[key] = _filled(items[key], below)
        elif below.value is not _MISSING:
            items[key] = below.value
        elif isinstance(container, list):
            left_out.append(key)
        else:
            items[key] = None
    for key in sorted(left_out, reverse=True):
        del items[key]
    if not is_sequence or type(container) is list:
        return items
    if isinstance(container, list):
        changed = copy.copy(container)
        changed[:] = items
        return changed
    make = getattr(type(container), "_make", tuple)  # of named tuples
    return make(items)


def _has_name(container: Any, key: int | str) -> bool:
    return isinstance(container, dict) and key in container


def _first_leaf(tree: Any) -> _Leaf:
    while not isinstance(tree, _Leaf):
        tree = next(iter(tree.values()))
    return tree


def place_of(order: InputOrder) -> str:
    """Describe the place of an input for display: ``argument 1[2]`` or ``argument 'names'[0]``. Arguments count from 1,
    positions in them from 0."""
    first, *below = order.path
    named = f"argument {first + 1}" if isinstance(first, int) else f"argument {first!r}"
    return named + "".join(f"[{key!r}]" for key in below)


def _unreadable(order: InputOrder, number: int, error: DeserializationError) -> DeserializationError:
    element = f", element {number}" if order.is_list else ""
    message = f"The value for {place_of(order)}{element} cannot be read: {error.record.message}"
    return DeserializationError(message, hint=error.hint)


def _no_place(order: InputOrder) -> DeserializationError:
    return DeserializationError(
        f"The call has no {place_of(order)}, or has it twice, to put the value of a stage there."
    )
