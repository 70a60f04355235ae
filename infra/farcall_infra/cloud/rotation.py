"""Rotation of the password with which a program logs in to the database."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable
from typing import Final

from farcall_common.database_logins import other_login
from farcall_infra.cloud.aws import Aws
from farcall_infra.cloud.errors import DeploymentUnknown
from farcall_infra.cloud.lifecycle import find_stacks, require_quiet
from farcall_infra.deployment import LOGIN_OUTPUT, MIGRATOR_OUTPUT

_PASSWORD_BYTES: Final = 30


class Program(enum.StrEnum):
    """A program with a database role of its own."""

    API = "api"
    FORWARDER = "forwarder"
    RECONCILER = "reconciler"


def rotate(aws: Aws, name: str, program: Program, *, echo: Callable[[str], None]) -> None:
    """Change a program's login to the second one of its role, with a new password; ``echo`` prints each step.

    The login that the secret names is valid after each step, so an interrupted rotation needs no repair. The next one,
    or the next deployment, ends what it left.

    :raises DeploymentUnknown: if there is no such deployment, or an older release made it.
    :raises DeploymentBusy: if CloudFormation is changing it.
    :raises Unavailable: if a step fails.
    """
    stacks = find_stacks(aws, name)
    require_quiet(stacks.values())
    outputs = {key: value for stack in stacks.values() for key, value in stack.outputs.items()}
    try:
        secret, migrator = outputs[f"{LOGIN_OUTPUT}{program.capitalize()}"], outputs[MIGRATOR_OUTPUT]
    except KeyError as error:
        raise DeploymentUnknown(
            f"the deployment {name!r} is incomplete, or of an older release: it has no output {error}",
            hint="Run `farcall cloud deploy` first.",
        ) from error
    current, version = aws.secret_value(secret)
    login = other_login(current["username"])
    credentials = {**current, "username": login, "password": secrets.token_urlsafe(_PASSWORD_BYTES)}
    pending = aws.add_pending_value(secret, credentials)
    aws.invoke(migrator, {})
    echo(f"database: {login} can log in")
    aws.make_current(secret, pending, instead_of=version)
    echo(f"secret: the {program} logs in as {login} from now on")
    aws.invoke(migrator, {})
    echo(f"database: {current['username']} cannot log in any more")
