"""Calls of graphs that are sent before what they wait for has ended: the manager's core with simulated workers."""

from __future__ import annotations

import collections
import random
from typing import Any

import pytest

from farcall_common.graphs import COLLECT, Graph, Input, Stage
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.contracts.agent_manager import CancelTasks, TaskOrder
from farcall_endpoint.contracts.manager_worker import ITSELF, Delivery, Done, Order, Packet, Run, Sync, Synced
from farcall_endpoint.host.shared_memory import Frame
from farcall_endpoint.manager.core.actions import Action, Connect, Recall, Send
from farcall_endpoint.manager.core.events import Callees, Event, Job, PacketsReceived, TasksReceived, WorkerDied
from farcall_endpoint.manager.core.orders import MAX_UNREAD_BYTES
from tests.support.manager import Rig, ready

CALLEE = Callee(function_id="f", function_hash="h")


def chain(length: int, *, first: int = 0) -> list[Stage]:
    """Stages of which each gets the value of the one before."""
    return [Stage(0, f"s{n}", () if n == 0 else (Input(first + n - 1, (0,)),)) for n in range(length)]


class Sim(Rig):
    """Workers that pass values on, whose words may be under way for a while."""

    def __init__(
        self,
        *,
        slots: int,
        seed: int = 0,
        prefetch: int = 0,
        deaths: float = 0.0,
        errors: float = 0.0,
        losses: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(slots=slots, prefetch=prefetch, **options)
        self.silent = 0.0  # part of the values that get lost without a word
        self.elements = 2  # of a value whose elements go to calls one by one
        self.random = random.Random(seed)
        self.deaths, self.errors, self.losses = deaths, errors, losses
        self.ready: set[int] = set()
        self.outbox: dict[int, list[tuple[Packet, Frame]]] = collections.defaultdict(list)
        self.arrived: dict[int, set[tuple[str, int]]] = collections.defaultdict(set)
        self.connections: dict[int, tuple[int, int]] = {}
        self.ran: collections.Counter[str] = collections.Counter()
        self.by_worker: dict[str, int] = {}

    def _perform(self, action: Action) -> list[Event]:
        if isinstance(action, Connect):
            self.connections[action.number] = (action.first, action.second)
        if isinstance(action, Recall):
            [recalled] = super()._perform(action)
            return [*self._words(action.worker_id), recalled]
        return super()._perform(action)

    def _words(self, number: int) -> list[Event]:
        words = self.outbox.pop(number, [])
        return [PacketsReceived(number, words)] if words else []

    def submit(
        self, *stages: Stage, name: str = "g", spread: bool = False, submitter: str = "", **options: Any
    ) -> list[Action]:
        order = TaskOrder(name, 1, "h", 0, TaskOptions(callees=(CALLEE,), **options), submitter=submitter)
        graph = Graph(stages, (b"",) * len(stages), len(stages) - 1, spread)
        return self.handle(TasksReceived([Job(order, b"body", b"", callees=Callees({"h": b"body"}, graph))]))

    # -- workers -------------------------------------------------------------------------------------------------------

    def can_begin(self, number: int) -> bool:
        """Let a worker go on to its next order that it may start; whether there is one."""
        worker = self.workers[number]
        while True:
            while worker.orders:
                order = worker.orders[0]
                awaited = [] if order.call is None else [n for n, i in enumerate(order.call.inputs) if i.awaited]
                if all((order.task_id, n) in self.arrived[number] for n in awaited):
                    if worker.claims:
                        return True
                    worker.orders.popleft()
                elif any(isinstance(packet, Sync) for packet in worker.packets):
                    worker.orders.clear()
                else:
                    return False
            if not worker.packets:
                return False
            packet = worker.packets.popleft()
            if isinstance(packet, Run):
                worker.orders.extend(packet.orders)
            else:
                self.arrived[number].clear()
                self.outbox[number].append((Synced(), b""))

    def begin(self, number: int) -> None:
        worker = self.workers[number]
        worker.claims -= 1
        worker.running = worker.orders.popleft()
        self.ran[worker.running.task_id] += 1
        self.by_worker[worker.running.task_id] = number

    def end(self, number: int) -> None:
        worker = self.workers[number]
        order, worker.running = worker.running, None
        assert order is not None
        call = order.call
        fails = self.random.random() < self.errors
        if fails or call is None:
            done = Done(order.task_id, 0.0, 0.001, {"code": "X", "message": "m"} if fails else None)
            self.outbox[number].append((done, b"" if fails else b"r"))
            return
        undelivered = [n for n, each in enumerate(call.deliver) if not self.deliver(number, each)]
        parts = (1,) * (self.elements if call.spread else 1) if call.is_edge else ()
        done = Done(order.task_id, 0.0, 0.001, parts=parts, undelivered=tuple(undelivered))
        self.outbox[number].append((done, b"v" * max(1, len(parts))))

    def deliver(self, number: int, delivery: Delivery) -> bool:
        target = number
        if delivery.peer != ITSELF:
            first, second = self.connections[delivery.peer]
            target = second if first == number else first
        if target not in self.workers or self.random.random() < self.losses:
            return False
        if self.random.random() >= self.silent:
            self.arrived[target].add((delivery.task_id, delivery.number))
        return True

    def step(self) -> bool:
        """Something that can happen; False if nothing can."""
        choices: list[tuple[str, int]] = []
        for number, worker in self.workers.items():
            if number not in self.ready:
                choices.append(("ready", number))
            elif number in self.killed:
                choices.append(("die", number))
            else:
                if worker.running is not None:
                    choices.append(("end", number))
                elif self.can_begin(number):
                    choices.append(("begin", number))
                if self.outbox.get(number):
                    choices.append(("words", number))
        if not choices:
            return False
        what, number = self.random.choice(choices)
        if what != "ready" and self.random.random() < self.deaths:
            what = "die"
        match what:
            case "ready":
                self.ready.add(number)
                self.handle(ready(number))
            case "die":
                revoked = self.workers.pop(number).claims
                self.handle(*self._words(number), WorkerDied(number, revoked, "signal 9"))
            case "begin":
                self.begin(number)
            case "end":
                self.end(number)
            case "words":
                self.handle(*self._words(number))
        return True

    def run(self) -> None:
        while self.step():
            pass

    def is_clean(self) -> bool:
        core = self.core
        return not (
            core._ahead
            or core._ahead._waiting
            or core._ahead._early
            or any(number not in core._workers for pair in core._ahead._connections for number in pair)
            or core._graphs.running
            or core._graphs.memory.used_bytes
            or any(worker.awaits for worker in core._workers.values())
        )


def started(**given: Any) -> Sim:
    sim = Sim(**given)
    sim.handle()
    for number in list(sim.workers):
        sim.ready.add(number)
        sim.handle(ready(number))
    return sim


def orders(actions: list[Action]) -> dict[int, list[Order]]:
    sent: dict[int, list[Order]] = {}
    for action in actions:
        if isinstance(action, Send):
            sent.setdefault(action.worker_id, []).extend(action.packet.orders)
    return sent


def test_a_chain_is_sent_at_once_and_stays_in_its_worker() -> None:
    sim = started(slots=2)
    actions = sim.submit(*chain(4))
    [sent] = orders(actions).values()
    [connected] = [each for each in actions if isinstance(each, Connect)]
    assert connected.first == connected.second  # what a worker needs to write its memory again
    assert [each.task_id for each in sent] == ["g/0", "g/1", "g/2", "g/3"]
    assert [each.call and [n.awaited for n in each.call.inputs] for each in sent] == [[], [True], [True], [True]]
    assert [each.call and [d.peer for d in each.call.deliver] for each in sent] == [[ITSELF], [ITSELF], [ITSELF], []]
    sim.run()
    [finished] = sim.progress().finished
    assert finished.state is TaskState.SUCCESS
    assert len(set(sim.by_worker.values())) == 1
    assert sim.is_clean()


def test_a_spread_chain_alternates_between_idle_workers_that_are_connected_once() -> None:
    sim = started(slots=2)
    for name in "ab":
        actions = sim.submit(*chain(4), name=name, spread=True)
        assert sum(isinstance(action, Connect) for action in actions) == (name == "a")
        assert sorted(map(len, orders(actions).values())) == [2, 2]
        sim.run()
        assert [sim.by_worker[f"{name}/{n}"] for n in range(4)] in ([0, 1, 0, 1], [1, 0, 1, 0])
    assert len(sim.progress().finished) == 2
    assert sim.is_clean()


def test_a_worker_that_awaits_a_value_gets_no_other_task() -> None:
    sim = started(slots=2)
    sim.submit(*chain(2), spread=True)
    assert not orders(sim.jobs("other"))
    sim.run()
    assert sim.by_worker.keys() == {"g/0", "g/1", "other"}


def test_a_slow_call_does_not_let_those_behind_it_be_taken_back() -> None:
    sim = started(slots=1)
    sim.submit(*chain(3))
    assert sim.can_begin(0)
    sim.begin(0)
    sim.now += 5.0
    assert not [action for action in sim.handle() if isinstance(action, Recall)]
    sim.run()
    assert sim.is_clean()


def test_an_end_that_is_known_early_waits_for_the_one_before() -> None:
    sim = started(slots=2)
    sim.submit(*chain(2), spread=True)
    first = next(number for number in sim.workers if sim.can_begin(number))
    other = 1 - first
    sim.begin(first)
    sim.end(first)  # its word is under way
    assert sim.can_begin(other)
    sim.begin(other)
    sim.end(other)
    sim.handle(*sim._words(other))
    assert not sim.progress().finished
    sim.run()
    [finished] = sim.progress().finished
    assert finished.state is TaskState.SUCCESS
    assert sim.ran == {"g/0": 1, "g/1": 1}
    assert not sim.killed


def test_a_call_that_waits_in_its_worker_for_a_value_has_used_nothing() -> None:
    sim = started(slots=2)
    sim.submit(*chain(2), spread=True)
    first = next(number for number in sim.workers if sim.can_begin(number))
    sim.begin(first)
    sim.now += 10.0
    sim.end(first)  # its word is under way
    other = 1 - first
    assert sim.can_begin(other)
    sim.begin(other)
    sim.end(other)
    sim.handle(*sim._words(other))
    sim.run()
    [finished] = sim.progress().finished
    assert finished.details is not None
    assert finished.details["stage_calls"] == 2
    assert finished.details["stage_run_s"] == pytest.approx(10.0, abs=0.1)
    sim.submit(*chain(2), name="h", spread=True)
    sim.begin(next(number for number in sim.workers if sim.can_begin(number)))
    sim.now += 10.0
    sim.handle(CancelTasks(("h",)))
    [finished] = sim.progress().finished
    assert finished.details is not None
    assert (finished.details["stage_calls"], finished.details["stage_run_s"]) == (1, 10.0)


def test_a_value_that_gets_lost_on_its_way_holds_nothing_for_long() -> None:
    sim = started(slots=2)
    sim.submit(*chain(3), spread=True)
    sim.silent = 1.0
    sim.run()
    assert not sim.progress().finished
    for _ in range(3):
        sim.now += 1.0
        sim.handle()
        sim.run()
    [finished] = sim.progress().finished
    assert (finished.state, sim.ran) == (TaskState.SUCCESS, {"g/0": 1, "g/1": 1, "g/2": 1})
    assert sim.is_clean()


def test_calls_behind_one_that_failed_are_not_made() -> None:
    sim = started(slots=1)
    sim.submit(*chain(3))
    assert sim.can_begin(0)
    sim.begin(0)
    sim.workers[0].running = None
    sim.handle(PacketsReceived(0, [(Done("g/0", 0.0, 1.0, {"code": "X", "message": "m"}), b"")]))
    sim.run()
    [finished] = sim.progress().finished
    assert (finished.state, sim.ran) == (TaskState.FAILED, {"g/0": 1})
    assert sim.is_clean()


def test_a_call_that_may_not_run_twice_does_not_after_its_worker_died() -> None:
    sim = started(slots=2)
    sim.submit(*chain(3), spread=True, idempotent=False)
    first = next(number for number in sim.workers if sim.can_begin(number))
    sim.begin(first)
    revoked = sim.workers.pop(first).claims
    sim.handle(WorkerDied(first, revoked, "signal 9"))
    sim.run()
    [finished] = sim.progress().finished
    assert (finished.state, sim.ran) == (TaskState.FAILED, {"g/0": 1})
    assert sim.is_clean()


def test_a_worker_that_is_asked_twice_to_give_tasks_back_answers_once() -> None:
    sim = started(slots=1, prefetch=3)
    sim.jobs("a", "b", "c")
    assert sim.can_begin(0)
    sim.begin(0)
    sim.now += 0.02
    assert any(isinstance(action, Recall) for action in sim.handle())
    sim.end(0)
    assert any(isinstance(action, Recall) for action in sim.handle(CancelTasks(("a",))))
    sim.run()
    assert not sim.killed
    assert len(sim.progress().finished) == 3


def test_no_more_calls_are_sent_ahead_than_the_sockets_have_room_for() -> None:
    sim = started(slots=2, prefetch=256)
    sim.elements = 500
    maps = [Stage(0, f"s{n}", (Input(n - 1, (0,), each=True),)) for n in range(1, 25)]
    sim.submit(Stage(0, "s0"), *maps, spread=False)
    while sim.step():
        assert all(worker.unread_bytes <= 2 * MAX_UNREAD_BYTES for worker in sim.core._workers.values())
        assert all(worker.claims <= 2 * MAX_UNREAD_BYTES // 1024 for worker in sim.workers.values())
    [finished] = sim.progress().finished
    assert finished.state is TaskState.SUCCESS
    assert sim.is_clean()


def test_each_submitter_has_its_own_calls_where_they_share_workers() -> None:
    sim = Sim(slots=1, prefetch=64, shared_workers=True)
    for name in ("ann", "bob"):
        sim.submit(*chain(5), name=name, submitter=name)
    sim.run()
    assert sorted(each.task_id for each in sim.progress().finished) == ["ann", "bob"]
    assert sim.is_clean()


def any_stages(chance: random.Random) -> list[Stage]:
    """Stages with chains, fan-ins, maps and maps of maps."""
    stages = [Stage(0, "s0")]
    for number in range(1, chance.randint(2, 12)):
        before = number - 1
        if chance.random() < 0.5:
            inputs: tuple[Input, ...] = (Input(before, (0,), each=chance.random() < 0.3),)
        else:
            others = sorted({before, chance.randrange(number)})
            inputs = tuple(Input(each, (place,)) for place, each in enumerate(others))
        stages.append(Stage(0, f"s{number}", inputs))
    stages.append(Stage(COLLECT, "all", tuple(Input(n, (n,)) for n in range(len(stages)))))
    return stages


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_each_graph_ends_once_whatever_happens(seed: int, spread: bool) -> None:
    sim = Sim(slots=1 + seed % 4, seed=seed, prefetch=seed % 3, deaths=0.01 * (seed % 7), errors=0.02, losses=0.1)
    names = submitted(sim, spread=spread, attempts=20)
    if seed % 2:
        sim.handle(CancelTasks((names[0],)))
    sim.run()
    ended = collections.Counter(each.task_id for each in sim.progress().finished)
    assert ended == collections.Counter(names)
    assert sim.is_clean()


@pytest.mark.parametrize("losses", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(30))
def test_each_call_is_made_once_and_no_worker_is_ended_where_none_dies(seed: int, losses: float) -> None:
    sim = Sim(slots=1 + seed % 4, seed=seed, prefetch=seed % 3, losses=losses)
    names = submitted(sim, spread=seed % 2 == 0)
    sim.run()
    assert [each.state for each in sim.progress().finished] == [TaskState.SUCCESS] * len(names)
    assert set(sim.ran.values()) == {1}
    assert not sim.killed
    assert sim.is_clean()


def submitted(sim: Sim, *, spread: bool, attempts: int = 3) -> list[str]:
    """Graphs, submitted while others run."""
    names = [f"g{number}" for number in range(4)]
    for name in names:
        stages = any_stages(sim.random) if sim.random.random() < 0.6 else chain(sim.random.randint(2, 40))
        sim.submit(*stages, name=name, spread=spread, max_attempts=attempts)
        for _ in range(sim.random.randrange(30)):
            sim.step()
    return names
