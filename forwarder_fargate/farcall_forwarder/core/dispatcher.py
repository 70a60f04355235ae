"""Dispatch: leases tasks of one endpoint's queue, up to the agent's credit, and sends them to the agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farcall_common.store.model import LeasedTask, TaskResult
from farcall_common.wire import Reporter, TaskState
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core import results
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.endpoint_state import EndpointPhase, EndpointState
from farcall_forwarder.core.leases import Lease, Stage
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.run_tasks import dispatches, orders, with_payload
from farcall_forwarder.core.sessions import PeerSession


class Dispatcher:
    """Leases tasks while the agent has credit and the queue may have some; one step at a time.

    Without credit, tasks of newcomers are leased up to the agent's reserve. Newcomers are submitters
    with no tasks at the agent, or with fewer than their weight.
    """

    def __init__(self, state: EndpointState) -> None:
        self._state = state
        self._is_leasing = False
        self._may_have_work = True
        self._may_have_newcomers = True
        #: Number of tasks in preparation for this session: they will use its credit.
        self._preparing = 0

    def expect_work(self) -> None:
        """The queue may have tasks."""
        self._may_have_work = self._may_have_newcomers = True

    def expect_newcomers(self) -> None:
        """The agent has finished all tasks of a submitter. The queue may have more of them."""
        self._may_have_newcomers = self._may_have_work

    def forget_step(self) -> None:
        """Forget the step under way: it belongs to an earlier claim, and its answer is ignored."""
        self._is_leasing = False

    def lease(self) -> list[Action]:
        """Ask the queue for tasks, if there may be some and the agent can take them."""
        if self._is_leasing or not self._may_have_work or self._state.phase is not EndpointPhase.SERVING:
            return []
        if (session := self._state.willing_session()) is None:
            return []
        policy = self._state.context.policy
        credit = session.wire.credit - self._preparing
        limit = min(max(credit, 0), policy.max_lease_batch)
        reserve = max(min(session.wire.reserve, policy.max_reserve) + min(credit, 0), 0)
        reserve = reserve if self._may_have_newcomers else 0
        if not limit and not reserve:
            return []
        self._is_leasing, self._may_have_newcomers = True, False
        if limit:
            self._may_have_work = False
        return [do.LeaseTasks(self._state.endpoint_id, self._state.fence, limit, policy.lease_s, reserve)]

    def on_leased(self, event: ev.TasksLeased, now: Instant) -> list[Action]:
        """Send the tasks that are complete, and prepare the others."""
        self._is_leasing = False
        if (session := self._state.willing_session()) is None:
            return self._state.requeue([leased.task.task_id for leased in event.tasks])
        if event.limit and len(event.tasks) >= event.limit:
            self._may_have_work = True
        if event.reserve and len(event.tasks) >= event.limit + event.reserve:
            self._may_have_newcomers = True
        ready: list[LeasedTask] = []
        unready: list[LeasedTask] = []
        expires_at = now.mono + self._state.context.policy.lease_s
        for leased in event.tasks:
            task = leased.task
            if leased.cancel_requested:
                self._state.finish(
                    results.cancelled(task.task_id, endpoint_id=self._state.endpoint_id, attempt=leased.attempt)
                )
                continue
            is_ready = (
                task.options.idempotent
                and task.payload is not None
                and self._state.has_function(session, task.function_hash)
            )
            stage = Stage.SENT if is_ready else Stage.PREPARING
            self._state.table[task.task_id] = Lease.of_leased(leased, stage=stage, expires_at=expires_at)
            (ready if is_ready else unready).append(leased)
        return [*self._run(session, ready, {}, now), *self._prepare(session, unready, now), *self.lease()]

    def _prepare(self, session: PeerSession, tasks: Sequence[LeasedTask], now: Instant) -> list[Action]:
        if not tasks:
            return []
        functions = {(t.task.function_id, t.task.function_hash) for t in tasks}
        policy = self._state.context.policy
        self._preparing += len(tasks)
        return [
            do.PrepareTasks(
                endpoint_id=self._state.endpoint_id,
                generation=self._state.generation,
                session_id=session.session_id,
                spool_id=self._state.spool_id,
                tasks=tasks,
                functions=sorted(each for each in functions if not self._state.has_function(session, each[1])),
                blob_keys=sorted({t.task.payload_ref.blob_key for t in tasks if t.task.payload_ref}),
                dispatches=dispatches(tasks, spool_id=self._state.spool_id, at=now.epoch),
                url_ttl_s=policy.download_url_ttl_s,
            )
        ]

    def on_prepared(self, event: ev.TasksPrepared, now: Instant) -> list[Action]:
        """Functions and payloads are fetched, and dispatches of tasks that may not run twice are recorded."""
        for function_hash, (name, body) in event.bodies.items():
            self._state.context.functions.add(function_hash, name, body)
        if self._state.session is None or self._state.session.session_id != event.order.session_id:
            return []  # The leases were returned when that session ended.
        self._preparing -= len(event.order.tasks)
        if (session := self._state.willing_session()) is None:
            return self._state.requeue(self._state.table.pop_at(Stage.PREPARING))
        ready: list[LeasedTask] = []
        for leased in event.order.tasks:
            task = leased.task
            lease = self._state.table.get(task.task_id)
            if lease is None or lease.stage is not Stage.PREPARING or lease.attempt != leased.attempt:
                continue
            if result := self._result_without_run(session, leased, lease, event):
                self._state.finish(result)
            else:
                lease.stage = Stage.SENT
                ready.append(with_payload(leased, event.payloads) if task.is_spilled else leased)
        return [*self._run(session, ready, event.bodies, now, event.urls), *self.lease()]

    def _result_without_run(
        self, session: PeerSession, leased: LeasedTask, lease: Lease, event: ev.TasksPrepared
    ) -> TaskResult | None:
        """The result of a task that must not be sent; None for one to send."""
        task = leased.task
        if lease.cancelled:
            return results.cancelled(task.task_id, endpoint_id=self._state.endpoint_id, attempt=leased.attempt)
        if task.task_id in event.refused:
            reason = "The task was sent to the endpoint before, and the endpoint has lost it."
            return results.lost(
                task.task_id, endpoint_id=self._state.endpoint_id, attempt=leased.attempt, reason=reason
            )
        if task.function_hash not in event.bodies and not self._state.has_function(session, task.function_hash):
            return results.unknown_function(task, endpoint_id=self._state.endpoint_id, attempt=leased.attempt)
        if task.is_spilled and task.task_id not in event.payloads:
            return results.unknown_task(task, endpoint_id=self._state.endpoint_id, attempt=leased.attempt)
        return None

    def _run(
        self,
        session: PeerSession,
        tasks: Sequence[LeasedTask],
        fetched: Mapping[str, tuple[str, bytes]],
        now: Instant,
        urls: Mapping[str, str] | None = None,
    ) -> list[Action]:
        """Send tasks. Their functions are fetched, cached or known to the agent."""
        new = {leased.task.function_hash for leased in tasks} - session.functions
        bodies = {h: body for h in sorted(new) if (body := fetched.get(h) or self._state.context.functions.get(h))}
        session.functions |= new
        for leased in tasks:
            if leased.task.options.idempotent:  # The dispatch of the others was committed before.
                self._state.context.transitions.add(
                    leased.task.task_id,
                    TaskState.WAITING_FOR_NODES,
                    Reporter.FORWARDER,
                    at=leased.leased_at,
                    attempt=leased.attempt,
                    now_mono=now.mono,
                )
        if tasks and self._state.unheard_since is None:
            self._state.unheard_since = now.mono
        limit = self._state.context.policy.max_run_bytes
        return [
            session.send(order, now, frames=frames)
            for order, frames in orders(tasks, bodies=bodies, urls=urls or {}, limit_bytes=limit)
        ]
