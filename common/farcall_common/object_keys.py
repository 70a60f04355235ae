"""Keys of objects: a name that cannot be guessed, whose suffix says how long the object lives.

==================  ====================================================================
``<32 hex>.t``      until it was not used for a day
``<32 hex>.t-<s>``  until it was not used for so many seconds
``<32 hex>.x``      until it is evicted
``<32 hex>.c-<n>``  for n reads, and a day at most without one
``<32 hex>.g-<g>``  until the group g is evicted, and a day at most without use
==================  ====================================================================

Connectors keep the name as it is, in a file name or a key of a database, so that what cleans up needs no other record.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from typing import Any, Final, NamedTuple

from farcall_common.errors import InvalidRequest

DEFAULT_EXPIRES_S: Final = 24 * 3600
MOST_READS: Final = 1000
"""A connector may look for each of the reads that are left."""

_SUFFIX: Final = re.compile(
    r"x|t(?:-(?P<expires_s>[1-9][0-9]{0,8}))?|c-(?P<reads>[1-9][0-9]{0,2}|1000)|g-(?P<group>[A-Za-z0-9_-]{1,64})"
)
_NAME: Final = re.compile(rf"[0-9a-f]{{32}}\.(?P<suffix>{_SUFFIX.pattern})")


class Key(NamedTuple):
    """Key of an object in one of our connectors."""

    name: str


@dataclasses.dataclass(frozen=True)
class Lifetime:
    """How long an object lives.

    :ivar suffix: of its key.
    :ivar expires_s: since its last use; None: until it is evicted.
    :ivar reads: after so many it is gone; None: any number.
    :ivar group: with which it is evicted, if any.
    """

    suffix: str
    expires_s: int | None = DEFAULT_EXPIRES_S
    reads: int | None = None
    group: str | None = None

    @property
    def is_timed(self) -> bool:
        """Whether the suffix names the seconds."""
        return self.suffix.startswith("t-")

    def new_key(self) -> Key:
        """A key with 128 random bits."""
        return Key(f"{os.urandom(16).hex()}.{self.suffix}")


EXPLICIT: Final = Lifetime("x", expires_s=None)


@functools.lru_cache(maxsize=1024)
def lifetime(suffix: str) -> Lifetime:
    """The lifetime that a suffix says.

    :raises ValueError: if it is none.
    """
    found = _SUFFIX.fullmatch(suffix)
    if found is None:
        raise ValueError(f"{suffix!r} is not the lifetime of an object")
    if suffix == EXPLICIT.suffix:
        return EXPLICIT
    expires_s, reads = found["expires_s"], found["reads"]
    return Lifetime(
        suffix,
        expires_s=int(expires_s) if expires_s else DEFAULT_EXPIRES_S,
        reads=int(reads) if reads else None,
        group=found["group"],
    )


def lifetime_of(key: tuple[Any, ...]) -> Lifetime:
    """The lifetime of the object with a key. Every use of a key begins here: its name becomes a part of a path.

    :raises InvalidRequest: if it is no key of ours.
    """
    name = key[0] if len(key) == 1 else None
    if not isinstance(name, str) or (found := _NAME.fullmatch(name)) is None:
        raise InvalidRequest(f"{name!r} is not the key of an object.", hint="Use the reference that put() returned.")
    return lifetime(found["suffix"])


def is_key(name: str) -> bool:
    """Whether this is the key of an object, as the name of a file is where a directory keeps objects."""
    return _NAME.fullmatch(name) is not None


def chosen_lifetime(*, expires_s: float | None, reads: int | None, explicit: bool, group: str | None) -> Lifetime:
    """The lifetime that a caller asks for.

    :raises ValueError: for more than one, and for values that it cannot have.
    """
    if (expires_s is not None) + (reads is not None) + explicit + (group is not None) > 1:
        raise ValueError("an object has one lifetime: expires_s, reads, explicit, or group")
    if explicit:
        return EXPLICIT
    if expires_s is not None:
        if not 1 <= expires_s < 1e9:
            raise ValueError(f"expires_s is between 1 and 1e9 seconds, not {expires_s}")
        return lifetime(f"t-{int(expires_s)}")
    if reads is not None:
        if not 1 <= reads <= MOST_READS:
            raise ValueError(f"reads is between 1 and {MOST_READS}, not {reads}")
        return lifetime(f"c-{int(reads)}")
    return lifetime("t" if group is None else f"g-{checked_group(group)}")


def checked_group(group: str) -> str:
    """The name of a group.

    :raises ValueError: if it cannot be one.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", group):
        raise ValueError(f"a group is up to 64 letters, digits, '-' and '_', not {group!r}")
    return group
