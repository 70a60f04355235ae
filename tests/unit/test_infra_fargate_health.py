"""Health check of the forwarder's container: its exit status, and what it costs."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from farcall_forwarder.adapters.health import HealthServer
from farcall_infra.bundles import RUNTIME

_SOURCE = (RUNTIME / "fargate_health.py").read_text(encoding="utf-8")
#: Modules that a Python without its site loads before any program.
_OF_EVERY_PROGRAM = "import sys; print(*sys.modules)"


class _Server:
    """A health server in a thread whose ``/livez`` answers ``is_alive``."""

    def __init__(self) -> None:
        self.is_alive = True
        self.loop = asyncio.new_event_loop()
        self._server = HealthServer({"/livez": lambda: (self.is_alive, {})})
        self.port = self.loop.run_until_complete(self._server.start("127.0.0.1", 0))
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.run_until_complete(self._server.close())
        self.loop.close()


@pytest.fixture
def server() -> Iterator[_Server]:
    server = _Server()
    yield server
    server.close()


def _python(source: str, *, port: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FARCALL_FORWARDER_HEALTH_PORT": str(port)}
    command = [sys.executable, "-I", "-S", "-c", source]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_check_passes_while_the_loop_answers(server: _Server) -> None:
    assert _python(_SOURCE, port=server.port).returncode == 0
    server.is_alive = False
    assert _python(_SOURCE, port=server.port).returncode == 1


def test_the_check_fails_without_a_listener() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert _python(_SOURCE, port=free.getsockname()[1]).returncode == 1


def test_the_check_fails_if_the_loop_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = _python(_SOURCE, port=silent.getsockname()[1])
    assert done.returncode == 1
    assert "timed out" in done.stderr


def test_the_check_loads_no_module_from_files(server: _Server) -> None:
    """ECS starts it every ten seconds. With ``urllib`` each start needs ten times the processor time."""
    started = set(_python(_OF_EVERY_PROGRAM).stdout.split())
    atexit = "import atexit, sys; atexit.register(lambda: print(*sys.modules))\n"
    loaded = set(_python(atexit + _SOURCE.split('"""')[2], port=server.port).stdout.split())
    assert loaded - started == {"_socket", "atexit"}
