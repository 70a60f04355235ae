"""No accepted task is lost, whatever dies and whenever: a small federation on the stores, driven at random.

Every process is a generator that yields between any two steps that touch a store or a peer, so that the driver can
interleave them in any order and end one anywhere: after a commit and before its enqueue, after an ack and before its
record. Besides, the queue is wiped, the agent's spool is lost, and frames are dropped. A seed reproduces its run.

Here the queue is the fake; test_store_queue_model_valkey runs the same on a Valkey that is killed and restarted.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import random
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

import msgspec
import pytest

from farcall_common.errors import ErrorRecord, Fenced, QueueDataLost, Unavailable
from farcall_common.qos import QoS
from farcall_common.store import (
    CancelOutcome,
    LeasedTask,
    Queue,
    QueuedTask,
    Records,
    Task,
    TaskEvent,
    TaskResult,
    cancelled_before_dispatch,
)
from farcall_common.store.model import RunningLimit
from farcall_common.task_options import TaskOptions
from farcall_common.wire.states import Reporter, TaskState
from tests.support.stores import FakeDatabase, FakeQueue, single
from tests.unit.test_store_queue import Clock

ENDPOINT = "e1"
LEASE_S = 30.0
TTL_S = 45.0
PAGE = 7  # small, so that a rebuild has a middle

Process = Generator[None, None, None]
_Answer = TypeVar("_Answer")


@dataclasses.dataclass
class Agent:
    """Starts whatever it is sent: that nothing starts twice which may not is for the cloud to see to."""

    connected_to: str = ""
    running: dict[str, int] = dataclasses.field(default_factory=dict)
    results: dict[str, TaskResult] = dataclasses.field(default_factory=dict)
    starts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def receive(self, leased: LeasedTask) -> None:
        task_id = leased.task.task_id
        if task_id not in self.running and task_id not in self.results:
            self.running[task_id] = leased.attempt
            self.starts[task_id] += 1

    def held(self) -> dict[str, int]:
        return {**self.running, **{task_id: result.attempt for task_id, result in self.results.items()}}

    def finish(self, task_id: str, *, cancelled: bool = False) -> None:
        attempt = self.running.pop(task_id)
        if cancelled:
            self.results[task_id] = end(task_id, attempt, TaskState.CANCELLED, Reporter.AGENT)
        else:
            self.results[task_id] = TaskResult(
                task_id, ENDPOINT, attempt, TaskState.SUCCESS, Reporter.AGENT, result=f"{task_id} {attempt}".encode()
            )

    def forget(self, task_ids: Iterable[str]) -> None:
        for task_id in task_ids:
            self.running.pop(task_id, None)
            self.results.pop(task_id, None)

    def lose_spool(self) -> None:
        self.running.clear()
        self.results.clear()


class World:
    """The stores, one endpoint, and the processes that run."""

    def __init__(self, records: Records, queue: Queue, clock: Clock, *, seed: int) -> None:
        self.records = records
        self.queue = queue
        self.random = random.Random(seed)
        self.clock = clock
        self.clock.now = 1_000_000.0
        self.agent = Agent()
        self.processes: list[Process] = []
        self.accepted: dict[str, Task] = {}
        self.newest_fence = 0
        self.complete = False  # whether the newest owner has marked the queue restored since the last wipe
        self.wipes = 0
        self.limits: dict[str, RunningLimit] = {}  # as recorded
        self.limits_set: dict[str, RunningLimit] = {}  # as the queue has them, unless it was wiped
        self.refused = 0
        self._ids = 0

    def at(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self.clock.now, dt.UTC)

    def owned(self, fence: int, call: Callable[[], _Answer]) -> _Answer:
        """A call that only the newest owner of a complete queue may succeed with."""
        try:
            answer = call()
        except (Fenced, QueueDataLost):
            self.refused += 1
            raise
        self.check_owner(fence)
        return answer

    def check_owner(self, fence: int) -> None:
        assert fence == self.newest_fence, "a stale owner got through"
        assert self.complete, "the queue answered although it lacks tasks"

    # the API

    def submit(self) -> Process:
        tasks = []
        owner_id = self.random.choice(["alice", "bob", "carol"])
        for _ in range(self.random.randint(1, 5)):
            self._ids += 1
            task = Task(f"t{self._ids:05}", "g1", owner_id, ENDPOINT, "f1", "hash", b"x", submitted_at=self.at())
            qos = QoS(target_ms=200) if self.random.random() < 0.3 else None
            options = TaskOptions(idempotent=self.random.random() < 0.6, qos=qos)
            tasks.append(msgspec.structs.replace(task, options=options))
        self.records.tasks.add_tasks(tasks)
        self.accepted |= {task.task_id: task for task in tasks}
        yield
        self.queue.enqueue([QueuedTask.of(task) for task in tasks])

    def submit_again(self) -> Process:
        """A client that did not hear the answer: what is known already is enqueued as the database has it."""
        again = self.random.sample(sorted(self.accepted), min(3, len(self.accepted)))
        known = self.records.tasks.add_tasks([self.accepted[task_id] for task_id in again])
        yield
        open_tasks = [QueuedTask.of(task) for task in known.values() if not task.state.is_terminal]
        self.queue.enqueue(open_tasks)

    def cancel(self) -> Process:
        task_id = self.random.choice(sorted(self.accepted))
        outcome = self.queue.cancel(ENDPOINT, [task_id])[task_id]
        yield
        if outcome in (CancelOutcome.REMOVED, CancelOutcome.UNKNOWN):
            self.records.tasks.record_results([cancelled_before_dispatch(task_id, ENDPOINT)], at=self.at())
            yield
            self.queue.flushed({ENDPOINT: [task_id]})

    def change_limit(self) -> Process:
        """The owner of the endpoint changes an allowance; then the API dies, or sets it in the queue."""
        owner_id = self.random.choice(["alice", "bob", "carol"])
        limit = RunningLimit(self.random.choice([None, 1, 3]), self.random.choice([None, 2]))
        self.limits[owner_id] = limit
        yield
        self.queue.set_limits({ENDPOINT: {owner_id: limit}}, complete=False)
        self.limits_set[owner_id] = limit

    # the reconciler

    def set_limits(self) -> Process:
        limits = dict(self.limits)
        self.queue.set_limits({ENDPOINT: limits}, complete=True)
        self.limits_set = limits
        yield

    def reconcile(self) -> Process:
        """As :mod:`farcall_lambdas.services.reconcile` does, page after page, without its page of all open tasks."""
        yield from self.set_limits()
        yield from self.flush_outbox()
        before = self.queue.read_checkpoint("reconciler")
        checked = int(before or 0)
        yield
        unfinished = self.records.tasks.first_unfinished_transaction()
        after = (checked, "")
        while page := self.records.tasks.list_open_ids(after=after, limit=PAGE):
            yield
            missing = self.queue.find_missing({ENDPOINT: [task.task_id for task in page]})
            yield
            found = self.records.tasks.get_tasks(sorted(missing)).values()
            yield
            tasks = [QueuedTask.of(task) for task in found if not task.state.is_terminal]
            self.queue.enqueue(tasks)
            after = (page[-1].added_in, page[-1].task_id)
            yield
        self.queue.write_checkpoint("reconciler", str(max(checked, unfinished)), expected=before)

    def flush_outbox(self) -> Process:
        ended = self.queue.outbox(ENDPOINT)
        yield
        self.records.tasks.record_results(ended, at=self.at())
        yield
        self.queue.flushed({ENDPOINT: [result.task_id for result in ended]})
        yield

    # a forwarder

    def forward(self, name: str) -> Process:
        """Own the endpoint until another forwarder does."""
        self.agent.connected_to = name
        while True:
            try:
                fence = single.claim(self.queue, ENDPOINT, name, ttl_s=TTL_S)
                assert fence > self.newest_fence, "a fence was given twice"
                self.newest_fence = fence
                yield
                yield from self.serve(name, fence)
            except QueueDataLost:
                yield from self.rebuild(name)
            except Unavailable:
                yield
            except Fenced:
                return

    def rebuild(self, name: str) -> Process:
        try:
            fence = single.claim(self.queue, ENDPOINT, name, ttl_s=TTL_S)
            self.newest_fence, wipes = fence, self.wipes
            yield
            held, after = self.agent.held(), ""
            while page := self.records.tasks.list_open_tasks(ENDPOINT, after=after, limit=PAGE):
                yield
                tasks = [QueuedTask.of(task) for task in page]
                self.queue.restore(ENDPOINT, fence, tasks, held=held, lease_s=LEASE_S)
                after = page[-1].task_id
                yield
            single.mark_restored(self.queue, ENDPOINT, fence)
            assert fence == self.newest_fence, "a stale owner declared the queue complete"
            assert wipes == self.wipes, "a rebuild from before a wipe declared the queue complete"
            self.complete = True
        except (Fenced, QueueDataLost, Unavailable):
            yield  # the next round finds out how things stand

    def serve(self, name: str, fence: int) -> Process:
        steps = [self.dispatch, self.dispatch, self.collect, self.collect, self.compare, self.maintain, self.stop]
        while True:
            if self.queue.renew_ownership(name, {ENDPOINT: (fence, "")}, ttl_s=TTL_S):
                yield
                yield from self.maintain(name, fence)
            else:
                self.check_owner(fence)
            yield
            yield from self.random.choice(steps)(name, fence)
            yield from self.flush_outbox()

    def dispatch(self, name: str, fence: int) -> Process:
        limit = self.random.randint(1, 6)
        leased = self.owned(fence, lambda: single.lease(self.queue, ENDPOINT, fence, limit=limit, lease_s=LEASE_S))
        self.check_limits(fence, leased)
        yield
        if not leased:
            return
        for task in leased:
            assert task.task.options.idempotent or task.attempt == 1, (
                "the queue gave a second attempt that was not allowed"
            )
        if self.random.random() < 0.1:  # no credit any more
            ids = [task.task.task_id for task in leased]
            self.owned(fence, lambda: self.queue.unlease(ENDPOINT, fence, ids))
            return
        permits = self.records.tasks.record_transitions(
            [
                TaskEvent(t.task.task_id, TaskState.WAITING_FOR_NODES, Reporter.FORWARDER, self.at(), attempt=t.attempt)
                for t in leased
                if not t.cancel_requested
            ]
        )
        yield
        ends = []
        for task in leased:
            if task.cancel_requested:
                ends.append(ended(task, TaskState.CANCELLED))
            elif not task.task.options.idempotent and task.task.task_id not in permits:
                ends.append(ended(task, TaskState.LOST))
            elif self.random.random() < 0.9:  # else the frame is lost; also a stale forwarder's frames may still arrive
                self.agent.receive(task)
            yield
        yield from self.record(fence, ends)

    def check_limits(self, fence: int, leased: Sequence[LeasedTask]) -> None:
        """Those that got a task have no more than they may have."""
        held = collections.Counter(self.accepted[id_].owner_id for id_ in single.leased(self.queue, ENDPOINT, fence))
        for owner_id in {task.task.owner_id for task in leased}:
            most = self.limits_set.get(owner_id, RunningLimit()).max_running
            assert most is None or held[owner_id] <= most, f"{owner_id} has {held[owner_id]} tasks of {most}"

    def collect(self, name: str, fence: int) -> Process:
        """Results come in, once or again."""
        if self.agent.connected_to == name:
            yield from self.record(fence, list(self.agent.results.values())[: self.random.randint(1, 5)])

    def record(self, fence: int, results: Sequence[TaskResult]) -> Process:
        if not results:
            return
        self.owned(fence, lambda: single.ack(self.queue, fence, results))
        yield
        self.records.tasks.record_results(results, at=self.at())
        yield
        ids = [result.task_id for result in results]
        self.queue.flushed({ENDPOINT: ids})
        yield
        self.agent.forget(ids)

    def compare(self, name: str, fence: int) -> Process:
        """Restore the leases of tasks that the agent holds, and make it forget those that have ended."""
        held = self.agent.held() if self.agent.connected_to == name else {}
        if not held:
            return
        leases = self.owned(fence, lambda: single.leased(self.queue, ENDPOINT, fence))
        yield
        tasks = self.records.tasks.get_tasks(sorted(held.keys() - leases.keys()))
        yield
        self.agent.forget([task.task_id for task in tasks.values() if task.state.is_terminal])
        again = [QueuedTask.of(task) for task in tasks.values() if not task.state.is_terminal]
        self.queue.restore(ENDPOINT, fence, again, held=held, lease_s=LEASE_S)

    def maintain(self, name: str, fence: int) -> Process:
        """Renew the leases of tasks that the agent holds, unless it is not heard, and end those that have expired."""
        is_heard = self.agent.connected_to == name and self.random.random() < 0.5
        held = list(self.agent.held()) if is_heard else []
        found = self.owned(
            fence,
            lambda: single.maintain(
                self.queue, ENDPOINT, fence, renew=held, forwarder_id=name, ttl_s=TTL_S, lease_s=LEASE_S
            ),
        )
        expired = found.reaped
        yield
        known = self.records.tasks.get_tasks([task.task.task_id for task in expired])
        yield
        never_sent = [
            task.task.task_id
            for task in expired
            if not task.cancel_requested and known[task.task.task_id].attempt < task.attempt
        ]
        if never_sent:
            self.owned(fence, lambda: self.queue.unlease(ENDPOINT, fence, never_sent))
            yield
        ends = []
        for task in expired:
            if task.cancel_requested:
                ends.append(ended(task, TaskState.CANCELLED))
            elif task.task.task_id not in never_sent:
                ends.append(ended(task, TaskState.FAILED if task.task.options.idempotent else TaskState.LOST))
        yield from self.record(fence, ends)

    def stop(self, name: str, fence: int) -> Process:
        for task_id in self.owned(fence, lambda: single.cancel_requests(self.queue, ENDPOINT, fence)):
            if task_id in self.agent.running:
                self.agent.finish(task_id, cancelled=True)
            yield

    # the driver

    def step(self, process: Process) -> None:
        """Let a process take one step; one that meets an absent store dies of it."""
        try:
            next(process)
        except (StopIteration, Unavailable):
            self.processes.remove(process)

    def run(self, steps: int, chaos: Sequence[Callable[[], None]], *, forget_results: Callable[[], None]) -> None:
        """Random steps. ``chaos`` are further disasters that the stores can suffer; ``forget_results`` takes away the
        markers of ended tasks, however short a time they were there."""
        starts: list[Callable[[], Process]] = [
            self.submit,
            self.submit_again,
            self.cancel,
            self.change_limit,
            self.reconcile,
            lambda: self.forward("w1"),
            lambda: self.forward("w2"),
        ]
        for _ in range(steps):
            self.clock.now += self.random.choice([0.001, 0.1, 2.0])
            dice = self.random.random()
            if dice < 0.06:
                start = self.random.choice(starts if self.accepted else [self.submit])
                self.processes.append(start())
            elif dice < 0.12 and self.agent.running:
                self.agent.finish(self.random.choice(sorted(self.agent.running)))
            elif dice < 0.15 and self.processes:
                self.processes.remove(self.random.choice(self.processes))  # kill -9
            elif dice < 0.155:
                self.agent.lose_spool()
            elif dice < 0.16:
                forget_results()
            elif dice < 0.17 and chaos:
                self.complete = False
                self.wipes += 1
                self.limits_set = {}
                self.random.choice(chaos)()
            elif self.processes:
                self.step(self.random.choice(self.processes))

    def settle(self) -> None:
        """Peace: one forwarder, one reconciler, and an agent that works."""
        self.processes = [self.forward("w3")]
        for _ in range(20_000):
            self.clock.now += 0.5
            if self.random.random() < 0.02:
                self.processes.append(self.reconcile())
            for task_id in list(self.agent.running):
                self.agent.finish(task_id)
            self.step(self.random.choice(self.processes))
            if self.random.random() < 0.05 and not self.records.tasks.list_open_tasks(ENDPOINT, limit=1):
                break
        assert not self.records.tasks.list_open_tasks(ENDPOINT, limit=1), "accepted tasks never ended"

    def check(self) -> None:
        """One end for each accepted task, and at most one start where that was asked for."""
        for task_id, task in self.accepted.items():
            ends = [event for event in self.records.tasks.list_events(task_id) if event.state.is_terminal]
            assert len(ends) == 1, f"{task_id} ended {len(ends)} times"
            assert task.options.idempotent or self.agent.starts[task_id] <= 1, f"{task_id} started twice"


def end(task_id: str, attempt: int, state: TaskState, reporter: Reporter) -> TaskResult:
    error = ErrorRecord("TEST", f"the {reporter} says {state}")
    return TaskResult(task_id, ENDPOINT, attempt, state, reporter, error=error)


def ended(task: LeasedTask, state: TaskState) -> TaskResult:
    return end(task.task.task_id, task.attempt, state, Reporter.FORWARDER)


@pytest.mark.parametrize("seed", range(15))
def test_every_accepted_task_ends_once(seed: int) -> None:
    clock = Clock()
    queue = FakeQueue(clock)
    world = World(FakeDatabase().records, queue, clock, seed=seed)
    world.run(6000, [queue.wipe], forget_results=queue.forget_results)
    world.settle()
    world.check()
    assert len(world.accepted) > 50
    assert world.refused > 5


def test_commit_without_an_enqueue_is_found_by_the_reconciler() -> None:
    clock = Clock()
    world = World(FakeDatabase().records, FakeQueue(clock), clock, seed=1)
    next(world.submit())
    assert world.queue.depth([ENDPOINT]) == 0
    world.settle()
    world.check()


def test_no_task_is_lost_or_repeated_without_faults() -> None:
    clock = Clock()
    world = World(FakeDatabase().records, FakeQueue(clock), clock, seed=1)
    world.processes.append(world.submit())
    while world.processes:
        world.step(world.processes[0])
    world.settle()
    world.check()
    assert set(world.agent.starts.values()) == {1}
