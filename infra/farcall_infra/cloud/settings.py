"""Deployed settings, and their difference to those of the next deployment.

The outputs of the data stack hold them. A deployment without a ``-c`` option of the last one reverts that setting; the
user has to see this before it happens.
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


@dataclasses.dataclass(frozen=True)
class DeployedSettings:
    """The profile, each ``section.key`` with its value as text, and the names of those given with ``-c``."""

    profile: str = ""
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    overrides: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Change:
    """A setting whose value would change; whether it was given with ``-c`` in the last deployment and is in this
    one."""

    setting: str
    deployed: str
    wanted: str
    was_given: bool = False
    is_given: bool = False


def deployed_settings(data: Stack | None) -> DeployedSettings:
    """The settings in the outputs of the data stack; empty before the first deployment, and for one of an older
    release."""
    outputs = data.outputs if data else {}
    sections = {
        key.removeprefix(SETTINGS_OUTPUT).lower(): json.loads(value)
        for key, value in outputs.items()
        if key.startswith(SETTINGS_OUTPUT)
    }
    overrides = outputs.get(OVERRIDES_OUTPUT, "")
    return DeployedSettings(outputs.get(PROFILE_OUTPUT, ""), _flat(sections), tuple(filter(None, overrides.split(","))))


def changes(before: DeployedSettings, deployment: Deployment) -> Sequence[Change]:
    """The settings that a deployment would change, first the profile. A setting that only one release has is left
    out."""
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
    """Refuse changes that AWS would refuse only after a quarter of an hour; ``database`` is the running one.

    :raises ConfigurationError: if AWS would refuse one of them.
    """
    by_name = {each.setting: each for each in found}
    disk = by_name.get("database.storage_gib")
    if disk:
        # RDS enlarges the disk by itself, so it may be larger than the deployed setting.
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
            "the queue needs its second node before fail-over can be turned on",
            hint="Deploy with -c queue.failover=false first, then again without it.",
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
        hint=f"To keep it, deploy with {keep}. To upgrade it, read docs/operations/upgrades.md, and deploy"
        " with -c database.major_upgrade=true.",
    )


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> Mapping[str, str]:
    return {f"{name}.{key}": _text(value) for name, section in sections.items() for key, value in section.items()}


def _text(value: Any) -> str:
    """A value in the format of ``-c``."""
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
