"""``farcall cloud``: the cloud tier in your own AWS account, from the look before the first deployment to the last."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from farcall_common.errors import ConfigurationError, FarcallError
from farcall_common.interruption import Terminated
from farcall_infra.authorities import Authorities, fetch_authorities
from farcall_infra.bundles import WORKSPACE
from farcall_infra.cloud import aws as account
from farcall_infra.cloud.account import Stack
from farcall_infra.cloud.aws import Aws
from farcall_infra.cloud.doctor import SERVICE_ROLES, Finding, GlobusClient, Outcome, examine
from farcall_infra.cloud.errors import DeploymentFailed, DeploymentInterrupted, DeploymentUnknown, NotReady
from farcall_infra.cloud.lifecycle import (
    SECRET_PARAMETER,
    clear,
    destroy,
    find_stacks,
    is_stillborn,
    made,
    require_changeable,
)
from farcall_infra.cloud.settings import changes, deployed_settings, require_possible
from farcall_infra.cloud.show import show_changes, show_cost, show_finding, show_remains, show_status, tell
from farcall_infra.cloud.status import knock, look
from farcall_infra.cloud.synth import synthesized_templates
from farcall_infra.cloud.tools import Tools
from farcall_infra.cost import idle_bill, price_per_million_tasks
from farcall_infra.deployment import Deployment, deployment_from_context, stack_name
from farcall_infra.prices import load_prices

__all__ = ["app"]

app = typer.Typer(name="cloud", help="The cloud tier in your own AWS account.", no_args_is_help=True)

_NOT_WELL = 3
_TIDY_S = 10.0
_GO_ON = "Run it again when `farcall cloud status` shows nothing that is IN_PROGRESS."

NameOption = Annotated[str, typer.Option("--name", help="The deployment; several fit into one account.")]
ProfileOption = Annotated[str, typer.Option("--profile", help="hobby, lab or facility.")]
ContextOption = Annotated[
    list[str] | None,
    typer.Option("--context", "-c", metavar="KEY=VALUE", help="Another value for a setting: database.storage_gib=50."),
]
RegionOption = Annotated[str | None, typer.Option("--region", help="The AWS region, if not the configured one.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON for programs.")]
GlobusIdOption = Annotated[
    str, typer.Option("--globus-client-id", envvar="FARCALL_GLOBUS_CLIENT_ID", help="Client of Globus Auth.")
]
GlobusScopeOption = Annotated[
    str, typer.Option("--globus-scope", envvar="FARCALL_GLOBUS_SCOPE", help="Scope of the client.")
]
GlobusSecretOption = Annotated[
    str,
    typer.Option("--globus-credentials-arn", envvar="FARCALL_GLOBUS_CREDENTIALS_ARN", help="Secret of the client."),
]


@app.command()
def doctor(
    ctx: typer.Context,
    name: NameOption = "farcall",
    profile: ProfileOption = "lab",
    context: ContextOption = None,
    region: RegionOption = None,
    globus_client_id: GlobusIdOption = "",
    globus_scope: GlobusScopeOption = "",
    globus_credentials_arn: GlobusSecretOption = "",
    as_json: JsonOption = False,
) -> None:
    """Look whether a deployment would work: programs, credentials, bootstrap, quotas. Changes nothing. Exits with 1 if
    it would not."""
    deployment, _ = _deployment(name, profile, context)
    globus = GlobusClient(globus_client_id, globus_scope, globus_credentials_arn)
    findings = _examine(deployment, _authorities(ctx, deployment), region, globus, quiet=as_json)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    if any(finding.outcome is Outcome.FAILED for finding in findings):
        raise typer.Exit(1)


@app.command()
def cost(
    name: NameOption = "farcall",
    profile: ProfileOption = "lab",
    context: ContextOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a profile costs: a month of doing nothing, item by item, and a million tasks. Needs no account."""
    deployment, arguments = _deployment(name, profile, context)
    templates, prices = synthesized_templates(arguments), load_prices()
    bill = idle_bill(templates, prices)
    tasks = {
        "one at a time": price_per_million_tasks(templates, prices, batch=1),
        "in batches of 100": price_per_million_tasks(templates, prices, batch=100),
        "in batches of 100, arguments and results as blobs": price_per_million_tasks(
            templates, prices, batch=100, blobs=True
        ),
    }
    if as_json:
        items = [dataclasses.asdict(item) for item in bill.items]
        typer.echo(
            json.dumps({"idle_usd": round(bill.usd, 2), "items": items, "usd_per_million_tasks": tasks}, indent=2)
        )
    else:
        show_cost(deployment, bill, tasks, prices)


@app.command()
def bootstrap(region: RegionOption = None) -> None:
    """Prepare the account, once in each region: the CDK's bootstrap stack, and the roles that services act with."""
    aws = account.connect(region)
    number = aws.caller().account
    for role, service in SERVICE_ROLES.items():
        if not aws.has_role(role):
            aws.make_service_role(service)
            tell(f"made the role of {service}")
    with tempfile.TemporaryDirectory(prefix="farcall-bootstrap-") as nowhere:  # with an app at hand it would be asked
        status = _run_cdk(["bootstrap", f"aws://{number}/{aws.region}"], aws.region, directory=Path(nowhere))
    if status != 0:
        raise DeploymentFailed(
            f"account {number} is not bootstrapped in {aws.region}",
            hint="The reason is above. Mend it and run it again.",
        )


@app.command()
def deploy(
    ctx: typer.Context,
    name: NameOption = "farcall",
    profile: Annotated[
        str, typer.Option("--profile", help="hobby, lab or facility; if not given, the deployed one, or else lab.")
    ] = "",
    context: ContextOption = None,
    region: RegionOption = None,
    globus_client_id: GlobusIdOption = "",
    globus_scope: GlobusScopeOption = "",
    globus_credentials_arn: GlobusSecretOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Make a deployment, or bring it up to date. The Globus client, if users come from Globus, is asked for once."""
    if not profile:
        data = account.connect(region).stack(stack_name(name, "data"))
        profile = data.outputs.get("Profile", "lab") if data else "lab"
    deployment, arguments = _deployment(name, profile, context)
    globus = GlobusClient(globus_client_id, globus_scope, globus_credentials_arn)
    authorities = _authorities(ctx, deployment)
    findings = _examine(deployment, authorities, region, globus, quiet=False)
    if isinstance(authorities, FarcallError) or any(finding.outcome is Outcome.FAILED for finding in findings):
        raise NotReady("a deployment would fail", hint="Fix what is marked as failed above.")
    aws = account.connect(region)
    stacks = _stacks(aws, name)
    require_changeable(stacks.values(), region=aws.region)
    deployment = dataclasses.replace(deployment, authorities=authorities)
    if authorities:
        arguments["database.authorities"] = str(authorities.path)
    arguments["reservable_concurrency"] = str(_reservable_concurrency(aws, stacks.get("api")))
    changed = changes(deployed_settings(stacks.get("data")), deployment)
    show_changes(changed, profile)
    instances = made(aws, stacks.get("data"), "AWS::RDS::DBInstance")
    database = aws.database(instances[0]) if instances else None
    require_possible(changed, database=database, wanted=deployment.profile.database)
    parameters = globus.parameters()
    if deployment.profile.identity.oidc_issuer:
        parameters = {}  # The profile says it all.
    else:
        _require_known(parameters, stacks.get("api"))
        _complete_secret(aws, parameters, stacks.get("api"))
    bill = idle_bill(synthesized_templates(arguments), load_prices())
    tell(f"Deployment {name!r}, profile {profile}, {aws.region}: about ${bill.usd:.0f} a month while idle.")
    if not yes:
        typer.confirm("Go on?", abort=True)
    with _interruptible(_GO_ON):
        clear(aws, stacks, tell=tell)
    if _run_cdk(cdk_arguments(arguments, name, parameters), aws.region) != 0:
        raise _failure(aws, name)
    show_status(name, look(aws, name, now=dt.datetime.now(dt.UTC), knock=knock))


@app.command()
def status(name: NameOption = "farcall", region: RegionOption = None, as_json: JsonOption = False) -> None:
    """Show how a deployment is. Exits with 3 if it is not well."""
    found = look(account.connect(region), name, now=dt.datetime.now(dt.UTC), knock=knock)
    if as_json:
        verdict = {
            "is_well": found.is_well,
            "troubles": found.troubles,
            "is_asleep": found.is_asleep,
            "is_current": found.is_current,
            "releases": found.releases,
        }
        typer.echo(json.dumps(verdict | _plain(dataclasses.asdict(found)), indent=2))
    else:
        show_status(name, found)
    if not found.is_well:
        raise typer.Exit(_NOT_WELL)


@app.command(name="destroy")
def destroy_command(
    name: NameOption = "farcall",
    region: RegionOption = None,
    yes: Annotated[str, typer.Option("--yes", metavar="NAME", help="Its name once more, instead of asking.")] = "",
) -> None:
    """Delete a deployment. A final snapshot of the database and the bucket stay; what they cost is shown."""
    aws = account.connect(region)
    stacks = find_stacks(aws, name)
    tell(f"This deletes {', '.join(stack.name for stack in stacks.values())} in {aws.region}.")
    tell("Endpoints lose their connection, and tasks that have not ended stay in the snapshot only.")
    if (yes or typer.prompt("Type its name to go on")) != name:
        raise ConfigurationError(f"that is not {name!r}; nothing was deleted", hint="Type it, or pass --yes NAME.")
    with _interruptible("Run it again: it goes on from there, and tells what is left."):
        remains = destroy(aws, name, tell=tell)
    show_remains(remains, load_prices())


def cdk_arguments(context: Mapping[str, str], name: str, parameters: Mapping[str, str]) -> list[str]:
    """What the CDK's command line is called with. A parameter without a value keeps the one that it has."""
    given = [f"{stack_name(name, 'api')}:{key}={value}" for key, value in parameters.items() if value]
    return [
        "deploy",
        "--all",
        "--require-approval",
        "never",
        "--app",
        shlex.join([sys.executable, "-m", "farcall_infra"]),
        *(part for key, value in context.items() for part in ("--context", f"{key}={value}")),
        *(part for parameter in given for part in ("--parameters", parameter)),
    ]


def _run_cdk(arguments: list[str], region: str, *, directory: Path = WORKSPACE) -> int:
    """Run the CDK's command line, and return what it ended with.

    :raises DeploymentInterrupted: if somebody interrupts it.
    """
    tools = Tools()
    environment = {**tools.environment(), "AWS_REGION": region, "AWS_DEFAULT_REGION": region}
    with _interruptible(_GO_ON), subprocess.Popen([*tools.cdk, *arguments], cwd=directory, env=environment) as program:
        try:
            return program.wait()
        except KeyboardInterrupt as interruption:
            if isinstance(interruption, Terminated):  # by Ctrl-C the terminal has told it, too
                program.send_signal(signal.SIGINT)
            try:  # it may tidy up
                program.wait(_TIDY_S)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
            raise


@contextlib.contextmanager
def _interruptible(hint: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interruption:
        message = "interrupted; CloudFormation goes on with the stack that it was at"
        raise DeploymentInterrupted(message, hint=hint) from interruption


def _stacks(aws: Aws, name: str) -> Mapping[str, Stack]:
    try:
        return find_stacks(aws, name)
    except DeploymentUnknown:
        return {}  # This is the first time.


def _failure(aws: Aws, name: str) -> DeploymentFailed:
    """What to say of a deployment that the CDK could not make."""
    stacks = _stacks(aws, name).values()
    states = ", ".join(f"{stack.name} {stack.status}" for stack in stacks) or "no stack was made"
    hint = "The reason is above. Mend it and deploy again: what is finished is kept, and what is not is made again."
    try:
        require_changeable(stacks, region=aws.region)
    except FarcallError as error:  # it takes more than that
        hint = f"The reason is above. {error.hint}"
    return DeploymentFailed(f"the deployment did not finish ({states})", hint=hint)


def _require_known(parameters: Mapping[str, str], api: Stack | None) -> None:
    """:raises ConfigurationError: if one of the parameters has no value, neither now nor from the last time."""
    known = {} if api is None or is_stillborn(api) else api.parameters
    missing = [key for key, value in parameters.items() if not (value or known.get(key))]
    if missing:
        raise ConfigurationError(
            f"the Globus client is not known: {', '.join(missing)} missing",
            hint="Set FARCALL_GLOBUS_CLIENT_ID, FARCALL_GLOBUS_SCOPE and FARCALL_GLOBUS_CREDENTIALS_ARN, or pass"
            " --globus-client-id, --globus-scope and --globus-credentials-arn; docs/deploy.md says how to make it."
            " With an identity provider of your own, deploy with the file of your profiles: -c profiles=….",
        )


def _complete_secret(aws: Aws, parameters: dict[str, str], api: Stack | None) -> None:
    """Put the whole ARN of the Globus client's secret in place of one without its last six characters, with which the
    authorizer's right to read it would not work."""
    deployed = api.parameters.get(SECRET_PARAMETER, "") if api else ""
    known = parameters[SECRET_PARAMETER] or deployed
    if (whole := aws.secret_arn(known)) and whole != known:
        parameters[SECRET_PARAMETER] = whole


def _reservable_concurrency(aws: Aws, api: Stack | None) -> int:
    """How much Lambda concurrency this deployment may reserve; 0 if AWS does not say."""
    try:
        return aws.reservable_concurrency(made(aws, api, "AWS::Lambda::Function"))
    except FarcallError as error:
        tell(f"No concurrency is reserved for the API: {error.record.message}")
        return 0


def _authorities(context: typer.Context, deployment: Deployment) -> Authorities | FarcallError | None:
    """The certificate authorities of the database, fetched if the profile gives an address, or why they cannot be. The
    file stays until the command ends."""
    if deployment.authorities or not deployment.verifies_database:
        return deployment.authorities
    directory = context.with_resource(tempfile.TemporaryDirectory(prefix="farcall-authorities-"))
    try:
        return fetch_authorities(deployment.profile.database.authorities, Path(directory), now=dt.datetime.now(dt.UTC))
    except FarcallError as error:
        return error


def _deployment(name: str, profile: str, context: list[str] | None) -> tuple[Deployment, dict[str, str]]:
    """The deployment that the options describe, and the same as context for the CDK."""
    arguments = {"name": name, "profile": profile}
    for pair in context or []:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ConfigurationError(f"{pair!r} is no setting", hint="write -c section.key=value")
        # The app runs in the clone, wherever we are.
        arguments[key] = str(Path(value).resolve()) if key == "profiles" else value
    deployment = deployment_from_context(arguments)
    if deployment.authorities:
        arguments["database.authorities"] = str(deployment.authorities.path)
    return deployment, arguments


def _examine(
    deployment: Deployment,
    authorities: Authorities | FarcallError | None,
    region: str | None,
    globus: GlobusClient,
    *,
    quiet: bool,
) -> list[Finding]:
    findings = []
    for finding in examine(
        deployment.profile,
        lambda: account.connect(region),
        Tools(),
        authorities=authorities,
        globus=globus,
    ):
        findings.append(finding)
        if not quiet:
            show_finding(finding)
    return findings


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass' dictionary as JSON can have it."""
    plain: dict[str, Any] = json.loads(
        json.dumps(value, default=lambda each: each.isoformat() if isinstance(each, dt.datetime) else dict(each))
    )
    return plain
