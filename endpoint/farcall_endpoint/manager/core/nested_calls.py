"""Nested calls: what a task calls while it runs. Pure: no I/O, no clock.

A call is a job of its own, one level deeper than the task that makes it, the *driver*. Its outcome goes back to the
driver's worker. A driver that waits gives its share of the node to another worker; see :mod:`.extra_workers`.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from farcall_common.errors import ErrorRecord
from farcall_common.graphs import STAGE_CALLS, STAGE_RUN_S, STAGES, StageState
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import Died, GraphProgress, Limits, TaskOrder, Used
from farcall_endpoint.contracts.manager_worker import Call, CallEnded, CallOrder, Calls, DropCalls
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.graphs.attempts import Attempts
from farcall_endpoint.graphs.stages import MAX_NAME_CHARACTERS, PROGRESS_PERIOD_S, Runs, shown_error
from farcall_endpoint.graphs.tails import OutputTails
from farcall_endpoint.graphs.values import Memory, read
from farcall_endpoint.host.shared_memory import Body, Frame, SharedBytes, cut
from farcall_endpoint.manager.core.actions import Action, Answer
from farcall_endpoint.manager.core.events import Job, Outcome, Owner, Sums
from farcall_endpoint.manager.core.uses import Uses, added
from farcall_endpoint.manager.core.workers import Worker

MOST_DEPTH: Final = 64
"""Maximum length of a chain of calls, each of which waits for the next. Each of them occupies a process."""
MOST_OPEN: Final = 10_000
"""Maximum number of unfinished calls of one driver; its worker sends fewer."""
_MOST_FUNCTIONS: Final = 1_000
_MOST_FUNCTION_BYTES: Final = 64 * 2**20
"""Maximum total size of the functions that one worker may send."""
_MOST_NAMES: Final = 100
"""Maximum number of functions to distinguish in the states of a driver's calls. Others are counted together."""

Output = tuple[Printed, bytes]
"""Tails of the printed output."""


class _Counts(Runs):
    """The calls of one function."""

    __slots__ = ("calls", "cancelled", "ended", "error", "failed")

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.ended = self.failed = self.cancelled = 0
        self.error: dict[str, Any] | None = None

    def add(self, outcome: Outcome) -> None:
        """A call has ended for good."""
        self.ended += 1
        if outcome.state is TaskState.FAILED:
            self.failed += 1
            if self.error is None and outcome.error is not None:
                self.error = shown_error(outcome.error)
        elif outcome.state is TaskState.CANCELLED:
            self.cancelled += 1
        else:
            self.value_bytes += sum(map(len, outcome.parts))

    def state(self, number: int, name: str, node: str) -> StageState:
        if self.ended < self.calls:
            word = "running" if self.ended or self.started_at is not None else "waiting"
        elif self.failed:
            word = "failed"
        else:
            word = "cancelled" if self.cancelled == self.calls else "done"
        return StageState(
            number,
            name,
            word,
            self.calls,
            self.ended,
            self.failed,
            self.retries,
            self.started_at,
            self.ended_at,
            self.run_s,
            self.value_bytes,
            self.workers,
            ", ".join(dict.fromkeys(each or node for each in self.nodes)),
            self.error,
        )


class Driver:
    """A running task with calls; their :class:`~farcall_endpoint.manager.core.events.Owner`."""

    def __init__(self, job: Job, worker_id: int, calls: NestedCalls) -> None:
        self.job = job
        self.worker_id = worker_id
        self.open: dict[str, Call] = {}  # by the id of the call's job
        self.payloads: dict[str, Frame] = {}
        self.dropped: set[str] = set()
        self.has_changed = True
        #: What its calls have printed, which comes behind what it prints itself.
        self._output = OutputTails(job.order.options.output_bytes)
        self._output.open = job.order.task_id
        self._calls = calls
        self._counts: dict[str, _Counts] = {}
        self.sums = Sums()

    @property
    def above(self) -> Owner | None:
        """The owner of the task, if that is a call itself."""
        return self.job.owner

    def touch(self) -> None:
        """Something has happened to its calls, or to those that these have made."""
        self.has_changed = True
        if (above := self.above) is not None and not above.sums.is_over:
            above.touch()

    def add(self, call: Call, task_id: str, payload: Frame) -> None:
        """A call was made."""
        self.open[task_id] = call
        self.payloads[task_id] = payload
        self._count(call).calls += 1
        self.touch()

    def started(self, job: Job, at: float) -> None:
        """A call has been running for a while."""
        if (call := self.open.get(job.order.task_id)) is not None:
            self._count(call).note_start(at)
            self.touch()

    def ran(self, job: Job, started_at: float | None, ended_at: float | None, pid: int) -> None:
        """A call has run, once."""
        if (call := self.open.get(job.order.task_id)) is not None:
            self._count(call).note_run(started_at, ended_at, pid)

    def ended(self, job: Job, outcome: Outcome) -> None:
        """A call has ended: the driver hears of it, unless the call is made again."""
        if (call := self.open.get(job.order.task_id)) is None:
            return
        self._count(call).note_run(outcome.started_at, outcome.ended_at, outcome.pid, outcome.node)
        self._keep_output(job, outcome.output)
        if outcome.error is not None:
            wait_s, record = self._calls.attempts.raised(
                job.order.task_id, outcome.error, options=job.order.options, is_retried=outcome.is_retried
            )
            if wait_s is not None:
                self._again(job, wait_s)
                return
            outcome = msgspec.structs.replace(outcome, error=record, parts=())
        self._over(job, outcome)

    def died(self, job: Job, died: Died) -> None:
        """The worker of a call is gone."""
        if job.order.task_id not in self.open:
            return
        self._keep_output(job, None if died.printed is None else (died.printed, died.output))
        record = self._calls.attempts.died(
            job.order.task_id,
            died.reason,
            options=job.order.options,
            stdout_tail=died.stdout_tail,
            stderr_tail=died.stderr_tail,
        )
        if record is None:
            self._again(job, 0.0)
        else:
            self._over(job, Outcome(state=TaskState.FAILED, error=record))

    def all_output(self, own: Output | None) -> Output | None:
        """The output of the driver, which has ended, and behind it that of its calls."""
        self._output.end(self.job.order.task_id, "", *(own or (None,)))
        return self._output.printed()

    def states(self) -> tuple[StageState, ...]:
        """How its calls are, by function."""
        node = self._calls.node
        return tuple(counts.state(number, name, node) for number, (name, counts) in enumerate(self._counts.items()))

    def _keep_output(self, job: Job, output: Output | None) -> None:
        if output is not None:
            name = self.open[job.order.task_id].name[:MAX_NAME_CHARACTERS]
            self._output.end(job.order.task_id, f"call {name}, attempt {job.order.attempt}", *output)

    def _again(self, job: Job, wait_s: float) -> None:
        self._count(self.open[job.order.task_id]).retries += 1
        self.touch()
        self._calls.make_again(job, wait_s)

    def _over(self, job: Job, outcome: Outcome) -> None:
        call = self.open.pop(job.order.task_id)
        self.dropped.discard(job.order.task_id)
        self._calls.memory.remove(self.payloads.pop(job.order.task_id))
        self._calls.attempts.forget(job.order.task_id)
        self._count(call).add(outcome)
        self.touch()
        value = outcome.parts[0] if outcome.parts else b""
        self._calls.answer(self.worker_id, CallEnded(call.number, outcome.error), value)

    def _count(self, call: Call) -> _Counts:
        name = call.name[:MAX_NAME_CHARACTERS]
        if name not in self._counts and len(self._counts) >= _MOST_NAMES:
            name = "others"
        return self._counts.setdefault(name, _Counts())


class NestedCalls:
    """The calls of all drivers of a manager. ``limits``: of the endpoint, for each of them.

    :param actions: of the manager's core, for answers to workers.
    :param memory: where values and arguments are counted.
    :param jitter: see :class:`~farcall_endpoint.graphs.attempts.Attempts`.
    :param uses: what drivers have used.
    :param node: its host name.
    """

    def __init__(
        self, *, actions: list[Action], memory: Memory, jitter: Callable[[], float], uses: Uses, node: str = ""
    ) -> None:
        self._actions = actions
        self._uses = uses
        self.memory = memory
        self.node = node
        self.limits: Limits | None = None
        self.attempts: Attempts[str] = Attempts(jitter)
        #: By the id of the driver's job.
        self.drivers: dict[str, Driver] = {}
        uses.drivers = self.drivers
        self._waits: list[tuple[float, Job]] = []  # seconds from now on
        self._due: list[tuple[float, int, Job]] = []
        self._entries = 0
        self._shown_at = -math.inf

    # -- packets of a driver -------------------------------------------------------------------------------------------

    def received(self, worker: Worker, packet: Calls, body: Body) -> list[Job]:
        """The jobs of calls that the task at the head of a worker makes. Those that cannot be are answered at once.

        :raises ValueError: for a packet that no worker sends.
        """
        driver_job = worker.jobs[0]
        functions, payloads = _split(packet, body)
        _learn(worker, functions)
        driver = self.drivers.get(packet.task_id)
        if driver is None:
            driver = self.drivers[packet.task_id] = Driver(driver_job, worker.worker_id, self)
        if len(driver.open) + len(packet.calls) > MOST_OPEN:
            raise ValueError(f"more than {MOST_OPEN} open calls")
        jobs: list[Job] = []
        for call, payload in zip(packet.calls, payloads, strict=True):
            task_id = f"{packet.task_id}/{call.number}"
            if task_id in driver.open:
                raise ValueError(f"call {call.number} twice")
            found = _function(driver_job, worker, call.function_hash)
            if isinstance(found, ErrorRecord):
                self.answer(worker.worker_id, CallEnded(call.number, found.to_json()), b"")
            elif driver_job.depth >= MOST_DEPTH:
                record = outcomes.nested_too_deeply(MOST_DEPTH)
                self.answer(worker.worker_id, CallEnded(call.number, record.to_json()), b"")
            elif not self.memory.accepts(len(payload), on_disk=False):
                record = outcomes.arguments_too_large(len(payload))
                self.answer(worker.worker_id, CallEnded(call.number, record.to_json()), b"")
            else:
                if not self.memory.has_files:
                    payload = read(payload)
                self.memory.add([payload])
                driver.add(call, task_id, payload)
                jobs.append(self._job(driver, call, task_id, found, payload))
        return jobs

    def dropped(self, packet: DropCalls) -> set[str]:
        """The ids of calls that a driver does not need any more."""
        driver = self.drivers.get(packet.task_id)
        if driver is None:
            return set()
        named = {f"{packet.task_id}/{number}" for number in set(packet.numbers)}
        fresh = {each for each in named if each in driver.open and each not in driver.dropped}
        if not fresh:  # to look for them again costs a look at all that waits
            return fresh
        driver.dropped |= fresh
        return self._cancelled(fresh)

    def over(self, job: Job, now: float) -> set[str]:
        """A driver has ended: the ids of its calls that have not."""
        driver = self.drivers[job.order.task_id]
        if job.owner is not None:
            used = self._of_calls(driver, now)
            job.owner.sums.add(used.run_s, used.calls)
        del self.drivers[job.order.task_id]
        driver.sums.is_over = True
        gone = self._cancelled(driver.open)
        for task_id in driver.open:
            self.attempts.forget(task_id)
        driver.open.clear()
        for payload in driver.payloads.values():
            self.memory.remove(payload)
        driver.payloads.clear()
        return gone

    def _cancelled(self, task_ids: Iterable[str]) -> set[str]:
        """Calls to cancel; those that wait for a retry end here."""
        gone = set(task_ids)
        if not gone:
            return gone
        for waiting in [job for _, job in self._waits] + [job for _, _, job in self._due]:
            if waiting.order.task_id in gone and waiting.owner is not None:
                waiting.owner.ended(
                    waiting, Outcome(state=TaskState.CANCELLED, error=outcomes.cancelled(running=False).to_json())
                )
        self._waits = [each for each in self._waits if each[1].order.task_id not in gone]
        self._due = [each for each in self._due if each[2].order.task_id not in gone]
        heapq.heapify(self._due)
        return gone

    # -- answers and retries -------------------------------------------------------------------------------------------

    def answer(self, worker_id: int, packet: CallEnded, value: Frame) -> None:
        """Send a driver how a call has ended."""
        self._actions.append(Answer(worker_id, packet, (value,)))

    def make_again(self, job: Job, wait_s: float) -> None:
        """Retry a call after ``wait_s`` seconds."""
        dead, retried = self.attempts.before(job.order.task_id)
        order = msgspec.structs.replace(job.order, attempt=dead + retried + 1, retry=retried)
        self._waits.append((wait_s, msgspec.structs.replace(job, order=order)))

    @property
    def due_at(self) -> float:
        """When :meth:`due` or :meth:`changed` has something."""
        if self._waits:
            return 0.0
        due_at = self._due[0][0] if self._due else math.inf
        if any(driver.has_changed and driver.job.owner is None for driver in self.drivers.values()):
            due_at = min(due_at, self._shown_at + PROGRESS_PERIOD_S)
        return due_at

    def due(self, now: float) -> list[Job]:
        """The calls that are made again now. Call it after events, too."""
        for wait_s, job in self._waits:
            self._entries += 1
            heapq.heappush(self._due, (now + wait_s, self._entries, job))
        self._waits.clear()
        jobs: list[Job] = []
        while self._due and self._due[0][0] <= now:
            jobs.append(heapq.heappop(self._due)[2])
        return jobs

    # -- for people ----------------------------------------------------------------------------------------------------

    def used(self, job: Job, run_s: float, now: float) -> Used | None:
        """Return the use of a driver that has had a place for ``run_s`` seconds; None if it is none."""
        driver = self.drivers.get(job.order.task_id)
        return None if driver is None else added(self._of_calls(driver, now), Used(run_s))

    def _of_calls(self, driver: Driver, now: float) -> Used:
        if driver.open:
            return self._uses.of(driver, now)
        return Used(driver.sums.run_s, driver.sums.calls)

    def details(self, job: Job, run_s: float, now: float) -> dict[str, Any]:
        """Return the states of a driver's calls by function, and their total use, for the details of its result.

        :param run_s: seconds for which the driver had a place.
        """
        used = self.used(job, run_s, now)
        if used is None:
            return {}
        states = msgspec.to_builtins(self.drivers[job.order.task_id].states())
        return {STAGES: states, STAGE_CALLS: used.calls, STAGE_RUN_S: used.run_s}

    def output(self, job: Job, own: Output | None) -> Output | None:
        """Return the output of an ended driver together with the output of its calls."""
        driver = self.drivers.get(job.order.task_id)
        return own if driver is None else driver.all_output(own)

    def changed(self, now: float) -> list[GraphProgress]:
        """Return the progress of drivers that are not calls themselves, if it has changed and a report is due."""
        if now < self._shown_at + PROGRESS_PERIOD_S:
            return []
        shown = [driver for driver in self.drivers.values() if driver.has_changed and driver.job.owner is None]
        if not shown:
            return []
        self._shown_at = now
        uses, found = self._uses.all(now), []
        for driver in shown:
            driver.has_changed = False
            own = self._uses.of_worker(driver.worker_id, now)
            used = uses.get(driver, Used(driver.sums.run_s, driver.sums.calls))
            found.append(GraphProgress(driver.job.order.task_id, driver.states(), added(own, used)))
        return found

    def _job(self, driver: Driver, call: Call, task_id: str, function: Frame, payload: Frame) -> Job:
        parent = driver.job.order
        options = options_of(parent.options, call.options)
        if self.limits is not None:
            options = self.limits.applied_to(options)
        order = TaskOrder(
            task_id,
            1,
            call.function_hash,
            0,
            options,
            parent.traceparent,
            parent.submitter,
            restricted=parent.restricted,
            files_dir=parent.files_dir,
            payer=parent.payer,
        )
        memory = self.memory
        edge = CallOrder(is_edge=True, room_bytes=memory.room_bytes, most_bytes=memory.most_bytes, is_nested=True)
        return Job(
            order,
            function,
            payload,
            callees=driver.job.callees,
            call=edge,
            depth=driver.job.depth + 1,
            owner=driver,
        )


def options_of(driver: TaskOptions, wanted: TaskOptions | None) -> TaskOptions:
    """The options of a call: those that it asks for, within the driver's environment and limits."""
    wanted = TaskOptions() if wanted is None else wanted
    return TaskOptions(
        idempotent=driver.idempotent and wanted.idempotent,
        max_attempts=wanted.max_attempts,
        walltime_s=wanted.walltime_s,
        memory_bytes=_least(driver.memory_bytes, wanted.memory_bytes),
        max_output_bytes=_least(driver.max_output_bytes, wanted.max_output_bytes),
        retries=wanted.retries,
        retry_on=wanted.retry_on,
        retry_delay_s=wanted.retry_delay_s,
        output_bytes=min(driver.output_bytes, wanted.output_bytes),
        container=driver.container,
        environment=driver.environment,
        callees=driver.callees,
    )


def kept_answer(action: Answer, memory: Memory) -> Answer:
    """An answer that a driver does not read yet, counted in the memory of values; without its value if that has no
    room."""
    if not action.body:
        return action
    values = list(action.body)
    size = sum(map(len, values))
    on_disk = any(isinstance(each, SharedBytes) and not each.memory.is_sealed for each in values)
    try:
        if not memory.accepts(size, on_disk=on_disk):
            raise ValueError("there is no room")
        if not (on_disk or memory.has_files):
            values = [read(each) for each in values]
    except ValueError as error:
        values = [b""]
        packet = msgspec.structs.replace(action.packet, error=outcomes.value_not_stored(size, error).to_json())
        action = Answer(action.worker_id, packet, (b"",))
    memory.add(values, on_disk=on_disk)
    return Answer(action.worker_id, action.packet, tuple(values))


def _least(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _function(driver: Job, worker: Worker, function_hash: str) -> Frame | ErrorRecord:
    """The code of a function that a driver calls; or why it may not."""
    is_free = not driver.order.restricted
    if is_free and function_hash == driver.order.function_hash:  # of itself
        return driver.function
    if driver.callees is not None and function_hash in driver.callees.functions:
        environment = driver.order.options.environment
        own = "" if environment is None else environment.key
        if own not in driver.callees.environments.get(function_hash, (own,)):
            return outcomes.callee_elsewhere()
        return driver.callees.functions[function_hash]
    if not is_free:
        return outcomes.callee_not_permitted()
    found = worker.called.get(function_hash)
    return outcomes.function_missing(function_hash) if found is None else found


def _learn(worker: Worker, functions: list[tuple[str, Frame]]) -> None:
    """Keep the functions that a worker sends.

    :raises ValueError: if a hash is another function's, which other workers may have, or if they are too many.
    """
    new = {function_hash: body for function_hash, body in functions if function_hash not in worker.called}
    if not new:
        return
    size = sum(map(len, new.values())) + sum(map(len, worker.called.values()))
    if len(new) + len(worker.called) > _MOST_FUNCTIONS or size > _MOST_FUNCTION_BYTES:
        raise ValueError("more functions than a worker sends")
    for function_hash, body in new.items():
        copy = read(body)  # the task can still change the file
        if hashlib.sha256(copy).hexdigest() != function_hash:
            raise ValueError("a function with another hash")
        worker.called[function_hash] = copy


def _split(packet: Calls, body: Body) -> tuple[list[tuple[str, Frame]], list[Frame]]:
    """The functions and the payloads of a packet.

    :raises ValueError: if its sizes are not those of its body.
    """
    sizes = [size for _, size in packet.functions] + [call.payload_bytes for call in packet.calls]
    parts = cut(body, sizes)
    if sum(sizes) != len(body):
        raise ValueError("a body that is longer than its calls")
    count = len(packet.functions)
    names = [name for name, _ in packet.functions]
    return list(zip(names, parts[:count], strict=True)), parts[count:]
