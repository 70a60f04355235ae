"""AWS secrets, read again when they are old, so that a new value is used without a restart."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from farcall_common.errors import Unavailable

_logger = logging.getLogger(__name__)

#: How old a value may be, in seconds.
MAX_AGE_S: Final = 300.0

#: Seconds. A function is killed after 29 s: an unreachable service must be reported before.
_CONNECT_S: Final = 3
_READ_S: Final = 5
_ATTEMPTS: Final = 3


class Secret:
    """The value of one secret. Safe to share between threads."""

    def __init__(self, arn: str, *, max_age_s: float = MAX_AGE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._arn = arn
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = threading.Lock()
        self._value: Mapping[str, Any] = {}
        self._good_until = float("-inf")

    def read(self, *, fresh: bool = False) -> Mapping[str, Any]:
        """The value, read again if it is old, and always if it has to be ``fresh``.

        :raises Unavailable: when it cannot be read, unless an old value may be used.
        """
        with self._lock:
            if fresh or self._clock() >= self._good_until:
                try:
                    self._value = _fetch(self._arn)
                except Unavailable:
                    if fresh or not self._value:
                        raise
                self._good_until = self._clock() + self._max_age_s
            return self._value

    def latest(self) -> Mapping[str, Any]:
        """The value that was read last; if it is old, a thread reads it again, so that an event loop never waits.

        :raises Unavailable: when it has never been read, and cannot be.
        """
        if not self._value:
            return self.read()
        if self._clock() >= self._good_until and not self._lock.locked():
            threading.Thread(target=self.read, name="secret", daemon=True).start()
        return self._value


def read_pending(arn: str) -> Mapping[str, Any] | None:
    """The value of a secret that a rotation is about to make the current one, or None.

    :raises Unavailable: when it cannot be read.
    """
    try:
        return _fetch(arn, stage="AWSPENDING")
    except _NoValue:
        return None


class _NoValue(Unavailable):
    """There is no such secret, or it has no value at that stage."""


def _fetch(arn: str, *, stage: str = "AWSCURRENT") -> Mapping[str, Any]:
    # Imported here because a deployment without secrets has no need of boto3, which is slow to import.
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    config = Config(connect_timeout=_CONNECT_S, read_timeout=_READ_S, retries={"total_max_attempts": _ATTEMPTS})
    try:
        client = boto3.client("secretsmanager", config=config)
    except BotoCoreError as error:  # no region, a profile that does not exist
        raise Unavailable(f"the secret {arn} cannot be read: {error}") from error
    try:
        answer = client.get_secret_value(SecretId=arn, VersionStage=stage)
    except ClientError as error:
        kind = _NoValue if error.response["Error"]["Code"] == "ResourceNotFoundException" else Unavailable
        raise kind(f"the secret {arn} cannot be read: {error}") from error
    except BotoCoreError as error:
        host = client.meta.endpoint_url.partition("://")[2]
        _logger.error("Secrets Manager cannot be reached", extra={"host": host, "addresses": _addresses(host)})
        raise Unavailable(f"the secret {arn} cannot be read from {host}: {error}") from error
    value: dict[str, Any] = json.loads(answer["SecretString"])
    return value


def _addresses(host: str) -> str:
    """The addresses of a host, by family: in a network without NAT, only IPv6 leaves it."""
    name, _, port = host.rpartition(":")
    try:
        found = socket.getaddrinfo(name or port, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"unknown: {error}"
    return ", ".join(sorted({f"{family.name} {address[0]}" for family, _, _, _, address in found}))
