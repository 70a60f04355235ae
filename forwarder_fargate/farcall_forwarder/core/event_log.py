"""Event log: the last events of the core with their times, for bug reports. The same events replay in a new core.

The log keeps references. It masks and encodes events only when it is written: lengths in place of user bytes,
asterisks in place of texts, tickets and signed URLs. It is bounded by the number of turns and by the bytes that its
events keep in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, cast

import msgspec

from farcall_common import event_log, wire
from farcall_common.errors import ErrorRecord, FarcallError, error_from_record
from farcall_common.store.model import FileMessage, PeerKey, TaskResult
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.files import FileMessagesHeard
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.relay import PieceRead

_MAX_TURNS: Final = 1000
_MAX_BYTES: Final = 8 * 1024 * 1024
#: What a task or an event without user bytes is counted as.
_RECORD_BYTES: Final = 1024
#: Fields whose texts are users' own or secrets, wherever they are.
_MASKED: Final = frozenset(
    {
        "message",
        "hint",
        "traceback",
        "exception_data",
        "exception_type",
        "stdout_tail",
        "stderr_tail",
        "reason",
        "reasons",
        "path",
        "text",
        "sealed",
    }
    | {"detail", "details", "urls", "url", "headers", "ticket", "resource_specification", "user_endpoint_config"}
)


class EventLog(event_log.EventLog[Event, Instant]):
    """The events of the forwarder's core, by reference."""

    def __init__(self, *, max_turns: int = _MAX_TURNS, max_bytes: int = _MAX_BYTES) -> None:
        super().__init__(
            lambda event: (event, _size_bytes(event)), max_turns=max_turns, max_size=max_bytes, min_turns=0
        )

    def records(self) -> Iterator[dict[str, Any]]:
        """One JSON object for each turn, without user bytes, texts and secrets."""
        for now, events in list(self):
            yield {"instant": list(now), "events": [_record(event) for event in events]}


def read_events(records: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Instant, list[Event]]]:
    """Time and events of each turn, from the objects of :meth:`EventLog.records`. User bytes are zeros.

    :raises ValueError: if they are not a log of this version.
    """
    for record in records:
        yield Instant(*record["instant"]), [_event(**event) for event in record["events"]]


def without_user_data(value: object) -> Any:
    """An event or action as JSON can have it: masked, and bytes by their lengths."""
    return _mask(msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=_encode_error))


def _size_bytes(event: Event) -> int:
    match event:
        case ev.Received():
            return _RECORD_BYTES
        case ev.TasksLeased(tasks=tasks):
            return sum(_RECORD_BYTES + len(leased.task.payload or b"") for leased in tasks)
        case ev.TasksPrepared(bodies=bodies, payloads=payloads):
            bodies_bytes = sum(len(body) for versions in bodies.values() for _, body, _ in versions.values())
            return bodies_bytes + sum(map(len, payloads.values())) + _RECORD_BYTES * len(event.order.tasks)
        case ev.Flushed(batches=batches):
            return sum(_result_bytes(result) for flushed in batches for result in flushed.batch.results)
        case ev.ResultsHeard(shared_results=groups):
            return sum(_result_bytes(result) for group in groups for result in group.results)
        case ev.EndpointMaintained(reaped=reaped, outbox=outbox):
            payloads_bytes = sum(_RECORD_BYTES + len(leased.task.payload or b"") for leased in reaped)
            return payloads_bytes + sum(map(_result_bytes, outbox))
        case ev.TasksRead(tasks=tasks):
            return sum(_RECORD_BYTES + len(task.payload or b"") for task in tasks.values())
        case PieceRead(piece=piece):
            return len(piece)
        case FileMessagesHeard(messages=messages):
            return sum(map(_text_bytes, messages))
        case _:
            return _RECORD_BYTES


def _text_bytes(message: FileMessage) -> int:
    texts = [value for value in msgspec.structs.astuple(message) if isinstance(value, str)]
    return _RECORD_BYTES + sum(map(sys.getsizeof, texts))


def _result_bytes(result: TaskResult) -> int:
    """Return the bytes of a result, with the texts of a failure: traceback and end of the output may be long."""
    texts = [] if result.error is None else [result.error.message, result.error.traceback]
    texts += [value for value in (result.details or {}).values() if isinstance(value, str)]
    return _RECORD_BYTES + len(result.result or b"") + sum(len(text or "") for text in texts)


def _record(event: Event) -> dict[str, Any]:
    record = {"kind": type(event).__name__, "fields": without_user_data(event)}
    if isinstance(event, ev.StepFenced | ev.StepLost | ev.StepFailed):
        record["step"] = type(event.step).__name__
    return record


def _mask(value: Any) -> Any:
    match value:
        case bytes():
            return {"zeros": len(value)}
        case list() | tuple():
            return [_mask(item) for item in value]
        case dict():
            return {key: _mask_member(key, item) for key, item in value.items()}
        case _:
            return value


def _mask_member(key: str, value: Any) -> Any:
    if key == "routing_id" and isinstance(value, bytes):
        return {"hex": value.hex()}  # the id of a connection is no user data, and has to be the same in all events
    if key in _MASKED and not (key == "message" and isinstance(value, dict)):  # a text, not a message of the protocol
        return event_log.without_texts(_mask(value))
    return _mask(value)


def _unmask(value: Any) -> Any:
    match value:
        case {"zeros": int(size)}:
            return bytes(size)
        case {"hex": str(text)}:
            return bytes.fromhex(text)
        case list():
            return [_unmask(item) for item in value]
        case dict():
            return {key: _unmask(item) for key, item in value.items()}
        case _:
            return value


def _event(kind: str, fields: Mapping[str, Any], step: str = "") -> Event:
    values = _unmask(dict(fields))
    kinds = {cls.__name__: cls for cls in _subclasses(Event)}
    if kind not in kinds:
        raise ValueError(f"{kind} is not an event of this version")
    if step:
        return cast(Event, kinds[kind](_convert(values["step"], getattr(do, step))))
    if kind == ev.Received.__name__:
        named = {cls.__struct_config__.tag: cls for cls in _subclasses(wire.Message)}
        message = values["envelope"]["message"]
        envelope = wire.Envelope(_convert(message, named[message["kind"]]), tuple(values["envelope"]["frames"]))
        return ev.Received(values["routing_id"], _convert(values["peer"], PeerKey), envelope)
    if kind in (ev.MalformedReceived.__name__, ev.ClaimRefused.__name__):
        error = error_from_record(_convert(values.pop("error"), ErrorRecord))
        if "peer" in values:
            values["peer"] = _convert(values["peer"], PeerKey)
        return cast(Event, kinds[kind](**values, error=error))
    return cast(Event, _convert(values, kinds[kind]))


def _convert(value: Any, kind: type) -> Any:
    return msgspec.convert(value, kind, builtin_types=(bytes,))


def _subclasses(kind: type[Any]) -> Iterator[Any]:
    for cls in kind.__subclasses__():
        yield cls
        yield from _subclasses(cls)


def _encode_error(value: object) -> object:
    if isinstance(value, FarcallError):
        return value.record
    raise NotImplementedError(f"no rule for {type(value).__name__}")
