"""Killed forwarders: a busy peer's process survives, reads the messages that arrived, and connects again.

libzmq ends a process whose socket loses its pipe between two frames of one message. A peer that is busy meanwhile (one
long C call that keeps the interpreter lock) has a backlog of such messages when the loss is noticed.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from farcall_common.sockets import RECONNECT_MS
from tests.support.endpoint import wait_until
from tests.waiting import WAIT_S

KILLS = 4
SECRET_KEY = zmq.curve_keypair()[1].decode()

#: Takes a port (0: any) and its secret key.
#: Greets its first peer, floods it with messages of 500 frames on request, and then waits to be killed.
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
from farcall._collector import Collector
from farcall._stream import Stream
from farcall_common.backoff import Backoff

class Api:
    def open_stream(self, public_key):
        return {"forwarders": [forwarder()], "ticket": "a-ticket", "heartbeat_s": 30.0}

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
from farcall_endpoint.agent.connection import Address
from farcall_endpoint.agent.links import HANDSHAKE_DONE, Uplink
from farcall_endpoint.transport import new_curve_keys

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

    def says(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def write(self, text: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(text)
        self.popen.stdin.flush()


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
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
    start: Start, tmp_path: Path, connection: str, libzmq_reconnects: bool
) -> None:
    """``libzmq_reconnects``: the process is busy until libzmq has reconnected."""
    way = tmp_path / "way.json"
    forwarder, port = start_forwarder(start, way)
    reconnect_ms = 1 if libzmq_reconnects else RECONNECT_MS
    program = start(PROGRAM.replace("{connection}", connection), str(way), str(reconnect_ms))
    for kill in range(KILLS):
        assert forwarder.says() == "opened", f"after {kill} kills the program ended with {program.popen.poll()}"
        program.write("+")
        assert program.says() == "busy"
        forwarder.write("flood\n")
        assert forwarder.says() == "sent"
        forwarder.popen.kill()
        wait_until(lambda: not is_connected(program, port), timeout_s=WAIT_S)  # noqa: B023 - called at once
        forwarder, port = start_forwarder(start, way, port=port if libzmq_reconnects else 0)
        if libzmq_reconnects:
            wait_until(lambda: is_connected(program, port), timeout_s=WAIT_S)  # noqa: B023 - called at once
        program.write("-")
    assert forwarder.says() == "opened", f"after {KILLS} kills the program ended with {program.popen.poll()}"
    assert program.popen.poll() is None


def start_forwarder(start: Start, way: Path, *, port: int = 0) -> tuple[Process, int]:
    """A new forwarder and its port. The file ``way`` names it from now on."""
    forwarder = start(FORWARDER, str(port), SECRET_KEY)
    line = forwarder.says()
    way.with_suffix(".new").write_text(line)
    way.with_suffix(".new").replace(way)
    return forwarder, int(json.loads(line)["address"].rpartition(":")[2])
