"""Output of tasks: read from their endpoints, running or not, or from the record."""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from farcall_common.errors import Unavailable
from farcall_common.limits import MAX_OUTPUT_ANSWER_BYTES, MAX_OUTPUT_PIECE_BYTES, OUTPUT_ANSWER_S
from farcall_common.nested_json import sent_bytes
from farcall_common.store.model import OutputAsk, Task
from farcall_common.wire.ids import new_id
from farcall_common.wire.messages import OutputPiece, OutputText, OutputWanted
from farcall_common.wire.states import EndpointState, TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.services.base import Context, Service
from farcall_lambdas.services.endpoints import EndpointService

#: Requests of one process that wait for endpoints, and how long others wait for their turn: endpoints that do not
#: answer must not take all threads of the local API, which has eight.
_MOST_WAITING: Final = 4
_TURN_S: Final = 0.2
#: States in which no endpoint has the task.
_NOT_SENT: Final = frozenset({TaskState.RECEIVED, TaskState.WAITING_FOR_EP})


NO_ANSWER: Final = "NO_ANSWER"
Source = Literal["endpoint", "record", "none"]


@dataclasses.dataclass(frozen=True)
class Output:
    """A piece of a task's output. ``source``: "endpoint", "record" or "none"; ``reason``: why there is none from the
    endpoint."""

    task: Task
    piece: OutputPiece
    source: Source
    reason: str | None


class OutputService(Service):
    """Output of the caller's tasks; tasks of others do not exist."""

    def __init__(self, context: Context, endpoints: EndpointService) -> None:
        super().__init__(context)
        self._endpoints = endpoints
        self._turns = threading.BoundedSemaphore(_MOST_WAITING)

    def read(self, identity: Identity, wanted: Sequence[OutputWanted]) -> Mapping[str, Output | None]:
        """Output of tasks by id, from the offsets that are named; None for a task that the caller does not have."""
        by_id = {each.task_id: each for each in wanted}
        found = self._stores.tasks.get_tasks(list(by_id), with_bodies=False)
        own = {task_id: task for task_id, task in found.items() if identity.owns_task(task)}
        missing: dict[str, str] = {}
        at_endpoints: defaultdict[str, list[OutputWanted]] = defaultdict(list)
        for task_id, task in own.items():
            if task.state in _NOT_SENT:
                missing[task_id] = "NOT_STARTED"
            else:
                at_endpoints[task.endpoint_id].append(by_id[task_id])
        for endpoint_id in list(at_endpoints):
            if not self._is_online(endpoint_id):
                missing |= {each.task_id: "ENDPOINT_OFFLINE" for each in at_endpoints.pop(endpoint_id)}
        pieces, unanswered = self._ask(at_endpoints)
        missing |= unanswered
        outputs: dict[str, Output | None] = dict.fromkeys(by_id)
        outputs |= {id_: _from_endpoint(own[id_], piece, by_id[id_]) for id_, piece in pieces.items()}
        outputs |= {id_: _from_record(own[id_], reason, by_id[id_]) for id_, reason in missing.items()}
        room = self._settings.max_response_bytes
        for task_id, output in outputs.items():
            if output is not None:
                room -= (size := _size_bytes(output.piece))
                if room < 0:
                    room += size
                    outputs[task_id] = _without_text(output, by_id[task_id])
        return outputs

    def _is_online(self, endpoint_id: str) -> bool:
        endpoint = self._stores.endpoints.get_endpoint(endpoint_id)
        return endpoint is not None and self._endpoints.state(endpoint) is EndpointState.ONLINE

    def _ask(
        self, at_endpoints: Mapping[str, Sequence[OutputWanted]]
    ) -> tuple[Mapping[str, OutputPiece], Mapping[str, str]]:
        """The pieces that the endpoints answered, and the reasons why others have none, by task."""
        if not at_endpoints:
            return {}, {}
        request_id = new_id()
        streams = 2 * sum(map(len, at_endpoints.values()))
        max_bytes = min(MAX_OUTPUT_PIECE_BYTES, MAX_OUTPUT_ANSWER_BYTES // streams)
        asks = [OutputAsk(request_id, id_, tuple(tasks), max_bytes) for id_, tasks in at_endpoints.items()]
        reasons: dict[str, str] = {}
        waiting: dict[str, str] = {}
        pieces: dict[str, OutputPiece] = {}
        try:
            for ask, is_owned in zip(asks, self._stores.queue.request_output(asks), strict=True):
                for each in ask.tasks:
                    if is_owned:
                        waiting[each.task_id] = ask.endpoint_id
                    else:
                        reasons[each.task_id] = "ENDPOINT_OFFLINE"
            if self._turns.acquire(timeout=_TURN_S):
                try:
                    self._take(request_id, waiting, pieces)
                finally:
                    self._turns.release()
        except Unavailable:  # without the queue there is the record
            waiting = {
                each.task_id: ask.endpoint_id for ask in asks for each in ask.tasks if each.task_id not in pieces
            }
        return pieces, reasons | dict.fromkeys(waiting, NO_ANSWER)

    def _take(self, request_id: str, waiting: dict[str, str], pieces: dict[str, OutputPiece]) -> None:
        """Take pieces from the answers to a request, until none is missing or the time is over. ``waiting`` has the
        endpoints of the tasks: others cannot answer for them."""
        deadline = self._clock() + OUTPUT_ANSWER_S
        while waiting and (left_s := deadline - self._clock()) > 0:
            answer = self._stores.queue.take_output(request_id, timeout_s=left_s)
            if answer is None:
                return
            for piece in answer.pieces:
                if waiting.get(piece.task_id) == answer.endpoint_id:
                    del waiting[piece.task_id]
                    pieces[piece.task_id] = piece


def _from_endpoint(task: Task, piece: OutputPiece, wanted: OutputWanted) -> Output:
    if piece.reason:
        return _from_record(task, piece.reason, wanted)
    return Output(task, piece, "endpoint", None)


def _from_record(task: Task, reason: str, wanted: OutputWanted) -> Output:
    """Return the recorded output of a task: the end of its output, if the task failed or requested a record.

    The record has no position in the stream: it is a whole answer to a reader that has nothing yet.
    """
    has_ended = task.state.is_terminal
    if has_ended and reason == "NOT_STARTED":  # the endpoint has not heard, and will not start it
        reason = "NOT_KEPT"
    stdout = _tail(task, "stdout_tail", wanted.stdout_from)
    stderr = _tail(task, "stderr_tail", wanted.stderr_from)
    is_recorded = bool(stdout.text or stderr.text)
    is_complete = has_ended and (is_recorded or reason != NO_ANSWER)
    piece = OutputPiece(task_id=task.task_id, attempt=task.attempt, stdout=stdout, stderr=stderr, complete=is_complete)
    if is_recorded:
        return Output(task, piece, "record", reason)
    is_sealed = bool(task.error and task.error.sealed) or "sealed" in task.details
    return Output(task, piece, "none", "SEALED" if is_sealed else reason)


def _size_bytes(piece: OutputPiece) -> int:
    """Bytes of a piece in an answer, as it is sent."""
    return sent_bytes((piece.stdout.text, piece.stderr.text, piece.sealed))


def _without_text(output: Output, wanted: OutputWanted) -> Output:
    """A piece that does not fit the answer: its reader asks for it again."""
    starts = (max(0, wanted.stdout_from), max(0, wanted.stderr_from))
    stdout, stderr = (OutputText(start=start, next=start) for start in starts)
    piece = OutputPiece(task_id=wanted.task_id, attempt=output.piece.attempt, stdout=stdout, stderr=stderr)
    return Output(output.task, piece, "none", NO_ANSWER)


def _tail(task: Task, name: str, wanted_from: int) -> OutputText:
    text = getattr(task.error, name, None) or task.details.get(name)
    if wanted_from > 0 or not isinstance(text, str):
        return OutputText(start=max(0, wanted_from), next=max(0, wanted_from))
    return OutputText(next=len(text.encode()), text=text)
