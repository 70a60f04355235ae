"""The end of tickets, with processes: API, forwarder, agent and client reconnect with new ones, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import farcall
from farcall_local.endpoint import LocalEndpoint
from tests.integration.forwarder_peers import ForwarderProcess
from tests.integration.test_api_process import Api, environ
from tests.waiting import WAIT_S, wait_until

__all__ = ["environ"]


def double(number: int) -> int:
    return 2 * number


@pytest.fixture
def api(environ: dict[str, str], tmp_path: Path) -> Iterator[Api]:
    api = Api(environ | {"FARCALL_TICKET_TTL_S": "2"}, tmp_path)
    api.start()
    yield api
    api.stop()


@pytest.fixture
def forwarder(environ: dict[str, str], tmp_path: Path) -> Iterator[ForwarderProcess]:
    forwarder = ForwarderProcess(environ, tmp_path)
    yield forwarder
    forwarder.end()


def test_agent_and_client_reconnect_when_their_tickets_end(
    api: Api, forwarder: ForwarderProcess, tmp_path: Path
) -> None:
    url = str(api.client.base_url).rstrip("/")
    user = {"FARCALL_API_URL": url, "FARCALL_TOKEN": "sesame"}

    def tickets_ended() -> int:
        return int(httpx.get(forwarder.health_url, trust_env=False).json()["counters"].get("tickets_ended", 0))

    with (
        LocalEndpoint("laptop", home=tmp_path / "home", environment=user) as endpoint,
        farcall.Client(url, "sesame") as client,
        farcall.Executor(endpoint.endpoint_id, client=client) as executor,
    ):
        done: list[int] = []

        def has_ended_often() -> bool:
            done.append(executor.submit(double, len(done)).result(WAIT_S))
            return tickets_ended() >= 6

        wait_until(has_ended_often, "the tickets of the agent and of the client have ended three times")
        assert done == [2 * number for number in range(len(done))]
