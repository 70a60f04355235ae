"""ECS services as processes: a task runs its container's command and is restarted as by ECS."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from localstack.aws.api import CommonServiceException, RequestContext, handler

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

_definitions: dict[str, Model] = {}
_services: dict[str, _RunningService] = {}


class TaskDefinitionProvider(Provider):
    """Stores the container definitions for services."""

    TYPE = "AWS::ECS::TaskDefinition"
    SCHEMA: Model = schema(TYPE, "TaskDefinitionArn")

    def create(self, request: Request) -> Event:
        model = request.desired_state
        family = model.setdefault("Family", new_name(request))
        revision = uuid.uuid4().hex[:8]
        arn = f"arn:aws:ecs:{request.region_name}:{request.account_id}:task-definition/{family}:{revision}"
        model["TaskDefinitionArn"] = arn
        _definitions[arn] = dict(model)
        return done(model)

    def update(self, request: Request) -> Event:
        # On AWS every change creates a new revision with its own ARN.
        return self.create(request)


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
        if service := _services.pop(model["ServiceArn"], None):
            service.scale(0)
        return done(model)

    def _replace(self, request: Request, model: Model) -> Event:
        definition = _definitions[model["TaskDefinition"]]
        groups = [target_group(balancer["TargetGroupArn"]) for balancer in model.get("LoadBalancers", [])]
        address = groups[0].address if groups else HOST
        new = _RunningService(
            [
                _Container(container, request, settings(), address=address)
                for container in definition["ContainerDefinitions"]
            ],
            groups,
        )
        try:
            new.scale(int(model.get("DesiredCount", 1)))
        except ChildDied as error:
            new.scale(0)
            return failed(model, str(error))
        old = _services.get(model["ServiceArn"])
        _services[model["ServiceArn"]] = new
        if old:
            old.scale(0)
        return done(model)


def _find_service(cluster: str, service: str) -> tuple[str, _RunningService] | None:
    """The ARN and the tasks of a service, given by its name or its ARN."""
    for arn, running in _services.items():
        if service == arn or arn.endswith(f":service/{cluster}/{service}"):
            return arn, running
    return None


class _Container:
    """One container of a task definition, which can be started several times. Peers reach it under ``address``."""

    def __init__(self, definition: Model, request: Request, config: Settings, *, address: str) -> None:
        self._settings = config
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

    def start(self) -> tuple[Child, Path]:
        """Start the container and wait until it is ready.

        :raises ChildDied: if it ends before it is ready, or takes too long.
        """
        directory = self._settings.directory / "tasks" / uuid.uuid4().hex
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
        self._child, directory = self._container.start()
        ready = json.loads((directory / settings().task_ready_file).read_text(encoding="utf-8"))
        self._port = int(ready["port"])
        for group in self._groups:
            group.register(self._port)
        arguments = (self._child, directory)
        threading.Thread(target=self._watch, args=arguments, name=f"ecs-{self._container.name}", daemon=True).start()

    def _deregister(self) -> None:
        for group in self._groups:
            group.deregister(self._port)

    def _watch(self, child: Child, directory: Path) -> None:
        status = child.wait()
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


class _RunningService:
    """The tasks of a service, members of ``groups`` while they run."""

    def __init__(self, containers: list[_Container], groups: list[TargetGroup]) -> None:
        self._containers = containers
        self._groups = groups
        self._tasks: list[list[_RunningContainer]] = []
        self._lock = threading.Lock()
        self.desired = 0

    @property
    def running(self) -> int:
        """The number of running tasks."""
        return len(self._tasks)

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


class EcsApi:
    """ECS API: the calls that our programs make, which describe and scale a service. Others are not implemented."""

    @handler("DescribeServices", expand=False)
    def describe_services(self, _context: RequestContext, request: dict[str, Any]) -> dict[str, Any]:
        cluster = request.get("cluster", "default")
        found = [(name, _find_service(cluster, name)) for name in request["services"]]
        return {
            "services": [_description(*service) for _, service in found if service],
            "failures": [{"arn": name, "reason": "MISSING"} for name, service in found if not service],
        }

    @handler("UpdateService", expand=False)
    def update_service(self, _context: RequestContext, request: dict[str, Any]) -> dict[str, Any]:
        found = _find_service(request.get("cluster", "default"), request["service"])
        if found is None:
            raise CommonServiceException("ServiceNotFoundException", f"Service {request['service']} not found.")
        arn, service = found
        if (desired := request.get("desiredCount")) is not None:
            # As on AWS, the answer does not wait for the tasks.
            threading.Thread(target=_scale, args=(service, desired), name="ecs-scale", daemon=True).start()
        return {"service": {**_description(arn, service), "desiredCount": desired}}


def _scale(service: _RunningService, tasks: int) -> None:
    try:
        service.scale(tasks)
    except ChildDied as error:
        LOG.warning("a task did not start: %s", error)


def _description(arn: str, service: _RunningService) -> dict[str, Any]:
    return {
        "serviceArn": arn,
        "serviceName": arn.rpartition("/")[2],
        "status": "ACTIVE",
        "desiredCount": service.desired,
        "runningCount": service.running,
    }


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
