"""What one deployment is: a name, a profile and a target.

The target is the only switch between AWS and the offline tier, and :data:`TARGETS` is the whole difference between the
two templates.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from farcall_common.errors import ConfigurationError
from farcall_infra.bundles import ARM64, HOST, WheelPlatform
from farcall_infra.profiles import DEFAULT_PROFILES, Profile, load_profile

__all__ = ["TARGETS", "Deployment", "Target", "deployment_from_context"]


@dataclasses.dataclass(frozen=True)
class Target:
    """Where the template is going to be deployed.

    ``wheels`` is the platform whose binary wheels go into the bundles, ``queue_tls`` is encryption in transit of the
    queue, ``ipv6`` lets what is in the private subnets call AWS (there is no NAT for IPv4),
    ``dev_tokens`` puts fixed tokens in the place of Globus Auth, and ``deletable`` lets everything, data included, go
    with the stack.
    """

    name: str
    wheels: WheelPlatform
    queue_tls: bool
    ipv6: bool
    dev_tokens: bool
    deletable: bool


TARGETS: Final = {
    "aws": Target("aws", wheels=ARM64, queue_tls=True, ipv6=True, dev_tokens=False, deletable=False),
    # The Valkey wheel has no TLS, LocalStack's CloudFormation has no Fn::Cidr, and there is no Globus offline.
    "localstack": Target("localstack", wheels=HOST, queue_tls=False, ipv6=False, dev_tokens=True, deletable=True),
}


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Everything that a synth depends on."""

    name: str
    profile: Profile
    target: Target

    @property
    def keeps_data(self) -> bool:
        """Whether the data stores outlive the stack."""
        return self.profile.retention.keep_data and not self.target.deletable


def deployment_from_context(lookup: Callable[[str], Any]) -> Deployment:
    """Read the deployment out of the CDK context (``-c key=value``).

    Keys: ``profile`` (default ``lab``), ``profiles`` (a TOML file), ``name`` (default ``farcall``; the prefix of the
    stacks' names, so that several deployments fit into one account) and ``target`` (``aws`` or ``localstack``).

    :raises ConfigurationError: if one of them is wrong.
    """
    name = str(lookup("name") or "farcall")
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", name):
        raise ConfigurationError(f"{name!r} cannot be a deployment's name", hint="lower case letters, digits, hyphens")
    target_name = str(lookup("target") or "aws")
    if target_name not in TARGETS:
        raise ConfigurationError(f"there is no target {target_name!r}", hint=f"choose one of: {', '.join(TARGETS)}")
    profiles = lookup("profiles")
    return Deployment(
        name=name,
        profile=load_profile(str(lookup("profile") or "lab"), path=Path(profiles) if profiles else DEFAULT_PROFILES),
        target=TARGETS[target_name],
    )
