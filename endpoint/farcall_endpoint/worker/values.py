"""Values for other calls: in binary, one buffer or one for each element, in memory or in a file on the node's disk."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from farcall_common.errors import ErrorRecord, SerializationError
from farcall_common.payload import Piece, Serializer, is_binary
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.manager_worker import INLINE_BYTES, MOST_ELEMENTS, CallOrder
from farcall_endpoint.host.shared_memory import ALIGNMENT_BYTES, Frame, MemoryFile, SharedBytes


class ValueRefused(Exception):
    """A value that cannot be given to other calls; the record says why."""

    def __init__(self, record: ErrorRecord) -> None:
        super().__init__(record.message)
        self.record = record


def elements_of(value: Any, function: Callable[..., Any]) -> list[Any]:
    """The elements of what a function returned. Runs code of the value.

    :raises TypeError: if it has none.
    :raises ValueError: if it has more than a graph may make calls.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        iterator = iter(value)
    except TypeError:
        kind = type(value).__name__
        article = "an" if kind[:1].lower() in "aeiou" else "a"
        returned = "None" if value is None else f"{article} {kind}"
        raise TypeError(f"{name} returned {returned}, which has no elements to call a function with") from None
    elements = list(itertools.islice(iterator, MOST_ELEMENTS + 1))
    if len(elements) > MOST_ELEMENTS:
        raise ValueError(
            f"{name} returned more than {MOST_ELEMENTS:,} elements, which is as many calls as a graph makes"
        )
    return elements


def write(
    value: Any, call: CallOrder, serializer: Serializer, directory: str
) -> tuple[Sequence[Frame], tuple[int, ...]]:
    """The body of a value, or of the elements in a list with ``spread``; and the sizes of its buffers.

    :param directory: for a file, if it is larger than its room in memory.
    :raises SerializationError: if it cannot be written.
    :raises ValueRefused: if it is too large.
    """
    return stored(_buffers_of(value, serializer) if call.spread else [serializer.edge_pieces(value)], call, directory)


def stored(
    buffers: Sequence[Sequence[Piece]], call: CallOrder, directory: str
) -> tuple[Sequence[Frame], tuple[int, ...]]:
    """The same for buffers in pieces."""
    sizes = tuple([len(pieces[0]) if len(pieces) == 1 else sum(map(len, pieces)) for pieces in buffers])
    total = sum(sizes)
    if total > call.most_bytes:
        raise ValueRefused(outcomes.value_too_large(total, call.most_bytes))
    if total <= call.room_bytes and (total <= INLINE_BYTES or not call.spread):
        return [piece for pieces in buffers for piece in pieces], sizes
    pieces, starts = _aligned(buffers, sizes)
    try:
        memory = MemoryFile.of(pieces) if total <= call.room_bytes else MemoryFile.on_disk(pieces, directory)
    except OSError as error:
        raise ValueRefused(outcomes.value_not_stored(total, error)) from error
    return [SharedBytes(memory, start, size) for start, size in zip(starts, sizes, strict=True) if size], sizes


def _buffers_of(elements: Sequence[Any], serializer: Serializer) -> list[Sequence[Piece]]:
    buffers: list[Sequence[Piece]] = []
    for number, element in enumerate(elements):
        try:
            pieces = serializer.edge_pieces(element)
        except SerializationError as error:
            raise SerializationError(f"Element {number}: {error.record.message}", hint=error.hint) from error
        if is_binary(pieces) and (gap := -sum(map(len, pieces)) % ALIGNMENT_BYTES):
            pieces = [*pieces, bytes(gap)]  # which its reader leaves out, so that those behind it are aligned
        buffers.append(pieces)
    return buffers


def _aligned(buffers: Sequence[Sequence[Piece]], sizes: Sequence[int]) -> tuple[list[Piece], list[int]]:
    """Buffers behind one another, binary ones aligned, and where each begins."""
    joined: list[Piece] = []
    starts: list[int] = []
    at = 0
    for pieces, size in zip(buffers, sizes, strict=True):
        if is_binary(pieces) and (gap := -at % ALIGNMENT_BYTES):
            joined.append(bytes(gap))
            at += gap
        starts.append(at)
        joined += pieces
        at += size
    return joined, starts
