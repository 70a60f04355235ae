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
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed, wait
from typing import Final, TypeVar

import msgspec
import pyarrow as pa

from farcall_analytics import engine
from farcall_analytics.attempts import GRACE_S, Attempts, Executor
from farcall_analytics.bars import Progress
from farcall_analytics.exchange import Written, checked, unchecked
from farcall_analytics.job_plans import FAN_IN, JobPlan, JobPlanner, Step, is_divided
from farcall_analytics.model import Method, lanes_of, runs_of, square_root
from farcall_analytics.parquet import Input, delete_other_parts
from farcall_analytics.passing import (
    Way,
    begin_job,
    delete_blocks,
    end_job,
    find_written,
    from_stream,
    read_tables,
    take_output,
    to_stream,
    write_tables,
)
from farcall_analytics.reports import StageReport, report_text
from farcall_analytics.settings import Settings
from farcall_analytics.stages import Query, Source, Stage
from farcall_analytics.tasks import (
    Chain,
    Done,
    Regroup,
    Rows,
    Task,
    delete_task,
    regroup_task,
    run_chain,
    run_task,
    sample_task,
)
from farcall_common.errors import ConfigurationError, FarcallError, ObjectGone
from farcall_common.objects import node_blocks
from farcall_common.objects.blocks import Part
from farcall_common.objects.node_blocks import name_on_node, node_of, open_storage

T = TypeVar("T")

_SAMPLED_ROWS: Final = 100
"""Rows that each task samples for each partition."""
_REPEATS: Final = 2
"""Most repeats of a stage or round whose blocks were lost."""
_JOB: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}")


@dataclasses.dataclass(frozen=True, repr=False)
class Outcome:
    """Result of a job.

    :param paths: paths of the written files, in order. ``rows``: number of rows. ``table``: the rows, unless files
        have them.
    :param plan: plan from before the job began.
    """

    paths: tuple[str, ...]
    rows: int
    table: pa.Table | None
    stages: tuple[StageReport, ...]
    seconds: float
    plan: JobPlan

    def __repr__(self) -> str:
        return f"<Outcome {self.rows:,} rows, {len(self.paths)} files, {self.seconds:.2f} s>"

    @property
    def report(self) -> str:
        """A table: what was predicted beside what was measured, by stage and in all."""
        return report_text(self.plan, self.stages, self.seconds)


def run(
    executor: Executor,
    query: Query,
    tables: Mapping[str, Input | pa.Table],
    settings: Settings,
    planner: JobPlanner,
    *,
    output: str = "",
    job: str | None = None,
    progress: Progress = lambda *_: None,
) -> Outcome:
    """Run a query, and write its rows to files, or return them.

    :param tables: of the query, by name.
    :param planner: of this query, which has made its plan.
    :param output: a directory, or a prefix in a bucket, for files ``part-00000.parquet`` and so on; if it is not given,
        rows are returned.
    :param job: a name. If an earlier program with the same job was killed, what its tasks have committed counts.
    :raises ConfigurationError: if that job was begun with another query, other tables or other settings.
    """
    started = time.monotonic()
    engine.require_threads()
    if job is not None and not _JOB.fullmatch(job):
        raise ConfigurationError(
            f"Invalid job name {job!r}.",
            hint="Names have up to 100 letters, digits, '-', '_' and '.', and begin with a letter.",
        )
    ways = begin_job(settings.ways(job or f"farcall-{uuid.uuid4().hex}"))
    own = _Job(executor, query, tables, output, settings, planner, ways, progress)
    if job is not None:
        own.begin()
    with own.deleted():
        if output:
            done, table = own.run(), None
            delete_other_parts(output, own.paths)
        else:
            done, table = own.run_and_read()
    reports = tuple(own.reports[number] for number in sorted(own.reports))
    rows = sum(each.rows for each in done)
    return Outcome(tuple(own.paths), rows, table, reports, time.monotonic() - started, planner.made)


class _Job:
    def __init__(
        self,
        executor: Executor,
        query: Query,
        tables: Mapping[str, Input | pa.Table],
        output: str,
        settings: Settings,
        planner: JobPlanner,
        ways: tuple[Way, ...],
        progress: Progress,
    ) -> None:
        self.reports = {each.number: StageReport(each.number) for each in query.stages}
        self.paths: list[str] = []
        self._again = dict.fromkeys(self.reports, 0)  # how often a stage was repeated for others
        self._losers: list[Future[Done]] = []
        self._nodes: set[str] = set()  # in whose memory tasks may have written
        self._executor = executor
        self._query = query
        self._tables = tables
        self._output = output.rstrip("/")
        self._settings = settings
        self._planner = planner
        self._ways = ways
        self._shown = progress
        self._ended: dict[str, int] = {}  # tasks, by what people see of them
        self._has_memory = len(ways) > 2  # beside the first one and that of nodes
        self._program = uuid.uuid4().hex[:8]  # differs in one that continues the job
        self._has_name = False
        self._may_be_done = False
        self._written: dict[int, list[Written]] = {}
        self._steps: dict[int, Step] = {}
        self._given: dict[tuple[str, ...], list[Written]] = {}
        self._lock = threading.RLock()
        self._stopped = threading.Event()

    def begin(self) -> None:
        """Begin a job, or continue it."""
        self._has_name = True
        own = self._digest()
        if self._kept("plan", own) != own:
            name = self._ways[0].job.partition("/")[0]
            raise ConfigurationError(
                f"{name} was begun with another query, other files, another output or other settings, and was killed.",
                hint=f"Give this job another name, or delete what is below {name}/ in the storage.",
            )

    def run(self) -> list[Done]:
        """Run all stages; what the tasks of the last one have done."""
        return self._run_stage(self._query.stages[-1])

    def run_and_read(self) -> tuple[list[Done], pa.Table]:
        """Run all stages; what the tasks of the last one have done, and their rows. If these are lost, it is
        repeated."""
        done = self.run()
        last = self._query.stages[-1]
        while True:
            try:
                return done, pa.concat_tables(read_tables(self._ways, _written(done), 0))
            except ObjectGone:
                if self._again[last.number] >= _REPEATS:
                    raise
                self._again[last.number] += 1
                self.reports[last.number].repeats += 1
                done = self._run_again(last, self._sources(last))

    # -- one stage -----------------------------------------------------------------------------------------------------

    def _run_stage(self, stage: Stage) -> list[Done]:
        """Run a stage behind those that it reads from, which run at the same time.

        If what it reads is lost, as when a memory has evicted it, the stages before it are repeated.
        """
        sources = self._sources(stage)
        self._run_all(self._run_stage, sources)
        return self._run_again(stage, sources)

    def _sources(self, stage: Stage) -> list[Stage]:
        """The stages that a stage reads from."""
        return [self._query.stages[each.stage] for each in stage.sources if not each.table]

    def _run_all(self, run: Callable[[Stage], object], stages: Sequence[Stage]) -> None:
        """If one fails, others are stopped."""
        if len(stages) <= 1:
            for stage in stages:
                run(stage)
            return
        with ThreadPoolExecutor(len(stages)) as threads:
            futures = [threads.submit(run, stage) for stage in stages]
            try:
                for future in as_completed(futures):
                    if future.exception() is not None:
                        self._stopped.set()
            except BaseException:
                self._stopped.set()
                raise
        errors = [error for error in (each.exception() for each in futures) if error is not None]
        if errors:
            raise next((each for each in errors if not isinstance(each, CancelledError)), errors[0])

    def _run_again(self, stage: Stage, sources: Sequence[Stage]) -> list[Done]:
        while True:
            try:
                return self._run_once(stage)
            except ObjectGone:
                if not sources or any(self._again[each.number] >= _REPEATS for each in sources):
                    raise
                for each in sources:
                    self._again[each.number] += 1
                    self.reports[each.number].repeats += 1
                    self._run_again(each, self._sources(each))

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
        self._ended[name] = 0
        self._progress(name, 0, len(tasks))
        if stage.exchange is None or tasks[0].partitions == 1:
            if self._is_read_by_all(stage) and self._has_memory and not report.repeats:
                tasks = [task._replace(to=self._memory(is_on_nodes=False)) for task in tasks]
            done = self._attempt(run_task, tasks, report, name)
            try:
                self._written[stage.number] = self._reduced(stage, tasks[0], _written(done), name)
            except ObjectGone:
                if report.repeats:
                    raise
                report.repeats += 1
                return self._run_once(stage)
        else:
            done, self._written[stage.number] = self._exchange(stage, tasks, report, name)
        report.seconds += time.monotonic() - started
        self._measure(stage, done)
        return done

    def _is_read_by_all(self, stage: Stage) -> bool:
        """Whether each task of the next stage reads all rows."""
        if stage.exchange is None:
            return False
        sources = self._query.consumer(stage.number).sources
        return any(each.whole for each in sources if each.stage == stage.number and not each.table)

    def _reduced(self, stage: Stage, like: Task, written: list[Written], name: str) -> list[Written]:
        """Merge the blocks of many tasks into few, by a tree of tasks.

        :param like: one of the tasks that wrote.
        """
        report = self.reports[stage.number]
        rows = report.rows
        for level in itertools.count():
            if len(written) <= FAN_IN or not (stage.combiner or self._is_read_by_all(stage)):
                break
            parts = _parts(written, math.ceil(len(written) / FAN_IN))
            names = [f"{stage.number}-{self._generation(stage)}-t{level}-{number}" for number in range(len(parts))]
            if stage.combiner:
                reads = [(Rows(stage.combined, written=tuple(part)),) for part in parts]
                tasks = [
                    like._replace(name=own, fragment=stage.combiner, rows=each)
                    for own, each in zip(names, reads, strict=True)
                ]
                done = self._attempt(run_task, tasks, report, f"{name}, reduce")
            else:
                moves = [
                    each._replace(to=like.to)
                    for own, part in zip(names, parts, strict=True)
                    for each in self._regroups(own, part, 1, 1)
                ]
                done = self._attempt(regroup_task, moves, report, f"{name}, regroup")
            written = _written(done)
        report.rows = rows
        return written

    def _measure(self, stage: Stage, done: Sequence[Done]) -> None:
        """Tell the planner how much a stage has passed on, and how fast."""
        if stage.exchange is None or any(each.reused for each in done):
            return
        with self._lock:
            self._planner.measured(stage.number, sum(each.raw_size for each in done))
            if not any(each.table for each in stage.sources):
                read = sum(each.size for source in stage.sources for each in self._written[source.stage])
                self._planner.measured_reads(len(done), read, sum(each.read_s for each in done))
            if self._step_behind(stage).method in (Method.COMBINED, Method.TWO_LEVEL):
                written = sum(each.size for each in done)
                self._planner.measured_writes(len(done), written, sum(each.written_s for each in done))

    def _attempt(
        self,
        function: Callable[..., Done],
        tasks: Sequence[Task | Regroup],
        report: StageReport,
        name: str,
        *,
        of: int = 0,
    ) -> list[Done]:
        """Run tasks.

        :param name: for people. ``of``: how many there are with those of other rounds, which count, too.
        """
        size = self._planner.tasks_per_call(len(tasks)) if function is run_task else 1
        units: Sequence[Task | Chain | Regroup] = tasks
        if size > 1:
            function = run_chain
            units = [Chain(own[0].name, tuple(own)) for own in _parts(tasks, math.ceil(len(tasks) / size))]  # type: ignore[arg-type]

        if not of:
            self._ended[name] = 0

        def progress(more: int) -> None:
            self._progress(name, more, of or len(tasks))

        attempts = Attempts(
            self._executor,
            function,
            units,
            copies_after=self._settings.copies_after,
            retries=self._settings.retries,
            report=report,
            progress=progress,
            stopped=self._stopped,
        )
        try:
            done = [own for each in attempts.run() for own in each.chain or (each,)]
        finally:
            self._losers += attempts.losers
            self._note_nodes(attempts.done)
        with self._lock:  # rounds may be at the same time
            report.rows += sum(each.rows for each in done)
            report.size += sum(each.size for each in done)
            report.reused += sum(each.reused for each in done)
            report.busy_s += sum(each.busy_s for each in done)
        return done

    def _progress(self, name: str, more: int, tasks: int) -> None:
        """Report that ``more`` tasks have ended. Tasks of a repeated round count again."""
        with self._lock:
            self._ended[name] = min(self._ended.get(name, 0) + more, tasks)
            self._shown(name, self._ended[name], tasks)

    def _name(self, number: int) -> str:
        """Return the name of a stage, for people."""
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

    def _exchange(
        self, stage: Stage, tasks: list[Task], report: StageReport, name: str
    ) -> tuple[list[Done], list[Written]]:
        """Run tasks whose rows are divided among several others."""
        step = self._step_behind(stage)
        if step.method is Method.HYBRID:
            return self._in_rounds(stage, tasks, step, report, name)
        if step.method is Method.MERGED:
            return self._merged(stage, tasks, report, name)
        if step.method in (Method.FAST, Method.DIRECT):
            to = self._memory(is_on_nodes=step.method is Method.DIRECT)
            tasks = [task._replace(to=to) for task in tasks]
        done = self._attempt(run_task, tasks, report, name)
        if step.method is not Method.TWO_LEVEL:
            return done, _written(done)
        prefix = f"{report.number}-{self._generation(stage)}-g"
        groups = {
            f"{prefix}{number}": each for number, each in enumerate(_parts(_written(done), square_root(len(done))))
        }
        return done, self._in_groups(groups, tasks[0].partitions, report, name)

    def _in_groups(
        self, groups: Mapping[str, Sequence[Written]], partitions: int, report: StageReport, name: str
    ) -> list[Written]:
        """Put what the tasks of each group have written into few blocks of the first storage."""
        per_block = math.ceil(partitions / square_root(partitions))
        regroups = [
            regroup
            for prefix, group in groups.items()
            for regroup in self._regroups(prefix, group, partitions, per_block)
        ]
        return _written(self._attempt(regroup_task, regroups, report, f"{name}, regroup"))

    def _merged(
        self, stage: Stage, tasks: list[Task], report: StageReport, name: str
    ) -> tuple[list[Done], list[Written]]:
        """Run tasks whose rows go to the memory of their nodes; those of a node are put together in the other storage.
        If a node is lost meanwhile, all is done again, and without the memory in the end."""
        to = self._memory(is_on_nodes=True)
        while True:
            if report.repeats >= _REPEATS:
                to = 0  # without the memory
            # what an earlier program has put together may be of other rows than these tasks write
            prefix = f"{report.number}-{self._generation(stage)}-{self._program}"
            own = [each._replace(name=f"{prefix}/{each.name}", to=to) for each in tasks]
            done = self._attempt(run_task, own, report, name)
            written = _written(done)
            nodes: dict[str, list[Written]] = {}
            for each in written:
                if each.storage:
                    nodes.setdefault(node_of(each.name), []).append(each)
            groups = {f"{prefix}-{number}": group for number, group in enumerate(nodes.values())}
            try:
                merged = self._in_groups(groups, tasks[0].partitions, report, name)
            except ObjectGone:
                report.repeats += 1
                report.rows, report.size = 0, 0
                continue
            self._delete_on_nodes(f"{prefix}/")
            return done, [*(each for each in written if not each.storage), *merged]

    def _in_rounds(
        self, stage: Stage, tasks: list[Task], step: Step, report: StageReport, name: str
    ) -> tuple[list[Done], list[Written]]:
        """Run tasks in rounds, whose rows go through the memory; what each round has made of them goes to the other
        storage."""

        def run(number: int, part: Sequence[Task]) -> tuple[list[Done], list[Written]]:
            for repeat in itertools.count():
                try:
                    prefix = f"{report.number}-{self._generation(stage)}-r{number}-{repeat}"
                    return self._round(part, prefix, report, name)
                except _LostRound:
                    if repeat == _REPEATS:
                        raise
            raise AssertionError

        self._ended[f"{name}, regroup"] = 0
        futures: list[Future[tuple[list[Done], list[Written]]]] = []
        with ThreadPoolExecutor(lanes_of(step.rounds, len(tasks), pipelined=step.pipelined)) as lanes:
            try:
                futures += [lanes.submit(run, *each) for each in enumerate(_parts(tasks, step.rounds))]
                for each in as_completed(futures):
                    each.result()  # what fails is seen at once
            except BaseException as error:
                for each in futures:
                    each.cancel()
                if not isinstance(error, ObjectGone):  # else what they read is made once more
                    self._stopped.set()
                raise
        found = [each.result() for each in futures]
        return [each for done, _ in found for each in done], [each for _, written in found for each in written]

    def _round(
        self, tasks: Sequence[Task], prefix: str, report: StageReport, name: str
    ) -> tuple[list[Done], list[Written]]:
        count = tasks[0].partitions
        per_block = math.ceil(count / runs_of(len(tasks), count))
        if self._may_be_done:  # its blocks in memory may be deleted already
            kept = [
                find_written(self._ways, 0, each.name, each.last - each.first, first=each.first)
                for each in self._regroups(prefix, (), count, per_block)
            ]
            run_ = [each for each in kept if each is not None]
            if len(run_) == len(kept):
                report.reused += len(tasks)
                self._progress(name, len(tasks), report.tasks)
                return [Done(None, 0, 0, reused=True) for _ in tasks], run_
            for end in ("/", "-"):
                delete_blocks(self._ways, f"{prefix}{end}")
            # what was put together may be of other rows than these tasks write
            prefix = f"{prefix}-{self._program}"
        to = self._memory(is_on_nodes=False)
        own = [task._replace(name=f"{prefix}/{task.name}", to=to, per_block=per_block) for task in tasks]
        done = self._attempt(run_task, own, report, name, of=report.tasks)
        try:
            regroups = self._regroups(prefix, _written(done), count, per_block)
            of = len(regroups) * math.ceil(report.tasks / len(tasks))
            regrouped = self._attempt(regroup_task, regroups, report, f"{name}, regroup", of=of)
        except ObjectGone as error:
            report.repeats += 1
            raise _LostRound(str(error)) from error
        delete_blocks(self._ways, f"{prefix}/")
        return done, _written(regrouped)

    def _regroups(self, prefix: str, written: Sequence[Written], partitions: int, per_block: int) -> list[Regroup]:
        """Tasks that put together what some have written, each for so many partitions."""
        bounds = [(first, min(first + per_block, partitions)) for first in range(0, partitions, per_block)]
        return [
            Regroup(
                f"{prefix}-{first}",
                tuple(own for each in written for own in each.within(first, last)),
                first,
                last,
                self._ways,
                self._may_be_done,
            )
            for first, last in bounds
        ]

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _tasks(self, stage: Stage) -> list[Task]:
        behind = self._step_behind(stage)
        name = f"{stage.number}-{self._generation(stage)}"
        if read := sorted(
            each.name for source in stage.sources if not source.table for each in self._written[source.stage]
        ):
            # what an earlier program has made of other blocks does not count
            name += f"-{hashlib.sha256(repr(read).encode()).hexdigest()[:8]}"
        with self._lock:
            count = self._planner.tasks(stage)
        memory = self._settings.task_memory
        tasks = [
            Task(
                name=f"{name}-{number}",
                seed=stage.number * 1_000_003 + number,
                fragment=stage.fragment,
                schema=stage.schema,
                rows=self._rows(stage, number),
                exchange=stage.exchange,
                ways=self._ways_of(behind),
                partitions=behind.partitions,
                memory=None if memory is None else int(memory),
                may_be_done=self._may_be_done,
            )
            for number in range(count)
        ]
        if stage.exchange is None and self._output:
            self.paths = [f"{self._output}/part-{number:05d}.parquet" for number in range(len(tasks))]
            compression = self._settings.compression
            tasks = [
                task._replace(output=path, compression=compression)
                for task, path in zip(tasks, self.paths, strict=True)
            ]
        return tasks

    def _generation(self, stage: Stage) -> int:
        """How often a stage, or one before it, was repeated: what it reads may differ then."""
        return self.reports[stage.number].repeats + sum(map(self._generation, self._sources(stage)))

    def _step_behind(self, stage: Stage) -> Step:
        """How the rows of a stage are exchanged."""
        if stage.exchange is None or stage.exchange.kind == "single":
            return Step()
        return self._step(self._query.consumer(stage.number))

    def _step(self, consumer: Stage) -> Step:
        """How a stage gets its rows. A program that continues a job does as the one before it."""
        with self._lock:
            if consumer.number not in self._steps:
                found = self._planner.step(consumer.number)
                if self._has_name:
                    own = self._kept(f"step-{consumer.number}", msgspec.msgpack.encode(found))
                    found = msgspec.msgpack.decode(own, type=Step)
                    self._planner.keep(consumer.number, found)
                self._steps[consumer.number] = found
            return self._steps[consumer.number]

    def _ways_of(self, step: Step) -> tuple[Way, ...]:
        first, *others = self._ways
        own = dataclasses.replace(first, combines=step.method is not Method.SLOW, codec=step.codec)
        return (own, *(dataclasses.replace(each, codec=step.codec) for each in others))

    def _rows(self, stage: Stage, number: int) -> tuple[Rows, ...]:
        found = []
        for source in stage.sources:
            table = self._tables.get(source.table)
            if isinstance(table, Input):
                found.append(Rows(source.name, table.shares[number], source.columns, sampled=source.sampled))
            elif table is not None:
                found.append(Rows(source.name, written=tuple(self._give(source, table))))
            else:
                partition = number if is_divided(self._query, source) else 0
                those = tuple(
                    own
                    for each in self._written[source.stage]
                    if each.has(partition)
                    for own in each.within(partition, partition + 1)
                )
                order = source.keys, source.directions
                found.append(Rows(source.name, None, (), those, partition, *order))
        return tuple(found)

    def _give(self, source: Source, table: pa.Table) -> list[Written]:
        """Put columns of a table of the program into the storage."""
        key = (source.table, *source.columns)
        with self._lock:
            if key not in self._given:
                own = [table.select(list(source.columns))]
                place = list(self._tables).index(source.table)  # the same one in a program that continues the job
                name = f"given-{place}-{hashlib.sha256(repr(source.columns).encode()).hexdigest()[:16]}"
                self._given[key] = [write_tables(self._ways, 0, name, own)]
            return self._given[key]

    # -- the end -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def deleted(self) -> Iterator[None]:
        """Delete what is in the storages at the end, however it comes. If the job fails, its error counts, not another
        one of the deletion."""
        try:
            if self._output:
                take_output(self._ways, self._output)
            yield
        except BaseException:
            with contextlib.suppress(FarcallError, OSError):
                self._delete()
            raise
        self._delete()

    def _delete(self) -> None:
        ended, _ = wait(self._losers, timeout=GRACE_S)
        self._note_nodes([each.result() for each in ended if not each.cancelled() and each.exception() is None])
        try:
            end_job(self._ways, self._output)
        finally:
            self._delete_on_nodes()

    def _note_nodes(self, done: Sequence[Done]) -> None:
        """Remember where tasks have written to the memory of their nodes."""
        flat = [own for each in done for own in each.chain or (each,)]
        written = [each for each in _written(flat) if node_blocks.is_on_nodes(self._ways[each.storage].url)]
        self._nodes.update(node_of(each.name) for each in written)

    def _delete_on_nodes(self, prefix: str = "") -> None:
        """Let a task delete blocks. If none can run any more, their nodes delete them after a day."""
        if not self._nodes:
            return
        way = self._ways[self._memory(is_on_nodes=True)]
        with contextlib.suppress(RuntimeError, FarcallError):
            names = [name_on_node(node, f"{way.job}/{prefix}") for node in sorted(self._nodes)]
            wait([self._executor.submit(delete_task, way.url, names)], timeout=GRACE_S)

    def _memory(self, *, is_on_nodes: bool) -> int:
        """The number of the storage that is the memory of nodes, or that is a memory which all reach."""
        for number, way in enumerate(self._ways):
            if number and node_blocks.is_on_nodes(way.url) is is_on_nodes:
                if is_on_nodes:
                    self._nodes.add("")  # where nodes share their memory; others are noted by their blocks
                return number
        raise ConfigurationError("The job was begun with a fast_storage.", hint="Set it again.")

    # -- jobs that are continued ---------------------------------------------------------------------------------------

    def _kept(self, name: str, data: bytes) -> bytes:
        """Keep something for a program that continues the job; what an earlier one has kept, if it has."""
        way = self._ways[0]
        with open_storage(way.url) as blocks:
            full_name = f"{way.job}/{name}"
            if blocks.create(full_name, checked([data])):
                return data
            self._may_be_done = True
            return bytes(unchecked(blocks.read(Part(full_name)), full_name))

    def _digest(self) -> bytes:
        """What differs between jobs that do not have the same tasks."""
        settings = dataclasses.replace(self._settings, retries=0, copies_after=None, task_memory=None)
        found = hashlib.sha256(repr((settings, len(self._ways), self._output)).encode())
        for stage in self._query.stages:
            found.update(stage.fragment)
            found.update(repr((stage.exchange, stage.size)).encode())
            for table in (self._tables[source.table] for source in stage.sources if source.table):
                if isinstance(table, Input):
                    found.update(repr([dataclasses.astuple(each) for each in table.shares]).encode())
                else:
                    found.update(to_stream(table))
        return found.digest()


class _LostRound(ObjectGone):
    """The memory has lost blocks of a round."""


def _written(done: Sequence[Done]) -> list[Written]:
    return [each.written for each in done if each.written is not None]


def _parts(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Items in so many parts, or as many as there are items, of about the same size."""
    count = max(1, min(count, len(items)))
    bounds = [number * len(items) // count for number in range(count + 1)]
    return [items[start:end] for start, end in itertools.pairwise(bounds)]
