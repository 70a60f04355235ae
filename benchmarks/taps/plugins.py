"""TaPS plugins: the executors ``farcall-engine`` and ``farcall``. They are registered when this module is imported."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

from pydantic import Field
from taps.executor import ExecutorConfig, FutureDependencyExecutor
from taps.plugins import register

import farcall
from farcall_common.errors import FarcallError
from farcall_endpoint import Engine

P = ParamSpec("P")
T = TypeVar("T")


@register("executor")
class FarcallEngineConfig(ExecutorConfig):  # type: ignore[misc]
    """An endpoint in the program's own process: :class:`farcall_endpoint.Engine`."""

    name: Literal["farcall-engine"] = Field("farcall-engine", description="Executor name.")
    max_workers: int | None = Field(None, description="Most tasks at a time; one for each core if not given.")

    def get_executor(self) -> FutureDependencyExecutor:
        """The executor; an engine takes no futures as arguments itself."""
        return FutureDependencyExecutor(FailingFutures(Engine(self.max_workers, raise_original=True)))


@register("executor")
class FarcallConfig(ExecutorConfig):  # type: ignore[misc]
    """An endpoint of a deployment: :class:`farcall.Executor`, which takes futures as arguments."""

    name: Literal["farcall"] = Field("farcall", description="Executor name.")
    endpoint: str | None = Field(None, description="Name or id of the endpoint; the default one if not given.")

    def get_executor(self) -> farcall.Executor:
        """The executor, with the API and the login of the usual settings."""
        return farcall.Executor(self.endpoint, raise_original=True)


class FailingFutures(concurrent.futures.Executor):
    """An executor whose ``submit`` reports errors by futures: calls that cannot be sent, or are made after it broke.

    TaPS submits in a callback of the last future that a task waits for: what is raised there is only logged, and the
    task would never end.
    """

    def __init__(self, executor: concurrent.futures.Executor) -> None:
        self.executor = executor

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[Any]:
        """As the executor's, but for errors."""
        try:
            return self.executor.submit(fn, *args, **kwargs)
        except (FarcallError, concurrent.futures.BrokenExecutor) as error:
            failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
            failed.set_exception(error)
            return failed

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As the executor's."""
        self.executor.shutdown(wait=wait, cancel_futures=cancel_futures)
