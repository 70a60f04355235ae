"""Sharing with the client and the command line, against the real routes over stores in memory."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from farcall import Client
from farcall.cli._app import app
from farcall.cli._connect import CommandEnvironment
from farcall_common.errors import Forbidden, InvalidRequest, NotFound
from farcall_lambdas.identity import Identity
from tests.support.memory_api import ALICE, BOB, Clock, MemoryApi

BOB_OF_LAB = dataclasses.replace(BOB, verified=frozenset({"name bob@example.org", "group lab-7"}))
NOW = dt.datetime.now(dt.UTC)


@pytest.fixture
def api() -> MemoryApi:
    return MemoryApi(clock=Clock(NOW.timestamp()))


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path))


def client_of(api: MemoryApi, caller: Identity) -> Client:
    """A client whose requests are this caller's."""

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        found = api.call(request.method, path, request.content or None, caller=caller)
        return httpx.Response(found.status, json=found.body)

    return Client("https://farcall.test", "token", transport=httpx.MockTransport(answer))


def farcall(api: MemoryApi, *arguments: str, caller: Identity = ALICE, exit_code: int = 0) -> Any:
    """What a command writes for programs, or else its whole output."""
    environment = CommandEnvironment(lambda url, token: client_of(api, caller))
    result = CliRunner().invoke(app, arguments, obj=environment, prog_name="farcall")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.output


def test_an_endpoint_is_shared_listed_and_taken_back(api: MemoryApi) -> None:
    endpoint_id = api.endpoint()
    alice, bob = client_of(api, ALICE), client_of(api, BOB_OF_LAB)
    with pytest.raises(Forbidden) as refused:
        bob.get_endpoint(endpoint_id)
    assert "farcall endpoints share" in str(refused.value.hint)
    end = NOW + dt.timedelta(days=3)
    share = alice.share_endpoint(endpoint_id, "Bob@example.org", until=end, note="course")
    assert share["ends_at"] == pytest.approx(end.timestamp())
    assert bob.get_endpoint(endpoint_id)["owned"] is False
    assert alice.get_endpoint_shares(endpoint_id) == [share]
    [found] = bob.get_shared()
    assert (found["object_id"], found["name"], found["share"]) == (endpoint_id, "laptop", share)
    alice.unshare_endpoint(endpoint_id, "BOB@example.org")
    with pytest.raises(NotFound):
        alice.unshare_endpoint(endpoint_id, share["share_id"])
    assert bob.get_shared() == []


def test_a_function_is_shared_with_a_group_and_an_identity(api: MemoryApi) -> None:
    function_id = api.function()
    alice, bob = client_of(api, ALICE), client_of(api, BOB_OF_LAB)
    alice.share_function(function_id, "group:lab-7", "see")
    assert bob.find_function(function_id)["function_name"] == "f"
    api.clock.now += 1
    share = alice.share_function(function_id, BOB.identity_id, "manage")
    bob.update_function(function_id, description="better")
    assert [each["right"] for each in alice.get_function_shares(function_id)] == ["see", "manage"]
    alice.unshare_function(function_id, share["share_id"])
    with pytest.raises(Forbidden):
        bob.get_function_shares(function_id)


@pytest.mark.parametrize("wrong", ["bob", "group:", "everyone", ""])
def test_wrong_grantees_are_refused_before_a_request(api: MemoryApi, wrong: str) -> None:
    with pytest.raises(InvalidRequest, match="not a grantee") as refused:
        client_of(api, ALICE).share_endpoint(api.endpoint(), wrong)
    assert "user@lab.org" in str(refused.value.hint)


def test_commands_say_what_sharing_means_and_show_what_is_shared(api: MemoryApi) -> None:
    endpoint_id = api.endpoint()
    said = farcall(
        api, "endpoints", "share", "laptop", "--with", "bob@example.org", "--until", "30d", "--note", "course"
    )
    assert "bob@example.org may use endpoint laptop until 20" in said
    assert "run code on it as the account of its agent" in said
    [share] = farcall(api, "endpoints", "shares", "laptop", "--json")
    assert share["ends_at"] == pytest.approx((NOW + dt.timedelta(days=30)).timestamp(), abs=3600)
    assert f"endpoint\t{endpoint_id}\tlaptop\tuse" in farcall(api, "shared", caller=BOB_OF_LAB)
    assert farcall(api, "endpoints", "unshare", "laptop", "--with", "bob@example.org") == ""
    assert farcall(api, "endpoints", "shares", "laptop") == ""
    assert "which share" in farcall(api, "endpoints", "unshare", "laptop", exit_code=65)


def test_one_command_shares_with_several_and_refuses_what_is_no_grantee(api: MemoryApi) -> None:
    endpoint_id = api.endpoint()
    said = farcall(api, "endpoints", "share", "laptop", "--with", "bob@example.org", "--with", "group:lab-7")
    assert said.count("may use endpoint laptop") == 2
    for wrong in ("bob@example.org,carol@example.org", "identity:bob", "grp:lab", "name:", "bob"):
        refused = farcall(api, "endpoints", "share", "laptop", "--with", "a@b.c", "--with", wrong, exit_code=65)
        assert f"{wrong!r} is not a grantee" in refused
    assert len(client_of(api, ALICE).get_endpoint_shares(endpoint_id)) == 2
    refused = farcall(api, "teams", "create", "optics", "bob@example.org", "carol", exit_code=65)
    assert "'carol' is not a grantee" in refused
    farcall(api, "teams", "create", "optics", "--json")
    assert "already" in farcall(api, "teams", "create", "optics", exit_code=73)


def test_a_share_limits_what_each_person_uses(api: MemoryApi) -> None:
    endpoint_id = api.endpoint()
    command = ("endpoints", "share", "laptop", "--with", "bob@example.org")
    share = farcall(api, *command, "--limit", "max_running=4", "--limit", "core_hours_per_month=0.5", "--json")
    assert share["allowance"] == {"max_running": 4, "core_hours_per_month": 0.5}
    assert client_of(api, ALICE).get_endpoint_shares(endpoint_id) == [share]
    assert "\tcore_hours_per_month=0.5 max_running=4\t" in farcall(api, "endpoints", "shares", "laptop")
    for wrong in ("max_running", "max_running=many", "max_running=0", "cores=3"):
        assert wrong.partition("=")[0] in farcall(api, *command, "--limit", wrong, exit_code=65)
    for wrong in ("core_hours_per_month=nan", "max_walltime_s=inf"):
        assert "not a limit" in farcall(api, *command, "--limit", wrong, exit_code=65)
    assert "max_walltime_s" in farcall(api, *command, "--limit", "cores=3", exit_code=65)
    refused = ("functions", "share", api.function(), "--with", "bob@example.org", "--limit", "weight=2")
    farcall(api, *refused, exit_code=65)


def test_commands_share_functions_with_teams(api: MemoryApi) -> None:
    function_id = api.function()
    assert farcall(api, "teams", "create", "optics", "bob@example.org", "carol@example.org", "--json")["team_id"]
    assert "read its code" in farcall(api, "functions", "share", function_id, "--with", "team:optics", "--right", "see")
    assert client_of(api, BOB_OF_LAB).find_function(function_id)["function_name"] == "f"
    assert "bob@example.org" in farcall(api, "teams", "members", "optics")
    farcall(api, "teams", "remove", "optics", "bob@example.org")
    assert "bob@example.org" not in farcall(api, "teams", "members", "optics")
    farcall(api, "teams", "add", "optics", BOB.identity_id)
    assert "optics" in farcall(api, "teams", "ls", caller=BOB)
    assert "no team" in farcall(api, "functions", "share", function_id, "--with", "team:optic", exit_code=66)
    farcall(api, "functions", "unshare", function_id, "--with", "team:optics")
    farcall(api, "teams", "rm", "optics")
    assert farcall(api, "teams", "ls") == ""
