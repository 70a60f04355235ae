"""Journal of transfers at Globus: each is on disk before it is submitted, so that a restart transfers nothing twice.

A submission id makes one transfer task at Globus, however often it is submitted. So a transfer whose journal entry is
there after a restart is submitted once more, with the same content, and answers with the task that it already has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from farcall_common.files import write_whole

_logger: Final = logging.getLogger(__name__)


class Item(msgspec.Struct, frozen=True):
    """A file of a transfer.

    :param path: in the other collection.
    :param version: of a file that is read, the version that was found; of one that is written, its identity on disk.
    """

    url: str
    path: str
    size_bytes: int | None
    version: str


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer, as it is submitted. ``created_at`` is in epoch seconds.

    :param mode: ``r``: to the endpoint, ``w``: from there.
    :param own_collection, own_path: the endpoint's side; its files are ``own_path/submission_id/NUMBER``.
    :param verify: whether Globus compares checksums.
    :param items: by number; those that were not handed on yet.
    :param task_id: of Globus; empty until the answer to the submission is known.
    """

    submission_id: str
    mode: Literal["r", "w"]
    collection: str
    own_collection: str
    own_path: str
    created_at: float
    verify: bool
    items: Mapping[int, Item]
    task_id: str = ""


class Journal:
    """One file for each transfer.

    :raises OSError: by its methods, if the directory cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self) -> list[Transfer]:
        """All transfers. A file that cannot be read is left out and logged; another thread may remove one meanwhile."""
        found = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Transfer))
            except FileNotFoundError:
                continue
            except msgspec.MsgspecError as error:
                _logger.warning("%s is left out: %s", path, error)
        return found

    def write(self, transfer: Transfer) -> None:
        """Write a transfer; when this returns, it survives a crash of the machine."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(self._path(transfer.submission_id), msgspec.json.encode(transfer), mode=0o600, sync=True)

    def remove(self, submission_id: str) -> None:
        """Forget a transfer."""
        self._path(submission_id).unlink(missing_ok=True)

    def _path(self, submission_id: str) -> Path:
        return self._directory / f"{submission_id}.json"
