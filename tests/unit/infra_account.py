"""An AWS account without AWS, for the tests of ``farcall cloud``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from farcall_infra.cloud.aws import Aws, Caller, Database, LeftBehind, Resource, Stack, Tasks
from farcall_infra.cloud.errors import AwsRefused
from farcall_infra.deployment import STACKS

SERVICE = "arn:aws:ecs:eu-central-1:123456789012:service/cluster/forwarder"


@dataclasses.dataclass
class FakeAws(Aws):
    """An account that is ready, with one deployment called ``farcall`` in it, and a record of what was changed."""

    region: str = "eu-central-1"
    bootstrap: int | None = 30
    concurrency: int = 1000
    quotas: float | None = 100.0
    vpcs: int = 1
    roles: bool = True
    refused: bool = False
    running: int = 1
    firing: tuple[str, ...] = ()
    stacks: dict[str, Stack] = dataclasses.field(
        default_factory=lambda: {
            f"farcall-{part}": Stack(
                f"farcall-{part}",
                "CREATE_COMPLETE",
                {"api": {"ApiUrl": "https://api.example/api/"}, "data": {"Profile": "hobby"}}.get(part, {}),
                is_protected=part == "data",
            )
            for part in STACKS
        }
    )
    changes: list[str] = dataclasses.field(default_factory=list)

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

    def has_role(self, name: str) -> bool:
        return self.roles

    def has_secret(self, arn: str) -> bool:
        return arn == "arn:known"

    def stack(self, name: str) -> Stack | None:
        return self.stacks.get(name)

    def resources(self, stack: str) -> Sequence[Resource]:
        made = {
            "farcall-data": [Resource("AWS::RDS::DBInstance", "db"), Resource("AWS::S3::Bucket", "blobs")],
            "farcall-forwarder": [Resource("AWS::ECS::Service", SERVICE)],
            "farcall-observability": [Resource("AWS::CloudWatch::Alarm", "farcall-api-errors")],
        }
        return made.get(stack, [])

    def tasks(self, service_arn: str) -> Tasks:
        assert service_arn == SERVICE
        return Tasks(desired=1, running=self.running)

    def alarms(self, names: Sequence[str]) -> Mapping[str, str]:
        return {name: "ALARM" if name in self.firing else "OK" for name in names}

    def database(self, identifier: str) -> Database | None:
        return Database("available", 20, is_protected="database unprotected" not in self.changes)

    def left_behind(self, database: str) -> Sequence[LeftBehind]:
        return [LeftBehind("snapshot final", 20)]

    def unprotect_database(self, identifier: str) -> None:
        self.changes.append("database unprotected")

    def unprotect_stack(self, name: str) -> None:
        self.changes.append(f"{name} unprotected")

    def delete_stack(self, name: str, *, poll_s: int = 15, timeout_s: int = 3600) -> None:
        del self.stacks[name]
        self.changes.append(f"{name} deleted")
