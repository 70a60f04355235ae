"""Containers from directory trees, for real: bubblewrap and Charliecloud, as root and as an ordinary user."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
import venv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pytest

from farcall_endpoint.environments.runners.base import Mount, Runner, Start
from farcall_endpoint.environments.runners.bubblewrap import BubblewrapRunner
from farcall_endpoint.environments.runners.charliecloud import CharliecloudRunner
from farcall_endpoint.environments.runners.prefixes import PrefixRunner
from farcall_endpoint.host import process_reaper, tree_root
from farcall_endpoint.host.isolation import bubblewrap
from tests.support.images import DEBIAN, image
from tests.support.ordinary_user import USER, as_ordinary_user
from tests.waiting import WAIT_S, wait_until

RUNNERS: Final[dict[str, Runner]] = {"bubblewrap": BubblewrapRunner(), "charliecloud": CharliecloudRunner()}
SYSTEM: Final = ("/usr", "/bin", "/lib", "/lib64", "/etc", "/sys")

PROGRAM: Final = """
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
data, descriptors, _, _ = socket.recv_fds(connection, 2**20, 4)
boot = json.loads(data)

def tried(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "done"

def write(path):
    return tried(lambda: open(os.path.join(path, "written"), "w").close())

def lines(path):
    return dict(line.rstrip("\\n").split(":\\t", 1) for line in open(path) if ":\\t" in line)

wanted = boot["variables"]
own = {connection.fileno(), *descriptors}
facts = {
    "root": sorted(os.listdir("/")),
    "directory": os.getcwd(),
    "variables": dict(os.environ),
    "written": {path: write(path) for path in json.loads(wanted["WRITE"])},
    "exists": {path: os.path.exists(path) for path in json.loads(wanted["LOOK"])},
    "processes": [int(name) for name in os.listdir("/proc") if name.isdigit()],
    "descriptors": [each for each in range(100) if each not in own and tried(lambda: os.fstat(each)) == "done"],
    "opens": tried(lambda: os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY)),
    "connects": tried(lambda: socket.create_connection(("127.0.0.1", int(wanted["PORT"])), timeout=20).close()),
    "status": lines("/proc/self/status"),
    "python": sys.executable,
}
os.write(descriptors[2], json.dumps(facts).encode() + b"\\n")
connection.recv(1)
"""


class Container:
    """A running container, as its starter sees it: its process, and the connection that its program has made."""

    def __init__(self, command: list[str], listener: socket.socket, *, log: Path, descriptors: tuple[int, ...]) -> None:
        self.listener = listener
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=descriptors,
                start_new_session=True,
            )

    def connection(self) -> socket.socket:
        """Wait for its program."""
        self.listener.settimeout(0.05)
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                return self.listener.accept()[0]
            if self.process.poll() is not None:
                break
        raise AssertionError(f"no connection: {self.process.poll()}: {self.log.read_text(errors='replace')}")

    def kill(self) -> None:
        process_reaper.kill_trees({self.process.pid})
        self.process.wait()


class Site:
    """A node with an image, a directory for the socket and one to write to, and the ways to start a container."""

    def __init__(self, tmp_path: Path, *, ordinary: bool) -> None:
        self.tmp_path = tmp_path
        self.ordinary = ordinary
        self.image = image(DEBIAN)
        self.worker, self.work = tmp_path / "worker", tmp_path / "work"
        for directory in (self.worker, self.work):
            directory.mkdir()
        for directory in (tmp_path, self.worker, self.work):
            directory.chmod(0o777)
        (tmp_path / "secret").write_text("of the owner")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.worker / "socket"))
        (self.worker / "socket").chmod(0o777)
        self.listener.listen(100)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.marker = f"marker-{uuid.uuid4()}"

    def close(self) -> None:
        self.listener.close()
        self.tcp.close()

    def start(self, runner: Runner, **changes: Any) -> Start:
        target = f"{runner.worker_target}/socket"
        values: dict[str, Any] = {
            "image": str(self.image),
            "command": ("/usr/bin/python3", "-I", "-S", "-c", PROGRAM, target, self.marker),
            "mounts": (
                Mount(str(self.worker), runner.worker_target),
                Mount(str(self.work), str(self.work), writable=True),
            ),
            "variables": {"PATH": "/usr/bin:/bin", "GREETING": "good $HOME"},
            "directory": str(self.work),
        }
        return Start(**values | changes)

    def prefix(self, *writable: Path) -> list[str]:
        """What confines a submitter's workers, who may read the image."""
        readable = [*SYSTEM, sys.prefix, sys.base_prefix, str(Path(tree_root.__file__).parent)]
        readable += [str(self.image), str(self.worker)]
        return bubblewrap.prefix(
            readable=readable, writable=list(map(str, (self.work, *writable))), directory=self.work, nested=True
        )

    def run(
        self, runner: Runner, start: Start, prefix: Iterable[str] = (), *, descriptors: tuple[int, ...] = ()
    ) -> Container:
        command = [*prefix, *runner.command(start)]
        if self.ordinary:
            places = [Path(tree_root.__file__).parent, self.image, self.tmp_path]
            if os.geteuid() == 0:
                command = [word for word in command if word not in bubblewrap._NESTED]
            command = as_ordinary_user(command, reachable=places)
        return Container(command, self.listener, log=self.tmp_path / "log", descriptors=descriptors)

    def facts(self, container: Container, *, write: Iterable[str] = (), look: Iterable[str] = ()) -> dict[str, Any]:
        """What the program in a container finds; the container is killed."""
        variables = {
            "WRITE": json.dumps(list(write)),
            "LOOK": json.dumps(list(look)),
            "PORT": str(self.tcp.getsockname()[1]),
        }
        reader, writer = os.pipe()
        try:
            with container.connection() as connection, open(reader, "rb") as output:  # noqa: PTH123
                boot = json.dumps({"variables": variables}).encode()
                socket.send_fds(connection, [boot], [0, 0, writer, writer])
                line = output.readline()
        finally:
            os.close(writer)
            container.kill()
        wait_until(lambda: not self.left(), "the end of the container")
        found: dict[str, Any] = msgspec.json.decode(line)
        return found

    def left(self) -> list[int]:
        """Processes, of whatever namespace, that belong to containers of this test."""
        processes = psutil.process_iter(["cmdline", "status"])
        live = [each for each in processes if each.info["status"] != psutil.STATUS_ZOMBIE]
        return [each.pid for each in live if self.marker in (each.info["cmdline"] or ())]


@pytest.fixture(params=["root", "ordinary"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    site = Site(tmp_path, ordinary=request.param == "ordinary")
    yield site
    site.close()
    for pid in site.left():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Runner:
    return usable(request.param)


def usable(name: str) -> Runner:
    if reason := RUNNERS[name].missing():
        if os.environ.get("FARCALL_NEED_IMAGES"):
            pytest.fail(reason)
        pytest.skip(reason)
    return RUNNERS[name]


def test_a_container_sees_its_image_and_its_mounts_only(site: Site, runner: Runner) -> None:
    before = sorted(each.name for each in site.image.iterdir())
    facts = site.facts(
        site.run(runner, site.start(runner)),
        write=("/", "/usr", "/etc", "/var/tmp", runner.worker_target, str(site.work), "/tmp"),
        look=("/usr/bin/python3", str(site.tmp_path / "secret"), "/etc/debian_version", "/root/.ssh"),
    )
    assert set(before) <= set(facts["root"])
    assert facts["python"] == "/usr/bin/python3"
    assert facts["directory"] == str(site.work)
    assert {key: facts["variables"][key] for key in ("PATH", "GREETING")} == {
        "PATH": "/usr/bin:/bin",
        "GREETING": "good $HOME",
    }
    assert set(facts["variables"]) <= {"PATH", "GREETING", "PWD", "CH_RUNNING", "LC_CTYPE", "HOME"}
    assert facts["written"].pop(str(site.work)) == "done"
    assert facts["written"].pop("/tmp") == "done"
    assert "done" not in facts["written"].values()
    assert facts["exists"] == {
        "/usr/bin/python3": True,
        str(site.tmp_path / "secret"): False,
        "/etc/debian_version": True,
        "/root/.ssh": False,
    }
    assert facts["connects"] == "done", "it shares the network of the node"
    assert sorted(each.name for each in site.image.iterdir()) == before, "the tree is as it was"
    assert not (site.image / "tmp" / "written").exists()
    if runner.type == "bubblewrap":
        assert len(facts["processes"]) <= 2, "bubblewrap's and the program"
        assert int(facts["status"]["CapEff"], 16) == 0
        assert facts["status"]["NoNewPrivs"] == "1"
        assert facts["opens"] != "done", "root would be root of the node"


def test_a_container_without_network_reaches_nothing(site: Site, runner: Runner) -> None:
    facts = site.facts(site.run(runner, site.start(runner, network=False)))
    assert facts["connects"] == "ConnectionRefusedError", "of a loopback interface of its own"


def test_inherited_descriptors_are_open_in_the_container(site: Site, runner: Runner) -> None:
    reader, writer = os.pipe()
    try:
        facts = site.facts(site.run(runner, site.start(runner), descriptors=(writer,)))
    finally:
        os.close(reader)
        os.close(writer)
    assert facts["descriptors"] == [0, 1, 2, writer]


def test_a_submitters_container_is_in_the_submitters_view(site: Site, runner: Runner) -> None:
    usable("bubblewrap")
    start = site.start(runner, private_root=True)
    facts = site.facts(
        site.run(runner, start, site.prefix()),
        write=("/", "/usr", "/etc", runner.worker_target, str(site.work)),
        look=(str(site.tmp_path / "secret"), str(site.image)),
    )
    assert facts["written"].pop(str(site.work)) == "done"
    assert "done" not in facts["written"].values()
    assert not any(facts["exists"].values())
    assert facts["opens"] != "done", "root would be root of the node"
    assert os.getpid() not in facts["processes"]
    assert len(facts["processes"]) <= 4, "two of bubblewrap's, and those of the container"


def test_a_tree_that_leads_elsewhere_is_looked_up_in_the_submitters_view(site: Site, runner: Runner) -> None:
    """A submitter names a link in a directory of their own, or puts it there when the path has been checked."""
    usable("bubblewrap")
    private, tree = site.tmp_path / "private", site.work / "tree"
    private.mkdir()
    tree.symlink_to(private)
    start = site.start(runner, private_root=True, image=str(tree))
    container = site.run(runner, start, site.prefix())
    assert container.process.wait(timeout=WAIT_S) == 1
    assert container.log.read_text() == f"{runner.type}: {tree} is not a directory on this node, or not readable\n"
    if runner.type == "bubblewrap":  # the other one needs a directory that is not the root
        tree.unlink()
        tree.symlink_to("/")
        facts = site.facts(site.run(runner, start, site.prefix()), look=(str(site.tmp_path / "secret"), "/var/log"))
        assert not any(facts["exists"].values())


def hostile(site: Site, change: Callable[[Path], object]) -> Path:
    """A copy of the image, of hard links, changed."""
    tree = site.tmp_path / "hostile"
    subprocess.run(["cp", "--archive", "--link", str(site.image), str(tree)], check=True)
    change(tree)
    return tree


def replace(path: Path, make: Callable[[Path], object]) -> None:
    if path.is_dir() and not path.is_symlink():
        subprocess.run(["rm", "-rf", str(path)], check=True)
    else:
        path.unlink(missing_ok=True)
    make(path)


def test_a_hostile_tree_is_only_that(site: Site, runner: Runner, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o777)

    def change(tree: Path) -> None:
        replace(tree / "run", lambda path: path.symlink_to(outside))  # where the worker's code is mounted
        replace(tree / "dev", os.mkfifo)
        replace(tree / "proc", lambda path: path.symlink_to("/oldroot/proc"))
        replace(tree / "tmp", lambda path: path.symlink_to("../../../../../../tmp"))
        replace(tree / "home", lambda path: path.write_text("not a directory"))
        replace(tree / "srv", lambda path: path.symlink_to("/"))
        replace(tree / "opt", lambda path: path.symlink_to(str(tmp_path)))
        replace(tree / "etc" / "resolv.conf", lambda path: path.symlink_to(outside / "made"))
        replace(tree / "etc" / "passwd", lambda path: path.symlink_to(outside / "made"))
        os.mkfifo(tree / "pipe")
        (tree / "--bind").mkdir()

    site.image = hostile(site, change)
    look = ("/opt/secret", "/srv/opt/secret", "/dev/null", "/proc/self", "/etc/debian_version", str(outside))
    facts = site.facts(site.run(runner, site.start(runner)), write=("/tmp", "/dev/shm"), look=look)
    assert [facts["exists"][path] for path in look] == [False, False, True, True, True, False]
    assert list(outside.iterdir()) == [], "nothing was created through a link"
    assert not Path("/tmp/written").exists()


@pytest.mark.parametrize("place", ["missing", "file", "link to nothing"])
def test_a_tree_that_is_none_is_said(site: Site, runner: Runner, place: str) -> None:
    tree = site.tmp_path / "tree"
    if place == "file":
        tree.write_text("")
    elif place == "link to nothing":
        tree.symlink_to(site.tmp_path / "nowhere")
    container = site.run(runner, site.start(runner, image=str(tree)))
    assert container.process.wait(timeout=WAIT_S) == 1
    assert container.log.read_text() == f"{runner.type}: {tree} is not a directory on this node, or not readable\n"


def test_a_program_that_the_image_lacks_is_said_in_the_runners_words(site: Site, runner: Runner) -> None:
    container = site.run(runner, site.start(runner, command=("/opt/none/python", site.marker)))
    assert container.process.wait(timeout=WAIT_S) != 0
    assert "/opt/none/python" in container.log.read_text()
    assert "No such file" in container.log.read_text()


def test_a_setuid_program_of_a_tree_gives_nothing(site: Site, runner: Runner) -> None:
    def change(tree: Path) -> None:
        program = (tree / "usr" / "bin" / "python3").resolve()
        content = program.read_bytes()
        program.unlink()  # the whole tree has the same file
        program.write_bytes(content)
        program.chmod(0o4755)

    site.image = hostile(site, change)
    facts = site.facts(site.run(runner, site.start(runner)))
    assert set(facts["status"]["Uid"].split()) == {str(USER if site.ordinary and os.geteuid() == 0 else os.geteuid())}


@pytest.mark.parametrize("way", ["process tree", "first process, then its group"])
def test_a_start_that_is_killed_at_any_moment_leaves_nothing(site: Site, runner: Runner, way: str) -> None:
    begun = time.monotonic()
    container = site.run(runner, site.start(runner))
    container.connection().close()
    whole_s = time.monotonic() - begun
    container.kill()
    moments = random.Random(15)
    for _ in range(15):  # times two users, two ways, two technologies
        container = site.run(runner, site.start(runner))
        site.listener.settimeout(moments.uniform(0, 1.2) * whole_s + 1e-6)
        with contextlib.suppress(TimeoutError):
            site.listener.accept()[0].close()
        if way != "process tree":
            container.process.kill()
            container.process.wait()
        container.kill()
    wait_until(lambda: not site.left(), "the end of all containers")


def test_a_tree_with_a_place_for_everything_stays_read_only(site: Site, runner: Runner) -> None:
    code = "import os; print(sorted(os.listdir('/mnt'))); os.mkdir('/usr/new')"
    command = ("/usr/bin/python3", "-I", "-S", "-c", code, site.marker)
    mounts = (Mount(str(site.worker), "/mnt"),)
    container = site.run(runner, site.start(runner, command=command, mounts=mounts, directory="/"))
    assert container.process.wait(timeout=WAIT_S) == 1
    assert "['socket']" in container.log.read_text()
    assert "Read-only file system: '/usr/new'" in container.log.read_text()


def test_a_container_ends_with_its_program(site: Site, runner: Runner) -> None:
    container = site.run(runner, site.start(runner))
    container.connection().close()
    assert container.process.wait(timeout=WAIT_S) != 0, "the program received nothing"
    wait_until(lambda: not site.left(), "the end of the container")


def test_a_program_that_ignores_signals_is_killed_with_what_it_started(site: Site, runner: Runner) -> None:
    code = (
        "import os, signal, socket, subprocess, sys, time\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
        "program = [sys.executable, '-c', 'import time; time.sleep(1000)', sys.argv[2]]\n"
        "subprocess.Popen(program, start_new_session=True)\n"
        "connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "connection.connect(sys.argv[1])\n"
        "time.sleep(1000)\n"
    )
    command = ("/usr/bin/python3", "-I", "-S", "-c", code, f"{runner.worker_target}/socket", site.marker)
    container = site.run(runner, site.start(runner, command=command))
    with container.connection():
        wait_until(lambda: len(site.left()) >= 2, "both programs are seen")
        container.kill()
    wait_until(lambda: not site.left(), "the end of the container")


@pytest.mark.parametrize("confined", [False, True])
def test_a_virtual_environment_is_used_in_its_place(site: Site, confined: bool) -> None:
    """Of a submitter, it is confined as the endpoint's own workers."""
    runner = PrefixRunner("venv")
    place = site.tmp_path / "venv"
    venv.create(place, symlinks=True)
    (
        package := place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "mine.py"
    ).touch()
    code = f"import mine; {PROGRAM}"
    prefix: list[str] = []
    if confined:
        usable("bubblewrap")
        readable = [*SYSTEM, sys.base_prefix, str(place), str(site.worker)]
        prefix = bubblewrap.prefix(readable=readable, writable=[str(site.work)], directory=site.work)
    start = site.start(
        runner,
        image=str(place),
        command=(f"{place}/bin/python", "-I", "-c", code, str(site.worker / "socket"), site.marker),
        mounts=(Mount(str(site.work), str(site.work), writable=True),),
    )
    facts = site.facts(
        site.run(runner, start, prefix), write=(str(package.parent),), look=(str(site.tmp_path / "secret"),)
    )
    assert facts["python"] == f"{place}/bin/python"
    assert facts["directory"] == str(site.work)
    assert facts["variables"].pop("LC_CTYPE", "C.UTF-8") == "C.UTF-8"  # Python's own, without a locale
    assert facts["variables"].pop("PWD", str(site.work)) == str(site.work)  # bubblewrap's
    assert facts["variables"] == {
        "PATH": f"{place}/bin:/usr/bin:/bin",
        "GREETING": "good $HOME",
        "VIRTUAL_ENV": str(place),
    }
    if confined:
        assert facts["exists"] == {str(site.tmp_path / "secret"): False}
        assert facts["written"] == {str(package.parent): "OSError"}
        assert facts["opens"] != "done", "root would be root of the node"
        assert len(facts["processes"]) <= 3
    else:
        assert facts["exists"] == {str(site.tmp_path / "secret"): True}


def test_a_kernel_that_forbids_user_namespaces_is_found_by_a_try(runner: Runner) -> None:
    """In a user namespace that may have none below it, without the rights that root has in it."""
    module = type(runner).__module__
    code = f"from {module} import {type(runner).__name__} as R; print(R().missing())"
    script = f"""
        echo 0 > /proc/sys/user/max_user_namespaces
        exec setpriv --bounding-set -all --inh-caps -all {shlex.quote(sys.executable)} -c {shlex.quote(code)}
    """
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-ec", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{runner.type}: ")
    assert any(word in done.stdout for word in ("not permitted", "No space left", "namespace"))
