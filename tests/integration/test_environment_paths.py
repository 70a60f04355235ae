"""Locations that others replace by links while they are checked and started: what was checked is what is started."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farcall_common.environments import Environment
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.contracts.manager_worker import Ready
from farcall_endpoint.environments.prepare import access
from farcall_endpoint.environments.runners.base import Start
from farcall_endpoint.environments.runners.registry import RUNNERS
from farcall_endpoint.host import process_reaper, tree_root
from farcall_endpoint.host.isolation import bubblewrap, landlock
from farcall_endpoint.manager.shell.worker_process import Confinement
from tests.support.container_user import ContainerUser, apptainer_user, podman_user
from tests.support.environments import SUBMITTER, running_node
from tests.support.image_archive import write_tree
from tests.support.images import DEBIAN, image
from tests.waiting import wait_until

_SWAPS = """
import ctypes, os, sys
one, other = map(os.fsencode, sys.argv[1:])
swap = ctypes.CDLL(None).renameat2
while swap(-100, one, -100, other, 2) == 0:  # RENAME_EXCHANGE, of paths from the current directory
    pass
"""


@contextlib.contextmanager
def swapped(one: Path, other: Path) -> Iterator[None]:
    """Exchange two paths again and again meanwhile, as quickly as another process can."""
    with subprocess.Popen([sys.executable, "-c", _SWAPS, str(one), str(other)]) as process:
        try:
            wait_until(one.is_symlink)
            yield
            assert process.poll() is None
        finally:
            process.kill()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory where all users write, with ``chosen``, and ``link``, which leads to ``forbidden`` beside it."""
    directory = tmp_path / "shared"
    for path, mark in ((directory / "chosen", "chosen"), (tmp_path / "forbidden", "forbidden")):
        path.mkdir(parents=True)
        (path / "mark").write_text(mark)
    directory.chmod(0o777)
    (directory / "link").symlink_to(tmp_path / "forbidden")
    return directory


def test_a_link_that_is_put_there_after_the_check_is_never_opened(shared: Path) -> None:
    environment = Environment(type="bubblewrap", location=f"{shared}/chosen")
    settings = EnvironmentSettings(locations=(f"{shared}/*",))

    def open_by_name(place: access.Place) -> int:
        return os.open(place.path, os.O_PATH)

    def started(open_: Callable[[access.Place], int]) -> str:
        try:
            place = access.locate(environment, settings, readable=[])
            assert place is not None
            directory = open_(place)
        except (access.Refused, OSError):
            return "none"
        try:
            descriptor = os.open("mark", os.O_RDONLY, dir_fd=directory)
        finally:
            os.close(directory)
        with os.fdopen(descriptor) as file:
            return file.read()

    with swapped(shared / "chosen", shared / "link"):
        wait_until(lambda: started(open_by_name) == "forbidden")  # the swapper is quick enough
        found = [started(lambda place: tree_root.open_path(place.path)) for _ in range(200)]

        def has_both() -> bool:
            found.append(started(lambda place: tree_root.open_path(place.path)))
            return {"chosen", "none"} <= set(found)

        wait_until(has_both)
    assert "forbidden" not in found


def test_a_directory_that_becomes_a_file_leaves_the_place_of_others_alone(shared: Path, tmp_path: Path) -> None:
    place = access.Place(f"{shared}/chosen", is_fixed=False)
    command = [*access.showing("apptainer", place, access.seen_in(tmp_path, place)), "true"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False)

    (shared / "chosen").rename(shared / "moved")
    (shared / "chosen").write_text("")
    done = run()
    if "user namespace" in done.stderr:
        pytest.skip(done.stderr)
    assert "replaced by something else" in done.stderr
    (shared / "chosen").unlink()
    (shared / "moved").rename(shared / "chosen")
    done = run()
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(bool(bubblewrap.missing()), reason=bubblewrap.missing())
def test_confined_programs_see_what_was_checked_or_do_not_start(shared: Path) -> None:
    location = f"{shared}/chosen"
    system = [path for path in ("/usr", "/bin", "/lib", "/lib64") if Path(path).exists()]
    place = access.Place(location, is_fixed=False)
    command = [*access.confinement_of(system, "venv", image=location, place=place), "cat", f"{location}/mark"]

    def run() -> str:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return done.stdout

    assert run() == "chosen"
    (shared / "chosen").rename(shared / "moved")
    (shared / "link").rename(shared / "chosen")
    assert "cannot be opened as it was checked" in run()


def look(mark: str) -> tuple[str, list[str]]:
    """What a file contains, and which directories of the test the worker has open."""
    import pathlib

    found = []
    for each in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(each.readlink()))
    return pathlib.Path(mark).read_text(), [path for path in found if path.endswith(("chosen", "forbidden"))]


@pytest.mark.skipif(bool(bubblewrap.missing()), reason=bubblewrap.missing())
@pytest.mark.parametrize("type_", ["venv", "bubblewrap", "charliecloud"])
def test_workers_start_in_what_was_checked_or_not_at_all(tmp_path: Path, shared: Path, type_: str) -> None:
    for path, text in ((shared / "chosen", "chosen"), (tmp_path / "forbidden", "forbidden")):
        shutil.rmtree(path)
        if type_ == "venv":
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
        else:
            subprocess.run(["cp", "-a", "--link", str(image(DEBIAN)), str(path)], check=True)
        (path / "mark").write_text(text)
    environment = Environment(type=type_, location=f"{shared}/chosen")
    settings = EnvironmentSettings(locations=(f"{shared}/*",), fork=False)
    confinement = Confinement((), landlock=not landlock.missing(), bubblewrap=True)
    mark = f"{shared}/chosen/mark" if type_ == "venv" else "/mark"
    ends: list[str] = []
    with running_node(tmp_path / "node", settings, confinement=confinement) as node:
        assert node.run(node.ready(environment, submitter=SUBMITTER), look, mark, submitter=SUBMITTER) == ("chosen", [])
        with swapped(shared / "chosen", shared / "link"):
            for _ in range(4):
                try:
                    worker = node.launch(environment, submitter=SUBMITTER)
                    assert isinstance(node.packet(worker), Ready)
                except (OSError, AssertionError) as error:
                    ends.append(str(error))
                    continue
                ends.append(node.run(worker, look, mark, submitter=SUBMITTER)[0])
                node.kill(worker)
    assert len(ends) == 4
    assert "forbidden" not in ends


_START = """
import os, sys
from pathlib import Path
from farcall_endpoint.environments.prepare import access
from farcall_endpoint.environments.runners.base import Start
from farcall_endpoint.environments.runners.registry import RUNNERS
type_, path, cache = sys.argv[1:]
program = "import time; print('mark:', open('/mark').read(), flush=True); time.sleep(10_000)"
start = Start(path, ("python3", "-c", program), name="farcall-test-paths", private_root=True)
start, before = access.shown(type_, start, access.Place(path, is_fixed=False), Path(cache))
command = [*before, *RUNNERS[type_].command(start)]
os.execvp(command[0], command)
"""


@pytest.fixture(params=["podman", "apptainer"])
def user(request: pytest.FixtureRequest) -> Iterator[tuple[str, ContainerUser]]:
    with (podman_user if request.param == "podman" else apptainer_user)() as user:
        yield request.param, user


def test_programs_that_open_an_image_themselves_find_what_was_checked(user: tuple[str, ContainerUser]) -> None:
    type_, of = user
    tree, cache = of.home / "tree", of.directory_of("cache")
    write_tree(tree, image(DEBIAN), owner=of.uid)
    (tree / "mark").write_text("chosen")
    variables = of.variables_of_project()
    command = [of.python, "-P", "-c", _START, type_, str(tree), str(cache)]
    with of.start(
        ["env", *(f"{name}={value}" for name, value in variables.items()), *command], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mark: chosen\n"
        process_reaper.kill_trees({process.pid})
    if stop := RUNNERS[type_].stop(Start(str(tree), (), name="farcall-test-paths")):
        assert of.run(stop).returncode == 0
        assert of.run([type_, "ps", "--all", "--quiet"]).stdout == ""
    wait_until(lambda: not of.processes(), "the end of the container")
    tree.rename(of.home / "moved")
    tree.symlink_to(of.home / "moved")
    done = of.run(command, variables)
    assert done.returncode != 0
    assert "cannot be opened as it was checked" in done.stdout
    assert "mark" not in done.stdout
    assert of.processes() == {}
