"""What a worker of another submitter computes while it runs no task."""

from __future__ import annotations

import math

import pytest

from farcall_endpoint.contracts.agent_manager import TaskOrder
from farcall_endpoint.manager.core.events import Job, ProcessesLeft, TasksReceived
from farcall_endpoint.manager.shell import processes
from farcall_endpoint.manager.shell.processes import IDLE_LIMIT_S, Leftovers, ShareLimit
from tests.support.manager import Rig, ready


class Worker:
    """A worker with a clock and a processor time of its own, that a manager watches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.used_s = 0.0
        self.busy_since = math.inf
        monkeypatch.setattr(processes, "processor_s", lambda _: self.used_s)
        monkeypatch.setattr(processes, "tree", lambda _: set())
        self.leftovers = Leftovers(1, "alice")
        self.limit = ShareLimit(IDLE_LIMIT_S)
        self.is_ended = False

    def run(self, seconds: float, *, processors: float, is_last: bool = True) -> None:
        """Run a task."""
        self.busy_since = self.now
        self.leftovers.task_begins(now=self.now)
        self._pass(seconds, processors)
        self.busy_since = math.inf if is_last else self.now
        self.leftovers.task_ended(now=self.now, is_idle=is_last)

    def idle(self, seconds: float, *, processors: float, cleans_up_s: float = 0.0) -> None:
        """Run no task."""
        self.used_s += cleans_up_s
        self._pass(seconds, processors)

    def _pass(self, seconds: float, processors: float) -> None:
        end = self.now + seconds
        while self.leftovers.due_at < end:
            self._advance(max(self.leftovers.due_at, self.now), processors)
            self.leftovers.exist(now=self.now, busy_since=self.busy_since)
            shares = {self.leftovers.submitter: {1: self.leftovers.idle_share}}
            self.is_ended |= bool(self.limit.excess(shares, now=self.now))
        self._advance(end, processors)

    def _advance(self, now: float, processors: float) -> None:
        self.used_s += (now - self.now) * processors
        self.now = now


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


@pytest.mark.parametrize("task_s", [0.001, 0.05, 1.0, 10.0])
@pytest.mark.parametrize("pause_s", [0.06, 0.15, 0.5, 3.0, 30.0])
def test_what_computes_between_tasks_ends(worker: Worker, task_s: float, pause_s: float) -> None:
    while worker.now < 40 * (task_s + pause_s) + 3600:
        worker.run(task_s, processors=1.0)
        worker.idle(pause_s, processors=1.0)
        if worker.is_ended:
            return
    pytest.fail("it computes for ever")


@pytest.mark.parametrize("processors", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("task_s", [0.001, 0.05, 1.0, 10.0])
@pytest.mark.parametrize("pause_s", [0.0, 0.005, 0.06, 0.5, 30.0])
def test_tasks_and_what_cleans_up_after_them_do_not_count(
    worker: Worker, processors: float, task_s: float, pause_s: float
) -> None:
    for number in range(int(100 / (task_s + pause_s)) + 100):
        worker.run(task_s, processors=processors, is_last=number % 3 == 0)
        if number % 3 == 0:
            worker.idle(pause_s, processors=0.005, cleans_up_s=0.01)
    assert not worker.is_ended


def test_long_work_does_not_pay_for_what_is_computed_afterwards(worker: Worker) -> None:
    for _ in range(10_000):
        worker.run(0.01, processors=1.0, is_last=False)
    worker.run(0.01, processors=1.0)
    worker.idle(20.0, processors=1.0)
    assert worker.is_ended


# -- afterwards --------------------------------------------------------------------------------------------------------


def send(rig: Rig, name: str, submitter: str) -> int:
    """Send a task; the worker that runs it, which is started if there is none."""
    rig.handle(TasksReceived([Job(TaskOrder(name, 1, "h", 0, submitter=submitter), b"body", b"payload")]))
    for worker_id in [each for each in rig.killed if each in rig.workers]:
        rig.die(worker_id)
    worker_id = max(rig.workers)
    if not rig.workers[worker_id].packets:
        rig.handle(ready(worker_id))
    assert rig.done(worker_id) == name
    return worker_id


def test_a_submitter_whose_worker_computes_without_a_task_gets_workers_for_one_task_each() -> None:
    rig = Rig(slots=1)
    first = send(rig, "a", "alice")
    assert send(rig, "b", "alice") == first
    rig.handle(ProcessesLeft(first, computes=True))
    assert rig.killed == [first]
    second, third = send(rig, "c", "alice"), send(rig, "d", "alice")
    assert rig.killed == [first, second, third]
    assert len({first, second, third}) == 3
    bob = send(rig, "e", "bob")
    assert send(rig, "f", "bob") == bob
    rig.now += 601.0
    rig.handle(ProcessesLeft(bob))  # processes without computation change nothing for the next workers
    last = send(rig, "g", "alice")
    assert send(rig, "h", "alice") == last
    assert last not in rig.killed
