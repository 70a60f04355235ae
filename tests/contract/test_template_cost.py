"""Cost of the synthesised templates: every resource has a price, and every profile is within its budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farcall_common.errors import ConfigurationError
from farcall_infra.cloud.cli import app
from farcall_infra.constructs import metrics
from farcall_infra.cost import REASONS, exchange_prices, idle_bill, price_per_million_tasks
from farcall_infra.prices import DEFAULT_PRICES, load_prices
from farcall_infra.profiles import Profile, load_profile
from tests.contract.templates import Templates, resources

PRICES = load_prices()


def test_the_idle_bill_is_within_the_budget(aws: Templates, size: Profile) -> None:
    bill = idle_bill(aws, PRICES)
    assert bill.usd <= size.budget.idle_usd, "\n".join(f"{item.usd:8.2f}  {item.what}" for item in bill.items)
    # A limit far above the bill would not detect a change.
    assert bill.usd >= 0.85 * size.budget.idle_usd


def test_metrics_and_alarms_are_counted_as_they_are_billed(aws: Templates) -> None:
    """A filter with a dimension makes a metric of each value; an alarm on an expression is billed by its metrics."""
    assert len(metrics.REASONS) == REASONS
    by_kind = {
        what: [item.what for item in idle_bill(aws, PRICES).items if f" {what}, " in item.what]
        for what in ("metrics", "alarms")
    }
    filters = list(resources(aws, "AWS::Logs::MetricFilter"))
    assert by_kind["metrics"] == [f"{len(filters) + REASONS - 1} metrics, 10 of them free"]
    measured = [
        sum("MetricStat" in part for part in alarm.get("Metrics", ())) or 1
        for _, alarm in resources(aws, "AWS::CloudWatch::Alarm")
    ]
    assert by_kind["alarms"] == [f"{sum(measured)} alarms, 10 of them free"]
    assert sum(measured) > len(measured)


def test_every_stack_with_a_price_is_on_the_bill(aws: Templates) -> None:
    bill = idle_bill(aws, PRICES)
    assert {"farcall-data", "farcall-forwarder"} <= {item.stack for item in bill.items}
    for part in ("PostgreSQL", "Valkey", "Fargate", "IPv4"):
        assert any(part in item.what for item in bill.items), part


def test_a_vpc_endpoint_is_on_the_bill(synthesized: Callable[[str, str], Templates]) -> None:
    (usd,) = (item.usd for item in idle_bill(synthesized("options", "parked"), PRICES).items if "endpoint" in item.what)
    assert usd == pytest.approx(2 * 0.01 * 730)


@pytest.mark.parametrize(("batch", "limit_usd"), [(1, 11.0), (100, 1.5)])
def test_a_million_tasks_stay_cheap(aws: Templates, batch: int, limit_usd: float) -> None:
    assert 0 < price_per_million_tasks(aws, PRICES, batch=batch) <= limit_usd


def test_the_command_line_prices_a_profile_without_an_account(tmp_path: Path) -> None:
    """With the prices of us-east-1 as those of another region, except for one of them."""
    table = tmp_path / "prices.toml"
    ours = DEFAULT_PRICES.read_text(encoding="utf-8")
    theirs = ours.replace('region = "us-east-1"', 'region = "eu-central-1"')
    table.write_text(theirs.replace('"db.t4g.micro" = 0.016', '"db.t4g.micro" = 0.015'), encoding="utf-8")
    where = ["--region", "eu-central-1", "--prices", str(table)]
    done = CliRunner().invoke(app, ["cost", "--profile", "hobby", "-c", "forwarder.tasks=0", "--json", *where])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.output)
    assert answer["region"] == "eu-central-1"
    assert [item["usd"] for item in answer["items"] if "db.t4g.micro" in item["what"]] == [pytest.approx(0.015 * 730)]
    assert 0 < answer["idle_usd"] <= load_profile("hobby").budget.idle_usd
    assert not [item for item in answer["items"] if "Fargate" in item["what"]]
    assert answer["usd_per_million_tasks"]["in batches of 100"] < 1.25


def test_the_prices_of_another_region_are_never_guessed() -> None:
    refused = CliRunner().invoke(app, ["cost", "--region", "eu-central-1"]).exception
    assert isinstance(refused, ConfigurationError)
    assert "there are no prices for eu-central-1, only for us-east-1" in str(refused)
    assert "--prices FILE" in refused.hint


def test_exchanges_have_a_price_only_where_they_have_a_storage(synthesized: Callable[[str, str], Templates]) -> None:
    assert exchange_prices(synthesized("aws", "lab"), PRICES) == {}
    alone = exchange_prices(synthesized("options", "bucket-only"), PRICES)
    assert len(alone) == 2
    (requests,) = (usd for what, usd in alone.items() if "through the bucket" in what)
    assert requests == pytest.approx(1e3 * 5e-6 + 1e6 * 0.4e-6)
    found = exchange_prices(synthesized("options", "analytics"), PRICES)
    assert alone.items() <= found.items()
    by_part = {
        part: next(usd for what, usd in found.items() if part in what)
        for part in ("through S3 Express", "bytes written", "processing units", "a GB in the Valkey", "without use")
    }
    assert by_part == pytest.approx(
        {
            "through S3 Express": 1e3 * 1.13e-6 + 1e6 * 0.03e-6,
            "bytes written": 1000 * (0.0032 + 0.0006),
            "processing units": 2e9 * 0.0023e-6,  # a TB in and out, one for each KB
            "a GB in the Valkey": 0.084,
            "without use": 0.0084,
        }
    )


def test_a_storage_of_analytics_costs_cents_while_it_is_idle(synthesized: Callable[[str, str], Templates]) -> None:
    templates = synthesized("options", "analytics")
    idle = [item for item in idle_bill(templates, PRICES).items if item.stack == "farcall-analytics"]
    assert {item.what for item in idle} == {"runs of exchange_cache", "their logs"}
    assert 0 < sum(item.usd for item in idle) < 0.05


def test_synth_writes_only_the_templates_if_asked(tmp_path: Path) -> None:
    command = ["synth", "--name", "physics", "--templates-only", "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert done.output == f"{tmp_path / 'out'}\n"
    parts = ("api", "data", "forwarder", "network", "observability")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"physics-{part}.template.json" for part in parts
    ]
