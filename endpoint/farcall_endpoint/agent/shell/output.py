"""Output requests at an agent: what running tasks have printed so far, and the end of what others printed.

A request is answered in parts: at once from the store, and for running tasks as soon as their managers have read it.
So nothing has to be remembered of it here.
"""

from __future__ import annotations

import codecs
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from farcall_common.limits import MAX_OUTPUT_ANSWER_BYTES, MAX_OUTPUT_PIECE_BYTES, MAX_OUTPUT_TASKS
from farcall_common.wire import OutputPiece, OutputRequest, OutputText, OutputWanted, TaskOutput
from farcall_endpoint.agent.core.tasks import Stage, Task, attempt_of
from farcall_endpoint.agent.shell.output_store import OutputStore
from farcall_endpoint.agent.shell.sealing import seal_output
from farcall_endpoint.contracts.agent_manager import OutputRead, ReadOutput, RunningOutput, WantedOutput
from farcall_endpoint.contracts.output import Stream

NOT_STARTED: Final = "NOT_STARTED"
NOT_KEPT: Final = "NOT_KEPT"

_LONGEST_CHARACTER: Final = 4


class OutputAnswers:
    """Answers requests for output.

    :param find: returns a task that the endpoint holds.
    :param ask: sends a request to a manager.
    :param send: sends an answer to the cloud.
    """

    def __init__(
        self,
        store: OutputStore,
        *,
        find: Callable[[str], Task | None],
        ask: Callable[[str, ReadOutput], None],
        send: Callable[[TaskOutput], None],
    ) -> None:
        self._store = store
        self._find = find
        self._ask = ask
        self._send = send

    def requested(self, request: OutputRequest) -> None:
        """Answer a request of the cloud as far as possible, and ask managers for the rest."""
        tasks = request.tasks[:MAX_OUTPUT_TASKS]
        share_bytes = MAX_OUTPUT_ANSWER_BYTES // (2 * max(1, len(tasks)))
        max_bytes = min(request.max_bytes, MAX_OUTPUT_PIECE_BYTES, share_bytes)
        at_managers: defaultdict[str, list[WantedOutput]] = defaultdict(list)
        pieces: list[OutputPiece] = []
        for wanted in tasks:
            task = self._find(wanted.task_id)
            if task is not None and task.stage is Stage.DISPATCHED and task.manager_id is not None:
                started = WantedOutput(wanted.task_id, attempt_of(task), wanted.stdout_from, wanted.stderr_from)
                at_managers[task.manager_id].append(started)
            else:
                pieces.append(self._kept(wanted, max_bytes))
        self._answer(request.request_id, pieces)
        for manager_id, asked in at_managers.items():
            self._ask(manager_id, ReadOutput(request.request_id, tuple(asked), max_bytes))

    def read(self, answers: Iterable[OutputRead]) -> None:
        """Managers have answered. What they reported before has been handled."""
        for answer in answers:
            self._answer(answer.request_id, [self._running(each, answer.max_bytes) for each in answer.tasks])

    def _answer(self, request_id: str, pieces: list[OutputPiece]) -> None:
        if pieces:
            self._send(TaskOutput(request_id=request_id, pieces=tuple(pieces)))

    def _running(self, read: RunningOutput, max_bytes: int) -> OutputPiece:
        wanted = read.wanted
        task = self._find(wanted.task_id)
        if not read.is_kept:
            return OutputPiece(task_id=wanted.task_id, attempt=wanted.start, reason=NOT_KEPT)
        if not read.is_running or task is None:
            request = OutputWanted(
                task_id=wanted.task_id, stdout_from=wanted.stdout_from, stderr_from=wanted.stderr_from
            )
            return self._kept(request, max_bytes)
        cut = functools.partial(piece, max_bytes=max_bytes, is_final=False)
        return seal_output(
            OutputPiece(
                task_id=wanted.task_id,
                attempt=wanted.start,
                stdout=cut(Stream(read.stdout_at, read.stdout), wanted_from=wanted.stdout_from),
                stderr=cut(Stream(read.stderr_at, read.stderr), wanted_from=wanted.stderr_from),
            ),
            task.answer_key,
        )

    def _kept(self, wanted: OutputWanted, max_bytes: int) -> OutputPiece:
        """Output of a task that does not run: of its last attempt, as far as it is kept."""
        task = self._find(wanted.task_id)
        has_ended = task is None or task.result is not None
        kept = self._store.read(
            wanted.task_id,
            stdout_from=wanted.stdout_from,
            stderr_from=wanted.stderr_from,
            most_bytes=max_bytes + _LONGEST_CHARACTER,
        )
        if kept is None:
            return OutputPiece(
                task_id=wanted.task_id,
                attempt=0 if task is None else attempt_of(task),
                stdout=nothing_from(wanted.stdout_from),
                stderr=nothing_from(wanted.stderr_from),
                complete=has_ended,
                reason=NOT_KEPT if has_ended else NOT_STARTED,
            )
        cut = functools.partial(piece, max_bytes=max_bytes, is_final=True)
        out = cut(kept.stdout, wanted_from=wanted.stdout_from)
        err = cut(kept.stderr, wanted_from=wanted.stderr_from)
        is_read = out.next >= kept.stdout_end and err.next >= kept.stderr_end
        return seal_output(
            OutputPiece(
                task_id=wanted.task_id,
                attempt=kept.attempt,
                stdout=out,
                stderr=err,
                complete=has_ended and is_read,
            ),
            kept.answer_key,
        )


def nothing_from(wanted_from: int) -> OutputText:
    """No bytes of a stream, for a reader that continues where it was."""
    return OutputText(start=max(0, wanted_from), next=max(0, wanted_from))


def piece(stream: Stream, *, wanted_from: int, max_bytes: int, is_final: bool) -> OutputText:
    """Up to ``max_bytes`` of a stream from an offset, or from the first byte that is there, which it is for a negative
    offset.

    The piece ends at a boundary of characters; what is not UTF-8 is replaced. ``is_final``: nothing will be added to
    the stream.
    """
    start = max(wanted_from, stream.start)
    data = stream.data[start - stream.start :]
    if start > max(0, wanted_from):  # the bytes before are gone, perhaps in the middle of a character
        skipped = next((n for n, byte in enumerate(data[:_LONGEST_CHARACTER]) if byte & 0xC0 != 0x80), 0)
        start, data = start + skipped, data[skipped:]
    cut = data[:max_bytes]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(cut, final=is_final and len(cut) == len(data))
    pending = len(decoder.getstate()[0])
    if pending == len(cut) >= max_bytes:  # the limit is shorter than a character
        text, pending = decoder.decode(b"", final=True), 0
    return OutputText(start=start, next=start + len(cut) - pending, text=text)
