"""The agent's managers: starts them through a provider, talks to them, notices when they end, starts them again."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import zmq

from farcall_common.wire import new_id
from farcall_endpoint import protocol
from farcall_endpoint.agent.tasks import Task
from farcall_endpoint.providers import Block, Provider
from farcall_endpoint.silence import Silence
from farcall_endpoint.transport import Bytes, fleet_socket, receive_frames, send_frames

__all__ = ["NO_LIMITS", "Fleet", "Limits", "Lost"]

_logger = logging.getLogger(__name__)

_MAX_BACKOFF_S: Final = 30.0
_MOST_PER_TURN: Final = 64
_MAX_KNOWN_FUNCTIONS: Final = 1024
_LAST_WORDS_S: Final = 0.05
"""What a manager sent before it ended may still be on its way through the socket's own thread."""
_SECRETS: Final = frozenset({"FARCALL_TOKEN"})


N = TypeVar("N", int, float)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an endpoint lets an attempt use at most; None is no limit. ``output_bytes`` of each stream."""

    walltime_s: float | None = None
    memory_bytes: int | None = None
    output_bytes: int | None = None


NO_LIMITS: Final = Limits()


@dataclasses.dataclass(frozen=True)
class Lost:
    """A manager that is gone, and why."""

    manager_id: str
    reason: str


@dataclasses.dataclass
class _Manager:
    block: Block
    silence: Silence
    registered: bool = False
    ended_at: float | None = None
    functions: set[str] = dataclasses.field(default_factory=set)


class Fleet:
    """One manager on this machine now; more blocks come with more providers.

    :param heartbeat_s: at least so often managers hear that the agent lives.
    :param silence_limit_s: a manager that says nothing for so long is given up, and never believed again.
    :param limits: what no attempt may exceed, whatever its task asks for.
    :param function_body: gives the body of a function by its hash.
    :param payload: gives the arguments of a task.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        address: str,
        poller: zmq.Poller,
        provider: Provider,
        command_options: Sequence[str],
        environment: Mapping[str, str],
        function_body: Callable[[str], bytes],
        payload: Callable[[Task], bytes],
        heartbeat_s: float = 10.0,
        silence_limit_s: float = 60.0,
        limits: Limits = NO_LIMITS,
    ) -> None:
        #: Readable when :meth:`receive` has something.
        self.socket = fleet_socket(context)
        self.socket.bind(address)
        self._address = address
        self._poller = poller
        self._provider = provider
        self._options = command_options
        self._environment = {key: value for key, value in environment.items() if key not in _SECRETS}
        self._function_body = function_body
        self._payload = payload
        self._heartbeat_s = heartbeat_s
        self._silence_limit_s = silence_limit_s
        self._limits = limits
        self._ping_at = 0.0
        self._managers: dict[str, _Manager] = {}
        self._failures = 0
        self._start_at: float | None = 0.0
        self._stopping = False
        self._software = protocol.software_fingerprint()
        poller.register(self.socket, zmq.POLLIN)

    def tend(self, *, now: float) -> list[Lost]:
        """Start what should run; collect what has ended, or has not been heard of for too long."""
        if self._start_at is not None and now >= self._start_at:
            self._start_at = None
            self._start(now)
        if now >= self._ping_at:
            self._ping_at = now + self._heartbeat_s
            for manager_id in self._managers:
                self._send(manager_id, protocol.Ping())
        lost = []
        for manager_id, manager in list(self._managers.items()):
            if manager.silence.is_over_limit(now=now):
                _logger.error("manager %s has been silent for %g s; ending it", manager_id, self._silence_limit_s)
                manager.block.kill()
                manager.silence.heard(now=now)
            reason = manager.block.ended()
            if reason is None:
                continue
            if manager.ended_at is None:
                manager.ended_at = now
                self._poller.unregister(manager.block.fileno())
            elif now >= manager.ended_at + _LAST_WORDS_S and not self._has_unread():
                lost.append(Lost(manager_id, f"its manager ended ({reason})"))
                manager.block.close()
                del self._managers[manager_id]
                if not self._stopping:
                    self._back_off(now)
        return lost

    def next_deadline(self) -> float | None:
        """The monotonic second at which :meth:`tend` may have something to do."""
        deadlines = [
            manager.silence.deadline if manager.ended_at is None else manager.ended_at + _LAST_WORDS_S
            for manager in self._managers.values()
        ]
        deadlines += [self._start_at, self._ping_at if self._managers else None]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    @property
    def is_empty(self) -> bool:
        """Whether no manager is left."""
        return not self._managers

    def receive(self, *, now: float) -> Iterator[tuple[str, protocol.FromManager, list[Bytes]]]:
        """What managers report: id, message, bodies. One of another version is sent away, and so is one that is not of
        this fleet any more, or was of an earlier agent's: whatever it had is being done elsewhere."""
        for _ in range(_MOST_PER_TURN):
            try:
                identity, *frames = receive_frames(self.socket)
            except zmq.Again:
                return
            manager_id = bytes(identity).decode()
            manager = self._managers.get(manager_id)
            message, bodies = protocol.decode_from_manager(frames)
            if manager is None:
                self._send(manager_id, protocol.Stop(0.0))
                continue
            manager.silence.heard(now=now)
            if isinstance(message, protocol.Registered):
                if message.software != self._software:
                    _logger.error("manager %s is of another version; restart the endpoint after an upgrade", manager_id)
                    manager.block.kill()
                    continue
                manager.registered = True
                self._failures = 0
            yield manager_id, message, bodies

    def order(self, manager_id: str, tasks: Sequence[Task]) -> None:
        """Let a manager run tasks."""
        manager = self._managers.get(manager_id)
        if manager is None:
            return
        forget = len(manager.functions) > _MAX_KNOWN_FUNCTIONS
        if forget:
            manager.functions.clear()
        limits = self._limits
        bodies: list[bytes] = []
        functions: list[tuple[str, int]] = []
        orders: list[protocol.TaskOrder] = []
        for task in tasks:
            spec = task.spec
            wanted = spec.resource_specification
            if spec.function_hash not in manager.functions:
                manager.functions.add(spec.function_hash)
                functions.append((spec.function_hash, len(bodies)))
                bodies.append(self._function_body(spec.function_hash))
            orders.append(
                protocol.TaskOrder(
                    spec.task_id,
                    task.attempt,
                    spec.function_hash,
                    len(bodies),
                    _least(spec.walltime_s, limits.walltime_s),
                    spec.result_serializers,
                    _least(wanted.get("memory_bytes"), limits.memory_bytes),
                    _least(wanted.get("max_output_bytes"), limits.output_bytes),
                )
            )
            bodies.append(self._payload(task))
        self._send(manager_id, protocol.RunTasks(tuple(orders), tuple(functions), forget), bodies)

    def cancel(self, manager_id: str, task_ids: Iterable[str]) -> None:
        """Let a manager stop tasks."""
        self._send(manager_id, protocol.CancelTasks(tuple(task_ids)))

    def stop(self, *, grace_s: float) -> None:
        """Let all managers end, and start none any more."""
        self._start_at = None
        self._stopping = True
        for manager_id, manager in self._managers.items():
            if manager.registered:
                self._send(manager_id, protocol.Stop(grace_s))
            else:
                manager.block.kill()

    def kill(self) -> None:
        """End all managers now; their guardians end the workers."""
        for manager in self._managers.values():
            manager.block.kill()

    def close(self) -> None:
        """Give back the socket."""
        self._poller.unregister(self.socket)
        self.socket.close(linger=0)

    def _has_unread(self) -> bool:
        return bool(self.socket.get(zmq.EVENTS) & zmq.POLLIN)  # type: ignore[operator, arg-type]

    def _start(self, now: float) -> None:
        manager_id = f"local-{new_id()[:8]}"
        command = [sys.executable, "-P", "-m", "farcall_endpoint.manager", *self._options]
        command += ["--agent", self._address, "--agent-pid", str(os.getpid()), "--manager-id", manager_id]
        try:
            block = self._provider.start(command, environment=self._environment)
        except OSError:
            _logger.exception("cannot start a manager")
            self._back_off(now)
            return
        self._managers[manager_id] = _Manager(block, Silence(limit_s=self._silence_limit_s, now=now))
        self._poller.register(block.fileno(), zmq.POLLIN)

    def _back_off(self, now: float) -> None:
        self._start_at = now + (min(0.1 * 2**self._failures, _MAX_BACKOFF_S) if self._failures else 0.0)
        self._failures += 1

    def _send(self, manager_id: str, message: protocol.FromAgent, bodies: Sequence[bytes] = ()) -> None:
        try:
            send_frames(self.socket, [manager_id.encode(), *protocol.encode(message, bodies)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            _logger.debug("manager %s is gone already", manager_id)


def _least(one: N | None, other: N | None) -> N | None:
    """The smaller of two limits, where None is none."""
    return one if other is None else other if one is None else min(one, other)
