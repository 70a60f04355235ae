"""What a start does, counted: a limit of work holds on any machine at any hour, one of time does not.

How long it takes is measured by ``benchmarks/start.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_COUNTED = """
import sys
calls = 0
def count(frame, event, arg):
    global calls
    calls += event == "call"
sys.setprofile(count)
{code}
sys.setprofile(None)
print(calls, file=sys.stderr)
"""


def calls_of(code: str, byte_code: Path) -> int:
    """How many calls of Python functions some lines are in a fresh interpreter, every module's body being one.

    :param byte_code: a directory for it, so that compiling is not counted; installed packages have theirs.
    """
    environ = os.environ | {"PYTHONPYCACHEPREFIX": str(byte_code)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", _COUNTED.format(code=code)]
    counts = [
        int(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stderr) for _ in range(2)
    ]
    return counts[-1]
