"""Pre-deployment checks: find problems that would make a deployment fail."""

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
from farcall_infra.bundles import ARM64
from farcall_infra.ca_bundle import CA_BUNDLE_FILE, FETCH_CA_BUNDLE, CaBundle, is_https_url
from farcall_infra.cloud.aws import UNRESERVABLE, Aws
from farcall_infra.cloud.tools import CDK_VERSION, MIN_NODE, Tools
from farcall_infra.profiles import IdentitySource, Profile
from farcall_infra.regions import BUDGET_REGIONS, BUDGET_TYPE

#: The version of the bootstrap stack that the templates and the CDK's command line need.
_MIN_BOOTSTRAP: Final = 6
_MIN_CONCURRENCY: Final = 50
_CDK_SERIES: Final = tuple(map(int, CDK_VERSION.split(".")[:2]))

_TIMEOUT_S: Final = 10.0

Version = tuple[int, ...]

# Service Quotas' names of the checked limits.
_FARGATE_VCPU: Final = ("fargate", "L-3032A538")
_SPOT_VCPU: Final = ("fargate", "L-36FBB829")
_VPCS: Final = ("vpc", "L-F678F1CE")
_ADDRESSES: Final = ("ec2", "L-0263D0A3")

#: Service-linked roles. A service creates its role when it is first used in the console, but not when CloudFormation is
#: its first user.
SERVICE_ROLES: Final = {
    "AWSServiceRoleForECS": "ecs.amazonaws.com",
    "AWSServiceRoleForElastiCache": "elasticache.amazonaws.com",
    "AWSServiceRoleForElasticLoadBalancing": "elasticloadbalancing.amazonaws.com",
    "AWSServiceRoleForRDS": "rds.amazonaws.com",
}
_SECRET_ARN: Final = re.compile(r"arn:aws[a-z-]*:secretsmanager:(?P<region>[a-z0-9-]+):(?P<account>\d{12}):secret:\S+")


class Outcome(enum.StrEnum):
    """The severity of a finding."""

    FINE = "fine"
    WARNING = "warning"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check, with a hint for the user."""

    what: str
    outcome: Outcome
    message: str
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class GlobusClient:
    """The client of Globus Auth that validates tokens. Empty values keep the deployed ones."""

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


def run_checks(
    profile: Profile,
    aws: Callable[[], Aws],
    tools: Tools,
    *,
    ca_bundle: CaBundle | FarcallError | None,
    globus: GlobusClient = GlobusClient(),
    fetch: Callable[[str], bytes] = _fetch,
) -> Iterator[Finding]:
    """Run all checks, in the order in which a deployment needs their results.

    The credentials are checked before anything else in the account. ``ca_bundle`` verifies the database's certificate,
    or is the error of its download; ``globus`` is the Globus client given for this deployment, if any; ``fetch`` reads
    a page of the identity provider.
    """
    yield from _tools(tools)
    yield _byte_code(tools)
    yield _emails(profile)
    yield _certificate(profile, ca_bundle)
    if profile.identity.oidc_issuer:
        yield _issuer(profile.identity.oidc_issuer, fetch)
    yield _users(profile.identity)
    try:
        account = aws()
        caller = account.caller()
    except FarcallError as error:
        yield Finding("credentials", Outcome.FAILED, error.record.message, error.hint)
        return
    yield Finding("credentials", Outcome.FINE, f"{caller.arn}, account {caller.account}, {account.region}")
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("bootstrap", lambda: _bootstrap(account, caller.account)),
        ("Lambda concurrency", lambda: _concurrency(account, profile)),
        ("Fargate vCPU", lambda: _fargate(account, profile)),
        ("VPCs", lambda: _vpcs(account)),
        ("service-linked roles", lambda: _roles(account, profile)),
        ("database size", lambda: _database_size(account, profile)),
        ("queue size", lambda: _queue_size(account, profile)),
    ]
    if profile.network.zones or profile.analytics.express_zone:
        checks.append(("availability zones", lambda: _zones(account, profile)))
    if profile.budget.monthly_usd:
        checks.append(("budget", lambda: _budget(account, profile)))
    if profile.network.load_balancer:
        checks.append(("elastic addresses", lambda: _addresses(account)))
    if globus != GlobusClient() and not profile.identity.oidc_issuer:
        checks.append(("Globus client", lambda: _globus(account, caller.account, globus)))
    for what, check in checks:
        try:
            yield check()
        except FarcallError as error:  # a permission that is missing for one check may not be missing for the others
            yield Finding(what, Outcome.WARNING, f"cannot be checked: {error.record.message}", error.hint)


def _tools(tools: Tools) -> Iterator[Finding]:
    yield _tool("Node", tools.node_version, MIN_NODE, is_fine=lambda version: version >= MIN_NODE)
    yield _tool("CDK command line", tools.cdk_version, _CDK_SERIES, is_fine=lambda version: version[:2] == _CDK_SERIES)


def _byte_code(tools: Tools) -> Finding:
    what, version = "byte code", ARM64.python_version
    if tools.has_python(version):
        return Finding(what, Outcome.FINE, f"compiled by Python {version}")
    if tools.fetches_python:
        return Finding(what, Outcome.FINE, f"compiled by Python {version}, which uv downloads")
    hint = f"Run `uv python install {version}`, or unset UV_PYTHON_DOWNLOADS."
    return Finding(what, Outcome.WARNING, f"none without Python {version}: programs take twice as long to start", hint)


def _emails(profile: Profile) -> Finding:
    if emails := profile.budget.emails:
        return Finding("e-mail", Outcome.FINE, f"alarms and the budget notify {', '.join(emails)}")
    hint = 'Add one to the file of your profiles (emails = ["you@example.org"]), or pass -c budget.emails=… each time.'
    return Finding("e-mail", Outcome.WARNING, "no e-mail address is set for alarms and the budget", hint)


def _certificate(profile: Profile, ca_bundle: CaBundle | FarcallError | None) -> Finding:
    what, setting = "database certificate", profile.database.authorities
    if isinstance(ca_bundle, FarcallError):
        return Finding(what, Outcome.FAILED, ca_bundle.record.message, ca_bundle.hint)
    if ca_bundle is None:
        hint = (
            "Keep database.authorities of the default profiles, or name a file. Download that of RDS with"
            f" `{FETCH_CA_BUNDLE}`."
        )
        return Finding(what, Outcome.WARNING, "not verified: connections to the database are only encrypted", hint)
    source = setting if is_https_url(setting) else ca_bundle.path
    checked = f"signed by one of {ca_bundle.valid} in {source}, until {ca_bundle.expires_at:%Y-%m-%d}"
    if profile.forwarder.code == "image":
        hint = f"Bundles contain the file. Your image must have it next to the code, as {CA_BUNDLE_FILE}."
        return Finding(what, Outcome.WARNING, f"{checked}, if the forwarder's image contains the file", hint)
    return Finding(what, Outcome.FINE, checked)


def _issuer(issuer: str, fetch: Callable[[str], bytes]) -> Finding:
    what, url = "identity provider", f"{issuer.rstrip('/')}/.well-known/openid-configuration"
    try:
        reported = json.loads(fetch(url))["issuer"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        # The function that calls the provider runs in AWS, and may reach it although this machine does not.
        hint = (
            "Check identity.oidc_issuer. The deployment calls it over the internet, so it must be reachable from there."
        )
        return Finding(what, Outcome.WARNING, f"{url} cannot be read: {getattr(error, 'reason', error)}", hint)
    if reported == issuer:
        return Finding(what, Outcome.FINE, issuer)
    message = f"{issuer} names itself {reported}, also in its tokens, so the API would refuse them"
    return Finding(what, Outcome.FAILED, message, f"Set identity.oidc_issuer to exactly {reported}.")


def _users(identity: IdentitySource) -> Finding:
    what, provider = "users", identity.oidc_issuer or "Globus"
    if identity.allows_no_one:
        hint = (
            "Name them in the identity section of your profile: allowed_identities, allowed_domains, allowed_groups or"
            " admins; docs/deploy.md says how."
        )
        return Finding(what, Outcome.WARNING, "no one may use this deployment", hint)
    if identity.allows_everyone:
        hint = "They can use public endpoints and store data at your cost. Name users, domains or groups instead of *."
        return Finding(what, Outcome.WARNING, f"everyone who can log in at {provider} may use this deployment", hint)
    kinds = {
        "users": identity.allowed_identities,
        "domains": identity.allowed_domains,
        "groups": identity.allowed_groups,
        "administrators": identity.admins,
    }
    named = "; ".join(f"{kind} {', '.join(values)}" for kind, values in kinds.items() if values)
    return Finding(what, Outcome.FINE, named)


def _tool(what: str, call: Callable[[], Version], wanted: Version, *, is_fine: Callable[[Version], bool]) -> Finding:
    try:
        version = call()
    except FarcallError as error:
        return Finding(what, Outcome.FAILED, error.record.message, error.hint)
    if is_fine(version):
        return Finding(what, Outcome.FINE, _dotted(version))
    hint = "Unset FARCALL_CDK and JSII_NODE to use the right versions."
    return Finding(what, Outcome.FAILED, f"{_dotted(version)}; required: {_dotted(wanted)}", hint)


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))


def _bootstrap(aws: Aws, account: str) -> Finding:
    version = aws.bootstrap_version()
    if version is not None and version >= _MIN_BOOTSTRAP:
        return Finding("bootstrap", Outcome.FINE, f"version {version}")
    message = "none in this region" if version is None else f"version {version} is older than {_MIN_BOOTSTRAP}"
    hint = f"Run once: `farcall cloud bootstrap --region {aws.region}`"
    return Finding("bootstrap", Outcome.FAILED, f"{message} (account {account})", hint)


def _concurrency(aws: Aws, profile: Profile) -> Finding:
    what, limit = "Lambda concurrency", aws.function_concurrency()
    hint = (
        "Request 1,000 in the console under Service Quotas, AWS Lambda, Concurrent executions; it takes a day or two."
    )
    if limit < _MIN_CONCURRENCY:
        message = f"{limit} at once, the limit of a new account: the API will throttle busy clients"
        return Finding(what, Outcome.WARNING, message, hint)
    wanted = profile.api.reserved_concurrency
    if wanted and limit < wanted + UNRESERVABLE:
        message = f"{limit} at once: too few to reserve any for the API, so its functions have no limit of their own"
        return Finding(what, Outcome.WARNING, message, hint)
    return Finding(what, Outcome.FINE, f"{limit} at once")


def _fargate(aws: Aws, profile: Profile) -> Finding:
    size = profile.forwarder
    wanted = 2 * size.tasks * size.cpu_units / 1024  # during a release old and new tasks run at the same time
    limit = aws.quota(*(_SPOT_VCPU if size.spot else _FARGATE_VCPU))
    if limit is None:
        return Finding("Fargate vCPU", Outcome.WARNING, "the region does not report its limit")
    message = f"{limit:g} allowed, {wanted:g} needed"
    if limit >= wanted:
        return Finding("Fargate vCPU", Outcome.FINE, message)
    hint = "Request more in the console under Service Quotas, AWS Fargate; or lower -c forwarder.tasks and cpu_units."
    return Finding("Fargate vCPU", Outcome.FAILED, message, hint)


def _vpcs(aws: Aws) -> Finding:
    limit, taken = aws.quota(*_VPCS), aws.count_vpcs()
    return _room(
        "VPCs", limit, taken, needed=1, hint="Request more under Service Quotas, Amazon VPC, or use another region."
    )


def _addresses(aws: Aws) -> Finding:
    limit, taken = aws.quota(*_ADDRESSES), aws.count_addresses()
    return _room("elastic addresses", limit, taken, needed=2, hint="Request more under Service Quotas, Amazon EC2.")


def _room(what: str, limit: float | None, taken: int, *, needed: int, hint: str) -> Finding:
    if limit is None:
        return Finding(what, Outcome.WARNING, f"{taken} in use; the region does not report its limit")
    message = f"{taken} of {limit:g} in use"
    if taken + needed <= limit:
        return Finding(what, Outcome.FINE, message)
    # A warning only: an update of a deployment needs none.
    return Finding(what, Outcome.WARNING, f"{message}; a new deployment needs {needed}", hint)


def _roles(aws: Aws, profile: Profile) -> Finding:
    needed = [role for role in SERVICE_ROLES if profile.network.load_balancer or "LoadBalancing" not in role]
    missing = [SERVICE_ROLES[role] for role in needed if not aws.has_role(role)]
    if not missing:
        return Finding("service-linked roles", Outcome.FINE, "all exist")
    hint = f"Run once: `farcall cloud bootstrap --region {aws.region}`"
    # ECS creates its role with the first cluster, and fails if CloudFormation continues before the role exists.
    return Finding("service-linked roles", Outcome.FAILED, f"missing for {', '.join(missing)}", hint)


def _database_size(aws: Aws, profile: Profile) -> Finding:
    what, size = "database size", profile.database
    instance_class = f"db.{size.instance_type}"
    versions = aws.postgres_versions(instance_class, multi_az=size.multi_az)
    wanted = f"PostgreSQL {size.version} on {instance_class}{' with a standby' if size.multi_az else ''}"
    if any(version.split(".")[0] == size.version for version in versions):
        return Finding(what, Outcome.FINE, wanted)
    offered = f"only the versions {', '.join(versions)}" if versions else "no version of PostgreSQL"
    hint = "Choose another size (-c database.instance_type=m6g.large), or another region."
    return Finding(what, Outcome.FAILED, f"{aws.region} does not offer {wanted}: {offered} on this size", hint)


def _queue_size(aws: Aws, profile: Profile) -> Finding:
    what, node_type = "queue size", profile.queue.node_type
    if aws.has_cache_node(node_type):
        return Finding(what, Outcome.FINE, f"Valkey on {node_type}")
    hint = (
        "Look at the node types of ElastiCache's console; choose another one with -c queue.node_type=… if it is absent."
    )
    # A warning only: a node type that cannot be reserved may be offered on demand.
    return Finding(what, Outcome.WARNING, f"{aws.region} offers no reservation of {node_type}, so it may lack it", hint)


def _zones(aws: Aws, profile: Profile) -> Finding:
    what, zones = "availability zones", aws.zones()
    express = profile.analytics.express_zone
    unknown = [zone for zone in profile.network.zones if zone not in zones]
    unknown += [express] if express and express not in zones.values() else []
    if not unknown:
        return Finding(what, Outcome.FINE, ", ".join([*profile.network.zones, express]).strip(", "))
    offered = ", ".join(f"{name} ({zone_id})" for name, zone_id in sorted(zones.items()))
    hint = f"Correct network.zones (names) and analytics.express_zone (an id). {aws.region} has {offered}."
    return Finding(what, Outcome.FAILED, f"{aws.region} has no zone {', '.join(unknown)}", hint)


def _budget(aws: Aws, profile: Profile) -> Finding:
    what = "budget"
    if aws.region not in BUDGET_REGIONS:
        hint = "Create one for the account in the billing console; it also covers this region."
        return Finding(what, Outcome.WARNING, f"none: CloudFormation has no {BUDGET_TYPE} in {aws.region}", hint)
    if aws.has_type(BUDGET_TYPE):
        return Finding(what, Outcome.FINE, f"{profile.budget.monthly_usd:g} US dollars a month")
    message = f"CloudFormation has no {BUDGET_TYPE} in {aws.region}"
    return Finding(what, Outcome.FAILED, message, "Deploy with -c budget.monthly_usd=0.")


def _globus(aws: Aws, account: str, client: GlobusClient) -> Finding:
    what = "Globus client"
    if client.client_id and not _is_uuid(client.client_id):
        hint = "It is a UUID, shown by app.globus.org/settings/developers."
        return Finding(what, Outcome.FAILED, f"{client.client_id!r} is not a client id", hint)
    expected = f"https://auth.globus.org/scopes/{client.client_id}/"
    if client.client_id and client.scope and not client.scope.startswith(expected):
        hint = f"It must begin with {expected}; docs/deploy.md says how to create it."
        return Finding(what, Outcome.FAILED, f"{client.scope} is not a scope of this client", hint)
    if not (arn := client.credentials_arn):
        return Finding(what, Outcome.FINE, "keeps the deployed secret")
    found = _SECRET_ARN.fullmatch(arn)
    if found is None:
        hint = "It looks like arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME; create-secret prints it."
        return Finding(what, Outcome.FAILED, f"{arn!r} is not the ARN of a secret", hint)
    make = (
        "Create it there: `aws secretsmanager create-secret --name farcall-globus --secret-string"
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
