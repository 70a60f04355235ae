"""Systems to compare, each with the same interface. Imports are local, because each peer has its own environment."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class System(Protocol):
    """A running system; its constructor starts it with a number of workers."""

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        """Submit a call; returns a handle for :meth:`gather`."""

    def gather(self, handles: Sequence[Any]) -> list[Any]:
        """The results of calls."""

    def stop(self) -> None:
        """Stop all processes."""


class _WithFutures:
    """Base for executors of :mod:`concurrent.futures`."""

    executor: Any

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.executor.submit(function, *args)

    def gather(self, handles: Sequence[Any]) -> list[Any]:
        return [handle.result() for handle in handles]

    def stop(self) -> None:
        self.executor.shutdown()


class Farcall(_WithFutures):
    def __init__(self, workers: int, **options: Any) -> None:
        from farcall_endpoint import Engine

        self.executor = Engine(max_workers=workers, **options)


class ProcessPool(_WithFutures):
    def __init__(self, workers: int) -> None:
        self.executor = concurrent.futures.ProcessPoolExecutor(workers)


class Loky(_WithFutures):
    def __init__(self, workers: int) -> None:
        from loky import get_reusable_executor

        self.executor = get_reusable_executor(max_workers=workers, timeout=60)


class _Parsl(_WithFutures):
    def __init__(self, workers: int, **options: Any) -> None:
        import parsl
        from parsl.config import Config
        from parsl.executors import HighThroughputExecutor
        from parsl.providers import LocalProvider

        executor = HighThroughputExecutor(
            label="htex", max_workers_per_node=workers, provider=LocalProvider(init_blocks=1, max_blocks=1), **options
        )
        self.parsl = parsl
        self.kernel = parsl.load(Config(executors=[executor], strategy="none", initialize_logging=False))
        self.executor = executor

    def stop(self) -> None:
        self.kernel.cleanup()


class ParslDefault(_Parsl):
    """``python_app`` with the defaults: encryption, no prefetching."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.apps: dict[Any, Any] = {}

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        if function not in self.apps:
            self.apps[function] = self.parsl.python_app(function)
        return self.apps[function](*args)


class ParslTuned(_Parsl):
    """The executor without the data-flow kernel, without encryption, with prefetching."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, encrypted=False, prefetch_capacity=100)

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.executor.submit(function, {}, *args)


class _Ray:
    def __init__(self, workers: int) -> None:
        import ray

        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="error")
        self.ray = ray

    def gather(self, handles: Sequence[Any]) -> list[Any]:
        return list(self.ray.get(list(handles)))

    def stop(self) -> None:
        self.ray.shutdown()


class RayTasks(_Ray):
    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.remotes: dict[Any, Any] = {}

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        if function not in self.remotes:
            self.remotes[function] = self.ray.remote(function)
        return self.remotes[function].remote(*args)


class RayActors(_Ray):
    """One actor per worker, called in turn."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)

        class Actor:
            def call(self, function: Callable[..., Any], *args: Any) -> Any:
                return function(*args)

        actor = self.ray.remote(Actor)
        self.actors = itertools.cycle([actor.remote() for _ in range(workers)])

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        return next(self.actors).call.remote(function, *args)


class Dask:
    def __init__(self, workers: int) -> None:
        from distributed import Client, LocalCluster

        self.cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None, silence_logs=40)
        self.client = Client(self.cluster)

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.client.submit(function, *args, pure=False)

    def gather(self, handles: Sequence[Any]) -> list[Any]:
        return list(self.client.gather(list(handles)))

    def stop(self) -> None:
        self.client.close()
        self.cluster.close()


#: Environment (a file of requirements in ``peers/``, or None for ours) and class of each system.
SYSTEMS: dict[str, tuple[str | None, Callable[[int], System]]] = {
    "farcall": (None, Farcall),
    "ProcessPoolExecutor": (None, ProcessPool),
    "loky": ("loky", Loky),
    "Parsl": ("parsl", ParslDefault),
    "Parsl tuned": ("parsl", ParslTuned),
    "Ray tasks": ("ray", RayTasks),
    "Ray actors": ("ray", RayActors),
    "Dask": ("dask", Dask),
}
