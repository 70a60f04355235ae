"""Servers and endpoints that integration tests may ask for, and the order of the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.localstack_server import localstack
from tests.integration.store_servers import (
    postgres_server,
    postgres_url,
    s3_environment,
    s3_server,
    valkey,
    valkey_server,
)
from tests.support.endpoint.levels import cloud, level

__all__ = [
    "cloud",
    "level",
    "localstack",
    "postgres_server",
    "postgres_url",
    "s3_environment",
    "s3_server",
    "valkey",
    "valkey_server",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that may take longest first: workers that share the files then end at about the same time."""
    longest: dict[Path, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0.0), limit.args[0] if limit else 0.0)
    items.sort(key=lambda item: -longest[item.path])
