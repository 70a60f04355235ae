"""Metrics from logs. The forwarder writes one line a minute, and each number in it is a metric. The API writes one for
each batch that it accepts, the reconciler one per run, with the number of waiting tasks, and the canary one per run,
with the duration of its task. Lines about failures that no metric of AWS shows are counted.

The metrics have no dimensions but one, the reason of a refusal: a metric per endpoint would cost more than the rest of
a deployment.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import aws_cdk as cdk
from aws_cdk import aws_apigateway as apigateway
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_elasticloadbalancingv2 as elb
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs
from aws_cdk import aws_rds as rds
from constructs import Construct


@dataclasses.dataclass(frozen=True)
class MetricField:
    """A metric, the field of the line that it is read from, and its unit."""

    name: str
    field: str
    unit: cloudwatch.Unit


FIELDS: Final = (
    MetricField("TasksRedelivered", "tasks_redelivered", cloudwatch.Unit.COUNT),
    MetricField("TasksFinished", "tasks_finished", cloudwatch.Unit.COUNT),
    MetricField("TasksFailed", "tasks_failed", cloudwatch.Unit.COUNT),
    MetricField("LeasesExpired", "leases_expired", cloudwatch.Unit.COUNT),
    MetricField("QueueWait", "queue_wait_s", cloudwatch.Unit.SECONDS),
    MetricField("PushLag", "push_lag_s", cloudwatch.Unit.SECONDS),
    MetricField("ConnectedEndpoints", "endpoints_connected", cloudwatch.Unit.COUNT),
    MetricField("Connections", "connections", cloudwatch.Unit.COUNT),
)


ACCEPTED: Final = MetricField("TasksAccepted", "tasks_accepted", cloudwatch.Unit.COUNT)
WAITING: Final = MetricField("TasksWaiting", "tasks_waiting", cloudwatch.Unit.COUNT)
CANARY: Final = MetricField("CanaryTime", "canary_s", cloudwatch.Unit.SECONDS)


@dataclasses.dataclass(frozen=True)
class LineCount:
    """A metric that counts the lines of a log that match a pattern."""

    name: str
    pattern: str


#: Requests that found no free connection to the database: the role of the API has a limit below that of the server.
CONNECTIONS_REFUSED: Final = LineCount("ConnectionsRefused", '{ $.reason = "the database has no connection left*" }')
#: Requests for a forwarder while none runs, where forwarders may sleep.
WAKING: Final = LineCount("ForwarderWaking", '{ $.code = "FORWARDER_WAKING" }')
#: Tokens that the authorizer could not judge. Lambda's own metric of errors has those that it refused, too.
AUTHORIZER_FAILED: Final = LineCount("AuthorizerFailures", '{ $.level = "ERROR" }')

#: Requests that the API refused, by the field ``refused`` of its access log: the values of the dimension Reason.
REFUSED: Final = "RequestsRefused"
REASONS: Final = ("quota", "rate", "right")


@dataclasses.dataclass(frozen=True)
class Monitored:
    """Parts of other stacks that metrics, alarms and the dashboard read. ``queue_nodes`` are the ids of the queue's
    nodes; the canary and the targets of a load balancer are optional."""

    api: apigateway.RestApi
    api_function: lambda_.Function
    authorizer: lambda_.Function
    reconciler: lambda_.Function
    canary: lambda_.Function | None
    forwarder: ecs.FargateService
    forwarder_logs: logs.LogGroup
    targets: elb.INetworkTargetGroup | None
    database: rds.DatabaseInstance | rds.DatabaseInstanceFromSnapshot
    queue_nodes: tuple[str, ...]


class Metrics(Construct):
    """A metric filter for each of :data:`FIELDS` and for the metrics of the API, the reconciler and the canary, if
    there is one, in the deployment's own namespace. Wakes are counted if forwarders sleep (``sleeps``)."""

    def __init__(
        self, scope: Construct, construct_id: str, *, deployment: str, monitored: Monitored, sleeps: bool
    ) -> None:
        super().__init__(scope, construct_id)
        self._namespace = f"Farcall/{deployment}"
        for metric in FIELDS:
            self._read(metric, monitored.forwarder_logs)
        self._read(ACCEPTED, monitored.api_function.log_group)
        self._count_refusals(monitored.api_function.log_group)
        self._count(CONNECTIONS_REFUSED, monitored.api_function.log_group)
        self._count(AUTHORIZER_FAILED, monitored.authorizer.log_group)
        if sleeps:
            self._count(WAKING, monitored.api_function.log_group)
        self._read(WAITING, monitored.reconciler.log_group)
        if monitored.canary is not None:
            self._read(CANARY, monitored.canary.log_group)

    def _read(self, metric: MetricField, log_group: logs.ILogGroup) -> None:
        logs.MetricFilter(
            self,
            metric.name,
            log_group=log_group,
            filter_pattern=logs.FilterPattern.number_value(f"$.{metric.field}", ">=", 0),
            metric_namespace=self._namespace,
            metric_name=metric.name,
            metric_value=f"$.{metric.field}",
            unit=metric.unit,
        )

    def _count(self, count: LineCount, log_group: logs.ILogGroup) -> None:
        logs.MetricFilter(
            self,
            count.name,
            log_group=log_group,
            filter_pattern=logs.FilterPattern.literal(count.pattern),
            metric_namespace=self._namespace,
            metric_name=count.name,
            metric_value="1",
            unit=cloudwatch.Unit.COUNT,
        )

    def _count_refusals(self, log_group: logs.ILogGroup) -> None:
        logs.MetricFilter(
            self,
            REFUSED,
            log_group=log_group,
            filter_pattern=logs.FilterPattern.exists("$.refused"),
            metric_namespace=self._namespace,
            metric_name=REFUSED,
            metric_value="1",
            dimensions={"Reason": "$.refused"},
            unit=cloudwatch.Unit.COUNT,
        )

    def refusals(self, *, minutes: int) -> dict[str, cloudwatch.IMetric]:
        """Requests that the API refused, by reason, over periods of that many minutes."""
        return {
            reason: cloudwatch.Metric(
                namespace=self._namespace,
                metric_name=REFUSED,
                dimensions_map={"Reason": reason},
                statistic="Sum",
                period=cdk.Duration.minutes(minutes),
                label=f"refused: {reason}",
            )
            for reason in REASONS
        }

    def metric(self, name: str, statistic: str, *, minutes: int = 1) -> cloudwatch.Metric:
        """One of the metrics, by its name, over periods of that many minutes."""
        return cloudwatch.Metric(
            namespace=self._namespace,
            metric_name=name,
            statistic=statistic,
            period=cdk.Duration.minutes(minutes),
        )
