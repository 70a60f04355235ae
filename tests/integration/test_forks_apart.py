"""Forks of one template in a container are apart from each other, as root and as an ordinary user: each has what a
fresh container in the same place has. The nodes run in processes of their own, as that user (``main``)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from farcall_common.environments import Environment
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments.runners.registry import RUNNERS
from farcall_endpoint.environments.templates.templates import ForkedProcess
from farcall_endpoint.host.isolation import bubblewrap
from farcall_endpoint.manager.shell.worker_process import Confinement, WorkerProcess
from tests.support import images
from tests.support.environments import SUBMITTER, Node, running_node
from tests.support.ordinary_user import as_ordinary_user
from tests.waiting import wait_until

MARK: Final = "XLA_FARCALL_TEST"
"""A variable that templates get, too."""
OWN: Final = "own"
"""One-shot workers of the endpoint's own Python."""
CASES: Final = [
    *(("charliecloud", "root", ""), ("charliecloud", "ordinary", ""), ("bubblewrap", "ordinary", "")),
    *(("bubblewrap", "ordinary", SUBMITTER), ("venv", "ordinary", SUBMITTER)),
    *((OWN, "ordinary", SUBMITTER), (OWN, "root", SUBMITTER)),
]


def node_of(technology: str, user: str, submitter: str, directory: Path, mode: str) -> tuple[list[str], dict[str, str]]:
    """The command of a node, and its variables."""
    if user == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    reason = "" if technology == OWN else RUNNERS[technology].missing()
    if reason or (submitter and (reason := bubblewrap.missing())):
        pytest.skip(reason)
    image = images.image(images.DEBIAN)
    location = Path(sys.prefix) if technology in ("venv", OWN) else image
    directory.chmod(0o777)
    command = [sys.executable, "-P", "-m", __name__, mode, technology, str(location), str(directory), submitter]
    if user == "ordinary":
        command = as_ordinary_user(command, reachable=[Path.cwd(), image, directory])
    return command, {**os.environ, "PYTHONPATH": str(Path.cwd()), MARK: str(uuid.uuid4()), "HOME": str(directory)}


@pytest.mark.parametrize(("technology", "user", "submitter"), CASES)
def test_forks_of_one_template_are_apart(tmp_path: Path, technology: str, user: str, submitter: str) -> None:
    command, variables = node_of(technology, user, submitter, tmp_path, "look")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["fork"]["processes"] == ["1"]
    assert seen["fork"]["left"] == []
    assert seen["fork"]["capabilities"] == ["0" * 16] * 5
    assert seen["fork"]["attacks"] == []
    for what in ("written", "network", "namespaces"):
        assert seen["fork"][what] == seen["fresh"][what]
    assert not marked(variables[MARK])


@pytest.mark.parametrize(("technology", "user"), [("charliecloud", "root"), ("bubblewrap", "ordinary")])
def test_nothing_is_left_of_forks_that_are_killed(tmp_path: Path, technology: str, user: str) -> None:
    """A worker, its template and then the manager, each at a random moment of a start."""
    command, variables = node_of(technology, user, "", tmp_path, "loop")
    with running(command, variables) as node:
        assert node.stdout is not None

        def line() -> dict[str, Any]:
            assert node.stdout is not None
            found: dict[str, Any] = json.loads(node.stdout.readline())
            return found

        wait_until(lambda: line()["forked"])
        for killed in ("worker", "template", "node"):
            for _ in range(random.randrange(1, 6)):
                found = line()
            with contextlib.suppress(ProcessLookupError):
                os.kill(found[killed], signal.SIGKILL)
    wait_until(lambda: not marked(variables[MARK]), "the end of all processes")


@contextlib.contextmanager
def running(command: list[str], variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True) as node:
        try:
            yield node
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """The processes of a node, in whatever namespaces."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


# -- in the node's process ---------------------------------------------------------------------------------------------


def leave() -> None:
    """What another worker must not find."""
    import ctypes
    import os
    from pathlib import Path

    for path in ("/tmp", "/dev/shm", "/var/tmp"):
        if os.access(path, os.W_OK):
            (Path(path) / "left-by-a-fork").write_text("x")
    os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
    ctypes.CDLL(None).msgget(4711, 0o1600)  # IPC_CREAT


def look() -> dict[str, Any]:
    """What a worker finds, and what it can do."""
    import ctypes
    import os
    import socket
    from pathlib import Path

    libc = ctypes.CDLL(None)
    places = ["/tmp", "/dev/shm", "/var/tmp", "/", "/usr", "/run", "/etc", "/proc/sys/kernel", os.environ["HOME"]]

    def write(path: str) -> bool:
        try:
            (Path(path) / "new").write_text("x")
            (Path(path) / "new").unlink()
        except OSError:
            return False
        return True

    def enter(name: str) -> bool:
        try:
            descriptor = os.open(f"/proc/1/ns/{name}", os.O_RDONLY)
        except OSError:
            return False
        return os.getpid() != 1 and int(libc.setns(descriptor, 0)) == 0

    def unmounted_in_another_user_namespace() -> bool:
        """Whether a fork of this process, with all privileges over a copy of these mounts, uncovers what is below."""
        pid = os.fork()
        if pid == 0:
            code = 0
            if libc.unshare(0x10000000 | 0x20000) == 0:  # NEWUSER, NEWNS
                code = int(any(libc.umount2(path, 2) == 0 for path in (b"/tmp", b"/dev/shm", b"/proc")))
            os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0

    attacks = {
        "mount": libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0,
        "remount": libc.mount(b"none", b"/", None, 32 | 4096, None) == 0,
        "unmount": libc.umount2(b"/tmp", 2) == 0,
        "unmount as root of another user namespace": unmounted_in_another_user_namespace(),
        "queue": libc.msgget(4711, 0) >= 0,
        "trace": libc.ptrace(16, os.getppid() or 1, None, None) == 0,  # PTRACE_ATTACH
        "signal": os.getppid() != 0,
        "enter": any(enter(name) for name in ("mnt", "pid", "ipc", "user")),
        "kernel": os.access("/proc/sys/kernel/core_pattern", os.W_OK),
        "name": libc.sethostname(b"x", 1) == 0,
    }
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "processes": sorted(path.name for path in Path("/proc").iterdir() if path.name.isdigit()),
        "left": [path for path in ("/tmp", "/dev/shm", "/var/tmp") if (Path(path) / "left-by-a-fork").exists()],
        "capabilities": [line.split()[1] for line in status if line.startswith("Cap")],
        "attacks": [what for what, succeeded in attacks.items() if succeeded],
        "written": {path: write(path) for path in places},
        "network": sorted(name for _, name in socket.if_nameindex()),
        "namespaces": Path("/proc/self/ns/net").readlink() == Path("/proc/thread-self/ns/net").readlink(),
    }


def forked(node: Node, environment: Environment | None, submitter: str) -> WorkerProcess:
    """A worker that is a fork."""
    found: list[WorkerProcess] = []

    def launched() -> bool:
        worker = node.launch(environment, submitter=submitter)
        node.packet(worker)
        if not isinstance(worker.process, ForkedProcess):
            node.kill(worker)
            return False
        found.append(worker)
        return True

    wait_until(launched, timeout_s=60.0)
    return found[0]


def main(mode: str, technology: str, location: str, directory: str, submitter: str) -> None:
    """A node with one environment: print what its workers find, or start and kill workers without end."""
    environment = None if technology == OWN else Environment(type=technology, location=location, preload=())
    confinement = None
    if submitter:
        readable = [location, sys.base_prefix, sys.prefix, str(Path.cwd())]
        confinement = Confinement(readable=readable, landlock=False, bubblewrap=True)
    settings = EnvironmentSettings(locations=("*",), tasks_per_worker=1)
    with running_node(Path(directory), settings, confinement=confinement) as node:
        fresh = node.ready(environment, submitter=submitter)
        other = forked(node, environment, submitter)
        if mode == "look":
            found = {"fresh": node.run(fresh, look, submitter=submitter)}
            node.run(other, leave, submitter=submitter)
            fork = forked(node, environment, submitter)
            found["fork"] = node.run(fork, look, submitter=submitter)
            print(json.dumps(found), flush=True)
            return
        launcher = node.launcher._in_environments()._launcher
        worker = other
        while True:
            is_fork = isinstance(worker.process, ForkedProcess)
            template = next(iter(launcher._pool.pids), 0)
            line = {"node": os.getpid(), "template": template, "worker": worker.pid, "forked": is_fork}
            print(json.dumps(line), flush=True)
            if worker in node.workers:
                node.kill(worker)
            worker = node.launch(environment)
            with contextlib.suppress(AssertionError):  # it was killed, and its end was seen
                node.packet(worker)


if __name__ == "__main__":
    main(*sys.argv[1:])
