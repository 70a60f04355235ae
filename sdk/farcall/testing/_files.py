"""Files of tasks in the fake cloud: copies in a temporary directory while a task runs."""

from __future__ import annotations

import functools
import hashlib
import shutil
import tempfile
import urllib.parse
import uuid
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any

from farcall._arguments import as_uuid
from farcall_common.coroutines import completed
from farcall_common.errors import ErrorRecord, Fault
from farcall_common.file_arguments import (
    ENDPOINT,
    LOCAL,
    File,
    Mode,
    local_path,
    place_of,
    placed,
    returning,
    shown,
    source_of,
    source_path,
)
from farcall_common.staging import StagedFile


class FileProblem(Exception):
    """A file of a task is missing, or is not as it should be."""

    def __init__(self, code: str, message: str, hint: str = "", *, fault: Fault = Fault.CALLER) -> None:
        super().__init__(message)
        self.record = ErrorRecord(code, message, hint, fault)


def source_names(urls: Iterable[str]) -> list[str]:
    """The names of endpoints in ``endpoint://`` URLs, each once; not their ids."""
    names = dict.fromkeys(urllib.parse.unquote(source_of(url)) for url in urls)
    return [name for name in names if name and as_uuid(name) is None]


def source_id(name: str) -> str:
    """The id of the endpoint of this name, or id, with files in a fake cloud: the same each time."""
    return as_uuid(name) or str(uuid.uuid5(uuid.NAMESPACE_URL, f"endpoint:{name}"))


class TaskFiles:
    """The files of a task. Enter it before its arguments are read.

    :param stored: all files of storage by URL; what the task writes is added. A ``file://`` URL that is not among them
        is a path of this machine.
    """

    def __init__(self, stored: MutableMapping[str, bytes]) -> None:
        self._stored = stored
        #: What the endpoint of a real deployment would have copied; of files of this machine nothing is.
        self.copied: list[StagedFile] = []
        self._written: dict[str, File] = {}
        self._waiting: list[File] = []
        self._problem: FileProblem | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._placed = placed(self._place)

    def __enter__(self) -> TaskFiles:
        self._placed.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._placed.__exit__(kind, error, traceback)
        if self._directory is not None:
            self._directory.cleanup()

    def checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is called when its files are there, and that must have written its others, as on an
        endpoint."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._problem is not None:
                raise self._problem
            value = completed(function(*args, **kwargs))
            for file in self._waiting:
                if file.path.is_symlink() or not file.path.is_file():
                    message = f"The function returned, but has not written the file for {file.url}: {file.path}."
                    hint = "Open the File that the function gets: open(file, 'w')."
                    raise FileProblem("FILE_NOT_WRITTEN", message, hint, fault=Fault.USER_CODE)
                file._mode = None  # for those that get it from here on, it is one to read
            self._waiting.clear()
            return value

        return call

    def serialized(self, serialize: Callable[[], bytes]) -> bytes:
        """A result, and the files are stored."""
        with returning(paths=False):
            result = serialize()
        for url, file in self._written.items():
            if url.startswith(LOCAL):
                local_path(url).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(file.path, local_path(url))
            else:
                self._stored[url] = file.path.read_bytes()
                self._note(file, "w")
        return result

    def _place(self, file: File) -> str:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="farcall-files-")
        path = Path(place_of(self._directory.name, file.url, file.mode))
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.mode == "w":
            self._written[file.url] = file
            self._waiting.append(file)
            return str(path)
        stored = self._stored_url(file.url)
        if stored in self._stored:
            path.write_bytes(self._stored[stored])
        elif file.url.startswith(LOCAL):
            path = local_path(file.url)
        self._problem = self._problem or _problem(file, path)
        file._path = str(path)
        if self._problem is None and stored in self._stored:
            self._note(file, "r")
        return str(path)

    def _stored_url(self, url: str) -> str:
        """The URL in ``stored`` of a file: that of an endpoint has the id here, and may have the name there."""
        if url in self._stored or not url.startswith(ENDPOINT):
            return url
        return self._of_endpoints.get(_at_endpoint(url), url)

    @functools.cached_property
    def _of_endpoints(self) -> Mapping[tuple[str, str], str]:
        return {_at_endpoint(url): url for url in tuple(self._stored) if url.startswith(ENDPOINT)}

    def _note(self, file: File, mode: Mode) -> None:
        content = file.path.read_bytes()
        self.copied.append(StagedFile(shown(file.url), mode, len(content), hashlib.sha256(content).hexdigest()))


def _at_endpoint(url: str) -> tuple[str, str]:
    """The id of the endpoint that has a file, and its path there."""
    return source_id(urllib.parse.unquote(source_of(url))), source_path(url)


def _problem(file: File, path: Path) -> FileProblem | None:
    if not path.is_file():
        return FileProblem(
            "FILE_NOT_FOUND",
            f"The file {file.url} does not exist.",
            "Check the URL, or add it to FakeCloud(files=...). "
            "One that the task writes is passed as out=File(...), or is File(url, 'w').",
        )
    content = path.read_bytes()
    if file.size_bytes not in (None, len(content)):
        message = f"The file {file.url} has {len(content):,} bytes, and the task expects {file.size_bytes:,}."
        return FileProblem("FILE_CHANGED", message, "Submit the task with the size that the file has.")
    if file.sha256 not in (None, found := hashlib.sha256(content).hexdigest()):
        message = f"The file {file.url} has the SHA-256 {found}, not {file.sha256}."
        return FileProblem("FILE_CHECKSUM", message, "Check which one is right.")
    return None
