"""cgroups of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from farcall_endpoint.host.cgroups import Cgroups, Hierarchy, writable_hierarchies
from tests.waiting import wait_until


def close(cgroups: Cgroups) -> None:
    """Remove groups whose processes have ended, or are about to: the kernel knows of them for a moment longer."""

    def closed() -> bool:
        cgroups.close()
        return not any(directory.exists() for directory in cgroups.directories)

    wait_until(closed, "all processes have ended")


@contextlib.contextmanager
def made_hierarchies() -> Iterator[list[Hierarchy]]:
    """A new group in each hierarchy, with the controllers that there are."""
    cgroups = Cgroups(writable_hierarchies(), remove_leftovers=False)
    try:
        found = []
        for each in cgroups.hierarchies:
            if not each.controllers:
                with contextlib.suppress(OSError):  # it is not permitted, or the controller is not there
                    cgroups.enable_cpu(each)
            group = cgroups.create("test", within=each)
            found.append(Hierarchy(group.paths[0], each.controllers))
        yield found
        for group in cgroups.groups():
            wait_until(group.remove, "all processes have ended")
    finally:
        cgroups.close()
