"""Executor: calls on an endpoint through the interface of :mod:`concurrent.futures`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, TypeAlias, TypeVar, Unpack, overload

from farcall._arguments import as_id, refuse
from farcall._binding import accepts_of, check_arguments, checked
from farcall._client import Client, SourceCode, connection_of
from farcall._decorated import Decorated
from farcall._display import card
from farcall._future import ComputeFuture
from farcall._mapping import by_chunk
from farcall._pacing import BurstLimit
from farcall_common.chains import Chain
from farcall_common.errors import FarcallError
from farcall_common.exit_codes import Terminated
from farcall_common.finite import check_seconds
from farcall_common.graph_builder import Graph
from farcall_common.graph_handles import StageHandle, StageList
from farcall_common.green_threads import refuse_green_threads
from farcall_common.limits import TASKS_PER_SUBMIT
from farcall_common.mapping import check_sizes, chunks_of, flattened, results_in_order

if TYPE_CHECKING:
    from farcall._batch import SubmitContext
    from farcall._engine import Engine
    from farcall._sealing import SealMode
    from farcall._task_info import Why
    from farcall._task_output import OnOutput
    from farcall_common.objects import Reference
    from farcall_common.payload import Serializer
    from farcall_common.qos import QoS
    from farcall_common.task_options import OwnOptionsDict, TaskOptionsDict


#: Fields of an environment.
_FIELDS: Final = ("type", "location", "requirements", "preload", "name")
#: Time to send what waits when the executor is left early.
_FLUSH_S: Final = 10.0
_SECOND_CTRL_C_S: Final = 2.0
#: What is submitted as a graph.
_GRAPHS: Final = (Graph, Chain)

_logger = logging.getLogger("farcall")

P = ParamSpec("P")
T = TypeVar("T")
_Future = concurrent.futures.Future[Any]
#: Arguments that become values when the call is sent.
Later: TypeAlias = "_Future | Sequence[_Future] | Set[_Future] | Mapping[Any, _Future] | Reference[Any]"


class _Option(Generic[T]):
    """An option of tasks (see :class:`farcall_common.task_options.TaskOptions`) as an attribute that can be set."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __set_name__(self, owner: type[Submitter], name: str) -> None:
        self._name = self._name or name

    @overload
    def __get__(self, submitter: None, owner: type[Submitter]) -> _Option[T]: ...

    @overload
    def __get__(self, submitter: Submitter, owner: type[Submitter]) -> T: ...

    def __get__(self, submitter: Submitter | None, owner: type[Submitter]) -> _Option[T] | T:
        if submitter is None:
            return self
        value: T = getattr(submitter._context.options, self._name)
        return value

    def __set__(self, submitter: Submitter, value: T) -> None:
        changes: Any = {self._name: value}
        submitter._set(**changes)


class Submitter(concurrent.futures.Executor):
    """Runs functions on an endpoint: an :class:`Executor`, or a view of one (see :meth:`options`).

    The attributes that control where and how calls run may be set at any time, and apply to later calls.
    """

    #: Set where a submitter is made. As parameters they would be public types, with all that they refer to.
    _engine: Engine
    _context: SubmitContext

    def __init__(self) -> None:
        #: Views with the options of decorated functions, each with the context that it was made of.
        self._views: weakref.WeakKeyDictionary[Decorated[..., Any], tuple[SubmitContext, Submitter]] = (
            weakref.WeakKeyDictionary()
        )

    def __repr__(self) -> str:
        return f"<Submitter to endpoint {self.endpoint_id}, {self._context.options}>"

    # -- options of later calls ----------------------------------------------------------------------------------------

    @property
    def endpoint_id(self) -> str | None:
        """Id of the endpoint that runs the calls. It may be set to a name; None is the default endpoint (see
        :meth:`Client.find_endpoint`)."""
        return self._context.endpoint_id

    @endpoint_id.setter
    def endpoint_id(self, value: str | uuid.UUID | None) -> None:
        found = None if value is None else self._engine.names.find(value)
        self._context = dataclasses.replace(self._context, endpoint_id=found)

    @property
    def task_group_id(self) -> str:
        """The group of the tasks."""
        return self._context.task_group_id

    @task_group_id.setter
    def task_group_id(self, value: str | uuid.UUID) -> None:
        self._context = dataclasses.replace(self._context, task_group_id=as_id(value))

    idempotent: _Option[bool] = _Option()
    """Whether a task may be started again if its endpoint vanished; if not, it ends as lost."""

    max_attempts: _Option[int] = _Option()
    """How often a task is started at most."""

    walltime_s: _Option[float | None] = _Option()
    """After how many seconds an attempt is stopped; None = never."""

    memory_bytes: _Option[int | None] = _Option()
    """How much memory an attempt may use, all of its processes together; None = as much as the endpoint lets it."""

    max_output_bytes: _Option[int | None] = _Option()
    """How much an attempt may write to standard output and error, each; None = as much as the endpoint lets it."""

    retries: _Option[int] = _Option()
    """How often a task is run again after its function raised; the endpoint does that, also while this program is not
    there. Apart from :attr:`max_attempts`, which counts workers, nodes and endpoints that died."""

    retry_on: _Option[type[BaseException] | str | Iterable[type[BaseException] | str]] = _Option()
    """Which exceptions are retried: classes or their names (``"OSError"``, ``"module.Error"``), with their subclasses;
    none = every :class:`Exception`. It reads as a tuple of names."""

    retry_delay_s: _Option[float] = _Option()
    """How many seconds pass before the first retry, at least half of it and at most all; twice as many before each
    next one, up to 5 minutes."""

    qos: _Option[QoS | Mapping[str, Any] | None] = _Option()
    """The latency that calls are to hold (see :class:`QoS`), which makes them a latency class; others are batch work.
    None = as the function was registered."""

    num_nodes: _Option[int | None] = _Option()
    """How many whole nodes of its block a task has for MPI ranks."""

    ranks_per_node: _Option[int | None] = _Option()
    """How many MPI ranks a task starts on each node."""

    num_ranks: _Option[int | None] = _Option()
    """How many MPI ranks a task starts in all."""

    keep_output: _Option[bool] = _Option()
    """Whether the last 4 KiB that a task writes to standard output and error are in its record when it succeeds, too,
    and so are kept as long as its result. Those of a failed task always are."""

    output_bytes: _Option[int] = _Option()
    """How many of the last bytes of each stream of its output the endpoint keeps for a day; 0: none, and the output of
    a running task cannot be read."""

    memoize: _Option[bool | None] = _Option()
    """Whether a call that was made before may be answered with the result that it had; None = as registered.

    Only successes of your own tasks at the same endpoint are remembered. Two calls are the same if the bytes of
    function and arguments are: that holds for equal plain data (JSON types), arrays, and objects that were built in the
    same way, in any order of keyword arguments. Equal values that are written differently are different calls: sets and
    dictionaries in another order, 1 and 1.0, one object twice and two equal ones, functions and classes of a script
    that changed.
    """

    container: _Option[str | None] = _Option()
    """Id or name of a container of yours to run in (see :meth:`Client.register_container`); a call for an endpoint that
    cannot is refused. None: the one that the function was registered with, if any; else the endpoint's own Python."""

    @property
    def environment(self) -> Mapping[str, Any] | None:
        """The same without a registration: a dictionary of ``type``, ``location``, and if you like ``preload`` and
        ``name``. A task has one environment: setting this ends :attr:`container`, and the other way."""
        found = self._context.options.environment
        return None if found is None else {name: getattr(found, name) for name in _FIELDS if getattr(found, name)}

    @environment.setter
    def environment(self, value: Mapping[str, Any] | None) -> None:
        self._set(environment=value)

    @property
    def requirements(self) -> tuple[str, ...]:
        """Packages that the endpoint installs for the calls, as pip takes them: ``["polars==1.*"]``. It is an
        :attr:`environment` of the type ``uv``."""
        environment = self._context.options.environment
        return environment.requirements if environment else ()

    @requirements.setter
    def requirements(self, value: Iterable[str] | None) -> None:
        self._set(requirements=value)

    container_id: _Option[str | None] = _Option("container")
    """The same as :attr:`container`."""

    resource_specification: _Option[Mapping[str, Any] | None] = _Option()
    """Resources of a task, in Globus Compute's form: ``num_nodes``, ``memory_bytes`` and the like are the options of
    these names, the rest is for the endpoint's own template."""

    user_endpoint_config: _Option[Mapping[str, Any] | None] = _Option()
    """Values for the endpoint's own template. Endpoints that take none refuse the call."""

    @property
    def result_serializers(self) -> tuple[str, ...]:
        """The strategies that the worker tries in turn on a result; none = its own choice."""
        return self._context.options.result_serializers

    @result_serializers.setter
    def result_serializers(self, value: Iterable[object] | None) -> None:
        self._set(result_serializers=value)

    @property
    def raise_original(self) -> bool:
        """Whether ``result()`` raises the exception of the function itself.

        If false, it raises a :class:`TaskFailed` that is also an instance of the nearest built-in class of the
        exception: ``except ValueError`` and ``except TaskFailed`` both catch a ValueError. The exception itself is the
        ``__cause__`` if it can be read here. If true, the exception itself is raised, as a process pool does, for code
        that catches its own classes; a :class:`TaskFailed` if it cannot be read.
        """
        return self._context.raise_original

    @raise_original.setter
    def raise_original(self, value: bool) -> None:
        self._context = dataclasses.replace(self._context, raise_original=value)

    @property
    def sealed(self) -> SealMode | None:
        """Whether calls are sealed, so that only the endpoint can read them: "off", "offered" (if the endpoint opens
        sealed calls) or "required"; None: as the client says (see :class:`Client`)."""
        return self._context.sealed

    @sealed.setter
    def sealed(self, value: SealMode | None) -> None:
        from farcall._sealing import seal_mode

        self._context = dataclasses.replace(self._context, sealed=None if value is None else seal_mode(value))

    @property
    def on_output(self) -> OnOutput | None:
        """Called with what tasks print, while they run, as an :class:`OutputPart`; ``print`` shows it. None: nothing
        is asked for.

        It is called in a thread of the executor, in whole lines if they are complete within a second. The API is asked
        for it up to twice a second, for the 20 oldest tasks that have not ended and for those that have; leaving the
        executor waits for the last output, 10 seconds at most. What it raises is logged.
        """
        return self._context.on_output

    @on_output.setter
    def on_output(self, value: OnOutput | None) -> None:
        self._context = dataclasses.replace(self._context, on_output=value)

    @property
    def callees(self) -> tuple[object, ...]:
        """Functions that a call may call while it runs, itself or through ``farcall.current()``: functions, or ids or
        aliases of registered ones. They are registered with the function of the call.

        They are only needed on endpoints that run certain functions: those check them, and such a call can call no
        others. The functions of a graph are among them without being named.
        """
        return tuple(self._context.callees_given)

    @callees.setter
    def callees(self, value: Iterable[object] | None) -> None:
        self._set(callees=value)

    def _set(self, **changes: Unpack[TaskOptionsDict]) -> None:
        if "callees" in changes:
            given = changes.pop("callees")
            if isinstance(given, Iterator):
                given = tuple(given)
            callees = self._engine.callees(given)
            self._context = dataclasses.replace(self._context, callees=callees, callees_given=tuple(given or ()))
        if "result_serializers" in changes:
            from farcall._functions import strategy_names

            changes["result_serializers"] = strategy_names(changes["result_serializers"])
        self._context = dataclasses.replace(self._context, options=self._context.options.changed(**changes))

    def options(
        self,
        *,
        endpoint_id: str | uuid.UUID | None = None,
        container_id: str | EllipsisType | None = ...,
        raise_original: bool | None = None,
        sealed: SealMode | None = None,
        on_output: OnOutput | EllipsisType | None = ...,
        **changes: Unpack[TaskOptionsDict],
    ) -> Submitter:
        """A view of this executor with other options: ``executor.options(walltime_s=60).submit(f, x)``.

        Other options are as they are here now. The view uses this executor's connections and ends with it.

        :param container_id: another name of the option ``container``.
        :param changes: any of the options that are attributes here.
        :raises TypeError: for an option that does not exist.
        :raises ValueError: for a value that an option cannot have.
        """
        view = Submitter()
        view._engine, view._context = self._engine, self._context
        if endpoint_id is not None:
            view.endpoint_id = endpoint_id
        if raise_original is not None:
            view.raise_original = raise_original
        if sealed is not None:
            view.sealed = sealed
        if on_output is not ...:
            view.on_output = on_output
        if container_id is not ...:
            changes["container"] = container_id
        view._set(**changes)
        return view

    # -- submitting ----------------------------------------------------------------------------------------------------

    @overload
    def submit(self, fn: Graph, target: StageHandle[T], /) -> ComputeFuture[T]: ...

    @overload
    def submit(self, fn: Graph, target: StageList[T] | list[StageHandle[T]], /) -> ComputeFuture[list[T]]: ...

    @overload
    def submit(self, fn: Graph, target: list[Any] | tuple[Any, ...] | Mapping[Any, Any], /) -> ComputeFuture[Any]: ...

    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ComputeFuture[T]: ...

    @overload  # for mypy all functions match here; it still checks their arguments
    def submit(  # type: ignore[overload-cannot-match]
        self, fn: Callable[..., T], first: Later, /, *args: Any, **kwargs: Any
    ) -> ComputeFuture[T]: ...

    @overload
    def submit(  # type: ignore[overload-cannot-match]
        self, fn: Callable[..., T], first: Any, second: Later, /, *args: Any, **kwargs: Any
    ) -> ComputeFuture[T]: ...

    def submit(self, fn: Callable[..., T] | Graph, /, *args: Any, **kwargs: Any) -> ComputeFuture[T]:
        """Call ``fn(*args, **kwargs)`` on the endpoint and return the future of its result. Does not wait.

        Futures among the arguments, also directly inside of a list, tuple, set or dictionary, are replaced by their
        results, and the call is sent when all of them are done; any executor may have made them. If one fails or is
        cancelled, the call is never made: its future raises :class:`InputFailed`, caused by that failure. Type checkers
        verify the function's arguments, and accept futures in place of the first two.

        A function that :func:`function` decorated is called with its own options, on this executor's endpoint.

        ``submit(graph, target)`` runs what a target needs of a :class:`Graph`, as one task: a stage, whose value is the
        result, or a list, tuple or dictionary of stages. A :func:`chain` is one task, too, with a stage for each of its
        functions. See :attr:`ComputeFuture.stages`.

        :raises TypeError: if the function does not take these arguments.
        :raises ValueError: if the target is a stage of another graph.
        :raises SerializationError: if the function or an argument cannot be sent; the message names it.
        :raises PayloadTooLarge: if the arguments take more than 10 MiB.
        :raises RuntimeError: after :meth:`shutdown`.
        """
        if isinstance(fn, _GRAPHS):
            return self._submit_graph(fn, args, kwargs)
        handle = self._engine.functions.handle(fn)
        if handle.accepts is not None:
            check_arguments(fn, handle.accepts, args, kwargs)
        return self._engine.submit(handle, args, kwargs, self._with_options_of(fn)._complete_context())

    def _submit_graph(
        self, graph: Graph | Chain[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ComputeFuture[Any]:
        target: object
        if isinstance(graph, Chain):
            chain, graph = graph, Graph()
            target = graph.call(chain, *args, **kwargs)
        elif len(args) != 1 or kwargs:
            raise TypeError("submit(graph, target): expected one target: a stage, or a list of stages")
        else:
            target = args[0]
        return self._engine.submit_graph(graph, target, self._complete_context())

    def _with_options_of(self, function: object) -> Submitter:
        """A view with the options of a decorated function."""
        if not isinstance(function, Decorated) or not function.task_options:
            return self
        known = self._views.get(function)
        if known is None or known[0] is not self._context:
            context = self._context
            known = self._views[function] = context, self.options(**function.task_options)
        return known[1]

    def submit_to_registered_function(
        self, function_id: str | uuid.UUID, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> ComputeFuture[Any]:
        """Call a function by its id, ``<id>@<version>`` or an alias of yours; otherwise like :meth:`submit`.

        An alias is looked up when it is used for the first time; later calls use the same function.

        :raises TypeError: if ``args`` is not a tuple or a list, or ``kwargs`` not a dictionary with texts as keys.
        """
        from farcall._functions import checked_call

        values, named = checked_call(args, kwargs)
        return self._engine.submit(self._engine.registered(function_id), values, named, self._complete_context())

    def _complete_context(self) -> SubmitContext:
        """The context, with the default endpoint if none was given."""
        if self._context.endpoint_id is None:
            self._context = dataclasses.replace(self._context, endpoint_id=self._engine.names.find(None))
        return self._context

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Like the built-in ``map(fn, *iterables)``, on the endpoint.

        :param timeout: seconds from now until the last result must be there; None = no limit.
        :param chunksize: how many calls make one task. More means less overhead for short calls; a call that raises
            takes the rest of its chunk with it. Calls of a :func:`chain` in a chunk run side by side.
        :param buffersize: how many tasks are submitted ahead of the results that were consumed, so that the
            iterables may be endless; None = everything is submitted at once.
        :raises TimeoutError: from the iterator, after ``timeout``. Calls that are not done then are cancelled, as
            they are when the iterator is closed early or a call raised.
        """
        check_sizes(chunksize, buffersize)
        submitter = self._with_options_of(fn)
        rows: Iterator[tuple[Any, ...]] = zip(*iterables)  # noqa: B905 - the shortest ends it, as everywhere else
        if chunksize == 1:
            return results_in_order(
                lambda row: self.submit(fn, *row),
                rows,
                timeout_s=timeout,
                ahead=buffersize,
                keep_after_interrupt=True,
            )
        if isinstance(fn, Chain):
            return flattened(
                results_in_order(
                    lambda chunk: self._submit_chains(fn, chunk),
                    chunks_of(rows, chunksize),
                    timeout_s=timeout,
                    ahead=buffersize,
                    keep_after_interrupt=True,
                )
            )
        from farcall._functions import display_name
        from farcall_common.payload.functions import check_callable

        check_callable(fn)

        call_each = by_chunk(fn, name=display_name(fn))  # spans and lists of functions show the function's own name
        return flattened(
            results_in_order(
                lambda chunk: submitter.submit(call_each, *chunk),
                chunks_of(checked(fn, rows), chunksize),
                timeout_s=timeout,
                ahead=buffersize,
                keep_after_interrupt=True,
            )
        )

    def _submit_chains(self, chain: Chain[..., T], rows: Sequence[tuple[Any, ...]]) -> ComputeFuture[list[T]]:
        """One task for calls of a chain, whose stages run side by side."""
        graph = Graph()
        return self.submit(graph, [graph.call(chain, *row) for row in rows])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Does nothing: a view ends with its executor."""


class Executor(Submitter, SourceCode):
    """Runs functions on an endpoint.

    ::

        with Executor("cluster") as executor:
            future = executor.submit(pow, 2, 10)
            squares = list(executor.map(square, range(100), chunksize=10))

    Calls are sent in batches that grow with the load, results come back as they happen. Arguments and results over
    64 KiB are sent through the blob store automatically; over 10 MiB they are refused. A function is registered at its
    first use, and again when something that it uses has changed. Requests are repeated after network failures; that
    never runs a call twice.

    :param endpoint_id: where to run: the name or the id of an endpoint; else the default one (see
        :meth:`Client.find_endpoint`). May be set later, and changed for the calls to come.
    :param client: else one is made from the environment, and closed at the end.
    :param task_group_id: the UUID of the group of the tasks; else a new one.
    :param resource_specification: resources of a task (see :attr:`resource_specification`).
    :param user_endpoint_config: values for the endpoint's own template; endpoints that take none refuse the call.
    :param label: the name of the executor's threads.
    :param batch_size: maximum number of calls in a request (1,000 at most).
    :param api_burst_limit: limits submits to this many requests within ``api_burst_window_s`` seconds, then one each
        ``api_burst_window_s / api_burst_limit`` seconds. Not needed: when the API is busy, the executor waits for as
        long as its answer requests.
    :param serializer: serializes functions and arguments; else the client's.
    :param result_serializers: strategies that the worker tries in turn on a result, by class, object or name.
    :param retry_timeout_s: for how many seconds the API may be out of reach before futures fail.
    :param amqp_port: only None: results do not come from a message broker.
    :param funcx_client: former name of ``client``.
    :param container_id: former name of the option ``container``.
    :param raise_original: whether futures raise the function's own exception, not a :class:`TaskFailed` (see
        :attr:`raise_original`).
    :param sealed: whether calls are sealed (see :attr:`sealed`).
    :param on_output: called with what tasks print (see :attr:`on_output`).
    :param callees: functions that calls may call while they run (see :attr:`callees`).
    :param options: any other option of tasks, by the name of its attribute: :attr:`idempotent`, :attr:`max_attempts`,
        :attr:`walltime_s`, :attr:`memory_bytes`, :attr:`max_output_bytes`, :attr:`retries`, :attr:`retry_on`,
        :attr:`retry_delay_s`, :attr:`qos`, :attr:`num_nodes`, :attr:`ranks_per_node`, :attr:`num_ranks`,
        :attr:`keep_output`, :attr:`output_bytes`, :attr:`memoize`, :attr:`container`, :attr:`environment`,
        :attr:`requirements`.
    :raises ConfigurationError: if there is no ``client`` and none can be made, or if gevent has replaced the threads.
    :raises Unsupported: for an argument that is not supported.
    :raises TypeError: for an option that does not exist.
    :raises ValueError: for a value that an option cannot have.

    May be used from any thread. A forked child must make its own: in the child, ``submit`` and the futures of the
    parent raise a RuntimeError.
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
        retry_timeout_s: float = 3600.0,
        funcx_client: Client | None = None,
        container_id: str | None = None,
        raise_original: bool = False,
        sealed: SealMode | None = None,
        on_output: OnOutput | None = None,
        callees: Iterable[object] | None = None,
        **options: Unpack[OwnOptionsDict],
    ) -> None:
        super().__init__()
        refuse_green_threads("Executor")
        refuse("amqp_port", amqp_port, hint="Results come over the forwarder's own stream; leave it out.")
        # The engine and its imports (HTTP, ZeroMQ, pickling) take longer to load than the rest of the package.
        from farcall._batch import SubmitContext
        from farcall._engine import Engine
        from farcall._functions import as_serializer, strategy_names
        from farcall._sealing import seal_mode
        from farcall_common.task_options import TaskOptions

        if container_id is not None:
            options["container"] = container_id
        task_options = TaskOptions.of(
            resource_specification=resource_specification,
            user_endpoint_config=user_endpoint_config,
            result_serializers=strategy_names(result_serializers),
            **options,
        )
        group_id = as_id(task_group_id or uuid.uuid4())
        mode = None if sealed is None else seal_mode(sealed)
        _check_batch_size(batch_size)
        check_seconds(retry_timeout_s=retry_timeout_s)
        burst = BurstLimit(api_burst_limit, api_burst_window_s)
        passed = client or funcx_client
        self.client: Client = passed or Client()
        connection = connection_of(self.client)
        try:
            found = None if endpoint_id is None else connection.names.find(endpoint_id)
        except FarcallError:
            if passed is None:
                self.client.close()
            raise
        context = SubmitContext(found, group_id, task_options, raise_original, mode, on_output)
        self._api = connection.api
        self.label = label
        self._shut_down = False
        self._context = context
        self._engine = Engine(
            connection,
            task_group_id=context.task_group_id,
            batch_size=batch_size,
            retry_timeout_s=retry_timeout_s,
            label=label,
            serializer=self.client.fx_serializer if serializer is None else as_serializer(serializer),
            burst=burst,
            on_ended=_nothing if passed else self.client.close,
        )
        if callees is not None:
            self._set_callees_or_end(callees)
        # An executor that is forgotten ends when its last future is done, as those of the standard library do.
        weakref.finalize(self, self._engine.close).atexit = False

    def _set_callees_or_end(self, callees: Iterable[object]) -> None:
        try:
            self.callees = callees
        except BaseException:
            self._engine.close()
            raise

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
        """Shut down and wait for open futures. After Ctrl-C, return at once: tasks that were submitted continue, and a
        line on stderr gives their group. A second Ctrl-C within two seconds cancels them. A forked child does neither:
        the executor is the parent's."""
        if self._engine.is_inherited:
            return
        if isinstance(error, KeyboardInterrupt):
            self._stop_waiting(error)
            return
        try:
            self.shutdown(wait=True)
        except KeyboardInterrupt as interruption:
            self._stop_waiting(interruption)
            raise

    def _stop_waiting(self, interruption: KeyboardInterrupt) -> None:
        if interrupted(self, interruption, self._log_unsettled):
            _logger.warning("The tasks of group %s were cancelled.", self.task_group_id)

    def _log_unsettled(self) -> None:
        group_id, count = self.task_group_id, len(self._engine.unsettled())
        if count:
            which = "One task" if count == 1 else f"{count} tasks"
            later = f"`farcall groups wait {group_id}` waits for them, `farcall groups cancel {group_id}` cancels them"
            _logger.warning("%s will continue; press Ctrl-C again to cancel now. Later: %s.", which, later)

    @property
    def batch_size(self) -> int:
        """Maximum number of calls in a request."""
        return self._engine.sender.batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        _check_batch_size(value)
        self._engine.sender.batch_size = value

    @property
    def _max_workers(self) -> int:
        """How many calls to keep in flight, for programs that read the size of a pool, as Dask does."""
        return self.batch_size

    @property
    def api_burst_limit(self) -> int | None:
        """How many submits are sent without delay; None = all."""
        return self._engine.sender.burst.limit

    @api_burst_limit.setter
    def api_burst_limit(self, value: int | None) -> None:
        self._engine.sender.burst = BurstLimit(value, self.api_burst_window_s)

    @property
    def api_burst_window_s(self) -> float:
        """The window in which submits are counted, in seconds."""
        return self._engine.sender.burst.window_s

    @api_burst_window_s.setter
    def api_burst_window_s(self, value: float) -> None:
        self._engine.sender.burst = BurstLimit(self.api_burst_limit, value)

    @property
    def serializer(self) -> Serializer:
        """Serializes functions and arguments."""
        return self._engine.serializer

    @serializer.setter
    def serializer(self, value: object) -> None:
        from farcall._functions import as_serializer

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
        qos: QoS | Mapping[str, Any] | None = None,
        container: str | None = None,
        environment: Mapping[str, Any] | None = None,
        requirements: Iterable[str] | None = None,
    ) -> str:
        """Register a function now, and use that registration for every later call of it.

        With ``function_id``, nothing is registered: calls of the function use the function with that id.

        :param qos: the latency that its calls are to hold, unless they or the executor say otherwise.
        :param container: the environment of its calls, as ``environment`` and ``requirements`` (see
            :meth:`Client.register_function`).
        :raises SerializationError: if the function cannot be sent.
        """
        accepts = None  # by an id, it is whatever that function is
        if function_id is None:
            from farcall._functions import registration

            request = registration(
                function,
                name=name,
                description=description,
                metadata=metadata,
                public=public,
                memoize=memoize,
                qos=qos,
                serializer=self._engine.serializer,
                container=container,
                environment=environment,
                requirements=requirements,
            )
            function_id = self._api.register_function(request)
            accepts = accepts_of(function)
        self._engine.functions.registered(function_id, function, accepts=accepts)
        return function_id

    def reload_tasks(self, task_group_id: str | uuid.UUID | None = None) -> list[ComputeFuture[Any]]:
        """Futures of all tasks of a group, of any program, in the order of their submission.

        With this a program that was restarted waits for the tasks that it submitted before. Tasks that this executor
        waits for keep their futures.

        :param task_group_id: the group, which becomes the executor's; else the one that is set.
        :raises TaskGroupUnknown: if you have no task in that group.
        """
        if task_group_id is not None:
            self.task_group_id = connection_of(self.client).ids.group(task_group_id)
        task_ids = self.client.get_task_group(self.task_group_id)
        return self._engine.adopt(task_ids, dataclasses.replace(self._context, endpoint_id=None))

    def get_worker_hardware_details(self) -> str:
        """A report of a worker about its machine: Python, system, processors, memory. Waits for it."""
        from farcall._functions import hardware_source

        function_id = self.register_source_code(*hardware_source())
        return str(self.submit_to_registered_function(function_id).result())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls.

        :param wait: return when every future is done. If false, return at once; futures are still settled.
        :param cancel_futures: cancel every future that is not done. Unlike pools of the standard library, this
            stops running tasks, too: their state on the endpoint is not known here when they are cancelled.

        Returns at once in a forked child: the executor is the parent's.
        """
        self._shut_down = True
        if self._engine.is_inherited:
            return
        unsettled = self._engine.unsettled()
        if cancel_futures:
            for future in unsettled:
                future.cancel()
        self._engine.close()
        if wait:
            concurrent.futures.wait(unsettled)
            self._engine.join()

    def _get_result_watcher(self) -> Executor:
        """The receiver of results: the executor itself. Parsl's executor for Globus Compute shuts it down, too."""
        return self


def _check_batch_size(value: int) -> None:
    if not 1 <= value <= TASKS_PER_SUBMIT:
        raise ValueError(f"batch_size must be between 1 and {TASKS_PER_SUBMIT}")


def _nothing() -> None:
    """The caller of the executor passed the client, and closes it."""


def report_delays(executor: Executor, report: Callable[[Why], None]) -> None:
    """Report delays of tasks in another way than as warnings of the logger ``farcall``."""
    executor._engine.delays.report = report


def interrupted(executor: Executor, interruption: KeyboardInterrupt, report: Callable[[], None]) -> bool:
    """Shut down after Ctrl-C or SIGTERM: report, send the calls that wait, and wait for a second Ctrl-C, which cancels
    every open task. Returns whether it came."""
    give_up_at = time.monotonic() + (0.0 if isinstance(interruption, Terminated) else _SECOND_CTRL_C_S)
    try:
        report()
        executor.shutdown(wait=False)
        executor._engine.flush(_FLUSH_S)
        concurrent.futures.wait(executor._engine.unsettled(), max(0.0, give_up_at - time.monotonic()))
    except Terminated:
        return False
    except KeyboardInterrupt:
        executor.shutdown(cancel_futures=True)
        return True
    return False


def leave(executor: Executor) -> None:
    """Send the calls that wait, for some seconds at most, and stop waiting for results. The tasks continue."""
    executor.shutdown(wait=False)
    executor._engine.flush(_FLUSH_S)
    executor._engine.abandon()
    executor._engine.join()
