"""What works behind an executor: three threads and a table of open futures."""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from farcall._api import Api
from farcall._blobs import INLINE_BYTES, Blobs
from farcall._budget import Budget
from farcall._burst import Burst
from farcall._calls import FunctionHandle, FunctionTable, in_order, pack_call
from farcall._collector import Collector
from farcall._ends import ResultReader
from farcall._future import ComputeFuture
from farcall._inputs import failure_of, inputs_of, resolved, when_all_done
from farcall._needs import needs_of
from farcall._poller import Poller
from farcall._sender import Call, Sender
from farcall._stream import Stream
from farcall._submission import encode_payload
from farcall._terms import Terms
from farcall._tracing import trace_call
from farcall._verdict import Judge
from farcall._why import Why
from farcall_common.errors import SerializationError, Unavailable
from farcall_common.payload import Serializer
from farcall_common.payload.hints import message_of
from farcall_common.wire import new_task_id

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
