"""State and secrets of a local tier, and the environment of its processes."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from farcall_local.cli import _configure
from farcall_local.control import is_up, stop
from farcall_local.services import base_environment
from farcall_local.state import ProcessState, TierSecrets, TierState


def test_secrets_are_created_once_and_only_the_owner_can_read_them(tmp_path: Path) -> None:
    made = TierSecrets.load_or_create(tmp_path, users=["ada", "grace"])
    again = TierSecrets.load_or_create(tmp_path, users=["someone", "else"])

    assert made == again
    assert list(made.tokens) == ["ada", "grace"]
    assert len({*made.tokens.values(), made.ticket_key, made.database_password, made.queue_password}) == 5
    assert len(made.ticket_key) >= 32
    assert stat.S_IMODE((tmp_path / "secrets.json").stat().st_mode) == 0o600


def test_secrets_of_another_release_are_kept(tmp_path: Path) -> None:
    made = TierSecrets.load_or_create(tmp_path, users=["ada"])
    path = tmp_path / "secrets.json"
    path.write_text(json.dumps({"tokens": made.tokens, "ticket_key": made.ticket_key, "of_a_later_release": "x"}))
    again = TierSecrets.load_or_create(tmp_path, users=["ada"])
    assert (again.tokens, again.ticket_key) == (made.tokens, made.ticket_key)
    assert TierSecrets.load_or_create(tmp_path, users=["ada"]) == again


def test_an_identity_keeps_its_id(tmp_path: Path) -> None:
    secrets = TierSecrets.load_or_create(tmp_path, users=["ada", "grace"])
    people = json.loads(secrets.dev_tokens())
    assert people == json.loads(secrets.dev_tokens())
    assert {person["username"] for person in people.values()} == {"ada", "grace"}
    assert len({person["identity_id"] for person in people.values()}) == 2


def test_state_is_written_and_read(tmp_path: Path) -> None:
    state = TierState(phase="ready", supervisor_pid=7, processes={"api": ProcessState(pid=8, restarts=1)})
    state.write(tmp_path)
    assert TierState.read(tmp_path) == state
    assert stat.S_IMODE((tmp_path / "state.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_without_a_tier_there_is_no_state(tmp_path: Path) -> None:
    assert TierState.read(tmp_path) is None
    assert not is_up(tmp_path)
    assert not stop(tmp_path)


def test_a_state_file_without_a_running_supervisor_is_not_up(tmp_path: Path) -> None:
    TierState(phase="ready", supervisor_pid=1).write(tmp_path)
    (tmp_path / "lock").touch()
    assert not is_up(tmp_path)
    assert not stop(tmp_path)


def test_child_environments_have_no_real_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "production")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "real")
    monkeypatch.setenv("FARCALL_API_URL", "https://elsewhere.example")
    monkeypatch.setenv("NO_PROXY", "intranet")

    environment = base_environment()

    assert not {"AWS_PROFILE", "AWS_SESSION_TOKEN", "FARCALL_API_URL"} & environment.keys()
    assert environment["NO_PROXY"] == "intranet,127.0.0.1,localhost"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            None,
            '# Written by `farcall local up`.\n\n[default]\ntoken = "ours"\napi_url = "http://local:2"\n',
            "points at it",
        ),
        (
            '[default]\napi_url = "http://local:1"\ntoken = "ours"\nendpoint = "mine"\n',
            '[default]\ntoken = "ours"\napi_url = "http://local:2"\nendpoint = "mine"\n',
            "points at it",
        ),
        ('[default]\napi_url = "http://x"\ntoken = "y"\n', None, "is unchanged"),
        ('[default]\napi_url = "http://x"\ntoken = "y"\n[other]\ntoken = "ours"\n', None, "is unchanged"),
        ('[default\ntoken = "ours"\n', None, "cannot be read"),
    ],
    ids=["none", "of another port", "of the user", "of the user, with the token elsewhere", "broken"],
)
def test_a_tier_writes_the_users_settings_only_if_they_are_its_own(
    before: str | None, after: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path))
    path = tmp_path / "config.toml"
    if before is not None:
        path.write_text(before)
    assert said in _configure(TierState("ready", 1, api_url="http://local:2", token="ours"))
    assert path.read_text() == (after or before)
