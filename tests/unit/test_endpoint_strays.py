"""Dead children that nobody waits for are collected, and no others."""

from __future__ import annotations

import subprocess
import sys

from tests.waiting import WAIT_S

COLLECTS = """
import os
from farcall_endpoint.worker.strays import Strays

strays = Strays()
strays.collect(now=0.0)  # there are no children
alive = os.fork()
if alive == 0:
    os.read(os.pipe()[0], 1)
dead = os.fork()
if dead == 0:
    os._exit(3)
os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)

strays.collect(now=60.0)  # sees it for the first time
strays.collect(now=119.0)  # too early to look
assert os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT | os.WNOHANG).si_status == 3

strays.collect(now=120.0)
try:
    os.waitpid(dead, os.WNOHANG)
except ChildProcessError:
    print("collected")
assert os.waitpid(alive, os.WNOHANG) == (0, 0)
os.kill(alive, 9)
assert os.waitpid(alive, 0)[1] == 9
strays.collect(now=180.0)
"""


def test_what_has_been_dead_for_a_minute_is_collected() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTS], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.stdout, done.stderr, done.returncode) == ("collected\n", "", 0)
