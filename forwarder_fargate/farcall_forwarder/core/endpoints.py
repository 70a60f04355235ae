"""Endpoints of one forwarder process: their beginning and end, and the routing of store answers to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from farcall_common import wire
from farcall_common.errors import EndpointInUse, FarcallError
from farcall_common.store.model import FileAsk, OutputAsk
from farcall_common.wire import FileReason
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import dispatch, files, maintenance, output, presence, reports, resume
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.admission import outdated, taken_over
from farcall_forwarder.core.connections import Connections
from farcall_forwarder.core.deadlines import DeadlineQueue
from farcall_forwarder.core.endpoint import Endpoint, ForwarderContext
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.meter import Meter
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.sessions import PeerSession


class Endpoints:
    """Endpoints by id; only the latest generation of each."""

    def __init__(
        self, context: ForwarderContext, *, connections: Connections, counters: Counter[str], meter: Meter
    ) -> None:
        self._context = context
        self._connections = connections
        self._counters = counters
        self._meter = meter
        self._endpoints: dict[str, Endpoint] = {}
        self._deadlines = DeadlineQueue[str]()
        self._generations = 0
        self._is_sweeping = False

    @property
    def connected(self) -> int:
        """Number of endpoints whose agent is connected."""
        return sum(1 for endpoint in self._endpoints.values() if endpoint.session)

    # -- agents --------------------------------------------------------------------------------------------------------

    def open_session(self, session: PeerSession, hello: wire.Hello, now: Instant) -> list[Action]:
        """Begin a generation of the endpoint, for an agent that may represent it.

        :raises EndpointInUse: while another agent is connected.
        :raises SpoolOutdated: if its spool is an old copy of the connected agent's spool.
        """
        endpoint_id = session.peer.subject
        actions = self._replace_agent(self._endpoints.get(endpoint_id), hello, now)
        self._generations += 1
        session.wire.heartbeat_s = self._context.policy.heartbeat_s(hello.heartbeat_s)
        endpoint = Endpoint(endpoint_id, self._generations, session, hello, self._context, now=now)
        self._endpoints[endpoint_id] = endpoint
        self._context.outbox.admit(endpoint_id, self._generations)
        self._deadlines.enter(endpoint_id, at=now.mono)
        self._counters["agents_connected"] += 1
        log = do.Log("agent connected", {**session.names, "held_tasks": len(hello.held)})
        return [*actions, log, *resume.claim(endpoint)]

    def _replace_agent(self, former: Endpoint | None, hello: wire.Hello, now: Instant) -> list[Action]:
        """Close the connection that this agent replaces, or raise EndpointInUse for a second agent."""
        if former is None or former.session is None:
            return []
        old = former.session
        if former.is_newer_than(hello):
            raise outdated(former.endpoint_id)
        former_is_alive = not old.wire.is_dead(now=now.mono)
        if former_is_alive and hello.spool_id != former.spool_id:
            raise EndpointInUse(f"another agent is connected as endpoint {former.endpoint_id}")
        former.session = None
        actions = [*former.file_reads.close(), *self._connections.close(old, now)]
        if former_is_alive and hello.instance_id != former.instance_id:
            actions += old.refuse(taken_over(former.endpoint_id).record, now)
        return actions

    def probe(self, endpoint_id: str, now: Instant) -> list[Action]:
        """Send a heartbeat to the agent. If it has died, the send fails and its session ends."""
        endpoint = self._endpoints.get(endpoint_id)
        return endpoint.send(wire.Heartbeat(at=now.epoch), now) if endpoint else []

    def on_message(
        self, session: PeerSession, message: wire.Message, frames: Sequence[bytes], now: Instant
    ) -> list[Action]:
        """Handle a message of an agent. Those of an agent that was sent away are ignored."""
        endpoint = self._connected_by(session)
        return reports.on_message(endpoint, message, frames, now) if endpoint else []

    def detach(self, session: PeerSession, now: Instant) -> list[Action]:
        """A session has ended: its agent has disconnected."""
        endpoint = self._connected_by(session)
        return resume.on_session_lost(endpoint, now) if endpoint else []

    def _connected_by(self, session: PeerSession) -> Endpoint | None:
        endpoint = self._endpoints.get(session.peer.subject)
        return endpoint if endpoint and endpoint.session is session else None

    # -- work ----------------------------------------------------------------------------------------------------------

    def on_activity_found(self, endpoint_ids: Iterable[str]) -> list[Action]:
        """A sweep found endpoints with work."""
        self._is_sweeping = False
        return self.on_work_available(endpoint_ids)

    def on_pubsub_lost(self, now: Instant) -> None:
        """Wake-ups may have been missed: sweep all queues with the next tick."""
        for endpoint_id, endpoint in self._endpoints.items():
            endpoint.sweep_at = now.mono
            self._deadlines.enter(endpoint_id, at=now.mono)

    def on_work_available(self, endpoint_ids: Iterable[str]) -> list[Action]:
        """The queues of endpoints may have work, or tasks to cancel."""
        actions: list[Action] = []
        for endpoint_id in endpoint_ids:
            if endpoint := self._endpoints.get(endpoint_id):
                endpoint.expect_work()
                actions += dispatch.lease_tasks(endpoint) + maintenance.read_cancels(endpoint)
        return actions

    def on_output_requested(self, asks: Iterable[OutputAsk], now: Instant) -> list[Action]:
        """Ask agents for output of their tasks."""
        actions: list[Action] = []
        for ask in asks:
            endpoint = self._endpoints.get(ask.endpoint_id)
            if endpoint is None or endpoint.session is None or not endpoint.is_serving:
                actions.append(output.unanswered(ask, "ENDPOINT_OFFLINE"))
            else:
                actions += endpoint.output.begin(ask, endpoint.send, now)
        return actions

    def on_file_asked(self, ask: FileAsk, now: Instant) -> list[Action]:
        """Ask an agent for a piece of a file."""
        endpoint = self._endpoints.get(ask.endpoint_id)
        if endpoint is None or endpoint.session is None or not endpoint.is_serving:
            return [files.unread(ask, FileReason.OFFLINE)]
        return endpoint.file_reads.begin(ask, endpoint.send, now, limit_s=self._context.policy.file_read_s)

    # -- answers of the stores -----------------------------------------------------------------------------------------

    def on_event(self, event: Event, now: Instant) -> list[Action]:
        """Handle the answer to a step of one endpoint. Answers to an earlier fence or generation are ignored."""
        if isinstance(event, ev.Refreshed):
            return self._on_refreshed(event, now)
        endpoint = self._addressee(event)
        if endpoint is None:
            return []
        match event:
            case ev.StepFenced():
                return self._fenced(endpoint, now)
            case ev.StepLost():
                return resume.on_lost(endpoint)
            case ev.StepFailed():
                return self._failed(endpoint, now)
            case ev.EndpointClaimed():
                return resume.on_claimed(endpoint, event)
            case ev.ClaimRefused(error=error):
                return self._turn_away(endpoint, error, now)
            case ev.LeasesRead():
                return resume.on_leases_read(endpoint, event, now)
            case ev.TasksRead():
                return resume.on_tasks_read(endpoint, event, now)
            case ev.QueueRestored():
                self._counters["queues_restored"] += 1
                return [do.Log("queue restored", {"endpoint_id": event.endpoint_id}), *resume.on_restored(endpoint)]
            case ev.SpoolGenerationRecorded():
                return presence.on_spool_recorded(endpoint, event, now)
            case ev.TasksLeased():
                self._counters["tasks_leased"] += len(event.tasks)
                self._meter.leased(event.tasks)
                return dispatch.on_leased(endpoint, event, now)
            case ev.TasksPrepared():
                return dispatch.on_prepared(endpoint, event, now)
            case ev.UploadGranted():
                return reports.on_upload_granted(endpoint, event, now)
            case ev.TasksRequeued():
                return maintenance.on_requeued(endpoint, now)
            case ev.CancelsRead():
                return maintenance.on_cancels(endpoint, event, now)
            case ev.EndpointMaintained():
                self._meter.expired(event.reaped)
                actions = maintenance.on_maintained(endpoint, event, now)
                if endpoint.is_over:
                    self._forget(endpoint)
                return actions
            case ev.AttemptsRead():
                return maintenance.on_attempts_read(endpoint, event)
            case _:
                raise TypeError(f"no rule for {type(event).__name__}")

    def _addressee(self, event: Event) -> Endpoint | None:
        """The endpoint that an answer is for, if the fence or generation of its step is still the current one."""
        match event:
            case ev.StepFenced(step=answered) | ev.StepLost(step=answered) | ev.StepFailed(step=answered):
                pass
            case ev.TasksPrepared(order=answered):
                pass
            case ev.EndpointEvent() | ev.GenerationEvent() as answered:
                pass
            case _:
                raise TypeError(f"no rule for {type(event).__name__}")
        endpoint = self._endpoints.get(answered.endpoint_id)
        if endpoint is None:
            return None
        is_current = (
            endpoint.fence == answered.fence
            if isinstance(answered, do.EndpointStep | ev.EndpointEvent)
            else endpoint.generation == answered.generation
        )
        return endpoint if is_current else None

    def _on_refreshed(self, event: ev.Refreshed, now: Instant) -> list[Action]:
        actions: list[Action] = []
        for endpoint_id, (fence, _) in event.owned.items():
            endpoint = self._endpoints.get(endpoint_id)
            if endpoint and endpoint.fence == fence:
                actions += maintenance.on_refreshed(endpoint, now, needs_maintenance=endpoint_id in event.active)
        return actions

    def on_flushed(self, flushed: ev.BatchFlushed, now: Instant) -> list[Action]:
        """The results of one endpoint were recorded, or refused."""
        batch = flushed.batch
        endpoint = self._endpoints.get(batch.endpoint_id)
        if endpoint is None:
            return []
        if flushed.failed:
            return self._failed(endpoint, now) if endpoint.generation == batch.generation else []
        if not flushed.fenced and not flushed.lost:
            return reports.on_recorded(endpoint, flushed, now)
        if endpoint.fence != batch.fence:
            return []
        return self._fenced(endpoint, now) if flushed.fenced else resume.on_lost(endpoint)

    # -- removal -------------------------------------------------------------------------------------------------------

    def _failed(self, endpoint: Endpoint, now: Instant) -> list[Action]:
        """A store refuses a step of this endpoint for good: release the endpoint and redirect its agent, which still
        has the unrecorded results and begins again."""
        self._counters["endpoints_failed"] += 1
        log = do.Log("a store step failed: the session ends", _names(endpoint))
        release = [do.ReleaseEndpoint(endpoint.endpoint_id, endpoint.fence)] if endpoint.fence else []
        reason = "the endpoint's records cannot be read or written"
        return [log, *release, *self._redirect(endpoint, reason, now)]

    def _fenced(self, endpoint: Endpoint, now: Instant) -> list[Action]:
        """Another forwarder owns this endpoint: forget it and redirect its agent."""
        self._counters["endpoints_fenced"] += 1
        log = do.Log("fenced", _names(endpoint))
        return [log, *self._redirect(endpoint, "another forwarder serves this endpoint", now)]

    def _redirect(self, endpoint: Endpoint, reason: str, now: Instant) -> list[Action]:
        self._forget(endpoint)
        return self._connections.redirect(endpoint.session, reason, now) if endpoint.session else []

    def _turn_away(self, endpoint: Endpoint, error: FarcallError, now: Instant) -> list[Action]:
        """The endpoint may not be served here: send its agent the reason."""
        session = endpoint.session
        self._forget(endpoint)
        return self._connections.refuse(session, error.record, now) if session else []

    def _forget(self, endpoint: Endpoint) -> None:
        del self._endpoints[endpoint.endpoint_id]
        self._context.outbox.close(endpoint.endpoint_id)

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self, now: Instant) -> list[Action]:
        """Perform the maintenance and sweeps that are due. One step maintains all endpoints without leases."""
        policy = self._context.policy
        actions: list[Action] = []
        owned: dict[str, tuple[int, str]] = {}
        swept: dict[str, int] = {}
        sweep_s = max(policy.sweep_s, len(self._endpoints) / policy.sweeps_per_s)
        for endpoint_id in self._deadlines.due(now.mono):
            endpoint = self._endpoints.get(endpoint_id)
            if endpoint is None:
                continue
            endpoint.update_silence(now)
            if maintenance.is_to_be_refreshed(endpoint, now):
                owned[endpoint_id] = (endpoint.fence, endpoint.connected_spool_id)
            elif now.mono >= endpoint.maintain_at:
                actions += maintenance.maintain(endpoint, now)
            if not self._is_sweeping and maintenance.is_to_be_swept(endpoint, now, sweep_s=sweep_s):
                swept[endpoint_id] = endpoint.fence
            self._deadlines.enter(endpoint_id, at=maintenance.next_at(endpoint))
        delayed, self._context.delayed = self._context.delayed, set()
        for endpoint_id in sorted(delayed):
            if endpoint := self._endpoints.get(endpoint_id):
                actions += presence.record_delayed(endpoint, now)
        if owned:
            actions.append(do.RefreshEndpoints(owned, policy.ownership_ttl_s))
        if swept:
            self._is_sweeping = True
            actions.append(do.SweepQueues(swept))
        return actions

    def release(self) -> list[Action]:
        """Release all endpoints: the process ends."""
        return [
            do.ReleaseEndpoint(endpoint.endpoint_id, endpoint.fence)
            for endpoint in self._endpoints.values()
            if endpoint.is_serving
        ]


def _names(endpoint: Endpoint) -> dict[str, str | int]:
    """Fields that identify an endpoint in a log line."""
    return {"endpoint_id": endpoint.endpoint_id, "fence": endpoint.fence}
