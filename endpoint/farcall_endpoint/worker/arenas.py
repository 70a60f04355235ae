"""Arenas: memory for large values that one worker writes and others read, and that is used again.

A new memory file costs a page fault for every page that is written, and another for every page that is read; that takes
longer than the copy itself. So a worker keeps the memory files of its values, and writes the next value into one that
all readers have returned. A reader maps an arena once, and makes the value on it without a copy.

Returns cost no message: reader and writer share a page, the *ledger*, in which the reader counts for each arena how
many values in it are gone. The reader returns a value when no object refers to its memory any more. What cannot be
known is not assumed: an arena is never used again if its reader died or forked while it had a value of it.

Readers may change what they get, as with every other value: their mapping is private. Pages that a reader has written
are copies of its own, which are dropped before the arena is returned.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import functools
import itertools
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from farcall_endpoint.host.shared_memory import Body, Frame, FrameList, LentFile, MemoryFile, SharedBytes

Piece = bytes | memoryview

LEAD_BYTES: Final = mmap.PAGESIZE
"""Free bytes before a buffer that a function writes, for the parts of the value outside the buffer."""
SLOTS: Final = 128
"""Places in a ledger: the maximum number of reusable arenas of a worker. Each takes two descriptors in each reader."""
_SMALLEST_SHIFT: Final = 16
_WORD: Final = 8
LEDGER_BYTES: Final = 2 * SLOTS * _WORD
_COUNT_BITS: Final = 32
_KEPT: Final = 2**_COUNT_BITS - 1
"""Value in place of a count: the reader cannot know when the value is gone."""
_CHECKED: Final = 8
"""Maximum number of lent arenas that are checked for their return before a new arena is made."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Location of a value, for a reader. ``arena``: number of the arena, unique for its writer. ``slot``: the arena's
    place in the ledger; -1 if the arena is not reused."""

    arena: int
    slot: int
    start: int
    size: int


class Ledger:
    """A page that both ends of a connection map. Each writes one half, as a reader, and reads the other.

    :param memory: the file that :func:`new_ledger` made.
    :param first: whether this is the first end of the connection.
    :raises ValueError: if the file can shrink, or has another size.
    """

    def __init__(self, memory: MemoryFile, *, first: bool) -> None:
        if not memory.is_sealed or os.fstat(memory.descriptor).st_size != LEDGER_BYTES:
            raise ValueError(f"not a ledger: expected a sealed file of {LEDGER_BYTES} bytes")
        words = memoryview(mmap.mmap(memory.descriptor, LEDGER_BYTES)).cast("Q")
        own, other = (words[:SLOTS], words[SLOTS:]) if first else (words[SLOTS:], words[:SLOTS])
        self.own = own
        self.other = other


def new_ledger() -> MemoryFile:
    """Make the file of a ledger."""
    return MemoryFile.of([bytes(LEDGER_BYTES)])


class Arena:
    """A memory file that this process writes."""

    def __init__(self, number: int, slot: int, shift: int) -> None:
        self.number = number
        self.slot = slot
        self.shift = shift
        self.size = LEAD_BYTES + (1 << shift)
        self.memory = MemoryFile(os.memfd_create("farcall-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(self.memory.descriptor, self.size)
        fcntl.fcntl(self.memory.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self.map = mmap.mmap(self.memory.descriptor, self.size)
        self.view = memoryview(self.map)
        self.address = _address(self.view)
        self.holder: weakref.ref[Any] | None = None
        self.exposed = 0  # bytes that the function was given
        self.loans: dict[Ledger, int] = {}  # since it was made
        self.is_lent = False
        self.is_reusable = slot >= 0

    @property
    def is_held(self) -> bool:
        """Whether an object of this process refers to the buffer that the function got."""
        return self.holder is not None and self.holder() is not None

    def expose(self, size: int) -> memoryview:
        """Return the buffer for a function. The buffer lives until no object refers to it."""
        holder = _array_type(self.size).from_buffer(self.map)
        self.holder = weakref.ref(holder)
        self.exposed = size
        return memoryview(holder).cast("B")[LEAD_BYTES : LEAD_BYTES + size]

    def is_back(self) -> bool:
        """Whether all readers have returned the arena, or one never will (then :attr:`is_reusable` becomes false)."""
        for ledger, count in self.loans.items():
            number, returned = divmod(ledger.other[self.slot], 1 << _COUNT_BITS)
            if number != self.number or returned != count:
                if number == self.number and returned == _KEPT:
                    self.is_reusable = False
                    return True
                return False
        return True


class Placed:
    """A value in an arena."""

    __slots__ = ("arena", "in_place", "size", "start")

    def __init__(self, arena: Arena, start: int, size: int, *, in_place: bool = False) -> None:
        self.arena = arena
        self.start = start
        self.size = size
        self.in_place = in_place

    @property
    def place(self) -> Place:
        """Location of the value, for the message to a reader."""
        return Place(self.arena.number, self.arena.slot, self.start, self.size)

    def copy(self) -> memoryview:
        """Return the value's bytes, in memory that the next call of this worker may change."""
        return memoryview(bytearray(self.arena.view[self.start : self.start + self.size]))


class Arenas:
    """The arenas of a worker. During a task: :meth:`buffer`, :meth:`place`, :meth:`settle`, :meth:`lend`; then
    :meth:`end_task`. Owned by one thread.

    :param idle_bytes: limit of the memory in arenas that hold no value.
    """

    def __init__(self, *, idle_bytes: int = 256 * 2**20) -> None:
        self._idle_limit_bytes = idle_bytes
        self._numbers = itertools.count()
        self._slots = list(range(SLOTS))[::-1]
        self._taken: list[Arena] = []  # by the running task
        self._held: list[Arena] = []  # by objects that tasks have left behind
        self._lent: collections.deque[Arena] = collections.deque()
        self._idle: dict[Arena, None] = {}
        self._idle_bytes = 0
        _WRITERS.add(self)

    # -- a task --------------------------------------------------------------------------------------------------------

    def buffer(self, size: int) -> memoryview:
        """Memory for a value, of ``size`` bytes. A returned object that contains it whole travels without a copy. Its
        bytes are arbitrary at first."""
        return self._take(size).expose(size)

    def place(self, pieces: Sequence[Piece]) -> Placed:
        """A value in an arena. If a piece is the beginning of a :meth:`buffer`, that is not copied: drop the value and
        its pieces then, and call :meth:`settle`."""
        if any(arena.holder is not None for arena in self._taken) and (found := self._in_place(pieces)) is not None:
            return found
        size = sum(map(len, pieces))
        arena = self._take(size)
        _write(arena, LEAD_BYTES, pieces)
        return Placed(arena, LEAD_BYTES, size)

    def settle(self, placed: Placed) -> Placed:
        """The value, in an arena that no object of the task can change: a copy if one still refers to the buffer."""
        if not placed.in_place or not placed.arena.is_held:
            return placed
        return self.place([placed.arena.view[placed.start : placed.start + placed.size]])

    def lend(self, placed: Placed, ledger: Ledger) -> None:
        """A value goes to a reader: after the message was sent."""
        arena = placed.arena
        if arena.slot < 0:  # the reader cannot say when the value is gone: the memory is its own from now on
            arena.is_reusable = False
            return
        arena.is_lent = True
        arena.loans[ledger] = arena.loans.get(ledger, 0) + 1

    def end_task(self) -> None:
        """The task has ended: what it took and did not lend is free, unless it has left objects that refer to it."""
        if not (self._taken or self._held):
            return
        taken, self._taken, self._held = self._taken + self._held, [], []
        for arena in taken:
            if arena.is_held:
                self._held.append(arena)
            elif arena.is_lent:
                self._lent.append(arena)
            else:
                self._release(arena)

    def lost(self, ledger: Ledger) -> None:
        """A reader is gone. What it had may still be used, by a child of it."""
        for arena in (*self._taken, *self._held, *self._lent):
            if arena.loans.pop(ledger, 0):
                arena.is_reusable = False
        for arena in self._idle:
            arena.loans.pop(ledger, 0)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> Arena:
        shift = max(_SMALLEST_SHIFT, (size - 1).bit_length())
        arena = self._idle_one(shift)
        if arena is None:
            self._reclaim()
            arena = self._idle_one(shift)
        if arena is None:
            arena = Arena(next(self._numbers), self._slots.pop() if self._slots else -1, shift)
        self._taken.append(arena)
        return arena

    def _idle_one(self, shift: int) -> Arena | None:
        found = next((arena for arena in reversed(self._idle) if arena.shift == shift), None)  # the one used last
        if found is not None:
            del self._idle[found]
            self._idle_bytes -= found.size
        return found

    def _reclaim(self) -> None:
        """Find arenas that readers have returned: those that were lent first."""
        for _ in range(min(_CHECKED, len(self._lent))):
            arena = self._lent.popleft()
            if arena.is_back():
                self._release(arena)
            else:
                self._lent.append(arena)

    def _release(self, arena: Arena) -> None:
        arena.is_lent = False
        arena.holder = None
        if not arena.is_reusable:
            self._close(arena)
            return
        self._idle[arena] = None
        self._idle_bytes += arena.size
        while self._idle_bytes > self._idle_limit_bytes:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self._idle_bytes -= oldest.size
            oldest.map.madvise(mmap.MADV_REMOVE)  # readers may map it for longer, but take no memory with that
            self._close(oldest)

    def _close(self, arena: Arena) -> None:
        if arena.slot >= 0:
            self._slots.append(arena.slot)
        arena.view.release()
        arena.map.close()

    def before_fork(self) -> None:
        """The child may write to buffers that it inherits."""
        for arena in (*self._taken, *self._held):
            if arena.is_held:
                arena.is_reusable = False

    def forget(self) -> None:
        """In a child process: the arenas are its parent's."""
        for arenas in (self._taken, self._held, self._lent, self._idle):
            arenas.clear()
        self._slots.clear()
        self._idle_bytes = self._idle_limit_bytes = 0

    def _in_place(self, pieces: Sequence[Piece]) -> Placed | None:
        """Complete a value around the piece that a function has written in place, if there is one."""
        beginnings = {arena.address + LEAD_BYTES: arena for arena in self._taken if arena.is_held}
        for index, piece in enumerate(pieces):
            if not isinstance(piece, memoryview) or piece.readonly or not piece:
                continue
            arena = beginnings.get(_address(piece))
            if arena is None:
                continue
            before, after = (sum(map(len, part)) for part in (pieces[:index], pieces[index + 1 :]))
            end = LEAD_BYTES + len(piece)
            is_whole = len(piece) == arena.exposed  # else the task may still need the bytes behind it
            if before <= LEAD_BYTES and (not after or (is_whole and end + after <= arena.size)):
                _write(arena, LEAD_BYTES - before, pieces[:index])
                _write(arena, end, pieces[index + 1 :])
                return Placed(arena, LEAD_BYTES - before, before + len(piece) + after, in_place=True)
        return None


def _write(arena: Arena, at: int, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        arena.view[at : at + len(piece)] = piece
        at += len(piece)


class Returns:
    """The arenas of a worker that its manager has, which passes them on and does not read them. Owned by one thread."""

    def __init__(self, ledger: MemoryFile) -> None:
        self._counts = Ledger(ledger, first=True).own
        self._known: dict[int, tuple[int, int]] = {}  # by slot: the arena, and how many values in it are gone

    def body(self, body: Body, number: int, slot: int) -> Body:
        """The body of a packet that is in an arena: when it is gone, the arena is returned.

        :raises ValueError: if there is no such slot.
        """
        if not 0 <= slot < SLOTS:
            raise ValueError(f"slot {slot} of a ledger")
        frames = body.frames if isinstance(body, FrameList) else [body]
        memories = {id(frame.memory): frame.memory for frame in frames if isinstance(frame, SharedBytes)}
        if len(memories) != 1:  # forged: then only its own arena is not returned
            return body
        [memory] = memories.values()
        try:
            descriptor = os.dup(memory.descriptor)
        except OSError:  # no room for more open files: it is not returned, either
            return body
        if self._known.get(slot, (-1, 0))[0] != number:
            self._known[slot] = (number, 0)
        lent = LentFile(descriptor, functools.partial(self._returned, number, slot))
        own: list[Frame] = [
            SharedBytes(lent, frame.start, frame.size) if isinstance(frame, SharedBytes) else frame for frame in frames
        ]
        return FrameList(own) if isinstance(body, FrameList) else own[0]

    def _returned(self, number: int, slot: int, is_shared: bool) -> None:
        known, count = self._known[slot]
        if known != number or count == _KEPT:
            return
        count = _KEPT if is_shared else count + 1
        self._known[slot] = (number, count)
        self._counts[slot] = number << _COUNT_BITS | count


# -- the reader's side -------------------------------------------------------------------------------------------------


class _Mapped:
    """An arena of another process, in this one."""

    __slots__ = ("address", "count", "is_busy", "is_kept", "map", "memory", "number", "size", "slot")

    def __init__(self, number: int, slot: int, memory: MemoryFile, size: int) -> None:
        self.number = number
        self.slot = slot
        self.memory = memory
        self.size = size
        self.map = mmap.mmap(memory.descriptor, size, flags=mmap.MAP_PRIVATE)
        self.address = _address(self.map)
        self.count = 0  # values that are gone
        self.is_busy = False
        self.is_kept = False  # a fork may refer to it: not returned


class _Loan(weakref.ref[Any]):
    """A borrowed value: a weak reference to the object that all its views refer to."""

    __slots__ = ("is_shared", "mapped")

    mapped: _Mapped
    is_shared: bool


class Borrowed:
    """The values that this process reads in the arenas of another process. Owned by one thread."""

    def __init__(self, counts: memoryview) -> None:
        self._counts = counts
        self._mapped: dict[int, _Mapped] = {}  # by slot
        self._loans: dict[int, _Loan] = {}  # by their id: references to such objects cannot be hashed
        _READERS.add(self)

    def view(self, place: Place, memory: MemoryFile | None) -> memoryview:
        """Return the bytes of a value. They go back to the writer when no object refers to them any more.

        :param memory: the arena's file; required for the first value in an arena.
        :raises ValueError: if the place does not exist.
        """
        mapped = self._mapped.get(place.slot)
        if mapped is None or mapped.number != place.arena:
            if memory is None or not memory.is_sealed:
                raise ValueError("a value in an arena that was not sent, or can shrink")
            mapped = _Mapped(place.arena, place.slot, memory, os.fstat(memory.descriptor).st_size)
            if 0 <= place.slot < SLOTS:
                self._mapped[place.slot] = mapped
        if not 0 <= place.start <= place.start + place.size <= mapped.size:
            raise ValueError("a value beyond the end of its arena")
        is_shared = not mapped.is_busy
        if is_shared:
            mapped.is_busy = True
            source = mapped.map
        else:  # the same value for another call: what that one changes must not be seen by this one
            source = mmap.mmap(mapped.memory.descriptor, mapped.size, flags=mmap.MAP_PRIVATE)
        holder = _array_type(mapped.size).from_buffer(source)
        loan = _Loan(holder, self._gone)
        loan.mapped, loan.is_shared = mapped, is_shared
        self._loans[id(loan)] = loan
        return memoryview(holder).cast("B")[place.start : place.start + place.size]

    def keep(self) -> None:
        """Before a fork: the child will refer to the values that are here. So they are never returned."""
        for loan in list(self._loans.values()):  # another thread may drop one
            mapped = loan.mapped
            mapped.is_kept = True
            if self._mapped.get(mapped.slot) is mapped:
                self._counts[mapped.slot] = mapped.number << _COUNT_BITS | _KEPT

    def _gone(self, loan: _Loan) -> None:
        del self._loans[id(loan)]
        mapped = loan.mapped
        if mapped.is_kept or self._mapped.get(mapped.slot) is not mapped:
            return
        if loan.is_shared:
            _drop_own_pages(mapped)
            mapped.is_busy = False
        mapped.count += 1
        self._counts[mapped.slot] = mapped.number << _COUNT_BITS | mapped.count


def _drop_own_pages(mapped: _Mapped) -> None:
    """Drop the pages that this process has changed. To drop all, and map them again for the next value, takes longer
    than to look."""
    if _has_own_pages(mapped.address, mapped.size):
        mapped.map.madvise(mmap.MADV_DONTNEED)


def _has_own_pages(address: int, size: int) -> bool:
    """Whether a page of a private mapping is not the file's, by ``/proc/self/pagemap``; True where that is not known.

    Bit 63 of a page's word: it is in memory; 62: in the swap; 61: it belongs to a file."""
    pages = size // mmap.PAGESIZE
    try:
        read = os.pread(_pagemap(), pages * _WORD, address // mmap.PAGESIZE * _WORD)
    except OSError:
        return True
    words = int.from_bytes(read, "little")
    return bool((words >> 63 | words >> 62) & ~(words >> 61) & _ones(pages)) or len(read) < pages * _WORD


@functools.lru_cache(maxsize=1)
def _opened_pagemap(pid: int) -> MemoryFile:  # noqa: ARG001 - of this process: a child has one of its own
    return MemoryFile(os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC))


def _pagemap() -> int:
    return _opened_pagemap(os.getpid()).descriptor


@functools.lru_cache(maxsize=64)
def _ones(count: int) -> int:
    """Return a mask with bit 0 of each of ``count`` words."""
    return int.from_bytes(b"\1\0\0\0\0\0\0\0" * count, "little")


@functools.lru_cache(maxsize=64)
def _array_type(size: int) -> Any:
    """A type whose objects are a range of memory, and can be referred to weakly."""
    return ctypes.c_char * size


def _address(buffer: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


# -- forks of tasks ----------------------------------------------------------------------------------------------------

_WRITERS: Final[weakref.WeakSet[Arenas]] = weakref.WeakSet()
_READERS: Final[weakref.WeakSet[Borrowed]] = weakref.WeakSet()


def _before_fork() -> None:
    for writer in _WRITERS:
        writer.before_fork()
    for reader in _READERS:
        reader.keep()


def _in_child() -> None:
    for writer in _WRITERS:
        writer.forget()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
