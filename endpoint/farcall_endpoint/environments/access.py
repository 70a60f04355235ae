"""Access to environments: which locations tasks of other submitters than the owner may name.

Preparing and starting an environment opens its location with the rights of the endpoint's owner. So a submitter may
name what its tasks can read in any case, or what the owner has allowed, and nothing else.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from farcall_common.environments import PREFIXES, TREES, UV, Environment
from farcall_endpoint.environments.settings import EnvironmentSettings
from farcall_endpoint.isolation import bubblewrap

CONFINED_OUTSIDE: Final = frozenset({*TREES, *PREFIXES, UV})
"""Types whose containers of submitters other than the owner run in bubblewrap's confinement of ours. The others have
namespaces of their own."""
UNTRUSTED_OUTSIDE: Final = CONFINED_OUTSIDE - {UV}
"""Those whose Python is not ours: it cannot be trusted to confine itself."""

_TRANSPORTS: Final = (
    "containers-storage|dir|docker-archive|docker-daemon|file|localimage|oci|oci-archive|ostree|sif|tarball"
)
_REFERENCE: Final = re.compile(
    r"((docker|library|oras)://|docker:)?"
    rf"(?!({_TRANSPORTS}):)"
    r"[A-Za-z0-9][\w.-]*(:\d+)?(/[A-Za-z0-9][\w.-]*)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
"""An image in a registry, and not one of the many ways to name a file."""
_REQUIREMENT: Final = re.compile(r"[A-Za-z0-9][\w.-]*\s*(\[[\w.,\s-]*\])?\s*([<>=!~;(].*)?", re.ASCII)
"""A package by name and version, and not the path or address of one."""
_OWNERS_ONLY: Final = ("shifter",)
_NEVER: Final = tuple(map(Path, ("/proc", "/sys", "/dev")))


def refusal(
    environment: Environment, settings: EnvironmentSettings, *, readable: Collection[str], node_path: str = ""
) -> str:
    """Why tasks of other submitters than the owner may not use an environment; empty if they may.

    :param readable: directories that they may read, without links.
    :param node_path: the file or directory of the node that the location names, if it names one.
    """
    if settings.default is not None and settings.default.key == environment.key:
        return ""
    location = environment.location
    if environment.type == UV:
        if all(_REQUIREMENT.fullmatch(each) and "@" not in each for each in environment.requirements):
            return ""
        return "packages are named by name and version, not by path or address"
    if environment.type in _OWNERS_ONLY:
        return f"{environment.type} does not separate them from the owner's files"
    if ".." in Path(location).parts:
        return "its location goes up in the directories"
    path = node_path or (location if location.startswith("/") else "")
    if settings.locations:
        if not any(fnmatch.fnmatchcase(location, pattern) for pattern in settings.locations):
            return "its location is not among those that the owner allows"
        if path and not (_is_allowed(path, settings.locations) or _is_below(path, readable)):
            return "its location leads to one that is not among those that the owner allows"
        return ""
    if path:
        return "" if path.startswith("/") and _is_below(path, readable) else "they may not read its location"
    return "" if _REFERENCE.fullmatch(location) else "its location is not an image in a registry"


def _is_allowed(path: str, patterns: Collection[str]) -> bool:
    """Whether a path, with all links followed, is what patterns allow: others than the owner may write there. Links
    that the owner has named are followed in patterns, too."""
    target = os.path.realpath(path)
    for pattern in patterns:
        wanted = re.sub("^[a-z-]+:(//)?", "", pattern)
        if wanted == path:
            return True
        fixed = re.split(r"[*?[]", wanted, maxsplit=1)[0].rpartition("/")[0]
        if fnmatch.fnmatchcase(target, glob.escape(os.path.realpath(fixed or "/")).rstrip("/") + wanted[len(fixed) :]):
            return True
    return False


def _is_below(location: str, readable: Collection[str]) -> bool:
    """Whether a path, with all links followed, lies in one of these directories."""
    try:
        path = Path(os.path.realpath(location, strict=True))
    except OSError:
        return False
    if any(each in (path, *path.parents, *Path(location).parents) for each in _NEVER):  # links of the kernel differ
        return False
    return any(str(each) in readable for each in (path, *path.parents))


def confinement_of(
    readable: Sequence[str], type_: str, *, writable: Sequence[str] = (), directory: Path = Path("/")
) -> list[str]:
    """What to write before the command of a runner that leaves the confinement of submitters to us."""
    nested = {"nested": True} if type_ in TREES else {}  # for the runner's own namespaces
    return bubblewrap.prefix(readable=readable, writable=writable, directory=directory, **nested)
