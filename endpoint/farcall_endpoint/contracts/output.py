"""Output of tasks: the tails of what an attempt printed, on their way from worker to agent.

Offsets count the bytes of a stream from the start of an attempt.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec

from farcall_common.limits import MAX_KEPT_OUTPUT_BYTES
from farcall_endpoint.host.shared_memory import Body, Frame, cut, piece_of

_Tail = Annotated[int, msgspec.Meta(ge=0, le=MAX_KEPT_OUTPUT_BYTES)]
MAX_STREAM_BYTES: Final = 2**53
"""The largest offset. A file can be made longer than that, without data."""
_Offset = Annotated[int, msgspec.Meta(ge=0, le=MAX_STREAM_BYTES)]


class Printed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sizes of an attempt's output: the lengths of the tails of both streams, which are together in one body, and the
    total bytes of each stream."""

    stdout_tail: _Tail
    stderr_tail: _Tail
    stdout_end: _Offset
    stderr_end: _Offset

    @property
    def tail_bytes(self) -> int:
        """Total length of both tails."""
        return self.stdout_tail + self.stderr_tail

    def fits(self, body_bytes: int) -> bool:
        """Whether the tails can be at the end of a body, and in streams of these lengths."""
        is_within = self.stdout_tail <= self.stdout_end and self.stderr_tail <= self.stderr_end
        return is_within and self.tail_bytes <= body_bytes


class Stream(NamedTuple):
    """Bytes of a stream, from the offset ``start`` on."""

    start: int
    data: bytes

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.start + len(self.data)


NOTHING: Final = Stream(0, b"")


def split(body: Body, printed: Printed) -> tuple[Frame, bytes]:
    """The result and the tails in the body of a finished task.

    :raises ValueError: if one of them is not in one piece.
    """
    end = len(body) - printed.tail_bytes
    return cut(body, [end])[0], tails(body, printed)


def tails(body: Body, printed: Printed) -> bytes:
    """The tails in the body of a finished task.

    :raises ValueError: if they are not in one piece.
    """
    [frame] = cut(body, [printed.tail_bytes], len(body) - printed.tail_bytes)
    try:
        found = piece_of(frame, 0, len(frame))  # not mapped: the file may be one that can shrink
    except OSError as error:
        raise ValueError(f"tails that cannot be read: {error}") from error
    if len(found) != len(frame):
        raise ValueError("tails that are incomplete")
    return found
