"""Environments of tasks: chosen by a call or a function, checked at submit, shown with their states."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

import pytest

from farcall_common.environments import TYPES, Environment
from farcall_common.store.model import (
    Container,
    EndpointStatus,
    EnvironmentState,
    Presence,
    Task,
    TaskResult,
)
from farcall_common.wire.states import Reporter, TaskState
from tests.support.memory_api import ALICE, BOB, Answer
from tests.unit.test_lambdas_submit import PAYLOAD
from tests.unit.test_lambdas_why import WhyLab

SIF: Final = {"type": "apptainer", "location": "/images/sci.sif"}
SCI: Final = Environment.of(SIF | {"name": "sci"})
PACKAGES: Final = {"type": "uv", "requirements": ["polars==1.*"]}


class EnvironmentLab(WhyLab):
    """A lab whose endpoint runs environments, and whose caller has the container ``sci``."""

    def __init__(self, **endpoint: Any) -> None:
        super().__init__(**endpoint)
        self.connect(containers=["apptainer", "uv"])
        self.container_id = self.register("sci")

    def connect(self, **fields: Any) -> None:
        body = {"public_key": "k" * 40, "python_version": "3.12.4", **fields}
        assert self.api.call("POST", f"/v3/endpoints/{self.endpoint_id}/connect", body).body["code"] == "NO_FORWARDER"

    def register(self, name: str, *, caller: Any = ALICE, **changes: Any) -> str:
        answer = self.api.call("POST", "/v3/containers", SIF | {"name": name} | changes, caller=caller)
        assert answer.status == 200, answer.body
        return str(answer.body["container_id"])

    def submitted(self, tasks: Mapping[str, Any] | None = None, **fields: Any) -> list[Task]:
        answer = self.submit(tasks, **fields)
        assert answer.status == 200, answer.body
        ids = [task_id for of_function in answer.body["tasks"].values() for task_id in of_function]
        return [self.database.get_tasks(ids)[task_id] for task_id in ids]


@pytest.fixture
def lab() -> EnvironmentLab:
    return EnvironmentLab()


def code_of(answer: Answer) -> tuple[int, Any]:
    return answer.status, answer.body.get("code")


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_task_has_the_definition_of_its_container_and_keeps_it(lab: EnvironmentLab) -> None:
    for reference in ("sci", lab.container_id):
        [task] = lab.submitted(container=reference)
        assert (task.options.environment, task.options.container) == (SCI, lab.container_id)
    assert lab.api.call("DELETE", "/v3/containers/sci").status == 200
    assert lab.database.get_tasks([task.task_id])[task.task_id].options.environment == SCI
    assert code_of(lab.submit(container="sci")) == (404, "CONTAINER_UNKNOWN")
    assert lab.api.call("GET", f"/v2/tasks/{task.task_id}").body["environment"] == "sci"


@pytest.mark.parametrize("given", [SIF, PACKAGES, SIF | {"preload": ["numpy"], "name": "mine"}])
def test_environment_without_a_registration(lab: EnvironmentLab, given: dict[str, Any]) -> None:
    environment = Environment.of(given)
    [task] = lab.submitted(environment=given)
    # Releases that know no environments keep the name only, and refuse it.
    assert (task.options.environment, task.options.container) == (environment, environment.reference)
    [task] = lab.submitted(environment=given, container=environment.reference)
    assert task.options.environment == environment


@pytest.mark.parametrize(
    "wrong",
    [
        {"environment": SIF, "container": "sci"},
        {"environment": SIF | {"image": "/other.sif"}},
        {"environment": {"type": "conda", "location": "base"}},
        {"environment": {"type": "uv", "requirements": ["--index-url=http://evil"]}},
        {"environment": SIF | {"preload": ["a"] * 101}},
        {"environment": "sci"},
    ],
)
def test_invalid_environment_is_refused(lab: EnvironmentLab, wrong: dict[str, Any]) -> None:
    assert lab.submit(**wrong).status == 422
    assert lab.count() == 0


def test_function_has_an_environment_and_a_call_may_name_another(lab: EnvironmentLab) -> None:
    answer = lab.api.call("POST", "/v3/functions", {"function_name": "f", "function_code": "c", "container": "sci"})
    assert answer.body["environment"] == "sci"
    contained = answer.body["function_uuid"]
    for field in ("container", "container_uuid"):
        assert lab.function(**{field: lab.container_id})
    assert lab.function(container_uuid="") != lab.function(container_uuid=None)  # as Globus Compute's clients say none
    # One submit, several functions: each in its own.
    plain = lab.function_id
    packed = lab.function(environment=PACKAGES)
    tasks = lab.submitted({contained: [PAYLOAD, PAYLOAD], plain: [PAYLOAD], packed: [PAYLOAD]})
    found = [task.options.environment for task in tasks]
    assert found == [SCI, SCI, None, Environment.of(PACKAGES)]
    assert tasks[0].options is tasks[1].options
    assert {task.options.environment for task in lab.submitted({contained: ["p"], plain: ["p"]}, environment=SIF)} == {
        Environment.of(SIF)
    }


def test_environment_of_a_function_is_a_copy_for_all_who_run_it(lab: EnvironmentLab) -> None:
    contained = lab.function(container="sci", public=True)
    lab.api.share(f"endpoints/{lab.endpoint_id}", BOB)
    assert lab.api.call("DELETE", "/v3/containers/sci").status == 200
    lab.register("sci", location="/images/other.sif")
    lab.register("sci", location="/images/bobs.sif", caller=BOB)
    for caller in (ALICE, BOB):
        [task] = lab.submitted({contained: [PAYLOAD]}, caller=caller)
        assert task.options.environment == SCI


def test_environment_of_a_function_is_part_of_its_version(lab: EnvironmentLab) -> None:
    function_id = lab.function(container="sci", meta={"a": 1, "task_environment": {"type": "docker"}})

    def update(**changes: Any) -> int:
        answer = lab.api.call("PUT", f"/v3/functions/{function_id}", changes)
        assert answer.status == 200, answer.body
        return int(answer.body["version"])

    def environment(reference: str = function_id) -> Environment | None:
        [task] = lab.submitted({reference: [PAYLOAD]})
        return task.options.environment

    assert update(description="the same") == update(container="sci") == 1
    assert (update(function_code="other"), environment()) == (2, SCI)
    assert (update(meta={"b": 2}), environment()) == (3, SCI)
    assert (update(environment=PACKAGES), environment()) == (4, Environment.of(PACKAGES))
    assert (update(environment=PACKAGES), environment(f"{function_id}@1")) == (4, SCI)
    assert (update(container=""), environment()) == (5, None)
    assert lab.api.call("PUT", f"/v3/functions/{function_id}", {"container": "x"}).body["code"] == "CONTAINER_UNKNOWN"


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"container": "sci", "environment": SIF}, 400),
        ({"container": "sci", "container_uuid": "sci"}, 400),
        ({"container": "other"}, 404),
        ({"environment": {"type": "docker"}}, 422),
    ],
)
def test_function_has_one_environment(lab: EnvironmentLab, wrong: dict[str, Any], code: int) -> None:
    body = {"function_name": "f", "function_code": "c", **wrong}
    assert lab.api.call("POST", "/v3/functions", body).status == code


def test_container_of_others_cannot_be_named(lab: EnvironmentLab) -> None:
    lab.api.share(f"endpoints/{lab.endpoint_id}", BOB)
    function_id = lab.function(public=True)
    refused = lab.submit({function_id: [PAYLOAD]}, container=lab.container_id, caller=BOB)
    assert code_of(refused) == (404, "CONTAINER_UNKNOWN")
    body = {"function_name": "f", "function_code": "c", "container": lab.container_id}
    assert lab.api.call("POST", "/v3/functions", body, caller=BOB).body["code"] == "CONTAINER_UNKNOWN"


def test_container_that_an_earlier_release_registered_may_be_none(lab: EnvironmentLab) -> None:
    lab.records.functions.add_container(Container("c-old", ALICE.identity_id, "old", "kubernetes", "python:3.12"))
    refused = lab.submit(container="old")
    assert code_of(refused) == (400, "INVALID_REQUEST")
    assert "Container old cannot be used: environment: type 'kubernetes' is none of" in refused.body["message"]


# -- the check of a submit ---------------------------------------------------------------------------------------------


def test_endpoint_that_does_not_know_the_type_is_refused(lab: EnvironmentLab) -> None:
    contained = lab.function(environment={"type": "docker", "location": "python:3.12"})
    refused = lab.submit({contained: [PAYLOAD], lab.function_id: [PAYLOAD]})
    assert code_of(refused) == (400, "ENDPOINT_INCOMPATIBLE")
    assert refused.body["message"] == (
        "The tasks require container docker:python:3.12 (docker), and endpoint laptop runs apptainer, uv."
    )
    lab.connect()  # an older release
    refused = lab.submit(container="sci")
    assert refused.body["message"].endswith("container sci (apptainer), and endpoint laptop runs no containers.")
    assert lab.count() == 0
    lab.connect(containers=list(TYPES))
    assert lab.submit({contained: [PAYLOAD]}).status == 200
    shown = lab.api.call("GET", f"/v2/endpoints/{lab.endpoint_id}").body["runtime"]["containers"]
    assert shown == list(TYPES)


@pytest.mark.parametrize("wrong", ["apptainer", [5], ["x" * 41], ["x"] * 33])
def test_types_that_an_agent_reports_are_checked(lab: EnvironmentLab, wrong: object) -> None:
    body = {"public_key": "k" * 40, "containers": wrong}
    assert lab.api.call("POST", f"/v3/endpoints/{lab.endpoint_id}/connect", body).status == 422


def test_python_of_the_endpoint_is_not_that_of_an_image(lab: EnvironmentLab) -> None:
    compiled = lab.function(meta={"byte_code_of_python": "3.11"})
    assert code_of(lab.submit({compiled: [PAYLOAD]})) == (400, "ENDPOINT_INCOMPATIBLE")
    assert lab.submit({compiled: [PAYLOAD]}, container="sci").status == 200


def test_restricted_endpoint_runs_functions_in_their_own_environment_only(lab: EnvironmentLab) -> None:
    contained = lab.function(container="sci")
    path = f"/v3/endpoints/{lab.endpoint_id}"
    assert lab.api.call("PUT", path, {"allowed_functions": [contained, lab.function_id]}).status == 200
    assert lab.submit({contained: [PAYLOAD], lab.function_id: [PAYLOAD]}).status == 200
    assert lab.submit({contained: [PAYLOAD]}, container="sci").status == 200
    for tasks, environment in ((contained, PACKAGES), (lab.function_id, SIF)):
        refused = lab.submit({tasks: [PAYLOAD]}, environment=environment)
        assert code_of(refused) == (403, "FUNCTION_NOT_PERMITTED")
        assert "each in its own environment" in refused.body["message"]


def test_a_retry_runs_in_the_same_environment(lab: EnvironmentLab) -> None:
    for fields in ({"container": "sci"}, {"environment": PACKAGES}):
        [task] = lab.submitted(**fields)
        lab.end(task.task_id, TaskState.FAILED)
        answer = lab.api.call("POST", f"/v3/tasks/{task.task_id}/retry", {})
        assert answer.status == 200, answer.body
        again = lab.database.get_tasks([answer.body["task_id"]])[answer.body["task_id"]]
        assert again.options.environment == task.options.environment


def test_memoized_result_is_of_the_same_environment(lab: EnvironmentLab) -> None:
    lab.register("also", caller=ALICE)
    [first] = lab.submitted(container="sci", memoize=True)
    ended = TaskResult(first.task_id, lab.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"answer")
    lab.records.tasks.record_results([ended], at=dt.datetime.fromtimestamp(lab.api.clock.now, dt.UTC))
    same = ({"container": "also"}, {"environment": SIF}, {"container": lab.container_id})
    others: tuple[dict[str, Any], ...] = ({}, {"environment": PACKAGES}, {"environment": SIF | {"preload": ["os"]}})
    assert ["results" in lab.submit(memoize=True, **fields).body for fields in same] == [True] * 3
    assert ["results" in lab.submit(memoize=True, **fields).body for fields in others] == [False] * 3


# -- states ------------------------------------------------------------------------------------------------------------


def state(**changes: Any) -> EnvironmentState:
    fields = {"key": SCI.key, "label": "sci", "type": "apptainer", "node": "n3"}
    return EnvironmentState(**(fields | changes))


CONVERTING: Final = "apptainer is converting the image"


@pytest.mark.parametrize("launching", [False, True])
@pytest.mark.parametrize(
    ("states", "reason", "text"),
    [
        (
            [state(starting=1, text=CONVERTING, since=1_699_999_960.0)],
            "ENVIRONMENT_STARTING",
            f"The task waits for environment sci to start on node n3: {CONVERTING}, 40 s so far (as of now); ",
        ),
        (
            [
                state(starting=1, node="n4", since=1_699_999_990.0),
                state(starting=1, text=CONVERTING, since=1_699_999_960.0),
            ],
            "ENVIRONMENT_STARTING",
            f"waits for environment sci to start on node n3 and 1 more: {CONVERTING}, 40 s so far (as of now); ",
        ),
        ([state(starting=2)], "ENVIRONMENT_STARTING", "environment sci to start on node n3 (as of now); "),
        (
            [state(starting=2, since=1_699_999_000.0)],  # a fresh worker for each task, for a long time
            "ENVIRONMENT_STARTING",
            "environment sci to start on node n3 (as of now); ",
        ),
        (
            [state(problem="FATAL: no such image.")],
            "ENVIRONMENT_PROBLEM",
            "Environment sci cannot start on node n3: FATAL: no such image (as of now); ",
        ),
        (
            [state(problem="FATAL: no such image.", retry_at=1_700_000_240.0)],
            "ENVIRONMENT_PROBLEM",
            "on node n3: FATAL: no such image (tried again in 4 minutes) (as of now); ",
        ),
        (
            [state(problem="FATAL: no such image.", retry_at=1_700_000_000.0)],
            "ENVIRONMENT_PROBLEM",
            "on node n3: FATAL: no such image (tried again with the next task) (as of now); ",
        ),
        ([state(busy=2), state(busy=1, node="n4")], "WORKERS_BUSY", "all 3 workers of environment sci are busy"),
        ([state(busy=1)], "WORKERS_BUSY", "the only worker of environment sci is busy"),
    ],
)
def test_why_says_what_the_environment_does(
    lab: EnvironmentLab, states: list[EnvironmentState], reason: str, text: str, launching: bool
) -> None:
    [task] = lab.submitted(container="sci")
    if launching:
        lab.lease(1)
        lab.move(task.task_id, TaskState.WAITING_FOR_LAUNCH)
    other = state(key="0" * 16, warm=3)
    now = lab.api.clock.now
    lab.seen(managers=1, total_workers=4, idle_workers=4, environments=(other, *states), reported_at=now)
    answer = lab.why(task.task_id)
    assert (answer["reason"], text in answer["text"]) == (reason, True), answer["text"]
    assert answer["text"].endswith("; the task has reached the endpoint.") == launching
    assert [each["node"] for each in answer["endpoint"]["environments"]] == [each.node for each in states]


def test_why_has_no_name_that_another_submitter_gave(lab: EnvironmentLab) -> None:
    [task] = lab.submitted(container="sci")
    problem = "The environment bobs secret cannot be started on a node of the endpoint: no such image"
    lab.seen(managers=1, total_workers=4, environments=(state(label="bobs secret", problem=problem),))
    answer = lab.why(task.task_id)
    assert "The environment sci cannot be started" in answer["text"]
    assert "bobs" not in str(answer)


def test_why_is_about_the_endpoint_if_the_environment_is_ready_or_none(lab: EnvironmentLab) -> None:
    [contained], [plain] = lab.submitted(container="sci"), lab.submitted()
    lab.seen(managers=1, total_workers=4, idle_workers=4, environments=(state(warm=1), state(starting=1, node="n4")))
    assert lab.why(contained.task_id)["reason"] == lab.why(plain.task_id)["reason"] == "NEXT"
    assert "environments" not in lab.why(plain.task_id)["endpoint"]
    lab.seen(managers=1, total_workers=4, environments=(state(starting=1),))
    assert [lab.why(task.task_id)["reason"] for task in (contained, plain)] == ["ENVIRONMENT_STARTING", "WORKERS_BUSY"]
    lab.seen(online=False, environments=(state(starting=1),))
    assert lab.why(contained.task_id)["reason"] == "ENDPOINT_OFFLINE"


def test_status_shows_environments_to_those_who_may_know_them() -> None:
    lab = EnvironmentLab(public=True)
    said = {"label": "secret", "text": "t", "problem": "p", "retry_at": 9.0}
    private = state(key="0" * 16, node="n4", warm=1, forkable=True, since=5.0, **said)
    status = EndpointStatus(environments=(state(starting=1, text=CONVERTING), private), reported_at=lab.api.clock.now)
    lab.records.endpoints.set_presence([Presence(lab.endpoint_id, True, status)])
    lab.register("bobs", caller=BOB)  # the same as sci

    def shown(caller: Any) -> Any:
        return lab.api.call("GET", f"/v2/endpoints/{lab.endpoint_id}/status", caller=caller).body["environments"]

    whole, hidden = shown(ALICE), shown(BOB)
    assert [each["label"] for each in whole] == ["sci", "secret"]
    assert whole[0] == {
        "key": SCI.key,
        "type": "apptainer",
        "node": "n3",
        "warm": 0,
        "busy": 0,
        "starting": 1,
        "forkable": False,
        "label": "sci",
        "text": CONVERTING,
    }
    assert hidden[0] == whole[0] | {"label": "bobs"}
    assert said.keys() & hidden[1].keys() == set()
    assert whole[1].items() >= said.items()
    assert (hidden[1]["warm"], hidden[1]["forkable"]) == (1, True)
    lab.records.endpoints.set_presence([Presence(lab.endpoint_id, True, EndpointStatus())])
    assert "environments" not in lab.api.call("GET", f"/v2/endpoints/{lab.endpoint_id}/status").body
