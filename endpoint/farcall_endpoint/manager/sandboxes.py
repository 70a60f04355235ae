"""Sandbox retention: removes the directories of tasks that ended long enough ago, where a setting says so."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from farcall_endpoint.worker.directories import remove_old_sandboxes

_logger = logging.getLogger(__name__)

_LEAST_PERIOD_S: Final = 1.0
_MOST_PERIOD_S: Final = 600.0


class SandboxCleaner(threading.Thread):
    """A thread of the manager: removing many files may take long, and the loop must not wait for it.

    :param retention_s: how long after the end of its task a sandbox is kept.
    """

    def __init__(self, working_dir: Path, *, retention_s: float) -> None:
        super().__init__(name="farcall-sandboxes", daemon=True)
        self._working_dir = working_dir
        self._retention_s = retention_s

    def run(self) -> None:
        """Look for old sandboxes until the process ends."""
        period_s = min(max(_LEAST_PERIOD_S, self._retention_s / 10), _MOST_PERIOD_S)
        timer = threading.Event()
        while not timer.wait(period_s):
            for sandbox in remove_old_sandboxes(self._working_dir, retention_s=self._retention_s):
                _logger.debug("removed %s, %g s after the end of its task", sandbox, self._retention_s)
