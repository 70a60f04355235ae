"""Everything that would make a deployment fail, looked at before one begins."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Final

from farcall_common.errors import FarcallError
from farcall_infra.authorities import AUTHORITIES_FILE, FETCH_AUTHORITIES, Authorities, is_address
from farcall_infra.bundles import ARM64
from farcall_infra.cloud.aws import UNRESERVABLE, Aws
from farcall_infra.cloud.tools import CDK_VERSION, MIN_NODE, Tools
from farcall_infra.deployment import RECONCILER_CONCURRENCY
from farcall_infra.profiles import Profile

__all__ = ["SERVICE_ROLES", "Finding", "GlobusClient", "Outcome", "examine"]

#: What the templates ask of the bootstrap stack, and what the CDK's command line needs to upload their bundles.
_MIN_BOOTSTRAP: Final = 6
_MIN_CONCURRENCY: Final = 50
_CDK_SERIES: Final = tuple(map(int, CDK_VERSION.split(".")[:2]))

_TIMEOUT_S: Final = 10.0

Version = tuple[int, ...]

# Service Quotas' names for the limits that we come near.
_FARGATE_VCPU: Final = ("fargate", "L-3032A538")
_SPOT_VCPU: Final = ("fargate", "L-36FBB829")
_VPCS: Final = ("vpc", "L-F678F1CE")
_ADDRESSES: Final = ("ec2", "L-0263D0A3")

#: The roles that services act with. A service makes its own when it is first used in the console, and not when
#: CloudFormation is the first to use it.
SERVICE_ROLES: Final = {
    "AWSServiceRoleForECS": "ecs.amazonaws.com",
    "AWSServiceRoleForElastiCache": "elasticache.amazonaws.com",
    "AWSServiceRoleForElasticLoadBalancing": "elasticloadbalancing.amazonaws.com",
    "AWSServiceRoleForRDS": "rds.amazonaws.com",
}
_SECRET_ARN: Final = re.compile(r"arn:aws[a-z-]*:secretsmanager:(?P<region>[a-z0-9-]+):(?P<account>\d{12}):secret:\S+")


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


@dataclasses.dataclass(frozen=True)
class GlobusClient:
    """The client that asks Globus Auth who somebody is; what is empty stays as it was deployed."""

    client_id: str = ""
    scope: str = ""
    credentials_arn: str = ""

    def parameters(self) -> dict[str, str]:
        """The same as parameters of the API's stack."""
        return {
            "GlobusClientId": self.client_id,
            "GlobusScope": self.scope,
            "GlobusCredentialsArn": self.credentials_arn,
        }


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - the profile admits https only
        body: bytes = answer.read()
    return body


def examine(
    profile: Profile,
    aws: Callable[[], Aws],
    tools: Tools,
    *,
    authorities: Authorities | FarcallError | None,
    globus: GlobusClient = GlobusClient(),
    fetch: Callable[[str], bytes] = _fetch,
) -> Iterator[Finding]:
    """Look at everything, in the order in which a deployment would meet it.

    The account is not asked for anything before the credentials are known to work. ``authorities`` are those that the
    database's certificate is checked against, or why they could not be fetched; ``globus`` is the Globus client, as far
    as this deployment is going to be given one; ``fetch`` reads a page of the identity provider.
    """
    yield from _tools(tools)
    yield _byte_code(tools)
    yield _emails(profile)
    yield _certificate(profile, authorities)
    if profile.identity.oidc_issuer:
        yield _issuer(profile.identity.oidc_issuer, fetch)
    try:
        account = aws()
        caller = account.caller()
    except FarcallError as error:
        yield Finding("credentials", Outcome.FAILED, error.record.message, error.hint)
        return
    yield Finding("credentials", Outcome.FINE, f"{caller.arn}, account {caller.account}, {account.region}")
    looks: list[tuple[str, Callable[[], Finding]]] = [
        ("bootstrap", lambda: _bootstrap(account, caller.account)),
        ("Lambda concurrency", lambda: _concurrency(account, profile)),
        ("Fargate vCPU", lambda: _fargate(account, profile)),
        ("VPCs", lambda: _vpcs(account)),
        ("service-linked roles", lambda: _roles(account, profile)),
    ]
    if profile.network.load_balancer:
        looks.append(("elastic addresses", lambda: _addresses(account)))
    if globus != GlobusClient() and not profile.identity.oidc_issuer:
        looks.append(("Globus client", lambda: _globus(account, caller.account, globus)))
    for what, look in looks:
        try:
            yield look()
        except FarcallError as error:  # a right that is missing for one question says nothing about the others
            yield Finding(what, Outcome.WARNING, f"cannot be looked at: {error.record.message}", error.hint)


def _tools(tools: Tools) -> Iterator[Finding]:
    yield _tool("Node", tools.node_version, MIN_NODE, is_fine=lambda version: version >= MIN_NODE)
    yield _tool("CDK command line", tools.cdk_version, _CDK_SERIES, is_fine=lambda version: version[:2] == _CDK_SERIES)


def _byte_code(tools: Tools) -> Finding:
    what, version = "byte code", ARM64.python_version
    if tools.has_python(version):
        return Finding(what, Outcome.FINE, f"compiled by Python {version}")
    if tools.fetches_python:
        return Finding(what, Outcome.FINE, f"compiled by Python {version}, which uv fetches")
    hint = f"Run `uv python install {version}`, or unset UV_PYTHON_DOWNLOADS."
    return Finding(what, Outcome.WARNING, f"none without Python {version}: programs start in twice the time", hint)


def _emails(profile: Profile) -> Finding:
    if emails := profile.budget.emails:
        return Finding("e-mail", Outcome.FINE, f"alarms and the budget tell {', '.join(emails)}")
    hint = 'Put it into the file of your profiles (emails = ["you@example.org"]), or pass -c budget.emails=… each time.'
    return Finding("e-mail", Outcome.WARNING, "nobody is told of alarms and of what AWS charges", hint)


def _certificate(profile: Profile, authorities: Authorities | FarcallError | None) -> Finding:
    what, setting = "database certificate", profile.database.authorities
    if isinstance(authorities, FarcallError):
        return Finding(what, Outcome.FAILED, authorities.record.message, authorities.hint)
    if authorities is None:
        hint = (
            "Leave database.authorities as it is in infra/profiles.toml, or name a file: that of RDS comes with"
            f" `{FETCH_AUTHORITIES}`."
        )
        return Finding(what, Outcome.WARNING, "not verified: connections to the database are encrypted, no more", hint)
    source = setting if is_address(setting) else authorities.path
    checked = f"signed by one of {authorities.valid} in {source}, until {authorities.expires_at:%Y-%m-%d}"
    if profile.forwarder.code == "image":
        hint = f"Bundles have them. Your image has to have the file beside the code, as {AUTHORITIES_FILE}."
        return Finding(what, Outcome.WARNING, f"{checked}, if the forwarder's image has them", hint)
    return Finding(what, Outcome.FINE, checked)


def _issuer(issuer: str, fetch: Callable[[str], bytes]) -> Finding:
    what, url = "identity provider", f"{issuer.rstrip('/')}/.well-known/openid-configuration"
    try:
        said = json.loads(fetch(url))["issuer"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        # The function that asks it is elsewhere, and may get through where we do not.
        hint = "Check identity.oidc_issuer. The deployment asks over the internet, so it must be reachable from there."
        return Finding(what, Outcome.WARNING, f"{url} cannot be read: {getattr(error, 'reason', error)}", hint)
    if said == issuer:
        return Finding(what, Outcome.FINE, issuer)
    message = f"{issuer} calls itself {said}, as its tokens will, and none of them would be taken"
    return Finding(what, Outcome.FAILED, message, f"Set identity.oidc_issuer to {said}, to the letter.")


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
    hint = f"Run once: `farcall cloud bootstrap --region {aws.region}`"
    return Finding("bootstrap", Outcome.FAILED, f"{message} (account {account})", hint)


def _concurrency(aws: Aws, profile: Profile) -> Finding:
    what, limit = "Lambda concurrency", aws.function_concurrency()
    hint = (
        "Ask for 1,000 in the console under Service Quotas, AWS Lambda, Concurrent executions; it takes a day or two."
    )
    if limit < _MIN_CONCURRENCY:
        message = f"{limit} at once, which is the limit of a new account: busy clients will be told to wait"
        return Finding(what, Outcome.WARNING, message, hint)
    wanted = profile.api.concurrency + RECONCILER_CONCURRENCY
    if profile.api.concurrency and limit < wanted + UNRESERVABLE:
        message = f"{limit} at once: none of them is reserved for the API, whose functions are not limited then"
        return Finding(what, Outcome.WARNING, message, hint)
    return Finding(what, Outcome.FINE, f"{limit} at once")


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
    needed = [role for role in SERVICE_ROLES if profile.network.load_balancer or "LoadBalancing" not in role]
    missing = [SERVICE_ROLES[role] for role in needed if not aws.has_role(role)]
    if not missing:
        return Finding("service-linked roles", Outcome.FINE, "all there")
    hint = f"Run once: `farcall cloud bootstrap --region {aws.region}`"
    # ECS makes its role when it is first asked for a cluster, and fails if CloudFormation goes on before that is done.
    return Finding("service-linked roles", Outcome.FAILED, f"missing for {', '.join(missing)}", hint)


def _globus(aws: Aws, account: str, client: GlobusClient) -> Finding:
    what = "Globus client"
    if client.client_id and not _is_uuid(client.client_id):
        hint = "It is a UUID, shown by app.globus.org/settings/developers."
        return Finding(what, Outcome.FAILED, f"{client.client_id!r} is no client id", hint)
    expected = f"https://auth.globus.org/scopes/{client.client_id}/"
    if client.client_id and client.scope and not client.scope.startswith(expected):
        hint = f"It has to begin with {expected}; docs/deploy.md says how to make it."
        return Finding(what, Outcome.FAILED, f"{client.scope} is no scope of this client", hint)
    if not (arn := client.credentials_arn):
        return Finding(what, Outcome.FINE, "its secret stays the one that is deployed")
    found = _SECRET_ARN.fullmatch(arn)
    if found is None:
        hint = "It looks like arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME; create-secret prints it."
        return Finding(what, Outcome.FAILED, f"{arn!r} is no ARN of a secret", hint)
    make = (
        "Make it there: `aws secretsmanager create-secret --name farcall-globus --secret-string"
        f' \'{{"client_secret": "…"}}\' --region {aws.region}`'
    )
    if (found["account"], found["region"]) != (account, aws.region):
        where = f"in account {found['account']}, {found['region']}"
        return Finding(what, Outcome.FAILED, f"its secret is {where}, not in {account}, {aws.region}", make)
    if aws.secret_arn(arn):
        return Finding(what, Outcome.FINE, "its secret exists")
    return Finding(what, Outcome.FAILED, f"there is no secret {arn}", make)


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True
