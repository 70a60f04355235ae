"""Tokens and service accounts on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from farcall import Client
from farcall.testing import FakeCloud
from farcall_common.errors import Unauthenticated
from tests.unit.sdk_cli_runner import Farcall

DAY_S = 86_400


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud(workers=0) as cloud:
        yield cloud


@pytest.fixture
def farcall(cloud: FakeCloud) -> Farcall:
    return Farcall(cloud)


def test_a_token_is_the_only_output_and_works_until_it_is_revoked(farcall: Farcall, cloud: FakeCloud) -> None:
    limits = ("--endpoint", cloud.endpoint_id, "--expires", "30d")
    made = farcall("tokens", "create", "ci", "--scope", "tasks:submit", "--scope", "tasks:read", *limits)

    [secret] = made.stdout.splitlines()
    assert secret.startswith("farcall-token.")
    assert "It is not shown again." in made.stderr
    [token] = json.loads(farcall("tokens", "ls", "--json").stdout)
    assert token["scopes"] == ["tasks:read", "tasks:submit"]
    assert token["endpoints"] == [cloud.endpoint_id]
    assert token["expires_at"] - token["created_at"] == 30 * DAY_S
    with Client("https://farcall.test", secret, transport=cloud.transport) as client:
        client.whoami()
        assert farcall("tokens", "revoke", "ci").exit_code == 0
        with pytest.raises(Unauthenticated):
            client.whoami()
    [row] = farcall.lines("tokens", "ls")
    assert (row[1], row[2], row[-1]) == ("ci", "tasks:read tasks:submit", "revoked")


def test_a_name_that_several_tokens_have_is_refused(farcall: Farcall) -> None:
    for _ in range(2):
        farcall("tokens", "create", "ci", "--scope", "tasks:read")
    token_id = farcall.lines("tokens", "ls")[0][0]

    refused = farcall("tokens", "revoke", "ci")

    assert refused.exit_code != 0
    assert "Use the id." in refused.stderr
    assert farcall("tokens", "revoke", token_id).exit_code == 0
    assert farcall("tokens", "revoke", "ci").exit_code == 0, "one is left"
    assert farcall("tokens", "revoke", "ci").exit_code != 0


@pytest.mark.parametrize("age", ["30", "d", "30y", "-1d", "1 d"])
def test_an_age_that_is_none_is_refused(farcall: Farcall, age: str) -> None:
    refused = farcall("tokens", "create", "ci", "--scope", "tasks:read", f"--expires={age}")

    assert refused.exit_code == 65
    assert not json.loads(farcall("tokens", "ls", "--json").stdout)


def test_accounts_have_tokens_and_are_deleted_with_them(farcall: Farcall) -> None:
    [[account_id]] = farcall.lines("accounts", "create", "robot")
    assert farcall("accounts", "create", "robot").exit_code != 0

    farcall("tokens", "create", "ci", "--scope", "tasks:read", "--account", "robot")

    assert json.loads(farcall("tokens", "ls", "--json").stdout)[0]["identity_id"] == account_id
    assert [row[:2] for row in farcall.lines("accounts", "ls")] == [[account_id, "robot"]]
    assert farcall("accounts", "rm", "robot").exit_code == 0
    assert not json.loads(farcall("tokens", "ls", "--json").stdout)
    assert not farcall.lines("accounts", "ls")
    assert farcall("accounts", "rm", "robot").exit_code != 0
