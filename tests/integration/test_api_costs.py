"""What a submit asks of the stores, however many tasks it has: the figures of benchmarks/api.py rest on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import redis

from farcall_common.store import Stores, StoreSettings, open_stores
from farcall_common.wire.ids import new_task_id
from farcall_lambdas.identity import Identity
from tests.integration.store_servers import Valkey
from tests.support.memory_api import ALICE, BOB, MemoryApi


@pytest.fixture
def api(postgres_url: str, valkey: Valkey) -> Iterator[MemoryApi]:
    stores: Stores = open_stores(
        StoreSettings.from_environment(
            {
                "FARCALL_DATABASE_URL": postgres_url,
                "FARCALL_QUEUE_URL": valkey.url,
                "FARCALL_BLOB_BUCKET": "not-used",
                "FARCALL_TICKET_KEY": "k" * 32,
            }
        ),
        max_connections=1,
    )
    yield MemoryApi(stores=stores)
    stores.close()


@pytest.mark.parametrize("count", [1, 100, 500])
def test_a_batch_is_one_write_and_one_script(
    api: MemoryApi, valkey: Valkey, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    endpoint_id, function_id = api.endpoint(), api.function()
    submit(api, endpoint_id, function_id, 1)  # scripts are loaded, statements are known
    statements = noted_statements(monkeypatch)
    with redis.Redis.from_url(valkey.url) as client:
        client.config_resetstat()
        submit(api, endpoint_id, function_id, count)
        calls = commands(client)

    # One read (endpoint, function, tasks with these ids), and the transaction that writes tasks, group and audit.
    read, write = statements
    assert read.startswith("SELECT (SELECT row_to_json(endpoint) FROM endpoint ")
    assert write.startswith("WITH added AS ( INSERT INTO task (")
    # The script says how many tasks wait; that they are few is believed for a second.
    assert (calls["evalsha"], calls["sadd"]) == (1, 1)  # in one round trip
    assert set(calls) <= {"evalsha", "sadd", "info", "config|resetstat", *WITHIN_THE_SCRIPT}


def test_access_to_another_users_endpoint_is_decided_by_key_lookups(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change between two ways of planning would be a round trip more, before each and after it."""
    endpoint_id, function_id = api.endpoint(), api.function()
    for shared in (f"endpoints/{endpoint_id}", f"functions/{function_id}"):
        api.share(shared, BOB)
    submit(api, endpoint_id, f"{function_id}@1", 1, caller=BOB)
    statements = noted_statements(monkeypatch)
    submit(api, endpoint_id, f"{function_id}@1", 1, caller=BOB)
    assert len(statements) == 5, "the look, which has the version of the function, two rights, the allowance, the write"
    assert not [statement for statement in statements if "set_config" in statement]


def test_functions_that_a_task_calls_cost_no_statement(api: MemoryApi, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint_id, function_id = api.endpoint(), api.function()
    callees = [api.function() for _ in range(5)]
    body = {"tasks": {function_id: ["p"]}, "callees": [*callees, *(f"{each}@1" for each in callees)]}
    path = f"/v3/endpoints/{endpoint_id}/submit"
    assert api.call("POST", path, body).status == 200
    statements = noted_statements(monkeypatch)
    assert api.call("POST", path, body).status == 200
    assert len(statements) == 2, "the look, and the write"
    assert api.call("POST", path, {"tasks": {function_id: ["p"]}}).status == 200
    assert "AS versions" not in statements[2], "a submit without versions has the statement that it had"


#: Commands that the script itself runs are counted too.
WITHIN_THE_SCRIPT = {
    "exists",
    "hexists",
    "hset",
    "lpush",
    "hmget",
    "hget",
    "hincrby",
    "publish",
    "time",
    "zadd",
    "zscore",
}


def noted_statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the database is asked from now on."""
    statements: list[str] = []
    execute = psycopg.Cursor.execute

    def noted(cursor: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        text = query.decode() if isinstance(query, bytes) else str(query)
        statements.append(re.sub(r"\s+", " ", text).strip())
        return execute(cursor, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", noted)
    return statements


def submit(api: MemoryApi, endpoint_id: str, function_id: str, count: int, *, caller: Identity = ALICE) -> None:
    body = {
        "tasks": {function_id: ["4\n00\nx"] * count},
        "task_ids": {function_id: [new_task_id() for _ in range(count)]},
    }
    assert api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", body, caller=caller).status == 200


def commands(client: Any) -> dict[str, int]:
    return {name.removeprefix("cmdstat_"): said["calls"] for name, said in client.info("commandstats").items()}
