"""The forwarder: a Fargate service on ARM64. Each task has a public address of its own, which peers learn from the
API; or all stand behind one load balancer, and then they share its address and one CURVE key.

The container image is a stock Python image. Our code comes as a bundle from the deployment's asset bucket, fetched by
``fargate_boot.py``, which travels in the task definition; the bundle's key is in its environment, so every release is
a new task revision and nobody needs docker to make one. Who publishes images may have the code in one instead.
"""

from __future__ import annotations

import re
from typing import Final, cast

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from farcall_infra.bundles import FORWARDER, WORKSPACE
from farcall_infra.constructs.accepted import accept
from farcall_infra.constructs.bundle_asset import bundle_asset
from farcall_infra.constructs.fleet import SERVICE, cluster_name
from farcall_infra.constructs.front import Front
from farcall_infra.constructs.function import retention
from farcall_infra.constructs.network import Network
from farcall_infra.constructs.stores import Stores
from farcall_infra.deployment import SLEEPS_TAG, Deployment
from farcall_infra.profiles import ForwarderSize

__all__ = ["ForwarderService"]

_BOOT = WORKSPACE / "infra" / "runtime" / "fargate_boot.py"
# Draining flushes results and tells endpoints to move; Fargate grants two minutes at most before it kills the task.
_STOP_TIMEOUT_S = 120
_DRAIN_S = 100
# How long a task that is not healthy yet is left alone. To fetch, unpack and compile the bundle takes five seconds of a
# processor, which is twenty of a quarter of one; a task that is healthy before counts at once.
_GRACE_S = 120
_KEY_SEED_LENGTH = 64  # characters
_PRIVATE_ECR: Final = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com/([a-z0-9._/-]+)(?:[:@](\S+))?")
_ON_DEMAND = "FARGATE"
_SPOT = "FARGATE_SPOT"


def _behind(front: Front, size: ForwarderSize) -> dict[str, str]:
    """What a forwarder behind a load balancer needs: the address of that, from which all connections seem to come."""
    return {
        "FARCALL_FORWARDER_ADVERTISE": front.address,
        "FARCALL_FORWARDER_CONNECTIONS_PER_SOURCE": str(size.connections),
    }


class ForwarderService(Construct):
    """Cluster, task definition and service; the connection port is the only thing that the internet can reach."""

    def __init__(
        self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network, stores: Stores
    ) -> None:
        super().__init__(scope, construct_id)
        size = deployment.profile.forwarder
        cluster = ecs.Cluster(self, "Cluster", vpc=network.vpc, cluster_name=cluster_name(deployment))
        accept(
            cluster,
            "ECS4",
            "Container Insights bills each task's metrics every month. The forwarder reports its own numbers in its "
            "log, which the observability stack turns into metrics.",
        )
        # As a property of the cluster; CDK's own way is a resource of a type that the offline tier lacks.
        resource = cast(ecs.CfnCluster, cluster.node.default_child)
        resource.capacity_providers = [_ON_DEMAND, _SPOT]
        front = Front(self, "Front", network=network, size=size, drain_s=_DRAIN_S) if network.front else None
        task = ecs.FargateTaskDefinition(
            self,
            "Task",
            cpu=size.cpu_units,
            memory_limit_mib=size.memory_mib,
            runtime_platform=ecs.RuntimePlatform(
                cpu_architecture=ecs.CpuArchitecture.of(deployment.target.wheels.processor.upper()),
                operating_system_family=ecs.OperatingSystemFamily.LINUX,
            ),
        )
        accept(
            task,
            "ECS2",
            "The variables are addresses, names and ARNs. What is secret comes from Secrets Manager, at run time or "
            "as a secret of the container.",
        )
        self.log_group = logs.LogGroup(
            self,
            "Logs",
            retention=retention(deployment.profile.retention.log_days),
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        region = cdk.Stack.of(self).region
        health_url = f"http://127.0.0.1:{size.health_port}/healthz"
        task.add_container(
            "forwarder",
            image=self._image(size.image, task),
            entry_point=["python", "-c", _BOOT.read_text(encoding="utf-8")],
            command=["python", "-m", "farcall_forwarder"],
            environment={
                **stores.environment("forwarder"),
                "AWS_REGION": region,  # for the boot program
                "AWS_DEFAULT_REGION": region,  # for boto3, which does not look at the other one
                **(self._bundle(task, deployment) if size.code == "bundle" else {}),
                "FARCALL_FORWARDER_HOST": "0.0.0.0",  # noqa: S104 - the security group decides who gets here
                "FARCALL_FORWARDER_PORT": str(size.port),
                "FARCALL_FORWARDER_HEALTH_PORT": str(size.health_port),
                "FARCALL_FORWARDER_DRAIN_S": str(_DRAIN_S),
                "FARCALL_FORWARDER_CONNECTIONS": str(size.connections),
                **(_behind(front, size) if front else {}),
            },
            secrets={"FARCALL_FORWARDER_KEY_SEED": self._shared_key()} if front else None,
            port_mappings=[
                ecs.PortMapping(container_port=port)
                for port in ((size.port, size.health_port) if front else (size.port,))
            ],
            logging=ecs.LogDrivers.aws_logs(stream_prefix="forwarder", log_group=self.log_group),
            health_check=ecs.HealthCheck(
                command=["CMD", "python", "-c", f"import urllib.request; urllib.request.urlopen({health_url!r})"],
                interval=cdk.Duration.seconds(10),
                start_period=cdk.Duration.seconds(_GRACE_S),
            ),
            stop_timeout=cdk.Duration.seconds(_STOP_TIMEOUT_S),
        )
        stores.grant(task.task_role, "forwarder")
        self.service = ecs.FargateService(
            self,
            "Service",
            service_name=SERVICE,
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
            health_check_grace_period=cdk.Duration.seconds(_GRACE_S) if front else None,
            # A strategy in both cases: a launch type cannot be changed without making a new service.
            capacity_provider_strategies=[
                ecs.CapacityProviderStrategy(capacity_provider=_SPOT if size.spot else _ON_DEMAND, weight=1)
            ],
        )
        # The CDK waits for the task's rights by itself. Without those to pull and to log, the first tasks would fail.
        self.service.node.add_dependency(task.obtain_execution_role())
        if front:
            front.add_service(self.service)
        if size.sleeps:
            cdk.Tags.of(self.service).add(SLEEPS_TAG, f"after {size.idle_minutes} minutes")

    def _bundle(self, task: ecs.FargateTaskDefinition, deployment: Deployment) -> dict[str, str]:
        """Where the boot program finds the code, and the right to read it."""
        bundle = bundle_asset(self, "Bundle", bundle=deployment.packed(FORWARDER), platform=deployment.target.wheels)
        code = bundle.bucket.arn_for_objects(bundle.s3_object_key)
        task.add_to_task_role_policy(iam.PolicyStatement(actions=["s3:GetObject"], resources=[code]))
        return {"FARCALL_BUNDLE_BUCKET": bundle.s3_bucket_name, "FARCALL_BUNDLE_KEY": bundle.s3_object_key}

    def _image(self, name: str, task: ecs.FargateTaskDefinition) -> ecs.ContainerImage:
        """The image of that name; one in a private repository of ECR with the right to pull it."""
        private = _PRIVATE_ECR.fullmatch(name)
        if private is None:
            return ecs.ContainerImage.from_registry(name)
        account, region, repository, version = private.groups()
        arn = cdk.Stack.of(self).format_arn(
            service="ecr", account=account, region=region, resource="repository", resource_name=repository
        )
        accept(
            task.obtain_execution_role(),
            "IAM5[Resource::*]",
            "ECR hands out its login for the whole registry; what may be pulled is this repository.",
        )
        return ecs.ContainerImage.from_ecr_repository(
            ecr.Repository.from_repository_attributes(self, "Image", repository_arn=arn, repository_name=repository),
            version,
        )

    def _shared_key(self) -> ecs.Secret:
        """What every task makes the same CURVE key pair of: a peer cannot tell which task a load balancer chose."""
        secret = secretsmanager.Secret(
            self,
            "Key",
            description="The forwarders behind one address make their CURVE key pair of it",
            generate_secret_string=secretsmanager.SecretStringGenerator(
                secret_string_template="{}",  # noqa: S106 - the seed is generated into this object
                generate_string_key="seed",
                password_length=_KEY_SEED_LENGTH,
                exclude_punctuation=True,
            ),
            removal_policy=cdk.RemovalPolicy.DESTROY,  # peers learn the public key anew with every connect
        )
        accept(
            secret,
            "SMG4",
            "A new key sends every peer through a new connect, so it is replaced with a release or when it may have "
            "leaked; docs/operations.md says how.",
        )
        return ecs.Secret.from_secrets_manager(secret, "seed")
