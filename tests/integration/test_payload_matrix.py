"""Classes, functions and values of many kinds on their way to a worker and back: the same answer as the plain call, or
an error before it runs."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from farcall_common.payload import PickleDataBase64, Serializer
from tests.support.wheels import THIS_PYTHON, find_python
from tests.waiting import WAIT_S

PROGRAM = Path(__file__).parents[1] / "support" / "payload_matrix.py"

#: Bound to this process, or to its threads, files and connections.
REFUSED_VALUES = (
    *("stdin", "text file", "binary file", "temporary file", "file handler", "socket", "connection"),
    *("weak reference", "weak set", "weak dict", "weak method", "singleton", "exits at pickle"),
    *("held lock", "condition", "event", "semaphore", "barrier", "thread", "thread local", "queue", "simple queue"),
    *("generator", "frame", "context", "context variable", "main module", "system generator"),
    *("match", "struct", "memoryview of numbers", "type of iterators"),
)
REFUSED = {f"{use}: {name}" for use in ("global", "argument", "result") for name in REFUSED_VALUES}
REFUSED |= {"call: context variable"}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, str, str]]:
    """For each case and way: its name, the way, the finding, and the reason."""
    directory = tmp_path_factory.mktemp("matrix")
    done = subprocess.run(
        [sys.executable, PROGRAM, directory], capture_output=True, text=True, check=False, timeout=5 * WAIT_S
    )
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_a_call_gives_the_answer_of_the_plain_call_or_is_refused(findings: list[tuple[str, str, str, str]]) -> None:
    assert [each for each in findings if each[2] not in ("same", "refused")] == []
    assert {name for name, _, finding, _ in findings if finding == "refused"} == REFUSED


def test_the_matrix_has_every_kind(findings: list[tuple[str, str, str, str]]) -> None:
    kinds = Counter(name.partition(":")[0] for name, way, _, _ in findings if way == "cloud")
    assert (kinds["class"] >= 24, kinds["call"] >= 65, kinds["argument"] >= 130) == (True, True, True)
    assert Counter(way for _, way, _, _ in findings)["engine"] == kinds.total()


# -- plain data between versions of Python -----------------------------------------------------------------------------

PLAIN = """
import array, collections, datetime, decimal, fractions, functools, ipaddress, math, operator, pathlib, random, re
import types, uuid, zoneinfo, logging, http, signal, enum

values = [
    ExceptionGroup("g", [KeyError(1)]),
    (1, "x", None, 2.5, 2j, b"a", bytearray(b"a"), {1: 2}, {3}, frozenset({4}), [(), []], ..., True, 2**80),
    pathlib.Path("/a/b"), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("c:/a"), [pathlib.Path("x")],
    {"deep": (pathlib.Path("/x"), pathlib.PurePath)}, pathlib.PosixPath,
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), datetime.date(2026, 1, 2), datetime.time(1, fold=1),
    datetime.timedelta(1, 2, 3), datetime.timezone(datetime.timedelta(hours=2), "X"), zoneinfo.ZoneInfo("UTC"),
    fractions.Fraction(1, 3), decimal.Decimal("1.10"), uuid.UUID(int=5), ipaddress.ip_address("::1"),
    ipaddress.ip_network("10.0.0.0/8"), array.array("d", [1.5]), range(1, 9, 2), slice(1, 2),
    collections.Counter("aab"), collections.OrderedDict(b=1, a=2), collections.deque([1], 3),
    collections.defaultdict(list, a=[1]), collections.ChainMap({"a": 1}), types.SimpleNamespace(a=1),
    re.compile("a+", re.I), ValueError("x"), FileNotFoundError(2, "No such file", "n"),
    functools.partial(pow, 2), operator.itemgetter(1), math.sqrt, len, int, list[int], int | None, re.I | re.M,
    http.HTTPStatus.OK, signal.SIGINT, random.Random(1).getstate(), logging.getLogger("x"), random.gauss, random.random,
]
shown = [repr(value).split(" at 0x")[0] for value in values]
"""
OTHER_SIDE = """
import base64, json, pickle, sys
exec(sys.argv[1])
read = []
for text in json.load(sys.stdin):
    try:
        read.append(repr(pickle.loads(base64.b64decode(text))).split(" at 0x")[0])
    except Exception as error:
        read.append(f"{type(error).__name__}: {error}")
written = [base64.b64encode(pickle.dumps(value, 5)).decode() for value in values]
print(json.dumps([read, shown, written]))
"""


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_plain_data_travels_between_versions_of_python(version: str) -> None:
    python = find_python(version)
    if python is None or version == THIS_PYTHON:
        pytest.skip(f"this machine has no other Python {version}")
    names: dict[str, Any] = {}
    exec(PLAIN, names)
    ours = [PickleDataBase64().dump(value).decode() for value in names["values"]]
    done = subprocess.run(
        [python, "-I", "-c", OTHER_SIDE, PLAIN],
        input=json.dumps(ours), capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    read, shown, written = json.loads(done.stdout)
    assert read == shown
    buffers = [PickleDataBase64.prefix + PickleDataBase64.written(base64.b64decode(each)) for each in written]
    found = [repr(Serializer().deserialize(buffer)).split(" at 0x")[0] for buffer in buffers]
    assert found == names["shown"]
