"""Targets of a network load balancer: their registration and health, as the relay of the listener reads them."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from farcall_localstack_plugin.files import write_whole
from farcall_localstack_plugin.health import Monitor, Schedule, answers

_HOST = "127.0.0.1"
#: Timeout of a health check over HTTP, of a network load balancer.
_CHECK_TIMEOUT_S = 6.0
#: Attributes of target groups whose defaults matter, with these defaults.
_DELAY_S = "deregistration_delay.timeout_seconds", "300"
_ENDS_DEREGISTERED = "deregistration_delay.connection_termination.enabled", "false"
_ENDS_UNHEALTHY = "target_health_state.unhealthy.connection_termination.enabled", "true"


@dataclasses.dataclass
class _Target:
    """A registered target; its ``monitor`` is closed when the target is deregistered."""

    monitor: Monitor
    is_draining: bool = False


class TargetGroup:
    """The targets of a relay, in a file. New connections go to healthy targets, or to all registered ones if none is
    healthy, as on AWS.

    :param properties: of the target group in the template.
    :param speed: the periods of the template are divided by this.
    """

    def __init__(self, directory: Path, properties: Mapping[str, Any], *, speed: float) -> None:
        directory.mkdir(parents=True)
        self.file = directory / "targets.json"
        self.address = ""  # of the group's listener; empty until there is one
        self._speed = speed
        self._idle_s: float | None = None
        self._targets: dict[int, _Target] = {}
        self._cuts: list[int] = []
        self._lock = threading.RLock()
        self.update(properties)

    def update(self, properties: Mapping[str, Any]) -> None:
        """Use other properties from now on. The health checks of registered targets stay as they are."""
        attributes = {each["Key"]: each["Value"] for each in properties.get("TargetGroupAttributes", [])}
        self.delay_s = float(attributes.get(*_DELAY_S)) / self._speed
        self._ends_deregistered = attributes.get(*_ENDS_DEREGISTERED) == "true"
        self._ends_unhealthy = attributes.get(*_ENDS_UNHEALTHY) == "true"
        self._path = str(properties.get("HealthCheckPath", "/"))
        self._schedule = Schedule(
            interval_s=float(properties.get("HealthCheckIntervalSeconds", 30)) / self._speed,
            successes=int(properties.get("HealthyThresholdCount", 5)),
            failures=int(properties.get("UnhealthyThresholdCount", 2)),
        )
        self._write()

    def use_listener(self, address: str, *, idle_s: float) -> None:
        """Note the listener's address, and after how many seconds without data it ends a connection."""
        self.address, self._idle_s = address, idle_s
        self._write()

    def register(
        self, port: int, health_port: int, *, file: Path, grace_s: float, on_unhealthy: Callable[[], None]
    ) -> None:
        """Send connections also to ``port`` of this machine, once it is healthy.

        :param file: for the health check's results.
        :param grace_s: seconds in which failed checks do not count.
        """
        with self._lock:
            monitor = Monitor(
                functools.partial(answers, f"http://{_HOST}:{health_port}{self._path}", timeout_s=_CHECK_TIMEOUT_S),
                dataclasses.replace(self._schedule, grace_s=grace_s / self._speed),
                file,
                on_change=functools.partial(self._on_change, port, on_unhealthy),
            )
            self._targets[port] = _Target(monitor)
            self._write()

    def is_healthy(self, port: int) -> bool:
        """Whether a target has passed its health checks."""
        with self._lock:
            target = self._targets.get(port)
            return target is not None and target.monitor.is_healthy is True

    def deregister(self, port: int) -> None:
        """Send no more connections to ``port``. Its connections stay open, at least for the deregistration delay."""
        with self._lock:
            if target := self._targets.get(port):
                target.is_draining = True
                target.monitor.close()
                self._write()

    def remove(self, port: int) -> None:
        """Forget a target, at the end of its deregistration delay. Whether its connections end is an attribute."""
        with self._lock:
            if self._targets.pop(port, None):
                if self._ends_deregistered:
                    self._cuts.append(port)
                self._write()

    def _on_change(self, port: int, on_unhealthy: Callable[[], None], is_healthy: bool) -> None:
        with self._lock:
            if self._ends_unhealthy and not is_healthy:
                self._cuts.append(port)
            self._write()
        if not is_healthy:
            on_unhealthy()

    def _write(self) -> None:
        registered = {port: target for port, target in self._targets.items() if not target.is_draining}
        healthy = [port for port, target in registered.items() if target.monitor.is_healthy]
        targets = {"ports": healthy or list(registered), "cuts": self._cuts, "idle_s": self._idle_s}
        write_whole(self.file, json.dumps(targets))
