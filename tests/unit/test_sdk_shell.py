"""Shell functions: results, time limits, and running on workers without our packages."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from farcall import Executor, MPIFunction, ShellFunction, ShellResult, TaskFailed
from farcall._functions import registration
from farcall.testing import FakeCloud
from farcall_common.payload import Serializer
from tests.waiting import WAIT_S

GLOBUS_PYTHON = os.environ.get("FARCALL_GLOBUS_PYTHON")

#: A worker that has neither this package nor its neighbours.
BARE_WORKER = """
import json, sys
name, _, source = json.load(sys.stdin).partition(":")
namespace = {"__name__": "elsewhere"}
exec(compile(source, "<sent>", "exec"), namespace)
result = namespace[name](who="world")
assert not [module for module in sys.modules if module.startswith("farcall")]
import pickle
sys.stdout.buffer.write(pickle.dumps(result))
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(function: ShellFunction, **kwargs: Any) -> ShellResult:
    result = function(**kwargs)
    assert isinstance(result, ShellResult)
    return result


def test_successful_command_has_its_output() -> None:
    result = call(ShellFunction("echo {greeting}, {who}; echo low >&2"), greeting="Hello", who="world")
    assert (result.returncode, result.exception_name) == (0, None)
    assert (result.stdout, result.stderr) == ("Hello, world\n", "low\n")
    assert result.cmd == "echo Hello, world; echo low >&2"
    assert str(result) == "exit code: 0\n   stdout:\nHello, world"
    assert list(Path.cwd().iterdir()) == []


def test_failed_command_has_its_exit_code() -> None:
    result = call(ShellFunction("echo no >&2; exit 3"))
    assert (result.returncode, result.exception_name) == (3, "subprocess.CalledProcessError")
    assert "exit code: 3" in str(result)
    assert "   stderr:\nno" in str(result)
    assert eval(repr(result)).stderr == "no\n"


def test_timeout_kills_the_command_and_its_children(tmp_path: Path) -> None:
    for walltime in (0.3, 10.0):  # where everything stands still for a moment, the first begins nothing
        result = call(ShellFunction("echo begun; sleep 600 & echo $! > child; wait", walltime=walltime))
        if (tmp_path / "child").exists() and (tmp_path / "child").read_text():
            break
    assert (result.returncode, result.exception_name) == (124, "subprocess.TimeoutExpired")
    assert result.stdout == "begun\n"
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + WAIT_S
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return "(sleep) Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_output_is_truncated_to_the_last_lines() -> None:
    result = call(ShellFunction("seq 1 2000; seq 1 5 >&2", snippet_lines=3))
    assert (result.stdout, result.stderr) == ("1998\n1999\n2000\n", "3\n4\n5\n")
    assert call(ShellFunction("seq 1 2000")).stdout.startswith("1001\n")
    assert str(call(ShellFunction("seq 1 100"))).count("\n") == 12
    assert call(ShellFunction("echo x", snippet_lines=0)).stdout == ""


def test_output_files_can_be_kept(tmp_path: Path) -> None:
    function = ShellFunction("echo {n}; echo e{n} >&2", stdout="logs/out.txt", stderr=str(tmp_path / "err.txt"))
    assert call(function, n=1).stdout == "1\n"
    assert call(function, n=2).stdout == "2\n"
    assert (tmp_path / "logs" / "out.txt").read_text() == "1\n2\n"
    assert (tmp_path / "err.txt").read_text() == "e1\ne2\n"


def test_result_can_be_a_dictionary() -> None:
    result = ShellFunction("echo hi", return_dict=True)()
    assert json.loads(json.dumps(result)) == {
        "cmd": "echo hi",
        "stdout": "hi\n",
        "stderr": "",
        "returncode": 0,
        "exception_name": None,
    }


def test_each_task_has_its_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GC_TASK_UUID", "a-task")
    assert call(ShellFunction("pwd", run_in_sandbox=True)).stdout == f"{tmp_path / 'a-task'}\n"
    assert call(ShellFunction("pwd")).stdout == f"{tmp_path}\n"
    monkeypatch.setenv("GC_TASK_SANDBOX_DIR", str(tmp_path / "of-the-endpoint"))
    assert call(ShellFunction("pwd")).stdout == f"{tmp_path / 'of-the-endpoint'}\n"


def test_an_mpi_program_is_started_by_the_launcher_of_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARSL_MPI_PREFIX", "echo launched:")
    result = call(MPIFunction("solver --in {path}"), path="x.in")
    assert result.stdout == "launched: solver --in x.in\n"
    assert result.cmd == "$PARSL_MPI_PREFIX solver --in x.in"
    monkeypatch.delenv("PARSL_MPI_PREFIX")
    with pytest.raises(RuntimeError, match="PARSL_MPI_PREFIX"):
        MPIFunction("solver")()


@pytest.mark.parametrize("bad", [{"name": "not a name"}, {"name": "class"}, {"walltime": -1}])
def test_arguments_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        ShellFunction("true", **bad)


def test_repr_and_str_of_a_shell_function() -> None:
    function = ShellFunction("echo {x}", walltime=5, name="say")
    assert function.__name__ == "say"
    assert MPIFunction("true").__name__ == "MPIFunction"
    again = eval(repr(function))
    assert (again.cmd, again.walltime, again.snippet_lines, again.__name__) == ("echo {x}", 5, 1000, "say")
    for copied in (copy.copy(function), copy.deepcopy(function)):
        assert isinstance(copied, ShellFunction)
        assert repr(copied) == repr(function)


#: Builds what is shown from the package that is named first.
SHOWN = """
import importlib, json, sys
sdk = importlib.import_module(sys.argv[1])
long = "".join(f"line {number}\\n" for number in range(100))
functions = [
    sdk.ShellFunction("echo {x}"),
    sdk.ShellFunction("echo a\\necho b", "out.txt", "err.txt", walltime=5, name="say"),
    sdk.ShellFunction(long, snippet_lines=3),
    sdk.MPIFunction("true"),
]
results = [
    sdk.ShellResult("true", "", "", 0),
    sdk.ShellResult("seq", long, "not shown", 0),
    sdk.ShellResult("false", "\\nout  \\n", long, 1, "subprocess.CalledProcessError"),
]
print(json.dumps([[str(each) for each in functions + results], [repr(each) for each in results]]))
"""


@pytest.mark.skipif(GLOBUS_PYTHON is None, reason="FARCALL_GLOBUS_PYTHON names no Python with globus-compute-sdk")
def test_shell_results_print_as_in_globus_compute() -> None:
    shown = [
        subprocess.run([python, "-c", SHOWN, package], stdout=subprocess.PIPE, check=True, timeout=WAIT_S).stdout
        for python, package in ((sys.executable, "farcall"), (str(GLOBUS_PYTHON), "globus_compute_sdk"))
    ]
    assert json.loads(shown[0]) == json.loads(shown[1])


def test_shell_function_runs_without_farcall() -> None:
    body = registration(ShellFunction("echo Hello, {who}", name="greet"))
    assert (body["function_name"], body["meta"]["serde_identifier"]) == ("greet", "st")
    (buffer,) = Serializer().unpack(body["function_code"].encode())
    ran = subprocess.run(
        [sys.executable, "-S", "-c", BARE_WORKER],
        input=json.dumps(bytes(buffer).decode()[3:]).encode(),
        capture_output=True,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    result = pickle.loads(ran.stdout)
    assert type(result) is ShellResult
    assert result.stdout == "Hello, world\n"


def test_executors_accept_shell_functions() -> None:
    greet = ShellFunction("echo Hello, {who}", name="greet")

    def count_words(run: Any, text: str) -> int:
        return len(run(who=text).stdout.split())

    with FakeCloud() as cloud, cloud.client() as client, Executor(cloud.endpoint_id, client) as executor:
        futures = [executor.submit(greet, who=n) for n in range(3)]
        results = [future.result(WAIT_S) for future in futures]
        assert [str(result).splitlines()[-1] for result in results] == ["Hello, 0", "Hello, 1", "Hello, 2"]
        assert all(type(result) is ShellResult for result in results)
        assert [each["function_name"] for each in client.get_functions()] == ["greet"]
        assert executor.submit(count_words, greet, "big world").result(WAIT_S) == 3
        with pytest.raises(TaskFailed, match="KeyError: 'who'"):
            executor.submit(greet).result(WAIT_S)
