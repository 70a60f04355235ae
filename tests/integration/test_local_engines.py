"""Data stores and supervised processes of the local tier, with real processes on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest
import redis

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_common.store import BlobRef
from farcall_common.store.settings import BlobSettings
from farcall_local.engines import Blobs, Postgres, Valkey
from farcall_local.postgres_files import forget_database
from farcall_local.process import Child, Program, free_port, listen
from farcall_local.services import Api, Part, base_environment, migrate
from tests.waiting import WAIT_S


@asynccontextmanager
async def running(part: Part, logs: Path) -> AsyncIterator[Child]:
    part.prepare()
    child = await Child.start(part.program(environment=base_environment(), logs=logs))
    try:
        await child.wait_ready(part.is_ready, within_s=WAIT_S)
        yield child
    finally:
        await child.stop()


def test_postgres_keeps_its_data_and_requires_its_password(tmp_path: Path) -> None:
    postgres = Postgres(tmp_path, free_port(), "right", migrate)

    async def story() -> None:
        async with running(postgres, tmp_path):
            with psycopg.connect(postgres.url, autocommit=True) as connection:
                connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(postgres.url.replace("right", "wrong"))
        again = postgres.on_free_port()
        async with running(again, tmp_path):
            with psycopg.connect(again.url) as connection:
                assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)

    try:
        asyncio.run(story())
    finally:
        forget_database(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root keeps the data elsewhere")
def test_a_new_tier_does_not_use_data_of_a_deleted_one_at_the_same_path(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    tier = tmp_path / "tier"

    async def start(password: str) -> None:
        postgres = Postgres(tier, free_port(), password, migrate)
        async with running(postgres, tmp_path):
            psycopg.connect(postgres.url).close()

    async def story() -> None:
        for password in ("first", "second"):
            tier.mkdir()
            await start(password)
            await start(password)
            data = (tier / "postgres").resolve()
            assert data.exists()
            if password == "first":
                first = data
                shutil.rmtree(tier)
        assert not first.exists(), "data of the deleted tier is removed"

    try:
        asyncio.run(story())
    finally:
        forget_database(tier)


def test_postgres_recovers_after_kill_9(tmp_path: Path) -> None:
    postgres = Postgres(tmp_path, free_port(), "word", migrate)

    async def story() -> None:
        async with running(postgres, tmp_path) as child:
            with psycopg.connect(postgres.url, autocommit=True) as connection:
                connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
            os.kill(child.pid, signal.SIGKILL)
            await child.wait()
        async with running(postgres, tmp_path):
            with psycopg.connect(postgres.url) as connection:
                assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)

    try:
        asyncio.run(story())
    finally:
        forget_database(tmp_path)


@pytest.mark.parametrize("name", ["tier", "d" * 100], ids=["short", "too long for a socket"])
def test_valkey_requires_its_password_and_can_be_wiped(tmp_path: Path, name: str) -> None:
    valkey = Valkey(tmp_path / name, "word")
    valkey.directory.mkdir()

    async def story() -> None:
        async with running(valkey, tmp_path):
            with redis.Redis.from_url(valkey.url) as client:
                client.set("key", "value")
                assert await valkey.command("FLUSHALL SYNC") == "+OK"
                assert client.get("key") is None
            with (
                redis.Redis.from_url(valkey.url.replace(":word@", "")) as other_client,
                pytest.raises(redis.AuthenticationError),
            ):
                other_client.get("key")

    asyncio.run(story())


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen() as listener:
        yield listener


def test_blobs_survive_kill_9(tmp_path: Path, listener: socket.socket) -> None:
    engine = Blobs(tmp_path, listener, "key")
    blobs = BlobSettings.from_environment(engine.environment()).open()
    body = os.urandom(300_000)
    ref = BlobRef("owner/key", len(body), hashlib.sha256(body).hexdigest())

    async def story() -> None:
        async with running(engine, tmp_path) as child, httpx.AsyncClient(trust_env=False) as web:
            url, headers = blobs.upload_url(ref, ttl_s=60)
            assert (await web.put(url, content=body, headers=dict(headers))).is_success
            os.kill(child.pid, signal.SIGKILL)
            await child.wait()
            with pytest.raises(ConfigurationError, match=r"cannot be used: Address already in use"):
                listen(listener.getsockname()[1])  # no other program can take the port meanwhile
        async with running(engine, tmp_path), httpx.AsyncClient(trust_env=False) as web:
            assert (await web.get(blobs.download_url("owner/key", ttl_s=60))).content == body
            assert (await web.get(blobs.download_url("owner/nothing", ttl_s=60))).status_code == 404

    asyncio.run(story())


@pytest.mark.parametrize("content", ["", "8o80", "99999999"])
def test_an_api_whose_port_file_is_damaged_gets_a_new_port(tmp_path: Path, content: str) -> None:
    (tmp_path / "api.last-port").write_text(content)
    with Api.listening(tmp_path).listener as listener:
        assert listener.getsockname()[1] > 0


def test_the_error_for_a_failed_start_has_the_log(tmp_path: Path) -> None:
    script = "import sys; print('the disk is on fire', file=sys.stderr); sys.exit(3)"
    program = Program("doomed", [sys.executable, "-c", script], dict(os.environ), tmp_path / "doomed.log")

    async def never() -> bool:
        return False

    async def story() -> None:
        child = await Child.start(program)
        with pytest.raises(Unavailable, match=r"doomed ended with status 3(.|\n)*the disk is on fire"):
            await child.wait_ready(never, within_s=WAIT_S)

    asyncio.run(story())


def test_a_process_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    )
    program = Program("stubborn", [sys.executable, "-c", script], dict(os.environ), tmp_path / "log", stop_within_s=0.2)

    async def is_deaf() -> bool:
        return (tmp_path / "log").read_text() != ""

    async def story() -> None:
        child = await Child.start(program)
        await child.wait_ready(is_deaf, within_s=WAIT_S)
        await child.stop()
        assert await child.wait() == -signal.SIGKILL

    asyncio.run(story())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's orphan signal is Linux's")
def test_no_child_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    supervisor = textwrap.dedent(
        f"""
        import asyncio, os, sys
        from pathlib import Path
        from farcall_local.process import Child, Program

        async def main():
            argv = [sys.executable, "-c", "import time; time.sleep(60)"]
            child = await Child.start(Program("orphan", argv, dict(os.environ), Path({str(tmp_path / "log")!r})))
            print(child.pid, flush=True)
            await child.wait()

        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        orphan = psutil.Process(int(process.stdout.readline()))
        process.kill()
    try:
        psutil.wait_procs([orphan], timeout=WAIT_S)
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        pass
