"""``farcall cloud``: the cloud tier in your own AWS account, from the look before the first deployment to the last."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from farcall_common.errors import ConfigurationError
from farcall_infra.bundles import WORKSPACE
from farcall_infra.cloud import aws as account
from farcall_infra.cloud.doctor import Finding, Outcome, examine
from farcall_infra.cloud.errors import DeploymentFailed, NotReady
from farcall_infra.cloud.lifecycle import Remains, Status, destroy, find_stacks, look
from farcall_infra.cloud.synth import synthesized_templates
from farcall_infra.cloud.tools import Tools
from farcall_infra.cost import Bill, idle_bill, price_per_million_tasks
from farcall_infra.deployment import Deployment, deployment_from_context, stack_name
from farcall_infra.prices import Prices, load_prices

__all__ = ["app"]

app = typer.Typer(name="cloud", help="The cloud tier in your own AWS account.", no_args_is_help=True)
_console = Console(highlight=False)

_NOT_WELL = 3
_COLOURS = {Outcome.FINE: "green", Outcome.WARNING: "yellow", Outcome.FAILED: "red"}

NameOption = Annotated[str, typer.Option("--name", help="The deployment; several fit into one account.")]
ProfileOption = Annotated[str, typer.Option("--profile", help="hobby, lab or facility.")]
ContextOption = Annotated[
    list[str] | None,
    typer.Option("--context", "-c", metavar="KEY=VALUE", help="Another value for a setting: database.storage_gib=50."),
]
RegionOption = Annotated[str | None, typer.Option("--region", help="The AWS region, if not the configured one.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON for programs.")]
GlobusSecretOption = Annotated[
    str,
    typer.Option("--globus-credentials-arn", envvar="FARCALL_GLOBUS_CREDENTIALS_ARN", help="Secret of the client."),
]


@app.command()
def doctor(
    name: NameOption = "farcall",
    profile: ProfileOption = "lab",
    context: ContextOption = None,
    region: RegionOption = None,
    globus_credentials_arn: GlobusSecretOption = "",
    as_json: JsonOption = False,
) -> None:
    """Look whether a deployment would work: programs, credentials, bootstrap, quotas. Changes nothing. Exits with 1 if
    it would not."""
    deployment, _ = _deployment(name, profile, context)
    findings = _examine(deployment, region, globus_credentials_arn, quiet=as_json)
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
        _show_cost(deployment, bill, tasks, prices)


@app.command()
def deploy(
    name: NameOption = "farcall",
    profile: Annotated[
        str, typer.Option("--profile", help="hobby, lab or facility; if not given, the deployed one, or else lab.")
    ] = "",
    context: ContextOption = None,
    region: RegionOption = None,
    globus_client_id: Annotated[str, typer.Option(envvar="FARCALL_GLOBUS_CLIENT_ID")] = "",
    globus_scope: Annotated[str, typer.Option(envvar="FARCALL_GLOBUS_SCOPE")] = "",
    globus_credentials_arn: GlobusSecretOption = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Make a deployment, or bring it up to date. The Globus client, if users come from Globus, is asked for once."""
    if not profile:
        data = account.connect(region).stack(stack_name(name, "data"))
        profile = data.outputs.get("Profile", "lab") if data else "lab"
    deployment, arguments = _deployment(name, profile, context)
    findings = _examine(deployment, region, globus_credentials_arn, quiet=False)
    if any(finding.outcome is Outcome.FAILED for finding in findings):
        raise NotReady("a deployment would fail", hint="Mend what is marked as failed above.")
    aws = account.connect(region)
    parameters = {
        "GlobusClientId": globus_client_id,
        "GlobusScope": globus_scope,
        "GlobusCredentialsArn": globus_credentials_arn,
    }
    is_new = aws.stack(stack_name(name, "api")) is None
    if deployment.profile.identity.oidc_issuer:
        parameters = {}  # The profile says it all.
    elif is_new and not all(parameters.values()):
        raise ConfigurationError(
            "a first deployment needs the Globus client",
            hint="Pass --globus-client-id, --globus-scope and --globus-credentials-arn; see docs/deploy.md.",
        )
    bill = idle_bill(synthesized_templates(arguments), load_prices())
    _console.print(f"Deployment {name!r}, profile {profile}, {aws.region}: about ${bill.usd:.0f} a month while idle.")
    if not yes:
        typer.confirm("Go on?", abort=True)
    _run_cdk(cdk_arguments(arguments, name, parameters), aws.region)
    _show_status(name, look(aws, name))


@app.command()
def status(name: NameOption = "farcall", region: RegionOption = None, as_json: JsonOption = False) -> None:
    """Show how a deployment is. Exits with 3 if it is not well."""
    found = look(account.connect(region), name)
    if as_json:
        typer.echo(
            json.dumps(
                {"is_well": found.is_well, "api_url": found.api_url, **_plain(dataclasses.asdict(found))}, indent=2
            )
        )
    else:
        _show_status(name, found)
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
    _console.print(f"This deletes {', '.join(stack.name for stack in stacks.values())} in {aws.region}.")
    _console.print("Endpoints lose their connection, and tasks that have not ended stay in the snapshot only.")
    if (yes or typer.prompt("Type its name to go on")) != name:
        raise ConfigurationError(f"that is not {name!r}; nothing was deleted")
    _show_remains(destroy(aws, name, tell=_console.print), load_prices())


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


def _run_cdk(arguments: list[str], region: str) -> None:
    tools = Tools()
    # Programs of the command line call "node" by name.
    path = os.pathsep.join([str(Path(tools.node).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "AWS_REGION": region, "AWS_DEFAULT_REGION": region}
    done = subprocess.run([*tools.cdk, *arguments], cwd=WORKSPACE, env=environment, check=False)
    if done.returncode != 0:
        raise DeploymentFailed(
            "CloudFormation did not finish; it has put back what it had changed",
            hint="The reason is above. Mend it and deploy again: what was made already is kept.",
        )


def _deployment(name: str, profile: str, context: list[str] | None) -> tuple[Deployment, dict[str, str]]:
    """The deployment that the options describe, and the same as context for the CDK."""
    arguments = {"name": name, "profile": profile}
    for pair in context or []:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ConfigurationError(f"{pair!r} is no setting", hint="write -c section.key=value")
        # The app runs in the clone, wherever we are.
        arguments[key] = str(Path(value).resolve()) if key == "profiles" else value
    return deployment_from_context(arguments), arguments


def _examine(deployment: Deployment, region: str | None, credentials_arn: str, *, quiet: bool) -> list[Finding]:
    findings = []
    for finding in examine(
        deployment.profile, lambda: account.connect(region), Tools(), credentials_arn=credentials_arn
    ):
        findings.append(finding)
        if not quiet:
            colour = _COLOURS[finding.outcome]
            _console.print(f"[{colour}]{finding.outcome:8}[/{colour}] {finding.what}: ", end="")
            _console.print(finding.message, markup=False, soft_wrap=True)
            if finding.hint and finding.outcome is not Outcome.FINE:
                _console.print(f"         {finding.hint}", markup=False, soft_wrap=True)
    return findings


def _show_cost(deployment: Deployment, bill: Bill, tasks: Mapping[str, float], prices: Prices) -> None:
    profile = deployment.profile
    table = Table("US$ a month", "what", "stack", title=f"Profile {profile.name}, idle, {prices.region}")
    for item in sorted(bill.items, key=lambda item: -item.usd):
        table.add_row(f"{item.usd:.2f}", item.what, item.stack)
    table.add_section()
    table.add_row(f"{bill.usd:.2f}", "all", "")
    _console.print(table)
    _console.print(f"Besides: {prices.secrets.secret_usd_per_month:.2f} for the secret of your Globus client.")
    table = Table("US$", "a million small tasks")
    for how, usd in tasks.items():
        table.add_row(f"{usd:.2f}", how)
    _console.print(table)
    _console.print(
        f"Prices of {prices.as_of}, without free tiers and taxes (infra/prices.toml). The alarm on the real bill is at"
        f" ${profile.budget.monthly_usd:.0f} a month."
    )


def _show_status(name: str, status: Status) -> None:
    table = Table("stack", "status", title=f"Deployment {name!r}")
    for stack in status.stacks:
        table.add_row(stack.name, stack.status)
    for missing in status.missing:
        table.add_row(missing, "missing")
    _console.print(table)
    if status.tasks:
        _console.print(f"Forwarder: {status.tasks.running} of {status.tasks.desired} tasks run")
    if status.database:
        _console.print(f"Database:  {status.database.status}")
    _console.print(f"Alarms:    {', '.join(status.alarms) or 'none'}")
    if status.api_url:
        _console.print(f"API:       {status.api_url.rstrip('/')}", soft_wrap=True)
        _console.print(f"export FARCALL_API_URL={status.api_url.rstrip('/')}", soft_wrap=True)


def _show_remains(remains: Remains, prices: Prices) -> None:
    _console.print("Deleted. This stays, and is billed for until you delete it:")
    for backup in remains.backups:
        usd = backup.storage_gib * prices.database.backup_usd_per_gib_month
        _console.print(f"  {backup.what}: at most ${usd:.2f} a month", soft_wrap=True)
    for bucket in remains.buckets:
        usd = prices.blobs.storage_usd_per_gb_month
        _console.print(f"  bucket {bucket}: ${usd} per GB and month; its objects expire by themselves", soft_wrap=True)
    _console.print(f"  the secret of your Globus client: ${prices.secrets.secret_usd_per_month:.2f} a month")
    _console.print("  the CDK's bootstrap stack and its bucket of bundles: cents; other CDK apps may use it too")


def _plain(value: Any) -> dict[str, Any]:
    """A dataclass' dictionary as JSON can have it."""
    plain: dict[str, Any] = json.loads(json.dumps(value, default=dict))
    return plain
