"""Runs one task: bytes in, bytes or an error record out. Never raises, whatever user code does."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from farcall_common.errors import ConfigurationError, DeserializationError, ErrorRecord, SerializationError
from farcall_common.payload import Serializer, Strategy, describe_exception, strategy_named
from farcall_common.payload.native import NATIVE, dump_native, is_native, load_call
from farcall_endpoint import outcomes
from farcall_endpoint.worker.capture import Capture
from farcall_endpoint.worker.channel import Done, Order, Run

__all__ = ["Runner"]

_GUARDED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGHUP, signal.SIGPIPE)
_get_handler: Final = _signal.getsignal
"""The function in C: the one around it turns each answer into an enum, which takes longer than a short task."""
_CANNOT_SEND: Final = (SerializationError, ConfigurationError)


class Runner:
    """Keeps the functions it has seen, by hash, and puts right what user code changes about the process."""

    def __init__(self, capture: Capture, *, endpoint_id: str) -> None:
        self._capture = capture
        self._endpoint_id = endpoint_id
        self._serializer = Serializer()
        self._bodies: dict[str, bytes] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._strategies: dict[tuple[str, ...], Sequence[Strategy]] = {}
        self._pid = os.getpid()
        self._home = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._handlers = {int(number): _get_handler(number) for number in _GUARDED_SIGNALS}

    def learn(self, packet: Run, body: bytes | memoryview) -> int:
        """Take in the functions of a packet; where in its body the payloads begin."""
        if packet.forget:
            self._bodies.clear()
            self._functions.clear()
        at = 0
        for function_hash, size in packet.functions:
            self._bodies[function_hash] = bytes(body[at : at + size])
            at += size
        return at

    def run(self, order: Order, payload: bytes | memoryview) -> tuple[Done, bytes]:
        """Run a task. The second half of the answer is its result, or (native only) what it raised, or empty."""
        environ = os.environ
        environ["FARCALL_TASK_ID"] = environ["GC_TASK_UUID"] = order.task_id
        environ["FARCALL_ATTEMPT"] = str(order.attempt)
        try:
            return self._run(order, payload)
        finally:
            if os.getpid() != self._pid:
                os._exit(0)  # the task forked, and this is the child that came back from user code
            self._restore()

    def _run(self, order: Order, payload: bytes | memoryview) -> tuple[Done, bytes]:
        started_at = time.time()
        try:
            function = self._function(order.function_hash)
            args, kwargs = load_call(payload) if is_native(payload) else self._serializer.unpack_call(bytes(payload))
        except BaseException as error:  # noqa: BLE001 - reading user bytes runs user code
            record = error.record if isinstance(error, DeserializationError) else describe_exception(error)
            return self._failed(order, record, started_at, started_at)
        started_at = time.time()
        try:
            value = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - sys.exit and the like end the task, not the worker
            done, _ = self._failed(order, describe_exception(error), started_at, time.time())
            return done, _pickled(error) if order.result_serializers == NATIVE else b""
        ended_at = time.time()
        try:
            result = self._serialized(value, order.result_serializers)
        except BaseException as error:  # noqa: BLE001 - reduce methods are user code
            reason = error.record if isinstance(error, _CANNOT_SEND) else describe_exception(error)
            record = outcomes.result_not_serializable(reason)
            return self._failed(order, record, started_at, ended_at)
        if len(result) > outcomes.MAX_RESULT_BYTES and order.result_serializers != NATIVE:
            return self._failed(order, outcomes.result_too_large(len(result)), started_at, ended_at)
        return Done(order.task_id, started_at, ended_at), result

    def _function(self, function_hash: str) -> Callable[..., Any]:
        function = self._functions.get(function_hash)
        if function is None:
            # The body stays until it could be read: a module that is missing now may be installed later.
            function = self._serializer.unpack_function(self._bodies[function_hash])
            self._functions[function_hash] = function
            del self._bodies[function_hash]
        return function

    def _serialized(self, value: object, names: tuple[str, ...]) -> bytes:
        if names == NATIVE:
            return dump_native(value)
        if names and names not in self._strategies:
            self._strategies[names] = [strategy_named(name) for name in names]
        return self._serializer.serialize(value, strategies=self._strategies.get(names))

    def _failed(self, order: Order, record: ErrorRecord, started_at: float, ended_at: float) -> tuple[Done, bytes]:
        stdout_tail, stderr_tail = self._capture.tails()
        record = dataclasses.replace(
            record,
            stdout_tail=stdout_tail or None,
            stderr_tail=stderr_tail or None,
            attempt=order.attempt,
            endpoint_id=self._endpoint_id,
        )
        return Done(order.task_id, started_at, ended_at, record.to_json()), b""

    def _restore(self) -> None:
        """Undo what a task may have done to the process, so that the next one starts as it did."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            if _get_handler(number) is not handler:
                signal.signal(number, handler)
        try:  # noqa: SIM105 - a context manager would take longer than the call
            os.fchdir(self._home)
        except OSError:  # the directory may have been removed; that is the administrator's affair
            pass
        self._capture.reset()


def _pickled(error: BaseException) -> bytes:
    """The exception itself for whoever can take it; nothing if it cannot travel."""
    error.__traceback__ = None  # its text is in the record
    try:
        return dump_native(error)
    except SerializationError:
        return b""
