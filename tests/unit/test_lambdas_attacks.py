"""Requests of an attacker. Here on fakes; test_api_attacks runs the same on real stores."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from farcall_common.wire.ids import new_task_id
from farcall_lambdas.identity import Identity
from tests.support.memory_api import ALICE, BOB, Answer, MemoryApi

PAYLOAD = "4\n00\nx"
SHA256 = hashlib.sha256(b"data").hexdigest()
SQL = [
    "'; DROP TABLE task; --",
    "' OR '1'='1",
    "%' OR 1=1 --",
    "\\'; SELECT 1; --",
    "%(owner_id)s",
    "$1",
    "{0}",
    "%s %",
]
LINES = "a\r\nSet-Cookie: admin=1\r\n\r\n<script>"


class Victim:
    """What Alice has at an API."""

    def __init__(self, api: MemoryApi) -> None:
        self.api = api
        function = {"function_name": "secret", "function_code": PAYLOAD}
        self.function_id = self.ok("POST", "/v3/functions", function)["function_uuid"]
        self.endpoint_id = self.ok("POST", "/v3/endpoints", {"endpoint_name": "laptop"})["endpoint_id"]

    def call(self, method: str, path: str, body: Any = None, *, caller: Identity = ALICE, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.api.call(method, path, body, caller=caller, headers=named)
        # Whatever was sent, an answer has these headers and no others, each of one line.
        assert answer.headers.keys() <= {"Content-Type", "Retry-After"}
        assert all(value.isprintable() for value in answer.headers.values())
        return answer

    def ok(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        answer = self.call(method, path, body, **options)
        assert answer.status == 200, answer.body
        return answer.body

    def refused(self, status: int, code: str, method: str, path: str, body: Any = None, **options: Any) -> None:
        answer = self.call(method, path, body, **options)
        assert (answer.status, answer.body["code"]) == (status, code), answer.body
        assert answer.body["message"]

    @property
    def submit_path(self) -> str:
        return f"/v3/endpoints/{self.endpoint_id}/submit"

    def submit_body(self, payload: Any = PAYLOAD, **fields: Any) -> dict[str, Any]:
        return {"tasks": {self.function_id: [payload]}, **fields}

    def depth(self) -> int:
        return self.api.stores.queue.depth([self.endpoint_id])


class AttackSuite:
    """Needs the fixture ``api``."""

    @pytest.fixture
    def victim(self, api: MemoryApi) -> Victim:
        return Victim(api)

    # replays

    def test_replayed_submit_runs_no_task_again(self, victim: Victim) -> None:
        body = json.dumps(victim.submit_body(task_ids={victim.function_id: [new_task_id()]}))

        answers = [victim.ok("POST", victim.submit_path, body) for _ in range(5)]

        assert len({json.dumps(answer["tasks"]) for answer in answers}) == 1
        assert len({answer["task_group_id"] for answer in answers}) == 1
        assert victim.depth() == 1

    def test_submit_captured_from_another_user_is_refused(self, victim: Victim) -> None:
        body = victim.submit_body(task_ids={victim.function_id: [new_task_id()]})
        victim.ok("POST", victim.submit_path, body)

        victim.refused(403, "FORBIDDEN", "POST", victim.submit_path, body, caller=BOB)

        assert victim.depth() == 1

    def test_a_task_id_cannot_be_taken_over(self, victim: Victim) -> None:
        task_id = new_task_id()
        victim.ok("POST", victim.submit_path, victim.submit_body(task_ids={victim.function_id: [task_id]}))
        bobs = Victim(victim.api)
        bobs.function_id = bobs.ok(
            "POST", "/v3/functions", {"function_name": "f", "function_code": PAYLOAD}, caller=BOB
        )["function_uuid"]
        bobs.endpoint_id = bobs.ok("POST", "/v3/endpoints", {"endpoint_name": "b"}, caller=BOB)["endpoint_id"]

        body = bobs.submit_body(task_ids={bobs.function_id: [task_id]})
        victim.refused(409, "TASK_ID_REUSED", "POST", bobs.submit_path, body, caller=BOB)

        victim.refused(404, "TASK_UNKNOWN", "GET", f"/v2/tasks/{task_id}", caller=BOB)
        assert bobs.depth() == 0

    # blobs

    @pytest.mark.parametrize(
        "blob_key",
        [
            "{bob}/{sha}",
            "{alice}/../{bob}/{sha}",
            "{alice}//{sha}",
            "{alice}/./{sha}",
            "{alice}/{sha}/../{sha}",
            "{alice}/%2e%2e/{bob}/{sha}",
            "{alice}\\..\\{bob}\\{sha}",
            "{alice}/{sha}?versionId=1",
            "{alice}/{sha}#",
            "{alice}/{sha}\n",
            "{alice}/{SHA}",
            "../{alice}/{sha}",
            "/{alice}/{sha}",
            "s3://bucket/{alice}/{sha}",
            "{alice} /{sha}",
            "{ALICE}/{sha}",
            "{alice}\N{FRACTION SLASH}{sha}",
            "{alice}",
            "/",
            "",
        ],
    )
    def test_blob_key_cannot_name_another_path(self, victim: Victim, blob_key: str) -> None:
        for owner in (ALICE, BOB):
            victim.api.stores.blobs.write(f"{owner.identity_id}/{SHA256}", b"data")
        names = {"alice": ALICE.identity_id, "bob": BOB.identity_id, "sha": SHA256, "SHA": SHA256.upper()}
        key = blob_key.format(ALICE=ALICE.identity_id.upper(), **names)

        answer = victim.call(
            "POST",
            victim.submit_path,
            victim.submit_body({"blob_key": key, "size_bytes": 4, "sha256": SHA256}),
        )

        assert (answer.status, answer.body["code"]) in {(403, "FORBIDDEN"), (400, "INVALID_REQUEST")}, answer.body
        assert victim.depth() == 0

    @pytest.mark.parametrize(
        ("reference", "status"),
        [
            ({"size_bytes": 5}, 400),
            ({"size_bytes": -1}, 422),
            ({"size_bytes": 2**60}, 422),
            ({"size_bytes": 2**52}, 413),
            ({"size_bytes": "4"}, 200),
            ({"sha256": "0" * 64}, 400),
            ({"sha256": "../" * 20}, 422),
            ({"sha256": SHA256.upper()}, 422),
            ({"blob_key": f"{ALICE.identity_id}/{SHA256}\0"}, 422),
            ({"blob_key": "x" * 513}, 422),
            ({"blob_key": None}, 422),
        ],
    )
    def test_blob_reference_must_match_its_blob(
        self, victim: Victim, reference: Mapping[str, Any], status: int
    ) -> None:
        key = f"{ALICE.identity_id}/{SHA256}"
        victim.api.stores.blobs.write(key, b"data")
        whole = {"blob_key": key, "size_bytes": 4, "sha256": SHA256, **reference}

        assert victim.call("POST", victim.submit_path, victim.submit_body(whole)).status == status

    def test_upload_is_granted_for_the_callers_key_only(self, victim: Victim) -> None:
        wanted = {"size_bytes": 4, "sha256": SHA256, "blob_key": f"{BOB.identity_id}/{SHA256}", "owner_id": "x"}

        granted = victim.ok("POST", "/v3/blobs", wanted)

        assert granted["blob_key"] == f"{ALICE.identity_id}/{SHA256}"

    # SQL

    @pytest.mark.parametrize("text", SQL)
    def test_sql_in_a_name_is_plain_text(self, victim: Victim, text: str) -> None:
        function = {"function_name": text, "function_code": text, "description": text, "meta": {text: text}}
        function_id = victim.ok("POST", "/v3/functions", function)["function_uuid"]
        endpoint = {"endpoint_name": text, "metadata": {"hostname": text}, "display_name": text}
        endpoint_id = victim.ok("POST", "/v3/endpoints", endpoint)["endpoint_id"]

        shown = victim.ok("GET", f"/v2/functions/{function_id}")
        assert (shown["function_name"], shown["description"], shown["metadata"]) == (text, text, {text: text})
        assert victim.ok("GET", f"/v2/endpoints/{endpoint_id}")["hostname"] == text
        victim.ok("POST", f"/v3/endpoints/{endpoint_id}/submit", {"tasks": {function_id: [text]}})
        victim.ok("POST", victim.submit_path, victim.submit_body(result_serializers=[text]))

    @pytest.mark.parametrize("text", [*SQL, "%", "_", "\\"])
    def test_search_finds_only_own_functions(self, victim: Victim, text: str) -> None:
        query = "".join(f"%{byte:02x}" for byte in text.encode())

        assert victim.ok("GET", f"/v3/functions?search={query}", caller=BOB)["functions"] == []

    @pytest.mark.parametrize("text", SQL)
    def test_sql_as_id_or_state_is_refused(self, victim: Victim, text: str) -> None:
        query = "".join(f"%{byte:02x}" for byte in text.encode())

        victim.refused(422, "INVALID_REQUEST", "GET", f"/v3/tasks?state={query}")
        victim.refused(422, "INVALID_REQUEST", "GET", f"/v3/tasks?limit={query}")
        victim.refused(422, "INVALID_REQUEST", "POST", "/v2/batch_status", {"task_ids": [text]})
        victim.refused(422, "INVALID_REQUEST", "POST", victim.submit_path, victim.submit_body(task_group_id=text))
        victim.refused(422, "INVALID_REQUEST", "POST", victim.submit_path, {"tasks": {text: [PAYLOAD]}})

    @pytest.mark.parametrize("path", ["/v2/tasks/{}", "/v2/functions/{}", "/v2/endpoints/{}", "/v2/taskgroup/{}"])
    @pytest.mark.parametrize(
        "text", [*SQL, "..", "../../v3/tasks", "%2e%2e", "%00", "null", "0", "*", "a" * 5000, "\u0660" * 31, "🙂"]
    )
    def test_path_segment_must_be_an_id(self, victim: Victim, path: str, text: str) -> None:
        answer = victim.call("GET", path.format(text.replace("?", "")))

        assert (answer.status, answer.body["code"]) in {(422, "INVALID_REQUEST"), (404, "NOT_FOUND")}

    # headers

    @pytest.mark.parametrize("name", ["X_Farcall_Accept", "X_Globus_Client_Info", "User_Agent", "X_Request_Id"])
    def test_request_headers_are_not_echoed(self, victim: Victim, name: str) -> None:
        task_id = victim.ok("POST", victim.submit_path, victim.submit_body())["tasks"][victim.function_id][0]

        body = victim.ok("GET", f"/v2/tasks/{task_id}", **{name: LINES})

        assert "Set-Cookie" not in json.dumps(body)

    def test_line_ends_in_names_stay_in_the_body(self, victim: Victim) -> None:
        function_id = victim.ok("POST", "/v3/functions", {"function_name": LINES, "function_code": "x"})[
            "function_uuid"
        ]
        victim.ok("GET", f"/v2/functions/{function_id}")
        victim.refused(403, "FORBIDDEN", "GET", f"/v2/functions/{function_id}", caller=BOB)

    @pytest.mark.parametrize(
        "name", ["X_Identity_Id", "X_Amzn_RequestContext", "Identity_Id", "X_Forwarded_User", "Authorization"]
    )
    def test_header_cannot_change_the_caller(self, victim: Victim, name: str) -> None:
        path = f"/v2/functions/{victim.function_id}"

        victim.refused(403, "FORBIDDEN", "GET", path, caller=BOB, **{name: ALICE.identity_id})

    def test_body_cannot_change_the_caller(self, victim: Victim) -> None:
        claims = {"owner_id": ALICE.identity_id, "identity_id": ALICE.identity_id, "function_uuid": victim.function_id}
        body = {"function_name": "f", "function_code": "x", **claims}

        mine = victim.ok("POST", "/v3/functions", body, caller=BOB)["function_uuid"]

        assert mine != victim.function_id
        victim.ok("DELETE", f"/v2/functions/{mine}", caller=BOB)
        victim.refused(403, "FORBIDDEN", "DELETE", f"/v2/functions/{victim.function_id}", caller=BOB)

    # bodies

    @pytest.mark.parametrize(
        "content_type",
        [
            "text/plain",
            "application/xml",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "nonsense",
            "text/html, application/json",
        ],
    )
    def test_another_content_type_is_refused(self, victim: Victim, content_type: str) -> None:
        answer = victim.call("POST", victim.submit_path, victim.submit_body(), Content_Type=content_type)

        # What Powertools reads as a form has no body in it.
        assert (answer.status, answer.body["code"]) in {(415, "INVALID_REQUEST"), (422, "INVALID_REQUEST")}
        assert victim.depth() == 0

    @pytest.mark.parametrize(
        "content_type", ["application/json; charset=utf-8", "application/json;x", "application/json"]
    )
    def test_json_content_types_are_accepted(self, victim: Victim, content_type: str) -> None:
        victim.ok("POST", victim.submit_path, victim.submit_body(), Content_Type=content_type)

    @pytest.mark.parametrize("depth", [65, 400, 900, 100_000])
    @pytest.mark.parametrize("brackets", ['{"a":|}', "[|]"])
    def test_deep_nesting_is_refused_and_never_stored(self, victim: Victim, brackets: str, depth: int) -> None:
        opening, _, closing = brackets.partition("|")
        deep = f"{opening * depth}1{closing * depth}"
        fields = f'"function_name": "f", "function_code": "x", "meta": {{"a": {deep}}}'

        answer = victim.call("POST", "/v3/functions", f"{{{fields}}}")

        assert (answer.status, answer.body["code"]) in {(422, "INVALID_REQUEST"), (400, "INVALID_REQUEST")}
        assert victim.call("GET", "/v3/functions").status == 200

    def test_deepest_allowed_nesting_round_trips(self, victim: Victim) -> None:
        deep: dict[str, Any] = {}
        for _ in range(63):
            deep = {"a": deep}
        body = {"function_name": "f", "function_code": "x", "meta": deep}

        function_id = victim.ok("POST", "/v3/functions", body)["function_uuid"]

        assert victim.ok("GET", f"/v2/functions/{function_id}")["metadata"] == deep

    @pytest.mark.parametrize(
        "number", ["1" + "0" * 30, "-1" + "0" * 30, "9" * 4000, "9" * 5000, "1e309", "-1e309", "NaN", "Infinity"]
    )
    def test_number_out_of_store_range_is_refused(self, victim: Victim, number: str) -> None:
        fields = f'"function_name": "f", "function_code": "x", "meta": {{"n": {number}}}'

        assert victim.call("POST", "/v3/functions", f"{{{fields}}}").status in (400, 422)
        body = json.dumps(victim.submit_body())[:-1] + f', "max_attempts": {number}}}'
        assert victim.call("POST", victim.submit_path, body).status in (400, 422)

    def test_largest_storable_numbers_round_trip(self, victim: Victim) -> None:
        said = {"n": [2**64 - 1, -(2**63), 1.7976931348623157e308, 5e-324, True, None]}
        body = {"function_name": "f", "function_code": "x", "meta": said}

        function_id = victim.ok("POST", "/v3/functions", body)["function_uuid"]

        assert victim.ok("GET", f"/v2/functions/{function_id}")["metadata"] == said

    @pytest.mark.parametrize(
        "body",
        [
            b"\xff\xfe{\x00}\x00",
            '{"tasks": {}}'.encode("utf-16"),
            '\ufeff{"tasks": {}}'.encode(),
            b"\x1f\x8b\x08\x00",
            b"\x00" * 100,
            b"{'tasks': 1}",
            b'{"tasks": {"a": ["b"]}, "tasks": }',
        ],
    )
    def test_invalid_json_is_refused(self, victim: Victim, body: bytes) -> None:
        victim.refused(400, "INVALID_REQUEST", "POST", victim.submit_path, body)

    @pytest.mark.parametrize(
        "text",
        [
            "🙂 ünïcödé 漢字",
            "\u202egnp.exe",
            "e\u0301 is not \u00e9",
            "\u200b\ufeff",
            "\U0010ffff",
            "\x01\x1f\x7f\x85\u2028",
            "a" * 1000,
        ],
    )
    def test_text_round_trips(self, victim: Victim, text: str) -> None:
        body = {"function_name": text, "function_code": text, "description": text, "meta": {text: [text]}}

        function_id = victim.ok("POST", "/v3/functions", body)["function_uuid"]

        shown = victim.ok("GET", f"/v2/functions/{function_id}")
        assert (shown["function_name"], shown["function_code"], shown["metadata"]) == (text, text, {text: [text]})

    @pytest.mark.parametrize("field", ["function_name", "function_code", "description", "meta"])
    @pytest.mark.parametrize("text", ["\\u0000", "\\ud800", "a\\udfff"])
    def test_unstorable_text_is_refused(self, victim: Victim, field: str, text: str) -> None:
        value = f'{{"{text}": 1}}' if field == "meta" else f'"{text}"'
        sent = {"function_name": '"f"', "function_code": '"x"', field: value}
        body = ", ".join(f'"{name}": {json_text}' for name, json_text in sent.items())

        answer = victim.call("POST", "/v3/functions", f"{{{body}}}")

        # A function's code is bytes to everybody, so it may have a NUL.
        allowed = (field, text) == ("function_code", "\\u0000")
        assert answer.status == (200 if allowed else 422)

    def test_duplicate_json_keys_count_once(self, victim: Victim) -> None:
        names = ", ".join(f'"{victim.function_id}": ["{PAYLOAD}"]'.replace("\n", "\\n") for _ in range(1000))

        answer = victim.ok("POST", victim.submit_path, f'{{"tasks": {{{names}}}}}')

        assert [len(ids) for ids in answer["tasks"].values()] == [1]

    # ids

    @pytest.mark.parametrize(
        "spelling", [str.upper, lambda id_: id_.replace("-", ""), "{{{}}}".format, "urn:uuid:{}".format]
    )
    def test_other_spelling_of_an_id_passes_no_check(self, victim: Victim, spelling: Any) -> None:
        function_id = spelling(victim.function_id)

        assert victim.ok("GET", f"/v2/functions/{function_id}")["function_uuid"] == victim.function_id
        victim.refused(403, "FORBIDDEN", "GET", f"/v2/functions/{function_id}", caller=BOB)

    def test_allow_list_compares_normalized_ids(self, victim: Victim) -> None:
        other = victim.ok("POST", "/v3/functions", {"function_name": "f", "function_code": "x"})["function_uuid"]
        victim.ok("PUT", f"/v3/endpoints/{victim.endpoint_id}", {"allowed_functions": [other.upper()]})

        victim.refused(403, "FUNCTION_NOT_PERMITTED", "POST", victim.submit_path, victim.submit_body())
        victim.ok("POST", victim.submit_path, {"tasks": {other: [PAYLOAD]}})

    def test_tasks_and_groups_of_others_are_hidden(self, victim: Victim) -> None:
        submitted = victim.ok("POST", victim.submit_path, victim.submit_body())
        [task_id] = submitted["tasks"][victim.function_id]

        for path in (f"/v2/tasks/{task_id}", f"/v3/tasks/{task_id}/events", f"/v3/tasks/{task_id}/why"):
            victim.refused(404, "TASK_UNKNOWN", "GET", path, caller=BOB)
        victim.refused(404, "TASK_GROUP_UNKNOWN", "GET", f"/v2/taskgroup/{submitted['task_group_id']}", caller=BOB)
        victim.refused(404, "TASK_UNKNOWN", "POST", f"/v3/tasks/{task_id}/cancel", caller=BOB)
        victim.refused(404, "TASK_UNKNOWN", "POST", f"/v3/tasks/{uuid.UUID(int=1)}/cancel", caller=BOB)
        several = victim.ok("POST", "/v3/tasks/cancel", {"task_ids": [task_id, str(uuid.UUID(int=1))]}, caller=BOB)
        assert {each["outcome"] for each in several["results"].values()} == {"unknown"}
        assert victim.depth() == 1


class TestAttacksOnFakes(AttackSuite):
    @pytest.fixture
    def api(self) -> MemoryApi:
        return MemoryApi()
