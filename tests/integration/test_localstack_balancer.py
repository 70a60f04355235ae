"""The offline tier's load balancer: health of targets, deregistration, ends of connections. A real relay process."""

from __future__ import annotations

import contextlib
import http.server
import importlib
import json
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest

from tests.waiting import WAIT_S, wait_until

_PLUGIN = Path(__file__).parents[2] / "localstack" / "plugin"
_SPEED = 100  # of the health checks, whose least interval is 5 s on AWS


@pytest.fixture
def targets() -> Iterator[ModuleType]:
    """The plugin's module, which does not need LocalStack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_PLUGIN))
        yield importlib.import_module("farcall_localstack_plugin.targets")


class _Name(socketserver.BaseRequestHandler):
    """Says the server's port first, then answers each message with the same."""

    def handle(self) -> None:
        self.request.sendall(b"%d\n" % self.request.getsockname()[1])
        while data := self.request.recv(100):
            self.request.sendall(data)


class _TcpServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


class _Target:
    """A program with a port for peers and one with a health check."""

    def __init__(self) -> None:
        self.status = HTTPStatus.OK
        target = self

        class Health(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(target.status if self.path == "/readyz" else HTTPStatus.NOT_FOUND)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._servers = [_TcpServer(("127.0.0.1", 0), _Name), http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)]
        self.port, self.health_port = (int(server.server_address[1]) for server in self._servers)
        for server in self._servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


class _Peer:
    """A connection through the load balancer; ``target`` is the port where it ends."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        self._file = self._socket.makefile("rb")
        self.target = int(self._file.readline())

    @property
    def is_connected(self) -> bool:
        try:
            self._socket.sendall(b"again\n")
            return self._file.readline() == b"again\n"
        except ConnectionError:
            return False

    def wait_end(self) -> None:
        """Wait until the other side ends the connection, without a word."""
        with contextlib.suppress(ConnectionError):
            assert self._file.read() == b""

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class _Balancer:
    """A target group with these attributes, and the relay of its listener."""

    def __init__(self, module: ModuleType, directory: Path, attributes: dict[str, str], *, idle_s: float) -> None:
        properties = {
            "TargetGroupAttributes": [{"Key": key, "Value": value} for key, value in attributes.items()],
            "HealthCheckPath": "/readyz",
            "HealthCheckIntervalSeconds": 5,
            "HealthyThresholdCount": 2,
            "UnhealthyThresholdCount": 2,
        }
        self._directory = directory
        self.group: Any = module.TargetGroup(directory / "group", properties, speed=_SPEED)
        self.group.use_listener("", idle_s=idle_s)
        self._stack = contextlib.ExitStack()
        ready = directory / "port"
        command = [sys.executable, "-m", "farcall_localstack_plugin.relay", str(self.group.file), str(ready)]
        relay = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(_PLUGIN)})
        self._stack.callback(relay.wait)
        self._stack.callback(relay.terminate)
        wait_until(ready.exists, "the relay listens")
        self.port = int(ready.read_text())
        self.lost: list[int] = []

    def add(self) -> _Target:
        """A registered target, once it is healthy."""
        target = _Target()
        self._stack.callback(target.close)
        self.group.register(
            target.port,
            target.health_port,
            file=self._directory / f"health-{target.port}.json",
            grace_s=0.0,
            on_unhealthy=lambda: self.lost.append(target.port),
        )
        self._stack.callback(self.group.deregister, target.port)
        wait_until(lambda: self.group.is_healthy(target.port), "the target is healthy")
        return target

    def peer(self) -> _Peer:
        peer = _Peer(self.port)
        self._stack.callback(peer.close)
        return peer

    def peer_at(self, target: _Target) -> _Peer:
        """A connection that ends at this target."""
        while (peer := self.peer()).target != target.port:
            pass
        return peer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


_KEEPS_UNHEALTHY = {"target_health_state.unhealthy.connection_termination.enabled": "false"}
_ENDS_DEREGISTERED = {"deregistration_delay.connection_termination.enabled": "true"}


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "AWS's default"])
def test_an_unhealthy_target_gets_no_peers_and_keeps_its_own_only_by_an_attribute(
    keeps: bool, targets: ModuleType, tmp_path: Path
) -> None:
    with _Balancer(targets, tmp_path, _KEEPS_UNHEALTHY if keeps else {}, idle_s=WAIT_S) as balancer:
        first, second = balancer.add(), balancer.add()
        at_first, at_second = balancer.peer_at(first), balancer.peer_at(second)
        first.status = HTTPStatus.SERVICE_UNAVAILABLE
        wait_until(lambda: balancer.lost == [first.port], "the target is reported as unhealthy")
        if keeps:
            assert at_first.is_connected
        else:
            at_first.wait_end()
        assert at_second.is_connected
        assert {balancer.peer().target for _ in range(4)} == {second.port}
        first.status = HTTPStatus.OK
        balancer.peer_at(first)


def test_without_a_healthy_target_all_get_peers(targets: ModuleType, tmp_path: Path) -> None:
    with _Balancer(targets, tmp_path, {}, idle_s=WAIT_S) as balancer:
        target = balancer.add()
        target.status = HTTPStatus.SERVICE_UNAVAILABLE
        wait_until(lambda: balancer.lost == [target.port], "it is unhealthy")
        assert balancer.peer().target == target.port


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "kept"])
def test_a_deregistered_target_keeps_its_peers_at_least_for_the_delay(
    ends: bool, targets: ModuleType, tmp_path: Path
) -> None:
    with _Balancer(targets, tmp_path, _ENDS_DEREGISTERED if ends else {}, idle_s=WAIT_S) as balancer:
        assert balancer.group.delay_s == 300 / _SPEED  # AWS's default
        old, new = balancer.add(), balancer.add()
        peer = balancer.peer_at(old)
        balancer.group.deregister(old.port)
        assert {balancer.peer().target for _ in range(4)} == {new.port}
        assert peer.is_connected
        balancer.group.remove(old.port)  # the end of the delay
        if ends:
            peer.wait_end()
        else:
            balancer.peer()  # the relay has read the new targets
            assert peer.is_connected


def test_an_idle_connection_ends(targets: ModuleType, tmp_path: Path) -> None:
    with _Balancer(targets, tmp_path, {}, idle_s=0.2) as balancer:
        balancer.add()
        balancer.peer().wait_end()


def test_the_number_of_checks_and_the_state_are_in_a_file(targets: ModuleType, tmp_path: Path) -> None:
    with _Balancer(targets, tmp_path, {}, idle_s=WAIT_S) as balancer:
        target = balancer.add()
        file = tmp_path / f"health-{target.port}.json"
        wait_until(lambda: file.exists() and json.loads(file.read_text())["checks"] > 3, "checks go on")
        assert json.loads(file.read_text())["healthy"] is True


def test_failures_do_not_count_in_the_grace_period(targets: ModuleType, tmp_path: Path) -> None:
    health = importlib.import_module("farcall_localstack_plugin.health")
    changes: list[bool] = []
    fails = iter([False] * 5)
    schedule = health.Schedule(interval_s=0.01, successes=1, failures=1, grace_s=WAIT_S)
    monitor = health.Monitor(lambda: next(fails, True), schedule, tmp_path / "health.json", on_change=changes.append)
    wait_until(lambda: changes == [True], "the first success counts")
    monitor.close()
