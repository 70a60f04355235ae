"""ECS API: calls that list and describe clusters, services, tasks and task definitions, the one that scales a service,
and the one that runs another command in a task. Others are not implemented."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from localstack.aws.api import CommonServiceException, RequestContext, handler

from farcall_localstack_plugin import ecs
from farcall_localstack_plugin.children import ChildDied
from farcall_localstack_plugin.ecs import RunningService, Task

Request = dict[str, Any]
T = TypeVar("T")


class EcsApi:
    """The operations of the API. Lists have one page."""

    @handler("ListClusters", expand=False)
    def list_clusters(self, _context: RequestContext, _request: Request) -> Request:
        return {"clusterArns": [cluster["Arn"] for cluster in ecs.clusters.values()]}

    @handler("DescribeClusters", expand=False)
    def describe_clusters(self, _context: RequestContext, request: Request) -> Request:
        return _described("clusters", request.get("clusters") or ["default"], _cluster, _described_cluster)

    @handler("ListServices", expand=False)
    def list_services(self, _context: RequestContext, request: Request) -> Request:
        return {"serviceArns": [service.model["ServiceArn"] for service in _services_in(_known_cluster(request))]}

    @handler("DescribeServices", expand=False)
    def describe_services(self, _context: RequestContext, request: Request) -> Request:
        cluster = _name(request.get("cluster", "default"))
        tagged = "TAGS" in request.get("include", [])
        return _described(
            "services",
            request["services"],
            lambda name: _service(cluster, name),
            lambda service: _described_service(service, tagged=tagged),
        )

    @handler("UpdateService", expand=False)
    def update_service(self, _context: RequestContext, request: Request) -> Request:
        service = _service(_name(request.get("cluster", "default")), request["service"])
        if service is None:
            raise _refused("ServiceNotFoundException", f"Service {request['service']} not found.")
        desired = request.get("desiredCount", service.desired)
        is_forced = request.get("forceNewDeployment", False)
        if strategy := request.get("capacityProviderStrategy"):
            if not is_forced:
                raise _refused("InvalidParameterException", "Another strategy needs forceNewDeployment.")
            service.model["CapacityProviderStrategy"] = _pascal(strategy)
        # As on AWS, the answer does not wait for the tasks.
        steps = (0, desired) if is_forced else (desired,)
        threading.Thread(target=_scale, args=(service, steps), name="ecs-scale", daemon=True).start()
        return {"service": {**_described_service(service), "desiredCount": desired}}

    @handler("RunTask", expand=False)
    def run_task(self, _context: RequestContext, request: Request) -> Request:
        """A task of a service's definition, with another command for each of its containers."""
        wanted = request["taskDefinition"]
        found = [each for each in _services_in(_known_cluster(request)) if each.model["TaskDefinition"] == wanted]
        if not found:
            raise _refused("InvalidParameterException", "Only task definitions of running services are supported here.")
        (service,) = found
        if request.get("networkConfiguration") != _network(service):
            raise _refused("InvalidParameterException", "Only the service's network configuration is supported here.")
        overrides = request.get("overrides", {}).get("containerOverrides", [])
        try:
            tasks = service.run({each["name"]: each["command"] for each in overrides})
        except KeyError as error:
            raise _refused("InvalidParameterException", f"The override of {error} is missing.") from error
        return {"tasks": [_described_task(task) for task in tasks], "failures": []}

    @handler("ListTasks", expand=False)
    def list_tasks(self, _context: RequestContext, request: Request) -> Request:
        services = {service.model["ServiceArn"]: service for service in _services_in(_known_cluster(request))}
        if wanted := request.get("serviceName"):
            services = {arn: service for arn, service in services.items() if wanted in (arn, _name(arn))}
            if not services:
                raise _refused("ServiceNotFoundException", f"Service {wanted} not found.")
        family, stopped = request.get("family"), request.get("desiredStatus") == "STOPPED"
        return {
            "taskArns": [
                _task_arn(task)
                for task in ecs.all_tasks()
                if task.service in services
                and not (wanted and task.alone)
                and bool(task.stopped_at) is stopped
                and family in (None, _family(task))
            ]
        }

    @handler("DescribeTasks", expand=False)
    def describe_tasks(self, _context: RequestContext, request: Request) -> Request:
        tasks = {task.task_id: task for task in ecs.all_tasks() if _cluster_of(task) == _known_cluster(request)}
        return _described("tasks", request["tasks"], lambda name: tasks.get(_name(name)), _described_task)

    @handler("ListTaskDefinitions", expand=False)
    def list_definitions(self, _context: RequestContext, request: Request) -> Request:
        family, status = request.get("familyPrefix"), request.get("status", "ACTIVE")
        return {
            "taskDefinitionArns": [
                arn
                for arn, model in ecs.definitions.items()
                if model["Status"] == status and family in (None, model["Family"])
            ]
        }

    @handler("DescribeTaskDefinition", expand=False)
    def describe_definition(self, _context: RequestContext, request: Request) -> Request:
        wanted = request["taskDefinition"]
        for arn, model in reversed(ecs.definitions.items()):
            newest = wanted == model["Family"] and model["Status"] == "ACTIVE"  # without a revision
            if wanted in (arn, _name(arn)) or newest:
                revision = int(arn.rpartition(":")[2])
                tags = {"tags": _tags(model)} if "TAGS" in request.get("include", []) else {}
                shown = {key: value for key, value in model.items() if key != "Tags"}
                return {"taskDefinition": {**_camel(shown), "revision": revision}, **tags}
        raise _refused("ClientException", "Unable to describe task definition.")


def _described(
    kind: str, names: Iterable[str], find: Callable[[str], T | None], show: Callable[[T], Request]
) -> Request:
    """The answer of a Describe call: what was found under ``kind``, and the other names as failures."""
    found = [(name, find(name)) for name in names]
    return {
        kind: [show(each) for _, each in found if each is not None],
        "failures": [{"arn": name, "reason": "MISSING"} for name, each in found if each is None],
    }


def _name(name_or_arn: str) -> str:
    return name_or_arn.rpartition("/")[2]


def _known_cluster(request: Request) -> str:
    """The name of the cluster that a request asks for.

    :raises CommonServiceException: if there is none.
    """
    name = _name(request.get("cluster", "default"))
    if name not in ecs.clusters:
        raise _refused("ClusterNotFoundException", "Cluster not found.")
    return name


def _cluster(name: str) -> str | None:
    return _name(name) if _name(name) in ecs.clusters else None


def _family(task: Task) -> str:
    return _name(task.definition).partition(":")[0]


def _cluster_of(task: Task) -> str:
    return task.service.split("/")[1]


def _services_in(cluster: str) -> Iterator[RunningService]:
    for service in list(ecs.services.values()):
        if service.model["Cluster"] == cluster:
            yield service


def _service(cluster: str, name: str) -> RunningService | None:
    """A service, given by its name or its ARN."""
    for service in _services_in(cluster):
        if name in (service.model["ServiceArn"], service.model["ServiceName"]):
            return service
    return None


def _scale(service: RunningService, steps: Sequence[int]) -> None:
    try:
        for tasks in steps:
            service.scale(tasks)
    except ChildDied as error:
        ecs.LOG.warning("a task did not start: %s", error)


def _described_cluster(name: str) -> Request:
    services = list(_services_in(name))
    return {
        "clusterArn": ecs.clusters[name]["Arn"],
        "clusterName": name,
        "status": "ACTIVE",
        "activeServicesCount": len(services),
        "runningTasksCount": sum(service.count("RUNNING") for service in services),
        "pendingTasksCount": sum(service.count("PENDING") for service in services),
        "registeredContainerInstancesCount": 0,
        "capacityProviders": list(ecs.clusters[name].get("CapacityProviders", [])),
        "tags": _tags(ecs.clusters[name]),
    }


def _described_service(service: RunningService, *, tagged: bool = False) -> Request:
    model = service.model
    state = {
        "status": "ACTIVE",
        "taskDefinition": model["TaskDefinition"],
        "desiredCount": service.desired,
        "runningCount": service.count("RUNNING"),
        "pendingCount": service.count("PENDING"),
        "createdAt": service.created_at,
    }
    deployment = {"id": "ecs-svc/0", **state, "status": "PRIMARY", "updatedAt": service.created_at}
    return {
        "serviceArn": model["ServiceArn"],
        "serviceName": model["ServiceName"],
        "clusterArn": _cluster_arn(model["ServiceArn"]),
        **state,
        "deployments": [deployment],
        "events": [],
        "loadBalancers": _camel(model.get("LoadBalancers", [])),
        "networkConfiguration": _network(service),
        **({"tags": _tags(model)} if tagged else {}),
    }


def _network(service: RunningService) -> Request:
    network: Request = _camel(service.model.get("NetworkConfiguration", {}))
    return network


def _described_task(task: Task) -> Request:
    container: Request = {"name": task.container, "taskArn": _task_arn(task), "lastStatus": task.status}
    container["healthStatus"] = task.health
    if task.exit_code is not None:
        container["exitCode"] = task.exit_code
    described = {
        "taskArn": _task_arn(task),
        "clusterArn": _cluster_arn(task.service),
        "taskDefinitionArn": task.definition,
        "group": f"family:{_family(task)}" if task.alone else f"service:{_name(task.service)}",
        "launchType": "FARGATE",
        "healthStatus": task.health,
        "lastStatus": task.status,
        "desiredStatus": "STOPPED" if task.stopped_at else "RUNNING",
        "createdAt": task.created_at,
        "startedAt": task.started_at,
        "stoppedAt": task.stopped_at,
        "stopCode": task.stop_code,
        "stoppedReason": task.stopped_reason,
        "containers": [container],
    }
    return {key: value for key, value in described.items() if value not in (None, "")}


def _cluster_arn(service_arn: str) -> str:
    prefix, _, rest = service_arn.partition(":service/")
    return f"{prefix}:cluster/{rest.split('/')[0]}"


def _task_arn(task: Task) -> str:
    return f"{_cluster_arn(task.service).replace(':cluster/', ':task/')}/{task.task_id}"


def _tags(model: Request) -> list[Request]:
    return [{"key": tag["Key"], "value": tag["Value"]} for tag in model.get("Tags", [])]


def _camel(value: Any) -> Any:
    """Properties of CloudFormation with the names of the ECS API, whose first letter is small."""
    if isinstance(value, dict):
        return {f"{key[0].lower()}{key[1:]}": _camel(each) for key, each in value.items()}
    return [_camel(each) for each in value] if isinstance(value, list) else value


def _pascal(strategy: Sequence[Request]) -> list[Request]:
    """Items of the ECS API with the names of CloudFormation's properties."""
    return [{f"{key[0].upper()}{key[1:]}": value for key, value in each.items()} for each in strategy]


def _refused(code: str, message: str) -> CommonServiceException:
    return CommonServiceException(code, message, 400, True)
