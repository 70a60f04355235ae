"""Exchange cache function: called by a schedule to delete an idle cache, and by users to create one.

Users call it with ``{"action": "start"}``, ``"stop"`` or ``"status"``; the answer has the cache's ``status`` in
ElastiCache's words, empty without a cache, and its ``address`` when it is available.
"""

from __future__ import annotations

import datetime as dt
import functools
import os
from collections.abc import Mapping
from typing import Any

from aws_lambda_powertools import Logger
from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common.errors import InvalidRequest
from farcall_lambdas.cache_traffic import CloudWatchMeasurements
from farcall_lambdas.exchange_cache import Decision, ExchangeCache, Limits
from farcall_lambdas.logs import SERVICE, configure, log_ids
from farcall_lambdas.serverless_cache import ServerlessCache

logger = Logger(service=SERVICE, child=True)


def handle(event: Mapping[str, Any], context: LambdaContext) -> dict[str, str]:
    """Answer a user's call, or check the cache for the schedule."""
    log_ids(function_request_id=context.aws_request_id)
    return answer(_cache(), event, now=dt.datetime.now(dt.UTC))


def answer(cache: ExchangeCache, event: Mapping[str, Any], *, now: dt.datetime) -> dict[str, str]:
    """Return the answer of the function to an event.

    :raises InvalidRequest: if the event has an unknown action.
    :raises Unavailable: if AWS does not answer.
    """
    if event.get("source") == "aws.events":
        decision = cache.delete_if_idle(now)
        log = logger.warning if decision in (Decision.UNMEASURED, Decision.FAILED) else logger.info
        log("exchange cache", extra={"decision": decision.value})
        return {"decision": decision.value}
    actions = {"start": cache.start, "stop": cache.stop, "status": cache.find}
    action = event.get("action")
    if action not in actions:
        raise InvalidRequest(f"Unknown action {action!r}.", hint=f"Choose one of: {', '.join(actions)}.")
    found = actions[action]()
    if found is None:
        return {"status": "creating" if action == "start" else "", "address": ""}
    return {"status": found.status, "address": found.address}


@functools.cache
def _cache() -> ExchangeCache:
    configure(os.environ.get("FARCALL_LOG_LEVEL", "INFO"))
    serverless = ServerlessCache.from_environment(os.environ)
    return ExchangeCache(serverless, CloudWatchMeasurements(serverless.name), Limits.from_environment(os.environ))
