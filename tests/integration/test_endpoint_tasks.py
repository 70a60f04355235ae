"""Tasks of every temper on a real agent, manager and workers, against a scripted forwarder."""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest

from farcall_common.payload import BINARY_DATA
from farcall_common.wire import EndpointReport, TaskState
from farcall_endpoint.agent.core.reports import REPORT_AFTER_S
from tests.support.endpoint import EndpointProcess, FakeCloud, running_endpoint, wait_gone
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path_factory.mktemp("home")) as endpoint:
        wait_until(lambda: endpoint.directory.read_status().get("workers") == 2)
        yield endpoint


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Path]:
    """A file that tasks wait for. It is there when the test is over, however that ends."""
    path = tmp_path / "release"
    yield path
    path.touch()


def double(x: int) -> int:
    return 2 * x


def divide(a: int, b: int) -> float:
    print("about to divide")
    return a / b


def exit_hard(code: int) -> None:
    import os

    os._exit(code)


def sleep(seconds: float) -> str:
    import time

    time.sleep(seconds)
    return "slept"


def note_and_wait(path: str, release: str) -> int:
    """Note who runs this, and go on when there is a file ``release``."""
    import os
    import pathlib
    import time

    pathlib.Path(path).write_text(str(os.getpid()))
    while not pathlib.Path(release).exists():
        time.sleep(0.01)
    return os.getpid()


def test_every_task_of_a_batch_returns_a_result(cloud: FakeCloud) -> None:
    began_at = time.time()
    ends = cloud.ends(cloud.submit_many(double, [(number,) for number in range(2000)]))
    assert [end.value for end in ends] == [2 * number for number in range(2000)]
    assert all(end.state is TaskState.SUCCESS for end in ends)
    timings = ends[0].spec
    assert timings.started_at is not None
    assert timings.ended_at is not None
    assert began_at <= timings.started_at <= timings.ended_at <= time.time()


def test_an_exception_brings_its_traceback_and_output(cloud: FakeCloud) -> None:
    end = cloud.end(cloud.submit(divide, 1, 0))
    assert end.state is TaskState.FAILED
    assert end.error["code"] == "TASK_FAILED"
    assert end.error["exception_type"] == "ZeroDivisionError"
    assert "in divide" in end.error["traceback"]
    assert "farcall_endpoint" not in end.error["traceback"]
    assert end.error["stdout_tail"] == "about to divide\n"
    assert end.error["attempt"] == 1
    assert end.error["endpoint_id"]


def test_output_of_a_success_is_kept_on_request(cloud: FakeCloud) -> None:
    def talk(text: str) -> int:
        import sys

        print(text)
        print("a warning", file=sys.stderr)
        return 5

    kept, dropped, silent = (
        cloud.end(cloud.submit(function, argument, **wanted)).spec
        for function, argument, wanted in (
            (talk, "x" * 5000, {"keep_output": True}),
            (talk, "x", {}),
            (double, 1, {"keep_output": True}),
        )
    )
    assert kept.details == {"stdout_tail": "x" * 4095 + "\n", "stderr_tail": "a warning\n"}
    assert (kept.state, dropped.details, silent.details) == (TaskState.SUCCESS, {}, {})


def test_output_of_one_task_is_not_shown_with_the_next(cloud: FakeCloud) -> None:
    for _ in range(4):
        cloud.end(cloud.submit(divide, 1, 1))
    end = cloud.end(cloud.submit(double, None))
    assert "stdout_tail" not in end.error


def test_output_is_captured_from_children_and_cut_to_its_tail(cloud: FakeCloud) -> None:
    def shout() -> None:
        import subprocess

        print("x" * 5_000_000)
        subprocess.run(["echo", "from a child"], check=True)
        raise ValueError

    end = cloud.end(cloud.submit(shout))
    assert end.error["stdout_tail"].endswith("xxx\nfrom a child\n")
    assert len(end.error["stdout_tail"]) == 4096


@pytest.mark.parametrize("size_bytes", [70_000, 5_000_000])
def test_large_arguments_and_results_travel_as_blobs(cloud: FakeCloud, size_bytes: int) -> None:
    def echo(data: bytes) -> bytes:
        return data[::-1]

    data = os.urandom(1000) * (size_bytes // 1000)
    end = cloud.end(cloud.submit(echo, data))
    assert end.value == data[::-1]
    assert end.spec.result_blob is not None


def test_arrays_are_used_where_they_arrived_and_go_back_as_bytes(cloud: FakeCloud) -> None:
    def halve(array: Any) -> Any:
        base: Any = array.base
        while not hasattr(base, "obj"):
            base = base.base
        array /= 2  # it may be changed
        return array, type(base.obj).__name__

    array = np.arange(1_250_000, dtype=np.float64)
    body = cloud.serializer.pack_function(halve)
    payload = cloud.serializer.pack_call([array], strategies=BINARY_DATA)
    for _ in range(2):  # with the function in front of the arguments, and without
        end = cloud.end(cloud.submit_raw(body, [payload], result_serializers=("f3",))[0])
        halved, kept_by = cast("tuple[Any, str]", end.value)
        assert np.array_equal(halved, array / 2)
        assert end.spec.result_blob is not None
        assert end.spec.result_blob.size_bytes < 1.01 * array.nbytes  # no base64
    assert kept_by == "mmap"  # the memory that the agent wrote it into
    small = cloud.submit_raw(body, [cloud.serializer.pack_call([array[:5]])], result_serializers=("f3",))[0]
    assert cloud.end(small).spec.result is not None


def test_a_payload_with_another_checksum_or_size_fails_its_task(cloud: FakeCloud) -> None:
    cloud.http.failing_blobs = None
    real = cloud._store

    def spoil(payload: bytes) -> object:
        location = real(payload)
        cloud.http.blobs[location.blob_key] = b"something else"
        return location

    cloud._store = spoil  # type: ignore[assignment, method-assign]
    try:
        end = cloud.end(cloud.submit(double, "y" * 100_000))
    finally:
        cloud._store = real  # type: ignore[method-assign]
    assert end.error["code"] == "PAYLOAD_DOWNLOAD_FAILED"


def test_a_result_that_cannot_be_uploaded_fails_its_task(cloud: FakeCloud) -> None:
    cloud.http.failing_blobs = 403
    try:
        end = cloud.end(cloud.submit(lambda: "z" * 100_000))
    finally:
        cloud.http.failing_blobs = None
    assert end.state is TaskState.FAILED
    assert end.error["code"] == "RESULT_UPLOAD_FAILED"
    assert "HTTP 403" in end.error["message"]


def test_a_result_over_the_limit_is_refused(cloud: FakeCloud) -> None:
    end = cloud.end(cloud.submit(lambda: "z" * 11_000_000))
    assert end.error["code"] == "RESULT_TOO_LARGE"


def test_a_result_that_cannot_be_serialised(cloud: FakeCloud) -> None:
    def generator() -> object:
        return (number for number in range(3))

    end = cloud.end(cloud.submit(generator))
    assert end.error["code"] == "RESULT_NOT_SERIALIZABLE"
    assert end.error["hint"]


def test_a_missing_module_is_named_with_a_hint(cloud: FakeCloud) -> None:
    def use_it() -> None:
        import no_such_module_at_all  # type: ignore[import-not-found]

        no_such_module_at_all.run()

    end = cloud.end(cloud.submit(use_it))
    assert end.error["exception_type"] == "ModuleNotFoundError"
    assert "no_such_module_at_all" in end.error["hint"]


def test_a_function_whose_module_is_missing_is_refused_with_a_hint(cloud: FakeCloud) -> None:
    by_reference = b"02\n" + base64.encodebytes(b"cno_such_module_at_all\nrun\n.")
    body = cloud.serializer.pack([by_reference])
    [task_id] = cloud.submit_raw(body, [cloud.serializer.pack_call(("a",))])
    end = cloud.end(task_id)
    assert end.error["code"] == "DESERIALIZATION_FAILED"
    assert "no_such_module_at_all" in end.error["hint"]


def test_garbage_as_payload_or_function_fails_only_its_task(cloud: FakeCloud) -> None:
    ids = cloud.submit_raw(cloud.serializer.pack_function(double), [b"garbage"]) + cloud.submit_raw(b"\x80junk", [b""])
    assert [end.error["code"] for end in cloud.ends(ids)] == ["DESERIALIZATION_FAILED"] * 2


def test_a_task_that_kills_its_worker_is_retried_and_then_fails(cloud: FakeCloud) -> None:
    neighbours = cloud.submit_many(sleep, [(0.05,)] * 20)
    end = cloud.end(cloud.submit(exit_hard, 7, max_attempts=3))
    assert end.state is TaskState.FAILED
    assert end.error["code"] == "WORKER_DIED"
    assert "3 times" in end.error["message"]
    assert "exit code 7" in end.error["message"]
    assert all(neighbour.value == "slept" for neighbour in cloud.ends(neighbours))


def test_a_crash_in_compiled_code_shows_where(cloud: FakeCloud) -> None:
    def crash() -> None:
        import ctypes

        ctypes.string_at(0)

    end = cloud.end(cloud.submit(crash, max_attempts=1))
    assert end.error["code"] == "WORKER_DIED"
    assert "SIGSEGV" in end.error["message"]
    assert "Segmentation fault" in end.error["stderr_tail"]


def test_a_non_idempotent_task_does_not_run_twice(cloud: FakeCloud, tmp_path: Path) -> None:
    def count_and_die(path: str) -> None:
        import os

        with open(path, "a") as file:  # noqa: PTH123 - a function to send: it imports what it needs
            file.write("x")
        os._exit(1)

    once, often = tmp_path / "once", tmp_path / "often"
    ids = [
        cloud.submit(count_and_die, str(once), idempotent=False, max_attempts=3),
        cloud.submit(count_and_die, str(often), idempotent=True, max_attempts=2),
    ]
    assert {end.error["code"] for end in cloud.ends(ids)} == {"WORKER_DIED"}
    assert once.read_text() == "x"
    assert often.read_text() == "xx"


@pytest.mark.parametrize("how", ["exit", "interrupt", "forked child", "closed output", "alarm left behind", "chdir"])
def test_a_worker_survives_what_tasks_do(cloud: FakeCloud, endpoint: EndpointProcess, how: str, tmp_path: Path) -> None:
    def misbehave(how: str, directory: str) -> str:
        import os
        import signal
        import sys

        match how:
            case "exit":
                sys.exit("enough")
            case "interrupt":
                raise KeyboardInterrupt
            case "forked child":
                os.fork()  # the child comes back from here too
            case "closed output":
                sys.stdout.close()
                os.close(1)
                os.close(2)
            case "alarm left behind":
                signal.signal(signal.SIGALRM, lambda *_: os._exit(9))
                signal.setitimer(signal.ITIMER_REAL, 0.2)
            case "chdir":
                os.chdir(directory)
        return "fine"

    wait_until(lambda: len(endpoint.workers()) == 2)  # one may have died in another test
    before = {process.pid for process in endpoint.workers()}
    end = cloud.end(cloud.submit(misbehave, how, str(tmp_path), max_attempts=1))
    if how in ("exit", "interrupt"):
        assert end.error["exception_type"] in ("SystemExit", "KeyboardInterrupt")
    else:
        assert end.value == "fine"
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        assert cloud.end(cloud.submit(divide, 6, 3)).value == 2
    homes = {end.value for end in cloud.ends(cloud.submit_many(os.getcwd, [()] * 8))}
    assert homes == {str(endpoint.directory.path / "tasks_working_dir")}
    assert {process.pid for process in endpoint.workers()} == before


def test_a_task_that_removes_the_working_directory_disables_nothing(tmp_path: Path) -> None:
    """Neither for the worker that ran it, nor for one that has to be started after that."""
    with running_endpoint(tmp_path, engine={"isolation": "auto"}) as endpoint:
        remove_the_working_directory(endpoint, endpoint.cloud)


def remove_the_working_directory(endpoint: EndpointProcess, cloud: FakeCloud) -> None:

    def remove(then_die: bool) -> None:
        import os
        import pathlib
        import shutil

        shutil.rmtree(pathlib.Path.cwd())
        if then_die:
            os._exit(1)

    def write(name: str) -> str:
        import pathlib

        pathlib.Path(name).write_text("x")
        return str(pathlib.Path.cwd())

    home = str(endpoint.directory.path / "tasks_working_dir")
    for then_die in (False, True):
        cloud.end(cloud.submit(remove, then_die, max_attempts=1))
        wait_until(lambda: len(endpoint.workers()) == 2)
        ends = cloud.ends(cloud.submit_many(write, [(f"file-{number}",) for number in range(8)]))
        assert {end.value for end in ends} == {home}
    other = cloud.end(cloud.submit(write, "own", submitter="018f0000-0000-7000-8000-000000000001")).value
    assert other == f"{home}/submitters/018f0000-0000-7000-8000-000000000001"


def test_walltime_ends_a_task_and_its_children(cloud: FakeCloud, tmp_path: Path) -> None:
    def hang(path: str) -> None:
        import pathlib
        import subprocess
        import time

        child = subprocess.Popen(["sleep", "1000"])
        pathlib.Path(path).write_text(str(child.pid))
        print("last words", flush=True)
        time.sleep(1000)

    path = tmp_path / "pid"
    for walltime_s in (1.0, 10.0):  # where everything stands still for a second, the first one says nothing
        end = cloud.end(cloud.submit(hang, str(path), walltime_s=walltime_s))
        assert end.error["code"] == "WALLTIME_EXCEEDED"
        if end.error.get("stdout_tail"):
            break
    assert end.error["stdout_tail"] == "last words\n"
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_gone([psutil.Process(int(path.read_text()))])


def test_a_long_task_does_not_block_other_tasks(cloud: FakeCloud, tmp_path: Path, release: Path) -> None:
    cloud.ends(cloud.submit_many(double, [(1,)] * 500))  # short tasks: prefetching is deep now
    long = cloud.submit(note_and_wait, str(tmp_path / "long"), str(release))
    cloud.ends(cloud.submit_many(double, [(1,)] * 500))
    assert not cloud.has_ended(long)
    release.touch()
    assert cloud.end(long).state is TaskState.SUCCESS


def test_cancel_of_a_waiting_and_of_a_running_task(cloud: FakeCloud, tmp_path: Path, release: Path) -> None:
    paths = [tmp_path / str(number) for number in range(4)]
    ids = [cloud.submit(note_and_wait, str(path), str(release)) for path in paths]
    wait_until(lambda: sum(path.exists() for path in paths) == 2)
    running = [task_id for task_id, path in zip(ids, paths, strict=True) if path.exists()]
    waiting = [task_id for task_id in ids if task_id not in running]
    cloud.cancel(running[0], waiting[0])
    first, second = cloud.ends([running[0], waiting[0]])
    assert first.state is second.state is TaskState.CANCELLED
    assert "while it ran" in first.error["message"]
    assert "before it ran" in second.error["message"]
    release.touch()
    assert all(end.state is TaskState.SUCCESS for end in cloud.ends([running[1], waiting[1]]))
    assert not paths[ids.index(waiting[0])].exists()


def test_changed_numbers_are_reported_at_once(tmp_path: Path, release: Path) -> None:
    """No heartbeat is due in this session."""
    with running_endpoint(tmp_path / "home", heartbeat_s=3600.0) as endpoint:
        cloud = endpoint.cloud

        def reported(managers: int, idle: int, unfinished: int) -> bool:
            last = cloud.reports[-1] if cloud.reports else EndpointReport()
            return (last.managers, last.idle_workers, last.outstanding_tasks) == (managers, idle, unfinished)

        cloud.wait_for(lambda: reported(1, 2, 0))
        assert (cloud.reports[-1].total_workers, cloud.reports[-1].blocks) == (2, 1)
        long = cloud.submit(note_and_wait, str(tmp_path / "runs"), str(release))
        cloud.wait_for(lambda: reported(1, 1, 1))
        release.touch()
        cloud.end(long)
        cloud.wait_for(lambda: reported(1, 2, 0))


def test_only_lasting_states_are_reported(cloud: FakeCloud, tmp_path: Path, release: Path) -> None:
    began = time.monotonic()
    short = cloud.submit_many(double, [(1,)] * 100)
    cloud.ends(short)
    were_short = time.monotonic() - began < REPORT_AFTER_S
    long = [cloud.submit(note_and_wait, str(tmp_path / str(number)), str(release)) for number in range(3)]

    def moved(*states: TaskState) -> set[str]:
        return {
            transition.task_id
            for transition in cloud.transitions
            if transition.task_id in long and transition.state in states
        }

    def are_told() -> bool:
        running = moved(TaskState.RUNNING)
        waiting = moved(TaskState.WAITING_FOR_LAUNCH, TaskState.WAITING_FOR_NODES)
        return len(running) == 2 and running | waiting == set(long)

    cloud.wait_for(are_told)
    release.touch()
    cloud.ends(long)
    if were_short:
        assert not {transition.task_id for transition in cloud.transitions} & set(short)


def test_tasks_have_their_id_and_no_secrets(cloud: FakeCloud) -> None:
    def environment() -> dict[str, str]:
        import os

        return dict(os.environ)

    task_id = cloud.submit(environment)
    seen = cloud.end(task_id).value
    assert isinstance(seen, dict)
    assert seen["FARCALL_TASK_ID"] == seen["GC_TASK_UUID"] == task_id
    assert seen["FARCALL_ENDPOINT_ID"]
    assert seen["FARCALL_ATTEMPT"] == "1"
    assert "FARCALL_TOKEN" not in seen


def test_the_submitter_chooses_result_serializers(cloud: FakeCloud) -> None:
    end = cloud.end(cloud.submit(double, 4, result_serializers=("globus_compute_sdk.serialize.JSONData",)))
    assert end.value == 8
    assert end.spec.result is not None
    end = cloud.end(cloud.submit(lambda: {1, 2}, result_serializers=("JSONData",)))
    assert end.error["code"] == "RESULT_NOT_SERIALIZABLE"


def test_a_task_for_a_container_never_runs_outside_of_one(cloud: FakeCloud, tmp_path: Path, release: Path) -> None:
    path = tmp_path / "ran"
    end = cloud.end(cloud.submit(note_and_wait, str(path), str(release), container="c-1"))
    assert end.error["code"] == "CONTAINER_UNSUPPORTED"
    assert not path.exists()


def test_a_redelivered_task_does_not_run_twice(cloud: FakeCloud, tmp_path: Path, release: Path) -> None:
    path = tmp_path / "pid"
    task_id = cloud.submit(note_and_wait, str(path), str(release))
    wait_until(lambda: path.exists() and path.read_text())
    pid = path.read_text()
    cloud.redeliver(task_id)
    cloud.wait_for(lambda: cloud.accepted.count(task_id) == 2)
    release.touch()
    end = cloud.end(task_id)
    assert end.spec.attempt == 2
    assert str(end.value) == pid == path.read_text()


def test_many_functions(cloud: FakeCloud) -> None:
    ids = []
    for number in range(600):  # more than a worker keeps
        body = cloud.serializer.pack([b"st\nf:def f():\n    return " + str(number).encode() + b"\n"])
        ids += cloud.submit_raw(body, [cloud.serializer.pack_call()])
    assert [end.value for end in cloud.ends(ids)] == list(range(600))


def test_threads_of_a_task_do_not_delay_its_result(cloud: FakeCloud, release: Path) -> None:
    def start_thread(release: str) -> int:
        import pathlib
        import threading
        import time

        def wait() -> None:
            while not pathlib.Path(release).exists():
                time.sleep(0.01)

        threading.Thread(target=wait).start()
        return threading.active_count()

    assert isinstance(cloud.end(cloud.submit(start_thread, str(release))).value, int)
