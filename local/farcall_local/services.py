"""Services of the local tier: the API and the forwarder, and their shared environment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_local.engines import Blobs, Postgres, Valkey
from farcall_local.process import Program, listen
from farcall_local.state import TierSecrets

_LOOPBACK = "127.0.0.1"
#: The API writes the first when it serves; the second holds its previous port.
_PORT_FILE = "api.port"
_LAST_PORT_FILE = "api.last-port"


class Part(Protocol):
    """The interface of a supervised part."""

    @property
    def name(self) -> str: ...
    def prepare(self) -> None:
        """Prepare the program's files. Blocks; called before every start."""

    def program(self, *, environment: Mapping[str, str], logs: Path) -> Program: ...
    async def is_ready(self) -> bool:
        """Whether the part serves clients now."""


@dataclasses.dataclass(frozen=True)
class Api:
    """The REST API, on a socket of the supervisor: clients know its port, so no other program may ever have it."""

    directory: Path
    listener: socket.socket
    name: str = "api"

    @classmethod
    def listening(cls, directory: Path, port: int | None = None) -> Api:
        """The API on ``port``, or on its last port if that is free, or on any free port.

        :raises ConfigurationError: if ``port`` is given and not available.
        """
        if port is not None:
            return cls(directory, listen(port))
        for file in (directory / _PORT_FILE, directory / _LAST_PORT_FILE):
            if file.exists():
                # The port is taken, or the file is damaged after a full disk.
                with contextlib.suppress(ConfigurationError, ValueError):
                    return cls(directory, listen(int(file.read_text())))
        return cls(directory, listen())

    @property
    def url(self) -> str:
        return f"http://{_LOOPBACK}:{self.listener.getsockname()[1]}"

    def prepare(self) -> None:
        if self._port_file.exists():
            self._port_file.replace(self.directory / _LAST_PORT_FILE)

    def program(self, *, environment: Mapping[str, str], logs: Path) -> Program:
        options = ["--listener", str(self.listener.fileno()), "--port-file", str(self._port_file)]
        program = _service(self.name, "farcall_lambdas.local", options, environment=environment, logs=logs)
        return dataclasses.replace(program, listener=self.listener)

    async def is_ready(self) -> bool:
        return self._port_file.exists()

    @property
    def _port_file(self) -> Path:
        return self.directory / _PORT_FILE


@dataclasses.dataclass(frozen=True)
class Forwarder:
    """The forwarder. It publishes its address in the queue, so each start may use any port."""

    directory: Path
    name: str = "forwarder"

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
    """Migrate a database to the newest schema.

    :raises Unavailable: if that fails; with the end of the migrator's log.
    """
    done = subprocess.run(
        [sys.executable, "-m", "farcall_lambdas.handlers.migrator"],
        env={**base_environment(), "FARCALL_DATABASE_URL": database_url},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd="/",
    )
    if done.returncode:
        raise Unavailable(f"cannot migrate the database:\n{done.stdout[-4000:]}")


def base_environment() -> dict[str, str]:
    """This process's environment without variables of a real account or another deployment."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "FARCALL_"))}
    no_proxy = ",".join(filter(None, [kept.get("NO_PROXY") or kept.get("no_proxy"), _LOOPBACK, "localhost"]))
    return kept | {
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "PYTHONUNBUFFERED": "1",
    }


def service_environment(secrets: TierSecrets, *, postgres: Postgres, valkey: Valkey, blobs: Blobs) -> dict[str, str]:
    """The environment variables of the API and the forwarder."""
    return {
        "FARCALL_DATABASE_URL": postgres.url,
        "FARCALL_QUEUE_URL": valkey.url,
        **blobs.environment(),
        "FARCALL_TICKET_KEY": secrets.ticket_key,
        "FARCALL_AUTH_PROVIDER": "dev",
        "FARCALL_DEV_TOKENS": secrets.dev_tokens(),
        "FARCALL_ALLOWED_IDENTITIES": "*",  # all who have one of these tokens
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
