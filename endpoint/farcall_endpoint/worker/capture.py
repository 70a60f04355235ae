"""Output capture: standard output and error of a task, also of C code and of child programs.

A worker's descriptors 1 and 2 are two files that its launcher opened for appending. After each task their tails are
read and they are truncated, so output takes disk space only while its task runs. The launcher keeps the files open,
too, and reads the last output of a worker that died.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Final

from farcall_common.limits import OUTPUT_TAIL_BYTES
from farcall_endpoint.contracts.output import MAX_STREAM_BYTES, NOTHING, Printed, Stream

_MARKS: Final = (0x0FA6CA11_0001, 0x0FA6CA11_0002)
"""Positions far behind the ends of the two files. Writing appends, and moves the position; so an unchanged position
means that the file is the right one and that nothing was written."""


def read_tail(descriptor: int) -> str:
    """The last OUTPUT_TAIL_BYTES of a capture file as text."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, OUTPUT_TAIL_BYTES, max(0, size - OUTPUT_TAIL_BYTES))
    return tail.decode(errors="replace").replace("\0", "\ufffd")


def read_end(descriptor: int, most_bytes: int) -> Stream:
    """The last bytes of a capture file, and where they begin; none if its task has made it longer than offsets go."""
    size = os.fstat(descriptor).st_size
    if size > MAX_STREAM_BYTES:
        return NOTHING
    start = max(0, size - most_bytes)
    return Stream(start, os.pread(descriptor, size - start, start))


def read_from(descriptor: int, offset: int, most_bytes: int) -> Stream:
    """Bytes of a capture file from an offset on, a negative one before its end; none if its task has made it longer
    than offsets go."""
    size = os.fstat(descriptor).st_size
    if size > MAX_STREAM_BYTES:
        return NOTHING
    start = max(0, size + offset) if offset < 0 else offset
    return Stream(start, os.pread(descriptor, most_bytes, start))


class Capture:
    """The worker's side. Call :meth:`tails` (if wanted) and :meth:`reset` after each task."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            # To a file, Python would hold lines back: they would come behind what a child wrote after them, and be lost
            # with a worker that dies.
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        self._streams = [sys.stdout, sys.stderr]
        self._copies = [_copy(number) for number in (1, 2)]  # user code may close 1 and 2
        self._inodes = [os.fstat(copy).st_ino for copy in self._copies]

    def tails(self) -> tuple[str, str]:
        """The tails of standard output and error since the last reset."""
        self._flush()
        stdout, stderr = (read_tail(copy) for copy in self._copies)
        return stdout, stderr

    def written_bytes(self) -> int:
        """The size of the larger of the two since the last reset."""
        if self._untouched():
            return 0
        self._flush()
        return max(os.fstat(copy).st_size for copy in self._copies)

    def reset(self, *, keep_bytes: int = 0) -> tuple[Printed, bytes] | None:
        """Discard the output, and restore the streams if the task replaced or closed them. Returns the last
        ``keep_bytes`` of each stream, unless nothing was written or none are wanted."""
        if self._untouched():
            return None
        self._flush()
        ended = self._ends(keep_bytes) if keep_bytes else None
        for index, (copy, inode) in enumerate(zip(self._copies, self._inodes, strict=True)):
            number = index + 1
            state = _state(number)
            if state is None or state.st_ino != inode:
                os.dup2(copy, number)
                state = os.fstat(copy)
            if self._streams[index].closed:
                self._streams[index] = os.fdopen(number, "w", buffering=1, closefd=False)
            if state.st_size:
                os.ftruncate(copy, 0)
            os.lseek(copy, _MARKS[index], os.SEEK_SET)
        sys.stdout, sys.stderr = self._streams
        return ended

    def _ends(self, keep_bytes: int) -> tuple[Printed, bytes] | None:
        stdout, stderr = (read_end(copy, keep_bytes) for copy in self._copies)
        if not (stdout.end or stderr.end):
            return None
        return Printed(len(stdout.data), len(stderr.data), stdout.end, stderr.end), stdout.data + stderr.data

    def _untouched(self) -> bool:
        """Whether a task wrote nothing and changed nothing: the fast path."""
        out, err = self._streams
        if sys.stdout is not out or sys.stderr is not err:
            return False
        try:
            out.flush()
            err.flush()
            return os.lseek(1, 0, os.SEEK_CUR) == _MARKS[0] and os.lseek(2, 0, os.SEEK_CUR) == _MARKS[1]
        except (OSError, ValueError):  # closed, or something else by now
            return False

    def _flush(self) -> None:
        streams = [sys.stdout, sys.stderr]
        for stream in streams if streams == self._streams else (*streams, *self._streams):
            with contextlib.suppress(Exception):  # a stream of the task's own may be closed, None, or worse
                stream.flush()


def _copy(number: int) -> int:
    copy = os.dup(number)
    os.set_inheritable(copy, False)
    return copy


def _state(number: int) -> os.stat_result | None:
    try:
        return os.fstat(number)
    except OSError:
        return None
