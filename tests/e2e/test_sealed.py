"""Sealed calls: what the stores and the API see of them, and who can read the answers."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import pickle
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from psycopg import sql

import farcall
from farcall_common.errors import (
    Conflict,
    EndpointKeyChanged,
    EndpointRequiresSealed,
    NotFound,
    ResultRefused,
    SealInvalid,
)
from farcall_common.wire import TaskState
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from farcall_local.tier import LocalTier
from tests.waiting import WAIT_S


def echo(value: object, times: int = 1) -> object:
    print(value, flush=True)
    return [value] * times


def size_of(file: farcall.File) -> int:
    return file.path.stat().st_size


def fail(value: str) -> None:
    print(value, flush=True)
    raise LookupError(value)


def die(value: str) -> None:
    import os
    import signal
    import sys

    print(value, flush=True)
    print(value, file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class Eavesdropper:
    """Everything that the stores of a tier were told."""

    def __init__(self, tier: LocalTier) -> None:
        self._tier = tier
        self._heard: list[bytes] = []
        self._stopped = threading.Event()
        self._queue = redis.Redis.from_url(tier.state.queue_url)
        self._monitor = self._queue.monitor()  # type: ignore[no-untyped-call]
        self._monitor.__enter__()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._stopped.is_set():
            try:
                self._heard.append(self._monitor.next_command()["command"].encode())
            except (redis.RedisError, OSError, ValueError):
                return

    def close(self) -> None:
        self._stopped.set()
        self._queue.set("eavesdropper", "ends")  # wakes the thread
        self._thread.join(WAIT_S)
        self._monitor.__exit__(None, None, None)
        self._queue.close()

    def places_of(self, marker: str) -> set[str]:
        """The stores that have a text: commands of the queue, rows of the database, files of blobs and logs."""
        needle = marker.encode()
        found = {"queue"} if any(needle in command for command in self._heard) else set()
        with psycopg.connect(self._tier.state.database_url) as database:
            tables = database.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
            for (table,) in tables:
                query = sql.SQL("SELECT 1 FROM {} AS row WHERE row::text LIKE ANY(%s) LIMIT 1").format(
                    sql.Identifier(table)
                )
                if database.execute(query, ([f"%{marker}%", f"%{needle.hex()}%"],)).fetchone():
                    found.add("database")
        for path in self._tier.directory.rglob("*"):
            if path.is_file() and needle in path.read_bytes():
                found.add(path.relative_to(self._tier.directory).parts[0])
        return found


@pytest.fixture
def heard(local_tier: object) -> Iterator[Eavesdropper]:
    if not isinstance(local_tier, LocalTier):
        pytest.skip("it reads the files of the stores")
    eavesdropper = Eavesdropper(local_tier)
    yield eavesdropper
    eavesdropper.close()


@pytest.fixture
def sealing_endpoint(own_endpoint: Callable[..., LocalEndpoint]) -> LocalEndpoint:
    endpoint = own_endpoint("sealing")
    endpoint.stop()
    config = endpoint.directory / "config.yaml"
    config.write_text(config.read_text() + "\nsealed: required\n")
    endpoint.start()
    return endpoint


@pytest.fixture
def sealing_client(cloud: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[farcall.Client]:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "user"))
    with farcall.Client(cloud.api_url, cloud.tokens["ada"], sealed="required") as client:
        yield client


def test_stores_and_api_never_see_sealed_contents(
    cloud: Deployment,
    client: farcall.Client,
    endpoint: LocalEndpoint,
    sealing_client: farcall.Client,
    sealing_endpoint: LocalEndpoint,
    heard: Eavesdropper,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret, public, public_large = (f"{kind}{secrets.token_hex(8)}" for kind in ("secret", "public", "large"))
    there = sealing_endpoint.endpoint_id
    with farcall.Executor(there, client=sealing_client, keep_output=True, max_attempts=2) as executor:
        small = executor.submit(echo, secret)
        assert small.result(WAIT_S) == [secret]
        assert secret in (small.stdout or "")

        # A call with files, whose URLs are in front of its arguments.
        named = tmp_path / f"{secret}.txt"
        named.write_text("12345")
        assert executor.submit(size_of, farcall.File(named.as_uri())).result(WAIT_S) == 5

        # Over 64 KiB as an argument, a result, and both; between the limits of text and of binary too.
        for size in (60_000, 200_000, 2_000_000):
            large = secret + secrets.token_hex(size // 2)
            assert executor.submit(echo, large).result(WAIT_S) == [large]

        failed = executor.submit(fail, secret).exception(WAIT_S)
        assert isinstance(failed, farcall.TaskFailed)
        assert isinstance(failed, LookupError)
        assert isinstance(failed.__cause__, LookupError)
        assert secret in str(failed)
        assert secret in (failed.remote_traceback or "")
        assert secret in (failed.record.stdout_tail or "")

        # Started twice, then a dead letter.
        letter = executor.submit(die, secret)
        dead = letter.exception(WAIT_S)
        assert isinstance(dead, farcall.TaskDeadLettered)
        assert dead.record.code == "TASK_DEAD_LETTERED"
        assert len(dead.record.reasons or ()) == 2
        assert secret in (dead.record.stdout_tail or "")
        assert secret in (dead.record.stderr_tail or "")

    # By polling, from another process of the same user; and a batch.
    task_id = sealing_client.run(secret, endpoint_id=there, function_id=sealing_client.register_function(echo))
    with farcall.Client(cloud.api_url, cloud.tokens["ada"]) as later:
        assert later.get_result(task_id, wait_s=WAIT_S) == [secret]
        assert later.get_task(small.task_id).result() == [secret]
        info = later.get_batch_result([letter.task_id])[letter.task_id]
        assert info.state is TaskState.DEAD_LETTERED
        assert isinstance(info.exception, farcall.TaskDeadLettered)
        assert secret in (info.exception.record.stdout_tail or "")
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "other"))
    with farcall.Client(cloud.api_url, cloud.tokens["ada"]) as other:
        with pytest.raises(SealInvalid, match="no secret"):
            other.get_result(task_id)
        monkeypatch.setenv("FARCALL_SEALING_SECRET", (tmp_path / "user" / "sealing.secret").read_text())
        assert other.get_result(task_id) == [secret]
    assert (tmp_path / "user" / "sealing.secret").stat().st_mode & 0o777 == 0o600

    # What an unsealed call leaves is found, what a sealed one leaves is not.
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
        assert executor.submit(echo, public).result(WAIT_S) == [public]
        large = public_large + "." * 200_000
        assert executor.submit(echo, large).result(WAIT_S) == [large]
    assert heard.places_of(public) >= {"queue", "database"}
    assert heard.places_of(public_large) & {"blobs"}
    assert heard.places_of(secret) == set()

    # Not repeated by the cloud, and nothing but sealed calls is run.
    with pytest.raises(Conflict, match="sealed"):
        client.retry(letter.task_id)
    client.discard(letter.task_id)
    with farcall.Executor(there, client=client) as executor:
        refused = executor.submit(echo, "plain").exception(WAIT_S)
        assert isinstance(refused, EndpointRequiresSealed)
        refused = executor.submit(echo, "x" * 300_000).exception(WAIT_S)
        assert isinstance(refused, EndpointRequiresSealed)


@dataclasses.dataclass
class Attack:
    """Makes a directory where it is read."""

    directory: Path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.directory),)

    @property
    def buffer(self) -> str:
        return "f0\n" + base64.b64encode(pickle.dumps(self)).decode()


def test_results_that_the_service_exchanges_are_refused_in_each_process(
    cloud: Deployment,
    local_tier: object,
    sealing_client: farcall.Client,
    sealing_endpoint: LocalEndpoint,
    tmp_path: Path,
) -> None:
    if not isinstance(local_tier, LocalTier):
        pytest.skip("it writes to the database")
    attack, there = Attack(tmp_path / "ran"), sealing_endpoint.endpoint_id
    with farcall.Client(cloud.api_url, cloud.tokens["ada"], sealed="offered") as client:
        value, error = (
            client.run("x", endpoint_id=there, function_id=client.register_function(function))
            for function in (echo, fail)
        )
        assert client.get_result(value, wait_s=WAIT_S) == ["x"]
        with pytest.raises(farcall.TaskFailed):
            client.get_result(error, wait_s=WAIT_S)
        group = str(client._api.get_task(value)["task_group_id"])
        forged = {"code": "TASK_FAILED", "message": "forged", "exception_data": attack.buffer}
        stages = {
            "stages": [{"number": 0, "name": "load", "state": "done"}],
            "values": {"0": base64.b64encode(attack.buffer.encode()).decode()},
        }
        with psycopg.connect(local_tier.state.database_url) as database:
            changed = [
                database.execute("UPDATE task SET result = %s WHERE task_id = %s", (attack.buffer.encode(), value)),
                database.execute(
                    "UPDATE task SET error = %s, details = %s WHERE task_id = %s",
                    (json.dumps(forged), json.dumps(stages), error),
                ),
            ]
            assert [each.rowcount for each in changed] == [1, 1]
        with farcall.Client(cloud.api_url, cloud.tokens["ada"]) as later:
            for reader in (client, later, sealing_client):
                with pytest.raises(ResultRefused, match="not sealed"):
                    reader.get_result(value)
                info = reader.get_batch_result([error])[error]
                assert "the service says so, the endpoint has not signed it" in str(info.exception)
                assert info.exception.__cause__ is None  # type: ignore[union-attr]
                with pytest.raises(NotFound):
                    info.stages[0].result()
            with farcall.Executor(there, client=later) as executor:
                [future] = executor.reload_tasks(group)
                assert isinstance(future.exception(WAIT_S), ResultRefused)
    assert not attack.directory.exists()


def test_calls_wait_for_an_endpoint_that_rotates_its_key_and_not_for_a_new_identity(
    sealing_client: farcall.Client, sealing_endpoint: LocalEndpoint, cloud: Deployment
) -> None:
    there = sealing_endpoint.endpoint_id
    fingerprint = sealing_endpoint.command("fingerprint", "sealing").strip()
    function_id = sealing_client.register_function(echo)
    assert sealing_client.get_result(sealing_client.run(1, endpoint_id=there, function_id=function_id), wait_s=WAIT_S)
    known = Path(os.environ["FARCALL_HOME"], "known_endpoints").read_text()
    assert known.splitlines()[0] == f"{there} {fingerprint}"

    sealing_endpoint.stop()
    waiting = sealing_client.run(2, endpoint_id=there, function_id=function_id)
    assert sealing_endpoint.command("fingerprint", "sealing", "--rotate").strip() == fingerprint
    sealing_endpoint.start()
    assert sealing_client.get_result(waiting, wait_s=WAIT_S) == [2]

    sealing_endpoint.stop()
    (sealing_endpoint.directory / "sealing.secret").unlink()
    sealing_endpoint.start()
    with (
        farcall.Client(cloud.api_url, cloud.tokens["ada"], sealed="required") as later,
        pytest.raises(EndpointKeyChanged, match=re.escape(fingerprint)),
    ):
        later.run(3, endpoint_id=there, function_id=function_id)
