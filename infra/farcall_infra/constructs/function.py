"""Lambda function with our defaults: the target's processor, its own role, its own log group, JSON logs."""

from __future__ import annotations

import functools
from typing import Final

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from constructs import Construct

from farcall_infra.bundles import LAMBDAS
from farcall_infra.constructs.bundle_asset import lambda_code
from farcall_infra.constructs.nag_suppressions import suppress
from farcall_infra.constructs.network import Network
from farcall_infra.deployment import Deployment

#: The alias of each function that serves.
LIVE: Final = "live"

_ARCHITECTURES = {"arm64": lambda_.Architecture.ARM_64, "x86_64": lambda_.Architecture.X86_64}


class PythonFunction(Construct):
    """One handler of the ``lambdas`` bundle. It is in the VPC if ``network`` is given, and outside it otherwise.

    ``timeout_s`` is in seconds. The role may write to the function's own log group and, in the VPC, attach the
    function's network interfaces; everything else is granted by the constructs that own it, to ``role``. Without
    ``retried``, Lambda makes one attempt for an asynchronous invocation of the alias, instead of three. ``concurrency``
    is reserved for the function and limits it; None for no reservation. An asynchronous event of the alias is dropped
    if it could not be handled for ``max_event_age_s``, by default Lambda's six hours.

    CDK publishes a version when the template's text of the function changes. ``parameters`` is the text of those
    values in the environment that are parameters of the stack: a new value publishes a version, too.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        deployment: Deployment,
        handler: str,
        description: str,
        environment: dict[str, str],
        timeout_s: int,
        memory_mib: int = 512,
        network: Network | None = None,
        retried: bool = True,
        concurrency: int | None = None,
        max_event_age_s: int | None = None,
        parameters: str = "",
    ) -> None:
        super().__init__(scope, construct_id)
        self._retried = retried
        self._max_event_age_s = max_event_age_s
        log_group = logs.LogGroup(
            self,
            "Logs",
            retention=retention(deployment.profile.retention.log_days),
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        self.role = role = iam.Role(self, "Role", assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"))
        log_group.grant_write(role)
        if network is not None:
            for statement in _network_interfaces():
                role.add_to_principal_policy(statement)
            suppress(
                role,
                "IAM5[Resource::*]",
                "Lambda makes and removes the network interfaces of a function with the function's role, before they "
                "have a name that a policy could give. The code of a function has the same role, so a second statement "
                "denies it these calls: its calls name the function that they come from, those of Lambda do not.",
            )
        target = deployment.target
        dual_stack = network is not None and target.ipv6
        self.function = lambda_.Function(
            self,
            "Function",
            description=description,
            code=lambda_code(self, deployment.packed(LAMBDAS), platform=target.wheels),
            handler=handler,
            runtime=lambda_.Runtime.PYTHON_3_14,
            architecture=_ARCHITECTURES[target.wheels.processor],
            memory_size=memory_mib,
            timeout=cdk.Duration.seconds(timeout_s),
            role=role,
            log_group=log_group,
            environment=environment | ({"AWS_USE_DUALSTACK_ENDPOINT": "true"} if dual_stack else {}),
            vpc=network.vpc if network else None,
            vpc_subnets=network.private if network else None,
            security_groups=[network.functions] if network else None,
            ipv6_allowed_for_dual_stack=True if dual_stack else None,
            reserved_concurrent_executions=concurrency,
            # CloudFormation replaces a version whose description changes. It deletes the old one at the end of the
            # update, so that a rollback finds it.
            current_version_options=lambda_.VersionOptions(
                description=parameters or None, removal_policy=cdk.RemovalPolicy.DESTROY
            ),
        )

    @functools.cached_property
    def live(self) -> lambda_.Alias:
        """The alias :data:`LIVE`, which names the newest version. Callers use it: code and settings change for them at
        the same moment, and back after a rollback."""
        return lambda_.Alias(
            self,
            "Live",
            alias_name=LIVE,
            version=self.function.current_version,
            retry_attempts=None if self._retried else 0,
            max_event_age=None if self._max_event_age_s is None else cdk.Duration.seconds(self._max_event_age_s),
        )


def _network_interfaces() -> tuple[iam.PolicyStatement, iam.PolicyStatement]:
    """Permissions that Lambda needs to attach a function to a VPC; EC2 offers no narrower resource for them. A second
    statement denies them to the code of a function, whose calls carry ``lambda:SourceFunctionArn``."""
    actions = [
        "ec2:AssignPrivateIpAddresses",
        "ec2:CreateNetworkInterface",
        "ec2:DeleteNetworkInterface",
        "ec2:DescribeNetworkInterfaces",
        "ec2:DescribeSubnets",
        "ec2:UnassignPrivateIpAddresses",
    ]
    # For any function: the name of this one would make the role and the function depend on each other.
    functions = f"arn:{cdk.Aws.PARTITION}:lambda:{cdk.Aws.REGION}:{cdk.Aws.ACCOUNT_ID}:function:*"
    return (
        iam.PolicyStatement(actions=actions, resources=["*"]),
        iam.PolicyStatement(
            effect=iam.Effect.DENY,
            actions=actions,
            resources=["*"],
            conditions={"ArnLike": {"lambda:SourceFunctionArn": functions}},
        ),
    )


def retention(days: int) -> logs.RetentionDays:
    """CDK's constant for a log retention of that many days."""
    return {
        1: logs.RetentionDays.ONE_DAY,
        3: logs.RetentionDays.THREE_DAYS,
        5: logs.RetentionDays.FIVE_DAYS,
        7: logs.RetentionDays.ONE_WEEK,
        14: logs.RetentionDays.TWO_WEEKS,
        30: logs.RetentionDays.ONE_MONTH,
        60: logs.RetentionDays.TWO_MONTHS,
        90: logs.RetentionDays.THREE_MONTHS,
        180: logs.RetentionDays.SIX_MONTHS,
        365: logs.RetentionDays.ONE_YEAR,
    }[days]
