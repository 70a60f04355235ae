"""The reconciler: a scheduled function that repairs the stores after a crash, and stops idle forwarders."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from constructs import Construct

from farcall_infra.constructs.fleet import Fleet
from farcall_infra.constructs.function import PythonFunction
from farcall_infra.constructs.network import Network
from farcall_infra.constructs.stores import Stores
from farcall_infra.deployment import RECONCILER_CONCURRENCY, Deployment

_PERIOD = cdk.Duration.minutes(1)


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
        rule = events.Rule(self, "EachMinute", schedule=events.Schedule.rate(_PERIOD))
        # No retries: the next run replaces a missed or failed one.
        rule.add_target(targets.LambdaFunction(reconciler.function, retry_attempts=0))
