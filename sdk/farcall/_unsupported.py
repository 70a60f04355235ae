"""Arguments of other SDKs that Farcall does not support: refused, never ignored."""

from __future__ import annotations

from farcall_common.errors import Unsupported


def refuse(name: str, value: object, *, hint: str) -> None:
    """Refuse an argument that was given.

    :raises Unsupported: unless the value is None or False, which is the same as not asking.
    """
    if value is not None and value is not False:
        raise Unsupported(f"{name}={value!r} cannot be honoured here", hint=hint)
