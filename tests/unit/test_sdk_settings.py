"""Precedence of settings: argument, environment, file."""

from __future__ import annotations

from pathlib import Path

import pytest

from farcall import ConfigurationError, Settings


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text('[default]\napi_url = "http://file:1"\ntoken = "from-file"\nother = 3\n')
    return tmp_path


def test_argument_overrides_environment_overrides_file(home: Path) -> None:
    environ = {"FARCALL_HOME": str(home)}
    assert Settings.resolve(environ=environ) == Settings("http://file:1", "from-file")
    environ["FARCALL_API_URL"] = "https://env/"
    assert Settings.resolve(environ=environ) == Settings("https://env", "from-file")
    assert Settings.resolve("http://arg", "from-arg", environ=environ) == Settings("http://arg", "from-arg")


@pytest.mark.parametrize(("given", "missing"), [({}, "address"), ({"FARCALL_API_URL": "http://x"}, "token")])
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
