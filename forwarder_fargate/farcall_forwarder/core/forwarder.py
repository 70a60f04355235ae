"""The forwarder's core: routes each event to the part that handles it, and returns the actions.

::

    Forwarder ──▶ Clients, Endpoints ──▶ Connections     result streams, endpoints, sessions of peers
        └───────▶ Recorder                               results and transitions on their way to the database

The core is deterministic: the same events at the same instants, given to a new core with the same ids, return the same
actions.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from farcall_common import wire
from farcall_common.errors import EndpointInUse, FarcallError, ProtocolError
from farcall_common.store.model import FileAsk, ForwarderInfo
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.admission import TicketReader, check_opening
from farcall_forwarder.core.clients import Clients
from farcall_forwarder.core.connections import Connections, IdSource
from farcall_forwarder.core.endpoint import ForwarderContext, FunctionCache
from farcall_forwarder.core.endpoints import Endpoints
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.files import FileAsked, FileMessagesHeard, FilePulls, PieceSigned
from farcall_forwarder.core.meter import Meter
from farcall_forwarder.core.outbox import Outbox
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.recorder import Recorder
from farcall_forwarder.core.relay import BlobStored, PieceRead, Relay
from farcall_forwarder.core.sessions import PeerSession
from farcall_forwarder.core.transitions import TransitionBuffer

_DRAIN_TICK_S: Final = 0.1
_ENDING: Final = "this forwarder shuts down"


@dataclasses.dataclass(frozen=True)
class Status:
    """Report of a health check."""

    connections: int
    endpoints: int
    streams: int
    unrecorded_results: int
    draining: bool
    counters: Mapping[str, int]


class _Drain:
    """Redirects peers in waves, so that they do not all reconnect at once, and decides when the drain is over."""

    def __init__(self, policy: Policy, *, now: Instant) -> None:
        self._policy = policy
        self._began_at = self._last_wave_at = now.mono
        self._redirected = 0

    def wave(self, staying: int, now: Instant) -> int:
        """Number of peers to redirect now, of those that were not redirected yet."""
        permitted = int((now.mono - self._began_at) * self._policy.redirects_per_s) + 1
        size = max(0, min(staying, permitted - self._redirected))
        if size:
            self._redirected += size
            self._last_wave_at = now.mono
        return size

    def is_over(self, *, staying: int, agents: int, is_flushed: bool, now: Instant) -> bool:
        """Whether nothing is left to wait for: all peers were redirected, agents have left or had time for their
        messages under way, and the database has all results. Or whether the time is up."""
        has_waited = not agents or now.mono >= self._last_wave_at + self._policy.drain_grace_s
        return (not staying and has_waited and is_flushed) or now.mono >= self._began_at + self._policy.drain_s


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
        id_source: IdSource,
        now: Instant,
    ) -> None:
        self._policy = policy
        self._forwarder_id = forwarder_id
        self._address = address
        self._server_key = server_key
        self._tickets = tickets
        self.counters: Counter[str] = Counter()
        self._meter = Meter()
        self._context = ForwarderContext(
            forwarder_id,
            policy,
            FunctionCache(limit_bytes=policy.function_cache_bytes),
            Outbox(),
            TransitionBuffer(),
            Relay(policy),
            FilePulls(policy, forwarder_id=forwarder_id),
        )
        self._recorder = Recorder(policy, outbox=self._context.outbox, transitions=self._context.transitions)
        self._connections = Connections(
            policy, id_source=id_source, counters=self.counters, detach=self._detach, now=now
        )
        self._clients = Clients(
            policy, forwarder_id=forwarder_id, connections=self._connections, counters=self.counters, now=now
        )
        self._endpoints = Endpoints(
            self._context, connections=self._connections, counters=self.counters, meter=self._meter
        )
        self._tick_at = self._announce_at = now.mono
        self._meter_at = now.mono + policy.meter_s
        self._tidy_at = now.mono + policy.tidy_s
        self._drain: _Drain | None = None
        #: Set when a drain is over: only the steps under way are left to finish.
        self.is_drained = False

    # -- the shell's side ----------------------------------------------------------------------------------------------

    def handle(self, events: Iterable[Event], now: Instant) -> list[Action]:
        """Handle events in order; the actions to perform."""
        actions = [action for event in events for action in self._decide(event, now)]
        watchers = self._clients.watchers if len(self._context.outbox) else ()
        return actions + self._recorder.next_steps(watchers, now)

    def next_deadline(self) -> float:
        """The monotonic second at which a Tick is due."""
        return self._recorder.next_deadline(self._tick_at)

    def info(self, now: Instant) -> ForwarderInfo:
        """How this forwarder is announced."""
        return ForwarderInfo(
            self._forwarder_id,
            self._address,
            self._server_key,
            connections=len(self._connections),
            draining=self._context.is_draining,
            idle_s=self._connections.idle_s(now),
        )

    @property
    def is_draining(self) -> bool:
        """Whether a drain has begun."""
        return self._context.is_draining

    def status(self) -> Status:
        """Numbers for a health check."""
        return Status(
            connections=len(self._connections),
            endpoints=self._endpoints.connected,
            streams=len(self._clients),
            unrecorded_results=len(self._context.outbox),
            draining=self._context.is_draining,
            counters=dict(self.counters),
        )

    def _decide(self, event: Event, now: Instant) -> list[Action]:
        match event:
            case ev.Received():
                return self._received(event, now)
            case ev.MalformedReceived():
                return self._malformed_received(event, now)
            case ev.PeerDisconnected(routing_id=routing_id):
                session = self._connections.get(routing_id)
                return self._connections.close(session, now) if session else []
            case ev.SlowConsumer(routing_id=routing_id):
                self.counters["peers_behind"] += 1
                session = self._connections.get(routing_id)
                return self._connections.send_away(session, "this peer reads too slowly", now) if session else []
            case ev.WorkAvailable(endpoint_ids=endpoint_ids):
                return self._endpoints.on_work_available(endpoint_ids)
            case ev.ActivityFound(endpoint_ids=endpoint_ids):
                return self._endpoints.on_activity_found(endpoint_ids)
            case ev.OutputRequested(asks=asks):
                return self._endpoints.on_output_requested(asks, now)
            case FileMessagesHeard() | FileAsked() | PieceSigned():
                return self._on_files(event, now)
            case ev.ResultsHeard(shared_results=groups):
                return [action for group in groups for action in self._clients.publish(group.results, group, now)]
            case ev.PubSubLost():
                self._clients.on_pubsub_lost()
                self._endpoints.on_pubsub_lost(now)
                return []
            case ev.OwnersWatched():
                return self._clients.on_subscribed(event, now)
            case ev.ResultsShared():
                self._recorder.share.on_shared()
                return []
            case ev.Announced(others=others):
                self._recorder.share.on_announced(others=others)
                return []
            case ev.Tick():
                return self._tick(now)
            case ev.Flushed():
                return self._flushed(event, now)
            case ev.TransitionsRecorded():
                self._recorder.transitions_recorded()
                return []
            case PieceRead():
                return self._context.relay.on_read(event, now)
            case BlobStored():
                return self._context.relay.on_stored(event, now)
            case ev.DrainOrdered():
                return self._begin_drain(now)
            case _:
                return self._endpoints.on_event(event, now)

    def _on_files(self, event: FileMessagesHeard | FileAsked | PieceSigned, now: Instant) -> list[Action]:
        """Handle what concerns files of other endpoints."""
        pulls = self._context.file_pulls
        match event:
            case FileAsked():
                return pulls.on_asked(event, now)
            case PieceSigned():
                if given := pulls.on_signed(event, now):
                    self._meter.relayed(event.piece_bytes)
                return given
            case FileMessagesHeard(messages=messages):
                actions: list[Action] = []
                for message in messages:
                    if isinstance(message, FileAsk):
                        actions += self._endpoints.on_file_asked(message, now)
                    else:
                        actions += pulls.on_answer(message, now)
                return actions

    # -- peers ---------------------------------------------------------------------------------------------------------

    def _malformed_received(self, event: ev.MalformedReceived, now: Instant) -> list[Action]:
        actions = self._connections.forget_former(event, now)
        return actions + self._connections.illegal(self._connections.session_of(event, now), event.error, now)

    def _received(self, event: ev.Received, now: Instant) -> list[Action]:
        actions = self._connections.forget_former(event, now)
        session = self._connections.session_of(event, now)
        message = event.envelope.message
        try:
            session.wire.received(message, now=now.mono)
        except ProtocolError as error:
            return actions + self._connections.illegal(session, error, now)
        return actions + self._on_message(session, message, event.envelope.frames, now)

    def _on_message(
        self, session: PeerSession, message: wire.Message, frames: Sequence[bytes], now: Instant
    ) -> list[Action]:
        """Handle a legal message of a peer."""
        match message:
            case wire.Hello() | wire.OpenStream():
                return self._on_opening(session, message, now)
            case wire.Goodbye():
                return self._connections.close(session, now)
            case wire.Subscribe(task_group_ids=groups):
                return self._clients.subscribe(session, groups, now)
            case _:
                return self._endpoints.on_message(session, message, frames, now)

    def _on_opening(self, session: PeerSession, opening: wire.Hello | wire.OpenStream, now: Instant) -> list[Action]:
        """Admit a peer that opens a session, or refuse it with the reason."""
        try:
            ticket = check_opening(opening, session.peer, tickets=self._tickets, now=now)
            session.expires_at = ticket.expires_at
            self._connections.admit(session, now)
            if self._context.is_draining:
                return self._connections.redirect(session, _ENDING, now)
            if isinstance(opening, wire.Hello):
                return self._endpoints.open_session(session, opening, now)
            return self._clients.open_session(session, opening, now)
        except EndpointInUse as error:
            # If the other agent has died, this heartbeat fails and closes its session: the refused agent tries again.
            probe = self._endpoints.probe(session.peer.subject, now)
            return [*self._connections.refuse(session, error.record, now), *probe]
        except FarcallError as error:
            return self._connections.refuse(session, error.record, now)

    def _detach(self, session: PeerSession, now: Instant) -> list[Action]:
        """End the stream, the transfers and the endpoint's use of this session."""
        self._clients.detach(session, now)
        ended = self._context.relay.close(session, now) + self._context.file_pulls.close(session)
        return ended + self._endpoints.detach(session, now)

    # -- recording -----------------------------------------------------------------------------------------------------

    def _flushed(self, event: ev.Flushed, now: Instant) -> list[Action]:
        results = event.first.values()
        self._recorder.flushed([flushed.batch for flushed in event.batches], results, recorded_at=event.recorded_at)
        self.counters["results_recorded"] += len(event.first)
        self._meter.recorded(results, recorded_at=event.recorded_at)
        actions = self._clients.publish(results, event, now)
        marks: dict[str, list[str]] = {}
        for flushed in event.batches:
            batch = flushed.batch
            if flushed.foreign:
                self.counters["foreign_results"] += len(flushed.foreign)
                log = do.Log(
                    "ignored results of other endpoints' tasks",
                    {"endpoint_id": batch.endpoint_id, "results": len(flushed.foreign)},
                )
                actions.append(log)
            if flushed.fenced or flushed.lost:
                self._recorder.put_back(batch)
            elif not flushed.failed:
                recorded = [result.task_id for result in batch.results if result.task_id not in flushed.foreign]
                marks[batch.endpoint_id] = recorded
            actions += self._endpoints.on_flushed(flushed, now)
        return [*actions, do.MarkFlushed(marks)] if any(marks.values()) else actions

    # -- time ----------------------------------------------------------------------------------------------------------

    def _tick(self, now: Instant) -> list[Action]:
        if now.mono < self._tick_at:
            return []
        policy = self._policy
        if now.mono - self._tick_at >= policy.stall_s:
            # This process was stopped. Messages that peers sent meanwhile are unread, so their silence means nothing.
            self._connections.forgive_silence(now)
        self._tick_at = now.mono + policy.tick_s
        actions = [*self._connections.tick(now), *self._context.relay.tick(now), *self._context.file_pulls.tick(now)]
        actions += self._endpoints.tick(now)
        if now.mono >= self._announce_at and not self.is_drained:
            actions.append(self._announce(now))
        actions += self._clients.tick(now)
        if now.mono >= self._meter_at:
            actions.append(self._read_meter(now))
        if now.mono >= self._tidy_at:
            self._tidy_at = now.mono + policy.tidy_s
            actions.append(do.ReleaseMemory())
        if self._drain is not None and not self.is_drained:
            actions += self._continue_drain(self._drain, now)
        return actions

    def _read_meter(self, now: Instant) -> Action:
        self._meter_at = now.mono + self._policy.meter_s
        status = self.status()
        return do.Log("minute", self._meter.read(endpoints=status.endpoints, connections=status.connections))

    def _announce(self, now: Instant) -> Action:
        self._announce_at = now.mono + self._policy.announce_s
        return do.Announce(self.info(now), self._policy.announce_ttl_s)

    # -- drain ---------------------------------------------------------------------------------------------------------

    def _begin_drain(self, now: Instant) -> list[Action]:
        if self._drain is not None:
            return []
        self._drain = _Drain(self._policy, now=now)
        self._context.is_draining = True
        self._tick_at = now.mono
        return [self._announce(now), *self._tick(now)]

    def _continue_drain(self, drain: _Drain, now: Instant) -> list[Action]:
        """Redirect the next wave of peers. When nothing is under way any more, release everything."""
        self._tick_at = min(self._tick_at, now.mono + _DRAIN_TICK_S)
        staying = [session for session in self._connections if session.may_send(wire.Redirect)]
        wave = staying[: drain.wave(len(staying), now)]
        actions = [action for session in wave for action in self._connections.redirect(session, _ENDING, now)]
        self.is_drained = drain.is_over(
            staying=len(staying) - len(wave),
            agents=sum(session.is_agent for session in self._connections),
            is_flushed=self._recorder.is_done,
            now=now,
        )
        if self.is_drained:
            actions += self._endpoints.release()
            actions.append(do.Withdraw(self._forwarder_id))
        return actions
