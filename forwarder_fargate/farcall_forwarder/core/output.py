"""Output of tasks: requests of the API to agents, and the agents' answers.

An agent may answer what it likes, and when: of an answer only what was requested of this endpoint counts, each task
once, within the limits of the request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from farcall_common import wire
from farcall_common.limits import MAX_OUTPUT_PIECE_BYTES, MAX_OUTPUT_TASKS
from farcall_common.store.model import OutputAsk
from farcall_forwarder.core import actions as do
from farcall_forwarder.core.actions import Action
from farcall_forwarder.core.policy import Instant

#: Requests to one agent at a time.
MAX_REQUESTS: Final = 32
#: How long an agent may take: a little longer than the API waits.
_ANSWER_LIMIT_S: Final = 5.0
#: How long an answer waits for the API.
_ANSWER_TTL_S: Final = 15.0
_REASONS: Final = frozenset({"", "NOT_STARTED", "NOT_KEPT"})
#: Most bytes of a seal: Base64 of both texts as JSON, in which a byte may take six.
_SEALED_PER_BYTE: Final = 16
_SEALED_BYTES: Final = 1024


@dataclasses.dataclass
class _Request:
    """``open_tasks`` are not answered yet."""

    max_bytes: int
    open_tasks: dict[str, wire.OutputWanted]
    ends_at: float


class OutputRequests:
    """The requests that one agent has not answered, in one session."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}

    def begin(
        self, ask: OutputAsk, send: Callable[[wire.Message, Instant], list[Action]], now: Instant
    ) -> list[Action]:
        """Send a request to the agent, or answer at once if it has too many."""
        self._requests = {id_: each for id_, each in self._requests.items() if each.ends_at > now.mono}
        if ask.request_id in self._requests:
            return []
        if len(self._requests) >= MAX_REQUESTS:
            return [unanswered(ask, "NO_ANSWER")]
        wanted = {each.task_id: each for each in ask.tasks[:MAX_OUTPUT_TASKS]}
        max_bytes = min(ask.max_bytes, MAX_OUTPUT_PIECE_BYTES)
        message = wire.OutputRequest(request_id=ask.request_id, tasks=tuple(wanted.values()), max_bytes=max_bytes)
        if actions := send(message, now):
            self._requests[ask.request_id] = _Request(max_bytes, wanted, now.mono + _ANSWER_LIMIT_S)
        return actions

    def answer(self, endpoint_id: str, message: wire.TaskOutput, now: Instant) -> list[Action]:
        """Pass an agent's answer on, as far as it was requested."""
        request = self._requests.get(message.request_id)
        if request is None or request.ends_at <= now.mono:
            return []
        pieces = []
        for piece in message.pieces:
            wanted = request.open_tasks.get(piece.task_id)
            if wanted is not None and _is_sound(piece, wanted, request.max_bytes):
                del request.open_tasks[piece.task_id]
                pieces.append(piece)
        if not request.open_tasks:
            del self._requests[message.request_id]
        return [_answer(message.request_id, endpoint_id, pieces)] if pieces else []


def unanswered(ask: OutputAsk, reason: str) -> Action:
    """The answer for an agent that cannot be asked."""
    pieces = [wire.OutputPiece(task_id=wanted.task_id, reason=reason) for wanted in ask.tasks]
    return _answer(ask.request_id, ask.endpoint_id, pieces)


def _answer(request_id: str, endpoint_id: str, pieces: Iterable[wire.OutputPiece]) -> Action:
    return do.AnswerOutput(request_id, endpoint_id, tuple(pieces), _ANSWER_TTL_S)


def _is_sound(piece: wire.OutputPiece, wanted: wire.OutputWanted, max_bytes: int) -> bool:
    """Whether a piece can be an answer to what was requested, and is no larger."""
    return (
        piece.reason in _REASONS
        # As JSON, which is what the API's answer has: it is one for tasks of several endpoints, and has a limit.
        and len(msgspec.json.encode(piece.sealed)) <= _SEALED_PER_BYTE * max_bytes + _SEALED_BYTES
        and not (piece.sealed and (piece.stdout.text or piece.stderr.text))
        and _is_part(piece.stdout, wanted.stdout_from, max_bytes)
        and _is_part(piece.stderr, wanted.stderr_from, max_bytes)
    )


def _is_part(text: wire.OutputText, wanted_from: int, max_bytes: int) -> bool:
    size_bytes = text.next - text.start
    # A character is one byte or more; a byte that is no part of one becomes a character.
    return text.start >= wanted_from and len(text.text) <= size_bytes <= max_bytes
