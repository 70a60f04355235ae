"""Store steps that many endpoints share: done for all of them in a few round trips, each under its own fence."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from farcall_common.errors import EndpointInUse, EndpointUnknown, Fenced, QueueDataLost
from farcall_common.store.model import Holding, LeasedTask, Presence, QueuedTask, Task, Tended
from farcall_common.store.ports import Records
from farcall_common.store.settings import Stores
from farcall_common.wire import Reporter
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.events import Event

__all__ = ["SharedSteps", "refused", "spools_of"]

#: Tasks that are read at once; those of a queue come with their payloads.
_PAGE: Final = 500


class SharedSteps:
    """Performs store steps of one kind together.

    :param clock: epoch seconds, for the stores.
    """

    def __init__(self, stores: Stores, *, forwarder_id: str, clock: Callable[[], float]) -> None:
        self._records = stores.records
        self._queue = stores.queue
        self._forwarder_id = forwarder_id
        self._clock = clock

    def perform(self, steps: Sequence[do.StoreStep]) -> Sequence[Event]:
        """Do all of these steps, which are of one kind. Blocks. A refusal is that of one endpoint.

        :raises Unavailable: when a store is away; all of the steps may be repeated.
        """
        return self._perform(steps[0], steps)

    @functools.singledispatchmethod
    def _perform(self, like: do.StoreStep, steps: Sequence[do.StoreStep]) -> Sequence[Event]:
        raise TypeError(f"no rule for {steps}, which are like {like}")

    # -- an agent comes ------------------------------------------------------------------------------------------------

    @_perform.register
    def _(self, like: do.ClaimEndpoint, steps: Sequence[do.ClaimEndpoint]) -> Sequence[Event]:
        # A connection outlives its endpoint, and so do the key and the ticket that were good for it.
        registered = self._records.find_endpoints([step.endpoint_id for step in steps])
        known = [step for step in steps if step.endpoint_id in registered]
        wanted = [(step.endpoint_id, step.spool_id) for step in known]
        fences = self._queue.claim_many(self._forwarder_id, wanted, ttl_s=like.ttl_s, now=self._clock())
        claimed: list[Event] = [
            ev.ClaimRefused(step.endpoint_id, step.life, fence)
            if isinstance(fence, EndpointInUse)
            else ev.EndpointClaimed(step.endpoint_id, step.life, fence)
            for step, fence in zip(known, fences, strict=True)
        ]
        gone = [step for step in steps if step.endpoint_id not in registered]
        return claimed + [ev.ClaimRefused(step.endpoint_id, step.life, _deleted(step.endpoint_id)) for step in gone]

    @_perform.register
    def _(self, like: do.ReadLeases, steps: Sequence[do.ReadLeases]) -> Sequence[Event]:  # noqa: ARG002
        found = self._queue.leased_many([(step.endpoint_id, step.fence) for step in steps])
        return [
            refused(step, leases)
            if isinstance(leases, Fenced | QueueDataLost)
            else ev.LeasesRead(step.endpoint_id, step.fence, leases)
            for step, leases in zip(steps, found, strict=True)
        ]

    @_perform.register
    def _(self, like: do.RestoreQueue, steps: Sequence[do.RestoreQueue]) -> Sequence[Event]:  # noqa: ARG002
        busy = self._records.find_busy_endpoints([step.endpoint_id for step in steps])
        refusals = {id(step): self._fill(step) for step in steps if step.endpoint_id in busy}
        filled = [step for step in steps if not refusals.get(id(step))]
        marked = self._queue.mark_restored_many([(step.endpoint_id, step.fence) for step in filled])
        refusals |= {id(step): refusal for step, refusal in zip(filled, marked, strict=True)}
        return [
            refused(step, refusal)
            if (refusal := refusals[id(step)])
            else ev.QueueRestored(step.endpoint_id, step.fence)
            for step in steps
        ]

    def _fill(self, step: do.RestoreQueue) -> Fenced | QueueDataLost | None:
        """Bring an endpoint's open tasks into its queue, page by page."""
        after = ""
        try:
            while page := self._records.list_open_tasks(step.endpoint_id, after=after, limit=_PAGE):
                tasks = [QueuedTask.of(task) for task in page]
                self._queue.restore(
                    step.endpoint_id, step.fence, tasks, held=step.held, lease_s=step.lease_s, now=self._clock()
                )
                after = page[-1].task_id
        except (Fenced, QueueDataLost) as refusal:
            return refusal
        return None

    @_perform.register
    def _(self, like: do.ReadTasks, steps: Sequence[do.ReadTasks]) -> Sequence[Event]:  # noqa: ARG002
        wanted = [task_id for step in steps for task_id in step.task_ids]
        tasks: dict[str, Task] = {}
        for start in range(0, len(wanted), _PAGE):
            tasks |= self._records.get_tasks(wanted[start : start + _PAGE], with_bodies=False)
        return [self._read(step, tasks) for step in steps]

    def _read(self, step: do.ReadTasks, known: Mapping[str, Task]) -> Event:
        tasks = {task_id: known[task_id] for task_id in step.task_ids if task_id in known}
        spools = {
            task_id: spools_of(self._records, task_id)
            for task_id in step.unheld
            if (task := tasks.get(task_id)) and not task.idempotent and not task.state.is_terminal
        }
        return ev.TasksRead(step.endpoint_id, step.fence, tasks, spools)

    # -- it is there, or is not any more -------------------------------------------------------------------------------

    @_perform.register
    def _(self, like: do.SetPresence, steps: Sequence[do.SetPresence]) -> Sequence[Event]:
        left = [step for step in steps if not step.online]  # Whoever took such an endpoint over knows better.
        owned = [(step.endpoint_id, step.fence) for step in left]
        refusals = self._queue.leave_many(self._forwarder_id, owned, ttl_s=like.ttl_s, now=self._clock())
        events = [refused(step, refusal) for step, refusal in zip(left, refusals, strict=True) if refusal]
        wrong = {id(event.step) for event in events}
        self._records.set_presence([_presence(step) for step in steps if id(step) not in wrong])
        return events

    @_perform.register
    def _(self, like: do.KeepEndpoint, steps: Sequence[do.KeepEndpoint]) -> Sequence[Event]:
        held = {step.endpoint_id: Holding(step.fence, step.spool_id, step.renew) for step in steps}
        found = self._queue.tend(self._forwarder_id, held, ttl_s=like.ttl_s, lease_s=like.lease_s, now=self._clock())
        return [self._kept(step, found[step.endpoint_id]) for step in steps]

    def _kept(self, step: do.KeepEndpoint, found: Tended | Fenced | QueueDataLost) -> Event:
        if not isinstance(found, Tended):
            return refused(step, found)
        once = [leased.task.task_id for leased in found.reaped if not leased.task.idempotent]
        sent = {id_: task.attempt for id_, task in self._records.get_tasks(once).items()} if once else {}
        return ev.UpkeepDone(step.endpoint_id, step.fence, found.reaped, sent, found.outbox)

    # -- it has work ---------------------------------------------------------------------------------------------------

    @_perform.register
    def _(self, like: do.LeaseTasks, steps: Sequence[do.LeaseTasks]) -> Sequence[Event]:
        wanted = {step.endpoint_id: (step.fence, step.limit) for step in steps}
        found = self._queue.lease_many(wanted, lease_s=like.lease_s, now=self._clock())
        return [_leased(step, found[step.endpoint_id]) for step in steps]

    @_perform.register
    def _(self, like: do.ReadCancels, steps: Sequence[do.ReadCancels]) -> Sequence[Event]:  # noqa: ARG002
        found = self._queue.cancel_requests_many([(step.endpoint_id, step.fence) for step in steps])
        return [
            refused(step, task_ids)
            if isinstance(task_ids, Fenced | QueueDataLost)
            else ev.CancelsRead(step.endpoint_id, step.fence, task_ids)
            for step, task_ids in zip(steps, found, strict=True)
        ]


def _deleted(endpoint_id: str) -> EndpointUnknown:
    return EndpointUnknown(
        f"Endpoint {endpoint_id} was deleted.",
        hint="Move endpoint.json out of the endpoint's directory and start it: it is registered anew.",
    )


def spools_of(records: Records, task_id: str) -> frozenset[str]:
    """The spools that a task which may not run twice was ever sent to."""
    return frozenset(
        event.detail["spool_id"]
        for event in records.list_events(task_id)
        if event.reporter is Reporter.FORWARDER and "spool_id" in event.detail
    )


def refused(step: do.StoreStep, refusal: Fenced | QueueDataLost) -> ev.StepFenced | ev.StepLost:
    """What the core is told of a step that was refused."""
    assert isinstance(step, do.EndpointStep), f"{step} is not about a queue that somebody owns"
    return ev.StepFenced(step) if isinstance(refusal, Fenced) else ev.StepLost(step)


def _presence(step: do.SetPresence) -> Presence:
    return Presence(step.endpoint_id, step.online, step.status, dt.datetime.fromtimestamp(step.at, dt.UTC))


def _leased(step: do.LeaseTasks, found: Sequence[LeasedTask] | Fenced | QueueDataLost) -> Event:
    if isinstance(found, Fenced | QueueDataLost):
        return refused(step, found)
    return ev.TasksLeased(step.endpoint_id, step.fence, step.limit, found)
