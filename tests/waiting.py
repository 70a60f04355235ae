"""Waiting in tests: one deadline for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

#: Only a test that fails waits so long, in seconds, so that it is generous: under load a slow machine takes many times
#: what a good one takes. ``timeout`` in pyproject.toml leaves room for more than one.
WAIT_S: Final = 240.0

_STEP_S: Final = 0.01


def wait_until(
    condition: Callable[[], object], what: str = "what was waited for", *, timeout_s: float = WAIT_S
) -> None:
    """Poll a condition.

    :raises TimeoutError: if it does not hold in time.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(_STEP_S)
