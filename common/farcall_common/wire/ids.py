"""Identifiers: UUIDs as lower-case text. Task ids are UUIDv7 (RFC 9562), so they sort by the time of submission.

Ids of sealed calls have a mark, which holders of their submitter's secret recognise: a later process that reads a
result by its id knows that it has to be sealed, whatever the cloud says. Without the secret, the mark is random bits.
"""

from __future__ import annotations

import hmac
import os
import threading
import time
import uuid
from typing import Final

_VERSION_7: Final = 0x7 << 76
_VARIANT: Final = 0b10 << 62
_RANDOM_MASK: Final = (1 << 62) - 1
_MARK_BYTES: Final = 4
_MARKED: Final = b"farcall sealed task v1\0"

_lock = threading.Lock()
_last_tick = 0


def new_id() -> str:
    """A random UUID for anything that is not a task."""
    return str(uuid.uuid4())


def new_task_id(secret: bytes = b"") -> str:
    """A UUIDv7: 60 bits of time in steps of 2**-12 ms (RFC 9562, section 6.2, method 3), then 62 random bits.

    Ids of one process are strictly increasing, even within one tick of the clock or when the clock is set back.

    :param secret: of a submitter, for a mark in place of the last 32 bits (see :func:`has_mark`).
    """
    global _last_tick
    tick = time.time_ns() * 4096 // 1_000_000
    with _lock:
        _last_tick = tick = max(tick, _last_tick + 1)
    random_bits = int.from_bytes(os.urandom(8)) & _RANDOM_MASK
    value = (tick >> 12) << 80 | _VERSION_7 | (tick & 0xFFF) << 64 | _VARIANT | random_bits
    if secret:
        value = int.from_bytes(_marked(value.to_bytes(16), secret))
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def has_mark(task_id: str, secret: bytes) -> bool:
    """Whether an id has the mark of a secret. One of 2**32 ids without a mark seems to have it."""
    try:
        value = uuid.UUID(task_id).bytes
    except ValueError:
        return False
    return hmac.compare_digest(_marked(value, secret), value)


def _marked(value: bytes, secret: bytes) -> bytes:
    """An id with the mark of a secret in its last bytes."""
    kept = value[:-_MARK_BYTES]
    return kept + hmac.digest(secret, _MARKED + kept, "sha256")[:_MARK_BYTES]


def is_uuid(text: str) -> bool:
    """Whether text is a UUID in its canonical form (lower case, with hyphens)."""
    try:
        return str(uuid.UUID(text)) == text
    except (ValueError, AttributeError, TypeError):
        return False
