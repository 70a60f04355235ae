"""Environments in the SDK: options of executors and functions, and the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import farcall
from farcall import Client, ContainerUnknown, EndpointIncompatible, Executor
from farcall._task_info import Why
from farcall.testing import FakeCloud
from tests.unit.sdk_cli_runner import Farcall
from tests.waiting import WAIT_S

SIF = {"type": "apptainer", "location": "/images/sci.sif"}


def double(x: int) -> int:
    return x * 2


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as cloud:
        yield cloud


@pytest.fixture
def client(cloud: FakeCloud) -> Iterator[Client]:
    with cloud.client() as client:
        yield client


def client_through(cloud: FakeCloud, change: Callable[[httpx.Request, Any], Any]) -> Client:
    """A client of an API that changes what it is sent."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.method in ("POST", "PUT"):
            body = change(request, json.loads(request.content))
            request = httpx.Request(request.method, request.url, headers=request.headers, json=body)
        return cloud.transport.handle_request(request)

    return Client("https://farcall.test", cloud.token, transport=httpx.MockTransport(handle))


def test_the_environment_that_was_set_last_is_the_one(client: Client, cloud: FakeCloud) -> None:
    with Executor(cloud.endpoint_id, client, requirements=["polars==1.*"]) as executor:
        assert executor.requirements == ("polars==1.*",)
        assert executor.environment == {"type": "uv", "requirements": ("polars==1.*",)}
        view = executor.options(container="sci")
        assert (view.container, view.container_id, view.environment, view.requirements) == ("sci", "sci", None, ())
        view.environment = SIF
        assert view.environment == SIF
        assert view.container is None
        view.requirements = ["numpy"]
        assert view.requirements == ("numpy",)
        view.requirements = None
        assert view.requirements == ()
        assert executor.requirements == ("polars==1.*",)
        with pytest.raises(ValueError, match="one environment"):
            executor.options(container="sci", requirements=["numpy"])
        with pytest.raises(ValueError, match="Did you mean 'apptainer'"):
            executor.options(environment=SIF | {"type": "aptainer"})


def test_a_decorated_function_has_an_environment() -> None:
    @farcall.function(container="sci", walltime_s=5)
    def decorated(x: int) -> int:
        return x

    assert decorated.options(requirements=["numpy"]).task_options == {"walltime_s": 5, "requirements": ["numpy"]}
    assert decorated.options(retries=1).task_options == {"container": "sci", "walltime_s": 5, "retries": 1}


@pytest.mark.parametrize("wrong", [{"preload": "numpy"}, {"requirements": "numpy"}])
def test_lists_are_not_texts(client: Client, wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="expected a list"):
        client.register_container("/x.sif", "apptainer", **wrong)


def test_an_api_that_knows_no_environments_refuses_the_call(cloud: FakeCloud) -> None:
    def forget(_: httpx.Request, body: Any) -> Any:
        return {name: value for name, value in body.items() if name != "environment"}

    with client_through(cloud, forget) as client, Executor(cloud.endpoint_id, client) as executor:
        for options in ({"requirements": ["numpy"]}, {"environment": SIF}):
            with pytest.raises(ContainerUnknown, match="environment-"):
                executor.options(**options).submit(double, 1).result(WAIT_S)
        assert executor.submit(double, 1).result(WAIT_S) == 2


def test_python_of_the_endpoint_is_not_that_of_an_image(cloud: FakeCloud) -> None:
    """A closure is byte code: the endpoint's own Python cannot run it, and that of the image may."""
    cloud.runtime = {"python_version": "3.99.1", "packages": {}}
    value = 5
    with cloud.client() as client, Executor(cloud.endpoint_id, client) as executor:
        with pytest.raises(EndpointIncompatible, match=r"runs Python 3\.99"):
            executor.submit(lambda: value).result(WAIT_S)
        client.register_container("/images/sci.sif", "apptainer", "sci")
        with pytest.raises(EndpointIncompatible, match="runs no containers"):  # of the API
            executor.options(container="sci").submit(lambda: value).result(WAIT_S)


# -- command line ------------------------------------------------------------------------------------------------------


def test_functions_and_calls_of_the_command_line_name_environments(cloud: FakeCloud, tmp_path: Path) -> None:
    run, script = Farcall(cloud), tmp_path / "work.py"
    script.write_text("def half(x):\n    return x / 2\n")
    run("containers", "register", "/images/sci.sif", "--type", "apptainer", "--name", "sci")
    function_id = run("functions", "register", f"{script}:half", "--container", "sci").stdout.strip()
    assert ["environment", "sci"] in run.lines("functions", "show", function_id)
    assert run("functions", "update", function_id, "--requirement", "numpy").stdout == "2\n"
    assert ["environment", "uv:numpy"] in run.lines("functions", "show", function_id)
    assert run("functions", "update", function_id, "--container", "").stdout == "3\n"
    for options, wanted in ((("--container", "sci"), "sci"), (("--requirement", "numpy"), "uv:numpy")):
        for command, argument in (("run", "1"), ("map", "[1]")):
            refused = run(command, f"{script}:half", argument, "-e", cloud.endpoint_id, *options)
            assert refused.exit_code != 0
            assert f"container {wanted} (" in refused.output
    refused = run("run", f"{script}:half", "1", "--container", "sci", "--requirement", "numpy")
    assert "a task has one environment" in refused.output


def test_notebooks_show_containers_and_options_in_short(client: Client) -> None:
    client.register_container("/images/sci.sif", "apptainer", "sci")
    for shown in (client.get_container("sci"), client.get_containers()):
        assert "/images/sci.sif" in getattr(shown, "_repr_html_")()  # noqa: B009 - of a Json
    with Executor("fake", client) as executor:
        options = executor.options(environment=SIF)
        environment = "Environment(type='apptainer', location='/images/sci.sif')"
        assert repr(options).endswith(f", TaskOptions(environment={environment})>")
        assert options.environment == SIF


def test_an_endpoint_is_shown_in_lines(cloud: FakeCloud) -> None:
    run = Farcall(cloud)
    cloud.runtime = {"python_version": "3.12.1", "packages": {"dill": "0.4.1"}, "containers": ["uv", "venv"]}
    lines = run.lines("endpoints", "show", "fake")
    for line in (["python version", "3.12.1"], ["packages", "dill 0.4.1"], ["environments", "uv, venv"]):
        assert line in lines
    assert "{" not in run("endpoints", "show", "fake").stdout
    assert json.loads(run("endpoints", "show", "fake", "--json").stdout)["runtime"] == cloud.runtime


def test_a_function_is_registered_in_globus_computes_spelling(client: Client) -> None:
    container_id = client.register_container("/images/sci.sif", "apptainer", "sci", "an image")
    function_id = client.register_function(double, container_uuid=container_id)
    assert client.get_function(function_id)["metadata"]["task_environment"]["name"] == "sci"
    with pytest.raises(ContainerUnknown, match="Did you mean 'sci'"):
        client.register_function(double, container_uuid="sic")


def test_status_shows_environments_by_node(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Farcall(cloud)
    shared = {"type": "apptainer", "key": "0123456789abcdef", "warm": 0, "busy": 0, "starting": 0, "forkable": False}
    states = [
        {**shared, "label": "sci", "node": "n1", "warm": 2},
        {
            **shared,
            "label": "sci",
            "node": "n2",
            "forkable": True,
            "problem": "FATAL: no space",
            "since": 1.0,
            "retry_at": 4e9,
        },
        {**shared, "node": "n3", "starting": 1},
        {**shared, "label": "sci", "node": "n4", "text": "apptainer is converting the image", "since": 1.0},
        {**shared, "label": "sci", "node": "n5", "forkable": True},
        {**shared, "label": "sci", "node": "n6", "busy": 1},
        {**shared, "label": "sci", "node": "n7"},
    ]

    whole = json.loads(run("endpoints", "status", "fake", "--json").stdout)
    assert "environments" not in whole
    without = run.lines("endpoints", "status", "fake")
    original = cloud.transport

    def answer(request: httpx.Request) -> httpx.Response:
        response = original.handle_request(request)
        if request.url.path.endswith("/status"):
            return httpx.Response(200, json=json.loads(response.read()) | {"environments": states})
        return response

    monkeypatch.setattr(cloud, "transport", httpx.MockTransport(answer))
    lines = run.lines("endpoints", "status", "fake")[len(without) + 1 :]
    assert [line[:6] for line in lines] == [
        ["sci", "n1", "2", "0", "0", "warm"],
        ["sci", "n2", "0", "0", "0", "failed"],
        ["apptainer 0123456789abcdef", "n3", "0", "0", "1", "starting"],
        ["sci", "n4", "0", "0", "0", "starting"],
        ["sci", "n5", "0", "0", "0", "forkable"],
        ["sci", "n6", "0", "1", "0", "warm"],
        ["sci", "n7", "0", "0", "0", "cold"],
    ]
    assert run.lines("endpoints", "show", "fake")[-7:] == lines
    assert json.loads(run("endpoints", "show", "fake", "--json").stdout)["environments"] == states
    assert lines[1][6].startswith("problem, ")
    assert re.search(r" ago: FATAL: no space \(tried again in \d+ days\)$", lines[1][6])
    assert lines[3][6].startswith("apptainer is converting the image, ")
    assert lines[3][6].endswith(" so far")


def test_a_problem_of_the_environment_blocks_a_task() -> None:
    assert Why("t", "ENVIRONMENT_PROBLEM", "text", "received", 1.0).is_blocked
    assert not Why("t", "ENVIRONMENT_STARTING", "text", "received", 1.0).is_blocked
