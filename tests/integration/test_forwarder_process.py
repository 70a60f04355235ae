"""Forwarder processes: start, drain, crash, and peers of a killed forwarder."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
import zmq

from farcall_common import wire
from farcall_common.errors import Fenced, QueueDataLost
from farcall_common.sockets import RECONNECT_MS
from farcall_common.store.model import LeasedTask
from farcall_common.store.settings import Stores
from farcall_common.wire import TaskState
from farcall_forwarder.core.event_log import read_events
from farcall_forwarder.core.events import TasksLeased
from tests.integration.forwarder_peers import (
    Agent,
    Cloud,
    ForwarderProcess,
    RunningForwarder,
    Start,
    cloud,
    endpoint_id,
    environ,
    start,
    stores,
)
from tests.integration.store_servers import Valkey
from tests.support.stores import FakeQueue, fake_stores
from tests.waiting import WAIT_S, wait_until

__all__ = ["cloud", "endpoint_id", "environ", "start", "stores"]


def log_lines(forwarder: ForwarderProcess) -> Sequence[dict[str, object]]:
    return [json.loads(line) for line in forwarder.log.read_text().splitlines()]


def test_a_process_serves_drains_and_exits_with_0(cloud: Cloud, start: Start, endpoint_id: str) -> None:
    forwarder = start(FARCALL_FORWARDER_DRAIN_S="2")
    with Agent(cloud, endpoint_id, forwarder) as agent:
        agent.open_session(credit=10)
        task_ids = cloud.submit_new(endpoint_id, 10, payload=b"a secret payload")
        agent.serve(10)
        forwarder.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: "event log turn" in forwarder.log.read_text(), "the event log is written")
        forwarder.process.send_signal(signal.SIGTERM)
        agent.hear(wire.Redirect)
        agent.say(wire.Goodbye())
        assert forwarder.process.wait(WAIT_S) == 0
    cloud.until_all(task_ids, TaskState.SUCCESS)
    assert not cloud.stores.queue.forwarders()
    turns = list(read_events(line for line in log_lines(forwarder) if line["message"] == "event log turn"))
    assert any(isinstance(event, TasksLeased) for _, events in turns for event in events)
    messages = [line["message"] for line in log_lines(forwarder)]
    assert {"ready", "agent connected", "ended"} <= set(messages)
    text = forwarder.log.read_text()
    assert "a secret payload" not in text
    assert agent.ticket[:20] not in text


def test_a_drain_ends_without_the_queue(valkey: Valkey, stores: Stores, start: Start) -> None:
    forwarder = start(FARCALL_FORWARDER_DRAIN_S="2")
    valkey.kill()
    try:
        assert forwarder.end() == 0
    finally:
        valkey.start()


@pytest.mark.parametrize(
    ("missing", "arguments"), [("FARCALL_DATABASE_URL", ()), ("FARCALL_TICKET_KEY", ()), ("", ("--port", "x"))]
)
def test_a_wrong_setting_ends_the_process_with_a_message(missing: str, arguments: tuple[str, ...]) -> None:
    environ = {
        "FARCALL_DATABASE_URL": "postgresql://unused@127.0.0.1:1/none",
        "FARCALL_QUEUE_URL": "redis://127.0.0.1:1/0",
        "FARCALL_BLOB_BUCKET": "bucket",
        "FARCALL_TICKET_KEY": "x" * 32,
    }
    environ.pop(missing, None)
    path = {name: value for name, value in os.environ.items() if not name.startswith("FARCALL_")}
    command = [sys.executable, "-m", "farcall_forwarder", *arguments]
    ended = subprocess.run(command, env=path | environ, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2
    assert "CONFIGURATION" in ended.stderr
    assert missing in ended.stderr


# -- bugs --------------------------------------------------------------------------------------------------------------


class BrokenQueue(FakeQueue):
    """A queue with a bug that affects one endpoint."""

    broken_at = ""

    def lease(
        self, wanted: Mapping[str, tuple[int, int, int]], *, lease_s: float
    ) -> Mapping[str, Sequence[LeasedTask] | Fenced | QueueDataLost]:
        if self.broken_at in wanted:
            raise ZeroDivisionError("a bug in a step")
        return super().lease(wanted, lease_s=lease_s)


class DeafQueue(FakeQueue):
    """A queue whose subscriptions have a bug."""

    def listen(self, forwarder_id: str) -> NoReturn:
        raise ZeroDivisionError("a bug in a thread")


def test_a_bug_in_a_step_ends_the_session_of_its_endpoint_and_no_other() -> None:
    queue = BrokenQueue()
    stores = fake_stores(queue=queue)
    cloud = Cloud(stores)
    forwarder = RunningForwarder(stores)
    queue.broken_at, other = cloud.add_endpoint(), cloud.add_endpoint()
    with Agent(cloud, other, forwarder) as served, Agent(cloud, queue.broken_at, forwarder) as agent:
        served.open_session(credit=1)
        agent.open_session(credit=1)
        agent.hear(wire.Redirect)
        task_ids = cloud.submit_new(other, 1)
        assert [spec.task_id for spec in served.take(1)] == task_ids
    forwarder.kill()


def test_a_bug_in_the_wake_up_thread_ends_the_forwarder() -> None:
    forwarder = RunningForwarder(fake_stores(queue=DeafQueue()))
    forwarder.join()
    assert isinstance(forwarder.error, BaseExceptionGroup)
    assert forwarder.error.subgroup(ZeroDivisionError)


# -- killed forwarders: a busy peer's process survives and connects again ----------------------------------------------

# libzmq ends a process whose socket loses its pipe between two frames of one message. A peer that is busy meanwhile
# (one long C call that keeps the interpreter lock) has a backlog of such messages when the loss is noticed.

KILLS = 4
SECRET_KEY = zmq.curve_keypair()[1].decode()

#: Takes a port (0: any) and its secret key.
#: Welcomes its first peer, floods it with messages of 500 frames on request, and then waits to be killed.
FORWARDER = """
import json, sys
import zmq
from farcall_common.wire import Envelope, ResultsReady, StreamOpened, encode

secret_key = sys.argv[2].encode()
with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
    router.sndhwm = 1  # so that nearly everything has left when the last send returns
    router.router_mandatory = True
    router.curve_server = True
    router.curve_secretkey = secret_key
    router.bind(f"tcp://127.0.0.1:{sys.argv[1]}")
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    print(json.dumps({"address": address, "server_key": zmq.curve_public(secret_key).decode()}), flush=True)
    peer, *_ = router.recv_multipart()
    opened = StreamOpened(session_id="a-session", protocol_version=1, heartbeat_s=30.0, cursor="0", resumed=True)
    router.send_multipart([peer, *encode(Envelope(opened))])
    print("opened", flush=True)
    sys.stdin.readline()
    for _ in range(40):
        router.send_multipart([peer, *encode(Envelope(ResultsReady(cursor="1", results=()), (b"frame",) * 500))])
    print("sent", flush=True)
    sys.stdin.readline()
"""

#: Opens a connection, in a thread, to the forwarder named by a file. Its main thread makes C calls, each of which
#: keeps the interpreter lock until the test writes a byte.
PROGRAM = """
import ctypes, json, os, pathlib, sys, threading
from farcall_common import sockets
way = pathlib.Path(sys.argv[1])
sockets.RECONNECT_MS = int(sys.argv[2])

def forwarder():
    return json.loads(way.read_text())

{connection}

threading.Thread(target=run, daemon=True).start()
keep_the_lock = ctypes.PyDLL(None).read  # unlike CDLL, it does not release the lock
byte = ctypes.create_string_buffer(1)
while os.read(0, 1):
    print("busy", flush=True)
    keep_the_lock(0, byte, 1)
"""

SDK_STREAM = """
from farcall._answers import Forwarder, StreamGrant
from farcall._results import Collector
from farcall._stream import Stream
from farcall_common.backoff import Backoff

class Api:
    def open_stream(self, public_key):
        return StreamGrant([Forwarder(**forwarder())], "a-ticket", 30.0)

class Ignored(Collector):
    def __init__(self): pass
    def take_pushed(self, results, frames): pass

stream = Stream(
    Api(), Ignored(), task_group_id="a-group", on_gap=lambda: None, backoff=Backoff(first_s=0.01, most_s=0.05)
)
run = stream.run
"""

AGENT_UPLINK = """
import time
import zmq
from farcall_common.wire import Envelope, Heartbeat
from farcall_endpoint.agent.core.connection import Address
from farcall_endpoint.agent.shell.links import HANDSHAKE_DONE, Uplink
from farcall_endpoint.host.transport import new_curve_keys

def run():
    poller = zmq.Poller()
    uplink = Uplink(zmq.Context(), new_curve_keys(), poller)
    while True:
        to = forwarder()
        uplink.open_socket(Address(to["address"], to["server_key"]))
        uplink.send(Envelope(Heartbeat(at=0.0)))
        while True:
            poller.poll()
            for _ in uplink.receive(): pass
            if set(uplink.connection_events()) - {HANDSHAKE_DONE}: break
        uplink.close()
        time.sleep(0.01)
"""


@dataclasses.dataclass(frozen=True)
class Process:
    """A program whose lines are read one at a time."""

    popen: subprocess.Popen[str]

    def read_line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def write(self, text: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(text)
        self.popen.stdin.flush()


Run = Callable[..., Process]


@pytest.fixture
def run() -> Iterator[Run]:
    """Starts programs; kills them at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str, *arguments: str) -> Process:
        command = [sys.executable, "-c", source, *arguments]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return Process(started[-1])

    yield start
    for process in started:
        process.kill()
        process.communicate()


def is_connected(process: Process, port: int) -> bool:
    connections = psutil.Process(process.popen.pid).net_connections("tcp")
    return any(connection.raddr[1:] == (port,) for connection in connections)


@pytest.mark.parametrize("libzmq_reconnects", [False, True], ids=["", "libzmq-reconnects"])
@pytest.mark.parametrize("connection", [SDK_STREAM, AGENT_UPLINK], ids=["sdk-stream", "agent-uplink"])
def test_a_busy_process_survives_each_kill_of_its_forwarder(
    run: Run, tmp_path: Path, connection: str, libzmq_reconnects: bool
) -> None:
    """``libzmq_reconnects``: the process is busy until libzmq has reconnected."""
    way = tmp_path / "way.json"
    forwarder, port = start_forwarder(run, way)
    reconnect_ms = 1 if libzmq_reconnects else RECONNECT_MS
    program = run(PROGRAM.replace("{connection}", connection), str(way), str(reconnect_ms))
    for kill in range(KILLS):
        assert forwarder.read_line() == "opened", f"after {kill} kills the program ended with {program.popen.poll()}"
        program.write("+")
        assert program.read_line() == "busy"
        forwarder.write("flood\n")
        assert forwarder.read_line() == "sent"
        forwarder.popen.kill()
        wait_until(lambda: not is_connected(program, port))  # noqa: B023 - called at once
        forwarder, port = start_forwarder(run, way, port=port if libzmq_reconnects else 0)
        if libzmq_reconnects:
            wait_until(lambda: is_connected(program, port))  # noqa: B023 - called at once
        program.write("-")
    assert forwarder.read_line() == "opened", f"after {KILLS} kills the program ended with {program.popen.poll()}"
    assert program.popen.poll() is None


def start_forwarder(run: Run, way: Path, *, port: int = 0) -> tuple[Process, int]:
    """A new forwarder and its port. The file ``way`` names it from now on."""
    forwarder = run(FORWARDER, str(port), SECRET_KEY)
    line = forwarder.read_line()
    way.with_suffix(".new").write_text(line)
    way.with_suffix(".new").replace(way)
    return forwarder, int(json.loads(line)["address"].rpartition(":")[2])
