"""Logging: JSON lines on stderr. Never a payload, a token or an environment."""

from __future__ import annotations

import sys
from typing import Final

from aws_lambda_powertools import Logger
from aws_lambda_powertools.logging import utils

SERVICE: Final = "farcall-lambdas"

#: The parent of the loggers of this package, which are made with ``Logger(service=SERVICE, child=True)``.
logger = Logger(service=SERVICE, stream=sys.stderr, serialize_stacktrace=False)


def log_ids(**ids: str) -> None:
    """Add ``ids`` to all later lines of this invocation or request, instead of those of the one before. Empty ones are
    left out."""
    logger.thread_safe_clear_keys()
    logger.thread_safe_append_keys(**{name: value for name, value in ids.items() if value})


def configure(level: str, *, servers: frozenset[str] = frozenset()) -> None:
    """Set the level, and let loggers of server libraries write in the same form."""
    logger.setLevel(level.upper())
    if servers:
        utils.copy_config_to_registered_loggers(logger, include=set(servers), ignore_log_level=True)
