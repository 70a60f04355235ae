"""Orphans of dead workers are killed and reaped by their manager, and no other process is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT_S

ADOPTS = """
import os, signal, subprocess, time
from farcall_endpoint.manager.shell.processes import Orphans

orphans = Orphans()
known = subprocess.Popen(["sleep", "1000"])
parent = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!"], stdout=subprocess.PIPE, start_new_session=True)
orphan = int(parent.stdout.readline())
parent.wait()
assert orphans.due_at is None
orphans.expect(now=10.0)
assert orphans.due_at == 10.0

orphans.kill(known={known.pid}, now=10.0)
assert orphans.due_at > 10.0, "dead, and perhaps not reaped"
orphans.expect(now=10.1)
assert orphans.due_at > 10.1, "not all processes for each worker that dies"
deadline = time.monotonic() + 200
while orphans.due_at is not None and time.monotonic() < deadline:
    orphans.kill(known={known.pid}, now=orphans.due_at)
assert not os.path.exists(f"/proc/{orphan}")
assert known.poll() is None
known.kill()
known.wait()
print("done")
"""

HAS_CHILDREN = """
import logging, subprocess
from farcall_endpoint.manager.shell.processes import Orphans

logging.basicConfig(format="%(message)s")
earlier = subprocess.Popen(["sleep", "1000"])
orphans = Orphans()
orphans.kill(known=(), now=0.0)
assert orphans.due_at is None
assert earlier.poll() is None
earlier.kill()
earlier.wait()
print("done")
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
    return done


def test_orphans_are_killed_and_reaped() -> None:
    run(ADOPTS)


def test_a_process_with_earlier_children_adopts_none() -> None:
    assert "children from before its start" in run(HAS_CHILDREN).stderr


READS = """
import os
import sys
from pathlib import Path

import pytest
import time
from pathlib import Path
from farcall_endpoint.manager.shell.processes import Orphans

orphans = Orphans()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
orphans.kill(known=(), now=0.0)
print(sum(path.startswith("/proc/") and path.endswith("/stat") for path in opened), orphans.due_at is not None)
"""


@pytest.mark.skipif(not Path("/proc/thread-self/children").exists(), reason="not listed here")
def test_processes_of_others_are_not_read() -> None:
    """A large node has thousands."""
    done = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.stdout, done.stderr) == ("0 True\n", "")
