"""What the API bounds: requests of a caller, tasks that wait, things that a caller owns."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest

from farcall_common import errors
from farcall_common.limits import MIB
from farcall_common.store.model import QueueMemory, TokensTaken
from farcall_common.wire.ids import new_task_id
from farcall_lambdas.models import fields
from farcall_lambdas.services.limits import RateLimit
from farcall_lambdas.settings import ApiSettings
from tests.support.memory_api import ALICE, BOB, Answer, Clock, MemoryApi
from tests.support.stores import FakeQueue
from tests.unit.product import error_classes
from tests.unit.test_lambdas_submit import PAYLOAD, Lab
from tests.unit.test_store_queue import make_queued

LIMITS_PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()


def refused(answer: Answer, status: int, code: str) -> Answer:
    assert (answer.status, answer.body["code"]) == (status, code), answer.body
    assert answer.body["hint"]
    return answer


def test_rate_limited_caller_gets_retry_after() -> None:
    api = MemoryApi(settings=ApiSettings(rate_per_s=0.5, rate_burst=3))

    answers = [api.call("GET", "/v3/tasks") for _ in range(4)]

    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    refused(answers[-1], 429, "RATE_LIMITED")
    assert (answers[-1].headers["Retry-After"], answers[-1].body["retry_after_s"]) == ("2", 2.0)
    assert answers[-1].body["retryable"] is True
    api.clock.now += 2
    assert api.call("GET", "/v3/tasks").status == 200


def test_rate_limits_are_per_caller() -> None:
    api = MemoryApi(settings=ApiSettings(rate_per_s=0.5, rate_burst=1))

    assert [api.call("GET", "/v3/tasks", caller=caller).status for caller in (ALICE, BOB, ALICE)] == [200, 200, 429]


def test_processes_share_one_bucket() -> None:
    clock, settings = Clock(), ApiSettings(rate_per_s=100, rate_burst=50)
    queue = FakeQueue(clock)
    processes = [RateLimit(queue, settings, clock=clock) for _ in range(3)]

    def spend_all(process: RateLimit) -> int:
        spent = 0
        try:
            while True:
                process.spend(ALICE)
                spent += 1
        except errors.RateLimited:
            return spent

    assert sum(map(spend_all, processes)) == 50


def test_tokens_are_prefetched_and_expire() -> None:
    asked: list[int] = []

    class CountedQueue(FakeQueue):
        def take_tokens(
            self, bucket: str, tokens: int, *, rate_per_s: float, burst: int, in_debt: bool = False
        ) -> TokensTaken:
            asked.append(tokens)
            return super().take_tokens(bucket, tokens, rate_per_s=rate_per_s, burst=burst, in_debt=in_debt)

    clock = Clock()
    limit = RateLimit(CountedQueue(clock), ApiSettings(rate_per_s=100), clock=clock)
    for _ in range(20):
        limit.spend(ALICE)
    assert asked == [10, 10]

    clock.now += 1
    limit.spend(ALICE)
    clock.now += 1
    limit.spend(ALICE)
    assert asked == [10, 10, 10, 10]


def test_rate_limit_is_off_while_the_queue_is_unavailable() -> None:
    api = MemoryApi(settings=ApiSettings(rate_per_s=0.5, rate_burst=1))
    assert isinstance(api.stores.queue, FakeQueue)
    api.stores.queue.reachable = False

    assert [api.call("GET", "/v3/tasks").status for _ in range(3)] == [200, 200, 200]


def test_full_queue_refuses_tasks() -> None:
    lab = Lab(ApiSettings(max_queue_depth=3))
    assert lab.submit({lab.function_id: [PAYLOAD] * 2}).status == 200

    answer = refused(lab.submit({lab.function_id: [PAYLOAD] * 2}), 429, "QUEUE_FULL")

    assert (answer.headers["Retry-After"], lab.count(), lab.queue.depth([lab.endpoint_id])) == ("5", 2, 2)
    assert lab.submit({lab.function_id: [PAYLOAD]}).status == 200


def test_queue_depth_is_cached_for_a_second() -> None:
    lab = Lab(ApiSettings(max_queue_depth=30))
    assert lab.submit({lab.function_id: [PAYLOAD] * 2}).status == 200
    others = [make_queued(f"t{number}", endpoint_id=lab.endpoint_id) for number in range(28)]
    assert lab.queue.enqueue(others) == 30

    assert lab.submit().status == 200  # the third of thirty, as far as this process knows
    refused(lab.submit(), 429, "QUEUE_FULL")

    lab = Lab(ApiSettings(max_queue_depth=30))
    assert lab.submit().status == 200
    lab.queue.enqueue([make_queued(f"t{number}", endpoint_id=lab.endpoint_id) for number in range(29)])
    lab.api.clock.now += 1
    refused(lab.submit(), 429, "QUEUE_FULL")


def test_a_full_queue_has_room_for_a_share_of_another_submitter() -> None:
    lab = Lab(ApiSettings(max_queue_depth=200))
    others = [make_queued(f"t{number}", endpoint_id=lab.endpoint_id, owner_id="other") for number in range(200)]
    lab.queue.enqueue(others)
    assert [lab.submit().status for _ in range(2)] == [200, 200]  # a hundredth
    refused(lab.submit(), 429, "QUEUE_FULL")

    many = [make_queued(f"u{number}", endpoint_id=lab.endpoint_id, owner_id=f"other {number}") for number in range(199)]
    lab = Lab(ApiSettings(max_queue_depth=100))
    for task in many:
        lab.queue.enqueue([msgspec.structs.replace(task, endpoint_id=lab.endpoint_id)])
    assert lab.submit().status == 200
    refused(lab.submit(), 429, "QUEUE_FULL")  # it is twice as long as one submitter may make it


def test_nothing_is_queued_while_memory_is_nearly_full() -> None:
    lab = Lab()
    lab.queue.has_memory = QueueMemory(used_bytes=80_000_000, max_bytes=100_000_000)

    answer = refused(lab.submit(), 429, "QUEUE_FULL")

    assert (answer.headers["Retry-After"], lab.count()) == ("5", 0)
    assert lab.api.call("GET", "/v3/tasks").status == 200
    lab.queue.has_memory = QueueMemory(used_bytes=10_000_000, max_bytes=100_000_000)
    refused(lab.submit(), 429, "QUEUE_FULL")  # as far as this process knows
    lab.api.clock.now += 1
    assert lab.submit().status == 200


def test_bytes_are_not_added_up_while_the_maximum_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    lab.queue.has_memory = QueueMemory(used_bytes=80_000_000, max_bytes=0)
    monkeypatch.setattr(lab.queue, "bytes_of", lambda _: pytest.fail("it asked"))

    assert lab.submit().status == 200


def test_refusals_are_fields_of_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    lab = Lab(ApiSettings(rate_per_s=1, rate_burst=5, max_endpoints=2))
    lab.endpoint_id = lab.api.endpoint(public=True)
    lab.api.call("POST", "/v3/endpoints", {"endpoint_name": "third"})
    lab.api.call("GET", f"/v3/endpoints/{lab.endpoint_id}/tasks", caller=BOB)
    for _ in range(2):
        lab.api.call("GET", "/v3/whoami")
    lab.api.call("GET", "/v3/unknown", caller=BOB)

    lines = [vars(each) for each in caplog.records if each.getMessage() == "request"]
    found = [(line["status"], line.get("code"), line.get("refused")) for line in lines if line["status"] >= 400]
    assert found == [
        (429, "QUOTA_EXCEEDED", "quota"),
        (403, "FORBIDDEN", "right"),
        (429, "RATE_LIMITED", "rate"),
        (404, "NOT_FOUND", None),
    ]


def test_accepted_tasks_count_before_the_memory_is_read_again() -> None:
    lab = Lab(ApiSettings(max_identity_memory_percent=100))
    lab.queue.has_memory = QueueMemory(used_bytes=0, max_bytes=2_000_000)
    large = {"resource_specification": {"x": "y" * 4000}}
    answers = [lab.submit({lab.function_id: [PAYLOAD] * 100}, **large) for _ in range(5)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429, 429]


def test_large_specifications_of_one_submitter_leave_room_for_others() -> None:
    lab = Lab()
    lab.endpoint_id = lab.api.endpoint(public=True)
    lab.queue.has_memory = QueueMemory(used_bytes=3_000_000, max_bytes=10_000_000)
    large = {"resource_specification": {"x": "y" * 4000}}
    for _ in range(5):
        assert lab.submit({lab.function_id: [PAYLOAD] * 100}, **large).status == 200
        lab.endpoint_id = lab.api.endpoint(public=True)  # the tasks at all endpoints count

    refused(lab.submit({lab.function_id: [PAYLOAD] * 100}, **large), 429, "QUEUE_FULL")
    theirs = lab.api.function(caller=BOB)
    path = f"/v3/endpoints/{lab.endpoint_id}/submit"
    assert lab.api.call("POST", path, {"tasks": {theirs: [PAYLOAD] * 100}, **large}, caller=BOB).status == 200
    refused(lab.submit({lab.function_id: [PAYLOAD] * 700}, **large), 400, "TOO_MANY_TASKS")


def test_submits_are_refused_after_a_long_outage_of_the_queue() -> None:
    lab = Lab(ApiSettings(max_queue_outage_s=30))
    lab.queue.reachable = False
    statuses = []
    for _ in range(5):
        statuses.append(lab.submit().status)
        lab.api.clock.now += 10
    assert statuses == [200, 200, 200, 200, 503]
    refused(lab.submit(), 503, "UNAVAILABLE")
    lab.queue.reachable = True
    assert lab.submit().status == 200
    lab.queue.reachable = False
    lab.api.clock.now += 10
    assert lab.submit().status == 200, "the next outage"


def test_queue_limit_is_per_endpoint() -> None:
    lab = Lab(ApiSettings(max_queue_depth=1))
    lab.submit()
    refused(lab.submit(), 429, "QUEUE_FULL")

    lab.endpoint_id = lab.api.endpoint(endpoint_name="cluster")

    assert lab.submit().status == 200


def test_repeated_submit_needs_no_queue_space() -> None:
    lab = Lab(ApiSettings(max_queue_depth=1))
    task_ids = {lab.function_id: [new_task_id()]}
    first = lab.submit(task_ids=task_ids)

    assert lab.submit(task_ids=task_ids).body["tasks"] == first.body["tasks"] == task_ids


def test_batch_larger_than_an_empty_queue_is_not_retriable() -> None:
    lab = Lab(ApiSettings(max_queue_depth=2))

    answer = refused(lab.submit({lab.function_id: [PAYLOAD] * 3}), 400, "TOO_MANY_TASKS")

    assert answer.body["retryable"] is False


def test_full_queue_is_reported_per_task_in_the_older_format() -> None:
    lab = Lab(ApiSettings(max_queue_depth=1))
    lab.submit()

    answer = lab.api.call("POST", "/v2/submit", {"tasks": [[lab.function_id, lab.endpoint_id, PAYLOAD]]})

    assert [result["http_status_code"] for result in answer.body["results"]] == [429]


@pytest.mark.parametrize("route", ["submit", "batch_status", "cancel"])
def test_tasks_per_request_are_bounded(route: str) -> None:
    lab = Lab(ApiSettings(max_tasks_per_request=2))
    paths = {"batch_status": "/v2/batch_status", "cancel": "/v3/tasks/cancel"}

    if route == "submit":
        answer = lab.submit({lab.function_id: [PAYLOAD] * 3})
    else:
        answer = lab.api.call("POST", paths[route], {"task_ids": [new_task_id() for _ in range(3)]})

    refused(answer, 400, "TOO_MANY_TASKS")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v3/functions", {"function_name": "f", "function_code": "4\n01\nf"}),
        ("/v3/endpoints", {"endpoint_name": "laptop"}),
    ],
)
def test_objects_per_caller_are_bounded(path: str, body: object) -> None:
    api = MemoryApi(settings=ApiSettings(max_functions=2, max_endpoints=2))
    made = [api.call("POST", path, body) for _ in range(2)]

    answer = refused(api.call("POST", path, body), 429, "QUOTA_EXCEEDED")

    assert (answer.body["retryable"], "Retry-After" in answer.headers) == (False, False)
    assert api.call("POST", path, body, caller=BOB).status == 200
    [old_id] = [value for name, value in made[0].body.items() if name in ("function_uuid", "endpoint_id")]
    assert api.call("DELETE", f"{path.replace('v3', 'v2')}/{old_id}").status == 200
    assert api.call("POST", path, body).status == 200


def test_every_limit_is_documented() -> None:
    fields = [field.name for field in dataclasses.fields(ApiSettings)]
    kinds = ("max_", "rate_", "key_", "retention_", "purge_", "audit_", "database_")
    limits = {f"FARCALL_{name.upper()}" for name in fields if name.startswith(kinds)}

    # How long what was given stays good is there too, and is no limit of a request, a limit of forwarders, and those
    # that stand for the gateway's.
    others = {"FARCALL_TICKET_TTL_S", "FARCALL_URL_TTL_S", "FARCALL_MAX_RELAY_BYTES"}
    of_gateway = {"FARCALL_THROTTLE_RATE_PER_S", "FARCALL_THROTTLE_BURST"}
    assert limits | others | of_gateway == set(re.findall("FARCALL_(?!FORWARDER_)[A-Z_]+", LIMITS_PAGE))


def test_every_field_bound_is_documented() -> None:
    bounds = {name: value for name, value in vars(fields).items() if name.startswith("MAX_")}
    kib = {value: f"{value // 1024} KiB" for value in bounds.values() if value % 1024 == 0}
    shown = {line.split("|")[2].strip() for line in LIMITS_PAGE.splitlines() if line.startswith("|")}

    assert len(bounds) >= 7
    assert {name for name, value in bounds.items() if kib.get(value, f"{value:,}") not in shown} == set()


def test_every_default_is_documented() -> None:
    rows = re.findall(r"^\|[^|]*\| ([^|]*?) \| `FARCALL_([A-Z_]+)` \|", LIMITS_PAGE, re.M)
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    checked = 0
    for text, name in rows:
        field = name.lower()
        if not hasattr(ApiSettings(), field):
            continue
        number, _, unit = text.replace(",", "").partition(" ")
        assert int(number) * units.get(unit, 1) == getattr(ApiSettings(), field), name
        checked += 1
    assert checked >= 10


def test_every_documented_error_code_exists() -> None:
    codes = error_classes().keys()

    shown = set(re.findall(r"\[`([A-Z_]+)`\]", LIMITS_PAGE))

    assert shown <= codes
    assert {cls.code for cls in (errors.LimitExceeded.__subclasses__())} <= shown


SIZED = ("submit", "older submit", "batch_status", "cancel", "group", "list")


@pytest.mark.parametrize("route", SIZED)
def test_a_request_counts_by_its_size(route: str) -> None:
    lab = Lab(ApiSettings(rate_per_s=1, rate_burst=10))
    submitted = lab.submit({lab.function_id: [PAYLOAD] * 99}).body
    for _ in range(2):
        lab.submit({lab.function_id: [PAYLOAD] * 100}, task_group_id=submitted["task_group_id"])
    lab.api.clock.now += 100
    ids = {"task_ids": [new_task_id() for _ in range(1200)]}
    method, path, body = {
        "submit": ("POST", f"/v3/endpoints/{lab.endpoint_id}/submit", {"tasks": {lab.function_id: [PAYLOAD] * 1200}}),
        "older submit": ("POST", "/v2/submit", {"tasks": [[lab.function_id, lab.endpoint_id, PAYLOAD]] * 1200}),
        "batch_status": ("POST", "/v2/batch_status", ids),
        "cancel": ("POST", "/v3/tasks/cancel", ids),
        "group": ("GET", f"/v2/taskgroup/{submitted['task_group_id']}", None),
        "list": ("GET", "/v3/tasks?limit=1000", None),
    }[route]
    tokens = 12 if body else 3

    assert lab.api.call(method, path, body).status == 200  # it is not refused, whatever it costs

    left = 10 - tokens
    assert [lab.api.call("GET", "/v3/version").status for _ in range(max(0, left))] == [404] * max(0, left)
    answer = refused(lab.api.call(method, path, body), 429, "RATE_LIMITED")
    assert answer.body["retry_after_s"] == 1.0 - min(0, left)
    assert lab.api.call("GET", "/v3/tasks", caller=BOB).status == 200
    lab.api.clock.now += answer.body["retry_after_s"]
    assert lab.api.call(method, path, body).status == 200


def test_arguments_of_one_identity_are_bounded_over_time() -> None:
    lab = Lab(ApiSettings(max_stored_bytes_per_day=24 * MIB))
    upload = {"size_bytes": 8 * MIB, "sha256": "a" * 64}
    assert [lab.api.call("POST", "/v3/blobs", upload).status for _ in range(3)] == [200] * 3

    refused(lab.api.call("POST", "/v3/blobs", upload), 429, "QUOTA_EXCEEDED")
    refused(lab.api.call("POST", "/v3/blobs", {**upload, "size_bytes": 1}), 429, "QUOTA_EXCEEDED")
    assert lab.api.call("POST", "/v3/blobs", upload, caller=BOB).status == 200
    lab.api.clock.now += 3600
    assert lab.api.call("POST", "/v3/blobs", upload).status == 200


def test_arguments_of_one_identity_leave_room_in_the_database() -> None:
    lab = Lab(ApiSettings(database_bytes=16 * MIB))  # a quarter of it
    body = {lab.function_id: ["p" * 60_000] * 20}  # 1.2 MB

    statuses = [lab.submit(body).status for _ in range(6)]

    assert statuses == [200] * 4 + [429] * 2
    assert lab.submit({lab.function_id: [PAYLOAD]}).status == 429, "however little"
    lab.api.clock.now += 6 * 3600
    assert lab.submit(body).status == 200
