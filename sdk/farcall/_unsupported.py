"""What programs for other SDKs ask for and Farcall does not do: said aloud, never ignored."""

from __future__ import annotations

from farcall_common.errors import InvalidRequest

__all__ = ["Unsupported", "refuse"]


class Unsupported(InvalidRequest):
    """An argument or method that other SDKs have, and that has no meaning here; ``hint`` says what has."""

    code = "UNSUPPORTED"


def refuse(name: str, value: object, *, hint: str) -> None:
    """Refuse an argument that was given.

    :raises Unsupported: unless the value is None or False, which is the same as not asking.
    """
    if value is not None and value is not False:
        raise Unsupported(f"{name}={value!r} cannot be honoured here", hint=hint)
