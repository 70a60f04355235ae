"""Kernel keyrings: processes of other submitters start with an empty session keyring.

A process inherits its session keyring, in which ``pam_keyinit`` links the owner's keys, such as Kerberos tickets. The
keyring belongs to a thread, so one thread of the manager gives its own up and starts these processes.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

T = TypeVar("T")

_KEYCTL: Final = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280}
_JOIN_SESSION_KEYRING: Final = 1


def start_apart(start: Callable[[], T]) -> T:
    """Call a function that starts a process, in a thread with an empty session keyring.

    :raises OSError: as the function, or if the kernel gives out no keyring.
    """
    future: Future[T] = Future()
    _orders().put(functools.partial(_perform, start, future))
    return future.result()


@functools.cache
def _orders() -> queue.SimpleQueue[Callable[[], None]]:
    """Orders for the thread. It never ends: bubblewrap ends with the thread that has started it."""
    orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def serve() -> None:
        while True:
            orders.get()()

    threading.Thread(target=serve, name="farcall-keyring", daemon=True).start()
    return orders


def _perform(start: Callable[[], T], future: Future[T]) -> None:
    try:
        join_new_session()
        future.set_result(start())
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        future.set_exception(error)


@functools.cache
def join_new_session() -> None:
    """Give this thread, and the processes that it starts from now on, a new and empty session keyring.

    :raises OSError: if the kernel gives out none.
    """
    number = _KEYCTL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"no number of keyctl is known for {platform.machine()}")
    if ctypes.CDLL(None, use_errno=True).syscall(number, _JOIN_SESSION_KEYRING, None) < 0:
        code = ctypes.get_errno()
        if code != errno.ENOSYS:  # else the kernel has no keyrings
            raise OSError(code, "no new session keyring")
