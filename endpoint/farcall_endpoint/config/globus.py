"""Section ``files.globus`` of the configuration: the endpoint's own collection at Globus."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from farcall_endpoint.config.section import FieldProblem, Section

_UUID: Final = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"


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
