"""Calls on other managers: those that leave, and those that come from others. Pure: no I/O, no clock.

A graph, and a running task with its calls, stay at their manager, the *home* of the calls. When more of these wait than
its workers begin soon, or some need an environment that its node cannot run, the agent takes calls over, and passes
them to managers with idle slots. To its home, a call that is away is a job without a worker: its outcome comes as a
message, and goes to its owner as if a worker of its own had ended it. To the other manager it is a job like others,
whose owner passes the outcome on.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from farcall_common.environments import Environment
from farcall_common.wire import TaskState
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import (
    CallEnd,
    CallNews,
    CallsDropped,
    CallsTaken,
    Died,
    GivenCall,
    RefuseCalls,
    RunCalls,
    Started,
    TakeCalls,
    Used,
)
from farcall_endpoint.contracts.manager_worker import CallOrder
from farcall_endpoint.graphs.stages import PROGRESS_PERIOD_S
from farcall_endpoint.graphs.values import read
from farcall_endpoint.host.shared_memory import Frame
from farcall_endpoint.manager.core.actions import Action, Pass
from farcall_endpoint.manager.core.events import Callees, Instant, Job, Outcome, Owner, Sums
from farcall_endpoint.manager.core.graphs import input_bytes
from farcall_endpoint.manager.core.reports import Reports
from farcall_endpoint.manager.core.task_queue import TaskQueue

_SHORT_WAIT_S: Final = 0.005
"""Calls that should begin within this time do not leave: the transfer would take much of it."""
_PERIOD_S: Final = 0.001
"""Seconds between two reviews of a queue that is not empty."""
_LONG_S: Final = 0.05
"""Wait after which calls may leave, whatever start is expected."""
_PAUSE_S: Final = 0.1
"""Seconds until the next offer after the manager had fewer calls than the agent asked for."""
_MOST_INPUT_BYTES: Final = 16 * 2**20
"""A call with larger inputs stays, unless it cannot run here."""
_MOST_MESSAGE_BYTES: Final = 64 * 2**20
_MOST_KNOWN_FUNCTIONS: Final = 1000
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(CallOrder).decode


class AwayCalls:
    """The calls of this manager that other managers run, or that only other managers can run.

    :param types: technologies of environments, each with the reason why it does not work on this node, empty if it
        works; None: all work.
    :param slots: maximum number of calls that run here concurrently.
    :param default_key: key of the environment of tasks that name none; in messages to the agent this key is empty.
    """

    def __init__(
        self,
        *,
        queue: TaskQueue,
        reports: Reports,
        actions: list[Action],
        types: Mapping[str, str] | None,
        slots: int,
        default_key: str,
    ) -> None:
        self._queue = queue
        self._reports = reports
        self._actions = actions
        self._types = types
        self._slots = max(1, slots)
        self._default_key = default_key
        self.taken: dict[str, Job] = {}
        #: Use of the taken calls, and the instant of this reading: their start, or their last report.
        self._used: dict[str, tuple[Used, float]] = {}
        #: Calls that cannot run here, by environment.
        self._held: dict[str, collections.deque[Job]] = {}
        self._known: dict[str, set[str]] = {}  # functions, by manager
        self._offered: dict[str, int] = {}  # as the agent has it
        self._since: float | None = None
        self._quiet_until = -math.inf
        self.due_at = math.inf
        """When :meth:`review` is due without an event."""
        self._seen_at = -math.inf

    # -- offers --------------------------------------------------------------------------------------------------------

    def cannot_run(self, environment: Environment | None) -> bool:
        """Whether this node lacks what an environment needs."""
        return environment is not None and self._types is not None and self._types.get(environment.type) != ""

    def hold(self, jobs: Sequence[Job], key: str) -> None:
        """Keep calls that cannot run on this node until another manager takes them."""
        if jobs:
            self._held.setdefault(key, collections.deque()).extend(jobs)
        self._seen_at = -math.inf

    def __bool__(self) -> bool:
        """Whether any calls are away, are offered or will be offered."""
        return bool(self.taken or self._held or self._offered or self._since is not None or self.due_at != math.inf)

    def review(self, now: float, *, mean_s: float | None) -> None:
        """Let the agent take calls that have waited too long, or withdraw this offer.

        :param mean_s: mean run time of a call in seconds; None if it is not known.
        """
        if now < self._seen_at + _PERIOD_S and now < self.due_at and self._queue:
            self.due_at = min(self.due_at, self._seen_at + _PERIOD_S)
            return
        self._seen_at = now
        counts = self._queue.calls()
        total = sum(counts.values())
        if not total:
            self._since = None
        elif self._since is None:
            self._since = now
        self.due_at = math.inf
        found: dict[str, int] = {}
        if self._since is not None:
            is_short = mean_s is not None and total * mean_s < _SHORT_WAIT_S * self._slots
            ripe_at = max(self._quiet_until, self._since + (_LONG_S if is_short else _SHORT_WAIT_S))
            if now >= ripe_at:
                found = {self._key(key): count for key, count in counts.items()}
            else:
                self.due_at = ripe_at
        for key, jobs in self._held.items():
            found[key] = found.get(key, 0) + len(jobs)
        if found.keys() != self._offered.keys():
            self._offered = found
            self._reports.offer(tuple(found.items()))

    def give(self, request: TakeCalls, now: float) -> None:
        """Answer the agent, which takes calls over."""
        held = self._held.get(request.key)
        jobs: list[Job] = []
        while held and len(jobs) < request.count:
            jobs.append(held.popleft())
        if held is not None and not held:
            del self._held[request.key]
        key = request.key or self._default_key
        waiting = self._queue.calls().get(key, 0)
        most = min(request.count - len(jobs), waiting)
        idle = max(0, request.idle - len(jobs))
        if most > idle:  # what would wait there, too, is shared
            most = min(most, idle + (waiting - idle) // 2)
        jobs += self._queue.take_calls(key, most, _may_leave, once=idle)
        left = self._queue.calls().get(key, 0) + len(self._held.get(request.key, ()))
        if len(jobs) < request.count and request.key in self._offered:
            left = 0
            del self._offered[request.key]
            self._quiet_until = now + _PAUSE_S
        self._send(request, _within(jobs, self), left, now)

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Put calls that do not fit into a message back to those that wait."""
        for job in jobs:
            self._accept_again(job)

    def _accept_again(self, job: Job) -> None:
        environment = job.order.options.environment
        key = self._default_key if environment is None else environment.key
        if self.cannot_run(environment):
            self._held.setdefault(key, collections.deque()).appendleft(job)
        else:
            self._queue.add([job], key, first=True)

    def _send(self, request: TakeCalls, jobs: Sequence[Job], left: int, now: float) -> None:
        known = self._known.setdefault(request.to, set())
        new: dict[str, Frame] = {}
        lists: dict[int, int] = {}
        callees: list[tuple[str, ...]] = []
        for job in jobs:
            new[job.order.function_hash] = job.function
            if job.callees is not None and id(job.callees) not in lists:
                lists[id(job.callees)] = len(callees)
                callees.append(tuple(job.callees.functions))
                new.update(job.callees.functions)
        forget = len(known) + len(new) > _MOST_KNOWN_FUNCTIONS
        if forget:
            known.clear()
        new = {function_hash: body for function_hash, body in new.items() if function_hash not in known}
        known.update(new)
        bodies: list[Frame] = list(new.values())
        calls: list[GivenCall] = []
        for job in jobs:
            assert job.call is not None
            order = msgspec.structs.replace(job.order, payload=len(bodies))
            number = -1 if job.callees is None else lists[id(job.callees)]
            calls.append(GivenCall(order, _encode(job.call), len(job.inputs), job.depth, number))
            bodies += [job.payload, *job.inputs]
            self.taken[job.order.task_id] = job
            self._used[job.order.task_id] = Used(), now
        functions = tuple((function_hash, number) for number, function_hash in enumerate(new))
        message = CallsTaken(
            request.to, request.key, request.count, tuple(calls), functions, forget, tuple(callees), left
        )
        self._pass(message, bodies)

    def _key(self, key: str) -> str:
        return "" if key == self._default_key else key

    # -- ends ----------------------------------------------------------------------------------------------------------

    def heard(self, news: CallNews, bodies: Sequence[Frame], now: Instant) -> None:
        """News of calls that are away."""
        for _, started in news.started:
            if (job := self.taken.get(started.task_id)) is not None:
                self._note_start(started, now)
                self._reports.started(job, started.at)
        for _, task_id, used in news.used:
            if task_id in self._used:
                self._used[task_id] = used, now.mono
        for end in news.ended:
            if (job := self._back(end.task_id, end.used, now.mono)) is not None:
                behind = end.first + end.parts
                self._reports.finish(
                    job,
                    end.state,
                    end.error,
                    started_at=end.started_at,
                    ended_at=end.ended_at,
                    is_retried=end.is_retried,
                    output=None if end.printed is None else (end.printed, bytes(read(bodies[behind]))),
                    parts=bodies[end.first : behind],
                    pid=end.pid,
                    node=end.node,
                )
        for _, died in news.died:
            if (job := self._back(died.task_id, died.used, now.mono)) is not None:
                self._reports.died(job, died)
        for task_id in reversed(news.returned):
            if (job := self._back(task_id, None, now.mono)) is not None:
                self._accept_again(job)

    def used(self, now: float) -> Iterator[tuple[Job, Used]]:
        """Yield the calls that are away with their use, as far as that is known here."""
        for task_id, (used, at) in self._used.items():
            yield self.taken[task_id], used.after(now - at)

    def _note_start(self, started: Started, now: Instant) -> None:
        """A call has begun by another node's clock, which may be wrong: but not before it was sent there."""
        used, at = self._used[started.task_id]
        if not used.places:
            age_s = min(max(0.0, now.epoch - started.at), now.mono - at)
            self._used[started.task_id] = Used(age_s, 1, 1), now.mono

    def _back(self, task_id: str, used: Used | None, now: float) -> Job | None:
        """Record that a call is not away any more, and add its use to its owner.

        :param used: what it has used; None if the other manager cannot say.
        """
        job = self.taken.pop(task_id, None)
        if job is not None:
            known, at = self._used.pop(task_id)
            used = known.after(now - at) if used is None else used
            assert job.owner is not None
            job.owner.sums.add(used.run_s, used.calls)
        return job

    def forget(self, manager_id: str) -> None:
        """Forget the functions that a manager had received; it is gone."""
        self._known.pop(manager_id, None)

    def refuse(self, message: RefuseCalls) -> None:
        """Fail the calls that no manager can run."""
        for job in self._held.pop(message.key, ()):
            environment = job.order.options.environment
            label = "" if environment is None else environment.label
            record = outcomes.environment_unsupported(label, message.reason)
            self._reports.finish(job, TaskState.FAILED, record.to_json())

    def cancel(self, task_ids: Collection[str], now: float) -> None:
        """Cancel those of the given calls that are away or wait to leave."""
        gone = [task_id for task_id in self.taken if task_id in task_ids]
        for task_id in gone:
            if (job := self._back(task_id, None, now)) is not None:
                self._end(job, running=True)
        if gone:
            self._pass(CallsDropped(tuple(gone)), ())
        for key, jobs in list(self._held.items()):
            out = [job for job in jobs if job.order.task_id in task_ids]
            if len(out) == len(jobs):
                del self._held[key]
            elif out:
                self._held[key] = collections.deque(job for job in jobs if job.order.task_id not in task_ids)
            for job in out:
                self._end(job, running=False)

    def _end(self, job: Job, *, running: bool) -> None:
        self._reports.finish(job, TaskState.CANCELLED, outcomes.cancelled(running=running).to_json())

    def _pass(self, message: CallsTaken | CallsDropped, bodies: Sequence[Frame]) -> None:
        self._reports.passed(sum(map(len, bodies)))
        self._actions.append(Pass(message, tuple(bodies)))


class Guests:
    """Calls of other managers that run here, and the reports about them for the agent.

    :param node: host name of this node.
    """

    def __init__(self, *, reports: Reports, node: str) -> None:
        self._reports = reports
        self._node = node
        self._ended: list[CallEnd] = []
        self._bodies: list[Frame] = []
        self._died: list[tuple[int, Died]] = []
        self._started: list[tuple[int, Started]] = []
        self._used: list[tuple[int, str, Used]] = []
        #: Calls that make calls, to which something has happened.
        self._touched: dict[Guest, None] = {}
        self._shown_at = -math.inf
        self.due_at = math.inf
        """When :meth:`review` has use to report."""

    def owner(self, number: int, task_id: str) -> Guest:
        """The owner of a call with this number."""
        return Guest(number, task_id, self)

    def __bool__(self) -> bool:
        """Whether there is news."""
        return bool(self._ended or self._died or self._started or self._used)

    def touched(self, guest: Guest) -> None:
        """Record a change in the calls that a guest call has made."""
        if not self._touched:
            self.due_at = self._shown_at + PROGRESS_PERIOD_S
        self._touched[guest] = None

    def review(self, uses: Callable[[float], Mapping[Owner, Used]], now: float) -> None:
        """Note the use of guest calls that make calls, for the report to their home. Called at :attr:`due_at`."""
        self._shown_at, self.due_at = now, math.inf
        found = uses(now)
        self._used += [(each.number, each.task_id, found[each]) for each in self._touched if each in found]
        self._touched.clear()

    def started(self, number: int, job: Job, at: float) -> None:
        """A call has been running for a while."""
        self._started.append((number, Started(job.order.task_id, at)))

    def ended(self, guest: Guest, job: Job, outcome: Outcome) -> None:
        """A call has ended."""
        self._touched.pop(guest, None)
        self._ended.append(
            CallEnd(
                guest.number,
                job.order.task_id,
                outcome.state,
                outcome.error,
                len(self._bodies),
                len(outcome.parts),
                outcome.started_at,
                outcome.ended_at,
                outcome.is_retried,
                None if outcome.output is None else outcome.output[0],
                outcome.pid,
                outcome.node or self._node,
                Used(guest.sums.run_s, guest.sums.calls),
            )
        )
        self._bodies += outcome.parts
        if outcome.output is not None:
            self._bodies.append(outcome.output[1])

    def died(self, guest: Guest, died: Died) -> None:
        """The worker of a call is gone."""
        self._touched.pop(guest, None)
        used = Used(guest.sums.run_s, guest.sums.calls)
        self._died.append((guest.number, msgspec.structs.replace(died, used=used)))

    def news(self) -> Pass:
        """Return the message about guest calls with the events since the last call."""
        message = CallNews(tuple(self._ended), tuple(self._died), tuple(self._started), used=tuple(self._used))
        bodies = tuple(self._bodies)
        self._ended, self._bodies, self._died, self._started, self._used = [], [], [], [], []
        self._reports.passed(sum(map(len, bodies)))
        return Pass(message, bodies)


class Guest:
    """The owner of one call of another manager; see :class:`~farcall_endpoint.manager.core.events.Owner`."""

    __slots__ = ("_guests", "number", "sums", "task_id")

    def __init__(self, number: int, task_id: str, guests: Guests) -> None:
        self.number = number
        self.task_id = task_id
        self.sums = Sums()
        self._guests = guests

    @property
    def above(self) -> Owner | None:
        """None: the call's owner is at its home."""
        return None

    def touch(self) -> None:
        self._guests.touched(self)

    def started(self, job: Job, at: float) -> None:
        self._guests.started(self.number, job, at)

    def ran(self, job: Job, started_at: float, ended_at: float, pid: int) -> None:
        """No operation: the home counts runs when they end."""

    def ended(self, job: Job, outcome: Outcome) -> None:
        self._guests.ended(self, job, outcome)

    def died(self, _: Job, died: Died) -> None:
        self._guests.died(self, died)


def jobs_of(
    message: RunCalls, bodies: Sequence[Frame], *, functions: dict[str, Frame], owner: Callable[[int, str], Guest]
) -> list[Job]:
    """Return the jobs for calls of another manager, their home.

    :param functions: known functions of this home; the message may add to them.
    :param owner: returns the owner of a call by its number and id.
    """
    if message.forget:
        functions.clear()
    functions.update((function_hash, bodies[body]) for function_hash, body in message.functions)
    callees = [Callees({each: functions[each] for each in hashes}) for hashes in message.callees]
    jobs: list[Job] = []
    for each in message.calls:
        order, behind = each.order, each.order.payload + 1
        inputs = tuple(bodies[behind : behind + each.inputs])
        jobs.append(
            Job(
                order,
                functions[order.function_hash],
                bodies[order.payload],
                callees=None if each.callees < 0 else callees[each.callees],
                call=_decode(each.call),
                inputs=inputs,
                input_bytes=input_bytes(inputs),
                depth=each.depth,
                owner=owner(each.number, order.task_id),
            )
        )
    return jobs


def _may_leave(job: Job) -> bool:
    """Whether another manager may run a job: one that collects its inputs only moves them."""
    return (
        job.owner is not None
        and not isinstance(job.owner, Guest)
        and job.call is not None
        and not job.call.is_ahead
        and bool(job.order.function_hash)
        and job.input_bytes + len(job.payload) <= _MOST_INPUT_BYTES
        and not job.order.options.wants_ranks
    )


def _within(jobs: Sequence[Job], away: AwayCalls) -> Sequence[Job]:
    """Return the first jobs, as many as fit into a message but at least one, and put the others back."""
    size_bytes = 0
    for index, job in enumerate(jobs):
        size_bytes += len(job.payload) + job.input_bytes
        if index and size_bytes > _MOST_MESSAGE_BYTES:
            away.put_back(jobs[index:])
            return jobs[:index]
    return jobs
