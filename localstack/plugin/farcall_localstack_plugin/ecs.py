"""ECS services as processes: a task runs its container's command, and is checked, stopped and replaced as by ECS."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import json
import logging
import os
import shutil
import threading
import time
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from farcall_localstack_plugin import children
from farcall_localstack_plugin.balancer import target_group
from farcall_localstack_plugin.children import Child, ChildDied
from farcall_localstack_plugin.engines import HOST
from farcall_localstack_plugin.files import write_whole
from farcall_localstack_plugin.health import Monitor, Schedule, passes
from farcall_localstack_plugin.providers import (
    Event,
    Model,
    Provider,
    Request,
    current,
    done,
    endpoint_url,
    failed,
    new_name,
    schema,
    updated,
)
from farcall_localstack_plugin.settings import Settings, settings
from farcall_localstack_plugin.targets import TargetGroup

LOG = logging.getLogger(__name__)

_START_TIMEOUT_S = 180.0
_POLL_S = 0.02
_RESTART_INTERVAL_S = 1.0

_STOPPED_KEPT = 20
_SPOT: Final = "FARGATE_SPOT"
#: Stop codes of ECS with their reasons.
_EXITED: Final = "EssentialContainerExited", "Essential container in task exited"
_SCALED: Final = "ServiceSchedulerInitiated", "Scaling activity initiated by the service"
_UNHEALTHY: Final = "ServiceSchedulerInitiated", "Task failed container health checks"
_UNHEALTHY_TARGET: Final = "ServiceSchedulerInitiated", "Task failed ELB health checks"
_INTERRUPTED: Final = "SpotInterruption", "Your Spot Task was interrupted."
_SIGNALLED = 128  # plus the signal's number: the exit code of a container that a signal ended

#: Clusters by name; task definitions and services by ARN.
clusters: dict[str, Model] = {}
definitions: dict[str, Model] = {}
services: dict[str, RunningService] = {}
_revisions: Counter[str] = Counter()


@dataclasses.dataclass
class Task:
    """A task: one start of a container, in a directory of its own. A restart is another task. A task that is
    ``alone`` was started by RunTask with the settings of a service, which does not replace it."""

    task_id: str
    service: str
    definition: str
    container: str
    created_at: dt.datetime
    started_at: dt.datetime | None = None
    stopped_at: dt.datetime | None = None
    exit_code: int | None = None
    stop_code: str = ""
    stopped_reason: str = ""
    health: str = "UNKNOWN"
    alone: bool = False

    @property
    def status(self) -> str:
        """PENDING until the container is ready, RUNNING, then STOPPED."""
        if self.stopped_at:
            return "STOPPED"
        return "RUNNING" if self.started_at else "PENDING"

    def record_stop(self, code: str, reason: str, *, status: int | None = None) -> None:
        """Record the end. ``status`` is the exit status of the process, with the negative number of a signal."""
        self.stop_code, self.stopped_reason = code, reason
        self.exit_code = status if status is None or status >= 0 else _SIGNALLED - status
        self.stopped_at = _now()


_tasks: dict[str, Task] = {}


def all_tasks() -> list[Task]:
    """Running tasks, and those stopped last, in the order of their start."""
    return list(_tasks.values())


def _record(task: Task) -> None:
    _tasks[task.task_id] = task
    stopped = [each.task_id for each in all_tasks() if each.stopped_at]
    for task_id in stopped[:-_STOPPED_KEPT]:
        _tasks.pop(task_id, None)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class ClusterProvider(Provider):
    """Stores the cluster; its services run on this machine."""

    TYPE = "AWS::ECS::Cluster"
    SCHEMA: Model = schema(TYPE, "ClusterName")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        name = model.setdefault("ClusterName", new_name(request))
        model["Arn"] = f"arn:aws:ecs:{request.region_name}:{request.account_id}:cluster/{name}"
        clusters[name] = dict(model)
        return done(model)

    def update(self, request: Request) -> Event:
        model = updated(request)
        clusters[model["ClusterName"]] = dict(model)
        return done(model)

    def delete(self, request: Request) -> Event:
        model = current(request)
        clusters.pop(model.get("ClusterName", ""), None)
        return done(model)


class TaskDefinitionProvider(Provider):
    """Stores the container definitions for services."""

    TYPE = "AWS::ECS::TaskDefinition"
    SCHEMA: Model = schema(TYPE, "TaskDefinitionArn")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        family = model.setdefault("Family", new_name(request))
        _revisions[family] += 1
        prefix = f"arn:aws:ecs:{request.region_name}:{request.account_id}:task-definition"
        model["TaskDefinitionArn"] = arn = f"{prefix}/{family}:{_revisions[family]}"
        definitions[arn] = {**model, "Status": "ACTIVE"}
        return done(model)

    def update(self, request: Request) -> Event:
        # On AWS every change creates a new revision with its own ARN.
        self._retire(request.previous_state or {})
        return self.create(request)

    def delete(self, request: Request) -> Event:
        model = current(request)
        self._retire(model)
        return done(model)

    def _retire(self, model: Model) -> None:
        """A retired revision can be described, because tasks of it may run, but is not listed."""
        if definition := definitions.get(model.get("TaskDefinitionArn", "")):
            definition["Status"] = "INACTIVE"


class ServiceProvider(Provider):
    """Starts ``DesiredCount`` tasks, and replaces them when the task definition changes."""

    TYPE = "AWS::ECS::Service"
    SCHEMA: Model = schema(TYPE, "ServiceArn")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        name = model.setdefault("ServiceName", new_name(request))
        model["Name"] = name
        region, account = request.region_name, request.account_id
        model["ServiceArn"] = f"arn:aws:ecs:{region}:{account}:service/{model['Cluster']}/{name}"
        return self._replace(request, model)

    def update(self, request: Request) -> Event:
        return self._replace(request, updated(request))

    def delete(self, request: Request) -> Event:
        model = current(request)
        if service := services.pop(model["ServiceArn"], None):
            service.scale(0)
        return done(model)

    def _replace(self, request: Request, model: Model) -> Event:
        definition = definitions[model["TaskDefinition"]]
        groups = [target_group(balancer["TargetGroupArn"]) for balancer in model.get("LoadBalancers", [])]
        address = groups[0].address if groups else HOST
        new = RunningService(
            dict(model),
            [
                _Container(container, request, settings(), service=model, address=address)
                for container in definition["ContainerDefinitions"]
            ],
            groups,
            grace_s=float(model.get("HealthCheckGracePeriodSeconds", 0)),
        )
        try:
            new.scale(int(model.get("DesiredCount", 1)))
        except ChildDied as error:
            new.scale(0)
            return failed(model, str(error))
        old = services.get(model["ServiceArn"])
        services[model["ServiceArn"]] = new
        if old:
            old.scale(0)
        return done(model)


class _Container:
    """One container of a task definition, which can be started several times. Peers reach it under ``address``."""

    def __init__(self, definition: Model, request: Request, config: Settings, *, service: Model, address: str) -> None:
        self._settings = config
        self._service = service
        self._address = address
        self.name: str = definition["Name"]
        self._entry_point: list[str] = definition.get("EntryPoint", [])
        self._command: list[str] = definition.get("Command", [])
        self._health: Model | None = definition.get("HealthCheck")
        #: Seconds between SIGTERM and SIGKILL.
        self.stop_timeout_s = float(definition.get("StopTimeout", 30))
        self._environment = {
            "PATH": os.environ["PATH"],
            "AWS_ENDPOINT_URL": endpoint_url(),
            "AWS_REGION": request.region_name,
            "AWS_DEFAULT_REGION": request.region_name,
            "AWS_ACCESS_KEY_ID": request.account_id,
            "AWS_SECRET_ACCESS_KEY": "test",
            **{variable["Name"]: str(variable["Value"]) for variable in definition.get("Environment", [])},
            **{secret["Name"]: _secret(secret["ValueFrom"], request) for secret in definition.get("Secrets", [])},
        }

    def _program(self, command: list[str]) -> list[str]:
        """A command of the container with this machine's Python."""
        return [str(self._settings.python), *command[1:]] if command[0] == "python" else command

    def monitor(self, directory: Path, health_port: int, on_change: Callable[[bool], None]) -> Monitor | None:
        """Start the container's health check, if it has one. The port of its health checks is another one here."""
        if self._health is None:
            return None
        kind, *command = self._health["Command"]
        assert kind == "CMD", "only commands without a shell are supported here"
        schedule = Schedule(
            interval_s=float(self._health.get("Interval", 30)) / self._settings.speed,
            successes=1,
            failures=int(self._health.get("Retries", 3)),
            grace_s=float(self._health.get("StartPeriod", 0)) / self._settings.speed,
        )
        check = functools.partial(
            passes,
            self._program(command),
            environment={**self._environment, "FARCALL_FORWARDER_HEALTH_PORT": str(health_port)},
            timeout_s=float(self._health.get("Timeout", 5)),
        )
        return Monitor(check, schedule, directory / "health-container.json", on_change=on_change)

    def start(self) -> tuple[Task, Child, Path]:
        """Start the container and wait until it is ready.

        :raises ChildDied: if it ends before it is ready, or takes too long.
        """
        task = self._new_task()
        try:
            child, directory = self._start(task.task_id)
        except ChildDied as error:
            task.record_stop("TaskFailedToStart", str(error))
            raise
        task.started_at = _now()
        return task, child, directory

    def run(self, command: list[str]) -> Task:
        """Start a task that runs another command, until that ends.

        :raises ChildDied: if LocalStack is stopping.
        """
        task = self._new_task(alone=True)
        child, directory = self._spawn(task.task_id, command)
        task.started_at = _now()
        watch = functools.partial(_record_end, task, child, directory)
        threading.Thread(target=watch, name=f"ecs-{self.name}", daemon=True).start()
        return task

    def _new_task(self, *, alone: bool = False) -> Task:
        service, definition = self._service["ServiceArn"], self._service["TaskDefinition"]
        task = Task(uuid.uuid4().hex, service, definition, self.name, _now(), alone=alone)
        _record(task)
        return task

    def _start(self, task_id: str) -> tuple[Child, Path]:
        child, directory = self._spawn(task_id, self._command)
        ready = directory / self._settings.task_ready_file
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not ready.exists():
            child.require_alive()
            if time.monotonic() > deadline:
                child.stop()
                raise ChildDied(f"{self.name} was not ready after {_START_TIMEOUT_S:.0f} s: {child.log_tail()}")
            time.sleep(_POLL_S)
        write_whole(directory / "pid", str(child.pid))
        return child, directory

    def _spawn(self, task_id: str, command: list[str]) -> tuple[Child, Path]:
        directory = self._settings.directory / "tasks" / task_id
        storage = directory / "tmp"
        storage.mkdir(parents=True)
        overrides = {
            name: value.replace("{task}", str(directory)).replace("{address}", self._address)
            for name, value in self._settings.task_environment.items()
        }
        child = children.start(
            self.name,
            self._program([*self._entry_point, *command]),
            log=directory / f"{self.name}.log",
            environment={**self._environment, "TMPDIR": str(storage), **overrides},
            cwd=directory,
        )
        return child, directory


def _record_end(task: Task, child: Child, directory: Path) -> None:
    task.record_stop(*_EXITED, status=child.wait())
    shutil.rmtree(directory / "tmp", ignore_errors=True)  # a task's storage ends with the task


@dataclasses.dataclass
class _Run:
    """One start of a container, with the port for its peers. ``end`` is the stop code and reason that it will have. It
    serves from the end of its start until something ends it."""

    task: Task
    child: Child
    directory: Path
    port: int
    monitor: Monitor | None = None
    end: tuple[str, str] = _EXITED
    is_serving: bool = False


class _RunningContainer:
    """One running container of a service: it is replaced after an unexpected end, when it is unhealthy, and when Spot
    capacity is taken away.

    :param grace_s: seconds in which failed checks of a load balancer do not count.
    """

    def __init__(self, container: _Container, groups: list[TargetGroup], *, grace_s: float) -> None:
        self._container = container
        self._groups = groups
        self._grace_s = grace_s
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._run = self._start()

    def stop(self) -> None:
        """Stop the container, as ECS does: see :meth:`_end`."""
        with self._lock:
            self._stopping.set()
            run = self._run
            run.is_serving = False
        self._end(run, _SCALED)

    def interrupt(self, task_id: str) -> bool:
        """Take the Spot capacity of that task away: SIGTERM at once, without the deregistration delay, and another
        task. Returns whether the task runs here."""
        run = self._run
        if run.task.task_id != task_id or not run.child.alive:
            return False
        self._replace(run, _INTERRUPTED)
        return True

    def _start(self) -> _Run:
        """Start the container, and wait until it is ready and the load balancer's targets are healthy.

        :raises ChildDied: if it does not become so.
        """
        task, child, directory = self._container.start()
        ready = json.loads((directory / settings().task_ready_file).read_text(encoding="utf-8"))
        run = _Run(task, child, directory, int(ready["port"]))
        health_port = urllib.parse.urlsplit(ready["health_url"]).port
        assert health_port is not None
        run.monitor = self._container.monitor(directory, health_port, functools.partial(self._on_health, run))
        for group in self._groups:
            group.register(
                run.port,
                health_port,
                file=directory / "health-target.json",
                grace_s=self._grace_s,
                on_unhealthy=functools.partial(self._replace, run, _UNHEALTHY_TARGET),
            )
        try:
            self._wait_for_targets(run)
        except ChildDied as error:
            self._deregister(run)
            child.stop()
            task.record_stop("TaskFailedToStart", str(error))
            raise
        with self._lock:
            self._run = run
            is_late = self._stopping.is_set()
            run.is_serving = not is_late
        name = f"ecs-{self._container.name}"
        threading.Thread(target=self._watch, args=(run,), name=name, daemon=True).start()
        if is_late:
            self._end(run, _SCALED)
        return run

    def _wait_for_targets(self, run: _Run) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not all(group.is_healthy(run.port) for group in self._groups):
            run.child.require_alive()
            if time.monotonic() > deadline:
                raise ChildDied(f"the load balancer does not find {self._container.name} healthy")
            time.sleep(_POLL_S)

    def _on_health(self, run: _Run, is_healthy: bool) -> None:
        run.task.health = "HEALTHY" if is_healthy else "UNHEALTHY"
        if not is_healthy:
            self._replace(run, _UNHEALTHY)

    def _replace(self, run: _Run, end: tuple[str, str]) -> None:
        """Start another task and end this one, unless it ends already."""
        if self._begin_end(run):
            LOG.warning("task %s is replaced: %s", run.task.task_id, end[1])
            for work in (functools.partial(self._end, run, end), self._start_again):
                threading.Thread(target=work, name=f"ecs-{self._container.name}", daemon=True).start()

    def _begin_end(self, run: _Run) -> bool:
        """Note that a task ends; returns False if it had not started, or something else ends it."""
        with self._lock:
            was_serving, run.is_serving = run.is_serving, False
            return was_serving

    def _end(self, run: _Run, end: tuple[str, str]) -> None:
        """Deregister the task, wait for the deregistration delay, send SIGTERM, and SIGKILL after ``StopTimeout``."""
        run.end = end
        self._deregister(run)
        if end is not _INTERRUPTED:
            deadline = time.monotonic() + max((group.delay_s for group in self._groups), default=0.0)
            while run.child.alive and time.monotonic() < deadline and not children.stopping():
                time.sleep(_POLL_S)
        for group in self._groups:
            group.remove(run.port)
        run.child.stop(within_s=self._container.stop_timeout_s)

    def _deregister(self, run: _Run) -> None:
        if run.monitor:
            run.monitor.close()
        for group in self._groups:
            group.deregister(run.port)

    def _watch(self, run: _Run) -> None:
        status = run.child.wait()
        run.task.record_stop(*run.end, status=status)
        self._deregister(run)
        for group in self._groups:
            group.remove(run.port)
        with contextlib.suppress(FileNotFoundError):
            (run.directory / "pid").unlink()
        shutil.rmtree(run.directory / "tmp", ignore_errors=True)  # a task's storage ends with the task
        if self._begin_end(run):
            LOG.warning("task %s ended with status %s; starting it again", self._container.name, status)
            self._stopping.wait(_RESTART_INTERVAL_S)
            self._start_again()

    def _start_again(self) -> None:
        """Start another task, in as many attempts as it takes."""
        while not self._stopping.is_set() and not children.stopping():
            try:
                self._start()
            except ChildDied as error:
                LOG.warning("%s", error)
                self._stopping.wait(_RESTART_INTERVAL_S)
            else:
                return


class RunningService:
    """The tasks of a service with the properties ``model``, members of ``groups`` while they run."""

    def __init__(
        self, model: Model, containers: list[_Container], groups: list[TargetGroup], *, grace_s: float
    ) -> None:
        self.model = model
        self._containers = containers
        self._groups = groups
        self._grace_s = grace_s
        self._tasks: list[list[_RunningContainer]] = []
        self._lock = threading.Lock()
        self.desired = 0
        self.created_at = _now()

    def count(self, status: str) -> int:
        """The number of tasks with that status, also of the service before its last update."""
        ours = (task for task in all_tasks() if task.service == self.model["ServiceArn"] and not task.alone)
        return sum(task.status == status for task in ours)

    def scale(self, tasks: int) -> None:
        """Start tasks, or stop the newest, until their number is ``tasks``, or that of a later concurrent call.

        :raises ChildDied: if one does not become ready; the others keep running.
        """
        self.desired = tasks
        surplus: list[_RunningContainer] = []
        with self._lock:
            while len(self._tasks) > self.desired:
                surplus += self._tasks.pop()
            while len(self._tasks) < self.desired:
                start = functools.partial(_RunningContainer, groups=self._groups, grace_s=self._grace_s)
                self._tasks.append([start(container) for container in self._containers])
        if surplus:  # they drain at the same time, and others may start meanwhile
            with ThreadPoolExecutor(len(surplus)) as stops:
                for stopped in [stops.submit(container.stop) for container in surplus]:
                    stopped.result()

    def run(self, commands: Mapping[str, list[str]]) -> list[Task]:
        """Start a task with this service's settings, whose containers run other commands, by their names.

        :raises ChildDied: if LocalStack is stopping.
        """
        return [container.run(commands[container.name]) for container in self._containers]

    def interrupt(self, task_id: str) -> bool:
        """Take the Spot capacity of a task away. Returns whether it is a running Spot task of this service."""
        strategy: list[Mapping[str, Any]] = self.model.get("CapacityProviderStrategy", [])
        is_spot = any(each["CapacityProvider"] == _SPOT for each in strategy)
        return is_spot and any(container.interrupt(task_id) for task in self._tasks for container in task)


def _secret(reference: str, request: Request) -> str:
    """The value of the secret ``arn:…:secret:NAME[:JSON_KEY::]``."""
    prefix, _, rest = reference.partition(":secret:")
    name, *key = rest.split(":")
    secrets = request.aws_client_factory.secretsmanager
    value: str = secrets.get_secret_value(SecretId=f"{prefix}:secret:{name}")["SecretString"]
    if key and key[0]:
        fields: dict[str, Any] = json.loads(value)
        return str(fields[key[0]])
    return value
