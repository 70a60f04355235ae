"""Metrics, alarms, dashboard and budget: they use existing resources and metrics, and alarms are documented."""

from __future__ import annotations

import json
import re
from pathlib import Path

from farcall_forwarder.core.meter import Meter
from farcall_infra.constructs.metrics import AUTHORIZER_FAILED, CONNECTIONS_REFUSED, REASONS, REFUSED, WAKING
from farcall_infra.profiles import Profile
from tests.contract.templates import Templates, resources, the_one

_WORKSPACE = Path(__file__).resolve().parents[2]
COUNTS = (CONNECTIONS_REFUSED, WAKING, AUTHORIZER_FAILED)
_OPERATIONS = _WORKSPACE / "docs" / "operations.md"


def _alarm_names(templates: Templates) -> set[str]:
    return {alarm["AlarmName"].removeprefix("farcall-") for _, alarm in resources(templates, "AWS::CloudWatch::Alarm")}


def test_metric_filters_read_fields_that_the_forwarder_writes(aws: Templates, size: Profile) -> None:
    # Tests of the canary, of submits and of the reconciler check the other fields.
    written = {*Meter().read(endpoints=0, connections=0), "canary_s", "tasks_accepted", "tasks_waiting"}
    counted = {REFUSED, *(each.name for each in COUNTS)}
    filters = [
        each
        for _, each in resources(aws, "AWS::Logs::MetricFilter")
        if each["MetricTransformations"][0]["MetricName"] not in counted
    ]
    assert len(filters) == 10 + bool(size.canary.minutes)  # ten metrics are free, and the canary pays for its own
    for each in filters:
        (made,) = each["MetricTransformations"]
        field = made["MetricValue"].removeprefix("$.")
        assert field in written
        assert each["FilterPattern"] == f"{{ $.{field} >= 0 }}"
        assert made["MetricNamespace"] == "Farcall/farcall"
        assert not made.get("Dimensions")


def test_refusals_are_counted_by_reason_and_alarmed(aws: Templates) -> None:
    (counted,) = (
        each
        for _, each in resources(aws, "AWS::Logs::MetricFilter")
        if each["MetricTransformations"][0]["MetricName"] == REFUSED
    )
    (made,) = counted["MetricTransformations"]
    assert counted["FilterPattern"] == '{ $.refused = "*" }'
    assert (made["MetricValue"], made["Dimensions"]) == ("1", [{"Key": "Reason", "Value": "$.refused"}])
    (alarm,) = (
        each for _, each in resources(aws, "AWS::CloudWatch::Alarm") if each["AlarmName"] == "farcall-api-refusals"
    )
    read = {each["MetricStat"]["Metric"]["Dimensions"][0]["Value"] for each in alarm["Metrics"] if "MetricStat" in each}
    assert read == set(REASONS)


def test_lines_about_failures_are_counted_and_alarmed(aws: Templates, size: Profile) -> None:
    """Unit tests of the API check that it writes these lines."""
    wanted = {each.name: each.pattern for each in COUNTS if each is not WAKING or size.forwarder.sleeps}
    found = {
        each["MetricTransformations"][0]["MetricName"]: each["FilterPattern"]
        for _, each in resources(aws, "AWS::Logs::MetricFilter")
    }
    assert {name: pattern for name, pattern in found.items() if name in {each.name for each in COUNTS}} == wanted
    alarmed = {alarm.get("MetricName") for _, alarm in resources(aws, "AWS::CloudWatch::Alarm")}
    assert set(wanted) <= alarmed


def test_alarms_of_saturation_can_fire(aws: Templates, size: Profile) -> None:
    """Below what a program may use alone: its role of the database is full long before the server is."""
    alarms = {alarm["AlarmName"]: alarm for _, alarm in resources(aws, "AWS::CloudWatch::Alarm")}
    api_connections = int((size.database.connections - 10) * 0.6)
    assert alarms["farcall-database-connections"]["Threshold"] < api_connections
    assert alarms["farcall-database-memory"]["MetricName"] == "FreeableMemory"
    nodes = range(1, size.queue.nodes + 1)
    for number in nodes:
        assert alarms[f"farcall-queue-busy-{number}"]["MetricName"] == "EngineCPUUtilization"
    lag = {name for name in alarms if name.startswith("farcall-queue-replica-late-")}
    assert lag == ({f"farcall-queue-replica-late-{number}" for number in nodes} if len(nodes) > 1 else set())
    assert ("farcall-forwarder-unhealthy" in alarms) == size.network.load_balancer
    assert ("farcall-forwarder-waking" in alarms) == size.forwarder.sleeps
    assert ("farcall-forwarder-missing" in alarms) != size.forwarder.sleeps


def test_events_of_the_database_and_the_forwarder_reach_the_topic(aws: Templates) -> None:
    topic = the_one(aws, "AWS::SNS::TopicPolicy")["Topics"][0]
    rules = [each for _, each in resources(aws, "AWS::Events::Rule") if "EventPattern" in each]
    by_source = {rule["EventPattern"]["source"][0]: rule for rule in rules}
    assert set(by_source) == {"aws.rds", "aws.ecs"}
    for rule in rules:
        (target,) = rule["Targets"]
        assert target["Arn"] == topic
        assert "Farcall farcall, " in target["InputTransformer"]["InputTemplate"]
    database, forwarder = by_source["aws.rds"]["EventPattern"], by_source["aws.ecs"]["EventPattern"]
    assert {"failover", "failure", "low storage", "maintenance"} <= set(database["detail"]["EventCategories"])
    assert len(database["detail"]["SourceIdentifier"]) == len(forwarder["resources"]) == 1
    assert forwarder["detail"] == {"eventType": ["ERROR", "WARN"]}


def test_every_alarm_notifies_the_topic_and_has_a_description(aws: Templates) -> None:
    alarms = [alarm for _, alarm in resources(aws, "AWS::CloudWatch::Alarm")]
    assert len(alarms) >= 12
    for alarm in alarms:
        name = alarm["AlarmName"].removeprefix("farcall-")
        assert alarm["AlarmName"].startswith("farcall-")
        assert alarm["AlarmActions"] == alarm["OKActions"]
        assert len(alarm["AlarmActions"]) == 1
        assert alarm["AlarmDescription"].endswith(f"See docs/operations.md, {name}.")


def test_the_manual_documents_exactly_the_existing_alarms(aws: Templates, profile: str) -> None:
    documented = set(re.findall(r"^### `([a-z0-9-]+)`$", _OPERATIONS.read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {re.sub(r"-\d+$", "", name) for name in _alarm_names(aws)}
    assert named <= documented
    if profile == "facility":
        # Other sizes have these: a burstable database, a forwarder that sleeps.
        assert documented - named <= {"database-credits", "forwarder-waking"}


def test_alarms_on_periodic_metrics_fire_when_data_is_missing(aws: Templates, size: Profile) -> None:
    breaching = {
        alarm["AlarmName"]
        for _, alarm in resources(aws, "AWS::CloudWatch::Alarm")
        if alarm["TreatMissingData"] == "breaching"
    }
    canary = {"farcall-canary-failing"} if size.canary.minutes else set()
    forwarder = set() if size.forwarder.sleeps else {"farcall-forwarder-missing"}  # a sleeping forwarder is no problem
    assert breaching == {"farcall-reconciler-silent"} | forwarder | canary


def test_an_alarm_predicts_a_full_disk(aws: Templates) -> None:
    (alarm,) = (
        each for _, each in resources(aws, "AWS::CloudWatch::Alarm") if each["AlarmName"] == "farcall-database-filling"
    )
    (hours,) = (each for each in alarm["Metrics"] if "Expression" in each)
    (free,) = (each for each in alarm["Metrics"] if "MetricStat" in each)
    assert hours["Expression"] == "IF(RATE(free) < 0, free / (-3600 * RATE(free)), 60)"
    assert free["Id"] == "free"
    assert free["MetricStat"]["Metric"]["MetricName"] == "FreeStorageSpace"
    assert (alarm["Threshold"], alarm["ComparisonOperator"]) == (6, "LessThanThreshold")
    # The alarm fires within half an hour: 15 percent of the smallest disk last six minutes at the rate of a lab.
    assert free["MetricStat"]["Period"] * alarm["EvaluationPeriods"] <= 1800


def test_alarm_periods_are_within_cloudwatchs_limit(aws: Templates) -> None:
    """The limit is a day, or a week for periods of an hour or more; no linter has a rule for it."""
    for _, alarm in resources(aws, "AWS::CloudWatch::Alarm"):
        measured = [each["MetricStat"] for each in alarm.get("Metrics", []) if "MetricStat" in each] or [alarm]
        for period in (each["Period"] for each in measured):
            assert period * alarm["EvaluationPeriods"] <= (86_400 if period < 3600 else 7 * 86_400)
            assert period % 60 == 0


def test_each_node_of_the_queue_has_an_alarm(aws: Templates, size: Profile) -> None:
    watched = {name for name in _alarm_names(aws) if name.startswith("queue-memory-")}
    assert watched == {f"queue-memory-{number}" for number in range(1, size.queue.nodes + 1)}


def test_the_budget_warns_before_it_is_spent(aws: Templates, size: Profile) -> None:
    budget = the_one(aws, "AWS::Budgets::Budget")
    assert budget["Budget"]["BudgetLimit"] == {"Amount": size.budget.monthly_usd, "Unit": "USD"}
    warnings = [each["Notification"] for each in budget["NotificationsWithSubscribers"]]
    assert [(each["NotificationType"], each["Threshold"]) for each in warnings] == [
        ("ACTUAL", 50),
        ("ACTUAL", 80),
        ("ACTUAL", 100),
        ("FORECASTED", 100),
    ]


def test_alarms_and_budget_may_publish_to_the_topic_with_tls_only(aws: Templates) -> None:
    statements = the_one(aws, "AWS::SNS::TopicPolicy")["PolicyDocument"]["Statement"]
    allowed = [statement for statement in statements if statement["Effect"] == "Allow"]
    account = {"StringEquals": {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}}
    assert [(each["Principal"]["Service"], each.get("Condition")) for each in allowed] == [
        (["budgets.amazonaws.com", "cloudwatch.amazonaws.com"], account),
        ("events.amazonaws.com", None),  # its publications to a topic know no conditions
    ]
    assert {each["Action"] for each in allowed} == {"sns:Publish"}
    assert any(
        statement["Effect"] == "Deny" and statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
        for statement in statements
    )


def test_there_is_one_dashboard_with_the_deployments_name(aws: Templates) -> None:
    dashboard = the_one(aws, "AWS::CloudWatch::Dashboard")
    assert dashboard["DashboardName"] == {"Fn::Join": ["", ["farcall-", {"Ref": "AWS::Region"}]]}
    shown = json.dumps(dashboard["DashboardBody"])
    assert [
        name
        for _, each in resources(aws, "AWS::Logs::MetricFilter")
        if (name := each["MetricTransformations"][0]["MetricName"]) not in shown
    ] == []
