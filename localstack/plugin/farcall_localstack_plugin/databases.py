"""Database instances, parameter groups and snapshots of RDS: running PostgreSQL servers, files of their parameters, and
dumps of their databases."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farcall_localstack_plugin.children import Child
from farcall_localstack_plugin.engines import HOST, wait_for_restart, write_parameters
from farcall_localstack_plugin.settings import settings

Tags = Sequence[Mapping[str, str]]


@dataclasses.dataclass
class Instance:
    """A PostgreSQL at ``port``; ``model`` has the current properties of its resource."""

    identifier: str
    server: Child
    parameter_file: Path
    port: int
    user: str
    password: str
    database: str
    model: dict[str, Any]
    created_at: dt.datetime = dataclasses.field(default_factory=lambda: dt.datetime.now(dt.UTC))

    @property
    def storage_gib(self) -> int:
        return int(self.model.get("AllocatedStorage", 0))

    @property
    def version(self) -> str:
        """The version in the template. The server itself is the one PostgreSQL that is installed."""
        return str(self.model.get("EngineVersion", ""))

    @property
    def is_protected(self) -> bool:
        """Whether deletion protection is on."""
        return str(self.model.get("DeletionProtection", False)).lower() == "true"

    @property
    def tags(self) -> Tags:
        tags: Tags = self.model.get("Tags", [])
        return tags

    @property
    def parameter_group(self) -> str:
        """The name of its parameter group; empty for RDS's default."""
        return str(self.model.get("DBParameterGroupName", ""))

    @property
    def needs_restart(self) -> bool:
        """Whether a parameter has a new value that the server takes only at a restart."""
        pending = "SELECT count(*) FROM pg_settings WHERE pending_restart"
        return _run("psql", self, "--no-align", "--tuples-only", "--command", pending).strip() != "0"

    def change_password(self, password: str) -> None:
        """Give the owner another password."""
        quoted = password.replace("'", "''")
        _run("psql", self, "--command", f"ALTER ROLE \"{self.user}\" PASSWORD '{quoted}'")
        self.password = password

    def take_parameters(self) -> None:
        """Give the server the parameters of its group. It takes the static ones at its next restart."""
        write_parameters(self.parameter_file, parameter_groups.get(self.parameter_group, {}))
        if not self.is_stopped:
            os.kill(self.server.pid, signal.SIGHUP)

    @property
    def is_stopped(self) -> bool:
        """Whether :meth:`stop` has ended the server."""
        return self.server.is_held

    def stop(self) -> None:
        """End the server, with its connections; its data stays."""
        self.server.hold()

    def start(self) -> None:
        """Start the server again; returns when it accepts connections."""
        before = self.server.pid
        self.server.release()
        wait_for_restart(self.server, self.port, settings=settings(), before=before)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The database of an instance at one moment, in a file that ``pg_restore`` reads."""

    identifier: str
    instance: str
    user: str
    database: str
    storage_gib: int
    tags: Tags
    created_at: dt.datetime
    file: Path


#: Parameters, by the name of their group.
parameter_groups: dict[str, Mapping[str, str]] = {}
#: Running instances, by identifier.
databases: dict[str, Instance] = {}
#: Snapshots taken since LocalStack started, by identifier.
snapshots: dict[str, Snapshot] = {}


def take_snapshot(identifier: str, instance: Instance, *, tags: Tags = ()) -> Snapshot:
    """Take a snapshot while the instance runs. It gets ``tags``, and the instance's tags if CopyTagsToSnapshot is set.

    :raises subprocess.CalledProcessError: if PostgreSQL's program fails; its output is in ``stderr``.
    """
    directory = settings().directory / "snapshots"
    directory.mkdir(mode=0o700, exist_ok=True)
    file = directory / f"{identifier}.dump"
    _run("pg_dump", instance, "--format", "custom", "--file", str(file))
    copies = str(instance.model.get("CopyTagsToSnapshot", False)).lower() == "true"
    snapshot = Snapshot(
        identifier,
        instance.identifier,
        instance.user,
        instance.database,
        instance.storage_gib,
        [*(instance.tags if copies else ()), *tags],
        dt.datetime.now(dt.UTC),
        file,
    )
    snapshots[identifier] = snapshot
    return snapshot


def restore_snapshot(snapshot: Snapshot, instance: Instance) -> None:
    """Restore a snapshot into the empty database of a new instance.

    :raises subprocess.CalledProcessError: if PostgreSQL's program fails; its output is in ``stderr``.
    """
    _run("pg_restore", instance, "--exit-on-error", "--single-transaction", "--no-privileges", str(snapshot.file))


def delete_snapshot(identifier: str) -> Snapshot:
    """:raises KeyError: if there is none."""
    snapshot = snapshots.pop(identifier)
    snapshot.file.unlink()
    return snapshot


def _run(program: str, instance: Instance, *arguments: str) -> str:
    done = subprocess.run(
        [
            settings().postgres_bin / program, "--host", HOST, "--port", str(instance.port),
            "--username", instance.user, "--dbname", instance.database, *arguments,
        ],
        check=True, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "PGPASSWORD": instance.password},
    )  # fmt: skip
    return done.stdout
