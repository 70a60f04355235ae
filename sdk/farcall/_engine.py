"""Executor engine: submits calls in batches, and keeps the threads and the table of open futures."""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import os
import queue
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from farcall._api import INLINE_BYTES, Api, Blobs
from farcall._batch import MAX_BYTES, Prepared, Terms, check_answer, encode_payload, encode_submit, size_bytes
from farcall._compatibility import Judge
from farcall._functions import FunctionHandle, FunctionTable, Needs, in_order, needs_of, pack_call
from farcall._future import ComputeFuture, failure_of, inputs_of, resolved, when_all_done
from farcall._pacing import Burst
from farcall._results import Collector, Poller, ResultReader
from farcall._stream import Stream
from farcall._task_info import Why
from farcall._tracing import trace_call
from farcall_common.errors import (
    ConfigurationError,
    EndpointIncompatible,
    EndpointUnknown,
    FarcallError,
    ProtocolError,
    SerializationError,
    TaskUnknown,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from farcall_common.payload import Serializer
from farcall_common.payload.hints import message_of
from farcall_common.wire import new_task_id


class Budget:
    """So many bytes. One taker is always let in, however much it takes: then nobody waits for ever."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._lifted = False
        self._given_back = threading.Condition()

    def take(self, size_bytes: int, *, wait: bool = True) -> None:
        """Take bytes, waiting until there is room (unless told not to)."""
        with self._given_back:
            if wait:
                self._given_back.wait_for(
                    lambda: (
                        self._lifted or self._taken_bytes == 0 or self._taken_bytes + size_bytes <= self._limit_bytes
                    )
                )
            self._taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Make room."""
        with self._given_back:
            self._taken_bytes -= size_bytes
            self._given_back.notify_all()

    def lift(self) -> None:
        """Let everyone in from now on: what made room is gone."""
        with self._given_back:
            self._lifted = True
            self._given_back.notify_all()


_logger = logging.getLogger(__name__)

#: Cancelling is a courtesy: it is not tried for as long as a submit is.
_CANCEL_PATIENCE_S: Final = 10.0
_IDS_PER_CANCEL: Final = 500
#: Errors of the whole request. Any other may be the fault of one task, whose neighbours must not suffer for it.
_SHARED: Final = (Unauthenticated, EndpointUnknown, ConfigurationError, ProtocolError, Unsupported)


class Call:
    """One task to be sent. ``payload`` is JSON, ``needs`` are those of the bytes in it; ``reserved_bytes`` is the
    memory that it counts for until it left."""

    __slots__ = ("function", "future", "needs", "payload", "reserved_bytes", "terms")

    def __init__(
        self,
        future: ComputeFuture[Any],
        function: FunctionHandle,
        payload: bytes,
        terms: Terms,
        needs: Needs | None,
        reserved_bytes: int = 0,
    ) -> None:
        self.needs: Needs | None = needs
        self.future: ComputeFuture[Any] = future
        self.function: FunctionHandle = function
        self.payload: bytes = payload
        self.terms: Terms = terms
        self.reserved_bytes: int = reserved_bytes


class Sender:
    """Sends calls in batches, and cancellations behind them.

    The first call goes out at once. While a request is under way others collect, and go out together with the next:
    the batch size follows the load, and nobody waits for a timer. Calls of equal terms travel together.

    :param judge: knows which calls an endpoint could not read.
    :param batch_size: how many calls at most go into one request.
    :param burst: the pace of submits.
    :param patience_s: how long a submit is repeated while the API cannot be reached, in seconds.
    :param on_accepted: called when the API has taken a batch.
    :param on_gap: called when tasks have ended that nobody will tell of: somebody should ask the API for them.
    :param on_left: called with the bytes that calls had reserved, when they are off our hands.
    """

    def __init__(
        self,
        api: Api,
        collector: Collector,
        *,
        judge: Judge,
        batch_size: int,
        burst: Burst,
        patience_s: float,
        on_accepted: Callable[[], None],
        on_gap: Callable[[], None],
        on_left: Callable[[int], None],
    ) -> None:
        self._api = api
        self._collector = collector
        self._judge = judge
        self.batch_size = batch_size
        self.burst: Burst = burst
        #: How many calls the API has taken.
        self.accepted: int = 0
        self._patience_s = patience_s
        self._on_accepted = on_accepted
        self._on_gap = on_gap
        self._on_left = on_left
        self._queue: queue.SimpleQueue[Call | ComputeFuture[Any] | None] = queue.SimpleQueue()
        self._calls: deque[Call] = deque()
        self._cancelled: list[str] = []
        self._stop = threading.Event()
        self._idle = threading.Condition()

    def pace(self, *, limit: int | None, window_s: float) -> None:
        """Change the pace of submits (see :class:`Burst`)."""
        self.burst = Burst(limit, window_s)

    def send(self, call: Call) -> None:
        """Send a call soon."""
        self._queue.put(call)

    def cancel(self, future: ComputeFuture[Any]) -> None:
        """Tell the cloud that nobody waits for this task any more, if it may have heard of it."""
        if future._sent:
            self._queue.put(future)

    def stop(self) -> None:
        """Let :meth:`run` return when everything before has been sent."""
        self._queue.put(None)

    def abandon(self) -> None:
        """Give up what is being tried."""
        self._stop.set()

    def wait_until_sent(self, timeout_s: float) -> bool:
        """Wait until no call waits to be sent. False if that did not happen in time."""

        def all_sent() -> bool:
            return all(future._accepted_at is not None for future in self._collector.unsettled())

        with self._idle:
            return self._idle.wait_for(all_sent, timeout_s)

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
        """Take what is waiting; wait if there is nothing. False when there will be nothing any more."""
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
            if isinstance(item, Call):
                self._calls.append(item)
            else:
                self._cancelled.append(item.task_id)
        return True

    def _send_batch(self) -> None:
        batch: list[Call] = []
        others: list[Call] = []
        terms = self._calls[0].terms
        room, reserved_bytes = MAX_BYTES, 0
        while self._calls and len(batch) < self.batch_size:
            call = self._calls[0]
            if call.terms is not terms and call.terms != terms:
                others.append(self._calls.popleft())
                continue
            room -= size_bytes(call.payload)
            if batch and room < 0:
                break
            self._calls.popleft()
            reserved_bytes += call.reserved_bytes
            call.future._sent = True  # first this, then the look: cancel() does it the other way round
            if not call.future.cancelled():
                batch.append(call)
        self._calls.extendleft(reversed(others))
        batch = self._registered(self._readable(batch))
        if batch:
            self._submit(batch)
        if reserved_bytes:
            self._on_left(reserved_bytes)

    def _readable(self, batch: Sequence[Call]) -> list[Call]:
        """Give each function the form that the endpoint reads. Calls that it could not read or run fail."""
        readable: list[Call] = []
        for call in batch:
            if call.needs is None and call.function.needs is None:
                readable.append(call)
                continue
            endpoint_id = call.terms.endpoint_id or ""
            try:
                call.function = self._judge.readable(endpoint_id, call.function)
                self._judge.check(endpoint_id, call.needs, what=f"an argument of {call.function.name}")
            except EndpointIncompatible as error:
                self._fail([call], error)
            except BaseException as error:  # noqa: BLE001 - writing a function in another way runs code of its user
                self._fail([call], SerializationError(f"{call.function.name} cannot be written: {message_of(error)}"))
            else:
                readable.append(call)
        return readable

    def _registered(self, batch: Sequence[Call]) -> list[Call]:
        """Register the functions that are new. Calls of one that cannot be registered fail."""
        refused: set[FunctionHandle] = set()
        for handle in dict.fromkeys(call.function for call in batch):
            if handle.function_id is None:
                try:
                    handle.function_id = self._api.register_function(
                        handle.registration(), patience_s=self._patience_s, stop=self._stop
                    )
                    handle.body = None
                except FarcallError as error:
                    refused.add(handle)
                    self._fail([call for call in batch if call.function is handle], error)
        return [call for call in batch if call.function not in refused]

    def _submit(self, batch: Sequence[Call]) -> None:
        tasks = [
            Prepared(call.future.task_id, call.function.function_id, call.payload, call.future._traceparent)
            for call in batch
            if call.function.function_id is not None
        ]
        terms = batch[0].terms
        assert terms.endpoint_id is not None
        options = self._judge.asking(terms.endpoint_id, terms.options)
        body, ids = encode_submit(tasks, task_group_id=terms.task_group_id, options=options)
        self._stop.wait(self.burst.take(now=time.monotonic()))
        try:
            answer = self._api.submit(terms.endpoint_id, body, patience_s=self._patience_s, stop=self._stop)
            check_answer(answer, ids)
        except FarcallError as error:
            if len(batch) == 1 or error.record.retryable or isinstance(error, _SHARED):
                self._fail(batch, error)
                return
            _logger.debug("a submit of %d tasks was refused (%s): trying its parts", len(batch), error)
            for part in _parts(batch):
                self._submit(part)
            return
        now, now_mono = time.time(), time.monotonic()
        self.accepted += len(batch)
        for call in batch:
            call.future._accepted_at, call.future._accepted_mono = now, now_mono
        self._collector.take_polled(answer.get("results", {}).values())  # those that were remembered
        if answer.get("results_left_out"):
            self._on_gap()
        self._on_accepted()

    def _fail(self, calls: Sequence[Call], error: FarcallError) -> None:
        self._collector.fail([call.future.task_id for call in calls], error)

    def _send_cancellations(self) -> None:
        task_ids, self._cancelled = self._cancelled, []
        for start in range(0, len(task_ids), _IDS_PER_CANCEL):
            try:
                self._api.cancel(
                    task_ids[start : start + _IDS_PER_CANCEL], patience_s=_CANCEL_PATIENCE_S, stop=self._stop
                )
            except TaskUnknown:
                pass  # the submit that would have made it known did not get through
            except FarcallError as error:
                _logger.warning("cancelling %d tasks did not get through: %s", len(task_ids), error)


def _parts(batch: Sequence[Call]) -> list[list[Call]]:
    """A refused batch in smaller ones: by function, and if there is only one, in halves."""
    by_function: dict[FunctionHandle, list[Call]] = {}
    for call in batch:
        by_function.setdefault(call.function, []).append(call)
    if len(by_function) > 1:
        return list(by_function.values())
    middle = len(batch) // 2
    return [list(batch[:middle]), list(batch[middle:])]


_logger = logging.getLogger(__name__)

_PARALLEL_UPLOADS: Final = 4
#: Payloads that wait to be sent may take this much memory; whoever submits more waits.
_UNSENT_BYTES: Final = 256 * 1024 * 1024
_COUNTED_BYTES: Final = 4 * 1024
_JOIN_TIMEOUT_S: Final = 15.0

_thread: Final = threading.local()


def _mark_thread() -> None:
    _thread.is_ours = True


class Engine:
    """Turns calls into futures, sends them, and waits for their ends.

    It lives as long as a future is open, also when its executor is forgotten.

    :param task_group_id: the group whose ends are listened for from the start; others are when they are used.
    :param on_ended: called when the last thread has ended.
    """

    def __init__(
        self,
        api: Api,
        blobs: Blobs,
        judge: Judge,
        *,
        task_group_id: str,
        batch_size: int,
        patience_s: float,
        label: str,
        serializer: Serializer,
        burst: Burst,
        on_ended: Callable[[], None],
    ) -> None:
        self.serializer = serializer
        self._groups = {task_group_id}
        self._references: dict[str, str] = {}
        self._api = api
        self._blobs = blobs
        self._judge = judge
        self._pid = os.getpid()
        self._unsent = Budget(_UNSENT_BYTES)
        self._collector = Collector(ResultReader(api, blobs), on_finished=self._stop)
        self._stream = Stream(api, self._collector, task_group_id=task_group_id, on_gap=self._hurry)
        self._poller = Poller(
            api,
            self._collector,
            stream_is_open=self._stream.is_open,
            patience_s=patience_s,
        )
        self.sender: Sender = Sender(
            api,
            self._collector,
            judge=judge,
            batch_size=batch_size,
            burst=burst,
            patience_s=patience_s,
            on_accepted=self._poller.expect,
            on_gap=self._hurry,
            on_left=self._unsent.give_back,
        )
        self._uploads = ThreadPoolExecutor(
            _PARALLEL_UPLOADS, thread_name_prefix=f"{label}-upload", initializer=_mark_thread
        )
        self._on_ended = on_ended
        parts = (("sender", self.sender.run), ("stream", self._stream.run), ("poller", self._poller.run))
        self._alive = len(parts)
        self._alive_lock = threading.Lock()
        self._threads = [self._spawn(run, f"{label}-{name}") for name, run in parts]
        _running.add(self)

    @property
    def serializer(self) -> Serializer:
        """What turns functions and arguments into bytes."""
        return self._serializer

    @serializer.setter
    def serializer(self, value: Serializer) -> None:
        self._serializer = value
        self.functions: FunctionTable = FunctionTable(value)

    def registered(self, function_id: str | uuid.UUID) -> FunctionHandle:
        """The handle of a registered function, by id, ``<id>@<version>`` or alias.

        :raises FunctionUnknown: if there is no such alias.
        """
        name = str(function_id)
        if name not in self._references:
            self._references[name] = self._api.reference_of(function_id)
        return self.functions.registered(self._references[name])

    def submit(
        self, handle: FunctionHandle, args: tuple[Any, ...], kwargs: dict[str, Any], *, terms: Terms
    ) -> ComputeFuture[Any]:
        """The future of a call, which is sent soon: when the futures among its arguments are done.

        :raises SerializationError, PayloadTooLarge: if the arguments cannot be sent.
        :raises RuntimeError: after :meth:`close`, and in a process forked after the engine was started.
        :raises BrokenExecutor: if a thread died of an error of ours.
        """
        if _exiting:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        if os.getpid() != self._pid:
            raise RuntimeError("this Executor belongs to the parent process; make one after the fork")
        inputs = inputs_of(args, kwargs)
        # What cannot be sent is refused before there is a future of it.
        payload = b"" if inputs else self._pack(handle, args, kwargs, terms)
        future: ComputeFuture[Any] = ComputeFuture(
            new_task_id(),
            task_group_id=terms.task_group_id,
            endpoint_id=terms.endpoint_id or "",
            on_cancel=self._cancelled,
            ask_why=self._why,
            raise_original=terms.raise_original,
            inputs=inputs,
        )
        self._listen(terms.task_group_id)
        self._collector.add(future)
        try:
            trace_call(future, handle.name)
            if inputs:
                self._send_when_done(inputs, future, handle, args, kwargs, terms)
            else:
                self._send(future, handle, payload, terms)
        except BaseException as error:  # Ctrl-C for instance, while this waits for room: it will never be sent
            self._collector.fail([future.task_id], error)
            raise
        return future

    def _pack(self, handle: FunctionHandle, args: tuple[Any, ...], kwargs: dict[str, Any], terms: Terms) -> bytes:
        if terms.options.memoize:
            kwargs = in_order(kwargs)
        return pack_call(
            args,
            kwargs,
            function_name=handle.name,
            serializer=self._serializer,
            reads_binary=lambda: self._judge.reads_binary(terms.endpoint_id or ""),
        )

    def _send(self, future: ComputeFuture[Any], handle: FunctionHandle, payload: bytes, terms: Terms) -> None:
        reserved_bytes = len(payload) if len(payload) >= _COUNTED_BYTES else 0
        if reserved_bytes:
            # A callback that submits runs in a thread that makes room: it must not wait for itself.
            self._unsent.take(reserved_bytes, wait=not getattr(_thread, "is_ours", False))
        if len(payload) <= INLINE_BYTES:
            self.sender.send(Call(future, handle, encode_payload(payload), terms, needs_of(payload), reserved_bytes))
        else:
            self._uploads.submit(self._upload, future, handle, payload, terms)

    def _send_when_done(
        self,
        inputs: Sequence[concurrent.futures.Future[Any]],
        future: ComputeFuture[Any],
        handle: FunctionHandle,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        terms: Terms,
    ) -> None:
        def go_on() -> None:
            future._inputs = ()  # a chain of calls must not keep every result alive that it ever had
            if future.done():
                return  # it was cancelled meanwhile
            try:
                failure = failure_of(inputs)
                if failure is not None:
                    self._collector.fail([future.task_id], failure)
                else:
                    self._send(future, handle, self._pack(handle, *resolved(args, kwargs), terms), terms)
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller waits for this future
                self._collector.fail([future.task_id], error)
            except BaseException as error:  # noqa: BLE001 - pickling an argument may raise what would end the caller
                failed = SerializationError(f"An argument of {handle.name} cannot be sent: {message_of(error)}")
                failed.__cause__ = error
                self._collector.fail([future.task_id], failed)

        def leave() -> None:
            # The thread that learns of the last result has others to settle, and is perhaps not ours.
            try:
                self._uploads.submit(go_on)
            except RuntimeError as error:  # the process ends
                self._collector.fail([future.task_id], error)

        when_all_done(inputs, leave)

    def adopt(self, task_ids: Sequence[str], *, task_group_id: str, raise_original: bool) -> list[ComputeFuture[Any]]:
        """The futures of tasks that the API has already: those that are open here, and new ones.

        :raises RuntimeError: after :meth:`close`.
        """
        known = {future.task_id: future for future in self.unsettled()}
        self._listen(task_group_id)
        for task_id in task_ids:
            if task_id not in known:
                future: ComputeFuture[Any] = ComputeFuture(
                    task_id,
                    task_group_id=task_group_id,
                    endpoint_id="",
                    on_cancel=self._cancelled,
                    ask_why=self._why,
                    adopted=True,
                    raise_original=raise_original,
                )
                known[task_id] = future
                self._collector.add(future)
        self._poller.hurry()
        return [known[task_id] for task_id in task_ids]

    def unsettled(self) -> list[ComputeFuture[Any]]:
        """The futures that are not done."""
        return self._collector.unsettled()

    def close(self) -> None:
        """No more calls come: end when the last future is done."""
        self._collector.close()

    def join(self) -> None:
        """Wait until the threads have ended. Only after :meth:`close`."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_TIMEOUT_S)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is sent. False if that did not happen in time."""
        return self.sender.wait_until_sent(timeout_s)

    def abandon(self) -> None:
        """End now, whatever is open. The tasks that were sent go on without us."""
        self._collector.close()
        self.sender.abandon()
        self._stop()

    def give_up(self) -> None:
        """End every open future, after :meth:`abandon`: a later exit handler must not wait for one."""
        error = Unavailable(
            "The process ends before the task has.",
            hint="The task continues; Client.get_result reads its result by its id.",
        )
        self._collector.fail([future.task_id for future in self.unsettled()], error)

    def _listen(self, task_group_id: str) -> None:
        if task_group_id not in self._groups:
            self._groups.add(task_group_id)
            self._stream.follow(task_group_id)

    def _upload(self, future: ComputeFuture[Any], handle: FunctionHandle, payload: bytes, terms: Terms) -> None:
        try:
            if not future.cancelled():
                uploaded = encode_payload(self._blobs.upload(payload))
                self.sender.send(Call(future, handle, uploaded, terms, needs_of(payload)))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller waits for this future
            self._collector.fail([future.task_id], error)
        finally:
            self._unsent.give_back(len(payload))

    def _cancelled(self, future: ComputeFuture[Any]) -> None:
        self.sender.cancel(future)
        self._collector.drop(future)

    def _why(self, task_id: str) -> Why:
        return Why.from_json(self._api.why(task_id))

    def _hurry(self) -> None:
        self._poller.hurry()

    def _stop(self) -> None:
        self.sender.stop()
        self._stream.stop()
        self._poller.stop()
        self._uploads.shutdown(wait=False)
        _running.discard(self)

    def _spawn(self, run: Callable[[], None], name: str) -> threading.Thread:
        def watched() -> None:
            _mark_thread()
            try:
                run()
            except BaseException as error:
                # Nothing would settle the futures any more: end them, and die loudly.
                self._collector.break_down(error)
                self._unsent.lift()
                raise
            finally:
                with self._alive_lock:
                    self._alive -= 1
                    last = self._alive == 0
                if last:
                    self._on_ended()

        thread = threading.Thread(target=watched, name=name, daemon=True)
        thread.start()
        return thread


#: Engines that run in this process. At its end they send what waits: a submitted call is not lost to a short script.
_running: weakref.WeakSet[Engine] = weakref.WeakSet()
_FLUSH_AT_EXIT_S: Final = 10.0
#: Whether that has happened: what is submitted afterwards would not be sent.
_exiting = False


def _flush_at_exit() -> None:
    global _exiting
    _exiting = True
    for engine in [engine for engine in _running if engine._pid == os.getpid()]:
        if not engine.flush(_FLUSH_AT_EXIT_S):
            _logger.warning("the process ends with calls that could not be sent")
        engine.abandon()
        engine.join()
        engine.give_up()


atexit.register(_flush_at_exit)
