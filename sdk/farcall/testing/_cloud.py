"""Fake cloud: the API in memory, behind an httpx transport, with an endpoint that runs calls in this process."""

from __future__ import annotations

import base64
import contextvars
import dataclasses
import hashlib
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import httpx
import msgspec

from farcall._batch import encode_payload
from farcall._client import Client
from farcall.testing._files import FileProblem, TaskFiles, source_id, source_names
from farcall.testing._graphs import GraphFailed, GraphRun, ValueGone, with_values
from farcall.testing._registry import Registry
from farcall.testing._targets import TARGET, Targets, read_target, shown_target
from farcall.testing._tasks import Endpoint, Listings, Task, read_json, refusal
from farcall.testing._tokens import Tokens
from farcall_common import running
from farcall_common.errors import (
    BlobUnknown,
    ConfigurationError,
    Conflict,
    ErrorRecord,
    FarcallError,
    InvalidRequest,
    NoForwarder,
    NotFound,
    PayloadTooLarge,
    TaskCancelled,
    TaskDeadLettered,
    TaskIdReused,
    TaskUnknown,
    Unauthenticated,
)
from farcall_common.file_arguments import without_files
from farcall_common.graphs import StageState, is_graph, unpack_graph
from farcall_common.http_errors import REQUEST_ID
from farcall_common.limits import MAX_INLINE_BYTES, MAX_PAYLOAD_BYTES
from farcall_common.objects.node_blocks import OneNode
from farcall_common.payload import (
    BINARY_DATA,
    PORTABLE_DATA,
    PickleOutOfBand,
    Serializer,
    Strategy,
    describe_exception,
    pack_exception,
    strategy_named,
)
from farcall_common.progress import PROGRESS, clean_progress
from farcall_common.retries import is_retried
from farcall_common.staging import FILES, STAGING, Staging
from farcall_common.wire import Reporter, TaskState, is_uuid

Json = dict[str, Any]

_API_URL: Final = "https://farcall.test"
_BLOB_URL: Final = "https://blobs.farcall.test"
#: Frames of these are left out of tracebacks, as an endpoint leaves out its own.
_OURS: Final = frozenset({"farcall", "farcall_common"})

_serializer: Final = Serializer()

#: The task that runs in this thread.
_here: Final[contextvars.ContextVar[running.RunningTask | None]] = contextvars.ContextVar("farcall_task", default=None)
running.offer_here(_here.get)


class _TaskHere:
    """A task that runs in this process, for ``current()``."""

    def __init__(self, cloud: FakeCloud, task: Task) -> None:
        self.task_id = task.task_id
        self.attempt = task.attempt
        self._cloud = cloud
        self._is_shown = not is_graph(without_files(task.payload))  # of stages nothing is
        self._lock = threading.Lock()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def scratch(self) -> Path:
        with self._lock:
            if self._scratch is None:
                self._scratch = tempfile.TemporaryDirectory(prefix="farcall-", ignore_cleanup_errors=True)
            return Path(self._scratch.name)

    def shared_dir(self) -> Path:
        return self._cloud.shared_dir

    def memory_dir(self) -> Path | None:
        return None

    def node_memory(self) -> OneNode:
        return OneNode(None)

    def valkey_url(self) -> str:
        if self._cloud.valkey_url is None:
            raise ConfigurationError(
                "This FakeCloud has no Valkey.", hint="Set its valkey_url to the address of a server for tests."
            )
        return self._cloud.valkey_url

    def end(self) -> None:
        """The task has ended."""
        with self._lock:
            if self._scratch is not None:
                self._scratch.cleanup()

    def submit(self, *_: object) -> Any:
        raise ConfigurationError(
            "A FakeCloud makes no calls of running tasks.", hint="Test the function that calls others at an endpoint."
        )

    def buffer(self, size: int) -> memoryview:
        return memoryview(bytearray(size))

    def progress(self, done: float, total: float | None, text: str) -> None:
        if self._is_shown:
            self._cloud.report_progress(self.task_id, done, total, text)


class FakeCloud:
    """A deployment in memory with one endpoint, which runs calls in threads of this process.

    ::

        with FakeCloud() as cloud, Executor(cloud.endpoint_id, client=cloud.client()) as executor:
            assert executor.submit(pow, 2, 10).result() == 1024

    Calls go through the same client, requests and serialisation as with a real deployment. Results are polled: there
    is no result stream. Nothing isolates the calls from the test, and one that runs cannot be stopped.

    :param workers: how many calls run at a time. With 0 the endpoint is offline: tasks wait until :meth:`start` or
        :meth:`run_waiting`.
    :param files: content of files by URL, for calls with a :class:`~farcall.File`. Those that calls write are in
        :attr:`files` afterwards; ``file://`` is a path of this machine. ``endpoint://NAME/path`` makes NAME an
        endpoint that has files and runs nothing.
    """

    token: Final = "fake-token"  # noqa: S105 - not a secret

    def __init__(self, *, workers: int = 4, files: Mapping[str, bytes] | None = None) -> None:
        #: Content of the files in storage, by URL.
        self.files: dict[str, bytes] = dict(files or {})
        self.transport: Final = httpx.MockTransport(self._answer)
        self._owner_id = str(uuid.uuid4())
        self._lock = threading.RLock()
        self._registry = Registry()
        self._accounts = Tokens(owner_id=self._owner_id)
        self._tasks: dict[str, Task] = {}
        self._blobs: dict[str, bytes] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._shared: tempfile.TemporaryDirectory[str] | None = None
        #: What ``current().valkey_url()`` is in tasks; None: they get an error.
        self.valkey_url: str | None = None
        #: Called with the id of each task that starts to run.
        self.on_start: Callable[[str], object] = _nothing
        self._endpoint = Endpoint(self._tasks, owner_id=self._owner_id, others=self._sources)
        self.endpoint_id: Final = self._endpoint.endpoint_id
        self._targets = Targets(check=self._endpoint.check)
        routes: tuple[tuple[str, str, Callable[..., Any]], ...] = (
            ("GET", "/v2/version", self._get_version),
            ("GET", "/v3/whoami", self._whoami),
            *self._registry.routes,
            *self._accounts.routes,
            *self._endpoint.routes,
            *self._targets.routes,
            *Listings(self._tasks, owner_id=self._owner_id, name_of=self._name_of).routes,
            ("POST", "/v3/endpoints/([^/]+)/submit", self._submit),
            ("GET", "/v2/tasks/([^/]+)", self._get_task),
            ("POST", "/v2/batch_status", self._batch_status),
            ("POST", "/v3/batch_output", self._batch_output),
            ("POST", "/v3/tasks/cancel", self._cancel),
            ("GET", "/v3/endpoints/([^/]+)/tasks", self._list_endpoint_tasks),
            ("POST", "/v3/endpoints/([^/]+)/tasks/cancel", self._cancel_endpoint_tasks),
            ("GET", "/v3/tasks/([^/]+)/events", self._list_events),
            ("POST", "/v3/tasks/([^/]+)/retry", self._retry),
            ("POST", "/v3/tasks/([^/]+)/discard", self._discard),
            ("GET", "/v3/tasks/([^/]+)/why", self._why),
            ("POST", "/v3/blobs", self._grant_blob),
            ("POST", "/v3/stream", self._open_stream),
        )
        self._routes = [(method, re.compile(pattern), handle) for method, pattern, handle in routes]
        if workers:
            self.start(workers=workers)

    def __enter__(self) -> FakeCloud:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def runtime(self) -> Json:
        """The runtime that the endpoint reports; a test may set another Python, although calls run in this one."""
        return self._endpoint.runtime

    @runtime.setter
    def runtime(self, value: Json) -> None:
        self._endpoint.runtime = value

    @property
    def is_owned(self) -> bool:
        """Whether the endpoint belongs to the client's user; set it to False for one that others share."""
        return self._endpoint.is_owned

    @is_owned.setter
    def is_owned(self, value: bool) -> None:
        self._endpoint.is_owned = value

    def client(self) -> Client:
        """A client of this cloud."""
        return Client(_API_URL, self.token, transport=self.transport)

    def start(self, *, workers: int = 4) -> None:
        """Bring the endpoint online: it runs waiting and later tasks."""
        with self._lock:
            self._pool = ThreadPoolExecutor(workers, thread_name_prefix="fake-worker")
            self._endpoint.is_online = True
            for task in self._tasks.values():
                if not task.state.is_terminal:
                    self._pool.submit(self._run, task)

    def run_waiting(self) -> None:
        """Run the waiting tasks in this thread, and return when they have ended. For an endpoint that is offline."""
        with self._lock:
            waiting = [task for task in self._tasks.values() if not task.state.is_terminal]
        for task in waiting:
            self._run(task)

    def dead_letter(self, task_id: str) -> None:
        """End a waiting task as a dead letter, as if it had ended its worker in each attempt."""
        with self._lock:
            task = self._task(task_id)
            hint = f"`farcall tasks retry {task_id}` runs it again; `farcall tasks discard {task_id}` forgets it."
            message, reasons = "The worker process died while it ran the task.", ("killed by SIGKILL",)
            code = TaskDeadLettered.code
            task.error = ErrorRecord(code, message, hint, endpoint_id=task.endpoint_id, reasons=reasons)
            task.move(TaskState.DEAD_LETTERED, Reporter.FORWARDER)

    def write_output(self, task_id: str, *, stdout: str = "", stderr: str = "") -> None:
        """Add to the output of a task, as if it had printed this. What calls really print is this process's output."""
        with self._lock:
            task = self._task(task_id)
            task.stdout += stdout.encode()
            task.stderr += stderr.encode()

    def report_stages(self, task_id: str, stages: Sequence[StageState]) -> None:
        """Set how the stages of a running task are, as if its endpoint had reported this. Of those that run here, the
        state is known when the task ends."""
        with self._lock:
            self._task(task_id).stages = msgspec.to_builtins(stages)

    def report_progress(self, task_id: str, done: float, total: float | None = None, text: str = "") -> None:
        """Set how far a task is, as if its function had said so with ``current().progress``."""
        with self._lock:
            progress = clean_progress(done, total, text, time.time())
            self._task(task_id).progress = None if progress is None else progress.to_json()

    def report_latencies(self, report: Mapping[str, Any]) -> None:
        """Set what the endpoint reports of latency targets: ``functions``, ``admission`` and so on, as in PROTOCOL.md.

        :raises ValueError: for a function that cannot be read.
        """
        self._targets.set(report)

    @property
    def shared_dir(self) -> Path:
        """The ``current().shared_dir`` of all tasks: a temporary directory, until :meth:`close`."""
        with self._lock:
            if self._shared is None:
                self._shared = tempfile.TemporaryDirectory(prefix="farcall-", ignore_cleanup_errors=True)
            return Path(self._shared.name)

    def report_staging(self, task_id: str, staging: Staging | None) -> None:
        """Set which files of a task move, as if its endpoint had reported this; None: none any more."""
        with self._lock:
            self._task(task_id).staging = None if staging is None else staging.to_json()

    def close(self) -> None:
        """Let running calls end; waiting ones never start."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        with self._lock:
            if self._shared is not None:
                self._shared.cleanup()
                self._shared = None

    # -- the endpoint --------------------------------------------------------------------------------------------------

    def _run(self, task: Task) -> None:
        with self._lock:
            if task.ended():
                return
            task.attempt = task.attempt or 1
            task.move(TaskState.RUNNING, Reporter.AGENT)
            body = self._registry.function(f"{task.function_id}@{task.function_version}")["function_code"].encode()
        self.on_start(task.task_id)
        started_at = time.time()
        result: bytes | None = None
        error: ErrorRecord | None = None
        is_called = is_to_retry = False
        details: Json = {}
        copied: list[Json] = []

        def describe(raised: BaseException) -> ErrorRecord:
            if isinstance(raised, FileProblem | ValueGone):
                return dataclasses.replace(raised.record, attempt=task.attempt, endpoint_id=task.endpoint_id)
            found = describe_exception(raised, attempt=task.attempt, endpoint_id=task.endpoint_id, own_packages=_OURS)
            return dataclasses.replace(found, exception_data=_exception_data(task, raised))

        here = _TaskHere(self, task)
        running_task = _here.set(running.RunningTask(here))
        payload = without_files(task.payload)
        try:
            with TaskFiles(self.files) as files:
                if is_graph(payload):
                    graph = unpack_graph(payload, callees=len(task.callees))
                    functions = [files.checked(self._function(each)) for each in task.callees]
                    run = GraphRun(graph, functions, _serializer, describe)
                    try:
                        value = run.run()
                    finally:
                        details = run.details(failed=graph.output not in run)
                else:
                    function = files.checked(_serializer.unpack_function(body))
                    args, kwargs = with_values(*_serializer.unpack_call(payload))
                    is_called = True
                    value = function(*args, **kwargs)
                    is_called = False
                result = files.serialized(partial(_serializer.serialize, value, strategies=_strategies(task)))
                copied = [each.to_json() for each in files.copied]
        except GraphFailed as failure:
            error = failure.record
        except BaseException as raised:  # noqa: BLE001 - user code may raise anything; it is reported
            error = describe(raised)
            is_to_retry = is_called and task.retries_used < task.retries and is_retried(raised, task.retry_on)
            is_to_retry = is_to_retry and not isinstance(raised, FileProblem)
        finally:
            _here.reset(running_task)
            here.end()
        with self._lock:
            if task.ended():
                return  # cancelled meanwhile
            if error is not None and is_to_retry and self._pool is not None:
                task.retries_used += 1
                task.progress = None
                retry = {"retry": task.retries_used, "retries": task.retries, "retry_at": time.time()}
                task.move(TaskState.WAITING_FOR_NODES, Reporter.AGENT, **retry, error=error.exception_type)
                self._pool.submit(self._run, task)
                return
            task.details |= details | ({FILES: copied} if copied else {})
            if task.progress is not None:
                task.details |= {PROGRESS: task.progress}
            if task.retries_used:
                task.details |= {"retries_used": task.retries_used}
                error = error and dataclasses.replace(error, retries_used=task.retries_used)
            task.result, task.error = result, error
            task.timings |= {"started_at": started_at, "ended_at": time.time()}
            task.move(TaskState.FAILED if error else TaskState.SUCCESS, Reporter.AGENT)

    # -- the API -------------------------------------------------------------------------------------------------------

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if str(request.url).startswith(_BLOB_URL):
            return self._answer_blob(request)
        answer = self._answer_api(request)
        answer.headers[REQUEST_ID] = request.headers.get(REQUEST_ID, "")
        return answer

    def _answer_api(self, request: httpx.Request) -> httpx.Response:
        try:
            token = request.headers.get("authorization", "").removeprefix("Bearer ")
            if token != self.token and not self._accounts.accepts(token):
                raise Unauthenticated("unknown token")
            for method, pattern, handle in self._routes:
                match = pattern.fullmatch(request.url.path)
                if match and method == request.method:
                    body = read_json(request.content) if request.content else dict(request.url.params)
                    with self._lock:
                        return httpx.Response(200, content=msgspec.json.encode(handle(body, *match.groups())))
            raise NotFound(f"no route {request.method} {request.url.path}")
        except FarcallError as error:
            return refusal(error)

    def _answer_blob(self, request: httpx.Request) -> httpx.Response:
        key = request.url.path.lstrip("/")
        if request.method == "PUT":
            if hashlib.sha256(request.content).hexdigest() != key.rpartition("/")[2]:
                return httpx.Response(400, text="the bytes are not those that were announced")
            self._blobs[key] = request.content
            return httpx.Response(200)
        return httpx.Response(200, content=self._blobs[key]) if key in self._blobs else _no_such_key()

    def _get_version(self, _: Json) -> Json:
        return {
            "api": "0.1.0",
            "min_sdk_version": "0.1.0",
            "min_ep_version": "0.1.0",
            "min_endpoint_version": "0.1.0",
            "git_sha": "",
        }

    def _whoami(self, _: Json) -> Json:
        limits = self._registry.quotas() | {"max_payload_bytes": MAX_PAYLOAD_BYTES}
        who: Json = {"identity_id": self._owner_id, "username": "fake", "linked": [], "provider": "dev"}
        return who | {"limits": limits}

    def _submit(self, body: Json, endpoint_id: str) -> Json:
        self._endpoint.check(endpoint_id)
        group_id = body.get("task_group_id") or str(uuid.uuid4())
        ids = body.get("task_ids") or {key: [str(uuid.uuid4()) for _ in each] for key, each in body["tasks"].items()}
        tasks = []
        self._registry.check_environments(body)
        called = map(self._registry.function, body.get("callees") or ())
        callees = [f"{each['function_uuid']}@{each['version']}" for each in called]
        for reference, payloads in body["tasks"].items():
            function = self._registry.function(reference)
            function_id = function["function_uuid"]
            memoize = function["metadata"].get("memoize") if body.get("memoize") is None else body["memoize"]
            for task_id, payload in zip(ids[reference], payloads, strict=True):
                if not is_uuid(task_id):
                    raise InvalidRequest(f"{task_id!r} is not a UUID")
                task = Task(task_id, group_id, endpoint_id, function_id, self._payload(payload))
                task.function_version = function["version"]
                task.memo_key = (function["function_hash"], task.payload, tuple(callees)) if memoize else None
                task.result_serializers = body.get("result_serializers") or ()
                task.callees = callees
                task.qos = read_target(function["metadata"].get(TARGET) if body.get("qos") is None else body["qos"])
                task.retries, task.retry_on = body.get("retries", 0), body.get("retry_on") or ()
                known = self._tasks.get(task_id)
                if known is None:
                    tasks.append(task)
                elif (known.function_id, known.payload) != (function_id, task.payload):
                    raise TaskIdReused(f"task id {task_id} names another task already")
        asked = {task.function_id: task.qos for task in tasks}
        named = {reference: self._registry.function(reference)["function_uuid"] for reference in body["tasks"]}
        warnings = self._targets.check({name: (id_, asked[id_]) for name, id_ in named.items() if id_ in asked})
        for task in tasks:
            source = self._memoized(task)
            self._tasks[task.task_id] = task
            task.timings["submitted_at"] = time.time()
            task.move(TaskState.RECEIVED, Reporter.API)
            if source is not None:
                task.result, task.memo_key, task.details = source.result, None, _memoized_from(source)
                task.move(TaskState.SUCCESS, Reporter.API)
            elif self._pool is not None:
                self._pool.submit(self._run, task)
        results = {task.task_id: self._shown(task) for task in tasks if "memoized_from" in task.details}
        answer = {"request_id": str(uuid.uuid4()), "task_group_id": group_id, "endpoint_id": endpoint_id, "tasks": ids}
        answer |= {"warnings": warnings} if warnings else {}
        return answer | ({"results": results} if results else {})

    def _memoized(self, task: Task) -> Task | None:
        equal = (each for each in self._tasks.values() if task.memo_key and each.memo_key == task.memo_key)
        return next((each for each in equal if each.state is TaskState.SUCCESS), None)

    def _payload(self, payload: str | Json) -> bytes:
        if isinstance(payload, str):
            data = payload.encode()
        elif "base64" in payload:
            data = base64.b64decode(payload["base64"])
        elif payload["blob_key"] in self._blobs:
            data = self._blobs[payload["blob_key"]]
        else:
            raise BlobUnknown(f"there is no blob {payload['blob_key']}")
        if len(data) > MAX_PAYLOAD_BYTES:
            raise PayloadTooLarge(f"a payload has {len(data)} bytes")
        return data

    def _get_task(self, _: Json, task_id: str) -> Json:
        task = self._task(task_id)
        stages = task.details.get("stages") or task.stages
        shown = self._shown(task) | ({"stages": stages} if stages else {})
        shown |= {STAGING: task.staging} if task.staging and not task.ended() else {}
        return shown | ({"progress": task.progress} if task.progress else {})

    def _batch_status(self, body: Json) -> Json:
        shown = {id_: self._shown(self._tasks[id_]) for id_ in body["task_ids"] if id_ in self._tasks}
        unknown = [id_ for id_ in body["task_ids"] if id_ not in self._tasks]
        return {"response": "batch", "results": shown} | ({"unknown": unknown} if unknown else {})

    def _batch_output(self, body: Json) -> Json:
        wanted = [each for each in body["tasks"] if each["task_id"] in self._tasks]
        return {"results": {each["task_id"]: self._tasks[each["task_id"]].output(each) for each in wanted}}

    def _list_events(self, _: Json, task_id: str) -> Json:
        return {"task_id": task_id, "events": self._task(task_id).events}

    def _retry(self, body: Json, task_id: str) -> Json:
        task = self._task(task_id)
        if not task.state.is_terminal or task.discarded:
            raise Conflict(f"task {task_id} is {task.state}" + (" and discarded" if task.discarded else ""))
        new_id = body.get("task_id") or str(uuid.uuid4())
        again = {"task_group_id": task.task_group_id, "memoize": False, "task_ids": {task.function_id: [new_id]}}
        self._submit(
            again | {"tasks": {task.function_id: [msgspec.json.decode(encode_payload(task.payload))]}}, task.endpoint_id
        )
        self._tasks[new_id].retry_of = task_id
        return {"task_id": new_id, "retry_of": task_id, "task_group_id": task.task_group_id}

    def _discard(self, _: Json, task_id: str) -> Json:
        task = self._task(task_id)
        if task.state is not TaskState.DEAD_LETTERED:
            raise Conflict(f"task {task_id} is {task.state}", hint="Only a dead letter can be discarded.")
        task.discarded, task.payload = True, b""
        return {"task_id": task_id, "outcome": "discarded"}

    def _why(self, _: Json, task_id: str) -> Json:
        task = self._task(task_id)
        waiting = [each.task_id for each in self._tasks.values() if each.state is TaskState.RECEIVED]
        if task.ended():
            reason, text = "ENDED", f"The task ended as {task.state}."
        elif task.state is TaskState.RUNNING:
            reason, text = "RUNNING", f"It is running (attempt {task.attempt})."
        elif self._endpoint.is_online:
            reason, text = "WORKERS_BUSY", "Endpoint fake is online, and its workers are busy."
        else:
            reason, text = "ENDPOINT_NEVER_SEEN", "Endpoint fake was never online."
        place = waiting.index(task_id) if task_id in waiting else None
        since = task.events[-1]["at"]
        endpoint = {"endpoint_id": task.endpoint_id, "name": "fake", "seen_at": None, "problem": ""}
        return {
            "task_id": task_id,
            "reason": reason,
            "text": text,
            "state": str(task.state),
            "state_since": since,
            "state_age_s": time.time() - since,
            "expires_at": None,
            "attempt": task.attempt,
            "queue_position": place,
            "queue_depth": len(waiting),
            "queue_submitters": 1 if waiting else 0,
            "endpoint": endpoint | self._endpoint.status(),
            **({} if task.ended() else self._targets.why(task.function_id, task.qos)),
        }

    def _cancel(self, body: Json) -> Json:
        return {"results": {task_id: self._cancel_one(task_id) for task_id in body["task_ids"]}}

    def _list_endpoint_tasks(self, query: Json, endpoint_id: str) -> Json:
        self._endpoint.check(endpoint_id)
        entries = [
            {
                "task_id": task.task_id,
                "submitter": self._owner_id,
                "function_id": task.function_id,
                "function_version": task.function_version,
                "status": str(task.state),
                "age_s": max(0.0, time.time() - task.events[0]["at"]),
            }
            for task in sorted(self._tasks.values(), key=lambda task: task.task_id)
            if not task.ended()
            and query.get("submitter") in (None, self._owner_id)
            and query.get("function_id") in (None, task.function_id)
        ]
        return {"tasks": entries}

    def _cancel_endpoint_tasks(self, body: Json, endpoint_id: str) -> Json:
        by_kind = "submitter" in body or "function_id" in body
        if by_kind == ("task_ids" in body):
            raise InvalidRequest("which tasks to cancel is not clear")
        ids = body.get("task_ids")
        if ids is None:
            ids = [each["task_id"] for each in self._list_endpoint_tasks(body, endpoint_id)["tasks"]]
        return self._cancel({"task_ids": ids})

    def _cancel_one(self, task_id: str) -> Json:
        task = self._tasks.get(task_id)
        if task is None:
            return {"task_id": task_id, "outcome": "unknown"}
        if task.state.is_terminal:
            return {"task_id": task_id, "outcome": "finished", "status": str(task.state)}
        task.error = TaskCancelled("The task was cancelled.", hint="").record
        task.move(TaskState.CANCELLED, Reporter.API)
        return {"task_id": task_id, "outcome": "cancelled", "status": str(task.state)}

    def _grant_blob(self, body: Json) -> Json:
        if body["size_bytes"] > MAX_PAYLOAD_BYTES:
            raise PayloadTooLarge(f"a payload has {body['size_bytes']} bytes")
        key = f"{self._owner_id}/{body['sha256']}"
        return {"blob_key": key, "upload_url": f"{_BLOB_URL}/{key}", "headers": {}}

    def _open_stream(self, _: Json) -> Json:
        raise NoForwarder("results are polled here", retry_after_s=60.0)

    def _function(self, reference: str) -> Callable[..., Any]:
        return _serializer.unpack_function(self._registry.function(reference)["function_code"].encode())

    def _sources(self) -> dict[str, str]:
        """The endpoints that have files, by name."""
        return {name: source_id(name) for name in source_names(tuple(self.files))}

    def _name_of(self, object_id: str) -> str | None:
        return "fake" if object_id == self.endpoint_id else self._registry.name_of(object_id)

    def _task(self, task_id: str) -> Task:
        if task_id not in self._tasks:
            raise TaskUnknown(f"there is no task {task_id}")
        return self._tasks[task_id]

    def _shown(self, task: Task) -> Json:
        shown: Json = {
            **task.summary(),
            "details": task.details,
            "timings": task.timings,
            **({"retry_of": task.retry_of} if task.retry_of else {}),
            **shown_target(task.qos),
            **({"result_serializers": list(task.result_serializers)} if task.result_serializers else {}),
        }
        if task.state.is_terminal:
            shown["completion_t"] = str(task.events[-1]["at"])
        if task.error is not None:
            shown["error"] = task.error.to_json()
            shown["exception"] = task.error.traceback or task.error.message
        elif task.result is not None and len(task.result) <= MAX_INLINE_BYTES:
            shown["result"] = task.result.decode()
        elif task.result is not None:
            sha256 = hashlib.sha256(task.result).hexdigest()
            key = f"{self._owner_id}/{sha256}"
            self._blobs[key] = task.result
            ref = {"blob_key": key, "size_bytes": len(task.result), "sha256": sha256, "url": f"{_BLOB_URL}/{key}"}
            shown["result_ref"] = ref
        return shown


def _nothing(_: str) -> None:
    """No test observes the tasks."""


def _memoized_from(source: Task) -> Json:
    return {"memoized_from": source.task_id, "memoized_endpoint_id": source.endpoint_id}


def _strategies(task: Task) -> Sequence[Strategy]:
    """The strategies for a result, in the choice of its submitter."""
    names = tuple(task.result_serializers)
    if names == (PickleOutOfBand().id,):
        return BINARY_DATA
    return [strategy_named(name) for name in names] or PORTABLE_DATA


def _exception_data(task: Task, error: BaseException) -> str | None:
    """The exception of a call, in the strategies of its submitter."""
    names = task.result_serializers
    if not names or PickleOutOfBand().id in names:
        return pack_exception(error)
    return pack_exception(error, [strategy_named(name) for name in names])


def _no_such_key() -> httpx.Response:
    """The answer of an object store."""
    return httpx.Response(404, text="<Error><Code>NoSuchKey</Code></Error>")
