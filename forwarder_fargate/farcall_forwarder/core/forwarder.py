"""The forwarder as a whole: connections, endpoints, streams and the way to the database; events in, actions out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from farcall_common import wire
from farcall_common.errors import EndpointInUse, ErrorRecord, FarcallError, LimitExceeded, ProtocolError
from farcall_common.store.model import ForwarderInfo, SharedEnds, TaskResult
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.drain import Drain
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.functions import FunctionCache
from farcall_forwarder.core.greetings import TicketReader, check_greeting, taken_over
from farcall_forwarder.core.logical import LogicalForwarder, Phase, Shared
from farcall_forwarder.core.meter import Meter
from farcall_forwarder.core.moves import MoveBuffer
from farcall_forwarder.core.outbox import Outbox
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.sessions import PeerSession
from farcall_forwarder.core.sharing import ShareBuffer
from farcall_forwarder.core.streams import Push, StreamHub

__all__ = ["Chance", "Forwarder", "Status"]

#: Routing ids that were refused and are not answered again until they greet properly.
_MAX_REFUSED: Final = 10_000
_DRAIN_TICK_S: Final = 0.1
_ENDING: Final = "this forwarder is about to end"


class Chance(Protocol):
    """Where ids and random spreads come from."""

    def new_id(self) -> str: ...

    def fraction(self) -> float:
        """At least 0, less than 1."""


@dataclasses.dataclass(frozen=True)
class Status:
    """What a health check tells."""

    connections: int
    endpoints: int
    streams: int
    unrecorded_results: int
    draining: bool
    counters: Mapping[str, int]


class Forwarder:
    """All decisions of one forwarder process.

    :param address: where peers connect, ``tcp://host:port``; ``server_key`` is its CURVE public key in Z85.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        forwarder_id: str,
        address: str,
        server_key: str,
        tickets: TicketReader,
        chance: Chance,
        now: Instant,
    ) -> None:
        self._policy = policy
        self._forwarder_id = forwarder_id
        self._address = address
        self._server_key = server_key
        self._tickets = tickets
        self._chance = chance
        self._outbox = Outbox()
        self._moves = MoveBuffer()
        functions = FunctionCache(limit_bytes=policy.function_cache_bytes)
        self._shared = Shared(forwarder_id, policy, functions, self._outbox, self._moves)
        self._hub = StreamHub(forwarder_id=forwarder_id, policy=policy)
        self._share = ShareBuffer(limit=policy.share_rows)
        #: Clients that greeted, by owner, until other forwarders know that ends of that owner are wanted here.
        self._opening: dict[str, list[tuple[PeerSession, wire.OpenStream]]] = {}
        self._watch_at = now.mono + policy.watch_s
        self._sessions: dict[bytes, PeerSession] = {}
        self._endpoints: dict[str, LogicalForwarder] = {}
        self._refused: dict[bytes, None] = {}
        self._lives = 0
        self._is_recording_moves = False
        self._is_sweeping = False
        self._tick_at = self._announce_at = now.mono
        self._meter = Meter()
        self._meter_at = now.mono + policy.meter_s
        self._drain: Drain | None = None
        self.counters: Counter[str] = Counter()
        #: Set when a drain has come to its end: nothing is left to do but to finish the steps under way.
        self.is_drained = False

    # -- the shell's side ----------------------------------------------------------------------------------------------

    def handle(self, events: Iterable[Event], now: Instant) -> list[Action]:
        """What to do about events that came in together, in order."""
        actions = [action for event in events for action in self._decide(event, now)]
        return actions + self._flush(now)

    def next_deadline(self) -> float:
        """The monotonic second at which a Tick is due."""
        if self._moves.since is None or self._is_recording_moves:
            return self._tick_at
        return min(self._tick_at, self._moves_due_at(self._moves.since))

    def info(self) -> ForwarderInfo:
        """How this forwarder is announced."""
        return ForwarderInfo(
            self._forwarder_id,
            self._address,
            self._server_key,
            connections=len(self._sessions),
            draining=self._shared.is_draining,
        )

    def status(self) -> Status:
        """Numbers for a health check."""
        return Status(
            connections=len(self._sessions),
            endpoints=sum(1 for endpoint in self._endpoints.values() if endpoint.session),
            streams=len(self._hub),
            unrecorded_results=len(self._outbox),
            draining=self._shared.is_draining,
            counters=dict(self.counters),
        )

    def _decide(self, event: Event, now: Instant) -> list[Action]:
        match event:
            case ev.Received():
                return self._received(event, now)
            case ev.Garbled():
                return self._garbled(event, now)
            case ev.PeerGone(routing_id=routing_id):
                session = self._sessions.get(routing_id)
                return self._close(session, now) if session else []
            case ev.PeerBehind(routing_id=routing_id):
                self.counters["peers_behind"] += 1
                session = self._sessions.get(routing_id)
                return self._send_away(session, "this peer reads too slowly", now) if session else []
            case ev.Woken(endpoint_ids=endpoint_ids):
                return self._woken(endpoint_ids)
            case ev.Swept(endpoint_ids=endpoint_ids):
                self._is_sweeping = False
                return self._woken(endpoint_ids)
            case ev.EndsHeard(shared=shared):
                return [action for heard in shared for action in self._publish(heard.ends, heard, now)]
            case ev.CutOff():
                self._hub.interrupt(self._hub.watchers)
                return []
            case ev.OwnersWatched():
                return self._owners_watched(event, now)
            case ev.EndsShared():
                self._share.shared()
                return []
            case ev.Announced(others=others):
                self._share.meet(others=others)
                return []
            case ev.Tick():
                return self._tick(now)
            case ev.Flushed():
                return self._flushed(event, now)
            case ev.MovesRecorded():
                self._is_recording_moves = False
                return []
            case ev.DrainOrdered():
                return self._begin_drain(now)
            case _:
                return self._endpoint_event(event, now)

    def _woken(self, endpoint_ids: Iterable[str]) -> list[Action]:
        woken = (self._endpoints.get(endpoint_id) for endpoint_id in endpoint_ids)
        return [action for endpoint in woken if endpoint for action in endpoint.on_woken()]

    # -- peers ---------------------------------------------------------------------------------------------------------

    def _session_of(self, event: ev.Received | ev.Garbled, now: Instant) -> PeerSession:
        """The session of a connection, or a fresh one that nobody has greeted in."""
        session = self._sessions.get(event.routing_id)
        if session is not None:
            return session
        return PeerSession.begin(
            event.routing_id,
            event.peer,
            session_id=self._chance.new_id(),
            heartbeat_s=self._policy.max_heartbeat_s,
            now=now,
        )

    def _forget_former(self, event: ev.Received | ev.Garbled, now: Instant) -> list[Action]:
        """Close the session of another peer that had the same routing id; a ROUTER does not say when one is free."""
        former = self._sessions.get(event.routing_id)
        if former is None or former.peer == event.peer:
            return []
        self._refused.pop(event.routing_id, None)
        return self._close(former, now)

    def _garbled(self, event: ev.Garbled, now: Instant) -> list[Action]:
        actions = self._forget_former(event, now)
        return actions + self._illegal(self._session_of(event, now), event.error, now)

    def _received(self, event: ev.Received, now: Instant) -> list[Action]:
        actions = self._forget_former(event, now)
        session = self._session_of(event, now)
        message = event.envelope.message
        try:
            session.wire.received(message, now=now.mono)
        except ProtocolError as error:
            return actions + self._illegal(session, error, now)
        return actions + self._heard(session, message, event.envelope.frames, now)

    def _heard(
        self, session: PeerSession, message: wire.Message, frames: Sequence[bytes], now: Instant
    ) -> list[Action]:
        """A peer said something that it may say."""
        match message:
            case wire.Hello() | wire.OpenStream():
                return self._greeted(session, message, now)
            case wire.Goodbye():
                return self._close(session, now)
            case wire.Subscribe(task_group_ids=groups):
                try:
                    return self._push(self._hub.subscribe(session.routing_id, groups), now)
                except LimitExceeded as error:
                    return self._refuse(session, error.record, now)
            case _:
                endpoint = self._endpoints.get(session.peer.subject)
                if endpoint is None or endpoint.session is not session:
                    return []  # A client's heartbeat, or an agent that was sent away.
                return endpoint.on_message(message, frames, now)

    def _illegal(self, session: PeerSession, error: FarcallError, now: Instant) -> list[Action]:
        """A peer broke the protocol. It is told once, however often it goes on."""
        self.counters["protocol_errors"] += 1
        if session.routing_id in self._refused:
            return []
        return self._refuse(session, error.record, now)

    def _refuse(self, session: PeerSession, error: ErrorRecord, now: Instant) -> list[Action]:
        self.counters[f"refused.{error.code}"] += 1
        self._refused[session.routing_id] = None
        if len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        note = do.Note("refused", {**_names(session), "code": error.code, "reason": error.message})
        return [note, *self._close(session, now), *session.refuse(error, now)]

    def _close(self, session: PeerSession, now: Instant) -> list[Action]:
        """A connection is over."""
        actions: list[Action] = [do.DropBacklog(session.routing_id), *self._detach(session, now)]
        if self._sessions.get(session.routing_id) is session:
            del self._sessions[session.routing_id]
            actions.append(do.Note("disconnected", _names(session)))
        return actions

    def _detach(self, session: PeerSession, now: Instant) -> list[Action]:
        """Nobody is served through this session any more."""
        self._hub.close(session.routing_id, now)
        endpoint = self._endpoints.get(session.peer.subject)
        return endpoint.lose_session(now) if endpoint and endpoint.session is session else []

    def _send_away(self, session: PeerSession, reason: str, now: Instant) -> list[Action]:
        """Serve a peer no longer; it shall connect again, somewhere."""
        move = self._move(session, reason, now)
        return [*self._detach(session, now), *move]

    def _move(self, session: PeerSession, reason: str, now: Instant) -> list[Action]:
        if not session.may_send(wire.Move):
            return []
        retry_after_s = self._chance.fraction() * self._policy.move_spread_s
        return [session.send(wire.Move(reason=reason, retry_after_s=retry_after_s), now)]

    # -- greetings -----------------------------------------------------------------------------------------------------

    def _greeted(self, session: PeerSession, greeting: wire.Hello | wire.OpenStream, now: Instant) -> list[Action]:
        """A peer introduces itself: let it in, or tell it why not."""
        try:
            check_greeting(greeting, session.peer, tickets=self._tickets, now=now)
            self._sessions[session.routing_id] = session
            self._refused.pop(session.routing_id, None)
            if self._shared.is_draining:
                return self._move(session, _ENDING, now)
            if isinstance(greeting, wire.Hello):
                return self._greet_agent(session, greeting, now)
            return self._greet_client(session, greeting, now)
        except FarcallError as error:
            return self._refuse(session, error.record, now)

    def _greet_agent(self, session: PeerSession, hello: wire.Hello, now: Instant) -> list[Action]:
        endpoint_id = session.peer.subject
        actions = self._replace_agent(self._endpoints.get(endpoint_id), hello, now)
        self._lives += 1
        session.wire.heartbeat_s = self._heartbeat_s(hello.heartbeat_s)
        endpoint = LogicalForwarder(endpoint_id, self._lives, session, hello, self._shared, now=now)
        self._endpoints[endpoint_id] = endpoint
        self.counters["agents_greeted"] += 1
        note = do.Note("agent connected", {**_names(session), "held_tasks": len(hello.held)})
        return [*actions, note, *endpoint.claim()]

    def _replace_agent(self, former: LogicalForwarder | None, hello: wire.Hello, now: Instant) -> list[Action]:
        """Make way for an agent, or raise EndpointInUse for a second one."""
        if former is None or former.session is None:
            return []
        old = former.session
        former_is_alive = not old.wire.is_dead(now=now.mono)
        if former_is_alive and hello.spool_id != former.spool_id:
            raise EndpointInUse(f"another agent is connected as endpoint {former.endpoint_id}")
        former.session = None
        actions = self._close(old, now)
        if former_is_alive and hello.instance_id != former.instance_id:
            actions += old.refuse(taken_over(former.endpoint_id).record, now)
        return actions

    def _greet_client(self, session: PeerSession, request: wire.OpenStream, now: Instant) -> list[Action]:
        """Open a stream; for the first client of an owner, when the other forwarders know that its ends are wanted."""
        owner_id = session.peer.subject
        if self._hub.is_watched_by(owner_id):
            return self._open_stream(session, request, now)
        waiting = self._opening.setdefault(owner_id, [])
        waiting.append((session, request))
        return [do.WatchOwners([owner_id], self._policy.watch_ttl_s)] if len(waiting) == 1 else []

    def _owners_watched(self, event: ev.OwnersWatched, now: Instant) -> list[Action]:
        self._hub.interrupt(event.fresh)
        waiting = [opening for owner_id in event.owner_ids for opening in self._opening.pop(owner_id, ())]
        actions: list[Action] = []
        for session, request in waiting:
            if self._sessions.get(session.routing_id) is session and session.may_send(wire.StreamOpened):
                try:
                    actions += self._open_stream(session, request, now)
                except LimitExceeded as error:
                    actions += self._refuse(session, error.record, now)
        return actions

    def _open_stream(self, session: PeerSession, request: wire.OpenStream, now: Instant) -> list[Action]:
        cursor, resumed, missed = self._hub.open(
            session.routing_id, session.peer.subject, groups=request.task_group_ids, cursor=request.cursor
        )
        opened = wire.StreamOpened(
            session_id=session.session_id,
            protocol_version=wire.PROTOCOL_VERSION,
            heartbeat_s=self._heartbeat_s(request.heartbeat_s),
            cursor=cursor,
            resumed=resumed,
        )
        self.counters["streams_opened"] += 1
        note = do.Note("stream opened", {**_names(session), "missed_messages": len(missed)})
        return [note, session.send(opened, now), *self._push(missed, now)]

    def _heartbeat_s(self, asked_s: float) -> float:
        return min(max(asked_s, self._policy.min_heartbeat_s), self._policy.max_heartbeat_s)

    def _push(self, pushes: Iterable[Push], now: Instant) -> list[Action]:
        """Send what streams are to have, but nothing to peers that are on their way out."""
        return [
            session.send(push.message, now, frames=push.frames)
            for push in pushes
            if (session := self._sessions.get(push.routing_id)) and session.may_send(wire.ResultsReady)
        ]

    # -- endpoints -----------------------------------------------------------------------------------------------------

    def _endpoint_event(self, event: Event, now: Instant) -> list[Action]:
        """The answer to a step of one endpoint. Answers to an earlier fence or life come too late."""
        match event:
            case ev.StepFenced(step=step) | ev.StepLost(step=step):
                endpoint = self._owned(step.endpoint_id, step.fence)
                if endpoint is None:
                    return []
                return self._fenced(endpoint, now) if isinstance(event, ev.StepFenced) else endpoint.on_lost()
            case ev.EndpointClaimed(endpoint_id=endpoint_id):
                endpoint = self._endpoints.get(endpoint_id)
                return endpoint.on_claimed(event) if endpoint else []
            case ev.ClaimRefused(endpoint_id=endpoint_id, life=life, error=error):
                endpoint = self._endpoints.get(endpoint_id)
                return self._turn_away(endpoint, error, now) if endpoint and endpoint.life == life else []
            case ev.Refreshed(owned=owned, stirring=stirring):
                kept = [(self._owned(endpoint_id, fence), endpoint_id) for endpoint_id, (fence, _) in owned.items()]
                return [
                    action
                    for endpoint, endpoint_id in kept
                    if endpoint
                    for action in endpoint.on_refreshed(now, needs_upkeep=endpoint_id in stirring)
                ]
            case ev.TasksPrepared(order=order):
                endpoint = self._endpoints.get(order.endpoint_id)
                return endpoint.on_prepared(event, now) if endpoint and endpoint.life == order.life else []
            case ev.UploadGranted(endpoint_id=endpoint_id, life=life):
                endpoint = self._endpoints.get(endpoint_id)
                return endpoint.on_granted(event, now) if endpoint and endpoint.life == life else []
            case (
                ev.LeasesRead()
                | ev.TasksRead()
                | ev.QueueRestored()
                | ev.TasksLeased()
                | ev.CancelsRead()
                | ev.UpkeepDone()
            ):
                endpoint = self._owned(event.endpoint_id, event.fence)
                return self._owned_event(endpoint, event, now) if endpoint else []
            case _:
                raise TypeError(f"no rule for {event}")

    def _owned_event(self, endpoint: LogicalForwarder, event: Event, now: Instant) -> list[Action]:
        match event:
            case ev.LeasesRead():
                return endpoint.on_leases_read(event, now)
            case ev.TasksRead():
                return endpoint.on_tasks_read(event, now)
            case ev.QueueRestored():
                self.counters["queues_restored"] += 1
                return [do.Note("queue restored", {"endpoint_id": event.endpoint_id}), *endpoint.on_restored()]
            case ev.TasksLeased():
                self.counters["tasks_leased"] += len(event.tasks)
                self._meter.leased(event.tasks)
                return endpoint.on_leased(event, now)
            case ev.CancelsRead():
                return endpoint.on_cancels(event, now)
            case ev.UpkeepDone():
                self._meter.expired(event.reaped)
                actions = endpoint.on_upkeep_done(event, now)
                if endpoint.is_over:
                    self._forget(endpoint)
                return actions
            case _:
                raise TypeError(f"no rule for {event}")

    def _owned(self, endpoint_id: str, fence: int) -> LogicalForwarder | None:
        endpoint = self._endpoints.get(endpoint_id)
        return endpoint if endpoint and endpoint.fence == fence else None

    def _fenced(self, endpoint: LogicalForwarder, now: Instant) -> list[Action]:
        """Another forwarder owns this endpoint: let go of it and of its agent."""
        self.counters["endpoints_fenced"] += 1
        self._forget(endpoint)
        note = do.Note("fenced", {"endpoint_id": endpoint.endpoint_id, "fence": endpoint.fence})
        if endpoint.session is None:
            return [note]
        return [note, *self._move(endpoint.session, "another forwarder serves this endpoint", now)]

    def _turn_away(self, endpoint: LogicalForwarder, error: EndpointInUse, now: Instant) -> list[Action]:
        """Another agent is connected as this endpoint, at another forwarder, and alive."""
        session = endpoint.session
        self._forget(endpoint)
        return self._refuse(session, error.record, now) if session else []

    def _forget(self, endpoint: LogicalForwarder) -> None:
        del self._endpoints[endpoint.endpoint_id]
        self._outbox.close(endpoint.endpoint_id)

    # -- the way to the database ---------------------------------------------------------------------------------------

    def _flush(self, now: Instant) -> list[Action]:
        """Start a flush if none is under way: at once when idle, else with all that came meanwhile."""
        policy = self._policy
        flush: do.FlushResults | None = None
        if len(self._outbox):
            flush = self._outbox.next_flush(
                rows=policy.flush_rows, watchers=self._hub.watchers, url_ttl_s=policy.download_url_ttl_s
            )
        share = self._share.next_share(url_ttl_s=policy.download_url_ttl_s)
        actions: list[Action] = [step for step in (flush, share) if step]
        since = self._moves.since
        if since is not None and not self._is_recording_moves and now.mono >= self._moves_due_at(since):
            self._is_recording_moves = True
            actions.append(do.RecordMoves(self._moves.take(policy.moves_rows)))
        return actions

    def _moves_due_at(self, since: float) -> float:
        is_busy = self._outbox.is_flushing or len(self._outbox) > 0
        return since + (self._policy.moves_busy_s if is_busy else self._policy.moves_idle_s)

    def _publish(self, ends: Iterable[TaskResult], known: ev.Flushed | SharedEnds, now: Instant) -> list[Action]:
        """Tell clients of ends, recorded here or elsewhere."""
        return self._push(self._hub.publish(ends, known.urls, recorded_at=known.recorded_at), now)

    def _flushed(self, event: ev.Flushed, now: Instant) -> list[Action]:
        self._outbox.flushed()
        self._share.add(event.first.values(), recorded_at=event.recorded_at)
        self.counters["results_recorded"] += len(event.first)
        self._meter.recorded(event.first.values(), recorded_at=event.recorded_at)
        actions = self._publish(event.first.values(), event, now)
        marks: dict[str, list[str]] = {}
        for flushed in event.batches:
            batch = flushed.batch
            endpoint = self._endpoints.get(batch.endpoint_id)
            owner = self._owned(batch.endpoint_id, batch.fence)
            if flushed.foreign:
                self.counters["foreign_results"] += len(flushed.foreign)
                note = do.Note(
                    "ignored results of other endpoints' tasks",
                    {"endpoint_id": batch.endpoint_id, "results": len(flushed.foreign)},
                )
                actions.append(note)
            if flushed.fenced or flushed.lost:
                self._outbox.put_back(batch)
                if owner:
                    actions += self._fenced(owner, now) if flushed.fenced else owner.on_lost()
                continue
            marks[batch.endpoint_id] = [
                result.task_id for result in batch.results if result.task_id not in flushed.foreign
            ]
            if endpoint:
                actions += endpoint.on_recorded(flushed, now)
        return [*actions, do.MarkFlushed(marks)] if any(marks.values()) else actions

    # -- time ----------------------------------------------------------------------------------------------------------

    def _tick(self, now: Instant) -> list[Action]:
        if now.mono < self._tick_at:
            return []
        policy = self._policy
        self._tick_at = now.mono + policy.tick_s
        actions: list[Action] = []
        for session in list(self._sessions.values()):
            if session.wire.is_dead(now=now.mono):
                self.counters["peers_silent"] += 1
                actions += self._close(session, now)
            elif session.wire.heartbeat_due(now=now.mono):
                actions.append(session.send(wire.Heartbeat(at=now.epoch), now))
        owned: dict[str, tuple[int, str]] = {}
        swept: dict[str, int] = {}
        sweep_s = max(policy.sweep_s, len(self._endpoints) / policy.sweeps_per_s)
        for endpoint in list(self._endpoints.values()):
            if endpoint.is_to_be_refreshed(now):
                owned[endpoint.endpoint_id] = (endpoint.fence, endpoint.spool_heard)
            actions += endpoint.on_tick(now)
            if not self._is_sweeping and endpoint.is_to_be_swept(now, sweep_s=sweep_s):
                swept[endpoint.endpoint_id] = endpoint.fence
        if owned:
            actions.append(do.RefreshEndpoints(owned, policy.ownership_ttl_s))
        if swept:
            self._is_sweeping = True
            actions.append(do.SweepQueues(swept))
        self._hub.expire(now)
        if now.mono >= self._announce_at and not self.is_drained:
            actions.append(self._announce(now))
        if now.mono >= self._watch_at:
            self._watch_at = now.mono + policy.watch_s
            if watched := sorted(self._hub.watchers):
                actions.append(do.WatchOwners(watched, policy.watch_ttl_s))
        if now.mono >= self._meter_at:
            actions.append(self._read_meter(now))
        if self._drain is not None and not self.is_drained:
            actions += self._go_on_draining(self._drain, now)
        return actions

    def _read_meter(self, now: Instant) -> Action:
        self._meter_at = now.mono + self._policy.meter_s
        status = self.status()
        return do.Note("minute", self._meter.read(endpoints=status.endpoints, connections=status.connections))

    def _announce(self, now: Instant) -> Action:
        self._announce_at = now.mono + self._policy.announce_s
        return do.Announce(self.info(), self._policy.announce_ttl_s)

    # -- drain ---------------------------------------------------------------------------------------------------------

    def _begin_drain(self, now: Instant) -> list[Action]:
        if self._drain is not None:
            return []
        self._drain = Drain(self._policy, now=now)
        self._shared.is_draining = True
        self._tick_at = now.mono
        return [self._announce(now), *self._tick(now)]

    def _go_on_draining(self, drain: Drain, now: Instant) -> list[Action]:
        """Send the next wave of peers away; when nothing is on the way any more, let go of everything."""
        self._tick_at = min(self._tick_at, now.mono + _DRAIN_TICK_S)
        staying = [session for session in self._sessions.values() if session.may_send(wire.Move)]
        wave = staying[: drain.wave(len(staying), now)]
        actions = [action for session in wave for action in self._move(session, _ENDING, now)]
        self.is_drained = drain.is_over(
            staying=len(staying) - len(wave),
            agents=sum(session.is_agent for session in self._sessions.values()),
            is_flushed=not self._outbox.is_flushing and not len(self._outbox),
            now=now,
        )
        if self.is_drained:
            actions += [
                do.ReleaseEndpoint(endpoint.endpoint_id, endpoint.fence)
                for endpoint in self._endpoints.values()
                if endpoint.phase is Phase.SERVING
            ]
            actions.append(do.Withdraw(self._forwarder_id))
        return actions


def _names(session: PeerSession) -> dict[str, str | int]:
    """Whom a log line is about."""
    subject = "endpoint_id" if session.is_agent else "owner_id"
    return {subject: session.peer.subject, "session_id": session.session_id}
