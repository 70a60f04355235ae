"""Submitting tasks."""

from __future__ import annotations

import base64
import hashlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from farcall_common.store.model import BlobRef, ForwarderInfo, Task, TaskResult
from farcall_common.task_options import TaskOptions
from farcall_common.wire.ids import new_task_id
from farcall_common.wire.states import Reporter, TaskState
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB, Answer, Clock, MemoryApi
from tests.support.stores import FakeBlobs, FakeDatabase, FakeQueue, fake_stores, single

PAYLOAD = "5\n00\nxx5\n00\nyy"


class LateDatabase(FakeDatabase):
    """Returns no tasks while ``late``, as to a reader that came before the writer."""

    late = False

    def get_tasks(self, task_ids: Sequence[str], **kinds: bool) -> Mapping[str, Task]:
        return {} if self.late else super().get_tasks(task_ids, **kinds)


class Lab:
    """An API with one endpoint and one function."""

    def __init__(self, settings: ApiSettings | None = None, **endpoint: Any) -> None:
        clock = Clock()
        self.queue, self.database = FakeQueue(clock), LateDatabase(clock)
        self.records = fake_stores(clock, database=self.database, queue=self.queue)
        self.api = MemoryApi(settings=settings, stores=self.records, clock=clock)
        self.function_id = self.function()
        self.endpoint_id = self.api.endpoint(**endpoint)

    def function(self, **changes: Any) -> str:
        return self.api.function(**changes)

    def submit(self, tasks: Mapping[str, Any] | None = None, *, caller: Any = ALICE, **fields: Any) -> Answer:
        body = {"tasks": tasks or {self.function_id: [PAYLOAD]}, **fields}
        return self.api.call("POST", f"/v3/endpoints/{self.endpoint_id}/submit", body, caller=caller)

    def count(self) -> int:
        """Tasks of the endpoint in the records."""
        return len(self.records.tasks.list_open_tasks(self.endpoint_id))


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_payloads_are_not_logged(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Powertools writes each request down for its log, at a level that is never shown."""
    with caplog.at_level(logging.DEBUG):
        assert lab.submit({lab.function_id: ["4\n00\nbirthday"]}).status == 200
    assert "Calling API Route Handler" in caplog.text
    assert "birthday" not in caplog.text


def test_byte_code_of_another_python_is_refused_before_anything_is_stored(lab: Lab) -> None:
    function_id = lab.function(function_name="f", meta={"byte_code_of_python": "3.11"})
    tasks = {function_id: [PAYLOAD]}
    assert lab.submit(tasks).status == 200  # nothing is known of the endpoint
    connect = f"/v3/endpoints/{lab.endpoint_id}/connect"
    for version, status in (("3.12.4", 400), ("3.11.9", 200), ("", 200), ("3.1.0", 400)):
        lab.api.call("POST", connect, {"public_key": "k" * 40, "python_version": version, "packages": {"x": "1"}})
        before = lab.count()
        answer = lab.submit(tasks)
        assert answer.status == status
        assert lab.count() == before + (status == 200)
        if status == 400:
            assert answer.body["code"] == "ENDPOINT_INCOMPATIBLE"
            assert f"of Python 3.11, and endpoint laptop runs Python {version[:-2]}." in answer.body["message"]
            assert answer.body["hint"]
        assert lab.submit().status == 200  # functions that say nothing run anywhere


@pytest.mark.parametrize(
    "wrong",
    [
        {"retries": -1},
        {"retries": 101},
        {"retry_delay_s": 300.5},
        {"retry_on": ["OSError"]},
        {"retry_on": ["a.b c"]},
        {"retry_on": ["a." + "b" * 200]},
        {"retry_on": ["a.B"] * 11},
        {"retry_on": "a.B"},
    ],
)
def test_retries_have_limits(lab: Lab, wrong: dict[str, Any]) -> None:
    assert lab.submit(**wrong).status == 422


def test_an_accepted_task_is_recorded_and_queued(lab: Lab) -> None:
    answer = lab.submit(
        idempotent=False, max_attempts=5, walltime_s=2.5, result_serializers=["a.B"], resource_specification={"n": 1}
    )

    [task_id] = answer.body["tasks"][lab.function_id]
    task = lab.records.tasks.get_tasks([task_id])[task_id]
    assert answer.status == 200
    assert (task.payload, task.payload_ref) == (PAYLOAD.encode(), None)
    assert (task.owner_id, task.endpoint_id, task.function_id) == (ALICE.identity_id, lab.endpoint_id, lab.function_id)
    assert task.function_hash == hashlib.sha256(b"4\n01\nf").hexdigest()
    assert task.options == TaskOptions(
        idempotent=False,
        max_attempts=5,
        walltime_s=2.5,
        result_serializers=("a.B",),
        resource_specification={"n": 1},
    )
    assert task.timings == {"submitted_at": lab.api.clock.now}
    assert lab.queue.depth([lab.endpoint_id]) == 1
    assert answer.body.keys() == {"request_id", "task_group_id", "endpoint_id", "tasks"}
    shown = lab.api.call("GET", f"/v2/tasks/{task_id}").body
    assert shown["result_serializers"] == ["a.B"]
    [plain] = lab.submit().body["tasks"][lab.function_id]
    assert "result_serializers" not in lab.api.call("GET", f"/v2/tasks/{plain}").body


@pytest.mark.parametrize(
    "fields",
    [
        {"memory_bytes": 5, "num_nodes": 2, "keep_output": True, "resource_specification": {"n": 1}},
        {"resource_specification": {"memory_bytes": 5, "num_nodes": 2, "keep_output": True, "n": 1}},
        {"memory_bytes": 5, "keep_output": True, "resource_specification": {"memory_bytes": 9, "num_nodes": 2, "n": 1}},
    ],
)
def test_globus_compute_resource_specification_sets_options(lab: Lab, fields: dict[str, Any]) -> None:
    [task_id] = lab.submit(**fields).body["tasks"][lab.function_id]
    task = lab.records.tasks.get_tasks([task_id])[task_id]
    assert task.options == TaskOptions(memory_bytes=5, num_nodes=2, keep_output=True, resource_specification={"n": 1})


SPAN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_the_spans_above_tasks_are_recorded_and_queued(lab: Lab) -> None:
    other = lab.function()
    answer = lab.submit(
        {lab.function_id: [PAYLOAD, "a"], other: ["b"]}, traceparents={lab.function_id: [SPAN, None], other: [None]}
    )

    ids = [*answer.body["tasks"][lab.function_id], *answer.body["tasks"][other]]
    recorded = lab.records.tasks.get_tasks(ids)
    assert [recorded[task_id].traceparent for task_id in ids] == [SPAN, None, None]
    fence = single.claim(lab.queue, lab.endpoint_id, "fwd-1", ttl_s=45)
    single.mark_restored(lab.queue, lab.endpoint_id, fence)
    leased = single.lease(lab.queue, lab.endpoint_id, fence, limit=3, lease_s=45)
    assert {each.task.task_id: each.task.traceparent for each in leased} == dict(
        zip(ids, [SPAN, None, None], strict=True)
    )


@pytest.mark.parametrize("spans", [{}, {"other": [SPAN]}, [SPAN, SPAN], {"": []}])
def test_spans_must_run_parallel_to_the_tasks(lab: Lab, spans: object) -> None:
    before = lab.count()
    given = spans if isinstance(spans, dict) else {lab.function_id: spans}

    answer = lab.submit(traceparents=given)

    assert answer.status in (400, 422)
    assert lab.count() == before


@pytest.mark.parametrize("wrong", ["", "00-xyz", SPAN + "-01", SPAN.upper(), "\0"])
def test_invalid_span_is_refused(lab: Lab, wrong: str) -> None:
    assert lab.submit(traceparents={lab.function_id: [wrong]}).status == 422


def test_generated_ids_are_ordered_uuids(lab: Lab) -> None:
    task_ids = lab.submit({lab.function_id: [PAYLOAD] * 50}).body["tasks"][lab.function_id]

    assert task_ids == sorted(task_ids)
    assert {uuid.UUID(task_id).version for task_id in task_ids} == {7}


def test_the_forwarder_that_owns_the_endpoint_is_woken(lab: Lab) -> None:
    lab.queue.announce(ForwarderInfo("fwd-1", "tcp://h:1", "k" * 40), ttl_s=15)
    single.claim(lab.queue, lab.endpoint_id, "fwd-1", ttl_s=45)
    wake_ups = lab.queue.listen("fwd-1")

    lab.submit()

    assert wake_ups.get(0) == [lab.endpoint_id]


def test_several_functions_go_in_one_request_and_group(lab: Lab) -> None:
    other, group_id = lab.function(), str(uuid.uuid4())

    answer = lab.submit({lab.function_id: [PAYLOAD, "a"], other: ["b"]}, task_group_id=group_id)

    assert {function_id: len(ids) for function_id, ids in answer.body["tasks"].items()} == {
        lab.function_id: 2,
        other: 1,
    }
    assert answer.body["task_group_id"] == group_id
    assert len(lab.records.tasks.get_group(group_id)) == 3


def test_submit_is_accepted_while_the_queue_is_unavailable(lab: Lab) -> None:
    lab.queue.reachable = False

    answer = lab.submit()

    assert answer.status == 200
    assert lab.count() == 1


def test_submit_fails_while_the_database_is_unavailable(lab: Lab) -> None:
    lab.database.reachable = False

    answer = lab.submit()

    assert (answer.status, answer.body["code"], answer.body["retryable"]) == (503, "UNAVAILABLE", True)


class TestRepeats:
    def test_repeated_submit_gives_the_same_answer_and_no_second_task(self, lab: Lab) -> None:
        task_ids = {lab.function_id: [new_task_id(), new_task_id()]}
        tasks = {lab.function_id: [PAYLOAD, "a"]}

        first = lab.submit(tasks, task_ids=task_ids).body
        again = lab.submit(tasks, task_ids=task_ids).body

        assert first["tasks"] == again["tasks"] == task_ids
        assert first["task_group_id"] == again["task_group_id"]
        assert (lab.count(), lab.queue.depth([lab.endpoint_id])) == (2, 2)

    def test_concurrent_equal_submits_get_the_same_answer(self, lab: Lab) -> None:
        task_ids = {lab.function_id: [new_task_id(), new_task_id()]}
        tasks = {lab.function_id: [PAYLOAD, "a"]}
        first = lab.submit(tasks, task_ids=task_ids).body
        lab.database.late = True

        second = lab.submit(tasks, task_ids=task_ids).body
        clash = lab.submit({lab.function_id: [PAYLOAD, "b"]}, task_ids=task_ids)

        assert (second["tasks"], second["task_group_id"]) == (first["tasks"], first["task_group_id"])
        assert (clash.status, clash.body["code"]) == (409, "TASK_ID_REUSED")

    def test_repeated_submit_queues_tasks_left_by_a_crash(self, lab: Lab) -> None:
        task_ids = {lab.function_id: [new_task_id()]}
        lab.queue.reachable = False
        lab.submit(task_ids=task_ids)
        lab.queue.reachable = True

        lab.submit(task_ids=task_ids)

        assert lab.queue.depth([lab.endpoint_id]) == 1

    def test_a_task_that_ended_is_not_queued_again(self, lab: Lab) -> None:
        task_id = new_task_id()
        lab.submit(task_ids={lab.function_id: [task_id]})
        end = TaskResult(task_id, lab.endpoint_id, 1, TaskState.SUCCESS, Reporter.AGENT, result=b"00\nr")
        lab.records.tasks.record_results([end], at=lab.records.tasks.get_tasks([task_id])[task_id].submitted_at)  # type: ignore[arg-type]
        lab.queue.wipe()

        assert lab.submit(task_ids={lab.function_id: [task_id]}).status == 200
        assert lab.queue.depth([lab.endpoint_id]) == 0

    def test_submit_with_large_payloads_is_repeatable(self) -> None:
        lab = Lab(ApiSettings(max_inline_bytes=10))
        task_ids = {lab.function_id: [new_task_id()]}

        answers = [lab.submit({lab.function_id: ["x" * 11]}, task_ids=task_ids) for _ in range(2)]

        assert [answer.status for answer in answers] == [200, 200]

    def test_an_id_with_another_payload_function_or_owner_is_a_conflict_and_stores_nothing(self, lab: Lab) -> None:
        taken, fresh = new_task_id(), new_task_id()
        lab.submit(task_ids={lab.function_id: [taken]})
        other = lab.function(public=True)
        lab.api.call("PUT", f"/v3/endpoints/{lab.endpoint_id}", {"public": True})

        answers = [
            lab.submit({lab.function_id: ["another", PAYLOAD]}, task_ids={lab.function_id: [taken, fresh]}),
            lab.submit({other: [PAYLOAD]}, task_ids={other: [taken]}),
            lab.submit({other: [PAYLOAD]}, task_ids={other: [taken]}, caller=BOB),
        ]

        assert {(answer.status, answer.body["code"]) for answer in answers} == {(409, "TASK_ID_REUSED")}
        assert lab.count() == 1

    @pytest.mark.parametrize("ids", [[[1, 2]], [[1], [1]], [[1, 1]]], ids=["too many", "twice", "twice in one"])
    def test_ids_must_run_parallel_and_be_distinct(self, lab: Lab, ids: list[list[int]]) -> None:
        names = {number: new_task_id() for of_function in ids for number in of_function}
        functions = [lab.function_id, lab.function()]
        given = {functions[i]: [names[number] for number in of_function] for i, of_function in enumerate(ids)}
        payloads = 2 if ids == [[1, 1]] else 1

        answer = lab.submit({function_id: [PAYLOAD] * payloads for function_id in given}, task_ids=given)

        assert (answer.status, answer.body["code"]) == (400, "INVALID_REQUEST")
        assert lab.count() == 0


class TestRights:
    def test_function_of_another_user_is_refused_until_shared(self, lab: Lab) -> None:
        foreign = lab.api.call("POST", "/v3/functions", {"function_name": "g", "function_code": "c"}, caller=BOB)
        function_id = foreign.body["function_uuid"]
        refused = lab.submit({lab.function_id: [PAYLOAD], function_id: [PAYLOAD]})
        assert (refused.status, refused.body["code"], lab.count()) == (403, "FORBIDDEN", 0)

        lab.api.share(f"functions/{function_id}", ALICE, caller=BOB)

        assert lab.submit({function_id: [PAYLOAD]}).status == 200

    def test_endpoint_of_another_user_is_refused_until_shared(self, lab: Lab) -> None:
        lab.api.share(f"functions/{lab.function_id}", BOB)
        refused = lab.submit(caller=BOB)
        assert (refused.status, refused.body["code"]) == (403, "FORBIDDEN")

        lab.api.share(f"endpoints/{lab.endpoint_id}", BOB)

        assert lab.submit(caller=BOB).status == 200

    def test_endpoint_runs_only_allowed_functions(self) -> None:
        allowed = str(uuid.uuid4())
        lab = Lab(allowed_functions=[allowed])

        answer = lab.submit()

        assert (answer.status, answer.body["code"], lab.count()) == (403, "FUNCTION_NOT_PERMITTED", 0)

    def test_unknown_function_or_endpoint_is_not_found(self, lab: Lab) -> None:
        unknown = str(uuid.uuid4())
        assert lab.submit({unknown: [PAYLOAD]}).body["code"] == "FUNCTION_UNKNOWN"

        lab.endpoint_id = unknown

        answer = lab.submit()
        assert (answer.status, answer.body["code"]) == (404, "ENDPOINT_UNKNOWN")


class TestPayloads:
    def test_a_big_inline_payload_goes_to_the_blob_store(self) -> None:
        lab = Lab(ApiSettings(max_inline_bytes=10))

        [task_id] = lab.submit({lab.function_id: ["é" * 6]}).body["tasks"][lab.function_id]

        task = lab.records.tasks.get_tasks([task_id])[task_id]
        assert task.payload is None
        assert task.payload_ref is not None
        assert task.payload_ref.blob_key.startswith(f"{ALICE.identity_id}/")
        assert lab.api.stores.blobs.read(task.payload_ref.blob_key) == ("é" * 6).encode()

    def test_binary_payload_is_sent_in_base64(self, lab: Lab) -> None:
        data = b"b3 1\n\xff\x00"
        encoded = {"base64": base64.b64encode(data).decode()}

        [task_id] = lab.submit({lab.function_id: [encoded]}).body["tasks"][lab.function_id]

        ref = lab.records.tasks.get_tasks([task_id])[task_id].payload_ref
        assert ref is not None
        assert lab.api.stores.blobs.read(ref.blob_key) == data
        for wrong in ({"base64": "not base64"}, {"base64": 7}, {}):
            assert lab.submit({lab.function_id: [wrong]}).status == 422

    def test_uploaded_payload_is_referenced(self, lab: Lab) -> None:
        ref = upload(lab, b"much data")

        answer = lab.submit({lab.function_id: [reference(ref)]})

        [task_id] = answer.body["tasks"][lab.function_id]
        assert lab.records.tasks.get_tasks([task_id])[task_id].payload_ref == ref

    def test_reused_blob_is_renewed(self, lab: Lab) -> None:
        """The task may wait for as long as any other: an old blob would expire before it starts."""
        ref = upload(lab, b"much data")
        assert lab.submit({lab.function_id: [reference(ref)]}).status == 200
        assert isinstance(lab.api.stores.blobs, FakeBlobs)
        assert lab.api.stores.blobs.renewed == [ref.blob_key]

    def test_payload_over_the_limit_is_refused_inline_or_as_blob(self) -> None:
        lab = Lab(ApiSettings(max_payload_bytes=20))
        ref = BlobRef(f"{ALICE.identity_id}/{'0' * 64}", 21, "0" * 64)

        answers = [lab.submit({lab.function_id: [payload]}) for payload in ("x" * 21, reference(ref))]
        answers.append(lab.api.call("POST", "/v3/blobs", {"size_bytes": 21, "sha256": "0" * 64}))

        assert {(answer.status, answer.body["code"]) for answer in answers} == {(413, "PAYLOAD_TOO_LARGE")}
        assert lab.count() == 0

    def test_blob_reference_must_be_own_uploaded_and_correct(self, lab: Lab) -> None:
        ref = upload(lab, b"much data")
        never = BlobRef(f"{ALICE.identity_id}/{'0' * 64}", 9, "0" * 64)
        foreign = BlobRef(f"{BOB.identity_id}/{ref.sha256}", 9, ref.sha256)
        longer = BlobRef(ref.blob_key, 10, ref.sha256)
        renamed = BlobRef(ref.blob_key, 9, "0" * 64)

        codes = [
            lab.submit({lab.function_id: [reference(each)]}).body["code"] for each in (never, foreign, longer, renamed)
        ]

        assert codes == ["BLOB_UNKNOWN", "FORBIDDEN", "INVALID_REQUEST", "INVALID_REQUEST"]
        assert lab.count() == 0

    def test_half_a_surrogate_pair_is_refused(self, lab: Lab) -> None:
        answer = lab.submit({lab.function_id: ["\ud800"]})

        assert (answer.status, answer.body["code"]) == (422, "INVALID_REQUEST")


class TestRequests:
    @pytest.mark.parametrize(
        "fields",
        [
            {"walltime_s": 0},
            {"walltime_s": -1},
            {"max_attempts": 0},
            {"max_attempts": 101},
            {"task_group_id": "mine"},
            {"result_serializers": "a.B"},
            {"resource_specification": [1]},
            {"resource_specification": {"n": "x" * 5000}},
            {"result_serializers": ["x" * 101]},
            {"result_serializers": ["a.B"] * 33},
            {"memory_bytes": 0},
            {"num_nodes": "many"},
            {"resource_specification": {"memory_bytes": "2 GB"}},
            {"resource_specification": {"num_nodes": 0}},
            {"resource_specification": {"keep_output": 1}},
        ],
    )
    def test_invalid_options_are_refused(self, lab: Lab, fields: dict[str, Any]) -> None:
        assert lab.submit(**fields).status == 422
        assert lab.count() == 0

    @pytest.mark.parametrize("tasks", [{"{f}": []}, {"{F}": ["a"]}, {"f": ["a"]}, {"{f}": "a"}, {"{f}": [1]}, []])
    def test_invalid_tasks_are_refused(self, lab: Lab, tasks: Any) -> None:
        named = {key.format(f=lab.function_id, F=lab.function_id.upper()): value for key, value in dict(tasks).items()}
        body = {"tasks": named or tasks}

        answer = lab.api.call("POST", f"/v3/endpoints/{lab.endpoint_id}/submit", body)

        assert (answer.status in (400, 422), answer.body["code"]) == (True, "INVALID_REQUEST")

    def test_empty_submit_is_refused(self, lab: Lab) -> None:
        assert lab.api.call("POST", f"/v3/endpoints/{lab.endpoint_id}/submit", {"tasks": {}}).status == 422

    def test_a_configuration_that_the_endpoint_cannot_take_is_refused(self, lab: Lab) -> None:
        answer = lab.submit(user_endpoint_config={"worker_init": "module load"})

        assert (answer.status, answer.body["code"]) == (400, "UNSUPPORTED")

    def test_too_many_tasks_are_refused(self) -> None:
        lab = Lab(ApiSettings(max_tasks_per_request=3))

        assert lab.submit({lab.function_id: ["a"] * 4}).status == 400
        assert lab.submit({lab.function_id: ["a"] * 3}).status == 200


class TestVersionTwo:
    def test_tasks_are_accepted_in_the_order_of_the_request(self, lab: Lab) -> None:
        other = lab.function()
        tasks = [
            [lab.function_id, lab.endpoint_id, "1"],
            [other, lab.endpoint_id, "2"],
            [lab.function_id, lab.endpoint_id, "3"],
        ]

        answer = lab.api.call("POST", "/v2/submit", {"tasks": tasks, "create_websocket_queue": False})

        ids = [result["task_uuid"] for result in answer.body["results"]]
        stored = lab.records.tasks.get_tasks(ids)
        assert (answer.status, answer.body["response"]) == (200, "success")
        assert [stored[task_id].payload for task_id in ids] == [b"1", b"2", b"3"]
        assert {task.task_group_id for task in stored.values()} == {answer.body["task_group_id"]}

    def test_each_task_says_whether_it_was_accepted(self, lab: Lab) -> None:
        unknown = str(uuid.uuid4())
        tasks = [[unknown, lab.endpoint_id, "1"], [lab.function_id, lab.endpoint_id, "2"]]

        answer = lab.api.call("POST", "/v2/submit", {"tasks": tasks})

        refused, accepted = answer.body["results"]
        assert answer.body["response"] == "batch"
        assert (refused["status"], refused["task_uuid"], refused["http_status_code"]) == ("Failed", None, 404)
        assert unknown in refused["reason"]
        assert (accepted["status"], accepted["http_status_code"]) == ("success", 200)
        assert lab.count() == 1

    def test_an_outage_fails_the_request_as_a_whole(self, lab: Lab) -> None:
        lab.database.reachable = False

        assert lab.api.call("POST", "/v2/submit", {"tasks": [[lab.function_id, lab.endpoint_id, "1"]]}).status == 503


def upload(lab: Lab, data: bytes) -> BlobRef:
    sha256 = hashlib.sha256(data).hexdigest()
    granted = lab.api.call("POST", "/v3/blobs", {"size_bytes": len(data), "sha256": sha256})
    assert granted.status == 200
    assert granted.body["upload_url"]
    return lab.api.stores.blobs.write(granted.body["blob_key"], data)


def reference(ref: BlobRef) -> dict[str, Any]:
    return {"blob_key": ref.blob_key, "size_bytes": ref.size_bytes, "sha256": ref.sha256}


def test_the_submitter_may_use_the_endpoints_whose_files_the_tasks_read(lab: Lab) -> None:
    source = lab.api.endpoint(caller=BOB)
    refused = lab.submit(sources=[source])
    assert (refused.status, refused.body["code"], lab.count()) == (403, "FORBIDDEN", 0)
    assert lab.submit(sources=[str(uuid.uuid4())]).body["code"] == "ENDPOINT_UNKNOWN"
    assert lab.submit(sources=[source] * 21).status == 422
    assert lab.submit(sources=["../x"]).status == 422
    assert lab.submit(source_files=["../x"]).status == 422
    lab.api.share(f"endpoints/{source}", ALICE, caller=BOB)
    assert lab.submit(sources=[source, lab.endpoint_id], source_files=["ab" * 32]).status == 200
    entries = lab.records.audit.list_entries([ALICE.identity_id])
    [entry] = [each for each in entries if each.action == "tasks.submit"]
    assert entry.detail["sources"] == [source, lab.endpoint_id]
    [task] = lab.records.tasks.list_open_tasks(lab.endpoint_id)
    assert task.options.sources == (source, lab.endpoint_id)
    fence = single.claim(lab.queue, lab.endpoint_id, "f", ttl_s=9)
    single.mark_restored(lab.queue, lab.endpoint_id, fence)
    [queued] = single.lease(lab.queue, lab.endpoint_id, fence, limit=1, lease_s=9)
    assert queued.task.options.sources == (source, lab.endpoint_id)
    assert queued.task.options.source_files == ("ab" * 32,)
