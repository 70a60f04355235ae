"""The graphs of a manager: their calls become jobs, whose outcomes go back to them. No I/O, no clock."""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from farcall_common.environments import Environment
from farcall_common.file_arguments import has_files, without_files
from farcall_common.graphs import (
    COLLECT,
    PREFIX,
    STAGE_CALLS,
    STAGE_RUN_S,
    STAGES,
    VALUES,
    Graph,
    is_graph,
    unpack_graph,
)
from farcall_common.limits import MAX_PAYLOAD_BYTES, OUTPUT_TAIL_BYTES
from farcall_common.retries import WALLTIME_NAME
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import (
    Died,
    GraphProgress,
    Limits,
    RunningOutput,
    TaskOrder,
    Used,
    WantedOutput,
)
from farcall_endpoint.contracts.manager_worker import CallOrder
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.graphs.run import Call, GraphRun
from farcall_endpoint.graphs.stages import PROGRESS_PERIOD_S, RunningStage, shown_error
from farcall_endpoint.graphs.tails import OutputTails
from farcall_endpoint.graphs.values import GraphSettings, Memory, read
from farcall_endpoint.host.shared_memory import Bytes, Frame, copy_of, piece_of
from farcall_endpoint.manager.core.actions import ReadGraph
from farcall_endpoint.manager.core.events import Callees, Instant, Job, Outcome, Owner, Sums
from farcall_endpoint.manager.core.limits import limited_options
from farcall_endpoint.manager.core.orders import unread_bytes
from farcall_endpoint.manager.core.reports import Reports
from farcall_endpoint.manager.core.uses import Uses
from farcall_endpoint.manager.core.workers import Worker

_INPUT_BYTES: Final = 64
"""Maximum size that an input adds to an order, without the bytes of the input."""
_MOST_ERROR_BYTES: Final = 256 * 1024
"""Size of an error record above which only the displayed parts are kept. Workers write smaller records."""
_STARTED_AFTER_S: Final = 0.05
"""Seconds after which the start of a graph is reported, as for a task. A shorter graph reports only its result."""


class RunningGraph:
    """A task that is a graph: the owner of its calls.

    :param touched: collects the graphs in which something has changed.
    """

    def __init__(
        self, job: Job, run: GraphRun, callees: Callees, now: Instant, *, touched: dict[RunningGraph, None]
    ) -> None:
        self._touched = touched
        self.job = job
        self.run = run
        self.is_started = False  # and the agent knows it
        self.changed = False
        self.reported_at = now.mono
        self.started_at: float | None = None  # epoch
        self.ends_by: float | None = None
        self.output = OutputTails(job.order.options.output_bytes)
        self._callees = callees
        self._bodies = tuple(callees.functions.get(each.function_hash, b"") for each in job.order.options.callees)
        self._hashes = tuple(each.function_hash for each in job.order.options.callees)
        #: Those of the calls of all stages without options of their own.
        self._options = msgspec.structs.replace(job.order.options, walltime_s=None, callees=())
        self._prefix = f"{job.order.task_id}/"
        self._by_stage: dict[int, Any] = {}
        self._raised: dict[Call, Bytes] = {}
        #: Calls in workers or on their way there, if their number is limited.
        self.made: set[Call] = set()
        self._raised_bytes = 0
        self.sums = Sums()
        #: Whether calls were dropped that had been made, which may still run at its end.
        self.has_dropped = False

    # -- owner ---------------------------------------------------------------------------------------------------------

    @property
    def above(self) -> Owner | None:
        """A graph is no call itself."""
        return None

    def started(self, job: Job, at: float) -> None:
        """A call has been running for a while."""
        self._note_start(at)
        self.run.stages[self._call_of(job)[0]].note_start(at)

    def ran(self, job: Job, started_at: float, ended_at: float, pid: int) -> None:
        """A call has run in a worker that is gone."""
        if self.run.is_out(call := self._call_of(job)):
            self._note_start(started_at)
            self.run.stages[call[0]].note_run(started_at, ended_at, pid)

    def ended(self, job: Job, outcome: Outcome) -> None:
        """A call has ended; unless it was dropped, that counts."""
        run, call = self.run, self._call_of(job)
        self.made.discard(call)
        if not run.is_out(call):
            self._keep_output(job, call, outcome.output)  # of one that was dropped
            return
        stage = run.stages[call[0]]
        if outcome.started_at is not None and not (self.started_at and self.started_at <= outcome.started_at):
            self._note_start(outcome.started_at)
        stage.note_run(outcome.started_at, outcome.ended_at, outcome.pid, outcome.node)
        self._keep_output(job, call, outcome.output)
        self.touch()
        if outcome.state is TaskState.SUCCESS:
            assert job.call is not None
            self._succeeded(call, job.call, outcome.parts)
        else:
            self._keep_raised(call, outcome.result)
            record = outcome.error or {}
            if sum(map(_length, record.values())) > _MOST_ERROR_BYTES:
                record = shown_error(record, is_brief=False)
            run.raised(call, record, is_retried=outcome.is_retried)

    def _keep_raised(self, call: Call, raised: Frame) -> None:
        """Keep what a function raised: of many calls without which the graph continues, the first and the last."""
        self._raised_bytes -= len(self._raised.pop(call, b""))
        if not len(raised):
            return
        while self._raised and self._raised_bytes + len(raised) > MAX_PAYLOAD_BYTES:
            self._raised_bytes -= len(self._raised.popitem()[1])
        with contextlib.suppress(ValueError):  # the record says the same in words
            self._raised[call] = read(raised)
            self._raised_bytes += len(raised)

    def _succeeded(self, call: Call, order: CallOrder, parts: Sequence[Frame]) -> None:
        run, memory = self.run, self.run.memory
        size = sum(map(len, parts))
        on_disk = size > order.room_bytes
        if order.is_edge and not memory.accepts(size, on_disk=on_disk):
            run.failed(call, outcomes.value_too_large(size, memory.most_bytes).to_json())
            return
        if not (memory.has_files or on_disk):
            try:
                parts = [read(part) for part in parts]
            except ValueError as error:
                run.failed(call, outcomes.value_not_stored(size, error).to_json())
                return
        run.succeeded(call, parts, on_disk=on_disk)

    def died(self, job: Job, died: Died) -> None:
        """The worker of a call is gone."""
        run, call = self.run, self._call_of(job)
        self.made.discard(call)
        self._keep_output(job, call, None if died.printed is None else (died.printed, died.output))
        if run.is_out(call):
            self.touch()
            run.died(call, died.reason, stdout_tail=died.stdout_tail, stderr_tail=died.stderr_tail)

    def count_made(self) -> int:
        """How many calls are in workers or on their way there; those that the graph does not need any more end soon."""
        self.made = {call for call in self.made if self.run.is_out(call)}
        return len(self.made)

    def touch(self) -> None:
        """Something has happened to it."""
        self.changed = True
        self._touched[self] = None

    def next_deadline(self) -> float:
        """When there is something to do without that."""
        due = self.run.next_deadline()
        if due is None:
            due = math.inf
        if self.changed:
            due = min(due, self.reported_at + PROGRESS_PERIOD_S)
        return due if self.ends_by is None else min(due, self.ends_by)

    def _note_start(self, at: float) -> None:
        self.touch()
        self.started_at = at if self.started_at is None else min(at, self.started_at)

    def _call_of(self, job: Job) -> Call:
        stage, _, element = job.order.task_id[len(self._prefix) :].partition(".")
        return int(stage), int(element or 0)

    def _keep_output(self, job: Job, call: Call, output: tuple[Printed, bytes] | None) -> None:
        if output is not None:
            self.output.end(job.order.task_id, self._title(job, call), *output)
        elif self.output.open == job.order.task_id:
            self.output.end(job.order.task_id, "", None)

    def _title(self, job: Job, call: Call) -> str:
        stage = self.run.stages[call[0]]
        element = f"[{call[1]}]" if stage.is_map else ""
        return f"stage {stage.spec.name}{element}, attempt {job.order.attempt}"

    # -- calls ---------------------------------------------------------------------------------------------------------

    def id_of(self, call: Call) -> str:
        """The id of a call."""
        stage, element = call
        return f"{self._prefix}{stage}.{element}" if self.run.stages[stage].is_map else f"{self._prefix}{stage}"

    def job_of(self, call: Call, *, awaited: int = -1, rooms: tuple[int, int] | None = None) -> Job:
        """A call as a job.

        :param awaited: number of the input that another call's worker sends.
        :param rooms: how large its value may be in memory, and at all; as it is now if not given.
        """
        run, order = self.run, self.job.order
        number = call[0]
        stage = run.stages[number]
        found = self._by_stage.get(number)
        if found is None:
            found = self._of_stage(stage)
            if stage.is_map:
                self._by_stage[number] = found
        function_hash, body, payload, options, refusal, is_edge, spread = found
        inputs, frames = run.inputs(call, awaited=awaited)
        deaths, retries = run.starts(call)
        room_bytes, most_bytes = rooms or run.memory.rooms
        return Job(
            TaskOrder(
                self.id_of(call),
                order.attempt + deaths + retries,
                function_hash,
                0,
                options,
                order.traceparent,
                order.submitter,
                order.data_only,
                retries,
                order.restricted,
                order.files_dir,
                payer=order.payer,
            ),
            body,
            payload,
            refusal,
            self._callees,
            CallOrder(inputs, is_edge, spread, room_bytes, most_bytes),
            frames,
            input_bytes(frames),
            self.job.depth,
            self,
        )

    @property
    def is_spread(self) -> bool:
        """Whether its calls go to different workers, though one could make them one after the other."""
        return self.run.graph.spread

    def follower(self, job: Job, room_bytes: int) -> tuple[Job, int] | None:
        """The call that gets the value of this one, with which of its inputs, and waits for nothing else; None if there
        is no such call, or if it may need another worker. It counts as made.

        :param room_bytes: how much it may take of its worker's socket.
        """
        found = self.run.follower(self._call_of(job)) if room_bytes > 0 else None
        if found is None:
            return None
        call, number = found
        follower = self.job_of(call, awaited=number)
        options, before = follower.order.options, job.order.options
        if follower.refusal is not None or options.environment != before.environment or options.wants_ranks:
            return None
        if unread_bytes(follower) > room_bytes:
            return None
        self.run.begin_ahead(call)
        if self._options.max_calls is not None:
            self.made.add(call)
        return follower, number

    def taken_back(self, job: Job) -> None:
        """Record that a call was sent ahead and was taken back before it started."""
        self.touch()
        self.made.discard(self._call_of(job))
        self.run.take_back(self._call_of(job))

    def _of_stage(self, stage: RunningStage) -> Any:
        """Return the parts of an order that all calls of a stage share."""
        graph, function = self.run.graph, stage.spec.function
        options, own, environment = self._options, stage.spec.options, self._environment_of(stage)
        if own is not None:
            options = msgspec.structs.replace(
                own,
                callees=(),
                result_serializers=options.result_serializers,
                output_bytes=options.output_bytes,
            )
        if environment != options.environment:
            options = msgspec.structs.replace(
                options, environment=environment, container=None if environment is None else environment.reference
            )
        refusal = None if environment is None else self._callees.refusals.get(environment.key)
        is_edge = not self.run.is_output(stage)
        collects = function == COLLECT
        return (
            "" if collects else self._hashes[function],
            b"" if collects else self._bodies[function],
            b"" if collects or stage.number >= len(graph.calls) else graph.calls[stage.number],
            options,
            refusal,
            is_edge,
            stage.is_spread,
        )

    def _environment_of(self, stage: RunningStage) -> Environment | None:
        """Return the environment of a stage's calls. A call that collects values runs in the environment of the first
        value, which can read it."""
        while stage.collects and stage.sources:
            stage = stage.sources[0][0]
        return None if stage.collects else stage.spec.environment(self.job.order.options.callees)

    # -- the agent's side ----------------------------------------------------------------------------------------------

    def read_output(self, wanted: WantedOutput, running: Mapping[str, Worker], max_bytes: int) -> ReadGraph:
        """Return the output of the graph's calls, and the worker of a running call whose output must be read, too.

        :param running: the workers, by the task that each runs.
        """
        output = self.output
        if not output.most_bytes:
            return ReadGraph(RunningOutput(wanted, is_running=True, is_kept=False))
        worker = running.get(output.open)
        if not output.open:
            for worker in running.values():
                job = worker.jobs[0]
                if job.owner is self and self.run.is_out(call := self._call_of(job)):
                    output.begin(job.order.task_id, self._title(job, call))
                    break
            else:
                worker = None
        stdout, stderr = output.streams(wanted.stdout_from, wanted.stderr_from, most_bytes=max_bytes)
        known = RunningOutput(
            wanted,
            is_running=True,
            stdout=stdout.data,
            stderr=stderr.data,
            stdout_at=stdout.start,
            stderr_at=stderr.start,
        )
        return ReadGraph(known, None if worker is None else worker.worker_id, *output.ends)

    def details(self, node: str, used: Used) -> dict[str, Any]:
        """The details of the result: the stages, what their calls have used, and what they printed if that is to be
        kept with it."""
        details: dict[str, Any] = {
            STAGES: msgspec.to_builtins(self.run.states(node)),
            STAGE_CALLS: used.calls,
            STAGE_RUN_S: used.run_s,
        }
        if self.job.order.options.keep_output:
            for name, stream in zip(("stdout_tail", "stderr_tail"), self.output.streams(), strict=True):
                if stream.data:
                    details[name] = stream.data[-OUTPUT_TAIL_BYTES:].decode(errors="replace")
        if self.run.end is TaskState.FAILED and (values := self.run.small_values()):
            details[VALUES] = {str(number): base64.b64encode(each).decode() for number, each in values.items()}
        return details

    def result(self) -> Frame:
        """The value of a graph that has succeeded, or what was raised."""
        run, failure = self.run, self.run.failure
        if run.end is TaskState.SUCCESS or failure is None:
            return run.result
        return self._raised.get((failure.stage, failure.element), b"")

    def error(self) -> dict[str, Any] | None:
        """The error record of a graph that did not succeed."""
        run, failure = self.run, self.run.failure
        if run.end is TaskState.SUCCESS or failure is None:
            return None
        where = run.where(failure)
        return (
            {**failure.record, "message": f"{where}: {failure.record.get('message', '')}"} if where else failure.record
        )


class Graphs:
    """All graphs of a manager.

    :param writers: maximum number of calls that run concurrently.
    :param jitter: see :class:`~farcall_endpoint.graphs.run.GraphRun`.
    :param uses: use of the graphs.
    """

    def __init__(
        self,
        settings: GraphSettings,
        *,
        reports: Reports,
        uses: Uses,
        writers: int,
        jitter: Callable[[], float],
    ) -> None:
        self._node = settings.node
        self._reports = reports
        self._uses = uses
        self._jitter = jitter
        self.running: dict[str, RunningGraph] = {}  # by the task's id
        self._touched: dict[RunningGraph, None] = {}
        self.spread = 0
        """How many graphs want their calls to go to as many workers as there are."""
        self._due_at = math.inf
        self.memory = Memory(settings, writers=writers)
        self._parts: dict[str, Memory] = {}  # by payer

    @property
    def due_at(self) -> float:
        """When :meth:`advance` is due without an event."""
        return 0.0 if self._touched else self._due_at

    def get(self, task_id: str) -> RunningGraph | None:
        """A graph that runs."""
        return self.running.get(task_id)

    def add(self, job: Job, callees: Callees, now: Instant) -> list[Job]:
        """Start a graph; its first calls."""
        graph = callees.graph
        assert isinstance(graph, Graph)
        options = msgspec.structs.replace(job.order.options, walltime_s=None)
        payer, memory = job.order.share_of, self.memory
        if payer:
            memory = self._parts.get(payer) or self._parts.setdefault(payer, memory.part())
        run = GraphRun(graph, options=options, memory=memory, jitter=self._jitter)
        running = self.running[job.order.task_id] = RunningGraph(job, run, callees, now, touched=self._touched)
        self.spread += graph.spread
        run.start()
        running.touch()  # one whose calls wait for long is shown, too
        return list(self._take_ready(running))

    def cancel(self, task_ids: Iterable[str]) -> None:
        """End graphs that are among these tasks."""
        for task_id in task_ids:
            if (running := self.running.get(task_id)) is not None:
                record = outcomes.cancelled(running=running.started_at is not None)
                running.run.stop(TaskState.CANCELLED, record.to_json())
                running.touch()

    def forget_others(self, owners: Collection[object]) -> set[object]:
        """Forget the graphs that have not begun, which the agent still knows; those.

        :param owners: of the calls in workers.
        """
        forgotten: set[object] = set()
        for task_id, running in list(self.running.items()):
            if running.started_at is None and running not in owners:
                forgotten.add(running)
                del self.running[task_id]
                self._touched.pop(running, None)
                self.spread -= running.run.graph.spread
        return forgotten

    def advance(self, now: Instant) -> tuple[list[Job], set[str]]:
        """What follows from the outcomes since the last time: the calls to make now, and the ids of those that are to
        be cancelled. Reports the graphs that have ended."""
        jobs: list[Job] = []
        dropped: set[str] = set()
        shown: list[RunningGraph] = []
        if now.mono >= self._due_at:
            self._due_at = math.inf
            self._touched.update(dict.fromkeys(self.running.values()))
        touched = list(self._touched)
        self._touched.clear()
        if limited := {each.job.order.share_of for each in touched if each.job.order.options.max_calls is not None}:
            waiting = (each for each in self.running.values() if each.run.ready and each.job.order.share_of in limited)
            touched = list(dict.fromkeys([*touched, *waiting]))
        for running in touched:
            run = running.run
            self._check_time(running, now)
            run.retry_due(now.mono)
            if run.dropped:
                running.has_dropped = True
                dropped.update(map(running.id_of, run.dropped))
                run.dropped.clear()
            if run.end is not None:
                self._finish(running, now)
                continue
            jobs += self._take_ready(running)
            if running.changed and now.mono >= running.reported_at + PROGRESS_PERIOD_S:
                running.changed, running.reported_at = False, now.mono
                shown.append(running)
            self._due_at = min(self._due_at, running.next_deadline())
        uses = self._uses.all(now.mono) if shown else {}
        for running in shown:
            sums, states = running.sums, tuple(running.run.states(self._node))
            used = uses.get(running, Used(sums.run_s, sums.calls))
            self._reports.graph(GraphProgress(running.job.order.task_id, states, used))
        return jobs, dropped

    def _take_ready(self, running: RunningGraph) -> Iterator[Job]:
        """Return the calls to make now, within the payer's limit of concurrent calls in all graphs of this manager."""
        run, most = running.run, running.job.order.options.max_calls
        ready, run.ready = run.ready, []
        if most is not None and ready:
            payer = running.job.order.share_of
            own = (each for each in self.running.values() if each.job.order.share_of == payer)
            room = max(0, most - sum(each.count_made() for each in own))
            ready, run.ready = ready[:room], ready[room:]
            running.made.update(ready)
        rooms = run.memory.rooms if ready else (0, 0)
        return (running.job_of(call, rooms=rooms) for call in ready if run.is_out(call))

    def _check_time(self, running: RunningGraph, now: Instant) -> None:
        """Report the start of a graph, and end it when its time is over."""
        if running.started_at is None:
            return
        order = running.job.order
        age_s = now.epoch - running.started_at
        if not running.is_started and (age_s >= _STARTED_AFTER_S or order.options.walltime_s is not None):
            running.is_started = True
            self._reports.started(running.job, running.started_at)
            if order.options.walltime_s is not None:
                running.ends_by = now.mono - max(0.0, age_s) + order.options.walltime_s
        if running.ends_by is not None and now.mono >= running.ends_by and order.options.walltime_s is not None:
            record = outcomes.walltime_exceeded(order.options.walltime_s).to_json()
            if stages := running.run.running():
                record["message"] = f"{record['message'].removesuffix('.')}, in {stages}."
            running.run.stop(TaskState.FAILED, record)

    def _finish(self, running: RunningGraph, now: Instant) -> None:
        run, job = running.run, running.job
        del self.running[job.order.task_id]
        self.spread -= run.graph.spread
        if not self.running:  # so that all of them are empty
            self._parts.clear()
        assert run.end is not None
        sums, walltime_s = running.sums, job.order.options.walltime_s
        used = self._uses.of(running, now.mono) if running.has_dropped else Used(sums.run_s, sums.calls)
        sums.is_over = True
        is_too_long = running.ends_by is not None and now.mono >= running.ends_by and walltime_s is not None
        self._reports.finish(
            job,
            run.end,
            running.error(),
            result=running.result(),
            started_at=running.started_at,
            ended_at=None if running.started_at is None else max(now.epoch, running.started_at),
            details=running.details(self._node, used),
            is_retried=run.end is TaskState.FAILED and is_too_long and WALLTIME_NAME in job.order.options.retry_on,
            output=running.output.printed(),
        )


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else sum(map(len, value)) if isinstance(value, list) else 0


def input_bytes(frames: Sequence[Frame]) -> int:
    """How many bytes inputs add to the packet of a call."""
    return sum(map(len, frames)) + _INPUT_BYTES * len(frames)


def opened(
    payload: Frame, options: TaskOptions, *, memory_bytes: int | None, limits: Limits | None = None
) -> Graph | None:
    """The graph that is the payload of a task with these options, which may be hostile; None if it is none.

    :param memory_bytes: the most that a call may use.
    :param limits: of the endpoint, for each call.
    :raises DeserializationError: if it cannot run.
    """
    start = piece_of(payload, 0, len(PREFIX)) if payload else b""
    if has_files(start):
        payload = without_files(copy_of(payload))
        start = bytes(payload[: len(PREFIX)])
    if not is_graph(start):
        return None
    graph = unpack_graph(copy_of(payload), callees=len(options.callees))
    if memory_bytes is None and limits is None:
        return graph

    def limited(own: TaskOptions) -> TaskOptions:
        own = own if limits is None else limits.applied_to(own)
        return limited_options(own, memory_bytes)

    stages = tuple(
        stage if stage.options is None else msgspec.structs.replace(stage, options=limited(stage.options))
        for stage in graph.stages
    )
    return msgspec.structs.replace(graph, stages=stages)


def callees_of(options: TaskOptions, functions: Mapping[str, Frame], graph: Graph | None) -> Callees:
    """Return the callees of a task with these options. ``functions``: bodies by hash."""
    environments: dict[str, frozenset[str]] = {}
    for each in options.callees:  # one body may be registered for several environments
        key = "" if each.environment is None else each.environment.key
        environments[each.function_hash] = environments.get(each.function_hash, frozenset()) | {key}
    bodies = {each.function_hash: functions[each.function_hash] for each in options.callees}
    return Callees(bodies, graph, environments=environments)


def environments_of(job: Job) -> Iterable[Environment]:
    """Return the environments that a task runs in, each once: for a graph, those of its stages."""
    options, needed = job.order.options, [job.order.options.environment]
    if job.callees is not None and isinstance(job.callees.graph, Graph):
        needed = [stage.environment(options.callees) for stage in job.callees.graph.stages if stage.function != COLLECT]
    return {each.key: each for each in needed if each is not None}.values()
