"""Endpoints of one forwarder process: begins and ends their sessions, and routes the answers of store steps to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from farcall_common import wire
from farcall_common.errors import EndpointInUse, FarcallError
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.connections import Connections
from farcall_forwarder.core.deadlines import DeadlineQueue
from farcall_forwarder.core.endpoint_session import EndpointSession
from farcall_forwarder.core.endpoint_state import EndpointPhase, ForwarderContext
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.greetings import outdated, taken_over
from farcall_forwarder.core.meter import Meter
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.sessions import PeerSession


class Endpoints:
    """Endpoint sessions by endpoint id; only the latest generation of each."""

    def __init__(
        self, context: ForwarderContext, *, connections: Connections, counters: Counter[str], meter: Meter
    ) -> None:
        self._context = context
        self._connections = connections
        self._counters = counters
        self._meter = meter
        self._endpoints: dict[str, EndpointSession] = {}
        self._deadlines = DeadlineQueue[str]()
        self._generations = 0
        self._is_sweeping = False

    @property
    def connected(self) -> int:
        """Number of endpoints whose agent is connected."""
        return sum(1 for endpoint in self._endpoints.values() if endpoint.state.session)

    def get(self, endpoint_id: str) -> EndpointSession | None:
        """The session of an endpoint, under any fence and of any generation."""
        return self._endpoints.get(endpoint_id)

    def of(self, session: PeerSession) -> EndpointSession | None:
        """The endpoint whose agent uses this connection; None for a client, or for an agent that was sent away."""
        endpoint = self._endpoints.get(session.peer.subject)
        return endpoint if endpoint and endpoint.state.session is session else None

    def greet(self, session: PeerSession, hello: wire.Hello, now: Instant) -> list[Action]:
        """Begin a session for an agent that may speak for its endpoint.

        :raises EndpointInUse: while another agent is connected.
        :raises SpoolOutdated: if its spool is an old copy of the connected agent's spool.
        """
        endpoint_id = session.peer.subject
        actions = self._replace_agent(self._endpoints.get(endpoint_id), hello, now)
        self._generations += 1
        session.wire.heartbeat_s = self._context.policy.heartbeat_s(hello.heartbeat_s)
        endpoint = EndpointSession(endpoint_id, self._generations, session, hello, self._context, now=now)
        self._endpoints[endpoint_id] = endpoint
        self._deadlines.enter(endpoint_id, at=now.mono)
        self._counters["agents_greeted"] += 1
        log = do.Log("agent connected", {**session.names, "held_tasks": len(hello.held)})
        return [*actions, log, *endpoint.claim()]

    def _replace_agent(self, former: EndpointSession | None, hello: wire.Hello, now: Instant) -> list[Action]:
        """Close the connection that this agent replaces, or raise EndpointInUse for a second agent."""
        if former is None or former.state.session is None:
            return []
        old = former.state.session
        if former.state.is_newer_than(hello):
            raise outdated(former.state.endpoint_id)
        former_is_alive = not old.wire.is_dead(now=now.mono)
        if former_is_alive and hello.spool_id != former.state.spool_id:
            raise EndpointInUse(f"another agent is connected as endpoint {former.state.endpoint_id}")
        former.state.session = None
        actions = self._connections.close(old, now)
        if former_is_alive and hello.instance_id != former.instance_id:
            actions += old.refuse(taken_over(former.state.endpoint_id).record, now)
        return actions

    def on_swept(self, endpoint_ids: Iterable[str]) -> list[Action]:
        """A sweep found endpoints with work."""
        self._is_sweeping = False
        return self.on_work_available(endpoint_ids)

    def on_pubsub_lost(self, now: Instant) -> None:
        """Wake-ups may have been missed: sweep all queues with the next tick."""
        for endpoint_id, endpoint in self._endpoints.items():
            endpoint.upkeep.sweep_soon(now)
            self._deadlines.enter(endpoint_id, at=now.mono)

    def on_work_available(self, endpoint_ids: Iterable[str]) -> list[Action]:
        """Endpoints may have work, or tasks to cancel."""
        found = (self._endpoints.get(endpoint_id) for endpoint_id in endpoint_ids)
        return [action for endpoint in found if endpoint for action in endpoint.on_work_available()]

    def on_event(self, event: Event, now: Instant) -> list[Action]:
        """Handle the answer to a step of one endpoint. Answers to an earlier fence or generation are ignored."""
        match event:
            case ev.StepFenced(step=step) | ev.StepLost(step=step):
                endpoint = self.owned(step.endpoint_id, step.fence)
                if endpoint is None:
                    return []
                return self.fenced(endpoint, now) if isinstance(event, ev.StepFenced) else endpoint.on_lost()
            case ev.StepFailed(step=step):
                endpoint = (
                    self.owned(step.endpoint_id, step.fence)
                    if isinstance(step, do.EndpointStep)
                    else self.of_generation(step.endpoint_id, step.generation)
                )
                return self.failed(endpoint, now) if endpoint else []
            case ev.EndpointClaimed(endpoint_id=endpoint_id):
                endpoint = self._endpoints.get(endpoint_id)
                return endpoint.on_claimed(event) if endpoint else []
            case ev.ClaimRefused(endpoint_id=endpoint_id, generation=generation, error=error):
                endpoint = self._endpoints.get(endpoint_id)
                return (
                    self._turn_away(endpoint, error, now)
                    if endpoint and endpoint.state.generation == generation
                    else []
                )
            case ev.Refreshed(owned=owned, active=active):
                refreshed = [(self.owned(endpoint_id, fence), endpoint_id) for endpoint_id, (fence, _) in owned.items()]
                return [
                    action
                    for endpoint, endpoint_id in refreshed
                    if endpoint
                    for action in endpoint.upkeep.on_refreshed(now, needs_upkeep=endpoint_id in active)
                ]
            case ev.TasksPrepared(order=order):
                endpoint = self._endpoints.get(order.endpoint_id)
                return (
                    endpoint.dispatcher.on_prepared(event, now)
                    if endpoint and endpoint.state.generation == order.generation
                    else []
                )
            case ev.UploadGranted(endpoint_id=endpoint_id, generation=generation):
                endpoint = self._endpoints.get(endpoint_id)
                return (
                    endpoint.reports.on_granted(event, now)
                    if endpoint and endpoint.state.generation == generation
                    else []
                )
            case (
                ev.LeasesRead()
                | ev.TasksRead()
                | ev.SpoolGenerationRecorded()
                | ev.QueueRestored()
                | ev.TasksLeased()
                | ev.CancelsRead()
                | ev.EndpointMaintained()
                | ev.AttemptsRead()
            ):
                endpoint = self.owned(event.endpoint_id, event.fence)
                return self._owned_event(endpoint, event, now) if endpoint else []
            case _:
                raise TypeError(f"no rule for {event}")

    def _owned_event(self, endpoint: EndpointSession, event: Event, now: Instant) -> list[Action]:
        match event:
            case ev.LeasesRead():
                return endpoint.on_leases_read(event, now)
            case ev.TasksRead():
                return endpoint.on_tasks_read(event, now)
            case ev.SpoolGenerationRecorded():
                return endpoint.on_spool_generation_recorded(event, now)
            case ev.QueueRestored():
                self._counters["queues_restored"] += 1
                return [do.Log("queue restored", {"endpoint_id": event.endpoint_id}), *endpoint.on_restored()]
            case ev.TasksLeased():
                self._counters["tasks_leased"] += len(event.tasks)
                self._meter.leased(event.tasks)
                return endpoint.dispatcher.on_leased(event, now)
            case ev.CancelsRead():
                return endpoint.upkeep.on_cancels(event, now)
            case ev.EndpointMaintained():
                self._meter.expired(event.reaped)
                actions = endpoint.upkeep.on_maintained(event, now)
                if endpoint.upkeep.is_over:
                    self._forget(endpoint)
                return actions
            case ev.AttemptsRead():
                return endpoint.upkeep.on_attempts_read(event)
            case _:
                raise TypeError(f"no rule for {event}")

    def owned(self, endpoint_id: str, fence: int) -> EndpointSession | None:
        """The endpoint, if this fence is still the current one."""
        endpoint = self._endpoints.get(endpoint_id)
        return endpoint if endpoint and endpoint.state.fence == fence else None

    def of_generation(self, endpoint_id: str, generation: int) -> EndpointSession | None:
        """The endpoint, if this generation is still the current one."""
        endpoint = self._endpoints.get(endpoint_id)
        return endpoint if endpoint and endpoint.state.generation == generation else None

    def failed(self, endpoint: EndpointSession, now: Instant) -> list[Action]:
        """A store refuses a step of this endpoint for good: release the endpoint and redirect its agent, which still
        has the unrecorded results and begins again."""
        self._counters["endpoints_failed"] += 1
        state = endpoint.state
        self._forget(endpoint)
        log = do.Log("a store step failed: the session ends", {"endpoint_id": state.endpoint_id, "fence": state.fence})
        actions: list[Action] = [log]
        if state.fence:
            actions.append(do.ReleaseEndpoint(state.endpoint_id, state.fence))
        if state.session:
            actions += self._connections.redirect(
                state.session, "the endpoint's records cannot be read or written", now
            )
        return actions

    def fenced(self, endpoint: EndpointSession, now: Instant) -> list[Action]:
        """Another forwarder owns this endpoint: forget it and redirect its agent."""
        self._counters["endpoints_fenced"] += 1
        self._forget(endpoint)
        log = do.Log("fenced", {"endpoint_id": endpoint.state.endpoint_id, "fence": endpoint.state.fence})
        if endpoint.state.session is None:
            return [log]
        return [
            log,
            *self._connections.redirect(endpoint.state.session, "another forwarder serves this endpoint", now),
        ]

    def _turn_away(self, endpoint: EndpointSession, error: FarcallError, now: Instant) -> list[Action]:
        """The endpoint may not be served here: send its agent the reason."""
        session = endpoint.state.session
        self._forget(endpoint)
        return self._connections.refuse(session, error.record, now) if session else []

    def _forget(self, endpoint: EndpointSession) -> None:
        del self._endpoints[endpoint.state.endpoint_id]
        self._context.outbox.close(endpoint.state.endpoint_id)

    def tick(self, now: Instant) -> list[Action]:
        """Perform upkeep and sweeps that are due. One step covers the upkeep of all endpoints without leases."""
        policy = self._context.policy
        actions: list[Action] = []
        owned: dict[str, tuple[int, str]] = {}
        swept: dict[str, int] = {}
        sweep_s = max(policy.sweep_s, len(self._endpoints) / policy.sweeps_per_s)
        for endpoint_id in self._deadlines.due(now.mono):
            endpoint = self._endpoints.get(endpoint_id)
            if endpoint is None:
                continue
            state = endpoint.state
            state.update_silence(now)
            if endpoint.upkeep.is_to_be_refreshed(now):
                owned[state.endpoint_id] = (state.fence, endpoint.upkeep.connected_spool)
            actions += endpoint.upkeep.on_tick(now)
            if not self._is_sweeping and endpoint.upkeep.is_to_be_swept(now, sweep_s=sweep_s):
                swept[state.endpoint_id] = state.fence
            self._deadlines.enter(endpoint_id, at=endpoint.upkeep.next_at)
        delayed, self._context.delayed = self._context.delayed, set()
        for endpoint_id in delayed:
            if endpoint := self._endpoints.get(endpoint_id):
                actions += endpoint.record_delayed(now)
        if owned:
            actions.append(do.RefreshEndpoints(owned, policy.ownership_ttl_s))
        if swept:
            self._is_sweeping = True
            actions.append(do.SweepQueues(swept))
        return actions

    def release(self) -> list[Action]:
        """Release all endpoints: the process ends."""
        return [
            do.ReleaseEndpoint(endpoint.state.endpoint_id, endpoint.state.fence)
            for endpoint in self._endpoints.values()
            if endpoint.state.phase is EndpointPhase.SERVING
        ]
