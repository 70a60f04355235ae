"""Submit: validate everything, memoize, write ahead, queue, wake.

Nothing is stored before everything is valid. Once the transaction has committed the tasks are accepted, even when the
queue cannot be reached: the reconciler queues them.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from aws_lambda_powertools import Logger

from farcall_common.environments import Environment
from farcall_common.errors import (
    EndpointIncompatible,
    FunctionNotPermitted,
    InvalidRequest,
    PayloadTooLarge,
    TargetInfeasible,
    TaskIdReused,
    TooManyTasks,
    Unavailable,
    Unsupported,
)
from farcall_common.limits import MAX_BLOBS_PER_SUBMIT, MAX_CALLEES_PER_SUBMIT
from farcall_common.qos import QoS
from farcall_common.qos_report import InfeasibleTarget, infeasible_of, target_text
from farcall_common.store import Stores
from farcall_common.store.codec import pack
from farcall_common.store.model import (
    MAX_QUEUED_BYTES,
    AuditEntry,
    BlobRef,
    Endpoint,
    Function,
    QueuedTask,
    Task,
)
from farcall_common.store.transitions import as_received
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.trace_ids import trace_ids
from farcall_common.wire.ids import new_id, new_task_id
from farcall_common.wire.states import TaskState
from farcall_lambdas.identity import Identity
from farcall_lambdas.logs import SERVICE
from farcall_lambdas.models.endpoints import RUNTIME
from farcall_lambdas.models.tasks import BlobRefShape, Payload, Submit
from farcall_lambdas.services.allowances import AllowanceService
from farcall_lambdas.services.base import Context, Service, submitters_of
from farcall_lambdas.services.blobs import BlobService
from farcall_lambdas.services.containers import ContainerService
from farcall_lambdas.services.functions import environment_of, target_of
from farcall_lambdas.services.limits import Memory, Room, check_count
from farcall_lambdas.services.memo import Memo, is_memoized

logger = Logger(service=SERVICE, child=True)

#: Functions of a submit that its audit entry names, and likewise callees.
_FUNCTIONS_AUDITED: Final = 20

#: Bytes of the callees of one task in the queue: a thousand without environments have 105 KiB.
_MAX_CALLEE_BYTES: Final = 512 * 1024

#: When to submit again what was refused for its target: the numbers of the endpoint are those of minutes.
_INFEASIBLE_RETRY_S: Final = 60.0

_Stored = bytes | BlobRef
_Uploads = Mapping[BlobRef, bytes]


@dataclasses.dataclass(frozen=True)
class Submitted:
    """An accepted submit: task ids by function, in the order of the request. ``memoized`` are the tasks that got the
    result of an earlier call. ``infeasible`` are targets, by function, that the endpoint cannot meet."""

    task_group_id: str
    tasks: Mapping[str, Sequence[str]]
    memoized: Sequence[Task] = ()
    infeasible: Mapping[str, InfeasibleTarget] = dataclasses.field(default_factory=dict)


class SubmitService(Service):
    """Turns requests into tasks."""

    def __init__(
        self, context: Context, containers: ContainerService, blobs: BlobService, allowances: AllowanceService
    ) -> None:
        super().__init__(context)
        self._containers = containers
        self._blobs = blobs
        self._allowances = allowances
        self._memo = Memo(context.stores)
        self._room = Room(context.stores, context.settings, clock=context.clock)
        self._memory = Memory(context.stores.queue, context.settings, clock=context.clock)

    def submit(self, identity: Identity, endpoint_id: str, wanted: Submit, *, retry_of: str | None = None) -> Submitted:
        """Accept tasks for an endpoint. Sending the same task ids again gives the same answer.

        :param retry_of: the task that they retry.
        :raises InvalidRequest: for a request that contradicts itself; its subclass PayloadTooLarge over a limit.
        :raises NotFound: for an unknown function, endpoint or blob.
        :raises InvalidRequest: also for a function or an environment that the endpoint cannot run.
        :raises Forbidden: for what the caller may not use, or the endpoint does not allow.
        :raises TaskIdReused: for a task id that already names another task.
        :raises AllowanceExceeded: for more than the caller's allowance on the endpoint.
        :raises QueueFull: when too many tasks wait for the endpoint already.
        :raises TargetInfeasible: for a target that the endpoint cannot meet, if it refuses such tasks.
        :raises QuotaExceeded: when the caller has stored too much in the last day.
        """
        options = wanted.options()
        ids = self._task_ids(wanted, options)
        # New ids cannot exist; a check of the caller's ids makes a repeated submit harmless.
        given_ids = [task_id for of_function in ids.values() for task_id in of_function] if wanted.task_ids else []
        references = list(dict.fromkeys([*wanted.tasks, *(each.function_id for each in options.callees)]))
        endpoint, found, existing = self._access.submission(identity, endpoint_id, references, given_ids)
        for source in options.sources:
            self._access.endpoint(identity, source)
        functions = {reference: found[reference] for reference in wanted.tasks}
        _check_allowed(endpoint, found)
        allowance = self._allowances.of(identity, endpoint)
        options = self._in_environment(identity, self._allowances.limited(allowance, options))
        environments = _environments(found, options)
        _check_environments(endpoint, functions, found, environments)
        _check_runnable(endpoint, found, environments)
        callees, callee_bytes = _callees(options, found, environments)
        if callees:
            options = msgspec.structs.replace(options, callees=callees)
        options_of = _options_of(functions, options, environments)
        payloads, uploads = self._payloads(identity, wanted)
        spans = _spans(wanted)

        group_id = wanted.task_group_id or _group_of(existing, identity) or new_id()
        make_task = self._template(identity, endpoint, group_id, retry_of)
        tasks = [
            make_task(
                task_id=task_id,
                function_id=functions[reference].function_id,
                function_version=functions[reference].version,
                function_hash=functions[reference].body_hash,
                options=options_of[reference],
                payload=payload if isinstance(payload, bytes) else None,
                payload_ref=payload if isinstance(payload, BlobRef) else None,
                traceparent=span,
            )
            for reference, of_function in ids.items()
            for task_id, payload, span in zip(of_function, payloads[reference], spans[reference], strict=True)
        ]
        _check_repeats(tasks, existing)

        memoizing = {(f.function_id, f.version) for f in functions.values() if is_memoized(f, options.memoize)}
        sources: Mapping[str, Task] = {}
        if memoizing:
            tasks = [self._memo.marked(task) if _function_of(task) in memoizing else task for task in tasks]
            sources = self._memo.recall(identity.identity_id, [task for task in tasks if task.task_id not in existing])

        if len(tasks) > len(existing):
            self._storage.check()
        new = len(tasks) - len(existing) - len(sources)
        infeasible = self._infeasible(identity, endpoint, functions, options_of) if new else {}
        with self._allowances.room_for(identity, endpoint, allowance, new):
            self._room.check(endpoint, new, quota_key=identity.quota_key(endpoint.owner_id))
            if new:
                self._memory.check(identity.payer_id, _queued_bytes(tasks))
                self._allowances.limit_queue(identity, endpoint, allowance)
                row_bytes = callee_bytes * new
                row_bytes += sum(len(task.payload or b"") for task in tasks if task.task_id not in existing)
                self._storage.add(identity, row_bytes=row_bytes, blob_bytes=sum(map(len, uploads.values())))
            self._blobs.store(uploads)
            # Tasks of a concurrent repeat are checked like those that existed before.
            named = [functions[reference] for reference in ids]
            done = self._submit_entry(identity, endpoint, tasks, named, callees)
            raced = self._stores.tasks.add_tasks(tasks, memoized=sources, audit=done, endpoint_id=endpoint_id)
            _check_repeats(tasks, raced)
            known = {**existing, **raced}
            now = self._now()
            accepted: Sequence[Task] = tasks
            if known or sources:
                accepted = [known.get(task.task_id) or as_received(task, sources, now=now) for task in tasks]
            self._queue(endpoint_id, accepted)
        # One line per submit: the metric TasksAccepted is made of it.
        count = len(tasks) - len(known)
        noted: dict[str, Any] = {"trace_ids": _trace_ids(spans)} if wanted.traceparents else {}
        logger.info("tasks accepted", tasks_accepted=count, endpoint_id=endpoint_id, task_group_id=group_id, **noted)
        memoized = [task for task in accepted if task.state is TaskState.SUCCESS and _function_of(task) in memoizing]
        return Submitted(task_group_id=accepted[0].task_group_id, tasks=ids, memoized=memoized, infeasible=infeasible)

    def _infeasible(
        self,
        identity: Identity,
        endpoint: Endpoint,
        functions: Mapping[str, Function],
        options_of: Mapping[str, TaskOptions],
    ) -> Mapping[str, InfeasibleTarget]:
        """The targets of new tasks that the endpoint cannot meet, by function, as it last reported.

        :raises TargetInfeasible: if it refuses such tasks.
        """
        status, found = endpoint.status, dict[str, InfeasibleTarget]()
        age_s = status.age_s(now=self._clock()) if status.infeasible else None
        if age_s is None or age_s > self._settings.online_window_s:
            return found
        submitters = submitters_of(identity, endpoint)
        for reference, function in functions.items():
            qos = options_of[reference].qos
            target = infeasible_of(status.infeasible, function.function_id, submitters, qos)
            if target is None or qos is None:
                continue
            if status.refuses_infeasible:
                wanted = target_text(qos.target_ms, qos.max_slowdown, qos.percentile)
                raise TargetInfeasible(
                    f"Endpoint {endpoint.name} cannot hold the target of function {function.name}, {wanted}: "
                    f"{target.reason}",
                    hint=target.fix or None,
                    retry_after_s=_INFEASIBLE_RETRY_S,
                )
            found[reference] = target
        return found

    def _in_environment(self, identity: Identity, options: TaskOptions) -> TaskOptions:
        """The options with the environment that the submit names, if it names one.

        :raises ContainerUnknown: if the caller has no such container.
        """
        if options.environment is not None:
            return options.within(options.environment)
        if options.container is not None:
            container_id, environment = self._containers.environment(identity, options.container)
            return options.within(environment, container=container_id)
        return options

    def _task_ids(self, wanted: Submit, options: TaskOptions) -> Mapping[str, Sequence[str]]:
        """The ids of the tasks: the caller's, checked to run parallel to the payloads, or new ones."""
        count = sum(map(len, wanted.tasks.values()))
        if not all(wanted.tasks.values()):
            raise InvalidRequest("A function is listed without a payload.")
        check_count(count, self._settings)
        if count * len(options.callees) > MAX_CALLEES_PER_SUBMIT:
            most = MAX_CALLEES_PER_SUBMIT // len(options.callees)
            raise TooManyTasks(
                f"{count} tasks with {len(options.callees)} callees each in one request; "
                f"{MAX_CALLEES_PER_SUBMIT} callees are allowed in all.",
                hint=f"Submit {most} tasks at a time.",
            )
        if options.user_endpoint_config:
            raise Unsupported("user_endpoint_config is not supported.", hint="Leave it out.")
        if wanted.task_ids is None:
            return {function_id: [new_task_id() for _ in given] for function_id, given in wanted.tasks.items()}
        if not _are_parallel(wanted.task_ids, wanted.tasks):
            raise InvalidRequest("task_ids does not run parallel to tasks.")
        if len({task_id for of_function in wanted.task_ids.values() for task_id in of_function}) < count:
            raise InvalidRequest("A task id is used twice in one request.")
        return {function_id: wanted.task_ids[function_id] for function_id in wanted.tasks}

    def _payloads(self, identity: Identity, wanted: Submit) -> tuple[Mapping[str, Sequence[_Stored]], _Uploads]:
        """Checked payloads for the database, and those to upload to the blob store: binary ones, and large ones of
        clients that do not upload."""
        uploads: dict[BlobRef, bytes] = {}

        def stored(payload: Payload) -> _Stored:
            if isinstance(payload, BlobRefShape):
                return BlobRef(payload.blob_key, payload.size_bytes, payload.sha256)
            data = payload.encode() if isinstance(payload, str) else payload.base64
            self._blobs.check_size(len(data))
            if isinstance(payload, str) and len(data) <= self._settings.max_inline_bytes:
                return data
            ref = self._blobs.reference(identity, data)
            uploads[ref] = data
            return ref

        payloads = {function_id: [stored(each) for each in given] for function_id, given in wanted.tasks.items()}
        references = {each for given in payloads.values() for each in given if isinstance(each, BlobRef)}
        if len(references) > MAX_BLOBS_PER_SUBMIT:
            raise TooManyTasks(f"{len(references)} blobs in one request; {MAX_BLOBS_PER_SUBMIT} are allowed.")
        self._blobs.check_references(identity, references - uploads.keys())
        return payloads, uploads

    def _template(
        self, identity: Identity, endpoint: Endpoint, group_id: str, retry_of: str | None
    ) -> Callable[..., Task]:
        """Makes tasks of one submit from the fields in which they differ."""
        now, quota_key = self._clock(), identity.quota_key(endpoint.owner_id)
        return functools.partial(
            Task,
            task_group_id=group_id,
            owner_id=identity.identity_id,
            quota_key=None if quota_key == identity.identity_id else quota_key,
            endpoint_id=endpoint.endpoint_id,
            submitted_at=dt.datetime.fromtimestamp(now, dt.UTC),
            timings={"submitted_at": now},
            retry_of=retry_of,
        )

    def _submit_entry(
        self,
        identity: Identity,
        endpoint: Endpoint,
        tasks: Sequence[Task],
        functions: Sequence[Function],
        callees: Sequence[Callee],
    ) -> AuditEntry:
        """The audit entry of a submit, also for the owner of the endpoint."""
        first = tasks[0]
        about: dict[str, object] = {"endpoint_id": endpoint.endpoint_id, "task_group_id": first.task_group_id}
        owner_id = endpoint.owner_id
        if first.retry_of is not None:
            return self._entry(
                identity, "task.retry", first.retry_of, owner_id=owner_id, task_id=first.task_id, **about
            )
        named = dict.fromkeys(f"{function.function_id}@{function.version}" for function in functions)
        about["functions"] = list(named)[:_FUNCTIONS_AUDITED]
        if callees:
            about["callees"] = list(dict.fromkeys(each.reference for each in callees))[:_FUNCTIONS_AUDITED]
        if sources := first.options.sources:
            about["sources"] = list(sources)
        return self._entry(identity, "tasks.submit", endpoint.endpoint_id, owner_id=owner_id, **about)

    def _queue(self, endpoint_id: str, tasks: Sequence[Task]) -> None:
        waiting = [task for task in tasks if not was_dispatched(task)]
        if not waiting:
            return
        try:
            self._room.note(endpoint_id, queue_tasks(self._stores, waiting))
        except Unavailable:
            logger.warning("queue unavailable; the reconciler will queue the tasks", count=len(waiting))


def _are_parallel(one: Mapping[str, Sequence[object]], other: Mapping[str, Sequence[object]]) -> bool:
    return one.keys() == other.keys() and all(len(one[key]) == len(values) for key, values in other.items())


def _spans(wanted: Submit) -> Mapping[str, Sequence[str | None]]:
    """The parent spans of the tasks, by function."""
    if wanted.traceparents is None:
        return {function_id: [None] * len(given) for function_id, given in wanted.tasks.items()}
    if not _are_parallel(wanted.traceparents, wanted.tasks):
        raise InvalidRequest("traceparents does not run parallel to tasks.")
    return wanted.traceparents


def _trace_ids(spans: Mapping[str, Sequence[str | None]]) -> str:
    return trace_ids(span for of_function in spans.values() for span in of_function)


def was_dispatched(task: Task) -> bool:
    """Whether a task was dispatched or is finished, by the database: then it must not be queued here.

    If the queue lost it, only the forwarder that owns the endpoint can see whether the endpoint has it.
    """
    return task.attempt > 0 or task.state.is_terminal


def _queued_bytes(tasks: Sequence[Task]) -> int:
    """About as many bytes as these tasks of one submit have in the queue: they differ in their payloads, and in their
    options if their functions have environments."""
    sizes: dict[int, int] = {}
    for task in tasks:
        if id(task.options) not in sizes:
            sizes[id(task.options)] = len(pack(msgspec.structs.replace(QueuedTask.of(task), payload=None)))
    payloads = sum(len(task.payload or b"") for task in tasks if len(task.payload or b"") <= MAX_QUEUED_BYTES)
    return sum(sizes[id(task.options)] for task in tasks) + payloads


def queue_tasks(stores: Stores, tasks: Sequence[Task]) -> int:
    """Queue committed tasks of one endpoint. Harmless to repeat. Returns how many wait there now, 0 if none was given.

    :raises Unavailable: when the queue cannot be reached.
    """
    return stores.queue.enqueue([QueuedTask.of(task) for task in tasks]) if tasks else 0


def _check_allowed(endpoint: Endpoint, functions: Mapping[str, Function]) -> None:
    if endpoint.allowed_functions is None:
        return
    allowed = frozenset(endpoint.allowed_functions)
    for function in functions.values():
        version = f"{function.function_id}@{function.version}"
        if allowed.isdisjoint((function.function_id, version)):
            raise FunctionNotPermitted(
                f"Endpoint {endpoint.endpoint_id} does not run function {version}.",
                hint=f"Ask the endpoint's owner to add {function.name} (SHA-256 {function.body_hash}) to "
                "`allowed_functions`, which lists those that may run.",
            ).of(endpoint.endpoint_id, owner_id=endpoint.owner_id)


def _environments(functions: Mapping[str, Function], options: TaskOptions) -> Mapping[str, Environment | None]:
    """The environments of functions: the one that the submit names, else that of each."""
    if options.environment is not None:
        return dict.fromkeys(functions, options.environment)
    return {reference: environment_of(function) for reference, function in functions.items()}


def _options_of(
    functions: Mapping[str, Function], options: TaskOptions, environments: Mapping[str, Environment | None]
) -> Mapping[str, TaskOptions]:
    """The options of the tasks by function. Functions with the same environment and target share one object: the store
    writes it once."""
    found: dict[str, TaskOptions] = {}
    known: dict[tuple[Environment | None, QoS | None], TaskOptions] = {(None, None): options}
    for reference, function in functions.items():
        own = environments[reference] if options.environment is None else None
        target = target_of(function) if options.qos is None else None
        if (own, target) not in known:
            within = options if own is None else options.within(own)
            known[own, target] = within if target is None else msgspec.structs.replace(within, qos=target)
        found[reference] = known[own, target]
    return found


def _callees(
    options: TaskOptions, functions: Mapping[str, Function], environments: Mapping[str, Environment | None]
) -> tuple[tuple[Callee, ...], int]:
    """The functions that the tasks call, as endpoints know them, and how many bytes each task has of them.

    :raises PayloadTooLarge: if they take too much room in each task.
    """
    if not options.callees:
        return (), 0
    callees = []
    for each in options.callees:
        function = functions[each.function_id]
        environment = environments[each.function_id]
        callees.append(Callee(function.function_id, function.body_hash, function.version, environment))
    size_bytes = len(pack(callees))
    if size_bytes > _MAX_CALLEE_BYTES:
        raise PayloadTooLarge(
            f"The {len(callees)} callees have {size_bytes} bytes with their environments; {_MAX_CALLEE_BYTES} are "
            "allowed.",
            hint="Use fewer functions, or environments with shorter lists of requirements.",
        )
    return tuple(callees), size_bytes


def _check_environments(
    endpoint: Endpoint,
    functions: Mapping[str, Function],
    found: Mapping[str, Function],
    environments: Mapping[str, Environment | None],
) -> None:
    """A task never runs outside of its environment: an endpoint that reports no technologies runs none.

    On an endpoint that runs certain functions only, an environment of the caller's would be a way to run other code.

    :param functions: those of the tasks; ``found``: with those that the tasks call.
    :raises EndpointIncompatible: if the endpoint does not run the technology.
    :raises FunctionNotPermitted: for an environment that is not the function's own, where functions are restricted.
    """
    runs = _runtime(endpoint).get("containers")
    runs = list(map(str, runs)) if isinstance(runs, list) else []
    for reference, environment in environments.items():
        if environment is None:
            continue
        if environment.type not in runs:
            offer = f"runs {', '.join(runs)}" if runs else "runs no containers"
            subject = "The tasks require" if reference in functions else f"Callee {found[reference].name} requires"
            raise EndpointIncompatible(
                f"{subject} container {environment.label} ({environment.type}), and endpoint {endpoint.name} {offer}.",
                hint="Submit without the container, or choose an endpoint whose workers run in that environment.",
            )
        function = found[reference]
        own = environment_of(function)
        if endpoint.allowed_functions is not None and (own is None or own.key != environment.key):
            raise FunctionNotPermitted(
                f"Endpoint {endpoint.name} runs certain functions only, each in its own environment: function "
                f"{function.name} does not run in {environment.label} there.",
                hint="Submit without the container.",
            ).of(endpoint.endpoint_id, owner_id=endpoint.owner_id)


def _check_runnable(
    endpoint: Endpoint, functions: Mapping[str, Function], environments: Mapping[str, Environment | None]
) -> None:
    """Compare the Python versions, if the function is byte code of one and the endpoint has reported its own. That of
    an environment is not known here."""
    reported = str(_runtime(endpoint).get("python_version", ""))
    runs = ".".join(reported.split(".")[:2])
    for reference, function in functions.items():
        wanted = function.metadata.get("byte_code_of_python")
        if environments[reference] is not None:
            continue
        if runs and isinstance(wanted, str) and wanted != runs:
            raise EndpointIncompatible(
                f"Function {function.name} ({function.function_id}) is byte code of Python {wanted}, and endpoint "
                f"{endpoint.name} runs Python {runs}.",
                hint=f"Register it with Python {runs}, or so that it travels as source: no closures, no decorators.",
            )


def _runtime(endpoint: Endpoint) -> Mapping[str, Any]:
    """The runtime that the endpoint reported when it last connected."""
    runtime = endpoint.metadata.get(RUNTIME)
    return runtime if isinstance(runtime, dict) else {}


def _function_of(task: Task) -> tuple[str, int]:
    return task.function_id, task.function_version


def _group_of(existing: Mapping[str, Task], identity: Identity) -> str | None:
    """The group of a repeated submit without one: that of the first time."""
    return next((task.task_group_id for task in existing.values() if identity.owns(task.owner_id)), None)


def _check_repeats(tasks: Sequence[Task], existing: Mapping[str, Task]) -> None:
    """:raises TaskIdReused: unless every existing task is the one that is being submitted again."""
    for task in tasks if existing else ():
        known = existing.get(task.task_id)
        if known is not None and _identity_of(known) != _identity_of(task):
            raise TaskIdReused(f"Task id {task.task_id} names another task already.")


def _identity_of(task: Task) -> tuple[object, ...]:
    return (task.owner_id, task.endpoint_id, task.function_id, task.payload, task.payload_ref)
