"""Plans of jobs: by which method, and into how many partitions, the rows of each stage are exchanged. No I/O, no clock.

The rows that a stage reads from earlier ones are one exchange. A choice for one of them changes little for the others,
so each is chosen on its own, by its seconds and dollars; how many dollars a second is worth is the same for all of
them, and such that the job as a whole keeps a deadline or a budget.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from farcall_analytics import model
from farcall_analytics.model import Estimate, Infeasible, Legs, Method, Phase, PhaseTime, Plan, Shuffle, Transfer, Work
from farcall_analytics.planner import (
    NoPlan,
    Objective,
    bytes_text,
    missed_text,
    number_text,
    seconds_text,
    table_text,
    why_slower,
)
from farcall_analytics.profiles import NO_CODEC, Codec, Profile
from farcall_analytics.stages import Query, Source, Stage

FAN_IN: Final = 64
"""Blocks that one task merges, if all rows go to one task, or each task of the next stage reads all rows."""
_SMALL: Final = 1e6
"""Bytes up to which no plans are compared: the choice of the method makes no difference."""
_ROUND_PARTS: Final = (0.025, 0.05, 0.1, 0.2, 0.5)
"""Fractions of the data that a round of a hybrid exchange may move."""
_MOST_WIDER: Final = 4.0
"""Highest number of partitions that is compared, as a multiple of the number of workers."""
_WEIGHTS: Final = tuple(10.0 ** (place / 4) for place in range(-48, 17))
"""Values of a second, in dollars, that the planner tries."""
_MOST_PER_CALL: Final = 8
_LEAST_CALLS: Final = 2
"""Minimum number of calls for each worker, so that slow workers can take fewer."""
_TRUST: Final = 0.5
"""Weight of a new measurement. Earlier measurements have the rest."""
_LEAST_COMPARED: Final = 4e6
"""Minimum bytes of a task for its bandwidth to count."""
_FASTEST: Final = math.inf


class Step(NamedTuple):
    """Exchange of the rows that a stage reads from others.

    :param partitions: number of the stage's tasks. ``fast_bytes``: bytes of memory for ``hybrid``. ``rounds``: number
        of rounds; ``pipelined``: two at the same time, each in half the memory.
    """

    method: Method = Method.COMBINED
    partitions: int = 1
    codec: str = NO_CODEC.name
    fast_bytes: float = 0.0
    rounds: int = 1
    pipelined: bool = False


class Facts(NamedTuple):
    """Facts about a table: the number of tasks that read it, and its bytes."""

    tasks: int
    size: float


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits and objective of a plan. None: the model chooses.

    :param tier, fast_tier, node_tier: the storages, by their names in the profile: the main storage, a memory that all
        tasks reach, and the memory of nodes. The last two may be empty.
    :param partition_bytes: bytes of rows that one task combines. The number of partitions follows from it.
    :param deadline_s: seconds in which the whole job should end in 95 % of cases. ``budget``: in dollars.
    """

    tier: str
    fast_tier: str = ""
    node_tier: str = ""
    method: Method | None = None
    codec: str | None = None
    partitions: int | None = None
    partition_bytes: float | None = None
    most_partitions: int = 1_000
    fast_bytes: float | None = None
    pipelined: bool | None = None
    tasks_per_call: int | None = None
    copies_after: float | None = None
    objective: Objective = "cheapest"
    deadline_s: float | None = None
    budget: float | None = None

    def tier_of(self, method: Method) -> str:
        """Return the storage through which a method moves rows."""
        return {Method.FAST: self.fast_tier, Method.DIRECT: self.node_tier}.get(method, self.tier)


class StagePlan(NamedTuple):
    """A stage in a plan. ``size``: bytes that it passes on. ``step``: the exchange of the rows that it reads, if any.
    ``reads``: the stages that it reads from."""

    number: int
    tasks: int
    size: float
    step: Step | None
    seconds: float
    reads: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class JobPlan:
    """Plan of a job with the estimates of its stages, and the plans that were compared with it.

    :param weight: value of a second in dollars; infinite: only time counts.
    :param others: plans with one method everywhere, by method and storage.
    :param refused: why a method cannot be used, or twice as many partitions do not help.
    """

    estimate: Estimate
    stages: tuple[StagePlan, ...]
    weight: float
    limits: Limits
    others: tuple[tuple[str, JobPlan], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    note: str = ""

    def __repr__(self) -> str:
        return self.explain()

    @property
    def steps(self) -> dict[int, Step]:
        """The steps, by number of their stage."""
        return {each.number: each.step for each in self.stages if each.step is not None}

    def explain(self) -> str:
        """Tables: the plan with ``*`` beside others, why some cannot be used, and the stages of the plan."""
        rows = [_row("* ", self), *(_row("", each) for _, each in self.others)]
        lines = [table_text(_HEADING, rows), *(f"no {name}: {reason}" for name, reason in self.refused)]
        lines += ["", table_text(_STAGE_HEADING, map(_stage_row, self.stages))]
        return "\n".join([*lines, *([self.note] if self.note else [])])


@dataclasses.dataclass
class _Option:
    step: Step
    seconds: float
    dollars: float


class JobPlanner:
    """Chooses the steps of one job, with what was measured of it so far.

    :param tables: of the query, by name.
    :raises Infeasible: if a storage or a codec is not in the profile.
    """

    def __init__(self, query: Query, tables: Mapping[str, Facts], profile: Profile, limits: Limits) -> None:
        for name in filter(None, (limits.tier, limits.fast_tier, limits.node_tier)):
            if name not in profile.tiers:
                raise Infeasible(f"{name} was not measured")
        self._query = query
        self._tables = tables
        self._profile = profile
        self._limits = limits
        self._measured: dict[int, float] = {}
        self._sizes: dict[int, float] = {}
        self._consumers = [each for each in query.stages if any(map(self._is_divided, each.sources))]
        self._steps: dict[int, Step] = {}
        self._refused: dict[str, str] = {}
        self._found: dict[Shuffle, list[_Option]] = {}
        self.made: JobPlan
        """The newest plan."""

    # -- the plan ------------------------------------------------------------------------------------------------------

    def plan(self) -> JobPlan:
        """The best plan.

        :raises NoPlan: if none keeps deadline and budget, with the nearest one.
        """
        self.made = self._best()
        return self.made

    def compared(self) -> JobPlan:
        """The best plan, beside others."""
        best = self.plan()
        methods: dict[str, Method] = {}
        for option in (each for consumer in self._consumers for each in self._options(consumer, {})):
            methods.setdefault(self._name(option.step), option.step.method)
        others = []
        for name, method in methods.items():
            steps = self._choose(best.weight, method)
            if steps != best.steps:
                others.append((name, self._estimated(steps, best.weight)))
        rank = _rank(best.weight)
        others.sort(key=lambda each: rank(each[1].estimate.seconds, each[1].estimate.dollars))
        refused = self._refused | dict(self._wider(best))
        return dataclasses.replace(best, others=tuple(others), refused=tuple(refused.items()))

    def _wider(self, plan: JobPlan) -> Iterator[tuple[str, str]]:
        """Why the widest exchange of a plan is not wider."""
        consumer = max(self._consumers, key=lambda each: plan.steps[each.number].partitions, default=None)
        if consumer is None or self._limits.partitions is not None:
            return
        step = plan.steps[consumer.number]
        twice = step._replace(partitions=2 * step.partitions)
        shuffle = self._shuffle(consumer, plan.steps)
        if shuffle.size <= _SMALL or twice.partitions > self._limits.most_partitions:
            return
        with contextlib.suppress(Infeasible):
            found, wide = (model.estimate(shuffle, self._exchange(each), self._profile) for each in (step, twice))
            if reason := why_slower(found, wide):
                yield f"faster with {twice.partitions} partitions for stage {consumer.number + 1}", reason

    def step(self, consumer: int) -> Step:
        """How a stage gets its rows, by the sizes that are known now. Always the same one from the first time on."""
        if consumer not in self._steps:
            found = self._query.stages[consumer]
            self._steps[consumer] = self._chosen(found, self.made.weight, self._steps)
        return self._steps[consumer]

    def keep(self, consumer: int, step: Step) -> None:
        """Use a step that was chosen before."""
        self._steps[consumer] = step

    def tasks(self, stage: Stage, steps: Mapping[int, Step] | None = None) -> int:
        """Return the number of a stage's tasks."""
        for source in stage.sources:
            if source.table:
                return self._tables[source.table].tasks
        if not any(map(self._is_divided, stage.sources)):
            return 1
        if steps is not None and stage.number in steps:
            return steps[stage.number].partitions
        return self.step(stage.number).partitions

    def tasks_per_call(self, tasks: int) -> int:
        """How many of so many tasks one call runs."""
        if self._limits.tasks_per_call is not None:
            return self._limits.tasks_per_call
        if not self._profile.is_measured:
            return 1  # there may be many more workers
        return max(1, min(_MOST_PER_CALL, tasks // (_LEAST_CALLS * self._profile.workers.most)))

    # -- what is measured ----------------------------------------------------------------------------------------------

    def size(self, number: int) -> float:
        """Bytes that a stage passes on: as measured, or as estimated, corrected by what was measured before it."""
        if number not in self._sizes:
            stage = self._query.stages[number]
            sources = [each.stage for each in stage.sources if not each.table]
            expected = sum(self._query.stages[each].size for each in sources)
            found = sum(map(self.size, sources))
            self._sizes[number] = stage.size * (found / expected if expected else 1.0)
        return self._sizes[number]

    def measured(self, number: int, size: float) -> None:
        """Correct the size of a stage by what it has passed on, and with it those of the stages behind."""
        self._measured[number] = size
        self._sizes = dict(self._measured)

    def measured_reads(self, tasks: int, size: float, seconds: float) -> None:
        """Correct the bandwidth for reads by that of some tasks, all together. ``seconds``: the sum of theirs."""
        self._compare("read_bytes_per_s", tasks, size, seconds)

    def measured_writes(self, tasks: int, size: float, seconds: float) -> None:
        """The same for writes."""
        self._compare("write_bytes_per_s", tasks, size, seconds)

    def _compare(self, name: str, tasks: int, size: float, seconds: float) -> None:
        if size < tasks * _LEAST_COMPARED or seconds <= 0:
            return  # requests took the time
        profile = self._profile
        tier = profile.tiers[self._limits.tier]
        curve = getattr(tier, name)
        memory = profile.workers.memories[0]
        together = min(tasks, profile.workers.most)
        expected = min(curve.at(memory), tier.total_bytes_per_s / together)
        factor = (size / seconds / expected) ** _TRUST
        corrected = dataclasses.replace(
            tier, **{name: curve.scaled(factor)}, total_bytes_per_s=tier.total_bytes_per_s * factor
        )
        self._profile = dataclasses.replace(profile, tiers={**profile.tiers, tier.name: corrected})
        self._found.clear()

    # -- choices -------------------------------------------------------------------------------------------------------

    def _best(self) -> JobPlan:
        limits = self._limits

        def keeps(found: JobPlan) -> bool:
            in_time = limits.deadline_s is None or found.estimate.high_s <= limits.deadline_s
            return in_time and (limits.budget is None or found.estimate.dollars <= limits.budget)

        weights: Iterator[float] = iter((0.0, *_WEIGHTS, _FASTEST))
        if limits.objective == "fastest":
            weights = reversed((0.0, *_WEIGHTS, _FASTEST))
        if limits.deadline_s is None and limits.budget is None:
            weights = itertools.islice(weights, 1)
        tried: list[JobPlan] = []
        for weight in weights:
            steps = self._choose(weight)
            if not tried or steps != tried[-1].steps:
                tried.append(self._estimated(steps, weight))
                if keeps(tried[-1]):
                    return tried[-1]
        nearest = min(
            tried,
            key=lambda each: (
                limits.budget is not None and each.estimate.dollars > limits.budget,
                each.estimate.high_s,
            ),
        )
        raise NoPlan(missed_text("the nearest one", nearest.estimate, limits.deadline_s, limits.budget))

    def _choose(self, weight: float, only: Method | None = None) -> dict[int, Step]:
        steps: dict[int, Step] = {}
        for consumer in self._consumers:
            steps[consumer.number] = self._chosen(consumer, weight, steps, only)
        return steps

    def _chosen(self, consumer: Stage, weight: float, steps: Mapping[int, Step], only: Method | None = None) -> Step:
        """The best step for a stage. ``only``: a method that it has, if it can."""
        options = self._options(consumer, steps)
        if not options:
            raise NoPlan("; ".join(f"{name}: {reason}" for name, reason in self._refused.items()))
        rank = _rank(weight)
        own = [each for each in options if only in (None, each.step.method)] or options
        return min(own, key=lambda each: rank(each.seconds, each.dollars)).step

    def _options(self, consumer: Stage, steps: Mapping[int, Step]) -> list[_Option]:
        """All steps that are possible for a stage, with the seconds and dollars of the exchange alone."""
        shuffle = self._shuffle(consumer, steps)
        if shuffle not in self._found:
            self._found[shuffle] = list(self._compute_options(shuffle))
        return self._found[shuffle]

    def _shuffle(self, consumer: Stage, steps: Mapping[int, Step]) -> Shuffle:
        """The rows that a stage gets from others."""
        inputs = [self._query.stages[each.stage] for each in consumer.sources if self._is_divided(each)]
        size = sum(self.size(each.number) for each in inputs)
        writers = sum(self.tasks(each, steps) if each.number in steps or self._is_fixed(each) else 1 for each in inputs)
        return Shuffle(size, writers=writers)

    def _compute_options(self, shuffle: Shuffle) -> Iterator[_Option]:
        refused: dict[str, str] = {}
        possible = set()
        for step in self._candidates(shuffle.size):
            try:
                estimate = model.estimate(shuffle, self._exchange(step), self._profile)
            except Infeasible as error:
                refused[self._name(step)] = str(error)
                continue
            possible.add(self._name(step))
            yield _Option(step, estimate.seconds, estimate.dollars)
        self._refused |= {name: reason for name, reason in refused.items() if name not in possible}

    def _is_fixed(self, stage: Stage) -> bool:
        """Whether the number of its tasks does not depend on a step."""
        return not any(map(self._is_divided, stage.sources)) or any(each.table for each in stage.sources)

    def _candidates(self, size: float) -> Iterator[Step]:
        limits, is_small = self._limits, size <= _SMALL
        codecs = [each.name for each in self._profile.codecs if limits.codec in (None, each.name)]
        possible = [Method.COMBINED, Method.SLOW, Method.TWO_LEVEL]
        possible += [Method.FAST, Method.HYBRID] if limits.fast_tier else []
        if limits.node_tier:
            possible += [Method.DIRECT] if self._profile.workers.per_node == 1 else [Method.DIRECT, Method.MERGED]
        if limits.method is not None:
            possible = [limits.method]
        methods: list[tuple[Method, float, bool]] = []
        for method in possible[:1] if is_small else possible:
            if method is not Method.HYBRID:
                methods.append((method, 0.0, False))
                continue
            sizes = [limits.fast_bytes] if limits.fast_bytes else [max(1.0, part * size) for part in _ROUND_PARTS]
            ways = [False, True] if limits.pipelined is None else [limits.pipelined]
            methods += [(method, each, pipelined) for each, pipelined in itertools.product(sizes, ways)]
        for (method, fast_bytes, pipelined), partitions, codec in itertools.product(
            methods, self._partitions(size), codecs[:1] if is_small else codecs
        ):
            step = Step(method, partitions, codec, fast_bytes, pipelined=pipelined)
            rounds = model.rounds_of(Shuffle(size), self._exchange(step)) if fast_bytes else 1
            yield step._replace(rounds=rounds)

    def _partitions(self, size: float) -> Sequence[int]:
        limits, workers = self._limits, self._profile.workers
        most = limits.most_partitions
        if limits.partitions is not None:
            return [min(limits.partitions, most)]
        if limits.partition_bytes is not None:
            return [min(max(1, math.ceil(size / limits.partition_bytes)), most)]
        least = max(1, math.ceil(size / (workers.memories[0] * workers.data_part)))
        widest = max(least, round(workers.most * _MOST_WIDER))
        steps = range(math.ceil(math.log2(widest / least) * 2) + 1)
        found = {round(least * 2 ** (step / 2)) for step in steps} | {workers.most}
        return sorted({min(each, most) for each in found if least <= each <= widest})

    def _exchange(self, step: Step) -> Plan:
        limits, workers = self._limits, self._profile.workers
        memories = {Method.HYBRID: limits.fast_tier, Method.MERGED: limits.node_tier}
        return Plan(
            step.method,
            limits.tier_of(step.method),
            workers.memories[0],
            workers.most,
            memories.get(step.method, ""),
            step.fast_bytes,
            self._codec(step.codec),
            limits.copies_after,
            step.partitions,
            step.pipelined,
        )

    def _codec(self, name: str) -> Codec:
        return next(each for each in self._profile.codecs if each.name == name)

    def _name(self, step: Step) -> str:
        plan = self._exchange(step)
        return f"{plan.method} {plan.tier}{f' + {plan.fast_tier}' if plan.fast_tier else ''}"

    # -- the whole job -------------------------------------------------------------------------------------------------

    def _estimated(self, steps: Mapping[int, Step], weight: float) -> JobPlan:
        """Estimate a job: stages of the same depth run at the same time, as far as workers are available."""
        profile = self._profile
        memory = profile.workers.memories[0]
        stored = self._stored(steps)
        depths: dict[int, int] = {}
        levels: dict[int, list[int]] = {}
        phases = {each.number: self._phases(each, steps) for each in self._query.stages}
        for stage in self._query.stages:
            depths[stage.number] = 1 + max((depths[each.stage] for each in stage.sources if not each.table), default=-1)
            levels.setdefault(depths[stage.number], []).append(stage.number)
        times: list[PhaseTime] = []
        flat: list[Phase] = []
        seconds: dict[int, float] = {}
        for depth in sorted(levels):
            own: list[PhaseTime] = []
            load_s = 0.0
            for number in levels[depth]:
                found = model.times_of(
                    phases[number],
                    profile,
                    memory,
                    stored,
                    copies_after=self._limits.copies_after,
                    starts=not flat,
                )
                seconds[number] = sum(each.seconds for each in found)
                load_s += sum(
                    time.seconds * (phase.paid if phase.lanes > 1 else phase.at_a_time)
                    for phase, time in zip(phases[number], found, strict=True)
                )
                own += found
                flat += phases[number]
            longest_s = max(seconds[number] for number in levels[depth])
            part = max(longest_s, load_s / profile.workers.most) / sum(each.seconds for each in own)
            times += [model.scaled(each, part) for each in own]
        dollars = model.dollars_of(flat, times, profile, memory, stored)
        stages = tuple(
            StagePlan(
                each.number,
                self.tasks(each, steps),
                self.size(each.number),
                steps.get(each.number),
                seconds[each.number],
                tuple(source.stage for source in each.sources if not source.table),
            )
            for each in self._query.stages
        )
        return JobPlan(model.sum_of(times, dollars, profile), stages, weight, self._limits, note=profile.note)

    def _stored(self, steps: Mapping[int, Step]) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for consumer in self._consumers:
            size = sum(self.size(each.stage) for each in consumer.sources if not each.table)
            for name, own in model.stored_by(Shuffle(size), self._exchange(steps[consumer.number])).items():
                found[name] = found.get(name, 0.0) + own
        return found

    def _phases(self, stage: Stage, steps: Mapping[int, Step]) -> tuple[Phase, ...]:
        """The phases of a stage: what its tasks read, compute and write, and what is done behind it."""
        profile, limits, size = self._profile, self._limits, self.size(stage.number)
        tasks = self.tasks(stage, steps)
        transfers: list[Transfer] = []
        work: list[Work] = []
        for source in stage.sources:
            if source.table:
                read = self._tables[source.table].size
                transfers.append(Transfer(limits.tier, tasks, read, is_write=False))
                work.append(Work(read, profile.workers.partition_bytes_per_s))
                continue
            writer = self._query.stages[source.stage]
            moved = self.size(source.stage)
            if self._is_divided(source):
                legs = self._legs(writer, steps)
                codec = self._codec(steps[stage.number].codec)
                transfers.append(legs.read)
            else:
                readers = tasks if source.whole else 1
                requests, moved = min(self.tasks(writer, steps), FAN_IN) * readers, moved * readers
                codec = NO_CODEC
                transfers.append(Transfer(limits.tier, requests, moved, is_write=False))
            work += model.combine_work(moved, codec, profile.workers)
        parallel = profile.workers.most
        if stage.exchange is None or not self._is_divided(self._reader(stage)):
            transfers.append(Transfer(limits.tier, tasks, max(size, 1.0), is_write=True))
            per_call = self.tasks_per_call(tasks)
            return (
                Phase(_phase(stage), tasks, min(parallel, tasks), tuple(transfers), tuple(work), per_call=per_call),
            )
        legs = self._legs(stage, steps)
        codec = self._codec(steps[self._query.consumer(stage.number).number].codec)
        work += model.partition_work(size, codec, profile.workers)
        own = model.in_rounds(_phase(stage), tasks, parallel, tuple(transfers), tuple(work), legs)
        own = dataclasses.replace(own, per_call=self.tasks_per_call(own.tasks))
        return own, *legs.between

    def _legs(self, writer: Stage, steps: Mapping[int, Step]) -> Legs:
        step = steps[self._query.consumer(writer.number).number]
        shuffle = Shuffle(max(self.size(writer.number), 1.0), writers=self.tasks(writer, steps))
        return model.legs_of(shuffle, self._exchange(step), self._profile.workers)

    def _reader(self, stage: Stage) -> Source:
        consumer = self._query.consumer(stage.number)
        return next(each for each in consumer.sources if each.stage == stage.number and not each.table)

    def _is_divided(self, source: Source) -> bool:
        return is_divided(self._query, source)


def is_divided(query: Query, source: Source) -> bool:
    """Whether each task of a stage reads a partition of its own."""
    if source.table:
        return False
    exchange = query.stages[source.stage].exchange
    return not source.whole and exchange is not None and exchange.kind != "single"


def _rank(weight: float) -> Callable[[float, float], tuple[float, float]]:
    """Orders by seconds and dollars."""
    if weight == _FASTEST:
        return lambda seconds, dollars: (seconds, dollars)
    return lambda seconds, dollars: (dollars + weight * seconds, seconds)


def _phase(stage: Stage) -> str:
    return f"stage {stage.number + 1}"


_HEADING: Final = ("", "method", "storage", "partitions", "rounds", "time (90 %)", "dollars", "limited by")
_STAGE_HEADING: Final = ("stage", "tasks", "rows from", "passes on", "seconds")


def _row(mark: str, plan: JobPlan) -> tuple[str, ...]:
    steps = plan.steps.values()
    widest = max(steps, key=lambda each: each.partitions, default=Step())
    methods = sorted({str(each.method) for each in steps}) or ["one stage"]
    memory = max((each.fast_bytes for each in steps), default=0.0)
    limits = plan.limits
    tiers = {limits.tier_of(each.method) for each in steps} or {limits.tier}
    storage = " and ".join(sorted(tiers)) + (f" + {limits.fast_tier} {bytes_text(memory)}" if memory else "")
    storage += f" + {limits.node_tier}" if Method.MERGED in methods else ""
    codecs = sorted({each.codec for each in steps if each.codec != NO_CODEC.name})
    rounds = max((each.repeats for each in plan.estimate.phases), default=1)
    return (
        mark,
        ", ".join(methods),
        ", ".join([storage, *codecs]),
        str(widest.partitions),
        str(rounds),
        seconds_text(plan.estimate),
        number_text(plan.estimate.dollars),
        plan.estimate.limited_by,
    )


def _stage_row(stage: StagePlan) -> tuple[str, ...]:
    if stage.step is None and stage.reads:
        source = f"stage {', '.join(str(number + 1) for number in stage.reads)}"
    elif stage.step is None:
        source = "tables"
    else:
        codec = "" if stage.step.codec == NO_CODEC.name else f", {stage.step.codec}"
        source = f"{stage.step.method}{', pipelined' if stage.step.pipelined else ''}{codec}"
    return (
        str(stage.number + 1),
        str(stage.tasks),
        source,
        bytes_text(stage.size),
        number_text(stage.seconds),
    )
