"""Names that the shell completes: those that were seen last, in a small file, so that no key press asks the API."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from farcall_common.credentials import find_home
from farcall_common.files import write_private

_KEPT: Final = 200


def remember(kind: str, values: Iterable[str]) -> None:
    """Keep names for :func:`completes`; the newest first. A disk that takes none is no reason to fail."""
    known = _read()
    known[kind] = list(dict.fromkeys([*values, *known.get(kind, [])]))[:_KEPT]
    with contextlib.suppress(OSError):
        write_private(_path(), msgspec.json.encode(known))


def completes(kind: str) -> Callable[[str], list[str]]:
    """What completes an argument of this kind: "endpoints", "tasks", "groups"."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in _read().get(kind, []) if value.startswith(incomplete)]

    return complete


def _path() -> Path:
    return find_home(os.environ) / "cache" / "completion.json"


def _read() -> dict[str, list[str]]:
    try:
        return msgspec.json.decode(_path().read_bytes(), type=dict[str, list[str]])
    except (OSError, msgspec.DecodeError):  # there is none yet, or it is of another version
        return {}
