"""``farcall cloud``: the commands that check, price, deploy, show and destroy a cloud tier in your AWS account."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from farcall_common.console import new_group
from farcall_common.errors import ConfigurationError, FarcallError
from farcall_common.exit_codes import DONE, EXIT_CODES, FAILED, UNHEALTHY, Terminated, epilog
from farcall_infra.ca_bundle import CaBundle, fetch_ca_bundle
from farcall_infra.cloud.account import Stack
from farcall_infra.cloud.analytics import Action, find_storage
from farcall_infra.cloud.aws import Aws, connect
from farcall_infra.cloud.doctor import SERVICE_ROLES, Finding, GlobusClient, Outcome, run_checks
from farcall_infra.cloud.errors import DeploymentFailed, DeploymentInterrupted, DeploymentUnknown, NotReady
from farcall_infra.cloud.lifecycle import (
    SECRET_PARAMETER,
    client_parameters,
    created_resources,
    delete_stack,
    delete_unfinished,
    destroy,
    find_stacks,
    is_unfinished,
    require_changeable,
)
from farcall_infra.cloud.rotation import Program, rotate
from farcall_infra.cloud.settings import changes, deployed_settings, require_possible
from farcall_infra.cloud.show import (
    echo,
    show_changes,
    show_cost,
    show_finding,
    show_remains,
    show_status,
    show_storage,
)
from farcall_infra.cloud.status import read_status, unreachable_reason
from farcall_infra.cloud.tools import Tools
from farcall_infra.cost import exchange_prices, idle_bill, price_per_million_tasks
from farcall_infra.deployment import Deployment, deployment_from_context, stack_name
from farcall_infra.prices import DEFAULT_PRICES, load_prices
from farcall_infra.profiles import DEFAULT_PROFILES

#: The exit codes of these commands.
_EXIT_CODES = {
    DONE: EXIT_CODES[DONE],
    FAILED: "a deployment would fail (`doctor`)",
    **{code: EXIT_CODES[code] for code in (2, UNHEALTHY, 66, 69, 70, 73, 77, 78, 130, 143)},
    UNHEALTHY: "the deployment is unhealthy (`status`)",
    66: "there is no such deployment",
    73: "the deployment is being changed, or has to be repaired first",
}

app = new_group(
    "The cloud tier in your own AWS account, or on LocalStack (AWS_ENDPOINT_URL).",
    name="cloud",
    epilog=epilog(_EXIT_CODES),
)

_CLEANUP_S = 10.0
_RETRY_HINT = "Run the command again when `farcall cloud status` shows no stack that is IN_PROGRESS."

NameOption = Annotated[str, typer.Option("--name", help="Name of the deployment; one account can have several.")]
ProfileOption = Annotated[str, typer.Option("--profile", help="hobby, lab or facility.")]
ContextOption = Annotated[
    list[str] | None,
    typer.Option("--context", "-c", metavar="KEY=VALUE", help="Override a setting: database.storage_gib=50."),
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


@dataclasses.dataclass(frozen=True)
class CloudEnvironment:
    """Environment of the commands: the account, programs and servers that they use."""

    account: Callable[[str | None], Aws] = connect
    tools: Callable[[], Tools] = Tools
    fetch: Callable[..., CaBundle] = fetch_ca_bundle
    probe: Callable[[str], str] = unreachable_reason
    pause: Callable[[float], None] = time.sleep


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
    """Check whether a deployment would work: programs, credentials, bootstrap, quotas. Changes nothing. Exits with 1 if
    it would fail."""
    deployment, _ = _deployment(name, profile, context)
    globus = GlobusClient(globus_client_id, globus_scope, globus_credentials_arn)
    findings = _run_checks(ctx, deployment, _ca_bundle(ctx, deployment), region, globus, quiet=as_json)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    if any(finding.outcome is Outcome.FAILED for finding in findings):
        raise typer.Exit(1)


@app.command()
def cost(
    name: NameOption = "farcall",
    profile: ProfileOption = "lab",
    context: ContextOption = None,
    region: Annotated[
        str | None, typer.Option("--region", help="Refuse to use the prices of another region than this one.")
    ] = None,
    price_file: Annotated[
        Path, typer.Option("--prices", help="Your own table of prices, for another region.", show_default=False)
    ] = DEFAULT_PRICES,
    as_json: JsonOption = False,
) -> None:
    """Show the cost of a profile: an idle month, item by item, and a million tasks. Needs no account.

    The prices are those of us-east-1, which are the only ones that Farcall has. For another region, pass a table with
    its prices.
    """
    deployment, arguments = _deployment(name, profile, context)
    prices = load_prices(price_file)
    if region and region != prices.region:
        raise ConfigurationError(
            f"there are no prices for {region}, only for {prices.region}",
            hint=f"Omit --region to see the prices of {prices.region}, or copy {DEFAULT_PRICES}, replace `region` and"
            " the prices by those of your region, and pass --prices FILE.",
        )
    templates = _synthesized_templates(arguments)
    bill = idle_bill(templates, prices)
    tasks = {
        "one at a time": price_per_million_tasks(templates, prices, batch=1),
        "in batches of 100": price_per_million_tasks(templates, prices, batch=100),
        "in batches of 100, arguments and results as blobs": price_per_million_tasks(
            templates, prices, batch=100, blobs=True
        ),
    }
    exchange = exchange_prices(templates, prices)
    if as_json:
        items = [dataclasses.asdict(item) for item in bill.items]
        summary = {"region": prices.region, "prices_of": prices.as_of.isoformat(), "idle_usd": round(bill.usd, 2)}
        exchanged = {"usd_of_exchanges": exchange} if exchange else {}
        typer.echo(json.dumps(summary | {"items": items, "usd_per_million_tasks": tasks} | exchanged, indent=2))
    else:
        show_cost(deployment, bill, tasks, exchange, prices)


@app.command()
def synth(
    ctx: typer.Context,
    name: NameOption = "farcall",
    profile: ProfileOption = "lab",
    context: ContextOption = None,
    output: Annotated[Path, typer.Option("--output", help="The directory to write to.")] = Path("cdk.out"),
    templates_only: Annotated[
        bool,
        typer.Option("--templates-only", help="Write only the templates: takes seconds, and cannot be deployed."),
    ] = False,
    region: Annotated[
        str,
        typer.Option("--region", help="The AWS region that the templates are for, if it lacks AWS::Budgets::Budget."),
    ] = "",
) -> None:
    """Write the CloudFormation templates and bundles to a directory, and print its path. Needs no account.

    This is the CDK's cloud assembly, as `cdk synth` writes it. `cdk deploy --app DIRECTORY` deploys it.
    """
    deployment, arguments = _deployment(name, profile, context)
    arguments["region"] = region
    output.mkdir(parents=True, exist_ok=True)
    if templates_only:
        with tempfile.TemporaryDirectory(prefix="farcall-synth-") as directory:
            for template in _synthesize(arguments, Path(directory), whole=False):
                shutil.copy(template, output)
    else:
        ca_bundle = _ca_bundle(ctx, deployment)
        if isinstance(ca_bundle, FarcallError):
            raise ca_bundle
        if ca_bundle:
            arguments["database.authorities"] = str(ca_bundle.path)
        _synthesize(arguments, output.resolve(), whole=True)
    typer.echo(str(output.resolve()))


@app.command()
def profiles() -> None:
    """Print the profiles with their comments, for a file of your own: -c profiles=FILE."""
    typer.echo(DEFAULT_PROFILES.read_text(encoding="utf-8"), nl=False)


@app.command()
def bootstrap(ctx: typer.Context, region: RegionOption = None) -> None:
    """Prepare the account, once in each region: the CDK's bootstrap stack, and the service-linked roles."""
    environment = ctx.ensure_object(CloudEnvironment)
    aws = environment.account(region)
    number = aws.caller().account
    for role, service in SERVICE_ROLES.items():
        if not aws.has_role(role):
            aws.make_service_role(service)
            echo(f"created the role of {service}")
    if _run_cdk(environment.tools(), ["bootstrap", f"aws://{number}/{aws.region}"], aws.region) != 0:
        raise DeploymentFailed(
            f"account {number} is not bootstrapped in {aws.region}",
            hint="The reason is above. Fix the problem and run the command again.",
        )


@app.command()
def deploy(
    ctx: typer.Context,
    name: NameOption = "farcall",
    profile: Annotated[
        str, typer.Option("--profile", help="hobby, lab or facility. [default: the deployed one, or lab]")
    ] = "",
    context: ContextOption = None,
    region: RegionOption = None,
    globus_client_id: GlobusIdOption = "",
    globus_scope: GlobusScopeOption = "",
    globus_credentials_arn: GlobusSecretOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Create or update a deployment. With Globus Auth, the first deployment needs the options of the Globus client."""
    environment = ctx.ensure_object(CloudEnvironment)
    if not profile:
        data = environment.account(region).stack(stack_name(name, "data"))
        profile = data.outputs.get("Profile", "lab") if data else "lab"
    deployment, arguments = _deployment(name, profile, context)
    globus = GlobusClient(globus_client_id, globus_scope, globus_credentials_arn)
    ca_bundle = _ca_bundle(ctx, deployment)
    findings = _run_checks(ctx, deployment, ca_bundle, region, globus, quiet=False)
    if isinstance(ca_bundle, FarcallError) or any(finding.outcome is Outcome.FAILED for finding in findings):
        raise NotReady("a deployment would fail", hint="Fix the problems marked as failed above.")
    aws = environment.account(region)
    stacks = _stacks(aws, name)
    require_changeable(stacks.values(), region=aws.region)
    deployment = dataclasses.replace(deployment, ca_bundle=ca_bundle)
    if ca_bundle:
        arguments["database.authorities"] = str(ca_bundle.path)
    arguments["region"] = aws.region
    arguments["reservable_concurrency"] = str(_reservable_concurrency(aws, stacks.get("api")))
    changed = changes(deployed_settings(stacks.get("data")), deployment)
    show_changes(changed, profile)
    instances = created_resources(aws, stacks.get("data"), "AWS::RDS::DBInstance")
    database = aws.database(instances[0]) if instances else None
    require_possible(changed, database=database, wanted=deployment.profile.database)
    parameters = globus.parameters()
    if deployment.profile.identity.oidc_issuer:
        parameters = {}  # the profile has all settings of the identity provider
    else:
        _require_known(parameters, stacks.get("api"))
        _complete_secret(aws, parameters, stacks.get("api"))
    prices = load_prices()
    bill = idle_bill(_synthesized_templates(arguments), prices)
    echo(
        f"Deployment {name!r}, profile {profile}, {aws.region}: about ${bill.usd:.0f} a month while idle"
        f" (prices of {prices.region})."
    )
    if not yes:
        typer.confirm("Continue?", abort=True)
    with _interruptible(_RETRY_HINT):
        delete_unfinished(aws, stacks, echo=echo)
        if "analytics" in stacks and not deployment.profile.analytics.enabled:
            delete_stack(aws, stacks["analytics"], echo=echo)
    if _run_cdk(environment.tools(), cdk_arguments(arguments, name, parameters), aws.region) != 0:
        raise _failure(aws, name)
    for instance in created_resources(aws, aws.stack(stack_name(name, "data")), "AWS::RDS::DBInstance"):
        deployed = aws.database(instance)
        if deployed and deployed.needs_restart:
            echo(
                "The database takes its new settings at a restart. Restart it now, which takes about a minute:"
                f" `aws rds reboot-db-instance --db-instance-identifier {instance} --region {aws.region}`"
            )
    show_status(name, read_status(aws, name, now=dt.datetime.now(dt.UTC), probe=environment.probe))


@app.command()
def status(
    ctx: typer.Context, name: NameOption = "farcall", region: RegionOption = None, as_json: JsonOption = False
) -> None:
    """Show the status of a deployment. Exits with 3 if it is unhealthy."""
    environment = ctx.ensure_object(CloudEnvironment)
    aws = environment.account(region)
    found = read_status(aws, name, now=dt.datetime.now(dt.UTC), probe=environment.probe)
    if as_json:
        summary = {
            "healthy": found.healthy,
            "problems": found.problems,
            "is_asleep": found.is_asleep,
            "is_current": found.is_current,
            "releases": found.releases,
        }
        typer.echo(json.dumps(summary | _plain(dataclasses.asdict(found)), indent=2))
    else:
        show_status(name, found)
    if not found.healthy:
        raise typer.Exit(UNHEALTHY)


@app.command()
def analytics(
    ctx: typer.Context,
    name: NameOption = "farcall",
    region: RegionOption = None,
    start: Annotated[bool, typer.Option("--start", help="Create the Valkey, and wait for it: about a minute.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Delete the Valkey, and the blocks in it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the storage of analytics: the addresses for FARCALL_ANALYTICS_STORAGE and fast_storage=.

    The Valkey is billed while it is there. It is deleted when it has had no traffic for a while.
    """
    if start and stop:
        raise ConfigurationError("--start and --stop exclude each other", hint="Pass one of them.")
    environment = ctx.ensure_object(CloudEnvironment)
    action = Action.START if start else Action.STOP if stop else Action.STATUS
    storage = find_storage(environment.account(region), name, action=action, pause=environment.pause)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(storage), indent=2))
    else:
        show_storage(storage)


@app.command(name="rotate")
def rotate_command(
    ctx: typer.Context,
    program: Annotated[Program, typer.Argument(metavar="PROGRAM", help="api, forwarder or reconciler.")],
    name: NameOption = "farcall",
    region: RegionOption = None,
) -> None:
    """Replace the password with which a program logs in to the database.

    Nothing is interrupted, and the old password is refused at the end. Run the command again if it fails.
    """
    rotate(ctx.ensure_object(CloudEnvironment).account(region), name, program, echo=echo)


@app.command(name="destroy")
def destroy_command(
    ctx: typer.Context,
    name: NameOption = "farcall",
    region: RegionOption = None,
    yes: Annotated[
        str, typer.Option("--yes", metavar="NAME", help="The deployment's name, to skip the confirmation.")
    ] = "",
) -> None:
    """Delete a deployment. A final snapshot of the database and the bucket remain; the command shows their cost."""
    aws = ctx.ensure_object(CloudEnvironment).account(region)
    stacks = find_stacks(aws, name)
    echo(f"This deletes {', '.join(stack.name for stack in stacks.values())} in {aws.region}.")
    echo("Endpoints lose their connection. Unfinished tasks remain only in the snapshot.")
    if (yes or typer.prompt("Type the name of the deployment to continue")) != name:
        raise ConfigurationError(
            f"the name does not match {name!r}; nothing was deleted", hint="Type the name, or pass --yes NAME."
        )
    with _interruptible("Run the command again: it continues, and lists the remaining resources."):
        remains = destroy(aws, name, echo=echo)
    show_remains(remains, load_prices())


def cdk_arguments(context: Mapping[str, str], name: str, parameters: Mapping[str, str]) -> list[str]:
    """Arguments for the CDK's command line. A parameter without a value keeps its deployed value."""
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


def _run_cdk(tools: Tools, arguments: list[str], region: str) -> int:
    """Run the CDK's command line in an empty directory, where it finds no ``cdk.json``, and return its exit status.

    :raises DeploymentInterrupted: on Ctrl-C or SIGTERM.
    """
    environment = {**tools.environment(), "AWS_REGION": region, "AWS_DEFAULT_REGION": region}
    with (
        _interruptible(_RETRY_HINT),
        tempfile.TemporaryDirectory(prefix="farcall-cdk-") as directory,
        subprocess.Popen([*tools.cdk, *arguments], cwd=directory, env=environment) as program,
    ):
        try:
            return program.wait()
        except KeyboardInterrupt as interruption:
            if isinstance(interruption, Terminated):  # on Ctrl-C the terminal has signalled it as well
                program.send_signal(signal.SIGINT)
            try:  # give it time to clean up
                program.wait(_CLEANUP_S)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
            raise


@contextlib.contextmanager
def _interruptible(hint: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interruption:
        message = "interrupted; CloudFormation continues with the current stack"
        raise DeploymentInterrupted(message, hint=hint) from interruption


def _stacks(aws: Aws, name: str) -> Mapping[str, Stack]:
    try:
        return find_stacks(aws, name)
    except DeploymentUnknown:
        return {}  # the first deployment


def _failure(aws: Aws, name: str) -> DeploymentFailed:
    """The error for a deployment that the CDK did not finish."""
    stacks = _stacks(aws, name).values()
    states = ", ".join(f"{stack.name} {stack.status}" for stack in stacks) or "no stack was created"
    hint = (
        "The reason is above. Fix the problem and deploy again: finished stacks are kept, the others are created again."
    )
    try:
        require_changeable(stacks, region=aws.region)
    except FarcallError as error:  # deploying again is not enough
        hint = f"The reason is above. {error.hint}"
    return DeploymentFailed(f"the deployment did not finish ({states})", hint=hint)


def _require_known(parameters: Mapping[str, str], api: Stack | None) -> None:
    """:raises ConfigurationError: if one of the parameters has neither a new nor a deployed value."""
    known = {} if api is None or is_unfinished(api) else client_parameters(api)
    missing = [key for key, value in parameters.items() if not (value or known.get(key))]
    if missing:
        raise ConfigurationError(
            f"the Globus client is not set: {', '.join(missing)} missing",
            hint="Set FARCALL_GLOBUS_CLIENT_ID, FARCALL_GLOBUS_SCOPE and FARCALL_GLOBUS_CREDENTIALS_ARN, or pass"
            " --globus-client-id, --globus-scope and --globus-credentials-arn; docs/deploy.md says how to create it."
            " With your own identity provider, deploy with the file of your profiles: -c profiles=….",
        )


def _complete_secret(aws: Aws, parameters: dict[str, str], api: Stack | None) -> None:
    """Replace an ARN of the Globus client's secret without its last six characters by the full ARN: with the short one,
    the authorizer could not read the secret."""
    deployed = client_parameters(api).get(SECRET_PARAMETER, "") if api else ""
    known = parameters[SECRET_PARAMETER] or deployed
    if (whole := aws.secret_arn(known)) and whole != known:
        parameters[SECRET_PARAMETER] = whole


def _reservable_concurrency(aws: Aws, api: Stack | None) -> int:
    """The Lambda concurrency that this deployment may reserve; 0 if AWS does not answer."""
    try:
        return aws.reservable_concurrency(created_resources(aws, api, "AWS::Lambda::Function"))
    except FarcallError as error:
        echo(f"Not reserving concurrency for the API: {error.record.message}")
        return 0


def _ca_bundle(context: typer.Context, deployment: Deployment) -> CaBundle | FarcallError | None:
    """The CA bundle of the database, downloaded if the profile gives a URL, or the error of the download. The file
    exists until the command ends."""
    if deployment.ca_bundle or not deployment.verifies_database:
        return deployment.ca_bundle
    directory = context.with_resource(tempfile.TemporaryDirectory(prefix="farcall-ca-bundle-"))
    environment, url = context.ensure_object(CloudEnvironment), deployment.profile.database.authorities
    try:
        return environment.fetch(url, Path(directory), now=dt.datetime.now(dt.UTC))
    except FarcallError as error:
        return error


def _deployment(name: str, profile: str, context: list[str] | None) -> tuple[Deployment, dict[str, str]]:
    """The deployment for the options, and the same as context for the CDK."""
    arguments = {"name": name, "profile": profile}
    for pair in context or []:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ConfigurationError(f"{pair!r} is not a setting", hint="Write -c section.key=value.")
        # The app does not run in the current directory.
        arguments[key] = str(Path(value).resolve()) if key == "profiles" else value
    deployment = deployment_from_context(arguments)
    if deployment.ca_bundle:
        arguments["database.authorities"] = str(deployment.ca_bundle.path)
    return deployment, arguments


def _synthesized_templates(context: Mapping[str, str]) -> Mapping[str, Mapping[str, Any]]:
    """The templates by stack, without bundles, checks and an account.

    :raises ConfigurationError: if the app does not synthesise.
    """
    with tempfile.TemporaryDirectory(prefix="farcall-synth-") as directory:
        return {
            path.name.removesuffix(".template.json"): json.loads(path.read_text(encoding="utf-8"))
            for path in _synthesize(context, Path(directory), whole=False)
        }


def _synthesize(context: Mapping[str, str], directory: Path, *, whole: bool) -> list[Path]:
    """Run the app in a separate process, for ``context``; returns the templates. Only a ``whole`` assembly has the
    bundles, and is checked by cdk-nag.

    :raises ConfigurationError: if the app does not synthesise.
    """
    part: dict[str, Any] = {} if whole else {"aws:cdk:bundling-stacks": []}
    environment = {
        **os.environ,
        "CDK_OUTDIR": str(directory),
        "CDK_CONTEXT_JSON": json.dumps({**context, **part}),
        "CDK_VALIDATION": "true" if whole else "false",
    }
    done = subprocess.run(
        [sys.executable, "-m", "farcall_infra"], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ConfigurationError(f"the app does not synthesise: {done.stderr.strip()[-2000:]}")
    return sorted(directory.glob("*.template.json"))


def _run_checks(
    context: typer.Context,
    deployment: Deployment,
    ca_bundle: CaBundle | FarcallError | None,
    region: str | None,
    globus: GlobusClient,
    *,
    quiet: bool,
) -> list[Finding]:
    environment = context.ensure_object(CloudEnvironment)
    findings = []
    for finding in run_checks(
        deployment.profile,
        lambda: environment.account(region),
        environment.tools(),
        ca_bundle=ca_bundle,
        globus=globus,
    ):
        findings.append(finding)
        if not quiet:
            show_finding(finding)
    return findings


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass's dictionary, with values that JSON supports."""
    plain: dict[str, Any] = json.loads(
        json.dumps(value, default=lambda each: each.isoformat() if isinstance(each, dt.datetime) else dict(each))
    )
    return plain
