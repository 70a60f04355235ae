"""The storage of exchanges of farcall-analytics: a bucket, a directory bucket, and a cache that is created on demand.

CloudFormation does not create the cache: a function does, when a user calls it, and deletes it again when it is idle.
"""

from __future__ import annotations

from typing import Final

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3express as s3express
from constructs import Construct

from farcall_infra.constructs.function import PythonFunction
from farcall_infra.constructs.nag_suppressions import suppress
from farcall_infra.constructs.network import VALKEY_PORT, Network
from farcall_infra.constructs.scheduled import run_every
from farcall_infra.constructs.stores import expiring_bucket
from farcall_infra.deployment import Deployment

#: A serverless cache answers reads from replicas at the next port.
_READ_PORT: Final = VALKEY_PORT + 1
_CHECK_MINUTES: Final = 5
_KEPT_DAYS: Final = 1


class ExchangeBucket(Construct):
    """A private bucket whose objects live for a day."""

    def __init__(self, scope: Construct, construct_id: str, *, keep: bool) -> None:
        super().__init__(scope, construct_id)
        self.bucket = expiring_bucket(self, days=_KEPT_DAYS, keep=keep)
        suppress(
            self.bucket,
            "S1",
            "Access logs of S3 fill a second bucket without limit. Exchanges write and read millions of objects that "
            "nothing needs after a day, with the credentials of the worker that made them.",
        )

    @property
    def address(self) -> str:
        """The address for ``storage=``."""
        return f"s3://{self.bucket.bucket_name}"

    def statements(self) -> list[iam.PolicyStatement]:
        """Permissions of the tasks and programs of a job."""
        return [
            iam.PolicyStatement(actions=["s3:ListBucket"], resources=[self.bucket.bucket_arn]),
            iam.PolicyStatement(
                actions=["s3:DeleteObject", "s3:GetObject", "s3:PutObject"],
                resources=[self.bucket.arn_for_objects("*")],
            ),
        ]


class ExpressBucket(Construct):
    """A directory bucket of S3 Express One Zone whose objects live for a day. S3 lets no one make it public, and
    encrypts it."""

    def __init__(self, scope: Construct, construct_id: str, *, zone: str) -> None:
        super().__init__(scope, construct_id)
        rule = s3express.CfnDirectoryBucket.RuleProperty(
            id="expire",
            status="Enabled",
            expiration_in_days=_KEPT_DAYS,
            abort_incomplete_multipart_upload=s3express.CfnDirectoryBucket.AbortIncompleteMultipartUploadProperty(
                days_after_initiation=_KEPT_DAYS
            ),
        )
        self._bucket = s3express.CfnDirectoryBucket(
            self,
            "Bucket",
            data_redundancy="SingleAvailabilityZone",
            location_name=zone,
            lifecycle_configuration=s3express.CfnDirectoryBucket.LifecycleConfigurationProperty(rules=[rule]),
        )
        self._bucket.apply_removal_policy(cdk.RemovalPolicy.RETAIN)  # CloudFormation cannot delete one with objects
        # Every operation on objects needs a session.
        insecure = iam.PolicyStatement(
            effect=iam.Effect.DENY,
            principals=[iam.AnyPrincipal()],
            actions=["s3express:CreateSession"],
            resources=[self._bucket.attr_arn],
            conditions={"Bool": {"aws:SecureTransport": "false"}},
        )
        policy = s3express.CfnBucketPolicy(
            self, "Policy", bucket=self._bucket.ref, policy_document=iam.PolicyDocument(statements=[insecure])
        )
        policy.apply_removal_policy(cdk.RemovalPolicy.RETAIN)

    @property
    def address(self) -> str:
        """The address for ``storage=`` or ``fast_storage=``."""
        return f"s3://{self._bucket.ref}"

    def statements(self) -> list[iam.PolicyStatement]:
        """Permissions of the tasks and programs of a job."""
        return [iam.PolicyStatement(actions=["s3express:CreateSession"], resources=[self._bucket.attr_arn])]


class ExchangeCache(Construct):
    """The function that creates the cache on demand and deletes it when it is idle, and the cache's security groups.

    ``workers`` is the group of instances that may reach the cache.
    """

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network) -> None:
        super().__init__(scope, construct_id)
        shape = deployment.profile.analytics
        self.name = f"{deployment.name}-exchange"
        vpc = network.vpc
        self.workers = ec2.SecurityGroup(
            self, "Workers", vpc=vpc, description="Workers of analytics", disable_inline_rules=False
        )
        group = ec2.SecurityGroup(
            self,
            "Cache",
            vpc=vpc,
            description="Exchange cache of analytics",
            allow_all_outbound=False,
            disable_inline_rules=False,
        )
        ports = ec2.Port.tcp_range(VALKEY_PORT, _READ_PORT)
        group.add_ingress_rule(self.workers, ports, "workers of analytics")
        for cidr in shape.worker_cidrs:
            peer = ec2.Peer.ipv6(cidr) if ":" in cidr else ec2.Peer.ipv4(cidr)
            group.add_ingress_rule(peer, ports, "workers in a connected network")
        subnets = vpc.select_subnets(subnet_type=network.private.subnet_type).subnet_ids
        keeper = PythonFunction(
            self,
            "Keeper",
            deployment=deployment,
            handler="farcall_lambdas.handlers.exchange_cache.handle",
            description="Creates the exchange cache on demand, and deletes it when it is idle",
            environment={
                "FARCALL_CACHE_NAME": self.name,
                "FARCALL_CACHE_GB": str(shape.cache_gb),
                "FARCALL_CACHE_ECPU_PER_S": str(shape.cache_ecpu_per_s),
                "FARCALL_CACHE_SUBNETS": cdk.Fn.join(",", subnets),
                "FARCALL_CACHE_SECURITY_GROUP": group.security_group_id,
                "FARCALL_CACHE_IDLE_S": str(60 * shape.idle_minutes),
            },
            timeout_s=60,
            memory_mib=256,
            retried=False,
        )
        self._function = keeper.live
        stack = cdk.Stack.of(self)
        network_resources = [
            stack.format_arn(service="ec2", resource="security-group", resource_name=group.security_group_id),
            stack.format_arn(service="ec2", resource="vpc", resource_name=vpc.vpc_id),
            *(stack.format_arn(service="ec2", resource="subnet", resource_name=subnet) for subnet in subnets),
        ]
        endpoints = stack.format_arn(service="ec2", resource="vpc-endpoint", resource_name="*")
        cache = stack.format_arn(
            service="elasticache",
            resource="serverlesscache",
            resource_name=self.name,
            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
        )
        for statement in (
            iam.PolicyStatement(
                actions=[
                    "elasticache:CreateServerlessCache",
                    "elasticache:DeleteServerlessCache",
                    "elasticache:DescribeServerlessCaches",
                ],
                resources=[cache],
            ),
            iam.PolicyStatement(actions=["cloudwatch:GetMetricData"], resources=["*"]),
            # ElastiCache makes the cache's VPC endpoint with the rights of who creates the cache.
            iam.PolicyStatement(
                actions=["ec2:CreateVpcEndpoint"],
                resources=[endpoints],
                conditions={"StringLike": {"ec2:VpceServiceName": "com.amazonaws.elasticache.serverless.*"}},
            ),
            iam.PolicyStatement(actions=["ec2:CreateVpcEndpoint"], resources=network_resources),
            iam.PolicyStatement(
                actions=["ec2:CreateTags"],
                resources=[endpoints],
                conditions={
                    "StringEquals": {
                        "ec2:CreateAction": "CreateVpcEndpoint",
                        "aws:RequestTag/AmazonElastiCacheManaged": "true",
                    }
                },
            ),
            iam.PolicyStatement(
                actions=["ec2:DescribeSecurityGroups", "ec2:DescribeSubnets", "ec2:DescribeVpcs"], resources=["*"]
            ),
        ):
            keeper.role.add_to_principal_policy(statement)
        suppress(
            keeper.role,
            "IAM5[Resource::*]",
            "A policy can name no resource for reading metrics of CloudWatch, or for describing networks in EC2.",
        )
        suppress(
            keeper.role,
            "IAM5[Resource::arn:<AWS::Partition>:ec2:<AWS::Region>:<AWS::AccountId>:vpc-endpoint/*]",
            "ElastiCache names the endpoint of a cache, and a condition admits no endpoint of another service.",
        )
        run_every(self, "Schedule", self._function, minutes=_CHECK_MINUTES)

    @property
    def function_arn(self) -> str:
        """The ARN of the function, by its alias."""
        return self._function.function_arn

    def statements(self) -> list[iam.PolicyStatement]:
        """Permissions of a program that starts the cache."""
        return [iam.PolicyStatement(actions=["lambda:InvokeFunction"], resources=[self._function.function_arn])]
