"""Tasks in environments, on a real agent, manager and workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from farcall_common.environments import Environment
from tests.support import images
from tests.support.endpoint import EndpointProcess, running_endpoint, wait_gone
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EndpointProcess]:
    with running_endpoint(tmp_path_factory.mktemp("home"), engine={"isolation": "auto"}) as endpoint:
        yield endpoint


def tree(name: str = images.DEBIAN) -> Environment:
    return Environment(type="bubblewrap", location=str(images.image(name)), name="sci")


def python() -> str:
    import sys

    return sys.executable


def test_a_task_runs_in_its_environment(endpoint: EndpointProcess) -> None:
    cloud = endpoint.cloud
    ids = [cloud.submit(python, environment=tree()) for _ in range(4)] + [cloud.submit(python)]
    ends = cloud.ends(ids)
    assert [end.error for end in ends] == [{}] * 5
    values = [end.value for end in ends]
    assert values[:4] == ["/usr/bin/python3"] * 4
    assert values[4] == sys.executable


def test_a_task_whose_environment_fails_is_told_why(endpoint: EndpointProcess) -> None:
    cloud = endpoint.cloud
    end = cloud.end(cloud.submit(python, environment=tree(images.WITHOUT_PYTHON)))
    assert end.error["code"] == "ENVIRONMENT_WITHOUT_PYTHON"
    assert "sci" in end.error["message"]


def test_a_submitter_may_not_name_what_only_the_owner_may_read(endpoint: EndpointProcess, tmp_path: Path) -> None:
    cloud = endpoint.cloud
    private = Environment(type="venv", location=str(endpoint.home / "venv"))
    end = cloud.end(cloud.submit(python, environment=private, submitter="33333333-2222-4333-8444-555555555555"))
    assert end.error["code"] == "CONTAINER_UNSUPPORTED"
    assert "may not read" in end.error["message"]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of an endpoint, with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    prefix = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    return prefix


@pytest.mark.parametrize(
    ("stage", "killed"), [("probe", "manager"), ("worker", "manager"), ("probe", "agent"), ("worker", "agent")]
)
def test_nothing_is_left_of_a_start_when_a_process_is_killed(
    tmp_path: Path, temporary: Path, venv: Path, stage: str, killed: str
) -> None:
    reached = tmp_path / "reached"
    if stage == "probe":
        program = venv / "bin" / "python3"
        program.unlink()
        program.write_text(f"#!/bin/sh\ntouch {reached}\nsleep 1000 & sleep 1000\n")
        program.chmod(0o755)
    else:
        site = venv / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
        wait = f"import pathlib, time; pathlib.Path({str(reached)!r}).touch(); time.sleep(1000)"
        (site / "slow.pth").write_text(f"import subprocess; {wait}\n")
    with running_endpoint(tmp_path / "home") as endpoint:
        endpoint.cloud.submit(python, environment=Environment(type="venv", location=str(venv)))
        wait_until(reached.exists)
        [manager] = endpoint.managers()
        family = manager.children(recursive=True)
        assert family
        if killed == "agent":
            endpoint.kill_agent()
            wait_gone([manager])
        else:
            os.kill(manager.pid, signal.SIGKILL)
        wait_gone(family)
        wait_until(lambda: not [each for each in temporary.glob("farcall-????????") if _is_of(each, manager.pid)])


def whose_child() -> tuple[int, int]:
    import os

    return os.getppid(), os.getpid()


def add_module(prefix: Path, name: str, text: str) -> None:
    site = prefix / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    (site / f"{name}.py").write_text(text)


def test_a_template_that_is_killed_while_it_starts_costs_no_task(tmp_path: Path, venv: Path) -> None:
    """Tasks do not wait for it; what it could not import is left out of the next one."""
    reached = tmp_path / "reached"
    text = "import os, pathlib, signal\npathlib.Path(%r).write_text(str(os.getpid()))\nsignal.pause()"
    add_module(venv, "waits", text % str(reached))
    environment = Environment(type="venv", location=str(venv), preload=("waits", "json"))
    with running_endpoint(tmp_path / "home", engine={"max_tasks_per_worker": 1}) as endpoint:
        cloud = endpoint.cloud
        [manager] = endpoint.managers()

        def parent() -> int:
            ended = cloud.end(cloud.submit(whose_child, environment=environment))
            assert ended.error == {}
            assert isinstance(ended.value, tuple)
            return int(ended.value[0])

        assert parent() == manager.pid
        wait_until(lambda: reached.exists() and reached.read_text())
        template = psutil.Process(int(reached.read_text()))
        assert parent() == manager.pid, "tasks run while a template starts"
        template.kill()
        wait_gone([template])
        wait_until(lambda: parent() != manager.pid)  # a fork of the next template
        assert [each.pid for each in endpoint.managers()] == [manager.pid]
        assert "ended: killed" not in endpoint.log(), "a worker that has run its only task is no event"


def test_idle_workers_beyond_the_memory_that_they_may_have_are_ended(tmp_path: Path, venv: Path) -> None:
    environments = [Environment(type="venv", location=str(venv)), tree()]
    engine = {"environments": {"memory": 0.001, "idle_time": 3600}}
    with running_endpoint(tmp_path / "home", engine=engine) as endpoint:
        cloud = endpoint.cloud

        def warm() -> list[int]:
            return [row["warm"] for row in endpoint.directory.read_status().get("environments", ())]

        ids = [cloud.submit(python, environment=each) for each in environments for _ in range(3)]
        assert [end.error for end in cloud.ends(ids)] == [{}] * 6
        wait_until(lambda: warm() == [0, 0])
        assert cloud.end(cloud.submit(python, environment=environments[0])).error == {}


def _is_of(directory: Path, pid: int) -> bool:
    """Whether a directory of sockets has no living manager: the agent starts another one."""
    return not any(
        str(directory) in " ".join(process.cmdline()) for process in psutil.process_iter() if process.pid != pid
    )
