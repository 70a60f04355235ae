"""Credentials and settings: ``farcall`` and ``farcall-endpoint`` find the same ones, or raise the same error."""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx
import pytest
import typer
from typer.testing import CliRunner, Result

from farcall import Executor
from farcall._signing import signed
from farcall.cli._app import app as farcall
from farcall.testing import FakeCloud
from farcall_common.credentials import Credentials, config_path, expanded, stored_values, write_settings
from farcall_common.errors import ConfigurationError
from farcall_endpoint import Engine
from farcall_endpoint.app import systemd
from farcall_endpoint.app.cli import app as farcall_endpoint
from farcall_endpoint.services.directory import EndpointDirectory
from tests.waiting import WAIT_S

FILE: Final = '[default]\napi_url = "https://file:1"\ntoken = "file-token"\n'
NO_TOKEN: Final = '[default]\napi_url = "https://file:1"\n# größer\n'
#: A login at https://file:1 that does not end.
LOGIN: Final = {
    "api_url": "https://file:1",
    "provider": "oidc",
    "client_id": "a-client",
    "scope": "",
    "token_url": "https://provider",
    "access_token": "login-token",
    "refresh_token": "refresh-token",
}
ADDRESS: Final = "the address of the API is not set"
TOKEN: Final = "the token is not set"
NOT_HTTPS: Final = "api_url is not https: 'http://env:2'|api_url is not https: 'http://file:1'"
NOT_HTTP: Final = r"not an http\(s\) address"


@dataclasses.dataclass(frozen=True)
class Case:
    """What a user has, and what a command does with it: it asks an API with a token, or it says something."""

    name: str
    file: str | None = None
    login: bool = False
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    asks: tuple[str, str] | None = None
    says: str | None = None


def env(api_url: str | None = None, token: str | None = None) -> dict[str, str]:
    given = {"FARCALL_API_URL": api_url, "FARCALL_TOKEN": token}
    return {name: value for name, value in given.items() if value is not None}


FILE_ASKED: Final = ("https://file:1", "file-token")
ENV_ASKED: Final = ("https://env:2", "env-token")

CASES: Final = [
    # Precedence
    Case("nothing", says=ADDRESS),
    Case("no token", NO_TOKEN, says=TOKEN),
    Case("no token in the environment", environ=env("https://env:2"), says=TOKEN),
    Case("the file", FILE, asks=FILE_ASKED),
    Case("the environment", environ=env("https://env:2", "env-token"), asks=ENV_ASKED),
    Case("the environment before the file", FILE, environ=env("https://env:2", "env-token"), asks=ENV_ASKED),
    Case("the token of the file", FILE, environ=env("https://env:2"), asks=("https://env:2", "file-token")),
    Case("the address of the file", FILE, environ=env(None, "env-token"), asks=("https://file:1", "env-token")),
    Case("the login before the file", FILE, login=True, asks=("https://file:1", "login-token")),
    Case("the environment before the login", FILE, True, env(None, "env-token"), asks=("https://file:1", "env-token")),
    Case("a login elsewhere", FILE, True, env("https://env:2"), asks=("https://env:2", "file-token")),
    Case("a slash at the end", environ=env("https://env:2/", "env-token"), asks=ENV_ASKED),
    Case("empty variables", FILE, environ=env("", ""), asks=FILE_ASKED),
    # Differences that there were
    Case("a home with a tilde", FILE, environ={"FARCALL_HOME": "~/home"}, asks=FILE_ASKED),
    Case("blank variables", FILE, environ=env(" ", "\n"), asks=FILE_ASKED),
    Case("space around the token", environ=env("https://env:2", " env-token\n"), asks=ENV_ASKED),
    Case("space around the address", environ=env(" https://env:2/\n", "env-token"), asks=ENV_ASKED),
    Case("space in the file", FILE.replace("file-token", " file-token "), asks=FILE_ASKED),
    Case("a blank token", environ=env("https://env:2", " "), says=TOKEN),
    Case("another scheme", environ=env("ftp://env:2", "env-token"), says=NOT_HTTP),
    Case("no scheme", environ=env("env:2", "env-token"), says=NOT_HTTP),
    Case("no host", environ=env("http://:2", "env-token"), says=NOT_HTTP),
    Case("half an address", environ=env("http://[::1", "env-token"), says=NOT_HTTP),
    Case("no number for a port", environ=env("http://env:x", "env-token"), says=NOT_HTTP),
    Case("no scheme in the file", FILE.replace("https://", ""), says=NOT_HTTP),
    Case("a broken file", "[default", says=r"config\.toml cannot be read"),
    Case("a broken file that is not needed", "[default", environ=env("https://env:2", "env-token"), asks=ENV_ASKED),
    Case("no text", FILE.replace('"file-token"', "17"), says=r"token in .*config\.toml is not a string"),
    Case("no table", "default = 17", says=r"default in .*config\.toml is not a table"),
    Case("http to another machine", environ=env("http://env:2", "env-token"), says=NOT_HTTPS),
    Case("http to another machine in the file", FILE.replace("https", "http"), says=NOT_HTTPS),
    Case("http to this machine", environ=env("http://127.0.0.1:2", "t"), asks=("http://127.0.0.1:2", "t")),
    Case(
        "http where it is allowed",
        environ=env("http://env:2", "t") | {"FARCALL_ALLOW_HTTP": "1"},
        asks=("http://env:2", "t"),
    ),
    Case("other keys", f"{FILE}other = 17\n[local]\ntoken = 17\n", asks=FILE_ASKED),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("FARCALL_API_URL", "FARCALL_TOKEN", "FARCALL_ENDPOINT", "FARCALL_ALLOW_HTTP", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path / "home"))
    directory = EndpointDirectory.of(tmp_path / "home", "lab")
    directory.create()
    directory.config_file.write_text("{}\n")
    directory.write_endpoint_id(str(uuid.uuid4()))
    return tmp_path / "home"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The addresses and tokens of the requests that were made."""
    made: list[tuple[str, str]] = []

    def answer(_: object, request: httpx.Request) -> httpx.Response:
        token = request.headers["authorization"].removeprefix("Bearer ")
        made.append((f"{request.url.scheme}://{request.url.netloc.decode()}", token))
        return httpx.Response(200, json={"linked": [], "limits": {}})

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)
    return made


def _farcall() -> Result:
    return CliRunner().invoke(farcall, ["whoami", "--json"], prog_name="farcall")


def _farcall_endpoint() -> Result:
    return CliRunner().invoke(farcall_endpoint, ["delete", "lab", "--yes"], prog_name="farcall-endpoint")


COMMANDS: Final = [pytest.param(_farcall, id="farcall"), pytest.param(_farcall_endpoint, id="farcall-endpoint")]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_commands_find_the_same_settings(
    case: Case,
    command: Callable[[], Result],
    home: Path,
    asked: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if case.file is not None:
        (home / "config.toml").write_text(case.file, encoding="utf-8")
    if case.login:
        (home / "login.json").write_text(json.dumps(LOGIN))
    for name, value in case.environ.items():
        monkeypatch.setenv(name, value)
    done = command()
    assert asked == ([case.asks] if case.asks else [])
    if case.says is None:
        assert done.exit_code == 0, done.output
        return
    assert done.exit_code == os.EX_CONFIG, done.output
    said = " ".join(done.stderr.split())
    assert re.search(case.says, said)
    assert str(home / "config.toml") in said, "the hint says where settings can be written"


FARCALL: Final = ("-c", "from farcall.cli import main; main()")
FARCALL_ENDPOINT: Final = ("-c", "from farcall_endpoint.app.cli import main; main()")


def _run(*arguments: str, **environ: str) -> str:
    """What a command writes in a process of its own."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=os.environ | environ | {"COLUMNS": "500"}, capture_output=True, text=True, check=False
    )
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize("command", [(*FARCALL, "whoami"), (*FARCALL_ENDPOINT, "delete", "lab", "--yes")])
def test_the_file_is_utf_8_in_any_locale(command: tuple[str, ...], home: Path) -> None:
    (home / "config.toml").write_text(NO_TOKEN, encoding="utf-8")
    assert TOKEN in _run(*command, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ((*FARCALL, "config", "path"), "config.toml"),
        ((*FARCALL, "local", "status", "--json"), "local"),
        ((*FARCALL_ENDPOINT, "configure", "new"), "endpoints/new"),
        (("-m", "farcall_localstack", "down"), "localstack"),
    ],
    ids=["farcall", "farcall local", "farcall-endpoint", "farcall_localstack"],
)
@pytest.mark.parametrize(("given", "where"), [("~/a-home", "a-home"), ("", ".farcall")])
def test_all_commands_keep_files_in_one_home(
    command: tuple[str, ...], path: str, given: str, where: str, home: Path
) -> None:
    assert str(home.with_name(where) / path) in _run(*command, FARCALL_HOME=given)


@pytest.mark.parametrize(("token", "source"), [("env-token", "FARCALL_TOKEN"), (" ", "config.toml")])
def test_precedence_of_tokens(
    token: str, source: str, home: Path, asked: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config_path(home).write_text(FILE)
    monkeypatch.setenv("FARCALL_TOKEN", token)
    assert json.loads(_farcall().stdout)["token_from"].endswith(source)
    assert len(asked) == 1


def test_the_token_is_not_in_the_repr() -> None:
    assert "secret" not in repr(Credentials("http://x", "secret"))


def test_secrets_are_found_in_environment_and_files(home: Path) -> None:
    assert stored_values(home) == []
    config_path(home).write_text('[default]\ntoken = "one"\n[other]\ntoken = 2\n')
    (home / "login.json").write_text(json.dumps(LOGIN))
    assert stored_values(home) == [
        ("token", "one"),
        ("token", "2"),
        ("access_token", "login-token"),
        ("refresh_token", "refresh-token"),
    ]
    config_path(home).write_text("[default")
    (home / "login.json").write_text("[]")
    assert stored_values(home) == []


def test_comment_is_written_to_a_new_file_only(tmp_path: Path) -> None:
    write_settings(tmp_path, {"token": "one"}, comment="Written by a test.")
    write_settings(tmp_path, {"token": "two"}, comment="Written again.")
    assert config_path(tmp_path).read_text() == '# Written by a test.\n\n[default]\ntoken = "two"\n'


def test_settings_go_into_a_table(tmp_path: Path) -> None:
    config_path(tmp_path).write_text("default = 17\n")
    with pytest.raises(ConfigurationError, match="is not a table"):
        write_settings(tmp_path, {"token": "x"})
    assert config_path(tmp_path).read_text() == "default = 17\n"


@pytest.mark.parametrize("name", ["config.toml", "login.json"])
@pytest.mark.parametrize(
    ("mode", "warns"), [(0o644, True), (0o640, True), (0o602, True), (0o600, False), (0o400, False)]
)
def test_a_secret_that_others_may_read_is_warned_of(
    name: str, mode: int, warns: bool, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"config.toml": FILE if name == "config.toml" else NO_TOKEN, "login.json": json.dumps(LOGIN)}
    for each in {"config.toml", name}:
        (home / each).write_text(files[each])
        (home / each).chmod(0o600)
    (home / name).chmod(mode)
    for _ in range(2):
        Credentials.resolve(environ={}, home=home)
    assert [f"chmod 600 {home / name}" in message for message in caplog.messages] == [True] * warns


def test_a_file_without_a_token_may_be_read_by_all(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    config_path(home).write_text(NO_TOKEN)
    config_path(home).chmod(0o644)
    Credentials.resolve(environ={"FARCALL_TOKEN": "t"}, home=home)
    assert caplog.messages == []


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and without an entry in the password database, as in a container."""

    def unknown(uid: int) -> object:
        raise KeyError(uid)

    for name in ("HOME", "FARCALL_HOME", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_directory_variables_are_enough() -> None:
    with FakeCloud() as cloud, cloud.client() as client, Executor(cloud.endpoint_id, client=client) as executor:
        assert executor.submit(pow, 2, 3).result(WAIT_S) == 8
    found = Credentials.resolve(environ=env("http://127.0.0.1:1", "token"))
    assert (found.token, found.login) == ("token", None)
    with pytest.raises(ConfigurationError, match="the token is not set"):
        Credentials.resolve(environ=env("http://127.0.0.1:1"))


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize(
    ("app", "arguments"),
    [
        (farcall, ["config", "set", "endpoint", "x"]),
        (farcall, ["logout"]),
        (farcall_endpoint, ["list"]),
        (farcall_endpoint, ["configure", "x"]),
    ],
)
def test_what_needs_a_home_directory_names_the_variables(app: typer.Typer, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    text = " ".join(result.stderr.split())
    assert "HOME is not set" in text
    assert "FARCALL_HOME" in text
    assert isinstance(result.exception, SystemExit)


@pytest.mark.usefixtures("homeless")
def test_a_path_below_an_unknown_home_directory_is_refused_in_words() -> None:
    assert expanded("/keys/~") == Path("/keys/~")
    with pytest.raises(ConfigurationError, match=r"~/\.ssh/id_ed25519: The home directory is not known"):
        signed({"function_name": "f", "function_code": "1"}, "~/.ssh/id_ed25519")


@pytest.mark.usefixtures("homeless")
def test_an_engine_without_a_home_directory_names_the_variables() -> None:
    with pytest.raises(ConfigurationError, match="FARCALL_HOME"):
        Engine(max_workers=1)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_directory_there_is_no_unit_of_systemd() -> None:
    assert systemd.unit_file({}, "lab") is None
    assert systemd.disable_on_boot(None, environ={}) is None
    with pytest.raises(ConfigurationError, match="Set HOME"):
        systemd.enable_on_boot(None, "", environ={})
