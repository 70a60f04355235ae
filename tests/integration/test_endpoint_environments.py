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
    with running_endpoint(tmp_path_factory.mktemp("home")) as endpoint:
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


@pytest.mark.parametrize(("stage", "killed"), [("probe", "manager"), ("worker", "manager"), ("probe", "agent")])
def test_nothing_is_left_of_a_start_when_a_process_is_killed(
    tmp_path: Path, temporary: Path, stage: str, killed: str
) -> None:
    prefix, reached = tmp_path / "venv", tmp_path / "reached"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    if stage == "probe":
        program = prefix / "bin" / "python3"
        program.unlink()
        program.write_text(f"#!/bin/sh\ntouch {reached}\nsleep 1000 & sleep 1000\n")
        program.chmod(0o755)
    else:
        site = prefix / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
        wait = f"import pathlib, time; pathlib.Path({str(reached)!r}).touch(); time.sleep(1000)"
        (site / "slow.pth").write_text(f"import subprocess; {wait}\n")
    with running_endpoint(tmp_path / "home") as endpoint:
        endpoint.cloud.submit(python, environment=Environment(type="venv", location=str(prefix)))
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


def _is_of(directory: Path, pid: int) -> bool:
    """Whether a directory of sockets has no living manager: the agent starts another one."""
    return not any(
        str(directory) in " ".join(process.cmdline()) for process in psutil.process_iter() if process.pid != pid
    )
