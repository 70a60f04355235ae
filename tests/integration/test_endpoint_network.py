"""Agents and managers on different machines: who may connect, and what becomes of messages that were lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from farcall_common.errors import Unavailable
from farcall_common.limits import MAX_FRAME_BYTES
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import TaskSpec, TaskState
from farcall_endpoint.agent.core.blocks import Blocks, SimpleScaling
from farcall_endpoint.agent.core.demand import Demand
from farcall_endpoint.agent.core.tasks import Stage, Task
from farcall_endpoint.agent.shell.fleet import Fleet, Lost, Reported
from farcall_endpoint.agent.shell.links import Network
from farcall_endpoint.contracts import agent_manager
from farcall_endpoint.contracts.agent_manager import Finished
from farcall_endpoint.host.pipe import Pipe, pipe_pair
from farcall_endpoint.host.shared_memory import bytes_of
from farcall_endpoint.host.transport import (
    CurveKeys,
    FleetKeys,
    SocketLink,
    agent_socket,
    bind_to_network,
    find_reachable,
    fleet_socket,
    new_curve_keys,
    receive_frames,
    send_frames,
    tcp_address,
)
from farcall_endpoint.providers import BlockStatus, Phase
from tests.support.endpoint import FakeAgent
from tests.waiting import WAIT_S, wait_until

# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_only_managers_with_the_key_may_connect(known: bool) -> None:
    keys = FleetKeys(new_curve_keys(), new_curve_keys())
    with zmq.Context() as context:
        fleet = fleet_socket(context)
        port, guard = bind_to_network(fleet, keys=keys)
        manager = agent_socket(
            context,
            address=f"tcp://127.0.0.1:{port}",
            manager_id="m",
            server_key=keys.agent.public,
            keys=keys.managers if known else new_curve_keys(),
        )
        try:
            manager.send(b"hello")
            assert bool(fleet.poll(60_000 if known else 500)) is known
        finally:
            manager.close()
            fleet.close()
            guard.stop()


@pytest.mark.parametrize("size_bytes", [MAX_FRAME_BYTES, 2 * MAX_FRAME_BYTES])
def test_a_frame_over_the_limit_does_not_reach_the_agent(size_bytes: int) -> None:
    keys = FleetKeys(new_curve_keys(), new_curve_keys())
    with zmq.Context() as context:
        fleet = fleet_socket(context)
        port, guard = bind_to_network(fleet, keys=keys, max_frame_bytes=MAX_FRAME_BYTES + 1024)
        manager = agent_socket(
            context,
            address=f"tcp://127.0.0.1:{port}",
            manager_id="m",
            server_key=keys.agent.public,
            keys=keys.managers,
        )
        try:
            manager.send(bytes(size_bytes))
            assert bool(fleet.poll(60_000 if size_bytes == MAX_FRAME_BYTES else 500)) is (size_bytes == MAX_FRAME_BYTES)
        finally:
            manager.close()
            fleet.close()
            guard.stop()


def test_a_manager_with_a_refused_key_ends_with_an_error_instead_of_waiting() -> None:
    keys = FleetKeys(new_curve_keys(), new_curve_keys())
    with zmq.Context() as context:
        fleet = fleet_socket(context)
        port, guard = bind_to_network(fleet, keys=keys)
        socket = agent_socket(
            zmq.Context(),
            address=f"tcp://127.0.0.1:{port}",
            manager_id="m",
            server_key=keys.agent.public,
            keys=new_curve_keys(),
        )
        link = SocketLink(socket)

        def is_refused() -> bool:
            link.send([b"hello"])
            with contextlib.suppress(BlockingIOError):
                return link.receive_shared() is None
            return False

        wait_until(is_refused)
        link.close()
        fleet.close()
        guard.stop()


def test_the_first_address_that_takes_a_connection_is_used() -> None:
    with zmq.Context() as context:
        fleet = fleet_socket(context)
        port, guard = bind_to_network(fleet, keys=FleetKeys(new_curve_keys(), new_curve_keys()))
        nowhere = "tcp://127.0.0.1:9"
        assert find_reachable([nowhere, f"tcp://127.0.0.1:{port}"]) == f"tcp://127.0.0.1:{port}"
        fleet.close()
        guard.stop()
    with pytest.raises(Unavailable, match=r"cannot reach the agent at tcp://127.0.0.1:9 .*refused.*engine.address"):
        find_reachable([nowhere], timeout_s=0.0)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_manager_reaches_an_ipv6_address(host: str) -> None:
    keys = FleetKeys(new_curve_keys(), new_curve_keys())
    with zmq.Context() as context:
        fleet = fleet_socket(context)
        port, guard = bind_to_network(fleet, keys=keys)
        address = find_reachable([tcp_address("login1:22", port), tcp_address(host, port)])
        assert address == f"tcp://[::1]:{port}"
        manager = agent_socket(
            context, address=address, manager_id="m", server_key=keys.agent.public, keys=keys.managers
        )
        try:
            manager.send(b"hello")
            assert fleet.poll(60_000)
        finally:
            manager.close()
            fleet.close()
            guard.stop()


# -- a manager that finds a gap ----------------------------------------------------------------------------------------


def test_a_manager_that_missed_a_message_returns_its_tasks(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path)
    try:
        agent.listen(lambda: agent.progress and agent.progress[-1].idle_workers == 1)
        agent.say(agent_manager.Ping(), number=1)
        agent.say(agent_manager.Ping(), number=3)
        agent.listen(lambda: agent.leaving)
        assert "messages were lost" in agent.leaving
        agent.manager.wait(WAIT_S)
    finally:
        agent.close()


# -- an agent that finds one -------------------------------------------------------------------------------------------


class Nodes:
    """A provider whose blocks are only said to run; the test speaks for their managers."""

    pipe: Any = None
    walltime_s: float | None = None

    def __init__(self) -> None:
        self.notices = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.commands: dict[str, Sequence[str]] = {}
        self.variables: Mapping[str, str] = {}
        self.phase = Phase.RUNNING
        self.killed = False

    def fileno(self) -> int:
        return self.notices

    def changed(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.notices)

    def start(self, command: Sequence[str], *, block_id: str, environment: Mapping[str, str], image: str = "") -> Nodes:
        assert not image
        self.commands[block_id] = command
        self.variables = environment
        return self

    def status(self) -> BlockStatus:
        return BlockStatus(self.phase, "job 7 CANCELLED" if self.phase is Phase.ENDED else "")

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        """Also of each block."""


class Here(Nodes):
    """A provider of managers on this machine."""

    def start(self, command: Sequence[str], *, block_id: str, environment: Mapping[str, str], image: str = "") -> Here:
        assert not image
        super().start(command, block_id=block_id, environment=environment)
        self.pipe, self.there = pipe_pair()
        return self

    def close(self) -> None:
        self.pipe.close()


def test_a_manager_that_died_before_its_first_message_does_not_end_the_agent() -> None:
    provider, poller = Here(), zmq.Poller()
    with zmq.Context() as context:
        fleet = one_block_fleet(context, poller, provider)
        now = time.monotonic()
        fleet.maintain(now=now)
        provider.phase = Phase.ENDED
        provider.there.close()  # after the agent has polled, before it looks at its blocks
        fleet.maintain(now=now, ready={provider.fileno()})
        ready = {source for source, _ in poller.poll(0)}
        assert list(fleet.receive(ready=ready, now=now)) == []
        assert fleet.is_empty


def one_block_fleet(
    context: zmq.Context[zmq.Socket[bytes]],
    poller: zmq.Poller,
    provider: Nodes,
    network: Network | None = None,
    **settings: Any,
) -> Fleet:
    numbers = itertools.count(1)
    return Fleet(
        context,
        poller=poller,
        provider=provider,
        blocks=Blocks(
            policy=SimpleScaling(min_blocks=1, max_blocks=1, parallelism=1.0, idle_release_s=60.0),
            first_blocks=1,
            slots_per_block=1,
            max_failures=3,
            failure_period_s=0.0,
            backoff_s=0.1,
            new_block_id=lambda: f"b{next(numbers)}",
        ),
        command_options=[],
        function_body=str.encode,
        payload=lambda _: b"",
        demand=lambda: Demand(0, ()),
        network=network,
        **settings,
    )


class Site:
    """A fleet and a manager's end of the wire."""

    def __init__(self, **settings: Any) -> None:
        self.nodes = Nodes()
        self.context = zmq.Context()
        self.poller = zmq.Poller()
        network = Network(["127.0.0.1"], FleetKeys(new_curve_keys(), new_curve_keys()))
        self.fleet = one_block_fleet(self.context, self.poller, self.nodes, network, **settings)
        self.fleet.maintain(now=time.monotonic())
        self.lost: list[Lost] = []
        self.heard: list[Reported] = []
        command = self.nodes.commands["b1"]
        self.address = command[command.index("--agent") + 1]
        variables = self.nodes.variables
        self.keys = CurveKeys(variables["FARCALL_FLEET_PUBLIC_KEY"], variables["FARCALL_FLEET_SECRET_KEY"])
        self.server_key = variables["FARCALL_FLEET_SERVER_KEY"]
        self.manager = self.connect("m")

    def connect(self, manager_id: str) -> zmq.Socket[bytes]:
        return agent_socket(
            self.context, address=self.address, manager_id=manager_id, server_key=self.server_key, keys=self.keys
        )

    def say(self, message: agent_manager.FromManager, number: int) -> None:
        send_frames(self.manager, agent_manager.encode(message, number=number))

    def register(self, *, block_id: str = "b1") -> None:
        software = agent_manager.software_fingerprint()
        self.say(agent_manager.Registered("m", software, 1, os.getpid(), "here", block_id), 1)

    def turn(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline
            ready = {source for source, _ in self.poller.poll(20)}
            now = time.monotonic()
            self.heard += [message for _, message, _ in self.fleet.receive(ready=ready, now=now)]
            self.lost += self.fleet.maintain(now=now, ready=ready)

    def told(self) -> agent_manager.FromAgent:
        return self.received()[0]

    def received(self) -> tuple[agent_manager.FromAgent, list[bytes]]:
        assert self.manager.poll(60_000)
        message, bodies = agent_manager.decode_from_agent(receive_frames(self.manager))
        return message, [bytes(bytes_of(body)) for body in bodies]

    def close(self) -> None:
        self.manager.close()
        self.fleet.close()
        self.context.term()
        os.close(self.nodes.notices)


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def test_an_agent_that_missed_a_message_drops_the_manager(site: Site) -> None:
    site.register()
    site.turn(lambda: site.heard)
    site.say(agent_manager.Progress(), 3)
    site.turn(lambda: site.lost)
    assert "messages were lost" in site.lost[0].reason
    site.say(agent_manager.Progress(), 4)
    while not isinstance(told := site.told(), agent_manager.Stop):
        assert isinstance(told, agent_manager.Ping)
    assert len(site.heard) == 1


def calling(name: str, *callees: str) -> Task:
    """A task that calls functions."""
    options = TaskOptions(walltime_s=100.0, callees=tuple(Callee(f"id-{each}", each) for each in callees))
    return Task(1, TaskSpec(name, 1, "id", "own", options, 0), 1, Stage.QUEUED, 0.0)


@pytest.mark.parametrize("is_restricted", [True, False])
def test_a_manager_gets_each_callee_once_and_the_limits_for_the_stages(is_restricted: bool) -> None:
    with contextlib.closing(Site(limits=agent_manager.Limits(60.0), is_restricted=is_restricted)) as site:

        def sent(*tasks: Task) -> tuple[agent_manager.RunTasks, dict[str, bytes]]:
            site.fleet.order("m", tasks)
            while True:
                message, bodies = site.received()
                if isinstance(message, agent_manager.RunTasks):
                    return message, {function_hash: bodies[body] for function_hash, body in message.functions}

        site.register()
        site.turn(lambda: site.heard)
        message, functions = sent(calling("a", "f", "g"), calling("b", "g", "own"))
        assert functions == {"own": b"own", "f": b"f", "g": b"g"}
        assert [order.options.walltime_s for order in message.tasks] == [60.0, 60.0]
        assert message.limits == agent_manager.Limits(60.0)
        assert {order.restricted for order in message.tasks} == {is_restricted}
        listed = calling("listed")
        listed.spec = msgspec.structs.replace(listed.spec, data_only=True)
        assert sent(listed)[0].tasks[0].restricted, "the service restricts functions"
        message, functions = sent(calling("c", "h", "f"), calling("d"))
        assert functions == {"h": b"h"}
        sent(calling("many", *map(str, range(1000))), calling("more", *map(str, range(1000, 1100))))
        message, functions = sent(calling("e", "f"))
        assert (message.forget, set(functions)) == (True, {"own", "f"})


@pytest.mark.parametrize(
    "frames",
    [
        [(2).to_bytes(4, "big") + b"no message"],
        [(2).to_bytes(4, "big")],
        [*agent_manager.encode(agent_manager.Progress((Finished("t", TaskState.SUCCESS, 7),)), number=2)],
        [*agent_manager.encode(agent_manager.Progress(), number=2), b"no lengths", b""],
        [*agent_manager.encode(agent_manager.Progress(), number=2), b"frames are missing"],
    ],
)
def test_a_manager_that_sends_what_is_no_message_is_given_up(site: Site, frames: list[bytes]) -> None:
    site.register()
    site.turn(lambda: site.heard)
    send_frames(site.manager, frames)
    site.turn(lambda: site.lost)
    assert "sent what is no message" in site.lost[0].reason
    while not isinstance(told := site.told(), agent_manager.Stop):
        assert isinstance(told, agent_manager.Ping)
    assert len(site.heard) == 1


@pytest.mark.parametrize("packet", [b"x", b"\xff" * 40, b"\x01\0\0\0" + b"\xff" * 8, b"\1\0\0\0\4\0\0\0\0\0\0\0spam"])
@pytest.mark.parametrize("is_registered", [True, False])
def test_a_manager_here_that_sends_what_is_no_message_is_given_up(packet: bytes, is_registered: bool) -> None:
    provider, poller = Here(), zmq.Poller()
    with zmq.Context() as context:
        fleet = one_block_fleet(context, poller, provider)
        now = time.monotonic()
        fleet.maintain(now=now)
        there = Pipe(provider.there)
        if is_registered:
            registered = agent_manager.Registered(
                "m", agent_manager.software_fingerprint(), 1, os.getpid(), "here", "b1"
            )
            there.send(agent_manager.encode(registered))
        provider.there.send(packet)
        heard: list[object] = []
        lost: list[Lost] = []
        deadline = time.monotonic() + WAIT_S
        while not (lost or (heard and not is_registered)) and time.monotonic() < deadline:
            ready = {source for source, _ in poller.poll(20)}
            heard += [message for _, message, _ in fleet.receive(ready=ready, now=now)]
            lost += fleet.maintain(now=now, ready=ready)
            if not is_registered:
                break  # it is not known yet: nothing is lost, and the agent lives
        assert [type(each) for each in heard] == [agent_manager.Registered] * is_registered
        assert ["sent what is no message" in each.reason for each in lost] == [True] * is_registered
        there.close()
        provider.phase = Phase.ENDED
        fleet.end()
        fleet.close()


def test_a_reconnection_without_loss_continues(site: Site) -> None:
    site.register()
    site.turn(lambda: site.heard)
    site.manager.close(linger=0)
    site.manager = site.connect("m")
    site.say(agent_manager.Progress(workers=1), 2)
    site.turn(lambda: len(site.heard) == 2)
    assert not site.lost


def test_a_manager_of_an_unknown_block_is_refused(site: Site) -> None:
    site.register(block_id="of an earlier agent")
    site.turn(lambda: site.manager.poll(0))
    assert isinstance(site.told(), agent_manager.Stop)
    assert not site.heard


def test_a_manager_that_leaves_is_lost_at_once_and_its_block_ended_soon(site: Site) -> None:
    site.register()
    site.turn(lambda: site.heard)
    site.say(agent_manager.Leaving("it got SIGTERM"), 2)
    site.turn(lambda: site.lost)
    assert "SIGTERM" in site.lost[0].reason


def test_a_manager_is_kept_until_it_is_silent_whatever_the_scheduler_reports(site: Site) -> None:
    site.register()
    site.turn(lambda: site.heard)
    site.nodes.phase = Phase.ENDED
    os.eventfd_write(site.nodes.notices, 1)
    since = time.monotonic()
    site.say(agent_manager.Progress(), 2)
    site.turn(lambda: site.lost)
    assert time.monotonic() - since > 2
    assert "CANCELLED" in site.lost[0].reason
    site.turn(lambda: "b2" in site.nodes.commands)
