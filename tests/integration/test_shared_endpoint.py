"""A shared endpoint under attack by one of its users: what that user's tasks get of the owner's and of others'."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest

from farcall_common.environments import Environment
from farcall_endpoint.contracts.agent_manager import FileContent
from farcall_endpoint.host.isolation import landlock
from farcall_endpoint.host.isolation.system_calls import RULES, architecture
from farcall_endpoint.manager.shell.file_server import FileServer
from tests.support.endpoint import EndpointProcess, FakeCloud, running_endpoint, wait_gone
from tests.support.endpoint.levels import ATTACKER, LEVELS, MISSING, VICTIM, endpoint_at_each_level, victims_of
from tests.support.ordinary_user import USER
from tests.waiting import wait_until

SECRETS = {
    "FARCALL_CLIENT_SECRET": "hush",
    "GLOBUS_COMPUTE_CLIENT_SECRET": "hush",
    "AWS_SECRET_ACCESS_KEY": "hush",
    "SSH_AUTH_SOCK": "hush",
}
endpoint = endpoint_at_each_level(workers=1, variables=SECRETS)
"""One worker, so that attacker and victim follow one another."""


def variables() -> dict[str, str]:
    import os

    return dict(os.environ)


def read_as_an_ordinary_user(path: str) -> str:
    """Without the rights of root, under which tests may run."""
    import ctypes
    import os
    import pathlib

    reader, writer = os.pipe()
    if os.fork() == 0:
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        ctypes.CDLL(None).capset(header, data)
        try:
            answer = pathlib.Path(path).read_bytes()
        except OSError as error:
            answer = type(error).__name__.encode()
        os.write(writer, answer[:4000])
        os._exit(0)
    os.wait()
    return os.read(reader, 4000).decode(errors="replace")


def patch_the_worker() -> None:
    """What follows in this process is answered with a lie."""
    import gc

    from farcall_endpoint.worker.runner import Runner

    for runner in [each for each in gc.get_objects() if isinstance(each, Runner)]:
        runner._serialized = lambda call: (b'11\n"a lie"',)  # type: ignore[method-assign]


def end_the_worker() -> None:
    os._exit(1)


def truth(argument: str) -> str:
    return argument


def start_a_process(name: str) -> bool:
    """Whether it runs; it ends soon after this task."""
    import subprocess

    return subprocess.Popen(["bash", "-c", "sleep 1000; true", name], start_new_session=True).poll() is None


def processes_with(argument: str) -> list[int]:
    """The processes, of whatever namespace, that were started with an argument; zombies have none."""
    return [each.pid for each in psutil.process_iter(["cmdline"]) if argument in (each.info["cmdline"] or ())]


def test_no_task_gets_credentials_of_the_agent(cloud: FakeCloud, endpoint: EndpointProcess, level: str) -> None:
    mine = cloud.end(cloud.submit(variables)).value
    theirs = cloud.end(cloud.submit(variables, submitter=ATTACKER)).value
    assert isinstance(mine, dict)
    assert isinstance(theirs, dict)
    for name in ("FARCALL_TOKEN", "FARCALL_CLIENT_SECRET", "GLOBUS_COMPUTE_CLIENT_SECRET"):
        assert name not in mine | theirs
    assert mine["AWS_SECRET_ACCESS_KEY"] == "hush", "the owner's tasks are the owner's"
    if level == "none":
        return
    assert "hush" not in theirs.values()
    assert Path(theirs["HOME"]) == endpoint.directory.path / "tasks_working_dir" / "submitters" / ATTACKER
    assert theirs["TMPDIR"] != mine.get("TMPDIR")
    assert theirs["PATH"] == mine["PATH"]


def test_no_task_reads_the_environment_of_agent_or_manager(
    cloud: FakeCloud, endpoint: EndpointProcess, tmp_path: Path
) -> None:
    own = cloud.end(cloud.submit(read_as_an_ordinary_user, "/proc/self/environ", submitter=ATTACKER)).value
    assert "FARCALL_ENDPOINT_ID" in str(own), "that a process can be read at all"
    assert endpoint.agent is not None
    for process in (endpoint.agent.pid, *(manager.pid for manager in endpoint.managers())):
        found = cloud.end(cloud.submit(read_as_an_ordinary_user, f"/proc/{process}/environ", submitter=ATTACKER))
        assert found.value in ("PermissionError", "FileNotFoundError")


def test_nothing_of_one_submitter_is_left_for_another(cloud: FakeCloud, level: str) -> None:
    name = f"left-by-the-attacker-{os.getpid()}-{level}"
    assert cloud.end(cloud.submit(start_a_process, name, submitter=ATTACKER)).value is True

    def attacked() -> object:
        """Attack, and return what the victim's task returns. What the first task has left running ends the worker,
        perhaps between both tasks."""
        cloud.end(cloud.submit(patch_the_worker, submitter=ATTACKER))
        return cloud.end(cloud.submit(truth, "the truth", submitter=VICTIM)).value

    if level == "none":
        wait_until(lambda: attacked() == "a lie", "the attack works where nothing separates submitters")
        cloud.end(cloud.submit(end_the_worker, max_attempts=1))
        return
    assert attacked() == "the truth"
    assert not processes_with(name)


def wait_with_a_file() -> None:
    """A victim: its process is known by its name, and has no more rights than its attacker."""
    import ctypes
    import pathlib
    import time

    libc = ctypes.CDLL(None)
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    libc.prctl(15, b"victim", 0, 0, 0)  # PR_SET_NAME
    pathlib.Path("note").write_text("private")
    time.sleep(1000)


def attack(targets: dict[str, Any]) -> dict[str, str]:
    """What becomes of each attack: "done" or the name of an error. Root's rights are given up first, as tests may run
    with them."""
    import contextlib
    import ctypes
    import json
    import os
    import pathlib
    import resource
    import socket

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long  # an address may be above 2**31

    def trace(process: int) -> None:
        if libc.ptrace(0x4206, process, None, None) != 0:  # PTRACE_SEIZE
            raise OSError(ctypes.get_errno(), "ptrace")

    def connect(address: str) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address)

    def opened(path: str, flags: int) -> None:
        os.close(os.open(path, flags))

    def listed(path: str) -> None:
        if pathlib.Path(path) not in pathlib.Path(path).parent.iterdir():
            raise FileNotFoundError

    def call(name: str, *arguments: object) -> int:
        """A system call that must not fail."""
        values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
        result = libc.syscall(ctypes.c_long(targets["numbers"][name]), *values)
        if result < 0:
            raise OSError(ctypes.get_errno(), name)
        return int(result)

    def watch(path: str) -> None:
        os.close(call("inotify_add_watch", call("inotify_init1", 0), path.encode(), 0xFFF))

    def pin(process: int) -> None:
        before = os.sched_getaffinity(process)
        wanted = {min(before)}
        os.sched_setaffinity(process, wanted)
        if len(before) > 1 and os.sched_getaffinity(process) != wanted:
            raise PermissionError

    def set_core_limit(process: int) -> None:
        resource.prlimit(process, resource.RLIMIT_CORE, resource.prlimit(process, resource.RLIMIT_CORE))

    def read_memory(process: int) -> None:
        data = ctypes.create_string_buffer(8)
        place = (ctypes.c_void_p * 2)(ctypes.addressof(data), 8)
        call("process_vm_readv", process, place, 1, (ctypes.c_void_p * 2)(targets["address"], 8), 1, 0)

    def list_descriptors() -> None:
        for descriptor in range(3, 100):
            with contextlib.suppress(OSError):
                if "submitters" in os.listdir(descriptor):  # noqa: PTH208 - of a descriptor
                    return
        raise FileNotFoundError

    def have_capabilities() -> None:
        if "CapEff:\t0000000000000000" not in pathlib.Path("/proc/self/status").read_text():
            return
        raise PermissionError

    def any_of(paths: list[str], flags: int) -> None:
        for path in paths:
            with contextlib.suppress(OSError):
                return opened(path, flags)
        raise OSError("none of them")

    def ask(address: str, question: bytes, refusal: bytes) -> None:
        """Ask a server without a secret."""
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(question)
            answer = client.recv(4096)
        if not answer.removeprefix(refusal):
            raise PermissionError

    def ask_node_server() -> None:
        """Its challenge comes first, and must be all that it sends."""
        host, _, port = targets["node server"].rpartition(":")
        request = targets["request to a node server"]
        with socket.create_connection((host, int(port))) as client:
            challenge = client.recv(32, socket.MSG_WAITALL)
            client.sendall(len(request).to_bytes(2, "big") + request + bytes(32))
            if len(challenge) != 32 or not client.recv(8):
                raise PermissionError

    agent, manager, victim = targets["agent"], targets["manager"], targets["victim"]
    attacks: dict[str, Callable[[], object]] = {
        "read the environment of the agent": lambda: opened(f"/proc/{agent}/environ", os.O_RDONLY),
        "read the environment of the manager": lambda: opened(f"/proc/{manager}/environ", os.O_RDONLY),
        "trace the agent": lambda: trace(agent),
        "trace the manager": lambda: trace(manager),
        "read the environment of a worker": lambda: opened(f"/proc/{victim}/environ", os.O_RDONLY),
        "write the memory of a worker": lambda: opened(f"/proc/{victim}/mem", os.O_RDWR),
        "trace a worker": lambda: trace(victim),
        "signal the agent": lambda: os.kill(agent, 0),
        "signal the manager": lambda: os.kill(manager, 0),
        "signal a worker": lambda: os.kill(victim, 0),
        "read the key": lambda: opened(targets["key"], os.O_RDONLY),
        "write the spool": lambda: opened(targets["spool"], os.O_RDWR),
        "list the endpoint's directory": lambda: listed(targets["key"]),
        "read any file of the endpoint": lambda: any_of(targets["files"], os.O_RDONLY),
        "write any file of the endpoint": lambda: any_of(targets["files"], os.O_WRONLY),
        "read a file of another submitter": lambda: opened(targets["note"], os.O_RDONLY),
        "read a file of the owner": lambda: opened(targets["file"], os.O_RDONLY),
        "write code that tasks import": lambda: opened(targets["code"], os.O_WRONLY),
        "change the mode of code that tasks import": lambda: pathlib.Path(targets["code"]).chmod(0o600),
        "list shared memory": lambda: listed(targets["shared memory"]),
        "read shared memory by its name": lambda: opened(targets["shared memory"], os.O_RDONLY),
        "read a terminal": lambda: opened(targets["terminal"], os.O_RDWR | os.O_NOCTTY),
        "connect to an abstract socket": lambda: connect("\0" + targets["abstract"]),
        "connect to a socket by its path": lambda: connect(targets["socket"]),
        "change the mode of a file": lambda: pathlib.Path(targets["file"]).chmod(0o600),
        "change the times of a file": lambda: os.utime(targets["file"]),
        "change attributes of a file": lambda: os.setxattr(targets["file"], "user.x", b"x"),
        "list a directory by an inherited descriptor": list_descriptors,
        "see names in a directory by inotify": lambda: watch(targets["directory"]),
        "set resource limits of the agent": lambda: set_core_limit(agent),
        "set resource limits of a worker": lambda: set_core_limit(victim),
        "lower the priority of the agent": lambda: os.setpriority(os.PRIO_PROCESS, agent, 1),
        "lower the I/O priority of a worker": lambda: call("ioprio_set", 1, victim, (2 << 13) | 7),
        "change the scheduler of a worker": lambda: os.sched_setscheduler(victim, os.SCHED_BATCH, os.sched_param(0)),
        "bind a worker to a processor": lambda: pin(victim),
        "read the memory of a worker": lambda: read_memory(victim),
        "take a descriptor of a worker": lambda: call("pidfd_getfd", os.pidfd_open(victim), 1, 0),
        "make the kernel kill the agent first": lambda: opened(f"/proc/{agent}/oom_score_adj", os.O_WRONLY),
        "read a key of the owner's session keyring": lambda: call("keyctl", 10, -3, b"user", b"farcall-test", 0),
        "attach shared memory of System V": lambda: call(
            "shmat", call("shmget", targets["key of System V"], 0, 0), 0, 0
        ),
        "use semaphores of System V": lambda: call("semget", targets["key of System V"], 0, 0),
        "use message queues of System V": lambda: call("msgget", targets["key of System V"], 0),
        "use message queues of POSIX": lambda: os.close(call("mq_open", targets["queue"].encode(), 0, 0, 0)),
        "have capabilities": have_capabilities,
        "connect to an SSH agent": lambda: connect(targets["services"][0]),
        "connect to Docker": lambda: connect(targets["services"][1]),
        "connect to the D-Bus session": lambda: connect(targets["services"][2]),
        "use a Valkey server of another submitter": lambda: ask(targets["Valkey"], b"PING\r\n", targets["NOAUTH"]),
        "read a copy from a node's server": ask_node_server,
        "write a file of a cgroup": lambda: any_of(targets["cgroups"], os.O_WRONLY),
        "write a setting of the kernel": lambda: any_of(targets["settings"], os.O_WRONLY),
        "open a device of the machine": lambda: any_of(targets["devices"], os.O_RDONLY),
        "set the clock": lambda: call("clock_settime", 0, (ctypes.c_long * 2)(int(targets["now"]), 0)),
        "set the name of the machine": lambda: call("sethostname", targets["host"].encode(), len(targets["host"])),
        "rename a file": lambda: pathlib.Path(targets["file"]).rename(targets["file"] + "-renamed"),
    }
    reader, writer = os.pipe()
    if os.fork() == 0:
        found = {}
        libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
        for name, action in attacks.items():
            try:
                action()
            except OSError as error:
                found[name] = type(error).__name__
            else:
                found[name] = "done"
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    answer: dict[str, str] = json.loads(os.read(reader, 65536))
    return answer


@contextlib.contextmanager
def kernel_objects() -> Iterator[dict[str, Any]]:
    """Objects of this account that every process of it could use, and their names; a key in the session keyring."""
    found = architecture()
    assert found is not None
    numbers = {name: rule.numbers[found[0]] for name, rule in RULES.items()}
    numbers |= {"process_vm_readv": (310, 270)[found[0]], "pidfd_getfd": 438}
    numbers |= {"clock_settime": (227, 112)[found[0]], "sethostname": (170, 161)[found[0]]}
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long  # an address may be above 2**31

    def call(name: str, *arguments: object) -> int:
        values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
        result = int(libc.syscall(ctypes.c_long(numbers[name] or 0), *values))
        assert result >= 0, (name, os.strerror(ctypes.get_errno()))
        return result

    name, key = f"farcall-test-{os.getpid()}", os.getpid()
    call("keyctl", 1, None)  # KEYCTL_JOIN_SESSION_KEYRING
    call("add_key", b"user", b"farcall-test", b"secret", 6, -3)
    memory = call("shmget", key, 4096, 0o1666)
    semaphores = call("semget", key, 1, 0o1666)
    messages = call("msgget", key, 0o1666)
    call("mq_open", name.encode(), os.O_CREAT | os.O_RDWR, 0o666, None)
    try:
        yield {"key of System V": key, "queue": name, "numbers": numbers}
    finally:
        call("shmctl", memory, 0, 0)
        call("semctl", semaphores, 0, 0, 0)
        call("msgctl", messages, 0, 0)
        call("mq_unlink", name.encode())


SERVICES = ("agent.1", "docker.sock", "bus")
"""Names of sockets in a directory of the owner: of an SSH agent, Docker and D-Bus."""


@contextlib.contextmanager
def services(directory: Path) -> Iterator[dict[str, Any]]:
    """Sockets of programs of the owner, and a node's server; and what of the machine only root may write."""
    directory.mkdir()
    server = FileServer("127.0.0.1", read=lambda _: iter([b"private"]))  # type: ignore[arg-type,return-value]
    content = FileContent("", "1" * 64, 7)
    wanted = msgspec.msgpack.encode([server.address, content, None, b""])
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        server.start(b"secret")
        for name in SERVICES:
            stack.enter_context(socket.create_server(str(directory / name), family=socket.AF_UNIX))
        yield {
            "services": [str(directory / name) for name in SERVICES],
            "node server": server.address,
            "request to a node server": wanted,
            "cgroups": [str(path) for path in Path("/sys/fs/cgroup").glob("*/cgroup.procs")]
            + ["/sys/fs/cgroup/cgroup.procs"],
            "settings": [f"/proc/sys/{name}" for name in ("kernel/core_pattern", "kernel/hostname", "vm/drop_caches")],
            "devices": [f"/dev/{name}" for name in ("mem", "kmem", "port", "vda", "sda", "nvme0n1")],
            "now": time.time(),
            "host": socket.gethostname(),
        }


def valkey_url() -> str:
    from farcall import current

    return current().valkey_url()


def documented() -> dict[str, dict[str, str]]:
    """Results by attack and level, as the table of docs/security/sharing.md has them."""
    lines = SECURITY.read_text().partition(BEGINNING)[2].partition(END)[0].strip().splitlines()
    names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(names[1:], row[1:], strict=True)) for row in rows}


def document(column: str, found: dict[str, str]) -> None:
    """Write a column of the table (``FARCALL_WRITE_ATTACKS=1``)."""
    table = documented()
    table = {name: table.get(name, {}) | {column: result} for name, result in found.items()}
    columns = [f"`{each}`" for each in ("none", "process", "landlock", "bubblewrap")]
    lines = [["a task of another user tries to", *columns], ["---"] * 5]
    lines += [[name, *(row.get(each, "") for each in columns)] for name, row in table.items()]
    before, _, rest = SECURITY.read_text().partition(BEGINNING)
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    SECURITY.write_text(f"{before}{BEGINNING}\n\n{rows}\n{END}{rest.partition(END)[2]}")


SECURITY = Path(__file__).parents[2] / "docs" / "security" / "sharing.md"
BEGINNING, END = "<!-- attacks: -->", "<!-- :attacks -->"


@pytest.mark.parametrize("level", LEVELS)
def test_attacks_on_files_processes_and_sockets(level: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Attacker and victim run at the same time. The table of docs/security/sharing.md says what succeeds."""
    home = tmp_path_factory.mktemp("home")
    file = home / "of-the-owner" / "file"
    file.parent.mkdir()
    file.write_text("private")
    code = home / "packages" / "module.py"
    code.parent.mkdir()
    code.write_text("")
    controller, terminal = os.openpty()
    with (
        os.fdopen(controller, "rb", buffering=0),
        os.fdopen(terminal, "rb", buffering=0),
        kernel_objects() as objects,
        services(home / "services") as served,
        running_endpoint(
            home, workers=2, engine={"isolation": level, "readable_paths": [str(code.parent)]}
        ) as endpoint,
        socket.create_server(str(home / "socket"), family=socket.AF_UNIX),
        socket.socket(socket.AF_UNIX) as abstract,
        tempfile.NamedTemporaryFile(prefix="farcall-test-", dir="/dev/shm") as memory,
    ):
        name = f"farcall-test-{os.getpid()}-{level}"
        if os.geteuid() == 0:
            for path in (str(home / "socket"), os.ttyname(terminal), memory.name):
                os.chown(path, USER, USER)
        abstract.bind(f"\0{name}")
        abstract.listen()
        url = endpoint.cloud.end(endpoint.cloud.submit(valkey_url, submitter=VICTIM)).value
        waiting = endpoint.cloud.submit(wait_with_a_file, submitter=VICTIM)
        directory = endpoint.directory.path
        notes = [
            directory / "tasks_working_dir" / "submitters" / VICTIM / "note",
            directory / "tasks_working_dir" / "note",
        ]
        wait_until(lambda: victims_of(endpoint))
        wait_until(lambda: [each for each in notes if each.exists()])
        [victim] = victims_of(endpoint)
        [note] = [each for each in notes if each.exists()]
        [manager] = endpoint.managers()
        assert endpoint.agent is not None
        targets: dict[str, Any] = {
            "agent": endpoint.agent.pid,
            "manager": manager.pid,
            "victim": victim.pid,
            "key": str(directory / "curve.secret"),
            "spool": str(endpoint.directory.spool_file),
            "files": [
                str(path) for path in directory.rglob("*") if path.is_file() and "tasks_working_dir" not in path.parts
            ],
            "note": str(note),
            "file": str(file),
            "socket": str(home / "socket"),
            "shared memory": memory.name,
            "code": str(code),
            "terminal": os.ttyname(terminal),
            "abstract": name,
            "directory": str(file.parent),
            "address": int(Path(f"/proc/{victim.pid}/maps").read_text().partition("-")[0], 16),
            "Valkey": urlsplit(str(url)).netloc.rpartition("@")[2],
            "NOAUTH": b"-NOAUTH Authentication required.\r\n",
            **objects,
            **served,
        }
        for path in ("key", "spool", "note", "file", "socket", "shared memory"):
            assert Path(targets[path]).exists()
        ended = endpoint.cloud.end(endpoint.cloud.submit(attack, targets, submitter=ATTACKER))
        assert isinstance(ended.value, dict), ended.error
        outcomes = ended.value
        endpoint.cloud.cancel(waiting)
    found = {name: "possible" if outcome == "done" else "refused" for name, outcome in outcomes.items()}
    if landlock.missing_alone():  # bubblewrap alone shares the network's namespace, and with it abstract sockets
        found["connect to an abstract socket"] = "refused"
    if os.environ.get("FARCALL_WRITE_ATTACKS"):
        document(f"`{level}`", found)
    assert found == {name: row[f"`{level}`"] for name, row in documented().items()}, outcomes


def test_tasks_of_others_have_no_privileges(cloud: FakeCloud, endpoint: EndpointProcess, level: str) -> None:
    """An endpoint of root has them, which is the case with bubblewrap when root runs this test."""

    def steal_and_use(agent: int) -> dict[str, str]:
        import pathlib

        def read(path: str) -> str:
            try:
                return pathlib.Path(path).read_text()
            except OSError as error:
                return type(error).__name__

        status = dict(line.split(":", 1) for line in read("/proc/self/status").splitlines())
        names = ("CapInh", "CapPrm", "CapEff", "CapAmb", "NoNewPrivs")
        return {name: status[name].strip() for name in names} | {"agent": read(f"/proc/{agent}/environ")}

    assert endpoint.agent is not None
    found: Any = cloud.end(cloud.submit(steal_and_use, endpoint.agent.pid, submitter=ATTACKER)).value
    assert found.pop("agent") in ("PermissionError", "FileNotFoundError")
    no_new = found.pop("NoNewPrivs")
    assert {int(value, 16) for value in found.values()} == {0}
    assert no_new == ("1" if level in ("landlock", "bubblewrap") else "0")


def test_a_latency_target_of_another_submitter_takes_no_more_workers(cloud: FakeCloud) -> None:
    """A call with a target starts beside those that run. This one would keep the only such place."""
    from farcall_common.qos import QoS

    def wait() -> None:
        import time

        time.sleep(1000)

    running = cloud.submit(wait, submitter=VICTIM)
    wait_until(lambda: any(each.task_id == running and each.state == "running" for each in cloud.transitions))
    greedy = cloud.submit_many(wait, [()] * 6, submitter=ATTACKER, qos=QoS(target_ms=1))
    try:
        assert cloud.end(cloud.submit(truth, "the owner's", qos=QoS(target_ms=60_000))).value == "the owner's"
        assert not [each for each in cloud.transitions if each.task_id in greedy and each.state == "running"]
    finally:
        cloud.cancel(running, *greedy)
        cloud.ends([running, *greedy])


def use_memory(size_bytes: int) -> int:
    import os
    import time

    data = os.urandom(size_bytes)
    time.sleep(0.5)
    return len(data)


def keep_memory(size_bytes: int) -> None:
    """For the life of this worker; it is not the next task's."""
    import builtins
    import os

    builtins.kept = os.urandom(size_bytes)  # type: ignore[attr-defined]


def test_limits_hold_for_tasks_of_other_submitters(cloud: FakeCloud) -> None:
    """The manager measures processes by other ids than they have in their own namespace."""
    limit = {"submitter": ATTACKER, "memory_bytes": 100 * 2**20, "max_attempts": 1}
    cloud.end(cloud.submit(keep_memory, 90 * 2**20, submitter=ATTACKER))
    assert cloud.end(cloud.submit(use_memory, 60 * 2**20, **limit)).value == 60 * 2**20
    assert cloud.end(cloud.submit(use_memory, 200 * 2**20, **limit)).error["code"] == "MEMORY_EXCEEDED"


def use_a_file(size_bytes: int, path: str, keep: bool) -> int:
    """Write to a memory file, or to a file with a path, until this task is ended if it is large."""
    import builtins
    import os
    import time

    if path:
        with open(path, "wb") as file:  # noqa: PTH123
            file.write(b"x" * size_bytes)
    else:
        descriptor = os.memfd_create("large")
        for _ in range(size_bytes >> 20):
            os.write(descriptor, b"x" * 2**20)
        if keep:
            builtins.kept_file = descriptor  # type: ignore[attr-defined]
    time.sleep(60 if size_bytes > 100 * 2**20 else 0.5)
    if path and not keep:
        os.unlink(path)  # noqa: PTH108
    elif not keep:
        os.close(descriptor)
    return size_bytes


@pytest.mark.parametrize("path", ["", "/tmp/large"])
def test_memory_limits_count_files_in_memory(cloud: FakeCloud, level: str, path: str) -> None:
    if path and level != "bubblewrap":
        pytest.skip("/tmp is the machine's")
    limit = {"submitter": ATTACKER, "memory_bytes": 100 * 2**20, "max_attempts": 1}
    cloud.end(cloud.submit(use_a_file, 90 * 2**20, path and f"{path}-kept", True, submitter=ATTACKER))
    assert cloud.end(cloud.submit(use_a_file, 60 * 2**20, path, False, **limit)).value == 60 * 2**20
    error = cloud.end(cloud.submit(use_a_file, 300 * 2**20, path, False, **limit)).error
    assert error["code"] == "MEMORY_EXCEEDED"


def start_many(most: int) -> int:
    """Fork up to so many processes, each of which ends by itself; the number of those that were started."""
    import os
    import time

    started = 0
    while started < most:
        try:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            started += 1
        except BlockingIOError:
            time.sleep(0.01)
    time.sleep(60)
    return started


def run_a_process() -> str:
    import subprocess

    return subprocess.run(["echo", "works"], check=True, capture_output=True, text=True).stdout


def process_limit() -> tuple[int, int]:
    import resource

    return resource.getrlimit(resource.RLIMIT_NPROC)


@pytest.mark.parametrize("chosen", LEVELS)
def test_process_limit_ends_one_submitter_and_leaves_others_working(chosen: str, tmp_path: Path) -> None:
    engine = {"isolation": chosen, "limits": {"processes": 60}}
    with running_endpoint(tmp_path, workers=2, engine=engine) as endpoint:
        cloud = endpoint.cloud
        unlimited = resource.getrlimit(resource.RLIMIT_NPROC)
        assert cloud.end(cloud.submit(process_limit)).value == unlimited
        limit = cloud.end(cloud.submit(process_limit, submitter=VICTIM)).value
        assert isinstance(limit, tuple)
        if chosen == "none":  # a worker for all
            assert limit == unlimited
        else:
            assert limit[0] == limit[1] < 10_000
        bomb = cloud.submit(start_many, 300, submitter=ATTACKER, max_attempts=1)
        for _ in range(20):
            assert cloud.end(cloud.submit(run_a_process, submitter=VICTIM)).value == "works\n"
        error = cloud.end(bomb).error
        assert error["code"] == "PROCESSES_EXCEEDED"
        assert "60" in error["message"]
        assert cloud.end(cloud.submit(run_a_process, submitter=ATTACKER)).value == "works\n"
        assert cloud.end(cloud.submit(run_a_process)).value == "works\n"


MANY = """
import os, signal, time
children = []
try:
    for _ in range(65):
        children.append(os.fork())
        if children[-1] == 0:
            time.sleep(1000)
            os._exit(0)
except BlockingIOError:  # the kernel's limit
    os.kill(children[-1], signal.SIGKILL)
    os.waitpid(children[-1], 0)
"""
PACKAGES = {"waits": f"{MANY}time.sleep(1000)\n", "is two workers": f"{MANY}os.fork()\n"}
"""Code that an environment runs when its Python starts. Both processes of the second one send what a worker sends.
Tests that run at the same time share the kernel's limit of the account, which grows with the workers."""


@pytest.mark.parametrize("chosen", [each for each in LEVELS if each.values[0] in ("process", "bubblewrap")])
def test_start_with_too_many_processes_exceeds_the_limit(chosen: str, tmp_path: Path) -> None:
    engine = {
        "isolation": chosen,
        "limits": {"processes": 60},
        "environments": {"locations": [f"{tmp_path}/*"], "fork": False},
    }
    with running_endpoint(tmp_path / "home", workers=8, engine=engine, reachable=[tmp_path]) as endpoint:
        cloud = endpoint.cloud
        for name, code in PACKAGES.items():
            prefix = tmp_path / name
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
            site = prefix / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
            (site / "many.py").write_text(code)
            (site / "many.pth").write_text("import many\n")
            environment = Environment(type="venv", location=str(prefix))
            task_id = cloud.submit(time.sleep, 60, environment=environment, submitter=ATTACKER, max_attempts=1)
            error = cloud.end(task_id).error
            assert error["code"] == "PROCESSES_EXCEEDED", (name, error)
            # Other tests may have used up the account's processes for a moment.
            wait_until(lambda: cloud.end(cloud.submit(run_a_process, submitter=VICTIM)).value == "works\n")


def test_a_dead_worker_says_how_it_died(cloud: FakeCloud) -> None:
    def die(number: int) -> None:
        import os
        import sys

        print("last words", file=sys.stderr)
        os.kill(os.getpid(), number)

    for number, name in ((9, "SIGKILL"), (11, "SIGSEGV")):
        error = cloud.end(cloud.submit(die, number, submitter=ATTACKER, max_attempts=1)).error
        assert error["code"] == "WORKER_DIED"
        assert name in error["message"]
        assert "last words" in error["stderr_tail"]


def test_a_cancelled_task_leaves_no_process(cloud: FakeCloud, level: str) -> None:
    def start_and_wait(name: str) -> None:
        import subprocess
        import time

        subprocess.Popen(["setsid", "bash", "-c", "sleep 1000; true", name])
        time.sleep(1000)

    name = f"left-by-a-cancelled-task-{os.getpid()}-{level}"
    task_id = cloud.submit(start_and_wait, name, submitter=ATTACKER)
    wait_until(lambda: processes_with(name))
    cloud.cancel(task_id)
    assert cloud.end(task_id).error["code"] == "TASK_CANCELLED"
    wait_until(lambda: not processes_with(name))


@pytest.mark.skipif(bool(MISSING["bubblewrap"]), reason=MISSING["bubblewrap"])
@pytest.mark.parametrize("victim", ["agent", "manager"])
def test_namespaces_end_with_the_endpoint(victim: str, tmp_path: Path) -> None:
    with running_endpoint(tmp_path, workers=1, engine={"isolation": "bubblewrap"}) as endpoint:
        endpoint.cloud.submit(wait_with_a_file, submitter=VICTIM)
        wait_until(lambda: victims_of(endpoint))
        if victim == "agent":
            endpoint.kill_agent()
            return
        [manager] = endpoint.managers()
        below = manager.children(recursive=True)
        manager.kill()
        wait_gone(below)
