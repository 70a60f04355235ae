"""The engine as an executor: what the standard library promises, and what survives what."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from farcall_common.errors import ConfigurationError, SerializationError, TaskError, TaskFailed
from farcall_endpoint import Engine, Graph, chain
from farcall_endpoint.config.providers import SlurmProviderConfig
from farcall_endpoint.engine.future import EngineFuture
from tests.support.endpoint.endpoint_process import wait_gone
from tests.waiting import WAIT_S, wait_until


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_workers=2) as engine:
        engine.wait_ready()
        yield engine


def add(a: int, b: int = 10) -> int:
    return a + b


def pid_then_sleep(path: str, seconds: float) -> int:
    import pathlib
    import time

    pathlib.Path(path).write_text(str(os.getpid()))
    time.sleep(seconds)
    return os.getpid()


def die_until(path: str, times: int) -> str:
    """Kill the worker in each of the first ``times`` starts."""
    import pathlib

    marks = pathlib.Path(path)
    marks.write_text(marks.read_text() + "x" if marks.exists() else "x")
    if len(marks.read_text()) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def test_calls_see_their_class_as_it_was_at_submit(engine: Engine) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("class Item: rate = 1\ndef one(): return Item.rate\ndef two(): return Item.rate", names)
    seen: list[list[int]] = []
    for rate in (1, 2, 1):
        names["Item"].rate = rate
        futures = [engine.submit(names[name]) for name in ("one", "two") * 3]
        names["Item"].rate = 9
        seen.append([future.result(WAIT_S) for future in futures])
    assert seen == [[1] * 6, [2] * 6, [1] * 6]


def test_results_in_any_number(engine: Engine) -> None:
    futures = [engine.submit(add, number, b=1) for number in range(2000)]
    assert [future.result(WAIT_S) for future in futures] == list(range(1, 2001))
    assert all(future.done() and not future.cancelled() and not future.running() for future in futures)


def test_a_class_of_a_module_on_the_path_is_the_same_in_functions_arguments_and_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "measured_here.py").write_text("class Value(int): ...\n\n\ndef is_value(x): return type(x) is Value\n")
    monkeypatch.syspath_prepend(tmp_path)
    import measured_here  # type: ignore[import-not-found]

    with Engine(max_workers=1) as engine:
        checked = engine.submit(measured_here.is_value, measured_here.Value(1)).result(WAIT_S)
        made = engine.submit(lambda: measured_here.Value(2)).result(WAIT_S)
    assert checked
    assert type(made) is measured_here.Value


def test_a_class_of_a_module_whose_folder_joined_the_path_later_is_sent(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "joined_later.py").write_text("class Value(int): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    import joined_later  # type: ignore[import-not-found]

    sent = joined_later.Value(2)
    is_value, returned = engine.submit(lambda x: (type(x) is joined_later.Value, x), sent).result(WAIT_S)
    assert (is_value, returned, type(returned)) == (True, 2, joined_later.Value)


def test_definitions_of_a_script_are_sent_by_value(engine: Engine) -> None:
    factor = 3

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def scaled(self) -> int:
            return self.x * factor

    assert engine.submit(lambda x: x * factor, 5).result(WAIT_S) == 15
    assert engine.submit(functools.partial(add, 1), b=2).result(WAIT_S) == 3
    assert engine.submit(Point(4).scaled).result(WAIT_S) == 12
    assert engine.submit(Point, 7).result(WAIT_S).x == 7
    assert engine.submit(str.upper, "abc").result(WAIT_S) == "ABC"


def test_an_exception_keeps_its_type_and_traceback(engine: Engine) -> None:
    def fail(key: str) -> None:
        raise KeyError(key)

    faithful = engine.options(raise_original=True)
    error = faithful.submit(fail, "missing").exception(WAIT_S)
    assert type(error) is KeyError
    assert error.args == ("missing",)
    assert "in fail" in str(error.__cause__)
    assert "raise KeyError(key)" in str(error.__cause__)
    with pytest.raises(SystemExit):
        faithful.submit(sys.exit, 3).result(WAIT_S)
    with pytest.raises(TaskFailed, match="SystemExit: 3"):
        engine.submit(sys.exit, 3).result(WAIT_S)


def test_an_exception_that_cannot_travel_arrives_as_text(engine: Engine) -> None:
    def fail() -> None:
        class Odd(Exception):
            def __reduce__(self) -> str:
                raise TypeError("never")

        raise Odd("of a kind")

    error = engine.submit(fail).exception(WAIT_S)
    assert isinstance(error, TaskError)
    assert error.record.code == "TASK_FAILED"
    assert "Odd: of a kind" in error.record.message
    assert "in fail" in (error.remote_traceback or "")


def test_unserializable_arguments_are_refused_at_once(engine: Engine) -> None:
    with pytest.raises(SerializationError, match=r"cannot be sent"):
        engine.submit(add, threading.Condition())  # type: ignore[call-overload]
    with pytest.raises(SerializationError, match=r"a future cannot be sent; pass its result\(\)"):
        engine.submit(add, engine.submit(add, 1))  # type: ignore[call-overload]
    with pytest.raises(SerializationError, match="cannot be called"):
        engine.submit(5)  # type: ignore[call-overload]


def test_an_unserializable_result_is_an_error(engine: Engine) -> None:
    def condition() -> object:
        import threading

        return threading.Condition()

    error = engine.submit(condition).exception(WAIT_S)
    assert isinstance(error, TaskError)
    assert error.record.code == "RESULT_NOT_SERIALIZABLE"


@pytest.mark.parametrize("size_bytes", [0, 20_000, 70_000, 1_000_000, 20_000_000])
def test_bytes_of_any_size_round_trip(engine: Engine, size_bytes: int) -> None:
    data = os.urandom(size_bytes)
    assert engine.submit(bytes, data).result(WAIT_S) == data


def test_map_in_order_by_chunks_and_with_a_timeout(engine: Engine) -> None:
    assert list(engine.map(add, range(50), range(50))) == [2 * n for n in range(50)]
    assert list(engine.map(add, range(95), range(100), chunksize=10)) == [2 * n for n in range(95)]
    assert list(engine.map(add, [], chunksize=3)) == []
    with pytest.raises(ValueError, match="chunksize"):
        engine.map(add, [1], chunksize=0)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        list(engine.map(time.sleep, [0.0, 30.0], timeout=0.3))
    assert time.monotonic() - began < WAIT_S
    assert engine.submit(add, 1).result(WAIT_S) == 11  # the long one was cancelled, its worker replaced


def hold(path: str) -> None:
    """Until there is such a file."""
    import pathlib
    import time

    while not pathlib.Path(path).exists():
        time.sleep(0.01)


def test_map_submits_as_much_ahead_as_it_may(engine: Engine) -> None:
    for chunksize in (1, 2):
        results = engine.map(add, itertools.count(), buffersize=2, chunksize=chunksize)
        assert list(itertools.islice(results, 3)) == [10, 11, 12]
        results.close()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="buffersize"):
        engine.map(add, [1], buffersize=0)


def test_coroutine_functions_are_run_and_generators_refused(engine: Engine) -> None:
    async def added(x: int) -> int:
        import asyncio

        await asyncio.sleep(0)
        return x + 1

    later: Any = added

    async def stream(x: int) -> Any:
        yield x

    assert engine.submit(later, 1).result(WAIT_S) == 2
    assert list(engine.map(later, range(3), chunksize=2)) == [1, 2, 3]
    assert list(engine.map(chain(later, later), range(3), chunksize=2)) == [2, 3, 4]
    graph = Graph()
    assert engine.submit(graph, graph.call(later, graph.call(later, 1))).result(WAIT_S) == 3
    with pytest.raises(SerializationError, match="stream is a generator function"):
        engine.submit(stream, 1)
    with pytest.raises(SerializationError, match="stream is a generator function"):
        engine.map(stream, [1], chunksize=2)


def test_the_standard_library_waits_for_futures(engine: Engine, tmp_path: Path) -> None:
    release = tmp_path / "release"
    futures: list[concurrent.futures.Future[Any]] = [engine.submit(hold, str(release)), engine.submit(add, 1)]
    try:
        assert next(concurrent.futures.as_completed(futures, timeout=WAIT_S)) is futures[1]
    finally:
        release.touch()
    done, left = concurrent.futures.wait(futures, timeout=WAIT_S)
    assert (done, left) == (set(futures), set())
    with pytest.raises(TimeoutError):
        engine.submit(time.sleep, 0.5).result(timeout=0.01)


def test_callbacks_run_once_whenever_they_are_added(engine: Engine) -> None:
    called: list[int] = []
    over = threading.Event()

    def note(future: concurrent.futures.Future[int]) -> None:
        called.append(future.result())
        over.set()

    future = engine.submit(add, 1)
    future.add_done_callback(note)
    assert over.wait(WAIT_S)
    future.add_done_callback(note)
    assert called == [11, 11]


def test_cancel_of_a_running_task_ends_it_and_what_it_started(engine: Engine, tmp_path: Path) -> None:
    def with_child(path: str) -> None:
        import pathlib
        import subprocess

        child = subprocess.Popen(["sleep", "1000"])
        pathlib.Path(path).write_text(str(child.pid))
        child.wait()

    path = tmp_path / "pid"
    future = engine.submit(with_child, str(path))
    wait_until(lambda: path.exists() and path.read_text())
    child = psutil.Process(int(path.read_text()))
    assert future.cancel()
    assert future.cancelled()
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    wait_gone([child])
    ended = engine.submit(add, 1)
    assert ended.result(WAIT_S) == 11
    assert not ended.cancel()


@pytest.mark.parametrize("ending", ["cancel", "walltime"])
def test_a_child_in_a_session_of_its_own_does_not_outlive_its_task(engine: Engine, tmp_path: Path, ending: str) -> None:
    def with_daemon(path: str) -> None:
        import subprocess

        subprocess.Popen(["sh", "-c", f"sleep 1000 & echo $$ $! > {path}; wait"], start_new_session=True).wait()

    path = tmp_path / "pids"

    def family() -> list[int]:
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    if ending == "cancel":
        future = engine.submit(with_daemon, str(path))
        wait_until(lambda: len(family()) == 2)
        assert future.cancel()
    else:
        for walltime_s in (2.0, 20.0):  # where everything stands still for a second or two, the first starts nothing
            future = engine.options(walltime_s=walltime_s).submit(with_daemon, str(path))
            assert isinstance(future.exception(WAIT_S), TaskError)
            if len(family()) == 2:
                break
    assert len(family()) == 2
    for pid in family():
        with contextlib.suppress(psutil.NoSuchProcess):
            wait_gone([psutil.Process(pid)])


def test_cancel_of_waiting_tasks_starts_none_of_them(engine: Engine, tmp_path: Path) -> None:
    def touch(path: str) -> None:
        import pathlib

        pathlib.Path(path).touch()

    release = tmp_path / "release"
    busy = [engine.submit(hold, str(release)) for _ in range(2)]
    waiting = [engine.submit(touch, str(tmp_path / str(number))) for number in range(5000)]
    assert all(future.cancel() for future in waiting)
    wait_until(lambda: engine.stats().unfinished_tasks == 2)
    release.touch()
    concurrent.futures.wait(busy, timeout=WAIT_S)
    assert engine.submit(add, 1).result(WAIT_S) == 11
    assert list(tmp_path.iterdir()) == [release]


def test_a_task_that_kills_its_worker_is_restarted_and_then_fails(engine: Engine, tmp_path: Path) -> None:
    neighbours = [engine.submit(add, number) for number in range(200)]
    assert engine.submit(die_until, str(tmp_path / "twice"), 2).result(WAIT_S) == "survived"
    error = engine.submit(die_until, str(tmp_path / "always"), 99).exception(WAIT_S)
    assert isinstance(error, TaskError)
    assert error.record.code == "WORKER_DIED"
    assert "SIGKILL" in error.record.message
    assert len((tmp_path / "always").read_text()) == 3
    assert [future.result(WAIT_S) for future in neighbours] == [number + 10 for number in range(200)]


def test_options_apply_to_the_tasks_of_a_view(engine: Engine, tmp_path: Path) -> None:
    once = engine.options(idempotent=False)
    error = once.submit(die_until, str(tmp_path / "once"), 99).exception(WAIT_S)
    assert isinstance(error, TaskError)
    assert error.record.code == "WORKER_DIED"
    assert (tmp_path / "once").read_text() == "x"
    short = engine.options(walltime_s=0.3)
    error = short.submit(time.sleep, 60).exception(WAIT_S)
    assert isinstance(error, TaskError)
    assert error.record.code == "WALLTIME_EXCEEDED"
    short.shutdown()
    assert list(short.map(add, [1, 2])) == [11, 12]
    with pytest.raises(ConfigurationError, match="walltime_s"):
        engine.options(walltime_s=0)


def hoard(megabytes: int, in_child: bool) -> None:
    import subprocess
    import sys
    import time

    print("hoarding", flush=True)
    program = f"import time; data = bytearray({megabytes} * 2**20); time.sleep(60)"
    if in_child:
        subprocess.run([sys.executable, "-c", program], check=True)
    else:
        data = bytearray(megabytes * 2**20)
        time.sleep(60 + len(data) % 2)


@pytest.mark.parametrize("in_child", [False, True])
def test_a_task_that_takes_too_much_memory_ends_alone(engine: Engine, in_child: bool) -> None:
    modest = engine.options(memory_bytes=200 * 2**20)
    neighbour = modest.submit(time.sleep, 1.0)
    error = modest.submit(hoard, 400, in_child).exception(WAIT_S)
    assert isinstance(error, TaskError)
    assert error.record.code == "MEMORY_EXCEEDED"
    assert error.record.stdout_tail == "hoarding\n"
    assert neighbour.result(WAIT_S) is None


def hoard_with_another_baseline(megabytes: int) -> None:
    """Tell the manager, in the worker's name and at each step, that the worker held all of it when this task began."""
    import gc
    import time

    from farcall_endpoint.contracts.manager_worker import Begun, Channel

    channel = next(thing for thing in gc.get_objects() if isinstance(thing, Channel))
    data = []
    for _ in range(megabytes):
        for task_id in ("another", os.environ["FARCALL_TASK_ID"]):
            channel.send(Begun(task_id, {os.getpid(): 2**40}))
        data.append(b"x" * 2**20)
    time.sleep(120 + len(data) % 2)


def test_a_task_cannot_change_what_its_memory_is_measured_from(engine: Engine) -> None:
    limited = engine.options(memory_bytes=200 * 2**20, walltime_s=120.0)
    error = limited.submit(hoard_with_another_baseline, 400).exception(4 * WAIT_S)
    assert isinstance(error, TaskError)
    assert error.record.code == "MEMORY_EXCEEDED"


def use_the_workers_socket(kind: str) -> None:
    """What a task may do to its own worker, by accident or not."""
    import gc
    import time

    from farcall_endpoint.contracts.manager_worker import Channel, Done, NewModules

    channel = next(thing for thing in gc.get_objects() if isinstance(thing, Channel))
    channel.socket.setblocking(True)
    while kind == "reports without end":
        channel.send(NewModules(("wave",) * 500))
    if kind == "bytes":
        channel.socket.send(b"\xff" * 100)
    elif kind == "a packet cut short":
        channel.socket.send(b"x")
    elif kind.startswith("a result"):
        import os
        import struct

        import msgspec

        from farcall_endpoint.host.shared_memory import MemoryFile, ancillary

        header = msgspec.msgpack.encode(Done(os.environ["FARCALL_TASK_ID"], time.time(), time.time()))
        memory = MemoryFile.of([b"x" * ("shorter" in kind)])
        parts = [struct.pack("<I", len(header)), header, struct.pack("<QQ", 0, 2**40)]
        channel.socket.sendmsg(parts, ancillary([memory]))
    else:
        channel.send(Done("another", time.time(), time.time()))
    time.sleep(120)


@pytest.mark.parametrize(
    "kind",
    [
        *("bytes", "a packet cut short", "another task's end", "a result shorter than it says"),
        *("a result without a byte", "reports without end"),
    ],
)
def test_a_task_that_writes_to_its_workers_socket_costs_that_worker_alone(kind: str) -> None:
    before = managers_of(psutil.Process())
    with Engine(max_workers=2, max_attempts=1) as engine:
        engine.wait_ready()
        [manager] = [process for process in managers_of(psutil.Process()) if process not in before]
        neighbour = engine.submit(time.sleep, 1.0)
        assert isinstance(engine.submit(use_the_workers_socket, kind).exception(WAIT_S), TaskError)
        assert neighbour.result(WAIT_S) is None
        assert engine.submit(add, 1).result(WAIT_S) == 11
        assert manager.is_running()


def test_a_task_with_endless_output_is_stopped_and_the_tail_is_returned(engine: Engine) -> None:
    def chatter() -> None:
        while True:
            print("and another thing")

    error = engine.options(max_output_bytes=100_000).submit(chatter).exception(WAIT_S)
    assert isinstance(error, TaskError)
    assert error.record.code == "OUTPUT_EXCEEDED"
    assert "and another thing" in (error.record.stdout_tail or "")
    assert engine.submit(add, 1).result(WAIT_S) == 11


def managers_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if "farcall_endpoint.manager" in child.cmdline()]


def test_a_dead_manager_is_replaced_and_its_tasks_run_again() -> None:
    before = managers_of(psutil.Process())
    with Engine(max_workers=2) as engine:
        engine.wait_ready()
        [manager] = [process for process in managers_of(psutil.Process()) if process not in before]
        futures = [engine.submit(add, number) for number in range(3000)]
        lost = engine.options(idempotent=False).submit(time.sleep, 60)
        wait_until(lambda: engine.stats().idle_workers < 2 and all(future.done() for future in futures))
        more = [engine.submit(time.sleep, 0.01) for _ in range(50)]
        manager.kill()
        assert [future.result(WAIT_S) for future in more] == [None] * 50
        error = lost.exception(WAIT_S)
        assert isinstance(error, TaskError)
        assert error.record.code == "TASK_LOST"
        assert [future.result(WAIT_S) for future in futures] == [number + 10 for number in range(3000)]


def test_shutdown_waits_for_what_was_submitted_and_leaves_no_process() -> None:
    before = set(psutil.Process().children(recursive=True))
    engine = Engine(max_workers=2)
    futures = [engine.submit(time.sleep, 0.05) for _ in range(10)]
    engine.shutdown()
    assert all(future.done() and future.exception() is None for future in futures)
    with pytest.raises(RuntimeError, match="after shutdown"):
        engine.submit(add, 1)
    wait_gone(set(psutil.Process().children(recursive=True)) - before)


def test_shutdown_can_cancel_what_is_open() -> None:
    engine = Engine(max_workers=2)
    futures = [engine.submit(time.sleep, 30) for _ in range(10)]
    engine.shutdown(cancel_futures=True)
    assert all(future.cancelled() for future in futures)


def test_an_unreferenced_engine_ends_its_processes() -> None:
    before = set(psutil.Process().children(recursive=True))
    engine: Engine | None = Engine(max_workers=1)
    assert engine is not None
    engine.wait_ready()
    family = set(psutil.Process().children(recursive=True)) - before
    assert family
    engine = None
    gc.collect()
    wait_gone(family)


def run(program: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = cwd / "program.py"
    script.write_text(textwrap.dedent(program))
    return subprocess.run([sys.executable, str(script)], cwd=cwd, capture_output=True, text=True, timeout=WAIT_S)


def test_a_program_that_forgets_shutdown_ends_with_its_tasks_done(tmp_path: Path) -> None:
    ended = run(
        """
        import time
        from farcall_endpoint import Engine
        import beside

        def mark(name):
            time.sleep(0.2)
            open(name, "w").close()
            return beside.VALUE

        engine = Engine(max_workers=1)
        for name in "abc":
            engine.submit(mark, name)
        print(engine.submit(beside.double, 4).result())
        """
        if (tmp_path / "beside.py").write_text("VALUE = 1\ndef double(x):\n    return x * 2\n")
        else "",
        cwd=tmp_path,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "8\n", "")
    assert {path.name for path in tmp_path.iterdir()} >= {"a", "b", "c"}


def test_an_engine_that_ends_while_it_starts_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with Engine(max_workers=1):
        pass
    assert caplog.messages == []


def test_an_engine_without_references_finishes_what_was_submitted(tmp_path: Path) -> None:
    ended = run(
        """
        import pathlib
        from farcall_endpoint import Engine

        Engine(max_workers=1).submit(pathlib.Path("written").touch)
        print(Engine(max_workers=1).submit(pow, 2, 5).result())
        """,
        cwd=tmp_path,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "32\n", "")
    assert (tmp_path / "written").exists()


def test_an_engine_at_the_top_level_of_an_imported_module_starts_no_others(tmp_path: Path) -> None:
    (tmp_path / "made_here.py").write_text(
        textwrap.dedent(
            """
            import os
            from farcall_endpoint import Engine

            class Box: ...

            open(f"imported-by-{os.getpid()}", "w").close()
            with Engine(max_workers=1) as engine:
                future = engine.submit(type, Box())
                print(future.exception())
            """
        )
    )
    ended = run("import made_here", cwd=tmp_path)
    assert "The module made_here makes an Engine when it is imported, and a worker imports it." in ended.stdout
    assert len(list(tmp_path.glob("imported-by-*"))) == 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_waits_for_nothing_of_its_parent(engine: Engine) -> None:
    future = engine.submit(time.sleep, WAIT_S)
    child = os.fork()
    if child == 0:
        errors = [future.exception()]
        try:
            engine.submit(add, 1)
        except RuntimeError as error:
            errors.append(error)
        engine.shutdown()
        os._exit(7 if all("parent process" in str(error) for error in errors) and len(errors) == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert future.cancel()
    assert engine.submit(add, 1).result(WAIT_S) == 11


def test_a_failing_program_shows_where_the_function_failed(tmp_path: Path) -> None:
    ended = run(
        """
        from farcall_endpoint import Engine

        def divide(a, b):
            return a / b

        with Engine(max_workers=1) as engine:
            engine.submit(divide, 1, 0).result()
        """,
        cwd=tmp_path,
    )
    assert ended.returncode == 1
    assert "in divide" in ended.stderr
    assert "ZeroDivisionError: division by zero" in ended.stderr


def test_cloud_only_options_are_not_accepted(engine: Engine) -> None:
    wrong: Any = {"memoize": True}
    with pytest.raises(TypeError, match="memoize"):
        Engine(**wrong)
    with pytest.raises(TypeError, match="memoize"):
        engine.options(**wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Engine(max_workers=0),
        lambda: Engine(max_attempts=0),
        lambda: Engine(memory_bytes=-1),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(make: Callable[[], Engine]) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigurationError):
        make()
    assert threading.active_count() == before


def test_a_future_is_settled_once_by_racing_threads() -> None:
    for _ in range(300):
        future: EngineFuture[int] = EngineFuture("1", lambda task_id: None)
        barrier = threading.Barrier(3)
        outcomes: list[object] = []

        def settle(future: EngineFuture[int] = future, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            future.settle(1)

        def cancel(future: EngineFuture[int] = future, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            future.cancel()

        def wait(
            future: EngineFuture[int] = future,
            barrier: threading.Barrier = barrier,
            outcomes: list[object] = outcomes,
        ) -> None:
            barrier.wait()
            try:
                outcomes.append(future.result(WAIT_S))
            except concurrent.futures.CancelledError:
                outcomes.append("cancelled")

        threads = [threading.Thread(target=each) for each in (settle, cancel, wait)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes == (["cancelled"] if future.cancelled() else [1])


def test_an_engine_without_a_port_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("sbatch", "squeue", "scancel"):
        (tmp_path / command).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path))
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match="No port"):
            Engine(max_workers=1, provider=SlurmProviderConfig(), worker_port_range=(port, port))
    assert not list((tmp_path / "engine").iterdir())
    assert not any(thread.name == "farcall-scheduler" for thread in threading.enumerate())


def test_a_limit_for_files_fails_only_calls_with_larger_values(tmp_path: Path) -> None:
    program = tmp_path / "limited.py"
    program.write_text(
        """
import resource
from farcall_endpoint import Engine

def double(text):
    return 2 * text

def ended(future):
    error = future.exception(120)
    return len(future.result()) if error is None else f"{error.record.code} {'arguments' in str(error)}"

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    with Engine(max_workers=1) as engine:
        sizes = [5, 3_000_000, *[30_000] * 30, 45_000, 60_000, 5]
        print(*[ended(each) for each in [engine.submit(double, "x" * size) for size in sizes]], sep=",")
"""
    )
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    large = ["VALUE_NOT_STORED False"] * 2
    expected = ["10", "VALUE_NOT_STORED True", *["60000"] * 30, *large, "10"]
    assert ended.stdout.strip().split(",") == expected, ended.stderr
