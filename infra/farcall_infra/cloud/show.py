"""Text output of ``farcall cloud``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from farcall_infra.cloud.account import Sample
from farcall_infra.cloud.analytics import Storage
from farcall_infra.cloud.doctor import Finding, Outcome
from farcall_infra.cloud.lifecycle import Remains
from farcall_infra.cloud.settings import Change
from farcall_infra.cloud.status import Status
from farcall_infra.cloud.tools import version_of
from farcall_infra.cost import Bill
from farcall_infra.deployment import Deployment
from farcall_infra.prices import Prices

_COLOURS: Final = {Outcome.FINE: "green", Outcome.WARNING: "yellow", Outcome.FAILED: "red"}
_GIB: Final = 2**30
_SMALL_USD: Final = 0.1

_console = Console(highlight=False, emoji=False)  # an ARN has `:secret:` in it


def _table(*columns: str, title: str = "") -> Table:
    """A table in the style of all commands of Farcall."""
    style: dict[str, Any] = {"box": None, "pad_edge": False, "header_style": "bold"}
    return Table(*columns, title=title or None, title_justify="left", title_style="bold", **style)


def echo(line: str) -> None:
    """Print a line without markup."""
    _console.print(line, markup=False, soft_wrap=True)


def show_finding(finding: Finding) -> None:
    """Print the result of one check, with its hint."""
    colour = _COLOURS[finding.outcome]
    _console.print(f"[{colour}]{finding.outcome:8}[/{colour}] {finding.what}: ", end="")
    echo(" ".join(finding.message.split()))
    if finding.hint and finding.outcome is not Outcome.FINE:
        echo(f"         {finding.hint}")


def show_cost(
    deployment: Deployment, bill: Bill, tasks: Mapping[str, float], exchange: Mapping[str, float], prices: Prices
) -> None:
    """Print a profile's bill, the price of its tasks, and that of exchanges if it has a storage for them."""
    profile = deployment.profile
    table = _table("US$ a month", "what", "stack", title=f"Profile {profile.name}, idle, {prices.region}")
    for item in sorted(bill.items, key=lambda item: -item.usd):
        table.add_row(f"{item.usd:.2f}", item.what, item.stack)
    table.add_section()
    table.add_row(f"{bill.usd:.2f}", "total", "")
    _console.print(table)
    if not profile.identity.oidc_issuer:
        echo(f"Plus {prices.secrets.secret_usd_per_month:.2f} for the secret of your Globus client.")
    table = _table("US$", "a million small tasks")
    for how, usd in tasks.items():
        table.add_row(f"{usd:.2f}", how)
    _console.print(table)
    if exchange:
        table = _table("US$", "exchanges of analytics")
        for what, usd in exchange.items():
            table.add_row(f"{usd:.4f}" if usd < _SMALL_USD else f"{usd:.2f}", what)
        _console.print(table)
    budget = profile.budget.monthly_usd
    alarm = f"The alarm on the real bill is at ${budget:.0f} a month." if budget else "There is no budget."
    source = f"{prices.region} of {prices.as_of}, without free tiers and taxes (farcall_infra/prices.toml)"
    echo(f"Prices of {source}. {alarm}")
    echo("Other regions have other prices, which Farcall does not have: pass a table of your own with --prices.")


def show_changes(changes: Sequence[Change], profile: str) -> None:
    """Print the settings that the deployment changes, and how to keep those that changed only by omission."""
    if not changes:
        return
    table = _table("setting", "deployed", "from now on", title="Settings that change")
    for each in changes:
        table.add_row(each.setting, escape(each.deployed or "(none)"), escape(each.wanted or "(none)"))
    _console.print(table)
    for each in changes:
        if each.was_given and not each.is_given:
            section, _, key = each.setting.partition(".")
            echo(
                f"{each.setting} was given with -c last time but not this time, so it is reverted. To keep it:"
                f" -c {each.setting}={each.deployed}, or permanently `{key}` in [{profile}.{section}] of a"
                " file with your profiles (-c profiles=FILE)."
            )
    if changes[0].setting != "profile" and not all(each.is_given or each.was_given for each in changes):
        echo("If this is not intended: is the file with your profiles missing? (-c profiles=FILE)")


def show_status(name: str, status: Status) -> None:
    """Print the status of a deployment."""
    table = _table("stack", "status", "changed", title=f"Deployment {name!r}")
    for stack in status.stacks:
        changed = f"{stack.changed_at:%Y-%m-%d %H:%M} UTC" if stack.changed_at else ""
        table.add_row(stack.name, stack.status, changed)
    for missing in status.missing:
        table.add_row(missing, "missing", "")
    _console.print(table)
    for what, line in _lines(status):
        echo(f"{what:10} {line}")
    echo("Unhealthy:" if status.problems else "Healthy.")
    for problem in status.problems:
        echo(f"  {problem}")
    if status.api_url:
        echo(f"export FARCALL_API_URL={status.api_url}")


_UPDATE: Final = "`git pull && make setup` in the clone, or `pip install -U farcall-infra`,"


def _release(status: Status) -> str:
    """The deployed release, and the command that updates it or this installation."""
    if status.is_current:
        return f"{status.installed}, same as this installation"
    stacks: dict[str, list[str]] = {}
    for stack, release in status.releases.items():
        stacks.setdefault(release or "an older release", []).append(stack)
    deployed = " and ".join(
        f"{release} ({', '.join(names)})" if len(stacks) > 1 else release for release, names in stacks.items()
    )
    newest = max((version_of(release) for release in status.releases.values() if release), default=())
    if newest > version_of(status.installed):
        way = f"{_UPDATE} updates this installation"
    else:
        way = "`farcall cloud deploy` updates the deployment"
        if newest == version_of(status.installed):
            way += f", after {_UPDATE} if the deployment is the newer one"
    return f"{deployed}; this installation is {status.installed}: {way}"


def _lines(status: Status) -> list[tuple[str, str]]:
    lines = [("Release", _release(status))]
    settings = status.settings
    if settings.profile:
        given = ", ".join(f"{setting}={settings.values.get(setting, '?')}" for setting in settings.overrides)
        lines.append(("Settings", f"profile {settings.profile}{', with -c ' if given else ''}{given}"))
    if status.api_url:
        lines.append(("API", "does not answer" if status.api_problem else "answers"))
    if status.tasks:
        running = f"{status.tasks.running} of {status.tasks.desired} tasks run"
        lines.append(("Forwarder", "asleep until a client or endpoint connects" if status.is_asleep else running))
    numbers = {what: _number(sample) for what, sample in status.measured.items()}
    if "endpoints" in numbers and not status.is_asleep:
        lines.append(("Connected", f"{numbers['endpoints']} endpoints, {numbers.get('connections', '?')} connections"))
    if "tasks_waiting" in numbers:
        lines.append(("Waiting", f"{numbers['tasks_waiting']} tasks have not started yet"))
    if "queue_wait_s" in numbers and not status.is_asleep:
        lines.append(("Waited", f"{numbers['queue_wait_s']} s, the longest wait among the tasks dispatched last"))
    if status.database:
        text = f"{status.database.status}, {status.database.version}"
        if free := status.measured.get("database_free_bytes"):
            text += f", {free.value / _GIB:.1f} of {status.database.storage_gib} GiB free"
        if status.database.needs_restart:
            text += ", needs a restart for its new settings"
        lines.append(("Database", text))
    if status.queue:
        text = f"{status.queue.status}, {len(status.queue.nodes)} nodes"
        if "queue_keys" in numbers:
            text += f", {numbers['queue_keys']} keys, {numbers.get('queue_memory_percent', '?')} percent of its memory"
        lines.append(("Queue", text))
    if canary := status.measured.get("canary_s"):
        lines.append(("Canary", f"finished in {canary.value:.1f} s at {canary.at:%H:%M} UTC"))
    if status.alarms_watched:
        lines.append(("Alarms", f"{', '.join(status.alarms) or 'none'} (of {status.alarms_watched})"))
    return lines


def show_storage(storage: Storage) -> None:
    """Print the addresses of the storage of analytics."""
    echo(f"export FARCALL_ANALYTICS_STORAGE={storage.bucket}")
    if storage.express:
        echo(f"{'Express':10} {storage.express}")
    if storage.cache:
        echo(f"{'Valkey':10} {storage.cache}")
    elif storage.has_cache:
        none = "none; `farcall cloud analytics --start` creates it in about a minute"
        echo(f"{'Valkey':10} {storage.cache_status or none}")


def _number(sample: Sample) -> str:
    return f"{sample.value:.3g}" if sample.value % 1 else f"{sample.value:.0f}"


def show_remains(remains: Remains, prices: Prices) -> None:
    """Print the resources that remain of a deployment, their cost, and the commands that delete them."""
    echo("Deleted. These resources remain, and are billed until you delete them:")
    for backup in remains.backups:
        usd = backup.storage_gib * prices.database.backup_usd_per_gib_month
        echo(f"  {backup.what}: at most ${usd:.2f} a month\n    {backup.delete}")
    for bucket in remains.buckets:
        usd = prices.blobs.storage_usd_per_gb_month
        echo(f"  bucket {bucket}: ${usd} per GB and month; its objects expire by themselves")
        echo(f"    aws s3 rb --force s3://{bucket}")
    if remains.secret:
        echo(f"  the secret of your Globus client: ${prices.secrets.secret_usd_per_month:.2f} a month")
        echo(f"    aws secretsmanager delete-secret --secret-id {remains.secret}")
    if remains.express:
        bucket = remains.express.removeprefix("s3://")
        echo(f"  directory bucket {bucket}: its objects expire within a day")
        echo(f"    aws s3api delete-bucket --bucket {bucket}")
    echo("  the CDK's bootstrap stack and its bucket of bundles: cents; other CDK apps may use it too")
    for unknown in remains.unknown:
        echo(f"  could not be listed: {unknown}")
