"""Reconciler function, run by a schedule every minute."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from farcall_common.store import Stores, StoreSettings, open_stores
from farcall_lambdas.fleet import EcsFleet
from farcall_lambdas.handlers import SILENCE_S
from farcall_lambdas.logs import configure, log_ids
from farcall_lambdas.services import Services
from farcall_lambdas.settings import ApiSettings


def handle(event: Mapping[str, Any], context: LambdaContext) -> dict[str, int]:  # noqa: ARG001  # Lambda's signature
    """One round; returns what it did."""
    log_ids(function_request_id=context.aws_request_id)
    services = _services()
    return {**dataclasses.asdict(services.reconciler.run()), "slept": services.idle.run()}


@functools.cache
def _services() -> Services:
    configure(os.environ.get("FARCALL_LOG_LEVEL", "INFO"))
    fleet = EcsFleet.from_environment(os.environ)
    return Services.over(_stores(), ApiSettings.from_environment(os.environ), fleet=fleet)


@functools.cache
def _stores() -> Stores:
    return open_stores(StoreSettings.without_blobs(os.environ), max_connections=1, silence_s=SILENCE_S)
