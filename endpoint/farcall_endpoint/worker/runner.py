"""Task runner: bytes in, bytes or an error record out. It never raises, whatever user code does."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from farcall_common import running
from farcall_common.coroutines import completed
from farcall_common.errors import (
    ConfigurationError,
    DeserializationError,
    ErrorRecord,
    FarcallError,
    SerializationError,
)
from farcall_common.limits import MAX_PAYLOAD_BYTES
from farcall_common.payload import (
    BINARY_DATA,
    DATA_ONLY,
    DATA_STRATEGIES,
    PORTABLE_DATA,
    PickleOutOfBand,
    Piece,
    Serializer,
    Strategy,
    arrived_classes,
    describe_exception,
    pack_exception,
    strategy_named,
)
from farcall_common.payload.native import NATIVE, dump_native, is_native, load_call
from farcall_common.payload.shipped_modules import FunctionWithModules
from farcall_common.retries import is_retried
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.contracts.manager_worker import Begun, CallOrder, Done, Order, Run
from farcall_endpoint.contracts.output import Printed
from farcall_endpoint.host.shared_memory import Bytes, Frame, FrameList
from farcall_endpoint.worker import mpi
from farcall_endpoint.worker.capture import Capture
from farcall_endpoint.worker.directories import TaskDirectories
from farcall_endpoint.worker.environment import Variables, trace_context
from farcall_endpoint.worker.inbox import Inbox
from farcall_endpoint.worker.inputs import Inputs, Recalled, bound, collected
from farcall_endpoint.worker.settings import WorkerSettings
from farcall_endpoint.worker.usage import Usage
from farcall_endpoint.worker.values import ValueRefused, elements_of, stored, write

if TYPE_CHECKING:
    from farcall_endpoint.worker.files import TaskFiles

_GUARDED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGHUP, signal.SIGPIPE)
_get_handler: Final = _signal.getsignal
"""The function in C: the one around it turns each answer into an enum, which takes longer than a short task."""
_CANNOT_SEND: Final = (SerializationError, ConfigurationError)
_REFERENCES: Final = "farcall_common.objects.references"
"""Loaded when a reference has come to this worker. Workers without one do nothing for them."""
_RETRY: Final = "FARCALL_RETRY"
"""How many runs before this one raised and were retried. Set if the task has retries."""
_BINARY: Final = (PickleOutOfBand().id,)
"""The request of a submitter that reads every strategy, binary ones, too. A submitter without a request may be any
program: it gets portable data."""

_values: Final = Serializer(allowed=DATA_STRATEGIES)
"""Writes and reads values that calls give one another."""


_Ended = tuple[Done, Sequence[Frame]]
"""The end of a task, and its result or (native only) what it raised, or nothing."""


class _Call(msgspec.Struct):
    """A call of a function, as its steps read, run, collect and bound it.

    :param started_at: when the task was started; from the call of the function on, when that began.
    :param is_native: whether the result is plain pickle, of any size.
    """

    function: Callable[..., Any]
    order: Order
    payload: Piece
    inputs: Inputs | None
    started_at: float
    is_native: bool
    files: TaskFiles | None = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    value: Any = None
    ended_at: float = 0.0

    @property
    def is_edge(self) -> bool:
        """Whether the value goes to other calls."""
        return self.order.call is not None and self.order.call.is_edge


class Runner:
    """Runs tasks. It caches functions by hash, and restores the process state that user code changes."""

    def __init__(
        self, capture: Capture, *, endpoint_id: str, settings: WorkerSettings, inbox: Inbox | None = None
    ) -> None:
        self._inbox = inbox
        #: Whether it has run a task of another submitter than the owner.
        self.is_of_other = False
        #: Whether packages of the submitter's home are to be made importable before the first task.
        self.lacks_packages = False
        self._capture = capture
        self._endpoint_id = endpoint_id
        allowed = frozenset(settings.allowed_serializers) or None
        self._serializer = Serializer(data=PORTABLE_DATA, allowed=allowed)
        data = DATA_ONLY if allowed is None else allowed & DATA_STRATEGIES
        self._data_serializer = Serializer(data=PORTABLE_DATA, allowed=data)
        self._data_only = settings.data_only
        self._native = settings.native
        running.seals_memory = bool(settings.block_key)
        self._bodies: dict[str, bytes] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        #: Functions with classes that are sent by value, and the states of these classes that they came with.
        self._with_classes: dict[str, tuple[Callable[..., Any], Sequence[arrived_classes.State]]] = {}
        self._strategies: dict[tuple[str, ...], Sequence[Strategy]] = {_BINARY: BINARY_DATA}
        self._nodes: mpi.Nodes | None = None
        self._variables = Variables()
        self._usage = Usage()
        self._pid = os.getpid()
        self._directories = TaskDirectories(sandboxed=settings.sandboxed)
        self._directory = self._directories.root
        self._sandboxed = settings.sandboxed
        self._handlers = {int(number): _get_handler(number) for number in _GUARDED_SIGNALS}

    def learn(self, packet: Run, body: Bytes | FrameList) -> int:
        """Store the functions of a packet; returns where in its body the payloads begin."""
        if packet.forget:
            self._bodies.clear()
            self._functions.clear()
            self._with_classes.clear()
        at = 0
        for function_hash, size in packet.functions:
            self._bodies[function_hash] = bytes(body[at : at + size])
            at += size
        return at

    def begin(self, order: Order) -> Begun | None:
        """The message that starts the measurement of a task, if it has a memory limit; call it before :meth:`run`."""
        return None if order.options.memory_bytes is None else Begun(order.task_id, *self._usage.begin())

    def run(self, order: Order, payload: Piece, inputs: Inputs | None = None) -> _Ended:
        """Run a task; with ``inputs``, it is a call that gets those."""
        set_variable = self._variables.set
        set_variable("FARCALL_TASK_ID", order.task_id)
        set_variable("GC_TASK_UUID", order.task_id)
        self._variables.set_attempt(order.attempt)
        try:
            directory = self._directory = self._directories.enter(order.task_id, order.submitter)
        except OSError as error:
            self._directories.leave()
            now = time.time()
            return self._failed(order, outcomes.working_directory_unavailable(error), now, now)
        inbox, options = self._inbox, order.options
        if inbox is not None:
            inbox.order = order
        if self._sandboxed:
            set_variable("GC_TASK_SANDBOX_DIR", directory)
        if options.retries:
            set_variable(_RETRY, str(order.retry))
        try:
            run = self._run_on_nodes if options.wants_ranks else self._run
            if order.traceparent:
                with trace_context(order.traceparent, self._variables):
                    ended = run(order, payload, inputs)
            else:
                ended = run(order, payload, inputs)
            if options.memory_bytes is not None or options.max_output_bytes is not None:
                ended = self._within_limits(order, *ended)
        finally:
            if os.getpid() != self._pid:
                os._exit(0)  # the task forked, and this is the child that came back from user code
            if inbox is not None:
                inbox.end_task()
            if options.retries:
                os.environ.pop(_RETRY, None)
            printed = self._restore(keep_bytes=0 if self._native else options.output_bytes)
        if printed is None:
            return ended
        done, result = ended
        return msgspec.structs.replace(done, printed=printed[0]), (*result, printed[1])

    def _run_on_nodes(self, order: Order, payload: Piece, inputs: Inputs | None) -> _Ended:
        """Run a task, with the nodes that it asks for if this endpoint starts ranks on nodes."""
        launcher = os.environ.get(mpi.LAUNCHER)
        if not launcher:
            return self._run(order, payload, inputs)
        try:
            ranks = mpi.Ranks.of(order.options.num_nodes, order.options.ranks_per_node, order.options.num_ranks)
            if self._nodes is None:
                lock_file = mpi.lock_file_of_block(os.environ, Path(self._directories.root))
                self._nodes = mpi.Nodes(mpi.nodes_of_block(os.environ), lock_file)
            with self._nodes.taken(ranks.nodes) as names:
                given = mpi.variables(launcher, ranks, names)
                for name, value in given.items():
                    self._variables.set(name, value)
                try:
                    return self._run(order, payload, inputs)
                finally:
                    for name in given:
                        os.environ.pop(name, None)
        except mpi.RanksImpossible as error:
            record = error.record
        except (OSError, subprocess.SubprocessError) as error:
            record = describe_exception(error)
        now = time.time()
        return self._failed(order, record, now, now)

    def _run(self, order: Order, payload: Piece, inputs: Inputs | None) -> _Ended:
        started_at = time.time()
        if inputs is not None and not order.function_hash:
            return self._call(_listed, order, payload, inputs, started_at)
        try:
            function = self._function(order.function_hash)
        except BaseException as error:  # noqa: BLE001 - reading user bytes runs user code
            return self._unreadable(order, error, started_at)
        # By name: the class is in the text that came with the function.
        if type(function).__name__ != FunctionWithModules.__name__:
            return self._call(function, order, payload, inputs, started_at)
        try:
            called: FunctionWithModules = function  # type: ignore[assignment]
            if self._inbox is not None:
                self._inbox.modules = order, called.farcall_modules
            with called.farcall_modules:  # for arguments and results, too
                return self._call(called.farcall_function, order, payload, inputs, started_at)
        except Recalled:
            raise
        except BaseException as error:  # noqa: BLE001 - it is text of the submitter
            return self._unreadable(order, error, started_at)

    def _call(
        self,
        function: Callable[..., Any],
        order: Order,
        payload: Piece,
        inputs: Inputs | None,
        started_at: float,
    ) -> _Ended:
        is_native = self._native and order.options.result_serializers == NATIVE
        call = _Call(function, order, payload, inputs, started_at, is_native)
        if not order.files_dir:
            return self._read(call) or self._call_function(call) or self._collect(call)
        # Here, because most tasks have no files.
        from farcall_common.file_arguments import without_files
        from farcall_endpoint.worker.files import TaskFiles

        # A list of functions in the endpoint's configuration holds against the cloud, which says whose task this is.
        no_local = self._data_only or (order.data_only and bool(order.submitter))
        with TaskFiles(order, no_local=no_local) as call.files:
            call.payload = without_files(payload)
            return self._read(call) or self._call_function(call) or self._collect(call)

    def _read(self, call: _Call) -> _Ended | None:
        """Read the arguments of a call; the end of the task if that is not possible."""
        try:
            if call.function is _listed:
                pass
            elif self._native and is_native(call.payload):
                call.args, call.kwargs = load_call(call.payload)
            else:
                call.args, call.kwargs = self._reader(call.order).unpack_call(call.payload)
            if call.files is not None:
                call.files.arguments_read()
            if call.inputs is not None and call.inputs.call.inputs:
                _add_inputs(call, call.inputs)
        except Recalled:
            raise
        except BaseException as error:  # noqa: BLE001 - reading user bytes runs user code
            return self._unreadable(call.order, error, call.started_at)
        if _REFERENCES in sys.modules and call.function is not _listed:
            return self._resolve(call)
        return None

    def _resolve(self, call: _Call) -> _Ended | None:
        """Replace references in the arguments by their objects; the end of the task if that is not possible."""
        from farcall_common.objects.references import resolved

        try:
            call.args, call.kwargs = resolved(call.args, call.kwargs)
        except FarcallError as error:
            return self._failed(call.order, error.record, call.started_at, time.time())
        except BaseException as error:  # noqa: BLE001 - reading user bytes runs user code
            return self._unreadable(call.order, error, call.started_at)
        return None

    def _call_function(self, call: _Call) -> _Ended | None:
        """Call the function; the end of the task if it cannot be called, raises, or does not write its files."""
        order, files = call.order, call.files
        if files is not None and (problem := files.check()) is not None:
            return self._failed(order, problem, call.started_at, time.time())
        call.started_at = time.time()
        try:
            value = completed(call.function(*call.args, **call.kwargs))
            if order.call is not None and order.call.spread:
                value = elements_of(value, call.function)
        except BaseException as error:  # noqa: BLE001 - sys.exit and the like end the task, not the worker
            return self._raised(call, error, time.time())
        call.ended_at = time.time()
        call.value = value
        if files is not None:
            files.end_call(paths=call.is_edge)
            if (problem := files.publish()) is not None:
                return self._failed(order, problem, call.started_at, call.ended_at)
        return None

    def _raised(self, call: _Call, error: BaseException, ended_at: float) -> _Ended:
        """The end of a task whose function raised an exception."""
        order = call.order
        if call.files is not None:
            call.files.end_call(paths=call.is_edge)
        record = dataclasses.replace(describe_exception(error), exception_data=self._exception_data(call, error))
        done, _ = self._failed(order, record, call.started_at, ended_at)
        if order.options.retries and is_retried(error, order.options.retry_on):
            done = msgspec.structs.replace(done, is_retried=True)
        return done, (_pickled(error),) if call.is_native else ()

    def _collect(self, call: _Call) -> _Ended:
        """Write the value that the function returned."""
        order = call.order
        given: Done | None = None
        result: Sequence[Frame]
        try:
            if order.call is not None and order.call.is_edge:
                # What is in place must not be referred to any more.
                values, call.value = [call.value], None
                given, result = self._given(values, Done(order.task_id, call.started_at, call.ended_at), order.call)
            else:
                result = self._serialized(call)
        except ValueRefused as error:
            return self._failed(order, error.record, call.started_at, call.ended_at)
        except BaseException as error:  # noqa: BLE001 - reduce methods are user code
            reason = error.record if isinstance(error, _CANNOT_SEND) else describe_exception(error)
            record = outcomes.result_not_serializable(reason)
            return self._failed(order, record, call.started_at, call.ended_at)
        return self._bound(call, given, result)

    def _bound(self, call: _Call, given: Done | None, result: Sequence[Frame]) -> _Ended:
        """The end of a task with a result, unless the result is too large.

        :param given: the end of a call whose value goes to other calls, which had limits of its own.
        """
        details = self._output() if call.order.options.keep_output else None
        if given is not None:
            return given if details is None else msgspec.structs.replace(given, details=details), result
        size = sum(map(len, result))
        if size > MAX_PAYLOAD_BYTES and not call.is_native:
            return self._failed(call.order, outcomes.result_too_large(size), call.started_at, call.ended_at)
        return Done(call.order.task_id, call.started_at, call.ended_at, None, details), result

    def _given(self, values: list[Any], done: Done, call: CallOrder) -> _Ended:
        """The end of a call and its body, for the manager; after the only value in a list, which is empty then, went to
        other workers."""
        everywhere = tuple(range(len(call.deliver)))
        edges = None if self._inbox is None else self._inbox.edges
        if call.spread or edges is None or not (call.deliver or edges.has_buffers):
            result, parts = write(values.pop(), call, _values, self._directory)
            return msgspec.structs.replace(done, parts=parts, undelivered=everywhere), result
        pieces = _values.edge_pieces(values.pop())
        size = sum(map(len, pieces))
        if size > min(call.most_bytes, call.room_bytes):
            result, parts = stored([pieces], call, self._directory)
            return msgspec.structs.replace(done, parts=parts, undelivered=everywhere), result
        value = edges.outgoing(pieces)
        del pieces
        if not isinstance(value, bytes):
            value = edges.arenas.settle(value)
        undelivered = tuple(edges.deliver(value, call.deliver))
        frame, lent = (value, None) if isinstance(value, bytes) else edges.for_manager(value)
        return msgspec.structs.replace(done, parts=(size,), undelivered=undelivered, lent=lent), (frame,)

    def _unreadable(self, order: Order, error: BaseException, started_at: float) -> _Ended:
        if isinstance(error, DeserializationError):
            return self._failed(order, error.record, started_at, started_at)
        reason = describe_exception(error)
        record = DeserializationError(f"Cannot be read here: {reason.message}", hint=reason.hint).record
        return self._failed(order, dataclasses.replace(record, traceback=reason.traceback), started_at, started_at)

    def _within_limits(self, order: Order, done: Done, result: Sequence[Frame]) -> _Ended:
        """The result of a task, unless it exceeded a limit before the manager measured it."""
        record = outcomes.limit_exceeded(
            memory_bytes=0 if order.options.memory_bytes is None else self._usage.peak_bytes(),
            memory_limit_bytes=order.options.memory_bytes,
            output_bytes=0 if order.options.max_output_bytes is None else self._capture.written_bytes(),
            output_limit_bytes=order.options.max_output_bytes,
        )
        if record is None:
            return done, result
        return self._failed(order, record, done.started_at, done.ended_at)

    def not_stored(self, order: Order, done: Done, result: Sequence[Frame], error: OSError) -> Done:
        """The end of a task whose result cannot be sent."""
        record = outcomes.result_not_stored(sum(map(len, result)), error.strerror)
        return self._failed(order, record, done.started_at, done.ended_at)[0]

    def _output(self) -> dict[str, Any]:
        """The output of a task, as the details of its success."""
        tails = zip(("stdout_tail", "stderr_tail"), self._capture.tails(), strict=True)
        return {name: tail for name, tail in tails if tail}

    def _function(self, function_hash: str) -> Callable[..., Any]:
        function = self._functions.get(function_hash)
        if function is not None:
            return function
        if (known := self._with_classes.get(function_hash)) is not None:
            arrived_classes.restore(known[1])
            return known[0]
        # The body stays until it could be read: a module that is missing now may be installed later.
        with arrived_classes.collected() as states:
            function = self._serializer.unpack_function(self._bodies[function_hash])
        if states:
            self._with_classes[function_hash] = function, states
        else:
            self._functions[function_hash] = function
        del self._bodies[function_hash]
        return function

    def _reader(self, order: Order) -> Serializer:
        """What reads the arguments of a task."""
        if order.call is not None and order.call.is_nested:
            return _values
        return self._data_serializer if self._data_only or order.data_only else self._serializer

    def _serialized(self, call: _Call) -> Sequence[Piece]:
        if call.is_native:
            return (dump_native(call.value),)
        return self._serializer.pieces(call.value, strategies=self._chosen(call.order.options.result_serializers))

    def _chosen(self, names: tuple[str, ...]) -> Sequence[Strategy] | None:
        """Return the strategies that a submitter asks for; None if it asks for none."""
        if names and names not in self._strategies:
            self._strategies[names] = [strategy_named(name) for name in names]
        return self._strategies.get(names)

    def _exception_data(self, call: _Call, error: BaseException) -> str | None:
        """Serialize an exception as its submitter wants results; None if it asks for no serializer of Farcall. A call
        whose value goes to other calls sends them the exception, too."""
        names = call.order.options.result_serializers
        if not names and call.is_edge:
            names = _BINARY
        if not names or call.is_native:
            return None
        if names == _BINARY:
            return pack_exception(error)
        try:
            return pack_exception(error, self._chosen(names) or ())
        except ConfigurationError:  # a name that is no strategy
            return None

    def _failed(self, order: Order, record: ErrorRecord, started_at: float, ended_at: float) -> _Ended:
        stdout_tail, stderr_tail = self._capture.tails()
        record = dataclasses.replace(
            record,
            stdout_tail=stdout_tail or None,
            stderr_tail=stderr_tail or None,
            attempt=order.attempt,
            endpoint_id=self._endpoint_id,
        )
        return Done(order.task_id, started_at, ended_at, record.to_json()), ()

    def _restore(self, *, keep_bytes: int) -> tuple[Printed, bytes] | None:
        """Restore the process state for the next task; returns the end of what this one printed, if any."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            if _get_handler(number) is not handler:
                signal.signal(number, handler)
        self._directories.leave()
        arrived_classes.sent.clear()
        return self._capture.reset(keep_bytes=keep_bytes)


def _add_inputs(call: _Call, inputs: Inputs) -> None:
    """Put the values of other calls into the arguments."""
    values = inputs.read(_values.deserialize)
    if call.function is _listed:
        call.args = collected(values)
    else:
        call.args, call.kwargs = bound(call.args, call.kwargs, inputs.call.inputs, values)


def _listed(*values: Any) -> list[Any]:
    """In place of a function, for an order that collects its inputs."""
    return list(values)


def _pickled(error: BaseException) -> bytes:
    """The exception itself for callers that can read it; nothing if it cannot travel."""
    BaseException.with_traceback(error, None)  # its text is in the record
    try:
        return dump_native(error)
    except BaseException:  # noqa: BLE001 - reduce methods are user code
        return b""
