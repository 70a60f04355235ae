"""Each program of the cloud tier with the rights of its own role, on real stores and on moto, which refuses the rest.

A missing right fails. A right that no request used is too wide, unless it is in a table here.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import hashlib
import io
import json
import os
import subprocess
import sys
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import httpx
import pytest

from farcall_common.store import ForwarderInfo, ValkeyQueue, open_records
from farcall_common.store.migrate import HEAD
from farcall_common.store.model import TaskResult
from farcall_common.wire.states import Reporter, TaskState
from farcall_infra.bundles import RUNTIME
from farcall_infra.cloud.aws import Aws
from farcall_lambdas.identity import Identity
from farcall_lambdas.issued_credentials import IssuedCredentials
from farcall_lambdas.proxy_event import proxy_event
from farcall_lambdas.signed_caller import CANARY_ID, CallerKey
from tests.contract.templates import read_templates
from tests.integration.store_servers import Valkey, free_port
from tests.integration.test_api_handlers import RUNTIME as LAMBDA
from tests.support.enforced_rights import Account
from tests.support.memory_api import ALICE
from tests.waiting import WAIT_S

#: All programs: forwarders that sleep, a canary, the keeper of the exchange cache.
_SETTINGS = {
    "profile": "hobby",
    "canary.minutes": 60,
    "analytics.enabled": "true",
    "analytics.express_zone": "use1-az4",
    "aws:cdk:bundling-stacks": [],
}
#: Rights that AWS uses for a program: the log, the network interfaces of a function, the endpoint of a cache.
_BY_AWS = ("logs:", "ec2:")
#: Rights of people, whose programs sign sessions with S3 Express, which moto lacks.
_UNCHECKED = {"users": {"s3express:CreateSession"}}


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("assembly")
    program = (
        "import json, sys; from pathlib import Path; from farcall_infra.app import synthesize;"
        " synthesize(outdir=Path(sys.argv[1]), context=json.loads(sys.argv[2]))"
    )
    environ = {**os.environ, "CDK_VALIDATION": "false"}
    subprocess.run([sys.executable, "-c", program, directory, json.dumps(_SETTINGS)], env=environ, check=True)
    return directory


@pytest.fixture
def account(assembly: Path, s3_environment: None, s3_server: str) -> Account:
    secret = boto3.client("secretsmanager").create_secret(
        Name=f"globus-{uuid.uuid4().hex}", SecretString=json.dumps({"client_secret": "only-in-memory"})
    )
    parameters = {"GlobusClientId": "client", "GlobusScope": "scope", "GlobusCredentialsArn": secret["ARN"]}
    return Account(s3_server, read_templates(assembly), parameters)


class Program:
    """A function in a process of its own, with the environment of its template and the credentials of its role."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAMBDA], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def invoke(self, handler: str, event: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([handler, event]), file=self._process.stdin, flush=True)
        while line := self._process.stdout.readline():
            if line.startswith(('{"result"', '{"error"')):
                return json.loads(line)
        raise AssertionError("the process ended")

    def close(self) -> None:
        self._process.communicate(timeout=WAIT_S)


class Tier:
    """The stores, the account, and the programs."""

    def __init__(self, account: Account, postgres_url: str, valkey: Valkey) -> None:
        self.account = account
        self._database = urlsplit(postgres_url)
        self._valkey = valkey
        self._programs = account.programs()

    def environ(self, name: str, **more: str) -> dict[str, str]:
        """The environment of a program: that of its template, with the addresses of the stores here."""
        role, variables = self._programs[name]
        database = {
            "FARCALL_DATABASE_HOST": str(self._database.hostname),
            "FARCALL_DATABASE_PORT": str(self._database.port),
            "FARCALL_DATABASE_NAME": self._database.path.strip("/"),
        }
        queue = {"FARCALL_QUEUE_URL": self._valkey.url}
        # No TLS here, and one address for all services.
        left_out = ("PGSSLMODE", "FARCALL_DATABASE_AUTHORITIES", "AWS_USE_DUALSTACK_ENDPOINT")
        return {
            **{key: each for key, each in os.environ.items() if not key.startswith("AWS_")},
            **{key: each for key, each in variables.items() if key not in left_out},
            **database,
            **queue,
            **self.account.credentials(role),
            **more,
        }

    def role(self, name: str) -> str:
        return self._programs[name][0]

    @contextlib.contextmanager
    def running(self, name: str, **more: str) -> Iterator[Program]:
        program = Program(self.environ(name, **more))
        with self.account.enforced():
            yield program
            program.close()

    def key(self, variable: str) -> CallerKey:
        """A key that the API verifies callers with, read as the account's owner."""
        arn = self._programs["api"][1][variable]
        value = json.loads(boto3.client("secretsmanager").get_secret_value(SecretId=arn)["SecretString"])["key"]
        return CallerKey(lambda: str(value))

    def too_wide(self, role: str) -> set[str]:
        """Rights of a role that it did not use."""
        return {right for right in self.account.unused(role) if not right.startswith(_BY_AWS)}


@pytest.fixture
def tier(account: Account, postgres_url: str, valkey: Valkey) -> Tier:
    """The tier after its migration, which has prepared the roles of the programs in the database."""
    made = Tier(account, postgres_url, valkey)
    owner = made.account.programs()["migration_resource"][1]["FARCALL_DATABASE_SECRET_ARN"]
    boto3.client("secretsmanager").put_secret_value(
        SecretId=owner, SecretString=json.dumps({"username": urlsplit(postgres_url).username, "password": "unused"})
    )
    with made.running("migration_resource") as migrator:
        assert migrator.invoke("migrator", {}) == {"result": {"revision": HEAD, "changed": False}}
    assert made.too_wide(made.role("migration_resource")) == set()
    return made


def _caller(program: Program, key: CallerKey, caller: Identity) -> Any:
    """A function that calls the API with an identity, signed by a key."""

    def call(method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        text = None if body is None else json.dumps(body)
        event = proxy_event(method, path, text, caller=caller, key=key, headers=headers)
        answer = program.invoke("api", event)["result"]
        return answer["statusCode"], json.loads(answer["body"])

    return call


def _scale(account: Account) -> None:
    """The forwarders' service, as ECS knows it."""
    ecs = boto3.client("ecs")
    ecs.create_cluster(clusterName="farcall")
    container: Any = {"name": "forwarder", "image": "python", "memory": 128}
    ecs.register_task_definition(family="farcall-forwarder", containerDefinitions=[container])
    ecs.create_service(cluster="farcall", serviceName="forwarder", taskDefinition="farcall-forwarder", desiredCount=0)


def test_api_and_reconciler_have_the_rights_that_they_use(tier: Tier, valkey: Valkey, postgres_url: str) -> None:
    _scale(tier.account)
    big, sha256 = b"d" * 200_000, hashlib.sha256(b"d" * 200_000).hexdigest()
    authorizer_key, canary_key = tier.key("FARCALL_CALLER_SECRET_ARN"), tier.key("FARCALL_CANARY_SECRET_ARN")
    with open_records_of(postgres_url) as records, tier.running("api") as api:
        call = _caller(api, authorizer_key, ALICE)
        canary = _caller(api, canary_key, Identity(CANARY_ID, "canary", expires_at=9e9))
        assert canary("GET", "/v3/functions")[0] == 200
        function_id = call("POST", "/v3/functions", {"function_name": "f", "function_code": "4\n01\nf"})[1][
            "function_uuid"
        ]
        endpoint_id = call("POST", "/v3/endpoints", {"endpoint_name": "laptop"})[1]["endpoint_id"]
        submit = f"/v3/endpoints/{endpoint_id}/submit"

        _, granted = call("POST", "/v3/blobs", {"size_bytes": len(big), "sha256": sha256})
        httpx.put(granted["upload_url"], content=big, headers=granted["headers"]).raise_for_status()
        reference = {"blob_key": granted["blob_key"], "size_bytes": len(big), "sha256": sha256}
        status, submitted = call("POST", submit, {"tasks": {function_id: [reference, "i" * 100_000]}})
        assert status == 200, submitted
        absent = {**reference, "sha256": "0" * 64, "blob_key": granted["blob_key"].replace(sha256, "0" * 64)}
        status, refused = call("POST", submit, {"tasks": {function_id: [absent]}})
        assert (status, refused["code"]) == (404, "BLOB_UNKNOWN"), refused

        by_reference, inline = submitted["tasks"][function_id]
        uploaded = records.tasks.get_tasks([by_reference])[by_reference].payload_ref
        done = TaskResult(inline, endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result_ref=uploaded)
        records.tasks.record_results([done], at=dt.datetime.now(dt.UTC))
        assert call("GET", f"/v2/tasks/{inline}")[1]["result"] == big.decode()
        ours = call("GET", f"/v2/tasks/{inline}", headers={"X-Farcall-Accept": "blob-ref"})[1]
        assert httpx.get(ours["result_ref"]["url"]).content == big

        key = base64.b85encode(bytes(32)).decode()
        status, waking = call("POST", f"/v3/endpoints/{endpoint_id}/connect", {"public_key": key})
        assert (status, waking["code"]) == (503, "FORWARDER_WAKING"), waking
    assert tier.too_wide(tier.role("api")) == set()

    valkey.wipe()
    with contextlib.closing(ValkeyQueue(valkey.url)) as queue:
        queue.announce(ForwarderInfo("f-1", "tcp://127.0.0.1:1", "k" * 40, idle_s=1e6), ttl_s=60)
    with tier.running("reconciler", FARCALL_SETTLE_S="0.001") as reconciler:
        done_by = reconciler.invoke("reconciler", {})["result"]
    assert (done_by["offered"], done_by["slept"]) == (1, 1)
    assert tier.too_wide(tier.role("reconciler")) == set()


@contextlib.contextmanager
def open_records_of(postgres_url: str) -> Iterator[Any]:
    records = open_records(postgres_url)
    yield records
    records.close()


def test_a_program_with_the_rights_of_another_is_refused(tier: Tier) -> None:
    """The account really checks: the reconciler may neither read the key of tickets nor write blobs."""
    variables = tier.environ("api") | tier.account.credentials(tier.role("reconciler"))
    with tier.account.enforced():
        program = Program(variables)
        refused = program.invoke("api", proxy_event("GET", "/v3/functions", caller=None))
        program.close()
    assert "AccessDenied" in json.dumps(refused)


def test_the_authorizer_has_the_rights_that_it_uses(tier: Tier) -> None:
    arn = "arn:aws:execute-api:us-east-1:123456789012:abcdef/api/GET/v3/tasks"
    event = {"type": "TOKEN", "methodArn": arn, "authorizationToken": f"Bearer {'t' * 40}"}
    forged = IssuedCredentials(CallerKey(lambda: "f" * 32)).issue_token(ALICE, token_id="1", expires_at=9e9)
    # Nothing listens there: the secrets are read before.
    nowhere = {"GLOBUS_SDK_SERVICE_URL_AUTH": f"http://127.0.0.1:{free_port()}/"}
    with tier.running("authorizer", **nowhere) as authorizer:
        assert "Globus" in authorizer.invoke("authorizer", event)["error"]
        assert authorizer.invoke("authorizer", {**event, "authorizationToken": f"Bearer {forged}"}) == {
            "error": "Unauthorized"
        }
    assert tier.too_wide(tier.role("authorizer")) == set()
    assert len({use.resource for use in tier.account.uses if use.role == tier.role("authorizer")}) == 2


def test_the_canary_has_the_rights_that_it_uses(tier: Tier) -> None:
    httpx.post(f"{tier.account.address}/moto-api/config", json={"lambda": {"use_docker": False}}).raise_for_status()
    with tier.running("canary") as canary:
        # moto answers for the API with the request, which is no answer.
        assert "error" in canary.invoke("canary", {})
    assert tier.too_wide(tier.role("canary")) == set()


def test_the_keeper_of_the_cache_has_the_rights_that_it_uses(tier: Tier) -> None:
    """moto checks the rights of ElastiCache's calls, and implements none of these."""
    environ = tier.environ("exchange_cache")
    with tier.account.enforced():
        used = subprocess.run([sys.executable, "-c", _KEEPER], env=environ, capture_output=True, text=True, check=False)
    assert "not authorized" not in used.stdout + used.stderr
    assert tier.too_wide(tier.role("exchange_cache")) == set()


def test_the_forwarder_has_the_rights_that_it_uses(tier: Tier) -> None:
    program = b"import os; print('started', os.environ['PYTHONPATH'])"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as bundle:
        bundle.writestr("started.py", program)
    line = f"{hashlib.sha256(program).hexdigest()}  started.py\n"
    environ = tier.environ("forwarder")
    environ |= {
        "FARCALL_BUNDLE_DIGEST": hashlib.sha256(line.encode()).hexdigest(),
        "FARCALL_FORWARDER_ADVERTISE": "127.0.0.1",
    }
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket=environ["FARCALL_BUNDLE_BUCKET"])
    s3.put_object(Bucket=environ["FARCALL_BUNDLE_BUCKET"], Key=environ["FARCALL_BUNDLE_KEY"], Body=packed.getvalue())
    boot: list[str | Path] = [sys.executable, RUNTIME / "fargate_boot.py", sys.executable, "-m", "started"]
    with tier.account.enforced():
        booted = subprocess.run(boot, env=environ, capture_output=True, text=True, check=False)
        assert booted.stdout.startswith("started"), booted.stderr
        used = subprocess.run(
            [sys.executable, "-c", _FORWARDER], env=environ, capture_output=True, text=True, check=False
        )
        assert used.returncode == 0, used.stderr
    assert tier.too_wide(tier.role("forwarder")) == set()


#: The calls of the keeper: tests of the templates hold that it makes no others.
_KEEPER = """
import datetime, os
from farcall_lambdas.cache_traffic import CloudWatchMeasurements
from farcall_lambdas.serverless_cache import ServerlessCache

now = datetime.datetime.now(datetime.UTC)
cache = ServerlessCache.from_environment(os.environ)
measured = CloudWatchMeasurements(cache.name)
for call in (cache.create, cache.find, cache.delete, lambda: measured.traffic(now - datetime.timedelta(hours=1), now)):
    try:
        call()
    except Exception as error:
        print(error)
"""

#: The calls of the forwarder: tests of the templates hold that it makes no others.
_FORWARDER = """
import hashlib, os, urllib.request
from farcall_common.store import BlobRef, StoreSettings, open_stores
from farcall_common.store.model import PIECES
from farcall_common.errors import BlobUnknown

stores = open_stores(StoreSettings.from_environment(os.environ))
blobs = stores.blobs
data = b"piece"
ref = BlobRef(PIECES + "session/1", len(data), hashlib.sha256(data).hexdigest())
url, headers = blobs.upload_url(ref, ttl_s=60)
headers = {**headers, "Content-Type": "text/plain"}
urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers, method="PUT"))
assert urllib.request.urlopen(blobs.download_url(ref.blob_key, ttl_s=60)).read() == data
blobs.write(ref.blob_key, data)
assert blobs.read_part(ref.blob_key, offset_bytes=0, length_bytes=5) == data
blobs.delete([ref.blob_key])
try:
    blobs.read_part(ref.blob_key, offset_bytes=0, length_bytes=5)
except BlobUnknown:
    print("unknown")
stores.close()
"""


def test_users_of_analytics_have_the_rights_that_they_use(tier: Tier) -> None:
    """The managed policy that an administrator gives to people: `farcall cloud analytics` and blocks in the bucket."""
    httpx.post(f"{tier.account.address}/moto-api/config", json={"lambda": {"use_docker": False}}).raise_for_status()
    account = tier.account
    made = account.credentials("users")
    session = boto3.Session(
        aws_access_key_id=made["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=made["AWS_SECRET_ACCESS_KEY"],
        aws_session_token=made["AWS_SESSION_TOKEN"],
    )
    bucket, keeper = account.outputs["Storage"].removeprefix("s3://"), account.outputs["CacheFunction"]
    with account.enforced():
        aws = Aws(session.client, region="us-east-1")  # type: ignore[arg-type]  # overloads for each literal
        aws.invoke(keeper, {"action": "status"})
        s3 = session.client("s3")
        s3.put_object(Bucket=bucket, Key="job/block", Body=b"rows")
        assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 1
        assert s3.get_object(Bucket=bucket, Key="job/block")["Body"].read() == b"rows"
        s3.delete_object(Bucket=bucket, Key="job/block")
    assert tier.too_wide("users") == _UNCHECKED["users"]


def test_every_role_of_the_templates_was_run(account: Account) -> None:
    """A program that is added needs a test here."""
    tasks = {role for role in account.roles() if "ExecutionRole" in role}  # ECS itself uses it
    run = {role for role, _ in account.programs().values()} | {"users"}
    assert set(account.roles()) - tasks == run
    assert set(account.programs()) == {
        "api", "authorizer", "canary", "exchange_cache", "forwarder", "migration_resource", "reconciler",
    }  # fmt: skip
