"""Files in storage as arguments of calls. For their list in a payload see :mod:`.staged_files`.

::

    executor.submit(reconstruct, File("s3://lab/raw/scan7.h5"), out=File("s3://lab/out/scan7.h5"))

The endpoint stages the files: it copies those that are read to its own storage before the task gets a worker, and those
that are written from there after the function has returned. The function gets :class:`File` objects too, which are
paths there: ``open(scan)``.

A worker imports this when its task has files: it must need no package but those of Python.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePath, PurePosixPath
from types import NoneType
from typing import IO, Any, Final, Literal

from farcall_common.errors import ConfigurationError, FarcallError, InvalidRequest, did_you_mean
from farcall_common.limits import MAX_FILE_BYTES, MAX_PAYLOAD_BYTES, MAX_URL_CHARACTERS, MIB

PREFIX: Final = b"fl\n"
"""Prefix of a payload with a list of files."""
_PREFIX_BYTES: Final = len(PREFIX)
LOCAL: Final = "file://"
"""Scheme of a path on the endpoint that runs the task."""
SCHEMES: Final = ("az", "endpoint", "file", "globus", "gs", "http", "https", "s3")
"""Schemes that clients accept. Each endpoint supports some of them."""
ENDPOINT: Final = "endpoint://"
"""Scheme of a path on another endpoint. The name or id of that endpoint follows."""
OUTPUTS: Final = ("out", "outputs")
"""Keyword arguments that hold files which the task writes."""
_MOST_LINE_BYTES: Final = MAX_PAYLOAD_BYTES
_MOST_NAME_BYTES: Final = 200
_MOST_SHOWN: Final = 200
_SHA256: Final = re.compile("[0-9a-f]{64}")

Mode = Literal["r", "w"]
Described = tuple[str, Mode | None, int | None, str | None]
"""A file as it is written: URL, mode, size in bytes, SHA-256; the last three may be None."""


class NodePath(str):
    """A path that exists on this node only."""

    __slots__ = ()


class File(os.PathLike[str]):
    """A file in storage that a task reads or writes.

    In the function it is the path of the endpoint's copy: ``open(file)``, ``file.path``, any library that takes a path.
    Elsewhere it has none. Files in lists, dictionaries and objects are found, too.

    :param url: ``s3://bucket/key``, ``https://host/path``, ``globus://COLLECTION/path``, ``file:///path`` (at the
        endpoint), ``endpoint://ENDPOINT/path``. ``http://`` only with ``sha256``: others on the way could change it.
    :param mode: ``r``: the task reads the file; ``w``: it writes the file, which is then stored under the URL. Files in
        the keyword arguments ``out`` and ``outputs`` are written if no mode is given.
    :param size_bytes, sha256: of a file that is read: what it must have (SHA-256 in hexadecimal). A file with a
        SHA-256 that the endpoint has already is not looked up again.
    :raises ValueError: for a URL without a scheme or a path, an unknown scheme, or another invalid value.
    :raises TypeError: for a value of another type, such as a ``pathlib.Path``.
    """

    __slots__ = ("_is_doubtful", "_mode", "_path", "sha256", "size_bytes", "url")

    def __init__(
        self, url: str, mode: Mode | None = None, *, size_bytes: int | None = None, sha256: str | None = None
    ) -> None:
        _check_types(url, size_bytes, sha256)
        scheme, separator, rest = url.partition("://")
        if not separator:
            at_endpoint = f"file://{url}" if url.startswith("/") else "file:///path"
            raise ValueError(
                f"url: {url!r} has no scheme of a file. Write {at_endpoint} for a file of the endpoint. A file of this "
                f"computer must be in an object store first (s3://bucket/key), or be read and passed as bytes, up to "
                f"{MAX_PAYLOAD_BYTES // MIB} MiB"
            )
        if scheme not in SCHEMES:
            hint = (
                did_you_mean(scheme.lower(), SCHEMES) or f"Write one of {', '.join(f'{each}://' for each in SCHEMES)}"
            )
            raise ValueError(f"url: {url!r} has an unknown scheme. {hint}")
        if len(url) > MAX_URL_CHARACTERS:
            raise ValueError(f"url: it has {len(url):,} characters; at most {MAX_URL_CHARACTERS:,} are possible")
        host, _, path = rest.partition("/")
        if not path.strip("/") or url.endswith("/"):
            raise ValueError(f"url: {url!r} names no file. Directories cannot be staged; name each file")
        if scheme == "file" and host not in ("", "localhost"):
            if host in ("~", ".", ".."):
                raise ValueError(f"url: expected an absolute path, got {url!r}. Write file:///path, without {host}")
            raise ValueError(f"url: {url!r} names the host {host!r}. Write file:///{host}/{path} for an absolute path")
        if not host and scheme != "file":
            raise ValueError(f"url: {url!r} names no bucket, host, collection or endpoint")
        if mode not in (None, "r", "w"):
            raise ValueError(f"mode: expected 'r' or 'w', got {mode!r}")
        if mode == "w" and (sha256 or size_bytes is not None):
            raise ValueError("size_bytes and sha256 belong to files that are read")
        if mode == "w" and scheme in ("http", "https", "endpoint"):
            raise ValueError(f"mode: {scheme}:// cannot be written")
        if sha256 is not None and not _SHA256.fullmatch(sha256):
            raise ValueError(f"sha256: expected 64 hexadecimal digits in lower case, got {sha256!r}")
        if size_bytes is not None and not 0 <= size_bytes <= MAX_FILE_BYTES:
            raise ValueError(f"size_bytes: expected 0 to {MAX_FILE_BYTES:,}, got {size_bytes}")
        if scheme == "http" and not sha256:
            raise ValueError("url: http:// needs sha256, because others on the way could change the file")
        global _in_use
        _in_use = True
        self.url: str = url
        self.size_bytes: int | None = size_bytes
        self.sha256: str | None = sha256
        self._mode: Mode | None = mode
        self._path: str | None = None
        self._is_doubtful = False

    @property
    def mode(self) -> Mode:
        """Whether the task reads (``r``) or writes (``w``) it."""
        return self._mode or "r"

    @property
    def name(self) -> str:
        """The last component of the URL's path, as the endpoint's copy is called."""
        return local_name(self.url)

    @property
    def path(self) -> Path:
        """Path of the file on the endpoint.

        :raises ConfigurationError: outside of the task that reads or writes it.
        """
        return Path(self.__fspath__())

    def open(self, mode: str = "", **options: Any) -> IO[Any]:
        """Open the file like the built-in :func:`open`. The default of ``mode`` is the file's own mode."""
        return open(self, mode or self.mode, **options)  # noqa: PTH123 - the caller closes it

    def __fspath__(self) -> str:
        if self._path is None:
            raise ConfigurationError(
                f"{self.url} has a path only in the task that it is an argument of.",
                hint="Pass the File to executor.submit, and open it in the function.",
            )
        return self._path

    def __str__(self) -> str:
        """The path in the task, for commands of a shell for instance; elsewhere the URL."""
        return self.url if self._path is None else self._path

    def __repr__(self) -> str:
        return f"File({self.url!r}{'' if self._mode is None else f', {self._mode!r}'})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, File):
            return NotImplemented
        return (self.described(), self._path) == (other.described(), other._path)

    def __hash__(self) -> int:
        return hash((self.url, self.mode))

    def __reduce__(self) -> tuple[Any, ...]:
        found, returning = _here.found, _here.returning
        url = self.url
        if found is not None:
            if self._is_doubtful:
                _here.problems.append(
                    InvalidRequest(
                        f"{shown(url)} comes from a result, so another endpoint has named it. A call that reads it "
                        "gives it to its own endpoint.",
                        hint=f"If you want that, pass File({url!r}).",
                    )
                )
            url = _with_endpoint_id(url)
            found[url, self.mode, self.size_bytes, self.sha256] = None
        mode, path = self._mode, None if found is not None else self._path
        if _here.calling and isinstance(path, NodePath):
            path = None
        if returning is not None and path is not None:
            mode, path = None, path if returning == "path" else None
        restored = url, mode, self.size_bytes, self.sha256, path
        return _restored, (*restored, True) if self._is_doubtful else restored

    def __farcall_json__(self) -> Described:
        """The file as JSON has it (:mod:`farcall_common.payload.data`).

        :raises ValueError: if it has a path: a writer of JSON could make readers open any file.
        """
        url, mode, size_bytes, sha256, path = self.__reduce__()[1][:5]
        if path is not None:
            raise ValueError("a file with a path")
        return url, mode, size_bytes, sha256

    @classmethod
    def __farcall_load__(cls, written: Any, writers: Collection[str] | None = None) -> File:
        """The file that a JSON writer has written, who may be hostile.

        :param writers: the endpoints that may have written it; None: it is no result. A file of another endpoint is
            then none that a call may have: its writer could get what it cannot read itself.
        :raises ValueError: if it is none.
        """
        types = [type(each) for each in written] if type(written) is list else []
        if len(types) != 4 or types[0] is not str or types[2] not in (int, NoneType) or types[3] not in (str, NoneType):
            raise ValueError(f"no file: {written!r:.100}")
        url, mode, size_bytes, sha256 = written
        cls(url, mode, size_bytes=size_bytes, sha256=sha256)  # checks it
        source = source_of(url)
        is_doubtful = writers is not None and bool(source) and source not in writers
        return _restored(url, mode, size_bytes, sha256, None, is_doubtful)

    def described(self) -> Described:
        """Return URL, mode, size in bytes and SHA-256."""
        return self.url, self.mode, self.size_bytes, self.sha256

    def as_output(self) -> File:
        """This file, as one that the task writes if it has no mode of its own."""
        return File(self.url, "w") if self._mode is None else self


def _check_types(url: object, size_bytes: object, sha256: object) -> None:
    if not isinstance(url, str):
        path = f"file://{url}" if isinstance(url, PurePath) and url.is_absolute() else "file:///path"
        raise TypeError(f"url: expected str, got {type(url).__name__}. Write {path!r} for a file of the endpoint")
    if size_bytes is not None and type(size_bytes) is not int:
        raise TypeError(f"size_bytes: expected int, got {type(size_bytes).__name__}")
    if not isinstance(sha256, str | None):
        raise TypeError(f"sha256: expected str, got {type(sha256).__name__}")


def local_name(url: str) -> str:
    """The name of the local copy of a file: the last component of the URL's path, without what a directory entry cannot
    have."""
    path = urllib.parse.urlsplit(url).path if url.startswith("http") else url.partition("://")[2]
    name = urllib.parse.unquote(PurePosixPath(path).name, errors="replace")
    name = "".join([each if each.isprintable() and each != "/" else "_" for each in name])
    while len(name.encode(errors="replace")) > _MOST_NAME_BYTES:
        name = name[1:]  # the end has the suffix
    return "file" if name in ("", ".", "..") else name


def place_of(directory: str, url: str, mode: Mode) -> str:
    """The path of a file in the directory of a task's files. The URL alone decides it: a stage of a graph, and a call
    of a running task, need no list."""
    import hashlib  # here: it takes longer than all of this module, and only endpoints need it

    return f"{directory}/{mode}/{hashlib.sha256(url.encode(errors='replace')).hexdigest()[:32]}/{local_name(url)}"


def shown(url: str) -> str:
    """A URL for messages and logs: one line, not too long, without user, password and query, which may hold a
    signature."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    if scheme in ("http", "https"):
        path = path.partition("?")[0].partition("#")[0]
    text = f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
    text = "".join([each if each.isprintable() else "?" for each in text])
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


def local_path(url: str) -> Path:
    """The path that a ``file://`` URL names."""
    return Path("/", urllib.parse.unquote(url.removeprefix(LOCAL).partition("/")[2]))


def has_files(payload: bytes | memoryview) -> bool:
    """Whether a payload has a list of files."""
    return payload[:_PREFIX_BYTES] == PREFIX


def without_files(payload: bytes | memoryview) -> memoryview:
    """The call or graph in a payload, without the list in front of it, which is not read."""
    view = memoryview(payload)
    if not has_files(view):
        return view
    line = bytes(view[len(PREFIX) : len(PREFIX) + _MOST_LINE_BYTES]).partition(b"\n")[0]
    return view[len(PREFIX) + len(line) + 1 :]


# -- the submitter -----------------------------------------------------------------------------------------------------

_in_use = False


class _Here(threading.local):
    """State of this thread's serialization. While it writes: ``found`` collects the files, ``endpoint_id`` returns an
    endpoint's id by its name, ``target`` is the endpoint that will read, if known. ``problems`` collects errors about
    files, because a serializer would report them as defects of the argument. ``calling``: whether the values are
    arguments of a call, which may run on another node. ``returning``: the form of files in a task's return value.
    While it reads arguments: ``place`` returns the path of a file."""

    found: dict[Described, None] | None = None
    problems: list[FarcallError] = []  # noqa: RUF012 - replaced before it is written
    endpoint_id: Callable[[str], str] | None = None
    target: str = ""
    calling: bool = False
    place: Callable[[File], str] | None = None
    returning: Literal["path", "url"] | None = None


_here: Final = _Here()


def in_use() -> bool:
    """Whether this process has created files. If not, arguments need no search for files."""
    return _in_use


def use_files() -> None:
    """Record that this process has objects whose bytes travel as files when they are arguments."""
    global _in_use
    _in_use = True


@contextlib.contextmanager
def collecting(*, endpoint_id: Callable[[str], str] | None = None, target: str = "") -> Iterator[dict[Described, None]]:
    """The files that this thread writes meanwhile, in order, each once.

    :param endpoint_id: returns the id of an endpoint by its name: what is written of a file of an endpoint has the id.
    :param target: the endpoint that will read them, if it is known.
    :raises FarcallError: at the end, of ``endpoint_id``.
    :raises InvalidRequest: at the end, for a file of an endpoint that another one has named in a result.
    """
    found: dict[Described, None] = {}
    problems: list[FarcallError] = []
    former = _here.found, _here.endpoint_id, _here.target, _here.problems
    _here.found, _here.endpoint_id, _here.target, _here.problems = found, endpoint_id, target, problems
    try:
        yield found
    finally:
        _here.found, _here.endpoint_id, _here.target, _here.problems = former
    if problems:
        raise problems[0]


def note_read(url: str) -> None:
    """Add a file of an endpoint to those that this thread collects, unless that endpoint itself will read the value."""
    if _here.found is not None and source_of(url) != _here.target:
        _here.found[url, "r", None, None] = None


def path_of_copy(url: str) -> str:
    """The path of the copy of a file of an endpoint, for what this thread reads from arguments; empty elsewhere."""
    return str(_restored(url, "r", None, None, None)._path or "") if _here.place is not None else ""


def source_of(url: str) -> str:
    """The endpoint that a URL names, by its name or id; empty if it is not a file of an endpoint."""
    return url[len(ENDPOINT) :].partition("/")[0] if url.startswith(ENDPOINT) else ""


def source_path(url: str) -> str:
    """The absolute path that the URL of a file of an endpoint names there."""
    return "/" + urllib.parse.unquote(url[len(ENDPOINT) :].partition("/")[2])


def _with_endpoint_id(url: str) -> str:
    name = source_of(url)
    if not name or _here.endpoint_id is None:
        return url
    try:
        endpoint_id = _here.endpoint_id(urllib.parse.unquote(name))
    except FarcallError as error:
        _here.problems.append(error)
        return url
    return f"{ENDPOINT}{endpoint_id}{url[len(ENDPOINT) + len(name) :]}"


def with_outputs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments in which the files of ``out`` and ``outputs`` are written: a file, or a list, tuple or
    dictionary of files."""
    return {name: _as_output(value) if name in OUTPUTS else value for name, value in kwargs.items()}


def _as_output(value: Any) -> Any:
    if isinstance(value, File):
        return value.as_output()
    if type(value) in (list, tuple):
        return type(value)([_as_output(each) for each in value])
    if type(value) is dict:
        return {key: _as_output(each) for key, each in value.items()}
    return value


# -- the worker --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def placed(place: Callable[[File], str]) -> Iterator[None]:
    """Files that this thread reads meanwhile get the paths that ``place`` gives them, unless they have one."""
    former, _here.place = _here.place, place
    try:
        yield
    finally:
        _here.place = former


@contextlib.contextmanager
def calling() -> Iterator[None]:
    """Files that this thread writes meanwhile are arguments of a call by the running task, which may run on another
    node: there they get the path of the endpoint's copy."""
    former, _here.calling = _here.calling, True
    try:
        yield
    finally:
        _here.calling = former


@contextlib.contextmanager
def returning(*, paths: bool) -> Iterator[None]:
    """Files with a path that this thread writes meanwhile are results: their reader reads them.

    :param paths: whether it is a task of the same endpoint that finds them under their paths. For others they have none
        any more, and are files of storage.
    """
    former, _here.returning = _here.returning, "path" if paths else "url"
    try:
        yield
    finally:
        _here.returning = former


def _restored(
    url: str,
    mode: Mode | None,
    size_bytes: int | None,
    sha256: str | None,
    path: str | None,
    is_doubtful: bool = False,
) -> File:
    global _in_use
    _in_use = True
    file = File.__new__(File)
    file.url, file._mode, file.size_bytes, file.sha256, file._path = url, mode, size_bytes, sha256, path
    file._is_doubtful = is_doubtful
    if path is None and _here.place is not None:
        file._path = _here.place(file)
    return file
