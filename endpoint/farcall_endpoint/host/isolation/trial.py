"""Trial of a command: containers, and settings of the kernel, forbid namespaces and mounts; only a try shows it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Final

from farcall_common.plain_text import plain

_LIMIT_S: Final = 60.0
_LINES: Final = 3
"""At the end of its output, a program says why it fails."""


def problem(command: Sequence[str]) -> str:
    """Run a command; its last words if it fails, else the empty string.

    The standard error of a program that was started by it may be the same; so they are words, and nothing to compare.
    """
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False)
    except FileNotFoundError:
        return f"the program {command[0]} is not installed"
    except subprocess.TimeoutExpired:
        return f"no answer in {_LIMIT_S:.0f} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = (done.stderr or done.stdout).decode(errors="replace").splitlines()
    words = [text for line in lines if (text := plain(line).strip())]
    return "; ".join(words[-_LINES:]) or f"exit code {done.returncode}"
