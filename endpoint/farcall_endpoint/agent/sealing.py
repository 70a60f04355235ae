"""Sealed calls at an agent: opens them, and refuses those that it may not run."""

from __future__ import annotations

import time
from collections.abc import Callable

from farcall_common.errors import ErrorRecord, SealInvalid
from farcall_common.sealing import SealingSecrets, is_sealed, open_call
from farcall_common.wire import TaskSpec
from farcall_endpoint import outcomes
from farcall_endpoint.agent.tasks import OpenedCall
from farcall_endpoint.shared_memory import Bytes

_SMALL_BYTES = 64 * 1024


class CallOpener:
    """Opens the calls of one endpoint.

    :param secrets: None opens no sealed call.
    :param is_required: whether calls that are not sealed are refused.
    :param was_opened: whether the sealed call of a task was accepted before, by the task's id. A task that is still
        here is delivered again after a lost connection, and is not started again; its call is not opened for that.
    :param clock: epoch seconds.
    """

    def __init__(
        self,
        secrets: SealingSecrets | None,
        *,
        endpoint_id: str,
        is_required: bool,
        was_opened: Callable[[str], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._secrets = secrets
        self._endpoint_id = endpoint_id
        self._is_required = is_required
        self._was_opened = was_opened
        self._clock = clock

    def open(self, spec: TaskSpec, payload: Bytes) -> tuple[Bytes, OpenedCall | None]:
        """The arguments of a task, and what is known of their seal; None if they are not sealed and need not be."""
        if not is_sealed(payload):
            return payload, _refused(outcomes.sealed_required()) if self._is_required else None
        if self._secrets is None:
            return b"", _refused(outcomes.sealed_not_opened("its configuration has `sealed: off`."))
        if self._was_opened(spec.task_id):
            return b"", _refused(outcomes.sealed_not_opened("it had the call before."))
        try:
            opened, answer_key = open_call(
                payload,
                self._secrets,
                endpoint_id=self._endpoint_id,
                function_id=spec.function_id,
                function_hash=spec.function_hash,
                task_id=spec.task_id,
                now=self._clock(),
            )
        except SealInvalid as error:
            return b"", _refused(outcomes.sealed_not_opened(error.record.message))
        return bytes(opened) if len(opened) <= _SMALL_BYTES else opened, OpenedCall(answer_key)


def _refused(record: ErrorRecord) -> OpenedCall:
    return OpenedCall(error=record.to_json())
