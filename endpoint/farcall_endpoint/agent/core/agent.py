"""The agent's core: routes events to the parts that handle them, and returns the actions. No I/O.

It decides which task goes to which manager; :class:`HeldTasks` has the tasks, :class:`Admission` the reasons to refuse
them. Instants are epoch seconds.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_common.file_arguments import has_files
from farcall_common.limits import MAX_INLINE_BYTES
from farcall_common.qos_report import QOS
from farcall_common.staging import IN, STAGING
from farcall_common.wire import EndpointReport, FunctionSpec, HeldTask, TaskSpec
from farcall_endpoint.agent.core import actions as do
from farcall_endpoint.agent.core import events as ev
from farcall_endpoint.agent.core.actions import Action
from farcall_endpoint.agent.core.admission import Admission
from farcall_endpoint.agent.core.calls import CallsElsewhere, run_times
from farcall_endpoint.agent.core.demand import Demand, demand_of
from farcall_endpoint.agent.core.environments import (
    EnvironmentsSeen,
    image_of,
    in_pods,
    report_environments,
    waiting_reasons,
)
from farcall_endpoint.agent.core.events import Event
from farcall_endpoint.agent.core.graphs import GraphNeeds, read_graph
from farcall_endpoint.agent.core.held_tasks import HeldTasks
from farcall_endpoint.agent.core.latency import LatencyTargets
from farcall_endpoint.agent.core.loads import NO_ENVIRONMENTS, Lifetime
from farcall_endpoint.agent.core.managers import Managers, TaskQueue
from farcall_endpoint.agent.core.node_copies import NodeCopies, contents_of
from farcall_endpoint.agent.core.prewarm import Prewarming
from farcall_endpoint.agent.core.reports import CreditWindow
from farcall_endpoint.agent.core.retries import may_retry
from farcall_endpoint.agent.core.running_graphs import RunningGraphs
from farcall_endpoint.agent.core.scheduling import SchedulingPolicy
from farcall_endpoint.agent.core.spool_space import SpoolSpace
from farcall_endpoint.agent.core.tasks import OpenedCall, ResultFactory, Stage, Task, TaskResult
from farcall_endpoint.config.settings import QosSettings
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.agent_manager import Finished
from farcall_endpoint.contracts.prefetch import PrefetchPolicy
from farcall_endpoint.files.plan import MOST_ROWS, Staging
from farcall_endpoint.host.shared_memory import Bytes

if TYPE_CHECKING:
    from farcall_endpoint.agent.core.signatures import SignatureCheck

_LOOK_AGAIN_S: Final = 0.1
"""Period of calls of the policy while tasks of an environment wait: time alone may change the best placement."""
_TAKE_BACK_S: Final = 0.25
"""Period of the search for tasks that wait behind long ones while other nodes have free slots."""
_LATENCY_DEPTH: Final = 8
"""Tasks with a latency target to keep at a manager per worker for such tasks. The manager decides their order."""
_MOST_ASIDE: Final = 1000
"""Tasks waiting for a retry or for files that do not count as held, so that the workers get other tasks meanwhile."""


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
    :param allowed_functions, signatures: see :class:`Admission`.
    :param seal: returns the result of a task as it leaves the endpoint.
    :param image_check: where a block runs the image of one environment: why a submitter may not have that image, empty
        if it may (see :func:`farcall_endpoint.agent.shell.nodes.image_check`). None where blocks run all tasks.
    :param default_environment: of tasks that name none; the managers know it, too.
    :param jitter: returns random numbers in [0, 1), for the waits before retries.
    :param staging: moves the files of tasks; None: no transfer process is there.
    :param qos: how latency targets are held.
    :param baselines: how long functions take on an idle endpoint, as they were kept.
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
        staging: Staging | None = None,
        qos: QosSettings | None = None,
        baselines: Mapping[str, float] | None = None,
    ) -> None:
        self._policy = policy
        self.slots_hint = slots_hint
        self._prefetch = prefetch
        self._window = window
        self._credit = CreditWindow(window, limit=max_window)
        self._has_cloud = has_cloud
        self._space = SpoolSpace()
        self._drain_s = drain_s
        self._max_walltime_s = max_walltime_s
        self._admission = Admission(
            allowed_functions=allowed_functions, signatures=signatures, block_s=block_s, image_check=image_check
        )
        #: By submitter; see :class:`farcall_common.fairness.FairQueue`.
        self.weights: Mapping[str, int] = weights or {}
        self._queue = TaskQueue(self.weights)
        self._graphs = RunningGraphs(slots=slots_hint)
        self._results = ResultFactory(endpoint_id=endpoint_id, max_inline_bytes=max_inline_bytes)
        self._staging = Staging(refusal="it copies no files") if staging is None else staging
        self._held = HeldTasks(
            queue=self._queue,
            graphs=self._graphs,
            results=self._results,
            has_cloud=has_cloud,
            seal=seal,
            jitter=jitter,
            staging=self._staging,
        )
        self._environments = EnvironmentsSeen(
            horizon_s=prefetch.horizon_s, limit=prefetch.limit, default=default_environment
        )
        self._image_check = image_check
        self._default_environment = default_environment
        self._managers = Managers("" if default_environment is None else default_environment.key)
        self._elsewhere = CallsElsewhere(self._managers)
        self._copies = NodeCopies(self._managers)
        self._qos = LatencyTargets(QosSettings() if qos is None else qos, baselines=baselines or {})
        self._owner_id = ""  # empty if not known
        self._default_refusal = ""  # why no present manager can ever run the default
        self._prewarming = Prewarming(image_check=image_check)
        self._look_again_at: float | None = None
        self._take_back_at = 0.0
        #: Whether anything was heard, apart from the spool, since the tasks of environments were looked at.
        self._has_changed = True
        self._is_draining = False
        self._nodes_problem = ""

    @property
    def allowed_signers(self) -> int | None:
        """The number of keys whose functions may run; None if functions need no signature."""
        return self._admission.allowed_signers

    @property
    def finished_tasks(self) -> int:
        """Results since the start, of any state."""
        return self._held.finished_tasks

    # -- the shell's side ----------------------------------------------------------------------------------------------

    def handle(self, events: Iterable[Event], now: float) -> list[Action]:
        """Handle events in order; the actions to perform."""
        self._qos.now = now
        for event in events:
            self._apply(event, now)
        retry_at = self._space.retry_at
        if self._elsewhere.messages:
            self._pass_on()
        if self._copies.has_orders:
            self._held.turn.passed += self._copies.take_orders()
        if retry_at is not None and now < retry_at:
            return self._held.turn.cancel_actions()
        return self._finish_turn(now)

    def next_deadline(self) -> float | None:
        """The epoch second at which :meth:`handle` may return actions without an event."""
        if self._space.retry_at is not None:
            return self._space.retry_at
        deadline, at = self._look_again_at, self._held.next_deadline()
        deadline = at if deadline is None or (at is not None and at < deadline) else deadline
        if len(self._staging) and (at := self._staging.next_deadline()) is not None:
            return at if deadline is None else min(at, deadline)
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
        """Every task of the spool, as the Hello message to the forwarder lists it."""
        return self._held.for_hello()

    def task(self, task_id: str) -> Task | None:
        """A task that the endpoint holds, by its id."""
        return self._held.by_id.get(task_id)

    def find(self, task_id: str, seq: int) -> Task | None:
        """A task that the spool holds under this number."""
        return self._held.find(task_id, seq)

    def busy_submitters(self) -> set[str]:
        """The submitters of unfinished tasks, as these name them."""
        return {task.spec.submitter for task in self._held.by_id.values() if task.result is None}

    def payer_of(self, submitter: str) -> str:
        """The identity as which the unfinished tasks of a submitter count."""
        tasks = self._held.by_id.values()
        return next((task.share_of for task in tasks if task.spec.submitter == submitter), submitter)

    def demand(self) -> Demand:
        """The tasks that the blocks should be enough for."""
        unfinished = self._held.unfinished - len(self._staging)
        extra = self._graphs.extra()
        unfinished += extra.total()
        if self._image_check is None:
            if not (self._queue.waiting or self._managers.has_environments or self._default_environment):
                return Demand(unfinished, self._managers.busy(unfinished))
            return demand_of(unfinished, self._queue, self._managers, self._environments.by_key)
        images = collections.Counter(
            task.environment_key
            for task in self._held.by_id.values()
            if task.result is None
            and task.stage not in (Stage.STAGING, Stage.STAGING_OUT)
            and task.environment_key
            and self.image_of(task.environment_key)
        )
        images.update({key: count for key, count in extra.items() if key and self.image_of(key)})
        images[""] = unfinished - images.total()
        return Demand(unfinished, self._managers.busy(unfinished), images, prewarmed=self._prewarming.images())

    def image_of(self, key: str) -> str:
        """The image of an environment's pods; empty if it has none."""
        environment = self._environments.get(key) or self._prewarming.environment(key)
        return "" if environment is None else image_of(environment)

    def report(self) -> EndpointReport:
        """The numbers for a heartbeat."""
        problem = self._space.problem or self._nodes_problem or self._managers.problem
        unfinished = self._held.unfinished
        environments, graphs, progress = self.environments(), self._graphs.report(), self._graphs.progress()
        latencies = self._qos.report()
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
                **({"progress": progress} if progress else {}),
                **({STAGING: staging} if (staging := self.staging()) else {}),
                **({QOS: latencies} if latencies else {}),
            },
        )

    def running_graphs(self) -> list[dict[str, object]]:
        """The stages of the graphs that run, for the status."""
        return self._graphs.describe()

    def running_progress(self) -> list[dict[str, object]]:
        """How far tasks are that run, for the status."""
        return self._graphs.describe_progress()

    def staging(self) -> list[dict[str, Any]]:
        """The tasks whose files move, the oldest first, some at most."""
        staging = self._staging.report() if len(self._staging) else []
        return [*staging, *itertools.islice(self._copies.rows(self._held.by_id), MOST_ROWS - len(staging))]

    def functions(self, now: float) -> list[dict[str, Any]]:
        """How long functions took in the last minutes, for the status."""
        return self._qos.latencies.describe(now)

    def latency_targets(self) -> dict[str, Any]:
        """How targets are held, for the status; empty while there are none."""
        return self._qos.describe()

    def baselines(self) -> Mapping[str, float] | None:
        """How long functions take on an idle endpoint, to be kept; None if that has not changed since."""
        return self._qos.targets.baselines() if self._qos.targets.has_changed else None

    def baselines_kept(self) -> None:
        """These were written down."""
        self._qos.targets.has_changed = False

    def node_copies(self) -> dict[str, Any]:
        """The copies of files on nodes, for the status."""
        return self._copies.describe()

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
        """Return the default environment, then the environments of recent tasks, the latest first."""
        return self._environments.known()

    def prewarmed(self) -> list[dict[str, object]]:
        """Return the owner's pre-warming requests with their progress."""
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
                self._held.forget(refs)
            case ev.SpoolWritten():
                self._space.written()
                self._held.written()
                return
            case ev.SpoolWriteFailed(reason=reason):
                self._on_write_failed(reason, now)
            case ev.CancelRequested(task_ids=task_ids):
                self._held.cancel(task_ids)
            case ev.CopiesReported():
                self._copies.reported(event.manager_id, event.report, now)
            case ev.CallsHandedOver():
                self._elsewhere.taken(event.manager_id, event.taken, event.bodies)
            case ev.CallsHeard():
                self._elsewhere.heard(event.manager_id, event.news, event.bodies)
                self._prefetch.observe_all(run_times(event.news))
            case ev.WorkerEnding(manager_id=manager_id, task_id=task_id):
                if (running := self._held.running_at(manager_id, task_id)) is not None:
                    running.is_ending = True
            case ev.CallsNotNeeded():
                self._elsewhere.dropped(event.manager_id, event.task_ids)
            case ev.OwnerKnown(owner_id=owner_id):
                self._owner_id = self._qos.targets.owner_id = owner_id
            case ev.BlobGranted(grant=grant):
                self._held.upload_granted(grant, now)
            case ev.PayloadFetched():
                self._on_payload(event, now)
            case ev.FetchFailed():
                if (task := self._fetching(event.task_id, event.seq)) is not None:
                    self._held.fail(task, outcomes.payload_unavailable(event.reason))
            case ev.ResultUploaded():
                if (task := self.find(event.task_id, event.seq)) is not None:
                    self._held.uploaded(task, event.location)
            case ev.UploadFailed():
                if (task := self.find(event.task_id, event.seq)) is not None:
                    self._held.upload_failed(task, event.reason, retryable=event.retryable, now=now)
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
                    latency_slots=event.latency_slots,
                )
                self._copies.joined(event.manager_id)
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
                self._held.session_opened(refs, now)
                self._credit.restart()
            case ev.SessionClosed():
                self._held.session_closed()
            case ev.SpoolMeasured(room=room):
                self._space.measured(room)
            case ev.SpoolRetryOrdered():
                self._space.retry(now=now)
            case ev.TransfersReported(reports=reports):
                for report in reports:
                    self._staging.handle(report, now)
            case ev.TransfersLost(reason=reason):
                self._staging.process_lost(reason, now)
            case ev.Restored():
                self._restore(event, now)
            case ev.DrainOrdered():
                self._is_draining = True
            case _:
                raise TypeError(f"no rule for {event}")
        self._has_changed = True

    def _finish_turn(self, now: float) -> list[Action]:
        """Place tasks and give credit; the actions of all events since the last turn."""
        held = self._held
        if held.end_backoffs(no_nodes=self._admission.no_nodes, now=now):
            self._has_changed = True
        if self._staging.is_busy:
            self._move_files(now)
        if not self._is_draining:
            self._dispatch(now)
            self._give_credit()
            if len(self._managers) > 1 and now >= self._take_back_at:
                self._take_back_at = now + _TAKE_BACK_S
                for manager_id, task_ids in self._managers.behind_long_tasks().items():
                    held.turn.passed.append(do.ReturnTasks(manager_id, task_ids))
            if self._elsewhere.waiting:
                self._elsewhere.ask(self._environments.get, depth=self._prefetch.depth, now=now)
                self._pass_on()
        if self._prewarming.is_due:
            held.turn.prewarms = tuple(self._prewarming.changes(self._managers))
        if self._staging.orders:
            held.turn.transfers += self._staging.orders
            self._staging.orders.clear()
        turn = held.end_turn(now=now)
        actions = turn.cancel_actions()
        if self._has_cloud:
            if (write := turn.spool_write()) is not None:
                actions.append(write)
                held.writing(turn)
            else:
                self._space.written()
        return actions + turn.other_actions()

    def _move_files(self, now: float) -> None:
        """Let files move, and tasks continue whose files have moved."""
        staging, held = self._staging, self._held
        if not self._is_draining:
            staging.tick(now)
        held.turn.file_failures += staging.failures
        staging.failures.clear()
        moved, staging.outcomes = staging.outcomes, []
        for each in moved:
            task = held.by_id.get(each.task_id)
            if task is None:
                continue
            if each.direction == IN:
                if each.error is None:
                    if each.contents and not task.spec.options.callees:  # their calls may run on other nodes
                        submitter = "" if task.spec.submitter == self._owner_id else task.spec.submitter
                        task.node_files = each.contents
                        task.contents = contents_of(each.contents, submitter=submitter)
                    held.staged(task, each.rows, no_nodes=self._admission.no_nodes)
                else:
                    held.fail(task, each.error)
            elif each.error is None:
                held.stored(task, each.rows)
            else:
                held.not_stored(task, each.error)
            self._has_changed = True
        unstaged, staging.unstaged = staging.unstaged, []
        for task_id in unstaged:
            held.unstaged(task_id, now)
            self._has_changed = True

    # -- spool ---------------------------------------------------------------------------------------------------------

    def _restore(self, event: ev.Restored, now: float) -> None:
        """Continue with the tasks of the spool, oldest first, however the last process ended."""
        self._admission.add_functions(event.function_hashes)
        for function in event.signed:
            self._check_signature(function, now)
        dispatched = []
        for task in (spooled.to_task() for spooled in event.tasks):
            task.environment_key = self._environment_key(task.spec)
            task.target = self._qos.target_of(task)
            if task.graph is not None and task.result is None:
                self._add_graph(task, task.graph)
            refused = None
            if task.result is None and (task.is_idempotent or not task.starts):
                refused = self._admission.refusal(task.spec, task.graph, now=now)
                if refused is None and task.files is not None and task.kept is None:
                    refused = self._staging.refused(task.files)
            if self._held.restore(task, refused, now):
                dispatched.append(task)
        if event.has_leftovers:
            # The files of others are staged again: until then their directories would hold copies that do not count.
            self._staging.restore([task.task_id for task in self._held.by_id.values() if task.kept is not None])
        self._held.number_after(max((task.seq for task in event.tasks), default=0))
        reason = "the endpoint was stopped or died while it had the task"
        self._held.reconsider(dispatched, self.slots_hint, reason, now)

    def _on_write_failed(self, reason: str, now: float) -> None:
        """Keep the last turn until it can be written. Only placing and credit are undone: tasks are queued again."""
        self._space.failed(reason, now=now)
        placed, credit = self._held.take_back()
        for task in placed:
            assert task.manager_id is not None
            self._managers.release(task.manager_id, task.task_id)
            self._queue.done(task)
        self._held.requeue(placed, now)
        self._credit.used(credit)

    # -- cloud ---------------------------------------------------------------------------------------------------------

    def _on_tasks(self, event: ev.TasksReceived, now: float) -> None:
        self._credit.used(len(event.tasks))
        for function, body in zip(event.functions, event.bodies.bodies, strict=True):
            self._qos.latencies.name(function.function_hash, function.name)
            is_new = not self._admission.has_function(function.function_hash)
            if self._check_signature(function, now) or is_new:
                self._admission.add_functions((function.function_hash,))
                self._held.turn.functions.append((function, bytes(body or b"")))
        seals = event.opened or (None,) * len(event.tasks)
        for spec, payload, opened in zip(event.tasks, event.payloads.bodies, seals, strict=True):
            former = self._held.by_id.get(spec.task_id)
            if former is None:
                self._accept(spec, payload, opened, now)
            else:
                self._held.redelivered(former, spec.attempt)

    def _accept(self, spec: TaskSpec, payload: Bytes | None, opened: OpenedCall | None, now: float) -> None:
        """Accept one task. ``payload`` is None if it must be fetched first."""
        stage = Stage.QUEUED if payload is not None else Stage.FETCHING
        answer_key = opened.answer_key if opened else b""
        task = Task(next(self._held.seqs), spec, spec.attempt, stage, now, now, payload=payload, answer_key=answer_key)
        if spec.options.environment is not None:
            task.environment_key = self._environment_key(spec)
        task.input_bytes = 0 if payload is None else len(payload)
        if spec.options.qos is not None:
            task.target = self._qos.target_of(task)
        refused = _refused(opened) or self._admission.refusal(spec, None, now=now)
        if refused is None and payload is not None and (spec.options.callees or has_files(payload)):
            refused = self._read(task, payload)
        self._held.accept(task, refused, now)

    def _on_payload(self, event: ev.PayloadFetched, now: float) -> None:
        if (task := self._fetching(event.task_id, event.seq)) is None:
            return
        refused = _refused(event.opened)
        if refused is None:
            [task.payload] = event.payload.bodies
            task.input_bytes = len(task.payload or b"")
            task.answer_key = event.opened.answer_key if event.opened else b""
            refused = self._read(task, task.payload or b"")
        self._held.fetched(task, refused, now)

    def _fetching(self, task_id: str, seq: int) -> Task | None:
        """A task that waits for its payload."""
        task = self._held.find(task_id, seq)
        return task if task is not None and task.stage is Stage.FETCHING else None

    def _environment_key(self, spec: TaskSpec) -> str:
        """The key of a task's environment, which is remembered; empty for the default, which the managers know."""
        environment = spec.options.environment
        return "" if environment is None else self._environments.add(environment)

    def _check_signature(self, function: FunctionSpec, now: float) -> bool:
        """Whether the function has a signature that counts, at an endpoint that asks for one."""
        principals = self._admission.check_signature(function, now=now)
        if principals:
            self._held.turn.signed.append(do.LogSigner(function.name, function.function_hash, principals))
        return bool(principals)

    def _read(self, task: Task, payload: Bytes) -> ErrorRecord | None:
        """Read a task's files and graph, if it has any. Return an error if the task cannot run."""
        if has_files(payload):
            found = self._staging.read(payload)
            if isinstance(found, ErrorRecord):
                return found
            task.files, payload = found
        return self._read_graph(task, payload) if task.spec.options.callees else None

    def _read_graph(self, task: Task, payload: Bytes) -> ErrorRecord | None:
        """Read a task's graph, if it has one. Return an error if the task cannot run."""
        found = read_graph(payload, task.spec.options, is_restricted=task.spec.data_only)
        if found is None or isinstance(found, ErrorRecord):
            return found
        task.graph = found
        refused = self._admission.graph_refusal(task.spec, found)
        if refused is None:
            self._add_graph(task, found)
        return refused

    def _add_graph(self, task: Task, graph: GraphNeeds) -> None:
        task.target = None  # of its calls none has one
        keys = ["" if each is None else self._environments.add(each) for each in reversed(graph.environments)]
        task.environment_key = keys[-1]
        self._graphs.add(task)

    # -- managers ------------------------------------------------------------------------------------------------------

    def _on_nodes(self, event: ev.NodesChanged) -> None:
        self._nodes_problem, self._admission.no_nodes = event.problem, event.refusal
        if event.refusal:
            self._held.fail_waiting(outcomes.nodes_unavailable(event.refusal))

    def _on_progress(self, event: ev.ManagerProgress, now: float) -> None:
        manager_id, progress, held = event.manager_id, event.progress, self._held
        self._managers.note(
            manager_id, workers=progress.workers, idle_workers=progress.idle_workers, problem=progress.problem
        )
        if progress.environments is not None:
            self._managers.note_environments(manager_id, progress.environments)
            self._prewarming.managers_changed()
        if progress.waiting_calls is not None:
            self._elsewhere.note(manager_id, progress.waiting_calls)
        for each in progress.graphs:
            if (running := held.running_at(manager_id, each.task_id)) is not None:
                self._graphs.note(running, each.stages)
                running.used, running.used_at = each.used, now
        for reported in progress.progress:
            if (running := held.running_at(manager_id, reported.task_id)) is not None:
                self._graphs.note_progress(running, reported)
        bodies = event.results.bodies
        durations: dict[str, list[float]] = collections.defaultdict(list)
        for finished in progress.finished:
            task = self._release(manager_id, finished.task_id)
            if task is None:
                continue
            if task.environment_key:
                durations[task.environment_key] += _duration_s(finished)
            if finished.printed is not None and finished.output is not None:
                held.keep_output(task, finished.printed, bodies[finished.output])
            if finished.is_retried and may_retry(task, manager_id):
                held.retry(task, finished, now)
            else:
                result = self._results.finished(task, finished, bodies)
                self._qos.ended(task, finished)
                if task.files is None:
                    held.finish(task, result)
                else:
                    held.ran(task, result, now)
        if progress.cpu_shares is not None:
            self._managers.note_cpus(manager_id, progress.cpu_shares)
            self._qos.weighed(manager_id, progress.cpu_shares)
        self._observe(progress.finished)
        for key, durations_s in durations.items():
            self._environments.finished(key, durations_s, now=now)
        for died in progress.died:
            task = self._release(manager_id, died.task_id)
            if task is not None and task.manager_id == manager_id:
                held.died(task, died, now)
        if progress.returned:
            released = (self._release(manager_id, task_id) for task_id in progress.returned)
            held.returned([task for task in released if task is not None and task.manager_id == manager_id], now)
        held.started(progress.started)
        self._graphs.refresh(now=now)

    def _on_manager_lost(self, event: ev.ManagerLost, now: float) -> None:
        manager = self._managers.remove(event.manager_id)
        self._copies.lost(event.manager_id)
        self._qos.lost(event.manager_id)
        self._on_managers_changed()
        if manager is not None:
            tasks = manager.in_order()
            is_known = event.expected or event.unstarted
            suspects = 0 if is_known else manager.most_running()
            calls = 0 if is_known else manager.slots
            self._elsewhere.lost(manager, reason=event.reason, suspects=calls, unstarted=event.unstarted)
            for task in tasks:
                self._queue.done(task)
            self._held.reconsider(tasks, suspects, event.reason, now, unstarted=event.unstarted)

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
        queue, managers = self._queue, self._managers
        environments = NO_ENVIRONMENTS
        if self._default_refusal:
            self._refuse_default()
        if self._graphs.unchecked:
            self._refuse_apart()
        placed = queue.place_latency(managers.loads, depth=max(_LATENCY_DEPTH, self._prefetch.depth), now=now)
        if queue.waiting or managers.has_environments:
            self._refuse_unsupported()
            environments = self._environments.demand(queue, managers, own=self._prefetch, now=now)
        managers.note_long_tasks()
        placed += queue.place(
            self._policy,
            managers.loads,
            depth=self._prefetch.depth,
            now=now,
            environments=environments,
            holds=managers.holds if managers.may_hold else None,
        )
        if queue.waiting:
            self._look_again_at = now + _LOOK_AGAIN_S
        for task, manager_id in placed:
            managers.assign(manager_id, task)
            if task.target is not None:
                task.target = msgspec.structs.replace(task.target, waited_s=max(0.0, now - task.received_at))
        self._held.dispatch(placed, now)

    def _pass_on(self) -> None:
        self._held.turn.passed += self._elsewhere.messages
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
                    self._held.fail(task, record)

    def _refuse_default(self) -> None:
        """Tasks fail that name no environment, while no present manager can run the default one."""
        assert self._default_environment is not None
        record = outcomes.environment_unsupported(self._default_environment.label, self._default_refusal)
        for task in list(self._held.by_id.values()):
            if task.stage is Stage.QUEUED and not task.environment_key:
                self._held.fail(task, record)

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
                self._held.fail(task, record)
        self._graphs.unchecked.clear()

    def _give_credit(self) -> None:
        held = self._held
        if not held.is_connected or not self._has_cloud or self._space.problem:
            return
        slots = self._managers.slots or self.slots_hint
        held_count = held.unfinished - min(held.aside, _MOST_ASIDE)
        held.turn.credit += self._credit.grant(slots=slots, held=held_count)

    def _observe(self, finished: Sequence[Finished]) -> None:
        """Learn the duration of tasks."""
        durations = [f.ended_at - f.started_at for f in finished if f.started_at is not None and f.ended_at is not None]
        self._prefetch.observe_all(durations)
        self._window.observe_all(durations)

    def _release(self, manager_id: str, task_id: str) -> Task | None:
        """A manager does not have a task any more; None if its result is known already."""
        if (released := self._managers.release(manager_id, task_id)) is not None:
            self._queue.done(released)
        task = self._held.by_id.get(task_id)
        return None if task is None or task.result is not None or task.kept is not None else task


def _duration_s(finished: Finished) -> tuple[float, ...]:
    """How long a task ran, if that is known."""
    if finished.started_at is None or finished.ended_at is None:
        return ()
    return (finished.ended_at - finished.started_at,)


def _refused(opened: OpenedCall | None) -> ErrorRecord | None:
    return ErrorRecord.from_json(opened.error) if opened is not None and opened.error is not None else None
