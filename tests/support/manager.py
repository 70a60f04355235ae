"""A manager's core with simulated workers, which do what a test says."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import msgspec

from farcall_common.task_options import TaskOptions
from farcall_endpoint.contracts.agent_manager import Finished, Progress, TaskOrder
from farcall_endpoint.contracts.manager_worker import Done, Order, Ready, Run, Sync, Synced
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.host.shared_memory import Frame
from farcall_endpoint.manager.core.actions import Action, Kill, Launch, Leave, Pass, Recall, Report, Send
from farcall_endpoint.manager.core.events import (
    Event,
    Instant,
    Job,
    PacketsReceived,
    Recalled,
    TasksReceived,
    WorkerDied,
)
from farcall_endpoint.manager.core.manager import ManagerCore


class Worker:
    """A worker's end of its channel: unread packets, the orders of the current one, claims."""

    def __init__(self) -> None:
        self.packets: collections.deque[Run | Sync] = collections.deque()
        self.orders: collections.deque[Order] = collections.deque()
        self.claims = 0
        self.running: Order | None = None
        self.known: set[str] = set()
        self.synced = 0

    @property
    def ahead(self) -> list[str]:
        """The tasks that it will start, in order."""
        orders = [*self.orders, *(o for packet in self.packets if isinstance(packet, Run) for o in packet.orders)]
        return [order.task_id for order in orders[len(orders) - self.claims :]]

    def step(self) -> bool:
        """Start the next task; False if there is none."""
        assert self.running is None
        while True:
            while self.orders:
                order = self.orders.popleft()
                if self.claims:
                    self.claims -= 1
                    assert not order.function_hash or order.function_hash in self.known
                    self.running = order
                    return True
            if not self.packets:
                return False
            packet = self.packets.popleft()
            if isinstance(packet, Sync):
                self.synced += 1
                continue
            if packet.forget:
                self.known.clear()
            self.known.update(function_hash for function_hash, _ in packet.functions)
            self.orders.extend(packet.orders)


class Rig:
    """A manager's shell without processes."""

    def __init__(self, *, slots: int = 1, prefetch: int = 0, batching: bool = True, **options: Any) -> None:
        policy = PrefetchPolicy(horizon_s=1.0, limit=prefetch, unseen=prefetch)
        self.core = ManagerCore(slots=slots, prefetch=policy, batching=batching, **options)
        self.now = 0.0
        self.clock_is_set: Callable[[], float] = lambda: 0.0  # by so many seconds, each time that it is read
        self.workers: dict[int, Worker] = {}
        self.killed: list[int] = []
        self.reports: list[Report] = []
        self.leaves: list[Leave] = []
        self.passed: list[Pass] = []

    def handle(self, *events: Event) -> list[Action]:
        """Let the core handle events, and perform its actions; all but the reports."""
        everything: list[Action] = []
        waiting = list(events)
        while actions := self.core.handle(waiting, Instant(self.now, 1000.0 + self.now + self.clock_is_set())):
            waiting = [event for action in actions for event in self._perform(action)]
            everything += [action for action in actions if not isinstance(action, Report)]
        return everything

    def _perform(self, action: Action) -> list[Event]:
        match action:
            case Launch(worker_id=worker_id):
                self.workers[worker_id] = Worker()
            case Send(worker_id=worker_id, packet=packet):
                self.workers[worker_id].packets.append(packet)
                self.workers[worker_id].claims += len(packet.orders)
            case Recall(worker_id=worker_id):
                worker = self.workers[worker_id]
                revoked, worker.claims = worker.claims, 0
                if revoked:
                    worker.packets.append(Sync())
                return [Recalled(worker_id, revoked)]
            case Kill(worker_id=worker_id):
                self.killed.append(worker_id)
            case Report():
                self.reports.append(action)
            case Pass():
                self.passed.append(action)
            case Leave():
                self.leaves.append(action)
        return []

    def jobs(self, *names: str, function: str = "h", **given: Any) -> list[Action]:
        options = TaskOptions(**given)
        orders = [TaskOrder(name, 1, function, 0, options) for name in names]
        return self.handle(TasksReceived([Job(order, b"body", b"payload") for order in orders]))

    def start_all(self) -> None:
        self.handle()
        self.handle(*map(ready, list(self.workers)))

    def read(self, worker_id: int = 0) -> str:
        """The worker starts its next task, if it has not done so already."""
        worker = self.workers[worker_id]
        if worker.running is None and not self._step(worker_id):
            self.handle()  # it has passed over recalled tasks, and gets new ones
            assert self._step(worker_id), "nothing to start"
        assert worker.running is not None
        return worker.running.task_id

    def _step(self, worker_id: int) -> bool:
        worker = self.workers[worker_id]
        began = worker.step()
        if worker.synced:
            self.handle(PacketsReceived(worker_id, [(Synced(), b"")] * worker.synced))
            worker.synced = 0
        return began

    def done(self, worker_id: int = 0, *, duration_s: float = 0.001, result: bytes = b"r") -> str:
        """The worker finishes its task, after starting one if need be, and continues with the next."""
        worker = self.workers[worker_id]
        self.read(worker_id)
        order, worker.running = worker.running, None
        assert order is not None
        worker.step()
        synced, worker.synced = worker.synced, 0
        packets = done(worker_id, order.task_id, duration_s=duration_s, result=result)
        self.handle(packets, PacketsReceived(worker_id, [(Synced(), b"")] * synced))
        return order.task_id

    def die(self, worker_id: int, *, reason: str = "exit code 1") -> None:
        revoked = self.workers.pop(worker_id).claims
        self.handle(WorkerDied(worker_id, revoked, reason, "out", "err"))

    def progress(self) -> Progress:
        """All reports since the last call as one."""
        return self.take()[0]

    def take(self) -> tuple[Progress, list[Frame]]:
        """The same with the results."""
        reports, self.reports = self.reports, []
        finished: list[Finished] = []
        results: list[Frame] = []
        for report in reports:
            for each in report.progress.finished:
                index = None if each.result is None else each.result + len(results)
                finished.append(msgspec.structs.replace(each, result=index))
            results += report.results
        progress = Progress(
            tuple(finished),
            tuple(each for report in reports for each in report.progress.died),
            tuple(each for report in reports for each in report.progress.started),
            problem=reports[-1].progress.problem if reports else "",
            returned=tuple(each for report in reports for each in report.progress.returned),
        )
        return progress, results


def ready(worker_id: int) -> PacketsReceived:
    return PacketsReceived(worker_id, [(Ready(1), b"")])


def done(worker_id: int, task_id: str, *, duration_s: float = 0.001, result: bytes = b"r") -> PacketsReceived:
    return PacketsReceived(worker_id, [(Done(task_id, 0.0, duration_s), result)])


def started(*, slots: int = 1, prefetch: int = 0) -> Rig:
    rig = Rig(slots=slots, prefetch=prefetch)
    rig.start_all()
    return rig
