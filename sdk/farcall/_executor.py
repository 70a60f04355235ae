"""Calls on an endpoint in the manner of :mod:`concurrent.futures`."""

from __future__ import annotations

import concurrent.futures
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from farcall._catalogue import SourceCode
from farcall._client import Client
from farcall._future import ComputeFuture
from farcall._ids import as_id
from farcall._notebook import card
from farcall._submitter import Submitter
from farcall._terms import Terms
from farcall._unsupported import refuse
from farcall_common.limits import TASKS_PER_SUBMIT

if TYPE_CHECKING:
    from farcall_common.payload import Serializer
    from farcall_common.task_options import OwnOptionsDict


class Executor(Submitter, SourceCode):
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
    :param resource_specification: what a task asks of the endpoint (see :attr:`resource_specification`).
    :param user_endpoint_config: values for the endpoint's own template; endpoints that take none refuse the call.
    :param label: the name of the executor's threads.
    :param batch_size: how many calls at most go into one request (1,000 at most).
    :param api_burst_limit: with this, submits are paced: so many requests within ``api_burst_window_s`` seconds, then
        one each ``api_burst_window_s / api_burst_limit`` seconds. Not needed: when the API says that it is busy, the
        executor waits for as long as it is told to.
    :param serializer: what turns functions and arguments into bytes; else the client's.
    :param result_serializers: strategies that the worker tries in turn on a result, by class, object or name.
    :param patience_s: for how many seconds the API may be out of reach before futures fail.
    :param amqp_port: only None: results do not come from a message broker.
    :param funcx_client: what ``client`` was once called.
    :param container_id: what the option ``container`` was once called.
    :param raise_original: whether futures raise what the function raised, not a :class:`TaskFailed` (see
        :attr:`raise_original`).
    :param options: any other option of tasks, by the name of its attribute: :attr:`idempotent`, :attr:`max_attempts`,
        :attr:`walltime_s`, :attr:`memory_bytes`, :attr:`max_output_bytes`, :attr:`num_nodes`, :attr:`ranks_per_node`,
        :attr:`num_ranks`, :attr:`keep_output`, :attr:`memoize`, :attr:`container`.
    :raises ConfigurationError: if there is no ``client`` and none can be made.
    :raises Unsupported: for an argument that cannot be honoured.
    :raises TypeError: for an option that does not exist.
    :raises ValueError: for a value that an option cannot have.

    May be used from any thread. A forked child must make its own.
    """

    def __init__(
        self,
        endpoint_id: str | uuid.UUID | None = None,
        client: Client | None = None,
        *,
        task_group_id: str | uuid.UUID | None = None,
        resource_specification: Mapping[str, Any] | None = None,
        user_endpoint_config: Mapping[str, Any] | None = None,
        label: str = "farcall",
        batch_size: int = 500,
        amqp_port: int | None = None,
        api_burst_limit: int | None = None,
        api_burst_window_s: float = 16,
        serializer: object = None,
        result_serializers: Iterable[object] | None = None,
        patience_s: float = 3600.0,
        funcx_client: Client | None = None,
        container_id: str | None = None,
        raise_original: bool = False,
        **options: Unpack[OwnOptionsDict],
    ) -> None:
        refuse("amqp_port", amqp_port, hint="Results come over the forwarder's own stream; leave it out.")
        # The engine and what it needs (HTTP, ZeroMQ, pickling) take longer to load than the rest of the package.
        from farcall._burst import Burst
        from farcall._engine import Engine
        from farcall._strategies import as_serializer, strategy_names
        from farcall_common.task_options import TaskOptions

        if container_id is not None:
            options["container"] = container_id
        task_options = TaskOptions.of(
            resource_specification=resource_specification,
            user_endpoint_config=user_endpoint_config,
            result_serializers=strategy_names(result_serializers),
            **options,
        )
        terms = Terms(
            None if endpoint_id is None else as_id(endpoint_id),
            as_id(task_group_id or uuid.uuid4()),
            task_options,
            raise_original,
        )
        _check_batch_size(batch_size)
        burst = Burst(api_burst_limit, api_burst_window_s)
        given = client or funcx_client
        self.client: Client = given or Client()
        self._api = self.client._api
        self.label = label
        self._shut_down = False
        engine = Engine(
            self.client._api,
            self.client._blobs,
            self.client._judge,
            task_group_id=terms.task_group_id,
            batch_size=batch_size,
            patience_s=patience_s,
            label=label,
            serializer=self.client.fx_serializer if serializer is None else as_serializer(serializer),
            burst=burst,
            on_ended=_nothing if given else self.client.close,
        )
        super().__init__(engine, terms)
        # An executor that is forgotten ends when its last future is done, as those of the standard library do.
        weakref.finalize(self, engine.close).atexit = False

    def __repr__(self) -> str:
        return f"<Executor {self.label!r} at endpoint {self.endpoint_id}, {self._condition()}>"

    def _repr_html_(self) -> str:
        known = {"label": self.label, "endpoint": self.endpoint_id, "task group": self.task_group_id}
        return card("Executor", {**known, "state": self._condition()})

    def _condition(self) -> str:
        return "shut down" if self._shut_down else f"{len(self._engine.unsettled())} open futures"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Shut down, waiting for what is open. After Ctrl-C, cancel what is open instead."""
        self.shutdown(wait=True, cancel_futures=kind is not None and issubclass(kind, KeyboardInterrupt))

    @property
    def batch_size(self) -> int:
        """How many calls at most go into one request."""
        return self._engine.sender.batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        _check_batch_size(value)
        self._engine.sender.batch_size = value

    @property
    def _max_workers(self) -> int:
        """How many calls to keep under way, for programs that ask a pool for its size, as dask does."""
        return self.batch_size

    @property
    def api_burst_limit(self) -> int | None:
        """How many submits may go out unpaced; None = all."""
        return self._engine.sender.burst.limit

    @api_burst_limit.setter
    def api_burst_limit(self, value: int | None) -> None:
        self._engine.sender.pace(limit=value, window_s=self.api_burst_window_s)

    @property
    def api_burst_window_s(self) -> float:
        """In which window submits are counted, in seconds."""
        return self._engine.sender.burst.window_s

    @api_burst_window_s.setter
    def api_burst_window_s(self, value: float) -> None:
        self._engine.sender.pace(limit=self.api_burst_limit, window_s=value)

    @property
    def serializer(self) -> Serializer:
        """What turns functions and arguments into bytes."""
        return self._engine.serializer

    @serializer.setter
    def serializer(self, value: object) -> None:
        from farcall._strategies import as_serializer

        self._engine.serializer = as_serializer(value)

    @property
    def amqp_port(self) -> None:
        """None: results do not come from a message broker."""
        return

    @amqp_port.setter
    def amqp_port(self, value: int | None) -> None:
        refuse("amqp_port", value, hint="Results come over the forwarder's own stream; leave it out.")

    @property
    def task_count_submitted(self) -> int:
        """How many tasks the API has taken from this executor."""
        return self._engine.sender.accepted

    def register_function(
        self,
        function: Callable[..., Any],
        function_id: str | None = None,
        *,
        name: str | None = None,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        public: bool = False,
        memoize: bool = False,
    ) -> str:
        """Register a function now, under these terms, and use that registration for every call of it from now on.

        With ``function_id``, nothing is registered: calls of the function are calls of what has that id already.

        :raises SerializationError: if the function cannot be sent.
        """
        if function_id is None:
            function_id = self.client._register(
                function,
                name=name,
                description=description,
                metadata=metadata,
                public=public,
                memoize=memoize,
                serializer=self._engine.serializer,
            )
        self._engine.functions.registered(function_id, function)
        return function_id

    def reload_tasks(self, task_group_id: str | uuid.UUID | None = None) -> list[ComputeFuture[Any]]:
        """Futures of all tasks of a group, whoever submitted them and when, in the order of their submission.

        A program that was restarted waits for what it submitted before like this. Tasks that this executor waits for
        keep the futures that they have.

        :param task_group_id: the group, which becomes the executor's; else the one that is set.
        :raises TaskGroupUnknown: if you have no task in that group.
        """
        if task_group_id is not None:
            self.task_group_id = task_group_id
        group_id = self._terms.task_group_id
        return self._engine.adopt(
            self.client.get_task_group(group_id), task_group_id=group_id, raise_original=self.raise_original
        )

    def get_worker_hardware_details(self) -> str:
        """What a worker of the endpoint says of its machine: Python, system, processors, memory. Waits for it."""
        from farcall._hardware import SOURCE

        function_id = self.register_source_code(*SOURCE)
        return str(self.submit_to_registered_function(function_id).result())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls.

        :param wait: return when every future is done. If false, return at once; results still come in.
        :param cancel_futures: cancel every future that is not done. Unlike pools of the standard library, this ends
            the tasks that run, too: how far a task is on its endpoint is not known here when it is cancelled.
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

    def _get_result_watcher(self) -> Executor:
        """What waits for results: the executor itself. Parsl's executor for Globus Compute shuts it down, too."""
        return self


def _check_batch_size(value: int) -> None:
    if not 1 <= value <= TASKS_PER_SUBMIT:
        raise ValueError(f"batch_size must be between 1 and {TASKS_PER_SUBMIT}")


def _nothing() -> None:
    """The client was given to us: it is not ours to close."""
