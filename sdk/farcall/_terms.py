"""Where and how calls run: values that each call takes along, and that may be set anew for the calls to come."""

from __future__ import annotations

import dataclasses
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farcall._submission import TaskOptions

__all__ = ["Terms", "as_id", "as_reference"]


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a call takes along. Calls of equal terms may travel in one request."""

    endpoint_id: str | None
    task_group_id: str
    options: TaskOptions


def as_reference(value: str | uuid.UUID) -> str | None:
    """A function's id in its canonical form, with ``@`` and a version if it has one; None for what may be an alias."""
    function_id, at, version = str(value).partition("@")
    try:
        return f"{uuid.UUID(function_id)}{at}{version}"
    except ValueError:
        return None


def as_id(value: str | uuid.UUID) -> str:
    """A UUID in its canonical form.

    :raises ValueError: if it is none.
    """
    try:
        return str(uuid.UUID(str(value)))
    except ValueError:
        raise ValueError(f"{value!r} is not a UUID") from None
