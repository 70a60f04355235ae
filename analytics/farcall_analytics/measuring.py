"""Measuring: what an endpoint's workers and storages do, by tasks on these workers."""

from __future__ import annotations

import dataclasses
import itertools
import os
import resource
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from farcall_analytics import engine
from farcall_analytics.attempts import Executor
from farcall_analytics.curves import Curve, Slowdowns, constant
from farcall_analytics.passing import from_stream, to_stream
from farcall_analytics.prices import HOUR_S, WorkerPrice
from farcall_analytics.profile_files import NODES, assumed_tier, tier_name
from farcall_analytics.profiles import NO_CODEC, Codec, Profile, Tier, Workers
from farcall_analytics.tasks import delete_task
from farcall_common.errors import ConfigurationError, FarcallError, StoreFull
from farcall_common.objects.blocks import Part
from farcall_common.objects.node_blocks import SCHEME, is_on_nodes, name_on_node, node_of, open_storage

T = TypeVar("T")

KB, MB = 10**3, 10**6
_SIZES: Final = (10 * KB, 100 * KB, 1 * MB, 8 * MB)
_SMALL: Final = 100 * KB
"""Up to this size, requests per second are measured; above it, bytes per second."""
_SECONDS: Final = 0.5
"""Seconds of each measurement on each worker."""
_HELD_S: Final = 0.25
"""Seconds for which a task keeps its worker busy while workers are counted."""
_FIRST_CALL_S: Final = 120.0
_MOST_WORKERS: Final = 1_024
_WAVES: Final = 4
_ROWS: Final = 400_000
_WORDS: Final = 1_000
_PARTITIONS: Final = 8
_LEAST_LIMIT: Final = 0.8
"""Fraction of a single worker's rate that each of all workers must reach. If so, they share no limit."""
_ERROR: Final = 0.2
"""Relative error of predictions that 90 % of stages keep, until measured stages correct it."""
_SHARE_OF_MEMORY: Final = 0.25


class Worker(NamedTuple):
    """A worker: host and process, and the bytes of memory of its host and its own limit."""

    host: str
    process: int
    host_memory: float
    memory: float


class Rates(NamedTuple):
    """Bytes per second that a processor partitions and combines, and what codecs do."""

    partition: float
    combine: float
    codecs: tuple[Codec, ...]


class Probe(NamedTuple):
    """Requests of a worker to a storage. ``names``: of the blocks that it wrote."""

    requests: int
    seconds: float
    names: tuple[str, ...] = ()


def measure(
    executor: Executor,
    urls: Sequence[str],
    *,
    dollars_per_hour: float = 0.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Measure workers, and from there the storages at these addresses, by which the tiers of the profile are named, and
    the memory of nodes. It takes about ten seconds for each storage.

    :param dollars_per_hour: what a worker costs.
    :param progress: called with what is measured next.
    """
    progress("workers")
    try:
        executor.submit(abs, -1).result(timeout=_FIRST_CALL_S)
    except TimeoutError as error:
        raise ConfigurationError(
            f"No worker has answered for {_FIRST_CALL_S:.0f} s.", hint="Is the endpoint running? See farcall endpoints."
        ) from error
    workers = find_workers(executor)
    count = len(workers)
    _results(executor, small_task, range(count))
    started = time.monotonic()
    _results(executor, small_task, range(count * _WAVES))
    call_s = (time.monotonic() - started) / _WAVES
    progress("processors")
    rates = _results(executor, compute_rates, range(count))
    tiers = {}
    slowdowns = Slowdowns()
    for url in urls:
        progress(tier_name(url))
        tiers[url], durations = measure_tier(executor, url, count)
        if len(tiers) == 1:
            slowdowns = Slowdowns.of(durations)
    progress(NODES)
    try:
        tiers[SCHEME], _ = measure_tier(executor, SCHEME, count)
    except FarcallError as error:
        progress(f"{NODES} cannot be used: {error}")
    memory = min(each.memory for each in workers)
    price = WorkerPrice(byte_s=dollars_per_hour / HOUR_S / memory)
    found = Workers(
        memories=(memory,),
        most=count,
        per_node=round(count / len({each.host for each in workers})),
        call_s=call_s,
        partition_bytes_per_s=statistics.median(each.partition for each in rates),
        combine_bytes_per_s=statistics.median(each.combine for each in rates),
        data_part=_SHARE_OF_MEMORY,
        slowdowns=slowdowns,
        price=price,
    )
    return Profile(found, tiers, (NO_CODEC, *rates[0].codecs), error=_ERROR)


def find_workers(executor: Executor) -> list[Worker]:
    """The workers that run at a time, with their part of the memory of their host."""
    tasks = 8
    while True:
        found = {(each.host, each.process): each for each in _results(executor, hold, [_HELD_S] * tasks)}
        if len(found) <= tasks / 2 or tasks >= _MOST_WORKERS:
            break
        tasks *= 2
    hosts = [each.host for each in found.values()]
    return [
        each._replace(memory=min(each.memory, each.host_memory / hosts.count(each.host))) for each in found.values()
    ]


def measure_tier(executor: Executor, url: str, workers: int) -> tuple[Tier, list[float]]:
    """A storage as so many workers have it; and how long each of them took for the same bytes."""
    alone = _probes(executor, url, 1)
    together = _probes(executor, url, workers)
    bandwidth, total, requests = {}, {}, {}
    for is_write in (False, True):
        one = max(_rate(alone[size][is_write]) * size for size in _SIZES if size > _SMALL)
        every = max(_rate(together[size][is_write]) * size for size in _SIZES if size > _SMALL)
        bandwidth[is_write] = one
        total[is_write] = every if every < _LEAST_LIMIT * one * workers else float("inf")
        points = [(float(size), _rate(together[size][is_write])) for size in _SIZES if size <= _SMALL]
        requests[is_write] = Curve((*points, (float(_SIZES[-1]), points[-1][1])))
    first = alone[_SIZES[0]][False]
    latency_s = sum(each.seconds for each in first) / sum(each.requests for each in first)
    tier = dataclasses.replace(
        assumed_tier(url),
        reads_per_s=requests[False],
        writes_per_s=requests[True],
        read_bytes_per_s=constant(bandwidth[False]),
        write_bytes_per_s=constant(bandwidth[True]),
        total_bytes_per_s=min(total.values()),
        latency_s=latency_s,
    )
    return tier, [each.seconds / each.requests for each in together[_SIZES[-1]][False]]


def _probes(executor: Executor, url: str, workers: int) -> dict[int, tuple[list[Probe], list[Probe]]]:
    """Measure, for each size, how fast ``workers`` workers read and write at the same time."""
    prefix = f"farcall-profile-{uuid.uuid4().hex}"
    found = {}
    nodes: set[str] = set()
    try:
        for size in _SIZES:
            names = [f"{prefix}/{size}/{number}" for number in range(workers)]
            written = _results(executor, write_blocks, names, [url] * workers, [size] * workers)
            own = [each.names for each in written]
            nodes |= {node_of(name) for each in own for name in each}
            found[size] = _results(executor, read_blocks, own, [url] * workers), written
    finally:
        if is_on_nodes(url):
            _results(executor, delete_task, [url], [[name_on_node(node, f"{prefix}/") for node in nodes]])
        else:
            delete_task(url, [f"{prefix}/"])
    return found


def _rate(probes: Sequence[Probe]) -> float:
    """Return the requests per second of all workers together."""
    return sum(each.requests / each.seconds for each in probes)


def _results(executor: Executor, function: Callable[..., T], *arguments: Sequence[Any]) -> list[T]:
    futures = [executor.submit(function, *each) for each in zip(*arguments, strict=True)]
    return [future.result() for future in futures]


# -- tasks -------------------------------------------------------------------------------------------------------------


def hold(seconds: float) -> Worker:
    """Say which worker this is, and keep it so long that another one gets the next call."""
    until = time.monotonic() + seconds
    host_memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    own = host_memory if limit == resource.RLIM_INFINITY else float(limit)
    time.sleep(max(0.0, until - time.monotonic()))
    return Worker(os.uname().nodename, os.getpid(), host_memory, own)


def write_blocks(name: str, url: str, size: int) -> Probe:
    """Write blocks one after the other for a while."""
    data = os.urandom(size)
    names: list[str] = []
    with open_storage(url) as blocks:
        started = time.monotonic()
        while True:
            own = f"{name}/{len(names)}"
            try:
                blocks.create(own, [data])
            except StoreFull:
                if not names:
                    raise
                break
            names.append(blocks.full_name(own))
            if time.monotonic() - started >= _SECONDS:
                break
        return Probe(len(names), time.monotonic() - started, tuple(names))


def read_blocks(names: Sequence[str], url: str) -> Probe:
    """Read blocks again and again for a while, one after the other."""
    with open_storage(url) as blocks:
        started = time.monotonic()
        for done in itertools.count(1):
            blocks.read(Part(names[done % len(names)]))
            seconds = time.monotonic() - started
            if seconds >= _SECONDS:
                break
    return Probe(done, seconds)


def compute_rates(seed: int) -> Rates:
    """Partition, combine, compress and decompress rows at random."""
    keys, prices, words = (
        pc.cast(pc.floor(pc.multiply(pc.random(_ROWS, initializer=seed + number), most)), pa.int64())
        for number, most in enumerate((_ROWS, 100_000, _WORDS))
    )
    names = pa.array([f"word {number}" for number in range(_WORDS)])
    table = pa.table({"key": keys, "price": pc.divide(pc.cast(prices, pa.float64()), 100), "name": names.take(words)})
    size = float(table.nbytes)
    streams = _partitioned(table)  # once for what is loaded at first use
    partition_s = _seconds(lambda: _partitioned(table))
    combine_s = _seconds(lambda: _combined(streams))
    plain = to_stream(table)
    plain_s = _seconds(lambda: to_stream(table))
    read_s = _seconds(lambda: from_stream(plain))
    codecs = []
    for name in ("lz4", "zstd"):
        packed = to_stream(table, name)
        compress_s = _seconds(lambda name=name: to_stream(table, name)) - plain_s  # type: ignore[misc]
        decompress_s = _seconds(lambda packed=packed: from_stream(packed)) - read_s  # type: ignore[misc]
        rates = (size / max(1e-6, each) for each in (compress_s, decompress_s))
        codecs.append(Codec(name, len(packed) / len(plain), *rates))
    return Rates(size / partition_s, size / combine_s, tuple(codecs))


def _seconds(run: Callable[[], object]) -> float:
    """The best of three: what it takes if nothing is in the way."""
    found = []
    for _ in range(3):
        started = time.monotonic()
        run()
        found.append(time.monotonic() - started)
    return min(found)


def small_task(seed: int) -> int:
    """Do the work of a task with one row, to measure the time that does not depend on bytes."""
    return len(_combined(_partitioned(pa.table({"key": [seed]}))))


def _partitioned(table: pa.Table) -> list[bytes]:
    return [to_stream(each) for each in engine.divide_by_hash(table, [0], _PARTITIONS)]


def _combined(streams: Sequence[bytes]) -> pa.Table:
    return engine.sort(pa.concat_tables(map(from_stream, streams)), [0], ["asc nulls last"])
