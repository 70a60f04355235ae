"""What becomes of a deployment: how it is, and how it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from farcall_infra.cloud.aws import Aws, Database, LeftBehind, Resource, Stack, Tasks
from farcall_infra.cloud.errors import DeploymentUnknown
from farcall_infra.deployment import STACKS, stack_name

__all__ = ["Remains", "Status", "destroy", "find_stacks", "look"]

_SERVICE: Final = "AWS::ECS::Service"
_DATABASE: Final = "AWS::RDS::DBInstance"
_ALARM: Final = "AWS::CloudWatch::Alarm"
_BUCKET: Final = "AWS::S3::Bucket"
_ALARMING: Final = "ALARM"


@dataclasses.dataclass(frozen=True)
class Status:
    """A deployment at one moment: its stacks, the forwarder's tasks, the database, and the alarms that are firing."""

    stacks: tuple[Stack, ...]
    missing: tuple[str, ...]
    tasks: Tasks | None
    database: Database | None
    alarms: tuple[str, ...]

    @property
    def api_url(self) -> str:
        """Where the API is; empty if it is not deployed."""
        return next((stack.outputs["ApiUrl"] for stack in self.stacks if "ApiUrl" in stack.outputs), "")

    @property
    def is_well(self) -> bool:
        """Whether everything is deployed, at rest, and running as it should."""
        at_rest = all(stack.status in ("CREATE_COMPLETE", "UPDATE_COMPLETE") for stack in self.stacks)
        running = self.tasks is not None and self.tasks.running >= self.tasks.desired
        return at_rest and running and not self.missing and not self.alarms


@dataclasses.dataclass(frozen=True)
class Remains:
    """What is left of a deployment, and is billed for until somebody deletes it."""

    buckets: tuple[str, ...]
    backups: tuple[LeftBehind, ...]


def find_stacks(aws: Aws, name: str) -> Mapping[str, Stack]:
    """The stacks of the deployment ``name`` by part, in the order in which they are made.

    :raises DeploymentUnknown: if there is not one of them.
    """
    found = {part: stack for part in STACKS if (stack := aws.stack(stack_name(name, part)))}
    if not found:
        raise DeploymentUnknown(f"there is no deployment {name!r} in {aws.region}")
    return found


def look(aws: Aws, name: str) -> Status:
    """How the deployment ``name`` is.

    :raises DeploymentUnknown: if there is none.
    """
    stacks = find_stacks(aws, name)
    services = _made(aws, stacks.get("forwarder"), _SERVICE)
    databases = _made(aws, stacks.get("data"), _DATABASE)
    alarms = _made(aws, stacks.get("observability"), _ALARM)
    return Status(
        stacks=tuple(stacks.values()),
        missing=tuple(stack_name(name, part) for part in STACKS if part not in stacks),
        tasks=aws.tasks(services[0]) if services else None,
        database=aws.database(databases[0]) if databases else None,
        alarms=tuple(alarm for alarm, state in aws.alarms(alarms).items() if state == _ALARMING) if alarms else (),
    )


def destroy(aws: Aws, name: str, *, tell: Callable[[str], None]) -> Remains:
    """Delete the stacks of a deployment, last made first; ``tell`` hears of each step.

    The protections of the data are taken off first, which is why the caller must have asked. What the profile keeps
    stays: a final snapshot and the automated backups of the database, and the bucket.

    :raises DeploymentUnknown: if there is no such deployment.
    :raises DeploymentFailed: if a stack cannot be deleted; calling again goes on from there.
    """
    stacks = find_stacks(aws, name)
    data = stacks.get("data")
    databases, buckets = _made(aws, data, _DATABASE), _made(aws, data, _BUCKET)
    for identifier in databases:
        database = aws.database(identifier)
        if database and database.is_protected:
            tell(f"database {identifier}: protection off")
            aws.unprotect_database(identifier)
    for stack in reversed(list(stacks.values())):
        if stack.is_protected:
            tell(f"{stack.name}: protection off")
            aws.unprotect_stack(stack.name)
        tell(f"{stack.name}: deleting")
        aws.delete_stack(stack.name)
    return Remains(
        buckets=tuple(buckets), backups=tuple(backup for each in databases for backup in aws.left_behind(each))
    )


def _made(aws: Aws, stack: Stack | None, kind: str) -> Sequence[str]:
    """The physical ids of what a stack made of one type."""
    resources: Sequence[Resource] = aws.resources(stack.name) if stack else ()
    return [resource.physical_id for resource in resources if resource.kind == kind]
