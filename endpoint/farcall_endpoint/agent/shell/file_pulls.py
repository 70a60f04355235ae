"""Files of other endpoints for tasks of this one: requests of the transfer process, which the agent passes to its
forwarder, and the answers.

No request of the process stays without an answer: without a session they wait for a while, and those that a session
has lost are sent again in the next one.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from farcall_common.fairness import FairQueue
from farcall_common.wire import BlobLocation, FilePiece, FilePull, FileReason, FilesTaken, Message, new_id
from farcall_endpoint.agent.core.tasks import Task
from farcall_endpoint.agent.shell.blobs import Blobs
from farcall_endpoint.files import orders
from farcall_endpoint.files.orders import BLOBS_UNREACHABLE, FORWARDER_TOO_OLD, NOT_CONNECTED, SEALED, Piece, Report

#: Pulls that are not answered. A forwarder permits so many.
_AT_ONCE: Final = 16
#: After so long without a session or without room at the source, the process gets that as an answer.
_WAIT_S: Final = 60.0
#: A source that has too many requests is asked again after so long.
_BUSY_S: Final = 1.0
#: A forwarder answers before that.
_ANSWER_LIMIT_S: Final = 180.0


class _Clock(Protocol):
    def monotonic(self) -> float: ...


@dataclasses.dataclass(slots=True, eq=False)
class _Pull:
    """``payer``: has turns for it. ``request_id``: of the message that was sent last, empty while it waits. ``piece``:
    the answer."""

    wanted: orders.PieceWanted
    payer: str
    give_up_at: float
    request_id: str = ""
    due_at: float = 0.0
    is_on_way: bool = False
    piece: FilePiece | None = None


class FilePulls:
    """All pulls of an agent. Instants are monotonic seconds.

    :param find: returns a task that the endpoint holds.
    :param send: sends a message to the forwarder, if there is a session.
    :param answer: gives an answer to the transfer process.
    """

    def __init__(
        self,
        *,
        find: Callable[[str], Task | None],
        send: Callable[[Message], None],
        answer: Callable[[Piece], None],
        blobs: Blobs,
        clock: _Clock,
    ) -> None:
        self._find = find
        self._send = send
        self._answer = answer
        self._blobs = blobs
        self._clock = clock
        self._most_bytes: int | None = None  # None: there is no session
        self._pulls: dict[int, _Pull] = {}
        self._by_request: dict[str, _Pull] = {}
        self._queue: FairQueue[_Pull] = FairQueue()
        self._on_way = 0
        self._again: list[tuple[float, int]] = []  # when a pull is sent again, and its number

    # -- the transfer process ------------------------------------------------------------------------------------------

    def reported(self, reports: Sequence[Report]) -> list[Report]:
        """Take out what concerns pieces; returns the other reports."""
        others: list[Report] = []
        for report in reports:
            match report:
                case orders.PieceWanted():
                    self._wanted(report)
                case orders.PieceUnreachable(number=number, problem=problem):
                    self._unreachable(number, problem)
                case orders.PieceTaken(number=number):
                    self._drop([number])
                case _:
                    others.append(report)
        return others

    def process_lost(self) -> None:
        """The transfer process has ended: no one waits for the answers."""
        self._drop(list(self._pulls))

    def _wanted(self, wanted: orders.PieceWanted) -> None:
        tasks = filter(None, map(self._find, wanted.task_ids))
        payer = next((task.share_of for task in tasks), wanted.submitter)
        pull = _Pull(wanted, payer, self._clock.monotonic() + _WAIT_S)
        self._pulls[wanted.number] = pull
        self._queue.add(pull.payer, pull)
        self._continue()

    def _unreachable(self, number: int, problem: str) -> None:
        pull = self._pulls.get(number)
        if pull is not None and pull.piece is not None:
            if self._blobs.store_unreachable(problem):
                self._relay(pull, pull.piece)
            else:
                self._answer(Piece(number, reason=BLOBS_UNREACHABLE, problem=problem))

    def _drop(self, numbers: Sequence[int]) -> None:
        taken: list[str] = []
        for number in numbers:
            if (pull := self._pulls.pop(number, None)) is None:
                continue
            if pull.request_id:
                taken.append(pull.request_id)
                self._by_request.pop(pull.request_id, None)
            if pull.is_on_way:
                self._off_way(pull)
            elif pull in self._queue.of(pull.payer):
                self._queue.remove(pull.payer, pull)
        if taken:
            self._send(FilesTaken(request_ids=tuple(taken)))
        self._continue()

    # -- the forwarder -------------------------------------------------------------------------------------------------

    def opened(self, most_bytes: int) -> None:
        """A session is open, in which a piece may have so many bytes; 0: its forwarder knows no files."""
        self._most_bytes = most_bytes
        self._continue()

    def closed(self) -> None:
        """The session is gone, and with it what was asked in it."""
        self._most_bytes = None
        give_up_at = self._clock.monotonic() + _WAIT_S
        self._by_request.clear()
        for pull in self._pulls.values():
            pull.request_id, pull.give_up_at = "", give_up_at
            if pull.is_on_way:
                self._off_way(pull)
                self._queue.put_back(pull.payer, pull)

    def received(self, message: FilePiece) -> None:
        """The forwarder answered."""
        pull = self._by_request.get(message.request_id)
        if pull is None or not pull.is_on_way:
            return
        self._off_way(pull)
        now = self._clock.monotonic()
        if message.reason == FileReason.BUSY and now < pull.give_up_at:
            del self._by_request[pull.request_id]
            pull.request_id = ""
            heapq.heappush(self._again, (now + _BUSY_S, pull.wanted.number))
        elif message.reason or not message.piece_bytes:
            self._end(pull)
            self._answer(self._as_order(pull, message))
        else:
            pull.piece = message
            if self._blobs.is_relayed:
                self._relay(pull, message)
            else:
                self._answer(self._as_order(pull, message))
        self._continue()

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Send what is to be sent again, and answer what has waited for too long."""
        if not self._pulls:
            return
        now = self._clock.monotonic()
        while self._again and self._again[0][0] <= now:
            pull = self._pulls.get(heapq.heappop(self._again)[1])
            if pull is not None:
                self._queue.add(pull.payer, pull)
                self._continue()
        if self._most_bytes is None:
            for pull in [each for each in self._queue.items() if now >= each.give_up_at]:
                self._queue.remove(pull.payer, pull)
                self._refuse(pull, NOT_CONNECTED)
        for pull in [each for each in self._pulls.values() if each.is_on_way and now >= each.due_at]:
            self._off_way(pull)
            self._refuse(pull, FileReason.NO_ANSWER)
            self._continue()

    def next_deadline(self) -> float | None:
        """When :meth:`tick` may have something to do."""
        if not self._pulls:
            return None
        deadlines = [self._again[0][0]] if self._again else []
        deadlines += [each.due_at for each in self._pulls.values() if each.is_on_way]
        if self._most_bytes is None:
            deadlines += [each.give_up_at for each in self._queue.items()]
        return min(deadlines, default=None)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Send those whose turn it is."""
        while self._most_bytes is not None and self._on_way < _AT_ONCE and (taken := self._queue.take()) is not None:
            pull = taken[1]
            held = [task for id_ in pull.wanted.task_ids if (task := self._find(id_)) is not None]
            if not self._most_bytes or not held or held[0].answer_key:
                self._queue.done(pull.payer)
                reason = SEALED if held and held[0].answer_key else FileReason.NOT_LEASED
                self._refuse(pull, reason if self._most_bytes else FORWARDER_TOO_OLD)
                continue
            wanted = pull.wanted
            pull.request_id, pull.is_on_way = new_id(), True
            pull.due_at = self._clock.monotonic() + _ANSWER_LIMIT_S
            self._by_request[pull.request_id] = pull
            self._on_way += 1
            self._send(
                FilePull(
                    request_id=pull.request_id,
                    task_id=held[0].task_id,
                    endpoint_id=wanted.endpoint_id,
                    path=wanted.path,
                    offset_bytes=wanted.offset_bytes,
                    max_bytes=min(wanted.max_bytes, self._most_bytes),
                )
            )

    def _off_way(self, pull: _Pull) -> None:
        pull.is_on_way = False
        self._on_way -= 1
        self._queue.done(pull.payer)

    def _relay(self, pull: _Pull, piece: FilePiece) -> None:
        """Get a piece by the forwarder."""
        request_id = pull.request_id

        def done(data: bytes, problem: str) -> None:
            if self._pulls.get(pull.wanted.number) is not pull:
                return
            if problem:
                self._answer(Piece(pull.wanted.number, reason=BLOBS_UNREACHABLE, problem=problem))
            else:
                self._answer(self._as_order(pull, piece, data))

        location = BlobLocation(blob_key="", size_bytes=piece.piece_bytes, sha256=piece.sha256)
        self._blobs.pull_piece(request_id, location, done)

    def _refuse(self, pull: _Pull, reason: str) -> None:
        self._end(pull)
        self._answer(Piece(pull.wanted.number, reason=reason))

    def _end(self, pull: _Pull) -> None:
        del self._pulls[pull.wanted.number]
        self._by_request.pop(pull.request_id, None)

    def _as_order(self, pull: _Pull, message: FilePiece, data: bytes = b"") -> Piece:
        return Piece(
            pull.wanted.number,
            message.size_bytes,
            message.version,
            message.piece_bytes,
            message.sha256,
            "" if data else message.url,
            data,
            self._most_bytes or 0,
            message.reason,
        )
