"""Profiles: sizes, retention and budget of a cloud tier.

A profile is a table of ``profiles.toml``, validated here and immutable. Overrides replace single values
(``section.key`` to text, as ``-c`` passes them). Each construct takes only its own section (``DatabaseSize``,
``QueueSize`` …).
"""

from __future__ import annotations

import ipaddress
import math
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from farcall_common.database_logins import connection_limit
from farcall_common.errors import ConfigurationError
from farcall_common.limits import MAX_FILE_BYTES

#: The availability zones of a deployment. A synth without an account can name only two of a region.
ZONES: Final = 2
DEFAULT_PROFILES: Final = Path(__file__).resolve().with_name("profiles.toml")

# Fargate's sizes: CPU units (1024 = one vCPU) and the possible memory for each, in MiB.
_FARGATE_MEMORY_MIB: Final = {
    256: range(512, 2048 + 1, 512),
    512: range(1024, 4096 + 1, 1024),
    1024: range(2048, 8192 + 1, 1024),
    2048: range(4096, 16384 + 1, 1024),
    4096: range(8192, 30720 + 1, 1024),
}
# RDS refuses a maximum that is less than this many times the allocated storage.
_STORAGE_GROWTH: Final = 1.1
# The memory of a forwarder without connections, including buffered results, and the memory of one connected endpoint:
# 83 KiB were measured (docs/scale.md).
_FORWARDER_BASE_MIB: Final = 160
_CONNECTION_KIB: Final = 90
# A function that Lambda has ended keeps its connection for up to two minutes: after a release there are more
# connections than functions.
_CONNECTIONS_PER_REQUEST: Final = 1.5
# A rolling deployment starts as many tasks as there are.
_ROLLING_TASKS: Final = 2
#: The reserved concurrency of the reconciler, where the API has one.
RECONCILER_CONCURRENCY: Final = 1
#: Among the allowed identities: everyone.
EVERYONE: Final = "*"
# Lambda allows 4 KiB for all environment variables of a function.
_MAX_USER_CHARACTERS: Final = 2500
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# More is no number of bytes for a forwarder.
_MAX_STORED_BYTES: Final = 2**60
# Retention periods that CloudWatch Logs accepts, without the very long ones.
_LOG_DAYS: Final = (1, 3, 5, 7, 14, 30, 60, 90, 180, 365)


def _cidr(value: str) -> str:
    ipaddress.ip_network(value)
    return value


_ALL_IPV4: Final = ipaddress.ip_network("0.0.0.0/0")


def _private_cidr(value: str) -> str:
    if not ipaddress.ip_network(value).is_private:
        raise ValueError("workers reach the cache by private addresses only, such as 10.0.0.0/8")
    return value


def _instance_type(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]+\.[a-z0-9]+", value):
        raise ValueError("an instance type looks like t4g.micro")
    return value


def _node_type(value: str) -> str:
    if not re.fullmatch(r"cache\.[a-z0-9-]+\.[a-z0-9]+", value):
        raise ValueError("a cache node type looks like cache.t4g.micro")
    return value


def _authorities(value: str) -> str:
    if value.startswith("http:"):
        raise ValueError("the CA bundle is downloaded over https only")
    return value


def _email(value: str) -> str:
    if not re.fullmatch(r"[^@\s,]+@[^@\s,]+", value):
        raise ValueError("an e-mail address looks like ada@example.org")
    return value


def _domain(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", value.lower()):
        raise ValueError("a domain looks like example.org")
    return value.lower()


def _log_days(value: int) -> int:
    if value not in _LOG_DAYS:
        raise ValueError(f"CloudWatch Logs keeps logs for one of {_LOG_DAYS} days")
    return value


Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(ge=1)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NetworkShape(_Section):
    """The network: which addresses may reach the forwarder's port from outside the VPC, and whether a load balancer
    with fixed addresses is in front of it. Without one, each task has its own address, and peers get it from the API.

    ``zones`` are the two availability zones by name, or none for the first two of the region. They must not change
    after the network was created. With ``secrets_endpoint`` Secrets Manager has an address in the network, for regions
    where it does not answer over IPv6.
    """

    forwarder_cidrs: tuple[Annotated[str, AfterValidator(_cidr)], ...] = Field(min_length=1)
    load_balancer: bool
    secrets_endpoint: bool
    zones: tuple[Annotated[str, Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d[a-z]$")], ...]

    @property
    def admits_all(self) -> bool:
        """Whether every IPv4 address may reach the forwarder's port."""
        return any(ipaddress.ip_network(cidr) == _ALL_IPV4 for cidr in self.forwarder_cidrs)

    def model_post_init(self, _context: object, /) -> None:
        if self.zones and (len(self.zones) != ZONES or len(set(self.zones)) != ZONES):
            raise ValueError(f"name {ZONES} different zones, or none for the region's first {ZONES}")


class DatabaseSize(_Section):
    """The PostgreSQL instance. ``connections`` is its connection limit; plan 10 MiB of its memory for each connection.

    RDS enlarges the disk from ``storage_gib`` up to ``max_storage_gib`` when less than a tenth of it is free, at most
    once in six hours; 0 disables this. ``version`` is the major version of PostgreSQL. RDS changes it in place if
    ``major_upgrade`` allows it.

    ``snapshot`` names the snapshot that the instance is restored from, or is empty for a new database. It must not
    change after the instance was created: CloudFormation would replace the instance. ``authorities`` is a PEM file of
    the certificate authorities that may sign the instance's certificate: an https URL that `farcall cloud deploy`
    downloads it from, or a path relative to the working directory. If it is empty, the certificate is not checked.
    """

    instance_type: Annotated[str, AfterValidator(_instance_type)]
    connections: Annotated[int, Field(ge=20, le=5000)]
    storage_gib: Annotated[int, Field(ge=20)]
    max_storage_gib: Annotated[int, Field(ge=0)]
    version: Literal["16", "17"]
    major_upgrade: bool
    multi_az: bool
    backup_days: Annotated[int, Field(ge=1, le=35)]
    snapshot: Annotated[str, Field(pattern=r"^[A-Za-z0-9:-]*$")]
    authorities: Annotated[str, AfterValidator(_authorities)]

    def model_post_init(self, _context: object, /) -> None:
        if self.max_storage_gib and self.max_storage_gib < _STORAGE_GROWTH * self.storage_gib:
            raise ValueError(
                f"max_storage_gib must be 0 or at least {_STORAGE_GROWTH} times storage_gib, the smallest step that RDS"
                " allows"
            )

    @property
    def capacity_gib(self) -> int:
        """The largest size of the disk with automatic growth."""
        return max(self.storage_gib, self.max_storage_gib)


class QueueSize(_Section):
    """The Valkey replication group. With ``failover`` a replica in another zone replaces a lost node.

    Fail-over is a separate setting because CloudFormation cannot add the first replica and turn it on in one update.
    """

    node_type: Annotated[str, AfterValidator(_node_type)]
    nodes: Annotated[int, Field(ge=1, le=6)]
    failover: bool

    def model_post_init(self, _context: object, /) -> None:
        if self.failover and self.nodes == 1:
            raise ValueError("fail-over needs a second node")


class ApiSize(_Section):
    """API Gateway's limits and the API function's size. API Gateway's default time limit is 29 s.

    ``concurrency`` is the function's reserved concurrency: the number of requests that it handles at once, each with a
    database connection. The reconciler reserves 1 more, and the authorizer ``authorizer_concurrency``: so many tokens
    are checked at once, however many unknown ones arrive. With 0 ``concurrency`` nothing is reserved. A ``gradual``
    release gets a tenth of the requests first, and none after an alarm.
    """

    memory_mib: Annotated[int, Field(ge=128, le=10240)]
    timeout_s: Annotated[int, Field(ge=1, le=29)]
    concurrency: Annotated[int, Field(ge=0)]
    authorizer_concurrency: Positive
    throttle_rate_per_s: Positive
    throttle_burst: Positive
    authorizer_cache_s: Annotated[int, Field(ge=0, le=3600)]
    gradual: bool

    @property
    def reserved_concurrency(self) -> int:
        """The concurrency that is reserved for all functions; 0 if none is."""
        return self.concurrency and self.concurrency + self.authorizer_concurrency + RECONCILER_CONCURRENCY


class ForwarderSize(_Section):
    """The Fargate service that holds the ZeroMQ connections. With 0 ``tasks`` the service is stopped. ``spot`` tasks
    cost a third; AWS may stop them with two minutes' notice, which is enough to drain.

    After ``idle_minutes`` without a connection the service scales to zero, until the next client or endpoint connects;
    0 disables this. ``code`` is where the tasks get their code from: the deployment's ``bundle`` for a stock image,
    or the ``image``.
    """

    cpu_units: int
    memory_mib: int
    tasks: Annotated[int, Field(ge=0, le=1000)]
    idle_minutes: Annotated[int, Field(ge=0, le=24 * 60)]
    spot: bool
    database_connections: Annotated[int, Field(ge=2, le=50)]
    port: Port
    health_port: Port
    image: Annotated[str, Field(pattern=r"^[a-z0-9.-]+(:\d+)?/[a-z0-9._/-]+(:[\w.-]+)?(@sha256:[0-9a-f]{64})?$")]
    code: Literal["bundle", "image"]

    def model_post_init(self, _context: object, /) -> None:
        if self.memory_mib not in _FARGATE_MEMORY_MIB.get(self.cpu_units, ()):
            raise ValueError(f"Fargate has no size of {self.cpu_units} CPU units with {self.memory_mib} MiB")
        if self.port == self.health_port:
            raise ValueError("the forwarder's port and its health port must differ")

    @property
    def connections(self) -> int:
        """The number of connections that fit into the memory of a task."""
        return (self.memory_mib - _FORWARDER_BASE_MIB) * 1024 // _CONNECTION_KIB

    @property
    def most_database_connections(self) -> int:
        """The number of database connections of all tasks during a rolling deployment."""
        return _ROLLING_TASKS * self.tasks * self.database_connections

    @property
    def sleeps(self) -> bool:
        """Whether the service scales to zero when it is idle."""
        return self.tasks > 0 and self.idle_minutes > 0


class CanarySchedule(_Section):
    """The canary's interval in minutes: how often it sends a task through the deployment; 0 for never. It needs a
    running forwarder."""

    minutes: Annotated[int, Field(ge=0, le=60)]

    def model_post_init(self, _context: object, /) -> None:
        if self.minutes == 1:
            raise ValueError("a run can take almost two minutes when something fails: choose 2 or more, or 0")


class IdentitySource(_Section):
    """The identity provider, and which of its users may use the deployment: only those that are named.

    The provider is an OpenID Connect issuer (its URL, as in its tokens) with the audience of its tokens, and the
    clients (``*`` for any) or the scope of tokens that were made for Farcall; or Globus Auth if these are empty.

    ``allowed_identities`` and ``admins`` are identity ids or verified user names (``*`` among the first for everyone
    that the provider knows), ``allowed_domains`` the domains of verified user names, and ``allowed_groups`` ids of
    Globus Groups, or names in the issuer's claim ``groups``. Objects can be shared with all groups of an
    issuer, and with those of Globus Groups if some are named here or ``share_with_groups`` is set; the scope in Globus
    Auth then depends on that of Globus Groups.
    """

    oidc_issuer: Annotated[str, Field(pattern=r"^(https://\S+)?$")]
    oidc_audience: Annotated[str, Field(pattern=r"^\S*$")]
    oidc_clients: tuple[Annotated[str, Field(pattern=r"^[^\s,]+$")], ...]
    oidc_scope: Annotated[str, Field(pattern=r"^\S*$")]
    oidc_groups_claim: Annotated[str, Field(pattern=r"^\S+$")]
    allowed_identities: tuple[Annotated[str, Field(pattern=r"^(\*|[^\s,*]+)$")], ...]
    allowed_domains: tuple[Annotated[str, AfterValidator(_domain)], ...]
    allowed_groups: tuple[Annotated[str, Field(pattern=r"^[^,*]+$")], ...]
    admins: tuple[Annotated[str, Field(pattern=r"^[^\s,*]+$")], ...]
    share_with_groups: bool

    def model_post_init(self, _context: object, /) -> None:
        if bool(self.oidc_issuer) != bool(self.oidc_audience):
            raise ValueError("set both oidc_issuer and oidc_audience, or neither")
        if self.oidc_issuer and not (self.oidc_clients or self.oidc_scope):
            raise ValueError(
                "oidc_clients or oidc_scope is needed: without them, a token of any other program would be accepted"
            )
        if not self.oidc_issuer:
            if self.oidc_clients or self.oidc_scope:
                raise ValueError("oidc_clients and oidc_scope are for an oidc_issuer")
            if wrong := [group for group in self.allowed_groups if not _UUID.fullmatch(group)]:
                raise ValueError(f"{wrong[0]!r} is not the id of a group in Globus Groups")
        if sum(map(len, self.environment().values())) > _MAX_USER_CHARACTERS:
            raise ValueError(
                f"the users are more than {_MAX_USER_CHARACTERS} characters, too many for a function's settings: make"
                " a group of them, and name that in allowed_groups"
            )

    @property
    def allows_no_one(self) -> bool:
        """Whether no one may use the deployment."""
        return not (self.allowed_identities or self.allowed_domains or self.allowed_groups or self.admins)

    @property
    def allows_everyone(self) -> bool:
        """Whether everyone that the provider knows may."""
        return EVERYONE in self.allowed_identities

    def environment(self) -> dict[str, str]:
        """The authorizer's environment variables that say who may use the deployment."""
        return {
            "FARCALL_ALLOWED_IDENTITIES": ",".join(self.allowed_identities),
            "FARCALL_ALLOWED_DOMAINS": ",".join(self.allowed_domains),
            "FARCALL_ALLOWED_GROUPS": ",".join(self.allowed_groups),
            "FARCALL_ADMINS": ",".join(self.admins),
            "FARCALL_READ_GROUPS": "true" if self.share_with_groups or self.oidc_issuer else "",
        }


class Retention(_Section):
    """Retention of blobs and logs, and whether the data stores outlive the stack."""

    keep_data: bool
    blob_days: Positive
    log_days: Annotated[int, AfterValidator(_log_days)]


Percent = Annotated[float, Field(gt=0, le=100)]


class Limits(_Section):
    """Limits of the API, by the names of ``farcall_lambdas.settings``: days that a finished task and an audit entry are
    kept, days that a task may wait for its start, waiting tasks for one endpoint and for one identity, parts of the
    queue's memory that may be used when tasks are submitted and by the tasks of one identity, requests of one
    identity per second and in a burst, and bytes that one identity adds in a day.

    The forwarder counts files of other endpoints among these bytes, and has a limit of its own: bytes of such a file.
    """

    retention_days: PositiveNumber
    max_wait_days: PositiveNumber
    audit_days: PositiveNumber
    max_queue_depth: Positive
    max_waiting: Positive
    max_memory_percent: Percent
    max_identity_memory_percent: Percent
    rate_per_s: PositiveNumber
    rate_burst: Positive
    max_stored_bytes_per_day: Annotated[int, Field(ge=1, le=_MAX_STORED_BYTES)]
    max_relay_bytes: Annotated[int, Field(ge=1, le=MAX_FILE_BYTES)]

    def environment(self) -> dict[str, str]:
        """The environment variables of the API and the reconciler."""
        return self._variables(exclude={"max_relay_bytes"})

    def forwarder_environment(self) -> dict[str, str]:
        """The environment variables of the forwarder: it takes bytes of a day from the bucket of the API."""
        return self._variables(include={"max_stored_bytes_per_day", "max_relay_bytes"})

    def _variables(self, *, include: set[str] | None = None, exclude: set[str] | None = None) -> dict[str, str]:
        values = self.model_dump(include=include, exclude=exclude)
        return {
            f"FARCALL_{name.upper()}": str(value) if isinstance(value, int) else f"{value:.15g}"
            for name, value in values.items()
        }


class AnalyticsStorage(_Section):
    """The storage of exchanges of farcall-analytics, in a stack of its own if ``enabled``: a bucket, and if the
    settings ask for them a directory bucket of S3 Express One Zone in ``express_zone`` (the id of a zone), and a Valkey
    of ElastiCache Serverless for at most ``cache_gb`` and ``cache_ecpu_per_s`` (one unit for each KB that is moved).

    The Valkey is created on demand, and deleted after ``idle_minutes`` without traffic. Its port is open to instances
    in the group of workers, and to the private addresses ``worker_cidrs`` of connected networks.
    """

    enabled: bool
    express_zone: Annotated[str, Field(pattern=r"^([a-z]{2,4}\d-az\d)?$")]
    cache_gb: Annotated[int, Field(ge=0, le=5000)]
    cache_ecpu_per_s: Annotated[int, Field(ge=1000, le=15_000_000)]
    idle_minutes: Annotated[int, Field(ge=5, le=24 * 60)]
    worker_cidrs: tuple[Annotated[str, AfterValidator(_private_cidr)], ...]


class Budget(_Section):
    """Budget in US dollars per month. ``idle_usd`` is an upper limit of the profile's idle cost, checked by a test.
    ``monthly_usd`` is the limit that AWS Budgets compares the account's real bill with, 0 for no budget. ``emails``
    receive alarms and the budget's warnings."""

    idle_usd: Annotated[float, Field(gt=0)]
    monthly_usd: Annotated[float, Field(ge=0)]
    emails: tuple[Annotated[str, AfterValidator(_email)], ...]

    def model_post_init(self, _context: object, /) -> None:
        if 0 < self.monthly_usd < self.idle_usd:
            raise ValueError("monthly_usd is below idle_usd: the idle cost alone would exceed the budget")


class Profile(_Section):
    """One size of the whole cloud tier."""

    name: str
    network: NetworkShape
    database: DatabaseSize
    queue: QueueSize
    api: ApiSize
    forwarder: ForwarderSize
    canary: CanarySchedule
    identity: IdentitySource
    retention: Retention
    limits: Limits
    analytics: AnalyticsStorage
    budget: Budget

    def model_post_init(self, _context: object, /) -> None:
        # An argument is needed until the task starts, a result as long as its task is kept.
        needed_days = math.ceil(self.limits.max_wait_days + self.limits.retention_days) + 1
        if self.retention.blob_days < needed_days:
            raise ValueError(
                f"retention.blob_days is {self.retention.blob_days}: blobs would expire before their tasks. It must be"
                f" at least {needed_days}, which is limits.max_wait_days + limits.retention_days + 1"
            )
        if self.limits.rate_per_s > self.api.throttle_rate_per_s:
            raise ValueError("limits.rate_per_s is above api.throttle_rate_per_s: one identity could use the whole API")
        most = int(connection_limit("farcall_api", self.database.connections) / _CONNECTIONS_PER_REQUEST)
        if self.api.concurrency > most:
            raise ValueError(
                f"api.concurrency is {self.api.concurrency}, but {self.database.connections} database connections are"
                f" enough for {most}, with those that ended functions leave behind"
            )
        most = connection_limit("farcall_forwarder", self.database.connections)
        if self.forwarder.most_database_connections > most:
            raise ValueError(
                f"{self.forwarder.tasks} forwarders need {self.forwarder.most_database_connections} database"
                f" connections during a rolling deployment, but {self.database.connections} leave {most} for them:"
                " raise database.connections, or lower forwarder.tasks or forwarder.database_connections"
            )
        if self.forwarder.sleeps and 0 < self.canary.minutes <= self.forwarder.idle_minutes:
            raise ValueError(
                "the canary would keep the forwarder awake: set canary.minutes or forwarder.idle_minutes to 0"
            )
        if self.canary.minutes and not self.network.admits_all:
            raise ValueError(
                "network.forwarder_cidrs keeps the canary out, which connects from changing addresses of AWS Lambda:"
                " set canary.minutes to 0, and run `python -m farcall_lambdas.canary` by a timer at one of your sites"
            )

    def api_environment(self) -> dict[str, str]:
        """The environment variables that pass the limits to the API and the reconciler."""
        return self.limits.environment() | {"FARCALL_DATABASE_BYTES": str(self.database.capacity_gib * 2**30)}


def profile_names(path: Path = DEFAULT_PROFILES) -> tuple[str, ...]:
    """The profiles of the TOML file at ``path``.

    :raises ConfigurationError: if the file is unreadable.
    """
    return tuple(_tables(path))


def setting_names() -> frozenset[str]:
    """Every ``section.key`` that an override may name."""
    return frozenset(f"{section}.{key}" for section, model in _sections().items() for key in model.model_fields)


def load_profile(name: str, *, path: Path = DEFAULT_PROFILES, overrides: Mapping[str, str] | None = None) -> Profile:
    """Read the profile ``name`` from the TOML file at ``path``, with ``overrides`` in place of some of its values.

    The values of overrides are text as on a command line; a list is separated by commas.

    :raises ConfigurationError: if the file is unreadable, the profile is not in it, or one of its values or overrides
        is invalid.
    """
    tables = _tables(path)
    if name not in tables:
        raise ConfigurationError(
            f"there is no profile {name!r} in {path}", hint=f"Choose one of: {', '.join(sorted(tables))}."
        )
    table: dict[str, Any] = {"name": name, **tables[name]}
    for setting, text in (overrides or {}).items():
        if setting not in setting_names():
            raise ConfigurationError(
                f"unknown setting {setting!r}", hint=f"Settings: {', '.join(sorted(setting_names()))}."
            )
        section, _, key = setting.partition(".")
        table[section] = {**table.get(section, {}), key: _parsed(section, key, text)}
    try:
        return Profile.model_validate(table)
    except ValidationError as error:
        missing = [".".join(map(str, e["loc"])) for e in error.errors() if e["type"] == "missing"]
        if missing and path != DEFAULT_PROFILES:
            raise ConfigurationError(
                f"profile {name!r} in {path} lacks {', '.join(missing)}",
                hint=f"A later release added them. Copy them from {DEFAULT_PROFILES}; its comments explain them.",
            ) from error
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigurationError(f"profile {name!r} in {path} is invalid: {problems}") from error


def _tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"cannot read the profiles in {path}: {error}") from error


def _sections() -> dict[str, type[_Section]]:
    return {
        name: field.annotation
        for name, field in Profile.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Section)
    }


def _parsed(section: str, key: str, text: str) -> str | list[str]:
    """Pydantic reads numbers and booleans from text; only a list has to be split."""
    annotation = _sections()[section].model_fields[key].annotation
    if typing.get_origin(annotation) is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text
