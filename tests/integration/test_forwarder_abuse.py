"""Abuse of a forwarder: half-open handshakes, silent connections, crowds, endless and oversized messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import zmq

from farcall_common import wire
from farcall_common.limits import MAX_FRAME_BYTES, MAX_FRAMES, MAX_HEADER_BYTES
from farcall_common.sockets import RECONNECT_MS
from farcall_common.wire import TaskState
from farcall_forwarder.adapters.connection_limiter import ConnectionLimiter, _received_bytes, allow_connections
from tests.integration.forwarder_peers import (
    Agent,
    Cloud,
    RunningForwarder,
    Start,
    cloud,
    endpoint_id,
    environ,
    forwarder,
    health,
    start,
    stores,
)
from tests.waiting import WAIT_S, wait_until

__all__ = ["cloud", "endpoint_id", "environ", "forwarder", "start", "stores"]

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
ZMTP_GREETING = SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
HELLO_BYTES = 202
CROWD = 400


def where(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


def curve_hello(server_key: str) -> bytes:
    """The recorded begin of a real peer's CURVE handshake. It can be replayed any number of times."""
    with (
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        dealer.linger = 0
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.curve_serverkey = server_key.encode()
        dealer.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        listener.settimeout(WAIT_S)
        peer = listener.accept()[0]
        peer.settimeout(WAIT_S)
        with peer:
            peer.sendall(SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\x01" + bytes(31))
            heard = b""
            while len(heard) < len(ZMTP_GREETING) + HELLO_BYTES:
                heard += peer.recv(4096)
    return heard


Connect = Callable[[str, int, bytes], list[socket.socket]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens so many connections that send data, or fewer if the forwarder accepts no more."""
    connections: list[socket.socket] = []

    def make(address: str, count: int, first_words: bytes) -> list[socket.socket]:
        before = len(connections)
        with contextlib.suppress(ConnectionError):
            for _ in range(count):
                connections.append(socket.create_connection(where(address), timeout=WAIT_S))
                connections[-1].sendall(first_words)
                connections[-1].setblocking(False)
        return connections[before:]

    yield make
    for connection in connections:
        connection.close()


def open_ones(connections: Sequence[socket.socket], *, drip: bytes = b"") -> list[socket.socket]:
    """Connections that the forwarder has not closed; each sends one more byte."""
    still_open = []
    for connection in connections:
        with contextlib.suppress(BlockingIOError):
            try:
                while connection.recv(4096):
                    pass
            except ConnectionError:
                pass
            connection.close()
            continue
        with contextlib.suppress(OSError):
            connection.send(drip)
        still_open.append(connection)
    return still_open


@pytest.mark.slow
def test_hundreds_of_half_open_connections_do_not_delay_other_peers(
    cloud: Cloud, start: Start, endpoint_id: str, connect: Connect
) -> None:
    assert allow_connections(3000) == 3000
    with start().running() as forwarder:
        hello = curve_hello(forwarder.server_key)
        process = psutil.Process(forwarder.process.pid)
        descriptors, memory_bytes = process.num_fds(), process.memory_info().rss
        lazy: list[socket.socket] = []
        dripping: list[socket.socket] = []
        served = threading.Event()

        def crowd() -> None:
            """Replace closed connections, so that there are hundreds even on a slow machine."""
            while not served.wait(0.05):
                lazy[:], dripping[:] = open_ones(lazy), open_ones(dripping)
                for _ in range((CROWD - len(lazy) - len(dripping)) // 4):
                    for first_words in (b"", ZMTP_GREETING, hello):
                        lazy.extend(connect(forwarder.address, 1, first_words))
                    dripping.extend(connect(forwarder.address, 1, SIGNATURE[:1]))

        with ThreadPoolExecutor(1) as executor:
            crowding = executor.submit(crowd)
            try:
                wait_until(lambda: process.num_fds() >= descriptors + CROWD * 3 // 4, "hundreds are connected")
                with Agent(cloud, endpoint_id, forwarder) as agent:
                    agent.open_session(credit=20)
                    task_ids = cloud.submit_new(endpoint_id, 20)
                    agent.serve(20)
                wait_until(lambda: process.num_fds() >= descriptors + CROWD * 3 // 4, "hundreds are still connected")
            finally:
                served.set()
            crowding.result(WAIT_S)
        cloud.until_all(task_ids, TaskState.SUCCESS)
        assert process.memory_info().rss - memory_bytes < 2 * CROWD * 32 * 1024

        deadline = time.monotonic() + WAIT_S
        sent = 1
        while lazy or dripping:
            assert time.monotonic() < deadline, f"{len(lazy)} and {len(dripping)} are still connected"
            lazy = open_ones(lazy)
            dripping = open_ones(dripping, drip=ZMTP_GREETING[sent : sent + 1])
            sent += 1
            time.sleep(0.25)  # the period of the slow bytes
        wait_until(lambda: process.num_fds() <= descriptors + 20, "their descriptors are free again")


def test_a_crowd_does_not_lock_peers_out(cloud: Cloud, start: Start, connect: Connect) -> None:
    """More connections than permitted: connected peers are served, new ones get in, and descriptors do not run out."""
    served_id, late_id = cloud.add_endpoint(), cloud.add_endpoint()
    with start(FARCALL_FORWARDER_CONNECTIONS="100").running() as forwarder:
        process = psutil.Process(forwarder.process.pid)
        descriptors = process.num_fds()
        with Agent(cloud, served_id, forwarder) as agent:
            agent.open_session(credit=100)
            connect(forwarder.address, 1000, SIGNATURE)
            wait_until(lambda: health(forwarder)[1]["refused"]["evicted"] >= 900, "the crowd is thinned out")
            wait_until(lambda: process.num_fds() <= descriptors + 120, "their descriptors are free again")
            with Agent(cloud, late_id, forwarder) as late:
                late.open_session(credit=1)
            task_ids = cloud.submit_new(served_id, 50)
            agent.serve(50)
        cloud.until_all(task_ids, TaskState.SUCCESS)


class Scene:
    """A ROUTER with a connection limiter, peers, and a clock that tests move."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, limit: int, of_source: int | None) -> None:
        self.now = 100.0
        self.router = context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.limiter = ConnectionLimiter(
            context, self.router, limit=limit, limit_of_source=of_source, clock=lambda: self.now
        )
        self._context = context
        self._peers: list[zmq.Socket[bytes]] = []

    def join(self) -> zmq.Socket[bytes]:
        peer = self._context.socket(zmq.DEALER)
        peer.linger = 0
        peer.reconnect_ivl = RECONNECT_MS
        peer.connect(f"tcp://127.0.0.1:{self.port}")
        self._peers.append(peer)
        return peer

    def connect_from(self, address: str) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), source_address=(address, 0))

    async def hear(self) -> None:
        """Receive a message, as the forwarder does."""
        await self.until(lambda: bool(self.router.poll(0)), "a message has arrived")
        first = self.router.recv(zmq.DONTWAIT, copy=False)
        self.router.recv_multipart(zmq.DONTWAIT)
        self.limiter.note_first_message(first.bytes, int(first.get(zmq.SRCFD)))
        self.limiter.spoke.add(first.bytes)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, what
            await asyncio.sleep(0.005)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self.limiter.close()
        self.router.close()


def with_limiter(talk: Callable[[Scene], Any], *, limit: int = 100, of_source: int | None = None) -> None:
    async def play() -> None:
        with zmq.Context() as context:
            scene = Scene(context, limit=limit, of_source=of_source)
            keeping = asyncio.create_task(scene.limiter.run())
            try:
                await talk(scene)
            finally:
                keeping.cancel()
                scene.close()

    asyncio.run(play())


def test_silent_connections_are_closed_and_others_stay() -> None:
    async def talk(scene: Scene) -> None:
        silent, speaking = scene.join(), scene.join()
        speaking.send(b"hello")
        await scene.hear()
        await scene.until(lambda: scene.limiter.connections == 2, "both are connected")
        scene.now += 21.0
        await scene.until(lambda: scene.limiter.silenced == 1, "one is closed")
        await scene.until(lambda: scene.limiter.connections == 1, "one is left")
        scene.now += 3600.0
        speaking.send(b"still here")
        await scene.hear()
        assert (scene.limiter.connections, scene.limiter.silenced, len(scene.limiter.known)) == (1, 1, 1)
        speaking.close()
        await scene.until(lambda: not scene.limiter.known, "no connection is left")
        assert silent.poll(0) == 0

    with_limiter(talk)


def test_only_connections_to_this_port_are_closed() -> None:
    """A descriptor may have been reused meanwhile."""

    async def talk(scene: Scene) -> None:
        left, right = socket.socketpair()
        with left, right, socket.create_server(("127.0.0.1", 0)) as listener:
            away = socket.create_connection(listener.getsockname())
            with away:
                for descriptor in (left.fileno(), away.fileno(), 10**6):
                    scene.limiter._close_connection(descriptor)
                left.send(b"still")
                away.send(b"here")
                assert right.recv(10) == b"still"

    with_limiter(talk)


def test_the_oldest_silent_connections_are_closed_first() -> None:
    async def talk(scene: Scene) -> None:
        speaking = scene.join()
        speaking.send(b"hello")
        await scene.hear()
        crowd = [scene.join() for _ in range(5)]
        await scene.until(lambda: scene.limiter.evicted == 3, "three are closed")
        assert scene.limiter.connections == 3
        late = scene.join()
        late.send(b"hello")
        await scene.hear()
        await scene.until(lambda: scene.limiter.evicted == 4, "another is closed")
        assert len(scene.limiter.known) == 2
        assert all(peer.poll(0) == 0 for peer in crowd)

    with_limiter(talk, limit=3)


def test_connections_per_address_are_limited() -> None:
    async def talk(scene: Scene) -> None:
        speaking = scene.join()
        speaking.send(b"hello")
        await scene.hear()
        with contextlib.ExitStack() as crowd:
            for _ in range(9):
                await asyncio.to_thread(lambda: crowd.enter_context(scene.connect_from("127.0.0.2")))
            await scene.until(lambda: scene.limiter.evicted == 6, "three of nine are left")
            assert scene.limiter.connections == 4
            also_here = crowd.enter_context(scene.connect_from("127.0.0.3"))
            await scene.until(lambda: scene.limiter.connections == 5, "another address is let in")
            also_here.close()
            await scene.until(lambda: scene.limiter.connections == 4, "and goes")
            speaking.send(b"still here")
            await scene.hear()
        await scene.until(lambda: scene.limiter.connections == 1, "the crowd has gone")
        assert (scene.limiter.evicted, list(scene.limiter._sources)) == (6, ["127.0.0.1"])

    with_limiter(talk, of_source=3)


def test_unknown_addresses_have_half_of_the_places_and_yield_to_known_ones() -> None:
    async def talk(scene: Scene) -> None:
        first = scene.join()
        first.send(b"hello")
        await scene.hear()  # 127.0.0.1 is known from now on
        with contextlib.ExitStack() as crowd:
            known = [await asyncio.to_thread(scene.connect_from, "127.0.0.1") for _ in range(3)]
            for each in known:
                crowd.callback(each.close)
            await scene.until(lambda: scene.limiter.connections == 4, "the known ones are connected")
            for number in range(40):  # each from another address
                unknown_peer = await asyncio.to_thread(scene.connect_from, f"127.0.1.{number + 1}")
                crowd.callback(unknown_peer.close)
            await scene.until(lambda: scene.limiter.evicted == 35, "half of the places are free of them")
            await scene.until(lambda: scene.limiter.connections == 9, "with one that speaks and three known ones")
            back = [scene.join() for _ in range(3)]  # the tenth place; then unknown peers make room
            for peer in back:
                peer.send(b"hello")
            for _ in back:
                await scene.hear()
            await scene.until(lambda: scene.limiter.evicted == 37, "two unknown peers made room")
            assert scene.limiter.connections == 10
            assert all(not _is_closed(each) for each in known), "the oldest that are silent, but known"
            late = await asyncio.to_thread(scene.connect_from, "127.0.2.1")
            crowd.callback(late.close)
            await scene.until(lambda: scene.limiter.evicted == 38, "an unknown peer makes room for another")
            assert all(not _is_closed(each) for each in known)
        first.send(b"still here")
        await scene.hear()
        await scene.until(lambda: scene.limiter.connections == 4, "the crowd has gone")
        assert not scene.limiter._unknown

    with_limiter(talk, limit=10)


def test_a_message_makes_an_address_known() -> None:
    async def talk(scene: Scene) -> None:
        waiting = await asyncio.to_thread(scene.connect_from, "127.0.0.1")
        with waiting:
            await scene.until(lambda: len(scene.limiter._unknown) == 1, "it is unknown")
            scene.join().send(b"hello")
            await scene.hear()
            assert scene.limiter._unknown == {}
            assert list(scene.limiter._known_addresses) == ["127.0.0.1"]
        for number in range(1, 9):  # more addresses than are remembered: the oldest is forgotten
            scene.limiter._note_known_address(f"10.0.0.{number}")
        assert len(scene.limiter._known_addresses) == 8

    with_limiter(talk, limit=2)


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


class RawPeer:
    """A peer that writes ZMTP 3.0 itself, without a mechanism: no library sends half a message."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        self._socket.sendall(SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
        self._socket.sendall(b"\x04" + bytes([len(ready)]) + ready)

    def send(self, frame: bytes, *, more: bool) -> None:
        self._socket.sendall(bytes([2 | more]) + len(frame).to_bytes(8, "big") + frame)

    def close(self) -> None:
        self._socket.close()


def test_a_closed_descriptor_has_no_received_bytes() -> None:
    pipe = os.pipe()
    closed = os.dup(pipe[0])
    os.close(closed)
    with socket.socket(socket.AF_UNIX) as other:
        assert [_received_bytes(each) for each in (*pipe, closed, other.fileno())] == [0, 0, 0, 0]
        other.getsockname()  # still open
    for end in pipe:
        os.close(end)


def test_an_endless_message_closes_the_connection() -> None:
    megabyte = bytes(2**20)

    async def talk(scene: Scene) -> None:
        honest = scene.join()
        busy, endless, fresh = (RawPeer(scene.port) for _ in range(3))
        try:
            for _ in range(5):  # a lot, in messages that end
                for _ in range(30):
                    await asyncio.to_thread(busy.send, megabyte, more=False)
                    await scene.hear()
                scene.now += 2.0
                await asyncio.sleep(0.05)  # the limiter runs
            endless.send(b"hello", more=False)
            await scene.hear()
            scene.now += 2.0
            await scene.until(lambda: not scene.limiter.spoke, "the limiter has measured")
            for peer in (endless, fresh):
                with contextlib.suppress(ConnectionError):
                    for _ in range(80):
                        await asyncio.to_thread(peer.send, megabyte, more=True)
                scene.now += 2.0
            await scene.until(lambda: scene.limiter.endless == 2, "both are closed")
            honest.send(b"still here")
            await scene.hear()
            busy.send(b"still here", more=False)
            await scene.hear()
            await scene.until(lambda: scene.limiter.connections == 2, "two are left")
        finally:
            for peer in (busy, endless, fresh):
                peer.close()

    with_limiter(talk)


@pytest.mark.parametrize(
    ("limits", "wanted", "allowed", "soft"),
    [
        ((1024, 20_000), 10_000, 10_000, 12_048),
        ((1024, 4096), 10_000, 2048, 4096),
        ((15_000, 20_000), 10_000, 10_000, 15_000),
        ((1024, 1024), 10_000, 512, 1024),
    ],
)
def test_connections_are_limited_to_the_machines_descriptors(
    limits: tuple[int, int], wanted: int, allowed: int, soft: int
) -> None:
    """In a separate process: lowered limits cannot be raised again."""
    program = (
        "import resource, sys\n"
        "from farcall_forwarder.adapters.connection_limiter import allow_connections\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
        f"print(allow_connections({wanted}), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < limits[1]:
        pytest.skip("this machine permits fewer")
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=WAIT_S
    )
    assert finished.stdout.split() == [str(allowed), str(soft)]


# -- oversized messages end the session or the connection of their sender, and of no other peer ------------------------

CREDIT = wire.encode(wire.Envelope(wire.Credit(tasks=1)))


def serves_others(cloud: Cloud, forwarder: RunningForwarder) -> None:
    other_id = cloud.add_endpoint()
    with Agent(cloud, other_id, forwarder) as bystander:
        bystander.open_session(credit=1)
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
def test_an_envelope_over_the_limits_is_refused(
    frames: list[bytes], cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session()
        agent.socket.send_multipart(frames)
        refused, _ = agent.hear(wire.Refused)
        assert (refused.error["code"], refused.error["fault"]) == ("FRAME_MALFORMED", "peer")
        assert "limits" in refused.error["message"]
        serves_others(cloud, forwarder)


def test_a_frame_over_the_limit_ends_the_connection(
    cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str
) -> None:
    """The socket ends the connection because of the frame's announced length; its bytes are not read."""
    with Agent(cloud, endpoint_id, forwarder) as agent, agent.socket.get_monitor_socket() as monitor:
        agent.open_session()
        agent.socket.send_multipart([*CREDIT, bytes(MAX_FRAME_BYTES + 1)])
        wait_until(lambda: bool(monitor.poll(50)) and monitor.recv_multipart() is not None, "the connection ends")
        agent.socket.disable_monitor()
        serves_others(cloud, forwarder)
        agent.connect(forwarder)  # the agent may reconnect
        agent.open_session()


def test_the_largest_allowed_frame_arrives(cloud: Cloud, forwarder: RunningForwarder, endpoint_id: str) -> None:
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=1)
        [task_id] = cloud.submit_new(endpoint_id, 1)
        agent.finish(agent.take(1), body=bytes(MAX_FRAME_BYTES))
        agent.until_recorded([task_id])
    error = cloud.task(task_id).error  # the frame is too large for a result, which has another limit
    assert error is not None
    assert f"{MAX_FRAME_BYTES:,} bytes inline" in error.message
