"""The API as a process, on real stores."""

from __future__ import annotations

import concurrent.futures
import datetime as dt
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest

import farcall
from farcall_common.store import ForwarderInfo, Stores, StoreSettings, TaskResult, open_stores
from farcall_common.wire.ids import new_task_id
from farcall_common.wire.states import Reporter, TaskState
from tests.integration.identity_provider import serving
from tests.integration.store_servers import Valkey
from tests.support.stores import single
from tests.waiting import WAIT_S

ALICE_ID = "a11ce000-0000-4000-8000-000000000001"


class Api:
    """The process, its client and the stores behind it."""

    def __init__(self, environ: dict[str, str], directory: Path) -> None:
        self.environ = environ
        self._port_file = directory / "port"
        self.process: subprocess.Popen[bytes]
        self.client: httpx.Client

    def start(self) -> None:
        self._port_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "farcall_lambdas.local", "--port", "0", "--port-file", str(self._port_file)]
        self.process = subprocess.Popen(command, env=self.environ)
        deadline = time.monotonic() + WAIT_S
        while not self._port_file.exists():
            assert self.process.poll() is None, "the process ended"
            assert time.monotonic() < deadline, "the process does not serve"
            time.sleep(0.01)
        url = f"http://127.0.0.1:{self._port_file.read_text().strip()}"
        self.client = httpx.Client(base_url=url, headers={"Authorization": "Bearer sesame"}, timeout=WAIT_S)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.client.close()
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def post(self, path: str, body: Any) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def environ(postgres_url: str, valkey: Valkey, s3_environment: None) -> dict[str, str]:
    boto3.client("s3").create_bucket(Bucket="farcall-test")
    return {
        **os.environ,
        "FARCALL_DATABASE_URL": postgres_url,
        "FARCALL_QUEUE_URL": valkey.url,
        "FARCALL_BLOB_BUCKET": "farcall-test",
        "FARCALL_TICKET_KEY": "k" * 32,
        "FARCALL_AUTH_PROVIDER": "dev",
        "FARCALL_DEV_TOKENS": json.dumps({"sesame": {"identity_id": ALICE_ID, "username": "alice"}}),
        "FARCALL_ALLOWED_IDENTITIES": "*",
        "FARCALL_RECONCILE_PERIOD_S": "0.1",
        "FARCALL_SETTLE_S": "0.1",
    }


@pytest.fixture
def api(environ: dict[str, str], tmp_path: Path) -> Iterator[Api]:
    api = Api(environ, tmp_path)
    api.start()
    yield api
    if api.process.poll() is None:
        api.stop(signal.SIGKILL)


@pytest.fixture
def stores(environ: dict[str, str]) -> Iterator[Stores]:
    stores = open_stores(StoreSettings.from_environment(environ))
    yield stores
    stores.close()


def prepare(api: Api) -> tuple[str, str]:
    function = api.post("/v3/functions", {"function_name": "f", "function_code": "4\n01\nf"})
    endpoint = api.post("/v3/endpoints", {"endpoint_name": "laptop"})
    return function["function_uuid"], endpoint["endpoint_id"]


def lease(stores: Stores, endpoint_id: str, limit: int) -> list[str]:
    fence = single.claim(stores.queue, endpoint_id, "fwd-1", ttl_s=60)
    single.mark_restored(stores.queue, endpoint_id, fence)
    return [each.task.task_id for each in single.lease(stores.queue, endpoint_id, fence, limit=limit, lease_s=60)]


def test_a_task_passes_through_the_api(api: Api, stores: Stores) -> None:
    function_id, endpoint_id = prepare(api)
    body = {"tasks": {function_id: ["payload"] * 100}}

    submitted = api.post(f"/v3/endpoints/{endpoint_id}/submit", body)

    task_ids = submitted["tasks"][function_id]
    assert lease(stores, endpoint_id, 200) == task_ids
    results = [
        TaskResult(task_id, endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"00\nr") for task_id in task_ids
    ]
    stores.tasks.record_results(results, at=_now())
    read = api.post("/v2/batch_status", {"task_ids": task_ids})["results"]
    assert {task["result"] for task in read.values()} == {"00\nr"}
    assert api.client.get(f"/v2/taskgroup/{submitted['task_group_id']}").json()["tasks"][0]["id"] == task_ids[0]


def test_big_payloads_and_results_go_through_the_blob_store(api: Api, stores: Stores) -> None:
    function_id, endpoint_id = prepare(api)
    data = b"d" * 200_000
    sha256 = hashlib.sha256(data).hexdigest()
    granted = api.post("/v3/blobs", {"size_bytes": len(data), "sha256": sha256})
    httpx.put(granted["upload_url"], content=data, headers=granted["headers"]).raise_for_status()
    reference = {"blob_key": granted["blob_key"], "size_bytes": len(data), "sha256": sha256}

    body = {"tasks": {function_id: [reference, "i" * 100_000]}}
    by_reference, inline = api.post(f"/v3/endpoints/{endpoint_id}/submit", body)["tasks"][function_id]

    tasks = stores.tasks.get_tasks([by_reference, inline])
    uploaded, kept = tasks[by_reference].payload_ref, tasks[inline].payload_ref
    assert uploaded is not None
    assert kept is not None
    assert stores.blobs.read(kept.blob_key) == b"i" * 100_000

    end = TaskResult(inline, endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result_ref=uploaded)
    stores.tasks.record_results([end], at=_now())
    assert api.client.get(f"/v2/tasks/{inline}").json()["result"] == data.decode()
    ours = api.client.get(f"/v2/tasks/{inline}", headers={"X-Farcall-Accept": "blob-ref"}).json()
    assert httpx.get(ours["result_ref"]["url"]).content == data


def test_a_repeated_submit_creates_the_tasks_once(api: Api, stores: Stores) -> None:
    function_id, endpoint_id = prepare(api)
    body = {"tasks": {function_id: ["p"] * 50}, "task_ids": {function_id: [new_task_id() for _ in range(50)]}}

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: api.post(f"/v3/endpoints/{endpoint_id}/submit", body), range(8)))

    assert {json.dumps(answer["tasks"]) for answer in answers} == {json.dumps(body["task_ids"])}
    assert lease(stores, endpoint_id, 200) == body["task_ids"][function_id]
    other = {**body, "tasks": {function_id: ["q"] * 50}}
    reused = api.client.post(f"/v3/endpoints/{endpoint_id}/submit", json=other)
    assert (reused.status_code, reused.json()["code"]) == (409, "TASK_ID_REUSED")


def test_tasks_accepted_without_the_queue_are_queued_when_it_returns(api: Api, stores: Stores, valkey: Valkey) -> None:
    function_id, endpoint_id = prepare(api)
    valkey.kill()
    submitted = api.post(f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {function_id: ["p"] * 5}})
    valkey.start()

    deadline = time.monotonic() + WAIT_S
    while stores.queue.depth([endpoint_id]) < 5:
        assert time.monotonic() < deadline, "the reconciler did not queue the tasks"
        time.sleep(0.02)

    assert lease(stores, endpoint_id, 10) == submitted["tasks"][function_id]


def test_connect_and_cancel(api: Api, stores: Stores) -> None:
    function_id, endpoint_id = prepare(api)
    key = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
    refused = api.client.post(f"/v3/endpoints/{endpoint_id}/connect", json={"public_key": key})
    assert (refused.status_code, refused.json()["code"]) == (503, "NO_FORWARDER")

    stores.queue.announce(ForwarderInfo("fwd-1", "tcp://127.0.0.1:1", "k" * 40), ttl_s=15)
    way_in = api.post(f"/v3/endpoints/{endpoint_id}/connect", {"public_key": key})
    assert stores.tickets.verify(way_in["ticket"], now=time.time()).peer.subject == endpoint_id
    assert api.post("/v3/stream", {"public_key": key.replace("Y", "Z")})["forwarders"] == way_in["forwarders"]

    submitted = api.post(f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {function_id: ["p"]}})
    [task_id] = submitted["tasks"][function_id]
    assert api.post(f"/v3/tasks/{task_id}/cancel", {})["outcome"] == "cancelled"
    history = api.client.get(f"/v3/tasks/{task_id}/events").json()["events"]
    assert [event["state"] for event in history] == ["received", "cancelled"]


def test_an_accepted_task_survives_the_death_of_the_api(api: Api, stores: Stores) -> None:
    function_id, endpoint_id = prepare(api)
    submitted = api.post(f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {function_id: ["p"]}})

    assert api.stop(signal.SIGKILL) == -signal.SIGKILL
    api.start()

    [task_id] = submitted["tasks"][function_id]
    assert api.client.get(f"/v2/tasks/{task_id}").json()["status"] == "received"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_api_process_ends_on_sigterm(api: Api, number: signal.Signals) -> None:
    assert api.client.get("/v2/version").status_code == 200

    assert api.stop(number) == 0


def test_a_missing_setting_is_reported(environ: dict[str, str]) -> None:
    del environ["FARCALL_BLOB_BUCKET"]

    ended = subprocess.run(
        [sys.executable, "-m", "farcall_lambdas.local"],
        env=environ,
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )

    assert ended.returncode == os.EX_CONFIG
    assert b"FARCALL_BLOB_BUCKET" in ended.stderr


def test_the_migrator_runs_as_a_process(environ: dict[str, str]) -> None:
    command = [sys.executable, "-m", "farcall_lambdas.handlers.migrator"]

    assert subprocess.run(command, env=environ, timeout=WAIT_S, check=False).returncode == 0

    away = {**environ, "FARCALL_DATABASE_URL": "postgresql://no-user@127.0.0.1:1/none"}
    assert subprocess.run(command, env=away, timeout=WAIT_S, check=False).returncode == 1


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


@pytest.mark.parametrize("name", ["oidc", "globus"])
def test_users_come_from_a_provider(environ: dict[str, str], tmp_path: Path, name: str) -> None:
    """The command line logs in at the provider that the API asks, and both speak HTTP with it."""
    with serving() as provider:
        served = environ | {
            "FARCALL_AUTH_PROVIDER": name,
            "FARCALL_OIDC_ISSUER": provider.issuer,
            "FARCALL_OIDC_AUDIENCE": provider.audience,
            "FARCALL_OIDC_CLIENTS": provider.client_id,
            "FARCALL_ALLOWED_DOMAINS": "example.org",
            "FARCALL_GLOBUS_CLIENT_ID": provider.audience,
            "FARCALL_GLOBUS_CLIENT_SECRET": "its own",
            "FARCALL_GLOBUS_SCOPE": "farcall",
            "GLOBUS_SDK_SERVICE_URL_AUTH": f"{provider.issuer}/",
        }
        api = Api(served, tmp_path)
        api.start()
        user = {name: value for name, value in served.items() if not name.startswith("FARCALL_")} | {
            "FARCALL_HOME": str(tmp_path / "home"),
            "FARCALL_API_URL": str(api.client.base_url),
            "FARCALL_CLIENT_ID": provider.client_id,
            "FARCALL_CLIENT_SECRET": provider.client_secret,
        }

        def farcall(*arguments: str) -> str:
            command = [sys.executable, "-c", "from farcall.cli import main; main()", *arguments]
            ended = subprocess.run(command, env=user, capture_output=True, text=True, check=False, timeout=WAIT_S)
            assert ended.returncode == 0, ended.stderr
            return ended.stdout

        how = ("--issuer", provider.issuer) if name == "oidc" else ("--provider", "globus", "--scope", "farcall")
        farcall("login", *how)
        who = json.loads(farcall("whoami", "--json"))
        assert (who["provider"], who["username"]) == (name, "ada@example.org")
        assert provider.grants == ["client_credentials"]
        assert api.client.get("/v3/whoami").status_code == 401, "sesame is no token of the provider"
        assert api.stop() == 0


def test_a_client_repeats_what_the_throttle_refused(
    environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A client with more requests than the stage's rate is slower, and none of its calls fails."""
    caplog.set_level(logging.DEBUG, logger="farcall")
    api = Api(environ | {"FARCALL_THROTTLE_RATE_PER_S": "5", "FARCALL_THROTTLE_BURST": "2"}, tmp_path)
    api.start()
    try:
        with farcall.Client(str(api.client.base_url), "sesame") as client:
            for _ in range(8):
                assert client.get_endpoints() == []
        assert "[LIMIT_EXCEEDED] Too Many Requests" in caplog.text
    finally:
        api.stop(signal.SIGKILL)
