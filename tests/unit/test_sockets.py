"""ZeroMQ client sockets: one connection without reconnects, and options that cannot end the process."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from farcall_common.limits import HANDSHAKE_S, MAX_FRAME_BYTES
from farcall_common.sockets import CONNECTION_LOST, KEY_REFUSED, RECONNECT_MS, client_socket
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
HOUR_MS = 3600 * 1000


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def test_libzmq_neither_reconnects_nor_removes_the_pipe(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with client(context) as socket:
        assert socket.getsockopt(zmq.RECONNECT_IVL) == RECONNECT_MS >= HOUR_MS
        assert (socket.linger, socket.immediate) == (0, 0)


def test_a_connection_is_bounded_in_time_and_memory(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Without these a host that answers nothing is waited for as long as the kernel does, which is minutes; and what
    comes in may fill the memory."""
    with client(context) as socket:
        assert 0 < int(socket.getsockopt(zmq.CONNECT_TIMEOUT)) <= 10_000
        assert socket.getsockopt(zmq.HANDSHAKE_IVL) == 1000 * HANDSHAKE_S
        assert socket.getsockopt(zmq.MAXMSGSIZE) == 2 * MAX_FRAME_BYTES
        assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1


def test_a_forwarder_may_have_an_address_of_ipv6(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with client(context) as socket:
        assert socket.getsockopt(zmq.IPV6) == 1


def test_socket_owner_sets_linger_and_high_water_mark(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with client(context, linger_ms=200, high_water_mark=7) as socket:
        assert (socket.linger, socket.sndhwm, socket.rcvhwm) == (200, 7, 7)
    with client(context) as socket:
        assert (socket.linger, socket.sndhwm, socket.rcvhwm) == (0, 0, 0)


def client(context: zmq.Context[zmq.Socket[bytes]], **options: int) -> zmq.Socket[bytes]:
    public_key, secret_key = (key.decode() for key in zmq.curve_keypair())
    return client_socket(context, server_key=public_key, public_key=public_key, secret_key=secret_key, **options)


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


#: Each module that makes a socket of ZeroMQ, with the kinds. To a forwarder leads only the DEALER of ``sockets.py``.
MAKING: Final = {
    "common/farcall_common/sockets.py": {"DEALER"},
    "endpoint/farcall_endpoint/host/transport.py": {"DEALER", "ROUTER"},  # between an agent and its managers
    "forwarder_fargate/farcall_forwarder/adapters/connection_limiter.py": {"PAIR"},
    "forwarder_fargate/farcall_forwarder/adapters/router.py": {"ROUTER"},
    "forwarder_fargate/farcall_forwarder/adapters/zap.py": {"ROUTER"},
}
#: Peers and forwarders that tests make without the product, and the hop that a benchmark measures.
MADE_BY_TESTS: Final = {
    "benchmarks/weight/driver.py",
    "tests/support/scripted_router.py",
    "tests/integration/test_forwarder_abuse.py",
    "tests/unit/test_sockets.py",
}
KINDS: Final = {kind.name for kind in zmq.SocketType}
#: What makes a socket a client of CURVE, and how it ends.
CLIENT_OPTIONS: Final = {"CURVE_SERVERKEY", "RECONNECT_IVL", "RECONNECT_IVL_MAX", "IMMEDIATE"}


def test_few_modules_create_sockets_and_one_those_to_a_forwarder() -> None:
    used = {name: zmq_names(ast.parse(source)) for name, source in sources().items() if name not in MADE_BY_TESTS}

    assert {name: names & KINDS for name, names in used.items() if names & KINDS} == MAKING
    assert {name for name, names in used.items() if names & CLIENT_OPTIONS} == {
        "common/farcall_common/sockets.py",
        "endpoint/farcall_endpoint/host/transport.py",
    }


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("context.socket(zmq.DEALER)", {"DEALER"}),
        ("context.socket(zmq.SocketType.DEALER)", {"DEALER"}),
        ("from zmq import DEALER as kind", {"DEALER"}),
        ("context.socket(5)", {"DEALER"}),
        ("context.socket(socket_type=5)", {"DEALER"}),
        ("peer.curve_serverkey = key", {"CURVE_SERVERKEY"}),
        ("peer.setsockopt(zmq.RECONNECT_IVL, -1)", {"RECONNECT_IVL"}),
        ("socket.socket(socket.AF_INET)", set()),
    ],
)
def test_each_way_to_create_a_socket_is_detected(source: str, names: set[str]) -> None:
    assert zmq_names(ast.parse(source)) & (KINDS | CLIENT_OPTIONS) == names


def zmq_names(tree: ast.AST) -> set[str]:
    """The kinds of sockets and the options that a module names, in capitals."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="zmq") | ast.Attribute(attr="SocketType"), attr=name):
                names.add(name)
            case ast.ImportFrom(module="zmq", names=imported):
                names |= {each.name for each in imported}
            case ast.Attribute(attr=name, ctx=ast.Store()) if name.upper() in CLIENT_OPTIONS:
                names.add(name.upper())
            case ast.Call(func=ast.Attribute(attr="socket"), args=args, keywords=keywords):
                numbers = [
                    each.value for each in (*args, *(each.value for each in keywords)) if isinstance(each, ast.Constant)
                ]
                names |= {kind.name for kind in zmq.SocketType if kind.value in numbers}
    return names


def sources() -> dict[str, str]:
    """Every module of the repository that says "zmq", by its path."""
    return {
        path.relative_to(ROOT).as_posix(): source
        for part in ROOT.iterdir()
        if part.is_dir() and not part.name.startswith(".") and part.name not in ("build", "cdk.out")
        for path in part.rglob("*.py")
        if not any(each.startswith(".") for each in path.relative_to(ROOT).parts)
        and "zmq" in (source := path.read_text())
    }
