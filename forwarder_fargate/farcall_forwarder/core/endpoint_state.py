"""Endpoint state: fence, phase, connection and leases of one endpoint in one generation, shared by its handlers."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from farcall_common import wire
from farcall_common.store.model import TaskResult
from farcall_forwarder.core import actions as do
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.functions import FunctionCache
from farcall_forwarder.core.leases import LeaseTable, Stage
from farcall_forwarder.core.outbox import Outbox
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.relay import Relay
from farcall_forwarder.core.sessions import PeerSession
from farcall_forwarder.core.transitions import TransitionBuffer


class EndpointPhase(enum.Enum):
    CLAIMING = enum.auto()
    READING = enum.auto()
    RESTORING = enum.auto()
    COMPARING = enum.auto()
    SERVING = enum.auto()


@dataclasses.dataclass
class ForwarderContext:
    """Objects that all endpoint sessions of a forwarder share. ``is_draining``: no more tasks are leased. ``delayed``:
    endpoints with data to record a little later."""

    forwarder_id: str
    policy: Policy
    functions: FunctionCache
    outbox: Outbox
    transitions: TransitionBuffer
    relay: Relay
    is_draining: bool = False
    delayed: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True, eq=False)
class EndpointState:
    """State of one endpoint. Without a connection there may still be leases."""

    endpoint_id: str
    generation: int
    spool_id: str
    context: ForwarderContext
    session: PeerSession | None
    #: Generation of the spool; None if the agent does not count generations.
    spool_generation: int | None = None
    fence: int = 0
    phase: EndpointPhase = EndpointPhase.CLAIMING
    #: Monotonic second of the first tasks sent since the agent's last message.
    unheard_since: float | None = None
    is_silent: bool = False
    table: LeaseTable = dataclasses.field(default_factory=LeaseTable)

    def is_newer_than(self, hello: wire.Hello) -> bool:
        """Whether the spool of this Hello is an old copy of this one.

        An agent of an earlier release does not count generations and cannot read a spool with one: it has a backup.
        """
        return hello.spool_id == self.spool_id and (hello.spool_generation or 0) < (self.spool_generation or 0)

    def willing_session(self) -> PeerSession | None:
        """The session, if tasks may be sent in it."""
        is_willing = self.session and self.session.may_send(wire.RunTasks) and not self.context.is_draining
        return self.session if is_willing and not self.is_silent else None

    def update_silence(self, now: Instant) -> None:
        """Update ``is_silent``: whether the agent has left sent tasks unanswered for too long."""
        since = self.unheard_since
        self.is_silent = since is not None and now.mono - since >= self.context.policy.silence_s

    def end_silence(self) -> bool:
        """The agent has sent a message. Returns whether it was silent before."""
        was_silent, self.is_silent, self.unheard_since = self.is_silent, False, None
        return was_silent

    def has_function(self, session: PeerSession, function_hash: str) -> bool:
        """Whether the agent or this process has the function's body."""
        return function_hash in session.functions or self.context.functions.get(function_hash) is not None

    def send(self, message: wire.Message, now: Instant) -> list[Action]:
        """Send a message to the agent, if its session permits that now."""
        if self.session is None or not self.session.may_send(type(message)):
            return []
        return [self.session.send(message, now)]

    def requeue(self, task_ids: Sequence[str]) -> list[Action]:
        """Return the leases of tasks that never reached the agent."""
        return [do.RequeueTasks(self.endpoint_id, self.fence, task_ids)] if task_ids else []

    def finish(self, result: TaskResult) -> None:
        """Record the result of a leased task."""
        if lease := self.table.get(result.task_id):
            lease.stage = Stage.RETURNED
        self.context.transitions.drop(result.task_id)
        self.context.outbox.add(result, verified=True)
