"""The endpoints of one forwarder process: who begins and ends being served, and whose answer a step's event is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from farcall_common import wire
from farcall_common.errors import EndpointInUse, FarcallError
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.agenda import Agenda
from farcall_forwarder.core.connections import Connections
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.greetings import outdated, taken_over
from farcall_forwarder.core.logical import LogicalForwarder
from farcall_forwarder.core.meter import Meter
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.served import Phase, Shared
from farcall_forwarder.core.sessions import PeerSession

__all__ = ["Endpoints"]


class Endpoints:
    """Logical forwarders by endpoint id, each in its latest life."""

    def __init__(self, shared: Shared, *, connections: Connections, counters: Counter[str], meter: Meter) -> None:
        self._shared = shared
        self._connections = connections
        self._counters = counters
        self._meter = meter
        self._endpoints: dict[str, LogicalForwarder] = {}
        self._agenda = Agenda[str]()
        self._lives = 0
        self._is_sweeping = False

    @property
    def heard(self) -> int:
        """How many endpoints have an agent that is connected."""
        return sum(1 for endpoint in self._endpoints.values() if endpoint.served.session)

    def get(self, endpoint_id: str) -> LogicalForwarder | None:
        """The endpoint, whoever owns it."""
        return self._endpoints.get(endpoint_id)

    def of(self, session: PeerSession) -> LogicalForwarder | None:
        """The endpoint whose agent is heard through this session: not a client's, nor one that was sent away."""
        endpoint = self._endpoints.get(session.peer.subject)
        return endpoint if endpoint and endpoint.served.session is session else None

    def greet(self, session: PeerSession, hello: wire.Hello, now: Instant) -> list[Action]:
        """An agent that may speak for its endpoint introduces itself.

        :raises EndpointInUse: while another agent is heard.
        :raises SpoolOutdated: if its spool is an old copy of the one of the agent that was heard.
        """
        endpoint_id = session.peer.subject
        actions = self._replace_agent(self._endpoints.get(endpoint_id), hello, now)
        self._lives += 1
        session.wire.heartbeat_s = self._shared.policy.heartbeat_s(hello.heartbeat_s)
        endpoint = LogicalForwarder(endpoint_id, self._lives, session, hello, self._shared, now=now)
        self._endpoints[endpoint_id] = endpoint
        self._agenda.enter(endpoint_id, at=now.mono)
        self._counters["agents_greeted"] += 1
        note = do.Note("agent connected", {**session.names, "held_tasks": len(hello.held)})
        return [*actions, note, *endpoint.claim()]

    def _replace_agent(self, former: LogicalForwarder | None, hello: wire.Hello, now: Instant) -> list[Action]:
        """Make way for an agent, or raise EndpointInUse for a second one."""
        if former is None or former.served.session is None:
            return []
        old = former.served.session
        if former.served.is_newer_than(hello):
            raise outdated(former.served.endpoint_id)
        former_is_alive = not old.wire.is_dead(now=now.mono)
        if former_is_alive and hello.spool_id != former.served.spool_id:
            raise EndpointInUse(f"another agent is connected as endpoint {former.served.endpoint_id}")
        former.served.session = None
        actions = self._connections.close(old, now)
        if former_is_alive and hello.instance_id != former.instance_id:
            actions += old.refuse(taken_over(former.served.endpoint_id).record, now)
        return actions

    def on_swept(self, endpoint_ids: Iterable[str]) -> list[Action]:
        """A sweep found endpoints that need a look."""
        self._is_sweeping = False
        return self.on_woken(endpoint_ids)

    def on_cut_off(self, now: Instant) -> None:
        """Wake-ups may have passed unheard: look into all queues, with the next tick."""
        for endpoint_id, endpoint in self._endpoints.items():
            endpoint.upkeep.sweep_soon(now)
            self._agenda.enter(endpoint_id, at=now.mono)

    def on_woken(self, endpoint_ids: Iterable[str]) -> list[Action]:
        """Endpoints may have work, or tasks to cancel."""
        woken = (self._endpoints.get(endpoint_id) for endpoint_id in endpoint_ids)
        return [action for endpoint in woken if endpoint for action in endpoint.on_woken()]

    def on_event(self, event: Event, now: Instant) -> list[Action]:
        """The answer to a step of one endpoint. Answers to an earlier fence or life come too late."""
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
                    else self.living(step.endpoint_id, step.life)
                )
                return self.failed(endpoint, now) if endpoint else []
            case ev.EndpointClaimed(endpoint_id=endpoint_id):
                endpoint = self._endpoints.get(endpoint_id)
                return endpoint.on_claimed(event) if endpoint else []
            case ev.ClaimRefused(endpoint_id=endpoint_id, life=life, error=error):
                endpoint = self._endpoints.get(endpoint_id)
                return self._turn_away(endpoint, error, now) if endpoint and endpoint.served.life == life else []
            case ev.Refreshed(owned=owned, stirring=stirring):
                kept = [(self.owned(endpoint_id, fence), endpoint_id) for endpoint_id, (fence, _) in owned.items()]
                return [
                    action
                    for endpoint, endpoint_id in kept
                    if endpoint
                    for action in endpoint.upkeep.on_refreshed(now, needs_upkeep=endpoint_id in stirring)
                ]
            case ev.TasksPrepared(order=order):
                endpoint = self._endpoints.get(order.endpoint_id)
                return (
                    endpoint.dispatcher.on_prepared(event, now)
                    if endpoint and endpoint.served.life == order.life
                    else []
                )
            case ev.UploadGranted(endpoint_id=endpoint_id, life=life):
                endpoint = self._endpoints.get(endpoint_id)
                return endpoint.reports.on_granted(event, now) if endpoint and endpoint.served.life == life else []
            case (
                ev.LeasesRead()
                | ev.TasksRead()
                | ev.GenerationRecorded()
                | ev.QueueRestored()
                | ev.TasksLeased()
                | ev.CancelsRead()
                | ev.UpkeepDone()
                | ev.AttemptsRead()
            ):
                endpoint = self.owned(event.endpoint_id, event.fence)
                return self._owned_event(endpoint, event, now) if endpoint else []
            case _:
                raise TypeError(f"no rule for {event}")

    def _owned_event(self, endpoint: LogicalForwarder, event: Event, now: Instant) -> list[Action]:
        match event:
            case ev.LeasesRead():
                return endpoint.on_leases_read(event, now)
            case ev.TasksRead():
                return endpoint.on_tasks_read(event, now)
            case ev.GenerationRecorded():
                return endpoint.on_generation_recorded(event, now)
            case ev.QueueRestored():
                self._counters["queues_restored"] += 1
                return [do.Note("queue restored", {"endpoint_id": event.endpoint_id}), *endpoint.on_restored()]
            case ev.TasksLeased():
                self._counters["tasks_leased"] += len(event.tasks)
                self._meter.leased(event.tasks)
                return endpoint.dispatcher.on_leased(event, now)
            case ev.CancelsRead():
                return endpoint.upkeep.on_cancels(event, now)
            case ev.UpkeepDone():
                self._meter.expired(event.reaped)
                actions = endpoint.upkeep.on_kept(event, now)
                if endpoint.upkeep.is_over:
                    self._forget(endpoint)
                return actions
            case ev.AttemptsRead():
                return endpoint.upkeep.on_attempts_read(event)
            case _:
                raise TypeError(f"no rule for {event}")

    def owned(self, endpoint_id: str, fence: int) -> LogicalForwarder | None:
        """The endpoint, if it is still owned under this fence."""
        endpoint = self._endpoints.get(endpoint_id)
        return endpoint if endpoint and endpoint.served.fence == fence else None

    def living(self, endpoint_id: str, life: int) -> LogicalForwarder | None:
        """The endpoint, if it is still in this life."""
        endpoint = self._endpoints.get(endpoint_id)
        return endpoint if endpoint and endpoint.served.life == life else None

    def failed(self, endpoint: LogicalForwarder, now: Instant) -> list[Action]:
        """A store cannot do something for this endpoint, however often it is tried: let go of it and of its agent,
        which has what is not recorded and begins again."""
        self._counters["endpoints_failed"] += 1
        served = endpoint.served
        self._forget(endpoint)
        note = do.Note(
            "a store step failed: the session ends", {"endpoint_id": served.endpoint_id, "fence": served.fence}
        )
        actions: list[Action] = [note]
        if served.fence:
            actions.append(do.ReleaseEndpoint(served.endpoint_id, served.fence))
        if served.session:
            actions += self._connections.move(served.session, "the endpoint's records cannot be read or written", now)
        return actions

    def fenced(self, endpoint: LogicalForwarder, now: Instant) -> list[Action]:
        """Another forwarder owns this endpoint: let go of it and of its agent."""
        self._counters["endpoints_fenced"] += 1
        self._forget(endpoint)
        note = do.Note("fenced", {"endpoint_id": endpoint.served.endpoint_id, "fence": endpoint.served.fence})
        if endpoint.served.session is None:
            return [note]
        return [note, *self._connections.move(endpoint.served.session, "another forwarder serves this endpoint", now)]

    def _turn_away(self, endpoint: LogicalForwarder, error: FarcallError, now: Instant) -> list[Action]:
        """It may not be served here: its agent hears why."""
        session = endpoint.served.session
        self._forget(endpoint)
        return self._connections.refuse(session, error.record, now) if session else []

    def _forget(self, endpoint: LogicalForwarder) -> None:
        del self._endpoints[endpoint.served.endpoint_id]
        self._shared.outbox.close(endpoint.served.endpoint_id)

    def tick(self, now: Instant) -> list[Action]:
        """What is due: upkeep, of quiet endpoints together, and looks for work that no wake-up told of."""
        policy = self._shared.policy
        actions: list[Action] = []
        owned: dict[str, tuple[int, str]] = {}
        swept: dict[str, int] = {}
        sweep_s = max(policy.sweep_s, len(self._endpoints) / policy.sweeps_per_s)
        for endpoint_id in self._agenda.due(now.mono):
            endpoint = self._endpoints.get(endpoint_id)
            if endpoint is None:
                continue
            served = endpoint.served
            served.notice_silence(now)
            if endpoint.upkeep.is_to_be_refreshed(now):
                owned[served.endpoint_id] = (served.fence, endpoint.upkeep.spool_heard)
            actions += endpoint.upkeep.on_tick(now)
            if not self._is_sweeping and endpoint.upkeep.is_to_be_swept(now, sweep_s=sweep_s):
                swept[served.endpoint_id] = served.fence
            self._agenda.enter(endpoint_id, at=endpoint.upkeep.next_at)
        delayed, self._shared.delayed = self._shared.delayed, set()
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
        """Let go of all of them: the process ends."""
        return [
            do.ReleaseEndpoint(endpoint.served.endpoint_id, endpoint.served.fence)
            for endpoint in self._endpoints.values()
            if endpoint.served.phase is Phase.SERVING
        ]
