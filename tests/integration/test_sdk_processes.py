"""Exit of programs that use the SDK."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farcall.testing import FakeCloud
from tests.integration.sdk_served_cloud import serving
from tests.waiting import WAIT_S, wait_until

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud(workers=0) as cloud:
        yield cloud


@pytest.fixture
def start(cloud: FakeCloud, tmp_path: Path) -> Iterator[Start]:
    """Starts a program that has an ``executor``."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str) -> subprocess.Popen[str]:
        script = tmp_path / "program.py"
        script.write_text(f"from farcall import Executor\nexecutor = Executor({cloud.endpoint_id!r})\n{body}\n")
        environ = os.environ | {"FARCALL_API_URL": address, "FARCALL_TOKEN": cloud.token}
        pipe = subprocess.PIPE
        arguments = [sys.executable, "-W", "error", str(script)]
        started.append(subprocess.Popen(arguments, env=environ, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    with serving(cloud) as address:
        yield start
        for process in started:
            process.kill()
            process.communicate()


def test_submitted_calls_are_sent_before_the_process_exits(start: Start, cloud: FakeCloud) -> None:
    program = start("for n in range(100): executor.submit(pow, 2, n)")
    _, errors = program.communicate(timeout=WAIT_S)
    assert (program.returncode, errors) == (0, "")
    with cloud.client() as client:
        assert [task["status"] for task in client.get_tasks()] == ["received"] * 100


@pytest.mark.parametrize("last_line", ["futures[0].result()", "pass"])  # the block's own wait is at its end
@pytest.mark.parametrize(("count", "state"), [(1, "received"), (2, "cancelled")])
def test_ctrl_c_leaves_tasks_running_and_a_second_one_cancels_them(
    start: Start, cloud: FakeCloud, count: int, state: str, last_line: str
) -> None:
    program = start(
        "with executor:\n"
        "    futures = [executor.submit(pow, 2, n) for n in range(10)]\n"
        "    print('ready', flush=True)\n"
        f"    {last_line}\n"
    )
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stdout.readline() == "ready\n"
    wait_until_received(cloud, 10)
    program.send_signal(signal.SIGINT)
    line = program.stderr.readline()
    assert line.startswith("10 tasks will continue; press Ctrl-C again to cancel now. Later: `farcall groups wait ")
    if count == 2:
        program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=WAIT_S)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert ("were cancelled" in errors) == (count == 2)
    with cloud.client() as client:
        assert [task["status"] for task in client.get_tasks()] == [state] * 10


FORKS = """
import os, signal, threading, warnings

warnings.simplefilter("ignore")  # Python 3.12 warns of forks

def child():
    signal.alarm(DEADLINE_S)
    with Executor(executor.endpoint_id) as own:
        own.client.get_tasks()
        return own.submit(pow, 2, 3).cancel()

submitting = threading.Thread(target=lambda: [executor.submit(pow, 2, n).cancel() for n in range(20)])
submitting.start()
children = []
for _ in range(20):
    children.append(os.fork())
    if children[-1] == 0:
        os._exit(0 if child() else 1)
submitting.join()
print([status for each in children if (status := os.waitpid(each, 0)[1])])
"""


def test_children_that_are_forked_while_an_executor_starts_make_their_own(start: Start) -> None:
    output, errors = start(f"DEADLINE_S = {WAIT_S / 2:.0f}\n{FORKS}").communicate(timeout=WAIT_S)
    assert (output, errors) == ("[]\n", "")


FORK_WHILE_CERTIFICATES_LOAD = """
import os, threading, warnings
import httpx
from farcall_common.http_client import http_client

warnings.simplefilter("ignore")  # Python 3.12 warns of forks
loads, forks, loaded = threading.Event(), threading.Event(), []

def certificates():
    loads.set()
    forks.wait()
    contexts = [httpx.create_ssl_context() for _ in range(10)]
    loaded.append(True)
    return contexts[0]

os.register_at_fork(before=forks.set)
thread = threading.Thread(target=lambda: http_client(certificates=certificates).close())
thread.start()
loads.wait()
child = os.fork()
if child == 0:
    os._exit(0 if loaded else 1)
thread.join()
print(os.waitpid(child, 0)[1])
"""


def test_forks_wait_while_certificates_are_loaded(start: Start) -> None:
    """The locks of OpenSSL would stay held in the child."""
    assert start(FORK_WHILE_CERTIFICATES_LOAD).communicate(timeout=WAIT_S) == ("0\n", "")


LEAVING = """
import os, signal, sys, warnings

warnings.simplefilter("ignore")
children = []
with executor:
    executor.submit(pow, 2, 3)
    for leave in (lambda: sys.exit(5), lambda: 1 / 0, lambda: None):
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(DEADLINE_S)
            leave()
            break
    else:
        print([os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children])
        executor.shutdown(cancel_futures=True)
"""


def test_forked_children_leave_the_block_of_an_executor_at_once(start: Start) -> None:
    output, errors = start(f"DEADLINE_S = {WAIT_S / 2:.0f}\n{LEAVING}").communicate(timeout=WAIT_S)
    assert (output, errors.count("Traceback")) == ("[5, 1, 0]\n", 1)


def wait_until_received(cloud: FakeCloud, count: int) -> None:
    with cloud.client() as client:
        wait_until(lambda: len(client.get_tasks()) == count, "the tasks were not received")


DECORATED = """
import farcall

@farcall.function(endpoint=executor.endpoint_id)
def power(n):
    return 2**n

futures = [power.submit(n) for n in range(10)]
print("ready", flush=True)
"""
DECORATED_MAP = DECORATED.replace("[power.submit(n) for n in range(10)]", "power.map(range(10))") + "list(futures)"


def test_calls_of_decorated_functions_are_sent_before_the_process_exits(start: Start, cloud: FakeCloud) -> None:
    _, errors = start(DECORATED).communicate(timeout=WAIT_S)
    assert errors == ""
    with cloud.client() as client:
        assert [task["status"] for task in client.get_tasks()] == ["received"] * 10


@pytest.mark.parametrize(("count", "state"), [(1, "received"), (2, "cancelled")])
@pytest.mark.parametrize("map_", [False, True])
def test_ctrl_c_is_the_same_for_decorated_functions(
    start: Start, cloud: FakeCloud, count: int, state: str, map_: bool
) -> None:
    program = start(DECORATED_MAP if map_ else f"{DECORATED}futures[0].result()")
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stdout.readline() == "ready\n"
    wait_until_received(cloud, 10)
    program.send_signal(signal.SIGINT)
    line = next(line for line in program.stderr if "will continue" in line)
    assert line.startswith("10 tasks will continue; press Ctrl-C again to cancel now. Later: `farcall groups wait ")
    if count == 2:
        program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=WAIT_S)
    assert ("were cancelled" in errors) == (count == 2)
    with cloud.client() as client:
        assert [task["status"] for task in client.get_tasks()] == [state] * 10
