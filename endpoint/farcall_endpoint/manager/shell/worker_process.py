"""Worker processes of a node: what they have in common, how they end, and what they printed."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from farcall_common.limits import KEPT_OUTPUT_BYTES
from farcall_common.plain_text import plain
from farcall_endpoint.contracts.manager_worker import Channel, channel_pair
from farcall_endpoint.contracts.output import NOTHING, Printed, Stream
from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.isolation import Isolation, process_limits
from farcall_endpoint.host.isolation.paths import TEMPORARY_PREFIX, readable_paths
from farcall_endpoint.host.memory_directories import MemoryDirectories
from farcall_endpoint.host.process_directory import ProcessDirectory
from farcall_endpoint.host.removal import remove_tree
from farcall_endpoint.host.shared_memory import open_unnamed
from farcall_endpoint.host.slots import Slot
from farcall_endpoint.worker.boot import Descriptors
from farcall_endpoint.worker.capture import read_end, read_from, read_tail
from farcall_endpoint.worker.directories import name_of, submitter_directory
from farcall_endpoint.worker.places import scratch_name
from farcall_endpoint.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from farcall_endpoint.environments.container import Container
    from farcall_endpoint.environments.templates.templates import ForkedProcess

_logger = logging.getLogger(__name__)

_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
ACCELERATORS: Final = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_ROCM_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""AMD's libraries read these too, as a choice among the devices in ``ROCR_VISIBLE_DEVICES``."""
_LAST_LINES: Final = 8
_OWNER: Final = "owner"
"""Directory name for the owner. No submitter has this name."""
_MAKE_AFTER_S: Final = 0.005
_SIGNALLED: Final = 128
"""Base of exit codes for signals: bubblewrap, like a shell, exits with this number plus the signal of its command."""


class Process(Protocol):
    """A child process, or a fork of a template."""

    pid: int

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code, or the negative number of its signal."""


@dataclasses.dataclass(frozen=True)
class WorkerProcess:
    """A worker process: the leader of a session, and so of a process group.

    ``worker_end`` is a copy of the worker's socket: while it is open, packets can be read after the worker's death.
    ``pidfd`` becomes readable then. ``namespaced``: the process is bubblewrap's or a runner's, and the worker is below
    it. ``supervised``: the process is a supervisor, and the worker is its child. ``container`` or ``fork``: the same as
    ``process``, if it is one; ``ended`` makes sure that nothing is left of a container, and returns its last words if
    the worker did not begin. ``imports_key``: key of its tasks' imports. ``environment_key``: key of its environment;
    empty: the endpoint's own Python. ``scratch``: path of its tasks' scratch directories.
    """

    process: Process
    channel: Channel
    worker_end: socket.socket
    pidfd: int
    output: tuple[int, int]
    namespaced: bool = False
    supervised: bool = False
    imports_key: str = ""
    container: Container | None = None
    fork: ForkedProcess | None = None
    ended: Callable[[Container], str] | None = None
    environment_key: str = ""
    scratch: str = ""

    @property
    def worker_pid(self) -> int | None:
        """Pid of the worker itself, where it is another process and is known."""
        if self.container is not None:
            return self.container.worker_pid or None
        if self.supervised:
            return min(process_reaper.children(self.pid), default=None)
        return None if self.fork is None else self.pid

    @property
    def root_pid(self) -> int:
        """Pid of the common ancestor of all other processes of the worker."""
        if self.container is not None and self.container.is_remote:
            return self.container.worker_pid or self.pid
        return self.pid

    @property
    def pid(self) -> int:
        """Pid of the process that the manager started, and of its process group."""
        return self.process.pid

    def kill_remote(self) -> None:
        """Kill the worker's processes that do not descend from the process that the manager started."""
        if self.container is not None:
            self.container.kill_remote()
        elif self.fork is not None:
            self.fork.kill()

    def tails(self) -> tuple[str, str]:
        """Return the last bytes of standard output and error of a running or dead task; empty if unreadable."""
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
        if (self.namespaced or self.supervised) and code > _SIGNALLED:
            code = _SIGNALLED - code
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}{words}"
            return f"killed by signal {-code}{words}"
        return f"exit code {code}{words}"

    def _last_words(self) -> str:
        if self.fork is not None and self.fork.problem:  # its template has ended, and the kernel has killed both
            return f": its template has ended ({self.fork.problem})"
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

    @property
    def level(self) -> Isolation:
        """The level by which workers of the endpoint's own Python confine themselves."""
        return Isolation.BUBBLEWRAP if self.bubblewrap else Isolation.LANDLOCK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workplace:
    """Settings and resources that the workers of a node share.

    :param working_dir: working directory of tasks; created if it is missing.
    :param environment: variables of the workers.
    :param slots: the shares of the node.
    :param amd: whether the accelerators are AMD's.
    :param passed: see :func:`~farcall_endpoint.host.isolation.environment.for_submitter`.
    :param confinement: confinement of workers for submitters other than the owner, if they are confined.
    :param private: directories of which these workers may read nothing.
    :param memory: makes the directories of submitters in memory; None: there are none.
    :param processes: maximum number of processes of a worker for a submitter other than the owner; 0: no limit.
    :param copies: returns the directory of a submitter's (empty: the owner's) copies of files; None: there are none.
    """

    working_dir: Path
    environment: Mapping[str, str]
    slots: Sequence[Slot]
    settings: WorkerSettings
    amd: bool = False
    passed: Collection[str] = ()
    confinement: Confinement | None = None
    private: Collection[Path] = ()
    memory: MemoryDirectories | None = None
    processes: int = 0
    copies: Callable[[str], Path] | None = None

    def copies_of(self, submitter: str) -> list[str]:
        """The directory of a submitter's copies of files, which its tasks read; none if there are no copies here."""
        return [] if self.copies is None else [str(self.copies(submitter))]

    def with_process_limit(self, settings: WorkerSettings, *, from_outside: bool, forks: bool) -> WorkerSettings:
        """The settings of a worker for tasks of another submitter than the owner.

        :param from_outside: whether its processes are limited before it starts.
        :param forks: whether workers may be forks of one template, with one user namespace.
        """
        if not self.processes:
            return settings
        of_all = self.processes * len(self.slots)
        limits = 0 if from_outside else of_all, of_all if forks else self.processes, process_limits.user_namespace()
        return msgspec.structs.replace(settings, processes=limits)

    def readable(self, variables: Mapping[str, str]) -> list[str]:
        """Return the paths that tasks of submitters other than the owner may read, with these variables."""
        return readable_paths(
            () if self.confinement is None else self.confinement.readable,
            private=[*self.private, self.working_dir.resolve()],
            home=Path(self.environment.get("HOME", "/")),
            environ=variables,
        )


class WorkerDirectories:
    """The working directory of tasks, and the directories of submitters."""

    def __init__(self, place: Workplace) -> None:
        self._working_dir = place.working_dir
        self._memory = place.memory
        self._settings = place.settings
        self._real: Path | None = None
        self._temporary: ProcessDirectory | None = None

    def working(self) -> Path:
        """The real path of the working directory. It is made if it does not exist: a task or a cron job may have
        removed it.

        :raises OSError: if it cannot be made.
        """
        if self._real is None or not _is_same_directory(self._working_dir, self._real):
            self._working_dir.mkdir(parents=True, exist_ok=True)
            self._real = self._working_dir.resolve()
        return self._real

    def of(self, submitter: str) -> tuple[Path, Path]:
        """The home and the temporary directory of a submitter other than the owner; they are made if they do not
        exist."""
        home = submitter_directory(self._working_dir.resolve(), name_of(submitter))
        for directory in (home.parent, home):  # a task may open its own home for other accounts, not what is above it
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return home, self._temporary_of(submitter)

    def settings(self, submitter: str) -> WorkerSettings:
        """The settings of a worker, with the directories for tasks of a submitter, empty for the owner; these are made
        if they do not exist."""
        temporary = ""
        try:
            temporary = str(self._temporary_of(submitter))
        except OSError as error:  # such as of a full disk: the owner's tasks run without it
            if submitter:
                raise
            _logger.warning("tasks get no scratch directory: %s", error)
        return msgspec.structs.replace(
            self._settings,
            temporary=temporary,
            memory="" if self._memory is None else self._memory.of(submitter),
            block_key="" if self._memory is None else self._memory.block_key(submitter),
            submitter=submitter,
        )

    def remove(self) -> None:
        """Remove the temporary directories."""
        if self._temporary is not None:
            self._temporary.remove()

    def _temporary_of(self, submitter: str) -> Path:
        if self._temporary is None:
            # With the host: on a file system of several nodes, locks may be known on their own node only.
            prefix = f"{TEMPORARY_PREFIX}{socket.gethostname()}-"
            self._temporary = ProcessDirectory(Path(tempfile.gettempdir()).resolve(), prefix=prefix)
            self._temporary.remove_leftovers()
        directory = self._temporary.path / (name_of(submitter) if submitter else _OWNER)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory


def scratch_of(settings: WorkerSettings, worker_id: int) -> str:
    """Return the path at which a worker makes its tasks' scratch directories; empty if it is unknown."""
    return os.path.join(settings.temporary, scratch_name(worker_id)) if settings.temporary else ""  # noqa: PTH118


class ScratchRemover:
    """Removes the scratch directories of dead workers, in a thread: a task can fill them with many files."""

    def __init__(self) -> None:
        self._paths: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def removed(self, path: str) -> None:
        """Remove a directory, if it exists."""
        if not path or not os.path.lexists(path):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._remove, name="farcall-scratch", daemon=True)
            self._thread.start()
        self._paths.put(path)

    def close(self) -> None:
        """End the thread, when it has removed what was given to it."""
        if self._thread is not None:
            self._paths.put(None)
            self._thread.join()

    def _remove(self) -> None:
        while (path := self._paths.get()) is not None:
            remove_tree(path)


def _is_same_directory(path: Path, real: Path) -> bool:
    try:
        found = path.stat()
        return stat.S_ISDIR(found.st_mode) and os.path.samestat(found, real.stat())
    except OSError:
        return False


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
        own |= {"FARCALL_WORKER_ACCELERATORS": names, **dict.fromkeys(ACCELERATORS, names)}
        own["ZE_ENABLE_PCI_ID_DEVICE_ORDER"] = "1"  # so that Intel's numbers mean the same in every process
        hidden = _ROCM_VARIABLES if amd else ()
    outer = {name: value for name, value in environment.items() if not name.startswith("FARCALL_WORKER_")}
    return {name: value for name, value in {**outer, **own}.items() if name not in hidden}


class WorkerEnds(NamedTuple):
    """Connection of a manager to a worker: the channel, the worker's sockets for messages and claims, and descriptors
    of the files for its standard output and error."""

    channel: Channel
    worker_end: socket.socket
    claims: socket.socket
    output: tuple[int, int]

    @classmethod
    def made(cls) -> WorkerEnds:
        """Make new ends.

        :raises OSError: if the machine lacks descriptors or disk space.
        """
        with contextlib.ExitStack() as stack:
            channel, worker_end, claims = channel_pair()
            for each in (channel, worker_end, claims):
                stack.callback(each.close)
            stdout = open_capture_file()
            stack.callback(os.close, stdout)
            ends = cls(channel, worker_end, claims, (stdout, open_capture_file()))
            stack.pop_all()
        return ends

    def handed(self) -> Descriptors:
        """Return the descriptors that the worker gets."""
        return Descriptors(self.worker_end.fileno(), self.claims.fileno(), *self.output)

    def close(self) -> None:
        """Close all ends, of both sides."""
        for each in (self.channel, self.worker_end, self.claims):
            each.close()
        for descriptor in self.output:
            os.close(descriptor)


class NextWorkerEnds:
    """Source of worker ends. It makes the next ones in advance, soon after a worker has started: making them takes much
    of a fork's start time, most of all where other programs write to the same disk."""

    def __init__(self) -> None:
        self._next: WorkerEnds | None = None
        self._make_at = float("inf")

    def take(self) -> WorkerEnds:
        """Return the ends that were made in advance, else new ones; see :meth:`WorkerEnds.made`."""
        ends, self._next = self._next, None
        self._make_at = time.monotonic() + _MAKE_AFTER_S
        return WorkerEnds.made() if ends is None else ends

    def next_deadline(self) -> float:
        """Return when :meth:`serve` must be called, in monotonic seconds."""
        return self._make_at

    def serve(self) -> None:
        """Make the next ends, if it is time."""
        if time.monotonic() >= self._make_at:
            self._make_at = float("inf")
            with contextlib.suppress(OSError):  # the next worker's start says why
                self._next = WorkerEnds.made()

    def close(self) -> None:
        """Close the ends that were made in advance."""
        self._make_at = float("inf")
        if self._next is not None:
            self._next.close()
            self._next = None


def open_capture_file() -> int:
    """Open a new unnamed file for reading and appending. It is on the node's local disk (``TMPDIR``): the manager reads
    it for each task, and the working directory may be on a network file system."""
    return open_unnamed(tempfile.gettempdir(), os.O_RDWR | os.O_APPEND)
