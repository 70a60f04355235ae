"""The canary: every few minutes a call of its own goes through the whole cloud tier, to an endpoint of its own."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from farcall_infra.constructs.function import PythonFunction
from farcall_infra.deployment import Deployment

__all__ = ["Canary"]


class Canary(Construct):
    """The function and its schedule. It is outside of the VPC, because users and endpoints are: what it asks of a
    forwarder goes the way that theirs goes."""

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment, api: lambda_.Function) -> None:
        super().__init__(scope, construct_id)
        canary = PythonFunction(
            self,
            "Function",
            deployment=deployment,
            handler="farcall_lambdas.handlers.canary.handle",
            description="Sends a call through the whole cloud tier",
            environment={"FARCALL_API_FUNCTION": api.function_name},
            timeout_s=110,  # done before the next one starts
            retried=False,
        )
        self.function = canary.function
        canary.role.add_to_principal_policy(
            iam.PolicyStatement(actions=["lambda:InvokeFunction"], resources=[api.function_arn])
        )
        period = cdk.Duration.minutes(deployment.profile.canary.minutes)
        rule = events.Rule(self, "Schedule", schedule=events.Schedule.rate(period))
        # A missed run, and one that failed, is made up for by the next one.
        rule.add_target(targets.LambdaFunction(canary.function, retry_attempts=0))
