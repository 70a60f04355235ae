"""Section ``engine.environments`` of ``config.yaml``: containers, Python prefixes and packages for tasks."""

from __future__ import annotations

import posixpath
import re
import urllib.parse
from typing import Annotated, Final, Literal

import msgspec

from farcall_endpoint.config.section import FieldProblem, Section

Technology = Literal[
    "apptainer",
    "bubblewrap",
    "charliecloud",
    "conda",
    "docker",
    "podman",
    "podman-hpc",
    "shifter",
    "singularity",
    "uv",
    "venv",
]
ContainerType = Literal[
    "apptainer",
    "bubblewrap",
    "charliecloud",
    "conda",
    "docker",
    "podman",
    "podman-hpc",
    "shifter",
    "singularity",
    "venv",
]
"""All but ``uv``, which has no location: requirements come from tasks."""

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
_Gigabytes = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]
_INDEX_SCHEMES: Final = ("https", "http")
_SYSTEM: Final = re.compile(
    r"/(usr/)?(s?bin|lib(32|64|x32)?)|/(boot|dev|etc|run|usr)|/(proc|sys|run/farcall)(/.*)?", re.DOTALL
)
"""Directories that every container needs to start; ``/run/farcall`` has the worker's own code."""


class EnvironmentsConfig(Section, frozen=True, kw_only=True):
    """Environments of tasks besides the endpoint's own Python, and how long workers and images are kept."""

    types: Annotated[
        tuple[Technology, ...] | None,
        msgspec.Meta(
            description="The technologies that tasks may use; default: all that work on a node. []: none, tasks run in "
            "the endpoint's own Python only."
        ),
    ] = None
    locations: Annotated[
        tuple[_Text, ...],
        msgspec.Meta(
            description="Patterns of the images and directories that submitters other than the owner may name, with * "
            "for any characters; default: every image by its reference, and directories that their tasks may read."
        ),
    ] = ()
    binds: Annotated[
        tuple[_Text, ...],
        msgspec.Meta(
            description="Directories of the node that every container sees: /SOURCE, /SOURCE:/TARGET or "
            "/SOURCE:/TARGET:ro for reading only."
        ),
    ] = ()
    network: Annotated[bool, msgspec.Meta(description="Whether containers may use the node's network.")] = True
    cache_dir: Annotated[
        str,
        msgspec.Meta(
            min_length=1,
            description="Where converted images and installed packages are kept, best on a disk of each node; relative "
            "to the endpoint's directory.",
        ),
    ] = "environments"
    cache_size: Annotated[
        _Gigabytes,
        msgspec.Meta(description="Maximum size of cache_dir in GB; the least recently used is deleted first."),
    ] = 20.0
    idle_time: Annotated[
        float,
        msgspec.Meta(ge=0, le=7 * 86_400, description="Seconds for which a worker without a task is kept warm."),
    ] = 600.0
    memory: Annotated[
        _Gigabytes | None,
        msgspec.Meta(
            description="Memory of a node for warm workers without a task, in GB; templates may have half as much; "
            "default: half of the node's."
        ),
    ] = None
    eviction: Annotated[
        Literal["greedy-dual", "lru"],
        msgspec.Meta(
            description="Which warm worker makes room first: by use, cost of a start and memory, or the least recently "
            "used."
        ),
    ] = "greedy-dual"
    extra_workers: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=4096)] | None,
        msgspec.Meta(
            description="Warm workers of a node beyond its slots, for environments that take turns; default: as many "
            "as slots, but none with mem_per_worker. With accelerators or cpu_affinity there are none."
        ),
    ] = None
    start_limit: Annotated[
        float,
        msgspec.Meta(
            ge=1,
            le=86_400,
            description="Maximum seconds for a start of an environment, with the conversion of its image.",
        ),
    ] = 600.0
    fork: Annotated[
        bool,
        msgspec.Meta(description="Whether workers are forks of a process that has imported what functions need."),
    ] = True
    source_builds: Annotated[
        bool,
        msgspec.Meta(
            description="Whether uv may build packages that have no wheel: building runs code of the package, confined "
            "by bubblewrap or Landlock."
        ),
    ] = False
    index_url: Annotated[
        str,
        msgspec.Meta(
            description="Package index for uv: a URL, or the absolute path of a directory with wheels; default: that "
            "of UV_DEFAULT_INDEX, or PyPI."
        ),
    ] = ""

    def __post_init__(self) -> None:
        if self.types is not None and len(set(self.types)) < len(self.types):
            raise FieldProblem("types", "a technology is listed twice", fix="list each one once")
        targets: list[str] = []
        for number, bind in enumerate(self.binds):
            target = _target(bind, number)
            if target in targets:
                raise FieldProblem(
                    "binds", f"two binds have the target {target}", fix="give each one its own target", item=number
                )
            targets.append(target)
        if self.index_url:
            _check_index(self.index_url)


def _target(bind: str, number: int) -> str:
    """The directory in the container of a bind, the ``number``-th of the list.

    :raises FieldProblem: for what cannot be bound.
    """

    def problem(text: str, fix: str) -> FieldProblem:
        return FieldProblem("binds", text, fix=fix, item=number)

    source, _, rest = bind.partition(":")
    target, _, mode = rest.partition(":")
    if bind.count(":") > 2 or (bind.count(":") == 2 and mode != "ro") or (":" in bind and not target):
        raise problem(f"{bind!r} is not a bind", "write /SOURCE, /SOURCE:/TARGET or /SOURCE:/TARGET:ro")
    for path in filter(None, (source, target)):
        if not path.startswith("/") or ".." in path.split("/"):
            raise problem(f"{path!r} is not an absolute path", "write it with all directories, from / on")
    place = posixpath.normpath(target or source).replace("//", "/")
    if place == "/":
        raise problem(f"{bind!r} would replace the container's root", "bind the directories that tasks need")
    if _SYSTEM.fullmatch(place):
        raise problem(
            f"{bind!r} would hide {place} of the container, in which no program starts then",
            f"write another target, such as {source}:/mnt{place}",
        )
    return place


def _check_index(url: str) -> None:
    if url.startswith("/"):
        return
    try:
        parts = urllib.parse.urlsplit(url)
        has_credentials = parts.username is not None or parts.password is not None
    except ValueError:
        parts, has_credentials = urllib.parse.SplitResult("", "", "", "", ""), False
    if parts.scheme not in _INDEX_SCHEMES or not parts.hostname:
        raise FieldProblem(
            "index_url",
            f"{url!r} is not an index",
            fix="write https://HOST/simple, or the absolute path of a directory",
        )
    if has_credentials:
        raise FieldProblem(
            "index_url",
            "the password in index_url would be visible to other users of a node",
            fix="set UV_DEFAULT_INDEX in worker_init, from a file that only you can read",
        )
