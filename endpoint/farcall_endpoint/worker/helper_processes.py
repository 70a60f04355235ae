"""Helper processes of Python's multiprocessing, which libraries keep between tasks: they end with the task.

The manager ends a worker if a task of another submitter than the owner has left processes. A resource tracker or a fork
server comes back when it is needed again, so the worker stops these by itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final

from farcall_endpoint.host.process_reaper import own_children, read_process

_HELPERS: Final = (
    ("multiprocessing.forkserver", "_forkserver", "_forkserver_pid"),
    ("multiprocessing.resource_tracker", "_resource_tracker", "_pid"),
    ("joblib.externals.loky.backend.resource_tracker", "_resource_tracker", "_pid"),
    ("loky.backend.resource_tracker", "_resource_tracker", "_pid"),
)
"""Module, object in it, and the object's attribute with its process id."""


def stop_helpers() -> None:
    """Stop the helpers, if they are the only children of this process: others may have inherited what keeps them."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # no children, as nearly always
        return
    helpers = [
        (helper, getattr(helper, attribute, None))
        for module, name, attribute in _HELPERS
        if (helper := getattr(sys.modules.get(module), name, None)) is not None
    ]
    known = {pid for _, pid in helpers if pid is not None}
    if not known or any(_is_alive(pid) for pid in own_children() - known):
        return
    for helper, pid in helpers:
        if pid is not None:
            with contextlib.suppress(Exception):  # a task may have broken it; then the manager ends this process
                helper._stop()


def _is_alive(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and not process.is_zombie
