"""Clients: they open result streams, and receive results as pushes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from farcall_common import wire
from farcall_common.errors import LimitExceeded
from farcall_common.store.model import SharedResults, TaskResult
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.connections import Connections
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.sessions import PeerSession
from farcall_forwarder.core.streams import Push, StreamHub


class Clients:
    """The clients of one forwarder process."""

    def __init__(
        self, policy: Policy, *, forwarder_id: str, connections: Connections, counters: Counter[str], now: Instant
    ) -> None:
        self._policy = policy
        self._connections = connections
        self._counters = counters
        self._hub = StreamHub(forwarder_id=forwarder_id, policy=policy)
        #: Clients that wait for their stream, by owner, until other forwarders share the results of that owner.
        self._opening: dict[str, list[tuple[PeerSession, wire.OpenStream]]] = {}
        self._watch_at = now.mono + policy.watch_s

    def __len__(self) -> int:
        return len(self._hub)

    @property
    def watchers(self) -> frozenset[str]:
        """Owners with clients that are connected here."""
        return self._hub.watchers

    def open_session(self, session: PeerSession, request: wire.OpenStream, now: Instant) -> list[Action]:
        """Open a stream. The first client of an owner waits until the owner's results are shared with it."""
        owner_id = session.peer.subject
        if self._hub.has_owner(owner_id):
            return self._open_stream(session, request, now)
        waiting = self._opening.setdefault(owner_id, [])
        waiting.append((session, request))
        return [do.WatchOwners([owner_id], self._policy.watch_ttl_s)] if len(waiting) == 1 else []

    def on_subscribed(self, event: ev.OwnersWatched, now: Instant) -> list[Action]:
        """Other forwarders share the results of these owners from now on."""
        self._hub.interrupt(event.fresh)
        waiting = [opening for owner_id in event.owner_ids for opening in self._opening.pop(owner_id, ())]
        actions: list[Action] = []
        for session, request in waiting:
            if self._connections.get(session.routing_id) is session and session.may_send(wire.StreamOpened):
                try:
                    actions += self._open_stream(session, request, now)
                except LimitExceeded as error:
                    actions += self._connections.refuse(session, error.record, now)
        return actions

    def _open_stream(self, session: PeerSession, request: wire.OpenStream, now: Instant) -> list[Action]:
        cursor, resumed, missed = self._hub.open(
            session.routing_id, session.peer.subject, groups=request.task_group_ids, cursor=request.cursor
        )
        opened = wire.StreamOpened(
            session_id=session.session_id,
            protocol_version=wire.PROTOCOL_VERSION,
            heartbeat_s=self._policy.heartbeat_s(request.heartbeat_s),
            cursor=cursor,
            resumed=resumed,
        )
        self._counters["streams_opened"] += 1
        log = do.Log("stream opened", {**session.names, "missed_messages": len(missed)})
        return [log, session.send(opened, now), *self._push(missed, now)]

    def _push(self, pushes: Iterable[Push], now: Instant) -> list[Action]:
        """Send pushes, except to peers that were redirected."""
        return [
            session.send(push.message, now, frames=push.frames)
            for push in pushes
            if (session := self._connections.get(push.routing_id)) and session.may_send(wire.ResultsReady)
        ]

    def publish(self, results: Iterable[TaskResult], source: ev.Flushed | SharedResults, now: Instant) -> list[Action]:
        """Push results to clients, whether this forwarder recorded them or another one."""
        return self._push(self._hub.publish(results, source.urls, recorded_at=source.recorded_at), now)

    def subscribe(self, session: PeerSession, groups: Iterable[str], now: Instant) -> list[Action]:
        """A client subscribes to the results of more groups."""
        try:
            return self._push(self._hub.subscribe(session.routing_id, groups), now)
        except LimitExceeded as error:
            return self._connections.refuse(session, error.record, now)

    def detach(self, session: PeerSession, now: Instant) -> None:
        """End the stream of a session, if it has one."""
        self._hub.close(session.routing_id, now)

    def on_pubsub_lost(self) -> None:
        """Results that other forwarders recorded may have been missed."""
        self._hub.interrupt(self._hub.watchers)

    def tick(self, now: Instant) -> list[Action]:
        """Forget owners that did not return, and renew the subscriptions of the others."""
        self._hub.expire(now)
        if now.mono < self._watch_at:
            return []
        self._watch_at = now.mono + self._policy.watch_s
        owner_ids = sorted(self._hub.watchers)
        return [do.WatchOwners(owner_ids, self._policy.watch_ttl_s)] if owner_ids else []
