"""A launcher with environments, in the test's own process, and workers that run functions in them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import select
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_common.payload import Serializer
from farcall_common.task_options import TaskOptions
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.contracts.manager_worker import Begun, Done, NewModules, Order, Ready, Run
from farcall_endpoint.environments import NotLocated
from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.slots import Slot
from farcall_endpoint.manager.core.events import EnvironmentFailed, EnvironmentProgress, EnvironmentReady, Event
from farcall_endpoint.manager.shell.launcher import FreshProcessLauncher
from farcall_endpoint.manager.shell.worker_process import Confinement, WorkerProcess, Workplace
from farcall_endpoint.worker.settings import WorkerSettings
from tests.waiting import wait_until

T = TypeVar("T")

SUBMITTER = "00000000-0000-4000-8000-000000000001"


@dataclasses.dataclass
class Node:
    """A launcher, its directories, and what it has said about environments."""

    launcher: FreshProcessLauncher
    directory: Path
    events: list[Event] = dataclasses.field(default_factory=list)
    workers: list[WorkerProcess] = dataclasses.field(default_factory=list)
    begun: Begun | None = None
    modules: list[str] = dataclasses.field(default_factory=list)  # that workers reported

    @property
    def cache(self) -> Path:
        """What was prepared."""
        return self.directory / "cache"

    @property
    def start_logs(self) -> list[str]:
        """What runners printed."""
        return [path.read_text() for path in (self.directory / "logs").rglob("*.log")]

    def serve(self) -> None:
        """Do what is due."""
        self.events += self.launcher.serve()

    def prepare(self, environment: Environment) -> EnvironmentReady | EnvironmentFailed:
        """Prepare an environment; how that ended."""
        self.launcher.prepare(environment)
        return self.answer(environment)

    def answer(self, environment: Environment) -> EnvironmentReady | EnvironmentFailed:
        """How a preparation ended."""
        found: list[EnvironmentReady | EnvironmentFailed] = []

        def has_ended() -> bool:
            self.serve()
            found.extend(
                event
                for event in self.events
                if isinstance(event, EnvironmentReady | EnvironmentFailed) and event.key == environment.key
            )
            return bool(found)

        wait_until(has_ended)
        self.events = [event for event in self.events if event not in found]
        return found[-1]

    def problem(self, environment: Environment) -> ErrorRecord:
        """Why an environment cannot be prepared."""
        answer = self.prepare(environment)
        assert isinstance(answer, EnvironmentFailed), answer
        return answer.record

    def texts(self, environment: Environment) -> list[str]:
        """What it said about the progress of a preparation."""
        return [
            event.text
            for event in self.events
            if isinstance(event, EnvironmentProgress) and event.key == environment.key
        ]

    def launch(self, environment: Environment | None, *, submitter: str = "") -> WorkerProcess:
        """A worker that starts."""
        return self.located(lambda: self._launch(environment, submitter))

    def _launch(self, environment: Environment | None, submitter: str) -> WorkerProcess:
        worker = self.launcher.launch(len(self.workers), slot=0, submitter=submitter, environment=environment)
        self.workers.append(worker)
        return worker

    def located(self, do: Callable[[], T]) -> T:
        """What a function returns, as soon as locations were looked up for it."""
        found: list[T] = []

        def is_done() -> bool:
            with contextlib.suppress(NotLocated):
                found.append(do())
                return True
            self.serve()
            return False

        wait_until(is_done)
        return found[0]

    def ready(self, environment: Environment | None, *, submitter: str = "") -> WorkerProcess:
        """A worker that is ready, of an environment that is prepared for this."""
        if environment is not None:
            answer = self.prepare(environment)
            assert isinstance(answer, EnvironmentReady), answer
        worker = self.launch(environment, submitter=submitter)
        packet = self.packet(worker)
        assert isinstance(packet, Ready)
        return worker

    def packet(self, worker: WorkerProcess) -> Any:
        """The next packet of a worker; fails with its last words if there is none."""
        packets: list[Any] = []

        def received() -> bool:
            self.serve()
            with contextlib.suppress(BlockingIOError):
                received = worker.channel.receive_shared()
                if received is not None:
                    packets.append(received)
            if not packets and is_dead(worker):
                raise AssertionError(f"the worker died: {worker.tails()}, {self.died(worker)}")
            return bool(packets)

        wait_until(received)
        packet, body = packets[0]
        if isinstance(packet, Done):
            return packet, bytes(body.view() if hasattr(body, "view") else body)
        return packet

    def run(
        self, worker: WorkerProcess, function: Callable[..., Any], *args: object, submitter: str = "", **options: Any
    ) -> Any:
        """The value that a function returns in a worker."""
        done, result = self.ended(worker, function, *args, submitter=submitter, **options)
        assert done.error is None, done.error
        return Serializer().deserialize(result)

    def ended(
        self, worker: WorkerProcess, function: Callable[..., Any], *args: object, submitter: str = "", **options: Any
    ) -> tuple[Done, bytes]:
        """How a function ends in a worker."""
        serializer = Serializer()
        body, payload = serializer.pack_function(function), serializer.pack_call(args)
        function_hash = hashlib.sha256(body).hexdigest()
        order = Order("t", 1, function_hash, len(payload), TaskOptions(**options), submitter=submitter)
        worker.channel.order(Run((order,), ((function_hash, len(body)),)), [body, payload])
        packet = self.packet(worker)
        while not isinstance(packet, tuple):
            self.begun = packet if isinstance(packet, Begun) else self.begun
            self.modules += packet.names if isinstance(packet, NewModules) else ()
            packet = self.packet(worker)
        return packet

    def died(self, worker: WorkerProcess) -> str:
        """Wait for the end of a worker; how it died."""

        def has_ended() -> bool:
            self.serve()
            return is_dead(worker)

        wait_until(has_ended)
        self.workers.remove(worker)
        return worker.reap()

    def kill(self, worker: WorkerProcess) -> str:
        """Kill a worker; how it died."""
        worker.kill_remote()
        process_reaper.kill_trees({worker.pid})
        return self.died(worker)


def is_dead(worker: WorkerProcess) -> bool:
    """Whether the process of a worker has ended."""
    return bool(select.select([worker.pidfd], [], [], 0)[0])


@contextlib.contextmanager
def running_node(
    directory: Path,
    settings: EnvironmentSettings | None = None,
    *,
    variables: Mapping[str, str] | None = None,
    confinement: Confinement | None = None,
    processes: int = 0,
) -> Iterator[Node]:
    """A launcher that is closed at the end, with all its workers killed."""
    given = EnvironmentSettings() if settings is None else settings
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    place = Workplace(
        working_dir=directory / "work",
        environment=dict(os.environ) if variables is None else variables,
        slots=(Slot(0, threads=1),),
        settings=WorkerSettings(),
        confinement=confinement,
        private=[directory / "private"],
        processes=processes,
    )
    launcher = FreshProcessLauncher(
        place,
        environments=msgspec.structs.replace(given, cache_dir=given.cache_dir or str(directory / "cache")),
        log_dir=directory / "logs",
    )
    node = Node(launcher, directory)
    try:
        yield node
    finally:
        for worker in list(node.workers):
            node.kill(worker)
        launcher.close()
