"""The canary: a scheduled function that sends a task through the whole cloud tier, to its own endpoint."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from farcall_infra.constructs.function import PythonFunction
from farcall_infra.deployment import Deployment


class Canary(Construct):
    """The function and its schedule. It is outside of the VPC, like users and endpoints, so its connections take the
    same path."""

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
        # No retries: the next run replaces a missed or failed one.
        rule.add_target(targets.LambdaFunction(canary.function, retry_attempts=0))
