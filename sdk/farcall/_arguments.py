"""Argument checks: ids in their canonical form, and arguments of other SDKs that Farcall does not support."""

from __future__ import annotations

import uuid

from farcall_common.errors import Unsupported


def as_reference(value: str | uuid.UUID) -> str | None:
    """A function's id in its canonical form, with ``@`` and a version if it has one; None if it may be an alias."""
    function_id, at, version = str(value).partition("@")
    try:
        return f"{uuid.UUID(function_id)}{at}{version}"
    except ValueError:
        return None


def as_function_id(value: str | uuid.UUID) -> str:
    """A function's id in its canonical form, with ``@`` and a version if it has one.

    :raises ValueError: if it is neither.
    """
    reference = as_reference(value)
    if reference is None:
        raise ValueError(f"{value!r} is not a UUID, nor a UUID, @ and a version")
    return reference


def as_uuid(value: str | uuid.UUID) -> str | None:
    """A UUID in its canonical form; None if it is not one."""
    try:
        return str(uuid.UUID(str(value)))
    except ValueError:
        return None


def as_id(value: str | uuid.UUID) -> str:
    """A UUID in its canonical form.

    :raises ValueError: if it is not a UUID.
    """
    if text := as_uuid(value):
        return text
    raise ValueError(f"{value!r} is not a UUID")


def refuse(name: str, value: object, *, hint: str) -> None:
    """Refuse an argument that is not supported.

    :raises Unsupported: unless the value is None or False.
    """
    if value is not None and value is not False:
        raise Unsupported(f"{name} is not supported", hint=hint)
