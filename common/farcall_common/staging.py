"""Files of a task on their way to and from its endpoint, as the endpoint reports them, and those that it has copied.
What other programs wrote is cleaned and limited."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from farcall_common.progress import clean_text

STAGING: Final = "staging"
"""In the answer about a task whose files move: as :meth:`Staging.to_json` writes it."""
FILES: Final = "files"
"""In the details of a result: the files that were copied, as :meth:`StagedFile.to_json` writes them."""
MAX_FILES_SHOWN: Final = 100
"""Limit for the files of one task in an answer."""
IN: Final = "staging-in"
OUT: Final = "staging-out"
_MAX_INTEGER: Final = 2**53
_MAX_SKEW_S: Final = 366 * 86400.0
"""A clock may be off, but not so far that the time makes no sense."""
_SHA256: Final = re.compile("[0-9a-f]{64}")
_UNITS: Final = ("bytes", "KB", "MB", "GB", "TB", "PB")


@dataclasses.dataclass(frozen=True)
class Staging:
    """Files of a task that its endpoint copies now.

    :param state: ``staging-in``: those that the task reads, before it starts; ``staging-out``: those that it has
        written.
    :param files: how many they are; ``files_done`` of them are there.
    :param bytes: how many bytes were copied, of ``total``; None if that is not known.
    :param url: one of those that move, of at most 200 characters; empty for a sealed call.
    :param problem: why it takes longer, for instance a storage that does not answer.
    :param since: epoch seconds, by the endpoint's clock.
    :param to_node: whether the endpoint has them all, and they are copied to the node that runs the task.
    """

    state: Literal["staging-in", "staging-out"]
    files: int
    files_done: int = 0
    bytes: int = 0
    total: int | None = None
    url: str = ""
    problem: str = ""
    since: float = 0.0
    to_node: bool = False

    def __str__(self) -> str:
        way = "to the node" if self.to_node else "in" if self.state == IN else "out"
        parts = [f"{self.files_done} of {self.files} files {way}", self.size]
        shown = ", ".join(part for part in parts if part)
        shown = f"{shown}: {self.url}" if self.url else shown
        return f"{shown} ({self.problem})" if self.problem else shown

    @property
    def size(self) -> str:
        """The bytes in words, like ``1.2 of 4.0 GB``; empty if there are none."""
        if self.total:
            done, total = self.bytes, max(self.total, self.bytes)
            unit = _unit_of(total)
            return f"{_in_unit(done, unit)} of {_in_unit(total, unit)} {_UNITS[unit]}"
        return shown_size(self.bytes) if self.bytes else ""

    def to_json(self) -> dict[str, Any]:
        """The fields that are not empty."""
        return {name: value for name, value in vars(self).items() if value is not False and value not in (None, "")}


@dataclasses.dataclass(frozen=True)
class StagedFile:
    """A file that an endpoint has copied for a task.

    :param url: of at most 200 characters, without what may be secret in it.
    :param mode: ``r``: the task has read it, ``w``: it has written it.
    :param sha256: of its content, in hexadecimal; empty if it is not known.
    :param cached: whether the endpoint had it already.
    """

    url: str
    mode: Literal["r", "w"]
    size_bytes: int
    sha256: str = ""
    cached: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields that are not empty."""
        return {name: value for name, value in vars(self).items() if value is not False and value != ""}


def read_staging(value: Any, *, now: float | None = None) -> Staging | None:
    """Read a peer's report about a task's files; None if it is malformed.

    :param now: epoch seconds; an instant more than a year away from it becomes this.
    """
    if not isinstance(value, Mapping):
        return None
    state, files = value.get("state"), _count(value.get("files"))
    if state not in (IN, OUT) or files is None:
        return None
    return Staging(
        state,
        files,
        min(files, _count(value.get("files_done")) or 0),
        _count(value.get("bytes")) or 0,
        _count(value.get("total")),
        _text(value.get("url")),
        _text(value.get("problem")),
        _instant(value.get("since"), now=now),
        state == IN and value.get("to_node") is True,
    )


def read_files(value: Any) -> tuple[StagedFile, ...]:
    """The files in the details of a result, which a peer wrote; some at most, without what cannot be read."""
    found: list[StagedFile] = []
    for each in value[:MAX_FILES_SHOWN] if isinstance(value, list | tuple) else ():
        if not isinstance(each, Mapping):
            continue
        mode, size_bytes, sha256 = each.get("mode"), _count(each.get("size_bytes")), each.get("sha256")
        if mode not in ("r", "w") or size_bytes is None:
            continue
        if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            sha256 = ""
        found.append(StagedFile(_text(each.get("url")), mode, size_bytes, sha256, each.get("cached") is True))
    return tuple(found)


def shown_size(size_bytes: int) -> str:
    """A number of bytes in words, like ``1.2 GB``."""
    unit = _unit_of(size_bytes)
    return f"{_in_unit(size_bytes, unit)} {_UNITS[unit]}"


def _unit_of(size_bytes: int) -> int:
    return next((at for at in range(len(_UNITS)) if size_bytes < 1000 ** (at + 1)), len(_UNITS) - 1)


def _in_unit(size_bytes: int, unit: int) -> str:
    return f"{size_bytes / 1000**unit:.1f}" if unit else str(size_bytes)


def _count(value: Any) -> int | None:
    return min(value, _MAX_INTEGER) if type(value) is int and value >= 0 else None


def _instant(value: Any, *, now: float | None) -> float:
    at = float(value) if type(value) in (int, float) and abs(value) <= _MAX_INTEGER else 0.0
    return at if now is None or abs(at - now) <= _MAX_SKEW_S else now


def _text(value: Any) -> str:
    return clean_text(value) if isinstance(value, str) else ""
