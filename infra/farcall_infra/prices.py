"""Prices of AWS: ``prices.toml`` as a validated, immutable value."""

from __future__ import annotations

import datetime as dt
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from farcall_common.errors import ConfigurationError

DEFAULT_PRICES: Final = Path(__file__).resolve().with_name("prices.toml")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Database(_Section):
    storage_usd_per_gib_month: float
    backup_usd_per_gib_month: float
    instance_usd_per_hour: Mapping[str, float]


class _Queue(_Section):
    node_usd_per_hour: Mapping[str, float]


class _Fargate(_Section):
    cpu_usd_per_hour: float
    memory_usd_per_gib_hour: float
    spot_share: float


class _Network(_Section):
    address_usd_per_hour: float
    balancer_usd_per_hour: float
    balancer_unit_usd_per_hour: float
    endpoint_usd_per_hour: float
    egress_usd_per_gb: float
    cross_zone_usd_per_gb: float


class _Secrets(_Section):
    secret_usd_per_month: float
    call_usd_per_10000: float


class _Api(_Section):
    request_usd_per_million: float


class _Functions(_Section):
    request_usd_per_million: float
    usd_per_gb_second: float


class _Blobs(_Section):
    put_usd_per_million: float
    get_usd_per_million: float
    storage_usd_per_gb_month: float


class _Express(_Section):
    put_usd_per_million: float
    get_usd_per_million: float
    written_usd_per_gb: float
    read_usd_per_gb: float
    storage_usd_per_gb_month: float


class _Cache(_Section):
    usd_per_gb_hour: float
    least_gb: float
    ecpu_usd_per_million: float
    bytes_per_ecpu: int


class _Exchange(_Section):
    tasks: int
    kept_hours: float


class _Monitoring(_Section):
    log_usd_per_gb: float
    metric_usd_per_month: float
    free_metrics: int
    alarm_usd_per_month: float
    free_alarms: int
    dashboard_usd_per_month: float
    free_dashboards: int


class _Idle(_Section):
    run_s: float
    canary_s: float
    log_bytes_per_run: int
    secret_reads_per_hour: float


class _Use(_Section):
    requests_per_batch: int
    request_s: float
    request_s_per_task: float
    log_bytes_per_request: int
    egress_bytes_per_task: int
    cross_zone_bytes_per_task: int
    database_bytes_per_task: int
    wal_bytes_per_task: int


class _Free(_Section):
    types: frozenset[str]


class Prices(_Section):
    """The whole table; every price has its unit in its name. ``sources`` and ``as_of`` are where and when it was
    read."""

    region: str
    as_of: dt.date
    sources: tuple[str, ...]
    hours_per_month: float
    database: _Database
    queue: _Queue
    fargate: _Fargate
    network: _Network
    secrets: _Secrets
    api: _Api
    functions: _Functions
    blobs: _Blobs
    express: _Express
    cache: _Cache
    monitoring: _Monitoring
    idle: _Idle
    use: _Use
    exchange: _Exchange
    free: _Free


def load_prices(path: Path = DEFAULT_PRICES) -> Prices:
    """Read the price table.

    :raises ConfigurationError: if the file is unreadable, or not a valid price table.
    """
    try:
        return Prices.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, ValidationError) as error:
        raise ConfigurationError(f"cannot read the prices in {path}: {error}") from error
