"""The agent's core: routes events to the parts that handle them, and returns the actions. No I/O.

Every task that the spool holds is here, from acceptance until the cloud has recorded its result. Instants are epoch
seconds.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_common.limits import MAX_INLINE_BYTES
from farcall_common.wire import (
    BlobGrant,
    EndpointReport,
    FunctionSpec,
    HeldTask,
    TaskRef,
    TaskSpec,
    TaskState,
)
from farcall_endpoint import outcomes
from farcall_endpoint.agent import actions as do
from farcall_endpoint.agent import events as ev
from farcall_endpoint.agent.actions import Action
from farcall_endpoint.agent.calls import CallsElsewhere, run_times
from farcall_endpoint.agent.demand import Demand, demand_of
from farcall_endpoint.agent.environments import (
    EnvironmentsSeen,
    image_of,
    in_pods,
    report_environments,
    waiting_reasons,
)
from farcall_endpoint.agent.events import Event
from farcall_endpoint.agent.graphs import GraphNeeds, read_graph
from farcall_endpoint.agent.loads import NO_ENVIRONMENTS, Lifetime
from farcall_endpoint.agent.managers import Managers, TaskQueue
from farcall_endpoint.agent.prewarm import Prewarming
from farcall_endpoint.agent.reports import CreditWindow, Transitions, UploadRetries
from farcall_endpoint.agent.retries import RetryQueue, history_detail, may_retry, with_retries
from farcall_endpoint.agent.running_graphs import RunningGraphs
from farcall_endpoint.agent.scheduling import SchedulingPolicy
from farcall_endpoint.agent.spool_space import SpoolSpace
from farcall_endpoint.agent.tasks import (
    Kept,
    OpenedCall,
    ResultFactory,
    Stage,
    Task,
    TaskResult,
    attempt_of,
    graph_refusal,
    refusal,
)
from farcall_endpoint.agent.turn import Turn
from farcall_endpoint.output import Printed
from farcall_endpoint.prefetch import PrefetchPolicy
from farcall_endpoint.protocol import Died, Finished
from farcall_endpoint.shared_memory import Bytes

if TYPE_CHECKING:
    from farcall_endpoint.agent.signatures import SignatureCheck

_KEEP_BYTES: Final = 16 * 1024
"""Payloads up to here stay in memory until they are sent to a manager; larger ones are read from the spool again."""

_SHARED_LOSSES: Final = 5
"""Managers with which a task may be lost, together with tasks of others, before that counts: it may be the cause."""


_LOOK_AGAIN_S: Final = 0.1
"""While tasks of an environment wait, the policy is asked so often: time alone may change what is best."""
_MOST_ASIDE: Final = 1000
"""So many tasks that wait for a retry do not count as held, so that the workers get others meanwhile."""


class AgentCore:
    """All decisions of one agent about its tasks.

    :param endpoint_id, max_inline_bytes: see :class:`ResultFactory`.
    :param slots_hint: workers to expect before a manager has registered.
    :param prefetch: tasks to keep at a manager behind each running one.
    :param window: tasks to hold here for each slot, to hide the way to the cloud; at most ``max_window``.
    :param has_cloud: False for an engine in the program's own process: nothing is written to a spool, and a result is
        final once it is reported.
    :param block_s: seconds that a block of managers lives; None if it has no limit.
    :param drain_s: in the last seconds of a block no task starts whose length is unknown.
    :param max_walltime_s: limit of every attempt, whatever its task requests; None is no limit.
    :param weights: by submitter, how many of its tasks run for each one of another; 1 for those not named.
    :param allowed_functions: see :func:`~farcall_endpoint.agent.tasks.refusal`.
    :param signatures: which functions have a signature that counts; None: functions need none.
    :param seal: returns the result of a task as it leaves the endpoint.
    :param image_check: where a block runs the image of one environment: why a submitter may not have that image, empty
        if it may (see :func:`farcall_endpoint.agent.nodes.image_check`). None where blocks run all tasks.
    :param default_environment: of tasks that name none; the managers know it, too.
    :param jitter: returns random numbers in [0, 1), for the waits before retries.
    """

    def __init__(
        self,
        *,
        endpoint_id: str,
        policy: SchedulingPolicy,
        slots_hint: int,
        prefetch: PrefetchPolicy,
        window: PrefetchPolicy,
        max_window: int,
        max_inline_bytes: int = MAX_INLINE_BYTES,
        has_cloud: bool = True,
        block_s: float | None = None,
        drain_s: float = 0.0,
        max_walltime_s: float | None = None,
        weights: Mapping[str, int] | None = None,
        allowed_functions: Collection[str] | None = None,
        signatures: SignatureCheck | None = None,
        seal: Callable[[Task, TaskResult], TaskResult] = lambda _, result: result,
        image_check: Callable[[Environment, str], str] | None = None,
        default_environment: Environment | None = None,
        jitter: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._seal = seal
        self._results = ResultFactory(endpoint_id=endpoint_id, max_inline_bytes=max_inline_bytes)
        self._policy = policy
        self.slots_hint = slots_hint
        self._prefetch = prefetch
        self._window = window
        self._credit = CreditWindow(window, limit=max_window)
        self._has_cloud = has_cloud
        self._transitions = Transitions(is_enabled=has_cloud)
        self._space = SpoolSpace()
        self._block_s = block_s
        self._drain_s = drain_s
        self._max_walltime_s = max_walltime_s
        self._allowed_functions = allowed_functions
        self._signatures = signatures
        self._is_restricted = allowed_functions is not None or signatures is not None
        self._tasks: dict[str, Task] = {}
        #: By submitter; see :class:`farcall_common.fairness.FairQueue`.
        self.weights: Mapping[str, int] = weights or {}
        self._queue = TaskQueue(self.weights)
        self._functions: set[str] = set()
        self._graphs = RunningGraphs(slots=slots_hint)
        self._environments = EnvironmentsSeen(
            horizon_s=prefetch.horizon_s, limit=prefetch.limit, default=default_environment
        )
        self._image_check = image_check
        self._default_environment = default_environment
        self._managers = Managers("" if default_environment is None else default_environment.key)
        self._elsewhere = CallsElsewhere(self._managers)
        self._default_refusal = ""  # why no present manager can ever run the default
        self._prewarming = Prewarming(image_check=image_check)
        self._look_again_at: float | None = None
        #: Whether anything was heard, apart from the spool, since the tasks of environments were looked at.
        self._has_changed = True
        self._held_results = 0
        #: Results since the start, of any state.
        self.finished_tasks = 0
        self._next_seq = itertools.count(1)
        self._uploads = UploadRetries()
        self._retries = RetryQueue(jitter=jitter)
        self._is_connected = not has_cloud
        #: Tasks of a former process that may not run twice: they wait until the cloud has seen that the spool is no old
        #: copy, in which they may have started since.
        self._unconfirmed: list[Task] = []
        self._is_draining = False
        self._nodes_problem = ""
        self._no_nodes = ""
        self._turn = Turn()
        #: The last turn, while the spool does not have it.
        self._unwritten: Turn | None = None

    @property
    def allowed_signers(self) -> int | None:
        """The number of keys whose functions may run; None if functions need no signature."""
        return None if self._signatures is None else len(self._signatures)

    # -- the shell's side ----------------------------------------------------------------------------------------------

    def handle(self, events: Iterable[Event], now: float) -> list[Action]:
        """Handle events in order; the actions to perform."""
        for event in events:
            self._apply(event, now)
        retry_at = self._space.retry_at
        if self._elsewhere.messages:
            self._pass_on()
        if retry_at is not None and now < retry_at:
            return self._turn.cancel_actions()
        return self._finish_turn(now)

    def next_deadline(self) -> float | None:
        """The epoch second at which :meth:`handle` may return actions without an event."""
        if self._space.retry_at is not None:
            return self._space.retry_at
        deadline = self._look_again_at
        for part in (self._transitions, self._uploads, self._retries):
            if (at := part.next_deadline()) is not None and (deadline is None or at < deadline):
                deadline = at
        return deadline

    @property
    def can_write(self) -> bool:
        """Whether the last write to the spool succeeded."""
        return self._space.retry_at is None

    @property
    def spool_problem(self) -> str:
        """Why no more tasks are requested; empty when the spool has room."""
        return self._space.problem

    def held(self) -> tuple[HeldTask, ...]:
        """For the Hello: every task of the spool."""
        unwritten = {task.seq for task in self._turn.finished}
        return tuple(
            HeldTask(
                task_id=task.task_id,
                attempt=task.attempt,
                finished=task.result is not None and task.seq not in unwritten,
            )
            for task in self._tasks.values()
        )

    def demand(self) -> Demand:
        """The tasks that the blocks should be enough for."""
        unfinished = len(self._tasks) - self._held_results
        extra = self._graphs.extra()
        unfinished += extra.total()
        if self._image_check is None:
            if not (self._queue.waiting or self._managers.has_environments or self._default_environment):
                return Demand(unfinished, self._managers.busy)
            return demand_of(unfinished, self._queue, self._managers, self._environments.by_key)
        images = collections.Counter(
            task.environment_key
            for task in self._tasks.values()
            if task.result is None and task.environment_key and self.image_of(task.environment_key)
        )
        images.update({key: count for key, count in extra.items() if key and self.image_of(key)})
        images[""] = unfinished - images.total()
        return Demand(unfinished, self._managers.busy, images, prewarmed=self._prewarming.images())

    def image_of(self, key: str) -> str:
        """The image of an environment's pods; empty if it has none."""
        environment = self._environments.get(key) or self._prewarming.environment(key)
        return "" if environment is None else image_of(environment)

    def report(self) -> EndpointReport:
        """The numbers for a heartbeat."""
        problem = self._space.problem or self._nodes_problem or self._managers.problem
        unfinished = len(self._tasks) - self._held_results
        environments, graphs = self.environments(), self._graphs.report()
        return EndpointReport(
            managers=len(self._managers),
            total_workers=self._managers.workers,
            idle_workers=self._managers.idle_workers,
            pending_tasks=max(0, unfinished - self._managers.outstanding),
            outstanding_tasks=unfinished,
            detail={
                **({"problem": problem} if problem else {}),
                **({"environments": environments} if environments else {}),
                **({"graphs": graphs} if graphs else {}),
            },
        )

    def running_graphs(self) -> list[dict[str, object]]:
        """The stages of the graphs that run, for the status."""
        return self._graphs.describe()

    def environments(self) -> list[dict[str, Any]]:
        """The environments of the nodes, the interesting ones first."""
        return report_environments(self._managers.members.values(), self._environments, without_pod=self._without_pod())

    def _without_pod(self) -> list[str]:
        """The keys of environments whose tasks wait for a first pod of their image."""
        if self._image_check is None:
            return []
        present = {each.load.image for each in self._managers.members.values()}
        return [key for key in self._queue.waiting if key not in present and self.image_of(key)]

    def known_environments(self) -> list[Environment]:
        """Those of tasks that came lately, the latest first, behind the default."""
        return self._environments.known()

    def prewarmed(self) -> list[dict[str, object]]:
        """What the owner wants warm, and how far that is."""
        return self._prewarming.describe(self._managers, problem=self._nodes_problem)

    def waiting_reasons(self, now: float) -> list[dict[str, object]]:
        """Why tasks of environments wait."""
        return list(
            waiting_reasons(self._queue, self._managers, self._environments, now=now, without_pod=self._without_pod())
        )

    def _apply(self, event: Event, now: float) -> None:
        match event:
            case ev.ManagerProgress():
                self._on_progress(event, now)
            case ev.TasksReceived():
                self._on_tasks(event, now)
            case ev.ResultsRecorded(tasks=refs):
                self._forget(refs)
            case ev.SpoolWritten():
                self._on_written()
                return
            case ev.SpoolWriteFailed(reason=reason):
                self._on_write_failed(reason, now)
            case ev.CancelRequested(task_ids=task_ids):
                self._cancel(task_ids)
            case ev.CallsHandedOver():
                self._elsewhere.taken(event.manager_id, event.taken, event.bodies)
            case ev.CallsHeard():
                self._elsewhere.heard(event.manager_id, event.news, event.bodies)
                self._prefetch.observe_all(run_times(event.news))
            case ev.CallsNotNeeded():
                self._elsewhere.dropped(event.manager_id, event.task_ids)
            case ev.BlobGranted(grant=grant):
                self._on_grant(grant, now)
            case ev.PayloadFetched():
                self._on_payload(event)
            case ev.FetchFailed():
                self._on_fetch_failed(event)
            case ev.ResultUploaded():
                self._on_uploaded(event)
            case ev.UploadFailed():
                task = self.find(event.task_id, event.seq)
                if task is not None:
                    self._upload_failed(task, event.reason, retryable=event.retryable, now=now)
            case ev.NodesChanged():
                self._on_nodes(event)
            case ev.ManagerRegistered():
                ends_at = event.ends_at
                lifetime = None if ends_at is None else Lifetime(ends_at, self._drain_s, self._max_walltime_s)
                self._managers.add(
                    event.manager_id,
                    slots=event.slots,
                    lifetime=lifetime,
                    node=event.node,
                    types=event.types if self._image_check is None else in_pods(event.types),
                    image=event.image,
                )
                self._on_managers_changed()
            case ev.ManagersDraining(manager_ids=manager_ids):
                self._managers.drain(manager_ids)
            case ev.PrewarmRequested(requests=requests):
                for each in requests:
                    self._environments.add(each.environment)
                self._prewarming.request(requests)
            case ev.ManagerLost():
                self._on_manager_lost(event, now)
            case ev.SessionOpened(forget=refs):
                self._on_opened(refs)
            case ev.SessionClosed():
                self._on_closed()
            case ev.SpoolMeasured(room=room):
                self._space.measured(room)
            case ev.SpoolRetryOrdered():
                self._space.retry(now=now)
            case ev.Restored():
                self._restore(event, now)
            case ev.DrainOrdered():
                self._is_draining = True
            case _:
                raise TypeError(f"no rule for {event}")
        self._has_changed = True

    def _finish_turn(self, now: float) -> list[Action]:
        """Place tasks and give credit; the actions of all events since the last turn."""
        if due := self._retries.due(now=now):
            self._queue_again(due)
        if not self._is_draining:
            self._dispatch(now)
            self._give_credit()
            if self._elsewhere.waiting:
                self._elsewhere.ask(self._environments.get, depth=self._prefetch.depth, now=now)
                self._pass_on()
        turn = self._turn
        if self._prewarming.is_due:
            turn.prewarms = tuple(self._prewarming.changes(self._managers))
        turn.transitions += self._transitions.due(now=now, connected=self._is_connected)
        for task in self._uploads.due(now=now):
            if self._is_connected and task.result is not None and task.result.needs_upload:
                turn.upload_requests.append(task)
        if turn.forgotten:  # reports of these in the same turn are obsolete
            turn.results = [task for task in turn.results if task.task_id in self._tasks]
            turn.upload_requests = [task for task in turn.upload_requests if task.task_id in self._tasks]
            turn.uploads = [(task, grant) for task, grant in turn.uploads if task.task_id in self._tasks]
        self._turn = Turn()
        actions = turn.cancel_actions()
        if not self._has_cloud:
            for task in turn.results:
                del self._tasks[task.task_id]
            self._held_results -= len(turn.results)
        elif (write := turn.spool_write()) is not None:
            actions.append(write)
            self._unwritten = turn
        else:
            self._space.written()
        return actions + turn.other_actions()

    # -- spool ---------------------------------------------------------------------------------------------------------

    def _restore(self, event: ev.Restored, now: float) -> None:
        """Continue with the tasks of the spool, oldest first, however the last process ended."""
        self._functions.update(event.function_hashes)
        for function in event.signed:
            self._check_signature(function, now)
        dispatched = []
        for task in (spooled.to_task() for spooled in event.tasks):
            former = self._tasks.get(task.task_id)
            if former is not None and former.result is not None:
                self._held_results -= 1  # recorded and delivered again before the spool forgot it
                self._turn.forgotten.append(former.seq)
            self._tasks[task.task_id] = task
            task.environment_key = self._environment_key(task.spec)
            if task.graph is not None and task.result is None:
                self._add_graph(task, task.graph)
            if task.result is not None:
                self._held_results += 1
            elif (task.is_idempotent or not task.starts) and (refused := self._refusal(task, now)):
                self._finish(task, self._results.failed(task, refused))  # the configuration has changed
            elif task.starts and not task.waits_for_retry:
                dispatched.append(task)
            elif not task.is_idempotent or (task.spec.options.callees and task.stage is Stage.FETCHING):
                self._unconfirmed.append(task)  # of a graph that is not here it is not known
            elif task.stage is Stage.FETCHING:
                self._turn.fetches.append(task)
            elif task.waits_for_retry:
                self._retries.add(task)
            else:
                self._queue.add(task)
        self._next_seq = itertools.count(max((task.seq for task in event.tasks), default=0) + 1)
        self._reconsider(dispatched, self.slots_hint, "the endpoint was stopped or died while it had the task", now)

    def _on_written(self) -> None:
        """The spool has the last turn: what can be read from there leaves the memory."""
        self._space.written()
        turn, self._unwritten = self._unwritten, None
        if turn is None:
            return
        for task in itertools.chain(turn.accepted, turn.fetched):
            if task.payload is not None and len(task.payload) > _KEEP_BYTES:
                task.payload = None
        for tasks in turn.orders.values():
            for task in tasks:
                task.payload = None
        for task in turn.finished:
            if task.result is not None:
                task.result.body = None

    def _on_write_failed(self, reason: str, now: float) -> None:
        """Keep the last turn until it can be written. Only placing and credit are undone: tasks are queued again."""
        self._space.failed(reason, now=now)
        turn, self._unwritten = self._unwritten, None
        if turn is None:
            return
        placed = sum(map(len, turn.orders.values()))
        again = turn.starts[len(turn.starts) - placed :]  # placing comes last in a turn
        del turn.starts[len(turn.starts) - placed :]
        turn.orders.clear()
        self._turn = turn
        for task in again:
            assert task.manager_id is not None
            self._managers.release(task.manager_id, task.task_id)
            self._queue.done(task)
            task.starts -= 1
        self._requeue(again, now)
        self._credit.used(turn.credit)
        turn.credit = 0

    # -- cloud ---------------------------------------------------------------------------------------------------------

    def _on_opened(self, forget: Iterable[TaskRef]) -> None:
        """Report all results again, apart from those that the cloud does not need."""
        self._forget(forget)
        self._is_connected = True
        self._credit.restart()
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        for task in unconfirmed:
            if task.stage is Stage.QUEUED and task.waits_for_retry:
                self._retries.add(task)
        self._queue.put_back([task for task in unconfirmed if task.stage is Stage.QUEUED])
        self._turn.fetches += [task for task in unconfirmed if task.stage is Stage.FETCHING]
        for task in self._tasks.values():
            if task.result is not None:
                self._report_result(task)
            elif task.retries_used and task.reported is not task.state:  # a retry is reported late, and may be over
                self._transitions.enter(task, task.state, task.at)

    def _on_closed(self) -> None:
        """Continue without a session, except for tasks that were never acknowledged in it."""
        self._is_connected = False
        turn = self._turn
        unwritten = {task.seq for task in turn.accepted}
        for task in turn.accepted:  # the cloud still has them, and delivers them again
            if self._tasks.pop(task.task_id, None) is None:
                continue  # recorded meanwhile
            self._graphs.ended(task)
            self._held_results -= task.result is not None
            task.stage = Stage.FORGOTTEN
            if task.environment_key:
                self._queue.left(task)
        turn.accepted.clear()
        turn.finished = [task for task in turn.finished if task.seq not in unwritten]
        turn.fetches = [task for task in turn.fetches if task.seq not in unwritten]
        for reports in (turn.acknowledged, turn.transitions, turn.results, turn.upload_requests):
            reports.clear()  # the next Hello names all tasks

    def _on_tasks(self, event: ev.TasksReceived, now: float) -> None:
        self._credit.used(len(event.tasks))
        for function, body in zip(event.functions, event.bodies.bodies, strict=True):
            is_new = function.function_hash not in self._functions
            if self._check_signature(function, now) or is_new:
                self._functions.add(function.function_hash)
                self._turn.functions.append((function, bytes(body or b"")))
        seals = event.opened or (None,) * len(event.tasks)
        for spec, payload, opened in zip(event.tasks, event.payloads.bodies, seals, strict=True):
            held = self._tasks.get(spec.task_id)
            if held is None:
                self._accept(spec, payload, opened, now)
            else:
                self._redeliver(held, spec.attempt)

    def _accept(self, spec: TaskSpec, payload: Bytes | None, opened: OpenedCall | None, now: float) -> None:
        """Accept one task. ``payload`` is None if it must be fetched first."""
        turn = self._turn
        stage = Stage.QUEUED if payload is not None else Stage.FETCHING
        answer_key = opened.answer_key if opened else b""
        task = Task(next(self._next_seq), spec, spec.attempt, stage, now, payload=payload, answer_key=answer_key)
        self._tasks[spec.task_id] = task
        if spec.options.environment is not None:
            task.environment_key = self._environment_key(spec)
        turn.accepted.append(task)
        turn.acknowledged.append(task)
        refused = _refused(opened) or self._refusal(task, now)
        if refused is None and spec.options.callees and payload is not None:
            refused = self._read_graph(task, payload)
        if refused is not None:
            self._finish(task, self._results.failed(task, refused))
            return
        if stage is Stage.QUEUED:
            self._queue.add(task)
        else:
            turn.fetches.append(task)
        self._transitions.monitor(task, now)

    def _environment_key(self, spec: TaskSpec) -> str:
        """The key of a task's environment, which is remembered; empty for the default, which the managers know."""
        environment = spec.options.environment
        return "" if environment is None else self._environments.add(environment)

    def _check_signature(self, function: FunctionSpec, now: float) -> bool:
        """Whether the function has a signature that counts, at an endpoint that asks for one."""
        principals = "" if self._signatures is None else self._signatures.add(function, now=now)
        if principals:
            self._turn.signed.append(do.LogSigner(function.name, function.function_hash, principals))
        return bool(principals)

    def _read_graph(self, task: Task, payload: Bytes) -> ErrorRecord | None:
        """Note what is to be known of a task's graph, if it is one; why it cannot run, if so."""
        found = read_graph(payload, task.spec.options, is_restricted=task.spec.data_only)
        if isinstance(found, ErrorRecord):
            return found
        if found is None:
            return None
        task.graph = found
        refused = self._images_refusal(task.spec, found.environments) or graph_refusal(
            found, block_s=self._block_s, is_restricted=self._is_restricted
        )
        if refused is None:
            self._add_graph(task, found)
        return refused

    def _add_graph(self, task: Task, graph: GraphNeeds) -> None:
        keys = ["" if each is None else self._environments.add(each) for each in reversed(graph.environments)]
        task.environment_key = keys[-1]
        self._graphs.add(task)

    def _refusal(self, task: Task, now: float) -> ErrorRecord | None:
        spec, graph = task.spec, task.graph
        if self._image_check is not None:
            environments = (spec.options.environment,) if graph is None else graph.environments
            if refused := self._images_refusal(spec, environments):
                return refused
        return refusal(
            spec,
            allowed_functions=self._allowed_functions,
            known_functions=self._functions,
            not_signed=None if self._signatures is None else functools.partial(self._signatures.refusal, now=now),
            block_s=self._block_s,
            no_nodes=self._no_nodes,
            is_restricted=self._is_restricted,
            graph=graph,
        )

    def _images_refusal(self, spec: TaskSpec, environments: Sequence[Environment | None]) -> ErrorRecord | None:
        """Why a task cannot run where each block runs one image."""
        if self._image_check is None:
            return None
        for environment in environments:
            if environment is not None and (reason := self._image_check(environment, spec.submitter)):
                return outcomes.environment_unsupported(environment.label, reason)
        if len(environments) > 1 and any(map(image_of, filter(None, environments))):
            return outcomes.graph_apart("its stages need several images, and each node runs one.")
        return None

    def _redeliver(self, task: Task, attempt: int) -> None:
        """A task that is here already gets its new attempt number, and is not started again."""
        task.attempt = max(task.attempt, attempt)
        self._turn.redelivered.append(task)
        self._turn.acknowledged.append(task)
        if task.result is not None:
            self._report_result(task)

    def _cancel(self, task_ids: Iterable[str]) -> None:
        """Stop tasks, running or not; a finished task keeps its result."""
        for task_id in task_ids:
            task = self._tasks.get(task_id)
            if task is None or task.result is not None:
                continue
            if task.stage is Stage.DISPATCHED and task.manager_id is not None:
                task.cancelling = True
                self._turn.cancels.setdefault(task.manager_id, []).append(task_id)
            elif task.stage is Stage.RETRYING:
                self._retries.discard(task)
                self._finish(task, self._results.cancelled_before_retry())
            else:
                self._finish(task, self._results.cancelled(running=False))

    def _forget(self, refs: Iterable[TaskRef]) -> None:
        """The cloud has results of these tasks, or does not need them: stop those that still run."""
        for ref in refs:
            task = self._tasks.pop(ref.task_id, None)
            if task is None:
                continue
            if task.result is not None:
                self._held_results -= 1
                self._turn.forgotten.append(task.seq)
            else:
                self._turn.dropped.append(task.seq)
                if task.retries_used:
                    self._retries.discard(task)
                    self._turn.retried.append(task)
                if task.stage is Stage.DISPATCHED and task.manager_id is not None:
                    self._turn.cancels.setdefault(task.manager_id, []).append(task.task_id)
            task.stage = Stage.FORGOTTEN
            if self._graphs.tasks:
                self._graphs.ended(task)
            if task.environment_key:
                self._queue.left(task)

    # -- blobs ---------------------------------------------------------------------------------------------------------

    def task(self, task_id: str) -> Task | None:
        """A task that the endpoint holds, by its id."""
        return self._tasks.get(task_id)

    def find(self, task_id: str, seq: int) -> Task | None:
        """A task that the spool holds under this number."""
        task = self._tasks.get(task_id)
        return task if task is not None and task.seq == seq else None

    def _on_payload(self, event: ev.PayloadFetched) -> None:
        task = self.find(event.task_id, event.seq)
        if task is not None and task.stage is Stage.FETCHING:
            if (refused := _refused(event.opened)) is not None:
                self._finish(task, self._results.failed(task, refused))
                return
            [task.payload] = event.payload.bodies
            task.answer_key = event.opened.answer_key if event.opened else b""
            if task.spec.options.callees and (refused := self._read_graph(task, task.payload or b"")) is not None:
                self._finish(task, self._results.failed(task, refused))
                return
            task.stage = Stage.QUEUED
            self._turn.fetched.append(task)
            self._queue.add(task)

    def _on_fetch_failed(self, event: ev.FetchFailed) -> None:
        task = self.find(event.task_id, event.seq)
        if task is not None and task.stage is Stage.FETCHING:
            self._finish(task, self._results.failed(task, outcomes.payload_unavailable(event.reason)))

    def _on_grant(self, grant: BlobGrant, now: float) -> None:
        task = self._tasks.get(grant.task_id)
        if task is None or task.result is None or not task.result.needs_upload or grant.attempt != task.attempt:
            return
        if grant.error is None:
            self._turn.uploads.append((task, grant))
        else:
            record = ErrorRecord.from_json(grant.error)
            self._upload_failed(task, record.message, retryable=record.retryable, now=now)

    def _on_uploaded(self, event: ev.ResultUploaded) -> None:
        task = self.find(event.task_id, event.seq)
        if task is not None and task.result is not None:
            task.result.blob = event.location
            self._report_result(task)

    def _upload_failed(self, task: Task, reason: str, *, retryable: bool, now: float) -> None:
        """After some retries the task fails."""
        result = task.result
        if result is None or not result.needs_upload or (retryable and self._uploads.add(task, now=now)):
            return
        record = outcomes.result_not_uploaded(reason, size_bytes=result.size_bytes)
        self._held_results -= 1
        self._finish(task, self._results.failed(task, record, started_at=result.started_at, ended_at=result.ended_at))

    # -- managers ------------------------------------------------------------------------------------------------------

    def _on_nodes(self, event: ev.NodesChanged) -> None:
        self._nodes_problem, self._no_nodes = event.problem, event.refusal
        if event.refusal:
            for task in [*self._queue.clear(), *self._retries.clear()]:
                self._finish(task, self._results.failed(task, outcomes.nodes_unavailable(event.refusal)))

    def _on_progress(self, event: ev.ManagerProgress, now: float) -> None:
        manager_id, progress = event.manager_id, event.progress
        self._managers.note(
            manager_id, workers=progress.workers, idle_workers=progress.idle_workers, problem=progress.problem
        )
        if progress.environments is not None:
            self._managers.note_environments(manager_id, progress.environments)
            self._prewarming.managers_changed()
        if progress.waiting_calls is not None:
            self._elsewhere.note(manager_id, progress.waiting_calls)
        for each in progress.graphs:
            running = self._tasks.get(each.task_id)
            if running is not None and running.stage is Stage.DISPATCHED and running.manager_id == manager_id:
                self._graphs.note(running, each.stages)
        bodies = event.results.bodies
        durations: dict[str, list[float]] = collections.defaultdict(list)
        for finished in progress.finished:
            task = self._release(manager_id, finished.task_id)
            if task is None:
                continue
            if task.environment_key:
                durations[task.environment_key] += _duration_s(finished)
            if finished.printed is not None and finished.output is not None:
                self._keep_output(task, finished.printed, bodies[finished.output])
            if finished.is_retried and may_retry(task, manager_id):
                self._retry(task, finished, now)
            else:
                self._finish(task, self._results.finished(task, finished, bodies))
        self._observe(progress.finished)
        for key, durations_s in durations.items():
            self._environments.finished(key, durations_s, now=now)
        for died in progress.died:
            self._on_death(manager_id, died, now)
        for started in progress.started:
            task = self._tasks.get(started.task_id)
            if task is not None and task.stage is Stage.DISPATCHED:
                self._transitions.enter(task, TaskState.RUNNING, started.at)
        self._graphs.refresh(now=now)

    def _on_manager_lost(self, event: ev.ManagerLost, now: float) -> None:
        manager = self._managers.remove(event.manager_id)
        self._on_managers_changed()
        if manager is not None:
            suspects = 0 if event.expected or event.unstarted else manager.slots
            self._elsewhere.lost(manager, reason=event.reason, suspects=suspects, unstarted=event.unstarted)
            for task in manager.outstanding.values():
                self._queue.done(task)
            tasks = list(manager.outstanding.values())
            self._reconsider(tasks, suspects, event.reason, now, unstarted=event.unstarted)

    def _on_managers_changed(self) -> None:
        self._graphs.managers_changed()
        self._prewarming.managers_changed()
        if self._default_environment is not None:
            self._default_refusal = self._managers.refusal(self._default_environment)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        if self._look_again_at is not None:
            if now < self._look_again_at and not self._has_changed:
                return
            self._look_again_at = None
        self._has_changed = False
        if not (self._queue and self._managers):
            return
        queue, managers, turn = self._queue, self._managers, self._turn
        environments = NO_ENVIRONMENTS
        if self._default_refusal:
            self._refuse_default()
        if self._graphs.unchecked:
            self._refuse_apart()
        if queue.waiting or managers.has_environments:
            self._refuse_unsupported()
            environments = self._environments.demand(queue, managers, own=self._prefetch, now=now)
        placed = queue.place(
            self._policy, managers.loads, depth=self._prefetch.depth, now=now, environments=environments
        )
        if queue.waiting:
            self._look_again_at = now + _LOOK_AGAIN_S
        for task, manager_id in placed:
            task.stage, task.manager_id = Stage.DISPATCHED, manager_id
            task.starts += 1
            managers.assign(manager_id, task)
            turn.starts.append(task)
            turn.orders.setdefault(manager_id, []).append(task)
            self._transitions.enter(task, TaskState.WAITING_FOR_LAUNCH, now)

    def _pass_on(self) -> None:
        self._turn.passed += self._elsewhere.messages
        self._elsewhere.messages.clear()

    def _refuse_unsupported(self) -> None:
        """Tasks fail whose environment no present manager can run."""
        for key in list(self._queue.waiting):
            environment = self._environments.get(key)
            if self._image_check is not None and self.image_of(key):
                continue  # it gets a block of its own
            if environment is not None and (reason := self._managers.refusal(environment)):
                record = outcomes.environment_unsupported(environment.label, reason)
                for task in sorted(self._queue.waiting[key], key=lambda each: each.seq):
                    self._finish(task, self._results.failed(task, record))

    def _refuse_default(self) -> None:
        """Tasks fail that name no environment, while no present manager can run the default one."""
        assert self._default_environment is not None
        record = outcomes.environment_unsupported(self._default_environment.label, self._default_refusal)
        for task in list(self._tasks.values()):
            if task.stage is Stage.QUEUED and not task.environment_key:
                self._finish(task, self._results.failed(task, record))

    def _refuse_apart(self) -> None:
        """Graphs whose stages need environments that no present manager can run together go to one that can run most,
        and those fail whose stages all of them together cannot run."""
        for task in sorted(self._graphs.unchecked, key=lambda each: each.seq):
            if task.stage is not Stage.QUEUED or task.graph is None:
                continue
            task.is_apart = bool(self._managers.refusal_of(task.graph))
            if task.is_apart and self._managers.refusal_apart(task.graph):
                labels = ["the endpoint's own" if each is None else each.label for each in task.graph.environments]
                record = outcomes.graph_apart(f"they need the environments {', '.join(labels)}.")
                self._finish(task, self._results.failed(task, record))
        self._graphs.unchecked.clear()

    def _retry(self, task: Task, finished: Finished, now: float) -> None:
        """The function raised, and its task runs again after a while."""
        self._retries.take_up(task, finished, now)
        if self._graphs.tasks:
            self._graphs.stopped(task)
        self._turn.starts.append(task)
        self._turn.retried.append(task)
        self._transitions.retry(task, history_detail(task, finished), now)

    def _queue_again(self, tasks: Sequence[Task]) -> None:
        """The back-off of these is over: they are next, as their turn had come before."""
        self._has_changed = True
        for task in tasks:
            task.stage = Stage.QUEUED
            if self._no_nodes:
                self._finish(task, self._results.failed(task, outcomes.nodes_unavailable(self._no_nodes)))
        self._queue.put_back([task for task in tasks if task.stage is Stage.QUEUED])

    def _give_credit(self) -> None:
        if not self._is_connected or not self._has_cloud or self._space.problem:
            return
        slots = self._managers.slots or self.slots_hint
        held = len(self._tasks) - self._held_results - min(len(self._retries), _MOST_ASIDE)
        self._turn.credit += self._credit.grant(slots=slots, held=held)

    def _observe(self, finished: Sequence[Finished]) -> None:
        """Learn the duration of tasks."""
        durations = [f.ended_at - f.started_at for f in finished if f.started_at is not None and f.ended_at is not None]
        self._prefetch.observe_all(durations)
        self._window.observe_all(durations)

    def _on_death(self, manager_id: str, died: Died, now: float) -> None:
        task = self._release(manager_id, died.task_id)
        if task is None or task.manager_id != manager_id:
            return
        if died.printed is not None:
            self._keep_output(task, died.printed, died.output)
        if task.cancelling:
            self._finish(task, self._results.cancelled(running=True))
        elif task.may_start_again:
            task.deaths += (died.reason,)
            self._requeue([task], now)
        else:
            tails = {"stdout_tail": died.stdout_tail, "stderr_tail": died.stderr_tail}
            self._finish(task, self._results.given_up(task, died.reason, **tails))

    def _keep_output(self, task: Task, printed: Printed, tails: Bytes | None) -> None:
        """Keep what the attempt that has ended printed."""
        if self._has_cloud:
            kept = Kept(task.task_id, attempt_of(task), printed, bytes(tails or b""), task.answer_key)
            self._turn.outputs.append(kept)

    def _release(self, manager_id: str, task_id: str) -> Task | None:
        """A manager does not have a task any more; None if its result is known already."""
        if (released := self._managers.release(manager_id, task_id)) is not None:
            self._queue.done(released)
        task = self._tasks.get(task_id)
        return None if task is None or task.result is not None else task

    def _reconsider(
        self, tasks: Sequence[Task], suspects: int, reason: str, now: float, *, unstarted: bool = False
    ) -> None:
        """Decide about tasks, in the order of their dispatch, whose manager is gone.

        Managers run in order, so only the first few of them, as many as it had slots, can have been running; the start
        of the others does not count. If those belong to several submitters, perhaps only one of them is the cause:
        the start of each does not count either, a few times. Tasks that may not run twice are never sent ahead: each
        may have been running, unless it is known that all were ``unstarted``.
        """
        again = []
        is_shared = len({task.spec.submitter for task in tasks[:suspects]}) > 1
        for index, task in enumerate(tasks):
            if task.cancelling:
                self._finish(task, self._results.cancelled(running=True))
            elif not (task.is_idempotent or unstarted):
                self._finish(task, self._results.lost(task, reason))
            elif index >= suspects or (is_shared and task.losses_shared < _SHARED_LOSSES):
                task.losses_shared += index < suspects
                task.starts -= 1
                self._turn.starts.append(task)
                again.append(task)
            elif task.may_start_again:
                task.deaths += (reason,)
                again.append(task)
            else:
                self._finish(task, self._results.given_up(task, reason))
        self._requeue(again, now)

    def _requeue(self, tasks: Sequence[Task], now: float) -> None:
        self._queue.put_back(tasks)
        for task in tasks:
            task.stage, task.manager_id = Stage.QUEUED, None
            if self._graphs.tasks:
                self._graphs.stopped(task)
            self._transitions.enter(task, TaskState.WAITING_FOR_NODES, now)

    def _finish(self, task: Task, result: TaskResult) -> None:
        if task.environment_key and task.stage is not Stage.DISPATCHED:
            self._queue.left(task)
        if self._graphs.tasks:
            self._graphs.ended(task)
        if task.retries_used:
            result = with_retries(task, result)
            self._turn.retried.append(task)
        task.result, task.stage = self._seal(task, result), Stage.FINISHED
        task.payload, task.manager_id = None, None
        self._held_results += 1
        self.finished_tasks += 1
        self._turn.finished.append(task)
        self._report_result(task)

    def _report_result(self, task: Task) -> None:
        if not self._is_connected or task.result is None:
            return
        if task.result.needs_upload:
            self._turn.upload_requests.append(task)
        else:
            self._turn.results.append(task)


def _duration_s(finished: Finished) -> tuple[float, ...]:
    """How long a task ran, if that is known."""
    if finished.started_at is None or finished.ended_at is None:
        return ()
    return (finished.ended_at - finished.started_at,)


def _refused(opened: OpenedCall | None) -> ErrorRecord | None:
    return ErrorRecord.from_json(opened.error) if opened is not None and opened.error is not None else None
