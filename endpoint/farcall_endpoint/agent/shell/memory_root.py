"""Root of the directories that submitters have in memory, where all nodes are the agent's machine."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from farcall_endpoint.host.isolation.paths import MEMORY_PREFIX, SHARED_MEMORY
from farcall_endpoint.host.memory_directories import MEMORY_KEY, MemoryDirectories
from farcall_endpoint.host.process_directory import ProcessDirectory

_logger = logging.getLogger(__name__)


class MemoryRoot:
    """The root, until :meth:`close`; or none, if there is no writable memory file system.

    :param is_wanted: whether to create the root.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self._directory: ProcessDirectory | None = None
        #: For the commands of managers, and the environment of their processes.
        self.options: list[str] = []
        self.variables: dict[str, str] = {}
        if not is_wanted:
            return
        try:
            self._directory = ProcessDirectory(Path(SHARED_MEMORY), prefix=MEMORY_PREFIX)
        except OSError as error:
            _logger.warning("tasks get no directories in memory: %s", error)
            return
        self._directory.remove_leftovers()
        self.options = ["--memory-root", str(self._directory.path)]
        self.variables = {MEMORY_KEY: secrets.token_hex(16)}

    @property
    def path(self) -> Path | None:
        """Path of the directory in memory; None if this endpoint has none."""
        return None if self._directory is None else self._directory.path

    def of(self, submitter: str) -> Path | None:
        """Path of a submitter's directory, whether or not it exists; None if this endpoint has none in memory."""
        if self._directory is None:
            return None
        return MemoryDirectories(self._directory.path, self.variables[MEMORY_KEY].encode()).path(submitter)

    def close(self) -> None:
        """Remove the directory with its contents."""
        if self._directory is not None:
            self._directory.remove()
            self._directory = None
