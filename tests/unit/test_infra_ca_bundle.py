"""The database's CA bundle: reading and downloading the file, errors, and its effect on the code bundles."""

from __future__ import annotations

import datetime as dt
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import pytest

from farcall_common.errors import ConfigurationError
from farcall_infra.bundles import ARM64, FORWARDER, LAMBDAS
from farcall_infra.ca_bundle import CA_BUNDLE_FILE, FETCH_CA_BUNDLE, fetch_ca_bundle, keep_ca_bundle, read_ca_bundle
from farcall_infra.deployment import deployment_from_context
from tests.certificates import Authority

NOW = dt.datetime.now(dt.UTC)


def _file(directory: Path, text: str) -> Path:
    path = directory / "authorities.pem"
    path.write_text(text, encoding="utf-8")
    return path


def test_only_ca_certificates_are_read(tmp_path: Path) -> None:
    one, other, past = Authority("one", days=20), Authority("other", days=300), Authority("past", days=-1)
    server = one.certify("db.example.org", tmp_path / "server.pem").read_text(encoding="utf-8")
    assert "PRIVATE KEY" in server
    found = read_ca_bundle(_file(tmp_path, f"# Zürich\n{other.pem}{server}{past.pem}{one.pem}{one.pem}"), now=NOW)
    assert found.pem == "".join(sorted([one.pem, other.pem, past.pem]))
    assert found.valid == 2
    assert found.expires_at - NOW > dt.timedelta(days=299)
    assert found.path.is_absolute()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read .*No such file"),
        ("", "cannot read"),
        ("<html>not found</html>", "cannot read"),
        ("-----BEGIN CERTIFICATE-----\nbroken\n-----END CERTIFICATE-----\n", "cannot read"),
        (Authority(days=-1).pem + Authority(days=0).pem, "every CA certificate .* has expired"),
    ],
    ids=["missing", "empty", "no PEM", "broken", "expired"],
)
def test_a_file_without_a_valid_ca_certificate_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "nothing.pem" if text is None else _file(tmp_path, text)
    with pytest.raises(ConfigurationError, match=said) as caught:
        deployment_from_context({"database.authorities": str(path)})
    assert str(path) in caught.value.record.message
    assert FETCH_CA_BUNDLE in caught.value.hint


def test_a_servers_certificate_is_not_a_ca_certificate(tmp_path: Path) -> None:
    path = Authority().certify("db.example.org", tmp_path / "server.pem")
    with pytest.raises(ConfigurationError, match="no CA certificate"):
        read_ca_bundle(path, now=NOW)


def test_bundles_contain_the_ca_bundle_and_their_digest_depends_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = Authority("one"), Authority("other")
    plain = deployment_from_context({"database.authorities": ""})
    assert plain.packed(LAMBDAS) == LAMBDAS
    digests = {LAMBDAS.digest(ARM64), FORWARDER.digest(ARM64)}
    for text in (one.pem, one.pem + other.pem, other.pem + one.pem):
        _file(tmp_path, text)
        deployment = deployment_from_context({"database.authorities": "authorities.pem"})
        assert deployment.ca_bundle is not None
        assert deployment.ca_bundle.path == tmp_path / "authorities.pem"
        for bundle in map(deployment.packed, (LAMBDAS, FORWARDER)):
            assert bundle.texts == ((CA_BUNDLE_FILE, deployment.ca_bundle.pem),)
            digests.add(bundle.digest(ARM64))
    assert len(digests) == 6  # the order of the certificates makes no difference


_RDS = Authority("rds")


class _Truststore(BaseHTTPRequestHandler):
    """Serves a CA bundle, and an empty file; redirects ``/moved`` to a URL without TLS."""

    files: Final = {"/bundle.pem": _RDS.pem, "/empty.pem": ""}

    def do_GET(self) -> None:
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", f"http://{self.headers['Host']}/bundle.pem")
            self.end_headers()
            return
        self.send_response(200 if self.path in self.files else 404)
        self.end_headers()
        self.wfile.write(self.files.get(self.path, "<html>").encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def truststore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server with a certificate that this process trusts."""
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


def test_the_ca_bundle_is_downloaded_over_tls(tmp_path: Path, truststore: str) -> None:
    found = fetch_ca_bundle(f"{truststore}/bundle.pem", tmp_path, now=NOW)
    assert found.pem == _RDS.pem
    assert found.path.parent == tmp_path


def test_the_app_downloads_the_ca_bundle_once_and_says_where_it_is(tmp_path: Path, truststore: str) -> None:
    said: list[str] = []
    clone = tmp_path / "clone"
    clone.mkdir()
    for _ in range(2):
        found = keep_ca_bundle(f"{truststore}/bundle.pem", clone, now=NOW, echo=said.append)
        assert (found.pem, found.path) == (_RDS.pem, clone / "database-authorities.pem")
    assert [line.partition(" ")[0] for line in said] == ["Downloaded", "The", "The"]
    assert str(found.path) in said[-1]


def test_a_failed_download_of_the_app_leaves_no_file(tmp_path: Path, truststore: str) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    with pytest.raises(ConfigurationError):
        keep_ca_bundle(f"{truststore}/empty.pem", clone, now=NOW, echo=print)
    assert not list(clone.iterdir())


def test_a_ca_bundle_from_an_untrusted_server_is_refused(
    tmp_path: Path, truststore: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(Authority("another").write(tmp_path / "another.pem")))
    with pytest.raises(ConfigurationError, match="CERTIFICATE_VERIFY_FAILED") as caught:
        fetch_ca_bundle(f"{truststore}/bundle.pem", tmp_path, now=NOW)
    assert "-c database.authorities=" in caught.value.hint


@pytest.mark.parametrize(
    ("path", "said"),
    [("/other", "Not Found"), ("/moved", "cannot download"), ("/empty.pem", "cannot read")],
    ids=["absent", "redirect without TLS", "no PEM"],
)
def test_a_failed_download_is_an_error(tmp_path: Path, truststore: str, path: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        fetch_ca_bundle(f"{truststore}{path}", tmp_path, now=NOW)


def test_a_code_bundle_is_not_built_without_its_ca_bundle(tmp_path: Path) -> None:
    """Not even by mistake."""
    deployment = deployment_from_context({})
    assert deployment.verifies_database
    with pytest.raises(ConfigurationError, match="contents of database-authorities"):
        deployment.packed(LAMBDAS).build(tmp_path, platform=ARM64)
    assert not any(tmp_path.iterdir())


def test_a_database_without_tls_has_no_certificate() -> None:
    deployment = deployment_from_context({"target": "localstack"})
    assert not deployment.verifies_database
    assert deployment.packed(LAMBDAS) == LAMBDAS


def test_code_finds_the_ca_bundle_next_to_itself(tmp_path: Path) -> None:
    """As in a code bundle, independent of its path and of the working directory."""
    bundle, elsewhere = tmp_path / "bundle", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in Path(sys.modules["farcall_common"].__path__[0]).rglob("*.py"):
        copy = bundle / "farcall_common" / path.relative_to(sys.modules["farcall_common"].__path__[0])
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    Authority().write(bundle / CA_BUNDLE_FILE)
    program = (
        "from farcall_common.store import DatabaseSettings;"
        "import os; print(DatabaseSettings.from_environment(os.environ).conninfo())"
    )
    environ = {
        "PYTHONPATH": str(bundle),
        "FARCALL_DATABASE_URL": "postgresql://h/d",
        "FARCALL_DATABASE_AUTHORITIES": CA_BUNDLE_FILE,
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, cwd=elsewhere, capture_output=True, text=True, check=True
    )
    assert "sslmode=verify-full" in done.stdout
    assert f"sslrootcert={bundle / CA_BUNDLE_FILE}" in done.stdout
