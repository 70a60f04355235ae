"""Access to environments: which locations tasks of other submitters than the owner may name, and how what was checked
is what is started.

Preparing and starting an environment opens its location with the rights of the endpoint's owner. So a submitter may
name what its tasks can read in any case, or what the owner has allowed, and nothing else. Between the check of a path
and its opening others may replace it by a link (ADR 0073).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import glob
import os
import re
import stat
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from farcall_common.environments import TREES, UV, WITHOUT_CONTAINER, Environment
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.environments.runners.base import Runner, Start
from farcall_endpoint.environments.runners.bubblewrap import ASSEMBLE
from farcall_endpoint.host import tree_root
from farcall_endpoint.host.isolation import bubblewrap
from farcall_endpoint.host.isolation.paths import TEMPORARY_PREFIX
from farcall_endpoint.worker.namespaces import unescaped

CONFINED_OUTSIDE: Final = frozenset({*TREES, *WITHOUT_CONTAINER})
"""Types whose containers of submitters other than the owner run in Farcall's bubblewrap confinement. The other types'
containers have namespaces of their own."""
UNTRUSTED_OUTSIDE: Final = CONFINED_OUTSIDE - {UV}
"""Confined types whose Python is not Farcall's, and cannot be trusted to confine itself."""

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
_OWNERS_ONLY: Final = ("shifter",)
_NEVER: Final = tuple(map(Path, ("/proc", "/sys", "/dev")))
_MOST_LINKS: Final = 100


class Refused(Exception):
    """Tasks of other submitters than the owner may not use an environment; the text says why."""


class Place(NamedTuple):
    """A file or directory of the node that a submitter has named, and may use.

    :param path: without links. Open it without following any, or by name if it is ``is_fixed``.
    :param is_fixed: whether no other user of the node, and no task, can put something else there.
    :param is_file: whether it is a file, and no directory.
    """

    path: str
    is_fixed: bool
    is_file: bool = False


def named(environment: Environment, settings: EnvironmentSettings, *, node_path: str = "") -> str:
    """The file or directory of the node that an environment of another submitter than the owner names; empty if there
    is none, or if the owner has named it. Nothing is looked up.

    :param node_path: the file or directory of the node that the location names, if it names one.
    :raises Refused: if they may not use it, whatever is there.
    """
    if settings.default is not None and settings.default.key == environment.key:
        return ""
    location = environment.location
    if environment.type == UV:
        if problem := environment.problem():
            raise Refused(problem)
        return ""
    if environment.type in _OWNERS_ONLY:
        raise Refused(f"{environment.type} does not separate them from the owner's files")
    if ".." in Path(location).parts:
        raise Refused("its location goes up in the directories")
    if settings.locations and not any(fnmatch.fnmatchcase(location, pattern) for pattern in settings.locations):
        raise Refused("its location is not among those that the owner allows")
    path = node_path or (location if location.startswith("/") else "")
    if not path and not settings.locations and not _REFERENCE.fullmatch(location):
        raise Refused("its location is not an image in a registry")
    return path


def locate(
    environment: Environment,
    settings: EnvironmentSettings,
    *,
    readable: Collection[str],
    writable: Collection[str] = (),
    node_path: str = "",
) -> Place | None:
    """Check the file or directory of the node that a submitter's environment names. Return None if it names none, or if
    the owner has named it. Other users can replace it at any time, so the check is about the path without links that
    is opened afterwards. A file system that hangs blocks the thread that calls this.

    :param readable: directories that submitters may read, without links.
    :param writable: directories in which their tasks may write, besides those of ``settings``.
    :param node_path: see :func:`named`.
    :raises Refused: if submitters may not use it.
    """
    if not (path := named(environment, settings, node_path=node_path)):
        return None
    bound = [each.partition(":")[0] for each in settings.binds if not each.endswith(":ro")]
    node = _Node.of_now(map(os.path.realpath, (*bound, *writable)))
    try:
        target = node.resolve(os.path.abspath(path))  # noqa: PTH100 - text all along
    except OSError as error:
        raise Refused("the endpoint cannot read its location") from error
    if target is None:
        raise Refused("its location has too many links, or leads to a file system that another user's program serves")
    if settings.locations and _is_allowed(target, settings.locations, node):
        pass
    elif not path.startswith("/") or not _is_below(path, target, readable):
        if settings.locations:
            raise Refused("its location leads to one that is not among those that the owner allows")
        raise Refused("they may not read its location")
    return Place(target, node.is_fixed(target), is_file=os.path.isfile(target))  # noqa: PTH113 - text all along


def _is_allowed(target: str, patterns: Collection[str], node: _Node) -> bool:
    """Whether a path without links is what patterns allow. In the part of a pattern without wildcards, the links that
    the owner has made are followed; others may be able to write there."""
    for pattern in patterns:
        wanted = re.sub("^[a-z-]+:(//)?", "", pattern)
        has_wildcards = re.search(r"[*?[]", wanted) is not None
        fixed = re.split(r"[*?[]", wanted, maxsplit=1)[0].rpartition("/")[0] if has_wildcards else wanted
        base = node.resolve(os.path.abspath(fixed or "/"), owners_only=True)  # noqa: PTH100 - text all along
        if base is None:
            continue
        if fnmatch.fnmatchcase(target, glob.escape(base).rstrip("/") + (wanted[len(fixed) :] if has_wildcards else "")):
            return True
    return False


class _Node(NamedTuple):
    """Directories of this node that others can change. ``tasks_write``: directories in which tasks may write;
    ``of_others``: see :func:`mounted_by_others`. No path in ``of_others`` is looked up: its program could block it."""

    tasks_write: Collection[str]
    of_others: Collection[str]

    @classmethod
    def of_now(cls, tasks_write: Iterable[str]) -> _Node:
        """With the present mounts.

        :raises Refused: if the kernel does not say which there are.
        """
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
                return cls(list(tasks_write), mounted_by_others(file, user=os.geteuid()))
        except OSError as error:
            raise Refused("the endpoint cannot read its location") from error

    def resolve(self, path: str, *, owners_only: bool = False) -> str | None:
        """An absolute path without links. None if there are too many, if it leads to a file system of others, or, with
        ``owners_only``, over a link that is not the owner's.

        :raises OSError: if a link cannot be read.
        """
        left, found, most = list(reversed(Path(path).parts[1:])), "/", _MOST_LINKS
        while left:
            inner = os.path.normpath(os.path.join(found, left.pop()))  # noqa: PTH118 - text all along
            if inner in self.of_others or most == 0:
                return None
            if not os.path.islink(inner):  # noqa: PTH114 - text all along
                found = inner
                continue
            if owners_only and not (self.is_fixed(found) and os.lstat(inner).st_uid in (0, os.geteuid())):
                return None
            leads_to, most = os.readlink(inner), most - 1  # noqa: PTH115
            found = "/" if leads_to.startswith("/") else found
            left += reversed([part for part in leads_to.split("/") if part not in ("", ".")])
        return found

    def is_fixed(self, path: str) -> bool:
        """Whether only root and the owner can replace a path of :meth:`resolve`, and what is in it; their tasks
        cannot."""
        for each in (path, *map(str, Path(path).parents)):
            try:
                found = os.lstat(each)
            except OSError:
                return False
            is_shared = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) and not found.st_mode & stat.S_ISVTX
            is_of_tasks = each in self.tasks_write or os.path.basename(each).startswith(TEMPORARY_PREFIX)  # noqa: PTH119
            if is_shared or is_of_tasks or found.st_uid not in (0, os.geteuid()):
                return False
        return True


def mounted_by_others(lines: Iterable[str], *, user: int) -> set[str]:
    """Return the directories where users other than root and this one have mounted a FUSE file system. Their program
    can report any owners, modes and links at any time. Pure.

    :param lines: lines of ``/proc/self/mountinfo``.
    """
    found: set[str] = set()
    for line in lines:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split()[:3]
        own = {"user_id=0", f"user_id={user}"}
        if kind.split(".")[0] in ("fuse", "fuseblk") and not own & set(options.split(",")):
            found.add(unescaped(before.split()[4]))
    return found


def _is_below(location: str, target: str, readable: Collection[str]) -> bool:
    """Whether a path without links exists, and lies in one of these directories."""
    if not os.path.lexists(target):
        return False
    path = Path(target)
    if any(each in (path, *path.parents, *Path(location).parents) for each in _NEVER):  # links of the kernel differ
        return False
    return any(str(each) in readable for each in (path, *path.parents))


def confinement_of(
    readable: Sequence[str],
    type_: str,
    *,
    writable: Sequence[str] = (),
    directory: Path = Path("/"),
    image: str = "",
    place: Place | None = None,
) -> list[str]:
    """Return the words before the command of a runner that leaves the confinement of submitters to Farcall.

    :param image: path of the image, which the runner sees at this path.
    :param place: place of the image on the node, if a submitter has named it.
    """
    is_opened = place is not None and not place.is_fixed
    source = image if place is None else tree_root.DESCRIPTOR if is_opened else place.path
    command = bubblewrap.prefix(
        readable=readable,
        writable=writable,
        directory=directory,
        nested=type_ in TREES,  # for the runner's own namespaces
        shown={image: source} if image else {},
    )
    if place is None or not is_opened or bubblewrap.OF_DESCRIPTOR not in command:
        return command
    return [*ASSEMBLE, "opened", place.path, *command]


def node_path(runner: Runner | None, location: str) -> str:
    """The file or directory of the node that a location names, as its runner understands it; empty if none."""
    find = getattr(runner, "node_path", None)
    return find(location) if find is not None else ""


def shown(type_: str, start: Start, place: Place, cache: Path) -> tuple[Start, list[str]]:
    """A start of a runner that opens its image itself, so that it opens what was checked; and what to write before its
    command. What others could replace is mounted in the cache, for this command alone."""
    if place.is_fixed:
        return dataclasses.replace(start, image=place.path), []
    seen = seen_in(cache, place)
    # A program with the set-user-ID bit has no rights in a namespace of users.
    options = (
        (*start.options, "--userns") if type_ in ("apptainer", "singularity") and os.geteuid() != 0 else start.options
    )
    return dataclasses.replace(start, image=seen, options=options), showing(type_, place, seen)


def seen_in(cache: Path, place: Place) -> str:
    """Path at which a command of :func:`showing` sees a file or directory that other users could replace."""
    return str(cache / f".{tree_root.FILE if place.is_file else tree_root.DIRECTORY}")


def showing(type_: str, place: Place, seen: str) -> list[str]:
    """Return the words before a command that make the checked file or directory visible at the path ``seen``."""
    command = [*ASSEMBLE, "shown", place.path, seen]
    # An ordinary user's Podman needs its own namespace of users, with ranges of them.
    return [type_, "unshare", *command] if type_ in ("podman", "podman-hpc") and os.geteuid() != 0 else command
