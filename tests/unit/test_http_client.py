"""Proxy and certificate variables of the environment."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from farcall import Settings
from farcall._http import Http
from farcall_common.errors import ConfigurationError
from farcall_common.http_client import EnvironmentProxies, http_client, is_direct

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir", "sslkeylogfile")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("no_proxy", "url", "direct"),
    [
        ("", "https://api.test", False),
        ("*", "https://api.test", True),
        ("a, *", "https://api.test", True),
        ("api.test", "https://api.test/x", True),
        ("api.test", "https://inner.api.test", True),
        (".api.test", "https://inner.api.test", True),
        ("*.api.test", "https://inner.api.test", True),
        ("api.test", "https://other-api.test", False),
        ("API.test", "https://api.test", True),
        ("api.test:8443", "https://api.test:8443", True),
        ("api.test:8443", "https://api.test", False),
        ("api.test:443", "https://api.test", True),
        ("http://api.test", "https://api.test", False),
        ("https://api.test", "https://api.test", True),
        ("10.0.0.0/8", "https://10.1.2.3", True),
        ("10.0.0.0/8", "https://11.1.2.3", False),
        ("10.1.2.3/8", "https://10.9.9.9", True),
        ("10.1.2.3", "https://10.1.2.3:8443", True),
        ("fe80::/10,fd07::/64", "https://[fd07::5]", True),
        ("fe80::/10,fd07::/64", "https://[fd08::5]", False),
        ("fe80::%eth0/10", "https://[fe80::5]", True),
        ("[fd07::5]", "https://[fd07::5]:8443", True),
        ("[fd07::5]:8443", "https://[fd07::5]:8443", True),
        ("[fd07::5]:8443", "https://[fd07::5]", False),
        ("::1,[::1],fe80::/10,10.0.0.0/33,://,[,a b  c,", "https://api.test", False),
        ("x y api.test", "https://api.test", True),
    ],
)
def test_no_proxy(no_proxy: str, url: str, direct: bool) -> None:
    assert is_direct(httpx.URL(url), no_proxy) is direct


def transport(url: str, *, is_local_direct: bool = True) -> httpx.BaseTransport | None:
    """The proxy of an address; None: none."""
    with http_client(is_local_direct=is_local_direct) as client:
        found = client._transport
        assert isinstance(found, EnvironmentProxies)
        chosen = found._transport(httpx.URL(url))
        return None if chosen is found._direct else chosen


@pytest.mark.parametrize("url", ["http://localhost:8080", "http://127.0.0.1", "http://[::1]:8080"])
def test_a_client_says_whether_it_reaches_this_machine_directly(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.test:3128")
    assert transport(url) is None
    assert transport(url, is_local_direct=False) is not None


def test_the_proxy_is_that_of_the_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "user:secret@proxy.test:3128")
    monkeypatch.setenv("NO_PROXY", "fe80::/10,[::1],internal.test")
    assert transport("https://api.test") is not None
    assert transport("http://api.test") is None
    assert transport("https://internal.test") is None
    monkeypatch.setenv("all_proxy", "https://other.test")
    assert transport("http://api.test") is not None


@pytest.mark.parametrize(
    ("variable", "proxy", "reason"),
    [
        ("ALL_PROXY", "socks5://user:secret@127.0.0.1:1", "httpx\\[socks\\]"),
        ("all_proxy", "socks://127.0.0.1:1", "httpx\\[socks\\]"),
        ("HTTP_PROXY", "gopher://secret.test", "begins with http"),
        ("HTTP_PROXY", "http://secret.test:port", "begins with http"),
    ],
)
def test_a_proxy_that_cannot_be_used_fails_what_needs_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, proxy: str, reason: str
) -> None:
    monkeypatch.setenv(variable, proxy)
    client = Http(Settings("http://api.test", "token"), timeout_s=5, retry_timeout_s=60)
    with pytest.raises(ConfigurationError, match=f"{variable} .*{reason}") as caught:
        client.call("GET", "/x")
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("NO_PROXY", "api.test")
    assert transport("http://api.test") is None


def test_a_proxy_receives_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{server.getsockname()[1]}")
        with http_client(timeout=0.1) as client, pytest.raises(httpx.ReadTimeout):
            client.get("http://api.test/x")
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1000).startswith(b"GET http://api.test/x HTTP/1.1")


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE"])
def test_a_certificate_variable_with_a_path_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, tmp_path: Path
) -> None:
    gone = str(tmp_path / "gone" / "file")
    monkeypatch.setenv(variable, gone)
    with pytest.raises(ConfigurationError, match=f"{variable} names {gone}"):
        http_client()


def test_a_file_without_certificates_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "empty.pem"
    file.touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(ConfigurationError, match=f"SSL_CERT_FILE names {file}"):
        http_client()
