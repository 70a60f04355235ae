"""Farcall's own processes in the tier, and the environment that all of them share."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

from farcall_common.errors import Unavailable
from farcall_local.engines import BUCKET, Blobs, Postgres, Valkey
from farcall_local.process import Program
from farcall_local.state import TierSecrets

__all__ = ["Api", "Forwarder", "Part", "base_environment", "migrate", "service_environment"]

_LOOPBACK = "127.0.0.1"


class Part(Protocol):
    """What the supervisor knows of anything that it keeps running."""

    @property
    def name(self) -> str: ...
    def prepare(self) -> None:
        """Make ready what the program needs on disk. Blocks; called before every start."""

    def program(self, *, environment: Mapping[str, str], logs: Path) -> Program: ...
    async def is_ready(self) -> bool:
        """Whether a client that connects now is served."""

    def elsewhere(self) -> Self:
        """The same part on another port, for when its own is taken."""


@dataclasses.dataclass(frozen=True)
class Api:
    """The REST API. Its port outlives restarts, because clients were told it."""

    directory: Path
    keep_port: bool = True
    name: str = "api"

    @property
    def url(self) -> str:
        return f"http://{_LOOPBACK}:{self._port_file.read_text().strip()}"

    def elsewhere(self) -> Api:
        return dataclasses.replace(self, keep_port=False)

    def prepare(self) -> None:
        if self._port_file.exists():
            self._port_file.replace(self._last_port_file)

    def program(self, *, environment: Mapping[str, str], logs: Path) -> Program:
        known = self.keep_port and self._last_port_file.exists()
        port = self._last_port_file.read_text().strip() if known else "0"
        options = ["--host", _LOOPBACK, "--port", port, "--port-file", str(self._port_file)]
        return _service(self.name, "farcall_lambdas.local", options, environment=environment, logs=logs)

    async def is_ready(self) -> bool:
        return self._port_file.exists()

    @property
    def _port_file(self) -> Path:
        return self.directory / "api.port"

    @property
    def _last_port_file(self) -> Path:
        return self.directory / "api.last-port"


@dataclasses.dataclass(frozen=True)
class Forwarder:
    """The forwarder. It announces its own address in the queue, so each start may take any port."""

    directory: Path
    name: str = "forwarder"

    def elsewhere(self) -> Forwarder:
        return self

    def prepare(self) -> None:
        self._ready_file.unlink(missing_ok=True)

    def program(self, *, environment: Mapping[str, str], logs: Path) -> Program:
        options = ["--host", _LOOPBACK, "--port", "0", "--health-port", "0", "--ready-file", str(self._ready_file)]
        return _service(self.name, "farcall_forwarder", options, environment=environment, logs=logs)

    async def is_ready(self) -> bool:
        return self._ready_file.exists()

    @property
    def _ready_file(self) -> Path:
        return self.directory / "forwarder.ready"


def migrate(database_url: str) -> None:
    """Bring a database to the newest schema.

    :raises Unavailable: if that fails; with the end of what the migrator logged.
    """
    done = subprocess.run(
        [sys.executable, "-m", "farcall_lambdas.migrator"],
        env={**base_environment(), "FARCALL_DATABASE_URL": database_url},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd="/",
    )
    if done.returncode:
        raise Unavailable(f"the database could not be migrated:\n{done.stdout[-4000:]}")


def base_environment() -> dict[str, str]:
    """This process's environment without what could lead a child to a real account or to another deployment."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "FARCALL_"))}
    away = ",".join(filter(None, [kept.get("NO_PROXY") or kept.get("no_proxy"), _LOOPBACK, "localhost"]))
    return kept | {
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": away,
        "no_proxy": away,
        "PYTHONUNBUFFERED": "1",
    }


def service_environment(secrets: TierSecrets, *, postgres: Postgres, valkey: Valkey, blobs: Blobs) -> dict[str, str]:
    """What the API and the forwarder read at their start."""
    return {
        "FARCALL_DATABASE_URL": postgres.url,
        "FARCALL_QUEUE_URL": valkey.url,
        "FARCALL_BLOB_BUCKET": BUCKET,
        "FARCALL_TICKET_KEY": secrets.ticket_key,
        "FARCALL_AUTH_PROVIDER": "dev",
        "FARCALL_DEV_TOKENS": secrets.dev_tokens(),
        "AWS_ENDPOINT_URL_S3": blobs.url,
        "AWS_ACCESS_KEY_ID": secrets.blob_access_key,
        "AWS_SECRET_ACCESS_KEY": secrets.blob_secret_key,
    }


def _service(name: str, module: str, options: list[str], *, environment: Mapping[str, str], logs: Path) -> Program:
    return Program(
        name=name,
        argv=[sys.executable, "-m", module, *options],
        environment=environment,
        log_path=logs / f"{name}.log",
        cwd=logs,
        stop_within_s=8.0,
    )
