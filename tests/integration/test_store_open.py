"""From the environment to open stores, with credentials in the address or in secrets."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import boto3
import psycopg
import pytest

from farcall_common.errors import Unavailable
from farcall_common.store import PeerKey, PeerKind, StoreSettings, Tickets, open_stores
from farcall_infra.profiles import load_profile, profile_names
from tests.integration.store_servers import Valkey

KEY = "k" * 32


def test_the_local_tier_opens(postgres_url: str, valkey: Valkey, s3_environment: None) -> None:
    environ = {
        "FARCALL_DATABASE_URL": postgres_url,
        "FARCALL_QUEUE_URL": valkey.url,
        "FARCALL_BLOB_BUCKET": "blobs",
        "FARCALL_TICKET_KEY": KEY,
    }
    stores = open_stores(StoreSettings.from_environment(environ))
    stores.database.ping()
    stores.queue.ping()
    with pytest.raises(Unavailable):  # the bucket does not exist
        stores.blobs.ping()
    stores.close()


def test_secrets_are_read(postgres_url: str, valkey: Valkey, s3_environment: None) -> None:
    database = urlsplit(postgres_url)
    secrets = boto3.client("secretsmanager")
    credentials = json.dumps({"username": database.username, "password": "not checked"})
    environ = {
        "FARCALL_DATABASE_HOST": str(database.hostname),
        "FARCALL_DATABASE_PORT": str(database.port),
        "FARCALL_DATABASE_NAME": database.path.strip("/"),
        "FARCALL_DATABASE_SECRET_ARN": secrets.create_secret(Name="database", SecretString=credentials)["ARN"],
        "FARCALL_QUEUE_HOST": "127.0.0.1",
        "FARCALL_QUEUE_PORT": str(valkey.port),
        "FARCALL_QUEUE_TLS": "false",
        "FARCALL_BLOB_BUCKET": "blobs",
        "FARCALL_TICKET_SECRET_ARN": secrets.create_secret(Name="t", SecretString=json.dumps({"key": KEY}))["ARN"],
    }
    stores = open_stores(StoreSettings.from_environment(environ))
    stores.database.ping()
    stores.queue.ping()
    ticket = stores.tickets.issue(PeerKey("key", PeerKind.CLIENT, "alice"), expires_at=10)
    assert Tickets(KEY).verify(ticket, now=1).peer.subject == "alice"
    stores.close()


def test_a_missing_secret_is_unavailable(s3_environment: None) -> None:
    environ = {
        "FARCALL_DATABASE_URL": "postgresql://127.0.0.1/nowhere",
        "FARCALL_QUEUE_URL": "redis://127.0.0.1/0",
        "FARCALL_BLOB_BUCKET": "blobs",
        "FARCALL_TICKET_SECRET_ARN": "arn:aws:secretsmanager:us-east-1:123456789012:secret:nothing",
    }
    with pytest.raises(Unavailable, match="secret:nothing"):
        open_stores(StoreSettings.from_environment(environ))


def test_the_tests_use_the_major_version_of_a_deployment(postgres_url: str) -> None:
    wanted = {load_profile(name).database.version for name in profile_names()}
    with psycopg.connect(postgres_url) as connection:
        assert {str(connection.info.server_version // 10_000)} == wanted
