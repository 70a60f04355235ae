"""The forwarder: a Fargate service on ARM64 with a public address of its own, and no load balancer.

The container image is a stock Python image. Our code comes as a bundle from the deployment's asset bucket, fetched by
``fargate_boot.py``, which travels in the task definition; the bundle's key is in its environment, so every release is
a new task revision and nobody needs docker to make one.
"""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from farcall_infra.bundles import FORWARDER, WORKSPACE
from farcall_infra.constructs.bundle_asset import bundle_asset
from farcall_infra.constructs.function import retention
from farcall_infra.constructs.network import Network
from farcall_infra.constructs.stores import Stores
from farcall_infra.deployment import Deployment

__all__ = ["ForwarderService"]

_BOOT = WORKSPACE / "infra" / "runtime" / "fargate_boot.py"
# Draining flushes results and tells endpoints to move; Fargate grants two minutes at most before it kills the task.
_STOP_TIMEOUT_S = 120
_DRAIN_S = 100
# A Fargate task takes up to a minute to pull its image and boot.
_GRACE_S = 60


class ForwarderService(Construct):
    """Cluster, task definition and service; the connection port is the only thing that the internet can reach."""

    def __init__(
        self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network, stores: Stores
    ) -> None:
        super().__init__(scope, construct_id)
        size = deployment.profile.forwarder
        bundle = bundle_asset(self, "Bundle", bundle=FORWARDER, platform=deployment.target.wheels)
        cluster = ecs.Cluster(self, "Cluster", vpc=network.vpc)
        task = ecs.FargateTaskDefinition(
            self,
            "Task",
            cpu=size.cpu_units,
            memory_limit_mib=size.memory_mib,
            runtime_platform=ecs.RuntimePlatform(
                cpu_architecture=ecs.CpuArchitecture.ARM64, operating_system_family=ecs.OperatingSystemFamily.LINUX
            ),
        )
        log_group = logs.LogGroup(
            self,
            "Logs",
            retention=retention(deployment.profile.retention.log_days),
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        health_url = f"http://127.0.0.1:{size.health_port}/healthz"
        task.add_container(
            "forwarder",
            image=ecs.ContainerImage.from_registry(size.image),
            entry_point=["python", "-c", _BOOT.read_text(encoding="utf-8")],
            command=["python", "-m", "farcall_forwarder"],
            environment={
                **stores.environment(),
                "AWS_REGION": cdk.Stack.of(self).region,
                "FARCALL_BUNDLE_BUCKET": bundle.s3_bucket_name,
                "FARCALL_BUNDLE_KEY": bundle.s3_object_key,
                "FARCALL_FORWARDER_HOST": "0.0.0.0",  # noqa: S104 - the security group decides who gets here
                "FARCALL_FORWARDER_PORT": str(size.port),
                "FARCALL_FORWARDER_HEALTH_PORT": str(size.health_port),
                "FARCALL_FORWARDER_DRAIN_S": str(_DRAIN_S),
            },
            port_mappings=[ecs.PortMapping(container_port=size.port)],
            logging=ecs.LogDrivers.aws_logs(stream_prefix="forwarder", log_group=log_group),
            health_check=ecs.HealthCheck(
                command=["CMD", "python", "-c", f"import urllib.request; urllib.request.urlopen({health_url!r})"],
                interval=cdk.Duration.seconds(10),
                start_period=cdk.Duration.seconds(_GRACE_S),
            ),
            stop_timeout=cdk.Duration.seconds(_STOP_TIMEOUT_S),
        )
        task.add_to_task_role_policy(
            iam.PolicyStatement(
                actions=["s3:GetObject"], resources=[bundle.bucket.arn_for_objects(bundle.s3_object_key)]
            )
        )
        stores.grant(task.task_role)
        ecs.FargateService(
            self,
            "Service",
            cluster=cluster,
            task_definition=task,
            desired_count=size.tasks,
            assign_public_ip=True,
            vpc_subnets=ec2.SubnetSelection(subnet_type=ec2.SubnetType.PUBLIC),
            security_groups=[network.forwarder],
            # The new task is up before the old one drains: connections move, the queue never stops.
            min_healthy_percent=100,
            max_healthy_percent=200,
            circuit_breaker=ecs.DeploymentCircuitBreaker(rollback=True),
        )
