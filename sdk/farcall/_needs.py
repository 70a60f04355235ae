"""What a reader must know and be to open a packed buffer: the ids of its strategies, and its version of Python."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Final

THIS_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"

#: What every endpoint reads, whatever its Python: text, JSON, and combinations that have text in them.
_UNIVERSAL: Final = frozenset({b"st", b"sd", b"11", b"12", b"13"})
#: A line of JSON stands in front, and says of which Python the byte code in it is, if there is any.
_WITH_HEAD: Final = frozenset({b"f1", b"f2", b"f3"})
_BYTE_CODE: Final = b"01"


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What an endpoint said of itself when it connected. ``python`` is "3.12", empty when it did not say; None for
    ``strategies`` means that nothing is known against any."""

    python: str = ""
    strategies: frozenset[str] | None = None


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a packed buffer asks of its reader. ``python`` is the only version that can run what is in it, or None."""

    strategies: frozenset[str]
    python: str | None

    def missing_in(self, runtime: Runtime) -> str:
        """Why an endpoint cannot read it, as the end of a sentence; empty if nothing is known against it."""
        unread = sorted(self.strategies - (runtime.strategies or self.strategies))
        if unread:
            return f"is written with strategy {unread[0]}, which the endpoint does not read"
        if self.python and runtime.python and runtime.python != self.python:
            return f"holds byte code of Python {self.python}, and the endpoint runs Python {runtime.python}"
        return ""


def needs_of(packed: bytes) -> Needs | None:
    """The needs of a packed function or call; None when every endpoint reads it."""
    if packed[:1].isdigit() and packed.count(b"\n11\n") == 2:
        return None  # JSON has no newline of its own: a call of which both halves are JSON, as most are
    # Here, not at the top: it would make the import of the package half as slow again.
    from farcall_common.payload.framing import first_line, unpack

    ids: set[bytes] = set()
    python: str | None = None
    for buffer in unpack(packed):
        strategy = bytes(buffer[:2])
        if strategy in _WITH_HEAD:
            python = json.loads(first_line(buffer[3:])).get("python") or python
        elif strategy == _BYTE_CODE:
            python = THIS_PYTHON
        ids.add(strategy)
    if ids <= _UNIVERSAL:
        return None
    return Needs(frozenset(strategy.decode() for strategy in ids), python)
