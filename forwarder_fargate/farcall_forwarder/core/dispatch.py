"""Dispatch: leases tasks of one endpoint's queue, up to the agent's credit, and sends them to the agent.

Without credit, tasks of new submitters are leased up to the agent's reserve. One lease step is under way at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Final

from farcall_common.environments import Environment
from farcall_common.store.model import FunctionBody, LeasedTask, QueuedTask, TaskResult
from farcall_common.trace_ids import trace_ids
from farcall_common.wire import Reporter, RunTasks, TaskState
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core import results
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.endpoint import Endpoint
from farcall_forwarder.core.leases import Lease, Stage
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.run_tasks import dispatches, orders, with_payload
from farcall_forwarder.core.sessions import PeerSession

#: Callees of the tasks of one lease step, about: reading them takes a tenth of a second.
_CALLEES_AT_ONCE: Final = 20_000


def lease_tasks(endpoint: Endpoint) -> list[Action]:
    """Lease tasks from the queue, if there may be some and the agent can take them."""
    if endpoint.is_leasing or not endpoint.may_have_work or not endpoint.is_serving:
        return []
    if (session := _session_for_tasks(endpoint)) is None:
        return []
    policy = endpoint.policy
    credit = session.wire.credit - endpoint.preparing
    limit = min(max(credit, 0), endpoint.lease_batch)
    reserve = max(min(session.wire.reserve, policy.max_reserve) + min(credit, 0), 0)
    reserve = reserve if endpoint.may_have_new_submitters else 0
    if not limit and not reserve:
        return []
    endpoint.is_leasing, endpoint.may_have_new_submitters = True, False
    if limit:
        endpoint.may_have_work = False
    return [do.LeaseTasks(endpoint.endpoint_id, endpoint.fence, limit, policy.lease_s, reserve)]


def on_leased(endpoint: Endpoint, event: ev.TasksLeased, now: Instant) -> list[Action]:
    """Send the tasks that are complete, and prepare the others."""
    endpoint.is_leasing = False
    if (session := _session_for_tasks(endpoint)) is None:
        return endpoint.requeue([leased.task.task_id for leased in event.tasks])
    if event.limit and len(event.tasks) >= event.limit:
        endpoint.may_have_work = True
    if callees := sum(len(leased.task.options.callees) for leased in event.tasks):
        fitting = max(1, _CALLEES_AT_ONCE * len(event.tasks) // callees)
        endpoint.lease_batch = min(fitting, endpoint.policy.max_lease_batch)
    elif event.tasks:
        endpoint.lease_batch = endpoint.policy.max_lease_batch
    if event.reserve and len(event.tasks) >= event.limit + event.reserve:
        endpoint.may_have_new_submitters = True
    ready: list[LeasedTask] = []
    unready: list[LeasedTask] = []
    expires_at = now.mono + endpoint.policy.lease_s
    for leased in event.tasks:
        task = leased.task
        if leased.cancel_requested:
            endpoint.finish(results.cancelled(task.task_id, endpoint_id=endpoint.endpoint_id, attempt=leased.attempt))
            continue
        if outside := _unknown_environment(endpoint, task):
            refused = results.cannot_contain(task, outside, endpoint_id=endpoint.endpoint_id, attempt=leased.attempt)
            endpoint.finish(refused)
            continue
        is_ready = task.options.idempotent and task.payload is not None and not _missing(endpoint, session, task)
        stage = Stage.SENT if is_ready else Stage.PREPARING
        endpoint.leases[task.task_id] = Lease.of_leased(leased, stage=stage, expires_at=expires_at)
        (ready if is_ready else unready).append(leased)
    return [
        *_run(endpoint, session, ready, {}, now),
        *_prepare(endpoint, session, unready, now),
        *lease_tasks(endpoint),
    ]


def _prepare(endpoint: Endpoint, session: PeerSession, tasks: Sequence[LeasedTask], now: Instant) -> list[Action]:
    if not tasks:
        return []
    functions = {each for leased in tasks for each in _missing(endpoint, session, leased.task, is_fetched=True)}
    policy = endpoint.policy
    endpoint.preparing += len(tasks)
    return [
        do.PrepareTasks(
            endpoint_id=endpoint.endpoint_id,
            generation=endpoint.generation,
            session_id=session.session_id,
            spool_id=endpoint.spool_id,
            tasks=tasks,
            functions=sorted(functions),
            blob_keys=sorted({t.task.payload_ref.blob_key for t in tasks if t.task.payload_ref}),
            dispatches=dispatches(tasks, spool_id=endpoint.spool_id, at=now.epoch),
            url_ttl_s=policy.download_url_ttl_s,
        )
    ]


def on_prepared(endpoint: Endpoint, event: ev.TasksPrepared, now: Instant) -> list[Action]:
    """Functions and payloads are fetched, and dispatches of tasks that may not run twice are recorded."""
    for function_id, versions in event.bodies.items():
        for function_hash, function in versions.items():
            endpoint.functions.add(function_id, function_hash, function)
    if endpoint.session is None or endpoint.session.session_id != event.order.session_id:
        return []  # The leases were returned when that session ended.
    endpoint.preparing -= len(event.order.tasks)
    if (session := _session_for_tasks(endpoint)) is None:
        return endpoint.requeue(endpoint.leases.pop_at(Stage.PREPARING))
    ready: list[LeasedTask] = []
    again: list[LeasedTask] = []
    requested = frozenset(event.order.functions)
    for leased in event.order.tasks:
        task = leased.task
        lease = endpoint.leases.get(task.task_id)
        if lease is None or lease.stage is not Stage.PREPARING or lease.attempt != leased.attempt:
            continue
        missing = _not_fetched(endpoint, session, task, event)
        if result := _result_without_run(endpoint, leased, lease, event, requested.intersection(missing)):
            endpoint.finish(result)
        elif missing:
            again.append(leased)  # it was evicted meanwhile, or is to be sent once more
        else:
            lease.stage = Stage.SENT
            ready.append(with_payload(leased, event.payloads) if task.is_spilled else leased)
    return [
        *_run(endpoint, session, ready, event.bodies, now, event.urls),
        *_prepare(endpoint, session, again, now),
        *lease_tasks(endpoint),
    ]


def _result_without_run(
    endpoint: Endpoint,
    leased: LeasedTask,
    lease: Lease,
    event: ev.TasksPrepared,
    deleted: Set[tuple[str, str]],
) -> TaskResult | None:
    """The result of a task that must not be sent; None for one to send. ``deleted`` are functions of it that the
    database does not have."""
    task = leased.task
    if lease.cancelled:
        return results.cancelled(task.task_id, endpoint_id=endpoint.endpoint_id, attempt=leased.attempt)
    if task.task_id in event.refused:
        reason = "The task was sent to the endpoint before, and the endpoint has lost it."
        return results.lost(task.task_id, endpoint_id=endpoint.endpoint_id, attempt=leased.attempt, reason=reason)
    if deleted:
        function_id = min(deleted)[0]
        return results.unknown_function(task, function_id, endpoint_id=endpoint.endpoint_id, attempt=leased.attempt)
    if task.is_spilled and task.task_id not in event.payloads:
        return results.unknown_task(task, endpoint_id=endpoint.endpoint_id, attempt=leased.attempt)
    return None


def _not_fetched(
    endpoint: Endpoint, session: PeerSession, task: QueuedTask, event: ev.TasksPrepared
) -> Sequence[tuple[str, str]]:
    """The functions of a prepared task whose bodies are not at hand."""
    missing = _missing(endpoint, session, task)
    return [(id_, hash_) for id_, hash_ in missing if hash_ not in event.bodies.get(id_, {})]


def _run(
    endpoint: Endpoint,
    session: PeerSession,
    tasks: Sequence[LeasedTask],
    fetched: Mapping[str, Mapping[str, FunctionBody]],
    now: Instant,
    urls: Mapping[str, str] | None = None,
) -> list[Action]:
    """Send tasks. Their functions are fetched, cached or known to the agent."""
    new = {_function_key(endpoint, t.task.function_id, t.task.function_hash): t.task.function_id for t in tasks}
    for leased in tasks:
        for each in leased.task.options.callees:
            new[_function_key(endpoint, each.function_id, each.function_hash)] = each.function_id
    functions = [
        (hash_, function)
        for (_, hash_), id_ in sorted((key, id_) for key, id_ in new.items() if key not in session.functions)
        if (function := fetched.get(id_, {}).get(hash_) or endpoint.functions.get(id_, hash_))
    ]
    session.functions |= new.keys()
    for leased in tasks:
        if leased.task.options.idempotent:  # The dispatch of the others was committed before.
            endpoint.transitions.add(
                leased.task.task_id,
                TaskState.WAITING_FOR_NODES,
                Reporter.FORWARDER,
                at=leased.leased_at,
                attempt=leased.attempt,
                now_mono=now.mono,
            )
    if tasks and endpoint.unheard_since is None:
        endpoint.unheard_since = now.mono
    limit = endpoint.policy.max_run_bytes
    traces = trace_ids(leased.task.traceparent for leased in tasks)
    log = [do.Log("tasks sent", {**session.names, "tasks": len(tasks), "trace_ids": traces})] if traces else []
    return log + [
        session.send(order, now, frames=frames)
        for order, frames in orders(
            tasks, new_functions=functions, urls=urls or {}, limit_bytes=limit, data_only=endpoint.data_only
        )
    ]


def _session_for_tasks(endpoint: Endpoint) -> PeerSession | None:
    """The session, if tasks may be sent in it."""
    session = endpoint.session
    if session is None or endpoint.is_silent or endpoint.context.is_draining or not session.may_send(RunTasks):
        return None
    return session


def _missing(
    endpoint: Endpoint, session: PeerSession, task: QueuedTask, *, is_fetched: bool = False
) -> Sequence[tuple[str, str]]:
    """The functions of a task, its own and those that it may call, by id and hash, of which neither the agent nor this
    process has the body. With ``is_fetched``, some are about to be fetched, which may evict others of the same task: of
    a task that calls functions, all that the agent does not have."""
    has_own = _has_function(endpoint, session, task.function_id, task.function_hash)
    missing = () if has_own else ((task.function_id, task.function_hash),)
    if not task.options.callees:
        return missing
    wanted = {(task.function_id, task.function_hash), *((c.function_id, c.function_hash) for c in task.options.callees)}
    if is_fetched:
        return [each for each in wanted if _function_key(endpoint, *each) not in session.functions]
    return [each for each in wanted if not _has_function(endpoint, session, *each)]


def _has_function(endpoint: Endpoint, session: PeerSession, function_id: str, function_hash: str) -> bool:
    """Whether the agent or this process has the body of a function."""
    if _function_key(endpoint, function_id, function_hash) in session.functions:
        return True
    is_cached = endpoint.functions.get(function_id, function_hash) is not None
    return is_cached and not endpoint.signed_functions  # it may have been signed since


def _function_key(endpoint: Endpoint, function_id: str, function_hash: str) -> tuple[str, str]:
    """Key of a function that a session has sent. If the endpoint checks signatures, the id is part of the key:
    functions with the same body may have different signatures, or none."""
    return (function_id if endpoint.signed_functions else "", function_hash)


def _unknown_environment(endpoint: Endpoint, task: QueuedTask) -> Environment | None:
    """An environment that a task needs and the agent does not run, if there is one."""
    environment = task.options.environment
    if environment is not None and environment.type not in endpoint.containers:
        return environment
    for each in task.options.callees:
        if each.environment is not None and each.environment.type not in endpoint.containers:
            return each.environment
    return None
