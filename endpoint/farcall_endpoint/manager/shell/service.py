"""The manager's shell: an epoll loop that reports events to the core and performs its actions."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import DeserializationError, ErrorRecord
from farcall_common.trace_ids import trace_ids
from farcall_common.wire import TaskState
from farcall_endpoint.contracts import agent_manager, outcomes
from farcall_endpoint.contracts.bodies import ranges_of
from farcall_endpoint.contracts.liveness import LivenessTimer
from farcall_endpoint.contracts.manager_worker import (
    MALFORMED,
    MANAGER,
    Begun,
    Channel,
    Done,
    NewModules,
    Packet,
    Peer,
    Ready,
    Run,
    Sync,
)
from farcall_endpoint.contracts.output import NOTHING, Stream
from farcall_endpoint.environments import EnvironmentLost, NotLocated
from farcall_endpoint.graphs.tails import joined
from farcall_endpoint.graphs.values import read
from farcall_endpoint.host.cgroups import Cgroups
from farcall_endpoint.host.isolation import Isolation
from farcall_endpoint.host.pipe import Pipe, most_file_bytes
from farcall_endpoint.host.process_reaper import walk
from farcall_endpoint.host.shared_memory import Body, Frame, MemoryFile, SharedBytes
from farcall_endpoint.manager.core.actions import (
    Action,
    Adopt,
    Answer,
    Connect,
    Copy,
    Kill,
    Launch,
    Leave,
    Link,
    Pass,
    Prepare,
    ReadStreams,
    Recall,
    Release,
    RemoveCopies,
    Report,
    Send,
    ServeBlocks,
    ShareCpus,
    Unlink,
    Warn,
)
from farcall_endpoint.manager.core.away import jobs_of
from farcall_endpoint.manager.core.events import (
    AgentLost,
    CallNewsReceived,
    EnvironmentGone,
    Event,
    Instant,
    Job,
    LimitExceeded,
    MalformedReceived,
    PacketsReceived,
    ProcessesLeft,
    Recalled,
    TasksReceived,
    Terminated,
    WorkerDied,
)
from farcall_endpoint.manager.core.graphs import callees_of, environments_of, opened
from farcall_endpoint.manager.core.limits import TaskUse, breach, limited, start_bytes
from farcall_endpoint.manager.core.manager import ManagerCore
from farcall_endpoint.manager.core.nested_calls import MOST_OPEN, kept_answer
from farcall_endpoint.manager.shell.block_server import BlockServer
from farcall_endpoint.manager.shell.cpu_shares import CpuShares
from farcall_endpoint.manager.shell.file_copies import FileCopies
from farcall_endpoint.manager.shell.launcher import WorkerLauncher
from farcall_endpoint.manager.shell.processes import (
    IDLE_LIMIT_S,
    Leftovers,
    MeasuredTask,
    Measuring,
    Orphans,
    ReaperProcess,
    ShareLimit,
    output_bytes,
)
from farcall_endpoint.manager.shell.templates_watch import TemplateWatch
from farcall_endpoint.manager.shell.worker_process import ScratchRemover, WorkerProcess
from farcall_endpoint.worker.arenas import LEDGER_BYTES, Returns, new_ledger
from farcall_endpoint.worker.edges import edge_pair
from farcall_endpoint.worker.imports import MOST_REPORTS

if TYPE_CHECKING:
    from farcall_endpoint.host.transport import SocketLink

_logger = logging.getLogger(__name__)

_LINGER_S: Final = 1.0
"""Longest time to send the last message."""
_LIMIT_PERIOD_S: Final = 0.1
"""Seconds between two measurements of a limited task's output. The worker checks again at the end of the task, so that
no task which exceeded a limit succeeds."""
_READ_BYTES: Final = 16 * 1024
"""Values up to this size are copied into a packet. Larger ones are passed on as files, at most ``_MOST_FILES`` each."""
_MOST_FILES: Final = 60
_WARM_PERIOD_S: Final = 10.0
"""Seconds between two measurements of the memory of one worker of an environment. Environments take turns."""
_OUTPUT_PERIOD_S: Final = 0.01
"""Seconds between two measurements of the output while it grows."""
_COUNT_LIMIT_S: Final = 0.05
"""Time limit for counting the processes of a worker that is being ended."""
_MOST_UNSENT: Final = 2 * MOST_OPEN
"""Number of unread answers at which a worker is killed. A worker makes fewer calls before it reads."""
_MOST_NEW_FILES: Final = 64
"""Number of received files after which the core first decides which of them stay open."""
_MOST_NEW_BYTES: Final = 256 * 1024
"""Bytes of packets and headers that are read from a worker before the core handles them and other workers have their
turn. A socket holds about as many, and its worker waits meanwhile."""
_MOST_PACKETS: Final = 5_000
_MOST_BYTES: Final = 16 * 2**20
"""Limits of one read. A correct worker sends less while it is read. A task that floods its socket could otherwise
keep the manager from serving other workers."""


@dataclasses.dataclass(frozen=True)
class _Worker:
    worker_id: int
    process: WorkerProcess


@dataclasses.dataclass(frozen=True)
class _Arrival:
    """A task that came. ``left``: its environments that must still be asked for; ``refusals``: why its submitter may
    not use others, by their keys. An answer of the launcher counts for a moment only, so it is kept here."""

    job: Job
    left: list[Environment]
    refusals: dict[str, ErrorRecord] = dataclasses.field(default_factory=dict)

    def checked(self) -> Job:
        """The task with the refusals."""
        if not self.refusals:
            return self.job
        callees, refusal, own = self.job.callees, self.job.refusal, self.job.order.options.environment
        if callees is not None:
            callees = msgspec.structs.replace(callees, refusals=self.refusals)
        if own is not None and (callees is None or callees.graph is None):
            refusal = refusal or self.refusals.get(own.key)
        return msgspec.structs.replace(self.job, refusal=refusal, callees=callees)


class Manager:
    """A manager that runs until the agent stops it or is gone.

    :param agent: the connection to the agent, which this object closes.
    :param agent_pid: pid of an agent on this machine, to notice its death at once; None for an agent on another node.
    :param agent_silence_limit_s: seconds without a message after which an agent on another node counts as lost.
    :param memory_per_worker_bytes: upper limit of a task's memory.
    :param processes: upper limit of the processes and threads of a worker, for tasks of other submitters than the
        owner; 0: there is none.
    :param shares: of the CPUs for the workers, which this object closes.
    :param files: copies of files, which this object closes; None: this node keeps none.
    """

    def __init__(
        self,
        *,
        core: ManagerCore,
        launcher: WorkerLauncher,
        agent: Pipe | SocketLink,
        agent_pid: int | None,
        agent_silence_limit_s: float = 120.0,
        memory_per_worker_bytes: int | None = None,
        processes: int = 0,
        shares: CpuShares | None = None,
        files: FileCopies | None = None,
        blocks: BlockServer | None = None,
        registered: agent_manager.Registered,
    ) -> None:
        self._core = core
        self._launcher = launcher
        self._agent = agent
        self._agent_descriptor = agent.fileno()
        self._agent_pidfd = None if agent_pid is None else os.pidfd_open(agent_pid)
        limit_s = agent_silence_limit_s if agent_pid is None else None
        self._agent_liveness = LivenessTimer(limit_s=limit_s, now=time.monotonic())
        self._received_number = 0
        self._sent_number = 0
        self._memory_per_worker_bytes = memory_per_worker_bytes
        self._processes = processes
        self._registered = registered
        self._workers: dict[int, WorkerProcess] = {}
        self._by_descriptor: dict[int, _Worker] = {}
        self._returns: dict[int, Returns] = {}  # by worker: arenas that it has lent
        self._unsent: dict[int, collections.deque[Answer]] = {}  # by worker, while its socket is full
        self._ended: set[int] = set()  # workers that the core has ended, as it does with each after its last task
        self._leftovers: dict[int, Leftovers] = {}  # by worker, for those that run tasks of other submitters
        self._templates = TemplateWatch()
        self._idle_shares = ShareLimit(IDLE_LIMIT_S)
        self._has_shared_workers = registered.isolation == Isolation.NONE
        self._import_reports: collections.Counter[int] = collections.Counter()  # by worker
        self._functions: dict[str, Frame] = {}
        self._functions_of: dict[str, dict[str, Frame]] = {}  # by manager whose calls run here
        self._limits: agent_manager.Limits | None = None
        # What waits for a location to be looked up: tasks that came, by environment, and workers to be started.
        self._arrived: dict[Environment, list[_Arrival]] = {}
        self._launches: dict[int, Launch] = {}
        self._orphans = Orphans()  # before there are children
        self._scratch = ScratchRemover()
        self._shares = CpuShares(Cgroups(())) if shares is None else shares
        self._reaper = ReaperProcess(self._shares.directories)
        self._poll = select.poll()  # the kernel limits what an account may watch by epoll
        self._poll.register(self._agent_descriptor, select.POLLIN)
        self._poll.register(self._launcher.fileno(), select.POLLIN)
        if self._agent_pidfd is not None:
            self._poll.register(self._agent_pidfd, select.POLLIN)
        self._files = files
        if files is not None:
            self._poll.register(files.fileno(), select.POLLIN)
        self._blocks = BlockServer(None, host=None) if blocks is None else blocks
        self._poll.register(self._blocks.fileno(), select.POLLIN)
        self._measure_at = 0.0
        self._measuring = Measuring()
        self._output_bytes: dict[int, int] = {}  # by worker, as measured last
        self._measure_warm_at = 0.0
        self._measured_warm = -1  # worker
        self._agent_lost = False
        self._is_connected = True
        self._is_congested = False
        self._signals, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._signals, select.POLLIN)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until stopped; then all workers have ended."""
        signal.signal(signal.SIGTERM, lambda *_: None)  # its number arrives on the wake-up descriptor
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides; it stops its managers
        self._send(self._registered)
        try:
            while not self._core.is_over:
                self._handle(self._wait_for_events())
                if measured := [*self._measure(), *self._measure_warm(), *self._find_leftovers()]:
                    self._handle(measured)
                self._watch_templates()
                self._kill_orphans()
        finally:
            for worker in self._workers.values():
                self._end(worker)
            for worker in self._workers.values():
                worker.process.wait()
            self._scratch.close()
            if self._files is not None:
                self._files.close()
            self._blocks.close()
            self._launcher.close()
            self._orphans.kill_all(known={self._reaper.pid})
            self._shares.close()
            self._reaper.close()
            self._agent.close(linger_s=0.0 if self._agent_lost else _LINGER_S)

    def _handle(self, events: list[Event]) -> None:
        """Report events to the core, perform its actions, and so on with the events that these lead to."""
        while True:
            actions = self._core.handle(events, Instant(time.monotonic(), time.time()))
            if not actions or not (events := self._perform(actions)):
                return

    def _wait_for_events(self) -> list[Event]:
        events: list[Event] = []
        is_agent_readable = False
        for descriptor, mask in self._poll.poll(self._timeout_s() * 1000):
            worker = self._by_descriptor.get(descriptor)
            if worker is not None and worker.worker_id in self._workers:
                if mask & select.POLLOUT:
                    self._answer_rest(worker.worker_id)
                if descriptor == worker.process.pidfd:
                    events += self._reap(worker)
                else:
                    events += self._receive(worker, in_steps=True)
            elif descriptor == self._agent_descriptor:
                is_agent_readable = True
            elif descriptor == self._launcher.fileno():
                events += self._serve_launcher()
            elif self._files is not None and descriptor == self._files.fileno():
                events += self._files.events()
            elif descriptor == self._blocks.fileno():
                events += self._blocks.events()
            elif descriptor == self._agent_pidfd:
                self._poll.unregister(self._agent_pidfd)
                events.append(self._lose_agent("the agent is gone"))
            elif descriptor == self._signals and signal.SIGTERM in os.read(self._signals, 64):
                events.append(_terminated("it got SIGTERM, as from a scheduler at the end of a job"))
        if self._is_congested:
            self._agent.flush()
            self._watch_congestion()
        if is_agent_readable or self._agent.has_unread:
            events += self._receive_from_agent()
        now = time.monotonic()
        if now >= self._launcher.next_deadline():
            events += self._serve_launcher()
        if (measured := self._shares.news()) is not None:
            events.append(measured)
        if self._agent_liveness.is_expired(now=now) and not self._agent_lost:
            events.append(self._lose_agent("the agent has been silent for too long"))
        return events

    def _serve_launcher(self) -> list[Event]:
        """Let the launcher do what is due, and continue with what waits for locations to be looked up."""
        events = list(self._launcher.serve())
        arrived, self._arrived = self._arrived, {}
        for environment, arrivals in arrived.items():
            try:
                self._launcher.refusal(environment)
            except NotLocated:
                self._arrived.setdefault(environment, []).extend(arrivals)
            else:
                received = [job for each in arrivals for job in self._asked(each)]
                events.append(TasksReceived(received, self._limits))
        launches, self._launches = self._launches, {}
        for launch in launches.values():
            events += self._launch(launch)
        return events

    def _timeout_s(self) -> float:
        if self._agent.has_unread:
            return 0.0
        deadline = self._core.next_deadline()
        if self._core.limited(processes=self._processes):
            deadline = min(deadline, self._measure_at, self._measuring.due_at)
        if any(process.environment_key for process in self._workers.values()):
            deadline = min(deadline, self._measure_warm_at)
        if self._orphans.due_at is not None:
            deadline = min(deadline, self._orphans.due_at)
        for leftovers in self._leftovers.values():
            deadline = min(deadline, leftovers.due_at)
        if self._launcher.has_templates_of_others:
            deadline = min(deadline, self._templates.due_at)
        deadline = min(deadline, self._launcher.next_deadline())
        return max(0.0, deadline - time.monotonic())

    def _measure(self) -> list[Event]:
        """Measure running tasks with limits, when it is time."""
        now = time.monotonic()
        heads = self._core.limited(processes=self._processes)
        if not heads or now < min(self._measure_at, self._measuring.due_at):
            return []
        output: dict[int, int] = {}
        if now >= self._measure_at:
            running = [worker_id for worker_id, order, _ in heads if order is not None]
            output = {worker_id: output_bytes(self._workers[worker_id].output) for worker_id in running}
            grows = any(size > self._output_bytes.get(worker_id, 0) for worker_id, size in output.items())
            self._output_bytes = output
            self._measure_at = now + (_OUTPUT_PERIOD_S if grows else _LIMIT_PERIOD_S)
        used: dict[int, TaskUse] = {}
        if now >= self._measuring.due_at:
            used = self._measuring.turn(
                {
                    worker_id: (
                        None if order is None else (order.task_id, order.attempt, begun),
                        self._measured(worker_id, order, begun),
                    )
                    for worker_id, order, begun in heads
                    if begun is not None or order is None or (self._processes and order.submitter)
                    if worker_id in self._workers  # a start may wait for its location
                }
            )
        events: list[Event] = []
        for worker_id, order, _ in heads:
            use = used.get(worker_id, TaskUse())
            record = breach(
                order,
                use,
                output_bytes=output.get(worker_id, 0),
                processes=self._processes,
                most_start_bytes=self._most_start_bytes,
            )
            if record is not None:
                events.append(LimitExceeded(worker_id, "" if order is None else order.task_id, record))
        return events

    @property
    def _most_start_bytes(self) -> int | None:
        """The memory of a worker of another submitter that starts in an environment, and of a template, at most."""
        return start_bytes(self._memory_per_worker_bytes, None if self._limits is None else self._limits.memory_bytes)

    def _excess(self, worker_id: int) -> list[Event]:
        """The limit of processes that a worker of another submitter exceeds as it is ended for an invalid message: a
        process that it has forked too many may have sent that. A tree that takes long to count is left out."""
        if not self._processes or worker_id not in self._leftovers:
            return []
        ends_at, count = time.monotonic() + _COUNT_LIMIT_S, 0
        for _, threads in walk(self._workers[worker_id].root_pid):
            count += threads
            if count > self._processes or time.monotonic() > ends_at:
                break
        record = breach(None, TaskUse(processes=count), output_bytes=0, processes=self._processes)
        return [] if record is None else [LimitExceeded(worker_id, "", record)]

    def _measured(
        self, worker_id: int, order: agent_manager.TaskOrder | None, begun: Begun | None
    ) -> Callable[[], MeasuredTask]:
        process = self._workers[worker_id]
        if order is None:
            most_bytes = self._most_start_bytes
            return lambda: MeasuredTask(root=process.root_pid, memory_bytes=most_bytes, processes=self._processes)
        return lambda: MeasuredTask(
            root=process.root_pid,
            worker=process.worker_pid,
            namespaced=process.namespaced,
            memory_bytes=None if begun is None else order.options.memory_bytes,
            processes=self._processes if order.submitter else 0,
            held_bytes={} if begun is None else begun.resident_bytes,
            held_file_bytes={} if begun is None else begun.file_bytes,
        )

    def _watch_shared(self, worker_id: int, worker: WorkerProcess, packet: Run) -> None:
        """A worker that all submitters share gets tasks: what it runs is kept until the first one of another one."""
        for order in packet.orders:
            if order.submitter:
                leftovers = self._leftovers[worker_id] = Leftovers(worker.worker_pid or worker.pid)
                leftovers.keep_present()
                return

    def _find_leftovers(self) -> list[Event]:
        """Look for processes that tasks of other submitters have left, when it is time."""
        events: list[Event] = []
        if not self._leftovers:
            return events
        now, looked = time.monotonic(), False
        for worker_id, leftovers in self._leftovers.items():
            if leftovers.due_at <= now:
                self._orphans.expect(now=now)  # a task can see to it that its worker adopts none
                looked = True
                if leftovers.exist(now=now, busy_since=self._core.busy_since(worker_id)):
                    _logger.info("worker %d has processes of tasks that have ended; it ends, too", worker_id)
                    events.append(ProcessesLeft(worker_id))
        if looked:
            shares: dict[str, dict[int, float]] = collections.defaultdict(dict)
            for worker_id, leftovers in self._leftovers.items():
                shares[leftovers.submitter or str(worker_id)][worker_id] = leftovers.idle_share
            for worker_id in self._idle_shares.excess(shares, now=now):
                _logger.info("worker %d computes while it is idle; it ends", worker_id)
                events.append(ProcessesLeft(worker_id, computes=True))
        return events

    def _watch_templates(self) -> None:
        """Measure templates in environments of other submitters, when it is time, and end what exceeds a limit."""
        if not self._launcher.has_templates_of_others or time.monotonic() < self._templates.due_at:
            return
        templates = self._launcher.templates_of_others()
        found = self._templates.turn(templates, memory_bytes=self._most_start_bytes, processes=self._processes)
        for name, size_bytes in found.sizes.items():
            self._launcher.template_takes(name, size_bytes)
        for name, reason in found.ended.items():
            self._launcher.end_template(name, reason)

    def _measure_warm(self) -> list[Event]:
        """Measure the memory of a worker of an environment, when it is time, the next one each time."""
        now = time.monotonic()
        if now < self._measure_warm_at:
            return []
        candidates = sorted(number for number, process in self._workers.items() if process.environment_key)
        if not candidates:
            return []
        self._measure_warm_at = now + _WARM_PERIOD_S
        self._measured_warm = next((each for each in candidates if each > self._measured_warm), candidates[0])
        found = self._launcher.measured(self._workers[self._measured_warm])
        return [] if found is None else [found]

    # -- agent ---------------------------------------------------------------------------------------------------------

    def _receive_from_agent(self) -> list[Event]:
        events: list[Event] = []
        while self._is_connected:
            try:
                frames = self._agent.receive_shared()
            except BlockingIOError:
                break
            if frames is None:
                self._poll.unregister(self._agent_descriptor)
                self._is_connected = False
                events.append(self._lose_agent("the agent is gone"))
                break
            self._agent_liveness.heard(now=time.monotonic())
            if self._has_gap(agent_manager.number_of(frames)):
                events.append(_terminated("the connection to the agent broke, and messages were lost"))
                break
            message, bodies = agent_manager.decode_from_agent(frames)
            match message:
                case agent_manager.RunTasks():
                    events.append(self._tasks_received(message, bodies))
                case agent_manager.CancelTasks(task_ids=task_ids):
                    events += [*self._arrived_of(set(task_ids)), message]
                case (
                    agent_manager.ReturnTasks()
                    | agent_manager.ReadOutput()
                    | agent_manager.Stop()
                    | agent_manager.ResultsTaken()
                ):
                    events.append(message)
                case agent_manager.TakeCalls() | agent_manager.RefuseCalls() | agent_manager.ValkeyAnswered():
                    events.append(message)
                case agent_manager.FilesKey(key=key):
                    if self._files is not None:
                        self._files.set_key(key)
                    self._blocks.set_key(key)
                case agent_manager.CopyFiles():
                    events.append(message)
                case agent_manager.RunCalls():
                    events.append(self._calls_received(message, bodies))
                case agent_manager.CallNews():
                    events.append(CallNewsReceived(message, bodies))
                case agent_manager.ManagerGone(manager_id=manager_id):
                    self._functions_of.pop(manager_id, None)
                    events.append(message)
                case agent_manager.Prewarm(environment=environment):
                    self._launcher.trust(environment)  # only the owner can ask an agent for that
                    events.append(message)
        return events

    def _lose_agent(self, reason: str) -> AgentLost:
        _logger.warning("%s; stopping all workers", reason)
        self._agent_lost = True
        return AgentLost()

    def _has_gap(self, number: int) -> bool:
        if number == 0:
            return False
        expected, self._received_number = self._received_number + 1, number
        return number != expected

    def _tasks_received(self, message: agent_manager.RunTasks, bodies: list[Frame]) -> TasksReceived:
        functions = self._functions
        self._limits = message.limits
        if message.forget:
            functions.clear()
        for function_hash, body in message.functions:
            functions[function_hash] = bodies[body]
        orders = message.tasks
        if traces := trace_ids(order.traceparent for order in orders):
            _logger.info("tasks of the traces %s have come", traces)
        if self._memory_per_worker_bytes is not None:
            orders = tuple([limited(order, self._memory_per_worker_bytes) for order in orders])
        jobs: list[Job] = []
        for order in orders:
            job = Job(order, functions[order.function_hash], bodies[order.payload])
            if message.files and (files := message.files.get(order.task_id)):
                job = msgspec.structs.replace(job, files=files)
            jobs.append(self._with_callees(job) if order.options.callees else job)
        return self._checked(jobs)

    def _calls_received(self, message: agent_manager.RunCalls, bodies: list[Frame]) -> TasksReceived:
        """Calls of another manager."""
        self._limits = message.limits
        functions = self._functions_of.setdefault(message.home, {})
        jobs = jobs_of(message, bodies, functions=functions, owner=self._core.guests.owner)
        if self._memory_per_worker_bytes is not None:
            most = self._memory_per_worker_bytes
            jobs = [msgspec.structs.replace(job, order=limited(job.order, most)) for job in jobs]
        return self._checked(jobs)

    def _with_callees(self, job: Job) -> Job:
        """A task with the functions that it calls; one that is a graph is opened."""
        options = job.order.options
        graph, refusal = None, None
        try:
            graph = opened(job.payload, options, memory_bytes=self._memory_per_worker_bytes, limits=self._limits)
        except DeserializationError as error:
            refusal = error.record
        callees = callees_of(options, self._functions, graph)
        payload = job.payload if graph is None else b""
        return msgspec.structs.replace(job, payload=payload, refusal=refusal, callees=callees)

    def _checked(self, jobs: Sequence[Job]) -> TasksReceived:
        """Tasks, with why their submitters may not use the environments that they name. Those of which an environment
        is still looked up wait."""
        received: list[Job] = []
        for job in jobs:
            if job.order.options.environment is None and job.callees is None:
                received.append(job)
            else:
                received += self._asked(_Arrival(job, list(environments_of(job))))
        return TasksReceived(received, self._limits)

    def _asked(self, arrival: _Arrival) -> list[Job]:
        """A task, when all of its environments were asked for; none while one of these is looked up: then it waits."""
        while arrival.left:
            environment = arrival.left[-1]
            try:
                record = self._refusal(arrival.job.order.submitter, environment)
            except NotLocated:
                self._arrived.setdefault(environment, []).append(arrival)
                return []
            arrival.left.pop()
            if record is not None:
                arrival.refusals[environment.key] = record
        return [arrival.checked()]

    def _refusal(self, submitter: str, environment: Environment) -> ErrorRecord | None:
        """Why a submitter may not use an environment.

        :raises NotLocated: if its location is looked up.
        """
        if submitter:
            return self._launcher.refusal(environment)
        self._launcher.trust(environment)
        return None

    def _arrived_of(self, task_ids: Collection[str]) -> list[Event]:
        """Return events for those of the tasks whose locations are still looked up, so that the core cancels them."""
        events: list[Event] = []
        for environment, arrivals in list(self._arrived.items()):
            if found := [each for each in arrivals if each.job.order.task_id in task_ids]:
                events.append(TasksReceived([each.job for each in found]))
                self._arrived[environment] = [each for each in arrivals if each not in found]
        return events

    def _send(self, message: agent_manager.FromManager, bodies: Sequence[Frame] = ()) -> None:
        self._sent_number += 1
        self._agent.send(agent_manager.encode(message, bodies, number=self._sent_number))
        self._watch_congestion()

    def _report(self, progress: agent_manager.Progress, results: Sequence[Frame]) -> None:
        try:
            self._send(progress, results)
        except OSError as error:  # no room in memory: tasks with large results fail
            limit = most_file_bytes()
            most_bytes = _READ_BYTES if limit == math.inf else limit
            kept: list[Frame] = [
                b"" if len(body) > most_bytes and not isinstance(body, SharedBytes) else body for body in results
            ]
            finished = []
            for each in progress.finished:
                if each.result is not None and len(kept[each.result]) < (size := len(results[each.result])):
                    record = outcomes.result_not_stored(size, error.strerror).to_json()
                    each = msgspec.structs.replace(each, state=TaskState.FAILED, result=None, error=record)
                if each.output is not None and len(kept[each.output]) < len(results[each.output]):
                    each = msgspec.structs.replace(each, printed=None, output=None)
                finished.append(each)
            self._send(msgspec.structs.replace(progress, finished=tuple(finished)), kept)

    def _pass(
        self,
        message: agent_manager.CallsTaken
        | agent_manager.CallNews
        | agent_manager.CallsDropped
        | agent_manager.ValkeyRequested
        | agent_manager.FilesReported
        | agent_manager.Ending,
        bodies: Sequence[Frame],
    ) -> None:
        """Send the agent what it passes on. To one on this machine large values go as files; they are not mapped here,
        because a worker could let its file shrink."""
        files = _MOST_FILES if isinstance(self._agent, Pipe) else 0
        frames: list[Frame] = []
        for body in bodies:
            if isinstance(body, SharedBytes):
                if body.size > _READ_BYTES and files:
                    files -= 1
                else:
                    try:
                        body = read(body)
                    except ValueError as error:  # of a hostile task: what gets nothing in its place fails
                        _logger.warning("%s", error)
                        body = b""
            frames.append(body)
        self._send(message, frames)

    def _watch_congestion(self) -> None:
        """Wait until the connection to the agent is writable, while messages wait for that."""
        if self._agent.is_congested != self._is_congested and self._is_connected:
            self._is_congested = self._agent.is_congested
            events = select.POLLIN | select.POLLOUT if self._is_congested else select.POLLIN
            self._poll.modify(self._agent_descriptor, events)

    # -- actions -------------------------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> list[Event]:
        """Perform actions in order; the events that answer them."""
        events: list[Event] = []
        for action in actions:
            match action:
                case Send(worker_id=worker_id, packet=packet, body=body):
                    worker = self._workers[worker_id]
                    if (leftovers := self._leftovers.get(worker_id)) is not None:
                        leftovers.task_begins(now=time.monotonic())
                    elif self._has_shared_workers:
                        self._watch_shared(worker_id, worker, packet)
                    try:
                        worker.channel.order(packet, body)
                    except OSError:  # dying or stuck; tasks that it does not start go to others
                        self._end(worker)
                case Connect():
                    self._connect(action)
                case Answer():
                    self._answer(action)
                case Report(progress=progress, results=results):
                    self._report(progress, results)
                case Pass(message=message, bodies=bodies):
                    self._pass(message, bodies)
                case Launch():
                    events += self._launch(action)
                case Adopt(worker_id=worker_id, target=target):
                    self._share_with(self._workers[worker_id], target)
                case ShareCpus(weights=weights, running=running):
                    self._shares.share(weights, running)
                case Prepare(environment=environment):
                    self._launcher.prepare(environment)
                case Release(key=key):
                    self._launcher.release(key)
                case Recall(worker_id=worker_id):
                    events += self._recall(worker_id)
                case Kill(worker_id=worker_id) if (launch := self._launches.pop(worker_id, None)) is not None:
                    assert launch.environment is not None
                    words = f"{launch.environment.location} is still looked up: does its file system hang?"
                    events.append(WorkerDied(worker_id, 0, words))
                case Kill(worker_id=worker_id, reason=reason):
                    if reason:
                        _logger.warning("worker %d sent an invalid message (%s); killing it", worker_id, reason)
                        events += self._excess(worker_id)
                    else:
                        self._ended.add(worker_id)
                    self._end(self._workers[worker_id])
                case Copy() | Link() | Unlink() | RemoveCopies():
                    assert self._files is not None
                    self._files.perform(action)
                case ServeBlocks():
                    self._blocks.perform(action)
                case Warn(text=text):
                    _logger.warning("%s", text)
                case ReadStreams():
                    events += self._read_streams(action)
                case Leave(reason=reason, failed=failed):
                    if failed:
                        _logger.error("no worker can be started: %s", reason)
                    self._send(agent_manager.Leaving(reason, failed=failed))
        return events

    def _end(self, process: WorkerProcess) -> None:
        """Let a worker be ended with all that its tasks started, without waiting."""
        process.kill_remote()
        self._reaper.end(process.pid)

    def _connect(self, action: Connect) -> None:
        """Connect two workers. Where that fails, values go through this process, and memory is not used again."""
        try:
            for worker_id in (action.first, action.second):
                self._give_ledger(worker_id)
            if action.first == action.second:
                return
            (here, ledger), (there, _) = edge_pair()
        except OSError as error:
            _logger.warning("workers cannot be connected: %s", error)
            return
        for worker_id, end in ((action.first, here), (action.second, there)):
            body = SharedBytes(MemoryFile(end.detach()), 0, 1), SharedBytes(ledger, 0, LEDGER_BYTES)
            try:
                if (worker := self._workers.get(worker_id)) is not None:
                    worker.channel.send(Peer(action.number, first=worker_id == action.first), body)
            except OSError:  # its other end is closed with this one
                _logger.info("worker %d cannot be connected to another one", worker_id)

    def _give_ledger(self, worker_id: int) -> None:
        """Let a worker know when this process needs a value in its memory no more.

        :raises OSError: if there is no room for open files.
        """
        worker = self._workers.get(worker_id)
        if worker is None or worker_id in self._returns:
            return
        ledger = new_ledger()
        with contextlib.suppress(BrokenPipeError, BlockingIOError):  # it is gone, or reads nothing
            worker.channel.send(Peer(MANAGER, first=False), (SharedBytes(ledger, 0, LEDGER_BYTES),))
            self._returns[worker_id] = Returns(ledger)

    def _answer(self, action: Answer) -> None:
        """Send a worker how a call has ended. Its task may compute and read nothing for hours: then it waits here."""
        unsent = self._unsent.get(action.worker_id)
        if unsent is not None:
            unsent.append(kept_answer(action, self._core.value_memory))
            if len(unsent) == _MOST_UNSENT:
                _logger.warning("worker %d reads none of its answers; killing it", action.worker_id)
                self._end(self._workers[action.worker_id])
        elif action.worker_id in self._workers and not self._answered(action):
            self._unsent[action.worker_id] = collections.deque([kept_answer(action, self._core.value_memory)])
            self._wait_for(action.worker_id, select.POLLIN | select.POLLOUT)

    def _answer_rest(self, worker_id: int) -> None:
        unsent = self._unsent[worker_id]
        while unsent and self._answered(unsent[0]):
            for part in unsent.popleft().body:
                self._core.value_memory.remove(part)
        if not unsent:
            del self._unsent[worker_id]
            self._wait_for(worker_id, select.POLLIN)

    def _answered(self, action: Answer) -> bool:
        """Send a worker how a call has ended; False if its socket has no room."""
        channel = self._workers[action.worker_id].channel
        try:
            if not _has_room(channel):
                return False
            channel.send(action.packet, action.body)
        except BlockingIOError:
            return False
        except OSError:  # it is dying
            pass
        return True

    def _recall(self, worker_id: int) -> list[Event]:
        worker = self._workers[worker_id]
        revoked = worker.channel.revoke()
        events = self._receive(_Worker(worker_id, worker))
        if revoked:
            try:
                worker.channel.send(Sync())
            except OSError:
                self._end(worker)
        return [*events, Recalled(worker_id, revoked)]

    def _read_streams(self, action: ReadStreams) -> list[Event]:
        """Read output of running tasks from the capture files, without their workers.

        A worker empties the files at the end of a task, then sends the result, then starts the next task. So if it has
        sent nothing since the core decided, what was read belongs to the task that the core sees there.
        """
        events: list[Event] = []
        read: list[agent_manager.RunningOutput] = []
        for wanted, worker_id, is_kept in action.tasks:
            if worker_id is None or not is_kept:
                read.append(agent_manager.RunningOutput(wanted, is_running=worker_id is not None, is_kept=is_kept))
                continue
            stdout, stderr, received = self._read_worker(
                worker_id, wanted.stdout_from, wanted.stderr_from, action.max_bytes
            )
            events += received
            read.append(_running(wanted, stdout, stderr))
        for graph in action.graphs:
            known, wanted = graph.known, graph.known.wanted
            if graph.worker_id is not None:
                stdout, stderr, received = self._read_worker(
                    graph.worker_id,
                    max(0, wanted.stdout_from - graph.stdout_base),
                    max(0, wanted.stderr_from - graph.stderr_base),
                    action.max_bytes,
                )
                events += received
                before = Stream(known.stdout_at, known.stdout), Stream(known.stderr_at, known.stderr)
                known = _running(
                    wanted,
                    joined(before[0], stdout, graph.stdout_base, most_bytes=action.max_bytes),
                    joined(before[1], stderr, graph.stderr_base, most_bytes=action.max_bytes),
                )
            read.append(known)
        self._send(agent_manager.OutputRead(action.request_id, action.max_bytes, tuple(read)))
        return events

    def _read_worker(
        self, worker_id: int, stdout_from: int, stderr_from: int, most_bytes: int
    ) -> tuple[Stream, Stream, list[Event]]:
        """The streams of the task that a worker ran when it was decided to read them; nothing if it has sent packets
        since, and these."""
        process = self._workers[worker_id]
        stdout, stderr = process.read_output(stdout_from, stderr_from, most_bytes=most_bytes)
        received = self._receive(_Worker(worker_id, process))
        if received != [PacketsReceived(worker_id, [])]:
            return NOTHING, NOTHING, received
        return stdout, stderr, []

    def _launch(self, action: Launch) -> list[Event]:
        worker_id = action.worker_id
        try:
            process = self._launcher.launch(
                worker_id, slot=action.slot, submitter=action.submitter, environment=action.environment
            )
        except NotLocated:
            self._launches[worker_id] = action
            return []
        except EnvironmentLost as error:
            _logger.warning("cannot start worker %d: %s; it is prepared again", worker_id, error)
            gone = [] if action.environment is None else [EnvironmentGone(action.environment.key)]
            return [*gone, WorkerDied(worker_id, 0, str(error))]
        except OSError as error:
            _logger.exception("cannot start worker %d", worker_id)
            return [WorkerDied(worker_id, 0, str(error))]
        self._reaper.add(process.pid, is_guard=process.supervised)
        worker = _Worker(worker_id, process)
        self._workers[worker_id] = process
        self._share_with(process, action.target)
        if action.submitter:
            self._leftovers[worker_id] = Leftovers(process.worker_pid or process.pid, action.submitter)
        for descriptor in (process.pidfd, process.channel.fileno()):
            self._by_descriptor[descriptor] = worker
            self._poll.register(descriptor, select.POLLIN)
        return []

    def _share_with(self, process: WorkerProcess, target: str) -> None:
        """Give a worker its share of the CPUs, unless it is in a group of a daemon."""
        if process.container is None or not process.container.is_remote:
            self._shares.add(process.pid, target)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _receive(self, worker: _Worker, *, in_steps: bool = False) -> list[Event]:
        """All packets that a worker has sent; with ``in_steps`` the first of them, if there are many files or bytes. A
        task can write to its worker's socket, so they may be malformed, or never end."""
        channel = worker.process.channel
        bytes_before = channel.received_bytes
        packets: list[tuple[Packet, Body]] = []
        events: list[Event] = [PacketsReceived(worker.worker_id, packets)]
        files = 0
        try:
            while (received := channel.receive_shared()) is not None:
                _check_files(*received)
                packet, body = received
                received_bytes = channel.received_bytes - bytes_before
                if len(packets) >= _MOST_PACKETS or received_bytes > _MOST_BYTES:
                    raise ValueError("more packets at a time than a worker sends")
                if isinstance(packet, Done) and packet.lent is not None and worker.worker_id in self._returns:
                    received = packet, self._returns[worker.worker_id].body(body, *packet.lent)
                if type(received[0]) is NewModules:
                    self._count_report(worker.worker_id)
                    self._launcher.learn(worker.process.imports_key, received[0].names)
                else:
                    packets.append(received)
                if not isinstance(body, bytes):
                    files += len(ranges_of(body))
                if in_steps and (files >= _MOST_NEW_FILES or received_bytes >= _MOST_NEW_BYTES):
                    break
            else:  # this end is dead, or its task has shut it down
                self._ignore(channel.fileno())
        except BlockingIOError:
            pass
        except (OSError, *MALFORMED) as error:
            events.append(MalformedReceived(worker.worker_id, str(error)))
        if packets and (leftovers := self._leftovers.get(worker.worker_id)) is not None:
            kinds = [type(packet) for packet, _ in packets]
            if Ready in kinds:
                leftovers.keep_present()
            if ended := kinds.count(Done):
                is_idle = ended >= self._core.tasks_at(worker.worker_id)
                leftovers.task_ended(now=time.monotonic(), is_idle=is_idle)
        return events

    def _wait_for(self, worker_id: int, events: int) -> None:
        """Wait for these events of a worker's channel, if it is not shut down."""
        descriptor = self._workers[worker_id].channel.fileno()
        if descriptor in self._by_descriptor:
            self._poll.modify(descriptor, events)

    def _ignore(self, descriptor: int) -> None:
        """Wait for nothing more from a worker's descriptor."""
        if self._by_descriptor.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _count_report(self, worker_id: int) -> None:
        """A worker reports imports; a task that writes to its socket could do so without end.

        :raises ValueError: if it is one too many.
        """
        self._import_reports[worker_id] += 1
        if self._import_reports[worker_id] > MOST_REPORTS:
            raise ValueError("more reports of imports than a worker sends")

    def _reap(self, worker: _Worker) -> list[Event]:
        process = worker.process
        revoked = process.channel.revoke()
        events = self._receive(worker)
        stdout_tail, stderr_tail = process.tails()
        output = process.output_end()
        for descriptor in (process.pidfd, process.channel.fileno()):
            self._ignore(descriptor)
        del self._workers[worker.worker_id]
        del self._import_reports[worker.worker_id]
        self._leftovers.pop(worker.worker_id, None)
        for answer in self._unsent.pop(worker.worker_id, ()):
            for part in answer.body:
                self._core.value_memory.remove(part)
        self._returns.pop(worker.worker_id, None)
        self._blocks.drop(worker.worker_id)
        self._shares.remove(process.pid)
        reason = process.reap()
        self._reaper.remove(process.pid)
        level = logging.DEBUG if worker.worker_id in self._ended else logging.INFO
        _logger.log(level, "worker %d, pid %d, ended: %s", worker.worker_id, process.pid, reason)
        self._ended.discard(worker.worker_id)
        self._orphans.expect(now=time.monotonic())
        self._scratch.removed(process.scratch)
        return [*events, WorkerDied(worker.worker_id, revoked, reason, stdout_tail, stderr_tail, output)]

    def _kill_orphans(self) -> None:
        """Kill orphans of dead workers, when it is time."""
        now, due_at = time.monotonic(), self._orphans.due_at
        if due_at is not None and now >= due_at:
            known = {self._reaper.pid, *self._launcher.children, *(worker.pid for worker in self._workers.values())}
            self._orphans.kill(known=known, now=now)


def _check_files(packet: Packet, body: Body) -> None:
    """Check the files that a packet's body is in. Values for other calls, which only workers read, may be in files on a
    disk.

    :raises ValueError: if the manager could be killed by one that shrinks.
    """
    if isinstance(body, bytes) or (type(packet) is Done and packet.parts):
        return
    if not all(part.memory.is_sealed for part in ranges_of(body)):
        raise ValueError("a body in a file that can shrink")


def _has_room(channel: Channel) -> bool:
    """Whether a worker's socket is at most a quarter full, so that tasks have room, too."""
    poll = select.poll()
    poll.register(channel, select.POLLOUT)
    return bool(poll.poll(0))


def _running(wanted: agent_manager.WantedOutput, stdout: Stream, stderr: Stream) -> agent_manager.RunningOutput:
    return agent_manager.RunningOutput(
        wanted,
        stdout=stdout.data,
        stderr=stderr.data,
        stdout_at=stdout.start,
        stderr_at=stderr.start,
        is_running=True,
    )


def _terminated(reason: str) -> Terminated:
    _logger.warning("%s; stopping all workers", reason)
    return Terminated(reason)
