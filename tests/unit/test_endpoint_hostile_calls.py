"""The manager's core and a worker that says what it likes: of graphs, of calls of tasks that run, at any time."""

from __future__ import annotations

import random
from typing import Any

import pytest

from farcall_common.graphs import COLLECT, Graph, Input, Stage
from farcall_common.limits import MAX_PAYLOAD_BYTES, MIB
from farcall_common.task_options import Callee, TaskOptions
from farcall_endpoint.contracts.agent_manager import CancelTasks, ReadOutput, TaskOrder, WantedOutput
from farcall_endpoint.contracts.manager_worker import Begun, Call, Calls, Done, DropCalls, Packet, Ready, Synced, Waits
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.graphs.values import GraphSettings
from farcall_endpoint.host.shared_memory import Body, FrameList, MemoryFile, SharedBytes
from farcall_endpoint.manager.core.events import Callees, Job, MalformedReceived, PacketsReceived, TasksReceived
from tests.support.manager import Rig, ready

_ERROR: dict[str, Any] = {"code": "X", "message": "m"}
GRAPHS = (
    (Stage(0, "a"), Stage(1, "b", (Input(0, (0,)),)), Stage(1, "c", (Input(1, (0,)),))),
    (Stage(0, "a"), Stage(1, "b", (Input(0, (0,), each=True),)), Stage(0, "c", (Input(1, (0,)),))),
    (
        Stage(0, "a"),
        Stage(1, "b", (Input(0, (0,), each=True),)),
        Stage(1, "c", (Input(1, (0,), each=True), Input(0, (1,)))),
        Stage(0, "d", (Input(2, (0,)), Input(1, (1,))), needs=2),
        Stage(COLLECT, "", (Input(3, (0,)), Input(0, (1,)))),
    ),
)


def graph_job(name: str, stages: tuple[Stage, ...], *, submitter: str = "", spread: bool = False, **given: Any) -> Job:
    callees = tuple(Callee(function_id=f"id-{each}", function_hash=f"h{each}") for each in range(2))
    order = TaskOrder(name, 1, "h0", 0, TaskOptions(callees=callees, **given), submitter=submitter)
    graph = Graph(stages, tuple(b"call" for _ in stages), len(stages) - 1, spread)
    return Job(order, b"body 0", b"", callees=Callees({"h0": b"body 0", "h1": b"body 1"}, graph))


class Hostile:
    """Workers that say anything, about the tasks that they have."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rig = Rig(
            slots=self.random.randint(1, 3),
            prefetch=self.random.choice([0, 1, 8]),
            batching=self.random.random() < 0.8,
            graphs=GraphSettings(memory_bytes=1000, disk_bytes=1000, files=2),
        )
        self.rig.start_all()
        self.made = 0
        self.memory = MemoryFile.of([bytes(100)])

    def task_ids(self, worker_id: int) -> list[str]:
        worker = self.rig.core._workers.get(worker_id)
        ids = [] if worker is None else [job.order.task_id for job in worker.jobs]
        return [*ids, ids[0] if ids else "x", ids[0] if ids else "x", f"{self.made}/0", "x"]

    def body(self, size: int) -> Body:
        at = self.random.choice([0, 5, 2**52])
        match self.random.randrange(4):
            case 0:
                return SharedBytes(self.memory, at, size)
            case 1:
                return FrameList([b"x" * (size // 2), SharedBytes(self.memory, at, size - size // 2)])
            case _:
                return b"x" * size

    def packet(self, worker_id: int) -> tuple[Packet, Body]:
        choose = self.random.choice
        task_id = choose(self.task_ids(worker_id))
        match self.random.randrange(12):
            case 0 | 1 | 2 | 3:
                sizes = tuple(choose([0, 1, 7, 40]) for _ in range(choose([0, 1, 1, 1, 3])))
                tail = choose([0, 0, 2])
                size = sum(sizes) + tail + choose([0] * 9 + [1])
                printed = Printed(tail, 0, choose([tail, 2**53]), 0) if tail else None
                error = choose([None, None, None, _ERROR])
                begin, end = choose([(0.0, 1.0), (1.0, 0.0), (2.0**39, 2.0**39 + 1)])
                parts = choose([sizes, sizes, (), (-1, 2)])
                return Done(
                    task_id, begin, end, error, None, printed, choose([False, True]), parts, choose([(), (0,), (7,)])
                ), self.body(size)
            case 4:
                return Waits(task_id, over=choose([False, True])), b""
            case 5:
                return DropCalls(task_id, (0, 1, 5)), b""
            case 6 | 7 | 8:
                numbers = self.random.sample(range(6), choose([1, 2]))
                options = choose([None, TaskOptions(retries=1), TaskOptions(idempotent=False)])
                names = choose(["h", "h0", "nothing"])
                return Calls(task_id, tuple(Call(each, names, 1, "f", options) for each in numbers)), self.body(
                    len(numbers)
                )
            case 9:
                return Begun(task_id, {}), b""
            case 10:
                return Synced(), b""
            case _:
                packets: list[Packet] = [Ready(1), Begun(task_id, {}), Waits(task_id)]
                return choose(packets), b""

    def step(self) -> None:
        rig, choose = self.rig, self.random.choice
        living = list(rig.workers)
        match self.random.randrange(16):
            case 0:
                self.made += 1
                submitter = choose(["", "s", "t"])
                job = graph_job(str(self.made), choose(GRAPHS), submitter=submitter, spread=choose([False, True]))
                rig.handle(TasksReceived([job]))
            case 1:
                self.made += 1
                order = TaskOrder(str(self.made), 1, "h", 0, submitter=choose(["", "s"]))
                rig.handle(TasksReceived([Job(order, b"body", b"p")]))
            case 2:
                rig.handle(CancelTasks((str(self.random.randint(0, self.made)),)))
            case 3:
                rig.now += choose([0.01, 0.3, 2.0])
                rig.handle()
            case 4:
                wanted = tuple(WantedOutput(str(each), 1, 0, 0) for each in range(self.made))
                rig.handle(ReadOutput("r", wanted, 100))
            case 5 | 6 | 7 if living:
                worker_id = choose(living)
                if worker_id in rig.killed or self.random.random() < 0.1:
                    rig.die(worker_id)
                elif not rig.core._workers[worker_id].is_ready:
                    rig.handle(ready(worker_id))
                elif rig.workers[worker_id].running is None:
                    rig._step(worker_id)
            case 8 if living:
                rig.handle(MalformedReceived(choose(living), "bytes"))
            case _ if living:
                worker_id = choose(living)
                packets = [self.packet(worker_id) for _ in range(choose([1, 1, 2, 3]))]
                for packet, _ in packets:
                    running = rig.workers[worker_id].running
                    if isinstance(packet, Done) and running is not None and packet.task_id == running.task_id:
                        rig.workers[worker_id].running = None
                rig.handle(PacketsReceived(worker_id, packets))
            case _:
                rig.handle()

    def end(self) -> None:
        """Everything is cancelled."""
        rig = self.rig
        rig.handle(CancelTasks(tuple(map(str, range(self.made + 1)))))
        for worker_id in list(rig.workers):
            rig.die(worker_id)
        rig.handle(CancelTasks(tuple(map(str, range(self.made + 1)))))


@pytest.mark.parametrize("seed", range(60))
def test_a_worker_may_say_anything_at_any_time(seed: int) -> None:
    hostile = Hostile(seed)
    for _ in range(200):
        hostile.step()
    hostile.end()
    core = hostile.rig.core
    assert not core._graphs.running
    assert not core._nested.drivers
    assert not core._queue
    ahead = core._ahead
    assert not any((ahead._before, ahead._waiting, ahead._running, ahead._early))
    assert (core._graphs.memory.used_bytes, core._graphs.memory.used_disk_bytes) == (0, 0)


def test_a_task_that_was_not_started_ends_and_makes_calls() -> None:
    rig = Rig(prefetch=4)
    rig.start_all()
    rig.jobs("a", "b", "c")
    rig.read()
    calls = Calls("c", (Call(0, "h", 0),))
    rig.handle(PacketsReceived(0, [(Done("a", 0.0, 0.0), b""), (Done("b", 0.0, 0.0), b""), (calls, b"")]))
    rig.handle(CancelTasks(("c",)))
    rig.die(0)
    assert not rig.core._nested.drivers
    rig.start_all()
    rig.jobs("good")
    assert rig.done(max(rig.workers)) == "good"


def test_calls_of_a_task_that_is_given_back_end() -> None:
    rig = Rig(prefetch=4)
    rig.start_all()
    rig.jobs("a", "b", "c")
    rig.read()
    calls = Calls("b", (Call(0, "h", 0),))
    rig.handle(PacketsReceived(0, [(Done("a", 0.0, 0.0), b""), (calls, b"")]))
    assert not rig.core._nested.drivers
    rig.die(0)
    assert not rig.core._nested.drivers


def test_what_calls_raise_that_the_graph_goes_on_without_is_bounded() -> None:
    stages = (
        Stage(0, "a"),
        Stage(1, "b", (Input(0, (0,), each=True),)),
        Stage(0, "c", (Input(1, (0,)),), needs=1),
    )
    rig = Rig(batching=False)
    rig.start_all()
    rig.handle(TasksReceived([graph_job("g", stages)]))
    values = [(Done("g/0", 0.0, 1.0, parts=(1,) * 30), b"x" * 30)]
    ends = [
        (Done(f"g/1.{number}", 0.0, 1.0, {**_ERROR, "hint": "h" * (MIB * 2 // 5)}), bytes(MIB)) for number in range(30)
    ]
    for packet, body in [*values, *ends]:
        assert rig.read() == packet.task_id
        rig.workers[0].running = None
        running = rig.core._graphs.running["g"]
        rig.handle(PacketsReceived(0, [(packet, body)]))
        assert sum(map(len, running._raised.values())) == running._raised_bytes <= MAX_PAYLOAD_BYTES
    failure = running.run.failure
    assert failure is not None
    assert len(str(failure.record)) < MIB
    [finished] = rig.progress().finished
    assert finished.error is not None


@pytest.mark.parametrize("field", ["error", "details"])
def test_a_result_with_more_text_than_a_worker_sends_ends_its_worker(field: str) -> None:
    """The agent's message about it would be larger than the cloud accepts."""
    rig = Rig(slots=1)
    rig.start_all()
    rig.jobs("a")
    rig.read()
    forged: dict[str, Any] = {field: {f"k{number}": "v" * 30_000 for number in range(20)}}
    rig.handle(PacketsReceived(0, [(Done("a", 0.0, 1.0, **forged), b"x")]))
    assert rig.core._workers[0].killed
    assert not rig.progress().finished


def test_calls_that_there_are_not_are_dropped_without_a_search() -> None:
    rig = Rig(slots=1)
    rig.start_all()
    rig.jobs("d")
    rig.read()
    rig.handle(PacketsReceived(0, [(Calls("d", (Call(0, "h", 0),)), b"")]))
    assert rig.core._nested.dropped(DropCalls("d", (5, 6))) == set()
    assert rig.core._nested.dropped(DropCalls("d", (0, 5))) == {"d/0"}
