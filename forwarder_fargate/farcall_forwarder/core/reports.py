"""Result handling: acceptances, state transitions, results and upload requests that a connected agent sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from farcall_common import wire
from farcall_common.errors import FunctionNotSigned
from farcall_common.limits import MAX_TRANSITIONS
from farcall_common.wire import Reporter, TaskState, is_uuid
from farcall_forwarder.core import events as ev
from farcall_forwarder.core import uploads
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.dispatch import lease_tasks
from farcall_forwarder.core.endpoint import Endpoint
from farcall_forwarder.core.leases import Stage
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.presence import on_heartbeat
from farcall_forwarder.core.results import MAX_ATTEMPTS, read_result
from farcall_forwarder.core.untrusted import NO_DETAIL, clean_retry, clean_time

#: Non-terminal states that an agent may report.
_TRANSIENT_STATES: Final = frozenset(
    state for state in TaskState if Reporter.AGENT in wire.REPORTERS[state] and not state.is_terminal
)


def on_message(endpoint: Endpoint, message: wire.Message, frames: Sequence[bytes], now: Instant) -> list[Action]:
    """Handle a message of the agent in an open session."""
    was_silent, endpoint.is_silent, endpoint.unheard_since = endpoint.is_silent, False, None
    if not was_silent:
        return _on_report(endpoint, message, frames, now)
    endpoint.expect_work()
    return [*_on_report(endpoint, message, frames, now), *lease_tasks(endpoint)]


def _on_report(endpoint: Endpoint, message: wire.Message, frames: Sequence[bytes], now: Instant) -> list[Action]:
    match message:
        case wire.Credit():
            return lease_tasks(endpoint)
        case wire.TasksAccepted(tasks=tasks):
            _accept(endpoint, tasks, now)
        case wire.TaskTransitions(transitions=transitions):
            _add_transitions(endpoint, transitions, now)
        case wire.TaskResults(results=specs):
            _take_results(endpoint, specs, frames, now)
        case wire.BlobRequest():
            return _grant_upload(endpoint, message, now)
        case wire.BlobPull() if endpoint.session:
            lease = endpoint.leases.get(message.task_id)
            piece = endpoint.file_pulls.piece(endpoint.session, message.task_id)
            ref = lease.payload_to_pull if lease else piece
            return endpoint.relay.pull(endpoint.session, message, ref, now)
        case wire.BlobPush() if endpoint.session:
            owner_id = _owner_of(endpoint, message, now)
            return endpoint.relay.push(endpoint.session, message, frames, owner_id, now)
        case wire.FilePull() if endpoint.session:
            return endpoint.file_pulls.pull(endpoint.session, message, endpoint.leases.get(message.task_id), now)
        case wire.FilesTaken(request_ids=request_ids) if endpoint.session:
            return endpoint.file_pulls.taken(endpoint.session, request_ids)
        case wire.FileRead():
            return endpoint.file_reads.answer(endpoint.endpoint_id, message, now)
        case wire.TaskOutput():
            return endpoint.output.answer(endpoint.endpoint_id, message, now)
        case wire.Heartbeat():
            return on_heartbeat(endpoint, message, now)
        case _:
            pass
    return []


def _accept(endpoint: Endpoint, tasks: Sequence[wire.TaskRef], now: Instant) -> None:
    """These tasks are in the agent's spool."""
    for ref in tasks:
        lease = endpoint.leases.get(ref.task_id)
        if lease and lease.stage is Stage.SENT:
            lease.stage = Stage.ACCEPTED
            lease.timings["accepted_at"] = now.epoch
            if not lease.idempotent:  # on record, so that it is never sent again
                endpoint.transitions.add(
                    lease.task_id,
                    TaskState.WAITING_FOR_NODES,
                    Reporter.AGENT,
                    at=now.epoch,
                    attempt=lease.attempt,
                    now_mono=now.mono,
                )


def _add_transitions(endpoint: Endpoint, transitions: Sequence[wire.TaskTransition], now: Instant) -> None:
    """Tasks have reached non-terminal states. Only that is recorded, and which retry a task waits for: the history of a
    task has no free text of an agent, and no more entries than the limit."""
    for transition in transitions:
        lease = endpoint.leases.get(transition.task_id)
        if lease and lease.stage is not Stage.RETURNED and transition.state in _TRANSIENT_STATES:
            lease.transitions += 1
            if lease.transitions > MAX_TRANSITIONS:
                continue
            endpoint.transitions.add(
                transition.task_id,
                transition.state,
                Reporter.AGENT,
                at=clean_time(transition.at, now=now.epoch) or now.epoch,
                attempt=min(transition.attempt, lease.attempt),
                now_mono=now.mono,
                detail=clean_retry(transition.detail, now=now.epoch) if transition.detail else NO_DETAIL,
            )


def _take_results(endpoint: Endpoint, specs: Sequence[wire.ResultSpec], frames: Sequence[bytes], now: Instant) -> None:
    """Tasks have ended. Results of tasks that were not leased here are verified before they count."""
    for spec in specs:
        lease = endpoint.leases.get(spec.task_id)
        if lease is None and not (is_uuid(spec.task_id) and spec.attempt < MAX_ATTEMPTS):
            continue
        result = read_result(
            spec,
            frames,
            endpoint_id=endpoint.endpoint_id,
            lease=lease,
            returned_at=now.epoch,
            max_inline_bytes=endpoint.policy.max_inline_bytes,
        )
        endpoint.finish(result, verified=lease is not None)
        if endpoint.session is not None and result.error is not None and result.error.code == FunctionNotSigned.code:
            endpoint.session.functions.clear()  # they are sent again: the function may be signed by then


def _grant_upload(endpoint: Endpoint, request: wire.BlobRequest, now: Instant) -> list[Action]:
    """A result is too big to travel inline: grant an upload, or refuse it with the reason."""
    owner_id = _owner_of(endpoint, request, now)
    error = uploads.refusal(request, is_leased=owner_id is not None, policy=endpoint.policy)
    if error:
        return endpoint.send(uploads.refused(request, error), now)
    ttl_s = endpoint.policy.upload_url_ttl_s
    return [uploads.order(request, endpoint.endpoint_id, endpoint.generation, owner_id=owner_id, ttl_s=ttl_s)]


def _owner_of(endpoint: Endpoint, upload: wire.BlobRequest | wire.BlobPush, now: Instant) -> str | None:
    """In whose name an agent may upload: that of a task's submitter, or a piece of a file that was requested of it."""
    if lease := endpoint.leases.get(upload.task_id):
        return lease.owner_id
    return endpoint.file_reads.grant(upload.task_id, upload.size_bytes, upload.sha256, now)


def on_upload_granted(endpoint: Endpoint, event: ev.UploadGranted, now: Instant) -> list[Action]:
    """Send the agent the URL of its upload."""
    return endpoint.send(uploads.granted(event), now)


def on_recorded(endpoint: Endpoint, recorded: ev.BatchFlushed, now: Instant) -> list[Action]:
    """The database has these results. A submitter without any task left at the agent, or without any that has a latency
    target, gets its next ones leased, although others have used up the credit."""
    results = [result for result in recorded.batch.results if result.task_id not in recorded.foreign]
    refs = tuple(wire.TaskRef(task_id=result.task_id, attempt=result.attempt) for result in results)
    ended = [lease for ref in refs if (lease := endpoint.leases.pop(ref.task_id, None))]
    actions = endpoint.send(wire.ResultsRecorded(tasks=refs), now) if refs else []
    if not {lease.lane for lease in ended} <= {lease.lane for lease in endpoint.leases.values()}:
        endpoint.may_have_new_submitters = endpoint.may_have_work
        actions += lease_tasks(endpoint)
    return actions
