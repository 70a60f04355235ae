"""API routes, one method each, and blob transfers: uploads before a submit, downloads of large results."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import quote

from farcall._answers import (
    BlobGrant,
    BuildStatus,
    Cancelled,
    ContainerFound,
    ContainerId,
    EndpointAnswer,
    FunctionFound,
    Ids,
    Json,
    Outputs,
    Registered,
    Statuses,
    StreamGrant,
    Submitted,
    as_struct,
    with_list,
)
from farcall._arguments import as_reference
from farcall._http import Http
from farcall._pacing import FOREIGN_RETRY_S, OutageTimer
from farcall_common.backoff import Backoff
from farcall_common.errors import (
    DeserializationError,
    FarcallError,
    Fault,
    Forbidden,
    InvalidRequest,
    ProtocolError,
    TaskUnknown,
)
from farcall_common.forks import fork_safe_lock

T = TypeVar("T")

#: Limit of requests about several tasks.
IDS_PER_REQUEST: Final = 500


class Api:
    """The routes of the API. Every method raises the errors of :meth:`Http.call`."""

    def __init__(self, http: Http) -> None:
        self.http = http

    def _call(self, method: str, path: str, **options: Any) -> Json:
        answer: Json = self.http.call(method, path, answer=Json, **options)
        return answer

    def _list(self, method: str, path: str, field: str, **options: Any) -> list[Json]:
        """The objects in a field of the answer."""
        found: list[Json] = getattr(self.http.call(method, path, answer=with_list(field), **options), field)
        return found

    def version(self) -> Json:
        return self._call("GET", "/v2/version", query={"service": "all"})

    def whoami(self) -> Json:
        return self._call("GET", "/v3/whoami")

    # functions
    def register_function(
        self, body: Json, *, retry_timeout_s: float | None = None, stop: threading.Event | None = None
    ) -> str:
        answer: Registered = self.http.call(
            "POST", "/v3/functions", body=body, answer=Registered, retry_timeout_s=retry_timeout_s, stop=stop
        )
        return answer.function_uuid

    def update_function(self, function_id: str, body: Json) -> Json:
        return self._call("PUT", f"/v3/functions/{_in_path(function_id)}", body=body)

    def get_function(self, function_id: str, *, version: int | None) -> Json:
        query: dict[str, str | int] = {} if version is None else {"version": version}
        return self._call("GET", f"/v2/functions/{_in_path(function_id)}", query=query)

    def find_function(self, reference: str) -> Json:
        return self._call("GET", f"/v3/functions/{_in_path(reference)}", check=as_struct(FunctionFound))

    def reference_of(self, function: str | uuid.UUID) -> str:
        """The reference under which calls of a function are submitted; looks up an alias."""
        if not isinstance(function, str | uuid.UUID):
            raise TypeError(f"function_id: Expected an id or an alias, got {type(function).__name__}")
        return as_reference(function) or str(self.find_function(str(function))["reference"])

    def list_versions(self, function_id: str, *, limit: int) -> list[Json]:
        path = f"/v3/functions/{_in_path(function_id)}/versions"
        return self._list("GET", path, "versions", query={"limit": limit})

    def list_functions(self, *, search: str, limit: int) -> list[Json]:
        answer = self.http.call("GET", "/v3/functions", query={"search": search, "limit": limit})
        return list(answer["functions"])

    def delete_function(self, function_id: str) -> None:
        self.http.call("DELETE", f"/v2/functions/{_in_path(function_id)}")

    def put_alias(self, body: Json) -> Json:
        return self._call("POST", "/v3/aliases", body=body)

    def list_aliases(self) -> list[Json]:
        return self._list("GET", "/v3/aliases", "aliases")

    def delete_alias(self, name: str) -> None:
        self.http.call("DELETE", f"/v3/aliases/{_in_path(name)}")

    # containers
    def register_container(self, body: Json) -> str:
        return str(self._call("POST", "/v3/containers", body=body, check=as_struct(ContainerId))["container_id"])

    def get_container(self, container_id: str, container_type: str) -> Json:
        path = f"/v2/containers/{_in_path(container_id)}/{_in_path(container_type)}"
        return dict(self._call("GET", path, check=as_struct(ContainerFound))["container"])

    def find_container(self, reference: str) -> Json:
        return self._call("GET", f"/v3/containers/{_in_path(reference)}")

    def get_build_status(self, container_id: str) -> str:
        path = f"/v2/containers/build/{_in_path(container_id)}"
        return str(self._call("GET", path, check=as_struct(BuildStatus))["status"])

    def list_containers(self, *, limit: int) -> list[Json]:
        return self._list("GET", "/v3/containers", "containers", query={"limit": limit})

    def delete_container(self, reference: str) -> None:
        self.http.call("DELETE", f"/v3/containers/{_in_path(reference)}")

    # tokens and service accounts
    def create_token(self, body: Json) -> Json:
        return self._call("POST", "/v3/tokens", body=_given(body))

    def list_tokens(self) -> list[Json]:
        return self._list("GET", "/v3/tokens", "tokens")

    def revoke_token(self, token_id: str) -> None:
        self.http.call("DELETE", f"/v3/tokens/{_in_path(token_id)}")

    def create_account(self, name: str) -> Json:
        return self._call("POST", "/v3/accounts", body={"name": name})

    def list_accounts(self) -> list[Json]:
        return self._list("GET", "/v3/accounts", "accounts")

    def delete_account(self, account_id: str) -> None:
        self.http.call("DELETE", f"/v3/accounts/{_in_path(account_id)}")

    # endpoints
    def put_endpoint(self, endpoint_id: str | None, body: Json) -> Json:
        """Register an endpoint, or change the one with this id."""
        if endpoint_id is None:
            return self._call("POST", "/v3/endpoints", body=body)
        return self._call("PUT", f"/v3/endpoints/{_in_path(endpoint_id)}", body=body)

    def list_endpoints(self, *, role: str) -> list[Json]:
        return list(self.http.call("GET", "/v2/endpoints", answer=list[Json], query={"role": role}))

    def get_endpoint(self, endpoint_id: str, *, retry_timeout_s: float | None = None) -> Json:
        path = f"/v2/endpoints/{_in_path(endpoint_id)}"
        return self._call("GET", path, check=as_struct(EndpointAnswer), retry_timeout_s=retry_timeout_s)

    def get_endpoint_status(self, endpoint_id: str) -> Json:
        return self._call("GET", f"/v2/endpoints/{_in_path(endpoint_id)}/status")

    def get_allowed_functions(self, endpoint_id: str) -> Json:
        return self._call("GET", f"/v3/endpoints/{_in_path(endpoint_id)}/allowed_functions")

    def delete_endpoint(self, endpoint_id: str) -> None:
        self.http.call("DELETE", f"/v2/endpoints/{_in_path(endpoint_id)}")

    # sharing; ``objects`` is "endpoints" or "functions"
    def put_share(self, objects: str, object_id: str, body: Json) -> Json:
        return self._call("PUT", f"/v3/{objects}/{_in_path(object_id)}/shares", body=body)

    def list_shares(self, objects: str, object_id: str) -> list[Json]:
        return self._list("GET", f"/v3/{objects}/{_in_path(object_id)}/shares", "shares")

    def delete_share(self, objects: str, object_id: str, share_id: str) -> None:
        self.http.call("DELETE", f"/v3/{objects}/{_in_path(object_id)}/shares/{_in_path(share_id)}")

    def list_shared(self) -> list[Json]:
        return self._list("GET", "/v3/shared", "shared")

    def add_team(self, name: str) -> Json:
        return self._call("POST", "/v3/teams", body={"name": name})

    def list_teams(self) -> list[Json]:
        return self._list("GET", "/v3/teams", "teams")

    def delete_team(self, team_id: str) -> None:
        self.http.call("DELETE", f"/v3/teams/{_in_path(team_id)}")

    def list_members(self, team_id: str) -> list[Json]:
        return self._list("GET", f"/v3/teams/{_in_path(team_id)}/members", "members")

    def add_member(self, team_id: str, member: Json) -> None:
        self.http.call("PUT", f"/v3/teams/{_in_path(team_id)}/members", body=member)

    def delete_member(self, team_id: str, member: Json) -> None:
        self.http.call("DELETE", f"/v3/teams/{_in_path(team_id)}/members", query=member)

    # tasks
    def submit(
        self,
        endpoint_id: str,
        body: bytes,
        *,
        task_ids: Mapping[str, Sequence[str]],
        raises: tuple[type[FarcallError], ...] = (),
        retry_timeout_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> Submitted:
        """Submit tasks. ``task_ids`` are those in the body, by function: an answer with others is not one to it."""

        def check(answer: Submitted) -> None:
            if answer.tasks != task_ids:
                raise ProtocolError("the answer has other task ids than were sent")

        path = f"/v3/endpoints/{_in_path(endpoint_id)}/submit"
        submitted: Submitted = self.http.call(
            "POST",
            path,
            body=body,
            answer=Submitted,
            check=check,
            raises=raises,
            retry_timeout_s=retry_timeout_s,
            stop=stop,
        )
        return submitted

    def get_task(
        self, task_id: str, *, retry_timeout_s: float | None = None, stop: threading.Event | None = None
    ) -> Json:
        path = f"/v2/tasks/{_in_path(task_id)}"
        check = functools.partial(_check_about, task_id)
        return self._call("GET", path, check=check, retry_timeout_s=retry_timeout_s, stop=stop)

    def batch_status(
        self,
        task_ids: Sequence[str],
        *,
        may_be_empty: bool = False,
        retry_timeout_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> dict[str, Json]:
        """Read those of the tasks that the answer has, by id. It leaves out tasks beyond its largest size; they may be
        requested again.

        :param may_be_empty: whether an answer without any of the tasks is not repeated.
        """

        def check(answer: Statuses) -> None:
            for task_id, task in answer.results.items():
                _check_about(task_id, task)
            if not (may_be_empty or any(task_id in answer.results for task_id in task_ids) or answer.unknown):
                raise ProtocolError("the answer lacks all tasks that were requested")

        answer: Statuses = self.http.call(
            "POST",
            "/v2/batch_status",
            body={"task_ids": task_ids},
            answer=Statuses,
            check=check,
            retry_timeout_s=retry_timeout_s,
            stop=stop,
        )
        found = answer.results | {task_id: _unknown(task_id) for task_id in answer.unknown or ()}
        return {task_id: found[task_id] for task_id in task_ids if task_id in found}

    def all_status(self, task_ids: Sequence[str]) -> dict[str, Json]:
        """Tasks by id, in as many requests as that takes."""
        found: dict[str, Json] = {}
        for start in range(0, len(task_ids), IDS_PER_REQUEST):
            missing = task_ids[start : start + IDS_PER_REQUEST]
            while missing:
                found |= self.batch_status(missing)
                missing = [task_id for task_id in missing if task_id not in found]
        return found

    def page_of_tasks(self, query: Json) -> Json:
        """``tasks``, and with ``next`` there may be more: the query again with that as ``before``."""
        return self._call("GET", "/v3/tasks", query=_given(query))

    def find_ids(self, kind: str, beginning: str) -> list[str]:
        """Ids of your tasks or groups that begin so, the newest first, some at most."""
        query: Json = {"kind": kind, "beginning": beginning}
        return list(self._call("GET", "/v3/ids", check=as_struct(Ids), query=query)["ids"])

    def retry(self, task_id: str, *, as_task_id: str) -> Json:
        path = f"/v3/tasks/{_in_path(task_id)}/retry"
        return self._call("POST", path, body={"task_id": as_task_id})

    def discard(self, task_id: str) -> None:
        self.http.call("POST", f"/v3/tasks/{_in_path(task_id)}/discard", body={})

    def list_groups(self, *, before: str | None, limit: int) -> Json:
        query: dict[str, str | int] = {"limit": limit} | ({"before": before} if before else {})
        return self._call("GET", "/v3/groups", query=query)

    def list_group(self, task_group_id: str) -> list[Json]:
        return self._list("GET", f"/v2/taskgroup/{_in_path(task_group_id)}", "tasks")

    def list_events(self, task_id: str) -> list[Json]:
        events: list[Json] = []
        after: int | None = 0
        while after is not None:
            page = self._call("GET", f"/v3/tasks/{_in_path(task_id)}/events", query={"after": after})
            events += page["events"]
            after = page.get("next")
        return events

    def why(self, task_id: str, *, retry_timeout_s: float | None = None, stop: threading.Event | None = None) -> Json:
        from farcall._task_info import Why  # here: most programs need none

        path = f"/v3/tasks/{_in_path(task_id)}/why"
        return self._call("GET", path, check=Why.from_json, retry_timeout_s=retry_timeout_s, stop=stop)

    def batch_output(self, tasks: Sequence[Json], *, stop: threading.Event | None = None) -> dict[str, Json]:
        """New output of tasks by id: of each its id, and the bytes from which on to read its streams."""
        answer = self._call("POST", "/v3/batch_output", body={"tasks": tasks}, check=as_struct(Outputs), stop=stop)
        return dict(answer["results"])

    def cancel(
        self, task_ids: Sequence[str], *, retry_timeout_s: float | None = None, stop: threading.Event | None = None
    ) -> dict[str, Json]:
        answer: Cancelled = self.http.call(
            "POST",
            "/v3/tasks/cancel",
            body={"task_ids": task_ids},
            answer=Cancelled,
            retry_timeout_s=retry_timeout_s,
            stop=stop,
        )
        return answer.results

    def page_of_endpoint_tasks(self, endpoint_id: str, query: Json) -> Json:
        """``tasks``, and with ``next`` there may be more: the query again with that as ``after``."""
        return self._call("GET", f"/v3/endpoints/{_in_path(endpoint_id)}/tasks", query=_given(query))

    def cancel_endpoint_tasks(self, endpoint_id: str, body: Json) -> Json:
        """``results``, and with ``next`` there may be more: the request again with that as ``after``."""
        return self._call("POST", f"/v3/endpoints/{_in_path(endpoint_id)}/tasks/cancel", body=_given(body))

    def get_endpoint_qos(self, endpoint_id: str) -> Json:
        return self._call("GET", f"/v3/endpoints/{_in_path(endpoint_id)}/qos")

    def endpoint_keys(self, endpoint_id: str) -> Json:
        return self._call("GET", f"/v3/endpoints/{_in_path(endpoint_id)}/keys")

    def revoke_endpoint_key(self, endpoint_id: str, public_key: str) -> None:
        path = f"/v3/endpoints/{_in_path(endpoint_id)}/keys"
        self.http.call("DELETE", path, query={"public_key": public_key})

    def page_of_audit(self, query: Json) -> Json:
        """``entries``, and with ``next`` there may be more: the query again with that as ``after``."""
        return self._call("GET", "/v3/audit", query=_given(query))

    def page_of_usage(self, query: Json) -> Json:
        """``usage``, and with ``next`` there may be more: the query again with that as ``after``."""
        return self._call("GET", "/v3/usage", query=_given(query))

    # the way to user bytes and results
    def grant_blob(
        self,
        *,
        size_bytes: int,
        sha256: str,
        retry_timeout_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> BlobGrant:
        body = {"size_bytes": size_bytes, "sha256": sha256}
        grant: BlobGrant = self.http.call(
            "POST", "/v3/blobs", body=body, answer=BlobGrant, retry_timeout_s=retry_timeout_s, stop=stop
        )
        return grant

    def open_stream(self, public_key: str) -> StreamGrant:
        """Request a stream once. The caller polls meanwhile, and repeats the request with its own back-off."""
        body = {"public_key": public_key}
        grant: StreamGrant = self.http.call("POST", "/v3/stream", body=body, answer=StreamGrant, retry_timeout_s=0)
        return grant


def _given(query: Json) -> Json:
    return {name: value for name, value in query.items() if value is not None}


#: Payloads up to this size travel inside the submit. The API puts those over 64 KiB into the blob store, which
#: saves the client two requests.
INLINE_BYTES: Final = 256 * 1024

_REMEMBERED: Final = 4096
#: An upload is trusted to be there for this long; the store keeps blobs for days.
_TRUSTED_FOR_S: Final = 3600.0


@dataclasses.dataclass(frozen=True)
class BlobRef:
    """Bytes in the blob store: key, size in bytes, SHA-256 in hex."""

    blob_key: str
    size_bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """The reference as a submit carries it in the place of a payload."""
        return dataclasses.asdict(self)


class Blobs:
    """Uploads and downloads. May be used from any thread; equal bytes are uploaded once."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._lock = fork_safe_lock()
        self._uploads: OrderedDict[str, tuple[float, concurrent.futures.Future[BlobRef]]] = OrderedDict()

    def upload(
        self, data: bytes, *, retry_timeout_s: float | None = None, stop: threading.Event | None = None
    ) -> BlobRef:
        """Put bytes into the blob store, unless equal bytes are there or on their way already.

        :param retry_timeout_s, stop: as in :meth:`Http.call`.
        :raises FarcallError: if the API or the network refuses it.
        """
        sha256 = hashlib.sha256(data).hexdigest()
        with self._lock:
            known = self._uploads.get(sha256)
            if known is None or time.monotonic() - known[0] > _TRUSTED_FOR_S:
                upload = concurrent.futures.Future[BlobRef]()
                self._uploads[sha256] = time.monotonic(), upload
                self._uploads.move_to_end(sha256)
                if len(self._uploads) > _REMEMBERED:
                    self._uploads.popitem(last=False)
            else:
                upload = known[1]
        if known is None or known[1] is not upload:
            try:
                blob_key = self._put(data, sha256, retry_timeout_s=retry_timeout_s, stop=stop)
                upload.set_result(BlobRef(blob_key, len(data), sha256))
            except BaseException as error:
                self.forget(sha256)  # the next caller tries again
                upload.set_exception(error)
                raise
        return upload.result()

    def forget(self, sha256: str) -> None:
        """Stop trusting that these bytes are in the store."""
        with self._lock:
            self._uploads.pop(sha256, None)

    def download(
        self, ref: BlobRef, url: str, *, retry_timeout_s: float | None = None, stop: threading.Event | None = None
    ) -> memoryview:
        """Fetch bytes from a pre-signed address and verify their hash. The caller owns the memory: values that
        are read from it may keep it.

        :param retry_timeout_s, stop: as in :meth:`Http.call`.
        :raises DeserializationError: if they are not those that were stored.
        :raises FarcallError: if the store or the network refuses it.
        """

        def check(data: bytearray) -> None:
            if len(data) != ref.size_bytes or hashlib.sha256(data).hexdigest() != ref.sha256:
                raise ProtocolError("it has other bytes than were stored")

        try:
            data = self._api.http.get(
                url, most_bytes=ref.size_bytes, check=check, retry_timeout_s=retry_timeout_s, stop=stop
            )
        except ProtocolError as error:
            if error.record.fault is not Fault.NETWORK:
                raise
            raise DeserializationError(
                f"The bytes of blob {ref.blob_key} are not those that were stored.", hint="Request the result again."
            ) from error
        return memoryview(data)

    def _put(self, data: bytes, sha256: str, *, retry_timeout_s: float | None, stop: threading.Event | None) -> str:
        def put() -> str:
            grant = self._api.grant_blob(
                size_bytes=len(data), sha256=sha256, retry_timeout_s=retry_timeout_s, stop=stop
            )
            self._api.http.put(
                grant.upload_url, data, headers=grant.headers, retry_timeout_s=retry_timeout_s, stop=stop
            )
            return grant.blob_key

        return with_new_address(put, stop=stop)


def with_new_address(transfer: Callable[[], T], *, stop: threading.Event | None) -> T:
    """Repeat a transfer that the store refused with another pre-signed address: an address lives for minutes, and the
    machine may have slept. Refusals by others than the store are repeated for half a minute.

    :param transfer: requests an address, and transfers.
    :raises FarcallError: what the last one raised.
    """
    outage, is_second = OutageTimer(now=time.monotonic()), False
    backoff = Backoff(first_s=0.1, most_s=5.0)
    while True:
        try:
            return transfer()
        except FarcallError as error:
            delay_s = backoff.next_s()
            if error.is_foreign and not error.record.retryable:
                if outage.failed(now=time.monotonic()) + delay_s > FOREIGN_RETRY_S:
                    raise
            elif is_second or not isinstance(error, Forbidden):
                raise
            is_second = True
            if (stop or threading.Event()).wait(delay_s if error.is_foreign else 0.0):
                raise


def _check_about(task_id: str, task: Json) -> None:
    """:raises ProtocolError: for an answer about another task, whose id says how it is read."""
    if task.get("task_id") != task_id:
        raise ProtocolError(f"it is about task {task.get('task_id')} instead of {task_id}")


def _in_path(name: str) -> str:
    """A name or id as one part of a path.

    :raises InvalidRequest: if it would be another path.
    """
    if name in ("", ".", "..") or "/" in name:
        raise InvalidRequest(f"Invalid name {name!r}", hint="Use an id, or a name without slashes.")
    return quote(name, safe="@")


def _unknown(task_id: str) -> Json:
    """A task that the caller does not have, as an answer about tasks shows one that failed."""
    error = TaskUnknown(f"There is no task {task_id}.").record
    return {"task_id": task_id, "status": "failed", "reason": error.message, "error": error.to_json()}
