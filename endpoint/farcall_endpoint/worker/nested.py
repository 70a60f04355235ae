"""Nested calls: calls of a running task, which go through its manager.

A thread reads the manager's packets from the first call of a task to its end: it settles futures, keeps orders of other
tasks for later, and answers a Sync at once. The manager hears when the task waits, so that others can use its slot:
while a thread of it blocks for a call, or while calls have callbacks (with asyncio, nothing shows whether the event
loop has something else to do).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

from farcall_common import running
from farcall_common.errors import (
    ConfigurationError,
    ErrorRecord,
    TaskCancelled,
    TaskError,
    TaskFailed,
    TaskLost,
    error_from_record,
)
from farcall_common.futures import GuardedFuture
from farcall_common.payload import BINARY_DATA, DATA_STRATEGIES, Serializer, load_user_data, task_error
from farcall_common.payload.functions import Function, FunctionTable, Included
from farcall_common.payload.native import is_native, load_native
from farcall_common.payload.shipped_modules import ShippedModules
from farcall_common.running import MOST_CALLS, Arguments
from farcall_common.task_options import TaskOptions
from farcall_endpoint.contracts.manager_worker import (
    INLINE_BYTES,
    BlocksAnswer,
    BlocksRequest,
    Call,
    CallEnded,
    Calls,
    Channel,
    DropCalls,
    Order,
    Packet,
    Sync,
    ValkeyAnswer,
    ValkeyRequest,
    Waits,
)
from farcall_endpoint.host.shared_memory import Bytes, Frame, FrameList, MemoryFile, SharedBytes

T = TypeVar("T")

_PACKET_BYTES: Final = 32 * 1024

_values: Final = Serializer(allowed=DATA_STRATEGIES)


class OtherPackets(Protocol):
    """What takes the packets that are not about calls."""

    failure: BaseException | None
    """Why no more of them come."""

    def keep(self, packet: Packet, body: Bytes | FrameList) -> None:
        """Keep a packet until the task has ended."""

    def sync(self) -> None:
        """Answer a Sync."""

    def buffer(self, size: int) -> memoryview:
        """Return memory for a value."""


class Sent:
    """State for the lifetime of a worker: the functions that its manager has, and the last number of a call."""

    def __init__(self) -> None:
        self._tables: dict[str, FunctionTable] = {}
        self.hashes: set[str] = set()
        self.numbers = itertools.count(1)

    def functions(self, modules: ShippedModules | None) -> FunctionTable:
        """Return the table of functions that tasks call with these modules. The modules are sent with each function."""
        digest = "" if modules is None else modules.digest
        if digest not in self._tables:
            self._tables[digest] = FunctionTable(None if modules is None else _included(modules))
        return self._tables[digest]


class CallFuture(GuardedFuture[T]):
    """The future of a call."""

    def __init__(self, calls: CallsOfTask, number: int) -> None:
        super().__init__()
        self._calls = calls
        self.number = number
        self._has_callbacks = False
        self._waiters = _Waiters(calls)  # of concurrent.futures.wait and as_completed

    def result(self, timeout: float | None = None) -> T:
        """The value of the call; see :meth:`farcall_common.running.RunningTask.submit`.

        :param timeout: seconds to wait for it.
        :raises TimeoutError: when time is up.
        :raises CancelledError: if it was cancelled, or has not ended with the task.
        :raises TaskError: that the call ended with.
        """
        with self._waiting():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of the call, None if it has a value; raises as :meth:`result` does."""
        with self._waiting():
            return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        with self._condition:
            if not self._has_callbacks and not self.done():
                self._has_callbacks = True
                self._calls.begin_wait()
        super().add_done_callback(fn)

    def cancel(self) -> bool:
        """Cancel the call, also when it runs. False if it has ended."""
        with self._condition:
            if self.cancelled():
                return True
            if not super().cancel():
                return False
            self.set_running_or_notify_cancel()  # wakes those who wait for several futures
        self._calls.drop(self.number)
        self._settled()
        return True

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        """End it; nothing if it was cancelled."""
        try:
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)
        except concurrent.futures.InvalidStateError:
            return
        self._settled()

    def _settled(self) -> None:
        with self._condition:
            had_callbacks, self._has_callbacks = self._has_callbacks, False
        if had_callbacks:
            self._calls.end_wait()

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.done() else self._calls.waiting()


class _Waiters(list[Any]):
    """The waiters of a future, whose events tell when a thread blocks."""

    def __init__(self, calls: CallsOfTask) -> None:
        super().__init__()
        self._calls = calls

    def append(self, waiter: Any) -> None:
        if not isinstance(waiter.event, _WatchedEvent):
            waiter.event = _WatchedEvent(self._calls)
        super().append(waiter)


class _WatchedEvent(threading.Event):
    def __init__(self, calls: CallsOfTask) -> None:
        super().__init__()
        self._calls = calls

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_set():
            return True
        with self._calls.waiting():
            return super().wait(timeout)


class CallsOfTask:
    """The calls of a task. Its methods may be called from any thread of the task."""

    def __init__(
        self, channel: Channel, order: Order, sent: Sent, others: OtherPackets, modules: ShippedModules | None
    ) -> None:
        self.task_id = order.task_id
        self.attempt = order.attempt
        self.order = order
        self._others = others
        self._channel = channel
        self._sent = sent
        self._functions = sent.functions(modules)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._open: dict[int, CallFuture[Any]] = {}
        self._requests: dict[int, concurrent.futures.Future[Any]] = {}
        self._waits = 0
        self._ended = False
        self._lost = False
        self._stop = -1
        self._thread: threading.Thread | None = None

    # -- threads of the task -------------------------------------------------------------------------------------------

    def submit(
        self, function: Callable[..., Any] | str, calls: Sequence[Arguments], options: TaskOptions | None
    ) -> list[CallFuture[Any]]:
        """See :meth:`farcall_common.running.RunningTask.submit`."""
        self._check()
        named = self._callee(function) if isinstance(function, str) else self._functions.get(function)
        with _calling():
            payloads = [_shared(_values.pack_call(args, kwargs, strategies=BINARY_DATA)) for args, kwargs in calls]
        futures: list[CallFuture[Any]] = []
        while len(futures) < len(payloads):
            futures += self._send(named, payloads[len(futures) :], options)
        return futures

    def buffer(self, size: int) -> memoryview:
        """See :meth:`farcall_common.running.RunningTask.buffer`."""
        with self._changed:
            self._check()
            return self._others.buffer(size)

    def valkey_url(self) -> str:
        """See :meth:`farcall_common.running.RunningTask.valkey_url`."""
        url: str = self._request(lambda number: ValkeyRequest(self.task_id, number))
        return url

    def blocks(
        self, node: str = "", parts: tuple[tuple[str, int, int], ...] = (), below: str = ""
    ) -> tuple[str, Bytes | FrameList]:
        """The address and the body of an answer, see
        :class:`~farcall_endpoint.contracts.manager_worker.BlocksRequest`."""
        answer: tuple[str, Bytes | FrameList] = self._request(
            lambda number: BlocksRequest(self.task_id, number, node, parts, below)
        )
        return answer

    def _request(self, packet: Callable[[int], ValkeyRequest | BlocksRequest]) -> Any:
        """Ask the manager for something, and wait for the answer.

        :param packet: returns the request with a number.
        """
        if threading.current_thread() is self._thread:
            raise ConfigurationError("A callback of a call asks its manager for something.", hint="Ask for it before.")
        request: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._changed:
            self._check()
            if self._thread is None:
                self._start()
            number = next(self._sent.numbers)
            self._requests[number] = request
            try:
                self._channel.send(packet(number))
            except OSError as error:
                del self._requests[number]
                raise self._loss() from error
        return request.result()

    def drop(self, number: int) -> None:
        """Tell the manager that a call is not needed."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._open.pop(number, None) is None or self._ended:
                return
            self._changed.notify_all()
            with contextlib.suppress(OSError):  # the manager is gone
                self._channel.send(DropCalls(self.task_id, (number,)))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While a thread blocks until a call has ended."""
        if threading.current_thread() is self._thread:
            raise ConfigurationError("A callback of a call, or code that reads its value, waits for another call.")
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    def begin_wait(self) -> None:
        """Something of the task waits.

        :raises ConfigurationError: in another process, which has the futures but not what settles them.
        """
        if os.getpid() != self._pid:
            raise running.not_in_this_process()
        with self._changed:
            self._waits += 1
            if self._waits == 1:
                self._notify_manager(over=False)

    def end_wait(self) -> None:
        """It waits no longer."""
        with self._changed:
            self._waits -= 1
            if self._waits == 0:
                self._notify_manager(over=True)

    def end(self) -> None:
        """The task has ended; its futures that are open are cancelled."""
        with self._changed:
            self._ended = True
            left = list(self._open.values())
            requests, self._requests = self._requests, {}
            self._changed.notify_all()
        for request in requests.values():
            request.set_exception(running.has_ended())
        if self._thread is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            os.close(self._stop)
        for future in left:
            future.cancel()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise running.not_in_this_process()
        if self._ended:
            raise running.has_ended()
        if self._lost:
            raise self._loss()

    def _callee(self, name: str) -> Function:
        for callee in self.order.options.callees:
            if callee.function_hash and name in (callee.function_id, callee.function_hash):
                return Function(name, b"", callee.function_hash)
        raise ConfigurationError(
            f"The task was not submitted with a function {name!r} among its callees.",
            hint="Name it in the option callees when you submit the task, or pass the function itself.",
        )

    def _send(
        self, function: Function, payloads: Sequence[Frame], options: TaskOptions | None
    ) -> list[CallFuture[Any]]:
        """Send as many of these calls as there is room for, at least one."""
        with self._changed:
            if len(self._open) >= MOST_CALLS and threading.current_thread() is not self._thread:
                with self.waiting():  # the lock may be taken twice by a thread
                    self._changed.wait_for(lambda: len(self._open) < MOST_CALLS or self._ended or self._lost)
            self._check()
            if self._thread is None:
                self._start()
            count, size = 0, 0
            while count < len(payloads) and (count == 0 or size + len(payloads[count]) <= _PACKET_BYTES):
                size += len(payloads[count])
                count += 1
            count = min(count, max(1, MOST_CALLS - len(self._open)))
            futures = [CallFuture[Any](self, next(self._sent.numbers)) for _ in range(count)]
            is_new = bool(function.body) and function.hash not in self._sent.hashes
            packet = Calls(
                self.task_id,
                tuple(
                    [
                        Call(future.number, function.hash, len(payload), function.name, options)
                        for future, payload in zip(futures, payloads, strict=False)
                    ]
                ),
                ((function.hash, len(function.body)),) if is_new else (),
            )
            self._open.update((future.number, future) for future in futures)
            try:
                self._channel.send(packet, [function.body, *payloads[:count]] if is_new else payloads[:count])
            except OSError as error:
                for future in futures:
                    del self._open[future.number]
                if isinstance(error, ConnectionError):
                    raise self._loss() from error
                raise
            if is_new:
                self._sent.hashes.add(function.hash)
            return futures

    def _notify_manager(self, *, over: bool) -> None:
        if not (self._ended or self._lost):
            with contextlib.suppress(OSError):  # the manager is gone
                self._channel.send(Waits(self.task_id, over))

    # -- the thread that receives --------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        thread = threading.Thread(target=self._receive, name="farcall-calls", daemon=True)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
        try:
            thread.start()
        except BaseException:
            os.close(self._stop)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._thread = thread

    def _receive(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        try:
            while self._stop not in {descriptor for descriptor, _ in poll.poll()}:
                received = self._channel.receive()
                if received is None:
                    return
                packet, body = received
                if isinstance(packet, CallEnded):
                    self._settle(packet, body[:])
                elif isinstance(packet, ValkeyAnswer):
                    self._answered(packet, packet.url)
                elif isinstance(packet, BlocksAnswer):
                    self._answered(packet, (packet.address, body))
                elif isinstance(packet, Sync):
                    self._others.sync()
                else:
                    self._others.keep(packet, body)
                del received, packet, body  # free their memory
        except ConnectionError:  # the manager is gone, to which it has answered
            return
        except BaseException as error:  # noqa: BLE001 - the worker raises it after the task
            self._others.failure = error
        finally:
            if not self._ended:
                self._lose()

    def _answered(self, packet: ValkeyAnswer | BlocksAnswer, answer: Any) -> None:
        with self._changed:
            request = self._requests.pop(packet.number, None)
        if request is None:  # of a task that has ended
            return
        if packet.error is None:
            request.set_result(answer)
        else:
            request.set_exception(error_from_record(ErrorRecord.from_json(packet.error)))

    def _settle(self, packet: CallEnded, body: Bytes) -> None:
        with self._changed:
            future = self._open.pop(packet.number, None)
            self._changed.notify_all()
        if future is None:  # dropped, or of a task that has ended
            return
        if packet.error is not None:
            future.settle(None, _error_of(ErrorRecord.from_json(packet.error), body))
            return
        try:
            value = load_user_data(lambda: _values.deserialize(body))
        except BaseException as error:  # noqa: BLE001 - it runs code of the value
            future.settle(None, error.with_traceback(None))
        else:
            future.settle(value)

    def _lose(self) -> None:
        """Fail what is open: the manager is gone, or this thread has a defect."""
        with self._changed:
            self._lost = True
            left = list(self._open.values())
            self._open.clear()
            requests, self._requests = self._requests, {}
            self._changed.notify_all()
        for request in requests.values():
            request.set_exception(self._loss())
        for future in left:
            future.settle(None, self._loss())

    def _loss(self) -> TaskLost:
        """The error of calls whose ends cannot be received."""
        if (failure := self._others.failure) is None:
            return TaskLost("The worker has lost its manager.")
        return TaskLost(f"The worker cannot receive what its manager sends: {failure}")


def _included(modules: ShippedModules) -> Included:
    own = {
        name: source for name, source in modules.sources.items() if name != "farcall"
    }  # which is in place of the SDK
    return Included(own, modules.digest)


def _calling() -> contextlib.AbstractContextManager[None]:
    """While arguments of calls are written. Most processes have no files."""
    files = sys.modules.get("farcall_common.file_arguments")
    return contextlib.nullcontext() if files is None else files.calling()


def _shared(payload: bytes) -> Frame:
    if len(payload) <= INLINE_BYTES:
        return payload
    return SharedBytes(MemoryFile.of([payload]), 0, len(payload))


def _error_of(record: ErrorRecord, body: Bytes) -> BaseException:
    """The error that a call ended with, as a task's: ``body`` is what its function raised, if it is an engine's."""
    expected: type[TaskError] = {TaskCancelled.code: TaskCancelled, TaskLost.code: TaskLost}.get(
        record.code, TaskFailed
    )
    load: Callable[[], Any] | None = None
    data = record.exception_data
    if body and is_native(body):
        load = lambda: load_native(body)  # noqa: E731
    elif data is not None:
        load = lambda: _values.deserialize(data.encode())  # noqa: E731
    return task_error(record, expected=expected, load_original=load)
