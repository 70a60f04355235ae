"""A stand-in for Globus Transfer: an HTTP server whose collections are directories, and which really moves files.

It has the part of the Transfer API (v0.10) that the endpoint uses. ``test_globus_service.py`` compares its answers with
those that globus-sdk publishes. The SDK finds it by ``GLOBUS_SDK_SERVICE_URL_TRANSFER``.

A task makes progress when it is asked for, so that a test decides how far it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import threading
import urllib.parse
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

Json = dict[str, Any]

PAGE_FILES: Final = 3
"""Of successful transfers and skipped errors. The real service has far more; so each test sees several pages."""
_TIME: Final = "2026-11-26T12:00:00+00:00"
_CALLER: Final = "46bd0f56-e24f-11e5-a510-131bef46955c"


class Refused(Exception):
    """An answer with an error."""

    def __init__(self, status: int, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.status = status
        self.body: Json = {"code": code, "message": message, "request_id": "ABCdef789", **more}


@dataclasses.dataclass
class Collection:
    """A directory, as Globus sees it, and what is wrong with it."""

    root: Path
    entity_type: str = "GCP_mapped_collection"
    high_assurance: bool = False
    is_connected: bool = True
    needs_consent: bool = False
    disable_verify: bool = False
    denied: set[str] = dataclasses.field(default_factory=set)
    id: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))

    def local(self, path: str) -> Path:
        """The file at a path."""
        return self.root / path.removeprefix("/~").strip("/")

    @property
    def name(self) -> str:
        """As people see it."""
        return f"Collection {self.id[:8]}"


@dataclasses.dataclass
class Task:
    """A transfer."""

    document: Json
    task_id: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))
    status: str = "ACTIVE"
    bytes_transferred: int = 0
    skipped: list[Json] = dataclasses.field(default_factory=list)
    successful: list[Json] = dataclasses.field(default_factory=list)
    events: list[Json] = dataclasses.field(default_factory=list)
    faults: int = 0
    nice_status: str | None = "Queued"
    fatal_error: Json | None = None

    def __post_init__(self) -> None:
        self.waiting: list[Json] = list(self.document["DATA"])

    def add_event(self, code: str, description: str, details: str, *, is_error: bool = False) -> None:
        """The newest event is the first."""
        document = {"DATA_TYPE": "event", "code": code, "is_error": is_error, "time": _TIME}
        self.events.insert(0, document | {"description": description, "details": details})

    def add_fault(self, code: str, description: str, path: str) -> None:
        """An error that Globus retries."""
        self.faults += 1
        self.nice_status = code
        context = [{"operation": "stat", "path": path}]
        error = {"body": f"550-GlobusError: v=1 c={code}\r\n550 End.", "code": 550}
        self.add_event(code, description, json.dumps({"context": context, "error": error}), is_error=True)


@dataclasses.dataclass
class GlobusService:
    """What it has, what was requested, and the faults that a test switches on."""

    url: str = ""
    collections: dict[str, Collection] = dataclasses.field(default_factory=dict)
    tasks: dict[str, Task] = dataclasses.field(default_factory=dict)
    #: Task ids by submission id; None for those that were not used.
    submissions: dict[str, str | None] = dataclasses.field(default_factory=dict)
    #: Methods and paths, in order, and the bearer tokens.
    requests: list[str] = dataclasses.field(default_factory=list)
    tokens: list[str] = dataclasses.field(default_factory=list)
    #: Source and destination of every file that was copied.
    copied: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    refused_tokens: set[str] = dataclasses.field(default_factory=set)
    #: A missing source keeps its task active, although ``skip_source_errors`` was set.
    missing_keeps_active: bool = False
    #: Bytes that a task copies each time that it is asked for; None: all of them.
    bytes_each_time: int | None = None
    #: The next so many requests are answered with 429 and Retry-After.
    too_many: int = 0
    is_down: bool = False
    #: Something else answers, such as the portal of a network.
    is_portal: bool = False
    is_paused: bool = False
    is_inactive: bool = False
    #: The next submitted transfer is accepted, and its answer is lost.
    loses_answer: bool = False
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    held: threading.Event = dataclasses.field(default_factory=threading.Event)
    _hold: tuple[int, bool] | None = None
    _released: threading.Event = dataclasses.field(default_factory=threading.Event)

    def hold(self, later: int, *, is_processed: bool) -> None:
        """Keep the answer to a request: the next one, or that many later; before or after it is processed. ``held`` is
        set then."""
        self._hold = (len(self.requests) + later, is_processed)

    def release(self) -> None:
        """Hold no request any more; those that were held get no answer."""
        self._hold = None
        self._released.set()

    def is_held(self, number: int, *, is_processed: bool) -> bool:
        """Whether a request is held. If so, waits until it is released."""
        if self._hold != (number, is_processed):
            return False
        self.held.set()
        self._released.wait()
        return True

    def add(self, collection: Collection) -> Collection:
        """A new collection."""
        collection.root.mkdir(parents=True, exist_ok=True)
        self.collections[collection.id] = collection
        return collection

    @property
    def task(self) -> Task:
        """The only one."""
        (found,) = self.tasks.values()
        return found

    def count(self, start: str) -> int:
        """The number of requests that start so."""
        return sum(each.startswith(start) for each in self.requests)

    # -- answers -------------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, query: dict[str, str], body: Json) -> Json:
        """:raises Refused: with the error."""
        match method, *path.strip("/").split("/"):
            case "GET", "submission_id":
                found = str(uuid.uuid4())
                self.submissions[found] = None
                return {"value": found}
            case "POST", "transfer":
                return self._submit(body)
            case "GET", "task", task_id:
                return self._document(self._task(task_id), step=True)
            case "POST", "task", task_id, "cancel":
                return self._cancel(self._task(task_id))
            case "GET", "task", task_id, "event_list":
                data = self._task(task_id).events[: int(query.get("limit", 10))]
                return {"DATA_TYPE": "event_list", "DATA": data, "length": len(data), "limit": 10, "offset": 0}
            case "GET", "task", task_id, "successful_transfers":
                return self._page("successful_transfers", self._ended(task_id).successful, query)
            case "GET", "task", task_id, "skipped_errors":
                return self._page("skipped_errors", self._ended(task_id).skipped, query)
            case "GET", "task", _, "pause_info":
                message = "maintenance until Monday" if self.is_paused else None
                return {
                    "DATA_TYPE": "pause_info_limited", "pause_rules": [], "source_pause_message": message,
                    "destination_pause_message": None,
                }  # fmt: skip
            case "GET", "endpoint", collection_id:
                return self._endpoint(self._collection(collection_id))
            case "GET", "operation", "endpoint", collection_id, "ls":
                return self._list(self._reachable(collection_id), query["path"])
            case "GET", "operation", "endpoint", collection_id, "stat":
                return self._stat(self._reachable(collection_id), query["path"])
        raise Refused(404, "ClientError.NotFound", f"No such resource {path}")

    def _collection(self, collection_id: str) -> Collection:
        if (found := self.collections.get(collection_id)) is None:
            raise Refused(404, "EndpointNotFound", f"No such endpoint '{collection_id}'")
        return found

    def _reachable(self, collection_id: str) -> Collection:
        found = self._collection(collection_id)
        if found.needs_consent:
            scope = (
                "urn:globus:auth:scope:transfer.api.globus.org:all"
                f"[*https://auth.globus.org/scopes/{found.id}/data_access]"
            )
            message = "Missing required data_access consent"
            raise Refused(403, "ConsentRequired", message, required_scopes=[scope])
        if not found.is_connected:
            code = "ExternalError.DirListingFailed.GCDisconnected"
            raise Refused(409, code, f"The Globus Connect Personal endpoint '{found.name}' is not connected to Globus")
        return found

    def _list(self, collection: Collection, path: str) -> Json:
        self._check(collection, path)
        directory = collection.local(path)
        if not directory.is_dir():
            raise Refused(404, "ClientError.NotFound", f"Directory '{path}' not found on endpoint '{collection.name}'")
        data = [_file(each) for each in sorted(directory.iterdir())]
        return {
            "DATA_TYPE": "file_list", "DATA": data, "absolute_path": path, "endpoint": collection.id, "path": path,
            "length": len(data), "total": len(data), "rename_supported": True, "symlink_supported": False,
        }  # fmt: skip

    def _stat(self, collection: Collection, path: str) -> Json:
        self._check(collection, path)
        if not collection.local(path).exists():
            message = (
                f"Path not found, Error (list)\nEndpoint: {collection.name} ({collection.id})\nMessage: No such file"
            )
            raise Refused(404, "NotFound", message)
        return _file(collection.local(path))

    def _check(self, collection: Collection, path: str) -> None:
        if _is_denied(collection, path):
            message = f"Denied by endpoint, Error (list)\nEndpoint: {collection.name} ({collection.id})\nCommand: MLST"
            raise Refused(403, "EndpointPermissionDenied", message)

    def _submit(self, body: Json) -> Json:
        submission_id = body["submission_id"]
        if submission_id not in self.submissions:
            raise Refused(400, "ClientError.BadRequest", f"Invalid submission id {submission_id}")
        if not body["DATA"]:
            raise Refused(400, "ClientError.BadRequest.NoTransferItems", "A transfer requires at least one item")
        code, message, task_id = "Duplicate", "The transfer is a duplicate", self.submissions[submission_id]
        if task_id is None:
            for side in ("source_endpoint", "destination_endpoint"):
                if (found := self._collection(body[side])).needs_consent:
                    self._reachable(found.id)
            pairs = _pairs(body)
            if any(task.status == "ACTIVE" and _pairs(task.document) == pairs for task in self.tasks.values()):
                raise Refused(409, "Conflict", "A transfer with identical paths has not yet completed")
            task = Task(body)
            task_id = self.submissions[submission_id] = task.task_id
            self.tasks[task_id] = task
            code = "Accepted"
            message = "The transfer has been accepted and a task has been created and queued for execution"
        link = {"DATA_TYPE": "link", "href": f"/v0.10/task/{task_id}?format=json", "rel": "related"}
        return {
            "DATA_TYPE": "transfer_result", "code": code, "message": message, "request_id": "7HgMVYazI",
            "resource": "/v0.10/transfer", "submission_id": submission_id, "task_id": task_id,
            "task_link": link | {"resource": "task", "title": "related task"},
        }  # fmt: skip

    def _task(self, task_id: str) -> Task:
        if (found := self.tasks.get(task_id)) is None:
            raise Refused(404, "ClientError.NotFound", f"No task found with id '{task_id}'")
        return found

    def _ended(self, task_id: str) -> Task:
        if (found := self._task(task_id)).status == "ACTIVE":
            raise Refused(400, "ClientError.BadRequest", f"Task '{task_id}' is still in progress")
        return found

    def _cancel(self, task: Task) -> Json:
        code, message = "TaskComplete", "The task completed before the cancel request was processed."
        if task.status in ("ACTIVE", "INACTIVE"):
            task.status = "FAILED"
            task.add_event("CANCELED", "canceled", "canceled by the owner")
            code, message = "Canceled", "The task has been cancelled successfully."
        resource = f"/task/{task.task_id}/cancel"
        return {
            "DATA_TYPE": "result",
            "code": code,
            "message": message,
            "resource": resource,
            "request_id": "ABCdef789",
        }

    @staticmethod
    def _page(kind: str, rows: list[Json], query: dict[str, str]) -> Json:
        start = int(query.get("marker", 0))
        end = start + PAGE_FILES
        return {
            "DATA_TYPE": kind,
            "marker": start,
            "next_marker": end if end < len(rows) else None,
            "DATA": rows[start:end],
        }

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _document(self, task: Task, *, step: bool) -> Json:
        if step:
            self._step(task)
        document, source, destination = task.document, *self._sides(task)
        flags = {
            name: bool(document.get(name))
            for name in (
                "delete_destination_extra", "encrypt_data", "fail_on_quota_errors", "preserve_timestamp",
                "skip_source_errors", "verify_checksum",
            )
        }  # fmt: skip
        return flags | {
            "DATA_TYPE": "task", "type": "TRANSFER", "task_id": task.task_id, "status": task.status,
            "bytes_checksummed": task.bytes_transferred, "bytes_transferred": task.bytes_transferred,
            "canceled_by_admin": None, "canceled_by_admin_message": None, "command": "API 0.10",
            "completion_time": None if task.status == "ACTIVE" else _TIME, "deadline": document.get("deadline"),
            "destination_endpoint": destination.name, "destination_endpoint_display_name": destination.name,
            "destination_endpoint_id": destination.id, "directories": 0, "effective_bytes_per_second": 3,
            "fatal_error": task.fatal_error, "faults": task.faults, "files": len(document["DATA"]),
            "files_skipped": 0, "files_transferred": len(task.successful), "filter_rules": None,
            "history_deleted": False, "is_ok": None if task.status != "ACTIVE" else task.faults == 0,
            "is_paused": self.is_paused, "label": document.get("label"),
            "nice_status": task.nice_status if task.status == "ACTIVE" else None, "nice_status_details": None,
            "nice_status_expires_in": None, "nice_status_short_description": task.nice_status, "owner_id": _CALLER,
            "recursive_symlinks": "ignore", "request_time": _TIME, "source_endpoint": source.name,
            "source_endpoint_display_name": source.name, "source_endpoint_id": source.id, "subtasks_canceled": 0,
            "subtasks_expired": 0, "subtasks_failed": 0, "subtasks_pending": len(task.waiting),
            "subtasks_retrying": task.faults, "subtasks_skipped_errors": len(task.skipped),
            "subtasks_succeeded": len(task.successful), "subtasks_total": len(document["DATA"]), "symlinks": 0,
            "sync_level": document.get("sync_level"), "username": "u_a2z3", "source_base_path": None,
            "destination_base_path": None,
        }  # fmt: skip

    def _sides(self, task: Task) -> tuple[Collection, Collection]:
        return self.collections[task.document["source_endpoint"]], self.collections[
            task.document["destination_endpoint"]
        ]

    def _step(self, task: Task) -> None:
        """Copy what can be copied, up to the bytes of one time."""
        if task.status != "ACTIVE":
            return
        if self.is_inactive:
            task.status = "INACTIVE"
            task.add_event("CREDENTIALS_EXPIRED", "credentials expired", "log in again", is_error=True)
            return
        sides = self._sides(task)
        if self.is_paused or not all(side.is_connected for side in sides):
            task.nice_status = "PAUSED_BY_ADMIN" if self.is_paused else "GC_NOT_CONNECTED"
            if not task.faults and not self.is_paused:
                task.add_fault("GC_NOT_CONNECTED", "endpoint not connected", "/")
            return
        left = self.bytes_each_time
        for item in list(task.waiting):
            if left is not None and left <= 0:
                return
            moved = self._move(task, item, *sides, left)
            left = None if left is None else left - moved
        if not task.waiting:
            task.status, task.nice_status = "SUCCEEDED", None
            task.add_event("SUCCEEDED", "succeeded", "")

    def _move(self, task: Task, item: Json, source: Collection, destination: Collection, most: int | None) -> int:
        path, target = item["source_path"], item["destination_path"]
        start, end = source.local(path), destination.local(target)
        code, words = "", ""
        if _is_denied(source, path):
            code, words = "PERMISSION_DENIED", "permission denied"
        elif not start.is_file():
            code, words = "FILE_NOT_FOUND", "No such file or directory"
        if code and task.document.get("skip_source_errors") and not self.missing_keeps_active:
            task.waiting.remove(item)
            task.skipped.append(
                {
                    "DATA_TYPE": "skipped_error",
                    "error_code": code,
                    "error_details": f"Error (stat)\n{words}",
                    "error_time": _TIME,
                    "source_path": path,
                    "destination_path": target,
                    "is_directory": False,
                    "is_symlink": False,
                    "is_delete_destination_extra": False,
                    "external_checksum": None,
                    "checksum_algorithm": None,
                }
            )
            return 0
        if _is_denied(destination, target):
            code, words, path = "PERMISSION_DENIED", "permission denied", target
        if code:
            if not task.faults:
                task.add_fault(code, words, path)
            return 0
        end.parent.mkdir(parents=True, exist_ok=True)
        size, done = start.stat().st_size, int(item.get("bytes_done", 0))
        if most is not None and size - done > most:
            item["bytes_done"] = done + most
            end.write_bytes(start.read_bytes()[: done + most])
            task.bytes_transferred += most
            task.nice_status = "OK"
            return most
        shutil.copyfile(start, end)
        self.copied.append((path, target))
        task.bytes_transferred += size - done
        task.waiting.remove(item)
        checksum = hashlib.md5(start.read_bytes()).hexdigest() if task.document.get("verify_checksum") else None
        task.successful.append(
            {
                "DATA_TYPE": "successful_transfer",
                "source_path": path,
                "destination_path": target,
                "size": size,
                "checksum": checksum,
                "checksum_algorithm": checksum and "MD5",
                "dynamic": False,
            }
        )
        return size - done

    @staticmethod
    def _endpoint(found: Collection) -> Json:
        return {
            "DATA_TYPE": "endpoint", "id": found.id, "display_name": found.name, "organization": "My Org",
            "description": "", "entity_type": found.entity_type, "public": False, "is_globus_connect": True,
            "gcp_connected": found.is_connected, "gcp_paused": False, "host_endpoint_id": None, "host_path": None,
            "disable_verify": found.disable_verify, "force_verify": False, "force_encryption": False,
            "non_functional": False, "default_directory": None, "username": "auser",
            "high_assurance": found.high_assurance,
        }  # fmt: skip


def _pairs(document: Json) -> set[tuple[str, str]]:
    return {(item["source_path"], item["destination_path"]) for item in document["DATA"]}


def _is_denied(collection: Collection, path: str) -> bool:
    return any(path.startswith(each) for each in collection.denied)


def _file(path: Path) -> Json:
    state = path.stat()
    return {
        "DATA_TYPE": "file", "group": "tutorial", "last_modified": str(state.st_mtime_ns), "link_group": None,
        "link_last_modified": None, "link_size": None, "link_target": None, "link_user": None, "name": path.name,
        "permissions": f"{state.st_mode & 0o7777:04o}", "size": state.st_size, "user": "tutorial",
        "type": "dir" if path.is_dir() else "file",
    }  # fmt: skip


@contextlib.contextmanager
def serving() -> Iterator[GlobusService]:
    """The service on a port of this machine."""
    service = GlobusService()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._do({})

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            self._do(json.loads(data) if data else {})

        def _do(self, body: Json) -> None:
            path, _, query = self.path.partition("?")
            flat = {name: values[-1] for name, values in urllib.parse.parse_qs(query).items()}
            with service.lock:
                number = len(service.requests)
                service.requests.append(f"{self.command} {path}")
            if service.is_held(number, is_processed=False):
                self.close_connection = True
                return None
            with service.lock:
                token = self.headers.get("authorization", "").removeprefix("Bearer ")
                service.tokens.append(token)
                if service.is_down:
                    return self._answer(503, {"code": "ServiceUnavailable", "message": "down for maintenance"})
                if service.is_portal:
                    return self._answer(200, {"welcome": "accept the terms of this network"})
                if not token or token in service.refused_tokens:
                    return self._answer(401, {"code": "AuthenticationFailed", "message": "Token is not active"})
                if service.too_many > 0:
                    service.too_many -= 1
                    return self._answer(429, {"code": "TooManyRequests", "message": "slow down"}, retry_after=1)
                try:
                    status, answer = 200, service.answer(self.command, path.removeprefix("/v0.10"), flat, body)
                except Refused as refused:
                    status, answer = refused.status, refused.body | {"resource": path}
                if service.loses_answer and path.endswith("/transfer"):
                    service.loses_answer = False
                    self.close_connection = True
                    return None
            if service.is_held(number, is_processed=True):
                self.close_connection = True
                return None
            return self._answer(status, answer)

        def _answer(self, status: int, body: Json, *, retry_after: int | None = None) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            if retry_after is not None:
                self.send_header("retry-after", str(retry_after))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as in the base class
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        service.url = f"http://127.0.0.1:{server.server_address[1]}/"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="globus-service")
        thread.start()
        try:
            yield service
        finally:
            service.release()
            server.shutdown()
            thread.join()
