"""Workers that the owner wants warm: how they are spread over managers, and what each manager is asked for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.environments import Environment
from farcall_common.errors import ConfigurationError
from farcall_endpoint.agent.core.managers import Managers
from farcall_endpoint.agent.core.prewarm import Change, Prewarming, spread
from farcall_endpoint.contracts.agent_manager import EnvironmentStatus, PrewarmRequest
from farcall_endpoint.services import daemon
from farcall_endpoint.services.directory import EndpointDirectory

SCI = Environment(type="apptainer", location="/images/sci.sif", name="sci")
WORKS = {"apptainer": ""}


def request(count: int, **others: Any) -> PrewarmRequest:
    return PrewarmRequest(environment=SCI, count=count, **others)


def managers_of(*slots: int) -> Managers:
    managers = Managers()
    for number, count in enumerate(slots):
        managers.add(f"m{number}", slots=count, lifetime=None, node=f"n{number}", types=WORKS)
    return managers


@given(slots=st.lists(st.integers(0, 9), max_size=6), count=st.integers(1, 60))
def test_workers_are_spread_as_evenly_as_the_slots_allow(slots: list[int], count: int) -> None:
    counts = spread(request(count), managers_of(*slots).members)
    assert sum(counts.values()) == min(count, sum(slots))
    have = [counts.get(f"m{number}", 0) for number in range(len(slots))]
    assert all(has <= room for has, room in zip(have, slots, strict=True))
    unfilled = [has for has, room in zip(have, slots, strict=True) if has < room]
    assert not unfilled or max(have) - min(unfilled) <= 1


def test_only_the_named_node_and_only_where_it_can_run() -> None:
    managers = managers_of(4, 4)
    managers.add("unable", slots=9, lifetime=None, node="n9")
    assert spread(request(6), managers.members) == {"m0": 3, "m1": 3}
    assert spread(request(6, node="n1"), managers.members) == {"m1": 4}
    assert spread(request(6, node="elsewhere"), managers.members) == {}
    broken = EnvironmentStatus(SCI.key, "sci", "apptainer", problem="denied")
    managers.note_environments("m0", (broken,))
    assert spread(request(2), managers.members) == {"m1": 2}


def test_managers_are_asked_once_and_again_when_others_come_or_go() -> None:
    managers, prewarming = managers_of(4, 4), Prewarming()
    prewarming.request([request(4)])
    assert list(prewarming.changes(managers)) == [Change("m0", SCI, 2, retry=True), Change("m1", SCI, 2, retry=True)]
    prewarming.managers_changed()
    assert list(prewarming.changes(managers)) == []
    managers.add("m2", slots=4, lifetime=None, node="n2", types=WORKS)
    prewarming.managers_changed()
    assert Change("m2", SCI, 1) in list(prewarming.changes(managers))
    managers.remove("m1")
    prewarming.managers_changed()
    assert list(prewarming.changes(managers)) == [Change("m2", SCI, 2)]
    prewarming.request([])
    assert list(prewarming.changes(managers)) == [Change("m0", SCI, 0), Change("m2", SCI, 0)]


def test_a_request_that_is_made_again_tries_again_on_all_nodes() -> None:
    managers, prewarming = managers_of(4, 4), Prewarming()
    prewarming.request([request(2)])
    assert list(prewarming.changes(managers)) == [Change("m0", SCI, 1, retry=True), Change("m1", SCI, 1, retry=True)]
    problem = EnvironmentStatus(SCI.key, "sci", "apptainer", since=100.0, problem="denied")
    managers.note_environments("m0", (problem,))
    prewarming.managers_changed()
    assert set(prewarming.changes(managers)) == {Change("m0", SCI, 0), Change("m1", SCI, 2)}
    prewarming.request([request(2, requested_at=200.0)])
    again = set(prewarming.changes(managers))
    assert again == {Change("m0", SCI, 0, retry=True), Change("m1", SCI, 2, retry=True)}
    assert list(prewarming.changes(managers)) == []
    [row] = prewarming.describe(managers)
    assert not row["failed"], "the problem is older than the request"


@pytest.mark.parametrize("away_s", [-7200.0, 7200.0])
def test_clocks_of_nodes_are_not_compared(away_s: float) -> None:
    """A node's clock may be wrong, and any clock may be set."""
    now = 1_000_000.0
    managers, prewarming = managers_of(4), Prewarming()
    former = EnvironmentStatus(SCI.key, "sci", "apptainer", since=now + away_s - 60.0, problem="denied")
    managers.note_environments("m0", (former,))
    prewarming.request([request(2, requested_at=now)])
    assert not prewarming.describe(managers)[0]["failed"], "the manager was not asked yet"
    list(prewarming.changes(managers))
    assert not prewarming.describe(managers)[0]["failed"], "that was before the request"
    again = EnvironmentStatus(SCI.key, "sci", "apptainer", since=now + away_s, problem="denied")
    managers.note_environments("m0", (again,))
    assert prewarming.describe(managers)[0]["failed"]


@pytest.mark.parametrize(
    ("status", "why", "failed"),
    [
        (EnvironmentStatus(SCI.key, "sci", "apptainer", starting=1, text="converts"), "node n0: converts", False),
        (
            EnvironmentStatus(SCI.key, "sci", "apptainer", since=8.0, problem="denied"),
            "cannot be started on node n0: denied",
            True,
        ),
        (EnvironmentStatus(SCI.key, "sci", "apptainer", warm=2), "slots for 2 of them", False),
    ],
)
def test_the_status_says_how_far_it_is(status: EnvironmentStatus, why: str, failed: bool) -> None:
    managers, prewarming = managers_of(2), Prewarming()
    prewarming.request([request(3, requested_at=7.0)])
    list(prewarming.changes(managers))
    managers.note_environments("m0", (status,))
    [row] = prewarming.describe(managers)
    assert why in str(row["why"])
    assert (row["warm"], row["placed"], row["failed"], row["requested_at"]) == (status.warm, 2, failed, 7.0)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_status_names_other_requests_that_hold_the_slots() -> None:
    managers, prewarming = managers_of(2), Prewarming()
    other = PrewarmRequest(environment=Environment(type="apptainer", location="/v.sif"), count=1)
    elsewhere = PrewarmRequest(environment=Environment(type="apptainer", location="/w.sif"), count=1, node="typo")
    prewarming.request([other, elsewhere, request(2)])
    managers.note_environments("m0", (EnvironmentStatus(SCI.key, "sci", "apptainer", warm=1),))
    rows = {row["key"]: row for row in prewarming.describe(managers)}
    assert "there are 2 slots, and other requests want 1" in str(rows[SCI.key]["why"])
    failed = EnvironmentStatus(other.environment.key, "/v.sif", "apptainer", problem="no such image")
    managers.note_environments("m0", (EnvironmentStatus(SCI.key, "sci", "apptainer", warm=1), failed))
    assert {row["key"]: row["why"] for row in prewarming.describe(managers)}[SCI.key] == ""
    managers.note_environments("m0", (EnvironmentStatus(SCI.key, "sci", "apptainer", warm=2),))
    assert {row["key"]: row["why"] for row in prewarming.describe(managers)}[SCI.key] == ""


@pytest.fixture
def directory(tmp_path: Path) -> EndpointDirectory:
    directory = EndpointDirectory.of(tmp_path, "lab")
    directory.create()
    known = {"type": SCI.type, "location": SCI.location, "name": SCI.name}
    directory.write_status({"known_environments": [known], "at": time.time()})
    return directory


def test_an_environment_is_found_by_name_label_key_or_place(directory: EndpointDirectory) -> None:
    assert daemon.find_environment(directory, "sci") == SCI
    assert daemon.find_environment(directory, SCI.key) == SCI
    other = daemon.find_environment(directory, "docker:registry.example/x:1")
    assert (other.type, other.location) == ("docker", "registry.example/x:1")
    assert daemon.find_environment(directory, "uv:polars==1.* numpy").requirements == ("polars==1.*", "numpy")
    with pytest.raises(ConfigurationError, match=r"knows no environment 'scj'.*Did you mean 'sci'"):
        daemon.find_environment(directory, "scj")
    with pytest.raises(ConfigurationError, match=r"Known are sci\. TYPE:LOCATION"):
        daemon.find_environment(directory, "quite-another")
    with pytest.raises(ConfigurationError, match=r"'bublewrap' is not a type.*Did you mean 'bubblewrap'"):
        daemon.find_environment(directory, "bublewrap:/images/x")
    with pytest.raises(ConfigurationError, match="absolute path"):
        daemon.find_environment(directory, "venv:here")


def test_a_request_waits_for_the_agent_and_replaces_the_former(directory: EndpointDirectory) -> None:
    for count, kept in ((3, [3]), (2, [2]), (0, [])):
        outcome = daemon.prewarm(directory, request(count), timeout_s=1.0, echo=print)
        assert "when it starts" in outcome
        assert [each.count for each in directory.read_prewarms()] == kept
    assert (directory.path / "prewarm.json").stat().st_mode & 0o077 == 0
    (directory.path / "prewarm.json").write_text("{broken")
    assert directory.read_prewarms() == ()
