"""Session: the protocol's state machine, with the legal messages of each phase, credit and heartbeats.

Both sides run the same class with their own role, as in h11: the messages that one side may send are those that the
other may receive. The machine does no I/O and reads no clock; its methods take the messages and the time.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from typing import Final

from farcall_common.errors import ProtocolError
from farcall_common.wire import messages as m
from farcall_common.wire.messages import Message

#: A peer that was silent for this many heartbeat periods is gone.
SILENT_PERIODS: Final = 3


class Role(enum.StrEnum):
    """The two sides of a session; "peer" is an agent or a client."""

    AGENT = "agent"
    CLIENT = "client"
    FORWARDER = "forwarder"


class Phase(enum.StrEnum):
    """Phase of a session."""

    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


_Kinds = Set[type[Message]]
_NOTHING: Final[_Kinds] = frozenset()
_AGENT_REPORTS: Final[_Kinds] = frozenset(
    {
        m.Credit,
        m.TasksAccepted,
        m.TaskTransitions,
        m.TaskResults,
        m.BlobRequest,
        m.BlobPull,
        m.BlobPush,
        m.TaskOutput,
        m.FilePull,
        m.FilesTaken,
        m.FileRead,
        m.Heartbeat,
        m.Goodbye,
    }
)
_AGENT_ORDERS: Final[_Kinds] = frozenset(
    {
        m.RunTasks,
        m.CancelTasks,
        m.ResultsRecorded,
        m.BlobGrant,
        m.BlobPiece,
        m.BlobTaken,
        m.OutputRequest,
        m.FileWanted,
        m.FilePiece,
        m.Heartbeat,
        m.Redirect,
        m.Refused,
    }
)
_CLIENT_REPORTS: Final[_Kinds] = frozenset({m.Subscribe, m.Heartbeat, m.Goodbye})
_CLIENT_ORDERS: Final[_Kinds] = frozenset({m.ResultsReady, m.Heartbeat, m.Redirect, m.Refused})

#: Messages that the agent or client may send, and that the forwarder may send to it, in each phase.
_LEGAL: Final[Mapping[Role, Mapping[Phase, tuple[_Kinds, _Kinds]]]] = {
    Role.AGENT: {
        Phase.NEW: (frozenset({m.Hello}), frozenset({m.Refused})),
        Phase.OPENING: (frozenset({m.Goodbye}), frozenset({m.Welcome, m.Refused, m.Redirect})),
        Phase.OPEN: (_AGENT_REPORTS, _AGENT_ORDERS),
        Phase.DRAINING: (_AGENT_REPORTS, _AGENT_ORDERS - {m.RunTasks, m.Redirect}),
        Phase.CLOSED: (_NOTHING, _NOTHING),
    },
    Role.CLIENT: {
        Phase.NEW: (frozenset({m.OpenStream}), frozenset({m.Refused})),
        Phase.OPENING: (frozenset({m.Goodbye}), frozenset({m.StreamOpened, m.Refused, m.Redirect})),
        Phase.OPEN: (_CLIENT_REPORTS, _CLIENT_ORDERS),
        Phase.DRAINING: (_CLIENT_REPORTS, _CLIENT_ORDERS - {m.Redirect}),
        Phase.CLOSED: (_NOTHING, _NOTHING),
    },
}

#: Messages that change the phase.
_NEXT_PHASE: Final[Mapping[type[Message], Phase]] = {
    m.Hello: Phase.OPENING,
    m.OpenStream: Phase.OPENING,
    m.Welcome: Phase.OPEN,
    m.StreamOpened: Phase.OPEN,
    m.Redirect: Phase.DRAINING,
    m.Goodbye: Phase.CLOSED,
    m.Refused: Phase.CLOSED,
}


class Session:
    """One side of a session.

    :param role: this side. A forwarder also gives the role of its peer, ``facing``.
    :param heartbeat_s: the period of this side's heartbeats in seconds; the answer to Hello or OpenStream may change it
        for both sides.
    :param now: monotonic seconds, like every ``now`` here.
    """

    def __init__(self, role: Role, *, facing: Role = Role.FORWARDER, heartbeat_s: float, now: float) -> None:
        if (role is Role.FORWARDER) == (facing is Role.FORWARDER):
            raise ValueError("a session has a forwarder on exactly one side")
        self.role = role
        self.phase = Phase.NEW
        self.heartbeat_s = heartbeat_s
        #: Tasks that the forwarder may still send. It may go below 0 by ``reserve``.
        self.credit = 0
        self.reserve = 0
        self._table = _LEGAL[facing if role is Role.FORWARDER else role]
        self._sent_at = now
        self._received_at = now

    def sent(self, message: Message, *, now: float) -> None:
        """Record that this side sends a message.

        :raises ProtocolError: if it may not do so now; then it must not be sent.
        """
        self._advance(message, from_forwarder=self.role is Role.FORWARDER)
        self._sent_at = now

    def received(self, message: Message, *, now: float) -> None:
        """Record a message of the other side.

        :raises ProtocolError: if the other side may not send it now.
        """
        self._advance(message, from_forwarder=self.role is not Role.FORWARDER)
        self._received_at = now

    def forgive_silence(self, *, now: float) -> None:
        """Restart the other side's silence period: this process was stopped, and could not receive."""
        self._received_at = now

    def may_send(self, kind: type[Message]) -> bool:
        """Whether this side may send a message of this kind now."""
        return kind in self._table[self.phase][self.role is Role.FORWARDER]

    def heartbeat_due(self, *, now: float) -> bool:
        """Whether this side has been silent for a period and should send a Heartbeat."""
        return self.may_send(m.Heartbeat) and now - self._sent_at >= self.heartbeat_s

    def is_dead(self, *, now: float) -> bool:
        """Whether the other side has been silent for SILENT_PERIODS periods."""
        return self.phase is not Phase.CLOSED and now - self._received_at >= SILENT_PERIODS * self.heartbeat_s

    def next_deadline(self) -> float:
        """The monotonic second at which :meth:`heartbeat_due` or :meth:`is_dead` can next become true."""
        dead_at = self._received_at + SILENT_PERIODS * self.heartbeat_s
        return min(self._sent_at + self.heartbeat_s, dead_at) if self.may_send(m.Heartbeat) else dead_at

    def _advance(self, message: Message, *, from_forwarder: bool) -> None:
        kind = type(message)
        if kind not in self._table[self.phase][from_forwarder]:
            sender = "forwarder" if from_forwarder else "peer"
            raise ProtocolError(f"{kind.__name__} from the {sender} in a session that is {self.phase}")
        match message:
            case m.Hello(reserve=reserve):
                self.reserve = reserve
            case m.Credit(tasks=tasks):
                self.credit += tasks
            case m.RunTasks(tasks=specs):
                if len(specs) > self.credit + self.reserve:
                    raise ProtocolError(f"{len(specs)} tasks with a credit of {self.credit}")
                self.credit -= len(specs)
            case m.Welcome(heartbeat_s=heartbeat_s) | m.StreamOpened(heartbeat_s=heartbeat_s):
                self.heartbeat_s = heartbeat_s
            case _:
                pass
        self.phase = _NEXT_PHASE.get(kind, self.phase)
