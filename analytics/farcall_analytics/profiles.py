"""Profiles: what was measured of storages and workers, by which the model predicts. No I/O.

Sizes are bytes, durations seconds, rates per second. Bandwidths of a worker are by its memory, as providers give more
of both together; request rates are those of the whole storage by the size of an object, as they fall with it (Locus,
section 4).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

from farcall_analytics import curves
from farcall_analytics.curves import Curve, Slowdowns, constant
from farcall_analytics.prices import FREE_STORAGE, FREE_WORKERS, StoragePrice, WorkerPrice

UNLIMITED: Final = constant(1e15)


@dataclasses.dataclass(frozen=True)
class Tier:
    """A storage.

    :param reads_per_s, writes_per_s: requests that it answers, for all workers together, by the size of an object.
    :param read_bytes_per_s, write_bytes_per_s: of one worker, by its memory.
    :param total_bytes_per_s: of all workers together, in one direction.
    :param bytes_per_s_of_byte: the same, for each byte that an exchange has room for: nodes with memory have a network
        each.
    :param latency_s: of a request.
    :param capacity: bytes that it can hold.
    :param is_fast: whether it holds blocks in memory, for the methods ``fast`` and ``hybrid``.
    """

    name: str
    reads_per_s: Curve = UNLIMITED
    writes_per_s: Curve = UNLIMITED
    read_bytes_per_s: Curve = UNLIMITED
    write_bytes_per_s: Curve = UNLIMITED
    total_bytes_per_s: float = math.inf
    bytes_per_s_of_byte: float = math.inf
    latency_s: float = 0.0
    capacity: float = math.inf
    is_fast: bool = False
    price: StoragePrice = FREE_STORAGE


@dataclasses.dataclass(frozen=True)
class Codec:
    """Compression of blocks. ``ratio``: of the compressed size to the other one; rates: of one processor, in bytes
    before compression."""

    name: str
    ratio: float = 1.0
    compress_bytes_per_s: float = math.inf
    decompress_bytes_per_s: float = math.inf


NO_CODEC: Final = Codec("none")


@dataclasses.dataclass(frozen=True)
class Workers:
    """What functions run on.

    :param memories: sizes of memory that a worker can have.
    :param most: that run at a time.
    :param start_s: until a new worker runs its first task; ``starts_per_s``: of all together.
    :param call_s: from one task of a worker to its next one.
    :param cores_per_byte: processors of a worker, by its memory; it has ``least_cores`` at least.
    :param partition_bytes_per_s, combine_bytes_per_s: what one processor partitions, and sorts, groups or joins.
    :param data_part: of the memory of a worker, what its data may take.
    :param slowdowns: of tasks.
    :param overlaps: whether a task reads, computes and writes at the same time.
    :param per_node: workers that share the memory of a node.
    """

    memories: tuple[float, ...]
    most: int
    start_s: float = 0.0
    starts_per_s: float = math.inf
    call_s: float = 0.0
    cores_per_byte: float = 0.0
    least_cores: float = 1.0
    partition_bytes_per_s: float = math.inf
    combine_bytes_per_s: float = math.inf
    data_part: float = 0.5
    slowdowns: Slowdowns = curves.NONE
    overlaps: bool = False
    per_node: int = 1
    price: WorkerPrice = FREE_WORKERS

    def cores(self, memory: float) -> float:
        """Processors of a worker with so much memory."""
        return max(self.least_cores, self.cores_per_byte * memory)


@dataclasses.dataclass(frozen=True)
class Profile:
    """What plans of one endpoint are made from.

    :param workers: of the endpoint.
    :param tiers: by name.
    :param codecs: that may be used.
    :param error: of predictions: what 90 % of measured stages differ by at most, as a part of the prediction.
    :param note: for those who read a plan: where the numbers come from.
    :param is_measured: whether they were measured; else they are assumed.
    """

    workers: Workers
    tiers: Mapping[str, Tier]
    codecs: tuple[Codec, ...] = (NO_CODEC,)
    error: float = 0.15
    note: str = ""
    is_measured: bool = True
