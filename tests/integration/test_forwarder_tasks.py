"""Tasks through a forwarder: real ZeroMQ with CURVE, on real stores."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import pytest

from farcall_common import wire
from farcall_common.environments import Environment
from farcall_common.errors import Fault
from farcall_common.qos import QoS
from farcall_common.store.model import MAX_QUEUED_BYTES, SIGNATURE, BlobRef, Function, QueuedTask, RunningLimit
from farcall_common.store.queue_valkey import ValkeyQueue
from farcall_common.store.registry_valkey import ValkeyWakeUps
from farcall_common.store.settings import Stores
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import TaskState
from farcall_forwarder.adapters.zap import find_peers
from farcall_lambdas.identity import Identity
from tests.integration.forwarder_peers import (
    FAST,
    FUNCTION_BODY,
    HEARTBEAT_S,
    Agent,
    Client,
    Cloud,
    RunningForwarder,
    cloud,
    endpoint_id,
    environ,
    forwarder,
    forwarding,
    stores,
)
from tests.integration.store_servers import Valkey
from tests.support.memory_api import MemoryApi
from tests.waiting import wait_until

__all__ = ["cloud", "endpoint_id", "environ", "forwarder", "stores"]


def test_a_task_reaches_the_agent_and_its_result_the_client(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent, Client(cloud, cloud.owner_id, forwarder) as client:
        agent.open_session(credit=10)
        client.open("group")
        [task_id] = cloud.submit_new(endpoint_id, 1, payload=b"21", task_group_id="group")
        [spec] = agent.take(1)
        assert (spec.task_id, spec.attempt) == (task_id, 1)
        assert agent.payloads[task_id] == b"21"
        assert agent.functions[spec.function_hash] == FUNCTION_BODY
        agent.finish([spec], b"42")
        agent.until_recorded([task_id])
        pushed, body = client.results(1)[task_id]
        assert (pushed.state, pushed.task_group_id, body) == (TaskState.SUCCESS, "group", b"42")
        assert {"submitted_at", "enqueued_at", "leased_at", "accepted_at", "returned_at", "recorded_at"} <= set(
            pushed.timings
        )
    task = cloud.task(task_id)
    assert (task.state, task.result, task.attempt) == (TaskState.SUCCESS, b"42", 1)


def test_a_thousand_tasks_run_within_the_credit(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=64)
        task_ids = cloud.submit_new(endpoint_id, 1000)
        # The session of this side raises if more tasks arrive than its credit allows.
        agent.serve(1000)
    cloud.until_all(task_ids, TaskState.SUCCESS)


def test_tasks_submitted_before_the_agent_came_are_delivered(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    task_ids = cloud.submit_new(endpoint_id, 3)
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10)
        assert [spec.task_id for spec in agent.take(3)] == task_ids


def test_tasks_over_the_limit_of_a_submitter_follow_when_others_end(
    stores: Stores, cloud: Cloud, endpoint_id: str
) -> None:
    """The end of a lease wakes the forwarder: no sweep is needed."""
    cloud.stores.queue.set_limits({endpoint_id: {cloud.owner_id: RunningLimit(max_running=2)}}, complete=True)
    policy = dataclasses.replace(FAST, sweep_s=3600.0)
    with forwarding(stores, policy) as forwarder, Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10)
        task_ids = cloud.submit_new(endpoint_id, 4)
        first = agent.take(2)
        assert agent.hears_no(wire.RunTasks, for_s=0.5)
        [other] = cloud.submit_new(endpoint_id, 1, owner_id=wire.new_id())
        assert [spec.task_id for spec in agent.take(1)] == [other]
        agent.finish(first[:1])
        [third] = agent.take(1)
        assert [spec.task_id for spec in (*first, third)] == task_ids[:3]
        assert agent.hears_no(wire.RunTasks, for_s=0.5)


def test_a_task_with_a_target_is_sent_although_its_submitter_has_used_up_the_credit(
    stores: Stores, cloud: Cloud, endpoint_id: str
) -> None:
    policy = dataclasses.replace(FAST, sweep_s=3600.0)
    with forwarding(stores, policy) as forwarder, Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=2, reserve=2)
        batch = []
        for count in (1, 4):  # the first may be sent by the reserve, before the credit has come: then two steps lease
            batch += cloud.submit_new(endpoint_id, count)
            assert [spec.task_id for spec in agent.take(1)] == batch[-count:][:1]
        first, second = cloud.submit_new(endpoint_id, 2, qos=QoS(target_ms=200))
        [urgent] = agent.take(1)
        assert (urgent.task_id, urgent.submitter) == (first, cloud.owner_id)
        agent.finish([urgent])
        [urgent] = agent.take(1)
        assert urgent.task_id == second
        agent.say(wire.Credit(tasks=4))
        assert [spec.task_id for spec in agent.take(2)] == batch[2:4]


def test_a_graph_brings_the_functions_that_it_calls(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    """Its stages are in the record, the history and the usage."""
    callees = []
    for number, body in enumerate((b"resize", b"detect")):
        digest = hashlib.sha256(body).hexdigest()
        function = Function(wire.new_id(), cloud.owner_id, body.decode(), body, digest, metadata={SIGNATURE: "signed"})
        cloud.stores.functions.add_function(function)
        environment = Environment(type="uv", requirements=("polars",)) if number else None
        callees.append(Callee(function.function_id, digest, 1, environment))
    uv = wire.Capabilities(containers=("uv",))
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10, capabilities=uv)
        first, second = cloud.submit_new(endpoint_id, 2, callees=tuple(callees), payload=b"gr\nAAAA")
        specs = agent.take(2)
        assert {spec.task_id for spec in specs} == {first, second}
        assert [spec.options.callees for spec in specs] == [tuple(callees)] * 2
        assert set(agent.functions.values()) == {FUNCTION_BODY, b"resize", b"detect"}
        assert {agent.functions[each.function_hash] for each in callees} == {b"resize", b"detect"}
        stages = [{"number": 0, "name": "resize", "state": "done", "calls": 3, "ended": 3, "run_s": 4.5}]
        for spec in specs:
            details = {"stages": [*stages, "malformed"], "stage_run_s": -1.0}
            ended = wire.ResultSpec(
                task_id=spec.task_id, attempt=1, state=TaskState.SUCCESS, result=0, details=details, started_at=1.0
            )
            agent.say(wire.TaskResults(results=(ended,)), b"r")
        agent.until_recorded([first, second])
        report = wire.EndpointReport(managers=1, detail={"graphs": [{"task_id": first, "stages": stages}]})
        agent.say(wire.Heartbeat(at=time.time(), report=report))

        def reported() -> bool:
            endpoint = cloud.stores.endpoints.get_endpoint(endpoint_id)
            return endpoint is not None and bool(endpoint.status.graphs)

        wait_until(reported, "the graph is in the status of the endpoint")
    assert cloud.task(first).details == {"stages": stages, "stage_calls": 3, "stage_run_s": 4.5}
    assert cloud.task(first).options.callees == tuple(callees)
    assert cloud.stores.tasks.list_events(first)[-1].detail == {"stage_calls": 3}
    day = dt.datetime.now(dt.UTC).date()
    [usage] = cloud.stores.usage.read_usage(
        (), since=day - dt.timedelta(days=1), until=day + dt.timedelta(days=2), owner_ids=[cloud.owner_id]
    )
    assert (usage.tasks, usage.stages) == (2, 6)
    endpoint = cloud.stores.endpoints.get_endpoint(endpoint_id)
    assert endpoint is not None
    [graph] = endpoint.status.graphs
    assert (graph.task_id, graph.stages[0].name, graph.stages[0].ended) == (first, "resize", 3)


def test_a_graph_is_not_sent_without_a_function(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    deleted = (Callee(wire.new_id(), "0" * 64, 1),)
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10)
        [task_id] = cloud.submit_new(endpoint_id, 1, callees=deleted)
        cloud.until_all([task_id], TaskState.FAILED)
    error = cloud.task(task_id).error
    assert error is not None
    assert (error.code, deleted[0].function_id in error.message) == ("FUNCTION_UNKNOWN", True)


class LossyWakeUps(ValkeyWakeUps):
    """A subscription that loses each wake-up; ``lost`` receives the endpoints."""

    def __init__(self, client: Any, forwarder_id: str, lost: set[str]) -> None:
        super().__init__(client, forwarder_id)
        self._lost = lost

    def get(self, timeout_s: float) -> Sequence[str]:
        self._lost.update(super().get(timeout_s) or ())
        return ()


class LossyQueue(ValkeyQueue):
    """A Valkey queue whose wake-ups are lost; ``lost`` are the endpoints that they were for."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.lost: set[str] = set()

    def listen(self, forwarder_id: str) -> LossyWakeUps:
        return LossyWakeUps(self._client, forwarder_id, self.lost)


@pytest.mark.parametrize(("sweep_s", "is_found"), [(FAST.sweep_s, True), (3600.0, False)], ids=["sweeps", "no sweeps"])
def test_tasks_whose_wake_up_is_lost_are_found_by_a_sweep(
    sweep_s: float, is_found: bool, valkey: Valkey, stores: Stores, cloud: Cloud, endpoint_id: str
) -> None:
    """Without sweeps the task stays in the queue: nothing else finds it."""
    with contextlib.closing(LossyQueue(valkey.url)) as queue:
        policy = dataclasses.replace(FAST, sweep_s=sweep_s)
        with (
            forwarding(dataclasses.replace(stores, queue=queue), policy) as forwarder,
            Agent(cloud, endpoint_id, forwarder) as agent,
        ):
            agent.open_session(credit=10)
            assert agent.hears_no(wire.RunTasks, for_s=1.0)  # the lease and the sweep of a new session are over
            [task_id] = cloud.submit_new(endpoint_id, 1)
            wait_until(lambda: endpoint_id in queue.lost, "the wake-up is lost")
            if is_found:
                assert [spec.task_id for spec in agent.take(1)] == [task_id]
            else:
                assert agent.hears_no(wire.RunTasks, for_s=8 * FAST.sweep_s)
                assert cloud.stores.queue.depth([endpoint_id]) == 1


def test_transitions_are_recorded(stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10)
        [task_id] = cloud.submit_new(endpoint_id, 1)
        [spec] = agent.take(1)
        running = wire.TaskTransition(task_id=task_id, attempt=1, state=TaskState.RUNNING, at=time.time())
        agent.say(wire.TaskTransitions(transitions=(running,)))
        cloud.until_all([task_id], TaskState.RUNNING)
        assert cloud.task(task_id).attempt == 1
        agent.finish([spec])
        agent.until_recorded([task_id])
    states = [event.state for event in stores.tasks.list_events(task_id)]
    assert states == [TaskState.RECEIVED, TaskState.WAITING_FOR_NODES, TaskState.RUNNING, TaskState.SUCCESS]


def test_an_error_from_the_endpoint_is_recorded_and_pushed(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent, Client(cloud, cloud.owner_id, forwarder) as client:
        agent.open_session(credit=1)
        client.open("group")
        [task_id] = cloud.submit_new(endpoint_id, 1, task_group_id="group")
        [spec] = agent.take(1)
        # PostgreSQL refuses a NUL in text, and JSON has no NaN: a peer may send both.
        error = {"code": "TASK_FAILED", "message": "boom\0", "fault": "user_code", "traceback": "Traceback: boom\0"}
        result = wire.ResultSpec(
            task_id=task_id, attempt=1, state=TaskState.FAILED, error=error, details={"load": float("nan")}
        )
        agent.say(wire.TaskResults(results=(result,)))
        agent.until_recorded([task_id])
        pushed, _ = client.results(1)[task_id]
        assert pushed.error is not None
        assert pushed.error["code"] == "TASK_FAILED"
    task = cloud.task(task_id)
    assert task.state is TaskState.FAILED
    assert task.error is not None
    assert (task.error.endpoint_id, task.error.attempt) == (endpoint_id, 1)
    assert spec.attempt == 1


def test_a_deleted_function_fails_the_task(
    stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    [task_id] = cloud.submit_new(endpoint_id, 1)
    stores.functions.delete_function(cloud.function_id)
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=1)
        cloud.until_all([task_id], TaskState.FAILED)
    error = cloud.task(task_id).error
    assert error is not None
    assert error.code == "FUNCTION_UNKNOWN"


def test_presence_is_recorded(stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    def endpoint() -> Any:
        return stores.endpoints.get_endpoint(endpoint_id)

    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session()
        wait_until(lambda: endpoint().online, "the endpoint is online")
        agent.say(wire.Heartbeat(at=time.time(), report=wire.EndpointReport(managers=2, total_workers=8)))
        wait_until(lambda: endpoint().status.total_workers == 8, "the report is recorded")
        agent.say(wire.Goodbye())
        wait_until(lambda: not endpoint().online, "the endpoint is offline")


def test_an_agent_of_a_deleted_endpoint_is_refused_and_not_admitted_again(
    stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        public_key = agent.key.public_key
        # As the API does when it issues a ticket.
        stores.endpoints.add_endpoint_key(endpoint_id, public_key, at=dt.datetime.now(dt.UTC))
        stores.queue.admit(agent.key, ttl_s=3600)
        agent.open_session(credit=10)
        owner = Identity(cloud.owner_id, "owner")

        assert MemoryApi(stores=stores).call("DELETE", f"/v2/endpoints/{endpoint_id}", caller=owner).status == 200

        agent.hear(wire.Redirect)
        # It could keep its connection, with a ticket that is valid for a day.
        for code in ("PROTOCOL_ERROR", "ENDPOINT_UNKNOWN"):  # the first ends the refused session
            agent.session = wire.Session(agent.role, heartbeat_s=HEARTBEAT_S, now=time.monotonic())
            agent.say(agent.hello())
            refused, _ = agent.hear(wire.Refused)
            assert refused.error["code"] == code
        assert find_peers(stores.queue, stores.endpoints, [public_key]).get(public_key) is None


def test_the_session_of_a_revoked_key_ends_and_tasks_go_to_another(
    stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    api, owner = MemoryApi(stores=stores), Identity(cloud.owner_id, "owner")
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10)
        path = f"/v3/endpoints/{endpoint_id}/keys?public_key={quote(agent.key.public_key, safe='')}"

        assert api.call("DELETE", path, caller=owner).status == 200

        agent.hear(wire.Redirect)
        [task_id] = cloud.submit_new(endpoint_id, 1)
        for code in ("PROTOCOL_ERROR", "TICKET_INVALID"):  # on the connection that it has kept
            agent.session = wire.Session(agent.role, heartbeat_s=HEARTBEAT_S, now=time.monotonic())
            agent.say(agent.hello())
            refused, _ = agent.hear(wire.Refused)
            assert refused.error["code"] == code
        assert find_peers(stores.queue, stores.endpoints, [agent.key.public_key])[agent.key.public_key] is None
    with Agent(cloud, endpoint_id, forwarder) as other:
        other.open_session(credit=10)
        assert [spec.task_id for spec in other.take(1)] == [task_id]


# -- cancelling --------------------------------------------------------------------------------------------------------


def test_a_cancelled_task_is_stopped_at_the_endpoint(
    stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10)
        [task_id] = cloud.submit_new(endpoint_id, 1)
        [spec] = agent.take(1)
        stores.queue.cancel(endpoint_id, [task_id])
        order, _ = agent.hear(wire.CancelTasks)
        assert order.task_ids == (task_id,)
        error = {"code": "TASK_CANCELLED", "message": "stopped"}
        result = wire.ResultSpec(task_id=task_id, attempt=spec.attempt, state=TaskState.CANCELLED, error=error)
        agent.say(wire.TaskResults(results=(result,)))
        agent.until_recorded([task_id])
    assert cloud.task(task_id).state is TaskState.CANCELLED


def test_a_task_cancelled_in_the_queue_is_never_sent(
    stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    cancelled, other = cloud.submit_new(endpoint_id, 2)
    stores.queue.cancel(endpoint_id, [cancelled])
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10)
        assert [spec.task_id for spec in agent.take(1)] == [other]
        assert agent.hears_no(wire.RunTasks, for_s=0.6)
    # The API would have recorded this result; here it died first, and the forwarder finds it in the outbox.
    cloud.until_all([cancelled], TaskState.CANCELLED)


# -- blobs -------------------------------------------------------------------------------------------------------------


def test_a_big_payload_is_sent_as_a_reference(
    stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    ref = BlobRef(f"{cloud.owner_id}/{'0' * 64}", 5_000_000, "0" * 64)
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=1)
        cloud.submit_new(endpoint_id, 1, payload=None, payload_ref=ref)
        [spec] = agent.take(1)
        assert spec.payload is None
        assert spec.payload_blob is not None
        assert (spec.payload_blob.blob_key, spec.payload_blob.size_bytes) == (ref.blob_key, 5_000_000)
        assert spec.payload_blob.url is not None
        assert ref.blob_key in spec.payload_blob.url


def test_a_big_result_goes_through_the_blob_store(
    stores: Stores, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    digest = hashlib.sha256(b"big").hexdigest()
    with Agent(cloud, endpoint_id, forwarder) as agent, Client(cloud, cloud.owner_id, forwarder) as client:
        agent.open_session(credit=1)
        client.open("group")
        [task_id] = cloud.submit_new(endpoint_id, 1, task_group_id="group")
        agent.take(1)
        agent.say(wire.BlobRequest(task_id=task_id, attempt=1, size_bytes=3, sha256=digest))
        grant, _ = agent.hear(wire.BlobGrant)
        assert grant.error is None
        assert grant.blob_key == f"{cloud.owner_id}/{digest}"
        assert grant.upload_url
        blob = wire.BlobLocation(blob_key=grant.blob_key, size_bytes=3, sha256=digest)
        result = wire.ResultSpec(task_id=task_id, attempt=1, state=TaskState.SUCCESS, result_blob=blob)
        agent.say(wire.TaskResults(results=(result,)))
        pushed, body = client.results(1)[task_id]
        assert body is None
        assert pushed.result_blob is not None
        assert pushed.result_blob.url
    assert cloud.task(task_id).result_ref == BlobRef(grant.blob_key, 3, digest)


def test_a_result_over_the_limit_is_not_granted(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=1)
        [task_id] = cloud.submit_new(endpoint_id, 1)
        agent.take(1)
        agent.say(wire.BlobRequest(task_id=task_id, attempt=1, size_bytes=2**40, sha256="0" * 64))
        grant, _ = agent.hear(wire.BlobGrant)
        assert grant.error is not None
        assert grant.error["code"] == "RESULT_TOO_LARGE"
        assert grant.error["hint"]


def test_a_result_over_the_inline_limit_ends_its_task_and_no_other(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    """An agent that exceeds the limit must not fill the database, or leave its tasks without a result."""
    limit = FAST.max_inline_bytes
    sizes = (limit, limit + 1, 16 * 1024 * 1024)
    with Agent(cloud, endpoint_id, forwarder) as agent, Client(cloud, cloud.owner_id, forwarder) as client:
        agent.open_session(credit=3)
        client.open("group")
        task_ids = cloud.submit_new(endpoint_id, 3, task_group_id="group")
        for spec, size in zip(agent.take(3), sizes, strict=True):
            agent.finish([spec], bytes(size))
        agent.until_recorded(task_ids)  # so that the agent forgets them and does not repeat refused results
        pushed = client.results(3)
    just_right, over, huge = (cloud.task(task_id) for task_id in task_ids)
    assert (just_right.state, just_right.result) == (TaskState.SUCCESS, bytes(limit))
    for task in (over, huge):
        assert (task.state, task.result) == (TaskState.FAILED, None)
        assert task.error is not None
        assert (task.error.code, task.error.fault, task.error.endpoint_id) == (
            "RESULT_MALFORMED",
            Fault.PEER,
            endpoint_id,
        )
        result, body = pushed[task.task_id]
        assert (result.state, body) == (TaskState.FAILED, None)


def test_an_agent_cannot_give_away_another_owners_blob(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=1)
        [task_id] = cloud.submit_new(endpoint_id, 1)
        agent.take(1)
        theirs = wire.BlobLocation(blob_key=f"another-owner/{'0' * 64}", size_bytes=3, sha256="0" * 64)
        result = wire.ResultSpec(task_id=task_id, attempt=1, state=TaskState.SUCCESS, result_blob=theirs)
        agent.say(wire.TaskResults(results=(result,)))
        agent.until_recorded([task_id])
    task = cloud.task(task_id)
    assert (task.state, task.result_ref) == (TaskState.FAILED, None)


# -- results -----------------------------------------------------------------------------------------------------------


def test_the_first_result_counts_and_a_repetition_is_acknowledged(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=1)
        [task_id] = cloud.submit_new(endpoint_id, 1)
        specs = agent.take(1)
        for body in (b"first", b"second"):
            agent.finish(specs, body)
            agent.until_recorded([task_id])
    assert cloud.task(task_id).result == b"first"


def test_results_for_other_endpoints_tasks_are_ignored(cloud: Cloud, forwarder: RunningForwarder) -> None:
    mine, theirs = cloud.add_endpoint(), cloud.add_endpoint()
    [their_task] = cloud.submit_new(theirs, 1)
    with Agent(cloud, mine, forwarder) as agent:
        agent.open_session(credit=1)
        [my_task] = cloud.submit_new(mine, 1)
        [spec] = agent.take(1)
        forged = wire.TaskSpec(task_id=their_task, attempt=1, function_id="f", function_hash="h", options=TaskOptions())
        agent.finish([forged, spec])
        acknowledged, _ = agent.hear(wire.ResultsRecorded)
        assert [ref.task_id for ref in acknowledged.tasks] == [my_task]
    assert cloud.task(my_task).state is TaskState.SUCCESS
    assert not cloud.task(their_task).state.is_terminal


def test_an_unusable_result_fails_its_task(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=3)
        task_ids = cloud.submit_new(endpoint_id, 3)
        agent.take(3)
        results = (
            wire.ResultSpec(task_id=task_ids[0], attempt=1, state=TaskState.SUCCESS),
            wire.ResultSpec(task_id=task_ids[1], attempt=1, state=TaskState.RUNNING),
            wire.ResultSpec(
                task_id=task_ids[2], attempt=1, state=TaskState.RECEIVED, error={"code": "A", "message": "B"}
            ),
        )
        agent.say(wire.TaskResults(results=results))
        agent.until_recorded(task_ids)
    for task_id in task_ids:
        error = cloud.task(task_id).error
        assert error is not None
        assert error.code == "RESULT_MALFORMED"


def test_unknown_and_impossible_ids_are_ignored(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=1)
        unknown = wire.new_task_id()
        specs = [
            wire.TaskSpec(task_id=task_id, attempt=attempt, function_id="f", function_hash="h", options=TaskOptions())
            for task_id, attempt in ((unknown, 1), ("no uuid\0", 1), (wire.new_task_id(), 2**60))
        ]
        agent.finish(specs)
        # The agent may forget tasks that the database does not have.
        agent.until_recorded([unknown])
        agent.say(wire.TasksAccepted(tasks=(wire.TaskRef(task_id="no uuid\0", attempt=1),)))
        [task_id] = cloud.submit_new(endpoint_id, 1)
        agent.finish(agent.take(1))
        agent.until_recorded([task_id])


# -- spilled arguments: too large for the queue, stored in the database ------------------------------------------------

SIZES = [0, 1, MAX_QUEUED_BYTES, MAX_QUEUED_BYTES + 1, 64 * 1024]


@pytest.mark.parametrize("idempotent", [True, False])
def test_arguments_of_any_size_arrive(
    idempotent: bool, cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    tasks = [cloud.tasks(endpoint_id, 1, payload=os.urandom(size), idempotent=idempotent)[0] for size in SIZES]
    assert [QueuedTask.of(task).is_spilled for task in tasks] == [False, False, False, True, True]
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=len(tasks))
        task_ids = cloud.submit(tasks)
        specs = agent.take(len(tasks))
        assert agent.payloads == {task.task_id: task.payload for task in tasks}
        agent.finish(specs)
        agent.until_recorded(task_ids)
    cloud.until_all(task_ids, TaskState.SUCCESS)


def test_arguments_arrive_after_a_rebuild_of_the_queue(cloud: Cloud, endpoint_id: str) -> None:
    [task] = cloud.tasks(endpoint_id, 1, payload=os.urandom(64 * 1024))
    cloud.stores.tasks.add_tasks([task])  # and never enqueued: as after a wipe
    with forwarding(cloud.stores) as running, Agent(cloud, endpoint_id, running) as agent:
        agent.open_session(credit=1)
        agent.serve(1)
        assert agent.payloads == {task.task_id: task.payload}


def test_a_task_without_a_record_leaves_the_queue(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    [phantom] = cloud.tasks(endpoint_id, 1, payload=os.urandom(64 * 1024))
    [real] = cloud.tasks(endpoint_id, 1, payload=b"real")
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=2)
        cloud.enqueue([phantom])
        cloud.submit([real])
        [spec] = agent.take(1)
        assert spec.task_id == real.task_id
        agent.finish([spec])
        agent.until_recorded([real.task_id])
        assert agent.hears_no(wire.RunTasks, for_s=0.5)
