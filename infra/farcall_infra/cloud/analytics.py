"""The storage of exchanges of a deployment: its addresses, and the cache that is created on demand."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Final

from farcall_common.errors import ConfigurationError, Unavailable
from farcall_infra.cloud.aws import Aws
from farcall_infra.cloud.errors import DeploymentUnknown
from farcall_infra.deployment import CACHE_FUNCTION_OUTPUT, EXPRESS_OUTPUT, STORAGE_OUTPUT, stack_name

_POLL_S: Final = 5.0
_POLLS: Final = 120
_AVAILABLE: Final = "available"
_NONE: Final = ""
#: A cache in one of these states becomes another one by itself.
_PASSING: Final = frozenset({"creating", "modifying", "deleting", _NONE})


class Action(enum.StrEnum):
    """Actions of the function that manages the cache."""

    STATUS = "status"
    START = "start"
    STOP = "stop"


@dataclasses.dataclass(frozen=True)
class Storage:
    """Addresses for ``storage=`` and ``fast_storage=``. ``express`` and ``cache`` are empty if there is none;
    ``cache_status`` is the status in ElastiCache. ``has_cache`` is whether a cache can be created."""

    bucket: str
    express: str
    has_cache: bool
    cache: str
    cache_status: str


def find_storage(aws: Aws, name: str, *, action: Action, pause: Callable[[float], None]) -> Storage:
    """The storage of the deployment ``name``. With :attr:`Action.START` its cache is created, if there is none, and is
    available at the end; ``pause`` waits for a number of seconds.

    :raises DeploymentUnknown: if the deployment has no storage of exchanges.
    :raises ConfigurationError: if it has no cache, and the action is for one.
    :raises Unavailable: if the cache cannot be created, or is not available after ten minutes.
    """
    stack = aws.stack(stack_name(name, "analytics"))
    if stack is None or STORAGE_OUTPUT not in stack.outputs:
        raise DeploymentUnknown(
            f"the deployment {name!r} has no storage of analytics in {aws.region}",
            hint="Deploy with -c analytics.enabled=true, or check --name, --region and AWS_PROFILE.",
        )
    function = stack.outputs.get(CACHE_FUNCTION_OUTPUT, "")
    if not function and action is not Action.STATUS:
        raise ConfigurationError(
            "the deployment has no cache", hint="Deploy with analytics.cache_gb above 0; LocalStack has none."
        )
    answer = aws.invoke(function, {"action": action}) if function else {}
    if action is Action.START:
        for _ in range(_POLLS):
            if answer["status"] not in _PASSING:
                break
            pause(_POLL_S)
            answer = aws.invoke(function, {"action": action})
        if answer["status"] != _AVAILABLE:
            raise Unavailable(
                f"the cache is {answer['status'] or 'not there'} after {_POLL_S * _POLLS:.0f} s",
                hint="See the cache in the console of ElastiCache, and run the command again.",
            )
    return Storage(
        stack.outputs[STORAGE_OUTPUT],
        stack.outputs.get(EXPRESS_OUTPUT, ""),
        has_cache=bool(function),
        cache=answer.get("address", ""),
        cache_status=answer.get("status", ""),
    )
