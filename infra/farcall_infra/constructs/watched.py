"""What there is to watch in a deployment: the parts of other stacks that alarms and the dashboard look at."""

from __future__ import annotations

import dataclasses

from aws_cdk import aws_apigateway as apigateway
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from aws_cdk import aws_rds as rds

__all__ = ["Watched"]


@dataclasses.dataclass(frozen=True)
class Watched:
    """``queue_nodes`` are the ids of the queue's nodes. Not every deployment has a canary."""

    api: apigateway.RestApi
    api_function: lambda_.Function
    reconciler: lambda_.Function
    canary: lambda_.Function | None
    forwarder: ecs.FargateService
    forwarder_logs: logs.LogGroup
    database: rds.DatabaseInstance | rds.DatabaseInstanceFromSnapshot
    queue_nodes: tuple[str, ...]
