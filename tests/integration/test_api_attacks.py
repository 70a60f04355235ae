"""The attacks of test_lambdas_attacks and test_lambdas_abuse on PostgreSQL, Valkey and S3."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import boto3
import pytest

from farcall_common.store import Stores, StoreSettings, open_stores
from farcall_lambdas.settings import ApiSettings
from tests.integration.store_servers import Valkey, execute
from tests.support.memory_api import MemoryApi
from tests.unit.test_lambdas_abuse import AbuseSuite, MakeApi
from tests.unit.test_lambdas_attacks import AttackSuite


@pytest.fixture(scope="module")
def s3_variables(s3_server: str) -> Iterator[str]:
    """The name of a bucket, with AWS' own variables pointing at it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": s3_server,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }.items():
            patch.setenv(name, value)
        bucket = f"attacks-{uuid.uuid4()}"
        boto3.client("s3").create_bucket(Bucket=bucket)
        yield bucket


@pytest.fixture(scope="module")
def database_url(postgres_server: str) -> Iterator[str]:
    """The URL of a database at the newest schema."""
    name = f"attacks_{uuid.uuid4().hex}"
    execute(postgres_server, f"CREATE DATABASE {name} TEMPLATE template_farcall")
    yield postgres_server.replace("/postgres", f"/{name}")
    execute(postgres_server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="module")
def stores(database_url: str, valkey_server: Valkey, s3_variables: str) -> Iterator[Stores]:
    """One set for all attacks: none may leave anything behind that another one could see."""
    settings = StoreSettings.from_environment(
        {
            "FARCALL_DATABASE_URL": database_url,
            "FARCALL_QUEUE_URL": valkey_server.url,
            "FARCALL_BLOB_BUCKET": s3_variables,
            "FARCALL_TICKET_KEY": "k" * 32,
        }
    )
    stores = open_stores(settings, max_connections=1)
    yield stores
    stores.close()


class TestAttacksOnStores(AttackSuite):
    @pytest.fixture
    def api(self, stores: Stores) -> MemoryApi:
        return MemoryApi(stores=stores, settings=ApiSettings(rate_burst=1_000_000))


class TestAbuseOfStores(AbuseSuite):
    @pytest.fixture
    def make_api(self, stores: Stores) -> MakeApi:
        return lambda **settings: MemoryApi(stores=stores, settings=ApiSettings(**settings))
