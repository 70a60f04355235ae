"""Submitters of a shared endpoint, and the levels of isolation between them that this machine has."""

from __future__ import annotations

import contextlib
from typing import Final

import psutil
import pytest

from farcall_endpoint.isolation import bubblewrap, landlock
from tests.support.endpoint import EndpointProcess

ATTACKER: Final = "018f0000-0000-7000-8000-00000000000a"
VICTIM: Final = "018f0000-0000-7000-8000-00000000000b"
MISSING: Final = {"landlock": landlock.missing_alone(), "bubblewrap": bubblewrap.missing()}
LEVELS: Final = [
    pytest.param(level, marks=pytest.mark.skipif(bool(MISSING.get(level)), reason=MISSING.get(level, "")))
    for level in ("none", "process", "landlock", "bubblewrap")
]


def victims_of(endpoint: EndpointProcess) -> list[psutil.Process]:
    """The processes of an endpoint that call themselves "victim"."""
    found = []
    for process in endpoint.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if process.name() == "victim" else []
    return found
