"""When a tier is well: its API answers, and each forwarder that runs has said where it is, and says that it is well."""

from __future__ import annotations

import dataclasses
import http.server
import json
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from farcall_common.errors import Unavailable
from farcall_localstack import Tier
from farcall_localstack.server import READY_FILE


class _Answer(http.server.BaseHTTPRequestHandler):
    """An API that knows one token at ``/v2/version``; a forwarder that is well at ``/well`` and not at ``/ill``."""

    def do_GET(self) -> None:
        knows = self.headers.get("Authorization") == "Bearer a-token"
        is_well = self.path == "/well" or (self.path == "/v2/version" and knows)
        self.send_response(HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as in the base class
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answer) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


@pytest.fixture
def tier(url: str, tmp_path: Path) -> Tier:
    return Tier(
        name="farcall",
        profile="lab",
        target="localstack",
        stacks=(),
        api_url=url,
        token="a-token",
        tokens={},
        endpoint_url=url,
        directory=tmp_path,
        localstack_pid=None,
        database_directory=None,
    )


def _start(tier: Tier, name: str, *, says: str | None) -> Path:
    """A forwarder that runs, as its directory shows it; ``says`` is the path of its health, None before it is ready."""
    task = tier.directory / "tasks" / name
    task.mkdir(parents=True)
    (task / "pid").write_text("1")
    if says:
        (task / READY_FILE).write_text(json.dumps({"health_url": f"{tier.api_url}{says}"}))
    return task


def test_a_tier_is_well_when_its_api_and_all_of_its_forwarders_are(tier: Tier) -> None:
    tier.require_healthy()  # forwarders may sleep
    _start(tier, "one", says="/well")
    _start(tier, "two", says="/well")
    tier.require_healthy()


def test_a_forwarder_that_has_ended_is_not_asked(tier: Tier) -> None:
    (_start(tier, "ended", says="/ill") / "pid").unlink()
    tier.require_healthy()


def test_a_forwarder_that_is_not_ready_yet_is_named(tier: Tier) -> None:
    _start(tier, "one", says="/well")
    starting = _start(tier, "two", says=None)
    with pytest.raises(Unavailable, match="not ready yet") as caught:
        tier.require_healthy()
    assert str(starting) in caught.value.hint
    (starting / READY_FILE).write_text(json.dumps({"health_url": f"{tier.api_url}/well"}))
    tier.require_healthy()


def test_a_forwarder_that_is_not_well_is_named(tier: Tier) -> None:
    ill = _start(tier, "ill", says="/ill")
    with pytest.raises(Unavailable, match="is not well") as caught:
        tier.require_healthy()
    assert str(ill) in caught.value.hint


def test_an_api_that_does_not_answer_is_named(tier: Tier) -> None:
    with pytest.raises(Unavailable, match=r"the API at .* does not answer"):
        dataclasses.replace(tier, token="another").require_healthy()
