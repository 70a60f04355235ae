"""What a manager decides, against workers that exist only here."""

from __future__ import annotations

import collections
import random

import pytest

from farcall_common.wire import TaskState
from farcall_endpoint.manager.core import STARTED_AFTER_S, Action, Job, Kill, Launch, ManagerCore, Recall, Send
from farcall_endpoint.prefetch import PrefetchPolicy
from farcall_endpoint.protocol import Progress, TaskOrder
from farcall_endpoint.worker.channel import Done, Run


class Rig:
    """A manager's shell without processes: each worker is a list of packets that it has not read."""

    def __init__(self, *, slots: int = 1, prefetch: int = 0) -> None:
        self.core = ManagerCore(slots=slots, prefetch=PrefetchPolicy(horizon_s=1.0, limit=prefetch, unseen=prefetch))
        self.now = 0.0
        self.unread: dict[int, collections.deque[Run]] = {}
        self.running: dict[int, Run | None] = {}
        self.killed: list[int] = []
        self.room = 100
        self.known: dict[int, set[str]] = {}

    def jobs(self, *names: str, walltime_s: float | None = None, function: str = "h") -> None:
        self.core.run([Job(TaskOrder(name, 1, function, 0, walltime_s), b"body", b"payload") for name in names])

    def pump(self) -> list[Action]:
        everything: list[Action] = []
        while actions := self.core.pump(now=self.now, epoch=1000.0 + self.now):
            everything += actions
            for index, action in enumerate(actions):
                self._perform(action, actions[index:])
        return everything

    def _perform(self, action: Action, rest: list[Action]) -> None:
        match action:
            case Launch(worker_id=worker_id):
                self.unread[worker_id] = collections.deque()
                self.running[worker_id] = None
                self.known[worker_id] = set()
            case Send(worker_id=worker_id, packet=packet):
                if len(self.unread[worker_id]) < self.room:
                    self.unread[worker_id].append(packet)
                else:
                    later = [a.packet for a in rest if isinstance(a, Send) and a.worker_id == worker_id]
                    self.core.refused(worker_id, later)
            case Recall(worker_id=worker_id):
                packets = list(self.unread[worker_id])
                self.unread[worker_id].clear()
                self.core.taken_back(worker_id, packets)
                self.core.recalled(worker_id)
            case Kill(worker_id=worker_id):
                self.killed.append(worker_id)

    def start_all(self) -> None:
        self.pump()
        for worker_id in list(self.unread):
            self.core.ready(worker_id)
        self.pump()

    def read(self, worker_id: int = 0) -> Run:
        """The worker takes its next packet; one whose function it lacks goes back."""
        while True:
            packet = self.unread[worker_id].popleft()
            if packet.forget:
                self.known[worker_id].clear()
            if packet.function_bytes:
                self.known[worker_id].add(packet.function_hash)
            if packet.function_hash in self.known[worker_id]:
                self.running[worker_id] = packet
                return packet
            self.core.missing(worker_id, packet.task_id)
            self.pump()

    def done(self, worker_id: int = 0, *, duration_s: float = 0.001) -> str:
        packet = self.running[worker_id] or self.read(worker_id)
        self.running[worker_id] = None
        self.core.done(worker_id, Done(packet.task_id, 0.0, duration_s), b"r", now=self.now)
        self.pump()
        return packet.task_id

    def die(self, worker_id: int, *, reason: str = "exit code 1") -> None:
        self.core.taken_back(worker_id, list(self.unread.pop(worker_id)))
        self.core.died(worker_id, reason=reason, tails=("out", "err"), now=self.now)
        self.pump()

    def progress(self) -> Progress:
        report = self.core.take_progress()
        return report[0] if report else Progress()


def started(**options: int) -> Rig:
    rig = Rig(**options)
    rig.start_all()
    return rig


def test_workers_are_started_at_once_and_get_tasks_when_ready() -> None:
    rig = Rig(slots=2)
    rig.jobs("a", "b", "c")
    assert rig.pump() == [Launch(0), Launch(1)]
    rig.core.ready(1)
    rig.pump()
    assert [packet.task_id for packet in rig.unread[1]] == ["a"]
    assert not rig.unread[0]


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
    rig.pump()
    assert rig.unread[0][0].function_bytes == 4
    rig.done()
    assert rig.unread[0][0].function_bytes == 0


def test_a_worker_forgets_functions_before_it_holds_too_many() -> None:
    rig = started()
    for number in range(300):
        rig.jobs("t", function=f"h{number}")
        rig.pump()
        rig.done()
    assert len(rig.known[0]) < 260
    rig.jobs("again", function="h0")
    rig.pump()
    assert rig.done() == "again"


def test_pipelining_follows_the_policy_and_shares_fairly() -> None:
    rig = started(slots=2, prefetch=3)
    rig.jobs(*"abcdef")
    rig.pump()
    assert {worker: len(packets) for worker, packets in rig.unread.items()} == {0: 3, 1: 3}


def test_what_waits_behind_a_slow_task_is_recalled_and_keeps_its_place() -> None:
    rig = started(slots=2, prefetch=3)
    rig.jobs(*"abcdef")
    rig.pump()
    rig.read(0)
    rig.now = 0.02
    behind = [packet.task_id for packet in rig.unread[0]]
    deadline = rig.core.next_deadline()
    assert deadline is not None
    assert deadline <= rig.now
    rig.pump()
    assert not rig.unread[0]
    ran = [rig.done(1) for _ in range(3)]
    rig.pump()
    assert set(behind) <= set(ran) | {packet.task_id for packet in rig.unread[1]}


def test_a_full_socket_is_tried_again_when_the_worker_has_read() -> None:
    rig = started(prefetch=5)
    rig.room = 2
    rig.jobs(*"abcde")
    rig.pump()
    assert len(rig.unread[0]) == 2
    assert [rig.done() for _ in range(5)] == list("abcde")


def test_a_function_whose_packet_was_recalled_is_sent_again() -> None:
    rig = started(prefetch=1)
    rig.jobs("a")
    rig.jobs("b", function="other")
    rig.pump()
    rig.read()
    lost = rig.unread[0].popleft()  # recalled under the worker's nose, before the next packet of that function
    rig.core.taken_back(0, [lost])
    assert rig.done() == "a"
    assert rig.done() == "b"


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
    [worker_id] = rig.unread
    rig.core.ready(worker_id)
    rig.pump()
    assert [packet.task_id for packet in rig.unread[worker_id]] == ["b", "c"]


def test_workers_that_do_not_start_are_tried_less_and_less_often_and_the_reason_is_told() -> None:
    rig = Rig()
    waits = []
    for _ in range(5):
        rig.pump()
        [worker_id] = rig.unread
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
                for worker_id in list(rig.unread):
                    rig.core.ready(worker_id)
                    if rig.running[worker_id] or rig.unread[worker_id]:
                        rig.done(worker_id)
            case 4 if rng.random() < 0.1:
                worker_id = rng.choice(list(rig.unread))
                if rig.running[worker_id] is None and rig.unread[worker_id]:
                    rig.read(worker_id)
                rig.die(worker_id)
            case 5:
                rig.core.cancel([rng.choice(names)])
        rig.pump()
        for worker_id in rig.killed:
            if worker_id in rig.unread:
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
