"""The stores over TLS, as on AWS: certificates are checked, and a database without TLS is not spoken to."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from farcall_common.errors import ConfigurationError, DatabaseUntrusted, Fault, Unavailable
from farcall_common.store import DatabaseSettings, StoreSettings, migrate, open_records, open_stores
from tests.certificates import Authority
from tests.integration.store_servers import Valkey
from tests.integration.tls_front import TlsFront
from tests.waiting import WAIT_S

KEY = "k" * 32
HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Files:
    """``certificate`` is that of a server at 127.0.0.1, signed by the ``issuer``, whose own is ``authority``."""

    issuer: Authority
    authority: Path
    certificate: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = tmp_path_factory.mktemp("certificates")
    issuer = Authority()
    return Files(
        issuer=issuer,
        authority=issuer.write(directory / "authority.pem"),
        certificate=issuer.certify(HOST, directory / "server.pem"),
    )


@pytest.fixture
def database(postgres_url: str, files: Files) -> Iterator[TlsFront]:
    """TLS before the test's database."""
    with TlsFront(files.certificate, target_port=_port(postgres_url), postgres=True) as front:
        yield front


def _port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def _through(front: TlsFront, url: str) -> str:
    """The database's URL by way of ``front``."""
    return url.replace(f":{_port(url)}/", f":{front.port}/")


def _environment(*, queue_port: int, database_url: str) -> dict[str, str]:
    return {
        "FARCALL_DATABASE_URL": database_url,
        "FARCALL_QUEUE_HOST": HOST,
        "FARCALL_QUEUE_PORT": str(queue_port),
        "FARCALL_QUEUE_TLS": "true",
        "FARCALL_BLOB_BUCKET": "blobs",
        "FARCALL_TICKET_KEY": KEY,
    }


def _conninfo(url: str, authorities: Path) -> str:
    environ = {"FARCALL_DATABASE_URL": url, "FARCALL_DATABASE_AUTHORITIES": str(authorities)}
    return DatabaseSettings.from_environment(environ).conninfo()


def test_records_and_queue_work_over_tls_that_is_verified(
    postgres_url: str,
    valkey: Valkey,
    database: TlsFront,
    files: Files,
    s3_environment: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))  # in the place of the system's authorities
    with TlsFront(files.certificate, target_port=valkey.port) as queue:
        environ = _environment(queue_port=queue.port, database_url=_through(database, postgres_url))
        settings = StoreSettings.from_environment({**environ, "FARCALL_DATABASE_AUTHORITIES": str(files.authority)})
        stores = open_stores(settings)
        stores.database.ping()
        stores.queue.ping()
        assert stores.queue.forwarders() == []
        stores.close()
        assert queue.handshakes >= 1
        assert database.handshakes >= 1


def test_without_a_ca_bundle_an_unverified_database_is_accepted(
    postgres_url: str, database: TlsFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGSSLMODE", "require")  # what the templates ask for in any case
    settings = DatabaseSettings.from_environment({"FARCALL_DATABASE_URL": _through(database, postgres_url)})
    assert migrate.upgrade(settings.conninfo()) is False  # it is at the newest already
    assert database.handshakes >= 1


def test_migrations_check_the_certificate_too(postgres_url: str, database: TlsFront, files: Files) -> None:
    assert migrate.upgrade(_conninfo(_through(database, postgres_url), files.authority)) is False
    assert database.handshakes >= 1


@pytest.fixture(params=["another authority", "another host", "expired", "no TLS"])
def impostor(request: pytest.FixtureRequest, postgres_url: str, files: Files, tmp_path: Path) -> Iterator[str]:
    """How to connect to a database that is not to be spoken to."""
    path = tmp_path / "server.pem"
    if request.param == "no TLS":
        yield _conninfo(postgres_url, files.authority)
        return
    certificate = {
        "another authority": lambda: Authority().certify(HOST, path),
        "another host": lambda: files.issuer.certify("db.example.org", path),
        "expired": lambda: files.issuer.certify(HOST, path, days=-1),
    }[request.param]()
    with TlsFront(certificate, target_port=_port(postgres_url), postgres=True) as front:
        yield _conninfo(_through(front, postgres_url), files.authority)


@pytest.mark.parametrize("use", ["migrations", "records"])
def test_a_server_with_another_certificate_is_refused(impostor: str, use: str) -> None:
    with pytest.raises(DatabaseUntrusted) as caught:
        _used(use, impostor)
    record = caught.value.record
    assert re.fullmatch("the database is not trusted: (SSL error: certificate verify failed|server .*)", record.message)
    assert (record.code, record.fault, record.retryable) == ("DATABASE_UNTRUSTED", Fault.US, True)
    assert "operator" in record.hint
    assert "database.authorities" in record.hint


def _used(use: str, conninfo: str) -> None:
    if use == "migrations":
        migrate.upgrade(conninfo)
        return
    records = open_records(conninfo, timeout_s=0.5)
    try:
        records.database.ping()
    finally:
        records.close()


def test_a_database_is_accepted_again_with_a_valid_certificate(postgres_url: str, files: Files, tmp_path: Path) -> None:
    """As after a deployment with the right authorities, or when RDS has another certificate: no process restarts."""
    fresh = Authority().certify(HOST, tmp_path / "other.pem")
    with TlsFront(fresh, target_port=_port(postgres_url), postgres=True) as front:
        records = open_records(_conninfo(_through(front, postgres_url), files.authority), timeout_s=0.5)
        with pytest.raises(DatabaseUntrusted):
            records.database.ping()
        front.show(files.certificate)
        _until(records.database.ping)
        records.close()


def _until(works: Callable[[], None]) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return works()
        except Unavailable:
            if time.monotonic() > deadline:
                raise


def test_a_missing_ca_bundle_is_a_configuration_error(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nothing.pem"), "nothing.pem"):
        with pytest.raises(ConfigurationError, match=r"nothing\.pem") as caught:
            DatabaseSettings.from_environment(
                {"FARCALL_DATABASE_URL": "postgresql://h/d", "FARCALL_DATABASE_AUTHORITIES": name}
            )
        assert caught.value.hint


def test_an_unverified_queue_is_refused(postgres_url: str, valkey: Valkey, files: Files, s3_environment: None) -> None:
    with TlsFront(files.certificate, target_port=valkey.port) as queue:
        environ = _environment(queue_port=queue.port, database_url=postgres_url)
        stores = open_stores(StoreSettings.from_environment(environ))
        with pytest.raises(Unavailable, match=r"(?i)certificate"):
            stores.queue.ping()
        stores.close()
        assert queue.handshakes == 0


def test_a_queue_with_another_host_name_is_refused(
    postgres_url: str,
    valkey: Valkey,
    files: Files,
    s3_environment: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files.authority))
    certificate = files.issuer.certify("queue.example.org", tmp_path / "server.pem")
    with TlsFront(certificate, target_port=valkey.port) as queue:
        environ = _environment(queue_port=queue.port, database_url=postgres_url)
        stores = open_stores(StoreSettings.from_environment(environ))
        with pytest.raises(Unavailable, match=r"(?i)certificate"):
            stores.queue.ping()
        stores.close()


def test_a_database_without_tls_is_refused(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSSLMODE", "require")
    with pytest.raises(DatabaseUntrusted, match="does not support SSL"):
        migrate.upgrade(postgres_url)
