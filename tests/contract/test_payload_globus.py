"""Globus Compute's buffers: we read all of theirs, and they read all of ours.

The golden buffers are Globus Compute's own, see ``data/payload/README.md``.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from farcall_common.errors import DeserializationError
from farcall_common.payload import (
    STRATEGIES,
    AllCodeStrategies,
    AllDataStrategies,
    CombinedCode,
    DillCode,
    DillCodeSource,
    DillCodeTextInspect,
    DillDataBase64,
    JSONData,
    PickleCode,
    PureSourceDill,
    PureSourceTextInspect,
    Serializer,
    Strategy,
)
from tests.waiting import WAIT_S

DATA = Path(__file__).parent / "data" / "payload"
GOLDEN = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(DATA.glob("globus-*.json"))}
HERE = f"globus-py{sys.version_info.major}.{sys.version_info.minor}"

serializer = Serializer()


def cases(kind: str) -> list[Any]:
    return [
        pytest.param(made, entry, id=f"{made}-{entry['strategy']}-{entry.get('function') or entry['value'][:20]}")
        for made, document in GOLDEN.items()
        for entry in document[kind]
    ]


def golden_function(name: str) -> Callable[..., Any]:
    """A function out of Globus Compute's source text; its lines are known, so that it can be written again."""
    return serializer.deserialize_function(golden_text("st", name))


def golden_text(strategy: str, name: str) -> bytes:
    functions = next(iter(GOLDEN.values()))["functions"]
    [buffer] = [e["buffer"] for e in functions if (e["strategy"], e["function"]) == (strategy, name)]
    return str(buffer).encode()


def test_ids_are_only_ever_added() -> None:
    assert {id_: type(strategy).__name__ for id_, strategy in STRATEGIES.items()} == {
        "00": "DillDataBase64",
        "01": "DillCode",
        "02": "PickleCode",
        "03": "DillCodeTextInspect",
        "04": "DillCodeSource",
        "10": "CombinedCode",
        "11": "JSONData",
        "12": "AllCodeStrategies",
        "13": "AllDataStrategies",
        "st": "PureSourceTextInspect",
        "sd": "PureSourceDill",
        "f0": "PickleDataBase64",
        "f1": "CloudPickleDataBase64",
        "f2": "CloudPickleCode",
        "f3": "PickleOutOfBand",
    }


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_the_golden_buffers_cover_every_strategy_of_globus_compute(golden: dict[str, Any]) -> None:
    covered = {entry["strategy"] for kind in ("values", "functions") for entry in golden[kind]}
    assert covered == {id_ for id_ in STRATEGIES if not id_.startswith("f")}


@pytest.mark.parametrize(
    ("buffer", "value"),
    [
        (b"f0\ngAWVJgAAAAAAAABLAYwJZnJhY3Rpb25zlIwIRnJhY3Rpb26Uk5RLAUsDhpRSlIaULg==", (1, Fraction(1, 3))),
        (b"f1\n{}\ngAWVBQAAAAAAAABLAYWULg==", (1,)),
        (b"f2\n{}\ngAWVFwAAAAAAAACMCHRleHR3cmFwlIwGZGVkZW50lJOULg==", textwrap.dedent),
        (b'f3\n{"sizes": [4, 3]}\n' + bytes(43) + b"\x80\x05\x97." + bytes(60) + b"abc", bytearray(b"abc")),
    ],
)
def test_the_first_buffers_of_our_own_stay_readable(buffer: bytes, value: object) -> None:
    assert serializer.deserialize(buffer) == value


# --- they write, we read ---


@pytest.mark.parametrize(("made", "entry"), cases("values"))
def test_values_of_globus_compute_are_read(made: str, entry: dict[str, str]) -> None:
    found = serializer.deserialize(entry["buffer"].encode())
    expected = ast.literal_eval(entry["value"])
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(("made", "entry"), cases("functions"))
def test_functions_of_globus_compute_are_read(made: str, entry: dict[str, Any]) -> None:
    if entry["strategy"] == "01" and made != HERE:
        pytest.skip("byte code of another Python version")
    function = serializer.deserialize_function(entry["buffer"].encode())
    assert function(*entry["args"]) == entry["result"]


@pytest.mark.skipif(HERE == "globus-py3.13", reason="this one is not of another version here")
@pytest.mark.parametrize("entry", [e for e in GOLDEN["globus-py3.13"]["functions"] if e["strategy"] == "01"])
def test_byte_code_of_another_python_is_refused_and_not_run(entry: dict[str, Any]) -> None:
    with pytest.raises(DeserializationError, match="byte code of another version"):
        serializer.deserialize_function(entry["buffer"].encode())


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_packed_buffers_of_globus_compute_are_read(golden: dict[str, Any]) -> None:
    packed = golden["packed"]
    args, kwargs = serializer.unpack_call(packed["call"].encode())
    assert (args, kwargs) == (ast.literal_eval(packed["args"]), ast.literal_eval(packed["kwargs"]))
    assert serializer.unpack_function(packed["function_code"].encode())("Ada") == "Grüße: Ada"


def test_damaged_source_is_a_clear_error() -> None:
    with pytest.raises(DeserializationError, match="SyntaxError"):
        serializer.deserialize_function(golden_text("st", "double").replace(b"return x", b"return ("))


# --- we write their shape ---


@pytest.mark.parametrize("strategy", [PureSourceTextInspect(), PureSourceDill()])
@pytest.mark.parametrize("name", ["double", "root", "greet"])
@pytest.mark.parametrize("self_contained", [False, True])
def test_source_texts_equal_globus_compute_bytes(strategy: Strategy, name: str, self_contained: bool) -> None:
    chosen = type(strategy)(self_contained=self_contained)  # type: ignore[call-arg]
    written = serializer.serialize_function(golden_function(name), strategies=[chosen])
    assert written == golden_text(strategy.id, name)


@pytest.mark.parametrize("strategy", [DillCodeTextInspect(), DillCodeSource()])
@pytest.mark.parametrize("name", ["double", "root", "greet"])
def test_dilled_source_texts_equal_globus_compute_bytes(strategy: Strategy, name: str) -> None:
    written = serializer.serialize_function(golden_function(name), strategies=[strategy])
    assert written == golden_text(strategy.id, name)


@pytest.mark.parametrize(("made", "entry"), [case for case in cases("values") if case.values[1]["strategy"] == "11"])
def test_json_equals_globus_compute_bytes(made: str, entry: dict[str, str]) -> None:
    value = ast.literal_eval(entry["value"])
    assert serializer.serialize(value, strategies=[JSONData()]) == entry["buffer"].encode()


@pytest.mark.parametrize(("made", "entry"), [case for case in cases("values") if case.values[1]["strategy"] == "00"])
def test_dill_of_plain_data_equals_globus_compute_bytes(made: str, entry: dict[str, str]) -> None:
    value = ast.literal_eval(entry["value"])
    assert serializer.serialize(value, strategies=[DillDataBase64()]) == entry["buffer"].encode()


@pytest.mark.parametrize(("made", "entry"), [case for case in cases("values") if case.values[1]["strategy"] == "13"])
def test_combined_data_has_globus_compute_parts_if_json_is_lossless(made: str, entry: dict[str, str]) -> None:
    value = ast.literal_eval(entry["value"])
    written = serializer.serialize(value, strategies=[AllDataStrategies()])
    theirs = entry["buffer"].encode()
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        theirs = b"13\n" + serializer.pack([bytes(serializer.unpack(theirs[3:])[-1])])
    *our_json, our_dill = map(bytes, serializer.unpack(written[3:]))
    *their_json, their_dill = map(bytes, serializer.unpack(theirs[3:]))
    assert our_dill == their_dill
    assert [json.loads(buffer[3:]) for buffer in our_json] == [json.loads(buffer[3:]) for buffer in their_json]


def test_byte_code_is_base64_in_lines_of_76() -> None:
    buffer = serializer.serialize_function(golden_function("double"), strategies=[DillCode()]).decode()
    prefix, *lines, last = buffer.split("\n")
    assert prefix == "01"
    assert last == ""
    assert all(re.fullmatch(r"[A-Za-z0-9+/]{76}", line) for line in lines[:-1])
    assert re.fullmatch(r"[A-Za-z0-9+/]{1,76}={0,2}", lines[-1])


def test_combined_code_has_globus_compute_parts_in_order() -> None:
    def ids(buffer: bytes) -> list[bytes]:
        return [bytes(part[:3]) for part in serializer.unpack(buffer[3:])]

    written = serializer.serialize_function(golden_function("greet"), strategies=[AllCodeStrategies()])
    assert ids(written) == ids(golden_text("12", "greet")) == [b"st\n", b"sd\n", b"01\n"]


def test_colon_separated_chunks_have_globus_compute_parts_in_order() -> None:
    combined = CombinedCode()
    written = combined.dump(golden_function("greet"))
    ours, theirs = combined.split(written), combined.split(golden_text("10", "greet")[3:])
    assert [part[:3] for part in ours] == [part[:3] for part in theirs]
    assert [part for part in ours if part[:3] != b"01\n"] == [part for part in theirs if part[:3] != b"01\n"]
    assert [serializer.deserialize_function(part)("Ada") for part in ours] == ["Grüße: Ada"] * 5


# --- we write, they read ---

GLOBUS_PYTHON = os.environ.get("FARCALL_GLOBUS_PYTHON")


@pytest.mark.skipif(GLOBUS_PYTHON is None, reason="FARCALL_GLOBUS_PYTHON names no Python with globus-compute-sdk")
def test_our_buffers_are_read_by_globus_compute() -> None:
    values: list[object] = [None, 42, "Grüße, 日本", [1, "two"], {"key": [1.5, {"deep": []}]}]
    python_values: list[object] = [(1, (2, "x")), {1: {2}}, b"\x00\xff"]
    data = [
        *((JSONData(), value) for value in values),
        *(
            (strategy, value)
            for strategy in (DillDataBase64(), AllDataStrategies())
            for value in values + python_values
        ),
    ]
    n = 2
    functions: list[tuple[Strategy, Callable[..., Any], list[Any]]] = [
        *(
            (strategy, golden_function(name), [arg])
            for strategy in (
                PureSourceTextInspect(),
                PureSourceDill(),
                DillCodeTextInspect(),
                DillCodeSource(),
                DillCode(),
                CombinedCode(),
                AllCodeStrategies(),
            )
            for name, arg in (("double", 4), ("root", 9.0), ("greet", "Ada"))
        ),
        (DillCode(), lambda x: x + n, [1]),
        (AllCodeStrategies(), lambda x: x + n, [1]),
        (CombinedCode(), lambda x: x + n, [1]),
        (PickleCode(), os.path.join, ["a", "b"]),
        (PureSourceTextInspect(self_contained=True), needs_company, [2]),
    ]
    requests: list[dict[str, object]] = [
        {"buffer": serializer.serialize(value, strategies=[strategy]).decode(), "args": None}
        for strategy, value in data
    ]
    requests += [
        {"buffer": serializer.serialize_function(function, strategies=[strategy]).decode(), "args": args}
        for strategy, function, args in functions
    ]
    expected = [repr(value) for _, value in data] + [repr(function(*args)) for _, function, args in functions]
    packed = serializer.pack_call((1, "Grüße"), {"ü": [2]}, strategies=[DillDataBase64()])
    requests.append({"packed": packed.decode()})
    expected.append(repr([(1, "Grüße"), {"ü": [2]}]))

    assert GLOBUS_PYTHON is not None
    answer = subprocess.run(
        [GLOBUS_PYTHON, DATA / "read_with_globus.py"],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout) == expected


OFFSET = 40


def add_offset(x: int) -> int:
    return x + OFFSET


def needs_company(x: int) -> str:
    return re.sub("x", "", f"{add_offset(x)}x")
