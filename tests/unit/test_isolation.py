"""Isolation of submitters: environment variables, hidden processes, paths."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from farcall_common.errors import ConfigurationError
from farcall_endpoint.host.isolation import Isolation, NodeIsolation, best_of, bubblewrap, landlock
from farcall_endpoint.host.isolation.confinement import confined_command
from farcall_endpoint.host.isolation.environment import SECRETS, for_runner, for_submitter
from farcall_endpoint.host.isolation.paths import readable_paths

needs_landlock = pytest.mark.skipif(bool(landlock.missing()), reason="this kernel has no Landlock")
needs_bubblewrap = pytest.mark.skipif(bool(bubblewrap.missing()), reason="bubblewrap does not work here")


def test_credentials_of_every_kind_are_secrets() -> None:
    of_globus = {"FARCALL_GLOBUS_CLIENT_SECRET", "GLOBUS_CLI_CLIENT_SECRET"}
    assert {"FARCALL_TOKEN", "FARCALL_CLIENT_SECRET", "GLOBUS_COMPUTE_CLIENT_SECRET"} | of_globus == SECRETS


@pytest.mark.parametrize(
    "name", ["PATH", "LC_ALL", "CONDA_PREFIX", "SLURM_JOB_ID", "OMP_NUM_THREADS", "CUDA_HOME", "FARCALL_ENDPOINT_ID"]
)
def test_other_submitters_get_what_programs_need(name: str) -> None:
    assert for_submitter({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    "name",
    [
        *("AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "SLURM_JWT", "FARCALL_TOKEN", "FARCALL_CLIENT_SECRET", "HOME"),
        *("FARCALL_FLEET_SECRET_KEY", "GITHUB_TOKEN", "CONDA_TOKEN", "KRB5CCNAME", "http_proxy", "MY_KEY"),
        *("NVIDIA_API_KEY", "CONDA_AUTH", "PYTHON_REGISTRY_PASS"),
    ],
)
def test_other_submitters_get_nothing_else(name: str) -> None:
    assert for_submitter({name: "x"}) == {}
    assert for_submitter({name: "x"}, passed=[name]) == {name: "x"}, "unless the owner says so"
    assert for_submitter({name: "x"}, passed=[f"{name[:2]}*"]) == {name: "x"}


def run(program: str, *arguments: object) -> str:
    """What a program prints in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


@pytest.mark.parametrize(("is_private", "dumpable"), [(False, "1"), (True, "0")])
def test_a_private_process_is_not_dumpable(is_private: bool, dumpable: str) -> None:
    """The kernel hides its environment then, and refuses to trace it."""
    program = """
    import ctypes, sys
    from farcall_endpoint.host.isolation.process import make_private
    if sys.argv[1] == "True":
        make_private()
    print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
    """
    assert run(program, is_private) == dumpable


def test_paths_in_the_owners_home_are_hidden_but_for_python(tmp_path: Path) -> None:
    home, endpoint = tmp_path / "home", tmp_path / "home" / ".farcall" / "lab"
    for directory in (home / "bin", home / "data", endpoint / "bin", tmp_path / "site"):
        directory.mkdir(parents=True)
    paths = [home, home / "bin", home / "data", endpoint, endpoint / "bin", tmp_path, tmp_path / "site", "missing"]
    found = readable_paths(
        ["~/nothing", str(home / "data")], private=[endpoint], home=home, environ={"PATH": ":".join(map(str, paths))}
    )
    assert {each for each in found if each.startswith(str(tmp_path))} == {
        str(home / "bin"),
        str(home / "data"),
        str(tmp_path / "site"),
    }
    assert sys.prefix in found
    assert str(Path("/usr").resolve()) in found


CONFINED = """
import ctypes, os, socket, subprocess, sys
from farcall_endpoint.host.isolation.landlock import confine
from farcall_endpoint.host.isolation.paths import readable_paths
from pathlib import Path

# Tests may run as root, whose capabilities open the environment of any process.
ctypes.CDLL(None).capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
home, hidden, pid = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
confine(readable=readable_paths([], private=[hidden], home=home, environ=os.environ), writable=[str(home)])

def outcome(action):
    try:
        action()
    except OSError as error:
        return "refused" if error.errno in (1, 13, 18) else repr(error)  # EPERM, EACCES, EXDEV
    return "done"

def write():
    (home / "directory").mkdir()
    (home / "directory" / "file").write_text("x")
    (home / "directory" / "file").rename(home / "other")
    assert (home / "other").read_text() == "x"

def multiprocess():
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(int, ("7",)) == 7

for action in (
    write,
    multiprocess,
    lambda: subprocess.run([sys.executable, "-c", "import json, ssl"], check=True),
    lambda: socket.create_server(("127.0.0.1", 0)).close(),
    lambda: open("/dev/null", "w").close(),
    lambda: (hidden / "secret").read_text(),
    lambda: os.listdir(hidden),
    lambda: (hidden / "new").write_text("x"),
    lambda: os.symlink(hidden, home / "link") or (home / "link" / "secret").read_text(),
    lambda: os.link(hidden / "secret", home / "hard"),
    lambda: subprocess.run(["cat", str(hidden / "secret")], check=True, stderr=subprocess.DEVNULL, stdout=2),
    lambda: open(f"/proc/{pid}/environ").read(),
    lambda: open(f"/proc/{pid}/root{hidden}/secret").read(),
    lambda: os.kill(pid, 0),
    lambda: os.listdir("/dev/shm"),
):
    try:
        print(outcome(action))
    except subprocess.CalledProcessError:
        print("CalledProcessError")
"""


@needs_landlock
def test_confined_processes_do_their_work_and_reach_nothing_else(tmp_path: Path) -> None:
    home, hidden = tmp_path / "home", tmp_path / "hidden"
    home.mkdir()
    hidden.mkdir()
    (hidden / "secret").write_text("secret")
    outcomes = run(CONFINED, home, hidden, os.getpid()).split()
    assert outcomes[:5] == ["done"] * 5
    assert outcomes[5:10] == ["refused"] * 5
    assert outcomes[10] == "CalledProcessError"
    assert outcomes[11:] == ["refused"] * 4


SUPERVISED_FILES = """
import os, pathlib, shutil, socket, sys
home, hidden = map(pathlib.Path, sys.argv[1:])
os.chdir(home)

def tried(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "done"

def own():
    pathlib.Path("a").mkdir()
    pathlib.Path("a/file").write_text("x")
    os.rename("a/file", "moved")
    os.link("moved", "a/linked")
    os.chmod("moved", 0o640)
    descriptor = os.open("moved", os.O_RDONLY)
    os.fchmod(descriptor, 0o600)
    os.utime("moved", (5, 6))
    os.utime(descriptor, (7, 8))
    os.symlink("moved", "link")
    os.utime("link", (1, 2), follow_symlinks=False)
    shutil.copytree("a", "b")
    assert os.stat("moved").st_mode & 0o777 == 0o600
    assert (os.stat("moved").st_mtime, os.lstat("link").st_mtime) == (8, 2)

def connect(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)

def own_socket():
    with socket.create_server("socket", family=socket.AF_UNIX):
        connect("socket")

def own_port():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass

secret = str(hidden / "secret")
os.symlink(secret, "to-secret")
descriptor = os.open(secret, os.O_PATH)
for action in (
    own,
    own_socket,
    own_port,
    lambda: os.chmod(secret, 0o777),
    lambda: os.chmod("to-secret", 0o777),
    lambda: os.chmod(f"/proc/self/fd/{descriptor}", 0o777),
    lambda: os.chmod(f"/proc/self/root{secret}", 0o777),
    lambda: os.chmod(f"../hidden/secret", 0o777),
    lambda: os.utime(secret),
    lambda: os.chmod("/usr", 0o777),
    lambda: connect(str(hidden / "socket")),
    lambda: connect("\\0abstract"),
    lambda: os.open(secret, 3),
    lambda: os.chmod("moved", 0o4755),
    lambda: os.chmod(".", 0o755),
    lambda: os.open("made", os.O_CREAT | os.O_WRONLY, 0o4755),
    lambda: os.getxattr(secret, "user.x"),
    lambda: os.chmod("missing", 0o777),
):
    print(tried(action), flush=True)
os.abort()
"""


@pytest.mark.skipif(bool(landlock.missing_alone()), reason=landlock.missing_alone())
def test_supervisor_performs_calls_on_the_submitters_files_only(tmp_path: Path) -> None:
    home, hidden = tmp_path / "home", tmp_path / "hidden"
    home.mkdir()
    hidden.mkdir()
    (hidden / "secret").write_text("secret")
    (hidden / "secret").chmod(0o600)
    readable = readable_paths([], private=[hidden], home=home, environ=os.environ)
    command = [sys.executable, "-c", SUPERVISED_FILES, str(home), str(hidden)]
    with socket.create_server(str(hidden / "socket"), family=socket.AF_UNIX):
        done = subprocess.run(
            confined_command(command, readable=readable, writable=[str(home)]),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    outcomes = done.stdout.split()
    assert outcomes[:3] == ["done"] * 3, done.stderr
    assert set(outcomes[3:17]) == {"PermissionError", "OSError"}, outcomes
    assert outcomes[17:] == ["FileNotFoundError"]
    assert done.returncode == 128 + signal.SIGABRT
    assert (hidden / "secret").stat().st_mode & 0o777 == 0o600


CODE = """
import errno

def code(action):
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
"""

SUPERVISED_SOCKETS = (
    CODE
    + """
import ctypes, multiprocessing, os, socket

def connect(address):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)

def server(address):
    return socket.create_server(address, family=socket.AF_UNIX)

with server("\\0name") as first:
    print(code(lambda: connect("\\0name")), code(lambda: connect(first.getsockname())), code(lambda: server("\\0name")))
    print(code(lambda: connect("\\0nam")), code(lambda: connect("\\0name\\0")))
    if os.fork() == 0:
        os._exit(code(lambda: connect("\\0name")) != "done")
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    print(code(lambda: first.bind("\\0other")))
print(code(lambda: connect("\\0name")))
with server("\\0name"):
    print(code(lambda: connect("\\0name")))

# A name that the kernel gives.
libc = ctypes.CDLL(None, use_errno=True)
with socket.socket(socket.AF_UNIX) as unnamed:
    assert libc.bind(unnamed.fileno(), bytes([socket.AF_UNIX, 0]), 2) == 0
    unnamed.listen()
    print(code(lambda: connect(unnamed.getsockname())))
with socket.socket(socket.AF_UNIX) as unnamed:
    print(code(unnamed.listen))

# A connection that fails gives a name, too.
server("dead").close()
with socket.socket(socket.AF_UNIX) as passing:
    passing.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    print(code(lambda: passing.connect("dead")), passing.getsockname()[:1], code(passing.listen))

with server("path") as named, socket.create_server(("127.0.0.1", 0)) as port:
    print(named.getsockname(), code(lambda: connect("path")), code(lambda: socket.create_server(port.getsockname())))
    print(code(lambda: socket.create_connection(port.getsockname())))
for _ in range(3000):
    server(f"\\0{_}").close()
for method in ("fork", "forkserver", "spawn"):
    with multiprocessing.get_context(method).Manager() as manager:
        shared = manager.list([1])
        shared.append(2)
        print(list(shared))
"""
)


OTHER_WAYS_TO_SOCKETS = (
    CODE
    + """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
print(code(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)))
print(code(lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)))
print(errno.errorcode[libc.syscall(425, 1, ctypes.create_string_buffer(120)) and ctypes.get_errno()])
print(code(lambda: socket.socket(40, socket.SOCK_STREAM)))
print(code(lambda: libc.socket(1, 0x80000001, 0) < 0 and os.strerror(0)), code(lambda: socket.socket(socket.AF_UNIX)))
"""
)
WAITS_FOR_OTHERS = """
import socket
with socket.create_server("\\0for others", family=socket.AF_UNIX) as server:
    print(server.getsockname(), flush=True)
    input()
"""


def confined_program(program: str, home: Path) -> list[str]:
    readable = readable_paths([], private=[], home=home, environ=os.environ)
    return confined_command([sys.executable, "-c", program], readable=readable, writable=[str(home)])


@pytest.mark.skipif(bool(landlock.missing_alone()), reason=landlock.missing_alone())
def test_processes_below_a_supervisor_use_local_sockets(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = confined_program(SUPERVISED_SOCKETS, tmp_path)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment, timeout=120
    )
    assert done.stdout.splitlines() == [
        "done done EADDRINUSE",
        "EPERM EPERM",
        "0",
        "EINVAL",
        "ECONNREFUSED",
        "done",
        "done",
        "EINVAL",
        r"ECONNREFUSED b'\x00' EPERM",
        "path done EADDRINUSE",
        "done",
        *["[1, 2]"] * 3,
    ], done.stderr
    assert done.returncode == 0


@pytest.mark.skipif(bool(landlock.missing_alone()), reason=landlock.missing_alone())
def test_processes_elsewhere_cannot_connect_to_abstract_names_below_a_supervisor(tmp_path: Path) -> None:
    command = confined_program(WAITS_FOR_OTHERS, tmp_path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        assert path.startswith("/dev/shm/")
        for address in ("\0for others", path):
            with socket.socket(socket.AF_UNIX) as other, pytest.raises(OSError, match=r"refused|No such file"):
                other.connect(address)
        process.communicate("\n")
        assert process.returncode == 0


@needs_bubblewrap
def test_abstract_names_of_a_sandbox_are_its_own(tmp_path: Path) -> None:
    readable = readable_paths([], private=[], home=tmp_path, environ=os.environ)
    prefix = bubblewrap.prefix(readable=readable, writable=[str(tmp_path)], directory=tmp_path)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [*prefix, sys.executable, "-c", SUPERVISED_SOCKETS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.stdout.splitlines()[0] == "done done EADDRINUSE", done.stderr
    assert done.stdout.splitlines()[-3:] == ["[1, 2]"] * 3, done.stderr
    command = [*prefix, sys.executable, "-c", OTHER_WAYS_TO_SOCKETS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["EPERM", "done", "ENOSYS", "EPERM", "done", "done"], done.stderr
    command = [*prefix, sys.executable, "-c", WAITS_FOR_OTHERS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "for others" in process.stdout.readline()
        with socket.socket(socket.AF_UNIX) as other, pytest.raises(ConnectionRefusedError):
            other.connect("\0for others")
        process.communicate("\n")
        assert process.returncode == 0


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what a node lacks."""

    def lacks(*, landlock_missing: str = "", bubblewrap_missing: str = "", is_root: bool = False) -> None:
        monkeypatch.setattr(landlock, "missing", lambda: landlock_missing)
        monkeypatch.setattr(landlock, "missing_alone", lambda: landlock_missing)
        monkeypatch.setattr(os, "geteuid", lambda: 0 if is_root else 1000)
        monkeypatch.setattr(bubblewrap, "missing", lambda: bubblewrap_missing)

    return lacks


def test_auto_is_the_best_level_that_works(node: Callable[..., None]) -> None:
    node()
    assert best_of(Isolation.AUTO) == NodeIsolation(Isolation.BUBBLEWRAP, landlock=True, bubblewrap=True)
    node(landlock_missing="an old kernel")
    assert best_of(Isolation.AUTO) == NodeIsolation(Isolation.BUBBLEWRAP, bubblewrap=True)
    node(bubblewrap_missing="not installed")
    assert best_of(Isolation.AUTO) == NodeIsolation(Isolation.LANDLOCK, landlock=True)


def test_a_node_without_either_refuses_others_and_says_what_it_lacks(node: Callable[..., None]) -> None:
    node(landlock_missing="an old kernel", bubblewrap_missing="not installed")
    found = best_of(Isolation.AUTO)
    assert found.level is Isolation.PROCESS
    assert found.refusal == "not installed; an old kernel"
    for level in (Isolation.NONE, Isolation.PROCESS):
        assert best_of(level) == NodeIsolation(level), "the owner accepts it"


@pytest.mark.parametrize("level", Isolation)
def test_an_endpoint_of_root_refuses_others(node: Callable[..., None], level: Isolation) -> None:
    node(is_root=True)
    assert "runs as root" in best_of(level).refusal
    node()
    assert best_of(level).refusal == ""


def test_a_level_that_the_owner_asks_for_is_used_or_refused(node: Callable[..., None]) -> None:
    node()
    assert best_of(Isolation.LANDLOCK) == NodeIsolation(Isolation.LANDLOCK, landlock=True)
    node(landlock_missing="an old kernel", bubblewrap_missing="not installed")
    with pytest.raises(ConfigurationError, match=r"landlock \(an old kernel"):
        best_of(Isolation.LANDLOCK)
    with pytest.raises(ConfigurationError, match=r"bubblewrap \(not installed"):
        best_of(Isolation.BUBBLEWRAP)


def test_bubblewrap_is_tried_not_only_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in bubblewrap.missing()
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    assert bubblewrap.missing() == "bubblewrap: bwrap: No permissions to create new namespace"


def test_what_is_mounted_is_the_least_that_shows_every_path() -> None:
    command = bubblewrap.prefix(
        readable=["/usr", "/usr/lib", "/proc", "/dev/sda", "/tmp/venv", "/data/link"],
        writable=["/data/work/a"],
        directory=Path("/data/work"),
    )
    mounts = [tuple(command[at : at + 2]) for at, word in enumerate(command) if word.endswith(("bind", "bind-try"))]
    assert [each for each in mounts if not each[1].startswith(("/dev", "/proc"))] == [
        ("--ro-bind-try", "/data/link"),
        ("--bind", "/data/work/a"),
        ("--ro-bind-try", "/tmp/venv"),
        ("--ro-bind-try", "/usr"),
    ]
    assert ("--ro-bind-try", "/dev/sda") not in mounts


WRAPPED = """
import os, socket, subprocess, sys
from pathlib import Path

home, hidden, pid, link = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])

def outcome(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__ if error.errno != 30 else "ReadOnly"
    return "done"

def connect():
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(hidden / "socket"))

def multiprocess():
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(int, ("7",)) == 7

if __name__ == "__main__":
    for action in (
        lambda: (home / "file").write_text("x"),
        lambda: Path("/tmp/file").write_text("x"),
        lambda: (link / "file").read_text(),
        multiprocess,
        lambda: subprocess.run(["sh", "-c", "true"], check=True),
        lambda: socket.create_server(("127.0.0.1", 0)).close(),
        lambda: (hidden / "secret").read_text(),
        lambda: (hidden / "secret").chmod(0o777),
        connect,
        lambda: os.kill(pid, 0),
        lambda: open(f"/proc/{pid}/environ").read(),
        lambda: (link / "file").chmod(0o777),
        lambda: (link / "file").write_text("x"),
        lambda: Path("/new").mkdir(),
        lambda: os.utime(os.__file__),
    ):
        print(outcome(action))
    print(len([name for name in os.listdir("/proc") if name.isdigit()]))
    print([line for line in open("/proc/self/status") if line.startswith("CapEff")][0].split()[1].strip("0") or "none")
"""


@needs_bubblewrap
def test_wrapped_processes_do_their_work_and_see_nothing_else(tmp_path: Path) -> None:
    home, hidden, shared = (tmp_path / name for name in ("home", "hidden", "shared"))
    for directory in (home, hidden, shared):
        directory.mkdir()
    (hidden / "secret").write_text("secret")
    (shared / "file").write_text("data")
    link = tmp_path / "link"
    link.symlink_to(shared)
    program = home / "program.py"
    program.write_text(WRAPPED)
    readable = readable_paths([str(link)], private=[hidden], home=tmp_path, environ=os.environ)
    prefix = bubblewrap.prefix(readable=readable, writable=[str(home)], directory=home)
    with socket.create_server(str(hidden / "socket"), family=socket.AF_UNIX):
        command = [*prefix, sys.executable, str(program), str(home), str(hidden), str(os.getpid()), str(link)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = done.stdout.split()
    assert outcomes[:6] == ["done"] * 6
    assert outcomes[6:9] == ["FileNotFoundError"] * 3
    assert outcomes[9:11] == ["ProcessLookupError", "FileNotFoundError"]
    assert outcomes[11:15] == ["ReadOnly"] * 4
    assert int(outcomes[15]) <= 3, "bubblewrap's, the program and perhaps a helper of multiprocessing"
    assert outcomes[16] == "none"
    assert (home / "file").read_text() == "x"
    assert not Path("/tmp/file").exists()


def test_programs_of_docker_and_podman_find_their_daemon_and_storage() -> None:
    given = {"DOCKER_HOST": "unix:///run/user/1/docker.sock", "HOME": "/home/me", "PATH": "/bin", "MY_TOKEN": "secret"}
    assert for_runner("docker", given) == {name: given[name] for name in ("DOCKER_HOST", "HOME", "PATH")}
    assert for_runner("bubblewrap", given) == {"PATH": "/bin"}
