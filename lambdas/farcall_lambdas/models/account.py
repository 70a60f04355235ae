"""Account shapes: identity and limits of the caller, task groups, audit log."""

from __future__ import annotations

from typing import Any

from farcall_lambdas.models.fields import Maybe, Shape


class Quota(Shape):
    used: int
    limit: int


class Limits(Shape):
    """Limits of the caller: bytes, numbers of tasks, requests per second."""

    functions: Quota
    endpoints: Quota
    containers: Quota
    max_payload_bytes: int
    max_inline_bytes: int
    max_request_bytes: int
    max_tasks_per_request: int
    max_queue_depth: int
    rate_per_s: float
    rate_burst: int
    retention_days: float


class TokenShape(Shape):
    """The caller's token, and what it is limited to."""

    token_id: str
    name: str
    scopes: list[str]
    endpoints: Maybe[list[str]] = None
    functions: Maybe[list[str]] = None


class WhoAmI(Shape):
    """``linked`` are the other identities of the same person; what belongs to one of them belongs to the caller.
    ``provider`` is the identity provider: dev, globus or oidc, or farcall for a service account."""

    identity_id: str
    username: str
    linked: list[str]
    provider: str
    limits: Limits
    token: Maybe[TokenShape] = None


class GroupEntry(Shape):
    """``states`` counts the tasks that are in each state; ``created_at`` in epoch seconds."""

    task_group_id: str
    created_at: float
    tasks: int
    states: dict[str, int]


class GroupList(Shape):
    """``next`` is the value of ``before`` for the next, older page, or null if there is none."""

    groups: list[GroupEntry]
    next: str | None


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
    """Oldest first. With ``next`` there may be more: pass it as ``after``."""

    entries: list[AuditEntryShape]
    next: Maybe[str] = None
