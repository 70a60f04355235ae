"""Worker launcher: starts worker processes with their share of the node."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from farcall_common.environments import PREFIXES, UV, Environment
from farcall_common.errors import ErrorRecord
from farcall_common.limits import KEPT_OUTPUT_BYTES
from farcall_endpoint import outcomes, process_reaper
from farcall_endpoint.environments import probe
from farcall_endpoint.environments.launcher import Container, ContainerStart, EnvironmentLauncher
from farcall_endpoint.environments.preparation import (
    CONFINED_OUTSIDE,
    Failed,
    PreparationReport,
    Prepared,
    Progressed,
    confinement_of,
)
from farcall_endpoint.environments.runner import Mount
from farcall_endpoint.environments.template_pool import TemplateChange
from farcall_endpoint.environments.templates import ForkedProcess, template_key
from farcall_endpoint.isolation import bubblewrap
from farcall_endpoint.isolation.environment import for_image, for_submitter
from farcall_endpoint.isolation.paths import readable_paths
from farcall_endpoint.manager.events import EnvironmentFailed, EnvironmentProgress, EnvironmentReady, Event
from farcall_endpoint.manager.slots import Slot
from farcall_endpoint.output import NOTHING, Printed, Stream
from farcall_endpoint.worker.boot import Boot, Descriptors
from farcall_endpoint.worker.capture import read_end, read_from, read_tail
from farcall_endpoint.worker.channel import Channel, channel_pair
from farcall_endpoint.worker.directories import name_of, submitter_directory
from farcall_endpoint.worker.settings import WorkerSettings

_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_ACCELERATORS: Final = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_ROCM_VARIABLES: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""AMD's libraries read these too, as a choice among the devices in ``ROCR_VISIBLE_DEVICES``."""
RENUMBERED: Final = ("docker", "podman", "podman-hpc")
"""Types whose containers have the accelerators of their worker only."""
_MOST_REFUSALS: Final = 1000
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
    it. ``container``: the same as ``process``, if it was started for an environment; ``ended`` makes sure that nothing
    is left of it, and returns its last words if the worker did not begin. ``environment_key``: of its environment.
    """

    process: Process
    channel: Channel
    worker_end: socket.socket
    pidfd: int
    output: tuple[int, int]
    namespaced: bool = False
    environment_key: str = ""
    container: Container | None = None
    ended: Callable[[Container], str] | None = None

    @property
    def worker_pid(self) -> int | None:
        """Of the worker itself, where that is another process and is known."""
        if self.container is not None:
            return self.container.worker_pid or None
        return self.pid if isinstance(self.process, ForkedProcess) else None

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
        elif isinstance(self.process, ForkedProcess):
            self.process.kill()

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
            words = probe.last_lines(self.tails()[1].encode())
        return f": {words}" if words else ""


@dataclasses.dataclass(frozen=True)
class Confinement:
    """What confined workers may read besides the system (``readable``), what they may not in any case (``private``),
    and by what they are confined."""

    readable: Collection[str]
    private: Collection[Path]
    landlock: bool
    bubblewrap: bool


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

    :param working_dir: where tasks run; created if it is missing.
    :param environment: of the workers.
    :param slots: the shares of the node.
    :param amd: whether accelerators are AMD's.
    :param passed: see :func:`~farcall_endpoint.isolation.environment.for_submitter`.
    :param confinement: of workers of other submitters than the owner, if they are confined.
    :param private: directories in which no submitter may name environments.
    :param environments: starts what runs in them.
    """

    def __init__(
        self,
        *,
        working_dir: Path,
        environment: Mapping[str, str],
        slots: Sequence[Slot],
        amd: bool = False,
        settings: WorkerSettings,
        passed: Collection[str] = (),
        confinement: Confinement | None = None,
        private: Collection[Path] = (),
        environments: EnvironmentLauncher,
    ) -> None:
        self._working_dir = working_dir
        self._environment = environment
        self._slots = slots
        self._amd = amd
        self._settings = settings
        self._passed = passed
        self._confinement = confinement
        self._private = private
        self._environments = environments
        #: Only then forks save more than a template costs, without environments.
        self._one_shot = environments.settings.fork and environments.settings.tasks_per_worker == 1
        default = environments.settings.default
        self._trusted = set() if default is None else {default.key}
        self._refusals: dict[str, ErrorRecord | None] = {}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def launch(
        self, worker_id: int, *, slot: int, submitter: str, environment: Environment | None = None
    ) -> WorkerProcess:
        """Start a worker.

        :raises OSError: if the machine lacks processes, descriptors, disk space or the working directory; or if the
            environment cannot be started.
        """
        if environment is not None:
            return self._launch_in(environment, worker_id, slot=slot, submitter=submitter)
        self._working_dir.mkdir(parents=True, exist_ok=True)  # a task or a cron job may have removed it
        channel, worker_end, claims = channel_pair()
        output = (_open_capture_file(), _open_capture_file())
        prefix: list[str] = []
        outer, settings = self._environment, self._settings
        if submitter:
            outer, settings, prefix = self._of_submitter(submitter)
        if self._one_shot:
            settings = msgspec.structs.replace(settings, reports_imports=True)
        variables = worker_environment(outer, worker_id=worker_id, slot=self._slots[slot], amd=self._amd)
        variables |= settings.to_variables()
        key = template_key(f"own-{submitter}", variables)
        if self._one_shot:
            boot = Boot(variables, str(self._working_dir.resolve()))
            descriptors = Descriptors(worker_end.fileno(), claims.fileno(), *output)
            if (fork := self._environments.fork_own(key, boot, descriptors)) is not None:
                claims.close()
                self._environments.start_own_template(key, prefix, variables)  # if tasks import more by now
                return WorkerProcess(fork, channel, worker_end, fork.pidfd, output, namespaced=True)
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
            cwd=self._working_dir,
            env=variables,
            start_new_session=True,  # Ctrl-C on the terminal goes to the agent only; the group can be killed as a whole
        )
        claims.close()
        if self._one_shot:
            self._environments.start_own_template(key, prefix, variables)
        return WorkerProcess(process, channel, worker_end, os.pidfd_open(process.pid), output, namespaced=bool(prefix))

    def refusal(self, environment: Environment) -> ErrorRecord | None:
        """Why tasks of other submitters than the owner may not use an environment; None if they may."""
        key = environment.key
        if key not in self._refusals:
            if len(self._refusals) >= _MOST_REFUSALS:
                self._refusals.clear()
            reason = self._environments.refusal(
                environment,
                readable=self._readable(self._environment, self._private),
                unconfined=self._confinement is not None and not self._confinement.bubblewrap,
            )
            self._refusals[key] = outcomes.location_refused(environment.label, reason) if reason else None
        return self._refusals[key]

    def trust(self, environment: Environment) -> None:
        """The owner uses an environment: what it is prepared by needs no confinement."""
        self._trusted.add(environment.key)

    def prepare(self, environment: Environment) -> None:
        """Prepare an environment, without waiting; :meth:`serve` answers."""
        self._environments.prepare(environment, trusted=environment.key in self._trusted)

    def release(self, key: str) -> None:
        """End the template of an environment."""
        self._environments.release(key)

    def fileno(self) -> int:
        """Readable when :meth:`serve` has something to do."""
        return self._environments.fileno()

    def serve(self) -> list[Event]:
        """Do what is due, without waiting; what happened to environments."""
        return [_event(report) for report in self._environments.serve()]

    def next_deadline(self) -> float:
        """When :meth:`serve` must be called in any case, in monotonic seconds."""
        return self._environments.next_deadline()

    def learn(self, environment_key: str, modules: Sequence[str]) -> None:
        """Tasks have imported these in an environment."""
        self._environments.learn(environment_key, modules)

    @property
    def children(self) -> set[int]:
        """Process ids of children that are no workers."""
        return self._environments.children

    def close(self) -> None:
        """End what is left of environments, and remove the temporary directories of submitters."""
        self._environments.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    # -- environments --------------------------------------------------------------------------------------------------

    def _launch_in(self, environment: Environment, worker_id: int, *, slot: int, submitter: str) -> WorkerProcess:
        """Start a worker in an environment."""
        if submitter and (refused := self.refusal(environment)) is not None:
            raise OSError(refused.message)
        self._working_dir.mkdir(parents=True, exist_ok=True)
        working_dir = self._working_dir.resolve()
        is_image = environment.type not in (*PREFIXES, UV)
        outer, own = dict(self._environment), {"HOME": str(working_dir)} if is_image else {}
        writable = [str(working_dir)]
        if submitter:
            home, temporary = self._directories_of(submitter)
            own = {"HOME": str(home), "TMPDIR": str(temporary)}
            outer = for_submitter(outer, passed=self._passed)
            writable = [str(home), str(temporary)]
        share = self._slots[slot]
        variables = worker_environment(outer, worker_id=worker_id, slot=share, amd=self._amd)
        variables = {**(for_image(variables) if is_image else variables), **own}
        if not is_image:
            variables |= self._environments.prefix_variables(environment, variables.get("PATH", ""))
        if environment.type in RENUMBERED and not self._amd:
            variables |= renumbered(share.accelerators)
        confine, settings = None, self._settings
        if submitter and self._confinement is not None:
            confine, settings = self._confine_in(environment, outer | own, writable)
        # Only a confined template may run code of the environment before its forks confine themselves.
        forks = self._environments.settings.fork and (
            not submitter
            or self._confinement is None
            or confine is not None
            or environment.type not in CONFINED_OUTSIDE
        )
        settings = msgspec.structs.replace(settings, reports_imports=forks)
        channel, worker_end, claims = channel_pair()
        output = (_open_capture_file(), _open_capture_file())
        try:
            process = self._environments.start(
                environment,
                ContainerStart(
                    Boot({**variables, **settings.to_variables()}, str(working_dir), merged=True),
                    Descriptors(worker_end.fileno(), claims.fileno(), *output),
                    claims.close,
                    mounts=tuple(Mount(path, path, writable=True) for path in writable),
                    variables={**outer, **({} if is_image else own)},
                    accelerators=share.accelerators,
                    amd=self._amd,
                    group=submitter,
                    fork=forks,
                    private_root=bool(submitter),
                    confine=confine,
                ),
            )
        except BaseException:
            for each in (channel, worker_end, claims):
                each.close()
            for descriptor in output:
                os.close(descriptor)
            raise
        if isinstance(process, ForkedProcess):
            pidfd, key = process.pidfd, environment.key
            return WorkerProcess(process, channel, worker_end, pidfd, output, namespaced=True, environment_key=key)
        return WorkerProcess(
            process,
            channel,
            worker_end,
            os.pidfd_open(process.pid),
            output,
            namespaced=True,
            environment_key=environment.key,
            container=process,
            ended=self._environments.ended,
        )

    def _confine_in(
        self, environment: Environment, variables: Mapping[str, str], writable: Sequence[str]
    ) -> tuple[Callable[[Sequence[str]], Sequence[str]] | None, WorkerSettings]:
        """How a worker of another submitter than the owner is confined: from outside, where the runner does not do it
        by itself, and by Landlock where the kernel has it."""
        confinement = self._confinement
        assert confinement is not None
        readable = self._readable(variables, confinement.private)
        confine = None
        if confinement.bubblewrap and environment.type in CONFINED_OUTSIDE:
            directory = self._working_dir.resolve()

            def confine(needed: Sequence[str]) -> list[str]:
                return confinement_of([*readable, *needed], environment.type, writable=writable, directory=directory)

        if not confinement.landlock:
            return confine, self._settings
        own = (*writable, bubblewrap.TEMPORARY, "/var/tmp")  # noqa: S108 - the container's
        is_image = environment.type not in (*PREFIXES, UV)
        seen = ("/",) if is_image else (*readable, *self._environments.paths(environment))
        return confine, msgspec.structs.replace(self._settings, readable=seen, writable=own if is_image else own[:-1])

    def _readable(self, variables: Mapping[str, str], private: Collection[Path]) -> list[str]:
        """What tasks of other submitters than the owner may read of the node."""
        return readable_paths(
            () if self._confinement is None else self._confinement.readable,
            private=[*private, self._working_dir.resolve()],
            home=Path(self._environment.get("HOME", "/")),
            environ=variables,
        )

    def _directories_of(self, submitter: str) -> tuple[Path, Path]:
        """The home and the temporary directory of a submitter other than the owner."""
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="farcall-submitters-", ignore_cleanup_errors=True)
        name = name_of(submitter)
        home = submitter_directory(self._working_dir.resolve(), name)
        temporary = Path(self._temporary.name).resolve() / name
        for directory in (home, temporary):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return home, temporary

    def _of_submitter(self, submitter: str) -> tuple[Mapping[str, str], WorkerSettings, list[str]]:
        """For a submitter other than the owner, who has a home and a temporary directory: environment, settings, and
        what to write before the command."""
        home, temporary = self._directories_of(submitter)
        working_dir = self._working_dir.resolve()
        own = {"HOME": str(home), "TMPDIR": str(temporary)}
        environment = for_submitter(self._environment, passed=self._passed) | own
        confinement = self._confinement
        if confinement is None:
            return environment, self._settings, []
        readable = self._readable(environment, confinement.private)
        writable = [str(home), str(temporary)]
        prefix: list[str] = []
        if confinement.bubblewrap:
            prefix = bubblewrap.prefix(readable=readable, writable=writable, directory=working_dir)
            writable.append(bubblewrap.TEMPORARY)
        if not confinement.landlock:
            return environment, self._settings, prefix
        settings = msgspec.structs.replace(self._settings, readable=tuple(readable), writable=tuple(writable))
        return environment, settings, prefix


def _event(report: PreparationReport | TemplateChange) -> Event:
    match report:
        case TemplateChange(environment_key=key, problem=problem):
            return EnvironmentReady(key, forkable=not problem)
        case Progressed(key=key, text=text):
            return EnvironmentProgress(key, text)
        case Failed(key=key, record=record):
            return EnvironmentFailed(key, record)
        case Prepared(key=key):
            return EnvironmentReady(key)


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
        own |= {"FARCALL_WORKER_ACCELERATORS": names, **dict.fromkeys(_ACCELERATORS, names)}
        own["ZE_ENABLE_PCI_ID_DEVICE_ORDER"] = "1"  # so that Intel's numbers mean the same in every process
        hidden = _ROCM_VARIABLES if amd else ()
    outer = {name: value for name, value in environment.items() if not name.startswith("FARCALL_WORKER_")}
    return {name: value for name, value in {**outer, **own}.items() if name not in hidden}


def renumbered(accelerators: Sequence[str]) -> dict[str, str]:
    """The variables for accelerators in a container that has no others: there, their numbers begin at 0."""
    names = [name for each in accelerators for name in each.split(",")]
    if not names or not all(name.isdecimal() for name in names):
        return {}
    numbers = ",".join(map(str, range(len(names))))
    return {"FARCALL_WORKER_ACCELERATORS": numbers, **dict.fromkeys(_ACCELERATORS, numbers)}


def _open_capture_file() -> int:
    """A descriptor of a new unnamed file, for reading and appending. It is on the node's local disk (``TMPDIR``): it is
    read for each task, and the working directory may be on a network file system."""
    descriptor, name = tempfile.mkstemp(prefix="farcall-output-")
    os.close(descriptor)
    try:
        return os.open(name, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    finally:
        os.unlink(name)  # noqa: PTH108 - the name never was a Path
