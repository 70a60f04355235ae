"""Health checks of containers and load balancer targets, each repeated in a thread."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from farcall_localstack_plugin.files import write_whole


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Seconds between two checks; checks in a row until the state is healthy or unhealthy; and seconds from the start
    in which failures do not count before the first success."""

    interval_s: float
    successes: int
    failures: int
    grace_s: float = 0.0


class Monitor:
    """Repeats ``check`` until it is closed. ``file`` has the number of checks and the state, for a reader outside.

    :param on_change: called in the monitor's thread with the new state. The state is unknown before.
    """

    def __init__(
        self, check: Callable[[], bool], schedule: Schedule, file: Path, *, on_change: Callable[[bool], None]
    ) -> None:
        self._check = check
        self._schedule = schedule
        self._file = file
        self._on_change = on_change
        self._closed = threading.Event()
        self.is_healthy: bool | None = None
        threading.Thread(target=self._run, name=f"health-{file.stem}", daemon=True).start()

    def close(self) -> None:
        """Start no more checks. One that is under way changes nothing."""
        self._closed.set()

    def _run(self) -> None:
        counts_at = time.monotonic() + self._schedule.grace_s
        checks, former, in_a_row = 0, False, 0
        while not self._closed.wait(self._schedule.interval_s):
            passed = self._check()
            checks += 1
            if self._closed.is_set():
                return
            if passed or self.is_healthy is not None or time.monotonic() >= counts_at:
                former, in_a_row = passed, in_a_row + 1 if passed == former else 1
                needed = self._schedule.successes if passed else self._schedule.failures
                if passed is not self.is_healthy and in_a_row >= needed:
                    self.is_healthy = passed
                    self._on_change(passed)
            write_whole(self._file, json.dumps({"checks": checks, "healthy": self.is_healthy}))


def passes(command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float) -> bool:
    """Whether a command ends with exit status 0 in time, as a container's health check has to."""
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def answers(url: str, *, timeout_s: float) -> bool:
    """Whether a GET succeeds, as a load balancer's health check over HTTP has to."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s):  # noqa: S310 - loopback
            return True
    except (urllib.error.URLError, OSError):
        return False
