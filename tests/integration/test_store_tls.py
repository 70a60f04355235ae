"""The stores over TLS, as on AWS: the queue's certificate is checked, and the database is not spoken to without."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from farcall_common.errors import Unavailable
from farcall_common.store import StoreSettings, open_stores
from tests.integration.store_servers import Valkey
from tests.integration.tls_front import TlsFront, make_certificate

KEY = "k" * 32


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def _environment(*, queue_port: int, database_url: str) -> dict[str, str]:
    return {
        "FARCALL_DATABASE_URL": database_url,
        "FARCALL_QUEUE_HOST": "127.0.0.1",
        "FARCALL_QUEUE_PORT": str(queue_port),
        "FARCALL_QUEUE_TLS": "true",
        "FARCALL_BLOB_BUCKET": "blobs",
        "FARCALL_TICKET_KEY": KEY,
    }


def test_records_and_queue_work_over_tls(
    postgres_url: str, valkey: Valkey, certificate: Path, s3_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))  # in the place of the system's authorities
    monkeypatch.setenv("PGSSLMODE", "require")
    address = urlsplit(postgres_url)
    assert address.port is not None
    with (
        TlsFront(certificate, target_port=valkey.port) as queue,
        TlsFront(certificate, target_port=address.port, postgres=True) as database,
    ):
        url = postgres_url.replace(f":{address.port}/", f":{database.port}/")
        stores = open_stores(StoreSettings.from_environment(_environment(queue_port=queue.port, database_url=url)))
        stores.records.ping()
        stores.queue.ping()
        assert stores.queue.forwarders(now=0.0) == []
        stores.close()
        assert queue.handshakes >= 1
        assert database.handshakes >= 1


def test_a_queue_that_nobody_vouches_for_is_not_spoken_to(
    postgres_url: str, valkey: Valkey, certificate: Path, s3_environment: None
) -> None:
    with TlsFront(certificate, target_port=valkey.port) as queue:
        environ = _environment(queue_port=queue.port, database_url=postgres_url)
        stores = open_stores(StoreSettings.from_environment(environ))
        with pytest.raises(Unavailable, match=r"(?i)certificate"):
            stores.queue.ping()
        stores.close()
        assert queue.handshakes == 0


def test_a_database_without_tls_is_not_spoken_to(
    postgres_url: str, valkey: Valkey, s3_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGSSLMODE", "require")
    environ = _environment(queue_port=valkey.port, database_url=postgres_url) | {"FARCALL_QUEUE_TLS": "false"}
    stores = open_stores(StoreSettings.from_environment(environ))
    with pytest.raises(Unavailable):
        stores.records.ping()
    stores.close()
