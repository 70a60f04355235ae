"""Logging in and out, and the configuration file."""

from __future__ import annotations

import json
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from farcall.cli._app import app
from farcall.cli._connect import CommandEnvironment
from farcall.testing import FakeCloud
from farcall_common.credentials import read_settings, write_settings
from farcall_common.errors import ConfigurationError, Unavailable
from tests.unit.sdk_cli_runner import Farcall


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "home"))
    for name in ("FARCALL_API_URL", "FARCALL_TOKEN", "FARCALL_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home" / "config.toml"


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as cloud:
        yield cloud


@pytest.fixture
def farcall(cloud: FakeCloud) -> Farcall:
    return Farcall(cloud)


def test_login_stores_the_token_readable_by_its_owner_only(farcall: Farcall, config: Path) -> None:
    result = farcall("login", "--api-url", "https://farcall.test/", input=f"{FakeCloud.token}\n")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert FakeCloud.token not in result.stderr
    assert tomllib.loads(config.read_text()) == {
        "default": {"api_url": "https://farcall.test", "token": FakeCloud.token}
    }
    assert stat.S_IMODE(config.stat().st_mode) == 0o600


def test_token_refused_by_the_api_is_not_stored(farcall: Farcall, config: Path) -> None:
    farcall("config", "set", "api_url", "https://farcall.test")
    result = farcall("login", input="wrong\n")
    assert result.exit_code == 77
    assert "UNAUTHENTICATED" in result.stderr
    assert "token" not in tomllib.loads(config.read_text())["default"]
    assert farcall("login", "--no-check", input="wrong\n").exit_code == 0
    assert tomllib.loads(config.read_text())["default"]["token"] == "wrong"


@pytest.mark.parametrize(
    ("arguments", "given", "message"),
    [
        ((), "secret\n", "the address of the API is not set"),
        (("--api-url", "ftp://x"), "secret\n", "not an http(s) address"),
        (("--api-url", "https://x"), "\n", "the token is empty"),
        (("--api-url", "http://x"), "token\n", "api_url is not https"),
        (("--api-url", "https://x", "--issuer", "http://id", "--client-id", "c"), "", "the issuer is not https"),
        (("--api-url", "https://x", "--provider", "globus"), "", "the client id is missing"),
    ],
)
def test_invalid_logins_are_refused(
    farcall: Farcall, config: Path, arguments: tuple[str, ...], given: str, message: str
) -> None:
    result = farcall("login", *arguments, input=given)
    assert result.exit_code == 78
    assert message in result.stderr
    assert not config.exists()


def test_whoami_shows_the_identity(farcall: Farcall, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    farcall("login", "--api-url", "https://farcall.test", input=f"{FakeCloud.token}\n")
    shown = json.loads(farcall("whoami", "--json").stdout)
    assert shown.keys() == {"api_url", "token_from", "identity_id", "username", "linked", "provider", "limits"}
    assert shown["token_from"] == str(config)
    assert shown["identity_id"]
    monkeypatch.setenv("FARCALL_TOKEN", FakeCloud.token)
    assert ["token from", "FARCALL_TOKEN"] in farcall.lines("whoami")


def test_logout_removes_the_token(farcall: Farcall, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    farcall("login", "--api-url", "https://farcall.test", input=f"{FakeCloud.token}\n")
    assert "Logged out" in farcall("logout").stderr
    assert tomllib.loads(config.read_text()) == {"default": {"api_url": "https://farcall.test"}}
    assert farcall("whoami").exit_code == 78
    monkeypatch.setenv("FARCALL_TOKEN", "another")
    again = farcall("logout", "--json")
    assert json.loads(again.stdout) == {"path": str(config), "was_logged_in": False, "revoked": False}
    assert "FARCALL_TOKEN is still set" in again.stderr


def test_settings_are_shown_and_changed(farcall: Farcall, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert farcall("config", "path").stdout == f"{config}\n"
    assert farcall("config", "get", "endpoint").exit_code == 78
    assert farcall("config", "set", "endpoint", 'the "big" one', "--no-check").exit_code == 0
    assert farcall("config", "get", "endpoint").stdout == 'the "big" one\n'
    refused = farcall("config", "set", "colour", "red")
    assert (refused.exit_code, "There are api_url, token" in refused.stderr) == (78, True)
    farcall("config", "set", "token", "secret")
    monkeypatch.setenv("FARCALL_API_URL", "https://elsewhere")
    listed = farcall("config", "list", "--json").stdout
    assert "secret" not in listed
    values = {each["name"]: (each["value"], each["source"]) for each in json.loads(listed)}
    assert values == {
        "api_url": ("https://elsewhere", "FARCALL_API_URL"),
        "token": ("(set)", "config.toml"),
        "endpoint": ('the "big" one', "config.toml"),
        "trust": (None, None),
        "sealed": (None, None),
    }
    farcall("config", "unset", "endpoint")
    assert farcall("config", "get", "endpoint", "--json").exit_code == 78


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("endpiont", "fake", "Did you mean 'endpoint'?"),
        ("endpoint", "faek", "no endpoint named 'faek' (Did you mean 'fake'? With --no-check"),
        ("endpoint", "c0ffee00-0000-4000-8000-000000000001", "no endpoint c0ffee00"),
        ("api_url", "farcall.example.org", "https://HOST"),
        ("sealed", "always", "always"),
        ("trust", "laptop", "laptop"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(
    farcall: Farcall, config: Path, name: str, value: str, message: str
) -> None:
    refused = farcall("config", "set", name, value)
    assert refused.exit_code in (66, 78)
    assert message in refused.stderr
    assert not config.exists()


def test_an_endpoint_is_set_unchecked_if_the_api_does_not_answer(config: Path) -> None:
    def connect(*_: object) -> NoReturn:
        raise Unavailable("no answer")

    arguments = ["config", "set", "endpoint", "cluster"]
    result = CliRunner().invoke(app, arguments, obj=CommandEnvironment(connect), prog_name="farcall")
    assert (result.exit_code, result.stderr) == (0, "The endpoint was not checked: no answer\n")
    assert read_settings(config.parent) == {"endpoint": "cluster"}


def test_the_audit_log_is_listed_newest_last(farcall: Farcall, cloud: FakeCloud) -> None:
    with cloud.client() as client:
        for _ in range(3):
            client.run(1, endpoint_id=cloud.endpoint_id, function_id=client.register_function(abs))
    rows = farcall.lines("audit", "ls", "--limit", "2")
    assert [(row[1], row[2]) for row in rows] == [("tasks.submit", cloud.endpoint_id)] * 2
    assert farcall.lines("audit", "ls", "--since", "2999-01-01") == []
    assert len(json.loads(farcall("audit", "ls", "--json").stdout)) == 3


def test_other_settings_of_the_file_stay(config: Path) -> None:
    config.parent.mkdir()
    config.write_text('# mine\n[other]\ntoken = "x"  # not this one\n\n[default]\n# here\n token = "old"\n\n[last]\n')
    write_settings(config.parent, {"token": "new", "api_url": "https://x"})
    text = config.read_text()
    assert tomllib.loads(text) == {
        "other": {"token": "x"},
        "default": {"token": "new", "api_url": "https://x"},
        "last": {},
    }
    assert "# mine" in text
    assert "# here" in text


@pytest.mark.parametrize(
    "text", ['default = {token = "x"}\n', "default.token = 'x'\n", '[default]\ntoken = """\nx"""\n']
)
def test_a_file_in_an_unusual_form_is_left_alone(config: Path, text: str) -> None:
    config.parent.mkdir()
    config.write_text(text)
    with pytest.raises(ConfigurationError, match="unusual"):
        write_settings(config.parent, {"token": "new"})
    assert config.read_text() == text


def test_broken_file_is_reported(farcall: Farcall, config: Path) -> None:
    config.parent.mkdir()
    config.write_text("[default\n")
    for arguments in (("config", "list"), ("config", "set", "token", "x"), ("whoami",)):
        result = farcall(*arguments)
        assert result.exit_code == 78
        assert "cannot be read" in result.stderr
    assert config.read_text() == "[default\n"
