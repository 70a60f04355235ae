"""Files of the running task: their paths, and what is checked before and after its function is called.

The agent has copied the files that are read, and stores those that are written once the task has ended: both are in the
directory of the task's files. Where nodes keep copies, those that are read are in a directory of the node. A
``file://`` URL is a path of the endpoint; what is written there goes to a draft beside it, which gets its name when the
function has returned.

Where submitters can only call certain functions, they name no such paths: the checks alone would tell them which files
there are, and make directories.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import stat
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from farcall_common.errors import ErrorRecord
from farcall_common.file_arguments import (
    LOCAL,
    File,
    NodePath,
    local_name,
    local_path,
    place_of,
    placed,
    returning,
    shown,
)
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.manager_worker import Order


class _Placed(NamedTuple):
    """A file of the task as its arguments name it: user code can change the object that it gets."""

    file: File
    url: str
    is_output: bool
    size_bytes: int | None
    sha256: str
    path: Path
    final: Path | None
    """Final path of an output of which ``path`` is the draft; else None."""

    @property
    def shown(self) -> str:
        """The file's URL for messages."""
        return shown(self.url)


class TaskFiles:
    """The files in the arguments of a task. Enter it before they are read; leave it when the task has ended.

    :param no_local: whether the arguments may name no file of this machine.
    """

    def __init__(self, order: Order, *, no_local: bool) -> None:
        self._directory = order.files_dir
        self._read_dir = order.read_dir
        self._no_local = no_local
        self._draft = order.task_id.replace("/", "-")  # of a stage it is TASK/STAGE
        self._attempt = order.attempt
        self._placed: list[_Placed] = []
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
            for each in self._placed:
                if each.final is not None:
                    with contextlib.suppress(OSError):
                        each.path.unlink()

    def arguments_read(self) -> None:
        """The arguments have been read; values of other calls are read next, whose files are where they are."""
        self._state.close()

    def check(self) -> ErrorRecord | None:
        """Why the function cannot be called; None if it can."""
        checked: set[Path] = set()
        for each in self._placed:
            if each.path not in checked:
                checked.add(each.path)
                if (record := self._problem(each)) is not None:
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
        written = [each for each in self._placed if each.is_output]
        for each in written:
            try:
                is_written = stat.S_ISREG(each.path.lstat().st_mode)
            except OSError:
                is_written = False
            if not is_written:
                return outcomes.file_not_written(each.shown, each.final or each.path)
        for draft, (url, final) in {each.path: (each.url, each.final) for each in written if each.final}.items():
            try:
                draft.replace(final)
            except OSError as error:
                return _denied(url, error)
        for each in written:
            each.file._path = str(each.final or each.path)
        return None

    def _place(self, file: File) -> str:
        url, is_output, is_of_node, final = str(file.url), file.mode == "w", False, None
        if not url.startswith(LOCAL):
            is_of_node = not is_output and bool(self._read_dir)
            path = Path(place_of(self._read_dir if is_of_node else self._directory, url, "w" if is_output else "r"))
        elif is_output:
            final = local_path(url)
            path = self._draft_of(final, url, self._attempt)
        else:
            path = local_path(url)
        size_bytes = None if file.size_bytes is None else int(file.size_bytes)
        self._placed.append(_Placed(file, url, is_output, size_bytes, str(file.sha256 or ""), path, final))
        return NodePath(path) if is_of_node else str(path)

    def _draft_of(self, final: Path, url: str, attempt: int) -> Path:
        """Its name ends as the file's: libraries look at the suffix."""
        return final.with_name(f".{self._draft}.{attempt}.{local_name(url)}")

    def _problem(self, placed: _Placed) -> ErrorRecord | None:
        if placed.url.startswith(LOCAL):
            if self._no_local:
                return outcomes.local_file_denied(placed.shown, "this endpoint runs certain functions only")
            return _problem_of_input(placed) if placed.final is None else self._problem_of_output(placed, placed.final)
        if placed.is_output and placed.path.parent.is_dir():
            with contextlib.suppress(OSError):  # what a former attempt has written is not this one's
                placed.path.unlink(missing_ok=True)
            return None
        if not placed.is_output and placed.path.is_file():
            return None
        reason = f"the agent has not put it at {placed.path} of node {platform.node()}"
        return outcomes.file_unsupported(placed.shown, reason)

    def _problem_of_output(self, placed: _Placed, final: Path) -> ErrorRecord | None:
        if final.is_dir():
            return outcomes.local_file_denied(placed.shown, "it is a directory")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            for attempt in range(self._attempt):  # what a former attempt could not remove when it was killed
                self._draft_of(final, placed.url, attempt).unlink(missing_ok=True)
            placed.path.unlink(missing_ok=True)
            placed.path.touch(exist_ok=False)
            placed.path.unlink()
        except OSError as error:
            return _denied(placed.url, error)
        return None


def _problem_of_input(placed: _Placed) -> ErrorRecord | None:
    try:
        found = placed.path.stat()
        if not stat.S_ISREG(found.st_mode):
            return outcomes.file_unsupported(placed.shown, "it is no regular file")
        with placed.path.open("rb") as opened:
            if placed.size_bytes not in (None, found.st_size):
                return outcomes.file_size(placed.shown, found.st_size, placed.size_bytes)
            if placed.sha256 and (digest := hashlib.file_digest(opened, "sha256").hexdigest()) != placed.sha256:
                return outcomes.file_checksum(placed.shown, placed.sha256, digest)
    except (FileNotFoundError, NotADirectoryError):
        return outcomes.file_not_found(placed.shown)
    except OSError as error:
        return _denied(placed.url, error)
    return None


def _denied(url: str, error: OSError) -> ErrorRecord:
    place = f": {error.filename}" if error.filename else ""
    return outcomes.local_file_denied(shown(url), f"{error.strerror or error}{place}")
