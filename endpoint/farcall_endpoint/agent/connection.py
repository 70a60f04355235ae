"""How an agent gets, keeps and regains its session with a forwarder. No I/O; events and time in, actions out.

::

    ASKING ──addresses──▶ DIALLING ──handshake──▶ GREETING ──Welcome──▶ OPEN ──Redirect──▶ (drains) ──┐
      ▲                      │ all tried, or our key refused  │ Refused     │ lost                  │
      └────── WAITING ◀──────┴────────────────────────────────┴─────────────┴───────────────────────┘

Waiting is full jitter (M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015), so that the agents
of a dead forwarder do not come back all at once. What failed before a session counts no more behind it; sessions that
end at once, one after the other, do. While the ticket is good, forwarders that are known are tried before the API is
asked again. Instants are monotonic seconds.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from typing import Final

from farcall_common.backoff import Backoff
from farcall_common.errors import (
    EndpointInUse,
    ErrorRecord,
    FarcallError,
    ProtocolError,
    SessionRefused,
    TicketInvalid,
    error_from_record,
)
from farcall_common.wire import Message, Phase, Redirect, Refused, Role, Session, Welcome

_FIRST_WAIT_S: Final = 0.4
_LONGEST_WAIT_S: Final = 30.0
_GREETING_LIMIT_S: Final = 15.0
_STABLE_S: Final = 1.0
"""A session that lasted for so long was a good one; one that did not counts as a failure."""
_TICKET_MARGIN_S: Final = 60.0
_IN_USE_PAUSE_S: Final = 1.0
_IN_USE_LIMIT_S: Final = 10.0
"""An agent that has died a moment ago may still count as connected; the forwarder notices when another one comes."""


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a forwarder is, and the CURVE key (Z85) that it must have."""

    address: str
    server_key: str


@dataclasses.dataclass(frozen=True)
class AskApi:
    """Ask where the forwarders are. Answered by ``answered`` or ``unanswered``."""


@dataclasses.dataclass(frozen=True)
class Dial:
    """Open a socket. Answered by ``shaken`` or ``lost``."""

    to: Address


@dataclasses.dataclass(frozen=True)
class Greet:
    """Send a Hello with this ticket."""

    ticket: str


@dataclasses.dataclass(frozen=True)
class Opened:
    """The session is open."""

    welcome: Welcome


@dataclasses.dataclass(frozen=True)
class Beat:
    """Send a heartbeat."""


@dataclasses.dataclass(frozen=True)
class Close:
    """Close the socket; ``politely``: after a Goodbye."""

    politely: bool = False


@dataclasses.dataclass(frozen=True)
class Closed:
    """There is no session any more; another will be sought."""

    reason: str


@dataclasses.dataclass(frozen=True)
class GiveUp:
    """Trying again cannot help."""

    error: FarcallError


Action = AskApi | Dial | Greet | Opened | Beat | Close | Closed | GiveUp


class _Phase(enum.Enum):
    WAITING = enum.auto()
    ASKING = enum.auto()
    DIALLING = enum.auto()
    GREETING = enum.auto()
    OPEN = enum.auto()
    OVER = enum.auto()


class Connection:
    """One per agent. Each method returns what is to be done, in order."""

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
        self._backoff = Backoff(first_s=_FIRST_WAIT_S, most_s=_LONGEST_WAIT_S, jitter=rng.random)
        self._brief_sessions = 0  # in a row
        self._in_use_since: float | None = None
        self._opened_at = 0.0
        self._due_at: float | None = None
        #: Why there is no session, for people; empty while there is one.
        self.trouble = "not connected yet"

    # -- events --------------------------------------------------------------------------------------------------------

    def start(self) -> list[Action]:
        """Begin."""
        return self._ask()

    def answered(
        self, forwarders: tuple[Address, ...], *, ticket: str, ticket_ttl_s: float, now: float
    ) -> list[Action]:
        """The API named forwarders, and gave a ticket that is good for so many seconds."""
        if self._phase is not _Phase.ASKING:
            return []
        self._known, self._ticket, self._ticket_until = forwarders, ticket, now + ticket_ttl_s
        self._fresh = True
        return self._dial_known(now)

    def unanswered(self, error: FarcallError, *, now: float) -> list[Action]:
        """The API did not help."""
        if self._phase is not _Phase.ASKING:
            return []
        if not error.record.retryable:
            return self._give_up(error)
        return self._wait(str(error), now, at_least_s=error.record.retry_after_s or 0.0)

    def shaken(self, *, now: float) -> list[Action]:
        """The forwarder's socket accepted our key."""
        if self._phase is not _Phase.DIALLING:
            return []
        self._phase = _Phase.GREETING
        self._session = Session(Role.AGENT, heartbeat_s=self._heartbeat_s, now=now)
        return [Greet(self._ticket)]

    def lost(self, reason: str, *, key_refused: bool = False, now: float) -> list[Action]:
        """The socket failed, or was closed by the other side."""
        match self._phase:
            case _Phase.OPEN:
                return self._reconnect(reason, now)
            case _Phase.DIALLING | _Phase.GREETING:
                self._session = None
                if key_refused:
                    self._ticket_until = 0.0  # the API makes our key known to the forwarders
                    self._untried.clear()
                return [Close(), *self._dial_next(reason, now)]
            case _:
                return []

    def received(self, message: Message, *, now: float) -> list[Action]:
        """A message came in. What is not about the session itself is the caller's.

        :raises ProtocolError: if the forwarder may not say this now.
        """
        if self._session is None:
            raise ProtocolError(f"{type(message).__name__} outside of a session")
        self._session.received(message, now=now)
        match message:
            case Welcome():
                self._phase, self._opened_at, self._due_at = _Phase.OPEN, now, None
                self._ticket_doubted, self._fresh, self.trouble = False, False, ""
                self._in_use_since = None
                return [Opened(message)]
            case Refused(error=error):
                return self._refused(ErrorRecord.from_json(error), now)
            case Redirect(reason=reason, retry_after_s=retry_after_s):
                self.trouble = f"the forwarder drains: {reason}"
                self._due_at = now + retry_after_s
                return []
            case _:
                return []

    def may_send(self, kind: type[Message]) -> bool:
        """Whether the session, if there is one, permits such a message now."""
        return self._session is not None and self._session.may_send(kind)

    def sent(self, message: Message, *, now: float) -> None:
        """Note that a message is sent.

        :raises ProtocolError: if it may not be.
        """
        if self._session is None:
            raise ProtocolError(f"{type(message).__name__} outside of a session")
        self._session.sent(message, now=now)

    @property
    def is_open(self) -> bool:
        """Whether there is a session that is not draining."""
        return self._session is not None and self._session.phase is Phase.OPEN

    def tick(self, *, now: float) -> list[Action]:
        """Time has passed."""
        if self._phase is _Phase.WAITING and self._due_at is not None and now >= self._due_at:
            return self._dial_known(now) if self._ticket_until - _TICKET_MARGIN_S > now else self._ask()
        if self._phase in (_Phase.DIALLING, _Phase.GREETING) and self._due_at is not None and now >= self._due_at:
            return self.lost("the forwarder did not answer in time", now=now)
        if self._phase is not _Phase.OPEN or self._session is None:
            return []
        if self._session.is_dead(now=now):
            return self.lost("the forwarder has been silent for too long", now=now)
        if self._due_at is not None and now >= self._due_at:
            self._count_session(now)
            return [Close(politely=True), Closed(self.trouble), *self._ask()]
        return [Beat()] if self._session.heartbeat_due(now=now) else []

    def next_deadline(self) -> float | None:
        """The monotonic second at which :meth:`tick` may have something to do."""
        deadlines = [] if self._due_at is None else [self._due_at]
        if self._phase is _Phase.OPEN and self._session is not None:
            deadlines.append(self._session.next_deadline())
        return min(deadlines, default=None)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _ask(self) -> list[Action]:
        self._phase, self._due_at = _Phase.ASKING, None
        return [AskApi()]

    def _dial_known(self, now: float) -> list[Action]:
        self._untried = self._rng.sample(self._known, len(self._known))
        return self._dial_next("the API named no forwarder", now)

    def _dial_next(self, reason: str, now: float) -> list[Action]:
        if not self._untried:
            self._ticket_until = 0.0  # each known forwarder failed; the API may know others
            return self._wait(reason, now) if self._fresh else self._ask()
        self._phase, self._due_at = _Phase.DIALLING, now + _GREETING_LIMIT_S
        return [Dial(self._untried.pop())]

    def _wait(self, reason: str, now: float, *, at_least_s: float = 0.0) -> list[Action]:
        self.trouble = reason
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
        self._phase, self._due_at, self.trouble = _Phase.OVER, None, str(error)
        return [GiveUp(error)]
