"""An endpoint's file system is full for a while: the agent says so, promises nothing, loses nothing, and goes on."""

from __future__ import annotations

import collections
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from farcall_common.wire import TaskState
from tests.support.endpoint import EndpointProcess, running_endpoint, wait_gone
from tests.waiting import wait_until

_FULL_BYTES = 4096
"""No file of the agent may grow beyond this: enough for its status, too little for its spool."""


class Disk:
    """The file system that the agent sees; ``fill`` and ``free`` it."""

    def __init__(self, home: Path, fill: Callable[[EndpointProcess], None], free: Callable[[EndpointProcess], None]):
        self.home = home
        self.fill = fill
        self.free = free


@pytest.fixture
def quota(tmp_path: Path) -> Disk:
    """A limit of the agent's process: needs no privilege, and fails as a quota does, with an I/O error."""

    def limit(endpoint: EndpointProcess, size_bytes: int) -> None:
        assert endpoint.agent is not None
        if endpoint.agent.poll() is None:  # the limit dies with the process
            _, hard = resource.prlimit(endpoint.agent.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(endpoint.agent.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))

    def fill(endpoint: EndpointProcess) -> None:
        limit(endpoint, _FULL_BYTES)

    def free(endpoint: EndpointProcess) -> None:
        limit(endpoint, resource.RLIM_INFINITY)

    return Disk(tmp_path, fill, free)


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    path = tmp_path / "volume"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def small_disk(volume: Path) -> Disk:
    ballast = volume / "ballast"

    def fill(_: EndpointProcess) -> None:
        with ballast.open("wb", buffering=0) as file:
            for size_bytes in (65536, 4096):
                try:
                    while file.write(b"x" * size_bytes):
                        pass
                except OSError:
                    pass

    return Disk(volume, fill, lambda _: ballast.unlink())


@pytest.fixture(params=["quota", "small_disk"])
def disk(request: pytest.FixtureRequest) -> Disk:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def endpoint(disk: Disk) -> Iterator[EndpointProcess]:
    with running_endpoint(disk.home, start=False) as endpoint:
        endpoint.cloud.heartbeat_s = 0.2
        endpoint.start()
        assert endpoint.cloud.end(endpoint.cloud.submit(abs, -1)).value == 1
        yield endpoint


def note_and_wait(directory: str, number: int, size_bytes: int, _ballast: bytes = b"") -> bytes:
    """Note the start, wait for a sign, and return something."""
    import os
    import pathlib
    import time

    descriptor = os.open(f"{directory}/runs", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{number}\n".encode())
    os.close(descriptor)
    while not pathlib.Path(directory, "go").exists():
        time.sleep(0.01)
    return b"r" * size_bytes


def runs(directory: Path) -> collections.Counter[int]:
    path = directory / "runs"
    text = path.read_text() if path.exists() else ""
    return collections.Counter(int(line) for line in text.split())


def problem(endpoint: EndpointProcess) -> str:
    return str(endpoint.directory.read_status().get("problem", ""))


def stalled(endpoint: EndpointProcess) -> bool:
    return "cannot be written" in problem(endpoint)


def stall(endpoint: EndpointProcess, disk: Disk, directory: Path, **options: object) -> tuple[list[str], list[str]]:
    """Two tasks run, the disk fills up, and tasks come that it cannot hold."""
    cloud = endpoint.cloud
    running = cloud.submit_many(note_and_wait, [(str(directory), n, 50_000) for n in range(2)], **options)
    wait_until(lambda: len(runs(directory)) == 2)
    disk.fill(endpoint)
    calls = [(str(directory), n, 10, os.urandom(40_000)) for n in range(2, 40)]
    waiting = cloud.submit_many(note_and_wait, calls, **options)
    wait_until(lambda: stalled(endpoint))
    return running, waiting


def test_work_waits_on_a_full_disk_until_there_is_space(endpoint: EndpointProcess, disk: Disk, tmp_path: Path) -> None:
    cloud = endpoint.cloud
    running, waiting = stall(endpoint, disk, tmp_path)
    cloud.wait_for(lambda: any("cannot be written" in str(each.detail.get("problem")) for each in cloud.reports[-1:]))
    accepted = set(cloud.accepted)
    (tmp_path / "go").touch()
    beats = len(cloud.reports)
    cloud.wait_for(lambda: len(cloud.reports) > beats + 3)
    assert not {spec.task_id for spec in cloud.results} & {*running, *waiting}, (
        "a result was reported that is not durable"
    )
    assert set(cloud.accepted) == accepted, "a task was acknowledged that is not durable"
    disk.free(endpoint)
    ends = cloud.ends([*running, *waiting])
    assert {end.state for end in ends} == {TaskState.SUCCESS}
    assert runs(tmp_path) == dict.fromkeys(range(40), 1)
    wait_until(lambda: problem(endpoint) == "")
    assert cloud.end(cloud.submit(abs, -2)).value == 2


def test_a_lost_connection_during_a_full_disk_loses_nothing(
    endpoint: EndpointProcess, disk: Disk, tmp_path: Path
) -> None:
    cloud = endpoint.cloud
    running, waiting = stall(endpoint, disk, tmp_path)
    (tmp_path / "go").touch()
    cloud.offline()
    greeted = len(cloud.hellos)
    cloud.online()
    cloud.wait_for(lambda: len(cloud.hellos) > greeted)
    held = {task.task_id: task.finished for task in cloud.hellos[-1].held}
    assert set(running) <= set(held), "these are in the spool"
    assert set(held) <= set(cloud.accepted), "what is not in the spool is not held"
    assert not any(held.values()), "ends that are not in the spool are not held either"
    disk.free(endpoint)
    assert {end.state for end in cloud.ends([*running, *waiting])} == {TaskState.SUCCESS}
    assert runs(tmp_path) == dict.fromkeys(range(40), 1)


def test_a_killed_agent_during_a_full_disk_loses_nothing(endpoint: EndpointProcess, disk: Disk, tmp_path: Path) -> None:
    cloud = endpoint.cloud
    running, waiting = stall(endpoint, disk, tmp_path, idempotent=False)
    endpoint.kill_agent()
    (tmp_path / "go").touch()
    disk.free(endpoint)
    endpoint.start()
    ends = cloud.ends([*running, *waiting])
    assert [end.state for end in ends] == [TaskState.LOST] * 2 + [TaskState.SUCCESS] * 38
    assert runs(tmp_path) == dict.fromkeys(range(40), 1)


def test_a_running_task_can_be_cancelled_during_a_full_disk(
    endpoint: EndpointProcess, disk: Disk, tmp_path: Path
) -> None:
    cloud = endpoint.cloud
    workers = endpoint.workers()
    running, _ = stall(endpoint, disk, tmp_path)
    cloud.cancel(running[0])
    wait_until(lambda: sum(psutil.pid_exists(worker.pid) for worker in workers) == 1)
    (tmp_path / "go").touch()
    disk.free(endpoint)
    ends = cloud.ends(running)
    assert ends[0].state is TaskState.CANCELLED
    assert ends[1].state is TaskState.SUCCESS


def test_an_orderly_stop_reports_what_could_not_be_stored(
    endpoint: EndpointProcess, disk: Disk, tmp_path: Path
) -> None:
    running, waiting = stall(endpoint, disk, tmp_path)
    (tmp_path / "go").touch()
    family = endpoint.family()
    assert endpoint.stop() == os.EX_UNAVAILABLE
    wait_gone(family)
    disk.free(endpoint)
    endpoint.start()
    assert {end.state for end in endpoint.cloud.ends([*running, *waiting])} == {TaskState.SUCCESS}


def test_a_nearly_full_disk_accepts_no_tasks_and_finishes_accepted_ones(volume: Path, tmp_path: Path) -> None:
    with running_endpoint(volume) as endpoint:
        cloud = endpoint.cloud
        running = cloud.submit_many(note_and_wait, [(str(tmp_path), n, 10) for n in range(4)])
        wait_until(lambda: len(runs(tmp_path)) == 2)
        free = os.statvfs(volume)
        ballast = volume / "ballast"
        ballast.write_bytes(b"x" * (free.f_bavail * free.f_frsize - 600_000))  # the reserve is a twentieth of 16 MiB
        wait_until(lambda: "nearly full" in problem(endpoint))
        many = cloud.submit_many(abs, [(-1,)] * 200)
        (tmp_path / "go").touch()
        assert {end.state for end in cloud.ends(running)} == {TaskState.SUCCESS}
        assert set(cloud.accepted) < {*running, *many}, "credit that was given before is used up, and no more is given"
        ballast.unlink()
        assert {end.value for end in cloud.ends(many)} == {1}


def test_a_read_only_file_system_is_reported_at_start(
    volume: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running_endpoint(volume, start=False) as endpoint:
        subprocess.run(["mount", "-o", "remount,ro", str(volume)], check=True)
        endpoint.start(connected=False)
        assert endpoint.wait() == os.EX_CONFIG
    assert "Its file system is read only" in capfd.readouterr().err
