"""Templates: workers that are forks, what they share, what they must not share, and how they end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from farcall_endpoint.contracts.fork_protocol import (
    MAX_PACKET,
    Exited,
    Fork,
    Forked,
    FromTemplate,
    Imported,
    Importing,
    Preload,
    Reap,
    Refused,
    Serving,
    Skipped,
    decode_from_template,
    encode,
)
from farcall_endpoint.contracts.manager_worker import channel_pair
from farcall_endpoint.environments.templates import templates
from farcall_endpoint.environments.templates.templates import (
    ForkedProcess,
    Template,
    TemplateFailed,
    TemplateSuspected,
    start_template,
)
from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.process_reaper import descendants, read_processes
from farcall_endpoint.worker import namespaces
from farcall_endpoint.worker.boot import Boot, Descriptors
from farcall_endpoint.worker.settings import WorkerSettings
from tests.support.templates import ORDINARY_USER, fork_worker, running_template, wait_for
from tests.waiting import WAIT_S, wait_until

USERS = [None, pytest.param(ORDINARY_USER, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can"))]


@contextlib.contextmanager
def fork_once(template: Template, **variables: str) -> Iterator[ForkedProcess]:
    """A fork, in the time that a manager has for it."""
    channel, end, claims = channel_pair()
    with contextlib.closing(channel), contextlib.closing(end), contextlib.closing(claims):
        yield template.fork(Boot(variables, "/"), Descriptors(end.fileno(), claims.fileno(), 1, 2))


def namespaced() -> None:
    """Skip where the machine's kernel forbids namespaces."""
    if reason := namespaces.missing():
        pytest.skip(reason)


def test_a_fork_is_a_worker() -> None:
    def about() -> dict[str, Any]:
        import os
        import sys

        return {"modules": sorted(sys.modules), "variables": dict(os.environ), "pid": os.getpid(), "sid": os.getsid(0)}

    with running_template(modules=["xml.dom.minidom"]) as template:
        worker = fork_worker(template, variables={"COLOR": "blue"}).ready()
        seen = worker.run(about)
        assert "xml.dom.minidom" in seen["modules"]
        assert seen["variables"].items() >= {"COLOR": "blue"}.items()
        assert not {"PATH", "OMP_NUM_THREADS"} & set(seen["variables"])
        assert seen["pid"] == seen["sid"] == worker.process.pid
        assert os.getpgid(worker.process.pid) == worker.process.pid
        assert worker.end() == -signal.SIGKILL
        assert set(template.imports.cost) == {"xml.dom.minidom"}


def test_how_a_fork_ended() -> None:
    def leave(code: int) -> None:
        import os

        os._exit(code)

    def kill(number: int) -> None:
        import os

        os.kill(os.getpid(), number)

    with running_template() as template:
        for function, argument, code in ((leave, 3, 3), (kill, 9, -9), (kill, 11, -11)):
            worker = fork_worker(template).ready()
            worker.send(function, argument)
            assert worker.ended() == code
        worker = fork_worker(template).ready()
        worker.channel.close()  # as when its manager is gone
        assert worker.ended() == 0


@pytest.mark.parametrize("isolated", [False, True])
def test_a_killed_fork_leaves_no_process(isolated: bool) -> None:
    def start_child() -> int:
        import subprocess

        return subprocess.Popen(["sleep", "1000"], start_new_session=True, stdin=subprocess.DEVNULL).pid

    if isolated:
        namespaced()
    with running_template(namespaces=isolated) as template:
        worker = fork_worker(template, namespaces=isolated).ready()
        worker.run(start_child)
        left = descendants({worker.process.pid}, read_processes())
        assert left
        os.kill(worker.process.pid, signal.SIGKILL)  # this one only
        worker.ended()
        wait_for(template, lambda: not any(map(psutil.pid_exists, left)))


@pytest.mark.parametrize("isolated", [False, True])
def test_forks_of_a_killed_template_are_killed(isolated: bool) -> None:
    def start_child() -> None:
        import subprocess

        subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)

    if isolated:
        namespaced()
    with running_template(namespaces=isolated, spares=1) as template:
        workers = [fork_worker(template, namespaces=isolated).ready() for _ in range(3)]
        assert template.pid is not None
        os.kill(template.pid, signal.SIGKILL)
        wait_for(template, lambda: template.is_over)
        assert template.problem == "it ended"
        assert [worker.ended() for worker in workers] == [-signal.SIGKILL] * 3
        with pytest.raises(TemplateFailed, match="it ended"):
            fork_worker(template)


def test_a_closed_template_ends_with_its_last_fork() -> None:
    with running_template(spares=2) as template:
        worker = fork_worker(template).ready()
        template.close()
        with pytest.raises(TemplateFailed):
            fork_worker(template)
        assert worker.run(lambda: 1) == 1
        assert not template.is_over
        worker.end()
        wait_for(template, lambda: template.is_over)


def test_a_template_ends_without_its_manager() -> None:
    with running_template() as template:
        worker = fork_worker(template).ready()
        pid = template.pid
        assert pid is not None
        template._connection.shutdown(socket.SHUT_RDWR)
        wait_for(template, lambda: template.is_over)
        worker.channel.close()
        worker.ended()
        wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


_MANAGER = """
import os, signal
from farcall_endpoint.environments.templates.templates import Template
from tests.support.templates import fork_worker, start_template, wait_for

process, connection = start_template(variables=dict(os.environ))
template = Template(connection, spares=1)
wait_for(template, lambda: template.is_serving)
branch = Template(template.branch()[1], modules=["colorsys"], spares=1)
wait_for(branch, lambda: branch.is_serving)
worker = fork_worker(branch).ready()
print(template.pid, branch.pid, worker.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_template_and_its_branch_end_without_their_manager() -> None:
    done = subprocess.run([sys.executable, "-c", _MANAGER], stdout=subprocess.PIPE, text=True, timeout=WAIT_S)
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 3
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("user", USERS)
def test_isolated_workers_of_a_branch_end_with_it(user: int | None) -> None:
    namespaced()
    with running_template(namespaces=True, user=user) as template:
        process, connection = template.branch()
        branch = Template(connection, namespaces=True, spares=1)
        wait_for(branch, lambda: branch.is_serving)
        of_template = fork_worker(template, namespaces=True).ready()
        workers = [fork_worker(branch, namespaces=True).ready() for _ in range(2)]
        assert [worker.run(os.getpid) for worker in (of_template, *workers)] == [1] * 3
        assert branch.pid is not None
        os.kill(branch.pid, signal.SIGKILL)
        wait_for(branch, lambda: branch.is_over)
        assert [worker.ended() for worker in workers] == [-signal.SIGKILL] * 2
        template.end_branch(process)
        wait_for(template, lambda: process.code == -signal.SIGKILL)
        assert of_template.run(os.getpid) == 1
        of_template.end()


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_random_numbers_of_forks_differ() -> None:
    def numbers() -> list[Any]:
        import multiprocessing
        import random
        import secrets
        import ssl
        import uuid

        import numpy

        return [
            random.random(),
            float(numpy.random.random()),
            secrets.token_hex(),
            str(uuid.uuid4()),
            ssl.RAND_bytes(16).hex(),
            bytes(multiprocessing.current_process().authkey).hex(),
        ]

    modules = ["random", "numpy", "numpy.random", "secrets", "uuid", "ssl", "multiprocessing"]
    with running_template(modules=modules, spares=2) as template:
        workers = [fork_worker(template).ready() for _ in range(4)]
        drawn = [worker.run(numbers) for worker in workers]
        assert all(len(set(column)) == 4 for column in zip(*drawn, strict=True))
        for worker in workers:
            worker.end()


def test_libraries_get_the_worker_s_number_of_threads() -> None:
    def count() -> tuple[int, int]:
        import os
        import pathlib

        import numpy

        numpy.ones((600, 600)) @ numpy.ones((600, 600))
        return len(list(pathlib.Path("/proc/self/task").iterdir())), int(os.environ["OPENBLAS_NUM_THREADS"])

    with running_template(modules=["numpy"]) as template:
        for wanted in (1, 3):
            variables = {**os.environ, "OPENBLAS_NUM_THREADS": str(wanted)}
            worker = fork_worker(template, variables=variables).ready()
            threads, named = worker.run(count)
            assert named == wanted
            assert threads <= wanted  # fewer where the machine has fewer cores
            assert (threads > 1) == (wanted > 1)
            worker.end()


# -- isolation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", USERS)
def test_what_an_isolated_fork_sees(user: int | None) -> None:
    def leave(text: str) -> None:
        import ctypes
        import os
        import pathlib

        pathlib.Path("/dev/shm/left").write_text(text)
        os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
        ctypes.CDLL(None).msgget(4711, 0o1600)  # IPC_CREAT

    def look() -> dict[str, Any]:
        import ctypes
        import os
        import pathlib
        import socket

        def tried(what: str, *arguments: Any) -> bool:
            return int(getattr(ctypes.CDLL(None), what)(*arguments)) >= 0

        found: dict[str, Any] = {}
        found["processes"] = [path.name for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]
        found["memory"] = [str(each) for each in pathlib.Path("/dev/shm").iterdir()]
        found["descriptors"] = [os.path.realpath(path) for path in pathlib.Path("/proc/self/fd").iterdir()]
        found["capabilities"] = [
            line.split()[1]
            for line in pathlib.Path("/proc/self/status").read_text().splitlines()
            if line.startswith(("CapEff", "CapPrm", "CapBnd"))
        ]
        name = socket.gethostname().encode()
        found["done"] = [
            what
            for what, succeeded in {
                "remount": tried("mount", b"none", b"/", None, 32 | 4096, None),
                "unmount": tried("umount2", b"/dev/shm", 2),
                "proc": tried("mount", b"proc", b"/proc", b"proc", 0, None),
                "rename": tried("sethostname", name, len(name)),
                "queue": tried("msgget", 4711, 0),
                "kernel": os.access("/proc/sys/kernel/core_pattern", os.W_OK),
            }.items()
            if succeeded
        ]
        return found

    namespaced()
    with running_template(namespaces=True, user=user, spares=1) as template:
        other = fork_worker(template, namespaces=True).ready()
        other.run(leave, "secret")
        worker = fork_worker(template, namespaces=True).ready()
        seen = worker.run(look)
        assert seen["processes"] == ["1"]
        assert seen["memory"] == []
        assert seen["capabilities"] == ["0" * 16] * 3
        assert seen["done"] == []
        assert len(seen["descriptors"]) < 14
        assert not any("anon_inode" in each for each in seen["descriptors"])
        for each in (worker, other):
            each.end()
    assert not Path("/dev/shm/left").exists()


@pytest.mark.parametrize("user", USERS)
def test_isolated_forks_are_confined_by_landlock_last(user: int | None) -> None:
    def write(path: str) -> str:
        import pathlib

        try:
            (pathlib.Path(path) / "new").write_text("x")
        except OSError as error:
            return type(error).__name__
        return "done"

    from farcall_endpoint.host.isolation import landlock

    namespaced()
    if reason := landlock.missing():
        pytest.skip(reason)
    settings = WorkerSettings(readable=("/",), writable=("/dev/shm",))
    with running_template(namespaces=True, user=user) as template:
        worker = fork_worker(template, variables=settings.to_variables(), namespaces=True).ready()
        assert worker.run(write, "/dev/shm") == "done"
        assert worker.run(write, "/var/tmp") == "PermissionError"
        worker.end()


def test_a_fork_has_a_network_of_its_own_if_the_node_s_is_not_wanted() -> None:
    def connect() -> list[str]:
        import socket

        server = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(server.getsockname(), timeout=20).close()
        return [name for _, name in socket.if_nameindex()]

    namespaced()
    with running_template(namespaces=True, network=False) as template:
        worker = fork_worker(template, namespaces=True).ready()
        assert set(worker.run(connect)) <= {"lo", "tunl0", "sit0", "ip6tnl0", "gre0"}  # what each new one has
        worker.end()


def test_a_worker_that_needs_namespaces_never_runs_without_them() -> None:
    with running_template() as template, pytest.raises(TemplateFailed, match="no namespaces of their own"):
        fork_worker(template, namespaces=True)


def test_a_template_that_cannot_give_namespaces_is_over() -> None:
    """Before it imports anything: its workers are started afresh."""
    namespaced()
    limit = 'echo 0 >/proc/sys/user/max_pid_namespaces; exec "$@"'
    forbid = ("unshare", "--user", "--map-root-user", "sh", "-c", limit, "sh")
    process, connection = start_template(forbid, variables=dict(os.environ))
    template = Template(connection, modules=["json"], namespaces=True)
    wait_for(template, lambda: template.is_over)
    assert template.problem.startswith("namespaces: ")
    assert template.imports.cost == {}
    process.wait(WAIT_S)


# -- contract ----------------------------------------------------------------------------------------------------------

HAZARDS = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
        "2 threads",
    ),
    "c_thread": (
        (
            "import ctypes\nlibc = ctypes.CDLL(None)\nstate = ctypes.c_ulong()\n"
            "libc.pthread_create(ctypes.byref(state), None, libc.pause, None)"
        ),
        "2 threads",
    ),
    "held_lock": (
        (
            "import threading, time\nlock = threading.Lock()\nstarted = threading.Event()\n"
            "def hold():\n    with lock:\n        started.set()\n        time.sleep(1000)\n"
            "threading.Thread(target=hold, daemon=True).start()\nstarted.wait()"
        ),
        "2 threads",
    ),
    "socket": ("import socket\nkept = socket.socket()", "a socket open"),
    "epoll": ("import select\nkept = select.epoll()", "an epoll descriptor"),
    "eventfd": ("import os\nkept = os.eventfd(0)", "an eventfd"),
    "pipe": ("import os\nkept = os.pipe()", "pipe:"),
    "log_file": ("import tempfile\nkept = tempfile.TemporaryFile()", "which all children would share"),
    "inotify": ("import ctypes\nkept = ctypes.CDLL(None).inotify_init()", "an inotify descriptor"),
    "killed": ("import os\nos.kill(os.getpid(), 11)", "it ended in the import of "),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_an_unfit_template_is_refused(name: str, tmp_path: Path) -> None:
    text, reason = HAZARDS[name]
    (tmp_path / f"unfit_{name}.py").write_text(text)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with running_template(
        modules=["json", f"unfit_{name}"], variables=variables, places=[str(tmp_path)], serves=False
    ) as template:
        assert template.is_over
        assert reason in template.problem
        assert template.problem_module == f"unfit_{name}"


@pytest.mark.parametrize("library", ["polars", "grpc", "jax", "tensorflow", "duckdb"])
def test_a_forbidden_library_is_not_imported(library: str, tmp_path: Path) -> None:
    """Neither by its name, nor by a module that imports it."""
    (tmp_path / f"{library}.py").write_text("")
    (tmp_path / "uses_it.py").write_text(f"import {library}")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    options: dict[str, Any] = {"variables": variables, "places": [str(tmp_path)]}
    with running_template(modules=[f"{library}.parts"], **options) as template:
        assert f"{library}: " in template.imports.skipped[f"{library}.parts"]
    with running_template(modules=["uses_it"], serves=False, **options) as template:
        assert f"{library} is loaded: " in template.problem
        assert template.problem_module == "uses_it"


def test_the_thread_of_an_allocator_makes_no_template_unfit(tmp_path: Path) -> None:
    """As that of pyarrow, which jemalloc starts when the library is loaded."""
    (tmp_path / "allocator.py").write_text(
        f"{HAZARDS['c_thread'][0]}\nlibc.pthread_setname_np(state, b'jemalloc_bg_thd')"
    )
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with running_template(modules=["allocator"], variables=variables, places=[str(tmp_path)], spares=1) as template:
        assert "allocator" in template.imports.cost
        worker = fork_worker(template).ready()
        assert worker.run(lambda: len(__import__("os").listdir("/proc/self/task"))) == 1
        worker.end()


def test_a_module_that_hangs_is_named(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import signal\nsignal.pause()")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with running_template(
        modules=["hangs"], variables=variables, places=[str(tmp_path)], start_limit_s=2.0, serves=False
    ) as template:
        assert template.problem == "the import of hangs took longer than 2 s"
        assert template.problem_module == "hangs"


def test_a_module_that_raises_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("raise RuntimeError('no device')")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    modules = ["raises", "leaves", "json.tool"]
    with running_template(modules=modules, variables=variables, places=[str(tmp_path)]) as template:
        assert "RuntimeError: no device" in template.imports.skipped["raises"]
        assert "SystemExit" in template.imports.skipped["leaves"]
        assert "json.tool" in template.imports.cost


def test_only_modules_of_python_s_own_directories_are_imported(tmp_path: Path) -> None:
    """A submitter may name any module: none that it could have written is imported, and no code in it runs."""
    for name in ("planted", "colorsys"):  # the second has the name of a standard module
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    modules = ["planted", "package.part", "colorsys", "json.nothing", "../x", "antigravity"]
    with running_template(modules=modules, variables=variables) as template:
        assert set(template.imports.skipped) == set(modules) - {"colorsys"}
        assert "colorsys" in template.imports.cost
        worker = fork_worker(template).ready()
        assert worker.run(lambda path: path in __import__("sys").path, str(tmp_path))  # as a fresh worker has it
        worker.end()
    assert not (tmp_path / "ran").exists()
    with running_template(modules=["planted"], variables=variables, places=["/"], private=[str(tmp_path)]) as template:
        assert "planted" in template.imports.skipped
    assert not (tmp_path / "ran").exists()


def test_the_template_cannot_be_traced_by_its_forks() -> None:
    def trace(pid: int) -> list[str]:
        import ctypes
        import os

        # As a process without the rights of root.
        libc = ctypes.CDLL(None, use_errno=True)
        outcome = []
        if os.geteuid() == 0:
            os.setresuid(1001, 1001, 1001)
        outcome.append("traced" if libc.ptrace(16, pid, 0, 0) == 0 else "refused")
        try:
            os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
            outcome.append("opened")
        except OSError:
            outcome.append("refused")
        return outcome

    with running_template() as template:
        worker = fork_worker(template).ready()
        assert worker.run(trace, template.pid) == ["refused", "refused"]
        worker.end()


# -- many --------------------------------------------------------------------------------------------------------------


_HOSTILE = """
import socket, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
for packet in sys.argv[2:]:
    connection.send(bytes.fromhex(packet))
time.sleep(600)
"""


@pytest.mark.parametrize(
    "packets",
    [
        [Imported("os", 1.0, 1)],
        [Skipped("os", "none")],
        [Forked(1)],
        [Serving("3"), Importing("json")],
        [Serving("3"), Serving("3")],
        [Serving("3"), Forked(1), Forked(1)],
        [Serving("3"), Forked(2)],
        [Importing("json")] * 4,
        [Refused("os", "unfit")],
        [Serving("3"), *[Exited(9, 0)] * 5],
    ],
    ids=str,
)
def test_a_template_of_a_hostile_image_is_ended(packets: list[FromTemplate]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [encode(packet).hex() for packet in packets]
    command = [sys.executable, "-c", _HOSTILE, str(theirs.fileno()), *words]
    template = Template(ours, modules=["json"], spares=1)
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        while not template.is_over:
            assert select.select([template], [], [], WAIT_S)[0]
            template.serve()
        assert "sent what no template sends" in template.problem
        assert process.wait(WAIT_S) == -signal.SIGKILL


_FLOODS = """
import os, signal, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
serving, packet = map(bytes.fromhex, sys.argv[2:])
connection.recv(2**16)
connection.send(serving)
_, descriptors, *_ = socket.recv_fds(connection, 2**16, 1)
os.read(descriptors[0], 2**20)  # the boot message: it cannot be taken back
os.fork()
while True:
    connection.send(packet)
"""


def test_a_template_that_sends_without_end_does_not_hold_its_manager() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [encode(packet).hex() for packet in (Serving("3"), Exited(0, 0))]
    command = [sys.executable, "-c", _FLOODS, str(theirs.fileno()), *words]
    template = Template(ours)
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL) as process:
        theirs.close()
        wait_for(template, lambda: template.is_serving)
        with pytest.raises(TemplateFailed, match="more packets than a template sends"), fork_once(template):
            pytest.fail("it never forks")
        assert process.wait(WAIT_S) == -signal.SIGKILL


_DENIES = """
import os, socket, sys, time
connection = socket.socket(fileno=int(sys.argv[1]))
serving, forked, exited = map(bytes.fromhex, sys.argv[2:])
connection.recv(2**16)
connection.send(serving)
connection.recv(2**16)
if os.fork() == 0:
    connection.send(forked)
    time.sleep(600)
time.sleep(0.5)
connection.send(exited)
time.sleep(600)
"""


def test_a_child_whose_end_a_template_invents_is_killed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [encode(packet).hex() for packet in (Serving("3"), Forked(1), Exited(1, 0))]
    command = [sys.executable, "-c", _DENIES, str(theirs.fileno()), *words]
    template = Template(ours)
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]):
        theirs.close()
        wait_for(template, lambda: template.is_serving)
        with fork_once(template) as worker:
            wait_for(template, lambda: template.is_over)
            assert "a child that has not ended" in template.problem
            process_reaper.kill_trees({worker.pid})  # as the reaper of the manager does
            assert worker.wait() == -signal.SIGKILL
            wait_until(lambda: not psutil.pid_exists(worker.pid) or psutil.Process(worker.pid).status() == "zombie")
            os.close(worker.pidfd)


_REAPS = """
import os, signal, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
serving, forked, exited = map(bytes.fromhex, sys.argv[2:])
connection.recv(2**16)
connection.send(serving)
connection.recv(2**16)
child = os.fork()
if child == 0:
    connection.send(forked)
    signal.pause()
os.waitpid(child, 0)
connection.send(exited)
while connection.recv(2**16):  # until it is closed
    pass
"""


def test_the_exit_code_of_a_child_that_its_template_has_reaped() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [encode(packet).hex() for packet in (Serving("3"), Forked(1), Exited(1, 7))]
    command = [sys.executable, "-c", _REAPS, str(theirs.fileno()), *words]
    template = Template(ours)
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        wait_for(template, lambda: template.is_serving)
        with fork_once(template) as worker:
            process_reaper.kill_trees({worker.pid})  # as the reaper of the manager does
            wait_until(lambda: not psutil.pid_exists(worker.pid))
            assert worker.wait() == 7
            os.close(worker.pidfd)
        template.close()
        assert process.wait(WAIT_S) == 0


def test_the_exit_code_is_not_that_of_another_process() -> None:
    def leave() -> None:
        import os

        os._exit(3)

    with running_template() as template, subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"]) as other:
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        worker = fork_worker(template).ready()
        worker.process.pid = other.pid  # as if the template had reaped its child, and the id had been used again
        worker.send(leave)
        assert worker.ended() == 3


def test_the_exit_code_is_known_before_the_template_says_it() -> None:
    def leave() -> None:
        import os

        os._exit(3)

    with running_template() as template:
        worker = fork_worker(template).ready()
        assert template.pid is not None
        os.kill(template.pid, signal.SIGSTOP)
        worker.send(leave)
        assert worker.ended() == 3
        assert template.next_deadline() == float("inf")  # it is not suspected: nothing was to be waited for
        os.kill(template.pid, signal.SIGCONT)
        assert fork_worker(template).ready().end() == -signal.SIGKILL


def test_the_end_of_a_child_is_not_reported_when_its_id_is_not_needed() -> None:
    process, connection = start_template(variables=dict(os.environ))
    connection.settimeout(WAIT_S)
    with connection, contextlib.ExitStack() as stack:
        connection.send(encode(Preload()))
        assert isinstance(decode_from_template(connection.recv(MAX_PACKET)), Serving)

        def fork(number: int) -> tuple[socket.socket, list[FromTemplate]]:
            """The manager's end of a child's connection, and what the template has sent until the child was there."""
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                socket.send_fds(connection, [encode(Fork(number))], [theirs.fileno()])
            packets: list[FromTemplate] = []
            while Forked(number) not in packets:
                packets.append(decode_from_template(connection.recv(MAX_PACKET)))
            return stack.enter_context(ours), packets

        child, _ = fork(1)
        connection.send(encode(Reap(1)))
        child.close()  # then it ends
        wait_until(lambda: not psutil.Process(process.pid).children())
        assert fork(2)[1] == [Forked(2)]
    assert process.wait(WAIT_S) == 0


def test_while_forks_follow_each_other_a_spare_child_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_template(spares=1) as template:
        for busy_s, is_replaced in ((0.0, False), (1000.0, True)):
            monkeypatch.setattr(templates, "_BUSY_S", busy_s)
            wait_for(template, lambda: template._spares and template._spares[0].pid)
            worker = fork_worker(template)
            assert bool(template._spares) == is_replaced
            worker.end()


def test_what_a_template_says_of_itself_is_one_line() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    refused = encode(Refused("", "unfit\n2026-01-01 ERROR \x1b[2Jforged" + "x" * 1000)).hex()
    template = Template(ours)
    command = [sys.executable, "-c", _HOSTILE, str(theirs.fileno()), refused]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]):
        wait_for(template, lambda: template.is_over)
        assert template.problem.startswith("unfit 2026-01-01 ERROR \\x1b[2Jforgedx")
        assert len(template.problem) <= 510


def test_a_template_that_a_task_has_stopped_is_suspected_until_it_answers() -> None:
    def stop() -> None:
        import os
        import signal

        os.kill(os.getppid(), signal.SIGSTOP)

    def leave() -> None:
        import os

        os._exit(3)

    def color() -> str:
        import os

        return os.environ["COLOR"]

    with running_template() as template:
        workers = [fork_worker(template).ready() for _ in range(3)]
        workers[0].run(stop)
        for reason in ("did not fork in time", "does not answer"):  # at once, the second time
            with pytest.raises(TemplateSuspected, match=reason), fork_once(template, COLOR="red") as process:
                pytest.fail(f"process {process.pid}")
        workers[0].send(leave)
        assert workers[0].ended() == 3  # as the kernel says
        assert workers[1].run(lambda: 7) == 7
        assert not template.is_over
        assert template.pid is not None
        os.kill(template.pid, signal.SIGCONT)
        worker = fork_worker(template, variables={"COLOR": "blue"}).ready()
        assert worker.run(color) == "blue"  # the child that came late has not got what another worker became
        assert [each.end() for each in (*workers[1:], worker)] == [-signal.SIGKILL] * 3
        wait_for(template, lambda: not template._spares or template._spares[0].pid)


def test_a_template_that_is_suspected_for_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_SUSPECTED_LIMIT_S", 0.5)
    with running_template() as template:
        worker = fork_worker(template).ready()
        assert template.pid is not None
        os.kill(template.pid, signal.SIGSTOP)
        with pytest.raises(TemplateSuspected), fork_once(template):
            pytest.fail("it is stopped")
        wait_for(template, lambda: template.is_over)
        assert template.problem == "it has not answered for 0.5 s"
        assert worker.ended() == -signal.SIGKILL


def test_a_storm_of_forks() -> None:
    with running_template(modules=["json"], spares=3) as template:
        workers = [fork_worker(template) for _ in range(200)]
        assert len({worker.process.pid for worker in workers}) == 200
        for worker in workers:
            worker.ready()
        assert [worker.run(os.getpid) for worker in workers] == [worker.process.pid for worker in workers]
        for worker in workers:
            worker.channel.close()
        assert {worker.ended() for worker in workers} == {0}


@pytest.mark.parametrize("isolated", [False, True])
def test_nothing_is_left_of_many_forks(isolated: bool) -> None:
    if isolated:
        namespaced()

    def measure(pid: int) -> tuple[int, int, int]:
        return psutil.Process(pid).num_fds(), psutil.Process().num_fds(), len(psutil.Process(pid).children())

    with running_template(namespaces=isolated, spares=1) as template:
        assert template.pid is not None
        before = None
        for number in range(2000 if not isolated else 200):
            worker = fork_worker(template, namespaces=isolated)
            worker.channel.close()
            assert worker.ended() in (0, 1)  # its channel may have been closed before it said that it was ready
            template.serve()
            if number == 20:
                wait_for(template, lambda: measure(template.pid or 0)[2] <= 2)
                before = measure(template.pid)
        assert before is not None
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: measure(template.pid or 0) <= before, timeout_s=20)
        after = measure(template.pid)
        assert all(now <= then + 2 for now, then in zip(after, before, strict=True)), (before, after)


def test_a_spare_child_that_is_killed_is_replaced() -> None:
    with running_template(spares=1) as template:
        wait_for(template, lambda: template._spares and template._spares[0].pid)
        spare = template._spares[0]
        os.kill(spare.pid, signal.SIGKILL)
        wait_for(template, lambda: template._spares and template._spares[0].pid not in (0, spare.pid))
        worker = fork_worker(template).ready()
        assert worker.run(lambda: 7) == 7
        worker.end()


def test_workers_report_what_tasks_import() -> None:
    def use() -> None:
        import colorsys  # noqa: F401
        import xml.dom.minidom  # noqa: F401

    settings = WorkerSettings(reports_imports=True)
    with running_template() as template:
        worker = fork_worker(template, variables=settings.to_variables()).ready()
        worker.run(use)
        worker.run(len, "")  # behind the report
        assert {"colorsys", "xml", "xml.dom", "xml.dom.minidom"} <= set(worker.modules)
        assert worker.modules.index("xml.dom") < worker.modules.index("xml.dom.minidom")
        worker.end()
    started_at = time.monotonic()
    with running_template(modules=worker.modules) as template:
        assert not template.problem
        assert time.monotonic() >= started_at
