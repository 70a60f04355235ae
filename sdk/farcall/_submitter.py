"""Submitting calls on terms that can be changed between two of them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, overload

from farcall._future import ComputeFuture
from farcall._ids import as_id
from farcall._mapping import by_chunk, chunks_of, flattened, results_in_order
from farcall._terms import Terms
from farcall_common.errors import ConfigurationError

if TYPE_CHECKING:
    from farcall._calls import FunctionHandle
    from farcall._engine import Engine

__all__ = ["Submitter"]

P = ParamSpec("P")
T = TypeVar("T")
_Future = concurrent.futures.Future[Any]
#: What is a value only when the call is sent.
_Later = _Future | Sequence[_Future] | Set[_Future] | Mapping[Any, _Future]


class _Same(enum.Enum):
    """An argument that was not given, where None means something."""

    SAME = enum.auto()


_SAME: Final = _Same.SAME


class Submitter(concurrent.futures.Executor):
    """What runs functions on an endpoint: an :class:`Executor`, or a view of one (see :meth:`options`).

    Every attribute that says where and how calls run may be set at any time; each call takes along what is set when it
    is submitted.
    """

    def __init__(self, engine: Any, terms: Terms) -> None:
        self._engine: Engine = engine  # its type is nobody else's affair, and with it all that it is made of
        self._terms = terms

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

    @property
    def idempotent(self) -> bool:
        """Whether a task may be started again if its endpoint vanished; if not, it ends as lost."""
        return self._terms.options.idempotent

    @idempotent.setter
    def idempotent(self, value: bool) -> None:
        self._set(idempotent=value)

    @property
    def max_attempts(self) -> int:
        """How often a task is started at most."""
        return self._terms.options.max_attempts

    @max_attempts.setter
    def max_attempts(self, value: int) -> None:
        self._set(max_attempts=value)

    @property
    def walltime_s(self) -> float | None:
        """After how many seconds an attempt is stopped; None = never."""
        return self._terms.options.walltime_s

    @walltime_s.setter
    def walltime_s(self, value: float | None) -> None:
        self._set(walltime_s=value)

    @property
    def resource_specification(self) -> Mapping[str, Any] | None:
        """What a task asks of the endpoint: ``memory_bytes``, ``num_nodes`` and the like, as the endpoint knows it."""
        return self._terms.options.resource_specification

    @resource_specification.setter
    def resource_specification(self, value: Mapping[str, Any] | None) -> None:
        self._set(resource_specification=value)

    @property
    def user_endpoint_config(self) -> Mapping[str, Any] | None:
        """Values for the endpoint's own template. Endpoints that take none refuse the call."""
        return self._terms.options.user_endpoint_config

    @user_endpoint_config.setter
    def user_endpoint_config(self, value: Mapping[str, Any] | None) -> None:
        self._set(user_endpoint_config=value)

    @property
    def result_serializers(self) -> tuple[str, ...]:
        """The strategies that the worker tries in turn on a result; none = its own choice."""
        return self._terms.options.result_serializers

    @result_serializers.setter
    def result_serializers(self, value: Iterable[object] | None) -> None:
        from farcall._strategies import strategy_names

        self._set(result_serializers=strategy_names(value))

    @property
    def memoize(self) -> bool | None:
        """Whether a call that was made before may be answered with the result that it had; None = as registered.

        Only successes of your own tasks are remembered. Two calls are the same if the bytes of function and arguments
        are: equal plain data (what JSON knows), arrays and objects of the same making are, however keyword arguments
        are ordered. Equal values are not when they are written differently: sets and dictionaries in another order, 1
        and 1.0, an object that occurs twice and two that are equal, functions and classes of a script that changed.
        """
        return self._terms.options.memoize

    @memoize.setter
    def memoize(self, value: bool | None) -> None:
        self._set(memoize=value)

    @property
    def keep_output(self) -> bool:
        """Whether the last 4 KiB that a task writes to standard output and error are kept when it succeeds, too: as
        :attr:`ComputeFuture.stdout` and ``stderr``, and for ``farcall tasks logs``. Those of a failed task always are.
        """
        return self._terms.options.keep_output

    @keep_output.setter
    def keep_output(self, value: bool) -> None:
        self._set(keep_output=value)

    @property
    def container_id(self) -> str | None:
        """Id or name of a container of yours to run in; a call for an endpoint that cannot is refused."""
        return self._terms.options.container

    @container_id.setter
    def container_id(self, value: str | None) -> None:
        self._set(container=value)

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

    def _set(self, **changed: Any) -> None:
        self._terms = dataclasses.replace(self._terms, options=dataclasses.replace(self._terms.options, **changed))

    def options(
        self,
        *,
        endpoint_id: str | uuid.UUID | None = None,
        idempotent: bool | None = None,
        max_attempts: int | None = None,
        walltime_s: float | _Same | None = _SAME,
        resource_specification: Mapping[str, Any] | _Same | None = _SAME,
        user_endpoint_config: Mapping[str, Any] | _Same | None = _SAME,
        result_serializers: Iterable[object] | _Same | None = _SAME,
        memoize: bool | _Same | None = _SAME,
        keep_output: bool | None = None,
        container_id: str | _Same | None = _SAME,
        raise_original: bool | None = None,
    ) -> Submitter:
        """A view of this executor with other terms: ``executor.options(walltime_s=60).submit(f, x)``.

        What is not given is as it is here now. The view uses this executor's connections and ends with it.
        """
        view = Submitter(self._engine, self._terms)
        given = {
            "endpoint_id": _SAME if endpoint_id is None else endpoint_id,
            "idempotent": _SAME if idempotent is None else idempotent,
            "max_attempts": _SAME if max_attempts is None else max_attempts,
            "walltime_s": walltime_s,
            "resource_specification": resource_specification,
            "user_endpoint_config": user_endpoint_config,
            "result_serializers": result_serializers,
            "memoize": memoize,
            "keep_output": _SAME if keep_output is None else keep_output,
            "container_id": container_id,
            "raise_original": _SAME if raise_original is None else raise_original,
        }
        for name, value in given.items():
            if value is not _SAME:
                setattr(view, name, value)
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
