"""Recovery: wiped queues, dead forwarders, lost agents, store outages."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable

import pytest
import redis

from farcall_common import wire
from farcall_common.store.settings import Stores
from farcall_common.wire import TaskState
from tests.integration.forwarder_peers import (
    FAST,
    Agent,
    Client,
    Cloud,
    RunningForwarder,
    check,
    cloud,
    counter,
    endpoint_id,
    environ,
    forwarder,
    forwarding,
    health,
    stores,
)
from tests.integration.store_servers import Valkey
from tests.support.stores import FakeDatabase, FakeQueue, fake_stores
from tests.waiting import wait_until

__all__ = ["cloud", "endpoint_id", "environ", "forwarder", "stores"]


#: Heartbeat of agents that get lost; long enough for a pause of two seconds of this process.
BRIEF_S = 0.7


# -- wiped queues ------------------------------------------------------------------------------------------------------


def test_waiting_tasks_survive_a_wipe(
    valkey: Valkey, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session()
        task_ids = cloud.submit_new(endpoint_id, 50)
        valkey.wipe()
        agent.say(wire.Credit(tasks=10))
        agent.serve(50)
    cloud.until_all(task_ids, TaskState.SUCCESS)


@pytest.mark.parametrize("idempotent", [True, False])
def test_tasks_that_the_agent_holds_are_not_sent_again_after_a_wipe(
    idempotent: bool, valkey: Valkey, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=100)
        task_ids = cloud.submit_new(endpoint_id, 20, idempotent=idempotent)
        specs = agent.take(20)
        valkey.wipe()
        wait_until(
            lambda: counter(forwarder, "queues_restored") >= 2, "the queue is restored"
        )  # the first was its claim
        assert agent.hears_no(wire.RunTasks, for_s=0.3)
        agent.finish(specs)
        agent.until_recorded(task_ids)
    assert cloud.states(task_ids) == {TaskState.SUCCESS}


def test_a_thousand_tasks_and_three_wipes(
    valkey: Valkey, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=100)
        task_ids = cloud.submit_new(endpoint_id, 1000)
        done: set[str] = set()
        for milestone in (250, 500, 750, 1000):
            while len(done) < milestone:
                for spec in (specs := agent.received):
                    done.add(spec.task_id)
                agent.received = []
                if specs:
                    agent.finish(specs)
                    agent.say(wire.Credit(tasks=len(specs)))
                agent._receive(0.2)
            if milestone < 1000:
                valkey.wipe()
        wait_until(lambda: bool(agent._receive(0.05)) or not agent.spool, "everything is recorded")
        agent.until_recorded(list(agent.spool))
    cloud.until_all(task_ids, TaskState.SUCCESS)


def test_a_stream_survives_a_wipe(valkey: Valkey, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent, Client(cloud, cloud.owner_id, forwarder) as client:
        agent.open_session(credit=1)
        client.open("group")
        [task_id] = cloud.submit_new(endpoint_id, 1, task_group_id="group")
        specs = agent.take(1)
        valkey.wipe()
        agent.finish(specs)
        assert list(client.results(1)) == [task_id]


# -- a forwarder dies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idempotent", [True, False])
def test_tasks_that_never_reached_the_agents_spool_are_sent_again(
    idempotent: bool, stores: Stores, cloud: Cloud, endpoint_id: str
) -> None:
    first = RunningForwarder(stores)
    with Agent(cloud, endpoint_id, first) as agent:
        agent.accepts = False
        agent.open_session(credit=10)
        [task_id] = cloud.submit_new(endpoint_id, 1, idempotent=idempotent)
        agent.take(1)  # and the agent died before it had stored the task
        first.kill()
        with forwarding(stores) as second:
            agent.accepts = True
            agent.connect(second)
            agent.open_session(credit=10)
            [spec] = agent.take(1)
            assert (spec.task_id, spec.attempt) == (task_id, 1)
            agent.finish([spec])
            agent.until_recorded([task_id])


def test_held_tasks_that_ended_meanwhile_are_forgotten(stores: Stores, cloud: Cloud, endpoint_id: str) -> None:
    first = RunningForwarder(stores)
    with Agent(cloud, endpoint_id, first) as agent:
        agent.open_session(credit=10)
        [task_id] = cloud.submit_new(endpoint_id, 1)
        specs = agent.take(1)
        agent.finish(specs)
        cloud.until_all([task_id], TaskState.SUCCESS)
        first.kill()
        agent.spool = {spec.task_id: spec for spec in specs}  # the acknowledgement of its result was lost
        with forwarding(stores) as second:
            agent.connect(second)
            welcome = agent.open_session(credit=10)
            assert [ref.task_id for ref in welcome.forget] == [task_id]
            assert agent.hears_no(wire.RunTasks, for_s=0.5)


def test_tasks_that_the_database_does_not_have_are_dropped_and_logged(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The database was restored to a time before these tasks were submitted."""
    caplog.set_level("INFO")
    held, reported = (wire.new_task_id() for _ in range(2))
    known = cloud.submit_new(endpoint_id, 1)
    with Agent(cloud, endpoint_id, forwarder) as agent:
        welcome = agent.open_session(held=(wire.HeldTask(task_id=held, attempt=1),))
        assert [ref.task_id for ref in welcome.forget] == [held]
        result = wire.ResultSpec(task_id=reported, attempt=1, state=TaskState.SUCCESS, result=0)
        agent.say(wire.TaskResults(results=(result,)), b"result")
        agent.until_recorded([reported])  # otherwise the agent would keep the result for ever
        agent.say(wire.Credit(tasks=1))
        agent.serve(1)
    cloud.until_all(known, TaskState.SUCCESS)
    logged = {record.message: vars(record) for record in caplog.records}
    assert logged["the endpoint drops tasks that the database does not have"]["tasks"] == 1
    assert logged["dropped results of tasks that the database does not have"]["results"] == 1


def test_a_redirected_agent_is_served_by_the_new_forwarder_only(stores: Stores, cloud: Cloud, endpoint_id: str) -> None:
    with (
        forwarding(stores) as first,
        forwarding(stores) as second,
        Agent(cloud, endpoint_id, first) as there,
        Agent(cloud, endpoint_id, second, spool_id=there.spool_id) as here,
    ):
        there.open_session(credit=10)
        here.open_session(credit=10)
        there.hear(wire.Redirect)  # the first one was fenced
        task_ids = cloud.submit_new(endpoint_id, 3)
        here.finish(here.take(3))
        here.until_recorded(task_ids)
        assert not there.received


# -- an agent dies -----------------------------------------------------------------------------------------------------


def test_tasks_sent_to_a_lost_spool_are_sent_again_or_lost(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as old:
        old.open_session(credit=10)
        [again] = cloud.submit_new(endpoint_id, 1)
        [never] = cloud.submit_new(endpoint_id, 1, idempotent=False)
        old.take(2)
        old.say(wire.Goodbye())
    with Agent(cloud, endpoint_id, forwarder) as new:  # same endpoint, another disk
        wait_until(lambda: new.is_let_in(forwarder), "the old session is over")
        new.say(wire.Credit(tasks=10))
        [spec] = new.take(1)
        assert spec.task_id == again
        cloud.until_all([never], TaskState.LOST)
        error = cloud.task(never).error
        assert error is not None
        assert "spool" in error.message
        assert error.hint


def test_tasks_of_a_lost_agent_are_sent_again_or_end_lost(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(heartbeat_s=BRIEF_S, credit=10)
        [again] = cloud.submit_new(endpoint_id, 1)
        [never] = cloud.submit_new(endpoint_id, 1, idempotent=False)
        agent.take(2)
        cloud.until_all([never], TaskState.LOST)  # silence, then the lease runs out
        wait_until(lambda: cloud.stores.queue.depth([endpoint_id]) == 1, "the other waits again")
        error = cloud.task(never).error
        assert error is not None
        assert error.hint
        agent.spool = {}
        agent.connect(forwarder)
        agent.open_session(credit=10)
        [spec] = agent.take(1)
        assert (spec.task_id, spec.attempt) == (again, 2)


def test_a_live_agent_keeps_its_tasks_beyond_any_lease(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10)
        task_ids = cloud.submit_new(endpoint_id, 2)
        specs = agent.take(2)
        assert agent.hears_no(wire.RunTasks, for_s=2 * FAST.lease_s)
        agent.finish(specs)
        agent.until_recorded(task_ids)
    assert {cloud.task(task_id).attempt for task_id in task_ids} == {1}


def test_a_task_that_kills_its_endpoint_becomes_a_dead_letter(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    [task_id] = cloud.submit_new(endpoint_id, 1, max_attempts=2)
    with Agent(cloud, endpoint_id, forwarder) as agent:
        for attempt in (1, 2):
            agent.connect(forwarder)
            agent.open_session(heartbeat_s=BRIEF_S, credit=1)
            assert [spec.attempt for spec in agent.take(1)] == [attempt]
            agent.spool = {}
            wait_until(
                lambda: cloud.stores.queue.depth([endpoint_id]) == 1 or cloud.task(task_id).state.is_terminal,
                "the lease has run out",
            )
    cloud.until_all([task_id], TaskState.DEAD_LETTERED)
    error = cloud.task(task_id).error
    assert error is not None
    assert (error.code, len(error.reasons or ())) == ("TASK_DEAD_LETTERED", 2)
    assert f"farcall tasks retry {task_id}" in error.hint


# -- store outages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("away", ["queue", "database"])
def test_sessions_and_results_survive_a_store_outage(away: str) -> None:
    stores = fake_stores()
    cloud = Cloud(stores)
    endpoint_id = cloud.add_endpoint()
    store = {"queue": stores.queue, "database": stores.database}[away]
    assert isinstance(store, FakeQueue | FakeDatabase)
    with forwarding(stores) as forwarder, Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10)
        task_ids = cloud.submit_new(endpoint_id, 5)
        specs = agent.take(5)
        store.reachable = False
        agent.finish(specs)
        wait_until(lambda: health(forwarder)[0] == 503, "the forwarder is degraded")
        assert agent.hears_no(wire.ResultsRecorded, for_s=2 * FAST.lease_s)
        assert (check(forwarder, "/livez"), check(forwarder, "/readyz")) == (200, 200), "ECS and the balancer keep it"
        store.reachable = True
        agent.until_recorded(task_ids)
        more = cloud.submit_new(endpoint_id, 5)
        agent.finish(agent.take(5))
        agent.until_recorded(more)
    assert cloud.states(task_ids + more) == {TaskState.SUCCESS}


def test_a_late_enqueue_does_not_restart_a_non_idempotent_task(
    valkey: Valkey, stores: Stores, cloud: Cloud, endpoint_id: str
) -> None:
    tasks = cloud.tasks(endpoint_id, 1, idempotent=False)
    first = RunningForwarder(stores)
    with Agent(cloud, endpoint_id, first) as agent:
        agent.open_session(credit=1)
        cloud.submit(tasks)
        agent.take(1)
        first.kill()
    valkey.wipe()
    cloud.enqueue(tasks)  # by a process that read the record before the task was dispatched
    with forwarding(stores) as second, Agent(cloud, endpoint_id, second) as agent:
        agent.open_session(credit=1)
        assert agent.hears_no(wire.RunTasks, for_s=0.5)
        cloud.until_all([tasks[0].task_id], TaskState.LOST)


def test_no_non_idempotent_task_is_sent_twice(valkey: Valkey, stores: Stores, cloud: Cloud, endpoint_id: str) -> None:
    """Wipes and dead forwarders at bad moments, and an agent that loses its spool."""
    sent: Counter[str] = Counter()
    task_ids = cloud.submit_new(endpoint_id, 60, idempotent=False)
    spool_id = wire.new_id()
    short = dataclasses.replace(FAST, ownership_ttl_s=0.5)
    for number in range(4):
        with forwarding(stores, short) as forwarder, Agent(cloud, endpoint_id, forwarder, spool_id=spool_id) as agent:
            wait_until(functools.partial(agent.is_let_in, forwarder), "the dead forwarder's claim is over")
            agent.say(wire.Credit(tasks=10))
            deadline = time.monotonic() + 0.4
            while time.monotonic() < deadline:
                agent._receive(0.05)
                if number == 1 and len(agent.received) > 5:
                    valkey.wipe()
                    agent.finish(agent.received[:3])
            sent.update(spec.task_id for spec in agent.received)
        spool_id = wire.new_id()
    with forwarding(stores, short) as forwarder, Agent(cloud, endpoint_id, forwarder) as agent:
        wait_until(functools.partial(agent.is_let_in, forwarder), "the dead forwarder's claim is over")
        agent.say(wire.Credit(tasks=100))
        wait_until(lambda: bool(agent._receive(0.1)) or sum(sent.values()) + len(agent.received) >= 60, "all were sent")

        def have_all_ended() -> bool:
            """Receive tasks that were sent and not read: they stay leased to the agent while it has a session."""
            agent._receive(0.05)
            received = agent.take(len(agent.received))
            sent.update(spec.task_id for spec in received)
            agent.finish(received)
            return all(state.is_terminal for state in cloud.states(task_ids))

        wait_until(have_all_ended, "all have ended")
    assert max(sent.values()) == 1
    assert cloud.states(task_ids) <= {TaskState.SUCCESS, TaskState.LOST}


# -- an agent is silent for longer than a lease ------------------------------------------------------------------------

#: Leases of 1.5 s, silence after 0.3 s, and a session as long as the test.
PATIENT = dataclasses.replace(FAST, silence_s=0.3, return_s=60.0)


def outlast_a_lease(cloud: Cloud, endpoint_id: str, task_ids: list[str]) -> None:
    """Wait for twice the time after which Valkey ends leases that are not renewed."""
    queue = cloud.stores.queue
    start = queue.take_tokens(f"clock-{endpoint_id}", 1, rate_per_s=1 / (2 * PATIENT.lease_s), burst=1)
    assert start.tokens == 1
    wait_until(
        lambda: queue.take_tokens(f"clock-{endpoint_id}", 1, rate_per_s=1 / (2 * PATIENT.lease_s), burst=1).tokens == 1,
        "two leases have passed",
    )
    assert cloud.states(task_ids) <= {TaskState.WAITING_FOR_EP, TaskState.WAITING_FOR_NODES, TaskState.RECEIVED}


def test_tasks_sent_to_a_silent_agent_are_not_lost(cloud: Cloud, endpoint_id: str) -> None:
    with forwarding(cloud.stores, PATIENT) as forwarder, Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10)
        task_ids = cloud.submit_new(endpoint_id, 2, idempotent=False)
        agent.accepts = False
        specs = agent.take(2)
        outlast_a_lease(cloud, endpoint_id, task_ids)
        more = cloud.submit_new(endpoint_id, 2)
        assert agent.hears_no(wire.RunTasks, for_s=0.5), "the agent is silent"
        agent.accepts = True
        agent.accept(specs)
        agent.finish(specs)
        agent.finish(agent.take(2))
        cloud.until_all([*task_ids, *more], TaskState.SUCCESS)


def test_a_returning_agent_keeps_held_tasks_and_gets_the_others_again(cloud: Cloud, endpoint_id: str) -> None:
    with forwarding(cloud.stores, PATIENT) as forwarder, Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10)
        arrived, never_arrived = cloud.submit_new(endpoint_id, 2, idempotent=False)
        agent.accepts = False
        specs = agent.take(2)
        agent.accept([spec for spec in specs if spec.task_id == arrived])
        agent.say(wire.Goodbye())
        agent.accepts = True
        outlast_a_lease(cloud, endpoint_id, [arrived, never_arrived])
        agent.connect(forwarder)
        agent.open_session(credit=10)
        [again] = agent.take(1)
        assert again.task_id == never_arrived
        agent.finish([again, *(spec for spec in specs if spec.task_id == arrived)])
        cloud.until_all([arrived, never_arrived], TaskState.SUCCESS)


# -- late enqueues of ended tasks, when the queue has lost the marker of their result ----------------------------------

# They come from a process that read the task as open from the database, and was delayed since.


@pytest.fixture
def forget_results(valkey: Valkey) -> Callable[[], None]:
    """Makes the queue forget recorded results."""

    def forget() -> None:
        with redis.Redis.from_url(valkey.url) as server:
            assert server.delete(*(key for key in server.scan_iter("t:*") if server.ttl(key) != -1))

    return forget


@pytest.mark.parametrize("is_back", [False, True], ids=["same session", "new session"])
def test_a_recorded_non_idempotent_task_is_not_sent_again(
    is_back: bool,
    cloud: Cloud,
    forwarder: RunningForwarder,
    endpoint_id: str,
    forget_results: Callable[[], None],
) -> None:
    [task] = cloud.tasks(endpoint_id, 1, idempotent=False)
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=5)
        cloud.submit([task])
        agent.finish(agent.take(1), b"the result")
        agent.until_recorded([task.task_id])
        wait_until(lambda: not cloud.stores.queue.outbox(endpoint_id), "the result is marked as recorded")
        forget_results()
        if is_back:
            agent.connect(forwarder)
            agent.open_session(credit=5)
        before = cloud.stores.tasks.list_events(task.task_id)
        cloud.enqueue([task])
        # A task submitted after it arrives, so the late one was processed.
        cloud.submit_new(endpoint_id, 1)
        [spec] = agent.take(1)
        assert spec.task_id != task.task_id
        assert agent.hears_no(wire.RunTasks, for_s=0.5)
        wait_until(lambda: _is_gone(cloud, endpoint_id, task.task_id), "the queue has removed it")
    ended = cloud.task(task.task_id)
    assert (ended.state, ended.result) == (TaskState.SUCCESS, b"the result")
    events = cloud.stores.tasks.list_events(task.task_id)
    assert [event.state for event in events if event.state.is_terminal] == [TaskState.SUCCESS]
    assert len(events) <= len(before) + 1  # its dispatch


def test_the_first_result_of_an_idempotent_task_is_kept(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str, forget_results: Callable[[], None]
) -> None:
    [task] = cloud.tasks(endpoint_id, 1)
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=5)
        cloud.submit([task])
        agent.finish(agent.take(1), b"first")
        agent.until_recorded([task.task_id])
        wait_until(lambda: not cloud.stores.queue.outbox(endpoint_id), "the result is marked as recorded")
        forget_results()
        cloud.enqueue([task])
        agent.finish(agent.take(1), b"second")
        agent.until_recorded([task.task_id])
        wait_until(lambda: _is_gone(cloud, endpoint_id, task.task_id), "the queue has removed it")
    ended = cloud.task(task.task_id)
    assert (ended.state, ended.result) == (TaskState.SUCCESS, b"first")


def _is_gone(cloud: Cloud, endpoint_id: str, task_id: str) -> bool:
    place = cloud.stores.queue.position(endpoint_id, task_id)
    return place.state.value in ("", "done") and not cloud.stores.queue.outbox(endpoint_id)
