"""``python -m farcall_localstack``: commands for the offline cloud tier."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from farcall_common.credentials import find_home
from farcall_common.errors import ConfigurationError, FarcallError, Unavailable
from farcall_common.exit_codes import UNHEALTHY, exit_code, exit_status
from farcall_localstack.bundles import AUTO, BUNDLES, target_named
from farcall_localstack.deploy import Deployer, Progress
from farcall_localstack.environment import ensure_environment
from farcall_localstack.synth import ensure_assembly
from farcall_localstack.tier import LocalStackTier, Tier

app = typer.Typer(no_args_is_help=True, help="The cloud tier of the CDK templates on LocalStack, offline.")
T = TypeVar("T")

_console = Console()
_errors = Console(stderr=True)


_HOME = find_home(os.environ) / "localstack"


DirectoryOption = Annotated[Path, typer.Option("--directory", help="Directory of logs and state.")]
ProfileOption = Annotated[str, typer.Option("--profile", help="hobby, lab or facility.")]
BundlesOption = Annotated[
    str,
    typer.Option(
        "--bundles",
        help=f"Wheels for this Python or Lambda's image: {', '.join(BUNDLES)}; {AUTO}: LocalStack's (mode endpoint).",
    ),
]
ContextOption = Annotated[
    list[str] | None,
    typer.Option("--context", "-c", metavar="KEY=VALUE", help="Override a setting: database.storage_gib=50."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON for programs.")]
ModeOption = Annotated[str, typer.Option("--mode", help="host: start LocalStack; endpoint: use AWS_ENDPOINT_URL.")]


@app.command()
def up(
    *,
    directory: DirectoryOption = _HOME,
    profile: ProfileOption = "lab",
    mode: ModeOption = "host",
    bundles: BundlesOption = AUTO,
    as_json: JsonOption = False,
) -> None:
    """Start LocalStack in the background and deploy the cloud tier to it.

    The output is the environment variables for Farcall, boto3 and the AWS command line, as export lines for a shell:
    eval "$(python -m farcall_localstack up)". Each step is a line on standard error, with the elapsed time.
    """
    progress = _progress()
    tier = _or_exit(
        lambda: LocalStackTier(directory, profile=profile, mode=mode, bundles=bundles, progress=progress).stay()
    )
    progress("the tier is up")
    if as_json:
        typer.echo(json.dumps(tier.variables() | {"directory": str(tier.directory)}))
        return
    for name, value in tier.variables().items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command()
def down(*, directory: DirectoryOption = _HOME) -> None:
    """End the LocalStack that ``up`` started, with all its processes; in one that ran before, delete the stacks."""
    _or_exit(lambda: Tier.load(directory).destroy())


@app.command()
def status(*, directory: DirectoryOption = _HOME, as_json: JsonOption = False) -> None:
    """Show the tier's addresses and whether it answers. Exits with 3 if it is unhealthy."""
    tier = _or_exit(lambda: Tier.load(directory))
    problem = ""
    try:
        tier.require_healthy()
    except Unavailable as error:
        problem = str(error)
    if as_json:
        state = {"healthy": not problem, "problem": problem, "directory": str(tier.directory)}
        typer.echo(json.dumps(state | {"api_url": tier.api_url, "endpoint_url": tier.endpoint_url}))
    elif problem:
        _errors.print(f"Unhealthy: {problem}", markup=False, soft_wrap=True)
    else:
        _show(tier)
    if problem:
        raise typer.Exit(UNHEALTHY)


def _show(tier: Tier) -> None:
    _console.print(f"API         {tier.api_url}", soft_wrap=True)
    owner = f"(pid {tier.localstack_pid})" if tier.localstack_pid else "(not started by up)"
    _console.print(f"LocalStack  {tier.endpoint_url} {owner}")
    if tier.localstack_pid:  # the tasks of another LocalStack are unknown
        _console.print(f"forwarders  {', '.join(tier.forwarder_addresses())}")
    _console.print(f"logs        {tier.directory}", soft_wrap=True)


@app.command()
def synth(*, profile: ProfileOption = "lab", bundles: BundlesOption = "host") -> None:
    """Synthesise the templates for LocalStack and print their directory."""
    target = _or_exit(lambda: target_named(bundles))
    _console.print(str(_or_exit(lambda: ensure_assembly(profile=profile, target=target))), soft_wrap=True)


@app.command()
def deploy(
    *,
    directory: DirectoryOption = _HOME,
    profile: Annotated[str, typer.Option(help="Another profile than that of up.")] = "",
    context: ContextOption = None,
) -> None:
    """Deploy the current sources to the tier that ``up`` started."""
    tier = _or_exit(lambda: Tier.load(directory))
    settings = dict(_or_exit(lambda: [_setting(pair) for pair in context or ()]))
    assembly = _or_exit(
        lambda: ensure_assembly(name=tier.name, profile=profile or tier.profile, target=tier.target, settings=settings)
    )
    deployer = Deployer(tier.endpoint_url, progress=_progress())
    _or_exit(lambda: deployer.deploy(assembly, parameters=tier.parameters()))


@app.command()
def environment() -> None:
    """Create LocalStack's own Python environment and print its interpreter."""
    _console.print(str(_or_exit(ensure_environment)), soft_wrap=True)


def _progress() -> Progress:
    """Writes each step with the seconds since now to standard error, also where that is not a terminal."""
    began = time.monotonic()
    return lambda line: typer.echo(f"[{time.monotonic() - began:6.1f} s] {line}", err=True)


def _setting(pair: str) -> tuple[str, str]:
    setting, separator, value = pair.partition("=")
    if not separator:
        raise ConfigurationError(f"{pair!r} is not a setting", hint="Write -c section.key=value.")
    return setting, value


def _or_exit(action: Callable[[], T]) -> T:
    try:
        return action()
    except FarcallError as error:
        raise _exit_with(error) from error
    except OSError as error:
        hint = "Free space or fix the permissions, or name another --directory."
        raise _exit_with(ConfigurationError(str(error), hint=hint)) from error
    except KeyboardInterrupt as interruption:
        raise typer.Exit(exit_status(interruption)) from None


def _exit_with(error: FarcallError) -> typer.Exit:
    _errors.print(f"[red]{type(error).__name__}[/red]: {escape(str(error))}", soft_wrap=True)
    return typer.Exit(exit_code(error))
