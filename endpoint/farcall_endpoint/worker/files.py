"""Files of the running task: their paths, and what is checked before and after its function is called.

The agent has copied the files that are read, and stores those that are written once the task has ended: both are in the
directory of the task's files. A ``file://`` URL is a path of the endpoint; what is written there goes to a draft beside
it, which gets its name when the function has returned.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
from pathlib import Path
from types import TracebackType

from farcall_common.errors import ErrorRecord
from farcall_common.file_arguments import LOCAL, File, local_path, place_of, placed, returning, shown
from farcall_endpoint import outcomes
from farcall_endpoint.worker.channel import Order


class TaskFiles:
    """The files in the arguments of a task. Enter it before they are read; leave it when the task has ended."""

    def __init__(self, order: Order) -> None:
        self._directory = order.files_dir
        self._draft = order.task_id.replace("/", "-")  # of a stage it is TASK/STAGE
        self._attempt = order.attempt
        self._files: list[File] = []
        self._drafts: dict[str, str] = {}
        """The final path of each draft."""
        self._state = contextlib.ExitStack()
        self._pid = os.getpid()

    def __enter__(self) -> TaskFiles:
        self._state.enter_context(placed(self._place))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._state.close()
        if os.getpid() == self._pid:  # else the task has forked, and this is its child
            for draft in self._drafts:
                with contextlib.suppress(OSError):
                    Path(draft).unlink()

    def check(self) -> ErrorRecord | None:
        """The arguments have been read: why the function cannot be called; None if it can."""
        self._state.close()
        checked: set[tuple[str, str]] = set()
        for file in self._files:
            if (file.url, file.mode) not in checked:
                checked.add((file.url, file.mode))
                if (record := self._problem(file)) is not None:
                    return record
        return None

    def end_call(self, *, paths: bool) -> None:
        """The function has raised or returned: files in what it gives are for others to read.

        :param paths: whether those are tasks of this endpoint.
        """
        self._state.enter_context(returning(paths=paths))

    def publish(self) -> ErrorRecord | None:
        """Give what the function has written its name; why that is impossible, None if it is done."""
        if os.getpid() != self._pid:
            return None
        written = [file for file in self._files if file.mode == "w"]
        for file in written:
            path = Path(file)
            try:
                is_written = stat.S_ISREG(path.lstat().st_mode)
            except OSError:
                is_written = False
            if not is_written:
                return outcomes.file_not_written(shown(file.url), self._drafts.get(str(path), path))
        for draft, final in self._drafts.items():
            try:
                Path(draft).replace(final)
            except OSError as error:
                return _denied(file_url(final), error)
        for file in written:
            file._path = self._drafts.get(str(file.path), file._path)
        self._drafts.clear()
        return None

    def _place(self, file: File) -> str:
        self._files.append(file)
        if not file.url.startswith(LOCAL):
            return place_of(self._directory, file.url, file.mode)
        path = local_path(file.url)
        if file.mode == "r":
            return str(path)
        draft = str(path.with_name(f".{file.name}.{self._draft}.{self._attempt}"))
        self._drafts[draft] = str(path)
        return draft

    def _problem(self, file: File) -> ErrorRecord | None:
        if file.url.startswith(LOCAL):
            return self._problem_of_output(file) if file.mode == "w" else _problem_of_input(file)
        path = file.path
        if path.parent.is_dir() if file.mode == "w" else path.is_file():
            return None
        reason = f"the agent has not put it at {path} of node {platform.node()}"
        return outcomes.file_unsupported(shown(file.url), reason)

    def _problem_of_output(self, file: File) -> ErrorRecord | None:
        draft, final = file.path, Path(self._drafts[str(file.path)])
        if final.is_dir():
            return outcomes.file_denied(shown(file.url), "it is a directory")
        try:
            draft.parent.mkdir(parents=True, exist_ok=True)
            for attempt in range(self._attempt):  # what a former attempt could not remove when it was killed
                draft.with_name(f".{file.name}.{self._draft}.{attempt}").unlink(missing_ok=True)
            draft.unlink(missing_ok=True)
            draft.touch(exist_ok=False)
            draft.unlink()
        except OSError as error:
            return _denied(file.url, error)
        return None


def file_url(path: str) -> str:
    """The URL of a path of the endpoint."""
    return f"{LOCAL}{path}"


def _problem_of_input(file: File) -> ErrorRecord | None:
    path, url = file.path, shown(file.url)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return outcomes.file_unsupported(url, "it is no regular file")
        with path.open("rb") as opened:
            if file.size_bytes not in (None, found.st_size):
                return outcomes.file_size(url, found.st_size, file.size_bytes)
            if file.sha256 and (digest := hashlib.file_digest(opened, "sha256").hexdigest()) != file.sha256:
                return outcomes.file_checksum(url, file.sha256, digest)
    except (FileNotFoundError, NotADirectoryError):
        return outcomes.file_not_found(url)
    except OSError as error:
        return _denied(file.url, error)
    return None


def _denied(url: str, error: OSError) -> ErrorRecord:
    place = f": {error.filename}" if error.filename else ""
    return outcomes.file_denied(shown(url), f"{error.strerror or error}{place}")
