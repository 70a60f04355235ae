"""The settings that a deployment was made with, and which of them the next one would change.

The data stack tells them in its outputs. Whoever deploys without what was given the last time takes it back, and is to
know that before it happens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from farcall_common.errors import ConfigurationError
from farcall_infra.cloud.account import Database, Stack
from farcall_infra.deployment import OVERRIDES_OUTPUT, PROFILE_OUTPUT, SETTINGS_OUTPUT, Deployment
from farcall_infra.profiles import DatabaseSize

__all__ = ["Change", "DeployedSettings", "changes", "deployed_settings", "require_possible"]


@dataclasses.dataclass(frozen=True)
class DeployedSettings:
    """The profile, each ``section.key`` with its value as text, and which of them were given with ``-c``."""

    profile: str = ""
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    overrides: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Change:
    """One setting that would become another; whether somebody gave it with ``-c``, then and now."""

    setting: str
    deployed: str
    wanted: str
    was_given: bool = False
    is_given: bool = False


def deployed_settings(data: Stack | None) -> DeployedSettings:
    """What the data stack tells. There is nothing before it is made, nor of one that an older release made."""
    outputs = data.outputs if data else {}
    sections = {
        key.removeprefix(SETTINGS_OUTPUT).lower(): json.loads(value)
        for key, value in outputs.items()
        if key.startswith(SETTINGS_OUTPUT)
    }
    overrides = outputs.get(OVERRIDES_OUTPUT, "")
    return DeployedSettings(outputs.get(PROFILE_OUTPUT, ""), _flat(sections), tuple(filter(None, overrides.split(","))))


def changes(before: DeployedSettings, deployment: Deployment) -> Sequence[Change]:
    """What deploying would change, another profile first. A setting that only one release knows does not count."""
    wanted = _flat(deployment.settings)
    found = [
        Change(setting, value, wanted[setting], setting in before.overrides, setting in deployment.overrides)
        for setting, value in before.values.items()
        if wanted.get(setting, value) != value
    ]
    if before.profile and before.profile != deployment.profile.name:
        return [Change("profile", before.profile, deployment.profile.name, is_given=True), *found]
    return found


def require_possible(found: Sequence[Change], *, database: Database | None, wanted: DatabaseSize) -> None:
    """Compare the changes with what AWS refuses only after a quarter of an hour; ``database`` is the one that runs.

    :raises ConfigurationError: if one of them is refused.
    """
    by_name = {each.setting: each for each in found}
    disk = by_name.get("database.storage_gib")
    if disk:
        # RDS enlarges the disk by itself, and so it may be larger than it was deployed with.
        present = max(int(disk.deployed), database.storage_gib if database else 0)
        if int(disk.wanted) < present:
            raise ConfigurationError(
                f"the database's disk has {present} GiB and cannot shrink to {disk.wanted}",
                hint=f"Deploy with -c database.storage_gib={disk.deployed}, or write that into the file of your"
                " profiles.",
            )
    if database and database.major_version:
        _require_upgradable(database.major_version, wanted)
    failover, nodes = by_name.get("queue.failover"), by_name.get("queue.nodes")
    if failover and nodes and failover.wanted == "true" and nodes.deployed == "1":
        raise ConfigurationError(
            "the queue has to have its second node before fail-over can be turned on",
            hint="Deploy with -c queue.failover=false first, and once more without it.",
        )


def _require_upgradable(present: str, wanted: DatabaseSize) -> None:
    if present == wanted.version or (int(present) < int(wanted.version) and wanted.major_upgrade):
        return
    keep = f"-c database.version={present}"
    if int(present) > int(wanted.version):
        raise ConfigurationError(
            f"the database is PostgreSQL {present} and cannot become {wanted.version}", hint=f"Deploy with {keep}."
        )
    raise ConfigurationError(
        f"the database is PostgreSQL {present}, and this deployment would make it {wanted.version}",
        hint=f"To keep it, deploy with {keep}. To upgrade it, read docs/operations.md, Upgrade PostgreSQL, and deploy"
        " with -c database.major_upgrade=true.",
    )


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> Mapping[str, str]:
    return {f"{name}.{key}": _text(value) for name, section in sections.items() for key, value in section.items()}


def _text(value: Any) -> str:
    """As ``-c`` takes it."""
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
