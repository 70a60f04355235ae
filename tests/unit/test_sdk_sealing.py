"""Sealed calls of a client: modes, the endpoints that it knows, its secret, and what it reads."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

import farcall
from farcall._details import unsigned_of
from farcall._endpoints import EndpointCache
from farcall._sealing import Sealer, SealMode, default_mode
from farcall_common.errors import (
    ConfigurationError,
    EndpointIncompatible,
    EndpointKeyChanged,
    ErrorRecord,
    Forbidden,
    InvalidRequest,
    PayloadTooLarge,
    ResultRefused,
    SealInvalid,
    Unavailable,
)
from farcall_common.limits import MAX_PAYLOAD_BYTES
from farcall_common.sealing import Answer, SealingSecrets, answer_key, decode_secret, open_call, seal_answer
from farcall_common.wire import StreamResult, TaskState, new_task_id

ENDPOINT = "018f0000-0000-7000-8000-00000000000e"
FUNCTION = "018f0000-0000-7000-8000-00000000000f"
SECRETS = SealingSecrets.new(now=0)


class Api:
    """An API that shows one endpoint."""

    def __init__(self) -> None:
        self.sealing: Mapping[str, Any] | None = SECRETS.public(endpoint_id=ENDPOINT).to_json()
        self.is_up = True
        self.requests = 0

    def get_endpoint(self, endpoint_id: str, *, retry_timeout_s: float | None = None) -> dict[str, Any]:
        self.requests += 1
        if not self.is_up:
            raise Unavailable("down")
        return {"owned": True, **({"sealing": self.sealing} if self.sealing else {})}


class Lab:
    def __init__(self, home: Path) -> None:
        self.api, self.home, self.now = Api(), home, 0.0
        self.environ: dict[str, str] = {}

    def sealer(self, mode: SealMode = "offered", *names: str) -> Sealer:
        """:param names: by which the user has named the endpoint."""
        endpoints = EndpointCache(self.api, clock=lambda: self.now)  # type: ignore[arg-type]
        return Sealer(endpoints, mode=lambda: mode, meanings=lambda _: names, home=self.home, environ=self.environ)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "home")


def seal(
    sealer: Sealer,
    *,
    payload: bytes = b"call",
    mode: SealMode | None = None,
    function: str = FUNCTION,
    task_id: str = "t",
) -> bytes:
    return sealer.seal(payload, mode=mode, endpoint_id=ENDPOINT, function=function, task_id=task_id)


def result(**fields: Any) -> StreamResult:
    return StreamResult(**{"task_id": "t", "task_group_id": "", "state": TaskState.SUCCESS, **fields})


def test_a_call_is_sealed_to_the_endpoint_with_a_key_of_the_user(lab: Lab) -> None:

    buffer = seal(lab.sealer(), function=f"{FUNCTION}@3")
    where: dict[str, Any] = {"endpoint_id": ENDPOINT, "function_id": FUNCTION, "function_hash": "", "task_id": "t"}
    call, key = open_call(buffer, SECRETS, now=time.time(), **where)
    secret = lab.home / "sealing.secret"
    assert bytes(call) == b"call"
    assert key == answer_key(decode_secret(secret.read_text()), task_id="t")
    assert secret.stat().st_mode & 0o777 == 0o600
    known = f"{ENDPOINT} {SECRETS.fingerprint}\n{ENDPOINT}:newest-key 0\n"
    assert (lab.home / "known_endpoints").read_text() == known


def test_a_call_with_files_of_other_endpoints_is_not_sealed(lab: Lab) -> None:
    where: dict[str, Any] = {"endpoint_id": ENDPOINT, "function": FUNCTION, "task_id": "t", "sources": ["018f"]}
    with pytest.raises(InvalidRequest, match="they pass through the deployment"):
        lab.sealer().seal(b"call", mode=None, **where)
    assert lab.sealer("off").seal(b"call", mode=None, **where) == b"call"


def test_a_call_is_sealed_with_the_functions_that_it_calls(lab: Lab) -> None:
    hashed = "ab" * 32
    buffer = lab.sealer().seal(
        b"call", mode=None, endpoint_id=ENDPOINT, function=FUNCTION, task_id="t", callees=[f"{FUNCTION}@3", hashed]
    )
    where: dict[str, Any] = {"endpoint_id": ENDPOINT, "function_id": FUNCTION, "function_hash": "", "task_id": "t"}
    call, _ = open_call(buffer, SECRETS, now=time.time(), callees=[(FUNCTION, ""), ("other", hashed)], **where)
    assert bytes(call) == b"call"
    with pytest.raises(SealInvalid):
        open_call(buffer, SECRETS, now=time.time(), **where)


def test_modes(lab: Lab) -> None:
    assert seal(lab.sealer("off")) == b"call"
    assert seal(lab.sealer("off"), mode="offered") != b"call"
    assert seal(lab.sealer("required"), mode="off") == b"call"
    other = Lab(lab.home / "other")
    other.api.sealing = None
    assert seal(other.sealer()) == b"call"
    with pytest.raises(EndpointIncompatible, match="opens no sealed calls"):
        seal(other.sealer("required"))
    assert not other.home.exists()


def test_a_failed_request_for_the_key_does_not_send_the_call_open(lab: Lab) -> None:
    lab.api.is_up = False
    sealer = lab.sealer()
    with pytest.raises(Unavailable):
        seal(sealer)
    lab.api.is_up = True
    assert seal(sealer) != b"call"
    lab.api.is_up, lab.now = False, 10_000.0
    assert seal(sealer) != b"call"


def test_another_identity_and_none_are_refused_until_they_are_accepted(lab: Lab) -> None:
    sealer = lab.sealer()
    seal(sealer)
    other = SealingSecrets.new(now=0)
    for sealing in (other.public(endpoint_id=ENDPOINT).to_json(), None):
        lab.api.sealing = sealing
        for later in (lab.sealer(), lab.sealer("required")):
            with pytest.raises(EndpointKeyChanged, match=f"endpoint {ENDPOINT}"):
                seal(later)
        lab.now += 10_000
        with pytest.raises(EndpointKeyChanged):
            seal(sealer)
    sealer.known.forget(ENDPOINT)
    assert seal(lab.sealer()) == b"call"
    lab.api.sealing = other.public(endpoint_id=ENDPOINT).to_json()
    sealer.known.put(ENDPOINT, other.fingerprint, created_at=0)
    assert seal(lab.sealer()) != b"call"
    reported = lab.sealer().reported(ENDPOINT)
    assert reported is not None
    assert reported.fingerprint == other.fingerprint


def test_a_new_key_of_the_same_identity_is_taken(lab: Lab) -> None:
    seal(lab.sealer())
    lab.api.sealing = SECRETS.rotated(now=1).public(endpoint_id=ENDPOINT).to_json()
    assert seal(lab.sealer()) != b"call"


def test_a_key_that_the_identity_did_not_sign_is_refused(lab: Lab) -> None:
    signed_elsewhere = SECRETS.public(endpoint_id="elsewhere").to_json()
    assert lab.api.sealing is not None
    other_key = {**lab.api.sealing, "key": SealingSecrets.new(now=0).public(endpoint_id=ENDPOINT).key}
    for sealing in (signed_elsewhere, other_key, {"identity": "?"}):
        lab.api.sealing = sealing
        with pytest.raises(SealInvalid, match="not signed"):
            seal(lab.sealer())
    assert not (lab.home / "known_endpoints").exists()


def test_a_call_that_becomes_too_large_is_refused(lab: Lab) -> None:
    with pytest.raises(PayloadTooLarge, match="when sealed"):
        seal(lab.sealer(), payload=bytes(MAX_PAYLOAD_BYTES))


def answers(lab: Lab) -> bytes:
    """The key of the answers of the user's task."""
    seal(lab.sealer())
    return answer_key(decode_secret((lab.home / "sealing.secret").read_text()), task_id="t")


def text(data: bytes, key: bytes, part: Answer) -> str:
    return bytes(seal_answer(data, key, part=part, task_id="t", max_text_bytes=10_000)).decode()


@pytest.mark.parametrize("max_text_bytes", [0, 10_000])
def test_sealed_values_are_opened(lab: Lab, max_text_bytes: int) -> None:
    value = seal_answer(b"11\n1", answers(lab), part=Answer.RESULT, task_id="t", max_text_bytes=max_text_bytes)
    for sealer in (lab.sealer("off"), lab.sealer("required")):
        found = sealer.opened(result(), value, sealed=True)[1]
        assert bytes(found or b"") == b"11\n1"


def test_values_that_are_not_sealed_are_refused_where_they_have_to_be(lab: Lab) -> None:
    answers(lab)
    assert lab.sealer().opened(result(), b"11\n1", sealed=False)[1] == b"11\n1"
    for sealer, sealed in ((lab.sealer(), True), (lab.sealer("required"), False)):
        with pytest.raises(ResultRefused, match="not sealed"):
            sealer.opened(result(), b"11\n1", sealed=sealed)
        with pytest.raises(ResultRefused, match="not sealed"):
            sealer.opened_value(b"11\n1", "t", sealed=sealed)


def test_errors_and_details_are_opened(lab: Lab) -> None:
    key = answers(lab)
    error = {
        "code": "OTHER",
        "message": "sealed",
        "hint": "of the cloud",
        "sealed": text(b'{"code":"WORKER_DIED","message":"m","hint":"h","traceback":"t"}', key, Answer.ERROR),
    }
    details = {"cpu_s": 1, "sealed": text(b'{"stdout_tail":"out"}', key, Answer.DETAILS)}
    found, _ = lab.sealer().opened(result(state=TaskState.FAILED, error=error, details=details), None, sealed=True)
    opened = ErrorRecord.from_json(found.error or {})
    assert opened == ErrorRecord("WORKER_DIED", "m", hint="h", traceback="t")
    assert found.details == {"cpu_s": 1, "stdout_tail": "out"}
    assert unsigned_of(found.details) == {"cpu_s"}
    letter = result(state=TaskState.FAILED, error={**error, "code": "TASK_DEAD_LETTERED"}, details=details)
    dead = lab.sealer().opened(letter, None, sealed=True)[0].error or {}
    assert (dead["code"], dead["hint"]) == ("TASK_DEAD_LETTERED", "h The service's hint: of the cloud")


def test_sealed_output_has_texts_and_places_and_nothing_else(lab: Lab) -> None:
    key = answers(lab)
    stream = '{"from": 0, "next": 1, "text": "a"}'
    sealed = f'{{"attempt": 1, "complete": false, "stdout": {stream}, "stderr": {stream}, "status": "x"}}'
    found = text(sealed.encode(), key, Answer.OUTPUT)
    opened = lab.sealer().opened_output("t", {"status": "running", "attempt": 0, "complete": True, "sealed": found})
    assert (opened["status"], opened["attempt"], opened["stdout"]["text"]) == ("running", 1, "a")
    assert not opened["complete"]
    for forged in (f'{{"attempt": 1, "complete": false, "stdout": 5, "stderr": {stream}}}', "{}", "[]"):
        with pytest.raises(SealInvalid):
            lab.sealer().opened_output("t", {"sealed": text(forged.encode(), key, Answer.OUTPUT)})


def test_error_without_a_seal_is_the_service_s_word_and_brings_no_pickle(lab: Lab) -> None:
    forged = {
        "code": "TASK_FAILED",
        "message": "m.",
        "hint": "run this",
        "attempt": 2,
        "exception_data": "01\nforged",
        "traceback": "t",
        "stdout_tail": "o",
        "reasons": ["r"],
        "exception_type": "OSError",
        "builtin_type": "OSError",
    }
    failed = result(state=TaskState.FAILED, error=forged)
    for sealer, sealed in ((lab.sealer(), True), (lab.sealer("required"), False)):
        assert sealer.opened(failed, None, sealed=sealed)[0].error == {
            "code": "TASK_FAILED",
            "message": "m (the service says so, the endpoint has not signed it)",
            "hint": "The service's hint: run this",
            "attempt": 2,
        }
    assert lab.sealer().opened(failed, None, sealed=False)[0] == failed


def test_details_without_a_seal_are_numbers_and_known_states(lab: Lab) -> None:
    forged = {
        "cpu_s": 1.5,
        "python": "3.12",
        "stdout_tail": "o",
        "memoized_from": "x",
        "task_transitions": {"a": 1, "b": "x"},
        "values": {"0": "MDE="},
        "files": [{"url": "u"}],
        "not a name": 1,
        "deep": {"a": {"b": {"c": 1}}},
        "progress": {"done": 1, "total": 2, "text": "t", "at": 3.0},
        "staging": {"state": "staging-in", "files": 2, "url": "u", "problem": "p"},
        "stages": [
            {
                "number": 0,
                "name": "n",
                "state": "done",
                "node": "n",
                "workers": [1],
                "error": {"code": "X"},
                "run_s": 1.0,
            },
            {"number": 1, "name": "n", "state": "anything"},
            "x",
        ],
    }
    for details in (forged, {**forged, "stages": {"0": 1}}):
        found = lab.sealer().opened(result(state=TaskState.RUNNING, details=details), None, sealed=True)[0].details
        assert {name: found[name] for name in found if name != "stages"} == {
            "cpu_s": 1.5,
            "task_transitions": {"a": 1},
            "progress": {"done": 1, "total": 2, "at": 3.0},
            "staging": {"state": "staging-in", "files": 2, "files_done": 0, "bytes": 0, "since": 0.0},
        }
        assert unsigned_of(found) == set(found)
        if details is forged:
            assert found["stages"] == [{"number": 0, "name": "", "state": "done", "run_s": 1.0}]


def test_output_without_a_seal_is_left_out(lab: Lab) -> None:
    sealer = lab.sealer()
    task_id = sealer.new_task_id(None, endpoint_id=ENDPOINT)
    stream = {"from": 0, "next": 1, "text": "a"}
    answer = {"status": "running", "attempt": 1, "stdout": stream, "stderr": stream, "reason": None}
    for reader, of in ((lab.sealer("off"), task_id), (lab.sealer("required"), "t")):
        left_out = {"stdout": None, "stderr": None, "reason": "NOT_SEALED"}
        assert reader.opened_output(of, answer) == {**answer, **left_out}
        nothing = answer | {"stdout": None, "stderr": None, "complete": True}
        assert reader.opened_output(of, nothing)["reason"] == "NOT_SEALED"
        assert reader.opened_output(of, nothing | {"reason": "NOT_KEPT"})["reason"] == "NOT_KEPT"
    assert lab.sealer().opened_output("t", answer) == answer


# -- ids of sealed tasks -----------------------------------------------------------------------------------------------


def test_ids_say_to_later_processes_whether_a_call_was_sealed(lab: Lab) -> None:
    for mode, is_sealed in (("off", False), ("offered", True), ("required", True)):
        task_id = lab.sealer(mode).new_task_id(None, endpoint_id=ENDPOINT)  # type: ignore[arg-type]
        assert uuid.UUID(task_id).version == 7
        assert lab.sealer("off").was_sealed(task_id) == is_sealed
    for chosen, is_sealed in (("off", False), ("offered", True)):
        task_id = lab.sealer("off").new_task_id(chosen, endpoint_id=None)  # type: ignore[arg-type]
        assert lab.sealer("off").was_sealed(task_id) == is_sealed
    elsewhere = Lab(lab.home / "elsewhere")
    assert not elsewhere.sealer().was_sealed(task_id)
    elsewhere.environ["FARCALL_SEALING_SECRET"] = (lab.home / "sealing.secret").read_text()
    assert elsewhere.sealer().was_sealed(task_id)
    assert not elsewhere.sealer().was_sealed("not an id")


def test_results_of_sealed_tasks_are_refused_without_a_seal_in_any_process(lab: Lab) -> None:
    task_id = lab.sealer().new_task_id(None, endpoint_id=ENDPOINT)
    swapped = result(task_id=task_id)
    forged = result(
        task_id=task_id, state=TaskState.FAILED, error={"code": "X", "message": "m", "exception_data": "01\n"}
    )
    for later in (lab.sealer(), lab.sealer("off"), lab.sealer("required")):
        with pytest.raises(ResultRefused, match="not sealed"):
            later.opened(swapped, b"11\n1", sealed=None)
        assert "exception_data" not in (later.opened(forged, None, sealed=None)[0].error or {})


def test_call_that_was_sent_open_is_read_open_in_any_process(lab: Lab) -> None:
    lab.api.sealing = None
    sealer = lab.sealer()
    task_id = sealer.new_task_id(None, endpoint_id=None)  # of a batch whose endpoint is not known yet
    assert seal(sealer, task_id=task_id) == b"call"
    for later in (sealer, lab.sealer("off")):
        assert later.opened(result(task_id=task_id), b"11\n1", sealed=None)[1] == b"11\n1"
    assert not lab.sealer().was_sealed(sealer.new_task_id(None, endpoint_id=ENDPOINT))  # known by now: no mark
    # The endpoint opens seals now, and the same batch is sent again.
    lab.api.sealing = SECRETS.public(endpoint_id=ENDPOINT).to_json()
    assert seal(lab.sealer(), task_id=task_id) != b"call"
    assert lab.sealer("off").was_sealed(task_id)
    assert (lab.home / "sealed_tasks").read_text() == f"{task_id} open\n{task_id} sealed\n"


def test_sealed_call_whose_id_has_no_mark_is_known_as_sealed(lab: Lab) -> None:
    task_id = new_task_id()
    assert seal(lab.sealer(), task_id=task_id) != b"call"
    assert lab.sealer("off").was_sealed(task_id)


def test_endpoint_without_a_key_is_not_asked_for_it_in_each_call(lab: Lab) -> None:
    lab.api.sealing = None
    sealer = lab.sealer()
    for _ in range(3):
        assert seal(sealer) == b"call"
    assert lab.api.requests == 1
    lab.now += 10_000
    assert seal(sealer) == b"call"
    assert lab.api.requests == 2


# -- keys that were replaced -------------------------------------------------------------------------------------------


def test_sealing_key_that_was_replaced_is_refused(lab: Lab) -> None:
    former, rotated = SECRETS.public(endpoint_id=ENDPOINT), SECRETS.rotated(now=1_700_000_000)
    seal(lab.sealer())
    running = lab.sealer()
    seal(running)
    lab.api.sealing = rotated.public(endpoint_id=ENDPOINT).to_json()
    seal(lab.sealer())
    lab.api.sealing = former.to_json()
    for sealer in (lab.sealer(), lab.sealer("required"), running):  # also where it is cached
        with pytest.raises(
            EndpointKeyChanged, match="shows a sealing key of 1970-01-01 00:00:00 UTC, which it has repl"
        ):
            seal(sealer)
    sealer.known.put(ENDPOINT, former.fingerprint, created_at=former.created_at)  # --accept
    assert seal(lab.sealer()) != b"call"


def test_file_of_known_endpoints_is_read_and_kept_by_earlier_releases(lab: Lab) -> None:
    lab.home.mkdir()
    file = lab.home / "known_endpoints"
    file.write_text(f"{ENDPOINT} {SECRETS.fingerprint}\n")
    lab.api.sealing = SECRETS.rotated(now=5).public(endpoint_id=ENDPOINT).to_json()
    seal(lab.sealer())
    assert all(len(line.split()) == 2 for line in file.read_text().splitlines())
    assert lab.sealer().known.newest(ENDPOINT) == 5
    lab.sealer().known.forget(ENDPOINT)
    assert file.read_text() == ""


def test_answers_of_other_parts_and_users_are_not_opened(lab: Lab) -> None:
    key = answers(lab)
    swapped = result(details={"sealed": text(b"{}", key, Answer.ERROR)})
    with pytest.raises(SealInvalid):
        lab.sealer().opened(swapped, None, sealed=True)
    value = text(b"11\n1", key, Answer.RESULT).encode()
    other = Lab(lab.home / "other")
    with pytest.raises(SealInvalid, match="no secret"):
        other.sealer().opened(result(), value, sealed=False)
    other.environ["FARCALL_SEALING_SECRET"] = (lab.home / "sealing.secret").read_text()
    assert bytes(other.sealer().opened(result(), value, sealed=False)[1] or b"") == b"11\n1"
    other.environ["FARCALL_SEALING_SECRET"] = "AAAA"
    with pytest.raises(ConfigurationError, match="FARCALL_SEALING_SECRET is not a sealing secret"):
        other.sealer().opened(result(), value, sealed=False)


def test_the_mode_of_a_client_comes_from_argument_environment_and_file(tmp_path: Path) -> None:
    environ = {"FARCALL_HOME": str(tmp_path)}
    assert default_mode(None, environ=environ)() == "off"
    (tmp_path / "config.toml").write_text('[default]\nsealed = "required"\n')
    assert default_mode(None, environ=environ)() == "required"
    assert default_mode(None, environ={**environ, "FARCALL_SEALED": "offered"})() == "offered"
    assert default_mode("off", environ=environ)() == "off"
    with pytest.raises(ConfigurationError, match="sealed is 'on'"):
        default_mode("on", environ=environ)


def test_an_executor_has_a_mode_of_its_own() -> None:
    with farcall.Client("http://127.0.0.1:1", "token") as client:
        executor = farcall.Executor(ENDPOINT, client, sealed="required")
        assert executor.sealed == "required"
        assert executor.options(sealed="off").sealed == "off"
        executor.sealed = None
        assert executor.sealed is None
        with pytest.raises(ConfigurationError):
            executor.sealed = "on"  # type: ignore[assignment]
        executor.shutdown()


def test_batch_that_is_run_again_sends_the_same_sealed_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARCALL_HOME", str(tmp_path))
    bodies: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"sealing": SECRETS.public(endpoint_id=ENDPOINT).to_json()})
        bodies.append(request.content)
        if len(bodies) == 1:
            return httpx.Response(403, json={"code": "FORBIDDEN", "message": "not now"})
        return httpx.Response(200, json={"tasks": json.loads(request.content)["task_ids"]})

    transport = httpx.MockTransport(answer)
    with farcall.Client("http://127.0.0.1", "token", sealed="offered", transport=transport) as client:
        batch = client.create_batch()
        batch.add(FUNCTION, ("secret",))
        with pytest.raises(Forbidden):
            client.batch_run(ENDPOINT, batch)
        client.batch_run(ENDPOINT, batch)
        assert bodies[0] == bodies[1]
        [[payload]] = json.loads(bodies[0])["tasks"].values()
        assert payload.startswith("fs\n")


@pytest.mark.parametrize("name", ["lab", "a lab of \nours: 100 %", "018f", ""])
@pytest.mark.parametrize("mode", ["offered", "required"])
@pytest.mark.parametrize("has_key", [True, False])
def test_a_name_means_the_endpoint_that_the_first_call_was_sealed_to(
    lab: Lab, name: str, mode: SealMode, has_key: bool
) -> None:
    seal(lab.sealer(mode, name))
    kept = (lab.home / "known_endpoints").read_text()
    assert len(kept.splitlines()) == 3
    other = "018f5b8e-0000-7000-8000-0000000000ff"
    secrets = SealingSecrets.new(now=1.0)
    lab.api.sealing = secrets.public(endpoint_id=other).to_json() if has_key else None
    where: dict[str, Any] = {"endpoint_id": other, "function": FUNCTION, "task_id": "t"}
    with pytest.raises(EndpointKeyChanged, match=f"{other} now; .*{ENDPOINT}"):
        lab.sealer(mode, name).seal(b"call", mode=None, **where)
    assert (lab.home / "known_endpoints").read_text() == kept
    sealer = lab.sealer(mode, name)
    if has_key:  # as `farcall endpoints fingerprint NAME --accept`
        sealer.known.put(other, secrets.fingerprint, created_at=1, names=[name])
    else:
        sealer.known.forget(other, names=[name])
    if has_key or (mode == "offered" and name != "018f"):  # digits of an endpoint that is known mean no other
        assert (sealer.seal(b"call", mode=None, **where) == b"call") is not has_key
        assert sealer.known.meaning(name) == (other if has_key else None)


@pytest.mark.parametrize("name", [f"{ENDPOINT} x\nother", f"{ENDPOINT}\t", "", " ", "a\u2028b", "a\x85b"])
def test_an_entry_is_two_words(lab: Lab, name: str) -> None:
    seal(lab.sealer())
    kept = (lab.home / "known_endpoints").read_text()
    known = lab.sealer().known
    for words in ((name, "fingerprint"), ("endpoint", name)):
        with pytest.raises(ConfigurationError, match="expected two words"):
            known.put(*words, created_at=1)
    assert (lab.home / "known_endpoints").read_text() == kept


def test_first_digits_mean_a_sealed_task_only_where_seals_matter(lab: Lab) -> None:
    assert lab.sealer().may_be_completed(new_task_id())  # without a secret, there are no sealed tasks
    seal(lab.sealer())
    marked = lab.sealer().new_task_id("required", endpoint_id=ENDPOINT)
    for mode in ("offered", "required"):
        assert lab.sealer(mode).may_be_completed(marked)
        assert not lab.sealer(mode).may_be_completed(new_task_id())
    assert lab.sealer("off").may_be_completed(new_task_id())


def test_digits_of_a_known_endpoint_mean_no_other(lab: Lab) -> None:
    other = f"{ENDPOINT[:9]}5b8e-7000-8000-0000000000ff"
    for names in ((), ("018f0000",)):
        seal(lab.sealer("offered", *names))
        for digits in ("018f0000", "018f", "018f00"):
            lab.sealer().known.check_name(digits, ENDPOINT)
            with pytest.raises(EndpointKeyChanged, match=ENDPOINT):
                lab.sealer().known.check_name(digits, other)
    lab.sealer().known.check_name("018f00005b8e", other)
