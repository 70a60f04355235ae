"""Nested calls in the manager's core: tasks that call functions and wait for them, with simulated workers."""

from __future__ import annotations

import collections
import hashlib
import os
import random
import types
from typing import Any

import msgspec
import pytest

from farcall_common.environments import Environment
from farcall_common.graphs import COLLECT, Graph, Input, Stage
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.contracts.agent_manager import CancelTasks, Stop, TaskOrder
from farcall_endpoint.contracts.manager_worker import Call, CallEnded, Calls, Done, DropCalls, Packet, Waits
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.graphs.values import GraphSettings, Memory
from farcall_endpoint.host.shared_memory import Frame, MemoryFile, SharedBytes, bytes_of
from farcall_endpoint.manager.core.actions import Action, Answer, Kill, Send
from farcall_endpoint.manager.core.events import (
    Callees,
    Job,
    MalformedReceived,
    PacketsReceived,
    TasksReceived,
    WorkerDied,
)
from farcall_endpoint.manager.core.graphs import callees_of
from farcall_endpoint.manager.core.nested_calls import MOST_DEPTH, MOST_OPEN, kept_answer, options_of
from farcall_endpoint.manager.shell.service import Manager
from tests.support.manager import Rig, ready

BODY = b"body"
HASH = hashlib.sha256(BODY).hexdigest()
Tree = tuple["Tree", ...]
"""A function that calls as many others, each with its own, and waits for all."""


def calls(task_id: str, numbers: range, **given: Any) -> tuple[Packet, bytes]:
    return Calls(task_id, tuple(Call(number, "h", 1, "f", **given) for number in numbers)), b"p" * len(numbers)


def sent(rig: Rig, worker_id: int, *packets: tuple[Packet, Frame]) -> list[Action]:
    return rig.handle(PacketsReceived(worker_id, list(packets)))


def driving(rig: Rig, task_id: str = "d", **given: Any) -> list[Action]:
    """A task runs on worker 0 and has made one call."""
    rig.jobs(task_id, **given)
    rig.read(0)
    return sent(rig, 0, calls(task_id, range(1)))


def told(actions: list[Action]) -> list[CallEnded]:
    return [action.packet for action in actions if isinstance(action, Answer) and isinstance(action.packet, CallEnded)]


def test_a_call_goes_to_another_worker_and_its_value_back() -> None:
    rig = Rig(slots=2)
    rig.start_all()
    driving(rig)
    assert rig.read(1) == "d/0"
    order = rig.workers[1].running
    assert order is not None
    assert order.call is not None
    assert order.call.is_edge
    actions = sent(rig, 1, (Done("d/0", 0.0, 1.0, parts=(5,)), b"value"))
    assert actions == [Answer(0, CallEnded(0), (b"value",))]
    assert not rig.progress().finished
    rig.done(0)
    [finished] = rig.progress().finished
    assert finished.details is not None
    [stage] = finished.details["stages"]
    assert (finished.task_id, stage["name"], stage["state"], stage["ended"]) == ("d", "f", "done", 1)


def printing(task_id: str, text: bytes, *, parts: tuple[int, ...] = (0,)) -> tuple[Packet, bytes]:
    return Done(task_id, 0.0, 1.0, printed=Printed(len(text), 0, len(text), 0), parts=parts), text


def test_what_calls_print_comes_behind_what_the_driver_prints() -> None:
    rig = Rig(slots=2)
    rig.start_all()
    driving(rig)
    sent(rig, 0, calls("d", range(1, 2)))
    for number, text in enumerate((b"one\n", b"two\n")):
        assert rig.read(1) == f"d/{number}"
        rig.workers[1].running = None
        sent(rig, 1, printing(f"d/{number}", text))
    rig.workers[0].running = None
    sent(rig, 0, printing("d", b"own\n", parts=()))
    progress, bodies = rig.take()
    [finished] = progress.finished
    text = b"own\n--- call f, attempt 1\none\n--- call f, attempt 1\ntwo\n"
    assert finished.printed == Printed(len(text), 0, len(text), 0)
    assert b"".join(map(bytes_of, bodies)).endswith(text)


def test_what_calls_have_printed_comes_with_the_death_of_their_driver() -> None:
    rig = Rig(slots=2)
    rig.start_all()
    driving(rig)
    assert rig.read(1) == "d/0"
    rig.workers[1].running = None
    sent(rig, 1, printing("d/0", b"one\n"))
    rig.die(0)
    [died] = rig.progress().died
    assert died.output == b"--- call f, attempt 1\none\n"


def test_a_driver_that_waits_gives_its_share_to_another_worker_which_ends_afterwards() -> None:
    rig = Rig(slots=1)
    rig.start_all()
    assert not any(isinstance(action, Answer) for action in driving(rig))
    assert len(rig.workers) == 1
    sent(rig, 0, (Waits("d"), b""))
    assert len(rig.workers) == 2
    rig.handle(ready(1))
    assert rig.read(1) == "d/0"
    rig.workers[1].running = None
    sent(rig, 1, (Done("d/0", 0.0, 1.0, parts=(1,)), b"r"))
    sent(rig, 0, (Waits("d", over=True), b""))
    rig.done(0)
    assert not rig.killed
    rig.now += 2.0
    rig.handle()
    assert rig.killed == [1]
    rig.die(1)
    rig.jobs("next")
    assert rig.done(0) == "next"


def test_calls_that_wait_for_a_worker_do_not_run() -> None:
    rig = Rig(slots=1)
    rig.start_all()
    driving(rig)
    rig.now = 0.3
    rig.handle()
    [driver] = [each for report in rig.reports for each in report.progress.graphs]
    assert [each.state for each in driver.stages] == ["waiting"]
    sent(rig, 0, (Waits("d"), b""))
    rig.handle(ready(1))
    rig.reports.clear()
    for now in (0.5, 0.6, 0.9):
        rig.now = now
        rig.handle()
    assert [each.stages[0].state for report in rig.reports for each in report.progress.graphs][-1] == "running"


def test_two_submitters_whose_tasks_wait_do_not_end_the_workers_of_each_other() -> None:
    rig = Rig(slots=2)
    orders = [TaskOrder(name, 1, "h", 0, submitter=name) for name in ("x", "y")]
    rig.handle(TasksReceived([Job(order, BODY, b"p") for order in orders]))
    rig.start_all()
    drivers = {rig.read(number): number for number in list(rig.workers)}
    assert sorted(drivers) == ["x", "y"]
    for number in range(3):
        for name, driver in drivers.items():  # they take turns
            present = set(rig.workers)
            sent(rig, driver, calls(name, range(number, number + 1)), (Waits(name), b""))
            rig.handle(*map(ready, set(rig.workers) - present))
            [worker_id] = [each for each, worker in rig.workers.items() if worker.ahead]
            assert rig.read(worker_id) == f"{name}/{number}"
            rig.workers[worker_id].running = None
            done = Done(f"{name}/{number}", 0.0, 1.0, parts=(1,))
            assert told(sent(rig, worker_id, (done, b"r"))) == [CallEnded(number)]
            sent(rig, driver, (Waits(name, over=True), b""))
    assert not rig.killed
    assert len(rig.workers) == 2 + 2


@pytest.mark.parametrize("has_called", [True, False])
def test_a_task_gets_its_calls_while_the_manager_stops(has_called: bool) -> None:
    rig = Rig(slots=2)
    rig.start_all()
    rig.jobs("d")
    rig.read(0)
    if has_called:
        sent(rig, 0, calls("d", range(1)))
    rig.handle(Stop(5.0))
    if not has_called:
        assert rig.killed == [1]
        rig.die(1)
        sent(rig, 0, calls("d", range(1)))
    [other] = [number for number in rig.workers if number]
    if not has_called:
        rig.handle(ready(other))
    assert rig.read(other) == "d/0"
    assert told(sent(rig, other, (Done("d/0", 0.0, 1.0, parts=(1,)), b"r"))) == [CallEnded(0)]
    rig.done(0)
    assert [each.task_id for each in rig.progress().finished] == ["d"]
    for worker_id in list(rig.workers):
        assert worker_id in rig.killed
        rig.die(worker_id)
    assert rig.leaves


def test_tasks_behind_a_driver_are_given_to_others() -> None:
    rig = Rig(slots=2, prefetch=4)
    rig.start_all()
    rig.jobs("d", "a", "b", "c", "e", "g")
    rig.read(0)
    rig.read(1)
    sent(rig, 0, calls("d", range(2)), (Waits("d"), b""))
    assert rig.workers[0].ahead == []
    rig.handle()
    waiting = rig.workers[1].ahead
    assert "a" not in rig.workers[0].ahead
    assert waiting


def test_calls_that_a_driver_leaves_or_drops_are_cancelled() -> None:
    rig = Rig(slots=2)
    rig.start_all()
    rig.jobs("d")
    rig.read(0)
    sent(rig, 0, calls("d", range(4)))
    assert rig.read(1) == "d/0"
    assert told(sent(rig, 0, (DropCalls("d", (3,)), b"")))[0].number == 3
    rig.done(0)
    assert rig.killed == [1]
    rig.die(1)
    rig.jobs("next")
    assert rig.done(0) == "next"
    assert {each.task_id: each.state for each in rig.progress().finished} == dict.fromkeys(
        ["d", "next"], TaskState.SUCCESS
    )


@pytest.mark.parametrize("cancelled", [True, False])
def test_calls_end_with_a_driver_that_is_cancelled_or_dies(cancelled: bool) -> None:
    rig = Rig(slots=2)
    rig.start_all()
    driving(rig)
    rig.read(1)
    if cancelled:
        rig.handle(CancelTasks(("d",)))
        assert rig.killed == [0]
    rig.die(0)
    assert 1 in rig.killed
    rig.die(1)
    progress = rig.progress()
    assert [each.state for each in progress.finished] == ([TaskState.CANCELLED] if cancelled else [])
    assert [each.task_id for each in progress.died] == ([] if cancelled else ["d"])


@pytest.mark.parametrize(("idempotent", "starts"), [(True, 3), (False, 1)])
def test_a_call_whose_worker_dies_is_made_again_if_it_may_be(idempotent: bool, starts: int) -> None:
    rig = Rig(slots=2)
    rig.start_all()
    rig.jobs("d")
    rig.read(0)
    options = TaskOptions(idempotent=idempotent)
    answers = told(sent(rig, 0, calls("d", range(1), options=options)))
    for number in range(1, 1 + starts):
        assert not answers
        rig.handle(*[ready(each) for each in rig.workers if each == number and number > 1])
        assert rig.read(number) == "d/0"
        del rig.workers[number]
        answers = told(rig.handle(WorkerDied(number, 0, "signal 9")))
    [answer] = answers
    assert answer.error is not None
    assert answer.error["code"] == "WORKER_DIED"


def test_a_call_that_raised_is_retried_by_its_options() -> None:
    rig = Rig(slots=2)
    rig.start_all()
    rig.jobs("d")
    rig.read(0)
    sent(rig, 0, calls("d", range(1), options=TaskOptions(retries=1, retry_delay_s=10.0)))
    rig.read(1)
    error: dict[str, Any] = {"code": "X", "message": "m" * 5000, "exception_data": "x"}
    raised = Done("d/0", 0.0, 1.0, error, is_retried=True)
    rig.workers[1].running = None
    assert not told(sent(rig, 1, (raised, b"")))
    assert rig.core.next_deadline() <= rig.now + 10.0
    rig.now += 10.0
    rig.handle()
    assert rig.read(1) == "d/0"
    rig.workers[1].running = None
    [answer] = told(sent(rig, 1, (raised, b"")))
    assert answer.error is not None
    assert answer.error["retries_used"] == 1
    assert answer.error["exception_data"] == "x"
    rig.done(0)
    [finished] = rig.progress().finished
    assert finished.details is not None
    [stage] = finished.details["stages"]
    assert (stage["retries"], stage["run_s"]) == (1, 2.0)
    assert stage["error"] == {"code": "X", "message": "m" * 4000, "retries_used": 1}


def test_a_restricted_task_calls_its_callees_only() -> None:
    rig = Rig(slots=2)
    rig.start_all()
    order = TaskOrder("d", 1, "h", 0, restricted=True)
    rig.handle(TasksReceived([Job(order, BODY, b"", callees=Callees({"named": b"code"}))]))
    rig.read(0)
    packet = Calls("d", (Call(0, HASH, 0), Call(1, "h", 0), Call(2, "named", 0)), ((HASH, len(BODY)),))
    answers = told(sent(rig, 0, (packet, BODY)))
    assert [(each.number, (each.error or {})["code"]) for each in answers] == [
        (0, "FUNCTION_NOT_PERMITTED"),
        (1, "FUNCTION_NOT_PERMITTED"),
    ]
    assert rig.read(1) == "d/2"


@pytest.mark.parametrize(
    ("packet", "body"),
    [
        (Calls("d", (Call(0, "h", 5),)), b"four"),
        (Calls("d", (Call(0, "h", -1), Call(1, "h", 5))), b"four"),
        (Calls("d", (Call(0, "h", 0), Call(0, "h", 0))), b""),
        (Calls("d", (Call(0, "0" * 64, 0),), (("0" * 64, 4),)), b"code"),
        (Calls("d", tuple(Call(number, "h", 0) for number in range(MOST_OPEN + 1))), b""),
    ],
)
def test_what_no_worker_sends_ends_the_worker(packet: Calls, body: bytes) -> None:
    rig = Rig(slots=1)
    rig.start_all()
    rig.jobs("d")
    rig.read(0)
    actions = sent(rig, 0, (packet, body))
    assert [action.worker_id for action in actions if isinstance(action, Kill)] == [0]


@pytest.mark.parametrize("memory", ["can be read", "cannot be read"])
def test_a_function_stays_what_its_hash_says_whatever_its_task_writes_later(memory: str) -> None:
    """Workers of other submitters get it, too."""
    rig = Rig(slots=2)
    rig.start_all()
    rig.jobs("d")
    rig.read(0)
    file = MemoryFile.of([BODY])
    body = SharedBytes(file, 0, len(BODY) if memory == "can be read" else 100)
    packet = Calls("d", (Call(0, HASH, 0),), ((HASH, len(body)),))
    actions = sent(rig, 0, (packet, body))
    if memory == "cannot be read":
        assert [action.worker_id for action in actions if isinstance(action, Kill)] == [0]
        return
    os.pwrite(file.descriptor, b"evil", 0)
    [order] = [action for action in actions if isinstance(action, Send)]
    assert order.body[0] == BODY


def test_what_a_task_that_has_ended_says_is_ignored() -> None:
    rig = Rig(slots=1)
    rig.start_all()
    rig.jobs("d")
    rig.done(0)
    assert sent(rig, 0, calls("d", range(1)), (Waits("d"), b""), (DropCalls("d", (1,)), b"")) == []
    rig.jobs("next")
    assert rig.done(0) == "next"


@pytest.mark.parametrize("forged", ["its end", "its calls", "its calls, and a recall"])
def test_what_a_task_forges_of_the_task_behind_it_ends_its_worker_and_not_the_manager(forged: str) -> None:
    rig = Rig(slots=1, prefetch=3)
    rig.start_all()
    rig.jobs("a", "b")
    rig.read(0)
    sent(rig, 0, (Done("a", 0.0, 0.001), b"r"))
    sent(rig, 0, (Done("b", 0.0, 0.001), b"r") if forged == "its end" else calls("b", range(1)))
    if forged == "its calls, and a recall":
        rig.handle(CancelTasks(("b",)))
        rig.handle()
    rig.die(0)
    rig.start_all()
    rig.jobs("c")
    assert rig.done(1) == "c"
    assert [each.task_id for each in rig.progress().died] == (["b"] if forged == "its calls" else [])
    assert not rig.core._nested.drivers


def test_the_calls_of_drivers_count_with_those_that_they_make() -> None:
    rig = Rig(slots=1)
    rig.start_all()
    task_id, worker_id = "d", 0
    rig.jobs(task_id)
    for _ in range(3):
        assert rig.read(worker_id) == task_id
        sent(rig, worker_id, calls(task_id, range(1)), (Waits(task_id), b""))
        worker_id = max(rig.workers)
        rig.handle(ready(worker_id))
        task_id += "/0"
    for at in range(4):
        rig.now += 10.0
        name = "d" + "/0" * (3 - at)
        sent(
            rig,
            3 - at,
            (Waits(name, over=True), b""),
            (Done(name, 0.0, 10.0 * (at + 1), parts=(1,) if at < 3 else ()), b"r"),
        )
    [finished] = rig.progress().finished
    assert finished.details is not None
    assert len(finished.details["stages"]) == 1
    assert (finished.details["stage_calls"], finished.details["stage_run_s"]) == (3, 10.0 + 20.0 + 30.0 + 40.0)


def test_arguments_of_calls_have_a_budget() -> None:
    rig = Rig(slots=1, graphs=GraphSettings(memory_bytes=50, files=1))
    rig.start_all()
    rig.jobs("d")
    rig.read(0)
    memory = rig.core.value_memory
    made = Calls("d", tuple(Call(number, "h", 50, "f") for number in range(2)))
    assert not told(sent(rig, 0, (made, SharedBytes(MemoryFile.of([bytes(100)]), 0, 100))))
    assert memory.used_bytes == 100
    [answer] = told(sent(rig, 0, calls("d", range(2, 3))))
    assert (answer.number, answer.error and answer.error["code"]) == (2, "VALUE_TOO_LARGE")
    rig.die(0)
    assert memory.used_bytes == 0


def test_answers_that_a_driver_does_not_read_have_a_budget() -> None:
    memory = Memory(GraphSettings(memory_bytes=50, files=1), writers=1)
    one, other = (kept_answer(Answer(0, CallEnded(n), (b"v" * 60,)), memory) for n in range(2))
    assert (one.body, memory.used_bytes) == ((b"v" * 60,), 60)
    assert other.body == (b"",)
    assert other.packet.error is not None
    assert other.packet.error["code"] == "VALUE_NOT_STORED"
    memory.remove(*one.body)
    for _ in range(2):  # one may stay in its file
        value = SharedBytes(MemoryFile.of([bytes(10)]), 0, 10)
        answer = kept_answer(Answer(0, CallEnded(3), (value,)), memory)
    assert answer.body == (bytes(10),)


def test_a_call_that_was_dropped_is_not_looked_for_again() -> None:
    rig = Rig(slots=1)
    rig.start_all()
    driving(rig)
    driver = rig.core._nested
    assert driver.dropped(DropCalls("d", (0, 1, 2))) == {"d/0"}
    assert driver.dropped(DropCalls("d", (0, 1, 2))) == set()


def test_a_task_that_writes_without_end_does_not_hold_the_manager() -> None:
    channel = types.SimpleNamespace(receive_shared=lambda: (Waits("d"), b""), received_bytes=0)
    worker = types.SimpleNamespace(worker_id=7, process=types.SimpleNamespace(channel=channel))
    received, ended = Manager._receive(types.SimpleNamespace(_returns={}, _leftovers={}), worker)  # type: ignore[arg-type]
    assert isinstance(received, PacketsReceived)
    assert ended == MalformedReceived(7, "more packets at a time than a worker sends")


@pytest.mark.parametrize("seed", range(60))
def test_nothing_that_tasks_forge_ends_the_manager(seed: int) -> None:
    chance = random.Random(seed)
    rig = Rig(slots=3, prefetch=2)
    rig.start_all()
    callee = Callee("f", "h")
    chain = (Stage(0, "a"), Stage(0, "b", (Input(0, (0,)),)), Stage(0, "c", (Input(1, (0,)),)), Stage(0, "d"))
    stages = (*chain, Stage(COLLECT, "", (Input(2, (0,)), Input(3, (1,)))))
    graph = Graph(stages, (b"",) * 5, 4, spread=bool(seed % 2))
    order = TaskOrder("g", 1, "h", 0, TaskOptions(callees=(callee,)))
    rig.handle(TasksReceived([Job(order, BODY, b"", callees=Callees({"h": BODY}, graph))]))
    rig.jobs("x", "y", "z")
    for _ in range(150):
        rig.now += chance.random()
        rig.handle(*[ready(number) for number, worker in rig.core._workers.items() if not worker.is_ready])
        if not rig.core._workers:
            rig.handle()
            continue
        worker = chance.choice(list(rig.core._workers.values()))
        number = worker.worker_id
        if number in rig.killed or chance.random() < 0.1:
            rig.die(number)
            continue
        task_id = worker.jobs[0].order.task_id if worker.jobs and chance.random() < 0.9 else "g/1"
        what = chance.randrange(6)
        if what == 0:
            lost = tuple(range(chance.randrange(3)))
            parts = (1,) if worker.jobs and worker.jobs[0].call and worker.jobs[0].call.is_edge else ()
            sent(rig, number, (Done(task_id, 0.0, 0.001, parts=parts, undelivered=lost), b"r"))
        elif what == 1:
            first = chance.randrange(1000) * 10
            sent(rig, number, calls(task_id, range(first, first + chance.randrange(1, 4))))
        elif what == 2:
            sent(rig, number, (Waits(task_id, over=chance.random() < 0.5), b""))
        elif what == 3:
            sent(rig, number, (DropCalls(task_id, tuple(range(0, 10_000, 10))), b""))
        elif what == 4:
            rig.handle(CancelTasks((task_id,)))
        else:
            rig._step(number) if rig.workers[number].running is None else None
    for number in list(rig.workers):
        rig.die(number)
    drivers = rig.core._nested.drivers
    assert all(any(job.order.task_id == name for w in rig.core._workers.values() for job in w.jobs) for name in drivers)


def test_calls_are_not_nested_without_end() -> None:
    rig = Rig(slots=1)
    rig.start_all()
    task_id, worker_id = "d", 0
    rig.jobs(task_id)
    for depth in range(MOST_DEPTH + 1):
        assert rig.read(worker_id) == task_id
        answers = told(sent(rig, worker_id, calls(task_id, range(1)), (Waits(task_id), b"")))
        if depth < MOST_DEPTH:
            assert not answers
            worker_id = max(rig.workers)
            rig.handle(ready(worker_id))
            task_id += "/0"
    [answer] = answers
    assert answer.error is not None
    assert answer.error["code"] == "CALLS_TOO_DEEP"
    assert len(rig.workers) == 1 + MOST_DEPTH


@pytest.mark.parametrize("restricted", [False, True])
def test_a_call_of_a_function_with_another_environment_is_refused(restricted: bool) -> None:
    other = Environment.of({"type": "uv", "requirements": ("numpy",)})
    options = TaskOptions(callees=(Callee("one", "h1"), Callee("two", "h2", environment=other)))
    functions = callees_of(options, {"h1": b"one", "h2": b"two"}, None)
    rig = Rig(slots=1)
    rig.start_all()
    order = TaskOrder("d", 1, "h", 0, options, restricted=restricted)
    rig.handle(TasksReceived([Job(order, BODY, b"", callees=functions)]))
    rig.read(0)
    made = Calls("d", (Call(0, "h1", 1, "f"), Call(1, "h2", 1, "f")))
    [answer] = told(sent(rig, 0, (made, b"pp")))
    assert (answer.number, answer.error and answer.error["code"]) == (1, "CONTAINER_UNSUPPORTED")
    twice = msgspec.structs.replace(options, callees=(*options.callees, Callee("three", "h2")))
    assert callees_of(twice, {"h1": b"one", "h2": b"two"}, None).environments["h2"] == {"", other.key}


def test_a_call_has_no_more_than_its_driver() -> None:
    driver = TaskOptions(idempotent=False, memory_bytes=100, max_output_bytes=7, walltime_s=5.0, output_bytes=10)
    wanted = TaskOptions(memory_bytes=200, walltime_s=3.0, retries=2, output_bytes=20)
    assert options_of(driver, wanted) == TaskOptions(
        idempotent=False, memory_bytes=100, max_output_bytes=7, walltime_s=3.0, retries=2, output_bytes=10
    )


def test_a_call_that_runs_for_hours_holds_up_no_calls_of_another_submitter() -> None:
    rig = Rig(slots=2)
    orders = [TaskOrder(name, 1, "h", 0, submitter=name) for name in ("a", "b")]
    rig.handle(TasksReceived([Job(order, BODY, b"") for order in orders]))
    rig.handle(*map(ready, rig.workers))
    for number, task_id in [(number, rig.read(number)) for number in (0, 1)]:
        sent(rig, number, calls(task_id, range(2)), (Waits(task_id), b""))
        extra = max(rig.workers)
        rig.handle(ready(extra))
        assert rig.read(extra) == f"{task_id}/0"
    assert len(rig.workers) == 4  # one for each slot that was given up, however many calls wait


class Simulation:
    """Tasks that are trees of calls, on workers that act in any order."""

    def __init__(self, trees: list[Tree], *, slots: int, seed: int, prefetch: int, submitters: int = 1) -> None:
        self.rig = Rig(slots=slots, prefetch=prefetch)
        self.random = random.Random(seed)
        self.trees = {str(number): tree for number, tree in enumerate(trees)}
        self.open: dict[str, set[int]] = {}  # by driver
        self.most = 0
        self.is_ready: set[int] = set()
        self.drove: set[str] = set()
        orders = [
            TaskOrder(name, 1, "h", 0, submitter=str(self.random.randrange(submitters)) if submitters > 1 else "")
            for name in self.trees
        ]
        self.rig.handle(TasksReceived([Job(order, BODY, b"p") for order in orders]))

    def step(self) -> bool:
        """Something that can happen; False if nothing can."""
        rig = self.rig
        choices: list[tuple[str, int]] = []
        for number, worker in rig.workers.items():
            if number in rig.killed:
                choices.append(("die", number))
            elif number not in self.is_ready:
                choices.append(("ready", number))
            elif worker.running is None:
                if worker.packets or worker.orders:
                    choices.append(("read", number))
            elif not self.open.get(worker.running.task_id):
                choices.append(("go on", number))
        if not choices:
            return False
        what, number = self.random.choice(choices)
        worker = rig.workers[number]
        match what:
            case "die":
                rig.die(number)
            case "ready":
                self.is_ready.add(number)
                self.note(rig.handle(ready(number)))
            case "read":
                rig._step(number)
                self.note(rig.handle())
            case _:
                self.go_on(number)
        self.most = max(self.most, len(rig.workers))
        return True

    def go_on(self, number: int) -> None:
        worker = self.rig.workers[number]
        assert worker.running is not None
        task_id = worker.running.task_id
        tree = self.trees[task_id]
        events: list[tuple[Packet, bytes]]
        if tree and task_id not in self.drove:
            self.drove.add(task_id)
            self.open[task_id] = set(range(len(tree)))
            for child, below in enumerate(tree):
                self.trees[f"{task_id}/{child}"] = below
            events = [calls(task_id, range(len(tree))), (Waits(task_id), b"")]
        else:
            worker.running = None
            over: list[tuple[Packet, bytes]] = [(Waits(task_id, over=True), b"")] if tree else []
            parts = (1,) if "/" in task_id else ()
            events = [*over, (Done(task_id, 0.0, 0.001, parts=parts), b"r")]
        self.note(sent(self.rig, number, *events))

    def note(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Answer):
                assert action.packet.error is None
                worker = self.rig.workers[action.worker_id].running
                assert worker is not None
                self.open[worker.task_id].remove(action.packet.number)

    def run(self) -> None:
        while True:
            while self.step():
                pass
            self.rig.now += 1.5  # what is idle may end
            self.note(self.rig.handle())
            if not (self.rig.killed and set(self.rig.killed) & set(self.rig.workers)):
                return


def nested(depth: int) -> Tree:
    return (nested(depth - 1),) if depth else ()


def any_tree(random: random.Random, depth: int) -> Tree:
    if not depth:
        return ()
    return tuple(any_tree(random, random.randint(0, depth - 1)) for _ in range(random.randint(0, 4)))


def finished(simulation: Simulation) -> collections.Counter[str]:
    return collections.Counter(each.task_id for each in simulation.rig.progress().finished)


@pytest.mark.parametrize("prefetch", [0, 8])
@pytest.mark.parametrize("drivers", [1, 7])
def test_drivers_nested_ten_deep_end_on_two_workers(drivers: int, prefetch: int) -> None:
    simulation = Simulation([nested(10)] * drivers, slots=2, seed=drivers, prefetch=prefetch)
    simulation.run()
    assert finished(simulation) == collections.Counter(map(str, range(drivers)))
    assert simulation.most <= 2 + 10


@pytest.mark.parametrize("prefetch", [0, 64])
def test_many_drivers_of_many_calls_end_within_the_slots_and_one_extra_worker(prefetch: int) -> None:
    simulation = Simulation([((),) * 10] * 100, slots=2, seed=1, prefetch=prefetch)
    simulation.run()
    assert len(finished(simulation)) == 100
    assert simulation.most <= 2 + 1


@pytest.mark.parametrize("submitters", [1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_any_calls_end_within_the_slots_and_their_depth(seed: int, submitters: int) -> None:
    chosen = random.Random(seed)
    depth = chosen.randint(1, 6)
    trees = [any_tree(chosen, depth) for _ in range(chosen.randint(1, 12))]
    slots = chosen.randint(1, 3)
    simulation = Simulation(trees, slots=slots, seed=seed, prefetch=chosen.choice([0, 1, 16]), submitters=submitters)
    simulation.run()
    assert finished(simulation) == collections.Counter(map(str, range(len(trees))))
    assert simulation.most <= slots + depth * submitters
    assert not simulation.rig.core._nested.drivers
