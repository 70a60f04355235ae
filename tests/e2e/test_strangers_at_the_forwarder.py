"""Authentication at the forwarder's socket: unknown keys, other endpoints, forged tickets, malformed messages."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

import farcall
from farcall_common.sockets import client_socket
from farcall_common.wire import (
    PROTOCOL_VERSION,
    Envelope,
    Hello,
    Message,
    OpenStream,
    Refused,
    decode,
    encode,
    new_id,
)
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from tests.waiting import WAIT_S

REFUSED_HANDSHAKE = (
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
)


def square(number: int) -> int:
    return number * number


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


@pytest.fixture
def as_grace(cloud: Deployment) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {cloud.tokens['grace']}"}
    with httpx.Client(base_url=cloud.api_url, headers=headers, timeout=WAIT_S, trust_env=False) as client:
        yield client


@pytest.fixture(autouse=True)
def _others_are_served_all_the_while(
    client: farcall.Client, endpoint: LocalEndpoint, as_grace: httpx.Client
) -> Iterator[None]:
    deadline = time.monotonic() + WAIT_S  # a forwarder that was killed before is on its way back
    while not has_forwarder(as_grace):
        assert time.monotonic() < deadline, "no forwarder is there"
        time.sleep(0.1)
    yield
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
        assert executor.submit(square, 12).result(WAIT_S) == 144


@contextmanager
def connected(
    context: zmq.Context[zmq.Socket[bytes]], way: dict[str, Any], keys: tuple[bytes, bytes]
) -> Iterator[zmq.Socket[bytes]]:
    forwarder = next(filter(is_there, way["forwarders"]))
    public_key, secret_key = map(bytes.decode, keys)
    with client_socket(
        context, server_key=forwarder["server_key"], public_key=public_key, secret_key=secret_key
    ) as dealer:
        dealer.setsockopt(zmq.RCVTIMEO, round(1000 * WAIT_S))
        with dealer.get_monitor_socket():  # before there is anything to be missed
            dealer.connect(forwarder["address"])
            yield dealer
            dealer.disable_monitor()


def is_there(forwarder: dict[str, Any]) -> bool:
    """Whether it can be reached. A killed one is still listed for some seconds."""
    address = urlsplit(forwarder["address"])
    try:
        socket.create_connection((address.hostname, address.port), timeout=WAIT_S).close()
    except ConnectionRefusedError:
        return False
    return True


def has_forwarder(web: httpx.Client) -> bool:
    """Whether the API names a forwarder that can be reached."""
    answer = web.post("/v3/stream", json={"public_key": zmq.curve_keypair()[0].decode()})
    return answer.is_success and any(map(is_there, answer.json()["forwarders"]))


def stream_way(web: httpx.Client, public_key: bytes) -> dict[str, Any]:
    answer = web.post("/v3/stream", json={"public_key": public_key.decode()})
    answer.raise_for_status()
    return dict(answer.json())


def say(dealer: zmq.Socket[bytes], message: Message) -> None:
    dealer.send_multipart(encode(Envelope(message)))


def hello(endpoint_id: str, ticket: str) -> Hello:
    return Hello(
        endpoint_id=endpoint_id,
        ticket=ticket,
        instance_id=new_id(),
        spool_id=new_id(),
        protocol_versions=(PROTOCOL_VERSION,),
        heartbeat_s=30.0,
    )


def expect_refusal(dealer: zmq.Socket[bytes]) -> dict[str, Any]:
    """The forwarder's next message is a refusal with a code and a message."""
    message = decode(dealer.recv_multipart()).message
    assert isinstance(message, Refused), message
    assert message.error["code"].isupper()
    assert message.error["message"]
    return message.error


@pytest.mark.smoke
def test_an_unknown_curve_key_is_refused(context: zmq.Context[zmq.Socket[bytes]], as_grace: httpx.Client) -> None:
    way = stream_way(as_grace, zmq.curve_keypair()[0])
    with connected(context, way, zmq.curve_keypair()) as dealer:
        monitor = dealer.get_monitor_socket()
        monitor.setsockopt(zmq.RCVTIMEO, round(1000 * WAIT_S))
        deadline = time.monotonic() + WAIT_S
        event = zmq.Event.CONNECTED
        while event not in REFUSED_HANDSHAKE:
            assert event is not zmq.Event.HANDSHAKE_SUCCEEDED
            assert time.monotonic() < deadline
            event = zmq.Event(recv_monitor_message(monitor)["event"])


def test_a_key_cannot_claim_another_endpoint(
    context: zmq.Context[zmq.Socket[bytes]], as_grace: httpx.Client, endpoint: LocalEndpoint
) -> None:
    keys = zmq.curve_keypair()
    registered = as_grace.post("/v3/endpoints", json={"endpoint_name": "grace's", "metadata": {}})
    registered.raise_for_status()
    own_id = registered.json()["endpoint_id"]
    body = {"public_key": keys[0].decode(), "spool_id": str(uuid.uuid4()), "python_version": "3.11", "packages": {}}
    answer = as_grace.post(f"/v3/endpoints/{own_id}/connect", json=body)
    answer.raise_for_status()
    way = answer.json()
    with connected(context, way, keys) as dealer:
        say(dealer, hello(endpoint.endpoint_id, way["ticket"]))
        error = expect_refusal(dealer)
    assert error["fault"] in ("peer", "caller")
    forbidden = as_grace.post(f"/v3/endpoints/{endpoint.endpoint_id}/connect", json=body)
    assert forbidden.status_code == 403


def test_a_clients_key_cannot_be_an_agents(
    context: zmq.Context[zmq.Socket[bytes]], as_grace: httpx.Client, endpoint: LocalEndpoint
) -> None:
    keys = zmq.curve_keypair()
    way = stream_way(as_grace, keys[0])
    with connected(context, way, keys) as dealer:
        say(dealer, hello(endpoint.endpoint_id, way["ticket"]))
        expect_refusal(dealer)


def test_a_forged_ticket_is_refused(context: zmq.Context[zmq.Socket[bytes]], as_grace: httpx.Client) -> None:
    keys = zmq.curve_keypair()
    way = stream_way(as_grace, keys[0])
    forged = way["ticket"][:-4] + "AAAA"
    with connected(context, way, keys) as dealer:
        say(dealer, OpenStream(ticket=forged, protocol_versions=(PROTOCOL_VERSION,), heartbeat_s=30.0))
        expect_refusal(dealer)


@pytest.mark.parametrize(
    "garbage",
    [
        lambda: [b""],
        lambda: [os.urandom(64)],
        lambda: [bytes([PROTOCOL_VERSION]) + os.urandom(64)],
        lambda: [bytes([255]) + b"\x80"],
        lambda: [b"\x01\x81\xa4kind\xa7Unknown"],
        lambda: [os.urandom(8) for _ in range(300)],
    ],
    ids=["empty", "noise", "noise-behind-a-version", "future-version", "unknown-kind", "many-frames"],
)
def test_malformed_messages_are_refused(
    context: zmq.Context[zmq.Socket[bytes]], as_grace: httpx.Client, garbage: Callable[[], list[bytes]]
) -> None:
    keys = zmq.curve_keypair()
    way = stream_way(as_grace, keys[0])
    with connected(context, way, keys) as dealer:
        dealer.send_multipart(garbage())
        assert expect_refusal(dealer)["fault"] == "peer"
