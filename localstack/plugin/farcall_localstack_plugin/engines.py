"""Database processes (PostgreSQL and Valkey on free loopback ports), and relays that forward connections to them."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from farcall_localstack_plugin import children
from farcall_localstack_plugin.children import Child, ChildDied
from farcall_localstack_plugin.settings import Settings

HOST = "127.0.0.1"
_START_TIMEOUT_S = 120.0
_POLL_S = 0.02
_ATTEMPTS = 3  # another process may take a free port before the server binds it


def start_postgres(
    name: str, *, settings: Settings, user: str, password: str, database: str | None, parameters: Mapping[str, str]
) -> tuple[Child, int, Path]:
    """Start a new PostgreSQL cluster with that superuser, database and parameters; returns the server, its port and the
    file of its parameters."""
    owner = children.unprivileged_user()
    root = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=settings.database_directory))
    password_file = root / "password"
    password_file.touch(mode=0o600)
    password_file.write_text(password, encoding="utf-8")
    if owner:
        shutil.chown(root, owner, pwd.getpwnam(owner).pw_gid)
        shutil.chown(password_file, owner)
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    data = root / "data"
    subprocess.run(
        [
            settings.postgres_bin / "initdb", "--pgdata", data, "--username", user, "--pwfile", password_file,
            "--auth", "scram-sha-256", "--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync",
        ],
        check=True, capture_output=True, env=environment, user=owner, cwd=root,
    )  # fmt: skip
    password_file.unlink()
    parameter_file = data / "parameters.conf"
    write_parameters(parameter_file, parameters)
    with (data / "postgresql.conf").open("a", encoding="utf-8") as configuration:
        configuration.write(f"include '{parameter_file.name}'\n")
    server, port = _start_server(
        name,
        lambda port: [
            settings.postgres_bin / "postgres", "-D", data, "-p", str(port), "-h", HOST,
            "-c", "unix_socket_directories=", "-c", "fsync=off",
        ],
        settings=settings, environment=environment, cwd=root, user=owner,
        stop_signal=signal.SIGINT,  # "fast": does not wait for clients
    )  # fmt: skip
    if database:
        _create_database(server, settings, port, user=user, password=password, database=database)
    server.keep()
    return server, port, parameter_file


def write_parameters(file: Path, parameters: Mapping[str, str]) -> None:
    """Write the parameters of PostgreSQL into a file, and leave out those that only RDS has."""
    lines = [f"{name} = '{value}'\n" for name, value in parameters.items() if not name.startswith("rds.")]
    file.write_text("".join(lines), encoding="utf-8")


def start_valkey(name: str, *, settings: Settings) -> tuple[Child, int]:
    """Start an empty Valkey without files on disk; returns the server and its port."""
    server, port = _start_server(
        name,
        lambda port: [
            settings.valkey, "--port", str(port), "--bind", HOST, "--save", "", "--maxmemory-policy", "noeviction",
        ],
        settings=settings, environment={"PATH": os.environ["PATH"]}, cwd=settings.directory,
    )  # fmt: skip
    server.keep()
    return server, port


def _start_server(
    name: str,
    command: Callable[[int], Sequence[str | Path]],
    *,
    settings: Settings,
    environment: Mapping[str, str],
    cwd: Path,
    user: str | None = None,
    stop_signal: signal.Signals = signal.SIGTERM,
) -> tuple[Child, int]:
    """Start a server on a free port, with another one if that is taken, and wait until it listens.

    :raises ChildDied: if it does not listen on any of several ports.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        port = free_port()
        server = children.start(
            name,
            command(port),
            log=_log(settings, name),
            environment=environment,
            cwd=cwd,
            user=user,
            stop_signal=stop_signal,
        )
        try:
            _wait_for_port(server, port)
        except ChildDied:
            if attempt == _ATTEMPTS:
                raise
        else:
            return server, port
    raise AssertionError("unreachable: the last attempt returns or raises")


def start_tls(name: str, port: int, *, settings: Settings, certificate: Path) -> tuple[Child, int]:
    """Start a relay that adds TLS to the PostgreSQL at ``port``; returns the relay and its own port.

    :raises ChildDied: if it does not start.
    """
    targets = settings.directory / "targets" / name / "targets.json"
    targets.parent.mkdir(parents=True)
    targets.write_text(json.dumps({"ports": [port], "cuts": [], "idle_s": None}), encoding="utf-8")
    return start_relay(f"{name}-tls", targets, settings=settings, certificate=certificate)


def start_relay(name: str, targets: Path, *, settings: Settings, certificate: Path | None = None) -> tuple[Child, int]:
    """Start :mod:`farcall_localstack_plugin.relay`; returns it and its port, which it writes next to ``targets``.

    :raises ChildDied: if it does not start.
    """
    ready = targets.with_name("port")
    relay = children.start(
        name,
        [
            sys.executable, "-m", "farcall_localstack_plugin.relay", targets, ready,
            *([certificate] if certificate else []),
        ],
        log=_log(settings, name),
        environment={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not ready.exists():
        relay.require_alive()
        if time.monotonic() > deadline:
            relay.stop()
            raise ChildDied(f"{name} does not listen: {relay.log_tail()}")
        time.sleep(_POLL_S)
    return relay, int(ready.read_text(encoding="utf-8"))


def free_port() -> int:
    """A loopback port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _log(settings: Settings, name: str) -> Path:
    return settings.directory / f"{name}.log"


def _wait_for_port(server: Child, port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            socket.create_connection((HOST, port), timeout=1.0).close()
        except OSError:
            server.require_alive()
            if time.monotonic() > deadline:
                raise ChildDied(f"{server.name} does not listen on port {port}: {server.log_tail()}") from None
            time.sleep(_POLL_S)
        else:
            return


def wait_for_restart(server: Child, port: int, *, settings: Settings, before: int) -> None:
    """Wait until another process than ``before`` accepts connections to PostgreSQL at the port.

    :raises ChildDied: if that takes too long.
    """
    program = [settings.postgres_bin / "pg_isready", "--quiet", "--host", HOST, "--port", str(port)]
    deadline = time.monotonic() + _START_TIMEOUT_S
    while server.pid == before or subprocess.run(program, check=False).returncode:
        if time.monotonic() > deadline:
            raise ChildDied(f"{server.name} does not start again: {server.log_tail()}")
        time.sleep(_POLL_S)


def _create_database(server: Child, settings: Settings, port: int, *, user: str, password: str, database: str) -> None:
    """Create ``database``; retries while the server is starting up."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        done = subprocess.run(
            [
                settings.postgres_bin / "createdb", "--host", HOST, "--port", str(port), "--username", user,
                "--maintenance-db", "postgres", database,
            ],
            capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"], "PGPASSWORD": password},
        )  # fmt: skip
        if done.returncode == 0:
            return
        server.require_alive()
        if "starting up" not in done.stderr or time.monotonic() > deadline:
            raise ChildDied(f"cannot create database {database}: {done.stderr.strip()}")
        time.sleep(_POLL_S)
