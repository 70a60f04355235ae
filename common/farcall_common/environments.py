"""Environments of tasks: a container image, a Python prefix, or packages to install. No I/O.

An :class:`Environment` is part of the options of a task, unchanged from the API to the worker: a task keeps what it was
submitted with, whatever happens to the registration that it names.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

IMAGES: Final = ("apptainer", "docker", "podman", "podman-hpc", "shifter", "singularity")
"""Technologies whose location is an image: a reference, a file or a directory, in the form that their commands take."""
TREES: Final = ("bubblewrap", "charliecloud")
"""Technologies whose location is the directory of a root file system."""
PREFIXES: Final = ("conda", "venv")
"""Technologies whose location is the directory of a Python installation."""
UV: Final = "uv"
"""Packages that the endpoint installs; there is no location."""
TYPES: Final = tuple(sorted((*IMAGES, *TREES, *PREFIXES, UV)))

MAX_LOCATION: Final = 1000
MAX_REQUIREMENTS: Final = 100
MAX_PRELOAD: Final = 100

_Requirement = Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
_Module = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=200)]

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_WHY_ABSOLUTE: Final = "the directory must be an absolute path on the endpoint's nodes"


class Environment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the workers of a task run in. Created and checked by :meth:`of`.

    :param type: the technology, one of :data:`TYPES`.
    :param location: the image, root directory or prefix; empty for ``uv``.
    :param requirements: packages to install, as pip takes them; for ``uv`` only.
    :param preload: modules that a worker has loaded before its first task; None: those that earlier tasks imported.
    :param name: the name that it was registered under, for people.
    """

    type: str
    location: str = ""
    requirements: tuple[_Requirement, ...] = ()
    preload: tuple[_Module, ...] | None = None
    name: str = ""

    @classmethod
    def of(cls, given: Environment | Mapping[str, Any]) -> Environment:
        """A checked environment.

        :raises ValueError: for values that it cannot have; the message says which.
        """
        try:
            found = msgspec.convert(
                msgspec.to_builtins(given) if isinstance(given, Environment) else dict(given), cls, strict=True
            )
        except msgspec.ValidationError as error:
            raise ValueError(f"environment: {error}") from None
        if problem := found.problem():
            raise ValueError(f"environment: {problem}")
        return found

    def problem(self) -> str:
        """Why there can be no such environment; empty if there can."""
        if self.type not in TYPES:
            return f"{self.type!r} is not one of {', '.join(TYPES)}"
        if (self.type == UV) != bool(self.requirements):
            return "requirements go with type uv, and only with that"
        if (self.type == UV) == bool(self.location):
            return f"type {self.type} takes {'requirements, no' if self.type == UV else 'a'} location"
        if len(self.location) > MAX_LOCATION or len(self.requirements) > MAX_REQUIREMENTS:
            return f"more than {MAX_LOCATION} characters of location or {MAX_REQUIREMENTS} requirements"
        if self.preload is not None and len(self.preload) > MAX_PRELOAD:
            return f"more than {MAX_PRELOAD} modules to preload"
        if any(map(_CONTROL.search, (self.location, self.name, *self.requirements))):
            return "control characters"
        if self.location.startswith("-") or any(each.startswith("-") for each in self.requirements):
            return "a location or requirement that begins with a dash would be an option"
        if self.type in (*TREES, *PREFIXES) and not self.location.startswith("/"):
            return _WHY_ABSOLUTE
        return ""

    @property
    def key(self) -> str:
        """16 hexadecimal digits, equal for what runs in the same workers: everything but the name."""
        return _key(self)

    @property
    def label(self) -> str:
        """For people: the name, else the technology and the place."""
        return self.name or f"{self.type}:{self.location or ' '.join(self.requirements)}"


@functools.lru_cache(maxsize=4096)
def _key(environment: Environment) -> str:
    nameless = msgspec.structs.replace(environment, name="")
    return hashlib.sha256(msgspec.json.encode(nameless)).hexdigest()[:16]
