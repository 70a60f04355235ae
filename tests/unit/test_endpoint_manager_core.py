"""The manager's core: events in, actions out, with simulated workers."""

from __future__ import annotations

import collections
import math
import random
import sys

import pytest

from farcall_common.errors import ErrorRecord
from farcall_common.limits import MAX_PAYLOAD_BYTES
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.config.settings import QosSettings
from farcall_endpoint.contracts.agent_manager import (
    CancelTasks,
    Ending,
    ReadOutput,
    ResultsTaken,
    ReturnTasks,
    Stop,
    TaskOrder,
    WantedOutput,
)
from farcall_endpoint.contracts.manager_worker import Begun, Done, Synced
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.host.shared_memory import bytes_of
from farcall_endpoint.manager.core import orders
from farcall_endpoint.manager.core.actions import Action, Kill, Launch, Leave, Pass, ReadStreams, Recall, Report, Send
from farcall_endpoint.manager.core.events import (
    AgentLost,
    Event,
    Instant,
    Job,
    LimitExceeded,
    MalformedReceived,
    PacketsReceived,
    TasksReceived,
    Terminated,
    WorkerDied,
)
from farcall_endpoint.manager.core.interruption import STARTED_AFTER_S
from farcall_endpoint.manager.core.latency import LatencyTasks
from farcall_endpoint.manager.core.manager import ManagerCore
from farcall_endpoint.manager.core.task_queue import TaskQueue
from farcall_endpoint.manager.core.workers import TURN_S, Pair
from farcall_endpoint.qos.controller import Controller
from tests.support.manager import Rig, done, ready, started


def test_workers_are_started_at_once_and_get_tasks_when_ready() -> None:
    rig = Rig(slots=2)
    assert rig.jobs("a", "b", "c") == [Launch(0, 0), Launch(1, 1)]
    rig.handle(ready(1))
    assert rig.workers[1].ahead == ["a"]
    assert not rig.workers[0].ahead


def test_a_new_worker_gets_the_slot_of_the_one_that_died() -> None:
    rig = started(slots=3)
    rig.jobs("a")
    rig.workers.pop(1)
    assert Launch(3, 1) in rig.handle(WorkerDied(1, 0, "exit code 1"))


def test_results_are_reported_with_their_bytes() -> None:
    rig = started()
    rig.jobs("a")
    rig.done()
    progress, results = rig.take()
    [finished] = progress.finished
    assert (finished.task_id, finished.state, finished.result) == ("a", TaskState.SUCCESS, 0)
    assert results == [b"r"]
    rig.handle()
    assert not rig.reports


def test_a_function_travels_once_to_each_worker() -> None:
    rig = started()
    [send] = [action for action in rig.jobs("a", "b") if isinstance(action, Send)]
    assert send.packet.functions == (("h", 4),)
    rig.read()
    rig.workers[0].running = None
    [send] = [action for action in rig.handle(done(0, "a")) if isinstance(action, Send)]
    assert send.packet.functions == ()


def test_worker_function_cache_is_bounded() -> None:
    rig = started()
    for number in range(300):
        rig.jobs("t", function=f"h{number}")
        rig.handle()
        rig.done()
    assert len(rig.workers[0].known) < 260
    rig.jobs("again", function="h0")
    assert rig.done() == "again"


def test_pipelining_follows_the_policy_and_shares_fairly() -> None:
    rig = started(slots=2, prefetch=3)
    rig.jobs(*"abcdef")
    assert {worker_id: len(worker.ahead) for worker_id, worker in rig.workers.items()} == {0: 3, 1: 3}


def test_idle_worker_gets_a_task_before_pipelining() -> None:
    rig = started(slots=4, prefetch=9)
    rig.jobs(*"abcde")
    assert sorted(len(worker.ahead) for worker in rig.workers.values()) == [1, 1, 1, 2]


@pytest.mark.parametrize(("batching", "packets"), [(True, 1), (False, 6)])
def test_tasks_for_the_same_worker_share_a_packet(batching: bool, packets: int) -> None:
    rig = Rig(prefetch=5, batching=batching)
    rig.start_all()
    assert len(rig.jobs(*"abcdef")) == packets
    assert rig.workers[0].ahead == list("abcdef")


_DAYS_S = 400 * 86_400.0


@pytest.mark.parametrize(
    ("run_s", "told"),
    [
        (1.05, (1000.0, 1001.05)),
        (1.05, (1000.02, 1001.02)),  # as a worker reports them
        (31.0, (1000.0, 1001.0)),
        (0.7, (1000.0 + _DAYS_S, 1000.0 + _DAYS_S)),
        (0.7, (1000.0 + _DAYS_S, 1000.7 + _DAYS_S)),
        (0.7, (0.0, 0.7)),
        (0.7, (0.0, 1000.7)),
        (0.7, (1000.7, 1000.0)),
        (0.05, (1000.05, 1000.0)),
        (0.7, (1000.7, 1000.7)),
        (0.7, (2.0**40 - 1, 2.0**40 - 1)),
    ],
)
def test_times_that_the_code_of_a_task_forges_are_those_of_the_manager(run_s: float, told: tuple[float, float]) -> None:
    rig = started()
    rig.jobs("a")
    rig.read()
    rig.now += run_s
    rig.handle(PacketsReceived(0, [(Done("a", *told), b"r")]))
    [finished] = rig.progress().finished
    assert (finished.started_at, finished.ended_at) == pytest.approx((1000.0, 1000.0 + run_s), abs=0.1)
    assert finished.started_at is not None
    assert finished.ended_at is not None
    assert finished.ended_at - finished.started_at == pytest.approx(run_s, abs=0.1)


@pytest.mark.parametrize("told", [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf), (-1.0, 1.0), (1.0, 2.0**40)])
def test_times_that_cannot_be_end_the_worker(told: tuple[float, float]) -> None:
    rig = started()
    rig.jobs("a")
    rig.read()
    rig.handle(PacketsReceived(0, [(Done("a", *told), b"r")]))
    assert rig.killed == [0]


def test_tasks_that_a_late_manager_reads_together_keep_their_times() -> None:
    rig = started(prefetch=1)
    rig.jobs("a", "b")
    rig.read()
    rig.now += 3.0
    rig.handle(PacketsReceived(0, [(Done("a", 1000.0, 1001.0), b"r"), (Done("b", 1001.0, 1003.0), b"r")]))
    _, second = rig.progress().finished
    assert (second.started_at, second.ended_at) == pytest.approx((1001.0, 1003.0))


def test_large_payloads_travel_alone_and_few_at_a_time() -> None:
    rig = started(prefetch=100)
    jobs = [Job(TaskOrder(str(number), 1, "h", 0), b"body", bytes(1_000_000)) for number in range(9)]
    sends = [action for action in rig.handle(TasksReceived(jobs)) if isinstance(action, Send)]
    assert [len(send.packet.orders) for send in sends] == [1] * len(sends)
    assert len(sends) < 5


def test_tasks_behind_a_slow_task_are_recalled_in_order() -> None:
    rig = started(slots=2, prefetch=3)
    rig.jobs(*"abcdef")
    rig.read(0)
    rig.now = 0.009
    rig.done(1)
    rig.now = 0.015
    behind = rig.workers[0].ahead
    assert rig.core.next_deadline() <= rig.now
    rig.handle()
    assert not rig.workers[0].ahead
    assert [rig.done(1) for _ in range(4)] == ["e", "f", *behind]


def test_worker_gets_no_task_until_recalled_ones_are_skipped() -> None:
    rig = started(prefetch=3)
    rig.jobs(*"abc")
    rig.read()
    rig.now = 0.02
    rig.handle()
    worker = rig.workers[0]
    worker.running = None
    rig.handle(done(0, "a", duration_s=0.02))
    assert not worker.ahead
    assert not worker.step()
    assert worker.synced == 1
    rig.handle(PacketsReceived(0, [(Synced(), b"")]))
    assert worker.ahead == ["b", "c"]


def test_worker_between_two_recalled_tasks_gets_new_ones() -> None:
    rig = started(prefetch=3)
    rig.jobs(*"abc")
    rig.now = 0.02  # it was held up before it could start anything
    rig.handle()
    assert not rig.workers[0].step()
    rig.handle(PacketsReceived(0, [(Synced(), b"")]))
    assert [rig.done() for _ in range(3)] == list("abc")


def test_limit_breach_fails_the_running_task_with_its_error() -> None:
    rig = started(prefetch=1)
    rig.jobs("a", "b")
    rig.read()
    rig.handle(LimitExceeded(0, "b", ErrorRecord("TOO_MUCH", "of it")))  # it does not run: too late, or too early
    rig.handle(LimitExceeded(0, "a", ErrorRecord("TOO_MUCH", "of it")))
    assert rig.killed == [0]
    rig.die(0)
    [finished] = rig.progress().finished
    assert finished.error is not None
    assert (finished.task_id, finished.error["code"]) == ("a", "TOO_MUCH")
    assert (finished.error["stdout_tail"], finished.error["stderr_tail"]) == ("out", "err")


def test_cancel_of_waiting_pipelined_and_running_tasks() -> None:
    rig = started(prefetch=1)
    rig.jobs("running", "piped", "waiting")
    rig.read()
    rig.handle(CancelTasks(("piped", "waiting", "unknown")))
    assert {f.task_id: f.state for f in rig.progress().finished} == dict.fromkeys(
        ["piped", "waiting"], TaskState.CANCELLED
    )
    assert not rig.killed
    rig.handle(CancelTasks(("running",)))
    assert rig.killed == [0]
    rig.die(0, reason="killed by SIGKILL")
    [finished] = rig.progress().finished
    assert finished.state is TaskState.CANCELLED
    assert not rig.progress().died


def test_tasks_that_have_not_begun_are_given_back() -> None:
    rig = started(prefetch=1)
    rig.jobs("running", "piped", "waiting")
    rig.read()
    rig.handle(ReturnTasks(("running", "piped", "waiting", "unknown")))
    assert rig.progress().returned == ("waiting",)
    rig.handle(CancelTasks(("waiting",)))
    assert not rig.progress().finished
    assert not rig.progress().returned


def test_agent_hears_whose_worker_is_ended_before_it_is() -> None:
    rig = SharedRig(slots=1)
    rig.settle(jobs_of("a", 1))
    [worker_id] = rig.workers
    rig.read(worker_id)
    actions = rig.handle(CancelTasks(("a0",)))
    assert [action for action in actions if isinstance(action, Pass | Kill)] == [
        Pass(Ending("a0")),
        Kill(worker_id),
    ]


def test_result_before_the_kill_wins() -> None:
    rig = started()
    rig.jobs("a")
    rig.read()
    rig.handle(CancelTasks(("a",)))
    rig.done()
    rig.die(0)
    [finished] = rig.progress().finished
    assert finished.state is TaskState.SUCCESS


def test_walltime_counts_from_the_start_of_the_task() -> None:
    rig = started(prefetch=1)
    rig.jobs("a")
    rig.jobs("b", walltime_s=1.0)
    rig.now = 5.0
    rig.done(duration_s=5.0)
    rig.handle()
    rig.read()
    rig.now = 5.9
    rig.handle()
    assert not rig.killed
    rig.now = 6.0
    rig.handle()
    assert rig.killed == [0]
    rig.die(0)
    finished = rig.progress().finished[-1]
    assert finished.error is not None
    assert finished.error["code"] == "WALLTIME_EXCEEDED"
    assert finished.error["stderr_tail"] == "err"


@pytest.mark.parametrize(
    ("retry_on", "is_retried"), [((), False), (("builtins.OSError",), False), (("builtins.TimeoutError",), True)]
)
def test_a_walltime_is_retried_if_the_task_names_timeout_error(retry_on: tuple[str, ...], is_retried: bool) -> None:
    rig = started()
    rig.jobs("a", walltime_s=1.0, retries=1, retry_on=retry_on)
    rig.read()
    rig.now = 1.0
    rig.handle()
    rig.die(0)
    assert rig.progress().finished[-1].is_retried is is_retried


def test_a_report_says_whether_the_error_is_retried() -> None:
    rig = started()
    rig.jobs("a", retries=1)
    rig.read()
    done = Done("a", 0.0, 1.0, {"code": "TASK_FAILED", "message": ""}, is_retried=True)
    rig.handle(PacketsReceived(0, [(done, b"")]))
    assert rig.progress().finished[-1].is_retried


def test_worker_death_names_its_running_task_and_reassigns_the_rest() -> None:
    rig = started(prefetch=2)
    rig.jobs(*"abc")
    rig.read()
    rig.die(0, reason="killed by SIGSEGV")
    progress = rig.progress()
    assert [(died.task_id, died.reason, died.stderr_tail) for died in progress.died] == [
        ("a", "killed by SIGSEGV", "err")
    ]
    assert not progress.finished
    [worker_id] = rig.workers
    rig.handle(ready(worker_id))
    assert rig.workers[worker_id].ahead == ["b", "c"]


def test_failed_worker_starts_back_off_and_report_the_reason() -> None:
    rig = Rig()
    waits = []
    for _ in range(5):
        rig.handle()
        [worker_id] = rig.workers
        began = rig.now
        rig.die(worker_id)
        assert "a worker did not start: exit code 1; err" in rig.progress().problem
        while not rig.workers:
            rig.now = rig.core.next_deadline()
            rig.handle()
        waits.append(rig.now - began)
    assert waits == sorted(waits)
    assert waits[-1] > 1
    rig.start_all()
    assert rig.progress().problem == ""


def test_worker_that_hangs_at_start_is_killed() -> None:
    rig = Rig()
    rig.handle()
    rig.now = 59.9
    rig.handle()
    assert not rig.killed
    rig.now = 60.0
    assert rig.core.next_deadline() <= rig.now
    rig.handle()
    assert rig.killed == [0]


def test_long_task_is_reported_as_running_once() -> None:
    rig = started()
    rig.jobs("a")
    assert not rig.progress().started
    rig.now = STARTED_AFTER_S
    rig.handle()
    [report] = rig.progress().started
    assert (report.task_id, report.at) == ("a", 1000.0)
    rig.now = 10.0
    rig.handle()
    assert not rig.progress().started


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
def test_stop_lets_running_tasks_finish_within_the_grace(grace_s: float) -> None:
    rig = started(slots=2, prefetch=1)
    rig.jobs("a", "b", "c")
    rig.read(0)
    rig.read(1)
    rig.handle(Stop(grace_s))
    assert bool(rig.killed) == (grace_s == 0)
    if grace_s:
        rig.done(0)
        assert rig.killed == [0]
        rig.now = grace_s
        rig.handle()
    assert sorted(rig.killed) == [0, 1]
    over = []
    for worker_id in (0, 1):
        rig.die(worker_id)
        over.append(rig.core.is_over)
    assert over == [False, True]
    assert rig.leaves == [Leave("the agent stopped it", failed=False)]
    assert not rig.progress().died


@pytest.mark.parametrize("seed", range(20))
def test_each_task_is_answered_once_in_random_runs(seed: int) -> None:
    """Random reads, deaths, cancels and pauses: each task ends or dies exactly once, and no more than one dies at a
    time."""
    rng = random.Random(seed)
    rig = started(slots=3, prefetch=4)
    started_workers = set(rig.workers)
    names = [f"t{number}" for number in range(300)]
    answered: collections.Counter[str] = collections.Counter()
    waiting = list(names)
    for _ in range(20_000):
        rig.now += rng.choice([0.0, 0.001, 0.03])
        match rng.randrange(6):
            case 0 if waiting:
                batch, waiting = waiting[:20], waiting[20:]
                rig.jobs(*batch, function=f"h{rng.randrange(5)}")
            case 1 | 2 | 3:
                for worker_id, worker in list(rig.workers.items()):
                    if worker_id not in started_workers:
                        started_workers.add(worker_id)
                        rig.handle(ready(worker_id))
                    if worker.running or worker.ahead:
                        rig.done(worker_id)
            case 4 if rng.random() < 0.1:
                worker_id = rng.choice(list(rig.workers))
                if rig.workers[worker_id].running is None and rig.workers[worker_id].ahead:
                    rig.read(worker_id)
                rig.die(worker_id)
            case 5:
                rig.handle(CancelTasks((rng.choice(names),)))
        rig.handle()
        for worker_id in rig.killed:
            if worker_id in rig.workers:
                rig.die(worker_id)
        rig.killed.clear()
        progress = rig.progress()
        assert len(progress.died) <= 3
        answered.update(finished.task_id for finished in progress.finished)
        answered.update(died.task_id for died in progress.died)
        if len(answered) == len(names):
            break
    assert set(answered) == set(names)
    assert set(answered.values()) == {1}


def jobs_of(submitter: str, count: int, *, first: int = 0, payer: str = "") -> TasksReceived:
    names = [f"{submitter}{number}" for number in range(first, first + count)]
    orders = [TaskOrder(name, 1, "h", 0, submitter=submitter, payer=payer) for name in names]
    return TasksReceived([Job(order, b"body", b"p") for order in orders])


class SharedRig(Rig):
    """A manager with tasks of several submitters. Its workers start and die at once."""

    def __init__(self, *, slots: int, prefetch: int = 0) -> None:
        super().__init__(slots=slots, prefetch=prefetch)
        self.submitters: dict[int, str] = {}
        self.started: set[int] = set()
        self.settle()

    def _perform(self, action: Action) -> list[Event]:
        if isinstance(action, Launch):
            self.submitters[action.worker_id] = action.submitter
        if isinstance(action, Send):
            assert {order.submitter for order in action.packet.orders} == {self.submitters[action.worker_id]}
        return super()._perform(action)

    def settle(self, *events: Event) -> list[str]:
        """The submitters of the workers, once none of them starts or dies."""
        self.handle(*events)
        while True:
            idle = [
                number
                for number, worker in self.workers.items()
                if worker.packets and not (worker.claims or worker.running)
            ]
            starting = self.workers.keys() - self.started
            if not (idle or starting or self.killed):
                break
            for worker_id in starting:
                self.started.add(worker_id)
                self.handle(ready(worker_id))
            for worker_id in idle:
                self._step(worker_id)
            while self.killed:
                self.die(self.killed.pop())
        return sorted(self.submitters[worker_id] for worker_id in self.workers)

    def die(self, worker_id: int, *, reason: str = "exit code 1") -> None:
        self.started.discard(worker_id)
        super().die(worker_id, reason=reason)

    def submitters_at_work(self) -> set[str]:
        """Whose tasks workers have."""
        busy = (number for number, worker in self.workers.items() if worker.running or worker.ahead)
        return {self.submitters[number] for number in busy}

    def finish_one(self, submitter: str) -> None:
        """A worker of this submitter ends the task that it runs."""
        busy = [number for number, worker in self.workers.items() if worker.running or worker.ahead]
        self.done(next(worker_id for worker_id in busy if self.submitters[worker_id] == submitter))
        self.settle()


def test_a_worker_serves_one_submitter() -> None:
    rig = SharedRig(slots=2)
    assert rig.settle() == ["", ""]
    assert rig.settle(jobs_of("a", 1)) == ["", "a"]
    rig.finish_one("a")
    assert rig.settle(jobs_of("b", 2)) == ["b", "b"]  # neither had anything to do
    assert rig.settle(jobs_of("b", 2)) == ["b", "b"]
    assert not rig.progress().died


def test_a_manager_that_stops_does_not_look_for_places_any_more() -> None:
    """A deadline in the past would keep a core busy until its workers have ended."""
    rig = SharedRig(slots=1)
    for rig.now, submitter in ((0.0, "a"), (0.1, "b")):
        rig.handle(jobs_of(submitter, 1))
        rig.settle()
    assert rig.core.next_deadline() < 1.5
    rig.handle(Stop(10.0))
    for rig.now in (2.0, 3.0):
        rig.handle()
        assert rig.core.next_deadline() > rig.now


def test_shared_workers_serve_all_submitters() -> None:
    rig = Rig()
    rig.core = ManagerCore(slots=1, prefetch=PrefetchPolicy(horizon_s=1.0, limit=0), shared_workers=True)
    rig.start_all()
    rig.handle(jobs_of("a", 5))
    rig.handle(jobs_of("b", 1))
    assert [rig.done() for _ in range(6)] == ["a0", "b0", "a1", "a2", "a3", "a4"]
    assert rig.killed == []


def test_a_node_without_isolation_runs_tasks_of_the_owner_only() -> None:
    rig = Rig()
    rig.core = ManagerCore(
        slots=1, prefetch=PrefetchPolicy(horizon_s=1.0, limit=0), refusal="bubblewrap: not installed"
    )
    rig.start_all()
    rig.handle(jobs_of("", 1))
    rig.handle(jobs_of("a", 1))
    [refused] = rig.progress().finished
    assert refused.task_id == "a0"
    assert refused.error is not None
    assert refused.error["code"] == "ISOLATION_MISSING"
    assert "bubblewrap: not installed" in refused.error["message"]
    assert rig.done() == "0"


@pytest.mark.parametrize(("submitter", "is_killed"), [("a", True), ("", False)])
def test_a_result_that_its_worker_should_have_refused_is_its_death(submitter: str, is_killed: bool) -> None:
    rig = SharedRig(slots=1)
    rig.settle(jobs_of(submitter, 1))
    [worker_id] = rig.workers
    rig.read(worker_id)
    rig.handle(done(worker_id, f"{submitter}0", duration_s=0.0, result=bytes(MAX_PAYLOAD_BYTES + 1)))
    assert (worker_id in rig.killed) is is_killed


@pytest.mark.parametrize("prefetch", [0, 30])
def test_submitters_share_the_workers_of_a_node(prefetch: int) -> None:
    """Each worker is kept for a turn at least; what it has not started goes back."""
    rig = SharedRig(slots=4, prefetch=prefetch)
    assert rig.settle(jobs_of("a", 1000)) == ["a", "a", "a", "a"]
    assert rig.settle(jobs_of("b", 1000)) == ["a", "a", "a", "a"]
    rig.now += TURN_S
    for _ in range(4):
        rig.finish_one("a")
    assert rig.settle() == ["a", "a", "b", "b"]
    rig.now += 10 * TURN_S
    for _ in range(4):
        rig.finish_one("a")
        rig.finish_one("b")
    assert rig.settle() == ["a", "a", "b", "b"]
    assert not rig.progress().died


def test_service_accounts_of_one_payer_have_the_workers_of_one_submitter() -> None:
    rig = SharedRig(slots=4)
    for number in range(4):
        rig.settle(jobs_of(f"m{number}", 1000, payer="m"))
    assert rig.settle() == ["m0", "m0", "m0", "m0"]
    rig.settle(jobs_of("b", 1000))
    shares = []
    for _ in range(40):
        rig.now += TURN_S
        for submitter in rig.settle():
            if submitter in rig.settle():
                rig.finish_one(submitter)
        shares.append("".join(each[0] for each in rig.settle()))
    assert set(shares[2:]) == {"bbmm"}, "half of the workers, not one in five"
    assert {name[:2] for name in rig.settle()} <= {"b", "m0", "m1", "m2", "m3"}


def test_service_accounts_of_one_payer_take_turns_as_one_submitter_at_shared_workers() -> None:
    rig = Rig()
    rig.core = ManagerCore(slots=1, prefetch=PrefetchPolicy(horizon_s=1.0, limit=0), shared_workers=True)
    rig.start_all()
    for name in ("x", "y", "z"):
        rig.handle(jobs_of(name, 2, payer="m"))
    rig.handle(jobs_of("b", 3))
    assert [rig.done() for _ in range(9)] == ["x0", "b0", "x1", "b1", "y0", "b2", "y1", "z0", "z1"]
    assert rig.killed == []


def test_a_worker_never_runs_tasks_of_two_accounts_of_one_payer() -> None:
    rig = SharedRig(slots=1)
    for _ in range(3):
        rig.settle(jobs_of("x", 2, payer="m"), jobs_of("y", 2, payer="m"))
        for _ in range(4):
            rig.now += TURN_S
            [submitter] = rig.settle()
            rig.finish_one(submitter)  # the rig checks whose tasks a worker gets
    assert rig.progress().finished


@pytest.mark.parametrize(("duration_s", "after"), [(0.6, "b"), (0.01, "a")])
def test_a_task_that_would_overrun_the_turn_does_not_start_before_a_submitter_without_worker(
    duration_s: float, after: str
) -> None:
    rig = SharedRig(slots=1)
    rig.settle(jobs_of("a", 100))
    [worker_id] = rig.workers
    rig.read(worker_id)
    rig.now += duration_s
    rig.settle(jobs_of("b", 1))
    rig.done(worker_id, duration_s=duration_s)
    assert rig.settle() == [after]


def test_the_odd_worker_changes_sides_once_in_a_turn() -> None:
    rig = SharedRig(slots=3)
    rig.settle(jobs_of("a", 1000))
    rig.settle(jobs_of("b", 1000))
    shares = []
    for _ in range(30):
        rig.now += TURN_S / 2
        for submitter in "ab":
            for _ in range(3):
                if submitter in rig.settle():
                    rig.finish_one(submitter)
        shares.append("".join(rig.settle()))
    assert set(shares[2:]) == {"aab", "abb"}
    assert 8 < shares.count("aab") < 22
    assert max(rig.workers) < 30  # so few workers were started


def test_more_submitters_than_workers_get_their_turns_one_after_another() -> None:
    rig = SharedRig(slots=1)
    for submitter in "abc":
        rig.settle(jobs_of(submitter, 100))
    turns = []
    for _ in range(9):
        turns += rig.settle()
        rig.now += TURN_S
        rig.finish_one(turns[-1])
    assert [turns[3 * number : 3 * number + 3] for number in range(3)] == [["a", "b", "c"]] * 3


def test_the_first_worker_with_nothing_to_run_yields() -> None:
    rig = SharedRig(slots=2)
    rig.settle(jobs_of("a", 10))
    for worker_id in rig.workers:
        rig.read(worker_id)
    rig.now += TURN_S
    assert rig.settle(jobs_of("b", 1)) == ["a", "a"]  # one is to yield after its task
    last = max(rig.workers)
    rig.done(last)
    assert rig.settle() == ["a", "b"]
    assert last not in rig.workers


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("other", ["b", ""])
def test_a_submitter_whose_tasks_end_their_workers_takes_turns(slots: int, other: str) -> None:
    rig = SharedRig(slots=slots)
    rig.settle(jobs_of("a", 40))
    rig.settle(jobs_of(other, 1))
    for turn in range(3 * slots):
        if other in rig.submitters_at_work():
            break
        assert turn < 2 * slots, "the other submitter waits for the whole backlog"
        dying = next(number for number, worker in rig.workers.items() if worker.running or worker.ahead)
        rig.read(dying)
        rig.die(dying)
        rig.settle()
    assert other in rig.submitters_at_work()


def test_no_worker_yields_to_a_cancelled_task() -> None:
    rig = SharedRig(slots=1)
    rig.settle(jobs_of("a", 3))
    rig.read(*rig.workers)
    rig.now += TURN_S
    rig.settle(jobs_of("b", 1))
    rig.settle(CancelTasks(("b0",)))
    rig.finish_one("a")
    assert rig.settle() == ["a"]


@pytest.mark.parametrize("seed", range(10))
def test_tasks_of_several_submitters_are_answered_once_in_random_runs(seed: int) -> None:
    rng = random.Random(seed)
    rig = SharedRig(slots=3, prefetch=4)
    answered: collections.Counter[str] = collections.Counter()
    sent: set[str] = set()
    while len(sent) < 600 or answered.keys() != sent:
        rig.now += rng.choice([0.0, 0.001, 0.03, 0.6])
        if len(sent) < 600:
            jobs = jobs_of(rng.choice("abcde"), rng.choice([1, 20]), first=len(sent))
            sent.update(job.order.task_id for job in jobs.jobs)
            rig.settle(jobs)
        for worker_id in list(rig.workers):
            worker = rig.workers.get(worker_id)
            if worker is not None and (worker.running or worker.ahead):
                if rng.random() < 0.02:
                    rig.die(worker_id)
                else:
                    rig.done(worker_id)
                rig.settle()
        if rng.random() < 0.1:
            rig.settle(ReturnTasks(tuple(rng.sample(sorted(sent), k=min(len(sent), 9)))))
        progress = rig.progress()
        answered.update([each.task_id for each in progress.finished] + [each.task_id for each in progress.died])
        answered.update(progress.returned)
        assert rig.now < 10_000, "some tasks are never run"
    assert set(answered) == sent
    assert set(answered.values()) == {1}


# -- workers that do not start -----------------------------------------------------------------------------------------


class FailingStarts:
    """A manager's core whose workers die before they are ready, a moment after each launch."""

    def __init__(self, *, slots: int) -> None:
        self.core = ManagerCore(slots=slots, prefetch=PrefetchPolicy(horizon_s=0.0, limit=0))
        self.now = 0.0
        self.launches = 0
        self.problem = ""
        self.leaves: list[Leave] = []

    def handle(self, *events: Event) -> list[Launch]:
        actions = self.core.handle(events, Instant(self.now, self.now))
        self.leaves += [action for action in actions if isinstance(action, Leave)]
        self.problem = next((each.progress.problem for each in actions if isinstance(each, Report)), self.problem)
        return [action for action in actions if isinstance(action, Launch)]

    def round(self, *, ready_workers: int = 0) -> None:
        """Let the workers of one round be launched; all but the first few of them die."""
        while not (launched := self.handle()):
            self.now = self.core.next_deadline()
        self.launches += len(launched)
        for launch in launched[:ready_workers]:
            self.handle(ready(launch.worker_id))
        self.handle(
            *[
                WorkerDied(each.worker_id, 0, "exit code 1", "", "no such directory")
                for each in launched[ready_workers:]
            ]
        )


@pytest.mark.parametrize("slots", [1, 64])
def test_a_manager_gives_up_when_no_worker_starts_in_six_rounds(slots: int) -> None:
    manager = FailingStarts(slots=slots)
    for _ in range(6):
        assert not manager.leaves
        manager.round()
    assert manager.core.is_over
    [leave] = manager.leaves
    assert leave.failed
    assert "no such directory" in leave.reason
    assert manager.launches == 6 * slots


def test_a_manager_with_a_worker_does_not_give_up() -> None:
    manager = FailingStarts(slots=2)
    manager.round(ready_workers=1)
    for _ in range(2000):  # hours
        manager.round()
    assert not manager.leaves
    assert "no such directory" in manager.problem


def test_full_agent_holds_back_results_and_new_starts() -> None:
    """At most a window of results is on its way, and a result more; what is ordered ahead is taken back."""
    rig = started(slots=2, prefetch=4)
    rig.handle(ResultsTaken(0, 100))
    rig.jobs(*"abcdefgh")
    rig.read(0), rig.read(1)
    assert rig.workers[0].ahead, "some are ordered ahead"
    rig.done(0, result=b"x" * 60)
    rig.done(1, result=b"y" * 60)
    first, results = rig.take()
    assert ([len(result) for result in results], len(first.finished)) == ([60, 60], 2)
    assert not rig.workers[0].ahead
    assert not rig.workers[1].ahead
    rig.done(0, result=b"z" * 60)  # it had begun when the second one ended
    rig.done(1, result=b"z" * 60)
    with pytest.raises(AssertionError, match="nothing to start"):
        rig.read(0)
    assert not rig.reports
    rig.now += 1.0
    rig.handle()
    [heartbeat] = rig.reports
    assert heartbeat.progress.finished == (), "a heartbeat brings no results"
    rig.die(1)
    assert len(rig.reports) == 2, "other reports pass"
    rig.handle(ready(2))
    rig.take()
    rig.handle(ResultsTaken(60, 100))
    second, results = rig.take()
    assert [bytes_of(results[each.result or 0]) for each in second.finished] == [b"z" * 60]
    assert not rig.workers[0].ahead, "it is full again"
    rig.handle(ResultsTaken(120, 100))
    third, results = rig.take()
    assert [bytes_of(results[each.result or 0]) for each in third.finished] == [b"z" * 60]
    rig.handle(ResultsTaken(60, 100))
    reported = [each.task_id for each in (first.finished + second.finished + third.finished)]
    rest = [rig.done(0), rig.done(2), rig.done(0), rig.done(2)]
    assert sorted(reported + rest) == sorted("abcdefgh"), "each runs once"


def test_output_goes_with_its_result_within_the_window() -> None:
    rig = started(slots=2)
    rig.handle(ResultsTaken(0, 10))
    rig.jobs("a", "b", "c")
    bodies: list[tuple[bytes, bytes]] = []
    for worker_id, name in ((0, "a"), (1, "b")):
        packet = Done(name, 0.0, 0.001, None, None, Printed(3, 1, 30, 1))
        rig.handle(PacketsReceived(worker_id, [(packet, b"result" + name.encode() + b"out!")]))
    for taken in (0, 11):
        rig.handle(ResultsTaken(taken, 10))
        for report in rig.reports:
            for each in report.progress.finished:
                assert each.result is not None
                assert each.output is not None
                assert each.printed == Printed(3, 1, 30, 1)
                bodies.append((bytes(bytes_of(report.results[each.result])), bytes(report.results[each.output])))  # type: ignore[arg-type]
        rig.reports.clear()
        assert len(bodies) == (1 if taken == 0 else 2)
    assert bodies == [(b"resulta", b"out!"), (b"resultb", b"out!")]


@pytest.mark.parametrize("printed", [Printed(5, 0, 5, 0), Printed(2, 0, 1, 0), Printed(0, 3, 0, 2)])
def test_output_with_lengths_that_cannot_be_ends_the_worker(printed: Printed) -> None:
    rig = started()
    rig.jobs("a")
    rig.handle(PacketsReceived(0, [(Done("a", 0.0, 0.001, None, None, printed), b"four")]))
    assert rig.killed == [0]
    assert not rig.progress().finished


def test_output_is_read_of_the_running_task_of_a_worker_only() -> None:
    rig = started(prefetch=4)
    rig.jobs("a", "b")
    wanted = {name: WantedOutput(name, 1, 0, 0) for name in "ab"}
    request = ReadOutput("r", tuple(wanted.values()), 100)
    assert rig.handle(request) == [ReadStreams("r", 100, [(wanted["a"], 0, True), (wanted["b"], None, True)])]
    rig.done(0)
    assert rig.handle(request) == [ReadStreams("r", 100, [(wanted["a"], None, True), (wanted["b"], 0, True)])]
    # In one turn with the end of the task: the agent hears of that first.
    rig.read()
    actions = rig.core.handle([request, done(0, "b")], Instant(rig.now, 1000.0))
    assert [type(action) for action in actions] == [Report, ReadStreams]
    assert actions[1] == ReadStreams("r", 100, [(wanted["a"], None, True), (wanted["b"], None, True)])


def test_a_manager_that_ends_reports_what_it_holds() -> None:
    rig = started(slots=2)
    rig.handle(ResultsTaken(0, 10))
    rig.jobs("a", "b")
    rig.take()
    rig.done(0, result=b"x" * 60)
    assert rig.take()[1] == [b"x" * 60]
    rig.done(1, result=b"y" * 60)
    assert not rig.reports
    rig.handle(Stop(0.0))
    assert rig.take()[1] == [b"y" * 60]


# -- workers that send what no worker sends ----------------------------------------------------------------------------


@pytest.mark.parametrize("event", [done(0, "b"), MalformedReceived(0, "no packet")])
def test_a_worker_that_sends_invalid_messages_is_killed(event: Event) -> None:
    rig = started(prefetch=1)
    rig.jobs("a", "b")
    rig.read()
    [kill] = [action for action in rig.handle(event) if isinstance(action, Kill)]
    assert kill.reason
    rig.die(0)
    assert [died.task_id for died in rig.progress().died] == ["a"]


@pytest.mark.parametrize("event", [done(0, "b"), MalformedReceived(0, "no packet")])
def test_a_worker_that_sends_an_invalid_message_and_ends_at_once_is_not_killed(event: Event) -> None:
    rig = started(prefetch=1)
    rig.jobs("a", "b")
    rig.read()
    actions = rig.handle(event, WorkerDied(0, 1, "killed by SIGKILL"))
    assert not any(isinstance(action, Kill | Recall) for action in actions)
    assert [died.task_id for died in rig.progress().died] == ["a"]


def test_the_first_report_of_held_memory_counts_and_only_for_the_running_task() -> None:
    rig = started(prefetch=1)
    options = TaskOptions(memory_bytes=1)
    jobs = [Job(TaskOrder(name, 1, "h", 0, options), b"body", b"p") for name in "ab"]
    rig.handle(TasksReceived(jobs))
    rig.read()
    packets = [(Begun("b", {1: 1}), b""), (Begun("a", {1: 2}), b""), (Begun("a", {1: 3}), b"")]
    rig.handle(PacketsReceived(0, packets))
    [(worker_id, order, begun)] = rig.core.limited()
    assert order is not None
    assert (worker_id, order.task_id, begun) == (0, "a", Begun("a", {1: 2}))
    rig.done()
    [(_, order, begun)] = rig.core.limited()
    assert order is not None
    assert (order.task_id, begun) == ("b", None)


@pytest.mark.parametrize(
    ("event", "leaves"), [(Terminated("a signal"), [Leave("a signal", failed=False)]), (AgentLost(), [])]
)
def test_the_last_message_is_for_a_live_agent_only(event: Event, leaves: list[Leave]) -> None:
    rig = started()
    rig.handle(event)
    assert rig.killed == [0]
    rig.die(0)
    rig.handle()
    assert rig.core.is_over
    assert rig.leaves == leaves


@pytest.mark.parametrize("shared", [False, True])
def test_a_worker_is_given_what_its_socket_has_room_for(shared: bool) -> None:
    latency = LatencyTasks(Controller(QosSettings()), workers={}, most_workers=0, shared=shared)
    queue = TaskQueue(shared=shared, latency=latency)
    jobs = [Job(TaskOrder(name, 1, "h", 0), b"", b"x" * 1000) for name in "abcd"]
    others = [Job(TaskOrder("o", 1, "h", 0, submitter="other"), b"", b"")]
    queue.add([*jobs[:2], *others, *jobs[2:]], "")
    pair = Pair("", "")
    assert queue.take(pair, 3, room_bytes=-1) == []
    assert queue.take(pair, 0, room_bytes=10**6) == []
    assert queue.take(pair, 2, room_bytes=10**4)[0] == jobs[0]
    taken = queue.take(pair, 9, room_bytes=orders.unread_bytes(jobs[0]))
    assert len(taken) == 2, "the last one may exceed the room"
    assert len(queue) == 1


def test_idle_workers_cost_a_turn_nothing() -> None:
    """Calls of Python functions for each task, which hold on any machine; before environments there were 135."""
    rig = started(slots=4)
    rig.jobs("first")
    rig.done()
    core, calls = rig.core, 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    job = Job(TaskOrder("next", 1, "h", 0), b"body", b"payload")
    turns: list[list[Event]] = [[TasksReceived([job])], [done(0, "next")], [ResultsTaken(1, 1 << 24)]]
    sys.setprofile(count)
    try:
        for turn in turns:
            core.handle(turn, Instant(rig.now, 0.0))
            core.next_deadline()
    finally:
        sys.setprofile(None)
    assert calls < 120
