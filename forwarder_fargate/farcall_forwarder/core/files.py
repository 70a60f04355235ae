"""Files of other endpoints: agents pull pieces of them for their tasks, and agents read pieces that others have pulled.

::

    agent ─ FilePull ─▶ forwarder ─ FileAsk ─▶ forwarder of the source ─ FileWanted ─▶ agent of the source
          ◀─ FilePiece ─          ◀─ FileAnswer ─                        ◀─ FileRead ─   (the piece is a blob)

The agent that pulls names a task that is leased to it, and a file of a source that the task's options have. Who has
submitted the task is what the lease says. The agent of the source reads with the rights of that identity; it may answer
what it likes, so only answers to what was requested of it in this session count, each once. The bytes do not pass
through here, unless an agent cannot reach the blob store (see :mod:`.relay`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from farcall_common import wire
from farcall_common.limits import MAX_FILE_BYTES
from farcall_common.store.model import PIECES, BlobRef, FileAnswer, FileAsk, FileMessage
from farcall_common.task_options import source_file
from farcall_common.wire import READ_REASONS, FilePiece, FilePull, FileRead, FileReason
from farcall_common.wire.messages import MAX_VERSION_CHARACTERS
from farcall_forwarder.core.actions import Action, StoreStep
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.leases import Lease, Stage
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.results import blob_key, is_sha256
from farcall_forwarder.core.sessions import PeerSession

#: Pulls of one agent that are not answered, and pieces that it has been given and has not taken.
MAX_PULLS: Final = 16
MAX_UNTAKEN: Final = 64
#: Requests to one agent at a time: of all submitters, and of one. One each submitter may have, whatever others have.
MAX_READS: Final = 64
MAX_READS_OF_ONE: Final = 16

Send = Callable[[wire.Message, Instant], list[Action]]


# -- steps and their answers -------------------------------------------------------------------------------------------


class AskFile(StoreStep, frozen=True):
    """Check that the submitter may use the endpoint, and has not stored too much; then ask its forwarder. Always
    answered by FileAsked. Not repeated while a store is unavailable: the agent tries again."""

    ask: FileAsk
    stored_bytes_per_day: int


class AnswerFile(StoreStep, frozen=True):
    """Answer a request of a forwarder. Not repeated; no event answers it."""

    forwarder_id: str
    answer: FileAnswer


class SignPiece(StoreStep, frozen=True):
    """Create a pre-signed GET for a piece, and count it as stored bytes of the payer. Always answered by
    PieceSigned. Not repeated, as AskFile."""

    request_id: str
    blob_key: str
    url_ttl_s: int
    payer_id: str
    piece_bytes: int
    stored_bytes_per_day: int


class DeletePieces(StoreStep, frozen=True):
    """Delete pieces. Not repeated, as they are deleted after a day anyway; no event answers it."""

    blob_keys: Sequence[str]


class FileAsked(Event, frozen=True):
    """The forwarder of the endpoint was asked, or the ``reason`` why not."""

    request_id: str
    reason: str = ""


class PieceSigned(Event, frozen=True):
    """``url`` is a pre-signed GET of so many bytes, or there is a ``reason`` why not."""

    request_id: str
    url: str = ""
    piece_bytes: int = 0
    reason: str = ""


class FileMessagesHeard(Event, frozen=True):
    """Forwarders request pieces of files, or answer."""

    messages: Sequence[FileMessage]


# -- for the agent that pulls ------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class _Pull:
    """A request of an agent. ``answer`` and ``ref`` are there when it was answered; then ``ends_at`` is when its piece
    is deleted, else when the agent gets NO_ANSWER.

    ``is_asking``: AskFile is under way. A pull that is over by then (``is_over``) stays until that has an answer, and
    counts as one of the agent's: however often an agent pulls and wants nothing, so many steps wait."""

    pull_id: str
    session: PeerSession
    message: FilePull
    payer_id: str
    ends_at: float
    answer: FileAnswer | None = None
    is_asking: bool = True
    is_over: bool = False

    @property
    def ref(self) -> BlobRef | None:
        """The piece, if there is one."""
        answer = self.answer
        if answer is None or not answer.piece_bytes:
            return None
        return BlobRef(piece_key(self.pull_id, answer.sha256), answer.piece_bytes, answer.sha256)


class FilePulls:
    """The pulls of all agents of this process, and their pieces that are not taken yet."""

    def __init__(self, policy: Policy, *, forwarder_id: str) -> None:
        self._policy = policy
        self._forwarder_id = forwarder_id
        self._numbers = itertools.count(1)
        self._pulls: dict[str, _Pull] = {}
        self._by_session: dict[str, dict[str, _Pull]] = {}  # and by the request's id

    def __len__(self) -> int:
        return len(self._pulls)

    def pull(self, session: PeerSession, message: FilePull, lease: Lease | None, now: Instant) -> list[Action]:
        """Ask for a piece of a file for a task that is leased to this endpoint."""
        own = self._by_session.setdefault(session.session_id, {})
        if message.request_id in own:
            return []
        if lease is None or (reason := self._refusal(own, message, lease)):
            return _send(session, _refused(message, reason if lease else FileReason.NOT_LEASED), now)
        pull_id = f"{session.session_id}.{next(self._numbers)}"
        pull = _Pull(pull_id, session, message, lease.payer_id, now.mono + self._policy.file_pull_s)
        self._pulls[pull_id] = own[message.request_id] = pull
        ask = FileAsk(
            pull_id,
            self._forwarder_id,
            message.endpoint_id,
            lease.owner_id,
            message.path,
            message.offset_bytes,
            min(message.max_bytes, self._policy.file_piece_bytes),
            lease.payer_id,
        )
        return [AskFile(ask, self._policy.stored_bytes_per_day)]

    def _refusal(self, own: Mapping[str, _Pull], message: FilePull, lease: Lease) -> str:
        """Why nothing is asked for; empty if it is."""
        if lease.stage in (Stage.PREPARING, Stage.RETURNED) or lease.cancelled:
            return FileReason.NOT_LEASED
        is_named = source_file(message.endpoint_id, message.path) in lease.source_files
        if message.endpoint_id not in lease.sources or not is_named:
            return FileReason.NOT_A_SOURCE
        if message.offset_bytes + message.max_bytes > self._policy.max_relayed_file_bytes:
            return FileReason.TOO_LARGE
        open_pulls = sum(each.answer is None for each in own.values())
        is_full = open_pulls >= MAX_PULLS or len(own) >= MAX_PULLS + MAX_UNTAKEN
        return FileReason.BUSY if is_full else ""

    def on_asked(self, event: FileAsked, now: Instant) -> list[Action]:
        """The forwarder of the source was asked, or could not be."""
        pull = self._pulls.get(event.request_id)
        if pull is None:
            return []
        pull.is_asking = False
        if pull.is_over:
            return self._end(pull)
        return self._refuse(pull, event.reason, now) if event.reason else []

    def on_answer(self, answer: FileAnswer, now: Instant) -> list[Action]:
        """The forwarder of the source has an answer."""
        pull = self._pulls.get(answer.request_id)
        if pull is None or pull.answer is not None or pull.message.endpoint_id != answer.endpoint_id:
            return _delete([BlobRef(piece_key(answer.request_id, answer.sha256), 0, "")] if answer.piece_bytes else [])
        reason = answer.reason
        if not reason and answer.size_bytes > self._policy.max_relayed_file_bytes:
            reason = FileReason.TOO_LARGE
        pull.answer = answer
        if pull.is_over:
            return self._end(pull)
        if reason or pull.ref is None:
            return [*self._end(pull), *_send(pull.session, _piece(pull.message, answer, reason=reason), now)]
        pull.ends_at = now.mono + self._policy.file_piece_s
        url_ttl_s, per_day = round(self._policy.file_piece_s), self._policy.stored_bytes_per_day
        return [SignPiece(pull.pull_id, pull.ref.blob_key, url_ttl_s, pull.payer_id, pull.ref.size_bytes, per_day)]

    def on_signed(self, event: PieceSigned, now: Instant) -> list[Action]:
        """The agent gets the URL of a piece, or the reason why there is none."""
        pull = self._pulls.get(event.request_id)
        if pull is None or pull.answer is None:
            return []
        if event.reason:
            return self._refuse(pull, event.reason, now)
        return _send(pull.session, _piece(pull.message, pull.answer, url=event.url), now)

    def taken(self, session: PeerSession, request_ids: Sequence[str]) -> list[Action]:
        """The agent does not need these pieces any more."""
        own = self._by_session.get(session.session_id, {})
        return [action for id_ in request_ids if (pull := own.get(id_)) for action in self._end_when_asked(pull)]

    def piece(self, session: PeerSession, request_id: str) -> BlobRef | None:
        """The piece that an agent has been given for a request."""
        pull = self._by_session.get(session.session_id, {}).get(request_id)
        return None if pull is None else pull.ref

    def close(self, session: PeerSession) -> list[Action]:
        """A session has ended."""
        own = self._by_session.get(session.session_id, {})
        actions = [action for pull in list(own.values()) for action in self._end(pull)]
        self._by_session.pop(session.session_id, None)
        return actions

    def tick(self, now: Instant) -> list[Action]:
        """End pulls without an answer, and pieces that were not taken."""
        actions: list[Action] = []
        for pull in [each for each in self._pulls.values() if now.mono >= each.ends_at and not each.is_over]:
            actions += self._refuse(pull, FileReason.NO_ANSWER, now) if pull.answer is None else self._end(pull)
        return actions

    def _refuse(self, pull: _Pull, reason: str, now: Instant) -> list[Action]:
        return [*self._end_when_asked(pull), *_send(pull.session, _refused(pull.message, reason), now)]

    def _end_when_asked(self, pull: _Pull) -> list[Action]:
        if pull.is_asking and pull.answer is None:
            pull.is_over = True
            return []
        return self._end(pull)

    def _end(self, pull: _Pull) -> list[Action]:
        del self._pulls[pull.pull_id]
        del self._by_session[pull.session.session_id][pull.message.request_id]
        return _delete([] if pull.ref is None else [pull.ref])


def piece_key(pull_id: str, sha256: str) -> str:
    """Return the key of a piece. Every request has its own, so that its pieces can be deleted separately."""
    return blob_key(piece_owner(pull_id), sha256)


def piece_owner(pull_id: str) -> str:
    """Return the part of a piece's key that names the owner in other keys."""
    return f"{PIECES}{pull_id}"


def _delete(refs: Sequence[BlobRef]) -> list[Action]:
    return [DeletePieces([each.blob_key for each in refs])] if refs else []


def _send(session: PeerSession, message: FilePiece, now: Instant) -> list[Action]:
    return [session.send(message, now)] if session.may_send(FilePiece) else []


def _refused(message: FilePull, reason: str) -> FilePiece:
    return FilePiece(request_id=message.request_id, reason=reason)


def _piece(message: FilePull, answer: FileAnswer, *, url: str = "", reason: str = "") -> FilePiece:
    if reason:
        return FilePiece(request_id=message.request_id, size_bytes=answer.size_bytes, reason=reason)
    return FilePiece(
        request_id=message.request_id,
        size_bytes=answer.size_bytes,
        version=answer.version,
        piece_bytes=answer.piece_bytes,
        sha256=answer.sha256,
        url=url,
    )


# -- for the agent that reads ------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, eq=False)
class _Read:
    """A request to an agent. ``sha256``: of the piece whose upload was granted first; others are not."""

    ask: FileAsk
    ends_at: float
    sha256: str = ""


def _payer(ask: FileAsk) -> str:
    return ask.payer or ask.submitter


class FileReads:
    """The requests that one agent has not answered, in one session."""

    def __init__(self) -> None:
        self._reads: dict[str, _Read] = {}

    def begin(self, ask: FileAsk, send: Send, now: Instant, *, limit_s: float) -> list[Action]:
        """Send a request to the agent, or answer at once if it has too many."""
        self._reads = {id_: each for id_, each in self._reads.items() if each.ends_at > now.mono}
        if ask.request_id in self._reads:
            return []
        own = sum(_payer(each.ask) == _payer(ask) for each in self._reads.values())
        if own and (len(self._reads) >= MAX_READS or own >= MAX_READS_OF_ONE):
            return [unread(ask, FileReason.BUSY)]
        wanted = wire.FileWanted(
            request_id=ask.request_id,
            submitter=ask.submitter,
            path=ask.path,
            offset_bytes=ask.offset_bytes,
            max_bytes=ask.max_bytes,
            payer="" if ask.payer == ask.submitter else ask.payer,
        )
        if actions := send(wanted, now):
            self._reads[ask.request_id] = _Read(ask, now.mono + limit_s)
            return actions
        return [unread(ask, FileReason.OFFLINE)]

    def grant(self, request_id: str, size_bytes: int, sha256: str, now: Instant) -> str | None:
        """Permit the upload of a piece, if this size was requested, and return its :func:`piece_owner`; else None. The
        first SHA-256 is binding: the agent may upload the same content repeatedly, but no other one."""
        read = self._open(request_id, now)
        if read is None or not 0 < size_bytes <= read.ask.max_bytes or read.sha256 not in ("", sha256):
            return None
        if is_sha256(sha256):
            read.sha256 = sha256
        return piece_owner(request_id)

    def answer(self, endpoint_id: str, message: FileRead, now: Instant) -> list[Action]:
        """Pass an agent's answer on, if it was asked, and if it can be one."""
        read = self._open(message.request_id, now)
        if read is None or not _is_sound(message, read):
            return []
        ask = read.ask
        del self._reads[message.request_id]
        if message.reason:
            return [unread(ask, message.reason)]
        answer = FileAnswer(
            ask.request_id,
            endpoint_id,
            message.size_bytes,
            message.version,
            message.piece_bytes,
            message.sha256,
        )
        return [AnswerFile(ask.forwarder_id, answer)]

    def close(self) -> Iterator[Action]:
        """The session has ended: nothing more will be answered."""
        reads, self._reads = self._reads, {}
        return (unread(read.ask, FileReason.OFFLINE) for read in reads.values())

    def _open(self, request_id: str, now: Instant) -> _Read | None:
        read = self._reads.get(request_id)
        return None if read is None or read.ends_at <= now.mono else read


def unread(ask: FileAsk, reason: str) -> Action:
    """The answer for a file that is not read."""
    return AnswerFile(ask.forwarder_id, FileAnswer(ask.request_id, ask.endpoint_id, reason=reason))


def _is_sound(message: FileRead, read: _Read) -> bool:
    """Whether a message can be an answer to a request."""
    if message.reason:
        return message.reason in READ_REASONS
    version = message.version
    return (
        message.size_bytes <= MAX_FILE_BYTES
        and 0 < len(version) <= MAX_VERSION_CHARACTERS
        and version.isascii()
        and version.isprintable()
        and message.piece_bytes <= read.ask.max_bytes
        and (is_sha256(message.sha256) if message.piece_bytes else not message.sha256)
        and (not message.piece_bytes or read.sha256 in ("", message.sha256))
    )
