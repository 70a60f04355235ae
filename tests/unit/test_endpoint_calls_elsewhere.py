"""Calls on other managers: the cores of two managers, and what the agent keeps of their calls; no processes."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall_common.environments import Environment
from farcall_common.event_log import UserBytes
from farcall_common.graphs import Graph, Input, Stage
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.calls import CallsElsewhere
from farcall_endpoint.agent.core.loads import Lifetime
from farcall_endpoint.agent.core.managers import Managers
from farcall_endpoint.contracts.agent_manager import (
    CallEnd,
    CallNews,
    CallsDropped,
    CallsTaken,
    CancelTasks,
    Died,
    Finished,
    GivenCall,
    RunCalls,
    Started,
    TakeCalls,
    TaskOrder,
)
from farcall_endpoint.contracts.manager_worker import Call as NestedCall
from farcall_endpoint.contracts.manager_worker import Calls, Done, Waits
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.graphs.values import GraphSettings
from farcall_endpoint.host.shared_memory import Frame
from farcall_endpoint.manager.core.away import jobs_of
from farcall_endpoint.manager.core.events import (
    Callees,
    CallNewsReceived,
    EnvironmentReady,
    Event,
    Job,
    PacketsReceived,
    TasksReceived,
)
from tests.support.manager import Rig, ready

VENV = Environment(type="venv", location="/env")
WIDE = (Stage(0, "split"), Stage(1, "count", (Input(0, (0,), each=True),)))


def graph_job(name: str, stages: tuple[Stage, ...], **options: Any) -> Job:
    callees = tuple(Callee(function_id=f"id-{each}", function_hash=f"h{each}") for each in range(2))
    order = TaskOrder(name, 1, "h0", 0, TaskOptions(callees=callees, **options))
    graph = Graph(stages, tuple(f"call {number}".encode() for number in range(len(stages))), len(stages) - 1)
    return Job(order, b"body 0", b"", callees=Callees({"h0": b"body 0", "h1": b"body 1"}, graph))


class Site:
    """Two managers, and the agent's part of their calls. Messages arrive at once."""

    def __init__(self, *, slots: int = 1, types: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.managers = Managers()
        self.elsewhere = CallsElsewhere(self.managers)
        self.rigs: dict[str, Rig] = {}
        self.lost: set[str] = set()
        self.functions: dict[tuple[str, str], dict[str, Frame]] = {}
        self.environments: dict[str, Environment] = {VENV.key: VENV}
        self.depth = 0
        self.finished: list[Finished] = []
        self.runs: collections.Counter[str] = collections.Counter()
        for name in ("home", "other"):
            offered = None if types is None else types[name]
            graphs = GraphSettings(node=f"node of {name}")
            rig = Rig(slots=slots, prefetch=0, batching=False, graphs=graphs, types=offered)
            self.rigs[name] = rig
            rig.start_all()
            self.managers.add(name, slots=slots, lifetime=None, types=offered or {})
            self.managers.note(name, workers=slots, idle_workers=slots, problem="")
        self.pump()

    @property
    def home(self) -> Rig:
        return self.rigs["home"]

    @property
    def other(self) -> Rig:
        return self.rigs["other"]

    def tell(self, name: str, *events: Event) -> None:
        if name not in self.lost:
            self.rigs[name].handle(*events)
        self.pump()

    def wait(self, seconds: float) -> None:
        for name, rig in self.rigs.items():
            rig.now += seconds
            self.tell(name)

    def start(self, job: Job) -> None:
        self.tell("home", TasksReceived([job]))

    def pump(self) -> None:
        """Pass everything on until nothing is left."""
        while any(self._read(name) for name in self.rigs if name not in self.lost) or self._write():
            pass

    def _read(self, name: str) -> bool:
        rig = self.rigs[name]
        passed, rig.passed = rig.passed, []
        reports, rig.reports = rig.reports, []
        for report in reports:
            if name == "home":
                self.finished += report.progress.finished
            if report.progress.waiting_calls is not None:
                self.elsewhere.note(name, report.progress.waiting_calls)
        for each in passed:
            bodies = UserBytes(each.bodies)  # type: ignore[arg-type]  # frames pass through
            match each.message:
                case CallsTaken():
                    self.elsewhere.taken(name, each.message, bodies)
                case CallNews():
                    self.elsewhere.heard(name, each.message, bodies)
                case CallsDropped(task_ids=task_ids):
                    self.elsewhere.dropped(name, task_ids)
        return bool(passed)

    def _write(self) -> bool:
        if self.elsewhere.waiting:
            self.elsewhere.ask(self.environments.get, depth=self.depth, now=0.0)
        messages, self.elsewhere.messages = self.elsewhere.messages, []
        for each in messages:
            if each.manager_id in self.lost:
                continue
            rig, bodies = self.rigs[each.manager_id], list(each.bodies.bodies)
            match each.message:
                case RunCalls() as run:
                    known = self.functions.setdefault((each.manager_id, run.home), {})
                    frames: Any = bodies
                    rig.handle(TasksReceived(jobs_of(run, frames, functions=known, owner=rig.core.guests.owner)))
                case CallNews() as news:
                    rig.handle(CallNewsReceived(news, bodies))  # type: ignore[arg-type]
                case message:
                    rig.handle(message)
        return bool(messages)

    def begin(self, name: str, worker: int = 0) -> str:
        """The next task of a worker begins, if it does not run one."""
        rig = self.rigs[name]
        had = rig.workers[worker].running
        task_id = rig.read(worker)
        if had is None:
            self.runs[task_id] += 1
        return task_id

    def end(
        self, name: str, *values: bytes, worker: int = 0, error: dict[str, Any] | None = None, printed: bytes = b""
    ) -> str:
        """A worker ends what it runs."""
        task_id = self.begin(name, worker)
        rig = self.rigs[name]
        order, rig.workers[worker].running = rig.workers[worker].running, None
        assert order is not None
        assert order.call is not None
        parts = tuple(map(len, values)) if order.call.is_edge and error is None else ()
        tails = Printed(len(printed), 0, len(printed), 0) if printed else None
        done = Done(task_id, 1.0, 1.5, error, printed=tails, parts=parts)
        self.tell(name, PacketsReceived(worker, [(done, b"".join((*values, printed)))]))
        return task_id

    def die(self, name: str, worker: int) -> None:
        """A worker dies, and the one that is started in its place is ready."""
        rig = self.rigs[name]
        rig.die(worker)
        self.pump()
        for worker_id, each in list(rig.core._workers.items()):
            if not each.is_ready:
                self.tell(name, ready(worker_id))

    def lose(self, name: str, *, suspects: int = 1, unstarted: bool = False) -> None:
        """A manager is gone."""
        self.lost.add(name)
        entry = self.managers.remove(name)
        assert entry is not None
        self.elsewhere.lost(entry, reason="it was killed", suspects=suspects, unstarted=unstarted)
        self.pump()

    def only(self) -> Finished:
        [finished] = self.finished
        return finished


def wide(*, calls: int = 2, **options: Any) -> Site:
    """A graph whose last calls are made now, one of them elsewhere."""
    site = Site()
    site.start(graph_job("g", WIDE, **options))
    site.end("home", *(b"x" for _ in range(calls)))
    site.wait(0.01)
    return site


def test_a_call_that_waits_runs_elsewhere_and_its_value_comes_back() -> None:
    site = wide()
    assert (site.begin("home"), site.begin("other")) == ("g/1.0", "g/1.1")
    assert site.managers.members["other"].guests == 1
    assert site.managers.members["other"].load.free == 0
    assert site.managers.busy(0) == ["other"]
    order = site.other.workers[0].running
    assert order is not None
    assert order.call is not None
    assert (order.function_hash, order.payload_bytes, order.call.inputs[0].parts) == ("h1", 6, (1,))
    site.end("other", b"second", printed=b"said")
    assert site.managers.members["other"].load.free == 1
    site.end("home", b"first")
    assert site.end("home", b"[first, second]") == "g/2"
    finished = site.only()
    assert finished.state is TaskState.SUCCESS
    assert finished.printed is not None
    assert finished.details is not None
    assert finished.details["stages"][1]["node"] == "node of other, node of home"


def test_calls_that_would_begin_soon_stay() -> None:
    site = Site()
    site.start(graph_job("g", WIDE))
    site.end("home", b"x", b"x")
    site.wait(0.004)
    assert not site.elsewhere.waiting
    assert not site.other.core._workers[0].jobs
    site.wait(0.002)
    assert site.other.core._workers[0].jobs
    quick = Site()
    quick.home.jobs(*(str(each) for each in range(50)))
    for _ in range(50):
        quick.home.done(0, duration_s=0.0001)
    quick.start(graph_job("g", WIDE))
    quick.end("home", *(b"x" for _ in range(3)))
    quick.home.core._prefetch.observe(0.0001)
    quick.home.core._prefetch._mean_s = 0.0001
    quick.wait(0.01)
    assert not quick.other.core._workers[0].jobs
    quick.wait(0.05)
    assert quick.other.core._workers[0].jobs


def test_large_inputs_stay_and_those_with_small_ones_leave_first() -> None:
    stages = (
        Stage(0, "a"),
        *(Stage(1, f"b{number}", (Input(0, (0,)),)) for number in range(2)),
        Stage(1, "c"),
        Stage(0, "last", tuple(Input(each, (each,)) for each in (1, 2, 3))),
    )
    site = Site()
    site.start(graph_job("g", stages))
    site.wait(0.01)
    assert site.begin("other") == "g/3", "without inputs"
    site.end("home", bytes(17 * 2**20))
    site.end("other", b"c")
    site.wait(0.2)
    assert not site.other.core._workers[0].jobs
    assert site.managers.members["other"].load.free == 1


def test_an_error_comes_back_and_a_failed_graph_ends_its_calls_elsewhere() -> None:
    site = wide()
    site.begin("other")
    site.end("home", b"raised", error={"code": "X", "message": "no"})
    assert site.only().state is TaskState.FAILED
    assert not site.home.core._away.taken
    assert site.other.killed == [0]
    site.die("other", 0)
    assert site.managers.members["other"].guests == 0
    assert site.managers.members["other"].load.free == 1


def test_calls_of_a_running_task_leave_with_what_they_call() -> None:
    site = Site()
    order = TaskOrder("d", 1, "h0", 0, TaskOptions(callees=(Callee("id", "h1"),)), restricted=True)
    site.start(Job(order, b"body 0", b"", callees=Callees({"h1": b"body 1"})))
    site.begin("home")
    calls = Calls("d", tuple(NestedCall(number, "h1", 1, "f") for number in range(2)))
    site.tell("home", PacketsReceived(0, [(calls, b"pp")]))
    site.wait(0.01)
    assert site.begin("other") in {"d/0", "d/1"}
    inner = Calls("d/1", (NestedCall(0, "h1", 1, "f"), NestedCall(1, "h2", 1, "f")))
    site.tell("other", PacketsReceived(0, [(inner, b"pp"), (Waits("d/1"), b"")]))
    [waiting] = site.other.core._queue.items()
    assert (waiting.order.task_id, waiting.depth, waiting.function) == ("d/1/0", 2, b"body 1")


def test_an_environment_that_only_the_other_manager_has() -> None:
    site = Site(types={"home": {}, "other": {"venv": ""}})
    site.start(graph_job("g", (Stage(0, "a"), Stage(1, "b", (Input(0, (0,)),), options=TaskOptions(environment=VENV)))))
    site.end("home", b"value")
    assert VENV.key not in site.home.core._environments, "it is not prepared where it cannot run"
    site.tell("other", EnvironmentReady(VENV.key))
    assert site.managers.sent == {VENV.key: 1}
    site.die("other", 0)  # for a worker in the environment
    [worker] = site.other.core._workers.values()
    assert worker.pair.key == VENV.key
    site.end("other", b"result", worker=worker.worker_id)
    assert site.only().state is TaskState.SUCCESS
    assert site.managers.sent == {}


def test_an_environment_that_no_manager_has_any_more_fails_its_calls() -> None:
    site = Site(types={"home": {}, "other": {"venv": "it is broken"}})
    site.start(graph_job("g", (Stage(0, "a"), Stage(1, "b", (Input(0, (0,)),), options=TaskOptions(environment=VENV)))))
    site.end("home", b"value")
    finished = site.only()
    assert finished.error is not None
    assert (finished.error["code"], "it is broken" in finished.error["message"]) == ("CONTAINER_UNSUPPORTED", True)
    assert "stage 1 (b)" in finished.error["message"]


@pytest.mark.parametrize("once", [False, True])
def test_a_lost_manager_counts_for_calls_that_can_have_run(once: bool) -> None:
    site = Site()
    site.depth = 4
    site.start(graph_job("g", WIDE, idempotent=not once, max_attempts=2))
    site.end("home", *(b"x" for _ in range(6)))
    site.wait(0.01)
    away = list(site.home.core._away.taken)
    assert len(away) == (1 if once else 3), "one that may not run twice never waits behind another"
    site.lose("other")
    assert not site.home.core._away.taken
    if once:
        assert site.only().state is TaskState.FAILED
        return
    waiting = {job.order.task_id: job.order.attempt for job in site.home.core._queue.items()}
    assert [waiting[task_id] for task_id in away] == [2, 1, 1], "the first may have been running"


def test_a_lost_home_frees_the_slots_of_its_calls_when_they_have_ended() -> None:
    site = wide()
    site.begin("other")
    site.lose("home")
    assert site.managers.members["other"].guests == 1
    assert site.other.killed == [0]
    site.die("other", 0)
    assert site.managers.members["other"].guests == 0


def test_calls_that_arrive_for_a_manager_that_is_gone_go_back() -> None:
    site = Site()
    site.elsewhere.note("home", [("", 1)])
    site.elsewhere.ask(site.environments.get, depth=0, now=0.0)
    site.elsewhere.messages.clear()
    site.home.handle(TasksReceived([graph_job("g", WIDE)]))
    site.lose("other")
    taken = CallsTaken("other", "", 1, calls=())
    site.elsewhere.taken("home", taken, UserBytes())
    assert not site.elsewhere.messages
    calls = (GivenCall(TaskOrder("c", 1, "h1", 0), b""), GivenCall(TaskOrder("d", 1, "h1", 1), b""))
    site.elsewhere.taken("home", CallsTaken("other", "", 2, calls), UserBytes([b"", b""]))
    [back] = site.elsewhere.messages
    assert (back.manager_id, back.message) == ("home", CallNews(returned=("c", "d")))


def test_calls_that_cannot_run_at_home_take_turns_with_tasks_elsewhere_in_both_directions() -> None:
    site = Site(types={"home": {"apptainer": ""}, "other": {"venv": ""}})
    image = Environment(type="apptainer", location="/image")
    site.environments[image.key] = image
    for name in site.rigs:
        site.managers.members[name].load.free = -2  # tasks of the queue wait there
    site.elsewhere.note("home", [(VENV.key, 5)])
    site.elsewhere.note("other", [(image.key, 5)])
    site.elsewhere.ask(site.environments.get, depth=0, now=0.0)
    assert {each.manager_id: each.message for each in site.elsewhere.messages} == {
        "home": TakeCalls("other", VENV.key, 1, 1),
        "other": TakeCalls("home", image.key, 1, 1),
    }


def test_functions_are_sent_once_and_forgotten_with_their_manager() -> None:
    site = Site()
    site.start(graph_job("g", WIDE))
    site.end("home", *(b"x" for _ in range(4)))
    site.wait(0.01)
    site.end("other", b"1")
    site.wait(0.01)
    site.end("other", b"2")
    assert site.home.core._away._known == {"other": {"h0", "h1"}}
    assert list(site.functions) == [("other", "home")]
    site.lose("other")
    assert site.home.core._away._known == {}


def test_managers_whose_time_ends_or_that_drain_take_no_calls() -> None:
    site = Site()
    site.managers.members["other"].load.lifetime = Lifetime(ends_at=5.0, drain_s=10.0)
    site.elsewhere.note("home", [("", 1)])
    site.elsewhere.ask(site.environments.get, depth=0, now=0.0)
    assert not site.elsewhere.messages
    site.managers.members["other"].load.lifetime = None
    site.managers.drain(["other"])
    site.elsewhere.ask(site.environments.get, depth=0, now=0.0)
    assert not site.elsewhere.messages


def test_logs_have_no_texts_of_calls() -> None:
    ends = (CallEnd(1, "a", TaskState.FAILED, {"code": "X", "message": "secret"}),)
    died = ((2, Died("b", "signal 9", "secret", "secret", output=b"secret")),)
    event = ev.CallsHeard("m", CallNews(ends, died, ((3, Started("c", 1.0)),)), UserBytes([b"secret"]))
    logged, size = ev.for_log(event)
    assert "secret" not in str(logged)
    assert size == 2
    assert isinstance(logged, ev.CallsHeard)
    assert logged.bodies.sizes == [6]


STEPS = st.lists(
    st.sampled_from(["end home", "end other", "die home", "die other", "lose other", "cancel", "wait", "begin other"]),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, once=st.booleans(), calls=st.integers(0, 6), depth=st.integers(0, 2))
def test_each_graph_ends_once_whatever_dies(steps: list[str], once: bool, calls: int, depth: int) -> None:
    site = Site()
    site.depth = depth
    site.start(graph_job("g", WIDE, idempotent=not once, max_attempts=3))
    site.end("home", *(b"x" for _ in range(calls)))
    site.wait(0.01)

    def turn(name: str, *, dies: bool = False) -> bool:
        rig = site.rigs[name]
        for number, worker in list(rig.core._workers.items()):
            if name in site.lost or not worker.is_ready:
                continue
            if worker.killed or (dies and worker.jobs):
                if worker.jobs and not worker.killed and rig.workers[number].claims:
                    site.begin(name, number)
                site.die(name, number)
                return True
            if not dies and (rig.workers[number].running or rig.workers[number].claims):
                site.end(name, b"v", worker=number)
                return True
        return False

    for step in steps:
        match step.split():
            case ["end", name]:
                turn(name)
            case ["die", name]:
                turn(name, dies=True)
            case ["begin", name]:
                for number, worker in site.rigs[name].workers.items():
                    if name not in site.lost and worker.running is None and worker.claims:
                        site.begin(name, number)
            case ["lose", name] if name not in site.lost:
                site.lose(name)
            case ["cancel"]:
                site.tell("home", CancelTasks(("g",)))
            case _:
                site.wait(0.05)
    for _ in range(200):
        if not (turn("home") or turn("other")):
            site.wait(1.0)
            if not (turn("home") or turn("other")):
                break
    assert [each.task_id for each in site.finished] == ["g"]
    if once:
        assert all(count <= 1 for count in site.runs.values()), site.runs
    assert not site.home.core._away.taken
    if "other" not in site.lost:
        assert (site.managers.members["other"].guests, site.managers.members["other"].load.free) == (0, 1)
