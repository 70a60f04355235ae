"""Containers by id and name, and tasks that ask for one."""

from __future__ import annotations

from typing import Any

import pytest

from farcall_common.store.model import Task
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import BOB, Answer, MemoryApi

XTAL = {"name": "xtal", "type": "singularity", "location": "/images/xtal.sif", "description": "diffraction"}


@pytest.fixture
def api() -> MemoryApi:
    return MemoryApi()


def register(api: MemoryApi, **changes: Any) -> str:
    answer = api.call("POST", "/v2/containers", XTAL | changes)
    assert answer.status == 200, answer.body
    return str(answer.body["container_id"])


def test_container_is_found_as_in_globus_compute(api: MemoryApi) -> None:
    container_id = register(api)
    shown = api.call("GET", f"/v2/containers/{container_id}/singularity").body["container"]
    known = {key: shown[key] for key in ("name", "type", "location", "description")}
    assert (known, shown["container_uuid"]) == (XTAL, container_id)
    assert api.call("GET", f"/v2/containers/{container_id}/docker").body["code"] == "CONTAINER_UNKNOWN"
    built = api.call("GET", f"/v2/containers/build/{container_id}").body
    assert built == {"container_id": container_id, "status": "provided"}


def test_container_is_found_by_name_and_deleted(api: MemoryApi) -> None:
    container_id = register(api)
    nameless = register(api, name="")
    assert api.call("GET", "/v3/containers/xtal").body["container_uuid"] == container_id
    assert api.call("GET", f"/v3/containers/{nameless}").body["name"] == nameless
    listed = api.call("GET", "/v3/containers").body["containers"]
    assert {each["container_uuid"] for each in listed} == {container_id, nameless}
    assert api.call("DELETE", "/v3/containers/xtal").body == {"result": 302}
    assert api.call("GET", "/v3/containers/xtal").body["code"] == "CONTAINER_UNKNOWN"


def test_container_name_is_unique(api: MemoryApi) -> None:
    assert register(api) == register(api, description="the same")
    other = api.call("POST", "/v3/containers", XTAL | {"location": "/images/other.sif"})
    assert (other.status, other.body["code"]) == (409, "CONFLICT")


def test_containers_are_private_to_their_owner(api: MemoryApi) -> None:
    container_id = register(api)
    for reference in (container_id, "xtal"):
        assert api.call("GET", f"/v3/containers/{reference}", caller=BOB).status == 404
        assert api.call("DELETE", f"/v3/containers/{reference}", caller=BOB).status == 404
    assert api.call("GET", "/v3/containers", caller=BOB).body == {"containers": []}


def test_containers_have_a_quota() -> None:
    api = MemoryApi(settings=ApiSettings(max_containers=1))
    register(api)
    assert register(api)  # the same one
    assert api.call("POST", "/v2/containers", XTAL | {"name": "b"}).body["code"] == "QUOTA_EXCEEDED"


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a b"},
        {"type": ""},
        {"type": "Docker"},
        {"location": ""},
        {"type": "conda", "location": "base"},
        {"type": "bubblewrap", "location": "/images/../home"},
        {"requirements": ["numpy"]},
        {"type": "uv", "location": "", "requirements": ["-r /etc/passwd"]},
        {"preload": ["os; import evil"]},
        {"preload": ["os\n"]},
        {"location": "/x" * 1000},
    ],
)
def test_invalid_container_is_refused(api: MemoryApi, change: dict[str, Any]) -> None:
    assert api.call("POST", "/v2/containers", XTAL | change).status == 422


def test_type_that_there_is_not_names_those_that_are_spelled_alike(api: MemoryApi) -> None:
    refused = api.call("POST", "/v3/containers", XTAL | {"type": "aptainer"})
    assert "Did you mean 'apptainer'?" in refused.body["message"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"location": "science.sif"},
            "a URI (docker://NAME) or an absolute path of the endpoint's nodes, not 'science",
        ),
        ({"location": "~/science.sif", "type": "podman"}, "a reference (NAME:TAG) or an absolute path"),
        ({"location": "science", "type": "venv"}, "the absolute path of the directory, not 'science'"),
        ({"name": "my image"}, "body.name: not a name: up to 100 letters, digits, hyphens, dots and underscores"),
    ],
)
def test_what_a_container_cannot_be_is_refused_in_a_sentence(
    api: MemoryApi, change: dict[str, Any], words: str
) -> None:
    message = api.call("POST", "/v3/containers", XTAL | change).body["message"]
    assert words in message
    assert message.startswith("environment: type " if "name" not in change else "body.name: not a name")
    assert "literal" not in message


def test_an_unknown_container_names_those_that_are_spelled_alike(api: MemoryApi) -> None:
    register(api)
    for answer in (api.call("GET", "/v3/containers/xtla"), submit(api, "xtla", ["singularity"])):
        assert (answer.status, answer.body["hint"]) == (404, "Did you mean 'xtal'?")
    assert api.call("GET", "/v3/containers/xtla", caller=BOB).body["hint"].startswith("Register the container first")


def test_container_of_packages_and_modules(api: MemoryApi) -> None:
    packages = {"name": "frames", "type": "uv", "requirements": ["polars==1.*"], "preload": ["polars"]}
    frames = api.call("POST", "/v3/containers", packages).body["container_id"]
    shown = api.call("GET", "/v3/containers/frames").body
    assert {key: shown[key] for key in packages} == packages
    assert (shown["container_uuid"], shown["location"]) == (frames, "")
    assert api.call("POST", "/v3/containers", packages).body["container_id"] == frames
    for other in ({"requirements": ["polars"]}, {"preload": None}):
        assert api.call("POST", "/v3/containers", packages | other).body["code"] == "CONFLICT"
    assert api.call("GET", f"/v3/containers/{register(api)}").body["preload"] is None


# -- tasks -------------------------------------------------------------------------------------------------------------


def submit(api: MemoryApi, container: str, runs: object = None) -> Answer:
    function_id = api.function()
    endpoint_id = api.endpoint(endpoint_name="e")
    if runs is not None:
        api.stores.endpoints.change_endpoint(endpoint_id, {"metadata": {"runtime": {"containers": runs}}})
    body = {"tasks": {function_id: ["p"]}, "container": container}
    return api.call("POST", f"/v3/endpoints/{endpoint_id}/submit", body)


@pytest.mark.parametrize("runs", [None, [], ["docker"], "singularity", {"singularity": 1}])
def test_an_endpoint_that_cannot_run_the_container_is_refused_at_once(api: MemoryApi, runs: object) -> None:
    register(api)
    refused = submit(api, "xtal", runs)
    assert (refused.status, refused.body["code"]) == (400, "ENDPOINT_INCOMPATIBLE")
    said = "runs docker" if runs == ["docker"] else "runs no containers"
    assert refused.body["message"] == f"The tasks require container xtal (singularity), and endpoint e {said}."
    assert api.call("GET", "/v3/tasks").body["tasks"] == []


def test_task_carries_its_container(api: MemoryApi) -> None:
    container_id = register(api)
    for reference in ("xtal", container_id):
        answer = submit(api, reference, ["docker", "singularity"])
        [[task_id]] = answer.body["tasks"].values()
        task: Task = api.stores.tasks.get_tasks([task_id])[task_id]
        assert task.options.container == container_id


def test_unknown_container_is_refused(api: MemoryApi) -> None:
    refused = submit(api, "xtal", ["singularity"])
    assert (refused.status, refused.body["code"]) == (404, "CONTAINER_UNKNOWN")
