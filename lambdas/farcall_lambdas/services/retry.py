"""Retry: finished tasks run again as new ones; dead letters are discarded."""

from __future__ import annotations

from typing import Final

from farcall_common.errors import Conflict, InvalidRequest
from farcall_common.store.model import Task
from farcall_common.wire.ids import new_task_id
from farcall_common.wire.states import TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.models.tasks import BlobRefShape, Payload, Submit
from farcall_lambdas.services.base import Context, Service
from farcall_lambdas.services.results import ResultService
from farcall_lambdas.services.submit import SubmitService, Submitted

#: How a sealed call begins that travels as text (see :mod:`farcall_common.sealing`).
_SEALED: Final = b"fs\n"


class RetryService(Service):
    """Retries and discards finished tasks of the caller; their results stay."""

    def __init__(self, context: Context, results: ResultService, submit: SubmitService) -> None:
        super().__init__(context)
        self._results = results
        self._submit = submit

    def retry(self, identity: Identity, task_id: str, *, as_task_id: str | None = None) -> Submitted:
        """Submit a finished task again as a new one, with the same version of the function, arguments, endpoint, group
        and options. Repeating it with the same ``as_task_id`` is harmless.

        :raises TaskUnknown: if the caller has no such task.
        :raises Conflict: while it is not finished, when its arguments have been deleted, and for a sealed call.
        :raises FarcallError: as a submit does.
        """
        task = self._results.task(identity, task_id)
        if not task.state.is_terminal:
            hint = "Only a finished task can be retried: wait for it, or cancel it."
            raise Conflict(f"Task {task_id} is {task.state}.", hint=hint)
        if _is_sealed(task):
            raise Conflict(
                f"Task {task_id} is a sealed call, which its endpoint runs as this task only.",
                hint="Submit the call again.",
            )
        if as_task_id == task_id:
            raise InvalidRequest(
                "The new task has the id of the finished one.", hint="Choose a new id for the new task."
            )
        reference = f"{task.function_id}@{task.function_version}"
        wanted = Submit.model_validate(
            {
                "task_group_id": task.task_group_id,
                "tasks": {reference: [self._payload(task)]},
                "task_ids": {reference: [as_task_id or new_task_id()]},
                **task.options.to_json(),
                "memoize": False,  # a retry always runs
            }
        )
        return self._submit.submit(identity, task.endpoint_id, wanted, retry_of=task_id)

    def discard(self, identity: Identity, task_id: str) -> None:
        """Remove a dead letter from the list and delete its arguments; repeating it is harmless.

        :raises TaskUnknown: if the caller has no such task.
        :raises Conflict: if it is not a dead letter.
        """
        task = self._results.task(identity, task_id)
        if task.state is not TaskState.DEAD_LETTERED:
            raise Conflict(f"Task {task_id} is {task.state}.", hint="Only a dead letter can be discarded.")
        if _has_payload(task):
            done = self._entry(identity, "task.discard", task_id, owner_id=task.owner_id)
            self._stores.tasks.audited(done).discard_tasks([task_id])

    def _payload(self, task: Task) -> Payload:
        ref = task.payload_ref
        if ref is not None and self._stores.blobs.size_bytes(ref.blob_key) is not None:
            return BlobRefShape(blob_key=ref.blob_key, size_bytes=ref.size_bytes, sha256=ref.sha256)
        if task.payload is not None:
            return task.payload.decode()
        raise Conflict(
            f"The arguments of task {task.task_id} have been deleted.",
            hint="Submit the function again with its arguments.",
        )


def _is_sealed(task: Task) -> bool:
    """Whether a call is sealed, as far as it shows here: the endpoint refuses the retry of any that is."""
    return (task.payload or b"").startswith(_SEALED) or (task.error is not None and task.error.sealed is not None)


def _has_payload(task: Task) -> bool:
    return task.payload is not None or task.payload_ref is not None
