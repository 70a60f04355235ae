"""Profiles: how large a cloud tier is, and how long it keeps things.

A profile is a table of ``profiles.toml``, checked here and never changed afterwards. Constructs take the section that
is about them (``DatabaseSize``, ``QueueSize`` …) and nothing else.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from farcall_common.errors import ConfigurationError

__all__ = [
    "DEFAULT_PROFILES",
    "ApiSize",
    "DatabaseSize",
    "ForwarderSize",
    "NetworkShape",
    "Profile",
    "QueueSize",
    "Retention",
    "load_profile",
]

DEFAULT_PROFILES: Final = Path(__file__).resolve().parents[1] / "profiles.toml"

# What Fargate sells: CPU units (1024 = one vCPU) and the memory in MiB that each may have.
_FARGATE_MEMORY_MIB: Final = {
    256: range(512, 2048 + 1, 512),
    512: range(1024, 4096 + 1, 1024),
    1024: range(2048, 8192 + 1, 1024),
    2048: range(4096, 16384 + 1, 1024),
    4096: range(8192, 30720 + 1, 1024),
}
# The retention periods that CloudWatch Logs accepts, as far as a service like this one has a use for them.
_LOG_DAYS: Final = (1, 3, 5, 7, 14, 30, 60, 90, 180, 365)


def _cidr(value: str) -> str:
    ipaddress.ip_network(value)
    return value


def _instance_type(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]+\.[a-z0-9]+", value):
        raise ValueError("an instance type looks like t4g.micro")
    return value


def _node_type(value: str) -> str:
    if not re.fullmatch(r"cache\.[a-z0-9-]+\.[a-z0-9]+", value):
        raise ValueError("a cache node type looks like cache.t4g.micro")
    return value


def _log_days(value: int) -> int:
    if value not in _LOG_DAYS:
        raise ValueError(f"CloudWatch Logs keeps logs for one of {_LOG_DAYS} days")
    return value


Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NetworkShape(_Section):
    """Who may reach the forwarder's port from outside the VPC."""

    forwarder_cidrs: tuple[Annotated[str, AfterValidator(_cidr)], ...] = Field(min_length=1)


class DatabaseSize(_Section):
    """The PostgreSQL instance."""

    instance_type: Annotated[str, AfterValidator(_instance_type)]
    storage_gib: Annotated[int, Field(ge=20)]
    multi_az: bool
    backup_days: Annotated[int, Field(ge=1, le=35)]


class QueueSize(_Section):
    """The Valkey replication group; more than one node means a replica in another zone and automatic fail-over."""

    node_type: Annotated[str, AfterValidator(_node_type)]
    nodes: Annotated[int, Field(ge=1, le=6)]


class ApiSize(_Section):
    """API Gateway's limits and the API function's size. 29 s is the longest that API Gateway waits by default."""

    memory_mib: Annotated[int, Field(ge=128, le=10240)]
    timeout_s: Annotated[int, Field(ge=1, le=29)]
    throttle_rate_per_s: Positive
    throttle_burst: Positive
    authorizer_cache_s: Annotated[int, Field(ge=0, le=3600)]


class ForwarderSize(_Section):
    """The Fargate service that holds the ZeroMQ connections."""

    cpu_units: int
    memory_mib: int
    tasks: Positive
    port: Port
    health_port: Port
    image: str

    def model_post_init(self, _context: object, /) -> None:
        if self.memory_mib not in _FARGATE_MEMORY_MIB.get(self.cpu_units, ()):
            raise ValueError(f"Fargate has no size of {self.cpu_units} CPU units with {self.memory_mib} MiB")
        if self.port == self.health_port:
            raise ValueError("the forwarder's port and its health port must differ")


class Retention(_Section):
    """How long things are kept, and whether the data stores outlive the stack."""

    keep_data: bool
    blob_days: Positive
    log_days: Annotated[int, AfterValidator(_log_days)]


class Profile(_Section):
    """One size of the whole cloud tier."""

    name: str
    network: NetworkShape
    database: DatabaseSize
    queue: QueueSize
    api: ApiSize
    forwarder: ForwarderSize
    retention: Retention


def load_profile(name: str, *, path: Path = DEFAULT_PROFILES) -> Profile:
    """Read the profile ``name`` from the TOML file at ``path``.

    :raises ConfigurationError: if the file is unreadable, the profile is not in it, or one of its values is wrong.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"cannot read the profiles in {path}: {error}") from error
    if name not in tables:
        raise ConfigurationError(
            f"there is no profile {name!r} in {path}", hint=f"choose one of: {', '.join(sorted(tables))}"
        )
    try:
        return Profile.model_validate({"name": name, **tables[name]})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigurationError(f"profile {name!r} in {path} is wrong: {problems}") from error
