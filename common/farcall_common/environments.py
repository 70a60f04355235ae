"""Environments of tasks: a container image, a Python prefix, or packages to install. No I/O.

An :class:`Environment` is part of the options of a task, unchanged from the API to the worker: a task keeps what it was
submitted with, whatever happens to the registration that it names.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from farcall_common.errors import did_you_mean
from farcall_common.plain_text import is_plain_line

IMAGES: Final = ("apptainer", "docker", "podman", "podman-hpc", "shifter", "singularity")
"""Technologies whose location is an image: a reference, a file or a directory, in the form that their commands take."""
OF_REGISTRIES: Final = ("docker", "shifter")
"""Technologies whose image is always a reference to a registry, never a file or a directory."""
TREES: Final = ("bubblewrap", "charliecloud")
"""Technologies whose location is the directory of a root file system."""
PREFIXES: Final = ("conda", "venv")
"""Technologies whose location is the directory of a Python installation."""
UV: Final = "uv"
"""Packages that the endpoint installs; there is no location."""
WITHOUT_CONTAINER: Final = (*PREFIXES, UV)
"""Technologies whose workers see the node as its user does."""
TYPES: Final = tuple(sorted((*IMAGES, *TREES, *WITHOUT_CONTAINER)))

MAX_LOCATION: Final = 1000
MAX_REQUIREMENTS: Final = 100
MAX_PRELOAD: Final = 100
MAX_NAME: Final = 100
MAX_BYTES: Final = 4096
"""Most bytes of an environment as JSON: each task of a submit has a copy in memory while it waits."""

_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
#: An option of a command: at the beginning or behind a space.
_AN_OPTION: Final = re.compile(r"(^|\s)-")
_PACKAGE: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_VERSION: Final = r"(?:===|==|~=|!=|<=|>=|<|>)\s*[A-Za-z0-9._*+!-]+"
_REQUIREMENT: Final = re.compile(
    rf"{_PACKAGE}\s*(?:\[\s*{_PACKAGE}(?:\s*,\s*{_PACKAGE})*\s*\])?"
    rf"\s*(?:{_VERSION}(?:\s*,\s*{_VERSION})*\s*,?|\(\s*{_VERSION}(?:\s*,\s*{_VERSION})*\s*\))?"
    r"\s*(?:;[\w\s.'\"<>=!~()*+-]+)?"
)
_FILES: Final = (".whl", ".zip", ".tar.gz", ".tar.bz2", ".tgz")
#: Images of apptainer and singularity with a scheme. Both take any other location as the path of a file.
_URI: Final = re.compile(r"[a-z]+://|(docker-archive|docker-daemon|oci|oci-archive|dir|localimage):")
_LONGEST_LABEL: Final = 80


class Environment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True, gc=False):
    """Environment of a task's workers. :meth:`of` creates and checks it. An environment that another process sent may
    be invalid, see :meth:`problem`.

    :param type: the technology, one of :data:`TYPES`.
    :param location: the image, root directory or prefix; empty for ``uv``.
    :param requirements: packages to install, as pip takes them; for ``uv`` only.
    :param preload: modules that templates import, for the workers forked from them; None: those that earlier tasks
        imported.
    :param name: the name that it was registered under, for people.
    """

    type: str
    location: str = ""
    requirements: tuple[str, ...] = ()
    preload: tuple[str, ...] | None = None
    name: str = ""

    @classmethod
    def of(cls, given: Environment | Mapping[str, Any]) -> Environment:
        """A checked environment.

        :raises TypeError: for anything but an environment or a mapping.
        :raises ValueError: for values that it cannot have; the message says which.
        """
        if not isinstance(given, Environment | Mapping):
            raise TypeError(
                f"environment: expected a dict, got {type(given).__name__}. A registered one is named by container."
            )
        values = msgspec.to_builtins(given) if isinstance(given, Environment) else dict(given)
        if unknown := sorted(set(map(str, values)) - set(cls.__struct_fields__)):
            hint = did_you_mean(unknown[0], cls.__struct_fields__) or f"It has {', '.join(cls.__struct_fields__)}."
            raise ValueError(f"environment: there is no field {unknown[0]!r}. {hint}")
        try:
            found = msgspec.convert(values, cls, strict=True)
        except msgspec.ValidationError as error:
            raise ValueError(f"environment: {error}") from None
        if problem := found.problem():
            raise ValueError(f"environment: {problem}")
        return found

    def to_json(self) -> dict[str, Any]:
        """The fields that are set, as JSON has them: with lists."""
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return found

    def problem(self) -> str:
        """Why there can be no such environment; empty if there can."""
        if self.type not in TYPES:
            return unknown_type(self.type)
        if (self.type == UV) != bool(self.requirements):
            if self.type == UV:
                return "type uv takes requirements: names of packages, such as polars==1.*"
            return f"type {self.type} takes no requirements; type uv does"
        if (self.type == UV) == bool(self.location):
            return f"type {self.type} takes {'requirements, no' if self.type == UV else 'a'} location"
        if len(self.location) > MAX_LOCATION or len(self.requirements) > MAX_REQUIREMENTS:
            return f"more than {MAX_LOCATION} characters of location or {MAX_REQUIREMENTS} requirements"
        if self.preload is not None and len(self.preload) > MAX_PRELOAD:
            return f"more than {MAX_PRELOAD} modules to preload"
        if wrong := [each for each in self.preload or () if not _MODULE.fullmatch(each)]:
            return f"preload: {wrong[0]!r} is not the name of a module"
        if len(self.name) > MAX_NAME:
            return f"a name of more than {MAX_NAME} characters"
        if not all(map(is_plain_line, (self.location, self.name, *self.requirements))):  # no store takes surrogates
            return "control characters"
        if self.location.startswith("-") or any(map(_AN_OPTION.search, self.requirements)):
            return "a location that begins with a dash, or a requirement with one behind a space, would be an option"
        if self.location != self.location.strip() or not all(map(str.strip, self.requirements)):
            return "a location with spaces around it, or an empty requirement"
        if ".." in self.location.split("/"):
            return f"the location {self.location} has '..' in it"
        if self.type in (*TREES, *PREFIXES) and not self.location.startswith("/"):
            what = "prefix, not its name (`conda env list` shows it)" if self.type == "conda" else "directory"
            return f"type {self.type} takes the absolute path of the {what}, not {self.location!r}"
        if self.type in OF_REGISTRIES and self.location.startswith("/"):
            return (
                f"type {self.type} takes a reference (NAME:TAG), not the path {self.location!r}. Choose another type: "
                "apptainer for a file, bubblewrap for the directory of a root file system, venv for one of Python"
            )
        by_uri = self.type in ("apptainer", "singularity")
        is_path = by_uri and _URI.match(self.location) is None and not self.location.startswith("/")
        if self.type in IMAGES and (is_path or self.location[0] in ".~"):
            what = "a URI (docker://NAME)" if by_uri else "a reference (NAME:TAG)"
            what += "" if self.type in OF_REGISTRIES else " or an absolute path of the endpoint's nodes"
            return f"type {self.type} takes {what}, not {self.location!r}"
        if len(msgspec.json.encode(self)) > MAX_BYTES:
            return f"more than {MAX_BYTES} bytes"
        return next(filter(None, map(requirement_problem, self.requirements)), "")

    @property
    def key(self) -> str:
        """32 hexadecimal digits, equal for what runs in the same workers: everything but the name. So many, because an
        endpoint trusts a definition by them: a submitter could find two definitions with the same 16."""
        return _key(self)

    @property
    def label(self) -> str:
        """For people: the name, else the technology and the place, with the end of a long one."""
        if self.name:
            return self.name
        place = self.location or " ".join(self.requirements)
        return f"{self.type}:{place if len(place) <= _LONGEST_LABEL else '...' + place[-_LONGEST_LABEL:]}"

    @property
    def reference(self) -> str:
        """The ``container`` of a task whose environment is not registered. A release that knows no environments leaves
        the environment out and keeps this name: it has no such container, and refuses the task."""
        return f"environment-{self.key[:16]}"


def requirement_problem(requirement: str) -> str:
    """Why a requirement is refused; empty for a name with extras, versions and markers (PEP 508). A path would be read,
    and a URL be fetched, with the rights of the endpoint's owner."""
    text = " ".join(requirement.split())  # many spaces would take the pattern long
    if _REQUIREMENT.fullmatch(text) and not text.lower().endswith(_FILES):
        return ""
    return (
        f"{requirement!r} is refused: a requirement is the name of a package with versions, such as polars==1.*; "
        "paths, URLs and options are not installed here. Fix: publish it to the index, or use a container image."
    )


def state_of(row: Mapping[str, Any]) -> str:
    """The state of an environment on a node, in a word. ``row`` is that of a report: ``warm``, ``busy``, ``starting``,
    ``forkable``, ``text``, ``problem``."""
    if row["warm"] or row["busy"]:  # also if a further worker could not be started
        return "warm"
    if row.get("problem"):
        return "failed"
    if row["starting"] or row.get("text"):
        return "starting"
    return "forkable" if row["forkable"] else "cold"


def renamed(text: str, old: str, new: str) -> str:
    """A message about an environment, with another label of it: those who share one may have different names for it."""
    for before in ("environment ", "packages of "):  # a label may be any word of the message
        if f"{before}{old}" in text:
            return text.replace(f"{before}{old}", f"{before}{new}", 1)
    return text


def unknown_type(name: str) -> str:
    """The message for a technology that there is not, with those that are spelled alike."""
    if not name:
        return f"its type is missing; it is one of {', '.join(TYPES)}"
    name = name[:40]  # of another process, it may be anything
    return f"type {name!r} is none of {', '.join(TYPES)}. {did_you_mean(name, TYPES) or ''}".rstrip()


@functools.lru_cache(maxsize=1024)
def _key(environment: Environment) -> str:
    nameless = msgspec.structs.replace(environment, name="")
    return hashlib.sha256(msgspec.json.encode(nameless)).hexdigest()[:32]
