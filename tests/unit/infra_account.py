"""Fake AWS account for the tests of ``farcall cloud``."""

from __future__ import annotations

import dataclasses
import datetime as dt
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from farcall.cli._connect import CommandEnvironment
from farcall_infra.ca_bundle import CaBundle, read_ca_bundle
from farcall_infra.cloud.account import Caller, Database, LeftBehind, Metric, Queue, Resource, Sample, Stack, Tasks
from farcall_infra.cloud.aws import UNRESERVABLE, Aws
from farcall_infra.cloud.cli import CloudEnvironment, app
from farcall_infra.cloud.errors import AwsRefused
from farcall_infra.deployment import STACKS
from tests.certificates import Authority

SERVICE = "arn:aws:ecs:eu-central-1:123456789012:service/cluster/forwarder"
SECRET = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:farcall-globus-AbCdEf"
NOW = dt.datetime(2026, 11, 21, 3, 0, tzinfo=dt.UTC)
GLOBUS = {
    "GlobusClientId": "0c1b7e5d-8d0f-4e0e-9c55-0a8a5a0b8a11",
    "GlobusScope": "https://auth.globus.org/scopes/0c1b7e5d-8d0f-4e0e-9c55-0a8a5a0b8a11/all",
    "GlobusCredentialsArn": SECRET,
}
CACHE = "farcall-exchange"
CACHE_ADDRESS = "valkeys://farcall-exchange.example:6379/0"
#: The newest values in CloudWatch, by the metric's name.
VALUES = {
    "ConnectedEndpoints": 12.0,
    "Connections": 30.0,
    "TasksWaiting": 7.0,
    "QueueWait": 0.25,
    "CanaryTime": 0.8,
    "FreeStorageSpace": 15.5 * 2**30,
    "CurrItems": 345.0,
    "DatabaseMemoryUsagePercentage": 3.0,
}


def fetch_ca_bundle(_url: str, directory: Path, *, now: dt.datetime) -> CaBundle:
    """Replaces the download of RDS's CA bundle."""
    return read_ca_bundle(Authority().write(directory / "fetched.pem"), now=now)


@dataclasses.dataclass
class FakeAws(Aws):
    """A ready account with one deployment called ``farcall``; it records changes."""

    region: str = "eu-central-1"
    endpoint_url: str = ""
    bootstrap: int | None = 30
    concurrency: int = 1000
    quotas: float | None = 100.0
    vpcs: int = 1
    roles: bool = True
    lacking: bool = False
    refused: bool = False
    tasks_found: Tasks = dataclasses.field(default_factory=lambda: Tasks(desired=1, running=1))
    database_status: str = "available"
    database_version: str = "17.6"
    storage_gib: int = 20
    database_needs_restart: bool = False
    firing: tuple[str, ...] = ()
    stacks: dict[str, Stack] = dataclasses.field(
        default_factory=lambda: {
            f"farcall-{part}": Stack(
                f"farcall-{part}",
                "CREATE_COMPLETE",
                {"api": {"ApiUrl": "https://api.example/api/"}, "data": {"Profile": "hobby"}}.get(part, {}),
                is_protected=part == "data",
                parameters=GLOBUS if part == "api" else {},
                changed_at=NOW,
            )
            for part in STACKS
        }
    )
    changes: list[str] = dataclasses.field(default_factory=list)
    caches: dict[str, str] = dataclasses.field(default_factory=dict)

    def caller(self) -> Caller:
        return Caller("123456789012", "arn:aws:iam::123456789012:user/ada")

    def bootstrap_version(self) -> int | None:
        return self.bootstrap

    def quota(self, service: str, code: str) -> float | None:
        return self.quotas

    def function_concurrency(self) -> int:
        if self.refused:
            raise AwsRefused("not authorized to perform lambda:GetAccountSettings")
        return self.concurrency

    def count_vpcs(self) -> int:
        return self.vpcs

    def count_addresses(self) -> int:
        return 0

    def has_type(self, name: str) -> bool:
        return not self.lacking

    def zones(self) -> Mapping[str, str]:
        return {f"{self.region}{letter}": f"euc1-az{number}" for number, letter in enumerate("abc", start=1)}

    def postgres_versions(self, instance_class: str, *, multi_az: bool) -> Sequence[str]:
        return ["16.4"] if self.lacking else ["16.4", "17.6"]

    def has_cache_node(self, node_type: str) -> bool:
        return not self.lacking

    def has_role(self, name: str) -> bool:
        return self.roles

    def reservable_concurrency(self, functions: Sequence[str]) -> int:
        if self.refused:
            raise AwsRefused("not authorized to perform lambda:GetFunctionConcurrency")
        return max(0, self.concurrency - UNRESERVABLE)

    def secret_arn(self, secret: str) -> str | None:
        return SECRET if secret in (SECRET, SECRET.rpartition("-")[0]) else None

    def stack(self, name: str) -> Stack | None:
        return self.stacks.get(name)

    def resources(self, stack: str) -> Sequence[Resource]:
        made = {
            "farcall-data": [
                Resource("AWS::RDS::DBInstance", "db"),
                Resource("AWS::ElastiCache::ReplicationGroup", "group"),
                Resource("AWS::S3::Bucket", "blobs"),
            ],
            "farcall-forwarder": [Resource("AWS::ECS::Service", SERVICE)],
            "farcall-observability": [Resource("AWS::CloudWatch::Alarm", "farcall-api-errors")],
        }
        return made.get(stack, [])

    def tasks(self, service_arn: str) -> Tasks:
        assert service_arn == SERVICE
        return self.tasks_found

    def alarms(self, names: Sequence[str]) -> Mapping[str, str]:
        return {name: "ALARM" if name in self.firing else "OK" for name in names}

    def database(self, identifier: str) -> Database | None:
        return Database(
            self.database_status,
            self.storage_gib,
            is_protected="database unprotected" not in self.changes,
            version=f"postgres {self.database_version}",
            needs_restart=self.database_needs_restart,
        )

    def queue(self, identifier: str) -> Queue:
        if self.refused:
            raise AwsRefused("not authorized to perform elasticache:DescribeReplicationGroups")
        return Queue("available", (f"{identifier}-001",))

    def newest(self, metrics: Sequence[Metric], *, now: dt.datetime, within_s: int) -> Mapping[Metric, Sample]:
        return {metric: Sample(VALUES[metric.name], NOW) for metric in metrics}

    def left_behind(self, deployment: str) -> Sequence[LeftBehind]:
        return [LeftBehind(f"snapshot of {deployment}", 20, "aws rds delete-db-snapshot …")]

    def buckets(self, deployment: str) -> Sequence[str]:
        if self.refused:
            raise AwsRefused("not authorized to perform tag:GetResources")
        return ["blobs"]

    def has_cache(self, name: str) -> bool:
        return name in self.caches

    def delete_cache(self, name: str, *, poll_s: float = 5.0, timeout_s: float = 900.0) -> None:
        del self.caches[name]
        self.changes.append(f"cache {name} deleted")

    def invoke(self, function: str, event: Mapping[str, str]) -> Mapping[str, str]:
        """The function of the exchange cache; a new cache is available when it is asked for again."""
        status = self.caches.get(CACHE, "")
        if event["action"] == "start":
            self.caches[CACHE] = "available" if status else "creating"
        elif event["action"] == "stop":
            self.caches.pop(CACHE, None)
        self.changes.append(f"{function} {event['action']}")
        status = self.caches.get(CACHE, "")
        return {"status": status, "address": CACHE_ADDRESS if status == "available" else ""}

    def add_analytics(self) -> None:
        """Add the optional stack to the deployment."""
        outputs = {
            "Storage": "s3://farcall-exchange-bucket",
            "ExpressStorage": "s3://farcall--use1-az4--x-s3",
            "CacheFunction": "keeper",
            "CacheName": CACHE,
        }
        name = "farcall-analytics"
        self.stacks[name] = Stack(name, "CREATE_COMPLETE", outputs, is_protected=False)

    def make_service_role(self, service: str) -> None:
        self.changes.append(f"role of {service}")

    def unprotect_database(self, identifier: str) -> None:
        self.changes.append("database unprotected")

    def unprotect_stack(self, name: str) -> None:
        self.changes.append(f"{name} unprotected")

    def delete_stack(self, name: str, *, poll_s: int = 15, timeout_s: int = 3600) -> None:
        del self.stacks[name]
        self.changes.append(f"{name} deleted")

    def set_status(self, part: str, status: str, reason: str = "") -> None:
        name = f"farcall-{part}"
        self.stacks[name] = dataclasses.replace(self.stacks[name], status=status, reason=reason)


class FakeEnvironment(CloudEnvironment, CommandEnvironment):
    """Environment of ``farcall cloud``, and of ``farcall``, with a fake account."""

    def __init__(self, aws: FakeAws, **changes: Any) -> None:
        fakes = {"account": lambda _region: aws, "fetch": fetch_ca_bundle, "probe": lambda _url: ""}
        super().__init__(**(fakes | changes))


def invoke(aws: FakeAws, *arguments: str, input: str | None = None, app: Typer = app, **changes: Any) -> Result:  # noqa: A002 - as the runner calls it
    """Run a command of ``app`` with this account; ``changes`` are other fields of its environment."""
    return CliRunner().invoke(app, arguments, input=input, obj=FakeEnvironment(aws, **changes))


_CDK = """#!{python}
import json, os, sys
if sys.argv[1:] == ["--version"]:
    print("2.1148.1 (build fcf5e34)")
else:
    has_app = os.path.exists("cdk.json")
    called = {{"arguments": sys.argv[1:], "region": os.environ["AWS_REGION"], "has_app": has_app}}
    open({record!r}, "w").write(json.dumps(called))
    {then}
"""


def install_cdk(directory: Path, monkeypatch: pytest.MonkeyPatch, *, then: str = "sys.exit(0)") -> Path:
    """Replace the CDK's command line by a program that writes a record of its call to the returned file."""
    record, program = directory / "called.json", directory / "cdk"
    program.write_text(_CDK.format(python=sys.executable, record=str(record), then=then), encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("FARCALL_CDK", str(program))
    return record
