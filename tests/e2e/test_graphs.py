"""Graphs, through the whole system: their values, failures, ends, and what kills in the middle do to them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import psutil
import pytest

import farcall
from farcall import Graph, chain
from farcall_common.errors import TaskFailed, TaskLost
from farcall_common.wire import TaskState
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from tests.support.wheels import find_python
from tests.waiting import WAIT_S, wait_until


def load(name: str) -> list[int]:
    return [ord(letter) for letter in name]


def resize(image: list[int]) -> list[int]:
    return image[::2]


def detect(image: list[int]) -> int:
    return max(image)


def read(path: str) -> str:
    return Path(path).read_text()


def split(text: str, parts: int) -> list[list[str]]:
    words = text.split()
    return [words[number::parts] for number in range(parts)]


def count_words(words: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts


def merge(counts: list[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for word, count in each.items():
            total[word] = total.get(word, 0) + count
    return total


def numbers(count: int) -> list[int]:
    return list(range(count))


def square(number: int) -> int:
    return number * number


def add(values: list[int]) -> int:
    return sum(values)


def fill(size: int) -> list[bytes]:
    return [bytes([number]) * size for number in range(3)]


def sizes(parts: list[bytes]) -> list[tuple[int, int]]:
    return [(len(part), part[0]) for part in parts]


def note(value: Any, path: str) -> Any:
    """Append the process id of this worker to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    os.close(descriptor)
    return value


def wait_for_file(value: Any, path: str) -> Any:
    """Return ``value`` when the file is there."""
    note(value, path + ".started")
    while not Path(path).exists():
        time.sleep(0.01)
    return value


def refuse(image: Any) -> None:
    print("looking at", image)
    raise LookupError(f"nothing in {image}")


def sum_of_squares(count: int) -> int:
    from farcall import current

    return sum(current().map(square, range(count)))


def starts(path: Path | str) -> list[int]:
    """The workers that have left their process id in a file."""
    return [int(line) for line in Path(path).read_text().split()] if Path(path).exists() else []


@pytest.fixture(scope="module")
def strict(
    client: farcall.Client, cloud: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEndpoint]:
    """An endpoint that runs certain functions only, sealed calls too."""
    functions: list[Callable[..., Any]] = [load, resize, refuse, sum_of_squares, square]
    registered = [client.register_function(each) for each in functions]
    listed = [client.get_function_versions(each)[0]["function_hash"] for each in registered]
    home = tmp_path_factory.mktemp("strict")
    endpoint = LocalEndpoint("strict", home=home, environment=cloud.environment("ada"))
    endpoint.configure()
    with (endpoint.directory / "config.yaml").open("a") as config:
        config.write(f"\nsealed: offered\nallowed_functions: {json.dumps(listed)}\n")
    with endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def breakable(cloud: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEndpoint]:
    """An endpoint whose processes a test may kill."""
    home = tmp_path_factory.mktemp("breakable")
    with LocalEndpoint("breakable", home=home, environment=cloud.environment("ada")) as endpoint:
        yield endpoint


@contextlib.contextmanager
def let_go(path: Path) -> Iterator[Path]:
    """A file that ends what waits for it when the test ends, also if that fails."""
    try:
        yield path
    finally:
        path.touch()


@pytest.mark.smoke
def test_the_graphs_of_the_documentation(executor: farcall.Executor, tmp_path: Path) -> None:
    assert list(executor.map(chain(load, resize, detect), ["ada", "bob", "cy"])) == [97, 98, 99]

    (tmp_path / "corpus.txt").write_text("a b a c " * 100)
    graph = Graph()
    text = graph.call(read, str(tmp_path / "corpus.txt"))
    counts = graph.map(count_words, graph.call(split, text, 8))
    total = graph.call(merge, counts)
    future = executor.submit(graph, total)
    assert future.result(WAIT_S) == {"a": 200, "b": 100, "c": 100}
    assert [(each.name, each.state, each.calls) for each in future.stages] == [
        ("read", "done", 1),
        ("split", "done", 1),
        ("count_words", "done", 8),
        ("merge", "done", 1),
    ]
    assert future.stages[counts].run_s >= 0
    assert future.stages[total].workers
    assert executor.submit(graph, [text, total]).result(WAIT_S)[1] == {"a": 200, "b": 100, "c": 100}


@pytest.mark.parametrize("count", [0, 1, 300])
def test_a_fan_out_is_known_when_the_graph_runs(executor: farcall.Executor, count: int) -> None:
    graph = Graph()
    squares = graph.map(square, graph.call(numbers, count))
    assert executor.submit(graph, graph.call(add, squares)).result(WAIT_S) == sum(map(square, range(count)))


def test_a_large_value_of_one_endpoint_goes_into_a_graph_on_another(
    client: farcall.Client, executor: farcall.Executor, own_endpoint: Callable[..., LocalEndpoint]
) -> None:
    """As a blob: it is too large for messages."""
    size = 2**20
    with farcall.Executor(own_endpoint().endpoint_id, client=client) as other:
        graph = Graph()
        made = executor.submit(graph, graph.call(fill, size))
        graph = Graph()
        future: Any = other.submit(graph, graph.call(sizes, made))
        assert future.result(WAIT_S) == [(size, number) for number in range(3)]
        assert made.task_id != future.task_id


def test_large_values_go_from_stage_to_stage(executor: farcall.Executor) -> None:
    import numpy as np

    def field(rows: int) -> Any:
        import numpy as np

        return np.ones((rows, 1_000_000))

    def double(field: Any) -> Any:
        return field * 2

    def total(fields: list[Any]) -> float:
        return float(sum(each.sum() for each in fields))

    graph = Graph()
    rows = graph.map(double, graph.call(field, 8))
    future = executor.submit(graph, graph.call(total, rows))
    assert future.result(WAIT_S) == 2 * 8 * 1_000_000
    assert future.stages[rows].value_bytes >= np.ones((8, 1_000_000)).nbytes


def test_a_fan_in_does_not_wait_for_a_straggler(executor: farcall.Executor, tmp_path: Path) -> None:
    graph = Graph()
    with let_go(tmp_path / "never") as never:
        slow = graph.options(name="straggler").call(wait_for_file, 1, str(never))
        future = executor.submit(graph, graph.options(needs=2).call(add, [slow, *graph.map(square, [2, 3])]))
        assert future.result(WAIT_S) == 13
        assert future.stages[slow].state in ("skipped", "cancelled")


def test_a_stage_that_raises_ends_its_graph(executor: farcall.Executor) -> None:
    graph = Graph()
    image = graph.call(load, "ada")
    bad = graph.options(name="look").call(refuse, image)
    future = executor.submit(graph, graph.call(add, [bad]))
    error = future.exception(WAIT_S)
    assert isinstance(error, TaskFailed)
    assert isinstance(error, LookupError)
    assert "stage 1 (look): LookupError: nothing in [97, 100, 97]" in str(error)
    assert "in refuse" in (error.remote_traceback or "")
    assert "looking at [97, 100, 97]" in (future.stdout or "")
    stages = future.stages
    assert [each.state for each in stages] == ["done", "failed", "cancelled"]
    assert stages[image].result() == [97, 100, 97]
    assert stages[bad].error is not None
    with pytest.raises(TaskFailed, match="LookupError: nothing in"):
        stages[bad].result()


def test_an_element_that_raises_is_named(executor: farcall.Executor) -> None:
    def invert(number: int) -> float:
        return 1 / number

    graph = Graph()
    error = executor.submit(graph, graph.map(invert, graph.call(numbers, 3))).exception(WAIT_S)
    assert isinstance(error, ZeroDivisionError)
    assert "stage 1 (invert), element 0: " in str(error)


def test_a_graph_is_cancelled_as_a_whole(
    client: farcall.Client, executor: farcall.Executor, endpoint: LocalEndpoint, tmp_path: Path
) -> None:
    graph = Graph()
    with let_go(tmp_path / "never") as never:
        waiting = graph.call(wait_for_file, 4, str(never))
        after = graph.call(note, waiting, str(tmp_path / "after"))
        future = executor.submit(graph, after)
        wait_until(lambda: starts(f"{never}.started"), "the first stage")
        wait_until(lambda: any(each.state == "running" for each in future.stages), "a report of the stages")
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result(WAIT_S)
        wait_until(lambda: client.get_task(future.task_id).state is TaskState.CANCELLED)
        [worker] = starts(f"{never}.started")
        wait_until(lambda: worker not in [process.pid for process in endpoint.processes("worker")], "the worker's end")
    assert executor.submit(square, 3).result(WAIT_S) == 9
    assert not starts(tmp_path / "after")


def test_a_function_calls_others_while_it_runs(executor: farcall.Executor) -> None:
    assert executor.submit(sum_of_squares, 20).result(WAIT_S) == sum(map(square, range(20)))


def test_a_restricted_endpoint_checks_each_function(client: farcall.Client, strict: LocalEndpoint) -> None:
    with farcall.Executor(strict.endpoint_id, client=client) as executor:
        assert executor.submit(chain(load, resize), "ada").result(WAIT_S) == [97, 97]
        with pytest.raises(TaskFailed, match="FUNCTION_NOT_PERMITTED"):
            executor.submit(chain(load, resize, detect), "ada").result(WAIT_S)
        assert executor.options(callees=[square]).submit(sum_of_squares, 4).result(WAIT_S) == 14
        with pytest.raises(TaskFailed, match=r"FUNCTION_NOT_PERMITTED.* has not named"):
            executor.submit(sum_of_squares, 4).result(WAIT_S)


def test_stages_are_in_the_usage_and_in_the_command_line(
    client: farcall.Client, executor: farcall.Executor, cloud: Deployment, tmp_path: Path
) -> None:
    def called() -> int:
        return sum(each.get("stages", 0) for each in client.iter_usage(["endpoint"]))

    def farcall_(*arguments: str) -> str:
        program = [sys.executable, "-c", "from farcall.cli import main; main()", *arguments]
        environment = {**os.environ, **cloud.environment("ada"), "FARCALL_HOME": str(tmp_path)}
        return subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    before = called()
    graph = Graph()
    with let_go(tmp_path / "gate") as gate:
        target = graph.call(wait_for_file, graph.call(add, graph.map(square, graph.call(numbers, 5))), str(gate))
        future = executor.submit(graph, target)
        wait_until(lambda: "wait_for_file" in farcall_("tasks", "why", future.task_id), "the stage in why")
        shown = farcall_("tasks", "show", future.task_id)
        assert "wait_for_file" in shown
        assert "running" in shown
    assert future.result(WAIT_S) == 30
    shown = farcall_("tasks", "show", future.task_id)
    assert "5 of 5" in shown
    assert "stage_calls" not in shown.replace(" ", "_"), "they are in the table"
    wait_until(lambda: called() >= before + 8, "the calls in the usage")


def test_a_sealed_graph(
    cloud: Deployment, strict: LocalEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path))
    with (
        farcall.Client(cloud.api_url, cloud.tokens["ada"], sealed="required") as client,
        farcall.Executor(strict.endpoint_id, client=client) as executor,
    ):
        assert executor.submit(chain(load, resize), "ada").result(WAIT_S) == [97, 97]
        graph = Graph()
        image = graph.call(load, "ada")
        future = executor.submit(graph, graph.call(refuse, image))
        error = future.exception(WAIT_S)
        assert isinstance(error, LookupError)
        assert "stage 1 (refuse)" in str(error)
        assert future.stages[image].result() == [97, 100, 97]


def test_a_stage_whose_worker_is_killed_is_made_again_and_no_other(
    client: farcall.Client, breakable: LocalEndpoint, tmp_path: Path
) -> None:
    graph = Graph()
    with let_go(tmp_path / "gate") as gate, farcall.Executor(breakable.endpoint_id, client=client) as executor:
        first = graph.call(note, 5, str(tmp_path / "first"))
        waiting = graph.call(wait_for_file, first, str(gate))
        future = executor.submit(graph, graph.call(square, waiting))
        wait_until(lambda: starts(f"{gate}.started"), "the second stage")
        psutil.Process(starts(f"{gate}.started")[0]).kill()
        wait_until(lambda: len(starts(f"{gate}.started")) == 2, "its second start")
        gate.touch()
        assert future.result(WAIT_S) == 25
        assert len(starts(tmp_path / "first")) == 1
        assert future.stages[waiting].retries == 1


@pytest.mark.parametrize("role", ["manager", "agent"])
def test_a_graph_runs_again_after_a_kill_in_the_middle(
    client: farcall.Client, breakable: LocalEndpoint, tmp_path: Path, role: str
) -> None:
    graph = Graph()
    with let_go(tmp_path / "gate") as gate, farcall.Executor(breakable.endpoint_id, client=client) as executor:
        squares = graph.map(square, graph.call(numbers, 5))
        waiting = graph.call(wait_for_file, graph.call(add, squares), str(gate))
        future = executor.submit(graph, waiting)
        wait_until(lambda: starts(f"{gate}.started"), "the last stage")
        agent = breakable.agent()
        assert agent is not None
        [killed] = [agent] if role == "agent" else breakable.processes("manager")
        below = killed.children(recursive=True)
        killed.kill()
        _, alive = psutil.wait_procs(below, timeout=WAIT_S)
        assert not alive
        if role == "agent":
            breakable.start()
        gate.touch()
        assert future.result(WAIT_S) == 30
        assert [each.state for each in future.stages] == ["done"] * 4
        assert len(starts(f"{gate}.started")) == 2


def test_a_graph_with_a_stage_that_may_not_run_twice_is_lost_with_its_manager(
    client: farcall.Client, breakable: LocalEndpoint, tmp_path: Path
) -> None:
    graph = Graph()
    with let_go(tmp_path / "gate") as gate, farcall.Executor(breakable.endpoint_id, client=client) as executor:
        once = graph.options(idempotent=False).call(note, 1, str(tmp_path / "once"))
        future = executor.submit(graph, graph.call(wait_for_file, once, str(gate)))
        wait_until(lambda: starts(f"{gate}.started"), "the last stage")
        for process in breakable.processes("manager"):
            process.kill()
        assert isinstance(future.exception(WAIT_S), TaskLost)
        assert len(starts(tmp_path / "once")) == 1


def test_stages_have_different_pythons(executor: farcall.Executor, tmp_path: Path) -> None:
    python = next(filter(None, map(find_python, ("3.12", "3.13"))), None)
    if python is None:
        pytest.skip("there is no other Python")
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "other"], check=True, timeout=WAIT_S)

    def values(size: int) -> list[Any]:
        import datetime
        import fractions

        return [fractions.Fraction(1, 3), datetime.date(2026, 1, 2), b"x" * size]

    def with_version(given: list[Any]) -> list[Any]:
        import sys

        return [*given, sys.version_info[1]]

    graph = Graph()
    other = graph.options(environment={"type": "venv", "location": str(tmp_path / "other")})
    target = graph.call(with_version, other.call(with_version, graph.call(values, 200_000)))
    third, date, data, elsewhere, here = executor.submit(graph, target).result(WAIT_S)
    assert (3 * third, date.isoformat(), len(data)) == (1, "2026-01-02", 200_000)
    assert elsewhere != here == sys.version_info[1]
