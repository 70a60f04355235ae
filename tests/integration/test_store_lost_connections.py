"""Connections to PostgreSQL that are lost without notice, as they are while Lambda has frozen a function."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from farcall_common.errors import Unavailable
from farcall_common.store.postgres import PostgresDatabase
from tests.integration.store_servers import Valkey
from tests.integration.test_api_handlers import Runtime
from tests.waiting import WAIT_S, wait_until

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing a connection sends RST
#: More than the time for which a connection is trusted, in seconds.
FROZEN_S = 60.0


class Relay:
    """Forwards connections to a port, and forgets those that it has when asked, as a server that was replaced: their
    clients notice it only when they send something."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._generation = 0
        self._speaks = threading.Event()
        self._speaks.set()
        self._held = 0
        self._is_silent = False
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def forget(self) -> None:
        self._generation += 1

    def holds_bytes(self) -> bool:
        """Whether something was sent in a silence."""
        return self._held > 0

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Pass nothing on in the block, not even for new connections. At its end the connections from before are
        forgotten, as after a fail-over."""
        self._speaks.clear()
        try:
            yield
        finally:
            self.forget()
            self._speaks.set()

    def silence(self) -> None:
        """Take what clients send, and pass nothing on: the server hangs."""
        self._is_silent = True

    def close(self) -> None:
        """End the relay and its connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for each in (*self._sockets, self._listener):
            each.close()

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        self._threads.append(thread := threading.Thread(target=target, args=args, daemon=True))
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._sockets += (client, server)
            self._start(self._pass, client, server, self._generation)
            self._start(self._pass, server, client, self._generation)

    def _pass(self, source: socket.socket, target: socket.socket, generation: int) -> None:
        """Pass bytes on until one side ends; then end the other, with RST if the relay has forgotten them."""
        data = b""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._held += not self._speaks.is_set()
                self._speaks.wait()
                if generation != self._generation:
                    break
                if self._is_silent:
                    continue
                target.sendall(data)
        if data and generation != self._generation:
            source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            source.close()
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(postgres_url: str) -> Iterator[Relay]:
    found = Relay(int(str(conninfo_to_dict(postgres_url)["port"])))
    yield found
    found.close()


def test_connection_is_checked_after_a_freeze(postgres_url: str, relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the wall clock shows how long a frozen process has stood still."""
    database = PostgresDatabase(make_conninfo(postgres_url, port=relay.port), max_connections=1, timeout_s=600)
    with contextlib.closing(database):
        database.ping()
        relay.forget()
        clock = time.time
        monkeypatch.setattr(time, "time", lambda: clock() + FROZEN_S)
        database.ping()


@pytest.mark.parametrize("idle_s", [0.0, FROZEN_S], ids=["used", "idle"])
def test_a_server_that_hangs_is_unavailable(
    postgres_url: str, relay: Relay, monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    """Its machine acknowledges each packet, so that TCP finds nothing."""
    url = make_conninfo(postgres_url, port=relay.port)
    opened = PostgresDatabase(url, max_connections=1, timeout_s=0.5, silence_s=0.2, answer_s=0.3)
    with contextlib.closing(opened) as database:
        wait_until(lambda: _answers(database), "the first connection")
        clock = time.time
        monkeypatch.setattr(time, "time", lambda: clock() + idle_s)
        relay.silence()
        with pytest.raises(Unavailable, match="does not answer"):
            database.ping()


def _answers(database: PostgresDatabase) -> bool:
    try:
        database.ping()
    except Unavailable:
        return False
    return True


def test_a_server_that_takes_no_changes_is_unavailable(postgres_url: str) -> None:
    """As a former primary after a fail-over, or a server whose storage is full."""
    with contextlib.closing(PostgresDatabase(postgres_url, max_connections=1)) as database:
        with database.connection() as connection:
            connection.execute("SET default_transaction_read_only = on")
        with pytest.raises(Unavailable, match="read-only"):
            database.try_lock("a lock", ttl_s=1)


_SHOWN = """
import socket
from farcall_lambdas.handlers import {handler}
with {handler}._stores().database.connection() as connection:
    with socket.socket(fileno=socket.dup(connection.fileno())) as found:
        print(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), connection.silence_s, connection.answer_s)
"""


#: Seconds for an answer: API Gateway waits 29, and a round of the reconciler may take 55.
@pytest.mark.parametrize(("handler", "answer_s"), [("api", "20.0"), ("reconciler", "30.0")])
def test_functions_give_up_a_silent_server_in_seconds(
    postgres_url: str, valkey: Valkey, tmp_path: Any, handler: str, answer_s: str
) -> None:
    environ = {
        **os.environ,
        "FARCALL_DATABASE_URL": postgres_url,
        "FARCALL_QUEUE_URL": valkey.url,
        "FARCALL_BLOB_DIRECTORY": str(tmp_path),
        "FARCALL_BLOB_URL": "http://127.0.0.1:9",
        "FARCALL_BLOB_KEY": "k" * 32,
        "FARCALL_TICKET_KEY": "k" * 32,
    }
    program = [sys.executable, "-c", _SHOWN.format(handler=handler)]
    done = subprocess.run(program, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4000", "4.0", answer_s]


@pytest.fixture
def runtime(postgres_url: str, relay: Relay, valkey: Valkey, tmp_path: Any) -> Iterator[Runtime]:
    """The handlers in a process, whose database is behind the relay."""
    found = Runtime(
        {
            **os.environ,
            "FARCALL_DATABASE_URL": make_conninfo(postgres_url, port=relay.port),
            "FARCALL_QUEUE_URL": valkey.url,
            "FARCALL_BLOB_DIRECTORY": str(tmp_path),
            "FARCALL_BLOB_URL": "http://127.0.0.1:9",
            "FARCALL_BLOB_KEY": "k" * 32,
            "FARCALL_TICKET_KEY": "k" * 32,
            "FARCALL_CALLER_KEY": "c" * 32,
        }
    )
    yield found
    found.close()


def test_handlers_go_on_after_the_database_was_silent(runtime: Runtime, relay: Relay) -> None:
    """As in a fail-over: a call is under way, and its connection is dead at the end. The process stays the same.

    The relay's machine acknowledges what it drops, so a call ends with the silence. That functions do not wait for it
    if nothing is acknowledged is a time limit of the kernel, which another test reads.
    """
    assert runtime.call("GET", "/v3/functions")[0] == 200
    answers: list[Any] = []
    with relay.silent():
        call = threading.Thread(target=lambda: answers.append(runtime.call("GET", "/v3/functions")))
        call.start()
        wait_until(relay.holds_bytes, "the call waits for the database")
    call.join(WAIT_S)
    [(status, body)] = answers
    assert status in (200, 503), body
    assert status == 200 or body["retryable"]
    assert runtime.call("GET", "/v3/functions")[0] == 200


def test_new_connections_to_a_silent_database_are_given_up(runtime: Runtime, relay: Relay) -> None:
    with relay.silent():
        status, body = runtime.call("GET", "/v3/functions")
        assert (status, body["code"]) == (503, "UNAVAILABLE")
    assert runtime.call("GET", "/v3/functions")[0] == 200
