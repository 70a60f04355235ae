"""API function behind API Gateway (REST API, one proxy route)."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from typing import Any, Final

from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common.errors import FarcallError
from farcall_common.store import Stores, StoreSettings, open_stores
from farcall_lambdas.app import Application
from farcall_lambdas.fleet import EcsFleet
from farcall_lambdas.handlers import SILENCE_S
from farcall_lambdas.issued_credentials import IssuedCredentials
from farcall_lambdas.logs import configure
from farcall_lambdas.settings import ApiSettings
from farcall_lambdas.signed_caller import CallerKey, CallerKeys

#: While the database has no free connection, requests must not pile up: they are refused soon, and repeated.
_CONNECTION_WAIT_S: Final = 2.0

#: A request to a database that hangs must have an answer before API Gateway gives up, after 29 seconds.
_ANSWER_S: Final = 20.0


def handle(event: Mapping[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Answer a proxy event."""
    return _application().answer(event, context)


@functools.cache
def _application() -> Application:
    configure(os.environ.get("FARCALL_LOG_LEVEL", "INFO"))
    return Application.over(
        _stores(),
        ApiSettings.from_environment(os.environ),
        fleet=EcsFleet.from_environment(os.environ),
        caller_keys=CallerKeys.from_environment(os.environ),
        credentials=IssuedCredentials(CallerKey.from_environment(os.environ)),
    )


@functools.cache
def _stores() -> Stores:
    return open_stores(
        StoreSettings.from_environment(os.environ),
        max_connections=1,
        connection_wait_s=_CONNECTION_WAIT_S,
        silence_s=SILENCE_S,
        answer_s=_ANSWER_S,
    )


def _initialize() -> None:
    """Connect while Lambda initializes the environment, with a whole processor, and not in the first request.

    What fails here is tried again by the first request, which also answers with the error.
    """
    with contextlib.suppress(FarcallError):
        _application()
        _stores().database.ping()
        _stores().queue.ping()


if "AWS_LAMBDA_INITIALIZATION_TYPE" in os.environ:
    _initialize()
