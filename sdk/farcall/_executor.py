"""Calls on an endpoint in the manner of :mod:`concurrent.futures`."""

from __future__ import annotations

import concurrent.futures
import itertools
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from farcall._client import Client
from farcall._future import ComputeFuture
from farcall_common.errors import ConfigurationError

if TYPE_CHECKING:
    from farcall._calls import FunctionHandle

__all__ = ["Executor"]

T = TypeVar("T")


class Executor(concurrent.futures.Executor):
    """Runs functions on an endpoint.

    ::

        with Executor(endpoint_id) as executor:
            future = executor.submit(pow, 2, 10)
            squares = list(executor.map(square, range(100), chunksize=10))

    Calls are sent in batches that grow with the load, results come back as they happen. Arguments and results over
    64 KiB travel through the blob store by themselves; over 10 MiB they are refused. A function is registered at its
    first use. Network trouble is waited out; a call that was submitted is not run twice by it.

    :param endpoint_id: where to run. May be set later, and changed for the calls to come.
    :param client: the way to the API; else one is made from the environment, and closed at the end.
    :param task_group_id: a UUID under which the tasks are filed; else a new one.
    :param label: the name of the executor's threads.
    :param batch_size: how many calls at most go into one request (1,000 at most).
    :param idempotent: whether a task may be started again if its endpoint vanished; if not, it ends as lost.
    :param max_attempts: how often a task is started at most.
    :param walltime_s: after how many seconds an attempt is stopped; None = never.
    :param patience_s: for how many seconds the API may be out of reach before futures fail.
    :raises ConfigurationError: if there is no ``client`` and none can be made.

    May be used from any thread. A forked child must make its own.
    """

    def __init__(
        self,
        endpoint_id: str | uuid.UUID | None = None,
        *,
        client: Client | None = None,
        task_group_id: str | uuid.UUID | None = None,
        label: str = "farcall",
        batch_size: int = 500,
        idempotent: bool = True,
        max_attempts: int = 3,
        walltime_s: float | None = None,
        patience_s: float = 3600.0,
    ) -> None:
        if not 1 <= batch_size <= 1000:
            raise ValueError("batch_size must be between 1 and 1000")
        # The engine and what it needs (HTTP, ZeroMQ, pickling) take longer to load than the rest of the package.
        from farcall._engine import Engine
        from farcall._submission import TaskOptions

        self.endpoint_id = None if endpoint_id is None else str(uuid.UUID(str(endpoint_id)))
        self.task_group_id = str(task_group_id or uuid.uuid4())
        self.label = label
        options = TaskOptions(idempotent=idempotent, max_attempts=max_attempts, walltime_s=walltime_s)
        self.client = client or Client()
        self._shut_down = False
        self._engine = Engine(
            self.client._api,
            self.client._blobs,
            task_group_id=self.task_group_id,
            batch_size=batch_size,
            options=options,
            patience_s=patience_s,
            label=label,
            on_ended=self.client.close if client is None else _nothing,
        )
        # An executor that is forgotten ends when its last future is done, as those of the standard library do.
        weakref.finalize(self, self._engine.close).atexit = False

    def __repr__(self) -> str:
        state = "shut down" if self._shut_down else f"{len(self._engine.unsettled())} open futures"
        return f"<Executor {self.label!r} at endpoint {self.endpoint_id}, {state}>"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Shut down, waiting for what is open. After Ctrl-C, cancel what is open instead."""
        self.shutdown(wait=True, cancel_futures=kind is not None and issubclass(kind, KeyboardInterrupt))

    def register_function(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        public: bool = False,
    ) -> str:
        """Register a function now, under these terms, and use that registration for every call of it from now on.

        :raises SerializationError: if the function cannot be sent.
        """
        function_id = self.client.register_function(
            function, name=name, description=description, metadata=metadata, public=public
        )
        self._engine.functions.registered(function_id, function)
        return function_id

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> ComputeFuture[T]:
        """Call ``fn(*args, **kwargs)`` on the endpoint and return the future of its result. Does not wait.

        :raises SerializationError: if the function or an argument cannot be sent; it says which.
        :raises PayloadTooLarge: if the arguments take more than 10 MiB.
        :raises RuntimeError: after :meth:`shutdown`.
        """
        return self._submit(self._engine.functions.handle(fn), args, kwargs)

    def submit_to_registered_function(
        self, function_id: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> ComputeFuture[Any]:
        """Call a function by its id; otherwise like :meth:`submit`."""
        return self._submit(self._engine.functions.registered(function_id), tuple(args), dict(kwargs or {}))

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Like the built-in ``map(fn, *iterables)``, on the endpoint. Everything is submitted at once.

        :param timeout: seconds from now until the last result must be there; None = no limit.
        :param chunksize: how many calls make one task. More means less overhead for short calls; a call that raises
            takes the rest of its chunk with it.
        :param buffersize: not supported.
        :raises TimeoutError: from the iterator, after ``timeout``. What is not done then is cancelled, as it is when
            the iterator is closed early or a call raised.
        """
        if buffersize is not None:
            raise ValueError("buffersize is not supported: everything is submitted at once")
        if chunksize < 1:
            raise ValueError("chunksize must be at least 1")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        chunks = super().map(_by_chunk(fn), _chunks(zip(*iterables), chunksize), timeout=timeout)  # noqa: B905
        return itertools.chain.from_iterable(chunks)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls.

        :param wait: return when every future is done. If false, return at once; results still come in.
        :param cancel_futures: cancel every future that is not done, those whose tasks run too.
        """
        self._shut_down = True
        unsettled = self._engine.unsettled()
        if cancel_futures:
            for future in unsettled:
                future.cancel()
        self._engine.close()
        if wait:
            concurrent.futures.wait(unsettled)
            self._engine.join()

    def _submit(self, handle: FunctionHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ComputeFuture[Any]:
        if self.endpoint_id is None:
            raise ConfigurationError("the executor has no endpoint", hint="Executor(endpoint_id) says where to run.")
        return self._engine.submit(handle, args, kwargs, endpoint_id=self.endpoint_id)


def _nothing() -> None:
    """The client was given to us: it is not ours to close."""


def _by_chunk(function: Callable[..., T]) -> Callable[[Sequence[Sequence[Any]]], list[T]]:
    """A function that makes many calls. Being nested it travels by value: workers need not have this package."""

    def call_each(rows: Sequence[Sequence[Any]]) -> list[T]:
        return [function(*row) for row in rows]

    return call_each


def _chunks(rows: Iterable[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    rows = iter(rows)
    while chunk := list(itertools.islice(rows, size)):
        yield chunk
