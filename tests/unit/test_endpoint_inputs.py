"""Inputs of calls: where values go in arguments."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common import graphs
from farcall_common.errors import DeserializationError
from farcall_endpoint.contracts.manager_worker import MOST_ELEMENTS, CallOrder, InputOrder
from farcall_endpoint.worker.inputs import Inputs, bound, collected, place_of
from farcall_endpoint.worker.values import elements_of

Pair = collections.namedtuple("Pair", "left right")


def put(args: tuple[Any, ...], kwargs: dict[str, Any], *inputs: tuple[InputOrder, Any]) -> Any:
    return bound(args, kwargs, [order for order, _ in inputs], [value for _, value in inputs])


def missing(*orders: InputOrder) -> list[Any]:
    return Inputs(CallOrder(orders), b"", 0).read(lambda _: None)


def test_values_go_to_positions_names_and_places_inside_containers() -> None:
    inner = [None, 1]
    args = (None, inner, (None, {"a": None}), Pair(None, 2))
    kwargs = {"x": None, "y": {"deep": [0, (None,)]}}
    paths: list[tuple[int | str, ...]] = [(0,), (1, 0), (2, 0), (2, 1, "a"), (3, 0), ("x",), ("y", "deep", 1, 0)]
    got, named = put(args, kwargs, *[(InputOrder(path), f"v{number}") for number, path in enumerate(paths)])
    assert got == ["v0", ["v1", 1], ("v2", {"a": "v3"}), Pair("v4", 2)]
    assert type(got[3]) is Pair
    assert named == {"x": "v5", "y": {"deep": [0, ("v6",)]}}
    assert inner == [None, 1]


def test_a_container_in_two_places_is_filled_in_each() -> None:
    shared = [None, None]
    got, _ = put((shared, shared), {}, (InputOrder((0, 0)), 1), (InputOrder((1, 1)), 2))
    assert got == [[1, None], [None, 2]]


def test_missing_inputs_leave_lists_and_are_none_elsewhere() -> None:
    orders = [InputOrder(path, missing=True) for path in ((0, 0), (0, 2), (1, 0), (2,), (3, "k"), ("n",))]
    values = missing(*orders)
    args, kwargs = bound(([None, "b", None, "d"], (None,), None, {"k": None}), {"n": None}, orders, values)
    assert args == [["b", "d"], (None,), None, {"k": None}]
    assert kwargs == {"n": None}
    assert collected(["a", *values, "b"]) == ["a", "b"]


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), unique_by=lambda pair: pair[0]))
def test_a_list_keeps_the_order_of_those_that_are_there(places: list[tuple[int, bool]]) -> None:
    orders = [InputOrder((0, place), missing=gone) for place, gone in places]
    values = [missing(order)[0] if order.missing else place for order, (place, _) in zip(orders, places, strict=True)]
    args, _ = bound(([None] * 10,), {}, orders, values)
    given_places, gone = dict(places), {place for place, is_gone in places if is_gone}
    assert args == [[place if place in given_places else None for place in range(10) if place not in gone]]


@pytest.mark.parametrize(
    "path", [(3,), (-1,), ("z",), (0, 5), (0, "a"), (1, 0), (1, "b"), (2, 0), ("x", 0), (0, 0, 0), (True,)]
)
def test_a_place_that_the_call_does_not_have(path: tuple[int | str, ...]) -> None:
    with pytest.raises(DeserializationError, match="The call has no argument"):
        put(([None], {"a": None}, 7), {"x": None}, (InputOrder(path), 1))


@pytest.mark.parametrize("paths", [((0,), (0,)), ((0,), (0, 1)), ((0, 1), (0,))])
def test_two_values_for_one_place(paths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(DeserializationError, match="twice"):
        put(([None, None],), {}, *[(InputOrder(path), 1) for path in paths])


def test_parts_are_read_in_order_and_a_part_that_cannot_be_read_is_named() -> None:
    orders = (InputOrder((0,), (1, 2), is_list=True), InputOrder(("x", 3), missing=True), InputOrder(("x", 1), (3,)))
    inputs = Inputs(CallOrder(orders), b"..abbccc", 2)
    values = inputs.read(lambda piece: bytes(piece).decode())
    assert values[::2] == [["a", "bb"], "ccc"]

    def refuse(piece: object) -> None:
        if bytes(piece) == b"bb":  # type: ignore[call-overload]
            raise DeserializationError("It belongs to another Python.", hint="Use one.")

    with pytest.raises(
        DeserializationError, match=r"The value for argument 1, element 1 cannot be read: It belongs"
    ) as info:
        inputs.read(refuse)
    assert info.value.hint == "Use one."
    assert place_of(orders[2]) == "argument 'x'[1]"


@pytest.mark.parametrize(
    ("value", "described"), [(7, "an int"), (None, "None"), (1.5, "a float"), (object(), "an object")]
)
def test_a_value_without_elements_is_named(value: object, described: str) -> None:
    def split() -> None: ...

    with pytest.raises(TypeError, match=f"^split returned {described}, which has no elements"):
        elements_of(value, split)


def test_elements_have_the_bound_of_calls() -> None:
    assert MOST_ELEMENTS == graphs.MAX_CALLS
    assert elements_of({"a": 1, "b": 2}, dict) == ["a", "b"]

    class Endless:
        def __iter__(self) -> Endless:
            return self

        def __next__(self) -> int:
            return 1

    with pytest.raises(ValueError, match="1,000,000 elements"):
        elements_of(Endless(), Endless)
