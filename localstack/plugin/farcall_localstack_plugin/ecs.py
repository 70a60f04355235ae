"""ECS services as processes: a task runs its container's command and is restarted as by ECS."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from farcall_localstack_plugin import children
from farcall_localstack_plugin.balancer import TargetGroup, target_group
from farcall_localstack_plugin.children import Child, ChildDied
from farcall_localstack_plugin.engines import HOST
from farcall_localstack_plugin.files import write_whole
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

LOG = logging.getLogger(__name__)

_START_TIMEOUT_S = 180.0
_POLL_S = 0.02
_RESTART_INTERVAL_S = 1.0

_STOPPED_KEPT = 20
_SIGNALLED = 128  # plus the signal's number: the exit code of a container that a signal ended

#: Clusters by name; task definitions and services by ARN.
clusters: dict[str, Model] = {}
definitions: dict[str, Model] = {}
services: dict[str, RunningService] = {}
_revisions: Counter[str] = Counter()


@dataclasses.dataclass
class Task:
    """A task of a service: one start of its container, in a directory of its own. A restart is another task."""

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
        self._command = [*definition.get("EntryPoint", []), *definition.get("Command", [])]
        if self._command[0] == "python":
            self._command[0] = str(config.python)
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

    def start(self) -> tuple[Task, Child, Path]:
        """Start the container and wait until it is ready.

        :raises ChildDied: if it ends before it is ready, or takes too long.
        """
        service, definition = self._service["ServiceArn"], self._service["TaskDefinition"]
        task = Task(uuid.uuid4().hex, service, definition, self.name, _now())
        _record(task)
        try:
            child, directory = self._start(task.task_id)
        except ChildDied as error:
            task.record_stop("TaskFailedToStart", str(error))
            raise
        task.started_at = _now()
        return task, child, directory

    def _start(self, task_id: str) -> tuple[Child, Path]:
        directory = self._settings.directory / "tasks" / task_id
        storage = directory / "tmp"
        storage.mkdir(parents=True)
        overrides = {
            name: value.replace("{task}", str(directory)).replace("{address}", self._address)
            for name, value in self._settings.task_environment.items()
        }
        child = children.start(
            self.name,
            self._command,
            log=directory / f"{self.name}.log",
            environment={**self._environment, "TMPDIR": str(storage), **overrides},
            cwd=directory,
        )
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


class _RunningContainer:
    """One running container of a task; it is restarted after an unexpected end."""

    def __init__(self, container: _Container, groups: list[TargetGroup]) -> None:
        self._container = container
        self._groups = groups
        self._stopping = threading.Event()
        self._begin()

    def stop(self) -> None:
        """Stop the container: first deregister it, so that it gets no more connections, then end it."""
        self._stopping.set()
        self._deregister()
        self._child.stop()

    def _begin(self) -> None:
        """:raises ChildDied: if it does not become ready."""
        task, self._child, directory = self._container.start()
        ready = json.loads((directory / settings().task_ready_file).read_text(encoding="utf-8"))
        self._port = int(ready["port"])
        for group in self._groups:
            group.register(self._port)
        arguments = (task, self._child, directory)
        threading.Thread(target=self._watch, args=arguments, name=f"ecs-{self._container.name}", daemon=True).start()

    def _deregister(self) -> None:
        for group in self._groups:
            group.deregister(self._port)

    def _watch(self, task: Task, child: Child, directory: Path) -> None:
        status = child.wait()
        if self._stopping.is_set():
            task.record_stop("ServiceSchedulerInitiated", "Scaling activity initiated by the service", status=status)
        else:
            task.record_stop("EssentialContainerExited", "Essential container in task exited", status=status)
        self._deregister()
        with contextlib.suppress(FileNotFoundError):
            (directory / "pid").unlink()
        shutil.rmtree(directory / "tmp", ignore_errors=True)  # a task's storage ends with the task
        while not self._stopping.wait(_RESTART_INTERVAL_S) and not children.stopping():
            LOG.warning("task %s ended with status %s; starting it again", self._container.name, status)
            try:
                self._begin()
            except ChildDied as error:
                LOG.warning("%s", error)
            else:
                return


class RunningService:
    """The tasks of a service with the properties ``model``, members of ``groups`` while they run."""

    def __init__(self, model: Model, containers: list[_Container], groups: list[TargetGroup]) -> None:
        self.model = model
        self._containers = containers
        self._groups = groups
        self._tasks: list[list[_RunningContainer]] = []
        self._lock = threading.Lock()
        self.desired = 0
        self.created_at = _now()

    def count(self, status: str) -> int:
        """The number of tasks with that status, also of the service before its last update."""
        return sum(task.service == self.model["ServiceArn"] and task.status == status for task in all_tasks())

    def scale(self, tasks: int) -> None:
        """Start tasks, or stop the newest, until their number is ``tasks``, or that of a later concurrent call.

        :raises ChildDied: if one does not become ready; the others keep running.
        """
        self.desired = tasks
        with self._lock:
            while len(self._tasks) > self.desired:
                for container in self._tasks.pop():
                    container.stop()
            while len(self._tasks) < self.desired:
                self._tasks.append([_RunningContainer(container, self._groups) for container in self._containers])


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
