"""Monitored resources: the parts of other stacks that alarms and the dashboard read."""

from __future__ import annotations

import dataclasses

from aws_cdk import aws_apigateway as apigateway
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from aws_cdk import aws_rds as rds


@dataclasses.dataclass(frozen=True)
class Monitored:
    """Resources of a deployment with metrics. ``queue_nodes`` are the ids of the queue's nodes; the canary is
    optional."""

    api: apigateway.RestApi
    api_function: lambda_.Function
    reconciler: lambda_.Function
    canary: lambda_.Function | None
    forwarder: ecs.FargateService
    forwarder_logs: logs.LogGroup
    database: rds.DatabaseInstance | rds.DatabaseInstanceFromSnapshot
    queue_nodes: tuple[str, ...]
