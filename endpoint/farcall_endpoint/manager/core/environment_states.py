"""Environments of a manager's node: preparation, failures, and what was learned of each. No I/O, no clock.

An environment is *cold* until its first task, then it is *preparing*, then *ready*, or *failed*. A failed one fails its
tasks at once; after a pause, the next task is a try, and each failed try doubles the pause.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence
from typing import Final

from farcall_common.backoff import Backoff
from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import EnvironmentStatus
from farcall_endpoint.manager.core.events import Instant, Job
from farcall_endpoint.manager.core.workers import Worker

_FIRST_START_WAIT_S: Final = 0.2
_MAX_START_WAIT_S: Final = 10.0
_MAX_START_FAILURES: Final = 4
"""Number of successive failed rounds of worker starts after which tasks fail."""
_MAX_PREPARATIONS: Final = 3
"""Maximum number of preparations of an environment whose failures are retryable."""
_FIRST_PREPARATION_WAIT_S: Final = 1.0
_MAX_PREPARATION_WAIT_S: Final = 30.0
_FIRST_PAUSE_S: Final = 10.0
_MAX_PAUSE_S: Final = 900.0
_GUESSED_START_S: Final = 1.0
_GUESSED_FORK_S: Final = 0.02
_GUESSED_OWN_START_S: Final = 0.3
"""Start time of a worker in the endpoint's own Python that is assumed before one is measured."""
_MEMORY: Final = 0.3
"""Weight of the newest start and of the newest task: the last three or so count."""
_MAX_KNOWN: Final = 200
"""Maximum number of environments to remember. Submitters may name any number."""


class State(enum.Enum):
    """Lifecycle state of an environment."""

    COLD = "cold"
    PREPARING = "preparing"
    READY = "ready"
    FAILED = "failed"


class _Starts:
    """Count of successive failed worker starts. ``launch_at``: when the next start may be tried."""

    def __init__(self) -> None:
        self.launch_at = 0.0
        self._rounds = Backoff(first_s=_FIRST_START_WAIT_S, most_s=_MAX_START_WAIT_S)

    def failed(self, now: float, *, is_try: bool, has_workers: bool) -> bool:
        """Count a failure; return whether tasks fail now: without workers, they do after several failures, or after a
        failed try."""
        self.count(now)
        return not has_workers and (is_try or self._rounds.failures >= _MAX_START_FAILURES)

    def count(self, now: float) -> None:
        """Count a failed start."""
        if now >= self.launch_at:  # workers that were started together fail as one round
            self.launch_at = now + self._rounds.next_s()

    @property
    def failures(self) -> int:
        """Number of successive failed rounds."""
        return self._rounds.failures

    def succeeded(self) -> None:
        """Forget the failures."""
        self._rounds.reset()

    def begin_again(self) -> None:
        """Forget the failures, also when the next start may be."""
        self._rounds.reset()
        self.launch_at = 0.0


class _StartsOfOne(_Starts):
    """Starts of workers of one submitter other than the owner. ``record``: why that submitter's tasks fail until
    ``retry_at``; then each is a try."""

    def __init__(self) -> None:
        super().__init__()
        self.retry_at = 0.0
        self.record: ErrorRecord | None = None
        self._pause = Backoff(first_s=_FIRST_PAUSE_S, most_s=_MAX_PAUSE_S)

    def failed_for(self, record: ErrorRecord, now: float, *, has_workers: bool, is_final: bool) -> bool:
        """Count one more, for this reason; whether tasks fail now.

        :param is_final: whether the next start would fail for the same reason.
        """
        if not self.failed(now, is_try=is_final or self._pause.failures > 0, has_workers=has_workers):
            return False
        self.record, self.retry_at = record, now + self._pause.next_s()
        self.begin_again()
        return True


class EnvironmentState:
    """One environment.

    ``waiting``: tasks until it is ready. ``prewarm``: idle workers to keep. ``is_default``: tasks that name no
    environment run in it. ``payers``: of the tasks that wait; ``requester``: for which of them it is prepared,
    empty for the owner. ``start_s``, ``mean_s``: how long starts and tasks took, as moving averages; None before the
    first. ``used_at``: when it was last needed.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.key = environment.key
        self.state = State.COLD
        self.waiting: collections.deque[Job] = collections.deque()
        self.prewarm = 0
        self.is_default = False
        self.payers: dict[str, None] = {}
        self.requester = ""
        self.text = ""
        self.since = 0.0
        self.forkable = False
        self.memory_bytes: int | None = None
        self.start_s: float | None = None
        self.last_start_s: float | None = None
        self.mean_s: float | None = None
        self.used_at = 0.0
        self.record: ErrorRecord | None = None
        self.due_at: float | None = None  # end of the time for a preparation, or the time of the next one
        self.prepares_again = False  # which of the two
        self._starts = _Starts()
        self._of_others: dict[str, _StartsOfOne] = {}  # by submitter other than the owner
        self._preparations = Backoff(first_s=_FIRST_PREPARATION_WAIT_S, most_s=_MAX_PREPARATION_WAIT_S)
        self._pause = Backoff(first_s=_FIRST_PAUSE_S, most_s=_MAX_PAUSE_S)
        self._retry_at = 0.0
        self._retry_epoch = 0.0

    @property
    def expected_start_s(self) -> float:
        """Expected duration of a worker start in seconds."""
        if self.start_s is not None:
            return self.start_s
        return _GUESSED_FORK_S if self.forkable else _GUESSED_START_S

    @property
    def expected_task_s(self) -> float | None:
        """Expected duration of a task in seconds; None if it is unknown and a measurement is worth waiting for."""
        if self.mean_s is None and self.forkable:
            return self.expected_start_s
        return self.mean_s

    @property
    def is_wanted(self) -> bool:
        """Whether the environment is kept ready without tasks."""
        return self.is_default or self.prewarm > 0

    @property
    def retry_at(self) -> float | None:
        """When a failed environment may be tried again; None if it has not failed."""
        return self._retry_at if self.state is State.FAILED else None

    def wait(self, jobs: Sequence[Job]) -> None:
        """Let tasks wait until the environment is ready."""
        if not self.waiting:
            self.payers.clear()
        self.payers |= dict.fromkeys(job.order.share_of for job in jobs)
        self.waiting.extend(jobs)

    def needed(self, now: Instant) -> ErrorRecord | None:
        """Record that a task or prewarming needs the environment; return its error if waiting for it is useless."""
        self.used_at = now.mono
        if self.state is State.FAILED:
            if now.mono < self._retry_at:
                return self.record
            self._set(State.COLD, "", now)
        return None

    def try_now(self, now: Instant) -> None:
        """Permit a try at once if the environment has failed: the owner has repaired it, or wants a result."""
        if self.state is State.FAILED:
            self._pause.reset()
            self.record = None
            self._set(State.COLD, "", now)

    def preparing(self, now: Instant, *, limit_s: float) -> None:
        """Record that the preparation begins. It may take ``limit_s`` seconds."""
        if self.state is not State.PREPARING or self.prepares_again:
            self._set(State.PREPARING, "it is being prepared", now)
        self.due_at, self.prepares_again = now.mono + limit_s, False

    def postponed(self, now: Instant) -> None:
        """Record that the preparation waits for the preparations of other environments."""
        if not self.text:
            self._set(State.COLD, "it waits until other environments are prepared", now)

    def ready(self, now: Instant, *, forkable: bool, memory_bytes: int | None) -> None:
        """Record that workers can be started in the environment."""
        if forkable != self.forkable:
            self.start_s = None  # of a start without the template, or with it
        self.forkable = forkable
        self.memory_bytes = memory_bytes or self.memory_bytes
        if self.state is not State.READY:
            self._set(State.READY, "", now)
            self.due_at = None
            self._preparations.reset()

    def preparation_failed(self, record: ErrorRecord, now: Instant) -> None:
        """Record a failed preparation. Afterwards :attr:`prepares_again` is true, or the state is failed."""
        wait_s = self._preparations.next_s()
        if record.retryable and self._preparations.failures < _MAX_PREPARATIONS and not self._pause.failures:
            self._set(State.PREPARING, f"it is prepared again in {wait_s:g} s: {record.message}", now)
            self.due_at, self.prepares_again = now.mono + wait_s, True
        else:
            self._fail(record, now)

    @property
    def launch_at(self) -> float:
        """When a worker of the owner may be started in a ready environment."""
        return self._starts.launch_at

    @property
    def has_failed_starts(self) -> bool:
        """Whether workers of a submitter other than the owner did not start."""
        return bool(self._of_others)

    def launch_at_of(self, submitter: str) -> float:
        """Return when a worker of a submitter may be started in a ready environment."""
        starts = self._of_others.get(submitter)
        return self.launch_at if starts is None else max(self.launch_at, starts.launch_at)

    def refusal_of(self, submitter: str, now: Instant) -> ErrorRecord | None:
        """Why there is no use in waiting for a worker of a submitter other than the owner."""
        starts = self._of_others.get(submitter)
        return starts.record if starts is not None and now.mono < starts.retry_at else None

    def worker_started(self, submitter: str, start_s: float) -> None:
        """Record that a worker of a submitter became ready after ``start_s`` seconds."""
        self._of_others.pop(submitter, None)
        self.last_start_s = start_s
        self.start_s = start_s if self.start_s is None else self.start_s + _MEMORY * (start_s - self.start_s)
        self._starts.succeeded()
        self._pause.reset()
        self.record = None
        if self.state is State.FAILED:  # it was slow, but it works
            self.state = State.READY

    def worker_not_started(
        self,
        submitter: str,
        words: str,
        log: str,
        now: Instant,
        *,
        has_workers: bool,
        excess: ErrorRecord | None = None,
    ) -> ErrorRecord | None:
        """A worker of a submitter died before it was ready, with these last words and this end of its log. After
        several, the environment fails, if it has no worker: for the owner (the empty submitter) as a whole, else for
        that submitter alone, whose packages and files may be why. The error, if it has failed.

        :param has_workers: of that submitter; for the owner, of any.
        :param excess: the limit that a worker of another submitter than the owner has exceeded.
        """
        if self.state in (State.COLD, State.PREPARING):  # it was lost, which is not a failure
            return None
        record = outcomes.environment_start_failed(self.environment.label, words) if excess is None else excess
        record = dataclasses.replace(record, stderr_tail=log or None)
        if submitter:
            starts = self._of_others.setdefault(submitter, _StartsOfOne())
            while len(self._of_others) > _MAX_KNOWN:
                del self._of_others[next(iter(self._of_others))]
            is_final = excess is not None
            has_failed = starts.failed_for(record, now.mono, has_workers=has_workers, is_final=is_final)
            return record if has_failed else None
        self.record = record
        if not self._starts.failed(now.mono, is_try=self._pause.failures > 0, has_workers=has_workers):
            return None
        self._fail(record, now)
        return record

    def tasks_ended(self, count: int, duration_s: float) -> None:
        """Record that a worker ran ``count`` tasks, which took ``duration_s`` seconds together."""
        mean_s = max(duration_s / count, 1e-6)
        if self.mean_s is None:
            self.mean_s = mean_s
        else:
            self.mean_s += (1 - (1 - _MEMORY) ** count) * (mean_s - self.mean_s)

    def released(self, now: Instant) -> None:
        """Record that no process of the environment runs any more."""
        self.forkable = False
        self._set(State.COLD, "", now)

    def progress(self, text: str, now: Instant) -> None:
        """Record the current step of the preparation, for display."""
        if self.state is State.PREPARING and text != self.text:
            self.text, self.since = text, now.epoch

    def status(self, workers: Sequence[Worker]) -> EnvironmentStatus:
        """Return the status of the environment for the agent.

        :param workers: the workers of this environment.
        """
        alive = [worker for worker in workers if not worker.killed]
        return EnvironmentStatus(
            self.key,
            self.environment.label,
            self.environment.type,
            warm=sum(worker.is_idle for worker in alive),
            busy=sum(bool(worker.jobs) for worker in alive),
            starting=sum(not worker.is_ready for worker in alive),
            forkable=self.forkable,
            text=self.text,
            since=self.since,
            problem="" if self.record is None else self.record.message,
            start_s=self.last_start_s,
            parked=sum(worker.parked for worker in alive),
            retry_at=self._retry_epoch if self.state is State.FAILED else None,
        )

    def _fail(self, record: ErrorRecord, now: Instant) -> None:
        self.record = record
        pause_s = self._pause.next_s()
        self._retry_at, self._retry_epoch = now.mono + pause_s, now.epoch + pause_s
        self._starts.begin_again()
        self._preparations.reset()
        self.due_at = None
        self._set(State.FAILED, "", now)

    def _set(self, state: State, text: str, now: Instant) -> None:
        self.state, self.text, self.since = state, text, now.epoch


class OwnStarts:
    """Starts of workers of the endpoint's own Python. Those that fail for a submitter other than the owner hold up that
    submitter alone, whose directories may be why; those of the owner hold up all: the node cannot start workers."""

    def __init__(self) -> None:
        self._starts = _Starts()
        self._of_others: dict[str, _Starts] = {}  # by submitter

    @property
    def failures(self) -> int:
        """How many rounds of starts of the owner have failed since a worker has started."""
        return self._starts.failures

    def launch_at_of(self, submitter: str) -> float:
        """When a worker of a submitter may be started."""
        starts = self._of_others.get(submitter)
        launch_at = self._starts.launch_at
        return launch_at if starts is None else max(launch_at, starts.launch_at)

    def started(self, submitter: str) -> None:
        """A worker of a submitter is ready."""
        self._of_others.pop(submitter, None)
        self._starts.succeeded()

    def failed(self, submitter: str, now: float) -> None:
        """A worker of a submitter died before it was ready."""
        starts = self._starts
        if submitter:
            starts = self._of_others.setdefault(submitter, _Starts())
            while len(self._of_others) > _MAX_KNOWN:
                del self._of_others[next(iter(self._of_others))]
        starts.count(now)


class EnvironmentStates(dict[str, EnvironmentState]):
    """All environments that a manager has seen, by key. The least recently needed are forgotten beyond a number.
    ``own``: starts of the endpoint's own Python."""

    def __init__(self) -> None:
        super().__init__()
        self.own = OwnStarts()

    def of(self, environment: Environment) -> EnvironmentState:
        """Return the state of an environment; add it if it is new."""
        key = environment.key
        state = self.get(key)
        if state is None:
            self._forget()
            state = self[key] = EnvironmentState(environment)
        return state

    def is_ready(self, key: str, submitter: str, now: float) -> bool:
        """Whether workers of a submitter can be launched in it now; the empty key is the endpoint's own Python."""
        if not key:
            return now >= self.own.launch_at_of(submitter)
        state = self.get(key)
        return state is not None and state.state is State.READY and now >= state.launch_at_of(submitter)

    def start_s(self, key: str) -> float:
        """Return the expected duration of a worker start in an environment, in seconds."""
        state = self.get(key)
        return _GUESSED_OWN_START_S if state is None else state.expected_start_s

    def memory_bytes(self, key: str) -> int | None:
        """Return the measured memory of a worker of an environment; None before a measurement."""
        state = self.get(key)
        return None if state is None else state.memory_bytes

    def _forget(self) -> None:
        unused = [
            each
            for each in self.values()
            if each.state in (State.COLD, State.FAILED) and not (each.waiting or each.is_wanted)
        ]
        unused.sort(key=lambda each: each.used_at)
        for state in unused[: max(0, len(self) + 1 - _MAX_KNOWN)]:
            del self[state.key]
