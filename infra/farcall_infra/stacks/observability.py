"""Observability stack: metrics, alarms, dashboard, budget. It can be replaced or left out without other changes."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from farcall_infra.constructs.alarms import Alarms, Notifications
from farcall_infra.constructs.dashboard import Dashboard
from farcall_infra.constructs.metrics import Metrics, Monitored
from farcall_infra.deployment import Deployment


class ObservabilityStack(cdk.Stack):
    """Metrics, alarms, dashboard, budget."""

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment, monitored: Monitored) -> None:
        super().__init__(scope, construct_id, description="Farcall: observability")
        profile, name = deployment.profile, deployment.name
        notifications = Notifications(self, "News", deployment=name, budget=profile.budget)
        metrics = Metrics(self, "Metrics", deployment=name, monitored=monitored)
        Alarms(
            self,
            "Alarms",
            deployment=name,
            profile=profile,
            monitored=monitored,
            metrics=metrics,
            topic=notifications.topic,
        )
        Dashboard(self, "Dashboard", name=name, monitored=monitored, metrics=metrics)
        cdk.CfnOutput(self, "AlarmTopic", value=notifications.topic.topic_arn)
