"""Scheduled functions: the reconciler repairs the stores after a crash and stops idle forwarders; the canary sends a
task through the whole cloud tier, to its own endpoint."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from farcall_infra.constructs.fleet import Fleet
from farcall_infra.constructs.function import PythonFunction
from farcall_infra.constructs.identity import CallerKey
from farcall_infra.constructs.network import Network
from farcall_infra.constructs.stores import Stores
from farcall_infra.deployment import Deployment
from farcall_infra.profiles import RECONCILER_CONCURRENCY


class Reconciler(Construct):
    """The function and its schedule."""

    def __init__(
        self, scope: Construct, construct_id: str, *, deployment: Deployment, network: Network, stores: Stores
    ) -> None:
        super().__init__(scope, construct_id)
        fleet = Fleet(deployment)
        reconciler = PythonFunction(
            self,
            "Function",
            deployment=deployment,
            handler="farcall_lambdas.handlers.reconciler.handle",
            description="Re-queues committed tasks that the queue does not have, and clears up",
            environment=stores.environment("reconciler") | fleet.environment() | deployment.profile.api_environment(),
            timeout_s=55,  # done before the next one starts
            network=network,
            retried=False,
            # Two runs at once would do the same work twice. The next run replaces one that could not start.
            concurrency=RECONCILER_CONCURRENCY if deployment.api_concurrency else None,
            max_event_age_s=60,
        )
        self.function = reconciler.function
        stores.grant(reconciler.role, "reconciler")
        fleet.grant(self, reconciler.role)
        run_every(self, "EachMinute", reconciler.live, minutes=1)


class Canary(Construct):
    """The function and its schedule. It is outside of the VPC, like users and endpoints, so its connections take the
    same path."""

    def __init__(
        self, scope: Construct, construct_id: str, *, deployment: Deployment, api: lambda_.Alias, key: CallerKey
    ) -> None:
        super().__init__(scope, construct_id)
        canary = PythonFunction(
            self,
            "Function",
            deployment=deployment,
            handler="farcall_lambdas.handlers.canary.handle",
            description="Sends a call through the whole cloud tier",
            environment={"FARCALL_API_FUNCTION": api.function_arn, **key.environment()},
            timeout_s=110,  # done before the next one starts
            retried=False,
        )
        self.function = canary.function
        key.grant(canary.role)
        canary.role.add_to_principal_policy(
            iam.PolicyStatement(actions=["lambda:InvokeFunction"], resources=[api.function_arn])
        )
        run_every(self, "Schedule", canary.live, minutes=deployment.profile.canary.minutes)


def run_every(scope: Construct, construct_id: str, function: lambda_.IFunction, *, minutes: int) -> None:
    """Invoke ``function`` every so many minutes."""
    rule = events.Rule(scope, construct_id, schedule=events.Schedule.rate(cdk.Duration.minutes(minutes)))
    # No retries: the next run replaces a missed or failed one.
    rule.add_target(targets.LambdaFunction(function, retry_attempts=0))
