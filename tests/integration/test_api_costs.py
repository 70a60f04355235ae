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
from farcall_lambdas.testing import MemoryApi
from tests.integration.store_servers import Valkey


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
    endpoint_id = api.call("POST", "/v3/endpoints", {"endpoint_name": "e"}).body["endpoint_id"]
    function = {"function_name": "f", "function_code": "4\n01\nf"}
    function_id = api.call("POST", "/v3/functions", function).body["function_uuid"]
    submit(api, endpoint_id, function_id, 1)  # scripts are loaded, statements are known
    statements: list[str] = []
    execute = psycopg.Cursor.execute

    def noted(cursor: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        text = query.decode() if isinstance(query, bytes) else str(query)
        statements.append(re.sub(r"\s+", " ", text).strip())
        return execute(cursor, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", noted)
    with redis.Redis.from_url(valkey.url) as client:
        client.config_resetstat()
        submit(api, endpoint_id, function_id, count)
        calls = commands(client)

    # One read (endpoint, function, tasks with these ids), and the transaction that writes tasks, group and events.
    read, write = statements
    assert read.startswith("SELECT (SELECT row_to_json(endpoint) FROM endpoint ")
    assert write.startswith("WITH added AS ( INSERT INTO task (")
    # The script says how long the queue is; that it is short is believed for a second.
    assert (calls["evalsha"], calls["llen"]) == (1, 1)
    assert set(calls) <= {"evalsha", "info", "config|resetstat", *WITHIN_THE_SCRIPT}


#: Commands that the script itself runs are counted too.
WITHIN_THE_SCRIPT = {"exists", "hset", "llen", "lpush", "hmget", "hget", "publish"}


def submit(api: MemoryApi, endpoint_id: str, function_id: str, count: int) -> None:
    body = {
        "tasks": {function_id: ["4\n00\nx"] * count},
        "task_ids": {function_id: [new_task_id() for _ in range(count)]},
    }
    assert api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", body).status == 200


def commands(client: Any) -> dict[str, int]:
    return {name.removeprefix("cmdstat_"): said["calls"] for name, said in client.info("commandstats").items()}
