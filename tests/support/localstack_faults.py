"""Fault injection for tests: kill -9 of a tier's parts, and loss of the queue's data. Each part restarts by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Final

import psutil
import redis

from farcall_common.errors import Unavailable
from farcall_localstack.server import group_members
from farcall_localstack.tier import Tier

#: A text in the command line of each part's process. The blob store is LocalStack itself, whose end is the tier's end.
_PARTS: Final = {
    "api": "farcall_lambdas.handlers.api.handle",
    "forwarder": "farcall_forwarder",
    "postgres": "/bin/postgres",
    "valkey": "valkey-server",
}
_LOOK_EVERY_S: Final = 0.1  # each poll lists all processes of the machine


class Faults:
    """Injects faults into a tier whose LocalStack we started."""

    def __init__(self, tier: Tier) -> None:
        assert tier.localstack_pid is not None
        self._tier = tier
        self._localstack_pid = tier.localstack_pid

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that always run."""
        return tuple(name for name in _PARTS if name != "api")

    def pid(self, name: str) -> int | None:
        """The process of a part, the oldest if there are several; None while it is down."""
        return min(self._processes(name), default=None)

    def kill(self, name: str) -> int:
        """Kill a part. Returns the id of the killed process."""
        pid = self.wait_up(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_up(self, name: str, *, other_than: int | None = None, within_s: float = 30.0) -> int:
        """Wait until a part runs, as another process than ``other_than`` if given; returns its process id. A killed API
        function starts again with the next request.

        :raises Unavailable: after ``within_s`` seconds.
        """
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            pids = self._processes(name) - {other_than}
            if pids:
                return min(pids)
            time.sleep(_LOOK_EVERY_S)
        raise Unavailable(f"{name} did not start within {within_s:g} s")

    def wipe_queue(self) -> None:
        """Delete all of Valkey's data, as if the node were lost."""
        environment = self._tier.environment()
        with redis.Redis(environment["FARCALL_QUEUE_HOST"], int(environment["FARCALL_QUEUE_PORT"])) as queue:
            queue.flushall()

    def _processes(self, name: str) -> set[int]:
        """The part's processes, without children of one of them: of PostgreSQL only the main process."""
        found: dict[int, int] = {}
        for pid in group_members(self._localstack_pid):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if any(_PARTS[name] in part for part in _program(process)):
                    found[pid] = process.ppid()
        return {pid for pid, parent in found.items() if parent not in found}


@contextlib.contextmanager
def silent_servers(localstack_pid: int, *programs: str, replaced: bool = False) -> Iterator[None]:
    """In the block, the servers of these programs take connections and answer nothing. Afterwards they go on, or other
    ones, without those connections, have their addresses."""
    servers: list[psutil.Process] = []
    for pid in group_members(localstack_pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(pid)
            if server.name() in programs:
                server.suspend()  # before its children, so that it starts no more; they have groups of their own
                servers += (server, *server.children(recursive=True))
    assert {server.name() for server in servers} == set(programs)
    try:
        for server in servers:
            with contextlib.suppress(psutil.NoSuchProcess):
                server.suspend()
        yield
    finally:
        for server in servers:
            with contextlib.suppress(psutil.NoSuchProcess):
                server.kill() if replaced else server.resume()


def _program(process: psutil.Process) -> Iterator[str]:
    """The arguments of a command line, without whole programs (``python -c``)."""
    return (word for word in process.cmdline() if len(word) < 500)
