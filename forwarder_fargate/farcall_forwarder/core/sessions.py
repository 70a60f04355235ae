"""Peer sessions: one per connection, with its wire session and its messages."""

from __future__ import annotations

import dataclasses
import math

from farcall_common.errors import ErrorRecord
from farcall_common.store.model import PeerKey, PeerKind
from farcall_common.wire import Envelope, Message, Refused, Role, Session
from farcall_forwarder.core.actions import Action, Send
from farcall_forwarder.core.policy import Instant


@dataclasses.dataclass(slots=True, eq=False)
class PeerSession:
    """One connection, of an agent or a client."""

    routing_id: bytes
    peer: PeerKey
    session_id: str
    wire: Session
    #: The end of the peer's ticket, in epoch seconds.
    expires_at: float = math.inf
    #: The functions that were sent in this session: ids, or "" for any with that body, and hashes of bodies.
    functions: set[tuple[str, str]] = dataclasses.field(default_factory=set)

    @classmethod
    def begin(
        cls, routing_id: bytes, peer: PeerKey, *, session_id: str, heartbeat_s: float, now: Instant
    ) -> PeerSession:
        """A session before its first message."""
        facing = Role.AGENT if peer.kind is PeerKind.AGENT else Role.CLIENT
        wire = Session(Role.FORWARDER, facing=facing, heartbeat_s=heartbeat_s, now=now.mono)
        return cls(routing_id, peer, session_id, wire)

    @property
    def is_agent(self) -> bool:
        return self.peer.kind is PeerKind.AGENT

    @property
    def names(self) -> dict[str, str | int]:
        """Fields that identify the peer in a log line."""
        subject = "endpoint_id" if self.is_agent else "owner_id"
        return {subject: self.peer.subject, "session_id": self.session_id}

    def may_send(self, kind: type[Message]) -> bool:
        return self.wire.may_send(kind)

    def send(self, message: Message, now: Instant, *, frames: tuple[bytes, ...] = ()) -> Send:
        """Send a message. The caller has checked that the session permits it now."""
        self.wire.sent(message, now=now.mono)
        return Send(self.routing_id, Envelope(message, frames))

    def refuse(self, error: ErrorRecord, now: Instant) -> list[Action]:
        """End the session with a reason."""
        return [self.send(Refused(error=error.to_json()), now)] if self.may_send(Refused) else []
