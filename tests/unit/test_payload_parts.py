"""Errors name the argument, variable or attribute that is too large or cannot be sent."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from farcall._functions import FunctionTable as Handles
from farcall_common.errors import PayloadTooLarge, SerializationError
from farcall_common.limits import MAX_FUNCTION_BYTES
from farcall_common.payload import Serializer
from farcall_common.payload.functions import FunctionTable
from farcall_common.payload.parts import failing_part, largest_part
from farcall_endpoint.engine.graphs import pack_payload

LARGE = b"x" * MAX_FUNCTION_BYTES
SMALL = [1]


class Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("it cannot be pickled")


def helper() -> int:
    return len(LARGE) + len(SMALL)


def with_helper() -> int:
    return helper()


def with_default(x: Any = (1, LARGE)) -> Any:
    return x


def around(value: object) -> Callable[[], object]:
    return lambda: value


class Job:
    def __init__(self) -> None:
        self.state = {"lock": Unsendable(), "number": 1}


@pytest.mark.parametrize(
    ("function", "variable"),
    [
        (with_helper, "global 'helper', global 'LARGE' (bytes)"),
        (with_default, "default of 'x', item 1 (bytes)"),
        (around(LARGE), "variable 'value' of the function around it (bytes)"),
        (functools.partial(around, LARGE), "argument 1 (bytes)"),
    ],
)
def test_function_that_is_too_large_names_the_variable(function: Callable[..., Any], variable: str) -> None:
    with pytest.raises(PayloadTooLarge) as caught:
        Handles().handle(function)
    assert f"most of it {variable}; the limit is 3.5 MiB" in caught.value.record.message


@pytest.mark.parametrize("table", [FunctionTable().get, Handles(Serializer()).handle])
def test_function_that_cannot_be_sent_names_the_variable(table: Callable[..., Any]) -> None:
    with pytest.raises(SerializationError, match=r"variable 'value' of the function around it.*Unsendable"):
        table(around([Unsendable()]))


def test_argument_that_cannot_be_sent_is_named_with_its_attribute() -> None:
    where = r"argument 2 \(Job\), attribute 'state', key 'lock' \(Unsendable\): "
    with pytest.raises(SerializationError, match=where):
        pack_payload((1, Job()), {})
    with pytest.raises(SerializationError, match=r"argument 'job' \(Unsendable\): "):
        pack_payload((), {"job": Unsendable()})


def test_values_without_such_a_part_have_none() -> None:
    assert failing_part(Job(), lambda _: False) == ""
    assert largest_part([1] * 10, lambda value: 10 if isinstance(value, list) else 1) == ""
    assert failing_part(threading.Lock(), lambda _: True) == ""


def numbers() -> Any:
    yield 1


@pytest.mark.parametrize("get", [FunctionTable().get, Handles().handle])
def test_a_stage_of_a_graph_may_be_a_generator_function(get: Callable[..., Any]) -> None:
    """A map goes over what it yields."""
    with pytest.raises(SerializationError, match="is a generator function"):
        get(numbers)
    assert get(numbers, is_stage=True)
