"""Forwarder benchmark: the messages of its simulated endpoints, and its ratios."""

from __future__ import annotations

from benchmarks.forwarder.__main__ import compared
from benchmarks.forwarder.peers import SimulatedEndpoint
from benchmarks.report import Figure
from farcall_common import wire
from farcall_common.store.model import PeerKind
from farcall_common.task_options import TaskOptions


class Endpoint(SimulatedEndpoint):
    """A simulated endpoint that collects its messages."""

    def send(self, message: wire.Message, *_: bytes) -> None:
        self.__dict__.setdefault("sent", []).append(message)


def order(*task_ids: str) -> wire.RunTasks:
    tasks = [
        wire.TaskSpec(
            task_id=task_id, attempt=1, function_id="f", function_hash="h", options=TaskOptions(), payload=index
        )
        for index, task_id in enumerate(task_ids)
    ]
    return wire.RunTasks(tasks=tuple(tasks))


def recorded(*task_ids: str) -> wire.ResultsRecorded:
    return wire.ResultsRecorded(tasks=tuple(wire.TaskRef(task_id=task_id, attempt=1) for task_id in task_ids))


def test_task_counts_when_recorded_and_starts_once_while_held() -> None:
    endpoint = Endpoint(wire.new_id(), PeerKind.AGENT)
    endpoint.receive(order("a", "b"))
    sent = endpoint.__dict__["sent"]
    assert [type(message) for message in sent] == [wire.TasksAccepted, wire.TaskResults, wire.Credit]
    assert sent[2].tasks == 2
    endpoint.receive(order("a"))
    endpoint.receive(recorded("a", "b", "b"))
    assert (endpoint.tally.recorded, endpoint.spool) == (2, {})
    assert endpoint.starts == {"a": 1, "b": 1}
    endpoint.receive(order("a"))  # after it was recorded, it would be a second start
    assert endpoint.starts["a"] == 2


def test_hello_of_a_holding_endpoint_lists_its_held_tasks() -> None:
    endpoint = Endpoint(wire.new_id(), PeerKind.AGENT, is_holding=True)
    endpoint.receive(order("a", "b"))
    endpoint.send_hello("ticket")
    hello = endpoint.__dict__["sent"][-1]
    assert {held.task_id for held in hello.held} == {"a", "b"}
    endpoint.receive(wire.Welcome(session_id="s", forwarder_id="f", protocol_version=1, heartbeat_s=30.0, forget=()))
    assert endpoint.is_open


def test_cost_of_many_endpoints_is_compared_with_that_of_fewer() -> None:
    times_us = {1: 200.0, 256: 100.0, 4000: 150.0}
    measured = [
        Figure(f"{point}: forwarder's CPU time per task", time_us, "us")
        for point, time_us in zip(
            (
                "1 endpoint, 16 tasks at a time",
                "256 endpoints, 16 tasks each at a time",
                "4,000 endpoints, 16 tasks each at a time",
            ),
            times_us.values(),
            strict=True,
        )
    ]
    to_one, to_some = compared(measured, list(times_us))
    assert (to_one.value, to_one.reached) == (0.75, True)
    assert (to_some.value, to_some.reached) == (1.5, False)
    assert to_some.name.endswith("4,000 endpoints to 256")
