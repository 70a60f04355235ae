"""Error shape of every error answer."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from farcall_lambdas.models.fields import Maybe, Shape


class ErrorAnswer(Shape):
    """What went wrong. ``code`` is for programs, ``message`` and ``hint`` for people; the rest is Globus Compute's."""

    code: str
    message: str
    hint: str = ""
    fault: str
    retryable: bool
    retry_after_s: Maybe[float] = None
    status: str = "Failed"
    http_status_code: int
    reason: str
    error_args: list[Any] = Field(default_factory=list)
    request_id: str
