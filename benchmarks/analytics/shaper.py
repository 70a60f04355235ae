"""Shaper: a storage with the limits of another one, so that experiments on one machine have the shape of a cloud.

All processes of a machine that name the same file share the limits of the storage; each process has its own bandwidth,
as a worker has. The address of such a storage is the name of this module and a file, which has the address of the real
storage and the shape.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from farcall_common.errors import StoreBusy
from farcall_common.objects.blocks import Blocks, Part, open_blocks, prefix_number, split_prefixes
from farcall_common.objects.pace import Pace, pace_of
from farcall_common.payload import Piece
from farcall_common.private import locked

_READ_BYTES, _WRITTEN_BYTES, _READS, _WRITES = range(4)
"""Limits. Behind the last one are reads and writes of the second prefix, and so on."""
_SCHEME: Final = f"{__name__}:"
_TIME: Final = struct.Struct("d")
_LEAST_SLOWED_S: Final = 0.001
_BURST_S: Final = 0.1
"""A storage that refuses requests takes as many at once as its rates allow in this time."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The limits of a storage. Rates are per second; infinite: no limit.

    :param reads, writes: requests of all workers together, for each prefix of the storage.
    :param read_bytes, written_bytes: of all workers together.
    :param worker_read_bytes, worker_written_bytes: of one worker.
    :param latency_s: median of what a request takes before its first byte; it has a log-normal distribution with
        ``latency_sigma``.
    :param slow_workers: the first so many that move rows, which have 1 / ``slow_factor`` of the bandwidth.
    :param refuses: whether requests beyond the rates are refused, as S3 does, instead of delayed.
    :param error_part: of requests, which fail at random as if they were refused. Half of the writes that fail have been
        done, as when an answer is lost.
    """

    reads: float = math.inf
    writes: float = math.inf
    read_bytes: float = math.inf
    written_bytes: float = math.inf
    worker_read_bytes: float = math.inf
    worker_written_bytes: float = math.inf
    latency_s: float = 0.0
    latency_sigma: float = 0.0
    slow_workers: int = 0
    slow_factor: float = 1.0
    refuses: bool = False
    error_part: float = 0.0


def describe(path: Path, url: str, shape: Shape) -> str:
    """Write a shaped storage to a file, and return its address."""
    path.write_text(json.dumps({"url": url, "shape": dataclasses.asdict(shape)}))
    return f"{_SCHEME}{path}"


def counts_of(url: str) -> Counts:
    """Return the counts of requests and bytes of a shaped storage so far."""
    with contextlib.closing(_times_of(url)) as times:
        return times.counts()


def _times_of(url: str) -> SharedTimes:
    path = Path(url.removeprefix(_SCHEME))
    _, prefixes = split_prefixes(json.loads(path.read_text())["url"])
    return SharedTimes(path.with_suffix(".times"), prefixes=prefixes)


def is_shaped(url: str) -> bool:
    """Whether an address is that of a shaped storage."""
    return url.startswith(_SCHEME)


def open_storage(url: str) -> Blocks:
    """Open a shaped storage; see :func:`farcall_common.objects.blocks.open_blocks`."""
    found = json.loads(Path(url.removeprefix(_SCHEME)).read_text())
    shape = Shape(**found["shape"])
    return ShapedBlocks(open_blocks(found["url"]), shape, _times_of(url), pace=pace_of(url))


class Counts(NamedTuple):
    """Requests to a storage, and the bytes that they moved."""

    reads: float
    writes: float
    read_bytes: float
    written_bytes: float


class SharedTimes:
    """When each limit of a storage is free again, and what was requested of it, in a file that processes share. Seconds
    of the monotonic clock, which all processes of a machine have in common.

    :param prefixes: of the storage, each of which has limits of reads and writes of its own.
    """

    def __init__(self, path: Path, *, prefixes: int = 1) -> None:
        self.prefixes = prefixes
        self._path = path
        self._limits = 2 + 2 * prefixes
        size = _TIME.size * (self._limits + len(Counts._fields))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        os.close(descriptor)

    def reserve(self, amounts: Sequence[tuple[int, float]], now: float) -> float:
        """Reserve so many seconds of each of these limits; when the last of them has been used up."""
        with locked(self._path):
            return max((self._add(limit, seconds, now) for limit, seconds in amounts), default=now)

    def admit(self, limit: int, seconds: float, now: float) -> bool:
        """Reserve so many seconds of a limit, if it has not been used up; whether that is so."""
        with locked(self._path):
            if self._free_at(limit) > now + _BURST_S:
                return False
            self._add(limit, seconds, now)
        return True

    def count(self, kind: int, size: int) -> None:
        """Count a read or a write of ``size`` bytes."""
        with locked(self._path):
            for place, amount in ((kind - _READS, 1), (kind, size)):
                at = (self._limits + place) * _TIME.size  # requests, then bytes, as in Counts
                _TIME.pack_into(self._memory, at, _TIME.unpack_from(self._memory, at)[0] + amount)

    def counts(self) -> Counts:
        """Return the counts since the file was created."""
        with locked(self._path):
            at = self._limits * _TIME.size
            return Counts(*struct.unpack_from(f"{len(Counts._fields)}d", self._memory, at))

    def is_slow(self, most: int) -> bool:
        """Whether this process is one of the first ``most`` processes that called this."""
        if not most:
            return False
        with locked(self._path):
            path = self._path.with_suffix(".slow")
            known = path.read_text().split() if path.exists() else []
            if str(os.getpid()) not in known and len(known) < most:
                known.append(str(os.getpid()))
                path.write_text(" ".join(known))
        return str(os.getpid()) in known

    def close(self) -> None:
        """Close the file; it stays."""
        self._memory.close()

    def _add(self, limit: int, seconds: float, now: float) -> float:
        free_at = max(self._free_at(limit), now) + seconds
        _TIME.pack_into(self._memory, limit * _TIME.size, free_at)
        return free_at

    def _free_at(self, limit: int) -> float:
        free_at: float
        (free_at,) = _TIME.unpack_from(self._memory, limit * _TIME.size)
        return free_at


class ShapedBlocks(Blocks):
    """Blocks of a storage, as slow as a shape says, or as busy.

    :param times: of all processes that use the storage.
    :param pace: of the requests; a new one if it is not given.
    :param seed: of latencies and of errors.
    """

    def __init__(
        self,
        blocks: Blocks,
        shape: Shape,
        times: SharedTimes,
        *,
        pace: Pace | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._blocks = blocks
        self._shape = shape
        self._times = times
        self._pace = Pace() if pace is None else pace
        self._random = random.Random(os.getpid() if seed is None else seed)
        self._errors = random.Random(seed)
        self._own_lock = threading.Lock()
        self._free_at = {_READ_BYTES: 0.0, _WRITTEN_BYTES: 0.0}
        self._clock = clock
        self._sleep = sleep

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        return self._pace.run(lambda: self._create(name, pieces))

    def read(self, part: Part) -> memoryview:
        return self._pace.run(lambda: self._read(part))

    def names(self, prefix: str) -> Iterator[str]:
        return self._blocks.names(prefix)

    def delete(self, names: Sequence[str]) -> None:
        self._blocks.delete(names)

    def delete_below(self, prefix: str) -> None:
        self._blocks.delete_below(prefix)

    def close(self) -> None:
        self._blocks.close()
        self._times.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _create(self, name: str, pieces: Sequence[Piece]) -> bool:
        fails = self._errors.random() < self._shape.error_part
        if fails and self._errors.random() < 0.5:
            raise _failed(name)
        self._admit(name, _WRITES, self._shape.writes)
        self._wait_write(name, sum(map(len, pieces)))
        created = self._blocks.create(name, pieces)
        self._times.count(_WRITES, sum(map(len, pieces)))
        if fails:
            raise _failed(name)
        return created

    def _read(self, part: Part) -> memoryview:
        if self._errors.random() < self._shape.error_part:
            raise _failed(part.name)
        self._admit(part.name, _READS, self._shape.reads)
        found = self._blocks.read(part)
        self._times.count(_READS, len(found))
        self._wait_read(part.name, len(found))
        return found

    # -- limits --------------------------------------------------------------------------------------------------------

    def _admit(self, name: str, kind: int, rate: float) -> None:
        """:raises StoreBusy: if the storage refuses requests, and this is one beyond the rate."""
        if self._shape.refuses and not self._times.admit(self._limit(name, kind), 1 / rate, self._clock()):
            raise StoreBusy(f"{name}: 503 SlowDown: reduce your request rate.")

    def _limit(self, name: str, kind: int) -> int:
        """The number of a limit of requests: that of the block's prefix."""
        return kind + 2 * prefix_number(name, self._times.prefixes)

    def _wait_read(self, name: str, size: int) -> None:
        shape = self._shape
        amounts = [(_READ_BYTES, size / shape.read_bytes)]
        if not shape.refuses:
            amounts.append((self._limit(name, _READS), 1 / shape.reads))
        self._wait(amounts, _READ_BYTES, size / shape.worker_read_bytes)

    def _wait_write(self, name: str, size: int) -> None:
        shape = self._shape
        amounts = [(_WRITTEN_BYTES, size / shape.written_bytes)]
        if not shape.refuses:
            amounts.append((self._limit(name, _WRITES), 1 / shape.writes))
        self._wait(amounts, _WRITTEN_BYTES, size / shape.worker_written_bytes)

    def _wait(self, amounts: Sequence[tuple[int, float]], direction: int, own_s: float) -> None:
        now, shape = self._clock(), self._shape
        # the program is no worker: its requests are small
        is_slow = own_s > _LEAST_SLOWED_S and self._times.is_slow(shape.slow_workers)
        with self._own_lock:
            self._free_at[direction] = max(self._free_at[direction], now) + own_s * (
                shape.slow_factor if is_slow else 1
            )
            own_at = self._free_at[direction]
            latency_s = shape.latency_s * self._random.lognormvariate(0.0, shape.latency_sigma)
        until = max(now + latency_s, own_at, self._times.reserve(amounts, now))
        if until > now:
            self._sleep(until - now)


def _failed(name: str) -> StoreBusy:
    return StoreBusy(f"{name}: 503 SlowDown: an error of the shape.")
