"""Batched store steps: performed for many endpoints in a few round trips, each under its own fence."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Final

from farcall_common.errors import EndpointInUse, EndpointUnknown, Fenced, QueueDataLost, TicketInvalid
from farcall_common.store.model import HeldLeases, LeasedTask, MaintenanceResult, Presence, QueuedTask, SpoolMark, Task
from farcall_common.store.ports import Tasks
from farcall_common.store.settings import Stores
from farcall_common.wire import Reporter
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.admission import outdated
from farcall_forwarder.core.events import Event

#: Most steps in one batch, by kind.
BATCH_LIMITS: Final[Mapping[type[do.StoreStep], int]] = {
    do.ClaimEndpoint: 64,
    do.RecordSpoolGeneration: 256,
    do.ReadLeases: 64,
    do.RestoreQueue: 64,
    do.ReadTasks: 64,
    do.SetPresence: 256,
    do.LeaseTasks: 64,
    do.ReadCancels: 64,
    do.MaintainEndpoint: 64,
}
#: Tasks that are read at once; those of a queue come with their payloads.
_PAGE: Final = 500


class BatchedSteps:
    """Performs steps of the kinds in :data:`BATCH_LIMITS`."""

    def __init__(self, stores: Stores, *, forwarder_id: str) -> None:
        self._endpoints, self._tasks = stores.endpoints, stores.tasks
        self._queue = stores.queue
        self._forwarder_id = forwarder_id

    def perform(self, steps: Sequence[do.StoreStep]) -> Sequence[Event]:
        """Perform steps of one kind. Blocks. A refusal concerns one endpoint only.

        :raises Unavailable: while a store is unavailable; all of the steps may be repeated.
        """
        return self._perform(steps[0], steps)

    @functools.singledispatchmethod
    def _perform(self, like: do.StoreStep, steps: Sequence[do.StoreStep]) -> Sequence[Event]:
        raise TypeError(f"no rule for {len(steps)} steps like {type(like).__name__}")

    # -- an agent connects ---------------------------------------------------------------------------------------------

    @_perform.register
    def _(self, like: do.ClaimEndpoint, steps: Sequence[do.ClaimEndpoint]) -> Sequence[Event]:
        # The endpoint may be deleted, or its key, although the connection and the ticket still exist.
        spools = self._endpoints.find_spools([step.endpoint_id for step in steps])
        keys = self._endpoints.find_endpoints_by_key([step.public_key for step in steps])
        there = [step for step in steps if step.endpoint_id in spools]
        foreign = [step for step in there if keys.get(step.public_key) != step.endpoint_id]
        own = [step for step in there if step not in foreign]
        old = [step for step in own if _is_old_copy(step, spools[step.endpoint_id])]
        known = [step for step in own if step not in old]
        wanted = [(step.endpoint_id, step.spool_id, step.weights) for step in known]
        fences = self._queue.claim(self._forwarder_id, wanted, ttl_s=like.ttl_s)
        # Read after the claim: who sets the list later ends this claim afterwards.
        restricted = self._endpoints.find_restricted([step.endpoint_id for step in known])
        claimed: list[Event] = [
            ev.ClaimRefused(step.endpoint_id, step.generation, fence)
            if isinstance(fence, EndpointInUse)
            else ev.EndpointClaimed(step.endpoint_id, step.generation, fence, step.endpoint_id in restricted)
            for step, fence in zip(known, fences, strict=True)
        ]
        marks = {
            step.endpoint_id: SpoolMark(step.spool_id, step.spool_generation)
            for step, fence in zip(known, fences, strict=True)
            if not isinstance(fence, EndpointInUse)
        }
        self._endpoints.claim_spools({id_: mark for id_, mark in marks.items() if mark != spools[id_]})
        claimed += [ev.ClaimRefused(step.endpoint_id, step.generation, outdated(step.endpoint_id)) for step in old]
        claimed += [
            ev.ClaimRefused(step.endpoint_id, step.generation, _without_key(step.endpoint_id)) for step in foreign
        ]
        deleted = [step for step in steps if step.endpoint_id not in spools]
        return claimed + [
            ev.ClaimRefused(step.endpoint_id, step.generation, _deleted(step.endpoint_id)) for step in deleted
        ]

    @_perform.register
    def _(self, like: do.RecordSpoolGeneration, steps: Sequence[do.RecordSpoolGeneration]) -> Sequence[Event]:  # noqa: ARG002
        self._endpoints.raise_spools(
            {step.endpoint_id: SpoolMark(step.spool_id, step.spool_generation) for step in steps}
        )
        return [ev.SpoolGenerationRecorded(step.endpoint_id, step.fence, step.spool_generation) for step in steps]

    @_perform.register
    def _(self, like: do.ReadLeases, steps: Sequence[do.ReadLeases]) -> Sequence[Event]:  # noqa: ARG002
        found = self._queue.leased([(step.endpoint_id, step.fence) for step in steps])
        return [
            refused(step, leases)
            if isinstance(leases, Fenced | QueueDataLost)
            else ev.LeasesRead(step.endpoint_id, step.fence, leases)
            for step, leases in zip(steps, found, strict=True)
        ]

    @_perform.register
    def _(self, like: do.RestoreQueue, steps: Sequence[do.RestoreQueue]) -> Sequence[Event]:  # noqa: ARG002
        busy = self._tasks.find_busy_endpoints([step.endpoint_id for step in steps])
        refusals = {id(step): self._fill(step) for step in steps if step.endpoint_id in busy}
        filled = [step for step in steps if not refusals.get(id(step))]
        marked = self._queue.mark_restored([(step.endpoint_id, step.fence) for step in filled])
        refusals |= {id(step): refusal for step, refusal in zip(filled, marked, strict=True)}
        return [
            refused(step, refusal)
            if (refusal := refusals[id(step)])
            else ev.QueueRestored(step.endpoint_id, step.fence)
            for step in steps
        ]

    def _fill(self, step: do.RestoreQueue) -> Fenced | QueueDataLost | None:
        """Write an endpoint's open tasks to its queue, page by page."""
        after = ""
        try:
            while page := self._tasks.list_open_tasks(step.endpoint_id, after=after, limit=_PAGE):
                tasks = [QueuedTask.of(task) for task in page]
                self._queue.restore(step.endpoint_id, step.fence, tasks, held=step.held, lease_s=step.lease_s)
                after = page[-1].task_id
        except (Fenced, QueueDataLost) as refusal:
            return refusal
        return None

    @_perform.register
    def _(self, like: do.ReadTasks, steps: Sequence[do.ReadTasks]) -> Sequence[Event]:  # noqa: ARG002
        wanted = [task_id for step in steps for task_id in step.task_ids]
        tasks: dict[str, Task] = {}
        for start in range(0, len(wanted), _PAGE):
            tasks |= self._tasks.get_tasks(wanted[start : start + _PAGE], with_bodies=False)
        return [self._read(step, tasks) for step in steps]

    def _read(self, step: do.ReadTasks, known: Mapping[str, Task]) -> Event:
        tasks = {task_id: known[task_id] for task_id in step.task_ids if task_id in known}
        deliveries = {
            task_id: delivery_of(self._tasks, task_id)
            for task_id in step.unheld
            if (task := tasks.get(task_id)) and not task.options.idempotent and not task.state.is_terminal
        }
        spools = {task_id: sent_to for task_id, (sent_to, _) in deliveries.items()}
        accepted = frozenset(task_id for task_id, (_, is_accepted) in deliveries.items() if is_accepted)
        return ev.TasksRead(step.endpoint_id, step.fence, tasks, spools, accepted)

    # -- presence and lease renewal ------------------------------------------------------------------------------------

    @_perform.register
    def _(self, like: do.SetPresence, steps: Sequence[do.SetPresence]) -> Sequence[Event]:
        left = [step for step in steps if not step.online]  # A new owner of such an endpoint records its own presence.
        owned = [(step.endpoint_id, step.fence) for step in left]
        refusals = self._queue.mark_disconnected(self._forwarder_id, owned, ttl_s=like.ttl_s)
        events = [refused(step, refusal) for step, refusal in zip(left, refusals, strict=True) if refusal]
        wrong = {id(event.step) for event in events}
        self._endpoints.set_presence([_presence(step) for step in steps if id(step) not in wrong])
        return events

    @_perform.register
    def _(self, like: do.MaintainEndpoint, steps: Sequence[do.MaintainEndpoint]) -> Sequence[Event]:
        held = {step.endpoint_id: HeldLeases(step.fence, step.spool_id, step.renew) for step in steps}
        found = self._queue.maintain(self._forwarder_id, held, ttl_s=like.ttl_s, lease_s=like.lease_s)
        return [_maintained(step, found[step.endpoint_id]) for step in steps]

    # -- dispatching ---------------------------------------------------------------------------------------------------

    @_perform.register
    def _(self, like: do.LeaseTasks, steps: Sequence[do.LeaseTasks]) -> Sequence[Event]:
        wanted = {step.endpoint_id: (step.fence, step.limit, step.reserve) for step in steps}
        found = self._queue.lease(wanted, lease_s=like.lease_s)
        return [_leased(step, found[step.endpoint_id]) for step in steps]

    @_perform.register
    def _(self, like: do.ReadCancels, steps: Sequence[do.ReadCancels]) -> Sequence[Event]:  # noqa: ARG002
        found = self._queue.cancel_requests([(step.endpoint_id, step.fence) for step in steps])
        return [
            refused(step, task_ids)
            if isinstance(task_ids, Fenced | QueueDataLost)
            else ev.CancelsRead(step.endpoint_id, step.fence, task_ids)
            for step, task_ids in zip(steps, found, strict=True)
        ]


def _deleted(endpoint_id: str) -> EndpointUnknown:
    return EndpointUnknown(
        f"Endpoint {endpoint_id} was deleted.",
        hint="Move endpoint.json out of the endpoint's directory and start it: it is registered as a new endpoint.",
    )


def _without_key(endpoint_id: str) -> TicketInvalid:
    return TicketInvalid(
        f"The key of this connection does not belong to endpoint {endpoint_id} any more.",
        hint="Connect again with a new ticket. If the key was revoked, move curve.secret out of the endpoint's "
        "directory first.",
    )


def _is_old_copy(step: do.ClaimEndpoint, mark: SpoolMark) -> bool:
    return step.spool_id == mark.spool_id and step.spool_generation < mark.generation


def delivery_of(tasks: Tasks, task_id: str) -> tuple[frozenset[str], bool]:
    """The spools that a task was sent to, and whether an agent has accepted it. For tasks that may not run twice."""
    events = tasks.list_events(task_id)
    spools = frozenset(
        event.detail["spool_id"]
        for event in events
        if event.reporter is Reporter.FORWARDER and "spool_id" in event.detail
    )
    return spools, any(event.reporter is Reporter.AGENT for event in events)


def refused(step: do.StoreStep, refusal: Fenced | QueueDataLost) -> ev.StepFenced | ev.StepLost:
    """The event for a refused step."""
    assert isinstance(step, do.EndpointStep), f"{type(step).__name__} does not concern an endpoint with an owner"
    return ev.StepFenced(step) if isinstance(refusal, Fenced) else ev.StepLost(step)


def _presence(step: do.SetPresence) -> Presence:
    return Presence(step.endpoint_id, step.online, step.status, step.qos)


def _maintained(step: do.MaintainEndpoint, found: MaintenanceResult | Fenced | QueueDataLost) -> Event:
    if not isinstance(found, MaintenanceResult):
        return refused(step, found)
    return ev.EndpointMaintained(step.endpoint_id, step.fence, found.reaped, found.outbox)


def _leased(step: do.LeaseTasks, found: Sequence[LeasedTask] | Fenced | QueueDataLost) -> Event:
    if isinstance(found, Fenced | QueueDataLost):
        return refused(step, found)
    return ev.TasksLeased(step.endpoint_id, step.fence, step.limit, found, step.reserve)
