"""What one deployment is: a name, a profile and a target.

The target is the only switch between AWS and the offline tier, and :data:`TARGETS` is the whole difference between the
two templates.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from farcall_common.errors import ConfigurationError
from farcall_infra.authorities import AUTHORITIES_FILE, Authorities, is_address, read_authorities
from farcall_infra.bundles import ARM64, HOST, X86_64, Bundle, WheelPlatform
from farcall_infra.profiles import DEFAULT_PROFILES, Profile, load_profile, setting_names

__all__ = [
    "DEPLOYMENT_TAG",
    "OVERRIDES_OUTPUT",
    "PROFILE_OUTPUT",
    "RECONCILER_CONCURRENCY",
    "SETTINGS_OUTPUT",
    "SLEEPS_TAG",
    "STACKS",
    "TARGETS",
    "Deployment",
    "Target",
    "deployment_from_context",
    "stack_name",
]

#: The stacks of a deployment, in the order in which they are made.
STACKS: Final = ("network", "data", "api", "forwarder", "observability")
#: The tag of everything that a deployment makes; its value is the deployment's name.
DEPLOYMENT_TAG: Final = "farcall:deployment"
#: Outputs of the data stack: the profile, its settings (one output for each section, as JSON), and which of them were
#: given on the command line.
PROFILE_OUTPUT: Final = "Profile"
SETTINGS_OUTPUT: Final = "Settings"
OVERRIDES_OUTPUT: Final = "Overrides"
#: Settings that are paths, which `farcall cloud deploy` overrides with absolute ones.
_PATHS: Final = frozenset({"database.authorities"})
_DIGITS: Final = 12
#: The reserved concurrency of the reconciler, where the API has one.
RECONCILER_CONCURRENCY: Final = 1
#: The tag of a service that ends while nobody uses it; the price of doing nothing depends on it.
SLEEPS_TAG: Final = "farcall:sleeps"


@dataclasses.dataclass(frozen=True)
class Target:
    """Where the template is going to be deployed.

    ``wheels`` is the platform whose binary wheels go into the bundles, ``store_tls`` is encryption on the way to
    database and queue, ``ipv6`` lets what is in the private subnets call AWS (there is no NAT for IPv4),
    ``dev_tokens`` puts fixed tokens in the place of Globus Auth, ``checked`` has cdk-nag look at the result,
    ``observed`` adds the stack of alarms and dashboard, and ``deletable`` lets everything, data included, go with the
    stack.
    """

    name: str
    wheels: WheelPlatform
    store_tls: bool
    ipv6: bool
    dev_tokens: bool
    checked: bool
    observed: bool
    deletable: bool


_AWS: Final = Target(
    "aws",
    wheels=ARM64,
    store_tls=True,
    ipv6=True,
    dev_tokens=False,
    checked=True,
    observed=True,
    deletable=False,
)
# The wheels of PostgreSQL and Valkey have no TLS, LocalStack's CloudFormation has no Fn::Cidr, its core has no
# dashboards or budgets, and there is no Globus offline.
_LOCALSTACK: Final = Target(
    "localstack",
    wheels=HOST,
    store_tls=False,
    ipv6=False,
    dev_tokens=True,
    checked=False,
    observed=False,
    deletable=True,
)
TARGETS: Final = {
    target.name: target
    for target in (
        _AWS,
        _LOCALSTACK,
        # A LocalStack that runs functions and tasks in containers, of Lambda's image for that processor.
        *(dataclasses.replace(_LOCALSTACK, name=f"localstack-{each.name}", wheels=each) for each in (ARM64, X86_64)),
    )
}


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Everything that a synth depends on.

    ``authorities`` are those of the database, None if its certificate is not checked or they are not fetched yet.
    ``overrides`` names the settings that do not come from the profile's table. ``reservable_concurrency`` is how much
    of the account's Lambda concurrency may be reserved, None if that is not known.
    """

    name: str
    profile: Profile
    target: Target
    authorities: Authorities | None = None
    overrides: tuple[str, ...] = ()
    reservable_concurrency: int | None = None

    @property
    def api_concurrency(self) -> int:
        """The reserved concurrency of the API's function; 0 if the account has not enough, which then limits it."""
        wanted = self.profile.api.concurrency
        reservable = self.reservable_concurrency
        return wanted if reservable is None or wanted + RECONCILER_CONCURRENCY <= reservable else 0

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The profile's settings by section. A file's place says nothing to others: what is in it stands for it."""
        sections: dict[str, dict[str, Any]] = self.profile.model_dump(mode="json", exclude={"name"})
        if self.authorities is not None:
            digest = hashlib.sha256(self.authorities.pem.encode()).hexdigest()[:_DIGITS]
            sections["database"]["authorities"] = f"sha256:{digest}"
        return sections

    @property
    def verifies_database(self) -> bool:
        """Whether the database's certificate is checked."""
        return self.authorities is not None or self._fetches_authorities

    @property
    def _fetches_authorities(self) -> bool:
        return self.target.store_tls and is_address(self.profile.database.authorities)

    @property
    def keeps_data(self) -> bool:
        """Whether the data stores outlive the stack."""
        return self.profile.retention.keep_data and not self.target.deletable

    def packed(self, bundle: Bundle) -> Bundle:
        """``bundle`` with what this deployment puts into all of them. It cannot be built without the authorities that
        the profile gives an address of: they have to be fetched before."""
        if not self.verifies_database:
            return bundle
        pem = self.authorities.pem if self.authorities else ""
        return dataclasses.replace(bundle, texts=((AUTHORITIES_FILE, pem),))


def stack_name(deployment: str, part: str) -> str:
    """The name of one of the :data:`STACKS` of a deployment."""
    return f"{deployment}-{part}"


def deployment_from_context(context: Mapping[str, Any]) -> Deployment:
    """Read the deployment out of the CDK context (``-c key=value``).

    Keys: ``profile`` (default ``lab``), ``profiles`` (a TOML file), ``name`` (default ``farcall``; the prefix of the
    stacks' names, so that several deployments fit into one account), ``target`` (one of :data:`TARGETS`), and
    ``section.key`` for every setting of a profile, and ``reservable_concurrency`` (see :class:`Deployment`). Keys of
    anybody else's (CDK's have colons) are left alone. The file of the database's authorities is read, and nothing is
    fetched; the clock is looked at only to refuse those that have expired.

    :raises ConfigurationError: if one of them is wrong.
    """
    name = str(context.get("name") or "farcall")
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", name):
        raise ConfigurationError(f"{name!r} cannot be a deployment's name", hint="lower case letters, digits, hyphens")
    target_name = str(context.get("target") or "aws")
    if target_name not in TARGETS:
        raise ConfigurationError(f"there is no target {target_name!r}", hint=f"choose one of: {', '.join(TARGETS)}")
    profiles = context.get("profiles")
    overrides = _overrides(context)
    profile = load_profile(
        str(context.get("profile") or "lab"),
        path=Path(profiles) if profiles else DEFAULT_PROFILES,
        overrides=overrides,
    )
    file = profile.database.authorities
    reservable = context.get("reservable_concurrency")
    return Deployment(
        name=name,
        profile=profile,
        target=TARGETS[target_name],
        authorities=None if not file or is_address(file) else read_authorities(Path(file), now=dt.datetime.now(dt.UTC)),
        reservable_concurrency=None if reservable is None else int(reservable),
        overrides=tuple(sorted(overrides.keys() - _PATHS)),
    )


def _overrides(context: Mapping[str, Any]) -> dict[str, str]:
    """Whatever starts with the name of a section, known or not: a misspelt setting must not pass unnoticed."""
    sections = {setting.partition(".")[0] for setting in setting_names()}
    return {key: str(value) for key, value in context.items() if "." in key and key.partition(".")[0] in sections}
