"""Documents of Globus Transfer: what is submitted, and what answers say. Nothing here speaks with the service."""

from __future__ import annotations

import datetime as dt
import posixpath
import urllib.parse
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import globus_sdk

from farcall_common.errors import Unavailable
from farcall_common.file_arguments import shown
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.files.movers import Found, Move, MoveError, is_settled
from farcall_endpoint.files.movers.globus_journal import Transfer

_MOST_ITEMS: Final = 10_000
"""Maximum files of one transfer task."""
_DEADLINE_S: Final = 7 * 86_400.0
"""Time after which Globus itself ends a transfer, whatever happens to this endpoint."""


class Place(NamedTuple):
    """A file of a collection."""

    collection: str
    path: str


def place_of_url(url: str) -> Place:
    """The file that a URL names.

    :raises MoveError: if it names none. ``..`` is refused: it would leave the directory that a submitter may use.
    """
    name = shown(url)
    host, _, rest = url.partition("://")[2].partition("/")
    try:
        collection = str(uuid.UUID(host))
    except ValueError:
        raise MoveError(
            outcomes.file_unsupported(name, "a URL of Globus names the UUID of a collection: globus://UUID/path")
        ) from None
    path = urllib.parse.unquote(rest, errors="replace")
    if "?" in rest or "#" in rest:
        raise MoveError(outcomes.file_unsupported(name, "? and # of its path are written as %3F and %23"))
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise MoveError(outcomes.file_unsupported(name, "its path has an empty component, . or .."))
    return Place(collection, f"/{path}")


def value_of(answer: globus_sdk.GlobusHTTPResponse, name: str) -> Any:
    """A field of an answer.

    :raises Unavailable: if the answer is not one of Globus, but of something between.
    """
    try:
        return answer[name]
    except (KeyError, TypeError, ValueError) as error:
        raise Unavailable("Something else than Globus has answered: a proxy or a portal?") from error


def document_of(transfer: Transfer) -> globus_sdk.TransferData:
    """Return the document to submit to Globus. It is the same each time a transfer is submitted."""
    source, destination = transfer.collection, transfer.own_collection
    if transfer.mode == "w":
        source, destination = destination, source
    document = globus_sdk.TransferData(
        source,
        destination,
        label=f"Farcall {transfer.submission_id}",
        submission_id=transfer.submission_id,
        verify_checksum=transfer.verify,
        skip_source_errors=True,  # one missing file does not keep the others
        fail_on_quota_errors=True,
        notify_on_succeeded=False,
        notify_on_failed=False,
        notify_on_inactive=False,
        deadline=dt.datetime.fromtimestamp(transfer.created_at + _DEADLINE_S, dt.UTC).isoformat(timespec="seconds"),
    )
    for number, item in transfer.items.items():
        own = f"{transfer.own_path.rstrip('/')}/{transfer.submission_id}/{number}"
        document.add_item(*((item.path, own) if transfer.mode == "r" else (own, item.path)))
    return document


def parts_of(group: Sequence[tuple[Move, Place]], mode: str) -> Iterable[Sequence[tuple[Move, Place]]]:
    """Moves that go into one transfer each: not too many, and none with two files for one path."""
    left = list(group)
    while left:
        part: list[tuple[Move, Place]] = []
        later: list[tuple[Move, Place]] = []
        paths: set[str] = set()
        for each in left:
            is_taken = mode == "w" and each[1].path in paths
            (later if is_taken or len(part) >= _MOST_ITEMS else part).append(each)
            paths.add(each[1].path)
        yield part
        left = later


def identity_of(move: Move) -> tuple[int | None, str]:
    """Size and version of the content that a move is about."""
    if move.mode != "w":
        return move.found.size_bytes, move.found.version
    state = move.path.stat()
    return state.st_size, f"{state.st_dev}-{state.st_ino}-{state.st_size}-{state.st_mtime_ns}"


def found_of(url: str, document: Mapping[str, Any] | None) -> Found | MoveError:
    if document is None:
        return MoveError(outcomes.file_not_found(shown(url)))
    if document.get("type") == "dir":
        return MoveError(outcomes.file_unsupported(shown(url), "it is a directory; name each file"))
    size_bytes, modified = document.get("size"), str(document.get("last_modified"))
    return Found(size_bytes, f"{size_bytes} {modified}" if _is_settled(modified) else "")


def _is_settled(modified: str) -> bool:
    try:
        changed_at = dt.datetime.fromisoformat(modified)
    except ValueError:
        return True  # a collection with other times
    return is_settled(changed_at if changed_at.tzinfo is not None else changed_at.replace(tzinfo=dt.UTC))


def by_number(documents: Iterable[Mapping[str, Any]], side: str) -> dict[int, Mapping[str, Any]]:
    """Documents of files by the number of their item, which is the name of the file on the endpoint's side."""
    found = {}
    for document in documents:
        name = posixpath.basename(document.get(side) or "")
        if name.isascii() and name.isdigit():
            found[int(name)] = document
    return found
