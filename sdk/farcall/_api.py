"""API routes, one method each, and blob transfers: uploads before a submit, downloads of large results."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from farcall._arguments import as_reference
from farcall._http import Http
from farcall_common.errors import DeserializationError, Forbidden, ProtocolError, TaskUnknown, Unsupported
from farcall_common.forks import fork_safe_lock

Json = dict[str, Any]

#: Limit of requests about several tasks.
IDS_PER_REQUEST: Final = 500


class Api:
    """The routes of the API. Every method raises the errors of :meth:`Http.call`."""

    def __init__(self, http: Http) -> None:
        self.http = http

    def _call(self, method: str, path: str, **options: Any) -> Json:
        answer: Json = self.http.call(method, path, **options)
        return answer

    def version(self) -> Json:
        return self._call("GET", "/v2/version", query={"service": "all"})

    def whoami(self) -> Json:
        return self._call("GET", "/v3/whoami")

    # functions
    def register_function(
        self, body: Json, *, retry_timeout_s: float | None = None, stop: threading.Event | None = None
    ) -> str:
        answer = self.http.call("POST", "/v3/functions", body=body, retry_timeout_s=retry_timeout_s, stop=stop)
        _check_environment(body, answer)
        return str(answer["function_uuid"])

    def update_function(self, function_id: str, body: Json) -> Json:
        answer = self._call("PUT", f"/v3/functions/{quote(function_id, safe='')}", body=body)
        _check_environment(body, answer)
        return answer

    def get_function(self, function_id: str, *, version: int | None) -> Json:
        query: dict[str, str | int] = {} if version is None else {"version": version}
        return self._call("GET", f"/v2/functions/{quote(function_id, safe='')}", query=query)

    def find_function(self, reference: str) -> Json:
        return self._call("GET", f"/v3/functions/{quote(reference, safe='@')}")

    def reference_of(self, function: str | uuid.UUID) -> str:
        """The reference under which calls of a function are submitted; looks up an alias."""
        return as_reference(function) or str(self.find_function(str(function))["reference"])

    def list_versions(self, function_id: str, *, limit: int) -> list[Json]:
        path = f"/v3/functions/{quote(function_id, safe='')}/versions"
        return list(self.http.call("GET", path, query={"limit": limit})["versions"])

    def list_functions(self, *, search: str, limit: int) -> list[Json]:
        answer = self.http.call("GET", "/v3/functions", query={"search": search, "limit": limit})
        return list(answer["functions"])

    def delete_function(self, function_id: str) -> None:
        self.http.call("DELETE", f"/v2/functions/{quote(function_id, safe='')}")

    def put_alias(self, body: Json) -> Json:
        return self._call("POST", "/v3/aliases", body=body)

    def list_aliases(self) -> list[Json]:
        return list(self.http.call("GET", "/v3/aliases")["aliases"])

    def delete_alias(self, name: str) -> None:
        self.http.call("DELETE", f"/v3/aliases/{quote(name, safe='')}")

    # containers
    def register_container(self, body: Json) -> str:
        return str(self.http.call("POST", "/v3/containers", body=body)["container_id"])

    def get_container(self, container_id: str, container_type: str) -> Json:
        path = f"/v2/containers/{quote(container_id, safe='')}/{quote(container_type, safe='')}"
        return dict(self.http.call("GET", path)["container"])

    def find_container(self, reference: str) -> Json:
        return self._call("GET", f"/v3/containers/{quote(reference, safe='')}")

    def get_build_status(self, container_id: str) -> str:
        return str(self.http.call("GET", f"/v2/containers/build/{quote(container_id, safe='')}")["status"])

    def list_containers(self, *, limit: int) -> list[Json]:
        return list(self.http.call("GET", "/v3/containers", query={"limit": limit})["containers"])

    def delete_container(self, reference: str) -> None:
        self.http.call("DELETE", f"/v3/containers/{quote(reference, safe='')}")

    # tokens and service accounts
    def create_token(self, body: Json) -> Json:
        return self._call("POST", "/v3/tokens", body=_given(body))

    def list_tokens(self) -> list[Json]:
        return list(self.http.call("GET", "/v3/tokens")["tokens"])

    def revoke_token(self, token_id: str) -> None:
        self.http.call("DELETE", f"/v3/tokens/{quote(token_id, safe='')}")

    def create_account(self, name: str) -> Json:
        return self._call("POST", "/v3/accounts", body={"name": name})

    def list_accounts(self) -> list[Json]:
        return list(self.http.call("GET", "/v3/accounts")["accounts"])

    def delete_account(self, account_id: str) -> None:
        self.http.call("DELETE", f"/v3/accounts/{quote(account_id, safe='')}")

    # endpoints
    def put_endpoint(self, endpoint_id: str | None, body: Json) -> Json:
        """Register an endpoint, or change the one with this id."""
        if endpoint_id is None:
            answer: Json = self.http.call("POST", "/v3/endpoints", body=body)
        else:
            answer = self.http.call("PUT", f"/v3/endpoints/{quote(endpoint_id, safe='')}", body=body)
        return answer

    def list_endpoints(self, *, role: str) -> list[Json]:
        return list(self.http.call("GET", "/v2/endpoints", query={"role": role}))

    def get_endpoint(self, endpoint_id: str, *, retry_timeout_s: float | None = None) -> Json:
        path = f"/v2/endpoints/{quote(endpoint_id, safe='')}"
        return self._call("GET", path, retry_timeout_s=retry_timeout_s)

    def get_endpoint_status(self, endpoint_id: str) -> Json:
        return self._call("GET", f"/v2/endpoints/{quote(endpoint_id, safe='')}/status")

    def get_allowed_functions(self, endpoint_id: str) -> Json:
        return self._call("GET", f"/v3/endpoints/{quote(endpoint_id, safe='')}/allowed_functions")

    def delete_endpoint(self, endpoint_id: str) -> None:
        self.http.call("DELETE", f"/v2/endpoints/{quote(endpoint_id, safe='')}")

    # sharing; ``objects`` is "endpoints" or "functions"
    def put_share(self, objects: str, object_id: str, body: Json) -> Json:
        return self._call("PUT", f"/v3/{objects}/{quote(object_id, safe='')}/shares", body=body)

    def list_shares(self, objects: str, object_id: str) -> list[Json]:
        return list(self._call("GET", f"/v3/{objects}/{quote(object_id, safe='')}/shares")["shares"])

    def delete_share(self, objects: str, object_id: str, share_id: str) -> None:
        self._call("DELETE", f"/v3/{objects}/{quote(object_id, safe='')}/shares/{quote(share_id, safe='')}")

    def list_shared(self) -> list[Json]:
        return list(self._call("GET", "/v3/shared")["shared"])

    def add_team(self, name: str) -> Json:
        return self._call("POST", "/v3/teams", body={"name": name})

    def list_teams(self) -> list[Json]:
        return list(self._call("GET", "/v3/teams")["teams"])

    def delete_team(self, team_id: str) -> None:
        self._call("DELETE", f"/v3/teams/{quote(team_id, safe='')}")

    def list_members(self, team_id: str) -> list[Json]:
        return list(self._call("GET", f"/v3/teams/{quote(team_id, safe='')}/members")["members"])

    def add_member(self, team_id: str, member: Json) -> None:
        self._call("PUT", f"/v3/teams/{quote(team_id, safe='')}/members", body=member)

    def delete_member(self, team_id: str, member: Json) -> None:
        self._call("DELETE", f"/v3/teams/{quote(team_id, safe='')}/members", query=member)

    # tasks
    def submit(
        self,
        endpoint_id: str,
        body: bytes,
        *,
        retry_timeout_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> Json:
        path = f"/v3/endpoints/{quote(endpoint_id, safe='')}/submit"
        return self._call("POST", path, body=body, retry_timeout_s=retry_timeout_s, stop=stop)

    def get_task(self, task_id: str) -> Json:
        return _about(task_id, self._call("GET", f"/v2/tasks/{quote(task_id, safe='')}"))

    def batch_status(
        self, task_ids: Sequence[str], *, retry_timeout_s: float | None = None, stop: threading.Event | None = None
    ) -> dict[str, Json]:
        """Tasks by id. An answer leaves out tasks beyond its largest size; they may be requested again."""
        answer = self.http.call(
            "POST", "/v2/batch_status", body={"task_ids": task_ids}, retry_timeout_s=retry_timeout_s, stop=stop
        )
        found = {task_id: _about(task_id, task) for task_id, task in answer["results"].items()}
        return {**found, **{task_id: _unknown(task_id) for task_id in answer.get("unknown") or ()}}

    def all_status(self, task_ids: Sequence[str]) -> dict[str, Json]:
        """Tasks by id, in as many requests as that takes."""
        found: dict[str, Json] = {}
        for start in range(0, len(task_ids), IDS_PER_REQUEST):
            missing = task_ids[start : start + IDS_PER_REQUEST]
            while missing and (answer := self.batch_status(missing)):
                found |= answer
                missing = [task_id for task_id in missing if task_id not in found]
        return found

    def page_of_tasks(self, query: Json) -> Json:
        """``tasks``, and with ``next`` there may be more: the query again with that as ``before``."""
        return self._call("GET", "/v3/tasks", query=_given(query))

    def find_ids(self, kind: str, beginning: str) -> list[str]:
        """Ids of your tasks or groups that begin so, the newest first, some at most."""
        return list(self._call("GET", "/v3/ids", query={"kind": kind, "beginning": beginning})["ids"])

    def retry(self, task_id: str, *, as_task_id: str) -> Json:
        path = f"/v3/tasks/{quote(task_id, safe='')}/retry"
        return self._call("POST", path, body={"task_id": as_task_id})

    def discard(self, task_id: str) -> None:
        self.http.call("POST", f"/v3/tasks/{quote(task_id, safe='')}/discard", body={})

    def list_groups(self, *, before: str | None, limit: int) -> Json:
        query: dict[str, str | int] = {"limit": limit} | ({"before": before} if before else {})
        return self._call("GET", "/v3/groups", query=query)

    def list_group(self, task_group_id: str) -> list[Json]:
        return list(self.http.call("GET", f"/v2/taskgroup/{quote(task_group_id, safe='')}")["tasks"])

    def list_events(self, task_id: str) -> list[Json]:
        events: list[Json] = []
        after: int | None = 0
        while after is not None:
            page = self._call("GET", f"/v3/tasks/{quote(task_id, safe='')}/events", query={"after": after})
            events += page["events"]
            after = page.get("next")
        return events

    def why(self, task_id: str, *, retry_timeout_s: float | None = None, stop: threading.Event | None = None) -> Json:
        path = f"/v3/tasks/{quote(task_id, safe='')}/why"
        return self._call("GET", path, retry_timeout_s=retry_timeout_s, stop=stop)

    def batch_output(self, tasks: Sequence[Json], *, stop: threading.Event | None = None) -> dict[str, Json]:
        """New output of tasks by id: of each its id, and the bytes from which on to read its streams."""
        answer = self.http.call("POST", "/v3/batch_output", body={"tasks": tasks}, stop=stop)
        return dict(answer["results"])

    def cancel(
        self, task_ids: Sequence[str], *, retry_timeout_s: float | None = None, stop: threading.Event | None = None
    ) -> dict[str, Json]:
        answer = self.http.call(
            "POST", "/v3/tasks/cancel", body={"task_ids": task_ids}, retry_timeout_s=retry_timeout_s, stop=stop
        )
        return dict(answer["results"])

    def page_of_endpoint_tasks(self, endpoint_id: str, query: Json) -> Json:
        """``tasks``, and with ``next`` there may be more: the query again with that as ``after``."""
        return self._call("GET", f"/v3/endpoints/{quote(endpoint_id, safe='')}/tasks", query=_given(query))

    def cancel_endpoint_tasks(self, endpoint_id: str, body: Json) -> Json:
        """``results``, and with ``next`` there may be more: the request again with that as ``after``."""
        return self._call("POST", f"/v3/endpoints/{quote(endpoint_id, safe='')}/tasks/cancel", body=_given(body))

    def get_endpoint_qos(self, endpoint_id: str) -> Json:
        return self._call("GET", f"/v3/endpoints/{quote(endpoint_id, safe='')}/qos")

    def endpoint_keys(self, endpoint_id: str) -> Json:
        return self._call("GET", f"/v3/endpoints/{quote(endpoint_id, safe='')}/keys")

    def revoke_endpoint_key(self, endpoint_id: str, public_key: str) -> None:
        path = f"/v3/endpoints/{quote(endpoint_id, safe='')}/keys"
        self._call("DELETE", path, query={"public_key": public_key})

    def page_of_audit(self, query: Json) -> Json:
        """``entries``, and with ``next`` there may be more: the query again with that as ``after``."""
        return self._call("GET", "/v3/audit", query=_given(query))

    def page_of_usage(self, query: Json) -> Json:
        """``usage``, and with ``next`` there may be more: the query again with that as ``after``."""
        return self._call("GET", "/v3/usage", query=_given(query))

    # the way to user bytes and results
    def grant_blob(self, *, size_bytes: int, sha256: str) -> Json:
        return self._call("POST", "/v3/blobs", body={"size_bytes": size_bytes, "sha256": sha256})

    def open_stream(self, public_key: str) -> Json:
        """Not repeated here: the caller polls meanwhile, and has its own back-off."""
        return self._call("POST", "/v3/stream", body={"public_key": public_key}, retry_timeout_s=0)


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

    def upload(self, data: bytes) -> BlobRef:
        """Put bytes into the blob store, unless equal bytes are there or on their way already.

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
            self._perform(upload, data, sha256)
        return upload.result()

    def forget(self, sha256: str) -> None:
        """Stop trusting that these bytes are in the store."""
        with self._lock:
            self._uploads.pop(sha256, None)

    def download(self, ref: BlobRef, url: str) -> memoryview:
        """Fetch bytes from a pre-signed address and verify their hash. The caller owns the memory: values that
        are read from it may keep it.

        :raises DeserializationError: if they are not.
        :raises FarcallError: if the store or the network refuses it.
        """
        data = self._api.http.get(url, most_bytes=ref.size_bytes)
        if len(data) != ref.size_bytes or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise DeserializationError(
                f"The bytes of blob {ref.blob_key} are not those that were stored.", hint="Request the result again."
            )
        return memoryview(data)

    def _perform(self, upload: concurrent.futures.Future[BlobRef], data: bytes, sha256: str) -> None:
        try:
            try:
                blob_key = self._put(data, sha256)
            except Forbidden:  # a pre-signed address lives for minutes, and the machine may have slept
                blob_key = self._put(data, sha256)
            upload.set_result(BlobRef(blob_key, len(data), sha256))
        except BaseException as error:
            self.forget(sha256)  # the next caller tries again
            upload.set_exception(error)
            raise

    def _put(self, data: bytes, sha256: str) -> str:
        grant = self._api.grant_blob(size_bytes=len(data), sha256=sha256)
        self._api.http.put(grant["upload_url"], data, headers=grant["headers"])
        return str(grant["blob_key"])


def _about(task_id: str, task: Json) -> Json:
    """An answer about a task, whose id says how it is read.

    :raises ProtocolError: for an answer about another task.
    """
    if task["task_id"] != task_id:
        raise ProtocolError(
            f"The API answered a request for task {task_id} with task {task['task_id']}",
            hint="Is api_url the address of Farcall's API?",
        )
    return task


def _unknown(task_id: str) -> Json:
    """A task that the caller does not have, as an answer about tasks shows one that failed."""
    error = TaskUnknown(f"There is no task {task_id}.").record
    return {"task_id": task_id, "status": "failed", "reason": error.message, "error": error.to_json()}


def _check_environment(body: Json, answer: Mapping[str, Any]) -> None:
    """:raises Unsupported: if the API left the environment of a function out, as earlier releases do."""
    if (body.get("container") or body.get("environment")) and not answer.get("environment"):
        raise Unsupported(
            "this API knows no environments of functions: the function is registered without one",
            hint="Name the container in each call, or let the deployment be updated.",
        )
