"""A deployment: a name, a profile and a target.

The target is the only switch between AWS and the offline tier; :data:`TARGETS` lists every difference between the two
templates.
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
from farcall_infra.bundles import ARM64, HOST, X86_64, Bundle, WheelPlatform
from farcall_infra.ca_bundle import CA_BUNDLE_FILE, CaBundle, is_https_url, read_ca_bundle
from farcall_infra.profiles import DEFAULT_PROFILES, Profile, load_profile, setting_names
from farcall_infra.regions import BUDGET_REGIONS

#: The stacks of a deployment, in the order in which they are created.
STACKS: Final = ("network", "data", "api", "forwarder", "observability")
#: Stacks that only some settings ask for; they are created after the others, and deleted before them.
OPTIONAL_STACKS: Final = ("analytics",)
#: The tag of every resource of a deployment; its value is the deployment's name.
DEPLOYMENT_TAG: Final = "farcall:deployment"
#: Outputs of the data stack: the profile, its settings (one output for each section, as JSON), and the names of those
#: given on the command line.
PROFILE_OUTPUT: Final = "Profile"
SETTINGS_OUTPUT: Final = "Settings"
OVERRIDES_OUTPUT: Final = "Overrides"
#: The output of the data stack with the name of its target, where that is not AWS.
TARGET_OUTPUT: Final = "Target"
#: Outputs of the data stack with the secret of each program's database login (``LoginApi``), and of the API's stack
#: with the function that migrates the database.
LOGIN_OUTPUT: Final = "Login"
MIGRATOR_OUTPUT: Final = "Migrator"
#: Outputs of the analytics stack: addresses of the bucket and of the one in S3 Express, the function that creates and
#: deletes the cache, the cache's name, and the security group of workers.
STORAGE_OUTPUT: Final = "Storage"
EXPRESS_OUTPUT: Final = "ExpressStorage"
CACHE_FUNCTION_OUTPUT: Final = "CacheFunction"
CACHE_NAME_OUTPUT: Final = "CacheName"
#: The default of the parameter for the secret of the Globus client: an ARN of no secret. A policy needs an ARN.
NO_GLOBUS_SECRET: Final = "arn:aws:secretsmanager:us-east-1:000000000000:secret:none"  # noqa: S105
#: Settings that are paths, which `farcall cloud deploy` overrides with absolute ones.
_PATHS: Final = frozenset({"database.authorities"})
_DIGITS: Final = 12
#: The tag of a service that scales to zero when it is idle; the idle price depends on it.
SLEEPS_TAG: Final = "farcall:sleeps"


@dataclasses.dataclass(frozen=True)
class Target:
    """The environment that a template is for.

    ``wheels`` is the platform of the binary wheels in the bundles. ``store_tls`` encrypts connections to database and
    queue. ``ipv6`` lets programs in the private subnets call AWS (there is no NAT for IPv4). ``dev_tokens`` replaces
    Globus Auth by fixed tokens. ``checked`` runs cdk-nag on the templates. ``observed`` adds the stack of alarms and
    dashboard. ``serverless`` is whether there are ElastiCache Serverless and S3 Express. ``deletable`` deletes
    everything, data included, with the stack.
    """

    name: str
    wheels: WheelPlatform
    store_tls: bool
    ipv6: bool
    dev_tokens: bool
    checked: bool
    observed: bool
    serverless: bool
    deletable: bool


_AWS: Final = Target(
    "aws",
    wheels=ARM64,
    store_tls=True,
    ipv6=True,
    dev_tokens=False,
    checked=True,
    observed=True,
    serverless=True,
    deletable=False,
)
# The wheels of PostgreSQL and Valkey have no TLS, LocalStack's CloudFormation has no Fn::Cidr, its core has no
# dashboards, budgets, serverless caches or directory buckets, and there is no Globus offline.
_LOCALSTACK: Final = Target(
    "localstack",
    wheels=HOST,
    store_tls=False,
    ipv6=False,
    dev_tokens=True,
    checked=False,
    observed=False,
    serverless=False,
    deletable=True,
)
TARGETS: Final = {
    target.name: target
    for target in (
        _AWS,
        _LOCALSTACK,
        # A LocalStack that runs functions and tasks in containers, from Lambda's image for that processor.
        *(dataclasses.replace(_LOCALSTACK, name=f"localstack-{each.name}", wheels=each) for each in (ARM64, X86_64)),
    )
}


def expected_stacks(target: str) -> tuple[str, ...]:
    """The stacks of a deployment on the target of that name; an unknown or empty name is AWS."""
    observed = TARGETS.get(target, _AWS).observed
    return STACKS if observed else tuple(part for part in STACKS if part != "observability")


@dataclasses.dataclass(frozen=True)
class Deployment:
    """All inputs of a synth.

    ``ca_bundle`` is that of the database, None if its certificate is not checked or the file is not downloaded yet.
    ``overrides`` names the settings that do not come from the profile's table. ``reservable_concurrency`` is how much
    of the account's Lambda concurrency may be reserved, None if that is unknown. ``region`` is empty for templates that
    are for any region with all resource types.
    """

    name: str
    profile: Profile
    target: Target
    ca_bundle: CaBundle | None = None
    overrides: tuple[str, ...] = ()
    reservable_concurrency: int | None = None
    region: str = ""

    @property
    def lacks_budget(self) -> bool:
        """Whether the profile has a budget that the region's CloudFormation cannot create."""
        return bool(self.profile.budget.monthly_usd and self.region and self.region not in BUDGET_REGIONS)

    @property
    def shifts_traffic(self) -> bool:
        """Whether releases of the API are gradual, and return to the old one after an alarm."""
        return self.profile.api.gradual and self.target.observed

    @property
    def api_concurrency(self) -> int:
        """The reserved concurrency of the API's function; 0 if the account has too little, whose limit then applies."""
        size, reservable = self.profile.api, self.reservable_concurrency
        return size.concurrency if reservable is None or size.reserved_concurrency <= reservable else 0

    @property
    def authorizer_concurrency(self) -> int:
        """The reserved concurrency of the authorizer; 0 if nothing is reserved for the API."""
        return self.profile.api.authorizer_concurrency if self.api_concurrency else 0

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The profile's settings by section. A file is represented by a digest of its contents, not by its path."""
        sections: dict[str, dict[str, Any]] = self.profile.model_dump(mode="json", exclude={"name"})
        if self.ca_bundle is not None:
            digest = hashlib.sha256(self.ca_bundle.pem.encode()).hexdigest()[:_DIGITS]
            sections["database"]["authorities"] = f"sha256:{digest}"
        return sections

    @property
    def verifies_database(self) -> bool:
        """Whether the database's certificate is checked."""
        return self.ca_bundle is not None or self.lacks_ca_bundle

    @property
    def lacks_ca_bundle(self) -> bool:
        """Whether the CA bundle of the database has to be downloaded before the bundles are built."""
        return self.ca_bundle is None and self.target.store_tls and is_https_url(self.profile.database.authorities)

    @property
    def keeps_data(self) -> bool:
        """Whether the data stores outlive the stack."""
        return self.profile.retention.keep_data and not self.target.deletable

    def packed(self, bundle: Bundle) -> Bundle:
        """``bundle`` with the files that this deployment adds to every bundle. If the profile gives a URL of the CA
        bundle, that has to be downloaded before the build."""
        if not self.verifies_database:
            return bundle
        pem = self.ca_bundle.pem if self.ca_bundle else ""
        return dataclasses.replace(bundle, texts=((CA_BUNDLE_FILE, pem),))


def stack_name(deployment: str, part: str) -> str:
    """The name of one of the :data:`STACKS` of a deployment."""
    return f"{deployment}-{part}"


def deployment_from_context(context: Mapping[str, Any]) -> Deployment:
    """Read the deployment out of the CDK context (``-c key=value``).

    Keys: ``profile`` (default ``lab``), ``profiles`` (a TOML file), ``name`` (default ``farcall``; the prefix of the
    stacks' names, so that several deployments fit into one account), ``target`` (one of :data:`TARGETS`), and
    ``section.key`` for every setting of a profile, and ``reservable_concurrency`` and ``region`` (see
    :class:`Deployment`). Other keys
    (CDK's own have colons) are ignored. A file with the database's CA bundle is read; nothing is downloaded. The clock
    is read only to refuse expired certificates.

    :raises ConfigurationError: if one of them is wrong.
    """
    name = str(context.get("name") or "farcall")
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", name):
        raise ConfigurationError(
            f"{name!r} is not a valid deployment name", hint="Use lower case letters, digits and hyphens."
        )
    target_name = str(context.get("target") or "aws")
    if target_name not in TARGETS:
        raise ConfigurationError(f"unknown target {target_name!r}", hint=f"Choose one of: {', '.join(TARGETS)}.")
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
        ca_bundle=None if not file or is_https_url(file) else read_ca_bundle(Path(file), now=dt.datetime.now(dt.UTC)),
        reservable_concurrency=None if reservable is None else int(reservable),
        overrides=tuple(sorted(overrides.keys() - _PATHS)),
        region=str(context.get("region") or ""),
    )


def _overrides(context: Mapping[str, Any]) -> dict[str, str]:
    """Every key that starts with a section's name, known or not: a misspelt setting must be reported."""
    sections = {setting.partition(".")[0] for setting in setting_names()}
    return {key: str(value) for key, value in context.items() if "." in key and key.partition(".")[0] in sections}
