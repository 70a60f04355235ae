"""The list of a task's files (see :mod:`.file_arguments`), in front of its payload.

Between a submitter and an endpoint nothing opens the list: it is a part of the payload, which the cloud passes on, and
which a sealed call encrypts. An agent reads the list without the arguments.

::

    payload = "fl" + newline + Base64 of zlib of the list in MessagePack + newline + the call or graph
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec

from farcall_common.errors import DeserializationError, InvalidRequest
from farcall_common.file_arguments import PREFIX, Described, Mode, shown, source_of, source_path, without_files
from farcall_common.limits import MAX_FILE_BYTES, MAX_FILES, MAX_SOURCE_FILES, MAX_SOURCES, MAX_URL_CHARACTERS, MIB
from farcall_common.task_options import source_file

MAX_LIST_BYTES: Final = 16 * MIB
"""Limit for a list before compression: an agent's other tasks wait while it reads one."""


class FileUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file of a task, as the list has it.

    :param mode: ``r``: the task reads it, ``w``: the task writes it.
    :param size_bytes, sha256: what its submitter expects of a file that is read; None and empty: anything.
    """

    url: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_URL_CHARACTERS)]
    mode: Mode = "r"
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)] | None = None
    sha256: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""


# -- the submitter -----------------------------------------------------------------------------------------------------


def uses(found: Iterable[Described]) -> tuple[FileUse, ...]:
    """The files that :func:`farcall_common.file_arguments.collecting` has found, for the list."""
    return tuple(FileUse(url, mode or "r", size_bytes, sha256 or "") for url, mode, size_bytes, sha256 in found)


def sources(files: Iterable[FileUse]) -> tuple[str, ...]:
    """The endpoints whose files these are, each once, by the ids in their URLs."""
    return tuple(dict.fromkeys(source for use in files if (source := source_of(use.url))))


def source_files(files: Iterable[FileUse]) -> tuple[str, ...]:
    """The files of other endpoints among these, each once, as the options of a task have them."""
    found = ((source, use.url) for use in files if (source := source_of(use.url)))
    return tuple(dict.fromkeys(source_file(source, source_path(url)) for source, url in found))


def pack_files(files: Sequence[FileUse], payload: bytes | memoryview) -> bytes:
    """A payload with the list of its files; without files the payload itself.

    :raises InvalidRequest: if there are more than :data:`~farcall_common.limits.MAX_FILES`, files of too many
        endpoints, their URLs are too long together, or there is one with two sizes or two SHA-256.
    """
    if not files:
        return bytes(payload)
    if len(files) > MAX_FILES:
        raise InvalidRequest(
            f"The call has {len(files):,} files; a task has at most {MAX_FILES:,}.",
            hint="Pack small files into an archive, or split the call.",
        )
    if len(pulled := source_files(files)) > MAX_SOURCE_FILES:
        raise InvalidRequest(
            f"The call has {len(pulled):,} files of other endpoints; a task reads {MAX_SOURCE_FILES:,} at most.",
            hint="Pack small files into an archive, or split the call.",
        )
    if len(named := sources(files)) > MAX_SOURCES:
        raise InvalidRequest(
            f"The call has files of {len(named)} endpoints; a task reads those of {MAX_SOURCES} at most.",
            hint="Split the call, or copy files of several endpoints to an object store.",
        )
    if twice := _twice(files):
        raise InvalidRequest(f"{shown(twice)} is an argument with different size_bytes or sha256.")
    encoded = _encode(list(files))
    if len(encoded) > MAX_LIST_BYTES:
        raise InvalidRequest(
            f"The list of the call's files has {len(encoded):,} bytes, and at most {MAX_LIST_BYTES:,} are taken.",
            hint="Split the call.",
        )
    return PREFIX + base64.b64encode(zlib.compress(encoded, 1)) + b"\n" + payload


def _twice(files: Sequence[FileUse]) -> str:
    """The URL of a file that is in a list twice with the same mode; empty if there is none."""
    seen: set[tuple[str, Mode]] = set()
    for use in files:
        if (use.url, use.mode) in seen:
            return use.url
        seen.add((use.url, use.mode))
    return ""


# -- the endpoint ------------------------------------------------------------------------------------------------------

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Annotated[tuple[FileUse, ...], msgspec.Meta(max_length=MAX_FILES)]).decode


def unpack_files(payload: bytes | memoryview) -> tuple[Sequence[FileUse], memoryview]:
    """The list of files in front of a payload, and the call or graph behind it. Anything may be in them.

    :raises DeserializationError: if it is no such list.
    """
    view = memoryview(payload)
    rest = without_files(view)
    opener = zlib.decompressobj()
    try:
        line = bytes(view[len(PREFIX) : len(view) - len(rest)]).removesuffix(b"\n")
        opened = opener.decompress(base64.b64decode(line, validate=True), MAX_LIST_BYTES)
        if not opener.eof:
            raise DeserializationError(f"The list of files is cut, or has more than {MAX_LIST_BYTES:,} bytes.")
        uses = _decode(opened)
    except (binascii.Error, zlib.error, msgspec.DecodeError, RecursionError) as error:
        raise DeserializationError(f"The list of files cannot be read: {error}.") from error
    if twice := _twice(uses):
        raise DeserializationError(f"The list of files has {shown(twice)} twice.")
    return uses, rest
