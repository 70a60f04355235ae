"""An endpoint on a login node, with its workers in jobs of a real Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from farcall_common.environments import Environment
from farcall_common.wire import TaskState
from tests.slurm.cluster import SlurmCluster
from tests.support import images
from tests.support.endpoint import EndpointProcess, running_endpoint, wait_gone
from tests.waiting import wait_until

ENGINE = {
    "address": "127.0.0.1",
    "max_idletime": 600.0,
    "max_block_failures": 1,
    "block_failure_period": 0.0,
    "provider": {
        "type": "SlurmProvider",
        "exclusive": False,
        "cores_per_node": 2,
        "init_blocks": 0,
        "walltime": "00:05:00",
    },
}


def job_id() -> str:
    return os.environ["SLURM_JOB_ID"]


def interpreter() -> str:
    import sys

    return sys.executable


def stay(command: list[str]) -> None:
    import subprocess

    subprocess.run(command, check=True)


def secrets() -> list[str]:
    return [name for name in os.environ if "TOKEN" in name or "FLEET" in name]


@pytest.fixture
def endpoint(cluster: SlurmCluster, tmp_path: Path) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path, engine=ENGINE) as endpoint:
        yield endpoint


def run(endpoint: EndpointProcess, function: object, *args: object) -> TaskState:
    return endpoint.cloud.end(endpoint.cloud.submit(function, *args)).state  # type: ignore[arg-type]


def test_tasks_run_in_jobs_and_stop_cancels_the_jobs(endpoint: EndpointProcess, cluster: SlurmCluster) -> None:
    assert run(endpoint, job_id) is TaskState.SUCCESS
    [job] = cluster.jobs("RUNNING")
    name = cluster.command("squeue", "-h", f"--jobs={job}", "-o", "%j").strip()
    assert re.fullmatch("farcall-test-[0-9a-f]{8}", name)
    assert [path.name for path in endpoint.directory.script_dir.glob("*.sh")] == [f"{name}.sh"]
    wait_until(lambda: f"job {job} RUNNING" in str(endpoint.directory.read_status()["blocks"]))
    ended = endpoint.cloud.end(endpoint.cloud.submit(secrets))
    assert ended.value == []
    assert endpoint.stop() == 0
    wait_until(lambda: not cluster.jobs())


def test_tasks_run_in_their_image_on_a_node_and_end_with_its_job(
    endpoint: EndpointProcess, cluster: SlurmCluster
) -> None:
    image = Environment(type="bubblewrap", location=str(images.image(images.DEBIAN)), name="sci")
    ended = endpoint.cloud.ends([endpoint.cloud.submit(interpreter, environment=image) for _ in range(4)])
    assert [end.error for end in ended] == [{}] * 4
    assert {str(end.value) for end in ended} == {"/usr/bin/python3"}
    [job] = cluster.jobs("RUNNING")
    command = ["sleep", f"1000.{os.getpid()}"]
    endpoint.cloud.submit(stay, command, environment=image)
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == command]
        return bool(found)

    wait_until(is_there)
    cluster.command("scancel", str(job))
    wait_gone(found)


def test_the_jobs_of_an_agent_that_was_killed_are_cancelled_by_the_next(
    endpoint: EndpointProcess, cluster: SlurmCluster
) -> None:
    assert run(endpoint, job_id) is TaskState.SUCCESS
    former = set(cluster.jobs())
    endpoint.kill_agent()
    assert set(cluster.jobs()) == former
    endpoint.start()
    assert run(endpoint, job_id) is TaskState.SUCCESS
    wait_until(lambda: not former & set(cluster.jobs()))
    assert len(cluster.jobs()) == 1


def test_a_task_of_a_killed_agent_continues_in_another_job(endpoint: EndpointProcess, cluster: SlurmCluster) -> None:
    def nap() -> str:
        import time

        time.sleep(3)
        return "rested"

    task_id = endpoint.cloud.submit(nap)
    wait_until(lambda: cluster.jobs("RUNNING"))
    endpoint.kill_agent()
    endpoint.start()
    assert endpoint.cloud.end(task_id).state is TaskState.SUCCESS
