"""The messages between an agent and its transfer process. Internal: both have the same package version.

The agent sends orders, the process reports. ``number`` is that of a transfer; the agent gives each a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from farcall_common.staged_files import FileUse

_LENGTH_BYTES: Final = 4
_LEAST_BYTES: Final = 4096


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


def taken_bytes(size_bytes: int) -> int:
    """Return the budget of the cache that a file uses. A minimum per file limits the number of small files."""
    return max(size_bytes, _LEAST_BYTES)


# -- agent to process --------------------------------------------------------------------------------------------------


class Make(_Message, frozen=True):
    """Make the directory of a task's files, with a place for each URL that it writes, if it may write that. Answered by
    Made."""

    task_id: str
    submitter: str
    writes: tuple[str, ...]


class Fetch(_Message, frozen=True):
    """Get a file, from the cache or from its storage, for these tasks. ``payer``: the creator of a service account,
    whose budget has it; empty: the submitter. Answered by Fetched or Failed."""

    number: int
    submitter: str
    use: FileUse
    task_ids: tuple[str, ...]
    payer: str = ""

    @property
    def share_of(self) -> str:
        """The identity for which it counts."""
        return self.payer or self.submitter


class Store(_Message, frozen=True):
    """Store what a task has written. ``payer`` as in Fetch. Answered by Stored or Failed."""

    number: int
    submitter: str
    use: FileUse
    task_id: str
    payer: str = ""

    @property
    def share_of(self) -> str:
        """The identity for which it counts."""
        return self.payer or self.submitter


class Cancel(_Message, frozen=True):
    """A transfer is not needed any more; it is not answered."""

    number: int


class Remove(_Message, frozen=True):
    """Remove the directory of a task's files. Answered by Removed."""

    task_id: str
    submitter: str


class Release(_Message, frozen=True):
    """Remove the files that a task has read; those that it has written stay. Answered by Released."""

    task_id: str
    submitter: str


class Tidy(_Message, frozen=True):
    """Remove all directories of tasks' files but those of these tasks: an earlier agent has left them. Answered by
    Tidied."""

    task_ids: tuple[str, ...]


class Ping(_Message, frozen=True):
    """Asks for a sign of life."""


SEALED: Final = "SEALED"
FORWARDER_TOO_OLD: Final = "FORWARDER_TOO_OLD"
NOT_CONNECTED: Final = "NOT_CONNECTED"
BLOBS_UNREACHABLE: Final = "BLOBS_UNREACHABLE"
"""Reasons of the agent's own."""


class Piece(_Message, frozen=True):
    """Answers PieceWanted and PieceUnreachable: the file has ``size_bytes`` and a ``version``, and a piece of
    ``piece_bytes`` is at ``url``, or here as ``data``. Or ``reason``, a FileReason or one of the agent's own, and what
    else there is to say, ``problem``.

    :param most_bytes: of a piece, at present.
    """

    number: int
    size_bytes: int = 0
    version: str = ""
    piece_bytes: int = 0
    sha256: str = ""
    url: str = ""
    data: bytes = b""
    most_bytes: int = 0
    reason: str = ""
    problem: str = ""


Order = Make | Fetch | Store | Cancel | Remove | Release | Tidy | Ping | Piece


# -- process to agent --------------------------------------------------------------------------------------------------


class Made(_Message, frozen=True):
    """The directory of a task is there; or why not. ``error``: the record, as JSON."""

    task_id: str
    error: dict[str, Any] | None = None


class Removed(_Message, frozen=True):
    """The directory of a task is gone."""

    task_id: str


class Released(_Message, frozen=True):
    """The files that a task has read are gone."""

    task_id: str


class Tidied(_Message, frozen=True):
    """What earlier agents left is gone."""


class Fetched(_Message, frozen=True):
    """The tasks have the file. ``cached``: its content was there before."""

    number: int
    size_bytes: int
    sha256: str
    cached: bool


class Stored(_Message, frozen=True):
    """A file is stored."""

    number: int
    size_bytes: int
    sha256: str


class Failed(_Message, frozen=True):
    """A transfer has failed. ``error``: the record, as JSON. If there was no room: ``missing_bytes`` must become free,
    ``budget_bytes`` is the room of all copies, 0 if unknown (a disk is full), and ``drafts`` has the number and the
    room of each file in transit."""

    number: int
    error: dict[str, Any]
    missing_bytes: int = 0
    budget_bytes: int = 0
    drafts: tuple[tuple[int, int], ...] = ()


class Progress(_Message, frozen=True):
    """Transfers have come so far: number and bytes."""

    transfers: tuple[tuple[int, int], ...]


class CacheUse(_Message, frozen=True):
    """Size and budget of the copies in the cache. Sent at the ends of some transfers."""

    used_bytes: int
    budget_bytes: int


class Alive(_Message, frozen=True):
    """The process has started, or answers a Ping."""


class Unusable(_Message, frozen=True):
    """The process cannot work, and ends."""

    reason: str


class PieceWanted(_Message, frozen=True):
    """Requests a piece of a file of another endpoint, for one of these tasks. ``number``: of the request. ``max_bytes``
    0: only size and version are wanted. Answered by Piece."""

    number: int
    submitter: str
    task_ids: tuple[str, ...]
    endpoint_id: str
    path: str
    offset_bytes: int
    max_bytes: int


class PieceUnreachable(_Message, frozen=True):
    """The blob store with a piece cannot be reached from here. Answered by Piece, with its bytes."""

    number: int
    problem: str


class PieceTaken(_Message, frozen=True):
    """A piece, or the answer to its request, is not needed any more."""

    number: int


AboutPiece = PieceWanted | PieceUnreachable | PieceTaken
Report = (
    Made | Removed | Released | Tidied | Fetched | Stored | Failed | Progress | CacheUse | Alive | Unusable | AboutPiece
)


_encode: Final = msgspec.msgpack.Encoder().encode


def frame(message: object) -> bytes:
    """A message on the socket: its length, then MessagePack."""
    encoded = _encode(message)
    return len(encoded).to_bytes(_LENGTH_BYTES) + encoded


def frames_of(data: bytearray) -> Iterator[bytes]:
    """The whole messages in front of what has come; they are taken out."""
    start = 0
    while len(data) >= start + _LENGTH_BYTES:
        end = start + _LENGTH_BYTES + int.from_bytes(data[start : start + _LENGTH_BYTES])
        if len(data) < end:
            break
        yield bytes(data[start + _LENGTH_BYTES : end])
        start = end
    del data[:start]
