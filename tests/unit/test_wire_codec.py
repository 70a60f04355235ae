"""Codec: round trips; invalid bytes raise one of two errors."""

from __future__ import annotations

import logging
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farcall_common.errors import FrameMalformed, ProtocolError, VersionUnsupported
from farcall_common.limits import MAX_FRAME_BYTES, MAX_FRAMES, MAX_KEPT_OUTPUT_BYTES
from farcall_common.qos import QoS
from farcall_common.retries import MAX_DELAY_S, MAX_RETRIES
from farcall_common.task_options import TaskOptions
from farcall_common.wire import (
    PROTOCOL_VERSION,
    Credit,
    Envelope,
    Heartbeat,
    Hello,
    Message,
    ResultSpec,
    RunTasks,
    TaskResults,
    TasksAccepted,
    TaskSpec,
    TaskState,
    decode,
    encode,
)

KINDS = sorted(Message.__subclasses__(), key=lambda cls: cls.__name__)
TEXT = st.text(max_size=20)
# What a MessagePack map of free form may hold.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def _values(annotation: Any, field: str) -> st.SearchStrategy[Any]:
    """Values of a field's type; fields that name a frame get the index 0, since one frame travels along."""
    args = get_args(annotation)
    if type(None) in args:
        return st.none() | _values(next(part for part in args if part is not type(None)), field)
    if field in ("result", "payload", "body", "piece"):
        return st.just(0)
    if field == "walltime_s":
        return st.floats(0, 2**40, exclude_min=True)
    if field == "output_bytes":
        return st.integers(0, MAX_KEPT_OUTPUT_BYTES)
    if field == "retries":
        return st.integers(0, MAX_RETRIES)
    if field == "retry_delay_s":
        return st.floats(0, MAX_DELAY_S)
    if field == "weights":
        return st.dictionaries(TEXT, st.integers(1, 1000), max_size=3)
    if get_origin(annotation) is tuple:
        return st.lists(_values(args[0], ""), max_size=3).map(tuple)
    if get_origin(annotation) is dict:
        return st.dictionaries(TEXT, _values(args[1], ""), max_size=3)
    if annotation is TaskState:
        return st.sampled_from(TaskState)
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return _structs(annotation)
    return {str: TEXT, bool: st.booleans(), int: st.integers(1, 2**53), float: st.floats(0, 2**40), Any: JSON}[
        annotation
    ]


def _structs(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    if cls is QoS:
        return st.builds(QoS, target_ms=st.floats(1e-3, 1e6), percentile=st.floats(50, 99.9))
    hints = get_type_hints(cls)
    return st.builds(cls, **{name: _values(hints[name], name) for name in cls.__struct_fields__})


MESSAGES = st.one_of([_structs(kind) for kind in KINDS])


@given(message=MESSAGES, frame=st.binary(max_size=50))
def test_round_trip(message: Message, frame: bytes) -> None:
    envelope = Envelope(message, (frame,))
    assert decode(encode(envelope)) == envelope


@given(message=MESSAGES, data=st.data())
def test_truncated_headers_are_malformed(message: Message, data: st.DataObject) -> None:
    header = encode(Envelope(message, (b"",)))[0]
    cut = data.draw(st.integers(0, len(header) - 1))
    with pytest.raises(FrameMalformed):
        decode([header[:cut], b""])


@given(frames=st.lists(st.binary(max_size=200), max_size=4))
def test_garbage_is_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames)


@given(body=st.binary(max_size=200))
def test_garbage_after_a_valid_version_is_malformed(body: bytes) -> None:
    with pytest.raises(FrameMalformed):
        decode([bytes([PROTOCOL_VERSION]) + body])


@given(message=MESSAGES, name=TEXT.filter(lambda text: text.startswith("x_")) | st.just("x_new"), value=JSON)
def test_unknown_fields_are_ignored(message: Message, name: str, value: Any) -> None:
    header = encode(Envelope(message, (b"",)))[0]
    body = msgspec.msgpack.decode(header[1:]) | {name: value}
    assert decode([header[:1] + msgspec.msgpack.encode(body), b""]).message == message


def test_unknown_fields_are_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="farcall_common.wire")
    decode([b"\x01" + msgspec.msgpack.encode({"kind": "Credit", "tasks": 1, "colour": "crimson"})])
    assert "colour" in caplog.text
    assert "crimson" not in caplog.text


@pytest.mark.parametrize("version", [0, 2, 255])
def test_other_versions_are_refused(version: int) -> None:
    with pytest.raises(VersionUnsupported, match=str(version)):
        decode([bytes([version]) + encode(Envelope(Credit(tasks=1)))[0][1:]])


@pytest.mark.parametrize("kind", KINDS, ids=lambda cls: cls.__name__)
def test_a_missing_field_is_malformed(kind: type[Message]) -> None:
    needed = [field.name for field in msgspec.structs.fields(kind) if field.required]
    body = msgspec.msgpack.encode({"kind": kind.__name__})
    if needed:
        with pytest.raises(FrameMalformed):
            decode([b"\x01" + body])
    else:
        assert isinstance(decode([b"\x01" + body]).message, kind)


@pytest.mark.parametrize(
    "body",
    [
        {"tasks": 1},
        {"kind": "Nonsense"},
        {"kind": 7},
        {"kind": "Credit", "tasks": 0},
        {"kind": "Credit", "tasks": -1},
        {"kind": "Credit", "tasks": "1"},
        {"kind": "Heartbeat", "at": -1.0},
        {"kind": "TaskTransitions", "moves": [{"task_id": "t", "attempt": 1, "state": "flying", "at": 1.0}]},
        [],
        "Credit",
    ],
)
def test_wrong_headers_are_malformed(body: Any) -> None:
    with pytest.raises(FrameMalformed):
        decode([b"\x01" + msgspec.msgpack.encode(body)])


def test_an_index_needs_its_frame() -> None:
    task = TaskSpec(task_id="t", attempt=1, function_id="f", function_hash="h", options=TaskOptions(), payload=1)
    with pytest.raises(FrameMalformed, match="RunTasks"):
        decode(encode(Envelope(RunTasks(tasks=(task,)), (b"only one",))))
    result = ResultSpec(task_id="t", attempt=1, state=TaskState.SUCCESS, result=0)
    with pytest.raises(FrameMalformed, match="TaskResults"):
        decode(encode(Envelope(TaskResults(results=(result,)))))


@pytest.mark.parametrize("frames", [[b"x"] * (MAX_FRAMES + 1), [b"\x01", b"x" * (MAX_FRAME_BYTES + 1)]])
def test_limits(frames: list[bytes]) -> None:
    with pytest.raises(FrameMalformed, match="limits"):
        decode(frames)


def test_messages_are_frozen() -> None:
    message = TasksAccepted(tasks=())
    with pytest.raises(AttributeError):
        message.tasks = ()  # type: ignore[misc]


def test_defaults_cost_no_bytes() -> None:
    assert encode(Envelope(Heartbeat(at=1.0)))[0].count(b"report") == 0
    hello = Hello(endpoint_id="e", ticket="t", instance_id="i", spool_id="s", protocol_versions=(1,), heartbeat_s=1.0)
    assert b"capabilities" not in encode(Envelope(hello))[0]


@pytest.mark.parametrize("generation", [2**53 + 1, 2**63, 2**64 - 1])
def test_generation_out_of_range_is_malformed(generation: int) -> None:
    raw = msgspec.msgpack.encode({"kind": "Heartbeat", "at": 1.0, "spool_generation": generation})
    with pytest.raises(FrameMalformed):
        decode([b"\x01" + raw])
