"""The agent's socket to a forwarder, when that is none."""

from __future__ import annotations

import socket
import threading

import zmq

from farcall_common.wire import Envelope, Heartbeat
from farcall_endpoint.agent.core.connection import Address
from farcall_endpoint.agent.shell.links import Uplink
from farcall_endpoint.host.transport import new_curve_keys
from tests.waiting import WAIT_S, wait_until


def test_a_protocol_error_does_not_block_the_connection_thread() -> None:
    with zmq.Context() as context, socket.create_server(("127.0.0.1", 0)) as listener:
        uplink = Uplink(context, new_curve_keys(), zmq.Poller())
        uplink.open_socket(Address(f"tcp://127.0.0.1:{listener.getsockname()[1]}", new_curve_keys().public))
        with listener.accept()[0] as impostor:
            impostor.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 10)
            wait_until(lambda: list(uplink.connection_events()))
        assert not list(uplink.receive())
        sender = threading.Thread(target=uplink.send, args=(Envelope(Heartbeat(at=0.0)),), daemon=True)
        sender.start()
        sender.join(WAIT_S)
        assert not sender.is_alive()
        uplink.close()
