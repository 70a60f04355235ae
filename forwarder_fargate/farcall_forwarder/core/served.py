"""One endpoint in one life, as all that is done for it knows it: who owns its queue, who listens, what is leased."""

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
from farcall_forwarder.core.moves import MoveBuffer
from farcall_forwarder.core.outbox import Outbox
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.relay import Relay
from farcall_forwarder.core.sessions import PeerSession

__all__ = ["Phase", "Served", "Shared"]


class Phase(enum.Enum):
    CLAIMING = enum.auto()
    READING = enum.auto()
    RESTORING = enum.auto()
    COMPARING = enum.auto()
    SERVING = enum.auto()


@dataclasses.dataclass
class Shared:
    """What all logical forwarders of a process have in common. ``is_draining``: no more tasks are taken. ``delayed``
    are endpoints of which something is to be recorded a little later."""

    forwarder_id: str
    policy: Policy
    functions: FunctionCache
    outbox: Outbox
    moves: MoveBuffer
    relay: Relay
    is_draining: bool = False
    delayed: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True, eq=False)
class Served:
    """An endpoint. Without a session nobody listens, but leases may be left."""

    endpoint_id: str
    life: int
    spool_id: str
    shared: Shared
    session: PeerSession | None
    #: How new the spool is; None if its agent does not count.
    generation: int | None = None
    fence: int = 0
    phase: Phase = Phase.CLAIMING
    #: Monotonic second at which tasks were sent since the agent was heard last.
    unheard_since: float | None = None
    is_silent: bool = False
    table: LeaseTable = dataclasses.field(default_factory=LeaseTable)

    def is_newer_than(self, hello: wire.Hello) -> bool:
        """Whether this agent's spool is the one that this Hello has an old copy of.

        An agent of an earlier release, which does not count, cannot read a spool that was counted: it has a backup.
        """
        return hello.spool_id == self.spool_id and (hello.spool_generation or 0) < (self.generation or 0)

    def willing_session(self) -> PeerSession | None:
        """The session, if tasks may be sent in it."""
        is_willing = self.session and self.session.may_send(wire.RunTasks) and not self.shared.is_draining
        return self.session if is_willing and not self.is_silent else None

    def notice_silence(self, now: Instant) -> None:
        """Look whether the agent has answered what it was sent."""
        since = self.unheard_since
        self.is_silent = since is not None and now.mono - since >= self.shared.policy.silence_s

    def heard(self) -> bool:
        """The agent said something. Whether it was silent before."""
        was_silent, self.is_silent, self.unheard_since = self.is_silent, False, None
        return was_silent

    def has_function(self, session: PeerSession, function_hash: str) -> bool:
        """Whether the agent or this process has the function's body."""
        return function_hash in session.functions or self.shared.functions.get(function_hash) is not None

    def say(self, message: wire.Message, now: Instant) -> list[Action]:
        """Tell the agent, if it may be told."""
        if self.session is None or not self.session.may_send(type(message)):
            return []
        return [self.session.send(message, now)]

    def requeue(self, task_ids: Sequence[str]) -> list[Action]:
        """Give leases of tasks back that never reached the agent."""
        return [do.RequeueTasks(self.endpoint_id, self.fence, task_ids)] if task_ids else []

    def end(self, result: TaskResult) -> None:
        """Declare the end of a leased task."""
        if lease := self.table.get(result.task_id):
            lease.stage = Stage.RETURNED
        self.shared.moves.drop(result.task_id)
        self.shared.outbox.add(result, verified=True)
