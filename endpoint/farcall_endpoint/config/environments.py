"""Section ``engine.environments`` of ``config.yaml``: containers, Python prefixes and packages for tasks."""

from __future__ import annotations

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


class EnvironmentsConfig(Section, frozen=True, kw_only=True):
    """What tasks may run in besides the endpoint's own Python, and how long workers and images are kept."""

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
        targets = [_target(bind) for bind in self.binds]
        if twice := {target for target in targets if targets.count(target) > 1}:
            raise FieldProblem("binds", f"two binds have the target {min(twice)}", fix="give each one its own target")
        if self.index_url:
            _check_index(self.index_url)


def _target(bind: str) -> str:
    """The directory in the container.

    :raises FieldProblem: for what cannot be bound.
    """
    source, _, rest = bind.partition(":")
    target, _, mode = rest.partition(":")
    if bind.count(":") > 2 or (bind.count(":") == 2 and mode != "ro") or (":" in bind and not target):
        raise FieldProblem(
            "binds", f"{bind!r} is not a bind", fix="write /SOURCE, /SOURCE:/TARGET or /SOURCE:/TARGET:ro"
        )
    for path in filter(None, (source, target)):
        if not path.startswith("/") or ".." in path.split("/"):
            raise FieldProblem(
                "binds", f"{path!r} is not an absolute path", fix="write it with all directories, from / on"
            )
    if (target or source).rstrip("/") == "":
        raise FieldProblem(
            "binds", f"{bind!r} would replace the container's root", fix="bind the directories that tasks need"
        )
    return (target or source).rstrip("/")


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
