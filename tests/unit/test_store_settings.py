from __future__ import annotations

from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from farcall_common.errors import ConfigurationError
from farcall_common.store import DatabaseSettings, StoreSettings
from farcall_common.store.blobs_files import FileBlobs
from farcall_common.store.settings import BlobSettings

LOCAL = {
    "FARCALL_DATABASE_URL": "postgresql://farcall:secret@127.0.0.1:5432/farcall",
    "FARCALL_QUEUE_URL": "redis://:secret@127.0.0.1:6379/0",
    "FARCALL_BLOB_DIRECTORY": "/blobs",
    "FARCALL_BLOB_URL": "http://127.0.0.1:9000",
    "FARCALL_BLOB_KEY": "secret",
    "FARCALL_TICKET_KEY": "secret" * 8,
}
CLOUD = {
    "FARCALL_DATABASE_HOST": "db.example",
    "FARCALL_DATABASE_NAME": "farcall",
    "FARCALL_DATABASE_SECRET_ARN": "arn:db",
    "FARCALL_QUEUE_HOST": "cache.example",
    "FARCALL_BLOB_BUCKET": "blobs",
    "FARCALL_TICKET_SECRET_ARN": "arn:ticket",
}


def test_the_local_tier_gives_addresses_with_credentials() -> None:
    settings = StoreSettings.from_environment(LOCAL)
    assert settings.database.conninfo() == LOCAL["FARCALL_DATABASE_URL"]
    assert settings.queue_url == LOCAL["FARCALL_QUEUE_URL"]
    assert settings.blobs == BlobSettings(directory="/blobs", url="http://127.0.0.1:9000", key="secret")
    assert settings.blobs is not None
    assert isinstance(settings.blobs.open(), FileBlobs)
    assert settings.ticket_key == LOCAL["FARCALL_TICKET_KEY"]


def test_the_cloud_gives_hosts_and_secrets() -> None:
    settings = StoreSettings.from_environment(CLOUD)
    assert settings.database == DatabaseSettings(host="db.example", name="farcall", secret_arn="arn:db")
    assert settings.queue_url == "rediss://cache.example:6379/0"
    assert settings.blobs == BlobSettings(bucket="blobs")
    assert (settings.ticket_key, settings.ticket_secret_arn) == (None, "arn:ticket")


def test_certificate_is_checked_against_the_ca_bundle(tmp_path: Path) -> None:
    authorities = tmp_path / "authorities.pem"
    authorities.touch()
    settings = StoreSettings.from_environment({**LOCAL, "FARCALL_DATABASE_AUTHORITIES": str(authorities)})
    told = conninfo_to_dict(settings.database.conninfo())
    assert (told["host"], told["sslmode"], told["sslrootcert"]) == ("127.0.0.1", "verify-full", str(authorities))
    cloud = StoreSettings.from_environment({**CLOUD, "FARCALL_DATABASE_AUTHORITIES": str(authorities)})
    assert cloud.database.authorities == str(authorities)


def test_transport_encryption_can_be_off() -> None:
    plain = {**CLOUD, "FARCALL_QUEUE_TLS": "False", "FARCALL_QUEUE_PORT": "7000"}
    assert StoreSettings.from_environment(plain).queue_url == "redis://cache.example:7000/0"
    with pytest.raises(ConfigurationError, match="FARCALL_QUEUE_TLS"):
        StoreSettings.from_environment({**CLOUD, "FARCALL_QUEUE_TLS": "perhaps"})


@pytest.mark.parametrize("environ", [LOCAL, CLOUD])
def test_missing_setting_is_named(environ: dict[str, str]) -> None:
    for name in environ:
        without = {key: value for key, value in environ.items() if key != name}
        with pytest.raises(ConfigurationError, match=name):
            StoreSettings.from_environment(without)


def test_settings_do_not_show_their_secrets() -> None:
    shown = repr(StoreSettings.from_environment(LOCAL))
    assert not any(LOCAL[name] in shown for name in LOCAL if "_BLOB_" not in name)
    assert "key=" not in repr(StoreSettings.from_environment(LOCAL).blobs)
