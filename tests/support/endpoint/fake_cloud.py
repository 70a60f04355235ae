"""Scripted cloud of one endpoint: a forwarder and the API."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from farcall_common import wire
from farcall_common.errors import DeserializationError
from farcall_common.limits import MAX_INLINE_BYTES
from farcall_common.payload import Serializer
from farcall_common.sealing import is_sealed
from farcall_common.task_options import Callee, TaskOptions
from tests.support.endpoint.fake_http import ENDPOINT_ID, FakeHttp
from tests.support.scripted_router import ScriptedRouter
from tests.waiting import WAIT_S

_POLL_MS: Final = 1000


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a task ended, with its result deserialised."""

    state: wire.TaskState
    value: object
    error: dict[str, Any]
    spec: wire.ResultSpec


@dataclasses.dataclass
class _Task:
    spec: wire.TaskSpec
    payload: bytes
    accepted: bool = False


class FakeCloud(ScriptedRouter):
    """One endpoint's cloud. All methods may be called from the test's thread.

    Set ``recording = False`` to acknowledge no results, ``refusal`` to an error record to refuse the
    next Hellos, ``admit_keys = False`` to know no new key. ``results`` are all that came, repeats included.
    ``submitter`` is the identity that tasks are submitted by, unless their options name another one.
    ``answer_pull`` answers requests for files of other endpoints, if ``file_piece_bytes`` says that there are any; what
    the agent answered to :meth:`want_file` is in ``file_reads``.
    """

    def __init__(self, *, heartbeat_s: float = 5.0) -> None:
        super().__init__(heartbeat_s=heartbeat_s, checks_keys=True)
        self.recording = True
        self.refusal: dict[str, Any] | None = None
        self.admit_keys = True
        self.hellos: list[wire.Hello] = []
        self.transitions: list[wire.TaskTransition] = []
        self.results: list[wire.ResultSpec] = []
        self.reports: list[wire.EndpointReport] = []
        self.goodbyes: list[wire.Goodbye] = []
        self.accepted: list[str] = []
        self.serializer = Serializer()
        self.submitter = wire.new_id()
        self.forget: tuple[wire.TaskRef, ...] = ()
        self.file_piece_bytes = 0
        self.answer_pull: Callable[[wire.FilePull], wire.FilePiece | None] = lambda _: None
        self.pulls: list[wire.FilePull] = []
        self.files_taken: list[str] = []
        self.file_reads: list[wire.FileRead] = []
        self._ended: dict[str, Ended] = {}
        self._tasks: dict[str, _Task] = {}
        self._waiting: collections.deque[str] = collections.deque()
        self._bodies: dict[str, bytes] = {}
        self._signatures: dict[str, str] = {}
        self._sent_functions: set[tuple[str, str]] = set()
        self._session: wire.Session | None = None
        self.http = FakeHttp(self._connect)
        self.start()

    def close(self) -> None:
        super().close()
        self.http.close()

    # -- what tests do -------------------------------------------------------------------------------------------------

    def submit(self, function: Callable[..., Any], *args: object, **options: Any) -> str:
        """Queue one task; ``options`` are those of tasks, and other fields of a TaskSpec."""
        return self.submit_many(function, [args], **options)[0]

    def submit_many(self, function: Callable[..., Any], calls: Iterable[Sequence[object]], **options: Any) -> list[str]:
        """Queue a task for each tuple of arguments."""
        return self.submit_raw(
            self.serializer.pack_function(function), [self.serializer.pack_call(args) for args in calls], **options
        )

    def submit_graph(self, functions: Sequence[Callable[..., Any]], payload: bytes, **options: Any) -> str:
        """Queue a task whose stages call these functions."""
        bodies = [self.serializer.pack_function(each) for each in functions]
        callees = tuple(Callee(f"id-{number}", hashlib.sha256(body).hexdigest()) for number, body in enumerate(bodies))
        for body in bodies:
            self.submit_raw(body, [])  # the next message has it
        return self.submit_raw(bodies[-1], [payload], callees=callees, **options)[0]

    def submit_raw(self, body: bytes, payloads: Sequence[bytes], *, signature: str = "", **options: Any) -> list[str]:
        """Queue tasks with ready bytes. The name of each function is f."""
        function_hash = hashlib.sha256(body).hexdigest()
        given = {name: options.pop(name) for name in TaskOptions.__struct_fields__ if name in options}
        tasks = []
        for payload in payloads:
            task_id = str(options.pop("task_id", None) or wire.new_task_id())
            blob = self._store(payload) if len(payload) > MAX_INLINE_BYTES else None
            spec = wire.TaskSpec(
                task_id=task_id,
                attempt=0,
                function_hash=function_hash,
                options=TaskOptions(**given),
                payload_blob=blob,
                **{"submitter": self.submitter, "function_id": wire.new_id(), **options},
            )
            tasks.append(_Task(spec, payload))

        def queue_them() -> None:
            self._bodies[function_hash], self._signatures[function_hash] = body, signature
            for task in tasks:
                self._tasks[task.spec.task_id] = task
                self._waiting.append(task.spec.task_id)
            self._dispatch()

        self._call(queue_them)
        return [task.spec.task_id for task in tasks]

    def cancel(self, *task_ids: str) -> None:
        """Order the endpoint to stop tasks."""
        self._call(lambda: self._send(wire.CancelTasks(task_ids=task_ids)))

    def want_file(self, path: str, *, submitter: str, offset_bytes: int = 0, max_bytes: int = 0) -> wire.FileRead:
        """What the endpoint answers to a request for a piece of a file."""
        wanted = wire.FileWanted(
            request_id=wire.new_id(),
            submitter=submitter,
            path=path,
            offset_bytes=offset_bytes,
            max_bytes=max_bytes,
        )
        self._call(lambda: self._send(wanted))

        def found() -> wire.FileRead | None:
            return next((each for each in self.file_reads if each.request_id == wanted.request_id), None)

        self.wait_for(lambda: found() is not None)
        read = found()
        assert read is not None
        return read

    def wait_connected(self, *, timeout_s: float = WAIT_S) -> None:
        """Wait for an open session."""
        self.wait_for(lambda: self._session is not None and self._session.phase is wire.Phase.OPEN, timeout_s=timeout_s)

    @property
    def ended(self) -> int:
        """How many tasks have ended."""
        return len(self._ended)

    def has_ended(self, task_id: str) -> bool:
        """Whether a task has ended."""
        return task_id in self._ended

    def ends(self, task_ids: Sequence[str], *, timeout_s: float = WAIT_S) -> list[Ended]:
        """Wait until tasks have ended."""
        missing = collections.deque(task_ids)

        def all_in() -> bool:
            while missing and missing[0] in self._ended:
                missing.popleft()
            return not missing

        self.wait_for(all_in, timeout_s=timeout_s)
        return [self._ended[task_id] for task_id in task_ids]

    def end(self, task_id: str, *, timeout_s: float = WAIT_S) -> Ended:
        """Wait until a task has ended."""
        return self.ends([task_id], timeout_s=timeout_s)[0]

    # -- the forwarder's thread ----------------------------------------------------------------------------------------

    def _maintain(self) -> float:
        if self._session is None:
            return super()._maintain()
        now = time.monotonic()
        if self._session.heartbeat_due(now=now):
            self._send(wire.Heartbeat(at=time.time()))
        return self._session.next_deadline() - now

    def _vanish(self) -> None:
        super()._vanish()
        self._session = None

    def _connect(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            if self.admit_keys:
                self.keys.add(body["public_key"])
            if self._socket is None:
                return {
                    "http_status_code": 503,
                    "code": "NO_FORWARDER",
                    "message": "no forwarder lives",
                    "fault": "us",
                    "retryable": True,
                }
            return {**self.connection, "endpoint_id": ENDPOINT_ID, "owner_id": self.submitter}

    def _receive(self, identity: bytes, envelope: wire.Envelope) -> None:
        message, now = envelope.message, time.monotonic()
        if isinstance(message, wire.Hello):
            self._peer = identity
            self._session = wire.Session(
                wire.Role.FORWARDER, facing=wire.Role.AGENT, heartbeat_s=self.heartbeat_s, now=now
            )
        if self._session is None or identity != self._peer:
            return
        self._session.received(message, now=now)
        match message:
            case wire.Hello():
                self._on_hello(message)
            case wire.Credit():
                self._dispatch()
            case wire.TasksAccepted(tasks=refs):
                for ref in refs:
                    self._tasks[ref.task_id].accepted = True
                    self.accepted.append(ref.task_id)
            case wire.TaskTransitions(transitions=transitions):
                self.transitions.extend(transitions)
            case wire.TaskResults(results=specs):
                self._take_results(specs, envelope.frames)
            case wire.BlobRequest() as request:
                self._grant(request)
            case wire.FilePull():
                self.pulls.append(message)
                if (piece := self.answer_pull(message)) is not None:
                    self._send(piece)
            case wire.FilesTaken(request_ids=request_ids):
                self.files_taken.extend(request_ids)
            case wire.FileRead():
                self.file_reads.append(message)
            case wire.Heartbeat(report=report):
                if report is not None:
                    self.reports.append(report)
            case wire.Goodbye():
                self.goodbyes.append(message)
                self._session = None
            case _:
                pass

    def _on_hello(self, hello: wire.Hello) -> None:
        self.hellos.append(hello)
        if self.refusal is not None:
            self._send(wire.Refused(error=self.refusal))
            self._session = None
            return
        self._sent_functions.clear()
        self._send(
            wire.Welcome(
                session_id=wire.new_id(),
                forwarder_id="fake",
                protocol_version=1,
                heartbeat_s=self.heartbeat_s,
                forget=self.forget,
                file_piece_bytes=self.file_piece_bytes,
            )
        )
        held = {task.task_id for task in hello.held}
        for task_id, task in self._tasks.items():
            if task_id not in held and task_id not in self._ended and task_id not in self._waiting:
                self._waiting.append(task_id)
                assert not task.accepted, f"the agent forgot {task_id}, which it had accepted"

    def _dispatch(self) -> None:
        session = self._session
        if session is None or session.phase is not wire.Phase.OPEN:
            return
        while self._waiting and session.credit:
            frames: list[bytes] = []
            functions: list[wire.FunctionSpec] = []
            specs: list[wire.TaskSpec] = []
            for _ in range(min(session.credit, len(self._waiting), 500)):
                task = self._tasks[self._waiting.popleft()]
                callees = [each.function_hash for each in task.spec.options.callees]
                for name in (task.spec.function_hash, *(each for each in callees if each in self._bodies)):
                    signature = self._signatures[name]
                    if (name, signature) not in self._sent_functions:
                        self._sent_functions.add((name, signature))
                        functions.append(
                            wire.FunctionSpec(function_hash=name, name="f", body=len(frames), signature=signature)
                        )
                        frames.append(self._bodies[name])
                changes: dict[str, Any] = {"attempt": task.spec.attempt + 1}
                if task.spec.payload_blob is None:
                    changes["payload"] = len(frames)
                    frames.append(task.payload)
                task.spec = msgspec.structs.replace(task.spec, **changes)
                specs.append(task.spec)
            self._send(wire.RunTasks(tasks=tuple(specs), functions=tuple(functions)), tuple(frames))

    def redeliver(self, *task_ids: str) -> None:
        """Send tasks again with the next attempt number, as after an expired lease."""

        def again() -> None:
            self._waiting.extend(task_ids)
            self._dispatch()

        self._call(again)

    def _take_results(self, specs: Sequence[wire.ResultSpec], frames: Sequence[bytes]) -> None:
        self.results.extend(specs)
        for spec in specs:
            if spec.task_id in self._ended:
                continue
            buffer = None
            if spec.result is not None:
                buffer = frames[spec.result]
            elif spec.result_blob is not None:
                buffer = self.http.blobs[spec.result_blob.blob_key]
                assert hashlib.sha256(buffer).hexdigest() == spec.result_blob.sha256
            value: object = buffer
            if buffer is not None and not is_sealed(buffer):
                with contextlib.suppress(DeserializationError):  # forged: it stays bytes
                    value = self.serializer.deserialize(buffer)
            self._ended[spec.task_id] = Ended(spec.state, value, spec.error or {}, spec)
        if self.recording:
            refs = tuple(wire.TaskRef(task_id=spec.task_id, attempt=spec.attempt) for spec in specs)
            self._send(wire.ResultsRecorded(tasks=refs))

    def _grant(self, request: wire.BlobRequest) -> None:
        key = f"results/{request.sha256}"
        self._send(
            wire.BlobGrant(
                task_id=request.task_id,
                attempt=request.attempt,
                blob_key=key,
                upload_url=f"{self.http.url}/blobs/{key}",
                headers={"Content-Type": "application/octet-stream"},
            )
        )

    def _store(self, payload: bytes) -> wire.BlobLocation:
        sha256 = hashlib.sha256(payload).hexdigest()
        self.http.blobs[sha256] = payload
        url = f"{self.http.url}/blobs/{sha256}"
        return wire.BlobLocation(blob_key=sha256, size_bytes=len(payload), sha256=sha256, url=url)

    def _send(self, message: wire.Message, frames: Sequence[bytes] = ()) -> None:
        if self._session is None or self._socket is None:
            return
        self._session.sent(message, now=time.monotonic())
        super()._send(message, frames)
