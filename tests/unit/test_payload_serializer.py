"""Serializer: choice of strategies, allowed strategies, errors."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import json
import math
import operator
import os.path
import sys
import threading
import types
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import farcall_common.payload as payload
from farcall_common.errors import ConfigurationError, DeserializationError, ErrorRecord, Fault, SerializationError
from farcall_common.payload import (
    BINARY_DATA,
    STRATEGIES,
    AllCodeStrategies,
    AllDataStrategies,
    CloudPickleCode,
    CloudPickleDataBase64,
    DillCode,
    DillDataBase64,
    JSONData,
    PickleDataBase64,
    Piece,
    PureSourceTextInspect,
    Serializer,
    Strategy,
    parse_allowed,
    strategy_named,
)

serializer = Serializer()

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.fractions()
)
hashables = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=4)
    ),
    max_leaves=12,
)


@dataclasses.dataclass(frozen=True)
class Point:
    x: int


class Colour(enum.Enum):
    RED = 1


class Text(str):
    __slots__ = ()


def strategy_of(buffer: Piece) -> str:
    return bytes(buffer).partition(b"\n")[0].decode()


def same(one: object, other: object) -> bool:
    """Equal in type too: 1, 1.0 and True are three things, and so are 0.0 and -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return same([*one], [*other]) and same([*one.values()], [*other.values()])
    return one == other if isinstance(one, set | frozenset) else repr(one) == repr(other)


@given(values)
@example("\ud83d\ude00")
@example([[], 2**100, -0.0, math.inf])
def test_values_round_trip(value: object) -> None:
    buffer = serializer.serialize(value)
    buffer.decode()
    found = serializer.deserialize(buffer)
    assert found == value
    assert same(found, value)


@given(st.lists(values, max_size=3), st.dictionaries(st.text(), values, max_size=3))
def test_calls_round_trip(args: list[object], kwargs: dict[str, object]) -> None:
    assert serializer.unpack_call(serializer.pack_call(args, kwargs)) == (tuple(args), kwargs)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(values, id=name)
        for name, values in {
            "tuple": (1, 2),
            "tuple inside": [{"a": (1,)}],
            "key": {1: "x"},
            "subclass": Text("x"),
            "large integer": 2**64,
            "surrogates": "\ud83d\ude00",
            "key with surrogates": {"\ud83d\ude00": 1},
            "many nodes": [0] * 5000,
        }.items()
    ],
)
def test_json_is_not_chosen_where_it_would_change_the_value(value: object) -> None:
    buffer = serializer.serialize(value)
    assert strategy_of(buffer) != "11"
    assert serializer.deserialize(buffer) == value
    assert type(serializer.deserialize(buffer)) is type(value) or type(value) is Text


def test_numbers_that_only_pythons_json_has_are_read() -> None:
    assert math.isnan(serializer.deserialize(b"11\nNaN"))  # type: ignore[arg-type]
    assert serializer.deserialize(b"11\n[-Infinity, 1e400, %d]" % 10**40) == [-math.inf, math.inf, 10**40]
    assert serializer.deserialize(b'11\n"\\ud800"') == "\ud800"


def test_shared_lists_stay_shared() -> None:
    inner: list[object] = []
    found: Any = serializer.deserialize(serializer.serialize([inner, inner]))
    assert found[0] is found[1]


def test_a_list_that_contains_itself_round_trips() -> None:
    loop: list[object] = []
    loop.append(loop)
    found: Any = serializer.deserialize(serializer.serialize(loop))
    assert found[0] is found


@pytest.mark.parametrize(
    ("value", "strategy"),
    [
        ({"plain": [1, "x", None]}, "11"),
        ((1, "x"), "f0"),
        (Fraction(1, 3), "f0"),
        (collections.OrderedDict(a=1), "f0"),
        (os.path.join, "f0"),
        (ErrorRecord("CODE", "installed, if only by a path file"), "f0"),
        (Point, "f1"),
        ([Point(1)], "f1"),
        (Colour.RED, "f1"),
        (lambda x: x, "f1"),
        (threading.Lock(), "f0"),
    ],
)
def test_the_first_strategy_that_is_safe_is_chosen(value: object, strategy: str) -> None:
    assert strategy_of(serializer.serialize(value)) == strategy


def test_instances_of_local_classes_return_with_the_same_class() -> None:
    assert serializer.deserialize(serializer.serialize([Point(3), Colour.RED])) == [Point(3), Colour.RED]


def test_modules_registered_by_the_user_travel_by_value() -> None:
    import fractions

    cloudpickle.register_pickle_by_value(fractions)
    try:
        assert strategy_of(serializer.serialize(Fraction(1, 3))) == "f1"
    finally:
        cloudpickle.unregister_pickle_by_value(fractions)
    assert strategy_of(serializer.serialize(Fraction(1, 3))) == "f0"


def test_cloudpickle_registry_is_not_changed() -> None:
    serializer.serialize(Point(1))
    assert cloudpickle.list_registry_pickle_by_value() == set()


@pytest.mark.parametrize("strategies", [None, BINARY_DATA, [DillDataBase64()]])
@pytest.mark.parametrize("shared", [[1], Point(1), {"deep": [{}]}])
def test_an_argument_that_is_passed_twice_stays_one_object(
    shared: object, strategies: Sequence[Strategy] | None
) -> None:
    packed = serializer.pack_call([1, shared], {"same": shared, "inside": [shared]}, strategies=strategies)
    (_, first), kwargs = serializer.unpack_call(packed)
    assert first == shared
    assert first is kwargs["same"] is kwargs["inside"][0]


@pytest.mark.parametrize("strategy", [JSONData(), PickleDataBase64(), CloudPickleDataBase64(), DillDataBase64()])
def test_strategies_can_be_chosen_for_a_call(strategy: Strategy) -> None:
    packed = serializer.pack_call([1, "two"], {"three": [3]}, strategies=[strategy])
    assert {strategy_of(buffer) for buffer in serializer.unpack(packed)} == {strategy.id}
    assert serializer.unpack_call(packed) == ((1, "two"), {"three": [3]})


def test_strategies_can_be_chosen_for_a_serializer() -> None:
    chosen = Serializer(data=[DillDataBase64()], code=[DillCode()])
    assert strategy_of(chosen.serialize(1)) == "00"
    assert strategy_of(chosen.serialize_function(lambda: 1)) == "01"


# --- functions ---


def test_self_contained_function_is_sent_as_text() -> None:
    def double(x):  # type: ignore[no-untyped-def]
        return x * 2

    buffer = serializer.serialize_function(double)
    assert buffer.startswith(b"st\ndouble:def double(x):")
    assert buffer.endswith(b"\n    return x * 2\n")
    assert serializer.deserialize_function(buffer)(21) == 42


def test_a_closure_travels_as_byte_code() -> None:
    n = 2
    buffer = serializer.serialize_function(lambda x: x + n + Point(1).x)
    assert strategy_of(buffer) == "f2"
    assert serializer.deserialize_function(buffer)(1) == 4


@pytest.mark.parametrize("function", [os.path.join, operator.add, len, Fraction])
def test_functions_of_installed_packages_travel_as_a_name(function: Callable[..., Any]) -> None:
    buffer = serializer.serialize_function(function)
    assert buffer.startswith(b"f2\n{}\n")
    assert serializer.deserialize_function(buffer) is function


@pytest.mark.parametrize("strategy", [CloudPickleCode(), DillCode(), AllCodeStrategies(), PureSourceTextInspect()])
def test_code_strategies_can_be_chosen(strategy: Strategy) -> None:
    def triple(x: int) -> int:
        return x * 3

    packed = serializer.pack_function(triple, strategies=[strategy])
    assert strategy_of(serializer.unpack(packed)[0]) == strategy.id
    assert serializer.unpack_function(packed)(2) == 6


def test_byte_code_of_another_python_is_refused_with_advice() -> None:
    buffer = CloudPickleCode.prefix + CloudPickleCode().dump(lambda: 1)
    head, _, body = buffer.removeprefix(b"f2\n").partition(b"\n")
    older = json.dumps({**json.loads(head), "python": "3.4"}).encode()
    with pytest.raises(DeserializationError, match=r"byte code of Python 3\.4") as caught:
        serializer.deserialize_function(b"f2\n" + older + b"\n" + body)
    assert "Python 3.4" in caught.value.hint


def test_values_are_not_functions() -> None:
    with pytest.raises(DeserializationError, match="found a int"):
        serializer.deserialize_function(b"11\n1")
    with pytest.raises(DeserializationError, match="not 2"):
        serializer.unpack_function(serializer.pack([b"11\n1", b"11\n1"]))


# --- combinations ---


def test_a_combination_holds_every_way_that_works() -> None:
    assert [strategy_of(part) for part in AllDataStrategies().split(AllDataStrategies().dump([1]))] == ["11", "00"]
    assert [strategy_of(part) for part in AllDataStrategies().split(AllDataStrategies().dump((1,)))] == ["00"]


def test_the_first_part_that_loads_counts() -> None:
    parts = [b"zz\nfrom the future", b"11\n{broken", b"11\n[1]", b"11\n[2]"]
    assert serializer.deserialize(b"13\n" + serializer.pack(parts)) == [1]


def test_a_combination_without_a_readable_part_reports_each_reason() -> None:
    with pytest.raises(DeserializationError, match=r"b'zz.n' cannot be a part.*JSONDecodeError"):
        serializer.deserialize(b"13\n" + serializer.pack([b"zz\n", b"11\n{broken"]))


def test_combinations_do_not_nest() -> None:
    inner = b"13\n" + serializer.pack([b"11\n1"])
    with pytest.raises(DeserializationError):
        serializer.deserialize(b"13\n" + serializer.pack([inner]))


# --- what may be read ---


def test_only_allowed_strategies_are_read() -> None:
    careful = Serializer(allowed=parse_allowed(["JSONData", "PureSourceTextInspect"]))
    assert careful.deserialize(b"11\n[1]") == [1]
    with pytest.raises(DeserializationError, match="PickleDataBase64 may not be read") as caught:
        careful.deserialize(serializer.serialize((1,)))
    assert "allows JSONData:" in caught.value.hint


def test_a_combination_brings_its_own_parts_and_no_others() -> None:
    careful = Serializer(allowed=parse_allowed(["AllDataStrategies", "AllCodeStrategies"]))
    assert careful.deserialize(b"13\n" + serializer.pack([serializer.serialize((1,)), b"11\n[1]"])) == [1]


def test_allow_lists_accept_globus_compute_names() -> None:
    assert parse_allowed(["globus_compute_sdk.serialize.JSONData", "globus_compute_sdk.*Code"]) == {
        "11",
        *(id_ for id_, strategy in STRATEGIES.items() if strategy.for_code),
    }


@pytest.mark.parametrize("names", [[], ["JSONData"], ["*Code"], ["*Data", "NoSuchStrategy"]])
def test_an_allow_list_that_cannot_work_is_refused(names: list[str]) -> None:
    with pytest.raises(ConfigurationError):
        parse_allowed(names)


@pytest.mark.parametrize("name", ["00", "DillDataBase64", "globus_compute_sdk.serialize.concretes.DillDataBase64"])
def test_strategies_are_found_by_name(name: str) -> None:
    assert strategy_named(name) == DillDataBase64()


# --- errors ---


def test_an_argument_that_cannot_be_sent_is_named_with_the_reasons() -> None:
    unsendable = (number for number in range(3))
    with pytest.raises(SerializationError) as caught:
        serializer.pack_call([1, [unsendable]], {})
    text = str(caught.value)
    assert "Positional argument 2 (of type list)" in text
    for reason in ("JSONData: TypeError: a generator", "CloudPickleDataBase64: TypeError: cannot pickle 'generator'"):
        assert reason in text
    with pytest.raises(SerializationError, match="Keyword argument 'source'"):
        serializer.pack_call([1], {"source": unsendable})


def test_a_function_that_cannot_be_sent_is_named() -> None:
    unsendable = (number for number in range(3))

    def needy() -> object:
        return unsendable

    with pytest.raises(SerializationError, match="needy"):
        serializer.serialize_function(needy)


def test_values_that_fail_in_odd_ways_give_a_clear_error() -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    class Refuses:
        def __reduce_ex__(self, _: object) -> str:
            raise Hostile

    with pytest.raises(SerializationError, match="Hostile"):
        serializer.serialize(Refuses())


def test_a_module_that_is_missing_gives_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_at_home")
    module.__file__ = f"{sys.prefix}/lib/site-packages/only_at_home.py"

    def work() -> None: ...

    work.__module__, work.__qualname__, module.work = module.__name__, "work", work  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    buffer = serializer.serialize_function(work)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(DeserializationError, match="No module named 'only_at_home'") as caught:
        serializer.deserialize_function(buffer)
    assert caught.value.hint.startswith("Install only_at_home on the endpoint, or in the environment of the task.")
    assert caught.value.record.fault is Fault.PEER


@given(st.sampled_from(sorted(STRATEGIES)), st.text(alphabet=" \n:{}[]\"'#.0123456789", max_size=40))
def test_garbage_is_a_clear_error_for_each_strategy(id_: str, garbage: str) -> None:
    try:
        serializer.deserialize(f"{id_}\n{garbage}".encode())
    except DeserializationError:
        return
    assert id_ == "11"  # digits and brackets may well be JSON


@given(st.binary(max_size=20))
def test_unknown_buffers_are_a_clear_error(buffer: bytes) -> None:
    with pytest.raises(DeserializationError):
        serializer.deserialize(b"\x00" + buffer)


@given(values, st.data())
def test_truncated_value_is_a_clear_error_or_another_value(value: object, data: st.DataObject) -> None:
    buffer = serializer.serialize((value,))
    cut = buffer[: data.draw(st.integers(0, len(buffer) - 1))]
    with pytest.raises(DeserializationError):
        serializer.deserialize(cut)


@pytest.mark.parametrize(
    "buffers",
    [
        pytest.param([], id="nothing"),
        pytest.param([b"11\n[]"], id="one"),
        pytest.param([b"11\n[{}, []]"], id="one, swapped"),
        pytest.param([b"11\n[]", b"11\n{}", b"11\n{}"], id="three"),
        pytest.param([b"11\n{}", b"11\n[]"], id="swapped"),
    ],
)
def test_buffer_without_a_call_is_refused(buffers: list[bytes]) -> None:
    with pytest.raises(DeserializationError):
        serializer.unpack_call(serializer.pack(buffers))


def test_the_public_names_are_sorted_and_exist() -> None:
    names = payload.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name.islower(), name))
    assert all(hasattr(payload, name) for name in names)
    assert not {"dill", "cloudpickle"} & set(vars(payload)) - set(vars(builtins))
