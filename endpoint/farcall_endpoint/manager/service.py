"""The manager's shell: an epoll loop around its core, its workers' sockets, and one socket to the agent."""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from farcall_endpoint import process_reaper, protocol
from farcall_endpoint.liveness import LivenessTimer
from farcall_endpoint.manager.core import Action, Job, Kill, Launch, ManagerCore, Recall, Send
from farcall_endpoint.manager.launcher import WorkerLauncher, WorkerProcess
from farcall_endpoint.manager.limits import LIMIT_PERIOD_S, OUTPUT_PERIOD_S, breach, capped
from farcall_endpoint.manager.processes import MeasuredTask, Orphans, memory_of_tasks, output_bytes
from farcall_endpoint.pipe import Pipe
from farcall_endpoint.shared_memory import Frame
from farcall_endpoint.worker.channel import MALFORMED, Begun, Done, Ready, Sync, Synced

if TYPE_CHECKING:
    from farcall_endpoint.transport import SocketLink

_logger = logging.getLogger(__name__)

_REPORT_PERIOD_S: Final = 1.0
"""At least so often the agent hears how the manager is; a local agent also sees it die."""


_LAST_WORDS_S: Final = 1.0


@dataclasses.dataclass(frozen=True)
class _Worker:
    worker_id: int
    process: WorkerProcess


class Manager:
    """Runs until the agent stops it or is gone.

    :param agent: the way to it; owned by this object from now on.
    :param agent_pid: of an agent on this machine, to notice its death at once; None for one on another node.
    :param agent_silence_limit_s: an agent on another node that says nothing for so long is gone.
    :param memory_per_worker_bytes: no task may use more.
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
        registered: protocol.Registered,
    ) -> None:
        self._core = core
        self._launcher = launcher
        self._agent = agent
        self._agent_pidfd = None if agent_pid is None else os.pidfd_open(agent_pid)
        limit_s = agent_silence_limit_s if agent_pid is None else None
        self._agent_silence = LivenessTimer(limit_s=limit_s, now=time.monotonic())
        self._heard = 0
        self._said = 0
        self._memory_per_worker_bytes = memory_per_worker_bytes
        self._registered = registered
        self._workers: dict[int, WorkerProcess] = {}
        self._by_descriptor: dict[int, _Worker] = {}
        self._functions: dict[str, Frame] = {}
        self._orphans = Orphans()  # before there are children
        self._reaper = _start_reaper()
        self._epoll = select.epoll()
        self._epoll.register(self._agent.fileno(), select.EPOLLIN)
        if self._agent_pidfd is not None:
            self._epoll.register(self._agent_pidfd, select.EPOLLIN)
        self._report_at = 0.0
        self._measure_at = 0.0
        self._measure_memory_at = 0.0
        self._begun: dict[int, Begun] = {}  # by worker: the task of limited memory that it began last
        self._written: dict[int, int] = {}  # by worker: the output at the last look
        self._abandoned = False
        self._agent_is_there = True
        self._is_congested = False
        self._parting = "it was told to stop"
        self._signals, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll.register(self._signals, select.EPOLLIN)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until stopped; then no worker is left."""
        signal.signal(signal.SIGTERM, lambda *_: None)  # its number arrives on the wake-up descriptor
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent decides; it stops its managers
        self._tell(self._registered)
        try:
            while not self._core.is_over:
                self._turn()
            if not self._abandoned:
                failure = self._core.failure
                if failure:
                    _logger.error("no worker can be started: %s", failure)
                self._tell(protocol.Leaving(failure or self._parting, failed=bool(failure)))
        finally:
            process_reaper.kill_trees({worker.pid for worker in self._workers.values()})
            for worker in self._workers.values():
                worker.process.wait()
            self._orphans.end(known={self._reaper.pid}, now=time.monotonic())
            self._reaper.communicate()
            self._agent.close(linger_s=0.0 if self._abandoned else _LAST_WORDS_S)

    def _turn(self) -> None:
        for descriptor, _ in self._epoll.poll(self._timeout_s()):
            worker = self._by_descriptor.get(descriptor)
            if worker is not None and worker.worker_id in self._workers:
                if descriptor == worker.process.pidfd:
                    self._bury(worker)
                else:
                    self._hear(worker)
            elif descriptor == self._agent_pidfd:
                self._epoll.unregister(self._agent_pidfd)
                self._abandon("the agent is gone")
            elif descriptor == self._signals and signal.SIGTERM in os.read(self._signals, 64):
                self._part("it got SIGTERM, as from a scheduler at the end of a job")
        if self._is_congested:
            self._agent.flush()
            self._watch()
        self._obey()
        if self._agent_silence.is_expired(now=time.monotonic()) and not self._abandoned:
            self._abandon("the agent has been silent for too long")
        self._measure()
        self._end_orphans()
        while actions := self._core.pump(now=time.monotonic(), epoch=time.time()):
            self._perform(actions)
        self._report()

    def _timeout_s(self) -> float:
        if self._agent.has_unread:
            return 0.0
        deadline = self._core.next_deadline()
        deadline = self._report_at if deadline is None else min(deadline, self._report_at)
        if self._core.limited():
            deadline = min(deadline, self._measure_at)
        if self._orphans.due_at is not None:
            deadline = min(deadline, self._orphans.due_at)
        return max(0.0, deadline - time.monotonic())

    def _measure(self) -> None:
        """Tell the core of tasks that use more than they may."""
        now = time.monotonic()
        limited = self._core.limited()
        if now < self._measure_at or not limited:
            return
        written = {worker_id: output_bytes(self._workers[worker_id].output) for worker_id, _ in limited}
        grows = any(size > self._written.get(worker_id, 0) for worker_id, size in written.items())
        self._written = written
        self._measure_at = now + (OUTPUT_PERIOD_S if grows else LIMIT_PERIOD_S)
        memory: dict[int, int] = {}
        if now >= self._measure_memory_at:
            self._measure_memory_at = now + LIMIT_PERIOD_S
            measured = {
                self._workers[worker_id].pid: MeasuredTask(order.options.memory_bytes, begun.resident_bytes)
                for worker_id, order in limited
                if order.options.memory_bytes is not None
                and (begun := self._begun.get(worker_id)) is not None
                and begun.task_id == order.task_id
            }
            memory = memory_of_tasks(measured) if measured else {}
        for worker_id, order in limited:
            used_bytes = memory.get(self._workers[worker_id].pid, 0)
            record = breach(order, memory_bytes=used_bytes, output_bytes=written[worker_id])
            if record is not None:
                self._core.breached(worker_id, order.task_id, record)

    def _abandon(self, reason: str) -> None:
        self._abandoned = True
        self._part(reason)

    def _part(self, reason: str) -> None:
        _logger.warning("%s; ending all workers", reason)
        self._parting = reason
        self._core.stop(grace_s=0, now=time.monotonic())

    # -- agent ---------------------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        while self._agent_is_there:
            try:
                frames = self._agent.receive_shared()
            except BlockingIOError:
                return
            if frames is None:
                self._epoll.unregister(self._agent.fileno())
                self._agent_is_there = False
                self._abandon("the agent is gone")
                return
            self._agent_silence.heard(now=time.monotonic())
            if self._has_gap(protocol.number_of(frames)):
                self._part("the connection to the agent broke, and messages were lost")
                return
            message, bodies = protocol.decode_from_agent(frames)
            match message:
                case protocol.RunTasks():
                    self._take(message, bodies)
                case protocol.CancelTasks(task_ids=task_ids):
                    self._core.cancel(task_ids)
                case protocol.Stop(grace_s=grace_s):
                    self._core.stop(grace_s=grace_s, now=time.monotonic())
                case protocol.ResultsTaken(size_bytes=size_bytes, window_bytes=window_bytes):
                    self._core.results_taken(size_bytes, window_bytes=window_bytes)

    def _has_gap(self, number: int) -> bool:
        if number == 0:
            return False
        expected, self._heard = self._heard + 1, number
        return number != expected

    def _take(self, message: protocol.RunTasks, bodies: list[Frame]) -> None:
        if message.forget:
            self._functions.clear()
        for function_hash, body in message.functions:
            self._functions[function_hash] = bodies[body]
        functions = self._functions
        orders = message.tasks
        if self._memory_per_worker_bytes is not None:
            orders = tuple([capped(order, self._memory_per_worker_bytes) for order in orders])
        self._core.run([Job(order, functions[order.function_hash], bodies[order.payload]) for order in orders])

    def _report(self) -> None:
        now = time.monotonic()
        report = self._core.take_progress()
        if report is not None:
            self._tell(*report)
            self._report_at = now + _REPORT_PERIOD_S
        elif now >= self._report_at:
            self._tell(self._core.progress())
            self._report_at = now + _REPORT_PERIOD_S

    def _tell(self, message: protocol.FromManager, bodies: list[Frame] | None = None) -> None:
        self._said += 1
        self._agent.send(protocol.encode(message, bodies or (), number=self._said))
        self._watch()

    def _watch(self) -> None:
        """Wait for room on the way to the agent, while something waits for that."""
        if self._agent.is_congested != self._is_congested and self._agent_is_there:
            self._is_congested = self._agent.is_congested
            events = select.EPOLLIN | select.EPOLLOUT if self._is_congested else select.EPOLLIN
            self._epoll.modify(self._agent.fileno(), events)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        doomed: set[int] = set()
        for action in actions:
            match action:
                case Send(worker_id=worker_id, packet=packet, body=body):
                    worker = self._workers[worker_id]
                    try:
                        worker.channel.order(packet, body)
                    except OSError:  # dying or stuck; what it does not start is given to others
                        worker.kill()
                case Launch(worker_id=worker_id, slot=slot):
                    self._launch(worker_id, slot)
                case Recall(worker_id=worker_id):
                    self._recall(worker_id)
                case Kill(worker_id=worker_id):
                    doomed.add(self._workers[worker_id].pid)
        process_reaper.kill_trees(doomed)  # together: on a large node it takes a while to look at all processes

    def _recall(self, worker_id: int) -> None:
        worker = self._workers[worker_id]
        revoked = worker.channel.revoke()
        self._hear(_Worker(worker_id, worker))
        if revoked:
            try:
                worker.channel.send(Sync())
            except OSError:
                worker.kill()
        self._core.recalled(worker_id, revoked)

    def _launch(self, worker_id: int, slot: int) -> None:
        try:
            process = self._launcher.launch(worker_id, slot=slot)
        except OSError as error:
            _logger.exception("cannot start worker %d", worker_id)
            self._core.died(worker_id, revoked=0, reason=str(error), tails=("", ""), now=time.monotonic())
            return
        self._notify_reaper(f"+{process.pid}")
        worker = _Worker(worker_id, process)
        self._workers[worker_id] = process
        for descriptor in (process.pidfd, process.channel.fileno()):
            self._by_descriptor[descriptor] = worker
            self._epoll.register(descriptor, select.EPOLLIN)

    def _hear(self, worker: _Worker) -> None:
        """Take in all that a worker has sent."""
        while True:
            try:
                received = worker.process.channel.receive_shared()
            except BlockingIOError:
                return
            except MALFORMED as error:
                self._distrust(worker, str(error))
                return
            if received is None:
                return
            packet, body = received
            if isinstance(packet, Done):
                if packet.task_id != self._core.running(worker.worker_id):
                    self._distrust(worker, "the end of a task that it does not run")
                    return
                self._begun.pop(worker.worker_id, None)
                self._core.done(worker.worker_id, packet, body, now=time.monotonic())
            elif isinstance(packet, Begun):
                if packet.task_id == self._core.running(worker.worker_id):
                    self._begun.setdefault(worker.worker_id, packet)  # a task that sends another one gains nothing
            elif isinstance(packet, Synced):
                self._core.synced(worker.worker_id)
            elif isinstance(packet, Ready):
                _logger.debug("worker %d is ready, pid %d", worker.worker_id, packet.pid)
                self._core.ready(worker.worker_id)

    def _distrust(self, worker: _Worker, said: str) -> None:
        """A task has used its worker's socket. That costs the worker; all that it was to run is accounted for then."""
        _logger.warning("worker %d sent what no worker sends (%s); ending it", worker.worker_id, said)
        worker.process.kill()

    def _bury(self, worker: _Worker) -> None:
        process = worker.process
        revoked = process.channel.revoke()
        self._hear(worker)
        tails = process.tails()
        for descriptor in (process.pidfd, process.channel.fileno()):
            self._epoll.unregister(descriptor)
            del self._by_descriptor[descriptor]
        del self._workers[worker.worker_id]
        self._begun.pop(worker.worker_id, None)
        reason = process.bury()
        self._notify_reaper(f"-{process.pid}")
        _logger.info("worker %d, pid %d, ended: %s", worker.worker_id, process.pid, reason)
        self._orphans.expect(now=time.monotonic())
        self._core.died(worker.worker_id, revoked=revoked, reason=reason, tails=tails, now=time.monotonic())

    def _end_orphans(self) -> None:
        """End what dead workers have left behind."""
        now, due_at = time.monotonic(), self._orphans.due_at
        if due_at is not None and now >= due_at:
            known = {self._reaper.pid, *(worker.pid for worker in self._workers.values())}
            self._orphans.end(known=known, now=now)

    def _notify_reaper(self, line: str) -> None:
        """Add a worker to the reaper's list, or remove it. A reaper that was killed is replaced."""
        stdin = self._reaper.stdin
        assert stdin is not None
        try:
            stdin.write(f"{line}\n".encode())
            stdin.flush()
        except BrokenPipeError:
            self._reaper.wait()
            self._reaper = _start_reaper()
            for process in self._workers.values():
                self._notify_reaper(f"+{process.pid}")


def _start_reaper() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(Path(process_reaper.__file__))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
