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
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from farcall_analytics.curves import last_end
from farcall_analytics.profiles import NO_CODEC, Codec, Profile, Tier, Workers

_REQUESTS_AT_A_TIME: Final = 8.0
"""Parallel requests of one task."""
_LOW, _HIGH = 0.05, 0.95


class Method(enum.StrEnum):
    """How data gets from the tasks that partition to those that combine.

    - ``slow``: an object for each pair of them, in an object store or shared file system.
    - ``combined``: an object for each task that partitions, of which others read a range (write-combining).
    - ``two-level``: the same twice, in groups of the square root of the tasks: fewer reads, twice the bytes (Lambada).
    - ``fast``: a block for each pair, in memory.
    - ``hybrid``: rounds through a memory that is smaller than the data, each with its run in the object store, and a
      merge of the runs (Locus).
    - ``direct``: an object for each task that partitions, in the memory of its node, of which others read a range.
    - ``merged``: the same, which tasks on the nodes merge into few objects in the object store (Exoshuffle).
    """

    SLOW = "slow"
    COMBINED = "combined"
    TWO_LEVEL = "two-level"
    FAST = "fast"
    HYBRID = "hybrid"
    DIRECT = "direct"
    MERGED = "merged"


@dataclasses.dataclass(frozen=True)
class Shuffle:
    """Amount of data in an exchange.

    :param size: bytes that go from partitioning to combining tasks.
    :param input_size, output_size: bytes that tasks read before the exchange and write after it.
    :param writers: partitioning tasks; 0: as many as combining tasks, but at least one for each worker in each round.
    """

    size: float
    input_size: float = 0.0
    output_size: float = 0.0
    writers: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to run an exchange.

    :param tier: name of the storage. With ``hybrid`` and ``merged`` it has the merged blocks. Only these methods also
        use ``fast_tier``, a memory.
    :param memory: bytes of memory of a worker. ``parallel``: workers at the same time.
    :param fast_bytes: bytes of memory that ``hybrid`` uses, for one round, or if ``pipelined`` for two rounds of half
        the size: tasks merge one while others write the next one.
    :param copies_after: fraction of a wave after which tasks that still run get a copy; None: never.
    :param partitions: combining tasks; 0: enough that every worker has one, and that the data of each task fits into
        its memory.
    """

    method: Method
    tier: str
    memory: float
    parallel: int
    fast_tier: str = ""
    fast_bytes: float = 0.0
    codec: Codec = NO_CODEC
    copies_after: float | None = None
    partitions: int = 0
    pipelined: bool = False


class Transfer(NamedTuple):
    """Requests of all tasks of a phase to a storage, and the bytes that they move."""

    tier: str
    requests: float
    size: float
    is_write: bool


class Work(NamedTuple):
    """Bytes that the tasks of a phase process, and bytes per second of a processor."""

    size: float
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Phase:
    """A number of tasks, of which ``at_a_time`` run at the same time.

    :param repeats: number of times that all tasks run. ``paid``: workers that are paid, if more than ``at_a_time``: the
        tasks of all repeats hold workers while they wait for one another. ``lanes``: repeats at the same time, each
        followed by the next phase.
    :param per_call: tasks that a worker runs in one call: while one computes, others read and write.
    """

    name: str
    tasks: int
    at_a_time: int
    transfers: tuple[Transfer, ...]
    work: tuple[Work, ...] = ()
    repeats: int = 1
    per_call: int = 1
    paid: int = 0
    lanes: int = 1


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase, all its repeats together: the mean, and the interval of 90 % of cases. ``parts``: seconds by
    cause, each as if it were the only cause."""

    name: str
    seconds: float
    low_s: float
    high_s: float
    parts: Mapping[str, float]
    repeats: int = 1


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimate of a plan: seconds with the interval of 90 %, dollars, and the main cause of waiting."""

    seconds: float
    low_s: float
    high_s: float
    dollars: float
    limited_by: str
    phases: tuple[PhaseTime, ...]


class Infeasible(ValueError):
    """A plan cannot be done; the text says why."""


# -- phases ------------------------------------------------------------------------------------------------------------


class Legs(NamedTuple):
    """Transfers that a method adds to the tasks on both sides of an exchange.

    :param written: transfer of the partitioning tasks, in each round. ``read``: transfer of the combining tasks.
    :param between: phases between them, in each round. ``lanes``: see :class:`Phase`.
    """

    written: Transfer
    read: Transfer
    between: tuple[Phase, ...] = ()
    rounds: int = 1
    lanes: int = 1


def partitions_of(shuffle: Shuffle, plan: Plan, workers: Workers) -> int:
    """Return the number of combining tasks."""
    return plan.partitions or max(plan.parallel, math.ceil(shuffle.size / (plan.memory * workers.data_part)))


def writers_of(shuffle: Shuffle, plan: Plan, workers: Workers) -> int:
    """Return the number of partitioning tasks."""
    rounds = rounds_of(shuffle, plan) if plan.method is Method.HYBRID else 1
    return shuffle.writers or max(partitions_of(shuffle, plan, workers), rounds * plan.parallel)


def rounds_of(shuffle: Shuffle, plan: Plan) -> int:
    """Return the number of rounds of a hybrid exchange."""
    return _rounds_of(shuffle.size * plan.codec.ratio, plan)


def _rounds_of(moved: float, plan: Plan) -> int:
    return max(1, math.ceil(moved * (2 if plan.pipelined else 1) / plan.fast_bytes))


def lanes_of(rounds: int, writers: int, *, pipelined: bool) -> int:
    """Return the rounds of a hybrid exchange at the same time: one, if a task alone is larger than a round."""
    return 2 if pipelined and rounds <= writers else 1


def legs_of(shuffle: Shuffle, plan: Plan, workers: Workers) -> Legs:
    """Return the transfers that the method of a plan adds to both sides.

    :raises Infeasible: if it cannot be done.
    """
    if plan.method is Method.HYBRID and not plan.fast_bytes > 0:
        raise Infeasible("a hybrid exchange needs memory")
    moved = shuffle.size * plan.codec.ratio
    return _LEGS[plan.method](
        writers_of(shuffle, plan, workers), partitions_of(shuffle, plan, workers), moved, plan, workers
    )


def phases_of(shuffle: Shuffle, plan: Plan, workers: Workers, *, input_tier: str = "") -> tuple[Phase, ...]:
    """The phases of an exchange.

    :param input_tier: where its input is, and its output goes; the tier of the plan, if not given.
    :raises Infeasible: if it cannot be done.
    """
    outer = input_tier or plan.tier
    legs = legs_of(shuffle, plan, workers)
    partitions = partitions_of(shuffle, plan, workers)
    writers = writers_of(shuffle, plan, workers)
    read = (Transfer(outer, writers, shuffle.input_size, is_write=False),)
    written = (Transfer(outer, partitions, shuffle.output_size, is_write=True),)
    partition = in_rounds(
        "partition",
        writers,
        plan.parallel,
        (*(read if shuffle.input_size else ()),),
        partition_work(shuffle.size, plan.codec, workers),
        legs,
    )
    combine = Phase(
        "combine",
        partitions,
        min(plan.parallel, partitions),
        (legs.read, *(written if shuffle.output_size else ())),
        combine_work(shuffle.size, plan.codec, workers),
    )
    return partition, *legs.between, combine


def in_rounds(
    name: str, tasks: int, parallel: int, transfers: tuple[Transfer, ...], work: tuple[Work, ...], legs: Legs
) -> Phase:
    """The phase of tasks that partition: all of them at once, or some in each round.

    :param tasks, transfers, work: of all rounds together, without what the exchange adds.
    """
    rounds = legs.rounds
    each = max(1, math.ceil(tasks / rounds))
    own = tuple(Transfer(tier, requests / rounds, size / rounds, out) for tier, requests, size, out in transfers)
    parts = tuple(Work(size / rounds, rate) for size, rate in work)
    paid = min(parallel, each * rounds)
    return Phase(name, each, min(parallel, each), (*own, legs.written), parts, rounds, paid=paid, lanes=legs.lanes)


def partition_work(size: float, codec: Codec, workers: Workers) -> tuple[Work, ...]:
    """Return the work of tasks that partition ``size`` bytes."""
    return Work(size, workers.partition_bytes_per_s), Work(size, codec.compress_bytes_per_s)


def combine_work(size: float, codec: Codec, workers: Workers) -> tuple[Work, ...]:
    """Return the work of tasks that combine ``size`` bytes."""
    return Work(size, workers.combine_bytes_per_s), Work(size, codec.decompress_bytes_per_s)


def square_root(count: int) -> int:
    """Return the square root, rounded up."""
    return math.isqrt(count - 1) + 1


def _pairs(writers: int, partitions: int, moved: float, plan: Plan, _: Workers) -> Legs:
    both = writers * partitions
    return Legs(Transfer(plan.tier, both, moved, is_write=True), Transfer(plan.tier, both, moved, is_write=False))


def _combined(writers: int, partitions: int, moved: float, plan: Plan, _: Workers) -> Legs:
    return Legs(
        Transfer(plan.tier, writers, moved, is_write=True),
        Transfer(plan.tier, writers * partitions, moved, is_write=False),
    )


def _two_level(writers: int, partitions: int, moved: float, plan: Plan, _: Workers) -> Legs:
    return _in_groups(square_root(writers), plan.tier, writers, partitions, moved, plan)


def _merged(writers: int, partitions: int, moved: float, plan: Plan, workers: Workers) -> Legs:
    nodes = min(writers, math.ceil(plan.parallel / workers.per_node))
    return _in_groups(nodes, plan.fast_tier, writers, partitions, moved, plan)


def _in_groups(groups: int, first: str, writers: int, partitions: int, moved: float, plan: Plan) -> Legs:
    """Through the storage ``first``, from where the blocks of each group are put together."""
    parts = square_root(partitions)
    regroup = Phase(
        "regroup",
        groups * parts,
        min(plan.parallel, groups * parts),
        (
            Transfer(first, writers * parts, moved, is_write=False),
            Transfer(plan.tier, groups * parts, moved, is_write=True),
        ),
    )
    return Legs(
        Transfer(first, writers, moved, is_write=True),
        Transfer(plan.tier, partitions * groups, moved, is_write=False),
        (regroup,),
    )


def _hybrid(writers: int, partitions: int, moved: float, plan: Plan, _: Workers) -> Legs:
    wanted = _rounds_of(moved, plan)
    rounds = min(writers, wanted)
    own, size = math.ceil(writers / rounds), moved / rounds
    parts = runs_of(own, partitions)
    regroup = Phase(
        "regroup",
        parts,
        min(plan.parallel, parts),
        (
            Transfer(plan.fast_tier, own * parts, size, is_write=False),
            Transfer(plan.tier, parts, size, is_write=True),
        ),
        repeats=rounds,
        paid=min(plan.parallel, parts * rounds),
    )
    return Legs(
        Transfer(plan.fast_tier, own * parts, size, is_write=True),
        Transfer(plan.tier, partitions * rounds, moved, is_write=False),
        (regroup,),
        rounds,
        lanes_of(wanted, writers, pipelined=plan.pipelined),
    )


def runs_of(writers: int, partitions: int) -> int:
    """How many blocks the tasks of a round write together as a run."""
    return min(partitions, max(writers, square_root(partitions)))


_LEGS: Final[Mapping[Method, Callable[[int, int, float, Plan, Workers], Legs]]] = {
    Method.SLOW: _pairs,
    Method.FAST: _pairs,
    Method.COMBINED: _combined,
    Method.TWO_LEVEL: _two_level,
    Method.HYBRID: _hybrid,
    Method.DIRECT: _combined,
    Method.MERGED: _merged,
}


# -- time and dollars --------------------------------------------------------------------------------------------------


def estimate(shuffle: Shuffle, plan: Plan, profile: Profile, *, input_tier: str = "") -> Estimate:
    """Estimate the time and the dollars of a plan.

    :param input_tier: see :func:`phases_of`.
    :raises Infeasible: if it cannot be done.
    """
    if plan.parallel > profile.workers.most:
        raise Infeasible(f"there are {profile.workers.most} workers, not {plan.parallel}")
    phases = phases_of(shuffle, plan, profile.workers, input_tier=input_tier)
    stored = stored_by(shuffle, plan)
    check_room(stored, profile)
    times = times_of(phases, profile, plan.memory, stored, copies_after=plan.copies_after)
    return sum_of(times, dollars_of(phases, times, profile, plan.memory, stored), profile)


def times_of(
    phases: Sequence[Phase],
    profile: Profile,
    memory: float,
    stored: Mapping[str, float],
    *,
    copies_after: float | None,
    starts: bool = True,
) -> list[PhaseTime]:
    """What phases take, one after the other.

    :param memory: of a worker. ``stored``: bytes that there is room for in a storage.
    :param starts: whether workers start before the first one.
    """
    times = [
        _time(each, profile, memory, stored, copies_after, is_first=starts and each is phases[0]) for each in phases
    ]
    for place, phase in enumerate(phases):
        if phase.lanes > 1:
            both = slice(place, place + 2)
            times[both] = _in_lanes(phases[both], times[both], profile, stored)
    return times


def _in_lanes(
    phases: Sequence[Phase], times: Sequence[PhaseTime], profile: Profile, stored: Mapping[str, float]
) -> list[PhaseTime]:
    """What two phases take whose repeats are done by several lanes: as long as a lane, the workers, or the storage that
    has most to do."""
    total_s = sum(each.seconds - each.parts["worker start"] for each in times)
    worked_s = sum(
        phase.at_a_time * (time.seconds - time.parts["worker start"]) for phase, time in zip(phases, times, strict=True)
    )
    served_s: dict[tuple[str, bool], float] = {}
    for phase, transfer in ((each, own) for each in phases for own in each.transfers):
        tier = profile.tiers[transfer.tier]
        own_s = max(transfer.size / _shared(transfer, tier, stored), transfer.requests / _rate(transfer, tier))
        direction = transfer.tier, transfer.is_write
        served_s[direction] = served_s.get(direction, 0.0) + phase.repeats * own_s
    repeats, lanes = phases[0].repeats, phases[0].lanes
    lane_s = total_s * math.ceil(repeats / lanes) / repeats
    busy_s = max(lane_s, worked_s / max(each.paid for each in phases), *served_s.values())
    part = min(1.0, busy_s / total_s) if total_s else 1.0
    return [scaled(each, part, but="worker start") for each in times]


def scaled(time: PhaseTime, part: float, *, but: str = "") -> PhaseTime:
    """A part of what a phase takes, but for one of its parts, which stays whole."""
    kept_s = time.parts.get(but, 0.0)

    def found(seconds: float) -> float:
        return kept_s + (seconds - kept_s) * part

    parts = {name: each if name == but else each * part for name, each in time.parts.items()}
    return PhaseTime(time.name, found(time.seconds), found(time.low_s), found(time.high_s), parts, time.repeats)


def sum_of(times: Sequence[PhaseTime], dollars: float, profile: Profile) -> Estimate:
    """What phases take together."""
    seconds = sum(each.seconds for each in times)
    error_s = profile.error * seconds
    low_s = seconds - math.hypot(error_s, *(each.seconds - each.low_s for each in times))
    high_s = seconds + math.hypot(error_s, *(each.high_s - each.seconds for each in times))
    parts: dict[str, float] = {}
    for each in times:
        for name, part_s in each.parts.items():
            parts[name] = parts.get(name, 0.0) + part_s
    return Estimate(seconds, max(0.0, low_s), high_s, dollars, max(parts, key=parts.__getitem__), tuple(times))


def check_room(stored: Mapping[str, float], profile: Profile) -> None:
    """:raises Infeasible: if a storage has no room for so many bytes."""
    for name, size in stored.items():
        if size > profile.tiers[name].capacity:
            raise Infeasible(f"{name} has no room for {size:.3g} bytes, but for {profile.tiers[name].capacity:.3g}")


def stored_by(shuffle: Shuffle, plan: Plan) -> Mapping[str, float]:
    """The bytes that are in each storage at a time."""
    moved = shuffle.size * plan.codec.ratio
    if plan.method is Method.HYBRID:
        return {plan.tier: moved, plan.fast_tier: min(moved, plan.fast_bytes)}
    if plan.method is Method.MERGED:
        return {plan.tier: moved, plan.fast_tier: moved}
    return {plan.tier: moved}


def _time(
    phase: Phase,
    profile: Profile,
    memory: float,
    stored: Mapping[str, float],
    copies_after: float | None,
    *,
    is_first: bool,
) -> PhaseTime:
    workers, at_a_time = profile.workers, phase.at_a_time
    waves = math.ceil(phase.tasks / at_a_time)
    parts: dict[str, float] = {}
    directions_s = {False: 0.0, True: 0.0}
    own_s = 0.0  # for which the bandwidth of workers is the limit
    for transfer in phase.transfers:
        tier = profile.tiers[transfer.tier]
        bandwidth = (tier.write_bytes_per_s if transfer.is_write else tier.read_bytes_per_s).at(memory)
        shared = _shared(transfer, tier, stored)
        bytes_s = transfer.size / min(at_a_time * bandwidth, shared)
        requests_s = _requests_s(transfer, tier, phase.tasks, waves)
        directions_s[transfer.is_write] += max(requests_s, bytes_s)
        own_s += bytes_s if bytes_s > requests_s and at_a_time * bandwidth < shared else 0.0
        for name, part_s in ((f"{transfer.tier} requests", requests_s), (f"{transfer.tier} bandwidth", bytes_s)):
            parts[name] = parts.get(name, 0.0) + part_s
    cores = at_a_time * workers.cores(memory)
    parts["processors"] = processors_s = sum(size / rate for size, rate in phase.work) / cores
    longest_s = max(*directions_s.values(), processors_s)
    others_s = sum(directions_s.values()) + processors_s - longest_s
    busy_s = longest_s if workers.overlaps else longest_s + others_s / phase.per_call
    calls_s = math.ceil(waves / phase.per_call) * workers.call_s
    start_s = workers.start_s + at_a_time / workers.starts_per_s if is_first else 0.0
    parts["worker start"] = calls_s + start_s / phase.repeats

    slowdowns = workers.slowdowns if copies_after is None else workers.slowdowns.with_copies(copies_after)
    slowed = min(1.0, own_s / busy_s) if busy_s and len(slowdowns.factors) > 1 else 0.0
    factors = slowdowns.of_workers(at_a_time) if slowed else [1.0]

    def with_stragglers(slowest: float) -> float:
        """Seconds, if the slowest worker has this factor."""
        if not slowed:
            return calls_s + busy_s
        durations = [1 + (factor - 1) * slowed for factor in (*factors[:-1], slowest)]
        return calls_s + busy_s / waves * last_end(phase.tasks, durations)

    seconds = with_stragglers(factors[-1])
    parts["stragglers"] = max(0.0, seconds - calls_s - busy_s)
    spread = math.sqrt(phase.repeats)  # of a sum of as many
    less_s = (seconds - with_stragglers(slowdowns.worst(at_a_time, quantile=_LOW))) * spread
    more_s = (with_stragglers(slowdowns.worst(at_a_time, quantile=_HIGH)) - seconds) * spread
    every = {name: part_s * phase.repeats for name, part_s in parts.items()}
    seconds = seconds * phase.repeats + start_s
    low_s, high_s = seconds - less_s, seconds + more_s
    return PhaseTime(phase.name, seconds, min(low_s, seconds), max(high_s, seconds), every, phase.repeats)


def _requests_s(transfer: Transfer, tier: Tier, tasks: int, waves: int) -> float:
    """Seconds for the requests: as many as the storage answers, or one after the other in each task. A task that has
    written asks whether its job still runs."""
    in_turn = math.ceil(transfer.requests / tasks / _REQUESTS_AT_A_TIME) + transfer.is_write
    return max(transfer.requests / _rate(transfer, tier), waves * in_turn * tier.latency_s)


def _rate(transfer: Transfer, tier: Tier) -> float:
    """Requests per second, of their size, that a storage answers."""
    rates = tier.writes_per_s if transfer.is_write else tier.reads_per_s
    return rates.at(max(1.0, transfer.size / transfer.requests))


def _shared(transfer: Transfer, tier: Tier, stored: Mapping[str, float]) -> float:
    """Bytes per second of all workers together, with room for so many bytes."""
    room = stored.get(transfer.tier, math.inf)
    return min(tier.total_bytes_per_s, (room or math.inf) * tier.bytes_per_s_of_byte)


def dollars_of(
    phases: Sequence[Phase],
    times: Sequence[PhaseTime],
    profile: Profile,
    memory: float,
    stored: Mapping[str, float],
) -> float:
    """What phases cost. Workers are paid from their start to their end, also while they wait."""
    price = profile.workers.price
    seconds = sum(each.seconds for each in times)
    total = 0.0
    for phase, time in zip(phases, times, strict=True):
        paid_s = math.ceil(time.seconds / price.step_s) * price.step_s if price.step_s else time.seconds
        total += max(phase.paid, phase.at_a_time) * memory * price.byte_s * paid_s
        total += phase.repeats * phase.tasks * price.call
        for transfer in phase.transfers:
            storage = profile.tiers[transfer.tier].price
            request, byte = (
                (storage.write, storage.byte_written) if transfer.is_write else (storage.read, storage.byte_read)
            )
            total += phase.repeats * (transfer.requests * request + transfer.size * byte)
    for name, size in stored.items():
        storage = profile.tiers[name].price
        total += size * (storage.byte_s * seconds + storage.provisioned_byte_s * max(seconds, storage.least_s))
    return total
