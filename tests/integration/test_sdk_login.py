"""Login from the command line with providers over HTTP, and renewal of tokens."""

from __future__ import annotations

import concurrent.futures
import io
import json
import os
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from farcall import Client, Executor, Unauthenticated, Unavailable
from farcall.cli import _oidc
from farcall.testing import FakeCloud
from farcall_common.credentials import Credentials
from farcall_common.exit_codes import exit_code
from farcall_common.login import KeptLogin, Login, keep, read
from farcall_endpoint.services.cloud import Cloud
from farcall_lambdas.allowed_users import AllowedUsers
from farcall_lambdas.auth import OidcProvider
from tests.integration.identity_provider import IdentityProvider, serving
from tests.unit.sdk_cli_runner import Farcall
from tests.waiting import WAIT_S

API_URL = "https://farcall.test"
SCOPE = "https://auth.globus.org/scopes/farcall/all"


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    with serving() as found:
        yield found


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: IdentityProvider) -> Path:
    """Where the login is kept, of a user whose environment says nothing else."""
    for name in os.environ:
        if name.startswith(("FARCALL_", "GLOBUS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FARCALL_API_URL", API_URL)
    monkeypatch.setenv("GLOBUS_SDK_SERVICE_URL_AUTH", f"{provider.issuer}/")
    return tmp_path / "home" / "login.json"


class OpenCloud(FakeCloud):
    """A cloud that admits every caller with a good token of the provider, as the API does."""

    def __init__(self, provider: IdentityProvider) -> None:
        self._oidc = OidcProvider(provider.issuer, audience=provider.audience, allowed=AllowedUsers.everyone())
        self._revoked = provider.revoked
        self.refusals = 0
        super().__init__(workers=0)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        token = request.headers["authorization"].removeprefix("Bearer ")
        try:
            if token in self._revoked:
                raise Unauthenticated("revoked")
            self._oidc.authenticate(token)
        except Unauthenticated:
            self.refusals += 1
        else:
            request.headers["authorization"] = f"Bearer {self.token}"
        return super()._answer(request)


@pytest.fixture
def cloud(provider: IdentityProvider) -> Iterator[OpenCloud]:
    cloud = OpenCloud(provider)
    yield cloud
    cloud.close()


@pytest.fixture
def farcall(cloud: OpenCloud, path: Path) -> Farcall:
    class Stored(Farcall):
        def _connect(self, api_url: str | None, token: str | None) -> Client:
            return Client(api_url, token, transport=cloud.transport)

    return Stored(cloud)


@pytest.fixture
def browser(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A browser that goes where it is sent, and follows."""

    def open_(address: str, *_: Any, **__: Any) -> bool:
        pool.submit(visit, address)
        return True

    monkeypatch.setattr("webbrowser.open", open_)
    monkeypatch.setattr("webbrowser.get", lambda: type("Browser", (), {"name": "any", "open": staticmethod(open_)})())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield


def visit(address: str) -> None:
    with urllib.request.urlopen(address, timeout=WAIT_S) as page:
        page.read()


def login_at(provider: IdentityProvider, **changes: Any) -> Login:
    """A login whose token is over."""
    provider.refresh_tokens.add("first")
    plain: dict[str, Any] = {
        "api_url": API_URL,
        "provider": "oidc",
        "client_id": provider.client_id,
        "scope": "openid",
        "token_url": f"{provider.issuer}/v2/oauth2/token",
        "revoke_url": f"{provider.issuer}/v2/oauth2/token/revoke",
        "access_token": provider.token(exp=time.time() - 100),
        "refresh_token": "first",
        "expires_at": time.time() - 100,
    }
    return Login(**plain | changes)


# -- OpenID Connect ----------------------------------------------------------------------------------------------------


def test_a_device_code(provider: IdentityProvider, farcall: Farcall, path: Path) -> None:
    provider.pending = 3
    result = farcall("login", "--issuer", provider.issuer, "--client-id", "a-client")
    assert result.exit_code == 0, result.output
    assert "confirm the code BDWP-HQPK" in result.stderr
    assert result.stdout == ""
    assert provider.grants == ["device_code"] * 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = read(path)
    assert kept is not None
    assert (kept.provider, kept.client_id, kept.api_url) == ("oidc", "a-client", API_URL)
    assert kept.access_token not in result.output
    who = json.loads(farcall("whoami", "--json").stdout)
    assert (who["token_from"], who["provider"]) == (str(path), "dev")
    assert who["limits"]["functions"] == {"used": 0, "limit": 1000}


def test_a_browser(provider: IdentityProvider, farcall: Farcall, path: Path, browser: None) -> None:
    result = farcall("login", "--issuer", provider.issuer, "--client-id", "a-client", "--browser")
    assert result.exit_code == 0, result.output
    assert provider.grants == ["authorization_code"]
    assert farcall("whoami").exit_code == 0


def test_a_browser_where_there_are_no_device_codes(provider: IdentityProvider, farcall: Farcall, browser: None) -> None:
    provider.has_devices = False
    assert farcall("login", "--issuer", provider.issuer, "--client-id", "a-client").exit_code == 0
    assert provider.grants == ["authorization_code"]


@pytest.mark.parametrize("how", [(), ("--browser",)])
def test_a_refused_login_stores_nothing(
    provider: IdentityProvider, farcall: Farcall, path: Path, browser: None, how: tuple[str, ...]
) -> None:
    provider.lets_in = False
    result = farcall("login", "--issuer", provider.issuer, "--client-id", "a-client", *how)
    assert result.exit_code == 77
    assert "access_denied" in result.stderr
    assert not path.exists()


def test_a_code_for_another_login_is_refused(
    provider: IdentityProvider, farcall: Farcall, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strange(address: str) -> bool:
        back = parse_qs(urlsplit(address).query)["redirect_uri"][0]
        pool.submit(visit, f"{back}?code=stolen&state=another")
        return True

    monkeypatch.setattr("webbrowser.open", strange)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = farcall("login", "--issuer", provider.issuer, "--client-id", "a-client", "--browser")
    assert result.exit_code == 77
    assert provider.grants == []


@pytest.mark.parametrize(
    "names",
    [("FARCALL_CLIENT_ID", "FARCALL_CLIENT_SECRET"), ("GLOBUS_COMPUTE_CLIENT_ID", "GLOBUS_COMPUTE_CLIENT_SECRET")],
)
@pytest.mark.parametrize("way", [("--provider", "globus", "--scope", SCOPE), ("--issuer",)])
def test_a_client_with_a_secret_logs_in_without_a_prompt(
    provider: IdentityProvider,
    farcall: Farcall,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, str],
    way: tuple[str, ...],
) -> None:
    monkeypatch.setenv(names[0], provider.client_id)
    monkeypatch.setenv(names[1], provider.client_secret)
    result = farcall("login", *way, *((provider.issuer,) if way == ("--issuer",) else ()))
    assert result.exit_code == 0, result.output
    assert provider.grants == ["client_credentials"]
    assert provider.client_secret not in path.read_text()
    assert farcall("whoami").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--provider", "oidc"), "the issuer is missing"),
        (("--issuer", "{issuer}"), "the client id is missing"),
        (("--issuer", "{issuer}/elsewhere", "--client-id", "x"), "does not describe the issuer"),
        (("--provider", "globus", "--client-id", "x"), "the scope of the deployment is missing"),
    ],
)
def test_missing_login_options(
    provider: IdentityProvider, farcall: Farcall, path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = farcall("login", *(each.format(issuer=provider.issuer) for each in arguments))
    assert result.exit_code == 78
    assert message in result.stderr
    assert not path.exists()


# -- Globus ------------------------------------------------------------------------------------------------------------


def test_globus_login_with_a_pasted_code(
    provider: IdentityProvider, farcall: Farcall, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def paste(_text: str, **_: Any) -> str:
        shown = cast(io.BytesIO, sys.stderr.buffer).getvalue().decode()
        addresses.append(shown.split()[1])
        with urllib.request.urlopen(addresses[0], timeout=WAIT_S) as answer:
            return str(json.load(answer)["code"])

    addresses: list[str] = []
    monkeypatch.setattr("typer.prompt", paste)
    result = farcall("login", "--provider", "globus", "--client-id", "a-client", "--scope", SCOPE)
    assert result.exit_code == 0, result.output
    assert parse_qs(urlsplit(addresses[0]).query)["scope"] == [SCOPE]
    kept = read(path)
    assert kept is not None
    assert (kept.provider, bool(kept.refresh_token)) == ("globus", True)
    assert farcall("whoami").exit_code == 0


def test_globus_login_with_a_browser(provider: IdentityProvider, farcall: Farcall, browser: None) -> None:
    result = farcall("login", "--provider", "globus", "--client-id", "a-client", "--scope", SCOPE, "--browser")
    assert result.exit_code == 0, result.output
    assert farcall("whoami").exit_code == 0


def test_a_refusal_by_globus(
    provider: IdentityProvider, farcall: Farcall, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARCALL_CLIENT_ID", provider.client_id)
    monkeypatch.setenv("FARCALL_CLIENT_SECRET", "wrong")
    result = farcall("login", "--provider", "globus", "--scope", SCOPE)
    assert result.exit_code == 77
    assert not path.exists()


def test_without_globus_sdk_there_is_a_hint(path: Path) -> None:
    code = (
        "import sys; sys.modules['globus_sdk'] = None\n"
        "from farcall.cli import main; main(['login', '--provider', 'globus', '--client-id', 'x', '--scope', 's'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert ended.returncode == 78
    assert "pip install 'farcall[globus]'" in ended.stderr


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_a_token_is_renewed_before_it_expires(provider: IdentityProvider, cloud: OpenCloud, path: Path) -> None:
    keep(path, login_at(provider))
    with Client(transport=cloud.transport) as client:
        client.whoami()
        client.whoami()
    assert provider.grants == ["refresh_token"]
    assert cloud.refusals == 0
    kept = read(path)
    assert kept is not None
    assert kept.refresh_token not in (None, "first")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_revoked_token_is_replaced_once(provider: IdentityProvider, cloud: OpenCloud, path: Path) -> None:
    keep(path, login_at(provider, access_token=(token := provider.token()), expires_at=time.time() + 3600))
    provider.revoked.append(token)
    with Client(transport=cloud.transport) as client:
        client.whoami()
    assert (cloud.refusals, provider.grants) == (1, ["refresh_token"])
    provider.refresh_tokens.clear()
    kept = read(path)
    assert kept is not None
    provider.revoked.append(kept.access_token)
    with Client(transport=cloud.transport) as client, pytest.raises(Unauthenticated):
        client.whoami()


def test_a_token_that_expires_during_a_map_is_renewed(provider: IdentityProvider, cloud: OpenCloud, path: Path) -> None:
    keep(path, login_at(provider, access_token=(token := provider.token()), expires_at=time.time() + 3600))
    cloud.start()
    with Client(transport=cloud.transport) as client, Executor(cloud.endpoint_id, client=client) as executor:
        results = executor.map(abs, range(200), buffersize=10)
        assert [next(results) for _ in range(50)] == list(range(50))
        provider.revoked.append(token)
        assert list(results) == list(range(50, 200))
    assert provider.grants == ["refresh_token"]
    assert cloud.refusals >= 1


def test_concurrent_clients_renew_a_token_once(provider: IdentityProvider, path: Path) -> None:
    keep(path, login_at(provider))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        kept = [KeptLogin(path, environ={}) for _ in range(8)]
        headers = set(pool.map(lambda each: each.get_authorization_header(), kept))
    assert provider.grants == ["refresh_token"]
    assert len(headers) == 1


def test_concurrent_processes_renew_a_token_once(provider: IdentityProvider, path: Path) -> None:
    keep(path, login_at(provider))
    code = (
        "import os, sys, pathlib; from farcall_common.login import KeptLogin\n"
        "print(KeptLogin(pathlib.Path(sys.argv[1]), environ=os.environ).get_authorization_header())"
    )
    command = [sys.executable, "-c", code, str(path)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    headers = {each.communicate(timeout=WAIT_S)[0] for each in started}
    assert [each.returncode for each in started] == [0] * 4
    assert provider.grants == ["refresh_token"]
    assert len(headers) == 1


def test_a_client_requests_a_new_token_with_the_secret_of_its_environment(
    provider: IdentityProvider, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(path, login_at(provider, refresh_token=None))
    with pytest.raises(Unauthenticated, match="has expired"):
        KeptLogin(path, environ={}).get_authorization_header()
    environ = {"FARCALL_CLIENT_ID": provider.client_id, "FARCALL_CLIENT_SECRET": provider.client_secret}
    assert KeptLogin(path, environ=environ).get_authorization_header().startswith("Bearer ")
    assert provider.grants == ["client_credentials"]


def test_an_unreachable_provider_is_unavailable_and_not_a_refusal(provider: IdentityProvider, path: Path) -> None:
    keep(path, login_at(provider))
    provider.broken = True
    login = KeptLogin(path, environ={})
    with pytest.raises(Unavailable):
        login.get_authorization_header()
    provider.broken = False
    assert login.get_authorization_header()


@pytest.mark.parametrize("status", [408, 425, 429])
def test_a_limit_of_the_provider_is_unavailable_and_not_a_refusal(
    provider: IdentityProvider, path: Path, status: int
) -> None:
    keep(path, login_at(provider))
    provider.limited = status
    login = KeptLogin(path, environ={})
    with pytest.raises(Unavailable, match=str(status)):
        login.get_authorization_header()
    provider.limited = 0
    assert login.get_authorization_header()


def test_a_token_that_cannot_be_renewed_is_used_until_it_expires(provider: IdentityProvider, path: Path) -> None:
    now = time.time()
    keep(path, login_at(provider, access_token="almost over", expires_at=now + 10))
    provider.broken = True
    login = KeptLogin(path, environ={}, clock=lambda: now)
    assert login.get_authorization_header() == "Bearer almost over"
    now += 11
    with pytest.raises(Unavailable):
        login.get_authorization_header()
    provider.broken = False
    assert login.get_authorization_header() not in ("", "Bearer almost over")


def test_a_token_is_sent_only_to_its_own_deployment(
    provider: IdentityProvider, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(path, login_at(provider))
    monkeypatch.setenv("FARCALL_API_URL", "https://elsewhere.test")
    with pytest.raises(Exception, match="the token is not set"):
        Client()
    with pytest.raises(Exception, match="the token is not set"):
        Credentials.resolve(home=path.parent)


def test_an_endpoint_renews_the_same_login(provider: IdentityProvider, path: Path) -> None:
    keep(path, login_at(provider, api_url=provider.issuer))
    credentials = Credentials.resolve(environ={"FARCALL_API_URL": provider.issuer}, home=path.parent)
    cloud = Cloud(credentials)
    with pytest.raises(Exception, match="501"):
        cloud.delete("an endpoint")  # it knows no such method, but was asked with a new token
    cloud.close()
    assert provider.grants == ["refresh_token"]


def test_logging_out_revokes_the_tokens(provider: IdentityProvider, farcall: Farcall, path: Path) -> None:
    farcall("login", "--issuer", provider.issuer, "--client-id", "a-client")
    kept = read(path)
    assert kept is not None
    out = json.loads(farcall("logout", "--json").stdout)
    assert (out["was_logged_in"], out["revoked"]) == (True, True)
    assert provider.revoked == [kept.refresh_token, kept.access_token]
    assert not path.exists()
    assert farcall("whoami").exit_code == 78
    assert json.loads(farcall("logout", "--json").stdout)["was_logged_in"] is False


def test_logging_out_works_without_the_provider(provider: IdentityProvider, farcall: Farcall, path: Path) -> None:
    farcall("login", "--issuer", provider.issuer, "--client-id", "a-client")
    provider.broken = True
    assert json.loads(farcall("logout", "--json").stdout)["revoked"] is False
    assert not path.exists()


def test_one_login_method_replaces_the_other(provider: IdentityProvider, farcall: Farcall, path: Path) -> None:
    config = path.with_name("config.toml")
    assert farcall("login", input=provider.token()).exit_code == 0
    assert "token" in config.read_text()
    assert farcall("login", "--issuer", provider.issuer, "--client-id", "a-client").exit_code == 0
    assert "token" not in config.read_text()
    assert farcall("login", input=provider.token()).exit_code == 0
    assert not path.exists()


def test_a_malformed_login_file_is_reported(farcall: Farcall, path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("{")
    result = farcall("whoami")
    assert result.exit_code == 78
    assert "login.json cannot be read" in result.stderr


def test_waiting_for_the_browser_times_out(provider: IdentityProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webbrowser.open", lambda _: True)
    found = _oidc.discovered(provider.issuer)
    wanted = Login(
        api_url=API_URL, provider="oidc", client_id="a-client", scope="openid", token_url=found["token_endpoint"]
    )
    with pytest.raises(Unauthenticated, match="no answer") as caught:
        _oidc.tokens_by_browser(wanted, found, timeout_s=0.05)
    assert exit_code(caught.value) == 77
