"""Input and output in Parquet files: local ones, on a file system that all nodes share, or in a bucket of S3."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import fnmatch
import os
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from farcall_common.files import whole_file

COMPRESSIONS: Final = ("none", "snappy", "gzip", "lz4", "zstd")
"""Compressions of written files."""
_SAMPLED_GROUPS: Final = 3
"""Row groups of a share that are sampled, less one."""
_MAY_PASS: Final = re.compile(r"AWS Error (NETWORK_CONNECTION|SLOW_DOWN|SERVICE_UNAVAILABLE|REQUEST_TIMEOUT|INTERNAL)")
_PASSING: Final = {errno.EIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.EMFILE, errno.ESTALE}
_PART: Final = re.compile(r"part-\d{5,}\.parquet|\.part-\d{5,}\.parquet-[0-9a-f]{16}")
_AT_A_TIME: Final = 16
"""Files whose metadata is read in parallel."""

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


class InputProblem(ValueError):
    """Files that cannot be read as one table; the text names the file."""


@dataclasses.dataclass(frozen=True)
class Share:
    """Row groups of a file, which one task reads.

    :param rows: of them. ``size``: bytes in memory, about.
    :param version: of the file: it differs once that has changed.
    """

    path: str = dataclasses.field(repr=False)  # it may have a password
    row_groups: tuple[int, ...]
    rows: int
    size: int
    version: str

    def sampled(self) -> Share:
        """A few row groups, from the first to the last one."""
        count = len(self.row_groups)
        if not count:
            return self
        chosen = sorted({number * (count - 1) // _SAMPLED_GROUPS for number in range(_SAMPLED_GROUPS + 1)})
        return dataclasses.replace(self, row_groups=tuple(self.row_groups[each] for each in chosen))


@dataclasses.dataclass(frozen=True)
class Input:
    """Files with one schema.

    :param paths: as they were given, in order.
    """

    paths: tuple[str, ...]
    schema: pa.Schema
    shares: tuple[Share, ...]

    @property
    def rows(self) -> int:
        """Rows of all files together."""
        return sum(each.rows for each in self.shares)

    @property
    def size(self) -> int:
        """Bytes in memory, about."""
        return sum(each.size for each in self.shares)


def find_paths(patterns: Paths) -> list[str]:
    """The files that paths name, those of one pattern in the order of their names; only names may have ``*``.

    :raises InputProblem: if there is none for a pattern.
    """
    found: list[str] = []
    for pattern in map(absolute, [patterns] if isinstance(patterns, (str, os.PathLike)) else patterns):
        if "*" not in pattern:
            if "://" not in pattern and Path(pattern).is_dir():
                raise InputProblem(f"{pattern} is a directory: write {pattern.rstrip('/')}/*.parquet")
            found.append(pattern)
            continue
        directory, _, name = pattern.rpartition("/")
        system, place = _place(directory or ".")
        try:
            files = system.get_file_info(pa.fs.FileSelector(place))
        except OSError as error:
            raise InputProblem(f"{shown(pattern)}: {error}") from error
        names = sorted(
            each.base_name
            for each in files
            if each.is_file and fnmatch.fnmatchcase(each.base_name, name) and not each.base_name.startswith(".")
        )
        if not names:
            raise InputProblem(f"{shown(pattern)}: there are no such files")
        found += [f"{directory}/{each}" if directory else each for each in names]
    return found


def find_input(paths: Sequence[str], *, share_bytes: float) -> Input:
    """The files, and how tasks share them: row groups that lie side by side, of about so many bytes.

    :raises InputProblem: if a file is missing or damaged, or has other columns than the first one.
    """
    if not paths:
        raise InputProblem("there are no files")
    with concurrent.futures.ThreadPoolExecutor(_AT_A_TIME) as readers:
        files = list(readers.map(_inspect, paths))
    schema = files[0].schema
    for path, file in zip(paths, files, strict=True):
        if not file.schema.equals(schema):
            difference = _difference(file.schema, schema)
            raise InputProblem(f"{shown(path)}: other columns than in {shown(paths[0])}: {difference}")
    shares = [
        share
        for path, file in zip(paths, files, strict=True)
        for share in _shares(path, file.metadata, share_bytes, file.version)
    ]
    return Input(tuple(paths), schema, tuple(shares) or (Share(paths[0], (), 0, 0, files[0].version),))


def read_share(share: Share, columns: Sequence[str] | None = None, *, only: Sequence[str] | None = None) -> pa.Table:
    """The rows of a share.

    :param only: those of the columns that are read; others are null.
    :raises InputProblem: if the file has changed, or is damaged.
    """
    if _version(share.path) != share.version:
        raise InputProblem(f"{shown(share.path)}: it has changed meanwhile")
    with _open(share.path) as file:
        try:
            table = file.read_row_groups(list(share.row_groups), columns=only or columns)
            if only and columns:
                table = _with_nulls(table, [file.schema_arrow.field(each) for each in columns])
        except (pa.ArrowException, OSError) as error:
            raise _problem(share.path, error) from error
    return table.replace_schema_metadata(None)


def _with_nulls(table: pa.Table, fields: Sequence[pa.Field]) -> pa.Table:
    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in fields
    ]
    return pa.table(columns, schema=pa.schema(fields))


def write_table(path: str, table: pa.Table, *, compression: str = "snappy") -> None:
    """Write a file, whole or not at all, and its directory if that is missing; a file that is there is replaced.

    :param compression: one of :data:`COMPRESSIONS`.
    :raises OSError: if that cannot be.
    """
    system, place = _place(path)
    if not isinstance(system, pa.fs.LocalFileSystem):  # an object is there when all of it has been written
        pq.write_table(table, place, filesystem=system, compression=compression)
        return
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    with whole_file(Path(place)) as file:
        pq.write_table(table, file, compression=compression)


def delete_other_parts(output: str, paths: Sequence[str]) -> None:
    """Delete the files of an earlier job with the same output that this one has not replaced."""
    system, place = _place(output)
    own = {path.rpartition("/")[2] for path in paths}
    for each in system.get_file_info(pa.fs.FileSelector(place)):
        # those that begin with a dot are drafts of tasks that were killed
        if each.is_file and _PART.fullmatch(each.base_name) and each.base_name not in own:
            system.delete_file(each.path)


def absolute(path: str | os.PathLike[str]) -> str:
    """An address, or a path that is the same in all directories of work."""
    return str(path) if "://" in str(path) or not str(path).strip() else os.path.abspath(path)  # noqa: PTH100


def is_below(path: str, directory: str) -> bool:
    """Whether a file is in a directory, or below a prefix."""
    if "://" in directory:
        return path.startswith(f"{directory.rstrip('/')}/")
    return "://" not in path and Path(directory).resolve() in Path(path).resolve().parents


def shown(path: str) -> str:
    """A path without a password."""
    return re.sub(r"://.*@", "://…@", path).partition("?")[0] if "://" in path else path


def _version(path: str) -> str:
    try:
        system, place = _place(path)
        [info] = system.get_file_info([place])
    except (pa.ArrowException, OSError) as error:
        raise _problem(path, error) from error
    if info.type == pa.fs.FileType.NotFound:
        raise InputProblem(f"{shown(path)}: it is not there on {socket.gethostname()}; all workers must reach it")
    return f"{info.size} {info.mtime_ns}"


class _File(NamedTuple):
    schema: pa.Schema
    metadata: pq.FileMetaData
    version: str


def _inspect(path: str) -> _File:
    try:
        version = _version(path)  # before it is opened: a change after that is seen when it is read
        with _open(path) as file:
            return _File(file.schema_arrow.remove_metadata(), file.metadata, version)
    except OSError as error:
        raise InputProblem(f"{shown(path)}: {error}") from error


def _open(path: str) -> pq.ParquetFile:
    try:
        system, place = _place(path)
        return pq.ParquetFile(place, filesystem=system)
    except (pa.ArrowException, OSError) as error:
        raise _problem(path, error) from error


def _problem(path: str, error: Exception) -> Exception:
    """An error of a file: one of its content or its name, or one that another attempt may not have."""
    may_pass = isinstance(error, MemoryError) or _MAY_PASS.search(str(error)) is not None
    if may_pass or (isinstance(error, OSError) and error.errno in _PASSING):
        return error if isinstance(error, (MemoryError, OSError)) else OSError(f"{shown(path)}: {error}")
    return InputProblem(f"{shown(path)}: {error}")


def _place(path: str) -> tuple[pa.fs.FileSystem, str]:
    """Return file system and path of a URL or local path."""
    return pa.fs.FileSystem.from_uri(path) if "://" in path else (pa.fs.LocalFileSystem(), path)


def _shares(path: str, metadata: pq.FileMetaData, share_bytes: float, version: str) -> Iterable[Share]:
    groups: list[int] = []
    rows = size = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if groups and size + group.total_byte_size > share_bytes:
            yield Share(path, tuple(groups), rows, size, version)
            groups, rows, size = [], 0, 0
        groups.append(number)
        rows += group.num_rows
        size += group.total_byte_size
    if groups:
        yield Share(path, tuple(groups), rows, size, version)


def _difference(found: pa.Schema, wanted: pa.Schema) -> str:
    missing = [field.name for field in wanted if field.name not in found.names]
    more = [field.name for field in found if field.name not in wanted.names]
    other = [
        f"{name} is {found.field(name).type}, not {wanted.field(name).type}"
        for name in found.names
        if name in wanted.names and found.field(name).type != wanted.field(name).type
    ]
    parts = [f"without {', '.join(missing)}" if missing else "", f"with {', '.join(more)}" if more else "", *other]
    return "; ".join(filter(None, parts)) or "in another order"
