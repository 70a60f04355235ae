"""Isolation of submitters: environment variables, hidden processes, paths."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from farcall_common.errors import ConfigurationError
from farcall_endpoint.isolation import Isolation, best_of
from farcall_endpoint.isolation.environment import SECRETS, for_submitter
from farcall_endpoint.isolation.landlock import is_available, readable_paths

needs_landlock = pytest.mark.skipif(not is_available(), reason="this kernel has no Landlock")


def test_credentials_of_every_kind_are_secrets() -> None:
    assert {"FARCALL_TOKEN", "FARCALL_CLIENT_SECRET", "GLOBUS_COMPUTE_CLIENT_SECRET"} == SECRETS


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
    from farcall_endpoint.isolation.process import make_private
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
from farcall_endpoint.isolation.landlock import confine, readable_paths
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


def test_the_level_of_a_node() -> None:
    assert best_of(Isolation.NONE) is Isolation.NONE
    assert best_of(Isolation.PROCESS) is Isolation.PROCESS
    assert best_of(Isolation.AUTO) is (Isolation.LANDLOCK if is_available() else Isolation.PROCESS)
    if not is_available():
        with pytest.raises(ConfigurationError, match="no Landlock"):
            best_of(Isolation.LANDLOCK)
