"""Event log: the last events of a core with their times, for bug reports. The same events replay in a new core.

A log is written without user bytes: of arguments and results it has the lengths. It is bounded by the number of turns
and by the size of their events: tasks that they name, or bytes that they hold.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from farcall_common.plain_text import escaped

E = TypeVar("E")
InstantT = TypeVar("InstantT")
V = TypeVar("V")

Body = bytes | memoryview

_MAX_TURNS: Final = 1000
_MAX_TASKS: Final = 5000
_MASK_CHARACTERS: Final = 16


def without_texts(value: V) -> V:
    """A JSON value with asterisks for its texts; the names of an object's members stay."""
    masked: Any = value
    match value:
        case str():
            masked = "*" * min(len(value), _MASK_CHARACTERS)
        case list():
            masked = [without_texts(item) for item in value]
        case dict():
            masked = {name: without_texts(item) for name, item in value.items()}
    return cast("V", masked)


class UserBytes:
    """Arguments, results or functions of an event, in order; None for one that has to be fetched first."""

    __slots__ = ("_bodies", "_sizes")

    def __init__(self, bodies: Sequence[Body | None] = (), *, sizes: Sequence[int | None] | None = None) -> None:
        self._bodies = bodies
        self._sizes = sizes

    @property
    def bodies(self) -> Sequence[Body | None]:
        """The bytes; zeros of the same lengths if they come from a log."""
        return self._bodies if self._sizes is None else [None if size is None else bytes(size) for size in self._sizes]

    @property
    def sizes(self) -> Sequence[int | None]:
        """The lengths."""
        if self._sizes is not None:
            return self._sizes
        return [None if body is None else len(body) for body in self._bodies]

    def without_bytes(self) -> UserBytes:
        """The lengths alone."""
        return UserBytes(sizes=self.sizes)


class EventLog(Generic[E, InstantT]):
    """The events of one core and the instants of its turns, oldest turns dropped first.

    :param for_log: returns what is kept of an event, and its size.
    :param about: for the reader of the JSON, such as the seed of the core's random numbers.
    :param max_turns, max_size: most turns, and most of their events' sizes together.
    :param min_turns: so many turns stay, whatever their size.
    """

    def __init__(
        self,
        for_log: Callable[[E], tuple[E, int]],
        *,
        about: Mapping[str, object] | None = None,
        max_turns: int = _MAX_TURNS,
        max_size: int = _MAX_TASKS,
        min_turns: int = 1,
    ) -> None:
        self._for_log = for_log
        self._about = about or {}
        self._max_turns = max_turns
        self._max_size = max_size
        self._min_turns = min_turns
        self._turns: collections.deque[tuple[InstantT, list[E], int]] = collections.deque()
        self._size = 0
        #: Turns that were dropped. A replay gives the same actions only if there are none.
        self.dropped_turns = 0
        #: Whether a turn was added since the log was written; its writer resets this.
        self.has_grown = True

    def __iter__(self) -> Iterator[tuple[InstantT, list[E]]]:
        """Instant and events of each turn, oldest first."""
        return ((now, events) for now, events, _ in self._turns)

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, events: Iterable[E], now: InstantT, *, size: int = 0) -> None:
        """Add a turn. ``size`` is that of what its events hold together."""
        kept: list[E] = []
        for event in events:
            logged, event_size = self._for_log(event)
            kept.append(logged)
            size += event_size
        self._turns.append((now, kept, size))
        self.has_grown = True
        self._size += size
        while len(self._turns) > self._max_turns or (
            self._size > self._max_size and len(self._turns) > self._min_turns
        ):
            self._size -= self._turns.popleft()[2]
            self.dropped_turns += 1

    def to_json(self) -> bytes:
        """One line of JSON about the log itself, then one for each turn. Control characters in texts are escaped."""
        head = {**self._about, "dropped_turns": self.dropped_turns}
        turns = [{"at": now, "events": [[type(e).__name__, e] for e in events]} for now, events in self]
        lines = (msgspec.json.encode(line, enc_hook=_encode_other) for line in (head, *turns))
        return b"".join(escaped(line.decode()).encode() + b"\n" for line in lines)


def read_events(data: bytes, kinds: Mapping[str, type[E]]) -> Iterator[tuple[float, list[E]]]:
    """Time and events of each turn of a log's JSON.

    :param kinds: the classes of events by name.
    :raises msgspec.MsgspecError: if it is not a log, or not one of this version.
    """
    for line in data.splitlines()[1:]:
        turn = msgspec.json.decode(line)
        events = [msgspec.convert(fields, kinds[name], dec_hook=_decode_other) for name, fields in turn["events"]]
        yield turn["at"], events


def _encode_other(value: object) -> object:
    if isinstance(value, UserBytes):
        return value.sizes
    raise NotImplementedError(f"no rule for {type(value).__name__}")


def _decode_other(kind: type, value: Any) -> object:
    if kind is UserBytes:
        return UserBytes(sizes=value)
    raise NotImplementedError(f"no rule for {kind.__name__}")
