"""Latency targets in the API: of functions, of tasks, and what an endpoint reports of them."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from farcall_common.qos import QoS
from farcall_common.qos_report import QosReport, infeasible_targets, read_report
from farcall_common.store.model import EndpointStatus, Presence, Task
from farcall_lambdas.identity import Identity
from tests.support.memory_api import ALICE, BOB
from tests.unit.test_lambdas_submit import PAYLOAD
from tests.unit.test_lambdas_why import WhyLab

TARGET = {"target_ms": 200.0, "percentile": 90.0}


class QosLab(WhyLab):
    """A lab whose endpoint reports latency targets."""

    def task(self, function_id: str | None = None, **fields: Any) -> Task:
        reference = function_id or self.function_id
        answer = self.submit({reference: [PAYLOAD]}, **fields)
        assert answer.status == 200, answer.body
        [task_id] = answer.body["tasks"][reference]
        return self.records.tasks.get_tasks([task_id])[task_id]

    def report(self, *rows: dict[str, Any], at: float | None = None, **fields: Any) -> QosReport:
        """The endpoint is online, and reports this, as its forwarder reads it."""
        report = read_report({"functions": list(rows), **fields}, now=at or self.api.clock.now)
        assert report is not None
        status = EndpointStatus(
            total_workers=1,
            reported_at=report.reported_at,
            infeasible=infeasible_targets(report),
            refuses_infeasible=report.admission == "refuse",
        )
        self.records.endpoints.set_presence([Presence(self.endpoint_id, True, status, report)])
        return report

    def row(self, **fields: Any) -> dict[str, Any]:
        return {"function_id": self.function_id, "function": "f", "target_ms": 300.0, **fields}

    def infeasible(self, **fields: Any) -> dict[str, Any]:
        return self.row(infeasible={"reason": "its calls wait for workers", "fix": "Add workers"}, **fields)

    def shown(self, *, caller: Identity = ALICE) -> Any:
        return self.api.call("GET", f"/v3/endpoints/{self.endpoint_id}/qos", caller=caller)


@pytest.fixture
def lab() -> QosLab:
    return QosLab()


def test_task_has_the_target_of_its_function_unless_it_has_its_own(lab: QosLab) -> None:
    function_id = lab.function(qos=TARGET)
    assert lab.task(function_id).options.qos == QoS(target_ms=200, percentile=90)
    assert lab.task(function_id, qos={"max_slowdown": 3}).options.qos == QoS(max_slowdown=3)
    assert lab.task(function_id, qos={}).options.qos == QoS()
    assert lab.task(function_id, qos={"is_baseline": True}).options.qos == QoS(is_baseline=True)
    assert lab.task().options.qos is None


def test_functions_of_one_submit_have_their_own_targets(lab: QosLab) -> None:
    targets = {lab.function(): None, lab.function(qos=TARGET): 200.0, lab.function(qos={"target_ms": 5}): 5.0}
    answer = lab.submit({function_id: [PAYLOAD] for function_id in targets}).body
    tasks = lab.records.tasks.get_tasks([each for ids in answer["tasks"].values() for each in ids])
    assert {t.function_id: t.options.qos and t.options.qos.target_ms for t in tasks.values()} == targets


def test_older_form_of_a_submit_has_the_target_of_the_function(lab: QosLab) -> None:
    function_id = lab.function(qos=TARGET)
    body = {"tasks": [[function_id, lab.endpoint_id, PAYLOAD]]}
    task_id = lab.api.call("POST", "/v2/submit", body).body["results"][0]["task_uuid"]
    assert lab.records.tasks.get_tasks([task_id])[task_id].options.qos == QoS(target_ms=200, percentile=90)


def test_callees_bring_no_target(lab: QosLab) -> None:
    assert lab.task(callees=[lab.function(qos=TARGET)]).options.qos is None


def test_target_is_shown_with_the_function_and_may_change(lab: QosLab) -> None:
    function_id = lab.function(qos={"target_ms": 200}, meta={"project": "x", "task_qos": "mine"})

    def metadata(**changes: Any) -> Any:
        if changes:
            assert lab.api.call("PUT", f"/v3/functions/{function_id}", changes).status == 200
        return lab.api.call("GET", f"/v3/functions/{function_id}").body["metadata"]

    assert metadata() == {"project": "x", "task_qos": {"target_ms": 200.0, "percentile": 95.0}}
    assert metadata(description="d") == {"project": "x", "task_qos": {"target_ms": 200.0, "percentile": 95.0}}
    assert metadata(qos={"max_slowdown": 2}) == {"project": "x", "task_qos": {"max_slowdown": 2.0, "percentile": 95.0}}
    assert metadata(qos={}) == {"project": "x"}
    versions = lab.api.call("GET", f"/v3/functions/{function_id}/versions").body["versions"]
    assert [each["version"] for each in versions] == [3, 2, 1]


@pytest.mark.parametrize(
    "qos", [{"target_ms": 0}, {"target_ms": 1, "max_slowdown": 2}, {"is_baseline": True}, {"target": 5}]
)
def test_targets_that_make_no_sense_are_refused(lab: QosLab, qos: dict[str, Any]) -> None:
    body = {"function_name": "f", "function_code": "body", "qos": qos}
    assert lab.api.call("POST", "/v3/functions", body).status in (400, 422)


def test_owner_sees_all_functions_and_others_their_own(lab: QosLab) -> None:
    lab = QosLab(public=True)
    bob = lab.api.call("GET", "/v3/whoami", caller=BOB).body["identity_id"]
    rows = [lab.row(), lab.row(submitter=bob, windows={"1m": {"tasks": 3}}), lab.row(submitter=str(uuid.uuid4()))]
    report = lab.report(*rows, policy="pi", problem="no rights")
    answer = lab.shown().body
    assert [each["submitter"] for each in answer["functions"]] == [each.submitter for each in report.functions]
    assert (answer["policy"], answer["problem"], answer["reported_at"]) == ("pi", "no rights", report.reported_at)
    [own] = lab.shown(caller=BOB).body["functions"]
    assert own["submitter"] == bob
    assert own["windows"]["1m"]["tasks"] == 3


def test_who_may_not_use_the_endpoint_sees_no_report(lab: QosLab) -> None:
    lab.report(lab.row())
    assert lab.shown(caller=BOB).status == 403


def test_endpoint_that_reports_none_has_an_empty_report(lab: QosLab) -> None:
    answer = lab.shown().body
    assert (answer["functions"], answer["reported_at"]) == ([], None)


def test_last_report_stays_while_the_endpoint_is_offline(lab: QosLab) -> None:
    lab.report(lab.row())
    lab.records.endpoints.set_presence([Presence(lab.endpoint_id, False, EndpointStatus())])
    assert len(lab.shown().body["functions"]) == 1


def test_submit_with_a_target_that_cannot_be_met_is_answered_with_a_warning(lab: QosLab) -> None:
    lab.report(lab.infeasible())
    answer = lab.submit(qos={"target_ms": 300}).body
    assert answer["warnings"] == [
        {
            "code": "TARGET_INFEASIBLE",
            "function_id": lab.function_id,
            "message": "its calls wait for workers",
            "hint": "Add workers",
        }
    ]


def test_such_a_submit_may_be_refused(lab: QosLab) -> None:
    lab.report(lab.infeasible(), admission="refuse")
    answer = lab.submit(qos={"target_ms": 300})
    assert (answer.status, answer.body["code"], answer.headers["Retry-After"]) == (429, "TARGET_INFEASIBLE", "60")
    assert "its calls wait for workers" in answer.body["message"]
    assert (answer.body["hint"], answer.body["retryable"]) == ("Add workers", False)
    body = {"tasks": [[lab.function_id, lab.endpoint_id, PAYLOAD]], "qos": {"target_ms": 300}}
    [refused] = lab.api.call("POST", "/v2/submit", body).body["results"]
    assert refused["http_status_code"] == 429


def test_target_of_the_function_is_checked_too(lab: QosLab) -> None:
    lab.function_id = lab.function(qos={"target_ms": 100})
    lab.report(lab.infeasible(), admission="refuse")
    assert lab.submit().body["code"] == "TARGET_INFEASIBLE"
    assert lab.submit(qos={}).status == 200


@pytest.mark.parametrize("qos", [None, {}, {"target_ms": 301}, {"target_ms": 300, "percentile": 90}])
def test_tasks_without_such_a_target_are_accepted(lab: QosLab, qos: dict[str, Any] | None) -> None:
    lab.report(lab.infeasible(), admission="refuse")
    answer = lab.submit(**({} if qos is None else {"qos": qos}))
    assert answer.status == 200
    assert "warnings" not in answer.body


def test_targets_of_other_submitters_and_old_reports_do_not_count(lab: QosLab) -> None:
    lab.report(lab.infeasible(submitter=str(uuid.uuid4())), admission="refuse")
    assert lab.submit(qos={"target_ms": 300}).status == 200
    lab.report(lab.infeasible(), admission="refuse", at=lab.api.clock.now - 3600)
    assert lab.submit(qos={"target_ms": 300}).status == 200


def test_repeated_submit_is_not_refused(lab: QosLab) -> None:
    task_ids = {lab.function_id: [str(uuid.uuid4())]}
    assert lab.submit(task_ids=task_ids, qos={"target_ms": 300}).status == 200
    lab.report(lab.infeasible(), admission="refuse")
    assert lab.submit(task_ids=task_ids, qos={"target_ms": 300}).status == 200


def test_why_names_the_target_of_a_task_that_waits_and_what_would_help(lab: QosLab) -> None:
    task = lab.task(qos={"target_ms": 300})
    lab.report(lab.row())
    answer = lab.why(task.task_id)
    assert answer["text"].endswith(" Its target is 300 ms for 95 % of the calls.")
    assert answer["qos"]["target_ms"] == 300
    assert "infeasible" not in answer
    lab.report(lab.infeasible())
    answer = lab.why(task.task_id)
    assert "Its target, 300 ms for 95 % of the calls, cannot be met there" in answer["text"]
    assert answer["text"].endswith(": its calls wait for workers. Add workers.")
    assert answer["infeasible"] == {"reason": "its calls wait for workers", "fix": "Add workers"}


def test_why_says_nothing_of_targets_that_there_are_not(lab: QosLab) -> None:
    task = lab.task()
    lab.report(lab.infeasible())
    answer = lab.why(task.task_id)
    assert "target" not in answer["text"]
    assert {"qos", "infeasible"}.isdisjoint(answer)


def test_task_shows_its_target(lab: QosLab) -> None:
    task_id = lab.task(qos=TARGET).task_id
    assert lab.api.call("GET", f"/v2/tasks/{task_id}").body["qos"] == TARGET | {
        "max_slowdown": None,
        "is_baseline": False,
    }
    assert "qos" not in lab.api.call("GET", f"/v2/tasks/{lab.task(qos={}).task_id}").body
