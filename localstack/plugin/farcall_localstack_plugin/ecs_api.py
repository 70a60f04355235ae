"""ECS API: the calls that our programs make, which describe and scale a service."""

from __future__ import annotations

import logging
import threading
from typing import Any

from localstack.aws.api import CommonServiceException, RequestContext, handler

from farcall_localstack_plugin.children import ChildDied
from farcall_localstack_plugin.ecs import RunningService, find_service

LOG = logging.getLogger(__name__)


class EcsApi:
    """The API's operations; any other is answered as not implemented."""

    @handler("DescribeServices", expand=False)
    def describe_services(self, _context: RequestContext, request: dict[str, Any]) -> dict[str, Any]:
        cluster = request.get("cluster", "default")
        found = [(name, find_service(cluster, name)) for name in request["services"]]
        return {
            "services": [_described(*service) for _, service in found if service],
            "failures": [{"arn": name, "reason": "MISSING"} for name, service in found if not service],
        }

    @handler("UpdateService", expand=False)
    def update_service(self, _context: RequestContext, request: dict[str, Any]) -> dict[str, Any]:
        found = find_service(request.get("cluster", "default"), request["service"])
        if found is None:
            raise CommonServiceException("ServiceNotFoundException", f"There is no service {request['service']}.")
        arn, service = found
        if (desired := request.get("desiredCount")) is not None:
            # As on AWS, the answer does not wait for the tasks.
            threading.Thread(target=_scale, args=(service, desired), name="ecs-scale", daemon=True).start()
        return {"service": {**_described(arn, service), "desiredCount": desired}}


def _scale(service: RunningService, tasks: int) -> None:
    try:
        service.scale(tasks)
    except ChildDied as error:
        LOG.warning("a task did not start: %s", error)


def _described(arn: str, service: RunningService) -> dict[str, Any]:
    return {
        "serviceArn": arn,
        "serviceName": arn.rpartition("/")[2],
        "status": "ACTIVE",
        "desiredCount": service.desired,
        "runningCount": service.running,
    }
