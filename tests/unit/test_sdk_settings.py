"""Precedence of settings: argument, environment, file."""

from __future__ import annotations

from pathlib import Path

import pytest

from farcall import ConfigurationError, Settings


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text('[default]\napi_url = "https://file:1"\ntoken = "from-file"\nother = 3\n')
    return tmp_path


def test_argument_overrides_environment_overrides_file(home: Path) -> None:
    environ = {"FARCALL_HOME": str(home)}
    assert Settings.resolve(environ=environ) == Settings("https://file:1", "from-file")
    environ["FARCALL_API_URL"] = "https://env/"
    assert Settings.resolve(environ=environ) == Settings("https://env", "from-file")
    assert Settings.resolve("https://arg", "from-arg", environ=environ) == Settings("https://arg", "from-arg")


@pytest.mark.parametrize(("given", "missing"), [({}, "address"), ({"FARCALL_API_URL": "https://x"}, "token")])
def test_missing_settings_are_named_with_a_hint(tmp_path: Path, given: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigurationError, match=missing) as caught:
        Settings.resolve(environ={"FARCALL_HOME": str(tmp_path), **given})
    assert "farcall local up" in caught.value.hint
    assert str(tmp_path / "config.toml") in caught.value.hint


@pytest.mark.parametrize("text", ["[default", '[default]\ntoken = "\xff"'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigurationError, match=r"config\.toml cannot be read"):
        Settings.resolve(environ={"FARCALL_HOME": str(tmp_path)})


@pytest.mark.parametrize("address", ["localhost:5000", "ftp://x", "http://"])
def test_address_must_be_http(address: str) -> None:
    with pytest.raises(ConfigurationError, match="not an http"):
        Settings.resolve(address, "token", environ={})


@pytest.mark.parametrize(
    "address",
    [
        "http://farcall.example.org",
        "http://10.0.0.7:5000",
        "http://localhost.example.org",
        "http://127.0.0.1.example.org",
        "http://localhost@example.org",
        "http://example.org\\@localhost",
        "http://localhost\\@example.org",
        "http://127.0.0.1\t.example.org",
        "http://0.0.0.0:5000",
        "http://[::2]",
        "HTTP://example.org",
    ],
)
def test_a_token_is_sent_to_another_machine_over_tls_only(address: str) -> None:
    with pytest.raises(ConfigurationError, match="not https") as caught:
        Settings.resolve(address, "token", environ={})
    assert "FARCALL_ALLOW_HTTP=1" in caught.value.hint
    with pytest.raises(ConfigurationError, match="not https"):
        Settings.resolve(address, "token", environ={"FARCALL_ALLOW_HTTP": "0"})
    assert Settings.resolve(address, "token", environ={"FARCALL_ALLOW_HTTP": "1"}).api_url == address


@pytest.mark.parametrize(
    "address", ["https://x", "HTTPS://x", "http://localhost:5000", "http://127.8.0.1", "http://u:p@[::1]:80/api?x=1"]
)
def test_tls_and_this_machine_are_safe(address: str) -> None:
    assert Settings.resolve(address, "token", environ={}).api_url == address
