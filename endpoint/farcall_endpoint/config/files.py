"""Section ``files`` of ``config.yaml``: files of tasks, which the endpoint copies from and to storage."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from farcall_common.errors import did_you_mean
from farcall_endpoint.config.section import FieldProblem, Section

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
_UUID: Final = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
_SCHEMES: Final = ("az", "file", "globus", "gs", "http", "https", "s3")
_BYTES_PER_GB: Final = 10**9
"""Disks are written in GB of this size."""


class GlobusConfig(Section, frozen=True, kw_only=True):
    """A collection of Globus that has a directory of this machine. Files that Globus moves pass through there."""

    collection: Annotated[
        str,
        msgspec.Meta(
            pattern=_UUID,
            description="UUID of the collection.",
            extra={"looks_like": "a UUID, such as 6c54cade-bde5-45c1-bdea-f4bd71dba2cc"},
        ),
    ]
    directory: Annotated[
        str,
        msgspec.Meta(
            min_length=1,
            description="An absolute path of this machine, for files on their way; best on the file system of "
            "working_dir. Globus needs no other directory.",
        ),
    ]
    path: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(description="The same directory as the collection names it; default: the same path."),
    ] = None

    def __post_init__(self) -> None:
        if not self.directory.startswith(("/", "~/")):
            raise FieldProblem("directory", f"{self.directory!r} is not absolute", fix="begin it with / or ~/")
        if self.path is not None and not self.path.startswith("/"):
            raise FieldProblem("path", f"{self.path!r} is not absolute", fix="begin it with / or /~/")


class StorageConfig(Section, frozen=True, kw_only=True):
    """A storage with options of its own, or one that is open to other submitters than the owner."""

    url: Annotated[
        _Text,
        msgspec.Meta(
            description="The beginning of its URLs up to a /, such as s3://lab/raw. Longer ones win. file:///path is a "
            "directory here that is open to tasks at other endpoints."
        ),
    ]
    options: Annotated[
        dict[_Text, _Text],
        msgspec.Meta(
            description="Options of obstore for it, such as region, endpoint, access_key_id, secret_access_key, "
            "skip_signature. $NAME stands for the value of an environment variable of the endpoint."
        ),
    ] = msgspec.field(default_factory=dict)
    submitters: Annotated[
        tuple[_Text, ...] | Literal["*"],
        msgspec.Meta(description="Identities whose tasks may read it, besides those of the owner; *: all."),
    ] = ()
    write: Annotated[bool, msgspec.Meta(description="Whether these may write it, too.")] = False

    def __post_init__(self) -> None:
        scheme, separator, rest = self.url.partition("://")
        if scheme == "file" and separator:
            self._check_directory(rest)
        elif not separator or scheme not in _SCHEMES or not rest.partition("/")[0]:
            raise FieldProblem(
                "url",
                f"{self.url!r} is not the beginning of a URL",
                fix=did_you_mean(scheme, _SCHEMES)
                or f"begin with {', '.join(f'{each}://' for each in _SCHEMES)}, and a bucket, container, host or "
                "collection",
            )
        if self.url.endswith("*") or "?" in self.url or "#" in self.url:
            raise FieldProblem(
                "url", f"{self.url!r} has *, ? or #", fix="end with a bucket or a folder; it has all files below that"
            )
        host = rest.partition("/")[0]
        if scheme in ("http", "https") and host != host.lower():
            raise FieldProblem("url", f"{host!r} is not in lower case", fix=f"write {host.lower()}")
        if scheme == "globus" and self.options:
            raise FieldProblem("options", "globus:// has no options", fix="remove options; files.globus is for all")
        if scheme in ("http", "https") and (self.options or self.write):
            raise FieldProblem("url", f"{scheme}:// has no options, and cannot be written", fix="remove these")

    def _check_directory(self, rest: str) -> None:
        """Check a directory that tasks at other endpoints may read (``endpoint://``); tasks here need no permission."""
        if not rest.startswith("/") or ".." in rest.split("/"):
            raise FieldProblem("url", f"{self.url!r} has no absolute path", fix="write file:///path")
        if self.options or self.write:
            raise FieldProblem("url", "file:// has no options, and other endpoints cannot write it", fix="remove these")


class FilesConfig(Section, frozen=True, kw_only=True):
    """Files that tasks read and write in storage. The endpoint copies them, so that its nodes need no way out."""

    enabled: Annotated[bool, msgspec.Meta(description="Whether tasks may have files in storage.")] = True
    serve: Annotated[
        bool, msgspec.Meta(description="Whether tasks at other endpoints may read files of this one (endpoint://).")
    ] = True
    cache: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] | None,
        msgspec.Meta(
            description="Disk space for copies of files, in GB, in the endpoint's directory; those that no task has "
            "are deleted, the one that was not used for longest first; default: a tenth of what is free, at most 50."
        ),
    ] = None
    node_cache: Annotated[
        float,
        msgspec.Meta(
            ge=0,
            le=1_000_000,
            description="Disk space for copies of files on each node, in GB; 0: tasks read the endpoint's copies, "
            "which all nodes see.",
        ),
    ] = 0.0
    node_dir: Annotated[
        _Text | None,
        msgspec.Meta(
            description="An absolute path on the nodes, best on a disk of their own, for these copies; default: the "
            "node's TMPDIR."
        ),
    ] = None
    max_transfers: Annotated[
        int, msgspec.Meta(ge=1, le=64, description="Maximum number of files that are copied at a time.")
    ] = 8
    transfer_limit: Annotated[
        float,
        msgspec.Meta(ge=1, le=86_400, description="Seconds without progress after which copying a file fails."),
    ] = 300.0
    total_limit: Annotated[
        Annotated[float, msgspec.Meta(ge=1, le=30 * 86_400)] | None,
        msgspec.Meta(description="Seconds after which copying a file fails although it makes progress."),
    ] = None
    storages: Annotated[
        tuple[StorageConfig, ...],
        msgspec.Meta(
            max_length=1000,
            description="Storages with options, or open to other submitters. The owner's tasks reach all others with "
            "the credentials of the endpoint's process, other tasks public https:// addresses only.",
        ),
    ] = ()
    globus: Annotated[
        GlobusConfig | None,
        msgspec.Meta(description="The endpoint's own collection at Globus, for globus:// files; default: none."),
    ] = None

    def __post_init__(self) -> None:
        if self.node_dir is not None and not self.node_dir.startswith(("/", "~/")):
            raise FieldProblem("node_dir", f"{self.node_dir!r} is not an absolute path", fix="write /path/on/the/nodes")
        if self.node_dir is not None and not self.node_cache:
            raise FieldProblem("node_dir", "nodes keep no copies", fix="set node_cache, too, or remove node_dir")

    @property
    def node_cache_bytes(self) -> int:
        """Maximum size of the copies on a node, in bytes; 0: nodes keep no copies."""
        return int(self.node_cache * _BYTES_PER_GB) if self.enabled else 0

    @property
    def cache_bytes(self) -> int | None:
        """Maximum size of the endpoint's cache, in bytes; None: the default."""
        return None if self.cache is None else int(self.cache * _BYTES_PER_GB)
