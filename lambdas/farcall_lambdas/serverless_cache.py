"""ElastiCache Serverless: creates, finds and deletes the exchange cache.

================================  ======================================================================================
variable                          meaning
================================  ======================================================================================
``FARCALL_CACHE_NAME``            the cache's name
``FARCALL_CACHE_GB``              GB that it may hold
``FARCALL_CACHE_ECPU_PER_S``      ElastiCache Processing Units that it may use in a second
``FARCALL_CACHE_SUBNETS``         its subnets, separated by commas
``FARCALL_CACHE_SECURITY_GROUP``  its security group
================================  ======================================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_lambdas.exchange_cache import Cache

_VERSION: Final = "8"
_TIMEOUT_S: Final = 10.0
_GONE: Final = ("ServerlessCacheNotFoundFault",)
_EXISTS: Final = ("ServerlessCacheAlreadyExistsFault",)
_CHANGING: Final = ("InvalidServerlessCacheStateFault",)


@dataclasses.dataclass(frozen=True)
class ServerlessCache:
    """The cache of that ``name``. See :class:`~farcall_lambdas.exchange_cache.Caches`."""

    name: str
    gb: int
    ecpu_per_s: int
    subnets: tuple[str, ...]
    security_group: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ServerlessCache:
        """The cache that the variables describe.

        :raises ConfigurationError: if a variable is missing or no number.
        """
        try:
            return cls(
                environ["FARCALL_CACHE_NAME"],
                gb=int(environ["FARCALL_CACHE_GB"]),
                ecpu_per_s=int(environ["FARCALL_CACHE_ECPU_PER_S"]),
                subnets=tuple(environ["FARCALL_CACHE_SUBNETS"].split(",")),
                security_group=environ["FARCALL_CACHE_SECURITY_GROUP"],
            )
        except (KeyError, ValueError) as error:
            raise ConfigurationError(f"A variable FARCALL_CACHE_ is missing or wrong: {error}") from error

    def find(self) -> Cache | None:
        """See :class:`~farcall_lambdas.exchange_cache.Caches`."""
        answer = _call(lambda caches: caches.describe_serverless_caches(ServerlessCacheName=self.name), unless=_GONE)
        if answer is None:
            return None
        (found,) = answer["ServerlessCaches"]
        address = ""
        if found["Status"] == "available":
            address = f"valkeys://{found['Endpoint']['Address']}:{found['Endpoint']['Port']}/0"
        return Cache(found["Status"], found["CreateTime"], address)

    def create(self) -> None:
        """See :class:`~farcall_lambdas.exchange_cache.Caches`."""
        limits = {
            "DataStorage": {"Maximum": self.gb, "Unit": "GB"},
            "ECPUPerSecond": {"Maximum": self.ecpu_per_s},
        }
        _call(
            lambda caches: caches.create_serverless_cache(
                ServerlessCacheName=self.name,
                Description="Exchanges of farcall-analytics. Deleted when it is idle.",
                Engine="valkey",
                MajorEngineVersion=_VERSION,
                CacheUsageLimits=limits,
                SecurityGroupIds=[self.security_group],
                SubnetIds=list(self.subnets),
            ),
            unless=_EXISTS,
        )

    def delete(self) -> None:
        """See :class:`~farcall_lambdas.exchange_cache.Caches`."""
        _call(lambda caches: caches.delete_serverless_cache(ServerlessCacheName=self.name), unless=(*_GONE, *_CHANGING))


def _call(call: Callable[[Any], Any], *, unless: tuple[str, ...]) -> Any:
    """ElastiCache's answer; None if it is an error with one of these codes.

    :raises Unavailable: for every other error.
    """
    config = Config(connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S, retries={"total_max_attempts": 2})
    try:
        return call(boto3.client("elasticache", config=config))
    except ClientError as error:
        if error.response["Error"]["Code"] in unless:
            return None
        raise Unavailable(f"ElastiCache refuses: {error}") from error
    except BotoCoreError as error:
        raise Unavailable(f"ElastiCache does not answer: {error}") from error
