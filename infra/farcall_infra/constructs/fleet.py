"""Scaling of the forwarder service to and from zero: the service's name, and the permission to scale it.

The names are fixed because the functions that scale the service are in an earlier stack than the service.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from farcall_infra.deployment import Deployment

SERVICE: Final = "forwarder"


def cluster_name(deployment: Deployment) -> str:
    """The name of the deployment's ECS cluster."""
    return deployment.name


def task_family(deployment: Deployment) -> str:
    """The family of the forwarders' task definitions."""
    return f"{deployment.name}-{SERVICE}"


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Environment and grants for functions that scale the forwarders, if the profile lets these sleep."""

    deployment: Deployment

    def environment(self) -> dict[str, str]:
        """The variables of :mod:`farcall_lambdas.fleet`; empty if the forwarders never sleep."""
        size = self.deployment.profile.forwarder
        if not size.sleeps:
            return {}
        return {
            "FARCALL_FLEET_CLUSTER": cluster_name(self.deployment),
            "FARCALL_FLEET_SERVICE": SERVICE,
            "FARCALL_FLEET_TASKS": str(size.tasks),
            "FARCALL_FLEET_IDLE_S": str(60 * size.idle_minutes),
            "FARCALL_FLEET_SPOT": "true" if size.spot else "",
        }

    def grant(self, scope: Construct, role: iam.IRole) -> None:
        """Let ``role`` scale this service. A request may neither change its task definition to that of another program,
        nor let anyone open a shell in its tasks."""
        if not self.deployment.profile.forwarder.sleeps:
            return
        arn = cdk.Stack.of(scope).format_arn
        service = arn(service="ecs", resource="service", resource_name=f"{cluster_name(self.deployment)}/{SERVICE}")
        definitions = arn(service="ecs", resource="task-definition", resource_name=f"{task_family(self.deployment)}:*")
        role.add_to_principal_policy(
            iam.PolicyStatement(
                actions=["ecs:UpdateService"],
                resources=[service],
                # "IfExists": a request that only scales names neither.
                conditions={
                    "ArnLikeIfExists": {"ecs:task-definition": definitions},
                    "StringEqualsIfExists": {"ecs:enable-execute-command": "false"},
                },
            )
        )
