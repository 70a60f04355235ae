"""Client sockets of ZeroMQ: one connection, which is lost for good, and no option that can end a process."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from farcall_common.sockets import CONNECTION_LOST, KEY_REFUSED, RECONNECT_MS, client_socket
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
HOUR_MS = 3600 * 1000


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def test_libzmq_neither_reconnects_by_itself_nor_takes_the_pipe_away(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    public_key, secret_key = (key.decode() for key in zmq.curve_keypair())
    with client_socket(context, server_key=public_key, public_key=public_key, secret_key=secret_key) as socket:
        assert socket.getsockopt(zmq.RECONNECT_IVL) == RECONNECT_MS >= HOUR_MS
        assert (socket.linger, socket.immediate) == (0, 0)


def test_a_wrong_key_leaves_no_socket_behind(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    public_key, secret_key = (key.decode() for key in zmq.curve_keypair())
    with pytest.raises(zmq.ZMQError):
        client_socket(context, server_key="too short", public_key=public_key, secret_key=secret_key)


@pytest.mark.parametrize("refused", ["client-key", "server-key"])
def test_a_refused_key_is_tried_once(context: zmq.Context[zmq.Socket[bytes]], refused: str) -> None:
    server_key, server_secret = zmq.curve_keypair()
    public_key, secret_key = (key.decode() for key in zmq.curve_keypair())
    with contextlib.ExitStack() as stack:
        zap, router = (stack.enter_context(context.socket(kind)) for kind in (zmq.REP, zmq.ROUTER))
        zap.bind("inproc://zeromq.zap.01")
        router.curve_server = True
        router.curve_secretkey = server_secret
        router.setsockopt_string(zmq.ZAP_DOMAIN, "test")
        accepted = stack.enter_context(router.get_monitor_socket(zmq.EVENT_ACCEPTED))
        router.bind("tcp://127.0.0.1:*")
        pinned = public_key if refused == "server-key" else server_key.decode()
        socket = stack.enter_context(
            client_socket(context, server_key=pinned, public_key=public_key, secret_key=secret_key)
        )
        monitor = stack.enter_context(socket.get_monitor_socket(sum(CONNECTION_LOST)))
        socket.connect(router.getsockopt_string(zmq.LAST_ENDPOINT))
        if refused == "client-key":
            assert zap.poll(round(1000 * WAIT_S))
            version, request_id, *_ = zap.recv_multipart()
            zap.send_multipart([version, request_id, b"400", b"refused", b"", b""])
        assert monitor.poll(round(1000 * WAIT_S))
        event = recv_monitor_message(monitor)["event"]
        assert (CONNECTION_LOST[event] == KEY_REFUSED) is (refused == "client-key")
        assert accepted.poll(round(1000 * WAIT_S))
        recv_monitor_message(accepted)
        assert not accepted.poll(200)


def test_sockets_to_a_forwarder_are_made_in_one_place() -> None:
    """The other DEALER is a manager's to its agent."""
    parts = ("common", "sdk", "endpoint", "lambdas", "forwarder_fargate", "local", "localstack", "benchmarks")
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for part in parts for path in modules(part)}
    making = {name for name, source in sources.items() if re.search(r"zmq\.(SocketType\.)?DEALER", source)}
    assert making == {"common/farcall_common/sockets.py", "endpoint/farcall_endpoint/transport.py"}
    setting = {name for name, source in sources.items() if re.search(r"(?i)\breconnect_ivl\b|\bimmediate\s*=", source)}
    assert setting == making


def modules(part: str) -> Iterator[Path]:
    return (path for path in (ROOT / part).rglob("*.py") if ".venv" not in path.as_posix())
