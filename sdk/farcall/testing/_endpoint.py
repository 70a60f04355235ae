"""The endpoint of the fake cloud, as the API shows it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from farcall.testing._shapes import Task
from farcall_common.errors import EndpointUnknown

Json = dict[str, Any]

_UNSET: Final = (
    "display_name",
    "description",
    "hostname",
    "local_user",
    "ip_address",
    "endpoint_version",
    "sdk_version",
)


class Endpoint:
    """State of the endpoint, and its routes.

    :param tasks: all of them run on it.
    """

    def __init__(self, tasks: Mapping[str, Task], *, owner_id: str) -> None:
        self.endpoint_id: Final = str(uuid.uuid4())
        self.runtime: Json = {}
        self.is_online = False
        self._tasks = tasks
        self._owner_id = owner_id
        self._is_deleted = False

    @property
    def routes(self) -> Sequence[tuple[str, str, Callable[..., Any]]]:
        """Method, pattern of the path, and handler."""
        return (
            ("GET", "/v2/endpoints", self._list),
            ("GET", "/v2/endpoints/([^/]+)", self._get),
            ("DELETE", "/v2/endpoints/([^/]+)", self._delete),
            ("GET", "/v2/endpoints/([^/]+)/status", self._get_status),
            ("GET", "/v3/endpoints/([^/]+)/allowed_functions", self._get_allowed_functions),
        )

    def check(self, endpoint_id: str) -> None:
        """:raises EndpointUnknown: unless this is the endpoint."""
        if endpoint_id != self.endpoint_id or self._is_deleted:
            raise EndpointUnknown(f"there is no endpoint {endpoint_id}")

    def status(self) -> Json:
        """Whether it is online, and its numbers of workers and tasks."""
        waiting = sum(not task.state.is_terminal for task in self._tasks.values())
        workers = int(self.is_online)
        details = {"managers": workers, "total_workers": workers, "idle_workers": int(self.is_online and not waiting)}
        details |= {"pending_tasks": waiting, "outstanding_tasks": waiting}
        return {"status": "online" if self.is_online else "offline", "details": details}

    def _list(self, _: Json) -> list[Json]:
        endpoint = {"uuid": self.endpoint_id, "name": "fake", "display_name": None, "owner": self._owner_id}
        return [] if self._is_deleted else [endpoint]

    def _delete(self, _: Json, endpoint_id: str) -> Json:
        self.check(endpoint_id)
        self._is_deleted = True
        return {"result": 302}

    def _get(self, _: Json, endpoint_id: str) -> Json:
        self.check(endpoint_id)
        shown = {
            "uuid": endpoint_id,
            "name": "fake",
            "multi_user": False,
            "public": False,
            "endpoint_config": "",
            "user_config_template": "",
            "user_config_schema": {},
            "subscription_uuid": None,
        }
        return shown | dict.fromkeys(_UNSET) | ({"runtime": self.runtime} if self.runtime else {})

    def _get_status(self, _: Json, endpoint_id: str) -> Json:
        self.check(endpoint_id)
        return self.status()

    def _get_allowed_functions(self, _: Json, endpoint_id: str) -> Json:
        self.check(endpoint_id)
        return {"endpoint_id": endpoint_id, "restricted": False, "functions": []}
