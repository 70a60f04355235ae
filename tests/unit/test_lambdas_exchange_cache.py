"""The exchange cache: when it is deleted, by a clock of the test, and its calls of AWS, by stubs of botocore."""

from __future__ import annotations

import dataclasses
import datetime as dt

import boto3
import pytest
from botocore.stub import ANY, Stubber

from farcall_common.errors import ConfigurationError, InvalidRequest, Unavailable
from farcall_lambdas.cache_traffic import CloudWatchMeasurements
from farcall_lambdas.exchange_cache import Cache, Decision, ExchangeCache, Limits, Traffic
from farcall_lambdas.handlers.exchange_cache import answer
from farcall_lambdas.serverless_cache import ServerlessCache

NOW = dt.datetime(2026, 11, 27, 9, 0, tzinfo=dt.UTC)
IDLE = dt.timedelta(minutes=15)
SCHEDULE = {"source": "aws.events"}
ADDRESS = "valkeys://farcall-exchange.serverless.use1.cache.amazonaws.com:6379/0"
VARIABLES = {
    "FARCALL_CACHE_NAME": "farcall-exchange",
    "FARCALL_CACHE_GB": "100",
    "FARCALL_CACHE_ECPU_PER_S": "1000000",
    "FARCALL_CACHE_SUBNETS": "subnet-1,subnet-2",
    "FARCALL_CACHE_SECURITY_GROUP": "sg-1",
    "FARCALL_CACHE_IDLE_S": "900",
}


@dataclasses.dataclass
class FakeCaches:
    """The one cache; what is created is available at once, what is deleted is being deleted."""

    cache: Cache | None = None
    created: int = 0
    deleted: int = 0

    def find(self) -> Cache | None:
        return self.cache

    def create(self) -> None:
        self.created += 1
        self.cache = Cache("creating", NOW)

    def delete(self) -> None:
        assert self.cache
        self.deleted += 1
        self.cache = dataclasses.replace(self.cache, status="deleting", address="")


@dataclasses.dataclass
class FakeMeasurements:
    """Processing units by the time of their use; ``bytes_held`` is None where nothing is measured."""

    used: dict[dt.datetime, float] = dataclasses.field(default_factory=dict)
    bytes_held: float | None = 0.0

    def traffic(self, since: dt.datetime, until: dt.datetime) -> Traffic | None:
        if self.bytes_held is None:
            return None
        return Traffic(sum(units for at, units in self.used.items() if since <= at <= until), self.bytes_held)


def _cache(*, minutes_old: float = 600, status: str = "available") -> Cache:
    return Cache(status, NOW - dt.timedelta(minutes=minutes_old), ADDRESS if status == "available" else "")


def _used(minutes_ago: float) -> dict[dt.datetime, float]:
    return {NOW - dt.timedelta(minutes=minutes_ago): 12.0}


@pytest.mark.parametrize(
    ("cache", "measurements", "decision"),
    [
        (None, FakeMeasurements(), Decision.NONE),
        (_cache(status="creating"), FakeMeasurements(), Decision.CHANGING),
        (_cache(status="deleting"), FakeMeasurements(), Decision.CHANGING),
        (_cache(status="create-failed"), FakeMeasurements(), Decision.FAILED),
        (_cache(minutes_old=14), FakeMeasurements(), Decision.YOUNG),
        (_cache(), FakeMeasurements(_used(1)), Decision.USED),
        (_cache(), FakeMeasurements(_used(14)), Decision.USED),
        (_cache(), FakeMeasurements(_used(16)), Decision.IDLE),
        (_cache(), FakeMeasurements(), Decision.IDLE),
        (_cache(), FakeMeasurements(bytes_held=None), Decision.UNMEASURED),
        # It holds blocks: a job may compute for a while between two stages.
        (_cache(), FakeMeasurements(_used(16), bytes_held=5e9), Decision.HOLDING),
        (_cache(), FakeMeasurements(_used(59), bytes_held=5e9), Decision.HOLDING),
        (_cache(minutes_old=30), FakeMeasurements(bytes_held=5e9), Decision.HOLDING),
        (_cache(), FakeMeasurements(_used(61), bytes_held=5e9), Decision.IDLE),
    ],
)
def test_a_cache_is_deleted_when_it_is_idle(
    cache: Cache | None, measurements: FakeMeasurements, decision: Decision
) -> None:
    caches = FakeCaches(cache)
    found = answer(ExchangeCache(caches, measurements, Limits(IDLE)), SCHEDULE, now=NOW)
    assert found == {"decision": decision.value}
    assert caches.deleted == (decision in (Decision.IDLE, Decision.FAILED))


def test_a_cache_is_created_once_and_found_until_it_is_stopped() -> None:
    caches = FakeCaches()
    exchange = ExchangeCache(caches, FakeMeasurements(), Limits(IDLE))
    assert answer(exchange, {"action": "status"}, now=NOW) == {"status": "", "address": ""}
    for _ in range(2):
        assert answer(exchange, {"action": "start"}, now=NOW) == {"status": "creating", "address": ""}
    caches.cache = _cache()
    for action in ("start", "status"):
        assert answer(exchange, {"action": action}, now=NOW) == {"status": "available", "address": ADDRESS}
    assert answer(exchange, {"action": "stop"}, now=NOW) == {"status": "deleting", "address": ""}
    assert answer(exchange, {"action": "start"}, now=NOW) == {"status": "deleting", "address": ""}
    assert (caches.created, caches.deleted) == (1, 1)


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="Unknown action 'grow'"):
        answer(ExchangeCache(FakeCaches(), FakeMeasurements(), Limits(IDLE)), {"action": "grow"}, now=NOW)


def _stubbed(service: str, monkeypatch: pytest.MonkeyPatch) -> Stubber:
    client = boto3.client(  # type: ignore[call-overload]  # one for each literal name of a service
        service, region_name="eu-central-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    monkeypatch.setattr(boto3, "client", lambda *_arguments, **_options: client)
    return Stubber(client)


@pytest.fixture
def elasticache(monkeypatch: pytest.MonkeyPatch) -> Stubber:
    return _stubbed("elasticache", monkeypatch)


@pytest.fixture
def cloudwatch(monkeypatch: pytest.MonkeyPatch) -> Stubber:
    return _stubbed("cloudwatch", monkeypatch)


def test_a_cache_is_created_within_the_limits_and_has_an_address(elasticache: Stubber) -> None:
    cache, named = ServerlessCache.from_environment(VARIABLES), {"ServerlessCacheName": "farcall-exchange"}
    described = {**named, "Status": "available", "CreateTime": NOW}
    endpoint = {"Address": "farcall-exchange.serverless.use1.cache.amazonaws.com", "Port": 6379}
    elasticache.add_client_error("describe_serverless_caches", "ServerlessCacheNotFoundFault", expected_params=named)
    elasticache.add_response(
        "create_serverless_cache",
        {},
        {
            **named,
            "Description": ANY,
            "Engine": "valkey",
            "MajorEngineVersion": "8",
            "CacheUsageLimits": {
                "DataStorage": {"Maximum": 100, "Unit": "GB"},
                "ECPUPerSecond": {"Maximum": 1_000_000},
            },
            "SecurityGroupIds": ["sg-1"],
            "SubnetIds": ["subnet-1", "subnet-2"],
        },
    )
    for status in ("creating", "available"):
        elasticache.add_response(
            "describe_serverless_caches",
            {"ServerlessCaches": [{**described, "Status": status, "Endpoint": endpoint}]},
            named,
        )
    elasticache.add_response("delete_serverless_cache", {}, named)
    with elasticache:
        assert cache.find() is None
        cache.create()
        assert cache.find() == Cache("creating", NOW)
        assert cache.find() == Cache("available", NOW, ADDRESS)
        cache.delete()
    elasticache.assert_no_pending_responses()


def test_two_callers_at_once_create_and_delete_one_cache(elasticache: Stubber) -> None:
    cache = ServerlessCache.from_environment(VARIABLES)
    elasticache.add_client_error("create_serverless_cache", "ServerlessCacheAlreadyExistsFault")
    elasticache.add_client_error("delete_serverless_cache", "InvalidServerlessCacheStateFault")
    elasticache.add_client_error("delete_serverless_cache", "ServerlessCacheNotFoundFault")
    elasticache.add_client_error("create_serverless_cache", "ServerlessCacheQuotaForCustomerExceededFault")
    with elasticache:
        cache.create()
        cache.delete()
        cache.delete()
        with pytest.raises(Unavailable, match="QuotaForCustomerExceeded"):
            cache.create()


@pytest.mark.parametrize("change", [{"FARCALL_CACHE_GB": "much"}, {"FARCALL_CACHE_ECPU_PER_S": ""}])
def test_an_invalid_variable_is_named(change: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="FARCALL_CACHE_"):
        ServerlessCache.from_environment(VARIABLES | change)
    with pytest.raises(ConfigurationError, match="FARCALL_CACHE_IDLE_S"):
        Limits.from_environment({})
    assert Limits.from_environment(VARIABLES) == Limits(IDLE)


def _results(units: dict[str, list[float]], held: dict[str, list[float]]) -> dict[str, object]:
    found = [("units", units), ("bytes", held)]
    return {
        "MetricDataResults": [
            {"Id": f"{kind}{number}", "Values": values, "Timestamps": [NOW] * len(values)}
            for kind, each in found
            for number, values in each.items()
        ]
    }


@pytest.mark.parametrize("dimension", ["0", "1"])
def test_traffic_is_that_of_the_dimension_with_values(cloudwatch: Stubber, dimension: str) -> None:
    other = "1" if dimension == "0" else "0"
    answered = _results({dimension: [3.0, 4.5], other: []}, {dimension: [1e6, 2e6, 5e5], other: []})
    cloudwatch.add_response(
        "get_metric_data", answered, {"MetricDataQueries": ANY, "StartTime": NOW - IDLE, "EndTime": NOW}
    )
    with cloudwatch:
        measured = CloudWatchMeasurements("farcall-exchange").traffic(NOW - IDLE, NOW)
    assert measured == Traffic(7.5, 2e6)


def test_no_measurements_are_not_the_same_as_no_traffic(cloudwatch: Stubber) -> None:
    cloudwatch.add_response("get_metric_data", _results({"0": []}, {"0": []}))
    cloudwatch.add_client_error("get_metric_data", "InternalServiceFault")
    with cloudwatch:
        assert CloudWatchMeasurements("farcall-exchange").traffic(NOW - IDLE, NOW) is None
        with pytest.raises(Unavailable):
            CloudWatchMeasurements("farcall-exchange").traffic(NOW - IDLE, NOW)
