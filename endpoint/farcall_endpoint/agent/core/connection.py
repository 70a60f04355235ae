"""Connection to a forwarder: opens, keeps and reopens the agent's session. No I/O; events and time in, actions out.

::

    REQUESTING ─addresses─▶ CONNECTING ─handshake─▶ HELLO_SENT ──Welcome──▶ OPEN ──Redirect──▶ (drains) ──┐
      ▲                      │ all tried, or our key refused  │ Refused     │ lost                        │
      └────── WAITING ◀──────┴────────────────────────────────┴─────────────┴─────────────────────────────┘

The waits have full jitter (M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015), so that the
agents of a dead forwarder do not reconnect all at once. Failures before a session do not count after it; sessions that
end at once, one after the other, do. While the ticket is valid, known forwarders are tried before the next request to
the API. Instants are monotonic seconds.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable
from typing import Final

import msgspec

from farcall_common.backoff import Backoff
from farcall_common.errors import (
    EndpointInUse,
    ErrorRecord,
    FarcallError,
    ProtocolError,
    SessionRefused,
    TicketInvalid,
    Unauthenticated,
    Unavailable,
    error_from_record,
)
from farcall_common.task_options import TaskOptions
from farcall_common.wire import (
    BlobGrant,
    BlobPiece,
    BlobTaken,
    CancelTasks,
    Credit,
    Envelope,
    FilePiece,
    FileWanted,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Phase,
    Redirect,
    Refused,
    ResultsRecorded,
    Role,
    RunTasks,
    Session,
    TaskSpec,
    Welcome,
)

_FIRST_WAIT_S: Final = 0.4
_LONGEST_WAIT_S: Final = 30.0
_HELLO_LIMIT_S: Final = 15.0
_STABLE_S: Final = 1.0
"""Least duration of a successful session. A shorter session counts as a failure."""
_TICKET_MARGIN_S: Final = 60.0
_IN_USE_PAUSE_S: Final = 1.0
_IN_USE_LIMIT_S: Final = 10.0
"""An agent that has died a moment ago may still count as connected; the forwarder notices when another one comes."""


class Address(msgspec.Struct, frozen=True):
    """Address of a forwarder, and the CURVE public key (Z85) that the forwarder must prove to own."""

    address: str
    server_key: str


# -- events ------------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True):
    """Base class of all events."""


class Started(Event, frozen=True):
    """The agent starts."""


class ApiAnswered(Event, frozen=True):
    """The API named forwarders, and issued a ticket with its validity in seconds."""

    forwarders: tuple[Address, ...]
    ticket: str
    ticket_ttl_s: float


class ApiFailed(Event, frozen=True):
    """The API named no forwarder, or another server answered in its place (``is_foreign``)."""

    error: ErrorRecord
    is_foreign: bool = False


class HandshakeDone(Event, frozen=True):
    """The forwarder's socket accepted the endpoint's key."""


class ConnectionLost(Event, frozen=True):
    """The socket failed, or was closed by the other side."""

    reason: str
    key_refused: bool = False


class Received(Event, frozen=True):
    """A message of the forwarder."""

    envelope: Envelope


class MalformedReceived(Event, frozen=True):
    """Bytes of the forwarder that are not a valid envelope."""

    reason: str


class Sent(Event, frozen=True):
    """A message was sent. Only what :meth:`Connection.may_send` permits may be sent."""

    message: Message


class Tick(Event, frozen=True):
    """The next deadline may have come."""


# -- actions -----------------------------------------------------------------------------------------------------------


class Action(msgspec.Struct, frozen=True):
    """Base class of all actions."""


class RequestForwarders(Action, frozen=True):
    """Request the forwarders' addresses. Answered by ApiAnswered or ApiFailed."""


class OpenSocket(Action, frozen=True):
    """Open a socket. Answered by HandshakeDone or ConnectionLost."""

    to: Address


class SendHello(Action, frozen=True):
    """Send a Hello with this ticket."""

    ticket: str


class Opened(Action, frozen=True):
    """The session is open."""

    welcome: Welcome


class Deliver(Action, frozen=True):
    """Handle a message about tasks, which is legal in this session."""

    envelope: Envelope


class SendHeartbeat(Action, frozen=True):
    """Send a heartbeat."""


class Close(Action, frozen=True):
    """Close the socket; ``politely``: after a Goodbye."""

    politely: bool = False


class Closed(Action, frozen=True):
    """The session has ended; another will be opened."""

    reason: str


class Log(Action, frozen=True):
    """Write an error to the log."""

    message: str


class GiveUp(Action, frozen=True):
    """Retrying cannot help."""

    error: FarcallError


class _Phase(enum.Enum):
    WAITING = enum.auto()
    REQUESTING = enum.auto()
    CONNECTING = enum.auto()
    HELLO_SENT = enum.auto()
    OPEN = enum.auto()
    OVER = enum.auto()


class Connection:
    """All decisions of one agent about its session."""

    def __init__(self, *, heartbeat_s: float, rng: random.Random) -> None:
        self._heartbeat_s = heartbeat_s
        self._rng = rng
        self._phase = _Phase.WAITING
        self._session: Session | None = None
        self._known: tuple[Address, ...] = ()
        self._untried: list[Address] = []
        self._fresh = False  # whether the API named them since the last session
        self._ticket = ""
        self._ticket_until = 0.0
        self._ticket_doubted = False
        self._has_connected = False
        self._backoff = Backoff(first_s=_FIRST_WAIT_S, most_s=_LONGEST_WAIT_S, jitter=rng.random)
        self._brief_sessions = 0  # in a row
        self._in_use_since: float | None = None
        self._opened_at = 0.0
        self._due_at: float | None = None
        #: Why there is no session, for people; empty while there is one.
        self.problem = "not connected yet"

    # -- the shell's side ----------------------------------------------------------------------------------------------

    def handle(self, events: Iterable[Event], now: float) -> list[Action]:
        """Handle events in order; the actions to perform."""
        return [action for event in events for action in self._decide(event, now)]

    def may_send(self, kind: type[Message]) -> bool:
        """Whether the session, if there is one, permits such a message now."""
        return self._session is not None and self._session.may_send(kind)

    @property
    def is_open(self) -> bool:
        """Whether there is a session that is not draining."""
        return self._session is not None and self._session.phase is Phase.OPEN

    def next_deadline(self) -> float | None:
        """The monotonic second at which a :class:`Tick` is due."""
        deadlines = [] if self._due_at is None else [self._due_at]
        if self._phase is _Phase.OPEN and self._session is not None:
            deadlines.append(self._session.next_deadline())
        return min(deadlines, default=None)

    # -- events --------------------------------------------------------------------------------------------------------

    def _decide(self, event: Event, now: float) -> list[Action]:
        match event:
            case Tick():
                return self._tick(now)
            case Received(envelope=envelope):
                return self._received(envelope, now)
            case Sent(message=message):
                if self._session is None:
                    raise ProtocolError(f"{type(message).__name__} outside of a session")
                self._session.sent(message, now=now)
                return []
            case Started():
                return self._request_forwarders()
            case ApiAnswered():
                return self._answered(event, now)
            case ApiFailed():
                return self._api_failed(event, now)
            case HandshakeDone():
                return self._send_hello(now)
            case ConnectionLost(reason=reason, key_refused=key_refused):
                return self._lost(reason, now, key_refused=key_refused)
            case MalformedReceived(reason=reason):
                return self._illegal(reason, now)
            case _:
                raise TypeError(f"no rule for {event}")

    def _answered(self, event: ApiAnswered, now: float) -> list[Action]:
        if self._phase is not _Phase.REQUESTING:
            return []
        self._known, self._ticket, self._ticket_until = event.forwarders, event.ticket, now + event.ticket_ttl_s
        self._fresh = True
        return self._open_known(now)

    def _api_failed(self, event: ApiFailed, now: float) -> list[Action]:
        if self._phase is not _Phase.REQUESTING:
            return []
        error = error_from_record(event.error, default=Unavailable)
        # A proxy or a portal may answer in the API's place for a while. At the first start it is a wrong setting. API
        # Gateway answers 401 if a credential was revoked.
        is_temporary = event.is_foreign and self._has_connected and not isinstance(error, Unauthenticated)
        if not (error.record.retryable or is_temporary):
            return self._give_up(error)
        # Any server can name any time: only the API's counts.
        at_least_s = 0.0 if event.is_foreign else error.record.retry_after_s or 0.0
        return self._wait(str(error), now, at_least_s=at_least_s)

    def _send_hello(self, now: float) -> list[Action]:
        if self._phase is not _Phase.CONNECTING:
            return []
        self._phase = _Phase.HELLO_SENT
        self._session = Session(Role.AGENT, heartbeat_s=self._heartbeat_s, now=now)
        return [SendHello(self._ticket)]

    def _lost(self, reason: str, now: float, *, key_refused: bool = False) -> list[Action]:
        match self._phase:
            case _Phase.OPEN:
                return self._reconnect(reason, now)
            case _Phase.CONNECTING | _Phase.HELLO_SENT:
                self._session = None
                if key_refused:
                    self._ticket_until = 0.0  # the API makes the endpoint's key known to the forwarders
                    self._untried.clear()
                return [Close(), *self._open_next(reason, now)]
            case _:
                return []

    def _illegal(self, reason: str, now: float) -> list[Action]:
        return [Log(f"the forwarder broke the protocol: {reason}"), *self._lost(reason, now)]

    def _received(self, envelope: Envelope, now: float) -> list[Action]:
        message = envelope.message
        if self._session is None:  # the socket was closed after an earlier message
            return []
        try:
            self._session.received(message, now=now)
        except ProtocolError as error:
            return self._illegal(str(error), now)
        match message:
            case Welcome():
                self._phase, self._opened_at, self._due_at = _Phase.OPEN, now, None
                self._ticket_doubted, self._fresh, self.problem = False, False, ""
                self._has_connected = True
                self._in_use_since = None
                return [Opened(message)]
            case Refused(error=error_fields):
                return self._refused(ErrorRecord.from_json(error_fields), now)
            case Redirect(reason=reason, retry_after_s=retry_after_s):
                self.problem = f"the forwarder asks the agent to reconnect: {reason}"
                self._due_at = now + retry_after_s
                return []
            case Heartbeat():
                return []
            case _:
                return [Deliver(envelope)]

    def _tick(self, now: float) -> list[Action]:
        if self._phase is _Phase.WAITING and self._due_at is not None and now >= self._due_at:
            return self._open_known(now) if self._ticket_until - _TICKET_MARGIN_S > now else self._request_forwarders()
        if self._phase in (_Phase.CONNECTING, _Phase.HELLO_SENT) and self._due_at is not None and now >= self._due_at:
            return self._lost("the forwarder did not answer in time", now)
        if self._phase is not _Phase.OPEN or self._session is None:
            return []
        if self._session.is_dead(now=now):
            return self._lost("the forwarder has been silent for too long", now)
        if self._due_at is not None and now >= self._due_at:
            self._count_session(now)
            return [Close(politely=True), Closed(self.problem), *self._request_forwarders()]
        return [SendHeartbeat()] if self._session.heartbeat_due(now=now) else []

    # -- transitions ---------------------------------------------------------------------------------------------------

    def _request_forwarders(self) -> list[Action]:
        self._phase, self._due_at = _Phase.REQUESTING, None
        return [RequestForwarders()]

    def _open_known(self, now: float) -> list[Action]:
        self._untried = self._rng.sample(self._known, len(self._known))
        return self._open_next("the API named no forwarder", now)

    def _open_next(self, reason: str, now: float) -> list[Action]:
        if not self._untried:
            self._ticket_until = 0.0  # each known forwarder failed; the API may know others
            return self._wait(reason, now) if self._fresh else self._request_forwarders()
        self._phase, self._due_at = _Phase.CONNECTING, now + _HELLO_LIMIT_S
        return [OpenSocket(self._untried.pop())]

    def _wait(self, reason: str, now: float, *, at_least_s: float = 0.0) -> list[Action]:
        self.problem = reason
        self._phase = _Phase.WAITING
        self._due_at = now + at_least_s + self._backoff.next_s()
        return []

    def _reconnect(self, reason: str, now: float) -> list[Action]:
        self._count_session(now)
        self._session = None
        return [Close(), Closed(reason), *self._wait(reason, now)]

    def _count_session(self, now: float) -> None:
        self._brief_sessions = self._brief_sessions + 1 if now - self._opened_at < _STABLE_S else 0
        self._backoff.reset(failures=self._brief_sessions)

    def _in_use_until(self, now: float) -> float:
        """How long to wait for the end of the session of another agent."""
        if self._in_use_since is None:
            self._in_use_since = now
        return self._in_use_since + _IN_USE_LIMIT_S

    def _refused(self, record: ErrorRecord, now: float) -> list[Action]:
        error = error_from_record(record, default=SessionRefused)
        was_open = self._phase is _Phase.OPEN
        if was_open:
            self._count_session(now)
        self._session = None
        closing: list[Action] = [Close(), Closed(str(error))] if was_open else [Close()]
        if isinstance(error, EndpointInUse) and now < self._in_use_until(now):
            return [*closing, *self._wait(str(error), now, at_least_s=_IN_USE_PAUSE_S)]
        stale_ticket = isinstance(error, TicketInvalid) and not self._ticket_doubted
        if not (record.retryable or stale_ticket):
            return [*closing, *self._give_up(error)]
        self._ticket_doubted = self._ticket_doubted or stale_ticket
        self._ticket_until = 0.0
        return [*closing, *self._wait(str(error), now, at_least_s=record.retry_after_s or 0.0)]

    def _give_up(self, error: FarcallError) -> list[Action]:
        self._phase, self._due_at, self.problem = _Phase.OVER, None, str(error)
        return [GiveUp(error)]


_NO_TASK: Final = TaskSpec(task_id="", attempt=0, function_id="", function_hash="", options=TaskOptions())


def for_log(event: Event) -> tuple[Event, int]:
    """An event without tickets, and of messages about tasks no more than their number."""
    match event:
        case ApiAnswered():
            return msgspec.structs.replace(event, ticket=""), 0
        case Received(envelope=envelope):
            return Received(Envelope(_slim_received(envelope.message))), 0
        case Sent(message=Hello() as message):
            return Sent(msgspec.structs.replace(message, ticket="", held=())), 0
        case Sent(message=message) if not isinstance(message, Credit | Goodbye):
            return Sent(Heartbeat(at=0.0)), 0  # the same to a session
        case _:
            return event, 0


def _slim_received(message: Message) -> Message:
    match message:
        case Welcome():
            return msgspec.structs.replace(message, forget=())
        case RunTasks(tasks=tasks):
            return RunTasks(tasks=(_NO_TASK,) * len(tasks))
        case (
            CancelTasks() | ResultsRecorded() | BlobGrant() | BlobPiece() | BlobTaken() | FilePiece() | FileWanted()
        ):  # some have signed URLs, or paths of others
            return CancelTasks(task_ids=())  # the same to a session
        case _:
            return message
