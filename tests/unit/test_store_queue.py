"""What every Queue must do. Here on the fake; test_store_queue_valkey runs the same suite on Valkey."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from farcall_common.errors import EndpointInUse, Fenced, QueueDataLost, RightWithdrawn, Unavailable
from farcall_common.qos import QoS
from farcall_common.store import (
    BlobRef,
    CancelOutcome,
    ForwarderInfo,
    PeerKey,
    PeerKind,
    Queue,
    QueuedTask,
    QueuePosition,
    QueueState,
    SharedResults,
    TaskResult,
    TokensTaken,
)
from farcall_common.store.codec import pack
from farcall_common.store.model import (
    FileAnswer,
    FileAsk,
    FileMessage,
    HeldLeases,
    LeasedTask,
    MaintenanceResult,
    OutputAnswer,
    OutputAsk,
    RunningLimit,
)
from farcall_common.task_options import TaskOptions
from farcall_common.wire.messages import OutputPiece, OutputText, OutputWanted
from farcall_common.wire.states import Reporter, TaskState
from tests.support.stores import FakeQueue, single
from tests.task_fields import with_options
from tests.waiting import WAIT_S

LEASE_S = 30.0
TARGET = QoS(target_ms=200)


class Clock:
    """That of a store, epoch seconds; it stands still until a test sets it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_queued(task_id: str = "t1", **changes: Any) -> QueuedTask:
    plain = QueuedTask(task_id, "g1", "alice", "e1", "f1", "hash", b"\x00payload\xff", TaskOptions())
    return msgspec.structs.replace(plain, **with_options(changes))


def backlog(owner_id: str, count: int) -> list[QueuedTask]:
    return [make_queued(f"{owner_id}-{number}", owner_id=owner_id) for number in range(count)]


def with_targets(owner_id: str, count: int) -> list[QueuedTask]:
    return [make_queued(f"{owner_id}-target-{number}", owner_id=owner_id, qos=TARGET) for number in range(count)]


def make_result(task_id: str = "t1", **changes: Any) -> TaskResult:
    plain = TaskResult(task_id, "e1", 1, TaskState.SUCCESS, Reporter.AGENT, result=b"\x00result\xff")
    return msgspec.structs.replace(plain, **changes)


def own(queue: Queue, forwarder_id: str = "w1", *, tasks: Sequence[QueuedTask] = ()) -> int:
    """Become the owner of e1, with these tasks restored from the database."""
    fence = single.claim(queue, "e1", forwarder_id, ttl_s=45)
    queue.restore("e1", fence, tasks, held={}, lease_s=LEASE_S)
    single.mark_restored(queue, "e1", fence)
    return fence


def lease(queue: Queue, fence: int, *, limit: int = 100) -> list[str]:
    leased = single.lease(queue, "e1", fence, limit=limit, lease_s=LEASE_S)
    return [task.task.task_id for task in leased]


def own_endpoint(queue: Queue, endpoint_id: str) -> int:
    """Become the owner of an endpoint without tasks."""
    fence = single.claim(queue, endpoint_id, "w1", ttl_s=45)
    single.mark_restored(queue, endpoint_id, fence)
    return fence


def _kind(answer: object) -> type:
    return dict if isinstance(answer, dict) else type(answer)


def leased_ids(found: Sequence[LeasedTask] | Fenced | QueueDataLost) -> list[str]:
    assert not isinstance(found, Fenced | QueueDataLost)
    return [leased.task.task_id for leased in found]


def recount(queue: Queue) -> None:
    """The whole walk."""
    cursor = queue.recount_bytes(0)
    while cursor:
        cursor = queue.recount_bytes(cursor)


class QueueSuite:
    """Needs the fixtures ``queue``, ``clock`` (that of its server), ``wipe``, ``cut`` and ``forget_results``."""

    # waiting and leasing

    def test_a_leased_task_is_the_one_that_was_queued(self, queue: Queue, clock: Clock) -> None:
        fence = own(queue)
        task = make_queued(
            payload=None,
            payload_ref=BlobRef("k", 3, "s"),
            container="c",
            keep_output=True,
            walltime_s=1.5,
            result_serializers=("a", "b"),
            resource_specification={"cores": 1},
            submitted_at=0.25,
        )
        clock.now = 1.5
        queue.enqueue([task, make_queued("t2")])
        clock.now = 2.5
        first, second = single.lease(queue, "e1", fence, limit=5, lease_s=LEASE_S)
        assert (first.task, second.task) == (task, make_queued("t2"))
        assert (first.attempt, first.enqueued_at, first.leased_at, first.cancel_requested) == (1, 1.5, 2.5, False)

    def test_tasks_leave_oldest_first_and_once(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1"), make_queued("t2")])
        queue.enqueue([make_queued("t2"), make_queued("t3")])
        assert (queue.depth(["e1"]), queue.depth(["e1", "e2"]), queue.depth([])) == (3, 3, 0)
        assert lease(queue, fence, limit=2) == ["t1", "t2"]
        assert lease(queue, fence) == ["t3"]
        assert lease(queue, fence) == []
        assert queue.depth(["e1"]) == 0

    def test_tasks_with_different_options_keep_their_order(self, queue: Queue, clock: Clock) -> None:
        fence = own(queue)
        terms: list[dict[str, Any]] = [{}, {"idempotent": False}, {"max_attempts": 1}, {}, {"idempotent": False}]
        tasks = [make_queued(f"t{number}", **fields) for number, fields in enumerate(terms)]
        assert queue.enqueue([]) == 0
        assert queue.enqueue(tasks[:4]) == 4
        assert queue.enqueue(tasks[2:]) == queue.depth(["e1"]) == 5
        leased = single.lease(queue, "e1", fence, limit=9, lease_s=1)
        assert [each.task for each in leased] == tasks
        clock.now = 9
        again = single.reap(queue, "e1", fence)
        assert {each.task.task_id for each in again} == {"t1", "t2", "t4"}  # they may not start a second time
        assert queue.depth(["e1"]) == 2

    def test_token_bucket_gives_its_tokens_and_refills(self, queue: Queue, clock: Clock) -> None:
        def take(tokens: int, now: float, bucket: str = "alice") -> TokensTaken:
            clock.now = now
            return queue.take_tokens(bucket, tokens, rate_per_s=2, burst=5)

        assert take(3, 100) == TokensTaken(3)
        assert take(3, 100) == TokensTaken(2)
        assert take(1, 100) == TokensTaken(0, 0.5)
        assert take(1, 100.25) == TokensTaken(0, 0.25)
        assert take(1, 100.5) == TokensTaken(1)
        assert take(9, 200) == TokensTaken(5)
        assert take(1, 100, bucket="bob") == TokensTaken(1)

    def test_token_bucket_may_have_debts(self, queue: Queue, clock: Clock) -> None:
        clock.now = 100
        assert queue.take_tokens("alice", 25, rate_per_s=2, burst=5, in_debt=True) == TokensTaken(25)
        assert queue.take_tokens("alice", 1, rate_per_s=2, burst=5) == TokensTaken(0, 10.5)
        assert queue.take_tokens("alice", 0, rate_per_s=2, burst=5) == TokensTaken(0, 10.5)
        clock.now = 105
        assert queue.take_tokens("alice", 2, rate_per_s=2, burst=5, in_debt=True) == TokensTaken(2)
        assert queue.take_tokens("alice", 1, rate_per_s=2, burst=5) == TokensTaken(0, 6.5)
        clock.now = 111.5
        assert queue.take_tokens("alice", 9, rate_per_s=2, burst=5) == TokensTaken(1)
        clock.now = 200
        assert queue.take_tokens("alice", 0, rate_per_s=2, burst=5).wait_s <= 0
        assert queue.take_tokens("alice", 9, rate_per_s=2, burst=5) == TokensTaken(5)

    def test_token_bucket_tolerates_a_clock_set_back(self, queue: Queue, clock: Clock) -> None:
        clock.now = 100
        assert queue.take_tokens("alice", 5, rate_per_s=2, burst=5) == TokensTaken(5)
        clock.now = 90
        assert queue.take_tokens("alice", 1, rate_per_s=2, burst=5) == TokensTaken(0, 0.5)
        clock.now = 101
        assert queue.take_tokens("alice", 5, rate_per_s=2, burst=5) == TokensTaken(2)

    def test_position_of_a_task_is_readable(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued(f"t{n}") for n in range(4)])
        assert queue.position("e1", "t0") == QueuePosition(QueueState.QUEUED, 0, 4, 1)
        assert queue.position("e1", "t3") == QueuePosition(QueueState.QUEUED, 3, 4, 1)
        assert lease(queue, fence, limit=2) == ["t0", "t1"]
        assert queue.position("e1", "t3") == QueuePosition(QueueState.QUEUED, 1, 2, 1)
        assert queue.position("e1", "t0") == QueuePosition(QueueState.LEASED, 0, 2, 1)
        queue.unlease("e1", fence, ["t1"])
        assert queue.position("e1", "t2") == QueuePosition(QueueState.QUEUED, 1, 3, 1)
        single.ack(queue, fence, [make_result("t0")])
        assert queue.position("e1", "t0") == QueuePosition(QueueState.DONE, 0, 3, 1)
        assert queue.position("e1", "unknown") == QueuePosition(QueueState.UNKNOWN, 0, 3, 1)
        assert queue.position("e2", "t3") == QueuePosition(QueueState.UNKNOWN, 0, 0)

    # shares of submitters

    def test_a_single_task_does_not_wait_behind_a_backlog(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue(backlog("alice", 50))
        assert lease(queue, fence, limit=10) == [f"alice-{n}" for n in range(10)]
        queue.enqueue(backlog("bob", 1))
        assert lease(queue, fence, limit=2) == ["bob-0", "alice-10"]
        assert queue.depth(["e1"]) == 39

    def test_submitters_take_turns(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([*backlog("alice", 4), *backlog("bob", 2), *backlog("carol", 1)])
        turns = ["alice-0", "bob-0", "carol-0", "alice-1", "bob-1", "alice-2", "alice-3"]
        assert [task_id for _ in range(3) for task_id in lease(queue, fence, limit=1)] == turns[:3]
        assert lease(queue, fence) == turns[3:]

    def test_submitter_with_fewest_leases_is_next(self, queue: Queue, clock: Clock) -> None:
        """However an earlier lease came to its end."""
        fence = own(queue)
        queue.enqueue([*backlog("alice", 20), *backlog("bob", 20)])
        assert len(lease(queue, fence, limit=12)) == 12  # six each
        single.ack(queue, fence, [make_result("alice-0"), make_result("alice-1")])
        queue.unlease("e1", fence, ["alice-2"])
        assert lease(queue, fence, limit=3) == ["alice-2", "alice-6", "alice-7"]
        single.maintain(queue, "e1", fence, renew=[f"alice-{n}" for n in range(9)], lease_s=999)
        clock.now += LEASE_S + 1
        assert single.reap(queue, "e1", fence) == []  # all six of bob run again
        assert lease(queue, fence, limit=6) == [f"bob-{n}" for n in range(6)]

    def test_weights_give_a_submitter_a_larger_share(self, queue: Queue) -> None:
        fence = single.claim(queue, "e1", "w1", weights={"alice": 3, "unknown": 2}, ttl_s=45)
        single.mark_restored(queue, "e1", fence)
        queue.enqueue([*backlog("alice", 100), *backlog("bob", 100)])
        owners = [task_id.partition("-")[0] for task_id in lease(queue, fence, limit=40)]
        assert (owners.count("alice"), owners.count("bob")) == (30, 10)
        fence = single.claim(queue, "e1", "w1", ttl_s=45)  # the agent was started again, without weights
        owners = [task_id.partition("-")[0] for task_id in lease(queue, fence, limit=22)]
        assert (owners.count("alice"), owners.count("bob")) == (1, 21)

    def test_submitter_at_its_limit_is_passed_over(self, queue: Queue) -> None:
        fence = own(queue)
        queue.set_limits({"e1": {"alice": RunningLimit(max_running=2)}}, complete=True)
        queue.enqueue([*backlog("alice", 5), *backlog("bob", 3)])
        assert lease(queue, fence) == ["alice-0", "bob-0", "alice-1", "bob-1", "bob-2"]
        assert lease(queue, fence) == []
        assert queue.position("e1", "alice-3") == QueuePosition(QueueState.QUEUED, 1, 3, 1, 2)
        single.ack(queue, fence, [make_result("alice-1")])
        assert queue.position("e1", "alice-3") == QueuePosition(QueueState.QUEUED, 1, 3, 1, 0)
        assert lease(queue, fence) == ["alice-2"]
        queue.unlease("e1", fence, ["alice-2"])
        assert lease(queue, fence) == ["alice-2"]
        assert lease(queue, fence) == []

    def test_tasks_of_several_accounts_count_for_the_payer(self, queue: Queue) -> None:
        fence = own(queue)
        queue.set_limits({"e1": {"alice": RunningLimit(max_running=2)}}, complete=True)
        tasks = [
            make_queued(f"{owner_id}-{number}", owner_id=owner_id, quota_key="alice")
            for owner_id in ("robot-1", "robot-2")
            for number in range(3)
        ]
        queue.enqueue([*tasks, *backlog("bob", 3)])
        assert queue.depth_of("e1", "alice") == (9, 6)
        assert queue.bytes_of("alice") == sum(len(pack(each)) for each in tasks)
        assert lease(queue, fence) == ["robot-1-0", "bob-0", "robot-1-1", "bob-1", "bob-2"]
        recount(queue)
        assert queue.bytes_of("alice") == sum(len(pack(each)) for each in tasks)
        assert (queue.bytes_of("robot-1"), queue.bytes_of("robot-2")) == (0, 0)

    def test_an_account_apart_has_turns_and_limits_of_its_own_and_bytes_of_the_payer(self, queue: Queue) -> None:
        fence = own(queue)
        queue.set_limits({"e1": {"robot": RunningLimit(max_running=1), "alice": RunningLimit(weight=2)}}, complete=True)
        apart = [make_queued(f"r{number}", owner_id="robot", quota_key="alice/robot") for number in range(3)]
        queue.enqueue([*apart, *backlog("alice", 3)])
        assert queue.depth_of("e1", "alice/robot") == (6, 3)
        assert queue.bytes_of("alice") == sum(len(pack(each)) for each in (*apart, *backlog("alice", 3)))
        assert lease(queue, fence) == ["r0", "alice-0", "alice-1", "alice-2"]
        assert queue.position("e1", "r1").limit == 1
        recount(queue)
        assert (queue.bytes_of("robot"), queue.bytes_of("alice") > 0) == (0, True)

    def test_submitter_at_its_limit_gets_no_reserve(self, queue: Queue) -> None:
        fence = own(queue)
        queue.set_limits({"e1": {"alice": RunningLimit(max_running=1, weight=5)}}, complete=True)
        queue.enqueue([*backlog("alice", 3), *backlog("bob", 2)])
        assert leased_ids(queue.lease({"e1": (fence, 0, 9)}, lease_s=LEASE_S)["e1"]) == ["alice-0", "bob-0"]

    def test_changed_limit_counts_at_once_and_wakes_the_owner(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue(backlog("alice", 9))
        queue.set_limits({"e1": {"alice": RunningLimit(max_running=1), "bob": RunningLimit(weight=2)}}, complete=True)
        assert len(lease(queue, fence)) == 1
        wake_ups = queue.listen("w1")
        for limit, more in ((RunningLimit(max_running=3), 2), (RunningLimit(max_running=2), 0), (RunningLimit(), 6)):
            queue.set_limits({"e1": {"alice": limit}}, complete=False)
            assert bool(wake_ups.get(0.2)) == (more > 0)
            assert len(lease(queue, fence)) == more
        wake_ups.close()

    def test_limit_that_is_free_again_wakes_the_owner(self, queue: Queue, clock: Clock) -> None:
        fence = own(queue)
        queue.set_limits({"e1": {"alice": RunningLimit(max_running=1)}}, complete=True)
        queue.enqueue([*backlog("alice", 3), *backlog("bob", 1)])
        assert lease(queue, fence) == ["alice-0", "bob-0"]
        wake_ups = queue.listen("w1")
        single.ack(queue, fence, [make_result("bob-0")])
        assert not wake_ups.get(0.2)
        single.ack(queue, fence, [make_result("alice-0")])
        assert wake_ups.get(1.0)
        assert lease(queue, fence) == ["alice-1"]
        clock.now += LEASE_S + 1
        assert single.reap(queue, "e1", fence) == []
        assert wake_ups.get(1.0)
        assert lease(queue, fence) == ["alice-1"]
        wake_ups.close()

    def test_complete_limits_replace_the_others(self, queue: Queue) -> None:
        fence = own(queue)
        queue.set_limits({"e1": {"alice": RunningLimit(max_running=1)}, "e2": {}}, complete=True)
        queue.set_limits({"e1": {"bob": RunningLimit(max_running=1)}}, complete=True)
        queue.enqueue([*backlog("alice", 2), *backlog("bob", 2)])
        assert lease(queue, fence) == ["alice-0", "bob-0", "alice-1"]

    def test_weight_of_an_allowance_replaces_that_of_the_agent(self, queue: Queue) -> None:
        queue.set_limits({"e1": {"alice": RunningLimit(weight=3)}}, complete=True)
        fence = single.claim(queue, "e1", "w1", weights={"alice": 9}, ttl_s=45)
        single.mark_restored(queue, "e1", fence)
        queue.enqueue([*backlog("alice", 50), *backlog("bob", 50)])
        owners = [task_id.partition("-")[0] for task_id in lease(queue, fence, limit=40)]
        assert (owners.count("alice"), owners.count("bob")) == (30, 10)

    def test_limits_are_lost_with_the_queue_and_with_the_endpoint(self, queue: Queue, wipe: Callable[[], None]) -> None:
        limits = {"e1": {"alice": RunningLimit(max_running=1)}}
        queue.set_limits(limits, complete=True)
        wipe()
        fence = own(queue, tasks=backlog("alice", 3))
        assert len(lease(queue, fence)) == 3
        queue.set_limits(limits, complete=True)
        assert queue.forget_endpoint("e1", limit=100)
        queue.set_limits(limits, complete=True)  # the endpoint was deleted meanwhile
        assert queue.position("e1", "alice-0").limit == 0

    def test_reserve_is_for_submitters_without_leases(self, queue: Queue) -> None:
        def take(limit: int, reserve: int) -> list[str]:
            found = queue.lease({"e1": (fence, limit, reserve)}, lease_s=LEASE_S)
            return leased_ids(found["e1"])

        fence = own(queue)
        queue.enqueue(backlog("alice", 9))
        assert take(2, 5) == ["alice-0", "alice-1"]
        assert take(0, 5) == []
        queue.enqueue([*backlog("bob", 2), *backlog("carol", 2), *backlog("dave", 2)])
        assert take(0, 2) == ["bob-0", "carol-0"]
        assert take(1, 2) == ["dave-0"]
        assert take(1, 2) == ["bob-1"]
        single.ack(queue, fence, [make_result("bob-0"), make_result("bob-1"), make_result("dave-0")])
        assert take(0, 9) == ["dave-1"]

    # lanes of tasks with latency targets

    def test_a_task_with_a_target_does_not_wait_behind_a_backlog_of_its_submitter(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue(backlog("alice", 50))
        assert lease(queue, fence, limit=10) == [f"alice-{n}" for n in range(10)]
        queue.enqueue([*with_targets("alice", 2), make_queued("alice-none", qos=QoS())])
        assert lease(queue, fence, limit=3) == ["alice-target-0", "alice-target-1", "alice-10"]
        queue.unlease("e1", fence, ["alice-target-1", "alice-10"])
        assert lease(queue, fence, limit=2) == ["alice-target-1", "alice-10"]

    def test_a_lane_takes_turns_as_another_submitter(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([*backlog("alice", 3), *with_targets("alice", 2), *backlog("bob", 2)])
        turns = ["alice-0", "alice-target-0", "bob-0", "alice-1", "alice-target-1", "bob-1", "alice-2"]
        assert [task_id for _ in turns for task_id in lease(queue, fence, limit=1)] == turns

    def test_reserve_is_for_lanes_without_leases(self, queue: Queue) -> None:
        def take(limit: int, reserve: int) -> list[str]:
            return leased_ids(queue.lease({"e1": (fence, limit, reserve)}, lease_s=LEASE_S)["e1"])

        fence = own(queue)
        queue.enqueue(backlog("alice", 9))
        assert take(2, 5) == ["alice-0", "alice-1"]
        queue.enqueue(with_targets("alice", 2))
        assert take(0, 5) == ["alice-target-0"]
        assert take(0, 5) == []
        single.ack(queue, fence, [make_result("alice-target-0")])
        assert take(0, 5) == ["alice-target-1"]

    def test_limit_counts_both_lanes(self, queue: Queue, clock: Clock) -> None:
        fence = own(queue)
        queue.set_limits({"e1": {"alice": RunningLimit(max_running=2)}}, complete=True)
        queue.enqueue([*backlog("alice", 3), *with_targets("alice", 3), *backlog("bob", 1)])
        assert lease(queue, fence) == ["alice-0", "alice-target-0", "bob-0"]
        for task_id in ("alice-1", "alice-target-1"):
            assert queue.position("e1", task_id) == QueuePosition(QueueState.QUEUED, 0, 4, 1, 2)
        assert leased_ids(queue.lease({"e1": (fence, 0, 9)}, lease_s=LEASE_S)["e1"]) == []
        wake_ups = queue.listen("w1")
        single.ack(queue, fence, [make_result("alice-0")])
        assert wake_ups.get(1.0)
        assert queue.position("e1", "alice-target-1").limit == 0
        assert lease(queue, fence) == ["alice-1"]
        queue.unlease("e1", fence, ["alice-target-0"])
        assert wake_ups.get(1.0)
        assert lease(queue, fence) == ["alice-target-0"]
        clock.now += LEASE_S + 1
        assert single.reap(queue, "e1", fence) == []
        assert wake_ups.get(1.0)
        assert sorted(lease(queue, fence)) == ["alice-1", "alice-target-0", "bob-0"]
        queue.set_limits({"e1": {"alice": RunningLimit(max_running=4)}}, complete=True)
        assert wake_ups.get(1.0)
        assert sorted(lease(queue, fence)) == ["alice-2", "alice-target-1"]
        wake_ups.close()

    def test_lane_whose_tasks_are_all_leased_counts_for_the_limit(self, queue: Queue) -> None:
        fence = own(queue)
        queue.set_limits({"e1": {"alice": RunningLimit(max_running=1)}}, complete=True)
        queue.enqueue(backlog("alice", 1))
        assert lease(queue, fence) == ["alice-0"]
        queue.enqueue(with_targets("alice", 1))
        assert lease(queue, fence) == []
        wake_ups = queue.listen("w1")
        single.ack(queue, fence, [make_result("alice-0")])
        assert wake_ups.get(1.0)
        assert lease(queue, fence) == ["alice-target-0"]
        wake_ups.close()

    @pytest.mark.parametrize("is_allowance", [False, True])
    def test_weight_of_a_lane_is_that_of_its_submitter(self, queue: Queue, is_allowance: bool) -> None:
        if is_allowance:
            queue.set_limits({"e1": {"alice": RunningLimit(weight=3)}}, complete=True)
        fence = single.claim(queue, "e1", "w1", weights={} if is_allowance else {"alice": 3}, ttl_s=45)
        single.mark_restored(queue, "e1", fence)
        queue.enqueue([*with_targets("alice", 50), *backlog("bob", 50)])
        owners = [task_id.partition("-")[0] for task_id in lease(queue, fence, limit=40)]
        assert (owners.count("alice"), owners.count("bob")) == (30, 10)

    def test_bytes_and_waiting_tasks_count_both_lanes(self, queue: Queue) -> None:
        tasks = [*backlog("alice", 2), *with_targets("alice", 2)]
        sizes = [len(pack(task)) for task in tasks]
        fence = own(queue, tasks=tasks[3:])
        queue.enqueue(tasks[:3])
        recount(queue)
        assert (queue.bytes_of("alice"), queue.depth_of("e1", "alice")) == (sum(sizes), (4, 4))
        assert queue.reserve("e1", "alice", 7, most=10) == 4
        assert queue.reserve("e1", "alice", 6, most=10) is None
        assert len(lease(queue, fence)) == 4
        single.ack(queue, fence, [make_result("alice-target-0")])
        queue.flushed({"e1": ["alice-target-0"]})
        assert queue.bytes_of("alice") == sum(sizes) - sizes[2]
        assert queue.forget_endpoint("e1", limit=10)
        assert queue.bytes_of("alice") == 0

    def test_tasks_in_a_lane_are_restored_cancelled_and_listed(
        self, queue: Queue, clock: Clock, wipe: Callable[[], None]
    ) -> None:
        tasks = [*backlog("alice", 3), *with_targets("alice", 3)]
        queue.enqueue(tasks)
        wipe()
        fence = own(queue, tasks=tasks)
        assert queue.position("e1", "alice-target-2") == QueuePosition(QueueState.QUEUED, 2, 6, 1)
        assert queue.cancel("e1", ["alice-target-0"]) == {"alice-target-0": CancelOutcome.REMOVED}
        assert queue.position("e1", "alice-target-2") == QueuePosition(QueueState.QUEUED, 1, 5, 1)
        queue.restore("e1", fence, tasks, held={"alice-target-2": 1}, lease_s=LEASE_S)
        assert single.leased(queue, "e1", fence) == {"alice-target-2": 1}
        assert lease(queue, fence, limit=2) == ["alice-0", "alice-target-1"]
        assert queue.cancel("e1", ["alice-target-2"]) == {"alice-target-2": CancelOutcome.REQUESTED}
        clock.now += LEASE_S + 1
        assert leased_ids(single.reap(queue, "e1", fence)) == ["alice-target-2"]
        assert queue.find_missing({"e1": ["alice-target-1", "unknown"]}) == {"unknown"}
        assert [task.owner_id for task in queue.outbox("e1")] == ["alice"]
        assert not queue.forget_endpoint("e1", limit=2)
        assert queue.forget_endpoint("e1", limit=9)
        assert queue.depth_of("e1", "alice") == (0, 0)

    def test_tasks_held_after_a_wipe_count(self, queue: Queue, wipe: Callable[[], None]) -> None:
        wipe()
        fence = single.claim(queue, "e1", "w1", ttl_s=45)
        held = {f"alice-{n}": 1 for n in range(3)}
        queue.restore("e1", fence, backlog("alice", 9), held=held, lease_s=LEASE_S)
        queue.restore("e1", fence, backlog("bob", 9), held={}, lease_s=LEASE_S)
        single.mark_restored(queue, "e1", fence)
        assert lease(queue, fence, limit=4) == ["bob-0", "bob-1", "bob-2", "alice-3"]
        queue.restore("e1", fence, backlog("bob", 5), held={"bob-3": 1, "bob-4": 1}, lease_s=LEASE_S)
        assert lease(queue, fence, limit=2) == ["alice-4", "bob-5"]
        assert queue.depth(["e1"]) == 7

    def test_room_is_reserved_for_tasks_that_are_queued_later(self, queue: Queue) -> None:
        queue.enqueue(backlog("alice", 3))
        assert queue.reserve("e1", "alice", 4, most=10) is None
        assert queue.reserve("e1", "alice", 4, most=10) == 7
        assert queue.reserve("e1", "alice", 3, most=10) is None
        assert queue.reserve("e1", "bob", 10, most=10) is None
        assert queue.reserve("e2", "alice", 10, most=10) is None
        queue.free("e1", "alice", 4)
        assert queue.reserve("e1", "alice", 5, most=10) == 6
        queue.free("e1", "alice", 9)
        assert queue.reserve("e1", "alice", 8, most=10) == 3
        assert queue.reserve("e1", "alice", 7, most=10) is None

    def test_a_cancelled_task_leaves_the_others_their_turns(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([*backlog("alice", 3), *backlog("bob", 2)])
        queue.cancel("e1", ["alice-0", "bob-0", "bob-1"])
        assert (queue.depth(["e1"]), queue.depth_of("e1", "alice"), queue.depth_of("e1", "bob")) == (2, (2, 2), (2, 0))
        assert queue.position("e1", "alice-2") == QueuePosition(QueueState.QUEUED, 1, 2, 1)
        assert lease(queue, fence) == ["alice-1", "alice-2"]
        assert queue.endpoints_with_activity({"e1": fence}) == []
        queue.enqueue([make_queued("bob-2", owner_id="bob")])
        assert lease(queue, fence) == ["bob-2"]

    def test_many_submitters_with_one_task_each_are_served_in_order(self, queue: Queue) -> None:
        fence = own(queue)
        tasks = [make_queued(f"t{n}", owner_id=f"owner {n}") for n in range(300)]
        queue.enqueue(tasks)
        assert queue.position("e1", "t7") == QueuePosition(QueueState.QUEUED, 0, 300, 300)
        assert lease(queue, fence, limit=300) == [task.task_id for task in tasks]

    def test_leases_of_many_endpoints_are_taken_in_one_call_with_own_fences(self, queue: Queue) -> None:
        fences = {endpoint_id: own_endpoint(queue, endpoint_id) for endpoint_id in ("e1", "e2", "e3")}
        for endpoint_id in fences:
            tasks = [make_queued(f"{endpoint_id}-{n}", endpoint_id=endpoint_id) for n in range(3)]
            queue.enqueue(tasks)
        wanted = {
            "e1": (fences["e1"], 2, 0),
            "e2": (fences["e2"] - 1, 9, 0),
            "e3": (fences["e3"], 9, 0),
            "e4": (1, 9, 0),
        }
        found = queue.lease(wanted, lease_s=LEASE_S)
        assert list(found) == list(wanted)
        assert leased_ids(found["e1"]) == ["e1-0", "e1-1"]
        assert isinstance(found["e2"], Fenced)
        assert leased_ids(found["e3"]) == ["e3-0", "e3-1", "e3-2"]
        assert isinstance(found["e4"], QueueDataLost)
        assert queue.depth(["e2"]) == 3

    def test_results_of_many_endpoints_are_taken_in_one_call(self, queue: Queue) -> None:
        fences = {endpoint_id: own_endpoint(queue, endpoint_id) for endpoint_id in ("e1", "e2")}
        for endpoint_id, fence in fences.items():
            queue.enqueue([make_queued(f"{endpoint_id}-{n}", endpoint_id=endpoint_id) for n in range(2)])
            single.lease(queue, endpoint_id, fence, limit=9, lease_s=LEASE_S)
        ends = {
            endpoint_id: [make_result(f"{endpoint_id}-{n}", endpoint_id=endpoint_id) for n in range(2)]
            for endpoint_id in fences
        }
        refusals = queue.ack([(fences["e1"], ends["e1"]), (fences["e2"] - 1, ends["e2"]), (1, [])])
        assert [type(refusal) for refusal in refusals] == [type(None), Fenced, type(None)]
        assert queue.outbox("e1") == [
            msgspec.structs.replace(end, task_group_id="g1", owner_id="alice") for end in ends["e1"]
        ]
        assert (queue.outbox("e2"), single.leased(queue, "e1", fences["e1"])) == ([], {})
        queue.flushed({"e1": ["e1-0", "e1-1"], "e2": ["e2-0"]})
        assert queue.outbox("e1") == []
        assert single.leased(queue, "e2", fences["e2"]) == {"e2-0": 1, "e2-1": 1}

    def test_many_agents_claim_in_one_call_and_are_refused_one_by_one(self, queue: Queue) -> None:
        own_endpoint(queue, "e0")
        single.claim(queue, "e1", "w2", spool_id="another", ttl_s=45)
        wanted: list[tuple[str, str, dict[str, int]]] = [
            ("e0", "spool", {}),
            ("e1", "spool", {}),
            ("e2", "spool", {"alice": 2}),
            ("e0", "again", {}),
        ]
        first, refused, other, second = queue.claim("w1", wanted, ttl_s=45)
        assert isinstance(refused, EndpointInUse)
        assert not isinstance(first, EndpointInUse)
        assert not isinstance(second, EndpointInUse)
        assert not isinstance(other, EndpointInUse)
        assert first < second  # in order: the later claim is the one that counts
        found = queue.leased([("e0", first), ("e0", second), ("e2", other), ("e3", 1)])
        assert list(map(_kind, found)) == [Fenced, dict, QueueDataLost, QueueDataLost]
        with pytest.raises(EndpointInUse):
            single.claim(queue, "e2", "w2", spool_id="another", ttl_s=45)

    def test_leases_of_many_endpoints_are_read_in_one_call(self, queue: Queue) -> None:
        fences = {endpoint_id: own_endpoint(queue, endpoint_id) for endpoint_id in ("e1", "e2")}
        queue.enqueue([make_queued("t1"), make_queued("t2")])
        single.lease(queue, "e1", fences["e1"], limit=9, lease_s=LEASE_S)
        assert queue.leased(list(fences.items())) == [{"t1": 1, "t2": 1}, {}]

    def test_requests_to_cancel_tasks_of_many_endpoints_are_read_in_one_call(self, queue: Queue) -> None:
        fences = {endpoint_id: own_endpoint(queue, endpoint_id) for endpoint_id in ("e1", "e2")}
        queue.enqueue([make_queued("t1"), make_queued("t2")])
        single.lease(queue, "e1", fences["e1"], limit=9, lease_s=LEASE_S)
        queue.cancel("e1", ["t2"])
        newer = single.claim(queue, "e2", "w2", ttl_s=45)
        found = queue.cancel_requests([*fences.items(), ("e2", newer), ("e3", 1)])
        assert list(map(_kind, found)) == [list, Fenced, list, QueueDataLost]
        assert (found[0], found[2]) == (["t2"], [])

    def test_many_queues_are_declared_complete_in_one_call(self, queue: Queue) -> None:
        wanted: list[tuple[str, str, dict[str, int]]] = [("e1", "", {}), ("e2", "", {}), ("e3", "", {})]
        fences = [fence for fence in queue.claim("w1", wanted, ttl_s=45) if isinstance(fence, int)]
        single.claim(queue, "e2", "w2", ttl_s=45)
        owned = [*zip(("e1", "e2", "e3"), fences, strict=True), ("e4", 1)]
        assert list(map(_kind, queue.mark_restored(owned))) == [type(None), Fenced, type(None), QueueDataLost]
        assert single.leased(queue, "e1", fences[0]) == single.leased(queue, "e3", fences[2]) == {}

    def test_many_agents_leave_in_one_call(self, queue: Queue) -> None:
        fences = {endpoint_id: own_endpoint(queue, endpoint_id) for endpoint_id in ("e1", "e2")}
        assert queue.renew_ownership("w1", {"e1": (fences["e1"], "spool")}, ttl_s=45) == []
        newer = single.claim(queue, "e2", "w2", spool_id="spool", ttl_s=45)
        refusals = queue.mark_disconnected("w1", [*fences.items(), ("e3", 1)], ttl_s=45)
        assert list(map(_kind, refusals)) == [type(None), Fenced, QueueDataLost]
        assert (
            single.claim(queue, "e1", "w2", spool_id="another", ttl_s=45) > fences["e1"]
        )  # no agent is heard any more
        assert queue.leased([("e2", newer)]) == [{}]

    def test_recorded_result_is_known_for_a_time(self, queue: Queue, forget_results: Callable[[], None]) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1"), make_queued("t2"), make_queued("t3")])
        assert lease(queue, fence, limit=2) == ["t1", "t2"]
        single.ack(queue, fence, [make_result("t1"), make_result("t2")])
        queue.flushed({"e1": ["t1"]})
        queue.enqueue([make_queued("t1"), make_queued("t2")])
        assert queue.depth(["e1"]) == 1
        single.ack(queue, fence, [make_result("t1")])
        assert [result.task_id for result in queue.outbox("e1")] == ["t2"]
        forget_results()
        assert queue.position("e1", "t1").state is QueueState.UNKNOWN
        single.ack(queue, fence, [make_result("t1")])
        assert [result.task_id for result in queue.outbox("e1")] == ["t2"]
        queue.enqueue([make_queued("t1"), make_queued("t2")])
        assert lease(queue, fence) == ["t3", "t1"]  # what may not have been recorded is never forgotten
        assert [end.task_id for end in queue.outbox("e1")] == ["t2"]
        single.ack(queue, fence, [make_result("t1")])
        assert [end.task_id for end in queue.outbox("e1")] == ["t2", "t1"]

    def test_results_leave_the_outbox_in_any_order(self, queue: Queue) -> None:
        fence = own(queue)
        ids = [f"t{n}" for n in range(6)]
        queue.enqueue([make_queued(task_id) for task_id in ids])
        lease(queue, fence)
        single.ack(queue, fence, [make_result(task_id) for task_id in ids])
        queue.flushed({"e1": ["t2", "t3"]})
        queue.flushed({"e1": ["t0", "other", "t1"]})
        assert [end.task_id for end in queue.outbox("e1")] == ["t4", "t5"]
        queue.flushed({"e1": ["t4", "t5", "t4"]})
        assert queue.outbox("e1") == []

    def test_maintenance_of_many_endpoints_equals_that_of_each(self, queue: Queue, clock: Clock) -> None:
        fences = {endpoint_id: own_endpoint(queue, endpoint_id) for endpoint_id in ("e1", "e2", "e3")}
        for endpoint_id, fence in fences.items():
            names = ("held", "ended", "once")
            clock.now = 0
            queue.enqueue(
                [make_queued(f"{endpoint_id}-{n}", endpoint_id=endpoint_id, idempotent=n != "once") for n in names],
            )
            clock.now = 1
            single.lease(queue, endpoint_id, fence, limit=9, lease_s=LEASE_S)
            single.ack(queue, fence, [make_result(f"{endpoint_id}-ended", endpoint_id=endpoint_id)])
        held = {
            "e1": HeldLeases(fences["e1"], "spool", ["e1-held"]),
            "e2": HeldLeases(fences["e2"] - 1, "spool", ["e2-held"]),
            "e3": HeldLeases(fences["e3"], "spool"),
        }
        clock.now = 1 + LEASE_S
        found = queue.maintain("w1", held, ttl_s=45, lease_s=LEASE_S)
        assert isinstance(found["e2"], Fenced)
        assert isinstance(found["e1"], MaintenanceResult)
        assert isinstance(found["e3"], MaintenanceResult)
        assert leased_ids(found["e1"].reaped) == ["e1-once"]
        assert [end.task_id for end in found["e1"].outbox] == ["e1-ended"]
        assert single.leased(queue, "e1", fences["e1"]) == {"e1-held": 1, "e1-once": 1}
        assert queue.depth(["e3"]) == 1  # the lease of the one that may run again was not renewed
        clock.now = 60
        with pytest.raises(EndpointInUse):  # the ownership was kept, for the agent with this spool
            single.claim(queue, "e1", "w2", spool_id="another", ttl_s=45)

    def test_batches_of_any_size_keep_their_order(self, queue: Queue) -> None:
        fence = own(queue)
        ids = [f"t{n:04}" for n in range(1201)]
        queue.enqueue([make_queued(task_id) for task_id in ids])
        assert lease(queue, fence, limit=1100) == ids[:1100]
        queue.unlease("e1", fence, ids[:1100])
        assert lease(queue, fence, limit=5000) == ids
        assert single.maintain(queue, "e1", fence, renew=[*ids, "other"]).reaped == []
        assert set(single.leased(queue, "e1", fence)) == set(ids)
        single.ack(queue, fence, [make_result(i) for i in ids])
        assert single.leased(queue, "e1", fence) == {}
        assert [result.task_id for result in queue.outbox("e1")] == ids[:200]
        queue.flushed({"e1": ids[:700]})
        assert [result.task_id for result in queue.outbox("e1")] == ids[700:900]
        queue.flushed({"e1": ids})
        assert queue.outbox("e1") == []

    def test_empty_batch_is_accepted(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([])
        single.ack(queue, fence, [])
        assert queue.cancel("e1", []) == {}
        assert (queue.claim("w1", [], ttl_s=45), queue.ack([]), queue.leased([]), queue.lease({}, lease_s=1)) == (
            [],
            [],
            [],
            {},
        )
        queue.unlease("e1", fence, [])
        queue.flushed({"e1": []})

    def test_endpoints_are_isolated(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1", endpoint_id="e2")])
        assert lease(queue, fence) == []
        assert queue.depth(["e2"]) == 1
        with pytest.raises(QueueDataLost):
            single.lease(queue, "e2", fence, limit=1, lease_s=1)

    def test_an_unleased_task_comes_next_and_its_attempt_did_not_count(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1"), make_queued("t2"), make_queued("t3")])
        assert lease(queue, fence, limit=2) == ["t1", "t2"]
        queue.unlease("e1", fence, ["t1", "t2", "t3", "unknown"])
        again = single.lease(queue, "e1", fence, limit=3, lease_s=LEASE_S)
        assert [(task.task.task_id, task.attempt) for task in again] == [("t1", 1), ("t2", 1), ("t3", 1)]

    def test_leases_are_listed(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1"), make_queued("t2", attempt=1)])
        assert single.leased(queue, "e1", fence) == {}
        lease(queue, fence)
        assert single.leased(queue, "e1", fence) == {"t1": 1, "t2": 2}

    # expiry

    def test_an_expired_task_is_dispatched_again_until_its_attempts_are_used_up(
        self, queue: Queue, clock: Clock
    ) -> None:
        fence = own(queue)
        clock.now = 0
        queue.enqueue([make_queued(max_attempts=2), make_queued("t2")])
        clock.now = 10
        assert lease(queue, fence, limit=1) == ["t1"]
        clock.now = 10 + LEASE_S - 1
        assert single.reap(queue, "e1", fence) == []
        assert single.leased(queue, "e1", fence) == {"t1": 1}
        clock.now = 10 + LEASE_S
        assert single.reap(queue, "e1", fence) == []
        clock.now = 50
        (again,) = single.lease(queue, "e1", fence, limit=1, lease_s=LEASE_S)
        assert (again.task.task_id, again.attempt) == ("t1", 2)
        for _ in range(2):  # and so until the caller has ended it
            clock.now = 50 + LEASE_S
            (ended,) = single.reap(queue, "e1", fence)
            assert (ended.task.task_id, ended.attempt, ended.leased_at) == ("t1", 2, 50)
        assert single.leased(queue, "e1", fence) == {"t1": 2}

    def test_non_idempotent_task_is_not_dispatched_again(self, queue: Queue, clock: Clock) -> None:
        fence = own(queue)
        clock.now = 0
        queue.enqueue([make_queued(idempotent=False)])
        clock.now = 1
        assert lease(queue, fence) == ["t1"]
        clock.now = 1 + LEASE_S
        (ended,) = single.reap(queue, "e1", fence)
        assert (ended.task.task_id, ended.attempt, ended.cancel_requested) == ("t1", 1, False)
        clock.now = 50
        assert lease(queue, fence) == []

    def test_a_renewed_lease_lasts(self, queue: Queue, clock: Clock) -> None:
        fence = own(queue)
        clock.now = 0
        queue.enqueue([make_queued("t1"), make_queued("t2"), make_queued("t3")])
        assert lease(queue, fence, limit=2) == ["t1", "t2"]
        clock.now = 20
        single.maintain(queue, "e1", fence, renew=["t1", "t3", "t4"], lease_s=LEASE_S)
        assert single.leased(queue, "e1", fence) == {"t1": 1, "t2": 1}
        clock.now = 40
        single.reap(queue, "e1", fence)
        assert single.leased(queue, "e1", fence) == {"t1": 1}

    def test_reaping_is_limited(self, queue: Queue, clock: Clock) -> None:
        fence = own(queue)
        clock.now = 0
        ids = [f"t{number:03}" for number in range(501)]
        queue.enqueue([make_queued(task_id) for task_id in ids])
        lease(queue, fence, limit=501)
        clock.now = 99
        single.reap(queue, "e1", fence)
        assert len(single.leased(queue, "e1", fence)) == 1
        single.reap(queue, "e1", fence)
        assert sorted(lease(queue, fence, limit=600)) == ids

    # ends

    def test_first_result_of_a_task_wins(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1"), make_queued("t2")])
        lease(queue, fence)
        results = [make_result("t1"), make_result("t1", result=b"late"), make_result("unknown")]
        single.ack(queue, fence, results[:1])
        single.ack(queue, fence, results)
        assert queue.position("e1", "unknown").state is QueueState.UNKNOWN
        assert single.leased(queue, "e1", fence) == {"t2": 1}
        assert queue.outbox("e1") == [make_result("t1", task_group_id="g1", owner_id="alice")]

    def test_batch_may_contain_a_result_twice(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1")])
        lease(queue, fence)
        single.ack(queue, fence, [make_result("t1"), make_result("t1")])
        assert len(queue.outbox("e1")) == 1

    def test_late_result_removes_the_task_from_the_queue(self, queue: Queue, clock: Clock) -> None:
        fence = own(queue)
        clock.now = 0
        queue.enqueue([make_queued("t1")])
        lease(queue, fence)
        clock.now = LEASE_S
        single.reap(queue, "e1", fence)
        assert queue.depth(["e1"]) == 1
        clock.now = 40
        single.ack(queue, fence, [make_result("t1")])
        assert (queue.depth(["e1"]), [result.task_id for result in queue.outbox("e1")]) == (0, ["t1"])
        clock.now = 41
        assert lease(queue, fence) == []

    def test_outbox_keeps_results_until_recorded(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued(f"t{n}") for n in range(3)])
        lease(queue, fence)
        single.ack(queue, fence, [make_result(f"t{n}") for n in range(3)])
        queue.flushed({"e1": ["t1"]})
        queue.flushed({"e1": ["t1", "unknown"]})
        assert [result.task_id for result in queue.outbox("e1")] == ["t0", "t2"]

    def test_an_ended_task_is_not_queued_again(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1")])
        lease(queue, fence)
        single.ack(queue, fence, [make_result("t1")])
        for flush in (False, True):
            if flush:
                queue.flushed({"e1": ["t1"]})
            queue.enqueue([make_queued("t1")])
            queue.restore("e1", fence, [make_queued("t1")], held={"t1": 1}, lease_s=LEASE_S)
            assert queue.depth(["e1"]) == 0
            assert single.leased(queue, "e1", fence) == {}
            single.ack(queue, fence, [make_result("t1")])
            assert [result.task_id for result in queue.outbox("e1")] == ([] if flush else ["t1"])
            single.maintain(queue, "e1", fence, renew=["t1"])
            assert single.leased(queue, "e1", fence) == {}

    # cancelling

    def test_a_cancelled_waiting_task_has_the_given_error(self, queue: Queue) -> None:
        own(queue)
        queue.enqueue([make_queued("t1")])
        error = RightWithdrawn("The right was withdrawn.").record
        assert queue.cancel("e1", ["t1"], error=error) == {"t1": CancelOutcome.REMOVED}
        assert [result.error for result in queue.outbox("e1")] == [error]

    def test_cancelled_waiting_task_is_removed_with_its_result_in_the_outbox(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1"), make_queued("t2"), make_queued("t3")])
        assert queue.cancel("e1", ["t2", "t4"]) == {"t2": CancelOutcome.REMOVED, "t4": CancelOutcome.UNKNOWN}
        assert queue.cancel("e1", ["t2"]) == {"t2": CancelOutcome.FINISHED}
        assert lease(queue, fence) == ["t1", "t3"]
        (end,) = queue.outbox("e1")
        assert (end.task_id, end.endpoint_id, end.state, end.reporter) == (
            "t2",
            "e1",
            TaskState.CANCELLED,
            Reporter.API,
        )
        assert (end.task_group_id, end.owner_id) == ("g1", "alice")
        assert end.error is not None
        assert end.error.code == "TASK_CANCELLED"

    def test_cancel_request_of_a_leased_task_lasts_until_its_result(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1"), make_queued("t2")])
        lease(queue, fence)
        assert queue.cancel("e1", ["t1"]) == {"t1": CancelOutcome.REQUESTED}
        for _ in range(2):
            assert single.cancel_requests(queue, "e1", fence) == ["t1"]
        single.ack(queue, fence, [make_result("t1")])
        assert single.cancel_requests(queue, "e1", fence) == []
        assert queue.cancel("e1", ["t1"]) == {"t1": CancelOutcome.FINISHED}

    def test_task_with_a_cancel_request_is_not_dispatched_again(self, queue: Queue, clock: Clock) -> None:
        fence = own(queue)
        clock.now = 0
        queue.enqueue([make_queued("t1")])
        lease(queue, fence)
        clock.now = 1
        queue.cancel("e1", ["t1"])
        clock.now = LEASE_S
        (ended,) = single.reap(queue, "e1", fence)
        assert (ended.task.task_id, ended.cancel_requested) == ("t1", True)

    def test_next_lease_carries_the_cancel_request(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1")])
        lease(queue, fence)
        queue.cancel("e1", ["t1"])
        queue.unlease("e1", fence, ["t1"])
        assert single.cancel_requests(queue, "e1", fence) == []
        (again,) = single.lease(queue, "e1", fence, limit=1, lease_s=LEASE_S)
        assert again.cancel_requested

    # owning

    def test_enqueue_wakes_the_owner_while_it_lives(self, queue: Queue, clock: Clock) -> None:
        wake_ups = queue.listen("w1")

        def wakes() -> bool:
            queue.enqueue([make_queued("t1")])
            return bool(wake_ups.get(0.2))

        clock.now = 0
        assert not wakes()
        fence = own(queue)
        clock.now = 44
        assert wakes()
        clock.now = 46
        assert not wakes()
        assert queue.renew_ownership("w1", {"e1": (fence, "")}, ttl_s=45) == []
        assert wakes()
        queue.release("e1", "w1", fence)
        queue.release("e1", "w1", fence)
        assert not wakes()
        wake_ups.close()

    def test_connected_agent_is_not_replaced_by_another(self, queue: Queue, clock: Clock) -> None:
        def claim(forwarder_id: str, spool_id: str, now: float) -> int:
            clock.now = now
            return single.claim(queue, "e1", forwarder_id, spool_id=spool_id, ttl_s=45)

        first = claim("w1", "here", 0)
        for spool_id in ("there", ""):
            with pytest.raises(EndpointInUse):
                claim("w2", spool_id, 44)
        assert claim("w2", "there", 46) > first  # w1 has not renewed for too long
        assert claim("w1", "there", 47) > first  # the same agent goes where it wants
        fence = claim("w1", "another", 48)  # w1 knows better than we whether its session lives
        single.mark_restored(queue, "e1", fence)
        clock.now = 50
        assert queue.renew_ownership("w1", {"e1": (fence, "another")}, ttl_s=45) == []
        with pytest.raises(EndpointInUse):
            claim("w2", "there", 94)
        clock.now = 90
        single.mark_disconnected(queue, "e1", "w1", fence)  # its agent is gone, some leases are left
        newer = claim("w2", "there", 91)
        queue.release("e1", "w1", fence)
        with pytest.raises(EndpointInUse):
            claim("w1", "here", 92)
        queue.release("e1", "w2", newer)
        assert claim("w1", "here", 92) > newer

    def test_sweep_finds_endpoints_with_work_and_lost_ownership(self, queue: Queue, wipe: Callable[[], None]) -> None:
        def endpoints_with_activity(fence: int) -> Sequence[str]:
            return queue.endpoints_with_activity({"e1": fence, "e2": fence_of_another})

        fence = own(queue)
        fence_of_another = single.claim(queue, "e2", "w1", ttl_s=45)
        assert endpoints_with_activity(fence) == ["e2"]  # which has not been restored
        single.mark_restored(queue, "e2", fence_of_another)
        assert endpoints_with_activity(fence) == []
        queue.enqueue([make_queued("t1")])
        assert endpoints_with_activity(fence) == ["e1"]
        lease(queue, fence)
        assert endpoints_with_activity(fence) == []
        queue.cancel("e1", ["t1"])
        assert endpoints_with_activity(fence) == ["e1"]
        single.ack(queue, fence, [make_result("t1")])
        assert endpoints_with_activity(fence) == []
        assert endpoints_with_activity(fence - 1) == ["e1"]
        wipe()
        assert endpoints_with_activity(fence) == ["e1", "e2"]

    def test_ownership_of_many_endpoints_is_renewed_and_active_ones_are_named(
        self, queue: Queue, clock: Clock, wipe: Callable[[], None]
    ) -> None:
        def renew(now: float, fence: int, spool_id: str = "here") -> Sequence[str]:
            clock.now = now
            return queue.renew_ownership("w1", {"e1": (fence, spool_id)}, ttl_s=45)

        wake_ups = queue.listen("w1")
        clock.now = 0
        fence = own(queue)
        assert renew(40, fence) == []
        clock.now = 80
        queue.enqueue([make_queued("t1")])  # it is still ours
        assert wake_ups.get(5.0) == ["e1"]
        with pytest.raises(EndpointInUse):
            single.claim(queue, "e1", "w2", spool_id="there", ttl_s=45)
        assert renew(81, fence - 1, "unknown") == ["e1"]
        clock.now = 81
        lease(queue, fence)
        assert renew(82, fence) == []
        assert renew(81 + LEASE_S, fence) == ["e1"]  # a lease has expired
        clock.now = 112
        single.ack(queue, fence, [make_result("t1")])
        assert renew(112, fence) == ["e1"]  # an end waits for the database
        queue.flushed({"e1": ["t1"]})
        assert renew(112, fence) == []
        wipe()
        assert renew(112, fence) == ["e1"]
        wake_ups.close()

    def test_stale_owner_is_fenced(self, queue: Queue) -> None:
        stale = own(queue, "w1")
        queue.enqueue([make_queued("t1"), make_queued("t2")])
        lease(queue, stale, limit=1)
        fence = own(queue, "w2")
        assert fence > stale
        for attempt in _consuming(queue, stale):
            with pytest.raises(Fenced):
                attempt()
        for rebuild in _rebuilding(queue, stale):
            with pytest.raises(Fenced):
                rebuild()
        queue.release("e1", "w1", stale)
        queue.enqueue([make_queued("t3")])
        assert single.leased(queue, "e1", fence) == {"t1": 1}
        assert lease(queue, fence) == ["t2", "t3"]

    def test_new_owner_continues_the_queue(self, queue: Queue) -> None:
        old = own(queue, "w1")
        queue.enqueue([make_queued("t1"), make_queued("t2")])
        lease(queue, old, limit=1)
        fence = single.claim(queue, "e1", "w2", ttl_s=45)
        assert single.leased(queue, "e1", fence) == {"t1": 1}
        assert lease(queue, fence) == ["t2"]

    # losing everything

    def test_a_new_endpoint_must_be_restored_first(self, queue: Queue) -> None:
        queue.enqueue([make_queued("t1")])
        fence = single.claim(queue, "e1", "w1", ttl_s=45)
        for attempt in _consuming(queue, fence):
            with pytest.raises(QueueDataLost):
                attempt()
        single.mark_restored(queue, "e1", fence)
        assert lease(queue, fence) == ["t1"]

    def test_wiped_queue_must_be_restored_first(self, queue: Queue, wipe: Callable[[], None]) -> None:
        fence = own(queue, tasks=[make_queued("t1")])
        lease(queue, fence)
        wipe()
        for attempt in (*_consuming(queue, fence), *_rebuilding(queue, fence)):
            with pytest.raises(QueueDataLost):
                attempt()
        newer = single.claim(queue, "e1", "w1", ttl_s=45)
        assert newer > fence
        for attempt in _consuming(queue, newer):
            with pytest.raises(QueueDataLost):
                attempt()

    def test_wipe_during_a_rebuild_is_detected(self, queue: Queue, wipe: Callable[[], None]) -> None:
        fence = single.claim(queue, "e1", "w1", ttl_s=45)
        queue.restore("e1", fence, [make_queued("t1")], held={}, lease_s=LEASE_S)
        wipe()
        with pytest.raises(QueueDataLost):
            queue.restore("e1", fence, [make_queued("t2")], held={}, lease_s=LEASE_S)
        with pytest.raises(QueueDataLost):
            single.mark_restored(queue, "e1", fence)

    def test_fences_rise_across_wipes(self, queue: Queue, wipe: Callable[[], None]) -> None:
        fences = []
        for _ in range(5):
            fences += [single.claim(queue, "e1", "w1", ttl_s=45), single.claim(queue, "e1", "w2", ttl_s=45)]
            wipe()
        assert fences == sorted(set(fences))

    def test_rebuild_queues_waiting_tasks_and_leases_held_ones(self, queue: Queue) -> None:
        fence = single.claim(queue, "e1", "w1", ttl_s=45)
        queue.enqueue([make_queued("t3"), make_queued("t4")])
        page = [
            make_queued("t1"),
            make_queued("t2", attempt=1),
            make_queued("t3"),
            make_queued("t4"),
            make_queued("t5", attempt=2),
        ]
        for _ in range(2):  # a page may come twice
            queue.restore("e1", fence, page, held={"t2": 2, "t4": 1, "t9": 1}, lease_s=LEASE_S)
            single.mark_restored(queue, "e1", fence)
            assert single.leased(queue, "e1", fence) == {"t2": 2, "t4": 1}
            assert queue.depth(["e1"]) == 3
        leased = single.lease(queue, "e1", fence, limit=9, lease_s=LEASE_S)
        assert {task.task.task_id: task.attempt for task in leased} == {"t3": 1, "t1": 1, "t5": 3}

    def test_held_tasks_stay_leased(self, queue: Queue, clock: Clock) -> None:
        fence = own(queue, tasks=[make_queued("t1")])
        clock.now = 0
        lease(queue, fence)
        clock.now = 20
        queue.restore("e1", fence, [make_queued("t1")], held={"t1": 1}, lease_s=LEASE_S)
        clock.now = 40
        assert single.reap(queue, "e1", fence) == []
        assert single.leased(queue, "e1", fence) == {"t1": 1}

    def test_possibly_started_task_is_not_queued_again(self, queue: Queue, clock: Clock) -> None:
        """The database knows of a dispatch, the queue does not: it was wiped, and the endpoint does not speak up."""
        fence = own(queue)
        clock.now = 0
        queue.restore("e1", fence, [make_queued("t1", idempotent=False, attempt=1)], held={}, lease_s=LEASE_S)
        queue.enqueue([make_queued("t2", idempotent=False, attempt=1), make_queued("t3", max_attempts=2, attempt=2)])
        clock.now = 1
        assert lease(queue, fence) == []
        assert single.leased(queue, "e1", fence) == {"t1": 1, "t2": 1, "t3": 2}
        clock.now = LEASE_S
        assert {task.task.task_id for task in single.reap(queue, "e1", fence)} == {"t1"}
        clock.now = 60
        assert {task.task.task_id for task in single.reap(queue, "e1", fence)} == {"t1", "t2", "t3"}
        clock.now = 61
        single.ack(queue, fence, [make_result("t1")])
        assert [result.task_id for result in queue.outbox("e1")] == ["t1"]

    def test_cancelling_works_before_the_rebuild(self, queue: Queue) -> None:
        queue.enqueue([make_queued("t1")])
        assert queue.cancel("e1", ["t1", "t2"]) == {"t1": CancelOutcome.REMOVED, "t2": CancelOutcome.UNKNOWN}
        fence = own(queue, tasks=[make_queued("t1")])
        assert lease(queue, fence) == []
        assert [end.task_id for end in queue.outbox("e1")] == ["t1"]

    # forwarders, peers, wake-ups

    def test_live_forwarders_are_found(self, queue: Queue, clock: Clock) -> None:
        first = ForwarderInfo("w1", "tcp://127.0.0.1:1", "key1", connections=3)
        clock.now = 100
        queue.announce(first, ttl_s=15)
        clock.now = 107
        queue.announce(ForwarderInfo("w2", "tcp://127.0.0.1:2", "key2"), ttl_s=15)
        queue.announce(ForwarderInfo("w3", "tcp://127.0.0.1:3", "key3", draining=True), ttl_s=15)
        clock.now = 110
        assert sorted(info.forwarder_id for info in queue.forwarders()) == ["w1", "w2"]
        assert first in queue.forwarders()
        clock.now = 116
        assert [info.forwarder_id for info in queue.forwarders()] == ["w2"]
        queue.withdraw("w2")
        clock.now = 110
        assert queue.forwarders() == [first]

    def test_an_admitted_peer_is_known(self, queue: Queue) -> None:
        key = PeerKey("z85{}[]", PeerKind.AGENT, "e1")
        assert queue.find_peers([key.public_key]) == {}
        assert queue.admit(key, ttl_s=60)
        assert queue.find_peers([key.public_key])[key.public_key] == key
        assert queue.admit(key, ttl_s=60), "its own key again"
        assert not queue.admit(PeerKey(key.public_key, PeerKind.AGENT, "e2"), ttl_s=60)
        assert not queue.admit(PeerKey(key.public_key, PeerKind.CLIENT, "e1"), ttl_s=60)
        assert queue.find_peers([key.public_key])[key.public_key] == key
        queue.dismiss([key.public_key, "unknown"])
        queue.dismiss([])
        assert queue.find_peers([key.public_key]) == {}

    def test_owner_of_a_deleted_endpoint_is_stale(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1")])
        queue.evict("e1")
        queue.evict("e2")
        with pytest.raises(Fenced):
            single.lease(queue, "e1", fence, limit=1, lease_s=LEASE_S)
        again = single.claim(queue, "e1", "w2", spool_id="another", ttl_s=45)
        assert lease(queue, again) == ["t1"]

    def test_a_deleted_endpoint_is_forgotten_in_batches(self, queue: Queue) -> None:
        others = [*backlog("bob", 4), *backlog("carol", 3)]
        fence = own(queue, tasks=[make_queued("t1"), make_queued("t2"), make_queued("t3")])
        assert lease(queue, fence) == ["t1", "t2", "t3"]
        single.ack(queue, fence, [make_result("t1")])
        queue.enqueue(others)
        queue.enqueue([make_queued("other", endpoint_id="e2")])

        assert [queue.forget_endpoint("e1", limit=4) for _ in range(2)] == [False, False]
        assert queue.forget_endpoint("e1", limit=4)

        every = ["t1", "t2", "t3", *(task.task_id for task in others)]
        assert queue.find_missing({"e1": every, "e2": ["other"]}) == set(every)
        assert (queue.depth(["e1"]), queue.depth(["e2"]), queue.outbox("e1")) == (0, 1, [])
        assert queue.forget_endpoint("e1", limit=4)
        assert queue.forget_endpoint("unknown", limit=4)

    def test_bytes_of_a_submitter_count_until_the_task_is_forgotten(self, queue: Queue) -> None:
        tasks = [make_queued(f"t{number}", resource_specification={"x": "y" * 1000 * number}) for number in range(4)]
        sizes = [len(pack(task)) for task in tasks]
        fence = own(queue)
        queue.enqueue(tasks[:2])
        queue.enqueue(tasks[1:3])
        queue.restore("e1", fence, tasks[2:], held={}, lease_s=LEASE_S)
        queue.enqueue([make_queued("elsewhere", endpoint_id="e2"), make_queued("u1", endpoint_id="e2", owner_id="bob")])
        elsewhere = len(pack(make_queued("elsewhere", endpoint_id="e2")))
        assert queue.bytes_of("alice") == sum(sizes) + elsewhere
        assert queue.bytes_of("bob") == len(pack(make_queued("u1", endpoint_id="e2", owner_id="bob")))

        assert len(lease(queue, fence, limit=2)) == 2
        single.ack(queue, fence, [make_result("t0")])
        queue.cancel("e1", ["t3"])
        assert queue.bytes_of("alice") == sum(sizes) + elsewhere
        for _ in range(2):
            queue.flushed({"e1": ["t0", "t3", "unknown"]})
            assert queue.bytes_of("alice") == sizes[1] + sizes[2] + elsewhere
        assert queue.forget_endpoint("e1", limit=10)
        assert queue.bytes_of("alice") == elsewhere
        assert queue.forget_endpoint("e2", limit=10)
        assert (queue.bytes_of("alice"), queue.bytes_of("bob"), queue.bytes_of("carol")) == (0, 0, 0)

    def test_a_recount_keeps_bytes_that_are_right(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("leased"), make_queued("t1"), make_queued("u1", endpoint_id="e2", owner_id="bob")])
        lease(queue, fence, limit=1)
        queue.enqueue([make_queued("ended")])
        queue.cancel("e1", ["ended"])
        before = [queue.bytes_of(owner_id) for owner_id in ("alice", "bob", "carol")]

        recount(queue)

        assert [queue.bytes_of(owner_id) for owner_id in ("alice", "bob", "carol")] == before
        assert min(before[:2]) > 0

    def test_memory_is_readable(self, queue: Queue) -> None:
        memory = queue.memory()
        assert memory.max_bytes >= memory.used_bytes >= 0

    def test_nothing_is_queued_for_a_deleted_endpoint(self, queue: Queue) -> None:
        fence = own(queue)
        queue.forget_endpoint("e1", limit=10)
        assert queue.enqueue([make_queued("t1")]) == 0
        for each in (fence, single.claim(queue, "e1", "w2", ttl_s=45)):
            with pytest.raises(Fenced):
                single.lease(queue, "e1", each, limit=1, lease_s=LEASE_S)
            with pytest.raises(Fenced):
                queue.restore("e1", each, [make_queued("t1")], held={}, lease_s=LEASE_S)
        assert queue.find_missing({"e1": ["t1"]}) == {"t1"}
        assert queue.depth(["e1"]) == 0

    def test_forwarder_is_notified_of_work_and_cancellations(self, queue: Queue, clock: Clock) -> None:
        wake_ups = queue.listen("w1")
        assert wake_ups.get(0.0) == []
        fence = own(queue)
        clock.now = 0
        single.claim(queue, "e2", "w1", ttl_s=45)
        single.claim(queue, "e3", "w2", ttl_s=45)
        clock.now = -100
        single.claim(queue, "e4", "w1", ttl_s=45)
        for endpoint_id in ("e4", "e3", "e1", "e1", "e2"):
            clock.now = 0
            queue.enqueue([make_queued(f"t-{endpoint_id}", endpoint_id=endpoint_id)])
        assert _hear(queue, wake_ups.get, "e2") == {"e1", "e2"}
        assert lease(queue, fence) == ["t-e1"]
        clock.now = 50
        queue.enqueue([make_queued("t1"), make_queued("t2")])  # by now e1 has no owner
        assert wake_ups.get(0.0) == []
        fence = own(queue)
        lease(queue, fence, limit=1)
        clock.now = 51
        queue.cancel("e1", ["t2"])
        assert wake_ups.get(0.0) == []
        queue.cancel("e1", ["t1"])
        assert wake_ups.get(5.0) == ["e1"]
        wake_ups.close()

    def test_request_for_output_reaches_the_owner_and_its_answers_come_back(self, queue: Queue) -> None:
        own_endpoint(queue, "e1")
        owner, other = queue.listen("w1"), queue.listen("w2")
        asks = [OutputAsk("r1", id_, (OutputWanted(task_id="t1", stdout_from=5),), 100) for id_ in ("e1", "unowned")]
        assert queue.request_output(asks) == [True, False]
        assert owner.get(5.0) == []
        assert owner.take_asks() == [asks[0]]
        assert owner.take_asks() == other.take_asks() == []
        answers = [
            OutputAnswer("e1", (OutputPiece(task_id=task_id, stdout=OutputText(start=5, next=8, text="a\0ñ")),))
            for task_id in ("t1", "t2")
        ]
        assert queue.take_output("r1", timeout_s=0.01) is None
        for answer in answers:
            queue.answer_output("r1", answer, ttl_s=30)
        assert [queue.take_output("r1", timeout_s=5.0) for _ in answers] == answers
        assert queue.take_output("r1", timeout_s=0.01) is None

    def test_request_for_a_file_reaches_the_owner_and_its_answer_the_forwarder_that_asked(self, queue: Queue) -> None:
        own_endpoint(queue, "e1")
        ask = FileAsk("r1", "w2", "e1", "alice", "/data/ñ", 5, 100)
        assert queue.ask_file(ask) is False  # a forwarder of an earlier release listens to no such requests
        owner, other = queue.listen("w1"), queue.listen("w2")
        assert queue.ask_file(ask) is True
        assert queue.ask_file(msgspec.structs.replace(ask, endpoint_id="unowned")) is False
        assert owner.get(5.0) == []
        assert owner.take_file_messages() == [ask]
        assert owner.take_file_messages() == other.take_file_messages() == []
        answers = [FileAnswer("r1", "e1", 250, "v", 100, "ab" * 32), FileAnswer("r2", "e1", reason="OFFLINE")]
        for answer in answers:
            queue.answer_file("w2", answer)
        heard: list[FileMessage] = []
        while len(heard) < len(answers):
            assert other.get(5.0) == []
            heard += other.take_file_messages()
        assert heard == answers
        owner.close()
        other.close()

    def test_answer_that_is_waited_for_arrives(self, queue: Queue) -> None:
        answer = OutputAnswer("e1", (OutputPiece(task_id="t1"),))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(queue.take_output, "r2", timeout_s=WAIT_S)
            queue.answer_output("r2", answer, ttl_s=30)
            assert waiting.result() == answer

    def test_results_are_shared_with_subscribers_for_a_time(self, queue: Queue, clock: Clock) -> None:
        wake_ups = queue.listen("w1")
        clock.now = 0
        assert queue.watch(["alice", "bob"], "w1", ttl_s=45) == {"alice", "bob"}
        clock.now = 10
        assert queue.watch(["alice", "carol"], "w1", ttl_s=45) == {"carol"}
        assert queue.watch(["bob"], "w2", ttl_s=45) == {"bob"}
        clock.now = 11
        found = queue.watchers(["alice", "bob", "unknown"])
        assert {forwarder_id: set(owner_ids) for forwarder_id, owner_ids in found.items()} == {
            "w1": {"alice", "bob"},
            "w2": {"bob"},
        }
        clock.now = 54
        assert queue.watchers(["alice", "bob"]) == {"w1": ["alice"], "w2": ["bob"]}
        assert queue.watch(["bob"], "w1", ttl_s=45) == {"bob"}  # what ended since 45 was not shared
        blob = BlobRef("alice/hash", 5, "hash")
        ends = [make_result("t1", owner_id="alice"), make_result("t2", result=None, result_ref=blob)]
        shared = SharedResults(ends, {"alice/hash": "https://there"}, 7.5)
        queue.share({"w1": [shared], "w2": [shared]})
        assert wake_ups.get(5.0) == []
        assert wake_ups.take_shared() == [shared]
        assert wake_ups.take_shared() == []
        wake_ups.close()

    def test_unreachable_store_is_unavailable(self, queue: Queue, cut: Callable[[], None]) -> None:
        queue.ping()
        wake_ups = queue.listen("w1")
        cut()
        with pytest.raises(Unavailable):
            queue.ping()
        with pytest.raises(Unavailable):
            queue.enqueue([make_queued("t1")])
        with pytest.raises(Unavailable):
            wake_ups.get(5.0)
        wake_ups.close()

    # what the reconciler asks

    def test_missing_tasks_are_not_waiting_leased_or_recently_ended(
        self, queue: Queue, wipe: Callable[[], None]
    ) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("ended"), make_queued("leased"), make_queued("waiting")])
        queue.enqueue([make_queued("elsewhere", endpoint_id="e2")])
        single.lease(queue, "e1", fence, limit=2, lease_s=30)
        single.ack(queue, fence, [make_result("ended")])
        queue.flushed({"e1": ["ended"]})
        asked = {"e1": ["never", "ended", "leased", "waiting", "elsewhere"], "e2": ["elsewhere", "never"], "e3": []}

        assert queue.find_missing(asked) == {"never", "elsewhere"}
        assert queue.find_missing({}) == frozenset()
        wipe()
        assert queue.find_missing({"e1": ["leased"], "e2": ["elsewhere"]}) == {"leased", "elsewhere"}

    def test_many_missing_tasks_are_found_at_once(self, queue: Queue) -> None:
        ids = [f"t{number}" for number in range(1201)]
        queue.enqueue([make_queued(task_id) for task_id in ids[1:]])

        assert queue.find_missing({"e1": ids}) == {"t0"}

    def test_non_empty_outboxes_are_listed(self, queue: Queue) -> None:
        fence = own(queue)
        queue.enqueue([make_queued("t1")])
        single.lease(queue, "e1", fence, limit=1, lease_s=30)
        assert queue.find_outboxes(["e1", "e2"]) == []
        single.ack(queue, fence, [make_result("t1")])
        assert queue.find_outboxes(["e2", "e1"]) == ["e1"]
        queue.flushed({"e1": ["t1"]})
        assert queue.find_outboxes(["e1"]) == []

    def test_a_checkpoint_is_replaced_only_while_it_is_as_expected(
        self, queue: Queue, wipe: Callable[[], None]
    ) -> None:
        assert queue.read_checkpoint("repair") == ""
        assert not queue.write_checkpoint("repair", "2", expected="1")
        assert queue.write_checkpoint("repair", "1", expected="")
        assert queue.write_checkpoint("repair", "2", expected="1")
        assert (queue.read_checkpoint("repair"), queue.read_checkpoint("other")) == ("2", "")
        wipe()
        assert not queue.write_checkpoint("repair", "3", expected="2")
        assert queue.read_checkpoint("repair") == ""


def _consuming(queue: Queue, fence: int) -> list[Callable[[], object]]:
    """Every call that needs a complete queue and its owner."""
    return [
        lambda: single.mark_disconnected(queue, "e1", "w1", fence),
        lambda: single.lease(queue, "e1", fence, limit=1, lease_s=LEASE_S),
        lambda: queue.unlease("e1", fence, ["t1"]),
        lambda: single.leased(queue, "e1", fence),
        lambda: single.cancel_requests(queue, "e1", fence),
        lambda: single.maintain(queue, "e1", fence, renew=["t1"]),
        lambda: single.ack(queue, fence, [make_result("t1")]),
    ]


def _rebuilding(queue: Queue, fence: int) -> list[Callable[[], object]]:
    return [
        lambda: queue.restore("e1", fence, [make_queued("t1")], held={}, lease_s=LEASE_S),
        lambda: single.mark_restored(queue, "e1", fence),
    ]


def _hear(queue: Queue, get: Callable[[float], Sequence[str] | None], last: str) -> set[str]:
    """All that was said until ``last``: messages may arrive in more than one piece."""
    heard: set[str] = set()
    while last not in heard:
        more = get(5.0)
        assert more, f"only {heard} was heard"
        heard.update(more)
    return heard | set(get(0.0) or ())


class TestFakeQueue(QueueSuite):
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def queue(self, clock: Clock) -> FakeQueue:
        return FakeQueue(clock)

    @pytest.fixture
    def wipe(self, queue: FakeQueue) -> Callable[[], None]:
        return queue.wipe

    @pytest.fixture
    def forget_results(self, queue: FakeQueue) -> Callable[[], None]:
        return queue.forget_results

    @pytest.fixture
    def cut(self, queue: FakeQueue) -> Callable[[], None]:
        return queue.close
