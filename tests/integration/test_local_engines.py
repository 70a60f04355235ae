"""The local tier's data stores and how its processes are held, with real processes on loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import boto3
import psutil
import psycopg
import pytest
import redis
from botocore.config import Config
from botocore.exceptions import ClientError

from farcall_common.errors import Unavailable
from farcall_local.engines import BUCKET, Blobs, Postgres, Valkey
from farcall_local.postgres_files import forget_database
from farcall_local.process import Child, Program, free_port
from farcall_local.services import Part, base_environment, migrate

READY_WITHIN_S = 60.0


@asynccontextmanager
async def running(part: Part, logs: Path) -> AsyncIterator[Child]:
    part.prepare()
    child = await Child.start(part.program(environment=base_environment(), logs=logs))
    try:
        await child.wait_ready(part.is_ready, within_s=READY_WITHIN_S)
        yield child
    finally:
        await child.stop()


def test_postgres_keeps_its_data_and_its_door(tmp_path: Path) -> None:
    postgres = Postgres(tmp_path, free_port(), "right", migrate)

    async def story() -> None:
        async with running(postgres, tmp_path):
            with psycopg.connect(postgres.url, autocommit=True) as connection:
                connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(postgres.url.replace("right", "wrong"))
        again = postgres.elsewhere()
        async with running(again, tmp_path):
            with psycopg.connect(again.url) as connection:
                assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)

    try:
        asyncio.run(story())
    finally:
        forget_database(tmp_path)


def test_postgres_comes_back_after_kill_9(tmp_path: Path) -> None:
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


def test_valkey_wants_its_password_and_can_be_wiped(tmp_path: Path) -> None:
    valkey = Valkey(tmp_path, free_port(), "word")

    async def story() -> None:
        async with running(valkey, tmp_path):
            with redis.Redis.from_url(valkey.url) as client:
                client.set("key", "value")
                assert await valkey.command("FLUSHALL SYNC") == "+OK"
                assert client.get("key") is None
            with (
                redis.Redis.from_url(valkey.url.replace(":word@", "")) as stranger,
                pytest.raises(redis.AuthenticationError),
            ):
                stranger.get("key")

    asyncio.run(story())


def test_blobs_outlive_kill_9(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path, free_port(), "FARCALLTEST")
    objects = boto3.client(
        "s3",
        endpoint_url=blobs.url,
        region_name="us-east-1",
        aws_access_key_id="FARCALLTEST",
        aws_secret_access_key="secret",
        config=Config(retries={"max_attempts": 1}),
    )
    body = os.urandom(300_000)

    async def story() -> None:
        async with running(blobs, tmp_path) as child:
            await asyncio.to_thread(objects.put_object, Bucket=BUCKET, Key="owner/key", Body=body)
            os.kill(child.pid, signal.SIGKILL)
            await child.wait()
        async with running(blobs, tmp_path):
            answer = await asyncio.to_thread(objects.get_object, Bucket=BUCKET, Key="owner/key")
            assert answer["Body"].read() == body
            with pytest.raises(ClientError, match="NoSuchKey"):
                await asyncio.to_thread(objects.get_object, Bucket=BUCKET, Key="owner/nothing")

    try:
        asyncio.run(story())
    finally:
        objects.close()


def test_an_early_end_shows_the_log(tmp_path: Path) -> None:
    script = "import sys; print('the disk is on fire', file=sys.stderr); sys.exit(3)"
    program = Program("doomed", [sys.executable, "-c", script], dict(os.environ), tmp_path / "doomed.log")

    async def never() -> bool:
        return False

    async def story() -> None:
        child = await Child.start(program)
        with pytest.raises(Unavailable, match=r"doomed ended with status 3(.|\n)*the disk is on fire"):
            await child.wait_ready(never, within_s=READY_WITHIN_S)

    asyncio.run(story())


def test_what_does_not_stop_is_killed(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    )
    program = Program("stubborn", [sys.executable, "-c", script], dict(os.environ), tmp_path / "log", stop_within_s=0.2)

    async def is_deaf() -> bool:
        return (tmp_path / "log").read_text() != ""

    async def story() -> None:
        child = await Child.start(program)
        await child.wait_ready(is_deaf, within_s=READY_WITHIN_S)
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
        psutil.wait_procs([orphan], timeout=60)
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        pass
