"""CloudWatch alarms of a deployment, and the topic that they notify.

``docs/operations.md`` explains each alarm and its remedy; a test checks that.
"""

from __future__ import annotations

from typing import Final

import aws_cdk as cdk
from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from farcall_infra.constructs.metrics import (
    AUTHORIZER_FAILED,
    CANARY,
    CONNECTIONS_REFUSED,
    WAKING,
    Metrics,
    Monitored,
)
from farcall_infra.deployment import Deployment
from farcall_infra.profiles import Profile
from farcall_infra.regions import BUDGET_TYPE

#: Alarms that a release rolls back for.
API_ERRORS: Final = "api-errors"
FORWARDER_UNHEALTHY: Final = "forwarder-unhealthy"
LEASES_EXPIRING: Final = "leases-expiring"
RESULTS_LATE: Final = "results-late"

_GIB: Final = 2**30
_MIB: Final = 2**20
#: Free memory of the database below which it is about to swap, of any size: the smallest has 1 GiB.
_LOW_MEMORY_MIB: Final = 64
#: Minutes in which a forwarder that is woken runs; Fargate needs one or two.
_WAKING_MINUTES: Final = 5
#: Events of RDS about which someone has to know; the others are backups and changes that a deployment makes.
_DATABASE_EVENTS: Final = ("availability", "failover", "failure", "low storage", "maintenance", "recovery")
#: Connections that one forwarder's processor is sized for; setting up one takes half a millisecond.
_CONNECTIONS_PER_TASK: Final = 4000
#: Alarm if the database's disk, at the rate of the last five minutes, is full within this many hours.
_FILLING_H: Final = 6
_BUDGET_SHARES: Final = (50, 80, 100)  # percent

Comparison = cloudwatch.ComparisonOperator
Missing = cloudwatch.TreatMissingData


class Notifications(Construct):
    """``topic`` receives alarms and the budget's warnings; the profile's ``emails`` get them after they have confirmed.

    The budget covers the whole account: a filter by tag would show nothing, and never warn, until an administrator
    activates the tag in the billing console. With ``budget.monthly_usd`` 0 there is no budget, and none in regions that
    lack the resource type: the synth warns.
    """

    def __init__(self, scope: Construct, construct_id: str, *, deployment: Deployment) -> None:
        super().__init__(scope, construct_id)
        budget = deployment.profile.budget
        topic = sns.Topic(self, "Topic", display_name=f"Farcall {deployment.name}", enforce_ssl=True)
        self.topic = topic
        for email in budget.emails:
            topic.add_subscription(subscriptions.EmailSubscription(email))
        for service in ("budgets.amazonaws.com", "cloudwatch.amazonaws.com"):
            topic.add_to_resource_policy(
                iam.PolicyStatement(
                    actions=["sns:Publish"],
                    principals=[iam.ServicePrincipal(service)],
                    resources=[topic.topic_arn],
                    # Not for alarms and budgets of other accounts.
                    conditions={"StringEquals": {"aws:SourceAccount": cdk.Aws.ACCOUNT_ID}},
                )
            )
        if deployment.lacks_budget:
            cdk.Annotations.of(self).add_warning_v2(
                "farcall:budget",
                f"{deployment.region} has no {BUDGET_TYPE}, so there is no budget. Create one for the account in the "
                "billing console; -c budget.monthly_usd=0 removes this warning.",
            )
        elif budget.monthly_usd:
            self._add_budget(deployment.name, budget.monthly_usd)

    def _add_budget(self, deployment: str, monthly_usd: float) -> None:
        topic = self.topic
        subscriber = budgets.CfnBudget.SubscriberProperty(address=topic.topic_arn, subscription_type="SNS")
        # Other warnings need another name: CloudFormation creates a new budget for them before it deletes the old one.
        kinds = [("ACTUAL", share) for share in _BUDGET_SHARES] + [("FORECASTED", _BUDGET_SHARES[-1])]
        created = budgets.CfnBudget(
            self,
            "Budget",
            budget=budgets.CfnBudget.BudgetDataProperty(
                budget_name=f"{deployment}-{cdk.Aws.REGION}-monthly",  # budgets are global in an account
                budget_type="COST",
                time_unit="MONTHLY",
                budget_limit=budgets.CfnBudget.SpendProperty(amount=monthly_usd, unit="USD"),
            ),
            notifications_with_subscribers=[
                budgets.CfnBudget.NotificationWithSubscribersProperty(
                    notification=budgets.CfnBudget.NotificationProperty(
                        notification_type=kind,
                        comparison_operator="GREATER_THAN",
                        threshold=share,
                        threshold_type="PERCENTAGE",
                    ),
                    subscribers=[subscriber],
                )
                for kind, share in kinds
            ],
        )
        created.node.add_dependency(topic)  # a new budget publishes at once, so the topic's policy must exist


class Alarms(Construct):
    """Every alarm notifies ``topic`` when it starts and when it ends. Alarm names start with the deployment's name."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        deployment: str,
        profile: Profile,
        monitored: Monitored,
        metrics: Metrics,
        topic: sns.ITopic,
    ) -> None:
        super().__init__(scope, construct_id)
        self._prefix = deployment
        self._topic = topic
        self._add_api_alarms(profile, monitored)
        self._add_authorizer_alarms(monitored, metrics)
        self._add_refusal_alarm(metrics)
        self._add_forwarder_alarms(profile, monitored, metrics)
        self._add_reconciler_alarms(monitored)
        if minutes := profile.canary.minutes:
            self._add_canary_alarms(metrics, minutes)
        self._add_database_alarms(profile, monitored, metrics)
        self._add_queue_alarms(monitored)
        self._add_events(monitored)

    def _add_api_alarms(self, profile: Profile, monitored: Monitored) -> None:
        five = cdk.Duration.minutes(5)
        concurrency = profile.api.concurrency
        to_raise = (
            f"more than api.concurrency ({concurrency}) at once. Raise it, and database.connections with it"
            if concurrency
            else "the account's Lambda concurrency is used up. Ask for more under Service Quotas"
        )
        share = cloudwatch.MathExpression(
            expression="100 * errors / IF(calls > 20, calls, 20)",  # one failed call out of three is not an outage
            using_metrics={
                "errors": monitored.api.metric_server_error(period=five, statistic="Sum"),
                "calls": monitored.api.metric_count(period=five, statistic="Sum"),
            },
            period=five,
            label="server errors in percent",
        )
        self._above(API_ERRORS, share, 1, periods=2, why="More than one in a hundred calls ends with a server error.")
        self._above(
            "api-slow",
            monitored.api.metric_latency(period=five, statistic="p99"),
            2000,
            periods=3,
            why="One in a hundred calls takes longer than two seconds.",
        )
        self._above(
            "api-throttled",
            monitored.api_function.metric_throttles(period=five, statistic="Sum"),
            0,
            periods=1,
            why=f"Calls are turned away: {to_raise}.",
        )

    def _add_authorizer_alarms(self, monitored: Monitored, metrics: Metrics) -> None:
        five = cdk.Duration.minutes(5)
        self._above(
            "authorizer-failing",
            metrics.metric(AUTHORIZER_FAILED.name, "Sum", minutes=5),
            5,
            periods=2,
            why="Valid tokens cannot be verified: the identity provider or a secret is unavailable.",
        )
        self._above(
            "authorizer-throttled",
            monitored.authorizer.metric_throttles(period=five, statistic="Sum"),
            0,
            periods=1,
            why="More callers with new tokens come at once than the authorizer's concurrency admits.",
        )

    def _add_refusal_alarm(self, metrics: Metrics) -> None:
        refusals = metrics.refusals(minutes=5)
        self._above(
            "api-refusals",
            cloudwatch.MathExpression(
                expression=" + ".join(f"FILL({reason}, 0)" for reason in refusals),
                using_metrics=refusals,
                period=cdk.Duration.minutes(5),
                label="refused requests",
            ),
            500,
            periods=3,
            why="Quotas, rate limits or rights refuse many requests: a program repeats them, or someone tries ids.",
        )

    def _add_forwarder_alarms(self, profile: Profile, monitored: Monitored, metrics: Metrics) -> None:
        if (tasks := profile.forwarder.tasks) and not profile.forwarder.sleeps:
            # Each forwarder writes one line a minute: in five minutes, five times as many lines as there are
            # forwarders.
            self._alarm(
                "forwarder-missing",
                metrics.metric("Connections", "SampleCount", minutes=5),
                3 * tasks,
                Comparison.LESS_THAN_THRESHOLD,
                periods=1,
                missing=Missing.BREACHING,
                why="Fewer forwarders run than should.",
            )
        if profile.forwarder.sleeps:
            self._above(
                "forwarder-waking",
                metrics.metric(WAKING.name, "Sum"),
                0,
                periods=_WAKING_MINUTES,
                why=f"A forwarder was woken, and does not run after {_WAKING_MINUTES} minutes.",
            )
        if monitored.targets is not None:
            self._above(
                FORWARDER_UNHEALTHY,
                monitored.targets.metrics.un_healthy_host_count(period=cdk.Duration.minutes(1), statistic="Maximum"),
                0,
                periods=5,
                why="The load balancer sends no peers to a forwarder, because it does not answer its health check.",
            )
        self._above(
            "forwarder-busy",
            monitored.forwarder.metric_cpu_utilization(period=cdk.Duration.minutes(5)),
            80,
            periods=3,
            why="The forwarders' processors are busy; results will come late.",
        )
        self._above(
            "forwarder-full",
            metrics.metric("Connections", "Maximum", minutes=5),
            0.75 * min(_CONNECTIONS_PER_TASK, profile.forwarder.connections),
            periods=1,
            why="A forwarder holds three quarters of the connections that it is sized for.",
        )
        self._above(
            LEASES_EXPIRING,
            metrics.metric("LeasesExpired", "Sum", minutes=5),
            10,
            periods=1,
            why="Endpoints vanish with tasks that may not run again; these tasks end as lost.",
        )
        self._above(
            RESULTS_LATE,
            metrics.metric("PushLag", "Maximum", minutes=5),
            10,
            periods=2,
            why="Results wait longer than ten seconds for the database.",
        )

    def _add_reconciler_alarms(self, monitored: Monitored) -> None:
        five = cdk.Duration.minutes(5)
        self._alarm(
            "reconciler-silent",
            monitored.reconciler.metric_invocations(period=five, statistic="Sum"),
            3,
            Comparison.LESS_THAN_THRESHOLD,
            periods=2,
            missing=Missing.BREACHING,
            why="The reconciler does not run, so tasks that a crash left behind stay there.",
        )
        self._above(
            "reconciler-failing",
            monitored.reconciler.metric_errors(period=five, statistic="Sum"),
            2,
            periods=2,
            why="The reconciler runs and fails, so tasks that a crash left behind stay there.",
        )

    def _add_canary_alarms(self, metrics: Metrics, minutes: int) -> None:
        self._alarm(
            "canary-failing",
            metrics.metric(CANARY.name, "SampleCount", minutes=3 * minutes),
            1,
            Comparison.LESS_THAN_THRESHOLD,
            periods=1,
            missing=Missing.BREACHING,
            why="None of the canary's last three calls came through.",
        )
        self._above(
            "canary-slow",
            metrics.metric(CANARY.name, "Minimum", minutes=3 * minutes),
            5,
            periods=1,
            why="Each of the canary's last three calls took longer than five seconds.",
        )

    def _add_queue_alarms(self, monitored: Monitored) -> None:
        """Add alarms for each node. None is for evictions: the queue's policy is to refuse, and to evict nothing."""
        for number, node in enumerate(monitored.queue_nodes, start=1):
            self._above(
                f"queue-memory-{number}",
                queue_metric("DatabaseMemoryUsagePercentage", node),
                70,
                periods=3,
                why="The queue is filling up; when it is full, submits are answered but wait for the reconciler.",
            )
            self._above(
                f"queue-busy-{number}",
                queue_metric("EngineCPUUtilization", node),
                80,
                periods=3,
                why="The queue's one thread is busy; tasks will start late.",
            )
            if len(monitored.queue_nodes) > 1:
                self._above(
                    f"queue-replica-late-{number}",
                    queue_metric("ReplicationLag", node),
                    10,
                    periods=2,
                    why="A replica of the queue is ten seconds behind; a fail-over would lose what it does not have.",
                )

    def _add_events(self, monitored: Monitored) -> None:
        """Events of RDS and ECS, which no metric shows, go to the topic."""
        self._notify(
            "DatabaseEvents",
            events.EventPattern(
                source=["aws.rds"],
                detail_type=["RDS DB Instance Event"],
                detail={
                    "SourceIdentifier": [monitored.database.instance_identifier],
                    "EventCategories": list(_DATABASE_EVENTS),
                },
            ),
            f"Farcall {self._prefix}, database: {events.EventField.from_path('$.detail.Message')}",
        )
        self._notify(
            "ForwarderEvents",
            events.EventPattern(
                source=["aws.ecs"],
                detail_type=["ECS Service Action", "ECS Deployment State Change"],
                resources=[monitored.forwarder.service_arn],
                detail={"eventType": ["ERROR", "WARN"]},
            ),
            f"Farcall {self._prefix}, forwarder: {events.EventField.from_path('$.detail.eventName')}. "
            "See the events of its service in ECS.",
        )

    def _notify(self, name: str, pattern: events.EventPattern, text: str) -> None:
        message = events.RuleTargetInput.from_text(text)
        events.Rule(self, name, event_pattern=pattern, targets=[targets.SnsTopic(self._topic, message=message)])

    def _add_database_alarms(self, profile: Profile, monitored: Monitored, metrics: Metrics) -> None:
        five = cdk.Duration.minutes(5)
        size = profile.database
        self._alarm(
            "database-storage",
            monitored.database.metric_free_storage_space(period=five, statistic="Minimum"),
            0.15 * size.storage_gib * _GIB,
            Comparison.LESS_THAN_THRESHOLD,
            periods=2,
            missing=Missing.IGNORE,
            why="The database has less than 15 percent of its disk left; when it is full, nothing is accepted.",
        )
        self._alarm(
            "database-filling",
            cloudwatch.MathExpression(
                expression=f"IF(RATE(free) < 0, free / (-3600 * RATE(free)), {10 * _FILLING_H})",
                using_metrics={"free": monitored.database.metric_free_storage_space(period=five, statistic="Average")},
                period=five,
                label="hours until the disk is full",
            ),
            _FILLING_H,
            Comparison.LESS_THAN_THRESHOLD,
            periods=3,
            missing=Missing.IGNORE,
            why=f"At its present rate the database's disk is full in less than {_FILLING_H} hours.",
        )
        self._above(
            "database-connections",
            monitored.database.metric_database_connections(period=five, statistic="Maximum"),
            0.5 * size.connections,
            periods=2,
            why="Half of the database's connections are taken; the API's share is a little more.",
        )
        self._above(
            "database-refusals",
            metrics.metric(CONNECTIONS_REFUSED.name, "Sum", minutes=5),
            0,
            periods=1,
            why="The API's share of the database's connections is used up, and requests are answered with 503.",
        )
        self._alarm(
            "database-memory",
            monitored.database.metric_freeable_memory(period=five, statistic="Minimum"),
            _LOW_MEMORY_MIB * _MIB,
            Comparison.LESS_THAN_THRESHOLD,
            periods=3,
            missing=Missing.IGNORE,
            why=f"The database has less than {_LOW_MEMORY_MIB} MiB of memory left.",
        )
        self._above(
            "database-busy",
            monitored.database.metric_cpu_utilization(period=five),
            80,
            periods=6,
            why="The database's processor has been busy for half an hour.",
        )
        if size.instance_type.startswith("t"):
            self._above(
                "database-credits",
                monitored.database.metric("CPUSurplusCreditsCharged", period=cdk.Duration.hours(1), statistic="Sum"),
                0,
                periods=1,
                why="The database is busier than its size allows for, and AWS charges for the surplus.",
            )

    def _above(self, name: str, metric: cloudwatch.IMetric, threshold: float, *, periods: int, why: str) -> None:
        """An alarm for values above ``threshold``; missing data is not a problem."""
        self._alarm(
            name,
            metric,
            threshold,
            Comparison.GREATER_THAN_THRESHOLD,
            periods=periods,
            missing=Missing.NOT_BREACHING,
            why=why,
        )

    def _alarm(
        self,
        name: str,
        metric: cloudwatch.IMetric,
        threshold: float,
        comparison: cloudwatch.ComparisonOperator,
        *,
        periods: int,
        missing: cloudwatch.TreatMissingData,
        why: str,
    ) -> None:
        alarm = cloudwatch.Alarm(
            self,
            name,
            alarm_name=alarm_name(self._prefix, name),
            alarm_description=f"{why} See docs/operations.md, {name}.",
            metric=metric,
            threshold=threshold,
            comparison_operator=comparison,
            evaluation_periods=periods,
            treat_missing_data=missing,
        )
        action = actions.SnsAction(self._topic)
        alarm.add_alarm_action(action)
        alarm.add_ok_action(action)


def alarm_name(deployment: str, name: str) -> str:
    """The name of an alarm of a deployment. It is fixed: releases in earlier stacks refer to it."""
    return f"{deployment}-{name}"


def queue_metric(name: str, node: str, *, statistic: str = "Maximum") -> cloudwatch.Metric:
    """A metric of one node of the queue."""
    return cloudwatch.Metric(
        namespace="AWS/ElastiCache",
        metric_name=name,
        dimensions_map={"CacheClusterId": node},
        statistic=statistic,
        period=cdk.Duration.minutes(5),
    )
