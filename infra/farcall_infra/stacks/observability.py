"""Observability stack: it can be deployed anew, or left out, without touching what it watches."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct

from farcall_infra.constructs.alarms import Alarms
from farcall_infra.constructs.dashboard import Dashboard
from farcall_infra.constructs.metrics import Metrics
from farcall_infra.constructs.news import News
from farcall_infra.constructs.watched import Watched
from farcall_infra.deployment import Deployment

__all__ = ["ObservabilityStack"]


class ObservabilityStack(cdk.Stack):
    """Metrics, alarms, dashboard, budget."""

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment, watched: Watched) -> None:
        super().__init__(scope, construct_id, description="Farcall: observability")
        profile, name = deployment.profile, deployment.name
        news = News(self, "News", deployment=name, budget=profile.budget)
        metrics = Metrics(
            self,
            "Metrics",
            deployment=name,
            forwarder=watched.forwarder_logs,
            api=watched.api_function.log_group,
            reconciler=watched.reconciler.log_group,
            canary=watched.canary.log_group if watched.canary else None,
        )
        Alarms(self, "Alarms", deployment=name, profile=profile, watched=watched, metrics=metrics, topic=news.topic)
        Dashboard(self, "Dashboard", name=name, watched=watched, metrics=metrics)
        cdk.CfnOutput(self, "AlarmTopic", value=news.topic.topic_arn)
