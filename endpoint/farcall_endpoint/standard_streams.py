"""Standard streams of a process that some cron jobs and wrappers start without them."""

from __future__ import annotations

import os


def open_missing_streams() -> None:
    """Open ``/dev/null`` in place of closed standard streams. Otherwise the next file or pipe gets such a number, and a
    child's standard stream then replaces it."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
