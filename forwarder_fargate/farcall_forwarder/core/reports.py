"""Result handling: acceptances, state transitions, results and upload requests that an agent reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from farcall_common import wire
from farcall_common.wire import Reporter, TaskState, is_uuid
from farcall_forwarder.core import events as ev
from farcall_forwarder.core import results, uploads
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.endpoint_state import EndpointState
from farcall_forwarder.core.leases import Stage
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.untrusted import clean_details, clean_time

#: Non-terminal states that an agent may report.
_TRANSIENT_STATES: Final = frozenset(
    state for state in TaskState if Reporter.AGENT in wire.REPORTERS[state] and not state.is_terminal
)


class Reports:
    """Handles an agent's reports: transitions of leased tasks, and results of any task that may be its own."""

    def __init__(self, state: EndpointState) -> None:
        self._state = state

    def accepted(self, tasks: Sequence[wire.TaskRef], now: Instant) -> None:
        """These tasks are in the agent's spool."""
        for ref in tasks:
            lease = self._state.table.get(ref.task_id)
            if lease and lease.stage is Stage.SENT:
                lease.stage = Stage.ACCEPTED
                lease.timings["accepted_at"] = now.epoch
                if not lease.idempotent:  # on record, so that it is never sent again
                    self._state.context.transitions.add(
                        lease.task_id,
                        TaskState.WAITING_FOR_NODES,
                        Reporter.AGENT,
                        at=now.epoch,
                        attempt=lease.attempt,
                        now_mono=now.mono,
                    )

    def transitioned(self, transitions: Sequence[wire.TaskTransition], now: Instant) -> None:
        """Tasks have reached non-terminal states."""
        for transition in transitions:
            lease = self._state.table.get(transition.task_id)
            if lease and lease.stage is not Stage.RETURNED and transition.state in _TRANSIENT_STATES:
                self._state.context.transitions.add(
                    transition.task_id,
                    transition.state,
                    Reporter.AGENT,
                    at=clean_time(transition.at, now=now.epoch) or now.epoch,
                    attempt=min(transition.attempt, lease.attempt),
                    detail=clean_details(transition.detail) if transition.detail else None,
                    now_mono=now.mono,
                )

    def returned(self, specs: Sequence[wire.ResultSpec], frames: Sequence[bytes], now: Instant) -> None:
        """Tasks have ended. Results of tasks that were not leased here are verified before they count."""
        for spec in specs:
            lease = self._state.table.get(spec.task_id)
            if lease is None and not (is_uuid(spec.task_id) and spec.attempt < results.MAX_ATTEMPTS):
                continue
            result = results.read_result(
                spec,
                frames,
                endpoint_id=self._state.endpoint_id,
                lease=lease,
                returned_at=now.epoch,
                max_inline_bytes=self._state.context.policy.max_inline_bytes,
            )
            if lease:
                lease.stage = Stage.RETURNED
            self._state.context.transitions.drop(spec.task_id)
            self._state.context.outbox.add(result, verified=lease is not None)

    def grant(self, request: wire.BlobRequest, now: Instant) -> list[Action]:
        """A result is too big to travel inline: grant an upload, or refuse it with the reason."""
        lease = self._state.table.get(request.task_id)
        error = uploads.refusal(request, is_leased=lease is not None, policy=self._state.context.policy)
        if error:
            return self._state.send(uploads.refused(request, error), now)
        owner_id = lease.owner_id if lease else None
        ttl_s = self._state.context.policy.upload_url_ttl_s
        return [uploads.order(request, self._state.endpoint_id, self._state.generation, owner_id=owner_id, ttl_s=ttl_s)]

    def on_granted(self, event: ev.UploadGranted, now: Instant) -> list[Action]:
        """Send the agent the URL of its upload."""
        return self._state.send(uploads.granted(event), now)

    def on_recorded(self, recorded: ev.BatchFlushed, now: Instant) -> list[Action]:
        """The database has these results."""
        refs = tuple(
            wire.TaskRef(task_id=result.task_id, attempt=result.attempt)
            for result in recorded.batch.results
            if result.task_id not in recorded.foreign
        )
        self._state.table.drop(ref.task_id for ref in refs)
        return self._state.send(wire.ResultsRecorded(tasks=refs), now) if refs else []
