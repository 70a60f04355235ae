"""Names of endpoints: which one is meant."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farcall import Client, Executor
from farcall._client import connection_of
from farcall._names import EndpointNames
from farcall.testing import FakeCloud
from farcall_common.errors import (
    ConfigurationError,
    EndpointUnknown,
    FunctionUnknown,
    InvalidRequest,
    ProtocolError,
    TaskGroupUnknown,
    TaskUnknown,
)

CLUSTER = "c1a57e40-0000-4000-8000-000000000001"
LAPTOP = "c1a50000-0000-4000-8000-000000000002"
OTHERS = "0f0f0000-0000-4000-8000-000000000003"


def endpoint(endpoint_id: str, name: str, display_name: str = "") -> dict[str, str]:
    return {"uuid": endpoint_id, "name": name, "display_name": display_name}


OWN = [endpoint(CLUSTER, "cluster", "The Cluster"), endpoint(LAPTOP, "laptop")]
ALL = [*OWN, endpoint(OTHERS, "cluster"), endpoint(OTHERS.replace("0003", "0004"), "public")]


def names(own: Any = OWN, everything: Any = ALL, *, home: Path | None = None, **environ: str) -> EndpointNames:
    variables: Mapping[str, str] = {"FARCALL_HOME": str(home or "/nonexistent"), **environ}
    return EndpointNames(lambda role: own if role == "owner" else everything, environ=variables)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("cluster", CLUSTER),
        ("The Cluster", CLUSTER),
        ("laptop", LAPTOP),
        ("public", ALL[3]["uuid"]),
        ("c1a57", CLUSTER),
        ("c1a57e4000", CLUSTER),
        ("C1A57E40-0000", CLUSTER),
        ("0f0f0000-0000-4000-8000-000000000003", OTHERS),
        (OTHERS.upper(), OTHERS),
    ],
)
def test_an_endpoint_is_found_by_name_id_or_the_beginning_of_the_id(wanted: str, found: str) -> None:
    assert names().find(wanted) == found


@pytest.mark.parametrize("wanted", ["Cluster", "clust", "c1", "ffff", ""])
def test_an_endpoint_that_does_not_exist_is_refused(wanted: str) -> None:
    with pytest.raises((EndpointUnknown, ConfigurationError)):
        names().find(wanted)


def test_names_that_mean_several_endpoints_are_refused_with_their_ids() -> None:
    with pytest.raises(ConfigurationError, match=f"There are 2: cluster \\({CLUSTER}\\), laptop"):
        names().find("c1a5")
    with pytest.raises(ConfigurationError, match="which endpoint"):
        names().find(None)
    with pytest.raises(ConfigurationError, match="which endpoint is 'cluster', which FARCALL_ENDPOINT names"):
        names(own=[], FARCALL_ENDPOINT="cluster").find(None)


def test_an_unknown_endpoint_is_answered_with_names_alike_and_where_it_is_configured(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[default]\nendpoint = "clutser"\n')
    with pytest.raises(EndpointUnknown, match=r"config\.toml names") as caught:
        names(home=tmp_path).find(None)
    assert caught.value.hint == "Did you mean 'cluster'?"
    with pytest.raises(EndpointUnknown, match="'nope', which FARCALL_ENDPOINT names"):
        names(FARCALL_ENDPOINT="nope").find(None)
    with pytest.raises(EndpointUnknown, match="'nope' ") as caught:
        names().find("nope")
    assert "endpoints ls" in caught.value.hint


def test_endpoints_of_others_do_not_take_the_place_of_own_ones() -> None:
    assert names(own=[]).find("public") == ALL[3]["uuid"]
    with pytest.raises(ConfigurationError, match="There are 2"):
        names(own=[]).find("cluster")


def test_the_default_is_in_the_environment_or_the_configuration_or_the_only_one(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[default]\nendpoint = "laptop"\n')
    assert names(home=tmp_path).find(None) == LAPTOP
    assert names(home=tmp_path, FARCALL_ENDPOINT="cluster").find(None) == CLUSTER
    assert names(own=OWN[:1]).find(None) == CLUSTER
    for others in (ALL[3:], []):  # others could make theirs the only one
        with pytest.raises(ConfigurationError, match="no endpoint of your own"):
            names(own=[], everything=others).find(None)


def test_endpoints_are_listed_once_in_a_while() -> None:
    asked: list[str] = []

    def listed(role: str) -> list[dict[str, str]]:
        asked.append(role)
        return OWN

    found = EndpointNames(listed, environ={})
    assert [found.find(name) for name in ("cluster", "cluster", CLUSTER, "laptop")] == [CLUSTER] * 3 + [LAPTOP]
    assert asked == ["owner", "owner"]


# -- ids ---------------------------------------------------------------------------------------------------------------

TASKS = ("01a20336-1234-7abc-8000-000000000001", "01a20336-1234-7abd-8000-000000000002")
GROUP = "c0ffee00-0000-4000-8000-000000000001"


@pytest.fixture
def client() -> Iterator[Client]:
    """Of a user with two tasks in one group that have not ended."""
    with FakeCloud(workers=0) as cloud, cloud.client() as client:
        function_id = client.register_function(len)
        batch = client.create_batch(GROUP)
        for _ in TASKS:
            batch.add(function_id, ([],))
        ids = {function_id: list(TASKS)}
        body = {"tasks": {function_id: ["p", "q"]}, "task_ids": ids, "task_group_id": GROUP}
        connection_of(client).api.submit(cloud.endpoint_id, msgspec.json.encode(body), task_ids=ids)
        yield client


@pytest.mark.parametrize("beginning", ["01a20336-1234-7abc", "01A2033612347ABC8", TASKS[0], TASKS[0].upper()])
def test_tasks_are_found_by_the_first_digits_of_their_ids(client: Client, beginning: str) -> None:
    assert client.get_task(beginning).task_id == TASKS[0]
    assert list(client.get_batch_result([beginning])) == [TASKS[0]]
    assert client.why(beginning).task_id == TASKS[0]
    assert client.get_task_events(beginning)
    assert client.cancel(beginning)["task_id"] == TASKS[0]


def test_groups_are_found_by_the_first_digits_of_their_ids(client: Client) -> None:
    assert client.get_task_group("c0ff") == list(TASKS)
    executor = Executor(connection_of(client).names.find(None), client=client)
    assert [future.task_id for future in executor.reload_tasks("c0ffee")] == list(TASKS)
    assert executor.task_group_id == GROUP
    executor.shutdown(cancel_futures=True)
    with pytest.raises(TaskGroupUnknown, match="begins with c0fe"):
        client.get_task_group("c0fe")


def test_ids_that_are_not_clear_are_refused_with_those_that_begin_so(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=f"several: {TASKS[1]}, {TASKS[0]}"):
        client.cancel("01a20336")
    with pytest.raises(TaskUnknown, match="begins with ffff"):
        client.cancel("ffff")
    for text in ("01a", "nonsense", "", "01a2x"):
        with pytest.raises(InvalidRequest, match="is not the id of a task") as caught:
            client.cancel(text)
        assert "4 or more" in caught.value.hint


def test_a_whole_id_costs_no_request(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("find_ids", "list_functions", "find_function"):
        monkeypatch.setattr(connection_of(client).api, name, pytest.fail)
    ids = connection_of(client).ids
    assert (ids.task(TASKS[0]), ids.group(uuid.UUID(GROUP)), ids.function(f"{GROUP}@2")) == (
        TASKS[0],
        GROUP,
        f"{GROUP}@2",
    )


def test_functions_are_found_by_alias_name_or_the_first_digits_of_their_ids(client: Client) -> None:
    first, second = client.register_function(len, name="count"), client.register_function(len, name="count")
    other = client.register_function(len, name="weigh it")
    client.set_alias("heavy", other)
    assert client.find_function("count")["function_uuid"] == second
    assert client.get_function("count", version=1)["function_uuid"] == second
    assert client.find_function(first[:13])["function_uuid"] == first
    assert client.find_function(f"{first[:13]}@1")["reference"] == f"{first}@1"
    assert client.find_function("heavy")["function_uuid"] == other
    assert client.update_function("weigh it", name="weigh") == 1
    with pytest.raises(InvalidRequest, match="several"):
        client.delete_function("count")
    with pytest.raises(FunctionUnknown) as caught:
        client.find_function("cuont")
    assert caught.value.hint == "Did you mean 'count'?"


@pytest.mark.parametrize("found", [f"{CLUSTER} x", f"{CLUSTER}\nx y", CLUSTER.upper(), "", "cluster", CLUSTER[:-1]])
def test_what_is_not_an_id_is_refused(found: str) -> None:
    with pytest.raises(ProtocolError, match="expected the id of an endpoint"):
        names(own=[endpoint(found, "cluster")]).find("cluster")
    with pytest.raises((ProtocolError, EndpointUnknown)):
        names(own=[endpoint(found, "laptop")], everything=[]).find("c1a5")


@pytest.mark.parametrize("name", ["0f0f0000", "0F0F-0000", OTHERS])
def test_a_name_that_looks_like_the_beginning_of_an_id_does_not_take_its_place(name: str) -> None:
    everything = [endpoint(OTHERS, "cluster"), endpoint(LAPTOP, name)]
    if name == OTHERS:
        assert names(own=[], everything=everything).find(name) == OTHERS
    else:
        with pytest.raises(ConfigurationError, match="There are 2"):
            names(own=[], everything=everything).find(name)


def test_what_a_user_has_written_for_an_endpoint_is_kept() -> None:
    found = names()
    for written in ("cluster", "c1a57", "C1A57", "c1a57e40-00", CLUSTER):
        assert found.find(written) == CLUSTER
    assert found.meanings(CLUSTER) == {"cluster", "c1a57", "c1a57e4000"}
    assert found.meanings(LAPTOP) == set()
    only = names(own=OWN[:1])
    assert only.find(None) == CLUSTER
    assert only.meanings(CLUSTER) == {""}
