"""Lifecycle of a deployment: find its stacks, decide whether they can be changed, and delete them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from farcall_common.errors import FarcallError
from farcall_infra.cloud.account import LeftBehind, Resource, Stack
from farcall_infra.cloud.aws import Aws
from farcall_infra.cloud.errors import DeploymentBusy, DeploymentStuck, DeploymentUnknown
from farcall_infra.deployment import (
    CACHE_NAME_OUTPUT,
    EXPRESS_OUTPUT,
    NO_GLOBUS_SECRET,
    OPTIONAL_STACKS,
    STACKS,
    stack_name,
)

_DATABASE: Final = "AWS::RDS::DBInstance"
#: The parameter of the API's stack that names the secret of the Globus client.
SECRET_PARAMETER: Final = "GlobusCredentialsArn"  # noqa: S105 - the name of a parameter

#: Status of a stack whose creation never finished. CloudFormation can only delete it; its resources were never used.
_UNFINISHED: Final = frozenset({"CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED"})
#: Status of a stack whose first change set was never executed; the next deployment uses it.
_PLANNED: Final = "REVIEW_IN_PROGRESS"


@dataclasses.dataclass(frozen=True)
class Remains:
    """Resources that remain after a deployment was deleted, and are billed until they are deleted too. ``secret`` is
    that of its Globus client, ``express`` the address of its directory bucket. ``unknown`` has the resources that could
    not be listed, and why."""

    buckets: tuple[str, ...] = ()
    backups: tuple[LeftBehind, ...] = ()
    secret: str = ""
    express: str = ""
    unknown: tuple[str, ...] = ()


def client_parameters(api: Stack) -> Mapping[str, str]:
    """The parameters of the API's stack, without the secret's default."""
    return {key: value for key, value in api.parameters.items() if value != NO_GLOBUS_SECRET}


def find_stacks(aws: Aws, name: str) -> Mapping[str, Stack]:
    """The stacks of the deployment ``name`` by part, in the order in which they are created.

    :raises DeploymentUnknown: if there are none.
    """
    found = {part: stack for part in (*STACKS, *OPTIONAL_STACKS) if (stack := aws.stack(stack_name(name, part)))}
    if not found:
        raise DeploymentUnknown(f"there is no deployment {name!r} in {aws.region}")
    return found


def created_resources(aws: Aws, stack: Stack | None, kind: str) -> Sequence[str]:
    """The physical ids of a stack's resources of one type."""
    resources: Sequence[Resource] = aws.resources(stack.name) if stack else ()
    return [resource.physical_id for resource in resources if resource.kind == kind]


def require_quiet(stacks: Iterable[Stack]) -> None:
    """:raises DeploymentBusy: if CloudFormation is changing one of the stacks."""
    for stack in stacks:
        if stack.status.endswith("_IN_PROGRESS") and stack.status != _PLANNED:
            raise DeploymentBusy(
                f"{stack.name} is {stack.status}: another command is running, or CloudFormation continues after an"
                " interruption",
                hint="Wait until `farcall cloud status` shows no stack that is IN_PROGRESS, and run the command again.",
            )


def require_changeable(stacks: Iterable[Stack], *, region: str) -> None:
    """:raises DeploymentBusy: if CloudFormation is changing one of the stacks.
    :raises DeploymentStuck: if CloudFormation left one of them in a status that no deployment can change.
    """
    stacks = list(stacks)
    require_quiet(stacks)
    for stack in stacks:
        if stack.status == "UPDATE_ROLLBACK_FAILED":
            raise DeploymentStuck(
                f"{stack.name}: the update failed, and so did the rollback: {stack.reason or 'no reason given'}",
                hint="Fix the problem, run `aws cloudformation continue-update-rollback"
                f" --stack-name {stack.name} --region {region}`, and deploy again when `farcall cloud status` shows"
                " UPDATE_ROLLBACK_COMPLETE.",
            )
        if stack.status == "DELETE_FAILED":
            raise DeploymentStuck(
                f"{stack.name} is partly deleted: {stack.reason or 'no reason given'}",
                hint="Finish the deletion with `farcall cloud destroy`, and deploy again.",
            )


def is_unfinished(stack: Stack) -> bool:
    """Whether the creation of a stack never finished, so that a deployment creates it again."""
    return stack.status in _UNFINISHED


def delete_unfinished(aws: Aws, stacks: Mapping[str, Stack], *, echo: Callable[[str], None]) -> None:
    """Delete stacks whose creation never finished, so that they can be created again."""
    for stack in reversed(list(stacks.values())):
        if is_unfinished(stack):
            echo(f"{stack.name} was never finished ({stack.status}) and is created again")
            delete_stack(aws, stack, echo=echo)


def destroy(aws: Aws, name: str, *, echo: Callable[[str], None]) -> Remains:
    """Delete the stacks of a deployment, last created first; ``echo`` prints each step.

    The deletion protection of the data is turned off first, so the caller must have asked the user. Data that the
    profile keeps remains: a final snapshot and the automated backups of the database, and the bucket.

    :raises DeploymentUnknown: if there is no such deployment.
    :raises DeploymentBusy: if CloudFormation is changing it.
    :raises DeploymentFailed: if a stack cannot be deleted; a further call continues.
    """
    stacks = find_stacks(aws, name)
    # For an interrupted deletion it is enough to wait.
    require_quiet(stack for stack in stacks.values() if stack.status != "DELETE_IN_PROGRESS")
    for stack in reversed(list(stacks.values())):
        delete_stack(aws, stack, echo=echo)
    remains = Remains(
        secret=client_parameters(stacks["api"]).get(SECRET_PARAMETER, "") if "api" in stacks else "",
        express=stacks["analytics"].outputs.get(EXPRESS_OUTPUT, "") if "analytics" in stacks else "",
    )
    return _with_tagged(aws, name, remains)


def delete_stack(aws: Aws, stack: Stack, *, echo: Callable[[str], None]) -> None:
    """Delete a stack, with what protects it, and with the cache that is not in it but uses its security group.

    :raises DeploymentFailed: if it cannot be deleted.
    """
    cache = stack.outputs.get(CACHE_NAME_OUTPUT)
    if cache and aws.has_cache(cache):
        echo(f"cache {cache}: deleting")
        aws.delete_cache(cache)
    for identifier in created_resources(aws, stack, _DATABASE):
        database = aws.database(identifier)
        if database and database.is_protected:
            echo(f"database {identifier}: protection off")
            aws.unprotect_database(identifier)
    if stack.is_protected:
        echo(f"{stack.name}: protection off")
        aws.unprotect_stack(stack.name)
    echo(f"{stack.name}: deleting")
    aws.delete_stack(stack.name)


def _with_tagged(aws: Aws, name: str, remains: Remains) -> Remains:
    """With the resources that still have the deployment's tag. Its stacks are deleted by now, so an error here is no
    failure."""
    unknown = []
    try:
        remains = dataclasses.replace(remains, backups=tuple(aws.left_behind(name)))
    except FarcallError as error:
        unknown.append(f"backups: {error.record.message}")
    try:
        remains = dataclasses.replace(remains, buckets=tuple(aws.buckets(name)))
    except FarcallError as error:
        unknown.append(f"buckets: {error.record.message}")
    return dataclasses.replace(remains, unknown=tuple(unknown))
