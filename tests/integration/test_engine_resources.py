"""Workers share a node: what each of them gets, and that nothing of theirs outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from farcall_common.errors import ConfigurationError, TaskError
from farcall_endpoint import Engine
from farcall_endpoint.contracts import agent_manager
from farcall_endpoint.host.node import discover_node
from tests.support.endpoint.endpoint_process import running_endpoint, wait_gone
from tests.support.endpoint.fake_agent import FakeAgent, connected_agent
from tests.waiting import WAIT_S, wait_until

HIDING = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
CORES = sorted(os.sched_getaffinity(0))

two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *HIDING,
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "SLURM_CPUS_ON_NODE",
        "SLURM_MEM_PER_NODE",
        "SLURM_MEM_PER_CPU",
    ):
        monkeypatch.delenv(name, raising=False)


def share(directory: str, workers: int) -> tuple[list[int], dict[str, str]]:
    """What a worker has; only when all of them are in this function at once, so that each answers one time."""
    import os
    import pathlib
    import time

    here = pathlib.Path(directory)
    (here / os.environ["FARCALL_WORKER_SLOT"]).touch()
    deadline = time.monotonic() + WAIT_S
    while len(list(here.iterdir())) < workers:
        if time.monotonic() > deadline:
            raise TimeoutError(directory)
        time.sleep(0.005)
    return sorted(os.sched_getaffinity(0)), dict(os.environ)


def shares(engine: Engine, directory: Path, workers: int) -> list[tuple[list[int], dict[str, str]]]:
    """What each of the workers has, by slot."""
    futures = [engine.submit(share, str(directory), workers) for _ in range(workers)]
    return sorted((future.result(WAIT_S) for future in futures), key=lambda each: each[1]["FARCALL_WORKER_SLOT"])


@two_cores
def test_workers_are_bound_to_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    with Engine(max_workers=2, cpu_affinity="block", working_dir=tmp_path, prefetch=0) as engine:
        directory = tmp_path / "marks"
        directory.mkdir()
        (first, environ), (second, _) = shares(engine, directory, 2)
    each = len(CORES) // 2
    assert first == CORES[:each]
    assert second == CORES[each : 2 * each]
    assert environ["OMP_NUM_THREADS"] == environ["OPENBLAS_NUM_THREADS"] == str(each)
    assert environ["MKL_NUM_THREADS"] == "7"


@two_cores
def test_every_nth_core_for_each_worker(tmp_path: Path) -> None:
    with Engine(max_workers=2, cpu_affinity="alternating", working_dir=tmp_path, prefetch=0) as engine:
        directory = tmp_path / "marks"
        directory.mkdir()
        (first, _), (second, _) = shares(engine, directory, 2)
    assert (first, second) == (CORES[::2], CORES[1::2])


def test_a_worker_sees_one_accelerator_and_may_use_any_core(tmp_path: Path) -> None:
    with Engine(max_workers=5, accelerators=("GPU-a", "GPU-b,GPU-c"), working_dir=tmp_path, prefetch=0) as engine:
        engine.wait_ready()
        assert (engine.stats().slots, engine.stats().workers) == (2, 2)
        directory = tmp_path / "marks"
        directory.mkdir()
        seen = shares(engine, directory, 2)
    for (cores, environ), name in zip(seen, ["GPU-a", "GPU-b,GPU-c"], strict=True):
        assert cores == CORES
        assert {environ[variable] for variable in (*HIDING, "FARCALL_WORKER_ACCELERATORS")} == {name}
        assert "OMP_NUM_THREADS" not in environ


def test_accelerators_hidden_by_the_scheduler_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with Engine(max_workers=1, accelerators=4, working_dir=tmp_path) as engine:
        assert engine.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result(WAIT_S) == "2"


def test_a_worker_that_replaces_another_has_its_share(tmp_path: Path) -> None:
    with Engine(accelerators=("only",), working_dir=tmp_path) as engine:
        before = engine.submit(os.getpid).result(WAIT_S)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: engine.submit(os.getpid).result(WAIT_S) != before)
        assert engine.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result(WAIT_S) == "only"


def test_a_task_may_not_use_more_memory_than_its_workers_share(tmp_path: Path) -> None:
    def hoard(size_bytes: int) -> int:
        import time

        data = bytearray(b"x") * size_bytes
        time.sleep(20)
        return len(data)

    with Engine(max_workers=2, mem_per_worker_bytes=200 * 2**20, working_dir=tmp_path) as engine:
        error = engine.submit(hoard, 400 * 2**20).exception(WAIT_S)
        assert isinstance(error, TaskError)
        assert error.record.code == "MEMORY_EXCEEDED"
        assert "200 MiB" in error.record.message


def test_an_engine_whose_workers_do_not_fit_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="cores_per_worker"):
        Engine(cores_per_worker=100_000)
    with pytest.raises(ConfigurationError, match="mem_per_worker"):
        Engine(mem_per_worker_bytes=2**60)
    with pytest.raises(ConfigurationError, match="cpu_affinity"):
        Engine(cpu_affinity="blok")  # type: ignore[arg-type]


def test_the_agent_receives_the_resources_of_a_node(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path, "--cores-per-worker", "0.5", "--accelerators", "a", "b", "c", slots=2)
    try:
        agent.listen(lambda: agent.registered)
    finally:
        agent.close()
    assert agent.registered is not None
    assert agent.registered.slots == 2
    capacity = agent.registered.capacity
    assert capacity is not None
    here = discover_node(environ={})
    assert capacity == agent_manager.Capacity(here.whole_cpus, here.memory_bytes, ("a", "b", "c"))


def test_a_manager_on_a_too_small_node_reports_the_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "farcall_endpoint.manager", "--agent", "ipc:///missing", "--block-id", "b"]
    command += ["--prefetch", "0", "--working-dir", str(tmp_path), "--cores-per-worker", "100000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode != 0
    assert "not even one worker fits" in done.stderr


def test_an_endpoint_shares_its_node_as_its_file_says(tmp_path: Path) -> None:
    wishes = {"available_accelerators": ["GPU-a"], "cores_per_worker": 0.5, "mem_per_worker": 0.5}
    with running_endpoint(tmp_path, workers=4, engine=wishes) as endpoint:
        assert endpoint.cloud.end(endpoint.cloud.submit(os.getenv, "CUDA_VISIBLE_DEVICES")).value == "GPU-a"
        assert endpoint.cloud.end(endpoint.cloud.submit(os.getenv, "OMP_NUM_THREADS")).value == "1"
        status: dict[str, Any] = {}

        def is_told() -> bool:
            status.update(endpoint.directory.read_status())
            return bool(status.get("nodes"))

        wait_until(is_told)
    [node] = status["nodes"]
    here = discover_node(environ={})
    assert (node["slots"], node["cores"], node["accelerators"]) == (1, here.whole_cpus, ["GPU-a"])
    assert node["memory_bytes"] == here.memory_bytes


def test_an_endpoint_whose_workers_do_not_fit_does_not_start(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, start=False, engine={"mem_per_worker": 100_000}) as endpoint:
        endpoint.start(connected=False)
        assert endpoint.wait() == os.EX_CONFIG
        assert "mem_per_worker" in endpoint.log()


# -- nothing outlives its worker ---------------------------------------------------------------------------------------


def leave_behind(path: str, wait: bool) -> int:
    """Start three processes that have left their group and session, two of them without a parent. The one with a parent
    is the first in the file."""
    import os
    import pathlib
    import subprocess
    import time

    sleep = f"echo $$ >> {path}; exec sleep 1000"
    subprocess.Popen(["sh", "-c", sleep], start_new_session=True)
    while not pathlib.Path(path).exists() or not pathlib.Path(path).read_text():
        time.sleep(0.005)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 20}
    subprocess.run(["sh", "-c", f"setsid sh -c '{sleep}' &"], **quiet)
    subprocess.run(["sh", "-c", f"setsid setsid sh -c '{sleep}' &"], env={"PATH": os.environ["PATH"]}, **quiet)
    while len(pathlib.Path(path).read_text().splitlines()) < 3:
        time.sleep(0.005)
    if wait:
        time.sleep(1000)
    return os.getpid()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with connected_agent(tmp_path, slots=2) as agent:
        yield agent


def left_by(agent: FakeAgent, path: Path, *, wait: bool) -> list[psutil.Process]:
    """What a task has left behind; it still runs if it is to ``wait``."""
    agent.run(path.name, leave_behind, str(path), wait)

    def is_there() -> bool:
        return path.exists() and len(path.read_text().splitlines()) == 3

    agent.listen(is_there if wait else lambda: path.name in agent.finished)
    return [psutil.Process(int(pid)) for pid in path.read_text().split()]


def worker_of(process: psutil.Process) -> psutil.Process:
    """The worker that a process descends from."""
    return next(parent for parent in process.parents() if "farcall_endpoint.worker" in parent.cmdline())


@pytest.mark.parametrize("wait", [True, False], ids=["running", "idle"])
def test_a_manager_that_is_killed_leaves_nothing_behind(agent: FakeAgent, tmp_path: Path, wait: bool) -> None:
    left = left_by(agent, tmp_path / "left", wait=wait)
    family = agent.family()
    assert set(left) <= set(family)
    agent.manager.kill()
    wait_gone([*left, *family])


@pytest.mark.parametrize("wait", [True, False], ids=["running", "idle"])
def test_a_worker_that_is_killed_leaves_nothing_behind(agent: FakeAgent, tmp_path: Path, wait: bool) -> None:
    neighbours = left_by(agent, tmp_path / "neighbours", wait=True)
    left = left_by(agent, tmp_path / "left", wait=wait)
    worker = worker_of(left[0])
    assert worker != worker_of(neighbours[0])
    worker.kill()
    wait_gone(left)
    assert all(process.status() != psutil.STATUS_ZOMBIE for process in neighbours)
    # what the manager has adopted it collects: two workers and a process reaper are left to it
    manager = psutil.Process(agent.manager.pid)
    wait_until(lambda: len(manager.children()) == 3)


def test_a_task_that_is_stopped_leaves_nothing_behind(agent: FakeAgent, tmp_path: Path) -> None:
    neighbours = left_by(agent, tmp_path / "neighbours", wait=True)
    left = left_by(agent, tmp_path / "left", wait=True)
    agent.say(agent_manager.CancelTasks(("left",)))
    agent.listen(lambda: "left" in agent.finished)
    wait_gone(left)
    assert all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in neighbours)


def test_processes_left_by_a_task_live_as_long_as_its_worker(agent: FakeAgent, tmp_path: Path) -> None:
    left = left_by(agent, tmp_path / "left", wait=False)
    agent.run("next", os.getpid)
    agent.listen(lambda: "next" in agent.finished)
    assert all(process.status() == psutil.STATUS_SLEEPING for process in left)
    agent.say(agent_manager.Stop(0.0))
    agent.manager.wait(WAIT_S)
    wait_gone(left)
