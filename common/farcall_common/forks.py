"""What threads do at a fork: they are not in the child, where the locks that they hold stay held."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Final

_locks: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
no_fork: Final = threading.RLock()
"""A fork waits until it is free. Hold it, briefly, for work in libraries with locks of their own, such as OpenSSL."""


def fork_safe_lock() -> threading.Lock:
    """A lock that is free in a forked child. What it protects must be right, or a cache, at every moment."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def _after_fork() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # as the standard library does with its own


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)
    os.register_at_fork(before=no_fork.acquire, after_in_parent=no_fork.release, after_in_child=no_fork.release)
