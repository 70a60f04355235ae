"""Worker launcher: starts worker processes with their share of the node."""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from farcall_common.environments import Environment
from farcall_common.errors import ErrorRecord
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.host.isolation import Isolation, bubblewrap
from farcall_endpoint.host.isolation.confinement import SUPERVISED
from farcall_endpoint.host.isolation.environment import for_submitter
from farcall_endpoint.host.isolation.keyring import start_apart
from farcall_endpoint.manager.core.events import Event
from farcall_endpoint.manager.shell.worker_process import (
    WorkerDirectories,
    WorkerEnds,
    WorkerProcess,
    Workplace,
    scratch_of,
    worker_environment,
)
from farcall_endpoint.worker.boot import Boot
from farcall_endpoint.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from farcall_endpoint.environments.launcher import RunningTemplate
    from farcall_endpoint.manager.shell.environment_workers import EnvironmentWorkers


class WorkerLauncher(Protocol):
    """Starts workers."""

    def launch(
        self, worker_id: int, *, slot: int, submitter: str, environment: Environment | None = None
    ) -> WorkerProcess:
        """Start a worker for tasks of one submitter, empty for the owner; it sends Ready on its channel.

        :param environment: one that is prepared; None: the endpoint's own Python.
        :raises NotLocated: as of :meth:`refusal`.
        :raises OSError: if it cannot be started.
        """

    def refusal(self, environment: Environment) -> ErrorRecord | None:
        """Why tasks of other submitters than the owner may not use an environment; None if they may.

        :raises NotLocated: if its location is looked up: ask again after :meth:`serve`.
        """

    def trust(self, environment: Environment) -> None:
        """The owner uses an environment: what it is prepared by needs no confinement."""

    def prepare(self, environment: Environment) -> None:
        """Prepare an environment, without waiting; :meth:`serve` answers."""

    def release(self, key: str) -> None:
        """End the template of an environment."""

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`serve` has something to do."""

    def serve(self) -> Sequence[Event]:
        """Do what is due, without waiting; return events about environments."""

    def next_deadline(self) -> float:
        """Return when :meth:`serve` must be called at the latest, in monotonic seconds."""

    def learn(self, imports_key: str, modules: Sequence[str]) -> None:
        """Record the modules that tasks of workers with this key have imported."""

    def measured(self, process: WorkerProcess) -> Event | None:
        """Measure the memory of a worker of an environment; None if it is unknown, or the environment is gone."""

    @property
    def has_templates_of_others(self) -> bool:
        """Whether there are templates in environments of other submitters than the owner."""

    def templates_of_others(self) -> Sequence[RunningTemplate]:
        """Return the templates in environments of submitters other than the owner."""

    def template_takes(self, name: str, size_bytes: int) -> None:
        """Record the memory that a template occupies now, without its workers."""

    def end_template(self, name: str, reason: str) -> None:
        """End a template, and the workers that are forks of it."""

    @property
    def children(self) -> Collection[int]:
        """Process ids of children other than workers."""

    def close(self) -> None:
        """Free what workers shared."""


class FreshProcessLauncher:
    """A launcher that starts each worker as a new interpreter, of its own environment or of one that a task names.

    :param environments: settings of environments.
    :param log_dir: directory for start logs; None: no logs are kept.
    :param spares: children that each template forks in advance.
    """

    def __init__(
        self,
        place: Workplace,
        *,
        environments: EnvironmentSettings | None = None,
        log_dir: Path | None = None,
        spares: int = 1,
    ) -> None:
        self._place = place
        self._spares = spares
        self._environment_settings = EnvironmentSettings() if environments is None else environments
        self._log_dir = log_dir
        self._directories = WorkerDirectories(place)
        self._environments: EnvironmentWorkers | None = None
        self._epoll = select.epoll()
        #: Only then forks save more than a template costs, without environments.
        self._one_shot = self._environment_settings.fork and self._environment_settings.tasks_per_worker == 1

    def launch(
        self, worker_id: int, *, slot: int, submitter: str, environment: Environment | None = None
    ) -> WorkerProcess:
        """Start a worker.

        :raises NotLocated: as of :meth:`refusal`.
        :raises OSError: if the machine lacks processes, descriptors, disk space or the working directory; or if the
            environment cannot be started.
        """
        if environment is not None:
            return self._in_environments().launch(environment, worker_id, slot=slot, submitter=submitter)
        working_dir = self._directories.working()
        ends = self._in_environments().ends.take() if self._one_shot else WorkerEnds.made()
        try:
            return self._launch_own(ends, worker_id, slot=slot, submitter=submitter, working_dir=working_dir)
        except BaseException:
            ends.close()
            raise

    def _launch_own(
        self, ends: WorkerEnds, worker_id: int, *, slot: int, submitter: str, working_dir: Path
    ) -> WorkerProcess:
        """A worker of the endpoint's own Python."""
        place = self._place
        channel, worker_end, claims, output = ends
        prefix: list[str] = []
        is_supervised = False
        outer, settings = place.environment, self._directories.settings(submitter)
        scratch = scratch_of(settings, worker_id)
        if submitter:
            outer, settings, prefix = self._of_submitter(submitter, settings)
            is_supervised = settings.isolation == Isolation.LANDLOCK
        imports_key = ""
        if self._one_shot:
            settings = msgspec.structs.replace(settings, reports_imports=True)
            imports_key = self._in_environments().imports_key(submitter)
        variables = worker_environment(outer, worker_id=worker_id, slot=place.slots[slot], amd=place.amd)
        variables |= settings.to_variables()
        if self._one_shot and not is_supervised:
            boot = Boot(variables, str(working_dir))
            fork = self._in_environments().fork_own(boot, ends.handed(), submitter=submitter, prefix=prefix)
            if fork is not None:
                claims.close()
                return WorkerProcess(
                    *(fork, channel, worker_end, fork.pidfd, output),
                    namespaced=True,
                    imports_key=imports_key,
                    fork=fork,
                    scratch=scratch,
                )
        # -P: files in the working directory must not be imported as modules
        # -s: packages that the submitter has installed for itself would run before the confinement
        options = ["-P", "-s"] if submitter else ["-P"]
        descriptors = worker_end.fileno(), claims.fileno()
        command = [sys.executable, *options, "-m", "farcall_endpoint.worker", *map(str, descriptors)]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=output[0],
                stderr=output[1],
                pass_fds=descriptors,
                cwd=place.working_dir,
                env=variables,
                start_new_session=True,  # Ctrl-C on the terminal is for the agent; the group can be killed as a whole
            )

        process = start_apart(start) if submitter else start()
        claims.close()
        pidfd = os.pidfd_open(process.pid)
        return WorkerProcess(
            *(process, channel, worker_end, pidfd, output),
            namespaced=bool(prefix) and not is_supervised,
            supervised=is_supervised,
            imports_key=imports_key,
            scratch=scratch,
        )

    # -- environments --------------------------------------------------------------------------------------------------

    def refusal(self, environment: Environment) -> ErrorRecord | None:
        """Why tasks of other submitters than the owner may not use an environment; None if they may.

        :raises NotLocated: if its location is looked up: ask again after :meth:`serve`.
        """
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
        return self._epoll.fileno()

    def serve(self) -> list[Event]:
        return [] if self._environments is None else self._environments.serve()

    def next_deadline(self) -> float:
        return math.inf if self._environments is None else self._environments.next_deadline()

    def learn(self, imports_key: str, modules: Sequence[str]) -> None:
        self._in_environments().learn(imports_key, modules)

    def measured(self, process: WorkerProcess) -> Event | None:
        return self._in_environments().measured(process)

    @property
    def has_templates_of_others(self) -> bool:
        return self._environments is not None and self._environments.has_templates_of_others

    def templates_of_others(self) -> Sequence[RunningTemplate]:
        return () if self._environments is None else self._environments.templates_of_others()

    def template_takes(self, name: str, size_bytes: int) -> None:
        self._in_environments().template_takes(name, size_bytes)

    def end_template(self, name: str, reason: str) -> None:
        self._in_environments().end_template(name, reason)

    @property
    def children(self) -> set[int]:
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
            from farcall_endpoint.manager.shell.environment_workers import EnvironmentWorkers

            self._environments = EnvironmentWorkers(
                self._place,
                self._directories,
                settings=self._environment_settings,
                log_dir=self._log_dir,
                spares=self._spares,
            )
            self._epoll.register(self._environments.fileno(), select.EPOLLIN)
        return self._environments

    def _of_submitter(
        self, submitter: str, settings: WorkerSettings
    ) -> tuple[Mapping[str, str], WorkerSettings, list[str]]:
        """Return variables, settings and the command prefix of a worker for a submitter other than the owner. The
        submitter has a home and a temporary directory."""
        place = self._place
        home, temporary = self._directories.of(submitter)
        working_dir = self._directories.working()
        own = {"HOME": str(home), "TMPDIR": str(temporary)}
        environment = for_submitter(place.environment, passed=place.passed) | own
        settings = place.with_process_limit(settings, from_outside=False, forks=self._one_shot)
        confinement = place.confinement
        if confinement is None:
            return environment, settings, []
        readable = [*place.readable(environment), *place.copies_of(submitter)]
        writable = [str(home), str(temporary), *filter(None, [settings.memory])]
        prefix = list(SUPERVISED)
        if confinement.bubblewrap:
            prefix = bubblewrap.prefix(readable=readable, writable=writable, directory=working_dir)
            writable.append(bubblewrap.TEMPORARY)
        settings = msgspec.structs.replace(settings, isolation=confinement.level)
        if confinement.landlock:
            settings = msgspec.structs.replace(settings, readable=tuple(readable), writable=tuple(writable))
        return environment, settings, prefix
