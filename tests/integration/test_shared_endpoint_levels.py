"""Levels of isolation of a shared endpoint: which one a node has, and what starts before it holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.endpoint import EndpointProcess, running_endpoint
from tests.support.endpoint.levels import ATTACKER, LEVELS, MISSING, VICTIM, endpoint_at_each_level
from tests.waiting import wait_until

endpoint = endpoint_at_each_level(workers=1)


def truth(argument: str) -> str:
    return argument


def test_status_says_which_level_holds(endpoint: EndpointProcess, request: pytest.FixtureRequest, level: str) -> None:
    assert level == request.node.callspec.params["endpoint"]


@pytest.mark.skipif(bool(MISSING["bubblewrap"]), reason=MISSING["bubblewrap"])
def test_auto_is_the_best_level_of_the_node(tmp_path: Path) -> None:
    with running_endpoint(tmp_path, workers=1, engine={"isolation": "auto"}) as endpoint:
        wait_until(lambda: endpoint.directory.read_status().get("isolation") == "bubblewrap")


def test_a_node_without_isolation_serves_its_owner_and_says_what_it_lacks(tmp_path: Path) -> None:
    """Until the owner accepts less. A module in the way of Landlock's stands for an old kernel."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "landlockpy.py").write_text(
        "import enum\n"
        "class AccessFS(enum.IntFlag):\n"
        "    READ_FILE = WRITE_FILE = READ_DIR = EXECUTE = IOCTL_DEV = TRUNCATE = MAKE_REG = REMOVE_FILE = 1\n"
        "class AccessNet: pass\n"
        "class Ruleset: pass\n"
        "class Scope: pass\n"
        "def abi_version(): return 0\n"
    )
    (home / "bwrap").write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    (home / "bwrap").chmod(0o755)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(home))
        environment.setenv("PATH", str(home), prepend=os.pathsep)
        with running_endpoint(home, workers=1, engine={"isolation": "auto"}) as endpoint:
            assert endpoint.cloud.end(endpoint.cloud.submit(truth, "the truth")).value == "the truth"
            wait_until(lambda: endpoint.directory.read_status().get("isolation"))
            error = endpoint.cloud.end(endpoint.cloud.submit(truth, "the truth", submitter=ATTACKER)).error
            assert error["code"] == "ISOLATION_MISSING"
            for text in (error["message"], endpoint.directory.read_status()["isolation"], endpoint.log()):
                assert "No permissions to create new namespace" in text
                assert "Landlock: kernel" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run an endpoint of root")
@pytest.mark.parametrize("level", LEVELS)
def test_an_endpoint_of_root_runs_no_task_of_others(level: str, tmp_path: Path) -> None:
    with running_endpoint(tmp_path, workers=1, engine={"isolation": level}, may_be_root=True) as endpoint:
        cloud = endpoint.cloud
        assert cloud.end(cloud.submit(os.geteuid)).value == 0
        error = cloud.end(cloud.submit(os.geteuid, submitter=ATTACKER)).error
        assert error["code"] == "ISOLATION_MISSING"
        assert "runs as root" in error["message"]


def plant(body: str) -> str:
    """Write code that Python imports at its start, where it looks for packages of the home directory."""
    import pathlib
    import site

    directory = pathlib.Path(site.getusersitepackages())
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "usercustomize.py").write_text(body)
    (directory / "planted.py").write_text("")
    (directory / "planted.pth").write_text("import usercustomize\n")
    return str(directory)


def end_the_worker() -> None:
    import os

    os._exit(1)


def what_was_planted() -> tuple[str, bool]:
    import builtins
    import importlib.util

    return getattr(builtins, "loot", "nothing"), importlib.util.find_spec("planted") is not None


PYTHONS = ["conda", "venv --system-site-packages"]


@pytest.fixture(params=PYTHONS)
def python(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python that imports packages of the home directory: an installation, as conda's, or an environment that shows
    its packages."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    installed = str(sys._base_executable)  # type: ignore[attr-defined]
    if request.param == "conda":
        return installed
    subprocess.run([installed, "-m", "venv", "--system-site-packages", "--without-pip", tmp_path / "venv"], check=True)
    return str(tmp_path / "venv" / "bin" / "python")


@pytest.mark.parametrize("level", LEVELS[2:])
def test_packages_of_a_submitters_home_run_confined(level: str, python: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with running_endpoint(home, workers=1, engine={"isolation": level}, python=python) as endpoint:
        secret = endpoint.directory.path / "curve.secret"
        body = f"import builtins\ntry:\n    builtins.loot = open({str(secret)!r}).read()\nexcept OSError:\n    pass\n"
        cloud = endpoint.cloud
        planted = cloud.end(cloud.submit(plant, body, submitter=ATTACKER))
        assert isinstance(planted.value, str), planted.error
        cloud.end(cloud.submit(end_the_worker, submitter=ATTACKER, max_attempts=1))
        assert cloud.end(cloud.submit(what_was_planted, submitter=ATTACKER)).value == ("nothing", True)


def test_packages_that_end_their_worker_take_no_turns_of_others(python: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with running_endpoint(home, workers=1, engine={"isolation": "landlock"}, python=python) as endpoint:
        cloud = endpoint.cloud
        planted = cloud.end(cloud.submit(plant, "import os\nos._exit(1)\n", submitter=ATTACKER))
        assert isinstance(planted.value, str), planted.error
        cloud.end(cloud.submit(end_the_worker, submitter=ATTACKER, max_attempts=1))
        waiting = [cloud.submit(what_was_planted, submitter=ATTACKER, max_attempts=1) for _ in range(3)]
        assert cloud.end(cloud.submit(what_was_planted, submitter=VICTIM)).value == ("nothing", False)
        assert all(cloud.end(task_id).error for task_id in waiting)
