"""Launcher of environments: starts containers, and hands each the worker that it becomes.

A container's program is ``bootstrap.py`` of the bundle. It connects to a socket in a private directory that is mounted,
and receives a :class:`~farcall_endpoint.worker.boot.Boot` with the worker's descriptors. All technologies start so,
also those that close descriptors and those whose containers are children of a daemon. What a runner prints itself goes
to a start log; its last lines say why a start failed.

Nothing here waits: :class:`EnvironmentLauncher` has a descriptor to watch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import secrets
import select
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from farcall_common.environments import WITHOUT_CONTAINER, Environment
from farcall_common.files import keep_latest
from farcall_endpoint.config.settings import EnvironmentSettings, options_for
from farcall_endpoint.environments import EnvironmentLost, NotLocated
from farcall_endpoint.environments.container import SOCKET, Container, ContainerStart, StartLog
from farcall_endpoint.environments.prepare import access, bundle, preparation, probe
from farcall_endpoint.environments.prepare.preparation import Located, PreparationReport, PreparationSettings, Prepared
from farcall_endpoint.environments.prepare.preparer import Preparer
from farcall_endpoint.environments.runners.base import Mount, Runner, Start
from farcall_endpoint.environments.runners.registry import RUNNERS
from farcall_endpoint.environments.templates.preload import PreloadStore, statistics_key
from farcall_endpoint.environments.templates.template_pool import TemplateChange, TemplatePool, TemplateRoot
from farcall_endpoint.environments.templates.templates import (
    TEMPLATE,
    ForkedProcess,
    start_template,
    template_key,
    variables_of_template,
)
from farcall_endpoint.host import process_reaper
from farcall_endpoint.host.isolation.keyring import start_apart
from farcall_endpoint.host.logs import RepeatedLines
from farcall_endpoint.worker import boot as booting
from farcall_endpoint.worker.boot import Boot, Descriptors

_logger = logging.getLogger(__name__)

_LONGEST_SOCKET_NAME: Final = 100
"""Maximum bytes of a socket's path. The kernel allows 108 with the final zero; a mount may add a few."""
_MOST_LOGS: Final = 50
_WITHOUT_TEMPLATES_S: Final = 600.0
_MOST_WITHOUT_TEMPLATES: Final = 1000
_LOCATED_S: Final = 1.0
"""Time for which the result of a location's look-up is valid."""
_CREDENTIALS: Final = struct.Struct("3i")
_SECRET_BYTES: Final = 32
_IMPORTS: Final = ".imports"
"""Directory in the cache for statistics about the imports of tasks."""
_REMOTE: Final = ("docker",)
"""Types whose containers are started by a daemon."""
_OF_NODE: Final = ("apptainer", "singularity", "shifter")
_TEMPORARY_OF_NODE: Final = ("/tmp", "/var/tmp")  # noqa: S108
"""Directories that the owner's containers of these types share with the node."""
_FIRST: Final = ("HOME", "TMPDIR", "PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ")


class RunningTemplate(NamedTuple):
    """A template in an environment of a submitter, with its branches.

    ``root``: the process that was started for it; ``pids``: of the templates, as far as they are known; ``workers``:
    process ids of their forks; ``forked``: how often they were asked to fork; ``unanswered``: the number of the oldest
    request that a template has not answered, 0 if there is none. ``is_remote``: it is not a descendant of the root.
    """

    name: str
    root: int
    pids: list[int]
    workers: set[int]
    submitter: str = ""
    forked: int = 0
    unanswered: int = 0
    is_remote: bool = False


class EnvironmentLauncher:
    """Prepares environments, and starts containers in them. Not for use in several threads.

    :param log_dir: of start logs; None: none are kept.
    :param isolated: whether other submitters than the owner may read ``readable`` only.
    :param confined, readable, writable, passed: as of
        :class:`~farcall_endpoint.environments.prepare.preparation.PreparationSettings`.
    :param spares: children that each template forks in advance.
    """

    def __init__(
        self,
        settings: EnvironmentSettings,
        *,
        log_dir: Path | None = None,
        isolated: bool = False,
        confined: bool = False,
        readable: Callable[[], Sequence[str]] = tuple,
        writable: Sequence[str] = (),
        passed: Collection[str] = (),
        runners: Mapping[str, Runner] = RUNNERS,
        spares: int = 1,
    ) -> None:
        self.settings = settings
        self._passed = tuple(passed)
        self._log_dir = log_dir
        self._repeated = RepeatedLines(_logger)
        self._isolated = isolated or confined
        self._confined = confined
        self._readable = readable
        self._writable = tuple(writable)
        self._runners = runners
        self._mounts = mounts_of(settings.binds)
        self._epoll = select.epoll()
        self._containers: dict[int, Container] = {}  # by descriptors of their sockets and logs
        self._starts: dict[str, ContainerStart] = {}  # that have not connected yet, by name
        self._prepared: dict[str, Prepared] = {}
        self._located: dict[Environment, tuple[float, Located]] = {}  # with when it was answered
        self._unlocated: dict[str, tuple[Environment, ContainerStart, tuple[str, ...]]] = {}  # templates to be started
        self._preparer = Preparer(self._preparation_settings, limit_s=settings.start_limit_s)
        self._epoll.register(self._preparer.fileno(), select.EPOLLIN)
        self._root: Path | None = None
        self._pool = TemplatePool(
            PreloadStore(cache_directory(settings) / _IMPORTS),
            spares=spares,
            idle_s=settings.idle_s,
            memory_bytes=None if settings.memory_bytes is None else settings.memory_bytes // 2,
        )
        self._epoll.register(self._pool.fileno(), select.EPOLLIN)
        self._templates: set[Container] = set()
        self._without_templates: dict[str, float] = {}  # until when, by submitter
        self._own: dict[str, subprocess.Popen[bytes]] = {}
        self._ends: dict[str, int] = {}  # descriptors of the processes of templates, by name

    def fileno(self) -> int:
        """Readable when :meth:`serve` has something to do."""
        return self._epoll.fileno()

    @property
    def children(self) -> set[int]:
        """Process ids of this process's children that are not workers."""
        templates = {*(each.pid for each in self._templates), *(each.pid for each in self._own.values())}
        return templates if self._preparer.pid is None else {*templates, self._preparer.pid}

    def next_deadline(self) -> float:
        """When :meth:`serve` must be called in any case, in monotonic seconds."""
        return min(self._preparer.next_deadline(), self._pool.next_deadline())

    # -- preparation ---------------------------------------------------------------------------------------------------

    def prepare(self, environment: Environment, *, trusted: bool) -> None:
        """Prepare an environment, without waiting; :meth:`serve` answers.

        :param trusted: whether the owner of the endpoint has named it.
        """
        self._preparer.prepare(environment, trusted=trusted)

    def release(self, key: str) -> None:
        """An environment is not used any more, until it is prepared again."""
        self._pool.release(key)
        if self._prepared.pop(key, None) is not None:
            self._preparer.order(preparation.Release(key))

    def learn(self, key: str, modules: Sequence[str]) -> None:
        """Tasks have imported these; ``key``: as of
        :func:`~farcall_endpoint.environments.templates.preload.statistics_key`."""
        self._pool.learn(key, modules, now=time.monotonic())

    def serve(self) -> list[PreparationReport | TemplateChange]:
        """Do what is due, without waiting; what happened to environments."""
        reports: list[PreparationReport | TemplateChange] = []
        self._located.clear()
        if time.monotonic() >= self._preparer.next_deadline():
            reports += self._read_reports()
        if time.monotonic() >= self._pool.next_deadline():
            reports += self._serve_templates()
        for descriptor, _ in self._epoll.poll(0):
            container = self._containers.get(descriptor)
            if descriptor == self._pool.fileno():
                reports += self._serve_templates()
            elif descriptor == self._preparer.fileno():
                reports += self._read_reports()
            elif container is None:
                continue
            elif descriptor == self._ends.get(container.name):
                self._template_failed(container)
            elif container.listener is not None and descriptor == container.listener.fileno():
                self._accept(container)
            elif descriptor in container.unproved():
                self._check_secret(container, descriptor)
            elif container.connection is not None and descriptor == container.connection.fileno():
                container.read()
                self._forget(descriptor)
                if container.has_begun and container.origin is not None:
                    self._start_template(container.template_key, *container.origin)
            elif not container.log.read():
                self._forget(descriptor)
                container.log.close()
        unlocated, self._unlocated = self._unlocated, {}
        for key, template in unlocated.items():
            self._start_root_template(key, *template)
        return reports

    def _read_reports(self) -> list[PreparationReport]:
        reports = self._preparer.read()
        self._prepared |= {report.key: report for report in reports if isinstance(report, Prepared)}
        now = time.monotonic()
        self._located |= {report.environment: (now, report) for report in reports if isinstance(report, Located)}
        return [report for report in reports if not isinstance(report, Located)]

    def _preparation_settings(self) -> PreparationSettings:
        return PreparationSettings(
            environments=self.settings,
            cache=str(cache_directory(self.settings)),
            log_dir="" if self._log_dir is None else str(self._log_dir),
            run_dir=str(self._run_directory()),
            confined=self._confined,
            isolated=self._isolated,
            readable=tuple(self._readable()),
            writable=self._writable,
            passed=self._passed,
        )

    # -- facts ---------------------------------------------------------------------------------------------------------

    def refusal(self, environment: Environment, *, unconfined: bool) -> str:
        """Why tasks of other submitters than the owner may not use an environment, whatever is on the node; empty if
        they may.

        :param unconfined: whether they should be confined, and bubblewrap is not there to do it.
        """
        try:
            self._path_of(environment)
        except access.Refused as error:
            return str(error)
        if unconfined and environment.type in access.UNTRUSTED_OUTSIDE:
            return f"only bubblewrap can confine {environment.type} environments, and this node has none"
        return ""

    def locate(self, environment: Environment) -> Located:
        """Return the file or directory that a submitter's environment, which is not refused, names on the node. The
        result of a look-up is valid for :data:`_LOCATED_S`.

        :raises NotLocated: while the look-up runs: call this again after :meth:`serve`.
        """
        if not self._path_of(environment):
            return Located(environment)
        answered_at, located = self._located.get(environment, (-math.inf, None))
        if located is None or time.monotonic() >= answered_at + _LOCATED_S:
            self._preparer.locate(environment)
            raise NotLocated(environment.location)
        return located

    def _path_of(self, environment: Environment) -> str:
        path = access.node_path(self._runners.get(environment.type), environment.location)
        return access.named(environment, self.settings, node_path=path)

    def is_prepared(self, key: str) -> bool:
        """Whether workers of an environment can be started."""
        return key in self._prepared

    def prefix_variables(self, environment: Environment, path: str) -> dict[str, str]:
        """The variables of an activated Python prefix.

        :param path: the search path of programs without it.
        """
        prepared = self._prepared.get(environment.key)
        if prepared is None:
            return {}
        own = "CONDA_PREFIX" if environment.type == "conda" else "VIRTUAL_ENV"
        return {own: prepared.image, "PATH": f"{prepared.image}/bin:{path or os.defpath}"}

    def paths(self, environment: Environment) -> tuple[str, ...]:
        """Return the paths of a prefix and of the worker's code on the node."""
        prepared = self._prepared.get(environment.key)
        return () if prepared is None else (prepared.image, prepared.bundle)

    # -- containers ----------------------------------------------------------------------------------------------------

    def start(self, environment: Environment, wanted: ContainerStart) -> Container | ForkedProcess:
        """Start a worker: fork it from a template, or start a container; that gets its descriptors when it connects.

        :raises EnvironmentLost: if it must be prepared again.
        :raises NotLocated: as of :meth:`locate`.
        :raises OSError: if the environment is not prepared, or cannot be started so, or the machine lacks something.
        """
        key = key_of_template(environment.key, wanted)
        if (
            wanted.fork
            and (fork := self._pool.fork(key, wanted.boot, wanted.descriptors, now=time.monotonic())) is not None
        ):
            wanted.sent()
            self._start_template(key, environment, wanted)  # if tasks import more by now
            return fork
        container = self._start(environment, wanted)
        if wanted.fork:
            container.template_key = key
            container.origin = environment, wanted
        return container

    def _start(self, environment: Environment, wanted: ContainerStart, module: str = "") -> Container:
        prepared = self._prepared.get(environment.key)
        if prepared is None:
            raise OSError(f"environment {environment.label} is not prepared")
        if (path := self._missing(prepared)) is not None:
            raise EnvironmentLost(f"{path} was deleted")
        runner = self._runners[environment.type]
        place = None
        if wanted.locate is not None and prepared.image == environment.location:  # else it lies in the cache
            place = wanted.locate()
        directory = self._new_directory()
        name = directory.name
        log: StartLog | None = None
        listener: socket.socket | None = None
        secret = secrets.token_bytes(_SECRET_BYTES)
        try:
            with open(directory / booting.SECRET, "xb", opener=_private) as file:
                file.write(secret)
            listener = booting.listen(str(directory / SOCKET))
            log = StartLog(self._new_log(environment, name))
            start = self._start_of(environment, prepared, runner, wanted, directory, module)
            if place is None or environment.type in access.CONFINED_OUTSIDE:
                command = runner.command(start)
            else:
                start, before = access.shown(environment.type, start, place, cache_directory(self.settings))
                command = [*before, *runner.command(start)]
            stop = runner.stop(start)
            if wanted.confine is not None:
                command = [*wanted.confine((prepared.bundle, str(directory)), prepared.image, place), *command]
            if stop is not None:
                self._preparer.order(preparation.Started(name, tuple(stop)))
            spawn = functools.partial(_spawn, [*wanted.before, *command], output=log.writer, variables=wanted.variables)
            process = start_apart(spawn) if wanted.private_root else spawn()
        except BaseException as error:
            if listener is not None:
                listener.close()
            if log is not None:
                log.close()
            shutil.rmtree(directory, ignore_errors=True)
            if isinstance(error, ValueError):
                raise OSError(str(error)) from error
            raise
        log.started()
        container = Container(
            process,
            name=name,
            directory=directory,
            listener=listener,
            secret=secret,
            log=log,
            has_stop=stop is not None,
            is_remote=environment.type in _REMOTE,
        )
        for descriptor in (listener.fileno(), log.fileno()):
            self._containers[descriptor] = container
            self._epoll.register(descriptor, select.EPOLLIN)
        self._starts[name] = wanted
        return container

    def ended(self, container: Container) -> str:
        """A container's process has ended: make sure that nothing is left of it. The runner's last words, if the worker
        did not begin."""
        container.log.read()
        container.read()
        for descriptor in [each for each, owner in self._containers.items() if owner is container]:
            self._forget(descriptor)
        if (wanted := self._starts.pop(container.name, None)) is not None:
            wanted.sent()
        words = "" if container.has_begun else container.log.last_lines()
        container.close()
        if container.has_stop:
            self._preparer.order(preparation.Ended(container.name))
        return words

    def close(self) -> None:
        """End what is left; waits for the ends of containers, for a limited time."""
        self._pool.close()
        for container in set(self._templates):
            self._end_template(container)
        for container in set(self._containers.values()):
            self.ended(container)
        self._preparer.close()
        self._epoll.close()
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)

    # -- templates -----------------------------------------------------------------------------------------------------

    def fork_own(self, key: str, boot: Boot, descriptors: Descriptors) -> ForkedProcess | None:
        """A worker of the endpoint's own Python; None if it must be started afresh."""
        return self._pool.fork(key, boot, descriptors, now=time.monotonic())

    def start_own_template(
        self, key: str, command: Sequence[str], boot: Boot, *, submitter: str, writable: Sequence[str] = ()
    ) -> None:
        """Start a template of the endpoint's own Python, if there should be one.

        :param command: what to write before its command.
        :param boot: of one of its workers.
        :param writable: with namespaces, where its workers may write.
        """
        statistics = statistics_key("", submitter)
        modules = self._pool.wanted(key, statistics, None, now=time.monotonic())
        if modules is None or self._pool.branch(
            key, "", modules, root=key, now=time.monotonic(), statistics_key=statistics
        ):
            return
        try:
            start = functools.partial(start_template, command, variables=boot.variables, user_packages=not submitter)
            process, connection = start_apart(start) if submitter else start()
        except OSError as error:
            self._pool.not_started(key, str(error), now=time.monotonic())
            return
        name = f"farcall-{uuid.uuid4().hex[:12]}"
        self._own[name] = process
        self._kill_if_manager_is_killed(name, process.pid)
        self._pool.add(
            key,
            "",
            connection,
            modules,
            root=TemplateRoot(name=key, namespaces=boot.namespaces, writable=tuple(writable)),
            stop=lambda: self._end_own(name),
            now=time.monotonic(),
            statistics_key=statistics,
        )

    def _end_own(self, name: str) -> None:
        process = self._own.pop(name)
        process_reaper.kill_trees({process.pid})
        process.wait()
        self._preparer.order(preparation.Ended(name, stops=False))

    def _kill_if_manager_is_killed(self, name: str, group: int) -> None:
        self._preparer.order(preparation.Started(name, ("kill", "-KILL", "--", f"-{group}")))

    def _start_template(self, key: str, environment: Environment, wanted: ContainerStart) -> None:
        """A worker has begun: start a template for the next ones like it, if there should be another one."""
        if time.monotonic() < self._without_templates.get(wanted.group, 0.0):
            return
        statistics = statistics_key(environment.key, wanted.group)
        modules = self._pool.wanted(key, statistics, environment, now=time.monotonic())
        if modules is None or self._pool.branch(
            *(key, environment.key, modules),
            root=self._root_of(environment, wanted),
            now=time.monotonic(),
            statistics_key=statistics,
        ):
            return
        self._start_root_template(key, environment, wanted, modules)

    def _start_root_template(
        self, key: str, environment: Environment, wanted: ContainerStart, modules: tuple[str, ...]
    ) -> None:
        try:
            template = self._start(environment, wanted, TEMPLATE)
        except NotLocated:
            self._unlocated[key] = environment, wanted, modules
            return
        except OSError as error:
            self._pool.not_started(key, str(error), now=time.monotonic())
            return
        self._starts.pop(template.name)
        template.modules, template.template_key, template.origin = modules, key, (environment, wanted)
        self._templates.add(template)
        if not template.has_stop:
            self._kill_if_manager_is_killed(template.name, template.pid)
        end = os.pidfd_open(template.pid)
        self._ends[template.name] = end
        self._containers[end] = template
        self._epoll.register(end, select.EPOLLIN)

    def _add_template(self, template: Container) -> None:
        """A template has connected."""
        assert template.connection is not None
        assert template.origin is not None
        assert template.modules is not None
        connection, template.connection = template.connection, None
        environment, wanted = template.origin
        shared = [mount.target for mount in (*wanted.mounts, *self._mounts) if mount.writable]
        if environment.type in _OF_NODE and not wanted.private_root:
            shared += _TEMPORARY_OF_NODE
        self._pool.add(
            template.template_key,
            environment.key,
            connection,
            template.modules,
            root=TemplateRoot(
                name=self._root_of(environment, wanted),
                namespaces=wanted.boot.namespaces,
                writable=tuple(shared),
                network=self.settings.network,
                private=(wanted.boot.directory, *(mount.target for mount in wanted.mounts)),
            ),
            stop=lambda: self._end_template(template),
            now=time.monotonic(),
            statistics_key=statistics_key(environment.key, wanted.group),
            name=template.name,
        )

    @property
    def has_templates_of_others(self) -> bool:
        """Whether there are templates in environments of other submitters than the owner."""
        return any(container.origin is not None and container.origin[1].group for container in self._templates)

    def templates_of_others(self) -> list[RunningTemplate]:
        """These templates."""
        found: list[RunningTemplate] = []
        for container in self._templates:
            if container.origin is not None and container.origin[1].group:
                family = self._pool.named(container.name)
                found.append(
                    RunningTemplate(
                        container.name,
                        container.pid,
                        [template.pid for template in family if template.pid],
                        set().union(*(template.workers for template in family)),
                        submitter=container.origin[1].group,
                        forked=sum(template.forked for template in family),
                        unanswered=next(filter(None, (template.unanswered for template in family)), 0),
                        is_remote=container.is_remote,
                    )
                )
        return found

    def template_takes(self, name: str, size_bytes: int) -> None:
        """Record the memory of a template with its branches and without its workers."""
        self._pool.takes(name, size_bytes)

    def end_template(self, name: str, reason: str) -> None:
        """End a template, and the workers that are forks of it. Its submitter gets none for a while: the next one could
        be of another environment."""
        for container in [each for each in self._templates if each.name == name]:
            if container.origin is not None:
                if len(self._without_templates) >= _MOST_WITHOUT_TEMPLATES:
                    self._without_templates.clear()
                self._without_templates[container.origin[1].group] = time.monotonic() + _WITHOUT_TEMPLATES_S
            family = self._pool.named(name)
            for template in family:
                template.kill_all(reason)
            if not family:
                self._pool.not_started(container.template_key, reason, now=time.monotonic())
                self._end_template(container)

    def _root_of(self, environment: Environment, wanted: ContainerStart) -> str:
        """The name of the root of a template: equal where environments differ in what they preload only."""
        prepared = self._prepared.get(environment.key)
        if prepared is None:
            return ""
        place = msgspec.structs.replace(environment, name="", preload=None).key
        image = (prepared.image, prepared.python, prepared.bundle)
        return key_of_template("\0".join((place, *image)), wanted)

    def _template_failed(self, template: Container) -> None:
        """The process of a template has ended; one that has connected is the pool's matter."""
        self._forget(self._ends[template.name])
        if template.listener is not None:
            template.log.read()
            reason = template.log.last_lines() or "it ended before it connected"
            self._pool.not_started(template.template_key, reason, now=time.monotonic())
            self._end_template(template)

    def _end_template(self, template: Container) -> None:
        """End what was started for a template."""
        if template not in self._templates:
            return
        self._templates.discard(template)
        process_reaper.kill_trees({template.pid})
        template.wait()
        self._forget(self._ends[template.name])
        os.close(self._ends.pop(template.name))
        if not template.has_stop:
            self._preparer.order(preparation.Ended(template.name, stops=False))
        self.ended(template)

    def _serve_templates(self) -> list[TemplateChange]:
        return [change for change in self._pool.serve(now=time.monotonic()) if change.environment_key]

    def _missing(self, prepared: Prepared) -> Path | None:
        """Return a file of the environment that is missing in the cache."""
        image = Path(prepared.image)
        needed = [Path(prepared.bundle) / bundle.BOOTSTRAP]
        if image.is_relative_to(cache_directory(self.settings)):
            needed.append(image)
        return next((path for path in needed if not path.exists()), None)

    def _start_of(
        self,
        environment: Environment,
        prepared: Prepared,
        runner: Runner,
        wanted: ContainerStart,
        directory: Path,
        module: str,
    ) -> Start:
        code, run = prepared.bundle, str(directory)
        mounts: tuple[Mount, ...] = ()
        if environment.type not in WITHOUT_CONTAINER:
            code, run = runner.worker_target, f"{runner.worker_target}/{bundle.RUN}"
            mounts = (
                *(Mount(prepared.bundle, code), Mount(str(directory), run)),
                *(*wanted.mounts, *self._mounts),
            )
        program = (
            *wanted.within,
            prepared.python,
            "-I",
            "-S",
            f"{code}/{bundle.BOOTSTRAP}",
            f"{run}/{SOCKET}",
            *filter(None, [module]),
        )
        return Start(
            prepared.image,
            program,
            mounts=mounts,
            variables=probe.search_path(environment.type, prepared.python)
            | first_variables(wanted.boot.variables)
            | (variables_of_template(wanted.boot.variables) if module else {}),
            directory=wanted.boot.directory,
            network=self.settings.network,
            accelerators=wanted.accelerators,
            amd=wanted.amd,
            options=options_for(environment, self.settings),
            name=directory.name,
            private_root=wanted.private_root,
        )

    def _accept(self, container: Container) -> None:
        assert container.listener is not None
        try:
            connection, _ = container.listener.accept()
        except OSError:  # it is gone again
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, user, _ = _CREDENTIALS.unpack(credentials)
        if not self._is_expected(container, pid, user):
            message = "process %d of user %d connected instead of container %s"
            self._repeated.log(logging.WARNING, message, pid, user, container.name)
            connection.close()
            return
        self._containers[connection.fileno()] = container
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        if (oldest := container.accept(connection, pid)) is not None:
            self._forget(oldest)
            container.drop(oldest)

    def _check_secret(self, container: Container, descriptor: int) -> None:
        """A process that has connected has sent something: the secret of the container, or it is another process."""
        self._forget(descriptor)
        if (proved := container.proved(descriptor)) is None:
            message = "a process without the secret of container %s has connected"
            self._repeated.log(logging.WARNING, message, container.name)
            container.drop(descriptor)
            return
        assert container.listener is not None
        for each in (container.listener.fileno(), *container.unproved()):
            self._forget(each)
        for each in container.unproved():
            container.drop(each)
        connection, pid = proved
        container.connected(connection, pid)
        if container.modules is not None:
            self._add_template(container)
            return
        wanted = self._starts.pop(container.name)
        connection.setblocking(False)
        try:
            booting.send_boot(connection, wanted.boot, wanted.descriptors)
        except OSError as error:
            _logger.warning("container %s does not take its worker: %s", container.name, error)
        finally:
            wanted.sent()
        self._containers[connection.fileno()] = container
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _is_expected(self, container: Container, pid: int, user: int) -> bool:
        """Whether a process may prove that it is the worker: it is below the runner, unless a daemon has started it."""
        if container.is_remote:
            return True
        return user == os.geteuid() and container.pid in process_reaper.ancestry(pid, process_reaper.read_processes())

    def _forget(self, descriptor: int) -> None:
        if self._containers.pop(descriptor, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(descriptor)

    def _run_directory(self) -> Path:
        """A private directory with a short path, for sockets."""
        if self._root is None:
            place = tempfile.gettempdir()
            if len(place) > _LONGEST_SOCKET_NAME - len("/farcall-12345678/farcall-123456789012/s"):
                place = "/tmp"  # noqa: S108 - the directory in it is private
            self._root = Path(tempfile.mkdtemp(prefix="farcall-", dir=place))
        else:  # a program that cleans /tmp may have removed it
            with contextlib.suppress(FileExistsError):
                self._root.mkdir(mode=0o700)
            if self._root.lstat().st_uid != os.geteuid():
                raise PermissionError(f"{self._root} belongs to another user")
        return self._root

    def _new_directory(self) -> Path:
        """A private directory for the socket of one container, with a unique name."""
        directory = self._run_directory() / f"farcall-{uuid.uuid4().hex[:12]}"
        directory.mkdir(mode=0o700)
        return directory

    def _new_log(self, environment: Environment, name: str) -> Path | None:
        """The file for a start log; the oldest ones are removed."""
        if self._log_dir is None:
            return None
        directory = self._log_dir / "starts"
        with contextlib.suppress(OSError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            keep_latest(directory.glob("*.log"), _MOST_LOGS - 1)
        return directory / f"{environment.key}-{name}.log"


def _spawn(command: Sequence[str], *, output: int, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd="/",
        env=dict(variables),
        start_new_session=True,
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def cache_directory(settings: EnvironmentSettings) -> Path:
    """Return the directory of prepared files: that of the settings, or one on the node's disk."""
    return Path(settings.cache_dir or Path(tempfile.gettempdir()) / f"farcall-environments-{os.geteuid()}")


def mounts_of(binds: Sequence[str]) -> tuple[Mount, ...]:
    """Return the mounts that settings name: ``source[:target[:ro]]``."""
    found: list[Mount] = []
    for bind in binds:
        source, _, rest = bind.partition(":")
        target, _, mode = rest.partition(":")
        found.append(Mount(source, target or source, writable=mode != "ro"))
    return tuple(found)


def first_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a container's program before it boots. They contain no secrets, because other users of
    the node can read the command line of a runner."""
    return {name: variables[name] for name in _FIRST if name in variables}


def key_of_template(place: str, wanted: ContainerStart) -> str:
    """Return the key of a template: where it runs, for which workers, with which accelerators, and its variables.

    In a container that has no other accelerators than its worker's, these variables are the same for all workers.
    """
    return template_key("-".join((place, wanted.group, *wanted.accelerators)), wanted.boot.variables)
