"""Make golden buffers with Globus Compute's own serialiser; see README.md.

Runs under a Python that has ``globus-compute-sdk`` and not Farcall. As ``__main__``, because dill sends the functions
of ``__main__`` by value.
"""

import codecs
import json
import os.path
import pickle
import platform
import sys
from pathlib import Path

import dill
import globus_compute_sdk
from globus_compute_sdk import serialize as globus
from globus_compute_sdk.serialize.concretes import PickleCode


def double(x):
    return x * 2


def root(x):
    import math

    return math.sqrt(x)


def greet(name):
    return "Grüße: " + name  # the packed length counts characters, not bytes


def make_adder(n):
    def add(x):
        return x + n

    return add


VALUES = [
    None,
    42,
    -0.5,
    "hello",
    "Grüße, 日本",
    [1, "two", None, True],
    {"key": [1.5, {"deep": []}]},
    "long " * 100,
]
PYTHON_VALUES = [(), (1, (2, "x")), {1: {2, 3}}, b"\x00\xff", 1 + 2j]
CALLS = [("double", double, [21], 42), ("root", root, [9.0], 3.0), ("greet", greet, ["Ada"], "Grüße: Ada")]

DATA = [(globus.DillDataBase64, VALUES + PYTHON_VALUES), (globus.JSONData, VALUES)]
DATA += [(globus.AllDataStrategies, VALUES + PYTHON_VALUES[2:])]
SOURCE = [globus.PureSourceTextInspect, globus.PureSourceDill, globus.DillCodeTextInspect, globus.DillCodeSource]
COMBINED = [globus.DillCode, globus.CombinedCode, globus.AllCodeStrategies]


def identifier(strategy):
    return strategy.identifier.strip()


def value_buffers():
    for strategy, values in DATA:
        for value in values:
            buffer = globus.ComputeSerializer(strategy_data=strategy).serialize(value)
            yield {"strategy": identifier(strategy), "value": repr(value), "buffer": buffer}


def function_buffers():
    for strategy in SOURCE + COMBINED:
        for name, function, args, result in CALLS:
            buffer = globus.ComputeSerializer(strategy_code=strategy).serialize(function)
            yield entry(identifier(strategy), name, args, result, buffer)
    yield entry("01", "make_adder", [1], 3, globus.ComputeSerializer().serialize(make_adder(2)))
    # Globus Compute no longer writes this one; this is the line that used to.
    old = PickleCode.identifier + codecs.encode(pickle.dumps(os.path.join), "base64").decode()
    yield entry("02", "join", ["a", "b"], "a/b", old)


def entry(strategy, name, args, result, buffer):
    return {"strategy": strategy, "function": name, "args": args, "result": result, "buffer": buffer}


def packed_buffers():
    serializer = globus.ComputeSerializer(strategy_code=globus.PureSourceTextInspect)
    payload = serializer.pack_buffers([serializer.serialize((3, "Grüße")), serializer.serialize({"key": [None]})])
    function_code = serializer.pack_buffers([serializer.serialize(greet)])
    return {"call": payload, "args": "(3, 'Grüße')", "kwargs": "{'key': [None]}", "function_code": function_code}


def main():
    made_by = {
        "globus_compute_sdk": globus_compute_sdk.__version__,
        "dill": dill.__version__,
        "python": platform.python_version(),
    }
    document = {
        "made_by": made_by,
        "values": list(value_buffers()),
        "functions": list(function_buffers()),
        "packed": packed_buffers(),
    }
    path = Path(__file__).with_name(f"globus-py{sys.version_info.major}.{sys.version_info.minor}.json")
    path.write_text(json.dumps(document, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
    print(f"wrote {path.name}: {made_by}")


if __name__ == "__main__":
    main()
