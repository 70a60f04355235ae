"""Everything that would make a deployment fail, looked at before one begins."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Final

from farcall_common.errors import FarcallError
from farcall_infra.cloud.aws import Aws
from farcall_infra.cloud.tools import CDK_VERSION, MIN_NODE, Tools
from farcall_infra.profiles import Profile

__all__ = ["Finding", "Outcome", "examine"]

#: What the templates ask of the bootstrap stack, and what the CDK's command line needs to upload their bundles.
_MIN_BOOTSTRAP: Final = 6
_MIN_CONCURRENCY: Final = 50
_CDK_SERIES: Final = tuple(map(int, CDK_VERSION.split(".")[:2]))

Version = tuple[int, ...]

# Service Quotas' names for the limits that we come near.
_FARGATE_VCPU: Final = ("fargate", "L-3032A538")
_SPOT_VCPU: Final = ("fargate", "L-36FBB829")
_VPCS: Final = ("vpc", "L-F678F1CE")
_ADDRESSES: Final = ("ec2", "L-0263D0A3")

# A service makes its own role when it is first used in the console, and not when CloudFormation is the first to use it.
_SERVICE_ROLES: Final = {
    "AWSServiceRoleForECS": "ecs.amazonaws.com",
    "AWSServiceRoleForElastiCache": "elasticache.amazonaws.com",
    "AWSServiceRoleForRDS": "rds.amazonaws.com",
}
_BALANCER_ROLE: Final = {"AWSServiceRoleForElasticLoadBalancing": "elasticloadbalancing.amazonaws.com"}


class Outcome(enum.StrEnum):
    """How much a finding matters."""

    FINE = "fine"
    WARNING = "warning"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one look found, and what to do about it."""

    what: str
    outcome: Outcome
    message: str
    hint: str = ""


def examine(profile: Profile, aws: Callable[[], Aws], tools: Tools, *, credentials_arn: str = "") -> Iterator[Finding]:
    """Look at everything, in the order in which a deployment would meet it.

    The account is not asked for anything before the credentials are known to work. ``credentials_arn`` is the secret
    of the Globus client, if this deployment is going to be given one.
    """
    yield from _tools(tools)
    try:
        account = aws()
        caller = account.caller()
    except FarcallError as error:
        yield Finding("credentials", Outcome.FAILED, error.record.message, error.hint)
        return
    yield Finding("credentials", Outcome.FINE, f"{caller.arn}, account {caller.account}, {account.region}")
    looks: list[tuple[str, Callable[[], Finding]]] = [
        ("bootstrap", lambda: _bootstrap(account, caller.account)),
        ("Lambda concurrency", lambda: _concurrency(account)),
        ("Fargate vCPU", lambda: _fargate(account, profile)),
        ("VPCs", lambda: _vpcs(account)),
        ("service-linked roles", lambda: _roles(account, profile)),
    ]
    if profile.network.load_balancer:
        looks.append(("elastic addresses", lambda: _addresses(account)))
    if credentials_arn:
        looks.append(("Globus client", lambda: _globus(account, credentials_arn)))
    for what, look in looks:
        try:
            yield look()
        except FarcallError as error:  # a right that is missing for one question says nothing about the others
            yield Finding(what, Outcome.WARNING, f"cannot be looked at: {error.record.message}", error.hint)


def _tools(tools: Tools) -> Iterator[Finding]:
    yield _tool("Node", tools.node_version, MIN_NODE, is_fine=lambda version: version >= MIN_NODE)
    yield _tool("CDK command line", tools.cdk_version, _CDK_SERIES, is_fine=lambda version: version[:2] == _CDK_SERIES)


def _tool(what: str, ask: Callable[[], Version], wanted: Version, *, is_fine: Callable[[Version], bool]) -> Finding:
    try:
        version = ask()
    except FarcallError as error:
        return Finding(what, Outcome.FAILED, error.record.message, error.hint)
    if is_fine(version):
        return Finding(what, Outcome.FINE, _dotted(version))
    hint = "Leave FARCALL_CDK and JSII_NODE unset to use the right ones."
    return Finding(what, Outcome.FAILED, f"{_dotted(version)}; it has to be {_dotted(wanted)}", hint)


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _bootstrap(aws: Aws, account: str) -> Finding:
    version = aws.bootstrap_version()
    if version is not None and version >= _MIN_BOOTSTRAP:
        return Finding("bootstrap", Outcome.FINE, f"version {version}")
    message = "this region has none" if version is None else f"version {version} is older than {_MIN_BOOTSTRAP}"
    command = f"npx aws-cdk@{CDK_VERSION} bootstrap aws://{account}/{aws.region}"
    return Finding("bootstrap", Outcome.FAILED, message, f"Run once: {command}")


def _concurrency(aws: Aws) -> Finding:
    limit = aws.function_concurrency()
    if limit >= _MIN_CONCURRENCY:
        return Finding("Lambda concurrency", Outcome.FINE, f"{limit} at once")
    return Finding(
        "Lambda concurrency",
        Outcome.WARNING,
        f"{limit} at once, which is the limit of a new account: busy clients will be told to wait",
        "Ask for 1,000 in the console under Service Quotas, AWS Lambda, Concurrent executions; it takes a day or two.",
    )


def _fargate(aws: Aws, profile: Profile) -> Finding:
    size = profile.forwarder
    wanted = 2 * size.tasks * size.cpu_units / 1024  # during a release old and new tasks run side by side
    limit = aws.quota(*(_SPOT_VCPU if size.spot else _FARGATE_VCPU))
    if limit is None:
        return Finding("Fargate vCPU", Outcome.WARNING, "the region does not say how many are allowed")
    message = f"{limit:g} allowed, {wanted:g} needed"
    if limit >= wanted:
        return Finding("Fargate vCPU", Outcome.FINE, message)
    hint = (
        "Ask for more in the console under Service Quotas, AWS Fargate; or set -c forwarder.tasks and cpu_units lower."
    )
    return Finding("Fargate vCPU", Outcome.FAILED, message, hint)


def _vpcs(aws: Aws) -> Finding:
    limit, taken = aws.quota(*_VPCS), aws.count_vpcs()
    return _room(
        "VPCs", limit, taken, needed=1, hint="Ask for more under Service Quotas, Amazon VPC, or use another region."
    )


def _addresses(aws: Aws) -> Finding:
    limit, taken = aws.quota(*_ADDRESSES), aws.count_addresses()
    return _room("elastic addresses", limit, taken, needed=2, hint="Ask for more under Service Quotas, Amazon EC2.")


def _room(what: str, limit: float | None, taken: int, *, needed: int, hint: str) -> Finding:
    if limit is None:
        return Finding(what, Outcome.WARNING, f"{taken} are taken, the region does not say of how many")
    message = f"{taken} of {limit:g} are taken"
    if taken + needed <= limit:
        return Finding(what, Outcome.FINE, message)
    # Not certain to fail: an update of a deployment needs none.
    return Finding(what, Outcome.WARNING, f"{message}; a new deployment needs {needed}", hint)


def _roles(aws: Aws, profile: Profile) -> Finding:
    wanted = _SERVICE_ROLES | (_BALANCER_ROLE if profile.network.load_balancer else {})
    missing = [service for role, service in wanted.items() if not aws.has_role(role)]
    if not missing:
        return Finding("service-linked roles", Outcome.FINE, "all there")
    commands = "; ".join(f"aws iam create-service-linked-role --aws-service-name {service}" for service in missing)
    return Finding(
        "service-linked roles", Outcome.WARNING, f"missing for {', '.join(missing)}", f"Run once: {commands}"
    )


def _globus(aws: Aws, arn: str) -> Finding:
    if aws.has_secret(arn):
        return Finding("Globus client", Outcome.FINE, "its secret exists")
    hint = 'Make it: aws secretsmanager create-secret --name farcall-globus --secret-string \'{"client_secret": "…"}\''
    return Finding("Globus client", Outcome.FAILED, f"there is no secret {arn}", hint)
