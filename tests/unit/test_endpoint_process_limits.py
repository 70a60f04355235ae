"""Limits on the processes of workers of other submitters: what the kernel permits then."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from farcall_endpoint.host.isolation import bubblewrap, process_limits
from tests.support.ordinary_user import as_ordinary_user

FORKING = """
import os, signal
started = []
try:
    while len(started) < 500:
        started.append(os.fork())
        if started[-1] == 0:
            signal.pause()
except BlockingIOError:
    pass
print(len(started), flush=True)
for pid in started:
    os.kill(pid, signal.SIGKILL)
"""
LOADED = f"import runpy; limit = runpy.run_path({process_limits.__file__!r})['limit_processes']\n"
ACCOUNT = 54321
"""An account without other processes."""


def output(command: list[str]) -> str:
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs an account without other processes")
def test_limit_counts_from_what_runs_already() -> None:
    before = "for _ in range(5):\n    if os.fork() == 0: signal.pause()\n"
    program = f"{LOADED}import os, signal\nos.setgroups([]); os.setuid({ACCOUNT})\n{before}limit(20)\n{FORKING}"
    program += "os.killpg(0, signal.SIGKILL)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "20\n"


def test_limit_cannot_be_raised_again() -> None:
    program = f"{LOADED}import resource\nlimit(20)\nsoft, hard = resource.getrlimit(resource.RLIMIT_NPROC)\n"
    program += "print(soft == hard)\nresource.setrlimit(resource.RLIMIT_NPROC, (hard + 1, hard + 1))"
    command = as_ordinary_user([sys.executable, "-c", program], reachable=[Path(process_limits.__file__).parent])
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert found.stdout == "True\n", found.stderr
    assert "not allowed to raise" in found.stderr


DESCRIPTORS = """
import os, resource, socket, sys
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 400), hard))
ready, waits = os.pipe(), os.pipe()
if os.fork() == 0:
    limit_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2)
    ends = []
    try:
        while True:
            ends.append(socket.socketpair())
            ends[-1][0].setblocking(False)
            socket.send_fds(ends[-1][0], [b"."], [0] * 200)
    except OSError:
        os.write(ready[1], b".")
    os.read(waits[0], 1)
    os._exit(0)
os.read(ready[0], 1)
one, other = socket.socketpair()
try:
    socket.send_fds(one, [b"."], [0])
    print("sent")
except OSError as error:
    print(error)
os.write(waits[1], b".")
"""


def test_descriptors_on_their_way_leave_the_endpoint_some() -> None:
    loaded = LOADED.replace("limit =", "limit_descriptors =").replace("'limit_processes'", "'limit_descriptors'")
    command = [sys.executable, "-c", loaded + DESCRIPTORS]
    assert output(as_ordinary_user(command, reachable=[Path(process_limits.__file__).parent])) == "sent"


@pytest.mark.skipif(bool(bubblewrap.missing()), reason=bubblewrap.missing())
def test_worker_with_a_user_namespace_has_processes_of_its_own() -> None:
    program = f"{LOADED}limit(10**6, apart=20, outer={process_limits.user_namespace()!r})\n{FORKING}"
    inside = ["bwrap", "--unshare-user", "--unshare-pid", "--dev-bind", "/", "/", "--proc", "/proc"]
    command = [*inside, sys.executable, "-c", program]
    assert output(as_ordinary_user(command, reachable=[Path(process_limits.__file__).parent])) == "20"


def test_root_and_endpoints_without_a_limit_start_no_program() -> None:
    assert process_limits.command(0) == []
    assert bool(process_limits.command(5)) == (os.geteuid() != 0)


def test_program_limits_and_becomes_a_command() -> None:
    program = "import resource; print(resource.getrlimit(resource.RLIMIT_NPROC)[1] < 10**6)"
    command = [sys.executable, "-I", "-S", process_limits.__file__, "20", sys.executable, "-c", program]
    assert output(as_ordinary_user(command, reachable=[Path(process_limits.__file__).parent])) == "True"


@pytest.mark.parametrize(
    ("limit", "soft", "share"),
    [(0, 100, 0), (5000, resource.RLIM_INFINITY, 5000), (5000, 4000, 1000), (5000, 100, 256), (50, 100, 50)],
)
def test_account_with_fewer_processes_divides_them(
    limit: int, soft: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert process_limits.share(limit, workers=3) == share
