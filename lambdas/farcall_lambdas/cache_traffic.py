"""CloudWatch: traffic of the exchange cache in a period."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from farcall_common.errors import Unavailable
from farcall_lambdas.exchange_cache import Traffic

#: The dimension has the cache's name. AWS' documents and its CDK name it differently; only one of them has values.
_DIMENSIONS: Final = ("clusterId", "ServerlessCacheName")
_UNITS: Final = ("ElastiCacheProcessingUnits", "Sum")
_BYTES: Final = ("BytesUsedForCache", "Maximum")
_PERIOD_S: Final = 60
_TIMEOUT_S: Final = 10.0


@dataclasses.dataclass(frozen=True)
class CloudWatchMeasurements:
    """Measurements of the cache ``name``. See :class:`~farcall_lambdas.exchange_cache.Measurements`."""

    name: str

    def traffic(self, since: dt.datetime, until: dt.datetime) -> Traffic | None:
        """See :class:`~farcall_lambdas.exchange_cache.Measurements`."""
        queries = [
            {
                "Id": f"{kind}{number}",
                "MetricStat": {
                    "Metric": {
                        "Namespace": "AWS/ElastiCache",
                        "MetricName": metric,
                        "Dimensions": [{"Name": dimension, "Value": self.name}],
                    },
                    "Period": _PERIOD_S,
                    "Stat": statistic,
                },
            }
            for kind, (metric, statistic) in (("units", _UNITS), ("bytes", _BYTES))
            for number, dimension in enumerate(_DIMENSIONS)
        ]
        config = Config(connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, retries={"total_max_attempts": 2})
        units: list[float] = []
        held: list[float] = []
        try:
            pages = boto3.client("cloudwatch", config=config).get_paginator("get_metric_data")
            for page in pages.paginate(MetricDataQueries=queries, StartTime=since, EndTime=until):
                for found in page["MetricDataResults"]:
                    (units if found["Id"].startswith("units") else held).extend(found["Values"])
        except (BotoCoreError, ClientError) as error:
            raise Unavailable(f"CloudWatch does not answer: {error}") from error
        return Traffic(sum(units), max(held)) if held else None
