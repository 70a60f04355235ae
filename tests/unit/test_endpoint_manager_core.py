"""What a manager decides, against workers that exist only here."""

from __future__ import annotations

import collections
import random

import pytest

from farcall_common.errors import ErrorRecord
from farcall_common.task_options import TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.manager.core import STARTED_AFTER_S, Action, Job, Kill, Launch, ManagerCore, Recall, Send
from farcall_endpoint.prefetch import PrefetchPolicy
from farcall_endpoint.protocol import Progress, TaskOrder
from farcall_endpoint.shared_memory import bytes_of
from farcall_endpoint.worker.channel import Done, Order, Run, Sync


class Worker:
    """What a worker's process does with its channel: packets that it has not read, the one that it is at, claims."""

    def __init__(self) -> None:
        self.packets: collections.deque[Run | Sync] = collections.deque()
        self.orders: collections.deque[Order] = collections.deque()
        self.claims = 0
        self.running: Order | None = None
        self.known: set[str] = set()
        self.synced = 0

    @property
    def ahead(self) -> list[str]:
        """What it will start, in order."""
        orders = [*self.orders, *(o for packet in self.packets if isinstance(packet, Run) for o in packet.orders)]
        return [order.task_id for order in orders[len(orders) - self.claims :]]

    def step(self) -> bool:
        """Start the next task; False when there is none."""
        assert self.running is None
        while True:
            while self.orders:
                order = self.orders.popleft()
                if self.claims:
                    self.claims -= 1
                    assert order.function_hash in self.known
                    self.running = order
                    return True
            if not self.packets:
                return False
            packet = self.packets.popleft()
            if isinstance(packet, Sync):
                self.synced += 1
                continue
            if packet.forget:
                self.known.clear()
            self.known.update(function_hash for function_hash, _ in packet.functions)
            self.orders.extend(packet.orders)


class Rig:
    """A manager's shell without processes."""

    def __init__(self, *, slots: int = 1, prefetch: int = 0, batching: bool = True) -> None:
        policy = PrefetchPolicy(horizon_s=1.0, limit=prefetch, unseen=prefetch)
        self.core = ManagerCore(slots=slots, prefetch=policy, batching=batching)
        self.now = 0.0
        self.workers: dict[int, Worker] = {}
        self.killed: list[int] = []

    def jobs(self, *names: str, walltime_s: float | None = None, function: str = "h") -> None:
        options = TaskOptions(walltime_s=walltime_s)
        self.core.run([Job(TaskOrder(name, 1, function, 0, options), b"body", b"payload") for name in names])

    def pump(self) -> list[Action]:
        everything: list[Action] = []
        while actions := self.core.pump(now=self.now, epoch=1000.0 + self.now):
            everything += actions
            for action in actions:
                self._perform(action)
        return everything

    def _perform(self, action: Action) -> None:
        match action:
            case Launch(worker_id=worker_id):
                self.workers[worker_id] = Worker()
            case Send(worker_id=worker_id, packet=packet):
                self.workers[worker_id].packets.append(packet)
                self.workers[worker_id].claims += len(packet.orders)
            case Recall(worker_id=worker_id):
                worker = self.workers[worker_id]
                revoked, worker.claims = worker.claims, 0
                if revoked:
                    worker.packets.append(Sync())
                self.core.recalled(worker_id, revoked)
            case Kill(worker_id=worker_id):
                self.killed.append(worker_id)

    def start_all(self) -> None:
        self.pump()
        for worker_id in list(self.workers):
            self.core.ready(worker_id)
        self.pump()

    def read(self, worker_id: int = 0) -> str:
        """The worker starts its next task, if it has not done so already."""
        worker = self.workers[worker_id]
        if worker.running is None and not self._step(worker_id):
            self.pump()  # it has passed over what was recalled, and gets new ones
            assert self._step(worker_id), "nothing to start"
        assert worker.running is not None
        return worker.running.task_id

    def _step(self, worker_id: int) -> bool:
        worker = self.workers[worker_id]
        began = worker.step()
        for _ in range(worker.synced):
            self.core.synced(worker_id)
        worker.synced = 0
        return began

    def done(self, worker_id: int = 0, *, duration_s: float = 0.001, result: bytes = b"r") -> str:
        """The worker ends its task, after starting one if need be, and goes on to the next packet."""
        worker = self.workers[worker_id]
        self.read(worker_id)
        order, worker.running = worker.running, None
        assert order is not None
        self.core.done(worker_id, Done(order.task_id, 0.0, duration_s), result, now=self.now)
        self._step(worker_id)
        self.pump()
        return order.task_id

    def die(self, worker_id: int, *, reason: str = "exit code 1") -> None:
        revoked = self.workers.pop(worker_id).claims
        self.core.died(worker_id, revoked=revoked, reason=reason, tails=("out", "err"), now=self.now)
        self.pump()

    def progress(self) -> Progress:
        report = self.core.take_progress()
        return report[0] if report else Progress()


def started(*, slots: int = 1, prefetch: int = 0) -> Rig:
    rig = Rig(slots=slots, prefetch=prefetch)
    rig.start_all()
    return rig


def test_workers_are_started_at_once_and_get_tasks_when_ready() -> None:
    rig = Rig(slots=2)
    rig.jobs("a", "b", "c")
    assert rig.pump() == [Launch(0, 0), Launch(1, 1)]
    rig.core.ready(1)
    rig.pump()
    assert rig.workers[1].ahead == ["a"]
    assert not rig.workers[0].ahead


def test_a_new_worker_gets_the_slot_of_the_one_that_died() -> None:
    rig = started(slots=3)
    rig.jobs("a")
    rig.pump()
    rig.workers.pop(1)
    rig.core.died(1, revoked=0, reason="exit code 1", tails=("", ""), now=0.0)
    assert Launch(3, 1) in rig.pump()


def test_results_are_reported_with_their_bytes() -> None:
    rig = started()
    rig.jobs("a")
    rig.pump()
    rig.done()
    report = rig.core.take_progress()
    assert report is not None
    [finished] = report[0].finished
    assert (finished.task_id, finished.state, finished.result) == ("a", TaskState.SUCCESS, 0)
    assert report[1] == [b"r"]
    assert rig.core.take_progress() is None


def test_a_function_travels_once_to_each_worker() -> None:
    rig = started()
    rig.jobs("a", "b")
    [send] = [action for action in rig.pump() if isinstance(action, Send)]
    assert send.packet.functions == (("h", 4),)
    rig.read()
    rig.workers[0].running = None
    rig.core.done(0, Done("a", 0.0, 0.1), b"r", now=0.0)
    [send] = [action for action in rig.pump() if isinstance(action, Send)]
    assert send.packet.functions == ()


def test_a_worker_forgets_functions_before_it_holds_too_many() -> None:
    rig = started()
    for number in range(300):
        rig.jobs("t", function=f"h{number}")
        rig.pump()
        rig.done()
    assert len(rig.workers[0].known) < 260
    rig.jobs("again", function="h0")
    rig.pump()
    assert rig.done() == "again"


def test_pipelining_follows_the_policy_and_shares_fairly() -> None:
    rig = started(slots=2, prefetch=3)
    rig.jobs(*"abcdef")
    rig.pump()
    assert {worker_id: len(worker.ahead) for worker_id, worker in rig.workers.items()} == {0: 3, 1: 3}


def test_nobody_works_ahead_while_another_has_nothing() -> None:
    rig = started(slots=4, prefetch=9)
    rig.jobs(*"abcde")
    rig.pump()
    assert sorted(len(worker.ahead) for worker in rig.workers.values()) == [1, 1, 1, 2]


@pytest.mark.parametrize(("batching", "packets"), [(True, 1), (False, 6)])
def test_tasks_for_the_same_worker_share_a_packet(batching: bool, packets: int) -> None:
    rig = Rig(prefetch=5, batching=batching)
    rig.start_all()
    rig.jobs(*"abcdef")
    assert len(rig.pump()) == packets
    assert rig.workers[0].ahead == list("abcdef")


def test_large_payloads_travel_alone_and_few_at_a_time() -> None:
    rig = started(prefetch=100)
    rig.core.run([Job(TaskOrder(str(number), 1, "h", 0), b"body", bytes(1_000_000)) for number in range(9)])
    sends = [action for action in rig.pump() if isinstance(action, Send)]
    assert [len(send.packet.orders) for send in sends] == [1] * len(sends)
    assert len(sends) < 5


def test_what_waits_behind_a_slow_task_is_recalled_and_keeps_its_place() -> None:
    rig = started(slots=2, prefetch=3)
    rig.jobs(*"abcdef")
    rig.pump()
    rig.read(0)
    rig.now = 0.009
    rig.done(1)
    rig.now = 0.015
    behind = rig.workers[0].ahead
    deadline = rig.core.next_deadline()
    assert deadline is not None
    assert deadline <= rig.now
    rig.pump()
    assert not rig.workers[0].ahead
    assert [rig.done(1) for _ in range(4)] == ["e", "f", *behind]


def test_a_worker_gets_nothing_new_before_it_has_passed_over_what_was_recalled() -> None:
    rig = started(prefetch=3)
    rig.jobs(*"abc")
    rig.pump()
    rig.read()
    rig.now = 0.02
    rig.pump()
    worker = rig.workers[0]
    worker.running = None
    rig.core.done(0, Done("a", 0.0, 0.02), b"r", now=rig.now)
    rig.pump()
    assert not worker.ahead
    assert not worker.step()
    assert worker.synced == 1
    rig.core.synced(0)
    rig.pump()
    assert worker.ahead == ["b", "c"]


def test_a_worker_that_was_between_two_tasks_when_they_were_recalled_gets_new_ones() -> None:
    rig = started(prefetch=3)
    rig.jobs(*"abc")
    rig.pump()
    rig.now = 0.02  # it was held up before it could start anything
    rig.pump()
    assert not rig.workers[0].step()
    rig.core.synced(0)
    rig.pump()
    assert [rig.done() for _ in range(3)] == list("abc")


def test_a_breach_of_a_limit_ends_the_running_task_with_its_record() -> None:
    rig = started(prefetch=1)
    rig.jobs("a", "b")
    rig.pump()
    rig.read()
    rig.core.breached(0, "b", ErrorRecord("TOO_MUCH", "of it"))  # not what runs: too late, or too early
    rig.core.breached(0, "a", ErrorRecord("TOO_MUCH", "of it"))
    rig.pump()
    assert rig.killed == [0]
    rig.die(0)
    [finished] = rig.progress().finished
    assert finished.error is not None
    assert (finished.task_id, finished.error["code"]) == ("a", "TOO_MUCH")
    assert (finished.error["stdout_tail"], finished.error["stderr_tail"]) == ("out", "err")


def test_cancel_of_waiting_pipelined_and_running_tasks() -> None:
    rig = started(prefetch=1)
    rig.jobs("running", "piped", "waiting")
    rig.pump()
    rig.read()
    rig.core.cancel(["piped", "waiting", "unknown"])
    rig.pump()
    assert {f.task_id: f.state for f in rig.progress().finished} == dict.fromkeys(
        ["piped", "waiting"], TaskState.CANCELLED
    )
    assert not rig.killed
    rig.core.cancel(["running"])
    rig.pump()
    assert rig.killed == [0]
    rig.die(0, reason="killed by SIGKILL")
    [finished] = rig.progress().finished
    assert finished.state is TaskState.CANCELLED
    assert not rig.progress().died


def test_a_result_that_beats_the_kill_wins() -> None:
    rig = started()
    rig.jobs("a")
    rig.pump()
    rig.read()
    rig.core.cancel(["a"])
    rig.pump()
    rig.done()
    rig.die(0)
    [finished] = rig.progress().finished
    assert finished.state is TaskState.SUCCESS


def test_walltime_counts_from_the_start_of_the_task() -> None:
    rig = started(prefetch=1)
    rig.jobs("a")
    rig.jobs("b", walltime_s=1.0)
    rig.pump()
    rig.now = 5.0
    rig.done(duration_s=5.0)
    rig.pump()
    rig.read()
    rig.now = 5.9
    rig.pump()
    assert not rig.killed
    rig.now = 6.0
    rig.pump()
    assert rig.killed == [0]
    rig.die(0)
    finished = rig.progress().finished[-1]
    assert finished.error is not None
    assert finished.error["code"] == "WALLTIME_EXCEEDED"
    assert finished.error["stderr_tail"] == "err"


def test_a_death_names_the_one_task_that_ran_and_reassigns_the_rest() -> None:
    rig = started(prefetch=2)
    rig.jobs(*"abc")
    rig.pump()
    rig.read()
    rig.die(0, reason="killed by SIGSEGV")
    progress = rig.progress()
    assert [(died.task_id, died.reason, died.stderr_tail) for died in progress.died] == [
        ("a", "killed by SIGSEGV", "err")
    ]
    assert not progress.finished
    [worker_id] = rig.workers
    rig.core.ready(worker_id)
    rig.pump()
    assert rig.workers[worker_id].ahead == ["b", "c"]


def test_workers_that_do_not_start_are_tried_less_and_less_often_and_the_reason_is_told() -> None:
    rig = Rig()
    waits = []
    for _ in range(5):
        rig.pump()
        [worker_id] = rig.workers
        began = rig.now
        rig.die(worker_id)
        rig.now = rig.core.next_deadline() or 0.0
        waits.append(rig.now - began)
        assert "a worker did not start: exit code 1; err" in rig.core.progress().problem
    assert waits == sorted(waits)
    assert waits[-1] > 1
    rig.start_all()
    assert rig.core.progress().problem == ""


def test_a_worker_that_hangs_at_its_start_is_killed() -> None:
    rig = Rig()
    rig.pump()
    rig.now = rig.core.next_deadline() or 0.0
    rig.pump()
    assert rig.killed == [0]


def test_a_task_that_lasts_is_reported_as_running_once() -> None:
    rig = started()
    rig.jobs("a")
    rig.pump()
    assert not rig.progress().started
    rig.now = STARTED_AFTER_S
    rig.pump()
    [report] = rig.progress().started
    assert (report.task_id, report.at) == ("a", 1000.0)
    rig.now = 10.0
    rig.pump()
    assert not rig.progress().started


@pytest.mark.parametrize("grace_s", [0.0, 5.0])
def test_stop_lets_running_tasks_finish_within_the_grace(grace_s: float) -> None:
    rig = started(slots=2, prefetch=1)
    rig.jobs("a", "b", "c")
    rig.pump()
    rig.read(0)
    rig.read(1)
    rig.core.stop(grace_s=grace_s, now=rig.now)
    rig.pump()
    assert bool(rig.killed) == (grace_s == 0)
    if grace_s:
        rig.done(0)
        assert rig.killed == [0]
        rig.now = grace_s
        rig.pump()
    assert sorted(rig.killed) == [0, 1]
    over = []
    for worker_id in (0, 1):
        rig.die(worker_id)
        over.append(rig.core.is_over)
    assert over == [False, True]
    assert not rig.progress().died


@pytest.mark.parametrize("seed", range(20))
def test_every_task_is_answered_once_whatever_happens(seed: int) -> None:
    """Random reads, deaths, cancels and pauses: each task ends or dies exactly once, and no more than one dies at a
    time."""
    rng = random.Random(seed)
    rig = started(slots=3, prefetch=4)
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
                    rig.core.ready(worker_id)
                    if worker.running or worker.ahead:
                        rig.done(worker_id)
            case 4 if rng.random() < 0.1:
                worker_id = rng.choice(list(rig.workers))
                if rig.workers[worker_id].running is None and rig.workers[worker_id].ahead:
                    rig.read(worker_id)
                rig.die(worker_id)
            case 5:
                rig.core.cancel([rng.choice(names)])
        rig.pump()
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


def test_submitters_take_turns_at_a_manager_too() -> None:
    rig = started()
    rig.core.run([Job(TaskOrder(f"a{number}", 1, "h", 0, submitter="a"), b"body", b"p") for number in range(5)])
    rig.pump()
    rig.core.run([Job(TaskOrder("b0", 1, "h", 0, submitter="b"), b"body", b"p")])
    assert [rig.done() for _ in range(6)] == ["a0", "b0", "a1", "a2", "a3", "a4"]


# -- workers that do not start -----------------------------------------------------------------------------------------


class FailingStarts:
    """A manager's core whose workers die before they are ready, a moment after each launch."""

    def __init__(self, *, slots: int) -> None:
        self.core = ManagerCore(slots=slots, prefetch=PrefetchPolicy(horizon_s=0.0, limit=0))
        self.now = 0.0
        self.launches = 0

    def round(self, *, ready: int = 0) -> None:
        """Let the workers of one round be launched; all but the first few of them die."""
        launched = [action for action in self.core.pump(now=self.now, epoch=self.now) if isinstance(action, Launch)]
        self.launches += len(launched)
        for index, launch in enumerate(launched):
            if index < ready:
                self.core.ready(launch.worker_id)
            else:
                self.core.died(
                    launch.worker_id, revoked=0, reason="exit code 1", tails=("", "no such directory"), now=self.now
                )
        self.now = self.core.next_deadline() or self.now


@pytest.mark.parametrize("slots", [1, 64])
def test_a_manager_gives_up_when_no_worker_starts_in_six_rounds(slots: int) -> None:
    manager = FailingStarts(slots=slots)
    for _ in range(6):
        assert not manager.core.failure
        manager.round()
    assert manager.core.pump(now=manager.now, epoch=0.0) == []
    assert manager.core.is_over
    assert "no such directory" in manager.core.failure
    assert manager.launches == 6 * slots


def test_a_manager_with_a_worker_does_not_give_up() -> None:
    manager = FailingStarts(slots=2)
    manager.round(ready=1)
    for _ in range(2000):  # hours
        manager.round()
    assert not manager.core.failure
    assert "no such directory" in manager.core.progress().problem


def test_results_wait_for_room_at_the_agent_and_nothing_is_started_meanwhile() -> None:
    """At most a window of results is on its way, and a result more; what is ordered ahead is taken back."""
    rig = started(slots=2, prefetch=4)
    rig.core.results_taken(0, window_bytes=100)
    rig.jobs(*"abcdefgh")
    rig.pump()
    rig.read(0), rig.read(1)
    assert rig.workers[0].ahead, "some are ordered ahead"
    rig.done(0, result=b"x" * 60)
    rig.done(1, result=b"y" * 60)
    first, results = rig.core.take_progress() or (Progress(), [])
    assert ([len(result) for result in results], len(first.finished)) == ([60, 60], 2)
    assert not rig.workers[0].ahead
    assert not rig.workers[1].ahead
    rig.done(0, result=b"z" * 60)  # it had begun when the second one ended
    rig.done(1, result=b"z" * 60)
    with pytest.raises(AssertionError, match="nothing to start"):
        rig.read(0)
    assert rig.core.take_progress() is None
    assert rig.core.progress().finished == (), "a sign of life brings no results"
    rig.core.ready(0)
    assert rig.core.take_progress() is not None, "other news passes"
    rig.core.results_taken(60, window_bytes=100)
    rig.pump()
    second, results = rig.core.take_progress() or (Progress(), [])
    assert [bytes_of(results[each.result or 0]) for each in second.finished] == [b"z" * 60]
    assert not rig.workers[0].ahead, "it is full again"
    rig.core.results_taken(120, window_bytes=100)
    rig.pump()
    third, results = rig.core.take_progress() or (Progress(), [])
    assert [bytes_of(results[each.result or 0]) for each in third.finished] == [b"z" * 60]
    rig.core.results_taken(60, window_bytes=100)
    rig.pump()
    reported = [each.task_id for each in (first.finished + second.finished + third.finished)]
    rest = [rig.done(0), rig.done(1), rig.done(0), rig.done(1)]
    assert sorted(reported + rest) == sorted("abcdefgh"), "each runs once"


def test_a_manager_that_ends_reports_what_it_holds() -> None:
    rig = started(slots=2)
    rig.core.results_taken(0, window_bytes=10)
    rig.jobs("a", "b")
    rig.pump()
    rig.done(0, result=b"x" * 60)
    assert rig.core.take_progress() is not None
    rig.done(1, result=b"y" * 60)
    assert rig.core.take_progress() is None
    rig.core.stop(grace_s=0.0, now=0.0)
    report = rig.core.take_progress()
    assert report is not None
    assert report[1] == [b"y" * 60]
