"""Event log: the last events of the core with their times, for bug reports. The same events replay in a new core.

The log keeps references. It masks and encodes events only when it is written: lengths in place of user bytes,
asterisks in place of texts, tickets and signed URLs. It is bounded by the number of turns and by the bytes that its
events keep in memory.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from farcall_common import wire
from farcall_common.errors import ErrorRecord, FarcallError, error_from_record
from farcall_common.store.model import PeerKey, TaskResult
from farcall_forwarder.core import actions as do
from farcall_forwarder.core import events as ev
from farcall_forwarder.core.events import Event
from farcall_forwarder.core.policy import Instant
from farcall_forwarder.core.relay import PieceRead

_MAX_TURNS: Final = 1000
_MAX_BYTES: Final = 8 * 1024 * 1024
#: What a task or an event without user bytes is counted as.
_RECORD_BYTES: Final = 1024
_MASK_CHARACTERS: Final = 16
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
    }
    | {"detail", "details", "urls", "url", "headers", "ticket", "resource_specification", "user_endpoint_config"}
)


class EventLog:
    """The events of one core, oldest turns dropped first."""

    def __init__(self, *, max_turns: int = _MAX_TURNS, max_bytes: int = _MAX_BYTES) -> None:
        self._max_turns = max_turns
        self._max_bytes = max_bytes
        self._turns: collections.deque[tuple[Instant, Sequence[Event], int]] = collections.deque()
        self._size_bytes = 0
        #: Turns that were dropped. A replay gives the same actions only if there are none.
        self.dropped_turns = 0

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, events: Sequence[Event], now: Instant, *, received_bytes: int = 0) -> None:
        """Add a turn. ``received_bytes`` is the size of its messages of peers."""
        size_bytes = received_bytes
        for event in events:
            size_bytes += _size_bytes(event)
        self._turns.append((now, events, size_bytes))
        self._size_bytes += size_bytes
        while len(self._turns) > self._max_turns or self._size_bytes > self._max_bytes:
            self._size_bytes -= self._turns.popleft()[2]
            self.dropped_turns += 1

    def records(self) -> Iterator[dict[str, Any]]:
        """One JSON object for each turn, without user bytes, texts and secrets."""
        for now, events, _ in list(self._turns):
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
            bodies_bytes = sum(len(body) for _, body in bodies.values())
            return bodies_bytes + sum(map(len, payloads.values())) + _RECORD_BYTES * len(event.order.tasks)
        case ev.Flushed(batches=batches):
            return sum(_result_bytes(result) for flushed in batches for result in flushed.batch.results)
        case ev.ResultsHeard(shared_results=groups):
            return sum(_result_bytes(result) for group in groups for result in group.results)
        case ev.EndpointMaintained(reaped=reaped, outbox=outbox):
            payloads_bytes = sum(_RECORD_BYTES + len(leased.task.payload or b"") for leased in reaped)
            return payloads_bytes + sum(map(_result_bytes, outbox))
        case ev.TasksRead(tasks=tasks):
            return len(repr(tasks))
        case PieceRead(piece=piece):
            return len(piece)
        case _:
            return _RECORD_BYTES


def _result_bytes(result: TaskResult) -> int:
    texts = (len(repr(result.error)) if result.error else 0) + (len(repr(result.details)) if result.details else 0)
    return _RECORD_BYTES + len(result.result or b"") + texts


def _record(event: Event) -> dict[str, Any]:
    record = {"kind": type(event).__name__, "fields": without_user_data(event)}
    if isinstance(event, ev.StepFenced | ev.StepLost | ev.StepFailed):
        record["step"] = type(event.step).__name__
    return record


def _mask(value: Any, *, is_masked: bool = False) -> Any:
    match value:
        case bytes():
            return {"zeros": len(value)}
        case str() if is_masked:
            return "*" * min(len(value), _MASK_CHARACTERS)
        case list() | tuple():
            return [_mask(item, is_masked=is_masked) for item in value]
        case dict():
            return {
                # The id of a connection is no user data, and has to be the same in all events.
                key: {"hex": item.hex()}
                if key == "routing_id" and isinstance(item, bytes)
                else _mask(item, is_masked=is_masked or (key in _MASKED and not _is_envelope(key, item)))
                for key, item in value.items()
            }
        case _:
            return value


def _is_envelope(key: str, value: object) -> bool:
    """Whether this field is a message of the protocol, and not the text of an error."""
    return key == "message" and isinstance(value, dict)


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
