"""Task and endpoint states, and the transitions between them, as tables."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Set
from typing import Final


class TaskState(enum.StrEnum):
    """State of a task. Values are those of Globus Compute if it has the state: its users and tools know them."""

    RECEIVED = "received"
    WAITING_FOR_EP = "waiting-for-ep"
    WAITING_FOR_NODES = "waiting-for-nodes"
    WAITING_FOR_LAUNCH = "waiting-for-launch"
    RUNNING = "running"
    SUCCESS = "success"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    DEAD_LETTERED = "dead-lettered"

    @property
    def is_terminal(self) -> bool:
        """Whether the task has ended; a terminal state never changes again."""
        return self in TERMINAL_STATES


class Reporter(enum.StrEnum):
    """Component that reports a state."""

    API = "api"
    FORWARDER = "forwarder"
    AGENT = "agent"
    RECONCILER = "reconciler"


class EndpointState(enum.StrEnum):
    """State of an endpoint, as the cloud knows it."""

    REGISTERED = "registered"
    ONLINE = "online"
    OFFLINE = "offline"


_S = TaskState

#: LOST may have run and may not run twice; DEAD_LETTERED killed its worker, manager or endpoint in each attempt.
TERMINAL_STATES: Final[Set[TaskState]] = frozenset({_S.SUCCESS, _S.FAILED, _S.CANCELLED, _S.LOST, _S.DEAD_LETTERED})

#: The states that may follow each state. A return to WAITING_FOR_EP is a redelivery: the endpoint disconnected,
#: or the attempt failed and another is permitted. States may be skipped forward, because reports are batched and a
#: fast task ends before its start is reported.
LEGAL_TRANSITIONS: Final[Mapping[TaskState, Set[TaskState]]] = {
    _S.RECEIVED: {_S.WAITING_FOR_EP, *TERMINAL_STATES} | {_S.WAITING_FOR_NODES, _S.WAITING_FOR_LAUNCH, _S.RUNNING},
    _S.WAITING_FOR_EP: {_S.WAITING_FOR_NODES, _S.WAITING_FOR_LAUNCH, _S.RUNNING, *TERMINAL_STATES},
    _S.WAITING_FOR_NODES: {_S.WAITING_FOR_LAUNCH, _S.RUNNING, _S.WAITING_FOR_EP, *TERMINAL_STATES},
    _S.WAITING_FOR_LAUNCH: {_S.RUNNING, _S.WAITING_FOR_NODES, _S.WAITING_FOR_EP, *TERMINAL_STATES},
    _S.RUNNING: {_S.WAITING_FOR_NODES, _S.WAITING_FOR_LAUNCH, _S.WAITING_FOR_EP, *TERMINAL_STATES},
    _S.SUCCESS: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.LOST: frozenset(),
    _S.DEAD_LETTERED: frozenset(),
}

#: Components that may report each state.
REPORTERS: Final[Mapping[TaskState, Set[Reporter]]] = {
    _S.RECEIVED: {Reporter.API},
    _S.WAITING_FOR_EP: {Reporter.API, Reporter.FORWARDER, Reporter.RECONCILER},
    _S.WAITING_FOR_NODES: {Reporter.AGENT, Reporter.FORWARDER},
    _S.WAITING_FOR_LAUNCH: {Reporter.AGENT},
    _S.RUNNING: {Reporter.AGENT},
    _S.SUCCESS: {Reporter.AGENT},
    _S.FAILED: {Reporter.AGENT, Reporter.FORWARDER, Reporter.RECONCILER},
    _S.CANCELLED: {Reporter.API, Reporter.AGENT, Reporter.FORWARDER, Reporter.RECONCILER},
    _S.LOST: {Reporter.AGENT, Reporter.FORWARDER, Reporter.RECONCILER},
    # Agents report such a result as failed, with no attempt left: only the cloud declares dead letters.
    _S.DEAD_LETTERED: {Reporter.FORWARDER},
}


def is_legal(before: TaskState, after: TaskState, *, reporter: Reporter) -> bool:
    """Whether ``reporter`` may change a task's state from ``before`` to ``after``."""
    return after in LEGAL_TRANSITIONS[before] and reporter in REPORTERS[after]


class FileReason(enum.StrEnum):
    """Why an endpoint gets no piece of a file of another endpoint."""

    # of the endpoint that has the file
    NOT_FOUND = "NOT_FOUND"
    NOT_PERMITTED = "NOT_PERMITTED"
    NOT_A_FILE = "NOT_A_FILE"
    NOT_READ = "NOT_READ"
    SWITCHED_OFF = "SWITCHED_OFF"
    # of forwarders
    NOT_LEASED = "NOT_LEASED"
    NOT_A_SOURCE = "NOT_A_SOURCE"
    NO_RIGHT = "NO_RIGHT"
    OFFLINE = "OFFLINE"
    TOO_LARGE = "TOO_LARGE"
    QUOTA = "QUOTA"
    BUSY = "BUSY"
    NO_ANSWER = "NO_ANSWER"


READ_REASONS: Final = frozenset(
    {
        FileReason.NOT_FOUND,
        FileReason.NOT_PERMITTED,
        FileReason.NOT_A_FILE,
        FileReason.NOT_READ,
        FileReason.SWITCHED_OFF,
    }
)
"""Reasons that the endpoint with the file may give."""
