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
from farcall_endpoint.config import Config
from farcall_endpoint.directory import EndpointDirectory

_logger: Final = logging.getLogger(__name__)


class GlobusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the transfer process needs to know.

    :param collection: the UUID of the endpoint's own collection.
    :param path, directory: one directory, as the collection names it and as this machine does.
    :param login_file: the endpoint's login at Globus.
    :param endpoint_name: the local name of the endpoint, for the commands in hints.
    :param journal: the directory of the journal.
    :param limit_s: seconds without progress after which a transfer is cancelled.
    """

    collection: str
    path: str
    directory: str
    login_file: str
    endpoint_name: str
    journal: str
    limit_s: float = 300.0

    @classmethod
    def of_config(cls, config: Config, endpoint: EndpointDirectory) -> GlobusSettings | None:
        """The settings of an endpoint; None if it has no collection."""
        section = config.files.globus
        if section is None:
            return None
        directory = Path(section.directory).expanduser()
        return cls(
            collection=section.collection.lower(),
            path=section.path or str(directory),
            directory=str(directory),
            login_file=str(endpoint.globus_login_file),
            endpoint_name=endpoint.name,
            journal=str(endpoint.path / "globus"),
            limit_s=config.files.transfer_limit,
        )


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
        """All transfers. A file that cannot be read is left out and logged."""
        found = []
        for path in sorted(self._directory.glob("*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=Transfer))
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
