"""Result streams: clients' subscriptions to task groups, and a history of results so that streams can resume."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from farcall_common.errors import LimitExceeded
from farcall_common.store.model import TaskResult
from farcall_common.wire import ResultsReady, StreamResult, TaskState
from farcall_forwarder.core.policy import Instant, Policy
from farcall_forwarder.core.run_tasks import locate

_encode: Final = msgspec.msgpack.Encoder().encode


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """A recorded result with its sequence number in the owner's history. ``body`` is the inline result."""

    seq: int
    result: StreamResult
    body: bytes | None
    size_bytes: int


@dataclasses.dataclass(slots=True)
class _Stream:
    routing_id: bytes
    owner: _Owner
    #: Sequence number of the last result that this stream has seen or does not want.
    seq: int
    groups: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True, eq=False)
class _Owner:
    """The latest results of one owner's tasks, and the owner's streams. The history is complete after ``floor``."""

    floor: int
    entries: deque[_Entry] = dataclasses.field(default_factory=deque)
    size_bytes: int = 0
    streams: dict[bytes, _Stream] = dataclasses.field(default_factory=dict)
    #: Streams by the group that they want: a result concerns few of an owner's streams.
    wanting: dict[str, dict[bytes, _Stream]] = dataclasses.field(default_factory=dict)
    idle_since: float | None = None

    def add(self, entry: _Entry, *, limit: int, limit_bytes: int) -> None:
        self.entries.append(entry)
        self.size_bytes += entry.size_bytes
        while self.entries and (len(self.entries) > limit or self.size_bytes > limit_bytes):
            dropped = self.entries.popleft()
            self.floor = max(self.floor, dropped.seq)
            self.size_bytes -= dropped.size_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Push:
    """A message for the client behind a routing id, with its frames."""

    routing_id: bytes
    message: ResultsReady
    frames: tuple[bytes, ...]


class StreamHub:
    """The streams of all clients. Results reach only streams of the tasks' owner."""

    def __init__(self, *, forwarder_id: str, policy: Policy) -> None:
        self._forwarder_id = forwarder_id
        self._policy = policy
        self._seq = 0
        self._streams: dict[bytes, _Stream] = {}
        self._owners: dict[str, _Owner] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def watchers(self) -> frozenset[str]:
        """Owners that have streams, or had one recently."""
        return frozenset(self._owners)

    def has_owner(self, owner_id: str) -> bool:
        """Whether this is one of the :attr:`watchers`."""
        return owner_id in self._owners

    def open(
        self, routing_id: bytes, owner_id: str, *, groups: Iterable[str], cursor: str | None
    ) -> tuple[str, bool, Sequence[Push]]:
        """Begin a stream. Returns its cursor, whether it resumes the stream of ``cursor``, and the missed results.

        :raises LimitExceeded: for too many groups.
        """
        owner = self._owners.setdefault(owner_id, _Owner(floor=self._seq))
        owner.idle_since = None
        after = self._parse(cursor)
        resumed = after is not None and owner.floor <= after <= self._seq
        seq = after if resumed and after is not None else self._seq
        stream = self._streams[routing_id] = owner.streams[routing_id] = _Stream(routing_id, owner, seq)
        self._add_groups(stream, set(groups))
        missed = [
            entry
            for entry in owner.entries
            if resumed and entry.seq > seq and entry.result.task_group_id in stream.groups
        ]
        return self._cursor(seq), resumed, list(self._pushes(stream, missed))

    def subscribe(self, routing_id: bytes, groups: Iterable[str]) -> Sequence[Push]:
        """Add groups to a stream; their recent results are sent at once.

        :raises LimitExceeded: for too many groups.
        """
        stream = self._streams.get(routing_id)
        if stream is None:
            return []  # The client was redirected, and has not read that yet.
        new = set(groups) - stream.groups
        self._add_groups(stream, new)
        return list(
            self._pushes(stream, [entry for entry in stream.owner.entries if entry.result.task_group_id in new])
        )

    def _add_groups(self, stream: _Stream, groups: set[str]) -> None:
        if len(stream.groups) + len(groups) > self._policy.max_groups:
            raise LimitExceeded(
                f"a stream with more than {self._policy.max_groups} task groups",
                hint="Submit more tasks per group, or open another stream.",
            )
        stream.groups |= groups
        for group in groups:
            stream.owner.wanting.setdefault(group, {})[stream.routing_id] = stream

    def close(self, routing_id: bytes, now: Instant) -> None:
        """End a stream. Its owner can resume it for ``policy.ring_idle_s``."""
        if stream := self._streams.pop(routing_id, None):
            del stream.owner.streams[routing_id]
            for group in stream.groups:
                del stream.owner.wanting[group][routing_id]
                if not stream.owner.wanting[group]:
                    del stream.owner.wanting[group]
            if not stream.owner.streams:
                stream.owner.idle_since = now.mono

    def expire(self, now: Instant) -> None:
        """Forget the history of owners that did not return."""
        for owner_id, owner in list(self._owners.items()):
            if owner.idle_since is not None and now.mono - owner.idle_since >= self._policy.ring_idle_s:
                del self._owners[owner_id]

    def interrupt(self, owner_ids: Iterable[str]) -> None:
        """Results of these owners may have been missed: cursors from before now do not resume."""
        self._seq += 1
        for owner_id in owner_ids:
            if owner := self._owners.get(owner_id):
                owner.floor = self._seq

    def publish(self, results: Iterable[TaskResult], urls: Mapping[str, str], *, recorded_at: float) -> Sequence[Push]:
        """Add recorded results to the histories; the pushes to send."""
        wanted: dict[bytes, list[_Entry]] = {}
        for result in results:
            if owner := self._owners.get(result.owner_id):
                self._seq += 1
                spec = _stream_result(result, urls, recorded_at)
                size_bytes = len(_encode(spec)) + len(result.result or b"")
                entry = _Entry(self._seq, spec, result.result, size_bytes)
                owner.add(entry, limit=self._policy.ring_results, limit_bytes=self._policy.ring_bytes)
                for routing_id in owner.wanting.get(result.task_group_id, ()):
                    wanted.setdefault(routing_id, []).append(entry)
        return [
            push for routing_id, chosen in wanted.items() for push in self._pushes(self._streams[routing_id], chosen)
        ]

    def _pushes(self, stream: _Stream, entries: Sequence[_Entry]) -> Iterator[Push]:
        for chunk in _chunks(entries, limit=self._policy.max_push_results, limit_bytes=self._policy.max_push_bytes):
            stream.seq = max(stream.seq, chunk[-1].seq)
            frames: list[bytes] = []
            specs: list[StreamResult] = []
            for entry in chunk:
                if entry.body is None:
                    specs.append(entry.result)
                else:
                    specs.append(msgspec.structs.replace(entry.result, result=len(frames)))
                    frames.append(entry.body)
            message = ResultsReady(cursor=self._cursor(stream.seq), results=tuple(specs))
            yield Push(stream.routing_id, message, tuple(frames))

    def _cursor(self, seq: int) -> str:
        return f"{self._forwarder_id}:{seq}"

    def _parse(self, cursor: str | None) -> int | None:
        forwarder_id, _, seq = (cursor or "").rpartition(":")
        is_ours = forwarder_id == self._forwarder_id and seq.isascii() and seq.isdigit() and len(seq) < 20
        return int(seq) if is_ours else None


def _chunks(entries: Sequence[_Entry], *, limit: int, limit_bytes: int) -> Iterator[list[_Entry]]:
    chunk: list[_Entry] = []
    size_bytes = 0
    for entry in entries:
        if chunk and (len(chunk) >= limit or size_bytes + entry.size_bytes > limit_bytes):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(entry)
        size_bytes += entry.size_bytes
    if chunk:
        yield chunk


def _stream_result(result: TaskResult, urls: Mapping[str, str], recorded_at: float) -> StreamResult:
    return StreamResult(
        task_id=result.task_id,
        task_group_id=result.task_group_id,
        # Clients of version 1 do not know the newer state; the error has its code.
        state=TaskState.FAILED if result.state is TaskState.DEAD_LETTERED else result.state,
        attempt=result.attempt,
        result_blob=locate(result.result_ref, urls) if result.result_ref else None,
        error=result.error.to_json() if result.error else None,
        finished_at=recorded_at,
        timings={**result.timings, "recorded_at": recorded_at},
        details=dict(result.details),
    )
