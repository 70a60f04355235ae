"""Executor engine: submits calls in batches, and keeps the threads and the table of open futures."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import os
import queue
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import msgspec

from farcall._api import IDS_PER_REQUEST, INLINE_BYTES, Api, BlobRef
from farcall._batch import (
    MAX_BYTES,
    SubmitContext,
    encode_payload,
    encode_submit,
    most_tasks,
    request_bytes,
)
from farcall._client import Connection
from farcall._compatibility import CompatibilityChecker
from farcall._decorated import Decorated
from farcall._delays import DelayWatch
from farcall._functions import FunctionHandle, FunctionTable, PackedCall, Requirements, pack_call, sorted_kwargs
from farcall._future import ComputeFuture, Origin, TaskRecord, failure_of, inputs_of, resolved, when_all_done
from farcall._graphs import GraphTask
from farcall._pacing import BurstLimit
from farcall._qos import TargetWarnings
from farcall._results import Collector, Poller, ResultReader, result_from_json
from farcall._stream import Stream
from farcall._task_info import Why
from farcall._task_output import OnOutput, OutputWatch, TaskOutput
from farcall._tracing import trace_call
from farcall_common.chains import Chain
from farcall_common.errors import (
    ConfigurationError,
    EndpointIncompatible,
    EndpointUnknown,
    FarcallError,
    ProtocolError,
    RequestTooLarge,
    SerializationError,
    TargetInfeasible,
    TaskUnknown,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from farcall_common.futures import OF_PARENT
from farcall_common.graph_builder import Graph, Plan, plan_of
from farcall_common.graph_packing import task_options
from farcall_common.limits import MAX_SOURCES
from farcall_common.payload import Serializer
from farcall_common.payload.strategy import message_of
from farcall_common.task_options import MAX_CALLEES, Callee, TaskOptions

_logger = logging.getLogger(__name__)

#: A cancellation is sent on a best-effort basis, and repeated for less time than a submit.
_CANCEL_RETRY_S: Final = 10.0
#: Errors of the whole request. Any other may be caused by one task, and must not fail the others of the batch.
_WHOLE_REQUEST: Final = (Unauthenticated, EndpointUnknown, ConfigurationError, ProtocolError, Unsupported)
_PARALLEL_UPLOADS: Final = 4
#: Memory for payloads that wait to be sent; a submit beyond it blocks.
_UNSENT_BYTES: Final = 256 * 1024 * 1024
#: Combinations of functions whose context is remembered.
_REMEMBERED_CONTEXTS: Final = 64
#: Files of other endpoints that the tasks of one request have together, unless one has more.
_SHARED_FILES: Final = 50
_COUNTED_BYTES: Final = 4 * 1024
_JOIN_TIMEOUT_S: Final = 15.0
_FLUSH_AT_EXIT_S: Final = 10.0
_NOT_SENT: Final = "the process exits with calls that could not be sent"

_thread: Final = threading.local()


class MemoryBudget:
    """Limits memory: callers wait until there is room. One caller is always admitted, however much it takes, so that
    none waits forever."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._lifted = False
        self._released = threading.Condition()

    def acquire(self, size_bytes: int, *, wait: bool = True) -> None:
        """Take memory. Blocks until there is room, unless ``wait`` is false."""
        with self._released:
            if wait:
                self._released.wait_for(
                    lambda: (
                        self._lifted or self._taken_bytes == 0 or self._taken_bytes + size_bytes <= self._limit_bytes
                    )
                )
            self._taken_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give memory back."""
        with self._released:
            self._taken_bytes -= size_bytes
            self._released.notify_all()

    def lift(self) -> None:
        """Admit every caller from now on: the thread that releases memory died."""
        with self._released:
            self._lifted = True
            self._released.notify_all()


class _StopOrExit(threading.Event):
    """Ends the retries of transfers, also some seconds after the program ended: Python waits for pools of threads then.

    :param pool: takes no more work when the program ends.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self._pool = pool
        self._exits_at = math.inf

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(timeout) or (self.is_exiting() and time.monotonic() >= self._exits_at)

    def is_exiting(self) -> bool:
        """Whether the program ends."""
        try:
            self._pool.submit(int)
        except RuntimeError:
            self._exits_at = min(self._exits_at, time.monotonic() + _FLUSH_AT_EXIT_S)
            return True
        return False


class OutgoingTask(TaskRecord):
    """A task of this executor (see :class:`farcall._batch.TaskToSubmit`).

    ``payload`` is JSON, and empty before the call is packed and after it was sent; ``requirements`` are those of
    its arguments; ``reserved_bytes`` is the memory that it counts for until it was sent.
    """

    __slots__ = ("context", "function", "payload", "requirements", "reserved_bytes")

    def __init__(self, task_id: str, function: FunctionHandle, context: SubmitContext) -> None:
        super().__init__(task_id)
        self.function: FunctionHandle = function
        self.context: SubmitContext = context
        self.payload: bytes = b""
        self.requirements: Requirements | None = None
        self.reserved_bytes: int = 0

    @property
    def function_id(self) -> str:
        """The id of its function, which is registered by now."""
        assert self.function.function_id is not None
        return self.function.function_id


class Sender:
    """Sends calls in batches, then cancellations.

    The first call is sent at once. Calls that arrive during a request are sent together in the next one: the batch size
    follows the load, without a timer. Calls with equal contexts share a request.

    :param batch_size: maximum number of calls in a request.
    :param retry_timeout_s: how long a submit is repeated while the API cannot be reached, in seconds.
    :param on_accepted: called when the API has taken a batch.
    :param on_gap: called when tasks have ended whose results must be polled.
    :param on_sent: called with the number of bytes that the calls of a batch had reserved, when they were sent.
    """

    def __init__(
        self,
        api: Api,
        collector: Collector,
        *,
        compatibility: CompatibilityChecker,
        target_warnings: TargetWarnings,
        batch_size: int,
        burst: BurstLimit,
        retry_timeout_s: float,
        on_accepted: Callable[[], None],
        on_gap: Callable[[], None],
        on_sent: Callable[[int], None],
    ) -> None:
        self._api = api
        self._collector = collector
        self._compatibility = compatibility
        self._target_warnings = target_warnings
        self.batch_size = batch_size
        self.burst: BurstLimit = burst
        #: How many calls the API has taken.
        self.accepted: int = 0
        self._retry_timeout_s = retry_timeout_s
        self._on_accepted = on_accepted
        self._on_gap = on_gap
        self._on_sent = on_sent
        self._queue: queue.SimpleQueue[OutgoingTask | str | None] = queue.SimpleQueue()
        self._calls: deque[OutgoingTask] = deque()
        self._cancelled: list[str] = []
        self._stop = threading.Event()
        self._idle = threading.Condition()

    def send(self, task: OutgoingTask) -> None:
        """Send a call soon."""
        self._queue.put(task)

    def cancel(self, task: TaskRecord) -> None:
        """Send a cancellation, if the API may have received the task."""
        if task.sent:
            self._queue.put(task.task_id)

    def stop(self) -> None:
        """Let :meth:`run` return when everything before has been sent."""
        self._queue.put(None)

    def abandon(self) -> None:
        """Stop repeating the current request."""
        self._stop.set()

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Wait until the API has taken every call. False after ``timeout_s`` seconds."""
        with self._idle:
            return self._idle.wait_for(self._collector.all_accepted, timeout_s)

    def run(self) -> None:
        """Send until :meth:`stop`. The body of a thread."""
        while self._collect():
            if self._calls:
                self._send_batch()
            if self._cancelled:
                self._send_cancellations()
            with self._idle:
                self._idle.notify_all()

    def _collect(self) -> bool:
        """Take everything in the queue; wait if it is empty. False after :meth:`stop`, when nothing is left."""
        wait = not self._calls
        while len(self._calls) < self.batch_size:
            try:
                item = self._queue.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if item is None:
                if self._calls or self._cancelled:
                    self._queue.put(None)
                    return True
                return False
            if isinstance(item, OutgoingTask):
                self._calls.append(item)
            else:
                self._cancelled.append(item)
        return True

    def _send_batch(self) -> None:
        taken: list[OutgoingTask] = []
        others: list[OutgoingTask] = []
        context = self._calls[0].context
        room, reserved_bytes = MAX_BYTES, 0
        most = min(self.batch_size, most_tasks(len(context.callees)))
        while self._calls and len(taken) < most:
            task = self._calls[0]
            if task.context is not context and task.context != context:
                others.append(self._calls.popleft())
                continue
            room -= request_bytes(task.payload)
            if taken and room < 0:
                break
            taken.append(self._calls.popleft())
            reserved_bytes += task.reserved_bytes
            task.sent = True  # set before `cancelled` is read: ComputeFuture.cancel() does it in the opposite order
        self._calls.extendleft(reversed(others))
        batch = self._readable([task for task in taken if not task.cancelled])
        if context.callees:
            self._send_with_callees(batch, context)
        elif batch := self._registered(batch):
            self._submit(batch)
        for task in taken:
            task.payload = b""  # the record lives as long as its future
        if reserved_bytes:
            self._on_sent(reserved_bytes)

    def _send_with_callees(self, batch: Sequence[OutgoingTask], context: SubmitContext) -> None:
        """Send calls whose functions call others. All of them fail if one of these cannot be sent."""
        if not batch:
            return
        try:
            callees = [
                self._compatibility.readable(context.endpoint_id or "", callee, context.options)
                for callee in context.callees
            ]
            for callee in callees:
                if callee.function_id is None:
                    self._register(callee)
        except FarcallError as error:
            self._fail(batch, error)
        except BaseException as error:  # noqa: BLE001 - rewriting a function runs code of its user
            self._fail(batch, SerializationError(f"A function of the task cannot be written: {message_of(error)}"))
        else:
            # A function of a graph is among its callees, and may be rewritten: it is registered once.
            if batch := self._registered(batch):
                self._submit(batch, tuple(Callee(callee.function_id or "") for callee in callees))

    def _readable(self, batch: Sequence[OutgoingTask]) -> list[OutgoingTask]:
        """Write each function in a form that the endpoint reads. Calls that it could not read or run fail."""
        readable: list[OutgoingTask] = []
        for task in batch:
            if task.requirements is None and task.function.requirements is None:
                readable.append(task)
                continue
            endpoint_id = task.context.endpoint_id or ""
            try:
                options = task.context.options
                task.function = self._compatibility.readable(endpoint_id, task.function, options)
                what = f"an argument of {task.function.name}"
                self._compatibility.check(endpoint_id, task.requirements, what=what, options=options)
            except EndpointIncompatible as error:
                self._fail([task], error)
            except BaseException as error:  # noqa: BLE001 - rewriting a function runs code of its user
                self._fail([task], SerializationError(f"{task.function.name} cannot be written: {message_of(error)}"))
            else:
                readable.append(task)
        return readable

    def _registered(self, batch: Sequence[OutgoingTask]) -> list[OutgoingTask]:
        """Register new functions. Calls of one that cannot be registered fail."""
        refused: set[FunctionHandle] = set()
        for handle in dict.fromkeys(task.function for task in batch):
            if handle.function_id is None:
                try:
                    self._register(handle)
                except FarcallError as error:
                    refused.add(handle)
                    self._fail([task for task in batch if task.function is handle], error)
        return [task for task in batch if task.function not in refused]

    def _register(self, handle: FunctionHandle) -> None:
        handle.function_id = self._api.register_function(
            handle.registration(), retry_timeout_s=self._retry_timeout_s, stop=self._stop
        )
        handle.packed = None

    def _submit(
        self,
        batch: Sequence[OutgoingTask],
        callees: tuple[Callee, ...] = (),
        *,
        raises: tuple[type[FarcallError], ...] = (),
    ) -> None:
        """Submit tasks, as smaller requests if it is refused. Of the refusals by others than Farcall, those that
        ``raises`` names are not repeated, nor is that of a size which smaller requests may keep."""
        context = batch[0].context
        assert context.endpoint_id is not None
        options = self._compatibility.with_binary_results(context.endpoint_id, context.options)
        if callees:
            options = msgspec.structs.replace(options, callees=callees)
        if any(task.requirements.sources for task in batch if task.requirements is not None):
            parts = list(by_sources(batch))
            if len(parts) > 1:  # options are those of a whole request
                for part in parts:
                    self._submit(part, callees)
                return
            sources, files = sources_of(task.requirements for task in batch)
            options = msgspec.structs.replace(options, sources=sources, source_files=files)
        body, ids = encode_submit(batch, task_group_id=context.task_group_id, options=options)
        self._stop.wait(self.burst.next_delay_s(now=time.monotonic()))
        try:
            answer = self._api.submit(
                context.endpoint_id,
                body,
                task_ids=ids,
                raises=(*raises, RequestTooLarge) if len(batch) > 1 else raises,
                retry_timeout_s=self._retry_timeout_s,
                stop=self._stop,
            )
        except FarcallError as error:
            is_of_function = isinstance(error, TargetInfeasible) and len({task.function for task in batch}) == 1
            if len(batch) == 1 or error.record.retryable or is_of_function or isinstance(error, _WHOLE_REQUEST):
                self._fail(batch, error)
                return
            _logger.debug("a submit of %d tasks was refused (%s): submitting its parts", len(batch), error)
            if error.is_foreign and not isinstance(error, RequestTooLarge):
                raises = (FarcallError,)  # a firewall may refuse the text of one payload, and has had its time
            for part in _parts(batch):
                self._submit(part, callees, raises=raises)
            return
        if answer.warnings:
            names = {task.function_id: task.function.name for task in batch}
            self._target_warnings.show(answer.warnings, endpoint_id=context.endpoint_id, names=names)
        now, now_mono = time.time(), time.monotonic()
        self.accepted += len(batch)
        for task in batch:
            task.accepted_at, task.accepted_mono = now, now_mono
        self._collector.take_polled((answer.results or {}).values())  # memoized results
        if answer.results_left_out:
            self._on_gap()
        self._on_accepted()

    def _fail(self, tasks: Sequence[OutgoingTask], error: FarcallError) -> None:
        self._collector.fail([task.task_id for task in tasks], error)

    def _send_cancellations(self) -> None:
        task_ids, self._cancelled = self._cancelled, []
        for start in range(0, len(task_ids), IDS_PER_REQUEST):
            try:
                self._api.cancel(
                    task_ids[start : start + IDS_PER_REQUEST], retry_timeout_s=_CANCEL_RETRY_S, stop=self._stop
                )
            except TaskUnknown:
                pass  # the submit of the task failed
            except FarcallError as error:
                _logger.warning("cancelling %d tasks failed: %s", len(task_ids), error)


def sources_of(requirements: Iterable[Requirements | None]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The endpoints whose files calls read, and the files, as options of tasks have them."""
    known = [each for each in requirements if each is not None]
    sources = dict.fromkeys(source for each in known for source in each.sources)
    return tuple(sources), tuple(dict.fromkeys(file for each in known for file in each.source_files))


def by_sources(batch: Sequence[OutgoingTask]) -> Iterator[list[OutgoingTask]]:
    """Split a batch, so that tasks of a request have few files of other endpoints together: each of them has all of
    these in its options. Those without any have a request of their own."""
    without: list[OutgoingTask] = []
    part: list[OutgoingTask] = []
    sources: set[str] = set()
    files: set[str] = set()
    for task in batch:
        needed = task.requirements
        if needed is None or not needed.sources:
            without.append(task)
            continue
        sources.update(needed.sources)
        files.update(needed.source_files)
        if part and (len(sources) > MAX_SOURCES or len(files) > _SHARED_FILES):
            yield part
            part, sources, files = [], set(needed.sources), set(needed.source_files)
        part.append(task)
    yield from filter(None, (part, without))


def _parts(batch: Sequence[OutgoingTask]) -> list[list[OutgoingTask]]:
    """A refused batch in smaller ones: by function, and if there is only one, in halves."""
    by_function: dict[FunctionHandle, list[OutgoingTask]] = {}
    for task in batch:
        by_function.setdefault(task.function, []).append(task)
    if len(by_function) > 1:
        return list(by_function.values())
    middle = len(batch) // 2
    return [list(batch[:middle]), list(batch[middle:])]


class Engine:
    """Turns calls into futures, sends them, and waits for their results.

    It lives as long as a future is open, also after its executor was garbage-collected.

    :param task_group_id: the group to receive results for from the start; others are added at their first use.
    :param on_ended: called when the last thread has ended.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        task_group_id: str,
        batch_size: int,
        retry_timeout_s: float,
        label: str,
        serializer: Serializer,
        burst: BurstLimit,
        on_ended: Callable[[], None],
    ) -> None:
        self._groups = {task_group_id}
        self._references: dict[str, str] = {}
        self._contexts: dict[tuple[object, ...], tuple[SubmitContext, SubmitContext]] = {}
        self.names = connection.names
        self._api = connection.api
        self._blobs = connection.blobs
        self._sealer = connection.sealer
        self._retry_timeout_s = retry_timeout_s
        self._uploads = ThreadPoolExecutor(
            _PARALLEL_UPLOADS, thread_name_prefix=f"{label}-upload", initializer=_mark_thread
        )
        self._abandoned = _StopOrExit(self._uploads)
        self._reader = ResultReader(
            self._api,
            self._blobs,
            connection.policy,
            connection.sealer,
            retry_timeout_s=retry_timeout_s,
            stop=self._abandoned,
        )
        self.serializer = serializer
        self._compatibility = connection.compatibility
        self._pid = os.getpid()
        self._unsent = MemoryBudget(_UNSENT_BYTES)
        self._collector = Collector(self._reader, on_finished=self._stop)
        self._stream = Stream(self._api, self._collector, task_group_id=task_group_id, on_gap=self._poll_soon)
        self._poller = Poller(
            self._api, self._collector, stream_is_open=self._stream.is_open, retry_timeout_s=retry_timeout_s
        )
        self.delays: DelayWatch = DelayWatch(self._api, self._collector)
        self.sender: Sender = Sender(
            self._api,
            self._collector,
            compatibility=self._compatibility,
            target_warnings=connection.target_warnings,
            batch_size=batch_size,
            burst=burst,
            retry_timeout_s=retry_timeout_s,
            on_accepted=self._tasks_added,
            on_gap=self._poll_soon,
            on_sent=self._unsent.release,
        )
        self._output = connection.output
        self._output_watch: OutputWatch | None = None
        self._label = label
        self._on_ended = on_ended
        parts = (
            ("sender", self.sender.run),
            ("stream", self._stream.run),
            ("poller", self._poller.run),
            ("delays", self.delays.run),
        )
        _load_modules()
        self._alive = 0
        self._alive_lock = threading.Lock()
        self._threads = [self._spawn(run, f"{label}-{name}") for name, run in parts]
        _running.add(self)

    @property
    def serializer(self) -> Serializer:
        """Serializes functions and arguments."""
        return self._serializer

    @serializer.setter
    def serializer(self, value: Serializer) -> None:
        self._serializer = value
        self._reader.allowed = value.allowed
        self.functions: FunctionTable = FunctionTable(value)

    def registered(self, function_id: str | uuid.UUID) -> FunctionHandle:
        """The handle of a registered function, by id, ``<id>@<version>`` or alias.

        :raises FunctionUnknown: for an unknown alias.
        """
        name = str(function_id)
        if name not in self._references:
            self._references[name] = self._api.reference_of(function_id)
        return self.functions.registered(self._references[name])

    def callees(self, given: Iterable[object] | None) -> tuple[FunctionHandle, ...]:
        """The handles of functions that calls may call: of functions, ids and aliases.

        :raises TypeError: if it is no list of these.
        :raises ValueError: if there are too many.
        :raises FunctionUnknown: for an unknown alias.
        :raises SerializationError, PayloadTooLarge: if a function cannot be sent.
        """
        if given is None:
            return ()
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise TypeError(f"callees: expected a list, got {type(given).__name__}")
        found: dict[FunctionHandle, None] = {}
        for each in given:
            if isinstance(each, str | uuid.UUID):
                found[self.registered(each)] = None
            elif isinstance(each, Chain):
                found |= {self.functions.handle(function): None for function in each.functions}
            elif callable(each):
                found[self.functions.handle(each)] = None
            else:
                raise TypeError(f"callees: expected functions, ids or aliases, got {type(each).__name__}")
        if len(found) > MAX_CALLEES:
            raise ValueError(f"callees: a task calls at most {MAX_CALLEES:,} functions, and these are {len(found):,}")
        return tuple(found)

    def submit(
        self, function: FunctionHandle, args: tuple[Any, ...], kwargs: dict[str, Any], context: SubmitContext
    ) -> ComputeFuture[Any]:
        """The future of a call, which is sent soon: when the futures among its arguments are done.

        :raises SerializationError, PayloadTooLarge: if the arguments cannot be sent.
        :raises RuntimeError: after :meth:`close`, and in a process forked after the engine was started.
        :raises BrokenExecutor: if a thread died of an error of ours.
        """
        self._check_usable()
        inputs = inputs_of(args, kwargs)
        if inputs:
            return self._open_and_send(
                function, context, inputs, lambda: self._pack(function, *resolved(args, kwargs), context)
            )
        # Arguments that cannot be sent are refused before there is a future.
        packed = self._pack(function, args, kwargs, context)
        return self._open_and_send(function, context, (), lambda: packed)

    def submit_graph(self, graph: Graph, target: object, context: SubmitContext) -> ComputeFuture[Any]:
        """The future of a target of a graph, which is one task.

        :raises TypeError, ValueError: for a target that is not one, and arguments that a function does not take.
        :raises SerializationError, PayloadTooLarge, RuntimeError, BrokenExecutor: as :meth:`submit`.
        """
        self._check_usable()
        plan = plan_of(graph, target)
        packing = GraphTask(
            plan,
            self.functions,
            self._serializer,
            spread=graph.spread,
            endpoint_id=self.names.find,
            target=context.endpoint_id or "",
        )
        own = [function.task_options.get("callees") for function in plan.functions if isinstance(function, Decorated)]
        given_options = context.options
        context = self._with_callees(
            context,
            packing.callees,
            [each for given in own for each in self.callees(given)],
            options=task_options(plan, given_options),
        )
        if inputs := packing.inputs():
            return self._open_and_send(
                packing.function, context, inputs, lambda: packing.pack(given_options), plan=plan, graph=graph
            )
        packed = packing.pack(given_options)
        return self._open_and_send(packing.function, context, (), lambda: packed, plan=plan, graph=graph)

    def _with_callees(
        self,
        context: SubmitContext,
        callees: tuple[FunctionHandle, ...],
        others: Sequence[FunctionHandle],
        *,
        options: TaskOptions,
    ) -> SubmitContext:
        """A context with other functions that its tasks call, and other options: one object for equal ones, which share
        requests.

        :raises ValueError: if there are too many.
        """
        key = (*callees, *others, options.idempotent)
        known = self._contexts.get(key)
        if known is None or known[0] is not context:
            while len(self._contexts) >= _REMEMBERED_CONTEXTS:
                self._contexts.pop(next(iter(self._contexts)), None)
            every = tuple(dict.fromkeys((*callees, *others, *context.callees)))
            if len(every) > MAX_CALLEES:
                raise ValueError(f"graph: with its callees it has {len(every):,} functions, of {MAX_CALLEES:,} at most")
            known = self._contexts[key] = context, dataclasses.replace(context, callees=every, options=options)
        return known[1]

    def _check_usable(self) -> None:
        if _exiting:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        if self.is_inherited:
            raise RuntimeError(f"this Executor cannot submit: {OF_PARENT}")

    def _open_and_send(
        self,
        function: FunctionHandle,
        context: SubmitContext,
        inputs: Sequence[Future[Any]],
        pack: Callable[[], PackedCall],
        *,
        plan: Plan | None = None,
        graph: Graph | None = None,
    ) -> ComputeFuture[Any]:
        """The future of a task.

        :param pack: makes its payload, when the inputs are done.
        :param plan, graph: of a task that is a target of a graph.
        """
        new_id = self._sealer.new_task_id(context.sealed, endpoint_id=context.endpoint_id)
        task = OutgoingTask(new_id, function, context)
        task.inputs = inputs
        if plan is not None and graph is not None:
            task.graph = weakref.ref(graph)
            task.rebuild = plan.rebuild
            task.stage_numbers = plan.pruned_numbers
        future = self._open(task, context)
        try:
            trace_call(future, task, function.name)
            if inputs:
                self._send_after_inputs(task, pack)
            else:
                self._send(task, pack())
        except BaseException as error:  # Ctrl-C for instance, while this waits for memory: the call is never sent
            self._collector.fail([task.task_id], error)
            raise
        return future

    def adopt(self, task_ids: Sequence[str], context: SubmitContext) -> list[ComputeFuture[Any]]:
        """The futures of tasks that the API has already: those that are open here, and new ones.

        :raises RuntimeError: after :meth:`close`.
        """
        known = {future.task_id: future for future in self.unsettled()}
        for task_id in task_ids:
            if task_id not in known:
                known[task_id] = self._open(TaskRecord(task_id, adopted=True), context)
        self._poller.poll_soon()
        self.delays.tasks_added()
        return [known[task_id] for task_id in task_ids]

    def cancel(self, task: TaskRecord) -> None:
        """See :class:`farcall._future.FutureOwner`."""
        self.sender.cancel(task)
        self._collector.drop(task.task_id)

    def why(self, task_id: str) -> Why:
        """See :class:`farcall._future.FutureOwner`.

        :raises FarcallError: if the API cannot be reached.
        """
        return Why.from_json(self._api.why(task_id))

    def cause_of_delay(self, endpoint_id: str) -> str:
        """See :class:`farcall._future.FutureOwner`."""
        return self.delays.cause(endpoint_id)

    def output(self, task_id: str) -> TaskOutput | None:
        """See :class:`farcall._future.FutureOwner`.

        :raises FarcallError: if the API cannot be reached.
        """
        return self._output.last([task_id]).get(task_id)

    def details(self, task: TaskRecord) -> Mapping[str, Any]:
        """See :class:`farcall._future.FutureOwner`.

        :raises FarcallError: if the API cannot be reached.
        """
        result, _ = result_from_json(self._api.get_task(task.task_id))
        return self._reader.opened(result, None, task.origin or Origin(()))[0].details

    def read(self, task: TaskRecord, data: bytes, what: str, *, signed: bool) -> Any:
        """See :class:`farcall._future.FutureOwner`.

        :raises ResultRefused, DeserializationError: as :meth:`ResultReader.read_other`.
        """
        origin, what = task.origin or Origin(()), f"{what} of task {task.task_id}"
        return self._reader.read_other(data, origin, what, task_id=task.task_id, signed=signed)

    def unsettled(self) -> list[ComputeFuture[Any]]:
        """The futures that are not done."""
        return self._collector.unsettled()

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a forked child: the engine's threads are in the parent."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Take no more calls, and end when the last future is done. Does nothing in a forked child."""
        if not self.is_inherited:
            self._collector.close()

    def end_after_fork(self) -> None:
        """In a forked child: end the futures that only the parent settles."""
        self._collector.end_after_fork(RuntimeError(f"this future has no result: {OF_PARENT}"))

    def join(self) -> None:
        """Wait until the threads have ended. Only after :meth:`close`."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_TIMEOUT_S)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is sent. False after ``timeout_s`` seconds."""
        return self.sender.wait_until_sent(timeout_s)

    def abandon(self) -> None:
        """End now, without waiting for open futures. Tasks that were sent continue."""
        self._collector.close()
        self.sender.abandon()
        self._abandoned.set()
        if self._output_watch is not None:
            self._output_watch.abandon()
        self._stop()

    def fail_unsettled(self) -> None:
        """Fail every open future, after :meth:`abandon`, so that no later exit handler waits for one."""
        error = Unavailable(
            "The process ended before the task.",
            hint="The task continues; Client.get_result reads its result by its id.",
        )
        self._collector.fail([future.task_id for future in self.unsettled()], error)

    def _open(self, task: TaskRecord, context: SubmitContext) -> ComputeFuture[Any]:
        """A future that waits for the result of a task."""
        future: ComputeFuture[Any] = ComputeFuture(
            task,
            task_group_id=context.task_group_id,
            endpoint_id=context.endpoint_id or "",
            owner=self,
            raise_original=context.raise_original,
        )
        if context.task_group_id not in self._groups:
            self._groups.add(context.task_group_id)
            self._stream.subscribe(context.task_group_id)
        task.origin = context.origin
        self._collector.add(future)
        if context.on_output is not None:
            self._watch_output(future, context.on_output)
        return future

    def _watch_output(self, future: ComputeFuture[Any], report: OnOutput) -> None:
        with self._alive_lock:
            watch, is_new = self._output_watch, self._output_watch is None
            if watch is None:
                watch = self._output_watch = OutputWatch(self._output)
        watch.add(future.task_id, report)
        future.add_done_callback(lambda _: watch.ended(future.task_id))
        if is_new:
            self._threads.append(self._spawn(watch.run, f"{self._label}-output"))

    def _pack(
        self, function: FunctionHandle, args: tuple[Any, ...], kwargs: dict[str, Any], context: SubmitContext
    ) -> PackedCall:
        return pack_call(
            args,
            sorted_kwargs(kwargs) if context.options.memoize else kwargs,
            function_name=function.name,
            serializer=self._serializer,
            reads_binary=lambda: self._compatibility.reads_binary(context.endpoint_id or ""),
            endpoint_id=self.names.find,
            target=context.endpoint_id or "",
        )

    def _send(self, task: OutgoingTask, packed: PackedCall) -> None:
        task.requirements = packed.requirements
        size_bytes = len(packed.payload)
        if size_bytes >= _COUNTED_BYTES:
            # A callback that submits runs in a thread that releases memory: it must not wait for itself.
            self._unsent.acquire(size_bytes, wait=not getattr(_thread, "is_ours", False))
        reserved_bytes = size_bytes if size_bytes >= _COUNTED_BYTES else 0
        if size_bytes > INLINE_BYTES or (task.context.sealed or self._sealer.mode) != "off":
            self._uploads.submit(self._prepare, task, packed.payload, reserved_bytes)
            return
        task.reserved_bytes = reserved_bytes
        task.payload = encode_payload(packed.payload)
        self.sender.send(task)

    def _prepare(self, task: OutgoingTask, payload: bytes, reserved_bytes: int) -> None:
        """Seal and upload, as far as the call needs it, and send."""
        try:
            if not task.cancelled:
                sealed = self._seal(task, payload)
                task.payload = encode_payload(self._upload(sealed) if len(sealed) > INLINE_BYTES else sealed)
                self.sender.send(task)
        except BaseException as error:  # noqa: BLE001 - any error fails the future, which the caller waits for
            if self._abandoned.is_exiting():
                _logger.warning(_NOT_SENT)
            self._collector.fail([task.task_id], error)
        finally:
            if reserved_bytes:
                self._unsent.release(reserved_bytes)

    def _upload(self, payload: bytes) -> BlobRef:
        return self._blobs.upload(payload, retry_timeout_s=self._retry_timeout_s, stop=self._abandoned)

    def _seal(self, task: OutgoingTask, payload: bytes) -> bytes:
        context, endpoint_id = task.context, task.context.endpoint_id or ""
        if (context.sealed or self._sealer.mode) == "off":
            return payload
        # Bound to the functions as the endpoint gets them.
        task.function = self._compatibility.readable(endpoint_id, task.function, context.options)
        callees = [self._compatibility.readable(endpoint_id, each, context.options) for each in context.callees]
        sealed = self._sealer.seal(
            payload,
            mode=context.sealed,
            endpoint_id=endpoint_id,
            function=task.function.key,
            task_id=task.task_id,
            callees=[each.key for each in callees],
            sources=() if task.requirements is None else task.requirements.sources,
        )
        if sealed is not payload and task.origin is not None:
            task.origin = dataclasses.replace(task.origin, sealed=True)
        return sealed

    def _send_after_inputs(self, task: OutgoingTask, pack: Callable[[], PackedCall]) -> None:
        inputs = task.inputs

        def send() -> None:
            task.inputs = ()  # a chain of calls must not keep every earlier result in memory
            if task.cancelled:
                return
            try:
                failure = failure_of(inputs)
                if failure is not None:
                    self._collector.fail([task.task_id], failure)
                else:
                    self._send(task, pack())
            except Exception as error:  # noqa: BLE001 - any error fails the future, which the caller waits for
                self._collector.fail([task.task_id], error)
            except BaseException as error:  # noqa: BLE001 - pickling an argument may raise a SystemExit, for instance
                failed = SerializationError(f"An argument of {task.function.name} cannot be sent: {message_of(error)}")
                failed.__cause__ = error
                self._collector.fail([task.task_id], failed)

        def leave_to_pool() -> None:
            # The thread that settles the last input has other futures to settle, and may not be ours.
            try:
                self._uploads.submit(send)
            except RuntimeError as error:  # the process exits
                self._collector.fail([task.task_id], error)

        when_all_done(inputs, leave_to_pool)

    def _tasks_added(self) -> None:
        self._poller.tasks_added()
        self.delays.tasks_added()

    def _poll_soon(self) -> None:
        self._poller.poll_soon()

    def _stop(self) -> None:
        self.sender.stop()
        self._stream.stop()
        self._poller.stop()
        self.delays.stop()
        if self._output_watch is not None:
            self._output_watch.stop()
        self._uploads.shutdown(wait=False)
        _running.discard(self)

    def _spawn(self, run: Callable[[], None], name: str) -> threading.Thread:
        def run_or_fail() -> None:
            _mark_thread()
            try:
                run()
            except BaseException as error:
                # No thread would settle the futures any more: fail them, and let the exception propagate.
                self._collector.fail_all(error)
                self._unsent.lift()
                raise
            finally:
                with self._alive_lock:
                    self._alive -= 1
                    last = self._alive == 0
                if last:
                    self._on_ended()

        with self._alive_lock:
            self._alive += 1
        thread = threading.Thread(target=run_or_fail, name=name, daemon=True)
        thread.start()
        return thread


def _load_modules() -> None:
    """Import what a first request needs, before there are threads. A child that is forked while a thread imports a
    module could never import it: nothing would release the lock of the module."""
    import certifi  # noqa: F401
    import httpcore  # noqa: F401

    import farcall_common.payload.by_value  # noqa: F401

    "localhost".encode("idna")


def _mark_thread() -> None:
    _thread.is_ours = True


#: Engines of this process. At its exit they send the calls that wait, so that a short script loses none.
_running: weakref.WeakSet[Engine] = weakref.WeakSet()
#: Whether that has happened: later calls would not be sent.
_exiting = False


def _flush_at_exit() -> None:
    global _exiting
    _exiting = True
    for engine in [engine for engine in _running if not engine.is_inherited]:
        if not engine.flush(_FLUSH_AT_EXIT_S):
            _logger.warning(_NOT_SENT)
        engine.abandon()
        engine.join()
        engine.fail_unsettled()


atexit.register(_flush_at_exit)


def _after_fork() -> None:
    for engine in list(_running):
        engine.end_after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)
