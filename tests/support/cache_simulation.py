"""A simulated endpoint whose tasks read files: a real agent core, a transfer process with a cache, and a node, in
simulated time.

A file ``s3://lab/ID/BYTES`` has so many bytes. A copy without a task makes room for others at once.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import random
from collections.abc import Callable, Sequence

from farcall_common import wire
from farcall_common.staged_files import FileUse, pack_files
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.agent import AgentCore
from farcall_endpoint.agent.core.scheduling import DEFAULT_POLICY, load_policy
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import Finished, Progress, Started
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.files import orders
from farcall_endpoint.files.orders import taken_bytes
from farcall_endpoint.files.plan import Staging
from tests.support.agent import CoreDriver, Turn
from tests.unit.test_endpoint_agent_core import BODY, FUNCTION, spec

_FULL = outcomes.files_no_room("there is no room").to_json()


class SimulatedEndpoint:
    """All that happens is in ``waits``, ``moved_bytes`` and ``links``.

    :param budget_bytes: of the cache.
    :param places: workers of the node.
    :param removal_s: time to remove the directory of a task.
    """

    def __init__(
        self, *, budget_bytes: int, places: int, policy: str = DEFAULT_POLICY, rate: float = 1e8, removal_s: float = 0.0
    ) -> None:
        self.core = CoreDriver(
            AgentCore(
                endpoint_id="e",
                policy=load_policy(policy, random.Random(1)),
                slots_hint=places,
                prefetch=PrefetchPolicy(horizon_s=1.0, limit=0),
                window=PrefetchPolicy(horizon_s=1.0, limit=0),
                max_window=1000,
                staging=Staging(most_bytes=budget_bytes),
            )
        )
        self.now = 0.0
        self.budget_bytes, self.places, self._rate, self._removal_s = budget_bytes, places, rate, removal_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._held: dict[str, dict[str, int]] = {}  # by task and content
        self._drafts: dict[int, int] = {}
        self._cached: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._run_s: dict[str, float] = {}
        self._wake_at = float("inf")
        self.submitted_at: dict[str, float] = {}
        self.started_at: dict[str, float] = {}
        self.ended_at: dict[str, float] = {}
        self.payers: dict[str, str] = {}
        self.states: dict[str, TaskState] = {}
        self.links = self.fetches = 0
        self._idle = places
        self._queue: collections.deque[str] = collections.deque()
        self.core.manager_registered("m", slots=places)
        self.core.progress("m", Progress(workers=places))
        self.core.opened()
        self._turn()

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def submit(self, payer: str, task_id: str, *sizes: int, run_s: float, content: str = "", account: str = "") -> None:
        """A task that reads files of these sizes; with ``account`` by one of the payer's service accounts."""
        uses = [FileUse(f"s3://lab/{content or task_id}-{n}/{size}") for n, size in enumerate(sizes)]
        self._run_s[task_id], self.submitted_at[task_id], self.payers[task_id] = run_s, self.now, payer
        submitter, paid_by = (account, payer) if account else (payer, "")
        task = spec(task_id, submitter=submitter, payer=paid_by)
        payload = pack_files(uses, b"call") if uses else b"call"
        self.core.run_tasks(wire.RunTasks(tasks=(task,), functions=(FUNCTION,)), [BODY, payload])
        self._turn()

    def cancel(self, task_id: str) -> None:
        """Cancel a task that does not run."""
        self.core.cancel([task_id])
        self._turn()

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until a condition holds; whether it does before the limit."""
        limit = self.now + limit_s
        while not until():
            if not self._events or self._events[0][0] > limit:
                self.now = limit
                return False
            self.now, _, happen = heapq.heappop(self._events)
            happen()
            assert self.used_bytes <= self.budget_bytes
        return True

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Let something happen later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), happen))

    def has_ended(self, *task_ids: str) -> Callable[[], bool]:
        """A condition for :meth:`run`: these tasks have ended; without any, all."""
        return lambda: self.ended_at.keys() >= set(task_ids or self.submitted_at)

    def waited(self, task_id: str) -> float:
        """How long a task waited until it began."""
        return self.started_at[task_id] - self.submitted_at[task_id]

    def _turn(self) -> None:
        turn: Turn = self.core.decide(now=self.now)
        for action in turn.actions:
            if isinstance(action, do.MoveFiles):
                for order in action.orders:
                    self._perform(order)
        for task in turn.orders.get("m", ()):
            self._queue.append(task.task_id)
        for task in turn.results:
            self.ended_at[task.task_id] = self.now
            assert task.result is not None
            self.states[task.task_id] = task.result.state
        if turn.results:
            self.core.recorded([wire.TaskRef(task_id=t.task_id, attempt=t.attempt) for t in turn.results])
            self.after(0.0, self._turn)
        if any(isinstance(each, do.WriteSpool) for each in turn.actions):
            self.core.add(ev.SpoolWritten())
            self.after(0.0, self._turn)
        self._start()
        at = self.core.core.next_deadline()
        if at is not None and (at < self._wake_at or self._wake_at <= self.now) and at > self.now:
            self._wake_at = at
            self.after(at - self.now, self._turn)

    def _start(self) -> None:
        started = []
        while self._idle and self._queue:
            task_id = self._queue.popleft()
            assert len(self._held.get(task_id, ())) or not self._held, task_id
            self._idle -= 1
            self.started_at.setdefault(task_id, self.now)
            started.append(Started(task_id, self.now))
            self.after(self._run_s[task_id], lambda task_id=task_id: self._finish(task_id))  # type: ignore[misc]
        if started:
            self.core.progress("m", Progress(workers=self.places, started=tuple(started)))
            self.after(0.0, self._turn)

    def _finish(self, task_id: str) -> None:
        self._idle += 1
        finished = Finished(task_id, TaskState.SUCCESS, 0, None, self.started_at[task_id], self.now)
        self.core.progress("m", Progress(workers=self.places, finished=(finished,)), [b"r"])
        self._turn()

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _report(self, *reports: orders.Report) -> None:
        self.core.add(ev.TransfersReported(reports))
        self._turn()

    def _perform(self, order: orders.Order) -> None:
        match order:
            case orders.Make(task_id=task_id):
                self._held.setdefault(task_id, {})
                self.after(0.001, lambda: self._report(orders.Made(task_id)))
            case orders.Remove(task_id=task_id):
                self.after(self._removal_s, lambda: self._remove(task_id))
            case orders.Fetch():
                self.after(0.01, lambda: self._fetch(order))
            case orders.Cancel(number=number):
                self._drafts.pop(number, None)
            case _:
                raise AssertionError(order)

    def _remove(self, task_id: str) -> None:
        self._cached |= self._held.pop(task_id, {})
        self._report(orders.Removed(task_id))

    def _fetch(self, order: orders.Fetch) -> None:
        content, size_bytes = f"{order.submitter}:{order.use.url}", int(order.use.url.rpartition("/")[2])
        if content in self._contents() or content in self._cached:
            self._link(order, content, size_bytes, cached=True)
            return
        missing_bytes = self.used_bytes + taken_bytes(size_bytes) - self.budget_bytes
        if missing_bytes > 0:
            self._report(
                orders.Failed(order.number, _FULL, missing_bytes, self.budget_bytes, tuple(self._drafts.items()))
            )
            return
        self.fetches += 1
        self._drafts[order.number] = taken_bytes(size_bytes)
        while self._cached and sum(self._cached.values()) + self.used_bytes > self.budget_bytes:
            self._cached.popitem(last=False)
        self.after(size_bytes / self._rate, lambda: self._fetched(order, content, size_bytes))

    def _fetched(self, order: orders.Fetch, content: str, size_bytes: int) -> None:
        if self._drafts.pop(order.number, None) is not None:
            self._link(order, content, size_bytes, cached=False)

    def _link(self, order: orders.Fetch, content: str, size_bytes: int, *, cached: bool) -> None:
        there = [task_id for task_id in order.task_ids if task_id in self._held]
        for task_id in there:
            self._held[task_id][content] = taken_bytes(size_bytes)
            self.links += 1
        if there:
            self._cached.pop(content, None)
        self._report(orders.Fetched(order.number, size_bytes, content, cached=cached))

    def _contents(self) -> dict[str, int]:
        return {content: size for held in self._held.values() for content, size in held.items()}

    @property
    def used_bytes(self) -> int:
        """What tasks hold, and what is on its way."""
        return sum(self._contents().values()) + sum(self._drafts.values())


def sizes(total: int, count: int) -> Sequence[int]:
    """Equal parts."""
    return [total // count] * count
