"""The file of the database's authorities: what is taken of it, what is refused, and what it changes."""

from __future__ import annotations

import datetime as dt
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from farcall_common.errors import ConfigurationError
from farcall_infra.authorities import AUTHORITIES_FILE, FETCH_AUTHORITIES, fetch_authorities, read_authorities
from farcall_infra.bundles import ARM64, FORWARDER, LAMBDAS
from farcall_infra.deployment import deployment_from_context
from tests.certificates import Authority

NOW = dt.datetime.now(dt.UTC)


def _file(directory: Path, text: str) -> Path:
    path = directory / "authorities.pem"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_certificates_of_authorities_are_taken_and_nothing_else(tmp_path: Path) -> None:
    one, other, past = Authority("one", days=20), Authority("other", days=300), Authority("past", days=-1)
    server = one.certify("db.example.org", tmp_path / "server.pem").read_text(encoding="utf-8")
    assert "PRIVATE KEY" in server
    found = read_authorities(_file(tmp_path, f"# Zürich\n{other.pem}{server}{past.pem}{one.pem}{one.pem}"), now=NOW)
    assert found.pem == "".join(sorted([one.pem, other.pem, past.pem]))
    assert found.valid == 2
    assert found.expires_at - NOW > dt.timedelta(days=299)
    assert found.path.is_absolute()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: .*No such file"),
        ("", "cannot be read"),
        ("<html>not found</html>", "cannot be read"),
        ("-----BEGIN CERTIFICATE-----\nbroken\n-----END CERTIFICATE-----\n", "cannot be read"),
        (Authority(days=-1).pem + Authority(days=0).pem, "every authority .* has expired"),
    ],
    ids=["missing", "empty", "no PEM", "broken", "expired"],
)
def test_a_file_that_vouches_for_nobody_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "nothing.pem" if text is None else _file(tmp_path, text)
    with pytest.raises(ConfigurationError, match=said) as caught:
        deployment_from_context({"database.authorities": str(path)})
    assert str(path) in caught.value.record.message
    assert FETCH_AUTHORITIES in caught.value.hint


def test_a_servers_certificate_is_no_authority(tmp_path: Path) -> None:
    path = Authority().certify("db.example.org", tmp_path / "server.pem")
    with pytest.raises(ConfigurationError, match="none of an authority"):
        read_authorities(path, now=NOW)


def test_bundles_have_the_file_and_its_hash_in_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = Authority("one"), Authority("other")
    plain = deployment_from_context({"database.authorities": ""})
    assert plain.packed(LAMBDAS) == LAMBDAS
    digests = {LAMBDAS.digest(ARM64), FORWARDER.digest(ARM64)}
    for text in (one.pem, one.pem + other.pem, other.pem + one.pem):
        _file(tmp_path, text)
        deployment = deployment_from_context({"database.authorities": "authorities.pem"})
        assert deployment.authorities is not None
        assert deployment.authorities.path == tmp_path / "authorities.pem"
        for bundle in map(deployment.packed, (LAMBDAS, FORWARDER)):
            assert bundle.texts == ((AUTHORITIES_FILE, deployment.authorities.pem),)
            digests.add(bundle.digest(ARM64))
    assert len(digests) == 6  # the order of the certificates makes no difference


class _Truststore(BaseHTTPRequestHandler):
    """Serves ``pem`` at ``/bundle.pem``, and sends whoever asks for ``/moved`` to an address without TLS."""

    pem = ""

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", f"http://{self.headers['Host']}/bundle.pem")
            self.end_headers()
            return
        self.send_response(200 if self.path == "/bundle.pem" else 404)
        self.end_headers()
        self.wfile.write(self.pem.encode() if self.path == "/bundle.pem" else b"<html>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def truststore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server with a certificate that this process trusts."""
    web = Authority("web")
    monkeypatch.setenv("SSL_CERT_FILE", str(web.write(tmp_path / "web.pem")))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Truststore)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(web.certify("127.0.0.1", tmp_path / "server.pem"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_authorities_are_fetched_over_tls(tmp_path: Path, truststore: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Authority("rds")
    monkeypatch.setattr(_Truststore, "pem", ours.pem)
    found = fetch_authorities(f"{truststore}/bundle.pem", tmp_path, now=NOW)
    assert found.pem == ours.pem
    assert found.path.parent == tmp_path


def test_authorities_of_a_server_that_nobody_vouches_for_are_refused(
    tmp_path: Path, truststore: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(Authority("another").write(tmp_path / "another.pem")))
    with pytest.raises(ConfigurationError, match="CERTIFICATE_VERIFY_FAILED") as caught:
        fetch_authorities(f"{truststore}/bundle.pem", tmp_path, now=NOW)
    assert "-c database.authorities=" in caught.value.hint


@pytest.mark.parametrize(
    ("path", "said"),
    [("/other", "Not Found"), ("/moved", "cannot be fetched"), ("/bundle.pem", "cannot be read")],
    ids=["absent", "moved to where nothing is encrypted", "no PEM"],
)
def test_what_is_not_there_is_not_taken(tmp_path: Path, truststore: str, path: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        fetch_authorities(f"{truststore}{path}", tmp_path, now=NOW)


def test_a_bundle_is_not_built_without_the_authorities_that_it_needs(tmp_path: Path) -> None:
    """Who deploys without `farcall cloud deploy` has to name the file: there is no silent way to no check at all."""
    deployment = deployment_from_context({})
    assert deployment.verifies_database
    with pytest.raises(ConfigurationError, match="contents of database-authorities"):
        deployment.packed(LAMBDAS).build(tmp_path, platform=ARM64)
    assert not any(tmp_path.iterdir())


def test_a_database_without_tls_has_no_certificate() -> None:
    deployment = deployment_from_context({"target": "localstack"})
    assert not deployment.verifies_database
    assert deployment.packed(LAMBDAS) == LAMBDAS


def test_code_finds_the_file_beside_itself(tmp_path: Path) -> None:
    """As in a bundle: wherever it lies, and wherever the program was started."""
    bundle, elsewhere = tmp_path / "bundle", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in Path(sys.modules["farcall_common"].__path__[0]).rglob("*.py"):
        copy = bundle / "farcall_common" / path.relative_to(sys.modules["farcall_common"].__path__[0])
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    Authority().write(bundle / AUTHORITIES_FILE)
    program = (
        "from farcall_common.store import DatabaseSettings;"
        "import os; print(DatabaseSettings.from_environment(os.environ).conninfo())"
    )
    environ = {
        "PYTHONPATH": str(bundle),
        "FARCALL_DATABASE_URL": "postgresql://h/d",
        "FARCALL_DATABASE_AUTHORITIES": AUTHORITIES_FILE,
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, cwd=elsewhere, capture_output=True, text=True, check=True
    )
    assert "sslmode=verify-full" in done.stdout
    assert f"sslrootcert={bundle / AUTHORITIES_FILE}" in done.stdout
