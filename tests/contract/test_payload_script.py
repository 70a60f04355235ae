"""Functions of scripts: another process runs them without the script and the modules next to it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT_S

SCRIPT = """
import sys
from dataclasses import dataclass
from pathlib import Path

import beside
import numpy as np
from beside import Counter, scaled

from farcall_common.payload import Serializer

FACTOR = 3


@dataclass
class Point:
    x: int


def portable(values: np.ndarray) -> float:
    return float(np.linalg.norm(values)) + scaled(1) + FACTOR


def with_class(point):
    return Point(point.x * FACTOR)


def with_module(x):
    return beside.scaled(x) + beside.inner.DEPTH


def make_adder(n):
    return lambda x: x + n + FACTOR


def counted(counter):
    counter.count += 1
    return counter


def fails(x):
    return [x][
        FACTOR]


if __name__ == "__main__":
    serializer = Serializer()
    calls = [
        (portable, [[3.0, 4.0]]),
        (with_class, [Point(2)]),
        (with_module, [5]),
        (make_adder(10), [1]),
        (counted, [Counter()]),
        (beside.cyclic, []),
        (lambda: fails(0), []),
    ]
    for function, args in calls:
        with open(sys.argv[1], "ab") as file:
            file.write(serializer.pack([serializer.pack_function(function), serializer.pack_call(args)]) + b"\\0")
"""

BESIDE = """
import inner_beside as inner

SCALE = 100


def scaled(x):
    return x * SCALE


class Counter:
    def __init__(self):
        self.count = 0

    def __eq__(self, other):
        return type(self) is type(other) and self.count == other.count


def cyclic():
    return inner.outer().scaled(2)
"""

INNER = """
import beside

DEPTH = 7


def outer():
    return beside
"""

WORKER = """
import sys
from pathlib import Path

from farcall_common.payload import Serializer, describe_exception

serializer = Serializer()
for packed in Path(sys.argv[1]).read_bytes().split(b"\\0")[:-1]:
    function, call = serializer.unpack(packed)
    args, kwargs = serializer.unpack_call(call)
    try:
        result = serializer.unpack_function(function)(*args, **kwargs)
        serializer.serialize(result)
        print(function.split(b"\\n")[1].decode(), getattr(result, "count", result))
    except Exception as error:
        print(describe_exception(error, own_packages={"worker"}).traceback)
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *command], capture_output=True, text=True, check=False, timeout=WAIT_S, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the worker printed."""
    home, away = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("away")
    for name, text in {"script.py": SCRIPT, "beside.py": BESIDE, "inner_beside.py": INNER}.items():
        (home / name).write_text(text, encoding="utf-8")
    (away / "worker.py").write_text(WORKER, encoding="utf-8")
    tasks = away / "tasks"
    run("script.py", tasks, cwd=home)
    shutil.rmtree(home)  # a worker elsewhere sees none of this
    return run("-m", "worker", tasks, cwd=away).splitlines()


def test_functions_run_without_their_script(answers: list[str]) -> None:
    assert answers[:6] == [
        "st 108.0",
        "f2 Point(x=6)",
        "f2 507",
        "f2 14",
        "st 1",
        "f2 200",
    ]


def test_tracebacks_show_the_lines_of_an_absent_script(answers: list[str]) -> None:
    traceback = "\n".join(answers[6:])
    assert "(lambda: fails(0), [])," in traceback
    assert "return [x][" in traceback
    assert "IndexError" in traceback


def test_plain_calls_do_not_import_dill_or_cloudpickle(tmp_path: Path) -> None:
    program = (
        "import sys; from farcall_common.payload import Serializer; s = Serializer(); "
        "s.unpack_call(s.pack_call((1, 'two'), {'three': [3]})); "
        "print({'cloudpickle', 'dill'} & set(sys.modules))"
    )
    assert run("-c", program, cwd=tmp_path) == "set()\n"
