"""Sealed calls at an agent: opens them, refuses those that it may not run, and seals their results."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from farcall_common.errors import ErrorRecord, SealInvalid
from farcall_common.graphs import STAGES, VALUES
from farcall_common.limits import MAX_INLINE_BYTES
from farcall_common.sealing import Answer, SealingSecrets, is_sealed, is_sealed_text, open_call, seal_answer
from farcall_common.staging import FILES
from farcall_common.wire import OutputPiece, OutputText, TaskSpec
from farcall_endpoint.agent.core.graphs import fewer
from farcall_endpoint.agent.core.tasks import OpenedCall, Task, TaskResult
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.host.shared_memory import Bytes

_MAX_SEALED_OUTPUT: Final = 2**31
"""Every piece of output is sealed as text."""
_SMALL_BYTES: Final = 64 * 1024
_MAX_SEALED_TEXT: Final = 60 * 1024
"""The forwarder cuts off what exceeds 64 KiB: a seal that is cut cannot be opened."""
_MAX_SEALED_BYTES: Final = _MAX_SEALED_TEXT * 3 // 4 - 64
_KEPT_CHARACTERS: Final = 3_000
"""Characters of the message and of the traceback that are kept. JSON may take six bytes per character."""
_SHORTENED: Final = ("exception_data", "traceback", "reasons", "stderr_tail", "stdout_tail", "hint", "exception_type")
"""Fields to remove, in this order, from an error record that is too large."""
_PLAIN_FIELDS: Final = ("code", "fault", "retryable", "retry_after_s", "attempt", "endpoint_id", "retries_used")


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
                callees=[(each.function_id, each.function_hash) for each in spec.options.callees],
                now=self._clock(),
            )
        except SealInvalid as error:
            return b"", _refused(outcomes.sealed_not_opened(error.record.message))
        return bytes(opened) if len(opened) <= _SMALL_BYTES else opened, OpenedCall(answer_key)


def _refused(record: ErrorRecord) -> OpenedCall:
    return OpenedCall(error=record.to_json())


def seal_result(task: Task, result: TaskResult) -> TaskResult:
    """The result of a task as it leaves the endpoint: sealed if the call was."""
    if not task.answer_key:
        return result
    seal = functools.partial(seal_answer, key=task.answer_key, task_id=task.task_id)
    if result.body is not None:
        body = seal(result.body, part=Answer.RESULT, max_text_bytes=MAX_INLINE_BYTES)
        result.body, result.size_bytes = body, len(body)
        result.sha256 = "" if is_sealed_text(body) else hashlib.sha256(body).hexdigest()
    if result.error is not None:
        sealed = seal(_encoded(result.error), part=Answer.ERROR, max_text_bytes=_MAX_SEALED_TEXT)
        kept: dict[str, Any] = {name: result.error[name] for name in _PLAIN_FIELDS if name in result.error}
        message = "The error is sealed: its submitter can read it."
        result.error = {**kept, "message": message, "sealed": bytes(sealed).decode()}
    if result.details:
        sealed = seal(_encoded_details(result.details), part=Answer.DETAILS, max_text_bytes=_MAX_SEALED_TEXT)
        result.details = {**_numbers(result.details), "sealed": bytes(sealed).decode()}
    return result


def seal_output(plain: OutputPiece, answer_key: bytes) -> OutputPiece:
    """A piece as it leaves the endpoint: without texts if the call was sealed."""
    if not answer_key or not (plain.stdout.text or plain.stderr.text):
        return plain
    content = {
        "attempt": plain.attempt,
        "complete": plain.complete,
        "stdout": _content(plain.stdout),
        "stderr": _content(plain.stderr),
    }
    sealed = seal_answer(
        msgspec.json.encode(content),
        answer_key,
        part=Answer.OUTPUT,
        task_id=plain.task_id,
        max_text_bytes=_MAX_SEALED_OUTPUT,
    )
    return msgspec.structs.replace(
        plain,
        stdout=msgspec.structs.replace(plain.stdout, text=""),
        stderr=msgspec.structs.replace(plain.stderr, text=""),
        sealed=bytes(sealed).decode(),
    )


def _content(text: OutputText) -> Mapping[str, Any]:
    return {"from": text.start, "next": text.next, "text": text.text}


def _encoded(error: Mapping[str, Any]) -> bytes:
    """An error as JSON of limited size."""
    kept = dict(error)
    for name in _SHORTENED:
        if len(encoded := msgspec.json.encode(kept)) <= _MAX_SEALED_BYTES:
            return encoded
        if name == "traceback" and isinstance(text := kept.get(name), str):
            kept[name] = text[-_KEPT_CHARACTERS:]
        else:
            kept.pop(name, None)
    return msgspec.json.encode({**kept, "message": str(kept.get("message", ""))[:_KEPT_CHARACTERS]})


def _encoded_details(details: Mapping[str, Any]) -> bytes:
    """Details as JSON; with fewer values and stages of a graph, and fewer files, if they would be too large."""
    kept = dict(details)
    while len(encoded := msgspec.json.encode(kept)) > _MAX_SEALED_BYTES:
        if kept.pop(VALUES, None) is None:
            if kept.get(STAGES):
                kept[STAGES] = fewer(kept[STAGES])
            elif files := kept.get(FILES):
                kept[FILES] = files[: len(files) // 2]
            else:
                break
    return encoded


def _numbers(details: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of details, such as times, which the cloud reads."""
    found: dict[str, Any] = {name: value for name, value in details.items() if isinstance(value, int | float)}
    for name, value in details.items():
        if isinstance(value, Mapping) and (inside := _numbers(value)):
            found[name] = inside
    return found
