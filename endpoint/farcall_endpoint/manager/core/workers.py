"""Workers as the manager's core sees them: their submitters, their tasks, and how long those will take."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from typing import Final, NamedTuple

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_common.wire import TaskState
from farcall_endpoint.contracts.manager_worker import Begun
from farcall_endpoint.host.shared_memory import Frame
from farcall_endpoint.manager.core.events import Job

TURN_S: Final = 1.0
"""Seconds for which a worker with tasks keeps its submitter: fairness should not cost a process start each time."""


class Pair(NamedTuple):
    """The tasks that a worker serves: those of one submitter (empty: the owner, or everybody where workers are shared),
    one environment (its key; empty: the endpoint's own Python) and one latency class (empty: batch work). ``payer``:
    the identity that the submitter counts as; empty if it is the submitter itself."""

    submitter: str
    key: str
    target: str = ""
    payer: str = ""

    @property
    def share_of(self) -> str:
        """The identity whose turns and places these tasks use."""
        return self.payer or self.submitter


OWN: Final = Pair("", "")


@dataclasses.dataclass(frozen=True)
class StopReason:
    """How a task ends that must be stopped, if it is running."""

    state: TaskState
    record: ErrorRecord
    is_retried: bool = False


@dataclasses.dataclass(slots=True)
class Worker:
    """A worker process, from its launch to its death.

    It occupies a slot, unless it is ``parked``: warm without a place; or ``extra``: there for the calls of tasks that
    wait, and of this number, from 1 (see :mod:`.extra_workers`); or ``aside``: its task waited for calls, and another
    submitter got its place; or one of a latency class (see :mod:`.latency`).
    ``start_s``: how long its start took, until it has run the task that waited for it. ``tasks_left``: maximum
    number of further tasks; None: no limit. ``drives``: its task has made calls, and ``waits`` for one now. ``called``:
    functions that its tasks have sent, by hash. ``is_leaving``: it gets no more tasks. ``excess``: the limit that
    it has exceeded itself.
    """

    worker_id: int
    slot: int
    pair: Pair
    since: float  # start of the launch, later of the task at the head of ``jobs``, or of idleness
    environment: Environment | None = None
    tasks_left: int | None = None
    is_leaving: bool = False
    turn_began: float = 0.0
    yields_to: Pair | None = None  # gets its place, after the task that runs
    is_ready: bool = False
    jobs: collections.deque[Job] = dataclasses.field(default_factory=collections.deque)
    unread_bytes: int = 0  # upper limit of the jobs' bytes in the socket's buffer
    head_reported: bool = False
    overdue: bool = False
    functions: set[str] = dataclasses.field(default_factory=set)
    stops: dict[str, StopReason] = dataclasses.field(default_factory=dict)
    begun: Begun | None = None  # of the running task, if its memory is limited
    recalling: bool = False
    syncing: bool = False
    killed: bool = False
    parked: bool = False
    age: float = 0.0  # clock of the warm pool at its last task
    pid: int = 0  # as it says itself
    extra: int = 0
    aside: bool = False
    awaits: int = 0  # of its jobs, those whose input another worker has not sent
    drives: bool = False
    waits: bool = False
    start_s: float = 0.0
    excess: ErrorRecord | None = None
    called: dict[str, Frame] = dataclasses.field(default_factory=dict)

    @property
    def has_slot(self) -> bool:
        """Whether it occupies a slot."""
        return not (self.parked or self.extra or self.aside or self.pair.target)

    @property
    def place(self) -> Pair:
        """The pair that its place belongs to."""
        return self.pair if self.yields_to is None else self.yields_to

    @property
    def accepts_tasks(self) -> bool:
        return (
            self.is_ready
            and self.yields_to is None
            and self.tasks_left != 0
            and not (self.killed or self.recalling or self.syncing or self.parked or self.aside)
            and not (self.drives or self.awaits)
        )

    @property
    def is_idle(self) -> bool:
        """Whether it is ready, has nothing to do, and stays."""
        return self.is_ready and not self.jobs and not self.killed and self.yields_to is None

    @property
    def delays_others(self) -> bool:
        """Whether a job waits behind the one that runs, and not for its value."""
        return len(self.jobs) > 1 and any(
            job.call is None or not job.call.is_ahead for job in itertools.islice(self.jobs, 1, None)
        )

    def runs(self, task_id: str) -> bool:
        return bool(self.jobs) and self.jobs[0].order.task_id == task_id

    def tasks_within(self, within_s: float, *, mean_s: float | None, now: float) -> float:
        """Return how many more tasks the worker should begin within ``within_s`` seconds; infinite if unknown.

        :param within_s: also the duration of the worker's start, if it has not started yet.
        :param mean_s: mean duration of a task; None if none has ended.
        """
        if self.killed or self.drives or self.yields_to is not None or self.tasks_left == 0:
            return 0
        limit = math.inf if self.tasks_left is None else self.tasks_left
        age_s = now - self.since
        if not self.is_ready:
            wait_s = max(0.0, within_s - age_s)
        elif self.jobs:
            # One that has exceeded the mean is expected to take as long again.
            mean_s = age_s if mean_s is None else mean_s
            wait_s = (mean_s - age_s if age_s < mean_s else age_s) + (len(self.jobs) - 1) * mean_s
        else:
            wait_s = 0.0
        if wait_s > within_s:
            return 0
        return min(limit, int((within_s - wait_s) / mean_s) + 1 if mean_s else math.inf)
