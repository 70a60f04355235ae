"""PostgreSQL template: new data directories are copies of a template that contains the schema.

Creating a cluster and migrating an empty database takes seconds; copying the result takes a tenth of a second. The
template is created on first use for each version of PostgreSQL and of the schema, in the user's cache directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

import farcall_common
from farcall_common.errors import Unavailable
from farcall_local.postgres_files import ROOT_STATE, PostgresInstall, give_to, move_unless_there, run_tool
from farcall_local.process import free_port

_LOOPBACK = "127.0.0.1"


class Cluster:
    """The user and the database of a tier."""

    user = database = "farcall"

    @classmethod
    def url(cls, *, port: int, password: str) -> str:
        # With SCRAM the server proves that it knows the password, so another program on its port never receives it.
        return f"postgresql://{cls.user}:{password}@{_LOOPBACK}:{port}/{cls.database}?require_auth=scram-sha-256"


def schema_digest() -> str:
    """A digest of the migrations of the installed ``farcall-common``."""
    # The path comes from the top-level package: importing the store would cost a second.
    migrations = Path(farcall_common.__file__).parent / "store" / "migrations"
    digest = hashlib.sha256()
    for script in sorted(migrations.rglob("*.py")):
        digest.update(script.read_bytes())
    return digest.hexdigest()[:16]


def initialise(install: PostgresInstall, data: Path, *, password: str, migrate: Callable[[str], None]) -> None:
    """Create a data directory with the schema in it, owned by the account of ``install``.

    ``migrate`` is called with the URL of a server if there is no template yet. The template's password is discarded;
    the copy gets its own before any server listens.

    :raises Unavailable: if PostgreSQL's own tools or the migration fail; with their output.
    """
    template = _template(install, migrate)
    with tempfile.TemporaryDirectory(dir=data.parent, prefix="new-") as scratch:
        give_to(install.account, Path(scratch))
        fresh = Path(scratch) / "data"
        run_tool(None, "cp", "-a", str(template), str(fresh))
        commands = f"ALTER ROLE {Cluster.user} PASSWORD '{password}'\n"
        server = str(install.binary("postgres"))
        output = run_tool(install, server, "--single", "-D", str(fresh), Cluster.database, commands=commands)
        if "ERROR:" in output:  # single-user mode continues after an error and exits with 0
            raise Unavailable(f"cannot create PostgreSQL's data directory:\n{output}")
        run_tool(install, str(install.binary("initdb")), "--sync-only", "-D", str(fresh))
        fresh.rename(data)


def template_path(install: PostgresInstall) -> Path:
    """The path of the template for these versions of PostgreSQL and of the schema."""
    cache = ROOT_STATE if install.account else platformdirs.user_cache_path("farcall")
    return cache / f"template-{install.version}-{schema_digest()}"


def _template(install: PostgresInstall, migrate: Callable[[str], None]) -> Path:
    template = template_path(install)
    if not template.exists():
        template.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=template.parent, prefix="new-") as scratch:
            give_to(install.account, Path(scratch))
            fresh, password_file = Path(scratch) / "data", Path(scratch) / "password"
            password = secrets.token_urlsafe(24)
            password_file.write_text(password)
            give_to(install.account, password_file)
            words = [f"-U{Cluster.user}", f"--pwfile={password_file}", "--auth=scram-sha-256"]
            words += ["--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"]
            run_tool(install, str(install.binary("initdb")), "-D", str(fresh), *words)
            commands = f"CREATE DATABASE {Cluster.database}\n"
            run_tool(
                install, str(install.binary("postgres")), "--single", "-D", str(fresh), "postgres", commands=commands
            )
            with _serving(install, fresh) as port:
                migrate(Cluster.url(port=port, password=password))
            move_unless_there(fresh, template)
    return template


@contextlib.contextmanager
def _serving(install: PostgresInstall, data: Path) -> Iterator[int]:
    """Run a server during the ``with`` block; yields its port."""
    port = free_port()
    control = [str(install.binary("pg_ctl")), "-D", str(data), "-w"]
    options = f"-c listen_addresses={_LOOPBACK} -c port={port} -c unix_socket_directories= -c fsync=off"
    run_tool(install, *control, "-l", str(data / "template.log"), "-o", options, "start")
    try:
        yield port
    finally:
        run_tool(install, *control, "-m", "fast", "stop")
