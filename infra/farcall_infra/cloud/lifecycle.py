"""What becomes of a deployment: whether it can be changed, and how it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from farcall_common.errors import FarcallError
from farcall_infra.cloud.account import LeftBehind, Resource, Stack
from farcall_infra.cloud.aws import Aws
from farcall_infra.cloud.errors import DeploymentBusy, DeploymentStuck, DeploymentUnknown
from farcall_infra.deployment import STACKS, stack_name

__all__ = [
    "SECRET_PARAMETER",
    "Remains",
    "clear",
    "destroy",
    "find_stacks",
    "is_stillborn",
    "made",
    "require_changeable",
    "require_quiet",
]

_DATABASE: Final = "AWS::RDS::DBInstance"
#: The parameter of the API's stack that names the secret of the Globus client.
SECRET_PARAMETER: Final = "GlobusCredentialsArn"  # noqa: S105 - the name of a parameter

#: A stack that was never finished. CloudFormation can only delete it, and nothing has used what is in it.
_STILLBORN: Final = frozenset({"CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED"})
#: Made by a change set that nobody carried out; the next one goes on from here.
_PLANNED: Final = "REVIEW_IN_PROGRESS"


@dataclasses.dataclass(frozen=True)
class Remains:
    """What is left of a deployment, and is billed for until somebody deletes it: ``secret`` is that of its Globus
    client. ``unknown`` says what could not be looked at, and why."""

    buckets: tuple[str, ...] = ()
    backups: tuple[LeftBehind, ...] = ()
    secret: str = ""
    unknown: tuple[str, ...] = ()


def find_stacks(aws: Aws, name: str) -> Mapping[str, Stack]:
    """The stacks of the deployment ``name`` by part, in the order in which they are made.

    :raises DeploymentUnknown: if there is not one of them.
    """
    found = {part: stack for part in STACKS if (stack := aws.stack(stack_name(name, part)))}
    if not found:
        raise DeploymentUnknown(f"there is no deployment {name!r} in {aws.region}")
    return found


def made(aws: Aws, stack: Stack | None, kind: str) -> Sequence[str]:
    """The physical ids of what a stack made of one type."""
    resources: Sequence[Resource] = aws.resources(stack.name) if stack else ()
    return [resource.physical_id for resource in resources if resource.kind == kind]


def require_quiet(stacks: Iterable[Stack]) -> None:
    """:raises DeploymentBusy: if CloudFormation is changing one of the stacks."""
    for stack in stacks:
        if stack.status.endswith("_IN_PROGRESS") and stack.status != _PLANNED:
            raise DeploymentBusy(
                f"{stack.name} is {stack.status}: somebody else deploys, or CloudFormation goes on with what was"
                " interrupted",
                hint="Wait until `farcall cloud status` shows nothing that is IN_PROGRESS, and try again.",
            )


def require_changeable(stacks: Iterable[Stack], *, region: str) -> None:
    """:raises DeploymentBusy: if CloudFormation is changing one of the stacks.
    :raises DeploymentStuck: if one of them was left by CloudFormation in a state that nothing can be deployed over.
    """
    stacks = list(stacks)
    require_quiet(stacks)
    for stack in stacks:
        if stack.status == "UPDATE_ROLLBACK_FAILED":
            raise DeploymentStuck(
                f"{stack.name} could neither be updated nor put back: {stack.reason or 'no reason given'}",
                hint="Mend the reason, run `aws cloudformation continue-update-rollback"
                f" --stack-name {stack.name} --region {region}`, and deploy again when `farcall cloud status` shows"
                " UPDATE_ROLLBACK_COMPLETE.",
            )
        if stack.status == "DELETE_FAILED":
            raise DeploymentStuck(
                f"{stack.name} is half deleted: {stack.reason or 'no reason given'}",
                hint="Finish that with `farcall cloud destroy`, and deploy again.",
            )


def is_stillborn(stack: Stack) -> bool:
    """Whether a stack was never finished, and is going to be made again."""
    return stack.status in _STILLBORN


def clear(aws: Aws, stacks: Mapping[str, Stack], *, tell: Callable[[str], None]) -> None:
    """Delete the stacks that were never finished, so that they can be made again."""
    for stack in reversed(list(stacks.values())):
        if is_stillborn(stack):
            tell(f"{stack.name} was never finished ({stack.status}) and is made again")
            _delete(aws, stack, tell=tell)


def destroy(aws: Aws, name: str, *, tell: Callable[[str], None]) -> Remains:
    """Delete the stacks of a deployment, last made first; ``tell`` hears of each step.

    The protections of the data are taken off first, which is why the caller must have asked. What the profile keeps
    stays: a final snapshot and the automated backups of the database, and the bucket.

    :raises DeploymentUnknown: if there is no such deployment.
    :raises DeploymentBusy: if CloudFormation is changing it.
    :raises DeploymentFailed: if a stack cannot be deleted; calling again goes on from there.
    """
    stacks = find_stacks(aws, name)
    # A deletion that was interrupted is only waited for.
    require_quiet(stack for stack in stacks.values() if stack.status != "DELETE_IN_PROGRESS")
    for stack in reversed(list(stacks.values())):
        _delete(aws, stack, tell=tell)
    return _remains(aws, name, secret=stacks["api"].parameters.get(SECRET_PARAMETER, "") if "api" in stacks else "")


def _delete(aws: Aws, stack: Stack, *, tell: Callable[[str], None]) -> None:
    for identifier in made(aws, stack, _DATABASE):
        database = aws.database(identifier)
        if database and database.is_protected:
            tell(f"database {identifier}: protection off")
            aws.unprotect_database(identifier)
    if stack.is_protected:
        tell(f"{stack.name}: protection off")
        aws.unprotect_stack(stack.name)
    tell(f"{stack.name}: deleting")
    aws.delete_stack(stack.name)


def _remains(aws: Aws, name: str, *, secret: str) -> Remains:
    """What has the deployment's tag still. Its stacks are gone by now, so not to know it is no failure."""
    remains, unknown = Remains(secret=secret), []
    try:
        remains = dataclasses.replace(remains, backups=tuple(aws.left_behind(name)))
    except FarcallError as error:
        unknown.append(f"backups: {error.record.message}")
    try:
        remains = dataclasses.replace(remains, buckets=tuple(aws.buckets(name)))
    except FarcallError as error:
        unknown.append(f"buckets: {error.record.message}")
    return dataclasses.replace(remains, unknown=tuple(unknown))
