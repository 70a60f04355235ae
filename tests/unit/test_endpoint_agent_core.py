"""What an agent decides, as values: no process, no clock, no disk."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from farcall_common import wire
from farcall_common.environments import Environment
from farcall_common.event_log import UserBytes
from farcall_common.limits import MAX_INLINE_BYTES
from farcall_common.ssh_signatures import AllowedSigners, Signer, public_blob, sign, statement
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.reports import REPORT_AFTER_S
from farcall_endpoint.agent.core.scheduling import round_robin
from farcall_endpoint.agent.core.signatures import SignatureCheck
from farcall_endpoint.agent.core.tasks import OpenedCall, SpooledTask, StoredResult, Task, TaskResult
from farcall_endpoint.config.settings import QosSettings
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import Died, Finished, Progress, Started
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from tests.support.agent import CoreDriver, Turn
from tests.task_fields import with_options

BODY = b"a function"
HASH = hashlib.sha256(BODY).hexdigest()
FUNCTION = wire.FunctionSpec(function_hash=HASH, name="f", body=0)


def make_core(
    *,
    prefetch: int = 0,
    slots_hint: int = 2,
    weights: dict[str, int] | None = None,
    allowed_functions: Sequence[str] | None = None,
    signatures: SignatureCheck | None = None,
    seal: Callable[[Task, TaskResult], TaskResult] = lambda _, result: result,
    qos: QosSettings | None = None,
    baselines: Mapping[str, float] | None = None,
) -> CoreDriver:
    core = AgentCore(
        endpoint_id="e",
        policy=round_robin(),
        slots_hint=slots_hint,
        prefetch=PrefetchPolicy(horizon_s=1.0, limit=prefetch, unseen=prefetch),
        window=PrefetchPolicy(horizon_s=1.0, limit=0),
        max_window=100,
        weights=weights,
        allowed_functions=allowed_functions,
        signatures=signatures,
        seal=seal,
        qos=qos,
        baselines=baselines,
    )
    return CoreDriver(core)


def spec(task_id: str, **options: object) -> wire.TaskSpec:
    values: dict[str, object] = {
        "task_id": task_id,
        "attempt": 1,
        "function_id": "f",
        "function_hash": HASH,
        "payload": 1,
        "max_attempts": 3,
    }
    return wire.TaskSpec(**with_options({**values, **options}))


def send(core: CoreDriver, *specs: wire.TaskSpec, now: float = 0.0) -> Turn:
    core.run_tasks(wire.RunTasks(tasks=specs, functions=(FUNCTION,)), [BODY, b"payload"])
    return core.decide(now=now)


def connected(*, prefetch: int = 0) -> CoreDriver:
    core = make_core(prefetch=prefetch)
    core.manager_registered("m", slots=2)
    core.progress("m", Progress(workers=2))
    core.opened()
    core.decide(now=0.0)
    return core


def finish(core: CoreDriver, task_id: str, result: bytes = b"r", *, manager: str = "m", now: float = 1.0) -> Turn:
    finished = Finished(task_id, TaskState.SUCCESS, 0, None, 0.0, 0.5)
    core.progress(manager, Progress(workers=2, finished=(finished,)), [result])
    return core.decide(now=now)


def ids(tasks: Sequence[Task]) -> list[str]:
    return [task.task_id for task in tasks]


def test_tasks_are_spooled_then_acknowledged_then_dispatched_up_to_the_slots() -> None:
    turn = send(connected(), spec("a"), spec("b"), spec("c"))
    assert ids(turn.accepted) == ids(turn.acknowledged) == ["a", "b", "c"]
    assert [function for function, _ in turn.functions] == [FUNCTION]
    assert {name: ids(tasks) for name, tasks in turn.orders.items()} == {"m": ["a", "b"]}
    assert [(task.task_id, task.starts) for task in turn.starts] == [("a", 1), ("b", 1)]


def test_a_result_frees_a_slot_and_is_spooled_and_sent() -> None:
    core = connected()
    send(core, spec("a"), spec("b"), spec("c"))
    turn = finish(core, "a")
    assert ids(turn.finished) == ids(turn.results) == ["a"]
    assert ids(turn.orders["m"]) == ["c"]
    end = turn.results[0].result
    assert end is not None
    assert (end.state, end.body, end.started_at, end.ended_at) == (TaskState.SUCCESS, b"r", 0.0, 0.5)


def test_bodies_are_freed_once_spooled() -> None:
    core = connected()
    small, large, waiting = b"payload", b"x" * 20_000, spec("c", payload=2)
    core.run_tasks(wire.RunTasks(tasks=(spec("a"), spec("b"), waiting), functions=(FUNCTION,)), [BODY, small, large])
    [a, b, c] = core.decide(now=0.0).accepted
    assert (a.payload, b.payload, c.payload) == (small, small, large)
    core.written(now=0.0)
    assert (a.payload, b.payload, c.payload) == (None, None, None)
    [task] = finish(core, "a").results
    assert task.result is not None
    assert task.result.body == b"r"
    core.fail_write(now=1.0)
    assert task.result.body == b"r"
    core.decide(now=2.0)
    core.written(now=2.0)
    assert task.result.body is None


def test_engine_without_a_spool_drops_reported_results() -> None:
    none = PrefetchPolicy(horizon_s=0.0, limit=0)
    policy = round_robin()
    core = CoreDriver(
        AgentCore(
            endpoint_id="", policy=policy, slots_hint=1, prefetch=none, window=none, max_window=0, has_cloud=False
        )
    )
    core.manager_registered("m", slots=1)
    core.progress("m", Progress(workers=1))
    core.accept(spec("a"), payload=b"p", functions=[HASH])
    turn = core.decide(now=0.0)
    assert ids(turn.orders["m"]) == ["a"]
    assert not turn.accepted
    [task] = finish(core, "a").results
    assert task.result is not None
    assert task.result.body == b"r"
    assert core.held() == ()
    assert core.report().outstanding_tasks == 0


def test_recorded_result_is_dropped_from_the_spool() -> None:
    core = connected()
    [task] = send(core, spec("a")).accepted
    finish(core, "a")
    core.recorded([wire.TaskRef(task_id="a", attempt=1)])
    assert core.decide(now=2.0).forgotten == [task.seq]
    assert core.held() == ()
    core.recorded([wire.TaskRef(task_id="a", attempt=1)])
    assert core.decide(now=2.0).forgotten == []


def test_unacknowledged_results_are_resent_in_the_next_session() -> None:
    core = connected()
    send(core, spec("a"))
    core.closed()
    assert finish(core, "a").results == []
    assert core.held() == (wire.HeldTask(task_id="a", attempt=1, finished=True),)
    for _ in range(2):
        core.opened()
        assert ids(core.decide(now=2.0).results) == ["a"]


def test_tasks_the_forwarder_forgets_are_dropped_and_stopped() -> None:
    core = connected()
    tasks = send(core, spec("a"), spec("b"), spec("c")).accepted
    core.closed()
    core.opened([wire.TaskRef(task_id="a", attempt=1), wire.TaskRef(task_id="c", attempt=1)])
    turn = core.decide(now=1.0)
    assert turn.dropped == [tasks[0].seq, tasks[2].seq]
    assert turn.forgotten == []
    assert turn.cancels == {"m": ["a"]}
    assert finish(core, "a").finished == []
    assert [held.task_id for held in core.held()] == ["b"]


def test_credit_is_a_window_that_is_refilled() -> None:
    core = make_core(slots_hint=2)
    core.opened()
    assert core.decide(now=0.0).credit == 4
    send(core, spec("a"), spec("b"), spec("c"))
    assert core.decide(now=0.0).credit == 0
    core.manager_registered("m", slots=2)
    core.progress("m", Progress(workers=2))
    core.decide(now=0.0)
    assert finish(core, "a").credit == 1


def test_no_credit_and_no_dispatch_while_draining() -> None:
    core = connected()
    core.drain()
    turn = send(core, spec("a"))
    assert ids(turn.accepted) == ["a"]
    assert not turn.orders
    assert turn.credit == 0


def test_prefetching_sends_idempotent_tasks_ahead_and_no_others() -> None:
    core = connected(prefetch=1)
    assert len(send(core, *(spec(f"i{n}") for n in range(6))).orders["m"]) == 4
    core = connected(prefetch=1)
    turn = send(core, *(spec(f"n{n}", idempotent=False) for n in range(6)))
    assert len(turn.orders["m"]) == 2


def test_long_tasks_switch_prefetching_off() -> None:
    core = connected(prefetch=5)
    send(core, spec("a"), spec("b"))
    finished = Finished("a", TaskState.SUCCESS, 0, None, 0.0, 60.0)
    core.progress("m", Progress(workers=2, finished=(finished,)), [b"r"])
    core.decide(now=60.0)
    assert len(send(core, spec("c"), spec("d"), spec("e")).orders["m"]) == 1


def test_worker_death_is_retried_up_to_max_attempts() -> None:
    core = connected()
    send(core, spec("a", max_attempts=2))
    core.progress("m", Progress(workers=2, died=(Died("a", "exit code 1"),)))
    assert ids(core.decide(now=1.0).orders["m"]) == ["a"]
    core.progress("m", Progress(workers=2, died=(Died("a", "exit code 2", "out", "err"),)))
    [task] = core.decide(now=2.0).results
    assert task.result is not None
    assert task.result.error is not None
    assert task.result.error["code"] == "WORKER_DIED"
    assert task.result.error["stderr_tail"] == "err"
    assert (task.result.exhausted, task.result.error["reasons"]) == (True, ("exit code 1", "exit code 2"))


def test_attempts_lost_on_other_agents_count() -> None:
    core = connected()
    core.accept(spec("a", attempt=2, max_attempts=3), spec("b", attempt=3, max_attempts=3), functions=[HASH])
    core.decide(now=0.0)
    core.progress("m", Progress(workers=2, died=(Died("a", "signal 9"), Died("b", "signal 9"))))
    turn = core.decide(now=1.0)
    assert ids(turn.orders["m"]) == ["a"]
    [ended] = turn.finished
    assert ended.result is not None
    assert ended.result.error is not None
    assert ended.task_id == "b"
    assert ended.result.error["reasons"] == ("the endpoint that had it went away",) * 2 + ("signal 9",)


def test_non_idempotent_task_is_lost_and_no_dead_letter() -> None:
    core = connected()
    send(core, spec("a", idempotent=False))
    core.progress("m", Progress(workers=2, died=(Died("a", "exit code 1"),)))
    [task] = core.decide(now=1.0).results
    assert task.result is not None
    assert (task.result.state, task.result.exhausted) == (TaskState.FAILED, False)


def test_manager_loss_counts_attempts_of_started_tasks_only() -> None:
    core = connected(prefetch=2)
    send(core, *(spec(name, max_attempts=1) for name in "abcd"))
    core.manager_lost("m", "its manager died")
    turn = core.decide(now=1.0)
    assert {task.task_id: task.result.error["code"] for task in turn.finished if task.result and task.result.error} == {
        "a": "WORKER_DIED",
        "b": "WORKER_DIED",
    }
    core.manager_registered("n", slots=2)
    core.progress("n", Progress(workers=2))
    assert ids(core.decide(now=1.0).orders["n"]) == ["c", "d"]


def test_expected_manager_exit_counts_no_attempt() -> None:
    core = connected()
    send(core, spec("a", max_attempts=1))
    core.manager_lost("m", "stopped", expected=True)
    assert core.decide(now=1.0).finished == []


def test_non_idempotent_task_is_lost_with_its_manager() -> None:
    core = connected()
    send(core, spec("a", idempotent=False), spec("b", idempotent=False), spec("c", idempotent=False))
    core.manager_lost("m", "its manager died")
    ended = core.decide(now=1.0).finished
    assert [(task.task_id, task.result.state) for task in ended if task.result] == [
        ("a", TaskState.LOST),
        ("b", TaskState.LOST),
    ]


def test_late_result_counts_once() -> None:
    core = connected()
    send(core, spec("a"))
    core.manager_lost("m", "silent")
    core.manager_registered("n", slots=1)
    core.progress("n", Progress(workers=1))
    assert ids(core.decide(now=1.0).orders["n"]) == ["a"]
    assert ids(finish(core, "a", manager="m").finished) == ["a"]
    assert finish(core, "a", manager="n").finished == []


def test_restart_loses_no_task_and_reruns_only_idempotent_ones() -> None:
    def restored(task_id: str, seq: int, starts: int, **options: object) -> SpooledTask:
        return SpooledTask(seq, spec(task_id, **options), 1, 0.0, starts)

    tasks = [
        restored("again", 1, 1),
        restored("used up", 2, 3),
        restored("must not", 3, 1, idempotent=False),
        restored("not begun", 4, 0, idempotent=False),
    ]
    core = make_core(slots_hint=4)
    core.restore(tasks, [HASH])
    core.manager_registered("m", slots=4)
    core.progress("m", Progress(workers=4))
    turn = core.decide(now=0.0)
    assert ids(turn.orders["m"]) == ["again"]
    assert {task.task_id: task.result.state for task in turn.finished if task.result} == {
        "used up": TaskState.FAILED,
        "must not": TaskState.LOST,
    }
    core.opened([])  # the cloud knows of no newer spool
    assert ids(core.decide(now=0.0).orders["m"]) == ["not begun"]


def test_cancelled_non_idempotent_task_does_not_start_after_a_restart() -> None:
    tasks = [
        SpooledTask(seq, spec(task_id, idempotent=False), 1, 0.0, is_fetched=is_fetched)
        for seq, (task_id, is_fetched) in enumerate([("recorded", True), ("cancelled", True), ("fetching", False)], 1)
    ]
    core = make_core(slots_hint=4)
    core.restore(tasks, [HASH])
    core.manager_registered("m", slots=4)
    core.progress("m", Progress(workers=4))
    core.cancel(["cancelled"])
    assert core.decide(now=0.0).fetches == []
    core.opened([wire.TaskRef(task_id="recorded", attempt=1)])
    turn = core.decide(now=0.0)
    assert not turn.orders
    assert ids(turn.fetches) == ["fetching"]
    core.fetched(turn.fetches[0], b"payload")
    assert ids(core.decide(now=0.0).orders["m"]) == ["fetching"]


def test_a_redelivery_raises_the_attempt_and_starts_nothing() -> None:
    core = connected()
    send(core, spec("a"))
    turn = send(core, spec("a", attempt=2))
    assert ids(turn.redelivered) == ids(turn.acknowledged) == ["a"]
    assert not turn.accepted
    assert not turn.orders
    [task] = finish(core, "a").results
    assert task.attempt == 2
    assert ids(send(core, spec("a", attempt=3)).results) == ["a"]


def test_recorded_result_is_not_reported_again_in_the_same_turn() -> None:
    core = connected()
    send(core, spec("a"))
    finish(core, "a")
    core.run_tasks(wire.RunTasks(tasks=(spec("a", attempt=2),)), [b"", b"p"])
    core.recorded([wire.TaskRef(task_id="a", attempt=1)])
    turn = core.decide(now=2.0)
    assert len(turn.forgotten) == 1
    assert turn.results == []


def test_new_attempt_replaces_a_result_left_in_the_spool() -> None:
    stored = StoredResult(TaskState.SUCCESS, None, 0, "", None, None)
    core = make_core()
    core.restore([SpooledTask(1, spec("a"), 1, 0.0, result=stored), SpooledTask(2, spec("a"), 2, 0.0)], [HASH])
    core.manager_registered("m", slots=1)
    core.progress("m", Progress(workers=1))
    turn = core.decide(now=0.0)
    assert turn.forgotten == [1]
    assert ids(turn.orders["m"]) == ["a"]


def test_cancel_before_during_and_after_the_run() -> None:
    core = connected()
    send(core, spec("a"), spec("b"), spec("c"))
    core.cancel(["a", "c", "unknown"])
    turn = core.decide(now=1.0)
    assert turn.cancels == {"m": ["a"]}
    assert [(task.task_id, task.result.state) for task in turn.results if task.result] == [("c", TaskState.CANCELLED)]
    core.progress("m", Progress(workers=2, died=(Died("a", "killed"),)))
    [task] = core.decide(now=1.0).results
    assert task.result is not None
    assert task.result.state is TaskState.CANCELLED
    core.cancel(["a"])
    assert core.decide(now=1.0).actions == []


def test_a_task_without_its_function_fails() -> None:
    core = connected()
    core.run_tasks(wire.RunTasks(tasks=(spec("a"),), functions=(FUNCTION,)), [b"not it", b"p"])
    [task] = core.decide(now=0.0).finished
    assert task.result is not None
    assert task.result.error is not None
    assert task.result.error["code"] == "FUNCTION_UNKNOWN"


def test_a_blob_is_fetched_before_its_task_is_dispatched() -> None:
    core = connected()
    blob = wire.BlobLocation(blob_key="k", size_bytes=1, sha256="s", url="u")
    turn = send(core, spec("a", payload=None, payload_blob=blob), spec("b", payload=None, payload_blob=blob))
    assert ids(turn.fetches) == ["a", "b"]
    assert not turn.orders
    core.fetched(turn.fetches[0], b"p")
    core.fetch_failed(turn.fetches[1], "HTTP 403")
    turn = core.decide(now=1.0)
    assert ids(turn.fetched) == ids(turn.orders["m"]) == ["a"]
    assert [task.result.error["code"] for task in turn.finished if task.result and task.result.error] == [
        "PAYLOAD_DOWNLOAD_FAILED"
    ]


def test_a_large_result_is_uploaded_before_it_is_reported() -> None:
    core = connected()
    send(core, spec("a"))
    data = b"x" * (MAX_INLINE_BYTES + 1)
    turn = finish(core, "a", data)
    assert ids(turn.finished) == ids(turn.upload_requests) == ["a"]
    assert turn.results == []
    core.granted(wire.BlobGrant(task_id="a", attempt=1, blob_key="k", upload_url="u"))
    [(task, grant)] = core.decide(now=1.0).uploads
    location = wire.BlobLocation(blob_key=grant.blob_key, size_bytes=len(data), sha256="s")
    core.uploaded(task, location)
    assert ids(core.decide(now=1.0).results) == ["a"]
    assert task.result is not None
    assert task.result.blob == location
    assert task.result.sha256 == hashlib.sha256(data).hexdigest()


def test_an_upload_is_tried_again_with_a_new_grant_and_then_fails_the_task() -> None:
    core = connected()
    send(core, spec("a"))
    [task] = finish(core, "a", b"x" * (MAX_INLINE_BYTES + 1)).upload_requests
    now = 1.0
    for _ in range(4):
        core.upload_failed(task, "HTTP 500", retryable=True)
        assert core.decide(now=now).upload_requests == []
        due_at = core.next_deadline()
        assert due_at is not None
        now = max(now, due_at) + 10
        assert ids(core.decide(now=now).upload_requests) == ["a"]
    core.upload_failed(task, "HTTP 500", retryable=True)
    turn = core.decide(now=now)
    assert ids(turn.finished) == ids(turn.results) == ["a"]
    assert task.result is not None
    assert task.result.error is not None
    assert task.result.error["code"] == "RESULT_UPLOAD_FAILED"


def test_refused_upload_grant_fails_the_task() -> None:
    core = connected()
    send(core, spec("a"))
    finish(core, "a", b"x" * (MAX_INLINE_BYTES + 1))
    error = {"code": "FORBIDDEN", "message": "no", "fault": "caller"}
    core.granted(wire.BlobGrant(task_id="a", attempt=1, error=error))
    assert ids(core.decide(now=1.0).results) == ["a"]


def test_short_lived_states_are_not_reported() -> None:
    core = connected()
    send(core, spec("a"), spec("b"), spec("c"))
    finish(core, "a", now=0.1)
    assert core.decide(now=REPORT_AFTER_S - 0.01).transitions == []
    core.progress("m", Progress(workers=2, started=(Started("b", 0.05),)))
    transitions = core.decide(now=REPORT_AFTER_S + 0.2).transitions
    assert [(move.task_id, move.state) for move in transitions] == [
        ("b", TaskState.RUNNING),
        ("c", TaskState.WAITING_FOR_LAUNCH),
    ]
    assert core.decide(now=100.0).transitions == []


def test_report_counts_tasks_and_slots() -> None:
    core = connected()
    send(core, spec("a"), spec("b"), spec("c"))
    core.progress("m", Progress(workers=2, idle_workers=1, problem="no disk"))
    core.decide(now=1.0)
    report = core.report()
    assert (report.managers, report.total_workers, report.idle_workers) == (1, 2, 1)
    assert (report.pending_tasks, report.outstanding_tasks) == (1, 3)
    assert report.detail == {"problem": "no disk"}


# -- several submitters ------------------------------------------------------------------------------------------------


def several(submitter: str, count: int) -> list[wire.TaskSpec]:
    return [spec(f"{submitter}{number}", submitter=submitter) for number in range(count)]


def test_the_task_of_another_submitter_gets_the_next_slot() -> None:
    core = connected()
    send(core, *several("a", 50))
    send(core, *several("b", 1))
    assert ids(finish(core, "a0").orders["m"]) == ["b0"]
    assert ids(finish(core, "b0").orders["m"]) == ["a2"]


def test_submitters_with_long_and_with_short_tasks_share_the_slots() -> None:
    """Not the starts: one of two slots is for b as long as b has tasks, although those of a never end."""
    core = connected()
    send(core, *several("a", 5), *several("b", 5))
    for number in range(4):
        assert ids(finish(core, f"b{number}").orders["m"]) == [f"b{number + 1}"]
    assert ids(finish(core, "b4").orders["m"]) == ["a1"]


def test_tasks_returned_by_a_lost_manager_free_their_share() -> None:
    core = connected()
    send(core, *several("a", 4))
    core.manager_lost("m", "gone")
    core.manager_registered("n", slots=2)
    core.progress("n", Progress(workers=2))
    assert ids(send(core, *several("b", 1), now=1.0).orders["n"]) == ["b0", "a0"]
    assert ids(finish(core, "b0", manager="n").orders["n"]) == ["a1"]


def test_a_task_that_waits_for_a_longer_block_keeps_its_turn() -> None:
    core = make_core()
    core.manager_registered("m", slots=1, ends_at=10.0)
    core.progress("m", Progress(workers=1))
    core.opened()
    long = spec("a0", submitter="a", walltime_s=60.0)
    assert ids(send(core, long, *several("b", 2)).orders["m"]) == ["b0"]
    core.manager_registered("n", slots=1)
    core.progress("n", Progress(workers=1))
    assert ids(core.decide(now=0.0).orders["n"]) == ["a0"]


def test_weights_give_a_submitter_more_slots() -> None:
    core = make_core(weights={"b": 3})
    core.manager_registered("m", slots=8)
    core.progress("m", Progress(workers=8))
    core.opened()
    started = ids(send(core, *several("a", 9), *several("b", 9)).orders["m"])
    assert [sum(task_id.startswith(letter) for task_id in started) for letter in "ab"] == [2, 6]


def test_tasks_never_started_by_a_manager_run_elsewhere_even_if_non_idempotent() -> None:
    core = connected()
    send(core, spec("a"), spec("b", idempotent=False, max_attempts=1))
    core.manager_lost("m", "its manager could start no worker", unstarted=True)
    core.manager_registered("n", slots=2)
    core.progress("n", Progress(workers=2))
    turn = core.decide(now=2.0)
    assert not turn.finished
    assert {task.task_id: task.starts for task in turn.orders["n"]} == {"a": 1, "b": 1}


def lose_with(core: CoreDriver, others: str, times: int) -> Turn:
    """Managers that die while they run ``a0`` and a task of ``others``."""
    for number in range(times):
        manager_id = f"{others}-{number}"
        send(core, spec(f"{others}-{number}", submitter=others, max_attempts=1))
        core.manager_registered(manager_id, slots=2)
        core.progress(manager_id, Progress(workers=2))
        turn = core.decide(now=1.0)
        assert "a0" in ids(turn.orders[manager_id])
        core.manager_lost(manager_id, "its manager died")
        turn = core.decide(now=2.0)
    return turn


def test_attempts_lost_together_with_tasks_of_others_do_not_count() -> None:
    core = make_core()
    core.opened()
    send(core, spec("a0", submitter="a", max_attempts=2))

    turn = lose_with(core, "b", 5)
    assert not turn.finished
    assert all(task.starts == 0 for task in turn.starts), "the spool does not count them"


def test_a_task_that_may_be_the_cause_ends_nevertheless() -> None:
    core = make_core()
    core.opened()
    send(core, spec("a0", submitter="a", max_attempts=2))

    assert "a0" not in ids(lose_with(core, "b", 6).finished)
    assert "a0" in ids(lose_with(core, "c", 1).finished)


@pytest.mark.parametrize("expected", [False, True])
def test_lost_manager_counts_for_the_task_whose_worker_it_was_ending(expected: bool) -> None:
    core = make_core()
    core.opened()
    send(core, spec("a0", submitter="a", max_attempts=1), spec("b0", submitter="b", max_attempts=1))
    core.manager_registered("n", slots=2)
    core.progress("n", Progress(workers=2))
    core.decide(now=1.0)
    core.add(ev.WorkerEnding("n", "a0"))
    core.add(ev.WorkerEnding("another manager", "b0"))
    core.manager_lost("n", "it was silent for too long", expected=expected)
    turn = core.decide(now=2.0)
    assert ids(turn.finished) == ([] if expected else ["a0"])
    core.manager_registered("o", slots=2)
    core.progress("o", Progress(workers=2))
    assert "b0" in ids(core.decide(now=3.0).orders["o"])


def test_attempts_lost_with_tasks_of_the_same_submitter_count() -> None:
    core = make_core()
    core.opened()
    send(core, spec("a0", submitter="a", max_attempts=2))

    assert "a0" in ids(lose_with(core, "a", 2).finished)


def test_submitter_without_tasks_at_a_manager_is_prefetched_despite_a_full_queue() -> None:
    core = connected(prefetch=5)
    send(core, *several("a", 30))
    assert ids(send(core, *several("b", 2)).orders["m"]) == ["b0"]
    assert ids(finish(core, "b0").orders["m"]) == ["b1"]


def test_reserve_credit_is_returned_as_tasks_end_above_the_window() -> None:
    core = connected()
    core.decide(now=0.0)
    send(core, *several("a", 30))
    for number in range(40):
        send(core, spec(f"b{number}", submitter="b"))
        assert finish(core, f"b{number}").credit == 1


# -- an endpoint that runs certain functions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "code"),
    [(["f"], None), ([HASH], None), (["g"], "FUNCTION_NOT_PERMITTED"), ([], "FUNCTION_NOT_PERMITTED")],
)
def test_the_agent_runs_listed_functions_only(allowed: list[str], code: str | None) -> None:
    core = make_core(allowed_functions=allowed)
    turn = send(core, spec("a"))
    refused = [task.result.error["code"] for task in turn.finished if task.result and task.result.error]
    assert refused == ([] if code is None else [code])


@pytest.mark.parametrize(
    ("starts", "idempotent", "refused"), [(0, True, True), (0, False, True), (1, True, True), (1, False, False)]
)
def test_tasks_in_the_spool_are_refused_when_the_list_has_changed(starts: int, idempotent: bool, refused: bool) -> None:
    """One that may have run already, and may not run twice, is lost as it would be otherwise."""
    core = make_core(allowed_functions=["g"])
    task = SpooledTask(1, spec("a", idempotent=idempotent), 1, 0.0, starts=starts)
    core.restore([task], [HASH])
    [ended] = core.decide(now=0.0).finished
    assert ended.result is not None
    assert (ended.result.error or {})["code"] == ("FUNCTION_NOT_PERMITTED" if refused else "TASK_LOST")


@pytest.mark.parametrize("is_signed", [False, True])
def test_a_restricted_endpoint_runs_no_environment_that_a_task_names(is_signed: bool) -> None:
    """An image of the submitter's is another way to run other code."""
    core = make_core(signatures=signatures()) if is_signed else make_core(allowed_functions=["f"])
    sci = Environment(type="docker", location="python:3.12", name="sci")
    named = spec("a", environment=sci, container="c-1")
    signed = wire.RunTasks(tasks=(named, spec("b")), functions=(function(SIGNATURE),))
    core.run_tasks(signed, [BODY, b"payload"])
    [(code, message)] = errors_of(core.decide(now=0.0))
    assert (code, "in no environment that the task names: sci." in message) == ("FUNCTION_NOT_PERMITTED", True)


@pytest.mark.parametrize(
    "options",
    [
        {"container": "c-1"},  # the definition was lost on the way, by an older release
        {"container": "c-1", "environment": Environment(type="docker", location="--privileged")},
        {"environment": Environment(type="new-one", location="x")},
    ],
)
def test_a_task_without_a_proper_environment_does_not_run(options: dict[str, object]) -> None:
    [(code, _)] = errors_of(send(make_core(), spec("a", **options)))
    assert code == "CONTAINER_UNSUPPORTED"


# -- an endpoint that runs signed functions ----------------------------------------------------------------------------

KEY = ed25519.Ed25519PrivateKey.from_private_bytes(b"1" * 32)
OTHER_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(b"2" * 32)
SIGNATURE = sign(statement("f", HASH), KEY)
FORGED = sign(statement("f", HASH), OTHER_KEY)


def signatures(*, valid_after: float | None = None, valid_before: float | None = None) -> SignatureCheck:
    signer = Signer("ada@lab.org", public_blob(KEY), valid_after=valid_after, valid_before=valid_before)
    return SignatureCheck(AllowedSigners([signer]))


def function(signature: str = "", *, name: str = "f") -> wire.FunctionSpec:
    return msgspec.structs.replace(FUNCTION, name=name, signature=signature)


def errors_of(turn: Turn) -> list[tuple[str, str]]:
    """Codes and messages of the tasks that failed in a turn."""
    errors = [task.result.error for task in turn.finished if task.result and task.result.error]
    return [(error["code"], error["message"]) for error in errors]


def receive(core: CoreDriver, task_id: str, *functions: wire.FunctionSpec, now: float = 0.0) -> Turn:
    core.run_tasks(wire.RunTasks(tasks=(spec(task_id),), functions=functions), [BODY, b"payload"])
    return core.decide(now=now)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (function(SIGNATURE), None),
        (function(), "Function f has no signature"),
        (function(FORGED), "not among the allowed signers"),
        (function(SIGNATURE, name="g"), "another body or another name"),
        (function(sign(statement("f", "0" * 64), KEY)), "another body or another name"),
        (function("ssh"), "not an SSH signature"),
    ],
    ids=["signed", "unsigned", "another key", "another name", "another body", "no signature"],
)
def test_the_agent_runs_signed_functions_only(sent: wire.FunctionSpec, message: str | None) -> None:
    turn = receive(make_core(signatures=signatures()), "a", sent)
    logged = [action.principals for action in turn.actions if isinstance(action, do.LogSigner)]
    assert logged == ([] if message else ["ada@lab.org"])
    if message is None:
        assert errors_of(turn) == []
        return
    [(code, found)] = errors_of(turn)
    assert code == "FUNCTION_NOT_SIGNED"
    assert message in found


def test_a_signed_body_is_not_sent_to_a_worker_with_another() -> None:
    """The hash that is signed is that of the body that arrived."""
    core = make_core(signatures=signatures())
    core.run_tasks(wire.RunTasks(tasks=(spec("a"),), functions=(function(SIGNATURE),)), [b"another", b"payload"])
    [(code, _)] = errors_of(core.decide(now=0.0))
    assert code == "FUNCTION_UNKNOWN"


@pytest.mark.parametrize(
    ("validity", "message"), [({"valid_before": 10.0}, "has expired"), ({"valid_after": 30.0}, "not valid yet")]
)
def test_the_key_of_a_signer_must_be_valid_when_a_task_arrives(validity: dict[str, float], message: str) -> None:
    core = make_core(signatures=signatures(**validity))
    [(code, found)] = errors_of(receive(core, "a", function(SIGNATURE), now=20.0))
    assert (code, message in found) == ("FUNCTION_NOT_SIGNED", True)
    assert errors_of(receive(core, "b", now=40.0 if "valid_after" in validity else 5.0)) == []


def test_a_function_that_is_signed_later_runs_and_stays_signed() -> None:
    core = make_core(signatures=signatures())
    assert len(errors_of(receive(core, "a", function()))) == 1
    turn = receive(core, "b", function(SIGNATURE))
    assert errors_of(turn) == []
    assert [sent.signature for sent, _ in turn.functions] == [SIGNATURE], "the spool gets the signature"
    for task_id, other in (("c", function()), ("d", function(FORGED))):
        turn = receive(core, task_id, other)
        assert (errors_of(turn), turn.functions) == ([], []), "a worse signature takes nothing back"


@pytest.mark.parametrize("signature", [SIGNATURE, FORGED, ""])
def test_tasks_in_the_spool_need_a_signature_after_a_restart(signature: str) -> None:
    core = make_core(signatures=signatures())
    core.restore([SpooledTask(1, spec("a"), 1, 0.0)], [HASH], [function(signature)] if signature else [])
    codes = [code for code, _ in errors_of(core.decide(now=0.0))]
    assert codes == ([] if signature == SIGNATURE else ["FUNCTION_NOT_SIGNED"])


def test_answers_of_sealed_calls_are_sealed_also_after_a_restart_and_by_whatever_ends_the_task() -> None:
    def seal(task: Task, result: TaskResult) -> TaskResult:
        return dataclasses.replace(result, error={"code": "X", "sealed": task.answer_key.decode()})

    core = make_core(seal=seal)
    core.manager_registered("m", slots=2)
    core.opened()
    call = OpenedCall(b"key")
    core.add(ev.TasksReceived((spec("a"),), UserBytes([b"p"]), (FUNCTION,), UserBytes([BODY]), [call]))
    [accepted] = core.decide(now=0.0).accepted
    assert accepted.answer_key == b"key"
    core.progress("m", Progress(died=(Died("a", "boom"),)))
    core.decide(now=1.0)

    spooled = SpooledTask(1, spec("a", max_attempts=1), 1, 0.0, starts=1, answer_key=b"key")
    again = make_core(seal=seal)
    again.restore([spooled], [HASH])
    [ended] = again.decide(now=0.0).finished
    assert ended.result is not None
    assert ended.result.error == {"code": "X", "sealed": "key"}


def test_a_call_that_is_refused_by_its_seal_fails_and_is_not_run() -> None:
    core = connected()
    refused = OpenedCall(error=outcomes.sealed_required().to_json())
    blob = wire.BlobLocation(blob_key="b", size_bytes=1, sha256="0")
    tasks = (spec("a"), spec("b", payload=None, payload_blob=blob))
    core.add(ev.TasksReceived(tasks, UserBytes([b"", None]), (FUNCTION,), UserBytes([BODY]), [refused, None]))
    turn = core.decide(now=0.0)
    [failed], [fetched] = turn.finished, turn.fetches
    assert failed.result is not None
    assert failed.result.error is not None
    assert failed.result.error["code"] == "ENDPOINT_REQUIRES_SEALED"
    core.add(ev.PayloadFetched("b", fetched.seq, UserBytes([b""]), refused))
    turn = core.decide(now=0.0)
    assert [task.task_id for task in turn.finished] == ["b"]
    assert not turn.orders


def test_the_log_has_no_keys_of_answers() -> None:
    call = OpenedCall(b"hush")
    events: list[ev.Event] = [
        ev.TasksReceived((spec("a"),), UserBytes([b"p"]), opened=[call]),
        ev.PayloadFetched("a", 1, UserBytes([b"p"]), call),
        ev.Restored([SpooledTask(1, spec("a"), 1, 0.0, answer_key=b"hush")], [HASH]),
    ]
    for event in events:
        assert "hush" not in repr(ev.for_log(event))
