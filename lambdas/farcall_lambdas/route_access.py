"""Table of routes and rights: what a caller needs for each route of the API."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from farcall_common.errors import Forbidden
from farcall_lambdas.identity import Identity

#: Each right includes those before it. ``own``: the object belongs to the caller.
Right = Literal["see", "use", "manage", "own"]
Object = Literal[
    "account", "action", "alias", "container", "endpoint", "function", "team", "task", "task_group", "token"
]
Limit = Literal["endpoints", "functions"]

#: Families of operations that tokens are limited to, with a description of each.
SCOPES: Final[Mapping[str, str]] = {
    "account:read": "Read your limits and the audit log",
    "endpoints:connect": "Connect your endpoints, and make credentials for them",
    "endpoints:manage": "Change and delete your endpoints, revoke their keys, list and cancel tasks there",
    "endpoints:read": "List and read endpoints",
    "endpoints:register": "Register endpoints",
    "functions:read": "List and read functions, aliases and containers",
    "functions:write": "Register, change and delete functions, aliases and containers",
    "shares:manage": "Share endpoints and functions, and change teams",
    "tasks:cancel": "Cancel and discard tasks",
    "tasks:read": "Read tasks and their results",
    "tasks:submit": "Submit and retry tasks",
}

#: A scope that no token has: people use these routes with their login.
INTERACTIVE: Final = "tokens:manage"


@dataclasses.dataclass(frozen=True)
class RouteAccess:
    """Requirements of a route: ``right`` on the ``object`` that the path or the body names (neither where the
    route is about nothing but the caller), and, with a token, ``scope`` (None for what every token may do).

    Tokens may be limited to some endpoints or functions: a route refuses those with other limits than its ``limits``,
    which it keeps.
    """

    object: Object | None
    right: Right | None
    scope: str | None
    limits: frozenset[Limit] = frozenset()

    def to_json(self) -> dict[str, str | list[str] | None]:
        """The entry of the OpenAPI document."""
        return {**dataclasses.asdict(self), "limits": sorted(self.limits)}

    def check_token(self, caller: Identity) -> None:
        """:raises Forbidden: if the caller has a token that is not for this route."""
        grant = caller.grant
        if grant is None:
            return
        if self.scope == INTERACTIVE:
            reason, hint = "cannot be used for this", "Use your login: `farcall login`."
        elif self.scope not in {None, *grant.scopes}:
            reason, hint = f"lacks the scope {self.scope}", f"Make a token with it: `--scope {self.scope}`."
        elif grant.endpoints is not None and "endpoints" not in self.limits:
            reason, hint = "is limited to endpoints, and this is about others, too", "Use a token without that limit."
        elif grant.functions is not None and "functions" not in self.limits:
            reason, hint = "is limited to functions, and this is about others, too", "Use a token without that limit."
        else:
            return
        raise Forbidden(f"The token {grant.name!r} {reason}.", hint=hint).of(
            caller.token_id, owner_id=caller.identity_id
        )


_ENDPOINTS: Final = frozenset[Limit]({"endpoints"})
_FUNCTIONS: Final = frozenset[Limit]({"functions"})
_BOTH: Final = _ENDPOINTS | _FUNCTIONS

_ANYONE: Final = RouteAccess(None, None, None, limits=_BOTH)
_REGISTER_FUNCTION: Final = RouteAccess(None, None, "functions:write", limits=_ENDPOINTS)
_SEE_FUNCTION: Final = RouteAccess("function", "see", "functions:read", limits=_BOTH)
_SEE_CONTAINER: Final = RouteAccess("container", "own", "functions:read", limits=_BOTH)
_SEE_ENDPOINT: Final = RouteAccess("endpoint", "see", "endpoints:read", limits=_BOTH)
_READ_QOS: Final = RouteAccess("endpoint", "use", "endpoints:read", limits=_ENDPOINTS)
_REGISTER_ENDPOINT: Final = RouteAccess(None, None, "endpoints:register", limits=_FUNCTIONS)
_MANAGE_ENDPOINT: Final = RouteAccess("endpoint", "manage", "endpoints:manage", limits=_BOTH)
_MANAGE_TASKS: Final = RouteAccess("endpoint", "manage", "endpoints:manage", limits=_ENDPOINTS)
_OWN_ENDPOINT: Final = RouteAccess("endpoint", "own", "endpoints:manage", limits=_BOTH)
_SHARE_ENDPOINT: Final = RouteAccess("endpoint", "manage", "shares:manage", _ENDPOINTS)
_SHARE_FUNCTION: Final = RouteAccess("function", "manage", "shares:manage", _FUNCTIONS)
_CONNECT: Final = RouteAccess("endpoint", "own", "endpoints:connect", limits=_BOTH)
_READ_TASK: Final = RouteAccess("task", "own", "tasks:read", limits=_BOTH)
_CANCEL_TASK: Final = RouteAccess("task", "own", "tasks:cancel", limits=_BOTH)
_TOKENS: Final = RouteAccess(None, None, INTERACTIVE)
_SUBMIT: Final = RouteAccess("endpoint", "use", "tasks:submit", limits=_BOTH)

_READ_ACTION: Final = RouteAccess("action", "own", "tasks:read", limits=_BOTH)
_MANAGE_ACTION: Final = RouteAccess("action", "own", "tasks:cancel", limits=_BOTH)

#: By method and path, as routes are declared. The API does not start with a route that is not here.
ROUTE_ACCESS: Final[Mapping[tuple[str, str], RouteAccess]] = {
    ("GET", "/v2/version"): _ANYONE,
    ("GET", "/v3/whoami"): _ANYONE,
    ("GET", "/v3/usage"): RouteAccess(None, None, "account:read"),
    ("GET", "/v3/audit"): RouteAccess(None, None, "account:read"),
    # tokens and service accounts
    ("POST", "/v3/tokens"): _TOKENS,
    ("GET", "/v3/tokens"): _TOKENS,
    ("DELETE", "/v3/tokens/<token_id>"): RouteAccess("token", "own", INTERACTIVE),
    ("POST", "/v3/accounts"): _TOKENS,
    ("GET", "/v3/accounts"): _TOKENS,
    ("DELETE", "/v3/accounts/<account_id>"): RouteAccess("account", "own", INTERACTIVE),
    # functions
    ("POST", "/v2/functions"): _REGISTER_FUNCTION,
    ("POST", "/v3/functions"): _REGISTER_FUNCTION,
    ("GET", "/v3/functions"): RouteAccess(None, None, "functions:read", limits=_ENDPOINTS),
    ("GET", "/v2/functions/<function_id>"): _SEE_FUNCTION,
    ("GET", "/v3/functions/<function>"): _SEE_FUNCTION,
    ("GET", "/v3/functions/<function_id>/versions"): _SEE_FUNCTION,
    ("PUT", "/v3/functions/<function_id>"): RouteAccess("function", "manage", "functions:write", limits=_BOTH),
    ("DELETE", "/v2/functions/<function_id>"): RouteAccess("function", "own", "functions:write", limits=_BOTH),
    ("POST", "/v3/aliases"): RouteAccess("function", "see", "functions:write", limits=_BOTH),
    ("GET", "/v3/aliases"): RouteAccess(None, None, "functions:read", limits=_ENDPOINTS),
    ("DELETE", "/v3/aliases/<name>"): RouteAccess("alias", "own", "functions:write", limits=_ENDPOINTS),
    # containers
    ("POST", "/v2/containers"): _REGISTER_FUNCTION,
    ("POST", "/v3/containers"): _REGISTER_FUNCTION,
    ("GET", "/v3/containers"): RouteAccess(None, None, "functions:read", limits=_ENDPOINTS),
    ("GET", "/v3/containers/<container>"): _SEE_CONTAINER,
    ("GET", "/v2/containers/build/<container_id>"): _SEE_CONTAINER,
    ("GET", "/v2/containers/<container_id>/<technology>"): _SEE_CONTAINER,
    ("DELETE", "/v3/containers/<container>"): RouteAccess("container", "own", "functions:write", limits=_BOTH),
    # endpoints
    ("POST", "/v2/endpoints"): _REGISTER_ENDPOINT,
    ("POST", "/v3/endpoints"): _REGISTER_ENDPOINT,
    ("GET", "/v2/endpoints"): RouteAccess(None, None, "endpoints:read", limits=_FUNCTIONS),
    ("GET", "/v2/endpoints/<endpoint_id>"): _SEE_ENDPOINT,
    ("GET", "/v2/endpoints/<endpoint_id>/status"): _SEE_ENDPOINT,
    ("GET", "/v3/endpoints/<endpoint_id>/allowed_functions"): _SEE_ENDPOINT,
    ("GET", "/v3/endpoints/<endpoint_id>/qos"): _READ_QOS,
    ("POST", "/v2/endpoints/<endpoint_id>/lock"): _SEE_ENDPOINT,
    ("POST", "/v3/endpoints/<endpoint_id>/lock"): _SEE_ENDPOINT,
    ("PUT", "/v3/endpoints/<endpoint_id>"): _MANAGE_ENDPOINT,
    ("DELETE", "/v2/endpoints/<endpoint_id>"): _OWN_ENDPOINT,
    ("GET", "/v3/endpoints/<endpoint_id>/keys"): _MANAGE_ENDPOINT,
    ("DELETE", "/v3/endpoints/<endpoint_id>/keys"): _OWN_ENDPOINT,
    ("GET", "/v3/endpoints/<endpoint_id>/tasks"): _MANAGE_TASKS,
    ("POST", "/v3/endpoints/<endpoint_id>/tasks/cancel"): _MANAGE_TASKS,
    # sharing
    ("GET", "/v3/endpoints/<endpoint_id>/shares"): _MANAGE_ENDPOINT,
    ("PUT", "/v3/endpoints/<endpoint_id>/shares"): _SHARE_ENDPOINT,
    ("DELETE", "/v3/endpoints/<endpoint_id>/shares/<share_id>"): _SHARE_ENDPOINT,
    ("GET", "/v3/functions/<function_id>/shares"): _SHARE_FUNCTION,
    ("PUT", "/v3/functions/<function_id>/shares"): _SHARE_FUNCTION,
    ("DELETE", "/v3/functions/<function_id>/shares/<share_id>"): _SHARE_FUNCTION,
    ("GET", "/v3/shared"): RouteAccess(None, None, "account:read"),
    ("GET", "/v3/teams"): RouteAccess(None, None, "account:read"),
    ("POST", "/v3/teams"): RouteAccess(None, None, "shares:manage"),
    ("DELETE", "/v3/teams/<team_id>"): RouteAccess("team", "own", "shares:manage"),
    ("GET", "/v3/teams/<team_id>/members"): RouteAccess("team", "see", "account:read"),
    ("PUT", "/v3/teams/<team_id>/members"): RouteAccess("team", "own", "shares:manage"),
    ("DELETE", "/v3/teams/<team_id>/members"): RouteAccess("team", "own", "shares:manage"),
    # connections
    ("POST", "/v3/endpoints/<endpoint_id>/connect"): _CONNECT,
    ("POST", "/v3/endpoints/<endpoint_id>/credential"): _CONNECT,
    ("DELETE", "/v3/endpoints/<endpoint_id>/credential"): _OWN_ENDPOINT,
    ("POST", "/v3/stream"): RouteAccess(None, None, "tasks:read"),
    ("GET", "/v2/get_amqp_result_connection_url"): _ANYONE,
    # tasks
    ("POST", "/v2/submit"): _SUBMIT,
    ("POST", "/v3/endpoints/<endpoint_id>/submit"): _SUBMIT,
    ("POST", "/v3/blobs"): RouteAccess(None, None, "tasks:submit", limits=_BOTH),
    ("GET", "/v3/tasks"): RouteAccess(None, None, "tasks:read"),
    ("GET", "/v3/ids"): RouteAccess(None, None, "tasks:read"),
    ("GET", "/v3/groups"): RouteAccess(None, None, "tasks:read"),
    ("GET", "/v2/taskgroup/<task_group_id>"): RouteAccess("task_group", "own", "tasks:read", limits=_BOTH),
    ("GET", "/v2/tasks/<task_id>"): _READ_TASK,
    ("POST", "/v2/batch_status"): _READ_TASK,
    ("POST", "/v3/batch_output"): _READ_TASK,
    ("GET", "/v3/tasks/<task_id>/events"): _READ_TASK,
    ("GET", "/v3/tasks/<task_id>/why"): _READ_TASK,
    ("POST", "/v3/tasks/<task_id>/cancel"): _CANCEL_TASK,
    ("POST", "/v3/tasks/cancel"): _CANCEL_TASK,
    ("POST", "/v3/tasks/<task_id>/discard"): _CANCEL_TASK,
    ("POST", "/v3/tasks/<task_id>/retry"): RouteAccess("task", "own", "tasks:submit", limits=_BOTH),
    # actions of Globus Flows: creators let others read and manage theirs, and then these count as owners
    ("GET", "/actions"): _ANYONE,
    ("POST", "/actions/run"): _SUBMIT,
    ("POST", "/actions/actions"): _SUBMIT,
    ("GET", "/actions/actions"): RouteAccess(None, None, "tasks:read", limits=_BOTH),
    ("GET", "/actions/<action_id>/status"): _READ_ACTION,
    ("GET", "/actions/<action_id>/log"): _READ_ACTION,
    ("POST", "/actions/<action_id>/cancel"): _MANAGE_ACTION,
    ("POST", "/actions/<action_id>/release"): _MANAGE_ACTION,
    ("GET", "/actions/actions/<action_id>"): _READ_ACTION,
    ("GET", "/actions/actions/<action_id>/log"): _READ_ACTION,
    ("POST", "/actions/actions/<action_id>/cancel"): _MANAGE_ACTION,
    ("DELETE", "/actions/actions/<action_id>"): _MANAGE_ACTION,
}
