"""Settings of a forwarder, read once: argument over environment over default.

=================================  =====================================================  ===========
variable, argument                 meaning                                                default
=================================  =====================================================  ===========
``FARCALL_FORWARDER_HOST``         address to bind, ``--host``                            ``0.0.0.0``
``FARCALL_FORWARDER_PORT``         port for peers, 0 = any, ``--port``                    55001
``FARCALL_FORWARDER_HEALTH_PORT``  port of the health checks, 0 = any, ``--health-port``  8080
``FARCALL_FORWARDER_ADVERTISE``    host that peers are given, ``--advertise``; with       the bound one
                                   ``:port`` where a load balancer has another port
``FARCALL_FORWARDER_CONNECTIONS``  peers that may be connected at once                    10000
``FARCALL_FORWARDER_`` …           of those, peers that may be connected from one         as many
``CONNECTIONS_PER_SOURCE``         address
``FARCALL_FORWARDER_`` …           connections to the database, at most                   6
``DATABASE_CONNECTIONS``
``FARCALL_FORWARDER_KEY_SEED``     a secret that forwarders behind one address share;     a key pair of
                                   their CURVE key pair is derived from it                its own
``FARCALL_FORWARDER_READY_FILE``   JSON is put here once peers can connect,               none
                                   ``--ready-file``
``FARCALL_FORWARDER_DRAIN_S``      seconds to drain in after SIGTERM                      20
``FARCALL_FORWARDER_LEASE_S``      seconds that a vanished agent's tasks stay with it     30
``FARCALL_MAX_PAYLOAD_BYTES``      size of the biggest result                             10485760
``FARCALL_MAX_RELAY_BYTES``        size of the biggest file that an endpoint reads from   1073741824
                                   another one
``FARCALL_MAX_STORED_BYTES_PER_DAY``  bytes of these files, and of arguments, that one    107374182400
                                   identity adds in a day, 0 = any number
``FARCALL_LOG_LEVEL``              see :mod:`logging`                                     INFO
=================================  =====================================================  ===========

The stores have variables of their own, see :mod:`farcall_common.store.settings`.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from farcall_common.errors import ConfigurationError
from farcall_common.limits import MAX_FILE_BYTES, MAX_PAYLOAD_BYTES, MAX_RELAYED_FILE_BYTES
from farcall_forwarder.core.policy import Policy

_SEED_LENGTH: Final = 32  # characters; a key is 32 bytes, so less would be easier to guess than the key
_ANY: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 -- the addresses that mean "all of them"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Ports are 0 for "any"; periods are in seconds."""

    host: str = "0.0.0.0"  # noqa: S104 -- peers come from everywhere; CURVE and ZAP authenticate them
    port: int = 55001
    health_port: int = 8080
    advertise: str = ""
    max_connections: int = 10_000
    #: None for no limit: behind a load balancer that hides addresses, all connections have its address.
    max_connections_of_source: int | None = None
    database_connections: int = 6
    key_seed: str = dataclasses.field(default="", repr=False)
    ready_file: Path | None = None
    drain_s: float = 20.0
    lease_s: float = 30.0
    max_result_bytes: int = MAX_PAYLOAD_BYTES
    max_relayed_file_bytes: int = MAX_RELAYED_FILE_BYTES
    stored_bytes_per_day: int = Policy.stored_bytes_per_day
    log_level: str = "INFO"

    @classmethod
    def read(cls, arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
        """Read arguments and environment.

        :raises ConfigurationError: for an invalid value. Unknown arguments end the process, as argparse does.
        """
        parser = argparse.ArgumentParser(prog="python -m farcall_forwarder", description=cls.__doc__)
        for name in ("host", "port", "health-port", "advertise", "ready-file"):
            parser.add_argument(f"--{name}")
        given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}

        def value(name: str, default: object) -> str:
            return str(given.get(name, environ.get(f"FARCALL_FORWARDER_{name.upper()}", default)))

        level = environ.get("FARCALL_LOG_LEVEL", cls.log_level).upper()
        if level not in logging.getLevelNamesMapping():
            raise ConfigurationError(f"FARCALL_LOG_LEVEL is {level!r}, which is not a log level")
        ready_file = value("ready_file", "")
        key_seed = environ.get("FARCALL_FORWARDER_KEY_SEED", "")
        if 0 < len(key_seed) < _SEED_LENGTH:
            raise ConfigurationError(f"FARCALL_FORWARDER_KEY_SEED is shorter than {_SEED_LENGTH} characters")
        return cls(
            host=value("host", cls.host),
            port=_number("port", value("port", cls.port), limit=65535),
            health_port=_number("health port", value("health_port", cls.health_port), limit=65535),
            advertise=value("advertise", ""),
            max_connections=_number(
                "number of connections",
                environ.get("FARCALL_FORWARDER_CONNECTIONS", str(cls.max_connections)),
                limit=10**6,
            ),
            max_connections_of_source=_number("number of connections of one source", of_source, limit=10**6)
            if (of_source := environ.get("FARCALL_FORWARDER_CONNECTIONS_PER_SOURCE"))
            else None,
            database_connections=_number(
                "number of database connections",
                environ.get("FARCALL_FORWARDER_DATABASE_CONNECTIONS", str(cls.database_connections)),
                limit=1000,
            ),
            key_seed=key_seed,
            ready_file=Path(ready_file) if ready_file else None,
            drain_s=_seconds("drain time", value("drain_s", cls.drain_s)),
            lease_s=_seconds("lease", value("lease_s", cls.lease_s)),
            max_result_bytes=_number(
                "biggest result", environ.get("FARCALL_MAX_PAYLOAD_BYTES", str(cls.max_result_bytes)), limit=2**40
            ),
            max_relayed_file_bytes=_number(
                "biggest relayed file",
                environ.get("FARCALL_MAX_RELAY_BYTES", str(cls.max_relayed_file_bytes)),
                limit=MAX_FILE_BYTES,
            ),
            stored_bytes_per_day=_number(
                "number of bytes that are stored in a day",
                environ.get("FARCALL_MAX_STORED_BYTES_PER_DAY", str(cls.stored_bytes_per_day)),
                limit=2**60,
            ),
            log_level=level,
        )

    @property
    def policy(self) -> Policy:
        """The policy of the core."""
        return Policy(
            lease_s=self.lease_s,
            maintenance_s=min(Policy.maintenance_s, self.lease_s / 3),
            max_result_bytes=self.max_result_bytes,
            max_relayed_file_bytes=self.max_relayed_file_bytes,
            stored_bytes_per_day=self.stored_bytes_per_day,
            drain_s=self.drain_s,
        )

    @property
    def local_host(self) -> str:
        """The address for programs of this machine."""
        return "127.0.0.1" if self.host in _ANY else self.host

    def address(self, port: int) -> str:
        """The address that peers connect to, for the bound ``port``: the advertised host, else the bound one, else this
        machine's own address."""
        host = self.advertise or self.host
        if host in _ANY:
            host = socket.gethostbyname(socket.gethostname())
        return f"tcp://{host}" if re.search(r":\d+$", host) else f"tcp://{host}:{port}"


def _number(name: str, text: str, *, limit: int) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > limit:
        raise ConfigurationError(f"the {name} is {text!r}; it is a number up to {limit}")
    return int(text)


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ConfigurationError(f"the {name} is {text!r}; it is a number of seconds above 0")
    return seconds
