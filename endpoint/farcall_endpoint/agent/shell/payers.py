"""Payers of submitters: which service accounts have had tasks here, and who has made them.

Directories of tasks outlive the agent, and a budget of disk space is divided by payer. So what is known is kept in a
file, one account a line. The payer of an account never changes.
"""

from __future__ import annotations

import logging
from pathlib import Path

_logger = logging.getLogger(__name__)


class Payers:
    """The payers of service accounts.

    :param path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._payers: dict[str, str] = {}
        try:
            pairs = [line.split() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
        except FileNotFoundError:
            return
        except OSError as error:
            _logger.warning("%s cannot be read, so service accounts have disk space of their own: %s", path, error)
            return
        self._payers = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}  # the last line may be cut off

    def add(self, submitter: str, payer: str) -> None:
        """Remember the payer of a submitter, which has a task."""
        if not payer or self._payers.get(submitter) == payer:
            return
        self._payers[submitter] = payer
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{submitter} {payer}\n")
        except OSError as error:
            _logger.warning("%s cannot be written: %s", self._path, error)

    def of(self, submitter: str) -> str:
        """The payer of a submitter: the creator of a service account, else the submitter."""
        return self._payers.get(submitter, submitter)

    def items(self) -> list[tuple[str, str]]:
        """All accounts that are known, with their payers. May be called from another thread."""
        return list(self._payers.items())
