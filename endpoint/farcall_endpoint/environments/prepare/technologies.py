"""Technologies of environments on a node: allowed or not, installed or not. Nothing is started to know that."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from typing import Final

from farcall_common.environments import TYPES, WITHOUT_CONTAINER
from farcall_endpoint.config.settings import EnvironmentSettings

_PROGRAMS: Final[Mapping[str, str]] = {"bubblewrap": "bwrap", "charliecloud": "ch-run"}
"""Programs that are not named as their technology."""
_MASKED: Final = ("docker", "podman", "podman-hpc")
"""They cover parts of ``/proc``, and the kernel permits another one only where the present one is whole."""


def technologies(settings: EnvironmentSettings) -> dict[str, str]:
    """All technologies: those that are allowed and installed on this node with an empty text, and why the others cannot
    be used. Whether one works is found out by its first environment: the answer takes a start of a container."""
    installed = find_installed(TYPES)
    found: dict[str, str] = {}
    for name in TYPES:
        if settings.types is not None and name not in settings.types:
            found[name] = not_allowed(settings)
        else:
            found[name] = "" if name in installed else f"{name} is not installed"
    return found


def not_allowed(settings: EnvironmentSettings) -> str:
    """Why a technology may not be used."""
    return f"the endpoint's configuration allows {', '.join(settings.types or ()) or 'none'}"


def find_installed(types: Collection[str]) -> list[str]:
    """Return the technologies whose programs are in the search path, without a check that they work. Python prefixes
    and uv need no program."""
    return [each for each in types if each in WITHOUT_CONTAINER or shutil.which(_PROGRAMS.get(each, each)) is not None]


def without_forks(technology: str, *, confined: bool, is_root: bool = os.geteuid() == 0) -> str:
    """Why workers of a technology are not forks of a template on any node, as far as that is known without a try; empty
    if they may be.

    Forks need a ``/proc`` of their own, and code of the image must be able to mount it. Root could also write the
    kernel's settings there, which are read-only in a container of bubblewrap.

    :param confined: whether bubblewrap confines it from outside.
    """
    if technology in _MASKED:
        return f"{technology} permits no further /proc in its containers, which forks would need"
    if is_root and (technology == "bubblewrap" or confined):
        return "an endpoint of root does not let containers of bubblewrap mount another /proc, which forks would need"
    return ""
