"""Protection of a process from others of the same user, by the kernel."""

from __future__ import annotations

import ctypes
import logging
from typing import Final

_logger = logging.getLogger(__name__)

_SET_DUMPABLE: Final = 4
"""PR_SET_DUMPABLE."""


def make_private() -> None:
    """Hide the environment, memory and descriptors of this process from others of the same user, and refuse them to
    trace it, until it replaces its program. It leaves no core dump either."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        _logger.warning("other processes of this user can read this one: prctl failed, errno %d", ctypes.get_errno())
