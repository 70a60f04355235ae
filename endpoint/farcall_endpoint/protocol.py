"""The messages between an agent and its managers. Internal: both ends are always of the same package version.

A message is a list of frames: a MessagePack header, then user bytes, each in its own frame. A ``Frame`` in a header is
the index of such a frame, counted from the first behind the header. Instants are epoch seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from farcall_common.wire import TaskState

__all__ = [
    "CancelTasks",
    "Died",
    "Finished",
    "FromAgent",
    "FromManager",
    "Progress",
    "Registered",
    "RunTasks",
    "Started",
    "Stop",
    "TaskOrder",
    "decode_from_agent",
    "decode_from_manager",
    "encode",
    "software_fingerprint",
]

Frame = int


class _Part(msgspec.Struct, frozen=True, array_like=True):
    pass


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# -- agent to manager --------------------------------------------------------------------------------------------------


class TaskOrder(_Part, frozen=True):
    """One attempt to run. ``walltime_s`` limits it; ``result_serializers`` are the submitter's choice, may be empty."""

    task_id: str
    attempt: int
    function_hash: str
    payload: Frame
    walltime_s: float | None = None
    result_serializers: tuple[str, ...] = ()


class RunTasks(_Message, frozen=True):
    """Run these, in order. ``functions`` are the bodies (hash, frame) that this manager has not seen; before them it
    forgets all others when ``forget`` is set, so that neither side grows for ever."""

    tasks: tuple[TaskOrder, ...]
    functions: tuple[tuple[str, Frame], ...] = ()
    forget: bool = False


class CancelTasks(_Message, frozen=True):
    """Stop these, running or not. Each is still answered by a Finished, or by the result that won the race."""

    task_ids: tuple[str, ...]


class Stop(_Message, frozen=True):
    """End all workers and the manager itself. What runs gets ``grace_s`` seconds to finish, what waits is dropped."""

    grace_s: float


FromAgent = RunTasks | CancelTasks | Stop

# -- manager to agent --------------------------------------------------------------------------------------------------


class Registered(_Message, frozen=True):
    """A manager is there, with so many slots. ``software`` must equal the agent's own."""

    manager_id: str
    software: str
    slots: int
    pid: int
    hostname: str


class Started(_Part, frozen=True):
    """A task has been running for long enough to be worth a word."""

    task_id: str
    at: float


class Finished(_Part, frozen=True):
    """The final word of a manager on an attempt. ``error`` is an ErrorRecord in its JSON form."""

    task_id: str
    state: TaskState
    result: Frame | None = None
    error: dict[str, Any] | None = None
    started_at: float | None = None
    ended_at: float | None = None


class Died(_Part, frozen=True):
    """The worker that ran a task is gone. The agent decides whether the task may be started again."""

    task_id: str
    reason: str
    stdout_tail: str = ""
    stderr_tail: str = ""


class Progress(_Message, frozen=True):
    """What happened since the last Progress, and how the manager is. ``problem`` says why it cannot run anything."""

    finished: tuple[Finished, ...] = ()
    died: tuple[Died, ...] = ()
    started: tuple[Started, ...] = ()
    workers: int = 0
    idle_workers: int = 0
    problem: str = ""


FromManager = Registered | Progress

_encoder: Final = msgspec.msgpack.Encoder()
_from_agent: Final[msgspec.msgpack.Decoder[FromAgent]] = msgspec.msgpack.Decoder(FromAgent)
_from_manager: Final[msgspec.msgpack.Decoder[FromManager]] = msgspec.msgpack.Decoder(FromManager)


def encode(message: FromAgent | FromManager, bodies: Sequence[bytes] = ()) -> list[bytes]:
    """The frames of a message."""
    return [_encoder.encode(message), *bodies]


def decode_from_agent(frames: Sequence[bytes]) -> FromAgent:
    """Read the header of a message of the agent.

    :raises msgspec.DecodeError: if it is none.
    """
    return _from_agent.decode(frames[0])


def decode_from_manager(frames: Sequence[bytes]) -> FromManager:
    """Read the header of a message of a manager.

    :raises msgspec.DecodeError: if it is none.
    """
    return _from_manager.decode(frames[0])


def software_fingerprint() -> str:
    """Tells apart two versions of this file, so that an agent never talks past a manager that was upgraded under it."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
