"""Blob relay: where a site blocks the blob store, large arguments and results go through the forwarder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path

import pytest

import farcall
from farcall_local.deployment import Deployment
from farcall_local.endpoint import LocalEndpoint
from farcall_local.tier import LocalTier
from tests.waiting import WAIT_S

BIG = 5_000_000
WARNING = "the blob store cannot be reached"
#: No server listens here, and HTTP goes through it; but not to the API, by that name.
WALL = {"HTTP_PROXY": "http://127.0.0.1:1", "http_proxy": "http://127.0.0.1:1", "NO_PROXY": "localhost"}


def turned(data: bytes) -> bytes:
    return data[::-1]


@pytest.fixture
def walled_in(cloud: Deployment, local_tier: LocalTier, tmp_path: Path) -> Iterator[Callable[..., LocalEndpoint]]:
    """Makes endpoints that reach the API and the forwarder, and not the blob store."""
    with ExitStack() as stack:

        def make(mode: str = "auto") -> LocalEndpoint:
            environment = cloud.environment("ada") | WALL
            environment["FARCALL_API_URL"] = cloud.api_url.replace("127.0.0.1", "localhost")
            endpoint = LocalEndpoint("walled", home=tmp_path, environment=environment)
            endpoint.configure()
            with (endpoint.directory / "config.yaml").open("a") as config:
                config.write(f"\nblobs: {mode}\n")
            return stack.enter_context(endpoint)

        yield make


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["auto", "relay"])
def test_large_data_goes_through_the_forwarder(
    mode: str, client: farcall.Client, walled_in: Callable[..., LocalEndpoint]
) -> None:
    endpoint = walled_in(mode)
    arguments = [os.urandom(BIG) for _ in range(3)]
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
        futures = [executor.submit(turned, data) for data in arguments]
        assert [future.result(WAIT_S) for future in futures] == [data[::-1] for data in arguments]
    assert endpoint.log_path.read_text().count(WARNING) == (mode == "auto")


def test_without_the_relay_the_error_names_the_reason(
    client: farcall.Client, walled_in: Callable[..., LocalEndpoint]
) -> None:
    endpoint = walled_in("direct")
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
        future = executor.submit(turned, os.urandom(BIG))
        with pytest.raises(Exception, match="ConnectError"):
            future.result(WAIT_S)


def test_a_killed_forwarder_interrupts_no_transfer_for_good(
    client: farcall.Client, walled_in: Callable[..., LocalEndpoint], local_tier: LocalTier
) -> None:
    endpoint = walled_in("relay")
    arguments = [os.urandom(BIG) for _ in range(8)]
    with farcall.Executor(endpoint.endpoint_id, client=client) as executor:
        futures = [executor.submit(turned, data) for data in arguments]
        deadline = time.monotonic() + WAIT_S
        for done in (1, 4):
            while sum(future.done() for future in futures) < done:
                assert time.monotonic() < deadline
                wait(futures, timeout=0.05, return_when="FIRST_COMPLETED")
            local_tier.kill("forwarder")
        wait(futures, timeout=WAIT_S)
        assert [future.result(0) for future in futures] == [data[::-1] for data in arguments]
