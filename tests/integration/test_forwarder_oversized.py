"""Oversized messages: they end the session or the connection of their sender, and of no other peer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farcall_common import wire
from farcall_common.limits import MAX_FRAME_BYTES, MAX_FRAMES, MAX_HEADER_BYTES
from tests.integration.forwarder_peers import Agent, Cloud, RunningForwarder, forwarding, until
from tests.support.stores import fake_stores

CREDIT = wire.encode(wire.Envelope(wire.Credit(tasks=1)))


@pytest.fixture
def cloud() -> Cloud:
    return Cloud(fake_stores())


@pytest.fixture
def forwarder(cloud: Cloud) -> Iterator[RunningForwarder]:
    with forwarding(cloud.stores) as running:
        yield running


def serves_others(cloud: Cloud, forwarder: RunningForwarder) -> None:
    other_id = cloud.add_endpoint()
    with Agent(cloud, other_id, forwarder) as bystander:
        bystander.greet(credit=1)
        task_ids = cloud.submit_new(other_id, 1)
        bystander.serve(1)
        cloud.until_all(task_ids, wire.TaskState.SUCCESS)


@pytest.mark.parametrize(
    "frames",
    [
        [*CREDIT, *[b""] * MAX_FRAMES],
        [bytes([wire.PROTOCOL_VERSION]) + bytes(MAX_HEADER_BYTES)],
    ],
    ids=["frames", "header"],
)
def test_an_envelope_over_the_limits_is_refused(frames: list[bytes], cloud: Cloud, forwarder: RunningForwarder) -> None:
    endpoint_id = cloud.add_endpoint()
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.greet()
        agent.socket.send_multipart(frames)
        refused, _ = agent.hear(wire.Refused)
        assert (refused.error["code"], refused.error["fault"]) == ("FRAME_MALFORMED", "peer")
        assert "limits" in refused.error["message"]
        serves_others(cloud, forwarder)


def test_a_frame_over_the_limit_ends_the_connection(cloud: Cloud, forwarder: RunningForwarder) -> None:
    """The socket ends the connection because of the frame's announced length; its bytes are not read."""
    endpoint_id = cloud.add_endpoint()
    with Agent(cloud, endpoint_id, forwarder) as agent, agent.socket.get_monitor_socket() as monitor:
        agent.greet()
        agent.socket.send_multipart([*CREDIT, bytes(MAX_FRAME_BYTES + 1)])
        until(lambda: bool(monitor.poll(50)) and monitor.recv_multipart() is not None, "the connection ends")
        agent.socket.disable_monitor()
        serves_others(cloud, forwarder)
        agent.connect(forwarder)  # the agent may reconnect
        agent.greet()


def test_the_largest_allowed_frame_arrives(cloud: Cloud, forwarder: RunningForwarder) -> None:
    endpoint_id = cloud.add_endpoint()
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.greet(credit=1)
        [task_id] = cloud.submit_new(endpoint_id, 1)
        agent.finish(agent.take(1), body=bytes(MAX_FRAME_BYTES))
        agent.until_recorded([task_id])
    error = cloud.task(task_id).error  # the frame is too large for a result, which has a limit of its own
    assert error is not None
    assert f"{MAX_FRAME_BYTES:,} bytes inline" in error.message
