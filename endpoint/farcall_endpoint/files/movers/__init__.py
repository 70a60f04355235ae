"""Movers: what copies files from and to one kind of storage. They run in threads of the transfer process.

A :class:`Mover` has one file in each call. A :class:`BatchMover` gets all files that wait, for services that take many
in one order; those that come meanwhile are another batch. The process calls both in several threads at the same time.
Both raise or report :class:`MoveError` for whatever fails a file, and let every other
exception pass: it is a defect, and fails the file with what it says.

Which submitter may use which storage is decided before (``files.access``): a mover is made for one storage, with the
options of that.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self

from farcall_common.errors import ErrorRecord
from farcall_common.file_arguments import shown
from farcall_endpoint.contracts import outcomes

_WRITE_BYTES: Final = 2**18
"""Size of the pieces that are hashed and written: each stays in a processor's caches. For larger pieces Linux takes
larger pages, which a virtual machine may have to get from its host first: on one, a GB took 2.5 s in pieces of 8 MiB,
and 0.25 s in these."""


_SETTLED: Final = datetime.timedelta(seconds=2)


class MoveError(Exception):
    """A file cannot be moved. ``record``: one of ``outcomes.file_*``, whose ``retryable`` says whether the plan tries
    again. ``missing_bytes``: bytes that must become free, if there is no room in the cache."""

    def __init__(self, record: ErrorRecord, *, missing_bytes: int = 0) -> None:
        super().__init__(record.message)
        self.record = record
        self.missing_bytes = missing_bytes


class MoveCancelled(Exception):
    """Raised by a mover that has found ``cancelled()`` to be true."""


class Found(NamedTuple):
    """A file as its storage describes it.

    :param size_bytes: None if it does not say.
    :param version: changes with each change of the content (ETag, version id, checksum, modification time that
        :func:`is_settled`); empty if the storage has none: then the file is copied each time.
    :param sha256: of the content in hexadecimal, if the storage knows it.
    """

    size_bytes: int | None
    version: str = ""
    sha256: str = ""


def is_settled(modified: datetime.datetime, now: datetime.datetime | None = None) -> bool:
    """Whether every later change of a file gets another modification time, because storages round it to seconds. If so,
    a file that has only this time as its version is not copied again.

    :param now: the time at the storage, if known.
    """
    return (now or datetime.datetime.now(datetime.UTC)) - modified >= _SETTLED


class DraftWriter:
    """Writes a draft, and computes its SHA-256.

    :ivar size_bytes: of what was written.
    """

    def __init__(self, path: Path) -> None:
        self.size_bytes = 0
        self._digest = hashlib.sha256()
        self._file = path.open("wb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append data."""
        view = memoryview(data)
        for start in range(0, len(view), _WRITE_BYTES):
            part = view[start : start + _WRITE_BYTES]
            self._digest.update(part)
            while part:
                part = part[self._file.write(part) :]
        self.size_bytes += len(view)

    def sha256(self) -> str:
        """The SHA-256 of what was written, in hexadecimal."""
        return self._digest.hexdigest()


class Mover(Protocol):
    """Mover of one file per call."""

    def stat(self, url: str) -> Found:
        """Look a file up.

        :raises MoveError: if it is not there, may not be read, or its storage does not answer.
        """

    def fetch(
        self, url: str, draft: Path, found: Found, report: Callable[[int], None], cancelled: Callable[[], bool]
    ) -> str:
        """Write a file to ``draft``, an empty file; its SHA-256 in hexadecimal.

        :param report: takes the bytes that have come so far, as often as it is convenient.
        :raises MoveError: ``file_changed`` if it is not the version that was found; the process tries it once more.
        :raises MoveCancelled: soon after ``cancelled()`` is true.
        """

    def store(self, source: Path, url: str, report: Callable[[int], None], cancelled: Callable[[], bool]) -> Found:
        """Store a file under a URL, all of it or nothing.

        :param source: a regular file that does not change. The path is valid during the call only (it is that of an
            open file, ``/proc/self/fd/N``): open it, and do not give it to another program.
        """


class ReadOnlyMover:
    """A mover of URLs that are only read."""

    def store(
        self,
        source: Path,  # noqa: ARG002 - as all movers have it
        url: str,
        report: Callable[[int], None],  # noqa: ARG002
        cancelled: Callable[[], bool],  # noqa: ARG002
    ) -> Found:
        """Refuse: URLs of this scheme cannot be written."""
        scheme = url.partition("://")[0]
        raise MoveError(outcomes.file_unsupported(shown(url), f"{scheme}:// cannot be written"))


class Move(NamedTuple):
    """A file of a batch. ``path``: the draft to write (``r``), or the source (``w``); as for :class:`Mover`."""

    number: int
    url: str
    mode: str
    path: Path
    found: Found


class BatchMover(Protocol):
    """Many files in each call."""

    def stat_many(self, urls: Collection[str]) -> Mapping[str, Found | MoveError]:
        """Look files up; an entry for each of them."""

    def run(
        self,
        moves: Sequence[Move],
        report: Callable[[int, int], None],
        done: Callable[[int, Found | MoveError], None],
        cancelled: Callable[[int], bool],
    ) -> None:
        """Move files; returns when each of them was given to ``done``.

        :param report: takes the number of a move, and its bytes so far.
        :param done: takes the number of a move, and what is there now or why it failed. The process computes the
            SHA-256 of drafts itself, and compares the size. May be called by this thread only.
        :param cancelled: whether the file of a move is not needed any more; then ``done`` need not be called for it.
        """


BATCH_SCHEMES = frozenset({"globus"})
"""Schemes of the URLs that batch movers move."""
