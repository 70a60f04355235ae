"""Connections: sessions of peers by routing id; admits, closes, refuses and redirects them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from farcall_common import wire
from farcall_common.errors import ErrorRecord, FarcallError, TicketInvalid
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.deadlines import DeadlineQueue
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.sessions import PeerSession

#: Refused routing ids. They get no second answer until they send a valid opening.
_MAX_REFUSED: Final = 10_000

_TICKET_ENDED: Final = "the ticket has expired"


class IdSource(Protocol):
    """Source of session ids and of random fractions."""

    def new_id(self) -> str: ...

    def fraction(self) -> float:
        """At least 0, less than 1."""


class Connections:
    """The sessions of all peers that have opened one.

    :param detach: ends the use of a session by streams, transfers and its endpoint.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        id_source: IdSource,
        counters: Counter[str],
        detach: Callable[[PeerSession, Instant], list[Action]],
        now: Instant,
    ) -> None:
        self._policy = policy
        self._id_source = id_source
        self._counters = counters
        self._detach = detach
        self._sessions: dict[bytes, PeerSession] = {}
        self._refused: dict[bytes, None] = {}
        self._deadlines = DeadlineQueue[bytes]()
        #: Monotonic second since which no peer has been connected; None while one is.
        self._idle_since: float | None = now.mono

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[PeerSession]:
        return iter(list(self._sessions.values()))

    def get(self, routing_id: bytes) -> PeerSession | None:
        """The session of a connection whose peer has opened one."""
        return self._sessions.get(routing_id)

    def admit(self, session: PeerSession, now: Instant) -> None:
        """The peer has sent a valid opening."""
        self._sessions[session.routing_id] = session
        self._deadlines.enter(session.routing_id, at=now.mono)
        self._refused.pop(session.routing_id, None)

    def session_of(self, event: ev.Received | ev.MalformedReceived, now: Instant) -> PeerSession:
        """The session of a connection, or a new one without a opening."""
        session = self._sessions.get(event.routing_id)
        if session is not None:
            return session
        return PeerSession.begin(
            event.routing_id,
            event.peer,
            session_id=self._id_source.new_id(),
            heartbeat_s=self._policy.max_heartbeat_s,
            now=now,
        )

    def forget_former(self, event: ev.Received | ev.MalformedReceived, now: Instant) -> list[Action]:
        """Close the session of an earlier peer with this routing id: a ROUTER does not report when an id is free."""
        former = self._sessions.get(event.routing_id)
        if former is None or former.peer == event.peer:
            return []
        self._refused.pop(event.routing_id, None)
        return self.close(former, now)

    def illegal(self, session: PeerSession, error: FarcallError, now: Instant) -> list[Action]:
        """A peer broke the protocol. Only its first violation is answered."""
        self._counters["protocol_errors"] += 1
        if session.routing_id in self._refused:
            return []
        return self.refuse(session, error.record, now)

    def refuse(self, session: PeerSession, error: ErrorRecord, now: Instant) -> list[Action]:
        """Stop serving a peer, and send it the reason."""
        self._counters[f"refused.{error.code}"] += 1
        self._refused[session.routing_id] = None
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        log = do.Log("refused", {**session.names, "code": error.code, "reason": error.message})
        return [log, *self.close(session, now), *session.refuse(error, now)]

    def close(self, session: PeerSession, now: Instant) -> list[Action]:
        """Remove a connection that has ended."""
        actions: list[Action] = [do.DropBacklog(session.routing_id), *self._detach(session, now)]
        if self._sessions.get(session.routing_id) is session:
            del self._sessions[session.routing_id]
            actions.append(do.Log("disconnected", session.names))
        return actions

    def send_away(self, session: PeerSession, reason: str, now: Instant) -> list[Action]:
        """Stop serving a peer, and redirect it."""
        redirect = self.redirect(session, reason, now)
        return [*self._detach(session, now), *redirect]

    def redirect(self, session: PeerSession, reason: str, now: Instant) -> list[Action]:
        """Ask a peer to finish its messages under way and to connect again, to any forwarder."""
        if not session.may_send(wire.Redirect):
            return []
        retry_after_s = self._id_source.fraction() * self._policy.redirect_spread_s
        return [session.send(wire.Redirect(reason=reason, retry_after_s=retry_after_s), now)]

    def idle_s(self, now: Instant) -> float | None:
        """Seconds since which no peer has been connected; None while one is."""
        return None if self._idle_since is None else now.mono - self._idle_since

    def forgive_silence(self, now: Instant) -> None:
        """Restart the silence period of all peers."""
        for session in self._sessions.values():
            session.wire.forgive_silence(now=now.mono)

    def tick(self, now: Instant) -> list[Action]:
        """Close the sessions of peers that are silent for too long, and send heartbeats to the others."""
        actions: list[Action] = []
        for routing_id in self._deadlines.due(now.mono):
            session = self._sessions.get(routing_id)
            if session is None:
                continue
            if session.wire.is_dead(now=now.mono):
                self._counters["peers_silent"] += 1
                actions += self.close(session, now)
                continue
            if session.wire.heartbeat_due(now=now.mono):
                actions.append(session.send(wire.Heartbeat(at=now.epoch), now))
            actions += self._end_expired(session, now)
            if self._sessions.get(routing_id) is not session:
                continue
            # Once in a period at least: a session that opens meanwhile has heartbeats to send.
            at = min(session.wire.next_deadline(), now.mono + session.wire.heartbeat_s)
            self._deadlines.enter(routing_id, at=min(at, now.mono + self._until_end_s(session, now)))
        if self._sessions:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now.mono
        return actions

    def _until_end_s(self, session: PeerSession, now: Instant) -> float:
        """Seconds until the ticket of a session ends, and after that, until the session is ended."""
        left_s = session.expires_at - now.epoch
        return left_s if left_s > 0 else max(0.0, left_s + self._policy.ticket_grace_s)

    def _end_expired(self, session: PeerSession, now: Instant) -> list[Action]:
        """Redirect a peer whose ticket has ended: it gets a new one from the API, or none. An agent finishes its
        messages under way; one that stays is refused."""
        if now.epoch < session.expires_at:
            return []
        if now.epoch >= session.expires_at + self._policy.ticket_grace_s:
            return self.refuse(
                session, TicketInvalid(_TICKET_ENDED, hint="Request a new one from the API.").record, now
            )
        if not session.may_send(wire.Redirect):
            return []
        self._counters["tickets_ended"] += 1
        move = self.redirect if session.is_agent else self.send_away
        return move(session, _TICKET_ENDED, now)
