"""What graphs and nested calls have used counts however they end: the cores of two managers, and the agent's."""

from __future__ import annotations

from typing import Any

import pytest

from farcall_common.errors import ErrorRecord, Fault
from farcall_common.graphs import Input, Stage
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskResults, TaskState
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.reports import messages_of
from farcall_endpoint.agent.core.tasks import Stage as At
from farcall_endpoint.agent.core.tasks import TaskResult
from farcall_endpoint.contracts.agent_manager import (
    CancelTasks,
    Died,
    Finished,
    GraphProgress,
    Progress,
    TaskOrder,
    Used,
)
from farcall_endpoint.contracts.manager_worker import Call, Calls, Done, DropCalls, Waits
from farcall_endpoint.manager.core.events import Job, LimitExceeded, PacketsReceived
from tests.support.manager import ready
from tests.unit.test_endpoint_agent_core import connected, send, spec
from tests.unit.test_endpoint_calls_elsewhere import Site, graph_job

LONG_S = 100.0
ENDS = ("success", "failure", "cancel", "walltime", "death", "limit")
WHERE = ("here", "elsewhere", "below here", "below elsewhere")
TOLERANCE_S = 0.5
"""What is running on another node is reported after a moment."""


def call_of(task_id: str) -> Calls:
    """The packet with which a task makes a call of its own function."""
    return Calls(task_id, (Call(0, "h0", 1, "f"),))


class Case(Site):
    """A task whose one call runs, here or elsewhere; in cases below, that has made a call, too, which runs."""

    def __init__(self, where: str) -> None:
        self.died: list[Died] = []
        self.graphs: list[GraphProgress] = []
        super().__init__(slots=1 if where.endswith("elsewhere") else 2)
        self.at = "other" if where.endswith("elsewhere") else "home"
        self.is_below = where.startswith("below")

    def _read(self, name: str) -> bool:
        if name == "home":
            for report in self.home.reports:
                self.died += report.progress.died
                self.graphs += report.progress.graphs
        return super()._read(name)

    def worker_of(self, name: str, task_id: str) -> int:
        """The worker that a call was sent to, which begins."""
        [worker_id] = [
            number for number, each in self.rigs[name].core._workers.items() if each.runs(task_id) and not each.killed
        ]
        self.begin(name, worker_id)
        return worker_id

    def call(self, worker_id: int, task_id: str) -> None:
        """A task at home makes a call."""
        self.tell("home", PacketsReceived(worker_id, [(call_of(task_id), b"p")]))
        self.wait(0.01)

    def settle(self, task_id: str) -> None:
        """The call has begun, and makes a call itself in some cases; then time passes."""
        worker_id = self.worker_of(self.at, task_id)
        if self.is_below:
            self.tell(self.at, PacketsReceived(worker_id, [(call_of(task_id), b"p"), (Waits(task_id), b"")]))
            for number, each in list(self.rigs[self.at].core._workers.items()):
                if not each.is_ready:
                    self.tell(self.at, ready(number))
            self.worker_of(self.at, f"{task_id}/0")
        for _ in range(10):
            self.wait(LONG_S / 10)

    def finish(self, name: str, worker_id: int, task_id: str, **given: Any) -> None:
        """A worker says that its task has ended, and that it took no time."""
        rig = self.rigs[name]
        order, rig.workers[worker_id].running = rig.workers[worker_id].running, None
        is_edge = order is not None and order.call is not None and order.call.is_edge and "error" not in given
        parts = (1,) if is_edge else ()
        self.tell(name, PacketsReceived(worker_id, [(Done(task_id, 1.0, 1.0, parts=parts, **given), b"v")]))


def used_by(case: Case) -> Used:
    """What the one result says, or the report that a worker died."""
    if case.died:
        assert not case.finished
        [died] = case.died
        assert died.used is not None
        return died.used
    details = case.only().details
    assert details is not None
    return Used(details["stage_run_s"], details["stage_calls"])


def graph_case(where: str, end: str) -> Case:
    """A graph with two calls, one of which runs when it ends."""
    options: dict[str, Any] = {"walltime_s": LONG_S / 10 * 9.5} if end == "walltime" else {}
    case = Case(where)
    last = Stage(1, "last", (Input(0, (0,)), Input(1, (1,))), needs=1 if end == "success" else 0)
    case.start(graph_job("g", (Stage(0, "a"), Stage(0, "b"), last), idempotent=False, **options))
    case.wait(0.01)
    case.settle("g/1")
    first = case.worker_of("home", "g/0") if end != "walltime" else 0
    match end:
        case "success":
            case.finish("home", first, "g/0")
            case.finish("home", case.worker_of("home", "g/2"), "g/2")
        case "failure":
            case.finish("home", first, "g/0", error={"code": "X", "message": "no"})
        case "cancel":
            case.tell("home", CancelTasks(("g",)))
        case "death":
            case.die("home", first)
        case "limit":
            record = ErrorRecord("MEMORY_EXCEEDED", "too much", fault=Fault.USER_CODE)
            case.tell("home", LimitExceeded(first, "g/0", record))
            case.die("home", first)
    return case


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("end", ENDS)
def test_all_calls_of_a_graph_count_however_it_ends(where: str, end: str) -> None:
    case = graph_case(where, end)
    used = used_by(case)
    calls = 2 + where.startswith("below") + (end == "success")
    run_s = LONG_S * (2 + where.startswith("below"))
    assert used.calls == calls
    if end == "walltime":  # as soon as it is noticed
        assert used.run_s == pytest.approx(run_s, abs=LONG_S / 10 * 3 + TOLERANCE_S)
    else:
        assert used.run_s == pytest.approx(run_s, abs=TOLERANCE_S)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("end", [*ENDS, "drop", "drop and wait", "call ended"])
def test_all_nested_calls_count_however_their_task_ends(where: str, end: str) -> None:
    options: dict[str, Any] = {"walltime_s": LONG_S / 10 * 9.5} if end == "walltime" else {}
    case = Case(where)
    case.start(Job(TaskOrder("d", 1, "h0", 0, TaskOptions(**options)), b"body", b""))
    driver = case.worker_of("home", "d")
    case.call(driver, "d")
    case.settle("d/0")
    if end.startswith("drop"):
        case.tell("home", PacketsReceived(driver, [(DropCalls("d", (0,)), b"")]))
    if end == "drop and wait":
        for number in list(case.rigs[case.at].killed):
            case.die(case.at, number)
        case.wait(0.1)
    if end == "call ended" and not case.is_below:
        case.finish(case.at, case.worker_of(case.at, "d/0"), "d/0")
    match end:
        case "success" | "drop" | "drop and wait":
            case.finish("home", driver, "d")
        case "failure":
            case.finish("home", driver, "d", error={"code": "X", "message": "no"})
        case "cancel":
            case.tell("home", CancelTasks(("d",)))
            case.die("home", driver)
        case "walltime":
            case.die("home", driver)
        case "death" | "call ended":
            case.die("home", driver)
        case "limit":
            record = ErrorRecord("MEMORY_EXCEEDED", "too much", fault=Fault.USER_CODE)
            case.tell("home", LimitExceeded(driver, "d", record))
            case.die("home", driver)
    used = used_by(case)
    assert used.calls == 1 + where.startswith("below")
    assert used.run_s == pytest.approx(LONG_S * (2 + where.startswith("below")), abs=TOLERANCE_S)


@pytest.mark.parametrize("kind", ["graph", "nested"])
def test_a_call_elsewhere_counts_also_if_its_node_is_lost(kind: str) -> None:
    case = Case("below elsewhere")
    if kind == "graph":
        last = Stage(1, "last", (Input(0, (0,)), Input(1, (1,))))
        case.start(graph_job("g", (Stage(0, "a"), Stage(0, "b"), last), idempotent=False))
        case.wait(0.01)
        case.settle("g/1")
    else:
        case.start(Job(TaskOrder("d", 1, "h0", 0, TaskOptions()), b"body", b""))
        driver = case.worker_of("home", "d")
        case.call(driver, "d")
        case.settle("d/0")
    case.lose("other")
    if kind == "nested":
        case.finish("home", driver, "d")
    used = used_by(case)
    assert used.calls == 3 - (kind == "nested")
    assert used.run_s == pytest.approx(LONG_S * 3, abs=TOLERANCE_S)


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_each_attempt_of_a_call_counts(where: str) -> None:
    case = Case(where)
    case.start(Job(TaskOrder("d", 1, "h0", 0, TaskOptions()), b"body", b""))
    driver = case.worker_of("home", "d")
    nested = Calls("d", (Call(0, "h0", 1, "f", options=TaskOptions(max_attempts=2, retries=1)),))
    case.tell("home", PacketsReceived(driver, [(nested, b"p")]))
    case.wait(0.01)
    case.settle("d/0")
    case.die(case.at, case.worker_of(case.at, "d/0"))
    case.wait(0.01)
    case.wait(0.01)
    case.settle("d/0")
    case.finish("home", driver, "d")
    used = used_by(case)
    assert used.calls == 2
    assert used.run_s == pytest.approx(LONG_S * 4, abs=TOLERANCE_S)


def test_calls_that_another_task_of_the_worker_has_made_count_for_an_attempt() -> None:
    case = Case("here")
    case.home.core._prefetch = type(case.home.core._prefetch)(horizon_s=1.0, limit=3, unseen=3)
    case.start(Job(TaskOrder("d", 1, "h0", 0, TaskOptions()), b"body", b""))
    driver = case.worker_of("home", "d")
    case.home.workers[driver].running = None
    case.home.workers[driver].claims += 1  # it has not begun
    case.call(driver, "d")
    case.settle("d/0")
    case.die("home", driver)
    used = used_by(case)
    assert used.calls == 1
    assert used.run_s == pytest.approx(LONG_S, abs=TOLERANCE_S)


@pytest.mark.parametrize("kind", ["graph", "nested"])
def test_the_agent_hears_what_has_been_used_in_case_that_the_manager_is_lost(kind: str) -> None:
    case = Case("below here")
    if kind == "graph":
        case.start(graph_job("g", (Stage(0, "a"), Stage(0, "b", (Input(0, (0,)),)))))
        case.settle("g/0")
    else:
        case.start(Job(TaskOrder("d", 1, "h0", 0, TaskOptions()), b"body", b""))
        driver = case.worker_of("home", "d")
        case.call(driver, "d")
        case.settle("d/0")
    assert case.graphs[-1].used.places == (2 if kind == "graph" else 3)
    assert case.graphs[-1].used.run_s < 2 * LONG_S, "it is not said again while nothing changes"


# -- the agent ---------------------------------------------------------------------------------------------------------


def ended_with(core: Any, *, now: float) -> dict[str, Any]:
    [task] = core.decide(now=now).finished
    assert task.result is not None
    details: dict[str, Any] = task.result.details
    return details


USED = Used(60.0, 4, 2)


@pytest.mark.parametrize("end", ["given up", "lost", "cancelled"])
def test_what_was_used_until_the_manager_was_lost_counts(end: str) -> None:
    core = connected()
    send(core, spec("a", idempotent=end != "lost", max_attempts=1))
    core.progress("m", Progress(workers=2, graphs=(GraphProgress("a", (), USED),)))
    core.decide(now=10.0)
    if end == "cancelled":
        core.add(ev.CancelRequested(("a",)))
    core.add(ev.ManagerLost("m", "it was killed"))
    details = ended_with(core, now=15.0)
    assert (details["stage_run_s"], details["stage_calls"]) == (70.0, 4), "two places for five seconds more"


def test_what_earlier_attempts_have_used_counts() -> None:
    core = connected()
    send(core, spec("a", max_attempts=4, retries=1))
    core.progress("m", Progress(workers=2, died=(Died("a", "exit code 3", used=USED),)))
    core.decide(now=1.0)
    error = {"code": "TASK_FAILED", "message": "no", "exception_type": "OSError"}
    details = {"stages": [], "stage_calls": 7, "stage_run_s": 8.0}
    raised = Finished("a", TaskState.FAILED, None, error, 1.0, 2.0, details, is_retried=True)
    core.progress("m", Progress(workers=2, finished=(raised,)))
    core.decide(now=2.0)
    core.decide(now=400.0)
    core.progress("m", Progress(workers=2, graphs=(GraphProgress("a", (), Used(1.0, 1, 1)),)))
    core.decide(now=401.0)
    core.add(ev.ManagerLost("m", "it was killed"))
    core.manager_registered("n", slots=2)
    core.progress("n", Progress(workers=2))
    core.decide(now=402.0)
    core.progress("n", Progress(workers=2, died=(Died("a", "exit code 3", used=Used(0.5, 1)),)))
    core.decide(now=403.0)
    last = Finished("a", TaskState.SUCCESS, 0, None, 1.0, 2.0, {"stage_calls": 2, "stage_run_s": 3.0})
    core.progress("n", Progress(workers=2, finished=(last,)), [b"r"])
    found = ended_with(core, now=404.0)
    assert (found["stage_calls"], found["stage_run_s"], found["earlier_run_s"]) == (4 + 7 + 1 + 1 + 2, 3.0, 70.5)


@pytest.mark.parametrize("end", ["given up", "cancelled"])
def test_the_last_death_counts_with_the_result(end: str) -> None:
    core = connected()
    send(core, spec("a", max_attempts=1))
    if end == "cancelled":
        core.add(ev.CancelRequested(("a",)))
        core.decide(now=1.0)
    core.progress("m", Progress(workers=2, died=(Died("a", "exit code 3", used=USED),)))
    assert ended_with(core, now=2.0) == {"stage_calls": 4, "stage_run_s": 60.0}


def test_details_that_a_task_forges_are_no_usage() -> None:
    core = connected()
    [task] = send(core, spec("a", retries=1)).accepted
    forged = {"stage_calls": "7", "stage_run_s": "0.0"}
    error = {"code": "TASK_FAILED", "message": "no", "exception_type": "OSError"}
    raised = Finished("a", TaskState.FAILED, None, error, 1.0, 2.0, forged, is_retried=True)
    core.progress("m", Progress(workers=2, finished=(raised,)))
    core.decide(now=2.0)
    assert (task.earlier_run_s, task.earlier_calls) == (1.0, 0)


@pytest.mark.parametrize("reason", ["too large", "not stored", "cancelled while storing", "not uploaded"])
def test_a_result_in_place_of_another_one_keeps_what_was_used(reason: str) -> None:
    core = connected()
    [task] = send(core, spec("a")).accepted
    details = {"stage_calls": 2, "stage_run_s": 30.0}
    held, record = core.core._held, ErrorRecord("X", "no", fault=Fault.PEER)
    if reason in ("not stored", "cancelled while storing"):
        task.kept, task.stage = TaskResult(TaskState.SUCCESS, details=details), At.STAGING_OUT
        if reason == "not stored":
            held.not_stored(task, record)
        else:
            held.cancel(["a"])
    else:
        long = {"message": "m" * (5 * 2**20 if reason == "too large" else 1)}
        done = Finished("a", TaskState.FAILED, 0, long, 1.0, 2.0, details)
        core.progress("m", Progress(workers=2, finished=(done,)), [bytes(2**20)])
        core.decide(now=2.0)
        if reason == "not uploaded":
            held.upload_failed(task, "the quota is used up", retryable=False, now=3.0)
    if reason == "too large":
        assert task.result is not None
        task.result.sha256 = ""
        [message] = messages_of(do.ReportResults([task]), body=lambda _: b"")
        assert isinstance(message.message, TaskResults)
        assert message.message.results[0].details == details
    else:
        assert ended_with(core, now=3.0) == details
