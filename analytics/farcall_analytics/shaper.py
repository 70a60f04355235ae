"""Shaper: a storage with the limits of another one, so that experiments on one machine have the shape of a cloud.

All processes of a machine that name the same file share the limits of the storage; each process has its own bandwidth,
as a worker has. ``shaped:FILE`` is the address of such a storage; the file has that of the real one, and the shape.
"""

from __future__ import annotations

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
from typing import Final

from farcall_common.objects.blocks import Blocks, Part, open_blocks
from farcall_common.objects.node_blocks import is_on_nodes, open_node_blocks
from farcall_common.payload import Piece
from farcall_common.private import locked

_READS, _WRITES, _READ_BYTES, _WRITTEN_BYTES = range(4)
_SCHEME: Final = "shaped:"
_STATE: Final = struct.Struct("4d")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The limits of a storage. Rates are per second; infinite: no limit.

    :param reads, writes: requests of all workers together.
    :param read_bytes, written_bytes: of all workers together.
    :param worker_read_bytes, worker_written_bytes: of one worker.
    :param latency_s: median of what a request takes before its first byte; it has a log-normal distribution with
        ``latency_sigma``.
    :param slow_part: of workers, which have 1 / ``slow_factor`` of the bandwidth.
    """

    reads: float = math.inf
    writes: float = math.inf
    read_bytes: float = math.inf
    written_bytes: float = math.inf
    worker_read_bytes: float = math.inf
    worker_written_bytes: float = math.inf
    latency_s: float = 0.0
    latency_sigma: float = 0.0
    slow_part: float = 0.0
    slow_factor: float = 1.0


def describe(path: Path, url: str, shape: Shape) -> str:
    """Write a shaped storage to a file; its address."""
    path.write_text(json.dumps({"url": url, "shape": dataclasses.asdict(shape)}))
    return f"{_SCHEME}{path}"


def open_storage(url: str) -> Blocks:
    """The storage at an address, shaped or not, or the memory of nodes; see
    :func:`~farcall_common.objects.blocks.open_blocks` and
    :func:`~farcall_common.objects.node_blocks.open_node_blocks`."""
    if is_on_nodes(url):
        return open_node_blocks(url)
    if not url.startswith(_SCHEME):
        return open_blocks(url)
    path = Path(url.removeprefix(_SCHEME))
    found = json.loads(path.read_text())
    return ShapedBlocks(open_blocks(found["url"]), Shape(**found["shape"]), SharedTimes(path.with_suffix(".times")))


class SharedTimes:
    """When each limit of a storage is free again, in a file that processes share. Seconds of the monotonic clock, which
    all processes of a machine have in common."""

    def __init__(self, path: Path) -> None:
        self._path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, _STATE.size)
        self._memory = mmap.mmap(descriptor, _STATE.size)
        os.close(descriptor)

    def reserve(self, amounts: Sequence[tuple[int, float]], now: float) -> float:
        """Reserve so many seconds of each of these limits; when the last of them has been used up."""
        with locked(self._path):
            free_at = list(_STATE.unpack_from(self._memory))
            for limit, seconds in amounts:
                free_at[limit] = max(free_at[limit], now) + seconds
            _STATE.pack_into(self._memory, 0, *free_at)
        return max((free_at[limit] for limit, _ in amounts), default=now)

    def close(self) -> None:
        """Close the file; it stays."""
        self._memory.close()


class ShapedBlocks(Blocks):
    """Blocks of a storage, as slow as a shape says.

    :param times: of all processes that use the storage.
    :param seed: of latencies, and of whether this worker is slow.
    """

    def __init__(
        self,
        blocks: Blocks,
        shape: Shape,
        times: SharedTimes,
        *,
        seed: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.can_take = blocks.can_take
        self._blocks = blocks
        self._shape = shape
        self._times = times
        self._random = random.Random(os.getpid() if seed is None else seed)  # noqa: S311 - no secret
        self._slowness = shape.slow_factor if self._random.random() < shape.slow_part else 1.0
        self._own_lock = threading.Lock()
        self._free_at = {_READ_BYTES: 0.0, _WRITTEN_BYTES: 0.0}
        self._clock = clock
        self._sleep = sleep

    def create(self, name: str, pieces: Sequence[Piece]) -> bool:
        self._wait_write(sum(map(len, pieces)))
        return self._blocks.create(name, pieces)

    def read(self, part: Part) -> memoryview:
        found = self._blocks.read(part)
        self._wait_read(len(found))
        return found

    def take(self, name: str) -> memoryview | None:
        found = self._blocks.take(name)
        self._wait_read(0 if found is None else len(found))
        return found

    def names(self, prefix: str) -> Iterator[str]:
        return self._blocks.names(prefix)

    def delete(self, names: Sequence[str]) -> None:
        self._blocks.delete(names)

    def close(self) -> None:
        self._blocks.close()
        self._times.close()

    def _wait_read(self, size: int) -> None:
        shape = self._shape
        amounts = [(_READS, 1 / shape.reads), (_READ_BYTES, size / shape.read_bytes)]
        self._wait(amounts, _READ_BYTES, size / shape.worker_read_bytes)

    def _wait_write(self, size: int) -> None:
        shape = self._shape
        amounts = [(_WRITES, 1 / shape.writes), (_WRITTEN_BYTES, size / shape.written_bytes)]
        self._wait(amounts, _WRITTEN_BYTES, size / shape.worker_written_bytes)

    def _wait(self, amounts: Sequence[tuple[int, float]], direction: int, own_s: float) -> None:
        now, shape = self._clock(), self._shape
        with self._own_lock:
            self._free_at[direction] = max(self._free_at[direction], now) + own_s * self._slowness
            own_at = self._free_at[direction]
            latency_s = shape.latency_s * self._random.lognormvariate(0.0, shape.latency_sigma)
        until = max(now + latency_s, own_at, self._times.reserve(amounts, now))
        if until > now:
            self._sleep(until - now)
