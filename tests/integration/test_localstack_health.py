"""Health of a tier: its API answers, and each running forwarder is ready and healthy."""

from __future__ import annotations

import dataclasses
import http.server
import json
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farcall_common.errors import Unavailable
from farcall_common.exit_codes import UNHEALTHY
from farcall_localstack import Tier
from farcall_localstack.cli import app
from farcall_localstack.server import READY_FILE


class _Answer(http.server.BaseHTTPRequestHandler):
    """An API that knows one token at ``/v2/version``; a healthy forwarder at ``/healthy``, an unhealthy one
    elsewhere."""

    def do_GET(self) -> None:
        knows = self.headers.get("Authorization") == "Bearer a-token"
        healthy = self.path == "/healthy" or (self.path == "/v2/version" and knows)
        self.send_response(HTTPStatus.OK if healthy else HTTPStatus.SERVICE_UNAVAILABLE)
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


def _start(tier: Tier, name: str, *, health: str | None) -> Path:
    """The directory of a running forwarder; ``health`` is the path of its health check, None before it is ready."""
    task = tier.directory / "tasks" / name
    task.mkdir(parents=True)
    (task / "pid").write_text("1")
    if health:
        (task / READY_FILE).write_text(json.dumps({"health_url": f"{tier.api_url}{health}"}))
    return task


def test_a_tier_is_healthy_if_its_api_and_all_forwarders_are(tier: Tier) -> None:
    tier.require_healthy()  # forwarders may sleep
    _start(tier, "one", health="/healthy")
    _start(tier, "two", health="/healthy")
    tier.require_healthy()


def test_a_forwarder_that_has_ended_is_not_checked(tier: Tier) -> None:
    (_start(tier, "ended", health="/unhealthy") / "pid").unlink()
    tier.require_healthy()


def test_a_starting_forwarder_is_reported_as_not_ready(tier: Tier) -> None:
    _start(tier, "one", health="/healthy")
    starting = _start(tier, "two", health=None)
    with pytest.raises(Unavailable, match="not ready yet") as caught:
        tier.require_healthy()
    assert str(starting) in caught.value.hint
    (starting / READY_FILE).write_text(json.dumps({"health_url": f"{tier.api_url}/healthy"}))
    tier.require_healthy()


def test_an_unhealthy_forwarder_is_reported(tier: Tier) -> None:
    unhealthy = _start(tier, "unhealthy", health="/unhealthy")
    with pytest.raises(Unavailable, match="is unhealthy") as caught:
        tier.require_healthy()
    assert str(unhealthy) in caught.value.hint


def test_an_api_that_does_not_answer_is_reported(tier: Tier) -> None:
    with pytest.raises(Unavailable, match=r"the API at .* does not answer"):
        dataclasses.replace(tier, token="another").require_healthy()


def test_the_command_line_reports_health(tier: Tier) -> None:
    tier.save()
    command = ["status", "--json", "--directory", str(tier.directory)]
    healthy = CliRunner().invoke(app, command)
    assert (healthy.exit_code, json.loads(healthy.output)["healthy"]) == (0, True)
    assert json.loads(healthy.output)["endpoint_url"] == tier.endpoint_url

    dataclasses.replace(tier, token="another").save()
    unhealthy = CliRunner().invoke(app, command)
    assert (unhealthy.exit_code, json.loads(unhealthy.output)["healthy"]) == (UNHEALTHY, False)
    assert "does not answer" in json.loads(unhealthy.output)["problem"]
    told = CliRunner().invoke(app, [command[0], *command[2:]])
    assert (told.exit_code, told.stdout) == (UNHEALTHY, "")
    assert told.stderr.startswith("Unhealthy: [UNAVAILABLE] the API at ")
