"""Engine loop: the thread that runs the agent's core and its managers, with futures in place of a cloud."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import random
import secrets
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec
import zmq

from farcall_common.errors import (
    DeserializationError,
    ErrorRecord,
    TaskError,
    TaskFailed,
    TaskLost,
    original_of,
)
from farcall_common.event_log import UserBytes
from farcall_common.graphs import StageState
from farcall_common.payload import load_user_data, task_error
from farcall_common.payload.functions import Function
from farcall_common.payload.native import load_native
from farcall_common.payload.pickler import set_path_of_workers
from farcall_common.progress import PROGRESS, Progress, read_progress
from farcall_common.standard_streams import open_missing_streams
from farcall_common.wire import FunctionSpec, TaskSpec, TaskState, new_id
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.calls import about_calls
from farcall_endpoint.agent.core.scheduling import POLICIES
from farcall_endpoint.agent.core.tasks import Task, TaskResult
from farcall_endpoint.agent.shell.fleet import Fleet
from farcall_endpoint.agent.shell.memory_root import MemoryRoot
from farcall_endpoint.agent.shell.nodes import make_network, plan_blocks, provider_of
from farcall_endpoint.agent.shell.transfers import Background, Job
from farcall_endpoint.config.providers import LocalProviderConfig, ProviderConfig
from farcall_endpoint.config.settings import QosSettings, SweepSettings, ValkeySettings
from farcall_endpoint.contracts import agent_manager
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.engine.future import EngineFuture
from farcall_endpoint.files.client import TransferClient
from farcall_endpoint.files.places import files_directory
from farcall_endpoint.files.plan import Staging
from farcall_endpoint.files.settings import TransferSettings
from farcall_endpoint.host.shared_memory import Bytes
from farcall_endpoint.host.slots import Sharing
from farcall_endpoint.providers import Provider
from farcall_endpoint.services.sweeper import Sweeper, SweeperThread
from farcall_endpoint.services.valkey import ValkeyServers

_logger = logging.getLogger(__name__)

_MANAGER_HORIZON_S: Final = 0.1
_MOST_PER_TURN: Final = 2000
_LAST_REPORTS_S: Final = 5.0


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """What does not change while an engine lives; see :class:`~farcall_endpoint.Engine`."""

    sharing: Sharing
    workers: int  # to expect on a node
    prefetch: int
    batching: bool
    scheduling: Literal["random", "round-robin"]
    working_dir: Path
    scripts_root: Path  # where each engine makes a directory of its own, for what a scheduler reads and writes
    provider: ProviderConfig
    address: str | None
    worker_port_range: tuple[int, int] | None
    max_idletime_s: float
    max_block_failures: int
    block_failure_period_s: float
    qos: QosSettings


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """How an engine is. ``slots``: workers that its managers keep, or are about to start. ``problem`` says why it
    cannot run anything, if it cannot."""

    managers: int = 0
    slots: int = 0
    workers: int = 0
    idle_workers: int = 0
    pending_tasks: int = 0
    unfinished_tasks: int = 0
    problem: str = ""


class Submission(msgspec.Struct, frozen=True):
    """A call on its way into the engine. ``callees``: functions that it calls. ``rebuild`` makes its value of the
    result, if that has another form."""

    spec: TaskSpec
    function: Function
    payload: bytes
    future: EngineFuture[Any]
    callees: Sequence[Function] = ()
    rebuild: Callable[[Any], Any] | None = None


class EngineLoop:
    """Owns the sockets, the core and the futures that are open. Its public methods may be called from any thread."""

    def __init__(self, options: EngineOptions) -> None:
        open_missing_streams()
        self.options = options
        #: Set whenever :attr:`stats` has changed in what it says of workers.
        self.changed = threading.Event()
        self.stats = EngineStats()
        self._inbox: collections.deque[Submission] = collections.deque()
        self._cancels: collections.deque[str] = collections.deque()
        self._open: dict[str, EngineFuture[Any]] = {}
        self._rebuilds: dict[str, Callable[[Any], Any]] = {}
        self._functions: dict[str, Function] = {}
        self._asleep = False
        self._ended = False
        self._failure: BaseException | None = None
        self._stop_wanted = False
        self._cancel_wanted = False
        self._kill_at: float | None = None
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not before: a late call would write into whatever has the number next.
        weakref.finalize(self, os.close, self._waker).atexit = False
        self._events: list[ev.Event] = []  # of this turn
        self._nodes = ev.NodesChanged("", "")
        self._core = AgentCore(
            endpoint_id="",
            policy=POLICIES[options.scheduling](random.Random()),  # noqa: S311 - nothing secret
            slots_hint=options.workers,
            prefetch=PrefetchPolicy(horizon_s=_MANAGER_HORIZON_S, limit=options.prefetch),
            window=PrefetchPolicy(horizon_s=0.0, limit=0),
            max_window=0,
            max_inline_bytes=sys.maxsize,
            has_cloud=False,
            block_s=options.provider.walltime_s,
            jitter=random.random,
            staging=Staging(jitter=random.random),
            qos=options.qos,
        )
        self._thread = threading.Thread(target=self._run, name="farcall-engine", daemon=True)

    def start(self) -> None:
        """Start the thread, and the first workers with it.

        :raises ConfigurationError: if the provider cannot be used from here, or nodes cannot reach this machine.
        """
        with contextlib.ExitStack() as belongings:
            poller = zmq.Poller()
            poller.register(self._waker, zmq.POLLIN)
            is_local = isinstance(self.options.provider, LocalProviderConfig)
            memory = belongings.enter_context(contextlib.closing(MemoryRoot(is_wanted=is_local)))
            self._fleet = self._make_fleet(belongings, poller, memory)
            self._background: Background | None = None
            self._valkey = ValkeyServers(
                ValkeySettings(),
                is_local=is_local,
                ports=self.options.worker_port_range,
                submit=self._submit_job,
                send=self._fleet.answer_valkey,
            )
            belongings.callback(self._valkey.close)
            self._sweeper = SweeperThread(Sweeper(self.options.working_dir, memory.path, SweepSettings()))
            belongings.callback(self._sweeper.stop)
            self._poller, self._belongings = poller, belongings.pop_all()
        self._sweeper.start()
        self._thread.start()

    def _submit_job(self, job: Job) -> None:
        """Run a job in a thread, which few engines need."""
        if self._background is None:
            self._background = Background(threads=1)
            self._belongings.callback(self._background.close)
            self._poller.register(self._background.fileno(), zmq.POLLIN)
        self._background.submit(job)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread's end, after :meth:`stop`."""
        self._thread.join()

    def submit(self, submission: Submission) -> None:
        """Run a call.

        :raises BrokenExecutor: if the thread has ended.
        """
        self._inbox.append(submission)
        if self._ended:  # looked at after the append: either the thread saw the call when it ended, or this does
            self._end_open(self._failure)
            raise concurrent.futures.BrokenExecutor("the engine has ended") from self._failure
        if self._asleep:
            self._wake()

    def cancel(self, task_id: str) -> None:
        """Stop a task whose future was cancelled."""
        self._cancels.append(task_id)
        if self._asleep:
            self._wake()

    def end_after_fork(self, error: BaseException) -> None:
        """In a forked child, which has no such thread: end the open futures."""
        for future in [*self._open.values(), *(each.future for each in self._inbox)]:
            future.end_after_fork(error)

    def stop(self, *, cancel: bool) -> None:
        """End when everything has, or now with all that is open cancelled."""
        self._cancel_wanted = self._cancel_wanted or cancel
        self._stop_wanted = True
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._waker, 1)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        fleet = self._fleet
        with self._belongings:
            try:
                while not (self._kill_at is not None and fleet.is_empty):
                    self._turn(self._poller, fleet)
            except BaseException as error:
                _logger.exception("the engine ends because of a defect")
                self._failure = error
                raise
            finally:
                self._ended = True
                self._end_open(self._failure)
                fleet.end()

    def _make_fleet(self, belongings: contextlib.ExitStack, poller: zmq.Poller, memory: MemoryRoot) -> Fleet:
        """A fleet; what it needs is given back with ``belongings``."""
        options = self.options
        command_options = [*options.sharing.options(), "--prefetch", str(options.prefetch)]
        command_options += [
            "--working-dir",
            str(options.working_dir),
            "--quiet",
            "--native",
        ]  # all tasks are this user's
        command_options += [] if options.batching else ["--no-batching"]
        command_options += ["--qos", msgspec.json.encode(options.qos).decode(), *memory.options]
        command_options += [] if memory.options else ["--node-memory"]
        path = [str(options.working_dir) if entry == "" else entry for entry in sys.path]
        set_path_of_workers(path)
        context = belongings.enter_context(zmq.Context())
        directory = options.scripts_root / new_id()
        belongings.callback(shutil.rmtree, directory, ignore_errors=True)
        provider = self._make_provider(directory)
        belongings.callback(provider.close)
        settings = TransferSettings(directory=str(directory / "files"), working_dir=str(directory))
        self._file_transfers = TransferClient(lambda: settings, poller=poller, owner_or=lambda _: "")
        belongings.callback(self._file_transfers.close)
        fleet = Fleet(
            context,
            address=self._make_address(belongings),
            poller=poller,
            provider=provider,
            blocks=plan_blocks(
                options.provider,
                slots=options.workers,
                max_failures=options.max_block_failures,
                failure_period_s=options.block_failure_period_s,
                idle_release_s=options.max_idletime_s,
            ),
            network=make_network(options.provider, address=options.address, ports=options.worker_port_range),
            command_options=command_options,
            variables={"PYTHONPATH": os.pathsep.join(path), **memory.variables},
            function_body=lambda function_hash: self._functions[function_hash].body,
            payload=_payload_of,
            demand=self._core.demand,
            batching=options.batching,
            files_key=secrets.token_bytes(32),
            files_dir=lambda task_id, _: str(files_directory(directory, task_id, "")),
        )
        belongings.callback(fleet.close)
        return fleet

    def _make_address(self, belongings: contextlib.ExitStack) -> str | None:  # noqa: ARG002 - simulated managers
        """Return the address of a socket without keys, or None: managers on this machine use pipes."""
        return None

    def _make_provider(self, directory: Path) -> Provider:
        return provider_of(self.options.provider, name="engine", environment=os.environ, script_dir=directory)

    def _turn(self, poller: zmq.Poller, fleet: Fleet) -> None:
        ready = {source for source, _ in poller.poll(self._timeout_ms(fleet))}
        self._asleep = False
        now = time.monotonic()
        if self._waker in ready:
            os.eventfd_read(self._waker)
        if self._background is not None and self._background.fileno() in ready:
            self._background.finish()
        self._take_submissions()
        self._receive_from_managers(fleet, ready, now)
        self._valkey.maintain(self._core.busy_submitters)
        for lost in fleet.maintain(now=now, ready=ready):
            expected = lost.expected or self._kill_at is not None
            _logger.log(logging.DEBUG if expected else logging.WARNING, "%s: %s", lost.manager_id, lost.reason)
            self._events.append(ev.ManagerLost(lost.manager_id, lost.reason, expected, lost.unstarted))
        moved, lost_process = self._file_transfers.receive()
        if moved:
            self._events.append(ev.TransfersReported(moved))
        if lost_process:
            self._events.append(ev.TransfersLost(lost_process))
        nodes = ev.NodesChanged(fleet.refusal, fleet.problem)
        if nodes != self._nodes:
            self._nodes = nodes
            self._events.append(nodes)
        events, self._events = self._events, []
        for action in self._core.handle(events, time.time()):
            self._perform(fleet, action)
        fleet.take()
        self._wind_down(fleet, now)
        self._report(fleet)

    def _timeout_ms(self, fleet: Fleet) -> int:
        self._asleep = True  # from here on a submission wakes the thread; what came before is seen here
        if self._inbox or self._cancels:
            return 0
        now, epoch = time.monotonic(), time.time()
        instants = (fleet.next_deadline(), self._file_transfers.next_deadline(), self._kill_at)
        deadlines = [deadline - now for deadline in instants if deadline is not None]
        due = self._core.next_deadline()
        if due is not None:
            deadlines.append(due - epoch)
        return max(0, int(min(deadlines, default=60.0) * 1000) + 1)

    def _take_submissions(self) -> None:
        inbox = self._inbox
        tasks: list[TaskSpec] = []
        payloads: list[bytes] = []
        functions: list[Function] = []
        for _ in range(min(len(inbox), _MOST_PER_TURN)):
            submission = inbox.popleft()
            future, function = submission.future, submission.function
            if future.cancelled():
                continue
            self._open[submission.spec.task_id] = future
            if submission.rebuild is not None:
                self._rebuilds[submission.spec.task_id] = submission.rebuild
            for each in (function, *submission.callees):
                if each.hash not in self._functions:
                    self._functions[each.hash] = each
                    functions.append(each)
            tasks.append(submission.spec)
            payloads.append(submission.payload)
        if tasks:
            specs = [FunctionSpec(function_hash=each.hash, name=each.name, body=0) for each in functions]
            bodies = UserBytes([each.body for each in functions])
            self._events.append(ev.TasksReceived(tasks, UserBytes(payloads), specs, bodies))
        if self._cancels:
            wanted = [self._cancels.popleft() for _ in range(len(self._cancels))]
            self._events.append(ev.CancelRequested([task_id for task_id in wanted if task_id in self._open]))

    def _receive_from_managers(self, fleet: Fleet, ready: Collection[object], now: float) -> None:
        for manager_id, message, bodies in fleet.receive(ready=ready, now=now):
            match message:
                case agent_manager.Registered() as registered:
                    _logger.debug("%s, pid %d: %d slots", manager_id, registered.pid, registered.slots)
                    self._events.append(
                        ev.ManagerRegistered(
                            manager_id,
                            registered.slots,
                            registered.ends_at,
                            latency_slots=registered.latency_workers,
                        )
                    )
                case agent_manager.Progress() as progress:
                    results = UserBytes(cast("list[Bytes]", bodies))  # only those of calls are in files
                    self._events.append(ev.ManagerProgress(manager_id, progress, results))
                    for each in progress.progress:
                        if (future := self._open.get(each.task_id)) is not None:
                            future.progress = Progress(each.done, each.total, each.text, each.at)
                case agent_manager.CallsTaken() | agent_manager.CallNews() | agent_manager.CallsDropped():
                    self._events.append(about_calls(manager_id, message, bodies))
                case agent_manager.ValkeyRequested(submitter=submitter):
                    self._valkey.requested(manager_id, submitter)

    def _perform(self, fleet: Fleet, action: do.Action) -> None:
        match action:
            case do.PassOn():
                fleet.pass_on(action)
            case do.CancelTasks(manager_id=manager_id, task_ids=task_ids):
                fleet.cancel(manager_id, task_ids)
            case do.RunTasks(manager_id=manager_id, tasks=tasks):
                fleet.order(manager_id, tasks)
            case do.MoveFiles(orders=orders):
                self._file_transfers.order(orders)
            case do.ReportResults(tasks=tasks):
                for task in tasks:
                    self._settle(task)
            case _:
                pass  # reports to a cloud

    def _settle(self, task: Task) -> None:
        future, result = self._open.get(task.task_id), task.result
        if future is None or result is None:
            return
        rebuild = self._rebuilds.pop(task.task_id, None) if self._rebuilds else None
        if result.details is not None and "stages" in result.details:
            future.stages = _stages(result.details["stages"])
        if future.progress is not None or (result.details is not None and PROGRESS in result.details):
            future.progress = read_progress((result.details or {}).get(PROGRESS))  # None: it was that of an earlier run
        if result.state is TaskState.SUCCESS:
            try:
                value = load_user_data(lambda: load_native(result.body or b""))
                if rebuild is not None:
                    value = rebuild(value)
            except DeserializationError as error:
                future.settle(None, error.with_traceback(None))
            else:
                future.settle(value)
        elif result.state is TaskState.CANCELLED:
            future.cancel()
        else:
            failure = _error(result)
            future.settle(None, original_of(failure) if future.raise_original else failure)
        del self._open[task.task_id]  # not before: whatever ends this thread ends the futures that are open

    def _wind_down(self, fleet: Fleet, now: float) -> None:
        if not self._stop_wanted:
            return
        if self._cancel_wanted:
            self._cancel_wanted = False
            for future in [*[each.future for each in self._inbox], *self._open.values()]:
                future.cancel()
        if self._kill_at is None:
            if not (self._open or self._inbox or self._cancels):
                self._events.append(ev.DrainOrdered())
                fleet.stop(grace_s=0.0)
                self._kill_at = now + _LAST_REPORTS_S
        elif now >= self._kill_at:
            fleet.kill()
            self._kill_at = now + _LAST_REPORTS_S

    def _report(self, fleet: Fleet) -> None:
        report = self._core.report()
        stats = EngineStats(
            managers=report.managers,
            slots=fleet.slots,
            workers=report.total_workers,
            idle_workers=report.idle_workers,
            pending_tasks=report.pending_tasks + len(self._inbox),
            unfinished_tasks=report.outstanding_tasks + len(self._inbox),
            problem=str(report.detail.get("problem", "")),
        )
        self.stats = stats

    def _end_open(self, cause: BaseException | None) -> None:
        """Fail what is open: the thread that would settle it has ended."""
        while self._open or self._inbox:
            try:
                future = self._open.popitem()[1] if self._open else self._inbox.popleft().future
            except (KeyError, IndexError):
                continue  # a submitting thread took it
            failure = TaskLost("The engine ended; the task may have run.")
            failure.__cause__ = cause
            future.settle(None, failure)


def _payload_of(task: Task) -> Bytes:
    assert task.payload is not None  # until the task is finished, for it may run again
    return task.payload


def _stages(found: object) -> Sequence[StageState]:
    """The stages in the details of a result; none if they cannot be read."""
    try:
        return msgspec.convert(found, tuple[StageState, ...])
    except msgspec.ValidationError:
        return ()


def _error(result: TaskResult) -> BaseException:
    """Return the exception for the result of a task that did not succeed."""
    record = ErrorRecord.from_json(result.error or {"code": TaskError.code, "message": "The task failed."})
    body = result.body
    expected = TaskFailed if result.state is TaskState.FAILED else TaskError
    return task_error(record, expected=expected, load_original=(lambda: load_native(body)) if body else None)
