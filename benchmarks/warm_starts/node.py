"""A node that is measured, in a process of its own: ``python -m benchmarks.warm_starts.node SPECIFICATION``.

It starts workers with the launcher that a manager has, serves it as a manager does, and answers the orders that it
reads as lines. Times are in monotonic seconds, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import psutil

from benchmarks.warm_starts.functions import packed
from benchmarks.warm_starts.runc import RuncLauncher
from farcall_common.environments import Environment
from farcall_common.payload import Serializer
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.contracts.manager_worker import Done, Ready
from farcall_endpoint.host.process_reaper import descendants, kill_trees, read_processes
from farcall_endpoint.host.slots import Slot
from farcall_endpoint.manager.core.events import EnvironmentFailed, EnvironmentReady, Event
from farcall_endpoint.manager.shell.launcher import FreshProcessLauncher, WorkerLauncher
from farcall_endpoint.manager.shell.worker_process import WorkerProcess, Workplace
from farcall_endpoint.worker.settings import WorkerSettings

RUNC: Final = "runc"
_LIMIT_S: Final = 60.0
_PREPARATION_LIMIT_S: Final = 600.0
_STEP_S: Final = 0.02
"""Between two measurements, so that the machine is idle again."""
_SETTLED_S: Final = 0.5
_AT_ONCE: Final = 4
"""One-shot workers at the same time."""


class Specification(msgspec.Struct, frozen=True):
    """What a node does.

    :param type, location, preload: of its environment; an empty type: the endpoint's own Python; ``runc``: the peer.
    :param directory: of its own, which exists; all that it writes is below it.
    :param fork: whether its workers are forks, each of ``spares`` in advance if there are any.
    :param keeps: whether a worker runs all tasks; else each has its own.
    """

    type: str
    location: str
    directory: str
    preload: tuple[str, ...] = ()
    fork: bool = False
    spares: int = 0
    keeps: bool = False


class Starts(msgspec.Struct, frozen=True, tag=True):
    """Start so many workers at once, each for a task with this function."""

    function: str
    count: int = 1


class Memory(msgspec.Struct, frozen=True, tag=True):
    """Measure the memory of so many workers that have run this function."""

    function: str
    count: int


class OneShots(msgspec.Struct, frozen=True, tag=True):
    """Run so many tasks, each in a worker of its own, and note what is there before and after each part."""

    function: str
    count: int
    parts: int = 1


Order = Starts | Memory | OneShots


class Times(NamedTuple):
    """Of one start: when the first one was requested, the worker was ready, its result was here; and the result."""

    requested_at: float
    ready_at: float
    result_at: float
    result: float


class MemoryUse(NamedTuple):
    """Proportional memory in bytes: of all workers, by what it is, and of the template with its container."""

    heap: int
    files: int
    template: int


class Sample(NamedTuple):
    """What a node has after so many one-shot workers."""

    done: int
    seconds: float
    descriptors: int
    manager_bytes: int
    template_bytes: int
    processes: int
    mounts: int
    files: int


@dataclasses.dataclass
class Node:
    """A launcher, and an environment that is prepared."""

    launcher: WorkerLauncher
    environment: Environment | None
    directory: Path
    next_id: int = 0
    events: list[Event] = dataclasses.field(default_factory=list)
    idle_processes: int = 0
    kept: WorkerProcess | None = None

    def launch(self) -> WorkerProcess:
        """A worker that starts."""
        self.next_id += 1
        return self.launcher.launch(self.next_id, slot=0, submitter="", environment=self.environment)

    def serve_until(self, condition: Callable[[], bool], limit_s: float = _LIMIT_S) -> None:
        """Do what a manager does meanwhile."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("a node has not become what it should")
            select.select([self.launcher], [], [], _STEP_S)
            self.events += self.launcher.serve()

    def run(self, workers: list[WorkerProcess], function: str, *, are_ready: bool = False) -> list[Times]:
        """Give a task to each worker as soon as it is ready. All were requested now, for :class:`Times`."""
        requested_at = time.monotonic()
        return _Round(self, workers, function, requested_at).run(are_ready=are_ready)

    def starts(self, function: str, count: int) -> list[Times]:
        """Start so many workers at once, each for a task; they have ended when this returns."""
        if self.kept is not None:
            return self.run([self.kept], function, are_ready=True)
        packed(function)  # its submitter's work
        workers: list[WorkerProcess] = []
        requested_at = time.monotonic()
        try:
            workers += (self.launch() for _ in range(count))
            return _Round(self, workers, function, requested_at).run()
        finally:
            for worker in workers:
                end(worker)
            self.events += self.launcher.serve()

    def memory(self, function: str, count: int) -> MemoryUse:
        """The memory of so many workers."""
        workers: list[WorkerProcess] = []
        try:
            workers += (self.launch() for _ in range(count))
            self.run(workers, function)
            own = {worker.pid for worker in workers}
            templates = [pid for pid in self._processes() if pid not in own and _is_of_template(pid)]
            each = [_proportional(pid) for pid in own]
            return MemoryUse(
                sum(heap for heap, _ in each),
                sum(files for _, files in each),
                sum(sum(_proportional(pid)) for pid in templates),
            )
        finally:
            for worker in workers:
                end(worker)

    def one_shots(self, function: str, count: int, parts: int) -> list[Sample]:
        """Run so many tasks, each in a new worker, four at a time."""
        packed(function)
        samples = [self._sample(0, 0.0)]
        seconds, done = 0.0, 0
        for part in range(parts):
            goal = count * (part + 1) // parts
            began_at = time.monotonic()
            _OneShots(self, function, goal - done).run()
            seconds += time.monotonic() - began_at
            done = goal
            samples.append(self._sample(done, seconds))
        return samples

    def _sample(self, done: int, seconds: float) -> Sample:
        self.rest()
        me = psutil.Process()
        pids = self._processes()
        return Sample(
            done,
            seconds,
            me.num_fds(),
            me.memory_info().rss,
            sum(psutil.Process(pid).memory_info().rss for pid in pids if _is_of_template(pid)),
            len(pids),
            len(Path("/proc/self/mounts").read_text().splitlines()),
            sum(1 for _ in self.directory.rglob("*")),
        )

    # -- an idle node --------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Wait until the node is idle again, with its children that were forked in advance."""
        self.serve_until(lambda: len(pids := self._processes()) >= self.idle_processes and all(map(_sleeps, pids)))
        time.sleep(_STEP_S)

    def settle(self) -> None:
        """Wait until nothing has changed for a while: what is there then is what an idle node has."""
        seen, since = self._processes(), time.monotonic()

        def is_settled() -> bool:
            nonlocal seen, since
            found = self._processes()
            if found != seen or not all(map(_sleeps, found)):
                seen, since = found, time.monotonic()
            return time.monotonic() - since > _SETTLED_S

        self.serve_until(is_settled)
        self.idle_processes = len(seen)

    def _processes(self) -> set[int]:
        """All processes below this one."""
        processes = read_processes()
        return {pid for pid in descendants({os.getpid()}, processes) if not processes[pid].is_zombie} - {os.getpid()}


class _Round:
    """Workers that run one task each. The launcher is served meanwhile, as a manager does."""

    def __init__(self, node: Node, workers: list[WorkerProcess], function: str, requested_at: float) -> None:
        self._node = node
        self._packet, self._body = packed(function)
        self._requested_at = requested_at
        self._workers = {worker.channel.fileno(): worker for worker in workers}
        self._ready_at: dict[int, float] = {}
        self._found: dict[int, Times] = {}

    def run(self, *, are_ready: bool = False) -> list[Times]:
        """The times of all, in order of the workers."""
        poll = select.poll()
        poll.register(self._node.launcher, select.POLLIN)
        for descriptor in self._workers:
            poll.register(descriptor, select.POLLIN)
            poll.register(self._workers[descriptor].pidfd, select.POLLIN)
            if are_ready:
                self._ready(descriptor)
        give_up_at = time.monotonic() + _LIMIT_S
        while len(self._found) < len(self._workers):
            due_at = self._node.launcher.next_deadline()
            readable = poll.poll(max(0.0, min(due_at, give_up_at) - time.monotonic()) * 1000)
            is_due = time.monotonic() >= due_at
            for descriptor, _ in readable:
                if descriptor == self._node.launcher.fileno():
                    is_due = True
                elif descriptor not in self._workers:
                    raise RuntimeError(f"a worker died: {self._last_words(descriptor)}")
                elif self._receive(descriptor):
                    poll.unregister(descriptor)
            if is_due:
                self._node.events += self._node.launcher.serve()
            if time.monotonic() > give_up_at:
                raise TimeoutError("a worker has not answered")
        return [self._found[descriptor] for descriptor in self._workers]

    def _last_words(self, pidfd: int) -> str:
        return next(worker.tails()[1] for worker in self._workers.values() if worker.pidfd == pidfd)

    def _ready(self, descriptor: int) -> None:
        self._ready_at[descriptor] = time.monotonic()
        self._workers[descriptor].channel.order(self._packet, self._body)

    def _receive(self, descriptor: int) -> bool:
        """Take a packet; whether it was the result."""
        worker = self._workers[descriptor]
        received = worker.channel.receive()
        if received is None:
            raise RuntimeError(f"a worker died: {worker.tails()[1]}")
        packet, body = received
        if isinstance(packet, Ready):
            self._ready(descriptor)
        if not isinstance(packet, Done):
            return False
        if packet.error is not None:
            raise RuntimeError(str(packet.error))
        result_at = time.monotonic()
        result = float(Serializer().deserialize(bytes(body)))  # type: ignore[arg-type]
        self._found[descriptor] = Times(self._requested_at, self._ready_at[descriptor], result_at, result)
        return True


class _OneShots:
    """Workers that each run one task and are killed, as many at a time as a small node has; the next begins when one
    has ended."""

    def __init__(self, node: Node, function: str, count: int) -> None:
        self._node = node
        self._packet, self._body = packed(function)
        self._left = count
        self._workers: dict[int, WorkerProcess] = {}  # by descriptors of channels and of processes
        self._poll = select.poll()

    def run(self) -> None:
        """Run all tasks."""
        launcher = self._node.launcher
        self._poll.register(launcher, select.POLLIN)
        for _ in range(_AT_ONCE):
            self._start()
        try:
            while self._workers:
                due_at = launcher.next_deadline()
                wait_s = max(0.0, min(due_at - time.monotonic(), _LIMIT_S))
                readable = self._poll.poll(wait_s * 1000)
                if not readable and wait_s == _LIMIT_S:
                    raise TimeoutError("a worker has not answered")
                for descriptor, _ in readable:
                    if descriptor != launcher.fileno():
                        self._continue(descriptor)
                launcher.serve()
        finally:
            for worker in set(self._workers.values()):
                end(worker)

    def _start(self) -> None:
        if self._left:
            self._left -= 1
            worker = self._node.launch()
            for descriptor in (worker.channel.fileno(), worker.pidfd):
                self._workers[descriptor] = worker
                self._poll.register(descriptor, select.POLLIN)

    def _continue(self, descriptor: int) -> None:
        worker = self._workers[descriptor]
        if descriptor == worker.pidfd:
            for each in (worker.channel.fileno(), worker.pidfd):
                if self._workers.pop(each, None) is not None:
                    self._poll.unregister(each)
            worker.reap()
            self._start()
            return
        received = worker.channel.receive()
        if received is None or isinstance(received[0], Done):
            if received is None or received[0].error is not None:  # type: ignore[union-attr]
                raise RuntimeError(f"a worker did not run its task: {worker.tails()[1]}")
            self._poll.unregister(descriptor)
            del self._workers[descriptor]
            _kill(worker)
        elif isinstance(received[0], Ready):
            worker.channel.order(self._packet, self._body)


def _kill(worker: WorkerProcess) -> None:
    worker.kill_remote()
    kill_trees({worker.pid})


def end(worker: WorkerProcess) -> None:
    """Kill a worker, and wait for its end."""
    _kill(worker)
    select.select([worker.pidfd], [], [], _LIMIT_S)
    worker.reap()


@contextlib.contextmanager
def running_node(specification: Specification) -> Iterator[Node]:
    """A node as specified, idle."""
    directory = Path(specification.directory)
    for name in ("work", "cache", "tmp"):
        (directory / name).mkdir(exist_ok=True)
    tempfile.tempdir = str(directory / "tmp")
    environment: Environment | None = None
    launcher: WorkerLauncher
    if specification.type == RUNC:
        launcher = RuncLauncher(Path(specification.location), directory)
    else:
        place = Workplace(
            working_dir=directory / "work",
            environment=dict(os.environ),
            slots=(Slot(0, threads=1),),
            settings=WorkerSettings(),
        )
        settings = EnvironmentSettings(
            cache_dir=str(directory / "cache"),
            fork=specification.fork,
            tasks_per_worker=0 if specification.type else 1,
        )
        launcher = FreshProcessLauncher(place, environments=settings, spares=specification.spares)
        if specification.type:
            environment = Environment(
                type=specification.type, location=specification.location, preload=specification.preload
            )
    node = Node(launcher, environment, directory)
    try:
        if environment is not None:
            _prepare(node, environment)
        if specification.fork:
            _wait_for_template(node)
        if specification.keeps:
            node.kept = node.launch()
            node.run([node.kept], "nothing")
        node.settle()
        yield node
    finally:
        if node.kept is not None:
            end(node.kept)
        launcher.close()


def _prepare(node: Node, environment: Environment) -> None:
    node.launcher.trust(environment)
    node.launcher.prepare(environment)
    ends = EnvironmentReady | EnvironmentFailed
    node.serve_until(lambda: any(isinstance(event, ends) for event in node.events), _PREPARATION_LIMIT_S)
    for event in node.events:
        if isinstance(event, EnvironmentFailed):
            raise RuntimeError(event.record.message)
    node.events.clear()


def _wait_for_template(node: Node) -> None:
    """Start workers until they are forks: a fresh one has its template started."""
    while True:
        worker = node.launch()
        try:
            node.run([worker], "nothing")
            if worker.fork is not None:
                return
            # Templates of the endpoint's own Python are no event.
            until = time.monotonic() + 2 * _SETTLED_S
            node.serve_until(lambda: time.monotonic() > until or bool(node.events))  # noqa: B023
            node.events.clear()
        finally:
            end(worker)


def _sleeps(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() in (psutil.STATUS_SLEEPING, psutil.STATUS_IDLE)
    return False


def _is_of_template(pid: int) -> bool:
    """Whether a process is a template, its container's or its fork's: forks have its command line."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "farcall_endpoint.worker.template" in " ".join(psutil.Process(pid).cmdline())
    return False


def _proportional(pid: int) -> tuple[int, int]:
    """The proportional memory of a process in bytes: of its own data, and of files."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines[1:])}
    return found["Pss_Anon"], found["Pss_File"] + found["Pss_Shmem"]


_answer: Final = msgspec.json.Encoder().encode


def main() -> None:
    """Answer orders until there are no more: an empty list when the node is idle, then one for each line."""
    specification = msgspec.json.decode(sys.argv[1], type=Specification)
    with running_node(specification) as node:
        print("[]", flush=True)
        for line in sys.stdin:
            order: Order = msgspec.json.decode(line, type=Order)
            node.rest()
            match order:
                case Starts(function=function, count=count):
                    answer: object = node.starts(function, count)
                case Memory(function=function, count=count):
                    answer = node.memory(function, count)
                case OneShots(function=function, count=count, parts=parts):
                    answer = node.one_shots(function, count, parts)
            print(_answer(answer).decode(), flush=True)


if __name__ == "__main__":
    main()
