"""What tasks were called with, for ``farcall tasks retry``: the API never gives that back, so this machine keeps it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from farcall._blobs import INLINE_BYTES
from farcall._settings import find_home
from farcall.cli._private import write_private

__all__ = ["KEPT", "Call", "find", "keep"]

#: So many calls are kept, the newest; those with larger arguments than travel inline are not.
KEPT: Final = 500


class Call(msgspec.Struct, frozen=True):
    """A call that was submitted: its arguments as they travelled, and how long it may run, in seconds."""

    task_id: str
    payload: str
    walltime_s: float | None = None


def keep(calls: Iterable[Call]) -> None:
    """Keep calls. A disk that takes none is no reason to fail."""
    small = (call for call in calls if len(call.payload) <= INLINE_BYTES)
    newest = list(itertools.islice(small, KEPT))
    older = itertools.islice(_read(), KEPT - len(newest))
    lines = [msgspec.json.encode(call) for call in itertools.chain(newest, older)]
    with contextlib.suppress(OSError):
        write_private(_path(), b"\n".join(lines))


def find(task_id: str) -> Call | None:
    """The call that became a task, if it is known here."""
    return next((call for call in _read() if call.task_id == task_id), None)


def _read() -> Iterator[Call]:
    try:
        lines = _path().read_bytes().splitlines()
    except OSError:  # there is none yet
        return
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):  # of another version
            yield msgspec.json.decode(line, type=Call)


def _path() -> Path:
    return find_home(os.environ) / "cache" / "calls.jsonl"
