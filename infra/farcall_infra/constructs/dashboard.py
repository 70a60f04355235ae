"""CloudWatch dashboard of a deployment."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_cloudwatch as cloudwatch
from constructs import Construct

from farcall_infra.constructs.alarms import queue_metric
from farcall_infra.constructs.metrics import (
    ACCEPTED,
    AUTHORIZER_FAILED,
    CANARY,
    CONNECTIONS_REFUSED,
    WAITING,
    WAKING,
    Metrics,
    Monitored,
)

_THIRD, _QUARTER = 8, 6  # of the 24 columns of a row
_FIVE = cdk.Duration.minutes(5)


class Dashboard(Construct):
    """Tasks, waits and connections above; API, database, queue and forwarder below."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        name: str,
        monitored: Monitored,
        metrics: Metrics,
        sleeps: bool,
    ) -> None:
        super().__init__(scope, construct_id)
        api, database = monitored.api, monitored.database
        waits = ("QueueWait", "PushLag", *((CANARY.name,) if monitored.canary else ()))
        cloudwatch.Dashboard(
            self,
            "Page",
            dashboard_name=f"{name}-{cdk.Aws.REGION}",  # dashboards are global in an account
            period_override=cloudwatch.PeriodOverride.AUTO,
            widgets=[
                [
                    _graph(
                        "Tasks a minute",
                        *(
                            metrics.metric(each, "Sum")
                            for each in (
                                ACCEPTED.name,
                                "TasksFinished",
                                "TasksFailed",
                                "TasksRedelivered",
                                "LeasesExpired",
                            )
                        ),
                        width=_QUARTER,
                    ),
                    _graph("Tasks that wait", metrics.metric(WAITING.name, "Maximum"), width=_QUARTER),
                    _graph("Longest waits, s", *(metrics.metric(name, "Maximum") for name in waits), width=_QUARTER),
                    _graph(
                        "Connected",
                        metrics.metric("ConnectedEndpoints", "Sum"),
                        metrics.metric("Connections", "Sum"),
                        width=_QUARTER,
                    ),
                ],
                [
                    _graph("API calls", api.metric_count(period=_FIVE, statistic="Sum")),
                    _graph(
                        "API errors",
                        api.metric_client_error(period=_FIVE, statistic="Sum"),
                        api.metric_server_error(period=_FIVE, statistic="Sum"),
                        *metrics.refusals(minutes=5).values(),
                        metrics.metric(AUTHORIZER_FAILED.name, "Sum", minutes=5),
                        *([metrics.metric(WAKING.name, "Sum", minutes=5)] if sleeps else []),
                        monitored.reconciler.metric_errors(period=_FIVE, statistic="Sum"),
                    ),
                    _graph(
                        "API latency, ms",
                        api.metric_integration_latency(period=_FIVE, statistic="p50"),
                        api.metric_integration_latency(period=_FIVE, statistic="p99"),
                    ),
                ],
                [
                    _graph(
                        "Processors, %",
                        monitored.forwarder.metric_cpu_utilization(period=_FIVE),
                        database.metric_cpu_utilization(period=_FIVE),
                        *(queue_metric("EngineCPUUtilization", node) for node in monitored.queue_nodes),
                    ),
                    _graph(
                        "Memory, %",
                        monitored.forwarder.metric_memory_utilization(period=_FIVE),
                        *(queue_metric("DatabaseMemoryUsagePercentage", node) for node in monitored.queue_nodes),
                    ),
                    _graph(
                        "Database connections",
                        database.metric_database_connections(period=_FIVE, statistic="Maximum"),
                        metrics.metric(CONNECTIONS_REFUSED.name, "Sum", minutes=5),
                    ),
                ],
            ],
        )


def _graph(title: str, *metrics: cloudwatch.IMetric, width: int = _THIRD) -> cloudwatch.IWidget:
    return cloudwatch.GraphWidget(
        title=title, left=list(metrics), width=width, left_y_axis=cloudwatch.YAxisProps(min=0, show_units=False)
    )
