"""The API behind API Gateway (REST API, one proxy route)."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common.store import StoreSettings, open_stores
from farcall_lambdas.app import Application
from farcall_lambdas.fleet import EcsFleet
from farcall_lambdas.logs import configure
from farcall_lambdas.settings import ApiSettings

__all__ = ["handle"]


def handle(event: Mapping[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Answer a proxy event."""
    return _application().answer(event, context)


@functools.cache
def _application() -> Application:
    configure(os.environ.get("FARCALL_LOG_LEVEL", "INFO"))
    return Application.over(
        open_stores(StoreSettings.from_environment(os.environ), max_connections=1),
        ApiSettings.from_environment(os.environ),
        fleet=EcsFleet.from_environment(os.environ),
    )
