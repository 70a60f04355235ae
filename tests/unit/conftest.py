"""A cloud in memory, for tests that ask for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from farcall import Client
from farcall.testing import FakeCloud


@pytest.fixture
def cloud() -> Iterator[FakeCloud]:
    with FakeCloud() as cloud:
        yield cloud


@pytest.fixture
def offline() -> Iterator[FakeCloud]:
    """A cloud whose endpoint runs nothing."""
    with FakeCloud(workers=0) as cloud:
        yield cloud


@pytest.fixture
def client(cloud: FakeCloud) -> Iterator[Client]:
    with cloud.client() as client:
        yield client
