"""Workers in environments that are forks of a template: as isolated as fresh ones; fresh where a fork is impossible."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from farcall_common.environments import Environment
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments.templates.template_pool import TemplatePool
from farcall_endpoint.environments.templates.templates import ForkedProcess
from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.isolation import bubblewrap, landlock
from farcall_endpoint.manager.core.events import EnvironmentReady
from farcall_endpoint.manager.shell.worker_process import Confinement, WorkerProcess
from tests.support import images
from tests.support.environments import SUBMITTER, Node, running_node
from tests.waiting import wait_until

OTHER = "00000000-0000-4000-8000-000000000002"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running_node(tmp_path, EnvironmentSettings(locations=("*",))) as node:
        yield node


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("prefix") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    site = prefix / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    (site / "slow_module.py").write_text("VALUE = 7\n")
    (site / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    return prefix


TREE = "charliecloud" if os.geteuid() == 0 else "bubblewrap"
"""A technology of directory trees whose workers can be forks."""


def is_fork(worker: WorkerProcess) -> bool:
    return isinstance(worker.process, ForkedProcess)


def forked(node: Node, environment: Environment, *, submitter: str = "") -> WorkerProcess:
    """A worker that is a fork; what was started before it has ended."""
    found: list[WorkerProcess] = []

    def launched() -> bool:
        worker = node.launch(environment, submitter=submitter)
        node.packet(worker)
        if not is_fork(worker):
            node.kill(worker)
            return False
        found.append(worker)
        return True

    node.prepare(environment)
    wait_until(launched)
    return found[0]


def about() -> dict[str, Any]:
    import os
    import sys

    return {
        "executable": sys.executable,
        "directory": os.getcwd(),  # noqa: PTH109
        "root": sorted(os.listdir("/")),  # noqa: PTH208
        "variables": dict(os.environ),
        "modules": sorted(sys.modules),
        "path": list(sys.path),
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
    }


def environments(venv: Path) -> list[Environment]:
    return [
        Environment(type="venv", location=str(venv), preload=("slow_module",)),
        Environment(type=TREE, location=str(images.image(images.DEBIAN)), preload=("xml.dom.minidom",)),
    ]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("submitter", ["", SUBMITTER])
def test_a_fork_sees_what_a_fresh_worker_sees(node: Node, venv: Path, index: int, submitter: str) -> None:
    environment = environments(venv)[index]
    node.prepare(environment)
    fresh = node.launch(environment, submitter=submitter)
    node.packet(fresh)
    assert not is_fork(fresh)
    expected = node.run(fresh, about, submitter=submitter)
    fork = forked(node, environment, submitter=submitter)
    found = node.run(fork, about, submitter=submitter)
    assert environment.preload is not None
    assert environment.preload[0] in found.pop("modules")
    assert environment.preload[0] not in expected.pop("modules")
    assert found.pop("descriptors") <= expected.pop("descriptors")
    for each in (found, expected):
        each["variables"].pop("FARCALL_WORKER_ID")
    assert found == expected
    assert node.kill(fork) == "killed by SIGKILL"


def test_templates_are_per_submitter(node: Node, venv: Path) -> None:
    environment = environments(venv)[1]
    ada, grace = (forked(node, environment, submitter=name) for name in (SUBMITTER, OTHER))

    def homes() -> tuple[str, list[str]]:
        import os
        from pathlib import Path

        return os.environ["HOME"], sorted(path.name for path in Path(os.environ["HOME"]).parent.iterdir())

    for worker, submitter in ((ada, SUBMITTER), (grace, OTHER)):
        assert node.run(worker, homes, submitter=submitter) == (
            str(node.directory / "work/submitters" / submitter),
            [submitter],
        )


@pytest.mark.skipif(bool(landlock.missing() or bubblewrap.missing()), reason="no isolation")
def test_forks_are_confined_as_fresh_workers_are(tmp_path: Path, venv: Path) -> None:
    def reach(path: str) -> list[str]:
        from pathlib import Path

        found = []
        for each in (path, f"{path}/new"):
            try:
                Path(each).write_text("x") if each.endswith("new") else next(Path(each).iterdir(), None)
                found.append("done")
            except OSError as error:
                found.append(type(error).__name__)
        return found

    (tmp_path / "private").mkdir()
    confinement = Confinement(
        readable=[str(venv), str(images.image(images.DEBIAN)), sys.base_prefix, sys.prefix, str(Path.cwd())],
        landlock=True,
        bubblewrap=True,
    )
    with running_node(tmp_path, EnvironmentSettings(locations=("*",)), confinement=confinement) as node:
        for environment in environments(venv):
            answer = node.prepare(environment)
            assert isinstance(answer, EnvironmentReady), answer
            fresh = node.launch(environment, submitter=SUBMITTER)
            node.packet(fresh)
            if os.geteuid() == 0:  # it would have to mount another /proc
                assert not node.launcher._in_environments()._launcher._templates
                continue
            fork = forked(node, environment, submitter=SUBMITTER)
            for path in (tmp_path / "private", "/usr", tmp_path / "work", tmp_path / "work/submitters" / SUBMITTER):
                expected = node.run(fresh, reach, str(path), submitter=SUBMITTER)
                assert node.run(fork, reach, str(path), submitter=SUBMITTER) == expected
            assert expected == ["done", "done"]


def test_a_location_that_becomes_a_link_is_not_started(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    venv, place = tmp_path / "home", tmp_path / "open/venv"
    for path in (venv, place):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    environment = Environment(type="venv", location=str(place))
    with running_node(tmp_path, EnvironmentSettings(locations=(f"{tmp_path}/open/*",), fork=False)) as node:
        assert isinstance(node.prepare(environment), EnvironmentReady)
        assert node.located(lambda: node.launcher.refusal(environment)) is None
        node.packet(node.launch(environment, submitter=SUBMITTER))
        place.rename(tmp_path / "open/other")
        place.symlink_to(venv)
        with pytest.raises(OSError, match="leads to one that is not among those"):
            node.launch(environment, submitter=SUBMITTER)


def test_what_tasks_import_is_loaded_in_later_workers(node: Node, venv: Path) -> None:
    def use() -> int:
        import importlib

        return int(importlib.import_module("slow_module").VALUE)

    environment = Environment(type="venv", location=str(venv))
    node.prepare(environment)
    worker = node.launch(environment)
    node.packet(worker)
    assert node.run(worker, use) == 7
    assert "slow_module" in node.modules, "a report after the result is lost if the manager kills the worker for that"
    node.launcher.learn(worker.imports_key, tuple(node.modules))

    def is_loaded() -> bool:
        fork = forked(node, environment)
        modules = node.run(fork, about)["modules"]
        node.kill(fork)
        return "slow_module" in modules

    wait_until(is_loaded)


def test_what_a_submitter_reports_is_not_in_templates_of_the_owner(node: Node, venv: Path) -> None:
    environment = Environment(type="venv", location=str(venv))
    node.prepare(environment)
    worker = node.launch(environment, submitter=SUBMITTER)
    node.packet(worker)
    node.launcher.learn(worker.imports_key, ["wave"])

    def is_loaded(submitter: str) -> bool:
        fork = forked(node, environment, submitter=submitter)
        modules = node.run(fork, about, submitter=submitter)["modules"]
        node.kill(fork)
        return "wave" in modules

    wait_until(lambda: is_loaded(SUBMITTER))
    wait_until(lambda: is_loaded(OTHER))
    assert not is_loaded("")


def test_an_unfit_template_leaves_workers_fresh(node: Node, venv: Path) -> None:
    environment = Environment(type="venv", location=str(venv), preload=("threaded", "slow_module"))
    fork = forked(node, environment)  # without the module that starts a thread
    modules = node.run(fork, about)["modules"]
    assert "slow_module" in modules
    assert "threaded" not in modules


@pytest.mark.parametrize("index", [0, 1])
def test_environments_that_differ_in_what_they_preload_share_a_container(node: Node, venv: Path, index: int) -> None:
    complete = environments(venv)[index]
    basic = msgspec.structs.replace(complete, preload=("colorsys",))
    complete = msgspec.structs.replace(complete, preload=(*(complete.preload or ()), "colorsys"))
    launcher = node.launcher._in_environments()._launcher
    forked(node, basic)
    assert set(complete.preload or ()) <= set(node.run(forked(node, complete), about)["modules"])
    assert len(launcher._templates) == 1
    assert len(launcher._pool.pids) == 2
    forked(node, complete, submitter=SUBMITTER)  # another one's is a tree of its own
    assert len(launcher._templates) == 2
    node.launcher.release(basic.key)
    forked(node, complete)
    assert len(launcher._templates) == 2


def test_without_forks_every_worker_is_fresh(tmp_path: Path, venv: Path) -> None:
    environment = environments(venv)[0]
    with running_node(tmp_path, EnvironmentSettings(fork=False)) as node:
        for _ in range(3):
            assert not is_fork(node.ready(environment))
        assert not node.launcher._in_environments()._launcher._templates


def test_a_killed_template_ends_its_workers_and_nothing_is_left(node: Node, venv: Path) -> None:
    before = process_reaper.descendants({os.getpid()}, process_reaper.read_processes())
    for environment in environments(venv):
        fork = forked(node, environment)
        templates = node.launcher._in_environments()._launcher._pool
        [pid] = templates.pids
        os.kill(pid, signal.SIGKILL)

        def is_over(templates: TemplatePool = templates) -> bool:
            node.serve()
            return not templates.pids

        wait_until(is_over)
        assert node.died(fork) == "killed by SIGKILL: its template has ended (it ended)"
        fresh = node.launch(environment)
        node.packet(fresh)
        assert not is_fork(fresh)
        node.kill(fresh)
    node.launcher.close()
    wait_until(lambda: not _alive(process_reaper.descendants({os.getpid()}, process_reaper.read_processes()) - before))


def _alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}
