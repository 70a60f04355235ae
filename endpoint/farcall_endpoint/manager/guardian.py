"""``python -I -S guardian.py``: outlives its manager by a moment, to end what a kill -9 of the manager leaves behind.

Reads lines from standard input: ``+N`` guards process group N, ``-N`` lets it go. When the manager is gone, however
that came about, the kernel closes the pipe; then everything that is still guarded is killed. Stands alone: imports
nothing of ours, so that it is small and starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def guard(lines: Iterable[str]) -> None:
    """Follow the manager's lines to their end, then kill what is left."""
    groups: set[int] = set()
    for line in lines:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        else:
            groups.discard(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    guard(sys.stdin)
