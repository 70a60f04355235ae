"""Sealed calls of a client: modes, the endpoints that it knows, its secret, and what it reads."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import farcall
from farcall._endpoints import EndpointCache
from farcall._sealing import Sealer, SealMode, default_mode
from farcall_common.errors import (
    ConfigurationError,
    EndpointIncompatible,
    EndpointKeyChanged,
    InvalidRequest,
    PayloadTooLarge,
    ResultRefused,
    SealInvalid,
    Unavailable,
)
from farcall_common.limits import MAX_PAYLOAD_BYTES
from farcall_common.sealing import Answer, SealingSecrets, answer_key, decode_secret, open_call, seal_answer
from farcall_common.wire import StreamResult, TaskState

ENDPOINT = "018f0000-0000-7000-8000-00000000000e"
FUNCTION = "018f0000-0000-7000-8000-00000000000f"
SECRETS = SealingSecrets.new(now=0)


class Api:
    """An API that shows one endpoint."""

    def __init__(self) -> None:
        self.sealing: Mapping[str, Any] | None = SECRETS.public(endpoint_id=ENDPOINT).to_json()
        self.is_up = True

    def get_endpoint(self, endpoint_id: str, *, retry_timeout_s: float | None = None) -> dict[str, Any]:
        if not self.is_up:
            raise Unavailable("down")
        return {"owned": True, **({"sealing": self.sealing} if self.sealing else {})}


class Lab:
    def __init__(self, home: Path) -> None:
        self.api, self.home, self.now = Api(), home, 0.0
        self.environ: dict[str, str] = {}

    def sealer(self, mode: SealMode = "offered") -> Sealer:
        endpoints = EndpointCache(self.api, clock=lambda: self.now)  # type: ignore[arg-type]
        return Sealer(endpoints, mode=lambda: mode, home=self.home, environ=self.environ)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "home")


def seal(sealer: Sealer, *, payload: bytes = b"call", mode: SealMode | None = None, function: str = FUNCTION) -> bytes:
    return sealer.seal(payload, mode=mode, endpoint_id=ENDPOINT, function=function, task_id="t")


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
    assert (lab.home / "known_endpoints").read_text() == f"{ENDPOINT} {SECRETS.fingerprint}\n"


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
    sealer.known.put(ENDPOINT, other.fingerprint)
    assert seal(lab.sealer()) != b"call"
    assert lab.sealer().fingerprint(ENDPOINT) == other.fingerprint


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
        found = sealer.opened(result(), value, must=True)[1]
        assert bytes(found or b"") == b"11\n1"


def test_values_that_are_not_sealed_are_refused_where_they_have_to_be(lab: Lab) -> None:
    answers(lab)
    assert lab.sealer().opened(result(), b"11\n1", must=False)[1] == b"11\n1"
    for sealer, must in ((lab.sealer(), True), (lab.sealer("required"), False)):
        with pytest.raises(ResultRefused, match="not sealed"):
            sealer.opened(result(), b"11\n1", must=must)
        with pytest.raises(ResultRefused, match="not sealed"):
            sealer.opened_value(b"11\n1", "t", must=must)


def test_errors_and_details_are_opened(lab: Lab) -> None:
    key = answers(lab)
    error = {
        "code": "TASK_DEAD_LETTERED",
        "message": "sealed",
        "hint": "of the cloud",
        "sealed": text(b'{"code":"WORKER_DIED","message":"m","hint":"h","traceback":"t"}', key, Answer.ERROR),
    }
    details = {"cpu_s": 1, "sealed": text(b'{"stdout_tail":"out"}', key, Answer.DETAILS)}
    found, _ = lab.sealer().opened(result(state=TaskState.FAILED, error=error, details=details), None, must=True)
    assert found.error == {"code": "TASK_DEAD_LETTERED", "message": "m", "hint": "of the cloud", "traceback": "t"}
    assert found.details == {"cpu_s": 1, "stdout_tail": "out"}


def test_sealed_output_has_texts_and_places_and_nothing_else(lab: Lab) -> None:
    key = answers(lab)
    stream = '{"from": 0, "next": 1, "text": "a"}'
    found = text(
        f'{{"attempt": 1, "stdout": {stream}, "stderr": {stream}, "status": "x"}}'.encode(), key, Answer.OUTPUT
    )
    opened = lab.sealer().opened_output("t", {"status": "running", "attempt": 0, "sealed": found})
    assert (opened["status"], opened["attempt"], opened["stdout"]["text"]) == ("running", 1, "a")
    for forged in (f'{{"attempt": 1, "stdout": 5, "stderr": {stream}}}', "{}", "[]"):
        with pytest.raises(SealInvalid):
            lab.sealer().opened_output("t", {"sealed": text(forged.encode(), key, Answer.OUTPUT)})


def test_an_error_that_is_not_sealed_brings_no_pickle(lab: Lab) -> None:
    forged = {"code": "TASK_FAILED", "message": "m", "exception_data": "01\nforged"}
    failed = result(state=TaskState.FAILED, error=forged)
    for sealer, must in ((lab.sealer(), True), (lab.sealer("required"), False)):
        assert (sealer.opened(failed, None, must=must)[0].error or {})["exception_data"] is None
    assert lab.sealer().opened(failed, None, must=False)[0] == failed


def test_answers_of_other_parts_and_users_are_not_opened(lab: Lab) -> None:
    key = answers(lab)
    swapped = result(details={"sealed": text(b"{}", key, Answer.ERROR)})
    with pytest.raises(SealInvalid):
        lab.sealer().opened(swapped, None, must=True)
    value = text(b"11\n1", key, Answer.RESULT).encode()
    other = Lab(lab.home / "other")
    with pytest.raises(SealInvalid, match="no secret"):
        other.sealer().opened(result(), value, must=False)
    other.environ["FARCALL_SEALING_SECRET"] = (lab.home / "sealing.secret").read_text()
    assert bytes(other.sealer().opened(result(), value, must=False)[1] or b"") == b"11\n1"
    other.environ["FARCALL_SEALING_SECRET"] = "AAAA"
    with pytest.raises(ConfigurationError, match="FARCALL_SEALING_SECRET is not a sealing secret"):
        other.sealer().opened(result(), value, must=False)


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
