"""Fixture: a LocalStack for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farcall_localstack.environment import ensure_environment
from farcall_localstack.server import LocalStackServer


@pytest.fixture(scope="module")
def localstack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStackServer]:
    """One LocalStack for all tests of a file; each test deletes its resources."""
    server = LocalStackServer(ensure_environment(), directory=tmp_path_factory.mktemp("localstack"))
    try:
        server.start()
        yield server
    finally:
        server.stop()
    assert not (server.directory / "snapshots").exists()
