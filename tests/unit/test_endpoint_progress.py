"""Progress of running tasks on its way through an endpoint: from the function to the report to the cloud."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from farcall_common import running, wire
from farcall_common.errors import ConfigurationError
from farcall_common.event_log import UserBytes
from farcall_common.running import RunningTask
from farcall_common.sealing import Answer, open_answer
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.running_graphs import MOST_PROGRESS, MOST_REPORTED
from farcall_endpoint.agent.core.tasks import OpenedCall, Task
from farcall_endpoint.agent.shell.sealing import seal_result
from farcall_endpoint.app.status import lines
from farcall_endpoint.contracts.agent_manager import Died, Finished, Progress, ReportedProgress, TaskOrder
from farcall_endpoint.contracts.manager_worker import Channel, Order, Progressed, channel_pair
from farcall_endpoint.manager.core.events import Job, PacketsReceived, TasksReceived, WorkerDied
from farcall_endpoint.worker.current_task import MOST_PACKETS, CurrentTask
from tests.support.agent import CoreDriver, Turn
from tests.support.manager import Rig, done
from tests.unit.test_endpoint_agent_graphs import make_core
from tests.unit.test_endpoint_nested_calls import calls as made_calls

KEY = bytes(32)
BODY = b"f"
FUNCTION = wire.FunctionSpec(function_hash=hashlib.sha256(BODY).hexdigest(), name="f", body=0)


# -- in the worker -----------------------------------------------------------------------------------------------------


class Function:
    """A running task, a clock, and the manager's end of the channel."""

    def __init__(self) -> None:
        self.now = 50.0
        self.channel, end, claims = channel_pair()
        self.worker_channel = Channel(end, claims)
        order = Order("t", 2, "h", 0)
        self.current = CurrentTask(self.worker_channel, order, self._no_calls, self._no_calls, clock=lambda: self.now)
        self.task = RunningTask(self.current)

    def _no_calls(self) -> Any:
        raise AssertionError("progress makes no calls, and needs no directories")

    def sent(self) -> list[tuple[Any, ...]]:
        """What the manager has received since the last time."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while (received := self.channel.receive()) is not None:
                packet = received[0]
                assert isinstance(packet, Progressed)
                assert packet.task_id == "t"
                found.append((packet.done, packet.total, packet.text))
        return found


@pytest.fixture
def function() -> Iterator[Function]:
    made = Function()
    yield made
    made.worker_channel.close()
    made.channel.close()


def test_an_inner_loop_sends_five_packets_a_second_and_the_last(function: Function) -> None:
    sent = []
    for number in range(100_001):
        function.now = 50.0 + number / 10_000
        function.task.progress(number)
        if number % 1000 == 0:
            sent += function.sent()
    assert 45 <= len(sent) <= 55
    assert sent[0] == (0, None, "")
    function.task.progress(7, 8, "end")
    function.task.progress(7.5, 8, "end")
    function.current.end()
    assert function.sent()[-1] == (7.5, 8, "end")


def test_news_is_sent_at_once_ten_times_a_second_at_most(function: Function) -> None:
    function.task.progress(1, 3, "loaded")
    function.task.progress(2, 3, "fitting")
    assert function.sent() == [(1, 3, "loaded"), (2, 3, "fitting")]
    function.task.progress(3, 3, "fitting")
    assert function.sent() == [(3, 3, "fitting")]
    for number in range(1000):
        function.now += 0.001
        function.task.progress(number, 10**6, f"step {number}")
    assert MOST_PACKETS - 3 <= len(function.sent()) <= MOST_PACKETS + 1
    function.current.end()
    assert function.sent() == [(999, 10**6, "step 999")]


def test_nothing_is_sent_twice(function: Function) -> None:
    function.task.progress(1)
    function.current.end()
    assert function.sent() == [(1, None, "")]


class Odd(str):
    """A text that cannot be compared or cut."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    def __getitem__(self, key: Any) -> str:
        raise AssertionError


def test_numbers_of_other_types_are_converted_and_what_is_none_is_refused(function: Function) -> None:
    numpy = pytest.importorskip("numpy")
    function.task.progress(numpy.int64(3), numpy.float32(0.5), "a\nb")
    function.task.progress(True, numpy.float64(2.5), Odd("odd"))
    assert function.sent() == [(3, 0.5, "a b"), (1, 2.5, "odd")]
    for wrong in ("3", None, b"3", object(), 1j):
        with pytest.raises(TypeError, match=f"expected a number, got {type(wrong).__name__}"):
            function.task.progress(wrong)  # type: ignore[arg-type]
    for wrong_number in (math.nan, math.inf, Fraction(10**400), Decimal("nan")):
        with pytest.raises(ValueError, match="finite"):
            function.task.progress(1, wrong_number)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="text is a str, not int"):
        function.task.progress(1, 2, 3)  # type: ignore[arg-type]
    function.task.progress(10**400, text="huge")  # no float: it is dropped
    function.task.progress(2**70, text="large")
    assert function.sent() == [(2.0**70, None, "large")]


def test_what_a_task_left_running_cannot_report(function: Function) -> None:
    function.task.progress(1)
    function.current.end()
    with pytest.raises(ConfigurationError, match="has ended"):
        function.task.progress(2)
    assert function.sent() == [(1, None, "")]


def test_a_manager_that_is_gone_does_not_disturb_the_function(function: Function) -> None:
    function.channel.close()
    function.task.progress(1)
    function.current.end()


def test_a_forked_child_is_not_the_task(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ConfigurationError, match="in the process of the task only"):
        function.task.progress(1)


def test_the_task_is_found_once_and_forgotten(function: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_find", None)
    monkeypatch.setattr(running, "_current", None)
    running.remember(function.task)
    assert running.current() is function.task
    running.forget()
    with pytest.raises(ConfigurationError, match="no task runs here"):
        running.current()


# -- in the manager ----------------------------------------------------------------------------------------------------


def said(rig: Rig, task_id: str, done: float = 1, total: float | None = None, text: str = "", worker: int = 0) -> None:
    rig.handle(PacketsReceived(worker, [(Progressed(task_id, done, total, text), b"")]))


def reported(rig: Rig) -> list[ReportedProgress]:
    """The progress in the reports since the last time."""
    found = [each for report in rig.reports for each in report.progress.progress]
    rig.reports.clear()
    return found


def details_of(rig: Rig) -> list[dict[str, Any] | None]:
    return [finished.details for report in rig.reports for finished in report.progress.finished]


def running_task(*names: str, slots: int = 1) -> Rig:
    rig = Rig(slots=slots)
    rig.start_all()
    rig.jobs(*names)
    for worker in range(len(names)):
        rig.read(worker)
    rig.reports.clear()
    return rig


def test_a_manager_reports_a_task_at_most_once_a_second_and_the_last_progress() -> None:
    rig = running_task("a")
    said(rig, "a", 1, 10, "loading")
    assert reported(rig) == [ReportedProgress("a", 1, 10, "loading", 1000.0)]
    for number in range(2, 9):
        rig.now += 0.1
        said(rig, "a", number, 10)
    assert reported(rig) == []
    assert rig.core.next_deadline() == 1.0
    rig.now = 1.0
    rig.handle()
    assert reported(rig) == [ReportedProgress("a", 8, 10, "", 1000.0 + 0.1 * 7)]
    rig.now = 1.5
    said(rig, "a", 10, 10)
    rig.done()
    assert details_of(rig) == [{"progress": {"done": 10, "total": 10, "at": 1001.5}}]
    assert reported(rig) == []
    assert rig.core.next_deadline() > 1.5


def test_a_task_that_says_nothing_has_no_field() -> None:
    rig = running_task("a")
    rig.done()
    assert details_of(rig) == [None]
    assert all(report.progress.progress == () for report in rig.reports)


def test_a_task_cannot_report_for_another_one_and_no_nonsense() -> None:
    rig = running_task("a", "b", slots=2)
    running_there = {worker: rig.read(worker) for worker in (0, 1)}
    said(rig, running_there[1], worker=0)
    said(rig, "other", worker=0)
    said(rig, running_there[0], math.nan)
    assert reported(rig) == []
    said(rig, running_there[0], 1, math.inf, "x\x1b[2J" + "y" * 500)
    [found] = reported(rig)
    assert (found.task_id, found.total, len(found.text)) == (running_there[0], None, 200)
    assert "\x1b" not in found.text
    assert rig.killed == []


def test_of_calls_nothing_is_reported() -> None:
    rig = running_task("d", slots=2)
    rig.handle(PacketsReceived(0, [made_calls("d", range(1))]))
    assert rig.read(1) == "d/0"
    said(rig, "d/0", worker=1)
    assert reported(rig) == []
    said(rig, "d")
    assert [each.task_id for each in reported(rig)] == ["d"]


def test_a_death_and_a_failure_end_it() -> None:
    rig = running_task("a")
    said(rig, "a", 3)
    rig.handle(WorkerDied(0, 0, "killed"))
    [died] = [died for report in rig.reports for died in report.progress.died]
    assert died.task_id == "a"
    assert not rig.core._reports.task_progress.last
    assert rig.core.next_deadline() > rig.now
    rig = Rig()
    rig.start_all()
    rig.handle(TasksReceived([Job(TaskOrder("a", 1, "h", 0, TaskOptions()), b"body", b"payload")]))
    rig.read()
    said(rig, "a", 3)
    packets = done(0, "a")
    error = {"code": "TASK_FAILED", "message": "no"}
    failed = [(msgspec.structs.replace(packet, error=error), b"") for packet, _ in packets.packets]
    rig.handle(PacketsReceived(0, failed))
    assert [details and details["progress"]["done"] for details in details_of(rig)] == [3]


def test_what_a_task_said_last_is_reported_with_its_death() -> None:
    rig = running_task("a")
    said(rig, "a", 1, 10, "loading")
    said(rig, "a", 2, 10, "parsing")
    assert [each.done for each in reported(rig)] == [1]
    rig.handle(WorkerDied(0, 0, "killed"))
    [report] = [report for report in rig.reports if report.progress.died]
    assert report.progress.progress == (ReportedProgress("a", 2, 10, "parsing", 1000.0),)
    rig.reports.clear()
    rig.now = 5.0
    rig.handle()
    assert reported(rig) == []


# -- in the agent ------------------------------------------------------------------------------------------------------


def agent(**settings: Any) -> CoreDriver:
    core = make_core(**settings)
    core.manager_registered("m", slots=4)
    core.progress("m", Progress(workers=4))
    core.opened()
    core.decide(now=0.0)
    return core


def spec(task_id: str, **options: Any) -> wire.TaskSpec:
    return wire.TaskSpec(
        task_id=task_id,
        attempt=1,
        function_id="f",
        function_hash=FUNCTION.function_hash,
        options=TaskOptions(**options),
        payload=1,
    )


def send(core: CoreDriver, *tasks: wire.TaskSpec) -> Turn:
    core.run_tasks(wire.RunTasks(tasks=tasks, functions=(FUNCTION,)), [BODY, b"payload"])
    return core.decide(now=0.0)


def heard(core: CoreDriver, *found: ReportedProgress, now: float, manager: str = "m") -> list[dict[str, Any]]:
    core.progress(manager, Progress(workers=4, progress=found))
    core.decide(now=now)
    rows: list[dict[str, Any]] = core.core.report().detail.get("progress", [])
    return rows


def ended(turn: Turn) -> Task:
    [task] = turn.finished
    assert task.result is not None
    return task


A: Any = ReportedProgress("a", 3, 10, "fitting", 1.0)
B: Any = ReportedProgress("b", 0.5, None, "", 1.5)


def test_progress_is_reported_at_most_each_second_until_the_task_ends() -> None:
    core = agent()
    send(core, spec("a"), spec("b"))
    assert heard(core, now=0.5) == []
    assert heard(core, A, now=1.0) == [{"task_id": "a", "done": 3, "total": 10, "text": "fitting", "at": 1.0}]
    assert len(heard(core, B, now=1.9)) == 1
    assert heard(core, now=2.0)[1] == {"task_id": "b", "done": 0.5, "at": 1.5}
    core.progress("m", Progress(workers=4, finished=(Finished("a", TaskState.SUCCESS, 0),)), [b"r"])
    turn = core.decide(now=2.1)
    assert [row["task_id"] for row in core.core.report().detail["progress"]] == ["b"]
    details = ended(turn).result.details  # type: ignore[union-attr]
    assert details == {"progress": {"done": 3, "total": 10, "text": "fitting", "at": 1.0}}
    core.manager_lost("m", "gone")
    core.decide(now=2.2)
    assert "progress" not in core.core.report().detail


def test_the_manager_s_last_progress_counts_and_a_lost_task_keeps_what_is_known() -> None:
    core = agent()
    send(core, spec("a", idempotent=False))
    heard(core, A, now=1.0)
    last = {"progress": {"done": 10, "at": 9.0}}
    core.progress("m", Progress(workers=4, finished=(Finished("a", TaskState.SUCCESS, 0, details=last),)), [b"r"])
    assert ended(core.decide(now=2.0)).result.details == last  # type: ignore[union-attr]
    send(core, spec("b", idempotent=False))
    heard(core, B, now=3.0)
    core.progress("m", Progress(workers=4, died=(Died("b", "killed"),)))
    lost = ended(core.decide(now=4.0)).result
    assert lost is not None
    assert lost.details == {"progress": {"done": 0.5, "at": 1.5}}


def test_a_crash_keeps_what_its_manager_reports_with_it() -> None:
    core = agent()
    send(core, spec("a", idempotent=False))
    heard(core, A, now=1.0)
    last = ReportedProgress("a", 4, 10, "", 1.5)
    core.progress("m", Progress(workers=4, progress=(last,), died=(Died("a", "killed"),)))
    lost = ended(core.decide(now=2.0)).result
    assert lost is not None
    assert lost.details == {"progress": {"done": 4, "total": 10, "at": 1.5}}


def test_the_status_of_an_endpoint_has_the_progress_of_some_tasks() -> None:
    core = agent()
    send(core, spec("a"), spec("b"))
    assert core.core.running_progress() == []
    heard(core, A, B, now=100.0)
    shown = list(lines({"progress": core.core.running_progress()}, now=A.at + 5))
    assert [line.split("\t")[:3] for line in shown] == [
        ["progress", "a", "3 of 10 (30 %): fitting"],
        ["progress", "b", "0.5"],
    ]
    assert "(5 s ago)" in shown[0]


def test_a_task_that_starts_again_has_no_progress() -> None:
    core = agent()
    send(core, spec("a"))
    heard(core, A, now=1.0)
    core.progress("m", Progress(workers=4, died=(Died("a", "killed"),)))
    core.decide(now=2.0)
    assert "progress" not in core.core.report().detail


def test_only_the_manager_that_has_a_task_reports_it() -> None:
    core = agent()
    send(core, spec("a"))
    assert heard(core, A, B, now=1.0, manager="n") == []


def test_a_report_of_progress_is_small() -> None:
    core = agent()
    for number in range(40):
        core.manager_registered(f"n{number}", slots=4)
        core.progress(f"n{number}", Progress(workers=4))
    core.decide(now=0.0)
    turn = send(core, *[spec(f"t{number}") for number in range(150)])
    placed = {task.task_id: manager for manager, tasks in turn.orders.items() for task in tasks}
    for name, manager in placed.items():
        heard(core, ReportedProgress(name, 1, 2, "é" * 200, 1.0), now=1.0, manager=manager)
    rows = heard(core, now=5.0)
    assert len(rows) == MOST_PROGRESS
    assert 0 < sum("text" in row for row in rows) < 50
    assert len(msgspec.msgpack.encode(rows)) < 32 * 1024
    assert len(core.core.running_progress()) == MOST_REPORTED
    for row in rows:
        name = row["task_id"]
        core.progress(placed[name], Progress(workers=4, finished=(Finished(name, TaskState.SUCCESS, 0),)), [b"r"])
    core.decide(now=6.0)
    assert len(heard(core, now=7.0)) == 150 - MOST_PROGRESS, "the others have room now"


def test_of_a_sealed_call_the_cloud_gets_no_text() -> None:
    core = agent(seal=seal_result)
    core.add(ev.TasksReceived((spec("a"),), UserBytes([b"p"]), (FUNCTION,), UserBytes([BODY]), [OpenedCall(KEY)]))
    core.decide(now=0.0)
    assert heard(core, A, now=1.0) == [{"task_id": "a", "done": 3, "total": 10, "at": 1.0}]
    assert [row["progress"] for row in core.core.running_progress()] == ["3 of 10 (30 %)"]
    core.progress("m", Progress(workers=4, finished=(Finished("a", TaskState.SUCCESS, 0),)), [b"r"])
    details = ended(core.decide(now=2.0)).result.details  # type: ignore[union-attr]
    assert details is not None
    sealed = details.pop("sealed")
    assert details == {"progress": {"done": 3, "total": 10, "at": 1.0}}
    opened = open_answer(sealed.encode(), key=KEY, task_id="a", part=Answer.DETAILS)
    assert msgspec.json.decode(opened)["progress"]["text"] == "fitting"


def test_a_log_of_events_has_no_text_of_progress() -> None:
    logged, _ = ev.for_log(ev.ManagerProgress("m", Progress(progress=(A,))))
    assert "fitting" not in repr(logged)
    assert "ReportedProgress" in repr(logged)
