"""cgroups of a test."""

from __future__ import annotations

import os

from farcall_endpoint.environments.cgroups import Hierarchy, writable_hierarchies


def made_hierarchies() -> list[Hierarchy]:
    """A new group for this test alone in each hierarchy; the caller removes them."""
    found = [Hierarchy(each.path / f"test-{os.getpid()}", each.controllers) for each in writable_hierarchies()]
    for each in found:
        each.path.mkdir()
    return found
