"""Worker launcher: starts worker processes with their share of the node."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_common.limits import KEPT_OUTPUT_BYTES
from farcall_common.plain_text import plain
from farcall_endpoint import process_reaper
from farcall_endpoint.environments.settings import EnvironmentSettings
from farcall_endpoint.isolation import bubblewrap
from farcall_endpoint.isolation.environment import for_submitter
from farcall_endpoint.isolation.paths import readable_paths
from farcall_endpoint.manager.events import Event
from farcall_endpoint.manager.slots import Slot
from farcall_endpoint.output import NOTHING, Printed, Stream
from farcall_endpoint.worker.boot import Boot, Descriptors
from farcall_endpoint.worker.capture import read_end, read_from, read_tail
from farcall_endpoint.worker.channel import Channel, channel_pair
from farcall_endpoint.worker.directories import name_of, submitter_directory
from farcall_endpoint.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from farcall_endpoint.environments.launcher import Container
    from farcall_endpoint.environments.templates import ForkedProcess
    from farcall_endpoint.manager.environment_workers import EnvironmentWorkers

_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
ACCELERATORS: Final = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_ROCM_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""AMD's libraries read these too, as a choice among the devices in ``ROCR_VISIBLE_DEVICES``."""
_LAST_LINES: Final = 8
_SIGNALLED: Final = 128
"""As shells do, bubblewrap ends with the number of the signal that killed its command above this one."""


class Process(Protocol):
    """A child process, or a fork of a template."""

    pid: int

    def wait(self) -> int:
        """Wait for its end; the exit code, or the negative number of the signal that killed it."""


@dataclasses.dataclass(frozen=True)
class WorkerProcess:
    """A worker process: the leader of a session, and so of a process group.

    ``worker_end`` is a copy of the worker's socket: while it is open, packets can be read after the worker's death.
    ``pidfd`` becomes readable then. ``namespaced``: the process is bubblewrap's or a runner's, and the worker is below
    it. ``container`` or ``fork``: the same as ``process``, if it is one; ``ended`` makes sure that nothing is left of a
    container, and returns its last words if the worker did not begin. ``environment_key``: of its environment.
    """

    process: Process
    channel: Channel
    worker_end: socket.socket
    pidfd: int
    output: tuple[int, int]
    namespaced: bool = False
    environment_key: str = ""
    container: Container | None = None
    fork: ForkedProcess | None = None
    ended: Callable[[Container], str] | None = None

    @property
    def worker_pid(self) -> int | None:
        """Of the worker itself, where that is another process and is known."""
        if self.container is not None:
            return self.container.worker_pid or None
        return None if self.fork is None else self.pid

    @property
    def pid(self) -> int:
        """Of the process that the manager started, and of its process group."""
        return self.process.pid

    def kill(self) -> None:
        """Kill the worker and all processes that its tasks started."""
        self.kill_remote()
        process_reaper.kill_trees({self.pid})

    def kill_remote(self) -> None:
        """Kill what is no descendant of the process that the manager started."""
        if self.container is not None:
            self.container.kill_remote()
        elif self.fork is not None:
            self.fork.kill()

    def tails(self) -> tuple[str, str]:
        """The last bytes of standard output and error of a task that runs or has died; empty if that has made them
        unreadable."""
        try:
            stdout, stderr = (read_tail(descriptor) for descriptor in self.output)
        except OSError:
            return "", ""
        return stdout, stderr

    def read_output(self, stdout_from: int, stderr_from: int, *, most_bytes: int) -> tuple[Stream, Stream]:
        """Bytes of standard output and error from these offsets on, negative ones before the end; none if a task has
        made them unreadable."""
        stdout, stderr = self.output
        try:
            return read_from(stdout, stdout_from, most_bytes), read_from(stderr, stderr_from, most_bytes)
        except OSError:
            return NOTHING, NOTHING

    def output_end(self) -> tuple[Printed, bytes] | None:
        """The last bytes of both streams, as of :meth:`tails`; None if there are none."""
        try:
            stdout, stderr = (read_end(descriptor, KEPT_OUTPUT_BYTES) for descriptor in self.output)
        except OSError:
            return None
        if not (stdout.data or stderr.data):
            return None
        return Printed(len(stdout.data), len(stderr.data), stdout.end, stderr.end), stdout.data + stderr.data

    def reap(self) -> str:
        """Reap the dead process and kill the rest of its group; returns how it died."""
        self.kill_remote()
        process_reaper.kill_group(self.pid)  # they are not its descendants any more
        code = self.process.wait()
        words = self._last_words()
        self.channel.close()
        self.worker_end.close()
        for descriptor in (self.pidfd, *self.output):
            os.close(descriptor)
        if self.namespaced and code > _SIGNALLED:
            code = _SIGNALLED - code
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}{words}"
            return f"killed by signal {-code}{words}"
        return f"exit code {code}{words}"

    def _last_words(self) -> str:
        if self.container is None or self.ended is None:
            return ""
        words = self.ended(self.container)
        if not words and not self.container.has_begun:
            words = "; ".join(plain(self.tails()[1]).split("\n")[-_LAST_LINES:]).strip("; ")
        return f": {words}" if words else ""


@dataclasses.dataclass(frozen=True)
class Confinement:
    """What confined workers may read besides the system (``readable``), and by what they are confined."""

    readable: Collection[str]
    landlock: bool
    bubblewrap: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workplace:
    """What the workers of a node have in common.

    :param working_dir: where tasks run; created if it is missing.
    :param environment: variables of the workers.
    :param slots: the shares of the node.
    :param amd: whether accelerators are AMD's.
    :param passed: see :func:`~farcall_endpoint.isolation.environment.for_submitter`.
    :param confinement: of workers of other submitters than the owner, if they are confined.
    :param private: directories of which these may read nothing.
    """

    working_dir: Path
    environment: Mapping[str, str]
    slots: Sequence[Slot]
    settings: WorkerSettings
    amd: bool = False
    passed: Collection[str] = ()
    confinement: Confinement | None = None
    private: Collection[Path] = ()

    def readable(self, variables: Mapping[str, str]) -> list[str]:
        """What tasks of other submitters than the owner may read of the node, with these variables."""
        return readable_paths(
            () if self.confinement is None else self.confinement.readable,
            private=[*self.private, self.working_dir.resolve()],
            home=Path(self.environment.get("HOME", "/")),
            environ=variables,
        )


class SubmitterDirectories:
    """The directories of submitters other than the owner."""

    def __init__(self, working_dir: Path) -> None:
        self._working_dir = working_dir
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def of(self, submitter: str) -> tuple[Path, Path]:
        """The home and the temporary directory of a submitter; they are made if they do not exist."""
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="farcall-submitters-", ignore_cleanup_errors=True)
        name = name_of(submitter)
        home = submitter_directory(self._working_dir.resolve(), name)
        temporary = Path(self._temporary.name).resolve() / name
        for directory in (home, temporary):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return home, temporary

    def remove(self) -> None:
        """Remove the temporary ones."""
        if self._temporary is not None:
            self._temporary.cleanup()


class WorkerLauncher(Protocol):
    """Starts workers."""

    def launch(
        self, worker_id: int, *, slot: int, submitter: str, environment: Environment | None = None
    ) -> WorkerProcess:
        """Start a worker for tasks of one submitter, empty for the owner; it sends Ready on its channel.

        :param environment: one that is prepared; None: the endpoint's own Python.
        :raises OSError: if it cannot be started.
        """

    def refusal(self, environment: Environment) -> ErrorRecord | None:
        """Why tasks of other submitters than the owner may not use an environment; None if they may."""

    def trust(self, environment: Environment) -> None:
        """The owner uses an environment: what it is prepared by needs no confinement."""

    def prepare(self, environment: Environment) -> None:
        """Prepare an environment, without waiting; :meth:`serve` answers."""

    def release(self, key: str) -> None:
        """End the template of an environment."""

    def fileno(self) -> int:
        """Readable when :meth:`serve` has something to do."""

    def serve(self) -> Sequence[Event]:
        """Do what is due, without waiting; what happened to environments."""

    def next_deadline(self) -> float:
        """When :meth:`serve` must be called in any case, in monotonic seconds."""

    def learn(self, environment_key: str, modules: Sequence[str]) -> None:
        """Tasks have imported these in an environment."""

    @property
    def children(self) -> Collection[int]:
        """Process ids of children that are no workers."""

    def close(self) -> None:
        """Free what workers shared."""


class FreshProcessLauncher:
    """Starts each worker as a new interpreter, of the manager's own environment or of one that a task names.

    :param environments: settings of those.
    :param log_dir: of their start logs; None: none are kept.
    """

    def __init__(
        self, place: Workplace, *, environments: EnvironmentSettings | None = None, log_dir: Path | None = None
    ) -> None:
        self._place = place
        self._environment_settings = EnvironmentSettings() if environments is None else environments
        self._log_dir = log_dir
        self._directories = SubmitterDirectories(place.working_dir)
        self._environments: EnvironmentWorkers | None = None
        self._epoll = select.epoll()
        #: Only then forks save more than a template costs, without environments.
        self._one_shot = self._environment_settings.fork and self._environment_settings.tasks_per_worker == 1

    def launch(
        self, worker_id: int, *, slot: int, submitter: str, environment: Environment | None = None
    ) -> WorkerProcess:
        """Start a worker.

        :raises OSError: if the machine lacks processes, descriptors, disk space or the working directory; or if the
            environment cannot be started.
        """
        if environment is not None:
            return self._in_environments().launch(environment, worker_id, slot=slot, submitter=submitter)
        place = self._place
        place.working_dir.mkdir(parents=True, exist_ok=True)  # a task or a cron job may have removed it
        channel, worker_end, claims = channel_pair()
        output = (open_capture_file(), open_capture_file())
        prefix: list[str] = []
        outer, settings = place.environment, place.settings
        if submitter:
            outer, settings, prefix = self._of_submitter(submitter)
        if self._one_shot:
            settings = msgspec.structs.replace(settings, reports_imports=True)
        variables = worker_environment(outer, worker_id=worker_id, slot=place.slots[slot], amd=place.amd)
        variables |= settings.to_variables()
        if self._one_shot:
            boot = Boot(variables, str(place.working_dir.resolve()))
            descriptors = Descriptors(worker_end.fileno(), claims.fileno(), *output)
            fork = self._in_environments().fork_own(boot, descriptors, submitter=submitter, prefix=prefix)
            if fork is not None:
                claims.close()
                return WorkerProcess(fork, channel, worker_end, fork.pidfd, output, namespaced=True, fork=fork)
        # -P: files in the working directory must not be imported as modules
        command = [
            sys.executable,
            "-P",
            "-m",
            "farcall_endpoint.worker",
            str(worker_end.fileno()),
            str(claims.fileno()),
        ]
        process = subprocess.Popen(
            [*prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=output[0],
            stderr=output[1],
            pass_fds=(worker_end.fileno(), claims.fileno()),
            cwd=place.working_dir,
            env=variables,
            start_new_session=True,  # Ctrl-C on the terminal goes to the agent only; the group can be killed as a whole
        )
        claims.close()
        return WorkerProcess(process, channel, worker_end, os.pidfd_open(process.pid), output, namespaced=bool(prefix))

    # -- environments --------------------------------------------------------------------------------------------------

    def refusal(self, environment: Environment) -> ErrorRecord | None:
        """Why tasks of other submitters than the owner may not use an environment; None if they may."""
        return self._in_environments().refusal(environment)

    def trust(self, environment: Environment) -> None:
        """The owner uses an environment: what it is prepared by needs no confinement."""
        self._in_environments().trust(environment)

    def prepare(self, environment: Environment) -> None:
        """Prepare an environment, without waiting; :meth:`serve` answers."""
        self._in_environments().prepare(environment)

    def release(self, key: str) -> None:
        """End the template of an environment."""
        self._in_environments().release(key)

    def fileno(self) -> int:
        """Readable when :meth:`serve` has something to do."""
        return self._epoll.fileno()

    def serve(self) -> list[Event]:
        """Do what is due, without waiting; what happened to environments."""
        return [] if self._environments is None else self._environments.serve()

    def next_deadline(self) -> float:
        """When :meth:`serve` must be called in any case, in monotonic seconds."""
        return math.inf if self._environments is None else self._environments.next_deadline()

    def learn(self, environment_key: str, modules: Sequence[str]) -> None:
        """Tasks have imported these in an environment."""
        self._in_environments().learn(environment_key, modules)

    @property
    def children(self) -> set[int]:
        """Process ids of children that are no workers."""
        return set() if self._environments is None else self._environments.children

    def close(self) -> None:
        """End what is left of environments, and remove the temporary directories of submitters."""
        if self._environments is not None:
            self._environments.close()
        self._epoll.close()
        self._directories.remove()

    def _in_environments(self) -> EnvironmentWorkers:
        if self._environments is None:
            # A third of the time that a manager takes to start; most need none of this.
            from farcall_endpoint.manager.environment_workers import EnvironmentWorkers

            self._environments = EnvironmentWorkers(
                self._place, self._directories, settings=self._environment_settings, log_dir=self._log_dir
            )
            self._epoll.register(self._environments.fileno(), select.EPOLLIN)
        return self._environments

    def _of_submitter(self, submitter: str) -> tuple[Mapping[str, str], WorkerSettings, list[str]]:
        """For a submitter other than the owner, who has a home and a temporary directory: environment, settings, and
        what to write before the command."""
        place = self._place
        home, temporary = self._directories.of(submitter)
        working_dir = place.working_dir.resolve()
        own = {"HOME": str(home), "TMPDIR": str(temporary)}
        environment = for_submitter(place.environment, passed=place.passed) | own
        confinement = place.confinement
        if confinement is None:
            return environment, place.settings, []
        readable = place.readable(environment)
        writable = [str(home), str(temporary)]
        prefix: list[str] = []
        if confinement.bubblewrap:
            prefix = bubblewrap.prefix(readable=readable, writable=writable, directory=working_dir)
            writable.append(bubblewrap.TEMPORARY)
        if not confinement.landlock:
            return environment, place.settings, prefix
        settings = msgspec.structs.replace(place.settings, readable=tuple(readable), writable=tuple(writable))
        return environment, settings, prefix


def worker_environment(environment: Mapping[str, str], *, worker_id: int, slot: Slot, amd: bool) -> dict[str, str]:
    """The environment of a worker: it tells the worker and its libraries their share. Thread numbers set by the user
    are kept."""
    own = {"FARCALL_WORKER_ID": str(worker_id), "FARCALL_WORKER_SLOT": str(slot.index)}
    if slot.cores:
        own["FARCALL_WORKER_CORES"] = ",".join(map(str, slot.cores))
    if slot.threads is not None:
        own |= {name: environment.get(name, str(slot.threads)) for name in _THREADS}
    hidden: Sequence[str] = ()
    if slot.accelerators:
        names = ",".join(slot.accelerators)
        own |= {"FARCALL_WORKERACCELERATORS": names, **dict.fromkeys(ACCELERATORS, names)}
        own["ZE_ENABLE_PCI_ID_DEVICE_ORDER"] = "1"  # so that Intel's numbers mean the same in every process
        hidden = _ROCM_VARIABLES if amd else ()
    outer = {name: value for name, value in environment.items() if not name.startswith("FARCALL_WORKER_")}
    return {name: value for name, value in {**outer, **own}.items() if name not in hidden}


def open_capture_file() -> int:
    """A descriptor of a new unnamed file, for reading and appending. It is on the node's local disk (``TMPDIR``): it is
    read for each task, and the working directory may be on a network file system."""
    descriptor, name = tempfile.mkstemp(prefix="farcall-output-")
    os.close(descriptor)
    try:
        return os.open(name, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    finally:
        os.unlink(name)  # noqa: PTH108 - the name never was a Path
