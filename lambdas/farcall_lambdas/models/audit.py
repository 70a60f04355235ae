"""Who did what."""

from __future__ import annotations

from typing import Any

from farcall_lambdas.models.fields import Maybe, Shape


class AuditEntryShape(Shape):
    """``identity_id`` did ``action`` (like ``function.delete``) to the object, which belongs to ``owner_id``, ``at``
    epoch seconds."""

    at: float
    identity_id: str
    action: str
    object_id: str
    owner_id: str
    detail: dict[str, Any]


class AuditList(Shape):
    """Oldest first. With ``next`` there may be more: ask again with that as ``after``."""

    entries: list[AuditEntryShape]
    next: Maybe[str] = None
