"""The ids that users write, in the form that the API knows."""

from __future__ import annotations

import uuid


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
