"""Protection of a process from others of the same user, by the kernel."""

from __future__ import annotations

import ctypes
import logging
from typing import Final

_logger = logging.getLogger(__name__)

_SET_DUMPABLE: Final = 4
"""PR_SET_DUMPABLE."""
_SET_NO_NEW_PRIVS: Final = 38
"""PR_SET_NO_NEW_PRIVS."""
_CAPABILITY_VERSION: Final = 0x2008_0522
"""_LINUX_CAPABILITY_VERSION_3."""


def make_private() -> None:
    """Hide the environment, memory and descriptors of this process from others of the same user, and refuse them to
    trace it, until it replaces its program. It leaves no core dump either."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        _logger.warning("other processes of this user can read this one: prctl failed, errno %d", ctypes.get_errno())


def drop_capabilities() -> None:
    """Give up every capability of this process, and the ways to get one from a program that it starts.

    :raises OSError: if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or libc.capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")
