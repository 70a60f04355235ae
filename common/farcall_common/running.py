"""Running task: what a function knows about the task that it runs in, what it says of its progress, and the calls that
it makes from there.

::

    def driver(n):
        from farcall import current
        return sum(current().map(work, range(n)))

The calls run on the endpoint of the task, beside it: nothing of them goes through the cloud. While a task waits for its
calls, another one may use its worker's slot.
"""

from __future__ import annotations

import collections
import itertools
import math
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar, Unpack

from farcall_common.errors import ConfigurationError
from farcall_common.task_options import AttemptOptionsDict, TaskOptions, unknown_option

if TYPE_CHECKING:
    from concurrent.futures import Future  # which a worker needs in tasks with calls only
    from importlib.machinery import ModuleSpec
    from pathlib import Path
    from types import ModuleType

    import redis

P = ParamSpec("P")
T = TypeVar("T")

MOST_CALLS: Final = 1000
"""Calls of a task that have not ended. One more waits until there is room."""
_STEP: Final = 64
"""Calls of a map that are sent together."""

Arguments = tuple[Sequence[Any], Mapping[str, Any]]


Range = tuple[str, int, int | None]
"""Bytes of a block: its name, their start, and their end (None: the end of the block)."""


class NodeMemory(Protocol):
    """Access of a task to the memory of nodes, for blocks (:mod:`farcall_common.objects.node_blocks`).

    ``directory``: the submitter's directory on this node; None: the node has no room, or the task cannot see the
    directory. ``key``: the key that seals blocks; empty: blocks are not sealed.
    """

    directory: Path | None
    key: bytes

    def address(self) -> str:
        """Return the address of this node for other nodes; empty if all nodes share their memory.

        :raises StoreUnavailable: if others cannot reach it.
        """

    def fetch(self, node: str, parts: Sequence[Range]) -> list[memoryview]:
        """Parts of blocks of a node. They have an end.

        :raises ObjectGone: if they cannot be had.
        """

    def delete_below(self, node: str, prefix: str) -> None:
        """Delete blocks of a node, if it can be reached."""


class Caller(Protocol):
    """What makes the calls of a task and sends its progress, in its worker. May be used from any thread."""

    task_id: str
    attempt: int

    def submit(
        self, function: Callable[..., Any] | str, calls: Sequence[Arguments], options: TaskOptions | None
    ) -> Sequence[Future[Any]]:
        """Call a function, once for each of these arguments."""

    def buffer(self, size: int) -> memoryview:
        """Memory for a value."""

    def progress(self, done: int | float, total: int | float | None, text: str) -> None:
        """Show how far the task is. The numbers are finite."""

    def scratch(self) -> Path:
        """A directory of the task; it exists."""

    def shared_dir(self) -> Path:
        """A directory of its submitter; it exists."""

    def memory_dir(self) -> Path | None:
        """A directory of its submitter in memory; it exists."""

    def node_memory(self) -> NodeMemory:
        """Access to the memory of nodes."""

    def valkey_url(self) -> str:
        """The address of its submitter's Valkey, with the password."""


class RunningTask:
    """The task that runs in this process; see :func:`current`. May be used from any thread of the task.

    :ivar task_id: of the task: as its submitter knows it, or of the call if it is one of another task.
    :ivar attempt: counted from 1.
    """

    def __init__(self, caller: Any, options: Any = None) -> None:
        # Any above: other checkers than mypy do not know msgspec's metaclass.
        self._caller: Caller = caller
        self._options: TaskOptions | None = options
        self.task_id: str = caller.task_id
        self.attempt: int = caller.attempt

    def submit(self, fn: Callable[P, T] | str, /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``fn(*args, **kwargs)`` in another worker.

        The future is one of :mod:`concurrent.futures`; ``asyncio.wrap_future`` makes it one that can be awaited. It
        raises what the future of a task raises: :class:`~farcall_common.errors.TaskFailed`, as an instance of the
        nearest built-in class of what the function raised, too. It can be cancelled until the call has ended. What has
        not ended with the task is cancelled. Callbacks run in a thread that receives results, and must not wait for
        others.

        :param fn: a function; or, of those that the task was submitted with (``callees``), the id or the hash.
        :raises SerializationError: if the function or an argument cannot travel.
        :raises ConfigurationError: if the task has ended, or has no such callee.
        """
        [future] = self._caller.submit(fn, [(args, kwargs)], self._options)
        return future

    def call(self, fn: Callable[P, T] | str, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call :meth:`submit`, and wait for the value."""
        return self.submit(fn, *args, **kwargs).result()

    def map(self, fn: Callable[..., T] | str, /, *iterables: Iterable[Any]) -> Iterator[T]:
        """Run the built-in ``map`` in parallel: values in the order of the arguments.

        Up to :data:`MOST_CALLS` calls are under way; the next are made while values are taken. Those that are left are
        cancelled when the iterator is closed, or when a call fails.
        """
        calls: Iterator[Arguments] = ((args, {}) for args in zip(*iterables, strict=False))
        pending: collections.deque[Future[T]] = collections.deque()
        self._fill(fn, calls, pending)
        return self._values(fn, calls, pending)

    def buffer(self, size: int) -> memoryview:
        """Memory of ``size`` bytes for a large value, in which other workers read it where the function writes it: what
        the function returns is not copied then, if it contains the whole buffer, and nothing else refers to that. The
        bytes are arbitrary at first.

        For a program with NumPy, ``numpy.frombuffer(current().buffer(size), dtype)`` is an array there. Return
        ``pickle.PickleBuffer(buffer)`` for a value of bytes: the call that gets it has a ``memoryview``.

        :raises ValueError: if there is no room of that size.
        :raises ConfigurationError: if the task has ended.
        """
        return self._caller.buffer(size)

    def progress(self, done: float, total: float | None = None, text: str = "") -> None:
        """Say how far the task is; ``future.progress``, :attr:`TaskInfo.progress` and ``farcall tasks watch`` show it.

        It is cheap enough for an inner loop: numbers alone are sent five times a second at most, the last ones at the
        latest when the function has ended. A call with another text, or with ``done`` equal to ``total``, is sent at
        once, ten a second of all calls together. Of a stage of a graph, and of a call of another task, nothing is
        shown.

        :param done: how much is done, in any unit.
        :param total: of how much; None: not known.
        :param text: what the function is doing. 200 characters are kept, without control characters.
        :raises TypeError: for a number or a text of another type.
        :raises ValueError: for a number that is not finite.
        :raises ConfigurationError: if the task has ended, or in a process that the task has started.
        """
        if type(done) is not int:
            done = _number(done)
        if total is not None and type(total) is not int:
            total = _number(total)
        if type(text) is not str:
            if not isinstance(text, str):
                raise TypeError(f"text is a str, not {type(text).__name__}")
            text = str.__str__(text)  # without what a subclass does
        self._caller.progress(done, total, text)

    @property
    def scratch(self) -> Path:
        """A directory for temporary files of this task alone, on a local disk of its node. It is made at its first use,
        and deleted after the task, however that ends.

        :raises OSError: if it cannot be made.
        :raises ConfigurationError: if the task has ended.
        """
        return self._caller.scratch()

    @property
    def shared_dir(self) -> Path:
        """A directory of the task's submitter at this endpoint: all of the submitter's tasks there read and write it,
        on all nodes. It is on the file system of the endpoint's working directory. The endpoint deletes what was not
        changed for a day, and the oldest files when there is no room; both are settings of it (``data``).

        :raises OSError: if it cannot be made.
        :raises ConfigurationError: if the task has ended.
        """
        return self._caller.shared_dir()

    @property
    def memory_dir(self) -> Path | None:
        """Directory like :attr:`shared_dir`, but in the node's memory: its files need no disk, and can be mapped. None
        if the endpoint has several nodes, or the node has no room for it. It is deleted when the endpoint stops.

        :raises ConfigurationError: if the task has ended.
        """
        return self._caller.memory_dir()

    def node_memory(self) -> NodeMemory:
        """The memory of nodes for blocks of the task's submitter, which tasks of other nodes read by way of the
        managers; see :mod:`farcall_common.objects.node_blocks`.

        :raises ConfigurationError: if the task has ended.
        """
        return self._caller.node_memory()

    def valkey_url(self) -> str:
        """The address of a Valkey (Redis) server of the task's submitter at this endpoint, with its password; for
        clients in any language. The endpoint starts the server at the first request, for all tasks of the submitter. It
        keeps nothing on disk, and ends ten minutes after the submitter's last task (``data.valkey_idle``).

        Ask again when a client has lost its connection: if the server was killed, that starts another one.

        :raises ConfigurationError: if the endpoint has no server program or offers none, or if the task has ended.
        :raises Unavailable: if the server cannot be started, or too many submitters have one.
        """
        return self._caller.valkey_url()

    def redis(self, **options: Any) -> redis.Redis:
        """A client of :meth:`valkey_url`; needs the package ``redis`` where the task runs.

        ::

            counter = current().redis(decode_responses=True)
            counter.incr("done")

        :param options: of ``redis.Redis``.
        :raises ConfigurationError: without the package, and as :meth:`valkey_url`.
        :raises Unavailable: as :meth:`valkey_url`.
        """
        try:
            import redis  # which most tasks do not need
        except ImportError as error:
            raise ConfigurationError(
                "current().redis() needs the package redis where the task runs.",
                hint="Install redis there, or name it in requirements of the task's environment.",
            ) from error
        return redis.Redis.from_url(self.valkey_url(), **options)

    def options(self, **changes: Unpack[AttemptOptionsDict]) -> RunningTask:
        """The same task, whose calls have other options than it has itself.

        :param changes: ``walltime_s``, ``memory_bytes``, ``max_output_bytes``, ``idempotent``, ``max_attempts``,
            ``retries``, ``retry_on``, ``retry_delay_s``.
        :raises TypeError: for another option.
        :raises ValueError: for a value that an option cannot have.
        """
        if unknown := changes.keys() - AttemptOptionsDict.__optional_keys__:
            raise TypeError(unknown_option(sorted(unknown)[0], AttemptOptionsDict.__optional_keys__, what="calls"))
        return RunningTask(self._caller, (self._options or TaskOptions()).changed(**changes))

    def _fill(
        self, fn: Callable[..., T] | str, calls: Iterator[Arguments], pending: collections.deque[Future[T]]
    ) -> None:
        while len(pending) <= MOST_CALLS - _STEP and (step := list(itertools.islice(calls, _STEP))):
            pending += self._caller.submit(fn, step, self._options)

    def _values(
        self, fn: Callable[..., T] | str, calls: Iterator[Arguments], pending: collections.deque[Future[T]]
    ) -> Iterator[T]:
        try:
            while pending:
                yield pending.popleft().result()
                self._fill(fn, calls, pending)
        finally:
            for future in pending:
                future.cancel()


def _number(value: Any) -> int | float:
    """A finite number of any numeric type, such as NumPy's, as Python's own."""
    if type(value) is float:
        number = value
    else:
        try:
            return int(operator.index(value))
        except TypeError:
            if not hasattr(value, "__float__"):  # float() would read a str, too
                raise TypeError(f"expected a number, got {type(value).__name__}") from None
        try:
            number = float(value)
        except OverflowError:  # of a fraction
            number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number}")
    return number


seals_memory = False
"""Whether tasks of other submitters could change what this process puts into memory: then references to objects there
have their SHA-256. Set by a worker."""
_current: RunningTask | None = None
"""The task that runs, once it was asked for."""
_find: Callable[[], RunningTask] | None = None
_find_here: Callable[[], RunningTask | None] | None = None
"""In a process that is no worker and runs several tasks: finds that of this thread."""


def current() -> RunningTask:
    """The task that runs in this process, for functions that call other functions or say how far they are.

    :raises ConfigurationError: outside of a task, and in processes that a task starts.
    """
    task = _current
    if task is not None:
        return task
    if _find is not None:
        return _find()
    if _find_here is not None and (here := _find_here()) is not None:
        return here
    if "FARCALL_TASK_ID" in os.environ:
        raise not_in_this_process()
    raise ConfigurationError(
        "current() is for functions that run as a task, and no task runs here.",
        hint="Submit the function that calls it.",
    )


def not_in_this_process() -> ConfigurationError:
    """The error of :func:`current` in a process that a task has started."""
    return ConfigurationError(
        "current() works in the process of the task only, and the task has started this one.",
        hint="Make the calls in the function that was submitted, or in threads of it.",
    )


def has_ended() -> ConfigurationError:
    """The error of what a task has left running, when it makes calls."""
    return ConfigurationError(
        "The task has ended: what it left running cannot make calls.",
        hint="Wait for threads before the function returns.",
    )


def offer_here(find: Callable[[], RunningTask | None]) -> None:
    """Let :func:`current` find the task of a thread, in a cloud in memory.

    :param find: returns it; None if the thread runs none.
    """
    global _find_here
    _find_here = find


# -- in a worker -------------------------------------------------------------------------------------------------------


def offer(find: Callable[[], RunningTask]) -> None:
    """Let :func:`current` find the running task, also as ``farcall.current`` where the SDK is not installed.

    :param find: returns the task that runs now; raises ConfigurationError if there is none.
    """
    global _find
    if _find is None:
        sys.meta_path.append(_StandIn())
        os.register_at_fork(after_in_child=forget)  # a child of a task is not the task
    _find = find


def in_worker() -> bool:
    """Whether this process is a worker, or was forked from one."""
    return _find is not None


def remember(task: RunningTask) -> None:
    """:func:`current` is this task until :func:`forget`."""
    global _current
    _current = task


def forget() -> None:
    """The task has ended."""
    global _current
    _current = None


class _StandIn:
    """Finds a module ``farcall`` with :func:`current`, if no other finder finds the SDK."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if name != _SDK:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)  # type: ignore[arg-type]  # all of a loader that imports need

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002
        return None

    def exec_module(self, module: ModuleType) -> None:
        from farcall_common.payload.shipped_modules import STUB

        exec(compile(STUB, "<in place of farcall>", "exec"), module.__dict__)  # noqa: S102 - our own text
        missing = module.__getattr__

        def find(name: str) -> Any:
            if name not in _OBJECTS:
                return missing(name)
            import importlib  # here, and by name: most tasks use no objects

            found = importlib.import_module(_OBJECTS[name])
            return found if name == "store" else getattr(found, name)

        module.__getattr__ = find  # type: ignore[method-assign]
        module.current = current  # type: ignore[attr-defined]


_SDK: Final = "farcall"
_OBJECTS: Final = {"Reference": "farcall_common.objects.references", "store": "farcall_common.objects.store"}
"""What of the SDK is loaded when a task asks for it."""
