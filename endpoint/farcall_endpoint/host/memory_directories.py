"""Directories of submitters in the memory of a node."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path
from typing import Final

MEMORY_KEY: Final = "FARCALL_FLEET_MEMORY_KEY"
"""Variable with the key of :class:`MemoryDirectories`. Everybody can read command lines."""
_NAME_CHARACTERS: Final = 32

_logger = logging.getLogger(__name__)


class MemoryDirectories:
    """Directories of submitters in the node's memory.

    Landlock lets all tasks open files in the memory file system whose name they know, but not list directories. So the
    names must not be guessable: they derive from a key that agent and managers share.

    Names can leak. So the contents of the directories have seals (``is_sealed``) where another submitter's task could
    change them.

    :param root: the agent's directory that contains these directories.
    """

    def __init__(self, root: Path, key: bytes, *, is_sealed: bool = False) -> None:
        self._root = root
        self._key = key
        self._is_sealed = is_sealed

    def path(self, submitter: str) -> Path:
        """Return the path of a submitter's directory. An empty submitter is the owner."""
        return self._root / _digest(self._key, submitter)[:_NAME_CHARACTERS]

    def block_key(self, submitter: str) -> str:
        """The key of a submitter's seals; empty: there are none."""
        return _digest(self._key + b" of seals", submitter) if self._is_sealed else ""

    def of(self, submitter: str) -> str:
        """Return a submitter's (empty: the owner's) directory, made if missing; empty if it cannot be made."""
        path = self.path(submitter)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            _logger.warning("tasks get no directory in memory: %s", error)
            return ""
        return str(path)


def _digest(key: bytes, submitter: str) -> str:
    return hmac.digest(key, submitter.encode(errors="surrogatepass"), "sha256").hex()
