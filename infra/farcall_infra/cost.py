"""Cost estimate of a deployment, from its synthesised templates and a price table. Pure: no AWS, no clock, no files.

The idle bill lists the cost of a month without use, item by item. A resource whose type or size has no price is an
error, and never free: otherwise an expensive new resource would go unnoticed.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

from farcall_common.errors import ConfigurationError
from farcall_infra.deployment import SLEEPS_TAG
from farcall_infra.prices import Prices

Template = Mapping[str, Any]
Properties = Mapping[str, Any]

_MINUTES_PER_HOUR: Final = 60
_GB: Final = 10**9
_MIB_PER_GIB: Final = 1024
_UNITS_PER_VCPU: Final = 1024
_MILLION: Final = 10**6
_GIB: Final = 2**30
_DAYS_PER_MONTH: Final = 30
_GB_PER_TB: Final = 1000
_ANALYTICS: Final = "-analytics"
#: Values of the dimension of the metric of refusals, each of which is a metric: farcall_infra.constructs.metrics.
REASONS: Final = 3


class _Requests(Protocol):
    """Prices of requests to a storage."""

    @property
    def put_usd_per_million(self) -> float: ...

    @property
    def get_usd_per_million(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class Item:
    """One line of a bill: US dollars per month for something of a stack."""

    stack: str
    what: str
    usd: float


@dataclasses.dataclass(frozen=True)
class Bill:
    """The cost of a month."""

    items: tuple[Item, ...]

    @property
    def usd(self) -> float:
        """The sum, in US dollars per month."""
        return sum(item.usd for item in self.items)


def idle_bill(templates: Mapping[str, Template], prices: Prices) -> Bill:
    """The monthly cost of the stacks of ``templates`` (by name) without any use.

    :raises ConfigurationError: if ``prices`` has no price for one of the resources.
    """
    items: list[Item] = []
    counts: Counter[str] = Counter()
    for stack, template in templates.items():
        for name, resource in template["Resources"].items():
            kind = resource["Type"]
            counts[kind] += _billed(kind, resource["Properties"])
            if kind in prices.free.types or kind in _BY_NUMBER:
                continue
            if kind not in _PRICERS:
                raise _unpriced(f"{stack}/{name}, a {kind}")
            items += (Item(stack, what, usd) for what, usd in _PRICERS[kind](resource["Properties"], template, prices))
    items += (Item("all stacks", what, usd) for what, usd in _by_number(counts, prices))
    return Bill(tuple(items))


def price_per_million_tasks(
    templates: Mapping[str, Template], prices: Prices, *, batch: int, blobs: bool = False
) -> float:
    """US dollars for a million small tasks that are submitted, and whose results are read, ``batch`` at a time.

    That includes their storage in the database and its backups until they are deleted. With ``blobs``, arguments and
    result of each task go through the blob store. Costs that do not depend on the number of tasks are in the idle bill.
    """
    use = prices.use
    memory_gb = _api_memory_mib(templates) / _MIB_PER_GIB
    requests = use.requests_per_batch / batch
    seconds = requests * (use.request_s + use.request_s_per_task * batch / use.requests_per_batch)
    per_task = (
        requests * (prices.api.request_usd_per_million + prices.functions.request_usd_per_million) / _MILLION
        + seconds * memory_gb * prices.functions.usd_per_gb_second
        + requests * use.log_bytes_per_request / _GB * prices.monitoring.log_usd_per_gb
        + use.egress_bytes_per_task / _GB * prices.network.egress_usd_per_gb
    )
    per_task += _database_usd_per_task(templates, prices)
    per_task += use.cross_zone_bytes_per_task / _GB * prices.network.cross_zone_usd_per_gb
    if blobs:
        per_task += 2 * (prices.blobs.put_usd_per_million + prices.blobs.get_usd_per_million) / _MILLION
    return per_task * _MILLION


def exchange_prices(templates: Mapping[str, Template], prices: Prices) -> Mapping[str, float]:
    """US dollars of exchanges of analytics through the storages in ``templates``, by what they are for; empty without
    such a stack."""
    stack = next((template for name, template in templates.items() if name.endswith(_ANALYTICS)), None)
    return dict(_exchange_lines(stack, prices)) if stack else {}


def _exchange_lines(stack: Template, prices: Prices) -> Iterator[tuple[str, float]]:
    tasks, hours = prices.exchange.tasks, prices.exchange.kept_hours
    months = hours / prices.hours_per_month
    shuffle = f"a TB shuffled by {tasks:,} tasks"
    requests = f"{tasks:,} writes and {tasks**2:,} reads"
    kinds = {resource["Type"] for resource in stack["Resources"].values()}
    yield f"{shuffle} through the bucket: {requests}", _requests_usd(prices.blobs, tasks)
    yield f"storage of it for {hours:g} h", _GB_PER_TB * months * prices.blobs.storage_usd_per_gb_month
    if "AWS::S3Express::DirectoryBucket" in kinds:
        express = prices.express
        yield f"{shuffle} through S3 Express: {requests}", _requests_usd(express, tasks)
        yield "bytes written to and read from it", _GB_PER_TB * (express.written_usd_per_gb + express.read_usd_per_gb)
        yield f"storage of it in S3 Express for {hours:g} h", _GB_PER_TB * months * express.storage_usd_per_gb_month
    if any(_keeps_cache(resource) for resource in stack["Resources"].values()):
        cache = prices.cache
        ecpu = 2 * _GB_PER_TB * _GB / cache.bytes_per_ecpu
        yield "a TB written to and read from the Valkey: processing units", ecpu / _MILLION * cache.ecpu_usd_per_million
        yield "a GB in the Valkey for an hour", cache.usd_per_gb_hour
        yield f"the Valkey for an hour without use: {cache.least_gb:g} GB", cache.least_gb * cache.usd_per_gb_hour


def _requests_usd(service: _Requests, tasks: int) -> float:
    return (tasks * service.put_usd_per_million + tasks**2 * service.get_usd_per_million) / _MILLION


def _keeps_cache(resource: Mapping[str, Any]) -> bool:
    return resource["Type"] == "AWS::Lambda::Function" and ".exchange_cache." in resource["Properties"]["Handler"]


def _database_usd_per_task(templates: Mapping[str, Template], prices: Prices) -> float:
    """The cost of a task's rows while the task is kept, and of its write-ahead log while backups need it."""
    use, database = prices.use, _the_database(templates)
    copies = 2 if database["MultiAZ"] else 1
    kept_months = _retention_days(templates) / _DAYS_PER_MONTH
    backup_months = int(database["BackupRetentionPeriod"]) / _DAYS_PER_MONTH
    return (
        use.database_bytes_per_task / _GIB * kept_months * copies * prices.database.storage_usd_per_gib_month
        + use.wal_bytes_per_task / _GIB * backup_months * prices.database.backup_usd_per_gib_month
    )


# -- one rule per type -------------------------------------------------------------------------------------------------

_Lines = Iterator[tuple[str, float]]


def _database(properties: Properties, _template: Template, prices: Prices) -> _Lines:
    kind = properties["DBInstanceClass"]
    if properties["Engine"] != "postgres" or properties["StorageType"] != "gp3":
        raise _unpriced(f"a database {properties['Engine']} on {properties['StorageType']}")
    copies = 2 if properties["MultiAZ"] else 1
    zones = ", in two zones" if copies > 1 else ""
    hourly = _listed(prices.database.instance_usd_per_hour, kind)
    yield f"PostgreSQL {kind}{zones}", copies * hourly * prices.hours_per_month
    gib = int(properties["AllocatedStorage"])
    yield f"{gib} GiB for PostgreSQL{zones}", copies * gib * prices.database.storage_usd_per_gib_month


def _queue(properties: Properties, _template: Template, prices: Prices) -> _Lines:
    nodes, kind = int(properties["NumCacheClusters"]), properties["CacheNodeType"]
    hourly = _listed(prices.queue.node_usd_per_hour, kind)
    yield f"Valkey, {nodes} x {kind}", nodes * hourly * prices.hours_per_month


def _service(properties: Properties, template: Template, prices: Prices) -> _Lines:
    tasks = int(properties["DesiredCount"])
    if not tasks:
        return
    task = template["Resources"][properties["TaskDefinition"]["Ref"]]["Properties"]
    if task["RuntimePlatform"]["CpuArchitecture"] != "ARM64":
        raise _unpriced("Fargate on anything but ARM64")
    strategies = properties.get("CapacityProviderStrategy", [])
    spot = bool(strategies) and all(each["CapacityProvider"] == "FARGATE_SPOT" for each in strategies)
    vcpu, gib = int(task["Cpu"]) / _UNITS_PER_VCPU, int(task["Memory"]) / _MIB_PER_GIB
    hourly = vcpu * prices.fargate.cpu_usd_per_hour + gib * prices.fargate.memory_usd_per_gib_hour
    share = prices.fargate.spot_share if spot else 1.0
    name = f"{'Fargate Spot' if spot else 'Fargate'}, {tasks} x {vcpu:g} vCPU and {gib:g} GiB"
    usd = tasks * share * hourly * prices.hours_per_month
    public = properties["NetworkConfiguration"]["AwsvpcConfiguration"]["AssignPublicIp"] == "ENABLED"
    address_usd = tasks * _address(prices) if public else 0.0
    if any(tag["Key"] == SLEEPS_TAG for tag in properties.get("Tags", [])):
        awake_usd = (usd + address_usd) / prices.hours_per_month
        yield f"{name}, public IPv4 address: asleep; ${awake_usd:.3f} for each hour awake", 0.0
        return
    yield name, usd
    if public:
        yield f"{tasks} x public IPv4 address of a task", address_usd


def _elastic_address(_properties: Properties, _template: Template, prices: Prices) -> _Lines:
    yield "fixed IPv4 address", _address(prices)


def _balancer(properties: Properties, _template: Template, prices: Prices) -> _Lines:
    if properties["Type"] != "network":
        raise _unpriced(f"a load balancer of type {properties['Type']}")
    hourly = prices.network.balancer_usd_per_hour + prices.network.balancer_unit_usd_per_hour
    yield "network load balancer, one unit of load", hourly * prices.hours_per_month


def _endpoint(properties: Properties, _template: Template, prices: Prices) -> _Lines:
    if properties["VpcEndpointType"] == "Gateway":
        return  # it is free
    if properties["VpcEndpointType"] != "Interface":
        raise _unpriced(f"a VPC endpoint of type {properties['VpcEndpointType']}")
    zones = len(properties["SubnetIds"])
    yield f"VPC endpoint in {zones} zones", zones * prices.network.endpoint_usd_per_hour * prices.hours_per_month


def _secret(_properties: Properties, _template: Template, prices: Prices) -> _Lines:
    reads = prices.idle.secret_reads_per_hour * prices.hours_per_month
    yield "secret", prices.secrets.secret_usd_per_month + reads / 10_000 * prices.secrets.call_usd_per_10000


def _schedule(properties: Properties, template: Template, prices: Prices) -> _Lines:
    if "EventPattern" in properties:
        return  # events of AWS's own services are free
    rate = re.fullmatch(r"rate\((\d+) minutes?\)", properties["ScheduleExpression"])
    if rate is None:
        raise _unpriced(f"a schedule of {properties['ScheduleExpression']}")
    runs = prices.hours_per_month * _MINUTES_PER_HOUR / int(rate[1])
    for target in properties["Targets"]:
        alias = template["Resources"][target["Arn"]["Ref"]]["Properties"]
        function = template["Resources"][alias["FunctionName"]["Ref"]]["Properties"]
        run_s = prices.idle.canary_s if ".canary." in function["Handler"] else prices.idle.run_s
        gb_s = runs * run_s * function["MemorySize"] / _MIB_PER_GIB
        usd = runs / _MILLION * prices.functions.request_usd_per_million + gb_s * prices.functions.usd_per_gb_second
        yield f"runs of {function['Handler'].split('.')[-2]}", usd
        yield "their logs", runs * prices.idle.log_bytes_per_run / _GB * prices.monitoring.log_usd_per_gb


_PRICERS: Final[Mapping[str, Callable[[Properties, Template, Prices], _Lines]]] = {
    "AWS::EC2::EIP": _elastic_address,
    "AWS::EC2::VPCEndpoint": _endpoint,
    "AWS::ECS::Service": _service,
    "AWS::ElastiCache::ReplicationGroup": _queue,
    "AWS::ElasticLoadBalancingV2::LoadBalancer": _balancer,
    "AWS::Events::Rule": _schedule,
    "AWS::RDS::DBInstance": _database,
    "AWS::SecretsManager::Secret": _secret,
}

# -- resources billed by number, the first few free --------------------------------------------------------------------

_METRICS: Final = "AWS::Logs::MetricFilter"
_ALARMS: Final = "AWS::CloudWatch::Alarm"
_DASHBOARDS: Final = "AWS::CloudWatch::Dashboard"
_BY_NUMBER: Final = frozenset({_METRICS, _ALARMS, _DASHBOARDS})


def _billed(kind: str, properties: Properties) -> int:
    """How many of its kind a resource is billed as: an alarm on an expression as one for each metric in it, a filter
    with a dimension as one for each value."""
    if kind == _ALARMS:
        return sum("MetricStat" in each for each in properties.get("Metrics", ())) or 1
    if kind == _METRICS and properties["MetricTransformations"][0].get("Dimensions"):
        return REASONS
    return 1


def _by_number(counts: Counter[str], prices: Prices) -> _Lines:
    monitoring = prices.monitoring
    for kind, what, free, usd in (
        (_METRICS, "metrics", monitoring.free_metrics, monitoring.metric_usd_per_month),
        (_ALARMS, "alarms", monitoring.free_alarms, monitoring.alarm_usd_per_month),
        (_DASHBOARDS, "dashboards", monitoring.free_dashboards, monitoring.dashboard_usd_per_month),
    ):
        if counts[kind] > free:
            yield f"{counts[kind]} {what}, {free} of them free", (counts[kind] - free) * usd


# -- shared ------------------------------------------------------------------------------------------------------------


def _address(prices: Prices) -> float:
    return prices.network.address_usd_per_hour * prices.hours_per_month


def _api_memory_mib(templates: Mapping[str, Template]) -> int:
    return int(_api_function(templates)["MemorySize"])


def _retention_days(templates: Mapping[str, Template]) -> float:
    return float(_api_function(templates)["Environment"]["Variables"]["FARCALL_RETENTION_DAYS"])


def _api_function(templates: Mapping[str, Template]) -> Properties:
    for properties in _of_type(templates, "AWS::Lambda::Function"):
        if ".api." in properties["Handler"]:
            return properties
    raise _unpriced("a deployment without an API function")


def _the_database(templates: Mapping[str, Template]) -> Properties:
    for properties in _of_type(templates, "AWS::RDS::DBInstance"):
        return properties
    raise _unpriced("a deployment without a database")


def _of_type(templates: Mapping[str, Template], kind: str) -> Iterator[Properties]:
    for template in templates.values():
        for resource in template["Resources"].values():
            if resource["Type"] == kind:
                yield resource["Properties"]


def _listed(table: Mapping[str, float], name: str) -> float:
    if name not in table:
        raise _unpriced(name)
    return table[name]


def _unpriced(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"there is no price for {what}",
        hint="add it to farcall_infra/prices.toml, and a rule to farcall_infra.cost if it needs one",
    )
