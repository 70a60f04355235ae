"""Cost estimate: prices of resources and tasks, and errors for resources without a price."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from farcall_common.errors import ConfigurationError
from farcall_infra.cost import idle_bill, price_per_million_tasks
from farcall_infra.prices import load_prices

PRICES = load_prices()

_API: dict[str, Any] = {
    "Type": "AWS::Lambda::Function",
    "Properties": {
        "Handler": "farcall_lambdas.handlers.api.handle",
        "MemorySize": 1024,
        "Environment": {"Variables": {"FARCALL_RETENTION_DAYS": "30"}},
    },
}
_DATABASE: dict[str, Any] = {
    "Type": "AWS::RDS::DBInstance",
    "Properties": {
        "Engine": "postgres",
        "DBInstanceClass": "db.t4g.micro",
        "AllocatedStorage": "20",
        "StorageType": "gp3",
        "MultiAZ": False,
        "BackupRetentionPeriod": 7,
    },
}
_TASK: dict[str, Any] = {
    "Type": "AWS::ECS::TaskDefinition",
    "Properties": {"Cpu": "256", "Memory": "512", "RuntimePlatform": {"CpuArchitecture": "ARM64"}},
}
_SERVICE: dict[str, Any] = {
    "Type": "AWS::ECS::Service",
    "Properties": {
        "DesiredCount": 1,
        "TaskDefinition": {"Ref": "Task"},
        "NetworkConfiguration": {"AwsvpcConfiguration": {"AssignPublicIp": "ENABLED"}},
    },
}


def _template(**resources: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"stack": {"Resources": resources}}


def _changed(resource: dict[str, Any], **properties: object) -> dict[str, Any]:
    changed = copy.deepcopy(resource)
    changed["Properties"] |= properties
    return changed


def _usd(**resources: dict[str, Any]) -> float:
    return idle_bill(_template(**resources), PRICES).usd


def test_a_small_database_has_the_price_of_the_list() -> None:
    assert _usd(Database=_DATABASE) == pytest.approx(11.68 + 2.30)


def test_a_standby_doubles_the_databases_price() -> None:
    assert _usd(Database=_changed(_DATABASE, MultiAZ=True)) == pytest.approx(2 * _usd(Database=_DATABASE))


def test_a_task_includes_the_price_of_its_address() -> None:
    assert _usd(Task=_TASK, Service=_SERVICE) == pytest.approx(7.21 + 3.65, abs=0.01)


def test_a_parked_forwarder_is_free_and_a_spot_one_costs_a_third() -> None:
    spot = _changed(_SERVICE, CapacityProviderStrategy=[{"CapacityProvider": "FARGATE_SPOT", "Weight": 1}])
    assert _usd(Task=_TASK, Service=_changed(_SERVICE, DesiredCount=0)) == 0
    assert _usd(Task=_TASK, Service=spot) == pytest.approx(2.16 + 3.65, abs=0.01)


def test_the_first_alarms_are_free() -> None:
    alarms = {f"Alarm{number}": {"Type": "AWS::CloudWatch::Alarm", "Properties": {}} for number in range(12)}
    assert _usd(**alarms) == pytest.approx(2 * PRICES.monitoring.alarm_usd_per_month)


def test_free_resources_are_not_on_the_bill() -> None:
    assert idle_bill(_template(Vpc={"Type": "AWS::EC2::VPC", "Properties": {}}), PRICES).items == ()


@pytest.mark.parametrize(
    "resource",
    [
        {"Type": "AWS::EC2::NatGateway", "Properties": {}},
        _changed(_DATABASE, DBInstanceClass="db.x2iedn.32xlarge"),
        _changed(_DATABASE, Engine="aurora-postgresql"),
        _changed(_DATABASE, StorageType="io2"),
        {"Type": "AWS::EC2::VPCEndpoint", "Properties": {"VpcEndpointType": "GatewayLoadBalancer"}},
        {"Type": "AWS::ElasticLoadBalancingV2::LoadBalancer", "Properties": {"Type": "application"}},
        {"Type": "AWS::Events::Rule", "Properties": {"ScheduleExpression": "rate(1 second)", "Targets": []}},
    ],
)
def test_a_resource_without_a_price_is_an_error(resource: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="there is no price for"):
        _usd(Something=resource)


def test_batches_make_tasks_cheaper_and_blobs_more_expensive() -> None:
    templates = _template(Api=_API, Database=_DATABASE)
    single = price_per_million_tasks(templates, PRICES, batch=1)
    batched = price_per_million_tasks(templates, PRICES, batch=100)
    assert batched < 1.5 < single
    # Two requests per task, each with its Lambda's 30 ms and its line in the log, and the bytes out.
    lambda_usd = 2 * 0.2 + (2 * 0.03 + 0.001) * 1e6 * PRICES.functions.usd_per_gb_second
    kept_usd = 1780e6 / 2**30 * 0.115 + 3560e6 / 2**30 * 7 / 30 * 0.095
    assert single == pytest.approx(2 * 3.50 + lambda_usd + 2 * 0.50 + 0.45 + kept_usd + 0.10)
    with_blobs = price_per_million_tasks(templates, PRICES, batch=100, blobs=True)
    assert with_blobs - batched == pytest.approx(2 * 5.40)


def test_the_price_of_a_task_grows_with_retention_and_copies() -> None:
    def usd(days: str, *, standby: bool) -> float:
        api = _changed(_API, Environment={"Variables": {"FARCALL_RETENTION_DAYS": days}})
        database = _changed(_DATABASE, MultiAZ=standby)
        return price_per_million_tasks(_template(Api=api, Database=database), PRICES, batch=100)

    month_usd = 1780e6 / 2**30 * 0.115
    assert usd("30", standby=False) - usd("15", standby=False) == pytest.approx(month_usd / 2)
    assert usd("30", standby=True) - usd("30", standby=False) == pytest.approx(month_usd)


def test_a_deployment_without_an_api_has_no_price_per_task() -> None:
    with pytest.raises(ConfigurationError, match="without an API function"):
        price_per_million_tasks(_template(Database=_DATABASE), PRICES, batch=1)


def test_the_price_list_has_sources_and_a_date() -> None:
    assert PRICES.sources
    assert PRICES.as_of.year >= 2026


def test_a_misspelt_key_in_the_price_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('region = "us-east-1"\nsecretes = 3\n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match="cannot read the prices"):
        load_prices(path)
