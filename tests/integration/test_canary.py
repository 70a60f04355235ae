"""The canary against the whole local tier: well when it is well, and telling where it is not."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

import farcall
from farcall_common.errors import FarcallError, ProtocolError, Unauthenticated, Unavailable
from farcall_lambdas.canary import NAME, Ask, Canary, http_caller
from farcall_local.tier import LocalTier
from tests.waiting import WAIT_S

STEPS: Final = ("register_s", "connect_s", "submit_s", "dispatch_s", "record_s", "push_s", "read_s")


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalTier]:
    with LocalTier(tmp_path_factory.mktemp("canary") / "tier", users=("ada",)) as running:
        yield running


@pytest.fixture
def ask(tier: LocalTier) -> Ask:
    return http_caller(tier.api_url, tier.tokens["ada"])


def left_behind(tier: LocalTier) -> list[str]:
    with farcall.Client(tier.api_url, tier.tokens["ada"]) as client:
        return [each["name"] for each in client.get_endpoints()]


def program(tier: LocalTier, **environment: str) -> tuple[int, dict[str, Any]]:
    variables = {"FARCALL_API_URL": tier.api_url, "FARCALL_TOKEN": tier.tokens["ada"], **environment}
    command = [sys.executable, "-W", "error", "-m", "farcall_lambdas.canary"]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.stdout.count("\n") == 1, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_one_round_of_the_command(tier: LocalTier) -> None:
    began = time.monotonic()
    status, told = program(tier)
    assert (status, told.pop("canary")) == (0, "ok")
    assert set(told) == {*STEPS, "canary_s"}
    rounding_s = 0.001
    assert 0 < sum(told[step] for step in STEPS[2:]) <= told["canary_s"] + rounding_s
    assert sum(told[step] for step in STEPS[:2]) + told["canary_s"] <= time.monotonic() - began + rounding_s
    assert left_behind(tier) == []


def test_rounds_leave_one_function_and_no_endpoint(tier: LocalTier, ask: Ask) -> None:
    canary = Canary(ask)
    for _ in range(3):
        canary.run()
    with farcall.Client(tier.api_url, tier.tokens["ada"]) as client:
        assert len(client.get_functions(search=NAME)) == 1
    assert left_behind(tier) == []


def test_remains_of_an_interrupted_round_are_deleted_later(tier: LocalTier, ask: Ask) -> None:
    def cut_short(method: str, path: str, body: dict[str, Any] | None) -> Any:
        if method == "DELETE":
            raise Unavailable("cut short")
        return ask(method, path, body)

    with pytest.raises(Unavailable, match="cut short"):
        Canary(cut_short).run()
    ask("POST", "/v3/endpoints", {"endpoint_name": NAME})  # of a release whose rounds did not say since when
    ask("POST", "/v3/endpoints", {"endpoint_name": "another user's"})
    Canary(ask).run()
    assert left_behind(tier) == ["another user's", NAME]
    Canary(ask, clock=lambda: time.time() + 601).run()
    assert left_behind(tier) == ["another user's"]
    [own] = ask("GET", "/v2/endpoints", None)
    ask("DELETE", f"/v2/endpoints/{own['uuid']}", None)


def test_a_round_does_not_delete_the_endpoint_of_a_concurrent_round(tier: LocalTier, ask: Ask) -> None:
    rounds: list[dict[str, float]] = []

    def in_the_middle(method: str, path: str, body: dict[str, Any] | None) -> Any:
        if path.endswith("/submit") and not rounds:
            rounds.append({})
            rounds.append(Canary(ask).run())  # begins and ends while the other one's agent waits for its task
        return ask(method, path, body)

    rounds.append(Canary(in_the_middle).run())
    assert [set(each) for each in rounds[1:]] == [{*STEPS, "canary_s"}] * 2
    assert left_behind(tier) == []


def test_two_rounds_that_delete_the_same_remains_do_not_fail(ask: Ask) -> None:
    def beaten(method: str, path: str, body: dict[str, Any] | None) -> Any:
        if method == "DELETE":
            ask(method, path, body)
        return ask(method, path, body)

    assert Canary(beaten).run()["canary_s"] > 0


def test_a_hanging_forwarder_is_reported(tier: LocalTier, ask: Ask) -> None:
    forwarder = psutil.Process(tier.state.processes["forwarder"].pid)
    forwarder.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable, match="no Welcome arrived from the forwarder") as caught:
            Canary(ask, within_s=1.0).run()
    finally:
        forwarder.send_signal(signal.SIGCONT)
    assert caught.value.__notes__ == ["during: connect"]
    assert left_behind(tier) == []


@pytest.mark.parametrize(
    ("path", "changed"),
    [("/v2/tasks/", {"result": "01\nsomething else"}), ("/v2/tasks/", {"status": "failed"})],
)
def test_a_wrong_record_is_reported(ask: Ask, path: str, changed: dict[str, Any]) -> None:
    def tampered(method: str, asked: str, body: dict[str, Any] | None) -> Any:
        answer = ask(method, asked, body)
        return {**answer, **changed} if asked.startswith(path) else answer

    with pytest.raises(ProtocolError, match="the API has a different result") as caught:
        Canary(tampered).run()
    assert caught.value.__notes__ == ["during: read"]


def test_a_forwarder_that_sends_another_payload_is_reported(ask: Ask) -> None:
    def tampered(method: str, path: str, body: dict[str, Any] | None) -> Any:
        if path.endswith("/submit"):
            assert body is not None
            body = {**body, "tasks": {key: ["01\nanother"] for key in body["tasks"]}}
        return ask(method, path, body)

    with pytest.raises(ProtocolError, match="a different task than was submitted") as caught:
        Canary(tampered).run()
    assert caught.value.__notes__ == ["during: dispatch"]


def test_a_refusing_or_unreachable_api_is_reported(tier: LocalTier) -> None:
    status, told = program(tier, FARCALL_TOKEN="unknown")
    assert (status, told["canary"], told["code"]) == (1, "failed", Unauthenticated.code)
    assert "during: register" in told["message"]
    status, told = program(tier, FARCALL_API_URL="http://127.0.0.1:9")
    assert (status, told["code"]) == (1, Unavailable.code)


# -- as a Lambda -------------------------------------------------------------------------------------------------------


@pytest.fixture
def invocations(tier: LocalTier) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Lambda's own interface, with the tier's API as the only function; and the events that came in."""
    events: list[dict[str, Any]] = []
    ask = http_caller(tier.api_url, tier.tokens["ada"])

    class Invoke(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            events.append(event)
            answer: dict[str, Any]
            if not self.path.endswith("/functions/farcall-api/invocations"):
                answer = {"errorMessage": "no such function"}
            else:
                try:
                    body = json.loads(event["body"]) if event["body"] else None
                    query = "&".join(f"{key}={value}" for key, value in (event["queryStringParameters"] or {}).items())
                    found = ask(event["httpMethod"], f"{event['path']}?{query}".rstrip("?"), body)
                    answer = {"statusCode": 200, "body": json.dumps(found)}
                except FarcallError as error:
                    answer = {"statusCode": 400, "body": json.dumps(error.record.to_json())}
            told = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *_: object) -> None:
            """Its messages are never read."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Invoke) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", events
        server.shutdown()
        thread.join()


HANDLE: Final = """
import json
from types import SimpleNamespace
from farcall_lambdas.handlers.canary import handle
print(json.dumps(handle({}, SimpleNamespace(aws_request_id="an-invocation"))))
"""


def run_handler(address: str, function: str, directory: Path) -> subprocess.CompletedProcess[str]:
    variables = {
        "AWS_ENDPOINT_URL_LAMBDA": address,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "FARCALL_API_FUNCTION": function,
        "FARCALL_CALLER_KEY": "k" * 32,
    }
    return subprocess.run(
        [sys.executable, "-c", HANDLE],
        env=os.environ | variables,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_a_round_in_a_lambda_logs_the_metric(invocations: tuple[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    address, events = invocations
    done = run_handler(address, "farcall-api", tmp_path)
    assert done.returncode == 0, done.stderr
    took = json.loads(done.stdout)
    [line] = [json.loads(line) for line in done.stderr.splitlines() if '"canary"' in line]
    assert line["message"] == "canary"
    assert line["canary_s"] == took["canary_s"] > 0
    assert {event["requestContext"]["authorizer"]["username"] for event in events} == {NAME}


def test_a_round_that_fails_is_an_error_of_the_lambda(
    invocations: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    done = run_handler(invocations[0], "another", tmp_path)
    assert done.returncode != 0
    assert '"message":"canary failed"' in done.stderr
    assert "canary_s" not in done.stderr
