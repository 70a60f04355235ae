"""Table of routes and rights: what a caller needs for each route of the API."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

#: Each right includes those before it. ``own``: the object belongs to the caller.
Right = Literal["see", "use", "manage", "own"]
Object = Literal["alias", "container", "endpoint", "function", "task", "task_group"]

#: Families of operations that tokens are limited to, with a description of each.
SCOPES: Final[Mapping[str, str]] = {
    "account:read": "Read your limits and the audit log",
    "endpoints:connect": "Connect your endpoints, and make credentials for them",
    "endpoints:manage": "Change and delete your endpoints, revoke their keys, list and cancel tasks there",
    "endpoints:read": "List and read endpoints",
    "endpoints:register": "Register endpoints",
    "functions:read": "List and read functions, aliases and containers",
    "functions:write": "Register, change and delete functions, aliases and containers",
    "tasks:cancel": "Cancel and discard tasks",
    "tasks:read": "Read tasks and their results",
    "tasks:submit": "Submit and retry tasks",
}


@dataclasses.dataclass(frozen=True)
class RouteAccess:
    """What a caller needs for a route: ``right`` on the ``object`` that the path or the body names (neither where the
    route is about nothing but the caller), and, with a token, ``scope`` (None for what every token may do).

    A token that is limited to endpoints or functions is refused unless the route ``keeps_limits``.
    """

    object: Object | None
    right: Right | None
    scope: str | None
    keeps_limits: bool = False

    def to_json(self) -> dict[str, str | bool | None]:
        """The entry of the OpenAPI document."""
        return dataclasses.asdict(self)


_ANYONE: Final = RouteAccess(None, None, None, keeps_limits=True)
_REGISTER_FUNCTION: Final = RouteAccess(None, None, "functions:write")
_SEE_FUNCTION: Final = RouteAccess("function", "see", "functions:read", keeps_limits=True)
_SEE_CONTAINER: Final = RouteAccess("container", "own", "functions:read")
_SEE_ENDPOINT: Final = RouteAccess("endpoint", "see", "endpoints:read", keeps_limits=True)
_REGISTER_ENDPOINT: Final = RouteAccess(None, None, "endpoints:register")
_MANAGE_ENDPOINT: Final = RouteAccess("endpoint", "manage", "endpoints:manage", keeps_limits=True)
_OWN_ENDPOINT: Final = RouteAccess("endpoint", "own", "endpoints:manage", keeps_limits=True)
_CONNECT: Final = RouteAccess("endpoint", "own", "endpoints:connect", keeps_limits=True)
_READ_TASK: Final = RouteAccess("task", "own", "tasks:read", keeps_limits=True)
_CANCEL_TASK: Final = RouteAccess("task", "own", "tasks:cancel", keeps_limits=True)
_SUBMIT: Final = RouteAccess("endpoint", "use", "tasks:submit", keeps_limits=True)

#: By method and path, as routes are declared. The API does not start with a route that is not here.
ROUTE_ACCESS: Final[Mapping[tuple[str, str], RouteAccess]] = {
    ("GET", "/v2/version"): _ANYONE,
    ("GET", "/v3/whoami"): _ANYONE,
    ("GET", "/v3/audit"): RouteAccess(None, None, "account:read"),
    # functions
    ("POST", "/v2/functions"): _REGISTER_FUNCTION,
    ("POST", "/v3/functions"): _REGISTER_FUNCTION,
    ("GET", "/v3/functions"): RouteAccess(None, None, "functions:read"),
    ("GET", "/v2/functions/<function_id>"): _SEE_FUNCTION,
    ("GET", "/v3/functions/<function>"): _SEE_FUNCTION,
    ("GET", "/v3/functions/<function_id>/versions"): _SEE_FUNCTION,
    ("PUT", "/v3/functions/<function_id>"): RouteAccess("function", "manage", "functions:write", keeps_limits=True),
    ("DELETE", "/v2/functions/<function_id>"): RouteAccess("function", "own", "functions:write", keeps_limits=True),
    ("POST", "/v3/aliases"): RouteAccess("function", "see", "functions:write"),
    ("GET", "/v3/aliases"): RouteAccess(None, None, "functions:read"),
    ("DELETE", "/v3/aliases/<name>"): RouteAccess("alias", "own", "functions:write"),
    # containers
    ("POST", "/v2/containers"): _REGISTER_FUNCTION,
    ("POST", "/v3/containers"): _REGISTER_FUNCTION,
    ("GET", "/v3/containers"): RouteAccess(None, None, "functions:read"),
    ("GET", "/v3/containers/<container>"): _SEE_CONTAINER,
    ("GET", "/v2/containers/build/<container_id>"): _SEE_CONTAINER,
    ("GET", "/v2/containers/<container_id>/<technology>"): _SEE_CONTAINER,
    ("DELETE", "/v3/containers/<container>"): RouteAccess("container", "own", "functions:write"),
    # endpoints
    ("POST", "/v2/endpoints"): _REGISTER_ENDPOINT,
    ("POST", "/v3/endpoints"): _REGISTER_ENDPOINT,
    ("GET", "/v2/endpoints"): RouteAccess(None, None, "endpoints:read"),
    ("GET", "/v2/endpoints/<endpoint_id>"): _SEE_ENDPOINT,
    ("GET", "/v2/endpoints/<endpoint_id>/status"): _SEE_ENDPOINT,
    ("GET", "/v3/endpoints/<endpoint_id>/allowed_functions"): _SEE_ENDPOINT,
    ("POST", "/v2/endpoints/<endpoint_id>/lock"): _SEE_ENDPOINT,
    ("POST", "/v3/endpoints/<endpoint_id>/lock"): _SEE_ENDPOINT,
    ("PUT", "/v3/endpoints/<endpoint_id>"): _MANAGE_ENDPOINT,
    ("DELETE", "/v2/endpoints/<endpoint_id>"): _OWN_ENDPOINT,
    ("GET", "/v3/endpoints/<endpoint_id>/keys"): _MANAGE_ENDPOINT,
    ("DELETE", "/v3/endpoints/<endpoint_id>/keys"): _OWN_ENDPOINT,
    ("GET", "/v3/endpoints/<endpoint_id>/tasks"): _MANAGE_ENDPOINT,
    ("POST", "/v3/endpoints/<endpoint_id>/tasks/cancel"): _MANAGE_ENDPOINT,
    # connections
    ("POST", "/v3/endpoints/<endpoint_id>/connect"): _CONNECT,
    ("POST", "/v3/endpoints/<endpoint_id>/credential"): _CONNECT,
    ("DELETE", "/v3/endpoints/<endpoint_id>/credential"): _OWN_ENDPOINT,
    ("POST", "/v3/stream"): RouteAccess(None, None, "tasks:read"),
    ("GET", "/v2/get_amqp_result_connection_url"): _ANYONE,
    # tasks
    ("POST", "/v2/submit"): _SUBMIT,
    ("POST", "/v3/endpoints/<endpoint_id>/submit"): _SUBMIT,
    ("POST", "/v3/blobs"): RouteAccess(None, None, "tasks:submit", keeps_limits=True),
    ("GET", "/v3/tasks"): RouteAccess(None, None, "tasks:read", keeps_limits=True),
    ("GET", "/v3/groups"): RouteAccess(None, None, "tasks:read"),
    ("GET", "/v2/taskgroup/<task_group_id>"): RouteAccess("task_group", "own", "tasks:read", keeps_limits=True),
    ("GET", "/v2/tasks/<task_id>"): _READ_TASK,
    ("POST", "/v2/batch_status"): _READ_TASK,
    ("GET", "/v3/tasks/<task_id>/events"): _READ_TASK,
    ("GET", "/v3/tasks/<task_id>/why"): _READ_TASK,
    ("POST", "/v3/tasks/<task_id>/cancel"): _CANCEL_TASK,
    ("POST", "/v3/tasks/cancel"): _CANCEL_TASK,
    ("POST", "/v3/tasks/<task_id>/discard"): _CANCEL_TASK,
    ("POST", "/v3/tasks/<task_id>/retry"): RouteAccess("task", "own", "tasks:submit", keeps_limits=True),
}
