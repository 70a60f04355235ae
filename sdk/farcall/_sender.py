"""Submits: whatever has collected while the last request was under way goes out with the next."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from farcall._api import Api
from farcall._burst import Burst
from farcall._calls import FunctionHandle
from farcall._collector import Collector
from farcall._future import ComputeFuture
from farcall._needs import Needs
from farcall._submission import MAX_BYTES, Prepared, check_answer, encode_submit, size_bytes
from farcall._terms import Terms
from farcall._verdict import Judge
from farcall_common.errors import (
    ConfigurationError,
    EndpointIncompatible,
    EndpointUnknown,
    FarcallError,
    ProtocolError,
    SerializationError,
    TaskUnknown,
    Unauthenticated,
    Unsupported,
)
from farcall_common.payload.hints import message_of

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
