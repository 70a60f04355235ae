"""Graphs in the manager's core: their calls are jobs like others, and each graph has one end."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from farcall_common.environments import Environment
from farcall_common.errors import DeserializationError, ErrorRecord, Fault
from farcall_common.graphs import COLLECT, MAX_STATES, Graph, Input, Stage, pack_graph
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.contracts.agent_manager import (
    CancelTasks,
    Finished,
    Limits,
    ReadOutput,
    Stop,
    TaskOrder,
    WantedOutput,
)
from farcall_endpoint.contracts.manager_worker import Done, InputOrder, Order
from farcall_endpoint.contracts.output import Printed, Stream
from farcall_endpoint.graphs.run import GraphRun
from farcall_endpoint.graphs.tails import OutputTails, joined
from farcall_endpoint.graphs.values import GraphSettings, Memory
from farcall_endpoint.host.shared_memory import MemoryFile, SharedBytes
from farcall_endpoint.manager.core.actions import Action, ReadStreams, Send
from farcall_endpoint.manager.core.events import (
    AgentLost,
    Callees,
    Instant,
    Job,
    LimitExceeded,
    PacketsReceived,
    TasksReceived,
    WorkerDied,
)
from farcall_endpoint.manager.core.graphs import RunningGraph, environments_of, opened
from tests.support.manager import Rig, ready

CHAIN = (Stage(0, "load"), Stage(1, "resize", (Input(0, (0,)),)))
FAN = (Stage(0, "split"), Stage(1, "count", (Input(0, (0,), each=True),)), Stage(0, "merge", (Input(1, (0,)),)))


def graph_job(
    name: str,
    stages: tuple[Stage, ...],
    *,
    submitter: str = "",
    payer: str = "",
    refusals: dict[str, ErrorRecord] | None = None,
    spread: bool = False,
    **options: Any,
) -> Job:
    callees = tuple(Callee(function_id=f"id-{each}", function_hash=f"h{each}") for each in range(2))
    order = TaskOrder(name, 1, "h0", 0, TaskOptions(callees=callees, **options), submitter=submitter, payer=payer)
    graph = Graph(stages, tuple(f"call {number}".encode() for number in range(len(stages))), len(stages) - 1, spread)
    functions = {"h0": b"body 0", "h1": b"body 1"}
    return Job(order, b"body 0", b"", callees=Callees(functions, graph, refusals or {}))


def rig_of(*, slots: int = 1, prefetch: int = 0, **settings: Any) -> Rig:
    # Without batching no call is sent ahead; see test_endpoint_ahead_calls.py.
    rig = Rig(slots=slots, prefetch=prefetch, batching=False, graphs=GraphSettings(node="n1", **settings))
    rig.start_all()
    rig.take()
    return rig


def start(rig: Rig, *stages: Stage, name: str = "g", **options: Any) -> list[Action]:
    return rig.handle(TasksReceived([graph_job(name, stages, **options)]))


def sent(actions: list[Action]) -> list[Order]:
    return [order for action in actions if isinstance(action, Send) for order in action.packet.orders]


def end(
    rig: Rig,
    *values: bytes,
    worker: int = 0,
    error: dict[str, Any] | None = None,
    is_retried: bool = False,
    printed: bytes = b"",
) -> list[Action]:
    """The worker ends what it runs, and the actions that follow."""
    rig.read(worker)
    order, rig.workers[worker].running = rig.workers[worker].running, None
    assert order is not None
    assert order.call is not None
    parts = tuple(map(len, values)) if order.call.is_edge and error is None else ()
    tails = Printed(len(printed), 0, len(printed), 0) if printed else None
    done = Done(order.task_id, 1.0, 1.5, error, printed=tails, is_retried=is_retried, parts=parts)
    return rig.handle(PacketsReceived(worker, [(done, b"".join((*values, printed)))]))


def only(rig: Rig) -> Finished:
    progress, _ = rig.take()
    [finished] = progress.finished
    return finished


def states(finished: Finished) -> list[str]:
    assert finished.details is not None
    return [each["state"] for each in finished.details["stages"]]


def test_a_chain_is_one_task_to_the_agent() -> None:
    rig = rig_of()
    [order] = sent(start(rig, *CHAIN, result_serializers=("o",)))
    assert (order.task_id, order.function_hash, order.payload_bytes) == ("g/0", "h0", 6)
    assert order.call is not None
    assert (order.call.is_edge, order.call.spread, order.call.inputs) == (True, False, ())
    assert order.options == TaskOptions(result_serializers=("o",))
    actions = end(rig, b"image")
    [send] = [action for action in actions if isinstance(action, Send)]
    [order] = send.packet.orders
    assert send.body == (b"body 1", b"call 1", b"image")
    assert order.task_id == "g/1"
    assert order.call is not None
    assert (order.call.is_edge, order.call.inputs) == (False, (InputOrder((0,), (5,)),))
    assert not any(report.progress.finished for report in rig.reports)
    end(rig, b"thumb")
    progress, results = rig.take()
    [finished] = progress.finished
    assert (finished.task_id, finished.state, results) == ("g", TaskState.SUCCESS, [b"thumb"])
    assert (finished.started_at, finished.is_retried) == (999.5, False)  # an instant of the manager
    assert states(finished) == ["done", "done"]
    assert finished.details is not None
    first = finished.details["stages"][0]
    assert (first["name"], first["run_s"], first["value_bytes"], first["workers"]) == ("load", 0.5, 5, (1,))
    assert first["node"] == "n1"
    assert not rig.core._graphs.running


def test_the_calls_of_all_stages_are_counted_of_a_graph_with_more_than_are_told() -> None:
    count = MAX_STATES + 5
    rig = rig_of()
    start(rig, *[Stage(0, f"s{n}", () if n == 0 else (Input(n - 1, (0,)),)) for n in range(count)])
    for _ in range(count):
        rig.now += 0.5
        end(rig, b"v")
    finished = only(rig)
    assert finished.details is not None
    assert len(finished.details["stages"]) == MAX_STATES
    assert (finished.details["stage_calls"], finished.details["stage_run_s"]) == (count, count * 0.5)


def test_a_fan_out_is_known_when_its_elements_are() -> None:
    rig = rig_of(slots=2)
    [order] = sent(start(rig, *FAN))
    assert order.call is not None
    assert order.call.spread
    orders = sent(end(rig, b"a", b"bc"))
    assert [each.task_id for each in orders] == ["g/1.0", "g/1.1"]
    assert [each.call and each.call.inputs for each in orders] == [
        (InputOrder((0,), (1,)),),
        (InputOrder((0,), (2,)),),
    ]
    end(rig, b"1")
    [merge] = sent(end(rig, b"2", worker=1))
    assert merge.call is not None
    assert merge.call.inputs == (InputOrder((0,), (1, 1), is_list=True),)
    end(rig, b"3", worker=0)
    assert states(only(rig)) == ["done", "done", "done"]


@pytest.mark.parametrize("spread", [False, True])
def test_a_chain_stays_on_a_worker_unless_it_is_to_be_spread(spread: bool) -> None:
    rig = rig_of(slots=2)
    stages = (*CHAIN, Stage(0, "save", (Input(1, (0,)),)))
    actions = start(rig, *stages, spread=spread)
    workers: list[int] = []
    for number in range(3):
        [send] = [action for action in actions if isinstance(action, Send)]
        workers.append(send.worker_id)
        rig.now = number + 1.0
        actions = end(rig, b"v", worker=send.worker_id)
    assert workers == ([0, 1, 0] if spread else [0, 0, 0])


def test_calls_of_what_has_begun_come_before_new_tasks() -> None:
    rig = rig_of()
    start(rig, *CHAIN)
    rig.jobs("a", "b")
    assert sent(end(rig, b"v"))[0].task_id == "g/1"


def test_calls_count_as_tasks_of_their_submitter() -> None:
    rig = Rig(slots=2, shared_workers=True)
    rig.start_all()
    wide = (
        *(Stage(0, f"s{number}") for number in range(6)),
        Stage(COLLECT, "c", tuple(Input(n, (n,)) for n in range(6))),
    )
    rig.handle(TasksReceived([graph_job("g", wide, submitter="ann")]))
    rig.handle(TasksReceived([Job(TaskOrder("t", 1, "h", 0, submitter="bob"), b"body", b"p")]))
    assert sent(end(rig, b"v"))[0].task_id == "t"


def test_a_call_whose_worker_died_is_made_again_and_the_others_stay() -> None:
    rig = rig_of()
    start(rig, *CHAIN)
    end(rig, b"v")
    rig.read()
    rig.now += 3.0
    rig.die(0, reason="killed by SIGKILL")
    [order] = sent(rig.handle(ready(1)))
    assert (order.task_id, order.attempt) == ("g/1", 2)
    end(rig, b"w", worker=1)
    progress, _ = rig.take()
    assert not progress.died
    [finished] = progress.finished
    assert finished.state is TaskState.SUCCESS
    assert finished.details is not None
    stage = finished.details["stages"][1]
    assert stage["retries"] == 1
    assert stage["run_s"] == pytest.approx(3.5)  # 3 s of the worker that died


def test_a_graph_fails_with_the_error_of_its_call_and_leaves_small_values() -> None:
    rig = rig_of()
    start(rig, *CHAIN)
    end(rig, b"v")
    end(rig, error={"code": "TASK_FAILED", "message": "ValueError: no", "traceback": "line 1"})
    finished = only(rig)
    assert finished.state is TaskState.FAILED
    assert finished.error == {
        "code": "TASK_FAILED",
        "message": "stage 1 (resize): ValueError: no",
        "traceback": "line 1",
    }
    assert states(finished) == ["done", "failed"]
    assert finished.details is not None
    assert finished.details["values"] == {"0": base64.b64encode(b"v").decode()}


def test_what_a_call_raised_is_the_result_for_an_engine() -> None:
    rig = rig_of()
    start(rig, *CHAIN)
    rig.read()
    rig.workers[0].running = None
    done = Done("g/0", 1.0, 1.5, {"message": "no"}, printed=Printed(3, 0, 3, 0))
    rig.handle(PacketsReceived(0, [(done, b"pickledout")]))
    progress, results = rig.take()
    [finished] = progress.finished
    assert (finished.state, finished.result, results[0]) == (TaskState.FAILED, 0, b"pickled")


def test_a_call_that_may_not_run_twice_ends_its_graph() -> None:
    rig = rig_of()
    start(rig, Stage(0, "pay", options=TaskOptions(idempotent=False)))
    rig.read()
    rig.die(0)
    finished = only(rig)
    assert (finished.state, finished.error and finished.error["code"]) == (TaskState.FAILED, "WORKER_DIED")
    rig.handle(ready(1))
    assert not rig.workers[1].ahead


def test_a_raised_call_is_retried_after_its_delay() -> None:
    rig = rig_of()
    start(rig, *CHAIN, retries=1, retry_delay_s=8.0)
    end(rig, error={"message": "no"}, is_retried=True)
    assert not rig.workers[0].ahead
    assert rig.core.next_deadline() <= 8.0
    rig.now = 8.0
    [order] = sent(rig.handle())
    assert (order.task_id, order.retry) == ("g/0", 1)
    end(rig, error={"message": "no"}, is_retried=True)
    finished = only(rig)
    assert finished.error == {"message": "stage 0 (load): no", "retries_used": 1}
    assert not finished.is_retried, "the agent does not run the whole graph again"


@pytest.mark.parametrize("calls_ended", [0, 1])
def test_a_cancelled_graph_stops_its_calls(calls_ended: int) -> None:
    rig = rig_of(slots=2)
    start(rig, *FAN)
    if calls_ended:
        end(rig, *[b"v"] * 20)
    rig.read(0)
    rig.handle(CancelTasks(("g",)))
    assert only(rig).state is TaskState.CANCELLED
    assert 0 in rig.killed
    assert not len(rig.core._queue)
    for worker_id in list(rig.workers):
        rig.die(worker_id)
    assert not rig.progress().finished


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize("max_calls", [1, 2])
def test_calls_of_all_graphs_of_a_payer_stay_within_its_limit(max_calls: int, spread: bool) -> None:
    rig = Rig(slots=8, batching=False, shared_workers=True)
    rig.start_all()
    for name in ("g", "h"):
        start(rig, *FAN, name=name, submitter=f"robot-{name}", payer="ann", max_calls=max_calls, spread=spread)
    seen, finished = set[str](), 0
    while finished < 2:
        busy = {number: each.ahead[0] for number, each in rig.workers.items() if each.ahead}
        assert 1 <= len(busy) <= max_calls
        worker, call = next(iter(busy.items()))
        seen.add(call)
        end(rig, *([b"a", b"b", b"c", b"d"] if call.endswith("/0") else [b"v"]), worker=worker)
        finished += len(rig.progress().finished)
    assert {f"g/1.{number}" for number in range(4)} < seen


def test_a_call_that_is_retried_or_whose_worker_died_keeps_its_place_within_the_limit() -> None:
    rig = rig_of(slots=4)
    start(rig, *FAN, max_calls=1, retries=3, retry_delay_s=0, max_attempts=9)
    end(rig, b"a", b"b")
    rig.read(0)
    rig.die(0)
    rig.handle()
    rig.handle(*map(ready, list(rig.workers)))
    error: dict[str, Any] | None = ErrorRecord("TASK_FAILED", "").to_json()
    for _ in range(100):
        busy = [number for number, each in rig.workers.items() if each.ahead]
        assert len(busy) <= 1
        if not busy:
            rig.now += 1.0
            rig.handle()
            continue
        call = rig.workers[busy[0]].ahead[0]
        if error is None:
            end(rig, b"v", worker=busy[0])
        else:
            end(rig, worker=busy[0], error=error, is_retried=True)
        error = None
        if call == "g/2":
            break
    assert states(only(rig)) == ["done", "done", "done"]


def test_what_a_fan_in_does_not_need_is_stopped() -> None:
    rig = rig_of(slots=3)
    needs_two = (*FAN[:2], Stage(0, "merge", (Input(1, (0,)),), 2))
    start(rig, *needs_two)
    end(rig, b"a", b"b", b"c")
    for worker_id in range(3):
        rig.read(worker_id)
    end(rig, b"1", worker=0)
    orders = sent(end(rig, b"2", worker=1))
    assert rig.killed == [2]
    assert [each.task_id for each in orders] == ["g/2"]


def test_a_graph_has_a_walltime_and_its_stages_have_their_own() -> None:
    rig = rig_of()
    start(rig, Stage(0, "a", options=TaskOptions(walltime_s=5.0)), *CHAIN[1:], walltime_s=20.0)
    [order] = rig.workers[0].packets[0].orders  # type: ignore[union-attr]
    assert order.options.walltime_s == 5.0
    rig.read()
    rig.now = 0.1
    rig.handle()
    assert rig.core.next_deadline() <= rig.now
    rig.handle()
    assert [started.task_id for started in rig.progress().started] == ["g"]
    rig.now = 4.0
    rig.clock_is_set = lambda: 0.0
    [order] = sent(_end_at(rig, b"v", started_at=1000.0, ended_at=1004.0))
    assert order.options.walltime_s is None
    rig.read()
    assert rig.core.next_deadline() <= 20.0
    rig.now = 20.0
    rig.handle()
    finished = only(rig)
    assert (finished.state, finished.error and finished.error["code"]) == (TaskState.FAILED, "WALLTIME_EXCEEDED")
    assert "was stopped, in stage 1 (resize)." in (finished.error or {})["message"]
    assert rig.killed == [0]


def test_a_walltime_names_the_first_stage_that_ran_and_counts_the_others() -> None:
    rig = rig_of(slots=3)
    copies = [Stage(0, name) for name in ("a", "b", "c")]
    start(rig, *copies, Stage(1, "d", tuple(Input(number, (number,)) for number in range(3))), walltime_s=1.0)
    for worker in range(3):
        rig.read(worker)
    rig.now = 0.1
    rig.handle()
    rig.now = 2.0
    rig.handle()
    assert "was stopped, in stage 0 (a) and 2 more stages." in (only(rig).error or {})["message"]


def _end_at(rig: Rig, value: bytes, *, started_at: float, ended_at: float) -> list[Action]:
    order, rig.workers[0].running = rig.workers[0].running, None
    assert order is not None
    done = Done(order.task_id, started_at, ended_at, parts=(len(value),))
    return rig.handle(PacketsReceived(0, [(done, value)]))


def test_a_limit_that_a_call_exceeds_is_that_of_the_call() -> None:
    rig = rig_of()
    start(rig, *CHAIN, memory_bytes=1000)
    rig.read()
    [(worker_id, order, _)] = rig.core.limited()
    assert order is not None
    assert (worker_id, order.task_id) == (0, "g/0")
    rig.handle(LimitExceeded(0, "g/0", ErrorRecord("MEMORY_EXCEEDED", "too much", "", Fault.USER_CODE)))
    rig.die(0)
    assert only(rig).error is not None


def test_a_graph_whose_calls_wait_is_reported_once() -> None:
    rig = rig_of()
    start(rig, Stage(0), name="busy")
    start(rig, Stage(0, "load"), name="waits")
    for _ in range(3):
        rig.now += 1.0
        rig.handle()
    found = [each for report in rig.reports for each in report.progress.graphs if each.task_id == "waits"]
    assert [[(each.name, each.state) for each in graph.stages] for graph in found] == [[("load", "waiting")]]


def test_progress_is_reported_from_time_to_time() -> None:
    rig = rig_of()
    start(rig, *CHAIN)
    end(rig, b"v")
    rig.now = 0.1
    rig.handle()
    assert not [each for report in rig.reports for each in report.progress.graphs]
    rig.now = 0.3
    rig.handle()
    [graph] = [each for report in rig.reports for each in report.progress.graphs]
    assert graph.task_id == "g"
    assert [each.state for each in graph.stages] == ["done", "running"]
    assert graph.stages[1].started_at == 1000.0
    rig.now = 0.6
    rig.handle()
    rig.reports.clear()
    rig.now = 0.9
    rig.handle()
    assert not [each for report in rig.reports for each in report.progress.graphs]


def test_output_of_a_graph_is_that_of_its_calls() -> None:
    rig = rig_of()
    start(rig, *CHAIN)
    end(rig, b"v", printed=b"one\n")
    [read] = [
        each for each in rig.handle(ReadOutput("r", (WantedOutput("g", 1, 4, 0),), 10)) if isinstance(each, ReadStreams)
    ]
    [graph] = read.graphs
    output = graph.known
    assert (output.stdout, output.stdout_at, output.is_running) == (b"stage load", 4, True)
    assert (graph.worker_id, graph.stdout_base) == (0, 58), "the second call, which runs"
    rig.read()
    end(rig, b"w", printed=b"two")
    progress, results = rig.take()
    [finished] = progress.finished
    assert finished.output is not None
    stderr = b"--- stage resize, attempt 1\n"
    assert results[finished.output] == b"--- stage load, attempt 1\none\n--- stage resize, attempt 1\ntwo" + stderr
    assert finished.printed == Printed(61, 28, 61, 28)


def test_what_a_running_call_prints_is_behind_what_others_have_printed() -> None:
    tails = OutputTails(100)
    tails.end("a", "A", Printed(2, 0, 2, 0), b"a\n")
    tails.begin("b", "B")
    known, _ = tails.streams()
    assert known == Stream(0, b"--- A\na\n--- B\n")
    assert joined(known, Stream(0, b"b"), tails.ends[0], most_bytes=100).data == known.data + b"b"
    assert joined(Stream(14, b""), Stream(3, b"x"), 14, most_bytes=100) == Stream(17, b"x")
    tails.end("c", "C", Printed(1, 0, 1, 0), b"c")
    assert tails.streams()[0] == known, "bytes that were read stay where they were"
    tails.end("b", "B", Printed(2, 0, 5, 0), b"2\n")
    assert tails.streams(5)[0] == Stream(17, b"2\n--- C\nc")
    tails.begin("d", "D")
    tails.end("e", "E", Printed(1, 0, 1, 0), b"e")
    printed = tails.printed()
    assert printed is not None
    assert printed[1].endswith(b"--- D\n--- E\ne--- B\n--- D\n")


@pytest.mark.parametrize("keep_output", [True, False])
def test_output_of_a_graph_is_in_its_record_if_that_is_asked_for(keep_output: bool) -> None:
    rig = rig_of()
    start(rig, *CHAIN, keep_output=keep_output)
    end(rig, b"v", printed=b"x" * 5000)
    end(rig, b"w", printed=b"last")
    [finished] = rig.take()[0].finished
    assert finished.details is not None
    tail = finished.details.get("stdout_tail", "")
    assert len(tail) == (4096 if keep_output else 0)
    assert tail.endswith("x\n--- stage resize, attempt 1\nlast") is keep_output
    assert "stderr_tail" not in finished.details or keep_output


def test_output_of_a_graph_is_bounded() -> None:
    rig = rig_of()
    start(rig, *CHAIN, output_bytes=8)
    end(rig, b"v", printed=b"one\n")
    end(rig, b"w", printed=b"two\n")
    progress, results = rig.take()
    [finished] = progress.finished
    assert finished.output is not None
    assert results[finished.output] == b"t 1\ntwo\n"
    assert finished.printed == Printed(8, 0, 62, 0)


def test_a_value_that_a_worker_cannot_have_sent() -> None:
    for parts, body in [((2,), b"v"), ((1, 1), b"vv"), ((-1, 2), b"v"), ((), b"v")]:
        rig = rig_of()
        start(rig, *CHAIN)
        rig.read()
        rig.handle(PacketsReceived(0, [(Done("g/0", 1.0, 1.5, parts=parts), body)]))
        assert rig.killed == [0], (parts, body)
    rig = rig_of()
    start(rig, CHAIN[0])
    rig.read()
    rig.handle(PacketsReceived(0, [(Done("g/0", 1.0, 1.5, parts=(1,)), b"v")]))
    assert rig.killed == [0]


def test_tails_in_a_file_that_has_shrunk_end_the_worker_and_not_the_manager() -> None:
    rig = rig_of()
    start(rig, *CHAIN)
    rig.read()
    body = SharedBytes(MemoryFile.on_disk([b"v"], "/tmp"), 0, 5)
    rig.handle(PacketsReceived(0, [(Done("g/0", 1.0, 1.5, printed=Printed(4, 0, 4, 0), parts=(1,)), body)]))
    assert rig.killed == [0]


def test_values_have_a_budget() -> None:
    rig = rig_of(memory_bytes=1 << 20, disk_bytes=1 << 20)
    [order] = sent(start(rig, *CHAIN))
    assert order.call is not None
    assert (order.call.room_bytes, order.call.most_bytes) == (3 << 18, 1 << 20)
    start(rig, *CHAIN, name="other")
    file = MemoryFile.on_disk([bytes(1 << 20)], "/tmp")
    rig.read()
    rig.workers[0].running = None
    value = SharedBytes(file, 0, 1 << 20)
    [order, *_] = sent(rig.handle(PacketsReceived(0, [(Done("g/0", 1.0, 1.5, parts=(1 << 20,)), value)])))
    assert rig.core._graphs.memory.used_disk_bytes == 1 << 20
    rig.read()
    rig.die(0)
    orders = sent(rig.handle(ready(1)))
    assert orders[0].task_id == "g/1"
    end(rig, b"w", worker=1)
    assert rig.core._graphs.memory.used_disk_bytes == 0


def test_a_value_for_which_there_is_no_room_any_more_is_an_error() -> None:
    rig = rig_of(slots=2, memory_bytes=1 << 20, disk_bytes=1 << 20)
    both = (Stage(0, "a"), Stage(0, "b"), Stage(0, "c", (Input(0, (0,)), Input(1, (1,)))))
    start(rig, *both)
    for worker_id in range(2):
        rig.read(worker_id)
        value = SharedBytes(MemoryFile.on_disk([bytes(1 << 20)], "/tmp"), 0, 1 << 20)
        rig.handle(PacketsReceived(worker_id, [(Done(f"g/{worker_id}", 1.0, 1.5, parts=(1 << 20,)), value)]))
    finished = only(rig)
    assert finished.error is not None
    assert finished.error["code"] == "VALUE_TOO_LARGE"
    assert finished.error["message"].startswith("stage 1 (b): ")
    assert rig.core._graphs.memory.used_disk_bytes == 0


def test_large_values_are_read_when_there_are_too_many_files() -> None:
    rig = rig_of(files=1)
    both = (Stage(0, "a"), Stage(0, "b"), Stage(0, "c", (Input(0, (0,)), Input(1, (1,)))))
    start(rig, *both)
    for number in range(2):
        rig.read()
        rig.workers[0].running = None
        value = SharedBytes(MemoryFile.of([b"v" * 100_000]), 0, 100_000)
        actions = rig.handle(PacketsReceived(0, [(Done(f"g/{number}", 1.0, 1.5, parts=(100_000,)), value)]))
    [send] = [action for action in actions if isinstance(action, Send)]
    first, second = send.body[-2:]
    assert isinstance(first, SharedBytes)
    assert second == b"v" * 100_000


def test_no_submitter_takes_all_room_from_the_next_one() -> None:
    whole = Memory(GraphSettings(memory_bytes=1 << 20, disk_bytes=64 << 20, files=8), writers=1)
    parts = [whole.part() for _ in range(3)]
    values: list[SharedBytes] = []
    for part in parts:
        while (size := part.most_bytes) > 1 << 20 and part.has_files:
            values.append(SharedBytes(MemoryFile.of([b"v"]), 0, size))
            part.add([values[-1]], on_disk=True)
        assert part.used_disk_bytes > 4 << 20
    assert whole.most_bytes > 4 << 20
    assert parts[0].used_disk_bytes <= 32 << 20
    assert whole.has_files


def test_submitters_have_their_own_parts_of_the_budget() -> None:
    rig = Rig(
        slots=2, batching=False, shared_workers=True, graphs=GraphSettings(memory_bytes=1 << 20, disk_bytes=1 << 20)
    )
    rig.start_all()
    [order] = sent(rig.handle(TasksReceived([graph_job("g", CHAIN, submitter="ann")])))
    assert order.call is not None
    assert order.call.most_bytes == 1 << 19
    end(rig, b"v")
    assert rig.core._graphs.memory.used_bytes == 1
    end(rig, b"w")
    assert rig.core._graphs.memory.used_bytes == 0


def test_service_accounts_of_one_payer_have_one_part_of_the_budget() -> None:
    rig = Rig(slots=3, batching=False, graphs=GraphSettings(memory_bytes=1 << 20, disk_bytes=1 << 20))
    rig.start_all()
    rig.handle(TasksReceived([graph_job("g", CHAIN, submitter="robot-1", payer="ann")]))
    rig.handle(TasksReceived([graph_job("h", CHAIN, submitter="robot-2", payer="ann")]))
    rig.handle(TasksReceived([graph_job("i", CHAIN, submitter="bob")]))
    parts = [rig.core._graphs.running[name].run.memory for name in ("g", "h", "i")]
    assert parts[0] is parts[1]
    assert parts[0] is not parts[2]


def test_small_values_go_to_the_disk_when_the_memory_is_used_up() -> None:
    memory = Memory(GraphSettings(memory_bytes=100_000, disk_bytes=10), writers=2)
    assert memory.room_bytes == 65_536
    memory.add([bytes(100_000)])
    assert (memory.room_bytes, memory.most_bytes) == (0, 10)


def test_an_environment_of_a_stage_that_its_submitter_may_not_use() -> None:
    environment = SCI
    stage = Stage(0, "a", options=TaskOptions(environment=environment))
    rig = rig_of()
    record = ErrorRecord("CONTAINER_UNSUPPORTED", "not here", "", Fault.CALLER)
    start(rig, stage, refusals={environment.key: record})
    finished = only(rig)
    assert finished.error is not None
    assert finished.error["message"] == "stage 0 (a): not here"


SCI = Environment.of({"type": "uv", "requirements": ("numpy",)})
ML = Environment.of({"type": "uv", "requirements": ("torch",)})


@pytest.mark.parametrize("own", [None, TaskOptions(memory_bytes=100)])
def test_a_call_runs_in_the_environment_of_its_function(own: TaskOptions | None) -> None:
    job = graph_job("g", (Stage(0, "a", options=own), Stage(1, "b", options=own)), environment=SCI)
    callees = (job.order.options.callees[0], msgspec.structs.replace(job.order.options.callees[1], environment=ML))
    options = msgspec.structs.replace(job.order.options, callees=callees)
    job = msgspec.structs.replace(job, order=msgspec.structs.replace(job.order, options=options))
    assert list(environments_of(job)) == [ML], "that of the task is not needed"
    found = {each: run_of(job).job_of((each, 0)).order.options for each in range(2)}
    assert (found[0].environment, found[0].container) == (None, None)
    assert (found[1].environment, found[1].container) == (ML, ML.reference)
    image = Limits(in_image=True).applied_to(options)
    assert all(each.environment is None for each in image.callees), "the node itself is the container"


def test_values_are_collected_in_the_environment_that_they_come_from() -> None:
    own = TaskOptions(environment=ML)
    stages = (Stage(0, "a", options=own), Stage(COLLECT, "", (Input(0, (0,)), Input(0, (1,)))))
    running = run_of(graph_job("g", stages, environment=SCI))
    running.run.succeeded((0, 0), [b"v"])
    assert running.job_of((1, 0)).order.options.environment == ML


def run_of(job: Job) -> RunningGraph:
    """A graph of which the first calls were made."""
    callees, order, memory = job.callees, job.order, Memory(GraphSettings(), writers=1)
    assert callees is not None
    assert callees.graph is not None
    run = GraphRun(callees.graph, options=order.options, memory=memory, jitter=lambda: 0.0)
    run.start()
    return RunningGraph(job, run, callees, Instant(0.0, 0.0), touched={})


def test_a_graph_that_has_begun_may_end_while_its_manager_stops() -> None:
    rig = rig_of(slots=2)
    start(rig, *CHAIN)
    rig.read()
    rig.handle(Stop(5.0))
    start(rig, *CHAIN, name="late")
    assert [order.task_id for order in sent(end(rig, b"v"))] == ["g/1"]
    assert not rig.killed
    reader = next(number for number, worker in rig.workers.items() if worker.ahead)
    rig.die(reader)  # before it has begun: another worker makes the call
    other = next(number for number, worker in rig.workers.items() if worker.ahead)
    end(rig, b"w", worker=other)
    [finished] = rig.progress().finished
    assert (finished.task_id, finished.state) == ("g", TaskState.SUCCESS)
    assert other in rig.killed
    for worker_id in list(rig.workers):
        rig.die(worker_id)
    assert rig.leaves


def test_a_manager_that_stops_does_not_wait_for_graphs_that_have_not_begun() -> None:
    rig = rig_of()
    rig.jobs("plain")
    rig.read()
    start(rig, *CHAIN)
    rig.handle(Stop(5.0))
    rig.done(0)
    assert rig.killed == [0]
    rig.die(0)
    assert [each.task_id for each in rig.progress().finished] == ["plain"]
    assert rig.leaves


def test_a_manager_that_stops_has_no_end_of_a_graph_that_takes_too_long() -> None:
    rig = rig_of()
    start(rig, *CHAIN)
    rig.read()
    rig.handle(Stop(5.0))
    end(rig, b"v")
    rig.read()
    assert rig.core.next_deadline() <= rig.now + 5.0
    rig.now += 5.0
    rig.handle()
    assert rig.killed == [0]
    rig.die(0)
    assert not rig.progress().finished
    assert rig.leaves


def test_a_lost_agent_ends_graphs_too() -> None:
    rig = rig_of()
    start(rig, *CHAIN)
    rig.read()
    rig.handle(AgentLost())
    assert rig.killed == [0]
    rig.handle(WorkerDied(0, 0, "killed"))
    assert rig.core.is_over


def test_a_graph_is_opened_where_it_runs() -> None:
    options = TaskOptions(callees=(Callee(function_id="id", function_hash="h"),), memory_bytes=100)
    limited = Stage(0, "a", options=TaskOptions(memory_bytes=1000))
    graph = opened(pack_graph(Graph((limited, Stage(0, "b")), (b"", b""), 0)), options, memory_bytes=500)
    assert graph is not None
    assert graph.stages[0].options == TaskOptions(memory_bytes=500)
    assert opened(b"00\nabc", options, memory_bytes=500) is None
    assert opened(b"", options, memory_bytes=500) is None
    with pytest.raises(DeserializationError):
        opened(pack_graph(Graph((Stage(1, "a"),), (b"",), 0)), options, memory_bytes=None)
