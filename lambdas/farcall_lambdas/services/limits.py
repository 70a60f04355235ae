"""Bounds that several services check."""

from __future__ import annotations

from farcall_common.errors import InvalidRequest
from farcall_lambdas.settings import ApiSettings

__all__ = ["check_count"]


def check_count(count: int, settings: ApiSettings) -> None:
    """:raises InvalidRequest: for more tasks than one request may name."""
    if count > settings.max_tasks_per_request:
        raise InvalidRequest(
            f"{count} tasks in one request; {settings.max_tasks_per_request} are allowed.", hint="Split the request."
        )
