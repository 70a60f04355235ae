"""Functions with options of their own, as the decorator makes them and executors take them."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Decorated(Generic[P, R]):
    """A function with an endpoint and options for its tasks. Calling it calls the function, here.

    :param options: options of tasks; they apply on any executor that it is submitted to.
    :param name, description: of its registration; else those of the function.
    """

    #: farcall_common.payload sends the function itself.
    farcall_decorated: ClassVar[bool] = True

    __wrapped__: Callable[P, R]
    __name__: str
    __qualname__: str

    def __init__(
        self,
        function: Callable[P, R],
        *,
        endpoint: str | uuid.UUID | None,
        name: str | None,
        description: str | None,
        options: Mapping[str, Any],
    ) -> None:
        functools.update_wrapper(self, function)
        self.endpoint: str | uuid.UUID | None = endpoint
        """Name or id of the endpoint for :meth:`submit` and :meth:`map`. None: the default endpoint."""
        self.task_options = options
        self.registered_name = name
        self.registered_description = description

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__wrapped__(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.__qualname__  # by name, as functions; what travels to another machine is the function itself
