"""Workers in environments, for real: prepare, launch, run, kill."""

from __future__ import annotations

import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from farcall_common.environments import Environment
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments import EnvironmentLost
from farcall_endpoint.environments.prepare import preparer
from farcall_endpoint.environments.templates.templates import ForkedProcess
from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.isolation import bubblewrap, landlock, process_limits
from farcall_endpoint.host.isolation.paths import TEMPORARY_PREFIX
from farcall_endpoint.manager.core.events import EnvironmentFailed, EnvironmentReady
from farcall_endpoint.manager.shell.processes import Leftovers, MeasuredTask
from farcall_endpoint.manager.shell.worker_process import Confinement
from tests.support import images
from tests.support.endpoint import wait_gone
from tests.support.endpoint.measuring import use_of
from tests.support.environments import SUBMITTER, Node, running_node
from tests.waiting import wait_until

FRESH = EnvironmentSettings(fork=False)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory, with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Its workers are started afresh."""
    with running_node(tmp_path, FRESH) as node:
        yield node


@pytest.fixture(scope="session")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with a module of its own, and another msgspec than the worker's."""
    prefix = tmp_path_factory.mktemp("prefix") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    site = prefix / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    (site / "only_here.py").write_text("VALUE = 'of the prefix'\n")
    (site / "msgspec.py").write_text("__version__ = 'of the image'\n")
    return prefix


FORKABLE = "charliecloud" if os.geteuid() == 0 else "bubblewrap"
"""A technology of directory trees whose workers can be forks."""


def tree(name: str = images.DEBIAN) -> Environment:
    return Environment(type="bubblewrap", location=str(images.image(name)))


def place() -> tuple[str, str]:
    import pathlib
    import sys

    return sys.executable, str(pathlib.Path.cwd())


def variables() -> dict[str, str]:
    import os

    return dict(os.environ)


def libraries() -> tuple[str, str, str, bool]:
    import msgspec
    import only_here  # type: ignore[import-not-found]

    from farcall_endpoint.contracts.manager_worker import Order

    return (
        msgspec.__version__,
        only_here.VALUE,
        type(Order).__module__,
        "typing_extensions" in __import__("sys").modules,
    )


def descendants() -> set[int]:
    """All processes that descend from this one."""
    return process_reaper.descendants({os.getpid()}, process_reaper.read_processes())


def test_a_worker_in_a_tree(node: Node) -> None:
    before = descendants()
    worker = node.ready(tree())
    assert node.run(worker, place) == ("/usr/bin/python3", str(node.directory / "work"))
    assert node.kill(worker) == "killed by SIGKILL"
    wait_until(lambda: descendants() - before <= node.launcher.children)


def test_variables_of_the_node_stay_out_of_an_image(tmp_path: Path) -> None:
    given = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/nowhere", "PYTHONPATH": "/nowhere", "MY_DATA": "/x"}
    with running_node(tmp_path, FRESH, variables=given) as node:
        found = node.run(node.ready(tree()), variables)
        assert "LD_LIBRARY_PATH" not in found
        assert "PYTHONPATH" not in found
        assert found["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        assert found["MY_DATA"] == "/x"
        assert found["OMP_NUM_THREADS"] == "1"
        assert found["HOME"] == str(node.directory / "work")


def test_a_prefix_keeps_its_own_libraries_and_the_worker_its_own(node: Node, venv: Path) -> None:
    worker = node.ready(Environment(type="venv", location=str(venv)))
    assert node.run(worker, libraries)[:2] == ("of the image", "of the prefix")
    assert node.run(worker, place)[0] == f"{venv}/bin/python3"
    found = node.run(worker, variables)
    assert found["VIRTUAL_ENV"] == str(venv)
    assert found["PATH"].startswith(f"{venv}/bin:")


def test_a_second_worker_needs_no_second_preparation(node: Node) -> None:
    first = node.ready(tree())
    second = node.launch(tree())
    assert node.packet(second).pid
    assert first.pid != second.pid


def test_an_image_without_python(node: Node) -> None:
    record = node.problem(tree(images.WITHOUT_PYTHON))
    assert record.code == "ENVIRONMENT_WITHOUT_PYTHON"
    assert not record.retryable


def test_an_image_whose_python_is_too_old(node: Node) -> None:
    record = node.problem(tree(images.OLD_PYTHON))
    assert record.code == "ENVIRONMENT_WITHOUT_PYTHON"
    assert "3.8, and workers need 3.11 or later" in record.message


def test_python_that_is_not_in_the_search_path(node: Node) -> None:
    worker = node.ready(tree(images.PYTHON_ELSEWHERE))
    assert node.run(worker, place)[0].startswith("/opt/conda/bin/python3")


def test_an_image_that_does_not_exist(node: Node, tmp_path: Path) -> None:
    record = node.problem(Environment(type="bubblewrap", location=str(tmp_path / "missing")))
    assert record.code == "ENVIRONMENT_FAILED"
    assert str(tmp_path / "missing") in record.message


def test_a_type_that_the_settings_leave_out(tmp_path: Path) -> None:
    with running_node(tmp_path, EnvironmentSettings(types=("venv",))) as node:
        record = node.problem(tree())
        assert record.code == "CONTAINER_UNSUPPORTED"
        assert "allows venv" in record.message


@pytest.mark.parametrize("output", ["{}", "farcall-probe:{", "farcall-probe:[1]" * 100_000, "\\xff\\x00"])
def test_a_python_that_answers_with_something_else(node: Node, tmp_path: Path, output: str) -> None:
    (tmp_path / "hostile" / "bin").mkdir(parents=True)
    program = tmp_path / "hostile" / "bin" / "python3"
    program.write_text(f"#!/bin/sh\nprintf '{output}'\n")
    program.chmod(0o755)
    record = node.problem(Environment(type="venv", location=str(tmp_path / "hostile")))
    assert record.code == "ENVIRONMENT_FAILED"
    assert len(record.message) < 1500


def test_a_worker_that_dies_before_it_is_ready(node: Node, tmp_path: Path) -> None:
    prefix = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    environment = Environment(type="venv", location=str(prefix))
    node.kill(node.ready(environment))
    site = prefix / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    (site / "broken.pth").write_text("import os; os.write(2, b'no such license\\n'); os._exit(3)\n")
    assert node.died(node.launch(environment)) == "exit code 3: no such license"


def test_a_container_that_is_killed_while_it_starts(node: Node) -> None:
    node.kill(node.ready(tree()))
    before = descendants()
    for _ in range(5):
        node.kill(node.launch(tree()))
    wait_until(lambda: descendants() <= before)


def test_a_worker_that_ignores_sigterm_is_killed(node: Node) -> None:
    def ignore() -> None:
        import signal
        import subprocess

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        subprocess.Popen(["sleep", "1000"], start_new_session=True)

    before = descendants()
    worker = node.ready(tree())
    node.run(worker, ignore)
    assert node.kill(worker) == "killed by SIGKILL"
    wait_until(lambda: descendants() - before <= node.launcher.children)


def test_memory_is_measured_in_process_namespaces(node: Node) -> None:
    def hold() -> int:
        import os
        import sys

        sys.held = bytearray(b"x" * 60_000_000)  # type: ignore[attr-defined]
        return os.getpid()

    worker = node.ready(tree())
    assert worker.worker_pid not in (None, worker.pid)
    inner_pid = node.run(worker, hold, memory_bytes=10**9)
    assert node.begun is not None
    assert list(node.begun.resident_bytes) == [inner_pid]
    task = MeasuredTask(
        root=worker.root_pid,
        worker=worker.worker_pid,
        namespaced=True,
        memory_bytes=10**9,
        held_bytes=node.begun.resident_bytes,
        held_file_bytes=node.begun.file_bytes,
    )
    use = use_of(task)
    assert 55_000_000 < use.resident_bytes < 90_000_000
    assert use.file_bytes < 1_000_000


@pytest.mark.skipif(bool(bubblewrap.missing()), reason=bubblewrap.missing())
@pytest.mark.parametrize("type_", ["bubblewrap", "charliecloud", "venv"])
def test_a_submitter_sees_its_own_directories_and_the_environment_only(tmp_path: Path, venv: Path, type_: str) -> None:
    def look(paths: list[str]) -> dict[str, bool]:
        import pathlib

        return {path: pathlib.Path(path).exists() for path in paths}

    (tmp_path / "secret").write_text("of the owner")
    location = venv if type_ == "venv" else images.image(images.DEBIAN)
    environment = Environment(type=type_, location=str(location))
    confinement = Confinement((str(location.resolve()),), landlock=not landlock.missing(), bubblewrap=True)
    with running_node(tmp_path, confinement=confinement) as node:
        fresh = node.ready(environment, submitter=SUBMITTER)
        home = str(node.directory / "work" / "submitters" / SUBMITTER)
        seen = {
            home: True,
            str(tmp_path / "secret"): False,
            str(tmp_path / "logs"): False,
            f"/proc/{os.getpid()}": False,
        }
        # A template that root confines may not mount a /proc for its forks.
        if os.geteuid() != 0:
            forkable(node, environment)
        other = node.launch(environment, submitter=SUBMITTER)
        assert (other.container is None) == (os.geteuid() != 0)
        assert node.packet(other).pid
        for worker in (fresh, other):
            assert node.run(worker, look, list(seen), submitter=SUBMITTER) == seen
            assert node.run(worker, variables, submitter=SUBMITTER)["HOME"] == home
        of_owner = node.launch(environment)
        assert of_owner.container is not None, "the owner's workers are no forks of a submitter's template"
        assert node.packet(of_owner).pid


@pytest.mark.skipif(bool(bubblewrap.missing()), reason=bubblewrap.missing())
def test_processes_of_other_submitters_are_limited_before_the_runner_starts(
    tmp_path: Path, venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an image's Python does not limit itself."""

    def limit() -> list[int]:
        import resource

        return list(resource.getrlimit(resource.RLIMIT_NPROC))

    # of an ordinary user; the kernel has a limit for root, but exempts it
    command = [sys.executable, "-I", "-S", process_limits.__file__]
    monkeypatch.setattr(process_limits, "command", lambda more: [*command, str(more)])
    environment = Environment(type="venv", location=str(venv))
    confinement = Confinement((str(venv.resolve()),), landlock=not landlock.missing(), bubblewrap=True)
    own = resource.getrlimit(resource.RLIMIT_NPROC)
    with running_node(tmp_path, confinement=confinement, processes=10_000) as node:
        worker = node.ready(environment, submitter=SUBMITTER)
        soft, hard = resource.prlimit(worker.pid, resource.RLIMIT_NPROC)
        assert 10_000 < soft == hard != own[1]
        inside = node.run(worker, limit, submitter=SUBMITTER)
        assert 10_000 < inside[0] == inside[1] <= hard
        assert node.run(node.ready(environment), limit) == list(own)


def test_the_process_that_prepares_is_replaced_when_it_is_killed(node: Node) -> None:
    node.ready(tree())
    [pid] = node.launcher.children
    os.kill(pid, 9)
    other = tree(images.PYTHON_ELSEWHERE)
    node.launcher.prepare(other)
    answer = node.answer(other)
    if (record := getattr(answer, "record", None)) is not None:
        assert record.retryable
        node.prepare(other)
    assert node.packet(node.launch(other)).pid


def test_start_logs_are_kept(node: Node) -> None:
    node.kill(node.ready(tree()))
    assert any("farcall-probe" in log for log in node.start_logs)


def forkable(node: Node, environment: Environment) -> None:
    """Wait until the workers of an environment are forks."""

    def has_template() -> bool:
        node.serve()
        return EnvironmentReady(environment.key, forkable=True) in node.events

    wait_until(has_template)


def test_workers_are_forks_of_a_template_in_the_same_environment(tmp_path: Path) -> None:
    environment = Environment(type=FORKABLE, location=str(images.image(images.DEBIAN)), preload=("decimal",))
    before = descendants()

    def loaded() -> tuple[bool, str, str]:
        import os
        import sys

        return "decimal" in sys.modules, sys.executable, os.environ["FARCALL_WORKER_ID"]

    with running_node(tmp_path) as node:
        fresh = node.ready(environment)
        assert fresh.container is not None
        forkable(node, environment)
        forks = [node.launch(environment) for _ in range(3)]
        for number, fork in enumerate(forks, 1):
            assert fork.container is None
            assert node.packet(fork).pid
            assert node.run(fork, loaded) == (True, node.run(fresh, place)[0], str(number))
        assert node.kill(forks[0]) == "killed by SIGKILL"
        assert node.run(forks[1], loaded)[2] == "2"
    wait_until(lambda: descendants() <= before)


def test_what_a_task_in_a_fork_leaves_behind_is_found(tmp_path: Path, venv: Path) -> None:
    """Of whichever submitter: the manager looks only at workers that run tasks of others."""
    environment = Environment(type="venv", location=str(venv))

    def leave_behind() -> int:
        import os
        import time

        if (pid := os.fork()) == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(300)
            os._exit(0)
        os.waitpid(pid, 0)
        return pid

    before = descendants()
    with running_node(tmp_path) as node:
        node.ready(environment)
        forkable(node, environment)
        fork = node.launch(environment)
        assert node.packet(fork).pid
        leftovers = Leftovers(fork.worker_pid or fork.pid)
        leftovers.keep_present()
        node.run(fork, int)
        assert not leftovers.exist(now=time.monotonic(), busy_since=math.inf)
        node.run(fork, leave_behind)
        assert leftovers.exist(now=time.monotonic(), busy_since=math.inf)
        assert node.kill(fork) == "killed by SIGKILL"
    wait_until(lambda: descendants() <= before)


def test_workers_are_fresh_again_when_the_template_was_killed(tmp_path: Path) -> None:
    environment = Environment(type=FORKABLE, location=str(images.image(images.DEBIAN)))
    with running_node(tmp_path) as node:
        node.ready(environment)
        forkable(node, environment)
        fork = node.launch(environment)
        assert node.packet(fork).pid
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in node.launcher.children}
        [template] = [pid for pid, command in commands.items() if b"preparation_process" not in command]
        process_reaper.kill_trees({template})

        def is_over() -> bool:
            node.serve()
            return EnvironmentReady(environment.key, forkable=False) in node.events

        node.events.clear()
        wait_until(is_over)
        assert node.died(fork) == "killed by SIGKILL: its template has ended (it ended)"
        worker = node.launch(environment)
        assert worker.container is not None
        assert node.packet(worker).pid


@pytest.mark.parametrize("submitter", ["", SUBMITTER])
def test_one_shot_workers_of_the_endpoints_own_python_are_forks(tmp_path: Path, submitter: str) -> None:
    confined = not bubblewrap.missing()
    confinement = Confinement((), landlock=not landlock.missing(), bubblewrap=True) if confined else None
    before = descendants()

    def places() -> tuple[str, str]:
        import os
        import pathlib

        return str(pathlib.Path.cwd()), os.environ["FARCALL_WORKER_ID"]

    settings = EnvironmentSettings(tasks_per_worker=1)
    with running_node(tmp_path, settings, confinement=confinement) as node:
        first = node.ready(None, submitter=submitter)
        directory = node.run(first, places, submitter=submitter)[0]
        fork = first
        while not isinstance(fork.process, ForkedProcess):  # until the template serves
            node.kill(fork)
            fork = node.ready(None, submitter=submitter)
        assert node.run(fork, places, submitter=submitter) == (directory, str(len(node.workers) - 1))
        assert node.kill(fork) == "killed by SIGKILL"
    wait_until(lambda: descendants() <= before)


def test_a_released_environment_is_prepared_again_before_it_is_used(node: Node) -> None:
    node.kill(node.ready(tree()))
    node.launcher.release(tree().key)
    with pytest.raises(OSError, match="is not prepared"):
        node.launch(tree())
    assert node.ready(tree()).pid


def test_what_was_deleted_from_the_cache_is_prepared_again(node: Node, venv: Path) -> None:
    environment = Environment(type="venv", location=str(venv))
    node.kill(node.ready(environment))
    shutil.rmtree(node.cache)
    with pytest.raises(EnvironmentLost, match="was deleted"):
        node.launch(environment)
    assert node.ready(environment).pid


def test_the_directory_of_sockets_is_made_again(temporary: Path, node: Node, venv: Path) -> None:
    environment = Environment(type="venv", location=str(venv))
    node.kill(node.ready(environment))
    [sockets] = [each for each in temporary.glob("farcall-*") if not each.name.startswith(TEMPORARY_PREFIX)]
    shutil.rmtree(sockets)
    worker = node.launch(environment)
    assert node.packet(worker).pid


def test_a_process_of_preparations_that_hangs_stops_nothing(node: Node, venv: Path) -> None:
    environment = Environment(type="venv", location=str(venv))
    node.kill(node.ready(environment))
    [preparing] = [
        child for child in psutil.Process().children() if any("preparation" in each for each in child.cmdline())
    ]
    preparing.suspend()
    with pytest.MonkeyPatch.context() as impatient:
        impatient.setattr(preparer, "_QUIET_S", 0.1)
        node.launcher.prepare(environment)
        answer = node.answer(environment)
    wait_gone([preparing])
    assert isinstance(answer, EnvironmentFailed)
    assert answer.record.retryable
    assert isinstance(node.prepare(environment), EnvironmentReady)
    assert isinstance(node.prepare(tree()), EnvironmentReady)


def test_orders_to_a_process_of_preparations_that_hangs_never_wait(node: Node, venv: Path) -> None:
    node.kill(node.ready(Environment(type="venv", location=str(venv))))
    [preparing] = [
        child for child in psutil.Process().children() if any("preparation" in each for each in child.cmdline())
    ]
    preparing.suspend()
    for number in range(20_000):  # more than a pipe holds
        node.launcher.prepare(Environment(type="venv", location=f"/none/{number}"))
        if preparing.status() == psutil.STATUS_ZOMBIE:
            break
    else:
        pytest.fail("it was not ended")
    first = Environment(type="venv", location="/none/0")
    assert isinstance(node.answer(first), EnvironmentFailed)
    assert node.ready(tree()).pid


def test_two_managers_share_what_was_prepared(tmp_path: Path) -> None:
    settings = EnvironmentSettings(fork=False, cache_dir=str(tmp_path / "cache"))
    with running_node(tmp_path / "one", settings) as one, running_node(tmp_path / "two", settings) as two:
        one.launcher.prepare(tree())
        two.launcher.prepare(tree())
        for node in (one, two):
            assert isinstance(node.answer(tree()), EnvironmentReady)
            assert node.packet(node.launch(tree())).pid
    assert len([path for path in (tmp_path / "cache").iterdir() if path.name.startswith("worker-")]) == 1
