"""Executor of an engine: an endpoint's agent, managers and workers as a ``concurrent.futures.Executor``."""

from __future__ import annotations

import atexit
import concurrent.futures
import itertools
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar, Unpack, overload

import msgspec

from farcall_common.chains import Chain
from farcall_common.coroutines import completed
from farcall_common.credentials import find_home
from farcall_common.errors import ConfigurationError, Unavailable
from farcall_common.finite import check_seconds
from farcall_common.futures import OF_PARENT
from farcall_common.graph_builder import Graph, plan_of
from farcall_common.graph_handles import StageHandle, StageList
from farcall_common.graph_packing import task_options
from farcall_common.green_threads import refuse_green_threads
from farcall_common.mapping import check_sizes, chunks_of, flattened, results_in_order
from farcall_common.payload.functions import Function, FunctionTable, check_callable
from farcall_common.payload.native import NATIVE
from farcall_common.running import in_worker
from farcall_common.task_options import EngineOptionsDict, TaskOptions
from farcall_common.wire import TaskSpec
from farcall_endpoint.agent.shell.nodes import expect_workers
from farcall_endpoint.config.providers import LocalProviderConfig, ProviderConfig
from farcall_endpoint.config.settings import QosSettings
from farcall_endpoint.engine.future import EngineFuture
from farcall_endpoint.engine.graphs import pack_for_engine, pack_payload
from farcall_endpoint.engine.loop import EngineLoop, EngineOptions, EngineStats, Submission
from farcall_endpoint.host.slots import Affinity, Sharing

if TYPE_CHECKING:
    from farcall_common.objects import Reference

P = ParamSpec("P")
T = TypeVar("T")

_READY_STEP_S: Final = 0.005
_SHUT_DOWN: Final = "cannot schedule new futures after shutdown"
_INHERITED: Final = f"this Engine cannot submit: {OF_PARENT}"
_THIS_MACHINE: Final = LocalProviderConfig()


class InvalidArgument(ConfigurationError, ValueError):
    """An argument that can never work, which the standard library's pools report as a ValueError."""


class _Submitter(concurrent.futures.Executor):
    """Base class of an engine and of its views with other options."""

    def __init__(self, options: TaskOptions, *, raise_original: bool) -> None:
        self._options = options
        self._raise_original = raise_original

    @overload
    def submit(self, fn: Graph, target: StageHandle[T], /) -> EngineFuture[T]: ...

    @overload
    def submit(self, fn: Graph, target: StageList[T] | list[StageHandle[T]], /) -> EngineFuture[list[T]]: ...

    @overload
    def submit(self, fn: Graph, target: list[Any] | tuple[Any, ...] | Mapping[Any, Any], /) -> EngineFuture[Any]: ...

    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> EngineFuture[T]: ...

    @overload  # for mypy all functions match here; it still checks their arguments
    def submit(  # type: ignore[overload-cannot-match]
        self, fn: Callable[..., T], first: Reference[Any], /, *args: Any, **kwargs: Any
    ) -> EngineFuture[T]: ...

    @overload
    def submit(  # type: ignore[overload-cannot-match]
        self, fn: Callable[..., T], first: Any, second: Reference[Any], /, *args: Any, **kwargs: Any
    ) -> EngineFuture[T]: ...

    def submit(self, fn: Callable[..., T] | Graph, /, *args: Any, **kwargs: Any) -> EngineFuture[Any]:
        """Run ``fn(*args, **kwargs)`` in a worker.

        ``submit(graph, target)`` runs what a target needs of a :class:`~farcall_endpoint.Graph`, as one task: a stage,
        or a list, tuple or dictionary of stages. A :func:`~farcall_endpoint.chain` is one task, too.

        :raises SerializationError: if the function or an argument cannot travel.
        :raises InvalidRequest: for too many files.
        :raises RuntimeError: after ``shutdown``, and in a process that was forked after the engine was made.
        :raises BrokenExecutor: if the engine ended because of a defect.
        :raises TypeError, ValueError: for a target that is not one of the graph's, and options that an engine does not
            know.
        """
        if isinstance(fn, Chain):
            graph = Graph()
            return self._submit_graph(graph, graph.call(fn, *args, **kwargs))
        if isinstance(fn, Graph):
            if len(args) != 1 or kwargs:
                raise TypeError("submit(graph, target): expected one target: a stage, or a list of stages")
            return self._submit_graph(fn, args[0])
        return self._submit(fn, args, kwargs)

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """Call a function for all arguments in parallel; yield the results in the order of the arguments.

        :param timeout: seconds from now until the last result must be there.
        :param chunksize: calls to make in one task: for long inputs and very short calls.
        :param buffersize: maximum number of submitted tasks whose results are not consumed yet, which permits endless
            iterables; None = all tasks are submitted at once.
        :raises TimeoutError: while iterating, when the time is up; tasks that are left are cancelled.
        """
        check_sizes(chunksize, buffersize)
        rows: Iterator[tuple[Any, ...]] = zip(*iterables, strict=False)
        if chunksize == 1:
            return results_in_order(lambda row: self.submit(fn, *row), rows, timeout_s=timeout, ahead=buffersize)
        for each in _functions_of(fn):
            check_callable(each)
        chunks = chunks_of(rows, chunksize)
        return flattened(
            results_in_order(
                lambda chunk: self.submit(_run_chunk, fn, chunk), chunks, timeout_s=timeout, ahead=buffersize
            )
        )

    def _submit(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> EngineFuture[T]:
        raise NotImplementedError

    def _submit_graph(self, graph: Graph, target: object) -> EngineFuture[Any]:
        raise NotImplementedError


class Engine(_Submitter):
    """Runs functions in worker processes that outlive crashes of their tasks.

    ::

        with Engine(max_workers=4) as engine:
            futures = [engine.submit(simulate, seed) for seed in range(100)]

    Functions need not be importable: what is defined in a script or a notebook travels with its code. A function is
    serialised at its first use, and again when something that it uses has changed. Workers start at once, in the
    current directory.

    As pools of the standard library do, leaving a ``with`` block waits for all that was submitted, also after Ctrl-C. A
    second Ctrl-C ends the wait; when the program ends, so do its tasks. An engine without references finishes what
    was submitted. A forked child must make its own: in the child, ``submit`` and the futures of the parent raise a
    RuntimeError. A module that workers import must not make one at its top level.

    :param max_workers: maximum number of concurrent tasks (on each node); one for each core if not given.
    :param prefetch: maximum number of tasks to keep ready behind each running one; 0 switches prefetching off.
    :param batching: whether many tasks may share a message on their way to a worker; for measurements.
    :param scheduling: how managers are chosen: ``random`` or ``round-robin``.
    :param working_dir: where tasks run.
    :param raise_original: whether ``result()`` raises what the function raised. If not, a
        :class:`~farcall_common.errors.TaskFailed` that is also an instance of the nearest built-in class of that, and
        has it as its ``__cause__``.
    :param provider: where nodes come from: a section of an endpoint's configuration, such as
        ``SlurmProviderConfig(partition="debug", max_blocks=4)``; this machine if not given.
    :param max_idletime_s: seconds without a task after which a block of nodes is given back.
    :param max_block_failures: blocks in a row that fail before tasks fail too.
    :param block_failure_period_s: least seconds that these failures must span. Until then tasks wait, and blocks are
        tried again.
    :param address: a name of this machine that the nodes can reach; found out if not given.
    :param worker_port_range: first and last port on which nodes may be awaited; any free one if not given.
    :param cores_per_worker: cores for each worker, which limit the workers on a node; may be a fraction.
    :param mem_per_worker_bytes: memory for each worker, which limits the workers on a node and the memory of a task.
    :param accelerators: names of a node's accelerators, or how many to use of them; each worker gets one to itself.
    :param cpu_affinity: ``block`` binds each worker to neighbouring cores, ``alternating`` to every n-th.
    :param qos_settings: how latency targets (the option ``qos``) are held.
    :param options: of :class:`TaskOptions`, for all tasks: ``idempotent``, ``max_attempts``, ``walltime_s``,
        ``memory_bytes``, ``max_output_bytes``, ``retries``, ``retry_on``, ``retry_delay_s``, ``qos``.
    :raises ConfigurationError: if the provider cannot be used from here, if no port can be had, if not even one worker
        fits, if a worker imports the module that makes the engine, or if gevent has replaced the threads.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        prefetch: int = 256,
        batching: bool = True,
        scheduling: Literal["random", "round-robin"] = "random",
        working_dir: Path | str | None = None,
        raise_original: bool = False,
        provider: ProviderConfig = _THIS_MACHINE,
        max_idletime_s: float = 120.0,
        max_block_failures: int = 3,
        block_failure_period_s: float = 300.0,
        address: str | None = None,
        worker_port_range: tuple[int, int] | None = None,
        cores_per_worker: float | None = None,
        mem_per_worker_bytes: int | None = None,
        accelerators: Sequence[str] | int = (),
        cpu_affinity: Affinity = "none",
        qos_settings: QosSettings | None = None,
        **options: Unpack[EngineOptionsDict],
    ) -> None:
        _refuse_in_imports()
        refuse_green_threads("Engine")
        super().__init__(
            _changed(TaskOptions(result_serializers=NATIVE), options, method="Engine"), raise_original=raise_original
        )
        if max_workers is not None and max_workers < 1:
            raise InvalidArgument(f"max_workers must be greater than 0, and is {max_workers}.")
        check_seconds(max_idletime_s=max_idletime_s, block_failure_period_s=block_failure_period_s)
        if cores_per_worker is not None and math.isnan(cores_per_worker):
            raise InvalidArgument("cores_per_worker must be greater than 0, and is NaN.")
        sharing = Sharing(
            max_workers=max_workers,
            cores_per_worker=cores_per_worker,
            memory_per_worker_bytes=mem_per_worker_bytes,
            accelerators=tuple(map(str, range(accelerators)) if isinstance(accelerators, int) else accelerators),
            cpu_affinity=cpu_affinity,
        )
        self._loop = EngineLoop(
            EngineOptions(
                sharing=sharing,
                workers=expect_workers(provider, sharing, environment=os.environ),
                prefetch=prefetch,
                batching=batching,
                scheduling=scheduling,
                working_dir=Path.cwd() if working_dir is None else Path(working_dir).resolve(),
                scripts_root=find_home(os.environ) / "engine",
                provider=provider,
                address=address,
                worker_port_range=worker_port_range,
                max_idletime_s=max_idletime_s,
                max_block_failures=max_block_failures,
                block_failure_period_s=block_failure_period_s,
                qos=QosSettings() if qos_settings is None else qos_settings,
            )
        )
        self._cancel = self._loop.cancel  # one for all futures: garbage collection looks at every object of every task
        self._functions = FunctionTable()
        self._numbers = itertools.count(1)
        self._over = ""  # why nothing can be submitted
        self._loop.start()
        # An engine that is forgotten ends when its last future is done, as pools of the standard library do.
        weakref.finalize(self, self._loop.stop, cancel=False).atexit = False
        atexit.register(_end_at_exit, weakref.ref(self), weakref.ref(self._loop))
        _engines.add(self)

    def options(self, *, raise_original: bool | None = None, **changes: Unpack[EngineOptionsDict]) -> EngineView:
        """A view on this engine whose tasks have other options; what is None stays as it is.

        :param changes: the options that the engine itself takes.
        """
        given: Any = {name: value for name, value in changes.items() if value is not None}
        return EngineView(
            self,
            _changed(self._options, given, method="options"),
            raise_original=self._raise_original if raise_original is None else raise_original,
        )

    @property
    def _max_workers(self) -> int:
        """For programs that ask a pool for its size, as dask does."""
        return self._loop.options.workers

    def stats(self) -> EngineStats:
        """Numbers: managers, workers, tasks, and the problem if there is one."""
        return self._loop.stats

    def wait_ready(self, *, workers: int | None = None, timeout: float = 60.0) -> None:
        """Wait until ``workers`` workers have started, or as many as the nodes have room for.

        :param timeout: seconds to wait.
        :raises Unavailable: when the time is up; the message has the reason, if it is known.
        """
        deadline = time.monotonic() + timeout
        while True:
            stats = self.stats()
            wanted = workers if workers is not None else stats.slots or self._loop.options.workers
            if stats.workers >= wanted:
                return
            if time.monotonic() >= deadline or not self._loop.is_alive():
                raise Unavailable(
                    f"{stats.workers} of {wanted} workers have started after {timeout:g} s.", hint=stats.problem
                )
            self._loop.changed.wait(_READY_STEP_S)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept nothing more, finish what was submitted, end the workers.

        :param wait: for all of that.
        :param cancel_futures: cancel what has not ended instead of finishing it. Unlike pools of the standard library,
            this ends the tasks that run, too.

        Returns at once in a forked child: the engine is the parent's.
        """
        if self._over == _INHERITED:
            return
        self._over = _SHUT_DOWN
        self._loop.stop(cancel=cancel_futures)
        if wait:
            self._loop.join()

    def _end_after_fork(self) -> None:
        self._over = _INHERITED
        self._loop.end_after_fork(RuntimeError(f"this future has no result: {OF_PARENT}"))

    def _submit(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> EngineFuture[T]:
        return self._submit_with(self._options, self._raise_original, fn, args, kwargs)

    def _submit_graph(self, graph: Graph, target: object) -> EngineFuture[Any]:
        return self._submit_graph_with(self._options, self._raise_original, graph, target)

    def _submit_graph_with(
        self, options: TaskOptions, raise_original: bool, graph: Graph, target: object
    ) -> EngineFuture[Any]:
        plan = plan_of(graph, target)
        packed = pack_for_engine(plan, self._functions, options, spread=graph.spread)
        options = msgspec.structs.replace(task_options(plan, options), callees=packed.callees)
        return self._start(options, raise_original, packed.function, packed.payload, packed.functions, plan.rebuild)

    def _submit_with(
        self,
        options: TaskOptions,
        raise_original: bool,
        fn: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> EngineFuture[T]:
        return self._start(options, raise_original, self._functions.get(fn), pack_payload(args, kwargs))

    def _start(
        self,
        options: TaskOptions,
        raise_original: bool,
        function: Function,
        payload: bytes,
        callees: Sequence[Function] = (),
        rebuild: Callable[[Any], Any] | None = None,
    ) -> EngineFuture[Any]:
        """The future of a task.

        :param callees: functions that it calls.
        :param rebuild: makes its value of the result, if that has another form.
        """
        if self._over:
            raise RuntimeError(self._over)
        task_id = str(next(self._numbers))
        future: EngineFuture[Any] = EngineFuture(task_id, self._cancel, raise_original=raise_original)
        spec = TaskSpec(task_id, 1, "", function.hash, options, 0)
        self._loop.submit(Submission(spec, function, payload, future, callees, rebuild))
        return future


class EngineView(_Submitter):
    """An engine seen with other task options. It cannot be shut down: the engine is."""

    def __init__(self, engine: Engine, options: TaskOptions, *, raise_original: bool) -> None:
        super().__init__(options, raise_original=raise_original)
        self._engine = engine

    def _submit(self, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> EngineFuture[T]:
        return self._engine._submit_with(self._options, self._raise_original, fn, args, kwargs)

    def _submit_graph(self, graph: Graph, target: object) -> EngineFuture[Any]:
        return self._engine._submit_graph_with(self._options, self._raise_original, graph, target)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: the engine goes on."""


def _changed(options: TaskOptions, changes: EngineOptionsDict, *, method: str) -> TaskOptions:
    """:raises TypeError: for an option that an engine does not know.
    :raises InvalidArgument: for a value that an option cannot have.
    """
    if unknown := changes.keys() - EngineOptionsDict.__optional_keys__:
        raise TypeError(f"{method}() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    try:
        return options.changed(**changes)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None


def _run_chunk(fn: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
    first, *others = _functions_of(fn)
    results: list[T] = []
    for call in calls:
        value = completed(first(*call))
        for function in others:
            value = completed(function(value))
        results.append(value)
    return results


def _functions_of(fn: Callable[..., Any]) -> Sequence[Callable[..., Any]]:
    return fn.functions if isinstance(fn, Chain) else (fn,)


def _refuse_in_imports() -> None:
    """An engine at the top level of a module that a worker imports would start workers that import it, without end.

    :raises ConfigurationError: where a worker imports a module.
    """
    frame = sys._getframe() if in_worker() else None
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "<module>" and name != "__main__" and not name.startswith("farcall_endpoint."):
            raise ConfigurationError(
                f"The module {name} makes an Engine when it is imported, and a worker imports it.",
                hint=f"Make the engine in a function of {name}, or below `if __name__ == '__main__':`.",
            )
        frame = frame.f_back


def _end_at_exit(engine: weakref.ref[Engine], loop: weakref.ref[EngineLoop]) -> None:
    """Wait for what the program submitted, as the standard executors do; also when it forgot the engine."""
    if (known := engine()) is not None:
        known.shutdown()
    elif (running := loop()) is not None:
        running.join()


#: Engines of this process.
_engines: Final[weakref.WeakSet[Engine]] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine._end_after_fork()


os.register_at_fork(after_in_child=_after_fork)
