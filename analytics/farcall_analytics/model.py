"""Model: how long an exchange takes and what it costs, by method, storage, memory and parallelism. No I/O, no clock.

It is that of Locus (section 4), with what the paper leaves out: reads and writes have rates of their own, that fall
with the size of an object; the merge of a hybrid exchange asks for a range of each run, so that its rounds are bounded;
workers are paid while they wait; and starts, processors, compression and stragglers take time, too.

An exchange is some phases, one after the other; each is so many tasks that read, compute and write.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from farcall_analytics.profiles import NO_CODEC, Codec, Profile, Tier, Workers

_REQUESTS_AT_A_TIME: Final = 8.0
"""Of one task."""
_LOW, _HIGH = 0.05, 0.95


class Method(enum.StrEnum):
    """How data gets from the tasks that partition to those that combine.

    - ``slow``: an object for each pair of them, in an object store or shared file system.
    - ``combined``: an object for each task that partitions, of which others read a range (write-combining).
    - ``two-level``: the same twice, in groups of the square root of the tasks: fewer reads, twice the bytes (Lambada).
    - ``fast``: a block for each pair, in memory.
    - ``hybrid``: rounds through a memory that is smaller than the data, each with its run in the object store, and a
      merge of the runs (Locus).
    - ``direct``: from worker to worker; all must run at the same time.
    """

    SLOW = "slow"
    COMBINED = "combined"
    TWO_LEVEL = "two-level"
    FAST = "fast"
    HYBRID = "hybrid"
    DIRECT = "direct"


@dataclasses.dataclass(frozen=True)
class Shuffle:
    """What is exchanged.

    :param size: bytes that go from the tasks that partition to those that combine.
    :param input_size, output_size: bytes that are read before and written behind it.
    """

    size: float
    input_size: float = 0.0
    output_size: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to do it.

    :param tier: name of the storage; of ``hybrid``: that of the runs, beside ``fast_tier``, which others do not have.
    :param memory: of a worker. ``parallel``: workers at a time.
    :param fast_bytes: of memory that a round of ``hybrid`` uses.
    :param copies_after: the part of a wave after which tasks that still run are started once more; None: never.
    """

    method: Method
    tier: str
    memory: float
    parallel: int
    fast_tier: str = ""
    fast_bytes: float = 0.0
    codec: Codec = NO_CODEC
    copies_after: float | None = None


class Transfer(NamedTuple):
    """Requests of all tasks of a phase to a storage, and the bytes that they move."""

    tier: str
    requests: float
    size: float
    is_write: bool


@dataclasses.dataclass(frozen=True)
class Phase:
    """``computed``: bytes that are partitioned and compressed, or decompressed and combined. ``repeats``: how often it
    is done."""

    name: str
    tasks: int
    transfers: tuple[Transfer, ...]
    computed: float
    combines: bool = False
    repeats: int = 1


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase, all its repeats together: the mean, and what 90 % of cases lie between. ``parts``: what it
    would take if there were nothing else to wait for."""

    name: str
    seconds: float
    low_s: float
    high_s: float
    parts: Mapping[str, float]
    repeats: int = 1


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a plan takes: seconds with the interval of 90 %, dollars, and what it waits for most."""

    seconds: float
    low_s: float
    high_s: float
    dollars: float
    limited_by: str
    phases: tuple[PhaseTime, ...]


class Infeasible(ValueError):
    """A plan cannot be done; the text says why."""


# -- phases ------------------------------------------------------------------------------------------------------------


def tasks_of(shuffle_size: float, plan: Plan, workers: Workers) -> int:
    """How many tasks partition, and how many combine: so many that the data of each fits into its memory."""
    return max(plan.parallel, math.ceil(shuffle_size / (plan.memory * workers.data_part)))


def rounds_of(shuffle: Shuffle, plan: Plan) -> int:
    """Of a hybrid exchange."""
    return max(1, math.ceil(shuffle.size * plan.codec.ratio / plan.fast_bytes))


def phases_of(shuffle: Shuffle, plan: Plan, workers: Workers, *, input_tier: str = "") -> tuple[Phase, ...]:
    """The phases of an exchange.

    :param input_tier: where its input is, and its output goes; the tier of the plan, if not given.
    """
    return _PHASES[plan.method](shuffle, plan, workers, input_tier or plan.tier)


def _pairs(shuffle: Shuffle, plan: Plan, workers: Workers, outer: str) -> tuple[Phase, ...]:
    tasks = tasks_of(shuffle.size, plan, workers)
    moved = shuffle.size * plan.codec.ratio
    return (
        _partition(shuffle, tasks, outer, Transfer(plan.tier, tasks * tasks, moved, is_write=True)),
        _combine(shuffle, tasks, outer, Transfer(plan.tier, tasks * tasks, moved, is_write=False)),
    )


def _combined(shuffle: Shuffle, plan: Plan, workers: Workers, outer: str) -> tuple[Phase, ...]:
    tasks = tasks_of(shuffle.size, plan, workers)
    moved = shuffle.size * plan.codec.ratio
    objects = math.ceil(tasks / workers.per_node)  # those of a node write one together
    return (
        _partition(shuffle, tasks, outer, Transfer(plan.tier, objects, moved, is_write=True)),
        _combine(shuffle, tasks, outer, Transfer(plan.tier, objects * tasks, moved, is_write=False)),
    )


def _two_level(shuffle: Shuffle, plan: Plan, workers: Workers, outer: str) -> tuple[Phase, ...]:
    tasks = tasks_of(shuffle.size, plan, workers)
    moved = shuffle.size * plan.codec.ratio
    reads = tasks * math.ceil(math.sqrt(tasks))
    write, read = (
        Transfer(plan.tier, tasks, moved, is_write=True),
        Transfer(plan.tier, reads, moved, is_write=False),
    )
    regroup = Phase("regroup", tasks, (read, write), 0.0)
    return _partition(shuffle, tasks, outer, write), regroup, _combine(shuffle, tasks, outer, read)


def _hybrid(shuffle: Shuffle, plan: Plan, workers: Workers, outer: str) -> tuple[Phase, ...]:
    rounds = rounds_of(shuffle, plan)
    of_round = Shuffle(shuffle.size / rounds, shuffle.input_size / rounds)
    moved = of_round.size * plan.codec.ratio
    tasks = tasks_of(of_round.size, plan, workers)
    merges = tasks_of(shuffle.size, plan, workers)
    run = Transfer(plan.tier, tasks, moved, is_write=True)
    partition = _partition(of_round, tasks, outer, Transfer(plan.fast_tier, tasks * tasks, moved, is_write=True))
    combine = _combine(of_round, tasks, outer, Transfer(plan.fast_tier, tasks * tasks, moved, is_write=False))
    ranges = Transfer(plan.tier, merges * rounds, moved * rounds, is_write=False)
    merge = dataclasses.replace(_combine(shuffle, merges, outer, ranges), name="merge")
    return (
        dataclasses.replace(partition, repeats=rounds),
        dataclasses.replace(combine, repeats=rounds, transfers=(*combine.transfers, run)),
        merge,
    )


def _direct(shuffle: Shuffle, plan: Plan, workers: Workers, outer: str) -> tuple[Phase, ...]:
    tasks = tasks_of(shuffle.size, plan, workers)
    if tasks > plan.parallel:
        raise Infeasible(f"{tasks} tasks do not run at the same time on {plan.parallel} workers")
    sent = Transfer(plan.tier, tasks * tasks, shuffle.size * plan.codec.ratio, is_write=True)
    return _partition(shuffle, tasks, outer, sent), _combine(shuffle, tasks, outer, None)


_PHASES: Final[Mapping[Method, Callable[[Shuffle, Plan, Workers, str], tuple[Phase, ...]]]] = {
    Method.SLOW: _pairs,
    Method.FAST: _pairs,
    Method.COMBINED: _combined,
    Method.TWO_LEVEL: _two_level,
    Method.HYBRID: _hybrid,
    Method.DIRECT: _direct,
}


def _partition(shuffle: Shuffle, tasks: int, outer: str, written: Transfer) -> Phase:
    read = (Transfer(outer, tasks, shuffle.input_size, is_write=False),) if shuffle.input_size else ()
    return Phase("partition", tasks, (*read, written), shuffle.size)


def _combine(shuffle: Shuffle, tasks: int, outer: str, read: Transfer | None) -> Phase:
    written = (Transfer(outer, tasks, shuffle.output_size, is_write=True),) if shuffle.output_size else ()
    reads = () if read is None else (read,)
    return Phase("combine", tasks, (*reads, *written), shuffle.size, combines=True)


# -- time and dollars --------------------------------------------------------------------------------------------------


def estimate(shuffle: Shuffle, plan: Plan, profile: Profile, *, input_tier: str = "") -> Estimate:
    """What a plan takes.

    :param input_tier: see :func:`phases_of`.
    :raises Infeasible: if it cannot be done.
    """
    _check(shuffle, plan, profile)
    phases = phases_of(shuffle, plan, profile.workers, input_tier=input_tier)
    stored = _stored(shuffle, plan)
    times = tuple(_time(each, plan, profile, stored, is_first=each is phases[0]) for each in phases)
    seconds = sum(each.seconds for each in times)
    error_s = profile.error * seconds
    low_s = seconds - math.hypot(error_s, *(each.seconds - each.low_s for each in times))
    high_s = seconds + math.hypot(error_s, *(each.high_s - each.seconds for each in times))
    parts: dict[str, float] = {}
    for each in times:
        for name, part_s in each.parts.items():
            parts[name] = parts.get(name, 0.0) + part_s
    dollars = _dollars(shuffle, plan, profile, phases, times)
    return Estimate(seconds, max(0.0, low_s), high_s, dollars, max(parts, key=parts.__getitem__), times)


def _check(shuffle: Shuffle, plan: Plan, profile: Profile) -> None:
    if plan.parallel > profile.workers.most:
        raise Infeasible(f"there are {profile.workers.most} workers, not {plan.parallel}")
    if plan.method is Method.HYBRID and not plan.fast_bytes > 0:
        raise Infeasible("a hybrid exchange needs memory")
    for name, size in _stored(shuffle, plan).items():
        if size > profile.tiers[name].capacity:
            raise Infeasible(f"{name} has no room for {size:.3g} bytes, but for {profile.tiers[name].capacity:.3g}")


def _stored(shuffle: Shuffle, plan: Plan) -> Mapping[str, float]:
    """The bytes that are in each storage at a time."""
    moved = shuffle.size * plan.codec.ratio
    if plan.method is Method.HYBRID:
        return {plan.tier: moved, plan.fast_tier: min(moved, plan.fast_bytes)}
    return {plan.tier: 0.0 if plan.method is Method.DIRECT else moved}


def _time(phase: Phase, plan: Plan, profile: Profile, stored: Mapping[str, float], *, is_first: bool) -> PhaseTime:
    workers = profile.workers
    at_a_time = min(plan.parallel, phase.tasks)
    waves = math.ceil(phase.tasks / at_a_time)
    parts: dict[str, float] = {}
    directions_s = {False: 0.0, True: 0.0}
    for transfer in phase.transfers:
        tier = profile.tiers[transfer.tier]
        room = stored.get(transfer.tier, math.inf)
        requests_s, bytes_s = _transfer_s(transfer, tier, plan.memory, at_a_time, room=room)
        directions_s[transfer.is_write] += max(requests_s, bytes_s)
        for name, part_s in ((f"{transfer.tier} requests", requests_s), (f"{transfer.tier} bandwidth", bytes_s)):
            parts[name] = parts.get(name, 0.0) + part_s
    parts["processors"] = processors_s = _processors_s(phase, plan, workers, at_a_time)
    if workers.overlaps:
        busy_s = max(*directions_s.values(), processors_s)
    else:
        busy_s = sum(directions_s.values()) + processors_s
    starts_s = waves * workers.call_s
    if is_first:
        starts_s += workers.start_s + at_a_time / workers.starts_per_s
    parts["worker start"] = starts_s

    slowdowns = workers.slowdowns if plan.copies_after is None else workers.slowdowns.with_copies(plan.copies_after)

    def with_stragglers(factor: float) -> float:
        """Only the last wave waits for its slowest task."""
        return starts_s + busy_s * (1 + (factor - 1) / waves)

    seconds = with_stragglers(slowdowns.mean_worst(at_a_time))
    parts["stragglers"] = seconds - starts_s - busy_s
    spread = math.sqrt(phase.repeats)  # of a sum of as many
    low_s = seconds * phase.repeats - (seconds - with_stragglers(slowdowns.worst(at_a_time, quantile=_LOW))) * spread
    high_s = seconds * phase.repeats + (with_stragglers(slowdowns.worst(at_a_time, quantile=_HIGH)) - seconds) * spread
    every = {name: part_s * phase.repeats for name, part_s in parts.items()}
    return PhaseTime(phase.name, seconds * phase.repeats, low_s, high_s, every, phase.repeats)


def _transfer_s(transfer: Transfer, tier: Tier, memory: float, at_a_time: int, *, room: float) -> tuple[float, float]:
    """Seconds for the requests, and for the bytes. ``room``: bytes that there is place for in the storage."""
    size = max(1.0, transfer.size / transfer.requests)
    rates = tier.writes_per_s if transfer.is_write else tier.reads_per_s
    bandwidth = (tier.write_bytes_per_s if transfer.is_write else tier.read_bytes_per_s).at(memory)
    waits_s = transfer.requests * tier.latency_s / (at_a_time * _REQUESTS_AT_A_TIME)
    requests_s = max(transfer.requests / rates.at(size), waits_s)
    together = min(at_a_time * bandwidth, tier.total_bytes_per_s, (room or math.inf) * tier.bytes_per_s_of_byte)
    return requests_s, transfer.size / together


def _processors_s(phase: Phase, plan: Plan, workers: Workers, at_a_time: int) -> float:
    codec = plan.codec
    if phase.combines:
        rates = workers.combine_bytes_per_s, codec.decompress_bytes_per_s
    else:
        rates = workers.partition_bytes_per_s, codec.compress_bytes_per_s
    work_s = sum(phase.computed / rate for rate in rates)
    return work_s / (at_a_time * workers.cores(plan.memory))


def _dollars(
    shuffle: Shuffle, plan: Plan, profile: Profile, phases: tuple[Phase, ...], times: tuple[PhaseTime, ...]
) -> float:
    """Workers are paid from their start to their end, also while they wait."""
    price = profile.workers.price
    seconds = sum(each.seconds for each in times)
    total = 0.0
    for phase, time in zip(phases, times, strict=True):
        paid_s = math.ceil(time.seconds / price.step_s) * price.step_s if price.step_s else time.seconds
        total += min(plan.parallel, phase.tasks) * plan.memory * price.byte_s * paid_s
        total += phase.repeats * phase.tasks * price.call
        for transfer in phase.transfers:
            storage = profile.tiers[transfer.tier].price
            request, byte = (
                (storage.write, storage.byte_written) if transfer.is_write else (storage.read, storage.byte_read)
            )
            total += phase.repeats * (transfer.requests * request + transfer.size * byte)
    for name, size in _stored(shuffle, plan).items():
        storage = profile.tiers[name].price
        total += size * (storage.byte_s * seconds + storage.provisioned_byte_s * max(seconds, storage.least_s))
    return total
