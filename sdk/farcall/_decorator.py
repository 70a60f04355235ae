"""``@farcall.function``: functions that are called here, or submitted to an endpoint, without an executor in sight."""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import threading
import types
import uuid
from collections.abc import Callable, Iterable, Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, Unpack, overload

from farcall._decorated import Decorated
from farcall._executor import Executor, Later, Submitter

if TYPE_CHECKING:
    from farcall._future import ComputeFuture
    from farcall_common.task_options import TaskOptionsDict

P = ParamSpec("P")
R = TypeVar("R")

#: Parameters of :meth:`Submitter.options` that are not options of a function.
_NOT_OPTIONS: Final = frozenset({"self", "endpoint_id", "changes"})


#: Options that name the environment of a task.
_ENVIRONMENTS: Final = frozenset({"container", "container_id", "environment", "requirements"})


class Function(Decorated[P, R]):
    """A function that :func:`function` decorated. Calling it runs it here, as without the decorator.

    :meth:`submit` and :meth:`map` run it on its endpoint, through one executor that all functions of the program share.
    That executor is made when it is first used, with a client from the environment; at the end of the program it sends
    the calls that wait, and does not wait for results.
    """

    def __repr__(self) -> str:
        return f"<farcall function {self.__name__}>"

    @overload
    def submit(self, *args: P.args, **kwargs: P.kwargs) -> ComputeFuture[R]: ...

    @overload  # futures in place of arguments
    def submit(self, first: Later, /, *args: Any, **kwargs: Any) -> ComputeFuture[R]: ...

    @overload
    def submit(self, first: Any, second: Later, /, *args: Any, **kwargs: Any) -> ComputeFuture[R]: ...

    def submit(self, *args: Any, **kwargs: Any) -> ComputeFuture[R]:
        """Call the function on its endpoint and return the future of its result, as :meth:`Executor.submit`.

        :raises ConfigurationError: if no client can be made of the environment, or no endpoint is meant.
        :raises TypeError: if the function does not take these arguments.
        """
        return _shared.submitter(self.endpoint).submit(self, *args, **kwargs)

    def map(
        self,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[R]:
        """Like the built-in ``map``, on the endpoint: as :meth:`Executor.map`."""
        return _shared.submitter(self.endpoint).map(
            self, *iterables, timeout=timeout, chunksize=chunksize, buffersize=buffersize
        )

    def options(
        self, *, endpoint: str | uuid.UUID | EllipsisType | None = ..., **changes: Unpack[TaskOptionsDict]
    ) -> Function[P, R]:
        """The function with other options: ``clean.options(walltime_s=60).submit(path)``.

        :raises TypeError: for an option that does not exist.
        """
        _check_names(changes)
        # The environment that is named last is the one.
        replaced = _ENVIRONMENTS if _ENVIRONMENTS & changes.keys() else frozenset()
        kept = {name: value for name, value in self.task_options.items() if name not in replaced}
        return Function(
            self.__wrapped__,
            endpoint=self.endpoint if endpoint is ... else endpoint,
            name=self.registered_name,
            description=self.registered_description,
            options={**kept, **changes},
        )


@overload
def function(function: Callable[P, R], /) -> Function[P, R]: ...


@overload
def function(
    *,
    endpoint: str | uuid.UUID | None = None,
    name: str | None = None,
    description: str | None = None,
    **options: Unpack[TaskOptionsDict],
) -> Callable[[Callable[P, R]], Function[P, R]]: ...


def function(
    function: Callable[..., Any] | None = None,
    /,
    *,
    endpoint: str | uuid.UUID | None = None,
    name: str | None = None,
    description: str | None = None,
    **options: Unpack[TaskOptionsDict],
) -> Any:
    """Decorate a function, so that it can run on an endpoint.

    ::

        @farcall.function(endpoint="cluster", walltime_s=600)
        def clean(path): ...

        clean("a.csv")                 # here
        clean.submit("a.csv")          # on the endpoint: a future
        clean.map(["a.csv", "b.csv"])  # on the endpoint: an iterator over results

    Nothing is contacted until the first call of :meth:`Function.submit` or :meth:`Function.map`. What travels is the
    function itself: a worker needs no package of Farcall, and there, decorated functions that it uses are called as
    plain functions.

    :param endpoint: the name or id of an endpoint; None is the default one (see :meth:`Client.find_endpoint`).
    :param name: the name that it is registered with; else its own.
    :param description: the same of its description; else its docstring.
    :param options: options of its tasks, as an :class:`Executor` has them. Their values are checked at the first use.
    :raises TypeError: for an option that does not exist, and for anything but a plain function: a method, for instance.
    """
    _check_names(options)

    def decorate(function: Callable[P, R]) -> Function[P, R]:
        if not isinstance(function, types.FunctionType):
            raise TypeError(f"@farcall.function: expected a function, got {type(function).__name__}")
        *around, _ = function.__qualname__.split(".")
        if around and around[-1] != "<locals>":
            raise TypeError(
                f"@farcall.function: {function.__qualname__} is a method. Decorate a function that takes the object."
            )
        return Function(function, endpoint=endpoint, name=name, description=description, options=options)

    return decorate if function is None else decorate(function)


def _check_names(options: Iterable[str]) -> None:
    """:raises TypeError: for a name that is not an option of tasks."""
    if not options:
        return
    # here: msgspec takes as long to load as all the rest
    from farcall_common.task_options import TaskOptionsDict, unknown_option

    known = {*TaskOptionsDict.__optional_keys__, *inspect.signature(Submitter.options).parameters} - _NOT_OPTIONS
    if unknown := sorted(set(options) - known):
        raise TypeError(unknown_option(unknown[0], {*known, "endpoint", "name", "description"}))


class _Shared:
    """The executor of decorated functions, made at the first use, and its views for endpoints."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: Executor | None = None
        self._views: dict[str, Submitter] = {}

    def submitter(self, endpoint: str | uuid.UUID | None) -> Submitter:
        with self._lock:
            if self._executor is None:
                self._executor = Executor(label="farcall-function")
                atexit.register(self._report_interruption)
            if endpoint is None:
                return self._executor
            name = str(endpoint)
            if name not in self._views:
                self._views[name] = self._executor.options(endpoint_id=name)
            return self._views[name]

    def close(self) -> None:
        """Wait for the results that are open, and start another executor at the next use."""
        with self._lock:
            executor, self._executor = self._executor, None
            self._views.clear()
        if executor is not None:
            atexit.unregister(self._report_interruption)
            executor.shutdown()

    def forget(self) -> None:
        """In a forked child: the executor is the parent's."""
        self.__init__()  # type: ignore[misc]  # another lock, too: a thread of the parent may hold this one

    def _report_interruption(self) -> None:
        """When Ctrl-C ended the program: say what continues, as leaving an executor does."""
        error = getattr(sys, "last_value", None)
        if self._executor is not None and isinstance(error, KeyboardInterrupt):
            self._executor.__exit__(type(error), error, None)


_shared: Final = _Shared()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_shared.forget)
