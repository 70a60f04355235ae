"""Retries of what a function raised, as an agent decides them: no process, no clock, a spool in memory."""

from __future__ import annotations

import itertools
from typing import Any, Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farcall_common import wire
from farcall_common.event_log import UserBytes
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.scheduling import round_robin
from farcall_endpoint.agent.core.tasks import OpenedCall, Stage, Task
from farcall_endpoint.agent.shell.sealing import seal_result
from farcall_endpoint.agent.shell.spool import Spool
from farcall_endpoint.contracts.agent_manager import Died, Finished, Progress, Started
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from tests.support.agent import CoreDriver, Turn
from tests.unit.test_endpoint_agent_core import BODY, FUNCTION, HASH, connected, finish, ids, make_core, send, spec

ERROR = {"code": "TASK_FAILED", "message": "OSError: away", "fault": "user_code", "exception_type": "OSError"}


def raised(
    core: CoreDriver, task_id: str = "a", *, now: float, manager: str = "m", is_retried: bool = True, **error: Any
) -> Turn:
    finished = Finished(task_id, TaskState.FAILED, None, {**ERROR, **error}, now - 0.5, now, is_retried=is_retried)
    core.progress(manager, Progress(workers=2, finished=(finished,)))
    return core.decide(now=now)


def after(core: CoreDriver, now: float) -> Turn:
    return core.decide(now=now)


def error_of(task: Task) -> dict[str, Any]:
    assert task.result is not None
    assert task.result.error is not None
    return task.result.error


def test_a_raised_error_is_retried_after_its_delay_which_doubles() -> None:
    core = connected()
    [task] = send(core, spec("a", retries=3, retry_delay_s=1.0)).accepted
    for retry, now, delay_s in ((1, 10.0, 1.0), (2, 20.0, 2.0), (3, 30.0, 4.0)):
        turn = raised(core, now=now)
        assert (turn.finished, turn.orders, task.stage) == ([], {}, Stage.RETRYING)
        assert core.core.next_deadline() == now + delay_s
        assert not after(core, now + delay_s - 0.01).orders
        assert ids(after(core, now + delay_s).orders["m"]) == ["a"]
        assert (task.retries_used, task.starts) == (retry, 1)
    [task] = raised(core, now=40.0).finished
    assert error_of(task)["retries_used"] == 3
    assert task.result is not None
    assert task.result.details == {"retries_used": 3, "earlier_run_s": 1.5}
    assert not task.result.exhausted


@pytest.mark.parametrize("retries", [0, 2])
def test_an_error_that_the_worker_does_not_name_is_final(retries: int) -> None:
    core = connected()
    send(core, spec("a", retries=retries))
    [task] = raised(core, now=1.0, is_retried=False).finished
    assert "retries_used" not in error_of(task)


def test_the_wait_is_shortened_at_random_and_has_a_limit() -> None:
    for jitter, delay_s in ((0.0, 300.0), (0.5, 225.0)):
        core = CoreDriver(
            AgentCore(
                endpoint_id="",
                policy=round_robin(),
                slots_hint=1,
                prefetch=PrefetchPolicy(horizon_s=0.0, limit=0),
                window=PrefetchPolicy(horizon_s=0.0, limit=0),
                max_window=0,
                has_cloud=False,
                jitter=lambda jitter=jitter: jitter,  # type: ignore[misc]
            )
        )
        core.manager_registered("m", slots=1)
        core.progress("m", Progress(workers=1))
        core.accept(spec("a", retries=100, retry_delay_s=200.0), payload=b"p", functions=[HASH])
        core.decide(now=0.0)
        raised(core, now=0.0)
        after(core, 300.0)
        raised(core, now=1000.0)
        assert core.core.next_deadline() == 1000.0 + delay_s


def test_the_slot_is_free_meanwhile_and_a_task_that_waits_is_no_reason_for_less_credit() -> None:
    core = connected()
    send(core, *(spec(name, retries=1) for name in "ab"), spec("c"), spec("d"))
    turn = raised(core, now=1.0)
    assert ids(turn.orders["m"]) == ["c"]
    assert turn.credit == 1
    assert core.demand().tasks == 4


def test_its_turn_had_come_so_it_goes_first() -> None:
    core = connected()
    send(core, spec("a", retries=1), *(spec(name) for name in "bcd"))
    raised(core, now=1.0)
    after(core, 2.0)
    assert ids(finish(core, "b", now=2.1).orders["m"]) == ["a"]


def test_attempts_that_crashed_and_retries_are_counted_apart() -> None:
    core = connected()
    send(core, spec("a", retries=1, max_attempts=2))
    core.progress("m", Progress(workers=2, died=(Died("a", "exit code 1"),)))
    core.decide(now=1.0)
    raised(core, now=2.0)
    [task] = after(core, 3.0).orders["m"]
    assert (task.starts, task.retries_used) == (2, 1)
    core.progress("m", Progress(workers=2, died=(Died("a", "exit code 1"),)))
    [task] = core.decide(now=4.0).finished
    assert error_of(task)["code"] == "WORKER_DIED"
    assert error_of(task)["reasons"] == ("exit code 1",) * 2
    assert error_of(task)["retries_used"] == 1


def test_a_success_after_a_retry_says_so() -> None:
    core = connected()
    send(core, spec("a", retries=5))
    raised(core, now=1.0)
    after(core, 2.0)
    [task] = finish(core, "a", now=3.0).results
    assert task.result is not None
    assert (task.result.state, task.result.body) == (TaskState.SUCCESS, b"r")
    assert task.result.details == {"retries_used": 1, "earlier_run_s": 0.5}


def test_a_cancel_ends_the_wait() -> None:
    core = connected()
    send(core, spec("a", retries=5))
    raised(core, now=1.0)
    core.cancel(["a"])
    [task] = core.decide(now=1.1).results
    assert (task.result and task.result.state) == TaskState.CANCELLED
    assert error_of(task)["message"] == "The task was cancelled while it waited to be retried."
    assert not after(core, 100.0).orders
    assert finish(core, "a", now=101.0).finished == []


def test_a_cancel_that_came_too_late_to_stop_the_function_is_no_reason_to_run_it_again() -> None:
    core = connected()
    send(core, spec("a", retries=5))
    core.cancel(["a"])
    core.decide(now=1.0)
    assert ids(raised(core, now=1.1).finished) == ["a"]


def test_a_task_that_the_cloud_does_not_need_is_forgotten_while_it_waits() -> None:
    core = connected()
    [task] = send(core, spec("a", retries=5)).accepted
    raised(core, now=1.0)
    core.recorded([wire.TaskRef(task_id="a", attempt=1)])
    turn = core.decide(now=1.1)
    assert (turn.dropped, list(turn.write.retried)) == ([task.seq], [task])
    assert not after(core, 100.0).orders


def test_a_report_of_a_manager_that_was_given_up_starts_no_run_beside_the_one_that_counts() -> None:
    core = connected()
    send(core, spec("a", retries=5))
    core.manager_lost("m", "silent")
    core.manager_registered("n", slots=1)
    core.progress("n", Progress(workers=1))
    [task] = core.decide(now=1.0).orders["n"]
    raised(core, now=2.0, manager="m")
    assert task.stage is not Stage.RETRYING


def test_without_nodes_a_task_fails_instead_of_waiting() -> None:
    core = connected()
    send(core, spec("a", retries=5))
    raised(core, now=1.0)
    core.nodes(refusal="no account", problem="")
    assert [error_of(task)["code"] for task in core.decide(now=1.1).finished] == ["NODES_UNAVAILABLE"]


def test_a_drained_agent_keeps_the_task_and_does_not_spin() -> None:
    core = connected()
    send(core, spec("a", retries=5))
    core.drain()
    raised(core, now=1.0)
    assert not after(core, 2.0).orders
    assert (core.core.next_deadline() or 3.0) > 2.0
    assert [held.task_id for held in core.held()] == ["a"]


def test_each_retry_is_reported_however_short_the_wait_is() -> None:
    core = connected()
    send(core, spec("a", retries=2, retry_delay_s=0.0))
    turn = raised(core, now=1.0)
    assert ids(turn.orders["m"]) == ["a"], "in the same turn"
    [transition] = turn.transitions
    assert (transition.state, transition.at) == (TaskState.WAITING_FOR_NODES, 1.0)
    assert transition.detail == {"retry": 1, "retries": 2, "retry_at": 1.0, "error": "OSError"}


def test_retries_without_a_session_are_reported_in_the_next_one_with_the_state_now() -> None:
    core = connected()
    send(core, spec("a", retries=2))
    core.closed()
    assert raised(core, now=1.0).transitions == []
    after(core, 2.0)
    core.progress("m", Progress(workers=2, started=(Started("a", 2.0),)))
    after(core, 3.0)
    core.opened()
    assert [(each.state, each.detail.get("retry")) for each in after(core, 10.0).transitions] == [
        (TaskState.WAITING_FOR_NODES, 1),
        (TaskState.RUNNING, None),
    ]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ({"exception_type": "a.b.Away"}, "a.b.Away"),
        ({"exception_type": None, "code": "WALLTIME_EXCEEDED"}, "WALLTIME_EXCEEDED"),
        ({"exception_type": "rm -rf; a whole sentence"}, None),
        ({"exception_type": "x" * 201}, None),
    ],
)
def test_the_history_has_the_name_of_the_class_and_no_free_text(error: dict[str, Any], shown: str | None) -> None:
    core = connected()
    send(core, spec("a", retries=2))
    [transition] = raised(core, now=1.0, **error).transitions
    assert transition.detail.get("error") == shown


def test_the_history_of_a_sealed_call_has_no_class() -> None:
    core = make_core(seal=seal_result)
    core.manager_registered("m", slots=2)
    core.progress("m", Progress(workers=2))
    core.opened()
    core.add(
        ev.TasksReceived(
            (spec("a", retries=1),), UserBytes([b""]), [FUNCTION], UserBytes([b""]), [OpenedCall(b"k" * 32)]
        )
    )
    core.decide(now=0.0)
    [transition] = raised(core, now=1.0).transitions
    assert "error" not in transition.detail
    after(core, 2.0)
    [task] = raised(core, now=3.0).finished
    assert (error_of(task)["retries_used"], error_of(task)["sealed"] != "") == (1, True)
    assert "OSError" not in str({**error_of(task), "sealed": ""})


# -- the spool ---------------------------------------------------------------------------------------------------------


class Agent:
    """A core and its spool, in which the task "a" runs. ``runs`` counts the starts of its function."""

    def __init__(self, **options: object) -> None:
        self.spool = Spool(None)
        self.now = 0.0
        self.runs = self.crashes = 0
        self.ended: list[Task] = []
        self.core = make_core(slots_hint=1)
        self._start()
        self.core.run_tasks(wire.RunTasks(tasks=(spec("a", **options),), functions=(FUNCTION,)), [BODY, b"payload"])
        self.step()

    def _start(self) -> None:
        self.managers = 0
        self.core.opened()
        self.add_manager()

    def add_manager(self) -> None:
        self.managers += 1
        self.core.manager_registered(self.manager, slots=1)
        self.core.progress(self.manager, Progress(workers=1))

    @property
    def manager(self) -> str:
        return f"m{self.managers}"

    def step(self, passing_s: float = 0.0) -> None:
        """A turn, written to the spool before it counts."""
        self.now += passing_s
        turn = self.core.decide(now=self.now)
        self.spool.commit(turn.write)
        self.runs += sum(len(tasks) for tasks in turn.orders.values())
        self.ended += turn.finished
        self.core.written(now=self.now)

    @property
    def is_running(self) -> bool:
        return self.core.core.demand().busy != []

    def raises(self) -> None:
        raised_at = self.now
        finished = Finished("a", TaskState.FAILED, None, dict(ERROR), raised_at, raised_at, is_retried=True)
        self.core.progress(self.manager, Progress(workers=1, finished=(finished,)))
        self.step()

    def crashes_worker(self) -> None:
        self.crashes += 1
        self.core.progress(self.manager, Progress(workers=1, died=(Died("a", "killed"),)))
        self.step()

    def loses_manager(self) -> None:
        self.crashes += self.is_running
        self.core.manager_lost(self.manager, "killed")
        self.add_manager()
        self.step()

    def restarts(self) -> None:
        """As after kill -9: only the spool is left."""
        self.crashes += self.is_running
        tasks, functions = self.spool.load()
        self.core = make_core(slots_hint=1)
        self.core.restore(tasks, sorted(functions))
        self._start()
        self.step()

    def step_to_retry(self) -> None:
        self.step(passing_s=300.0)


@pytest.mark.parametrize("idempotent", [True, False])
def test_an_agent_that_is_killed_in_the_back_off_goes_on_with_it(idempotent: bool) -> None:
    agent = Agent(retries=2, max_attempts=1, retry_delay_s=100.0, idempotent=idempotent)
    agent.raises()
    agent.restarts()
    assert agent.runs == 1
    agent.step(passing_s=99.0)
    assert agent.runs == 1
    agent.step(passing_s=1.0)
    assert agent.runs == 2
    agent.raises()
    agent.restarts()
    agent.step_to_retry()
    agent.raises()
    assert (agent.runs, agent.crashes) == (3, 0)
    [task] = agent.ended
    assert error_of(task)["retries_used"] == 2
    assert task.earlier_run_s == 0.0


def test_a_clock_that_is_set_back_meanwhile_delays_a_retry_by_five_minutes_at_most() -> None:
    agent = Agent(retries=1)
    agent.step(passing_s=7200.0)
    agent.raises()
    agent.now = 0.0
    agent.restarts()
    agent.step(passing_s=299.0)
    assert agent.runs == 1
    agent.step(passing_s=1.0)
    assert agent.runs == 2


def test_an_agent_that_is_killed_in_the_run_after_a_retry_counts_a_lost_attempt() -> None:
    for options, state in (({"max_attempts": 1}, "WORKER_DIED"), ({"idempotent": False}, "TASK_LOST")):
        agent = Agent(retries=2, **options)
        agent.raises()
        agent.step_to_retry()
        agent.restarts()
        [task] = agent.ended
        assert (agent.runs, error_of(task)["code"], error_of(task)["retries_used"]) == (2, state, 1)


def test_the_spool_keeps_nothing_of_a_retried_task_that_has_ended() -> None:
    agent = Agent(retries=1)
    agent.raises()
    count = "SELECT count(*) FROM retries"
    assert agent.spool._database.execute(count).fetchone() == (1,)
    agent.step_to_retry()
    agent.raises()
    assert agent.spool._database.execute(count).fetchone() == (0,)


Step = Literal["raises", "crashes_worker", "loses_manager", "restarts", "restarts in the run"]


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.sampled_from(get_args(Step)), max_size=12),
    retries=st.integers(0, 3),
    max_attempts=st.integers(1, 3),
    idempotent=st.booleans(),
)
def test_whatever_fails_a_task_ends_once_and_runs_exactly_as_often_as_it_may(
    steps: list[Step], retries: int, max_attempts: int, idempotent: bool
) -> None:
    """Its function never succeeds."""
    agent = Agent(retries=retries, max_attempts=max_attempts, idempotent=idempotent)
    raised = 0
    for step in itertools.chain(steps, itertools.repeat("raises")):
        if agent.ended:
            break
        if not (agent.is_running or step in ("loses_manager", "restarts")):
            agent.step_to_retry()
        raised += step == "raises"
        getattr(agent, step.partition(" ")[0])()
    [task] = agent.ended
    used_up = (max_attempts if idempotent else 1, retries + 1)
    if error_of(task)["code"] == "TASK_FAILED":
        assert raised == used_up[1]
        assert agent.crashes < used_up[0]
    else:
        assert raised < used_up[1]
        assert agent.crashes == used_up[0]
    assert agent.runs == raised + agent.crashes
    assert task.retries_used == error_of(task).get("retries_used", 0)
