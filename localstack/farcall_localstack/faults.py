"""Ways to break a tier, for tests: kill -9 of its parts, and a queue that forgets. Each part comes back by itself."""

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

__all__ = ["Faults"]

#: What the command line of a part's process has in it. The blob store is LocalStack itself, which nothing outlives.
_PARTS: Final = {
    "api": "farcall_lambdas.handlers.api.handle",
    "forwarder": "farcall_forwarder",
    "postgres": "/bin/postgres",
    "valkey": "valkey-server",
}
_LOOK_EVERY_S: Final = 0.1  # a look goes through all processes of the machine


class Faults:
    """Breaks a tier whose LocalStack is ours."""

    def __init__(self, tier: Tier) -> None:
        assert tier.localstack_pid is not None
        self._tier = tier
        self._localstack_pid = tier.localstack_pid

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that run all the time."""
        return tuple(name for name in _PARTS if name != "api")

    def pid(self, name: str) -> int | None:
        """The process of a part, the oldest if there are several; None while it is down."""
        return min(self._processes(name), default=None)

    def kill(self, name: str) -> int:
        """Kill a part. Returns the process number that is no more."""
        pid = self.wait_up(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_up(self, name: str, *, other_than: int | None = None, within_s: float = 30.0) -> int:
        """Wait until a part runs, as another process than ``other_than`` if given; its process number. An API function
        that was killed runs again with the next request.

        :raises Unavailable: after ``within_s`` seconds.
        """
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            pids = self._processes(name) - {other_than}
            if pids:
                return min(pids)
            time.sleep(_LOOK_EVERY_S)
        raise Unavailable(f"{name} did not come up within {within_s:g} s")

    def wipe_queue(self) -> None:
        """Make Valkey forget everything, as a lost node would."""
        environment = self._tier.environment()
        with redis.Redis(environment["FARCALL_QUEUE_HOST"], int(environment["FARCALL_QUEUE_PORT"])) as queue:
            queue.flushall()

    def _processes(self, name: str) -> set[int]:
        """The part's processes; of PostgreSQL the one that starts the others, of which there is no child of its own."""
        found: dict[int, int] = {}
        for pid in group_members(self._localstack_pid):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if any(_PARTS[name] in part for part in _program(process)):
                    found[pid] = process.ppid()
        return {pid for pid, parent in found.items() if parent not in found}


def _program(process: psutil.Process) -> Iterator[str]:
    """The words of a command line, without the programs that some have as a word (``python -c``)."""
    return (word for word in process.cmdline() if len(word) < 500)
