"""Submitting calls on terms that can be changed between two of them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, overload

from farcall._future import ComputeFuture
from farcall._ids import as_id
from farcall._mapping import by_chunk, chunks_of, flattened, results_in_order
from farcall._terms import Terms
from farcall_common.errors import ConfigurationError

if TYPE_CHECKING:
    from farcall._calls import FunctionHandle
    from farcall._engine import Engine
    from farcall_common.task_options import TaskOptionsDict

P = ParamSpec("P")
T = TypeVar("T")
_Future = concurrent.futures.Future[Any]
#: What is a value only when the call is sent.
_Later = _Future | Sequence[_Future] | Set[_Future] | Mapping[Any, _Future]


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
        value: T = getattr(submitter._terms.options, self._name)
        return value

    def __set__(self, submitter: Submitter, value: T) -> None:
        changes: Any = {self._name: value}
        submitter._set(**changes)


class Submitter(concurrent.futures.Executor):
    """What runs functions on an endpoint: an :class:`Executor`, or a view of one (see :meth:`options`).

    Every attribute that says where and how calls run may be set at any time; each call takes along what is set when it
    is submitted.
    """

    def __init__(self, engine: Any, terms: Any) -> None:
        self._engine: Engine = engine  # its type is nobody else's affair, and with it all that it is made of
        self._terms: Terms = terms  # checkers other than mypy do not know what msgspec makes

    def __repr__(self) -> str:
        return f"<Submitter to endpoint {self.endpoint_id}, {self._terms.options}>"

    # -- the terms of calls to come ------------------------------------------------------------------------------------

    @property
    def endpoint_id(self) -> str | None:
        """Where to run."""
        return self._terms.endpoint_id

    @endpoint_id.setter
    def endpoint_id(self, value: str | uuid.UUID | None) -> None:
        self._terms = dataclasses.replace(self._terms, endpoint_id=None if value is None else as_id(value))

    @property
    def task_group_id(self) -> str:
        """The group under which tasks are filed."""
        return self._terms.task_group_id

    @task_group_id.setter
    def task_group_id(self, value: str | uuid.UUID) -> None:
        self._terms = dataclasses.replace(self._terms, task_group_id=as_id(value))

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

    num_nodes: _Option[int | None] = _Option()
    """How many whole nodes of its block a task has for MPI ranks."""

    ranks_per_node: _Option[int | None] = _Option()
    """How many MPI ranks a task starts on each node."""

    num_ranks: _Option[int | None] = _Option()
    """How many MPI ranks a task starts in all."""

    keep_output: _Option[bool] = _Option()
    """Whether the last 4 KiB that a task writes to standard output and error are kept when it succeeds, too: as
    :attr:`ComputeFuture.stdout` and ``stderr``, and for ``farcall tasks logs``. Those of a failed task always are."""

    memoize: _Option[bool | None] = _Option()
    """Whether a call that was made before may be answered with the result that it had; None = as registered.

    Only successes of your own tasks are remembered. Two calls are the same if the bytes of function and arguments
    are: equal plain data (what JSON knows), arrays and objects of the same making are, however keyword arguments
    are ordered. Equal values are not when they are written differently: sets and dictionaries in another order, 1
    and 1.0, an object that occurs twice and two that are equal, functions and classes of a script that changed.
    """

    container: _Option[str | None] = _Option()
    """Id or name of a container of yours to run in; a call for an endpoint that cannot is refused."""

    container_id: _Option[str | None] = _Option("container")
    """The same as :attr:`container`."""

    resource_specification: _Option[Mapping[str, Any] | None] = _Option()
    """What a task asks of the endpoint, as Globus Compute's programs say it: ``num_nodes``, ``memory_bytes`` and the
    like mean the options of these names, the rest is for the endpoint's own template."""

    user_endpoint_config: _Option[Mapping[str, Any] | None] = _Option()
    """Values for the endpoint's own template. Endpoints that take none refuse the call."""

    @property
    def result_serializers(self) -> tuple[str, ...]:
        """The strategies that the worker tries in turn on a result; none = its own choice."""
        return self._terms.options.result_serializers

    @result_serializers.setter
    def result_serializers(self, value: Iterable[object] | None) -> None:
        self._set(result_serializers=value)

    @property
    def raise_original(self) -> bool:
        """What ``result()`` raises when the function raised.

        If false, a :class:`TaskFailed` that is also an instance of the nearest built-in class of what was raised:
        ``except ValueError`` and ``except TaskFailed`` both catch a ValueError. What the function raised is its
        ``__cause__`` where it can be read here. If true, that exception itself, as a process pool does, for code that
        catches classes of its own; a :class:`TaskFailed` where it cannot be read.
        """
        return self._terms.raise_original

    @raise_original.setter
    def raise_original(self, value: bool) -> None:
        self._terms = dataclasses.replace(self._terms, raise_original=value)

    def _set(self, **changes: Unpack[TaskOptionsDict]) -> None:
        if "result_serializers" in changes:
            from farcall._strategies import strategy_names

            changes["result_serializers"] = strategy_names(changes["result_serializers"])
        self._terms = dataclasses.replace(self._terms, options=self._terms.options.changed(**changes))

    def options(
        self,
        *,
        endpoint_id: str | uuid.UUID | None = None,
        container_id: str | EllipsisType | None = ...,
        raise_original: bool | None = None,
        **changes: Unpack[TaskOptionsDict],
    ) -> Submitter:
        """A view of this executor with other options: ``executor.options(walltime_s=60).submit(f, x)``.

        What is not given is as it is here now. The view uses this executor's connections and ends with it.

        :param container_id: another name of the option ``container``.
        :param changes: any of the options that are attributes here.
        :raises TypeError: for an option that does not exist.
        :raises ValueError: for a value that an option cannot have.
        """
        view = Submitter(self._engine, self._terms)
        if endpoint_id is not None:
            view.endpoint_id = endpoint_id
        if raise_original is not None:
            view.raise_original = raise_original
        if container_id is not ...:
            changes["container"] = container_id
        view._set(**changes)
        return view

    # -- submitting ----------------------------------------------------------------------------------------------------

    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ComputeFuture[T]: ...

    @overload  # mypy takes all functions for one another's equals here, and still tells their arguments apart
    def submit(  # type: ignore[overload-cannot-match]
        self, fn: Callable[..., T], first: _Later, /, *args: Any, **kwargs: Any
    ) -> ComputeFuture[T]: ...

    @overload
    def submit(  # type: ignore[overload-cannot-match]
        self, fn: Callable[..., T], first: Any, second: _Later, /, *args: Any, **kwargs: Any
    ) -> ComputeFuture[T]: ...

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> ComputeFuture[T]:
        """Call ``fn(*args, **kwargs)`` on the endpoint and return the future of its result. Does not wait.

        Futures among the arguments, also directly inside of a list, tuple, set or dictionary, are replaced by their
        results, and the call is sent when all of them are done; they may be anybody's. If one fails or is cancelled,
        the call is never made: its future raises :class:`InputFailed`, caused by that failure. Type checkers know the
        function's arguments, and let futures stand for the first two.

        :raises SerializationError: if the function or an argument cannot be sent; it says which.
        :raises PayloadTooLarge: if the arguments take more than 10 MiB.
        :raises RuntimeError: after :meth:`shutdown`.
        """
        return self._submit(self._engine.functions.handle(fn), args, kwargs)

    def submit_to_registered_function(
        self, function_id: str | uuid.UUID, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> ComputeFuture[Any]:
        """Call a function by its id, ``<id>@<version>`` or an alias of yours; otherwise like :meth:`submit`.

        An alias is looked up when it is used for the first time; later calls are of the same function.

        :raises TypeError: if ``args`` is not a tuple or a list, or ``kwargs`` not a dictionary with texts as keys.
        """
        from farcall._calls import checked_call

        values, named = checked_call(args, kwargs)
        return self._submit(self._engine.registered(function_id), values, named)

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
            takes the rest of its chunk with it.
        :param buffersize: how many tasks are submitted ahead of what is consumed, so that the iterables may be
            endless; None = everything is submitted at once.
        :raises TimeoutError: from the iterator, after ``timeout``. What is not done then is cancelled, as it is when
            the iterator is closed early or a call raised.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be at least 1")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be at least 1, or None")
        rows: Iterator[tuple[Any, ...]] = zip(*iterables)  # noqa: B905 - the shortest ends it, as everywhere else
        if chunksize == 1:
            return results_in_order(lambda row: self.submit(fn, *row), rows, timeout_s=timeout, ahead=buffersize)
        from farcall._calls import display_name

        call_each = by_chunk(fn, name=display_name(fn))  # spans and lists of functions show the function's own name
        return flattened(
            results_in_order(
                lambda chunk: self.submit(call_each, *chunk),
                chunks_of(rows, chunksize),
                timeout_s=timeout,
                ahead=buffersize,
            )
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Does nothing: a view ends with its executor."""

    def _submit(self, handle: FunctionHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ComputeFuture[Any]:
        if self._terms.endpoint_id is None:
            raise ConfigurationError("the executor has no endpoint", hint="Executor(endpoint_id) says where to run.")
        return self._engine.submit(handle, args, kwargs, terms=self._terms)
