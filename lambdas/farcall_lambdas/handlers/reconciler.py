"""The reconciler, run by a schedule every minute."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common.store import StoreSettings, open_stores
from farcall_lambdas.logs import configure
from farcall_lambdas.services import Reconciler, Services
from farcall_lambdas.settings import ApiSettings

__all__ = ["handle"]


def handle(event: Mapping[str, Any], context: LambdaContext) -> dict[str, int]:  # noqa: ARG001  # Lambda's signature
    """One round; answers what it did."""
    return dataclasses.asdict(_reconciler().run())


@functools.cache
def _reconciler() -> Reconciler:
    configure(os.environ.get("FARCALL_LOG_LEVEL", "INFO"))
    stores = open_stores(StoreSettings.from_environment(os.environ), max_connections=1)
    return Services.over(stores, ApiSettings.from_environment(os.environ)).reconciler
