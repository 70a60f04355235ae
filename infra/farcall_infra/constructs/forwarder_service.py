"""The forwarder: a Fargate service on ARM64. Each task has its own public address, which peers get from the API; or all
tasks are behind one load balancer and share its address and one CURVE key.

The container image is a stock Python image. Our code comes as a bundle from the deployment's asset bucket.
``fargate_boot.py``, a part of the task definition, downloads it. The bundle's key is in the environment, so every
release is a new task revision, and a release needs no docker. Alternatively, an own image can contain the code.
"""

from __future__ import annotations

import re
from typing import Final, cast

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_elasticloadbalancingv2 as elb
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from farcall_infra.bundles import FORWARDER, RUNTIME
from farcall_infra.constructs.alarms import FORWARDER_UNHEALTHY, LEASES_EXPIRING, RESULTS_LATE, alarm_name
from farcall_infra.constructs.bundle_asset import bundle_asset
from farcall_infra.constructs.fleet import SERVICE, cluster_name, task_family
from farcall_infra.constructs.function import retention
from farcall_infra.constructs.nag_suppressions import suppress
from farcall_infra.constructs.network import Network
from farcall_infra.constructs.stores import Stores
from farcall_infra.deployment import SLEEPS_TAG, Deployment
from farcall_infra.profiles import ForwarderSize

_BOOT = RUNTIME / "fargate_boot.py"
_HEALTH = RUNTIME / "fargate_health.py"
# ECS sends SIGTERM only after this delay. Until then the old task serves its peers, and new connections go to others.
_DEREGISTRATION_S = 10
# Draining flushes results and redirects endpoints; Fargate allows two minutes at most before it kills the task.
_STOP_TIMEOUT_S = 120
_DRAIN_S = 100
# Grace period until a task must be healthy. Downloading, unpacking and compiling the bundle takes five seconds of a
# vCPU, which is twenty seconds on a quarter of one. A task that is healthy earlier counts at once.
_GRACE_S = 120
_KEY_SEED_LENGTH = 64  # characters
_PRIVATE_ECR: Final = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com/([a-z0-9._/-]+)(?:[:@](\S+))?")
_ON_DEMAND = "FARGATE"
_SPOT = "FARGATE_SPOT"


class LoadBalancer(Construct):
    """A network load balancer: fixed addresses for sites with firewalls that list every destination.

    It passes TCP through, so that CURVE stays end to end, and keeps the addresses of peers. ``address`` is its DNS
    name. Its port is the forwarder's. Its health check is ``/readyz`` on the health port, not a connection to the
    ZeroMQ port. It ends no connection: neither that of an unhealthy task, which may recover in a moment, nor that
    of a deregistered one, whose forwarder redirects its peers at its own pace after SIGTERM.
    """

    def __init__(self, scope: Construct, construct_id: str, *, network: Network, size: ForwarderSize) -> None:
        super().__init__(scope, construct_id)
        assert network.load_balancer is not None
        balancer = elb.NetworkLoadBalancer(
            self,
            "Balancer",
            vpc=network.vpc,
            internet_facing=True,
            cross_zone_enabled=True,
            security_groups=[network.load_balancer],
            subnet_mappings=[
                elb.SubnetMapping(subnet=subnet, allocation_id=allocation_id)
                for subnet, allocation_id in zip(network.vpc.public_subnets, network.addresses, strict=True)
            ],
        )
        suppress(
            balancer,
            "ELB2",
            "A network load balancer writes access logs for TLS listeners only, and this one passes CURVE through as "
            "TCP. The forwarder authenticates peers by their keys, limits connections by their addresses, and counts "
            "those that it refuses.",
        )
        self.targets = elb.NetworkTargetGroup(
            self,
            "Targets",
            vpc=network.vpc,
            port=size.port,
            protocol=elb.Protocol.TCP,
            target_type=elb.TargetType.IP,
            deregistration_delay=cdk.Duration.seconds(_DEREGISTRATION_S),
            connection_termination=False,
            preserve_client_ip=True,
            health_check=elb.HealthCheck(
                protocol=elb.Protocol.HTTP,
                path="/readyz",
                port=str(size.health_port),
                interval=cdk.Duration.seconds(10),
                healthy_threshold_count=2,
                unhealthy_threshold_count=2,
            ),
        )
        self.targets.set_attribute("target_health_state.unhealthy.connection_termination.enabled", "false")
        balancer.add_listener("Peers", port=size.port, protocol=elb.Protocol.TCP, default_target_groups=[self.targets])
        self.address = balancer.load_balancer_dns_name

    def add_service(self, service: ecs.FargateService) -> None:
        """Send peers to the tasks of ``service``."""
        service.attach_to_network_target_group(self.targets)


class ForwarderService(Construct):
    """Cluster, task definition and service; the internet can reach only the connection port."""

    def __init__(
        self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network, stores: Stores
    ) -> None:
        super().__init__(scope, construct_id)
        size = deployment.profile.forwarder
        cluster = ecs.Cluster(self, "Cluster", vpc=network.vpc, cluster_name=cluster_name(deployment))
        suppress(
            cluster,
            "ECS4",
            "Container Insights bills each task's metrics every month. The forwarder logs its own numbers, and the "
            "observability stack turns them into metrics.",
        )
        # As a property of the cluster: CDK's own method uses a resource type that the offline tier lacks.
        resource = cast(ecs.CfnCluster, cluster.node.default_child)
        resource.capacity_providers = [_ON_DEMAND, _SPOT]
        balancer = LoadBalancer(self, "Front", network=network, size=size) if network.load_balancer else None
        task = ecs.FargateTaskDefinition(
            self,
            "Task",
            family=task_family(deployment),
            cpu=size.cpu_units,
            memory_limit_mib=size.memory_mib,
            runtime_platform=ecs.RuntimePlatform(
                cpu_architecture=ecs.CpuArchitecture.of(deployment.target.wheels.processor.upper()),
                operating_system_family=ecs.OperatingSystemFamily.LINUX,
            ),
        )
        suppress(
            task,
            "ECS2",
            "The variables are addresses, names and ARNs. Secrets come from Secrets Manager, at run time or as a "
            "secret of the container.",
        )
        self.log_group = logs.LogGroup(
            self,
            "Logs",
            retention=retention(deployment.profile.retention.log_days),
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        region = cdk.Stack.of(self).region
        task.add_container(
            "forwarder",
            image=self._image(size.image, task),
            entry_point=["python", "-c", _BOOT.read_text(encoding="utf-8")],
            command=["python", "-m", "farcall_forwarder"],
            environment={
                **stores.environment("forwarder"),
                "AWS_REGION": region,  # for the boot program
                "AWS_DEFAULT_REGION": region,  # for boto3, which ignores AWS_REGION
                **(self._bundle(task, deployment) if size.code == "bundle" else {}),
                "FARCALL_FORWARDER_HOST": "0.0.0.0",  # noqa: S104 - the security group limits access
                "FARCALL_FORWARDER_PORT": str(size.port),
                "FARCALL_FORWARDER_HEALTH_PORT": str(size.health_port),
                "FARCALL_FORWARDER_DRAIN_S": str(_DRAIN_S),
                "FARCALL_FORWARDER_CONNECTIONS": str(size.connections),
                "FARCALL_FORWARDER_DATABASE_CONNECTIONS": str(size.database_connections),
                **deployment.profile.limits.forwarder_environment(),
                **({"FARCALL_FORWARDER_ADVERTISE": balancer.address} if balancer else {}),
            },
            secrets={"FARCALL_FORWARDER_KEY_SEED": self._shared_key()} if balancer else None,
            port_mappings=[
                ecs.PortMapping(container_port=port)
                for port in ((size.port, size.health_port) if balancer else (size.port,))
            ],
            logging=ecs.LogDrivers.aws_logs(stream_prefix="forwarder", log_group=self.log_group),
            health_check=ecs.HealthCheck(
                command=["CMD", "python", "-I", "-S", "-c", _HEALTH.read_text(encoding="utf-8")],
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
            # The new task runs before the old one drains: connections are redirected without a gap.
            min_healthy_percent=100,
            max_healthy_percent=200,
            circuit_breaker=ecs.DeploymentCircuitBreaker(rollback=True),
            deployment_alarms=_deployment_alarms(deployment, balanced=balancer is not None),
            health_check_grace_period=cdk.Duration.seconds(_GRACE_S) if balancer else None,
            # A strategy in both cases: a change of the launch type would replace the service.
            capacity_provider_strategies=[
                ecs.CapacityProviderStrategy(capacity_provider=_SPOT if size.spot else _ON_DEMAND, weight=1)
            ],
        )
        # CDK adds the dependency on the task role, but not on the execution role, without which the first tasks could
        # neither pull nor log.
        self.service.node.add_dependency(task.obtain_execution_role())
        self.targets = balancer.targets if balancer else None
        if balancer:
            balancer.add_service(self.service)
        if size.sleeps:
            cdk.Tags.of(self.service).add(SLEEPS_TAG, f"after {size.idle_minutes} minutes")

    def _bundle(self, task: ecs.FargateTaskDefinition, deployment: Deployment) -> dict[str, str]:
        """Variables with the bundle's location and digest for the boot program, and the permission to read it."""
        packed, platform = deployment.packed(FORWARDER), deployment.target.wheels
        bundle, digest = bundle_asset(self, "Bundle", bundle=packed, platform=platform)
        code = bundle.bucket.arn_for_objects(bundle.s3_object_key)
        task.add_to_task_role_policy(iam.PolicyStatement(actions=["s3:GetObject"], resources=[code]))
        return {
            "FARCALL_BUNDLE_BUCKET": bundle.s3_bucket_name,
            "FARCALL_BUNDLE_KEY": bundle.s3_object_key,
            "FARCALL_BUNDLE_DIGEST": digest,
        }

    def _image(self, name: str, task: ecs.FargateTaskDefinition) -> ecs.ContainerImage:
        """The image of that name; for a private ECR repository, with the permission to pull it."""
        private = _PRIVATE_ECR.fullmatch(name)
        if private is None:
            return ecs.ContainerImage.from_registry(name)
        account, region, repository, version = private.groups()
        arn = cdk.Stack.of(self).format_arn(
            service="ecr", account=account, region=region, resource="repository", resource_name=repository
        )
        suppress(
            task.obtain_execution_role(),
            "IAM5[Resource::*]",
            "ECR issues its login for the whole registry; only this repository may be pulled.",
        )
        return ecs.ContainerImage.from_ecr_repository(
            ecr.Repository.from_repository_attributes(self, "Image", repository_arn=arn, repository_name=repository),
            version,
        )

    def _shared_key(self) -> ecs.Secret:
        """The seed from which all tasks derive the same CURVE key pair: a peer cannot find out which task it is
        connected to."""
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
            removal_policy=cdk.RemovalPolicy.DESTROY,  # peers get the public key with every connect
        )
        suppress(
            secret,
            "SMG4",
            "With a new key every peer has to connect again, so it is replaced with a release or when it may have "
            "leaked; docs/operations/keys.md says how.",
        )
        return _SecretField(secret, "seed")


def _deployment_alarms(deployment: Deployment, *, balanced: bool) -> ecs.DeploymentAlarmConfig | None:
    """Alarms that end a rolling deployment and return to the old tasks. ECS ignores one that is on at the start."""
    if not deployment.target.observed:
        return None
    names = [LEASES_EXPIRING, RESULTS_LATE, *([FORWARDER_UNHEALTHY] if balanced else [])]
    return ecs.DeploymentAlarmConfig(
        alarm_names=[alarm_name(deployment.name, name) for name in names],
        behavior=ecs.AlarmBehavior.ROLLBACK_ON_ALARM,
    )


class _SecretField(ecs.Secret):
    """A field of a secret, as a variable of a container. The grant of CDK's own class would also allow reading the
    secret's description."""

    def __init__(self, secret: secretsmanager.ISecret, field: str) -> None:
        super().__init__()
        self._secret = secret
        self._field = field

    @property
    def arn(self) -> str:
        return f"{self._secret.secret_arn}:{self._field}::"

    @property
    def has_field(self) -> bool:
        return True

    def grant_read(self, grantee: iam.IGrantable) -> iam.Grant:
        return iam.Grant.add_to_principal(
            grantee=grantee, actions=["secretsmanager:GetSecretValue"], resource_arns=[self._secret.secret_arn]
        )
