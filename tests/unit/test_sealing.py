"""Sealed calls and answers: what opens them, and that nothing else does."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farcall_common import wire
from farcall_common.errors import ErrorRecord, SealInvalid
from farcall_common.limits import MAX_INLINE_BYTES
from farcall_common.sealing import (
    CALL_LIFETIME_S,
    CLOCK_TOLERANCE_S,
    Answer,
    SealingKey,
    SealingSecrets,
    answer_key,
    decode_secret,
    encode_secret,
    is_sealed,
    is_sealed_text,
    new_secret,
    open_answer,
    open_call,
    seal_answer,
    seal_call,
)
from farcall_common.task_options import Callee, TaskOptions
from farcall_common.wire import TaskState
from farcall_endpoint.agent.core.reports import tasks_received
from farcall_endpoint.agent.core.tasks import Stage, Task, TaskResult
from farcall_endpoint.agent.shell.sealing import CallOpener, seal_result
from farcall_forwarder.core.untrusted import clean_details, clean_error

NOW = 1_800_000_000.0
HASH = "ab" * 32
SECRETS = SealingSecrets.new(now=NOW)
USER = new_secret()
#: Where a call belongs, as its endpoint sees it.
HERE = {"endpoint_id": "e", "function_id": "f", "function_hash": HASH, "task_id": "t"}
CALL = b"2\n[]2\n{}"


def sealed(
    call: bytes = CALL, *, secrets: SealingSecrets = SECRETS, max_text_bytes: int = 65536, **changes: Any
) -> bytes:
    where = {"endpoint_id": "e", "function": HASH, "task_id": "t", "now": NOW, **changes}
    key = answer_key(USER, task_id=where["task_id"])
    to = secrets.public(endpoint_id=where["endpoint_id"])
    return seal_call(call, to=to, key=key, max_text_bytes=max_text_bytes, **where)


def opened(buffer: bytes, *, secrets: SealingSecrets = SECRETS, now: float = NOW, **changes: Any) -> bytes:
    call, key = open_call(buffer, secrets, now=now, **{**HERE, **changes})
    assert key == answer_key(USER, task_id=changes.get("task_id", "t"))
    return bytes(call)


@pytest.mark.parametrize("size", [0, 1, 1000, 48_000, 300_000])
def test_a_call_is_opened_at_its_place(size: int) -> None:
    call = random.Random(size).randbytes(size)
    buffer = sealed(call)
    assert opened(buffer) == call
    assert is_sealed(buffer)
    assert is_sealed_text(buffer) is (size < 49_000)
    assert not is_sealed_text(buffer) or buffer.isascii()
    assert call not in buffer or size < 5


def test_equal_calls_are_sealed_differently() -> None:
    assert sealed() != sealed()


def test_a_call_may_be_bound_to_the_id_of_a_function() -> None:
    assert opened(sealed(function="f"), function_hash="cd" * 32) == CALL
    with pytest.raises(SealInvalid):
        opened(sealed(function="f"), function_id="g")


@pytest.mark.parametrize("place", [{"endpoint_id": "e2"}, {"function_hash": "cd" * 32}, {"task_id": "t2"}])
def test_a_call_is_opened_nowhere_else(place: dict[str, Any]) -> None:
    with pytest.raises(SealInvalid, match="another endpoint, function or task"):
        opened(sealed(), **place)


OTHER = "cd" * 32
SAID = [("g", HASH), ("h", OTHER)]


@pytest.mark.parametrize("callees", [[HASH, OTHER], ["g", OTHER], ["g", "h"]])
def test_a_call_is_bound_to_the_functions_that_it_calls(callees: list[str]) -> None:
    buffer = sealed(callees=callees)
    assert opened(buffer, callees=SAID) == CALL
    for said in ([], SAID[:1], SAID[::-1], [*SAID, SAID[0]], [("x", OTHER), ("y", HASH)]):
        with pytest.raises(SealInvalid, match="exchanged"):
            opened(buffer, callees=said)
    with pytest.raises(SealInvalid, match="exchanged"):
        opened(sealed(), callees=SAID)


@given(call=st.binary(max_size=64))
def test_no_content_of_a_call_with_functions_raises_anything_else(call: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farcall_common.sealing._VERSION", 2)
        buffer = sealed(call)
    with contextlib.suppress(SealInvalid):
        assert call.endswith(opened(buffer, callees=SAID))


def test_fields_cannot_be_shifted_into_one_another() -> None:
    buffer = sealed(endpoint_id="e", function="f", task_id="gt")
    with pytest.raises(SealInvalid):
        opened(buffer, function_id="fg", task_id="t")


@given(at=st.integers(min_value=0), bit=st.integers(0, 7), max_text_bytes=st.sampled_from([0, 65536]))
def test_a_call_with_a_changed_bit_is_refused(at: int, bit: int, max_text_bytes: int) -> None:
    buffer = bytearray(_CALLS[max_text_bytes])
    buffer[at % len(buffer)] ^= 1 << bit
    with pytest.raises(SealInvalid):
        opened(bytes(buffer))


@given(length=st.integers(min_value=0), max_text_bytes=st.sampled_from([0, 65536]))
def test_a_truncated_call_is_refused(length: int, max_text_bytes: int) -> None:
    buffer = _CALLS[max_text_bytes]
    with pytest.raises(SealInvalid):
        opened(buffer[: length % len(buffer)])


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    for prefix in (b"", b"fs\n", b"bs\n"):
        with pytest.raises(SealInvalid):
            opened(prefix + data)
        with pytest.raises(SealInvalid):
            open_answer(prefix + data, USER, part=Answer.RESULT, task_id="t")


_CALLS = {size: sealed(max_text_bytes=size) for size in (0, 65536)}


def test_a_call_sealed_to_another_endpoint_is_refused() -> None:
    with pytest.raises(SealInvalid, match="does not have"):
        opened(sealed(secrets=SealingSecrets.new(now=NOW)))


def test_a_call_has_its_time() -> None:
    assert opened(sealed(), now=NOW + CALL_LIFETIME_S) == CALL
    assert opened(sealed(), now=NOW - CLOCK_TOLERANCE_S) == CALL
    with pytest.raises(SealInvalid, match="too long ago"):
        opened(sealed(), now=NOW + CALL_LIFETIME_S + 1)
    with pytest.raises(SealInvalid, match="future"):
        opened(sealed(), now=NOW - CLOCK_TOLERANCE_S - 1)


def test_former_keys_open_calls_for_as_long_as_those_live() -> None:
    buffer = sealed()
    rotated = SealingSecrets.from_bytes(SECRETS.rotated(now=NOW + 1).to_bytes())
    assert opened(buffer, secrets=rotated, now=NOW + 2) == CALL
    assert rotated.fingerprint == SECRETS.fingerprint
    assert rotated.public(endpoint_id="e").key != SECRETS.public(endpoint_id="e").key
    later = rotated.rotated(now=NOW + CALL_LIFETIME_S)  # the first was replaced less than a lifetime ago
    assert len(later.keys) == 3
    assert len(later.rotated(now=NOW + 2 * CALL_LIFETIME_S + 9999).keys) == 2


def test_former_key_opens_no_calls_30_days_after_it_was_replaced() -> None:
    rotated = SECRETS.rotated(now=NOW + 1)
    late = NOW + 1 + CALL_LIFETIME_S + 601
    buffer = sealed(now=late)
    with pytest.raises(SealInvalid, match="replaced over 30 days ago"):
        opened(buffer, secrets=rotated, now=late)
    assert opened(sealed(now=late - 10), secrets=rotated, now=late - 10) == CALL


def test_new_key_is_younger_than_the_former_ones_when_the_clock_is_set_back() -> None:
    rotated = SECRETS.rotated(now=NOW - 1000)
    assert rotated.keys[0][1] > SECRETS.keys[0][1]


def test_a_key_is_accepted_only_with_the_signature_of_its_identity_for_this_endpoint() -> None:
    key = SECRETS.public(endpoint_id="e")
    assert SealingKey.verified(key.to_json(), endpoint_id="e") == key
    assert key.fingerprint == SECRETS.fingerprint
    other = SealingSecrets.new(now=NOW).public(endpoint_id="e")
    changes: list[dict[str, object]] = [
        {"key": other.key},
        {"identity": other.identity},
        {"signature": other.signature},
        {"created_at": key.created_at + 1},
        {"key": "x"},
        {"identity": ""},
        {"created_at": "x"},
    ]
    for change in changes:
        with pytest.raises(SealInvalid):
            SealingKey.verified({**key.to_json(), **change}, endpoint_id="e")
    for data, endpoint_id in ((key.to_json(), "e2"), ({}, "e"), (None, "e")):
        with pytest.raises(SealInvalid):
            SealingKey.verified(data, endpoint_id=endpoint_id)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"identity": "AAAA", "keys": []}', b'{"identity": "?", "keys": []}'])
def test_a_damaged_file_of_keys_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        SealingSecrets.from_bytes(data)


def test_secrets_of_users_are_text() -> None:
    assert decode_secret(encode_secret(USER) + "\n") == USER
    for text in ("", "AAAA", "?"):
        with pytest.raises(ValueError):
            decode_secret(text)


# -- answers -----------------------------------------------------------------------------------------------------------

KEY = answer_key(USER, task_id="t")


@pytest.mark.parametrize("size", [0, 1, 40_000, 60_000, 300_000])
def test_an_answer_is_opened_with_its_key(size: int) -> None:
    body = random.Random(size).randbytes(size)
    buffer = seal_answer(memoryview(body), KEY, part=Answer.RESULT, task_id="t", max_text_bytes=MAX_INLINE_BYTES)
    assert open_answer(buffer, KEY, part=Answer.RESULT, task_id="t") == body
    assert is_sealed_text(buffer) is (size < 49_000)


def test_an_answer_is_not_taken_for_another() -> None:
    buffer = seal_answer(b"x", KEY, part=Answer.RESULT, task_id="t", max_text_bytes=1000)
    with pytest.raises(SealInvalid):
        open_answer(buffer, KEY, part=Answer.DETAILS, task_id="t")
    with pytest.raises(SealInvalid):
        open_answer(buffer, KEY, part=Answer.RESULT, task_id="t2")
    with pytest.raises(SealInvalid, match="another secret"):
        open_answer(buffer, answer_key(new_secret(), task_id="t"), part=Answer.RESULT, task_id="t")


@given(at=st.integers(min_value=0), bit=st.integers(0, 7), max_text_bytes=st.sampled_from([0, 65536]))
def test_an_answer_with_a_changed_bit_is_refused(at: int, bit: int, max_text_bytes: int) -> None:
    buffer = bytearray(seal_answer(b"body", KEY, part=Answer.RESULT, task_id="t", max_text_bytes=max_text_bytes))
    buffer[at % len(buffer)] ^= 1 << bit
    with pytest.raises(SealInvalid):
        open_answer(bytes(buffer), KEY, part=Answer.RESULT, task_id="t")


# -- at the agent ------------------------------------------------------------------------------------------------------

SPEC = wire.TaskSpec(task_id="t", attempt=1, function_id="f", function_hash=HASH, options=TaskOptions(), payload=0)


def opener(secrets: SealingSecrets | None = SECRETS, *, had: bool = False, is_required: bool = False) -> CallOpener:
    return CallOpener(secrets, endpoint_id="e", is_required=is_required, was_opened=lambda _: had, clock=lambda: NOW)


def code_of(buffer: bytes, by: CallOpener, spec: wire.TaskSpec = SPEC) -> str:
    _, call = by.open(spec, buffer)
    return "" if call is None or call.error is None else str(call.error["code"])


def test_the_agent_opens_sealed_calls() -> None:
    payload, call = opener().open(SPEC, sealed())
    assert payload == CALL
    assert call is not None
    assert call.answer_key == KEY
    assert opener().open(SPEC, CALL) == (CALL, None)
    assert opener(None).open(SPEC, CALL) == (CALL, None)


def test_the_agent_refuses_what_it_may_not_run() -> None:
    assert code_of(CALL, opener(is_required=True)) == "ENDPOINT_REQUIRES_SEALED"
    assert code_of(sealed(), opener(None)) == "SEALED_CALL_REFUSED"
    assert code_of(sealed(), opener(had=True)) == "SEALED_CALL_REFUSED"
    for change in ({"task_id": "t2"}, {"function_hash": "cd" * 32}):
        assert code_of(sealed(), opener(), msgspec.structs.replace(SPEC, **change)) == "SEALED_CALL_REFUSED"


def test_the_agent_opens_no_call_whose_functions_were_exchanged() -> None:
    one, other = Callee("g", HASH), Callee("h", "cd" * 32)
    buffer = sealed(callees=[HASH, "h"])
    for callees, code in (([one, other], ""), ([other, one], "SEALED_CALL_REFUSED"), ([], "SEALED_CALL_REFUSED")):
        spec = msgspec.structs.replace(SPEC, options=TaskOptions(callees=tuple(callees)))
        assert code_of(buffer, opener(), spec) == code
    spec = msgspec.structs.replace(SPEC, options=TaskOptions(callees=(one,)))
    assert code_of(sealed(), opener(), spec) == "SEALED_CALL_REFUSED"


def test_a_call_that_a_message_puts_before_a_sealed_one_does_not_get_its_answer_key() -> None:
    plain = msgspec.structs.replace(SPEC, payload=1)
    event = tasks_received(wire.RunTasks(tasks=(plain, SPEC)), (sealed(), CALL), opener().open)
    assert [call and call.answer_key for call in event.opened] == [None, KEY]


def task(*, answer_key: bytes = KEY) -> Task:
    return Task(1, SPEC, 1, Stage.DISPATCHED, NOW, answer_key=answer_key)


def test_results_of_unsealed_calls_are_not_changed() -> None:
    result = TaskResult(TaskState.SUCCESS, body=b"x", size_bytes=1, details={"stdout_tail": "x"})
    assert seal_result(task(answer_key=b""), result) is result
    assert (result.body, result.details) == (b"x", {"stdout_tail": "x"})


@pytest.mark.parametrize(("size", "uploaded"), [(10, False), (48_000, False), (60_000, True), (100_000, True)])
def test_a_result_is_sealed_as_text_or_for_the_blob_store(size: int, uploaded: bool) -> None:
    body = b"x" * size
    result = seal_result(task(), TaskResult(TaskState.SUCCESS, body=body, size_bytes=size))
    assert result.body is not None
    assert result.size_bytes == len(result.body)
    assert result.needs_upload is uploaded
    assert uploaded or bytes(result.body).isascii()
    assert open_answer(result.body, KEY, part=Answer.RESULT, task_id="t") == body


def test_texts_of_errors_and_details_are_sealed_and_survive_the_forwarder() -> None:
    record = ErrorRecord(
        code="TASK_FAILED",
        message="marker",
        hint="marker",
        exception_type="marker",
        traceback="marker\N{SNOWMAN}" * 9000,
        stdout_tail="marker" * 600,
        stderr_tail="marker" * 600,
        attempt=1,
        endpoint_id="e",
        reasons=("marker",) * 100,
        builtin_type="LookupError",
        exception_data="marker" * 2000,
    )
    details = {"stdout_tail": "marker", "cpu_s": 1.5, "task_transitions": {"a": 1.0, "b": "marker"}, "is": ["marker"]}
    result = seal_result(task(), TaskResult(TaskState.FAILED, record.to_json(), details=dict(details)))
    assert result.error is not None
    error = clean_error(result.error, endpoint_id="e", attempt=1)
    kept = clean_details(result.details or {}, now=1.0)
    assert "marker" not in str((error, kept))
    assert (error.code, error.attempt, kept["cpu_s"], kept["task_transitions"]) == ("TASK_FAILED", 1, 1.5, {"a": 1.0})

    assert error.sealed is not None
    inside = msgspec.json.decode(open_answer(error.sealed.encode(), KEY, part=Answer.ERROR, task_id="t"))
    assert inside["message"] == "marker"
    assert inside["builtin_type"] == "LookupError"
    assert inside["traceback"].endswith("marker\N{SNOWMAN}")
    assert msgspec.json.decode(open_answer(kept["sealed"].encode(), KEY, part=Answer.DETAILS, task_id="t")) == details


@given(
    st.dictionaries(
        st.sampled_from(["message", "hint", "traceback", "stdout_tail", "stderr_tail", "exception_type"]),
        st.text(st.characters(codec="utf-8"), max_size=40),
    )
)
@example({"message": "\a\a", "traceback": "\a\a"})
def test_the_seal_of_any_error_fits_the_forwarder(words: dict[str, str]) -> None:
    texts = {name: text * 2000 for name, text in words.items()}
    result = seal_result(task(), TaskResult(TaskState.FAILED, {"code": "C", "message": "", "fault": "us", **texts}))
    assert result.error is not None
    cleaned = clean_error(result.error, endpoint_id="e", attempt=1).sealed
    assert cleaned is not None
    assert open_answer(cleaned.encode(), KEY, part=Answer.ERROR, task_id="t")
