"""Workers in environments, and workers that are forks: the part of a launcher that most managers never need."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from farcall_common.environments import UV, WITHOUT_CONTAINER, Environment
from farcall_common.errors import ErrorRecord
from farcall_endpoint.config.settings import EnvironmentSettings
from farcall_endpoint.contracts import outcomes
from farcall_endpoint.environments.container import ContainerStart
from farcall_endpoint.environments.launcher import EnvironmentLauncher, RunningTemplate
from farcall_endpoint.environments.prepare.access import CONFINED_OUTSIDE, Place, confinement_of
from farcall_endpoint.environments.prepare.preparation import Crowded, Failed, PreparationReport, Prepared, Progressed
from farcall_endpoint.environments.prepare.technologies import without_forks
from farcall_endpoint.environments.runners.base import Mount
from farcall_endpoint.environments.templates.preload import statistics_key
from farcall_endpoint.environments.templates.template_pool import TemplateChange
from farcall_endpoint.environments.templates.templates import ForkedProcess, template_key
from farcall_endpoint.host.isolation import Isolation, bubblewrap, process_limits
from farcall_endpoint.host.isolation.confinement import SUPERVISED
from farcall_endpoint.host.isolation.environment import for_image, for_runner, for_submitter
from farcall_endpoint.manager.core.events import (
    EnvironmentFailed,
    EnvironmentProgress,
    EnvironmentReady,
    EnvironmentsCrowded,
    Event,
)
from farcall_endpoint.manager.shell.processes import tree_bytes
from farcall_endpoint.manager.shell.worker_process import (
    ACCELERATORS,
    NextWorkerEnds,
    WorkerDirectories,
    WorkerProcess,
    Workplace,
    scratch_of,
    worker_environment,
)
from farcall_endpoint.worker.boot import Boot, Descriptors
from farcall_endpoint.worker.settings import WorkerSettings

_logger = logging.getLogger(__name__)

RENUMBERED: Final = ("docker", "podman", "podman-hpc")
"""Types whose containers have the accelerators of their worker only."""
_MOST_ADMITTED: Final = 1000


class EnvironmentWorkers:
    """Starts workers in environments, each as a fork of a template where there is one.

    :param settings: of environments.
    :param log_dir: of start logs; None: none are kept.
    :param spares: children that each template forks in advance.
    """

    def __init__(
        self,
        place: Workplace,
        directories: WorkerDirectories,
        *,
        settings: EnvironmentSettings,
        log_dir: Path | None = None,
        spares: int = 1,
    ) -> None:
        self._place = place
        self._directories = directories
        self._launcher = EnvironmentLauncher(
            settings,
            log_dir=log_dir,
            isolated=place.confinement is not None,
            confined=place.confinement is not None and place.confinement.bubblewrap,
            readable=lambda: place.readable(place.environment),
            writable=(str(place.working_dir),),
            passed=place.passed,
            spares=spares,
        )
        #: For workers of the endpoint's own Python, too.
        self.ends = NextWorkerEnds()
        self._trusted = set() if settings.default is None else {settings.default.key}
        self._forkable: set[str] = set()
        self._logged: set[str] = set()  # reasons
        self._admitted: set[Environment] = set()  # not by key: two can be made that share it

    def refusal(self, environment: Environment) -> ErrorRecord | None:
        """Why tasks of other submitters than the owner may not use an environment; None if they may.

        :raises NotLocated: if its location is looked up: ask again after :meth:`serve`.
        """
        if environment in self._admitted:
            return None
        confinement = self._place.confinement
        unconfined = confinement is not None and not confinement.bubblewrap
        if reason := self._launcher.refusal(environment, unconfined=unconfined):
            return outcomes.location_refused(environment.label, reason)
        record = self._launcher.locate(environment).record
        if record is None:
            if len(self._admitted) >= _MOST_ADMITTED:
                self._admitted.clear()
            self._admitted.add(environment)
        return record

    def _locate(self, environment: Environment) -> Place | None:
        """Return the current place on the node of a submitter's environment; None if its tasks are not confined.

        :raises OSError: if the submitter's tasks may not use the environment.
        :raises NotLocated: see :meth:`refusal`.
        """
        located = self._launcher.locate(environment)
        if located.record is not None:
            raise OSError(located.record.message)
        return None if self._place.confinement is None else located.place

    def _log_once(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            _logger.info("workers are started afresh: %s", reason)

    def trust(self, environment: Environment) -> None:
        """The owner uses an environment: what it is prepared by needs no confinement."""
        self._trusted.add(environment.key)

    def prepare(self, environment: Environment) -> None:
        """Prepare an environment, without waiting; :meth:`serve` answers."""
        self._launcher.prepare(environment, trusted=environment.key in self._trusted)

    def release(self, key: str) -> None:
        """End the template of an environment."""
        self._forkable.discard(key)
        self._launcher.release(key)

    def fileno(self) -> int:
        """Readable when :meth:`serve` has something to do."""
        return self._launcher.fileno()

    def serve(self) -> list[Event]:
        """Do what is due, without waiting; what happened to environments."""
        self.ends.serve()
        return [self._event(report) for report in self._launcher.serve()]

    def next_deadline(self) -> float:
        """Return when :meth:`serve` must be called at the latest, in monotonic seconds."""
        return min(self._launcher.next_deadline(), self.ends.next_deadline())

    def learn(self, imports_key: str, modules: Sequence[str]) -> None:
        """Record the modules that tasks of workers with this key have imported."""
        self._launcher.learn(imports_key, modules)

    def measured(self, process: WorkerProcess) -> Event | None:
        """Measure the memory of a worker of an environment; None if it is unknown, or the environment is gone."""
        key = process.environment_key
        if not self._launcher.is_prepared(key) or (memory_bytes := tree_bytes(process.root_pid)) is None:
            return None
        return EnvironmentReady(key, forkable=key in self._forkable, memory_bytes=memory_bytes)

    @property
    def has_templates_of_others(self) -> bool:
        """Whether there are templates in environments of other submitters than the owner."""
        return self._launcher.has_templates_of_others

    def templates_of_others(self) -> list[RunningTemplate]:
        """Return the templates in environments of submitters other than the owner."""
        return self._launcher.templates_of_others()

    def template_takes(self, name: str, size_bytes: int) -> None:
        """Record the memory that a template occupies now, without its workers."""
        self._launcher.template_takes(name, size_bytes)

    def end_template(self, name: str, reason: str) -> None:
        """End a template, and the workers that are forks of it."""
        self._launcher.end_template(name, reason)

    def _event(self, report: PreparationReport | TemplateChange) -> Event:
        match report:
            case TemplateChange(environment_key=key, is_forkable=is_forkable):
                (self._forkable.add if is_forkable else self._forkable.discard)(key)
                return EnvironmentReady(key, forkable=is_forkable)
            case Crowded():
                return EnvironmentsCrowded()
            case Progressed(key=key, text=text):
                return EnvironmentProgress(key, text)
            case Failed(key=key, record=record):
                return EnvironmentFailed(key, record)
            case Prepared(key=key):
                self._forkable.discard(key)
                return EnvironmentReady(key)

    @property
    def children(self) -> set[int]:
        """Process ids of children other than workers."""
        return self._launcher.children

    def close(self) -> None:
        """End what is left of environments."""
        self.ends.close()
        self._launcher.close()

    def imports_key(self, submitter: str) -> str:
        """The key of what a submitter's tasks import in the endpoint's own Python; empty for the owner."""
        return statistics_key("", submitter)

    def fork_own(
        self, boot: Boot, descriptors: Descriptors, *, submitter: str, prefix: Sequence[str]
    ) -> ForkedProcess | None:
        """A worker of the endpoint's own Python; None if it must be started afresh. Starts a template for the next
        ones, if there should be another one.

        :param prefix: what to write before a worker's command.
        """
        key = template_key(f"own-{submitter}", boot.variables)
        boot = msgspec.structs.replace(boot, namespaces=bool(prefix))  # as fresh ones have them
        fork = self._launcher.fork_own(key, boot, descriptors)
        writable: list[str] = []
        if prefix:
            memory = self._directories.settings(submitter).memory
            writable = [*map(str, self._directories.of(submitter)), *filter(None, [memory])]
        command = bubblewrap.of_template(prefix)
        self._launcher.start_own_template(key, command, boot, submitter=submitter, writable=writable)
        return fork

    def launch(self, environment: Environment, worker_id: int, *, slot: int, submitter: str) -> WorkerProcess:
        """Start a worker.

        :raises OSError: if the machine lacks something, or the environment cannot be started.
        :raises NotLocated: as of :meth:`refusal`.
        """
        place = self._place
        if submitter and (refused := self.refusal(environment)) is not None:
            raise OSError(refused.message)
        working_dir = self._directories.working()
        is_image = environment.type not in WITHOUT_CONTAINER
        outer, own = dict(place.environment), {"HOME": str(working_dir)} if is_image else {}
        settings = self._directories.settings(submitter)
        places = [*filter(None, [settings.temporary, settings.memory])]
        writable = [str(working_dir), *places]
        if submitter:
            home, temporary = self._directories.of(submitter)
            own = {"HOME": str(home), "TMPDIR": str(temporary)}
            outer = for_submitter(outer, passed=place.passed)
            writable = [str(home), *places]
        copies = place.copies_of(submitter)
        share = place.slots[slot]
        variables = worker_environment(outer, worker_id=worker_id, slot=share, amd=place.amd)
        variables = {**(for_image(variables) if is_image else variables), **own}
        if not is_image:
            variables |= self._launcher.prefix_variables(environment, variables.get("PATH", ""))
        if environment.type in RENUMBERED and not place.amd:
            variables |= renumbered(share.accelerators)
        of_runner = outer | own if not is_image else outer
        if submitter and is_image:
            of_runner = for_runner(environment.type, place.environment, passed=place.passed)
        confine, locate = None, None
        if submitter:  # not what was found before: a directory may have been replaced by a link since
            locate = functools.partial(self._locate, environment)
        if submitter and place.confinement is not None:
            confine, settings = self._confine_in(environment, outer | own, writable, settings, copies=copies)
        # Only a confined template may run code of the environment before its forks confine themselves.
        is_supervised = settings.isolation == Isolation.LANDLOCK
        forks = (
            self._launcher.settings.fork
            and not is_supervised  # each fork would need a supervisor above it
            and (
                not submitter
                or place.confinement is None
                or confine is not None
                or environment.type not in CONFINED_OUTSIDE
            )
        )
        # A fresh one has a /tmp and processes of its own.
        namespaces = is_image or confine is not None
        if forks and (reason := without_forks(environment.type, confined=confine is not None)):
            forks = False
            self._log_once(reason)
        settings = msgspec.structs.replace(settings, reports_imports=forks)
        before: list[str] = []
        if submitter:  # an image's Python is not trusted to limit itself
            before = process_limits.command(place.processes * len(place.slots))
            settings = place.with_process_limit(settings, from_outside=True, forks=forks)
        ends = self.ends.take()
        channel, worker_end, claims, output = ends
        try:
            process = self._launcher.start(
                environment,
                ContainerStart(
                    Boot(
                        {**variables, **settings.to_variables()}, str(working_dir), merged=True, namespaces=namespaces
                    ),
                    ends.handed(),
                    claims.close,
                    mounts=(
                        *(Mount(path, path, writable=True) for path in writable),
                        *(Mount(path, path) for path in copies),
                    ),
                    variables=of_runner,
                    accelerators=share.accelerators,
                    amd=place.amd,
                    group=submitter,
                    fork=forks,
                    private_root=bool(submitter),
                    locate=locate,
                    confine=confine,
                    before=before,
                    within=SUPERVISED if is_supervised else (),
                ),
            )
        except BaseException:
            ends.close()
            raise
        imports_key = statistics_key(environment.key, submitter)
        scratch = scratch_of(settings, worker_id)
        if isinstance(process, ForkedProcess):
            pidfd = process.pidfd
            return WorkerProcess(
                *(process, channel, worker_end, pidfd, output),
                namespaced=True,
                imports_key=imports_key,
                fork=process,
                environment_key=environment.key,
                scratch=scratch,
            )
        return WorkerProcess(
            process,
            channel,
            worker_end,
            os.pidfd_open(process.pid),
            output,
            namespaced=True,
            supervised=is_supervised,
            imports_key=imports_key,
            container=process,
            ended=self._launcher.ended,
            environment_key=environment.key,
            scratch=scratch,
        )

    def _confine_in(
        self,
        environment: Environment,
        variables: Mapping[str, str],
        writable: Sequence[str],
        settings: WorkerSettings,
        *,
        copies: Sequence[str],
    ) -> tuple[Callable[[Sequence[str], str, Place | None], Sequence[str]] | None, WorkerSettings]:
        """How a worker of another submitter than the owner is confined: from outside, where the runner does not do it
        by itself, and by Landlock where the kernel has it."""
        place, confinement = self._place, self._place.confinement
        assert confinement is not None
        readable = [*place.readable(variables), *copies]
        confine = None
        if confinement.bubblewrap and environment.type in CONFINED_OUTSIDE:
            directory = place.working_dir.resolve()

            def confine(needed: Sequence[str], image: str, found: Place | None) -> list[str]:
                return confinement_of(
                    [*readable, *needed],
                    environment.type,
                    writable=writable,
                    directory=directory,
                    image=image,
                    place=found,
                )

        if environment.type == UV:  # its Python is the endpoint's own
            settings = msgspec.structs.replace(settings, isolation=confinement.level)
            if not confinement.bubblewrap:
                return None, self._by_landlock(environment, readable, writable, settings)
        if confinement.landlock:
            settings = self._by_landlock(environment, readable, writable, settings)
        return confine, settings

    def _by_landlock(
        self, environment: Environment, readable: Sequence[str], writable: Sequence[str], settings: WorkerSettings
    ) -> WorkerSettings:
        """Settings of a worker that confines itself by Landlock."""
        assert self._place.confinement is not None
        if environment.type not in WITHOUT_CONTAINER:
            own = (*writable, bubblewrap.TEMPORARY, "/var/tmp")  # noqa: S108 - the container's
            return msgspec.structs.replace(settings, readable=("/",), writable=own)
        seen = (*readable, *self._launcher.paths(environment))
        # Without namespaces, /tmp is the machine's.
        own = (*writable, bubblewrap.TEMPORARY) if self._place.confinement.bubblewrap else tuple(writable)
        return msgspec.structs.replace(settings, readable=seen, writable=own)


def renumbered(accelerators: Sequence[str]) -> dict[str, str]:
    """The variables for accelerators in a container that has no others: there, their numbers begin at 0."""
    names = [name for each in accelerators for name in each.split(",")]
    if not names or not all(name.isdecimal() for name in names):
        return {}
    numbers = ",".join(map(str, range(len(names))))
    return {"FARCALL_WORKER_ACCELERATORS": numbers, **dict.fromkeys(ACCELERATORS, numbers)}
