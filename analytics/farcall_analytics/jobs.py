"""Jobs: the stages of a query as calls of an executor.

The executor is one of Farcall, or any with ``submit`` and futures. A stage begins when all that it reads is there. What
a job has put into a storage is deleted at its end, however it ends; a program that is killed leaves it behind, and
another one may continue the job by its name: tasks that have committed do nothing then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import math
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Final, TypeVar

import pyarrow as pa

from farcall_analytics import engine
from farcall_analytics.attempts import GRACE_S, Attempts, Executor, StageReport
from farcall_analytics.exchange import Written
from farcall_analytics.model import Method
from farcall_analytics.parquet import Input, delete_other_parts
from farcall_analytics.passing import Way, find_written, from_stream, read_tables, to_stream, write_tables
from farcall_analytics.shaper import open_storage
from farcall_analytics.stages import Query, Source, Stage
from farcall_analytics.tasks import Done, Regroup, Rows, Task, delete_task, regroup_task, run_task, sample_task
from farcall_common.errors import ConfigurationError, FarcallError, ObjectGone
from farcall_common.objects.blocks import Part
from farcall_common.objects.node_blocks import SCHEME, is_on_nodes, name_on_node, node_of

T = TypeVar("T")

_SAMPLED_ROWS: Final = 100
"""Of each task, for each partition."""
_REPEATS: Final = 2
"""How often a stage is repeated because what it had written was lost."""
_NEEDS_MEMORY: Final = {Method.FAST, Method.HYBRID}
_JOB: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
METHODS: Final = (Method.SLOW, Method.COMBINED, Method.TWO_LEVEL, Method.FAST, Method.HYBRID, Method.DIRECT)
"""Those that jobs have."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a job is run.

    :param storage: the address by which tasks pass rows on, which all of them reach.
    :param fast_storage: that of a memory, for the methods ``fast`` and ``hybrid``; of ``direct``, ``node:BYTES`` if the
        blocks on a node are to take so many at most. What has no room there goes to ``storage``.
    :param method: of exchanges; ``slow``, ``combined``, ``two-level``, ``fast``, ``hybrid`` or ``direct``.
    :param fast_bytes: of a round of ``hybrid``.
    :param codec: of blocks: ``none``, ``lz4`` or ``zstd``.
    :param share_bytes: of a file that one task reads, about.
    :param partition_bytes: of rows that one task puts together, about.
    :param partitions: of each exchange; None: by ``partition_bytes``.
    :param most_partitions: of an exchange.
    :param task_memory: bytes from which a task uses the disk.
    :param copies_after: the part of a stage after which tasks that still run are started once more; None: never.
    :param retries: of a task that failed for another reason than the query or its input.
    :raises ConfigurationError: for a method that is none of these, or whose storage or size is missing, and for numbers
        that cannot be.
    :raises ValueError: for a storage or a codec that cannot be; see :class:`~farcall_analytics.passing.Way`.
    """

    storage: str = dataclasses.field(repr=False)  # it may have a password
    fast_storage: str = dataclasses.field(default="", repr=False)
    method: str = Method.COMBINED
    fast_bytes: float = 0.0
    codec: str = "none"
    share_bytes: float = 64e6
    partition_bytes: float = 64e6
    partitions: int | None = None
    most_partitions: int = 1_000
    task_memory: int | None = None
    copies_after: float | None = 0.75
    retries: int = 2

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigurationError(
                f"{self.method} is no method of exchange.", hint=f"Methods are {', '.join(METHODS)}."
            )
        for name in ("partitions", "most_partitions", "share_bytes", "partition_bytes", "task_memory"):
            value = getattr(self, name)
            if not (value is None or (isinstance(value, (int, float)) and value > 0)):
                raise ConfigurationError(f"{name}: expected a number above 0, got {value!r}.")
        if any(isinstance(value, float) for value in (self.partitions, self.most_partitions)):
            raise ConfigurationError("partitions, most_partitions: expected whole numbers.")
        if self.retries < 0 or not (self.copies_after is None or 0 < self.copies_after <= 1):
            raise ConfigurationError("retries: expected 0 or more; copies_after: a number between 0 and 1, or None.")
        if self.method in _NEEDS_MEMORY and not self.fast_storage:
            raise ConfigurationError(f"{self.method} needs memory.", hint="Set fast_storage='valkey://HOST:PORT/0'.")
        is_direct = self.method == Method.DIRECT
        if is_on_nodes(self.storage) or (self.fast_storage and is_on_nodes(self.fast_storage) != is_direct):
            raise ConfigurationError("node: is the fast_storage of the method direct, and that has no other one.")
        if self.method == Method.HYBRID and not self.fast_bytes > 0:
            raise ConfigurationError("hybrid needs the size of a round.", hint="Set fast_bytes=1e9, for instance.")
        self.ways("")

    def ways(self, job: str) -> tuple[Way, ...]:
        """The storages of a job: the first one, and the fast one if there is one."""
        first = Way(self.storage, self.method != Method.SLOW, self.codec, job)
        if self.method == Method.DIRECT:
            return first, Way(self.fast_storage or SCHEME, True, self.codec, job)
        return (first, Way(self.fast_storage, False, self.codec, job)) if self.fast_storage else (first,)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a job has done.

    :param paths: of its files, in order. ``rows``: of the result. ``table``: the result itself, if it went to no files.
    """

    paths: tuple[str, ...]
    rows: int
    table: pa.Table | None
    stages: tuple[StageReport, ...]
    seconds: float


Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, its tasks that are done, and all of them."""


def run(
    executor: Executor,
    query: Query,
    tables: Mapping[str, Input | pa.Table],
    settings: Settings,
    *,
    output: str = "",
    job: str | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run a query, and write its rows to files, or return them.

    :param tables: of the query, by name.
    :param output: a directory, or a prefix in a bucket, for files ``part-00000.parquet`` and so on; if it is not given,
        rows are returned.
    :param job: a name. If an earlier program with the same job was killed, what its tasks have committed counts.
    :raises ConfigurationError: if that job was begun with another query, other tables or other settings.
    """
    started = time.monotonic()
    if job is not None and not _JOB.fullmatch(job):
        raise ConfigurationError(
            f"{job!r} is no name of a job.",
            hint="Names have letters, digits, '-', '_' and '.', and begin with a letter.",
        )
    ways = settings.ways(job or f"farcall-{uuid.uuid4().hex}")
    own = _Job(executor, query, tables, output, settings, ways, progress)
    if job is not None:
        own.begin()
    with own.deleted():
        done = own.run()
        if output:
            delete_other_parts(output, own.paths)
        table = None if output else pa.concat_tables(read_tables(ways, _written(done), 0))
    reports = tuple(own.reports[number] for number in sorted(own.reports))
    return Outcome(tuple(own.paths), sum(each.rows for each in done), table, reports, time.monotonic() - started)


class _Job:
    def __init__(
        self,
        executor: Executor,
        query: Query,
        tables: Mapping[str, Input | pa.Table],
        output: str,
        settings: Settings,
        ways: tuple[Way, ...],
        progress: Progress | None,
    ) -> None:
        self.reports = {each.number: StageReport(each.number) for each in query.stages}
        self.paths: list[str] = []
        self._losers: list[Future[Done]] = []
        self._nodes = {""}  # in whose memory tasks may have written
        self._executor = executor
        self._query = query
        self._tables = tables
        self._output = output.rstrip("/")
        self._settings = settings
        self._ways = ways
        self._progress = progress or (lambda *_: None)
        self._may_be_done = False
        self._written: dict[int, list[Written]] = {}
        self._partitions: dict[int, int] = {}
        self._given: dict[tuple[str, ...], list[Written]] = {}

    def begin(self) -> None:
        """Begin a job, or continue it."""
        own = self._digest()
        if self._kept("plan", own) != own:
            raise ConfigurationError(
                f"{self._ways[0].job} was begun with another query, other tables or other settings.",
                hint="Give this one another name.",
            )

    def run(self) -> list[Done]:
        """Run all stages, one after the other; what the tasks of the last one have done."""
        done: list[Done] = []
        for stage in self._query.stages:
            done = self._run_stage(stage)
        return done

    # -- one stage -----------------------------------------------------------------------------------------------------

    def _run_stage(self, stage: Stage) -> list[Done]:
        """Run a stage. If what it reads is lost, as when a memory has evicted it, the stages before it are repeated."""
        while True:
            try:
                return self._run_once(stage)
            except ObjectGone:
                sources = [self._query.stages[each.stage] for each in stage.sources if not each.table]
                if not sources or any(self.reports[each.number].repeats >= _REPEATS for each in sources):
                    raise
                for each in sources:
                    self.reports[each.number].repeats += 1
                    self._run_stage(each)

    def _run_once(self, stage: Stage) -> list[Done]:
        started = time.monotonic()
        report = self.reports[stage.number]
        tasks = self._tasks(stage)
        report.tasks, report.rows, report.size = len(tasks), 0, 0
        if stage.exchange is not None and stage.exchange.kind == "range" and tasks[0].partitions > 1:
            bounds = self._bounds(stage, tasks)
            tasks = [task._replace(bounds=bounds) for task in tasks]
            report.sampled_s += time.monotonic() - started
        name = self._name(stage.number)
        self._progress(name, 0, len(tasks))
        if stage.exchange is None or tasks[0].partitions == 1:
            done = self._attempt(run_task, tasks, report, name)
            self._written[stage.number] = _written(done)
        else:
            done, self._written[stage.number] = self._exchange(tasks, report, name)
        report.seconds += time.monotonic() - started
        return done

    def _attempt(
        self,
        function: Callable[..., Done],
        tasks: Sequence[Task | Regroup],
        report: StageReport,
        name: str,
        *,
        of: int = 0,
    ) -> list[Done]:
        def progress(count: int) -> None:
            self._progress(name, count, of or len(tasks))

        attempts = Attempts(
            self._executor,
            function,
            tasks,
            copies_after=self._settings.copies_after,
            retries=self._settings.retries,
            report=report,
            progress=progress,
        )
        try:
            done = attempts.run()
        finally:
            self._losers += attempts.losers
            self._note_nodes(attempts.done)
        report.rows += sum(each.rows for each in done)
        report.size += sum(each.size for each in done)
        report.reused += sum(each.reused for each in done)
        report.busy_s += sum(each.busy_s for each in done)
        return done

    def _name(self, number: int) -> str:
        """Of a stage, for people."""
        return f"stage {number + 1} of {len(self._query.stages)}"

    def _bounds(self, stage: Stage, tasks: Sequence[Task]) -> bytes:
        """The bounds between ranges, as an Arrow stream."""
        assert stage.exchange is not None
        partitions = tasks[0].partitions
        own = [task._replace(sampled=_SAMPLED_ROWS * partitions) for task in tasks]
        samples = self._attempt(sample_task, own, self.reports[stage.number], f"{self._name(stage.number)}, sample")
        tables = [from_stream(each.sample) for each in samples]
        bounds = engine.bounds_of(tables, stage.exchange.directions, partitions)
        return self._kept(f"bounds-{stage.number}", to_stream(bounds))

    # -- exchange ------------------------------------------------------------------------------------------------------

    def _exchange(self, tasks: list[Task], report: StageReport, name: str) -> tuple[list[Done], list[Written]]:
        """Run tasks whose rows are divided among several others."""
        method = self._settings.method
        if method == Method.HYBRID:
            return self._in_rounds(tasks, report, name)
        if method in (Method.FAST, Method.DIRECT):
            tasks = [task._replace(to=1) for task in tasks]
        done = self._attempt(run_task, tasks, report, name)
        if method != Method.TWO_LEVEL:
            return done, _written(done)
        groups = _parts(_written(done), math.isqrt(len(done) - 1) + 1)
        regroups = [
            regroup
            for number, group in enumerate(groups)
            for regroup in self._regroups(f"{report.number}-{report.repeats}-g{number}", group, tasks[0].partitions)
        ]
        return done, _written(self._attempt(regroup_task, regroups, report, f"{name}, regroup"))

    def _in_rounds(self, tasks: list[Task], report: StageReport, name: str) -> tuple[list[Done], list[Written]]:
        """Run tasks in rounds, whose rows go through the memory; what each round has made of them goes to the other
        storage."""
        size = self._query.stages[report.number].size
        all_done: list[Done] = []
        runs: list[Written] = []
        for number, part in enumerate(_parts(tasks, math.ceil(size / self._settings.fast_bytes))):
            for repeat in range(_REPEATS + 1):
                try:
                    done, run_ = self._round(part, f"{report.number}-{report.repeats}-r{number}-{repeat}", report, name)
                    break
                except _LostRound:
                    if repeat == _REPEATS:
                        raise
            all_done += done
            runs += run_
            self._progress(name, len(all_done), len(tasks))
        return all_done, runs

    def _round(
        self, tasks: Sequence[Task], prefix: str, report: StageReport, name: str
    ) -> tuple[list[Done], list[Written]]:
        count = tasks[0].partitions
        if self._may_be_done:  # its blocks in memory may be deleted already
            kept = [
                find_written(self._ways[:1], each.name, each.last - each.first, first=each.first)
                for each in self._regroups(prefix, (), count)
            ]
            run_ = [each for each in kept if each is not None]
            if len(run_) == len(kept):
                report.reused += len(tasks)
                return [Done(None, 0, 0, reused=True) for _ in tasks], run_
        own = [task._replace(name=f"{prefix}/{task.name}", to=1) for task in tasks]
        done = self._attempt(run_task, own, report, name, of=report.tasks)
        try:
            regroups = self._regroups(prefix, _written(done), count)
            regrouped = self._attempt(regroup_task, regroups, report, f"{name}, regroup")
        except ObjectGone as error:
            report.repeats += 1
            raise _LostRound(str(error)) from error
        for way in self._ways:
            with open_storage(way.url) as blocks:
                blocks.delete_below(f"{way.job}/{prefix}/")
        return done, _written(regrouped)

    def _regroups(self, prefix: str, written: Sequence[Written], partitions: int) -> list[Regroup]:
        """Tasks that put together what some have written, each for some partitions."""
        bounds = [part[0] for part in _parts(range(partitions), math.isqrt(partitions - 1) + 1)]
        return [
            Regroup(f"{prefix}-{first}", "", tuple(written), first, last, self._ways, self._may_be_done)
            for first, last in itertools.pairwise([*bounds, partitions])
        ]

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _tasks(self, stage: Stage) -> list[Task]:
        partitions = 1
        if stage.exchange is not None and stage.exchange.kind != "single":
            partitions = self._partitions_of(self._query.consumer(stage.number))
        tasks = [
            Task(
                name=f"{stage.number}-{self.reports[stage.number].repeats}-{number}",
                attempt="",
                seed=stage.number * 1_000_003 + number,
                fragment=stage.fragment,
                schema=stage.schema,
                rows=self._rows(stage, number),
                exchange=stage.exchange,
                ways=self._ways,
                partitions=partitions,
                memory=self._settings.task_memory,
                may_be_done=self._may_be_done,
            )
            for number in range(self._count(stage))
        ]
        if stage.exchange is None and self._output:
            self.paths = [f"{self._output}/part-{number:05d}.parquet" for number in range(len(tasks))]
            tasks = [task._replace(output=path) for task, path in zip(tasks, self.paths, strict=True)]
        return tasks

    def _count(self, stage: Stage) -> int:
        for source in stage.sources:
            if source.table:
                table = self._tables[source.table]
                return len(table.shares) if isinstance(table, Input) else 1
        if any(self._is_divided(source) for source in stage.sources):
            return self._partitions_of(stage)
        return 1

    def _is_divided(self, source: Source) -> bool:
        """Whether each task of a stage reads a partition of its own."""
        exchange = self._query.stages[source.stage].exchange
        return not source.whole and exchange is not None and exchange.kind != "single"

    def _partitions_of(self, stage: Stage) -> int:
        """Into how many partitions rows are divided for a stage."""
        found = self._partitions.get(stage.number)
        if found is None:
            size = sum(self._query.stages[each.stage].size for each in stage.sources if not each.table)
            wanted = self._settings.partitions or math.ceil(size / self._settings.partition_bytes)
            found = self._partitions[stage.number] = min(max(1, wanted), self._settings.most_partitions)
        return found

    def _rows(self, stage: Stage, number: int) -> tuple[Rows, ...]:
        found = []
        for source in stage.sources:
            table = self._tables.get(source.table)
            if isinstance(table, Input):
                found.append(Rows(source.name, table.shares[number], source.columns))
            elif table is not None:
                found.append(Rows(source.name, written=tuple(self._give(source, table))))
            else:
                partition = number if self._is_divided(source) else 0
                those = tuple(each for each in self._written[source.stage] if each.has(partition))
                order = source.keys, source.directions
                found.append(Rows(source.name, None, (), those, partition, *order))
        return tuple(found)

    def _give(self, source: Source, table: pa.Table) -> list[Written]:
        """Put columns of a table of the program into the storage."""
        key = (source.table, *source.columns)
        if key not in self._given:
            own = [table.select(list(source.columns))]
            name = f"given-{len(self._given)}"
            self._given[key] = [write_tables(self._ways, 0, name, uuid.uuid4().hex, own)]
        return self._given[key]

    # -- the end -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def deleted(self) -> Iterator[None]:
        """Delete what is in the storages at the end, however it comes."""
        try:
            yield
        finally:
            ended, _ = wait(self._losers, timeout=GRACE_S)
            self._note_nodes([each.result() for each in ended if not each.cancelled() and each.exception() is None])
            for way in self._ways:
                if is_on_nodes(way.url):
                    self._delete_on_nodes(way)
                    continue
                with open_storage(way.url) as blocks:
                    blocks.delete_below(f"{way.job}/")

    def _note_nodes(self, done: Sequence[Done]) -> None:
        self._nodes.update(node_of(each.written.name) for each in done if each.written is not None)

    def _delete_on_nodes(self, way: Way) -> None:
        """Let a task delete blocks. If none can run any more, their nodes delete them after a day."""
        with contextlib.suppress(RuntimeError, FarcallError):
            names = [name_on_node(node, f"{way.job}/") for node in sorted(self._nodes)]
            wait([self._executor.submit(delete_task, way.url, names)], timeout=GRACE_S)

    # -- jobs that are continued ---------------------------------------------------------------------------------------

    def _kept(self, name: str, data: bytes) -> bytes:
        """Keep something for a program that continues the job; what an earlier one has kept, if it has."""
        way = self._ways[0]
        with open_storage(way.url) as blocks:
            if blocks.create(f"{way.job}/{name}", [data]):
                return data
            self._may_be_done = True
            return bytes(blocks.read(Part(f"{way.job}/{name}")))

    def _digest(self) -> bytes:
        """What differs between jobs that do not have the same tasks."""
        found = hashlib.sha256(repr((self._settings, self._output)).encode())
        for stage in self._query.stages:
            found.update(stage.fragment)
            found.update(repr((stage.exchange, stage.size)).encode())
            for table in (self._tables[source.table] for source in stage.sources if source.table):
                found.update(repr(table.shares).encode() if isinstance(table, Input) else to_stream(table))
        return found.digest()


class _LostRound(ObjectGone):
    """What a round had put into the memory is not there any more."""


def _written(done: Sequence[Done]) -> list[Written]:
    return [each.written for each in done if each.written is not None]


def _parts(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Items in so many parts, or as many as there are items, of about the same size."""
    count = max(1, min(count, len(items)))
    bounds = [number * len(items) // count for number in range(count + 1)]
    return [items[start:end] for start, end in itertools.pairwise(bounds)]
