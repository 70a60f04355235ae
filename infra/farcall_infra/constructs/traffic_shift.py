"""Gradual releases: CodeDeploy moves the calls of an alias to a new version, and back after an alarm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import aws_cdk as cdk
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_codedeploy as codedeploy
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from farcall_infra.constructs.nag_suppressions import suppress


class TrafficShift(Construct):
    """A tenth of the calls of each of ``aliases`` for fifteen minutes, then all: an alarm that compares two periods of
    five minutes starts within that time. If one of ``alarms`` (their names) starts, all calls go back to the old
    version, and CloudFormation rolls the stack back.

    Creating an alias shifts nothing.
    """

    def __init__(
        self, scope: Construct, construct_id: str, *, aliases: Mapping[str, lambda_.Alias], alarms: Iterable[str]
    ) -> None:
        super().__init__(scope, construct_id)
        watched = [cloudwatch.Alarm.from_alarm_name(self, f"Alarm{name}", name) for name in alarms]
        application = codedeploy.LambdaApplication(self, "Application")
        role = self._role(aliases.values())
        for name, alias in aliases.items():
            group = codedeploy.LambdaDeploymentGroup(
                self,
                name,
                application=application,
                role=role.without_policy_updates(),  # CDK adds a policy for all functions of the account
                alias=alias,
                deployment_config=codedeploy.LambdaDeploymentConfig.CANARY_10_PERCENT_15_MINUTES,
                alarms=watched,
                # The alarms are in a later stack. After a first deployment that stopped before it, they do not exist.
                ignore_poll_alarms_failure=True,
            )
            group.node.add_dependency(role)

    def _role(self, aliases: Iterable[lambda_.Alias]) -> iam.Role:
        role = iam.Role(self, "Role", assumed_by=iam.ServicePrincipal("codedeploy.amazonaws.com"))
        functions = [alias.lambda_.function_arn for alias in aliases]
        role.add_to_policy(
            iam.PolicyStatement(
                actions=["lambda:GetAlias", "lambda:GetProvisionedConcurrencyConfig", "lambda:UpdateAlias"],
                resources=[*functions, *(f"{function}:*" for function in functions)],
            )
        )
        role.add_to_policy(iam.PolicyStatement(actions=["cloudwatch:DescribeAlarms"], resources=["*"]))
        suppress(
            role,
            "IAM5[Resource::*]",
            "CodeDeploy reads the states of alarms. A policy can name no alarm for that call.",
        )
        stack = cdk.Stack.of(self)
        for function in functions:
            name = stack.resolve(function)["Fn::GetAtt"][0]
            suppress(
                role,
                f"IAM5[Resource::<{name}.Arn>:*]",
                "CodeDeploy moves an alias between versions of the function, whose numbers no one knows in advance.",
            )
        return role
