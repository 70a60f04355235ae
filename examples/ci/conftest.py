"""The endpoint that the tests run functions on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import farcall


@pytest.fixture(scope="session")
def executor() -> Iterator[farcall.Executor]:
    """One connection for all tests."""
    with farcall.Executor("here") as running:
        yield running
