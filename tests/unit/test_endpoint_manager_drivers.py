"""Places of tasks that wait for their calls, in the manager's core: other submitters get them in turn."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from typing import Any

import pytest

from farcall_endpoint.contracts.agent_manager import TaskOrder
from farcall_endpoint.contracts.manager_worker import Call, CallEnded, Calls, Done, Packet, Synced, Waits
from farcall_endpoint.host.shared_memory import Frame
from farcall_endpoint.manager.core.actions import Action, Answer
from farcall_endpoint.manager.core.events import Event, Job, PacketsReceived, TasksReceived
from farcall_endpoint.manager.core.workers import TURN_S
from tests.support.manager import Rig, ready

START_S = 0.25
DEATH_S = 0.01
Tree = tuple["Tree", ...]
"""A function that calls as many others, each with its own, and waits for all. One without calls runs for a while."""


def full(depth: int, width: int) -> Tree:
    return tuple(full(depth - 1, width) for _ in range(width)) if depth else ()


def any_tree(chance: random.Random, depth: int) -> Tree:
    return tuple(any_tree(chance, depth - 1) for _ in range(chance.randint(0, 3))) if depth else ()


def leaves(tree: Tree) -> int:
    return sum(map(leaves, tree)) or 1


def levels(tree: Tree) -> int:
    return max((1 + levels(each) for each in tree), default=0)


class Endpoint:
    """A manager whose workers take time: to start, to end, and for each function without calls."""

    def __init__(self, *, slots: int, leaf_s: float, **options: Any) -> None:
        self.rig = Rig(slots=slots, **options)
        self.slots = slots
        self.leaf_s = leaf_s
        self.trees: dict[str, Tree] = {}
        self.open: dict[str, set[int]] = {}  # by driver
        self.resumed_for: dict[str, float] = {}  # so long a driver runs when its calls have ended; else not at all
        self.received_at: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.most_workers = 0
        self.most_over = 0  # functions that run beyond the slots, and beyond drivers that have just ended
        self._seen: set[int] = set()
        self._dying: set[int] = set()
        self._running: set[int] = set()  # workers that do not wait
        self._due: list[tuple[float, int, str, int]] = []
        self._numbers = itertools.count()
        self.rig.start_all()
        self._seen.update(self.rig.workers)

    def submit(self, name: str, submitter: str, tree: Tree = ()) -> None:
        self.trees[name] = tree
        self.received_at[name] = self.rig.now
        self._handle(TasksReceived([Job(TaskOrder(name, 1, "h", 0, submitter=submitter), b"body", b"p")]))

    def run_until(self, time_s: float) -> None:
        """Let everything happen that does until then."""
        while True:
            self._settle()
            at = min(self._due[0][0] if self._due else math.inf, self.rig.core.next_deadline())
            if at > time_s:
                self.rig.now = time_s
                return
            self.rig.now = max(at, self.rig.now)
            if not self._due or self._due[0][0] > self.rig.now:
                self.rig.now += 1e-6
                self._handle()
                continue
            _, _, what, number = heapq.heappop(self._due)
            if number in self.rig.workers:
                self._happen(what, number)

    def _happen(self, what: str, number: int) -> None:
        match what:
            case "ready":
                self._handle(ready(number))
            case "die":
                self._running.discard(number)
                self.rig.die(number)
            case _ if number not in self.rig.killed:
                self._end(number)

    def _settle(self) -> None:
        """Whatever takes no time."""
        again = True
        while again:
            again = False
            for number, worker in list(self.rig.workers.items()):
                if number in self.rig.killed:
                    if number not in self._dying:
                        self._dying.add(number)
                        self._after(DEATH_S, "die", number)
                elif number not in self._seen:
                    self._seen.add(number)
                    self._after(START_S, "ready", number)
                elif worker.running is None and (worker.packets or worker.orders):
                    again = True
                    self._begin(number)
            self.most_workers = max(self.most_workers, len(self.rig.workers))
            recent = [name for name, at in self.ended.items() if self.trees[name] and at > self.rig.now - self.leaf_s]
            self.most_over = max(self.most_over, len(self._running) - self.slots - len(recent))

    def _begin(self, number: int) -> None:
        worker = self.rig.workers[number]
        worker.step()
        synced, worker.synced = worker.synced, 0
        if synced:
            self._handle(PacketsReceived(number, [(Synced(), b"")] * synced))
        if worker.running is None:
            return
        name = worker.running.task_id
        if name in self.received_at:
            self.waited[name] = self.rig.now - self.received_at[name]
        self._running.add(number)
        tree = self.trees[name]
        if not tree:
            self._after(self.leaf_s, "end", number)
            return
        self._running.discard(number)
        self.open[name] = set(range(len(tree)))
        self.trees |= {f"{name}/{child}": below for child, below in enumerate(tree)}
        made = tuple(Call(child, "h", 1, "f") for child in range(len(tree)))
        self._send(number, (Calls(name, made), b"p" * len(tree)), (Waits(name), b""))

    def _end(self, number: int) -> None:
        worker = self.rig.workers[number]
        assert worker.running is not None
        name, worker.running = worker.running.task_id, None
        self._running.discard(number)
        self.ended[name] = self.rig.now
        self._send(number, (Done(name, 0.0, self.leaf_s, parts=(1,) if "/" in name else ()), b"r"))

    def _send(self, number: int, *packets: tuple[Packet, Frame]) -> None:
        self._handle(PacketsReceived(number, list(packets)))

    def _handle(self, *events: Event) -> None:
        self._note(self.rig.handle(*events))

    def _note(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Answer):
                assert isinstance(action.packet, CallEnded)
                assert action.packet.error is None
                running = self.rig.workers[action.worker_id].running
                assert running is not None
                self.open[running.task_id].remove(action.packet.number)
                if not self.open[running.task_id]:
                    self._send(action.worker_id, (Waits(running.task_id, over=True), b""))
                    self._after(self.resumed_for.get(running.task_id, 0.0), "end", action.worker_id)

    def _after(self, delay_s: float, what: str, number: int) -> None:
        heapq.heappush(self._due, (self.rig.now + delay_s, next(self._numbers), what, number))


def with_singles(endpoint: Endpoint, submitters: list[str], until: float, every_s: float) -> list[float]:
    """Submit single tasks over and over: how long each has waited, in seconds."""
    numbers = dict.fromkeys(submitters, 0)
    while endpoint.rig.now < until:
        for submitter, number in numbers.items():
            if not number or f"{submitter}{number}" in endpoint.ended:
                numbers[submitter] += 1
                endpoint.submit(f"{submitter}{numbers[submitter]}", submitter)
        endpoint.run_until(endpoint.rig.now + every_s)
    names = [f"{submitter}{number}" for submitter, last in numbers.items() for number in range(1, last + 1)]
    return [endpoint.waited.get(name, endpoint.rig.now - endpoint.received_at[name]) for name in names]


@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("owner", ["", "m"])
@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize(("depth", "width"), [(1, 40), (2, 8), (3, 4), (5, 3), (8, 2), (20, 1)])
def test_single_tasks_wait_for_one_leaf_of_a_task_whose_calls_make_calls(
    depth: int, width: int, slots: int, owner: str, prefetch: int
) -> None:
    endpoint = Endpoint(slots=slots, leaf_s=2.0, prefetch=prefetch)
    endpoint.submit("m", owner, full(depth, width))
    endpoint.run_until(4.0)
    waits = with_singles(endpoint, ["g"], until=60.0, every_s=1.2)
    assert len(waits) >= 10
    assert max(waits) <= 2.0 + TURN_S + 2 * START_S + 0.1
    assert endpoint.most_over <= 0
    endpoint.run_until(2000.0)
    assert "m" in endpoint.ended
    assert len([name for name in endpoint.ended if not endpoint.trees[name]]) == width**depth + len(waits)
    assert endpoint.most_workers <= slots + 1 + depth + 1


@pytest.mark.parametrize("seed", range(30))
def test_drivers_of_several_submitters_all_end_and_hold_up_no_single_task(seed: int) -> None:
    chance = random.Random(seed)
    slots = chance.randint(1, 4)
    endpoint = Endpoint(slots=slots, leaf_s=chance.choice([0.02, 0.5, 2.0]), prefetch=chance.choice([0, 4]))
    trees = [any_tree(chance, chance.randint(1, 5)) for _ in range(chance.randint(1, 8))]
    for number, tree in enumerate(trees):
        endpoint.submit(f"{number}", chance.choice(["", "x", "y"]), tree)
    payers = 4
    waits = with_singles(endpoint, ["g"], until=40.0, every_s=0.7)
    # With fewer slots than payers, all of these take turns.
    turns = -(-payers // slots)
    assert max(waits) <= turns * (endpoint.leaf_s + TURN_S + 2 * START_S) + 0.1
    endpoint.run_until(1.0 + 20 * sum(map(leaves, trees)) * (endpoint.leaf_s + TURN_S + START_S))
    assert all(str(number) in endpoint.ended for number in range(len(trees)))
    assert endpoint.most_over <= 0
    assert endpoint.most_workers <= 2 * slots + payers + 3 * max(map(levels, trees))
    assert not endpoint.rig.core._nested.drivers


def test_a_driver_that_runs_again_without_a_place_counts_as_one_and_gets_the_next() -> None:
    endpoint = Endpoint(slots=1, leaf_s=1.5)
    endpoint.resumed_for["m"] = 20.0
    endpoint.submit("m", "m", full(1, 2))
    endpoint.run_until(1.0)
    endpoint.submit("g", "g", full(1, 2))  # it has the place when the calls of m have ended
    endpoint.run_until(12.0)
    [driver] = [worker for worker in endpoint.rig.core._workers.values() if worker.runs("m")]
    assert "g" in endpoint.ended
    endpoint.submit("m2", "m")
    endpoint.run_until(13.0)
    assert driver.has_slot
    assert "m2" not in endpoint.waited
    endpoint.run_until(60.0)
    assert {"m", "m2", "g"} <= set(endpoint.ended)


def test_a_driver_on_a_slot_with_an_accelerator_keeps_it_and_its_calls_go_on() -> None:
    endpoint = Endpoint(slots=2, leaf_s=0.5, steps_aside=False)
    endpoint.submit("m", "m", full(2, 3))
    endpoint.run_until(3.0)
    endpoint.submit("g", "g")
    endpoint.run_until(30.0)
    assert {"m", "g"} <= set(endpoint.ended)
    assert not endpoint.rig.core._nested.drivers
