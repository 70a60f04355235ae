"""Podman, Apptainer and Docker themselves: containers that the runners' commands start, kill and leave behind.

A container's program does what a worker's does first: it connects to a mounted socket, and receives descriptors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from farcall_common.environments import Environment
from farcall_endpoint.environments.runners.apptainer import ApptainerRunner
from farcall_endpoint.environments.runners.base import ImagePreparation, Mount, Runner, Start
from farcall_endpoint.environments.runners.oci import OciRunner
from farcall_endpoint.host import process_reaper
from tests.support.container_user import ContainerUser, apptainer_user, podman_user
from tests.support.docker_daemon import docker_daemon
from tests.support.image_archive import write_archive, write_tree
from tests.support.images import DEBIAN, image
from tests.waiting import WAIT_S, wait_until

# This file starts about 200 containers, a tenth of a second each.
pytestmark = pytest.mark.timeout(900)

_REPORTS = """
import errno, json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
data, descriptors, _, _ = socket.recv_fds(connection, 2**20, 4)
try:
    open("/run/farcall/worker/code.txt", "w")
except OSError as error:
    refused = errno.errorcode[error.errno]
open("written", "w").write("by the container")
os.write(descriptors[2], json.dumps({
    "boot": json.loads(data), "code": open("/run/farcall/worker/code.txt").read(), "refused": refused,
    "directory": os.getcwd(), "variables": dict(os.environ), "sees_more": os.path.exists(sys.argv[2]),
    "network": os.readlink("/proc/self/ns/net"), "interfaces": [name for _, name in socket.if_nameindex()],
}).encode())
"""
_IGNORES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
print("started", flush=True)
time.sleep(10_000)
"""


@dataclasses.dataclass(frozen=True)
class Node:
    """A technology on a node, and an image for it.

    ``variables``: that the image sets. ``start``, ``run``: as the user of the endpoint. ``left``: the
    processes or containers that there are. ``mounts``: those that the user sees.
    """

    runner: Runner
    image: str
    uid: int
    directory_of: Callable[[str], Path]
    start: Callable[..., subprocess.Popen[bytes]]
    run: Callable[[Sequence[str]], subprocess.CompletedProcess[str]]
    left: Callable[[], object]
    mounts: Callable[[], list[str]] = list
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def start_of(self, *command: str, **changes: Any) -> Start:
        """A start of the image."""
        start = Start(self.image, command, name=f"farcall-test-{random.randrange(10**9)}")
        return dataclasses.replace(start, **changes)

    def prepared(self, location: str, cache: Path) -> tuple[ImagePreparation, subprocess.CompletedProcess[str]]:
        """The preparation of an image, and how its last command ended."""
        preparation = self.runner.prepare(Environment(type=self.runner.type, location=location), cache=cache)
        for command in preparation.commands:
            done = self.run(command)
            if done.returncode:
                break
        return preparation, done


def _of_user(user: ContainerUser, runner: Runner, image_: str, **more: Any) -> Node:
    left, mounts = user.processes, user.mounts
    return Node(runner, image_, user.uid, user.directory_of, user.start, user.run, left, mounts, **more)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image that has a variable, a user and an entry point, none of which may get in the way."""
    path = tmp_path_factory.mktemp("archive") / "small.tar"
    config = {"Env": ["PATH=/usr/bin:/bin", "OF_IMAGE=yes"], "User": "1000", "Entrypoint": ["/usr/bin/false"]}
    write_archive(path, image(DEBIAN), tag="lab/small:1", config=config)
    return path


@pytest.fixture(scope="module")
def podman() -> Iterator[ContainerUser]:
    with podman_user() as user:
        yield user


@pytest.fixture(scope="module")
def apptainer() -> Iterator[ContainerUser]:
    with apptainer_user() as user:
        yield user


@pytest.fixture(scope="module")
def podman_image(podman: ContainerUser, archive: Path) -> Node:
    shutil.copy(archive, podman.directory / "small.tar")
    node = _of_user(podman, OciRunner("podman", python=podman.python), "", variables={"OF_IMAGE": "yes"})
    preparation, done = node.prepared(f"docker-archive:{podman.directory}/small.tar", podman.home / "cache")
    assert done.returncode == 0, done.stdout
    return dataclasses.replace(node, image=preparation.image)


@pytest.fixture(scope="module")
def podman_directory(podman: ContainerUser) -> Node:
    root = podman.home / "root"
    write_tree(root, image(DEBIAN), owner=podman.uid)
    return _of_user(podman, OciRunner("podman", python=podman.python), str(root))


@pytest.fixture(scope="module")
def apptainer_directory(apptainer: ContainerUser) -> Node:
    return _of_user(apptainer, ApptainerRunner("apptainer"), str(apptainer.images / DEBIAN))


@pytest.fixture(scope="module")
def apptainer_file(apptainer: ContainerUser, archive: Path) -> Node:
    shutil.copy(archive, apptainer.directory / "small.tar")
    node = _of_user(apptainer, ApptainerRunner("apptainer"), "", variables={"OF_IMAGE": "yes"})
    location = f"docker-archive:{apptainer.directory}/small.tar"
    preparation, done = node.prepared(location, apptainer.home / "cache")
    assert done.returncode == 0, done.stdout
    assert Path(preparation.image).is_file()
    assert node.prepared(location, apptainer.home / "cache")[1].stdout == "", "it is converted once"
    assert list((apptainer.home / "cache").iterdir()) == [Path(preparation.image)]
    return dataclasses.replace(node, image=preparation.image)


@pytest.fixture(scope="module")
def docker(archive: Path) -> Iterator[Node]:
    with docker_daemon() as daemon, tempfile.TemporaryDirectory(prefix="farcall-docker-") as home:
        Path(home).chmod(0o755)
        done = daemon.run(["docker", "load", "--quiet", "--input", str(archive)])
        assert done.returncode == 0, done.stdout

        def directory_of(name: str) -> Path:
            path = Path(home) / name
            path.mkdir()
            os.chown(path, 12_345, 12_345)
            return path

        def left() -> object:
            return daemon.run(["docker", "ps", "--all", "--quiet"]).stdout

        runner = OciRunner("docker", user="12345:12345")
        yield Node(
            runner, "lab/small:1", 12_345, directory_of, daemon.start, daemon.run, left, variables={"OF_IMAGE": "yes"}
        )


_ALL = ("podman_image", "podman_directory", "apptainer_directory", "apptainer_file", "docker")


@pytest.fixture(params=_ALL)
def node(request: pytest.FixtureRequest) -> Node:
    found: Node = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("private", [True, False])
def test_a_directory_in_the_memory_of_the_node_is_seen_at_its_place(node: Node, private: bool) -> None:
    memory = f"/dev/shm/farcall-test-{random.randrange(10**9)}"
    work = node.directory_of(f"memory-{node.runner.type}-{random.randrange(10**9)}")
    is_made = node.run(["mkdir", "-p", "-m", "700", f"{memory}/of-a-submitter"])
    assert is_made.returncode == 0, is_made.stdout
    try:
        if node.runner.type == "docker":
            os.chown(f"{memory}/of-a-submitter", node.uid, node.uid)
        start = node.start_of(
            *("python3", "-I", "-S", "-c", "import sys; open(sys.argv[1], 'w').write('from the container')"),
            f"{memory}/of-a-submitter/file",
            mounts=(
                Mount(str(work), str(work), writable=True),
                Mount(f"{memory}/of-a-submitter", f"{memory}/of-a-submitter", writable=True),
            ),
            directory=str(work),
            private_root=private,
        )
        done = node.run(node.runner.command(start))
        if private and node.runner.type == "apptainer":  # it has no place for the mount: the task gets no memory_dir
            assert "FileNotFoundError" in done.stdout
            return
        assert done.returncode == 0, done.stdout
        assert node.run(["cat", f"{memory}/of-a-submitter/file"]).stdout == "from the container"
    finally:
        node.run(["rm", "-r", memory])


@pytest.mark.parametrize("private", [True, False])
def test_a_program_receives_its_descriptors_and_sees_what_it_was_given(node: Node, private: bool) -> None:
    base = node.directory_of(f"seen-{node.runner.type}-{random.randrange(10**9)}")
    work, worker, sockets = base / "work", base / "worker", base / "socket"
    for path in (work, worker, sockets, worker / "run"):
        path.mkdir(mode=0o700)
        os.chown(path, node.uid, node.uid)
    (worker / "code.txt").write_text("of the node")
    (base / "more").touch()
    start = node.start_of(
        *("python3", "-I", "-S", "-c", _REPORTS, "/run/farcall/worker/run/s", str(base / "more")),
        mounts=(
            Mount(str(worker), node.runner.worker_target),
            Mount(str(sockets), f"{node.runner.worker_target}/run"),
            Mount(str(work), str(work), writable=True),
        ),
        variables={"FARCALL_A": "1, 'two' \"three\"=$(four)"},
        directory=str(work),
        network=not private,
        private_root=private,
    )
    boot = {"variables": {"B": "2"}, "directory": str(work)}
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryFile() as stdout:
        listener.bind(str(sockets / "s"))
        os.chown(sockets / "s", node.uid, node.uid)
        listener.listen()
        with node.start(node.runner.command(start), stderr=subprocess.PIPE) as process:
            assert process.stderr is not None
            with _accepted(listener, process) as connection:
                socket.send_fds(connection, [json.dumps(boot).encode()], [1, 1, stdout.fileno(), 2])
                assert process.wait(WAIT_S) == 0, process.stderr.read().decode()
        stdout.seek(0)
        found = json.loads(stdout.read())
    assert found["boot"] == boot
    assert found["code"] == "of the node"
    assert found["refused"] in ("EROFS", "EACCES")
    assert found["directory"] == str(work)
    assert (work / "written").read_text() == "by the container"
    assert (work / "written").stat().st_uid == node.uid
    variables = found["variables"]
    assert variables["FARCALL_A"] == "1, 'two' \"three\"=$(four)"
    assert variables.items() >= node.variables.items()
    assert "PYTHONPATH" not in variables
    assert not (private and found["sees_more"])
    assert (found["network"] == str(Path("/proc/self/ns/net").readlink())) != private
    assert found["interfaces"] == ["lo"] or not private
    wait_until(lambda: not node.left(), f"the end of {start.name}")


def _accepted(listener: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket:
    """The connection of a container's program, or why there is none."""
    listener.settimeout(1)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            return listener.accept()[0]
        if process.poll() is not None:
            assert process.stderr is not None
            raise AssertionError(f"exit code {process.returncode}: {process.stderr.read().decode()}")
    raise AssertionError("no connection")


def test_nothing_is_left_of_containers_that_are_killed_at_any_moment(node: Node) -> None:
    """Also of one that ignores SIGTERM, and whose program has a child in a session of its own."""
    start = node.start_of("python3", "-I", "-S", "-c", _IGNORES)
    with _started(node, start) as process:
        _kill(node, start, process)  # Podman makes directories and a process for all containers of its user
    wait_until(lambda: not node.left())
    mounts = node.mounts()
    began = time.monotonic()
    with _started(node, start) as process:
        start_s = time.monotonic() - began
        process.send_signal(signal.SIGTERM)
        _kill(node, start, process)
    moments = random.Random(node.image)
    for _ in range(20):
        start = dataclasses.replace(start, name=f"farcall-test-{random.randrange(10**9)}")
        with node.start(node.runner.command(start)) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moments.uniform(0, 1.2 * start_s))
            _kill(node, start, process)
    if isinstance(node.runner, OciRunner):  # a busy Docker creates a container after its client was killed, and stopped
        for name in node.run(node.runner.leftovers()).stdout.split():
            node.run(node.runner.remove([name]))
    wait_until(lambda: not node.left(), "the end of all that was started")
    assert node.mounts() == mounts


@contextlib.contextmanager
def _started(node: Node, start: Start) -> Iterator[subprocess.Popen[bytes]]:
    with node.start(node.runner.command(start), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        yield process


def _kill(node: Node, start: Start, process: subprocess.Popen[bytes]) -> None:
    """As a manager does."""
    process_reaper.kill_trees({process.pid})
    process.wait(WAIT_S)
    if stop := node.runner.stop(start):
        node.run(stop)


@pytest.mark.parametrize("name", ["podman_image", "docker"])
def test_a_container_whose_manager_was_killed_is_found_and_removed(name: str, request: pytest.FixtureRequest) -> None:
    node: Node = request.getfixturevalue(name)
    runner = node.runner
    assert isinstance(runner, OciRunner)
    start = node.start_of("python3", "-I", "-S", "-c", _IGNORES)
    with _started(node, start) as process:
        process.kill()  # and nothing below it
    found = node.run(runner.leftovers()).stdout.split()
    assert start.name in found
    node.run(runner.remove([start.name]))
    wait_until(lambda: not node.left())
    assert start.name not in node.run(runner.leftovers()).stdout.split()


def test_an_image_without_the_program_is_told_from_one_that_fails(node: Node) -> None:
    done = node.run(node.runner.command(node.start_of("/nothing/python3", "-c", "pass")))
    assert done.returncode in (126, 127, 255)
    assert "/nothing/python3" in done.stdout
    assert "no such file" in done.stdout.lower()
    failing = node.start_of("python3", "-c", "raise SystemExit(7)")
    assert node.run(node.runner.command(failing)).returncode == 7
    wait_until(lambda: not node.left())


@pytest.mark.parametrize(
    ("name", "location", "words"),
    [
        ("podman_image", "127.0.0.1:1/lab/sci:1", "connection refused"),
        ("podman_image", "docker-archive:/nothing/image.tar", "no such file or directory"),
        ("docker", "127.0.0.1:1/lab/sci:1", "connection refused"),
        ("apptainer_directory", "docker://127.0.0.1:1/lab/sci:1", "connection refused"),
        ("apptainer_directory", "docker-archive:/nothing/image.tar", "no such file or directory"),
    ],
)
def test_an_image_that_cannot_be_had_is_refused_in_the_programs_own_words(
    name: str, location: str, words: str, request: pytest.FixtureRequest
) -> None:
    node: Node = request.getfixturevalue(name)
    cache = node.directory_of(f"cache-{random.randrange(10**9)}")
    _, done = node.prepared(location, cache)
    assert done.returncode != 0
    assert words in done.stdout
    assert not list(cache.iterdir())


@pytest.mark.parametrize("name", ["podman_directory", "apptainer_directory"])
def test_a_missing_image_is_refused_in_the_programs_own_words(name: str, request: pytest.FixtureRequest) -> None:
    node: Node = request.getfixturevalue(name)
    done = node.run(node.runner.command(node.start_of("python3", image="/nothing/root")))
    assert done.returncode != 0
    assert "/nothing/root" in done.stdout
    wait_until(lambda: not node.left())


def test_a_full_disk_while_an_image_is_converted_leaves_nothing(
    apptainer: ContainerUser, apptainer_directory: Node, archive: Path
) -> None:
    shutil.copy(archive, apptainer.directory / "full.tar")
    cache = apptainer.small_disk("full", size="20m")
    _, done = apptainer_directory.prepared(f"docker-archive:{apptainer.directory}/full.tar", cache)
    assert done.returncode != 0
    assert "no space left on device" in done.stdout.lower()
    assert apptainer.run(["ls", "-A", str(cache)]).stdout == ""


def test_where_no_file_can_be_mounted_an_image_is_converted_into_a_directory(
    apptainer: ContainerUser, apptainer_directory: Node, archive: Path
) -> None:
    shutil.copy(archive, apptainer.directory / "unpacked.tar")
    with apptainer.without_fuse():
        preparation, done = apptainer_directory.prepared(
            f"docker-archive:{apptainer.directory}/unpacked.tar", apptainer.home / "unpacked"
        )
        assert done.returncode == 0, done.stdout
        assert Path(preparation.image).is_dir()
        start = apptainer_directory.start_of("python3", "-c", "print(6 * 7)", image=preparation.image)
        assert apptainer_directory.run(apptainer_directory.runner.command(start)).stdout == "42\n"


def test_a_conversion_that_is_ended_leaves_nothing(
    apptainer: ContainerUser, apptainer_directory: Node, archive: Path
) -> None:
    shutil.copy(archive, apptainer.directory / "ended.tar")
    cache = apptainer.home / "ended"
    environment = Environment(type="apptainer", location=f"docker-archive:{apptainer.directory}/ended.tar")
    (command,) = apptainer_directory.runner.prepare(environment, cache=cache).commands
    with apptainer.start(command) as process:
        wait_until(lambda: list(cache.glob("*/*")), "the beginning of a conversion")
        os.killpg(process.pid, signal.SIGTERM)
    assert process.returncode != 0
    assert not list(cache.iterdir())


def test_the_runners_work_on_their_nodes(podman: ContainerUser, apptainer: ContainerUser) -> None:
    for user, runner in (
        (podman, "oci import OciRunner as R; print(R('podman').missing())"),
        (apptainer, "apptainer import ApptainerRunner as R; print(R('apptainer').missing())"),
        (apptainer, "apptainer import ApptainerRunner as R; print(R('singularity').missing())"),
    ):
        done = user.run([user.python, "-c", f"from farcall_endpoint.environments.runners.{runner}"])
        assert done.stdout == "\n"


def test_a_node_that_forbids_user_namespaces_says_so(podman: ContainerUser, apptainer: ContainerUser) -> None:
    """What kernels and sites forbid is forbidden here by a limit of zero."""
    for user, module, name in (
        (podman, "oci", "OciRunner('podman')"),
        (apptainer, "apptainer", "ApptainerRunner('apptainer')"),
    ):
        program = f"from farcall_endpoint.environments.runners.{module} import *; print({name}.missing())"
        found = user.run_without_namespaces([user.python, "-c", program]).stdout
        assert "namespace" in found or "cannot clone" in found
